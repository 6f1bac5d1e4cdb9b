"""Names of 0.2 that have a new spelling: the old one still gives the same result, and warns with the new one."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rejections import raises

import fzero as fz
from fzero import cli, optim
from fzero._utils.deprecation import renamed_flags
from fzero.cli.flag_parsing import _RENAMED
from fzero.cli.printing import plan_data
from fzero.elastic import supervisor
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.transforms.transform import Transform

X = torch.arange(8.0).view(4, 2)
PARAMS = {"w": torch.ones(2, 2), "up": torch.ones(2, 4), "down": torch.ones(4, 2)}
STEP = fz.train_step(lambda p, x: torch.tanh(x @ p["w"] @ p["up"] @ p["down"]).square().mean(), optim.adamw(1e-3))
LOWERED = fz.lower(fz.shard_params(STEP), fz.AbstractMesh(data=2), PARAMS, X, device="h100")
PLAN = LOWERED.plan


def accepted(path: str, leaf: torch.Tensor) -> bool:
    return "w" in path


def call(fn: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fn(*args, **kwargs)


def in_a_run(fn: Callable[[fz.Run], Any], **options: Any) -> Callable[[], Any]:
    return lambda: fz.run(fn, device="cpu", **options)


def guest(pass_name: str) -> Transform:
    """A transform whose rewrite runs after this pass."""

    class Guest(Transform):
        name, after = "guest", pass_name

    return Guest()


def lower_without(pass_name: str) -> Any:
    return fz.lower(fz.shard_params(STEP), fz.AbstractMesh(data=2), PARAMS, X, device="h100", skip=[pass_name])


def raised(fn: Callable[[], Any]) -> str:
    with pytest.raises(FzeroValueError) as error:
        fn()
    return str(error.value)


def logged(option: str) -> list[list[str]]:
    """The words of a log's lines, which the function given as this option prints."""
    lines: list[str] = []
    given: dict[str, Any] = {"path": None, "steps": 1, option: lines.append}
    with fz.log(**given) as report:
        report(1, {"loss": 1.0})
    return [line.split()[:4] for line in lines]


