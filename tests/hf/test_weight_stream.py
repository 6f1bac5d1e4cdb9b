"""The weights of a sharded state as a stream: names and bits of transformers' files, merged adapters, other processes,
and ranks or receivers that stop."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from scripts import environment

import fzero as fz
from fzero import tree
from fzero._compat.allocator import return_freed_memory
from fzero.comm import collectives

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, Any] = {
    "llama": lambda t: t.LlamaConfig(**TINY, num_key_value_heads=2),
    "llama tied": lambda t: t.LlamaConfig(**TINY, tie_word_embeddings=True),
    "mixtral": lambda t: t.MixtralConfig(**TINY, num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=3),
}
IDS = torch.arange(24).view(2, 12) * 3 % 96


def made(case: str, *transforms: Any) -> tuple[Any, Any, Any]:
    model = fz.hf.from_config(transformers.AutoModelForCausalLM, CASES[case](transformers))
    step = fz.compose(fz.shard_params(), *transforms)(model.train_step(fz.optim.adamw(1e-3)))
    train = fz.compile(step, fz.make_mesh(data=-1), backend="eager")
    return model, train, train.init(model.params)


@pytest.mark.parametrize("case", CASES)
def test_names_and_bits_are_those_of_the_files(tmp_path: Path, case: str) -> None:
    model, _, state = made(case)
    fz.hf.save_pretrained(tmp_path / "out", model, state)
    want = load_file(tmp_path / "out" / "model.safetensors")
    stream = fz.hf.stream(model, state)
    got = dict(stream)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert stream.total_bytes == sum(x.nbytes for x in want.values())
    largest = max(x.nbytes for x in fz.tree.leaves(model.params))
    assert largest <= stream.peak_bytes <= 3 * largest
    in_16_bits = dict(fz.hf.stream(model, state, dtype=torch.bfloat16))
    assert all(torch.equal(in_16_bits[name], want[name].bfloat16()) for name in want)


def test_a_module_that_is_not_of_transformers() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    model = fz.functionalize(net)
    got = dict(fz.hf.stream(model, model.params))
    assert [*got] == [name for name in net.state_dict() if name != "2.weight"]
    assert all(torch.equal(x, net.state_dict()[name]) for name, x in got.items())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"]])
def test_merged_adapters_equal_merge_and_unload(targets: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(CASES["llama"](transformers))
    config = peft.LoraConfig(r=4, target_modules=targets, use_rslora=True, modules_to_save=["norm"])
    adapted = peft.get_peft_model(base, config)
    for x in adapted.parameters():
        if x.requires_grad:
            torch.nn.init.normal_(x, std=0.1)
    model = fz.functionalize(adapted)
    got = dict(fz.hf.stream(model, model.params, merge=True))
    files = dict(fz.hf.stream(model, model.params))
    stored = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    assert stored.keys() <= files.keys()
    assert all(torch.equal(files[name], stored[name]) for name in stored)
    want = copy.deepcopy(adapted).merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, msg=name)
    assert not any(x.is_meta for x in adapted.parameters())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")
def test_a_head_that_training_has_untied_is_in_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(CASES["llama tied"](transformers))
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    for x in adapted.parameters():
        if x.requires_grad:
            torch.nn.init.normal_(x, std=0.1)
    model = fz.functionalize(adapted)
    got = dict(fz.hf.stream(model, model.params, merge=True))
    assert "has untied lm_head.weight from model.embed_tokens.weight" in caplog.text
    want = copy.deepcopy(adapted).merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_adapters_that_cannot_be_streamed_are_rejected() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        transformers.LlamaForCausalLM(CASES["llama"](transformers)), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model = fz.functionalize(adapted)
    with pytest.raises(fz.errors.FzeroValueError, match="several adapters: default, other"):
        fz.hf.stream(model, model.params)
    config = peft.VeraConfig(r=2, target_modules=["q_proj"])
    vera = fz.functionalize(peft.get_peft_model(transformers.LlamaForCausalLM(CASES["llama"](transformers)), config))
    with pytest.raises(fz.errors.FzeroValueError, match="cannot be merged layer by layer"):
        fz.hf.stream(vera, vera.params, merge=True)


def test_a_changed_value_is_an_error_before_anything_is_streamed(tmp_path: Path) -> None:
    (tmp_path / "scale").write_text("1.0")
    net = torch.nn.Linear(4, 4)
    model = fz.functionalize(net)
    step = model.train_step(
        fz.optim.sgd(0.1), lambda out, batch: out.square().mean() * float((tmp_path / "scale").read_text())
    )
    train = fz.compile(step, fz.make_mesh(data=-1), backend="eager")
    state = train.init(model.params)
    for _ in range(2):
        state, _ = train(state, torch.ones(2, 4))
    assert len(dict(fz.hf.stream(model, state))) == 2
    (tmp_path / "scale").write_text("2.0")
    state, _ = train(state, torch.ones(2, 4))
    state, _ = train(state, torch.ones(3, 4))  # another program, which has the new value
    with pytest.raises(fz.errors.FzeroValueError, match="computes something different"):
        dict(fz.hf.stream(model, state))


def test_bad_arguments_are_rejected() -> None:
    model, _, state = made("llama")
    with pytest.raises(fz.errors.FzeroTypeError, match="no adapters to merge"):
        fz.hf.stream(model, state, merge=True)
    with pytest.raises(fz.errors.FzeroTypeError, match="not a state of the model"):
        fz.hf.stream(model, {"a": torch.zeros(1)})
    with pytest.raises(fz.errors.FzeroTypeError, match="not a model"):
        fz.hf.stream(torch.nn.Linear(1, 1), state)  # type: ignore[arg-type]
    with pytest.raises(fz.errors.FzeroTypeError, match="not a floating-point dtype"):
        fz.hf.stream(model, state, dtype="bf16")  # type: ignore[arg-type]
    for address in ("somewhere", "unix:", "host:port", "host:0", 7):
        with pytest.raises(fz.errors.FzeroValueError, match="not an address"):
            next(fz.hf.receive(address))  # type: ignore[arg-type]


def test_a_step_during_the_stream_is_an_error() -> None:
    model, train, state = made("llama")
    stream = iter(fz.hf.stream(model, state))
    next(stream)
    train(state, {"input_ids": IDS, "labels": IDS})
    with pytest.raises(fz.errors.FzeroError, match=r"at step 0 when the stream began|donated"):
        list(stream)


# --- on two ranks ---


def on_ranks(case: str, out: str, address: str) -> dict[str, Any]:
    """On each rank: a step, then the stream of its state, compared with the gathered state; and sent."""
    model, train, state = made(case)
    state, _ = train(state, {"input_ids": IDS, "labels": IDS})
    whole = dict(tree.with_names(train.gather(state).params))
    stream = fz.hf.stream(model, state)
    got = dict(stream)
    stream.send(address)
    _, metrics = train(state, {"input_ids": IDS, "labels": IDS})
    names = model.slots(model.module)
    same = all(torch.equal(x, whole[names[name].name]) for name, x in got.items() if name in names)
    if torch.distributed.get_rank() == 0:
        torch.save(got, out)
    return {"same": same, "num": len(got), "loss": float(metrics["loss"])}


def under_tensor_parallel(case: str, ranks: int) -> tuple[dict[str, torch.Tensor], float]:
    """On each rank: a step, under `tensor_parallel` on several ranks, then the stream of its state."""
    model = fz.hf.from_config(transformers.AutoModelForCausalLM, CASES[case](transformers))
    step = model.train_step(fz.optim.sgd(0.1))
    if ranks > 1:
        step = fz.tensor_parallel(axis="model")(step)
    batch = {"input_ids": IDS, "labels": IDS}
    train = fz.compile(step, fz.make_mesh(model=ranks), backend="eager", batch=batch)
    state, metrics = train(train.init(model.init, fz.random.key(0)), batch)
    return dict(fz.hf.stream(model, state)), float(metrics["loss"])


@pytest.mark.parametrize("case", ["llama", "llama tied"])
def test_the_stream_under_tensor_parallel_equals_that_of_one_process(run_ranks: Any, case: str) -> None:
    want, loss = under_tensor_parallel(case, 1)
    assert ("lm_head.weight" in want) == (case == "llama")
    for got, other in run_ranks(2, under_tensor_parallel, case, 2):
        assert other == pytest.approx(loss, rel=1e-6)
        assert [*got] == [*want]
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6, msg=name)


RECEIVER = """
import sys, torch, fzero as fz
torch.save({name: x.clone() for name, x in fz.hf.receive(sys.argv[1])}, sys.argv[2])
"""


def test_another_process_receives_the_weights_of_two_ranks(run_ranks: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w"
    with subprocess.Popen([sys.executable, "-c", RECEIVER, address, str(tmp_path / "received")]) as receiver:
        ranks = run_ranks(2, on_ranks, "llama tied", str(tmp_path / "streamed"), address)
        assert receiver.wait(60) == 0
    assert all(rank["same"] and rank["num"] == ranks[0]["num"] > 15 for rank in ranks)
    streamed, received = torch.load(tmp_path / "streamed"), torch.load(tmp_path / "received")
    assert [*streamed] == [*received]
    assert all(torch.equal(streamed[name], received[name]) for name in streamed)


def stops(how: str, address: str) -> list[str]:
    """On each rank: a stream that one rank, or the receiver, leaves. Then training continues."""
    model, train, state = made("llama")
    first, errors = torch.distributed.get_rank() == 0, list[str]()
    begun = time.monotonic()
    try:
        if how == "receiver":
            fz.hf.stream(model, state).send(address, timeout=20)
        elif how == "nobody listens":
            fz.hf.stream(model, state).send(address, timeout=1)
        for i, _ in enumerate(fz.hf.stream(model, state)):
            if how == "break" and first and i == 3:
                break
            if how == "raise" and first and i == 3:
                raise ValueError("the engine does not know this name")
    except (fz.errors.FzeroError, ValueError) as error:
        errors.append(str(error))
    assert time.monotonic() - begun < 30
    _, metrics = train(state, {"input_ids": IDS, "labels": IDS})
    return [*errors, f"{float(metrics['loss']):.4f}"]


@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_rank_that_stops_reading_is_an_error_on_the_others(run_ranks: Any, tmp_path: Path, how: str) -> None:
    first, second = run_ranks(2, stops, how, f"unix:{tmp_path}/w")
    assert first[-1] == second[-1]
    assert "this rank has stopped reading" in second[0]
    assert "rank 0" in second[0]
    assert len(first) == (1 if how == "break" else 2)


def in_another_order() -> str:
    model, _, state = made("llama")
    first, second = fz.hf.stream(model, state), fz.hf.stream(model, state)
    try:
        for stream in (first, second) if torch.distributed.get_rank() else (second, first):
            dict(stream)
    except fz.errors.FzeroValueError as error:
        return str(error)
    return ""


def test_ranks_that_read_streams_in_another_order_get_an_error(run_ranks: Any) -> None:
    assert all("ranks read different streams" in text for text in run_ranks(2, in_another_order))


DIES = """
import os, sys, fzero as fz
for i, _ in enumerate(fz.hf.receive(sys.argv[1])):
    if i == 2:
        os._exit(1)
