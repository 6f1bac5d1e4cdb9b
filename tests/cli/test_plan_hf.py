"""`fzero plan --hf`: configurations of transformers become plans, and the code that is printed runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.cli import main
from fzero.cli.plan_summary import Answer
from fzero.compiler.input_specs import params_inputs
from fzero.compiler.state_budget import at_rest
from fzero.errors import FzeroValueError
from fzero.plan.device_lookup import KNOWN, get_devices
from fzero.plan.process_memory import COMPILED, CONTEXT, CUDA_LIBRARIES, NCCL, resident

transformers: Any = pytest.importorskip("transformers", reason="configurations come from transformers")

PROCESS = CONTEXT + NCCL
SMALL: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        architectures=["LlamaForCausalLM"],
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4),
    "t5": lambda: transformers.T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=3,
        architectures=["BertForSequenceClassification"],
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        architectures=["MixtralForCausalLM"],
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        num_labels=3,
        architectures=["ViTForImageClassification"],
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are written into the cache folder."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(kind: str) -> str:
        SMALL[kind]().save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def code_of(out: str) -> str:
    """The code that the printed answer says where to find."""
    found = re.search(r"^code +(\S+\.py)\s+\(", out, re.M)
    assert found, out
    return Path(found[1]).expanduser().read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("llama", ("--seq", "16")),
        ("gpt2", ("--accumulate", "2", "--layerwise", "--precision", "fp32", "--remat", "0.5", "--loss", "chunked")),
        ("t5", ("--seq", "8", "--batch", "2", "--remat", "full")),
        ("bert", ("--seq", "8", "--precision", "fp32")),
        ("mixtral", ("--seq", "64", "--precision", "fp32")),
        ("vit", ("--batch", "2", "--precision", "fp32")),
    ],
)
def test_the_printed_code_is_what_was_planned_and_runs(
    run: Any, saved: Any, kind: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--hf", saved(kind), "--devices", "1xcpu", "--budget", "3GB", "--backend", "eager", *flags)
    code, out, err = run(*flags, "--json")
    assert code == 0, err
    data, found = json.loads(out), dict[str, Any]()
    exec(data["code"].replace("fz.compile(step, mesh", 'fz.compile(step, mesh, backend="eager"'), found)
    loss = float(capsys.readouterr().out.splitlines()[-1])
    assert 0 < loss < 10 and found["metrics"]["loss"] == pytest.approx(loss)
    assert data["peak_bytes"] == found["train"].plan.peak_bytes, "the program that runs is the one that was planned"
    assert sum(data["filled"].values()) == data["peak_bytes"] and data["budget"]["fits"]
    assert data["images_per_second" if kind == "vit" else "tokens_per_second"] > 0
    if kind == "llama":
        code, out, err = run(*flags)
        assert code == 0 and code_of(out) == data["code"] + "\n"
        assert len(out.splitlines()) <= 16 and re.search("^fits +yes: ", out, re.M) and "process" in out
        assert "2 layers, hidden size 32, 4 heads, vocabulary 96" in " ".join(out.split()) and not err


def test_the_page_names_no_folder_of_this_machine(run: Any, saved: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("vl_convert")
    flags = ("--hf", saved("llama"), "--seq", "16", "--devices", "1xcpu", "--html", str(tmp_path / "report.html"))
    for folder, path in ((tmp_path, "llama"), (Path(__file__).parent, "path/to/llama")):
        monkeypatch.chdir(folder)
        assert run(*flags)[0] == 0
        page = (tmp_path / "report.html").read_text()
        assert f"AutoModelForCausalLM, &#34;{path}&#34;" in page and str(tmp_path) not in page


def test_a_loss_in_chunks_takes_less_memory(run: Any, tmp_path: Path) -> None:
    """The logits of 64 samples of 32 tokens are the largest values of this step."""
    config = transformers.GPT2Config(vocab_size=8192, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    config.save_pretrained(tmp_path)
    flags = ("--hf", str(tmp_path), "--devices", "1xh100", "--precision", "fp32", "--batch", "64", "--json")
    plans = {loss: json.loads(run(*flags, "--loss", loss)[1]) for loss in ("full", "chunked")}
    assert "model.train_step(optimizer)" in plans["full"]["code"]
    assert 'model.train_step(optimizer, loss="chunked")' in plans["chunked"]["code"]
    assert plans["chunked"]["peak_bytes"] < plans["full"]["peak_bytes"] / 1.5


def test_a_batch_that_is_too_large_is_advised_to_be_divided(run: Any, tmp_path: Path) -> None:
    config = SMALL["llama"]()
    config.vocab_size = 20_000
    config.save_pretrained(tmp_path)
    given = ("--hf", str(tmp_path), "--devices", "1xh100", "--budget", "2GiB")
    code, _, err = run(*given, "--batch", "4096")
    divided = re.search(r"with fz\.accumulate\(num_micro_batches=(\d+)\)", err)
    assert code == 1 and divided, err
    flags = ("--loss chunked", f"--batch {4096 // int(divided[1])} --accumulate {divided[1]}")
    assert f"\nAs flags: {'; '.join(flags)}" in err, err
    code, out, _ = run(*given, *" ".join(flags).split())
    assert code == 0 and "fits" in out


@pytest.mark.full
def test_a_mixture_computes_rows_of_fixed_size(run: Any, saved: Any) -> None:
    """With the way of the library that can be traced, every token would bring copies of its experts' weights."""
    flags = ("--devices", "1xh100", "--seq", "64", "--remat", "none")
    code, out, err = run("--hf", saved("mixtral"), *flags, "--details")
    assert code == 0, err
    assert "rows = fz.hf.experts_implementation(capacity=1.25)\n" in code_of(
        out
    ) and "experts_implementation=rows" in code_of(out)
    assert "experts: fz.hf.experts_implementation" in out
    code, out, _ = run("--hf", saved("mixtral"), *flags, "--json")
    of = {"experts_implementation": "batched_mm"}
    model = fz.hf.from_config(transformers.AutoModelForCausalLM, SMALL["mixtral"](), **of)
    ids = torch.empty(1, 64, dtype=torch.int64, device="meta")
    step = fz.mixed_precision("bf16")(model.train_step(fz.optim.adamw(1e-5)))
    params = fz.tree.map(lambda x: x.to("meta"), model.params)
    other = fz.lower(step, fz.AbstractMesh(data=1), params, {"input_ids": ids, "labels": ids}, device="h100").plan
    copies = 64 * 2 * 3 * 32 * 64 * 2  # tokens x experts of each x matrices, in bf16
    saved_bytes = json.loads(out)["breakdown"]["saved"]
    assert other.breakdown["saved"] > 2 * copies > copies > saved_bytes > 0


