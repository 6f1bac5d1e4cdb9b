"""`fz.compress("auto")`: formats that the plan chooses for each axis, and what is refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero._utils.units import duration
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.search import Search
from fzero.errors import BudgetError, FzeroTypeError, FzeroValueError, TransformError
from fzero.ir.printer import source
from fzero.plan.calibration import calibration_path, machine, save_calibration
from fzero.plan.device_lookup import KNOWN, Device, Link
from fzero.transforms.compress import ladders

WIDTH = 256
BOTH = ("data", "node")


def mesh_of(**axes: Any) -> fz.AbstractMesh:
    return fz.AbstractMesh(device_type="cuda", **axes)


def device_of(within: float, between: float) -> Device:
    """A GPU in hosts of 8 with links of these rates, in bytes/s."""
    links = {"intra": Link(1e-9, within), "inter": Link(1e-9, between)}
    return replace(KNOWN["h100"], name="made up", links=links, call_seconds=1e-9)


FAST, SLOW = device_of(1e14, 1e14), device_of(1e9, 1e9)
SLOW_BETWEEN = device_of(1e14, 1e8)


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer(p, x)
    return x.square().mean()


def params(width: int = WIDTH) -> Any:
    def draw(seed: int) -> torch.Tensor:
        return torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) / width

    return [{"up": draw(2 * i), "down": draw(2 * i + 1)} for i in range(2)]


SHAPES = fz.tree.map(lambda x: x.to("meta"), params())
STEP = fz.train_step(loss_fn, optim.adamw(1e-3))


def lowered(mesh: fz.AbstractMesh, device: Device | None, *transforms: Any, **how: Any) -> Any:
    batch = torch.empty(4096, WIDTH, device="meta")
    return fz.lower(fz.compose(*transforms)(STEP), mesh, SHAPES, batch, device=device, **how)


def chosen(found: Any) -> dict[str, str]:
    decisions = [x for x in found.plan.decisions if x.what.startswith("compress over ")]
    return {x.what.removeprefix("compress over "): x.chosen for x in decisions}


def why(found: Any, axis: str) -> str:
    return next(x.why for x in found.plan.decisions if x.what == f"compress over {axis}")


# --- what is chosen ---

MOST = {"params": {"data": "int8", "node": "int8"}, "grads": {"data": "int8", "node": "int4"}}
CASES: dict[str, tuple[dict[str, int], Device, Any, dict[str, str], dict[str, Any] | None]] = {
    "fast links": ({"data": 8}, FAST, fz.shard_params(), {"data": "as it is"}, None),
    "slow links": ({"data": 8}, SLOW, fz.shard_params(), {"data": "parameters int8, gradients int8"}, {}),
    "slow everywhere": (
        {"node": 2, "data": 8},
        SLOW,
        fz.shard_params(axis=BOTH),
        {"node": "parameters int8, gradients int4", "data": "parameters int8, gradients int8"},
        MOST,
    ),
    "slow between hosts": (
        {"node": 2, "data": 8},
        SLOW_BETWEEN,
        fz.shard_params(axis=BOTH),
        {"node": "parameters int8, gradients int4", "data": "as it is"},
        {"params": {"node": "int8"}, "grads": {"node": "int4"}},
    ),
    "one rank a host": (
        {"node": 16, "data": 1},
        SLOW_BETWEEN,
        fz.shard_params(axis=BOTH),
        {"node": "parameters int8, gradients int8"},
        {},
    ),
    "replicas": (
        {"replica": 2, "data": 8},
        SLOW_BETWEEN,
        fz.compose(fz.shard_params(), fz.data_parallel(axis="replica"), fz.accumulate(2)),
        {"replica": "gradients int4", "data": "as it is"},
        {"params": None, "grads": {"replica": "int4"}},
    ),
    "whole": ({"data": 8}, SLOW, fz.data_parallel(), {"data": "gradients int8"}, {"params": None}),
    "zero-1": ({"data": 8}, SLOW, fz.shard_opt_state(), {"data": "parameters int8, gradients int8"}, {}),
}


def text(found: Any) -> str:
    """The lines that run: without the header, which has the transforms, and without who placed each."""
    return source(found.program)


@pytest.mark.full(keep=["fast links", "slow between hosts"])
@pytest.mark.parametrize("name", CASES)
def test_each_axis_gets_the_least_that_helps(name: str) -> None:
    """And the program is that of these formats; where nothing is to be gained, the one without."""
    axes, device, zero, want, formats = CASES[name]
    mesh = mesh_of(**axes)
    found = lowered(mesh, device, zero, fz.compress("auto"))
    assert chosen(found) == want
    by_hand = lowered(mesh, device, zero, *([] if formats is None else [fz.compress(**formats)]))
    assert text(found) == text(by_hand) and found.plan.step_seconds == by_hand.plan.step_seconds


def test_the_plan_has_the_seconds_of_each_alternative() -> None:
    axes, device, zero, *_ = CASES["slow between hosts"]
    found = lowered(mesh_of(**axes), device, zero, fz.compress("auto"))

    def seconds(*formats: Any) -> str:
        return duration(lowered(mesh_of(**axes), device, zero, *formats).plan.step_seconds)

    said = [f"a step takes {seconds()} unchanged"]
    for params, grads in ((None, "bf16"), (None, "int8"), ("int8", "int8"), ("int8", "int4")):
        name = f"parameters {params}, gradients {grads}" if params else f"gradients {grads}"
        said.append(f"{seconds(fz.compress(params={'node': params}, grads={'node': grads}))} with {name}")
    assert why(found, "node") == "; ".join(said)
    assert "compress over node" in str(found.plan) and f"{duration(found.plan.step_seconds)} unchanged" in why(
        found, "data"
    )


LADDER = {"as it is": None, "gradients bf16": "bf16", "gradients int8": "int8"}


@pytest.mark.full
def test_it_is_the_least_compression_within_a_percent_of_the_fastest() -> None:
    seen, names = list[str](), [*LADDER]
    for rate in (3e9, 6e10, 1.3e11, 3e11, 1e12):
        device, mesh = replace(device_of(rate, rate), memory_bandwidth=1e15), mesh_of(data=8)
        found = lowered(mesh, device, fz.data_parallel(), fz.compress("auto"))
        plans = {"as it is": lowered(mesh, device, fz.data_parallel()).plan}
        for name in names[1:]:
            plans[name] = lowered(mesh, device, fz.data_parallel(), fz.compress(params=None, grads=LADDER[name])).plan
        fastest = min(x.step_seconds for x in plans.values())
        want = next(name for name, x in plans.items() if x.step_seconds <= 1.01 * fastest)
        seen.append(chosen(found)["data"])
        assert seen[-1] == want and found.plan.step_seconds == plans[want].step_seconds
    assert seen[0] == "gradients int8" and seen[-1] == "as it is"


def test_codes_that_cost_more_than_they_save_are_left_out() -> None:
    slow_memory = replace(device_of(5e9, 5e9), memory_bandwidth=3e10)
    found = lowered(mesh_of(data=8), slow_memory, fz.shard_params(), fz.compress("auto"))
    assert chosen(found) == {"data": "as it is"} and "with gradients bf16" in why(found, "data")
    assert text(found) == text(lowered(mesh_of(data=8), slow_memory, fz.shard_params()))


def rungs(mesh: fz.AbstractMesh, *transforms: Any) -> dict[str, list[str]]:
    """The ladder of each axis."""
    found = lowered(mesh, SLOW, *transforms)
    names = [*found.stages()]
    before = found.stages()[names[names.index("compress") - 1]] if "compress" in names else None
    assert before is not None, "nothing was chosen"
    return {x[0].axis: [*map(str, x[1:])] for x in ladders(before, zero_of(fz.compose(*transforms)(STEP), mesh))}


def test_ladders() -> None:
    """Gradients of 4 bits are for sums alone; bfloat16 is for what travels in 32 bits; None leaves a kind as it is."""
    one, two = mesh_of(data=8), mesh_of(node=2, data=8)
    int8 = "parameters int8, gradients int8"
    assert rungs(one, fz.shard_params(), fz.compress("auto")) == {"data": ["gradients bf16", "gradients int8", int8]}
    half = fz.mixed_precision("bf16", reduce="bf16")
    assert rungs(one, fz.shard_params(), half, fz.compress("auto")) == {"data": ["gradients int8", int8]}
    both = fz.shard_params(axis=BOTH)
    assert rungs(two, both, fz.compress("auto", axis="node")) == {
        "node": ["gradients bf16", "gradients int8", int8, "parameters int8, gradients int4"]
    }
    assert rungs(two, both, fz.compress("auto", grads=None)) == {x: ["parameters int8"] for x in ("node", "data")}
    assert rungs(two, fz.shard_opt_state(), fz.data_parallel(axis="node"), fz.compress("auto")) == {
        "node": ["gradients bf16", "gradients int8", "gradients int4"],
        "data": ["gradients bf16", "gradients int8", int8],
    }


@pytest.mark.full
def test_beside_a_budget_micro_batches_and_open_tiers() -> None:
    """The formats are chosen for the best program without, and the program is then the best with them."""
    more = fz.accumulate(2), fz.remat("auto")
    mesh = mesh_of(data=8, unified_memory=False)
    for transforms, how in (
        (more, {"memory_budget": "1GB"}),
        ((*more, fz.offload("auto")), {"memory_budget": "40MB"}),
    ):
        found = lowered(mesh, SLOW, fz.shard_params(), *transforms, fz.compress("auto"), **how)
        assert chosen(found) == {"data": "parameters int8, gradients int8"}
        assert fz.fits(found.plan, how["memory_budget"])
        without = lowered(mesh, SLOW, fz.shard_params(), *transforms, **how)
        assert found.plan.step_seconds < without.plan.step_seconds


def test_codes_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that fits as it is, though not in codes. No small step does, so the search is told so."""
    best = Search.best

    def fitting(search: Search, starts: Any) -> Any:
        return None if any(x.params or x.grads for x in starts[0].wire) else best(search, starts)

    monkeypatch.setattr(Search, "best", fitting)
    found = lowered(mesh_of(data=8), SLOW, fz.shard_params(), fz.compress("auto"), memory_budget="1GB")
    assert chosen(found) == {"data": "as it is"} and why(found, "data") == "encoded, the step does not fit the budget"
    assert text(found) == text(lowered(mesh_of(data=8), SLOW, fz.shard_params(), memory_budget="1GB"))


