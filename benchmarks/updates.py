"""fzero's updates as functions to be called alone: what the program of a step has for an optimizer, for parameters of
given sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class SignedRoot(NamedTuple):
    mu: Any


def signed_root(lr: float, b1: float = 0.9) -> Any:
    """What a user might write: steps of the signed square root of a momentum."""
    import torch

    import fzero as fz
    from fzero import optim

    def init(params: Any) -> SignedRoot:
        return SignedRoot(fz.tree.map(torch.zeros_like, params))

    def update(grads: Any, state: SignedRoot, params: Any = None) -> tuple[Any, SignedRoot]:
        mu = fz.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        return fz.tree.map(lambda m: -lr * m.sign() * m.abs().sqrt(), mu), SignedRoot(mu)

    return optim.GradientTransformation(init, update)


@dataclass(frozen=True)
class Update:
    """The update of a program: its function, the names of the arguments, and the values of those that are scalars."""

    function: Any
    names: tuple[str, ...]
    scalars: Mapping[str, Any]


def update_of(optimizer: Any, sizes: Sequence[int]) -> Update:
    """The one that `train_step` makes of an optimizer for leaves `w0`, `w1`, … of these sizes, in its first step."""
    import torch

    import fzero as fz
    from fzero.build.build import build

    def loss(params: Any, batch: Any) -> Any:
        return sum((w * batch).sum() for w in params.values())

    params = {f"w{i}": torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    program = fz.lower(
        fz.train_step(loss, optimizer), fz.AbstractMesh(data=1), params, torch.empty((), device="meta")
    ).program
    calls = [line for line, _ in program.walk() if line.op == "call"]
    (update,) = [line for line in calls if line.writes]
    known = {"step": torch.tensor(0), "opt_state.count": torch.tensor(0), "loss_sum": torch.tensor(0.0)}
    for line in calls:
        if line.fn.startswith("scalars") and all(name in known for name in line.args):
            run = build({"f": program.functions[line.fn]}, "eager", fz.make_mesh(device="cpu"))["f"]
            results = run(*(known[name] for name in line.args))
            known |= zip((v.name for v in line.out), results if len(line.out) > 1 else [results], strict=True)
    return Update(
        program.functions[update.fn], update.args, {name: known[name] for name in update.args if name in known}
    )


def in_bf16(update: Update) -> Update:
    """The update with gradients in bfloat16, and with the new parameters in bfloat16 as one more written argument each,
    named `low_w0`, …"""
    import torch
    import torch.fx as fx

    from fzero.program.ir import Function
    from fzero.trace.recorder import Recorded

    aten, graph, recorded = torch.ops.aten, fx.Graph(), update.function.graph
    copies: dict[fx.Node, fx.Node] = {}
    for node in recorded.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    names, last, lows = dict(zip(inputs, update.names, strict=True)), inputs[-1], []
    for node in inputs:
        if names[node].startswith("d_"):
            value = node.meta["val"]
            node.meta = {**node.meta, "val": value.bfloat16()}
            with graph.inserting_after(inputs[-1]):
                up = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
            up.meta["val"] = value
            node.replace_all_uses_with(up, delete_user_cb=lambda user, up=up: user is not up)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and names[node.args[0]].startswith("params"):
            value = node.args[1].meta["val"].bfloat16()
            with graph.inserting_after(last):
                last = graph.placeholder(f"low_{len(lows)}")
            with graph.inserting_after(node):
                down = graph.call_function(aten._to_copy.default, (node.args[1],), {"dtype": torch.bfloat16})
            with graph.inserting_after(down):
                stored = graph.call_function(aten.copy_.default, (last, down))
            for made in (last, down, stored):
                made.meta["val"] = value
            lows.append("low_" + names[node.args[0]].split("'")[1])
    graph.output(())
    writes = *update.function.writes, *range(len(inputs), len(inputs) + len(lows))
    function = Function(f"{update.function.name}_bf16", Recorded(graph, recorded.constants), writes)
    return Update(function, (*update.names, *lows), update.scalars)
