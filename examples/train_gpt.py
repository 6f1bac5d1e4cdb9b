"""Trains a byte-level GPT on the source code of Python's standard library or on your own file, with any ZeRO stage, on
one process or several.

torchrun --nproc-per-node 2 examples/train_gpt.py                      # about a minute on two CPU cores
torchrun --nproc-per-node 2 examples/train_gpt.py --text FILE          # on your text
torchrun --nproc-per-node 3 examples/train_gpt.py --resume --zero 1    # resumes from the checkpoint, on another mesh
torchrun --nproc-per-node 4 examples/train_gpt.py --resume --tensor 2  # each pair of processes shards the matrices
python examples/train_gpt.py --print-program --steps 1                 # one process, no process group
fzero plan examples/train_gpt.py:plan_target --mesh data=8             # plans a step on 8 ranks
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # the imports below take seconds

    def stop_importing(*_: object) -> None:
        """Ctrl-C during an import would print a traceback on each rank."""
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"stopped while importing\n")
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, stop_importing)
    if os.environ.get("RANK", "0") == "0":
        print("importing PyTorch and fzero", file=sys.stderr, flush=True)

import torch
import torch.nn.functional as F
from console import digest, exit_code, parse_args, say, stops, to_try_next, use_deterministic_algorithms
from einops import rearrange

import fzero as fz
from fzero import optim

VOCAB = 256  # bytes
EVAL_BATCHES = 4

# --- The model: pure functions of a pytree of parameters. A block is gathered, rematerialised and compiled as one. ---


def norm(scale, x):
    return F.layer_norm(x, x.shape[-1:], scale)


@fz.block
def embed(p, tokens):
    return p["token"][tokens]


def rotary(x):
    """Turns each pair of features of x[..., t, d] by an angle that grows with the position t: attention sees
    distances."""
    t, d = x.shape[-2:]
    angle = torch.outer(torch.arange(t, device=x.device), 1000.0 ** (-torch.arange(0, d, 2, device=x.device) / d))
    cos, sin, (a, b) = angle.cos().to(x.dtype), angle.sin().to(x.dtype), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@fz.block
def layer(p, x, heads):
    qkv = norm(p["norm1"], x) @ p["qkv"]
    q, k, v = rearrange(qkv, "b t (three head d) -> three b head t d", three=3, head=heads)
    mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    x = x + rearrange(mixed, "b head t d -> b t (head d)") @ p["out"]
    return x + F.gelu(norm(p["norm2"], x) @ p["up"], approximate="tanh") @ p["down"]


@fz.block
def head(p, x, targets=None, smoothing=0.0, z_loss=0.0):
    logits = (norm(p["norm"], x) @ p["vocab"]).float()  # the loss is in fp32, whatever the model computes in
    if targets is None:
        return logits
    logits, targets = rearrange(logits, "b t vocab -> (b t) vocab"), rearrange(targets, "b t -> (b t)")
    entropy = F.cross_entropy(logits, targets)
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing) if smoothing else entropy
    if z_loss:  # keeps the logits' normaliser near 1 (PaLM, Chowdhery et al. 2022)
        loss = loss + z_loss * logits.logsumexp(-1).square().mean()
    return loss, {"entropy": entropy, "accuracy": (logits.argmax(-1) == targets).float().mean()}


def gpt(params, tokens, targets=None, *, heads, **terms):
    """The logits of the next byte at every position; with targets, the loss and metrics: means over bytes. `terms`: of
    the loss, as `head` takes them."""
    x = embed(params["embed"], tokens)
    for p in params["layers"]:
        x = layer(p, x, heads)
    return head(params["head"], x, targets, **terms)


def init_gpt(key, *, layers, width):
    keys = iter(fz.random.split(key, 2 + 4 * layers))

    def matrix(*shape, std=None):
        return fz.random.normal(next(keys), shape) * (std or shape[0] ** -0.5)

    def init_layer():
        small = (2 * layers * width) ** -0.5  # of what is added to the residual stream, twice a layer
        attention = {
            "norm1": torch.ones(width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width, std=small),
        }
        return attention | {
            "norm2": torch.ones(width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width, std=small),
        }

    blocks = [init_layer() for _ in range(layers)]
    return {
        "embed": {"token": matrix(VOCAB, width, std=0.3)},
        "layers": blocks,
        "head": {"norm": torch.ones(width), "vocab": matrix(width, VOCAB, std=0.02)},
    }


# --- The run ---


def training(args: argparse.Namespace):
    """The training step with its transforms, those that evaluations share, the function that makes its parameters, and
    its learning rate."""

    def init(key):
        return init_gpt(key, layers=args.layers, width=args.width)

    def loss_fn(params, batch):
        return gpt(params, *batch, heads=args.heads, smoothing=args.label_smoothing, z_loss=args.z_loss)

    schedule = optim.warmup_cosine(args.lr, args.steps // 10, args.steps, init=args.lr / 10, end=args.lr / 10)
    adamw = optim.adamw(
        schedule, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim >= 2, state_dtype=args.state_dtype
    )
    zero = [fz.data_parallel, fz.shard_opt_state, fz.shard_grads, fz.shard_params][args.zero]
    spread = fz.compose(zero(axis="data"), fz.mixed_precision(args.dtype, params=args.params, rounding=args.rounding))
    if args.tensor > 1:  # columns, then rows: one sum over `model` behind each pair of products
        rules = {"qkv": (1, 3), "out": 0, "up": 1, "down": 0}
        rules |= {} if VOCAB % args.tensor else {"token": 0, "vocab": 1}
        spread = fz.compose(spread, fz.tensor_parallel(rules=rules))
    if args.fp8:
        fp8 = fz.fp8(
            scales=args.fp8,
            where=lambda path, leaf: "layers" in path and leaf.ndim == 2,  # all but embedding and head
        )
        spread = fz.compose(spread, fp8)
    step = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), adamw), has_aux=True)
    return fz.compose(spread, fz.accumulate(args.accumulate), fz.remat("min_cut"))(step), spread, init, schedule


def plan_target():
    """What `fzero plan` and `fzero show` are about: the step by default flags, with that batch on every rank."""
    args = parse_args(None)
    step, _, init, _ = training(args)
    tokens = torch.empty(args.batch, args.seq, dtype=torch.int64, device="meta")
    return step, init, (tokens, tokens)


def run(args: argparse.Namespace) -> None:
    if args.deterministic:
        use_deterministic_algorithms()
    tensor = {"model": args.tensor} if args.tensor > 1 else {}
    mesh = fz.make_mesh(timeout=args.timeout, data=-1, **tensor)
    step, spread, init, schedule = training(args)

    def validation_loss(params, tokens, targets):
        # a mean over all ranks
        return fz.weighted(gpt(params, tokens, targets, heads=args.heads)[0] * targets.numel(), targets.numel())

    def logits_at(params, tokens, position):
        return gpt(params, tokens, heads=args.heads).index_select(1, position).flatten()

    train = fz.compile(step, mesh, backend=args.backend, warmup=args.warmup)
    if args.stop_on_nan:  # and says so itself
        warnings.filterwarnings("ignore", "fzero.step: parameters are not finite")
    # the same transforms, forward only;
    validate = fz.compile(spread(fz.eval_step(validation_loss)), mesh, backend="eager")
    predict = fz.compile(spread(fz.eval_step(logits_at)), mesh, backend="eager")  # few calls: not worth compiling

    tokens: dict[str, Any] = {"dtype": torch.uint8} if args.text else {}  # a file is mapped, not read
    text, held_out = fz.data.TokenDataset(
        args.text or fz.data.python_source(), seq=args.seq, batch=args.batch, seed=args.seed, **tokens
    ).split(0.02)
    # the global batch of a step is the same on any mesh
    here = {"rank": mesh.index("data"), "size": mesh.axis_size("data")}
    saves = fz.checkpoint.CheckpointManager(args.out, every=args.save_every, keep=2, data=text, meta=vars(args))
    key = fz.random.key(args.seed)
    # the same command starts a run and continues it
    state = saves.restore(train, init, key) if args.resume else train.init(init, key)
    start = saves.seen  # batches; with fp16, some of them were no step
    say(
        f"ZeRO-{args.zero}, {args.dtype}, {args.backend}, mesh {mesh} on {mesh.device.type}: "
        f"{f'resuming at step {start}' if start else 'training'}"
    )
    if args.print_program:
        say(str(fz.lower(train.step, mesh, init, text.batch_at(0, **here)).program))

    with (
        fz.log(train, args.json, steps=args.steps, tokens=args.batch * args.seq, lr=schedule, print_fn=say) as report,
        fz.data.prefetch(text, start, args.steps, **here, device=mesh.device) as batches,
    ):
        for index, batch in batches:
            state, metrics = train(state, batch)
            done, watched = index + 1, {}
            if "precision" in metrics:  # --dtype auto: which block's outputs come closest to overflowing
                watched["largest_output"] = max(
                    zip(metrics["precision"]["output_max"].tolist(), train.blocks, strict=True)
                )
            report(done, metrics, **watched)
            if args.stop_on_nan and not metrics["finite"] and not metrics.get("skipped"):
                raise fz.errors.FzeroValueError(
                    f"step {done}: loss {metrics['loss']}, grad_norm {metrics['grad_norm']}: stopped. Checkpoints are "
                    f"of earlier steps.\nFix: a smaller --lr"
                )
            saves.step(state)
            if stops(mesh) and done < args.steps:
                saves.close()
                raise KeyboardInterrupt(f"stopped at step {done}; continue with --resume")
    saves.close()  # the last state
    losses = [validate(state.params, *held_out.batch_at(i, **here)) for i in range(EVAL_BATCHES)]
    say(
        f"validation loss {sum(map(float, losses)) / len(losses):.4f}; checkpoint of step {int(state.step)} in "
        f"{args.out}"
    )
    if args.deterministic:
        say(f"sha256 of the parameters: {digest(fz.tree.leaves(train.gather(state).params))}")
    prompt = b"\n" if args.text else b"\n    def "
    say("a sample:\n" + sample(predict, state.params, args.seq, fz.random.key(args.seed), prompt))
    say(f"\nto try next:\n{to_try_next(args)}")


def sample(
    predict: Callable[..., torch.Tensor],
    params: Any,
    seq: int,
    key: torch.Tensor,
    prompt: bytes,
    count: int = 160,
) -> str:
    """Text drawn byte by byte. Every rank takes part in the gathers and draws the same; one shape for all calls."""
    text = list(prompt)
    for i in range(count):
        window = text[-seq:]
        logits = (
            predict(params, torch.tensor([window + [0] * (seq - len(window))]), torch.tensor([len(window) - 1]))
            .float()
            .cpu()
        )
        noise = -torch.log(-torch.log(fz.random.uniform(fz.random.fold_in(key, i), (VOCAB,), minval=1e-9)))
        text.append(int((logits / 0.7 + noise).argmax()))  # Gumbel's way to draw from softmax(logits / 0.7)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in bytes(text).decode(errors="replace")
    )


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(parse_args(__doc__))))
