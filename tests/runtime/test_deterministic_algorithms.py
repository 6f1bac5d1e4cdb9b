"""PyTorch's switch for deterministic algorithms: whoever traces, compiles, keeps or compares asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero._compat import compat
from fzero.errors import TraceError
from fzero.ir.program import Function
from fzero.runtime.build import artifact_cache, inductor
from fzero.runtime.build.build import check_backend
from fzero.runtime.build.cpu import compile_worker
from fzero.trace.graph_capture import record
from fzero.trace.guards import deterministic_mode
from fzero.trace.guards.deterministic_mode import DeterministicSetting

CPU = torch.device("cpu")


@pytest.fixture
def asked() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def scattered() -> Function:
    """An accumulation that fzero leaves to the compiler."""

    def fn(x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten._unsafe_index_put.default(x, [rows.flatten().long()], rows.expand(64, 64), True).sin()]

    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        return Function(
            "scattered", record(fn, [torch.empty(64, 64), torch.empty(64, 1)], owner="test", names=["x", "rows"])
        )


def test_a_setting_is_taken_over_and_says_what_it_is() -> None:
    before = deterministic_mode.setting()
    assert before == DeterministicSetting(False, False, False) and str(before) == "off"
    try:
        for setting, text in (
            (DeterministicSetting(True, False, True), "on"),
            (DeterministicSetting(True, True, False), "on, with warnings only"),
        ):
            deterministic_mode.use(setting)
            assert deterministic_mode.setting() == setting and str(setting) == text
    finally:
        torch.use_deterministic_algorithms(False)
        compat.fill_uninitialized_memory(True)


@pytest.mark.full
@pytest.mark.usefixtures("asked")
def test_what_is_compiled_and_kept_is_that_of_the_switch(tmp_path: Any) -> None:
    """In the process that compiles, too."""
    function, kept = scattered(), artifact_cache.Cache(tmp_path)
    key = artifact_cache.key(function.graph, function, CPU)
    assert not compile_worker.compile_jobs(
        [inductor._job(key, function.name, function, function.graph)], kept, 1, lambda *_: None
    )
    entry = kept.read(key)
    assert entry is not None and "aten.index_put_" in entry.text, "PyTorch's, which adds one after the other"
    torch.use_deterministic_algorithms(False)
    assert artifact_cache.key(function.graph, function, CPU) != key
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert artifact_cache.key(function.graph, function, CPU) != key


def test_a_step_is_traced_anew_where_the_switch_was_turned() -> None:
    seen: list[bool] = []

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return (params["w"] * x).square().mean()

    train = fz.compile(fz.train_step(loss, optim.sgd(0.1)), fz.make_mesh(), backend="eager")
    state, traced = train.init({"w": torch.ones(4)}), []
    try:
        for on in (False, False, True, True, False):
            torch.use_deterministic_algorithms(on)
            state, _ = train(state, torch.ones(4))
            traced.append(len(seen))
    finally:
        torch.use_deterministic_algorithms(False)
    # Each program is traced again at its second call.
    assert traced[1] < traced[2] and traced[3] == traced[4]
    assert (set(seen[: traced[1]]), set(seen[traced[1] :])) == ({False}, {True})


@fz.block
def unpooled(p: Any, x: torch.Tensor) -> torch.Tensor:
    y, places = F.max_pool2d(p["w"] * x, 2, return_indices=True)
    return F.max_unpool2d(y, places, 2)


@pytest.mark.usefixtures("asked")
def test_what_has_no_deterministic_algorithm_is_an_error_that_names_the_block() -> None:
    step = fz.train_step(lambda params, x: unpooled(params, x).square().mean(), optim.sgd(0.1))
    with pytest.raises(TraceError) as error:
        fz.lower(step, fz.AbstractMesh(data=1), {"w": torch.ones(4, 4)}, torch.ones(1, 1, 4, 4))
    text = str(error.value)
    assert (
        text.startswith("fzero.block unpooled: ")
        and "return F.max_unpool2d(y, places, 2)" in text
        and "warn_only=True" in text
    )
    assert "max_unpooling2d_forward_out does not have a deterministic implementation" in str(error.value.__cause__)


def one_rank_asks() -> None:
    mesh = fz.make_mesh()
    try:
        torch.use_deterministic_algorithms(mesh.rank == 1)
        train = fz.compile(
            fz.data_parallel(fz.train_step(lambda p, x: (p * x).mean(), optim.sgd(0.1))), mesh, backend="eager"
        )
        train(train.init(torch.ones(2)), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def test_ranks_that_are_not_set_alike_run_nothing(run_ranks: Any) -> None:
    for r in run_ranks(2, one_rank_asks, expect_error=True):
        assert (
            r.type == "DivergenceError"
            and "rank 0: deterministic algorithms: off" in r.message
            and "rank 1: deterministic algorithms: on" in r.message
        )


def test_products_that_would_refuse_are_refused_when_a_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS, which reads its workspace from the environment when CUDA starts."""
    on, warns, off = (
        DeterministicSetting(True, False, True),
        DeterministicSetting(True, True, True),
        DeterministicSetting(False, False, False),
    )
    assert deterministic_mode.unsettled("cuda", on, None) == "CUBLAS_WORKSPACE_CONFIG is not set"
    assert deterministic_mode.unsettled("cuda", on, ":0:0") == "CUBLAS_WORKSPACE_CONFIG is ':0:0'"
    for device, setting, workspace in (
        ("cuda", on, ":4096:8"),
        ("cuda", on, ":16:8"),
        ("cuda", warns, None),
        ("cuda", off, None),
        ("cpu", on, None),
    ):
        assert deterministic_mode.unsettled(device, setting, workspace) is None
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(deterministic_mode, "setting", lambda: on)
    check_backend("eager", torch.device("cpu"))
    with pytest.raises(fz.errors.FzeroValueError) as refused:
        check_backend("inductor", torch.device("cuda", 0))
    assert "CUBLAS_WORKSPACE_CONFIG is not set" in str(refused.value)
    assert "Fix: start the process with CUBLAS_WORKSPACE_CONFIG=:4096:8" in str(refused.value)
