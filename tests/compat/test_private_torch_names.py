"""What we rely on of each private PyTorch name in fzero/_compat/compat.py: the first tests to run against a new
release."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

import fzero as fz
from fzero._compat import compat

aten = torch.ops.aten


def test_the_release_is_supported():
    major, minor = (int(x) for x in torch.__version__.split(".")[:2])
    assert (2, 11) <= (major, minor) < (2, 14)


def private_names(module: ast.Module) -> Iterator[str]:
    """Names of torch's modules with a part that begins with one underscore, as imported or read from what was imported.
    Those of operators (`torch.ops.aten._to_copy`) are public."""
    bound = set()
    for n in ast.walk(module):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            prefix = f"{n.module}." if isinstance(n, ast.ImportFrom) else ""
            names = {prefix + a.name: a.asname or a.name.partition(".")[0] for a in n.names}
            of_torch = {name: as_ for name, as_ in names.items() if name.partition(".")[0] == "torch"}
            bound |= {*of_torch.values()}
            yield from of_torch
    for n in ast.walk(module):
        name = ast.unparse(n) if isinstance(n, ast.Attribute) else ""
        if re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in bound:
            yield re.sub(r"^torch\.ops\.\w+\._", "torch.ops.", name)


@pytest.mark.full
def test_private_names_are_in_one_file():
    """compat.py is the only file of the package with a name of torch that begins with an underscore."""
    found = [
        f"{file.name}: {name}"
        for file in Path(fz.__file__).parent.rglob("*.py")
        if file.name != "compat.py"
        for name in private_names(ast.parse(file.read_text()))
        if re.search(r"(^|\.)_(?!_)", name)
    ]
    assert not found


def test_classes_of_layers_contain_those_that_are_public():
    norms = [getattr(nn, name) for name in dir(nn) if re.search("(Batch|Instance)Norm", name)]
    assert len(norms) >= 13 and all(issubclass(cls, compat.NormBase) for cls in norms)


def test_fake_tensors_have_shapes_and_no_memory():
    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(1 << 40, 4)
        y = x + torch.ones(4)
        assert isinstance(y, compat.FakeTensor) and y.shape == (1 << 40, 4) and y.device.type == "cpu"
        real = torch.nn.Parameter(torch.ones(2))
    assert isinstance(mode.from_tensor(torch.ones(3)), compat.FakeTensor)
    del real


def test_a_fake_tensor_can_be_made_past_its_mode():
    """It is as one that the mode makes, under other modes too, and shares nothing with the next."""
    mode, seen = compat.FakeTensorMode(), Seen()
    with mode, seen:
        x, y = (
            compat.new_fake(mode, (2, 3), torch.bfloat16, "cpu", (1, 2)),
            compat.new_fake(mode, (1 << 40, 4), torch.int64, torch.device("cpu")),
        )
    assert not seen.ops
    with mode:
        assert (
            compat.fake_metadata(x)
            == ((2, 3), torch.bfloat16, torch.device("cpu"), (1, 2))
            == compat.fake_metadata(torch.empty(3, 2, dtype=torch.bfloat16).t())
        )
        assert compat.fake_metadata(y) == compat.fake_metadata(torch.empty(1 << 40, 4, dtype=torch.int64))
        assert x.fake_mode is mode and (x + 1).fake_mode is mode
        before = y._version
        x.add_(1)
        assert y._version == before and x._version == 1
        assert [compat.fake_metadata(z) for z in (torch.tensor(2), torch.empty(2, dtype=torch.complex64).conj())] == [
            None,
            None,
        ]
    assert compat.fake_metadata(torch.ones(2)) is None


def test_nodes_of_a_graph_compare_by_position():
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [x, *(graph.call_function(aten.neg.default, (x,)) for _ in range(3))]
    with graph.inserting_before(nodes[2]):
        first = graph.call_function(aten.abs.default, (x,))
        second = graph.call_function(aten.abs.default, (x,))
    nodes[3].append(nodes[1])
    assert sorted({*nodes, second, first}) == [*graph.nodes] == [x, first, second, nodes[2], nodes[3], nodes[1]]


def test_products_in_8_bits_are_there():
    """On CUDA as fake tensors of it see them: the first operand lies row by row, the second column by column, dims are
    multiples of 16, scales of rows are columns and rows. On a CPU the same operator gives the values."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    with compat.FakeTensorMode() as mode:

        def fake(*shape, dtype=torch.float32, stride=None):
            return compat.new_fake(mode, shape, dtype, "cuda", stride)

        a, b = fake(32, 48, dtype=e4m3), fake(48, 64, dtype=e4m3, stride=(1, 48))
        for scales in ((fake(), fake()), (fake(32, 1), fake(1, 64))):
            out = compat.scaled_mm(a, b, *scales, torch.bfloat16, True)
            assert out.shape == (32, 64) and out.dtype is torch.bfloat16 and out.is_contiguous()
        for first, second in (
            (a, fake(48, 64, dtype=e4m3)),
            (fake(32, 48, dtype=e4m3, stride=(1, 32)), b),
            (fake(32, 40, dtype=e4m3), fake(40, 64, dtype=e4m3, stride=(1, 40))),
        ):
            with pytest.raises(RuntimeError), compat.quiet_fake_tensors():
                compat.scaled_mm(first, second, fake(), fake(), torch.bfloat16, False)
    x, y = torch.randn(32, 48).to(e5m2), torch.randn(64, 48).to(e4m3).t()
    out = compat.scaled_mm(x, y, torch.tensor(2.0), torch.tensor(0.5), torch.float32, False)
    torch.testing.assert_close(out, x.float() @ y.float())


