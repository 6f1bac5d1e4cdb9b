"""tensor_parallel: functions compute with parts of parameters, and train as the plain step does."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tensor
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero._compat.compat import FakeTensor
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError, VerifyError
from fzero.ir.ops import COLLECTIVES
from fzero.ir.verifier import verify
from fzero.mesh import AbstractMesh
from fzero.sharding.placements import Shard

PLAIN = fz.train_step(tensor.loss_fn, tensor.OPTIMIZER)


def simulated(mesh: AbstractMesh, *transforms: Any, **more: Any) -> Any:
    return fz.testing.check_equivalent(tensor.step(*transforms, **more), tensor.params(), tensor.batch(), mesh, steps=2)


@pytest.mark.full
def test_heads_are_cut_in_four_without_a_batch_axis():
    simulated(AbstractMesh(model=4), fz.accumulate(2))


@pytest.mark.full
def test_what_passes_between_blocks_is_cut_by_position():
    few, many = (lowered(AbstractMesh(model=2), layers=n, sequence=True).program for n in (2, 6))
    each = {key: n / 4 for key, n in (transfers(many) - transfers(few)).items()}
    # Megatron's 2 and 2 forward, 4 and 2 backward, of which three gathers are one line; and the norms' gradients
    norms = ("all_reduce_start", "model")
    assert each == {("reduce_scatter_start", "model"): 4, ("all_gather_start", "model"): 4, norms: 1}
    values = many.values_by_name
    passing = [values[f"layer_{number}"] for number in range(5)]
    assert all(v.placement.dim_shards == (("model", Shard(1)),) for v in passing)
    # a gradient that is a summand over model is cast, to be summed over data as well
    both = lowered(AbstractMesh(data=2, model=2), fz.shard_params(), fz.mixed_precision("bf16"), sequence=True).program
    cast = {v.placement.partial for x, _ in both.walk() if x.op == "cast" for v in x.out if v.name.startswith("d_")}
    assert ("data", "model") in cast


def kept(share: float, mesh: AbstractMesh, **more: Any) -> int:
    """The bytes that a rank keeps for the backward."""
    program = lowered(mesh, fz.remat(share), layers=3, **more).program
    saved = [v for x in program.instructions for v in x.out if v.name.startswith("saved_")]
    return sum(math.prod(v.local_shape(mesh)) * v.dtype.itemsize for v in saved)


@pytest.mark.full
@pytest.mark.parametrize(("size", "sequence"), [(4, False), (2, True)])
def test_a_share_is_one_of_what_a_rank_keeps(size, sequence):
    """Norms and residuals are whole beside the results of cut columns, which are parts."""
    mesh = AbstractMesh(model=size)
    everything = kept(1.0, mesh, sequence=sequence)
    found = [kept(share, mesh, sequence=sequence) for share in (0.125, 0.25, 0.5, 0.75)]
    assert found == sorted(found) and len({*found}) > 2
    assert all(nbytes <= share * everything for share, nbytes in zip((0.125, 0.25, 0.5, 0.75), found, strict=True))


def on_ranks(mesh_axes: dict[str, int], ways: dict[str, list[Any]], backend: str, **options: Any) -> list[Any]:
    mesh = fz.make_mesh(**mesh_axes, **options)
    others = tuple(axis for axis in mesh_axes if axis != "model")
    parts = mesh.axis_size(others)
    batch = tensor.batch(8, mesh.index(others) if others else 0, parts)
    found = []
    for name, transforms in ways.items():
        step = tensor.step(*transforms, sequence=name == "by position")
        report = fz.testing.check_equivalent(step, tensor.params(), batch, mesh, backend=backend, steps=2)
        found.append((name, str(report)))
    return found


def abstract(*transforms: Any, layers: int = 2, **more: Any) -> tuple[Any, Any, Any]:
    empty = lambda x: torch.empty_like(x, device="meta")  # noqa: E731
    return tensor.step(*transforms, **more), *(fz.tree.map(empty, x) for x in (tensor.params(layers), tensor.batch()))


def lowered(mesh: AbstractMesh, *transforms: Any, layers: int = 2, **more: Any) -> Any:
    step, params, batch = abstract(*transforms, layers=layers, **more)
    return fz.lower(step, mesh, params, batch)


def transfers(program: Any) -> Counter[tuple[str, str]]:
    return Counter((x.op, *x.axes) for x, _ in program.walk() if x.op in COLLECTIVES)


@pytest.mark.full
def test_a_layer_has_two_reductions_each_way_and_one_gather_of_its_parameters():
    few, many = (lowered(AbstractMesh(data=2, model=2), fz.shard_params(), layers=n).program for n in (2, 6))
    plain, more = (
        fz.lower(
            fz.shard_params(fz.train_step(tensor.loss_fn, fz.optim.adamw(1e-2))), AbstractMesh(data=2), *rest
        ).program
        for rest in (abstract(layers=n)[1:] for n in (2, 6))
    )
    each = {key: n / 4 for key, n in (transfers(many) - transfers(few)).items()}
    assert each == {
        ("all_reduce_start", "model"): 4,
        **{key: n / 4 for key, n in (transfers(more) - transfers(plain)).items()},
    }
    assert transfers(few)["all_gather_start", "data"] == transfers(plain)["all_gather_start", "data"]
    assert len(few.functions) == len(many.functions) <= 2.5 * len(plain.functions)
    assert not few.notes


def without(program: Any, number: int) -> Any:
    """The program without the reduction of this number over the axis: who reads a sum reads a summand."""
    start = [x for x in program.instructions if x.op == "all_reduce_start" and x.axes == ("model",)][number]
    wait = next(x for x in program.instructions if x.op == "wait" and x.args == (start.out[0].name,))
    names = {v.name: a for v, a in zip(wait.out, start.args, strict=True)}
    return replace(program, instructions=tuple(x.rename(names) for x in program.instructions if x not in (start, wait)))


@pytest.mark.full(keep=["mesh0"])
@pytest.mark.parametrize("mesh", [{"model": 2}, {"data": 2, "model": 2}])
def test_a_reduction_that_is_left_out_is_found(mesh):
    transforms = [fz.shard_params()] if "data" in mesh else []
    program = lowered(AbstractMesh(**mesh), *transforms).program
    found = []
    for number in range(transfers(program)["all_reduce_start", "model"]):
        with pytest.raises(VerifyError) as error:
            verify(without(program, number))
        found.append(str(error.value))
    assert len(found) > 12 and all("of which each rank" in x or "partial(model" in x for x in found)


WRONG = {
    "groups missing": ("split", {**tensor.RULES, "qkv": 1, "bias": 0}),
    "rows for columns": ("native_layer_norm", {**tensor.RULES, "up": 0, "down": 1}),
    "half of an attention": ("mm", {**tensor.RULES, "out": None}),
    "a cut norm": ("native_layer_norm", {**tensor.RULES, "norm2": 0}),
}


@pytest.mark.full
@pytest.mark.parametrize(("op", "rules"), WRONG.values(), ids=WRONG)
def test_rules_that_cut_badly_are_equal_and_named(op, rules):
    simulated(AbstractMesh(model=2), rules=rules)
    program = lowered(AbstractMesh(model=2), rules=rules).program
    named = rf"aten\.{op}\.\w+ of layer"
    assert any(re.search(f"{named} is computed unsharded on every rank of model", x) for x in program.notes)
    assert all(f"#   {x}" in str(program) for x in program.notes)
    with pytest.raises(FzeroValueError, match=rf"(?s)would be computed unsharded.*{named}"):
        lowered(AbstractMesh(model=2), rules=rules, max_replicated_bytes=0)


def test_the_same_step_on_a_mesh_without_the_axis_of_more_than_one_is_the_plain_one():
    program = lowered(AbstractMesh(data=2, model=1), fz.shard_params()).program
    assert not any("model" in x.axes for x, _ in program.walk())


def problem(**given: Any) -> str:
    with pytest.raises((FzeroTypeError, FzeroValueError, TransformError)) as error:
        step = fz.tensor_parallel(fz.train_step(tensor.loss_fn, fz.optim.adamw(1e-2)), **given)
        fz.lower(step, AbstractMesh(model=2), *abstract()[1:])
    return str(error.value)


def test_what_cannot_be_meant():
    assert "did you mean layers.0.qkv" in problem(rules={"qvk": 1})
    assert "did you mean layers.0.up" in problem(rules={"up_proj.weight": 1})
    assert "rules={}: no parameter is sharded; None chooses" in problem(rules={})
    with pytest.raises(FzeroTypeError, match="step: a mapping is not a step: pass it by name, rules="):
        fz.tensor_parallel({"qkv": 1})
    assert "rules['qkv']='1': a dim, a pair" in problem(rules={"qkv": "1"})
    assert "no parameter is sharded" in problem(rules={"qkv": None})
    assert "it has no dim 7" in problem(rules={"qkv": 7})
    assert "rules returned 'x'" in problem(rules=lambda path, leaf: "x")
    with pytest.raises(TransformError, match="let data_parallel name another axis"):
        tensor.step(fz.data_parallel(axis="model"))
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis\n  'model': the mesh has data=2"):
        lowered(AbstractMesh(data=2), fz.data_parallel())
    with pytest.raises(FzeroValueError, match=r"dim 0 of 24 is not a multiple of 5: 5 shards, over model along 0"):
        lowered(AbstractMesh(model=5))
    with pytest.raises(FzeroValueError, match=r"no parameter has a dim that is divisible by 5, the size of"):
        step = fz.tensor_parallel(fz.train_step(lambda p, x: (x @ p).square().mean(), fz.optim.sgd(0.1)))
        fz.lower(step, AbstractMesh(model=5), torch.zeros(4, 4), torch.zeros(2, 4))

    def tied(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["a"] @ params["b"].T).square().mean()

    w = torch.zeros(4, 4)
    step = fz.tensor_parallel(fz.train_step(tied, fz.optim.sgd(0.1)), rules={"a": 0, "b": 1})
    with pytest.raises(TransformError, match="tied parameters have two rules"):
        fz.lower(step, AbstractMesh(model=2), {"a": w, "b": w}, torch.zeros(2, 4))


def test_heads_that_the_ranks_do_not_divide_are_named_with_line_and_sizes():
    """Three ranks divide the width of 12, and not the 4 heads of 3."""

    @fz.block
    def attention(p, x):
        q, k, v = (x @ p["qkv"]).unflatten(-1, (3, 4, -1)).unbind(-3)
        return (q * k + v).flatten(-2)

    made = fz.tensor_parallel(
        fz.train_step(lambda p, x: attention(p, x).square().mean(), fz.optim.sgd(0.1)), rules={"qkv": (1, 3)}
    )
    arguments = {"qkv": torch.empty(12, 36)}, torch.empty(2, 5, 12)
    (note, *_) = fz.lower(made, AbstractMesh(model=3), *arguments).program.notes
    said = r'test_tensor_parallel.py:\d+: q, k, v = \(x @ p\["qkv"\]\).unflatten'
    assert re.search(rf"aten.view.default of \w+ is computed unsharded .*: 1.4 KiB, at {said}", note)
    sizes = re.escape("[2, 5, 36] sharded along dim 2 in 3 groups -> [2, 5, 3, 4, 3]")
    with pytest.raises(FzeroValueError, match=rf"aten.view.default of \w+: 1.4 KiB, {sizes}, at /.*{said}(.|\n)*Fix: "):
        fz.lower(strict(made), AbstractMesh(model=3), *arguments)


def strict(step: Any) -> Any:
    """The step with no operation that may be computed unsharded."""
    (spec,) = step.transforms
    return replace(step, transforms=(replace(spec, max_replicated_bytes=0),))


def test_moments_of_8_bits_are_kept_in_32_for_what_is_sharded():
    """As the error says how to."""
    params, batch = {"up": torch.empty(64, 128), "down": torch.empty(128, 64)}, torch.empty(4, 64)

    def step(optimizer: Any) -> Any:
        loss = lambda p, x: (torch.relu(x @ p["up"]) @ p["down"]).square().mean()  # noqa: E731
        return fz.tensor_parallel(fz.train_step(loss, optimizer), rules={"up": 1})

    with pytest.raises(FzeroValueError, match=r"8-bit moments(.|\n)*\['up'\](.|\n)*Fix: .*fz.optim.partition"):
        fz.lower(step(fz.optim.adamw(1e-2, state_dtype="int8")), AbstractMesh(model=2), params, batch)
    both = {dtype: fz.optim.adamw(1e-2, state_dtype=dtype) for dtype in ("fp32", "int8")}
    mixed = fz.optim.partition(both, lambda path, leaf: "fp32" if "up" in path else "int8")
    found = fz.lower(step(mixed), AbstractMesh(model=2), params, batch).program
    assert {v.dtype for v in found.inputs if "opt_state" in v.name} >= {torch.int8, torch.uint8, torch.float32}


ON_RANKS = {  # besides: in a loop with shard_params below, by position
    "plain": [fz.data_parallel()],
    "layerwise": [fz.shard_grads(), fz.accumulate(2, schedule="layerwise")],
    "all on the host": [fz.shard_params(), fz.offload("cpu"), fz.mixed_precision("bf16")],
}


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks(run_ranks, shared):
    alone = {"loop": [fz.accumulate(2)]} if shared else {"alone": []}
    run_ranks(2, on_ranks, {"model": 2}, alone, "eager", shared_memory=shared)
    ways = ON_RANKS if shared else {"plain": ON_RANKS["plain"]}
    for name, way in ways.items():
        run_ranks(4, on_ranks, {"data": 2, "model": 2}, {name: way}, "eager", shared_memory=shared)


@pytest.mark.full
def test_compiled(run_ranks):
    run_ranks(2, on_ranks, {"model": 2}, {"by position": []}, "inductor", timeout=300)


def by_position(mesh_axes: dict[str, int], **options: Any) -> None:
    mesh = fz.make_mesh(**mesh_axes, **options)
    transforms = [fz.shard_params(), fz.accumulate(2)] if "data" in mesh_axes else []
    step = tensor.step(*transforms, sequence=True)
    fz.testing.check_equivalent(step, tensor.params(), part(mesh), mesh, backend="eager", steps=2)


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_on_ranks_with_what_passes_between_blocks_cut_by_position(run_ranks, shared):
    run_ranks(2, by_position, {"model": 2}, shared_memory=shared)
    if shared:
        run_ranks(4, by_position, {"data": 2, "model": 2}, shared_memory=shared)


def part(mesh: Any) -> Any:
    """This rank's rows of the batch."""
    axes = tuple(axis for axis in mesh.axes if axis != "model" and mesh.axes[axis] > 1)
    return tensor.batch(8, mesh.index(axes) if axes else 0, mesh.axis_size(axes))


