"""Checkpoints: any mesh to any mesh, every kind of damage, and a kill at every system call."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import ending
from rejections import own_loss, squares
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fzero as fz
from fzero import checkpoint, optim, tree
from fzero._utils.bounded_json import dumped, parsed
from fzero.checkpoint import index, reading, run_record, safetensors_format, saving, treespec
from fzero.checkpoint.weight_loading import entries_of
from fzero.comm.control_group import ControlGroup, world
from fzero.errors import CheckpointError, FzeroError
from fzero.mesh import Mesh, make_mesh
from fzero.sharding.layout import Layout, Leaf, leaf_of, place, shard

pytestmark = pytest.mark.forks

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any = ()
    key: Any = None
    extras: Any = None


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclass
class Scale:
    value: torch.Tensor
    growth: int = 2


def whole_state(step: int = 100, seed: int = 0) -> State:
    g = torch.Generator().manual_seed(seed)
    params = {
        "embed": torch.randn(7, 5, generator=g),
        "layers": [
            {"w": torch.randn(3, 3, 3, generator=g), "b": torch.randn(1, generator=g).bfloat16()} for _ in range(2)
        ],
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.rand(11, generator=g) > 0.5,
    }
    moments = Moments(
        tree.map(lambda p: torch.rand(p.shape, generator=g), params),
        tree.map(lambda p: torch.rand(p.shape, generator=g), params),
    )
    return State(
        torch.tensor(step),
        params,
        (None, moments),
        torch.tensor([1, 2**63 - 1]),
        {"scale": Scale(torch.tensor(8.0)), "lr": 0.1, "note": "x"},
    )


def leaves_of(whole: Any, axes: tuple[str, ...]) -> dict[str, Leaf]:
    """Everything sharded over `axes` but the step, the key and every leaf whose path ends in 'b'."""
    names, paths = tree.names(whole), tree.paths(whole, "state")
    small = {
        n
        for n, x in zip(names, tree.leaves(whole), strict=True)
        if n.endswith(".b") or n in ("step", "key") or not isinstance(x, torch.Tensor)
    }
    tensors = [
        (n, p, x) for n, p, x in zip(names, paths, tree.leaves(whole), strict=True) if isinstance(x, torch.Tensor)
    ]
    return {n: Leaf(p, "params", tuple(x.shape), Layout(x.dtype, () if n in small else axes)) for n, p, x in tensors}


def on_rank(whole: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The state that one rank of a mesh holds."""
    flat, spec = tree.flatten(whole)
    leaves, made = leaves_of(whole, axes), {}
    for name, x in zip(tree.names(whole), flat, strict=True):
        if isinstance(x, torch.Tensor):
            made.setdefault(id(x), place(shard(x, leaves[name], mesh), leaves[name], mesh))
    return tree.unflatten(spec, [made.get(id(x), x) for x in flat])


def meshes(**axes: int) -> list[Mesh]:
    return [Mesh(axes, rank, CPU) for rank in range(Mesh(axes, 0, CPU).size)]


