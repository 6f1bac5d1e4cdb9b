"""Training speeds that others have published, compared with plans of the same model, batch, precision and hardware."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import SOURCE

from cases import Table

TITAN = "https://github.com/pytorch/torchtitan/blob/{}"
TITAN_H100 = TITAN.format("31a17bf/benchmarks/llama3_h100_202412_torchtitan.md")
TITAN_A100 = TITAN.format("0413364/docs/performance.md")
TITAN_H200 = TITAN.format("b3eec1e/benchmarks/llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber.md")
LLMQ = "https://github.com/IST-DASLab/llmq/blob/00ea1be/README.md"
NANOCHAT = "https://github.com/karpathy/nanochat/blob/06a1977/run1000.sh"

GRAND_TETON = "H100 with 2.4 TB/s and a limit of 500 W; planned with 2.4 TB/s and the peak of 700 W"
SELECTIVE = "selective activation checkpointing; planned with remat('min_cut')"
BF16_STATE = "moments in bf16, which fzero does not store; planned with moments in int8"

QWEN = {  # vocabulary, width, hidden, layers, heads, key and value heads, tied
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "14B": (152064, 5120, 13824, 48, 40, 8, False),
}
LLAMA = {
    "2 13B": (32000, 5120, 13824, 40, 40, 40, False),
    "2 70B": (32000, 8192, 28672, 80, 64, 8, False),
    "3 8B": (128256, 4096, 14336, 32, 32, 8, False),
    "3 70B": (128256, 8192, 28672, 80, 64, 8, False),
    "3 405B": (128256, 16384, 53248, 126, 128, 8, False),
}
H100_TITAN = "h100,memory_bandwidth=2040GB,memory_bytes=96GB"
"""The attainable share of 2.4 TB/s."""


@dataclass(frozen=True)
class Published:
    """A published training speed, and how the same step is planned.

    Attributes:
        name, source: what was trained on what, and where it was published.
        tokens: published tokens/s per device.
        model: the key of `LLAMA` or `QWEN`, or "nanochat d32".
        device: the device of the plan, with changed rates.
        axes: the mesh.
        batch, seq: sequences of a rank in one micro-batch, and their tokens.
        micro: micro-batches per step.
        zero: transforms over `data`: "shard_params", "shard_opt_state" or "".
        more: further transforms, as the expression of a call.
        remat, backend, fp8: as they are planned.
        pure_bf16: parameters are stored in bf16, without fp32 masters.
        host: host memory in GB per rank, if the state is offloaded.
        gib: the published memory of a device, if any.
        differs: what the published run does differently.
    """

    name: str
    source: str
    tokens: float
    model: str
    device: str
    axes: dict[str, Any]
    batch: int
    seq: int
    micro: int = 1
    zero: str = "shard_params"
    more: tuple[str, ...] = ()
    remat: str = "min_cut"
    backend: str = "inductor"
    fp8: bool = False
    pure_bf16: bool = False
    host: int = 0
    gib: float | None = None
    differs: tuple[str, ...] = ()


def _titan(how: str, ranks: int, tokens: float, gib: float, **more: Any) -> Published:
    differs = (GRAND_TETON, SELECTIVE, *(("fp8 all-gathers",) if more.get("fp8") else ()))
    return Published(
        f"torchtitan, Llama 3.1 8B, {ranks} H100, {how}", TITAN_H100, tokens, "3 8B", H100_TITAN, {"data": ranks}, 2,
        8192, gib=gib, differs=differs, **more,
    )  # fmt: skip


def _a100(name: str, model: str, batch: int, seq: int, tokens: float, remat: str, **more: Any) -> Published:
    differs = ("the network of the A100 hosts is not stated; planned with 200 Gb/s per device",)
    differs += (SELECTIVE,) if remat == "min_cut" else ()
    return Published(
        f"torchtitan, {name}, 64 A100", TITAN_A100, tokens, model, "a100", {"data": 64}, batch, seq, remat=remat,
        differs=(*differs, "eager or compiled is not stated; planned as compiled"), **more,
    )  # fmt: skip


def _llmq(size: str, device: str, ranks: int, kind: str, batch: int, tokens: float, **more: Any) -> Published:
    differs = ("CUDA kernels written by hand", BF16_STATE, *more.pop("differs", ()))
    micro = max(1, 524_288 // (1024 * batch * ranks))
    return Published(
        f"LLMQ, Qwen2.5 {size}, {ranks} {device.upper().replace('RTX', 'RTX ')}, {kind}", LLMQ, tokens / ranks, size,
        device, {"data": ranks}, batch, 1024, micro, fp8=kind == "fp8", pure_bf16=True, differs=differs,
        **{"remat": "none", "zero": "shard_opt_state", **more},
    )  # fmt: skip


OFFLOADED = {"remat": "full", "host": 128}
ROWS = (
    _titan("eager", 8, 5762, 82.4, backend="eager"),
    _titan("compiled", 8, 6667, 77.0),
    _titan("compiled, fp8", 8, 8532, 76.8, fp8=True),
    _titan("eager", 128, 5605, 67.0, backend="eager"),
    _titan("compiled", 128, 6514, 62.0),
    _titan("compiled, fp8", 128, 8380, 61.8, fp8=True),
    Published(
        "torchtitan, Llama 3.1 8B, 8 H100, 32,768 tokens, fp8", TITAN_H100, 3890, "3 8B", H100_TITAN, {"data": 8}, 1,
        32768, remat="full", fp8=True, gib=83.9, differs=(GRAND_TETON, "fp8 all-gathers"),
    ),
    Published(
        "torchtitan, Llama 3.1 70B, 256 H100, tensor 8, fp8", TITAN_H100, 829, "3 70B", H100_TITAN,
        {"data": 32, "model": 8}, 16, 8192, remat="full", fp8=True, gib=71.9, more=("tensor",),
        differs=(GRAND_TETON, "sequence-parallel norms"),
    ),
    Published(
        "torchtitan, Llama 3.1 8B, 32 H200, fp8", TITAN_H200, 10938, "3 8B", "h200", {"data": 32}, 2, 8192, fp8=True,
        gib=47.96, differs=(SELECTIVE, "fp8 all-gathers"),
    ),
    Published(
        "torchtitan, Llama 3.1 8B, 64 H200, fp8", TITAN_H200, 10753, "3 8B", "h200", {"data": 64}, 2, 8192, fp8=True,
        gib=46.97, differs=(SELECTIVE, "fp8 all-gathers"),
    ),
    _a100("Llama 3 8B, selective op", "3 8B", 1, 8192, 2973, "min_cut"),
    _a100("Llama 3 70B, full recomputation", "3 70B", 1, 8192, 331, "full"),
    _a100("Llama 2 13B, no recomputation", "2 13B", 2, 4096, 2162, "none"),
    _a100("Llama 2 13B, selective op", "2 13B", 2, 4096, 1904, "min_cut"),
    _a100("Llama 2 70B, full recomputation", "2 70B", 2, 4096, 353, "full"),
    Published(
        "nanochat d32 (1.9 B), 8 H100", NANOCHAT, 524_288 / 1.57276 / 8, "nanochat d32", "h100",
        {"data": 8}, 8, 2048, 4,
        zero="shard_opt_state", remat="none", differs=("Muon and relu^2; planned with AdamW and GELU",),
    ),
    _llmq("1.5B", "h100", 1, "bf16", 16, 58_000),
    _llmq("1.5B", "h100", 1, "fp8", 16, 68_000),
    _llmq("3B", "h100", 1, "bf16", 8, 30_000),
    _llmq("7B", "h100", 1, "bf16", 4, 14_000),
    _llmq("7B", "h100", 1, "fp8", 4, 18_000, remat="min_cut"),
    _llmq("0.5B", "rtx4090", 1, "bf16", 8, 40_000),
    _llmq("1.5B", "rtx4090", 1, "bf16", 4, 14_000),
    _llmq("1.5B", "rtx4090", 1, "fp8", 4, 19_000),
    _llmq("7B", "rtx4090", 1, "bf16", 4, 1_900, **OFFLOADED),
    _llmq("7B", "rtx4090", 4, "bf16", 8, 7_000, **{**OFFLOADED, "zero": "shard_params"}),
    _llmq("14B", "rtx4090", 4, "bf16", 4, 2_500, **{**OFFLOADED, "zero": "shard_params"}),
    _llmq("1.5B", "l40s", 1, "bf16", 8, 17_000),
    _llmq("3B", "l40s", 1, "bf16", 4, 8_900),
)  # fmt: skip
NOT_EXPRESSED = (
    "torchtitan, Llama 3.1 405B, 512 H100 (100 to 128 tokens/s per device): pipeline stages of models with tensor "
    "parallelism and fp8 were not planned for lack of time",
    "torchtitan with context parallelism: sequence_parallel exchanges positions for heads or gathers keys; it has no "
    "ring of keys and values",
    "LLMQ: moments in bf16 (fzero stores them in fp32 or int8); masters and moments in host memory, while the update "
    "streams them through the GPU and gradients stay there",
    "fp8 runs of torchtitan and LLMQ gather or keep parameters in fp8; fzero gathers and stores them in bf16",
    "MegaTrain (272 TFLOP/s with Qwen2.5 7B on one H100, https://github.com/DLYuanGod/MegaTrain), SuperOffload (up to "
    "600 TFLOP/s on a GH200, https://pytorch.org/?p=5419) and ALST: we found no batch and sequence length for their "
    "speeds, and GH200, whose link to the host is NVLink, is no known device",
)
"""What the plans of fzero cannot express, or what was left out."""


def published(args: argparse.Namespace) -> Table:
    """Published training speeds of GPUs, compared with plans.

    The shares of the datasheets' peaks that products, kernels and links reach are fitted on every second row (the
    smallest mean of the squared logarithm of the ratio); the table has the error of the others. A plan whose file is
    in `--plans` is not made again. `--only`: the rows whose name has this. `--tables`: the rows whose plans are there.
    """
    args.plans.mkdir(parents=True, exist_ok=True)
    wanted = [row for row in ROWS if (args.only or "").lower() in row.name.lower()]
    found: dict[str, dict[str, Any]] = {}
    for row in wanted:
        path = args.plans / f"published-{ROWS.index(row)}.json"
        if args.tables and not path.exists():
            continue
        if not path.exists():
            print(row.name, file=sys.stderr)
            command = [
                sys.executable,
                "-c",
                _ONE,
                str(Path(__file__).parents[1]),
                str(ROWS.index(row)),
                str(args.layers),
            ]
            env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                path.write_text(json.dumps({"refused": (done.stderr.strip().splitlines() or ["?"])[-1]}))
            else:
                path.write_text(done.stdout.splitlines()[-1])
        found[row.name] = json.loads(path.read_text())
    return _table(wanted, found)


_ONE = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import published
published.one(int(sys.argv[2]), int(sys.argv[3]))
"""

