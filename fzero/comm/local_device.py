"""Chooses the device of each rank, and compares those of all ranks, and their axes."""

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
    """Refuses a default device that is neither a CPU nor of the mesh's type: new tensors of a state would be on it.

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
    fix = f"torch.set_default_device(None) before; have torch.device({default!r}) around the making of a model alone"
    raise FzeroValueError(owner, what, problems, fix)


def choose_device(
    asked: str | None, local: int, num_local: int, num_cuda: int, one_visible: bool, others: Sequence[str] = ()
) -> tuple[torch.device, str | None]:
    """The device of this process, and a warning if it could have been a better one.

    Args:
        asked: what the user asked for, if anything.
        local, num_local: this process among those of its host.
        num_cuda: how many CUDA devices it sees.
        one_visible: whether each process sees a CUDA device of its own only, as Slurm and Ray arrange it.
        others: accelerators of other kinds that this machine has, which nothing here runs on (`unsupported`).

    Raises:
        FzeroValueError: no such device, or not one for every process.
    """
    seen = (
        f"{num_cuda} CUDA device{'s' * (num_cuda != 1)} for {num_local} process{'es' * (num_local != 1)} on this host"
    )
    lines = [seen, *(f"{name}: fzero does not run on it" for name in others)]
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
        raise FzeroValueError("make_mesh", "there is no device 'cuda' for every process", lines, fix)
    if others and asked is None and not num_cuda:
        what = f"fzero.make_mesh: takes the CPU: {', '.join(others)} is here, and fzero does not run on it"
        return torch.device("cpu"), f"{what}; ask for device='cpu' if that is meant"
    unused = (
        f"fzero.make_mesh: CUDA is not used: {seen}; start as many processes as devices, or ask for device='cpu'"
        if num_cuda and asked is None
        else None
    )
    return torch.device("cpu"), unused


def unsupported(hip: str | None, num_cuda: int, has_xpu: bool, has_mps: bool) -> list[str]:
    """The accelerators of a machine that nothing here runs on, by name.

    Args:
        hip: the version of ROCm that PyTorch is built for, whose devices go by the name of CUDA.
        num_cuda: how many devices go by that name.
        has_xpu, has_mps: whether there is a device of Intel's, or of Apple's.
    """
    found = [f"{num_cuda} device{'s' * (num_cuda != 1)} of ROCm {hip}"] if hip and num_cuda else []
    return found + ["an XPU"] * has_xpu + ["MPS"] * has_mps


def crowded(num_threads: int, num_local: int, num_cores: int) -> str | None:
    """A text if the CPU processes of this host have more threads than it has cores, and more than one each."""
    if num_threads == 1 or num_threads * num_local <= num_cores:
        return None
    return (
        f"{num_local} processes of this host compute with {num_threads} threads each, on {num_cores} cores: start them "
        f"with OMP_NUM_THREADS={max(1, num_cores // num_local)}"
    )


def idle(num_threads: int, num_cores: int) -> str | None:
    """A text if a rank that also computes on the host of its GPU leaves cores idle: torchrun gives each a thread."""
    if num_threads >= num_cores:
        return None
    return (
        f"updates on the host run on {num_threads} of the {num_cores} cores that each rank has: start the ranks with "
        f"OMP_NUM_THREADS={num_cores}"
    )


def device_problems(names: Sequence[str]) -> list[str]:
    """Problems of the ranks' devices, given as "cpu" or as "cuda" with a name that no other GPU has: other types, or a
    GPU for several ranks."""
    kinds = {name.split(" ")[0]: rank for rank, name in reversed(list(enumerate(names)))}
    if len(kinds) > 1:
        return [f"rank {rank} is on {kind!r}" for kind, rank in sorted(kinds.items(), key=lambda kind: kind[1])]
    ranks = {name: [r for r, other in enumerate(names) if other == name] for name in names if name != "cpu"}
    return [
        f"ranks {', '.join(map(str, same))} have one GPU, {name.split(' ', 1)[1]}"
        for name, same in ranks.items()
        if len(same) > 1
    ]


def compare(
    store: dist.Store, rank: int, world: int, device: torch.device, axes: Mapping[str, int], timeout: float
) -> None:
    """Raises on every rank if the devices of all, or the axes that they were given, do not make a mesh."""
    notes, ranks = Notes(store, "fzero/device", rank), range(world)
    notes.write("made", (", ".join(f"{name}={n}" for name, n in axes.items()), _name_of(device)))
    if missing := absent(store, notes.keys("made", ranks), timeout):
        again = replaced(store)
        came = [f"rank {r} has left" if again else f"rank {r} {timed_out(timeout)}" for r in (again or missing)]
        raise DivergenceError("make_mesh", "not every rank has come", came, "look at these ranks' errors first")
    given, names = zip(*notes.read("made", ranks, tuple[str, str]).values(), strict=True)
    if len({*given}) > 1:
        problems = [f"rank {given.index(text)}: {text}" for text in dict.fromkeys(given)]
        fix = 'give every rank the same axes; of "local", start as many processes on every host'
        raise FzeroValueError("make_mesh", "the ranks have different axes", problems, fix)
    if problems := device_problems(names):
        fix = (
            "give each process a GPU of its own (LOCAL_RANK, LOCAL_WORLD_SIZE, CUDA_VISIBLE_DEVICES), or device='cpu' "
            "to all"
        )
        raise FzeroValueError("make_mesh", "the ranks' devices do not make a mesh", problems, fix)


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    found = torch.cuda.get_device_properties(device)
    return f"cuda {socket.gethostname()} {getattr(found, 'uuid', '')} {getattr(found, 'pci_bus_id', device.index)}"


def one_visible(environment: Mapping[str, str]) -> bool:
    """Whether the environment shows this process one GPU: its own, or, as `compare` finds out, the same as its
    neighbours."""
    named = [
        environment[name]
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        if name in environment
    ]
    return bool(named) and all(devices and "," not in devices for devices in named)