def sums(state: Any) -> list[float]:
    return [x.double().abs().sum().item() for x in fz.tree.leaves((state.params, state.opt_state))]


def saved(axes: dict[str, int], path: str) -> Any:
    """A step, an evaluation of its parameters, and the files of its state."""
    mesh = fz.make_mesh(**axes)
    train = fz.compile(tensor.step(fz.shard_params()), mesh, backend="eager")
    state, _ = train(train.init(tensor.params()), part(mesh))
    evaluation = fz.compose(*train.resolved.transforms)(fz.eval_step(tensor.loss_fn))
    loss = fz.compile(evaluation, mesh, backend="eager")(state.params, part(mesh))
    fz.checkpoint.save(path, state)
    whole = train.gather(state)
    _, metrics = train(state, part(mesh))
    return sums(whole), loss.item(), metrics["loss"].item()


def restored(axes: dict[str, int], path: str, transforms: list[Any], cut: bool) -> Any:
    mesh = fz.make_mesh(**axes)
    step = tensor.step(*transforms) if cut else fz.compose(*transforms)(PLAIN)
    train = fz.compile(step, mesh, backend="eager")
    state = train.restore(path)
    whole = sums(train.gather(state))
    _, metrics = train(state, part(mesh))
    return whole, metrics["loss"].item()


