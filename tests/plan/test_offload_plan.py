"""The plan of tiers: bytes at rest and at the peak of each, what copies and the host's functions cost, what bounds a
step, what `auto` chooses."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from models import OPTIMIZERS, batches, meta_part

import fzero as fz
from fzero import errors, optim
from fzero._utils.host_memory import padded
from fzero.compiler.auto_offload import _Tiers
from fzero.compiler.budget_report import Budget
from fzero.compiler.options import Options
from fzero.ir.attributes import CallAttrs, CopyAttrs, LoopAttrs
from fzero.ir.printer import source
from fzero.ir.program import Instruction, Program, Value
from fzero.plan import cost
from fzero.plan.device_lookup import KNOWN, Device, Link
from fzero.plan.plan import plan
from fzero.plan.timeline import COMPUTE, simulate
from fzero.sharding.layout import Layout, Leaf
from fzero.sharding.placements import IN_FLIGHT
from fzero.transforms.offload import ROLES, Offload, blocks_updated_on_host, tiers_of

APART = fz.AbstractMesh(data=1, unified_memory=False)
F32 = torch.float32


def made(
    *transforms: Any,
    mesh: fz.AbstractMesh = APART,
    layers: int = 2,
    width: int = models.WIDTH,
    optimizer: str = "clipped",
    **kwargs: Any,
) -> fz.Lowered:
    step = fz.train_step(models.gpt_loss, OPTIMIZERS[optimizer]())
    init = functools.partial(models.gpt_init, layers=layers, width=width)
    return fz.lower(fz.compose(*transforms)(step), mesh, init, meta_part(batches(1)[0], mesh.size), **kwargs)


once = functools.cache(made)


def lowered(*transforms: Any, **kwargs: Any) -> fz.Lowered:
    """What is lowered for a device by its name is lowered once for all tests."""
    return (made if isinstance(kwargs.get("device"), Device) else once)(*transforms, **kwargs)


# --- the thread of the host, by hand ---


def handle(name: str) -> tuple[Value, ...]:
    return (Value(name, (), torch.uint8, IN_FLIGHT),)


def call(fn: str, arg: str, out: str, on: str = "device") -> Instruction:
    return Instruction("call", (arg,), (Value(out, (1,), F32, tier=on),), fn, attrs=CallAttrs(on=on))


def move(way: str, arg: str, out: str, source: str, target: str) -> tuple[Instruction, Instruction]:
    attrs = CopyAttrs(source=source, target=target)
    return Instruction("copy_start", (arg,), handle(f"{way}_{out}"), attrs=attrs), Instruction(
        "wait", (f"{way}_{out}",), (Value(out, (1,), F32, tier=target),)
    )


def timed(ops: list[Instruction], times: dict[str, float], asynchronous: bool = True) -> Any:
    program = Program("hand", APART, (Value("x", (1,), F32),), {}, tuple(ops), (), {})
    taken = lambda op, _: times.get(op.fn or (op.out[0].name if op.out else ""), 0.0)  # noqa: E731
    return simulate([program], taken, asynchronous)[0]


def update_on_host() -> list[Instruction]:
    """A gradient travels, the host updates, the parameter comes back for `last`; `other` was told to the device
    before."""
    out, arrived = move("to_host", "g", "g_host", "device", "host")
    back, here = move("to_device", "p_host", "p", "host", "device")
    ops = [
        call("backward", "x", "g"),
        out,
        call("other", "x", "y"),
        arrived,
        call("update", "g_host", "p_host", "host"),
        call("more", "x", "z"),
    ]
    return [*ops, back, here, call("last", "p", "q")]


TIMES = {
    "backward": 1.0,
    "to_host_g_host": 1.0,
    "other": 3.0,
    "update": 4.0,
    "more": 1.0,
    "to_device_p": 2.0,
    "last": 1.0,
}


def test_a_function_on_the_host_holds_up_what_comes_after_it_and_not_what_was_told_before() -> None:
    found = timed(update_on_host(), TIMES)
    # the gradient arrives at 2, the update runs until 6 while the device is done with `other` at 4; it waits 2 for the
    # thread, and 2 for the copy from 7 to 9
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (10.0, 6.0, 4.0)
    assert found.exposed == {3: 0.0, 4: 2.0, 7: 2.0} and found.waited == {3: "to_host", 4: "host", 7: "to_device"}
    assert found.busy_seconds == {"to_host": 1.0, "host": 4.0, "to_device": 2.0}
    assert [(e.name, e.start, e.seconds) for e in found.events if e.queue == "host"] == [
        ("wait to_host_g_host", 0.0, 2.0),
        ("update", 2.0, 4.0),
    ]
    assert sum(e.seconds for e in found.events if e.queue == COMPUTE) == found.step_seconds


def test_what_holds_the_thread_is_what_the_device_waits_for() -> None:
    found = timed(update_on_host(), {**TIMES, "other": 0.5, "to_host_g_host": 3.0})
    # out of work at 1.5: until 4 for the gradient, until 8 for the update
    assert found.exposed == {3: 2.5, 4: 4.0, 7: 2.0}


def test_a_copy_that_the_device_alone_waits_for_holds_no_thread() -> None:
    """What the host computes next begins at once; the device waits as it would have."""
    out, arrived = move("to_host", "g", "g_host", "device", "host")
    for host in (True, False):
        ops = [call("rates", "x", "h", "host"), call("backward", "x", "g"), out, arrived.saying(host=host)]
        found = timed([*ops, call("update", "h", "p", "host"), call("last", "x", "q")], TIMES)
        begins = 2.0 if host else 0.0
        assert [e.start for e in found.events if e.name == "update"] == [begins]
        assert found.step_seconds == begins + 4.0 + 1.0 and found.compute_seconds == 2.0


def test_on_a_cpu_the_host_is_the_thread_that_computes() -> None:
    found = timed(update_on_host(), TIMES, asynchronous=False)
    assert (found.step_seconds, found.compute_seconds) == (13.0, 10.0) and "host" not in found.busy_seconds


@pytest.mark.parametrize("update", [0.5, 4.0])
def test_a_loop_with_functions_on_the_host_is_exact(update: float) -> None:
    times = {**TIMES, "update": update}
    one = timed([Instruction("loop", attrs=LoopAttrs(count=40), body=tuple(update_on_host()))], times)
    other = timed(update_on_host() * 40, times)
    for field in ("step_seconds", "compute_seconds", "exposed_seconds"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), rel=1e-9)
    assert one.num_transfers == other.num_transfers and len(one.events) < len(other.events)


def test_reads_and_writes_share_the_disk_and_overlap_even_on_a_cpu() -> None:
    read, arrived = move("disk_read", "x", "a", "disk", "host")
    write = Instruction(
        "copy_start", ("x", "b"), handle("w"), attrs=CopyAttrs(source="host", target="disk"), writes=("x",)
    )
    ops = [call("work", "x", "b"), write, read, call("work", "x", "c"), arrived, Instruction("wait", ("w",))]
    found = timed(ops, {"work": 2.0, "w": 3.0, "disk_read_a": 1.0}, asynchronous=False)
    assert [(e.name, e.start) for e in found.events if e.queue == "disk"] == [("w", 2.0), ("disk_read_a", 5.0)]
    assert found.exposed == {4: 2.0, 5: 0.0} and found.step_seconds == 6.0


# --- what lines cost ---


def test_a_disk_is_read_and_written_at_its_own_rates() -> None:
    device = replace(KNOWN["h100"], disk_read=Link(0.0, 1e9), disk_write=Link(0.0, 4e8), disk_mixed=0.0)
    program = lowered(fz.offload("nvme", ("opt_state", "params"), path="/scratch"), device="h100").program
    starts = [op for op, _ in program.walk() if "disk" in op.tiers]
    assert {op.tiers for op in starts} == {("disk", "host"), ("host", "disk")}
    for op in starts:
        nbytes = cost.transfer_bytes(op, program.values_by_name, program.mesh)
        rate = 1e9 if op.tiers == ("disk", "host") else 4e8
        assert nbytes > 0 and cost.transfer_seconds(op, program, device) == pytest.approx(nbytes / rate)


def test_a_disk_that_is_slower_when_read_and_written_at_once_is_taken_at_that() -> None:
    device = replace(KNOWN["h100"], disk_read=Link(0.0, 1e9), disk_write=Link(0.0, 1e9), disk_mixed=5e8)
    both = lowered(fz.offload("nvme", path="/scratch"), device="h100").program
    assert cost.as_used(device, both).disk_read.bandwidth == pytest.approx(5e8)
    assert cost.as_used(replace(device, disk_mixed=2e9), both).disk_write.bandwidth == 1e9  # never faster than alone
    assert cost.as_used(device, lowered(device="h100").program) == device
    busy = [plan(both, replace(device, disk_mixed=mixed)).channels["disk"].busy_seconds for mixed in (0.0, 5e8)]
    assert busy[1] == pytest.approx(2 * busy[0])


def test_functions_on_the_host_are_bound_by_its_memory() -> None:
    program = lowered(fz.offload("cpu", update_on="host"), device="h100").program
    updates = [op for op, _ in program.walk() if op.on_host]
    assert updates and all(cost.on_host(op, program) for op in updates)
    fast, slow = (replace(KNOWN["h100"], host_memory_bandwidth=rate, call_seconds=0.0) for rate in (2e11, 1e11))
    for op in updates:
        seconds = cost.seconds(op, program, slow)
        assert (
            seconds
            == pytest.approx(cost.host_bytes(op, program) / 1e11)
            == pytest.approx(2 * cost.seconds(op, program, fast))
        )
    # one memory: the device's rates
    here = lowered(fz.offload("cpu", update_on="host"), mesh=fz.AbstractMesh(data=1)).program
    assert not any(cost.on_host(op, here) for op, _ in here.walk())


# --- plans of real steps ---


def state_bytes(found: fz.Lowered, role: str, size: Any = lambda n: n) -> int:
    return sum(
        size(leaf.numel * leaf.dtype.itemsize)
        for leaf in found.program.leaves.values()
        if leaf.role == role and leaf.shape
    )


def test_each_tier_has_its_bytes() -> None:
    plain = lowered(device="h100")
    found = lowered(fz.offload("cpu", "opt_state"), fz.offload("nvme", "params", path="/scratch"), device="h100")
    params, opt_state = state_bytes(plain, "params"), state_bytes(plain, "opt_state")
    assert found.plan.host_persistent_bytes == opt_state
    assert found.plan.disk_bytes == state_bytes(found, "params", padded) > params
    assert found.plan.persistent_bytes == plain.plan.persistent_bytes - params - opt_state
    assert found.plan.host_peak_bytes == max(s.host for s in found.plan.memory) > found.plan.host_persistent_bytes
    assert plain.plan.host_peak_bytes == plain.plan.host_persistent_bytes == plain.plan.disk_bytes == 0


def test_on_one_memory_the_hosts_bytes_are_the_devices() -> None:
    mesh = fz.AbstractMesh(data=1)
    found, plain = lowered(fz.offload("cpu"), mesh=mesh).plan, lowered(mesh=mesh).plan
    assert (
        found.host_peak_bytes == found.host_persistent_bytes == 0 and found.persistent_bytes == plain.persistent_bytes
    )
    assert "tiers" not in str(plain)


def test_bytes_over_the_link_are_the_closed_form() -> None:
    """An update on the host: gradients and the parameters that they change out, these back in, 4 bytes each; one on the
    device: its state both ways."""
    params = state_bytes(lowered(device="h100"), "params")
    host, device = (
        lowered(fz.offload("cpu", update_on=side), device="h100").plan.channels for side in ("host", "device")
    )
    assert host["to_host"].bytes == pytest.approx(2 * params, abs=100) and host["to_device"].bytes == pytest.approx(
        params, abs=100
    )
    assert (
        device["to_host"].bytes
        == pytest.approx(2 * params, abs=100)
        == pytest.approx(device["to_device"].bytes, abs=200)
    )
    assert host["host"].bytes >= 28 * params / 4 and "host" not in device


def test_a_host_that_only_takes_shards_of_parameters_does_no_work() -> None:
    offload = fz.offload("nvme", ("opt_state", "params"), path="/scratch", update_on="device")
    found = lowered(fz.shard_grads(), offload, mesh=fz.AbstractMesh(data=2, unified_memory=False), device="h100")
    assert any(op.op == "take_shard" for op in found.program.instructions)
    assert {"disk", "to_device", "to_host"} <= {*found.plan.channels} and "host" not in found.plan.channels


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_parts_of_a_step_with_tiers_add_up(device: str) -> None:
    found = lowered(
        fz.offload("cpu", ("opt_state", "activations")),
        fz.offload("nvme", "params", path="/scratch"),
        fz.accumulate(3),
        device=device,
    ).plan
    assert found.step_seconds == pytest.approx(found.compute_seconds + found.exposed_seconds)
    assert (
        found.exposed_seconds
        == pytest.approx(sum(c.exposed_seconds for c in found.channels.values()))
        == pytest.approx(sum(w.seconds for w in found.waits))
    )
    assert {"to_host", "to_device", "disk"} <= set(found.channels)


def test_the_busiest_queue_bounds_the_step() -> None:
    step = lowered(fz.offload("nvme", path="/scratch", update_on="host"), device="h100")
    found = step.plan
    assert found.bound_by == "disk" == next(iter(found.busy)) and list(found.busy.values()) == sorted(
        found.busy.values(), reverse=True
    )
    assert (
        found.busy["disk"] == pytest.approx(found.channels["disk"].busy_seconds / found.step_seconds)
        and found.busy["disk"] <= 1
    )
    quick = replace(KNOWN["h100"], disk_read=Link(0.0, 1e15), disk_write=Link(0.0, 1e15), host_memory_bandwidth=1e6)
    assert step.plan_on(quick).bound_by == "host"


def test_it_prints_and_writes_the_tiers(tmp_path) -> None:
    found = lowered(
        fz.offload("cpu", update_on="host"), fz.offload("nvme", "params", path="/scratch"), device="h100"
    ).plan
    text = str(found)
    assert (
        "\nmemory tiers\n" in text
        and "scratch files" in text
        and f"│ bound by          │ {found.bound_by:>9} │" in text
    )
    assert (
        all(f"│ {name} " in text for name in ("to_host", "to_device", "disk", "host"))
        and max(map(len, text.splitlines())) <= 120
    )
    data = json.loads(found.to_json())
    assert data["channels"]["disk"]["bandwidth"] == found.channels["disk"].bytes / found.channels["disk"].busy_seconds
    assert data["host_memory"] == [s.host for s in found.memory] and len(data["host_memory"]) == len(data["memory"])
    found.save_picture(tmp_path / "memory.svg")
    assert "host memory" in (tmp_path / "memory.svg").read_text()
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert threads == {COMPUTE, "to_host", "to_device", "disk", "host"}


def test_temporaries_of_the_host_are_not_the_devices() -> None:
    """A device with room for what it computes is not charged with what the host's functions keep between operations."""
    program = lowered(fz.offload("cpu", update_on="host"), device="h100").program
    large = {name: 10**9 * (f.on == "host") for name, f in program.functions.items()}
    from fzero.plan.memory import memory_of

    samples = memory_of(program, lambda f: large[f.name])
    assert max(s.total for s in samples) < 10**9 <= max(s.host for s in samples)
    assert any(op.tiers for op, _ in program.walk())


