"""Notes in an open store, values over sockets and files of JSON are data: none of them runs, none is read without a
bound, and whatever is wrong with them is an error of ours."""

from __future__ import annotations

import ast
import base64
import json
import os
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fzero
import fzero as fz
from fzero import checkpoint
from fzero._utils.bounded_json import DEPTH, Malformed, contents, formed, parsed
from fzero.checkpoint.weight_loading import entries_of
from fzero.comm.control_messages import Notes
from fzero.errors import CheckpointError, DivergenceError, FzeroError, FzeroValueError
from fzero.plan.calibration import load_calibration
from fzero.plan.device_lookup import KNOWN, Device, get_device

PACKAGE = Path(fzero.__file__).parent

RUNS_CODE = re.compile(
    r"(?<!safetensors\.)\b(pickle\.(loads?|Unpickler)|all_gather_object|broadcast_object_list|scatter_object_list|gather_object"
    r"|(send|recv)_object_list|torch\.load|marshal\.loads?|shelve|dill|cloudpickle|yaml\.(unsafe_)?load)\b"
)
ALLOWED = {
    "_compat/compat.py": "Inductor's artifacts of a cache that nobody else can write to, which PyTorch reads so too",
    "runtime/build/cpu/compile_worker.py": "a pipe to a process that this one has started",
    "hf/trainer_checkpoint.py": "weights_only=True: scheduler.pt of its own checkpoints, read as transformers does",
}

READS_JSON = re.compile(r"\b(json\.loads?|JSONDecoder|raw_decode)\b")
READERS = {"_utils/bounded_json.py": "the one reader"}


@pytest.mark.full
@pytest.mark.parametrize(("names", "allowed"), [(RUNS_CODE, ALLOWED), (READS_JSON, READERS)], ids=["pickle", "json"])
def test_who_reads_what_others_wrote(names: re.Pattern[str], allowed: dict[str, str]) -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, (ast.Attribute, ast.Name))}
        used |= {f"{n.module}.{a.name}" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        if hits := sorted(name for name in used if names.search(name)):
            found[path.relative_to(PACKAGE).as_posix()] = hits
    assert found.keys() == allowed.keys(), found
    trainer = (PACKAGE / "hf/trainer_checkpoint.py").read_text()
    assert trainer.count("torch.load(") == trainer.count("torch.load(path, weights_only=True)") == 1


# --- notes ---


def test_notes_of_ranks_stand_apart_and_are_read_in_their_form() -> None:
    store = dist.HashStore()
    notes = [Notes(store, "fzero/test", r) for r in range(2)]
    notes[0].write(5, {"a": 1.5})
    assert notes[1].come(5, [0]) and not notes[1].come(5, range(2)) and not notes[1].come(6, [0])
    notes[1].write(5, {"a": 2.5})
    assert notes[0].read(5, range(2), dict[str, float]) == {0: {"a": 1.5}, 1: {"a": 2.5}} and notes[0].read(5, []) == {}
    store.set(notes[0].key(5, 1), '{"a": "much"}')
    with pytest.raises(
        DivergenceError, match=r"(?s)not from this run\n  rank 1: .*'much'.*fzero/test/5/1\nFix: .*port"
    ):
        notes[0].read(5, range(2), dict[str, float])


class Pair(NamedTuple):
    name: str
    numbers: list[float]
    more: Mapping[int, tuple[int, ...]] = MappingProxyType({})


def exchanges() -> Any:
    mesh = fz.make_mesh(data=2)
    rank = mesh.rank
    pair = Pair(f"ä{rank}", [0.1, float("inf")], {rank: (1, 2)})
    notes = mesh.control.all_gather(pair, Pair, "test")
    tensors = {"a": torch.arange(4.0)[rank:], "b": torch.zeros((), dtype=torch.bool), "c": torch.ones(0, 3)}
    tensors["tied"] = tensors["a"]
    found = mesh.control.all_gather_tensors(tensors, "test")
    raw = [mesh.control.all_gather_bytes(bytes([rank]) * (rank * n)) for n in (5, 504, 505, 10**6)]
    wrong = ""
    try:
        mesh.control.all_gather("text" if rank else 3, int, "test")
    except DivergenceError as error:
        wrong = str(error)
    here = list(mesh.secret) if rank == 0 else None
    secrets = mesh.control.all_gather(here, list[int] | None, "test")[0]
    store: Any = mesh.store
    store = store.underlying_store
    values = [store.get(key) for key in store.list_keys()]
    leaked = [v for v in values if mesh.secret in v or mesh.secret.hex().encode() in v]
    assert len(values) > 3
    return notes, found, raw, wrong, bytes(secrets) == mesh.secret and len(mesh.secret) == 32, leaked


def test_ranks_exchange_values_tensors_and_a_secret(run_ranks: Any) -> None:
    for notes, found, raw, wrong, same, leaked in run_ranks(2, exchanges):
        assert notes == [Pair(f"ä{r}", [0.1, float("inf")], {r: (1, 2)}) for r in range(2)]
        assert [x["a"].tolist() for x in found] == [[0, 1, 2, 3], [1, 2, 3]] == [x["tied"].tolist() for x in found]
        assert all(x["b"].dtype == torch.bool and x["c"].shape == (0, 3) for x in found)
        assert raw == [[b"", b"\x01" * n] for n in (5, 504, 505, 10**6)]
        assert "rank 1: 'text', expected int" in wrong and "rank 0" not in wrong
        assert same and not leaked


def steps_taken(strange: str) -> tuple[int, bool]:
    """The steps of a run in whose store a stranger has set a stop."""

    def main(run: Any) -> tuple[int, bool]:
        step = fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.optim.sgd(0.5))
        train = fz.compile(fz.data_parallel()(step), run.mesh, backend="eager")
        state = run.state(train, {"w": torch.ones(2)})
        for index in run.steps(state, 6):
            if index == 1 and run.mesh.rank == 0:
                run.mesh.store.set("fzero/run/stop", strange)
            if index == 3 and run.mesh.rank == 1 and not strange.startswith("never"):
                os.kill(os.getpid(), signal.SIGTERM)
            state, _ = train(state, torch.ones(2))
            run.commit(state)
        return int(state.step), run.stopping

    try:
        return fz.run(main, device="cpu")
    except SystemExit:
        return -1, True


