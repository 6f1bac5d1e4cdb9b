"""PyTorch's own databases of modules and operators as cases of a training step, and what a step comes to on each.

A case's floating-point tensors, inputs among them, are parameters; so gradients of all of them are compared. Its loss
weighs the outputs by a pattern that is another one on each rank. What PyTorch itself does not differentiate is no case.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import fzero as fz
from fzero.optim import GradientTransformation

RATE = 0.1


class Databases(NamedTuple):
    modules: dict[str, Any]
    operators: dict[str, Any]  # those that PyTorch differentiates in float32


@functools.cache
def databases() -> Databases:
    """PyTorch's private ones. The test that asks is skipped where they, or what they import, are missing."""
    pytest.importorskip("expecttest", reason="PyTorch's databases of samples need expecttest")
    modules = pytest.importorskip("torch.testing._internal.common_modules").module_db
    operators = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    torch.backends.__allow_nonbracketed_mutation_flag = True  # which importing them forbids to the whole process
    # for each sample it asks the stack which unittest runs, with the source of every frame: here none does
    utils = importlib.import_module("torch.testing._internal.common_utils")
    if hasattr(utils, "extract_test_fn"):
        utils.extract_test_fn = lambda: None
    differentiable = [op for op in operators if op.supports_autograd and torch.float32 in op.dtypes]
    return Databases({m.name: m for m in modules}, {op.formatted_name: op for op in differentiable})


class Case(NamedTuple):
    """A function of tensors, as a loss sees it."""

    params: Any
    batch: Any
    # (params, batch) -> a pytree with tensors in it, and params["buffers"] afterwards
    fn: Callable[[Any, Any], tuple[Any, dict[str, torch.Tensor]]]


def module_cases(name: str) -> Iterator[Case]:
    """Every sample of a module: in training, and in evaluation where PyTorch says that the two differ."""
    info = databases().modules[name]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        for sample in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        ):
            made, given = sample.constructor_input, sample.forward_input
            with warnings.catch_warnings(action="ignore"):
                module = info.module_cls(*made.args, **made.kwargs).to(torch.float32).train(training)
                if hasattr(module, "initialize_parameters"):  # a lazy one takes its shapes from a call
                    module(*given.args, **given.kwargs)
            yield _of_module(module, given.args, given.kwargs)


def samples(cases: Iterator[Case], first: int | None) -> list[Case]:
    """The first that PyTorch differentiates, or all."""
    with warnings.catch_warnings(action="ignore"):
        return [*itertools.islice((case for case in cases if expected(case, 1) is not None), first)]


def _of_module(module: torch.nn.Module, args: Any, kwargs: Any) -> Case:
    params, buffers = (
        {n: x.detach() for n, x in named} for named in (module.named_parameters(), module.named_buffers())
    )

    def call(state: dict[str, dict[str, torch.Tensor]], inputs: Any) -> Any:
        args, kwargs = inputs
        buffers = {n: x.clone() for n, x in state["buffers"].items()}  # which a module may write
        return torch.func.functional_call(module, {**state["params"], **buffers}, args, kwargs), buffers

    return _case(call, {"params": params, "buffers": buffers}, (args, kwargs))


def operator_cases(name: str) -> Iterator[Case]:
    """Every sample of an operator."""
    op = databases().operators[name]
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):

        def call(state: Any, inputs: Any, process: Callable[[Any], Any] = sample.output_process_fn_grad) -> Any:
            args, kwargs = inputs
            return process(op(*args, **kwargs)), {}

        yield _case(call, {"params": {}, "buffers": {}}, ((sample.input, *sample.args), sample.kwargs))


def _case(call: Callable[[Any, Any], Any], state: dict[str, dict[str, torch.Tensor]], inputs: Any) -> Case:
    """A case of a function of named tensors and of other inputs, whose tensors are found wherever they are."""
    flat, structure = torch.utils._pytree.tree_flatten(inputs)
    tensors = {str(i): x for i, x in enumerate(flat) if isinstance(x, torch.Tensor)}
    trained = {
        i: x.detach()
        for i, x in tensors.items()
        if x.requires_grad and x.is_floating_point() and x.layout == torch.strided and x.isfinite().all()
    }
    others = {i: x.detach() for i, x in tensors.items() if i not in trained}

    def fn(params: Any, batch: Any) -> Any:
        given = {**params["inputs"], **batch["inputs"]}
        return call(
            params, torch.utils._pytree.tree_unflatten([given.get(str(i), x) for i, x in enumerate(flat)], structure)
        )

    return Case({**state, "inputs": trained}, {"inputs": others}, fn)


