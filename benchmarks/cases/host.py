"""An optimizer on the host: fzero's update alone, beside torch's fused AdamW and DeepSpeedCPUAdam."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import rss_mib, verdict

from cases import Table, processes

LR, WEIGHT_DECAY, BETAS, EPS = 1e-3, 0.01, (0.9, 0.999), 1e-8
PAUSE_S = 0.02  # before a turn: threads of the one before that still spin go to sleep
BYTES = {  # a parameter, read and written
    "fzero AdamW": 28,
    "fzero AdamW, bf16 in and out": 28,
    "fzero Lion": 20,
    "fzero, a user's own": 20,
    "torch fused": 28,
    "cast, fused, cast": 40,
    "cast, fused, cast, buffers kept": 40,
    "DeepSpeedCPUAdam": 28,
    "DeepSpeedCPUAdam bf16": 22,
    "DeepSpeedCPUAdam bf16, moments too": 14,
    "copy_": 8,
}
HOST_LIMITS = [  # of the first one's time over the second's
    ("fzero AdamW", "torch fused", 1.05),
    ("fzero AdamW", "DeepSpeedCPUAdam", 1.0),
    ("fzero AdamW, bf16 in and out", "fzero AdamW", 1.25),
    ("fzero AdamW, bf16 in and out", "DeepSpeedCPUAdam bf16", 0.35),
    ("fzero AdamW, bf16 in and out", "cast, fused, cast", 0.35),
]
SAME_RATE = 1.05  # of AdamW's time a byte, for other optimizers
RESTING = 12.2  # bytes a parameter


# --- all contestants ---


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import torch

    import fzero as fz
    from fzero import optim
    from fzero._utils.host_memory import host_tensors
    from fzero.runtime.build.build import build

    torch.set_num_threads(args.threads)
    # peers allocate as they do without fzero; its update allocates nothing
    mesh = fz.make_mesh(device="cpu", keep_freed_memory=False)

    def measure(leaves: int) -> dict[str, Any]:
        if args.avx2:
            _without_avx512()
        total = int(args.millions * 2**20)
        sizes = [total // leaves] * leaves
        adamw = update_of(optim.adamw(LR, *BETAS, eps=EPS, weight_decay=WEIGHT_DECAY), sizes)
        updates = {
            "fzero AdamW": adamw,
            "fzero AdamW, bf16 in and out": in_bf16(adamw),
            "fzero Lion": update_of(optim.lion(LR, weight_decay=WEIGHT_DECAY), sizes),
            "fzero, a user's own": update_of(signed_root(LR), sizes),
        }
        built = build({name: update.function for name, update in updates.items()}, "inductor", mesh)

        before = rss_mib()
        roles = "params", "mu", "nu"
        state = iter(host_tensors([((size,), torch.float32) for _ in roles for size in sizes], mesh))
        params, mu, nu = ([next(state).fill_(0) for _ in sizes] for _ in roles)
        resting = (rss_mib() - before) * 2**20 / total
        dtypes = torch.float32, torch.float32, torch.bfloat16, torch.bfloat16
        buffers = iter(host_tensors([((size,), dtype) for dtype in dtypes for size in sizes], mesh))
        grads, kept, low_grads, low_params = ([next(buffers) for _ in sizes] for _ in dtypes)

        generator = torch.Generator().manual_seed(0)
        for g, low in zip(grads, low_grads, strict=True):
            low.copy_(g.normal_(generator=generator))
        tensors = {}
        for i in range(leaves):
            state_of = {f"params['w{i}']": params[i], f"opt_state.mu['w{i}']": mu[i], f"opt_state.nu['w{i}']": nu[i]}
            tensors |= {**state_of, f"d_w{i}": grads[i], f"low_w{i}": low_params[i]}
        low_tensors = {**tensors, **{f"d_w{i}": low for i, low in enumerate(low_grads)}}

        def run(name: str) -> Callable[[], Any]:
            own, update = built[name], updates[name]
            values = {**(low_tensors if "bf16" in name else tensors), **update.scalars}
            given = [values[n] for n in update.names]
            return lambda: own(*given)

        steps = [torch.tensor(1.0) for _ in sizes]

        def fused(gradients: list[Any]) -> None:
            options: Any = {
                "lr": LR,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "weight_decay": WEIGHT_DECAY,
                "eps": EPS,
                "amsgrad": False,
                "maximize": False,
            }
            torch._fused_adamw_(params, gradients, mu, nu, [], steps, **options)

        def cast_fused_cast() -> list[Any]:
            fused([g.float() for g in low_grads])
            return [p.bfloat16() for p in params]

        def cast_fused_cast_kept() -> None:
            for g, low in zip(kept, low_grads, strict=True):
                g.copy_(low)
            fused(kept)
            for low, p in zip(low_params, params, strict=True):
                low.copy_(p)

        turns = {name: run(name) for name in updates}
        turns |= {
            "torch fused": lambda: fused(grads),
            "cast, fused, cast": cast_fused_cast,
            "cast, fused, cast, buffers kept": cast_fused_cast_kept,
        }
        turns |= _deepspeed(params, mu, nu, grads, low_params, low_grads)
        turns["copy_"] = lambda: [k.copy_(g) for k, g in zip(kept, grads, strict=True)]

        def one_update(turn: Callable[[], Any]) -> list[Any]:
            """The beginning of every leaf after one update of ones."""
            for p, m, v in zip(params, mu, nu, strict=True):
                p.fill_(1)
                m.zero_()
                v.zero_()
            turn()
            return [p[: 1 << 16].clone() for p in params]

        expected = one_update(turns["torch fused"])
        for name in ("fzero AdamW", "DeepSpeedCPUAdam"):
            if name in turns:
                torch.testing.assert_close(
                    one_update(turns[name]), expected, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
        torch.testing.assert_close(
            one_update(turns["fzero AdamW, bf16 in and out"]),
            one_update(turns["cast, fused, cast, buffers kept"]),
            rtol=0,
            atol=1e-6,
        )
        one_update(turns["fzero AdamW, bf16 in and out"])
        assert all(torch.equal(low, p.bfloat16()) for low, p in zip(low_params, params, strict=True))

        wall: dict[str, list[float]] = {name: [] for name in turns}
        cpu: dict[str, list[float]] = {name: [] for name in turns}
        for turn_number in range(args.rounds + 1):
            for name, turn in turns.items():
                time.sleep(PAUSE_S)
                seconds, of_threads = time.perf_counter(), time.process_time()
                turn()
                if turn_number:  # the first warms up
                    wall[name].append(time.perf_counter() - seconds)
                    cpu[name].append(time.process_time() - of_threads)
        return {"leaves": leaves, "parameters": sum(sizes), "resting": resting, "wall_s": wall, "cpu_s": cpu}

    return {"measure": measure}


def _deepspeed(
    params: list[Any], mu: list[Any], nu: list[Any], grads: list[Any], low_params: list[Any], low_grads: list[Any]
) -> dict[str, Callable[[], Any]]:
    """Its turns over the same tensors, if it is installed. In bf16 it has no fp32 masters; by default its moments are
    in fp32."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import importlib.util

    import torch

    if importlib.util.find_spec("deepspeed") is None:
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # builds an operator on the first run on a machine: a minute

    def turn(values: list[Any], gradients: list[Any], moments: Any, **options: Any) -> Callable[[], Any]:
        make: Any = DeepSpeedCPUAdam
        leaves = [torch.nn.Parameter(torch.zeros(0, dtype=v.dtype)) for v in values]
        optimizer = make(leaves, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True, **options)
        for leaf, value, grad in zip(leaves, values, gradients, strict=True):
            leaf.data, leaf.grad = value, grad
        for leaf, m, v in zip(leaves, *moments, strict=True) if moments else ():
            optimizer.state[leaf].update(step=0, exp_avg=m, exp_avg_sq=v)
        return optimizer.step

    return {
        "DeepSpeedCPUAdam": turn(params, grads, (mu, nu)),
        "DeepSpeedCPUAdam bf16": turn(low_params, low_grads, (mu, nu)),
        "DeepSpeedCPUAdam bf16, moments too": turn(low_params, low_grads, None, fp32_optimizer_states=False),
    }


