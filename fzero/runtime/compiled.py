"""Holds the programs and functions of a compiled step, made once for each kind of batch: the common part of training
and evaluation.

It knows nothing of transforms beyond lowering; what it runs is the program, and the program is all there is to see.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fzero import compat, tree
from fzero.build.build import build, check_backend
from fzero.build.cache import logger
from fzero.comm.staged import Staged
from fzero.errors import FzeroValueError, attribute_of
from fzero.inductor_folder import guard_inductor
from fzero.layout import ties
from fzero.local_device import check_default
from fzero.lowering.budget import Budget
from fzero.lowering.choose_formats import check_links_known, open_formats
from fzero.lowering.layouts import batch_inputs
from fzero.lowering.lower import lower_inputs
from fzero.lowering.lowered import Lowered
from fzero.mesh import Mesh
from fzero.plan.devices import Device, get_device
from fzero.plan.plan import Plan, PlanDecision
from fzero.program.ir import Program
from fzero.program.lines import Inputs
from fzero.program.ops import handed
from fzero.program.show import name_of
from fzero.progress import moving, shown
from fzero.ranks import agreement
from fzero.runtime.execute import executable
from fzero.runtime.graphs import check
from fzero.runtime.same_program import describe, made_together
from fzero.step import EvalStep
from fzero.step.checks import check_bare
from fzero.trace.device import on_device
from fzero.trace.reads.questions import strides_noted
from fzero.trace.reads.settings import GLOBAL_GENERATORS, Settings, changes, counted, settings, timed
from fzero.trace.reads.switches import autocast, dispatch_modes, function_modes, saved_tensor_hooks, switches, told
from fzero.trace.reads.value_keys import Position
from fzero.trace.subgraph import differing_line
from fzero.transforms.compress import Formats
from fzero.transforms.offload import Offload

Method = TypeVar("Method", bound=Callable[..., Any])
_MAKING = ("init", "load", "step", "eval_step", "sync")
"""The methods whose new tensors would be on PyTorch's default device."""