@pytest.mark.full
def test_a_checkpoint_is_read_however_leaves_are_cut(run_ranks, tmp_path):
    path = str(tmp_path / "saved")
    (whole, first, loss), again, (_, second, _), _ = run_ranks(4, saved, {"data": 2, "model": 2}, path)
    assert again == (whole, first, loss)
    assert (first + second) / 2 == pytest.approx(loss, abs=1e-5)  # of the next step, which has the same parameters
    for axes, transforms, cut in [({"data": 1}, [], False), ({"model": 4}, [], True)]:
        found = run_ranks(math.prod(axes.values()), restored, axes, path, transforms, cut)
        assert all(w == whole and x == pytest.approx(loss, abs=1e-5) for w, x in found), axes


def laid_out_anew(path: str, long: bool) -> list[str]:
    """The leaves that a chain of layouts and back changes, and the next losses if these differ."""
    square, flat, column = fz.make_mesh(data=2, model=2), fz.make_mesh(data=4), fz.make_mesh(model=4)
    far = fz.make_mesh(data=2, model=2, unified_memory=False)
    first = square, fz.compile(tensor.step(fz.shard_params()), square, backend="eager")
    others = [
        (flat, fz.shard_params(PLAIN)),
        *[(column, tensor.step(sequence=True)), (flat, fz.data_parallel(PLAIN))][: 2 * long],
        (far, tensor.step(fz.shard_opt_state(), fz.offload("cpu", "opt_state"), rules={"qkv": 0, "down": 1, "emb": 1})),
    ]
    chain = [first, *((mesh, fz.compile(step, mesh, backend="eager")) for mesh, step in others), first]
    state, _ = first[1](first[1].init(tensor.params(1)), part(square))
    before, wrong, losses = fz.tree.leaves(first[1].gather(state)), [], []
    for number, (mesh, train) in enumerate(chain):
        state = fz.reshard(state, train) if number else state
        whole = fz.tree.leaves(train.gather(state))
        wrong += [f"{number}: leaf {i}" for i, x in enumerate(whole) if not torch.equal(x, before[i])]
        saved = train.restore(fz.checkpoint.save(f"{path}/{number}", state))
        pairs = zip(fz.tree.names(state), *map(fz.tree.leaves, (state, saved)), strict=True)
        wrong += [f"{number}: {name} on a rank" for name, x, y in pairs if not torch.equal(x, y)]
        losses.append(train(saved, part(mesh))[1]["loss"].item())
    return wrong + [f"losses {losses}"] * (max(losses) - min(losses) > 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_live_state_is_laid_out_anew_however_leaves_are_cut(run_ranks, tmp_path, long):
    assert run_ranks(4, laid_out_anew, str(tmp_path), long) == [[]] * 4


def given_other_rows(axes: dict[str, int]) -> None:
    mesh = fz.make_mesh(**axes)
    train = fz.compile(tensor.step(*([fz.shard_params()] if "data" in axes else [])), mesh, backend="eager")
    train(train.init(tensor.params()), tensor.batch(8, mesh.rank, mesh.size))


@pytest.mark.full
def test_ranks_along_the_axis_have_one_batch(run_ranks):
    for rank in run_ranks(2, given_other_rows, {"model": 2}, expect_error=True):
        assert rank.type == "DivergenceError" and "batch['x']: not the same on rank 1 as on rank 0" in rank.message
    for rank in run_ranks(4, given_other_rows, {"data": 2, "model": 2}, expect_error=True):
        assert "batch['y']: not the same on rank 3 as on rank 2" in rank.message
        assert "choose it by mesh.index(('data',))" in rank.message


@fz.block
def apart(p, x):
    q, k, v = ((x @ p[name]).unflatten(-1, (-1, 32)).transpose(1, 2) for name in "qkv")
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["o"]
    return x + F.gelu(x @ p["up"]) @ p["down"]


def apart_loss(params, x):
    for p in params:
        x = apart(p, x)
    return x.square().mean()


def test_a_segment_runs_with_the_strides_that_it_is_given():
    """What crosses is contiguous: of attention, which lies by position, a view of it is one of a copy."""
    make = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    layers = [{**{n: make(256, 256) for n in "qkvo"}, "up": make(256, 1024), "down": make(1024, 256)} for _ in range(2)]
    rules = {**dict.fromkeys("qkv", 1), "o": 0, "up": 1, "down": 0}
    step = fz.tensor_parallel(fz.train_step(apart_loss, optim.sgd(0.1)), rules=rules)
    program = fz.lower(step, AbstractMesh(model=2), layers, make(8, 128, 256)).program
    for name, function in program.functions.items():
        known: dict[Any, Any] = {}
        for node in function.graph.graph.nodes:
            known[node] = node.meta.get("val")
            if node.op == "call_function" and isinstance(known[node], FakeTensor):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
                with known[node].fake_mode:
                    again = node.target(*args, **kwargs)
                assert again.stride() == known[node].stride(), f"{name}: {node}"


class Columns(torch.autograd.Function):
    """In front of columns: the gradients of all ranks' parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return summed(grads[0])


class Rows(torch.autograd.Function):
    """Behind rows: the products of all ranks' parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def summed(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op)
    return x


def by_hand(p: Any, batch: Any, rank: int) -> torch.Tensor:
    """The loss of `tensor.loss_fn` from parts, as Megatron-LM computes it, with torch.distributed alone."""
    norm = lambda x, scale: Columns.apply(F.layer_norm(x, (tensor.WIDTH,), scale))  # noqa: E731
    words = tensor.WORDS // 2

    def here(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = (tokens >= rank * words) & (tokens < (rank + 1) * words)
        return torch.where(inside, tokens - rank * words, 0), inside

    tokens, inside = here(batch["x"])
    x = Rows.apply(p["emb"][tokens] * inside.unsqueeze(-1))
    for q in p["layers"]:
        heads = (norm(x, q["norm"]) @ q["qkv"] + q["bias"]).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(
            *(t.unflatten(-1, (tensor.HEADS // 2, -1)).transpose(1, 2) for t in heads), is_causal=True
        )
        x = x + Rows.apply(mixed.transpose(1, 2).flatten(2) @ q["out"])
        x = x + Rows.apply(F.gelu(norm(x, q["norm2"]) @ q["up"]) @ q["down"])
    logits = (norm(x, p["norm"]) @ p["head"]).flatten(0, 1)
    logits = logits - summed(logits.detach().amax(-1), dist.ReduceOp.MAX).unsqueeze(-1)
    labels, inside = here(batch["y"].flatten())
    right = Rows.apply(logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * inside)
    return (Rows.apply(logits.exp().sum(-1)).log() - right).mean()


def beside_by_hand() -> list[str]:
    """The gradients of a layer, of an embedding and of a head that differ from those written by hand."""
    mesh = fz.make_mesh(model=2)
    plain = fz.train_step(tensor.loss_fn, optim.adamw(1e-2))
    train = fz.compile(fz.tensor_parallel(plain, rules=tensor.RULES), mesh, backend="eager")
    state, metrics = train(train.init(tensor.params(1)), tensor.batch())
    found = fz.tree.map(lambda x: 10 * x, train.gather(state).opt_state.mu)  # a tenth, after a step from zero

    def part(path: str, x: torch.Tensor) -> torch.Tensor:
        rule = tensor.RULES.get(path.split("'")[-2])
        dim, groups = rule if isinstance(rule, tuple) else (rule, 1)
        if dim is None:
            return x
        return torch.cat([piece.chunk(2, dim)[mesh.rank] for piece in x.chunk(groups, dim)], dim)

    params = tensor.params(1)
    paths = fz.tree.paths(params)
    parts = [part(n, x).requires_grad_() for n, x in zip(paths, fz.tree.leaves(params), strict=True)]
    loss = by_hand(fz.tree.unflatten(fz.tree.structure(params), parts), tensor.batch(), mesh.rank)
    grads = torch.autograd.grad(loss, parts)
    expected = {n: part(n, x) for n, x in zip(paths, fz.tree.leaves(found), strict=True)}
    apart = {
        n: float((g - expected[n]).abs().max() / expected[n].abs().max()) for n, g in zip(paths, grads, strict=True)
    }
    wrong = [f"{n}: {x:.1e}" for n, x in apart.items() if x > 1e-5]
    return wrong + [f"loss {loss} {metrics['loss']}"] * (abs(loss.item() - metrics["loss"].item()) > 1e-5)


def test_gradients_are_those_written_by_hand(run_ranks):
    assert run_ranks(2, beside_by_hand) == [[], []]


def places(mesh_axes: dict[str, int], axis: str) -> list[dict[str, int]]:
    """The part of the data that each rank of a run takes, before it has a step and after."""

    def main(run: Any) -> list[dict[str, int]]:
        train = fz.compile(tensor.step(fz.data_parallel(), axis=axis), run.mesh, backend="eager")
        before = run.data_shard
        run.state(train, params=tensor.params())
        return [before, run.data_shard]

    return fz.run(main, device="cpu", **mesh_axes)


@pytest.mark.full
def test_runs_take_parts_by_the_axes_of_the_batch(run_ranks):
    assert run_ranks(2, places, {"data": 1, "replica": 2}, "replica") == [
        [{"rank": rank, "size": 2}, {"rank": 0, "size": 1}] for rank in range(2)
    ]


def looked_up(params: Any, batch: Any) -> torch.Tensor:
    x = F.embedding(batch["x"], params["emb"]) + params["more"][batch["x"]]
    return F.cross_entropy(x @ params["head"], batch["y"])


@pytest.mark.parametrize(("x", "y"), [([0, 5], [1, 6]), ([0, 5], [1, -1]), ([0, 6], [1, 2]), ([0, -7], [1, 2])])
def test_a_number_that_no_rank_has_raises(x, y):
    g = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(*shape, generator=g) for name, shape in (("emb", (6, 4)), ("more", (6, 4)), ("head", (4, 6)))
    }
    plain = fz.train_step(looked_up, fz.optim.sgd(0.1))
    step = fz.tensor_parallel(plain, rules={"emb": 0, "more": 0, "head": 1})
    for tried, mesh in ((plain, AbstractMesh(data=1)), (step, AbstractMesh(model=2))):
        with pytest.raises(IndexError):
            fz.testing.simulate(tried, mesh, params, {"x": torch.tensor(x), "y": torch.tensor(y)})


@fz.block
def wide(p, x):
    return x + torch.tanh(F.layer_norm(x, (100,), p["norm"]) @ p["up"]) @ p["down"]


def wide_loss(params, x):
    for p in params["layers"]:
        x = wide(p, x)
    return x.square().mean()


def rows_of_no_whole_blocks(shared: bool) -> str:
    mesh = fz.make_mesh(model=2, shared_memory=shared)
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g) / 8  # noqa: E731
    layers = [{"norm": make(100) + 1, "up": make(100, 40), "down": make(40, 100)} for _ in range(2)]
    plain = fz.train_step(wide_loss, fz.optim.adamw(1e-2))
    step = fz.tensor_parallel(plain, rules={"up": 1, "down": 0}, sequence=True)
    return str(fz.testing.check_equivalent(step, {"layers": layers}, make(8, 6, 100), mesh, steps=2))


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False])
def test_what_is_scattered_by_rows_has_no_padding(run_ranks, shared):
    """A shard of a leaf of 4,096 elements and more is padded to whole blocks of 256; a part of rows is not."""
    run_ranks(2, rows_of_no_whole_blocks, shared)
