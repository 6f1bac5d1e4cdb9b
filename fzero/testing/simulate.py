"""Simulates a mesh in one process: one thread per rank interprets the program of a step, op by op.

It shows the reference semantics of a step on a mesh that is not available: for example, what a new transform or a new
op does over several axes, without processes. Nothing is fast or overlapped here. The simulation knows nothing of
transports, arenas and compilers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fzero import tree
from fzero._utils.arguments import count, plain_numbers
from fzero.comm.groups import ranks_along
from fzero.compiler.combined_transforms import zero_of
from fzero.compiler.lower import lower
from fzero.compiler.lowered import Lowered
from fzero.errors import DivergenceError, FzeroTypeError, FzeroValueError
from fzero.mesh import AbstractMesh, Mesh
from fzero.sharding.layout import Leaf, shard
from fzero.step import State, Step
from fzero.step.checks import check_batch
from fzero.testing.global_batch import check_rows, rows
from fzero.testing.interpreter import Interpreter, ProgramCode
from fzero.testing.reference_trajectory import leaves_of
from fzero.transforms.accumulate import Accumulate
from fzero.transforms.pipeline import Pipeline
from fzero.transforms.transform import find, on_device


@plain_numbers
def simulate(
    step: Step, mesh: AbstractMesh, params: Any, batch: Any, *, steps: int = 1, key: torch.Tensor | None = None
) -> tuple[State, dict[str, Any]]:
    """Runs steps on a mesh of devices that are not available: every rank is a thread of this process, which
    interprets the step's program.

    The result is the meaning of the program on that mesh. `check_equivalent`, on a mesh of processes, compares it
    with the compiled run.

    Args:
        step: a training step with its transforms.
        mesh: an `AbstractMesh` of any axes; some tens of ranks are practical.
        params: a pytree of unsharded tensors, or a function of a key that returns one. They are not written.
        batch: the global batch: the parts of all ranks, concatenated along dim 0 in the order of the ranks.
        steps: number of steps, each on the same batch.
        key: int64[3]; by default `fz.random.key(0)`.

    Returns:
        The unsharded state, and the metrics of the last step.

    Communication: none; ranks are threads.
    Memory: every rank's state and activations, in this process.

    Raises:
        FzeroValueError: if the batch does not divide among the ranks; if the transforms of the step keep state
            besides parameters and optimizer state (offload, a loss scale).
        DivergenceError: if ranks that should hold the same part of a tensor, or the same metric, hold different
            values: a collective is missing.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fz.optim.sgd(0.1)))
        >>> state, metrics = fz.testing.simulate(step, fz.AbstractMesh(data=4), {"w": torch.ones(5)}, torch.ones(8, 5))
        >>> state.params["w"], metrics["loss"]
        (tensor([0., 0., 0., 0., 0.]), tensor(25.))
    """
    problems = [] if isinstance(step, Step) else [f"step: {type(step).__name__}, not a step of fz.train_step"]
    problems += [] if isinstance(mesh, AbstractMesh) else [f"mesh: {type(mesh).__name__}, not a mesh"]
    problems += count("steps", steps)
    problems += [
        f"{path}: a meta tensor, which has no values"
        for name, x in (("params", params), ("batch", batch))
        if not callable(x)
        for path, leaf in tree.with_paths(x, name)
        if isinstance(leaf, torch.Tensor) and leaf.is_meta
    ]
    if problems:
        fix = "fz.testing.simulate(fz.train_step(...), fz.AbstractMesh(data=2), params, batch)"
        raise FzeroTypeError("simulate", "invalid arguments", problems, fix)
    check_batch(batch)
    *_, last = simulated(step, mesh, params, batch, steps, key)
    return last


def simulated(
    step: Step, mesh: AbstractMesh, params: Any, batch: Any, steps: int, key: torch.Tensor | None
) -> Iterator[tuple[State, dict[str, Any]]]:
    """Yields the first state, and then each following state with its metrics. Arguments and errors are those of
    `simulate`.
    """
    whole, run = simulator(step, mesh, params, batch, key)
    yield whole, {}
    for _ in range(steps):
        whole, metrics = run(whole, batch)
        yield whole, metrics


def simulator(
    step: Step, mesh: AbstractMesh, params: Any, batch: Any, key: torch.Tensor | None
) -> tuple[State, Callable[[State, Any], tuple[State, dict[str, Any]]]]:
    """Returns the first state, and a function that simulates a step from a state and a global batch of the same
    shapes as `batch`.
    """
    step = on_device(step, torch.device("cpu"))
    whole = step.init(params, key)
    lowered = lower(step, mesh, whole.params, parts_of(step, mesh, batch)[0])
    if kept := sorted(name for name in lowered.program.leaves if name.startswith("extras")):
        fix = "leave out the transform that keeps them, or check_equivalent on ranks of fz.make_mesh"
        raise FzeroValueError("simulate", "the state has more than parameters and optimizer state", kept, fix)
    simulation = Simulation(lowered, ranks_of(mesh))
    return whole, lambda state, batch: _one_step(lowered, simulation, state, parts_of(step, mesh, batch))


def ranks_of(mesh: AbstractMesh) -> list[Mesh]:
    """Returns the mesh as each of its ranks sees it, on CPUs."""
    return [Mesh(dict(mesh.axes), rank, torch.device("cpu")) for rank in range(mesh.size)]


class ThreadExchange:
    """Exchanges values between ranks that are threads. All ranks along an axis take part in every exchange over it. A
    message from one rank to another is kept here until it is received.
    """

    def __init__(self, ranks: Sequence[Mesh]):
        self._values: dict[Any, torch.Tensor] = {}
        self._messages: dict[Any, Sequence[torch.Tensor]] = {}
        self._along = {(m.rank, axis): ranks_along(m.axes, m.rank, axis) for m in ranks for axis in m.axes}
        self._barriers = {tuple(along): threading.Barrier(len(along)) for along in self._along.values()}
        self._sent, self._failed = threading.Condition(), False

    def along(self, mesh: Mesh, axis: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of the ranks along an axis, in their order."""
        ranks = self._along[mesh.rank, axis]
        barrier = self._barriers[tuple(ranks)]
        self._values[mesh.rank] = x.clone()
        barrier.wait()
        found = [self._values[rank] for rank in ranks]
        # The second wait keeps a fast rank from overwriting its value for the next exchange before all have read this
        # one.
        barrier.wait()
        return found

    def send(self, mesh: Mesh, axis: str, peer: int, number: int, values: Sequence[torch.Tensor]) -> None:
        with self._sent:
            self._messages[axis, mesh.rank, self._along[mesh.rank, axis][peer], number] = values
            self._sent.notify_all()

    def recv(
        self, mesh: Mesh, axis: str, peer: int, number: int, like: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        key = axis, self._along[mesh.rank, axis][peer], mesh.rank, number
        with self._sent:
            self._sent.wait_for(lambda: self._failed or key in self._messages)
            if self._failed:
                raise threading.BrokenBarrierError
            return self._messages.pop(key)

    def abort(self) -> None:
        """Ends all exchanges, because a rank has failed."""
        for barrier in self._barriers.values():
            barrier.abort()
        with self._sent:
            self._failed = True
            self._sent.notify_all()


class Simulation:
    """A lowered step on all ranks of a mesh, which are threads of this process.

    Args:
        lowered: a training step or an evaluation.
        ranks: the mesh as each rank sees it, on CPUs.

    Attributes:
        programs: the program of each rank.
    """

    def __init__(self, lowered: Lowered, ranks: Sequence[Mesh]):
        axis = find(lowered.program.transforms, Pipeline)
        stages = [mesh.index(axis.axis) if axis else 0 for mesh in ranks]
        codes = [ProgramCode(program, ranks[0].device) for program in lowered.programs]
        self.ranks = ranks
        self.programs = [lowered.programs[stage] for stage in stages]
        self._codes = [codes[stage] for stage in stages]

    def shards(self, leaves: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Returns each rank's shards of the unsharded tensors of a state, by name."""
        return [
            {name: shard(leaves[name], leaf, mesh) for name, leaf in program.leaves.items()}
            for program, mesh in zip(self.programs, self.ranks, strict=True)
        ]

    def run(self, held: Sequence[Mapping[str, torch.Tensor]], parts: Sequence[Any]) -> list[Interpreter]:
        """Interprets the step once and returns the ranks with all their values.

        Args:
            held: each rank's shards of the state.
            parts: the batch of each rank.
        """
        exchange = ThreadExchange(self.ranks)

        def interpret(i: int) -> Interpreter:
            batch = dict(tree.with_paths(parts[i], "batch"))
            rank = Interpreter(self._codes[i], self.ranks[i], {**held[i], **batch}, exchange)
            try:
                rank.run_ops(rank.program.instructions)
            except BaseException:
                # Without this, the other ranks would wait for this one in a barrier forever.
                exchange.abort()
                raise
            return rank

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            done = [pool.submit(interpret, i) for i in range(len(self.ranks))]
        errors = [e for e in (f.exception() for f in done) if e is not None]
        if errors:
            # Broken barriers are consequences of the abort; the error that caused it is raised.
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [f.result() for f in done]


def _one_step(
    lowered: Lowered, simulation: Simulation, whole: State, parts: Sequence[Any]
) -> tuple[State, dict[str, Any]]:
    """Interprets one step and assembles the next state from the shards of all ranks. Raises an error if ranks
    disagree.
    """
    leaves = leaves_of(whole, {})
    table = {name: leaf for program in lowered.programs for name, leaf in program.leaves.items()}
    ran = simulation.run(simulation.shards(leaves), parts)
    put_together = {name: whole_leaf(leaf, ran, leaves[name]) for name, leaf in table.items()}
    problems = [problem for _, found in put_together.values() for problem in found]
    metrics = [tree.unflatten(lowered.structure, [rank.values[name] for name in rank.program.outputs]) for rank in ran]
    problems += unequal(metrics)
    if problems:
        fix = "a reduction is missing, or over too few axes: look for the gradient or metric in print(fz.lower(...))"
        raise DivergenceError("simulate", f"ranks of mesh {lowered.program.mesh} hold different values", problems, fix)
    after = {name: leaf for name, (leaf, _) in put_together.items()}
    params, opt_state = (
        inputs and inputs.rebuild({i: after[inputs.leaves[i].path] for i in inputs.distinct})
        for inputs in (lowered.params, lowered.opt_state)
    )
    return State(after["step"], params, opt_state, after["key"], {}), metrics[0]


def unequal(metrics: Sequence[Any]) -> list[str]:
    """Returns the metrics that are not the same on every rank."""
    first, paths = tree.leaves(metrics[0]), tree.paths(metrics[0], "metrics")
    return [
        f"{path}: not the same on rank {rank} as on rank 0"
        for rank, found in enumerate(metrics)
        for path, x, y in zip(paths, first, tree.leaves(found), strict=True)
        if not torch.equal(x.nan_to_num(), y.nan_to_num())
    ]


def whole_leaf(leaf: Leaf, ran: Sequence[Interpreter], before: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Returns a tensor assembled from the shards of all ranks, and messages about ranks that hold different values
    for the same elements.
    """
    # Sharding the element numbers in the same way as the leaf shows which elements each rank holds.
    numbers = torch.arange(1, leaf.numel + 1).reshape(leaf.shape)  # 0 is padding
    out, first = before.new_zeros(leaf.numel), torch.full((leaf.numel,), -1)
    problems = []
    for rank in (x for x in ran if leaf.path in x.program.leaves):
        at = shard(numbers, leaf.with_layout(dtype=torch.int64), rank.mesh).reshape(-1)
        own = rank.values[leaf.path].reshape(-1)[at > 0].to(out.dtype)
        at = at[at > 0] - 1
        known = first[at] >= 0
        if not torch.equal(out[at][known].nan_to_num(), own[known].nan_to_num()):
            problems.append(f"{leaf.path}: not the same on rank {rank.mesh.rank} as on rank {int(first[at][known][0])}")
        out[at[~known]], first[at[~known]] = own[~known], rank.mesh.rank
    return out.reshape(leaf.shape), problems


def parts_of(step: Step, mesh: AbstractMesh, batch: Any) -> list[Any]:
    """Returns each rank's part of the global batch."""
    axes, ranks = zero_of(step, mesh).batch_axes, ranks_of(mesh)
    num, flat, structure = mesh.axis_size(axes), *tree.flatten(batch)
    record = find(step.transforms, Accumulate)
    split = rows(batch, record)
    paths = tree.paths(batch, "batch")
    if wrong := [f"{p} {list(x.shape)}" for p, x, c in zip(paths, flat, split, strict=True) if c and x.shape[0] % num]:
        fix = f"give a global batch of a multiple of {num} rows"
        raise FzeroValueError("simulate", f"the batch does not divide among {num} ranks", wrong, fix)
    check_rows("simulate", batch, split, record)
    return [
        tree.unflatten(structure, [x.chunk(num)[m.index(axes)] if c else x for x, c in zip(flat, split, strict=True)])
        for m in ranks
    ]