@pytest.mark.parametrize("device", [SLOW, FAST])
def test_a_step_that_fits_only_in_codes_gets_them(device: Device) -> None:
    """Under a budget between the peaks with and without codes. On fast links codes save no time, only memory. With
    other stages of ZeRO, the buffers for encoding take what the codes of this step save."""
    mesh, zero, least = mesh_of(data=8), fz.shard_grads(), {"memory_budget": "1KB"}

    def peak(*formats: Any) -> int:
        with pytest.raises(BudgetError, match=r"\(([\d,]+) bytes\) more") as error:
            lowered(mesh, device, zero, *formats, **least)
        return 1000 + int(re.findall(r"\(([\d,]+) bytes\)", str(error.value))[0].replace(",", ""))

    most = peak(fz.compress("auto"))
    in_codes = peak(fz.compress(params=None, grads="int8")) + 1024  # bytes that record the formats
    assert in_codes < most
    found = lowered(mesh, device, zero, fz.compress("auto"), memory_budget=(in_codes + most) // 2)
    assert "gradients" in chosen(found)["data"] and found.plan.peak_bytes <= (in_codes + most) // 2
    assert device is SLOW or why(found, "data") == "with less compression the step does not fit the budget"
    assert chosen(lowered(mesh, FAST, zero, fz.compress("auto"), memory_budget=2 * most)) == {"data": "as it is"}


def test_a_loop_that_deals_codes_is_said_to_reduce() -> None:
    """The plan says of gradients of micro-batches in codes what it says of others."""
    zero = fz.compose(fz.shard_params(), fz.data_parallel(axis="node"), fz.accumulate(2))
    said = [lowered(mesh_of(node=2, data=8), SLOW, zero, *x).plan.decisions[:1] for x in ((), (fz.compress(),))]
    assert said[0] == said[1] and "over data after every micro-batch, over node once" in said[0][0].why


def test_an_evaluation_gathers_parameters_as_they_are() -> None:
    for zero in (fz.shard_params(), fz.shard_opt_state()):
        evaluate = fz.compose(zero, fz.compress("auto"))(fz.eval_step(loss_fn))
        program = fz.lower(evaluate, mesh_of(data=8), SHAPES, (torch.empty(8, WIDTH, device="meta"),), device=SLOW)
        assert not any(op.of_codes for op in program.program.instructions)
        assert any(op.op == "all_gather_start" for op in program.program.instructions)
    with pytest.raises(TransformError, match="does nothing to an evaluation"):
        fz.compress("auto", params=None)(fz.eval_step(loss_fn))


# --- as it runs ---


def calibrated(folder: str, links: Link) -> Device:
    """A calibration of this machine, with links of these rates."""
    os.environ["FZERO_CACHE"] = folder
    known = KNOWN["cpu"]
    found = replace(known, links=dict.fromkeys(known.links, links), source="measured", machine=machine("cpu"))
    save_calibration(found, calibration_path())
    return found


BATCH = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))


