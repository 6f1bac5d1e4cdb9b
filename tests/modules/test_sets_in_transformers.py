"""Models of transformers that loop over a set of strings: each process has another order of such sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

CODE = """
import torch, transformers, fzero as fz
config = transformers.Gemma3TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"],
)
model = fz.functionalize(transformers.Gemma3ForCausalLM(config))
batch = {name: torch.ones(2, 16, dtype=torch.long) for name in ("input_ids", "labels")}
print(fz.lower(model.train_step(fz.optim.sgd(0.1)), fz.AbstractMesh(data=1), model.params, batch).program)
"""


def test_processes_trace_the_same_program_whatever_the_order_of_their_sets() -> None:
    found, orders = [], set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        order = "print(list({'sliding_attention', 'full_attention'}))"
        orders.add(subprocess.run([sys.executable, "-c", order], env=env, capture_output=True, check=True).stdout)
        found.append(subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, check=True).stdout)
    assert len(orders) == 2
    assert len({*found}) == 1
