"""Every pair of transforms, and triples with pipeline and tensor parallel: equal to the plain step, or refused by name.

Without --exhaustive a few. `python tests/transforms/test_pairs.py` writes docs/results/axes.md.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensor
import test_expert_parallel as experts
import torch

import fzero as fz
from fzero.errors import EquivalenceError, FzeroError
from fzero.mesh import AbstractMesh
from fzero.runtime.graphs import obstacles

PAGE = Path(__file__).parents[2] / "docs" / "results" / "axes.md"
RULES = {"emb": 0, "qkv": (1, 3), "out": 0, "head": 1}
BOTH, INNER = ("node", "data"), ("data", "node")
# by name: the axes that it needs, and what it puts on a step
PIECES: dict[str, tuple[tuple[str, ...], Callable[[], list[Any]]]] = {
    "ZeRO-1": (("data",), lambda: [fz.shard_opt_state()]),
    "ZeRO-2": (("data",), lambda: [fz.shard_grads()]),
    "ZeRO-3": (("data",), lambda: [fz.shard_params()]),
    "two-axis ZeRO-3": (BOTH, lambda: [fz.shard_params(axis=BOTH)]),
    "once_a_step": (BOTH, lambda: [fz.shard_params(axis=INNER), fz.accumulate(2), fz.once_a_step(axis="node")]),
    "tensor": (("model",), lambda: [fz.tensor_parallel(rules=RULES)]),
    "tensor, sequence": (("model",), lambda: [fz.tensor_parallel(rules=RULES, sequence=True)]),
    "sequence": (("seq",), lambda: [fz.sequence_parallel()]),
    "expert": (("expert",), lambda: [fz.expert_parallel(where=experts.of_experts)]),
    "pipeline": (("pipe",), lambda: [fz.accumulate(2, vertical=True), fz.pipeline()]),
    "accumulate, loop": ((), lambda: [fz.accumulate(2)]),
    "accumulate, vertical": ((), lambda: [fz.accumulate(2, vertical=True)]),
    "remat": ((), lambda: [fz.remat("full")]),
    "bf16": ((), lambda: [fz.mixed_precision("bf16")]),
    "fp8": ((), lambda: [fz.mixed_precision("bf16"), fz.fp8()]),
    "offload, cpu": ((), lambda: [fz.offload("cpu", ("params", "opt_state"))]),
    "offload, nvme": ((), lambda: [fz.offload("nvme", ("params", "opt_state"), path=tempfile.gettempdir())]),
    "redundant": (("data",), lambda: [fz.shard_opt_state(), fz.redundant()]),
}
PAIRS = [*itertools.combinations(PIECES, 2)]
TRIPLES = [("pipeline", "tensor", name) for name in PIECES if name not in ("pipeline", "tensor")]
BATCH = {"x": torch.cat([experts.batch()["x"]] * 2)}  # 16 rows: one for each rank and micro-batch
AXES = ("node", "data", "expert", "seq", "model", "pipe")
FAULT = "FAULT"


def composed(names: tuple[str, ...]) -> tuple[Any, AbstractMesh]:
    """The step with all that pieces put on it, each once, and the mesh that it needs."""
    axes = {axis: 2 for axis in AXES if any(axis in PIECES[name][0] for name in names)}
    put: dict[str, Any] = {}
    for name in names:
        put |= {str(t): t for t in PIECES[name][1]()}
    mesh = AbstractMesh(unified_memory=False, **(axes or {"data": 1}))
    return fz.compose(*put.values())(fz.train_step(experts.loss_of(), tensor.OPTIMIZER)), mesh


def outcome(names: tuple[str, ...]) -> tuple[str, str]:
    """What becomes of a composition, and whether a GPU's runs of it are captured."""
    try:
        step, mesh = composed(names)
        graphs = captured(step, mesh)
        alone = mesh.size == 1  # a real one then, which knows more of states than the simulated one
        on = fz.make_mesh(data=1, unified_memory=False) if alone else mesh
        fz.testing.check_equivalent(step, experts.params(), BATCH, on, steps=2)
    except EquivalenceError as error:
        return f"{FAULT}: {str(error).splitlines()[0]}", ""
    except FzeroError as error:
        return f"refused: {brief(error)}", ""
    except Exception as error:  # none may come from within
        return f"{FAULT}: {type(error).__name__}: {error}"[:300], ""
    return "equal", graphs


