"""Shortens Inductor's Python code around the kernels of a GPU. From the second call of an artifact on, its wrapper
layers are skipped, and one comparison with the arguments of the first call replaces the checks of each argument.

The host launches some 2,500 kernels in a step of 64 layers, so each Python operation around a launch counts. A call
that is profiled, under autocast, on another GPU or with other layouts goes through the full artifact.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch

from fzero._compat import compat
from fzero.runtime.build.cpu.cpp_kernels import NotPlain, inputs_and_body
from fzero.runtime.build.tracebacks import compiled

logger = logging.getLogger("fzero")
_TRIES = 3  # calls in which to look for the code; profiled calls do not count, since Triton keeps no launcher in them


def shortened(name: str, artifact: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an Inductor artifact of a subgraph so that its layers are skipped from the second call on. If its layers do
    more than check arguments, it is called unchanged.

    Args:
        name: the name of the subgraph, for tracebacks and the log.
        artifact: made by `compat.inductor_compile` or `compat.load_artifact`.
    """
    tries, short = _TRIES, None

    def call(*args: torch.Tensor) -> Any:
        nonlocal tries, short
        if short is not None:
            return short(*args)
        # A profiler must see the calls that the full artifact makes.
        if not tries or compat.surroundings()["profiled"]():
            return artifact(*args)
        tries -= 1
        results, code = compat.watched(artifact, args)
        if code is not None:
            try:
                short, tries = _function(name, code, artifact, args), 0
            except NotPlain as why:
                logger.info("%s is called through all layers of Inductor's, because its code contains %s", name, why)
                tries = 0
        return results

    return call


def _function(
    name: str, code: compat.ArtifactCode, artifact: Callable[..., Any], args: tuple[torch.Tensor, ...]
) -> Callable[..., Any]:
    launchers = {kernel: run for kernel, x in code.names.items() if (run := compat.launcher_of(x)) is not None}
    text = short_text(code.text, launchers, code.writes, code.aligned)
    names = {
        **code.names,
        **{f"launch_{kernel}": run for kernel, run in launchers.items()},
        **compat.surroundings(),
        "alike": compat.alike(args),
        "wrote": torch.autograd.graph.increment_version,
        "whole": artifact,
    }
    return compiled(text, f"function {name}", names, "call")


def short_text(text: str, launchers: Collection[str], writes: Collection[int], aligned: Collection[int]) -> str:
    """Returns the source of the function in Inductor's module `text`, without the parts that need not run at each call.

    Removed are assertions on arguments, whose layouts are compared at once; the switch to the device, which is already
    the current one; and each query of the current stream except the first. Assertions on results of operators that
    Inductor did not generate stay.

    Args:
        text: the module.
        launchers: names of the kernels that the text calls as `launch_NAME`.
        writes, aligned: as in `compat.ArtifactCode`.

    Raises:
        NotPlain: the code has an unknown form, has parts that are called separately, or is for several devices.
    """
    inputs, body = inputs_and_body(ast.parse(text))
    shorter = _Shorter(launchers)
    body = [n for statement in body for n in shorter.several(statement)]
    # `self` in the body means that Inductor split the graph into partitions, which are methods of its runner.
    if len(shorter.devices) > 1 or any(isinstance(n, ast.Name) and n.id == "self" for x in body for n in ast.walk(x)):
        raise NotPlain("several devices or parts")
    given = ", ".join(inputs)
    unlike = ["profiled()", "autocast()", *(f"gpu() != {i}" for i in shorter.devices), f"not alike({given})"]
    if aligned:
        # One test for all of them: the bitwise or of the addresses is aligned exactly if every address is.
        unlike.append(f"({' | '.join(f'{inputs[i]}.data_ptr()' for i in aligned)}) % {compat.ALIGNMENT}")
    lines = [f"def call({given}):", f"    if {' or '.join(unlike)}:", f"        return whole({given})"]
    if writes:
        # As the full artifact does: autograd and other users of version counters must see the writes.
        lines.append(f"    wrote(({', '.join(inputs[i] for i in writes)},))")
    module = ast.parse("\n".join(lines))
    (call,) = module.body
    assert isinstance(call, ast.FunctionDef)
    call.body += body
    return ast.unparse(ast.fix_missing_locations(module))


class _Shorter(ast.NodeTransformer):
    """Rewrites statements as `short_text` describes.

    Attributes:
        devices: the GPUs that the statements name.
    """

    def __init__(self, launchers: Collection[str]):
        self._launchers = launchers
        self._asked = set[str]()
        self.devices = set[int]()

    def several(self, node: ast.stmt) -> list[ast.stmt]:
        found = self.visit(node)
        return found if isinstance(found, list) else [] if found is None else [found]

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        match node.items:
            case [ast.withitem(ast.Call(ast.Attribute(attr="_DeviceGuard"), [ast.Constant(int(index))]), None)]:
                self.devices.add(index)
                return node.body
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        match node.value:
            case ast.Call(ast.Name("assert_size_stride"), [*_, ast.Constant("input")]):
                return None
            case ast.Call(ast.Attribute(attr="set_device"), [ast.Constant(int(index))]):
                self.devices.add(index)
                return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        match node.value:
            case ast.Call(ast.Name("get_raw_stream")):
                if (text := ast.unparse(node)) in self._asked:
                    return None
                self._asked.add(text)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Name(kernel), "run"), keywords=[ast.keyword("stream")]):
                if kernel in self._launchers:
                    node.func = ast.Name(f"launch_{kernel}", ast.Load())
        return node
