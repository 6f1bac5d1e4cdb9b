"""Prints a program: as one reads it, or in full, as it runs.

The printed program is valid Python in columns: the op, the direction of a transfer, and the dtype, shape and placement
of each result. Repeated layers are folded into loops: runs of ops that differ only in their numbers, if each number
increases or decreases evenly. The full form adds the buffers and the `del` statements, folds nothing, and writes the
identifier of each name (`layers_3_qkv` for `layers[3].qkv`): it is exactly the code that runs.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fzero._utils.units import size
from fzero.errors import FzeroTypeError
from fzero.ir.ops import OPS, STARTS, transfer_bytes
from fzero.ir.program import Instruction, Program, repeats
from fzero.ir.value_names import identifier

ROOTS_TRAIN = ("step", "params", "opt_state", "key", "extras", "batch")
ROOTS_EVAL = ("params", "batch")
_WIDTH = 118  # where a statement wraps
_COLUMNS = (80, 100, 120)  # a comment begins at the first of these columns that its statement leaves free
_RESULTS = 4  # of one statement that are printed on one line, if they fit
_LONGEST = 80  # statements in the body of a folded loop


@dataclass(frozen=True)
class Printed:
    """A statement: `out = code`, the type of each result, and a remark. `depth` is its indentation in levels. `ops`:
    the indices, as `Program.walk` counts, of the ops that it stands for: several in a folded loop, none for a `del`.
    """

    depth: int
    code: str
    out: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    remark: str = ""
    ops: tuple[int, ...] = ()

    def text(self) -> str:
        """Returns the statement as one line, without comments."""
        return "    " * self.depth + (f"{', '.join(self.out)} = {self.code}" if self.out else self.code)

    def render(self) -> str:
        """Returns the statement with its comments, and long argument lists wrapped. If its results do not fit on one
        line, each has its own line.
        """
        pad, one_line = "    " * self.depth, self.text().rstrip()
        if not self.types or (len(self.out) <= _RESULTS and len(", ".join(self.out)) <= _WIDTH // 2):
            return "\n".join(_wrapped(one_line, _comment(self.remark, ", ".join(self.types))))
        results = [
            _noted(f"{pad}    {name.rstrip(',')},", _comment("", kind))
            for name, kind in zip(self.out, self.types, strict=True)
        ]
        return "\n".join([f"{pad}(", *results, *_wrapped(f"{pad}) = {self.code}", _comment(self.remark))])


def source(program: Program) -> str:
    """Returns the code that runs: Python source of one function."""
    return "\n".join([_signature(program), *(p.text() for p in _full(program)), _returns(program, full=True)]) + "\n"


def show(program: Program, *, fold: bool = True, full: bool = False) -> str:
    """Returns a program as text: a header with its state and the cost of each transform, then the ops in the order in
    which they run.

    Args:
        program: the program of a lowered or a compiled step: `lowered.program` or `train.program`.
        fold: whether repeated layers are printed as one loop. With False, every op is listed.
        full: whether to print the code exactly as it runs: with the buffer that each op writes, and a `del` after the
            last use of each value. Nothing is folded.

    Raises:
        FzeroTypeError: the argument is not a program.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> program = fz.lower(step, fz.AbstractMesh(data=1), params, batch).program
        >>> print(show(program).splitlines()[0])
        # <lambda> on mesh data=1
    """
    if not isinstance(program, Program):
        fix = "fz.show(train.program) after a step, or fz.show(fz.lower(step, mesh, params, batch).program)"
        raise FzeroTypeError("show", f"prints a program, not {type(program).__name__}", fix=fix)
    body = _full(program) if full else folded(program) if fold else _flat(program.instructions, program, 1)
    lines = [*_header(program), "", _signature(program), *(p.render() for p in body)]
    return "\n".join([*lines, *_wrapped(_returns(program, full), "")]) + "\n"


def folded(program: Program) -> list[Printed]:
    """Returns the statements of a program in the order of the text, with repeated layers folded into loops."""
    return _fold(_flat(program.instructions, program, 1))


def name_of(program: Program) -> str:
    """Returns the name of the only function that a program's source defines."""
    return "train" if any(leaf.role == "step" for leaf in program.leaves.values()) else "evaluate"