def as_ranks(size: int, act: Any) -> list[Any]:
    """`act(ControlGroup)` in one thread per rank; a rank that hangs fails the test. Returns results, or exceptions."""
    barrier, slots, out = threading.Barrier(size, timeout=30), [""] * size, [None] * size

    def run(rank: int) -> None:
        class Threads(ControlGroup):
            def all_gather(self, value: Any, form: Any = Any, owner: str = "", about: str = "") -> list[Any]:
                slots[rank] = dumped(value)
                barrier.wait()
                everyone = [parsed(text, form) for text in slots]
                barrier.wait()
                return everyone

        group = Threads()
        group.rank, group.size = rank, size
        try:
            out[rank] = act(group)
        except Exception as error:
            out[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def save_as(ranks: ControlGroup, root: Any, state: Any) -> Any:
    return saving.carry_out(saving.begin(ranks, root, state, saving.SaveOptions()))


def save_on(root: Path, whole: Any, axes: tuple[str, ...] = ("data",), **sizes: int) -> Path:
    mesh = meshes(**sizes)
    done = as_ranks(len(mesh), lambda r: save_as(r, root, on_rank(whole, mesh[r.rank], axes)))
    assert all(isinstance(d, Path) and d == done[0] for d in done), done
    return done[0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(safetensors_format.as_bytes(a.contiguous()), safetensors_format.as_bytes(b.contiguous()))
    )


def whole_leaves(tensor_tree: Any) -> dict[str, torch.Tensor]:
    return {
        n: x
        for n, x in zip(tree.names(tensor_tree), tree.leaves(tensor_tree), strict=True)
        if isinstance(x, torch.Tensor)
    }


def read_whole(path: Any, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    found = checkpoint.describe(path)
    wanted = {n: Leaf(found.aliases.get(n, n), "params", *_layout(found.leaves[n])) for n in names or found.leaves}
    return checkpoint.read(path, wanted, meshes(data=1)[0])


def _layout(leaf: tuple[tuple[int, ...], torch.dtype]) -> tuple[tuple[int, ...], Layout]:
    return leaf[0], Layout(leaf[1])


def raises(act: Any, *expected: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    text = str(caught.value)
    for part in expected:
        assert part in text, f"{part!r} is not in:\n{text}"
    assert "\nFix: " in text
    return text


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(safetensors_format, "CHUNK", 64)
    monkeypatch.setattr(index, "CHUNK", 64)
    monkeypatch.setattr(safetensors_format, "BLOCK", 256)
    monkeypatch.setattr(reading, "_BATCH", 192)
    monkeypatch.setattr(reading, "_GROUP", 400)
    return 64


# Round trips


@pytest.mark.parametrize("saved", [{"data": 2}, {"replica": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("loaded", [{"data": 1}, {"replica": 2, "data": 3}], ids=str)
def test_any_mesh_to_any_mesh(tmp_path: Path, small_chunks: int, saved: dict[str, int], loaded: dict[str, int]) -> None:
    whole = whole_state()
    axes = tuple(a for a in saved if a != "replica")
    path = save_on(tmp_path, whole, axes, **saved)
    wanted = leaves_of(whole, ("data",))
    checkpoint.check(checkpoint.describe(path), {n: (leaf.shape, leaf.dtype) for n, leaf in wanted.items()})
    for mesh in meshes(**loaded):
        got = checkpoint.read(tmp_path, wanted, mesh)
        assert list(got) == list(wanted)
        for name, x in whole_leaves(whole).items():
            assert same(got[name], shard(x, wanted[name], mesh)), name
            assert leaf_of(got[name]) == (wanted[name], mesh)
    checkpoint.verify(path)


def test_every_shard_is_written_once_without_padding_and_spread_over_the_ranks(tmp_path: Path) -> None:
    whole = State(3, {f"w{i}": torch.arange(1000.0) for i in range(8)} | {"odd": torch.arange(7.0)})
    path = save_on(tmp_path, whole, replica=2, data=2)
    found = checkpoint.describe(path)
    loads = {}
    for name in found.files:
        with safe_open(path / name, framework="pt") as f:
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
        loads[name] = sum(t.numel() * t.element_size() for t in tensors.values())
        for key, t in tensors.items():
            (part,) = [p for p in found.parts[key] if p.file == name]
            assert torch.equal(t.reshape(-1), part.boxes.take(whole.params[key.removeprefix("params.")]))
    assert sum(loads.values()) == found.nbytes == sum(t.numel() * 4 for t in whole.params.values())
    assert sorted(loads) == [f"rank-{r:05d}-of-00004.safetensors" for r in range(4)]
    assert max(loads.values()) - min(loads.values()) <= 16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003"]
    assert sorted(p.name for p in path.iterdir()) == ["index.json", *sorted(loads)]


def test_whole_leaves_are_balanced_by_bytes() -> None:
    state = State(0, {f"w{i}": torch.zeros(n) for i, n in enumerate([100, 90, 50, 40, 10, 0])})
    plans = [saving.make_plan(state, rank, 3) for rank in range(3)]
    assert len({p.digest() for p in plans}) == 1
    owner = {n.removeprefix("params."): p[0][0] if p else None for n, p in plans[0].parts.items()}
    assert owner == {"w0": 0, "w1": 1, "w2": 2, "w3": 2, "w4": 1, "w5": None} or owner == {
        "w0": 0,
        "w1": 1,
        "w2": 2,
        "w3": 2,
        "w4": 2,
        "w5": None,
    }


@pytest.mark.parametrize("dtype", safetensors_format.CODES, ids=str)
def test_every_dtype_and_shape_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    def noise(*shape: int) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.rand(shape) > 0.5
        # NaNs with payloads among them
        return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)

    params = [noise(), noise(0), noise(0, 3), noise(5), noise(2, 3), noise(6, 4).T]
    save_on(tmp_path, State(1, params), data=2)
    got = read_whole(tmp_path)
    for i, p in enumerate(params):
        assert same(got[f"params.{i}"], p), (i, p)


def test_chunks_of_the_real_size(tmp_path: Path) -> None:
    big = torch.randn(5 * safetensors_format.CHUNK + 13)  # over 20 MiB: more than one block
    save_on(tmp_path, State(1, {"w": big, "v": big[:77].clone()}), data=3)
    wanted = {"params.w": Leaf("w", "params", (big.numel(),), Layout(big.dtype, ("data",)))}
    for mesh in meshes(data=2):
        assert torch.equal(checkpoint.read(tmp_path, wanted, mesh)["params.w"], shard(big, wanted["params.w"], mesh))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_property_shards_of_any_size_meet_again(tmp_path: Path, small_chunks: int, data: st.DataObject) -> None:
    numels = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    source, target = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    root = Path(os.fspath(tmp_path), str(time.monotonic_ns()))
    whole = State(0, [torch.randn(n) for n in numels])
    save_on(root, whole, data=source)
    wanted = leaves_of(whole, ("data",))
    wanted.pop("step", None)
    parts = [checkpoint.read(root, wanted, mesh) for mesh in meshes(data=target)]
    for name, leaf in wanted.items():
        gathered = torch.cat([p[name] for p in parts])
        assert torch.equal(gathered[: leaf.numel], whole.params[int(name.split(".")[1])])
        assert not gathered[leaf.numel :].any()
    shutil.rmtree(root)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 2000),
    cuts=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), min_size=1, max_size=8),
)
def test_property_ranges_are_slices_of_the_file(
    tmp_path: Path, small_chunks: int, size: int, cuts: list[tuple[int, int]]
) -> None:
    content = random.Random(size).randbytes(size)
    file = tmp_path / "blob"
    file.write_bytes(content)
    crc = "".join(safetensors_format._crc(content[i : i + 64]) for i in range(0, size, 64))
    with safetensors_format.Ranges(file, crc) as ranges:
        for a, b in cuts:
            a, b = sorted((min(a, size), min(b, size)))
            assert b"".join(bytes(v) for v in ranges.views(a, b - a)) == content[a:b]
        assert not ranges.bad


# Trees


def test_structure_is_the_saved_tree(tmp_path: Path) -> None:
    whole = whole_state()
    checkpoint.save(tmp_path, whole, meta={"run": 7})
    found, got = checkpoint.describe(tmp_path), checkpoint.structure(tmp_path)
    assert tree.structure(got) == tree.structure(whole)
    assert (found.step, found.meta) == (100, {"run": 7})
    assert list(found.leaves) == list(whole_leaves(whole)), "the order of the tree"
    for a, b in zip(tree.leaves(got), tree.leaves(whole), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")
        else:
            assert a == b and type(a) is type(b)
    assert isinstance(got.extras["scale"], Scale) and isinstance(got.opt_state[1], Moments)


def test_a_tied_leaf_is_stored_once_and_comes_back_tied(tmp_path: Path) -> None:
    table = torch.randn(6, 4)
    whole = State(1, {"embed": table, "head": {"w": table}, "twin": table.clone()})
    save_on(tmp_path, whole, data=2)
    found = checkpoint.describe(tmp_path)
    assert found.aliases == {"params.head.w": "params.embed"}
    assert found.nbytes == 2 * table.numel() * 4
    got = checkpoint.structure(tmp_path)
    assert got.params["embed"] is got.params["head"]["w"] is not got.params["twin"]
    layout = Layout(torch.float32, ("data",))
    one, other = Leaf("embed", "params", (6, 4), layout), Leaf("head", "params", (6, 4), layout)
    tied = checkpoint.read(tmp_path, {"params.embed": one, "params.head.w": one}, meshes(data=2)[1])
    assert tied["params.embed"] is tied["params.head.w"]
    loose = checkpoint.read(tmp_path, {"params.embed": one, "params.head.w": other}, meshes(data=2)[1])
    assert loose["params.embed"].data_ptr() != loose["params.head.w"].data_ptr()
    assert torch.equal(loose["params.embed"], loose["params.head.w"])
    raises(
        lambda: checkpoint.read(tmp_path, {"params.embed": one, "params.twin": one}, meshes(data=2)[0]),
        "params.twin and params.embed: one tensor here, two in the checkpoint",
    )


def test_what_cannot_be_stored_is_listed_at_once(tmp_path: Path) -> None:
    bad = State(
        -1,
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, "s": {1, 2}, "m": torch.empty(2, device="meta"), (1, 2): 3},
    )
    text = raises(lambda: checkpoint.save(tmp_path / "x", bad), "state.step: -1", "keys must be str or int, not (1, 2)")
    bad.params.pop((1, 2))
    text = raises(
        lambda: checkpoint.save(tmp_path / "x", bad),
        "'a.b'",
        "state.params['s']: a builtins.set",
        "params.m: a tensor on the meta device",
    )
    assert "5 reasons" not in text and "4 reasons" in text
    assert not (tmp_path / "x").exists()
    good = State(0, {"a": torch.ones(1)})
    raises(lambda: checkpoint.save(tmp_path, good, keep=0, meta={"x": object()}), "keep=0", "meta: JSON cannot hold it")
    raises(lambda: checkpoint.save(tmp_path, good, meta={"x": (1, 2)}), "meta: JSON would change it")
    raises(lambda: checkpoint.save(tmp_path, (torch.ones(1),)), "state.step: None")


class Impostor:
    ran = False

    def __init__(self, **_: Any) -> None:
        type(self).ran = True


def _before_the_rooms(found: Any, module: str) -> Any:
    """A treespec with the type that `module` held before it was moved under that name."""
    moved = {treespec._MOVED[module]: module}
    if isinstance(found, dict):
        return {
            key: moved.get(x, x) if key == "namedtuple" else _before_the_rooms(x, module) for key, x in found.items()
        }
    return [_before_the_rooms(x, module) for x in found] if isinstance(found, list) else found


@pytest.mark.parametrize(
    ("transform", "slot", "module"),
    [
        (fz.mixed_precision("auto", start="fp16"), "precision", "fzero.program.counters:PrecisionState"),
        (fz.mixed_precision("auto", start="fp16"), "precision", "fzero.precision.counters:PrecisionState"),
    ],
    ids=["precision of 0.1", "precision of 0.2"],
)
def test_types_that_have_moved_since_are_found(tmp_path: Path, transform: Any, slot: str, module: str) -> None:
    """A checkpoint that names the modules as they were is the state it was, to the bit, and trains on."""
    step = transform(fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-2)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    batch = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)
    state, _ = train(train.init({"w": torch.eye(16)}), batch)
    checkpoint.save(tmp_path, state)
    edit(
        checkpoint.latest(tmp_path),
        lambda content: content.update(skeleton=_before_the_rooms(content["skeleton"], module)),
    )
    assert module in (checkpoint.latest(tmp_path) / "index.json").read_text()
    assert type(checkpoint.structure(tmp_path).extras[slot]) is type(state.extras[slot])
    other = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    again = other.restore(tmp_path)
    assert type(again.extras[slot]) is type(state.extras[slot])
    for got, want in ((again, state), (other(again, batch)[0], train(state, batch)[0])):
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            assert torch.equal(a, b)


