"""Trains PyTorch models that are too large for one device: a JAX-style functional sharding framework.

Training is written as pure functions over pytrees, and transforms rewrite the step. The code that runs is a short
program that you can print.

A name is imported when it is first used: `import fzero` itself loads neither PyTorch nor anything else.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fzero._utils.deprecation import install

if TYPE_CHECKING:
    from fzero import checkpoint, data, deepspeed, errors, hf, optim, random, testing, tree
    from fzero.compiler.auto_mesh import choose_mesh
    from fzero.compiler.lower import lower
    from fzero.compiler.lowered import Lowered
    from fzero.elastic.health import Health
    from fzero.elastic.restarts import run
    from fzero.elastic.run_context import Run
    from fzero.ir.printer import show
    from fzero.loss import chunked_cross_entropy, weighted
    from fzero.mesh import AbstractMesh, Mesh, close_mesh, make_mesh
    from fzero.modules.functionalize import functionalize
    from fzero.modules.quantized_linear import quantize_frozen
    from fzero.ops import experts
    from fzero.ops.weight_quantization import dequantize, quantize
    from fzero.optim.loss_scale import LossScale
    from fzero.plan.plan import fits
    from fzero.runtime.build.build import has_compiler
    from fzero.runtime.compile import compile
    from fzero.runtime.compiled_eval import CompiledEval
    from fzero.runtime.compiled_step import CompiledStep
    from fzero.runtime.resharding import reshard
    from fzero.runtime.training_log import log
    from fzero.sharding.user_rules import sharding_rule
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
    from fzero.transforms.tensor import tensor_parallel
    from fzero.transforms.zero import data_parallel, shard_grads, shard_opt_state, shard_params

__version__ = "0.3.0.dev0"

_HOME = {
    "AbstractMesh": "mesh",
    "CompiledEval": "runtime.compiled_eval",
    "CompiledStep": "runtime.compiled_step",
    "EvalStep": "step",
    "Health": "elastic.health",
    "LossScale": "optim.loss_scale",
    "Lowered": "compiler.lowered",
    "Mesh": "mesh",
    "Run": "elastic.run_context",
    "State": "step",
    "Step": "step",
    "accumulate": "transforms.accumulate",
    "block": "trace.block",
    "close_mesh": "mesh",
    "compile": "runtime.compile",
    "compose": "step",
    "compress": "transforms.compress",
    "data_parallel": "transforms.zero",
    "eval_step": "step",
    "dequantize": "ops.weight_quantization",
    "expert_parallel": "transforms.expert",
    "fits": "plan.plan",
    "fp8": "transforms.fp8",
    "functionalize": "modules.functionalize",
    "has_compiler": "runtime.build.build",
    "hierarchical": "transforms.hierarchical",
    "log": "runtime.training_log",
    "choose_mesh": "compiler.auto_mesh",
    "lower": "compiler.lower",
    "make_mesh": "mesh",
    "mixed_precision": "transforms.precision",
    "move": "state.move",
    "offload": "transforms.offload",
    "pipeline": "transforms.pipeline",
    "quantize": "ops.weight_quantization",
    "quantize_frozen": "modules.quantized_linear",
    "redundant": "transforms.redundant",
    "remat": "transforms.remat",
    "reshard": "runtime.resharding",
    "run": "elastic.restarts",
    "shard_grads": "transforms.zero",
    "shard_opt_state": "transforms.zero",
    "shard_params": "transforms.zero",
    "sharding_rule": "sharding.user_rules",
    "show": "ir.printer",
    "sequence_parallel": "transforms.sequence",
    "tensor_parallel": "transforms.tensor",
    "train_step": "step",
    "chunked_cross_entropy": "loss",
    "weighted": "loss",
}
"""The module that defines each public name."""

_MOVED = {
    "fzero.experts": "fzero.ops.experts",
    "fzero.launcher": "fzero.comm.launcher",
    "fzero.layout": "fzero.sharding.layout",
    "fzero.units": "fzero._utils.units",
    "fzero.plan.devices": "fzero.plan.device_lookup",
    "fzero.program": "fzero.ir",
    "fzero.program.attrs": "fzero.ir.attributes",
    "fzero.program.ir": "fzero.ir.program",
    "fzero.program.verify": "fzero.ir.verifier",
    "fzero.program.ops": "fzero.ir.ops",
    "fzero.program.ops.base": "fzero.ir.ops.op",
    "fzero.program.ops.control": "fzero.ir.ops.control",
    "fzero.transforms.base": "fzero.transforms.transform",
    "fzero.transforms.slots": "fzero.transforms.transform_state",
}
"""Modules that the documentation of 0.2 imported, which have moved. Their old names work until 0.4."""
install(_MOVED, {"fzero.experts": "fz.experts"})

_MODULES = {"experts": "ops.experts"}
"""Public modules whose path differs from their public name."""

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
    "dequantize",
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
    "quantize",
    "quantize_frozen",
    "random",
    "redundant",
    "remat",
    "reshard",
    "run",
    "shard_grads",
    "shard_opt_state",
    "shard_params",
    "sharding_rule",
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
"""Deprecated names, and the new names."""


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        importlib.import_module("fzero._utils.deprecation").warn(f"fz.{name}", f"fz.{new}")
        return __getattr__(new)
    if name not in __all__:
        if name.startswith("__"):  # queried by Python and its tools
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise importlib.import_module("fzero.errors").no_attribute(__name__, name, __all__)
    if name in _HOME:
        found = getattr(importlib.import_module(f"fzero.{_HOME[name]}"), name)
    else:
        found = importlib.import_module(f"fzero.{_MODULES.get(name, name)}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