def statements(program: Program, full: bool = False) -> list[str]:
    """Returns each op as it is printed, without indentation and comments, in the order of `Program.walk`; with `full`
    as it runs.
    """
    if full:
        return [p.text().strip() for p in _full(program) if p.ops]
    return [_statement(op, program, 0).text() for op, _ in program.walk()]


def _signature(program: Program) -> str:
    name = name_of(program)
    return f"def {name}({', '.join(ROOTS_TRAIN if name == 'train' else ROOTS_EVAL)}):"


def _returns(program: Program, full: bool) -> str:
    names = [identifier(name) if full and name in _made(program) else name for name in program.outputs]
    return f"    return ({', '.join(names)}{',' if len(names) == 1 else ''})"


def _made(program: Program) -> set[str]:
    """Returns the names that the ops of a program assign."""
    return {v.name for op, _ in program.walk() for v in op.out}


def _statement(op: Instruction, program: Program, depth: int, full: bool = False) -> Printed:
    text = OPS[op.op].text(op if full else replace(op, into=()), program)
    out = tuple(v.name for v in op.out)
    types = () if op.op in STARTS else tuple(map(str, op.out))
    return Printed(depth, text.code, (f"{out[0]},",) if text.listed and len(out) == 1 else out, types, text.remark)


def _full(program: Program) -> list[Printed]:
    """Returns the statements of the code that runs."""
    names = {name: identifier(name) for name in _made(program) if not name.isidentifier()}
    rename = lambda text: _NAMES.sub(lambda found: names.get(found[0], found[0]), text)  # noqa: E731
    return [
        replace(p, code=rename(p.code), out=tuple(map(rename, p.out)))
        for p in _flat(program.instructions, program, 1, full=True)
    ]


_NAMES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[A-Za-z_]\w*(?:\[\d+\]|\.[A-Za-z_]\w*)+""")
"""Names that are not identifiers. Strings are matched too, so that nothing in them is taken for a name."""


def _flat(
    ops: Sequence[Instruction],
    program: Program,
    depth: int,
    numbers: Iterator[int] | None = None,
    full: bool = False,
) -> list[Printed]:
    """Returns one statement per op, and in the full form a `del` after the last read of a name. `numbers`: the indices
    of the ops.
    """
    out: list[Printed] = []
    numbers = itertools.count() if numbers is None else numbers
    deletions = _deletions(ops, program) if full else [[] for _ in ops]
    for op, deleted in zip(ops, deletions, strict=True):
        if full and op.body:  # what a loop adds up begins as None
            totals = [v.name for x in op.body if OPS[x.op].outlives for v in x.out]
            out += [Printed(depth, "None", (name,)) for name in totals]
        out.append(replace(_statement(op, program, depth, full), ops=(next(numbers),)))
        if op.body:
            out += _flat(op.body, program, depth + 1, numbers, full)
        out += [Printed(depth, f"del {', '.join(names)}") for names in deleted]
    return out


def _deletions(ops: Sequence[Instruction], program: Program) -> list[list[list[str]]]:
    """Returns for each op the groups of names that are deleted after it. Names that the ops of several micro-batches
    read get a separate `del`.
    """
    readers: dict[str, set[int]] = {}  # the micro-batches whose ops read a name
    for op in ops:
        if op.micro is not None:
            for name in op.args:
                readers.setdefault(name, set()).add(op.micro[0])
    found: list[list[list[str]]] = []
    for op, dead in zip(ops, last_reads(ops, program), strict=True):
        shared = [n for n in dead if len(readers.get(n, ())) > 1] if repeats(op) else []
        found.append([names for names in ([n for n in dead if n not in shared], shared) if names])
    return found


def last_reads(ops: Sequence[Instruction], program: Program) -> list[list[str]]:
    """Returns for each op the names that no later op reads: the program deletes them there."""
    last: dict[str, int] = {}
    named = list(_named(ops))
    for i, names in enumerate(named):
        last.update((name, i) for name in names)
    made = {v.name for op in ops for v in op.out} | {
        v.name for op in ops for x in op.body if OPS[x.op].outlives for v in x.out
    }
    keep = set(program.outputs) | {v.name for op in ops if OPS[op.op].outlives for v in op.out}
    return [[n for n in names if last[n] == i and n in made and n not in keep] for i, names in enumerate(named)]


def _named(ops: Sequence[Instruction]) -> Iterator[list[str]]:
    """Yields the names that each op defines or uses. An accumulation also uses the arguments of its summand, so that
    all micro-batches free them at the same op.
    """
    read: tuple[str, ...] = ()
    for op in ops:
        read = op.args if op.fn and op.micro is not None else read
        yield list(
            dict.fromkeys(
                (*op.args, *(v.name for v in op.out), *_inner_reads(op), *(read if OPS[op.op].in_place else ()))
            )
        )


def _inner_reads(op: Instruction) -> list[str]:
    """Returns the names of the enclosing ops that a loop's body reads."""
    made = {v.name for x in op.body if not OPS[x.op].outlives for v in x.out}
    return [a for x in op.body for a in x.args if a not in made] + [
        v.name for x in op.body if OPS[x.op].outlives for v in x.out
    ]


