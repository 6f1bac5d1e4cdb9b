"""Prints a program as valid Python, with the dtype, shape and placement of every result next to it.

The flat form is exactly the code that runs. The folded form prints repeated layers as a loop: runs of ops that differ
only in their numbers, if each number increases or decreases evenly. It is for reading; its names are those of the
flat form with the number in brackets.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fzero._utils.units import size
from fzero.errors import FzeroTypeError
from fzero.ir.ops import OPS, TRANSFERS, transfer_bytes
from fzero.ir.program import Instruction, Program, repeats

ROOTS_TRAIN = ("step", "params", "opt_state", "key", "extras", "batch")
ROOTS_EVAL = ("params", "batch")
_WIDTH, _NOTES = 110, 72  # columns: where a statement wraps, and where remarks begin
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
        """Returns the statement as it runs."""
        return "    " * self.depth + (f"{', '.join(self.out)} = {self.code}" if self.out else self.code)

    def render(self) -> str:
        """Returns the statement as it is read: one result per line if there are more than two, with the types next to
        the results, and long argument lists wrapped.
        """
        pad = "    " * self.depth
        note = self.remark
        if len(self.out) <= 2:
            note = "  ".join(x for x in (self.remark, ", ".join(self.types)) if x)
            head, results = self.text().rstrip(), []
        else:
            head = f"{pad}) = {self.code}"
            results = [
                f"{pad}(",
                *(_noted(f"{pad}    {name},", kind) for name, kind in zip(self.out, self.types, strict=True)),
            ]
        return "\n".join([*results, *_wrapped(head, note)])


def source(program: Program) -> str:
    """Returns the code that runs: Python source of one function, in the flat form."""
    return (
        "\n".join(
            [_signature(program), *(p.text() for p in _flat(program.instructions, program, 1)), _returns(program)]
        )
        + "\n"
    )


def show(program: Program, *, fold: bool = True) -> str:
    """Returns a program as text: a header with the cost of each transform, then the ops in the order in which they run.

    Args:
        program: the program of a lowered or a compiled step: `lowered.program` or `train.program`.
        fold: whether repeated layers are printed as one loop. With False, every op that runs is listed.

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
    header = [f"# {line}".rstrip() for line in _header(program)]
    body = _flat(program.instructions, program, 1)
    return (
        "\n".join(
            [
                *header,
                "",
                _signature(program),
                *(p.render() for p in (_fold(body) if fold else body)),
                *_wrapped(_returns(program), ""),
            ]
        )
        + "\n"
    )


def folded(program: Program) -> list[Printed]:
    """Returns the statements of a program in the order of the text, with repeated layers folded into loops."""
    return _fold(_flat(program.instructions, program, 1))


def name_of(program: Program) -> str:
    """Returns the name of the only function that a program's source defines."""
    return "train" if any(leaf.role == "step" for leaf in program.leaves.values()) else "evaluate"


def statements(program: Program) -> list[str]:
    """Returns each op as it runs, without indentation, in the order of `Program.walk`."""
    return [_statement(op, program, 0).text() for op, _ in program.walk()]


def _signature(program: Program) -> str:
    name = name_of(program)
    return f"def {name}({', '.join(ROOTS_TRAIN if name == 'train' else ROOTS_EVAL)}):"


def _returns(program: Program) -> str:
    return f"    return ({', '.join(program.outputs)}{',' if len(program.outputs) == 1 else ''})"


def _statement(op: Instruction, program: Program, depth: int) -> Printed:
    text, out = OPS[op.op].text(op, program), tuple(v.name for v in op.out)
    types = () if op.op in TRANSFERS else tuple(map(str, op.out))
    return Printed(depth, text.code, (f"{out[0]},",) if text.listed and len(out) == 1 else out, types, text.remark)


