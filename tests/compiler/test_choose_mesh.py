"""choose_mesh: meshes are planned as a user would write them, sorted by time, and the ones left out are named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.cli import main
from fzero.compiler.auto_mesh import MAX_MESHES, choose_mesh
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for p in params["layers"]:
        x = layer(p, x)
    return (x - batch["y"]).square().mean()


def given(rows: int = 64) -> tuple[Any, Any, Any]:
    empty = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    params = {"layers": [{"up": empty(64, 256), "down": empty(256, 64)} for _ in range(2)]}
    return fz.train_step(loss_fn, optim.adamw(1e-3)), params, {"x": empty(rows, 8, 64), "y": empty(rows, 8, 64)}


def target() -> tuple[Any, Any, Any]:
    return given()


@fz.block
def mixture(p: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = (x @ p["router"]).softmax(-1).topk(2, -1)
    rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=4, capacity=1.25)
    return x + fz.experts.combine(torch.relu(rows @ p["up"]) @ p["down"], back)


def experts_target() -> tuple[Any, Any, Any]:
    shapes = {"router": (32, 4), "up": (4, 32, 64), "down": (4, 64, 32)}
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    step = fz.train_step(lambda params, x: mixture(params, x).square().mean(), optim.adamw(1e-3))
    return step, params, torch.empty(256, 32, device="meta")


def test_every_mesh_of_two_devices_is_planned_as_its_code_says() -> None:
    step, params, batch = given(rows=8)
    found = fz.choose_mesh(step, params, batch, devices=2, device="h100", backend="eager")
    assert {tuple(x.mesh.axes.items()) for x in found.found} == {
        ((axis, 2),) for axis in ("data", "pipe", "seq", "model")
    }
    plans = [x.plan for x in found.found if x.plan is not None]
    seconds = [plan.step_seconds for plan in plans]
    assert len(plans) == 4 and seconds == sorted(seconds) and found.best is found.found[0]
    for x, plan in zip(found.found, plans, strict=True):
        made = fz.compose(*(eval(code, {"fz": fz}) for code in x.code))(step)
        part = {name: leaf[: 8 // x.mesh.axes.get("data", 1)] for name, leaf in batch.items()}
        again = fz.lower(made, x.mesh, params, part, device="h100", memory_budget=found.budget, backend="eager")
        assert again.plan.step_seconds == plan.step_seconds
    assert f"fz.make_mesh({next(iter(found.best.mesh.axes))}=2)" in str(found) and not found.left_out


def test_named_meshes_are_compared_and_what_cannot_be_had_is_last_with_its_reason() -> None:
    step, params, batch = given(rows=6)
    meshes = [fz.AbstractMesh(data=4), fz.AbstractMesh(data=2, pipe=3), fz.AbstractMesh(data=2)]
    found = choose_mesh(step, params, batch, meshes=meshes, device="h100", backend="eager")
    assert [x.mesh.axes for x in found.found] == [{"data": 2}, {"data": 4}, {"data": 2, "pipe": 3}]
    assert (
        "6 samples cannot be divided among 4 shards" in found.found[1].text
        and "more stages than blocks" in found.found[2].text
    )
    tight = choose_mesh(step, params, batch, meshes=meshes[2:], device="h100", backend="eager", memory_budget="350KiB")
    with pytest.raises(FzeroValueError, match=r"no mesh fits the step\n  data=2: .*350.0 KiB"):
        _ = tight.best
    unknown = choose_mesh(
        step, params, batch, meshes=[fz.AbstractMesh(data=2, replica=2)], device="h100", backend="eager"
    )
    assert "no transform uses a mesh axis" in unknown.found[0].text and "replica=2" in unknown.found[0].text
    with pytest.raises(TransformError, match="two different shard_params"):
        choose_mesh(fz.shard_params(step), params, batch, meshes=[fz.AbstractMesh(data=2, seq=2)], device="h100")


def test_more_meshes_than_are_planned_are_named() -> None:
    step, params, batch = given(rows=1)  # does not divide, so that nothing is traced
    found = choose_mesh(step, params, batch, devices=2**10, device="h100", backend="eager")
    assert len(found.found) == MAX_MESHES and found.left_out and "data=256, seq=2, model=2" in found.left_out
    assert {"data": 1024} in [x.mesh.axes for x in found.found] and {"node": 128, "data": 8} in [
        x.mesh.axes for x in found.found
    ]
    assert "left out" in str(found)


@pytest.mark.full
def test_experts() -> None:
    step, params, x = experts_target()
    meshes = [fz.AbstractMesh(data=2, expert=2), fz.AbstractMesh(data=4)]
    where = lambda path, leaf: leaf.ndim == 3  # noqa: E731
    found = choose_mesh(step, params, x, meshes=meshes, device="h100", experts=where, backend="eager")
    of = {tuple(x.mesh.axes): x for x in found.found if x.plan is not None}
    assert "fz.expert_parallel(where=experts)" in of["data", "expert"].code and len(of) == 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    name = ["plan", f"{__file__}:target", "--devices", "2xh100", "--backend", "eager"]
    assert main([*name, "--mesh", "data=2", "--mesh", "model=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [x["axes"] for x in found["meshes"]] == [{"data": 2}, {"model": 2}]
    assert all(math.isfinite(x["step_seconds"]) for x in found["meshes"])
    assert main([*name, "--mesh", "data=2", "--mesh", "data=4"]) == 2
    assert "another number of devices" in capsys.readouterr().err
    assert main([*name, "--mesh", "auto", "--seq", "64", "--include-process", "--trace", "step.json"]) == 2
    said = capsys.readouterr().err
    assert (
        "--seq: applies only to --hf" in said
        and "--include-process: applies only with --budget" in said
        and "--trace is for one mesh" in said
    )
    for mixed in (["--mesh", "auto", "--mesh", "data=2"], ["--mesh", "auto", "data=2"], ["--mesh", "auto,data=2"]):
        assert main([*name, *mixed]) == 2
        said = capsys.readouterr().err
        assert "no other mesh can be given with it" in said and "Fix: give --mesh auto alone" in said
    assert main(["show", *name[1:], "--mesh", "data=2", "--mesh", "model=2"]) == 2
    assert "only fzero plan accepts it" in capsys.readouterr().err


@pytest.mark.full
def test_the_command_plans_all_and_names_experts(capsys: pytest.CaptureFixture[str]) -> None:
    name = ["plan", f"{__file__}:experts_target", "--devices", "2xh100", "--backend", "eager"]
    assert main([*name, "--mesh", "auto", "--json", "--experts", "u*", "down"]) == 0
    found = json.loads(capsys.readouterr().out)["meshes"]
    assert "fz.expert_parallel(where=experts)" in next(x["transforms"] for x in found if x["axes"] == {"expert": 2})
    assert main([*name, "--mesh", "auto", "--experts", "up", "ups"]) == 2
    assert "ups: no parameter has such a name" in capsys.readouterr().err
    assert main([*name, "--mesh", "data=2", "--experts", "up"]) == 2
    assert "--experts is about --mesh auto" in capsys.readouterr().err
    assert main([*name, "--mesh", "auto", "--budget", "1KiB"]) == 1
    assert "left out" not in (said := capsys.readouterr().out) and "fz.make_mesh" not in said


def test_wrong_arguments_are_named() -> None:
    step, params, batch = given(rows=8)
    numbers: list[Any] = [0, -2, 2.5, "4", True]
    for devices in numbers:
        with pytest.raises(FzeroTypeError, match=r"devices=(?s:.*)Fix: devices=8"):
            fz.choose_mesh(step, params, batch, devices=devices, device="h100")
    with pytest.raises(FzeroTypeError, match="meshes: str, not a mesh"):
        fz.choose_mesh(step, params, batch, meshes=["data=2"], device="h100")  # type: ignore[list-item]
    for other in (loss_fn, fz.eval_step(loss_fn)):
        with pytest.raises(FzeroTypeError, match=r"plans training with a step, not(?s:.*)Fix: "):
            fz.choose_mesh(other, params, batch, devices=2, device="h100")  # type: ignore[arg-type]
    nothing = fz.choose_mesh(
        step, params, batch, meshes=[fz.AbstractMesh(data=2)], device="h100", backend="eager", memory_budget=0
    )
    assert nothing.budget == 0 and nothing.found[0].plan is None
