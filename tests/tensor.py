"""A small GPT whose parameters tensor_parallel cuts, and steps of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim, tree
from fzero.compiler.combined_transforms import zero_of
from fzero.mesh import AbstractMesh
from fzero.testing.simulate import Simulation, ranks_of

HEADS, WIDTH, WORDS, LENGTH = 4, 16, 24, 6
RULES: dict[str, Any] = {"emb": 0, "qkv": (1, 3), "bias": (0, 3), "out": 0, "up": 1, "down": 0, "head": 1}

OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))


@fz.block
def layer(p, x):
    h = F.layer_norm(x, (WIDTH,), p["norm"])
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (h @ p["qkv"] + p["bias"]).chunk(3, -1))
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(F.layer_norm(x, (WIDTH,), p["norm2"]) @ p["up"]) @ p["down"]


def loss_fn(p, batch):
    x = p["emb"][batch["x"]]
    for block in p["layers"]:
        x = layer(block, x)
    logits = F.layer_norm(x, (WIDTH,), p["norm"]) @ p["head"]
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def params(layers: int = 2) -> Any:
    g = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=g) * 0.2  # noqa: E731
    block = lambda: {  # noqa: E731
        "norm": make(WIDTH) + 1,
        "norm2": make(WIDTH) + 1,
        "qkv": make(WIDTH, 3 * WIDTH),
        "bias": make(3 * WIDTH),
        "out": make(WIDTH, WIDTH),
        "up": make(WIDTH, 4 * WIDTH),
        "down": make(4 * WIDTH, WIDTH),
    }
    blocks = [block() for _ in range(layers)]
    return {"emb": make(WORDS, WIDTH), "head": make(WIDTH, WORDS), "norm": make(WIDTH) + 1, "layers": blocks}


def batch(rows: int = 8, part: int = 0, parts: int = 1) -> Any:
    """Part number `part` of the rows of a batch."""
    g = torch.Generator().manual_seed(2)
    whole = {name: torch.randint(0, WORDS, (rows, LENGTH), generator=g) for name in ("x", "y")}
    return {name: x.chunk(parts)[part].contiguous() for name, x in whole.items()}


def step(*transforms: Any, rules: Any = None, **options: Any) -> Any:
    """A step with these transforms, and tensor parallel."""
    return fz.compose(*transforms)(
        fz.tensor_parallel(fz.train_step(loss_fn, OPTIMIZER), rules=rules or RULES, **options)
    )


def evaluated(step: Any, mesh: AbstractMesh, params: Any, *arguments: Any) -> list[Any]:
    """The results of an evaluation on every rank of a simulated mesh. `arguments`: of the global batch."""
    axes, ranks = zero_of(step, mesh).batch_axes, ranks_of(mesh)
    part = lambda rank, x: x.chunk(mesh.axis_size(axes))[rank.index(axes)] if axes else x  # noqa: E731
    parts = [tree.map(lambda x, rank=rank: part(rank, x), arguments) for rank in ranks]
    lowered = fz.lower(step, mesh, params, parts[0])
    simulation = Simulation(lowered, ranks)
    ran = simulation.run(simulation.shards(dict(tree.with_paths(params, "params"))), parts)
    return [tree.unflatten(lowered.structure, [x.values[name] for name in x.program.outputs]) for x in ran]
