"""Plans, of which nothing is run: 7 billion parameters on one card of 24 GB, and models up to a trillion."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import SOURCE

from cases import Table

# --- 7 billion parameters on 24 GB ---

BUDGETS = {"memory_budget": "22GB", "host_budget": "58GB", "disk_budget": "500GB"}
HEADLINE = ((1, "layerwise"), (4, "layerwise"), (8, "layerwise"), (4, "sequential"))
"""The number of micro-batches, and the schedule of `fz.accumulate`."""


def headline(args: argparse.Namespace) -> Table:
    """Whether 7 billion parameters train on one GPU of 24 GB with 64 GB of host memory and an NVMe, and how fast.

    bf16 with fp32 masters, AdamW, clipped by the global norm, `remat("full")`, accumulated over micro-batches of 16,384
    tokens. `offload("auto")` chooses the tiers, with 22 GB of the device, 58 GB of the host and 500 GB of the disk.
    The rates are those of a known device, or of a calibration file, which the notes print.
    """
    sys.path.insert(0, str(SOURCE / "examples"))
    import plan_llama

    import fzero as fz
    from fzero.plan.device_lookup import get_device

    device, rows, cases = get_device(args.device), [], []
    for micro_batches, schedule in HEADLINE:
        step, params, batch = plan_llama.headline(micro_batches, args.layers or plan_llama.LAYERS, schedule)
        begin = time.process_time()
        plan = fz.lower(step, fz.AbstractMesh(data=1, device_type="cuda"), params, batch, device=device, **BUDGETS).plan
        took, tokens = time.process_time() - begin, batch[0].numel()
        peaks = [plan.peak_bytes, plan.host_peak_bytes, plan.disk_bytes]
        name = f"{micro_batches}, {schedule}" if micro_batches > 1 else "1"
        speed = [f"{tokens:,}", f"{plan.step_seconds:.1f}", f"{86400e-6 * tokens / plan.step_seconds:.0f}"]
        shares = ["" if plan.mfu is None else f"{plan.mfu:.0%}", f"{plan.roofline_fraction:.0%}"]
        rows.append([name, *speed, *shares, *(f"{n / 1e9:.1f}" for n in peaks), plan.bound_by, f"{took:.0f}"])
        case = {"micro_batches": micro_batches, "schedule": schedule, "tokens": tokens}
        case |= {"step_seconds": plan.step_seconds, "peaks": peaks, "planned_in_cpu_seconds": took}
        cases.append({**case, "decisions": [d._asdict() for d in plan.decisions]})
    links = (device.host_copy, device.disk_read, device.disk_write)
    rates = (device.host_memory_bandwidth, *(link.bandwidth for link in links))
    memory, link, read, write = (f"{rate / 1e9:.3g} GB/s" for rate in rates)
    notes = [
        f"Predicted, not measured: {device.name}, {device.source}",
        f"Assumed of the host: {memory} of memory, {link} to the device and from it; of the disk: {read} read, {write} "
        "written",
        *(f"{row[0]}: {case['decisions'][0]['chosen']}" for row, case in zip(rows, cases, strict=True)),
    ]
    speed = ("tokens per step", "s per step", "M tokens per day", "MFU", "of attainable")
    columns = ("micro-batches", *speed, "GPU GB", "host GB", "disk GB", "bound by", "planned in CPU s")
    data = {"device": device.name, "budgets": BUDGETS, "cases": cases}
    return Table("7 billion parameters on one GPU of 24 GB", columns, rows, notes, data)


# --- known models ---

SIZES = {  # vocabulary, width, hidden, layers, key and value heads
    "Llama 2 7B": (32000, 4096, 11008, 32, 32),
    "Llama 3 8B": (128256, 4096, 14336, 32, 8),
    "Llama 2 13B": (32000, 5120, 13824, 40, 40),
    "Llama 3 70B": (128256, 8192, 28672, 80, 8),
    "1 T": (50304, 25600, 68352, 128, 200),
}
AUTO = ("--offload", "auto")
LAYERWISE = ("--accumulate", "8", "--layerwise")
T_BUDGETS = ("--host-budget", "100GB", "--disk-budget", "1TB")
HOME = (*AUTO, *LAYERWISE, "--host-budget", "58GB", "--disk-budget", "2TB")
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"{n}, 8 x 80 GB": (n, ("--devices", "8xh100")) for n in list(SIZES)[:4]},
    **{f"{n}, 64 x 80 GB": (n, ("--devices", "64xh100")) for n in list(SIZES)[:4]},
    **{f"{n}, 1 x 24 GB": (n, ("--devices", "1xrtx4090", *HOME)) for n in list(SIZES)[:4]},
    "Llama 2 13B, 1 x 32 GB": ("Llama 2 13B", ("--devices", "1xrtx5090", *AUTO, *LAYERWISE, "--host-budget", "256GB")),
    "1 T, 128 x 80 GB": ("1 T", ("--devices", "128xa100", "--seq", "2048", *AUTO, *T_BUDGETS)),
}
"""The model and the flags of each plan. Budgets are those of one rank."""


PREDICTED = "Predicted, not measured."
FITS = (
    "fits: whether the planned peak is at most the nominal memory of the card (80 GB is 80 x 10^9 bytes). Such a card "
    "has about 85.9 x 10^9 bytes; the rest holds the process, whose memory is assumed."
)
PARAMS = (
    "params: the bf16 copies used in the computation. A copy on the host or on disk is fetched block by block. The "
    "fp32 masters are stored with opt_state."
)


def model_plans(args: argparse.Namespace) -> Table:
    """Whether models of 7 billion to a trillion parameters fit, and how fast they train.

    Each plan is `fzero plan --hf CONFIG --devices ... --json` in a process of its own; one whose file is in `--plans`
    is not made again. Full training with AdamW and clipping, bf16 with fp32 masters, sequences of 4,096 tokens (2,048
    of the trillion). `--only 8b`: the plans whose name has this. `--tables`: those that are there.
    """
    args.plans.mkdir(parents=True, exist_ok=True)
    paths = {name: args.plans / f"{name.replace(' ', '_')}.json" for name in MODELS}
    for name, (model, flags) in MODELS.items():
        if not args.tables and (args.only or "").lower() in name.lower() and not paths[name].exists():
            print(name, file=sys.stderr)
            made = planned(args.plans / model.replace(" ", "_"), model, flags, args.seconds)
            paths[name].write_text(json.dumps(made))
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    rows, notes = [], [PREDICTED, FITS, PARAMS]
    for name, case in found.items():
        if "refused" in case:
            rows.append([name, "no", *[""] * 8])
            notes.append(f"{name}: {'; '.join(x.strip() for x in case['refused'].splitlines()[:2])}")
            continue
        process = sum(p["nbytes"] for p in case["process"] if p["where"] == "device")
        sizes = (case["peak_bytes"], case["peak_bytes"] + process, case["host_peak_bytes"], case["disk_bytes"])
        speed = (f"{case['step_seconds']:.3g}", f"{case['tokens_per_second']:,.0f}", f"{case['mfu']:.0%}")
        rows.append([name, "yes", *(f"{n / 1e9:.1f}" if n else "" for n in sizes), *speed, case["bound_by"]])
        chosen = next((d["chosen"] for d in case["decisions"] if d["what"] == "offload"), "")
        notes += [f"{name}: {chosen}"] if chosen else []
    notes += [f"Left out: {name}" for name in MODELS if name not in found]
    for case in found.values():
        notes += [f"Assumed: {text}" for text in case.get("assumed", [])[:2] if f"Assumed: {text}" not in notes]
    commands: dict[str, list[str]] = {}
    for name in found:
        commands.setdefault(f"fzero plan --hf DIR {' '.join(MODELS[name][1])}", []).append(name)
    notes += [f"{'; '.join(names)}: `{command}`" for command, names in commands.items()]
    sizes = ("GB per device", "with the process", "host GB per rank", "disk GB per rank")
    columns = ("model, devices", "fits", *sizes, "s per step", "tokens/s", "MFU", "bound by")
    return Table("Models that fit, and how fast", columns, rows, notes, {"cases": found})


def llama_config(model: str, layers: int | None = None) -> Any:
    """The configuration of a known model for transformers."""
    from transformers import LlamaConfig  # pyright: ignore[reportMissingImports]

    vocab, width, hidden, known, shared = SIZES[model]
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers or known,
        num_attention_heads=width // 128,
        num_key_value_heads=shared,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    )


def planned(config: Path, model: str, flags: tuple[str, ...], limit: int) -> dict[str, Any]:
    """What a plan says, or why there is none."""
    llama_config(model).save_pretrained(config)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "fzero", "plan", "--hf", str(config), *flags, "--json"]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"refused": f"not planned: it took more than {limit} s"}
    took = {"cpu_seconds": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, "flags": flags}
    if done.returncode == 1:
        lines = [x for x in done.stderr.splitlines() if not x.startswith("fzero.plan:")]
        return {"refused": "\n".join(lines), **took}
    if done.returncode:
        raise SystemExit(done.stderr)
    keep = ("step_seconds", "mfu", "peak_bytes", "host_peak_bytes", "disk_bytes", "bound_by", "tokens_per_second")
    data = json.loads(done.stdout)
    return {k: data[k] for k in (*keep, "process", "decisions", "better", "assumed", "devices")} | took


# --- the search for a program ---

SEARCHED = (
    "Llama 3 8B, 8 x 80 GB",
    "Llama 3 70B, 64 x 80 GB",
    "Llama 2 13B, 1 x 32 GB",
    "Llama 2 7B, 1 x 24 GB",
    "Llama 3 8B, 1 x 24 GB",
    "Llama 2 13B, 1 x 24 GB",
    "1 T, 128 x 80 GB",
)
TIGHT = 0.85
"""The memory budgets of the small steps of `plan_memory`: this share of the peak without a limit."""


BF16_ROWS = (
    "bf16 rows of plan_memory depend on the CPU that plans: one without bf16 products computes them in float32, with "
    "larger temporaries. There the first of these rows is refused, by 0.4 of 35 MiB."
)


def plan_search(args: argparse.Namespace) -> Table:
    """The program that is chosen within memory budgets: its planned seconds and peaks, and the CPU seconds of planning.

    The plans of `headline`, some of `model_plans`, and the ten steps of `plan_memory` in 85 % of the memory that they
    would use, with `remat("auto")` if they name no other. With `--before FILE`, the values of another commit stand
    beside them. `--only`: the plans whose name has this.
    """
    before = json.loads(args.before.read_text())["cases"] if args.before else {}
    wanted = [name for name in _searched() if not args.only or any(x in name for x in args.only)]
    rows, found = [], {}
    for name in wanted:
        print(name, file=sys.stderr)
        command = [sys.executable, "-c", _ONE_SEARCH, str(Path(__file__).parents[1]), name]
        env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    for name, case in found.items():
        old = before.get(name, {})
        columns = [[_shown(x, key) for x in (old, case)] for key in ("step_seconds", "peak", "cpu_seconds")]
        both = old.get("step_seconds") and case.get("step_seconds")
        ratio = f"{case['step_seconds'] / old['step_seconds'] - 1:+.1%}" if both else ""
        rows.append([name, *columns[0], ratio, *columns[1], *columns[2]])
    notes = [PREDICTED, "peak: GB of the device, of the host and of the disk, if they are used.", BF16_ROWS]
    notes += [f"{name}: {x['refused'].splitlines()[0]}" for name, x in found.items() if "refused" in x]
    columns = ("plan", "s before", "s", "", "peak before", "peak", "planned in CPU s before", "planned in CPU s")
    return Table("Programs chosen within memory budgets", columns, rows, notes, {"cases": found, "before": before})


_ONE_SEARCH = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import plans
plans.one_search(sys.argv[2])
"""


