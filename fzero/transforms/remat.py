"""remat: what a block keeps from its forward for its backward. Acts on the program.

In the base program a block's vjp recomputes its forward from the block's inputs. Keeping more is a split of the block's joint
graph in two (fzero/program/split.py): the forward returns saved values beside its outputs, the vjp takes them. What is a view of a parameter is
never kept, whatever the policy: it would keep the gathered parameter alive. The last block is not split: its vjp follows its forward at
once, and both are one function (fzero/program/fuse.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero.errors import FzeroValueError, message
from fzero.program.ir import Line, Program, Value
from fzero.program.split import Choices, Kept, Split
from fzero.program.trace import Functions
from fzero.transforms.base import Transform, applied

POLICIES = ("full", "min_cut", "none", "auto")


@dataclass(frozen=True)
class Remat(Transform):
    policy: str | float = "min_cut"
    order: ClassVar[int] = 40
    name: ClassVar[str] = "remat"


def remat(step: Any = None, policy: str | float = "min_cut") -> Any:
    """Chooses what each block recomputes in its backward.

    Equal to the untransformed step: bit for bit on the eager backend, recomputation repeats the same operations.

    Args:
        step: a step, or the policy when called without one: `remat("full")`, `remat(0.5)`.
        policy: "full" keeps only the inputs of a block and recomputes the rest; "none" keeps everything the backward reads;
            "min_cut", also the default of a step without `remat`, keeps the cut of the block's graph that holds the fewest bytes among those
            whose recomputation is cheap (no matrix product is repeated).
            A number from 0.0 to 1.0 is the share, in bytes, of what "none" keeps beyond a block's inputs: of all that keeps no more, the choice
            that recomputes the fewest FLOPs, for each distinct block. 1.0 is "none", 0.0 is "full". More never recomputes more.
            "auto" leaves the share to the memory budget of `fz.compile`, in steps of 1/16; without a budget it is "min_cut".

    Communication: none of its own. With `shard_params` parameters are gathered again for the backward under any policy, but for the last block.
    Memory: "full" holds each block's inputs, and one block's intermediates while its backward runs; a fraction f holds besides
        at most f times what "none" does. The last block keeps nothing under any policy: its forward and backward are one function.

    Raises:
        FzeroValueError: an unknown policy, or a number that is no fraction.

    Papers: Chen et al., Training deep nets with sublinear memory cost, 2016. Kirisame et al., Dynamic tensor rematerialization, ICLR 2021, for
        choosing by cost and size. He and Yu, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023, for the cut.
    """
    if isinstance(step, (str, int, float)):
        step, policy = None, step
    if isinstance(policy, (int, float)) and not isinstance(policy, bool):
        if not 0.0 <= policy <= 1.0:
            raise FzeroValueError(message("remat", f"keeps a share of activation memory, from 0.0 to 1.0, not {policy}", fix="e.g. remat(0.5)"))
        policy = float(policy)
    elif policy not in POLICIES:
        raise FzeroValueError(message("remat", f"unknown policy {policy!r}", fix=f"one of {', '.join(map(repr, POLICIES))}, or a fraction: remat(0.5)"))
    return applied(Remat(policy), step)


def rewrite(program: Program, policy: str | float, known: dict[Any, Choices] | None = None) -> Program:
    """Splits every block that is called both forward and backward.

    Args:
        program: a base program.
        policy: as of `remat`; "auto" is "min_cut".
        known: what was found out about blocks of this program before: the same dictionary for each rewrite of it.
    """
    if policy == "full":
        return program
    blocks = _blocks(program, {} if known is None else known)
    stay = {line.fn for line, _ in program.walk() if line.attrs.get("call") not in blocks}
    functions = Functions({name: f for name, f in program.functions.items() if name in stay})
    splits: dict[Choices, Split] = {}
    names: dict[int, dict[str, str]] = {}  # call -> kept node -> value name

    def visit(line: Line) -> list[Line]:
        call: Any = line.attrs.get("call")
        if call not in blocks:
            return [line]
        choices = blocks[call]
        if choices not in splits:
            splits[choices] = choices.split(_kept(choices, policy), functions)
        split = splits[choices]
        if not line.attrs["backward"]:
            names[call] = {n: line.out[i].name for n, i in split.reused.items()}
            saved = [Value(f"saved_{call}_{j}", tuple(v.shape), v.dtype) for j, v in enumerate(split.saved.values())]
            names[call].update(zip(split.saved, (v.name for v in saved), strict=True))
            args = tuple(line.attrs["inputs"][i] for i in split.forward_inputs)
            return [replace(line, args=args, out=(*line.out, *saved), fn=split.forward, by="remat")]
        args = tuple(line.attrs["inputs"][i] for i in split.backward_inputs) + tuple(names[call][n] for n in split.kept)
        return [replace(line, args=args, fn=split.backward, by="remat")]

    return replace(program.map_lines(visit), functions=functions.by_name)


def kept(program: Program, policy: str | float, known: dict[Any, Choices]) -> tuple[Kept, ...] | None:
    """What each distinct block keeps, None if none is split. Policies that keep the same make the same program. Args: as of `rewrite`."""
    return None if policy == "full" else tuple(_kept(choices, policy) for choices in dict.fromkeys(_blocks(program, known).values()))


def _blocks(program: Program, known: dict[Any, Choices]) -> dict[int, Choices]:
    """What can be kept by each call that runs both forward and backward, in order."""
    alive, found = _alive(program), {}
    for line, _ in program.walk():
        if line.attrs.get("backward"):
            key = line.attrs["joint"], line.attrs["grads"], alive[line.attrs["joint"]]
            if key not in known:
                known[key] = Choices(*key)
            found[line.attrs["call"]] = known[key]
    return found


def _kept(choices: Choices, policy: str | float) -> Kept:
    if isinstance(policy, str):
        return choices.none if policy == "none" else choices.min_cut
    return choices.fraction(policy)


def _alive(program: Program) -> dict[Any, frozenset[int]]:
    """For each block the outputs that another block reads, whichever call: they are kept as its input, so the block may read them for nothing."""
    blocks = [line for line, _ in program.walk() if "joint" in line.attrs]
    read = {a for line in blocks for a in line.args}
    alive: dict[Any, frozenset[int]] = {}
    for line in blocks:
        if not line.attrs.get("backward", True):
            here = frozenset(i for i, v in enumerate(line.out) if v.name in read)
            alive[line.attrs["joint"]] = alive.get(line.attrs["joint"], here) & here
    return alive
