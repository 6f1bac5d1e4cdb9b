"""Has blocks compute the rows of experts in two halves, where `expert_parallel(chunks=2)` asks for it.

Ranks exchange one half while they compute with the other. Acts before what is recomputed is chosen, so that each half
is kept, or not, by itself.
"""

from __future__ import annotations

from dataclasses import replace

from fzero.boxes import Dim
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
    """The program whose blocks have halves."""
    spec = spec_of(zero)
    assert spec is not None
    places = expected(program, spec, zero)
    functions, joints = dict(program.functions), dict[Joint, Joint]()
    halved: dict[str, Recorded] = {}

    def visit(line: Line) -> list[Line]:
        block = line.block
        if block is None:
            return [line]
        if line.fn not in halved:
            of = [i for i, a in enumerate(line.args) if isinstance(places.get(a), Dim)]
            halved[line.fn] = in_halves(program.functions[line.fn].graph, of)
            functions[line.fn] = replace(functions[line.fn], graph=halved[line.fn])
        if block.joint not in joints:
            of = [i for i, a in enumerate(block.inputs) if isinstance(places.get(a), Dim)]
            joints[block.joint] = replace(block.joint, graph=in_halves(block.joint.graph, of))
        return [line.saying(block=replace(block, joint=joints[block.joint]))]

    return replace(program.map_lines(visit), functions=functions)
