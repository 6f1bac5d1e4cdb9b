"""choose_mesh: every mesh of some devices is planned as a user would write it, and the fastest that fits is first."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.cli import main
from fzero.errors import BudgetError, FzeroTypeError, FzeroValueError, TraceError, TransformError
from fzero.lowering.choose_mesh import choose_mesh
from fzero.lowering.mesh_bounds import MeshBounds
from fzero.lowering.mesh_candidates import MeshCandidate, MeshRequest, candidates, meshes
from fzero.lowering.mesh_plans import MeshPlans
from fzero.plan.devices import get_device
from fzero.plan.rates import Device, Link
from fzero.units import parse_bytes

choose_mesh_file = importlib.import_module("fzero.lowering.choose_mesh")


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for p in params["layers"]:
        x = layer(p, x)
    return (x - batch["y"]).square().mean()


def given(width: int = 64, rows: int = 64, layers: int = 2) -> tuple[Any, Any, Any]:
    empty = lambda *shape: torch.empty(*shape, device="meta")  # noqa: E731
    params = {"layers": [{"up": empty(width, 4 * width), "down": empty(4 * width, width)} for _ in range(layers)]}
    batch = {"x": empty(rows, 8, width), "y": empty(rows, 8, width)}
    return fz.train_step(loss_fn, optim.adamw(1e-3)), params, batch


def target() -> tuple[Any, Any, Any]:
    return given()


def narrow(**bandwidth: float) -> Device:
    """An H100 with other links, in bytes/s."""
    device = get_device("h100")
    return replace(device, links={k: Link(x.latency, bandwidth.get(k, x.bandwidth)) for k, x in device.links.items()})


@pytest.fixture
def unpruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits is planned."""
    monkeypatch.setattr(choose_mesh_file, "GAIN", -math.inf)


@pytest.mark.full
@pytest.mark.usefixtures("unpruned")
def test_every_mesh_is_planned_and_the_first_is_the_fastest() -> None:
    step, params, batch = given(rows=8)
    rules = {"up": 1, "down": 0}
    found = fz.choose_mesh(step, params, batch, devices=2, device="h100", rules=rules)
    axes = {tuple(sorted(x.axes.items())) for x in found.found}
    names = ("data", "pipe", "seq", "model")
    sizes = [n for n in itertools.product((1, 2), repeat=len(names)) if math.prod(n) == 2]
    assert axes == {tuple(sorted((k, n) for k, n in zip(names, of, strict=True) if n > 1)) for of in sizes}
    assert not [x.refused for x in found.found if x.plan is None]
    seconds = [x.planned.step_seconds for x in found.found]
    assert seconds == sorted(seconds) and found.best is found.found[0]
    assert {x.title for x in found.found if x.axes == {"data": 2}} == {"ZeRO-1", "ZeRO-3"}
    assert any("sequence" in x.title for x in found.found)
    # what is planned is what the code says, written by hand
    for x in found.found:
        made = fz.compose(*(eval(code, {"fz": fz, "rules": rules}) for code in x.code))(step)
        mesh, limit = fz.AbstractMesh(**dict[str, Any](x.axes)).of_type("cuda"), found.budget
        again = fz.lower(made, mesh, params, x.batch, device="h100", memory_budget=limit)
        assert again.plan.step_seconds == x.planned.step_seconds
        assert x.batch["x"].shape[0] == 8 // x.axes.get("data", 1)
    assert "fz.make_mesh(" in found.code and found.sentence in str(found)
    data = found.data()
    assert data["candidates"][0]["step_seconds"] == seconds[0] and json.dumps(data)


@pytest.mark.full
def test_what_does_not_fit_comes_last_with_the_reason() -> None:
    step, params, batch = given(rows=6)
    found = choose_mesh(step, params, batch, devices=4, backend="eager", device="h100", rules={"up": 1, "down": 0})
    refused = {x.mesh: x.refused for x in found.found if x.plan is None}
    assert refused["data=4"] == "6 rows do not divide into 4 parts" and found.found[-1].plan is None
    assert "ZeRO alone cannot be (6 rows do not divide into 4 parts)" in found.sentence
    rules, few = {"up": 1, "down": 0}, "350KiB"
    begins = choose_mesh(fz.mixed_precision("auto")(step), params, batch, devices=2, device="h100", rules=rules)
    assert begins.best.plan is not None
    tight = choose_mesh(step, params, batch, devices=2, device="h100", rules=rules, memory_budget=few)
    why = r"than the 350.0 KiB (that )?it may have|more stages than blocks"
    assert all(x.plan is None and re.search(why, x.refused) for x in tight.found)
    with pytest.raises(BudgetError, match=r"no mesh of 2 devices has room for the step\n  data=2, ZeRO-1"):
        _ = tight.best
    assert "left out" in str(tight)


