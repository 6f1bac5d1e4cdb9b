"""Optimizers that read whole matrices: Muon against torch.optim, and functions marked with `optim.unsharded` on every
mesh against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import STAGES, meta, whitening
from offloads import OFFLOADS, same, trained
from test_parity import difference, plain, run_cases

import fzero as fz
from fzero import optim
from fzero.errors import FzeroValueError
from fzero.hf import torch_optimizers
from fzero.ir.ops import transfer_bytes
from fzero.optim import torch_classes

OTHER = optim.adamw(1e-2)


def of_torch(shapes: list[tuple[int, ...]], steps: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Parameters after some steps of ours and of torch.optim.Muon."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw) for shape in shapes]
    theirs = [p.clone().requires_grad_() for p in params]
    scale = options.pop("scale", "spectral")
    adjust = {"spectral": "original", "match_rms": "match_rms_adamw"}[scale]
    torchs = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    ours = optim.muon(scale=scale, **options)
    state = ours.init(params)
    for _ in range(steps):
        grads = [torch.randn(shape, generator=draw) for shape in shapes]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        torchs.step()
        updates, state = ours.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params, [p.detach() for p in theirs]


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.02},
        {"lr": 0.02, "weight_decay": 0.0, "nesterov": False, "momentum": 0.9},
        {"lr": 1e-3, "scale": "match_rms", "ns_steps": 3, "weight_decay": 0.3},
    ],
)
def test_muon_is_torchs(options: dict[str, Any]) -> None:
    ours, theirs = of_torch([(8, 8), (12, 5), (5, 12), (1, 7)], 10, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_leaf_of_several_matrices() -> None:
    """A fused qkv, and experts one behind the other, are what their matrices are alone."""
    parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    alone = optim.muon(0.1)
    want, _ = alone.update(parts, alone.init(parts), parts)
    for leaf in (torch.cat(parts), torch.stack(parts)):
        fused = optim.muon(0.1, where=lambda path, leaf: 3)
        got, _ = fused.update([leaf], fused.init([leaf]), [leaf])
        torch.testing.assert_close(got[0].reshape(12, 6), torch.cat(want), rtol=1e-2, atol=1e-3)


def test_what_muon_refuses() -> None:
    params = {"b": torch.ones(3), "w": torch.ones(4, 3)}
    with pytest.raises(
        FzeroValueError, match=r"some tensors are not updated\n  params\['b'\] \[3\]\n.*other=optim.adamw"
    ):
        optim.muon(0.1).init(params)
    for num in (3, -1):
        with pytest.raises(
            FzeroValueError, match=rf"(?s)does not consist of that number of matrices.*params\['w'\] \[4, 3\]: {num}"
        ):
            optim.muon(0.1, where=lambda path, leaf, num=num: num, other=OTHER).init({"w": params["w"]})
    for num in (None, 1.5, "one"):
        with pytest.raises(FzeroValueError, match=rf"`where` does not return an integer\n  params\['b'\]: {num!r}"):
            optim.muon(0.1, where=lambda path, leaf, num=num: num, other=OTHER).init(params)
    wrong: dict[str, Any] = {"ns_steps": 100, "scale": "rms", "ns_dtype": "fp16", "other": 3, "eps": 0.0}
    wrong["state_dtype"] = "int4"
    for name, value in wrong.items():
        with pytest.raises(FzeroValueError, match=f"optim.muon: invalid arguments.*\n.*{name}"):
            optim.muon(0.1, **{name: value})
    with pytest.raises(FzeroValueError, match=r"fn=3: must be a function"):
        optim.unsharded(3)  # type: ignore[arg-type]


def test_the_trainer_translates_torchs() -> None:
    """With the rate apart, which a scheduler writes."""
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(weight.clone())
    torchs = torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False)
    made = torch_classes.of_torch(torch.optim.Muon, 1.0, torchs.param_groups[0])
    updates, _ = made.update([weight], made.init([weight]), [weight])
    theirs.grad = weight.clone()
    torchs.step()
    torch.testing.assert_close(weight + 0.02 * updates[0], theirs.detach())
    odd = torch.optim.Muon([theirs], ns_coefficients=(2.0, -1.5, 0.5))
    assert torch_optimizers.problems(torchs, "optimizers") == []
    assert "ns_coefficients=(2.0, -1.5, 0.5)" in torch_optimizers.problems(odd, "optimizers")[0]


# on meshes


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return (x @ params["out"]).square().mean() + params["bias"].square().sum()


def params_of(layers: int = 5, width: int = 10) -> Any:
    draw = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=draw) * 0.4  # noqa: E731
    return {"layers": [make(width, width) for _ in range(layers)], "out": make(width, 4), "bias": torch.ones(5)}


X = torch.randn(24, 10, generator=torch.Generator().manual_seed(4))


def all_whole(lr: float) -> optim.GradientTransformation:
    """Any update, marked as a whole."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        mu = fz.tree.map(lambda m, g: 0.5 * m + g, state, grads)
        return fz.tree.map(lambda m, p: -lr * (m.cumsum(0) + 0.1 * p.sort(0).values), mu, params), mu

    return optim.GradientTransformation(lambda params: fz.tree.map(torch.zeros_like, params), optim.unsharded(update))


