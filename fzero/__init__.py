"""fzero: a JAX-style functional sharding framework for PyTorch.

Training is written as pure functions over pytrees; transforms rewrite the step; what runs is a short program that you can print.
"""

from typing import NoReturn

from fzero import checkpoint, data, errors, optim, random, testing, tree
from fzero.lower import Lowered, lower
from fzero.mesh import AbstractMesh, Mesh, close_mesh, make_mesh
from fzero.optim.loss_scale import LossScale
from fzero.program.block import block
from fzero.program.show import show
from fzero.runtime.build import has_compiler
from fzero.runtime.compile import compile
from fzero.runtime.evaluation import CompiledEval
from fzero.runtime.move import move
from fzero.runtime.training import CompiledStep
from fzero.schedule.plan import fits
from fzero.step import EvalStep, State, Step, compose, eval_step, train_step, weighted
from fzero.transforms.accumulate import accumulate
from fzero.transforms.fp8 import fp8
from fzero.transforms.offload import offload
from fzero.transforms.precision import mixed_precision
from fzero.transforms.remat import remat
from fzero.transforms.shard import data_parallel, shard_grads, shard_opt_state, shard_params

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh",
    "CompiledEval",
    "CompiledStep",
    "EvalStep",
    "LossScale",
    "Lowered",
    "Mesh",
    "State",
    "Step",
    "accumulate",
    "block",
    "checkpoint",
    "close_mesh",
    "compile",
    "compose",
    "data",
    "data_parallel",
    "errors",
    "eval_step",
    "fits",
    "fp8",
    "has_compiler",
    "lower",
    "make_mesh",
    "mixed_precision",
    "move",
    "offload",
    "optim",
    "random",
    "remat",
    "shard_grads",
    "shard_opt_state",
    "shard_params",
    "show",
    "testing",
    "train_step",
    "tree",
    "weighted",
]


def __getattr__(name: str) -> NoReturn:
    raise errors.no_attribute(__name__, name, __all__)
