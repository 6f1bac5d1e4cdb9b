"""The checks of no_gpu.py: they run on a CUDA build of PyTorch whose device computes nothing, one rank a process.

    RANK=0 WORLD_SIZE=1 ... python checks.py --ranks 1 --backend eager

A line of JSON for each case: what a told step and a replayed one launched, waited for and allocated, and the peak of
PyTorch's allocator beside the plan's; which functions this rank compiled, and what it did on another rank's device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmark_modules  # noqa: F401
import torch
from model import Config, make_batches, make_init, make_loss
from stub_device import no_values

import fzero as fz
from fzero import optim
from fzero.comm import collectives
from fzero.runtime.build import artifact_cache, inductor
from fzero.transforms.offload import Offload
from fzero.transforms.redundant import Redundant

BF16 = fz.mixed_precision("bf16")
TOLD, REPLAYED = 2, 6  # a step before the one that is captured, and one behind it


@dataclass(frozen=True)
class Case:
    """A composition of transforms on a mesh of so many ranks. `axes` beside `data`; `path`: transforms that take a
    folder; `sizes`: fields of the model's Config."""

    name: str
    ranks: int
    transforms: Sequence[Any] = ()
    axes: dict[str, int] = field(default_factory=dict)
    path: Callable[[str], Any] | None = None
    compiled: bool = False
    graphs: bool | None = None
    pageable: bool = False  # batches
    symmetric: bool = False  # memory
    sizes: dict[str, int] = field(default_factory=dict)


RULES = {"qkv": (0, 3), "o": 1, "up": 0, "down": 1}
OFFLOADED = ("opt_state", "params", "activations")
CASES = [
    Case("fp32", 1, compiled=True),
    Case("bf16", 1, [BF16], compiled=True),
    Case("bf16, batches in pageable memory", 1, [BF16], pageable=True),
    Case("fp16", 1, [fz.mixed_precision("fp16")]),
    Case("params in bf16", 1, [fz.mixed_precision("bf16", params="bf16")]),
    Case("accumulate", 1, [BF16, fz.accumulate(2)], compiled=True),
    Case("accumulate, vertical", 1, [BF16, fz.accumulate(2, schedule="layerwise")]),
    Case("remat full", 1, [BF16, fz.remat("full")]),
    Case("remat none", 1, [BF16, fz.remat("none")]),
    Case("fp8", 1, [BF16, fz.fp8()], compiled=True),
    Case("fp8 by row", 1, [BF16, fz.fp8(scales="row")], compiled=True),
    Case("offload", 1, [BF16, fz.remat("full"), fz.offload("cpu", OFFLOADED)], compiled=True),
    Case("offload, updated on the device", 1, [BF16, fz.offload("cpu", OFFLOADED[:2], update_on="device")]),
    Case("offload to disk", 1, [BF16], path=lambda path: fz.offload("nvme", OFFLOADED[:2], path=path)),
    Case("data_parallel", 2, [BF16, fz.data_parallel()]),
    Case("ZeRO-1", 2, [BF16, fz.shard_opt_state()]),
    Case("ZeRO-2", 2, [BF16, fz.shard_grads()]),
    Case("ZeRO-3", 2, [BF16, fz.shard_params()], compiled=True),
    Case("ZeRO-3, captured", 2, [BF16, fz.shard_params()], graphs=True),
    Case("ZeRO-3, symmetric memory", 2, [BF16, fz.shard_params()], symmetric=True),
    Case("ZeRO-3, accumulate", 2, [BF16, fz.shard_params(), fz.accumulate(2)], graphs=True),
    Case("ZeRO-3, fp8", 2, [BF16, fz.shard_params(), fz.fp8()], graphs=True),
    Case("ZeRO-3, offload", 2, [BF16, fz.shard_params(), fz.remat("full"), fz.offload("cpu", OFFLOADED)]),
    Case("ZeRO-3, redundant", 2, [BF16, fz.shard_params(), fz.redundant(axis="data")]),
    Case("pipeline", 2, [BF16, fz.accumulate(2, schedule="layerwise"), fz.pipeline()], {"pipe": 2}),
    Case("replicas", 4, [BF16, fz.shard_params(), fz.data_parallel(axis="replica"), fz.accumulate(2)],
         {"replica": 2}, graphs=True),
    Case("hierarchical", 4, [BF16, fz.shard_params(axis=("data", "node")), fz.hierarchical(axis="node"),
                            fz.accumulate(2)], {"node": 2}, graphs=True, compiled=True),
    Case("tensor_parallel", 4, [BF16, fz.tensor_parallel(rules=RULES), fz.shard_params()], {"model": 2}),
    Case("sequence_parallel", 4, [BF16, fz.sequence_parallel(), fz.shard_params(axis=("data", "seq"))], {"seq": 2}),
]  # fmt: skip

