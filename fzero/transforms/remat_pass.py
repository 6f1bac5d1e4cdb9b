"""Splits each block's joint graph into a forward that saves values and a backward that reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.propagation import EndPlacements
from fzero.transforms.dim_sharding_pass import end_placements_of_blocks
from fzero.transforms.joint_split import Choices, Kept, Split
from fzero.transforms.zero_placement import Zero


def rewrite(program: Program, policy: str | float, known: dict[Any, Any], zero: Zero | None = None) -> Program:
    """Splits every block that is called both forward and backward.

    Args:
        program: a base program.
        policy: as in `remat`, except for "full", which splits no block; "auto" is "min_cut".
        known: a cache of facts about the blocks of this program: pass the same dictionary to all rewrites of it.
        zero: how its values are sharded, if they are.
    """
    blocks = _blocks(program, known, zero)
    stay = {op.fn for op, _ in program.walk() if op.block is None or op.block.number not in blocks}
    functions = Functions({name: f for name, f in program.functions.items() if name in stay})
    splits: dict[Choices, Split] = {}
    names: dict[int, dict[str, str]] = {}  # call -> kept node -> value name

    def visit(op: Instruction) -> list[Instruction]:
        if op.block is None or op.block.number not in blocks:
            return [op]
        call, inputs = op.block.number, op.block.inputs
        choices = blocks[call]
        # Layers of the same shapes share one split, and so their two subgraphs are compiled once.
        if choices not in splits:
            splits[choices] = choices.split(_kept(choices, policy), functions)
        split = splits[choices]
        if op.is_forward:
            names[call] = {n: op.out[i].name for n, i in split.reused.items()}
            saved = [Value(f"saved_{call}_{j}", tuple(v.shape), v.dtype) for j, v in enumerate(split.saved.values())]
            names[call].update(zip(split.saved, (v.name for v in saved), strict=True))
            args = tuple(inputs[i] for i in split.forward_inputs)
            return [replace(op, args=args, out=(*op.out, *saved), fn=split.forward, by="remat")]
        args = tuple(inputs[i] for i in split.backward_inputs) + tuple(names[call][n] for n in split.kept)
        return [replace(op, args=args, fn=split.backward, by="remat")]

    return replace(program.map_instructions(visit), functions=functions.by_name)


@dataclass(frozen=True)
class KeptValues:
    """The saved values of each distinct block under a policy. Policies that save the same values give the same
    program."""

    blocks: tuple[Kept, ...]
    policy: str | float = field(compare=False)


def keeps(program: Program, policy: str | float, known: dict[Any, Any], zero: Zero | None = None) -> KeptValues | None:
    """Returns the values that blocks save; None if no block is split. The arguments are those of `rewrite`."""
    if policy == "full":
        return None
    distinct = dict.fromkeys(_blocks(program, known, zero).values())
    return KeptValues(tuple(_kept(choices, policy) for choices in distinct), policy)


def _blocks(program: Program, known: dict[Any, Any], zero: Zero | None) -> dict[int, Choices]:
    """Returns, for each call that runs both forward and backward, in order, the values that can be saved."""
    alive, found = _alive(program), {}
    placements = {} if zero is None else _end_placements(program, known, zero)
    for op, _ in program.walk():
        if (block := op.block) is not None and block.part == "backward":
            key = block.joint, block.grads, alive[block.joint], placements.get(block.number, ())
            if key not in known:
                known[key] = Choices(*key)
            found[block.number] = known[key]
    return found


def _end_placements(program: Program, known: dict[Any, Any], zero: Zero) -> dict[int, tuple[EndPlacements, ...]]:
    key = "end placements", id(program.instructions)
    if key not in known:
        known[key] = program, end_placements_of_blocks(program, zero)  # holding the program keeps its id unique
    return known[key][1]


def _kept(choices: Choices, policy: str | float) -> Kept:
    if isinstance(policy, str):
        return choices.none if policy == "none" else choices.min_cut
    return choices.fraction(policy)


def _alive(program: Program) -> dict[Any, frozenset[int]]:
    """Returns, for each block, the outputs that another block reads in all of its calls. They are kept as that block's
    inputs, so this block can read them at no cost."""
    blocks = [(op, op.block) for op, _ in program.walk() if op.block is not None]
    read = {a for op, _ in blocks for a in op.args}
    alive: dict[Any, frozenset[int]] = {}
    for op, block in blocks:
        if block.part == "forward":
            here = frozenset(i for i, v in enumerate(op.out) if v.name in read)
            # All calls of a block share its two subgraphs, so an output counts only if it is kept in every call.
            alive[block.joint] = alive.get(block.joint, here) & here
    return alive
