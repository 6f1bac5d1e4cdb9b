"""What launches.py counts: all that a program tells a device, and nothing twice; and faults that it is
there to find."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.ir.ops import STARTS

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bench() -> Any:
    names = ("benchmark_modules", "cuda_code", "launches", "model", "rehearsal")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def lowered(bench: Any, size: int, *transforms: Any) -> Any:
    config = bench.model.Config(layers=2, width=64, heads=4, seq=32, batch=8, vocab=256)
    optimizer = fz.optim.chain(fz.optim.clip_by_global_norm(1.0), fz.optim.adamw(1e-3))
    step = fz.compose(fz.mixed_precision("bf16"), *transforms)(fz.train_step(bench.model.make_loss(config), optimizer))
    batch = tuple(torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta") for _ in range(2))
    mesh = fz.AbstractMesh(device_type="cuda", data=size)
    return fz.lower(step, mesh, bench.model.make_init(config), batch, device="h100").program


def lines(program: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for op, times in program.walk():
        found[op.fn or op.op] += times
    return found


def test_every_line_and_collective_is_counted(bench: Any) -> None:
    for size, transforms in ((1, ()), (8, (fz.shard_params(),)), (4, (fz.shard_grads(), fz.accumulate(2)))):
        program = lowered(bench, size, *transforms)
        told, said = bench.rehearsal.rehearse(program), lines(program)
        assert told.lines == {name: n for name, n in said.items() if name != "loop"}
        starts = {name: n for name, n in said.items() if name.endswith("_start")}
        assert told.collectives == starts
        leaves = Counter(dict.fromkeys(starts, 0))
        for op, times in program.walk():
            leaves[op.op] += times * len(op.args) if op.op in starts else 0
        assert told.leaves["all_gather_start"] == leaves["all_gather_start"]
        assert told.leaves["reduce_scatter_start"] == leaves["reduce_scatter_start"]
        assert {n: told.calls[n] for n in told.compiled} == {n: said[n] for n in told.compiled}
        assert not told.syncs.total() and not told.clones.total()


def test_copies_to_the_host_are_counted(bench: Any) -> None:
    program = lowered(bench, 1, fz.offload("cpu", "opt_state"))
    told = bench.rehearsal.rehearse(program)
    moved: Counter[tuple[str, ...]] = Counter()
    for op, times in program.walk():
        moved[op.tiers] += times * len(STARTS[op.op].sent(op)) if op.tiers else 0
    assert moved["host", "device"] and moved["device", "host"]
    assert told.launches["copy_start"] == moved.total()


def test_faults_are_found(bench: Any) -> None:
    program = lowered(bench, 8, fz.shard_params())
    clean = bench.rehearsal.rehearse(program)
    odd = [replace(x, into=tuple(p and replace(p, offset=p.offset + 8) for p in x.into)) for x in program.instructions]
    shifted = bench.rehearsal.rehearse(replace(program, instructions=tuple(odd), pool_bytes=program.pool_bytes + 64))
    assert clean.clones.total() == 0 and shifted.clones.total() > 0
    assert bench.launches.besides(shifted, 2)["a_layer"] > bench.launches.besides(clean, 2)["a_layer"]


CODE = """
triton_poi_0 = async_compile.triton('triton_poi_0', 'DeviceProperties(type=\\'cuda\\', index=0, multi)')
class Runner:
    def call(self, args):
        arg0_1, = args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            arg0_1 = copy_if_misaligned(arg0_1)
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            extern_kernels.mm(arg0_1, arg0_1, out=buf0)
            buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf0, buf0, buf0)
            raw_stream0 = get_raw_stream(0)
            triton_poi_0.run(buf0, 64, stream=raw_stream0)
            triton_red_fused_1.run(buf0, 64, stream=raw_stream0)
        return (buf0, )
runner = Runner(partitions=[])
def get_args():
    return [rand_strided((8, 8), (8, 1), device='cuda:1', dtype=torch.float32)]
"""


def test_generated_code_is_read(bench: Any) -> None:
    found = bench.cuda_code.read(CODE, 0)
    assert (found.kernels, found.externs, found.host, found.allocated, found.checked) == (2, 2, 0, 1, 1)
    assert found.strange == () and bench.cuda_code.read(CODE, 1).strange == ("cuda:0",)
    assert bench.cuda_code.read(CODE.replace("triton_poi_0.run(", "cpp_fused_0("), 0).host == 1


def test_the_code_of_a_gpu_is_generated_without_one(bench: Any) -> None:
    if not bench.cuda_code.can_generate():
        pytest.skip("this PyTorch has no CUDA")
    told = bench.rehearsal.rehearse(lowered(bench, 8, fz.shard_params()))
    name = next(n for n in told.compiled if n.startswith("update"))
    code = bench.cuda_code.read(bench.cuda_code.generate(*told.compiled[name], index=1), 1)
    assert code.kernels and not code.strange


def test_the_table_has_both_sides(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--layers=1", "--width=64", "--heads=4", "--seq=16", "--vocab=128", "--only=one device"]
    monkeypatch.setattr(sys, "argv", ["launches.py", *sizes, f"--out={tmp_path}"])
    bench.launches.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, f"--before={tmp_path / 'launches.json'}"])
    bench.launches.main()
    text = (tmp_path / "launches.md").read_text()
    assert "one device: now" in text and "100% of the CPU time before" in text