# --- which side updates ---


def side_of(found: fz.Lowered) -> str:
    return "host" if any(op.op == "call" and op.on_host for op, _ in found.program.walk()) else "device"


SLOW_HOST = replace(KNOWN["h100"], host_memory_bandwidth=1e8)
SLOW_LINK = replace(KNOWN["h100"], host_copy=Link(0.0, 1e7))


@pytest.mark.full(keep=["device1-host-None"])
@pytest.mark.parametrize("budget", [None, "1GB"])
@pytest.mark.parametrize(("device", "side"), [(SLOW_HOST, "device"), (SLOW_LINK, "host")])
def test_the_update_runs_on_the_side_that_is_predicted_to_be_faster(device, side, budget) -> None:
    found = lowered(fz.offload("cpu"), fz.mixed_precision("bf16"), device=device, memory_budget=budget)
    other = lowered(
        fz.offload("cpu", update_on="device" if side == "host" else "host"),
        fz.mixed_precision("bf16"),
        device=device,
        memory_budget=budget,
    )
    assert side_of(found) == side != side_of(other) and found.plan.step_seconds < other.plan.step_seconds
    (decision,) = (d for d in found.plan.decisions if d.what == "update_on")
    assert (
        re.fullmatch(rf"all \d+ blocks on the {side}", decision.chosen)
        and f"all on the {'device' if side == 'host' else 'host'} takes" in decision.why
    )
    assert not [d for d in other.plan.decisions if d.what == "update_on"]


