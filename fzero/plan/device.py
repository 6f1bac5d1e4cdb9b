"""Describes a device for plans: the rates at which it multiplies, reads, copies and sends, and what it shares with
others on its host.

[Note: the host's share] The ranks of a host share its memory and its disk. The rates of a known device are those of a
rank that has the host for itself; a plan gives each rank an equal share for as many ranks as the mesh has there.
Measured rates are those of a rank while all ranks are busy, and are used as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from fzero._utils.bounded_json import parsed
from fzero.errors import FzeroValueError
from fzero.tree import dtype_name

FORMAT = 5
"""Format of a calibration file. A file of another format is rejected, and has to be measured again."""


MOST = 1 << 20
"""Largest size of a calibration file in bytes: 1 MiB. A typical file has about 2 KiB."""


@dataclass(frozen=True)
class Link:
    """A path for bytes: `latency` seconds before the first byte, then `bandwidth` bytes/s, in one direction.

    Example:
        >>> Link(1e-6, 1e9).seconds(1000)
        2e-06
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float, steps: int = 1) -> float:
        """Returns the time of `nbytes` that are sent in `steps` messages one after the other."""
        return steps * self.latency + nbytes / self.bandwidth


_MAY_BE_ZERO = ("latency", "call_seconds", "disk_mixed", "process_bytes")


def _no_rates(data: Any, name: str) -> list[str]:
    """Returns the numbers in `data` that are not valid rates, sizes or times."""
    if isinstance(data, dict):
        return [problem for key, value in data.items() for problem in _no_rates(value, key)]
    if isinstance(data, bool) or not isinstance(data, (int, float)):
        return []
    return [] if 0 < data < math.inf or (data == 0 and name in _MAY_BE_ZERO) else [f"{name} is {data}"]


def _interpolated(rates: Mapping[int, float], at: int) -> float:
    known = sorted(rates)
    at = min(max(at, known[0]), known[-1])
    for low, high in pairwise(known):
        if low <= at < high:
            part = math.log(at / low) / math.log(high / low)
            return rates[low] ** (1 - part) * rates[high] ** part
    return rates[at]


