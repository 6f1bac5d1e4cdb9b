"""`train.load`: safetensors files straight into shards on any tier, each byte read once, or refused by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fzero as fz
from fzero.checkpoint import weight_loading
from fzero.sharding.layout import leaf_of

SHAPES = {
    "embed.weight": (1000, 257),
    "layers.0.w": (257, 513),
    "layers.0.n": (257,),
    "layers.1.w": (257, 513),
    "layers.1.n": (257,),
    "scale": (),
    "none": (0, 3),
}
LAYOUTS: dict[str, Any] = {
    "plain": (),
    "whole": (fz.data_parallel(),),
    "state": (fz.shard_opt_state(),),
    "shards": (fz.shard_params(),),
    "mixed": (fz.shard_params(where=lambda path, leaf: "layers" in path),),
}


def values(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {n: fz.random.normal(fz.random.key(i), s).to(dtype) for i, (n, s) in enumerate(SHAPES.items())}


def like(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same model as a tree."""
    x = {n: torch.empty(s, dtype=dtype, device="meta") for n, s in SHAPES.items()}
    layers = [{k: x[f"layers.{i}.{k}"] for k in ("w", "n")} for i in range(2)]
    return {"embed": {"weight": x["embed.weight"]}, "layers": layers, "scale": x["scale"], "none": x["none"]}


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return sum((x.float() * batch.mean()).square().sum() for x in fz.tree.leaves(params))  # type: ignore[return-value]


