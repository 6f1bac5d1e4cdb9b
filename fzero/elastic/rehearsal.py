"""Prepares a spare process for the place of any rank: calls the run's `main` up to its first step, which is lowered and
built and not run.

The mesh of a rehearsal has the sizes of the run's and no process group, its state shapes and no values. Any other use
of either in main ends the rehearsal. Imported modules, functions from the compiler's cache and PyTorch's own caches
stay.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fzero import compat, random
from fzero.build.build import build
from fzero.elastic import host, spares
from fzero.elastic.health import Health
from fzero.elastic.joining import Signals
from fzero.elastic.loop import Run
from fzero.errors import FzeroValueError
from fzero.lowering.budget import Budget
from fzero.lowering.choose_formats import open_formats
from fzero.lowering.layouts import abstract, opt_state_inputs, params_inputs
from fzero.lowering.slots import slots_of
from fzero.mesh import Mesh, unjoined
from fzero.plan.devices import get_device
from fzero.program.lines import Inputs
from fzero.runtime.training import CompiledStep
from fzero.state.assemble import abstract_state
from fzero.step import State
from fzero.transforms.base import find
from fzero.transforms.offload import Offload

logger = logging.getLogger("fzero")

_LATER = ("fzero.lowering.lower", "fzero.checkpoint", compat.COMPILER, "torch.distributed.device_mesh")
"""Modules that a rank imports on its way to its first step."""


def stand_by(main: Callable[[Run], Any], timeout: float, axes: Mapping[str, Any]) -> None:
    """Returns when this process, a spare until then, has taken the place of a rank.

    Raises:
        FzeroValueError: the script has joined a process group, as the rank that it is not.
    """
    if dist.is_initialized():
        what = "a spare process has joined a process group before fz.run"
        fix = "leave dist.init_process_group and make_mesh to fz.run; or start without --spares"
        raise FzeroValueError("run", what, fix=fix)
    memory = Path(os.environ[host.MEMORY])
    rehearse(main, timeout, axes)
    spares.stand_by(memory)


def rehearse(main: Callable[[Run], Any], timeout: float, axes: Mapping[str, Any]) -> str:
    """Calls `main` up to its first step, and says how far it came."""
    begin = time.process_time()
    for name in _LATER:
        importlib.import_module(name)
    mesh = unjoined(**{"timeout": timeout, **_arguments(axes)})
    if mesh.device_type != "cpu":
        return "modules are imported"
    try:
        main(SpareRehearsal(mesh))
        came = "main has returned without a step"
    except _Rehearsed:
        came = f"its step is built, in {time.process_time() - begin:.1f} CPU s"
    except Exception as error:
        came = f"main raised before its first step: {' '.join([type(error).__name__, *str(error).splitlines()[:2]])}"
    logger.info("fzero.run: a spare is ready: %s", came)
    return came


def _arguments(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `make_mesh`, as `unjoined` takes them."""
    named = ("device", "shared_memory", "unified_memory")
    sizes = {name: size for name, size in axes.items() if name not in (*named, "symmetric_memory")}
    return {**{name: axes[name] for name in named if name in axes}, "axes": sizes}


class _Rehearsed(BaseException):
    """Ends a rehearsal where the first step would run."""


class SpareRehearsal(Run):
    """The run that a spare's `main` is given."""

    rehearsing = True

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, None, 1, Signals(()), Health(stragglers=None))
        self.source = "init"

    def state(self, train: CompiledStep, params: Any, key: torch.Tensor | None = None, **_: Any) -> State:
        whole = abstract(params) if callable(params) else params
        train._resolve(whole)
        inputs = params_inputs(train.resolved, self.mesh, whole)
        slots = slots_of(train.resolved, self.mesh, inputs)
        state = abstract_state(inputs, opt_state_inputs(train.resolved, self.mesh, inputs), slots)
        train.__class__ = _Step
        train._inputs = lambda _: inputs  # type: ignore[method-assign]
        return state._replace(step=torch.zeros((), dtype=torch.int64), key=random.key(0) if key is None else key)

    def steps(self, state: State, stop: int) -> Iterator[int]:
        yield from range(stop)

    def step(self, train: CompiledStep, state: State, batch: Any) -> Any:
        return train(state, batch)

    def keep(self, state: State) -> None:
        raise _Rehearsed

    def save(self, state: State, **_: Any) -> Any:
        raise _Rehearsed


class _Step(CompiledStep):
    """A compiled step that is built and not run."""

    def __call__(self, state: State, batch: Any, *more: Any) -> Any:
        inputs: Inputs = self._inputs(state)
        asked = find(self.resolved.transforms, Offload) or open_formats(self.resolved)
        if asked or self.limits != (None, None, None):  # else the ranks compare rates
            self._budget = Budget(
                self.limits[0], get_device(None, self.mesh.device_type), self.backend, *self.limits[1:]
            )
        lowered = self._lower(inputs, batch)
        # a spare takes the place of any rank, so of any stage
        used = {line.fn for program in lowered.programs for line, _ in program.walk() if line.op == "call"}
        functions = {name: f for name, f in lowered.program.functions.items() if name in used}
        build(functions, self.backend, Mesh({"data": 1}, 0, self.mesh.device))
        raise _Rehearsed
