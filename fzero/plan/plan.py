"""Plans a program before any device is touched: peak memory and the op that causes it, bytes per channel, and a
timeline.

A plan is plain data, computed from the program and a device's rates (fzero/plan/device_lookup.py). This file must not
know how a program was made, nor run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fzero._utils.arguments import flag, keywords, path_like, shown
from fzero._utils.deprecation import attribute_alias, keyword_aliases
from fzero._utils.path_permissions import unwritable_file
from fzero._utils.units import duration, parse_bytes, size
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.ir.attributes import RowsAttrs
from fzero.ir.ops import transfer_bytes
from fzero.ir.printer import statements
from fzero.ir.program import Program, local_bytes
from fzero.plan.cost import (
    HOST,
    as_used,
    channel,
    check_backend_name,
    cost_of,
    host_bytes,
    model_flops,
    on_host,
    on_mesh,
    seconds,
    temporaries_on,
)
from fzero.plan.device_lookup import Device, get_device
from fzero.plan.memory import ROLES, Sample, disk_bytes, memory_of, resting_bytes, ward_bytes
from fzero.plan.process_memory import ProcessPart, beside, here
from fzero.plan.timeline import COMPUTE, Event, Timeline, simulate
from fzero.tree import dtype_name

if TYPE_CHECKING:
    from fzero.plan.page.html_page import Page
    from fzero.plan.page.suggestions import Suggestions


class At(NamedTuple):
    """An op of a program: its index, as `Program.walk` counts, and its text, as it runs."""

    index: int
    text: str


class Channel(NamedTuple):
    """A queue of transfers in one step of a rank: the bytes that it moves, the number of transfers, the seconds that
    they take, and the seconds that compute waits for them.

    `host` is a channel too, if the host computes subgraphs for an asynchronous device: the bytes that they read and
    write there, and their number.
    """

    bytes: int
    num_transfers: int
    busy_seconds: float
    exposed_seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes/s while the channel is busy, as assumed, latencies included."""
        return self.bytes / self.busy_seconds if self.busy_seconds else 0.0


class WaitTime(NamedTuple):
    """The seconds per step that compute waits at an op for a transfer of a channel."""

    line: At
    channel: str
    seconds: float


class StagePlan(NamedTuple):
    """The predicted cost of one stage of a pipeline, on each of its ranks.

    Attributes:
        num_blocks: number of blocks of the stage.
        compute_seconds: time in which subgraphs run.
        bubble: the fraction of the step in which the stage waits for other stages, or has finished before the last of
            them.
        peak_bytes, host_peak_bytes, persistent_bytes: as in `Plan`.
        sent_bytes: bytes that it sends to other stages in a step.
    """

    num_blocks: int
    compute_seconds: float
    bubble: float
    peak_bytes: int
    host_peak_bytes: int
    persistent_bytes: int
    sent_bytes: int

    resting_bytes = attribute_alias("StagePlan", "resting_bytes", "persistent_bytes")


class ExpertRows(NamedTuple):
    """The largest exchange of rows without a capacity (`fz.expert_parallel`).

    Attributes:
        reserved: number of rows that a rank has memory for.
        balanced: number of rows that it receives if all experts are chosen equally often.
        row_bytes: bytes of a row.
    """

    reserved: int
    balanced: int
    row_bytes: int


class PlanDecision(NamedTuple):
    """A choice that a step leaves open: what was decided for this program, and why."""

    what: str
    chosen: str
    why: str