@dataclass(frozen=True)
class Host:
    """The resources that the ranks of a host share, which `what` describes: its disk, and the memory at its `sockets`
    (the threads of a rank run on one socket). `ranks`: the number of ranks that the device's rates of both are for.
    See [Note: the host's share].
    """

    what: str
    sockets: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class Device:
    """One device of a mesh and its links. Rates are per rank while all ranks of the host are busy, except for the
    resources that `host` divides.

    Attributes:
        flops: attainable FLOP/s of large matrix products, by dtype name (`"float32"`, `"bfloat16"`, …).
        memory_bandwidth: bytes/s, read and written together, of an operation that does little else.
        transcendentals: elements/s of an exponential, or of functions that take as long (trace/flops.py), in compiled
            subgraphs.
        memory_bytes: memory of the device.
        links: `"intra"`: to ranks on the same host, `"inter"`: to ranks on other hosts; what one rank sends.
        devices_per_host: number of ranks that share a host.
        call_seconds: fixed cost of one call of a compiled subgraph.
        asynchronous: whether transfers progress while the device computes. On a CPU mesh they do not: a transfer is a
            copy by the thread that waits for it.
        host_copy: link between the device's memory and the host's, in one direction.
        host_memory_bandwidth: bytes/s that subgraphs on the host, such as updates of offloaded state, read and write
            together with all threads of the rank.
        disk_read, disk_write: this rank's share of the host's disk, while the disk does nothing else.
        disk_mixed: bytes/s of reads and writes together while as much is read as is written; 0 if that is not known,
            in which case they are assumed to take turns.
        host: the resources that the ranks of a host share; None for a measurement, which was made while all ranks
            were using them.
        source: where the numbers come from.
        machine: for a calibration, the machine that it is valid for.
        attention: FLOP/s of fused attention, by dtype name, and of its backward (`"bfloat16 backward"`), each by the
            number of positions ("512"), as if nothing were masked; the rate of products if it is not listed.
        peak_flops: FLOP/s of products that the vendor states, by dtype name; utilization is a fraction of it. Empty
            if it is not known.
        process_bytes: memory of a process that has imported what a step needs, before it has a state; 0 if it was not
            measured.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    transcendentals: float
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
    host: Host | None = None
    source: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    process_bytes: int = 0

    @property
    def type(self) -> str:
        """The device type, as PyTorch names it."""
        return "cuda" if self.asynchronous else "cpu"

    def rate(self, dtype: torch.dtype, attention: str | None = None, positions: int = 0) -> float:
        """Returns the FLOP/s of products of a dtype; for a dtype that is not listed, the rate of float32 scaled by
        the sizes. `attention`: the rate of fused attention instead, "forward" or "backward", to a number of positions:
        between two numbers that were measured, the logarithm of the rate is interpolated in the logarithm of the
        positions; beyond them, it is the rate of the nearest.
        """
        name = dtype_name(dtype)
        if attention and (fused := self.attention.get(f"{name} backward" if attention == "backward" else name)):
            return _interpolated({int(n): rate for n, rate in fused.items()}, positions)
        # A dtype that is not listed has no faster hardware path than float32. At most its bytes make it slower, never
        # faster.
        return self.flops.get(name) or self.flops["float32"] * 4 / max(4, dtype.itemsize)

    def measured(self, link: str) -> bool:
        """Returns whether the rate of a link, "intra" or "inter", was measured. Otherwise it is that of a known
        device.
        """
        return bool(self.machine) and f"link {link}" not in self.source

    def shared_by(self, num_ranks: int) -> Device:
        """Returns the device of a rank that shares its host with others, `num_ranks` including itself: with its part
        of the shared resources.

        Example:
            >>> from fzero.plan.device_lookup import KNOWN
            >>> KNOWN["h100"].shared_by(1).disk_read.bandwidth, KNOWN["h100"].shared_by(8).disk_read.bandwidth
            (6000000000.0, 750000000.0)
        """
        if self.host is None:
            return self
        disk, sockets = self.host.ranks / num_ranks, self.host.sockets
        # A rank uses the memory bandwidth of one socket at most: up to one rank per socket has all
        # of it, more ranks divide it.
        memory = min(1, sockets / num_ranks) / min(1, sockets / self.host.ranks)
        return replace(
            self,
            host_memory_bandwidth=self.host_memory_bandwidth * memory,
            disk_read=replace(self.disk_read, bandwidth=self.disk_read.bandwidth * disk),
            disk_write=replace(self.disk_write, bandwidth=self.disk_write.bandwidth * disk),
            disk_mixed=self.disk_mixed * disk,
            host=replace(self.host, ranks=num_ranks),
        )

    def to_json(self) -> str:
        """Returns the text of a calibration file."""
        return json.dumps({"format": FORMAT, "torch": torch.__version__, **asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str | bytes, what: str = "the text") -> Device:
        """Returns the device of a calibration file's text, whatever machine it belongs to, if any. Errors call the
        text `what`.

        Raises:
            FzeroValueError: if the text is not a calibration.
        """
        try:
            data = parsed(text)
            if (found := data.get("format", FORMAT)) != FORMAT:
                raise ValueError(
                    f"format: {found!r} in the file, {FORMAT!r} here: rates were added or are measured differently"
                )
            if any(int(n) < 1 for rates in data.get("attention", {}).values() for n in rates):
                raise ValueError("attention: a number of positions below 1")
            links = {k: Link(**v) for k, v in data["links"].items()}
            ways = {k: Link(**data[k]) for k in ("host_copy", "disk_read", "disk_write")}
            host = Host(**data["host"]) if data.get("host") else None
            # The version of torch is recorded for people who read the file; rates are valid for any version.
            kept = {k: v for k, v in data.items() if k not in ("format", "torch", "links", "host", *ways)}
            device = Device(links=links, host=host, **ways, **kept)
            if problems := _no_rates(asdict(replace(device, machine={}, host=None)), "device"):
                raise ValueError("; ".join(problems))
            return device
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems, fix = (
                [f"{type(error).__name__}: {error}"],
                "write it with Device.to_json, or measure again: fzero calibrate",
            )
            raise FzeroValueError("calibrate", f"{what} is not a calibration file", problems, fix) from error
