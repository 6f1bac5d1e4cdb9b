"""Fine-tunes a causal language model of Hugging Face Transformers on a text: all parameters, or LoRA adapters.

python examples/finetune_hf.py                                        # creates a small Llama first; downloads nothing
torchrun --nproc-per-node 2 examples/finetune_hf.py --resume --steps 400      # resumes on another number of processes
python examples/finetune_hf.py --model runs/finetune/model-200 --lora --text README.md --out runs/adapter
torchrun --nproc-per-node 8 examples/finetune_hf.py --model DIR --text FILE --bf16 --remat --plan   # plans a step only

Needs: pip install transformers; for --lora peft too
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from console import LARGE, RANK, WHOLE, WORLD, Help, below_one, exit_code, missing, out_of_range, parsed, say, stops

import fzero as fz
from fzero.hf.pretrained_saving import TOKENIZER

# --- The model, the text ---


def make_small(path: Path, seed: int) -> None:
    """A new Llama of a million parameters, and a tokenizer for Python, in a directory as the library saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]
    from transformers.utils.logging import disable_progress_bar  # pyright: ignore[reportMissingImports]

    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(text_of(None, 1 << 20).splitlines(keepends=True), trainer)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=1024, num_attention_heads=4, bos_token_id=0, eos_token_id=0, **sizes)
    torch.manual_seed(seed)
    disable_progress_bar()
    unfinished = path.with_name(f"{path.name}.tmp")
    PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>").save_pretrained(unfinished)
    LlamaForCausalLM(config).save_pretrained(unfinished)
    unfinished.rename(path)


def base_of(args: argparse.Namespace) -> Path:
    """The directory of the model to begin with; without --model a small one, made once."""
    if args.model:
        return Path(args.model)
    path = Path(args.out) / "base"
    if RANK == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_small(path, args.seed)
        say(f"created a small Llama in {path}; its weights are random")
    if WORLD > 1:
        dist.barrier()
    return path


def text_of(path: str | None, limit: int = 4 << 20) -> str:
    """A file's text; without one the source of Python's standard library."""
    if path:
        return Path(path).read_text("utf-8", "replace")
    return bytes(fz.data.python_source(limit_bytes=limit).numpy()).decode(errors="replace")


