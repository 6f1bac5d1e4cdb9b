"""Reinforcement learning with group-relative advantages (GRPO): a sharded policy, and an inference engine that gets its
weights after each update.

python examples/train_grpo.py
torchrun --nproc-per-node 2 examples/train_grpo.py --steps 60

The task is a toy: each token of a completion should be the successor of the token before it. The policy is a small
Llama with random weights; the engine is transformers' own `generate` on each rank. Needs: pip install transformers
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from console import say

import fzero as fz

VOCABULARY, PROMPT, COMPLETION = 16, 4, 8  # tokens


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """float32[rows]: the share of the completion's tokens that are the successor of the token before them."""
    follows = tokens[:, PROMPT:] == (tokens[:, PROMPT - 1 : -1] + 1) % VOCABULARY
    return follows.float().mean(-1)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32[rows, COMPLETION]: the log-probability of each token of the completion."""
    of_next = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)  # the logits at a position predict the next token
    return of_next.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def grpo_loss(clip: float, beta: float) -> Any:
    """The clipped objective of PPO with group-relative advantages, and a penalty for leaving the reference model
    (DeepSeekMath, arXiv:2402.03300, equations 3 and 4)."""

    def loss(out: Any, batch: dict[str, torch.Tensor]) -> Any:
        now = log_probs(out.logits, batch["input_ids"])
        ratio = torch.exp(now - batch["sampled"])
        advantage = batch["advantage"][:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        apart = batch["reference"] - now
        divergence = torch.exp(apart) - apart - 1  # an unbiased estimate of the KL divergence, never negative
        drift = (now - batch["sampled"]).abs().mean()  # between the trainer's and the sampler's log-probabilities
        return -(gain - beta * divergence).mean(), {"divergence": divergence.mean(), "drift": drift}

    return loss


def advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Each reward relative to those of the other completions of its prompt."""
    rows = rewards.view(-1, group)
    return ((rows - rows.mean(-1, keepdim=True)) / (rows.std(-1, keepdim=True) + 1e-4)).view(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small policy with GRPO on a toy task.")
    parser.add_argument("--steps", type=int, default=120, help="rollouts, each followed by --updates (default: 120)")
    parser.add_argument("--updates", type=int, default=2, help="updates for each rollout (default: 2)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts for each rollout and rank (default: 8)")
    parser.add_argument("--group", type=int, default=8, help="completions for each prompt (default: 8)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--beta", type=float, default=0.01, help="weight of the divergence (default: 0.01)")
    args = parser.parse_args()
    if min(args.steps, args.updates, args.prompts, args.group - 1) < 1:
        parser.error("--steps, --updates and --prompts must be at least 1, and --group at least 2")
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    mesh = fz.make_mesh()
    torch.manual_seed(0)  # the same first weights on every rank
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, eos_token_id=None, **sizes)
    engine: Any = LlamaForCausalLM(config).eval()  # the inference engine of this rank
    model = fz.functionalize(LlamaForCausalLM(config))

    adamw = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(args.lr))
    zero = fz.shard_params()
    loss = grpo_loss(clip=0.2, beta=args.beta)
    train = fz.compile(zero(model.train_step(adamw, loss, has_aux=True)), mesh, backend="eager")
    # The reference model: a second copy of the first weights, sharded in the same way, without an optimizer's state.
    frozen = fz.compile(zero(model.train_step(fz.optim.sgd(0.0))), mesh, backend="eager").init(model.params).params
    evaluate = fz.compile(
        zero(model.eval_step(lambda out, batch: log_probs(out.logits, batch["input_ids"]))), mesh, backend="eager"
    )

    state, draws = train.init(model.params), torch.Generator().manual_seed(mesh.rank)
    torch.manual_seed(mesh.rank)  # each rank samples its own completions
    for step in range(args.steps):
        engine.load_state_dict(dict(fz.hf.stream(model, state)), strict=False)  # gathers one tensor after the other
        prompts = torch.randint(VOCABULARY, (args.prompts, PROMPT), generator=draws).repeat_interleave(args.group, 0)
        with torch.no_grad():
            tokens = engine.generate(prompts, max_new_tokens=COMPLETION, do_sample=True, attention_mask=prompts >= 0)
            sampled = log_probs(engine(tokens).logits, tokens)
        rewards = reward(tokens)
        batch = {"input_ids": tokens, "advantage": advantages(rewards, args.group), "sampled": sampled}
        batch["reference"] = evaluate(frozen, {"input_ids": tokens})
        drifts, metrics = [], dict[str, Any]()
        for _ in range(args.updates):
            state, metrics = train(state, batch)
            drifts.append(metrics["aux"]["drift"])
        if (step + 1) % 20 == 0 or step in (0, args.steps - 1):
            divergence, reached = float(metrics["aux"]["divergence"]), float(rewards.mean())  # the reward of this rank
            text = f"step {step + 1}/{args.steps}  reward {reached:.3f}  divergence {divergence:.3f}"
            say(f"{text}  drift {float(drifts[0]):.1e}")  # before the first update, the policy is the sampler
    fz.close_mesh()


if __name__ == "__main__":
    main()
