"""Chooses the device of each rank, and checks that the devices and axes of all ranks agree."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from fzero._compat import compat
from fzero.comm.control_messages import Notes, timed_out
from fzero.comm.rendezvous import absent, replaced
from fzero.errors import DivergenceError, FzeroValueError


def check_default(owner: str, device_type: str) -> None:
    """Rejects a default device that is neither the CPU nor of the mesh's type: new tensors of a state would be created
    on it.

    Args:
        owner: the function of fzero that the error names.
        device_type: of the mesh.

    Raises:
        FzeroValueError: naming the default device.
    """
    default = compat.default_device()
    if default.partition(":")[0] in ("cpu", device_type):
        return
    what = f"the default device is {default!r}, and the mesh has {device_type!r}"
    problems = [f"torch.set_default_device({default!r}), or torch.device({default!r}) around this call"]
    fix = f"torch.set_default_device(None) before; have torch.device({default!r}) only around the making of a model"
    raise FzeroValueError(owner, what, problems, fix)


def choose_device(
    asked: str | None, local: int, num_local: int, num_cuda: int, one_visible: bool, others: Sequence[str] = ()
) -> tuple[torch.device, str | None]:
    """Chooses the device of this process. Also returns a warning if a better device could have been used.

    Args:
        asked: the device that the user asked for, if any.
        local, num_local: the local rank of this process, and the number of processes on this host.
        num_cuda: the number of CUDA devices that this process sees.
        one_visible: whether each process sees only its own CUDA device, as with Slurm and Ray.
        others: accelerators of other kinds on this machine, which fzero does not support (`unsupported`).

    Raises:
        FzeroValueError: there is no such device, or not one for every process.
    """
    seen = (
        f"{num_cuda} CUDA device{'s' * (num_cuda != 1)} for {num_local} process{'es' * (num_local != 1)} on this host"
    )
    lines = [seen, *(f"{name}: fzero does not support it" for name in others)]
    if asked not in (None, "cpu", "cuda"):
        fix = "device='cpu' or 'cuda', or leave it out"
        raise FzeroValueError(
            "make_mesh",
            f"device {asked!r} is not supported: fzero runs on CPUs and on NVIDIA's CUDA devices",
            lines,
            fix,
        )
    if asked != "cpu" and num_cuda == 1 and (one_visible or num_local == 1):
        return torch.device("cuda", 0), None
    if asked != "cpu" and num_cuda >= max(num_local, local + 1):
        return torch.device("cuda", local), None
    if asked == "cuda":
        fix = (
            f"start at most {num_cuda} processes on this host, or take device='cpu'"
            if num_cuda
            else "device='cpu', or a PyTorch that sees the GPU"
        )
        raise FzeroValueError("make_mesh", "there are fewer devices 'cuda' than processes", lines, fix)
    if others and asked is None and not num_cuda:
        what = f"fzero.make_mesh: uses the CPU: {', '.join(others)} is present, but fzero does not support it"
        return torch.device("cpu"), f"{what}; pass device='cpu' if that is intended"
    unused = (
        f"fzero.make_mesh: CUDA is not used: {seen}; start as many processes as devices, or pass device='cpu'"
        if num_cuda and asked is None
        else None
    )
    return torch.device("cpu"), unused


def unsupported(hip: str | None, num_cuda: int, has_xpu: bool, has_mps: bool) -> list[str]:
    """Returns the names of this machine's accelerators that fzero does not support.

    Args:
        hip: the ROCm version that PyTorch is built for, if any. PyTorch presents ROCm devices as CUDA devices.
        num_cuda: the number of devices that PyTorch presents as CUDA devices.
        has_xpu, has_mps: whether there is an Intel XPU, or an Apple GPU.
    """
    found = [f"{num_cuda} device{'s' * (num_cuda != 1)} of ROCm {hip}"] if hip and num_cuda else []
    return found + ["an XPU"] * has_xpu + ["MPS"] * has_mps


def crowded(num_threads: int, num_local: int, num_cores: int) -> str | None:
    """Returns a warning if the CPU processes of this host together have more threads than cores, with more than one
    thread each."""
    if num_threads == 1 or num_threads * num_local <= num_cores:
        return None
    return (
        f"{num_local} processes of this host compute with {num_threads} threads each, on {num_cores} cores: start them "
        f"with OMP_NUM_THREADS={max(1, num_cores // num_local)}"
    )


def idle(num_threads: int, num_cores: int) -> str | None:
    """Returns a warning if a rank that also computes on the host of its GPU leaves cores idle. torchrun gives each rank
    one thread by default."""
    if num_threads >= num_cores:
        return None
    return (
        f"updates on the host run on {num_threads} of the {num_cores} cores that each rank has: start the ranks with "
        f"OMP_NUM_THREADS={num_cores}"
    )


def device_problems(names: Sequence[str]) -> list[str]:
    """Lists problems with the devices of the ranks: different device types, or one GPU shared by several ranks.

    Args:
        names: for each rank "cpu", or "cuda" followed by a name that is unique to the GPU.
    """
    # Reversed, so that of each kind the first rank is kept.
    kinds = {name.split(" ")[0]: rank for rank, name in reversed(list(enumerate(names)))}
    if len(kinds) > 1:
        return [f"rank {rank} is on {kind!r}" for kind, rank in sorted(kinds.items(), key=lambda kind: kind[1])]
    ranks = {name: [r for r, other in enumerate(names) if other == name] for name in names if name != "cpu"}
    return [
        f"ranks {', '.join(map(str, same))} share one GPU, {name.split(' ', 1)[1]}"
        for name, same in ranks.items()
        if len(same) > 1
    ]


def compare(
    store: dist.Store, rank: int, world: int, device: torch.device, axes: Mapping[str, int], timeout: float
) -> None:
    """Raises on every rank if the devices of all ranks, or the axes that they were given, do not form a mesh."""
    notes, ranks = Notes(store, "fzero/device", rank), range(world)
    notes.write("made", (", ".join(f"{name}={n}" for name, n in axes.items()), _name_of(device)))
    if missing := absent(store, notes.keys("made", ranks), timeout):
        again = replaced(store)
        came = [f"rank {r} has left" if again else f"rank {r} {timed_out(timeout)}" for r in (again or missing)]
        raise DivergenceError("make_mesh", "not every rank has arrived", came, "look at these ranks' errors first")
    given, names = zip(*notes.read("made", ranks, tuple[str, str]).values(), strict=True)
    if len({*given}) > 1:
        problems = [f"rank {given.index(text)}: {text}" for text in dict.fromkeys(given)]
        fix = 'give every rank the same axes; of "local", start as many processes on every host'
        raise FzeroValueError("make_mesh", "the ranks have different axes", problems, fix)
    if problems := device_problems(names):
        fix = (
            "give each process its own GPU (LOCAL_RANK, LOCAL_WORLD_SIZE, CUDA_VISIBLE_DEVICES), or device='cpu' to all"
        )
        raise FzeroValueError("make_mesh", "the ranks' devices do not make a mesh", problems, fix)


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    found = torch.cuda.get_device_properties(device)
    # Not by the index: a process that sees only its own GPU calls it 0, whichever it is.
    return f"cuda {socket.gethostname()} {getattr(found, 'uuid', '')} {getattr(found, 'pci_bus_id', device.index)}"


def one_visible(environment: Mapping[str, str]) -> bool:
    """Whether the environment shows this process exactly one GPU.

    It is either this process's own GPU or the same one that its neighbours see; `compare` finds out which.
    """
    named = [
        environment[name]
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        if name in environment
    ]
    return bool(named) and all(devices and "," not in devices for devices in named)