OPTIMIZERS = {
    "muon": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.muon(0.05, other=optim.lamb(0.01), ns_dtype="fp32")
    ),
    "whitening": lambda: whitening(0.01),
    "all_whole": lambda: all_whole(0.01),
}
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "stage 0": (fz.data_parallel(), {"data": 2}),
    "stage 1": (fz.shard_opt_state(), {"data": 3}),
    "stage 2": (fz.compose(fz.shard_grads(), fz.accumulate(2)), {"data": 4}),
    "stage 3": (fz.shard_params(), {"data": 3}),
    "layerwise": (fz.compose(fz.shard_params(), fz.accumulate(2, schedule="layerwise")), {"data": 2}),
    "two axes": (fz.shard_params(axis=("data", "node")), {"node": 2, "data": 2}),
    "replicas": (fz.compose(fz.shard_params(), fz.data_parallel(axis="replica")), {"replica": 2, "data": 2}),
    "stages": (
        fz.compose(fz.shard_params(axis="data"), fz.shard_opt_state(axis=("data", "node"))),
        {"node": 2, "data": 2},
    ),
    "tensor": (
        fz.compose(fz.tensor_parallel(rules={"layers.*": 1}), fz.shard_params()),
        {"data": 2, "model": 2},
    ),
}


CASES = [("muon", name) for name in MESHES]
CASES += [("whitening", mesh) for mesh in ("stage 2", "stage 3", "tensor", "two axes")]
CASES += [("all_whole", mesh) for mesh in ("stage 1", "stages")]


@pytest.mark.full(keep=["muon-layerwise", "muon-stage 0"])
@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_every_mesh_is_one_process(optimizer: str, name: str) -> None:
    transform, mesh = MESHES[name]
    plain_step = fz.train_step(loss_fn, OPTIMIZERS[optimizer]())
    want = plain_step.init(params_of())
    for _ in range(3):
        want, _ = plain_step(want, X)
    got, _ = fz.testing.simulate(transform(plain_step), fz.AbstractMesh(**mesh), params_of(), X, steps=3)
    assert difference(got.params, want.params) < 1e-5
    assert difference(got.opt_state, want.opt_state) < 1e-4


def test_large_preconditioners_are_sharded_and_dealt() -> None:
    """A matrix beside a parameter's, of another shape: with each rank a part of it, which travels with the gradient."""
    draw = torch.Generator().manual_seed(5)
    params = {"layers": [torch.randn(64, 80, generator=draw) for _ in range(3)]}
    x = torch.randn(12, 64, generator=draw)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(((x @ w).tanh().mean() for w in params["layers"]), torch.zeros(()))

    step, mesh = fz.train_step(loss, whitening(0.1)), fz.AbstractMesh(data=3)
    program = fz.lower(fz.shard_params(step), mesh, *meta((params, x[:4]))).program
    left = program.leaves["opt_state['left']['layers'][0]"]
    assert left.layout.axes == ("data",) and left.shard_numel(mesh) * 3 >= 64 * 64 > left.shard_numel(mesh)
    there, back = (x for x in program.instructions if x.op == "all_to_all_start")
    assert (len(there.args), len(back.args)) == (2, 2) and not any(x.op == "take_shard" for x in program.instructions)
    want = step.init(params)
    for _ in range(3):
        want, _ = step(want, x)
    got, _ = fz.testing.simulate(fz.shard_params(step), mesh, params, x, steps=3)
    assert difference(got.params, want.params) < 1e-5
    assert difference(got.opt_state, want.opt_state) < 1e-4