def test_optimizer_states_of_0_2_are_found(tmp_path: Path) -> None:
    """Types of an optimizer's state whose module has another name since."""
    parts = (optim.clip_by_global_norm(1.0), optim.scale_by_schedule(lambda count: -0.1 * (1 + count)))
    step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), optim.chain(*parts))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    batch = torch.linspace(-1, 1, 16).reshape(4, 4)
    state, _ = train(train.init({"w": torch.eye(4)}), batch)
    checkpoint.save(tmp_path, state)
    old = {"base:EmptyState", "transforms:ScaleByScheduleState"}
    for name in old:
        module = f"fzero.optim.{name}"
        edit(
            checkpoint.latest(tmp_path),
            lambda content, module=module: content.update(skeleton=_before_the_rooms(content["skeleton"], module)),
        )
    assert all(name in (checkpoint.latest(tmp_path) / "index.json").read_text() for name in old)
    again = train.restore(tmp_path)
    assert [type(x) for x in again.opt_state] == [type(x) for x in state.opt_state]
    for got, want in zip(tree.leaves(train(again, batch)[0]), tree.leaves(train(state, batch)[0]), strict=True):
        assert torch.equal(got, want)


class Fp8State(NamedTuple):
    """A slot of a state as 0.1 had it."""

    history: torch.Tensor


@pytest.mark.parametrize("module", ["fzero.program.delayed", "fzero.precision.delayed"])
def test_a_slot_that_was_removed_since_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    step = fz.fp8(fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-2)))
    train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
    state, _ = train(train.init({"w": torch.eye(16)}, fz.random.key(0)), torch.ones(16, 16))
    monkeypatch.setattr(Fp8State, "__module__", module)
    checkpoint.save(tmp_path, state._replace(extras={"fp8": Fp8State(torch.ones(16, 2, 1))}))
    assert f"{module}:Fp8State" in (checkpoint.latest(tmp_path) / "index.json").read_text()
    again = fz.compile(step, fz.make_mesh(data=1), backend="eager").restore(tmp_path)
    assert again.extras == {} and checkpoint.structure(tmp_path).extras == {"fp8": None}
    for got, want in zip(tree.leaves(again), tree.leaves(state), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("os:system", "is not a NamedTuple or dataclass"),
        (f"{__name__}:Impostor", "is not a NamedTuple or dataclass"),
        (f"{__name__}:Gone", "not found"),
        (f"{__name__}:test_structure_is_the_saved_tree.<locals>.X", "not found"),
        ("antigravity:fly", "not imported"),
        (f"{__name__}:Scale", "it is a dataclass of (value, growth)"),
        (f"{__name__}:State", "it is a namedtuple of (step, params, opt_state, key, extras)"),
    ],
)
def test_a_class_of_the_tree_is_used_only_if_it_is_what_was_stored(tmp_path: Path, where: str, why: str) -> None:
    checkpoint.save(tmp_path, State(0, Moments(torch.ones(1), torch.ones(1))))

    def swap(content: dict[str, Any]) -> None:
        node = dict(content["skeleton"]["fields"])["params"]
        node["namedtuple"] = where

    edit(checkpoint.latest(tmp_path), swap)
    raises(lambda: checkpoint.structure(tmp_path), where, why, "import the modules")
    assert not Impostor.ran and "antigravity" not in sys.modules
    assert torch.equal(read_whole(tmp_path)["params.mu"], torch.ones(1)), "the tensors are readable all the same"


def test_a_skeleton_is_strict() -> None:
    for node in [
        {"leaf": 1},
        {"leaf": "a", "x": 1},
        {"exec": "x"},
        {"tuple": {}},
        {"dict": [[1.5, None]]},
        [],
        "x",
        {"float": "one"},
    ]:
        with pytest.raises(ValueError, match=r"not a|invalid"):
            treespec.names(node)


# Damage


