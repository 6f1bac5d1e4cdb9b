"""Wraps private PyTorch names, and is the only file that touches them. Each is tested against every supported release
(tests/compat/test_private_torch_names.py)."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import functools
import inspect
import io
import logging
import math
import os
import pickle
import re
import shlex
import shutil
import tempfile
import threading
import uuid
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
"""Raised by a fake tensor when Python asks for its value, or a shape does."""


@contextmanager
def no_modes() -> Iterator[None]:
    """Leaves every dispatch mode for the body: work aside, in the middle of a trace."""
    with _disable_current_modes():
        yield


@contextmanager
def truncated_normal(fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """`torch.nn.init.trunc_normal_` inside is `fn(tensor, mean, std, a, b)`: PyTorch's draws until all elements are
    within the bounds, which no trace can know."""
    before = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = lambda x, mean, std, a, b, generator=None: fn(x, mean, std, a, b)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = before


@functools.cache
def raising() -> frozenset[CodeType]:
    """The code of PyTorch's own functions that raise unless all elements of a tensor hold."""
    return frozenset({torch._check_tensor_all_with.__code__})


def raise_unless(holds: torch.Tensor, error: type[Exception], said: Callable[[], str]) -> None:
    """Raises unless all elements of a tensor hold; in a trace it is a condition under which the function raises."""
    torch._check_tensor_all_with(error, holds, said)


class _UncheckedDistributions:
    """The traces that run now, in any thread, and the default of the argument checks of distributions before them."""

    lock = threading.Lock()
    traces = 0
    before = True


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Inside, `torch.distributions` does not check arguments, unless `validate_args=True` asks for it. The default is
    one for all threads: the first of several traces changes it, and the last one restores it."""
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
    """Calls of `torch.utils.checkpoint` inside are calls of their functions, nothing of which is recomputed."""

    class Plain:
        """With `use_reentrant=True`: what gets no tensor that requires a gradient has none."""

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


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s around the caller, the innermost last."""
    return _get_current_function_mode_stack() if _len_torch_function_stack() else []


def dispatch_modes() -> list[Any]:
    """The `TorchDispatchMode`s around the caller, the innermost last."""
    return _get_current_dispatch_mode_stack()


def module_hooks() -> tuple[Any, ...]:
    """Those that are registered for every module at once."""
    of = torch.nn.modules.module
    hooks = (
        of._global_forward_pre_hooks,
        of._global_forward_hooks,
        of._global_backward_pre_hooks,
        of._global_backward_hooks,
    )
    return tuple(tuple(h.values()) for h in hooks) if any(hooks) else ()


def default_device() -> str:
    """The name of `torch.get_default_device()`, at a tenth of its time where nobody has set one. Where that raises, as
    there is no such device, the name as it was set."""
    modes = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
    context = modes[-1] if modes else getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is None:
        return "cpu"
    is_there = context.device.type != "cuda" or torch.cuda.is_available()
    return str(torch.get_default_device() if is_there else context.device)


def default_tensor_device() -> str:
    """The type of device that `torch.set_default_tensor_type` has chosen."""
    return torch._C._get_default_device()  # type: ignore[attr-defined]


def einsum_paths() -> tuple[Any, Any]:
    """`torch.backends.opt_einsum.enabled` and `.strategy`, read without the exception that torch's lazy module raises
    on each access."""
    of: Any = torch.backends.opt_einsum
    return vars(of).get("enabled", of.m.enabled), vars(of).get("strategy", of.m.strategy)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost `saved_tensors_hooks` around the caller."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]


def trace_device(device_type: str) -> str:
    """The type of device on which fake tensors of a mesh are recorded: without one of the mesh's own here, the
    operators of a CPU stand for its. A build of torch without CUDA aborts the process when its autograd meets a CUDA
    tensor."""
    return device_type if device_type == "cpu" or torch.cuda.is_available() else "cpu"


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Without the log entry, a traceback of torch's own, that a fake tensor makes when an operation fails: the
    exception says it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True  # a new level would empty the caches of all loggers
    try:
        yield
    finally:
        log.disabled = before


