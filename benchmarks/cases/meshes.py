"""Meshes chosen by plan, of which nothing is run: 66 billion parameters on 64 devices, and a model on one host."""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common import verdict

from cases import Table

LARGE = {"layers": 80, "width": 8192, "heads": 64, "vocab": 128256}
WIDE = {"layers": 16, "width": 4096, "heads": 32, "vocab": 50304}
SLOW = 2.5e9  # bytes/s of a device


def mesh_plans(args: argparse.Namespace) -> Table:
    """Which mesh `fz.choose_mesh` takes, and in how many CPU seconds; on 4 devices beside every candidate, planned.

    GPTs in bf16 with AdamW, clipped by the global norm, sequences of 4,096, by the rates of H100 with 8 a host. "slow":
    2.5 GB/s a device between hosts; on one host between its devices.
    """
    rows, found, notes = [], [], ["Predicted, not measured: no such machine was at hand."]
    cases = [("80 layers of 8192", LARGE, 64, n, slow) for n, slow in ((64, False), (64, True), (32, False))]
    cases += [("16 layers of 4096", WIDE, 8, n, slow) for n, slow in ((8, False), (8, True), (4, False))]
    cases += [("4 layers of 4096", {**WIDE, "layers": 4}, 4, 16, slow) for slow in (False, True)]
    for number, (name, model, devices, batch, slow) in enumerate(cases):
        if devices > args.devices or number not in args.rows:
            continue
        small = {**model, "layers": args.layers or model["layers"], "seq": 4096 // args.smaller}
        case = _chosen(small, devices, batch, slow, args.seconds)
        every = _chosen(small, devices, batch, slow, pruned=False) if devices <= args.every else None
        ratio = "" if every is None else f"{case['seconds'] / every['seconds']:.3f}"
        numbers = (f"{case['seconds']:.3g}", f"{case['mfu']:.1%}", case["sentence"], case["planned"], ratio)
        rows.append([name, devices, "slow" if slow else "fast", batch, *numbers, f"{case['cpu']:.0f}"])
        found.append({"model": small, **case, "every": every})
        of = f"{name}, {batch} rows, {'slow' if slow else 'fast'}"
        if every is not None:
            took, best = (
                case["seconds"] / every["seconds"],
                f"the best of {every['planned']} takes {every['seconds']:.4g} s",
            )
            notes.append(f"{of}: {best}, found in {every['cpu']:.0f} CPU s (1.03: {verdict(took, 1.03)})")
        if devices == 64:
            notes.append(f"{of}: {case['cpu']:.0f} CPU s (300: {verdict(case['cpu'], 300)})")
    notes.append("planned: candidates lowered and planned whole; all others were left out by a bound.")
    notes.append(f"A search ends after {args.seconds:g} s with the best so far, and a bound on what it did not try.")
    columns = ("model", "devices", "network", "rows", "s", "MFU", "result", "planned", "of the best of all", "CPU s")
    return Table("Meshes chosen by plan", columns, rows, notes, {"cases": found})


@contextmanager
def _unpruned() -> Iterator[None]:
    """Plans whatever fits, one by one."""
    module = importlib.import_module("fzero.lowering.choose_mesh")
    before = module.GAIN
    module.GAIN = -math.inf
    try:
        yield
    finally:
        module.GAIN = before


def _chosen(
    model: dict[str, int], devices: int, rows: int, slow: bool, seconds: float | None = None, pruned: bool = True
) -> dict[str, Any]:
    import torch
    from model import Config, make_init, make_loss
    from torch._subclasses import FakeTensorMode

    import fzero as fz
    from fzero import optim
    from fzero.plan.devices import get_device
    from fzero.plan.rates import Link

    config, device = Config(batch=rows, **model), get_device("h100")
    if slow:
        which = ("inter",) if devices > device.devices_per_host else ("intra", "inter")
        links = {k: Link(x.latency, SLOW) if k in which else x for k, x in device.links.items()}
        device = replace(device, links=links)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
    step = fz.mixed_precision("bf16")(fz.train_step(make_loss(config), optimizer))
    with FakeTensorMode():
        params = make_init(config)(fz.random.key(0))
    params = fz.tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), params)
    tokens = torch.empty(rows, config.seq, dtype=torch.int64, device="meta")
    begin = time.process_time()
    if pruned:
        found = fz.choose_mesh(step, params, (tokens, tokens), devices=devices, device=device, seconds=seconds)
    else:
        with _unpruned():
            found = fz.choose_mesh(step, params, (tokens, tokens), devices=devices, device=device)
    took, best = time.process_time() - begin, found.best.planned
    return {
        "devices": devices,
        "rows": rows,
        "slow": slow,
        "cpu": took,
        "seconds": best.step_seconds,
        "mfu": best.mfu,
        "sentence": " ".join(found.sentence.split()),
        "code": found.code,
        "planned": found.num_planned,
        **found.data(),
    }
