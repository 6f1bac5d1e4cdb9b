"""Wraps private PyTorch names; no other file uses them. Each is tested against every supported release
(tests/compat/test_private_torch_names.py).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import logging
import math
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.utils.checkpoint
import torch.utils.deterministic
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import flex_attention
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.overrides import _get_current_function_mode_stack, _len_torch_function_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "DATA_DEPENDENT",
    "SHAPE_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
]

SHAPE_DEPENDENT: type[Exception] = DynamicOutputShapeException
"""Raised by a fake tensor when the shape of a result depends on its values."""
DATA_DEPENDENT: tuple[type[Exception], ...] = (DataDependentOutputException, SHAPE_DEPENDENT)
"""Raised by a fake tensor when Python code or a shape depends on its value."""


@contextmanager
def no_modes() -> Iterator[None]:
    """Leaves every dispatch mode for the body, to do other work in the middle of a trace."""
    with _disable_current_modes():
        yield


@contextmanager
def truncated_normal(fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replaces `torch.nn.init.trunc_normal_` inside by `fn(tensor, mean, std, a, b)`. PyTorch's function draws until
    all elements are within the bounds, which a trace cannot know.
    """
    before = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = lambda x, mean, std, a, b, generator=None: fn(x, mean, std, a, b)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


@functools.cache
def raising() -> frozenset[CodeType]:
    """Returns the code of PyTorch's own functions that raise an error unless a condition holds for all elements of a
    tensor.
    """
    return frozenset({torch._check_tensor_all_with.__code__})


def raise_unless(holds: torch.Tensor, error: type[Exception], said: Callable[[], str]) -> None:
    """Raises an error unless all elements of a tensor are True. In a trace, this is a condition under which the
    function raises.
    """
    torch._check_tensor_all_with(error, holds, said)


FLEX_ATTENTION: Any = flex_attention.flex_attention_hop
"""The operator that `torch.nn.attention.flex_attention.flex_attention` calls with its functions."""