def fake_metadata(x: torch.Tensor) -> tuple[Any, ...] | None:
    """Shape, dtype, device and strides of a fake tensor; None for one that is more than that: it has a known value, is
    read through a sign, or is one of PyTorch's tensors of zeros without memory."""
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
    """A fake tensor of these facts, contiguous without `stride`. It is made past every mode, in 12 us: `torch.empty`
    under the mode takes 65."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        meta = (
            torch.empty(shape, dtype=dtype, device="meta")
            if stride is None
            else torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        )
    return FakeTensor(mode, meta, torch.device(device))


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """A fake tensor like this one as programs have it. Forward-mode derivatives that are 0 are PyTorch's tensors of
    zeros without memory, which other operations do not take on fake tensors; a program has plain zeros."""
    if not x._is_zerotensor():
        return x
    return new_fake(x.fake_mode, x.shape, x.dtype, x.device, x.stride())  # type: ignore[attr-defined]


def new_view(
    mode: FakeTensorMode, base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> FakeTensor:
    """A fake view of a fake tensor that begins `offset` elements behind it, made past every mode."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        meta = torch.empty(0, dtype=base.dtype, device="meta")
        meta.set_(base.untyped_storage(), base.storage_offset() + offset, shape, stride)  # type: ignore[call-overload]
    return FakeTensor(mode, meta, base.device)


def attributes(x: torch.Tensor) -> list[str]:
    """The attributes that someone has set on a tensor."""
    return [name for name in x.__dict__ if name not in _of_fakes()] if x.__dict__ else []


def gradient_hooks(x: torch.Tensor) -> int:
    """The number of a tensor's hooks that run when a gradient was added to its own."""
    return len(x._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]


@functools.cache
def _of_fakes() -> frozenset[str]:
    """The attributes that every fake tensor has. Asked when they are needed: a FakeTensorMode imports Dynamo."""
    return frozenset(new_fake(FakeTensorMode(), (), torch.float32, "cpu").__dict__)


