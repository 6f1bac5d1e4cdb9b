"""What a block reads beside its arguments is part of what it is: a call under other settings is another function, a
call under the same is not."""

from __future__ import annotations

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero import optim
from fzero.runtime import read_values
from fzero.trace.guards.captured_settings import changes, settings

scale = 1.0
options = {"by": [1.0]}
variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
Set = Callable[[float], None]
Run = Callable[[Any, torch.Tensor], torch.Tensor]


def put(owner: Any, name: str) -> Set:
    return lambda value: setattr(owner, name, value)


def of_global() -> tuple[Run, Set]:
    def set_global(value: float) -> None:
        global scale
        scale = value

    return lambda p, x: x @ p["w"] * scale, set_global


def of_global_dict() -> tuple[Run, Set]:
    return lambda p, x: x @ p["w"] * options["by"][0], lambda value: options.update(by=[value])


def helper(x: torch.Tensor) -> torch.Tensor:
    return inner_helper(x)


def inner_helper(x: torch.Tensor) -> torch.Tensor:
    return x * scale


def of_helper() -> tuple[Run, Set]:
    return lambda p, x: helper(x @ p["w"]), of_global()[1]


class Layer:
    by = 1.0

    def __call__(self, p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p["w"] * self.by

    def method(self, p: Any, x: torch.Tensor) -> torch.Tensor:
        return self._inner(p, x)

    def _inner(self, p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p["w"] * getattr(self, "by")  # noqa: B009  # a name that code puts together

    @property
    def doubled(self) -> float:
        return 2 * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0


@dataclasses.dataclass
class Config:
    by: float = 1.0


@dataclasses.dataclass(eq=False)
class Nested:
    inner: Config = dataclasses.field(default_factory=Config)


@dataclasses.dataclass(eq=False)
class Record:
    """Nothing but code that reads it names what it holds."""

    by: float = 1.0


class Mode(enum.Enum):
    ONE = 1.0
    OTHER = 2.0


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w * self.by


def of_object() -> tuple[Run, Set]:
    layer = Layer()
    return layer, put(layer, "by")


def of_method() -> tuple[Run, Set]:
    layer = Layer()
    return layer.method, put(layer, "by")


def of_property() -> tuple[Run, Set]:
    layer = Layer()
    return lambda p, x: x @ p["w"] * layer.doubled, put(layer, "by")


def of_namespace() -> tuple[Run, Set]:
    config = types.SimpleNamespace(by=1.0)
    return lambda p, x: x @ p["w"] * config.by, put(config, "by")


def of_parsed() -> tuple[Run, Set]:
    config = argparse.Namespace(by=1.0)
    return lambda p, x: x @ p["w"] * config.by, put(config, "by")


def of_dataclass() -> tuple[Run, Set]:
    config = Config()
    return lambda p, x: x @ p["w"] * config.by, put(config, "by")


def of_nested() -> tuple[Run, Set]:
    config = Nested()
    return lambda p, x: x @ p["w"] * config.inner.by, put(config.inner, "by")


def of_slots() -> tuple[Run, Set]:
    config = Slotted()
    return lambda p, x: x @ p["w"] * config.by, put(config, "by")


def of_class() -> tuple[Run, Set]:
    class Own(Layer):
        by = 1.0

    return lambda p, x: x @ p["w"] * Own.by, put(Own, "by")


def of_class_of_object() -> tuple[Run, Set]:
    class Own(Layer):
        by = 1.0

    return Own(), put(Own, "by")


def of_argument() -> tuple[Run, Set]:
    layer = Layer()
    run = fz.block(lambda p, x, layer: x @ p["w"] * layer.by)
    return lambda p, x: run(p, x, layer), put(layer, "by")


def of_partial() -> tuple[Run, Set]:
    layer = Layer()
    return functools.partial(lambda layer, p, x: x @ p["w"] * layer.by, layer), put(layer, "by")


def of_environment() -> tuple[Run, Set]:
    return lambda p, x: x @ p["w"] * float(os.environ["FZERO_TEST_BY"]), lambda value: os.environ.update(
        FZERO_TEST_BY=str(value)
    )


def of_getenv() -> tuple[Run, Set]:
    return lambda p, x: x @ p["w"] * float(os.getenv("FZERO_TEST_BY", "1")), of_environment()[1]


def of_module() -> tuple[Run, Set]:
    module = types.ModuleType("fzero_test_settings")
    sys.modules[module.__name__] = module
    return lambda p, x: x @ p["w"] * module.by, put(module, "by")


def of_import() -> tuple[Run, Set]:
    set_module = of_module()[1]

    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        import fzero_test_settings  # pyright: ignore[reportMissingImports]

        return x @ p["w"] * fzero_test_settings.by

    return run, set_module


def of_nn_module() -> tuple[Run, Set]:
    module = Module()
    return lambda p, x: module(p["w"], x), put(module, "by")


def of_training() -> tuple[Run, Set]:
    module = Module()
    return (
        lambda p, x: x @ p["w"] * (2.0 if module.drop.training else 1.0),
        lambda value: module.train(value == 1.0) and None,
    )


def of_attribute_of_function() -> tuple[Run, Set]:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ p["w"] * run.by  # pyright: ignore[reportFunctionMemberAccess]

    return run, put(run, "by")


def of_context() -> tuple[Run, Set]:
    return lambda p, x: x @ p["w"] * variable.get(), lambda value: variable.set(value) and None


def of_array() -> tuple[Run, Set]:
    array = np.ones(3)
    return lambda p, x: x @ p["w"] * float(array[1]), lambda value: array.fill(value)


def of_long_list() -> tuple[Run, Set]:
    table = [1.0] * 1000
    return lambda p, x: x @ p["w"] * table[-1], lambda value: table.__setitem__(-1, value)


def of_enum() -> tuple[Run, Set]:
    config = types.SimpleNamespace(mode=Mode.ONE)
    return lambda p, x: x @ p["w"] * config.mode.value, lambda value: put(config, "mode")(
        Mode.ONE if value == 1.0 else Mode.OTHER
    )


def of_sign_of_zero() -> tuple[Run, Set]:
    config = types.SimpleNamespace(zero=0.0)
    return lambda p, x: x @ p["w"] * (1.0 if str(config.zero) == "0.0" else 2.0), lambda value: put(config, "zero")(
        0.0 if value == 1.0 else -0.0
    )


def of_set_of_tuples() -> tuple[Run, Set]:
    chosen = {("by", 1.0)}
    return lambda p, x: x @ p["w"] * next(iter(chosen))[1], lambda value: chosen.clear() or chosen.add(("by", value))


def of_user_list() -> tuple[Run, Set]:
    table = collections.UserList([1.0])
    return lambda p, x: x @ p["w"] * table[0], lambda value: table.__setitem__(0, value)


def of_own_mapping() -> tuple[Run, Set]:
    class Table(collections.UserDict):
        pass

    table = Table(by=1.0)
    return lambda p, x: x @ p["w"] * table["by"], lambda value: table.update(by=value)


def of_view() -> tuple[Run, Set]:
    table = {"by": 1.0}
    view = table.values()
    return lambda p, x: x @ p["w"] * sum(view), lambda value: table.update(by=value)


def of_global_by_text() -> tuple[Run, Set]:
    return lambda p, x: x @ p["w"] * globals()["scale"], of_global()[1]


def of_module_by_text() -> tuple[Run, Set]:
    set_module = of_module()[1]
    return lambda p, x: x @ p["w"] * sys.modules["fzero_test_settings"].by, set_module


def of_default() -> tuple[Run, Set]:
    config = Slotted()
    return lambda p, x: x @ p["w"] * getattr(config, "by", 1.0), put(config, "by")


def of_vars() -> tuple[Run, Set]:
    record = Record()
    return lambda p, x: x @ p["w"] * vars(record)["by"], put(record, "by")


def of_dict() -> tuple[Run, Set]:
    record = Record()
    return lambda p, x: x @ p["w"] * record.__dict__["by"], put(record, "by")


def times(x: torch.Tensor, **factors: float) -> torch.Tensor:
    return x * sum(factors.values())


def of_all_fields() -> tuple[Run, Set]:
    record = Record()
    return lambda p, x: times(x @ p["w"], **dataclasses.asdict(record)), put(record, "by")


def of_whole_namespace() -> tuple[Run, Set]:
    config = argparse.Namespace(by=1.0)
    return lambda p, x: times(x @ p["w"], **vars(config)), put(config, "by")


def of_attrgetter() -> tuple[Run, Set]:
    config, get = types.SimpleNamespace(inner=Config()), operator.attrgetter("inner.by")
    return lambda p, x: x @ p["w"] * get(config), put(config.inner, "by")


def of_methodcaller() -> tuple[Run, Set]:
    class Own:
        def factor(self, times: float) -> float:
            return self._factor * times  # pyright: ignore[reportAttributeAccessIssue]

    config, call = Own(), operator.methodcaller("factor", times=1.0)
    put(config, "_factor")(1.0)
    return lambda p, x: x @ p["w"] * call(config), put(config, "_factor")


def of_large_array() -> tuple[Run, Set]:
    array = np.ones(20_000)
    return lambda p, x: x @ p["w"] * float(array[1]), lambda value: array.fill(value)


def of_number() -> tuple[Run, Set]:
    class Number(float):
        by = 1.0

    number = Number(1.0)
    return lambda p, x: x @ p["w"] * number.by, put(number, "by")


def of_metaclass() -> tuple[Run, Set]:
    class Meta(type):
        @property
        def by(cls) -> float:
            return cls._by  # pyright: ignore[reportAttributeAccessIssue]

    class Own(metaclass=Meta):
        _by = 1.0

    return lambda p, x: x @ p["w"] * Own.by, put(Own, "_by")


def of_body_of_class() -> tuple[Run, Set]:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        class Inner:
            by = scale

        return x @ p["w"] * Inner.by

    return run, of_global()[1]


def of_base_in_library() -> tuple[Run, Set]:
    """A class of the user's whose base, which is not looked into, reads its attributes."""
    library = types.ModuleType("fzero_test_library")
    library.__file__ = os.path.join(os.sep, "site-packages", "fzero_test_library.py")
    sys.modules[library.__name__] = library
    exec("class Base:\n    def factor(self): return self.by", vars(library))

    class Own(library.Base):
        by = 1.0

    config = Own()
    put(config, "by")(1.0)
    return lambda p, x: x @ p["w"] * config.factor(), put(config, "by")


def of_hook_of_all_modules() -> tuple[Run, Set]:
    layer, hooks = torch.nn.Identity(), []

    def set_hook(value: float) -> None:
        while hooks:
            hooks.pop().remove()
        if value != 1.0:
            hooks.append(torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out * value))

    return lambda p, x: layer(x @ p["w"]), set_hook


WAYS = {name: way for name, way in globals().items() if name.startswith("of_")}
PARAMS, BATCH = {"w": torch.arange(9.0).view(3, 3) / 10}, torch.ones(2, 3)
MESH = fz.AbstractMesh(data=1)


def numbers(step: Any) -> tuple[float, float]:
    plain = step(step.init(PARAMS), BATCH)[1]["loss"]
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    return float(plain), float(train(train.init(PARAMS), BATCH)[1]["loss"])


@pytest.mark.full(keep=["of_attrgetter", "of_default", "of_large_array"])
@pytest.mark.parametrize("name", WAYS)
def test_a_setting_that_changes_between_two_calls_is_another_function(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FZERO_TEST_BY", "1.0")
    fn, put_value = WAYS[name]()
    run = fn if name == "of_argument" else fz.block(fn)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for by in (1.0, 4.0, 1.0):
            put_value(by)
            total = total + run(p, x).square().mean()
        return total

    plain, compiled = numbers(fz.train_step(loss, optim.sgd(0.1)))
    assert compiled == plain
    plain_once, _ = numbers(fz.train_step(lambda p, x: run(p, x).square().mean(), optim.sgd(0.1)))
    assert plain != 3 * plain_once  # the setting does something


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("of_argument", "of_hook_of_all_modules")])
def test_a_setting_that_changes_between_two_steps_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the look that takes values for equal when in doubt."""
    monkeypatch.setenv("FZERO_TEST_BY", "1.0")
    run, put_value = WAYS[name]()
    put_value(1.0)
    before = settings(run, strict=False)
    assert changes(before, settings(run, strict=False)) == []
    put_value(4.0)
    assert len(changes(before, settings(run, strict=False))) == 1
    put_value(1.0)


@pytest.mark.parametrize("name", [name for name in WAYS if name != "of_argument"])
def test_a_setting_that_changes_before_the_state_is_gathered_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tracing the step again, which needs no list of the kinds of settings."""
    monkeypatch.setenv("FZERO_TEST_BY", "1.0")
    run, put_value = WAYS[name]()
    put_value(1.0)
    step = fz.train_step(lambda p, x: run(p, x).square().mean(), optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(PARAMS), BATCH)
    train.gather(state)
    state, _ = train(state, BATCH)
    put_value(4.0)
    try:
        with pytest.raises(
            fz.errors.FzeroValueError,
            match=r"(?s)fzero.gather: .* computes something different than when it was traced\n.*"
            r"before: .*\n *now: .*Fix: pass what changes",
        ):
            train.gather(state)
    finally:
        put_value(1.0)
    train.gather(state)


