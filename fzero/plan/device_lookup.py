"""Looks up devices: by name, in a calibration file, or this machine.

Each number is the rate that a well-written program attains, not the promise of a datasheet: either `fzero calibrate`
measures it, or it is the vendor's peak times a share that `source` states. To plan for a machine that you do not
have, use a device by name, or a file with the numbers of one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fzero._utils.bounded_json import Malformed, contents
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroValueError
from fzero.plan.device import FORMAT, MOST, Device, Host, Link

_SPECIAL = 1 / 16
"""Transcendental functions per FLOP in float32: a multiprocessor computes 16 per clock, together with 128 fused
multiply-adds (64 on an A100; CUDA C++ programming guide, "Throughput of Native Arithmetic Instructions"); an AMD
compute unit does as an H100's multiprocessor.
"""
_SHARE = {"compute": 0.65, "memory": 0.85, "link": 0.8}
"""Fractions of a datasheet's peak that large matrix products, streaming kernels and large transfers reach, according
to published benchmarks of these devices.
"""

# Hosts: the memory bandwidth of a socket in bytes/s, as updates that stream through it attain it. The disk is a drive
# on four lanes of PCIe 4, as is common in data centers.
_DDR5_SERVER = 150e9, Host("two sockets with eight channels of DDR5 each, one NVMe drive", sockets=2)
_DDR4_SERVER = 100e9, Host("two sockets with eight channels of DDR4 each, one NVMe drive", sockets=2)
_DESKTOP = 60e9, Host("two channels of DDR5, one NVMe drive")
_DISK_READ, _DISK_WRITE = 6e9, 3e9  # bytes/s


def _datasheet(
    name: str,
    flops: Mapping[str, float],
    memory: float,
    capacity: float,
    *,
    peer: float,
    network: float,
    pcie: float,
    host: tuple[float, Host],
    source: str,
    per_host: int = 8,
    compute: float = _SHARE["compute"],
    special: float = _SPECIAL,
) -> Device:
    """Returns a device, given its datasheet.

    Args:
        name: name of the device.
        flops: peaks of dense products that accumulate in float32, in FLOP/s by dtype. float32 products are true
            float32 (TF32 is off by default in PyTorch).
        memory: memory bandwidth in bytes/s.
        capacity: memory in bytes. The datasheet's GB are read as 10^9; the difference to 2^30 accounts for the driver
            and libraries.
        peer: bandwidth to devices of the same host; like `network` (to other hosts) and `pcie` (to the host's memory)
            in bytes/s in one direction.
        network: one device's part of its host's network bandwidth.
        pcie: x16 unless the datasheet says otherwise.
        host: the host that the device is usually in.
        source: the datasheet, and further assumptions.
        per_host: number of devices in a host.
        compute: the fraction of their peak that large products and transcendental functions reach.
        special: transcendental functions per FLOP in float32.
    """
    share = _SHARE["link"]
    stated = (
        f"{source}; attainable: {compute:g} of the products' peak, {_SHARE['memory']:g} of the memory's, {share:g} of "
        f"the links'"
    )
    return Device(
        name=name,
        flops={k: v * compute for k, v in flops.items()},
        memory_bandwidth=memory * _SHARE["memory"],
        transcendentals=flops["float32"] * special * compute,
        memory_bytes=int(capacity),
        links={"intra": Link(3e-6, peer * share), "inter": Link(8e-6, network * share)},
        devices_per_host=per_host,
        call_seconds=2e-5,  # launching a compiled function of a few kernels from Python
        asynchronous=True,
        host_copy=Link(1e-5, pcie * share),
        host_memory_bandwidth=host[0],
        disk_read=Link(1e-4, _DISK_READ),
        disk_write=Link(1e-4, _DISK_WRITE),
        host=host[1],
        source=stated,
        peak_flops=flops,
    )


def _peaks(float32: float, bfloat16: float, float8: float = 0.0) -> dict[str, float]:
    """Returns FLOP/s by dtype name."""
    half = {"float32": float32, "bfloat16": bfloat16, "float16": bfloat16}
    return {**half, "float8_e4m3fn": float8, "float8_e5m2": float8} if float8 else half


# NVLink 4 and 5: 900 and 1,800 GB/s in both directions together; one 400 Gb/s adapter per device; PCIe 5 x16
_HOPPER: dict[str, Any] = {"peer": 450e9, "network": 50e9, "pcie": 64e9, "host": _DDR5_SERVER}
_HOPPER_FLOPS = _peaks(67e12, 989e12, 1979e12)
# cards on PCIe 4 x16 that communicate over it; 100 Gb/s per host
_PCIE4: dict[str, Any] = {"peer": 32e9, "network": 100e9 / 8 / 8, "pcie": 32e9, "host": _DDR4_SERVER}
# GeForce cards cannot access each other over PCIe: transfers go through host memory, at half the rate. NVLink bridges
# between two RTX 3090 are not assumed. 10 Gb/s per device between hosts.
_GEFORCE4: dict[str, Any] = {"peer": 16e9, "network": 1.25e9, "pcie": 32e9, "host": _DESKTOP, "per_host": 4}
_GEFORCE5: dict[str, Any] = {**_GEFORCE4, "peer": 32e9, "pcie": 64e9}
_AT_HOME = "PCIe through host memory between cards, 10 Gb/s network"
_PCIE = "PCIe between cards, 100 Gb/s network a host"

_DATASHEETS = [
    _datasheet(
        "b200",
        _peaks(75e12, 2.25e15, 4.5e15),
        8e12,
        180e9,
        source="NVIDIA HGX B200 datasheet, dense, 400 Gb/s network",
        **{**_HOPPER, "peer": 900e9},
    ),
    _datasheet(
        "h200", _HOPPER_FLOPS, 4.8e12, 141e9, source="NVIDIA H200 SXM datasheet, dense, 400 Gb/s network", **_HOPPER
    ),
    _datasheet(
        "h100", _HOPPER_FLOPS, 3.35e12, 80e9, source="NVIDIA H100 SXM datasheet, dense, 400 Gb/s network", **_HOPPER
    ),
    # Seven Infinity Fabric links of 64 GB/s in each direction. Its fp8 formats (fnuz) differ from those that fzero
    # computes with. Products reach a smaller fraction of their peak than on NVIDIA devices: AMD measures 0.54 at best
    # ("Measuring Max-Achievable FLOPs, part 2", ROCm blogs), others 0.45.
    _datasheet(
        "mi300x",
        _peaks(163.4e12, 1307.4e12),
        5.3e12,
        192e9,
        source="AMD Instinct MI300X data sheet, dense, 400 Gb/s network",
        compute=0.45,
        **{**_HOPPER, "peer": 448e9},
    ),
    # NVLink 3: 600 GB/s in both directions; one 200 Gb/s adapter per device; PCIe 4 x16
    _datasheet(
        "a100",
        _peaks(19.5e12, 312e12),
        2.039e12,
        80e9,
        peer=300e9,
        network=25e9,
        pcie=32e9,
        host=_DDR4_SERVER,
        special=2 * _SPECIAL,
        source="NVIDIA A100 80 GB SXM datasheet, dense, 200 Gb/s network",
    ),
    _datasheet(
        "l40s",
        _peaks(91.6e12, 362.05e12, 733e12),
        864e9,
        48e9,
        source=f"NVIDIA L40S datasheet, dense, {_PCIE}",
        **_PCIE4,
    ),
    # the datasheet states tensor peaks with sparsity, so half of them are used
    _datasheet(
        "a6000", _peaks(38.7e12, 154.8e12), 768e9, 48e9, source=f"NVIDIA RTX A6000 datasheet, dense, {_PCIE}", **_PCIE4
    ),
    _datasheet("a10", _peaks(31.2e12, 125e12), 600e9, 24e9, source=f"NVIDIA A10 datasheet, dense, {_PCIE}", **_PCIE4),
    _datasheet(
        "l4", _peaks(30.3e12, 121e12, 242.5e12), 300e9, 24e9, source=f"NVIDIA L4 datasheet, dense, {_PCIE}", **_PCIE4
    ),
    # From the appendices of the whitepapers: tensor peaks that accumulate in float32, which are half of those that
    # accumulate in float16.
    _datasheet(
        "rtx5090",
        _peaks(104.8e12, 209.5e12, 419e12),
        1792e9,
        32e9,
        source=f"NVIDIA RTX Blackwell GPU architecture whitepaper, dense, {_AT_HOME}",
        **_GEFORCE5,
    ),
    _datasheet(
        "rtx4090",
        _peaks(82.6e12, 165.2e12, 330.3e12),
        1008e9,
        24e9,
        source=f"NVIDIA Ada GPU architecture whitepaper, dense, {_AT_HOME}",
        **_GEFORCE4,
    ),
    _datasheet(
        "rtx3090",
        _peaks(35.6e12, 71e12),
        936e9,
        24e9,
        source=f"NVIDIA Ampere GA102 whitepaper, dense, {_AT_HOME}",
        **_GEFORCE4,
    ),
]

KNOWN: Mapping[str, Device] = {
    **{device.name: device for device in _DATASHEETS},
    "cpu": Device(
        name="cpu",
        flops={"float32": 6e10, "bfloat16": 5e10, "float16": 5e10},
        memory_bandwidth=1.5e10,
        transcendentals=8e8,
        memory_bytes=16 * 2**30,
        links={"intra": Link(1e-4, 1.5e9), "inter": Link(2e-4, 1e9)},
        devices_per_host=2,
        call_seconds=1.5e-5,
        asynchronous=False,
        host_copy=Link(0.0, 1.5e10),
        host_memory_bandwidth=1.5e10,
        disk_read=Link(1e-4, 1e9),
        disk_write=Link(1e-4, 1e9),
        source="one thread of a current server core with AVX2, gloo over the loopback; measure your own: fzero "
        "calibrate",
    ),
}
"""Devices by name."""


def peaks_of(name: str) -> Mapping[str, float]:
    """Returns the peaks of the known device that a driver calls by this name; empty if it is another device, or
    another variant of a known one.

    Example:
        >>> peaks_of("NVIDIA GeForce RTX 4090")["bfloat16"], peaks_of("NVIDIA H100 PCIe"), peaks_of("NVIDIA A10G")
        (165200000000000.0, {}, {})
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    known = [*words, *(a + b for a, b in pairwise(words))]
    return {} if {"pcie", "nvl"} & {*words} else next((KNOWN[x].peak_flops for x in known if x in KNOWN), {})


def get_device(name: str | Path | None = None, device_type: str = "cpu") -> Device:
    """Returns a device by name, from a file, or this machine.

    Args:
        name: the name of a known device or the path of a calibration file (of any machine), either of them optionally
            followed by changed numbers ("a100,memory_bytes=40GB,disk_read=3GB"); or None: this machine's calibration
            if there is a valid one, otherwise the generic device of the type.
        device_type: "cpu" or "cuda", for None.

    Raises:
        FzeroValueError: if the name is unknown, listing the known ones; if the file is not a calibration; if a device
            does not have one of the numbers.

    Example:
        >>> get_device("h200").memory_bytes, get_device("h200,memory_bytes=96GB").memory_bytes
        (141000000000, 96000000000)
    """
    from fzero.plan.calibration import calibration_path, load_calibration

    if name is None:
        generic = KNOWN["cpu" if device_type == "cpu" else "h100"]
        try:
            return (
                load_calibration(calibration_path(device_type)) if calibration_path(device_type).exists() else generic
            )
        except FzeroValueError as error:  # it belongs to another machine or version: ignored, but mentioned in `source`
            why = "; ".join(line.strip() for line in str(error).splitlines()[1:-1])
            return replace(generic, source=f"{generic.source}; this machine's calibration is not used: {why}")
    if not isinstance(name, (str, Path)):
        raise FzeroValueError(
            "plan",
            f"{name!r} is not a device",
            fix=f"give a name ({', '.join(KNOWN)}), or the path of a calibration file",
        )
    if str(name).lower() in KNOWN:
        return KNOWN[str(name).lower()]
    if (path := Path(name)).exists():
        return Device.from_json(_text(path), str(path))
    base, *changes = str(name).split(",")
    if changes:
        return _changed(get_device(base, device_type), changes)
    problems = [f"{known}: {device.source}" for known, device in KNOWN.items()]
    raise FzeroValueError(
        "device",
        f"{str(name)!r} is neither a known device nor a calibration file",
        problems,
        "give one of these, or a path",
    )


def _text(path: Path) -> bytes:
    try:
        return contents(path, MOST)
    except (OSError, Malformed) as error:
        fix = f"give the path of a file that fzero calibrate wrote, or one of {', '.join(KNOWN)}"
        raise FzeroValueError("device", f"{str(path)!r} is not a calibration file", [str(error)], fix) from error


_CARD = re.compile(r"(?P<name>[a-z0-9]+)-(?P<size>\d+)gb(?P<rest>,.*)?")


def get_devices(text: str, device_type: str = "cpu") -> tuple[int, Device]:
    """Returns a number of devices and the device, from text such as 8xh100.

    Args:
        text: NUMBERxNAME, with the name as for `get_device`, or with the memory of the card: a100-40gb.
        device_type: as for `get_device`.

    Raises:
        FzeroValueError: for other text, or an unknown name, listing the known ones.

    Example:
        >>> number, device = get_devices("64xA100-40GB")
        >>> number, device.name, device.memory_bytes
        (64, 'a100', 40000000000)
    """
    number, x, name = text.partition("x") if text[:1].isdecimal() else ("", "", text)
    if not (x and number.isdecimal() and int(number) and name):
        problems = [f"perhaps you meant: {meant}"] if (meant := _meant(text)) else []
        raise FzeroValueError("devices", f"{text!r} is not NUMBERxNAME", problems, _ACCEPTED)
    plain = name.lower().replace("_", "-")
    if not Path(name).exists() and (card := _CARD.fullmatch(plain)) and card["name"] in KNOWN:
        name = f"{card['name']},memory_bytes={card['size']}GB{card['rest'] or ''}"
    try:
        return int(number), get_device(name, device_type)
    except FzeroValueError as error:
        base = re.split("[-,]", plain)[0]
        if Path(name).exists() or base in KNOWN:
            raise
        near = difflib.get_close_matches(base, KNOWN, n=3)
        raise FzeroValueError(
            "devices",
            f"{text!r}: {name!r} is neither a known device nor a calibration file",
            [f"perhaps you meant: {', '.join(f'{number}x{n}' for n in near)}"] if near else [],
            _ACCEPTED,
        ) from error


_BANDWIDTHS = ("host_copy", "disk_read", "disk_write")
_NUMBERS = ("memory_bytes", "memory_bandwidth", "host_memory_bandwidth", "disk_mixed", *_BANDWIDTHS, "intra", "inter")
"""Numbers of a device that the text may change, in bytes or bytes/s. For a known device they are those of a rank that
has its host for itself.
"""
_ACCEPTED = (
    f"write NUMBERxNAME, e.g. 8xh100, where NAME is one of {', '.join(KNOWN)}, or the path of a calibration file; "
    f"a100-40gb has a different memory size, h100,intra=200GB a different rate ({', '.join(_NUMBERS)})"
)


def _meant(text: str) -> str:
    """Returns the devices that a text names in another form, such as `h100x8`, `8 h100` or `8`; empty if it names
    none.
    """
    small = text.lower().strip()
    name = max((known for known in KNOWN if known in small), key=len, default="")
    if not name:
        return f"{small}xh100" if small.isdecimal() and int(small) else ""
    card = re.search(rf"{name}[-_ ]?(\d+)gb", small)
    numbers = [n for n in re.findall(r"\d+", small.replace(card[0] if card else name, " ", 1)) if int(n)]
    return f"{numbers[0] if numbers else 1}x{name}{f'-{card[1]}gb' if card else ''}"


def _changed(device: Device, changes: Sequence[str]) -> Device:
    """Returns a device with changed numbers, each given as `name=size`."""
    problems: list[str] = []
    for change in changes:
        what, _, text = (part.strip() for part in change.partition("="))
        try:
            rate = parse_bytes(text.removesuffix("/s"))
        except FzeroValueError:
            rate = 0
        if what not in _NUMBERS or not rate:
            problems.append(
                f"{change}: " + (f"{text!r} is not a size" if what in _NUMBERS else f"not one of {', '.join(_NUMBERS)}")
            )
            continue
        if what in _BANDWIDTHS:
            device = replace(device, **{what: replace(getattr(device, what), bandwidth=float(rate))})
        elif what in device.links:
            device = replace(device, links={**device.links, what: replace(device.links[what], bandwidth=float(rate))})
        else:
            device = replace(device, **{what: rate})
    if problems:
        raise FzeroValueError(
            "device",
            f"{device.name} cannot be changed like this",
            problems,
            "e.g. a100,memory_bytes=40GB,disk_read=3GB (a second)",
        )
    return replace(device, source=f"{device.source}; with {', '.join(c.strip() for c in changes)}")


__all__ = ["FORMAT", "KNOWN", "Device", "Host", "Link", "get_device", "get_devices"]