def _shown(case: dict[str, Any], key: str) -> str:
    if key == "peak":
        return ", ".join(f"{n / 1e9:.3g}" for n in case.get("peaks", ()) if n)
    return f"{case[key]:.4g}" if key in case else ""


def _searched() -> dict[str, Any]:
    """By name: a function that returns the values of a plan."""
    from cases.memory import PLAN_SIZES, PLANNED

    found: dict[str, Any] = {}
    for micro, schedule in HEADLINE:
        found[f"7B on 24 GB, {micro}, {schedule}"] = lambda micro=micro, how=schedule: _headline_plan(micro, how)
    for name in SEARCHED:
        found[name] = lambda name=name: planned(Path(f"/tmp/fzero-{MODELS[name][0]}"), *MODELS[name], limit=3600)
    for case in PLANNED:
        what = ", ".join(f"{key} {value}" for key, value in case.items())
        found[f"plan_memory, {what}"] = lambda case=case: _tight(PLAN_SIZES[0], **case)
    return found


def one_search(name: str) -> None:
    """Prints the values of one plan."""
    begin = time.process_time()
    case = _searched()[name]()
    if "step_seconds" in case and "peaks" not in case:
        case["peaks"] = [case[key] for key in ("peak_bytes", "host_peak_bytes", "disk_bytes")]
    print(json.dumps({"cpu_seconds": time.process_time() - begin, **case}))


