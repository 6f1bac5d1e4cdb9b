"""Builds a device that computes nothing: a CUDA build of PyTorch, and one library in place of all of NVIDIA's.

fake.cpp is the runtime, the driver, cuBLAS, cuDNN and NCCL as far as their calls matter. Every other function that
PyTorch's libraries leave undefined becomes a weak one that returns 0, or a handle if its name says Create.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRITON = {"2.13.0": "3.7.1", "2.11.0": "3.6.0"}
"""The version of Triton that each version of PyTorch asks for."""
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
SONAMES = (
    *(f"lib{name}.so.13" for name in ("cublas", "cublasLt", "cudart", "nvJitLink", "nvrtc")),
    *(f"lib{name}.so.12" for name in ("cufft", "cusolver", "cusparse")),
    *("libcuda.so", "libcuda.so.1", "libcudnn.so.9", "libcufile.so.0", "libcupti.so.13", "libcurand.so.10"),
    *("libcusparseLt.so.0", "libnccl.so.2", "libnvshmem_host.so.3"),
)
_OURS = re.compile(r"(cu|nccl|nvrtc|nvJitLink|nvshmem|cupti)[A-Za-z_0-9]+")


def built(folder: Path, torch: str) -> dict[str, str]:
    """The environment of a process on the device, which is built in `folder` unless it is there.

    The wheel of PyTorch comes from the package index: 527 MB.
    """
    site, include, links, library = (folder / name for name in ("site", "include", "links", "libfake.so"))
    if not (site / "torch").exists():
        for what in (f"torch=={torch}", f"triton=={TRITON[torch]}"):
            _fetched(what, folder / "wheels", site)
    if not include.exists():
        for what in HEADERS:
            _fetched(what, folder / "wheels", include)
    if not library.exists() or library.stat().st_mtime < (HERE / "fake.cpp").stat().st_mtime:
        (folder / "rest.cpp").write_text(_rest(site / "torch" / "lib"))
        found = next(include.rglob("cuda_runtime_api.h")).parent
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{found}", str(HERE / "fake.cpp")]
        subprocess.run([*command, str(folder / "rest.cpp"), "-o", str(library)], check=True)
    links.mkdir(exist_ok=True)
    for name in SONAMES:
        if not (links / name).is_symlink():
            (links / name).symlink_to(library)
    paths = [str(site), str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(links),
        "TRITON_LIBCUDA_PATH": str(links),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
    }


def _fetched(what: str, wheels: Path, into: Path) -> None:
    """Unpacks a wheel of the package index, without what it depends on. The settings of pip that name another build of
    PyTorch are left out."""
    print(f"fetching {what}", file=sys.stderr, flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL")}
    env |= {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), what]
    subprocess.run(command, check=True, env=env)
    name = re.split("[=<>]", what)[0].replace("-", "_")
    for wheel in wheels.glob(f"{name}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    for script in (into / "triton").rglob("bin/*"):
        script.chmod(0o755)


def _rest(libraries: Path) -> str:
    """C++ of the functions that PyTorch's libraries leave undefined."""
    names = set[str]()
    for library in libraries.glob("*.so*"):
        out = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True).stdout
        names |= {line.split()[-1].partition("@")[0] for line in out.splitlines()}
    weak, lines = '__attribute__((visibility("default"), weak)) long', ["#include <cstdlib>", 'extern "C" {']
    for name in sorted(n for n in names if _OURS.fullmatch(n)):
        makes = "Create" in name
        lines.append(
            f"{weak} {name}({'void **p' if makes else ''}) {{ {'*p = malloc(256); ' if makes else ''}return 0; }}"
        )
    return "\n".join([*lines, "}", ""])


def environment_of_rank(
    env: Mapping[str, str], rank: int, size: int, port: int, one_visible: bool = False
) -> dict[str, str]:
    """Of a rank that sees the GPUs of all ranks, or its own alone, as number 0: so Slurm shows them."""
    if one_visible:
        env = {**env, "CUDA_VISIBLE_DEVICES": str(rank), "FAKE_FIRST": str(rank)}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FAKE_GPUS": str(1 if one_visible else size)}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**env, **where, **ranks}
