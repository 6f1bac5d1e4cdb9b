"""Lists the passes that make a finished program of a recorded one, in their one order.

    recorded program -- fuse, copies --> base program -- remat, accumulate, shard, cut_update -->
    lines in the base program's order -- speculate, hoist_updates, tiers, overlap, redundant, rename,
    pool, batch, device_waits --> finished program

A pass is a function of a program and of what was chosen (choice.py). What comes to the same is made once
(fzero/lowering/variants.py). Of what is taken the program is verified after every pass; a violation names the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

from fzero.errors import FzeroTypeError, TransformError, VerifyError, message
from fzero.layout import Leaf
from fzero.passes import accumulate, fuse, off_device, pool, redundant, remat, shard, tiers
from fzero.passes.batch import batched
from fzero.passes.choice import Choice
from fzero.passes.copies import add_copies
from fzero.passes.cut_update import cut_update
from fzero.passes.device_waits import mark
from fzero.passes.hoist_updates import hoist_updates
from fzero.passes.overlap import Order, overlap
from fzero.passes.rename import apart
from fzero.passes.reuse_cut import cut_as
from fzero.passes.speculate import speculate
from fzero.passes.split import Choices
from fzero.passes.zero import Zero
from fzero.program.ir import Line, Program
from fzero.program.verify import BUG, verify
from fzero.program.verify_pool import check
from fzero.transforms.base import Transform

Name = Literal[
    "trace",
    "fuse",
    "copies",
    "remat",
    "accumulate",
    "shard",
    "cut_update",
    "speculate",
    "hoist_updates",
    "tiers",
    "overlap",
    "redundant",
    "rename",
    "pool",
    "batch",
    "device_waits",
]
"""The programs on the way, in order: what was recorded, then what each pass made of it. An evaluation has no update to
cut, and some passes less."""


class Sides(NamedTuple):
    """The consequences of a choice for a program whose update is cut.

    Attributes:
        order: where transfers stand.
        guess: the tiers whose leaves are updated on a guess.
        on_device: leaves off the device that are updated there.
        waiting: gradients that wait in host memory.
        on_disk: gradients that wait on disk, each with its leaf.
    """

    order: Order = Order()
    guess: tuple[str, ...] = ()
    on_device: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    on_disk: tuple[tuple[str, str], ...] = ()


def sides(program: Program, choice: Choice, on_disk: Mapping[str, str]) -> Sides:
    """The consequences of a choice for a program whose update is cut, with these gradients on disk."""
    on_device = off_device.updated_on_device(program, choice.host_share)
    waiting = off_device.waiting_on_host(program, on_device, choice.grads).difference(on_disk)
    return Sides(choice.order, choice.guess, on_device, waiting, tuple(on_disk.items()))


class Pass(NamedTuple):
    """A rewrite of programs.

    Attributes:
        name: what it does.
        rewrite: a program, as it was chosen: a `Choice` before the update is cut, `Sides` after it.
        key: what it goes by of a program and a choice, for passes whose programs are looked up.
        check: rules that hold from there on beside those of every program.
        own: whether it is of this package; a violation is a bug of whoever wrote it.
    """

    name: str
    rewrite: Callable[[Program, Any], Program]
    key: Callable[[Program, Choice], Hashable] = lambda program, choice: None
    check: Callable[[Program], Program] | None = None
    own: bool = True

    def made(self, program: Program) -> Program:
        """The program that it makes whatever was chosen, verified."""
        return self.verified(self.rewrite(program, None))

    def verified(self, program: Program) -> Program:
        """The program that it made, if that keeps the rules.

        Raises:
            VerifyError: naming the pass.
        """
        try:
            verify(program)
            return program if self.check is None else self.check(program)
        except VerifyError as error:
            text = f"{error}\nIt was found after the pass {self.name!r}."
            if not self.own:
                text = text.replace(BUG, f"the rewrite of {self.name!r} made it: make that keep the rules")
            raise VerifyError(text) from None


FUSE = Pass("fuse", lambda program, _: fuse.rewrite(program))
"""The first pass of a training step."""


def copying(copies: Mapping[str, Leaf]) -> Pass:
    """The pass that has a step compute with copies of masters, by the path of each master."""
    return Pass("copies", lambda program, _: add_copies(program, copies))


def sharding(zero: Zero) -> Pass:
    """The one pass before the order of an evaluation, which has nothing to choose."""
    return Pass("shard", lambda program, _: shard.rewrite(program, zero))


def opening(zero: Zero, num_micro: int, batch: Mapping[str, tuple[int, ...]]) -> tuple[Pass, ...]:
    """The passes whose programs many choices share.

    Args:
        zero: what a step's parallel transforms ask for.
        num_micro: micro-batches.
        batch: the shape on this rank of each batch input that is cut into micro-batches, by name.
    """
    blocks: dict[Any, Choices] = {}
    return (
        Pass(
            "remat",
            lambda program, choice: remat.rewrite(program, choice.remat, blocks),
            lambda program, choice: remat.kept(program, choice.remat, blocks),
        ),
        Pass("accumulate", lambda program, _: accumulate.rewrite(program, num_micro, batch)),
        Pass(
            "shard",
            lambda program, choice: shard.rewrite(program, zero, choice.whole_grads, choice.stay, choice.cast_once),
            lambda program, choice: (
                choice.whole_grads,
                choice.stay,
                choice.cast_once and tuple(x.path for x in program.leaves.values() if x.layout.tier == "device"),
            ),
        ),
        Pass("cut_update", _cut()),
    )


def added(program: Program) -> tuple[Pass, ...]:
    """A pass for each spec of a program that rewrites programs itself."""
    own = (t for t in program.transforms if type(t).rewrite is not Transform.rewrite)
    return tuple(Pass(t.name, lambda program, _, t=t: _rewritten(t, program), own=False) for t in own)


def _rewritten(transform: Transform, program: Program) -> Program:
    """The program of a transform's own rewrite.

    Raises:
        TransformError: it changes nothing, and the transform does not say why.
    """
    made = transform.rewrite(program)
    wrong = [repr(x) for x in made.lines if not isinstance(x, Line)] if isinstance(made, Program) else [repr(made)]
    if wrong:
        what = f"the rewrite of {transform} does not return a program of lines"
        raise FzeroTypeError(message(transform.name, what, wrong, "e.g. return replace(program, lines=tuple(lines))"))
    if made.lines == program.lines and made.leaves == program.leaves and transform.idle_in(program) is None:
        problem = f"{transform} on mesh {program.mesh}: its rewrite changes no line of {program.name}"
        fix = "leave it out on this mesh; or say by its idle_in(program) why it may change nothing"
        raise TransformError(message(transform.name, "does nothing to this program", [problem], fix))
    return made


CLOSING = (
    Pass("speculate", lambda program, chosen: speculate(program, chosen.guess)),
    Pass("hoist_updates", lambda program, _: hoist_updates(program)),
    Pass(
        "tiers", lambda program, chosen: tiers.rewrite(program, chosen.on_device, chosen.waiting, dict(chosen.on_disk))
    ),
    Pass("overlap", lambda program, chosen: overlap(program, chosen.order)),
    Pass("redundant", lambda program, _: redundant.rewrite(program)),
    Pass("rename", lambda program, _: apart(program)),
    Pass("pool", lambda program, _: pool.place(program), check=check),
    Pass("batch", lambda program, _: batched(program), check=check),
    Pass("device_waits", lambda program, _: mark(program), check=check),
)
"""The passes behind the cut of the update."""


def _cut() -> Callable[[Program, Choice], Program]:
    """Cuts updates; one that was cut before in a program whose leaves rest on the same tiers, as it was."""
    first: dict[tuple[str, ...], tuple[Program, Program]] = {}

    def rewrite(program: Program, _: Choice) -> Program:
        tiers = tuple(leaf.layout.tier for leaf in program.leaves.values())
        cut = (cut_as(program, *first[tiers]) if tiers in first else None) or cut_update(program)
        first.setdefault(tiers, (program, cut))
        return cut

    return rewrite
