"""Runs `fzero doctor`: looks at what this machine has for fzero, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import json as json_
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch

from fzero import __version__
from fzero._utils.path_permissions import exposed, not_writable
from fzero._utils.units import size
from fzero.cli.flags import FLAG
from fzero.runtime.build.build import has_compiler

OPTIONAL = {
    "transformers": "pip install 'transformers>=5,<6' (for fz.hf and fzero plan --hf)",
    "accelerate": "pip install accelerate (for fz.hf.Trainer)",
    "peft": "pip install peft (for adapters)",
    "fsspec": "pip install fsspec (for checkpoints in object stores)",
    "matplotlib": "pip install matplotlib (for pictures of a plan)",
    "vl-convert-python": "pip install vl-convert-python (for pages of a plan)",
    "tensorboard": "pip install tensorboard (for fz.log)",
}
"""Packages that only some features need, and how to install them."""

_LITTLE_SHARED = 1 << 30
"""Bytes of /dev/shm below which in-memory checkpoints of a small model may not fit; a container has 64 MB."""


@dataclass(frozen=True)
class Diagnosis:
    """One row of the report.

    Attributes:
        group: "versions", "optional packages" or "machine".
        name: what was looked at.
        value: what was found.
        fix: how to get what is missing, or how to work without it; "" if nothing is.
        broken: whether fzero cannot work without it.
    """

    group: str
    name: str
    value: str
    fix: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Doctor:
    """Prints versions, compiler, devices and memory of this machine, what is missing, and how to get it."""

    json: Annotated[bool, FLAG] = False
    """print JSON"""

    def run(self) -> int:
        found = [*versions(), *optional_packages(), *machine()]
        broken = any(finding.broken for finding in found)
        if self.json:
            print(json_.dumps({"ok": not broken, "findings": [asdict(finding) for finding in found]}, indent=1))
        else:
            print("\n".join(_lines(found)))
            print("\nfzero cannot work here: see `Fix` above" if broken else "\nfzero can train on this machine")
        return int(broken)


def versions() -> Iterator[Diagnosis]:
    """Yields fzero, Python, and the packages that fzero needs."""
    yield Diagnosis("versions", "fzero", f"{__version__} in {Path(__file__).parents[1]}")
    yield Diagnosis("versions", "Python", f"{platform.python_version()} on {platform.platform(terse=True)}")
    yield Diagnosis("versions", "torch", torch.__version__)
    for name in _required():
        version = _version(name)
        fix = "" if version else f"pip install {name}"
        if name != "torch":
            yield Diagnosis("versions", name, version or "not installed", fix, broken=not version)


def optional_packages() -> Iterator[Diagnosis]:
    """Yields packages that only some features need."""
    for name, install in OPTIONAL.items():
        version = _version(name)
        yield Diagnosis("optional packages", name, version or "not installed", "" if version else install)


def machine() -> Iterator[Diagnosis]:
    """Yields the compiler, the devices, the memory and the cache."""
    yield compiler()
    yield Diagnosis("machine", "CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Diagnosis("machine", "memory", size(memory))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            yield Diagnosis("machine", f"cuda:{i}", f"{about.name}, {size(about.total_memory)}")
    else:
        built = torch.version.cuda is not None
        fix = "check nvidia-smi if this machine has a GPU" if built else ""
        why = "none" if built else "none: this torch is built for the CPU"
        yield Diagnosis("machine", "CUDA devices", why, fix)
    yield shared_memory()
    yield cache()


def compiler() -> Diagnosis:
    """Looks for the C++ compiler that Inductor uses."""
    name = os.environ.get("CXX", "g++")
    if has_compiler():
        return Diagnosis("machine", "C++ compiler", str(shutil.which(name)))
    get = "apt install g++, or dnf install gcc-c++; without one use backend='eager' on a CPU"
    if "CXX" in os.environ:
        get = f"set CXX to a compiler that exists, or unset it to use g++; {get}"
    return Diagnosis("machine", "C++ compiler", f"{name} is not found", get)


def shared_memory() -> Diagnosis:
    """Looks at /dev/shm, where `fz.run` keeps in-memory checkpoints."""
    try:
        about = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Diagnosis("machine", "/dev/shm", str(error), "mount it, or use python -m fzero.run --memory DIR")
    little = about.total < _LITTLE_SHARED
    fix = "docker run --shm-size=8g, if you use fz.run (in-memory checkpoints)" if little else ""
    return Diagnosis("machine", "/dev/shm", f"{size(about.total)}, {size(about.free)} free", fix)


def cache() -> Diagnosis:
    """Looks at the compilation cache, without creating it."""
    where = os.environ.get("FZERO_CACHE") or "~/.cache/fzero"
    if where == "off":
        return Diagnosis("machine", "cache", "off (FZERO_CACHE)", "every start compiles: unset FZERO_CACHE")
    folder = Path(where).expanduser()
    functions = folder / "functions"
    is_new = not functions.is_dir()
    if (why := _unusable(functions)) is not None:
        return Diagnosis("machine", "cache", f"{folder} is not used: {why}", "set FZERO_CACHE to a folder of your own")
    if is_new:
        return Diagnosis("machine", "cache", f"{folder}, empty")
    nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return Diagnosis("machine", "cache", f"{folder}, {size(nbytes)}")


def _unusable(folder: Path) -> str | None:
    """Returns why a run could not use or create this folder; None if it could."""
    place = folder
    # A folder that does not exist yet can be created if its nearest existing parent allows it.
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder"
    # Only the owner can replace a folder inside a sticky one, such as /tmp, so others may write to that.
    is_sticky = place != folder and place.stat().st_mode & stat.S_ISVTX
    return not_writable(place) or (None if is_sticky else exposed(place))


def _required() -> list[str]:
    """Returns the names of the packages that fzero needs, without those of its extras."""
    try:
        lines = importlib.metadata.requires("fzero") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was not installed
        return []
    # Everything before the first character that a name cannot contain, such as ">" or "[".
    return [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _lines(found: list[Diagnosis]) -> Iterator[str]:
    """Formats findings as lines of about 80 columns; a fix has a line of its own."""
    group, width = "", max(len(finding.name) for finding in found)
    for finding in found:
        if finding.group != group:
            yield from ([""] if group else [])
            yield finding.group
            group = finding.group
        yield f"  {finding.name:<{width}}  {finding.value}"
        if finding.fix:
            yield f"  {'':<{width}}  Fix: {finding.fix}" if finding.broken else f"  {'':<{width}}  {finding.fix}"
