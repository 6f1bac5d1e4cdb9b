"""Artifacts are called without Inductor's layers from their second call on, where that does the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from fzero._compat import compat
from fzero.runtime.build.cpu.cpp_kernels import NotPlain
from fzero.runtime.build.wrapper_shortening import short_text, shortened

aten = torch.ops.aten

# as Inductor writes for a GPU
WRITTEN = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (4, ), (1, ), 'input')
        with torch.cuda._DeviceGuard(1):
            torch.cuda.set_device(1)
            arg0_1 = copy_if_misaligned(arg0_1)
            buf0 = empty_strided_cuda((4, ), (1, ), torch.float32)
            raw_stream1 = get_raw_stream(1)
            triton_a.run(arg0_1, buf0, 4, stream=raw_stream1)
            del arg0_1
            assert_size_stride(arg1_1, (4, ), (1, ), 'input')
            raw_stream1 = get_raw_stream(1)
            triton_b.run(buf0, arg1_1, 4, stream=raw_stream1)
            buf1 = torch.ops.aten.sin.default(buf0)
            assert_size_stride(buf1, (4, ), (1, ), 'torch.ops.aten.sin.default')
        return (buf1, )
"""


def test_text_of_a_gpu():
    """Kernels that have a launcher are launched by it; checks of arguments become one comparison; those of a result
    stay; the stream is asked for once."""
    assert short_text(WRITTEN, ["triton_a"], writes=[1], aligned=[1]).splitlines() == [
        "def call(arg0_1, arg1_1):",
        "    if profiled() or autocast() or gpu() != 1 or (not alike(arg0_1, arg1_1)) or arg1_1.data_ptr() % 16:",
        "        return whole(arg0_1, arg1_1)",
        "    wrote((arg1_1,))",
        "    arg0_1 = copy_if_misaligned(arg0_1)",
        "    buf0 = empty_strided_cuda((4,), (1,), torch.float32)",
        "    raw_stream1 = get_raw_stream(1)",
        "    launch_triton_a(arg0_1, buf0, 4, stream=raw_stream1)",
        "    del arg0_1",
        "    triton_b.run(buf0, arg1_1, 4, stream=raw_stream1)",
        "    buf1 = torch.ops.aten.sin.default(buf0)",
        "    assert_size_stride(buf1, (4,), (1,), 'torch.ops.aten.sin.default')",
        "    return (buf1,)",
    ]


@pytest.mark.parametrize(
    ("was", "other"),
    [
        ("set_device(1)", "set_device(0)"),
        ("triton_b.run(buf0", "self.partitions[0](buf0"),
        ("args.clear()", "print(args)"),
    ],
    ids=["two devices", "parts", "another form"],
)
def test_other_text_is_left(was: str, other: str):
    with pytest.raises(NotPlain):
        short_text(WRITTEN.replace(was, other), [], [], [])


def artifact(function: Callable[..., list[Any]], *inputs: torch.Tensor) -> Any:
    import torch._inductor.config as config

    graph = fx.Graph()
    graph.output(function(*(graph.placeholder(f"x_{i}") for i in range(len(inputs)))))
    with config.patch({"cpp.vec_isa_ok": True}):
        places = [(x.shape, x.stride(), x.dtype) for x in inputs]
        return compat.inductor_compile(fx.GraphModule({}, graph), places, torch.device("cpu"))


class Counted:
    """A function, and how often it was called."""

    def __init__(self, run: Callable[..., Any]):
        self.run, self.calls = run, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.run(*args)


def added_in_place(x: fx.Node, y: fx.Node) -> list[fx.Node]:
    """Writes the sum of x and y over x, and returns it times y."""
    graph = x.graph
    total = graph.call_function(aten.add.Tensor, (x, y))
    graph.call_function(aten.copy_.default, (x, total))
    return [graph.call_function(aten.mul.Tensor, (total, y))]


@torch.no_grad()
def test_the_second_call_is_short_and_equal():
    """It counts as a write to what it writes. A call that is profiled, cast or of another layout is the artifact's."""
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    whole = Counted(artifact(added_in_place, x, y))
    run = shortened("added", whole)
    for number in range(4):
        before, version = x.clone(), x._version
        (found,) = run(x, y)
        assert torch.equal(x, before + y) and torch.equal(found, x * y) and x._version > version
        assert whole.calls == 1, number
    with torch.profiler.profile(acc_events=True):
        run(x, y)
    assert whole.calls == 2
    with torch.autocast("cpu", torch.bfloat16):
        run(x, y)
    assert whole.calls == 3
    with pytest.raises(AssertionError, match=r"size|stride"):
        run(x.view(32, 64).T, y)
    assert whole.calls == 4
    aside = torch.randn(64 * 32 + 1)[1:].view(64, 32)
    (found,) = run(aside, y)
    assert torch.equal(found, aside * y)


@torch.no_grad()
def test_layers_that_do_more_are_kept():
    """A result that is a view of an argument is made by a layer."""
    x = torch.randn(64, 32)

    def viewed(x: fx.Node) -> list[fx.Node]:
        call = x.graph.call_function
        return [call(aten.view.default, (x, [32, 64])), call(aten.neg.default, (x,))]

    whole = Counted(artifact(viewed, x))
    run = shortened("viewed", whole)
    for number in range(5):
        view, opposite = run(x)
        assert whole.calls == number + 1
        assert view.data_ptr() == x.data_ptr() and torch.equal(view, x.view(32, 64)) and torch.equal(opposite, -x)


def test_a_comparison_of_layouts():
    x = torch.zeros(4, 8)
    alike = compat.alike([x, torch.zeros(())])
    assert alike(torch.ones(4, 8), torch.ones(())) and not alike(torch.ones(8, 4).T, torch.ones(()))
    assert not alike(torch.ones(4, 9), torch.ones(())) and not alike(x.double(), torch.ones(()))


def test_launchers_of_kernels():
    """Triton's launcher is known by this name from torch 2.13 on; without it a kernel is run as Inductor runs it."""
    assert compat.launcher_of(object()) is None
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13):
        from torch._inductor.runtime import triton_heuristics

        source = inspect.getsource(triton_heuristics.CachingAutotuner.run)
        assert "fast = self._cached_launcher" in source and "return fast(*args, stream=stream)" in source
