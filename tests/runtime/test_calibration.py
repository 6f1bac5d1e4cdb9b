"""Calibration: what is measured, the file it is kept in, and the files that are refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil

import pytest
import torch

import fzero as fz
from fzero.errors import FzeroValueError
from fzero.memory import scratch_allocation
from fzero.plan.calibration import calibration_path, load_calibration, machine, save_calibration
from fzero.plan.device_lookup import FORMAT, KNOWN, Device, Link, get_device
from fzero.runtime import calibrate as module
from fzero.runtime import probes
from fzero.runtime.calibrate import calibrate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def here(folder):
    """A calibration of this machine, in its file."""
    device = module._device({"flops": {"float32": 1e9, "bfloat16": 1e9}, "links": {"intra": Link(1e-6, 1e9)}}, "cpu", 1)
    save_calibration(device, calibration_path())
    return device


def plausible(device):
    """Every number measured, positive and not absurd."""
    assert set(device.flops) >= {"float32", "bfloat16"} and set(device.attention) >= {"float32", "float32 backward"}
    assert all(1e8 < rate < 1e16 for rate in (*device.flops.values(), *device.attention.values()))
    assert 1e8 < device.memory_bandwidth < 1e13 and 1e7 < device.transcendentals < 1e15
    assert 0 < device.call_seconds < 0.01
    for link in (*device.links.values(), device.host_copy, device.disk_read, device.disk_write):
        assert 0 <= link.latency < 1 and 1e5 < link.bandwidth < 1e13 and math.isfinite(link.bandwidth)
    assert device.memory_bytes > 1 << 28
    assert all(1e5 < rate < 1e13 for rate in (device.host_memory_bandwidth, device.disk_mixed))


def on_ranks(path):
    os.environ["FZERO_CACHE"] = path
    mesh = fz.make_mesh(data=2)
    said = []
    device = calibrate(mesh, seconds=0.1, progress=said.append)
    return device.to_json(), said


@pytest.fixture(scope="module")
def together(pool, tmp_path_factory):
    """The folder of a cache that two ranks measured into, compiling the function whose calls they time, and what they
    returned."""
    path = tmp_path_factory.mktemp("together")
    return path, pool.run(2, on_ranks, str(path), timeout=240)


@pytest.mark.full
def test_ranks_measure_together_and_keep_one_file(together):
    path, ((first, said), (second, _)) = together
    assert first == second == (path / "calibration.json").read_text().strip()
    assert [p.name for p in path.glob("*calibration*")] == ["calibration.json"]
    device = Device.from_json(first)
    plausible(device)
    assert device.links["intra"] != KNOWN["cpu"].links["intra"]
    assert "2 ranks at once" in device.source and "link inter as of cpu" in device.source
    assert "links" in said and "products in float32" in said


@pytest.mark.full
def test_one_process_starts_the_others(together, folder, monkeypatch):
    shutil.copytree(together[0] / "functions", folder / "functions")
    monkeypatch.setattr(module, "_places", lambda device_type: 2)
    device = calibrate(seconds=0.1)
    plausible(device)
    assert "2 ranks at once" in device.source
    assert get_device(None) == device


def test_processes_that_fail_say_so(folder, monkeypatch):
    monkeypatch.setattr(module, "_places", lambda device_type: 2)
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(FzeroValueError, match="rank 0: no output"):
        calibrate(seconds=0.1)
    assert not calibration_path().exists()


def test_a_plan_finds_this_machines_file(here):
    assert get_device(None) == load_calibration(calibration_path()) == here
    assert get_device(calibration_path()) == get_device(str(calibration_path())) == here
    assert get_device(None, "cuda") is KNOWN["h100"]


def test_without_a_file_the_generic_device_is_taken(folder):
    assert get_device(None) is KNOWN["cpu"]
    assert get_device(None, "cuda") is KNOWN["h100"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda data: data.update(torch="1.0"), f"torch: '1.0' in the file, {torch.__version__!r} here"),
        (lambda data: data.update(format=-1), "format: -1 in the file"),
        (lambda data: data["machine"].update(cpu="another"), "cpu: 'another' in the file"),
        (lambda data: data["machine"].update(threads=99), "threads: 99 in the file"),
    ],
)
def test_a_file_of_another_machine_or_version_is_refused(here, change, shown):
    data = json.loads(calibration_path().read_text())
    change(data)
    calibration_path().write_text(json.dumps(data))
    with pytest.raises(FzeroValueError) as error:
        load_calibration(calibration_path())
    assert shown in str(error.value)
    assert str(error.value).splitlines()[-1].startswith("Fix:") and "fzero calibrate" in str(error.value)
    # by default it is as if there were none, but the plan says so
    found = get_device(None)
    assert dataclasses.replace(found, source="") == dataclasses.replace(KNOWN["cpu"], source="")
    assert found.source.startswith(KNOWN["cpu"].source) and shown in found.source
    if "format" not in shown:  # a plan may be for any machine
        assert get_device(calibration_path()) == Device.from_json(calibration_path().read_text())


def test_a_file_of_an_older_format_is_refused_by_name(here):
    """It has other rates, or ones that were measured otherwise; measuring again replaces it."""
    data = json.loads(calibration_path().read_text())
    data["format"] = FORMAT - 1
    del data["transcendentals"]
    calibration_path().write_text(json.dumps(data))
    for named in (calibration_path(), f"{calibration_path()},memory_bytes=1GB"):
        with pytest.raises(FzeroValueError) as error:
            get_device(named)
        assert f"format: {FORMAT - 1} in the file, {FORMAT} here" in str(error.value)
        assert "fzero calibrate" in str(error.value).splitlines()[-1]
    save_calibration(here, calibration_path())
    assert get_device(None) == here


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2, "torch": "x", "machine": 3}'])
def test_a_file_that_is_no_calibration_is_refused(folder, text):
    (folder / "calibration.json").write_text(text)
    with pytest.raises(FzeroValueError, match="not a calibration file"):
        load_calibration(folder / "calibration.json")


def test_a_file_that_lacks_a_number_is_refused(here):
    data = json.loads(calibration_path().read_text())
    del data["memory_bandwidth"]
    calibration_path().write_text(json.dumps(data))
    with pytest.raises(FzeroValueError, match="memory_bandwidth"):
        load_calibration(calibration_path())


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("fzero.runtime.calibrate.rates", None)
    with pytest.raises(FzeroValueError, match=r"/proc/rates\.json cannot be written: "):
        calibrate(fz.make_mesh(data=1), path="/proc/rates.json")


def test_the_cache_may_be_off(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FZERO_CACHE", "off")  # about compiled functions
    assert calibration_path() == tmp_path / ".cache" / "fzero" / "calibration.json"


def test_a_machine_is_told_by_what_changes_its_rates():
    before = machine("cpu")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert {k for k, v in machine("cpu").items() if v != before[k]} == {"threads"}
    finally:
        torch.set_num_threads(threads)


def test_the_rate_of_functions_counts_as_a_plan_does(monkeypatch):
    """Two exponentials, two error functions, two tanhs at three each, of every element."""
    monkeypatch.setattr(probes, "best", lambda run, device, seconds: (run(), 1.0)[1])
    monkeypatch.setattr(probes, "has_compiler", lambda: False)
    assert probes.transcendental_rate(fz.make_mesh(data=1), 1.0) == 10 * probes._ELEMENTS


def test_memory_is_measured_past_the_caches(monkeypatch):
    monkeypatch.setattr(probes, "best", lambda run, device, seconds: run().nbytes)
    monkeypatch.setattr(probes, "_PAST_CACHES", 1 << 16)
    assert probes.copy_rate(torch.device("cpu"), 1.0) == 2  # read and written, of as much as was copied
    assert probes._COPY > 1 << 23


def test_a_line_through_two_times_is_a_link():
    found = probes.fitted({1000: 1.001, 2001000: 3.001})
    assert (found.latency, found.bandwidth) == pytest.approx((1.0, 1e6))
    assert probes.fitted({10: 1.0, 1000: 0.5}).bandwidth > 0  # noise: more bytes took less time


def test_bfloat16_is_measured_as_the_runtime_runs_it(monkeypatch):
    monkeypatch.setattr(probes.compat, "native_bf16", lambda device: False)
    a = torch.randn(64, 64).to(torch.bfloat16)
    (out,) = probes.as_run(torch.mm, a, a)()
    assert torch.equal(out, (a.float() @ a.float()).to(torch.bfloat16))


def test_the_disk_of_a_directory_is_measured_as_leaves_are_moved(monkeypatch, tmp_path):
    made, moved = [], []

    class Watched(probes.ScratchFiles):
        def __init__(self, directories, nbytes):
            super().__init__(directories, nbytes)
            made.append((directories, nbytes, [p.name for p in tmp_path.iterdir()]))

        def close(self):
            moved.append((self.bytes_read, self.bytes_written))
            super().close()

    monkeypatch.setattr(probes, "ScratchFiles", Watched)
    read, written, mixed = probes.disk(0.01, tmp_path)
    assert min(read.bandwidth, written.bandwidth, mixed) > 0
    ((directory, nbytes, files),) = made
    assert directory == tmp_path and not files and not list(tmp_path.iterdir())  # nothing is left behind
    assert min(moved[0]) >= nbytes  # and more was moved than the file holds: nothing is read that was never written


def test_disk_falls_back_to_the_page_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(scratch_allocation, "_is_direct", lambda path: False)
    assert all(rate.bandwidth > 0 for rate in probes.disk(0.01, tmp_path)[:2])


def test_a_directory_that_is_not_there_is_told_before_anything_is_measured(folder):
    with pytest.raises(FzeroValueError, match="the directory does not exist"):
        calibrate(seconds=0.1, directory=folder / "missing")
    assert not calibration_path().exists()


def test_attention_is_measured_as_cuda_has_it(monkeypatch):
    """Its forward returns, and its backward takes, the state of a dropout: unsigned numbers on the device, which a
    trace may not meet unannounced."""
    cpu, shapes = probes._FUSED["cpu"], set()

    def forward(q, k, v, p, causal):
        return (
            *cpu.forward(q, k, v, p, causal),
            None,
            None,
            256,
            256,
            torch.zeros(2, dtype=torch.uint64),
            torch.zeros((), dtype=torch.uint64),
        )

    def backward(dout, q, k, v, out, logsumexp, offsets_q, offsets_k, most_q, most_k, p, causal, seed, offset):
        assert (offsets_q, offsets_k, most_q, most_k, seed.dtype) == (None, None, 256, 256, torch.uint64)
        shapes.add((tuple(seed.shape), tuple(offset.shape)))
        return cpu.backward(dout + 0 * seed.float().sum(), q, k, v, out, logsumexp, p, causal)

    monkeypatch.setitem(probes._FUSED, "cpu", probes._Fused(forward, backward, (torch.float32,)))
    rates = probes.attention_rates(torch.float32, torch.device("cpu"), 1e-3, 128)
    assert all(rate > 0 for rate in rates) and shapes == {((2,), ())}
    assert torch.float32 not in probes._FUSED["cuda"].dtypes