def functorch_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def functionalized(fn: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of `fn(*inputs)`, with operations that return new values in place of those that overwrite, and all
    others as they are (`torch.func.functionalize` takes some apart). `inputs` keep their values."""
    torch._enable_functionalization(reapply_views=True)  # type: ignore[attr-defined]
    try:
        outputs = fn(*(torch._to_functional_tensor(x) for x in inputs))
        for x in outputs:
            torch._sync(x)
        return [torch._from_functional_tensor(x) for x in outputs]
    finally:
        torch._disable_functionalization()  # type: ignore[attr-defined]


def next_autograd_node() -> int:
    """The sequence number that the next autograd node of this thread gets. A node is made right before what it
    differentiates runs."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def backward_of() -> int | None:
    """The sequence number of the autograd node whose backward runs now on this thread, if one does."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return None if node is None else node._sequence_nr()


def min_cut(joint: fx.GraphModule, num_outputs: int, recompute: set[fx.Node]) -> set[str]:
    """Names of the forward values that the min-cut partitioner would save for the backward of a joint graph.

    The joint graph's inputs are `primals_i` and `tangents_i`, its outputs the forward's `num_outputs` followed by the
    gradients. Nodes in `recompute` are never saved. No two operations of it are equal (`trace.merge_equal`).
    """
    # a second and 45 MB, which not every step needs
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in recompute:
        node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
    # equal operations are one in what was recorded; to look for them PyTorch imports all of Inductor, 1.3 s
    with config.patch(cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_outputs)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    return {node.name for node in returned[num_outputs:] if isinstance(node, fx.Node)}


def min_cut_settings() -> bytes:
    """A digest of the settings that `min_cut` goes by."""
    from torch._functorch import config

    return config.get_hash()  # type: ignore[attr-defined]


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation by dual numbers is running around the caller."""
    return torch.autograd.forward_ad._current_level >= 0


def fx_tracing() -> bool:
    """Whether torch.fx traces a function around the caller: what it is given are proxies, and what it computes now may
    be thrown away."""
    return fx._symbolic_trace._is_fx_tracing_flag  # type: ignore[attr-defined]


def attention_order() -> tuple[int, ...]:
    """The order in which attention tries its kernels."""
    return tuple(torch._C._get_sdp_priority_order())  # type: ignore[attr-defined]


def settle_attention(device: torch.device) -> None:
    """Has PyTorch decide on the order in which it prefers attention's kernels on a GPU. It does so at the first
    attention, and a step that is traced before that is traced in another setting than the next call finds."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device=device)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)


@contextmanager
def in_order() -> Iterator[None]:
    """Operations of the CPU that add up in any order, with threads, do it one after the other inside. The setting is
    the process's."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = fills_uninitialized_memory()
    fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        fill_uninitialized_memory(filled)


def fills_uninitialized_memory() -> bool:
    """Whether, with deterministic algorithms, PyTorch fills memory that nobody has written yet."""
    return torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def fill_uninitialized_memory(fill: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _deterministic() -> dict[str, bool]:
    """Inductor's setting that goes with deterministic algorithms: nothing is chosen by its measured time."""
    import torch._inductor.config as config

    return {"deterministic": config.deterministic or torch.are_deterministic_algorithms_enabled()}


def inductor_compile(
    graph: fx.GraphModule,
    inputs: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]],
    device: torch.device,
    cores: int | None = None,
    literals: Sequence[torch.Tensor] = (),
) -> Any:
    """A graph of ATen operations as an Inductor artifact without guards: about 11 us a call, where a compiled function
    takes 59.

    It can be saved with `artifact_bytes`; loading compiles C++ again, but no Triton kernels (they are in the artifact).

    Args:
        graph: the operations. It has no tensors as attributes: a saved artifact would ask for them as inputs.
        inputs: shape, strides and dtype of each.
        device: that all of them are on.
        cores: how many processes may compile kernels. Inductor alone starts one a core on every rank of a host.
        literals: inputs behind those, wherever they are.

    Memory: none of the inputs', from 2.13 on, where Inductor takes fakes; before, theirs. Triton may run a kernel to
        tune it, on tensors of the sizes that it is for.
    """
    import torch._inductor.config as config
    from torch._inductor import standalone_compile
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    threads = {} if cores is None or "TORCHINDUCTOR_COMPILE_THREADS" in os.environ else {"compile_threads": cores}
    # without a benchmark of itself in the code, which holds what this process was called with behind --only
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


def inductor_cache_folder() -> str:
    """The folder in which Inductor keeps its files: that of TORCHINDUCTOR_CACHE_DIR, or else of the user's name below
    the directory for temporary files."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return given  # asked first: the import below makes this folder, or fails half-way if it cannot
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def artifact_bytes(artifact: Any) -> bytes:
    """An Inductor artifact as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        artifact.save(path=f"{folder}/artifact", format="binary")
        return Path(folder, "artifact").read_bytes()


class NotMovedError(Exception):
    """An Inductor artifact of one GPU could not be made one of another."""


def load_artifact(data: bytes, device: torch.device) -> Callable[..., Any]:
    """The artifact that `artifact_bytes` saved, in this or another process of the same release.

    Args:
        device: that it runs on here. If it was compiled for another GPU, it is made one of this: Inductor writes the
            index into its code and into the launchers of kernels. No kernel is compiled again.

    Raises:
        NotMovedError: that failed.
    """
    import torch._inductor.config as config
    from torch._inductor import CompiledArtifact

    moved, copies = (data, list[str]()) if device.type == "cpu" else _moved(data, device)
    try:
        # nothing is compiled, and Inductor would start processes that compile
        with tempfile.TemporaryDirectory() as folder, config.patch(compile_threads=1):
            Path(folder, "artifact").write_bytes(moved)
            return CompiledArtifact.load(path=f"{folder}/artifact", format="binary")
    except Exception as error:
        if moved is data:
            raise
        raise NotMovedError(f"{type(error).__name__}: {error}") from error
    finally:
        for folder in copies:
            shutil.rmtree(folder, ignore_errors=True)


