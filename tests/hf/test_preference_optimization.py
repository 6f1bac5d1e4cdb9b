"""Direct preference optimization as docs/guides/post-training.md has it, compared with a plain loop of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def log_prob(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    targets = batch["targets"][:, 1:]
    return -F.cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none").sum(-1)


def dpo(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = (log_prob(logits, batch) - batch["reference"]).view(-1, 2).unbind(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def losses_of_a_rank() -> tuple[list[float], dict[str, torch.Tensor]]:
    net, batch = model_and_batch()
    model = fz.functionalize(net)
    mesh, zero = fz.make_mesh(data=-1), fz.shard_params()
    train = fz.compile(
        zero(model.train_step(fz.optim.adamw(1e-3, eps=1e-5, weight_decay=0.0), lambda out, b: dpo(out.logits, b))),
        mesh,
        backend="eager",
    )
    evaluate = fz.compile(zero(model.eval_step(lambda out, b: log_prob(out.logits, b))), mesh, backend="eager")
    mine = {name: x.chunk(mesh.size)[mesh.rank] for name, x in batch.items()}
    state, losses = train.init(model.params), []
    mine["reference"] = evaluate(state.params, mine)
    for _ in range(6):
        state, metrics = train(state, mine)
        losses.append(float(metrics["loss"]))
    model.write_back(train.gather(state).params)
    return losses, net.state_dict()


def model_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **SIZES))
    tokens = torch.randint(64, (8, 12))
    targets = tokens.clone()
    for i in range(8):
        targets[i, : 3 + i % 4] = -100
    return net, {"input_ids": tokens, "targets": targets}


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_weights_are_those_of_a_plain_loop(run_ranks: Any, ranks: int) -> None:
    net, batch = model_and_batch()
    reference = copy.deepcopy(net)
    with torch.no_grad():
        batch["reference"] = log_prob(reference(batch["input_ids"]).logits, batch)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    want = []
    for _ in range(6):
        loss = dpo(net(batch["input_ids"]).logits, batch)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        want.append(float(loss.detach()))
    found = [losses_of_a_rank()] if ranks == 1 else run_ranks(2, losses_of_a_rank)
    for losses, weights in found:
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)
        for name, x in net.state_dict().items():
            torch.testing.assert_close(weights[name], x, rtol=1e-4, atol=1e-5, msg=name)
