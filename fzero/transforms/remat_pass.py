"""Splits each block's joint graph into a forward that keeps values and a backward that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fzero.ir.from_graph import Functions
from fzero.ir.program import Line, Program, Value
from fzero.sharding.dim_propagation import CutEnds
from fzero.transforms.dim_sharding_pass import cuts_of_blocks
from fzero.transforms.joint_split import Choices, Kept, Split
from fzero.transforms.zero_placement import Zero


def rewrite(program: Program, policy: str | float, known: dict[Any, Any], zero: Zero | None = None) -> Program:
    """Splits every block that is called both forward and backward.

    Args:
        program: a base program.
        policy: as of `remat`, but for "full", which splits none; "auto" is "min_cut".
        known: facts about blocks of this program from earlier rewrites: one dictionary for all rewrites of it.
        zero: how its values are cut, if they are.
    """
    blocks = _blocks(program, known, zero)
    stay = {line.fn for line, _ in program.walk() if line.block is None or line.block.number not in blocks}
    functions = Functions({name: f for name, f in program.functions.items() if name in stay})
    splits: dict[Choices, Split] = {}
    names: dict[int, dict[str, str]] = {}  # call -> kept node -> value name

    def visit(line: Line) -> list[Line]:
        if line.block is None or line.block.number not in blocks:
            return [line]
        call, inputs = line.block.number, line.block.inputs
        choices = blocks[call]
        if choices not in splits:
            splits[choices] = choices.split(_kept(choices, policy), functions)
        split = splits[choices]
        if line.is_forward:
            names[call] = {n: line.out[i].name for n, i in split.reused.items()}
            saved = [Value(f"saved_{call}_{j}", tuple(v.shape), v.dtype) for j, v in enumerate(split.saved.values())]
            names[call].update(zip(split.saved, (v.name for v in saved), strict=True))
            args = tuple(inputs[i] for i in split.forward_inputs)
            return [replace(line, args=args, out=(*line.out, *saved), fn=split.forward, by="remat")]
        args = tuple(inputs[i] for i in split.backward_inputs) + tuple(names[call][n] for n in split.kept)
        return [replace(line, args=args, fn=split.backward, by="remat")]

    return replace(program.map_lines(visit), functions=functions.by_name)


@dataclass(frozen=True)
class KeptValues:
    """The kept values of each distinct block, by a policy. Policies that keep the same make the same program."""

    blocks: tuple[Kept, ...]
    policy: str | float = field(compare=False)


def keeps(program: Program, policy: str | float, known: dict[Any, Any], zero: Zero | None = None) -> KeptValues | None:
    """The values that blocks keep, None if none is split. Args: as of `rewrite`."""
    if policy == "full":
        return None
    distinct = dict.fromkeys(_blocks(program, known, zero).values())
    return KeptValues(tuple(_kept(choices, policy) for choices in distinct), policy)


def _blocks(program: Program, known: dict[Any, Any], zero: Zero | None) -> dict[int, Choices]:
    """The values that can be kept by each call that runs both forward and backward, in order."""
    alive, found = _alive(program), {}
    cuts = {} if zero is None else _cuts(program, known, zero)
    for line, _ in program.walk():
        if (block := line.block) is not None and block.part == "backward":
            key = block.joint, block.grads, alive[block.joint], cuts.get(block.number, ())
            if key not in known:
                known[key] = Choices(*key)
            found[block.number] = known[key]
    return found


def _cuts(program: Program, known: dict[Any, Any], zero: Zero) -> dict[int, tuple[CutEnds, ...]]:
    key = "cuts", id(program.lines)
    if key not in known:
        known[key] = program, cuts_of_blocks(program, zero)  # a program that is held keeps its number
    return known[key][1]


def _kept(choices: Choices, policy: str | float) -> Kept:
    if isinstance(policy, str):
        return choices.none if policy == "none" else choices.min_cut
    return choices.fraction(policy)


def _alive(program: Program) -> dict[Any, frozenset[int]]:
    """For each block the outputs that another block reads, whichever call: they are kept as its input, so the block may
    read them for nothing."""
    blocks = [(line, line.block) for line, _ in program.walk() if line.block is not None]
    read = {a for line, _ in blocks for a in line.args}
    alive: dict[Any, frozenset[int]] = {}
    for line, block in blocks:
        if block.part == "forward":
            here = frozenset(i for i, v in enumerate(line.out) if v.name in read)
            alive[block.joint] = alive.get(block.joint, here) & here
    return alive