def modified_scores(score_mod: Callable[..., torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    """Applies the score function of `flex_attention` to each score of `scores`, [batch, heads, queries, keys]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # imports much

    at = [torch.arange(n, device=scores.device) for n in scores.shape]
    with TransformGetItemToIndex():  # a captured tensor can be indexed by the indices of the score
        return flex_attention._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *at)


@contextmanager
def flex_attention_on_fakes() -> Iterator[None]:
    """Inside, `flex_attention` calls its operator for fake tensors without compiling it, also for gradients on a CPU,
    for which PyTorch has no kernel.
    """
    before = flex_attention._validate_device, flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG

    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(query, FakeTensor):  # of another thread
            before[0](query, key, value)

    flex_attention._validate_device, flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = validate, True
    try:
        yield
    finally:
        flex_attention._validate_device, flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


class _UncheckedDistributions:
    """The number of traces that are running, in any thread, and the default for the argument checks of distributions
    before them.
    """

    lock = threading.Lock()
    traces = 0
    before = True


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Disables the argument checks of `torch.distributions` inside, unless `validate_args=True` requests them. The
    default applies to all threads: the first of several traces changes it, and the last one restores it.
    """
    of, distribution = _UncheckedDistributions, torch.distributions.Distribution
    with of.lock:
        if of.traces == 0:
            of.before = distribution._validate_args
            distribution.set_default_validate_args(False)
        of.traces += 1
    try:
        yield
    finally:
        with of.lock:
            of.traces -= 1
            # Only the last trace restores the default: with nested or parallel traces, an earlier one would re-enable
            # the checks of those that still run.
            if of.traces == 0:
                distribution.set_default_validate_args(of.before)


@contextmanager
def module_conversions(
    modules: Collection[torch.nn.Module], convert: Callable[[torch.nn.Module, Callable[..., Any]], None]
) -> Iterator[None]:
    """Inside, `module.to(...)`, `float()` and similar methods call `convert(module, fn)` for each of these modules,
    instead of replacing its tensors by converted ones. `fn` is the conversion of one tensor."""
    before = torch.nn.Module._apply

    def applied(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        if self not in modules:
            return before(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        convert(self, fn)
        return self

    torch.nn.Module._apply = applied
    try:
        yield
    finally:
        torch.nn.Module._apply = before


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Makes calls of `torch.utils.checkpoint` inside plain calls of their functions, without recomputation."""

    class Plain:
        """With `use_reentrant=True`: the result has no gradient if no argument tensor requires one."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            asked = any(x.requires_grad for x in args if isinstance(x, torch.Tensor))
            with torch.set_grad_enabled(asked and torch.is_grad_enabled()):
                return function(*args)

    def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    of: Any = torch.utils.checkpoint
    before = of.CheckpointFunction, of._checkpoint_without_reentrant_generator
    of.CheckpointFunction, of._checkpoint_without_reentrant_generator = Plain, plain
    try:
        yield
    finally:
        of.CheckpointFunction, of._checkpoint_without_reentrant_generator = before


def no_function_modes() -> Any:
    """Leaves every `TorchFunctionMode` for a `with` block."""
    return torch._C.DisableTorchFunction()  # type: ignore[attr-defined]


def no_function_subclasses() -> Any:
    """Leaves every `__torch_function__` of a tensor subclass for a `with` block."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[attr-defined]


def function_modes() -> list[Any]:
    """Returns the active `TorchFunctionMode`s, the innermost last."""
    return _get_current_function_mode_stack() if _len_torch_function_stack() else []


def dispatch_modes() -> list[Any]:
    """Returns the active `TorchDispatchMode`s, the innermost last."""
    return _get_current_dispatch_mode_stack()


def module_hooks() -> tuple[Any, ...]:
    """Returns the hooks that are registered for every module at once."""
    of = torch.nn.modules.module
    hooks = (
        of._global_forward_pre_hooks,
        of._global_forward_hooks,
        of._global_backward_pre_hooks,
        of._global_backward_hooks,
    )
    return tuple(tuple(h.values()) for h in hooks) if any(hooks) else ()


def default_device() -> str:
    """Returns the name of `torch.get_default_device()`, in a tenth of its time if none has been set. If that function
    would raise, because the device does not exist, returns the name as it was set.
    """
    modes = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
    context = modes[-1] if modes else getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is None:
        return "cpu"
    is_there = context.device.type != "cuda" or torch.cuda.is_available()
    return str(torch.get_default_device() if is_there else context.device)


def default_tensor_device() -> str:
    """Returns the type of device that `torch.set_default_tensor_type` has chosen."""
    return torch._C._get_default_device()  # type: ignore[attr-defined]


def einsum_paths() -> tuple[Any, Any]:
    """Returns `torch.backends.opt_einsum.enabled` and `.strategy`, without the exception that torch's lazy module
    raises internally on each access.
    """
    of: Any = torch.backends.opt_einsum
    return vars(of).get("enabled", of.m.enabled), vars(of).get("strategy", of.m.strategy)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Returns the innermost active `saved_tensors_hooks`, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def trace_device(device_type: str) -> str:
    """Returns the type of device on which the fake tensors of a mesh are recorded. If this machine has no device of
    the mesh's type, the operators of a CPU take their place. A build of torch without CUDA aborts the process when
    its autograd meets a CUDA tensor.
    """
    return device_type if device_type == "cpu" or torch.cuda.is_available() else "cpu"


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Suppresses the log entry, with a traceback of torch itself, that a fake tensor makes when an operation fails.
    The exception says the same.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True  # changing the level would empty the caches of all loggers
    try:
        yield
    finally:
        log.disabled = before


def fake_metadata(x: torch.Tensor) -> tuple[Any, ...] | None:
    """Returns shape, dtype, device and strides of a fake tensor; None for a tensor that these do not describe
    completely: one with a known value, one with the conjugate or negative bit, or one of PyTorch's zero tensors
    without memory.
    """
    if (
        type(x) is not FakeTensor
        or x.constant is not None
        or x.layout is not torch.strided
        or x.is_conj()
        or x.is_neg()
        or x._is_zerotensor()
    ):
        return None
    return (x.shape, x.dtype, x.device, x.stride())


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    stride: Sequence[int] | None = None,
) -> FakeTensor:
    """Makes a fake tensor with this metadata, contiguous unless `stride` is given. It bypasses every mode and takes
    12 us; `torch.empty` under the mode takes 65.
    """
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        meta = (
            torch.empty(shape, dtype=dtype, device="meta")
            if stride is None
            else torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        )
    return FakeTensor(mode, meta, torch.device(device))


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """Returns an equivalent fake tensor that a program can contain. Forward-mode derivatives that are 0 are PyTorch's
    zero tensors without memory, which other operations do not accept on fake tensors; a program has plain
    zeros.
    """
    if not x._is_zerotensor():
        return x
    return new_fake(x.fake_mode, x.shape, x.dtype, x.device, x.stride())  # type: ignore[attr-defined]


def new_view(
    mode: FakeTensorMode, base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> FakeTensor:
    """Makes a fake view of a fake tensor that begins `offset` elements after it. It bypasses every mode."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        meta = torch.empty(0, dtype=base.dtype, device="meta")
        meta.set_(base.untyped_storage(), base.storage_offset() + offset, shape, stride)  # type: ignore[call-overload]
    return FakeTensor(mode, meta, base.device)


def attributes(x: torch.Tensor) -> list[str]:
    """Returns the attributes that someone has set on a tensor."""
    return [name for name in x.__dict__ if name not in _of_fakes()] if x.__dict__ else []


def gradient_hooks(x: torch.Tensor) -> int:
    """Returns the number of a tensor's hooks that run after a gradient was accumulated in it."""
    return len(x._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]


@functools.cache
def _of_fakes() -> frozenset[str]:
    """Returns the attributes that every fake tensor has. This is done on demand, because a FakeTensorMode imports
    Dynamo.
    """
    return frozenset(new_fake(FakeTensorMode(), (), torch.float32, "cpu").__dict__)


def functorch_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def functionalized(fn: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the results of `fn(*inputs)`, with in-place operations replaced by operations that return new values,
    and all others unchanged (`torch.func.functionalize` decomposes some). `inputs` keep their values.
    """
    torch._enable_functionalization(reapply_views=True)  # type: ignore[attr-defined]
    try:
        outputs = fn(*(torch._to_functional_tensor(x) for x in inputs))
        for x in outputs:
            torch._sync(x)
        return [torch._from_functional_tensor(x) for x in outputs]
    finally:
        torch._disable_functionalization()  # type: ignore[attr-defined]


def next_autograd_node() -> int:
    """Returns the sequence number that the next autograd node of this thread gets. A node is made directly before the
    operation that it differentiates runs.
    """
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def backward_of() -> int | None:
    """Returns the sequence number of the autograd node whose backward is running on this thread, or None."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return None if node is None else node._sequence_nr()


def min_cut(joint: fx.GraphModule, num_outputs: int, recompute: set[fx.Node]) -> set[str]:
    """Returns the names of the forward values that the min-cut partitioner would save for the backward of a joint
    graph.

    The joint graph's inputs are `primals_i` and `tangents_i`, and its outputs the forward's `num_outputs` followed by
    the gradients. Nodes in `recompute` are never saved. No two of its operations may be equal (`trace.merge_equal`).
    """
    # importing these takes a second and 45 MB, and not every step needs them
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in recompute:
        node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    # equal operations are already merged in the recorded graph; to search for them, PyTorch imports all of Inductor,
    # which takes 1.3 s
    with config.patch(cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_outputs)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    return {node.name for node in returned[num_outputs:] if isinstance(node, fx.Node)}


def min_cut_settings() -> bytes:
    """Returns a digest of the settings that `min_cut` depends on."""
    from torch._functorch import config

    return config.get_hash()  # type: ignore[attr-defined]


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation by dual numbers is running around the caller."""
    return torch.autograd.forward_ad._current_level >= 0


def fx_tracing() -> bool:
    """Returns whether torch.fx is tracing a function around the caller: then its arguments are proxies, and the
    results may be thrown away.
    """
    return fx._symbolic_trace._is_fx_tracing_flag  # type: ignore[attr-defined]


def attention_order() -> tuple[int, ...]:
    """Returns the order in which attention tries its kernels."""
    return tuple(torch._C._get_sdp_priority_order())  # type: ignore[attr-defined]


def settle_attention(device: torch.device) -> None:
    """Makes PyTorch decide in which order it prefers attention's kernels on a GPU. It decides at the first attention,
    so a step that is traced before would be traced with another setting than the next call finds.
    """
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)


@contextmanager
def in_order() -> Iterator[None]:
    """Makes CPU operations that add in any order, with several threads, add sequentially inside. The setting applies
    to the whole process.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = fills_uninitialized_memory()
    fill_uninitialized_memory(False)
    # Through the private function, because the public one also changes settings of Inductor, and would import it.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        fill_uninitialized_memory(filled)


def fills_uninitialized_memory() -> bool:
    """Returns whether PyTorch fills memory that has not been written yet, with deterministic algorithms."""
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def fill_uninitialized_memory(fill: bool) -> None:
    """Sets whether PyTorch fills uninitialized memory, with deterministic algorithms."""
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _deterministic() -> dict[str, bool]:
    """Returns Inductor's setting for deterministic algorithms: nothing is chosen by measured time."""
    import torch._inductor.config as config

    return {"deterministic": config.deterministic or torch.are_deterministic_algorithms_enabled()}


def inductor_compile(
    graph: fx.GraphModule,
    inputs: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]],
    device: torch.device,
    cores: int | None = None,
    literals: Sequence[torch.Tensor] = (),
) -> Any:
    """Compiles a graph of ATen operations to an Inductor artifact without guards. A call takes about 11 us, and one
    of a `torch.compile`d function 59.

    It can be saved with `artifact_bytes`; loading compiles C++ again, but no Triton kernels (they are in the
    artifact).

    Args:
        graph: the operations. It must not have tensors as attributes: a saved artifact would require them as inputs.
        inputs: shape, strides and dtype of each input.
        device: the device that all inputs are on.
        cores: how many processes may compile kernels. Inductor by default starts one per core, on every rank of a
            host.
        literals: further inputs after those, on any device.

    Memory: none for the inputs from 2.13 on, where Inductor accepts fake tensors; before, that of the inputs. Triton
        may run a kernel to tune it, on tensors of the actual sizes.
    """
    import torch._inductor.config as config
    from torch._inductor import standalone_compile
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    threads = {} if cores is None or "TORCHINDUCTOR_COMPILE_THREADS" in os.environ else {"compile_threads": cores}
    # without a benchmark of itself in the code, which would contain the command line of this process after --only
    with config.patch({**_deterministic(), **threads, "benchmark_harness": False}):
        if "fake_mode" not in inspect.signature(standalone_compile).parameters:
            real: list[Any] = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in inputs
            ]
            return standalone_compile(graph, [*real, *literals], dynamic_shapes="from_example_inputs")
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes: list[Any] = [new_fake(mode, shape, dtype, device, stride) for shape, stride, dtype in inputs]
        fakes += [new_fake(mode, x.shape, x.dtype, x.device, x.stride()) for x in literals]
        return standalone_compile(graph, fakes, dynamic_shapes="from_example_inputs", fake_mode=mode)


def artifact_bytes(artifact: Any) -> bytes:
    """Returns an Inductor artifact as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        artifact.save(path=f"{folder}/artifact", format="binary")
        return Path(folder, "artifact").read_bytes()


def load_artifact(data: bytes) -> Callable[..., Any]:
    """Loads the artifact that `artifact_bytes` saved, in this or another process with the same release, for the device
    that it was compiled for: Inductor writes the index of a GPU into its code.
    """
    import torch._inductor.config as config
    from torch._inductor import CompiledArtifact

    # nothing is compiled here, and Inductor would start compile processes
    with tempfile.TemporaryDirectory() as folder, config.patch(compile_threads=1):
        Path(folder, "artifact").write_bytes(data)
        return CompiledArtifact.load(path=f"{folder}/artifact", format="binary")


ALIGNMENT = 16
"""In bytes: Inductor's kernels read this many at once."""


@dataclass(frozen=True)
class InductorOutput:
    """Inductor's output for a graph before any C++ is compiled: a Python module as text, and which of the graph's
    inputs it writes.
    """

    text: str
    num_inputs: int
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Element:
    """The value of one element in the code of an Inductor kernel, with Python's operators and some of a tensor's
    methods: int64, or float32 after `float`.
    """

    value: Any
    dtype: torch.dtype = torch.int64

    def float(self) -> Element:
        return Element(_ops().to_dtype(self.value, torch.float32, src_dtype=self.dtype), torch.float32)

    def __add__(self, other: Element | int | float) -> Element:
        return self._and("add", other)

    def __sub__(self, other: Element | int | float) -> Element:
        return self._and("sub", other)

    def __mul__(self, other: Element | int | float) -> Element:
        return self._and("mul", other)

    def __and__(self, other: Element | int) -> Element:
        return self._and("bitwise_and", other)

    def __or__(self, other: Element | int) -> Element:
        return self._and("bitwise_or", other)

    def __xor__(self, other: Element | int) -> Element:
        return self._and("bitwise_xor", other)

    def __lshift__(self, other: Element | int) -> Element:
        return self._and("bitwise_left_shift", other)

    def __rshift__(self, other: Element | int) -> Element:
        return self._and("bitwise_right_shift", other)

    def log(self) -> Element:
        return Element(_ops().log(self.value), self.dtype)

    def sqrt(self) -> Element:
        return Element(_ops().sqrt(self.value), self.dtype)

    def cos(self) -> Element:
        return Element(_ops().cos(self.value), self.dtype)

    def _and(self, operation: str, other: Any) -> Element:
        ops = _ops()
        if not isinstance(other, Element):
            other = Element(ops.constant(other if self.dtype == torch.int64 else float(other), self.dtype))
        return Element(getattr(ops, operation)(self.value, other.value), self.dtype)


def _ops() -> Any:
    from torch._inductor.virtualized import ops

    return ops


@dataclass(frozen=True)
class Elements:
    """A tensor that a kernel reads: its shape, and a function from indices to an `Element`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[..., Any]

    @staticmethod
    def of(tensor: Any) -> Elements:
        return Elements(tuple(tensor.get_size()), tensor.get_dtype(), tensor.make_loader())

    def __call__(self, *index: Any) -> Element:
        import sympy

        return Element(self.load([sympy.sympify(i) for i in index]), self.dtype)


def position(index: Any) -> Element:
    """Returns an index of the current element, or an arithmetic expression of several, as an `Element`."""
    import sympy

    return Element(_ops().index_expr(sympy.sympify(index), torch.int64))


ElementRule = Callable[..., tuple[Sequence[int], torch.dtype, Callable[[Sequence[Any]], Element]]]
"""Implements an operator in Inductor's kernels: maps its arguments, with tensors as `Elements`, to the shape and
dtype of its result and a function from the indices of an element to the `Element`.
"""


@contextmanager
def _known(rules: Mapping[Any, ElementRule]) -> Iterator[None]:
    """Makes Inductor lower operators by these rules, for the body. Each operation within a rule is written once. For
    a graph of operations, Inductor writes each operation once for every path that leads to it, which takes seconds
    for the rounds of a cipher.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    def lowering(rule: ElementRule) -> Callable[..., Any]:
        def lowered(*args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, ir.IRNode)]
            shape, dtype, element = rule(*(Elements.of(a) if isinstance(a, ir.IRNode) else a for a in args))
            return ir.Pointwise.create(
                device=tensors[0].get_device(), dtype=dtype, inner_fn=lambda i: element(i).value, ranges=list(shape)
            )

        return lowered

    assert not rules.keys() & lowerings.keys()
    lowerings.update({op: lowering(rule) for op, rule in rules.items()})
    try:
        yield
    finally:
        for op in rules:
            del lowerings[op]


def inductor_lower(
    graph: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    trust_cpu: bool,
    rules: Mapping[Any, ElementRule] = {},
) -> InductorOutput:
    """Returns Inductor's code for a graph of ATen operations on the CPU: Python around C++ kernels, which are left as
    text.

    Args:
        graph: the operations.
        example_inputs: tensors with the shapes, strides and dtypes it will get.
        trust_cpu: assume the vector instructions that the CPU reports. Otherwise Inductor compiles and runs a probe
            for each instruction set, which takes 8 s in total.
        rules: rules for operators that Inductor does not know.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[InductorOutput] = []

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        compiled: Any = compile_fx_inner(module, inputs, **kwargs)
        found.append(InductorOutput(compiled.source_code, len(inputs), tuple(sorted(compiled.mutated_input_idxs))))
        return compiled

    patches: dict[str, Any] = {
        **_deterministic(),
        "compile_threads": 1,
        "force_disable_caches": True,
        "cpp.vec_isa_ok": True if trust_cpu else config.cpp.vec_isa_ok,
    }
    unpatched = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = lambda self, argtypes, source: None  # type: ignore[method-assign]
    try:
        with config.patch(patches), _known(rules), tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
            compile_fx(graph, list(example_inputs), inner_compile=inner, ignore_shape_env=True)
    finally:
        AsyncCompile.cpp_pybinding = unpatched  # type: ignore[method-assign]
    (lowered,) = found
    return lowered


def inductor_cpp_command(trust_cpu: bool) -> list[str]:
    """Returns the command with which Inductor compiles `kernels.cpp` to `kernels.so`: flags for this CPU and its
    arithmetic, and the paths of torch's headers.
    """
    import torch._inductor.config as config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch({"cpp.vec_isa_ok": True if trust_cpu else config.cpp.vec_isa_ok}):
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=False, shared=True)
        builder = CppBuilder(name="kernels", sources="kernels.cpp", BuildOption=options, output_dir="")
        return shlex.split(builder.get_command_line())


def inductor_settings() -> bytes:
    """Returns Inductor's settings in this process, for `use_inductor_settings` in another."""
    import torch._inductor.config as config

    return config.save_config()


def use_inductor_settings(settings: bytes) -> None:
    """Sets Inductor's settings to those that `inductor_settings` returned in another process."""
    import torch._inductor.config as config

    config.load_config(settings)


def inductor_settings_text() -> str:
    """Returns the settings of Inductor that determine what it generates, the same text in every process."""
    import torch._inductor.config as config

    return repr(sorted(config.save_config_portable().items()))


def inductor_names() -> dict[str, Any]:
    """Returns the names that Inductor's generated Python for the CPU refers to. None of them needs Inductor itself,
    or Dynamo.
    """
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": torch.device,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "extern_kernels": torch,  # matrix products with out=, see `is_extern`
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "reinterpret_tensor": guards._reinterpret_tensor,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
    }


