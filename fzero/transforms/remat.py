"""Rematerialization: chooses what a block saves in its forward for its backward. Acts on the program.

In the base program, a block's vjp recomputes its forward from the block's inputs. To save more, the block's joint graph
is split in two (fzero/transforms/joint_split.py): the forward returns saved values in addition to its outputs, and the
vjp takes them. A view of a parameter is never saved, whatever the policy: it would keep the gathered parameter alive.
The last block is not split: its vjp directly follows its forward, and both are one subgraph
(fzero/compiler/fuse_last_block.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fzero._utils.arguments import keywords
from fzero.errors import FzeroValueError
from fzero.ir.from_graph import Functions
from fzero.ir.program import Instruction, Program, Value
from fzero.sharding.propagation import EndPlacements
from fzero.transforms.dim_sharding import end_placements_of_blocks
from fzero.transforms.joint_split import Choices, Kept, Split
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Zero

POLICIES = ("full", "min_cut", "none", "auto")


@dataclass(frozen=True)
class Remat(Transform):
    """The configuration of `remat`."""

    policy: str | float = "min_cut"
    order: ClassVar[int] = 40
    name: ClassVar[str] = "remat"


@keywords
def remat(step: Any = None, policy: str | float = "min_cut") -> Any:
    """Chooses what each block recomputes in its backward.

    The result equals that of the untransformed step, bit for bit on the eager backend: recomputation repeats the same
    operations.

    Args:
        step: a step, or the policy when called without one: `remat("full")`, `remat(0.5)`.
        policy: "full" saves only the inputs of a block and recomputes the rest; "none" saves everything the backward
            reads. "min_cut", also the default of a step without `remat`, saves the cut of the block's graph with the
            fewest bytes whose recomputation is cheap (no matrix product is repeated). A number from 0.0 to 1.0 is a
            share of the bytes (on one rank) that "none" saves in addition to a block's inputs: among the choices that
            save no more than that, the one that recomputes the fewest FLOPs is taken, for each distinct block. 1.0 is
            "none", 0.0 is "full". A larger number never recomputes more. "auto" chooses the share according to the
            memory budget of `fz.compile`, in steps of 1/8; without a budget it is "min_cut".

    Communication: none in addition. With `shard_params`, parameters are gathered again for the backward under any
        policy, except for the last block.
    Memory: "full" holds each block's inputs, and one block's intermediates while its backward runs; a fraction f
        additionally holds at most f times what "none" does. The last block saves nothing under any policy: its forward
        and backward are one subgraph.

    Raises:
        FzeroValueError: an unknown policy, or a number that is not a fraction.

    Papers: Chen et al., Training deep nets with sublinear memory cost, 2016. Kirisame et al., Dynamic tensor
        rematerialization, ICLR 2021, for choosing by cost and size. He and Yu, Transcending runtime-memory tradeoffs in
        checkpointing by being fusion aware, MLSys 2023, for the cut.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*remat("full")(step).transforms)
        remat(policy='full')
    """
    if isinstance(step, (str, int, float)):
        step, policy = None, step
    # True and False are numbers in Python, but no shares.
    if isinstance(policy, (int, float)) and not isinstance(policy, bool):
        if not 0.0 <= policy <= 1.0:
            raise FzeroValueError(
                "remat", f"keeps a share of activation memory, from 0.0 to 1.0, not {policy}", fix="e.g. remat(0.5)"
            )
        policy = float(policy)
    elif policy not in POLICIES:
        raise FzeroValueError(
            "remat",
            f"unknown policy {policy!r}",
            fix=f"one of {', '.join(map(repr, POLICIES))}, or a fraction: remat(0.5)",
        )
    return applied(Remat(policy), step)


# --- the rewrite ---


@dataclass(frozen=True)
class RematOptions:
    """The saved values of each distinct block under a policy. Policies that save the same values give the same program.

    Attributes:
        saved: the saved values of each distinct block.
        policy: as in `remat`, except for "full", which splits no block; "auto" is "min_cut".
        known: a cache of facts about the blocks of a program: pass the same dictionary to all rewrites of it.
        zero: how its values are sharded, if they are.
    """

    saved: tuple[Kept, ...]
    policy: str | float = field(compare=False)
    known: dict[Any, Any] = field(compare=False, repr=False)
    zero: Zero | None = field(compare=False, repr=False)


def remat_options(
    program: Program, policy: str | float, known: dict[Any, Any], zero: Zero | None = None
) -> RematOptions | None:
    """Returns the options of a policy for a base program; None if no block is split."""
    if policy == "full":
        return None
    distinct = dict.fromkeys(_blocks(program, known, zero).values())
    return RematOptions(tuple(_kept(choices, policy) for choices in distinct), policy, known, zero)


def rewrite(program: Program, options: RematOptions) -> Program:
    """Splits every block that is called both forward and backward.

    Precondition: a base program. No op is repeated yet, and no value is sharded.
    """
    blocks, policy = _blocks(program, options.known, options.zero), options.policy
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
