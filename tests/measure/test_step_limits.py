"""What binds a step: the metrics of one with leaves off the device, and what they are made of."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero.measure.roofline import OBSERVED, Limits, report
from fzero.plan.plan import Plan
from fzero.runtime import execute
from fzero.runtime.observe import observed

D, LAYERS = 32, 3
P = LAYERS * 8 * D * D  # parameters
KEYS = {"loss", "grad_norm", "finite", "speed_of_light", "links", "bound_by"}


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params, x):
    for p in params:
        x = layer(p, x)
    return x.square().mean()


def init(key):
    keys = fz.random.split(key, 2 * LAYERS)
    return [
        {"up": fz.random.normal(a, (D, 4 * D)) * 0.1, "down": fz.random.normal(b, (4 * D, D)) * 0.1}
        for a, b in zip(keys[::2], keys[1::2], strict=True)
    ]


def trained(mesh: fz.Mesh, *transforms: Any, steps: int = 1) -> tuple[list[dict[str, Any]], Plan]:
    """The metrics of some steps, and the plan."""
    step = fz.train_step(loss_fn, optim.adamw(1e-3))
    train = fz.compile(fz.compose(*transforms)(step) if transforms else step, mesh, backend="eager")
    state, found = train.init(init), []
    for _ in range(steps):
        state, metrics = train(state, torch.ones(8, D))
        found.append(metrics)
    return found, train.plan


def test_a_step_on_the_device_has_the_metrics_it_had():
    (metrics,), _ = trained(fz.make_mesh(data=1))
    assert set(metrics) == {"loss", "grad_norm", "finite"}


def test_metrics_of_a_step_over_disk(tmp_path):
    (metrics,), plan = trained(fz.make_mesh(data=1), fz.offload("nvme", "opt_state", path=tmp_path))
    assert set(metrics) == KEYS
    disk = metrics["links"]["disk"]
    assert disk["bytes"] == 16 * P, "two moments of four bytes, read and written"
    assert {name: link["bytes"] for name, link in metrics["links"].items()} == {
        name: link.bytes for name, link in plan.channels.items()
    }
    assert 0 < disk["busy"] <= 1 and 0 < disk["stalled"] < 1 and disk["bytes_per_second"] > disk["bytes"], (
        "it took less than a second"
    )
    assert 0 < metrics["speed_of_light"] < 1
    logged = {k: metrics[k] for k in ("speed_of_light", "links", "bound_by")}
    assert json.loads(json.dumps(logged, allow_nan=False)) == logged


def test_copies_between_two_memories():
    (metrics,), plan = trained(fz.make_mesh(data=1, unified_memory=False), fz.offload("cpu", "opt_state"))
    assert metrics["links"]["to_device"]["bytes"] == 4 * P, "the new parameters"
    assert metrics["links"]["to_host"]["bytes"] == plan.channels["to_host"].bytes >= 8 * P, "gradients and the old ones"
    assert all(0 < link["stalled"] < 1 for link in metrics["links"].values())
    host = metrics["links"]["host"]
    assert host["bytes"] >= 28 * P and 0 < host["busy"] <= host["stalled"], "the update, which compute waits for"


def test_a_slow_update_on_the_host_is_what_binds(monkeypatch):
    on_host = execute._on_host

    def slowly(run: Any, *given: Any) -> Any:
        return on_host(lambda *args, **kwargs: (time.sleep(0.1), run(*args, **kwargs))[1], *given)

    monkeypatch.setattr(execute, "_on_host", slowly)
    found, _ = trained(fz.make_mesh(data=1, unified_memory=False), fz.offload("cpu", "opt_state"), steps=3)
    assert "host" in {m["bound_by"] for m in found}


def test_copies_within_one_memory_move_nothing():
    (metrics,), _ = trained(fz.make_mesh(data=1), fz.offload("cpu", "opt_state"))
    assert {name: (link["bytes"], link["bytes_per_second"]) for name, link in metrics["links"].items()} == {
        "to_host": (0, 0.0),
        "to_device": (0, 0.0),
    }


def test_a_slow_disk_is_what_binds(tmp_path, monkeypatch):
    transforms = fz.offload("nvme", ("opt_state", "params"), path=tmp_path)
    as_it_is, _ = trained(fz.make_mesh(data=1), transforms, steps=3)
    read = os.preadv

    def slowly(*args: Any) -> int:
        time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr(os, "preadv", slowly)
    slowed, _ = trained(fz.make_mesh(data=1), transforms, steps=3)
    stalled = [[m["links"]["disk"]["stalled"] for m in found] for found in (as_it_is, slowed)]
    assert max(stalled[1]) > min(stalled[0])
    assert max(m["links"]["disk"]["bytes_per_second"] for m in slowed) < max(
        m["links"]["disk"]["bytes_per_second"] for m in as_it_is
    )
    assert "disk" in {m["bound_by"] for m in slowed}


def sharded(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    (metrics,), plan = trained(
        fz.make_mesh(data=2), fz.shard_params(), fz.offload("nvme", ("opt_state", "params"), path=path)
    )
    return metrics["links"], {name: channel.bytes for name, channel in plan.channels.items()}


def test_collectives_are_links_too(run_ranks, tmp_path):
    for links, planned in run_ranks(2, sharded, tmp_path):
        assert {name: link["bytes"] for name, link in links.items()} == planned
        assert {"disk", "gather:data", "reduce:data"} <= set(links)
        for name in ("gather:data", "reduce:data"):
            assert links[name]["busy"] == links[name]["stalled"] > 0, "a copy by the one who waits"


def test_profile_times_the_same_lines(tmp_path):
    step = fz.offload("nvme", "opt_state", path=tmp_path)(fz.train_step(loss_fn, optim.adamw(1e-3)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    _, events = train.profile(train.init(init), torch.ones(8, D), steps=1)
    assert {e.queue for e in events} == {"compute", "disk", "to_host", "to_device"}


def test_what_binds_has_the_largest_share():
    def bound(busy: dict[str, float], stalled: dict[str, float]) -> str:
        return report(1.0, 10.0, {"disk": 1, "to_host": 1}, busy, stalled)["bound_by"]

    assert bound({}, {}) == "compute"
    assert bound({"disk": 7.0, "to_host": 9.0}, {"disk": 2.0}) == "to_host", (
        "compute had 8 of 10 s, and to_host was busy for 9"
    )
    assert bound({"disk": 7.0}, {"disk": 2.0}) == "compute"
    assert bound({"disk": 8.0}, {"disk": 2.0}) == "compute", "as much as compute is not more"
    assert bound({"to_host": 6.0}, {"disk": 3.0, "to_host": 3.0}) == "to_host"


class LateClock:
    """Moments are numbers; those up to `now` have come."""

    def __init__(self) -> None:
        self.next, self.now, self.waited = 0, 0, []

    def mark(self) -> int:
        self.next += 1
        return self.next

    def done(self, mark: int) -> bool:
        return mark <= self.now

    def wait(self, mark: int) -> None:
        self.waited.append(mark)
        self.now = mark

    def seconds(self, begin: int, end: int) -> float:
        return float(end - begin)


@pytest.fixture
def limits() -> Limits:
    step = fz.offload("cpu", "opt_state")(fz.train_step(loss_fn, optim.adamw(1e-3)))
    mesh = fz.make_mesh(data=1, unified_memory=False)
    return Limits(fz.lower(step, mesh, init, torch.ones(8, D)).program, mesh, LateClock())


def test_on_a_device_with_a_queue_only_the_first_step_is_waited_for(limits):
    clock: Any = limits._clock
    namespace = observed(dict.fromkeys(OBSERVED, lambda *args, **kwargs: args[0]), limits.before, limits.after)

    def run(waits: int) -> None:
        limits.begin()
        for _ in range(waits):
            assert namespace["wait"](namespace["to_host_start"]("values")) == "values"
        limits.end()

    def stalled() -> float:
        return limits.metrics["links"]["to_host"]["stalled"]

    run(1)
    assert stalled() == 1 / 3 and clock.waited == [4], "begin 1, wait 2 to 3, end 4"
    run(2)
    assert stalled() == 1 / 3, "still the first: the second has not come to its end"
    clock.now = clock.next
    run(3)
    assert stalled() == 2 / 5, "the second: the third has not"
    clock.now = clock.next + 8
    run(3)
    assert stalled() == 3 / 7, "the fourth, as was the third"
    assert clock.waited == [4] and not limits._running