def test_asking_a_fake_tensor_for_its_value_raises_what_we_catch():
    with compat.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(compat.DATA_DEPENDENT):
            x.sum().item()
        with pytest.raises(compat.DATA_DEPENDENT):
            bool(x[0] > 0)
        with pytest.raises(compat.DATA_DEPENDENT):
            x.nonzero()


class Seen(compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_every_operation_below_autograd():
    with Seen() as seen:
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad((x * 2).sum(), [x])
    assert aten.mul.Tensor in seen.ops and aten.sum.default in seen.ops and aten.expand.default in seen.ops
    assert seen.ops.count(aten.mul.Tensor) == 2  # forward and backward


def test_no_modes_leaves_all_of_them_and_comes_back():
    with Seen() as seen, compat.FakeTensorMode():
        with compat.no_modes():
            assert not isinstance(torch.ones(2) + 1, compat.FakeTensor)
        before = list(seen.ops)
        assert isinstance(torch.ones(2), compat.FakeTensor)
    assert aten.add.Tensor not in before


def test_modes_and_hooks_around_the_caller():
    class Own(torch.overrides.TorchFunctionMode):
        pass

    before = len(compat.function_modes()), len(compat.dispatch_modes()), compat.saved_tensor_hooks()
    with Own() as own, Seen() as seen, torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.abs):
        assert (
            compat.function_modes()[-1] is own
            and compat.dispatch_modes()[-1] is seen
            and compat.saved_tensor_hooks() == (torch.neg, torch.abs)
        )
    assert before == (len(compat.function_modes()), len(compat.dispatch_modes()), compat.saved_tensor_hooks())
    handle = torch.nn.modules.module.register_module_forward_hook(print)
    assert any(print in hooks for hooks in compat.module_hooks())
    handle.remove()
    assert not any(compat.module_hooks())


def test_functorch_is_noticed():
    seen = []

    def fn(x):
        seen.append(compat.functorch_active())
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    torch.func.vmap(fn)(torch.ones(2, 2))
    fn(torch.ones(2))
    assert seen == [True, True, False]
    assert not compat.functorch_active()


def joint_graph() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """out = sin(w^T-view matmul x); the gradient of w reads sin's input and the view."""
    graph, made = fx.Graph(), {}

    def emit(name, target, *args):
        node = graph.placeholder(name) if target is None else graph.call_function(target, args)
        made[name] = node
        node.meta["val"] = VALUES[name]
        return node

    VALUES = {
        n: torch.empty(8, 8, device="meta")
        for n in ("primals_1", "primals_2", "tangents_1", "view", "mm", "sin", "cos", "d_mm", "back", "grad", "d_x")
    }
    w, x, t = emit("primals_1", None), emit("primals_2", None), emit("tangents_1", None)
    view = emit("view", aten.t.default, w)
    mm = emit("mm", aten.mm.default, x, view)
    sin = emit("sin", aten.sin.default, mm)
    cos = emit("cos", aten.cos.default, mm)
    d_mm = emit("d_mm", aten.mul.Tensor, t, cos)
    back = emit("back", aten.t.default, d_mm)
    grad = emit("grad", aten.mm.default, back, x)
    d_x = emit("d_x", aten.mm.default, d_mm, view)
    graph.output((sin, grad, d_x))
    return fx.GraphModule({}, graph), made