def _flat(
    ops: Sequence[Instruction], program: Program, depth: int, numbers: Iterator[int] | None = None
) -> list[Printed]:
    """Returns one statement per op, and a `del` after the last read of a name. Names that the ops of several
    micro-batches read get a separate `del`. `numbers`: the indices of the ops.
    """
    out: list[Printed] = []
    numbers = itertools.count() if numbers is None else numbers
    readers: dict[str, set[int]] = {}  # the micro-batches whose ops read a name
    for op in ops:
        if op.micro is not None:
            for name in op.args:
                readers.setdefault(name, set()).add(op.micro[0])
    for op, dead in zip(ops, last_reads(ops, program), strict=True):
        if op.body:
            totals = [v.name for x in op.body if OPS[x.op].outlives for v in x.out]
            out += [Printed(depth, "None", (name,)) for name in totals]
            out.append(replace(_statement(op, program, depth), ops=(next(numbers),)))
            out += _flat(op.body, program, depth + 1, numbers)
        else:
            out.append(replace(_statement(op, program, depth), ops=(next(numbers),)))
        shared = [n for n in dead if len(readers.get(n, ())) > 1] if repeats(op) else []
        for names in ([n for n in dead if n not in shared], shared):
            if names:
                out.append(Printed(depth, f"del {', '.join(names)}"))
    return out


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


def _noted(code: str, note: str) -> str:
    return f"{code:<{_NOTES}}  # {note}" if note else code


def _wrapped(code: str, note: str) -> list[str]:
    """Returns a statement as lines of readable width, broken at its commas. A remark is placed on the first line."""
    if len(code) <= _WIDTH:
        return [_noted(code, note)]
    indent = " " * (len(code) - len(code.lstrip()) + 4)
    if code.lstrip().startswith("del "):
        names = code.lstrip().removeprefix("del ")
        code = f"{indent[4:]}del ({names})"
    open_at = (
        code.index("(", code.index("= ") if " = " in code else 0)
        if not code.lstrip().startswith(")")
        else code.index("(")
    )
    head, rest = code[: open_at + 1], code[open_at + 1 : -1]
    rest = _INDEX.sub(lambda m: m.group().replace(" ", "\0"), rest)  # not within an index
    body = textwrap.wrap(
        rest,
        width=_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [_noted(head, note), *(line.replace("\0", " ") for line in body), indent[4:] + ")"]


_INDEX = re.compile(r"\[[^\[\],']*\]")


def _header(program: Program) -> list[str]:
    """Returns the header of a printed program: the state between steps by memory tier and role, the bytes that each
    transform sends per step, the remarks of passes, and the sizes of the arenas.
    """
    values = program.values_by_name
    cost: dict[str, list[int]] = {}  # by transform spec, or else by the pass that placed an op
    kinds = {name: [t for t in program.transforms if t.name == name] for name in {t.name for t in program.transforms}}
    for op, times in program.walk():
        if op.op in TRANSFERS:
            several = kinds.get(op.by, [])
            specs = [t for t in several if len(several) == 1 or t.placed(op)]
            entry = cost.setdefault(specs[0].in_program() if specs else op.by, [0, 0])
            entry[0] += times
            entry[1] += times * transfer_bytes(op, values, program.mesh)
    rest: dict[str, dict[str, int]] = {"device": {}}
    for leaf in program.leaves.values():
        roles = rest.setdefault(leaf.layout.tier, {})
        roles[leaf.role] = roles.get(leaf.role, 0) + leaf.shard_bytes(program.mesh)
    total = sum(n for roles in rest.values() for n in roles.values())
    here, *away = [(tier, ", ".join(f"{role} {size(n)}" for role, n in roles.items())) for tier, roles in rest.items()]
    out = [f"{program.name} on mesh {program.mesh}"]
    out.append(f"stored on each rank: {size(total)} ({here[1]}{', and' if away else ')'}")
    out += [f"  on {tier}: {roles}{')' if i == len(away) - 1 else ','}" for i, (tier, roles) in enumerate(away)]
    for text in (t.in_program() for t in program.transforms):
        num, sent = cost.pop(text, [0, 0])
        verb = "moves" if text.startswith("offload(") else "sends"
        out.append(f"  {text:<60} {verb} {size(sent)} in {num} transfers per step" if num else f"  {text}")
    for name, (num, sent) in cost.items():
        out.append(f"  {name:<60} sends {size(sent)} in {num} transfers per step")
    out += [f"  {note}" for note in program.notes]
    if program.pool_bytes:
        out.append(f"communication buffers (pool): {size(program.pool_bytes)}")
    if program.host_pool_bytes:
        out.append(f"communication buffers in host memory: {size(program.host_pool_bytes)}")
    return out


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
    return Printed(p.depth + 1, code, out, p.types, p.remark)
