"""Live states laid out anew (fz.reshard): as what a checkpoint of them gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import survivor
import torch

import fzero as fz
from fzero.checkpoint import peer_reads


def step(*transforms: Any) -> Any:
    optimizer = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-2))
    return fz.compose(*transforms)(fz.train_step(survivor.loss_fn, optimizer))


def resharded(root: str) -> list[str]:
    """What of a state is not as its checkpoint, on a chain of stages, axes and tiers."""
    flat, grid = fz.make_mesh(), fz.make_mesh(replica=2, data=2)
    far = fz.make_mesh(unified_memory=False)
    chain = [
        fz.compile(step(fz.shard_params()), flat, backend="eager"),
        fz.compile(step(fz.shard_opt_state(axis=("data", "replica"))), grid, backend="eager"),
        fz.compile(
            step(fz.shard_params(), fz.data_parallel(axis="replica"), fz.mixed_precision("fp16")), grid, backend="eager"
        ),
        fz.compile(step(fz.data_parallel()), flat, backend="eager"),
        fz.compile(step(fz.shard_params(), fz.offload("cpu", "opt_state")), far, backend="eager"),
        fz.compile(step(fz.shard_params(axis=("data", "replica")), fz.accumulate(3)), grid, backend="eager"),
    ]
    usual, peer_reads.WINDOW = peer_reads.WINDOW, 1000
    state, wrong = chain[0].init(survivor.init, fz.random.key(0)), []
    for number, train in enumerate(chain):
        if number:
            path = fz.checkpoint.save(Path(root) / str(number), state)
            before = fz.tree.leaves(state)
            state = fz.reshard(state, train)
            expected = train.restore(path)
            for name, x, y in zip(fz.tree.names(state), *map(fz.tree.leaves, (state, expected)), strict=True):
                if x.dtype != y.dtype or not torch.equal(x, y):
                    wrong.append(f"{number}: {name}")
            wrong += [f"{number}: memory is held" for x in before if x.numel()]
        for index in range(2):
            state, _ = train(state, survivor.batch_at(2 * number + index, flat.rank, 4))
    peer_reads.WINDOW = usual
    if flat.rank == 1:
        state = state._replace(step=torch.zeros((), dtype=torch.int64))
    try:
        fz.reshard(state, chain[0])
        wrong.append("an error of one rank")
    except fz.errors.FzeroValueError as error:
        if "rank 1: fzero.reshard: cannot reshard this state" not in str(error).replace("\n    ", " "):
            wrong.append(str(error))
    fz.close_mesh()
    return wrong


@pytest.mark.full
def test_a_chain_of_stages_axes_and_tiers(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(4, resharded, str(tmp_path)) == [[]] * 4


def test_refusals_leave_the_state_as_it_was(tmp_path: Path) -> None:
    mesh = fz.make_mesh()
    train = fz.compile(step(), mesh, backend="eager")
    other = fz.compile(fz.train_step(survivor.loss_fn, fz.optim.sgd(0.1)), mesh, backend="eager")
    state = train.init(survivor.init, fz.random.key(0))
    wrong: list[tuple[Any, Any, str]] = [
        (state, mesh, "the second argument is a compiled step, not"),
        (3, train, "the first argument is a State, not int"),
        (
            train.gather(state),
            train,
            r"(?s)params\['v'\]: float32\[33, 8\] that was not made by a compiled.*save and restore",
        ),
        (state, other, r"(?s)the state of step 0 does not fit.*mu.w: unexpected, the state has.*compile a step of the"),
    ]
    for given, to, words in wrong:
        with pytest.raises(fz.errors.FzeroError, match=words):
            fz.reshard(given, to)
    state, metrics = train(state, survivor.batch_at(0, 0, 1))
    assert torch.isfinite(metrics["loss"])
    on_disk = fz.compile(step(fz.offload("nvme", "opt_state", path=tmp_path)), mesh, backend="eager")
    state = fz.reshard(state, on_disk)
    with pytest.raises(fz.errors.FzeroValueError, match=r"(?s)mu\['w'\]: is stored on disk.*fz.move\(state, 'cpu'\)"):
        fz.reshard(state, train)
    state = fz.reshard(fz.move(state, "cpu"), train)
    assert int(train(state, survivor.batch_at(1, 0, 1))[0].step) == 2


def test_what_was_one_tensor_is_one() -> None:
    tied = fz.train_step(lambda p, x: (torch.tanh(x @ p["a"]) @ p["b"].T).square().mean(), fz.optim.adamw(0.1))
    both = [fz.compile(s, fz.make_mesh(), backend="eager") for s in (tied, fz.shard_params(tied))]
    w = torch.ones(3, 5)
    state = fz.reshard(both[0].init({"a": w, "b": w}), both[1])
    assert state.params["a"] is state.params["b"]
    with pytest.raises(fz.errors.FzeroError, match="reshard"):
        fz.reshard(both[0].init({"a": w, "b": w.clone()}), both[1])


def test_a_step_that_is_given_the_state_of_another_layout_says_so() -> None:
    mesh = fz.make_mesh()
    far = fz.make_mesh(unified_memory=False)
    plain, apart = (fz.compile(step(*how), far, backend="eager") for how in ((), (fz.offload("cpu", "opt_state"),)))
    other = fz.compile(fz.train_step(survivor.loss_fn, fz.optim.sgd(0.1)), mesh, backend="eager")
    state = plain.init(survivor.init, fz.random.key(0))
    with pytest.raises(fz.errors.FzeroValueError) as caught:
        apart(state, survivor.batch_at(0, 0, 1))
    assert "Fix: lay it out for this step: state = fz.reshard(state, train); or make it" in str(caught.value)
    with pytest.raises(fz.errors.FzeroValueError) as caught:
        other(state, survivor.batch_at(0, 0, 1))
    assert "Fix: make it with this step's init or restore" in str(caught.value), "of another optimizer it could not be"
    state, _ = apart(fz.reshard(state, apart), survivor.batch_at(0, 0, 1))
    assert int(state.step) == 1
