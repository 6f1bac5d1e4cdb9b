"""Finds the CPU cores that a rank may use, and binds a rank to the cores closest to its GPU.

[Note: beside a GPU] Host memory that a GPU copies from is fastest on the NUMA node that the GPU is attached to, both
for the GPU and for the cores of that node. If the system names the node, each thread of the process is bound to those
of its cores that belong to it. Threads that the user has bound elsewhere are left alone, and so are all threads if
none of their cores belongs to the node. `make_mesh(bind_cores=False)` binds nothing. Threads and processes that are
started later inherit the cores.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

logger = logging.getLogger("fzero")

_SYSTEM = Path("/sys")
_at_start: frozenset[int] | None = None  # the cores of this process before it was bound


def own_cores() -> frozenset[int]:
    """Returns the cores that this process may use now, by number."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def cores_at_start() -> frozenset[int]:
    """Returns the cores that this process could use before `keep_beside` bound it."""
    return _at_start or own_cores()


def cores_of_host() -> frozenset[int]:
    """Returns the cores that the ranks of this host may use together, which are those of their launcher. Slurm may
    have bound this process to only some of them.
    """
    try:
        return own_cores() | os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        return own_cores()


def share_of(own: frozenset[int], everyone: Iterable[frozenset[int]]) -> int:
    """Returns the number of cores that are left for one process if others may use the same cores.

    Args:
        own: the cores that it may use.
        everyone: the cores that each process of its host may use, including its own.

    Example:
        >>> both = frozenset(range(8))
        >>> share_of(both, [both, both]), share_of(frozenset({0, 1}), [frozenset({0, 1}), frozenset({2, 3})])
        (4, 2)
    """
    users = Counter(core for cores in everyone for core in cores)
    return max(1, int(sum(1 / users[core] for core in own) + 1e-6))


def spelled(cores: Iterable[int]) -> str:
    """Returns numbers of cores in the system's notation; `listed` parses it.

    Example:
        >>> spelled([0, 1, 2, 3, 8]), sorted(listed("0-3,8"))
        ('0-3,8', [0, 1, 2, 3, 8])
    """
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def listed(text: str) -> frozenset[int]:
    """Returns the cores in a text like `"0-3,8"`."""
    spans = (span.partition("-") for span in text.strip().split(",") if span)
    return frozenset(core for a, _, b in spans for core in range(int(a), int(b or a) + 1))


def node_of(device: torch.device) -> int:
    """Returns the NUMA node of a GPU, or -1 if the system does not say."""
    gpu = torch.cuda.get_device_properties(device)
    bus = f"bus/pci/devices/{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        return int((_SYSTEM / bus / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def keep_beside(device: torch.device) -> None:
    """Binds this process to the cores closest to its GPU: see [Note: beside a GPU]."""
    global _at_start
    if not hasattr(os, "sched_setaffinity") or (node := node_of(device)) < 0:
        return
    before = own_cores()
    try:
        beside = before & listed((_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text())
        if not beside or beside == before:
            return
        for thread in map(int, os.listdir("/proc/self/task")):
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, beside)
    except (OSError, ValueError) as error:  # a thread has ended, or a container hides the cores that it may not use
        logger.info("fzero.make_mesh: not bound to NUMA node %d, where %s is: %s", node, device, error)
        return
    _at_start = _at_start or before
    logger.info("fzero.make_mesh: bound to cores %s of NUMA node %d, where %s is", spelled(beside), node, device)


__all__ = ["cores_at_start", "cores_of_host", "keep_beside", "listed", "node_of", "own_cores", "share_of", "spelled"]
