"""Runs the transformed step and the plain one side by side, and compares their leaves (`check_equivalent`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero.arguments import plain_numbers
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError, TraceError, message
from fzero.local_device import check_default
from fzero.lowering.choose_rules import choose_rules
from fzero.lowering.choose_stages import open_stages
from fzero.lowering.layouts import batch_inputs, zero_of
from fzero.lowering.traced import base_program
from fzero.mesh import AbstractMesh, Mesh, make_mesh
from fzero.program.ir import Program
from fzero.ranks.agreement import everywhere
from fzero.ranks.notes import exchanged, gathered_tensors
from fzero.runtime.compile import compile
from fzero.runtime.same_program import describe, difference
from fzero.runtime.training import CompiledStep
from fzero.step import State, Step
from fzero.step.checks import check_batch, check_init, check_params
from fzero.testing.lines import distance, norm
from fzero.testing.report import Difference, Report
from fzero.testing.tolerance import (
    LAMBDA,
    NUM_MOVED,
    PRECISIONS,
    WAYS,
    Roundoff,
    moved,
    noise,
    roundoff,
    unit,
    with_gradients,
)
from fzero.trace.block import every_call_traced
from fzero.trace.subgraph import signature
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.base import find, on_device
from fzero.transforms.precision import MixedPrecision


@plain_numbers
def check_equivalent(
    step: Step,
    params: Any,
    batch: Any,
    mesh: AbstractMesh | None = None,
    *,
    steps: int = 3,
    key: torch.Tensor | None = None,
    backend: str = "eager",
    raises: bool = True,
    **options: Any,
) -> Report:
    """Takes a few steps with a transformed step and with the plain one, from one state on one global batch, and
    compares all leaves after each.

    The plain step has the same loss and optimizer and no transforms, and sees the whole batch at once: the parts of all
    ranks, one behind the other along dim 0 in the order of their ranks. Every leaf has a tolerance of its own, which
    follows from dtypes and the lengths of reductions (docs/checking.md). If a leaf is farther off than that, the
    transform that is to blame is searched for, and the first line of the program whose value differs. A step that is
    skipped because its scaled gradients overflow is taken again, with the scale that follows. What `mixed_precision`
    rounds leaves room for faults of other transforms: a step that has both is then compared without it as well. Every
    call of a block is traced: one that reads something unseen (see `fz.block`) and is not what it was taken for is an
    error, and so is a loss that does something else each time it is called.

    On a mesh of several ranks every rank calls it, and all get the same report. An `AbstractMesh` is simulated in this
    process (`simulate`): what the program means there is compared, for a batch that is the global one.

    Args:
        step: a training step with its transforms.
        params: a pytree of tensors with whole leaves, the same on every rank, or a function of a key that returns one.
            They are not written.
        batch: this rank's part of the global batch, as for a compiled step. What `accumulate` does not cut is the same
            on every rank.
        mesh: from `make_mesh`, by default the one of all processes that torchrun started; or an `AbstractMesh`.
        steps: to take, at least 1.
        key: int64[3], the same on every rank; by default `fz.random.key(0)`.
        backend: "eager", or "inductor", which also checks what is compiled.
        raises: whether leaves that differ are an error.
        **options: further arguments of `fz.compile`: budgets, an example batch. A simulation takes none.

    Communication: the batch and, after each step, the state are gathered on every rank.
    Memory: seven whole states, as many gradients a step, and the plain step's activations of the whole batch on every
            rank: for models, or models cut small, that fit that.

    Raises:
        EquivalenceError: a leaf differs by more than its tolerance; `error.report` is what would have been returned.
        FzeroError: the step cannot be built or run on this mesh, whatever `raises` is.
        TraceError: naming a block that computes something else at a later call; a loss or an optimizer that does when
            it is traced again.

    Papers: Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019;
        Parker, Monte Carlo arithmetic, 1997.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.ones(3)}, torch.randn(4, 3)
        >>> report = check_equivalent(fz.accumulate(2)(step), params, batch, fz.make_mesh(data=1))
        >>> report.equivalent, report.differences[0].difference < 1e-5
        (True, True)
    """
    if not isinstance(step, Step):
        raise FzeroTypeError(
            "check_equivalent", f"checks a training step, not {type(step).__name__}", fix="make one with fz.train_step"
        )
    if not isinstance(steps, int) or steps < 1:
        raise FzeroValueError(
            "check_equivalent", f"steps={steps!r} compares nothing", fix="give a whole number of at least 1"
        )
    mesh = make_mesh() if mesh is None else mesh
    if not isinstance(mesh, AbstractMesh):
        what, fix = f"runs on a mesh, not on {type(mesh).__name__}", "make one with fz.make_mesh, or fz.AbstractMesh"
        raise FzeroTypeError("check_equivalent", what, fix=fix)
    simulated = None if isinstance(mesh, Mesh) else mesh
    if simulated and (given := [*options, *([] if backend == "eager" else ["backend"])]):
        fix = "leave them out, or check on a mesh of processes: fz.make_mesh"
        raise FzeroValueError("check_equivalent", f"a simulation does not take {', '.join(given)}", fix=fix)
    here = mesh if isinstance(mesh, Mesh) else Mesh(dict(mesh.axes), 0, torch.device("cpu"))
    check_default("check_equivalent", here.device_type)
    setting = setting_of(step, params, batch, here, steps, key, backend, options, simulated)
    report = replace(compare(setting), wanted=steps)
    if not report.equivalent and not simulated:
        from fzero.testing.blame import blame

        report = replace(report, blame=blame(setting, report))
    elif report.equivalent and (others := _without_precision(step)):
        exact = check_equivalent(
            replace(step, transforms=others),
            setting.params,
            batch,
            mesh,
            steps=steps,
            key=key,
            backend=backend,
            raises=False,
            **options,
        )
        report = replace(report, exact=exact)
    if raises and not report.equivalent:
        fix = (
            "look at the transform and the line that the report names; fz.testing.check_equivalent(..., raises=False) "
            "returns it"
        )
        problems = str(report).rstrip("\n").splitlines()
        raise EquivalenceError(
            message(
                "check_equivalent", f"the transformed step of {step.name} differs from the plain one", problems, fix
            ),
            report,
        )
    return report


def _without_precision(step: Step) -> tuple[Any, ...]:
    """The other transforms of a step that computes in another dtype than it rests in; none if it does not."""
    others = tuple(t for t in step.transforms if not isinstance(t, PRECISIONS))
    return others if len(others) < len(step.transforms) else ()


@dataclass(frozen=True)
class Comparison:
    """The setting of a comparison: the arguments of `check_equivalent`, settled.

    Attributes:
        params: the tree, with whole leaves, on the mesh's device.
        batch: this rank's part.
        whole_batch: that of all ranks.
        size: what the tolerances come from.
        plain: the trajectory of the plain step, and how far each leaf may lie off it.
        simulated: the mesh, where all its ranks are threads of this process.
    """

    step: Step
    params: Any
    batch: Any
    whole_batch: Any
    mesh: Mesh
    steps: int
    key: torch.Tensor
    backend: str
    options: dict[str, Any]
    size: Roundoff
    plain: Trajectory
    simulated: AbstractMesh | None = None


@dataclass(frozen=True)
class Trajectory:
    """The leaves of the plain step's states and metrics by path, those of the first state first, and how far each may
    lie off in the Euclidean norm."""

    first: State
    leaves: Sequence[dict[str, torch.Tensor]]
    tolerances: Sequence[dict[str, float]]


def setting_of(
    step: Step,
    params: Any,
    batch: Any,
    mesh: Mesh,
    steps: int,
    key: torch.Tensor | None,
    backend: str,
    options: dict[str, Any],
    simulated: AbstractMesh | None = None,
) -> Comparison:
    """The arguments checked, and the plain step's side of the comparison. `simulated`: the batch is the global one, and
    the mesh that of its first rank."""
    key = (fzrandom.key(0) if key is None else key).to(mesh.device)
    check_batch(batch)
    if callable(params):
        check_init(params)
        params = params(key)
    check_params(params)
    absent = [f"{p}: {tree.describe(x)}" for p, x in tree.with_paths((params, batch), "") if x.is_meta]
    if absent:
        raise FzeroValueError(
            "check_equivalent", "these leaves have no values", absent, "give tensors in memory: the step is run"
        )
    step, params, batch = on_device(step, mesh.device), _on(params, mesh), _on(batch, mesh)
    axes = zero_of(step, mesh).batch_axes
    record = find(step.transforms, Accumulate)
    has_rows = rows(batch, record)
    if simulated:
        from fzero.testing.simulate import parts_of

        whole_batch, batch = batch, parts_of(step, simulated, batch)[0]
    else:
        if mesh.axis_size(axes) > 1:
            everywhere(mesh, "check_equivalent", lambda: check_rows("check_equivalent", batch, has_rows, record))
        whole_batch = gathered(batch, mesh, axes, has_rows)
    parts = mesh.axis_size(axes) * (record.num_micro_batches if record else 1)
    step, _ = choose_rules(step, mesh, params, batch_inputs(batch))
    with every_call_traced():
        base, again = (base_program(step, mesh, params, batch) for _ in range(2))
    if differs := difference(_text(base), _text(again), "the first time", "the second"):
        fix = (
            "draw with fz.random from the step's key, and pass what changes from step to step in the batch, as a 0-dim "
            "tensor"
        )
        raise TraceError(
            "check_equivalent", f"{step.name} computes something else each time it is called", differs, fix
        )
    size = roundoff(step, base, params, parts)
    plain = replace(step, transforms=())
    first = _on(plain.init(params, key), mesh)
    path = trajectory(plain, first, whole_batch, steps, size)
    finite = [all(x.isfinite().all() for x in leaves.values()) for leaves in path.leaves]
    steps = max(1, finite.index(False) - 1) if False in finite else steps  # a run that diverges has no tolerance
    return Comparison(step, params, batch, whole_batch, mesh, steps, key, backend, options, size, path, simulated)


def _text(base: Program) -> str:
    """All that a base program computes."""
    update = base.update
    updates = [] if update is None else [f"{update.out}: {entry}" for entry in signature(update.attrs.graph)]
    return "\n".join([describe(base), *updates])


def trajectory(plain: Step, first: State, batch: Any, steps: int, size: Roundoff) -> Trajectory:
    """The trajectory of the plain step, and the tolerances of its leaves: see [Note: tolerance]."""
    grads: list[list[torch.Tensor]] = []
    exact = _states(with_gradients(plain, lambda t, i, g: g, grads), first, batch, steps)
    seen: list[list[list[torch.Tensor]]] = [[] for _ in range(NUM_MOVED)]
    others = [
        _states(moved(plain, size, number, grads_of), first, batch, steps) for number, grads_of in enumerate(seen)
    ]
    amount = noise(grads, seen)
    others += [
        _states(with_gradients(plain, lambda t, i, g, way=way: g + way * amount[t][i].to(g.dtype)), first, batch, steps)
        for way in WAYS
    ]
    tolerances = []
    for t, now in enumerate(exact):
        most = {}
        for path, x in now.items():
            if not x.is_floating_point():
                codes = path.startswith("opt_state") and x.dtype in (torch.int8, torch.uint8)
                most[path] = 2 * _farthest([run[t][path] for run in others], x) + LAMBDA if codes and t else 0.0
                continue
            metric = path.startswith("metrics")
            come = norm(x) if metric else norm(x.to(torch.float64) - exact[0][path].to(torch.float64))
            num_stored = 0 if metric else t + (unit(size.store) > unit(x.dtype))
            stored = math.sqrt(num_stored) * max(unit(x.dtype), unit(size.store)) * norm(x)
            most[path] = 2 * _farthest([run[t][path] for run in others], x) + LAMBDA * (size.with_codes * come + stored)
        tolerances.append(most)
    return Trajectory(first, exact, tolerances)


def compare(setting: Comparison) -> Report:
    """The transformed step beside the plain one, without a look at where a difference begins."""
    s = setting
    worst: dict[str, tuple[float, Difference]] = {}
    skipped = 0
    for t, (found, again) in enumerate(_taken(s)):
        skipped += again
        for path, want in s.plain.leaves[t].items():
            got, size, tolerance = found.get(path), norm(want) or 1.0, s.plain.tolerances[t][path]
            off = math.inf if got is None or got.shape != want.shape else distance(got.cpu(), want.cpu())
            difference = Difference(
                path, tuple(want.shape), tree.dtype_name(want.dtype), t, off / size, tolerance / size
            )
            ratio = 0.0 if off == 0 else off / tolerance if tolerance else math.inf
            if path not in worst or (worst[path][1].ok and ratio >= worst[path][0]):
                worst[path] = ratio, difference
    mine = list(worst.items())
    everyone = [mine] if s.simulated else everyones(mine, s.mesh, tuple[str, tuple[float, Difference]])
    merged: dict[str, tuple[float, Difference]] = {}
    for path, entry in (item for one in everyone for item in one):
        if path not in merged or entry[0] > merged[path][0]:
            merged[path] = entry
    ordered = tuple(d for _, d in sorted(merged.values(), key=lambda entry: -entry[0]))
    return Report(
        s.step.name,
        str(s.mesh),
        tuple(map(str, s.step.transforms)),
        s.steps,
        "simulated" if s.simulated else s.backend,
        str(s.size),
        ordered,
        skipped=skipped,
    )


def _taken(s: Comparison) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """The leaves of the first state and after each step, and how often that was skipped before."""
    if s.simulated:
        from fzero.testing.simulate import simulated

        for state, metrics in simulated(s.step, s.simulated, s.params, s.whole_batch, s.steps, s.key):
            yield leaves_of(state, metrics), 0
        return
    train = compiled(s)
    state, left = train.init(s.params, s.key), most_skipped(s.step)
    yield leaves_of(train.gather(state), {}), 0
    for _ in range(s.steps):
        before = left
        state, metrics = train(state, s.batch)
        while overflowed(metrics) and left:
            state, metrics = train(state, s.batch)
            left -= 1
        yield leaves_of(train.gather(state), metrics), before - left


def compiled(s: Comparison) -> CompiledStep:
    """The step, compiled for the batch where its stages depend on that."""
    given = {"batch": s.batch} if open_stages(s.step, s.mesh) else {}
    return compile(s.step, s.mesh, backend=s.backend, **{**given, **s.options})


def overflowed(metrics: dict[str, Any]) -> bool:
    """Whether a step was skipped."""
    return bool(metrics.get("skipped", False))


def most_skipped(step: Step) -> int:
    """The number of steps that a loss scale may skip until it is low enough; one that never moves would skip all."""
    scale = record.scaling if (record := find(step.transforms, MixedPrecision)) else None
    if scale is None or scale.backoff_factor == 1:
        return 0
    return scale.hysteresis + math.ceil(math.log(scale.minimum / scale.initial) / math.log(scale.backoff_factor))


def leaves_of(state: State, metrics: Any) -> dict[str, torch.Tensor]:
    """The leaves of a whole state and of the metrics, by path."""
    out: dict[str, torch.Tensor] = {"step": state.step, "key": state.key}
    for root, values in (("params", state.params), ("opt_state", state.opt_state), ("metrics", metrics)):
        out |= {p: x.detach() for p, x in tree.with_paths(values, root) if isinstance(x, torch.Tensor)}
    return out


def rows(batch: Any, record: Accumulate | None) -> list[bool]:
    """For each leaf of a batch whether each part of the batch has its own rows of it; any other is the same in all of
    them."""
    return [(record or Accumulate()).cuts(leaf) for leaf in batch_inputs(batch).leaves]


def check_rows(owner: str, batch: Any, has_rows: Sequence[bool], record: Accumulate | None) -> None:
    """Raises if leaves of which each rank has rows of its own have different numbers of them."""
    of = [leaf for leaf, cut in zip(batch_inputs(batch).leaves, has_rows, strict=True) if cut]
    if len({leaf.shape[0] for leaf in of}) > 1:
        num, odd = record.num_micro_batches if record else 1, min(of, key=lambda leaf: leaf.shape[0]).path
        what = "the leaves of a batch have different numbers of rows: which of them are rows of the batch?"
        fix = "say which leaves are the same on every rank: "
        fix += f"fz.accumulate({num}, replicated=lambda path, leaf: path == {odd!r})"
        raise FzeroValueError(owner, what, [f"{leaf.path} {list(leaf.shape)}" for leaf in of], fix)


def gathered(batch: Any, mesh: Mesh, axes: tuple[str, ...], has_rows: Sequence[bool]) -> Any:
    """The global batch: the parts of the ranks along these axes, along dim 0."""
    if mesh.axis_size(axes) == 1:
        return batch
    flat, structure = tree.flatten(batch)
    index = torch.tensor(mesh.index(axes), device="cpu")
    here = {"index": index, **{str(i): x for i, x in enumerate(flat)}}
    parts = {int(part["index"]): part for part in gathered_tensors(here)}
    in_order = [[parts[i][str(n)] for n in range(len(flat))] for i in sorted(parts)]
    whole = [
        torch.cat(xs).to(mesh.device) if cut else xs[0].to(mesh.device)
        for cut, *xs in zip(has_rows, *in_order, strict=True)
    ]
    return tree.unflatten(structure, whole)


def everyones(mine: list[Any], mesh: Mesh, form: Any) -> list[list[Any]]:
    """The notes of each rank, on every rank. `form`: of a note (read_json.py)."""
    return [mine] if mesh.size == 1 else exchanged(mine, list[form], "check_equivalent")


def _states(step: Step, state: State, batch: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    out = [leaves_of(state, {})]
    for _ in range(steps):
        state, metrics = step(state, batch)
        out.append(leaves_of(state, metrics))
    return out


def _farthest(runs: Sequence[torch.Tensor], x: torch.Tensor) -> float:
    """The farthest that any run moved each element, as one norm. An element that is not finite may be anything."""
    off = torch.stack([(run.to(torch.float64) - x.to(torch.float64)).abs() for run in runs]).amax(0)
    return norm(off.nan_to_num(nan=0.0, posinf=0.0))


def _on(values: Any, mesh: Mesh) -> Any:
    """Leaves on the mesh's device; ties stay ties."""
    done: dict[int, torch.Tensor] = {}
    return tree.map(lambda x: done.setdefault(id(x), x.detach().to(mesh.device)), values)