def write(path: Path, tensors: dict[str, torch.Tensor], num_files: int = 2) -> Path:
    """A directory as Hugging Face's libraries write it."""
    path.mkdir(exist_ok=True)
    names = list(tensors)
    files = {f"model-{i + 1:05d}-of-{num_files:05d}.safetensors": names[i::num_files] for i in range(num_files)}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, path / file)
    weight_map = {n: file for file, held in files.items() for n in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def compiled(mesh: fz.Mesh, *transforms: Any) -> fz.CompiledStep:
    step = fz.train_step(loss_fn, fz.optim.adamw(1e-3))
    return fz.compile(fz.compose(*transforms)(step), mesh, backend="eager")


def whole(train: fz.CompiledStep, state: Any) -> dict[str, torch.Tensor]:
    params = train.gather(state).params
    return dict(zip(fz.tree.names(params), fz.tree.leaves(params), strict=True))


def differing(path: str, axes: dict[str, int], name: str, window: int) -> tuple[list[str], int]:
    """On every rank: the leaves that are not those of the files, and the bytes that were read."""
    weight_loading.WINDOW = window
    nbytes, preadv = 0, os.preadv

    def counting(*args: Any) -> int:
        nonlocal nbytes
        got = preadv(*args)
        nbytes += got
        return got

    train = compiled(fz.make_mesh(**axes), *LAYOUTS[name])
    os.preadv = counting
    try:
        state = train.load(path, like())
    finally:
        os.preadv = preadv
        weight_loading.WINDOW = 4 << 20
    found, want = whole(train, state), values()
    wrong = [n for n, x in want.items() if not torch.equal(found[n], x.float())]
    started = compiled(train.mesh, *LAYOUTS[name]).init(fz.tree.map(lambda x: x, nested(want)))
    for (path_, a), b in zip(named(state), fz.tree.leaves(started), strict=True):
        if leaf_of(a)[0] != leaf_of(b)[0] or not torch.equal(a, b):
            wrong.append(path_)
    return wrong, nbytes


def nested(x: dict[str, torch.Tensor]) -> Any:
    found = {n: v.float() for n, v in x.items()}
    flat, names = fz.tree.flatten(like()), fz.tree.names(like())
    return fz.tree.unflatten(flat[1], [found[n] for n in names])


def named(state: Any) -> list[tuple[str, torch.Tensor]]:
    return list(zip(fz.tree.paths(state, "state"), fz.tree.leaves(state), strict=True))


@pytest.mark.parametrize("window", [4 << 20, 1 << 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank(tmp_path: Path, name: str, window: int) -> None:
    path = write(tmp_path, values())
    size = sum(x.nbytes for x in values().values())
    assert differing(str(path), {"data": 1}, name, window) == ([], size)


@pytest.mark.full(keep=["whole-65536"])
@pytest.mark.parametrize("window", [4 << 20, 1 << 16])
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "plain"])
def test_ranks_together_read_each_byte_once(run_ranks: Any, tmp_path: Path, name: str, window: int) -> None:
    path = write(tmp_path, values(), 3)
    size = sum(x.nbytes for x in values().values())
    found = run_ranks(3, differing, str(path), {"data": 3}, name, window)
    assert [wrong for wrong, _ in found] == [[]] * 3
    read = [nbytes for _, nbytes in found]
    assert sum(read) == size and max(read) <= size / 3 * 1.1 + 4096


def replicas(path: str) -> list[str]:
    train = compiled(fz.make_mesh(replica=2, data=2), fz.data_parallel(axis="replica"), fz.shard_params(axis="data"))
    found = whole(train, train.load(path, like()))
    return [n for n, x in values().items() if not torch.equal(found[n], x.float())]


def test_replicas_of_shards(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(4, replicas, str(write(tmp_path, values()))) == [[]] * 4


OFFLOADS = {
    "host": lambda path: fz.offload("cpu", ("params", "opt_state")),
    "disk": lambda path: fz.offload("nvme", ("params", "opt_state"), path=path),
}


def offloaded(path: str, scratch: str, tier: str, precision: str | None) -> list[str]:
    mixed = (fz.mixed_precision(precision),) if precision else ()
    train = compiled(fz.make_mesh(data=-1), fz.shard_params(), OFFLOADS[tier](scratch), *mixed)
    state = train.load(path, like())
    tiers = {leaf_of(x)[0].layout.tier for x in fz.tree.leaves(state.params)}
    found = whole(train, state)
    wrong = [n for n, x in values().items() if not torch.equal(found[n], x.float())]
    train(state, torch.ones(2, 1))
    return wrong + [t for t in tiers if t != tier]


@pytest.mark.full
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("tier", OFFLOADS)
def test_tiers(run_ranks: Any, tmp_path: Path, tier: str, precision: str | None) -> None:
    path, scratch = write(tmp_path / "hf", values()), tmp_path / "scratch"
    scratch.mkdir()
    assert run_ranks(2, offloaded, str(path), str(scratch), tier, precision) == [[], []]


MEMORY = """
import os, sys, torch, fzero as fz
from fzero.sharding.layout import leaf_of

def used(field):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(field)) * 1024

path, scratch, *tiers = sys.argv[1:]
import fzero.compiler.lower, torch._dynamo  # once
for tier in tiers:  # each in a process of its own
    if not os.fork():
        break
    assert os.wait()[1] == 0, tier
else:
    raise SystemExit
shapes = {f"w{i}": (4096, 4096) for i in range(5)}
loss = lambda p, x: sum((w * x.mean()).sum() for w in p.values())
moves = {
    "device": (),
    "host": (fz.offload("cpu", ("params", "opt_state")),),
    "disk": (fz.offload("nvme", ("params", "opt_state"), path=scratch),),
}[tier]
train = fz.compile(fz.compose(*moves)(fz.train_step(loss, fz.optim.sgd(1e-3))), fz.make_mesh(data=1), backend="eager")
like = {n: torch.empty(s, device="meta") for n, s in shapes.items()}
warm = {"w": torch.empty(4, 4, device="meta")}
from safetensors.torch import load_file, save_file
save_file({"w": torch.ones(4, 4)}, scratch + "/warm.safetensors")
fz.compile(fz.compose(*moves)(fz.train_step(loss, fz.optim.sgd(1e-3))), train.mesh, backend="eager").load(
    scratch + "/warm.safetensors", warm
)
before = used("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
state = train.load(path, like)
rests = sum(x.nbytes for x in state.params.values() if not x.is_meta)
print(tier, used("VmHWM") - before - rests)
"""


@pytest.mark.full
def test_memory(tmp_path: Path) -> None:
    """5 leaves of 32 MiB, in bf16, become 5 of 64 MiB."""
    save_file({f"w{i}": torch.ones(4096, 4096).bfloat16() for i in range(5)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(tmp_path), "device", "host", "disk"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown = dict(line.split() for line in done.stdout.splitlines())
    assert grown.keys() == {"device", "host", "disk"} and all(int(n) <= 64 << 20 for n in grown.values()), grown


def test_missing_and_left_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    have = values()
    have["other"] = torch.ones(2)
    del have["layers.1.w"], have["scale"]
    path = write(tmp_path, have)
    train = compiled(fz.make_mesh(data=1), fz.shard_params())

    def init(key: torch.Tensor) -> Any:
        return fz.tree.map_with_path(
            lambda path, x: fz.random.normal(fz.random.fold_in(key, len(path)), x.shape), like()
        )

    key = fz.random.key(5)
    with caplog.at_level(logging.WARNING, "fzero"):
        found = whole(train, train.load(path, init, key))
    assert "2 of 7 tensors are not in" in caplog.text and "layers.1.w, scale" in caplog.text
    assert "1 tensors of" in caplog.text and "not used: other" in caplog.text
    begun = dict(zip(fz.tree.names(like()), fz.tree.leaves(init(key)), strict=True))
    for n in SHAPES:
        assert torch.equal(found[n], have[n].float() if n in have else begun[n]), n
    # from a tree with values
    tree = fz.tree.map(lambda x: torch.full(x.shape, 7.0), like())
    found = whole(train, train.load(path, tree))
    assert (found["layers.1.w"] == 7).all() and torch.equal(found["embed.weight"], have["embed.weight"].float())
    with pytest.raises(fz.errors.CheckpointError) as caught:
        train.load(path, like())
    assert "layers.1.w: missing in the files, and given without" in str(caught.value) and "scale: " in str(caught.value)


def test_names_and_ties(tmp_path: Path) -> None:
    w, v = torch.randn(4, 3), torch.randn(4)
    save_file({"model.embed": w, "v": v}, tmp_path / "model.safetensors")
    train = compiled(fz.make_mesh(data=1))
    tied = torch.empty(4, 3, device="meta")
    params = {"embed": tied, "head": tied, "v": torch.empty(4, device="meta")}
    with pytest.raises(fz.errors.FzeroTypeError, match="load: reads files\n  path=5: must be a path"):
        train.load(5)
    state = train.load(tmp_path, params, names={"embed": "model.embed"})
    assert state.params["embed"] is state.params["head"] and torch.equal(state.params["head"], w)
    save_file({"head": w, "v": v}, tmp_path / "model.safetensors")
    assert torch.equal(train.load(tmp_path, params).params["embed"], w)
    with pytest.raises(fz.errors.CheckpointError, match=r"'x' is not a tensor of params\n.*v: 'y' is not in the files"):
        train.load(tmp_path, params, names={"x": "v", "v": "y"})


def test_a_tied_leaf_of_a_module_under_any_of_its_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    model = fz.functionalize(net)
    assert fz.tree.names(model.params) == ["embed.weight"] and model.aliases == {"embed.weight": ["head.weight"]}
    train = fz.compile(model.train_step(fz.optim.sgd(0.1), lambda out, b: out), fz.make_mesh(data=1), backend="eager")
    w = torch.randn(5, 3)
    for held in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        save_file({n: w.clone() for n in held}, tmp_path / "model.safetensors")
        with caplog.at_level(logging.WARNING, "fzero"):
            assert torch.equal(train.load(tmp_path).params["embed"]["weight"], w)
    (record,) = caplog.records
    assert record.getMessage().endswith("not used: head.weight (tied to embed.weight)")


def test_without_params_the_files_say(tmp_path: Path) -> None:
    path = write(tmp_path, values())
    train = compiled(fz.make_mesh(data=1), fz.shard_params())
    state = train.load(path)
    assert len(state.params["layers"]) == 2 and state.params["layers"][0]["n"].dtype == torch.bfloat16
    assert all(torch.equal(x, values()[n]) for n, x in whole(train, state).items())


def test_names_make_lists_only_of_whole_numbers_from_zero(tmp_path: Path) -> None:
    names = ("a.0", "a.2", "b.00", "c.1", "c.0.z")
    save_file({n: torch.ones(1) for n in names}, tmp_path / "model.safetensors")
    params = compiled(fz.make_mesh(data=1)).load(tmp_path).params
    assert set(params["a"]) == {"0", "2"} and set(params["b"]) == {"00"} and isinstance(params["c"], list)
    save_file({"a": torch.ones(1), "a.b": torch.ones(1)}, tmp_path / "model.safetensors")
    train = compiled(fz.make_mesh(data=1))
    with pytest.raises(fz.errors.CheckpointError, match=r"do not make a tree\n  a.b: another tensor's name") as caught:
        train.load(tmp_path)
    assert "pass as params a dict from each dotted name" in str(caught.value)
    assert train.load(tmp_path, {n: torch.empty(1, device="meta") for n in ("a", "a.b")}).params.keys() == {"a", "a.b"}


def refused(path: Path, params: Any = None, **settings: Any) -> str:
    train = compiled(fz.make_mesh(data=1), fz.shard_params())
    with pytest.raises(fz.errors.CheckpointError) as caught:
        train.load(path, like() if params is None else params, **settings)
    return str(caught.value)


def test_what_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", values())
    assert "is another model's: 0 of 2 tensors are in it, and 6 others" in refused(
        path, {"h.0.w": torch.empty(2, device="meta"), "h.1.w": torch.empty(2, device="meta")}
    )
    bent = values() | {"layers.0.w": torch.ones(513, 257).bfloat16(), "scale": torch.tensor(1)}
    text = refused(write(tmp_path / "b", bent))
    assert "layers.0.w: the files have bfloat16[513, 257], expected float32[257, 513]" in text
    assert "scale: int64[] in the files is not converted to float32[]" in text
    eight = values() | {"layers.0.w": values()["layers.0.w"].to(torch.float8_e4m3fn)}
    assert "float8_e4m3fn[257, 513] in the files is not converted" in refused(write(tmp_path / "c", eight))
    file = sorted(path.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 10)
    assert f"{file.name}: " in refused(path) and "truncated" in refused(path)
    file.unlink()
    assert f"{file.name}: missing" in refused(path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, which can run any code" in refused(tmp_path / "d")
    assert "does not exist" in refused(tmp_path / "e")


def failing(path: str, scratch: str, case: str) -> None:
    """A rank whose file shrinks, whose disk is full, or that sees another directory."""
    mesh = fz.make_mesh(data=-1)
    train = compiled(mesh, fz.data_parallel(), fz.offload("nvme", ("params", "opt_state"), path=scratch))
    weight_loading.WINDOW = 1 << 16
    try:
        if mesh.rank == 1 and case == "elsewhere":
            path += "/other"
        if mesh.rank == 1 and case == "read":
            real = os.preadv

            def broken(*args: Any) -> int:
                os.preadv = real
                raise OSError(5, "Input/output error")

            agree_read = weight_loading._fill

            def fill(*args: Any) -> Any:
                weight_loading._fill = agree_read
                os.preadv = broken
                return agree_read(*args)

            weight_loading._fill = fill
        if mesh.rank == 1 and case == "write":
            from fzero.state import tensor_storage as storage

            fill_ = storage.fill

            def full(*args: Any) -> None:
                storage.fill = fill_
                raise fz.errors.TierError("no space left")

            storage.fill = full
        train.load(path, like())
    finally:
        weight_loading.WINDOW = 4 << 20


@pytest.mark.parametrize("case", ["read", "write", "elsewhere"])
def test_a_rank_that_fails(run_ranks: Any, tmp_path: Path, case: str) -> None:
    path, scratch = write(tmp_path / "hf", values()), tmp_path / "scratch"
    write(path / "other", values(torch.float16))
    scratch.mkdir()
    raised = run_ranks(2, failing, str(path), str(scratch), case, expect_error=True)
    said = {"read": "Input/output error", "write": "no space left", "elsewhere": "the files"}[case]
    assert all(r.type and said in r.message for r in raised), raised


def test_a_module_says_what_it_looks_like(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net.register_buffer("scale", torch.tensor(3.0), persistent=False)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        for x in net.parameters():
            x.zero_()
    model = fz.functionalize(net)
    step = model.train_step(fz.optim.sgd(0.1), lambda out, batch: out.square().mean())
    train = fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")
    state = train.load(tmp_path)
    found = whole(train, state)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[n], stored[n]) for n in stored) and found["scale"] == 3
    train(state, torch.ones(2, 4))
