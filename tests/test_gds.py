"""GPUDirect Storage: leaves on disk go to the device and back past the host, and nothing else changes; and what is
asked of kvikio."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from offloads import EXTRAS, OFFLOADS, same, trained

import fzero as fz
from fzero import optim
from fzero.comm import disk, files
from fzero.errors import TierError
from fzero.program.ir import Program
from fzero.program.ops import from_to


def ways(program: Program) -> set[tuple[str, str]]:
    return {from_to(line) for line, _ in program.walk() if line.op.startswith("disk")}


PAIRS = [
    ("nvme opt_state", "none"),
    ("nvme both", "bf16"),
    ("nvme on device", "none"),
    ("nvme on device", "bf16, accumulate"),
    ("mix", "none"),
]


@pytest.mark.parametrize(("name", "extra"), [*PAIRS, ("other mix", "bf16"), ("nvme half", "shard")])
def test_a_step_past_the_host_equals_the_step_without(tmp_path: Path, name: str, extra: str) -> None:
    mesh = fz.make_mesh(data=1, unified_memory=False, gpu_direct=True)
    want, _, _ = trained(fz.make_mesh(data=1), EXTRAS[extra])
    found, train, _ = trained(mesh, (*EXTRAS[extra], *OFFLOADS[name](tmp_path)))
    assert same(found, want)
    streams = name not in ("nvme opt_state", "mix")  # there the host updates, and reads and writes what it needs
    assert (("disk", "device") in ways(train.program)) == streams
    if name != "nvme half":  # where the plan chooses the side that updates
        assert (("device", "disk") in ways(train.program)) == (name in ("nvme on device", "other mix")), (
            "of blocks that the device updates"
        )


def test_nothing_of_it_passes_through_the_host(tmp_path: Path) -> None:
    """Lowered for a GPU: no copy between host and device, no memory there, and a step that is predicted to take no
    longer."""
    step = fz.offload(
        fz.train_step(lambda p, x: (x @ p["w"]).mean(), optim.adamw(1e-3)),
        "nvme",
        ("opt_state", "params"),
        path=tmp_path,
        update_on="device",
    )
    params, batch = {"w": torch.empty(2048, 2048, device="meta")}, torch.empty(64, 2048, device="meta")
    plans = [
        fz.lower(step, fz.AbstractMesh(data=1, device_type="cuda", gpu_direct=direct), params, batch, device="h100")
        for direct in (False, True)
    ]
    through, past = (found.plan for found in plans)
    assert through.host_peak_bytes > 0 == past.host_peak_bytes
    assert past.step_seconds <= through.step_seconds
    assert {line.op for line, _ in plans[1].program.walk() if line.op in ("to_host_start", "to_device_start")} == set()
    assert "from disk to device" in str(plans[1].program)
    assert "from device to disk" in str(plans[1].program)


# --- kvikio, as its documentation says it is: reads and writes return the number of bytes ---


class CuFile:
    """Stands in for kvikio's, on memory of the host."""

    opened: ClassVar[list[CuFile]] = []
    short: ClassVar[bool] = False

    def __init__(self, file: Path, flags: str = "r"):
        assert flags == "r+"
        self.fd, self.closed = os.open(file, os.O_RDWR), False
        CuFile.opened.append(self)

    def read(
        self, buf: torch.Tensor, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> int:
        assert size == buf.numel()
        return os.preadv(self.fd, [buf.numpy().data[: size // 2 if CuFile.short else size]], file_offset)

    def write(
        self, buf: torch.Tensor, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> int:
        assert size == buf.numel()
        return os.pwritev(self.fd, [buf.numpy().data], file_offset)

    def close(self) -> None:
        os.close(self.fd)
        self.closed = True


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> type[CuFile]:
    """Has all memory taken for a GPU's."""
    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=CuFile))
    monkeypatch.setattr(files, "_in_host_memory", lambda flat: False)
    monkeypatch.setattr(CuFile, "opened", [])
    monkeypatch.setattr(CuFile, "short", False)
    return CuFile


def test_kvikio_moves_what_is_on_a_gpu(tmp_path: Path, kvikio: Any) -> None:
    (tmp_path / "other").mkdir()
    found, order = disk.Files([tmp_path, tmp_path / "other"], 3 * disk.PIECE), []
    value = torch.arange(2 * disk.PIECE + 4096, dtype=torch.int64).to(torch.uint8)
    found.write([(4096, value)], lambda: order.append("the device is done")).wait()
    back = torch.zeros_like(value)
    found.read([(4096, back[:4096]), (8192, back[4096:])]).wait()
    assert torch.equal(back, value)
    assert order, "nothing is written before the device is done"
    assert len(kvikio.opened) == 2, "each file once"
    assert found.bytes_written == found.bytes_read == value.numel()
    found.close()
    assert all(file.closed for file in kvikio.opened)


def test_what_kvikio_leaves_out_is_an_error(tmp_path: Path, kvikio: Any) -> None:
    found = disk.Files(tmp_path, disk.PIECE)
    kvikio.short = True
    with pytest.raises(TierError, match="it stopped after 4096 of 8192 bytes"):
        found.read([(0, torch.zeros(8192, dtype=torch.uint8))]).wait()


def test_a_device_that_fails_is_an_error_and_not_a_hang(tmp_path: Path, kvikio: Any) -> None:
    def failed() -> None:
        raise RuntimeError("an illegal address was read")

    found = disk.Files(tmp_path, disk.PIECE)
    with pytest.raises(TierError, match="an illegal address was read"):
        found.write([(0, torch.zeros(8192, dtype=torch.uint8))], failed).wait()
