"""The example of reinforcement learning: the reward of its toy task rises, and the log-probabilities of the sampler are
those of the trainer; its losses are those of TRL."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from scripts import EXAMPLES, fresh_modules

import fzero as fz

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def test_the_reward_rises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--steps", "20"])
    with fresh_modules():
        runpy.run_path(str(EXAMPLES / "train_grpo.py"), run_name="__main__")
    lines = re.findall(r"step (\d+)/20  reward (\S+)  divergence (\S+)  drift (\S+)", capsys.readouterr().out)
    first, last = lines[0], lines[-1]
    assert (first[0], last[0]) == ("1", "20")
    assert float(last[1]) > 2 * float(first[1]) > 0
    assert all(float(drift) < 1e-5 for *_, drift in lines)


def test_a_group_of_one_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--group", "1"])
    with fresh_modules(), pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "train_grpo.py"), run_name="__main__")
    assert "--group at least 2" in capsys.readouterr().err


def test_losses_are_those_of_trl(tmp_path: Path) -> None:
    """Three updates for one rollout, with TRL computing the loss of the same batch. Its default also multiplies the
    divergence by the ratio, which the first paper does not."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    with fresh_modules():
        example = runpy.run_path(str(EXAMPLES / "train_grpo.py"), run_name="example")
    vocabulary, prompt, group, clip, beta = example["VOCABULARY"], example["PROMPT"], 4, 0.2, 0.5
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, eos_token_id=None, **sizes))
    reference, sampler = (transformers.LlamaForCausalLM(net.config) for _ in range(2))
    tokens = torch.randint(vocabulary, (2 * group, prompt + example["COMPLETION"]))
    batch = {"input_ids": tokens, "advantage": example["advantages"](example["reward"](tokens), group)}
    with torch.no_grad():
        for name, other in (("reference", reference), ("sampled", sampler)):
            for theirs, own in zip(other.parameters(), net.parameters(), strict=True):
                theirs.copy_(own + 0.05 * torch.randn(own.shape))  # ratios inside of the clipped range and outside
            batch[name] = example["log_probs"](other(tokens).logits, tokens)
    assert batch["advantage"].std() > 0.5
    model = fz.functionalize(net)
    step = model.train_step(fz.optim.sgd(0.5), example["grpo_loss"](clip, beta), has_aux=True)
    train = fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")
    state, got = train.init(model.params), []
    for _ in range(3):
        state, metrics = train(state, batch)
        got.append(float(metrics["loss"]))

    words = tokenizers.models.WordLevel({"<pad>": 0} | {f"t{i}": i for i in range(1, vocabulary)}, unk_token="<pad>")
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), loss_type="grpo", epsilon=clip, beta=beta, num_generations=group,
        per_device_train_batch_size=len(tokens), use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, remove_unused_columns=False, use_bias_correction_kl=False,
    )  # fmt: skip
    net.save_pretrained(tmp_path / "net")
    net = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "net")  # TRL loads its reference model from there
    trainer = trl.GRPOTrainer(
        net,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "t1"}] * len(tokens)),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words), eos_token="<pad>", pad_token="<pad>"
        ),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": tokens[:, :prompt],
        "completion_ids": tokens[:, prompt:],
        "prompt_mask": torch.ones(len(tokens), prompt, dtype=torch.long),
        "completion_mask": torch.ones(len(tokens), example["COMPLETION"], dtype=torch.long),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["sampled"],
        "ref_per_token_logps": batch["reference"],
    }
    sgd, want = torch.optim.SGD(net.parameters(), lr=0.5), []
    for _ in range(3):
        loss = trainer._compute_loss(net.train(), inputs)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        want.append(float(loss.detach()))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert abs(want[2] - want[0]) > 1e-3