def test_a_stop_that_a_stranger_sets_is_ignored_and_one_of_the_runs_own_is_heard(run_ranks: Any) -> None:
    assert run_ranks(2, steps_taken, "never 1") == [(6, False)] * 2
    assert run_ranks(2, steps_taken, "1") == [(-1, True)] * 2


# --- files of JSON ---


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff{}", "not UTF-8: byte 0 is 0xff"),
        (b'{"a": 1,}', "not JSON: .*line 1 column 9"),
        (b"", "not JSON"),
        (b"[" * 3000 + b"]" * 3000, f"nested more than {DEPTH} deep"),
        (b"[" * 100_000, f"nested more than {DEPTH} deep"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), f"nested more than {DEPTH} deep"),
        (b'{"a": ' + b"7" * 5000 + b"}", "more than 4,300 digits at character 6"),
    ],
)
def test_text_that_is_no_json_is_named(data: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        parsed(data)


def test_a_form_is_held_against_a_value() -> None:
    assert parsed("[1, null, 2]", list[int | None]) == [1, None, 2]
    assert parsed('["a", [1]]', Pair | None) == Pair("a", [1.0])
    assert parsed('{"name": "a", "numbers": [], "more": {"-3": [4]}}', Pair) == Pair("a", [], {-3: (4,)})
    wrong = [
        ("[true]", list[int], r"True at \[0\], expected int"),
        ("1.5", int, "1.5, expected int"),
        ('{"x": 1}', dict[int, int], "the key 'x'"),
        ("[1, 2]", tuple[int], "expected tuple"),
        ('["a"]', Pair, "expected Pair"),
        ('{"name": "a"}', Pair, "expected Pair"),
        ('{"name": "a", "numbers": [], "else": 1}', Pair, "expected Pair"),
        ('{"a": {"b": null}}', dict[str, dict[str, str]], r"None at \['a'\]\['b'\]"),
    ]
    for text, form, said in wrong:
        with pytest.raises(Malformed, match=said):
            parsed(text, form)
    assert formed([1], Any) == [1]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "big").write_bytes(b" " * 11)
    for name, said in {"pipe": "is a pipe", "zero": "is a device", ".": "is a directory"}.items():
        with pytest.raises(OSError, match=said):
            contents(tmp_path / name, 10)
    with pytest.raises(Malformed, match="more than 10 bytes"):
        contents(tmp_path / "big", 10)
    assert contents(tmp_path / "big", 11) == b" " * 11


class State(NamedTuple):
    step: int
    params: dict[str, torch.Tensor]


def saved(root: Path) -> Path:
    return Path(checkpoint.save(root, State(3, {"w": torch.arange(5.0)})))


