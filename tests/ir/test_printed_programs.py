"""Programs as text: goldens of what is printed, that it is Python, and that its functions do not grow with depth.

The goldens in tests/goldens are rewritten by one command:

    FZERO_UPDATE_GOLDENS=1 pytest tests/ir/test_printed_programs.py
"""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import STAGES, batches, meta, meta_part

import fzero as fz
from fzero import optim
from fzero.ir.program import Program

GOLDENS = Path(__file__).parents[1] / "goldens"

TWO_AXES = fz.shard_params(axis=("data", "node"))
VARIANTS = {
    "stage_0": STAGES[0](),
    "stage_1": STAGES[1](),
    "stage_2": STAGES[2](),
    "stage_3": STAGES[3](),
    "stage_2_accumulate": fz.compose(STAGES[2](), fz.accumulate(2)),
    "stage_3_accumulate_bf16": fz.compose(STAGES[3](), fz.accumulate(2), fz.mixed_precision("bf16")),
    "stage_3_layerwise": fz.compose(STAGES[3](), fz.accumulate(3, schedule="layerwise")),
    "stage_1_bf16": fz.compose(STAGES[1](), fz.mixed_precision("bf16")),
    "stage_2_fp16": fz.compose(STAGES[2](), fz.mixed_precision("fp16", where=lambda path, leaf: leaf.dim() > 1)),
    "plain": lambda step: step,
    "evaluate_stage_3": STAGES[3](),
    "offload_cpu": fz.compose(STAGES[3](), fz.mixed_precision("bf16"), fz.offload("cpu", "opt_state")),
    "offload_nvme": fz.offload("nvme", ("opt_state", "params"), path="/scratch"),
    "two_axes": TWO_AXES,
    "two_axes_once_bf16": fz.compose(TWO_AXES, fz.hierarchical(), fz.accumulate(3), fz.mixed_precision("bf16")),
    "redundant": fz.compose(STAGES[3](), fz.redundant()),
    "stage_3_min_cut": fz.compose(STAGES[3](), fz.remat("min_cut")),
    "stage_3_none": fz.compose(STAGES[3](), fz.remat("none")),
}
PRINTED = [name for name in VARIANTS if not name.endswith(("min_cut", "none"))]
"""Those with goldens: what the others save depends on the release of torch."""