def alone(owner: str, doing: str | None = None) -> Callable[[Method], Method]:
    """A method that has the mesh to itself while it runs (`Mesh.alone`). `doing`: its work on bytes of a state, whose
    progress it shows."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if owner in _MAKING:
                check_default(owner, self.mesh.device_type)
            # a state outlives the mode that it is made in
            ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            telling = moving(f"fzero.{owner}", doing, self.mesh.rank) if doing else nullcontext()
            with self.mesh.alone(owner), ordinary, telling:
                return method(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return wrap


MOST_PROGRAMS = 16
"""Programs that a step keeps, each with its pool: one for each kind of batch. The one used longest ago leaves first,
and is made again when it is needed."""

LOOKED_AT_EVERY = 16
"""Values that functions read besides their arguments are compared every so many calls and at each of the first ones;
also when the time since the last call makes the look cheaper than `_SHARE` of it."""
_SHARE = 0.002


@dataclass
class _Kept:
    """A program that runs: the lowered program, its runner, the values its functions read when it was made, the places
    that ask for strides, and the number of calls."""

    lowered: Lowered
    run: Callable[..., Any]
    settings: Settings
    strides: list[str]
    calls: int = 0


class Compiled:
    """A step on a mesh: lowered once per kind of batch; and the last program that ran. `owner`: whose its errors
    are."""

    owner: str
    if not TYPE_CHECKING:
        __getattr__ = attribute_of

    def __init__(
        self,
        step: Any,
        mesh: Mesh,
        backend: str,
        limits: tuple[int | None, int | None, int | None],
        graphs: bool | None = False,
    ):
        check_backend(backend, mesh.device)
        guard_inductor()
        self.graphs = graphs  # whether runs are captured
        self._step, self.mesh, self.backend, self.limits = step, mesh, backend, limits
        self._budget: Budget | None = None
        self._chosen: tuple[PlanDecision, ...] = ()  # decisions that the step left open before it was lowered
        self._runs: dict[Any, _Kept] = {}  # those used last are the last
        # likewise, by kinds of batches whatever the formats, each with the step that it is of
        self._staged: Staged | None = None
        # when a program was called last, and how long a look at its settings takes
        self._called, self._looking = (0.0, 0.0)
        self._said = False  # that programs are made and dropped again
        self._lowered: Lowered | None = None
        self._planned: Any = (None, None)  # a program and its plan

    def __repr__(self) -> str:
        transforms = "".join(f", {x}" for x in self.step.transforms)
        return f"<{type(self).__name__} on mesh {self.mesh} of {self.mesh.device.type}, {self.backend}{transforms}>"

    @property
    def step(self) -> Any:
        """The step as it was compiled."""
        return self._step

    @property
    def resolved(self) -> Any:
        """The step that is carried out: `step`, which leaves nothing open."""
        return self.step

    @property
    def program(self) -> Program:
        """The program that ran last. It exists from the first call on; `fz.lower` makes one without running."""
        if self._lowered is None:
            raise FzeroValueError(
                "compile",
                "there is no program yet",
                fix="call the step once, or use fz.lower(step, mesh, params, batch).program",
            )
        return self._lowered.program

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that `metrics["precision"]` is about, in its order; none without
        `mixed_precision(watch=True)`."""
        _ = self.program
        assert self._lowered is not None
        return self._lowered.blocks

    @property
    def plan(self) -> Plan:
        """The cost of the program that ran last on each rank, as built for this machine's device."""
        if self.program is not self._planned[0]:
            assert self._lowered is not None
            programs = self._lowered.programs
            graphs = {id(f.graph): f.graph for program in programs for f in program.functions.values()}
            built = {of: on_device(graph, self.mesh.device) for of, graph in graphs.items()}  # stages share functions
            functions = (
                {name: replace(f, graph=built[id(f.graph)]) for name, f in program.functions.items()}
                for program in programs
            )
            as_built = replace(
                self._lowered,
                programs=tuple(replace(x, functions=f) for x, f in zip(programs, functions, strict=True)),
            )
            self._planned = self.program, as_built.plan_on(None, self.backend)
        return self._planned[1]

    def _run_for(
        self,
        params: Inputs,
        batch: Any,
        flat_batch: list[Any],
        structure: tree.TreeSpec,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[Lowered, Callable[..., Any]]:
        """The program for a batch of such leaves, with its runner. `before`: done if there is none yet."""
        self.mesh.check_open()
        # which see every operation of a program that is run as it is
        unseen = [*function_modes(), *(dispatch_modes() if self.backend == "inductor" or self.graphs is True else [])]
        if around := [type(mode).__name__ for mode in unseen] + saved_tensor_hooks():
            fix = "enter it in the function that the step calls, around the operations that it is for"
            if self.backend == "inductor":
                fix += "; or use backend='eager', which runs every operation in sight of a TorchDispatchMode"
            elif dispatch_modes():
                fix += "; or leave out cuda_graphs=True"
            raise FzeroValueError(
                self.owner,
                f"{self.step.name} is called under what a program that is traced once does not see",
                around,
                fix,
            )
        check_bare(batch, flat_batch)
        kinds = tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in flat_batch])
        same = tuple(ties(flat_batch))
        kind = (
            params,
            structure,
            kinds,
            same,
            torch.get_default_dtype(),
            autocast(),
            switches(),
        )
        key = (*kind, self._formats())
        kept = self._runs.pop(key, None)
        if kept is None:
            before()
            why = f"makes a program of {self.step.name} ({type(self.step).__name__})" + _unlike(
                key, next(reversed(self._runs), None)
            )
            read = self._settings()
            with strides_noted() as asked:
                lowered, run = made_together(self.mesh, lambda: self._build(params, batch), why)
            key = (*kind, self._formats())  # lowering may have chosen some
            kept = _Kept(lowered, run, self._settings(), asked)
            for other in self._runs.values():  # functions do not read a list that the trace itself has grown
                other.settings = kept.settings if other.settings == read else other.settings
        self._runs[key] = kept
        if len(self._runs) > MOST_PROGRAMS:
            del self._runs[next(iter(self._runs))]
            if not self._said:
                logger.warning(
                    "%s: more than %d kinds of batches: pad them to a few lengths, each has a program of its own",
                    self.step.name,
                    MOST_PROGRAMS,
                )
            self._said = True
        if kept.strides and (
            odd := [p for p, x in zip(tree.paths(batch, "batch"), flat_batch, strict=True) if not x.is_contiguous()]
        ):
            what = (
                f"{self.step.name} asks how its tensors are laid out, and a program is given its batch contiguous: "
                f"these leaves are not"
            )
            raise FzeroValueError(self.owner, what, [*odd, *kept.strides], "give x.contiguous()")
        kept.calls += 1
        since, self._called = perf_counter() - self._called, perf_counter()
        changed = changes(kept.settings, self._settings()) if kept.calls > 1 and _SHARE * since >= self._looking else []
        if 1 < kept.calls <= LOOKED_AT_EVERY or kept.calls % LOOKED_AT_EVERY == 0 or changed:
            about = (
                f"reads another value than before: {changed[0]}"
                if changed
                else f"runs {name_of(kept.lowered.program)} {kept.lowered.program.name}"
            )
            # a change on one rank alone is every rank's error
            agreement.everywhere(self.mesh, self.owner, lambda: self._same_settings(kept), about)
        self._lowered = kept.lowered
        return kept.lowered, kept.run

    def _settings(self) -> Settings:
        """The settings of the step's functions: values that they read now beside their arguments."""
        start = perf_counter()
        found = settings(*self._functions(), strict=False)
        self._looking = perf_counter() - start
        return found

    def _functions(self) -> tuple[Any, ...]:
        given = (self.step.fn,) if isinstance(self.step, EvalStep) else (self.step.loss_fn, self.step.optimizer)
        model = getattr(given[0], "model", None)  # of fz.functionalize
        return given if model is None else (*given, *model.classes)

    def _same_settings(self, kept: _Kept) -> None:
        """Raises if a value that was traced as it was is another now."""
        now = self._settings()
        for x in now.standing:
            x.check()
        if changed := changes(kept.settings, now):
            fix = (
                "pass what changes from step to step in the batch, as a 0-dim tensor, or to the optimizer as a "
                "schedule of the step; "
                "compile the step anew where it changes seldom"
            )
            raise FzeroValueError(
                self.owner,
                f"{self.step.name} reads a value that is not what it was when the step was traced",
                changed,
                fix,
            )

    def _formats(self) -> Formats | None:
        """The formats that `compress("auto")` has chosen for the state; None: lowering a program chooses them."""
        return ()

    def _known(self, inputs: Inputs) -> Inputs:
        """A leaf table, or the one like it that there are programs for."""
        return next((params for params, *_ in self._runs if params.alike(inputs)), inputs)

    def _rates(self) -> Budget | None:
        """The rates that budgets and choices between tiers go by; None if there are neither. The ranks of several hosts
        plan with the rates of the first."""
        asked = any(isinstance(t, Offload) for t in self.resolved.transforms) or open_formats(self.resolved) is not None
        if self._budget is None and (asked or self.limits != (None, None, None)):
            device = agreement.from_first(
                self.mesh, "compile", lambda: get_device(None, self.mesh.device_type).to_json()
            )
            nbytes, host, disk = self.limits
            self._budget = Budget(nbytes, Device.from_json(device), self.backend, host, disk)
            check_links_known(self.resolved, self.mesh, self._budget.device)
        return self._budget

    def _on_device(self, batch: Any, flat: list[torch.Tensor], written: Collection[int] = ()) -> list[torch.Tensor]:
        """The leaves of a batch where the program reads them, and in no memory that it writes to: `written`, by
        storage."""
        if any(x.is_meta for x in flat):
            wrong = [
                f"{p}: {tree.describe(x)} on the meta device"
                for p, x in zip(tree.paths(batch, "batch"), flat, strict=True)
                if x.is_meta
            ]
            raise FzeroValueError(
                self.owner,
                "these leaves of the batch have no values",
                wrong,
                "give tensors in memory; fz.lower takes meta tensors",
            )
        found = [
            x
            if x.device == self.mesh.device and x.is_contiguous() and not (x.requires_grad or x.is_conj() or x.is_neg())
            else x.detach().resolve_conj().resolve_neg()
            for x in flat
        ]
        if self.mesh.device.type == "cuda":
            pageable = [i for i, x in enumerate(found) if x.device.type == "cpu" and not x.is_pinned()]
            self._staged = self._staged or Staged(self.mesh.device)
            for i, x in zip(pageable, self._staged([found[i] for i in pageable]) if pageable else (), strict=True):
                found[i] = x
        found = [x.to(self.mesh.device, non_blocking=True).contiguous() for x in found]
        return [x.clone() if compat.memory_of(x) in written else x for x in found]

    def _lower(self, params: Inputs, batch: Any) -> Lowered:
        """Lowers the step. If tracing changed a value that the user's functions read, or they read the clock, it is
        lowered again. Equal programs mean a cache or a log, and are accepted. Different ones mean that the function
        counts, draws or consumes; that raises."""
        made = lambda: lower_inputs(  # noqa: E731
            self.resolved, self.mesh, params, batch_inputs(batch), self._rates(), formats=self._formats()
        )
        read, before = self._settings(), counted(*self._functions())
        lowered = made()
        now, first = self._settings(), counted(*self._functions())
        clocks = timed(*self._functions())
        if now == read and first == before and not clocks:
            return lowered
        again = made()
        after = counted(*self._functions())
        changed = [
            _changed(place, value, after[place]) for place, value in first.items() if after.get(place, value) != value
        ]
        if changed or describe(*again.programs) != describe(*lowered.programs):
            others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
            if others and any(
                place in GLOBAL_GENERATORS and after.get(place) != value for place, value in first.items()
            ):
                changed.append(
                    f"or by a thread that runs beside: {', '.join(others)}; give it a generator of its own, e.g. "
                    f"random.Random(seed)"
                )
            fix = (
                "draw by fz.random with the step's key; pass a count in the batch, as a 0-dim tensor, or to the "
                "optimizer as a schedule of the step; "
                "what is only written down goes into a list, or by print or a logger to the terminal"
            )
            what = (
                f"{self.step.name} counts, draws or uses something up each time it is called: traced once, it would not"
            )
            found = changed or changes(read, now) or [f"{name}: read by it" for name in clocks]
            raise FzeroValueError(self.owner, what, [*_differing_line(lowered, again), *found], fix)
        return again

    def _build(self, params: Inputs, batch: Any) -> tuple[Lowered, Callable[[], Callable[[], Callable[..., Any]]]]:
        """The program; how to build its functions once all ranks agree on it,
        and then how to make it executable, once all have built theirs."""
        with (
            shown("fzero.compile", lambda: f"tracing and planning {self.step.name}")
            if self.mesh.rank == 0
            else nullcontext()
        ):
            # a run keeps its program alone
            lowered = replace(self._lower(params, batch), chosen=self._chosen, stages=dict)
        if self.graphs is True:
            check(lowered.program, self.owner)

        def built() -> Callable[[], Callable[..., Any]]:
            # all stages', which the ranks divide among them
            used = {line.fn for x in lowered.programs for line, _ in x.walk() if line.op == "call"}
            functions = build(
                {n: f for n, f in lowered.program.functions.items() if n in used}, self.backend, self.mesh
            )
            how = {"pairs": handed(lowered.programs), "graphs": self.graphs}
            return functools.partial(executable, lowered.program, functions, self.mesh, **how)

        return lowered, built


