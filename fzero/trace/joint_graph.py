"""Traces a block separately from the step, once per signature, with its forward and its vjp in one graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.trace.block_body import BlockResults, Body, resolved, where
from fzero.trace.cse import merge_equal
from fzero.trace.functionalization import functional
from fzero.trace.graph_capture import record
from fzero.trace.guards.torch_switches import without_autocast
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import Subgraph, differing_line


def call_block(joint: Joint, call: int, *inputs: torch.Tensor) -> Any:
    """The node of a block's forward in a recorded graph. It is never run: lowering turns it into an op of
    the program."""
    raise AssertionError("a recorded block call is not executable")


def call_vjp(joint: Joint, call: int, *inputs_and_tangents: torch.Tensor) -> Any:
    """The node of a block's backward in a recorded graph. It returns the gradients of the inputs in `joint.diff`, given
    the inputs and the tangents."""
    raise AssertionError("a recorded block call is not executable")


@dataclass(frozen=True, eq=False)
class Joint:
    """One distinct block: its forward and backward in one graph.

    The graph maps `primals_1 ... tangents_1 ...` to the outputs followed by the gradients of the inputs in `diff`.
    """

    name: str  # of its function; distinct blocks may have the same
    graph: Recorded
    num_params: int  # the first inputs are parameters
    num_inputs: int
    num_outputs: int
    diff: tuple[int, ...]  # inputs that get a gradient
    diff_outputs: tuple[int, ...]  # outputs that have a tangent
    structure: tree.TreeSpec  # of the tree that the function returns
    returned: tuple[int, ...]  # for each leaf of that tree: its index among the inputs, followed by the outputs
    # For each input and output: the index of the first one that shares its memory when the function runs eagerly.
    memory: tuple[int, ...]
    # The user's lines with conditions that make the function raise. If there are any, the function has one more output,
    # the flags of these conditions.
    raises: tuple[str, ...] = ()


def _of_results(graph: Recorded) -> Any:
    """The signature of the ops that compute a function's results. Ops without results, such as a check of torch.linalg,
    are left out."""
    merge_equal(graph.graph)
    return Subgraph(graph, graph.inputs, graph.outputs).signature


def trace_joint(
    body: Body,
    name: str,
    num_params: int,
    mode: compat.FakeTensorMode,
    signature: tuple[Any, ...],
    labels: Sequence[str],
    of: Collection[int] | None,
) -> Joint:
    """Traces one distinct block on new fake tensors. This happens outside the outer trace and with no tracer active, so
    that blocks inside this block are inlined. `of` has the outputs that get a backward; None means all outputs that can
    have one."""
    found: list[BlockResults] = []
    diff: tuple[int, ...] = ()
    with mode:
        primals = [torch.empty_strided(s, st, dtype=d, device=at) for s, st, d, at, _ in signature]
        needs = [i for i, (*_, grad) in enumerate(signature) if grad]
        names = [f"primals_{i + 1}" for i in range(len(primals))]

        def forward(*xs: torch.Tensor) -> list[torch.Tensor]:
            found.append(body(xs))
            return found[-1].made

        # The forward is recorded alone first, because only its results tell which outputs can have a tangent. The joint
        # graph runs the function a second time; if it computes something else then, that is an error.
        graph = record(forward, primals, owner=body.owner, names=names, source=body.fn, labels=labels, trained=needs)
        results = found[-1]
        diff_outputs = tuple(i for i, y in enumerate(results.made) if y.requires_grad and (of is None or i in of))
        if diff_outputs:
            tangents = [torch.empty_like(results.made[i]) for i in diff_outputs]  # dense

            def joint(*args: torch.Tensor) -> list[torch.Tensor]:
                nonlocal diff
                ys = forward(*args[: len(primals)])
                if len(ys) != len(results.made) or not all(ys[i].requires_grad for i in diff_outputs):
                    return ys  # it computes something else than before, which is an error below
                with without_autocast():  # PyTorch recommends this for every backward
                    wanted = [ys[i] for i in diff_outputs]
                    grads = torch.autograd.grad(
                        wanted, [args[i] for i in needs], list(args[len(primals) :]), allow_unused=True
                    )
                diff = tuple(i for i, g in zip(needs, grads, strict=True) if g is not None)
                # What reads the gradient of a parameter expects it contiguous, as the parameter is.
                made = {i: resolved(g) for i, g in zip(needs, grads, strict=True) if g is not None}
                return [*ys, *(g.contiguous() if i < num_params else g for i, g in made.items())]

            names += [f"tangents_{i + 1}" for i in range(len(tangents))]
            forward_alone = graph
            graph = record(
                joint,
                [*primals, *tangents],
                owner=body.owner,
                names=names,
                source=body.fn,
                labels=labels,
                trained=needs,
            )
            # The forward part of the joint graph, without the nodes of the backward.
            both = Subgraph(graph, graph.inputs[: len(primals)], graph.outputs[: len(results.made)])
            same = both.signature == _of_results(forward_alone)
            if not same and both.signature != _of_results(functional(forward_alone, body.owner)):
                # A joint graph whose backward writes in place has been functionalized as a whole, so functionalize
                # the forward too before comparing.
                places = differing_line(forward_alone.graph, graph.graph) or where(body.fn)
                raise TraceError(body.owner, "computes a different result each time it is called", places, OTHERWISE)
    diff_outputs = diff_outputs if diff else ()
    made, structure, returned, memory, raises = results
    return Joint(
        name, graph, num_params, len(primals), len(made), diff, diff_outputs, structure, returned, memory, raises
    )


OTHERWISE = (
    "pass what changes as an argument: a tensor, or a number or text where it decides what is computed; draw by "
    "torch.rand in a module, or by fz.random, not by NumPy or Python's random"
)