HEAD = {"vocab": 32000, "layers": 2}
HOUR = {"layers": 8, "width": 1024, "heads": 16, "seq": 1024, "batch": 4, "vocab": 50304}  # of gpu_hour.py
SHAPES = [
    Case("2 layers of 256", 1, [BF16], sizes={"layers": 2, "width": 256}, compiled=True),
    Case("12 layers of 384", 1, [BF16], sizes={"layers": 12, "width": 384, "heads": 6}),
    Case("8 layers of 768", 1, [BF16], sizes={"layers": 8, "width": 768, "heads": 12}, compiled=True),
    Case("width 520", 1, [BF16], sizes={"width": 520, "heads": 5}, compiled=True),
    Case("width 520 in fp32", 1, sizes={"width": 520, "heads": 5}),
    Case("width 1000", 1, [BF16], sizes={"width": 1000}),
    Case("width 2048", 1, [BF16], sizes={"width": 2048, "heads": 16, "layers": 2}),
    Case("64 sequences of 16", 1, [BF16], sizes={"seq": 16, "batch": 64}),
    Case("sequences of 100", 1, [BF16], sizes={"seq": 100}),
    Case("2 sequences of 1024", 1, [BF16], sizes={"seq": 1024, "batch": 2}, compiled=True),
    Case("2 sequences of 1024, remat full", 1, [BF16, fz.remat("full")], sizes={"seq": 1024, "batch": 2}),
    Case("2 sequences of 1024, remat none", 1, [BF16, fz.remat("none")], sizes={"seq": 1024, "batch": 2}),
    Case("2 sequences of 1024, accumulate", 1, [BF16, fz.accumulate(2)], sizes={"seq": 1024, "batch": 2}),
    Case("vocabulary of 256", 1, [BF16], sizes={"vocab": 256}),
    Case("vocabulary of 32000", 1, [BF16], sizes=HEAD, compiled=True),
    Case("vocabulary of 50257", 1, [BF16], sizes={**HEAD, "vocab": 50257}),
    Case("8 layers of 1024, 4 sequences of 1024", 1, [BF16], sizes=HOUR, compiled=True),
    Case("8 layers of 1024, 4 sequences of 1024, remat full", 1, [BF16, fz.remat("full")], sizes=HOUR, compiled=True),
    Case("params in bf16, width 768", 1, [fz.mixed_precision("bf16", params="bf16")],
         sizes={"width": 768, "heads": 12, "vocab": 8192}),
    Case("fp8, width 768", 1, [BF16, fz.fp8()], sizes={"width": 768, "heads": 12}),
    Case("fp8 by row, width 768", 1, [BF16, fz.fp8(scales="row")], sizes={"width": 768, "heads": 12}, compiled=True),
    Case("offload, width 768", 1, [BF16, fz.remat("full"), fz.offload("cpu", OFFLOADED)],
         sizes={"width": 768, "heads": 12}),
    Case("ZeRO-3, width 520", 2, [BF16, fz.shard_params()], sizes={"width": 520, "heads": 5}, compiled=True),
    Case("ZeRO-3, width 768", 2, [BF16, fz.shard_params()], sizes={"width": 768, "heads": 12}),
    Case("ZeRO-2, 12 layers of 384", 2, [BF16, fz.shard_grads()], sizes={"layers": 12, "width": 384, "heads": 6}),
]  # fmt: skip