def _values(plan: Any) -> dict[str, Any]:
    peaks = [plan.peak_bytes, plan.host_peak_bytes, plan.disk_bytes]
    decisions = [f"{x.what}: {x.chosen}" for x in plan.decisions]
    return {"step_seconds": plan.step_seconds, "peaks": peaks, "decisions": decisions}


def _headline_plan(micro_batches: int, schedule: str) -> dict[str, Any]:
    sys.path.insert(0, str(SOURCE / "examples"))
    import plan_llama

    import fzero as fz

    step, params, batch = plan_llama.headline(micro_batches, plan_llama.LAYERS, schedule)
    mesh = fz.AbstractMesh(data=1, device_type="cuda")
    return _values(fz.lower(step, mesh, params, batch, device="rtx4090", **BUDGETS).plan)


def _tight(size: dict[str, int], stage: int, accumulate: int = 1, precision: str = "fp32", remat: str = "auto") -> Any:
    """A step of `plan_memory` on two ranks."""
    import torch
    from model import Config, make_init, make_loss
    from training import clipped_adamw

    import fzero as fz
    from cases import ZERO

    config = Config(batch=8, heads=4, **size)
    step = fz.train_step(make_loss(config), clipped_adamw())
    more = (fz.remat(remat), fz.accumulate(accumulate), fz.mixed_precision(precision))
    step = fz.compose(getattr(fz, ZERO[stage])(axis="data"), *more)(step)
    tokens = torch.empty(4, config.seq, dtype=torch.int64, device="meta")

    def within(budget: int) -> Any:
        mesh, batch = fz.AbstractMesh(data=2), (tokens, tokens)
        return fz.lower(step, mesh, make_init(config), batch, memory_budget=budget, device="cpu").plan

    most = within(1 << 40).peak_bytes
    try:
        return _values(within(int(TIGHT * most)))
    except fz.errors.BudgetError as error:
        return {"refused": str(error)}