SHARES = {"compute": 0.65, "memory": 0.85, "link": 0.8}
"""The shares of a datasheet's peaks that plans assume (fzero/plan/device_lookup.py)."""
_LARGER = 1.25


def one(index: int, layers: int) -> None:
    """Prints the planned values of a row, with those for devices whose rates are larger by `_LARGER`."""
    import torch
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    import fzero as fz
    from fzero import optim
    from fzero.plan.device_lookup import get_device

    row, begin = ROWS[index], time.process_time()
    with torch.device("meta"):
        model = fz.hf.from_config(AutoModelForCausalLM, _config(row.model, row.seq, layers))
    moments = "int8" if row.pure_bf16 and not row.host else "fp32"
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4, state_dtype=moments))
    ranks = math.prod(row.axes.values())
    transforms: list[Any] = [getattr(fz, row.zero)()] if row.zero and row.axes["data"] > 1 else []
    if "tensor" in row.more:
        transforms.append(fz.tensor_parallel(rules=fz.hf.tensor_rules(model, ranks=row.axes["model"])))
    transforms.append(fz.mixed_precision("bf16", params="bf16" if row.pure_bf16 else "fp32"))
    transforms += [fz.fp8()] if row.fp8 else []
    transforms.append(fz.remat(row.remat))
    transforms += [fz.accumulate(row.micro)] if row.micro > 1 else []
    transforms += [fz.offload("cpu", ("opt_state", "params"))] if row.host else []
    ids = torch.empty(row.batch * row.micro, row.seq, dtype=torch.int64, device="meta")
    step = fz.compose(*transforms)(model.train_step(optimizer))
    device = get_device(row.device)
    budget: dict[str, Any] = (
        {"memory_budget": int(device.memory_bytes * 0.97), "host_budget": row.host * 10**9} if row.host else {}
    )
    lowered = fz.lower(
        step, fz.AbstractMesh(**row.axes).of_type("cuda"), model.params, {"input_ids": ids, "labels": ids},
        device=device, backend=row.backend, **budget,
    )  # fmt: skip
    plan = lowered.plan
    tokens = ids.numel() * row.axes["data"] / ranks
    data = {"seconds": plan.step_seconds, "tokens": tokens, "peak_bytes": plan.peak_bytes}
    data |= {"host_peak_bytes": plan.host_peak_bytes, "mfu": plan.mfu, "bound_by": plan.bound_by}
    for share in SHARES:
        data[share] = lowered.plan_on(_faster(device, share, _LARGER), row.backend).step_seconds
    print(json.dumps(data | {"cpu_seconds": time.process_time() - begin}))