def trained(folder: str, bandwidth: float) -> tuple[dict[str, str], list[torch.Tensor]]:
    """The formats, and the parameters after two steps."""
    mesh = fz.make_mesh(shared_memory=False)
    if mesh.rank == 0:
        calibrated(folder, Link(1e-6, bandwidth))
    os.environ["FZERO_CACHE"] = folder
    torch.distributed.barrier()
    train = fz.compile(fz.compose(fz.shard_params(), fz.compress("auto"))(STEP), mesh, backend="eager")
    state = train.init(params(64))
    for _ in range(2):
        state, _ = train(state, BATCH.chunk(2)[mesh.rank])
    return chosen(train), [x.clone() for x in fz.tree.leaves(train.gather(state).params)]


@pytest.mark.full
@pytest.mark.parametrize(("bandwidth", "formats"), [(1e3, {}), (1e15, None)], ids=["slow", "fast"])
def test_ranks_train_by_measured_links(run_ranks: Any, tmp_path: Any, bandwidth: float, formats: Any) -> None:
    """To the bits of the formats by hand; on a fast link to those of the step without."""
    found = run_ranks(2, trained, str(tmp_path), bandwidth)
    step = fz.compose(fz.shard_params(), *([] if formats is None else [fz.compress(**formats)]))(STEP)
    want = fz.testing.simulate(step, fz.AbstractMesh(data=2), params(64), BATCH, steps=2)[0].params
    for decisions, leaves in found:
        assert decisions == {"data": "as it is" if formats is None else "parameters int8, gradients int8"}
        assert all(torch.equal(x, y) for x, y in zip(leaves, fz.tree.leaves(want), strict=True))