class Counts:
    """What CUDA's calls have counted since the last look."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def taken(self) -> dict[str, int]:
        buffer = ctypes.create_string_buffer(1 << 20)
        self._lib.fake_dump(buffer, 1 << 20)
        self._lib.fake_reset()
        lines = (line.split("\t") for line in buffer.value.decode().splitlines())
        return {name: int(count) for name, count in lines}


def told(counts: dict[str, int], cpu: float) -> dict[str, Any]:
    """A step in the numbers that matter. `pageable`: copies from or to memory that is not locked."""
    waits = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
    copies = {
        name.removeprefix("memcpy "): n for name, n in counts.items() if name.startswith("memcpy") and name[-1] != "s"
    }
    return {
        "launches": counts.get("launches", 0) + counts.get("cudaGraphLaunch", 0),
        "graphs": counts.get("cudaGraphLaunch", 0),
        "waits": sum(counts.get(name, 0) for name in waits),
        "allocations": sum(counts.get(name, 0) for name in ("cudaMalloc", "cudaHostAlloc", "cudaHostRegister")),
        "pageable": sum(n for name, n in copies.items() if "H->" in name or name.endswith("->H")),
        "errors": {name: n for name, n in counts.items() if name.startswith("error in")},
        "cpu_ms": round(1e3 * cpu, 2),
    }


class Said(logging.Handler):
    """What fzero's log says of captures that failed, and of functions that were compiled."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.refused, self.compiled = "", 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "its capture failed" in text:
            self.refused = text
        if text.startswith("compiled "):
            self.compiled += 1


class Keys:
    """The keys of compiled functions, as `inductor.Compilation` makes them."""

    def __init__(self) -> None:
        self.seen = set[str]()
        self._made, inductor.key = inductor.key, self

    def __call__(self, *given: Any) -> str:
        made = self._made(*given)
        self.seen.add(made)
        return made