def test_min_cut_saves_the_product_and_never_what_is_to_be_recomputed():
    module, made = joint_graph()
    saved = compat.min_cut(module, 1, set())
    assert made["mm"].name in saved or made["cos"].name in saved  # no matrix product is repeated
    module, made = joint_graph()
    saved = compat.min_cut(module, 1, {made["view"]})
    assert made["view"].name not in saved
    assert saved <= {n.name for n in module.graph.nodes}


@pytest.mark.full(keep=["False"])
@pytest.mark.parametrize("fakes", [True, False])
def test_inductor_compiles_a_graph_without_guards(fakes, monkeypatch):
    """Of fake tensors, or, in releases that take none, of real ones."""
    if not fakes:
        unpatched = torch._inductor.standalone_compile
        monkeypatch.setattr(
            torch._inductor,
            "standalone_compile",
            lambda graph, inputs, *, dynamic_shapes: unpatched(graph, inputs, dynamic_shapes=dynamic_shapes),
        )
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    example = torch.ones(64, 64)
    for node in (x, y):
        node.meta["val"] = example
    z = graph.call_function(aten.add.Tensor, (x, y))
    w = graph.call_function(aten.sin.default, (z,))
    written = graph.call_function(aten.copy_.default, (x, w))
    for node in (z, w, written):
        node.meta["val"] = example
    graph.output((w,))
    place = (64, 64), (64, 1), torch.float32
    compiled, threads = torch._inductor.standalone_compile, []

    def seen(*given, **options):
        threads.append(torch._inductor.config.compile_threads)
        return compiled(*given, **options)

    seen.__signature__ = inspect.signature(compiled)
    monkeypatch.setattr(torch._inductor, "standalone_compile", seen)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    run = compat.inductor_compile(fx.GraphModule({}, graph), [place, place], torch.device("cpu"), cores=3)
    assert threads == [3]  # Inductor's pool of processes is made by it
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    want = (a + b).sin()
    (got,) = run(a, b)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(a, want)  # an input that the graph writes is written in place


def test_native_bf16_is_a_fact_of_the_device():
    assert compat.native_bf16(torch.device("cpu")) in (True, False)
    assert compat.native_bf16(torch.device("cuda")) is True


def test_operators_are_known():
    assert (
        compat.is_operator(aten.add.Tensor)
        and not compat.is_operator(operator.getitem)
        and not compat.is_operator(torch.add)
    )


def run_store(rank_key: str) -> tuple[int, bytes]:
    mesh = fz.make_mesh(data=-1)
    store = compat.default_store()
    assert isinstance(store, dist.Store)
    count = store.add("counted", 1)
    store.set(f"{rank_key}{mesh.rank}", str(mesh.rank))
    store.wait([f"{rank_key}{1 - mesh.rank}"])
    return count, store.get(f"{rank_key}{1 - mesh.rank}")


def test_the_store_is_shared_by_the_ranks(run_ranks):
    results = run_ranks(2, run_store, "note")
    assert sorted(count for count, _ in results) == [1, 2]
    assert [text for _, text in results] == [b"1", b"0"]


def test_views_are_known():
    assert (
        compat.is_view(aten.view.default)
        and compat.is_view(aten.t.default)
        and compat.is_view(aten.select.int)
        and compat.is_view(aten.expand.default)
    )
    assert (
        not compat.is_view(aten.add.Tensor)
        and not compat.is_view(aten.clone.default)
        and not compat.is_view(operator.getitem)
    )