@pytest.mark.full
@pytest.mark.parametrize("budget", [None, "1GB"])
@pytest.mark.parametrize("optimizer", ["adamw", "clipped"])
def test_both_sides_update_where_host_and_link_would_take_as_long(optimizer, budget) -> None:
    """About 30 bytes a parameter through host memory, or 12 over the link each way: at these rates either takes as
    long, and compute nothing."""
    device = replace(KNOWN["h100"], host_memory_bandwidth=2.8e8, host_copy=Link(0.0, 1.2e8), call_seconds=0.0)
    make = functools.partial(
        lowered, fz.mixed_precision("bf16"), device=device, layers=8, optimizer=optimizer, memory_budget=budget
    )
    found, host, device_ = (
        make(fz.offload("cpu")),
        make(fz.offload("cpu", update_on="host")),
        make(fz.offload("cpu", update_on="device")),
    )
    num, total = blocks_updated_on_host(found.program)
    assert (
        blocks_updated_on_host(host.program) == (total, total)
        and blocks_updated_on_host(device_.program) == (0, total)
        and 0 < num < total
    )
    assert found.plan.step_seconds < 0.92 * min(host.plan.step_seconds, device_.plan.step_seconds)
    (decision,) = (d for d in found.plan.decisions if d.what == "update_on")
    assert (
        decision.chosen == f"{num} of {total} blocks on the host"
        and "all on the host takes" in decision.why
        and "all on the device takes" in decision.why
    )