def captured(step: Any, mesh: AbstractMesh) -> str:
    """ "captured", or the reasons why not."""
    shapes = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), (experts.params(), BATCH))
    parts = 1
    for axis in ("node", "data", "expert"):
        parts *= mesh.axes.get(axis, 1)
    rows = {"x": shapes[1]["x"][: len(shapes[1]["x"]) // parts]}
    lowered = fz.lower(step, mesh.of_type("cuda"), shapes[0], rows, device="h100")
    return (
        "; ".join(sorted({x.split(":")[0] for program in lowered.programs for x in obstacles(program)})) or "captured"
    )


def brief(error: FzeroError) -> str:
    """The first line of an error, with its first case."""
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("Fix:")]
    return ": ".join(lines[:2]).removeprefix("fzero.")


QUICK = [
    ("ZeRO-3", "sequence"),
    ("tensor", "redundant"),
    ("expert", "offload, cpu"),
    ("pipeline", "remat"),
    ("sequence", "fp8"),
    ("pipeline", "tensor", "expert"),
]


@pytest.mark.full
def test_some_compositions() -> None:
    assert {names: found for names in QUICK if (found := outcome(names)[0]).startswith(FAULT)} == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", PIECES)
def test_every_composition(first: str) -> None:
    every = [names for names in (*PAIRS, *TRIPLES) if names[0] == first]
    assert {names: found for names in every if (found := outcome(names)[0]).startswith(FAULT)} == {}


def page(found: Mapping[tuple[str, ...], tuple[str, str]], minutes: float) -> str:
    """A matrix of pairs, the triples, and the reasons of refusals."""
    reasons: dict[str, int] = {}
    number = lambda text: reasons.setdefault(text, len(reasons) + 1)  # noqa: E731
    cell = lambda text: "=" if text == "equal" else f"[{number(text)}]"  # noqa: E731
    names = [*PIECES]
    lines = ["# Compositions of transforms", ""]
    lines += ["`=`: equal to the plain step. A number: refused, for a reason below.", ""]
    lines += [f"| | {' | '.join(names[1:])} |", "|---|" + "---|" * (len(names) - 1)]
    for i, a in enumerate(names[:-1]):
        cells = [cell(found[a, b][0]) if j > i else "" for j, b in enumerate(names) if j]
        lines.append(f"| {a} | {' | '.join(cells)} |")
    lines += ["", "## With pipeline and tensor", "", "| and | |", "|---|---|"]
    lines += [f"| {third} | {cell(found[a, b, third][0])} |" for a, b, third in TRIPLES]
    lines += ["", "## Reasons", ""]
    lines += [f"{n}. {text.removeprefix('refused: ')}" for text, n in reasons.items()]
    kinds: dict[str, list[str]] = {}
    for pair, (text, graphs) in found.items():
        if text == "equal" and graphs != "captured":
            kinds.setdefault(graphs, []).append(" + ".join(pair))
    lines += [
        "",
        "## CUDA graphs",
        "",
        "By lowering for GPUs, runs of all equal compositions are captured but these:",
        "",
    ]
    lines += [f"- {why}: {len(of)}, such as {of[0]}" for why, of in sorted(kinds.items())]
    lines += [
        "",
        f"A GPT of 2 layers with 4 experts (test_expert_parallel.py), two ranks along each axis, two steps, AdamW and "
        f"clipping, by `check_equivalent` on an AbstractMesh. torch {torch.__version__}, {minutes:.0f} CPU minutes.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin, results = time.process_time(), {}
    for names in (*PAIRS, *TRIPLES):
        results[names] = outcome(names)
        print(" + ".join(names), *results[names], sep=" | ", flush=True)
    PAGE.write_text(page(results, (time.process_time() - begin) / 60))
    sys.exit(any(text.startswith(FAULT) for text, _ in results.values()))
