"""The planned step on a long sequence: chunks of its MLPs save the planned memory, and change no number."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from scripts import EXAMPLES

import fzero as fz

pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def filled(params: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    return fz.tree.map(lambda x: (torch.randn(x.shape, generator=g) * 0.1).to(x.dtype), params)


def test_a_small_copy_trains_in_chunks_as_at_once_in_less_memory() -> None:
    make = runpy.run_path(str(EXAMPLES / "plan_hf.py"))["llama_8b_long"]
    ids, found, peaks = torch.randint(1, 64, (1, 256), generator=torch.Generator().manual_seed(1)), [], []
    for chunks in (1, 8):
        step, params, _ = make(seq=256, chunks=chunks, **SIZES)
        _, _, long = make(seq=8192, chunks=chunks, **SIZES)
        gpu = fz.AbstractMesh(data=1, device_type="cuda")
        peaks.append(fz.lower(step, gpu, params, long).plan.peak_bytes)
        train = fz.compile(step, fz.make_mesh(device="cpu"), backend="eager")
        state = train.init(filled(params))
        for _ in range(2):
            state, metrics = train(state, {"input_ids": ids, "labels": ids})
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    assert found[1] == pytest.approx(found[0], rel=1e-2)  # bf16: the gradients of chunks are rounded one by one
    assert peaks[1] < 0.7 * peaks[0]
