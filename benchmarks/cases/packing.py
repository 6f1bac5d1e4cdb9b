"""Packed documents compared with padded ones, by fzero and by transformers in eager PyTorch."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from common import largest_difference, within_rounds

from cases import Table, cpu_seconds, processes

VOCAB = 4096


class Contestant(NamedTuple):
    title: str
    ours: bool
    packed: bool


CONTESTANTS = {
    "fzero_packed": Contestant("fzero, packed", True, True),
    "fzero_padded": Contestant("fzero, padded", True, False),
    "theirs_packed": Contestant("transformers, eager, packed", False, True),
    "theirs_padded": Contestant("transformers, eager, padded", False, False),
}


def packing(args: argparse.Namespace) -> Table:
    """Trains a Llama of transformers on the same documents: packed in rows by `fz.data.pack`, with `position_ids`, or
    one in each row, padded to the longest document, with an `attention_mask`."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    for turn in range(args.rounds):
        for name in random.Random(turn).sample(args.only, len(args.only)):
            with processes(args, 1, env={"contestant": name}) as group:
                found[name].append(group.ask("train")[0])
            print(f"round {turn + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    rows, one = [], next(iter(found.values()))[0]
    for name, each in found.items():
        medians = [statistics.median(x[kind] for x in each) for kind in ("cpu_s", "computed")]
        per_token = 1e6 * medians[0] / one["tokens"]
        rows.append((CONTESTANTS[name].title, f"{per_token:.0f}", f"{medians[1]:,.0f}", f"{each[0]['losses'][-1]:.5f}"))
    ratios: dict[str, Any] = {}
    notes = [
        f"Llama of {args.layers} layers, width {args.width}, vocabulary {VOCAB}; one process with one thread, AdamW. "
        f"A step has {one['documents']} documents of {one['shortest']} to {one['longest']} tokens, {one['tokens']} in "
        f"all, which fit into rows of {args.seq}; {args.steps} steps after {args.warmup}, medians of {args.rounds} "
        "rounds.",
        "Tokens: computed per step, including padding.",
    ]
    for rival in (x for x in args.only if x != "fzero_packed"):
        each = zip(found["fzero_packed"], found[rival], strict=True)
        title = f"{CONTESTANTS['fzero_packed'].title} / {CONTESTANTS[rival].title}, CPU seconds"
        ratios[rival], note = within_rounds(title, [a["cpu_s"] / b["cpu_s"] for a, b in each])
        notes.append(note)
    ratios["losses differ by"], _ = largest_difference([x["losses"] for each in found.values() for x in each])
    notes.append(f"losses of all steps differ by {ratios['losses differ by']:.1e} at most (relative)")
    columns = ("", "CPU microseconds per token", "tokens", "last loss")
    return Table("Packed documents", columns, rows, notes, {"contestants": found, "ratios": ratios})


def worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    return {"train": lambda: _train(args, CONTESTANTS[args.contestant])}


def _batch(documents: list[list[int]], seq: int, packed: bool) -> dict[str, Any]:
    """The batch of a step. A document has the same targets in both forms: all tokens but the first."""
    import torch

    import fzero as fz

    if packed:
        rows = fz.data.pack(documents, seq=seq)
        return {name: torch.stack([rows[i][name] for i in range(len(rows))]) for name in rows[0]}
    ids, mask = torch.zeros(2, len(documents), max(map(len, documents)), dtype=torch.int64)
    for i, document in enumerate(documents):
        ids[i, : len(document)], mask[i, : len(document)] = torch.tensor(document), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def _train(args: argparse.Namespace, contestant: Contestant) -> dict[str, Any]:
    import torch
    import transformers

    import fzero as fz

    drawn = random.Random(0)
    lengths = [min(args.seq, max(8, round(drawn.lognormvariate(4.0, 0.8)))) for _ in range(args.documents)]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(args.warmup + args.steps):  # the same lengths, so that padded batches have one shape
        documents = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
        batches.append(_batch(documents, args.seq, contestant.packed))
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": args.width, "intermediate_size": args.width * 8 // 3 // 32 * 32}
    sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": args.heads, "max_position_embeddings": args.seq}
    net: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    if contestant.ours:
        model = fz.functionalize(net)
        train = fz.compile(model.train_step(fz.optim.adamw(1e-3)), fz.make_mesh(), backend=args.backend)
        state = train.init(model.params)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    losses, begin = list[float](), 0.0
    for i, batch in enumerate(batches):
        begin = cpu_seconds() if i == args.warmup else begin
        if contestant.ours:
            state, metrics = train(state, batch)
            losses.append(float(metrics["loss"]))
        else:
            loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {
        "cpu_s": (cpu_seconds() - begin) / args.steps,
        "computed": batches[0]["input_ids"].numel(),
        "losses": losses,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
    }
