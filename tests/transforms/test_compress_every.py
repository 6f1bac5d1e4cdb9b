"""`fz.compress("auto", every=)`: formats that change between steps, by the links as they are measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compress_auto import BATCH, SHAPES, STEP, mesh_of, params

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError
from fzero.measure import probes
from fzero.plan.devices import KNOWN, Link
from fzero.plan.rates import along

SLOW, FAST = 1e3, 1e15  # bytes/s
PLAIN, CODED = {"data": (None, None)}, {"data": ("int8", "int8")}
SGD = fz.train_step(STEP.loss_fn, optim.sgd(0.1))


class Run:
    """A step on ranks whose links seem to have the rates that a test says; `measured` counts how often they were."""

    def __init__(self, patch: pytest.MonkeyPatch, step: Any = STEP, zero: Any = None, **how: Any):
        self.mesh, self.rate, self.measured = fz.make_mesh(shared_memory=False), SLOW, 0

        def measured(found: probes.LinkProbes) -> dict[str, Link]:
            self.measured += 1
            return {axis: Link(1e-9, self.rate * (1 + self.mesh.rank)) for axis in found._pools}

        patch.setattr(probes.LinkProbes, "measured", measured)
        transform = fz.compose(zero or fz.shard_params(), fz.compress("auto", **{"every": 2, **how}))
        self.train = fz.compile(transform(step), self.mesh, backend="eager")

    def steps(self, state: Any, num: int) -> Any:
        for _ in range(num):
            state, _ = self.train(state, BATCH.chunk(self.mesh.size)[self.mesh.rank])
        return state

    def whole(self, state: Any) -> list[torch.Tensor]:
        return [x.clone() for x in fz.tree.leaves(self.train.gather(state).params)]


@pytest.fixture
def on_ranks(run_ranks: Any) -> Any:
    """Runs a function of a patch on two ranks."""
    return lambda fn, *args, ranks=2: run_ranks(ranks, patched, fn, *args)


def patched(fn: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        return fn(patch, *args)


# --- changes ---


def changing(patch: pytest.MonkeyPatch) -> Any:
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fzero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    run = Run(patch)
    state, programs = run.train.init(params(64)), list[str]()
    for i in range(9):
        run.rate = SLOW if i < 3 else FAST
        state = run.steps(state, 1)
        programs.append(str(run.train.program))
    again = Run(patch, decisions=run.train.formats)
    repeated = again.steps(again.train.init(params(64)), 9)
    assert again.measured == 0 and again.train.formats == run.train.formats
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return run.train.formats, run.whole(state), again.whole(repeated), programs, run.measured, lines


@pytest.mark.full
def test_all_ranks_change_together_and_a_run_can_be_repeated(on_ranks: Any) -> None:
    """Decided before the steps 0, 2, 4, 6 and 8; two in a row, before 4 and 6, are for other formats."""
    results = on_ranks(changing)
    for formats, state, repeated, programs, measured, _ in results:
        assert formats == [(0, CODED), (6, PLAIN)] and measured == 5
        assert all(torch.equal(x, y) for x, y in zip(state, repeated, strict=True))
        coded = ["encode" in text for text in programs]
        assert coded == [True] * 6 + [False] * 3 and len({*programs[:6]}) == len({*programs[6:]}) == 1
        assert all(torch.equal(x, y) for x, y in zip(state, results[0][1], strict=True))
    lines = [line for line in results[0][5] if "fzero.compress: formats on the wire" in line][:2]
    assert "from step 0 on\n  data: parameters int8, gradients int8, exposed there" in lines[0]
    assert "from step 6 on\n  data: as it is, exposed there" in lines[1] and "under 2%" in lines[1]
    assert not [line for line in results[1][5] if "formats on the wire" in line], "the first rank says it"


def by_hand(patch: pytest.MonkeyPatch) -> Any:
    """Three steps in codes and two without, and the same by two steps of these formats."""
    run = Run(patch, SGD, decisions=[(0, CODED), (3, PLAIN)])
    state = run.steps(run.train.init(params(64)), 5)
    found, now = run.whole(state), params(64)
    for num, more in ((3, [fz.compress()]), (2, [])):
        train = fz.compile(fz.compose(fz.shard_params(), *more)(SGD), run.mesh, backend="eager")
        own = train.init(now)
        for _ in range(num):
            own, _ = train(own, BATCH.chunk(2)[run.mesh.rank])
        now = train.gather(own).params
    return found, [x.clone() for x in fz.tree.leaves(now)]


def test_a_change_is_that_to_another_step(on_ranks: Any) -> None:
    for found, want in on_ranks(by_hand):
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def flapping(patch: pytest.MonkeyPatch) -> Any:
    run = Run(patch, every=1)
    state = run.train.init(params(64))
    for i in range(8):
        run.rate = (SLOW, FAST)[i % 2]
        state = run.steps(state, 1)
    return run.train.formats, run.measured


def evaluated(patch: pytest.MonkeyPatch) -> Any:
    """The loss of an evaluation of what is trained in codes, and that of the masters."""
    run = Run(patch, zero=fz.shard_opt_state())
    state = run.steps(run.train.init(params(64)), 2)
    evaluate = fz.compose(*run.train.resolved.transforms)(fz.eval_step(STEP.loss_fn))
    own = BATCH.chunk(2)[run.mesh.rank]
    found = fz.compile(evaluate, run.mesh, backend="eager")(state.params, own)
    return run.train.formats, found.clone(), STEP.loss_fn(run.train.gather(state).params, own)


def test_an_evaluation_computes_with_masters(on_ranks: Any) -> None:
    for formats, found, want in on_ranks(evaluated):
        assert formats == [(0, CODED)] and torch.equal(found, want)


def test_one_decision_alone_changes_nothing(on_ranks: Any) -> None:
    """A link that is slow in every other measurement."""
    assert on_ranks(flapping) == [([(0, CODED)], 8)] * 2


# --- checkpoints ---


def saved(patch: pytest.MonkeyPatch, path: str) -> Any:
    run = Run(patch)
    state = run.steps(run.train.init(params(64)), 3)
    fz.checkpoint.save(path, state)
    run.rate = FAST
    return run.train.formats, run.whole(run.steps(state, 2))


def restored(patch: pytest.MonkeyPatch, path: str) -> Any:
    run = Run(patch)
    run.rate = FAST
    state = run.train.restore(path)
    state = run.steps(state, 1)
    first = run.train.formats, "encode" in str(run.train.program), run.measured
    found = run.whole(run.steps(state, 1))
    run.steps(state, 2)
    return first, found, run.train.formats


def without(patch: pytest.MonkeyPatch, path: str) -> Any:
    """Restored by a step without the slot, whose checkpoint begins anew with it."""
    run = Run(patch)
    train = fz.compile(fz.shard_params(STEP), run.mesh, backend="eager")
    state = train.restore(path)
    fz.checkpoint.save(f"{path}/plain", train(state, BATCH.chunk(run.mesh.size)[run.mesh.rank])[0])
    run.rate = FAST
    run.steps(run.train.restore(f"{path}/plain"), 1)
    return run.train.formats


@pytest.mark.full
def test_a_checkpoint_goes_on_in_its_formats(on_ranks: Any, tmp_path: Any) -> None:
    formats, want = on_ranks(saved, str(tmp_path))[0]
    assert formats == [(0, CODED)]
    for first, found, after in on_ranks(restored, str(tmp_path)):
        assert first == ([(0, CODED)], True, 0)  # formats of the state; nothing is due before the step 3
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
        assert after == [(0, CODED), (6, PLAIN)]
    assert all(x[0] == ([(0, CODED)], True, 0) for x in on_ranks(restored, str(tmp_path), ranks=4))
    assert on_ranks(without, str(tmp_path)) == [[(4, PLAIN)]] * 2


def spoiled(patch: pytest.MonkeyPatch) -> str:
    run = Run(patch)
    state = run.train.init(params(64))
    state.extras["compress"][:2] = 33
    try:
        run.steps(state, 1)
    except FzeroValueError as error:
        return str(error)
    return ""


def test_text_that_nobody_wrote_is_refused(on_ranks: Any) -> None:
    assert all("no decisions that can be read" in said for said in on_ranks(spoiled))


# --- links ---


def links(patch: pytest.MonkeyPatch, shared: bool) -> Any:
    mesh = fz.make_mesh(node=2, data=-1, shared_memory=shared)
    found = probes.LinkProbes(mesh)
    return [found.measured(), found.measured()]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "gloo"])
def test_links_along_each_axis_are_measured(on_ranks: Any, shared: bool) -> None:
    for rounds in on_ranks(links, shared):
        for found in rounds:
            assert [*found] == ["node"] and 1e5 < found["node"].bandwidth < 1e12 and 0 <= found["node"].latency < 1


def test_a_plan_goes_by_the_link_along_an_axis() -> None:
    step, batch = fz.shard_params(STEP, axis=("data", "node")), torch.empty(64, 256, device="meta")
    device = replace(KNOWN["h100"], links={**KNOWN["h100"].links, along("node"): Link(1e-3, 1e6)})
    plans = [fz.lower(step, mesh_of(node=2, data=8), SHAPES, batch, device=x).plan for x in (KNOWN["h100"], device)]
    before, after = ({name: c.busy_seconds for name, c in x.channels.items()} for x in plans)
    sent = plans[1].channels["gather:node"]
    assert after["gather:node"] == pytest.approx(sent.bytes / 1e6 + 1e-3 * sent.num_transfers)
    assert after["gather:data"] == before["gather:data"] and "link along node" in str(plans[1])


# --- arguments ---


def test_forms() -> None:
    assert str(fz.compress("auto", every=200)) == "compress('auto', every=200)"
    given = fz.compress("auto", every=2, decisions=[(0, CODED), (6, {"node": ("int8", "int4")})])
    assert str(given) == "compress('auto', every=2, decisions=<2>)"
    step, batch = fz.compose(fz.shard_params(), fz.compress("auto", every=2))(STEP), torch.empty(64, 256, device="meta")
    found = fz.lower(step, mesh_of(data=2), SHAPES, batch)
    assert found.program.leaves["extras['compress']"].numel == 1024


def test_wrong_arguments_are_all_named() -> None:
    for every in (0, -1):
        with pytest.raises(FzeroValueError, match=f"every={every}: must be at least 1"):
            fz.compress("auto", every=every)
    with pytest.raises(FzeroValueError, match="every='often': must be a whole number"):
        fz.compress("auto", every="often")  # type: ignore[arg-type]
    with pytest.raises(FzeroValueError, match="every=200: only 'auto' decides anew"):
        fz.compress(every=200)
    with pytest.raises(FzeroValueError, match="decisions: with every= alone"):
        fz.compress("auto", decisions=[(0, CODED)])
    wrong: list[Any] = [(0, {"data": ("int4", None)}), (-1, CODED), 8, (2, PLAIN), (0, {"data": "int8"})]
    with pytest.raises(FzeroValueError) as error:
        fz.compress("auto", every=2, decisions=wrong)
    said = str(error.value)
    assert said.count("a step from 0 on") == 2 and said.count("no pair of a step and formats by axis") == 2
    with pytest.raises(FzeroValueError, match="in the order of their steps"):
        fz.compress("auto", every=2, decisions=[(2, PLAIN), (0, CODED)])


def elastic(patch: pytest.MonkeyPatch, path: str, num: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Goes on from a checkpoint, where there is one, for so many steps: the decisions, and the parameters."""
    run = Run(patch)
    state = run.train.restore(path, params(64)) if fz.checkpoint.find(path) else run.train.init(params(64))
    state = run.steps(state, num)
    fz.checkpoint.save(path, state)
    return run.train.formats, run.whole(state)


@pytest.mark.full
def test_one_rank_decides_nothing_and_keeps_what_was_decided(on_ranks: Any, tmp_path: Path) -> None:
    for ranks, num in ((2, 1), (1, 5), (2, 1)):
        found = on_ranks(elastic, str(tmp_path / "run"), num, ranks=ranks)
        assert [decisions for decisions, _ in found] == [[(0, CODED)]] * ranks
    # begun on one rank, decided as soon as there are two
    for ranks, num, expected in ((1, 3, []), (2, 1, [(3, CODED)])):
        found = on_ranks(elastic, str(tmp_path / "alone"), num, ranks=ranks)
        assert [decisions for decisions, _ in found] == [expected] * ranks
        if ranks == 1:
            plain = fz.compile(STEP, fz.make_mesh(), backend="eager")
            state = plain.init(params(64))
            for _ in range(num):
                state, _ = plain(state, BATCH)
            assert all(map(torch.equal, found[0][1], fz.tree.leaves(state.params)))