def tokens_of(args: argparse.Namespace, base: Path, config: Any) -> torch.Tensor:
    """The text's tokens, in windows of --seq."""
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    fix = f"Fix: copy there what the model's tokenizer was saved as: {', '.join(TOKENIZER[:3])}, ..."
    if not any((base / name).is_file() for name in TOKENIZER):
        raise fz.errors.FzeroValueError(f"--model {base} has no tokenizer\n{fix}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise fz.errors.FzeroValueError(f"the tokenizer of {base} cannot be read\n  {text}\n{fix}") from error
    ids = torch.tensor(tokenizer(text_of(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    windows, most = len(ids) // args.seq, getattr(config, "max_position_embeddings", None) or args.seq
    problems = []
    if windows < 2:
        problems.append(
            f"--text {args.text} has {len(ids)} tokens, which make {windows} windows of --seq {args.seq}: at least two "
            "are needed, because one is held out"
        )
    elif int(ids.max()) >= config.vocab_size:
        problems.append(
            f"the tokenizer has a token {int(ids.max())}, but the vocabulary of the model has {config.vocab_size}"
        )
    if args.seq > most:
        problems.append(f"--seq {args.seq} is more than the {most} positions of the model")
    if problems:
        raise fz.errors.FzeroValueError("\n  ".join(["the model, the text and --seq do not fit together", *problems]))
    return ids[: windows * args.seq].view(windows, args.seq)


def halves(args: argparse.Namespace, tokens: torch.Tensor) -> tuple[fz.data.ArrayDataset, fz.data.ArrayDataset]:
    """Windows to train on, and the last of them, which are held out."""
    cut = len(tokens) - max(1, len(tokens) // 20)

    def rows(of: torch.Tensor, **settings: Any) -> fz.data.ArrayDataset:
        return fz.data.ArrayDataset({"input_ids": of, "labels": of}, batch=args.batch, seed=args.seed, **settings)

    return rows(tokens[:cut]), rows(tokens[cut:], shuffle=False)


# --- The run ---


def training(args: argparse.Namespace, base: Path) -> tuple[Any, fz.Step]:
    """The model, and its training step with all transforms."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    adapter = None
    if args.lora:
        from peft import LoraConfig  # pyright: ignore[reportMissingImports]

        adapter = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    model = fz.hf.from_pretrained(AutoModelForCausalLM, base, adapter=adapter)
    schedule = fz.optim.warmup_cosine(args.lr, args.steps // 10, args.steps, init=0.0, end=0.0)
    adamw = fz.optim.adamw(schedule, weight_decay=0.01, mask=lambda path, leaf: leaf.ndim >= 2)
    zero = [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params][args.zero](axis="data")
    transforms = [zero, fz.accumulate(args.accumulate), fz.mixed_precision("bf16" if args.bf16 else "fp32")]
    transforms += [fz.remat("full")] if args.remat else []
    if args.offload:
        path = {"path": args.out} if args.offload == "nvme" else {}
        transforms.append(fz.offload(args.offload, ("params", "opt_state"), **path))
    return model, fz.compose(*transforms)(model.train_step(fz.optim.chain(fz.optim.clip_by_global_norm(1.0), adamw)))


def loss_of(outputs: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The mean over the tokens of all ranks."""
    count = batch["labels"].numel() - len(batch["labels"])  # the first of each row is not predicted
    return fz.weighted(outputs.loss * count, count)


def run(args: argparse.Namespace) -> None:
    Path(args.out).mkdir(parents=True, exist_ok=True)
    mesh = fz.make_mesh(timeout=args.timeout)
    base = base_of(args)
    model, step = training(args, base)
    data, held_out = halves(args, tokens_of(args, base, model.module.config))
    here = {"rank": mesh.index("data"), "size": mesh.axis_size("data")}
    plan = fz.lower(step, mesh, model.params, data.batch_at(0, **here)).plan
    if args.plan:
        say(str(plan))
        return
    gb = {"stored": plan.persistent_bytes, "at the peak": plan.peak_bytes, "on disk": plan.disk_bytes}
    sizes = ", ".join(f"{n / 1e9:.3g} GB {what}" for what, n in gb.items() if n)
    say(f"planned for each process: {sizes}; {plan.step_seconds:.3g} s per step, bound by {plan.bound_by} (see --plan)")

    train = fz.compile(step, mesh, backend=args.backend, warmup=args.warmup)
    evaluate = fz.compile(fz.compose(*step.transforms)(model.eval_step(loss_of)), mesh, backend="eager")
    there = fz.checkpoint.find(args.out)
    saved = there if args.resume else None
    if there and not saved:
        say(f"{there} is ignored, and the next save replaces it as the latest: --resume would continue from it")
    state = train.restore(saved, params=model.params) if saved else train.load(base)
    start = data.resume(fz.checkpoint.describe(saved, mesh).meta.get("data")) if saved else 0
    batches = [held_out.batch_at(i, **here) for i in range(min(8, -(-held_out.num_samples // args.batch)))]

    def held_out_loss() -> float:
        return sum(float(evaluate(state.params, batch)) for batch in batches) / len(batches)

    leaves = list(zip(fz.tree.paths(model.params, "params"), fz.tree.leaves(model.params), strict=True))
    count, trained = (sum(x.numel() for p, x in leaves if of(p, x)) for of in (lambda *_: True, model.trainable))
    say(
        f"ZeRO-{args.zero}, {'bf16' if args.bf16 else 'fp32'}, {args.backend}, mesh {mesh} on {mesh.device.type}; "
        f"{count / 1e6:.3f} M parameters, of which {trained / 1e6:.3f} M are trained: "
        f"{f'resuming at step {start}' if start else f'training, held-out loss {held_out_loss():.4f}'}"
    )
    with (
        fz.log(train, args.json, steps=args.steps, print_fn=say) as report,
        fz.data.prefetch(data, start, args.steps, **here, device=mesh.device) as ahead,
    ):
        for index, batch in ahead:
            state, metrics = train(state, batch)
            done = index + 1
            report(done, metrics)
            if (stop := stops(mesh)) or done == args.steps or done % args.save_every == 0:
                fz.checkpoint.save(args.out, state, keep=2, meta={"data": data.cursor(done)})
            if stop and done < args.steps:
                raise KeyboardInterrupt(f"stopped at step {done}; continue with --resume")
    say(f"held-out loss {held_out_loss():.4f}")
    fz.hf.save_pretrained(written(args), model, state)
    reads = f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('{base}'), " if args.lora else ""
    say(f"to load it: {reads or 'AutoModelForCausalLM.from_pretrained('}'{written(args)}')")


def written(args: argparse.Namespace) -> Path:
    return Path(args.out) / f"{'adapter' if args.lora else 'model'}-{args.steps}"


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    p.add_argument("--model", metavar="DIR", help="written by save_pretrained; by default, a small model is created")
    p.add_argument("--text", metavar="FILE", help="training text; by default, the source of Python's standard library")
    p.add_argument(
        "--lora", type=int, nargs="?", const=8, metavar="RANK", help="train LoRA adapters of this rank (default: 8)"
    )
    p.add_argument("--steps", **WHOLE, default=200, help="number of steps")
    p.add_argument("--seq", **WHOLE, default=128, help="tokens per sample")
    p.add_argument("--batch", **WHOLE, default=12, help="samples per step, over all processes and micro-batches")
    p.add_argument("--accumulate", **WHOLE, default=1, help="micro-batches per step")
    p.add_argument("--zero", type=int, choices=range(4), default=3, help="the ZeRO stage; 0 is data parallelism")
    p.add_argument("--bf16", action="store_true", help="compute in bf16, with fp32 master weights")
    p.add_argument("--remat", action="store_true", help="recompute activations (gradient checkpointing)")
    p.add_argument("--offload", choices=("cpu", "nvme"), help="where to store parameters and optimizer state")
    p.add_argument("--lr", type=float, help="peak learning rate; by default 2e-3, with --model 2e-5, with --lora 2e-4")
    p.add_argument("--seed", **WHOLE, default=0, help="seed of the data and of the small model")
    p.add_argument("--backend", choices=("inductor", "eager"), help="by default inductor, if it can run")
    p.add_argument(
        "--warmup",
        choices=("wait", "eager"),
        default="wait",
        help="eager: train operation by operation while functions are compiled; results then vary by rounding",
    )
    p.add_argument("--out", metavar="DIR", default="runs/finetune", help="for checkpoints and the trained model")
    p.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --out, if any")
    p.add_argument("--save-every", **WHOLE, default=100, help="steps between checkpoints")
    p.add_argument("--plan", action="store_true", help="only print the plan of a step")
    p.add_argument("--timeout", type=float, metavar="SECONDS", default=600.0, help="how long a rank waits for others")
    p.add_argument("--json", metavar="FILE", help="write one line per step")
    return parsed(p, problems_of)


def problems_of(args: argparse.Namespace) -> list[str]:
    problems = below_one(args, "steps", "seq", "batch", "accumulate", "save_every")
    args.lr = args.lr if args.lr is not None else 2e-4 if args.lora else 2e-5 if args.model else 2e-3
    problems += out_of_range(args, lr=(0, LARGE), seed=(0, 2**64 - 1), timeout=(1, LARGE))
    problems += below_one(args, "lora") if args.lora is not None else []
    problems += missing(transformers="transformers", **({} if args.lora is None else {"peft": "peft"}))
    problems += [f"--model {args.model} is not a directory"] if args.model and not os.path.isdir(args.model) else []
    problems += [f"--text {args.text} is not a file"] if args.text and not os.path.isfile(args.text) else []
    if not problems and args.batch % (WORLD * args.accumulate):
        each = f"{WORLD} processes x --accumulate {args.accumulate}"
        problems.append(f"--batch {args.batch} is not a multiple of {WORLD * args.accumulate}: {each}")
    if written(args).exists() and not args.plan:
        problems.append(f"{written(args)} already exists: choose another --out or more --steps")
    return problems


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(parse_args())))
