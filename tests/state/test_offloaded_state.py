"""States whose leaves rest in host memory or on disk: which leaf goes where, how a state is born there, saved,
restored, gathered and moved, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS
from offloads import open_files
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero import optim
from fzero.checkpoint import reading, safetensors_format
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.state_layouts import opt_state_inputs
from fzero.errors import (
    BudgetError,
    CheckpointError,
    FzeroError,
    FzeroTypeError,
    FzeroValueError,
    TierError,
    TransformError,
)
from fzero.memory import disk
from fzero.sharding.layout import Layout, Leaf, extent_of, home_of, leaf_of
from fzero.state import tensor_init
from fzero.state import tensor_storage as storage
from fzero.state.state_comparison import placed_inputs
from fzero.transforms.offload import Offload, tiers_of

MESH = fz.AbstractMesh(data=1)


def init(key: torch.Tensor) -> Any:
    """Leaves that no number of ranks divides, one of zeros, one smaller than the mesh, one tied."""
    first, second, third = fz.random.split(key, 3)
    table = fz.random.normal(first, (31, 7))
    return {
        "table": table,
        "head": table,
        "w": fz.random.normal(second, (7, 5)) * 0.1,
        "bias": torch.zeros(5),
        "scale": fz.random.normal(third, ()),
    }


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = params["table"][tokens] @ params["w"] + params["bias"]
    return (x @ params["w"].T @ params["head"].T * params["scale"]).square().mean()


def plain() -> fz.Step:
    return fz.train_step(loss, optim.adamw(1e-2))


BATCH = torch.arange(12).view(4, 3)

PLACES: dict[str, Callable[[str], Any]] = {
    "host": lambda _: fz.offload("cpu", ("opt_state", "params")),
    "host state": lambda _: fz.offload("cpu", "opt_state"),
    "disk": lambda path: fz.offload("nvme", ("opt_state", "params"), path=path),
    "disk state": lambda path: fz.offload("nvme", "opt_state", path=path),
    "both": lambda path: fz.compose(fz.offload("cpu", "params"), fz.offload("nvme", "opt_state", path=path)),
    "half": lambda path: fz.offload("nvme", ("opt_state", "params"), path=[path, path], fraction=0.5),
    "masters": lambda path: fz.compose(fz.mixed_precision("bf16"), fz.offload("nvme", "opt_state", path=path)),
}
SPREAD = {"whole": fz.data_parallel, "sharded": fz.shard_params}


def equal(some: Any, others: Any) -> bool:
    """Bit for bit, and of one structure."""
    flat, structure = fz.tree.flatten(some)
    rest, other = fz.tree.flatten(others)
    return structure == other and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))
        for x, y in zip(flat, rest, strict=True)
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def tiers(state: Any) -> dict[str, str]:
    """The tier of every leaf by its path, which is also where its tensor is."""
    out = {}
    for x in fz.tree.leaves(state):
        known = leaf_of(x)
        assert known is not None
        tier = known[0].layout.tier
        assert (extent_of(x) is not None) == x.is_meta == (tier == "disk"), known[0].path
        out[known[0].path] = tier
    return out


# the record


def test_both_ways_of_writing_it_are_the_same() -> None:
    def where(path: str, leaf: torch.Tensor) -> bool:
        return leaf.dim() > 1

    step = plain()
    same = [
        fz.offload("nvme", ("params", "opt_state"), path=Path("/scratch"), where=where),
        fz.offload("nvme", of=["opt_state", "params"], path=["/scratch"], where=where),
        lambda step: fz.offload(step, "nvme", ("opt_state", "params"), path=("/scratch",), where=where),
        lambda step: fz.offload(step, tier="nvme", of=("opt_state", "params"), path="/scratch", where=where),
    ]
    assert len({one(step).transforms for one in same}) == 1
    assert str(same[0](step).transforms[0]) == "offload('nvme', ('opt_state', 'params'), path='/scratch', where=where)"
    assert fz.offload(step) == fz.offload("cpu")(step) == fz.offload(step, "cpu", "opt_state") != step
    assert str(fz.offload("cpu", "activations", fraction=0.5)) == "offload('cpu', 'activations', fraction=0.5)"


def test_two_hold_together_if_they_share_no_role() -> None:
    first, second = (
        fz.offload("cpu", ("params", "activations")),
        fz.offload("nvme", "opt_state", path="/scratch", update_on="host"),
    )
    step = plain()
    assert first(second(step)) == second(first(step)) == second(first(second(step)))
    assert len(first(second(step)).transforms) == 2


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (
            fz.offload("cpu", "params"),
            fz.offload("nvme", ("params", "opt_state"), path="/a"),
            "params: one tensor sent to two tiers",
        ),
        (
            fz.offload("cpu", "params", fraction=0.5),
            fz.offload("cpu", "params"),
            "params: one tensor sent to two tiers",
        ),
        (
            fz.offload("nvme", "params", path="/a"),
            fz.offload("nvme", "opt_state", path="/b"),
            "give both the same path",
        ),
    ],
)
def test_a_conflict_names_both(first: Any, second: Any, why: str) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(TransformError) as raised:
            other(one(plain()))
        assert all(text in str(raised.value) for text in (str(one), str(other), why, "Fix:"))


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(FzeroValueError) as raised:
        fz.offload("gpu", ("grads", "params"), fraction=0, where="layers", update_on="both")  # type: ignore[arg-type]
    text = str(raised.value)
    for part in (
        "tier='gpu'",
        "'grads' not among",
        "fraction=0",
        "where='layers'",
        "update_on='both'",
        "Fix: e.g. fz.offload(",
    ):
        assert part in text
    with pytest.raises(
        FzeroValueError, match=r"(?s)'nvme' needs a directory.*activations exist only within a step.*fraction=1\.5"
    ):
        fz.offload("nvme", "activations", fraction=1.5)
    with pytest.raises(FzeroValueError, match=r"of='gradients': .* send them to 'nvme'"):
        fz.offload("cpu", ("opt_state", "gradients"))


@pytest.mark.parametrize(
    ("arguments", "keywords", "why"),
    [
        (("fast",), {}, "tier='fast': not one of 'cpu', 'nvme', 'auto'"),
        (("cpu", "opt_state"), {"path": "/scratch"}, "'cpu' is memory"),
        (("cpu", ()), {}, "nothing to offload"),
        (("nvme",), {"path": [""]}, "not a directory's name"),
        (("nvme",), {"path": 3}, "3 is not a directory's name"),
        (("cpu", "opt_state", "params"), {}, "one tier and the roles"),
        (("cpu", "params"), {"update_on": "host"}, "which is not offloaded here"),
        (("cpu",), {"fraction": True}, "fraction=True"),
    ],
)
def test_arguments_that_cannot_work(arguments: Any, keywords: Any, why: str) -> None:
    with pytest.raises(FzeroValueError) as raised:
        fz.offload(*arguments, **keywords)
    assert why in str(raised.value)


# which leaf rests where


def leaves(sizes: list[int]) -> list[Leaf]:
    return [Leaf(f"params[{i}]", "params", (n,), Layout(torch.float32)) for i, n in enumerate(sizes)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_share_is_as_close_as_whole_leaves_allow_everywhere(sizes: list[int], fraction: float) -> None:
    found = tiers_of([Offload("cpu", ("params",), fraction=fraction)], leaves(sizes))
    off = seen = 0
    for n, (tier, state, *_) in zip(sizes, found, strict=True):
        off, seen = off + n * (tier == "host"), seen + n
        assert abs(off - fraction * seen) <= max(sizes) / 2 + 1e-6, "spread over the model, not at one end of it"
        assert state == "device"
    assert fraction < 1 or off == seen


def test_where_and_ties() -> None:
    record = Offload(
        "nvme",
        ("params", "opt_state"),
        ("/a",),
        where=lambda path, leaf: leaf.numel() > 10 and leaf.is_meta and path != "params[3]",
    )
    found = tiers_of([record], leaves([20, 5, 20, 20, 20]), ties=[0, 1, 2, 3, 1])
    assert [x.param for x in found] == [x.opt_state for x in found] == ["disk", "device", "disk", "device", "device"]


def test_integers_have_no_optimizer_state() -> None:
    table = Leaf("params['ids']", "params", (9,), Layout(torch.int64))
    assert tiers_of([Offload("cpu", ("opt_state",))], [table], casts=lambda leaf: True) == [("device",) * 4]
    assert tiers_of([Offload("cpu", ("params",))], [table]) == [("host", "device", "host", "device")]


def table(step: fz.Step, mesh: fz.AbstractMesh = MESH) -> dict[str, tuple[str, tuple[str, ...]]]:
    params = params_inputs(
        step, mesh, fz.tree.map(lambda x: torch.empty_like(x, device="meta"), init(fz.random.key(0)))
    )
    return {
        x.path: (x.layout.tier, x.layout.axes)
        for inputs in (params, opt_state_inputs(step, mesh, params))
        for x in inputs.leaves
    }


def test_optimizer_state_goes_with_its_parameter_and_masters_with_theirs() -> None:
    half = table(fz.offload("cpu", "opt_state", fraction=0.5)(plain()))
    assert {tier for path, (tier, _) in half.items() if path.startswith("params")} == {"device"}
    assert half["opt_state.count"] == ("device", ())
    assert {half[f"opt_state.mu['{n}']"][0] for n in ("table", "w", "bias", "scale")} == {"host", "device"}
    for name in ("w", "bias", "scale"):
        assert half[f"opt_state.mu['{name}']"] == half[f"opt_state.nu['{name}']"]
    masters = table(fz.mixed_precision(fz.offload("cpu", "opt_state", fraction=0.5)(plain())))
    for name in ("w", "bias", "scale"):
        assert masters[f"params['{name}']"][0] == half[f"opt_state.mu['{name}']"][0]
    apart = table(
        fz.compose(fz.mixed_precision(), fz.offload("cpu", "params"), fz.offload("nvme", "opt_state", path="/a"))(
            plain()
        )
    )
    assert (apart["params['w']"][0], apart["opt_state.mu['w']"][0]) == ("host", "disk")


def test_a_shard_rests_where_its_leaf_would() -> None:
    found = table(
        fz.shard_params(fz.offload("nvme", ("opt_state", "params"), path="/a")(plain())), fz.AbstractMesh(data=2)
    )
    assert found["params['w']"] == found["opt_state.nu['w']"] == ("disk", ("data",))
    assert found["params['scale']"] == ("disk", ())


def test_an_evaluation_expects_what_training_leaves() -> None:
    for place in PLACES.values():
        train = place("/a")(plain())
        evaluate = fz.compose(*train.transforms)(fz.eval_step(lambda p, x: x))
        meta = fz.tree.map(lambda x: torch.empty_like(x, device="meta"), init(fz.random.key(0)))
        assert params_inputs(train, MESH, meta).leaves == params_inputs(evaluate, MESH, meta).leaves


# birth, checkpoints, gathering


class Reached(NamedTuple):
    whole: Any
    tiers: dict[str, str]
    files: list[str]


def _born(place: str, spread: str, path: str, whole: bool, size: int, part: int = tensor_init.PART) -> Reached:
    mesh = fz.make_mesh(data=size)
    tensor_init.PART, kept = part, tensor_init.PART  # type: ignore[misc]
    try:
        return _as_born(place, spread, path, whole, mesh)
    finally:
        tensor_init.PART = kept  # type: ignore[misc]


def _as_born(place: str, spread: str, path: str, whole: bool, mesh: fz.Mesh) -> Reached:
    train = fz.compile(fz.compose(SPREAD[spread](), PLACES[place](path))(plain()), mesh, backend="eager")
    key = fz.random.key(3)
    state = train.init(init(key) if whole else init, key)
    assert train._inputs(state).leaves == placed_inputs(state.params).leaves
    return Reached(train.gather(state), tiers(state), open_files(Path(path)))


@pytest.mark.full(keep=["whole-1-half"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("spread", "size"), [("whole", 1), ("sharded", 2)])
def test_a_state_is_born_where_it_rests(run_or_call: Any, place: str, spread: str, size: int, tmp_path: Path) -> None:
    key = fz.random.key(3)
    want = plain().init(init, key)
    for whole in (False, True):
        for rank, found in enumerate(run_or_call(size, _born, place, spread, str(tmp_path), whole, size)):
            assert equal(found.whole, want), rank
            assert ("disk" in found.tiers.values()) == (place not in ("host", "host state")) == bool(found.files)
            assert found.tiers["opt_state.mu['w']"] != "device" or place == "half"
            assert found.tiers["step"] == found.tiers["key"] == found.tiers["opt_state.count"] == "device"
    assert not os.listdir(tmp_path), "the files have no names"


@pytest.mark.full(keep=["whole-1-half", "whole-1-host state"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("spread", "size"), [("whole", 1), ("sharded", 2)])
def test_large_leaves_are_made_in_parts(run_or_call: Any, place: str, spread: str, size: int, tmp_path: Path) -> None:
    want = plain().init(init, fz.random.key(3))
    for found in run_or_call(size, _born, place, spread, str(tmp_path), False, size, part=64):
        assert equal(found.whole, want)


def _restored(place: str, spread: str, path: str, root: str, size: int) -> Any:
    mesh = fz.make_mesh(data=size)
    train = fz.compile(fz.compose(SPREAD[spread](), PLACES[place](path))(plain()), mesh, backend="eager")
    state = train.restore(f"{root}/plain")
    train._inputs(state)
    fz.checkpoint.save(f"{root}/{place}", state)
    return train.gather(state)


@pytest.mark.full(keep=["whole-1-host state", "whole-1-disk"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("spread", "size"), [("whole", 1), ("sharded", 2)])
def test_a_checkpoint_goes_to_any_tier_and_back(
    run_or_call: Any, place: str, spread: str, size: int, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init(init), BATCH)
    state, _ = train(state, BATCH)
    fz.checkpoint.save(tmp_path / "plain", state)
    want = train.gather(state)
    for found in run_or_call(size, _restored, place, spread, str(tmp_path / "scratch"), str(tmp_path), size):
        assert equal(found, want)
    fz.checkpoint.verify(tmp_path / place)
    assert equal(train.gather(train.restore(tmp_path / place)), want)


def test_reading_a_leaf_on_disk_asks_for_its_place(tmp_path: Path) -> None:
    fz.checkpoint.save(tmp_path, plain().init(init))
    leaf = Leaf("params['w']", "params", (7, 5), Layout(torch.float32, tier="disk"))
    with pytest.raises(CheckpointError, match=r"params\['w'\]: is stored on disk, and no file for it is given"):
        fz.checkpoint.read(tmp_path, {"params.w": leaf}, fz.make_mesh(data=1))


def test_damage_is_found_on_the_way_to_disk(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    saved = fz.checkpoint.save(tmp_path / "run", plain().init(init))
    (file,) = saved.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    train = fz.compile(PLACES["disk"](str(tmp_path / "scratch"))(plain()), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(CheckpointError, match="damaged"):
        train.restore(saved)


# what is in memory meanwhile

LARGE = 1 << 20  # elements of a leaf
# Bytes: half of the state with its moments; buffers are as large as a leaf here, and busy threads hold some longer.
BOUND = 9 * 4 * LARGE


def large(key: torch.Tensor) -> list[torch.Tensor]:
    return [fz.random.normal(k, (LARGE // 512, 512)) * 0.02 for k in fz.random.split(key, 6)]


def large_step(optimizer: Any = None) -> fz.Step:
    return fz.train_step(
        lambda params, x: sum((p.square().mean() for p in params), x.mean()), optimizer or optim.adamw(1e-3)
    )


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations returned and that are still there: `peak` is the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in fz.tree.leaves(out):
            if type(x) is torch.Tensor and not x.is_meta:
                storage = x.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(n for _, n in self._alive.values()))
        return out


@contextmanager
def measured() -> Iterator[Memory]:
    gc.collect()
    with Memory() as memory:
        yield memory


def test_birth_on_disk_holds_one_leaf_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, mesh = 4 * LARGE, fz.make_mesh(data=1)
    in_memory = fz.compile(large_step(), mesh, backend="eager")
    with measured() as memory:
        whole = in_memory.init(large)
    assert memory.peak >= 18 * leaf, "the measure sees what rests in memory"
    train = fz.compile(PLACES["disk"](str(tmp_path))(large_step()), mesh, backend="eager")
    with measured() as memory:
        state = train.init(large)
    assert leaf <= memory.peak <= BOUND, "the draw, its product, and what is being written"
    monkeypatch.setattr(tensor_init, "PART", leaf // 16)
    for make in (PLACES["disk"](str(tmp_path)), PLACES["host"]("")):
        train = fz.compile(make(large_step()), mesh, backend="eager")
        with measured() as memory:
            state = train.init(large)
        assert memory.peak <= BOUND + (0 if state.params[0].is_meta else 18 * leaf)
    assert equal(train.gather(state), in_memory.gather(whole))


def test_restoring_and_saving_on_disk_hold_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    whole = large_step().init(large)
    fz.checkpoint.save(tmp_path / "plain", whole)
    monkeypatch.setattr(reading, "_WINDOW", 1 << 20)
    train = fz.compile(PLACES["disk"](str(tmp_path / "scratch"))(large_step()), fz.make_mesh(data=1), backend="eager")
    with measured() as memory:
        state = train.restore(tmp_path / "plain", large)
    assert memory.peak <= BOUND, "the buffers that are written, those that just were, and the window that is read"
    with measured() as memory:
        fz.checkpoint.save(tmp_path / "again", state)
    assert memory.peak <= safetensors_format.BLOCK + BOUND, (
        "that of the file, and the buffers of a leaf and of those before"
    )
    assert equal(plain_restore(tmp_path / "again"), whole)


def plain_restore(path: Path) -> Any:
    train = fz.compile(large_step(), fz.make_mesh(data=1), backend="eager")
    return train.gather(train.restore(path))


def files_of(state: Any) -> Any:
    (files,) = {extent.files for x in fz.tree.leaves(state) if (extent := extent_of(x)) is not None}
    return files


def test_zeros_are_not_written_and_shapes_are_not_read(tmp_path: Path) -> None:
    train = fz.compile(PLACES["disk"](str(tmp_path))(large_step()), fz.make_mesh(data=1), backend="eager")
    files = files_of(train.init(large))
    assert (files.bytes_written, files.bytes_read) == (6 * 4 * LARGE, 0), "the parameters, not their moments"
    files = files_of(train.init([torch.zeros(LARGE), -torch.zeros(LARGE), torch.ones(LARGE)]))
    assert files.bytes_written == 2 * 4 * LARGE, "zeros below zero have a bit"


class Slow(NamedTuple):
    slow: Any
    like: Any


def lookahead() -> Any:
    """An optimizer whose state begins as the parameters, and as constants of their shape."""

    def begin(params: Any) -> Slow:
        return Slow(
            fz.tree.map(lambda p: p.clone(), params),
            fz.tree.map(lambda p: torch.full_like(p, 2.0, dtype=torch.float64), params),
        )

    return optim.GradientTransformation(
        begin, lambda grads, state, params=None: (fz.tree.map(lambda g: -g, grads), state)
    )


@pytest.mark.parametrize("place", ["host", "host state", "disk", "disk state", "both"])
def test_an_optimizer_that_reads_the_parameters(place: str, tmp_path: Path) -> None:
    step = fz.train_step(loss, lookahead())
    train = fz.compile(PLACES[place](str(tmp_path))(step), fz.make_mesh(data=1), backend="eager")
    state = train.init(init)
    assert equal(train.gather(state), step.init(init))
    in_memory = {id(x): x.data_ptr() for x in fz.tree.leaves(state) if not x.is_meta}
    assert len(set(in_memory.values())) == len(in_memory), "no leaf in the memory of another"


def test_what_travels_together_lies_together(tmp_path: Path) -> None:
    state = fz.compile(PLACES["disk"](str(tmp_path))(plain()), fz.make_mesh(data=1), backend="eager").init(init)
    placed = {leaf_of(x)[0].path: extent_of(x) for x in fz.tree.leaves(state) if extent_of(x)}  # type: ignore[index]
    in_order = sorted(placed, key=lambda path: placed[path].offset)  # type: ignore[union-attr]
    names = ["bias", "head", "scale", "w"]
    assert in_order == [
        text.format(n) for n in names for text in ("params['{}']", "opt_state.mu['{}']", "opt_state.nu['{}']")
    ]
    assert all(placed[path].offset % disk.ALIGNMENT == 0 for path in in_order)  # type: ignore[union-attr]


def test_the_budget_counts_what_rests_on_the_device(tmp_path: Path) -> None:
    step, budget = large_step(), 6 * 4 * LARGE + 4096  # the parameters and a little

    def make(mesh: fz.Mesh, *transforms: Any) -> fz.State:
        return fz.compile(fz.compose(*transforms)(step), mesh, memory_budget=budget, backend="eager").init(large)

    one, two = fz.make_mesh(data=1), fz.make_mesh(data=1, unified_memory=False)
    make(one, PLACES["disk state"](str(tmp_path)))
    make(two, PLACES["host state"](""))
    with pytest.raises(BudgetError, match=rf"\({12 * 4 * LARGE + 8 - 4096:,} bytes\) more than"):  # 8 bytes of count
        make(one, PLACES["host state"](""))


# faults


def test_a_path_that_cannot_hold_the_state_is_said_before_anything_is_made(tmp_path: Path) -> None:
    made = []

    def late(key: torch.Tensor) -> Any:
        made.append(type(key))
        return init(key)

    (tmp_path / "file").touch()
    paths = [str(tmp_path / "missing"), str(tmp_path / "file")]
    train = fz.compile(fz.offload("nvme", path=paths)(plain()), fz.make_mesh(data=1), backend="eager")
    for act in (lambda: train.init(late), lambda: train.restore(tmp_path / "run")):
        if len(made) > 0:
            fz.checkpoint.save(tmp_path / "run", plain().init(init))
        with pytest.raises(FzeroValueError) as raised:
            act()
        assert all(
            text in str(raised.value)
            for text in (*paths, "the directory does not exist", "it is not a directory", "Fix:")
        )
    assert len(made) == 1, "traced, not run"


def _with_a_path_of_its_own(path: str, size: int) -> list[str]:
    mesh = fz.make_mesh(data=size)
    own = path if mesh.rank == 0 else f"{path}/missing"
    train = fz.compile(fz.compose(fz.shard_params(), PLACES["disk"](own))(plain()), mesh, backend="eager")
    raised = []
    for act in (lambda: train.init(init), lambda: train.init(init(fz.random.key(0)))):
        try:
            act()
        except FzeroError as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def test_a_path_that_one_rank_lacks_is_every_ranks_error(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, _with_a_path_of_its_own, str(tmp_path), 2)
    assert first == second and len(first) == 2
    assert (
        first[0].startswith("FzeroValueError: fzero.init: the work of some ranks failed\n  rank 1: ")
        and "the directory does not exist" in first[0]
    )
    assert "rank 0" not in first[0] and os.listdir(tmp_path) == []


def _failing(path: str, size: int) -> str:
    mesh = fz.make_mesh(data=size)
    if mesh.rank == 1:

        def fail(value: torch.Tensor, tensor: torch.Tensor) -> None:
            raise TierError("fzero.offload: no space")

        disk.store, kept = fail, disk.store  # type: ignore[assignment]
    try:
        fz.compile(fz.compose(fz.shard_params(), PLACES["disk"](path))(plain()), mesh, backend="eager").init(init)
    except FzeroError as error:
        return str(error)
    finally:
        if mesh.rank == 1:
            disk.store = kept
    return ""


def test_a_disk_that_fails_on_one_rank_while_a_state_is_made(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, _failing, str(tmp_path), 2)
    assert first == second and "rank 1: fzero.offload: no space" in first


def test_a_state_on_another_tier_is_refused(tmp_path: Path) -> None:
    mesh = fz.make_mesh(data=1)
    on_disk, in_memory = (
        fz.compile(step, mesh, backend="eager") for step in (PLACES["disk"](str(tmp_path))(plain()), plain())
    )
    with pytest.raises(FzeroValueError) as raised:
        in_memory(on_disk.init(init), BATCH)
    assert (
        "params['w']: float32[7, 5] unsharded, on disk in the state, float32[7, 5] unsharded, on device in this step"
        in str(raised.value)
    )
    with pytest.raises(FzeroValueError, match="differ from those that this evaluation expects"):
        fz.compile(fz.eval_step(loss), mesh, backend="eager")(on_disk.init(init).params, BATCH)


def test_a_batch_without_values_is_refused() -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    with pytest.raises(FzeroValueError, match=r"batch: int64\[4, 3\] on the meta device"):
        train(train.init(init), BATCH.to("meta"))


def test_a_state_on_disk_is_not_copied(tmp_path: Path) -> None:
    state = fz.compile(PLACES["disk"](str(tmp_path))(plain()), fz.make_mesh(data=1), backend="eager").init(init)
    with pytest.raises(FzeroTypeError, match="a tensor on disk cannot be copied"):
        copy.deepcopy(state)


# moving

JOURNEYS = [
    ("cpu", "home"),
    ("nvme", "home"),
    ("device", "home"),
    ("cpu", "nvme", "device", "home"),
    ("nvme", "nvme", "cpu", "cpu", "home", "home"),
]


def _moved(place: str, spread: str, path: str, size: int, unified: bool) -> list[Any]:
    mesh = fz.make_mesh(data=size, unified_memory=unified)
    train = fz.compile(fz.compose(SPREAD[spread](), PLACES[place](path))(plain()), mesh, backend="eager")
    state = train.init(init)
    begun, home, out = tiers(state), home_of(state.params["w"]), []
    extents = [extent_of(x) for x in fz.tree.leaves(state)]
    for journey in JOURNEYS:
        for tier in journey:
            old, state = state, fz.move(state, tier, path=path if tier == "nvme" else None)
            assert all(x.numel() == 0 or x.is_meta for x in fz.tree.leaves(old)), "what was moved is let go"
            found = tiers(state)
            there = {"cpu": "host", "nvme": "disk", "device": "device"}.get(tier)
            assert there is None or {t for p, t in found.items() if p not in ("step", "key")} == {there}
            assert tier != "home" or found == begun
            assert state.params["table"] is state.params["head"]
            assert home_of(state.params["w"]).tier == home.tier
            out.append(train.gather(state))
        train._inputs(state)
        assert [extent_of(x) for x in fz.tree.leaves(state)] == extents, "what is stored on disk keeps its place there"
    return out


@pytest.mark.full(keep=["whole-1-False-half", "whole-1-True-host"])
@pytest.mark.parametrize("place", ["host", "disk", "both", "half"])
@pytest.mark.parametrize(("spread", "size", "unified"), [("whole", 1, True), ("whole", 1, False), ("sharded", 2, True)])
def test_a_state_is_moved_and_brought_home(
    run_or_call: Any, place: str, spread: str, size: int, unified: bool, tmp_path: Path
) -> None:
    want = plain().init(init)
    for found in run_or_call(size, _moved, place, spread, str(tmp_path), size, unified):
        assert all(equal(x, want) for x in found)


def test_training_goes_on_after_a_move(tmp_path: Path) -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    want, moved = train.init(init), train.init(init)
    for tier in ("cpu", "nvme", "device"):
        want, _ = train(want, BATCH)
        moved, _ = train(moved, BATCH)
        moved = fz.move(fz.move(moved, tier, path=tmp_path if tier == "nvme" else None), "home")
    assert equal(train.gather(moved), train.gather(want)) and int(moved.step) == 3
    assert os.listdir(tmp_path) == [], "files go with what was in them"


def test_on_one_memory_nothing_is_copied() -> None:
    state = fz.compile(plain(), fz.make_mesh(data=1), backend="eager").init(init)
    before = [x.data_ptr() for x in fz.tree.leaves(state)]
    state = fz.move(state, "cpu")
    assert [x.data_ptr() for x in fz.tree.leaves(state)] == before
    apart = fz.compile(plain(), fz.make_mesh(data=1, unified_memory=False), backend="eager").init(init)
    before = [x.data_ptr() for x in fz.tree.leaves(apart.params)]
    assert not {x.data_ptr() for x in fz.tree.leaves(fz.move(apart, "cpu").params)} & set(before)


def test_a_moved_state_and_what_it_left_are_refused(tmp_path: Path) -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    evaluate = fz.compile(fz.eval_step(loss), train.mesh, backend="eager")
    old, _ = train(train.init(init), BATCH)
    evaluate(old.params, BATCH)
    state = fz.move(old, "nvme", path=tmp_path)
    with pytest.raises(FzeroValueError) as raised:
        train(state, BATCH)
    assert "on disk in the state" in str(raised.value) and "Fix: bring it back: fz.move(state, 'home')" in str(
        raised.value
    )
    for act in (
        lambda: train(old, BATCH),
        lambda: evaluate(old.params, BATCH),
        lambda: train.gather(old),
        lambda: fz.checkpoint.save(tmp_path / "run", old),
    ):
        with pytest.raises(FzeroValueError, match=r"is no longer valid, because it was moved"):
            act()
    fz.checkpoint.save(tmp_path / "run", state)
    assert equal(train.gather(train.restore(tmp_path / "run")), train.gather(fz.move(state, "home")))


def test_part_of_a_state_is_moved() -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    state = train.init(init)
    away = state._replace(opt_state=fz.move(state.opt_state, "cpu"))
    with pytest.raises(FzeroValueError, match=r"opt_state\.mu\['bias'\]: .* on host in the state"):
        train(away, BATCH)
    with pytest.raises(FzeroValueError, match="was moved"):
        train(state, BATCH)
    train(away._replace(opt_state=fz.move(away.opt_state, "home")), BATCH)


def test_moves_that_cannot_be(tmp_path: Path) -> None:
    train = fz.compile(plain(), fz.make_mesh(data=1), backend="eager")
    state = train.init(init)
    with pytest.raises(
        FzeroValueError,
        match=r"(?s)tier='disk': not one of 'cpu', 'nvme', 'device', 'home'.*state\['w'\]: float32\[2\] that was not",
    ):
        fz.move({"w": torch.ones(2)}, "disk")
    with pytest.raises(FzeroValueError, match="only 'nvme' has one"):
        fz.move(state, "cpu", path=tmp_path)
    with pytest.raises(FzeroValueError, match="'nvme' needs a directory"):
        fz.move(state, "nvme")
    with pytest.raises(FzeroValueError, match="the directory does not exist"):
        fz.move(state, "nvme", path=tmp_path / "missing")
    train(state, BATCH)  # it is where it was
    assert fz.move({}, "cpu") == {}


def test_a_move_from_disk_holds_no_leaf_twice(tmp_path: Path) -> None:
    train = fz.compile(PLACES["disk"](str(tmp_path))(large_step()), fz.make_mesh(data=1), backend="eager")
    state = train.init(large)
    with measured() as memory:
        state = fz.move(state, "device")
    assert memory.peak <= (18 + 4) * 4 * LARGE  # the state, and buffers that busy threads hold for a while
    with measured() as memory:
        state = fz.move(state, "home")
    assert memory.peak <= BOUND, "a leaf, buffers, and those of the leaf before; the state is let go tensor by tensor"
    assert storage.load(state.opt_state.mu[0], torch.device("cpu")).any() == torch.tensor(False)


def test_models_of_the_parity_table_are_born_anywhere(tmp_path: Path) -> None:
    for name, model in MODELS.items():
        step = fz.train_step(model.loss, optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(1e-2)))
        want = step.init(model.init)
        for place in PLACES.values():
            train = fz.compile(place(str(tmp_path))(step), fz.make_mesh(data=1), backend="eager")
            assert equal(train.gather(train.init(model.init)), want), name
