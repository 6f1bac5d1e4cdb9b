"""Calibrates this machine: `calibrate` measures a `Device` in a few seconds and stores it in a file.

# one process: starts as many processes as the host has room for ranks, and measures with them
fzero calibrate
# or under torchrun: measures the links between these ranks
torchrun --nproc-per-node 8 -m fzero.runtime.calibrate
"""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fzero._utils.arguments import number
from fzero._utils.bounded_json import parsed
from fzero._utils.cpu_affinity import cores_at_start
from fzero._utils.path_permissions import not_writable, unwritable_file
from fzero.comm.control_group import world
from fzero.errors import FzeroValueError
from fzero.memory.disk import check
from fzero.mesh import Mesh, close_mesh, make_mesh
from fzero.plan.calibration import calibration_path, cpu_model, machine, save_calibration
from fzero.plan.device_lookup import KNOWN, Device, Link, peaks_of
from fzero.runtime.probes import SCRATCH, rates

_PATIENCE = 300.0  # seconds that the processes that measure together may take in addition to measuring


def calibrate(
    mesh: Mesh | None = None,
    seconds: float = 5.0,
    progress: Callable[[str], None] | None = None,
    path: str | Path | None = None,
    directory: str | Path | None = None,
) -> Device:
    """Measures this machine and stores the result in a file.

    Matrix products are measured per dtype as a program runs them, in sizes that layers have. Links are measured with
    the mesh's own transport. Ranks measure at the same time, because they share the host's memory and cores. Without a
    mesh of several processes, processes are started for the measurement: as many as the host has room for (cores /
    threads of this process on a CPU, at most two; CUDA devices).

    Args:
        mesh: from `make_mesh`, if every rank of a host makes this call; None, or a mesh of a single process: see above.
        seconds: approximate duration of the measurement; starting processes and compiling one small function take
            additional time.
        progress: called with a word on what is being measured.
        path: of the file; by default `calibration_path`, where every plan finds it.
        directory: the directory whose disk is measured, that of `offload("nvme", path=)`. By default the system's
            directory for temporary files. The measurement uses 128 MiB per rank there.

    Communication: over the last axis of the mesh with several ranks, gathers and reductions of 16 MiB and of 1 KiB per
    rank.

    Returns: the device; rank 0's result on every rank.

    Raises:
        FzeroValueError: the processes that measure together failed, with the message of each; a directory that cannot
            hold scratch files; a file that cannot be written.
    """
    if problems := number("seconds", seconds, above=0, below=math.inf):
        raise FzeroValueError("calibrate", "this is not enough time to measure", problems, "e.g. seconds=5")
    if directory is not None:
        check(directory, SCRATCH)
    progress = progress or (lambda what: None)
    mesh = mesh or _alone()
    file = Path(path) if path is not None else calibration_path(mesh.device_type)
    why = _unwritable(file) if mesh.rank == 0 else ""
    if mesh.size > 1:
        why = mesh.control.all_gather(why, str, "calibrate")[0]  # every rank raises, before any of them measures
    if why:
        raise FzeroValueError("calibrate", f"{file} cannot be written: {why}", fix="path= names a file that can be")
    together = _places(mesh.device_type)
    if mesh.size > 1:
        measured = _of_first(rates(mesh, seconds, progress, directory))
    elif together > 1:
        progress(f"{together} processes")
        measured = _spawned(together, mesh.device_type, seconds, directory)
    else:
        measured = rates(mesh, seconds, progress, directory)
    device = _device(measured, mesh.device_type, min(mesh.size, together) if mesh.size > 1 else together)
    if mesh.rank == 0:
        save_calibration(device, file)
    return device