@pytest.mark.full
def test_an_index_that_is_not_a_file_of_its_directory_is_refused(tmp_path: Path) -> None:
    index = saved(tmp_path / "run") / "index.json"
    right = index.read_bytes()
    (tmp_path / "elsewhere").write_bytes(right)
    beside = index.with_name("beside.json")

    def refused(match: str) -> None:
        acts: list[Any] = [checkpoint.describe, checkpoint.verify, checkpoint.structure, checkpoint.export]
        for act in acts:
            with pytest.raises(CheckpointError, match=match):
                act(tmp_path / "run", *([tmp_path / "out"] if act is checkpoint.export else []))
        index.unlink()

    for target in ("/dev/zero", tmp_path / "elsewhere", "../../elsewhere"):
        index.unlink(missing_ok=True)
        index.symlink_to(target)
        refused("index.json: a link to a file outside of its directory,")
    os.mkfifo(index)
    refused("is a pipe")
    index.mkdir()
    with pytest.raises(CheckpointError, match=r"index\.json"):
        checkpoint.describe(tmp_path / "run")
    index.rmdir()
    with index.open("wb") as file:
        file.truncate(3 << 30)  # a hole: it takes no room
    refused("index.json: corrupt, more than")
    beside.write_bytes(right)
    index.symlink_to("beside.json")
    assert checkpoint.verify(tmp_path / "run").step == 3, "a link within the directory is as good as a file"


def test_a_pointer_that_is_not_a_file_of_its_directory_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    latest = tmp_path / "latest"
    (tmp_path.parent / "name").write_text("step-00000003")

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=f"latest cannot be read\n.*{match}"):
            checkpoint.find(tmp_path)
        latest.rmdir() if latest.is_dir() and not latest.is_symlink() else latest.unlink()

    latest.unlink()
    for target in ("/dev/zero", "../name"):
        latest.symlink_to(target)
        refused("a link to a file outside of its directory")
    os.mkfifo(latest)
    refused("is a pipe")
    latest.mkdir()
    refused("directory")
    latest.write_bytes(b"step-00000003" + b" " * 5000)
    refused("more than 4096 bytes")


DEEP = '{"a": ' * 3000 + "1" + "}" * 3000
LONG = b'{"train_batch_size": ' + b"1" * 5000 + b"}"
DAMAGED = [b"\xff\xfe{}", DEEP.encode(), b"[" * 10**5, LONG, b"", b"3", b"null"]


def test_a_damaged_weight_map_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    maps: list[Any] = [{"w": x} for x in (None, 3, [], {}, 1.5, True)] + [[], None, 3, "text"]
    for data in [*DAMAGED, *(json.dumps({"weight_map": m}).encode() for m in maps)]:
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be parsed"):
            entries_of(tmp_path)


def test_a_damaged_deepspeed_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    for data in DAMAGED:
        file.write_bytes(data)
        with pytest.raises(FzeroValueError, match=re.escape(str(file))):
            fz.deepspeed.load_config(file)
        with pytest.raises(FzeroError):
            fz.deepspeed.load_config(base64.urlsafe_b64encode(data).decode() or "x")
    deep: Any = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(FzeroError, match="JSON"):
        fz.deepspeed.load_config(deep)


def test_a_damaged_calibration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    for data in [*DAMAGED, b'{"machine": 3, "format": 5, "torch": ""}']:
        file.write_bytes(data)
        for read in (load_calibration, get_device, lambda path: Device.from_json(path.read_bytes())):
            with pytest.raises(FzeroValueError, match="is not a calibration file"):
                read(file)
    with pytest.raises(FzeroValueError, match="is not a calibration file"):
        load_calibration(tmp_path / "missing.json")


def test_mutated_files_give_errors_of_ours_alone(tmp_path: Path) -> None:
    """A few hundred of each kind; thousands were tried by hand."""
    index = saved(tmp_path / "run") / "index.json"
    weights = tmp_path / "model" / "model.safetensors.index.json"
    checkpoint.export(tmp_path / "run", tmp_path / "model")
    weights.write_text(json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors"}}))
    rates, config = tmp_path / "rates.json", tmp_path / "ds.json"
    rates.write_text(KNOWN["cpu"].to_json())
    config.write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}})
    )
    acts = {
        index: lambda: checkpoint.verify(tmp_path / "run"),
        weights: lambda: entries_of(tmp_path / "model"),
        rates: lambda: get_device(rates),
        config: lambda: fz.deepspeed.load_config(config),
    }
    draw, refused = random.Random(0), 0
    for path, act in acts.items():
        right = path.read_bytes()
        for _ in range(150):
            path.write_bytes(mutated(right, draw))
            try:
                act()
            except FzeroError:
                refused += 1
        path.write_bytes(right)
        act()
    assert refused > 300


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A text with a byte, a value or a piece changed."""
    kind, at = draw.randrange(5), draw.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[draw.randrange(len(data)) :]
    values = [m.span(1) for m in re.finditer(rb'[:\[,]\s*("[^"]*"|-?[\d.e+]+|true|false|null)', data)]
    begin, end = draw.choice(values)
    odd = ["null", "-1", "1e999", "NaN", '"x"', "[]", "{}", "9" * 30, "9" * 5000, '"\\ud800"', "true"]
    odd.append("[" * 600 + "]" * 600)
    return data[:begin] + draw.choice(odd).encode() + data[end:]
