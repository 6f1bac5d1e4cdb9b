"""Devices as the plan sees them: how fast they multiply, read, copy and send.

A number is what a well-written program attains, not what a datasheet promises: `fzero calibrate` measures it, or it is the vendor's peak times
a share that `source` states. A plan for a machine one does not have uses a device by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fzero.errors import FzeroValueError, message

FORMAT = 3
"""Of a calibration file; a file of another format is measured again."""


@dataclass(frozen=True)
class Link:
    """A way for bytes: `latency` seconds before the first of them, then `bandwidth` bytes/s, in one direction.

    Example:
        >>> Link(1e-6, 1e9).seconds(1000)
        2e-06
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, steps: int = 1) -> float:
        """Time of `nbytes` that travel in `steps` messages one after the other."""
        return steps * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One device of a mesh and its links. Rates are per rank, with all ranks of the host busy.

    Attributes:
        flops: attainable FLOP/s of large matrix products, by dtype name (`"float32"`, `"bfloat16"`, …).
        memory_bandwidth: bytes/s read and written together by an operation that does little else.
        memory_bytes: of the device.
        links: `"intra"`: to ranks on the same host, `"inter"`: to ranks on others; what one rank sends.
        devices_per_host: ranks that share a host.
        call_seconds: fixed cost of one call of a compiled function.
        asynchronous: whether transfers progress while the device computes. On a CPU mesh they do not: a transfer is a copy by the thread that waits for it.
        host_copy: between the device's memory and the host's, one direction.
        host_memory_bandwidth: bytes/s that functions on the host read and write together, with all threads of the rank: an update of what rests there.
        disk_read, disk_write: of this rank's share of the host's disk, while it does nothing else.
        disk_mixed: bytes/s of both together while as much is read as is written; 0 if that is not known: as if they took turns.
        source: where the numbers come from.
        machine: of a calibration, what it is valid for.
        attention: FLOP/s of fused attention, by dtype name, and of its backward (`"bfloat16 backward"`), as if nothing were masked; where it is not
            listed, that of products.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int
    links: Mapping[str, Link]
    devices_per_host: int
    call_seconds: float
    asynchronous: bool
    host_copy: Link
    host_memory_bandwidth: float
    disk_read: Link
    disk_write: Link
    disk_mixed: float = 0.0
    source: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)

    def rate(self, dtype: torch.dtype, attention: str | None = None) -> float:
        """FLOP/s of products of a dtype; of one that is not listed, that of float32 scaled by its size. `attention`: of fused attention, "forward" or
        "backward"."""
        name = str(dtype).removeprefix("torch.")
        fused = self.attention.get(f"{name} backward" if attention == "backward" else name) if attention else None
        return fused or self.flops.get(name) or self.flops["float32"] * 4 / max(4, dtype.itemsize)

    def to_json(self) -> str:
        """As the text of a calibration file."""
        return json.dumps({"format": FORMAT, "torch": torch.__version__, **asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str, where: str = "calibrate") -> Device:
        """The device of a calibration file's text, whatever machine it is of.

        Raises:
            FzeroValueError: text that is no calibration.
        """
        try:
            data = json.loads(text)
            links = {k: Link(**v) for k, v in data["links"].items()}
            ways = {k: Link(**data[k]) for k in ("host_copy", "disk_read", "disk_write")}
            kept = {k: v for k, v in data.items() if k not in ("format", "torch", "links", *ways)}
            return Device(links=links, **ways, **kept)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FzeroValueError(message(where, "not a calibration file", [f"{type(error).__name__}: {error}"], "measure again: fzero calibrate")) from error


_SHARE = {"compute": 0.65, "memory": 0.85, "link": 0.8}
"""What large matrix products, streaming kernels and large transfers reach of a datasheet's peak, as published benchmarks of these devices find."""


def _datasheet(
    name: str, flops: Mapping[str, float], memory: float, capacity: float, nvlink: float, network: float, pcie: float, host: float, source: str
) -> Device:
    """A device from its datasheet: peaks of dense products in FLOP/s, bandwidths in bytes/s of one direction; that of the host's memory as attained."""
    compute, share = _SHARE["compute"], _SHARE["link"]
    stated = f"{source}; attainable: {compute:g} of the products' peak, {_SHARE['memory']:g} of the memory's, {share:g} of the links'"
    return Device(
        name=name,
        flops={k: v * compute for k, v in flops.items()},
        memory_bandwidth=memory * _SHARE["memory"],
        memory_bytes=int(capacity),
        links={"intra": Link(3e-6, nvlink * share), "inter": Link(8e-6, network * share)},
        devices_per_host=8,
        call_seconds=2e-5,  # launching a compiled function of a few kernels from Python
        asynchronous=True,
        host_copy=Link(1e-5, pcie * share),
        host_memory_bandwidth=host,
        disk_read=Link(1e-4, 6e9 / 8),  # one NVMe drive of 6 GB/s, 3 GB/s written, between eight devices
        disk_write=Link(1e-4, 3e9 / 8),
        source=stated,
    )


def _hopper(name: str, memory: float, capacity: float, source: str) -> Device:
    # float32 products are true float32 (TF32 is off by default in PyTorch); NVLink 4: 900 GB/s both directions; one 400 Gb/s adapter a device; PCIe 5 x16
    flops = {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12, "float8_e4m3fn": 1979e12, "float8_e5m2": 1979e12}
    # a host with eight channels of DDR5 a socket: 150 GB/s attained by an update that has them to itself
    return _datasheet(name, flops, memory, capacity, 450e9, 50e9, 64e9, 150e9, source)


# A100: NVLink 3: 600 GB/s both directions; one 200 Gb/s adapter a device; PCIe 4 x16; a host with eight channels of DDR4 a socket
_AMPERE = {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}

KNOWN: Mapping[str, Device] = {
    "h100": _hopper("h100", 3.35e12, 80e9, "NVIDIA H100 SXM datasheet, dense, 400 Gb/s network"),
    "h200": _hopper("h200", 4.8e12, 141e9, "NVIDIA H200 SXM datasheet, dense, 400 Gb/s network"),
    "a100": _datasheet("a100", _AMPERE, 2.039e12, 80e9, 300e9, 25e9, 32e9, 100e9, "NVIDIA A100 80 GB SXM datasheet, dense, 200 Gb/s network"),
    "cpu": Device(
        name="cpu",
        flops={"float32": 6e10, "bfloat16": 5e10, "float16": 5e10},
        memory_bandwidth=1.5e10,
        memory_bytes=16 * 2**30,
        links={"intra": Link(1e-4, 1.5e9), "inter": Link(2e-4, 1e9)},
        devices_per_host=2,
        call_seconds=1.5e-5,
        asynchronous=False,
        host_copy=Link(0.0, 1.5e10),
        host_memory_bandwidth=1.5e10,
        disk_read=Link(1e-4, 1e9),
        disk_write=Link(1e-4, 1e9),
        source="one thread of a current server core with AVX2, gloo over the loopback; measure your own: fzero calibrate",
    ),
}
"""Devices by name."""


def get_device(name: str | Path | None = None, device_type: str = "cpu") -> Device:
    """A device by name, from a calibration file, or this machine's.

    Args:
        name: a known name, the path of a calibration file, or None: this machine's calibration if there is a valid one, else the generic
            device of the type.
        device_type: "cpu" or "cuda", for None.

    Raises:
        FzeroValueError: an unknown name, listing the known ones; a calibration file of another machine or version.

    Example:
        >>> get_device("h200").memory_bytes
        141000000000
    """
    from fzero.schedule.calibration import calibration_path, load_calibration

    if name is None:
        generic = KNOWN["cpu" if device_type == "cpu" else "h100"]
        try:
            return load_calibration(calibration_path(device_type)) if calibration_path(device_type).exists() else generic
        except FzeroValueError:  # of another machine or version: as if there were none
            return generic
    if str(name) in KNOWN:
        return KNOWN[str(name)]
    path = Path(name)
    if path.exists():
        return load_calibration(path)
    problems = [f"{known}: {device.source}" for known, device in KNOWN.items()]
    raise FzeroValueError(message("device", f"{str(name)!r} is neither a known device nor a calibration file", problems, "give one of these, or a path"))
