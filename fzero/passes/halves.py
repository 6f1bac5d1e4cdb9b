"""Has blocks compute the rows of experts in two halves, where `expert_parallel(chunks=2)` asks for it.

Ranks exchange one half while they compute with the other. Acts before what is recomputed is chosen, so that each half
is kept, or not, by itself.
"""

from __future__ import annotations

from dataclasses import replace

from fzero.boxes import Dim
from fzero.errors import FzeroValueError
from fzero.passes.cut import expected
from fzero.passes.zero import Zero
from fzero.program.ir import Line, Program
from fzero.trace.halves import in_halves
from fzero.trace.joint import Joint
from fzero.trace.recorder import Recorded
from fzero.transforms.expert import ExpertParallel


def spec_of(zero: Zero) -> ExpertParallel | None:
    """The transform that asks for halves on this mesh."""
    return next((spec for spec in zero.cutting if isinstance(spec, ExpertParallel) and spec.chunks == 2), None)


def rewrite(program: Program, zero: Zero) -> Program:
    """The program whose blocks have halves.

    Raises:
        FzeroValueError: none has rows of experts.
    """
    spec = spec_of(zero)
    assert spec is not None
    places = expected(program, spec, zero)
    functions, joints = dict(program.functions), dict[Joint, Joint]()
    halved: dict[str, Recorded | None] = {}

    def visit(line: Line) -> list[Line]:
        block = line.block
        if block is None:
            return [line]
        if line.fn not in halved:
            of = [i for i, a in enumerate(line.args) if isinstance(places.get(a), Dim)]
            graph = halved[line.fn] = in_halves(program.functions[line.fn].graph, of)
            if graph is not None:
                functions[line.fn] = replace(functions[line.fn], graph=graph)
        if block.joint not in joints:
            of = [i for i, a in enumerate(block.inputs) if isinstance(places.get(a), Dim)]
            joints[block.joint] = replace(block.joint, graph=in_halves(block.joint.graph, of) or block.joint.graph)
        return [line.saying(block=replace(block, joint=joints[block.joint]))]

    program = program.map_lines(visit)
    if not any(halved.values()):
        what = "chunks=2 does nothing: no block multiplies two or more rows by parameters of experts"
        raise FzeroValueError(spec.name, what, fix="mark the function of a layer with fz.block, or leave chunks out")
    return replace(program, functions=functions)