def kept(folder: str, bandwidth: float, save: bool) -> list[Any]:
    """The formats and reasons of a state that goes on from the checkpoint in a folder, if there is one: for a batch of
    one shape and of another; and the text in the state."""
    mesh = fz.make_mesh(shared_memory=False)
    if mesh.rank == 0:
        calibrated(folder, Link(1e-6, bandwidth))
    os.environ["FZERO_CACHE"] = folder
    if mesh.size > 1:
        torch.distributed.barrier()
    train = fz.compile(fz.compose(fz.shard_params(), fz.compress("auto"))(STEP), mesh, backend="eager")
    path, found = f"{folder}/saved", list[Any]()
    state = train.restore(path, params(64)) if fz.checkpoint.find(path) else train.init(params(64))
    for batch in (BATCH, BATCH, BATCH[:8]):
        state, _ = train(state, batch.chunk(mesh.size)[mesh.rank])
        found.append((chosen(train), why(train, "data") if mesh.size > 1 else ""))
    if save:
        fz.checkpoint.save(path, state)
    return [*found, len(train._runs), bytes(state.extras["compress"].tolist()).strip(b"\0 ").decode()]


def test_the_state_records_the_formats(run_ranks: Any, tmp_path: Path) -> None:
    """Of one rank nothing is chosen; two ranks choose by slow links and keep that on fast ones."""
    (alone,) = run_ranks(1, kept, str(tmp_path), 1e3, True)
    assert alone[-1] == "[]" and alone[0] == ({}, "")
    codes = {"data": "parameters int8, gradients int8"}
    for found in run_ranks(2, kept, str(tmp_path), 1e3, True):
        assert found[0] == found[1] and found[0][0] == codes and "a step takes" in found[0][1]
        assert found[2] == (codes, "recorded in the state") and found[3] == 2
        assert found[-1] == '[["data","int8","int8"]]'
    for found in run_ranks(2, kept, str(tmp_path), 1e15, False):
        assert found[0] == (codes, "recorded in the state") and found[-1] == '[["data","int8","int8"]]'


