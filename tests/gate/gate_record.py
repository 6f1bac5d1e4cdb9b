"""Records what a frozen program promises: its canonical form, its numbers to the bit, and its plan.

`record(case)` returns a dictionary that JSON can hold:

    canonical   a line for each op, with the mesh axes, the bytes it moves or holds, and a hash of its subgraph;
                no names and no buffer offsets, so that renaming or another memory plan changes nothing here
    metrics     of each of three steps: the hash of the bits, and the values
    leaves      of the state after them: the hash of the bits, and the values of parameters
    plan        peak bytes and seconds per step, on a named device

Numbers come from simulated ranks, which are threads of this process. So that the bits do not depend on the processor,
`ENVIRONMENT` must be in force when the process starts: it turns off the code of MKL, ATen and glibc that is chosen by
processor. MKL's square roots and transcendental functions still differ between processors, so `prepare` has them
computed in float64. `probe` tells whether this machine then computes the same bits as the one that froze a program.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import simulated
import torch
import torch.fx as fx
import torch.nn.functional as F
from gate_programs import PROGRAMS, Case

import fzero as fz
from fzero import tree
from fzero.ir.program import Instruction, Program, local_bytes
from fzero.step import Step

STEPS = 3
DEVICE = "h100"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F",
}
"""Environment variables under which x86-64 processors give the same bits. They are read when a process starts."""


def record(case: Case) -> dict[str, Any]:
    """Everything the gate compares, of one case."""
    lowered = fz.lower(
        case.step,
        case.mesh,
        case.params,
        simulated.batch_parts(case.step, case.mesh, case.batch)[0],
        device=DEVICE,
        **case.options,
    )
    out: dict[str, Any] = {"torch": release(), "probe": probe(), "mesh": dict(case.mesh.axes)}
    out["canonical"] = [text for program in lowered.programs for text in canonical(program)]
    plan = lowered.plan
    out["plan"] = {"device": DEVICE, "peak_bytes": plan.peak_bytes, "step_seconds": plan.step_seconds}
    return out | numbers(case, lowered)


def release() -> str:
    """PyTorch's minor release: another one may record other operations and use other kernels."""
    return ".".join(torch.__version__.split(".")[:2])


# The canonical form


def canonical(program: Program) -> Iterator[str]:
    """A line for each op in order: its kind, its mesh axes or the tiers of a copy, the bytes of its results on a rank,
    and its subgraph's hash."""
    hashes = {name: graph_hash(function.graph) for name, function in program.functions.items()}

    def of_ops(ops: tuple[Instruction, ...], depth: int) -> Iterator[str]:
        for op in ops:
            size = sum(local_bytes(value, program.mesh) for value in op.out)
            parts = [op.op, ",".join(op.axes or op.tiers), str(size), hashes.get(op.fn, "")]
            yield "  " * depth + " ".join(part or "-" for part in parts)
            yield from of_ops(op.body, depth + 1)

    yield from of_ops(program.instructions, 0)


def graph_hash(recorded: Any) -> str:
    """A hash of the operations of a graph, their arguments, shapes and dtypes; nodes count by position, not by name."""
    number = {node: i for i, node in enumerate(recorded.graph.nodes)}

    def plain(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return f"%{number[x]}"
        if isinstance(x, (list, tuple)):
            return [plain(y) for y in x]
        if isinstance(x, dict):
            return sorted((k, plain(v)) for k, v in x.items())
        return x.type if isinstance(x, torch.device) else str(x)

    lines = []
    for node in recorded.graph.nodes:
        if node.op == "get_attr":
            lines.append(["constant", hashed(recorded.constants[str(node.target)])])
            continue
        value = node.meta.get("val")
        form = [list(value.shape), str(value.dtype)] if isinstance(value, torch.Tensor) else None
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        lines.append([node.op, target, plain(node.args), plain(node.kwargs), form])
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:12]


# The numbers


def numbers(case: Case, lowered: Any) -> dict[str, Any]:
    """The metrics of each step and the leaves after the last, computed on simulated ranks."""
    is_training = isinstance(case.step, Step)
    parts = simulated.batch_parts(case.step, case.mesh, case.batch)
    ran = [*simulated.run(lowered, case.step, case.mesh, case.params, parts, STEPS if is_training else 1)]
    metrics = [{name: stored(x) for name, x in tree.with_paths(found, "metrics")} for _, found in ran]
    if not is_training:
        return {"metrics": metrics, "leaves": {}}
    roles = {name: leaf.role for program in lowered.programs for name, leaf in program.leaves.items()}
    return {"metrics": metrics, "leaves": {n: stored(x, keep=roles[n] == "params") for n, x in ran[-1][0].items()}}


# Values and bits


def hashed(x: torch.Tensor) -> str:
    flat = x.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(f"{x.dtype} {list(x.shape)}".encode() + data).hexdigest()[:16]


def stored(x: torch.Tensor, keep: bool = True) -> dict[str, Any]:
    """A tensor as JSON: its dtype, shape and hash, and its values, as a number or as compressed bytes."""
    out: dict[str, Any] = {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "bits": hashed(x)}
    if x.numel() == 1:
        out["value"] = repr(x.item())
    elif keep:
        wide = x.detach().float().contiguous().numpy().tobytes()
        out["float32"] = base64.b64encode(zlib.compress(wide, 9)).decode()
    return out