def test_of_predictions_that_are_the_same_the_host_has_it_all() -> None:
    free = replace(KNOWN["h100"], host_memory_bandwidth=1e18, host_copy=Link(0.0, 1e18), call_seconds=0.0)
    found = lowered(fz.offload("cpu"), fz.mixed_precision("bf16"), device=free)
    assert found.options.host_share == 1.0 and side_of(found) == "host"


def test_a_side_that_does_not_fit_is_not_taken() -> None:
    host, device = (
        lowered(fz.offload("cpu", update_on=side), device=SLOW_HOST).plan.peak_bytes for side in ("host", "device")
    )
    assert host < device
    found = lowered(fz.offload("cpu"), device=SLOW_HOST, memory_budget=host)
    assert side_of(found) == "host" and found.plan.peak_bytes <= host
    (decision,) = (d for d in found.plan.decisions if d.what == "update_on")
    assert decision.chosen.endswith("blocks on the host") and "all on the device would not fit" in decision.why


def test_on_one_memory_no_side_is_chosen() -> None:
    found = lowered(fz.offload("cpu"), mesh=fz.AbstractMesh(data=1), device="cpu")
    assert not found.plan.decisions and found.options.host_share == 1.0


# --- budgets of the host and of the disk ---


def test_under_a_host_budget_alone_a_side_is_taken_that_fits() -> None:
    """The fastest would not: what is updated on the host has its gradients there."""
    device = replace(KNOWN["h100"], host_memory_bandwidth=2.8e8, host_copy=Link(0.0, 1.2e8), call_seconds=0.0)
    make = functools.partial(lowered, fz.mixed_precision("bf16"), device=device, layers=8)
    free, least = make(fz.offload("cpu")).plan, make(fz.offload("cpu", update_on="device")).plan.host_peak_bytes
    found = make(fz.offload("cpu"), host_budget=least).plan
    assert found.host_peak_bytes <= least < free.host_peak_bytes
    assert "all on the host would not fit" in {d.what: d.why for d in found.decisions}["update_on"]


