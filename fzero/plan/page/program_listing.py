"""Lists a program as nested rows: repeated layers are folded into loops, and each row has its cost and the user's
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fzero.ir.printer import Printed, folded
from fzero.ir.program import Program
from fzero.plan.page.op_costs import OpCost
from fzero.plan.render import brief
from fzero.trace.guards.user_frames import Place

_SHORT = 200  # characters of a statement before it is clicked
_LONGEST = 1_500  # characters of a statement: a list of all gradients of a large model is longer


@dataclass
class Row:
    """A statement, and the rows of its body.

    Attributes:
        code: the statement as it runs, shortened if it is very long.
        types: dtype, shape and placement of its results.
        ops: the indices of the ops that it stands for.
        kind: what they are for, one of `op_costs.KINDS`; "" for a statement that only deletes names.
        times: how often they run in a step, all together.
        seconds: their time in their queues, including that of the body.
        exposed: the time that compute waits at them.
        nbytes: bytes that they send or copy.
        place: the user's line.
    """

    code: str
    types: str = ""
    ops: tuple[int, ...] = ()
    kind: str = ""
    times: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    nbytes: int = 0
    place: Place | None = None
    body: list[Row] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The statement with only the first of many results, so that what is called can be seen."""
        return brief(self.code, _SHORT)

    @property
    def cost(self) -> float:
        """Seconds per step that the row adds to compute or to its channel, or that compute waits at it."""
        return max(self.seconds, self.exposed)


def listing(program: Program, costs: Sequence[OpCost]) -> list[Row]:
    """Returns the rows of a program in the order of its text.

    Args:
        program: a lowered program.
        costs: the cost of each op, in the order of `Program.walk`.
    """
    statements = folded(program)
    rows, _ = _nested(statements, 0, statements[0].depth if statements else 0, costs)
    return rows


def _nested(statements: Sequence[Printed], at: int, depth: int, costs: Sequence[OpCost]) -> tuple[list[Row], int]:
    """Returns the rows from a statement on that are at least as deep as `depth`, and the index after them."""
    rows = list[Row]()
    while at < len(statements) and statements[at].depth >= depth:
        if statements[at].depth > depth and rows:
            rows[-1].body, at = _nested(statements, at, statements[at].depth, costs)
            _add_up(rows[-1])
        else:
            rows.append(_row(statements[at], costs))
            at += 1
    return rows, at


def _row(statement: Printed, costs: Sequence[OpCost]) -> Row:
    text = statement.text().strip()
    code = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text):,} characters)"
    of = [costs[i] for i in statement.ops]
    if not of:
        return Row(code)
    return Row(
        code,
        types=", ".join(statement.types)[:_LONGEST],
        ops=statement.ops,
        kind=of[0].kind,
        times=sum(x.times for x in of),
        seconds=sum(x.seconds for x in of),
        exposed=sum(x.exposed for x in of),
        nbytes=sum(x.nbytes for x in of),
        place=of[0].place,
    )


def _add_up(loop: Row) -> None:
    """Gives a loop the cost of its body: the seconds of compute, and the kind that takes most of them."""
    computes = [row for row in loop.body if row.kind not in ("transfer", "wait", "")]
    loop.seconds = sum(row.seconds for row in computes)
    loop.exposed = sum(row.exposed for row in loop.body)
    loop.nbytes = sum(row.nbytes for row in loop.body)
    loop.ops = tuple(op for row in loop.body for op in row.ops)
    loop.kind = max(computes, key=lambda row: row.seconds).kind if computes else "transfer"
    loop.place = max(loop.body, key=lambda row: row.seconds).place