def test_a_key_that_the_configuration_does_not_have_is_named(run: Any, saved: Any) -> None:
    """With the key that is meant, if the file leaves that one out. Keys that the library has read, and old ones that
    are no numbers, are not named."""
    file = Path(saved("llama"), "config.json")
    config = json.loads(file.read_text())
    del config["num_hidden_layers"], config["rope_parameters"]
    config |= {"num_layers": 1, "rope_theta": 1e4, "rope_scaling": None, "do_sample": True}
    config |= {"auto_map": {"AutoConfig": "a.B"}, "_name_or_path": "llama", "pretraining_tp": 1, "n_ctx": 32}
    file.write_text(json.dumps(config))
    code, out, err = run("--hf", str(file), "--devices", "8xh100", "--seq", "8", "--json")
    lines = [
        "num_layers=1: LlamaConfig has no num_layers; did you mean num_hidden_layers, which is 32?",
        "LlamaConfig has no n_ctx=32 of its own; the model may ignore it",
    ]
    assert code == 0 and json.loads(out)["unknown"] == lines and json.loads(out)["model"].startswith("32 layers, ")
    assert [line for line in err.splitlines() if "config.json" in line] == [f"config.json: {line}" for line in lines]
    code, _, err = run("--hf", str(file), "--devices", "8xh100", "--budget", f"{PROCESS + 100_000}B")
    assert code == 1 and err.startswith(f"config.json: {lines[0]}\n") and "the state alone does not fit" in err
    code, _, err = run("--hf", str(file), "--devices", "8xh100", "--budget", "1GB")
    assert code == 2 and "--budget 953.7 MiB: the process itself, without the program, takes 1.07 GiB" in err


@pytest.mark.parametrize("mesh", [(), ("--mesh", "auto")])
@pytest.mark.parametrize("version", [None, "4.57.0"])
def test_without_the_library_it_says_what_to_install(
    run: Any, saved: Any, monkeypatch: pytest.MonkeyPatch, mesh: tuple[str, ...], version: str | None
) -> None:
    where = saved("llama")
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        # the library puts another module in its own place while it is imported
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    code, _, err = run("--hf", where, "--devices", "8xh100", *mesh)
    says = "transformers 5, and 4.57.0 is installed" if version else "needs the library transformers"
    assert code == 2 and says in err and err.endswith("Fix: pip install 'transformers>=5,<6' accelerate\n")
    for use in (
        lambda: fz.hf.experts_implementation(),
        lambda: fz.hf.from_pretrained(None, where),
        lambda: fz.hf.from_config(None, None),
        lambda: fz.hf.Trainer,
    ):
        with pytest.raises(fz.errors.FzeroError, match=r"needs .*transformers") as error:
            use()
        assert "Fix: pip install" in str(error.value)


