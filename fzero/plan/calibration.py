"""Reads and writes the file with a machine's measured rates, and identifies the machine that the file is valid for.

runtime/calibrate.py measures the rates.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fzero._utils.bounded_json import contents, parsed
from fzero._utils.cpu_affinity import cores_at_start
from fzero.errors import FzeroValueError
from fzero.plan.device import MOST
from fzero.plan.device_lookup import FORMAT, Device

_REDO = "measure again on this machine: fzero calibrate"


def calibration_path(device_type: str = "cpu") -> Path:
    """Returns the path of this machine's calibration file: under $FZERO_CACHE, by default ~/.cache/fzero."""
    where = os.environ.get("FZERO_CACHE", "")
    # "off" turns the cache of compiled functions off and is not a path
    folder = Path(where) if where not in ("", "off") else Path.home() / ".cache" / "fzero"
    return folder / ("calibration.json" if device_type == "cpu" else f"calibration_{device_type}.json")


def save_calibration(device: Device, path: Path) -> None:
    """Writes a calibration file atomically: a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(device.to_json() + "\n")
    os.replace(part, path)


def load_calibration(path: str | Path) -> Device:
    """Returns the device of a calibration file.

    Raises:
        FzeroValueError: if the file is not a calibration, or belongs to another machine, torch version or format; the
            error shows both sides.
    """
    try:
        text = contents(Path(path), MOST)
        data = parsed(text, dict[str, Any])
        found = {"format": data["format"], "torch": data["torch"], **data["machine"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FzeroValueError(
            "calibrate", f"{path} is not a calibration file", [f"{type(error).__name__}: {error}"], _REDO
        ) from error
    here = {"format": FORMAT, "torch": torch.__version__}
    wrong = [f"{k}: {found.get(k)!r} in the file, {v!r} here" for k, v in here.items() if found.get(k) != v]
    if wrong := [*wrong, *elsewhere(data["machine"])]:
        raise FzeroValueError(
            "calibrate", f"{path} was measured on another machine or by another version", wrong, _REDO
        )
    return Device.from_json(text)


def elsewhere(measured: Mapping[str, Any]) -> list[str]:
    """Returns the differences between the machine of a calibration, `Device.machine`, and this machine."""
    here = machine(str(measured.get("device_type", "cpu")))
    return [f"{k}: {measured.get(k)!r} in the file, {v!r} here" for k, v in here.items() if measured.get(k) != v]


def machine(device_type: str) -> dict[str, Any]:
    """Returns a description of the machine that a calibration is valid for."""
    cuda = device_type == "cuda" and torch.cuda.is_available()
    return {
        "device_type": device_type,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(cores_at_start()),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def cpu_model() -> str:
    """Returns the name that the processor reports."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
