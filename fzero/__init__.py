"""Trains PyTorch models too large for one device: a JAX-style functional sharding framework.

Training is written as pure functions over pytrees; transforms rewrite the step; what runs is a short program that you
can print.

A name is imported when it is first used: `import fzero` itself loads neither PyTorch nor anything else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fzero import checkpoint, data, deepspeed, errors, experts, hf, optim, random, testing, tree
    from fzero.build.build import has_compiler
    from fzero.elastic.health import Health
    from fzero.elastic.loop import Run
    from fzero.elastic.resharding import reshard
    from fzero.elastic.running import run
    from fzero.loss import chunked_cross_entropy, weighted
    from fzero.lowering.choose_mesh import choose_mesh
    from fzero.lowering.lower import lower
    from fzero.lowering.lowered import Lowered
    from fzero.mesh import AbstractMesh, Mesh, close_mesh, make_mesh
    from fzero.modules.functionalize import functionalize
    from fzero.monitor import log
    from fzero.optim.loss_scale import LossScale
    from fzero.plan.plan import fits
    from fzero.program.show import show
    from fzero.runtime.compile import compile
    from fzero.runtime.evaluation import CompiledEval
    from fzero.runtime.training import CompiledStep
    from fzero.state.move import move
    from fzero.step import EvalStep, State, Step, compose, eval_step, train_step
    from fzero.trace.block import block
    from fzero.transforms.accumulate import accumulate
    from fzero.transforms.compress import compress
    from fzero.transforms.expert import expert_parallel
    from fzero.transforms.fp8 import fp8
    from fzero.transforms.hierarchical import hierarchical
    from fzero.transforms.offload import offload
    from fzero.transforms.pipeline import pipeline
    from fzero.transforms.precision import mixed_precision
    from fzero.transforms.redundant import redundant
    from fzero.transforms.remat import remat
    from fzero.transforms.sequence import sequence_parallel
    from fzero.transforms.shard import data_parallel, shard_grads, shard_opt_state, shard_params
    from fzero.transforms.tensor import tensor_parallel

__version__ = "0.3.0.dev0"

_HOME = {
    "AbstractMesh": "mesh",
    "CompiledEval": "runtime.evaluation",
    "CompiledStep": "runtime.training",
    "EvalStep": "step",
    "Health": "elastic.health",
    "LossScale": "optim.loss_scale",
    "Lowered": "lowering.lowered",
    "Mesh": "mesh",
    "Run": "elastic.loop",
    "State": "step",
    "Step": "step",
    "accumulate": "transforms.accumulate",
    "block": "trace.block",
    "close_mesh": "mesh",
    "compile": "runtime.compile",
    "compose": "step",
    "compress": "transforms.compress",
    "data_parallel": "transforms.shard",
    "eval_step": "step",
    "expert_parallel": "transforms.expert",
    "fits": "plan.plan",
    "fp8": "transforms.fp8",
    "functionalize": "modules.functionalize",
    "has_compiler": "build.build",
    "hierarchical": "transforms.hierarchical",
    "log": "monitor",
    "choose_mesh": "lowering.choose_mesh",
    "lower": "lowering.lower",
    "make_mesh": "mesh",
    "mixed_precision": "transforms.precision",
    "move": "state.move",
    "offload": "transforms.offload",
    "pipeline": "transforms.pipeline",
    "redundant": "transforms.redundant",
    "remat": "transforms.remat",
    "reshard": "elastic.resharding",
    "run": "elastic.running",
    "shard_grads": "transforms.shard",
    "shard_opt_state": "transforms.shard",
    "shard_params": "transforms.shard",
    "show": "program.show",
    "sequence_parallel": "transforms.sequence",
    "tensor_parallel": "transforms.tensor",
    "train_step": "step",
    "chunked_cross_entropy": "loss",
    "weighted": "loss",
}
"""The module that defines each public name; a name that is not here is a module itself."""

__all__ = [
    "AbstractMesh",
    "CompiledEval",
    "CompiledStep",
    "EvalStep",
    "Health",
    "LossScale",
    "Lowered",
    "Mesh",
    "Run",
    "State",
    "Step",
    "accumulate",
    "block",
    "checkpoint",
    "choose_mesh",
    "close_mesh",
    "compile",
    "compose",
    "compress",
    "data",
    "data_parallel",
    "deepspeed",
    "errors",
    "eval_step",
    "expert_parallel",
    "experts",
    "fits",
    "fp8",
    "functionalize",
    "has_compiler",
    "hf",
    "hierarchical",
    "log",
    "lower",
    "make_mesh",
    "mixed_precision",
    "move",
    "offload",
    "optim",
    "pipeline",
    "random",
    "redundant",
    "remat",
    "reshard",
    "run",
    "shard_grads",
    "shard_opt_state",
    "shard_params",
    "show",
    "sequence_parallel",
    "tensor_parallel",
    "testing",
    "train_step",
    "tree",
    "chunked_cross_entropy",
    "weighted",
]


_RENAMED = {"once_a_step": "hierarchical"}
"""Deprecated names, each with the new one."""


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        importlib.import_module("fzero.deprecation").warn(f"fz.{name}", f"fz.{new}")
        return __getattr__(new)
    if name not in __all__:
        if name.startswith("__"):  # asked by Python and its tools
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise importlib.import_module("fzero.errors").no_attribute(__name__, name, __all__)
    home = _HOME.get(name)
    found = (
        getattr(importlib.import_module(f"fzero.{home}"), name) if home else importlib.import_module(f"fzero.{name}")
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