@pytest.mark.full
@pytest.mark.parametrize(("devices", "links"), [(4, {}), (2, {"intra": 2.5e9, "inter": 2.5e9})], ids=["fast", "slow"])
def test_bounds_are_no_more_than_plans_and_leave_out_nothing_that_is_faster(
    devices: int, links: dict[str, float]
) -> None:
    step, params, batch = given(width=512, rows=8, layers=devices)
    step, rules = fz.mixed_precision("bf16")(step), {"up": 1, "down": 0}
    device = narrow(**links)
    device = replace(device, flops={dtype: n / 4e3 for dtype, n in device.flops.items()})
    asked = MeshRequest(step, params, batch, 8, device, device.memory_bytes, rules, None, "inductor", devices)
    search = choose_mesh_file._Search(asked)
    bounds, none, ratios, seconds = search.bounds, MeshBounds(replace(asked, budget=-1)), list[float](), list[float]()
    for axes in meshes(devices, 8, False):
        if {"pipe", "seq"} <= {*axes} or {"seq", "model"} <= {*axes}:
            continue  # likewise
        for candidate in candidates(axes, 8):
            assert isinstance(candidate, MeshCandidate), candidate
            least, made = bounds.least(candidate), search._planned(candidate)
            if made.plan is None:  # backwards that nothing splits
                assert candidate.schedule == "zb" and "units of weights" in made.refused
                continue
            nbytes = re.search(r"take at least ([\d.]+) (\w+),", refused := none.least(candidate).refused)
            assert nbytes, refused
            assert parse_bytes("".join(nbytes.groups())) <= 1.001 * made.peak_bytes, (made.mesh, made.title)
            seconds.append(made.plan.step_seconds)
            ratios.append(max(least.seconds, bounds.first(candidate)) / seconds[-1])
            assert ratios[-1] <= 1, (made.mesh, made.title)
    assert max(ratios) > 0.9
    found = choose_mesh(step, params, batch, devices=devices, device=device, rules=rules)
    assert found.best.planned.step_seconds <= 1.03 * min(seconds)
    assert any(x.refused.startswith("it takes at least") for x in found.found)


@pytest.mark.full
def test_whether_zero_alone_wins_depends_on_links_and_rows() -> None:
    def chosen(device: Device, rows: int = 32) -> MeshPlans:
        step, params, batch = given(width=1024, rows=rows)
        step = fz.mixed_precision("bf16")(step)
        device = replace(device, flops={dtype: n / 10 for dtype, n in device.flops.items()})
        return choose_mesh(step, params, batch, devices=2, device=device, rules={"up": 1, "down": 0})

    fast = chosen(get_device("h100"))
    assert fast.best.mesh == "data=2" and fast.sentence.startswith("ZeRO alone is fastest")
    slow = chosen(narrow(intra=2.5e9, inter=2.5e9))
    assert slow.best.mesh != "data=2" and re.search(r"is fastest; ZeRO alone takes [\d.]+ times as long", slow.sentence)
    few = chosen(get_device("h100"), rows=1)
    assert few.sentence.startswith("ZeRO alone cannot be (1 row does not divide into 2 parts)")


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


@pytest.mark.full
def test_experts_and_hosts() -> None:
    step, params, x = experts_target()
    device = replace(get_device("h100"), devices_per_host=2)
    found = choose_mesh(step, params, x, devices=4, device=device, experts=lambda path, leaf: leaf.ndim == 3)
    of = {x.mesh: x for x in found.found if x.seconds is not None}
    assert {"data=4", "node=2 x data=2", "data=2 x expert=2"} <= {*of} and "expert=4" not in of
    code = of["data=2 x expert=2"].code
    assert "fz.expert_parallel(where=experts)" in code and any("axis=('expert', 'data')" in x for x in code)
    assert "fz.shard_params(axis=('data', 'node'))" in of["node=2 x data=2"].code


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


def test_what_no_memory_would_help_is_not_said_to_be_too_large() -> None:
    step, params, batch = given(rows=8)
    found = choose_mesh(step, params, batch, devices=3, device="h100", rules={"up": 1, "down": 0})
    assert not any(x.too_large for x in found.found)
    with pytest.raises(FzeroValueError, match=r"no mesh of 3 devices divides the step\n  data=3: 8 rows") as raised:
        _ = found.best
    assert not isinstance(raised.value, BudgetError)


def test_what_is_wrong_with_the_step_itself_is_said_as_anywhere_else() -> None:
    step, params, batch = given()
    narrower = {**batch, "x": batch["x"][..., :5]}
    with pytest.raises(TraceError, match=r"(?s)test_choose_mesh.py:.*x @ p\[\"up\"\].*Fix: "):
        choose_mesh(step, params, narrower, devices=2, device="h100")
    with pytest.raises(FzeroValueError, match=r"fzero.choose_mesh: unknown backend 'c'"):
        choose_mesh(step, params, batch, devices=2, device="h100", backend="c")
    with pytest.raises(TransformError, match=r"(?s)replicas are not searched for\n  local_sgd.*Fix: leave it out"):
        choose_mesh(fz.local_sgd(step), params, batch, devices=2, device="h100")