def edit(directory: Path, change: Any) -> None:
    """Changes an index and seals it again, as an attacker would."""
    content = json.loads((directory / "index.json").read_bytes())
    change(content)
    content["sha256"] = index.digest(content)
    (directory / "index.json").write_text(json.dumps(content))


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_all_damage_is_listed_at_once_with_file_and_leaf(tmp_path: Path, small_chunks: int) -> None:
    whole = State(5, {"a": torch.arange(96.0), "b": torch.arange(96.0), "c": torch.arange(90.0)})
    path = save_on(tmp_path, whole, data=3)
    found = checkpoint.describe(path)
    part = found.parts["params.b"][0]
    flip(path / part.file, part.offset + 64)  # 128 bytes long: a chunk that no other leaf reaches into
    os.truncate(path / found.parts["params.c"][1].file, found.files[found.parts["params.c"][1].file].bytes - 3)
    (path / found.parts["params.a"][2].file).unlink()
    text = raises(
        lambda: checkpoint.verify(tmp_path),
        "rank-00000-of-00003.safetensors: damaged between bytes",
        "params.b",
        "rank-00002-of-00003.safetensors: missing",
    )
    assert "rank-00001-of-00003.safetensors: truncated" in text and "params.c" in text
    wanted = leaves_of(whole, ("data",))
    raises(
        lambda: checkpoint.read(tmp_path, wanted, meshes(data=1)[0]),
        "rank-00001-of-00003.safetensors: truncated",
        "rank-00002-of-00003.safetensors: missing",
    )
    first = meshes(data=3)[0]
    raises(
        lambda: checkpoint.read(tmp_path, {"params.b": wanted["params.b"]}, first),
        part.file,
        "this range contains params.b",
        "restore another step",
    )
    assert torch.equal(
        checkpoint.read(tmp_path, {"params.a": wanted["params.a"]}, first)["params.a"], torch.arange(32.0)
    ), "only the chunks touched matter"


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path, small_chunks: int) -> None:
    checkpoint.save(tmp_path, State(torch.tensor(5), {"a": torch.arange(50.0)}))
    path = checkpoint.latest(tmp_path)
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        for at in sorted({0, 7, 8, size // 2, size - 2, *random.Random(0).sample(range(size - 1), 12)}):
            flip(file, at)
            with pytest.raises(CheckpointError):
                checkpoint.verify(path)
            flip(file, at)
    checkpoint.verify(path)


def damage(path: Path, draw: random.Random) -> str:
    """Changes one file of a checkpoint in one of nine ways. Returns what it did."""
    file = draw.choice(sorted(path.iterdir()))
    raw, kind = bytearray(file.read_bytes()), draw.randrange(9)
    at, to = sorted(draw.sample(range(len(raw) + 1), 2))
    other = draw.choice([p for p in sorted(path.iterdir()) if p != file])
    if kind == 0:
        raw[min(at, len(raw) - 1)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del raw[to:]
    elif kind == 2:
        del raw[at:to]
    elif kind == 3:
        raw[at:to] = bytes(to - at)
    elif kind == 4:
        raw += draw.randbytes(draw.randrange(1, 64))
    elif kind == 5:
        raw[at:to] = draw.randbytes(to - at)
    elif kind == 6:
        raw[at:to] = raw[at:to][::-1]
    elif kind == 7:
        raw[:] = other.read_bytes()
    file.write_bytes(raw)
    if kind == 8:
        file.unlink()
    return f"kind {kind} of {file.name} between {at} and {to}, {other.name}"


@pytest.mark.full(keep=["40"])
@pytest.mark.parametrize("count", [40, 300], ids=str)
def test_random_damage_is_rejected_or_loads_the_same_numbers(tmp_path: Path, small_chunks: int, count: int) -> None:
    whole, draw, rejected = whole_state(), random.Random(count), 0
    path = save_on(tmp_path / "good", whole, data=3)
    want = read_whole(path)
    for number in range(count):
        shutil.copytree(path, bad := tmp_path / str(number) / path.name)
        done = damage(bad, draw)
        with contextlib.suppress(CheckpointError):
            got = read_whole(bad)
            assert got.keys() == want.keys() and all(same(got[n], x) for n, x in want.items()), done
            if all((bad / p.name).read_bytes() == p.read_bytes() for p in path.glob("rank-*")):
                continue
        # Readers skip headers and ranges that they do not need. Checking everything finds any change.
        assert str(bad) in raises(lambda bad=bad: checkpoint.verify(bad)), done
        rejected += 1
        shutil.rmtree(bad)
    assert rejected > 0.9 * count


def test_an_unusable_index_says_why(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, State(1, {"a": torch.ones(3)}))
    good = (path / "index.json").read_bytes()
    cases = {
        good[:-20]: ("corrupt, not JSON",),
        good.replace(b'"step": 1', b'"step": 2'): ("do not match its own sha256",),
        good.replace(b'"version": 1', b'"version": 3'): ("version 3", "update fzero"),
        b"{}": ("not the index of a fzero checkpoint",),
        b"[" * 100_000: ("corrupt",),
        b"\xff\xfe\x00": ("corrupt, not UTF-8: byte 0 is 0xff",),
    }
    for raw, expected in cases.items():
        (path / "index.json").write_bytes(raw)
        raises(lambda expected=expected: checkpoint.describe(tmp_path), "index.json", str(path), *expected)
    (path / "index.json").unlink()
    raises(lambda: checkpoint.describe(path), "index.json: missing", "another step")


def test_an_index_cannot_reach_outside_its_directory_or_contradict_itself(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "ckpt", State(1, {"a": torch.ones(3), "b": torch.ones(2)}))
    good = (path / "index.json").read_bytes()
    name = next(iter(checkpoint.describe(path).files))

    def rename(to: str) -> Any:
        def change(content: dict[str, Any]) -> None:
            content["files"][to] = content["files"].pop(name)
            for leaf in content["leaves"].values():
                for part in leaf["parts"]:
                    part["file"] = to

        return change

    for to in ["/etc/passwd", "../other.safetensors", "..", "a/b", "", ".hidden"]:
        edit(path, rename(to))
        raises(lambda to=to: checkpoint.describe(path), repr(to), "not a plain name in its directory")
        (path / "index.json").write_bytes(good)

    def set_part(key: str, value: Any) -> Any:
        return lambda content: content["leaves"]["params.a"]["parts"][0].update({key: value})

    for change, why in [
        (set_part("file", "other"), "not among its files"),
        (set_part("offset", 10**6), "ends beyond the end"),
        (set_part("start", 1), "do not make up its 3 elements"),
        (set_part("stop", -1), "whole number"),
        (lambda c: c["leaves"]["params.a"].update(shape=[4]), "do not make up its 4 elements"),
        (lambda c: c["leaves"]["params.a"].update(dtype="object"), "KeyError"),
        (lambda c: c["leaves"].pop("params.a"), "different tensors"),
        (lambda c: c["aliases"].update({"params.b": "params.zzz"}), "corrupt"),
        (lambda c: c["files"][name].update(crc32=""), "0 checksums"),
        (lambda c: c.update(files=[]), "corrupt"),
    ]:
        edit(path, change)
        raises(lambda why=why: checkpoint.describe(path), "index.json", why)
        (path / "index.json").write_bytes(good)

    shutil.move(path / name, tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    raises(lambda: checkpoint.describe(path), name, "a link to a file outside of its directory")


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    raises(lambda: checkpoint.describe(tmp_path / "nowhere"), "nowhere does not exist")
    raises(lambda: checkpoint.find(5), "5 is not a path")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    raises(lambda: checkpoint.describe(tmp_path / "file"), "file is not a directory")
    (tmp_path / "root" / ".tmp-step-00000001").mkdir(parents=True)
    raises(lambda: checkpoint.latest(tmp_path / "root"), "no complete checkpoint", ".tmp-step-00000001")
    (tmp_path / "root" / "step-00000003").mkdir()
    raises(lambda: checkpoint.latest(tmp_path / "root"), "no complete checkpoint")
    raises(lambda: checkpoint.read(tmp_path / "root" / "step-00000003", {}, meshes(data=1)[0]), "index.json: missing")
    path = checkpoint.save(tmp_path / "root2", State(1, {"a": torch.ones(3)}))
    for text in ["../root2/step-00000001", "", "\0"]:
        (tmp_path / "root2" / "latest").write_text(text)
        raises(
            lambda: checkpoint.latest(tmp_path / "root2"), "not a complete checkpoint there", "complete: step-00000001"
        )
    (tmp_path / "root2" / "latest").unlink()
    assert checkpoint.latest(tmp_path / "root2") == path


def test_another_models_leaves_are_listed_in_one_error(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path, State(1, {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(4), "d": torch.ones(1)})
    )
    found = checkpoint.describe(tmp_path)
    expected = {
        "params.a": ((3,), torch.float32),
        "params.b": ((4,), torch.float32),
        "params.c": ((4,), torch.bfloat16),
        "params.e": ((5,), torch.int64),
    }
    text = raises(
        lambda: checkpoint.check(found, expected),
        "4 of 5 tensors differ",
        "params.e: missing in the checkpoint, expected int64[5]",
        "params.d: unexpected, the checkpoint has float32[1]",
        "params.b: different shape, the checkpoint has float32[2, 2], expected float32[4]",
        "params.c: different dtype, the checkpoint has float32[4], expected bfloat16[4]",
    )
    assert "params.a" not in text


def saved_run(root: Path, step: int, size: int = 3) -> str | None:
    """Saves as a process does that has saved nothing yet. Returns the run of the checkpoint."""
    run_record._runs.clear()
    return checkpoint.describe(checkpoint.save(root, State(step, {"a": torch.ones(size)}))).run


def test_a_run_that_takes_over_a_directory_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = saved_run(tmp_path, 250)
    # started again, from the checkpoint or from a state that was kept elsewhere
    assert saved_run(tmp_path, 250) == saved_run(tmp_path, 300) == saved_run(tmp_path, 500) == first is not None
    assert not caplog.messages
    second = saved_run(tmp_path, 30)
    said = (
        f"step-00000030 is now the latest checkpoint in {tmp_path}, where step-00000500 was, which is of a later step"
    )
    (text,) = caplog.messages
    assert second != first and said in text and text.endswith("Fix: save another run to another directory")
    third = saved_run(tmp_path, 40, size=4)
    assert (
        third not in (first, second)
        and "step-00000030 was, which has different tensors (1 differ)" in caplog.messages[1]
    )
    path = checkpoint.save(tmp_path, State(50, {"a": torch.ones(4)}))  # the next save of the same process
    assert checkpoint.describe(path).run == third and len(caplog.messages) == 2
    shutil.rmtree(tmp_path)
    assert saved_run(tmp_path, 1) not in (first, second, third) and len(caplog.messages) == 2


def test_without_latest_a_run_is_not_guessed(tmp_path: Path) -> None:
    """The highest step is the newest one only of one run."""
    for step in (400, 500):
        saved_run(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000500"
    (tmp_path / "latest").write_text("step-00000500")
    second = saved_run(tmp_path, 30)
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000030"
    (tmp_path / "latest").unlink()
    raises(
        lambda: checkpoint.find(tmp_path),
        "has checkpoints of several runs, and nothing says which one is meant (no file latest)",
        f"step-00000030: the run {second}",
        "step-00000500: the run ",
        f"Fix: write the name of one of them to {tmp_path / 'latest'}, or give that directory",
    )
    assert checkpoint.find(tmp_path / "step-00000030") == tmp_path / "step-00000030"
    (tmp_path / "latest").write_text("step-00000030")
    assert checkpoint.latest(tmp_path).name == "step-00000030"


def test_checkpoints_without_a_run_are_read_and_continued(tmp_path: Path) -> None:
    """As an older fzero wrote them; and it reads those with one, since it passes unknown entries over."""
    for step in (1, 2):
        run_record._runs.clear()
        path = checkpoint.save(tmp_path, State(step, {"a": torch.ones(3)}))
        content = parsed((path / "index.json").read_bytes())
        (path / "index.json").write_bytes(index.dump({k: v for k, v in content.items() if k not in ("run", "sha256")}))
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000002" and checkpoint.describe(tmp_path).run is None
    (tmp_path / "latest").write_text("step-00000002")
    assert saved_run(tmp_path, 3) is not None
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000003"


def test_dtypes_are_exact(tmp_path: Path) -> None:
    save_on(tmp_path, State(1, {"w": torch.randn(9)}), data=2)
    leaf = Leaf("w", "params", (9,), Layout(torch.bfloat16, ("data",)))
    for mesh in meshes(data=2):
        raises(
            lambda mesh=mesh: checkpoint.read(tmp_path, {"params.w": leaf}, mesh),
            "params.w: different dtype",
            "Fix: give the state the stored dtypes",
        )
    raises(lambda: checkpoint.read(tmp_path, {"params.x": leaf}, meshes(data=1)[0]), "params.x: missing")


# Saving and its failures


def test_keep_deletes_only_older_ones_of_its_run(tmp_path: Path) -> None:
    def save(step: int, keep: int) -> list[int]:
        checkpoint.save(tmp_path, State(step, {"a": torch.full((3,), float(step))}), keep=keep)
        assert checkpoint.latest(tmp_path).name == f"step-{step:08d}"
        return sorted(int(p.name[5:]) for p in tmp_path.iterdir() if p.name != "latest")

    assert [save(step, 2) for step in (1, 2, 3, 50)][-1] == [3, 50]
    # Training goes back to step 3 and continues: what was saved after it then belongs to another run.
    assert save(4, 2) == [3, 4, 50]
    assert save(5, 1) == [3, 5, 50]
    assert save(51, 2) == [3, 5, 50, 51], "the other run's checkpoint of step 50 is not counted"
    assert save(52, 1) == [3, 50, 52]


def test_two_jobs_in_one_directory_are_rejected_and_keep_their_own_checkpoints(tmp_path: Path) -> None:
    """The second one is warned when it takes over; the first one finds a step that it has not saved."""
    state = State(10, {"a": torch.ones(3)})
    ours, theirs = run_record.RunRecord(), run_record.RunRecord()
    for run, step in ((ours, 10), (theirs, 2), (theirs, 4)):
        saving.carry_out(saving.begin(world(), tmp_path, state._replace(step=step), saving.SaveOptions(keep=1), run))
    assert ours.last is not None and theirs.last is not None and ours.last.run != theirs.last.run
    raises(
        lambda: saving.begin(world(), tmp_path, state._replace(step=20), saving.SaveOptions(), ours),
        f"another run saves to {tmp_path}, too",
        f"step-00000004 was saved by the run {theirs.last.run}",
        "Fix: give each run a directory of its own",
    )
    saving.carry_out(saving.begin(world(), tmp_path, state._replace(step=6), saving.SaveOptions(keep=1), theirs))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000006", "step-00000010"]


def test_a_stale_step_of_another_run_is_not_taken_where_latest_was_deleted(tmp_path: Path) -> None:
    saved_run(tmp_path, 100)
    saved_run(tmp_path, 10)
    newest = checkpoint.latest(tmp_path)
    saved_run(tmp_path, 20)
    shutil.rmtree(tmp_path / "step-00000020")
    raises(
        lambda: checkpoint.find(tmp_path),
        "has checkpoints of several runs, and nothing says which one is meant (latest names step-00000020, which was "
        "deleted)",
        f"Fix: write the name of one of them to {tmp_path / 'latest'}, or give that directory",
    )
    shutil.rmtree(tmp_path / "step-00000100")
    assert checkpoint.find(tmp_path) == newest, "those that are left are of one run"


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoint.save(tmp_path, State(7, {"a": torch.full((3,), value)}))
    assert read_whole(tmp_path)["params.a"].tolist() == [2.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007"]
    # as a kill between two renames leaves it
    os.rename(tmp_path / "step-00000007", tmp_path / "step-00000007.replaced")
    assert read_whole(tmp_path)["params.a"].tolist() == [2.0] * 3
    checkpoint.save(tmp_path, State(8, {"a": torch.ones(3)}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000007", "step-00000008"]


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: int, when: Any) -> Any:
    """`os.<name>` fails where `when(path of its descriptor or its path)`."""
    real = getattr(os, name)

    def fake(*args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
        if when(str(path)):
            raise OSError(error, os.strerror(error), str(path))
        return real(*args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(os, name, fake)
        yield


@pytest.mark.parametrize(
    ("call", "error", "where", "who"),
    [
        ("write", errno.ENOSPC, "rank-00001-of-00003.safetensors", "rank 1: OSError: [Errno 28]"),
        ("fsync", errno.EIO, "rank-00002-of-00003.safetensors", "rank 2: OSError: [Errno 5]"),
        ("open", errno.EACCES, "rank-00000-of-00003.safetensors", "rank 0: PermissionError"),
        ("write", errno.ENOSPC, "index.json", "rank 0: OSError"),
        ("write", errno.ENOSPC, ".tmp-latest", "rank 0: OSError"),
        ("rename", errno.EIO, ".tmp-step-00000002", "rank 0: OSError"),
        ("mkdir", errno.EACCES, ".tmp-step-00000002", "rank 0: PermissionError"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, where: str, who: str
) -> None:
    whole = whole_state(1)
    save_on(tmp_path, whole, data=3)
    before = sorted(p.name for p in tmp_path.iterdir())
    mesh = meshes(data=3)
    with failing(monkeypatch, call, error, lambda path: where in Path(path).name):
        out = as_ranks(3, lambda r: save_as(r, tmp_path, on_rank(whole_state(2), mesh[r.rank], ("data",))))
    for caught in out:
        assert isinstance(caught, CheckpointError), out
        assert who in str(caught) and str(tmp_path) in str(caught) and "\nFix: " in str(caught)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert checkpoint.verify(tmp_path).step == 1
    save_on(tmp_path, whole_state(2), data=3)
    assert checkpoint.verify(tmp_path).step == 2


def test_several_failures_and_divergent_states_name_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = meshes(data=3)
    states = [on_rank(State(1, {"a": torch.ones(5)}), m, ("data",)) for m in mesh]
    with failing(monkeypatch, "write", errno.ENOSPC, lambda path: "rank-00000" in path or "rank-00002" in path):
        out = as_ranks(3, lambda r: save_as(r, tmp_path, states[r.rank]))
    assert all("rank 0: OSError" in str(e) and "rank 2: OSError" in str(e) and "rank 1:" not in str(e) for e in out)
    other = [*states[:2], states[2]._replace(step=2)]
    out = as_ranks(3, lambda r: save_as(r, tmp_path, other[r.rank]))
    assert all(isinstance(e, CheckpointError) and "the state of rank 2 differs" in str(e) for e in out)
    wrong = [*states[:2], states[0]]
    out = as_ranks(3, lambda r: save_as(r, tmp_path, wrong[r.rank]))
    assert all(
        isinstance(e, CheckpointError)
        and "rank 2: " in str(e)
        and "it is rank 0's on a mesh of 3, saved by rank 2 of 3" in str(e)
        for e in out
    )
    assert not list(tmp_path.iterdir())


def test_drafts_of_two_jobs_do_not_touch_each_other_and_the_last_rename_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job saves the same step while this one writes its files."""
    ours, theirs = (State(2, {"a": torch.full((2,), value)}) for value in (1.0, 2.0))
    commit = saving.commit

    def after_the_other(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(saving, "commit", commit)
        assert len(list(tmp_path.glob(".tmp-step-00000002.*"))) == 1
        staging = saving.begin(world(), tmp_path, theirs, saving.SaveOptions(), run_record.RunRecord())
        assert len(list(tmp_path.glob(".tmp-step-00000002.*"))) == 2
        saving.carry_out(staging)
        assert read_whole(tmp_path)["params.a"].tolist() == [2.0, 2.0]
        return commit(*args, **kwargs)

    monkeypatch.setattr(saving, "commit", after_the_other)
    assert checkpoint.save(tmp_path, ours) == checkpoint.find(tmp_path)
    assert read_whole(tmp_path)["params.a"].tolist() == [1.0, 1.0] and checkpoint.verify(tmp_path).step == 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002"]


def test_only_drafts_older_than_an_hour_are_removed(tmp_path: Path) -> None:
    hour = 3600
    for name, age in (("old", 2 * hour), ("new", hour // 2), ("written", 2 * hour)):
        (staging := tmp_path / f".tmp-step-00000007.{name}").mkdir()
        (staging / "rank").write_bytes(b"1")
        for path in (staging / "rank", staging):
            os.utime(path, (time.time() - age,) * 2)
    os.utime(tmp_path / ".tmp-step-00000007.written" / "rank")  # a staged file is still written to
    checkpoint.save(tmp_path, State(1, {"a": torch.ones(2)}))
    left = [".tmp-step-00000007.new", ".tmp-step-00000007.written", "latest", "step-00000001"]
    assert sorted(os.listdir(tmp_path)) == left


def test_the_newest_whole_one_is_found_where_latest_was_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, State(step, {"a": torch.ones(2)}))
    shutil.rmtree(tmp_path / "step-00000003")
    found = checkpoint.find(tmp_path)
    assert found is not None and found.name == checkpoint.latest(tmp_path).name == "step-00000002"
    assert "names step-00000003, which was deleted" in caplog.text
    (tmp_path / "step-00000003").mkdir()  # it is there, and damaged
    raises(lambda: checkpoint.find(tmp_path), "names 'step-00000003', which is not a complete checkpoint there")


def test_files_are_durable_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    for name in ("fsync", "rename", "replace"):
        real = getattr(os, name)

        def spy(*args: Any, name: str = name, real: Any = real) -> Any:
            file = Path(os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[0]).name
            events.append((name, re.sub(r"(\.tmp-[a-z0-9-]+)\.[0-9a-f]{8}$", r"\1", file)))  # a name of its own
            return real(*args)

        monkeypatch.setattr(os, name, spy)
    checkpoint.save(tmp_path / "root", State(1, {"a": torch.ones(2)}))
    at = {event: i for i, event in reversed(list(enumerate(events)))}
    renamed, pointed = at["rename", ".tmp-step-00000001"], at["replace", ".tmp-latest"]
    for file in ("rank-00000-of-00001.safetensors", "index.json", ".tmp-step-00000001", ".tmp-latest"):
        assert at["fsync", file] < renamed
    assert [e for e in events[renamed:] if e[0] != "x"] == [
        ("rename", ".tmp-step-00000001"),
        ("fsync", "root"),
        ("replace", ".tmp-latest"),
        ("fsync", "root"),
    ]
    assert pointed == len(events) - 2


KILLS = """
    import os, signal, sys, warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    from typing import Any, NamedTuple
    import torch
    from fzero import checkpoint
    from fzero.checkpoint import run_record
    from fzero.sharding.layout import Layout, Leaf
    from fzero.mesh import Mesh, make_mesh
    class State(NamedTuple):
        step: Any
        params: Any
    CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "close")
    LEAF = {"params.w": Leaf("w", "params", (9,), Layout(torch.float32))}
    def state(step, value):
        return State(step, {"w": torch.full((9,), float(value))})
    def killed_at(k, act):
        "In a child: dies at its k-th system call. Returns whether it got so far."
        pid = os.fork()
        if pid == 0:
            left = [k]
            for name in CALLS:
                def fake(*a, real=getattr(os, name), **kw):
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*a, **kw)
                setattr(os, name, fake)
            act()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    def now(root):
        found = checkpoint.verify(root)
        mesh = Mesh({"data": 1}, 0, torch.device("cpu"))
        return found.step, checkpoint.read(root, LEAF, mesh)["params.w"].tolist()[0]
    base = Path(sys.argv[1])
    points = 0
    for second in (2, 1):  # the step after, and the same step again
        k = 0
        while True:
            root = base / f"{second}-{k}"
            checkpoint.save(root, state(1, 1.0))
            died = killed_at(k, lambda: checkpoint.save(root, state(second, 2.0), keep=1))
            got = now(root)
            assert got in ((1, 1.0), (second, 2.0)), (second, k, got)
            names = {p.name for p in root.iterdir()}
            assert "latest" in names
            for place in [q for p in root.glob(".tmp-*") for q in (p, *p.glob("*"))]:
                os.utime(place, (0, 0))
            run_record._runs.clear()  # as in a process that starts after the one that was killed
            checkpoint.save(root, state(3, 3.0))  # clears what the kill left, as it is old
            assert now(root) == (3, 3.0)
            rest = {p.name for p in root.iterdir()}
            assert rest <= {"latest", "step-00000001", "step-00000002", "step-00000003"}, rest
            k += 1
            if not died:
                assert got == (second, 2.0)
                break
        points += k
    print(points)
"""


@pytest.mark.full
def test_a_kill_at_any_system_call_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    done = run_script(KILLS, str(tmp_path))
    assert int(done) > 40, "few system calls were seen: is os.* still what writes?"


def run_script(text: str, *args: str, timeout: float = 120.0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOOP = """
    import sys
    from collections import namedtuple
    import torch
    from fzero import checkpoint
    State = namedtuple("State", "step params")
    print("ready", flush=True)
    for step in range(1, 100000):
        checkpoint.save(sys.argv[1], State(step, [torch.full((300_000,), float(step))]), keep=2)
"""


def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LOOP), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        while not (tmp_path / "latest").exists():
            time.sleep(0.01)
        time.sleep(0.3 + random.random() / 10)
        process.send_signal(signal.SIGKILL)
    step = checkpoint.verify(tmp_path).step
    assert read_whole(tmp_path)["params.0"].unique().tolist() == [float(step)]
    checkpoint.save(tmp_path, State(step + 1, [torch.ones(300_000)]), keep=1)
    left = sorted(
        p.name for p in tmp_path.iterdir() if not p.name.startswith(".tmp-")
    )  # a young staging directory is left alone
    assert left == ["latest", f"step-{step + 1:08d}"]


def act_in_processes(root: Path) -> None:
    mesh = make_mesh(device="cpu", data=2, timeout=60)
    leaf = Leaf("w", "params", (7,), Layout(torch.float32, ("data",)))
    whole = torch.arange(7.0)
    state = State(4, {"w": place(shard(whole, leaf, mesh), leaf, mesh)})
    path = checkpoint.save(root, state)
    assert checkpoint.verify(path).step == 4
    assert torch.equal(checkpoint.read(root, {"params.w": leaf}, mesh)["params.w"], shard(whole, leaf, mesh))
    with (
        pytest.MonkeyPatch.context() as patch,
        failing(patch, "write", errno.ENOSPC, lambda p: mesh.rank == 1 and ".tmp-" in p),
    ):
        raises(lambda: checkpoint.save(root, state._replace(step=5)), "rank 1: OSError")
    raises(lambda: checkpoint.save(root, state._replace(step=5 + mesh.rank)), "the state of rank 1 differs")
    checkpoint.save(root, State(6, {"w": torch.ones(3)}))  # of a plain step: whole on both
    assert checkpoint.describe(root).leaves == {"params.w": ((3,), torch.float32)}
    torch.distributed.barrier()
    if mesh.rank == 0:
        os.truncate(path / "rank-00001-of-00002.safetensors", 20)
    torch.distributed.barrier()
    # though only rank 1 needs that file
    raises(lambda: checkpoint.read(path, {"params.w": leaf}, mesh), "rank 1: ", "truncated")


def test_two_real_processes(tmp_path: Path, run_ranks: Any) -> None:
    run_ranks(2, act_in_processes, tmp_path)


# Export, and other people's files


def test_export_is_what_hugging_face_reads(tmp_path: Path, small_chunks: int) -> None:
    whole = whole_state()
    save_on(tmp_path / "ckpt", whole, data=3)
    (file,) = checkpoint.export(tmp_path / "ckpt", tmp_path / "one")
    assert file == tmp_path / "one" / "model.safetensors"
    params = whole_leaves(whole.params)
    loaded = load_file(file)
    assert loaded.keys() == params.keys() and all(same(loaded[n], params[n]) for n in params)
    with safe_open(file, framework="pt") as f:
        assert f.metadata()["format"] == "pt"

    files = checkpoint.export(tmp_path / "ckpt", tmp_path / "many", max_shard_bytes=150)
    assert [f.name for f in files[:-1]] == [
        f"model-{i + 1:05d}-of-{len(files) - 1:05d}.safetensors" for i in range(len(files) - 1)
    ]
    assert files[-1].name == "model.safetensors.index.json" and sorted(files) == sorted((tmp_path / "many").iterdir())
    content = json.loads(files[-1].read_text())
    assert content["metadata"]["total_size"] == sum(p.numel() * p.element_size() for p in params.values())
    assert content["weight_map"].keys() == params.keys()
    for name, where in content["weight_map"].items():
        assert same(load_file(tmp_path / "many" / where)[name], params[name])


def test_export_converts_floats_and_takes_any_prefix(tmp_path: Path, small_chunks: int) -> None:
    whole = State(
        1, {"w": torch.randn(700), "n": torch.arange(5)}, Moments({"w": torch.randn(3)}, None), torch.tensor([1, 2])
    )
    save_on(tmp_path / "ckpt", whole, data=2)
    checkpoint.export(tmp_path / "ckpt", tmp_path / "a", dtype=torch.bfloat16)
    got = load_file(tmp_path / "a" / "model.safetensors")
    assert same(got["w"], whole.params["w"].bfloat16()) and same(got["n"], whole.params["n"])
    checkpoint.export(tmp_path / "ckpt", tmp_path / "b", prefix="opt_state.mu")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == {"w"}
    checkpoint.export(tmp_path / "ckpt", tmp_path / "c", prefix="key")
    assert torch.equal(load_file(tmp_path / "c" / "model.safetensors")["key"], torch.tensor([1, 2]))
    checkpoint.export(tmp_path / "ckpt", tmp_path / "d", prefix="")
    assert torch.equal(load_file(tmp_path / "d" / "model.safetensors")["opt_state.mu.w"], whole.opt_state.mu["w"])


def test_export_of_tied_leaves_keeps_the_first_and_says_so(tmp_path: Path) -> None:
    table = torch.randn(4, 2)
    checkpoint.save(tmp_path / "ckpt", State(1, {"embed": table, "head": table, "mid": torch.ones(1)}))
    for limit in (16, 10**9):
        out = tmp_path / str(limit)
        checkpoint.export(tmp_path / "ckpt", out, max_shard_bytes=limit)
        step = fz.train_step(lambda p, x: sum((leaf * x).sum() for leaf in p.values()), fz.optim.sgd(0.1))
        params = fz.compile(step, fz.make_mesh(data=1), backend="eager").load(out).params
        assert params["embed"] is params["head"] and torch.equal(params["head"], table)
    assert json.loads((tmp_path / "16" / "model.safetensors.index.json").read_text())["metadata"]["head"] == "embed"
    assert "head" not in load_file(tmp_path / "1000000000" / "model.safetensors")


def test_export_replaces_nothing_and_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path / "ckpt", State(1, {"a": torch.randn(100), "b": torch.randn(100)}))
    out = tmp_path / "hf"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with failing(monkeypatch, "write", errno.ENOSPC, lambda p: "model-00002" in p):
        raises(lambda: checkpoint.export(path, out, max_shard_bytes=400), "No space left", str(out))
    assert [p.name for p in out.iterdir()] == ["config.json"]
    checkpoint.export(path, out, max_shard_bytes=400)
    assert len(list(out.iterdir())) == 4
    raises(lambda: checkpoint.export(path, out), "holds a model already: model.safetensors.index.json")
    raises(
        lambda: checkpoint.export(path, tmp_path / "x", prefix="param", max_shard_bytes=0, dtype=torch.int8),
        "no tensor is under it; the prefixes are params",
        "max_shard_bytes=0",
        "dtype=torch.int8",
    )
    (file,) = [f for f in path.iterdir() if f.suffix == ".safetensors"]
    flip(file, file.stat().st_size - 1)
    raises(lambda: checkpoint.export(path, tmp_path / "y"), file.name, "damaged", "params.b")
    os.truncate(file, 10)
    raises(lambda: checkpoint.export(path, tmp_path / "z"), file.name, "truncated")
    assert not list((tmp_path / "y").iterdir()) and not (tmp_path / "z").exists()


def test_broken_files(tmp_path: Path) -> None:
    raises(lambda: entries_of(tmp_path), "neither model.safetensors.index.json nor model.safetensors")
    raises(lambda: entries_of(tmp_path / "x"), "x does not exist")
    save_file({"a": torch.ones(4)}, tmp_path / "f1.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "f2.safetensors")
    os.truncate(tmp_path / "f1.safetensors", 90)
    table = tmp_path / "model.safetensors.index.json"
    table.write_text(json.dumps({"weight_map": {"a": "f1.safetensors", "c": "f2.safetensors", "d": "f3.safetensors"}}))
    raises(
        lambda: entries_of(tmp_path),
        "f1.safetensors: 90 bytes",
        "f2.safetensors: c is not in it",
        "f3.safetensors: missing",
    )
    for name in ("../f2.safetensors", "/etc/passwd", ".."):
        table.write_text(json.dumps({"weight_map": {"b": name}}))
        raises(lambda: entries_of(tmp_path), repr(name), "outside its directory")
    table.write_text("{")
    raises(lambda: entries_of(tmp_path), "cannot be parsed")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    for raw in (b"", b"\xff" * 20, len(header).to_bytes(8, "little") + header + b"\0" * 4, b"\2\0\0\0\0\0\0\0[]"):
        (tmp_path / "bad.safetensors").write_bytes(raw)
        raises(lambda: entries_of(tmp_path / "bad.safetensors"), "bad.safetensors: ")


def test_a_step_under_the_name_of_another(tmp_path: Path) -> None:
    saving.save(tmp_path, whole_state(step=15))
    moved = tmp_path / "step-00000020"
    (tmp_path / "step-00000015").rename(moved)
    (tmp_path / "latest").write_text(moved.name)
    for path in (tmp_path, moved):
        with pytest.raises(CheckpointError, match=r"index.json: of step 15, in a directory named for step 20\n"):
            checkpoint.describe(path)
    moved.rename(tmp_path / "the best one")  # a name of another form says nothing
    assert checkpoint.describe(tmp_path / "the best one").step == 15


def test_a_checkpoint_of_another_optimizer_lists_every_tensor_that_differs(tmp_path: Path) -> None:
    model = fz.functionalize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))

    def train(optimizer: Any) -> Any:
        return fz.compile(model.train_step(optimizer, own_loss), fz.make_mesh(), backend="eager")

    adam = train(optim.adamw(0.1))
    fz.checkpoint.save(tmp_path, adam.init(model.params))
    with pytest.raises(FzeroError, match="31 of 43 tensors differ") as raised:
        train(optim.sgd(0.1, momentum=0.9)).restore(tmp_path)
    _, *lines, _ = str(raised.value).splitlines()
    assert len(lines) == 31
    assert "  opt_state.0.trace.0.bias: missing in the checkpoint, expected float32[4]" in lines
    assert "  opt_state.mu.0.weight: unexpected, the checkpoint has float32[4, 4]" in lines


def _saves_alone(folder: str) -> str:
    """Rank 0 saves, as scripts of other libraries do; the other goes on."""
    mesh = fz.make_mesh(timeout=2)
    train = fz.compile(fz.shard_params(fz.train_step(squares, optim.sgd(0.1))), mesh, backend="eager")
    state = train.init({"w": torch.eye(4)})
    fz.checkpoint.save(f"{folder}/run", state)
    fz.checkpoint.save(f"{folder}/run", state)
    (waits := Path(folder) / "waits").mkdir(exist_ok=True)
    with ending(str(waits), last=mesh.rank == 1):
        if mesh.rank == 0:
            try:
                fz.checkpoint.save(f"{folder}/alone", state)
            except fz.errors.DivergenceError as error:
                return str(error)
    return ""


@pytest.mark.full
def test_a_save_that_a_rank_does_not_join_names_it(run_ranks: Any, tmp_path: Path) -> None:
    text, _ = run_ranks(2, _saves_alone, str(tmp_path))
    assert (
        "rank 1 timed out after 2 s" in text
        and text.startswith("fzero.checkpoint.save: ")
        and "call checkpoint.save on every rank, outside of `if rank == 0`" in text
    )
    assert fz.checkpoint.find(tmp_path / "alone") is None and fz.checkpoint.latest(tmp_path / "run") is not None


def test_other_things_for_a_path() -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.sgd(0.1))
    train, state = fz.compile(step, make_mesh(), backend="eager"), step.init({"w": torch.ones(40, 40)})
    for act, said in (
        (lambda: train.restore(3), "3 is not a path"),
        (lambda: checkpoint.save(3, state), "3 is not a path"),
        (lambda: checkpoint.save(__file__, state), f"{__file__} is not a directory"),
        (lambda: checkpoint.save(state, "run"), "State is not a path\nFix: "),
    ):
        with pytest.raises(FzeroError, match=rf"^fzero.checkpoint(.save)?: {re.escape(said)}"):
            act()
