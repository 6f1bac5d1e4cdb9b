"""Doubles that are late: copies between host and device, and collectives, that happen when they must and not before.

What is told to be moved is not there until its wait, every bit of it set until then (a NaN in every floating point
format), and is taken from its source as that is when it is moved at last. A copy *to the device* is later still, as on
CUDA, where its wait holds up the device alone: it happens when a line first touches what it fills, or when the host
settles before it writes what the copy reads. One *to the host* that only the device waits for is not there for the
host until that settles, or has waited for a later one; for a copy back to the device it is. And the host runs ahead of
its device: what it writes over the source of a copy to the device, or where one to the host is still to arrive, before
it settled or waited for something that the device did later, is one of `races`. Fast ones forgive all that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fzero as fz
from fzero import tree
from fzero.comm import collectives
from fzero.comm.collectives import ProcessGroups
from fzero.memory.device_copies import PendingCopy, meet
from fzero.runtime import program_build

Tensors = Sequence[torch.Tensor]


def late(mesh: fz.Mesh, patch: Callable[[Any, str, Any], None] = setattr) -> LateCopies:
    """Makes whatever moves on a mesh late, of steps compiled on it from here on. `patch` sets attributes of modules,
    e.g. `monkeypatch.setattr`.

    The mesh has `unified_memory=False`, or copies do not move; and `shared_memory=False` if it has several ranks.
    """
    copies = LateCopies()
    mesh.context.copies = copies
    mesh.context.transport = LateTransport(mesh)
    executable = program_build.Executable

    def touching(program: Any, functions: Any, on: fz.Mesh, **given: Any) -> Any:
        run = executable(program, functions, on, **given)
        if on is mesh:
            names = {op.fn or op.op for op, _ in program.walk() if op.op not in ("loop", "rollback")}
            run.namespace.update(
                {name: copies.touched(name, run.namespace[name]) for name in names if callable(run.namespace.get(name))}
            )
        return run

    patch(program_build, "Executable", touching)
    return copies


@dataclass(eq=False)
class _Job:
    moves: list[tuple[torch.Tensor, torch.Tensor]]
    before: list[torch.Tensor] = field(default_factory=list)  # what it reads, as it was when it was waited for
    after: list[_Job] = field(default_factory=list)  # copies the other way that are done when this one is

    @property
    def sources(self) -> Tensors:
        return [source for source, _ in self.moves]

    @property
    def targets(self) -> Tensors:
        return [target for _, target in self.moves]


class LateCopies:
    """See `fzero.memory.device_copies.Copies`."""

    def __init__(self) -> None:
        self._behind: list[_Job] = []  # copies to the device that were waited for and have not happened
        self._unsettled: list[_Job] = []  # those of which the host does not know that the device is done with them
        self._arriving: list[_Job] = []  # copies to the host for which the device alone has waited, and not there yet
        self.num_held = 0  # how many there have been
        self.num_settled = 0  # of them, how many the host waited for because it was to write what they read
        self.races: list[str] = []  # lines that wrote what a copy reads or fills

    def to_host_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        job = self._started(sources, into)
        job.after = [*self._unsettled, *self._arriving]

        def wait() -> None:
            _move(job)
            self._arrive(lambda x: x in job.after)
            self._unsettled = [x for x in self._unsettled if x not in job.after]  # the device did this after those

        def hold() -> None:
            job.before = [x.clone() for x in job.sources]
            self._arriving.append(job)
            self.num_held += 1

        return PendingCopy(into or (), sources, wait, hold=hold)

    def to_device_start(self, sources: Tensors, into: Tensors | None = None) -> PendingCopy:
        job = self._started(sources, into)

        def wait() -> None:
            job.before = [x.clone() for x in job.sources]
            self._behind.append(job)
            self._unsettled.append(job)

        return PendingCopy(into or (), sources, wait)

    def settle(self, written: Tensors) -> None:
        arrived = self._arrive(lambda job: meet(job.targets, written))
        self._unsettled = [job for job in self._unsettled if not any(job in x.after for x in arrived)]
        settled = [job for job in self._unsettled if meet(job.sources, written)]
        self._catch_up(lambda job: job in settled)
        self._unsettled = [job for job in self._unsettled if job not in settled]
        self.num_settled += len(settled)

    def finish(self) -> None:
        """The device has done all that it was told."""
        self._catch_up(lambda job: True)
        self._arrive(lambda job: True)
        self._unsettled = []

    def touched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A line of a program: what it is given is there; what it writes is compared."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self._catch_up(lambda job: meet(job.targets, tensors))
            result = function(*args, **kwargs)
            raced = [job for job in self._unsettled if not all(map(_same_bytes, job.sources, job.before))]
            self.races += [name] * len(raced)
            self._unsettled = [job for job in self._unsettled if job not in raced]
            crossed = [job for job in self._arriving if not all(map(_is_poison, job.targets))]
            self.races += [name] * len(crossed)
            self._arriving = [job for job in self._arriving if job not in crossed]
            return result

        return call

    def _started(self, sources: Tensors, into: Tensors | None) -> _Job:
        assert into is not None, "two memories"
        self._catch_up(lambda job: meet(job.targets, (*sources, *into)) or meet(job.sources, into))
        self._arrive(lambda job: meet(job.targets, (*sources, *into)))
        # the device carries out one after the other
        self._unsettled = [job for job in self._unsettled if not meet(job.sources, into)]
        job = _Job([(s, t) for s, t in zip(sources, into, strict=True) if s.data_ptr() != t.data_ptr() and s.numel()])
        for target in job.targets:
            _poison(target)
        return job

    def _arrive(self, which: Callable[[_Job], bool]) -> list[_Job]:
        now = [job for job in self._arriving if which(job)]
        self._arriving = [job for job in self._arriving if job not in now]
        for job in now:
            for target, value in zip(job.targets, job.before, strict=True):
                target.copy_(value)
        return now

    def _catch_up(self, which: Callable[[_Job], bool]) -> None:
        now = [job for job in self._behind if which(job)]
        self._behind = [job for job in self._behind if job not in now]
        for job in now:
            _move(job)


class LateTransport:
    """Process groups, whose collectives begin when they are waited for."""

    def __init__(self, mesh: fz.Mesh):
        self._now = ProcessGroups(mesh)
        self.pool, self.begin, self.connect_pairs = self._now.pool, self._now.begin, self._now.connect_pairs
        self.send_start, self.recv_start = self._now.send_start, self._now.recv_start

    def all_gather_start(self, shards: Tensors, axis: str, into: Tensors) -> Callable[[], Any]:
        kept = [x.clone() for x in shards]
        for whole in into:
            _poison(whole)
        for shard, value in zip(shards, kept, strict=True):
            if meet([shard], into):
                shard.copy_(value)
        return lambda: self._now.all_gather_start(shards, axis, into)

    def reduce_scatter_start(self, wholes: Tensors, axis: str, op: str, into: Tensors) -> Callable[[], Any]:
        flats, shards = into[: len(wholes)], into[len(wholes) :]
        collectives.settle(wholes, flats)
        for shard in shards:
            if not meet([shard], flats):
                _poison(shard)
        return lambda: self._now.reduce_scatter_start(flats, axis, op, into)

    def all_reduce_start(self, values: Tensors, axis: str, op: str, into: Tensors) -> Callable[[], Any]:
        collectives.settle(values, into)
        summands = [x.clone() for x in into]
        for flat in into:
            _poison(flat)

        def begin() -> Any:
            for flat, summand in zip(into, summands, strict=True):
                flat.copy_(summand)
            return self._now.all_reduce_start(into, axis, op, into)

        return begin

    def all_to_all_start(self, values: Tensors, axis: str, into: Tensors) -> Callable[[], Any]:
        flats, rows = into[: len(values)], into[len(values) :]
        collectives.settle(values, flats)
        for row in rows:
            _poison(row)
        return lambda: self._now.all_to_all_start(flats, axis, into)

    def all_to_all_v_start(
        self, values: Tensors, counts: torch.Tensor, axis: str, rows: int, into: Any
    ) -> Callable[[], Any]:
        flats, counts = into[: len(values)], counts.clone()
        collectives.settle(values, flats)
        for row in into[len(values) + 1 :]:
            _poison(row)
        return lambda: self._now.all_to_all_v_start(flats, counts, axis, rows, into)

    def wait(self, begin: Callable[[], Any], into: Tensors, together: bool = False) -> Tensors:
        return self._now.wait(begin(), into, together)


def _poison(x: torch.Tensor) -> None:
    if x.numel():
        x.view(-1).view(torch.uint8).fill_(255)


def _is_poison(x: torch.Tensor) -> bool:
    return bool((x.view(-1).view(torch.uint8) == 255).all())


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _move(job: _Job) -> None:
    for source, target in job.moves:
        target.copy_(source)