def _differing_line(one: Lowered, other: Lowered) -> list[str]:
    """The user's line of the first operation in which two traces of a step differ, if it is known."""
    for a, b in zip(one.programs, other.programs, strict=False):
        for name, function in a.functions.items():
            if name in b.functions and (found := differing_line(function.graph.graph, b.functions[name].graph.graph)):
                return found
    return []


def _changed(place: str, before: Any, after: Any) -> str:
    """A number that has become another, with both; of a generator that it has drawn."""
    if isinstance(before, tuple) and before[:1] in ((bool,), (int,), (float,)) and isinstance(after, tuple):
        return f"{place}: {before[1]} before, {after[1]} after"
    return f"{place}: {'a file that is written to or read from' if isinstance(before, Position) else 'drawn from'}"


def _unlike(key: tuple[Any, ...], before: tuple[Any, ...] | None) -> str:
    """The differences between a call and the one before it."""
    if before is None:
        return ""
    new, old = _facts(key), _facts(before)
    return ": " + "; ".join(
        f"{name} {new.get(name)}, before {old.get(name)}" for name in {**new, **old} if new.get(name) != old.get(name)
    )


def _facts(key: tuple[Any, ...]) -> dict[str, str]:
    params, structure, kinds, same, default_dtype, cast, others, formats = key
    leaves = [kind.__name__ if isinstance(kind, type) else tree.form(*kind) for kind in kinds]
    facts = {f"autocast's {name}": value for name, value in cast._asdict().items()} | told(others)
    facts |= {
        "parameters": [f"{x.path}: {x.dtype}{list(x.shape)}" for x in params.leaves],
        "the batch's tree": structure,
        "the batch's leaves": ", ".join(leaves),
        "leaves of the batch that are one tensor": ", ".join(
            f"{i} and {first}" for i, first in enumerate(same) if i != first
        )
        or "none",
    }
    facts |= {"the default dtype": default_dtype}
    facts |= {f"over {x.axis}": x for x in formats or ()}
    return {name: str(value).replace("torch.", "") for name, value in facts.items()}