@pytest.mark.full
def test_a_budget_of_each_tier_is_kept_or_refused() -> None:
    transforms = fz.offload("cpu", "opt_state"), fz.offload("nvme", "params", path="/scratch")
    need = lowered(*transforms, device="h100").plan
    for more in ({}, {"memory_budget": need.peak_bytes}):
        assert (
            lowered(
                *transforms, device="h100", host_budget=need.host_peak_bytes, disk_budget=need.disk_bytes, **more
            ).plan.disk_bytes
            == need.disk_bytes
        )
        with pytest.raises(errors.BudgetError) as caught:
            lowered(
                *transforms,
                device="h100",
                host_budget=need.host_peak_bytes // 2,
                disk_budget=need.disk_bytes - 1,
                **more,
            )
        assert (
            "of host memory" in str(caught.value)
            and "on disk, 1 B more than" in str(caught.value)
            and "there:" not in str(caught.value)
        )


# --- auto ---


def off(found: fz.Lowered) -> list[str]:
    return [str(t) for t in found.program.transforms if isinstance(t, Offload)]


@functools.cache
def plain_peak() -> int:
    return lowered(device="h100").plan.peak_bytes


def auto(share: float, path: str | None = None, **kwargs: Any) -> fz.Lowered:
    return lowered(fz.offload("auto", path=path), device="h100", memory_budget=int(share * plain_peak()), **kwargs)


