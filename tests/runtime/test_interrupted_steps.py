"""A step that ends in the middle leaves a state that nothing takes any more; one that fails before leaves it be.
Parameters that are not finite any more are told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.errors import OutOfMemory

BLOCKS = 3


class Planned:
    """What an operation of the forward or the backward raises when its time has come."""

    at: tuple[str, int] | None = None
    error: BaseException = RuntimeError()
    count = 0

    @classmethod
    def come(cls, name: str) -> None:
        if cls.at is not None and cls.at[0] == name:
            cls.count += 1
            if cls.count == cls.at[1]:
                raise cls.error


def arm(name: str, number: int, error: BaseException) -> None:
    Planned.at, Planned.error, Planned.count = (name, number), error, 0


@torch.library.custom_op("fzero_test::passes", mutates_args=())
def passes(x: torch.Tensor, name: str) -> torch.Tensor:
    Planned.come(name)
    return x.clone()


@passes.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


passes.register_autograd(
    lambda ctx, grad: (passes(grad, "backward"), None), setup_context=lambda ctx, inputs, output: None
)


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(passes(x @ p["w"], "forward"))


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params["blocks"]:
        x = layer(p, x)
    return x.square().mean()


def model() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(64, 64, generator=generator)} for _ in range(BLOCKS)]}


def batch(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 64).view(rows, 64)


def compiled(tmp_path: Any, *names: str, backend: str = "eager") -> Any:
    chosen = {
        "shard": fz.shard_params(),
        "accumulate": fz.accumulate(2),
        "cpu": fz.offload("cpu"),
        "nvme": fz.offload("nvme", path=str(tmp_path)),
        "all on nvme": fz.offload("nvme", ("opt_state", "params"), path=str(tmp_path)),
    }
    step = fz.compose(*(chosen[n] for n in names))(fz.train_step(loss, fz.optim.adamw(1e-2)))
    return fz.compile(step, fz.make_mesh(), backend=backend)


WAYS = [(), ("accumulate",), ("shard", "cpu"), ("shard", "nvme"), ("shard", "all on nvme", "accumulate")]
ERRORS = [
    RuntimeError("a kernel failed"),
    KeyboardInterrupt(),
    torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"),
]


@pytest.mark.full(keep=["('shard', 'cpu')", "('shard', 'nvme')"])
@pytest.mark.parametrize("names", WAYS, ids=str)
def test_a_step_that_ends_in_the_middle_is_a_state_s_last(tmp_path, names):
    train, saved = compiled(tmp_path, *names), tmp_path / "saved"
    parts = 2 if "accumulate" in names else 1
    state, _ = train(train.init(model()), batch())
    fz.checkpoint.save(saved, state)
    calm, metrics = train(state, batch())
    want = [x.clone() for x in fz.tree.leaves(train.gather(calm).params)]
    assert float(metrics["loss"]) > 0
    for error in ERRORS:
        state = train.restore(saved)
        arm("backward", BLOCKS * parts - 1, error)  # when some blocks may be updated
        expected = OutOfMemory if isinstance(error, torch.OutOfMemoryError) else type(error)
        with pytest.raises(expected) as caught:
            train(state, batch())
        if expected is OutOfMemory:
            text = str(caught.value)
            assert caught.value.__cause__ is error and "fzero.step: out of memory" in text and "\n  planned: " in text
            assert "with fz." in text or "accumulate" in names
        Planned.at = None
        told = rf"(?s)ended in the middle.*{type(error).__name__}.*Fix: .*train.restore\(path\).*train.init"
        evaluate = fz.compile(fz.compose(*train.resolved.transforms)(fz.eval_step(loss)), train.mesh, backend="eager")
        for use in (
            lambda: train(state, batch()),  # noqa: B023
            lambda: train(state, batch()),  # noqa: B023
            lambda: train.gather(state),  # noqa: B023
            lambda: train.check_replicas(state),  # noqa: B023
            lambda: fz.checkpoint.save(tmp_path / "other", state),  # noqa: B023
            lambda: evaluate(state.params, batch()),  # noqa: B023
        ):
            with pytest.raises(Exception, match=told):
                use()
    state, _ = train(train.restore(saved), batch())
    found = fz.tree.leaves(train.gather(state).params)
    assert all(map(torch.equal, found, want))  # nothing of the steps that failed is in the memory of the next


def test_what_fails_before_a_step_writes_leaves_the_state_as_it_was(tmp_path):
    train = compiled(tmp_path, "shard")
    state, _ = train(train.init(model()), batch())
    before = [x.clone() for x in fz.tree.leaves(state)]
    for wrong in (lambda: train(state, batch()[:, :5]), lambda: train(state, batch(), 3), lambda: train(state, "x")):
        with pytest.raises(Exception, match=r"fzero|mat1"):
            wrong()
    evaluate = fz.compile(fz.shard_params()(fz.eval_step(loss)), train.mesh, backend="eager")
    for error in ERRORS:
        arm("forward", 2, error)
        with pytest.raises(OutOfMemory if isinstance(error, torch.OutOfMemoryError) else type(error)):
            evaluate(state.params, batch())
        Planned.at = None
        evaluate(state.params, batch())
    assert all(map(torch.equal, fz.tree.leaves(state), before))
    train(state, batch())


def test_an_allocator_of_the_host_is_told_as_memory():
    from fzero.runtime.error_translation import raise_out_of_memory

    for error in (
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
        ),
    ):
        with pytest.raises(OutOfMemory, match=r"(?s)fzero.step: out of memory.*memory_budget='70GB'"):
            raise_out_of_memory(error, "step", list)
    raise_out_of_memory(RuntimeError("shapes"), "step", list)


def in_the_middle() -> list[str]:
    train = compiled(None, "shard")
    state, _ = train(train.init(model()), batch())
    mesh, said = train.mesh, []
    if mesh.rank == 0:
        arm("backward", 2, RuntimeError("a kernel failed"))
    for _ in range(2):
        try:
            train(state, batch())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    Planned.at = None
    return said


def test_on_several_ranks_too(run_ranks):
    for rank, said in enumerate(run_ranks(2, in_the_middle)):
        assert len(said) == 2 and "a kernel failed" in said[0], (rank, said)
        assert "ended in the middle" in said[1]


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("skips", [False, True])
def test_parameters_that_are_not_finite_are_told_once(tmp_path, where, skips):
    optimizer = fz.optim.skip_nonfinite(fz.optim.adamw(1e-2)) if skips else fz.optim.adamw(1e-2)
    tiers = [fz.offload("nvme", ("opt_state", "params"), path=str(tmp_path))] if where == "disk" else []
    step = fz.compose(fz.shard_params(), *tiers)(fz.train_step(loss, optimizer))
    train = fz.compile(step, fz.make_mesh(), backend="eager")
    state = train.init(model())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for bad in (False, False, True, False, False, True):
            state, metrics = train(state, batch() * (float("nan") if bad else 1.0))
    texts = [str(x.message) for x in said if "finite" in str(x.message)]
    assert bool(metrics["finite"]) is False and len(texts) == (0 if skips else 1)
    for text in texts:
        assert "\n  step 3 was the first whose loss or gradients were not" in text and "skip_nonfinite" in text
        assert where == "disk" or "params['blocks'][0]['w'] (float32[64, 64])" in text
        assert said[0].filename == __file__