def _moved(data: bytes, device: torch.device) -> tuple[bytes, list[str]]:
    """An artifact for a GPU made from one for another, and the folders in which Inductor's cache keeps it when it is
    loaded: those of names that no other process uses."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache, code_hash
    from torch.compiler._cache import CacheArtifactFactory

    version, found = _artifact_parts(data)
    (graph,), (entry,) = (
        [_Moving(part.content, device).load() for part in found[kind]] for kind in ("inductor", "aot_autograd")
    )
    if not (before := {*graph.device_idxs} - {device.index}):
        return data, []
    try:
        (index,) = before
        source = on_device(graph.source_code, index, device.index)
        kernels = dict(zip(_kernel_keys(graph.source_code), _kernel_keys(source), strict=True))
        graph.source_code, graph.cache_key = source, code_hash(source)
        graph.device_idxs = type(graph.device_idxs)([device.index])
        if graph._triton_bundle is not None:
            graph._triton_bundle = _moved_kernels(graph._triton_bundle, kernels, device.index)
        names = {"inductor": f"f{uuid.uuid4().hex}", "aot_autograd": f"a{uuid.uuid4().hex}"}
        entry.compiled_fw.fx_graph_cache_info = names["inductor"], entry.compiled_fw.fx_graph_cache_info[1]
        for (kind, name), what in zip(names.items(), (graph, entry), strict=True):
            found[kind] = [CacheArtifactFactory.create(kind, name, pickle.dumps(what))]
        caches = (FxGraphCache, names["inductor"]), (AOTAutogradCache, names["aot_autograd"])
        folders = [owner._get_tmp_dir_for_key(name) for owner, name in caches]
        return _artifact_joined(version, names["aot_autograd"], found), folders
    except Exception as error:
        raise NotMovedError(f"{type(error).__name__}: {error}") from error


def _artifact_parts(data: bytes) -> tuple[bytes, dict[str, list[Any]]]:
    """The parts of an artifact's bytes: the release that made it, and the entries of Inductor's caches, by kind."""
    from torch._inductor.standalone_compile import CacheCompiledArtifact
    from torch.compiler._cache import CacheArtifactManager
    from torch.utils._appending_byte_serializer import BytesReader

    reader = BytesReader(data)
    header, version, _, body = reader.read_bytes(), reader.read_bytes(), reader.read_str(), reader.read_bytes()
    found = CacheArtifactManager.deserialize(body)
    if header != CacheCompiledArtifact.CACHE_HEADER or found is None:
        raise RuntimeError("this is no artifact")
    return version, found


def _artifact_joined(version: bytes, name: str, parts: dict[str, list[Any]]) -> bytes:
    """The bytes that `_artifact_parts` reads. `name`: of the entry that is loaded."""
    from torch._inductor.standalone_compile import CacheCompiledArtifact
    from torch.compiler._cache import _serialize_single_cache
    from torch.utils._appending_byte_serializer import AppendingByteSerializer, BytesWriter

    body = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    body.extend(parts.items())
    writer = BytesWriter()
    writer.write_bytes(CacheCompiledArtifact.CACHE_HEADER)
    writer.write_bytes(version)
    writer.write_str(name)
    writer.write_bytes(body.to_bytes())
    return writer.to_bytes()


class _Moving(pickle.Unpickler):
    """Reads objects of any GPU as objects of `device`: no other GPU is touched."""

    def __init__(self, data: bytes, device: torch.device):
        super().__init__(io.BytesIO(data))
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "device"):
            return lambda kind, *index: self._device if kind == "cuda" else torch.device(kind, *index)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._storage
        return super().find_class(module, name)

    def _storage(self, data: bytes) -> Any:
        def restored(storage: Any, place: str) -> Any:
            to = str(self._device) if place.startswith("cuda") else place
            return torch.serialization.default_restore_location(storage, to)

        return torch.load(io.BytesIO(data), map_location=restored, weights_only=False)


_INDEX = re.compile(
    r"(torch\.cuda\._DeviceGuard\(|torch\.cuda\.set_device\(|get_raw_stream\(|\bcuda:|"
    r"\bdevice\(type='cuda', index=|\bDeviceProperties\(type='cuda', index=)(\d+)"
)
_UNKNOWN = re.compile(r"torch\.cuda\.(?!_DeviceGuard\(\d|set_device\(\d|synchronize\(\)|current_stream\(\))\w+")


def on_device(source: str, before: int, after: int) -> str:
    """Inductor's code for one GPU as its code for another, by their indices.

    Raises:
        ValueError: it names a third GPU, or calls what may name one in a way that is not known here.
    """
    strange = {f"cuda:{n}" for _, n in _INDEX.findall(source) if int(n) != before} | {*_UNKNOWN.findall(source)}
    if strange:
        raise ValueError(f"code for cuda:{before} has {', '.join(sorted(strange))}")
    return _INDEX.sub(lambda found: f"{found[1]}{after}", source)


def _kernel_keys(source: str) -> list[str]:
    """The keys under which Inductor keeps the compiled Triton kernels of its code, in the order of the code."""
    from torch._inductor.async_compile import CompiledTritonKernels

    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "triton"]
    return [CompiledTritonKernels.key(ast.literal_eval(call.args[1])) for call in made]


def _moved_kernels(bundle: Any, keys: Mapping[str, str], index: int) -> Any:
    """The Triton kernels of an artifact, and their launchers, for the GPU of an index.

    A kernel that was tuned has two launchers, of all that was tried and then of the fastest; binaries may be of the
    fastest alone, and what has none would be compiled again.
    """
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    binaries = {found.kernel_hash: dataclasses.replace(found, device=index) for found in bundle.kernel_artifacts}
    launchers = {}
    for found in bundle.static_autotuners:
        own = found.kernel
        own.compile_results = [r for r in own.compile_results if triton_hash_to_path_key(r.kernel.hash) in binaries]
        for result in own.compile_results:
            result.compile_meta = {**result.compile_meta, "device": index}
        own.triton_meta = {**own.triton_meta, "device": index}
        own.device_props = own.device_props._replace(index=index)
        if own.compile_results and found.cache_key in keys:
            launchers[found.cache_key] = dataclasses.replace(found, cache_key=keys[found.cache_key])
    return dataclasses.replace(
        bundle, kernel_artifacts=list(binaries.values()), static_autotuners=list(launchers.values())
    )


@dataclass(frozen=True)
class ArtifactCode:
    """Inductor's Python for a function, beneath the layers of an artifact.

    Attributes:
        text: the module.
        names: that it refers to, with kernels.
        writes: numbers of the inputs that it overwrites.
        aligned: numbers of the inputs that a layer copies if they do not begin at a multiple of `ALIGNMENT` bytes.
    """

    text: str
    names: dict[str, Any]
    writes: tuple[int, ...]
    aligned: tuple[int, ...]


ALIGNMENT = 16
"""In bytes: Inductor's kernels read so many at once."""


