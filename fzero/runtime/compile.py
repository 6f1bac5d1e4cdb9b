"""Compiles a step for a mesh."""

from __future__ import annotations

from typing import Any

from fzero._utils.arguments import flag, keywords
from fzero._utils.units import parse_budgets
from fzero.compiler.combined_transforms import zero_of
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import Mesh
from fzero.runtime.compiled_eval import CompiledEval
from fzero.runtime.compiled_step import CompiledStep
from fzero.runtime.cuda_graphs import graphs_of
from fzero.step import EvalStep, Step
from fzero.step.checks import no_step
from fzero.transforms.fp8 import Fp8
from fzero.transforms.precision import MixedPrecision
from fzero.transforms.transform import find, on_device


@keywords
def compile(
    step: Step | EvalStep,
    mesh: Mesh,
    *,
    memory_budget: int | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    batch: Any = None,
    backend: str = "inductor",
    cuda_graphs: bool | None = None,
) -> Any:
    """A step on a mesh, ready to run.

    Nothing happens until it is called: the first call with a new kind of batch traces the step, compares the program
    with all ranks, compiles each distinct block once and runs. One program is kept for each kind of batch and
    parameters and each setting of autocast and PyTorch's other switches, at most 16. The least recently used leaves
    first, with its pool, and is made again when needed. So pad batches to a few lengths.

    What is traced is traced with the values that Python has then: a number in a closure, a global, an attribute of an
    object is a constant of the program. The values that the loss and the optimizer read so are compared at each of the
    first 16 calls of a program, at every 16th, and whenever the last call was a hundred times as long ago as a look
    takes: about 3 us for each such value, 0.2 ms for a small GPT with AdamW, so at every call if a step takes 20 ms.
    One that has changed is an error that names it: what changes from step to step belongs in the batch, as a 0-dim
    tensor, or in a schedule. Shorter steps may train up to 15 times with the old value before it. Tensors and values
    that do not compare (a file, an iterator) are not compared; nor is what a function reads from files. Code that may
    read the clock is traced twice, and refused if it depends on it.

    The leaves of a batch are given to the function contiguous, on the mesh's device; leaves that are one tensor are one
    there.

    Args:
        step: from `train_step` or `eval_step`, with its transforms.
        mesh: from `make_mesh`.
        memory_budget: bytes of each rank, or text ("80GB"): of the programs whose planned peak fits it, the one that is
            predicted to be fastest runs. By default the program that needs least, with at most two blocks' parameters
            whole.
        host_budget, disk_budget: likewise, of the host's memory, where it is another than the device's, and of scratch
            files.
        batch: an example of this rank's batch, which `offload("auto")` and `tensor_parallel` without rules are resolved
            for; meta tensors will do. Other batches may follow, if they fit.
        backend: "inductor" compiles each distinct block with torch.compile's Inductor; "eager" runs the same program
            operation by operation.
        cuda_graphs: whether runs are captured as a CUDA graph and replayed, which saves the CPU nearly all of its work
            in a step and keeps the memory of temporaries for the program (docs/gpu.md). With True a step that touches
            the host or a disk, and a capture that fails, are errors; so is a mesh without CUDA. By default a training
            step on a single CUDA device that touches the device alone is captured, after three ordinary runs, and if
            that fails it goes on without, with a line in the log `fzero`; no other step is. Results are the same to the
            bit.

    Returns: a `CompiledStep` or a `CompiledEval`.

    Raises:
        FzeroValueError: an unknown backend; transforms that name an axis the mesh does not have; no compiler on this
            machine; `offload("auto")` without what it is resolved for: a memory budget and a batch; `tensor_parallel`
            without rules and without a batch; `cuda_graphs=True` on a mesh whose device has none.
        FzeroValueError: from a step, if a value read besides the arguments has changed since tracing, or if the caller
            has a `TorchFunctionMode` or `saved_tensors_hooks` of their own; with "inductor", a `TorchDispatchMode` too,
            because it does not see into kernels.
        BudgetError: from `init`, if the state alone is more than the budget; from the first call, if its plan is.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.shard_params(fz.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fz.optim.sgd(0.1)))
        >>> train = compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state = train.init({"w": torch.ones(2)})
        >>> state, metrics = train(state, torch.ones(4, 2))
        >>> metrics["loss"], state.params["w"]
        (tensor(4.), tensor([0.6000, 0.6000]))
    """
    if not isinstance(step, (Step, EvalStep)):
        raise no_step("compile", "compiles", step)
    if not isinstance(mesh, Mesh):
        fix = "make one with fz.make_mesh(data=-1); for a mesh one does not have there is fz.lower"
        raise FzeroTypeError("compile", f"runs on a mesh of devices, not on {type(mesh).__name__}", fix=fix)
    zero_of(step, mesh)
    step = on_device(step, mesh.device)
    for record in (find(step.transforms, MixedPrecision), find(step.transforms, Fp8)):
        if record is not None:
            record.check_device(mesh.device)
    limits = parse_budgets(memory_budget, host_budget, disk_budget)
    graphs = _captured(step, mesh, cuda_graphs)
    if isinstance(step, EvalStep):
        return CompiledEval(step, mesh, backend, limits, graphs is True)
    return CompiledStep(step, mesh, backend, limits, batch, graphs)


def _captured(step: Step | EvalStep, mesh: Mesh, asked: bool | None) -> bool | None:
    """Whether runs are to be captured; None: if a capture does not fail. By default on one device alone: there a
    capture that fails leaves everything as it was; between ranks NCCL may wait for one that never comes. An
    evaluation's results would be copied once more at each call."""
    problems = [] if asked is None else flag("cuda_graphs", asked)
    if not problems and asked and graphs_of(mesh) is None:
        problems = [f"cuda_graphs=True: the mesh is of {mesh.device_type} devices"]
    if problems:
        fix = "leave it out: a step is captured where it can be; False never captures"
        raise FzeroValueError("compile", "invalid arguments", problems, fix)
    if graphs_of(mesh) is None:
        return False
    return (None if isinstance(step, Step) and mesh.size == 1 else False) if asked is None else asked