class Doubled(TorchFunctionMode):
    def __init__(self, by: float = 2.0):
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.by if func is torch.Tensor.tanh else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DoubledBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.ops.aten.tanh.default, torch.ops.aten.mm.default) else result


def doubling_hooks() -> Any:
    return saved_tensors_hooks(lambda x: x * 2, lambda x: x)


@fz.block
def tanh(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"]).tanh()


def test_a_mode_around_a_block_is_part_of_what_it_is() -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        total = tanh(p, x).square().mean()
        for by in (2.0, 3.0, 2.0):
            with Doubled(by):
                total = total + tanh(p, x).square().mean()
        return total

    plain, compiled = numbers(fz.train_step(loss, optim.sgd(0.1)))
    assert compiled == plain


@pytest.mark.parametrize("around", [Watching, doubling_hooks])
def test_what_a_block_would_not_see_is_refused(around: Callable[[], Any]) -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with around():
            return tanh(p, x).mean()

    with pytest.raises(
        fz.errors.TraceError,
        match=r"(?s)block tanh: is called under a mode.*(Watching|saved_tensors_hooks).*Fix: enter it inside the block",
    ):
        functions(loss, PARAMS)


def test_modes_that_change_nothing_are_no_error() -> None:
    """One that looks on at a step, and what PyTorch itself does with saved tensors."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            x = tanh(p, x)
        return checkpoint(tanh, p, x, use_reentrant=False).mean()

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    state = train.init(PARAMS)
    with Watching():
        _, metrics = train(state, BATCH)
    assert metrics["loss"] == tanh(PARAMS, tanh(PARAMS, BATCH)).mean()


def test_a_dispatch_mode_around_a_step_sees_what_it_sees_in_pytorch_or_is_refused() -> None:
    step = fz.train_step(lambda p, x: tanh(p, tanh(p, x)).square().mean(), optim.sgd(0.1))
    for transform in (lambda step: step, fz.remat("full")):
        train = fz.compile(transform(step), fz.make_mesh(data=1), backend="eager")
        with DoubledBelow():
            (expected, metrics), (state, got) = step(step.init(PARAMS), BATCH), train(train.init(PARAMS), BATCH)
        assert got["loss"] == metrics["loss"] and torch.equal(state.params["w"], expected.params["w"])
    train = fz.compile(step, fz.make_mesh(data=1), backend="inductor")
    state = train.init(PARAMS)
    with (
        DoubledBelow(),
        pytest.raises(
            fz.errors.FzeroValueError, match=r"(?s)is called under a mode.*DoubledBelow\nFix: enter it.*backend='eager'"
        ),
    ):
        train(state, BATCH)


def test_autocast_around_some_steps() -> None:
    """Each step does what it does under the settings that it is called under; what a program cannot see is refused,
    whichever call it is around."""
    step = fz.train_step(lambda p, x: (x @ p["w"] @ p["w"]).square().mean(), optim.sgd(0.1))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    plain, state = step.init(PARAMS), train.init(PARAMS)
    for on in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            plain, expected = step(plain, BATCH)
            state, got = train(state, BATCH)
        assert got["loss"] == expected["loss"], on
    for around in (Doubled, doubling_hooks):
        with (
            around(),
            pytest.raises(
                fz.errors.FzeroValueError,
                match=r"(?s)called under a mode.*(Doubled|saved_tensors_hooks).*Fix: enter it in the function",
            ),
        ):
            train(state, BATCH)


def test_a_setting_that_changes_after_a_few_steps_is_told_at_once() -> None:
    config = Config()
    train = fz.compile(
        fz.train_step(lambda p, x: (x @ p["w"]).mean() * config.by, optim.sgd(0.1)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    state = train.init(PARAMS)
    for _ in range(4):
        state, _ = train(state, BATCH)
    config.by = 2.0
    with pytest.raises(fz.errors.FzeroValueError, match=r"config\.by: 1\.0 before, 2\.0 now"):
        train(state, BATCH)


def test_a_setting_that_changes_late_is_told_at_once_where_looking_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, clock = Config(), [0.0]

    def tick() -> float:
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr(read_values, "perf_counter", tick)
    train = fz.compile(
        fz.train_step(lambda p, x: (x @ p["w"]).mean() * config.by, optim.sgd(0.1)),
        fz.make_mesh(data=1),
        backend="eager",
    )
    state = train.init(PARAMS)
    for _ in range(20):
        state, _ = train(state, BATCH)
    config.by = 2.0
    state, _ = train(state, BATCH)  # a few ms after the last, as long as some looks
    clock[0] += 1.0
    with pytest.raises(fz.errors.FzeroValueError, match=r"config\.by: 1\.0 before, 2\.0 now"):
        train(state, BATCH)


def functions(loss: Callable[..., Any], params: Any) -> list[str]:
    return list(fz.lower(fz.train_step(loss, optim.sgd(0.1)), MESH, params, BATCH).program.functions)


def test_alike_calls_are_one_function_and_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are alike, made anew for each layer, attributes that differ and that no code names, one setting
    there and back."""
    from fzero.trace import block_calls as module

    traced: list[str] = []
    real = module.trace_joint
    monkeypatch.setattr(module, "trace_joint", lambda body, name, *args: traced.append(name) or real(body, name, *args))

    class Named(Layer):
        def __init__(self, index: int):
            self.name, self.config = f"layer {index}", types.SimpleNamespace(eps=1e-6, sizes=[1, 2])

        def __call__(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ p["w"]) * self.by + self.config.eps

    layers = [Named(i) for i in range(6)]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = x @ params[0]["w"]
        for layer, p in zip(layers, params, strict=True):
            x = fz.block(layer)(p, x)
            x = fz.block(lambda p, x: helper(x) * options["by"][0])(p, x)
        return x.mean()

    names = functions(loss, [PARAMS] * 6)
    assert len(traced) == 2, traced
    assert (
        sum(
            "glue" not in n
            and "_vjp" not in n
            and "grad" not in n
            and n not in ("update", "reduce")
            and "scalars" not in n
            for n in names
        )
        == 2
    ), names


def test_what_a_block_changes_itself() -> None:
    """A counter that decides nothing costs one trace more, however many calls there are; one that decides is refused,
    forward alone too."""

    class Counting(Layer):
        calls = 0

        def __call__(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(x @ p["w"]) * (1 if self.by else self.calls)

    def loss(layer: Layer) -> Callable[..., torch.Tensor]:
        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            for p in params:
                x = fz.block(layer)(p, x)
            return x.mean()

        return fn

    made = [functions(loss(Counting()), [PARAMS] * n) for n in (6, 12)]
    counting = Counting()
    functions(loss(counting), [PARAMS] * 12)
    # the first layer's input has no gradient
    assert len(made[0]) == len(made[1]) and counting.calls <= 8, (made, counting.calls)

    counting.by = 0.0
    with pytest.raises(
        fz.errors.TraceError, match=r"block Counting: computes (a different result|something different)"
    ):
        functions(loss(counting), [PARAMS] * 2)
    with pytest.raises(
        fz.errors.TraceError, match=r"block Counting: computes (a different result|something different)"
    ):
        fz.lower(fz.eval_step(loss(counting)), MESH, [PARAMS] * 2, (BATCH,))


def test_what_a_block_changes_and_the_loss_reads_is_refused_by_name() -> None:
    """A block runs while it is traced, once or twice and not at each call: what it counts is not what it would be. What
    it keeps for later is."""
    seen: list[int] = []
    count, kept = {"calls": 0}, {}

    @fz.block
    def grows(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return torch.tanh(x @ p["w"])

    @fz.block
    def raises(p: Any, x: torch.Tensor) -> torch.Tensor:
        count["calls"] += 1
        return torch.tanh(x @ p["w"])

    @fz.block
    def keeps(p: Any, x: torch.Tensor) -> torch.Tensor:
        kept.setdefault("rows", x.shape[0])
        return torch.tanh(x @ p["w"])

    def reads_list(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.clear()
        return grows(p, grows(p, x)).mean() * len(seen)

    def reads_number(p: Any, x: torch.Tensor) -> torch.Tensor:
        count["calls"] = 0
        return raises(p, raises(p, x)).mean() * count["calls"]

    def reads_kept(p: Any, x: torch.Tensor) -> torch.Tensor:
        return keeps(p, keeps(p, x)).mean() * kept["rows"]

    for loss, text in ((reads_list, r"seen: a list of \d before"), (reads_number, r"count\['calls'\]: \d before")):
        with pytest.raises(
            fz.errors.TraceError,
            match=rf"(?s)block \w+: changes values that are read outside of "
            rf"it.*test_block_settings.py:\d+.*{text}.*Fix: "
            rf"return it",
        ):
            functions(loss, PARAMS)
    plain, compiled = numbers(fz.train_step(reads_kept, optim.sgd(0.1)))
    assert compiled == plain
    log = lambda p, x: grows(p, grows(p, x)).mean()  # noqa: E731  # which nobody reads
    plain, compiled = numbers(fz.train_step(log, optim.sgd(0.1)))
    assert compiled == plain


SHARED: dict[str, Any] = {"rate": 0.5, "step": 0}


class Trainer:
    def __init__(self) -> None:
        self.config: dict[str, Any] = {"rate": 0.5, "step": 0}
        self.shared = SHARED

    def by_attribute(self) -> Any:
        return self.config["rate"]

    def by_another_name(self) -> Any:
        return SHARED["rate"], dict(self.shared)


def _alias() -> Any:
    config = SHARED
    return config["rate"]


def _given_away() -> Any:
    return max(SHARED["rate"], *map(SHARED.get, ["rate"]))


# by name: a function, and whether what else the dictionary or the environment holds may be part of what it reads
READERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "an item": (lambda: SHARED["rate"], False),
    "get": (lambda: SHARED.get("rate"), False),
    "get with a default": (lambda: SHARED.get("rate", 1) if "rate" in SHARED and "other" not in SHARED else 0, False),
    "in a function inside": (lambda: [(lambda: SHARED["rate"])() for _ in range(2)], False),
    "an attribute": (Trainer().by_attribute, False),
    "the environment": (
        lambda: (os.environ.get("FZERO_RATE"), os.getenv("FZERO_RATE", "1"), "FZERO_RATE" in os.environ),
        False,
    ),
    "an item of the environment": (lambda: os.environ["FZERO_RATE"], False),
    "under another name": (_alias, True),
    "a key that is put together": (lambda part="te": SHARED["ra" + part], True),
    "a key that is put together, by get": (lambda part="te": SHARED.get("ra" + part, 1), True),
    "a method that is given away": (_given_away, True),
    "all items": (lambda: sum(SHARED.values()), True),
    "the whole elsewhere": (Trainer().by_another_name, True),
    "all of the environment": (lambda: (os.environ.get("FZERO_RATE"), len(os.environ)), True),
    "a function of the environment that is given away": (lambda: list(map(os.getenv, ["FZERO_RATE"])), True),
}


@pytest.mark.parametrize("name", READERS)
def test_of_a_dictionary_what_code_names_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may write down beside it what it wants; and a value that is read is never missed, also one that comes and
    goes."""
    fn, whole = READERS[name]
    held = [SHARED, *(x.config for x in [getattr(fn, "__self__", None)] if x is not None)]

    def put(key: str, value: Any) -> None:
        monkeypatch.setenv(f"FZERO_{key.upper()}", str(value))
        for config in held:
            monkeypatch.setitem(config, key, value)

    put("rate", 0.5)
    before = settings(fn, strict=False)
    put("rate", 0.25)
    assert len(changes(before, settings(fn, strict=False))) == 1
    put("rate", 0.5)
    assert changes(before, settings(fn, strict=False)) == []
    put("unread", 1)
    assert bool(changes(before, settings(fn, strict=False))) == whole
    monkeypatch.delenv("FZERO_UNREAD")
    for config in held:
        monkeypatch.delitem(config, "unread")
        monkeypatch.delitem(config, "rate")
    monkeypatch.delenv("FZERO_RATE")
    assert len(changes(before, settings(fn, strict=False))) == 1


def test_what_settings_tell() -> None:
    """Where a value was found, and both values; nothing where nothing changed; in doubt equal unless strict."""
    config = types.SimpleNamespace(rates=[0.5, 1.0], unread=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * config.rates[1]

    before = settings(fn, strict=False)
    config.unread = 2
    assert changes(before, settings(fn, strict=False)) == []
    config.rates[1] = 2.0
    assert changes(before, settings(fn, strict=False)) == ["config.rates[1]: 1.0 before, 2.0 now"]
    config.rates = [0.5]
    assert changes(before, settings(fn, strict=False)) == ["config.rates: a list of 2 before, a list of 1 now"]

    def reads(values: Any) -> Any:
        return lambda: values

    for strict, same in ((True, False), (False, True)):
        assert (settings(reads(iter([1])), strict=strict) == settings(reads(iter([1])), strict=strict)) == same
        assert (settings(reads(torch.ones(2)), strict=strict) == settings(reads(torch.ones(2)), strict=strict)) == same
    loop: list[Any] = [1]
    loop.append(loop)
    assert settings(reads(loop)).facts
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ((1,), [1]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3})):
        assert settings(reads(one)).facts != settings(reads(other)).facts, (one, other)
    assert settings(reads(float("nan"))).facts == settings(reads(-float("nan"))).facts


def test_what_is_not_the_same_twice_is_refused() -> None:
    """A block that draws or counts in Python is refused where it is traced; what neither that nor its settings show,
    `check_equivalent` finds."""
    numbers_ = iter(range(1, 1000))
    run = fz.block(lambda p, x: x @ p["w"] * next(numbers_))
    with pytest.raises(
        fz.errors.TraceError,
        match=r"(?s)block lambda: computes a different result each time it is called.*test_block_settings.py:\d+.*Fix: "
        r"pass",
    ):
        numbers(fz.train_step(lambda p, x: run(p, x).mean(), optim.sgd(0.1)))

    left_out = iter([False, False, True] * 100)  # in the second recording
    skips = fz.block(lambda p, x: x if next(left_out) else x @ p["w"])
    with pytest.raises(fz.errors.TraceError, match="block lambda: computes a different result each time it is called"):
        numbers(fz.train_step(lambda p, x: skips(p, x).mean(), optim.sgd(0.1)))

    generator = torch.Generator()  # its seed is in no attribute
    seeded = fz.block(lambda p, x: x @ p["w"] * generator.initial_seed())

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for seed in (1, 2):
            generator.manual_seed(seed)
            total = total + seeded(p, x).mean()
        return total

    with pytest.raises(
        fz.errors.TraceError, match="block lambda: computes something different than at an earlier call"
    ):
        fz.testing.check_equivalent(fz.train_step(loss, optim.sgd(0.1)), PARAMS, BATCH, fz.make_mesh(data=1))
