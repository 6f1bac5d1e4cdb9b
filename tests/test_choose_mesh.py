"""choose_mesh: every mesh of some devices is planned as a user would write it, and the fastest that fits is first."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.cli import main
from fzero.errors import BudgetError, FzeroTypeError, FzeroValueError, TransformError
from fzero.lowering.choose_mesh import choose_mesh
from fzero.plan.devices import get_device

choose_mesh_file = importlib.import_module("fzero.lowering.choose_mesh")


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for p in params["layers"]:
        x = layer(p, x)
    return (x - batch["y"]).square().mean()


def given(width: int = 64, rows: int = 64) -> tuple[Any, Any, Any]:
    empty = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    params = {"layers": [{"up": empty(width, 4 * width), "down": empty(4 * width, width)} for _ in range(4)]}
    batch = {"x": empty(rows, 8, width), "y": empty(rows, 8, width)}
    return fz.train_step(loss_fn, optim.adamw(1e-3)), params, batch


def target() -> tuple[Any, Any, Any]:
    return given()


def test_every_mesh_is_planned_and_the_first_is_the_fastest() -> None:
    step, params, batch = given()
    found = fz.choose_mesh(step, params, batch, devices=4, device="h100", rules={"up": 1, "down": 0})
    axes = {tuple(sorted(x.axes.items())) for x in found.found}
    assert axes == {
        tuple(sorted((k, n) for k, n in (("data", d), ("model", m), ("pipe", p)) if n > 1))
        for d in (1, 2, 4)
        for m in (1, 2, 4)
        for p in (1, 2, 4)
        if d * m * p == 4
    }
    assert not [x.refused for x in found.found if x.plan is None]
    seconds = [x.planned.step_seconds for x in found.found]
    assert seconds == sorted(seconds) and found.best is found.found[0]
    assert {x.title for x in found.found if x.axes == {"data": 4}} == {"ZeRO-1", "ZeRO-3"}
    # what is planned is what the code says, written by hand
    for x in found.found:
        made = fz.compose(*(eval(code, {"fz": fz, "rules": {"up": 1, "down": 0}}) for code in x.code))(step)
        mesh, limit = fz.AbstractMesh(**dict[str, Any](x.axes)).of_type("cuda"), found.budget
        again = fz.lower(made, mesh, params, x.batch, device="h100", memory_budget=limit)
        assert again.plan.step_seconds == x.planned.step_seconds and x.batch["x"].shape[0] == 64 // x.axes.get(
            "data", 1
        )
    assert "fz.make_mesh(" in found.code and found.sentence in str(found)
    data = found.data()
    assert data["candidates"][0]["step_seconds"] == seconds[0] and json.dumps(data)


def test_what_does_not_fit_comes_last_with_the_reason() -> None:
    step, params, batch = given(rows=6)
    found = choose_mesh(step, params, batch, devices=4, device="h100", rules={"up": 1, "down": 0})
    refused = {x.mesh: x.refused for x in found.found if x.plan is None}
    assert refused["data=4"] == "6 rows do not divide into 4 parts" and found.found[-1].plan is None
    tight = choose_mesh(
        step, params, batch, devices=2, device="h100", rules={"up": 1, "down": 0}, memory_budget="700KiB"
    )
    assert all(x.plan is None and "than the 700.0 KiB it may have" in x.refused for x in tight.found)
    with pytest.raises(BudgetError, match=r"no mesh of 2 devices has room for the step\n  data=2, ZeRO-1"):
        _ = tight.best
    assert "left out" in str(tight)


def test_what_cannot_be_best_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bounds away it does not fit, or is slower than the fastest."""
    step, params, batch = given(width=512)
    step = fz.mixed_precision("bf16")(step)
    fast = get_device("h100")
    slow = replace(fast, flops={dtype: n / 1e5 for dtype, n in fast.flops.items()})
    for device, budget, mesh, why in (
        (fast, "15MiB", {"data": 16}, "parameters alone take 16.0 MiB, more than the 15.0 MiB that it may have"),
        (slow, None, {"data": 4, "pipe": 4}, "it takes at least"),
    ):
        both = []
        for hopeless in (choose_mesh_file._Planner._hopeless, lambda *_: None):
            with monkeypatch.context() as patched:
                patched.setattr(choose_mesh_file, "_factors", lambda *_, mesh=mesh: [{"data": 16}, mesh][: len(mesh)])
                patched.setattr(choose_mesh_file._Planner, "_hopeless", hopeless)
                both.append(choose_mesh(step, params, batch, devices=16, device=device, memory_budget=budget))
        bounded, every = ({(x.mesh, x.title): x for x in found.found} for found in both)
        left = [name for name, x in bounded.items() if why in x.refused]
        assert left
        for name in left:
            assert every[name].plan is None or every[name].planned.step_seconds > both[0].best.planned.step_seconds


def test_what_is_wrong_is_said() -> None:
    step, params, batch = given()
    with pytest.raises(FzeroTypeError, match="devices='8': their number, at least 1"):
        choose_mesh(step, params, batch, devices="8", device="h100")  # type: ignore[arg-type]
    with pytest.raises(FzeroTypeError, match="chooses for a training step, not function"):
        choose_mesh(loss_fn, params, batch, devices=8)  # type: ignore[arg-type]
    with pytest.raises(TransformError, match=r"parallel already\n  shard_params"):
        choose_mesh(fz.shard_params(step), params, batch, devices=8)
    odd = {**batch, "y": batch["y"][:3]}
    with pytest.raises(
        FzeroValueError, match=r"no one number of rows\n  batch\['x'\]: 64 rows\n  batch\['y'\]: 3 rows"
    ):
        choose_mesh(step, params, odd, devices=8)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__file__}:target"
    assert main(["plan", name, "--mesh", "auto", "--devices", "2xh100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 2 and all(math.isfinite(x["step_seconds"]) for x in found["candidates"])
    assert main(["plan", name, "--mesh", "auto", "--devices", "2xh100", "--budget", "100KiB"]) == 1
    assert "no mesh has room" in capsys.readouterr().out
    assert main(["plan", name, "--mesh", "auto"]) == 2
    assert "--devices NUMBERxNAME is wanted" in capsys.readouterr().err