def _without_avx512() -> None:
    """Everybody compiles for AVX2; ATEN_CPU_CAPABILITY, which main sets, has torch's own operators follow."""
    import torch._inductor.config as config

    config.cpp.simdlen = 256
    try:
        from deepspeed.ops.op_builder import builder
    except ImportError:
        return
    made: Any = builder.OpBuilder
    made.cpu_arch = lambda self: "-march=x86-64-v3"
    made.simd_width = lambda self: "-D__AVX256__"


# --- the table ---


def host_optimizer(args: argparse.Namespace) -> Table:
    """fzero's update of 64 M parameters beside torch's fused AdamW and DeepSpeedCPUAdam, in fp32 and around bf16.

    fzero's is the update of a program, compiled as a step on a CPU compiles it, over a state as the host tier allocates
    it. All contestants update the same tensors: the distances between leaves decide more than code does. In a round
    each has one turn. `--avx2` compiles everything as on a CPU without AVX-512. DeepSpeed's operator is built on the
    first run on a machine: a minute.
    """
    if args.avx2:
        folder = str(Path.home() / ".cache" / "torch_extensions_avx2")
        os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "TORCH_EXTENSIONS_DIR": folder}
    found: list[dict[str, Any]] = []
    for leaves in args.leaves:
        with processes(args, 1, threads=args.threads, timeout=3000) as group:
            found += group.ask("measure", leaves=leaves)
    rows, notes = [], []
    for x in found:
        wall, total, where = x["wall_s"], x["parameters"], f"{x['leaves']} {'leaf' if x['leaves'] == 1 else 'leaves'}"

        def ratio(one: str, other: str, wall: Any = wall) -> float:
            """The median of the rounds' ratios."""
            return statistics.median(a / b for a, b in zip(wall[one], wall[other], strict=True))

        for name in wall:
            seconds = statistics.median(wall[name])
            milliseconds = [f"{1e3 * s:.1f}" for s in (seconds, min(wall[name]), statistics.median(x["cpu_s"][name]))]
            rate = (BYTES[name], f"{BYTES[name] * total / seconds / 1e9:.1f}", f"{ratio(name, 'torch fused'):.2f}")
            rows.append((f"{name}, {where}", *milliseconds, *rate))
        checks = [
            (f"{one}: {ratio(one, other):.2f} x {other}", ratio(one, other), limit)
            for one, other, limit in HOST_LIMITS
            if other in wall
        ]
        for name in ("fzero Lion", "fzero, a user's own"):
            slower = ratio(name, "fzero AdamW") * BYTES["fzero AdamW"] / BYTES[name]
            checks.append((f"{name}: {slower:.2f} x AdamW's time a byte", slower, SAME_RATE))
        resting = f"masters and moments take {x['resting']:.2f} bytes a parameter"
        checks.append((resting, x["resting"], RESTING))
        notes += [
            f"{where}: {text}, at most {limit:g} wanted: {verdict(value, limit)}" for text, value, limit in checks
        ]
        if "DeepSpeedCPUAdam" not in wall:
            notes.append("DeepSpeed is not installed: `pip install -e '.[bench]'`")
    notes = [
        f"{found[0]['parameters'] / 2**20:g} x 2^20 parameters, {args.threads} threads{', AVX2' if args.avx2 else ''}; "
        f"medians of {args.rounds} rounds, ratios within a round.",
        "Cast, fused, cast: gradients to fp32, torch's fused AdamW, parameters to bf16, in memory allocated anew as "
        "torch does by default; or in buffers kept. DeepSpeed in bf16 has no fp32 masters.",
        *notes,
    ]
    columns = ("", "ms", "least ms", "CPU ms", "bytes a parameter", "GB/s", "x fused")
    return Table("An optimizer on the host", columns, rows, notes, {"points": found})


