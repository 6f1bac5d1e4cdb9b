"""A checkpoint saved under any layout is read under any other, to the bit.

The table has the ways in which transforms shard a state: flat over one axis or several, along dims, by experts, by
pipeline stages, on host memory, and combinations of these. The ranks of a save are threads, and the ranks of a read
follow each other, all in this process. Real processes save and restore in test_checkpoints.py, and once for each
transform in its file.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuts import cut_dims
from pieces import of_experts
from safetensors.torch import load_file
from test_checkpoints import as_ranks, meshes, same, save_as

import fzero as fz
from fzero import checkpoint, optim, tree
from fzero.compiler.state_slots import KEY, STEP
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.layout import Leaf, leaf_of, place, shard
from fzero.sharding.placements import Shard

WIDTH, HIDDEN, WORDS, EXPERTS = 7, 12, 30, 6  # sizes that no mesh divides, except where a transform needs one that does
BOTH = ("data", "node")


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + torch.tanh(F.layer_norm(x, (WIDTH,), p["norm"]) @ p["up"] + p["bias"]) @ p["down"] * p["scale"]
    weights, chosen = (x @ p["router"]).softmax(-1).topk(2, -1)
    rows, back = fz.experts.dispatch(x, chosen, weights, num_experts=EXPERTS, capacity=EXPERTS / 2)
    rows = fz.experts.matmul(F.silu(fz.experts.matmul(rows, p["expert_up"], back)), p["expert_down"], back)
    return x + fz.experts.combine(rows, back)


def loss_fn(p: Any, batch: torch.Tensor) -> torch.Tensor:
    x = p["embedding"][batch]
    for block in p["layers"]:
        x = layer(block, x)
    return F.cross_entropy(x @ p["head"].T, batch)


@functools.cache
def whole_state() -> fz.State:
    """A state whose every element is different: random parameters, the head tied to the embedding, random moments."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731

    def block() -> dict[str, torch.Tensor]:
        dense = {"up": draw(WIDTH, HIDDEN), "bias": draw(HIDDEN), "down": draw(HIDDEN, WIDTH), "norm": draw(WIDTH)}
        experts = {"expert_up": draw(EXPERTS, WIDTH, 5), "expert_down": draw(EXPERTS, 5, WIDTH)}
        return {**dense, "scale": draw(), "router": draw(WIDTH, EXPERTS), **experts}

    embedding = draw(WORDS, WIDTH)
    params = {"embedding": embedding, "head": embedding, "layers": [block() for _ in range(4)]}
    state = PLAIN.init(params, fz.random.key(3))
    drawn: dict[int, torch.Tensor] = {}
    of_ties = lambda x: drawn.setdefault(id(x), draw(*x.shape) if x.is_floating_point() else x + 5)  # noqa: E731
    return state._replace(step=torch.tensor(5), opt_state=tree.map(of_ties, state.opt_state))


PLAIN = fz.train_step(loss_fn, optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)))