# --- long sequences ---

LENGTHS = (8192, 32768, 131072)
KEPT = ("full", "min_cut")
WIDE = {"width": 4096, "heads": 32, "vocab": 32000}


def sequence_plans(args: argparse.Namespace) -> Table:
    """What cutting positions over 8 ranks saves and costs, by plan: `sequence_parallel` beside data parallel alone.

    A GPT of 7B width in bf16 with AdamW, by the rates of 8 H100 a host. First one device beside seq=8, then ZeRO-3 on
    64 devices: data=64, and data=8 x seq=8 with as many rows, so as many tokens a device. At the last length also the
    fewest rows that 64 devices can share.
    """
    cases: list[tuple[int, int, dict[str, int], str]] = [
        *((LENGTHS[-1], 1, mesh, kept) for kept in KEPT for mesh in ({"data": 1}, {"seq": 8})),
        *((length, 64, mesh, "full") for length in LENGTHS for mesh in ({"data": 64}, {"data": 8, "seq": 8})),
        (LENGTHS[-1], 8, {"data": 8, "seq": 8}, "full"),
    ]
    rows, found = [], []
    for length, batch, mesh, kept in cases:
        case = _long(args.layers, length // args.shorter, batch, mesh, kept)
        gigabytes = (f"{case[k] / 1e9:.1f}" for k in ("activations", "pool", "peak", "sent"))
        size = " x ".join(f"{axis}={n}" for axis, n in mesh.items())
        speed = (f"{case['seconds']:.3g}", f"{case['tokens'] / case['seconds']:,.0f}")
        rows.append([f"{length // args.shorter:,}", batch, size, kept, *gigabytes, *speed])
        found.append({"length": length, "rows": batch, "mesh": mesh, "remat": kept, **case})
    alone = {kept: [c["activations"] for c in found[:4] if c["remat"] == kept] for kept in KEPT}
    notes = [
        PREDICTED,
        "activations: saved values, other values and temporaries at the peak. pool: transfers' buffers, gradients that "
        "wait for their sums among them; what of it is in use at the peak is counted in its own column.",
        *(f"remat {kept!r}: activations of seq=8 are 1/{a / b:.1f} of one device's" for kept, (a, b) in alone.items()),
        "With as many rows as devices, `data_parallel` sends fewer bytes and takes fewer seconds (see the table). It "
        "cannot use more devices than rows, and the activations of a row are on one device.",
    ]
    columns = ("positions", "rows", "mesh", "remat", "activations GB", "pool GB", "peak GB", "sent GB", "s", "tokens/s")
    return Table(f"{args.layers} layers of width {WIDE['width']}", columns, rows, notes, {"cases": found})


def _long(layers: int, length: int, rows: int, mesh: dict[str, int], kept: str) -> dict[str, Any]:
    """The plan of a step, in numbers of a rank."""
    import fzero as fz
    from fzero.ir.ops import STARTS, transfer_bytes

    transforms = [fz.remat(kept)]
    transforms += [fz.shard_params(axis=tuple(mesh))] if "data" in mesh and mesh["data"] > 1 else []
    transforms += [fz.sequence_parallel(max_replicated_bytes="100GB")] if "seq" in mesh else []
    model = {**WIDE, "layers": layers, "seq": length}
    lowered = _lowered(model, mesh, rows // mesh.get("data", 1), *transforms)
    plan, program = lowered.plan, lowered.program
    values, sends = program.values_by_name, [(x, times) for x, times in program.walk() if x.op in STARTS]
    return {
        "activations": sum(plan.breakdown[k] for k in ("saved", "activations", "temporaries")),
        "pool": plan.pool_bytes,
        "peak": plan.peak_bytes,
        "sent": sum(transfer_bytes(op, values, program.mesh) * times for op, times in sends),
        "seconds": plan.step_seconds,
        "tokens": rows * length,
    }


def _lowered(model: dict[str, int], mesh: dict[str, int], rows: int, *transforms: Any) -> Any:
    """A step of the GPT in bf16 with `rows` per rank, for a mesh of H100."""
    import torch
    from model import Config, make_init, make_loss
    from training import clipped_adamw

    import fzero as fz

    config = Config(batch=rows, **model)
    step = fz.train_step(make_loss(config), clipped_adamw(1e-4))
    step = fz.compose(fz.mixed_precision("bf16"), *transforms)(step)
    tokens = torch.empty(rows, config.seq, dtype=torch.int64, device="meta")
    devices = fz.AbstractMesh(device_type="cuda", **mesh)
    return fz.lower(step, devices, make_init(config), (tokens, tokens), device="h100")


# --- stages ---

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb")
STAGES = (4, 8)


def pipeline_plans(args: argparse.Namespace) -> Table:
    """What schedules of stages cost, by plan; and how long a trillion parameters over 1,024 devices take to plan.

    A GPT of 7B width, bf16, AdamW, four layers a stage, two micro-batches of a row a stage, by the rates of 8 H100 a
    host. Then data=8 x pipe=16 x model=8 of a GPT of width 25,600, ZeRO-1, `remat("full")`, micro-batches of a row.
    """
    rows, found = [], []
    for pipe, how in itertools.product(STAGES, SCHEDULES):
        options = {"schedule": how, **({"chunks": 2} if how == "interleaved" else {})}
        case = _staged({**WIDE, "layers": 4 * pipe, "seq": 4096 // args.smaller}, {"pipe": pipe}, 2 * pipe, options)
        rows.append(_staged_row(f"{4 * pipe} layers of {WIDE['width']}", case))
        found.append(case)
    for micro in args.micro:
        trillion = {"layers": args.layers, "width": 25600, "heads": 160, "vocab": 51200, "seq": 2048 // args.smaller}
        case = _staged(trillion, {"data": 8, "pipe": args.pipe, "model": 8}, micro, {}, kept="full")
        rows.append(_staged_row(f"{args.layers} layers of 25,600", case))
        found.append(case)
    notes = [
        PREDICTED,
        "bubble: the mean share of a step in which a stage waits. Peaks are of the stage that takes most. The text is "
        "that of the first stage's program, folded, as `fzero show` prints it.",
        "lower, plan: CPU seconds of `fz.lower`, which has the programs of all stages, and of their plan.",
        _uneven(args),
    ]
    size = ("functions", "lines", "text", "lower", "plan")
    columns = ("model", "mesh", "micro", "schedule", "s", "bubble", "peak GB", *size)
    return Table("Stages", columns, rows, notes, {"cases": found})


def _uneven(args: argparse.Namespace) -> str:
    """The default cut of a model whose head weighs as much as layers, beside all cuts."""
    layers, stages = 6, 3
    model = {"layers": layers, "width": 2048, "heads": 16, "seq": 2048 // args.smaller, "vocab": 131072}

    def slowest(counts: list[int] | None) -> tuple[float, list[int]]:
        found = _staged(model, {"pipe": stages}, 8, {} if counts is None else {"stages": counts}, kept="full")
        return max(found["compute"]), found["blocks"]

    blocks = layers + 2  # with the embedding and the head
    cuts = ((0, *at, blocks) for at in itertools.combinations(range(1, blocks), stages - 1))
    best, of_all = min(slowest([j - i for i, j in itertools.pairwise(cut)]) for cut in cuts)
    took, counts = slowest(None)
    what = f"{layers} layers of {model['width']} with a vocabulary of {model['vocab']:,} on {stages} stages"
    return f"{what}: the default cut {counts} computes {took / best:.3f} times as long as the fastest one, {of_all}"


def _staged_row(model: str, case: dict[str, Any]) -> list[Any]:
    mesh = " x ".join(f"{axis}={n}" for axis, n in case["mesh"].items())
    speed = (f"{case['seconds']:.3g}", f"{case['bubble']:.1%}", f"{max(case['peaks']) / 1e9:.1f}")
    text = (f"{case['lines']:,}", f"{case['text']:,}", f"{case['lowered_in']:.1f}", f"{case['planned_in']:.1f}")
    return [model, mesh, case["micro"], case["schedule"], *speed, case["functions"], *text]


def _staged(
    model: dict[str, int], mesh: dict[str, int], micro: int, how: dict[str, Any], kept: str = "none"
) -> dict[str, Any]:
    """A step in stages: its plan in numbers, and what it took."""
    import fzero as fz

    transforms = [fz.remat(kept), fz.accumulate(micro, schedule="layerwise"), fz.pipeline(**how)]
    transforms += [fz.shard_opt_state()] if "data" in mesh else []
    transforms += [fz.tensor_parallel()] if "model" in mesh else []
    begin = time.process_time()
    lowered = _lowered(model, mesh, micro, *transforms)
    between = time.process_time()
    plan = lowered.plan
    return {
        "model": model,
        "mesh": mesh,
        "micro": micro,
        "schedule": how.get("schedule", "1f1b"),
        "seconds": plan.step_seconds,
        "bubble": plan.bubble,
        "peaks": [stage.peak_bytes for stage in plan.stages],
        "compute": [stage.compute_seconds for stage in plan.stages],
        "blocks": [stage.num_blocks for stage in plan.stages],
        "functions": len(lowered.program.functions),
        "lines": max(len(program.instructions) for program in lowered.programs),
        "text": len(str(lowered.program).splitlines()),
        "lowered_in": between - begin,
        "planned_in": time.process_time() - between,
    }
