"""What a block keeps: shares of activation memory, the choice under a budget, and that none of it changes a result."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import models
import pytest
import torch
from models import MODELS, STAGES, batches, meta, meta_part, part
from replaced_passes import replace_pass

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.errors import FzeroValueError
from fzero.ir.program import Program
from fzero.trace.flops import operations
from fzero.transforms import joint_split
from fzero.transforms.joint_split import Choices
from fzero.transforms.remat import remat_options, rewrite

FRACTIONS = [i / 16 for i in range(17)]


def base_of(loss: Any, params: Any, batch: Any) -> Program:
    """The program before remat."""
    found: list[Program] = []
    with pytest.MonkeyPatch.context() as patch:
        replace_pass(patch, "remat", rewrite=lambda program, _: found.append(program) or program)
        fz.lower(fz.train_step(loss, optim.sgd(0.1)), fz.AbstractMesh(data=1), params, batch)
    return found[0]


@functools.cache
def base(model: str) -> Program:
    return base_of(MODELS[model].loss, meta(MODELS[model].init(fz.random.key(0))), meta_part(batches(1)[0], 1))


def split(program: Program, policy: str | float, known: dict[Any, Any]) -> Program:
    """The program whose blocks save what the policy says."""
    options = remat_options(program, policy, known)
    assert options is not None
    return rewrite(program, options)


def choices_of(program: Program) -> list[Choices]:
    known: dict[Any, Choices] = {}
    split(program, "none", known)
    return list(known.values())


def saved_bytes(program: Program) -> int:
    return sum(v.nbytes for op, _ in program.walk() for v in op.out if v.name.startswith("saved_"))


def flops(program: Program) -> int:
    return sum(
        operations(n)
        for op, _ in program.walk()
        if op.op == "call"
        for n in program.functions[op.fn].graph.graph.nodes
        if n.op == "call_function"
    )


def gated(p, x):
    """Views of a parameter, of an input and of an activation; an output that its own backward reads."""
    a, b = p["w"].chunk(2, dim=1)
    h = x.view(-1, x.shape[-1]) @ a
    u, v = torch.exp(h).chunk(2, dim=-1)
    return torch.tanh((u * torch.sigmoid(v)) @ b[:, : u.shape[-1]].T @ p["o"]).view(x.shape)


gate = fz.block(gated)


def gated_loss(params, x):
    for p in params:
        x = gate(p, x)
    return x.square().mean()


@functools.cache
def gated_base() -> Program:
    d = 8
    params = [{"w": torch.empty(d, 2 * d, device="meta"), "o": torch.empty(d, d, device="meta")} for _ in range(3)]
    return base_of(gated_loss, params, torch.empty(4, 3, d, device="meta"))


PROGRAMS = {"gpt": lambda: base("gpt"), "mixed": lambda: base("mixed"), "gated": gated_base}


@pytest.mark.parametrize("name", PROGRAMS)
def test_more_never_keeps_less_nor_recomputes_more(name):
    program = PROGRAMS[name]()
    found = [(saved_bytes(p), flops(p)) for p in (split(program, f, {}) for f in FRACTIONS)]
    assert found == sorted(found, key=lambda x: (x[0], -x[1]))
    assert len(set(found)) > (1 if name == "mixed" else 3)  # the blocks of mixed have one thing to keep
    everything = saved_bytes(split(program, "none", {}))
    assert all(nbytes <= f * everything for f, (nbytes, _) in zip(FRACTIONS, found, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ends_are_none_and_full(name):
    program = PROGRAMS[name]()
    assert saved_bytes(split(program, 0.0, {})) == 0
    assert flops(split(program, 0.0, {})) <= flops(program)
    assert [str(x) for x in split(program, 1.0, {}).instructions] == [
        str(x) for x in split(program, "none", {}).instructions
    ]
    assert flops(split(program, 1.0, {})) == min(flops(split(program, f, {})) for f in FRACTIONS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_set_of_nodes_beats_a_corner(name):
    """Against every subset of what could be kept: none has as few bytes and fewer FLOPs than a corner, or as few FLOPs
    and fewer bytes."""
    for choices in choices_of(PROGRAMS[name]()):
        nodes = sorted(choices.nbytes if len(choices.nbytes) < 12 else choices.none.nodes, key=lambda n: n.name)
        every = [choices.keep(s) for r in range(len(nodes) + 1) for s in itertools.combinations(nodes, r)]
        for corner in choices._corners():
            for other in every:
                assert not (other.nbytes <= corner.nbytes and other.flops < corner.flops), (corner, other)
                assert not (other.nbytes < corner.nbytes and other.flops <= corner.flops), (corner, other)


def test_what_is_recomputed_first_is_what_costs_least():
    (layer,) = [c for c in choices_of(base("gpt")) if c.joint.name == "layer"]
    cheapest = min(layer.flops[n] for n in layer.early if "mm" in str(n.target))
    enough = next(k for k in layer.frontier if k.flops < cheapest)  # no matrix product is repeated
    assert enough.nbytes < 0.75 * layer.none.nbytes


def test_what_is_kept_is_storage_of_the_blocks_own():
    """No view of a parameter, of an input or of something else that is kept."""
    for block in choices_of(gated_base()):
        kept = {str(n.target) for n in block.none.nodes}
        assert block.none.nodes and all(n.op == "call_function" for n in block.none.nodes)
        assert not any(view in k for k in kept for view in ("view", "split", "slice", "getitem", ".t.", "permute")), (
            kept
        )
    program = split(gated_base(), "none", {})
    shapes = [v.shape for op in program.instructions for v in op.out if v.name.startswith("saved_")]
    assert shapes and (8, 8) not in shapes and (8, 16) not in shapes  # those of parameters


@fz.block
def cell(p, x):
    return torch.tanh(x @ p)


def test_an_output_that_the_next_block_reads_is_not_kept_twice():
    params, x = [torch.empty(8, 8, device="meta") for _ in range(3)], torch.empty(4, 8, device="meta")

    def loss(params, x):
        for p in params:
            x = cell(p, x)
        return x.mean()

    program = fz.lower(
        fz.remat(fz.train_step(loss, optim.sgd(0.1)), "none"), fz.AbstractMesh(data=1), params, x
    ).program
    assert saved_bytes(program) == 0
    (second,) = [op for op in program.instructions if op.is_backward and op.block.number == 1]
    (first,) = [op for op in program.instructions if op.is_forward and op.block.number == 1]
    assert first.out[0].name in second.args
    # it is not recomputed either
    assert "aten.tanh.default" not in {str(n.target) for n in program.functions[second.fn].graph.graph.nodes}


# numerics


def losses_and_params(model: str, transform: Any, steps: int = 3) -> Any:
    mesh = fz.make_mesh(data=-1)
    step = fz.train_step(MODELS[model].loss, models.OPTIMIZERS["clipped"]())
    train = fz.compile(transform(step), mesh, backend="eager")
    state, losses = train.init(MODELS[model].init), []
    for batch in batches(steps):
        state, metrics = train(state, part(batch, mesh))
        losses.append(metrics["loss"])
    return torch.stack(losses), train.gather(state).params


@pytest.mark.full(keep=["bare"])
@pytest.mark.parametrize("model", MODELS)
def test_every_choice_gives_the_same_bits(model):
    want = losses_and_params(model, fz.remat("full"))
    for policy in (0.0, 0.3, 0.6, "none", "min_cut"):  # 1.0 is the program of "none", "auto" that of "min_cut"
        got = losses_and_params(model, fz.remat(policy))
        for a, b in zip(fz.tree.leaves(got), fz.tree.leaves(want), strict=True):
            assert torch.equal(a, b), policy


def run_fractions(fractions: list[Any]) -> Any:
    return [losses_and_params("gpt", fz.compose(STAGES[3](), fz.accumulate(2), fz.remat(f))) for f in fractions]


@pytest.mark.full
def test_every_choice_gives_the_same_bits_on_two_ranks(run_ranks):
    for results in run_ranks(2, run_fractions, ["full", 0.3, 0.7, 1.0]):
        for got in results[1:]:
            for a, b in zip(fz.tree.leaves(got), fz.tree.leaves(results[0]), strict=True):
                assert torch.equal(a, b)


# the head


def chunked_head(p, x, targets):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16)
    return torch.nn.functional.linear_cross_entropy(x.flatten(0, 1), p["out"], targets.flatten(), options=options)


def plain_head(p, x, targets):
    return torch.nn.functional.cross_entropy((x @ p["out"].T).flatten(0, 1), targets.flatten())


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"),
    reason="this release of torch has no chunked linear_cross_entropy",
)
def test_a_chunked_loss_in_the_last_block_holds_no_logits():
    """The chunked loss is one operation of the fused function, and its results are not of the logits' size."""
    params = {
        "token": torch.randn(50, 8, generator=torch.Generator().manual_seed(0)),
        "out": torch.linspace(-1, 1, 50 * 8).view(50, 8).sin(),
    }
    batch = {k: v[:, :4] % 50 for k, v in batches(1, size=16)[0].items()}
    largest, found = {}, {}
    for name, head in (("plain", fz.block(plain_head)), ("chunked", fz.block(chunked_head))):

        def loss(params, batch, head=head):
            return head(params, embed(params, batch["tokens"]), batch["targets"])

        train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(), backend="eager")
        state, metrics = train(train.init(params), batch)
        found[name] = (metrics["loss"], state.params)
        (function,) = [f for n, f in train.program.functions.items() if n.endswith("head_value_and_grad")]
        values = [n.meta["val"] for n in function.graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        largest[name] = max(v.numel() for v in values)
    logits = 16 * 4 * 50
    assert largest["plain"] == logits and largest["chunked"] < logits / 2
    torch.testing.assert_close(found["chunked"], found["plain"])


@fz.block
def embed(p, tokens):
    return p["token"][tokens]


# under a budget


def test_auto_without_a_budget_is_min_cut():
    program = base("gpt")
    assert [str(x) for x in split(program, "auto", {}).instructions] == [
        str(x) for x in split(program, "min_cut", {}).instructions
    ]


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan"), 2])
def test_a_number_that_is_no_fraction(wrong):
    with pytest.raises(FzeroValueError) as raised:
        fz.remat(wrong)
    assert (
        str(wrong) in str(raised.value)
        and "0.0 to 1.0" in str(raised.value)
        and "Fix: e.g. remat(0.5)" in str(raised.value)
    )


@pytest.mark.parametrize("wrong", ["half", True, False, None, [0.5]])
def test_an_unknown_policy(wrong):
    step = fz.train_step(models.gpt_loss, optim.sgd(0.1))
    with pytest.raises(FzeroValueError) as raised:
        fz.remat(step, wrong)
    assert repr(wrong) in str(raised.value) and "'auto'" in str(raised.value) and "remat(0.5)" in str(raised.value)


def test_fractions_are_one_record_however_written():
    step = fz.train_step(models.gpt_loss, optim.sgd(0.1))
    assert fz.remat(step, 1) == fz.remat(1.0)(step) == fz.remat(fz.remat(step, 1.0), 1)
    with pytest.raises(FzeroValueError, match=r"remat\(policy=0.5\)"):
        fz.remat(fz.remat(step, 0.25), 0.5)


@pytest.mark.parametrize("budget", [{}, {"memory_budget": "1GB"}], ids=["plain", "under a budget"])
def test_a_min_cut_is_looked_for_once_a_distinct_block(monkeypatch, budget):
    """Not for each of its calls, nor for each program that a search makes, nor in a later trace."""
    cuts: list[int] = []
    monkeypatch.setattr(joint_split, "_known_min_cuts", {})
    real = compat.min_cut
    monkeypatch.setattr(compat, "min_cut", lambda *given: cuts.append(1) or real(*given))
    inner = fz.block(lambda p, x: torch.tanh(torch.nn.functional.gelu(x @ p["w"])) * x)
    other = fz.block(lambda p, x: torch.sigmoid(x @ p["w"]).exp())

    def loss(p, x):
        for layer in p[:-1]:
            x = inner(layer, x)
        return other(p[-1], torch.sin(other(p[-1], x))).square().mean()

    params = [{"w": torch.empty(8, 8, device="meta")} for _ in range(9)]
    step = fz.shard_params(fz.train_step(loss, optim.adamw(1e-3)))
    for _ in range(2):
        fz.lower(step, fz.AbstractMesh(data=2), params, torch.empty(4, 8, device="meta"), **budget)
    assert len(cuts) == 3  # the first call of `inner` is another block: its argument needs no gradient
