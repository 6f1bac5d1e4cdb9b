"""Gathers finer than a block: a function that reads large parameters becomes pieces that each read few of them.

A block is the unit of tracing, of rematerialisation and, by default, of gathering. Here each function is cut where it
first reads the next large parameter, or makes the next large gradient (fzero/trace/segments.py). What a piece reads is
gathered for it alone, and what gradients it makes are reduced right behind it. So a backward that computes its forward
again gathers each parameter twice, and what lies between the pieces of one function is there only while they run. The
largest parameter of a single operation alone bounds how fine it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fzero.errors import FzeroValueError
from fzero.passes.pieces import Groups, calls
from fzero.passes.zero import Zero
from fzero.program.ir import Line, Program, local_bytes
from fzero.program.lines import Functions
from fzero.program.names import Names
from fzero.trace.segments import Pieces, by_leaves
from fzero.transforms.base import find
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.shard import ShardParams
from fzero.units import size

NOTE = "gathers: "
"""The beginning of the remark about it in a program's header."""
SMALL = 16
"""A parameter of no more than this part of the bytes that may be gathered at once does not count."""


@dataclass(frozen=True)
class Gathers:
    """The gathers of a program in parts: bytes at once, and the leaves that come to their readers."""

    at_most: int
    leaves: frozenset[str]


def asked_bytes(transforms: tuple[object, ...]) -> int:
    """The bytes at once that a step asks for, 0 if it leaves them open."""
    asked = [t.gather_bytes for t in transforms if isinstance(t, ShardParams) and t.gather_bytes is not None]
    return min(asked, default=0)


def gathers_of(program: Program, zero: Zero, at_most: int) -> Gathers | None:
    """The gathers that are wanted of a program, None if as they are.

    Args:
        program: before it is spread over the mesh.
        zero: the demands of its parallel transforms.
        at_most: bytes at once, 0 for all of a function.

    Raises:
        FzeroValueError: the step asks for it, and keeps what is gathered.
    """
    asked = asked_bytes(program.transforms)
    at_most = asked or at_most
    leaves = frozenset(_coming(program, zero)) if at_most else frozenset()
    if asked and _stay_whole(program, zero):
        what = "gather_bytes does nothing: the parameters of a stage stay whole until its last micro-batch"
        raise FzeroValueError("shard_params", what, fix='fz.pipeline(gather="micro"), or leave gather_bytes out')
    return Gathers(at_most, leaves) if leaves else None


