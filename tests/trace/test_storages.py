"""Which values share memory, against what torch does: every graph is run on real tensors, and each value's storage
looked up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from models import MODELS, batches, meta

import fzero as fz
from fzero._compat import compat
from fzero.trace.graph_capture import record
from fzero.trace.recorder import Recorded
from fzero.trace.storages import storage_of
from fzero.trace.subgraph import into_buffers, views_of

aten = torch.ops.aten


def views(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    a, b = x.split(2)
    q, k, _ = (y * 2).view(4, 3, 2).permute(1, 0, 2).unbind(0)
    merged = aten._unsafe_view.default(q @ k.T, [16])
    return [
        a.t()[1:],
        b.expand(5, 2, 4),
        k.reshape(8),
        merged,
        merged[:8].view(2, 4) + a,
        *torch.std_mean(y.T),
        x.detach()[None],
    ]


def recorded(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Recorded:
    with compat.FakeTensorMode():
        return record(fn, [torch.empty(s) for s in shapes], owner="test", names=[f"x_{i}" for i in range(len(shapes))])


@functools.cache
def functions() -> dict[str, Recorded]:
    """Those of a training step, blocks and update, and some made for the purpose."""
    step = fz.remat(fz.train_step(MODELS["gpt"].loss, fz.optim.adamw(1e-2)), 0.5)
    program = fz.lower(step, fz.AbstractMesh(data=1), MODELS["gpt"].init, meta(batches(1)[0])).program
    found = {name: into_buffers(f.graph, f.into) for name, f in program.functions.items()}
    return {
        **found,
        "views": recorded(views, (4, 4), (4, 6)),
        "into": into_buffers(recorded(views, (4, 4), (4, 6)), [4]),
    }


def real(graph: Recorded) -> dict[fx.Node, Any]:
    """Every value of a graph on tensors that are there, all of them alive at once."""
    values: dict[fx.Node, Any] = {}

    class Keeping(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    inputs = [torch.zeros(v.shape, dtype=v.dtype) for v in (n.meta["val"] for n in graph.inputs)]
    module = graph.module()
    Keeping(module, garbage_collect_values=False).run(*inputs)
    there = {n.name: v for n, v in values.items()}
    return {
        n: there[n.name] for n in graph.graph.nodes if isinstance(there[n.name], torch.Tensor) and there[n.name].numel()
    }


def test_values_share_memory_as_in_torch() -> None:
    assert any(f.graph.find_nodes(op="call_function", target=aten.copy_.default) for f in functions().values())
    for name, graph in functions().items():
        first: dict[int, fx.Node] = {}  # by the address of a storage: the first value that lies in it
        for node, value in real(graph).items():
            assert storage_of(node) is first.setdefault(value.untyped_storage().data_ptr(), node), f"{name}: {node}"


def test_views_of_an_input_are_those_that_share_its_memory() -> None:
    graph = functions()["views"]
    for x in graph.inputs:
        values, found = real(graph), views_of(graph.graph, {x})
        where = values[x].untyped_storage().data_ptr()
        assert {n for n in values if n in found} == {
            n for n, v in values.items() if n is not x and v.untyped_storage().data_ptr() == where
        }
    assert not views_of(graph.graph, set())
