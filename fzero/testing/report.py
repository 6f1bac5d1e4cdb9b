"""Defines the result of a comparison, as a value that prints as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from fzero._utils.deprecation import attribute_alias
from fzero.plan.render import TextTable, brief, html, plain

NUM_ROWS = 12
"""Number of tensors in a table: differing tensors first, then those closest to their tolerance."""


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor of the transformed step and the same tensor of the plain step.

    It is taken after the first step at which it exceeds the tolerance or, if it never does, after the step at which it
    comes closest to the tolerance.

    Attributes:
        path: the tensor, for example `params['w']` or `metrics['loss']`.
        shape, dtype: those of the tensor.
        step: the number of steps that were taken; 0 is the initial state.
        difference: the Euclidean norm of the difference, relative to the norm of the tensor.
        tolerance: the largest difference that is allowed, relative in the same way.

    Example:
        >>> Difference("params['w']", (2,), "float32", step=1, difference=1e-8, tolerance=1e-6).ok
        True
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    step: int
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class FirstLine:
    """The first op of a program whose value is not what it should be.

    Attributes:
        number: index among the ops that run, as in a plan and in `fzero show --json`.
        text: the op as it is printed, without folding.
        value: the name of the differing value.
        iteration: the micro-batch of the enclosing loop.
        rank: the rank on which it was found.
        difference: Euclidean norm, relative.
        why: what is wrong with it, and so where to look.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.1))  # a sum is not a mean
        >>> step = fz.accumulate(2)(step)
        >>> params, batch, mesh = {"w": torch.ones(3)}, torch.ones(4, 3), fz.make_mesh(data=1)
        >>> report = fz.testing.check_equivalent(step, params, batch, mesh, raises=False)
        >>> report.blame.line is None or report.blame.line.text.strip()
        True
    """

    number: int
    text: str
    value: str
    iteration: int
    rank: int
    difference: float
    why: str

    turn = attribute_alias("FirstLine", "turn", "iteration")

    def __str__(self) -> str:
        return f"line {self.number}: {brief(self.text, 100)}"


@dataclass(frozen=True)
class Blame:
    """Where a difference begins.

    Attributes:
        transform: the first transform, in the order of their rewrites, with which the step differs; None if it
            differs without any.
        with_: the other transforms that are necessary for the difference.
        line: the first op that differs; None if no op differs when they run one by one.
        step: the training step in which it was found.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.1))  # a sum is not a mean
        >>> step = fz.accumulate(2)(step)
        >>> params, batch, mesh = {"w": torch.ones(3)}, torch.ones(4, 3), fz.make_mesh(data=1)
        >>> report = fz.testing.check_equivalent(step, params, batch, mesh, raises=False)
        >>> report.blame.transform
        'accumulate(num_micro_batches=2)'
    """

    transform: str | None
    with_: tuple[str, ...] = ()
    line: FirstLine | None = None
    step: int = 1
    note: str = ""


@dataclass(frozen=True)
class Report:
    """A comparison of a transformed step with the plain one, tensor by tensor. Its `str` is a table.

    Attributes:
        name: name of the loss function.
        mesh: mesh of the transformed step.
        transforms: the transforms, as they print.
        steps: number of steps that were run.
        roundoff: what the tolerances are derived from, in words.
        differences: of each tensor of parameters, optimizer state and metrics, the largest first.
        blame: where a difference begins; None if there is none.
        skipped: number of steps that were repeated with a lower loss scale.
        wanted: number of steps that were requested. Steps after which the plain step itself is not finite are not
            compared.
        exact: the report of the same step without the transforms that round, such as `mixed_precision`, if the step
            has both such transforms and others. Its tolerances are about a thousand times tighter.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.1))  # a sum is not a mean
        >>> step = fz.accumulate(2)(step)
        >>> params, batch, mesh = {"w": torch.ones(3)}, torch.ones(4, 3), fz.make_mesh(data=1)
        >>> report = fz.testing.check_equivalent(step, params, batch, mesh, raises=False)
        >>> report.equivalent, report.differences[0].path
        (False, "metrics['loss']")
    """

    name: str
    mesh: str
    transforms: tuple[str, ...]
    steps: int
    backend: str
    roundoff: str
    differences: tuple[Difference, ...]
    blame: Blame | None = None
    exact: Report | None = None
    skipped: int = 0
    wanted: int = 0

    @property
    def equivalent(self) -> bool:
        """Whether every tensor is within its tolerance, in this report and in `exact`."""
        return all(d.ok for d in self.differences) and (self.exact is None or self.exact.equivalent)

    @property
    def num_different(self) -> int:
        """The number of tensors that exceed their tolerance."""
        return sum(not d.ok for d in self.differences)

    def __str__(self) -> str:
        return plain(self.tables()) + "".join(f"{line}\n" for line in self.remarks())

    def _repr_html_(self) -> str:
        return html(self.tables()) + "".join(f"<p>{escape(line)}</p>" for line in self.remarks())

    def tables(self) -> list[TextTable]:
        """Returns the tensors that are closest to their tolerances or beyond them."""
        wrong = self.num_different
        verdict = (
            f"{wrong} of {len(self.differences)} tensors differ"
            if wrong
            else f"equivalent in all {len(self.differences)} tensors"
        )
        title = f"{self.name} on mesh {self.mesh}, {self.steps} steps, {self.backend}: {verdict}"
        rows = [
            (d.path, _number(d.difference), _number(d.tolerance), str(d.step), "" if d.ok else "differs")
            for d in self.differences[:NUM_ROWS]
        ]
        left = len(self.differences) - NUM_ROWS
        if left > 0:
            rows.append((f"{left} more", "", "", "", f"{max(wrong - NUM_ROWS, 0)} differ" if wrong > NUM_ROWS else ""))
        out = [TextTable(title, ("tensor", "difference", "tolerance", "step", ""), rows)]
        if self.blame is not None:
            out.append(TextTable("where the difference starts", ("", ""), _blamed(self.blame), prose=True))
        if self.exact is not None and not self.exact.equivalent:
            first, *rest = self.exact.tables()
            out += [first._replace(title=f"without {self._rounding()}: {first.title}"), *rest]
        return out

    def remarks(self) -> Sequence[str]:
        """Returns the remarks below the tables, one line each."""
        lines = [f"transforms: {', '.join(self.transforms) or 'none'}", f"roundoff: {self.roundoff}"]
        if self.skipped:
            lines.append(f"loss scale: {self.skipped} steps overflowed, were skipped, and taken again with a lower one")
        if self.steps < self.wanted:
            lines.append(
                f"not compared: what the plain step comes to after step {self.steps} is not finite, with any "
                f"transforms; try a lower learning rate"
            )
        if self.exact is not None and self.exact.equivalent:
            lines.append(
                f"without {self._rounding()}: equivalent in all {len(self.exact.differences)} leaves, with a roundoff "
                f"of {self.exact.roundoff.split()[0]}"
            )
        return lines

    def _rounding(self) -> str:
        """Returns the names of the transforms that `exact` leaves out."""
        left = self.exact.transforms if self.exact is not None else ()
        return ", ".join(x.partition("(")[0] for x in self.transforms if x not in left)

    def to_json(self) -> str:
        # including `exact`, without its verdict, which follows from its tensors
        data: dict[str, Any] = {"equivalent": self.equivalent, **asdict(self)}
        return json.dumps(_finite(data), indent=1)


def _blamed(blame: Blame) -> list[tuple[str, str]]:
    rows = [("transform", blame.transform or "none: the step differs without any")]
    rows += [("together with", ", ".join(blame.with_))] if blame.with_ else []
    if blame.line is not None:
        line = blame.line
        where = f"step {blame.step}, rank {line.rank}, micro-batch {line.iteration}: off by {_number(line.difference)}"
        rows += [
            (f"line {line.number}", brief(line.text, 96)),
            ("because it", brief(line.why, 96)),
            ("first seen in", where),
        ]
    return rows + ([("note", blame.note)] if blame.note else [])


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}" if math.isfinite(x) else "not finite"


def _finite(data: Any) -> Any:
    """Replaces infinities by None, because JSON has none."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