def test_the_trainer_says_that_it_needs_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'accelerate', which {name} imports")

    monkeypatch.setattr("fzero.hf.importlib", SimpleNamespace(import_module=absent))
    with pytest.raises(fz.errors.FzeroError, match=r"hf.Trainer: .*\n.*accelerate.*\nFix: pip install .* accelerate"):
        _ = fz.hf.Trainer


@pytest.mark.full(keep=["1"])
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_is_over_all_axes_of_the_mesh(run: Any, saved: Any, stage: int) -> None:
    """The fast one first; `model` is tensor parallelism's."""
    flags = ("--mesh", "node=2", "data=2", "model=2", "--tensor", "2", "--device", "h100", "--zero", str(stage))
    code, out, err = run("--hf", f"{saved('llama')}/config.json", *flags)
    transform = ("", "shard_opt_state", "shard_grads", "shard_params")[stage]
    expected = (
        [f'fz.{transform}(axis=("data", "node"))'] if stage else ["data_parallel()", 'data_parallel(axis="node")']
    )
    assert code == 0 and all(call in code_of(out) for call in expected), err
    assert "make_mesh(node=2, data=2, model=2)" in code_of(out)


def test_a_file_and_several_devices(run: Any, saved: Any) -> None:
    file = f"{saved('llama')}/config.json"
    code, out, _ = run("--hf", file, "--devices", "16xh100", "--zero", "1", "--precision", "fp16", "--details")
    text = code_of(out)
    assert code == 0 and f'fz.hf.from_config(AutoModelForCausalLM, AutoConfig.from_pretrained("{file}"))' in text
    assert "fz.shard_opt_state()" in text and 'fz.mixed_precision("fp16")' in text
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 8" in text
    assert "make_mesh(data=16)" in text
    assert "2 hosts of 8" in out and "40 GB/s to others, all 8 of a host at once" in out
    assert "buffers of NCCL" in out and "assumed" in out and "measured here" in out
    assert "65% of the stated peak" in out and "MFU" in out
    compile(text, "train.py", "exec")


@pytest.mark.full
def test_devices_that_compute_layers_together(run: Any, saved: Any) -> None:
    file = f"{saved('llama')}/config.json"
    code, out, err = run("--hf", file, "--devices", "8xh100", "--tensor", "2", "--json")
    assert code == 0, err
    data = json.loads(out)
    assert "fz.tensor_parallel(rules=fz.hf.tensor_rules(model, ranks=2))" in data["code"]
    assert "make_mesh(data=4, model=2)" in data["code"] and "the same along model" in data["code"]
    assert data["tokens_per_second"] == pytest.approx(4 * 32 / data["step_seconds"]), "rows count once a pair"
    for flags, said in (
        (("--devices", "8xh100", "--tensor", "3"), "--tensor 3 does not divide 8 devices"),
        (("--mesh", "data=4", "model=2", "--device", "h100"), "--tensor 1: the mesh has model=2"),
    ):
        code, _, err = run("--hf", file, *flags)
        assert code == 2 and said in err


def test_tiers_and_what_would_be_better(run: Any, saved: Any) -> None:
    where = saved("llama")
    flags = ("--hf", where, "--devices", "1xrtx4090", "--offload", "nvme", "--json")
    code, out, _ = run(*flags)
    data = json.loads(out)
    assert code == 0 and 'fz.offload("nvme", ("opt_state", "params"), path="/scratch")' in data["code"]
    assert data["disk_bytes"] and any("--layerwise" in line and "disk" in line for line in data["better"])
    assert 'fz.remat("full")' in data["code"] and data["bound_by"] == "disk"
    better = re.search(r"--accumulate (\d+) --layerwise", str(data["better"]))
    assert better and int(better[1]) > 1
    code, out, _ = run("--hf", where, "--devices", "1xrtx4090", "--offload", "auto", "--json")
    data = json.loads(out)
    assert code == 0 and "batch=batch" in data["code"] and "memory_budget=" in data["code"]
    assert "without --offload: all of the state fits on the device" in data["better"]