def watched(artifact: Any, args: Sequence[torch.Tensor]) -> tuple[Any, ArtifactCode | None]:
    """The results of an Inductor artifact, and its code where nothing else does any work: the code was given these very
    tensors, and its results are the artifact's. All that layers around it do besides is in `ArtifactCode`."""
    from torch._inductor.output_code import CompiledFxGraph

    seen: list[tuple[Any, list[Any], Any]] = []
    before = CompiledFxGraph.__call__

    def noting(graph: Any, inputs: Sequence[Any]) -> Any:
        given = list(inputs)  # which the code empties
        seen.append((graph, given, results := before(graph, inputs)))
        return results

    CompiledFxGraph.__call__ = noting  # type: ignore[method-assign]
    try:
        results = artifact(*args)
    finally:
        CompiledFxGraph.__call__ = before  # type: ignore[method-assign]

    def same(these: Sequence[Any], those: Sequence[Any]) -> bool:
        return len(these) == len(those) and all(x is y for x, y in zip(these, those, strict=True))

    if len(seen) != 1 or not same(args, seen[0][1]) or not same(results, seen[0][2]):
        return results, None
    graph = seen[0][0]
    run, aligned = graph.current_callable, ()
    if getattr(run, "__qualname__", "").startswith("align_inputs_from_check_idxs."):
        layer = inspect.getclosurevars(run).nonlocals
        run, aligned = layer["model"], tuple(layer["inputs_to_check"])
    if getattr(run, "__name__", "") != "call":
        return results, None
    return results, ArtifactCode(
        graph.source_code, dict(run.__globals__), tuple(sorted(graph.mutated_input_idxs)), aligned
    )