def test_what_fits_is_left_where_it_is() -> None:
    found = auto(1.0)
    assert not off(found) and source(found.program) == source(lowered(device="h100").program)
    assert found.plan.decisions[0] == ("offload", "nothing", "the step fits unchanged")


@pytest.mark.full
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_auto_comes_to_a_step_that_one_could_have_written(share) -> None:
    found = auto(share)
    assert off(found) and found.plan.peak_bytes <= share * plain_peak()
    decision = found.plan.decisions[0]
    assert (
        decision.what == "offload"
        and "on the host" in decision.chosen
        and "predicted, the fastest that fits" in decision.why
        and "copies" not in decision.why
    )
    # no two for one role here
    again = lowered(
        *(t for t in found.program.transforms if isinstance(t, Offload)),
        device="h100",
        memory_budget=int(share * plain_peak()),
    )
    assert source(again.program) == source(found.program) and again.plan.step_seconds == found.plan.step_seconds


@pytest.mark.full
def test_of_what_fits_auto_takes_the_fastest() -> None:
    """Of leaves that are large enough for their bytes to matter, not the number of transfers."""
    make = functools.partial(lowered, device="h100", width=512)
    budget = int(0.8 * make().plan.peak_bytes)
    found, both, compared = make(fz.offload("auto", path="/scratch"), memory_budget=budget), ("opt_state", "params"), 0
    for other in (
        fz.offload("cpu"),
        fz.offload("cpu", both),
        fz.offload("nvme", path="/scratch"),
        fz.offload("nvme", both, path="/scratch"),
    ):
        with contextlib.suppress(errors.BudgetError):
            assert found.plan.step_seconds <= make(other, memory_budget=budget).plan.step_seconds * 1.001, str(other)
            compared += 1
    assert compared