def run_collectives() -> list[torch.Tensor]:
    """Gathers and reductions whose names moved between releases, each as one work, and several as one."""
    mesh = fz.make_mesh(data=-1)
    group, rank, size = mesh.group("data"), mesh.rank, mesh.size
    gathered, flags = torch.empty(2 * size), torch.empty(size, dtype=torch.bool)
    reduced, halves = torch.empty(2), torch.empty(2, dtype=torch.bfloat16)
    compat.all_gather(gathered, torch.full((2,), float(rank)), group).wait()
    compat.all_gather(flags, torch.full((1,), rank == 0), group).wait()
    wholes, halves_whole = torch.arange(2.0 * size) + rank, torch.ones(2 * size, dtype=torch.bfloat16)
    compat.reduce_scatter(reduced, wholes, dist.ReduceOp.SUM, group).wait()
    compat.reduce_scatter(halves, halves_whole, dist.ReduceOp.SUM, group).wait()
    for together in (True, False):  # the process group's own methods, and what there is besides
        with pytest.MonkeyPatch.context() as patch:
            if not together:
                patch.setattr(compat, "_method", lambda *args: None)
            again, flags_again = torch.empty_like(gathered), torch.empty_like(flags)
            shards = [torch.full((2,), float(rank)), torch.full((1,), rank == 0)]
            works = compat.all_gather_together([again, flags_again], shards, group)
            sums, others = [torch.empty(2), torch.empty(2)], [wholes, 2 * wholes]
            works += compat.reduce_scatter_together(sums, others, dist.ReduceOp.SUM, group)
            flats = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.full((1,), rank + 0.5)]
            works += (reductions := compat.all_reduce_together(flats, dist.ReduceOp.MAX, group))
            for work in works:
                work.wait()
            assert len(works) == (4 if together else 7) and len(reductions) == (2 if together else 3)
            assert torch.equal(again, gathered) and torch.equal(flags_again, flags)
            assert torch.equal(sums[0], reduced) and torch.equal(sums[1], 2 * reduced)
            assert flats[0].eq(1).all() and flats[1].eq(1).all() and flats[2].item() == size - 0.5
    check_mixed_dtypes(mesh)
    return [gathered, flags, reduced, halves]


class OneDtype:
    """A process group that refuses a coalesced call of tensors of several dtypes, as NCCL may, and counts the calls."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.calls = group, list[str]()

    def __getattr__(self, name: str) -> Any:
        def start(*args: Any) -> Any:
            dtypes = {x.dtype for some in args if isinstance(some, list) for x in some}
            assert len(dtypes) == 1, f"{name} of {dtypes}"
            self.calls.append(name)
            return method(*args)

        method = getattr(self._group, name)
        return start if name.endswith("_coalesced") else method


def check_mixed_dtypes(mesh: fz.Mesh) -> None:
    """A block's parameters and gradients in several dtypes, one call of the transport each: to the bits of each alone,
    by coalesced calls of one dtype, in the same order on every rank."""
    real, rank, size = mesh.group("data"), mesh.rank, mesh.size
    group: Any = OneDtype(real)
    generator = torch.Generator().manual_seed(rank)
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.uint8, torch.float32]
    shards = [(8 * torch.rand(3 + i, generator=generator)).to(dtype) for i, dtype in enumerate(dtypes)]
    wholes, alone = ([torch.empty(size * len(x), dtype=x.dtype) for x in shards] for _ in range(2))
    works = compat.all_gather_together(wholes, shards, group)
    works += [compat.all_gather(whole, shard, real) for whole, shard in zip(alone, shards, strict=True)]
    for work in works:
        work.wait()
    assert len(group.calls) == 1 and all(map(torch.equal, wholes, alone))
    assert all(x.isfinite().all() and x.any() for x in wholes)

    grads = [x for x in wholes if x.is_floating_point()]
    scattered, alone = ([torch.empty(len(x) // size, dtype=x.dtype) for x in grads] for _ in range(2))
    works = compat.reduce_scatter_together(scattered, grads, dist.ReduceOp.SUM, group)
    assert len(works) == 2
    works += [compat.reduce_scatter(one, x, dist.ReduceOp.SUM, real) for one, x in zip(alone, grads, strict=True)]
    for work in works:
        work.wait()
    assert len(group.calls) == 3 and all(map(torch.equal, scattered, alone))

    sums, alone = ([x.clone() for x in grads] for _ in range(2))
    works = compat.all_reduce_together(sums, dist.ReduceOp.SUM, group)
    assert len(works) == 2
    works += [dist.all_reduce(x, group=real, async_op=True) for x in alone]
    for work in works:
        work.wait()
    assert len(group.calls) == 5 and all(map(torch.equal, sums, alone))


def test_operations_on_lists_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._foreach_copy_`, `_foreach_add_`, `_foreach_zero_`: of any dtypes, shapes and strides, with the bits of
    the operations one by one."""
    for public in (False, True):
        for name in ("_COPY", "_ADD", "_ZERO") if public else ():
            assert getattr(compat, name) is not None
            monkeypatch.setattr(compat, name, None)
        sources = [torch.randn(3, 4), torch.randn(5), torch.randn(4, 3).t(), torch.randn(()), torch.empty(0)]
        dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float64]
        targets = [torch.full_like(x, 7, dtype=dtype) for x, dtype in zip(sources, dtypes, strict=True)]
        compat.copy_all(targets, sources)
        assert all(torch.equal(t, x.to(t.dtype)) for t, x in zip(targets, sources, strict=True))
        parts = [torch.randn_like(t) for t in targets]
        want = [t + x for t, x in zip(targets, parts, strict=True)]
        compat.add_all(targets, parts)
        assert all(map(torch.equal, targets, want))
        compat.zero_all(targets)
        assert not any(t.any() for t in targets)
        for function in (compat.copy_all, compat.add_all):
            function([], [])
            one = torch.ones(2)
            function([one], [torch.zeros(2)])
        compat.zero_all([])
        compat.zero_all([one := torch.ones(2)])
        assert not one.any()