def test_a_larger_batch_is_not_suggested_if_the_host_is_full() -> None:
    step = fz.train_step(lambda w, x: (x @ w).square().mean(), fz.optim.sgd(0.1))
    w, x = torch.empty(64, 64, device="meta"), torch.empty(8, 64, device="meta")
    mesh = fz.AbstractMesh(data=1, device_type="cuda")
    lowered = fz.lower(step, mesh, w, x, device="h100", memory_budget="1GB", host_budget="1GB")
    for host_bytes, expected in ((400_000_000, True), (900_000_000, False)):
        plan = replace(lowered.plan, host_peak_bytes=host_bytes)
        answer = Answer(lowered, plan, (), 8, "samples", 1, known=True, includes_process=False)
        assert any("a batch twice as large" in line for line in answer.better()) == expected


def test_a_state_that_is_too_large_is_refused_before_a_trace(
    run: Any, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.cli.step_command.lower", None)
    where = saved("llama")
    numel = sum(x.numel() for x in transformers.AutoModelForCausalLM.from_config(SMALL["llama"]()).parameters())
    budget = 12 * numel // 10
    code, _, err = run("--hf", where, "--devices", "2xh100", "--budget", f"{budget + PROCESS}B")
    assert code == 1 and "the state alone does not fit" in err
    assert re.search(r"with at least (1\d|20) ranks along 'data': there are 2", err) and "optimizer state" in err
    assert "fz.offload('cpu', ('opt_state', 'params'))" in err and "of host memory a rank" in err
    code, _, err = run("--hf", where, "--devices", "8xh100", "--zero", "0", "--budget", f"{budget * 5 + PROCESS}B")
    assert code == 1 and "with fz.shard_params(axis='data'): " in err and "As flags: " in err and "--zero 3" in err
    code, _, err = run("--hf", where, "--devices", "1xh100", "--budget", f"{budget + CONTEXT}B")
    assert code == 1 and re.search(r"fz\.shard_params\(\) over at least 1[01] ranks", err)
    assert re.search(r"\nAs flags: .*--offload cpu --host-budget SIZE; .*--disk-budget SIZE; --devices 1[01]xh100", err)
    monkeypatch.setattr("fzero.cli.step_command.resident", lambda: 0)
    limits = ("--budget", f"{budget + CONTEXT}B", "--host-budget", f"{CUDA_LIBRARIES + 1000}B")
    code, _, err = run("--hf", where, "--devices", "1xh100", *limits, "--offload", "auto")
    assert code == 1 and "on all tiers (device " in err and "give it a disk" in err
    limit = ("--budget", f"{int(1.1 * budget) + COMPILED}B")
    code, out, err = run("--hf", where, "--devices", "1xcpu", *limit, "--json")
    assert code == 1 and not json.loads(out)["budget"]["fits"] and "of disk a rank" in err


def test_the_state_at_rest_is_that_of_the_plan() -> None:
    """By leaf tables and by the program."""
    params = {"w": torch.empty(64, 33, device="meta"), "b": torch.empty(33, device="meta")}
    step = fz.train_step(lambda p, x: (x @ p["w"] + p["b"]).square().mean(), fz.optim.adamw(1e-3))
    for transform in (
        fz.shard_params(),
        fz.shard_opt_state(),
        fz.compose(fz.data_parallel(), fz.offload("cpu", "opt_state")),
    ):
        made, mesh = transform(step), fz.AbstractMesh(device_type="cuda", data=4)
        plan = fz.lower(made, mesh, params, torch.empty(8, 64, device="meta"), device="h100").plan
        found = at_rest(made, mesh, params_inputs(made, mesh, params))
        assert 0 <= plan.persistent_bytes - found.total <= 64, "the step, the key"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "neither MODULE:FUNCTION nor --hf DIR .*--devices NUMBERxNAME"),
        (("--hf", "{llama}"), "--devices NUMBERxNAME"),
        (("--hf", "meta-llama/Llama-3-8B", "--devices", "8xh100"), r"snapshot_download.*save_pretrained"),
        (("--hf", "{tmp}/lama", "--devices", "8xh100"), "perhaps you meant: .*llama"),
        (("--hf", "{tmp}", "--devices", "8xh100"), "has no config.json"),
        (("--hf", "{tmp}/broken.json", "--devices", "8xh100"), "is not a configuration of transformers"),
        (("--hf", "{llama}", "--devices", "8xh1000"), "perhaps you meant: 8xh100.*one of b200, h200"),
        (("--hf", "{llama}", "--devices", "8"), "perhaps you meant: 8xh100"),
        (("--hf", "{llama}", "--devices", "h100"), "perhaps you meant: 1xh100"),
        (("--hf", "{llama}", "--devices", "8xh100", "--seq", "64"), "max_position_embeddings=32"),
        (("--hf", "{llama}", "--devices", "8xh100", "--batch", "0", "--layerwise"), r"--batch 0.*--layerwise: "),
        (("--hf", "{llama}", "--devices", "8xh100", "--remat", "ful"), "perhaps you meant full"),
        (("--hf", "{llama}", "--devices", "8xh100", "--scratch", "/x"), "nothing goes to disk"),
        (("--hf", "{llama}", "--devices", "8xh100", "--mesh", "data=4"), "differ in the number of devices"),
        (("--hf", "{llama}", "--devices", "8xh100", "--device", "h100"), "both --devices 8xh100 and --device h100"),
        (("--hf", "{llama}", "--devices", "8xh100", "x.py:f"), "both x.py:f and --hf"),
        (("x.py:f", "--devices", "8xh100", "--seq", "8"), "--seq: applies only to --hf"),
        (("--hf", "{headless}", "--devices", "8xh100"), "BertModel has no loss.*FILE.py:FUNCTION"),
        (("--hf", "{llama}", "--devices", "8xh100", "--offlaod", "auto"), "--offload"),
        (("--hf", "{llama}", "--devices", "8xh100", "--zero", "4"), "zero"),
    ],
)
def test_what_cannot_be_meant(run: Any, saved: Any, tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    headless = SMALL["bert"]()
    headless.architectures = ["BertModel"]
    headless.save_pretrained(tmp_path / "headless")
    (tmp_path / "broken.json").write_text("{")
    named = {"tmp": str(tmp_path), "llama": saved("llama"), "headless": str(tmp_path / "headless")}
    code, out, err = run(*(flag.format(**named) for flag in flags))
    assert code == 2 and "Traceback" not in err, err
    assert re.search(says, " ".join(err.split())), err or out


def test_devices_by_name() -> None:
    assert [get_devices(x)[0] for x in ("8xh100", "64xA100_80GB", "1xrtx4090,disk_read=7GB")] == [8, 64, 1]
    assert get_devices("64xa100-80gb")[1].memory_bytes == KNOWN["a100"].memory_bytes
    assert get_devices("2xa100-40gb")[1].memory_bytes == 40e9
    with pytest.raises(FzeroValueError, match="lots"):
        get_devices("1xh100,memory_bytes=lots")


@pytest.mark.parametrize(
    ("text", "meant"),
    [("h100x8", "8xh100"), ("8 x H100", "8xh100"), ("8h200", "8xh200"), ("xl40s", "1xl40s"), ("4", "4xh100")]
    + [
        ("a100-80gb", "1xa100-80gb"),
        ("a100-40gb x 8", "8xa100-40gb"),
        ("0xh100", "1xh100"),
        ("8xrtx4080", "8xrtx4090, 8xrtx5090, 8xrtx3090"),
        ("8xmps", ""),
    ],
)
def test_devices_in_another_form(text: str, meant: str) -> None:
    with pytest.raises(FzeroValueError) as caught:
        get_devices(text)
    _, *meanings, fix = str(caught.value).splitlines()
    assert meanings == ([f"  perhaps you meant: {meant}"] if meant else [])
    assert all(name in fix for name in (*KNOWN, "NUMBERxNAME", "a100-40gb", "memory_bytes", "calibration file"))


@pytest.mark.full
def test_it_ends_when_it_has_printed(saved: Any) -> None:
    where = saved("llama")
    args = [sys.executable, "-m", "fzero", "plan", "--hf", where, "--devices", "8xh100"]
    found = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and "device memory" in found.stdout, found.stderr
    assert resident() > 50 << 20


@pytest.mark.full
def test_every_mesh_of_a_model_is_planned(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the sequences of all devices together; the code makes the model, then the mesh that is fastest."""
    asked = ["plan", "--hf", saved("llama"), "--mesh", "auto", "--devices", "2xh100"]
    assert main([*asked, "--batch", "2", "--accumulate", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["meshes"][0]
    assert best["axes"] == {"data": 2}
    made: dict[str, Any] = {}
    exec(found["model"], made)
    step = fz.compose(*(eval(code, {"fz": fz}) for code in best["transforms"]))(made["step"])
    ids = torch.empty(4, 32, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    mesh = fz.AbstractMesh(data=2).of_type("cuda")
    limit = found["budget"]
    plan = fz.lower(step, mesh, made["model"].params, batch, device="h100", memory_budget=limit).plan
    assert plan.step_seconds == pytest.approx(best["step_seconds"], rel=0.02)
    assert main([*asked, "--tensor", "2", "--zero", "1"]) == 2
    said = capsys.readouterr().err
    assert "--tensor does not go with --mesh auto" in said and "--zero does not go with --mesh auto" in said