def _unwritable(file: Path) -> str:
    """Returns why a calibration cannot be written to a file, whose directory is created; "" if it can."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return unwritable_file(file) or not_writable(file.parent) or ""


def _alone() -> Mesh:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return Mesh({"data": 1}, 0, device)


def _places(device_type: str) -> int:
    """Returns the number of ranks that measure together on this host: on a CPU two if it has enough cores, otherwise
    one per CUDA device."""
    return (
        torch.cuda.device_count()
        if device_type == "cuda"
        else max(1, min(2, len(cores_at_start()) // torch.get_num_threads()))
    )


def _device(measured: dict[str, Any], device_type: str, num_ranks: int) -> Device:
    """Makes a device from the measurements. What a single process cannot measure is taken from the generic device."""
    generic = KNOWN["cpu" if device_type == "cpu" else "h100"]
    links = {**generic.links, **measured["links"]}
    assumed = ", ".join(f"link {name}" for name in links if name not in measured["links"])
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    cuda = device_type == "cuda"
    return replace(
        generic,
        **{**measured, "links": links},
        name=torch.cuda.get_device_name(0) if cuda else cpu_model(),
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else _host_memory() // num_ranks,
        devices_per_host=torch.cuda.device_count()
        if cuda
        else max(1, len(cores_at_start()) // torch.get_num_threads()),
        source=f"measured {when}, {num_ranks} ranks at once" + (f"; {assumed} as of {generic.name}" if assumed else ""),
        host=None,
        machine=machine(device_type),
        peak_flops=peaks_of(torch.cuda.get_device_name(0)) if cuda else {},
    )


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_first(measured: dict[str, Any]) -> dict[str, Any]:
    """Returns rank 0's measurements on every rank, so that all ranks plan alike."""
    return _measurements(world().all_gather_bytes(json.dumps(measured, default=vars).encode(), "calibrate")[0])


def _spawned(num_ranks: int, device_type: str, seconds: float, directory: str | Path | None) -> dict[str, Any]:
    """Starts processes as torchrun would, and returns their measurements."""
    # Port 0: the system chooses one that is free. The server stays in this process, as in torchrun's agent.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
    }
    # With "True", rank 0 connects to the server above instead of starting its own on the same port.
    common |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": torch.get_num_threads()}
    command = [
        sys.executable,
        "-m",
        "fzero.runtime.calibrate",
        device_type,
        str(seconds),
        *([str(directory)] if directory else []),
    ]
    running = []
    for rank in range(num_ranks):
        env = {**os.environ, **{k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=_PATIENCE + 2 * seconds) for process in running]
    except subprocess.TimeoutExpired:
        said = [("", f"not done after {_PATIENCE + 2 * seconds:g} s")] * num_ranks
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    failed = [
        f"rank {rank}: {(err.strip() or 'no output').splitlines()[-1]}"
        for rank, (out, err) in enumerate(said)
        if not out.strip()
    ]
    if failed:
        raise FzeroValueError(
            "calibrate",
            "the processes that measure together failed",
            failed,
            "look at their output; or start them with torchrun",
        )
    # Libraries may have printed lines before the last one.
    return _measurements(said[0][0].splitlines()[-1])


def _measurements(text: str | bytes) -> dict[str, Any]:
    """Parses the measurements of another process from JSON."""
    found = parsed(text)
    for name in ("host_copy", "disk_read", "disk_write"):
        found[name] = Link(**found[name])
    found["links"] = {k: Link(**v) for k, v in found["links"].items()}
    return found


def _main() -> None:
    """The main function of one of several processes that measure together: prints what rank 0 measured. Under torchrun,
    without arguments, it stores the result in the file."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if len(sys.argv) == 1:
        device = calibrate(make_mesh())
        if int(os.environ.get("RANK", 0)) == 0:
            print(device.to_json())
    else:
        mesh = make_mesh(device=sys.argv[1])
        found = _of_first(rates(mesh, float(sys.argv[2]), directory=next(iter(sys.argv[3:]), None)))
        print(json.dumps(found, default=vars))
    close_mesh()


if __name__ == "__main__":
    _main()
