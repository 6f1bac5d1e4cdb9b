"""Captures the runs of a program as a CUDA graph and replays them: one launch by the CPU instead of thousands.

A program can be captured as one graph if it uses only the device: its state, its pool and its other buffers keep their
addresses, and nothing in it waits for the device. Two things change from call to call: the batch, which is copied into
the graph's own buffers, and the addresses of the state, which are compared.

[Note: captured] The first `WARM_UP` runs are ordinary runs, because the initialization that libraries do on first use
cannot be captured. Then the run is captured, which executes nothing, and replayed, as are all later runs. If the
addresses of the state change, warm-up and capture start again. A capture that fails has written nothing; that run and
all later ones are then ordinary runs. NCCL requires that a run that one rank captures is captured by all ranks.
Therefore the ranks tell each other whether the capture succeeded, and either all of them replay or none. A communicator
cannot be destroyed while a graph contains its kernels, so graphs are dropped before a rank leaves
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero import tree
from fzero._compat import compat
from fzero.comm import control_group
from fzero.comm.collective_sequence import before_leaving
from fzero.errors import FzeroValueError
from fzero.ir.ops import OPS
from fzero.ir.program import Program
from fzero.mesh import Mesh
from fzero.runtime.build.artifact_cache import logger

WARM_UP = 3
"""Number of ordinary runs before the run that is captured."""


class Graphs:
    """CUDA graphs on one device. All of them are captured on the same stream and share one memory pool. They are
    replayed one after the other, and results in that memory are copied before the next replay."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def is_capturing(self) -> bool:
        """Whether the caller is capturing a graph."""
        return torch.cuda.is_current_stream_capturing()

    def aside(self, run: Callable[[], Any]) -> Any:
        """Runs `run` on the stream that is used for captures, and returns its result."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            out = run()
        here.wait_stream(self._stream)
        return out

    def capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Captures a run without executing it. Returns the graph, and the results, which every replay fills."""
        here, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        out, reason = None, None
        try:
            # thread_local: calls by other threads (a data loader, NCCL's watchdog) are neither captured nor errors
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    out = run()
                except Exception as error:
                    reason = error
                    raise
        except BaseException as error:
            if torch.cuda.is_current_stream_capturing():  # the capture failed at its start, and has not been ended
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
            torch.cuda.set_stream(here)  # a capture that could not be ended does not restore the stream
            # `error` only says that the capture is invalid; `reason` is its cause.
            if reason is not None and error is not reason:
                raise reason from None
            raise
        return graph, out


def graphs_of(mesh: Mesh) -> Graphs | None:
    """Returns the CUDA graphs of a mesh, created on first use; None if its device does not support them."""
    if mesh.context.graphs is None and mesh.device.type == "cuda":
        mesh.context.graphs = Graphs(mesh.device)
    return mesh.context.graphs


def obstacles(program: Program) -> list[str]:
    """Lists the ops because of which a program cannot be captured, one of each kind."""
    found: dict[str, str] = {}
    for op, _ in program.walk():
        if op.tiers:
            way = " to ".join(op.tiers)
            found.setdefault(way, f"{op.op}: moves values from {way}")
        elif reason := OPS[op.op].uncaptured:
            found.setdefault(reason, f"{op.op}: {reason}")
        elif op.on_host:
            found.setdefault("on the host", f"{op.fn or op.op}: runs on the host")
    return list(found.values())


class NotCaptured(FzeroValueError):
    """A capture failed. Nothing was executed, and the state is unchanged."""


def check(program: Program, owner: str) -> None:
    """Raises FzeroValueError if a program cannot be captured."""
    if problems := obstacles(program):
        fix = "leave out cuda_graphs=True, or the transforms that move values: offload, redundant, pipeline"
        what = f"{program.name} uses more than the device, and cannot be captured as a CUDA graph"
        raise FzeroValueError(owner, what, problems, fix)


class Replayed:
    """The runs of a program: ordinary runs at first, and then replays. See [Note: captured].

    Args:
        run: the program as a function of its trees, the last of which is the batch.
        namespace: the functions that the program calls. While one of them is replaced, by a timer or a recorder, runs
            are ordinary runs.
        mesh: the mesh whose ranks all do the same.
        graphs: the CUDA graphs of its device.
        required: whether a capture that fails is an error.
    """

    def __init__(
        self, run: Callable[..., Any], namespace: Mapping[str, Any], mesh: Mesh, graphs: Graphs, required: bool
    ):
        self._run, self._mesh, self._graphs, self._required = run, mesh, graphs, required
        self._namespace, self._made_of = namespace, dict(namespace)
        self.refused = ""  # why the capture failed; empty if it did not
        self.drop()

    def drop(self) -> None:
        """Drops the graph, and releases its memory."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_runs, self._at = 0, ()
        self._batch, self._outputs = list[torch.Tensor](), ()

    def prepare(self, *trees: Any) -> None:
        """Called by all ranks before a run: captures the run if it is time to.

        Raises:
            FzeroValueError: the capture is required and failed on some rank. Nothing has been written.
        """
        if self.refused or self._is_watched():
            return
        at = tuple([x.data_ptr() for x in tree.leaves(trees[:-1])])
        if at != self._at:
            self.drop()
            self._at = at
        self._num_runs += 1
        if self._num_runs != WARM_UP + 1:
            return
        reasons = control_group.all_gather_values(self._mesh.control, "step", lambda: self._capture(trees))
        if not any(reasons):
            return
        self.drop()
        several = len(reasons) > 1
        said = [f"rank {rank}: {text}" if several else text for rank, text in enumerate(reasons) if text]
        self.refused = "; ".join(said)
        if self._required:
            fix = "leave out cuda_graphs=True; the state is unchanged"
            raise NotCaptured("step", "the step cannot be captured as a CUDA graph", said, fix)
        if self._mesh.rank == 0:
            logger.warning("fzero.step: runs without CUDA graphs, because its capture failed: %s", self.refused)

    def __call__(self, *trees: Any) -> tuple[Any, ...]:
        if self._is_watched():
            return self._run(*trees)
        if self._graph is None:
            return self._run(*trees) if self.refused else self._graphs.aside(lambda: self._run(*trees))
        for buffer, new in zip(self._batch, tree.leaves(trees[-1]), strict=True):
            buffer.copy_(new, non_blocking=True)
        self._graph.replay()
        return tuple(x.clone() for x in self._outputs)  # cloned, because the next replay overwrites them

    def _capture(self, trees: tuple[Any, ...]) -> str:
        """Captures a run. Returns the reason if it fails, and an empty text otherwise."""
        before_leaving(_drop_all)
        leaves, structure = tree.flatten(trees[-1])
        own: dict[int, torch.Tensor] = {}  # by identity, so that leaves that are the same tensor stay the same tensor
        try:
            for x in leaves:
                if id(x) not in own:
                    own[id(x)] = x.clone()
            batch = [own[id(x)] for x in leaves]
            self._graph, self._outputs = self._graphs.capture(
                lambda: self._run(*trees[:-1], tree.unflatten(structure, batch))
            )
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        self._batch = batch
        _captured.add(self)
        return ""

    def _is_watched(self) -> bool:
        """Whether something observes the operations of a run. A replay executes no operations that could be
        observed."""
        if compat.dispatch_modes() or self._graphs.is_capturing():
            return True
        return any(self._namespace.get(name) is not value for name, value in self._made_of.items())


_captured: weakref.WeakSet[Replayed] = weakref.WeakSet()


def _drop_all() -> None:
    """Called before a rank leaves the process groups whose kernels are in graphs."""
    for replayed in list(_captured):
        replayed.drop()
    _captured.clear()