def limits(program: Program, zero: Zero) -> list[int]:
    """The bytes at once that a budget may choose where nothing else fits, the most first: half of the function that
    reads most, and the largest parameter."""
    if asked_bytes(program.transforms):
        return []
    read = _bytes_read(program, frozenset(_coming(program, zero)))
    most = max((sum(x.values()) for x in read), default=0)
    least = max((n for x in read for n in x.values()), default=0)
    return [n for n in dict.fromkeys((most // 2, least)) if least <= n < most]


def rewrite(program: Program, how: Gathers) -> Program:
    """The program whose functions read so many bytes of leaves at once, or those of one leaf."""
    values, sources = program.values_by_name, _sources(program, how.leaves)
    gradients = _gradients(program, how.leaves)
    groups, functions, names = Groups(), Functions(program.functions), Names(program.values())
    bytes_of = lambda a: local_bytes(values[a], program.mesh)  # noqa: E731
    counts = lambda a: SMALL * bytes_of(a) > how.at_most  # noqa: E731
    of_group: dict[int | str, tuple[dict[str, int], dict[str, int]]] = {}  # what each function reads, and makes
    for line in filter(_may_be_cut, program.lines):
        read, made = of_group.setdefault(Groups.of(line), ({}, {}))
        read.update((sources[a], bytes_of(a)) for a in line.args if a in sources)
        made.update((v.name, bytes_of(v.name)) for v in line.out if v.name in gradients)
    large = {of for of, x in of_group.items() if max(sum(n.values()) for n in x) > how.at_most}
    cut: dict[tuple[str, frozenset[int], frozenset[int]], Pieces | None] = {}
    casts = {x.args[0]: x for x in program.lines if x.op == "cast" and x.out[0].name in gradients and len(x.args) == 1}
    lines, moved, told = list[Line](), set[int](), dict[str, int]()
    for line in program.lines:
        if id(line) in moved:
            continue
        made = [line]
        if _may_be_cut(line) and Groups.of(line) in large:
            read = {i: bytes_of(a) for i, a in enumerate(line.args) if a in sources and counts(a)}
            out = {i: bytes_of(v.name) for i, v in enumerate(line.out) if v.name in gradients and counts(v.name)}
            key = line.fn, frozenset(read), frozenset(out)
            if key not in cut:
                cut[key] = by_leaves(program.functions[line.fn].graph, read, out, how.at_most)
            if (pieces := cut[key]) is not None:
                told[line.fn] = len(pieces.steps)
                args = [values[a] for a in line.args]
                made = calls(line, args, pieces, functions, names, lambda n, fn=line.fn: f"{fn}_part{n}")
            if pieces is not None or line.segment.count > 1:
                made = [x.saying(segment=x.segment._replace(alone=True)) for x in made]
        for piece in made:
            groups.add(line, [len(lines)])
            lines.append(piece)
            behind = [casts[v.name] for v in piece.out if v.name in casts] if piece is not line else []
            moved.update(map(id, behind))
            lines += behind
    groups.number(lines)
    used = {x.fn for x in lines if x.fn}
    kept = {name: f for name, f in functions.by_name.items() if name in used}
    note = f"{NOTE}at most {size(how.at_most)} of a function's parameters at once"
    path, most = largest(program, how.leaves)
    note += f", no fewer than {path} alone takes, {size(most)}" if most >= how.at_most else ""
    note += f": {', '.join(f'{fn} in {n} parts' for fn, n in told.items())}" if told else ", as without it"
    return replace(program, lines=tuple(lines), functions=kept, notes=(*program.notes, note))


def largest(program: Program, leaves: frozenset[str]) -> tuple[str, int]:
    """The one of these leaves that takes most where it is read, and its bytes there."""
    read = {path: n for x in _bytes_read(program, leaves) for path, n in x.items()}
    return max(read.items(), key=lambda x: x[1], default=("", 0))


def _coming(program: Program, zero: Zero) -> Iterator[str]:
    """The leaves that come to the functions that read them: gathered, or from another tier."""
    whole = _stay_whole(program, zero)
    for leaf in program.leaves.values():
        if leaf.role in ("params", "compute"):
            param = program.leaves[leaf.master]
            along = [axis for axis in param.layout.axes[: len(param.layout.dims)] if axis in zero.computed]
            gathered = not whole and any(axis not in along for axis in zero.params(param))
            tier = leaf.layout.tier
            if gathered or tier == "disk" or (tier == "host" and not program.mesh.unified_memory):
                yield leaf.path


def _stay_whole(program: Program, zero: Zero) -> bool:
    """Whether parameters are gathered for all micro-batches of a pipeline together."""
    spec = find(program.transforms, Pipeline)
    return spec is not None and spec.gather == "step" and zero.stages is not None


def _bytes_read(program: Program, leaves: frozenset[str]) -> list[dict[str, int]]:
    """The bytes of the leaves that each call reads."""
    sources, values = _sources(program, leaves), program.values_by_name
    groups: dict[int | str, dict[str, int]] = {}
    for line in filter(_may_be_cut, program.lines):
        read = groups.setdefault(Groups.of(line), {})
        read.update((sources[a], local_bytes(values[a], program.mesh)) for a in line.args if a in sources)
    return [*groups.values()]


def _may_be_cut(line: Line) -> bool:
    own = bool(line.writes) or line.of_sums or line.scales or line.by == "optimizer"
    return line.op == "call" and bool(line.out) and not own


def _sources(program: Program, leaves: frozenset[str]) -> dict[str, str]:
    """The leaf that each value is which comes to its readers: itself, or a cast of it."""
    found = {path: path for path in leaves}
    for line in program.lines:
        if line.op == "cast" and line.args[0] in found:
            found[line.out[0].name] = line.args[0]
    return found


def _gradients(program: Program, leaves: frozenset[str]) -> set[str]:
    """The values that are gradients of these leaves, and those that casts make them of."""
    masters = {program.leaves[path].master for path in leaves}
    found = {g for path, g in program.grads.items() if path in masters}
    return found | {x.args[0] for x in program.lines if x.op == "cast" and x.out[0].name in found}
