"""What the CPU build (fzero/runtime/build/cpu) relies on in PyTorch's Inductor: docs/internals/cpu-build.md names each
test of this file beside what it protects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx

from fzero import random
from fzero._compat import compat
from fzero.runtime.build.cpu import compile_worker, cpp_kernels

aten = torch.ops.aten


def added_and_multiplied() -> fx.GraphModule:
    """Writes its first input, and multiplies what it has written."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    z = graph.call_function(aten.sin.default, (graph.call_function(aten.add.Tensor, (x, y)),))
    product = graph.call_function(aten.mm.default, (z, y))
    graph.call_function(aten.copy_.default, (x, z))
    graph.output((product,))
    return fx.GraphModule({}, graph)


def test_inductor_lowers_to_python_around_kernels_and_compiles_none(monkeypatch):
    started: list[str] = []
    unpatched = subprocess.Popen.__init__

    def popen(self, command, *args, **kwargs):
        started.append(str(command))
        return unpatched(self, command, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", popen)
    example = torch.ones(64, 64)
    probed = fx.Graph()
    probed.output((probed.call_function(aten.neg.default, (probed.placeholder("x"),)),))
    compat.inductor_lower(fx.GraphModule({}, probed), [example], trust_cpu=True)  # compiles a probe of the processor
    started.clear()
    lowered = compat.inductor_lower(added_and_multiplied(), [example, example.clone()], trust_cpu=True)
    assert not [c for c in started if "-o" in c] and (lowered.num_inputs, lowered.writes) == (2, (0,))
    for text in (
        "class Runner:",
        "def call(self, args):",
        "async_compile.cpp_pybinding([",
        "kernel(",
        "extern_kernels.mm(",
        "args.clear()",
    ):
        assert text in lowered.text
    command = compat.inductor_cpp_command(trust_cpu=True)
    assert "kernels.cpp" in command and command[command.index("-o") + 1] == "kernels.so" and "-O3" in command


def test_inductor_writes_an_operator_out_by_a_rule():
    """An operator of ours, which Inductor forgets afterwards, by its place in the tensor and what it reads."""
    from torch._inductor.lowering import lowerings

    graph = fx.Graph()
    key = graph.placeholder("key")
    graph.output((graph.call_function(random.DRAW, (key, [4, 5], 20, 0, "uniform")),))

    def rule(key: compat.Elements, shape: list[int], *_: Any) -> Any:
        assert (key.shape, key.dtype) == ((3,), torch.int64)
        element = lambda i: ((key(1) * 3 ^ compat.position(i[0] * 5 + i[1])) >> 1).float() * 0.25  # noqa: E731
        return shape, torch.float32, element

    given = [torch.ones(3, dtype=torch.int64)]
    lowered = compat.inductor_lower(fx.GraphModule({}, graph), given, True, {random.DRAW: rule})
    assert "fzero" not in lowered.text.partition("class Runner:")[2] and "0.25" in lowered.text
    assert random.DRAW not in lowerings


def test_what_inductors_python_names_is_there():
    names = compat.inductor_names()
    x = names["empty_strided_cpu"]((2, 3), (3, 1), torch.float32)
    assert x.shape == (2, 3) and names["reinterpret_tensor"](x, (6,), (1,), 0).data_ptr() == x.data_ptr()
    names["assert_size_stride"](x, (2, 3), (3, 1))
    with pytest.raises(AssertionError):
        names["assert_size_stride"](x, (3, 2), (2, 1))
    assert (
        compat.is_extern("mm")
        and compat.is_extern("bmm")
        and compat.is_extern("addmm")
        and not compat.is_extern("bias_addmm")
    )


def test_the_data_pointer_function_gives_a_tensors_address():
    import ctypes

    function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(compat.data_pointer_function())
    x = torch.ones(3)
    assert function(x) == x.data_ptr()


def test_inductors_settings_travel():
    import torch._inductor.config as config

    with config.patch({"cpp.min_chunk_size": 17}):
        settings, text = compat.inductor_settings(), compat.inductor_settings_text()
    assert compat.inductor_settings_text() != text
    before = compat.inductor_settings()
    try:
        compat.use_inductor_settings(settings)
        assert config.cpp.min_chunk_size == 17 and compat.inductor_settings_text() == text
    finally:
        compat.use_inductor_settings(before)


def test_a_function_is_compiled_loaded_and_called(tmp_path: Path):
    """The whole way: Inductor's code is parsed, its kernels are compiled, and the library is loaded."""
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    lowered = compat.inductor_lower(added_and_multiplied(), [x.clone(), y], trust_cpu=True)
    plain = cpp_kernels.parse(lowered, 2, 1, (0,))
    numbers = {kernel: i for i, kernel in enumerate(plain.kernels.values())}
    command = compat.inductor_cpp_command(trust_cpu=True)
    path = tmp_path / "kernels.so"
    path.write_bytes(compile_worker._compile_cpp(cpp_kernels.library_source(list(numbers)), command))
    text = cpp_kernels.text_of(plain, numbers, 2, (0,), 1)
    run = cpp_kernels.function_of("f", text, cpp_kernels.load_library(path), [])
    given, buffer = x.clone(), torch.zeros(64, 64)
    assert run(given, y, into=[buffer]) is buffer
    torch.testing.assert_close(given, (x + y).sin())
    torch.testing.assert_close(buffer, (x + y).sin() @ y)


@pytest.fixture(scope="module")
def artifact() -> bytes:
    """The second input is a literal."""
    import torch._inductor.config as config

    place = (8, 8), (8, 1), torch.float32
    with config.patch({"cpp.vec_isa_ok": True}):
        made = compat.inductor_compile(
            added_and_multiplied(), [place], torch.device("cpu"), literals=[torch.ones(8, 8)]
        )
    return compat.artifact_bytes(made)


def test_an_artifact_travels_as_bytes(artifact):
    run = compat.load_artifact(artifact)
    x, y = torch.ones(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(run(x, y)[0], torch.ones(8, 8).add(y).sin() @ y)