# --- fzero's update as a function ---


class SignedRoot(NamedTuple):
    mu: Any


def signed_root(lr: float, b1: float = 0.9) -> Any:
    """What a user might write: steps of the signed square root of a momentum."""
    import torch

    import fzero as fz
    from fzero import optim

    def init(params: Any) -> SignedRoot:
        return SignedRoot(fz.tree.map(torch.zeros_like, params))

    def update(grads: Any, state: SignedRoot, params: Any = None) -> tuple[Any, SignedRoot]:
        mu = fz.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        return fz.tree.map(lambda m: -lr * m.sign() * m.abs().sqrt(), mu), SignedRoot(mu)

    return optim.GradientTransformation(init, update)


@dataclass(frozen=True)
class Update:
    """The update of a program: its function, the names of the arguments, and the values of those that are scalars."""

    function: Any
    names: tuple[str, ...]
    scalars: Mapping[str, Any]


def update_of(optimizer: Any, sizes: Sequence[int]) -> Update:
    """The one that `train_step` makes of an optimizer for leaves `w0`, `w1`, … of these sizes, in its first step."""
    import torch

    import fzero as fz
    from fzero.runtime.build.build import build

    def loss(params: Any, batch: Any) -> Any:
        return sum((w * batch).sum() for w in params.values())

    params = {f"w{i}": torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    program = fz.lower(
        fz.train_step(loss, optimizer), fz.AbstractMesh(data=1), params, torch.empty((), device="meta")
    ).program
    calls = [line for line, _ in program.walk() if line.op == "call"]
    (update,) = [line for line in calls if line.writes]
    known = {"step": torch.tensor(0), "opt_state.count": torch.tensor(0), "loss_sum": torch.tensor(0.0)}
    for line in calls:
        if line.fn.startswith("scalars") and all(name in known for name in line.args):
            mesh = fz.make_mesh(device="cpu", keep_freed_memory=False)
            run = build({"f": program.functions[line.fn]}, "eager", mesh)["f"]
            results = run(*(known[name] for name in line.args))
            known |= zip((v.name for v in line.out), results if len(line.out) > 1 else [results], strict=True)
    return Update(
        program.functions[update.fn], update.args, {name: known[name] for name in update.args if name in known}
    )


def in_bf16(update: Update) -> Update:
    """The update with gradients in bfloat16, and with the new parameters in bfloat16 as one more written argument each,
    named `low_w0`, …"""
    import torch
    import torch.fx as fx

    from fzero.ir.program import Function
    from fzero.trace.recorder import Recorded

    aten, graph, recorded = torch.ops.aten, fx.Graph(), update.function.graph
    copies: dict[fx.Node, fx.Node] = {}
    for node in recorded.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    names, last, lows = dict(zip(inputs, update.names, strict=True)), inputs[-1], []
    for node in inputs:
        if names[node].startswith("d_"):
            value = node.meta["val"]
            node.meta = {**node.meta, "val": value.bfloat16()}
            with graph.inserting_after(inputs[-1]):
                up = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
            up.meta["val"] = value
            node.replace_all_uses_with(up, delete_user_cb=lambda user, up=up: user is not up)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and names[node.args[0]].startswith("params"):
            value = node.args[1].meta["val"].bfloat16()
            with graph.inserting_after(last):
                last = graph.placeholder(f"low_{len(lows)}")
            with graph.inserting_after(node):
                down = graph.call_function(aten._to_copy.default, (node.args[1],), {"dtype": torch.bfloat16})
            with graph.inserting_after(down):
                stored = graph.call_function(aten.copy_.default, (last, down))
            for made in (last, down, stored):
                made.meta["val"] = value
            lows.append("low_" + names[node.args[0]].split("'")[1])
    graph.output(())
    writes = *update.function.writes, *range(len(inputs), len(inputs) + len(lows))
    function = Function(f"{update.function.name}_bf16", Recorded(graph, recorded.constants), writes)
    return Update(function, (*update.names, *lows), update.scalars)
