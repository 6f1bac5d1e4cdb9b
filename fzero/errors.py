"""Defines the error classes, which are part of the interface: an error lists every failure at once, named by path,
with a fix.

All errors fzero raises on purpose subclass `FzeroError` and the built-in class a caller would expect.
`message` lays them out the same way everywhere:

    fzero.shard_params: cannot shard 2 leaves over axis 'data'
      params['w_up'] (float32[3000, 768]): ...
    Fix: ...
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fzero._utils.out_of_memory_error import OutOfMemory

__all__ = [
    "FzeroError",
    "FzeroValueError",
    "FzeroTypeError",
    "TransformError",
    "TraceError",
    "BudgetError",
    "OutOfMemory",
    "VerifyError",
    "DivergenceError",
    "RankLost",
    "BusyError",
    "TierError",
    "LossScaleError",
    "EquivalenceError",
    "CheckpointError",
    "StorageError",
]


class FzeroError(Exception):
    """Base class of every error raised by fzero. It is created from a text, or from the arguments of `message`.

    Example:
        >>> import fzero as fz
        >>> try:
        ...     fz.AbstractMesh(data=0)
        ... except fz.errors.FzeroError as error:
        ...     print(type(error).__name__)
        FzeroValueError
    """

    def __init__(self, where: str, what: str | None = None, problems: Iterable[str] = (), fix: str | None = None):
        super().__init__(where if what is None else message(where, what, problems, fix))


class FzeroValueError(FzeroError, ValueError):
    """An invalid value: an unknown axis, a batch that does not divide, a loss that is not a scalar.

    Example:
        >>> import fzero as fz
        >>> fz.remat("most")
        Traceback (most recent call last):
            ...
        fzero.errors.FzeroValueError: fzero.remat: unknown policy 'most'
        Fix: one of 'full', 'min_cut', 'none', 'auto', or a fraction: remat(0.5)
    """


class FzeroTypeError(FzeroError, TypeError):
    """A value of the wrong kind: a parameter that is not a tensor, a block that returns a string.

    Example:
        >>> import fzero as fz
        >>> fz.shard_params(lambda params, batch: 0.0)
        Traceback (most recent call last):
            ...
        fzero.errors.FzeroTypeError: fzero.shard_params: transforms a step, not function
        Fix: fz.shard_params(...)(fz.train_step(loss_fn, optimizer))
    """


class TransformError(FzeroValueError):
    """Two transforms that contradict each other, or one that cannot be applied.

    Example:
        >>> import fzero as fz
        >>> fz.accumulate(2)(fz.accumulate(4)(fz.train_step(lambda p, x: x.sum(), fz.optim.sgd(0.1))))
        Traceback (most recent call last):
            ...
        fzero.errors.TransformError: fzero.accumulate: conflicts with accumulate(num_micro_batches=4)
          accumulate(num_micro_batches=2)
          accumulate(num_micro_batches=4)
          two different accumulate
        Fix: apply one of the two
    """


class TraceError(FzeroValueError):
    """A function that cannot be traced: mutated inputs, closure tensors, data-dependent control flow.

    Example:
        >>> import torch, fzero as fz
        >>> data = torch.ones(2)
        >>> step = fz.train_step(lambda p, x: (p["w"] * data).sum(), fz.optim.sgd(0.1))
        >>> try:
        ...     fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.ones(2)}, torch.ones(2))
        ... except fz.errors.TraceError as error:
        ...     print(str(error).splitlines()[0])
        fzero.train_step: reads a tensor that is not one of its arguments
    """


class BudgetError(FzeroValueError):
    """A step that does not fit into its memory budget.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> params, batch = {"w": torch.ones(64, 64)}, torch.ones(2, 64)
        >>> try:
        ...     fz.lower(step, fz.AbstractMesh(data=1), params, batch, memory_budget="1KB")
        ... except fz.errors.BudgetError as error:
        ...     print(str(error).splitlines()[0])
        fzero.memory_budget: the step does not fit
    """


class VerifyError(FzeroValueError):
    """A program that breaks one of its own rules. Never raised for a user's mistake: it is a bug in a rewrite.

    Example:
        >>> from dataclasses import replace
        >>> import torch, fzero as fz
        >>> from fzero.ir.verifier import verify
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.optim.sgd(0.1))
        >>> program = fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.ones(2)}, torch.ones(2, 2)).program
        >>> try:
        ...     verify(replace(program, instructions=program.instructions[1:]))
        ... except VerifyError as error:
        ...     print(str(error).splitlines()[0])
        fzero.verify: the program of <lambda> breaks its rules
    """


class DivergenceError(FzeroError, RuntimeError):
    """Ranks that would run different programs or hold different values of the same tensors, or that did not take part
    in comparing them.

    Example:
        >>> issubclass(DivergenceError, RuntimeError)
        True
    """


class RankLost(DivergenceError):
    """Another rank has exited or died during a joint operation of the ranks. `fz.run` recovers from this error.

    Example:
        >>> issubclass(RankLost, DivergenceError)
        True
    """


class BusyError(FzeroError, RuntimeError):
    """A call that needs a mesh to itself while another thread is using it.

    Example:
        >>> import torch, fzero as fz
        >>> mesh = fz.make_mesh(data=1)
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.1))
        >>> train = fz.compile(step, mesh, backend="eager")
        >>> with mesh.alone("something else"):
        ...     try:
        ...         train.init({"w": torch.ones(2)})
        ...     except fz.errors.BusyError as error:
        ...         print(str(error).split(":")[0])
        fzero.init
    """


class TierError(FzeroError, RuntimeError):
    """A memory tier that failed while a step ran: a full disk, an I/O error. The state is lost; the last checkpoint
    is not.

    Example:
        >>> issubclass(TierError, RuntimeError)
        True
    """


class LossScaleError(FzeroError, RuntimeError):
    """Gradients that overflow although the loss scale is at its minimum.

    Example:
        >>> issubclass(LossScaleError, RuntimeError)
        True
    """


class EquivalenceError(FzeroError, AssertionError):
    """The results of a transformed step differ from those of the plain step by more than their tolerances.

    Attributes:
        report: the `fz.testing.Report`, which says by how much each tensor differs, and where the difference begins.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.optim.sgd(0.1))  # a sum is not a mean
        >>> step = fz.accumulate(2)(step)
        >>> try:
        ...     fz.testing.check_equivalent(step, {"w": torch.ones(3)}, torch.ones(4, 3), fz.make_mesh(data=1))
        ... except fz.errors.EquivalenceError as error:
        ...     print(error.report.equivalent)
        False
    """

    def __init__(self, text: str, report: object = None):
        super().__init__(text)
        self.report = report


class CheckpointError(FzeroValueError):
    """A checkpoint that is missing, damaged, incomplete or of another model.

    Example:
        >>> import fzero as fz
        >>> fz.checkpoint.latest("nowhere")
        Traceback (most recent call last):
            ...
        fzero.errors.CheckpointError: fzero.checkpoint: nowhere does not exist
        Fix: give the path that fz.checkpoint.save was given
    """


class StorageError(CheckpointError):
    """A checkpoint that the operating system, or an object store, does not allow to be written or read: a full disk,
    an I/O error, another user's directory, an unreachable store. The previous checkpoint is unchanged.

    Example:
        >>> issubclass(StorageError, CheckpointError)
        True
    """


def message(where: str, what: str, problems: Iterable[str] = (), fix: str | None = None) -> str:
    """Formats error texts, all in the same layout: `where: what`, one line per problem, and the fix last."""
    lines = [f"fzero.{where}: {what}", *(f"  {p}" for p in problems)]
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def parted(error: BaseException) -> tuple[str, str]:
    """Returns the text of an error without its fix, and the fix; "" if it has none. An error that contains the text of
    another one has a fix of its own.
    """
    text, _, fix = str(error).partition("\nFix: ")
    return text, fix


_HERE = {
    "data_parallel": "ddp distributeddataparallel dataparallel zero0",
    "shard_opt_state": "zero1 zeroredundancyoptimizer shard_optimizer",
    "shard_grads": "zero2",
    "shard_params": "zero zero3 fsdp fsdp2 hsdp fully_shard fullyshardeddataparallel shard",
    "mixed_precision": "amp autocast bf16 fp16 precision",
    "accumulate": "gradient_accumulation grad_accum",
    "remat": "activation_checkpointing gradient_checkpointing",
    "offload": "cpu_offload zero_offload zero_infinity nvme",
    "make_mesh": "init_device_mesh devicemesh",
    "clip_by_global_norm": "clip clip_grad_norm clip_grad_norm_",
    "warmup_cosine": "cosineannealinglr get_cosine_schedule_with_warmup",
}
_CALLS = {
    "fz.checkpoint.save(path, state)": "save save_checkpoint save_state",
    "train.restore(path)": "load restore load_checkpoint load_state load_state_dict",
    "state.params? It is a tree, model.params before training; optimizers take none": "parameters named_parameters",
    "model.write_back(train.gather(state).params), which fills the module": "state_dict named_buffers module",
    "model.train_step(optimizer, fn), which trains in training mode": "train fit",
    "model.eval_step(fn)": "eval evaluate predict",
    "state, metrics = train(state, batch)": "backward zero_grad training_step",
    "fz.make_mesh(device=...), which says where a state is": "to cuda cpu",
    "fz.mixed_precision('bf16')": "half bfloat16",
    "fz.train_step(loss_fn, optimizer)": "grad value_and_grad",
    "fz.compile(step, mesh)": "jit pjit pmap",
}
_ELSEWHERE = {theirs: ours for given in (_HERE, _CALLS) for ours, names in given.items() for theirs in names.split()}
"""Names in other libraries, in lower case, and the transform of fzero, function of fzero.optim or call that
corresponds to each.
"""


def no_attribute(owner: Any, name: str, known: Iterable[str] | None = None) -> AttributeError:
    """Returns the error for a module (given by name) or an object without this attribute. It suggests the name in
    fzero or the call that does the same, similar names, or all names.
    """
    of = f"module {owner!r}" if isinstance(owner, str) else f"{type(owner).__name__!r} object"
    if name.startswith("_"):  # queried by Python and its tools
        return AttributeError(f"{of} has no attribute {name!r}")
    known = sorted(x for x in (dir(owner) if known is None else known) if not x.startswith("_"))
    small = {x.lower(): x for x in reversed(known)}
    meant = _ELSEWHERE.get(name.lower())
    meant = small.get(name.lower(), meant if meant in known or meant in _CALLS else None)
    names = [meant] if meant else [small[x] for x in difflib.get_close_matches(name.lower(), small, n=4)] or known
    fix = f"{'it has' if names == known else 'did you mean'} {', '.join(names)}"
    return AttributeError(f"{of} has no attribute {name!r}\nFix: {fix}")


def attribute_of(owner: Any, name: str) -> Any:
    """Implements `__getattr__` for a class, with suggestions for missing attributes. A property that raised an
    AttributeError raises it again.
    """
    if hasattr(type(owner), name):
        return object.__getattribute__(owner, name)
    raise no_attribute(owner, name)


def left(where: str, rank: int, size: int) -> RankLost:
    """Returns the error for a collective of torch.distributed that failed: with two ranks because the other rank has
    exited, with more because some other rank has.
    """
    gone = f"rank {1 - rank} has left" if size == 2 else "another rank has left"
    fix = "look at that rank's errors; continue from the last checkpoint"
    return RankLost(where, "a transfer between ranks failed", [f"rank {rank}: {gone}"], fix)


def __getattr__(name: str) -> Any:
    """Defines `OutOfMemory` on demand: it is PyTorch's error too, and the process that supervises a rank does not
    import PyTorch.
    """
    if name != "OutOfMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = importlib.import_module("fzero._utils.out_of_memory_error").OutOfMemory
    return found
