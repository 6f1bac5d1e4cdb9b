"""The planned mixture of experts with its state on the host: a small copy of it runs the same program."""

from __future__ import annotations

import runpy
from collections import Counter
from typing import Any

import pytest
import torch
from scripts import EXAMPLES

import fzero as fz
from fzero.memory.tier_copies import TierTransport
from fzero.plan.timeline import COMPUTE

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def filled(params: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    return fz.tree.map(lambda x: (torch.randn(x.shape, generator=g) * 0.1).to(x.dtype), params)


def test_a_small_copy_moves_the_bytes_of_its_plan_in_the_order_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step, params, batch = runpy.run_path(str(EXAMPLES / "plan_hf.py"))["qwen3_30b_a3b"](seq=16, count=2, **SIZES)
    batch = {name: torch.empty_like(x) for name, x in batch.items()}  # two tensors, as in the run
    mesh = fz.make_mesh(device="cpu", unified_memory=False)
    planned = fz.lower(step, fz.AbstractMesh(data=1, unified_memory=False), params, batch, backend="eager")
    moved: Counter[str] = Counter()
    for direction in ("to_device", "to_host"):
        start = getattr(TierTransport, f"{direction}_start")

        def counted(
            self: Any, values: Any, *args: Any, direction: str = direction, start: Any = start, **how: Any
        ) -> Any:
            moved[direction] += sum(x.nbytes for x in values)
            return start(self, values, *args, **how)

        monkeypatch.setattr(TierTransport, f"{direction}_start", counted)
    train = fz.compile(step, mesh, backend="eager")
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids.clone()}
    state, losses = train.init(filled(params)), list[float]()
    for _ in range(3):
        moved.clear()
        state, metrics = train(state, given)
        losses.append(float(metrics["loss"]))
    assert str(train.program) == str(planned.program)
    assert moved == {name: channel.bytes for name, channel in planned.plan.channels.items() if name in moved}
    assert moved["to_device"] > 0 < moved["to_host"] and losses[2] < losses[0]
    _, events = train.profile(state, given, steps=1)
    measured, expected = (sorted(x, key=lambda e: e.start) for x in (events, planned.plan.events))
    for queue in ("to_device", "to_host"):  # copies overlap, so the program is what orders them
        lines = [sorted(e.line for e in x if e.queue == queue) for x in (measured, expected)]
        assert lines[0] == lines[1]
    # The plan has no event for an op that takes no time, such as a view.
    computed = [e.line for e in expected if e.queue == COMPUTE]
    assert [e.line for e in measured if e.queue == COMPUTE and e.line in {*computed}] == computed