def test_collectives_on_gloo(run_ranks):
    size = 3
    for rank, (gathered, flags, reduced, halves) in enumerate(run_ranks(size, run_collectives)):
        assert torch.equal(gathered, torch.arange(float(size)).repeat_interleave(2))
        assert torch.equal(flags, torch.arange(size) == 0)
        assert torch.equal(reduced, (torch.arange(2.0 * size) * size + size * (size - 1) / 2).chunk(size)[rank])
        assert torch.equal(halves, torch.full((2,), float(size), dtype=torch.bfloat16))


def test_a_failing_fake_operation_is_quiet(caplog):
    with compat.FakeTensorMode(), compat.quiet_fake_tensors(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(4, 5)
    assert not caplog.records


def test_sums_in_order_leave_the_setting_as_it_was() -> None:
    """`torch._C._set_deterministic_algorithms` makes `index_put(accumulate=True)` on the CPU one thread's, and does not
    import Inductor."""
    with compat.in_order():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_inductor_measures_nothing_where_deterministic_algorithms_are_asked_for():
    """`deterministic` is a setting of Inductor's, and PyTorch's switch is asked where sums at indices are lowered."""
    import torch._inductor.config as config

    assert config.deterministic is False
    texts = []
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            assert compat._deterministic() == {"deterministic": on}
            x, i = torch.ones(8, 8), torch.zeros(4, dtype=torch.int64)
            graph = fx.symbolic_trace(lambda x, i, y: (aten.index_put.default(x, [i], y, True),))
            texts.append(compat.inductor_lower(graph, [x, i, torch.ones(4, 8)], trust_cpu=True).text)
        finally:
            torch.use_deterministic_algorithms(False)
    assert ["aten.index_put_" in text for text in texts] == [False, True]
    assert compat.fills_uninitialized_memory()


def test_functionalized_keeps_operators_and_values():
    """Operations that overwrite are replaced, no other is taken apart, and what is given keeps its values."""
    seen = []

    class Seen(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def fn(x, y):
        x.view(-1)[1:].add_(1)
        return [torch.ops.aten.binary_cross_entropy_with_logits.default(x, y), x]

    x, y = torch.zeros(2, 2), torch.ones(2, 2)
    with torch.no_grad(), Seen():
        _, new = compat.functionalized(fn, [x, y])
    assert torch.equal(x, torch.zeros(2, 2)) and new.tolist() == [[0, 1], [1, 1]]
    assert torch.ops.aten.binary_cross_entropy_with_logits.default in seen and not any(
        f._schema.is_mutable for f in seen
    )


def test_the_autograd_node_that_runs_is_known_by_its_number():
    class Numbers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(compat.backward_of())
            return x * 2

        @staticmethod
        def backward(ctx, *grads):
            found.append(compat.backward_of())
            return grads[0]

    found: list[int | None] = []
    x = torch.ones(2, requires_grad=True)
    number = compat.next_autograd_node()
    Numbers.apply(x).sum().backward()
    assert found == [None, number]


def test_switches_read_the_short_way_are_those_of_pytorch(monkeypatch) -> None:
    """The default device, wherever it was set, and the settings of opt_einsum, set or not."""
    assert compat.default_device() == str(torch.get_default_device()) == "cpu" and compat.function_modes() == []
    with torch.device("meta"):
        assert compat.default_device() == str(torch.get_default_device()) == "meta"
        assert len(compat.function_modes()) == 1
        with torch.device("cuda:9"):
            assert compat.default_device() == "cuda:9"
        with torch.device("cuda"):
            assert compat.default_device().startswith("cuda")
    try:
        torch.set_default_device("meta")
        assert compat.default_device() == "meta"
    finally:
        torch.set_default_device(None)
    einsum: Any = torch.backends.opt_einsum
    assert compat.einsum_paths() == (einsum.enabled, einsum.strategy)
    monkeypatch.setattr(einsum.m, "strategy", "greedy")
    monkeypatch.setattr(einsum.m, "enabled", True)
    assert compat.einsum_paths() == (einsum.enabled, einsum.strategy) == (True, "greedy")
    monkeypatch.setitem(vars(einsum), "enabled", False)
    assert compat.einsum_paths() == (einsum.enabled, einsum.strategy) == (False, "greedy")
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any(compat.module_hooks())
    hook.remove()
    assert not any(compat.module_hooks())


def test_what_is_recorded_has_no_repetitions() -> None:
    """As PyTorch finds them, who would import all of Inductor for that before min-cut: of a block's forward and its
    backward together too."""
    from torch._functorch.compile_utils import fx_graph_cse

    @fz.block
    def layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ p) * (x @ p).sum(0, keepdim=True) + x[:, :1] * x[:, :1]
        return torch.cat([h, x]).max(0).values + torch.cat([h, x]).max(0).values + torch.nn.functional.gelu(h)

    step = fz.train_step(lambda p, x: layer(p, layer(p, x)).square().mean(), fz.optim.sgd(0.1))
    program = fz.lower(step, fz.AbstractMesh(data=1), torch.ones(4, 4), torch.ones(2, 4)).program
    joints = [op.block.joint.graph.graph for op, _ in program.walk() if op.block is not None]
    assert joints
    for graph in joints:
        assert len(fx_graph_cse(graph).nodes) == len(graph.nodes)


def test_flex_attention_calls_its_operator_for_fake_tensors():
    """A function mode sees the call, with its functions, and PyTorch's own call for other tensors is as before."""
    seen: list[Any] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not compat.FLEX_ATTENTION:
                return func(*args, **(kwargs or {}))
            seen.append(args)
            return args[0], args[0].sum(-1), args[0].sum(-1)

    with compat.FakeTensorMode(), compat.flex_attention_on_fakes():
        q = torch.ones(1, 2, 16, 8, requires_grad=True)
        with Calls():
            assert flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s) is q
    query, _, _, score_mod, block_mask, scale = seen[0][:6]
    assert query is q and score_mod(1, 2, 3, 4, 5) == 1 and callable(block_mask[-1])
    assert scale == pytest.approx(8**-0.5)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        real = torch.ones(1, 2, 16, 8, requires_grad=True)
        flex_attention(real, real, real)


def test_a_score_function_reads_a_tensor_at_the_indices_of_a_score():
    scores, table = torch.randn(2, 3, 4, 4), torch.randn(3, 8, requires_grad=True)
    out = compat.modified_scores(lambda s, b, h, i, j: s * (b + 1) + table[h, i - j + 4], scores)
    at = torch.arange(4)[:, None] - torch.arange(4) + 4
    torch.testing.assert_close(out, scores * torch.tensor([1, 2]).view(2, 1, 1, 1) + table[:, at])
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert gradient.sum() == out.numel()
