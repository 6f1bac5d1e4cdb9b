"""Seven billion parameters on one GPU of 24 GB, clipped and accumulated: planned by `offload("auto")`; by default a
model of fewer layers in less memory."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero import optim
from fzero._utils.progress import Progress
from fzero._utils.units import size
from fzero.compiler.cost_bounds import Sizes, TierPlacement, speculative_shares
from fzero.errors import BudgetError
from fzero.plan.device_lookup import KNOWN, Link

GPU = fz.AbstractMesh(data=1, device_type="cuda")
DEVICE = replace(
    KNOWN["a100"],
    memory_bytes=24 * 10**9,
    host_copy=Link(1e-5, 25e9),
    host_memory_bandwidth=60e9,
    disk_read=Link(1e-4, 6.5e9),
    disk_write=Link(1e-4, 4.5e9),
)
SMALL = {"memory_budget": "8GB", "host_budget": "6GB", "disk_budget": "20GB"}
SHALLOW = {"micro_batches": 2, "layers": 2, "schedule": "sequential"}


@pytest.fixture(scope="module")
def llama() -> Any:
    spec = importlib.util.spec_from_file_location(
        "plan_llama", Path(__file__).parents[2] / "examples" / "plan_llama.py"
    )
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def planned(llama: Any, budgets: dict[str, str], **how: Any) -> fz.Plan:
    step, params, batch = llama.headline(**how)
    return fz.lower(step, GPU, params, batch, device=DEVICE, **budgets).plan


@pytest.mark.full
def test_a_model_whose_gradients_the_device_has_no_room_for(llama: Any) -> None:
    found = planned(llama, SMALL, **SHALLOW)
    assert found.peak_bytes <= 8e9 and found.host_peak_bytes <= 6e9 and found.disk_bytes <= 20e9
    grads = 4 * sum(x.numel() for x in fz.tree.leaves(llama.headline(layers=2)[1]))
    assert found.host_breakdown["gradients"] > 0.8 * grads and found.breakdown["gradients"] < 0.6 * grads
    assert json.loads(found.to_json())["host_breakdown"] == found.host_breakdown
    assert f"gradients {size(found.host_breakdown['gradients'])}" in str(found)


@fz.block
def dense(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = dense(p, x)
    return x.square().mean()


@pytest.mark.full
def test_a_model_whose_gradients_the_host_has_no_room_for_either() -> None:
    """They wait on disk, which is said, and is all that helps. Of 16 layers with 4 MB each of parameters, and of
    gradients."""
    params = [{"w": torch.empty(1024, 1024, device="meta")} for _ in range(16)]
    clipped = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4)))

    def lowered(*of: str) -> Any:
        transforms = (
            fz.offload("auto", of, path="/s"),
            fz.mixed_precision("bf16"),
            fz.remat("full"),
            fz.accumulate(2, schedule="layerwise"),
        )
        batch = torch.empty(64, 1024, device="meta")
        return fz.lower(
            fz.compose(*transforms)(clipped),
            GPU,
            params,
            batch,
            device=DEVICE,
            memory_budget="48MB",
            host_budget="84MB",
        ).plan

    found = lowered("opt_state", "params", "activations", "gradients")
    assert found.peak_bytes <= 48e6 and found.host_peak_bytes <= 84e6
    assert found.decisions[0].what == "offload" and found.decisions[0].chosen.endswith("gradients on disk")
    assert "params" in found.decisions[0].chosen and "the others stay on the device" in found.decisions[0].why
    assert found.host_breakdown["gradients"] < 32e6 and found.disk_bytes > 64e6
    with pytest.raises(BudgetError, match="makes the step fit") as caught:
        lowered("opt_state", "params", "activations")
    fix = str(caught.value).splitlines()[-1]
    assert "    on the host: gradients " in str(caught.value), "what fills it most, first"
    assert 'gradients among what "auto" may move' in fix and 'reduce="bf16"' in fix
    assert "remat" not in fix and "layerwise" not in fix, "which the step has"


@pytest.mark.exhaustive
def test_seven_billion_parameters_beside_a_small_host(llama: Any) -> None:
    found = planned(llama, {"memory_budget": "22GB", "host_budget": "30GB", "disk_budget": "500GB"})
    assert found.peak_bytes <= 22e9 and found.host_peak_bytes <= 30e9
    assert "gradients on disk" in found.decisions[0].chosen and found.host_breakdown["gradients"] < 4e9


@pytest.mark.full
def test_seven_billion_parameters(llama: Any) -> None:
    """All micro-batches pass through a block before the next: what their gradients come to leaves for the host, and the
    disk is hidden behind the backward."""
    found = planned(llama, {"memory_budget": "22GB", "host_budget": "58GB", "disk_budget": "500GB"})
    assert found.peak_bytes <= 22e9 and found.host_peak_bytes <= 58e9
    assert found.host_breakdown["gradients"] > 12e9
    assert found.exposed_seconds < found.channels["disk"].busy_seconds / 2


def test_bounds_are_what_bytes_and_rates_say() -> None:
    """Of 10 bytes of state, 4 of parameters with copies of 2, on devices that move 1 byte a second each way."""
    sizes = Sizes(
        resting=1,
        state=10,
        params=4,
        copies=2,
        grads=4,
        activations=3,
        inside=0,
        iterations=1,
        waits=True,
        forward_seconds=2.0,
        backward_seconds=3.0,
    )
    device = replace(
        DEVICE, host_copy=Link(0, 1.0), host_memory_bandwidth=1.0, disk_read=Link(0, 1.0), disk_write=Link(0, 0.5)
    )
    here = sizes.lower_bound(TierPlacement(), True, "update", device)
    assert (
        here[:3] == (19, 0, 0)
        and here.seconds == 5.0
        and replace(sizes, inside=2).lower_bound(TierPlacement(), True, "update", device).device == 20
    )
    on_host = sizes.lower_bound(TierPlacement(opt_state=(1.0, 0.0)), True, "update", device)
    assert on_host[:3] == (1 + 2 + 3, 14 + 4, 0), "copies stay, gradients leave"
    forward, backward, after = on_host.phases
    assert (forward, backward) == ((2.0, 0.0, 0.0, 0.0, 0.0), (3.0, 0.0, 0.0, 4.0, 0.0)) and after == (
        0.0,
        0.0,
        2.0,
        0.0,
        2 * 14 + 4 + 2,
    )
    assert on_host.seconds == 2.0 + 4.0 + 34.0 < on_host.likely
    at_once = replace(sizes, waits=False).lower_bound(TierPlacement(opt_state=(1.0, 0.0)), True, "update", device)
    assert at_once.seconds == 2.0 + 34.0 and not any(at_once.phases[2])
    shares = lambda placement, *tiers: speculative_shares(tiers, placement, copies=True)  # noqa: E731
    early = shares(TierPlacement(opt_state=(1.0, 0.0)), "disk", "host")
    speculative = sizes.lower_bound(TierPlacement(opt_state=(1.0, 0.0)), True, "update", device, early)
    assert speculative.host == on_host.host + 14 and speculative.seconds == 2.0 + 34.0 + 2 * 14, (
        "copies of what is overwritten"
    )
    streamed = sizes.lower_bound(TierPlacement(opt_state=(1.0, 0.0)), False, "update", device)
    assert streamed[:3] == (1 + 2 + 4, 14, 0) and streamed.phases[2] == (0.0, 0.0, 14.0, 14.0, 0.0)
    left = sizes.lower_bound(TierPlacement(opt_state=(1.0, 0.0)), False, "host", device)
    assert left[:3] == (1 + 2 + 3, 18, 0) and left.phases[1][3] + left.phases[2][2] == 4 + 18
    placement = TierPlacement(opt_state=(0.0, 1.0), params=(0.0, 1.0), activations=(1.0, 0.0))
    on_disk = sizes.lower_bound(placement, True, "update", device)
    assert on_disk[:3] == (1, 4, 16) and [queues[1] for queues in on_disk.phases] == [2, 2, 14 + 16 / 0.5]
    speculative = sizes.lower_bound(placement, True, "update", device, shares(placement, "disk"))
    assert speculative[:3] == (1, 4, 2 * 16) and speculative.seconds == 3 + 2 + 14 + 16 / 0.5, (
        "activations leave meanwhile"
    )
    rests_apart = TierPlacement(opt_state=(0.0, 1.0), params=(1.0, 0.0))
    apart = sizes.lower_bound(rests_apart, True, "update", device, shares(rests_apart, "disk"))
    assert apart.disk == 10 and apart.phases[2][1], (
        "not speculative: what it would overwrite in host memory has no copy"
    )
    stored = sizes.lower_bound(placement._replace(gradients=(0.0, 1.0)), True, "update", device)
    assert stored[:3] == (1, 3, 16 + 4) and [queues[1] for queues in stored.phases] == [
        2,
        2 + 4 / 0.5,
        14 + 4 + 16 / 0.5,
    ], "written, and read by the update"
    stored = sizes.lower_bound(
        placement._replace(gradients=(0.0, 1.0)), True, "update", device, shares(placement, "disk")
    )
    assert [queues[1] for queues in stored.phases] == [2, 2 + 4 / 0.5 + 14 + 16 / 0.5, 0], (
        "a guess reads what is still in memory"
    )
    looped = replace(sizes, iterations=3).lower_bound(TierPlacement(opt_state=(1.0, 0.0)), True, "device", device)
    assert looped.device == on_host.device + 1 and looped.host == 14 and len(looped.phases) == 2


def test_progress_is_a_line_over_itself_on_a_terminal_and_seldom_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FZERO_PROGRESS", raising=False)
    for terminal in (True, False):
        stream, now = io.StringIO(), [0.0]
        stream.isatty = lambda terminal=terminal: terminal  # type: ignore[method-assign]
        progress = Progress("search", stream, lambda now=now: now[0])
        for second in range(40):
            now[0] = float(second)
            progress(f"{second} tried")
        progress.close()
        lines = stream.getvalue()
        if terminal:
            assert (
                lines.count("\r") == 41
                and "\n" not in lines
                and "search: 39 s, 39 tried" in lines
                and lines.endswith("\r")
            )
        else:
            assert lines == "search: 2 s, 2 tried\nsearch: 17 s, 17 tried\nsearch: 32 s, 32 tried\n"