@pytest.mark.full
@pytest.mark.parametrize("formats", [None, "auto"])
def test_a_step_that_compresses_is_planned_on_every_mesh_with_codes(formats: str | None) -> None:
    step, params, batch = given()
    step = fz.compress(step, formats)
    found = choose_mesh(step, params, batch, devices=2, device="h100", rules={"up": 1, "down": 0})
    planned = {x.title for x in found.found if x.axes == {"data": 2} and x.plan is not None}
    assert planned == {"ZeRO-1", "ZeRO-3"}
    assert "exchange:data" in found.best.planned.channels or formats == "auto"


def timed(patch: pytest.MonkeyPatch, trace: float = 0.0) -> None:
    """Time that passes as candidates are planned, a second each, after the trace of one device."""
    now, planned, checked = [0.0], choose_mesh_file._Search._planned, MeshBounds.check

    def passing(fn: Any, seconds: float) -> Any:
        def run(*args: Any) -> Any:
            now[0] += seconds
            return fn(*args)

        return run

    patch.setattr(choose_mesh_file._Search, "_planned", passing(planned, 1.0))
    patch.setattr(MeshBounds, "check", passing(checked, trace))
    patch.setattr(choose_mesh_file, "time", SimpleNamespace(monotonic=lambda: now[0]))


@pytest.mark.full
@pytest.mark.usefixtures("unpruned")
def test_a_search_that_ends_early_says_what_it_did_not_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    step, params, batch = given(rows=8)
    asked: dict[str, Any] = {"devices": 2, "device": "h100", "rules": {"up": 1, "down": 0}}
    search = functools.partial(fz.choose_mesh, step, params, batch, **asked)
    timed(monkeypatch)
    whole, few = search(), search(seconds=2)
    assert whole.stopped is None and "proven" not in whole.sentence and search(seconds=99).data() == whole.data()
    assert few.num_planned == 2 and few.num_planned + few.num_untried == whole.num_planned
    untried = [x for x in few.found if x.plan is None]
    assert all(x.refused.startswith("no time; at least ") for x in untried) and few.stopped == 2
    seconds = {(x.mesh, x.title): x.planned.step_seconds for x in whole.found}
    missed = [seconds[key] for x in untried if (key := (x.mesh, x.title)) in seconds]
    assert missed and few.least_untried <= min(missed) and few.best.title in ("ZeRO-1", "ZeRO-3")
    first, second = few.sentence.splitlines()
    assert first == "ZeRO alone is the fastest of those planned"
    assert second.startswith(
        f"not proven best: ended after 2 s, 2 planned; {few.num_untried} candidates untried cannot"
    )
    assert str(few).startswith(first) and str(few).index("fz.make_mesh") < str(few).index("left out")
    assert few.data()["untried"] == few.num_untried and whole.data()["untried_least_seconds"] is None
    for wrong in (0, -1, "long"):
        with pytest.raises(FzeroValueError, match="seconds="):
            search(seconds=wrong)
    timed(monkeypatch, trace=5.0)
    with pytest.raises(FzeroValueError, match=r"(?s)that has room was planned within 2 s.*no time.*fz.lower\(step"):
        _ = search(seconds=2).best


@pytest.mark.full
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__file__}:target"
    assert main(["plan", name, "--mesh", "auto", "--devices", "2xh100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 2 and math.isfinite(found["candidates"][0]["step_seconds"])
    assert main(["plan", name, "--mesh", "auto", "--devices", "2xh100", "--budget", "100KiB"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "fzero.choose_mesh: no mesh of 2 devices has room for the step"
    assert main(["plan", name, "--mesh", "auto", "--devices", "2xh100", "--budget", "24GB", "--whole", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["budget"] < 24e9
    assert main(["plan", name, "--mesh", "auto", "--seq", "64", "--whole"]) == 2
    said = capsys.readouterr().err
    assert "--devices NUMBERxNAME is wanted" in said
    assert "--seq: is about --hf" in said and "--whole: is about --budget" in said


@pytest.mark.full
def test_the_command_names_experts(capsys: pytest.CaptureFixture[str]) -> None:
    name = [f"{__file__}:experts_target", "--mesh"]
    assert main(["plan", *name, "auto", "--devices", "2xh100", "--json", "--experts", "u*", "down"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    code = next(x["transforms"] for x in found if x["axes"] == {"expert": 2})
    assert "fz.expert_parallel(where=experts)" in code
    assert main(["plan", *name, "auto", "--devices", "2xh100", "--experts", "up", "ups"]) == 2
    assert "ups: no parameter has such a name" in (said := capsys.readouterr().err) and "router" in said
    assert main(["plan", *name, "data=2", "--device", "h100", "--experts", "up"]) == 2
    assert "--experts is about --mesh auto" in capsys.readouterr().err
    assert main(["plan", *name, "data=2", "--device", "h100", "--seconds", "9"]) == 2
    assert "--seconds is about --mesh auto" in capsys.readouterr().err
    assert main(["plan", *name, "auto", "--devices", "2xh100", "--seconds", "inf"]) == 0
    said = capsys.readouterr().out
    assert said.index("fz.make_mesh(") < said.index("meshes of 2 ") and "proven" not in said