def launcher_of(kernel: Any) -> Callable[..., None] | None:
    """The function that launches a Triton kernel of Inductor's, once it has run: with the kernel's arguments, and
    `stream=`."""
    return getattr(kernel, "_cached_launcher", None)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors have these dtypes, devices, shapes and strides: 2 us for 22 of them."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def surroundings() -> dict[str, Any]:
    """Names for code that asks for its surroundings: whether they are `profiled()` or cast (`autocast()`), and the
    index of the current GPU (`gpu()`)."""
    profiler: Any = torch.autograd.profiler
    return {
        "profiled": lambda: profiler._is_profiler_enabled,
        "autocast": torch._C._is_any_autocast_enabled,  # type: ignore[attr-defined]
        "gpu": getattr(torch._C, "_cuda_getDevice", None),
    }


@dataclass(frozen=True)
class InductorOutput:
    """Inductor's output for a graph before any C++ is compiled: a Python module as text, and which of the graph's
    inputs it writes."""

    text: str
    num_inputs: int
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Element:
    """A number in the code of one element of Inductor's kernels, with Python's operators and some of a tensor's
    methods: int64, and float32 from `float` on."""

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
    """A tensor that a kernel reads: its shape, and as a function of indices an `Element`."""

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
    """An index of the running element, or what Python's arithmetic makes of several."""
    import sympy

    return Element(_ops().index_expr(sympy.sympify(index), torch.int64))


ElementRule = Callable[..., tuple[Sequence[int], torch.dtype, Callable[[Sequence[Any]], Element]]]
"""An operator for Inductor's kernels: from its arguments, tensors as `Elements`, to the shape and dtype of its result
and a function from the indices of an element to the `Element`."""


@contextmanager
def _known(rules: Mapping[Any, ElementRule]) -> Iterator[None]:
    """Inductor writes operators out by rules of ours, for the body. Each operation within a rule is written once: of a
    graph of operations Inductor writes each once for every path that leads to it, which for the rounds of a cipher
    takes seconds."""
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
    """Inductor's code for a graph of ATen operations on the CPU: Python around C++ kernels, which are left as text.

    Args:
        graph: the operations.
        example_inputs: tensors of the shapes, strides and dtypes it will see.
        trust_cpu: take the CPU's word for the vector instructions it has. Otherwise Inductor compiles and runs a probe
            for each set, 8 s in all.
        rules: for operators that Inductor does not know.
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
    """The command with which Inductor compiles `kernels.cpp` to `kernels.so`: flags for this CPU and its arithmetic,
    the paths of torch's headers."""
    import torch._inductor.config as config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with config.patch({"cpp.vec_isa_ok": True if trust_cpu else config.cpp.vec_isa_ok}):
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=False, shared=True)
        builder = CppBuilder(name="kernels", sources="kernels.cpp", BuildOption=options, output_dir="")
        return shlex.split(builder.get_command_line())