def committed(name: str) -> Callable[[], Any]:
    def main(run: fz.Run) -> int:
        train = fz.compile(STEP, run.mesh, backend="eager")
        state = run.state(train, PARAMS)
        for _ in run.steps(state, 2):
            state, _ = train(state, X)
            getattr(run, name)(state)
        return int(state.step)

    return in_a_run(main)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "accumulate(vertical=True)": (
        call(fz.accumulate, STEP, 2, vertical=True),
        call(fz.accumulate, STEP, 2, schedule="layerwise"),
        "fz.accumulate(vertical=True) is deprecated and will be removed in 0.4: "
        "use fz.accumulate(schedule='layerwise')",
    ),
    "accumulate(vertical=False)": (
        call(fz.accumulate, STEP, 2, vertical=False),
        call(fz.accumulate, STEP, 2),
        "use fz.accumulate(schedule='sequential')",
    ),
    "accumulate(whole=)": (
        call(fz.accumulate, STEP, 2, whole=accepted),
        call(fz.accumulate, STEP, 2, replicated=accepted),
        "fz.accumulate(whole=) is deprecated and will be removed in 0.4: use fz.accumulate(replicated=)",
    ),
    "after('cut_update')": (
        lambda: str(LOWERED.after("cut_update")),
        lambda: str(LOWERED.after("partition_update")),
        "the pass name 'cut_update' is deprecated and will be removed in 0.4: use 'partition_update'",
    ),
    "lower(skip=)": (
        lambda: raised(lambda: lower_without("cut_update")),
        lambda: raised(lambda: lower_without("partition_update")),
        "use 'partition_update'",
    ),
    "a transform after 'cut_update'": (
        lambda: guest("cut_update").after,
        lambda: guest("partition_update").after,
        "use 'partition_update'",
    ),
    "once_a_step": (
        lambda: fz.once_a_step(axis="node")(STEP),
        lambda: fz.hierarchical(axis="node")(STEP),
        "fz.once_a_step is deprecated and will be removed in 0.4: use fz.hierarchical",
    ),
    "tensor_parallel(whole_bytes=)": (
        call(fz.tensor_parallel, STEP, rules={"up": 1}, whole_bytes="2MiB"),
        call(fz.tensor_parallel, STEP, rules={"up": 1}, max_replicated_bytes="2MiB"),
        "use fz.tensor_parallel(max_replicated_bytes=)",
    ),
    "sequence_parallel(whole_bytes=)": (
        call(fz.sequence_parallel, STEP, whole_bytes=7),
        call(fz.sequence_parallel, STEP, max_replicated_bytes=7),
        "use fz.sequence_parallel(max_replicated_bytes=)",
    ),
    "expert_parallel(whole_bytes=)": (
        call(fz.expert_parallel, STEP, where=accepted, whole_bytes=7),
        call(fz.expert_parallel, STEP, where=accepted, max_replicated_bytes=7),
        "use fz.expert_parallel(max_replicated_bytes=)",
    ),
    "fits(whole=)": (
        call(fz.fits, PLAN, "500MiB", whole=True),
        call(fz.fits, PLAN, "500MiB", include_process=True),
        "use fz.fits(include_process=)",
    ),
    "log(say=)": (call(logged, "say"), call(logged, "print_fn"), "use fz.log(print_fn=)"),
    "Health(replicas=)": (
        call(fz.Health, replicas=10),
        call(fz.Health, check_replicas_every=10),
        "fz.Health(replicas=) is deprecated and will be removed in 0.4: use fz.Health(check_replicas_every=)",
    ),
    "Health.replicas": (lambda: fz.Health(check_replicas_every=10).replicas, lambda: 10, "use Health.check_replicas"),
    "run(on_resize='refuse')": (
        in_a_run(lambda run: run._recovery._refuse_resize, on_resize="refuse"),
        in_a_run(lambda run: run._recovery._refuse_resize, on_resize="error"),
        "fz.run(on_resize='refuse') is deprecated and will be removed in 0.4: use fz.run(on_resize='error')",
    ),
    "run.keep": (
        committed("keep"),
        committed("commit"),
        "run.keep is deprecated and will be removed in 0.4",
    ),
    "run.place": (in_a_run(lambda run: run.place), in_a_run(lambda run: run.data_shard), "use run.data_shard"),
    "run.micro_batches": (
        in_a_run(lambda run: run.micro_batches(24, 5)),
        in_a_run(lambda run: run.num_micro_batches(24, 5)),
        "use run.num_micro_batches",
    ),
    "run.micro_batches(rows=)": (
        in_a_run(lambda run: run.micro_batches(24, rows=5)),
        in_a_run(lambda run: run.num_micro_batches(24, max_samples=5)),
        "use run.num_micro_batches(batch, max_samples=)",
    ),
    "Lowered.choice": (lambda: LOWERED.choice, lambda: LOWERED.options, "use Lowered.options"),
    "Lowered.options.whole_grads": (
        lambda: LOWERED.options.whole_grads,
        lambda: LOWERED.options.full_grads,
        "use Lowered.options.full_grads",
    ),
    "Lowered.options.stay": (
        lambda: LOWERED.options.stay,
        lambda: LOWERED.options.secondary_shard,
        "use Lowered.options.secondary_shard",
    ),
    "Lowered.options.guess": (
        lambda: LOWERED.options.guess,
        lambda: LOWERED.options.speculative,
        "use Lowered.options.speculative",
    ),
    "Plan.speed_of_light": (lambda: PLAN.speed_of_light, lambda: PLAN.roofline_fraction, "use Plan.roofline_fraction"),
    "Plan.resting_bytes": (lambda: PLAN.resting_bytes, lambda: PLAN.persistent_bytes, "use Plan.persistent_bytes"),
    "Plan.host_resting_bytes": (
        lambda: PLAN.host_resting_bytes,
        lambda: PLAN.host_persistent_bytes,
        "use Plan.host_persistent_bytes",
    ),
    "Plan.ward_bytes": (lambda: PLAN.ward_bytes, lambda: PLAN.peer_replica_bytes, "use Plan.peer_replica_bytes"),
    "optim.whole": (lambda: optim.whole, lambda: optim.unsharded, "use fz.optim.unsharded"),
    "data.read_ahead": (lambda: fz.data.read_ahead, lambda: fz.data.prefetch, "use fz.data.prefetch"),
    "data.ReadAhead": (lambda: fz.data.ReadAhead, lambda: fz.data.Prefetcher, "use fz.data.Prefetcher"),
    "hf.expert_rows": (lambda: fz.hf.expert_rows, lambda: fz.hf.experts_implementation, "use fz.hf.experts_implementa"),
    "checkpoint.Saving": (lambda: fz.checkpoint.Saving, lambda: fz.checkpoint.AsyncSave, "use fz.checkpoint.AsyncSave"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_old_name_does_the_same_and_warns(name: str) -> None:
    old, new, words = CASES[name]
    with pytest.warns(FutureWarning) as caught:
        found = old()
    assert found == new()
    assert any(words in str(x.message) for x in caught), [str(x.message) for x in caught]
    assert {x.filename for x in caught} == {__file__}, "the warning names the line of the user"
    assert len(caught) == (2 if name == "run.keep" else 1), "one warning for each use"


def test_stages_of_a_pipeline_have_the_old_attribute() -> None:
    step = fz.compose(fz.accumulate(2), fz.pipeline())(fz.train_step(_two_blocks, optim.sgd(0.1)))
    params = [{"w": torch.empty(2, 2, device="meta")} for _ in range(2)]
    plan = fz.lower(step, fz.AbstractMesh(pipe=2), params, X).plan
    with pytest.warns(FutureWarning, match="StagePlan.resting_bytes is deprecated.*use StagePlan.persistent_bytes"):
        assert plan.stages[0].resting_bytes == plan.stages[0].persistent_bytes > 0


@fz.block
def _layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def _two_blocks(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = _layer(p, x)
    return x.square().mean()


def test_the_json_of_a_plan_has_both_keys() -> None:
    data = json.loads(PLAN.to_json())
    for old, new in {
        "speed_of_light": "roofline_fraction",
        "resting_bytes": "persistent_bytes",
        "host_resting_bytes": "host_persistent_bytes",
        "ward_bytes": "peer_replica_bytes",
    }.items():
        assert data[old] == data[new]


def test_the_json_of_a_budget_has_both_keys() -> None:
    lowered = fz.lower(STEP, fz.AbstractMesh(data=1), PARAMS, X, device="h100", memory_budget="1GB")
    data = plan_data(lowered, lowered.plan)["budget"]
    for old, new in {"whole_grads": "full_grads", "stay": "secondary_shard", "guess": "speculative"}.items():
        assert data[old] == data[new] == getattr(lowered.options, new)


def test_the_old_and_the_new_keyword_together_are_an_error() -> None:
    both = call(fz.accumulate, STEP, 2, vertical=True, schedule="layerwise")
    raises(FzeroTypeError, both, "vertical= is the old name of schedule=, and both are given", "leave vertical= out")


TARGET = """
import torch
import fzero as fz

def target():
    step = fz.data_parallel()(fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.optim.sgd(0.1)))
    return step, {"w": torch.empty(4, 4, device="meta")}, torch.empty(8, 4, device="meta")
"""


def test_old_flags_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(TARGET)
    found = []
    for flag in ("--whole", "--include-process"):
        out, err = io.StringIO(), io.StringIO()
        given = [f"{tmp_path / 'made.py'}:target", "--mesh", "data=2", "--device", "h100", "--budget", "4GiB", flag]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["plan", *given])
        found.append((code, out.getvalue()))
        warned = "fzero: --whole is deprecated and will be removed in 0.4: use --include-process" in err.getvalue()
        assert warned == (flag == "--whole")
    assert found[0] == found[1] and found[0][0] == 0
    flags = ["plan", "--hf", "llama", "--accumulate", "8", "--layerwise"]
    assert renamed_flags([*flags[:-1], "--vertical"], _RENAMED, None) == flags


def test_old_flags_of_the_supervisor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    old = ["--hang", "5", "--lost-host=9", "--max-losses", "2", "train.py", "--hang", "7"]
    new = ["--hang-timeout", "5", "--heartbeat-timeout=9", "--max-failures", "2", "train.py", "--hang", "7"]
    assert supervisor._normalized(old) == new
    said = capfd.readouterr().err
    assert "fzero.run: --lost-host is deprecated and will be removed in 0.4: use --heartbeat-timeout" in said
    assert supervisor._normalized(new) == new and capfd.readouterr().err == ""
    monkeypatch.setenv("RANK", "1")  # one rank says it for all
    assert supervisor._normalized(old) == new and capfd.readouterr().err == ""


def test_an_old_import_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_of_0_2.py").write_text("from fzero import once_a_step\nfrom fzero.data import read_ahead\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(FutureWarning) as caught:
        import script_of_0_2  # pyright: ignore[reportMissingImports]
    assert script_of_0_2.once_a_step is fz.hierarchical and script_of_0_2.read_ahead is fz.data.prefetch
    assert {Path(x.filename).name for x in caught} == {"script_of_0_2.py"}
    del sys.modules["script_of_0_2"]


def test_modules_are_found_by_the_names_of_0_2(tmp_path: Path) -> None:
    """In an interpreter that has none of them yet. They are the modules themselves, not copies."""
    script = tmp_path / "script.py"
    script.write_text(
        "import fzero as fz\n"
        "from fzero.program.ops import transfer_bytes\n"
        "from fzero.program.ir import Instruction, Line\n"
        "from fzero.launcher import tell\n"
        "import fzero.transforms.base\n"
        "import fzero.experts\n"
        "from fzero.ir import ops, program\n"
        "assert Line is Instruction is program.Instruction and transfer_bytes is ops.transfer_bytes\n"
        "assert fz.experts is fzero.experts\n"
        "assert issubclass(type(fz.shard_params()), fzero.transforms.base.Transform)\n"
        "names = {name: __import__('importlib').import_module(name).__name__ for name in fz._MOVED}\n"
        "packages = {name: name for name in ('fzero.program', 'fzero.program.ops')}\n"
        "assert names == fz._MOVED | packages\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "FutureWarning" in line]
    assert (
        f"{script}:4: FutureWarning: fzero.launcher is deprecated and will be removed in 0.4: use fzero.comm.launcher"
        in lines
    )
    assert all(line.startswith(str(script)) for line in lines[:5]), lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import fzero.program.ir", "fzero.program.ir is deprecated and will be removed in 0.4: use fzero.ir.program"),
        ("from fzero.program import ir", "use fzero.ir.program"),
        ("from fzero.program.ops.base import Op", "use fzero.ir.ops.op"),
        ("from fzero.program.ops import OPS, transfer_bytes", "use fzero.ir.ops"),
        ("import fzero.program.ops as ops; ops.OPS; ops.transfer_bytes", "use fzero.ir.ops"),
        ("import fzero.program.ir; fzero.program.ir.Program", "use fzero.ir.program"),
        ("import fzero.experts", "fzero.experts is deprecated and will be removed in 0.4: use fz.experts"),
        ("from fzero.launcher import tell", "use fzero.comm.launcher"),
    ],
)
def test_an_import_by_an_old_name_warns_once(tmp_path: Path, line: str, words: str) -> None:
    """In an interpreter that has none of the modules yet."""
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        f"    {line}\nfor x in caught:\n    print(x.filename, x.lineno, x.category.__name__, x.message)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (told,) = done.stdout.splitlines()
    assert told.startswith(f"{script} 4 FutureWarning fzero.") and told.endswith(words)


def test_a_decisions_answer_warns() -> None:
    decision = fz.deepspeed.load_config({"train_batch_size": 8, "optimizer": {"type": "SGD"}}, world=1).decisions[0]
    with pytest.warns(FutureWarning, match="use Decision.status"):
        assert decision.answer == "meaning"
    assert decision.status == "applied"
