"""Every pair of transforms trains as the plain step does, or is rejected by the error it should be rejected by.

Three steps of a small model on simulated ranks, two along each axis, are compared with one shared run of the plain
step, within the tolerances of `check_equivalent`. The transforms are those of tests/pieces.py.
`PYTHONPATH=tests python tests/transforms/test_pairs.py` writes docs/results/axes.md.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
import torch.nn.functional as F
from pieces import PIECES, composed, kind

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, TransformError
from fzero.mesh import AbstractMesh
from fzero.runtime.cuda_graphs import obstacles
from fzero.testing.reference_trajectory import Trajectory
from fzero.testing.tolerance import Roundoff
from fzero.transforms.tensor import TensorParallel

STEPS = 3
WIDTH, HEADS, EXPERTS, LENGTH = 16, 2, 4, 8
ROWS = 16  # one for each rank and micro-batch of the largest composition
WORDS = 256  # embedding and head then have the 4,096 elements that `compress` needs
RULES: dict[str, Any] = {"embedding": 0, "qkv": (1, 3), "out": 0, "up": 1, "down": 0, "head": 1}
NAMES = [*PIECES]
PAIRS = [*itertools.combinations(NAMES, 2)]
TRIPLES = [("pipeline", "tensor", name) for name in NAMES if name not in ("pipeline", "tensor")]


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:  # float32[batch, seq, width]
    """Attention, then a multi-layer perceptron or, if the parameters have a router, a mixture of experts."""
    q, k, v = (F.layer_norm(x, (WIDTH,), p["norm"]) @ p["qkv"]).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    if "router" not in p:
        return x + F.gelu(x @ p["up"]) @ p["down"]
    rows = x.flatten(0, 1)
    weights, chosen = (rows @ p["router"]).softmax(-1).topk(2, -1)
    rows, back = fz.experts.dispatch(rows, chosen, weights, num_experts=EXPERTS, capacity=EXPERTS / 2)  # drops no row
    rows = fz.experts.matmul(F.silu(fz.experts.matmul(rows, p["expert_up"], back)), p["expert_down"], back)
    return x + fz.experts.combine(rows, back).view_as(x)


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    x = p["embedding"][batch["x"]]
    for block in p["layers"]:
        x = layer(block, x)
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), batch["y"].flatten())


PLAIN = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)))


@functools.cache
def params(experts: bool) -> Any:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.3  # noqa: E731

    def block() -> dict[str, torch.Tensor]:
        attention = {"norm": draw(WIDTH) + 1, "qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH)}
        if not experts:
            return attention | {"up": draw(WIDTH, 2 * WIDTH), "down": draw(2 * WIDTH, WIDTH)}
        up, down = draw(EXPERTS, WIDTH, WIDTH), draw(EXPERTS, WIDTH, WIDTH)
        return attention | {"router": draw(WIDTH, EXPERTS), "expert_up": up, "expert_down": down}

    return {"embedding": draw(WORDS, WIDTH), "head": draw(WIDTH, WORDS), "layers": [block() for _ in range(2)]}


@functools.cache
def batch() -> Any:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for name in ("x", "y")}


@functools.cache
def plain_run(experts: bool, size: Roundoff) -> Trajectory:
    """The plain step, once for each kind of model and round-off."""
    return simulated.plain_run(PLAIN, params(experts), batch(), STEPS, size)


def step_of(names: Sequence[str]) -> tuple[Any, AbstractMesh]:
    """The step with the transforms of some pieces, and the mesh that they need."""
    transforms, axes = composed(names)
    # Rules that are given save looking for them, which takes longer than three steps; the gate has chosen ones.
    rules = {name: dim for name, dim in RULES.items() if "expert" not in names or name not in ("up", "down")}
    given = functools.partial(fz.tensor_parallel, rules=rules)
    transforms = [given(sequence=t.sequence) if isinstance(t, TensorParallel) else t for t in transforms]
    mesh = AbstractMesh(unified_memory=False, **(axes or {"data": 1}))
    return fz.compose(*transforms)(PLAIN), mesh


def differences(names: Sequence[str]) -> list[str]:
    step, mesh = step_of(names)
    experts = "expert" in names
    plain = functools.partial(plain_run, experts)
    return simulated.differences(step, mesh, params(experts), batch(), STEPS, plain)


PARAMS = ("zero_3", "zero_3_two_axes", "zero_3_state_two_axes", "zero_3_replicated", "hierarchical")
PIPELINES = ("pipeline", "pipeline_zb")
TWO_PARAMS = itertools.product(("zero_3", "zero_3_replicated"), ("zero_3_two_axes", "hierarchical"))
REASONS: dict[str, Iterable[tuple[str, str]]] = {
    "does nothing: no tensor is sharded over axis 'data'": [("data_parallel", "redundant")],
    r"shard_grads \(ZeRO-2\) does all that shard_opt_state \(ZeRO-1\) does": [("zero_1", "zero_2")],
    r"shard_params \(ZeRO-3\) does all that shard_(opt_state|grads) \(ZeRO-[12]\) does": [
        *itertools.product(("zero_1", "zero_2"), PARAMS),
        ("zero_3_state_two_axes", "hierarchical"),
    ],
    "two different shard_params": [*TWO_PARAMS, ("zero_3_two_axes", "zero_3_state_two_axes")],
    "two different tensor_parallel": [("tensor", "tensor_sequence")],
    "two axes would shard positions: leave sequence=True out": [("tensor_sequence", "sequence")],
    "does not support parameters that a rank does not have": [
        *itertools.product(PIPELINES, ("fp8", "offload_host", "offload_disk")),
        *(("hierarchical", name) for name in PIPELINES),
    ],
    "pipeline stages split transfers by value, and several values are encoded together": [
        (x, "compress") for x in PIPELINES
    ],
    "two different pipeline": [PIPELINES],
    "two different accumulate": [("accumulate", "accumulate_layerwise")],
    "two different remat": [("remat_full", "remat_none")],
    "two different mixed_precision": [*itertools.combinations(("bf16", "bf16_stored", "fp16"), 2)],
    "opt_state, params: one tensor sent to two tiers": [("offload_host", "offload_disk")],
    r"(?s)tensors are stored on disk, and are not sent.*params\['embedding'\]": [("offload_disk", "redundant")],
}
REJECTED = {tuple(sorted(pair, key=NAMES.index)): reason for reason, pairs in REASONS.items() for pair in pairs}


def cases(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """Those with a piece that is not common are for --full."""
    return [
        pytest.param(pair, id="-".join(pair), marks=[] if all(PIECES[x].common for x in pair) else pytest.mark.full)
        for pair in pairs
    ]


@pytest.mark.parametrize("pair", cases(pair for pair in PAIRS if pair not in REJECTED))
def test_a_pair_trains_as_the_plain_step(pair: tuple[str, str]) -> None:
    assert differences(pair) == []


@pytest.mark.parametrize("pair", cases(REJECTED))
def test_a_pair_that_does_not_compose_is_rejected(pair: tuple[str, str]) -> None:
    with pytest.raises(FzeroError, match=REJECTED[pair]) as raised:
        differences(pair)
    assert "\nFix: " in str(raised.value)
    if "conflicts with" in str(raised.value):  # in either order; of several conflicts, the first is named
        with pytest.raises(TransformError, match="conflicts with"):
            differences(pair[::-1])


@pytest.mark.full
@pytest.mark.parametrize("names", TRIPLES, ids="-".join)
def test_with_pipeline_and_tensor(names: tuple[str, ...]) -> None:
    inside = [pair for pair in REJECTED if {*pair} <= {*names}]
    if not inside:
        assert differences(names) == []
    else:
        with pytest.raises(FzeroError, match=REJECTED[inside[0]]):
            differences(names)


def test_the_overview_lists_the_pairs_that_do_not_compose() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transforms" / "index.md").read_text()
    _, _, table = text.partition("| transform | cannot be combined with |")
    rows = [[{*re.findall(r"`(\w+)", cell)} for cell in row.split("|")[1:3]] for row in table.splitlines()]
    listed = {frozenset(pair) for row in rows if len(row) == 2 for pair in itertools.product(*row)}
    kinds = {name: [kind(t) for t in PIECES[name].make()] for name in NAMES}
    missing = [
        f"{a} and {b}"
        for a, b in REJECTED
        if not {*kinds[a]} & {*kinds[b]}  # otherwise they are two configurations of one transform, or two stages
        and frozenset((PIECES[a].make()[-1].name, PIECES[b].make()[-1].name)) not in listed
    ]
    assert not missing, "\n".join(missing)


# The page


def outcome(names: tuple[str, ...]) -> tuple[str, str]:
    """What becomes of a composition, and whether its runs on a GPU are captured."""
    try:
        if found := differences(names):
            raise AssertionError("\n".join([" + ".join(names), *found]))
    except FzeroError as error:
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix:")]
        return ": ".join(lines[:2]).removeprefix("fzero."), ""
    step, mesh = step_of(names)
    parts = simulated.batch_parts(step, mesh, batch())
    lowered = fz.lower(step, mesh.of_type("cuda"), params("expert" in names), parts[0], device="h100")
    found = {x.split(":")[0] for program in lowered.programs for x in obstacles(program)}
    return "equal", "; ".join(sorted(found))


def page(found: Mapping[tuple[str, ...], tuple[str, str]]) -> str:
    """A matrix of pairs, the triples, and the reasons of rejections."""
    reasons: dict[str, int] = {}

    def cell(names: tuple[str, ...]) -> str:
        text = found[names][0]
        return "=" if text == "equal" else f"[{reasons.setdefault(text, len(reasons) + 1)}]"

    lines = ["# Compositions of transforms", ""]
    lines += ["`=`: equal to the plain step. A number: rejected, for the reason below.", ""]
    lines += [f"| | {' | '.join(NAMES[1:])} |", "|---|" + "---|" * (len(NAMES) - 1)]
    for i, a in enumerate(NAMES[:-1]):
        lines.append(f"| {a} | {' | '.join(cell((a, b)) if j > i else '' for j, b in enumerate(NAMES) if j)} |")
    lines += ["", "## With pipeline and tensor", "", "| and | |", "|---|---|"]
    lines += [f"| {names[2]} | {cell(names)} |" for names in TRIPLES]
    lines += ["", "## Reasons", "", *(f"{number}. {text}" for text, number in reasons.items())]
    lines += ["", "## CUDA graphs", "", "Lowered for GPUs, the runs of all equal compositions are captured except:", ""]
    kinds: dict[str, list[str]] = {}
    for names, (text, graphs) in found.items():
        if text == "equal" and graphs:
            kinds.setdefault(graphs, []).append(" + ".join(names))
    lines += [f"- {why}: {len(of)}, such as {of[0]}" for why, of in sorted(kinds.items())]
    model = "A GPT of 2 layers, with 4 experts where one is of experts, two ranks along each axis, three steps of AdamW"
    return "\n".join([*lines, "", f"{model} with clipping, on simulated ranks. torch {torch.__version__}.", ""])


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin, outcomes = time.process_time(), {}
    for each in (*PAIRS, *TRIPLES):
        outcomes[each] = outcome(each)
        print(" + ".join(each), *outcomes[each], sep=" | ", flush=True)
    (Path(__file__).parents[2] / "docs" / "results" / "axes.md").write_text(page(outcomes))
    print(f"{time.process_time() - begin:.0f} CPU seconds", file=sys.stderr)