def inductor_settings() -> bytes:
    """Inductor's settings as they are in this process, for `use_inductor_settings` in another."""
    import torch._inductor.config as config

    return config.save_config()


def use_inductor_settings(settings: bytes) -> None:
    import torch._inductor.config as config

    config.load_config(settings)


def inductor_settings_text() -> str:
    """The settings of Inductor that decide what it generates, the same in every process."""
    import torch._inductor.config as config

    return repr(sorted(config.save_config_portable().items()))


def inductor_names() -> dict[str, Any]:
    """The names that Inductor's generated Python for the CPU refers to. None of it needs Inductor itself, or Dynamo."""
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": torch.device,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "extern_kernels": torch,  # matrix products with out=: see `is_extern`
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
    """Address of `void* f(PyObject* tensor)`: a tensor's data pointer, for compiled kernels."""
    return torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of the memory that a tensor lies in."""
    return tensor.untyped_storage()._cdata


def native_bf16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 run at full speed on the device, or crawl (../docs/design.md, bf16 on a
    CPU)."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.backends.mkldnn.enabled)
    return True


def native_fp16(device: torch.device) -> bool:
    """Whether matrix products in float16 run at full speed on the device; as `native_bf16`."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported() and torch.backends.mkldnn.enabled)
    return True


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, fast: bool
) -> torch.Tensor:
    """`(a * scale_a) @ (b * scale_b)` in `dtype`, of 8-bit matrices on tensor cores. `fast`: with sums of fewer bits.

    On CUDA `a` lies row by row, `b` column by column; dims are multiples of 16; scales are float32[], or float32[m, 1]
    and float32[1, n]; not both are e5m2.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def default_store() -> dist.Store:
    """The key-value store that the processes met at: messages without a collective."""
    return dist.distributed_c10d._get_default_store()


def nccl_ahead(timeout: datetime.timedelta, copies: bool = False) -> Any:
    """Options of a process group whose kernels the GPU starts before those of others. PyTorch warns where they have
    another timeout than the group. `copies`: copy engines move what lies in symmetric memory, and no kernels do."""
    nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]
    options = nccl.Options()
    options.is_high_priority_stream, options._timeout = True, timeout
    if copies:
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


def connect(group: Any, device: torch.device) -> None:
    """Makes the NCCL communicator of a group now, and not with its first collective. All its ranks call it together."""
    group._get_backend(device).eager_connect_single_device(device)


def lacks_symmetric_memory() -> str | None:
    """Why this build has no symmetric memory of NCCL, or None."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None or not hasattr(nccl, "NCCL_CTA_POLICY_ZERO") or "symm" not in str(nccl.register_mem_pool.__doc__):
        return f"torch {torch.__version__} does not register memory with NCCL"
    from torch.cuda import nccl as library

    version = library.version()
    return None if version >= (2, 28) else f"NCCL {'.'.join(map(str, version))} is older than 2.28"