def refused(folder: str) -> str:
    """The error where no link was measured."""
    os.environ["FZERO_CACHE"] = folder
    step = fz.compose(fz.shard_params(), fz.compress("auto"))(STEP)
    mesh = fz.make_mesh()
    texts = []
    train = fz.compile(step, mesh, backend="eager")
    state = train.init(params(64))
    for act in (lambda: train(state, torch.ones(8, 64)), lambda: fz.lower(step, mesh, params(64), torch.ones(8, 64))):
        try:
            act()
        except FzeroValueError as error:
            texts.append(str(error))
    assert len(texts) == 2 and fz.lower(step, mesh, params(64), torch.ones(8, 64), device="cpu")
    return texts[0] if texts[0] == texts[1] else "\n".join(texts)


def test_links_that_nobody_measured_are_refused(run_ranks: Any, tmp_path: Any) -> None:
    for said in run_ranks(2, refused, str(tmp_path)):
        assert said.startswith("fzero.compress: 'auto' chooses by the rates of links, which are not known\n")
        assert "links within a host: those of cpu (one thread of" in said and "Fix: measure them with fzero cal" in said


def test_known_links() -> None:
    measured = replace(KNOWN["cpu"], machine={"cores": 2}, source="measured, 2 ranks at once; link inter as of cpu")
    assert measured.measured("intra") and not measured.measured("inter")
    assert not KNOWN["cpu"].measured("intra")


# --- arguments ---


def test_forms() -> None:
    auto = fz.compress("auto")
    assert str(auto) == "compress('auto')" and fz.compress("auto")(STEP) == fz.compress(STEP, "auto")
    assert str(fz.compress("auto", params=None, axis="node")) == "compress('auto', params=None, axis='node')"
    assert fz.compress(formats="auto") == auto != fz.compress()


def test_wrong_arguments_are_all_named() -> None:
    for word in ("int8", "Auto", ""):
        with pytest.raises(FzeroValueError, match="the only string is 'auto'; formats are params= and grads="):
            fz.compress(word)
    with pytest.raises(FzeroValueError, match=r"params=\{'data': None\}: 'auto' chooses(?s:.*)grads='bf16': 'auto'"):
        fz.compress("auto", params={"data": None}, grads="bf16")
    with pytest.raises(FzeroValueError, match="params and grads are None"):
        fz.compress("auto", params=None, grads=None)
    with pytest.raises(FzeroValueError, match="'auto', 'auto': give one of the two"):
        fz.compress("auto", "auto")
    with pytest.raises(FzeroTypeError, match="formats=8: 'auto' or None"):
        fz.compress(STEP, 8)  # type: ignore[arg-type]


def test_what_nothing_could_compress_is_refused_by_name() -> None:
    zero, auto = fz.shard_params(), fz.compress("auto")
    with pytest.raises(
        FzeroValueError, match=r"does nothing(?s:.*)no transform shards parameters or divides the batch"
    ):
        lowered(mesh_of(data=1), SLOW, auto)
    assert not lowered(mesh_of(data=1), SLOW, zero, auto).plan.decisions, "an elastic run may come to one rank"
    with pytest.raises(
        FzeroValueError, match=r"does nothing(?s:.*)fewer than 4,096|does nothing(?s:.*)not selected by"
    ):
        lowered(mesh_of(data=2), SLOW, zero, fz.compress("auto", where=lambda path, leaf: leaf.numel() > 1_000_000))
    with pytest.raises(FzeroValueError, match=r"unknown mesh axis(?s:.*)'node': the mesh has data=2"):
        lowered(mesh_of(data=2), SLOW, zero, fz.compress("auto", axis="node"))
    with pytest.raises(FzeroValueError, match=r"does nothing(?s:.*)compress\('auto', grads=None\)"):
        lowered(mesh_of(data=2), SLOW, fz.data_parallel(), fz.compress("auto", grads=None))
    with pytest.raises(TransformError, match=r"two different compress|conflicts with compress"):
        fz.compose(zero, auto, fz.compress())(STEP)
    with pytest.raises(TransformError, match=r"conflicts with pipeline"):
        fz.compose(zero, fz.pipeline(axis="pipe"), auto)(STEP)
