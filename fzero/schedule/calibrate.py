"""Measuring this machine: `calibrate` fills in a `Device` in a few seconds and keeps it in a file."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from fzero.errors import FzeroValueError, message
from fzero.schedule.devices import FORMAT, Device

_REDO = "measure again on this machine: fzero calibrate"


def calibration_path(device_type: str = "cpu") -> Path:
    """Where this machine's calibration is kept: under $FZERO_CACHE, by default ~/.cache/fzero."""
    folder = Path(os.environ.get("FZERO_CACHE") or Path.home() / ".cache" / "fzero")
    return folder / ("calibration.json" if device_type == "cpu" else f"calibration_{device_type}.json")


def load_calibration(path: str | Path) -> Device:
    """The device of a calibration file.

    Raises:
        FzeroValueError: a file that is no calibration, or one of another machine, torch version or format, showing both sides.
    """
    text = Path(path).read_text()
    try:
        data: dict[str, Any] = json.loads(text)
        found = {"format": data["format"], "torch": data["torch"], **data["machine"]}
    except (ValueError, KeyError, TypeError) as error:
        raise FzeroValueError(message("calibrate", f"{path} is not a calibration file", [f"{type(error).__name__}: {error}"], _REDO)) from error
    here = {"format": FORMAT, "torch": torch.__version__, **machine(str(found.get("device_type", "cpu")))}
    wrong = [f"{k}: {found.get(k)!r} in the file, {v!r} here" for k, v in here.items() if found.get(k) != v]
    if wrong:
        raise FzeroValueError(message("calibrate", f"{path} was measured elsewhere", wrong, _REDO))
    return Device.from_json(text)


def machine(device_type: str) -> dict[str, Any]:
    """What a calibration is valid for."""
    return {
        "device_type": device_type,
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device_type == "cuda" and torch.cuda.is_available() else [],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
