"""Plans of steps over slow and fast networks, with fewer and fewer bits on the wire (fz.compress)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from cases import Table
from cases.plans import PREDICTED, llama_config

# bits/s that a device has of its host's network, and seconds before the first byte
NETWORKS = {
    "InfiniBand, 400 Gbit/s a device": (400e9, 8e-6),
    "InfiniBand, 100 Gbit/s a device": (100e9, 8e-6),
    "Ethernet, 100 Gbit/s a host": (100e9 / 8, 3e-5),
    "Ethernet, 10 Gbit/s a host": (10e9 / 8, 3e-5),
    "Ethernet, 1 Gbit/s a host": (1e9 / 8, 3e-5),
}
SHARE = 0.8  # of a network's rate
HOPS = {"params": {"data": "int8", "node": "int8"}, "grads": {"data": "int8", "node": "int4"}}
REPLICAS = {"params": {"data": "int8"}, "grads": {"data": "int8", "node": "int4"}}
WAYS = ("without", "int8", "int8, int4 between hosts", "auto")


def cases() -> dict[str, tuple[str, Any, dict[str, Any]]]:
    """By name the model, its transforms, and arguments of `compress` for 4 bits between hosts."""
    import fzero as fz

    both = ("data", "node")
    once = fz.compose(fz.shard_params(axis=both), fz.accumulate(8), fz.hierarchical())
    hybrid = fz.compose(fz.shard_params(), fz.data_parallel(axis="node"))
    return {
        "8B, ZeRO-3": ("Llama 3 8B", fz.shard_params(axis=both), HOPS),
        "8B, ZeRO-3 in a host, replicas": ("Llama 3 8B", hybrid, REPLICAS),
        "8B, ZeRO-1": ("Llama 3 8B", fz.shard_opt_state(axis=both), HOPS),
        "8B, ZeRO-3, 8 micro-batches, once a step": ("Llama 3 8B", once, HOPS),
        "70B, ZeRO-3": ("Llama 3 70B", fz.shard_params(axis=both), HOPS),
    }


def compressed_plans(args: argparse.Namespace) -> Table:
    """What codes on the wire save on 1,024 devices, by plan: H100, 8 a host, over five networks between hosts.

    Llama 3 in bf16 with AdamW, clipped by the global norm, `remat("full")`, a sequence of 4,096 tokens a device and
    micro-batch. Axes: node=128 x data=8; leaves are cut over data first, so that a host's sums travel between hosts.
    """
    import fzero as fz
    from fzero.plan.device_lookup import KNOWN, Link

    mesh = fz.AbstractMesh(device_type="cuda", node=args.nodes, data=8)
    h100 = KNOWN["h100"]
    devices = {
        name: replace(h100, links={**h100.links, "inter": Link(latency, SHARE * bits / 8)})
        for name, (bits, latency) in NETWORKS.items()
    }
    rows, found, peaks = [], [], []
    for name, (model, transforms, hops) in cases().items():
        if args.only and name not in args.only:
            continue
        step, params, batch = llama(model, args.layers, args.seq, transforms)
        formats: dict[str, Any] = {"without": None, "int8": {}, "int8, int4 between hosts": hops}
        if "replicas" in name:
            formats["int8"] = {"params": {"data": "int8"}, "grads": "int8"}
        by_hand = {
            way: fz.lower(step if given is None else fz.compress(**given)(step), mesh, params, batch, device=h100)
            for way, given in formats.items()
        }
        for network, device in devices.items():
            plans = {way: x.plan_on(device) for way, x in by_hand.items()}
            plans["auto"] = fz.lower(fz.compress("auto")(step), mesh, params, batch, device=device).plan
            decided = [x for x in plans["auto"].decisions if x.what.startswith("compress over ")]
            chosen = "; ".join(f"{x.what.removeprefix('compress over ')}: {x.chosen}" for x in decided)
            chosen = chosen.replace("parameters int8, gradients int8", "int8").replace("parameters int8, ", "int8, ")
            rows.append([name, network, *(_cell(plans[way]) for way in WAYS), chosen])
            of_ways = {way: _numbers(x) for way, x in plans.items()}
            found.append({"case": name, "network": network, "chosen": [x._asdict() for x in decided], "ways": of_ways})
            peaks.append((name, {way: x.peak_bytes for way, x in plans.items()}))
    columns = ("step", "between hosts", *WAYS, "auto has")
    return Table("1,024 devices over five networks", columns, rows, _notes(found, peaks, args), {"cases": found})


def _notes(found: list[dict[str, Any]], peaks: list[tuple[str, dict[str, int]]], args: argparse.Namespace) -> list[str]:
    seconds = [{way: x["seconds"] for way, x in case["ways"].items()} for case in found]
    worst = max(x["auto"] / min(x["without"], x["int8"]) for x in seconds)
    slower = max(x["auto"] / x["without"] for x in seconds)
    best = max(x["without"] / x["auto"] for x in seconds)
    most = {name: max(of.values()) for name, of in peaks}
    shares = ", ".join(f"{name}: {1e-9 * SHARE * bits / 8:g}" for name, (bits, _) in NETWORKS.items())
    return [
        PREDICTED,
        f"{8 * args.nodes:,} H100, {args.nodes} hosts of 8 over NVLink (360 GB/s a device), a network link a device in "
        f"GB/s ({SHARE:g} of its rate): {shares}. Latencies 8 us, over Ethernet 30 us.",
        "Each cell: seconds a step / seconds exposed / GB that a rank sends between hosts in a step. Leaves are cut "
        "over the devices of a host first, so each sends an eighth.",
        'int8: both axes, parameters too where they travel. "auto" never has 4 bits within a host, the first hop.',
        f"Seconds of auto / without: {slower:.3f} at most, {1 / best:.3f} at least (1 / {best:.1f}). Seconds of auto / "
        f"the lower of without and int8: {worst:.3f} at most.",
        "peak GB: " + ", ".join(f"{name} {1e-9 * n:.1f}" for name, n in most.items()),
    ]


def _numbers(plan: Any) -> dict[str, Any]:
    between = sum(c.bytes for name, c in plan.channels.items() if name.endswith(":node"))
    sent = sum(c.bytes for name, c in plan.channels.items() if ":" in name)
    return {
        "seconds": plan.step_seconds,
        "exposed": plan.exposed_seconds,
        "between_hosts": between,
        "sent": sent,
        "peak": plan.peak_bytes,
    }


def _cell(plan: Any) -> str:
    numbers = _numbers(plan)
    seconds = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (numbers["seconds"], numbers["exposed"]))
    return " / ".join([*seconds, f"{1e-9 * numbers['between_hosts']:.3g}"])


def llama(name: str, layers: int | None, seq: int, transforms: Any) -> tuple[Any, Any, Any]:
    """A step with its transforms, its parameters and a rank's batch."""
    import torch
    from training import clipped_adamw
    from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    import fzero as fz
    from fzero.transforms.accumulate import Accumulate

    with torch.device("meta"):
        model = fz.functionalize(LlamaForCausalLM(llama_config(name, layers)).train())
    step = model.train_step(clipped_adamw(1e-4))
    step = fz.compose(fz.mixed_precision("bf16"), fz.remat("full"), transforms)(step)
    micro = next((t.num_micro_batches for t in step.transforms if isinstance(t, Accumulate)), 1)
    tokens = torch.empty(micro, seq, dtype=torch.int64, device="meta")
    return step, model.params, {"input_ids": tokens, "labels": tokens}