@functools.cache
def gpt_program(name: str, layers: int = 3, ranks: int = 2) -> Program:
    axes = {"node": 2, "data": 2} if "two_axes" in name else {"data": 1 if name in ("plain", "offload_nvme") else ranks}
    mesh = fz.AbstractMesh(unified_memory=name != "offload_cpu", **axes)
    params, batch = meta(models.gpt_init(fz.random.key(0), layers=layers)), meta_part(batches(1)[0], mesh.size)
    if name.startswith("evaluate"):
        return fz.lower(VARIANTS[name](fz.eval_step(evaluate)), mesh, params, (batch,)).program
    step = fz.train_step(models.gpt_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    return fz.lower(VARIANTS[name](fz.remat(step, "full") if name in PRINTED else step), mesh, params, batch).program


def evaluate(params, batch):
    return {"loss": fz.weighted(models.gpt_loss(params, batch) * batch["targets"].numel(), batch["targets"].numel())}


@functools.cache
def text(name: str, fold: bool = True, full: bool = False) -> str:
    return fz.show(gpt_program(name), fold=fold, full=full)


@pytest.mark.full(keep=["evaluate_stage_3", "plain", "stage_3"])
@pytest.mark.parametrize("name", PRINTED)
def test_golden(name):
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("FZERO_UPDATE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(name))
    assert path.read_text() == text(name), (
        "the printed program changed: see this file's docstring, and say so in the CHANGELOG"
    )


FORMS = {"folded": {}, "flat": {"fold": False}, "full": {"full": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_is_python(name, form):
    lines = text(name, **FORMS[form]).splitlines()
    ast.parse("\n".join(lines))
    assert max(len(line.split("  # ")[0]) for line in lines if not line.startswith("#")) <= 120
    assert not [line for line in lines if line != line.rstrip()]
    assert any(line.startswith("    del ") for line in lines) == (form == "full")


@pytest.mark.parametrize("name", VARIANTS)
def test_comments_are_in_columns(name):
    """The direction of a transfer, or three spaces, before what is said of an op."""
    comments = [line.split("  # ", 1) for line in text(name).splitlines() if "  # " in line]
    assert all(len(code) + 2 in (80, 100, 120) for code, _ in comments)
    assert all(re.match(r"(>>>|<<<|   )( |$)", comment) for _, comment in comments)


def test_the_header_has_four_lines():
    for name in VARIANTS:
        header = text(name).split("\n\n")[0].splitlines()
        assert [line.split(":")[0] for line in header[1:]] == [
            "# transforms",
            "# stored on each rank",
            "# sent per step",
        ]


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_short_and_made_of_the_users(name):
    program = gpt_program(name)
    made = [v.name for op, _ in program.walk() for v in op.out] + [*program.functions]
    assert max(map(len, made)) <= 36, max(made, key=len)
    gathered = {v.name for op, _ in program.walk() if op.op == "wait" for v in op.out}
    assert name not in ("stage_3", "two_axes") or {"layers[2].qkv", "head.ln"} <= gathered


def test_a_step_of_two_tensor_parallel_layers_is_printed_in_forty_lines():
    @fz.block
    def mlp(p, x):
        return x + torch.relu(x @ p["up"]) @ p["down"]

    def loss_fn(params, x):
        for p in params:
            x = mlp(p, x)
        return x.square().mean()

    params = [{"up": torch.empty(64, 256), "down": torch.empty(256, 64)} for _ in range(2)]
    step = fz.tensor_parallel(fz.train_step(loss_fn, optim.sgd(0.1)), rules={"up": 1, "down": 0})
    program = fz.lower(step, fz.AbstractMesh(model=2), params, torch.empty(8, 64)).program
    assert len(str(program).splitlines()) <= 40
    assert {"mlp_part0", "mlp_part1", "mlp_vjp"} <= set(program.functions)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_result_carries_dtype_shape_and_placement(name):
    """In the flat form every result has its type beside it; in the full form, every name is defined once."""
    program = gpt_program(name)
    flat = fz.show(program, fold=False)
    for value in program.values().values():
        if value.name in program.leaves or value.name.startswith("batch") or value.placement.in_flight:
            continue
        assert any(value.name in line and str(value) in line for line in flat.splitlines()), value.name
    (function,) = ast.parse(fz.show(program, full=True)).body
    assert isinstance(function, ast.FunctionDef)
    made: list[str] = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    twice = {n for n in made if made.count(n) > 1}
    assert all(n.endswith("_total") for n in twice)  # what a loop adds up begins as None
    deleted = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)]
    assert len(deleted) == len(set(deleted)) and set(deleted) <= set(made)


@pytest.mark.parametrize("name", VARIANTS)
def test_subgraphs_print_as_python(name):
    """Each result of an operation carries its dtype and shape."""
    for function in gpt_program(name).functions.values():
        (printed,) = ast.parse(str(function)).body
        assert isinstance(printed, ast.FunctionDef) and printed.name == function.name
        operations = [n for n in function.graph.graph.nodes if n.op == "call_function"]
        assert sum(isinstance(line, ast.Assign | ast.AnnAssign) for line in printed.body) == len(operations)
    assert re.search(r'"b?f(16|32)\[', str(gpt_program(name).functions["layer"]))


def test_what_runs_is_the_full_form():
    """Line for line, comments and line breaks aside."""
    from fzero.ir.printer import source

    for name in VARIANTS:
        runs, shown = (
            re.sub(r"\bdel \((.*)\)", r"del \1", ast.unparse(ast.parse(code)))
            for code in (source(gpt_program(name)), text(name, full=True))
        )
        assert runs == shown


def test_the_full_form_of_names_that_fill_a_line():
    """Such as those of adapters of experts."""
    name = "the_weight_of_a_layer_whose_name_is_longer_than_half_a_line_of_the_printed_program"
    step = fz.train_step(lambda p, x: (x @ p[name]).square().mean(), optim.sgd(0.1))
    made = fz.compose(fz.shard_params(), fz.accumulate(2))(step)
    params, batch = {name: torch.empty(8, 8, device="meta")}, torch.empty(4, 8, device="meta")
    text = fz.show(fz.lower(made, fz.AbstractMesh(data=2), params, batch).program, full=True)
    assert f"d_{name}_total = None\n" in text
    ast.parse(text)


def test_folding_keeps_the_length_of_the_text_from_growing():
    short, long = (len(str(gpt_program("stage_3", layers)).splitlines()) for layers in (4, 12))
    assert long <= 1.3 * short  # a few waits say `together`
    flat = len(fz.show(gpt_program("stage_3", 12), fold=False).splitlines())
    assert flat > 2 * long


TRACED: list[int] = []
LAYER = models.layer.__wrapped__  # the function of the block


@fz.block
def counted_layer(p, x):
    TRACED.append(1)
    return LAYER(p, x)


@pytest.mark.parametrize("name", ["stage_0", "stage_3_min_cut", "stage_1_bf16", "evaluate_stage_3"])
def test_a_block_is_traced_once_however_deep_the_model(monkeypatch, name):
    monkeypatch.setattr(models, "layer", counted_layer)
    programs, traced = [], []
    for layers in (2, 8):
        TRACED.clear()
        programs.append(gpt_program.__wrapped__(name, layers))
        traced.append(len(TRACED))
    # forward and backward together, and its outputs; twice, for it changes the list that it reads
    assert traced[0] == traced[1] <= 4
    assert len(programs[0].functions) == len(programs[1].functions)
    assert len(programs[1].instructions) > 2 * len(programs[0].instructions)


def test_unlike_blocks_are_functions_of_their_own():
    """Another width, another keyword or another dtype is another function; the same again is not."""

    @fz.block
    def scaled(p, x, by=1.0):
        return x @ p * by

    def loss(params, x):
        for p, by in zip(params["square"], (1.0, 2.0, 1.0), strict=True):
            x = scaled(p, x, by=by)
        x = scaled(params["wide"], x)
        return (x.double() if params["wide"].dtype == torch.float64 else x).mean()

    params: dict[str, Any] = {"square": [torch.empty(4, 4) for _ in range(3)], "wide": torch.empty(4, 6)}
    program = fz.lower(
        fz.remat(fz.train_step(loss, optim.sgd(0.1)), "full"), fz.AbstractMesh(data=1), params, torch.empty(2, 4)
    ).program
    forward = {op.fn for op, _ in program.walk() if op.fn.startswith("scaled") and "vjp" not in op.fn}
    assert len(forward) == 3