def values(entry: Mapping[str, Any]) -> torch.Tensor | None:
    """The values of a stored tensor in float64, or None if only its bits are stored."""
    if "value" in entry:
        return torch.tensor([float(eval(entry["value"], {"nan": float("nan"), "inf": float("inf")}))]).double()
    if "float32" in entry:
        raw = bytearray(zlib.decompress(base64.b64decode(entry["float32"])))
        return torch.frombuffer(raw, dtype=torch.float32).double().reshape(entry["shape"])
    return None


def probe() -> str:
    """A hash of some products, transcendental functions and sums, by which two machines compute alike or not."""
    x = torch.linspace(-3, 3, 64 * 48).reshape(64, 48)
    positive = torch.linspace(0.1, 3, 64 * 48)
    ys = [
        x @ x.T,
        x.softmax(-1),
        F.gelu(x),
        x.exp().sum(0),
        torch.tanh(x),
        (x.double() @ x.double().T).sin(),
        x.bfloat16() @ x.bfloat16().T,
        *(getattr(torch, name)(positive) for name in MKL_FUNCTIONS),
        positive**0.5,
        positive**1.3,
    ]
    return hashlib.sha256("".join(map(hashed, ys)).encode()).hexdigest()[:16]


def prepare() -> None:
    """Settings of PyTorch inside the process that records; see the module's docstring."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    os.environ["FZERO_PROGRESS"] = "off"
    if not _KERNELS:
        kernels = {name: getattr(torch.ops.aten, name).out for name in MKL_FUNCTIONS}
        kernels["pow.Tensor_Scalar"] = torch.ops.aten.pow.Tensor_Scalar_out
        _KERNELS.append(library := torch.library.Library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that kernels are replaced
            for name, kernel in kernels.items():
                library.impl(name, _in_float64(kernel), "CPU", allow_override=True)


_KERNELS: list[torch.library.Library] = []  # a library that is freed takes its kernels with it
MKL_FUNCTIONS = ("sqrt", "log", "sin", "cos", "tanh", "erf")
"""The functions that PyTorch computes by MKL, and that the frozen programs call."""


def _in_float64(kernel: Any) -> Any:
    """A kernel that computes float32 results in float64. Rounded to float32, these hardly ever depend on the last bits,
    in which MKL's results differ between processors."""

    def call(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.dtype == torch.float32:
            return kernel(x.double(), *args, out=torch.empty_like(x, dtype=torch.float64)).float()
        dtype = torch.result_type(x, *args) if args else x.dtype
        return kernel(x, *args, out=torch.empty_like(x, dtype=dtype))

    return call


def record_named(name: str) -> dict[str, Any]:
    return record(PROGRAMS[name]())


@contextlib.contextmanager
def recording_processes(num: int = 2) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes under `ENVIRONMENT`, for `pool.submit(record_named, name)`."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        with ProcessPoolExecutor(num, multiprocessing.get_context("spawn"), initializer=prepare) as pool:
            for _ in range(num):  # they start while the environment is in force
                pool.submit(os.getpid)
            yield pool
    finally:
        os.environ.clear()
        os.environ.update(before)


# Comparing


FROZEN = Path(__file__).parent / "frozen"


def frozen_record(name: str) -> dict[str, Any] | None:
    path = FROZEN / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[str]]:
    """What differs between two records of a program, under "canonical", "numbers" and "plan"."""
    found: dict[str, list[str]] = {"canonical": [], "numbers": [], "plan": []}
    same_release = old["torch"] == new["torch"]
    same_arithmetic = same_release and old["probe"] == new["probe"]  # then equal operations give equal bits
    if same_release:
        found["canonical"] = list(
            difflib.unified_diff(old["canonical"], new["canonical"], "frozen", "now", "", "", 1, "")
        )
    was, now = (flat(x) for x in (old, new))
    found["numbers"] += [f"{name}: not frozen" for name in now.keys() - was.keys()]
    found["numbers"] += [f"{name}: missing" for name in was.keys() - now.keys()]
    for name in was.keys() & now.keys():
        form, form_now = ((x[name]["dtype"], x[name]["shape"]) for x in (was, now))
        if form != form_now:
            found["numbers"].append(f"{name}: {form} was frozen, {form_now} now")
        elif same_arithmetic and was[name]["bits"] != now[name]["bits"]:
            found["numbers"].append(f"{name}: other bits, {text_of(relative_difference(was[name], now[name]))}")
        elif (
            not same_arithmetic
            and "['precision']" not in name  # counts the values that a rounding turns into zeros
            and (apart := relative_difference(was[name], now[name])) is not None
            and not apart <= 1e-3
        ):
            found["numbers"].append(f"{name}: {text_of(apart)} (another processor or release: 1e-3 is allowed)")
    for key in ("peak_bytes", "step_seconds"):
        ratio = new["plan"][key] / old["plan"][key]
        if same_release and not 0.98 <= ratio <= 1.05:
            found["plan"].append(f"{key}: {old['plan'][key]} was frozen, {new['plan'][key]} now ({ratio:.3f} times)")
    return found


def flat(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Every stored tensor of a record by name."""
    steps = {f"step {i + 1}: {k}": v for i, found in enumerate(recorded["metrics"]) for k, v in found.items()}
    return steps | recorded["leaves"]


def relative_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """The largest difference of two stored tensors, relative to the largest value; None if values are not stored. Equal
    infinities and two NaN do not differ."""
    x, y = values(old), values(new)
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return None
    equal = torch.logical_or(x == y, torch.logical_and(x.isnan(), y.isnan()))
    apart = torch.where(equal, 0.0, (x - y).abs()).max()
    return float(apart / x.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-30))


def text_of(apart: float | None) -> str:
    return "values not kept" if apart is None else f"largest relative difference {apart:.2e}"