def symmetric_memory(
    nbytes: int, device: torch.device, groups: Sequence[Any]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Zeros in memory of NCCL's, registered with each of these groups, and what ends that. It is to be ended before the
    groups are: an allocator would ask communicators that are gone. All ranks call it together, with as many bytes."""
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
    """Ends what waits in the NCCL groups of this process, and every later call of them is an error. The communicators
    are aborted together: one after the other each could wait for the next."""
    device, found = torch.device("cuda"), list[Any]()
    for group in [*dist.distributed_c10d._world.pg_names]:
        with contextlib.suppress(RuntimeError):  # a group of the host's alone, which somebody made besides
            found.append(group._get_backend(device))
    if not found:
        return
    found[0]._group_start()
    for backend in found:
        backend.abort()
    found[0]._group_end()


def all_gather(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Starts a gather of flat shards. Returns the work to wait for. 2.13 renamed the function."""
    return _ALL_GATHER(_plain(whole), _plain(shard), group=group, async_op=True)


def reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, op: Any, group: Any) -> Any:
    """Starts a reduction that leaves each rank its flat shard. Returns the work to wait for. 2.13 renamed the
    function."""
    return _REDUCE_SCATTER(shard, whole, op=op, group=group, async_op=True)


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_together(wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """Starts gathers of flat shards as one collective, one launch of NCCL's. Returns what to wait for.

    No coalesced call of these functions has tensors of different dtypes: NCCL refuses to reduce them, and of gathers
    and reduce_scatters PyTorch documents nothing. Gathers of several dtypes move as bytes, so they are one call still.
    The process group's own method: the public way, `all_gather` for each, takes as many launches and about 20 us of CPU
    more for each. 2.13 renamed the method.
    """
    start = _method(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    if start is None:
        return [all_gather(whole, shard, group) for whole, shard in zip(wholes, shards, strict=True)]
    options = _asynchronous(dist.distributed_c10d.AllgatherOptions())
    is_mixed = len({x.dtype for x in shards}) > 1
    flats, parts = ([x.view(torch.uint8) if is_mixed else _plain(x) for x in some] for some in (wholes, shards))
    return [start(flats, parts, options)]


def reduce_scatter_together(
    shards: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], op: Any, group: Any
) -> list[Any]:
    """Starts reductions that leave each rank its flat shards, as `all_gather_together` does: one for each dtype."""
    start = _method(group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    if start is None:
        return [reduce_scatter(shard, whole, op, group) for shard, whole in zip(shards, wholes, strict=True)]
    options = _asynchronous(dist.distributed_c10d.ReduceScatterOptions())
    options.reduceOp = op
    return [start(some, flats, options) for some, flats in _by_dtype(shards, wholes)]


def all_reduce_together(flats: Sequence[torch.Tensor], op: Any, group: Any) -> list[Any]:
    """Starts reductions in place, as `all_gather_together` does: one for each dtype."""
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
    """Lists of tensors split by the dtypes of the first's, in the order in which these come: all ranks', alike."""
    for dtype in dict.fromkeys(x.dtype for x in lists[0]):
        yield [[x for x, first in zip(some, lists[0], strict=True) if first.dtype == dtype] for some in lists]


def _method(group: Any, *names: str) -> Callable[..., Any] | None:
    """The first of a process group's methods that it has."""
    return next((found for name in names if (found := getattr(group, name, None)) is not None), None)


def _asynchronous(options: Any) -> Any:
    """Options of a collective that runs beside the current stream, where they say so: releases differ."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor that moves as it is, in a dtype that every backend knows: gloo knows no float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each tensor over another: on CUDA one launch for each pair of dtypes, of tensors that lie alike."""
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
    """`copy_all` for targets of one dtype and sources of one dtype: nothing is grouped."""
    if len(targets) == 1 or _COPY is None:
        copy_all(targets, sources)
    else:
        _COPY(list(targets), list(sources))


def add_all(totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Adds each tensor to another in place, as `copy_all` copies."""
    if len(totals) == 1 or _ADD is None:
        for total, part in zip(totals, parts, strict=True):
            total.add_(part)
    elif totals:
        _ADD(list(totals), list(parts))


def zero_all(tensors: Sequence[torch.Tensor]) -> None:
    """Fills tensors with zeros, as `copy_all` copies."""
    if len(tensors) == 1 or _ZERO is None:
        for x in tensors:
            x.zero_()
    elif tensors:
        _ZERO(list(tensors))


_COPY = getattr(torch, "_foreach_copy_", None)
_ADD = getattr(torch, "_foreach_add_", None)
_ZERO = getattr(torch, "_foreach_zero_", None)


class Graph(fx.Graph):
    """A graph whose calls are made in half the time: PyTorch looks for symbolic numbers among the arguments that a node
    is made with, and a program has none."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if op != "call_function":
            return super().create_node(op, target, args, kwargs, name, type_expr)
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
    """Whether the target of a graph's node is an operator, and not a Python function."""
    return isinstance(op, torch._ops.OpOverload)