@dataclass(frozen=True)
class Plan:
    """The predicted cost of one step of a program on a rank. Made by `fz.lower(...).plan` and `train.plan`.

    Attributes:
        name, mesh: those of the program.
        device: the device whose rates were used, with its rank's share of the host.
        backend: the backend that the subgraphs were assumed to be built with.
        step_seconds: time of the complete step. It is the sum of `compute_seconds`, in which subgraphs run, and
            `exposed_seconds`, in which they wait for transfers.
        channels: by name: `gather:data`, `reduce:data`, `to_host`, `to_device`, `disk`, `host`.
        waits: every op that waits, in order.
        peak_bytes: the most device memory alive at once, including the state, with the op where it occurs
            (`peak_line`) and what it is used for (`breakdown`).
        persistent_bytes: the state on the device between steps.
        host_peak_bytes, host_persistent_bytes: likewise for the host's memory; 0 if that is the device's memory,
            which then counts it. `host_breakdown`: what the host's peak is used for.
        disk_bytes: the scratch files: tensors on disk, each in full sectors (`padded`).
        peer_replica_bytes: the host memory in which `fz.run` keeps the state that another rank sends (`redundant`),
            two copies; not part of any peak.
        pool_bytes: the arena with the buffers of transfers, allocated all the time; part of the peak.
        model_flops: FLOPs of the products of one step for this rank's part of the batch, without recomputation.
        mfu: model FLOPs utilization (PaLM, Chowdhery et al. 2022): the fraction of the step that the device would
            need for `model_flops` at its peak, in the dtype that most products run in. None if the device's peak is
            not known.
        roofline_fraction: like `mfu`, but relative to the rate that the device attains instead of its peak.
        memory: a sample for each op that runs, in order; two iterations of each loop.
        events: the timeline.
        lines: the text of every op.
        decisions: the choices that the step left open, how they were decided, and why.
        stages: of a `pipeline`, the plan of each stage; otherwise (). All other attributes belong to the stage of
            this rank, except `step_seconds`, which is that of all stages.
        bubble: the mean of the stages' bubbles.
        stage_events: the timeline of each stage.
        expert_rows: if rows are exchanged without a capacity, those of the largest exchange; otherwise None. The peak
            contains the memory that is reserved for them.
        process: what a rank's process needs in addition, part by part, and whether a calibration has measured it. For
            a device, the context and the buffers of NCCL are assumed.
        programs, stage: the programs of all stages that were planned, and the index of this rank's; of a step without
            `pipeline`, its only program.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.sgd(0.1)))
        >>> params, batch = {"w": torch.empty(1024, 512, device="meta")}, torch.empty(8, 1024, device="meta")
        >>> found = fz.lower(step, fz.AbstractMesh(data=8), params, batch).plan
        >>> found.persistent_bytes, found.channels["gather:data"].bytes
        (262176, 1835008)
        >>> fz.fits(found, "80GB")
        True
    """

    name: str
    mesh: str
    device: Device
    backend: str
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    channels: Mapping[str, Channel]
    waits: tuple[WaitTime, ...]
    peak_bytes: int
    peak_line: At
    breakdown: Mapping[str, int]
    persistent_bytes: int
    host_peak_bytes: int
    host_breakdown: Mapping[str, int]
    host_persistent_bytes: int
    disk_bytes: int
    pool_bytes: int
    model_flops: float
    mfu: float | None
    roofline_fraction: float
    memory: tuple[Sample, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    lines: tuple[str, ...] = field(repr=False)
    decisions: tuple[PlanDecision, ...] = ()
    peer_replica_bytes: int = 0
    stages: tuple[StagePlan, ...] = ()
    stage_events: tuple[tuple[Event, ...], ...] = field(default=(), repr=False)
    process: tuple[ProcessPart, ...] = ()
    expert_rows: ExpertRows | None = None
    programs: tuple[Program, ...] = field(default=(), repr=False, compare=False)
    stage: int = field(default=0, repr=False)

    speed_of_light = attribute_alias("Plan", "speed_of_light", "roofline_fraction")
    resting_bytes = attribute_alias("Plan", "resting_bytes", "persistent_bytes")
    host_resting_bytes = attribute_alias("Plan", "host_resting_bytes", "host_persistent_bytes")
    ward_bytes = attribute_alias("Plan", "ward_bytes", "peer_replica_bytes")

    def __str__(self) -> str:
        from fzero.plan.render import table

        return table(self)

    def __repr__(self) -> str:
        time, peak = duration(self.step_seconds), size(self.peak_bytes)
        return f"<Plan of {self.name} on mesh {self.mesh} of {self.device.name}: {time} a step, {peak} at the peak>"

    def _repr_html_(self) -> str:
        from fzero.plan.render import html, tables

        return html(tables(self))

    @property
    def process_bytes(self) -> int:
        """Bytes of the process in addition to the peak, in the memory that the peak refers to. A container's limit,
        or the memory of a card, must hold both.
        """
        return here(self.device, [*self.process])

    @property
    def bubble(self) -> float:
        return sum(stage.bubble for stage in self.stages) / len(self.stages) if self.stages else 0.0

    @property
    def busy(self) -> dict[str, float]:
        """The fraction of the step for which each queue (`compute` and the channels) is busy, the busiest first."""
        seconds = {COMPUTE: self.compute_seconds, **{name: c.busy_seconds for name, c in self.channels.items()}}
        return {
            name: s / self.step_seconds if self.step_seconds else 0.0
            for name, s in sorted(seconds.items(), key=lambda item: -item[1])
        }

    @property
    def bound_by(self) -> str:
        """The queue that bounds the step: the busiest one. Its fraction in `busy` is how close the step comes to its
        ceiling, at which everything else is hidden behind this queue. On a CPU, where transfers between ranks and
        subgraphs take turns, no step reaches the ceiling.
        """
        return next(iter(self.busy))

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns totals, channels, waits and memory as JSON text, and also writes it to `path` if given. The
        timeline is not included: see `save_trace`.
        """
        from fzero.plan.render import as_json

        return _written(as_json(self), path)

    def html(
        self,
        path: str | Path | None = None,
        *,
        budget: str | int | None = None,
        measured: Sequence[Event] | None = None,
        suggestions: Suggestions | None = None,
    ) -> Page:
        """Returns the plan as one HTML page that needs no network, and also writes it to `path` if given. A notebook
        shows the page. It contains the lines of your code that the step runs, with what each costs.

        Args:
            path: path of the file; ends in .html.
            budget: memory of each rank that the peak is compared with: bytes, or text as `fits` takes it. By default
                it is the memory of the device that the process leaves, if the device is known.
            measured: the result of `train.profile`, shown below the prediction.
            suggestions: what is known in addition to the plan, as `fzero plan --html` shows it.

        Raises:
            FzeroTypeError: if `path` is not a path, or if `measured` is not a list of events.
            FzeroValueError: for another ending, a file that cannot be written, or if vl-convert is missing.
        """
        from fzero.plan.page.html_page import page

        file = None if path is None else _file(path, "a page is written to a file", 'html("report.html")')
        _check_measured(measured)
        if suggestions is not None and not hasattr(suggestions, "memory_source"):
            problems = [f"suggestions={shown(suggestions)}: must be Suggestions"]
            raise FzeroTypeError("plan", "no page", problems, "leave suggestions out: fzero plan --html makes them")
        return page(self, file, None if budget is None else parse_bytes(budget), measured, suggestions)

    def save_trace(self, path: str | Path, measured: Sequence[Event] | None = None) -> None:
        """Writes the timeline, with the memory over it, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Args:
            path: path of the JSON file.
            measured: the result of `train.profile`, shown next to the prediction as a separate process.

        Raises:
            FzeroTypeError: if `path` is not a path, or if `measured` is not a list of events.
            FzeroValueError: if no file can be written at the path.
        """
        from fzero.plan.render import trace

        _check_measured(measured)
        _written(trace(self, measured), path)

    def save_picture(
        self, path: str | Path, budget: str | int | None = None, measured: Sequence[Event] | None = None
    ) -> None:
        """Draws what each queue does over the time of a step and what compute waits for, and below it the memory,
        stacked by role, with its peak.

        Args:
            path: ends in .png or .svg.
            budget: drawn as a line: bytes, or text as `fits` takes it.
            measured: the result of `train.profile`, drawn below the prediction.

        Raises:
            FzeroTypeError: if `path` is not a path, or if `measured` is not a list of events.
            FzeroValueError: for another ending, a file that cannot be written, or if matplotlib is missing.
        """
        from fzero.plan.picture import picture

        file = _file(path, "draws to a file", 'save_picture("step.png")')
        _check_measured(measured)
        picture(self, file, None if budget is None else parse_bytes(budget), measured)


def plan(
    program: Program,
    device: Device | str | None = None,
    *,
    backend: str = "inductor",
    decisions: Sequence[PlanDecision] = (),
    stages: Sequence[Program] = (),
) -> Plan:
    """Predicts the cost of one step of a finished program on each rank. No device is touched.

    Args:
        program: lowered and ordered.
        device: rates to plan with, or the name of a known device ("h100", …) or calibration file; by default this
            machine's.
        backend: the backend that the subgraphs will be built with. It determines the temporaries of a call.
        decisions: the decisions that led to this program.
        stages: the programs of all stages of a pipeline, one of which is `program`.

    Raises:
        FzeroValueError: for an unknown device or backend.
    """
    check_backend_name("plan", backend)
    found = on_mesh(
        device if isinstance(device, Device) else get_device(device, program.mesh.device_type), program.mesh
    )
    walked = list(program.walk())
    line_of = statements(program)
    memory = _memory(program, found, backend)
    stages = stages or (program,)
    timelines = _timelines(stages, found, backend)
    # By identity: two stages may have equal programs.
    stage = next(i for i, x in enumerate(stages) if x is program)
    timeline = timelines[stage]
    # The stages of a pipeline run at the same time, and the step ends when the last one does.
    step_seconds = max(x.step_seconds for x in timelines)
    sent: dict[str, int] = {}
    for op, times in walked:
        queue = channel(op)
        if queue is not None:
            sent[queue] = sent.get(queue, 0) + times * transfer_bytes(op, program.values_by_name, program.mesh)
        elif found.asynchronous and on_host(op, program):
            sent[HOST] = sent.get(HOST, 0) + times * int(host_bytes(op, program, backend))
    exposed: dict[str, float] = dict.fromkeys(sent, 0.0)
    for number, waiting in timeline.exposed.items():
        exposed[timeline.waited[number]] += waiting
    peak = max(memory, key=lambda sample: (sample.total, sample.iteration))
    # among equal totals, the sample that uses more of the arena, which is allocated all the time
    host_peak = max(memory, key=lambda sample: (sample.host, -sample.host_by_role[ROLES.index("idle_pool")]))
    flops, dtype = model_flops(program), compute_dtype(program)
    stated = found.peak_flops.get(dtype_name(dtype))
    return Plan(
        name=program.name,
        mesh=str(program.mesh),
        device=found,
        backend=backend,
        step_seconds=step_seconds,
        compute_seconds=timeline.compute_seconds,
        exposed_seconds=timeline.exposed_seconds,
        channels={
            q: Channel(n, timeline.num_transfers[q], timeline.busy_seconds[q], exposed[q])
            for q, n in sorted(sent.items())
            if q in timeline.num_transfers  # a host that only takes views of shards does no work
        },
        waits=tuple(WaitTime(At(n, line_of[n]), timeline.waited[n], s) for n, s in timeline.exposed.items()),
        peak_bytes=peak.total,
        peak_line=At(peak.line, line_of[peak.line]),
        breakdown=dict(zip(ROLES, peak.by_role, strict=True)),
        persistent_bytes=resting_bytes(program),
        host_peak_bytes=host_peak.host,
        host_breakdown=dict(zip(ROLES, host_peak.host_by_role, strict=True)),
        host_persistent_bytes=resting_bytes(program, "host"),
        disk_bytes=disk_bytes(program),
        pool_bytes=program.pool_bytes,
        model_flops=flops,
        # Model FLOPs without recomputation, so that a step which recomputes more does not look more efficient.
        mfu=flops / step_seconds / stated if stated and step_seconds else None,
        roofline_fraction=flops / step_seconds / found.rate(dtype) if step_seconds else 0.0,
        memory=tuple(memory),
        events=tuple(timeline.events),
        lines=tuple(line_of),
        decisions=tuple(decisions),
        peer_replica_bytes=ward_bytes(program),
        stages=tuple(
            _stage(x, of, step_seconds, found, backend)
            for x, of in zip(stages, timelines, strict=True)
            if len(stages) > 1
        ),
        stage_events=tuple(tuple(x.events) for x in timelines if len(stages) > 1),
        expert_rows=_expert_rows(program),
        process=tuple(beside(found, peak.total, program.mesh.size > 1)),
        programs=tuple(stages),
        stage=stage,
    )


def _expert_rows(program: Program) -> ExpertRows | None:
    found = list[ExpertRows]()
    for op, _ in program.walk():
        if isinstance(op.attrs, RowsAttrs):
            for value in (program.values_by_name[a] for a in op.args[:-1]):
                rows = value.shape[0]
                found.append(ExpertRows(op.attrs.rows, rows, local_bytes(value, program.mesh) // rows))
    # On the way to the experts, the result has more rows than the operand.
    return max((x for x in found if x.reserved >= x.balanced), key=lambda x: x.reserved * x.row_bytes, default=None)


def _stage(program: Program, timeline: Timeline, step_seconds: float, device: Device, backend: str) -> StagePlan:
    sends = [op for op in program.instructions if op.op == "send_start"]
    # after its own work, the stage waits for the others
    waits = step_seconds - timeline.step_seconds
    # Waiting for another stage is bubble; waiting for a collective or a copy of this stage is not.
    waits += sum(s for n, s in timeline.exposed.items() if timeline.waited[n].startswith(("send:", "recv:")))
    peak, host, _ = peak_bytes(program, device, backend)
    return StagePlan(
        num_blocks=len({op.block.number for op in program.instructions if op.block is not None}),
        compute_seconds=timeline.compute_seconds,
        bubble=waits / step_seconds if step_seconds else 0.0,
        peak_bytes=peak,
        host_peak_bytes=host,
        persistent_bytes=resting_bytes(program),
        sent_bytes=sum(transfer_bytes(op, program.values_by_name, program.mesh) for op in sends),
    )


def peak_bytes(program: Program, device: Device, backend: str) -> tuple[int, int, int]:
    """Returns only the peak bytes on the device and on the host and the bytes on disk, as `plan` computes them."""
    memory = _memory(program, device, backend)
    return max(sample.total for sample in memory), max(sample.host for sample in memory), disk_bytes(program)


def queue_seconds(programs: Sequence[Program], device: Device, backend: str) -> tuple[float, dict[str, float]]:
    """Returns the time of the step, and a lower bound for each queue: the time for which the queue is busy, and,
    under "then ...", the time of compute before the first update plus that of the queue from there on. `programs`:
    those of all stages.
    """
    found = _timelines(programs, device, backend)
    least: dict[str, float] = {}
    for timeline in found:
        busy, first = {COMPUTE: timeline.compute_seconds, **timeline.busy_seconds}, timeline.before_update
        then = {
            # What a queue does after the first update cannot begin before the backward is over, so its time comes on
            # top of that compute.
            f"then {queue}": first.get(COMPUTE, 0.0) + seconds - first.get(queue, 0.0)
            for queue, seconds in busy.items()
            if queue != COMPUTE
        }
        for queue, taken in {**busy, **then}.items():
            least[queue] = max(taken, least.get(queue, 0.0))
    return max(x.step_seconds for x in found), least


def exposed_seconds(programs: Sequence[Program], device: Device, backend: str) -> dict[str, float]:
    """Returns the seconds per step that compute waits for each channel, in the first program. `programs`: those of
    all stages.
    """
    timeline, found = _timelines(programs, device, backend)[0], dict[str, float]()
    for number, waiting in timeline.exposed.items():
        queue = timeline.waited[number]
        found[queue] = found.get(queue, 0.0) + waiting
    return found


def _memory(program: Program, device: Device, backend: str) -> list[Sample]:
    return memory_of(program, temporaries_on(program.mesh, backend, torch.device(device.type)))


def _timelines(programs: Sequence[Program], device: Device, backend: str) -> list[Timeline]:
    rates = as_used(device, programs[0])
    return simulate(programs, lambda op, program: seconds(op, program, rates, backend), device.asynchronous)


@keyword_aliases("fz.fits", whole="include_process")
@keywords
def fits(plan: Plan, budget: str | int, *, include_process: bool = False) -> bool:
    """Returns whether a plan's peak stays within a memory budget. For a pipeline, the peak of every stage must.

    Args:
        plan: plan of a step.
        budget: bytes per rank, or text: "80GB" (10^9), "24GiB" (2^30).
        include_process: whether the budget must also hold the process itself (`Plan.process_bytes`), as the memory of
            an entire device or container must.

    Raises:
        FzeroTypeError: if `plan` is not a plan.
        FzeroValueError: for text that is not a size.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
        >>> plan = fz.lower(step, fz.AbstractMesh(data=1), params, batch, device="h100").plan
        >>> fits(plan, "80GB"), fits(plan, "1KiB")
        (True, False)
        >>> fits(plan, "500MiB"), fits(plan, "500MiB", include_process=True)
        (True, False)
    """
    if not isinstance(plan, Plan):
        fix = "fz.fits(train.plan, budget), or fz.fits(fz.lower(step, mesh, params, batch).plan, budget)"
        raise FzeroTypeError("fits", f"takes a plan, not {type(plan).__name__}", fix=fix)
    if problems := flag("include_process", include_process):
        raise FzeroTypeError("fits", "invalid arguments", problems, 'e.g. fz.fits(plan, "80GB", include_process=True)')
    peak = max([plan.peak_bytes, *(stage.peak_bytes for stage in plan.stages)])
    return peak + plan.process_bytes * include_process <= parse_bytes(budget)


def compute_dtype(program: Program) -> torch.dtype:
    """Returns the dtype that most products run in."""
    flops: dict[torch.dtype, float] = {torch.float32: 0.0}
    for op, times in program.walk():
        if op.op == "call":
            for dtype, n in cost_of(program.functions[op.fn]).flops.items():
                flops[dtype] = flops.get(dtype, 0.0) + times * n
    return max(flops, key=lambda dtype: flops[dtype])


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        _file(path, "writes a file", 'e.g. to_json("plan.json") or save_trace("step.json")').write_text(text)
    return text


def _file(path: Any, what: str, fix: str) -> Path:
    """Returns the path of a file that will be written, or raises an error that says why it cannot be. `what` and `fix`
    are those of the error if it is not a path.
    """
    if problems := path_like("path", path):
        raise FzeroTypeError("plan", what, problems, fix)
    file = Path(path)
    if not file.parent.is_dir():
        fix = f"create it first: mkdir -p {file.parent}"
        raise FzeroValueError("plan", f"the directory of {file} does not exist", fix=fix)
    if (why := unwritable_file(file)) is not None:
        raise FzeroValueError("plan", f"{str(path)!r} cannot be written: {why}", fix="name a file that you may write")
    return file


def _check_measured(measured: Any) -> None:
    """Raises an error if what should be the events of `train.profile` is something else."""
    if measured is None or (isinstance(measured, Sequence) and all(isinstance(event, Event) for event in measured)):
        return
    problems = [f"measured={shown(measured)}: must be a list of events"]
    fix = "state, measured = train.profile(state, batch); then plan.html(measured=measured)"
    raise FzeroTypeError("plan", "no measurement of a step", problems, fix)