def run(case: Case, config: Config, backend: str, folder: str, plant: str = "") -> dict[str, Any]:
    counts, said, size = Counts(), Said(), int(os.environ["WORLD_SIZE"])
    log, keys = logging.getLogger("fzero"), Keys()
    log.addHandler(said)
    log.setLevel(logging.INFO)
    gc.collect()  # of the case before
    workspaces()
    resident = torch.cuda.memory_allocated()
    for n in case.axes.values():
        size //= n
    everything = Counter(counts.taken())
    start = building_seconds()
    mesh = fz.make_mesh(**case.axes, data=size, timeout=120, symmetric_memory=case.symmetric or None)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
    transforms = [*case.transforms, *([case.path(folder)] if case.path else [])]
    step = fz.compose(*transforms)(fz.train_step(planted(make_loss(config), plant), optimizer))
    axes = tuple(a for a in mesh.axes if a not in ("model", "seq", "pipe"))
    parts, device = mesh.axis_size(axes), torch.device("cpu") if case.pageable else mesh.device
    batches = [
        tuple(x.chunk(parts)[mesh.index(axes)].contiguous().to(device) for x in batch)
        for batch in make_batches(config, 2)
    ]
    train = fz.compile(step, mesh, backend=backend, cuda_graphs=case.graphs, batch=batches[0])
    state = train.init(make_init(config), fz.random.key(0))
    found: dict[str, Any] = {"case": case.name, "ranks": int(os.environ["WORLD_SIZE"]), "backend": backend}
    found["host_works"] = any(isinstance(t, Offload | Redundant) for t in step.transforms)
    registered = 0
    for number in range(REPLAYED + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        everything += Counter(counts.taken())
        began = time.process_time()
        state, _ = train(state, batches[number % 2])
        cpu, taken = time.process_time() - began, counts.taken()
        everything += Counter(taken)
        registered += taken.get("ncclCommWindowRegister", 0)
        if number == 0:  # with the functions of the first call
            found["building_cpu_s"] = round(building_seconds() - start, 1)
        if number in (TOLD, REPLAYED):
            found["told" if number == TOLD else "replayed"] = told(taken, cpu)
        if number == TOLD:
            found["peak_mib"] = (torch.cuda.max_memory_allocated() - workspaces() - resident) / 2**20
    # the pool, with the groups of gathers and of reductions
    found["registered"], found["to_register"] = registered, 2 * case.symmetric
    found["programs"] = len(train._runs)  # a second one: the step was traced again
    found["planned_mib"], found["refused"] = train.plan.peak_bytes / 2**20, said.refused
    found["compiled"], found["keys"] = said.compiled, sorted(keys.seen)
    own = f" on device {mesh.device.index}"
    found["elsewhere"] = {name: n for name, n in everything.items() if " on device " in name and not name.endswith(own)}
    fz.close_mesh()
    return found


def building_seconds() -> float:
    """CPU-seconds of this process, and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def workspaces() -> int:
    """The bytes that cuBLAS keeps, for each stream that has had a product. It takes them again when it needs them."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


_held: list[torch.Tensor] = []


@torch.library.custom_op("stand_in::fault", mutates_args=())
def _fault(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "synchronisation":
        torch.cuda.synchronize()
    if kind == "allocation":
        _held.append(torch.empty(1 << 26, device=x.device))
    if kind == "index":
        torch.ones(1, device=f"cuda:{torch.cuda.device_count()}")
    return x.clone()


_fault.register_fake(lambda x, kind: torch.empty_like(x))
_fault.register_autograd(lambda ctx, grad: (grad, None))


def planted(loss: Any, plant: str) -> Any:
    """The loss with a fault in it, or with one planted elsewhere."""
    if plant == "no wait":
        collectives.ProcessGroups._finish = lambda self, work, on_host: None  # type: ignore[method-assign]
    if plant == "module":  # all ranks load the code that was compiled for the device of one of them
        hardware = artifact_cache._hardware
        artifact_cache._hardware = lambda device: hardware(torch.device(device.type, 0))
    if plant == "pageable":
        torch.Tensor.is_pinned = lambda self: True  # type: ignore[method-assign]
    if plant not in ("synchronisation", "allocation", "index"):
        return loss
    return lambda params, batch: _fault(loss(params, batch), plant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--plant", default="", help="a fault")
    parser.add_argument("--shapes", action="store_true")
    args = parser.parse_args()
    no_values.install()
    config = Config(args.layers, args.width, 8, 128, 8, 2048)
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    table = SHAPES if args.shapes else CASES
    wanted = [x for x in CASES if x.ranks == size and (x.compiled if args.plant == "module" else size == 1 or x.graphs)]
    plants = [next(x for x in wanted if x.pageable == (args.plant == "pageable"))] if args.plant else []
    cases = plants or [x for x in table if x.ranks == size and (not args.only or x.name in args.only)]
    for case in (x for x in cases if args.backend == "eager" or x.compiled):
        with tempfile.TemporaryDirectory(prefix="fzero-stand-in-") as folder:
            try:
                found = run(case, replace(config, **case.sizes), args.backend, folder, args.plant)
            except Exception as error:
                found = {"case": case.name, "ranks": size, "backend": args.backend, "failed": str(error)[:2000]}
                found["trace"] = traceback.format_exc(limit=-4)
                print(rank, case.name, found["trace"], file=sys.stderr)
        print(json.dumps(found), flush=True)
        if "failed" in found and size > 1:  # the ranks have parted
            sys.exit(1)


if __name__ == "__main__":
    main()