@pytest.mark.full
def test_a_role_is_split_over_host_and_disk_where_the_host_has_no_room_for_all() -> None:
    make = functools.partial(lowered, device="h100", width=64, layers=12)
    step, budget = (
        fz.offload("auto", "opt_state", path="/scratch", update_on="host"),
        int(0.85 * make().plan.peak_bytes),
    )
    whole = make(step, memory_budget=budget)
    assert whole.plan.disk_bytes == 0 < whole.plan.host_persistent_bytes
    room = int(0.95 * make(fz.offload("cpu", fraction=0.375, update_on="host")).plan.host_peak_bytes)
    split = make(step, memory_budget=budget, host_budget=room)
    assert (
        split.plan.disk_bytes > 0 < split.plan.host_persistent_bytes
        and split.plan.host_peak_bytes <= room
        and split.plan.peak_bytes <= budget
    )
    assert (
        "opt_state on the host and" in split.plan.decisions[0].chosen
        and split.plan.step_seconds > whole.plan.step_seconds
    )


def test_no_two_placements_are_the_same() -> None:
    budget, record = Budget(1, KNOWN["h100"], host=1), Offload("auto", ROLES, ("/scratch",))
    placements = _Tiers(lambda _: None, Options(), Options(), record, budget, False, print)._placements()  # type: ignore[arg-type]
    records = [tuple(placement.records(record)) for placement in placements]
    assert len(records) > 100 and len({*records}) == len(records) and all(records)
    assert {r.of for r in records[-1]} == {("opt_state", "params"), ("activations",), ("gradients",)}


def test_the_second_of_two_records_takes_its_share_of_the_rest() -> None:
    params = [Leaf(f"params[{i}]", "params", (100,), Layout(F32)) for i in range(8)]
    tiers = tiers_of(
        [Offload("cpu", ("opt_state",), fraction=0.5), Offload("nvme", ("opt_state",), ("/scratch",), fraction=0.5)],
        params,
    )
    assert [t.opt_state for t in tiers].count("host") == 4 and [t.opt_state for t in tiers].count("disk") == 2


def test_only_the_named_roles_are_moved() -> None:
    found = lowered(fz.offload("auto", "opt_state"), device="h100", memory_budget=int(0.85 * plain_peak()))
    assert all(t.of == ("opt_state",) for t in found.program.transforms if isinstance(t, Offload)) and off(found)


@pytest.mark.full
def test_auto_leaves_the_gradients_of_a_loop_off_the_disk() -> None:
    """A loop over micro-batches rejects gradients on disk, so they are no candidate there."""
    budget = int(0.7 * plain_peak())
    found = lowered(
        fz.accumulate(2), fz.offload("auto", path="/scratch"), device="h100", memory_budget=budget, host_budget="1MB"
    )
    roles = {role for record in found.program.transforms if isinstance(record, Offload) for role in record.of}
    assert roles and "gradients" not in roles and found.plan.peak_bytes <= budget


def test_on_one_memory_auto_goes_to_disk_alone() -> None:
    mesh = fz.AbstractMesh(data=1)
    budget = int(0.8 * lowered(mesh=mesh, device="cpu").plan.peak_bytes)
    found = lowered(fz.offload("auto", path="/scratch"), mesh=mesh, device="cpu", memory_budget=budget)
    assert (
        found.plan.peak_bytes <= budget and found.plan.disk_bytes > 0 and all("'nvme'" in text for text in off(found))
    )
    with pytest.raises(errors.BudgetError) as caught:
        lowered(fz.offload("auto"), mesh=mesh, device="cpu", memory_budget=budget)
    assert 'fz.offload("auto", path=DIR)' in str(caught.value)


