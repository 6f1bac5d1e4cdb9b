"""Counts the memory of a process besides its program: the interpreter and libraries, and the context of a device.

A plan counts what a program allocates. A container's limit, or the memory of a card, must hold the rest too. The
interpreter with its libraries is measured once: when a machine is calibrated, or where `fzero plan --hf` makes the
plan. The rest is assumed, and marked as such.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import NamedTuple

from fzero.plan.device import Device

INTERPRETER = 450 << 20
"""Assumed for a machine that is not calibrated: Python, torch and its compiler, fzero."""
CONTEXT = 600 << 20
"""Assumed: a CUDA context, the kernels that are loaded into it, and the workspaces of cuBLAS."""
NCCL = 500 << 20
"""Assumed: buffers of NCCL's process groups, if there are several ranks."""
CUDA_LIBRARIES = 2 << 30
"""Assumed: host memory of a process that loads CUDA, cuDNN and NCCL."""
COMPILED, KEPT = 100 << 20, 0.1
"""Assumed for a CPU: compiled code, and the fraction of the peak that its allocator keeps. Steps of four small Llamas
(planned peaks of 143 to 1,406 MiB) took 94 to 236 MiB beyond their peak and the interpreter.
"""


class ProcessPart(NamedTuple):
    """Bytes of one rank's process besides the program, on its device or its host: what they are, and whether they
    were measured here.
    """

    where: str
    what: str
    nbytes: int
    measured: bool


def resident() -> int:
    """Returns the bytes of this process that are resident in memory now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def parts(
    device: Device,
    peak: int,
    interpreter: int,
    several: bool,
    measured: bool = True,
    what: str = "interpreter, torch, transformers",
) -> list[ProcessPart]:
    """Returns the parts of a process besides a program.

    Args:
        device: the device that it runs on.
        peak: bytes of the device that the program takes.
        interpreter: bytes that are resident before there is a state.
        several: whether there are several ranks.
        measured: whether `interpreter` was measured.
        what: what `interpreter` consists of.
    """
    libraries = ProcessPart("host", what, interpreter, measured)
    if not device.asynchronous:
        kept = COMPILED + int(KEPT * peak)
        return [libraries, ProcessPart("host", "compiled code, memory that the allocator keeps", kept, False)]
    out = [ProcessPart("device", "CUDA context, kernels, workspaces", CONTEXT, False)]
    out += [ProcessPart("device", "buffers of NCCL", NCCL, False)] if several else []
    return [*out, libraries, ProcessPart("host", "libraries of CUDA", CUDA_LIBRARIES, False)]


def beside(device: Device, peak: int, several: bool) -> list[ProcessPart]:
    """Returns the parts of a process besides a program, measured as far as a calibration has measured them."""
    interpreter, known = device.process_bytes or INTERPRETER, device.process_bytes > 0
    return parts(device, peak, interpreter, several, known, "interpreter and libraries")


def here(device: Device, found: list[ProcessPart]) -> int:
    """Returns the bytes of these parts in the memory that the program's peak refers to."""
    return sum(x.nbytes for x in found if x.where == ("device" if device.asynchronous else "host"))


def left(device: Device, whole: int, several: bool, interpreter: int) -> int:
    """Returns the bytes that a card or container with `whole` bytes leaves to a program, after the process itself;
    not positive if it leaves none.
    """
    if not device.asynchronous:
        # Solves peak + KEPT * peak + COMPILED + interpreter = whole for the peak.
        return int((whole - interpreter - COMPILED) / (1 + KEPT))
    return whole - CONTEXT - NCCL * several


def left_on_host(device: Device, whole: int, interpreter: int) -> int:
    """Returns the bytes of a device's host that the process leaves to a program, of `whole` bytes for one rank. If the
    host's memory is the device's, `left` subtracts the process.
    """
    return whole - interpreter - CUDA_LIBRARIES if device.asynchronous else whole


def room(device: Device, several: bool, interpreter: int) -> int:
    """Returns the bytes of a device that are left to a program by default: the device's memory without what the
    process takes.
    """
    return max(1 << 20, left(device, device.memory_bytes, several, interpreter))