def program_of(layers: int, ranks: int, **options: Any) -> Any:
    step = fz.shard_params(fz.train_step(loss_fn, optim.muon(0.05, other=OTHER, **options)))
    shapes = meta((params_of(layers, 64), torch.empty(24, 64)))
    return fz.lower(step, fz.AbstractMesh(data=ranks), *shapes).program


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("layers", "ranks"), [(8, 4), (5, 4), (2, 4), (5, 3)])
def test_matrices_are_dealt(layers: int, ranks: int, dtype: Any) -> None:
    """As many as there are ranks at a time; one that is like no other is gathered. Each rank sends its shards there and
    back, and nothing twice."""
    program = program_of(layers, ranks, ns_dtype=dtype)
    values, whole = program.values_by_name, [x for x in program.instructions if x.by == "optimizer"]
    deals, (gather,) = ([x for x in whole if x.op == op] for op in ("all_to_all_start", "all_gather_start"))
    groups, left = divmod(layers, ranks)
    assert len(deals) == 2 * (groups + (left > 1)) and len(gather.args) == 1 + (left == 1)
    each = 64 * 64 * (2 if dtype == "bf16" else 4)
    sent = sum(transfer_bytes(x, values, program.mesh) for x in deals)
    assert sent == 2 * (groups + (left > 1)) * each * (ranks - 1) // ranks if 4096 % ranks == 0 else sent
    called = [x.fn for x in whole if x.fn.startswith("whole")]
    assert len(called) == groups + (left > 1) + len(gather.args) and len({*called}) == 2 + (left == 1)


def test_the_deal_can_be_skipped() -> None:
    """Every rank computes all matrices then."""
    step = fz.shard_params(fz.train_step(loss_fn, OPTIMIZERS["muon"]()))
    shapes = meta((params_of(), X[:12]))
    skipped = fz.lower(step, fz.AbstractMesh(data=2), *shapes, skip=("deal",)).program
    assert not any(x.op == "all_to_all_start" for x in skipped.instructions)


@pytest.mark.full
def test_real_ranks(run_ranks: Any) -> None:
    """Over micro-batches, too."""
    cases: list[dict[str, Any]] = [
        {"model": "gpt", "optimizer": "muon", "stage": stage, "accumulate": 1 + stage % 2} for stage in STAGES
    ]
    want = plain("gpt", "muon")
    for ranks in (2, 3):
        for results in run_ranks(ranks, run_cases, cases):
            for case, got in zip(cases, results, strict=True):
                assert difference(got["losses"], want["losses"]) < 1e-5, case
                assert difference(got["state"].params, want["state"].params) < 1e-4, case


def offloaded(path: str) -> list[str]:
    """The offloads whose run is not that without."""
    found = []
    for unified in (True, False):
        mesh = fz.make_mesh(data=-1, unified_memory=unified)
        want, *_ = trained(mesh, (fz.shard_params(),), "gpt", "muon")
        for name in ("cpu opt_state", "cpu all", "nvme both"):
            got, *_ = trained(mesh, (*OFFLOADS[name](path), fz.shard_params()), "gpt", "muon")
            found += [] if same(got, want) else [f"{name} {unified}"]
    return found


@pytest.mark.full
def test_offload_is_bit_for_bit(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(2, offloaded, str(tmp_path)) == [[], []]


def saves(path: str) -> Any:
    (_, whole), _, state = trained(fz.make_mesh(data=-1), (fz.shard_params(),), "gpt", "muon")
    fz.checkpoint.save(path, state)
    return whole


def restores(path: str) -> Any:
    step = fz.shard_params(fz.train_step(models.gpt_loss, models.OPTIMIZERS["muon"]()))
    train = fz.compile(step, fz.make_mesh(data=-1), backend="eager")
    return train.gather(train.restore(path, models.gpt_init))


@pytest.mark.full
def test_a_checkpoint_is_for_any_number_of_ranks(run_ranks: Any, tmp_path: Path) -> None:
    want = run_ranks(2, saves, str(tmp_path / "saved"))[0]
    for ranks in (1, 3):
        assert all(same(got, want) for got in run_ranks(ranks, restores, str(tmp_path / "saved")))