def test_what_nothing_makes_fit_says_what_the_least_takes_of_each_tier() -> None:
    with pytest.raises(errors.BudgetError) as caught:
        auto(0.05, "/scratch", host_budget="1000B", disk_budget=2000)
    lines = str(caught.value).splitlines()
    assert lines[0] == "fzero.offload: nothing that 'auto' can move makes the step fit" and lines[-1].startswith(
        "Fix: raise a budget"
    )
    assert [i for i, line in enumerate(lines) if line.startswith("    there: ")] == [2], (
        "what fills the device, of the closest"
    )
    assert any(" of 1000 B" in line and " of 2.0 KiB" in line and "device " in line for line in lines)


def test_auto_needs_budgets_a_path_and_a_batch() -> None:
    with pytest.raises(errors.FzeroValueError, match="memory_budget: the memory that the device may use"):
        lowered(fz.offload("auto"), device="h100")
    with pytest.raises(errors.FzeroValueError, match="disk_budget of 7 B, and no path"):
        lowered(fz.offload("auto"), device="h100", memory_budget="1B", disk_budget="7B")
    step = fz.offload(fz.train_step(models.gpt_loss, optim.sgd(0.1)), "auto")
    with pytest.raises(errors.FzeroValueError, match="batch: where the state is stored is decided before"):
        fz.compile(step, fz.make_mesh(data=1), memory_budget="1GB")
    with pytest.raises(errors.FzeroValueError, match="'auto' chooses it"):
        fz.offload("auto", fraction=0.5)
    for other in (fz.offload("cpu", "params"), fz.offload("auto", "params")):
        with pytest.raises(errors.TransformError):
            fz.compose(fz.offload("auto", ("opt_state", "params")), other)(
                fz.train_step(models.gpt_loss, optim.sgd(0.1))
            )
    fz.compose(fz.offload("auto", "opt_state"), fz.offload("cpu", "params"))(
        fz.train_step(models.gpt_loss, optim.sgd(0.1))
    )


def trained(step: fz.Step, mesh: fz.Mesh, path: Any = None, **kwargs: Any) -> tuple[Any, list[float]]:
    train = fz.compile(step, mesh, backend="eager", **kwargs)
    state, losses = train.init(models.gpt_init), []
    for batch in batches(3):
        state, metrics = train(state, batch)
        losses.append(float(metrics["loss"]))
    if path is not None:
        fz.checkpoint.save(path, state)
    return train, losses


@pytest.mark.full
def test_auto_trains_as_the_plain_step_and_restores(tmp_path) -> None:
    mesh, scratch = fz.make_mesh(data=1, unified_memory=False), tmp_path / "scratch"
    scratch.mkdir()
    step = fz.train_step(models.gpt_loss, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3)))
    plain, losses = trained(step, mesh)
    asked, example = fz.offload("auto", path=scratch)(step), fz.tree.map(lambda x: x.to("meta"), batches(1)[0])
    limits = {
        "memory_budget": int(0.8 * plain.plan.peak_bytes),
        "host_budget": plain.plan.peak_bytes // 4,
        "batch": example,
    }
    train, found = trained(asked, mesh, tmp_path / "saved", **limits)
    assert found == losses
    assert train.plan.peak_bytes <= limits["memory_budget"] and train.plan.host_peak_bytes <= limits["host_budget"]
    assert train.plan.decisions[0].what == "offload" and not any(
        t.tier == "auto" for t in train.resolved.transforms if isinstance(t, Offload)
    )
    again = fz.compile(asked, mesh, backend="eager", **limits)
    state, metrics = again(again.restore(tmp_path / "saved"), batches(4)[3])
    assert (
        again.resolved == train.resolved
        and train.step == again.step == asked
        and int(state.step) == 4
        and torch.isfinite(metrics["loss"])
    )
    evaluate = fz.compile(fz.compose(*train.resolved.transforms)(fz.eval_step(models.gpt_loss)), mesh, backend="eager")
    assert torch.isfinite(evaluate(state.params, batches(1)[0]))
    with pytest.raises(errors.TransformError, match=r"train\.resolved\.transforms"):
        fz.compile(fz.offload("auto")(fz.eval_step(models.gpt_loss)), mesh, backend="eager")(
            state.params, batches(1)[0]
        )
