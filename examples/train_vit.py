"""Trains a vision transformer of the library transformers on scikit-learn's handwritten digits (8 by 8 pixels).

python examples/train_vit.py                             # under two minutes on two CPU cores
torchrun --nproc-per-node 2 examples/train_vit.py        # the same numbers, a half of the state on each rank
python examples/train_vit.py --plain                     # PyTorch's own loop over the same batches, to compare

Needs: pip install transformers scikit-learn
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from console import WHOLE, Help, below_one, exit_code, missing, parsed, say, stops

import fzero as fz

HELD_OUT = 360  # of 1,797 digits


def make_model(seed: int) -> Any:
    """The same on every rank."""
    from transformers import ViTConfig, ViTForImageClassification  # pyright: ignore[reportMissingImports]

    torch.manual_seed(seed)
    images: dict[str, Any] = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return ViTForImageClassification(ViTConfig(**images, **sizes, initializer_range=0.1))


def digits(args: argparse.Namespace) -> tuple[fz.data.ArrayDataset, fz.data.ArrayDataset]:
    """The digits to train on, in an order of its own each epoch and moved by a pixel at most, and those held out."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    found: Any = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(found.target)
    order = fz.random.uniform(fz.random.key(0), (len(labels),)).argsort()  # the same split whatever the seed
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]

    def moved(batch: dict[str, torch.Tensor], key: torch.Tensor) -> dict[str, torch.Tensor]:
        x = batch["pixel_values"]
        shift = (fz.random.uniform(key, (len(x), 2)) * 3).long() - 1
        at = torch.arange(8)
        rows, columns = (at + shift[:, i, None] for i in range(2))
        inside = ((rows >= 0) & (rows < 8))[:, None, :, None] & ((columns >= 0) & (columns < 8))[:, None, None, :]
        x = x[torch.arange(len(x))[:, None, None], 0, rows.clamp(0, 7)[:, :, None], columns.clamp(0, 7)[:, None, :]]
        return batch | {"pixel_values": torch.where(inside, x[:, None], -1.0)}

    rows = {"pixel_values": images, "labels": labels}
    return (
        fz.data.ArrayDataset({n: x[train] for n, x in rows.items()}, batch=args.batch, seed=args.seed, transform=moved),
        fz.data.ArrayDataset({n: x[held_out] for n, x in rows.items()}, batch=120, shuffle=False),
    )


def optimizer(args: argparse.Namespace) -> Any:
    schedule = fz.optim.warmup_cosine(args.lr, args.steps // 10, args.steps, init=0.0, end=0.0)
    return fz.optim.adamw(schedule, weight_decay=0.05)


def correct(outputs: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The share of digits that are told right, of all ranks."""
    right = outputs.logits.argmax(-1) == batch["labels"]
    return fz.weighted(right.float().sum(), right.numel())


def run(args: argparse.Namespace) -> None:
    mesh = fz.make_mesh(timeout=args.timeout)
    model = fz.functionalize(make_model(args.seed))
    zero = [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params][args.zero](axis="data")
    spread = fz.compose(zero, fz.mixed_precision(args.dtype))
    train = fz.compile(
        fz.accumulate(args.accumulate)(spread(model.train_step(optimizer(args)))),
        mesh,
        backend=args.backend,
        warmup=args.warmup,
    )
    evaluate = fz.compile(spread(model.eval_step(correct)), mesh, backend="eager")  # few calls: not worth compiling

    data, held_out = digits(args)
    here = {"rank": mesh.index("data"), "size": mesh.axis_size("data")}
    saved = fz.checkpoint.find(args.out) if args.resume else None
    state = train.restore(saved, params=model.params) if saved else train.init(model.params)
    start = data.resume(fz.checkpoint.describe(saved, mesh).meta.get("data")) if saved else 0
    say(
        f"ZeRO-{args.zero}, {args.dtype}, {args.backend}, mesh {mesh} on {mesh.device.type}: {len(model.blocks)} layers"
    )
    with (
        fz.log(train, args.json, steps=args.steps, print_fn=say) as report,
        fz.data.prefetch(data, start, args.steps, **here, device=mesh.device) as batches,
    ):
        for index, batch in batches:
            state, metrics = train(state, batch)
            report(index + 1, metrics)
            if args.out and ((stop := stops(mesh)) or index + 1 == args.steps):
                fz.checkpoint.save(args.out, state, keep=2, meta={"data": data.cursor(index + 1)})
                if stop and index + 1 < args.steps:
                    raise KeyboardInterrupt(f"stopped at step {index + 1}; continue with --resume")
    found = [evaluate(state.params, held_out.batch_at(i, **here)) for i in range(int(held_out.steps_per_epoch))]
    say(f"held-out accuracy {sum(map(float, found)) / len(found):.2%} of {HELD_OUT} digits")


def plain(args: argparse.Namespace) -> None:
    """What the same training is without fzero."""
    model, (data, held_out) = make_model(args.seed), digits(args)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = fz.optim.warmup_cosine(args.lr, args.steps // 10, args.steps, init=0.0, end=0.0)
    with fz.log(path=args.json, steps=args.steps, print_fn=say) as report:
        for index in range(args.steps):
            adamw.param_groups[0]["lr"] = float(schedule(index))
            loss = model(**data.batch_at(index)).loss
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            report(index + 1, {"loss": loss})
    model.eval()
    with torch.no_grad():
        batches = [held_out.batch_at(i) for i in range(int(held_out.steps_per_epoch))]
        found = [float((model(**batch).logits.argmax(-1) == batch["labels"]).float().mean()) for batch in batches]
    say(f"held-out accuracy {sum(found) / len(found):.2%} of {HELD_OUT} digits, without fzero")


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    p.add_argument("--steps", **WHOLE, default=800, help="number of steps")
    p.add_argument("--batch", **WHOLE, default=96, help="digits per step, over all processes and micro-batches")
    p.add_argument("--accumulate", **WHOLE, default=1, help="micro-batches per step")
    p.add_argument("--zero", type=int, choices=range(4), default=3, help="the ZeRO stage; 0 is data parallelism")
    p.add_argument("--dtype", choices=("fp32", "bf16", "auto"), default="fp32", help="dtype of the computation")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    p.add_argument("--seed", **WHOLE, default=0, help="seed of parameters and data")
    p.add_argument("--plain", action="store_true", help="train without fzero")
    p.add_argument("--backend", choices=("inductor", "eager"), help="by default inductor, if it can run")
    p.add_argument(
        "--warmup",
        choices=("wait", "eager"),
        default="wait",
        help="eager: train operation by operation while functions are compiled; results then vary by rounding",
    )
    p.add_argument("--out", metavar="DIR", help="directory for the checkpoint; by default, none is saved")
    p.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --out, if any")
    p.add_argument("--timeout", type=float, metavar="SECONDS", default=600.0, help="how long a rank waits for others")
    p.add_argument("--json", metavar="FILE", help="write one line per step")
    return parsed(p, problems_of)


def problems_of(args: argparse.Namespace) -> list[str]:
    problems = below_one(args, "steps", "batch", "accumulate")
    problems += missing(transformers="transformers", sklearn="scikit-learn")
    problems += ["--resume needs --out DIR, where the checkpoint is"] if args.resume and not args.out else []
    return problems


if __name__ == "__main__":
    args = parse_args()
    sys.exit(exit_code(lambda: plain(args) if args.plain else run(args)))