def _comment(remark: str, types: str = "") -> str:
    """Returns a comment in two columns: the direction of a transfer, then what is said of the op and its results."""
    direction, said = (remark[:3], remark[3:].strip()) if remark[:3] in (">>>", "<<<") else ("", remark)
    return f"{direction:<3} {'  '.join(x for x in (said, types) if x)}".rstrip()


def _noted(code: str, comment: str) -> str:
    if not comment:
        return code
    column = next((column for column in _COLUMNS if len(code) + 2 <= column), 0)
    return f"{code:<{column - 2}}  # {comment}" if column else f"{code}  # {comment}"


def _wrapped(code: str, comment: str) -> list[str]:
    """Returns a statement as lines of readable width, broken at its commas. A comment is placed on the first line."""
    if len(code) <= _WIDTH:
        return [_noted(code, comment)]
    indent = " " * (len(code) - len(code.lstrip()) + 4)
    if code.lstrip().startswith("del "):
        code = f"{indent[4:]}del ({code.lstrip().removeprefix('del ')})"
    assigned = code.find("= ")
    open_at = code.index("(", max(assigned, 0))
    head, rest = code[: open_at + 1], code[open_at + 1 :]
    rest = _INDEX.sub(lambda m: m.group().replace(" ", "\0"), rest)  # not within an index
    body = textwrap.wrap(
        indent + rest, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [_noted(head, comment), *(line.replace("\0", " ") for line in body)]


_INDEX = re.compile(r"\[[^\[\],']*\]")


# --- the header ---


def _header(program: Program) -> list[str]:
    """Returns the header of a printed program in four lines: its name and mesh, its transforms, the bytes of the state
    and of the arenas, and the bytes that each transform sends per step. Remarks of passes follow.
    """
    stored, by_tier = _state(program)
    pools = [f"pool {size(program.pool_bytes)}"] if program.pool_bytes else []
    pools += [f"pool in host memory {size(program.host_pool_bytes)}"] if program.host_pool_bytes else []
    transforms = ", ".join(t.in_program() for t in program.transforms) or "none"
    lines = [
        f"{program.name} on mesh {program.mesh}",
        f"transforms: {transforms}",
        "; ".join([f"stored on each rank: {stored} ({by_tier})", *pools]),
        f"sent per step: {', '.join(_sent(program)) or 'nothing'}",
    ]
    return [f"# {line}" for line in (*lines, *(f"  {note}" for note in program.notes))]


def _state(program: Program) -> tuple[str, str]:
    """Returns the size of the state on each rank, and its sizes by memory tier and role."""
    stored: dict[str, dict[str, int]] = {"device": {}}
    for leaf in program.leaves.values():
        roles = stored.setdefault(leaf.layout.tier, {})
        roles[leaf.role] = roles.get(leaf.role, 0) + leaf.shard_bytes(program.mesh)
    by_tier = [
        ("" if tier == "device" else f"on {tier}: ") + ", ".join(f"{role} {size(n)}" for role, n in roles.items())
        for tier, roles in stored.items()
        if roles
    ]
    return size(sum(n for roles in stored.values() for n in roles.values())), "; ".join(by_tier)


def _sent(program: Program) -> list[str]:
    """Returns the bytes and the number of transfers of each transform, or else of the pass that inserted an op."""
    named: dict[str, list[Any]] = {}
    for spec in program.transforms:
        named.setdefault(spec.name, []).append(spec)
    cost: dict[str, list[int]] = {}
    for specs in named.values():  # those of one name are told apart by their arguments
        cost.update((spec.name if len(specs) == 1 else spec.in_program(), [0, 0]) for spec in specs)
    for op, times in program.walk():
        if op.op in STARTS:
            specs = named.get(op.by, [])
            placed = next((spec.in_program() for spec in specs if len(specs) > 1 and spec.placed(op)), op.by)
            entry = cost.setdefault(placed, [0, 0])
            entry[0] += times
            entry[1] += times * transfer_bytes(op, program.values_by_name, program.mesh)
    return [f"{name} {size(sent)} in {num} transfer{'s' * (num > 1)}" for name, (num, sent) in cost.items() if num]


# --- folding ---

_NUMBER = re.compile(r"(?<![A-Za-z\d])\d+")  # not one that ends a word: `norm1` is a name, `float32` a dtype


def _fold(lines: list[Printed], indices: str = "ij") -> list[Printed]:
    """Returns runs of statements that repeat with evenly changing numbers as loops over the first of `indices`, and
    such runs within them as loops over the next.
    """
    templates = [_NUMBER.sub("#", _all(p)) for p in lines]
    numbers = [[int(x) for x in _NUMBER.findall(_all(p))] for p in lines]
    out: list[Printed] = []
    i = 0
    while i < len(lines):
        best = (0, 0)
        for period in range(1, min(_LONGEST, (len(lines) - i) // 2) + 1):
            if templates[i] == templates[i + period] and not any(
                lines[i + k].code.endswith(":") for k in range(period)
            ):
                count = _repeats(templates, numbers, i, period)
                if count >= 2 and period * count >= 4 and period * (count - 1) > best[0] * (best[1] - 1):
                    best = (period, count)
        period, count = best
        if not period:
            out.append(lines[i])
            i += 1
            continue
        out.append(Printed(lines[i].depth, f"for {indices[0]} in range({count}):"))
        steps = [[b - a for a, b in zip(numbers[i + k], numbers[i + k + period], strict=True)] for k in range(period)]
        body = [
            replace(
                _indexed(lines[i + k], steps[k], indices[0]),
                ops=tuple(n for turn in range(count) for n in lines[i + k + turn * period].ops),
            )
            for k in range(period)
        ]
        out += _fold(body, indices[1:]) if indices[1:] else body
        i += period * count
    return out


def _all(p: Printed) -> str:
    return "\n".join((str(p.depth), p.code, *p.out, *p.types, p.remark))


def _repeats(templates: list[str], numbers: list[list[int]], start: int, period: int) -> int:
    """Returns how often the `period` statements from `start` on repeat, with each number changing by the same amount
    every time.
    """

    def steps(k: int, turn: int) -> list[int]:
        here = start + turn * period + k
        return [b - a for a, b in zip(numbers[here], numbers[here + period], strict=True)]

    count = 1
    while start + (count + 1) * period <= len(templates):
        at = start + count * period
        if templates[start : start + period] != templates[at : at + period]:
            break
        if count > 1 and any(steps(k, count - 1) != steps(k, 0) for k in range(period)):
            break
        count += 1
    return count


def _indexed(p: Printed, steps: list[int], variable: str) -> Printed:
    """Returns a statement of the loop: changing numbers become expressions of its variable, in brackets if they are
    part of a name.
    """
    moving = iter(steps)
    next(moving)  # the depth

    def rewrite(text: str) -> str:
        def expression(match: re.Match[str]) -> str:
            step, number = next(moving), int(match.group())
            if not step:
                return match.group()
            index = variable if abs(step) == 1 else f"{abs(step)} * {variable}"
            return f"{{{number} - {index}}}" if step < 0 else f"{{{index} + {number}}}" if number else f"{{{index}}}"

        marked = _NUMBER.sub(expression, text)
        marked = re.sub(r"_\{([^}]*)\}_(?=[A-Za-z])", r"[\1].", marked)  # layers_3_qkv -> layers[i].qkv
        marked = re.sub(r"_\{([^}]*)\}", r"[\1]", marked)  # layer_3 -> layer[i]
        return re.sub(r"\{([^}]*)\}", r"\1", re.sub(r"(?<=\])_(\d+)", r"[\1]", marked))

    code, out = rewrite(p.code), tuple(rewrite(name) for name in p.out)
    types = tuple(rewrite(kind) for kind in p.types)
    return Printed(p.depth + 1, code, out, types, rewrite(p.remark))