def is_extern(name: str) -> bool:
    """Whether `extern_kernels.name` in Inductor's code is `torch.name`."""
    from torch._inductor.select_algorithm import extern_kernels

    return hasattr(torch, name) and getattr(extern_kernels, name, None) is getattr(torch, name)


def data_pointer_function() -> int:
    """Returns the address of `void* f(PyObject* tensor)`, which returns a tensor's data pointer, for compiled
    kernels.
    """
    return torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]


def memory_of(tensor: torch.Tensor) -> int:
    """Returns an identifier of the memory that a tensor lies in."""
    return tensor.untyped_storage()._cdata


def memory_users(tensor: torch.Tensor) -> int:
    """Returns the number of tensors that lie in the memory of a tensor, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # type: ignore[attr-defined] - the `storage` here is one


def native_bf16(device: torch.device) -> bool:
    """Returns whether matrix products in bfloat16 run at full speed on the device, rather than very slowly."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.backends.mkldnn.enabled)
    return True


def native_fp16(device: torch.device) -> bool:
    """Returns whether matrix products in float16 run at full speed on the device, as `native_bf16` does."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported() and torch.backends.mkldnn.enabled)
    return True


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """Computes `(a * scale_a) @ (b * scale_b)` in `dtype`, for 8-bit matrices on tensor cores. `fast`: with
    accumulation in fewer bits.

    On CUDA, `a` is row-major and `b` column-major; dims are multiples of 16; scales are float32[], or float32[m, 1]
    and float32[1, n]; at most one of the two is e5m2.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def default_store() -> dist.Store:
    """Returns the key-value store through which the processes met, for messages without a collective."""
    return dist.distributed_c10d._get_default_store()