def _config(model: str, seq: int, layers: int) -> Any:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config  # pyright: ignore[reportMissingImports]

    if model == "nanochat d32":
        return GPT2Config(
            vocab_size=65536, n_positions=seq, n_embd=2048, n_layer=layers or 32, n_head=16, tie_word_embeddings=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    kind, sizes = (LlamaConfig, LLAMA) if model in LLAMA else (Qwen2Config, QWEN)
    vocab, width, hidden, depth, heads, shared, tied = sizes[model]
    return kind(
        vocab_size=vocab, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers or depth,
        num_attention_heads=heads, num_key_value_heads=shared, max_position_embeddings=seq, tie_word_embeddings=tied,
    )  # fmt: skip


def _faster(device: Any, share: str, factor: float) -> Any:
    """A device that reaches a larger share of its peaks."""
    times = lambda rates: {name: rate * factor for name, rate in rates.items()}  # noqa: E731
    if share == "compute":
        faster = {"flops": times(device.flops), "attention": {k: times(v) for k, v in device.attention.items()}}
        return replace(device, transcendentals=device.transcendentals * factor, **faster)
    if share == "memory":
        return replace(device, memory_bandwidth=device.memory_bandwidth * factor)
    links = {name: replace(link, bandwidth=link.bandwidth * factor) for name, link in device.links.items()}
    return replace(
        device, links=links, host_copy=replace(device.host_copy, bandwidth=device.host_copy.bandwidth * factor)
    )


@dataclass(frozen=True)
class _Linear:
    """The seconds of a step as a linear function of the inverse of each share, through the plan and those with larger
    shares."""

    seconds: float
    slopes: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(case: dict[str, Any]) -> _Linear:
        slopes = {s: (case["seconds"] - case[s]) / (1 / SHARES[s] - 1 / (SHARES[s] * _LARGER)) for s in SHARES}
        return _Linear(case["seconds"], slopes)

    def at(self, shares: dict[str, float]) -> float:
        return self.seconds + sum(k * (1 / shares[s] - 1 / SHARES[s]) for s, k in self.slopes.items())


def _fitted(rows: list[tuple[Published, dict[str, Any]]]) -> dict[str, float]:
    """The shares, in steps of 0.01, with the smallest mean squared logarithm of planned over published speed."""
    linear = [(_Linear.of(case), case["tokens"] / row.tokens) for row, case in rows]
    error = lambda shares: sum(math.log(x.at(shares) / seconds) ** 2 for x, seconds in linear)  # noqa: E731
    best = dict(SHARES)
    for _ in range(20):
        before = error(best)
        for share in SHARES:
            best = min(({**best, share: n / 100} for n in range(30, 101)), key=error)
        if error(best) > 0.9999 * before:
            break
    return best


def _table(wanted: list[Published], found: dict[str, dict[str, Any]]) -> Table:
    planned = [(row, case) for row in wanted if "seconds" in (case := found.get(row.name, {}))]
    fit = _fitted(planned[::2])
    rows, errors = [], {"assumed": [], "fitted, its rows": [], "fitted, the other rows": []}
    for i, (row, case) in enumerate(planned):
        plain = case["tokens"] / case["seconds"]
        again = case["tokens"] / _Linear.of(case).at(fit)
        memory = f"{case['peak_bytes'] / 2**30:.1f}" + (f" ({row.gib:g})" if row.gib else "")
        rows.append(
            [row.name, f"{row.tokens:,.0f}", f"{plain:,.0f}", f"{plain / row.tokens:.2f}", f"{again / row.tokens:.2f}"]
            + ["yes" if i % 2 == 0 else "", memory]
        )
        errors["assumed"].append(abs(math.log(plain / row.tokens)))
        errors[f"fitted, {'its' if i % 2 == 0 else 'the other'} rows"].append(abs(math.log(again / row.tokens)))
    shown = ", ".join(f"{share} {fit[share]:.2f} (assumed: {SHARES[share]:g})" for share in SHARES)
    notes = [
        "tokens/s are those of one device. A ratio above 1: the plan is faster than what was published.",
        f"Shares of the datasheets' peaks, fitted on every second row: {shown}. The seconds of a plan are taken as "
        "linear in the inverse of each share.",
        *(
            f"Median error, {what}: {math.exp(statistics.median(values)) - 1:.0%}; "
            f"largest {math.exp(max(values)) - 1:.0%}"
            for what, values in errors.items()
            if values
        ),
        "memory: GiB of the program at its peak, without the process (in brackets: published, of the whole device).",
    ]
    notes += [
        f"Not planned: {row.name}: {case.get('refused', 'for lack of time')}"
        for row in wanted
        if "seconds" not in (case := found.get(row.name, {}))
    ]
    different: dict[str, list[str]] = {}
    for i, (row, _) in enumerate(planned):
        for text in row.differs:
            different.setdefault(text, []).append(str(i + 1))
    notes += [f"Differs in rows {', '.join(numbers)}: {text}" for text, numbers in different.items()]
    sources: dict[str, list[str]] = {}
    for i, (row, _) in enumerate(planned):
        sources.setdefault(row.source, []).append(str(i + 1))
    notes += [f"Source of rows {', '.join(numbers)}: {url}" for url, numbers in sources.items()]
    notes += [f"Not expressed: {text}" for text in NOT_EXPRESSED]
    columns = ("run", "published tokens/s", "planned", "ratio", "ratio, fitted", "fitted on", "memory GiB")
    rows = [[f"{i + 1}. {name}", *rest] for i, (name, *rest) in enumerate(rows)]
    data = {"cases": {row.name: {**asdict(row), **case} for row, case in planned}, "shares": fit}
    return Table("Published and planned speeds of GPUs", columns, rows, notes, data)