"""


def test_a_receiver_that_dies_is_an_error_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w"
    with subprocess.Popen([sys.executable, "-c", DIES, address]):
        first, second = run_ranks(2, stops, "receiver", address)
    assert "did not take the weights" in first[0]
    assert "did not take the weights" in second[0]
    assert first[-1] == second[-1]


def test_no_receiver_is_an_error_on_all_ranks(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(2, stops, "nobody listens", f"unix:{tmp_path}/w")
    assert "nobody listens within 1 s" in first[0]
    assert "nobody listens within 1 s" in second[0]
    assert first[-1] == second[-1]


RANK_DIES = """
import os, sys, torch, fzero as fz
torch.manual_seed(0)
model = fz.functionalize(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
step = fz.shard_params(model.train_step(fz.optim.sgd(0.1), lambda out, batch: out.mean()))
train = fz.compile(step, fz.make_mesh(data=2), backend="eager")
state = train.init(model.params)
try:
    for i, _ in enumerate(fz.hf.stream(model, state)):
        if train.mesh.rank == 1 and i == 3:
            os._exit(1)
except fz.errors.FzeroError as error:
    print(type(error).__name__, error)
"""


def test_a_rank_that_dies_is_an_error_on_the_other() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in "01":
        env = environment() | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK_DIES], env=env, stdout=subprocess.PIPE, text=True))
    try:
        said, _ = ranks[0].communicate(timeout=60)
        assert "RankLost" in said
        assert "rank 1 has left" in said
        assert ranks[1].wait(60) == 1
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def in_pieces() -> list[bool]:
    """On each rank: whether shards that are gathered in pieces make up the same as in one."""
    mesh, found = fz.make_mesh(data=-1), []
    for shard in (torch.arange(23) + 100 * mesh.rank, torch.arange(23.0).bfloat16() * (mesh.rank + 1)):
        want = collectives.gather(mesh, shard, "data")
        for num in (8, 17, 22, 23):
            with patch.object(collectives, "GATHER_BYTES", 2 * num * shard.element_size()):
                found.append(torch.equal(collectives.gather(mesh, shard, "data", torch.empty_like(want)), want))
    return found


def test_shards_gathered_in_pieces_make_up_the_same(run_ranks: Any) -> None:
    assert run_ranks(2, in_pieces) == [[True] * 8] * 2


def memory_of_streams() -> float:
    """On each rank: the most resident memory during streams of 8 tensors of 16 MiB, above that before them, in MiB."""
    torch.manual_seed(0)
    model = fz.functionalize(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))))
    step = fz.shard_params(model.train_step(fz.optim.sgd(0.1), lambda out, batch: out.mean()))
    state = fz.compile(step, fz.make_mesh(data=-1), backend="eager").init(model.params)
    stream = fz.hf.stream(model, state)
    assert stream.peak_bytes == 32 << 20
    return_freed_memory()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        for _, tensor in stream:
            tensor.sum()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_streams_need_about_the_memory_of_their_plan(run_ranks: Any) -> None:
    """32 MiB are planned. Gloo's buffers are as large as the pieces of a gather; threads keep some of them."""
    assert max(run_ranks(2, memory_of_streams)) < 80


# --- what arrives ---


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "malformed"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "malformed"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "malformed"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "ended after 4 of 8 bytes"),
        ([1], "malformed"),
    ],
)
def test_malformed_data_is_rejected(tmp_path: Path, sent: Any, why: str) -> None:
    path = str(tmp_path / "w")

    def send() -> None:
        with socket.socket(socket.AF_UNIX) as one:
            for _ in range(100):
                try:
                    one.connect(path)
                    break
                except OSError:
                    time.sleep(0.05)
            text = json.dumps(sent).encode()
            one.sendall(len(text).to_bytes(8, "little") + text + b"\0" * 4)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(fz.errors.FzeroValueError, match=why):
        list(fz.hf.receive(f"unix:{path}", timeout=20))
    thread.join()
