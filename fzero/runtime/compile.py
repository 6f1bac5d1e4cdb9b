"""Compiles a step for a mesh."""

from __future__ import annotations

from typing import Any

from fzero._utils.arguments import flag, keywords, shown
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
    warmup: str = "wait",
) -> Any:
    """Compiles a step for a mesh.

    Nothing happens until the result is called. The first call with a new kind of batch traces the step, compares the
    program between all ranks, compiles each distinct block once, and runs. One program is kept for each kind of batch
    and of parameters, and for each setting of autocast and PyTorch's other switches, at most 16. The least recently
    used program is dropped first, together with its pool, and is made again when it is needed. Therefore pad batches to
    a few lengths.

    Tracing uses the values that Python objects have at that time: a number in a closure, a global or an attribute of an
    object becomes a constant of the program. The values that the loss and the optimizer read in this way are compared
    at each of the first 16 calls of a program, at every 16th call, and whenever the time since the last call was at
    least five hundred times as long as the comparison takes. It takes about 3 us for each such value, 0.2 ms for a
    small GPT with AdamW. If a step takes more than about 0.1 s, it is therefore done at every call. A value that has
    changed is an error that names it: a value that changes from step to step belongs in the batch, as a 0-dim tensor,
    or in a schedule. Shorter steps may train up to 15 times with the old value before the error. Tensors, and values
    that cannot be compared (a file, an iterator), are not compared; neither is what a function reads from files.

    Whatever the comparison does not see is found by tracing the step again: at the second call of a program, and before
    a state is saved, gathered or written back to a module, if a step has run since the last such trace. An
    operation that is different raises an error that shows it: a function that counts, draws from Python's random or
    reads a clock is rejected at its second call, and nothing is saved that the code does not say. The trace calls the
    user's function once (what it prints appears again), with the global random number generators left as they were. It
    takes about 45 ms of CPU time for each block. A state that another compiled step continues is checked with the
    code of that step.

    The function receives the leaves of a batch contiguous, on the mesh's device. Leaves that are the same tensor are
    the same tensor there too.

    Args:
        step: from `train_step` or `eval_step`, with its transforms.
        mesh: from `make_mesh`.
        memory_budget: bytes per rank, or text ("80GB"). Of the programs whose planned peak fits the budget, the one
            that is predicted to be fastest is used. By default, the program that needs the least memory, with the
            unsharded parameters of at most two blocks at a time.
        host_budget, disk_budget: the same for host memory, if it is separate from the device's memory, and for scratch
            files.
        batch: an example of this rank's batch, for which `offload("auto")` and `tensor_parallel` without rules are
            resolved. Meta tensors are sufficient. Other batches may follow if they fit.
        backend: "inductor" compiles each distinct block with torch.compile's Inductor; "eager" runs the same program
            operation by operation.
        cuda_graphs: whether runs are captured as a CUDA graph and replayed. This saves the CPU nearly all of its work
            in a step, and keeps the memory of temporaries reserved for the program (docs/guides/gpus.md). With True, it
            is an error if the step uses the host or a disk, if a capture fails, or if the mesh has no CUDA devices. By
            default, a training step on a single CUDA device that uses only this device is captured after three ordinary
            runs. If the capture fails, the step continues without it, with a line in the log `fzero`. By default no
            other step is captured. Results are the same to the bit.
        warmup: what the first steps of a program do while its blocks are compiled. "wait": the first step begins when
            all are compiled, and runs are reproducible to the bit. "eager": steps run operation by operation, and each
            block is replaced by its compiled version as soon as all ranks have it; the losses of these steps depend, by
            rounding, on when that is. If all blocks are in the cache, both are the same. If eager steps do not fit
            `memory_budget`, the first step waits. Only for meshes of CPUs.

    Returns: a `CompiledStep` or a `CompiledEval`.

    Raises:
        FzeroValueError: an unknown backend; transforms that name an axis that the mesh does not have; no compiler on
            this machine; `offload("auto")` without the memory budget and the batch for which it is resolved;
            `tensor_parallel` without rules and without a batch; `cuda_graphs=True` on a mesh of devices without CUDA
            graphs; `warmup="eager"` on a mesh of CUDA devices.
        FzeroError: from a call with `warmup="eager"`, if a block cannot be compiled. The state is unchanged.
        FzeroValueError: from a step, if a value that is read besides the arguments has changed since tracing and the
            step computes something different with it, or if the caller has entered a `TorchFunctionMode` or
            `saved_tensors_hooks`; with "inductor" also a `TorchDispatchMode`, because it does not see the operations
            inside kernels.
        BudgetError: from `init`, if the state alone exceeds the budget; from the first call, if its plan does.

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
        fix = "make one with fz.make_mesh(data=-1); for a mesh without devices use fz.lower"
        raise FzeroTypeError("compile", f"runs on a mesh of devices, not on {type(mesh).__name__}", fix=fix)
    # Called for its checks: a wrong axis is reported here, and not at the first call.
    zero_of(step, mesh)
    step = on_device(step, mesh.device)
    for record in (find(step.transforms, MixedPrecision), find(step.transforms, Fp8)):
        if record is not None:
            record.check_device(mesh.device)
    limits = parse_budgets(memory_budget, host_budget, disk_budget)
    graphs = _captured(step, mesh, cuda_graphs)
    _check_warmup(warmup, mesh)
    if isinstance(step, EvalStep):
        return CompiledEval(step, mesh, backend, limits, graphs is True, warmup)
    return CompiledStep(step, mesh, backend, limits, batch, graphs, warmup)


def _check_warmup(warmup: str, mesh: Mesh) -> None:
    """Raises for an unknown warm-up, and for eager steps on GPUs. There Inductor compiles in the process that trains,
    and would hold the interpreter's lock while steps run."""
    if warmup not in ("wait", "eager"):
        problems, fix = [f"warmup={shown(warmup)}: must be 'wait' or 'eager'"], "leave it out to wait"
        raise FzeroValueError("compile", "invalid arguments", problems, fix)
    if warmup == "eager" and mesh.device.type != "cpu":
        problems = [f"warmup='eager': the mesh is of {mesh.device_type} devices, whose functions this process compiles"]
        raise FzeroValueError("compile", "invalid arguments", problems, "leave it out: the first step waits")


def _captured(step: Step | EvalStep, mesh: Mesh, asked: bool | None) -> bool | None:
    """Whether runs are captured as a CUDA graph. None means: captured, unless a capture fails.

    By default only a training step on a single device is captured. There a capture that fails leaves everything
    unchanged, whereas between several ranks NCCL might wait for a rank that never comes. For an evaluation, each call
    would need an additional copy of the results.
    """
    problems = [] if asked is None else flag("cuda_graphs", asked)
    if not problems and asked and graphs_of(mesh) is None:
        problems = [f"cuda_graphs=True: the mesh is of {mesh.device_type} devices"]
    if problems:
        fix = "leave it out: a step is captured if possible; False never captures"
        raise FzeroValueError("compile", "invalid arguments", problems, fix)
    if graphs_of(mesh) is None:
        return False
    return (None if isinstance(step, Step) and mesh.size == 1 else False) if asked is None else asked