def nccl_ahead(timeout: datetime.timedelta, copies: bool = False) -> Any:
    """Returns options for a process group whose kernels the GPU starts before those of other streams. PyTorch warns
    if the options have another timeout than the group. `copies`: copy engines, instead of kernels, move data in
    symmetric memory.
    """
    nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]
    options = nccl.Options()
    options.is_high_priority_stream, options._timeout = True, timeout
    if copies:
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


def connect(group: Any, device: torch.device) -> None:
    """Creates the NCCL communicator of a group now, rather than with its first collective. All its ranks must call
    it.
    """
    group._get_backend(device).eager_connect_single_device(device)


def lacks_symmetric_memory() -> str | None:
    """Returns why this build does not support NCCL's symmetric memory, or None if it does."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or not hasattr(nccl, "NCCL_CTA_POLICY_ZERO") or "symm" not in str(nccl.register_mem_pool.__doc__):
        return f"torch {torch.__version__} does not register memory with NCCL"
    from torch.cuda import nccl as library

    version = library.version()
    return None if version >= (2, 28) else f"NCCL {'.'.join(map(str, version))} is older than 2.28"


def symmetric_memory(
    nbytes: int, device: torch.device, groups: Sequence[Any]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Returns zeros in memory allocated by NCCL and registered with each of these groups, and a function that ends
    the registration. Call that function before the groups are destroyed: otherwise the allocator would use
    communicators that no longer exist. All ranks must call this function, with the same number of bytes.
    """
    backends = [group._get_backend(device) for group in groups]
    pool = torch.cuda.MemPool(backends[0].mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        found = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for backend in backends:
        backend.register_mem_pool(pool, symm=True)

    def end() -> None:
        for backend in backends:
            backend.deregister_mem_pool(pool)

    return found, end


def abort_groups() -> None:
    """Ends all waiting in the NCCL groups of this process; every later call of them is an error. The communicators
    are aborted together: one after another, each could wait for the next.
    """
    device, found = torch.device("cuda"), list[Any]()
    for group in [*dist.distributed_c10d._world.pg_names]:
        with contextlib.suppress(RuntimeError):  # a group on the host only, which someone has created in addition
            found.append(group._get_backend(device))
    if not found:
        return
    # The start and end of a NCCL group, within which the aborts are issued together.
    found[0]._group_start()
    for backend in found:
        backend.abort()
    found[0]._group_end()


def all_gather(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Starts a gather of flat shards and returns the work to wait for. 2.13 renamed the function."""
    return _ALL_GATHER(_plain(whole), _plain(shard), group=group, async_op=True)


def reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> Any:
    """Starts a reduction that leaves each rank its flat shard, and returns the work to wait for. 2.13 renamed the
    function.
    """
    return _REDUCE_SCATTER(shard, whole, op=op, group=group, async_op=True)


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_together(wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """Starts gathers of flat shards as one collective, in one launch of NCCL. Returns what to wait for.

    No coalesced call of these functions has tensors of different dtypes: NCCL refuses to reduce them, and PyTorch
    documents nothing for gathers and reduce-scatters. Gathers of several dtypes move bytes, so they are still one
    call. This uses the process group's own method: the public way, `all_gather` for each, needs as many launches as
    tensors and about 20 us more CPU time for each. 2.13 renamed the method.
    """
    start = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    if start is None:
        return [all_gather(whole, shard, group) for whole, shard in zip(wholes, shards, strict=True)]
    options = _asynchronous(dist.distributed_c10d.AllgatherOptions())
    # A coalesced gather takes tensors of one dtype. A gather only moves bytes, so mixed dtypes are gathered as bytes.
    is_mixed = len({x.dtype for x in shards}) > 1
    flats, parts = ([x.view(torch.uint8) if is_mixed else _plain(x) for x in some] for some in (wholes, shards))
    return [start(flats, parts, options)]


def reduce_scatter_together(
    shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], op: Any, group: Any
) -> list[Any]:
    """Starts reductions that leave each rank its flat shards, as `all_gather_together` does, in one call per
    dtype.
    """
    start = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    if start is None:
        return [reduce_scatter(shard, whole, op, group) for shard, whole in zip(shards, wholes, strict=True)]
    options = _asynchronous(dist.distributed_c10d.ReduceScatterOptions())
    options.reduceOp = op
    return [start(some, flats, options) for some, flats in _by_dtype(shards, wholes)]


def all_reduce_together(flats: Sequence[torch.Tensor], op: Any, group: Any) -> list[Any]:
    """Starts in-place reductions, as `all_gather_together` does, in one call per dtype."""
    start, works = _method(group, "allreduce_coalesced"), list[Any]()
    for (alike,) in _by_dtype(flats):
        if start is None or len(alike) == 1:
            works += [dist.all_reduce(x, op, group, async_op=True) for x in alike]
            continue
        options = _asynchronous(dist.distributed_c10d.AllreduceCoalescedOptions())
        options.reduceOp = op
        works.append(start(alike, options))
    return works


def _by_dtype(*lists: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
    """Yields the lists of tensors split by the dtypes of the first list's tensors, in order of first occurrence,
    which is the same on all ranks.
    """
    for dtype in dict.fromkeys(x.dtype for x in lists[0]):
        yield [[x for x, first in zip(some, lists[0], strict=True) if first.dtype == dtype] for some in lists]


def _method(group: Any, *names: str) -> Callable[..., Any] | None:
    """Returns the first of these methods that a process group has."""
    return next((found for name in names if (found := getattr(group, name, None)) is not None), None)


def _asynchronous(options: Any) -> Any:
    """Makes a collective with these options run concurrently with the current stream, if the options have such a
    field, which depends on the release.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in a dtype that every backend can move unchanged: gloo does not know float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each tensor over another: on CUDA, in one launch for each pair of dtypes, for tensors with the same
    layout.
    """
    if len(targets) == 1 or _COPY is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    pairs: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        some = pairs.setdefault((target.dtype, source.dtype), ([], []))
        some[0].append(target)
        some[1].append(source)
    for some in pairs.values():
        _COPY(*some)


def copy_alike(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Does what `copy_all` does, for targets of one dtype and sources of one dtype: nothing has to be grouped."""
    if len(targets) == 1 or _COPY is None:
        copy_all(targets, sources)
    else:
        _COPY(list(targets), list(sources))


def add_all(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Adds each tensor to another in place, batched as in `copy_all`."""
    if len(totals) == 1 or _ADD is None:
        for total, part in zip(totals, parts, strict=True):
            total.add_(part)
    elif totals:
        _ADD(list(totals), list(parts))


def zero_all(tensors: Sequence[torch.Tensor]) -> None:
    """Fills tensors with zeros, batched as in `copy_all`."""
    if len(tensors) == 1 or _ZERO is None:
        for x in tensors:
            x.zero_()
    elif tensors:
        _ZERO(list(tensors))


_COPY = getattr(torch, "_foreach_copy_", None)
_ADD = getattr(torch, "_foreach_add_", None)
_ZERO = getattr(torch, "_foreach_zero_", None)


class Graph(fx.Graph):
    """A graph in which calls are created in half the time: PyTorch searches the arguments of a new node for symbolic
    numbers, and a program has none.
    """

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if op != "call_function":
            return super().create_node(op, target, args, kwargs, name, type_expr)
        # Created without arguments and given them afterwards, which skips the search.
        node = super().create_node(op, target, None, None, name, type_expr)
        node.args, node.kwargs = args or (), kwargs or {}
        return node


def is_view(op: Any) -> bool:
    """Whether an operator returns a view of its first argument."""
    return isinstance(op, torch._ops.OpOverload) and op.is_view


def is_function_operator(func: Any) -> bool:
    """Whether this is an operator that takes functions, such as `torch.cond`."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def is_operator(op: Any) -> bool:
    """Returns whether the target of a graph's node is an operator rather than a Python function."""
    return isinstance(op, torch._ops.OpOverload)