def trainable(path: str, leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() and not path.startswith("params['buffers']")


def loss_of(outputs: Any, probe: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for y in torch.utils._pytree.tree_leaves(outputs):
        if isinstance(y, torch.Tensor) and y.numel() and (y.is_floating_point() or y.is_complex()):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            weights = torch.cos(probe + torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
            total = total + (y * weights).sum().to(total.dtype)
    return total


def keeping() -> GradientTransformation:
    """SGD that has the gradients in its state."""

    def zeros(params: Any) -> Any:
        return fz.tree.map(torch.zeros_like, params)

    return GradientTransformation(zeros, lambda grads, state, params: (fz.tree.map(lambda g: -RATE * g, grads), grads))


class Expected(NamedTuple):
    loss: torch.Tensor
    grads: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]


def expected(case: Case, num_ranks: int) -> Expected | None:
    """What PyTorch alone comes to, the mean over ranks; None if it refuses the case or finds nothing to
    differentiate."""
    leaves, structure = fz.tree.flatten(case.params)
    trained = [
        i
        for i, (path, x) in enumerate(zip(fz.tree.paths(case.params, "params"), leaves, strict=True))
        if trainable(path, x)
    ]
    losses, buffers, sums = [], {}, [torch.zeros_like(x) for x in leaves]
    for rank in range(num_ranks):
        xs = [x.detach().clone().requires_grad_(i in trained) for i, x in enumerate(leaves)]
        try:
            with warnings.catch_warnings(action="ignore"):
                batch = fz.tree.map(torch.clone, case.batch)  # which some write
                outputs, buffers = case.fn(fz.tree.unflatten(structure, xs), batch)  # the same on every rank
                loss = loss_of(outputs, torch.tensor(float(rank)))
                if not loss.requires_grad:
                    return None
                grads = torch.autograd.grad(loss, [xs[i] for i in trained], allow_unused=True)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        if all(g is None for g in grads):
            return None
        losses.append(loss.detach())
        for i, g in zip(trained, grads, strict=True):
            if g is not None:
                sums[i] += g / num_ranks
    return Expected(torch.stack(losses).mean(), sums, buffers)


class Outcome(NamedTuple):
    kind: str  # equal, refused, wrong, crash
    text: str  # of the error, or what is wrong


def outcome(case: Case, mesh: fz.Mesh, transforms: Sequence[Any] = (), block: bool = False) -> Outcome:
    """What training by one step comes to beside PyTorch, the case as a block or outside of one."""
    want = expected(case, mesh.size)
    assert want is not None

    def tensors(params: Any, batch: Any) -> Any:
        outputs, buffers = case.fn(params, batch)
        return [y for y in torch.utils._pytree.tree_leaves(outputs) if isinstance(y, torch.Tensor)], buffers

    def loss_fn(params: Any, batch: Any) -> Any:
        outputs, buffers = run(params, batch["case"])
        loss = loss_of(outputs, batch["probe"])
        return (loss, {"buffers": buffers}) if buffers else loss

    run = fz.block(tensors) if block else tensors
    mutable = (lambda path, leaf: path.startswith("params['buffers']")) if case.params["buffers"] else None
    step = fz.train_step(loss_fn, keeping(), trainable=trainable, mutable=mutable)
    try:
        with warnings.catch_warnings(action="ignore"):
            train = fz.compile(fz.compose(*transforms)(step), mesh, backend="eager")
            state, metrics = train(
                train.init(case.params), {"case": case.batch, "probe": torch.tensor(float(mesh.rank))}
            )
            state = train.gather(state)
    except fz.errors.FzeroError as error:
        text = str(error)
        return Outcome("refused" if "Fix:" in text else "crash", text)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}")
    kept = dict(zip(fz.tree.paths(state.opt_state), fz.tree.leaves(state.opt_state), strict=True))
    found = {
        "loss": (metrics["loss"], want.loss),
        **{f"buffer {n}": (state.params["buffers"][n], x) for n, x in want.buffers.items()},
    }
    for path, g, p, q in zip(
        fz.tree.paths(case.params), want.grads, fz.tree.leaves(state.params), fz.tree.leaves(case.params), strict=True
    ):
        if path in kept:
            found |= {f"gradient of {path}": (kept[path], g), path: (p, q - RATE * g)}
    bad = [name for name, (a, b) in found.items() if not close(a, b)]
    return Outcome("wrong", ", ".join(bad)) if bad else Outcome("equal", "")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to 1e-5 of the largest finite value; nan and inf in the same places."""
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


# --- many cases, and their table ---

Found = dict[str, list[Outcome]]  # for each way to run a sample, an outcome for each sample
Run = Callable[..., list[Any]]  # of a pool of ranks


def in_process(cases: Callable[[str], Iterator[Case]], name: str, first: int | None, blocks: bool = True) -> Found:
    """Outcomes outside of blocks, and as a block that is recomputed."""
    mesh, found = fz.make_mesh(), samples(cases(name), first)
    plain = {"plain": [outcome(x, mesh) for x in found]}
    return plain | ({"block": [outcome(x, mesh, [fz.remat("full")], block=True) for x in found]} if blocks else {})


def on_ranks(names: Sequence[str], first: int | None) -> list[list[Outcome]]:
    """Outcomes of modules as blocks whose parameters are sharded over the ranks of this job."""
    mesh = fz.make_mesh()
    return [
        [outcome(x, mesh, [fz.shard_params()], block=True) for x in samples(module_cases(name), first)]
        for name in names
    ]


def told(names: Sequence[str], outcomes: Callable[[list[str]], dict[str, Found]]) -> dict[str, Found]:
    """The outcomes of all names; a line on stderr for each as it is ready, for a grid takes an hour."""
    found: dict[str, Found] = {}
    for i, name in enumerate(names, 1):
        started = time.monotonic()
        found |= outcomes([name])
        lines = [f"{i}/{len(names)} {name}: {time.monotonic() - started:.0f} s", *faults(name, found[name])]
        print(*lines, sep="\n  ", file=sys.stderr, flush=True)
    return found


def faults(name: str, found: Found) -> list[str]:
    """What no sample may come to."""
    return [
        f"{name}, {way}, sample {i}: {o.kind}: {o.text}"
        for way, os in found.items()
        for i, o in enumerate(os)
        if o.kind in ("wrong", "crash")
    ]


def row(name: str, found: Found) -> str:
    """A line of a table: how many samples there are, how many of them train equal each way, and why the others do
    not."""
    total, why = len(found["plain"]), dict[str, None]()
    cells = []
    for os in found.values():
        equal = sum(o.kind == "equal" for o in os)
        cells.append("equal" if equal == total else f"{equal} equal" if equal else "refused")
        why |= {_reason(o): None for o in os if o.kind != "equal"}
    return f"| {' | '.join([name, str(total), *cells, '; '.join(why)])} |"


def _reason(o: Outcome) -> str:
    first = o.text.splitlines()[0]
    return first.split(": ", 1)[-1] if o.kind == "refused" else f"**{o.kind}**: {first}"


def table(columns: Sequence[str], rows: dict[str, Found], first: int | None) -> str:
    """A table of results/: a line for each name that has samples, and their sum."""
    rows = {name: found for name, found in rows.items() if found["plain"]}
    kinds = {name: {o.kind for os in found.values() for o in os} for name, found in rows.items()}
    equal, refused = (sum(k == {kind} for k in kinds.values()) for kind in ("equal", "refused"))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(row(*item) for item in rows.items()), ""]
    lines += [
        f"- torch {torch.__version__}, {f'the first {first} samples' if first else 'all samples'} of each",
        f"- {len(rows)} have samples: {equal} equal with every sample each way, {len(rows) - equal - refused} with "
        f"some, {refused} refused",
    ]
    return "\n".join([*lines, ""])
