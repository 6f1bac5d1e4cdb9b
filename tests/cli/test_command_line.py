"""The command line: what it prints is what the library says, its exit codes, and that no mistake of a user ends in a
traceback of ours."""

from __future__ import annotations

import functools
import html
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fzero as fz
from fzero._utils.units import size
from fzero.cli import commands, main, step_command
from fzero.cli.target import load
from fzero.ir.printer import show, statements
from fzero.plan.device_lookup import KNOWN, Device, Link

ROOT = Path(__file__).resolve().parents[2]

TARGETS = '''
"""Targets, right and wrong."""
import argparse
import sys

import torch
import fzero as fz
from fzero import optim


@fz.block
def layer(p, x):
    return x + torch.relu(x @ p["up"]) @ p["down"]


def loss_fn(params, batch):
    for p in params:
        batch = layer(p, batch)
    return batch.square().mean()


def meta(*shape):
    return torch.empty(*shape, device="meta")


def good(layers=4, d=64, width=256):
    print("said by the target", sys.argv)
    step = fz.compose(fz.shard_params(), fz.remat("auto"), fz.accumulate(2))(fz.train_step(loss_fn, optim.adamw(1e-3)))
    return step, [{"up": meta(d, width), "down": meta(width, d)} for _ in range(layers)], meta(64, d)


def on_tiers():
    step, params, batch = good()
    return fz.offload("auto")(step), params, batch


def evaluation():
    step, params, batch = good()
    return fz.shard_params(fz.eval_step(loss_fn)), params, (batch,)


def from_init():
    step, params, batch = good()
    return step, lambda key: [{"up": fz.random.normal(key, (64, 256)), "down": torch.zeros(256, 64)}], batch


def two():
    return good()[:2]


def mixed_up():
    step, params, batch = good()
    return params, step, batch


def nothing():
    pass


def needs(size, more=1):
    return good()


def fails():
    return inner()


def inner():
    raise ValueError("my own mistake")


def fails_in_turn():
    try:
        inner()
    except ValueError as error:
        raise KeyError("and another") from error


def in_the_trace():
    def wrong(params, batch):
        return layer(params[0], batch[:, :13]).sum()

    _, params, batch = good()
    return fz.shard_params(fz.train_step(wrong, optim.sgd(0.1))), params, batch


def misused():
    return fz.shard_params(fz.train_step(loss_fn, optim.sgd(0.1))), good()[1], "no batch"


def leaves():
    argparse.ArgumentParser().parse_args(["--nope"])


def waits():
    import time

    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)


value = 3
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with targets, where the commands run; what they import is forgotten after the test."""
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in [
        n for n in sys.modules if n not in before and str(tmp_path) in str(getattr(sys.modules[n], "__file__", ""))
    ]:
        del sys.modules[name]


@pytest.fixture
def run(here, capsys):
    """Exit code, stdout and stderr of a command line."""

    def run(*args):
        code = main([str(a) for a in args])
        return code, *capsys.readouterr()

    return run


def lowered(function="good", *, mesh=None, **kwargs):
    step, params, batch = load(f"targets.py:{function}")
    return fz.lower(step, mesh or fz.AbstractMesh(data=8), params, batch, **kwargs)


MESH = ("--mesh", "data=8")
H100 = ("--device", "h100")


# --- plan ---


@pytest.mark.parametrize("target", ["targets.py:good", "targets:good", "./targets.py:good"])
def test_plan_is_the_librarys(run, target):
    code, out, err = run("plan", target, *MESH, *H100)
    plan = lowered(device="h100").plan
    assert code == 0 and len(out.splitlines()) <= 14 and "predicted, not measured" in out
    assert re.search(r"^fits +yes: 73.\d\d GiB of device memory to spare$", out, re.M)
    assert f"program {size(plan.peak_bytes)}, process {size(plan.process_bytes)}" in out
    assert err == f"said by the target {[target.split(':')[0]]}\n", (
        "what the target prints goes to stderr; it sees no flags of ours"
    )


@pytest.mark.parametrize("function", ["evaluation", "from_init"])
def test_plan_of_an_evaluation_and_of_an_init_function(run, function):
    code, out, _ = run("plan", f"targets.py:{function}", *MESH, *H100, "--details")
    assert code == 0 and out.startswith(str(lowered(function, device="h100").plan))


def test_plan_for_a_backend_and_a_mesh_of_two_axes(run):
    code, out, _ = run("plan", "targets.py:good", "--mesh", "data=4", *H100, "--backend", "eager", "--json")
    want = lowered(mesh=fz.AbstractMesh(data=4), device="h100", backend="eager").plan
    assert (
        code == 0
        and json.loads(out)
        == json.loads(want.to_json()) | {"device_memory": {"bytes": 80 * 10**9 - want.process_bytes, "fits": True}}
        and want.backend == "eager"
    )
    code, _, err = run("plan", "targets.py:good", "--mesh", "replica=2", "data=4")
    assert code == 1 and "fz.data_parallel(axis='replica')" in err


@pytest.mark.full
def test_without_a_budget_the_plan_is_compared_with_the_devices_own_memory(run):
    """The process is in the device's memory too."""
    plan = lowered(device="h100").plan
    for nbytes, want in ((plan.peak_bytes, 0), (plan.peak_bytes - 1, 1)):
        device = ("--device", f"h100,memory_bytes={nbytes + plan.process_bytes}B")
        code, out, _ = run("plan", "targets.py:good", *MESH, *device)
        assert code == want and re.search(f"^fits +{'no' if want else 'yes'}: ", out, re.M)
        assert bool(re.search("--budget [0-9.]+[KMG]iB looks", " ".join(out.split()))) == bool(want)
        code, out, _ = run("plan", "targets.py:good", *MESH, *device, "--json")
        assert code == want and json.loads(out)["device_memory"] == {"bytes": nbytes, "fits": not want}
    # on whatever is here: of a generic device nobody has the memory
    code, out, _ = run("plan", "targets.py:good", *MESH)
    assert code == 0 and re.search("^fits +not known: --device NAME", out, re.M)


def test_a_device_file_is_taken_whatever_machine_it_was_written_on(run, here):
    """As `Device.to_json` writes one, and of another machine; with a note."""
    mine = replace(KNOWN["rtx4090"], name="mine", host_copy=replace(KNOWN["rtx4090"].host_copy, bandwidth=1e9))
    for machine in ({}, {"device_type": "cuda", "cpu": "another"}):
        (here / "mine.json").write_text(replace(mine, machine=machine).to_json())
        code, out, err = run("plan", "targets.py:good", *MESH, "--device", "mine.json", "--details")
        assert code == 0 and out.startswith(str(lowered(device=mine).plan)) and " of 22.35 GiB: program " in out
        assert (
            "mine.json was not measured on this machine, and is used unchanged" in err
            and f"cpu: {machine.get('cpu')!r} in the file" in err
        )


@pytest.mark.full
def test_a_budget_that_fits(run):
    least = lowered(memory_budget=1 << 40, device="h100").plan.peak_bytes
    for flags in (("--budget", f"{least}B"), ("--budget", "1TB")):
        code, out, _ = run("plan", "targets.py:good", *MESH, *H100, *flags, "--details")
        want = lowered(memory_budget=flags[1], device="h100")
        assert code == 0 and out.startswith(str(want.plan))
        assert "choices" in out and "share of activation memory" in out and "reduced once a step" in out
        assert re.search(r"^fits +yes: .* below --budget .*; 73.* of device memory to spare$", out, re.M)
    code, out, _ = run("plan", "targets.py:good", *MESH, *H100, "--budget", "1TB", "--json")
    found = json.loads(out)
    assert code == 0 and found["peak_bytes"] == least
    assert (
        found["budget"]["fits"]
        and found["budget"]["bytes"] == 10**12
        and found["budget"]["order"]["shared"] == want.options.order.shared > 0
    )


@pytest.mark.full
def test_a_budget_that_does_not_fit(run):
    least = 1 << 18  # the state has room, the step has not
    with pytest.raises(fz.errors.BudgetError) as error:
        lowered(memory_budget=least, device="h100")
    code, out, err = run("plan", "targets.py:good", *MESH, *H100, "--budget", f"{least}B")
    assert code == 1 and not out and err.endswith(f"{error.value}\n")
    code, out, err = run("plan", "targets.py:good", *MESH, *H100, "--budget", f"{least}B", "--json")
    assert (
        code == 1
        and json.loads(out) == {"budget": {"bytes": least, "fits": False, "error": str(error.value)}}
        and str(error.value) in err
    )


def test_trace_and_picture(run, here):
    pytest.importorskip("matplotlib")
    code, _, _ = run(
        "plan", "targets.py:good", *MESH, *H100, "--trace", "step.json", "--picture", "memory.svg", "--budget", "1GB"
    )
    assert code == 0
    assert {e["ph"] for e in json.loads((here / "step.json").read_text())["traceEvents"]} == {"M", "X", "C"}
    assert "budget" in (here / "memory.svg").read_text()


def test_html_is_a_page_with_alternatives(run, here):
    pytest.importorskip("vl_convert")
    code, _, err = run("plan", "targets.py:good", *MESH, *H100, "--html", "report.html")
    page = (here / "report.html").read_text()
    assert code == 0 and "the page: report.html" in err
    assert "It fits" in page and "With other transforms" in page and "The same program on other devices" in page
    assert "<td>with fz." in page and "from targets import good" in page


def test_html_lists_the_alternatives_for_which_there_was_no_time(run, here):
    pytest.importorskip("vl_convert")
    run("plan", "targets.py:good", *MESH, *H100, "--html", "report.html", "--html-seconds", "0")
    rows = re.findall(r"<td>with(?:out)? fz", page := (here / "report.html").read_text())
    assert len(rows) > 3 and page.count("not planned: no time left") == len(rows) and "--html-seconds" in page


def test_html_plans_alternatives_on_the_tiers_that_were_chosen(run, here):
    pytest.importorskip("vl_convert")
    budget = ("--budget", "800KB", "--host-budget", "4GB")
    code, _, _ = run("plan", "targets.py:on_tiers", *MESH, *H100, *budget, "--html", "report.html")
    page = html.unescape((here / "report.html").read_text())
    assert code == 0 and "With other transforms, on the tiers that offload('auto') chose" in page
    assert "<td>with fz.remat" in page and "<td>without fz.offload('cpu'" in page


def test_html_is_also_written_for_a_step_that_does_not_fit(run, here):
    pytest.importorskip("vl_convert")
    code, _, err = run("plan", "targets.py:good", *MESH, *H100, "--budget", "100KB", "--html", "report.html")
    page = (here / "report.html").read_text()
    assert code == 1 and "Fix:" in err
    assert "It does not fit" in page and "Fix:" in page and "too much" in page


# --- show ---


def test_show_is_the_program(run):
    code, out, _ = run("show", "targets.py:good", *MESH)
    assert code == 0 and out == str(lowered().program)
    code, out, _ = run("show", "targets.py:good", *MESH, "--flat")
    assert code == 0 and out == show(lowered().program, fold=False)
    code, out, _ = run("show", "targets.py:good", *MESH, "--budget", "1TB", *H100)
    assert code == 0 and out == str(lowered(memory_budget="1TB", device="h100")) != str(lowered(device="h100"))


def test_show_as_data(run):
    code, out, _ = run("show", "targets.py:good", *MESH, "--json")
    found, program = json.loads(out), lowered().program
    assert code == 0 and [x["text"] for x in found["lines"]] == statements(program) and found["program"] == str(program)
    leaf = next(x for x in found["leaves"] if x["name"] == "params[0]['up']")
    assert leaf == {
        "name": "params[0]['up']",
        "path": "params[0]['up']",
        "role": "params",
        "shape": [64, 256],
        "dtype": "float32",
        "axes": ["data"],
    }
    assert {x["times"] for x in found["lines"]} == {1, 2}


# --- wrong targets and flags ---

WRONG = {
    "targets.py:god": ["targets.py has no function 'god'", "near: targets.py:good"],
    "targets:wiats": ["targets has no function 'wiats'", "near: targets:waits"],
    "target.py:good": ["the file target.py", "near: targets.py"],
    "no/folder.py:good": ["the file no/folder.py", "the folder no"],
    "targest:good": ["the module 'targest' does not exist", "near: targets"],
    "fzero.compilr:plan": ["the module 'fzero.compilr' does not exist", "near: fzero.compiler"],
    "targets.py": ["'targets.py' is not MODULE:FUNCTION"],
    "targets.py:": ["'targets.py:' is not MODULE:FUNCTION"],
    "targets.py:value": ["targets.py:value is not a function but int"],
    "targets.py:needs": ["targets.py:needs needs arguments: size\n"],
    "targets.py:two": ["expected: (step, params, batch)", "returned: a tuple of 2: (Step, list)"],
    "targets.py:mixed_up": ["returned: a tuple of 3: (list, Step, Tensor)"],
    "targets.py:nothing": ["returned: NoneType"],
}


@pytest.mark.parametrize("target", WRONG)
def test_wrong_targets(run, target):
    code, out, err = run("plan", target, *MESH)
    assert code == 2 and not out and "Traceback" not in err
    assert all(text in err for text in (*WRONG[target], "fzero.target: ", "Fix: ")), err


FLAGS = {
    ("--mesh", "data"): "data: a size is a whole number",
    ("--mesh", "8"): "8: which axis has this size? e.g. data=8",
    ("--mesh", "data=0"): "data=0: a size is a whole number of at least 1\nFix: e.g. --mesh data=8",
    ("--mesh", "data=8", "data=2"): "data: given twice",
    ("--mesh",): "--mesh requires axes with their sizes",
    ("--mesh", "dta=8"): "'dta' is not one of node, replica, data, expert, seq, pipe, model: did you mean data?",
    ("--mesh", "data8"): "data8: did you mean data=8?",
    ("--mesh", "node:2,data=4"): "node:2: did you mean node=2?",
    (
        "--mesh",
        "node=2,data=local",
    ): "data=local: local depends on the number of processes, and there are none: give a number",
    ("--mesh", "data=99999999999999999999"): "99,999,999,999,999,999,999 devices are more than 1,048,576",
    (*MESH, "--budget", "lots"): "'lots' is not an amount of memory",
    (*MESH, "--budget", "80"): "did you mean 80GB? Bytes are 80B",
    (*MESH, "--budget", "0"): "memory_budget=0: must be greater than 0",
    (*MESH, "--device", "h1000"): "'h1000' is neither a known device nor a calibration file\n  b200: NVIDIA HGX B200",
    (*MESH, "--device", "targets.py"): "targets.py is not a calibration file",
    (*MESH, "--device", "."): "is a directory, not a file",
    (*MESH, "--device", ""): "Fix: give the path of a file that fzero calibrate wrote, or one of b200",
    (*MESH, "--device", "bytes.dat"): "bytes.dat is not a calibration file",
    (*MESH, "--device", "zero.json"): "memory_bandwidth is 0.0; latency is -1.0",
    (*MESH, "--trace", "no/where.json"): "--trace no/where.json: the folder no does not exist",
    (*MESH, "--picture", "memory.jpg"): "--picture memory.jpg: a picture is a .png or .svg",
    (*MESH, "--html", "report.pdf"): "--html report.pdf: a page is a .html",
    (*MESH, "--html", "no/report.html"): "--html no/report.html: the folder no does not exist",
    (*MESH, "--html-seconds", "nan"): "--html-seconds must be at least 0, not nan",
    (*MESH, "--html", "/proc/report.html"): "--html /proc/report.html: No such file or directory",
    (*MESH, "--trace", "/proc/step.json"): "--trace /proc/step.json: No such file or directory",
    (*MESH, "--picture", "/proc/step.svg"): "--picture /proc/step.svg: No such file or directory",
    (*MESH, "--trace", "r.html", "--html", "./r.html"): "--html r.html: is also the file of --trace",
    (*MESH, "--devcie", "h100"): "--device",  # tyro's suggestion
    (*MESH, "--backend", "fast"): "invalid choice 'fast'",
    (): "--mesh AXIS=SIZE",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_wrong_flags(run, flags):
    Path("bytes.dat").write_bytes(b"\xff\xfe\x00")
    odd = replace(KNOWN["a100"], memory_bandwidth=0.0, links={**KNOWN["a100"].links, "intra": Link(-1.0, 1e9)})
    Path("zero.json").write_text(odd.to_json())
    code, out, err = run("plan", "targets.py:good", *flags)
    assert code == 2 and FLAGS[flags] in err and "Traceback" not in err and "said by" not in err, (
        "told before the target runs"
    )
    assert not out


def test_a_pass_that_is_not_there(run):
    code, out, err = run("show", "targets.py:good", *MESH, "--after", "sahrd")
    assert (
        code == 2
        and not out
        and "--after sahrd: unknown pass" in err
        and "in order: trace, fuse, copies, remat" in err
        and "None" not in err
    )


def test_passes_one_by_one(run):
    code, out, err = run("show", "targets.py:good", *MESH, "--diff", "overlap", "--flat")
    assert code == 0 and out == lowered().diff("overlap", fold=False) and out.startswith("--- before overlap\n")
    assert (
        "passes that ran: trace, fuse, remat, accumulate, shard, partition_update, hoist_updates, overlap, pool" in err
    )
    code, out, err = run("show", "targets.py:good", *MESH, "--skip", "hoist_updates", "overlap")
    assert code == 0 and out == str(lowered(skip=["hoist_updates", "overlap"]).program) != str(lowered().program)
    assert "partition_update, pool" in err
    found = json.loads(run("show", "targets.py:good", *MESH, "--json", "--diff", "pool")[1])
    assert found["diff"] == lowered().diff("pool") and found["passes"][-1] == "pool" and "program" not in found


@pytest.mark.parametrize(
    ("flags", "want", "said"),
    [
        (["--diff", "sahrd"], 2, "--diff sahrd: unknown pass"),
        (["--after", "batch"], 2, "'batch' does not run for this step"),
        (["--after", "pool", "--diff", "pool"], 2, "both --after pool and --diff pool"),
        (["--skip", "pool", "batch"], 2, "pool: communicated values would have no buffers"),
        (
            ["--skip", "sahrd"],
            2,
            "sahrd: no such pass\nFix: one of fuse, remat, deal, speculate, hoist_updates, overlap",
        ),
        (["--skip", "batch"], 1, "batch: has nothing to do for this step"),
    ],
)
def test_passes_that_cannot_be_shown_or_skipped(run, flags, want, said):
    code, out, err = run("show", "targets.py:good", *MESH, *flags)
    assert code == want and said in err and "Traceback" not in err and not out


def test_no_command_and_a_wrong_one(run):
    assert run()[0] == 2
    code, _, err = run("pla")
    assert code == 2 and "plan, show, check, calibrate, doctor" in err


# --- whose error ---


def frames(text):
    return [line.split(", in ")[1] for line in text.splitlines() if line.startswith("  File ")]


@pytest.mark.parametrize(
    ("function", "names", "last"),
    [
        ("fails", ["fails", "inner"], "ValueError: my own mistake"),
        ("fails_in_turn", ["fails_in_turn", "inner", "fails_in_turn"], "KeyError: 'and another'"),
    ],
)
def test_a_users_own_traceback(run, function, names, last):
    code, out, err = run("plan", f"targets.py:{function}", *MESH)
    assert code == 1 and not out and frames(err) == names and err.splitlines()[-1].startswith(last)
    assert "fzero" not in err.replace("fz.", "") and "torch/" not in err and "failed while attempting" not in err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--sequence", "2048"), "--sequence: did you mean --seq?"),
        (("--sequence=2048",), "--sequence: did you mean --seq?"),
        (("--gpus", "8"), "--gpus: did you mean --devices?"),
        (("--memory_budget", "8GB"), "--memory-budget: did you mean --host-budget?"),
    ],
)
def test_an_unknown_flag_names_the_nearest(run, args, line):
    code, out, err = run("plan", "targets.py:good", *MESH, *args)
    assert code == 2 and not out and err.splitlines()[-1] == line


def test_known_flags_are_not_corrected(run):
    code, _, err = run("plan", "targets.py:good", *MESH, "--host-budget", "1GB", "--seq", "many")
    assert code == 2 and "did you mean" not in err
    code, _, err = run("plan", "targets.py:good", *MESH, "--xyzzyx")
    assert code == 2 and "did you mean" not in err


def test_an_exit_of_the_users(run):
    code, _, err = run("plan", "targets.py:leaves", *MESH)
    assert (
        code == 1
        and "unrecognized arguments: --nope" in err
        and frames(err)[0] == "leaves"
        and err.splitlines()[-1] == "SystemExit: 2"
    )


def test_errors_of_the_library_are_their_text(run):
    code, out, err = run("plan", "targets.py:misused", *MESH)
    assert code == 1 and not out and "fzero." in err and "batch" in err and "Traceback" not in err


def test_a_mistake_in_the_users_loss_is_told_with_its_line(run):
    code, out, err = run("plan", "targets.py:in_the_trace", *MESH)
    assert code == 1 and not out and "Traceback" not in err and "torch/" not in err
    assert "targets.py:" in err and "batch" in err and "float32[" in err and "Fix: " in err


def test_modules_that_fail_to_import(run, here):
    (here / "syntax.py").write_text("def f(:\n    pass\n")
    (here / "missing.py").write_text("import targets\nimport not_installed\n")
    (here / "calls.py").write_text("import targets\n\ntargets.fails()\n")
    code, _, err = run("plan", "syntax.py:f", *MESH)
    assert (
        code == 1
        and err.splitlines()[0].endswith('syntax.py", line 1')
        and err.splitlines()[-1].startswith("SyntaxError: ")
    )
    for target in ("missing.py:f", "missing:f"):
        code, _, err = run("plan", target, *MESH)
        assert (
            code == 1
            and frames(err) == ["<module>"]
            and err.splitlines()[-1] == "ModuleNotFoundError: No module named 'not_installed'"
        )
    code, _, err = run("plan", "calls.py:f", *MESH)
    assert code == 1 and frames(err) == ["<module>", "fails", "inner"]


def test_an_error_of_ours_is_not_hidden(here, monkeypatch):
    """No frame of it is the user's: a bug, with the whole traceback to report."""
    monkeypatch.setattr(step_command, "lower", functools.partial(divmod, 1, 2, 3))
    with pytest.raises(TypeError):
        main(["plan", "targets.py:good", *MESH])


# --- calibrate ---


@pytest.fixture
def measured(monkeypatch):
    """A measurement that takes no time."""
    asked = {}

    def calibrate(*, seconds, progress, path, directory):
        asked.update(seconds=seconds, path=path, directory=directory)
        progress("products in float32")
        return replace(
            KNOWN["cpu"],
            name="this machine",
            source="measured",
            machine={"device_type": "cpu", "cores": 4, "threads": 1},
        )

    monkeypatch.setattr(commands, "calibrate", calibrate)
    return asked


def test_calibrate_shows_and_says_where(run, measured, here):
    code, out, err = run("calibrate", "--out", "rates.json", "--seconds", 2)
    assert code == 0 and measured == {"seconds": 2.0, "path": Path("rates.json"), "directory": None}
    assert (
        "this machine (cores 4, threads 1): measured" in out
        and "products in float32" in out
        and "60 GFLOP/s" in out
        and "link intra" in out
    )
    assert err == "measuring: products in float32\nwritten to rates.json\n"
    code, out, _ = run("calibrate", "--json")
    assert code == 0 and Device.from_json(out).name == "this machine" and measured["path"] is None
    assert run("calibrate", "--path", ".")[0] == 0 and measured["directory"] == Path(".")


def test_calibrate_wrong_flags(run, measured):
    assert run("calibrate", "--out", "no/rates.json")[0] == 2
    code, _, err = run("calibrate", "--out", "/proc/rates.json")
    assert code == 2 and "--out /proc/rates.json: No such file" in err and not measured
    for seconds in ("-1", "nan", "inf"):
        code, _, err = run("calibrate", "--seconds", seconds)
        assert code == 2 and f"--seconds {seconds} is not enough time" in err and not measured
    code, _, err = run("calibrate", "--path", "no")
    assert code == 2 and "no: the directory does not exist" in err and not measured


# --- help ---


def test_help_and_version(run):
    code, out, _ = run("--help")
    assert (
        code == 0
        and all(name in out for name in ("plan", "show", "calibrate", "MODULE:FUNCTION", "--version"))
        and "examples:" not in out
    )
    for name in ("plan", "show", "calibrate"):
        code, out, _ = run(name, "--help")
        assert code == 0 and f"  fzero {name}" in out and "--json" in out
    code, out, _ = run("--version")
    assert code == 0 and out.startswith(f"fzero {fz.__version__} (torch ")


def test_examples_in_the_help_are_targets(run):
    text = "".join(run(name, "--help")[1] for name in ("plan", "show"))
    named = {word for word in text.split() if word.startswith("examples/")}
    assert len(named) == 2
    for target in named:
        file, function = target.split(":")
        assert f"def {function}(" in (ROOT / file).read_text()


# --- processes ---


def process(*args, start=("-m", "fzero"), **kwargs):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *start, *args], capture_output=True, text=True, timeout=240, env=env, **kwargs
    )


def test_the_script_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["fzero"].split(":")
    assert getattr(importlib.import_module(module), function) is main


@pytest.mark.full
def test_as_a_process():
    """It imports no compiler: Inductor takes seconds, and runs nothing here."""
    code = """
import atexit, runpy, sys
atexit.register(lambda: print('torch._inductor.compile_fx' in sys.modules, file=sys.stderr))
runpy.run_module('fzero', run_name='__main__', alter_sys=True)
"""
    flags = (*MESH, *H100, "--budget", "1TB", "--json")
    done = process("plan", "examples/train_gpt.py:plan_target", *flags, cwd=ROOT, start=("-c", code))
    assert done.returncode == 0 and json.loads(done.stdout)["peak_bytes"] > 0 and done.stderr == "False\n"


def started(*args):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # a shell starts what runs in the background with it ignored
    interrupted = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, "-m", "fzero", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=interrupted,
    )


@pytest.mark.full
def test_a_reader_that_leaves_early(here):
    """`| head`: not a word, and not success."""
    with started("show", "targets.py:good", *MESH, "--flat") as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()  # before anything is written: however much a pipe holds
        assert running.stderr.read() == "said by the target ['targets.py']\n" and running.wait(timeout=120) == 141


@pytest.mark.full
def test_ctrl_c_is_quiet(here):
    with started("plan", "targets.py:waits", *MESH) as running:
        assert running.stderr is not None and running.stderr.readline() == "waiting\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=60) == ("", "") and running.returncode == 130


def test_a_whole_budget_holds_the_process_too(run):
    device = ("--mesh", "data=8", "--device", "a100")
    code, out, _ = run("plan", "targets.py:good", *device, "--budget", "2GiB", "--include-process")
    assert code == 0 and "below --budget 948.0 MiB" in out  # of 2,048: 600 for the context, 500 for NCCL
    code, _, err = run("plan", "targets.py:good", *device, "--include-process")
    assert code == 2 and "--include-process: applies only with --budget SIZE or --host-budget SIZE" in err