COLUMNS: dict[str, Any] = {"up": 1, "bias": 0, "down": 0}
STAGED = [fz.accumulate(2, schedule="layerwise"), fz.pipeline()]
GROUPS = {"up": Shard(1, 3), "bias": Shard(0, 3), "down": Shard(0)}
LAYOUTS: dict[str, tuple[list[Any], dict[str, int]]] = {
    "one_rank": ([], {"data": 1}),
    "zero_0": ([fz.data_parallel()], {"data": 2}),
    "zero_1": ([fz.shard_opt_state()], {"data": 2}),
    "zero_2": ([fz.shard_grads()], {"data": 3}),
    "zero_3": ([fz.shard_params()], {"data": 3}),
    "zero_3_of_5": ([fz.shard_params(), fz.mixed_precision("bf16")], {"data": 5}),
    "some_parameters": ([fz.shard_params(where=lambda path, leaf: leaf.dim() > 1)], {"data": 2}),
    "two_axes": ([fz.shard_params(axis=BOTH)], {"node": 2, "data": 2}),
    "node_first": ([fz.shard_params(axis=("node", "data"))], {"node": 2, "data": 3}),
    "state_over_more": ([fz.shard_params(), fz.shard_opt_state(axis=BOTH)], {"node": 2, "data": 2}),
    "hierarchical": ([fz.shard_params(axis=BOTH), fz.hierarchical(), fz.accumulate(2)], {"node": 2, "data": 2}),
    "replicated": ([fz.shard_params(), fz.data_parallel(axis="replica")], {"replica": 2, "data": 2}),
    "redundant": ([fz.shard_params(), fz.redundant()], {"data": 3}),
    "host": ([fz.offload("cpu", ("params", "opt_state"))], {"data": 1}),
    "host_zero_3": ([fz.shard_params(), fz.offload("cpu", "opt_state")], {"data": 2}),
    "tensor": ([fz.tensor_parallel(rules={**COLUMNS, "embedding": 0, "head": 0})], {"model": 2}),
    "tensor_of_3": ([fz.tensor_parallel(rules=COLUMNS, sequence=False)], {"model": 3}),
    "tensor_zero_3": ([fz.tensor_parallel(rules=COLUMNS), fz.shard_params()], {"data": 2, "model": 2}),
    "expert": ([fz.expert_parallel(where=of_experts)], {"expert": 3}),
    "expert_zero_3": (
        [fz.expert_parallel(where=of_experts), fz.shard_params(axis=("expert", "data"))],
        {"data": 2, "expert": 2},
    ),
    "pipeline": (STAGED, {"pipe": 2}),
    "pipeline_of_4": ([fz.accumulate(4, schedule="layerwise"), fz.pipeline(schedule="zb")], {"pipe": 4}),
    "pipeline_interleaved": ([STAGED[0], fz.pipeline(schedule="interleaved", chunks=2)], {"pipe": 2}),
    "pipeline_tensor_zero_3": (
        [*STAGED, fz.tensor_parallel(rules=COLUMNS), fz.shard_params()],
        {"data": 2, "pipe": 2, "model": 2},
    ),
    # boxes that no transform of today asks for: groups of columns, two cuts of one dim, another order of axes
    "groups": (
        [cut_dims("model", **GROUPS), fz.shard_opt_state(), fz.data_parallel(axis="model")],
        {"model": 2, "data": 2},
    ),
    "two_cuts": (
        [cut_dims("model", **GROUPS), cut_dims("data", up=Shard(1, 3)), fz.shard_params(axis=("data", "model"))],
        {"data": 2, "model": 2},
    ),
    "rows": (
        [cut_dims("model", expert_up=Shard(0), expert_down=Shard(0), down=Shard(0)), fz.data_parallel(axis="model")],
        {"model": 6},
    ),
}


@functools.cache
def leaves(layout: str) -> dict[str, Leaf]:
    """How each leaf of the state is stored under a layout, by its name in a checkpoint."""
    transforms, axes = LAYOUTS[layout]
    whole = whole_state()
    batch = torch.arange(24) % WORDS
    lowered = fz.lower(fz.compose(*transforms)(PLAIN), AbstractMesh(unified_memory=False, **axes), whole.params, batch)
    assert lowered.opt_state is not None
    in_order = [STEP, *lowered.params.leaves, *lowered.opt_state.leaves, KEY]
    return dict(zip(tree.names(whole), in_order, strict=True))


def shards(layout: str, mesh: Mesh) -> fz.State:
    """The state as a rank holds it."""
    whole, made = whole_state(), {}
    flat, structure = tree.flatten(whole)
    for leaf, x in zip(leaves(layout).values(), flat, strict=True):
        made.setdefault(id(x), place(shard(x, leaf, mesh), leaf, mesh))  # tied parameters are one tensor
    return tree.unflatten(structure, [made[id(x)] for x in flat])


@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_checkpoint_of_any_layout_is_read_under_any_other(
    saved: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Without --full, each is read under a quarter of them."""
    names = [*LAYOUTS]
    everything = request.config.getoption("--full") or request.config.getoption("--exhaustive")
    others = names if everything else [x for i, x in enumerate(names) if (names.index(saved) // 4 + i) % 4 == 0]
    states = [shards(saved, mesh) for mesh in meshes(**LAYOUTS[saved][1])]
    done = as_ranks(len(states), lambda r: save_as(r, tmp_path / "saved", states[r.rank]))
    assert all(isinstance(path, Path) for path in done), done
    index = checkpoint.describe(done[0])
    checkpoint.verify(done[0])
    stored = dict(zip(tree.names(whole_state()), tree.leaves(whole_state()), strict=True))
    for read in others:
        wanted, axes = leaves(read), LAYOUTS[read][1]
        checkpoint.check(index, {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()})
        for mesh in meshes(**axes):
            got = checkpoint.read(index, wanted, mesh)
            for name, leaf in wanted.items():
                assert same(got[name], shard(stored[name], leaf, mesh)), (read, mesh.rank, name)
                assert leaf_of(got[name]) == (leaf, mesh)
    checkpoint.export(done[0], tmp_path / "exported")
    exported = load_file(os.fspath(tmp_path / "exported" / "model.safetensors"))
    untied = {name for name in stored if name.startswith("params.")} - {"params.head"}  # the embedding, exported once
    assert {f"params.{name}" for name in exported} == untied
    assert all(same(x, stored[f"params.{name}"]) for name, x in exported.items())
