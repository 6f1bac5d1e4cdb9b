"""The disk: streaming through scratch files, a step over leaves on disk, a directory of transformers loaded there."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import peak_mib, reset_peak, rss_mib, verdict

from cases import Live, Running, Table, processes

if TYPE_CHECKING:
    import torch

DEPTH = 3  # transfers under way: a block read, one updated, one written


def in_turn(transfers: Sequence[Callable[[int], Any]]) -> None:
    """Starts transfers, each with the number of its buffer, with at most `DEPTH` under way."""
    under_way: list[Any] = []
    for k, begin in enumerate(transfers):
        if len(under_way) == DEPTH:
            under_way.pop(0).wait()
        under_way.append(begin(k % DEPTH))
    for transfer in under_way:
        transfer.wait()


# --- streaming ---

STREAM_LIMIT = 0.90
MODES = ("read", "write", "mixed")
RAW = r"""
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>
typedef struct {
  const int* fds; int num, mode, bad; int64_t size, block, ring_size; char* ring; _Atomic int64_t* next;
} Job;
static void* work(void* argument) {
  Job* j = argument;
  for (;;) {
    int64_t k = atomic_fetch_add(j->next, 1), at = k * j->block;
    if (at >= j->size) break;
    int writes = j->mode == 1 || (j->mode == 2 && k % 2);
    if (j->mode == 2) at = (k / 2) * j->block + (k % 2 ? j->size / 2 : 0);
    int fd = j->fds[at / j->block % j->num];
    int64_t in = at / j->block / j->num * j->block;
    char* here = j->ring + k * j->block % j->ring_size;
    if ((writes ? pwrite(fd, here, j->block, in) : pread(fd, here, j->block, in)) != j->block) { j->bad = 1; break; }
  }
  return 0;
}
int run(const int* fds, int num, int64_t size, int64_t block, char* ring, int64_t ring_size, int threads, int mode) {
  pthread_t handles[64];
  Job jobs[64];
  _Atomic int64_t next = 0;
  int bad = 0;
  for (int i = 0; i < threads; i++) {
    jobs[i] = (Job){fds, num, mode, 0, size, block, ring_size, ring, &next};
    pthread_create(&handles[i], 0, work, &jobs[i]);
  }
  for (int i = 0; i < threads; i++) { pthread_join(handles[i], 0); bad |= jobs[i].bad; }
  return bad;
}
"""


def _streams(files: Any, size: int, memory: torch.Tensor) -> Callable[[str], None]:
    """Moves the whole range through a ring of buffers, as a step does."""
    ring = memory.chunk(DEPTH)
    chunk = ring[0].numel()

    def transfer(mode: str, k: int) -> Callable[[int], Any]:
        writes = mode == "write" or (mode == "mixed" and k % 2 == 1)
        at = k * chunk if mode != "mixed" else k // 2 * chunk + (k % 2) * (size // 2)
        return lambda buffer: (files.write if writes else files.read)([(at, ring[buffer])])

    return lambda mode: in_turn([transfer(mode, k) for k in range(size // chunk)])


def _raw(
    paths: Sequence[str], size: int, block: int, ring: torch.Tensor, threads: int, direct: bool
) -> Callable[[str], None]:
    """The raw probe, compiled."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("the raw probe takes a C compiler, as torch.compile does: install one, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "raw.c", Path(folder) / "raw.so"
        source.write_text(RAW)
        flags = ["-O2", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*compiler.split(), *flags, str(source), "-o", str(library)], check=True)
        raw = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    raw.run.argtypes = [pointer, ctypes.c_int, number, number, pointer, number, ctypes.c_int, ctypes.c_int]
    opened = [os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0)) for path in paths]
    fds = (ctypes.c_int * len(paths))(*opened)

    def run(mode: str) -> None:
        if raw.run(fds, len(paths), size, block, ring.data_ptr(), ring.numel(), threads, MODES.index(mode)):
            raise OSError(f"the raw probe could not {mode}")

    return run


def disk_stream(args: argparse.Namespace) -> Table:
    """Scratch files beside a raw probe that reads and writes the very same blocks of the same files.

    The raw probe is a C program of as many threads, each in a loop of `pread` and `pwrite`. Both run in every round, in
    random order, and every round is a ratio. `mixed` reads the first half of the range and writes the second, as an
    update does. Several `--path` are striped.
    """
    from fzero.memory import disk

    size, chunk = args.mib << 20, args.chunk << 20
    if size % (2 * chunk) or chunk % disk.PIECE:
        raise SystemExit("--mib must be a multiple of twice --chunk, and --chunk of 4")
    files = disk.ScratchFiles(args.path, size, num_threads=args.threads)
    paths = [str(part.directory / "data") for part in files._parts]
    ring = disk.aligned(DEPTH * chunk).fill_(7)  # the memory of both
    stream = _streams(files, size, ring)
    raw = _raw(paths, size, disk.PIECE, ring, args.threads, files.direct)
    stream("write")  # every block once: the first write to a block costs more
    points: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in random.sample(MODES, len(MODES)):
            point = {}
            for name, run in random.sample([("fzero", stream), ("raw", raw)], 2):
                begin, cpu = time.perf_counter(), time.process_time()
                run(mode)
                point |= {f"{name}_s": time.perf_counter() - begin, f"{name}_cpu_s": time.process_time() - cpu}
            points[mode].append(point)
    files.close()
    rows, verdicts = [], []
    for mode, found in points.items():
        theirs, ours = (statistics.median(size / p[f"{who}_s"] / 1e9 for p in found) for who in ("raw", "fzero"))
        ratios = [p["raw_s"] / p["fzero_s"] for p in found]
        share, cpu = statistics.median(ratios), statistics.median(p["fzero_cpu_s"] for p in found) / size * 2**30
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append((mode, f"{theirs:.2f}", f"{ours:.2f}", f"{share:.2f}", spread, f"{1e3 * cpu:.0f}"))
        verdicts.append(
            f"{mode}: {share:.2f} of the raw probe, at least {STREAM_LIMIT:.2f} wanted: {verdict(STREAM_LIMIT, share)}"
        )
    notes = [
        f"{args.mib} MiB, directories: {len(args.path)}, {'O_DIRECT' if files.direct else 'through the page cache'}, "
        f"blocks of 4 MiB, {args.threads} threads; {DEPTH} transfers of {args.chunk} MiB under way; the raw probe: "
        "C, on the same blocks of the same files.",
        f"Medians of {args.rounds} rounds; the share is the median of the rounds' own ratios.",
        *verdicts,
    ]
    columns = ("", "raw GB/s", "fzero GB/s", "share", "over the rounds", "CPU ms a GiB")
    data = {"directories": len(args.path), "probe": "C", "direct": files.direct, "points": points}
    return Table("Streaming scratch files", columns, rows, notes, data)


# --- a step over leaves on disk ---

TIME_LIMIT = 1.15  # of max(compute, disk)
OFFLOADED = {"opt_state": ("opt_state",), "both": ("opt_state", "params"), "waiting": ("opt_state", "params")}
TITLES = {
    "opt_state": "optimizer state on disk",
    "both": "parameters too",
    "waiting": "parameters too, updates that wait",
}


def _offloaded(args: argparse.Namespace) -> list[str]:
    """The measured steps with leaves on disk."""
    return [name for name in OFFLOADED if name != "waiting" or args.max_norm is not None]


def time_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import fzero as fz
    from fzero import optim

    turns: dict[str, Callable[[], float | None]] = {}
    live = Live(args)

    def build() -> dict[str, Any]:
        moved, direct, params = {}, True, live.config.num_params
        optimizer = optim.adamw(1e-4)
        if args.max_norm is not None:
            optimizer = optim.chain(optim.clip_by_global_norm(args.max_norm), optimizer)
        for name in ("compute", *_offloaded(args)):
            transforms = [fz.offload("nvme", OFFLOADED[name], path=args.path)] if name in OFFLOADED else []
            # 12 bytes a parameter, and some to fill sectors
            budget = {"disk_budget": 13 * params} if name == "waiting" else {}
            running = live.start(*transforms, optimizer=optimizer, **budget)
            turns[name] = running.one
            if name in OFFLOADED:
                running.one()
                turns[f"{name}, disk alone"], moved[name], files = _disk_alone(running, args.path)
                direct = direct and files.direct
        return {"moved": moved, "direct": direct, "parameters": params}

    def turn(name: str) -> dict[str, Any]:
        begin = time.perf_counter()
        loss = turns[name]()
        return {"seconds": time.perf_counter() - begin, "loss": loss}

    return {"build": build, "turn": turn}


def _disk_alone(running: Running, path: list[str]) -> tuple[Callable[[], None], float, Any]:
    """A function that moves the bytes of a step and does nothing else; their number, in GB; the files."""
    from fzero.memory import disk

    program = running.train.program
    # of every leaf on disk: where its bytes begin here, and how many whole blocks they are
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, leaf in program.leaves.items():
        if leaf.layout.tier == "disk":
            offsets[name] = end, disk.padded(math.prod(leaf.resting_shape(program.mesh)) * leaf.dtype.itemsize)
            end += offsets[name][1]
    # not those of a wrong guess
    copies = [line for line, times in program.walk() if times and line.op in ("disk_read_start", "disk_write_start")]
    spans = [[offsets[a] for a in line.writes or line.args] for line in copies]
    moved = [sum(size for _, size in each) for each in spans]
    largest = max(moved)
    files, ring = disk.ScratchFiles(path, end), [disk.aligned(largest).fill_(7) for _ in range(DEPTH)]

    def transfer(op: str, each: list[tuple[int, int]]) -> Callable[[int], Any]:
        def begin(buffer: int) -> Any:
            runs, at = [], 0
            for offset, size in each:
                runs.append((offset, ring[buffer][at : at + size]))
                at += size
            return (files.read if op == "disk_read_start" else files.write)(runs)

        return begin

    transfers = [transfer(line.op, each) for line, each in zip(copies, spans, strict=True)]
    # the first write to a block costs more
    files.write([(at, ring[0][: min(largest, end - at)]) for at in range(0, end, largest)]).wait()
    return lambda: in_turn(transfers), sum(moved) / 1e9, files


def offload_time(args: argparse.Namespace) -> Table:
    """A step over leaves on disk: the longer of compute and disk, and not their sum.

    In one process, in every round in random order: the step without offload, which is the compute; the step with its
    optimizer state on disk, and with its parameters there too; and, for either, the disk alone: every read and write of
    the step's program, in its order and sizes, on other bytes of the same disk. Losses must be equal bit for bit.

    With `--max-norm` an update must know all gradients. The updates run on the guess that nothing is clipped; beside
    it runs the same step with a disk that has no room for a guess: its updates wait. 5 GB of disk, clipped 8.
    """
    points = []
    steps = ["compute", *_offloaded(args)]
    names = [*steps, *(f"{name}, disk alone" for name in _offloaded(args))]
    with tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True) as cache:
        for batch in args.batches:
            given: dict[str, Any] = {"threads": args.threads, "timeout": 3000, "cache": cache}
            with processes(args, 1, env={"batch": batch}, **given) as group:
                (built,) = group.ask("build")
                rounds, losses = [], {name: [] for name in names}
                for number in range(args.rounds + 1):
                    seconds = {}
                    for name in random.Random(number).sample(names, len(names)):
                        (answer,) = group.ask("turn", name=name)
                        seconds[name] = answer["seconds"]
                        losses[name].append(answer["loss"])
                    rounds += [seconds] if number else []  # the first warms up
            points.append({"batch": batch, **built, "rounds": rounds, "losses": {name: losses[name] for name in steps}})
            print(f"batch {batch}: done", file=sys.stderr, flush=True)
    rows, verdicts = [], []
    for x in points:
        for name in _offloaded(args):
            rounds = [(r["compute"], r[f"{name}, disk alone"], r[name]) for r in x["rounds"]]
            compute, disk, step = (statistics.median(r[i] for r in rounds) for i in range(3))
            ratios = [step / max(compute, disk) for compute, disk, step in rounds]
            ratio, moved, who = statistics.median(ratios), x["moved"][name], f"batch {x['batch']}, {TITLES[name]}"
            spread = {"median": ratio, "min": min(ratios), "max": max(ratios), "limit": TIME_LIMIT}
            x[f"{name} / max(compute, disk)"] = spread
            of_sum = statistics.median(s / (c + d) for c, d, s in rounds)
            shares = (f"{ratio:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{of_sum:.2f}")
            rows.append(
                (who, f"{compute:.2f}", f"{disk:.2f}", f"{step:.2f}", *shares, f"{moved:.2f}", f"{moved / disk:.2f}")
            )
            if name != "waiting":
                met = verdict(ratio, TIME_LIMIT)
                verdicts.append(f"{who}: {ratio:.2f} x max(compute, disk), at most {TIME_LIMIT:g} wanted: {met}")
    # steps over leaves on disk have taken one step more, before the first turn
    same = all(x["losses"][name][:-1] == x["losses"]["compute"][1:] for x in points for name in _offloaded(args))
    verdicts.append(f"losses equal bit for bit to those without offload, in every step: {'met' if same else 'MISSED'}")
    clip = "" if args.max_norm is None else f", clipped at a norm of {args.max_norm:g}"
    notes = [
        f"{points[0]['parameters'] / 1e6:.0f} M parameters ({args.layers} layers, width {args.width}), fp32, "
        f"AdamW{clip}, sequence {args.seq}, one process, {args.threads} threads, {args.backend} backend; "
        f"{'O_DIRECT' if all(x['direct'] for x in points) else 'through the page cache'}.",
        f"Medians of {args.rounds} interleaved rounds, ratios within a round. Compute: the step without offload. Disk: "
        f"the step's reads and writes alone, {DEPTH} under way.",
        *verdicts,
    ]
    columns = ("", "compute s", "disk s", "step s", "x max", "over the rounds", "x sum", "disk GB", "GB/s alone")
    return Table("A step over leaves on disk", columns, rows, notes, {"points": points})


# --- a directory of transformers ---

GROWTH_LIMIT_MIB = 1024
READ_LIMIT = 1.1  # bytes read by all ranks, over those of the files
SHARD_BYTES = 500_000_000


def _write(args: argparse.Namespace, path: Path) -> None:
    """The directory, a file at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    heads = args.width // 64
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=11 * args.width // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
        use_cache=False,
    )
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).state_dict().items()}
    files: list[list[str]] = [[]]
    for name, shape in shapes.items():
        if sum(2 * shapes[held].numel() for held in files[-1]) + 2 * shape.numel() > SHARD_BYTES and files[-1]:
            files.append([])
        files[-1].append(name)
    generator, weight_map = torch.Generator().manual_seed(0), dict[str, str]()

    def drawn(shape: Any) -> torch.Tensor:
        value = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        return 0.02 * value + (len(shape) == 1)

    for i, names in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file({n: drawn(shapes[n]) for n in names}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(path)


def load_worker(args: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    import torch
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    import fzero as fz

    torch.set_num_threads(1)
    live = dict[str, Any]()

    def write(path: str) -> None:
        _write(args, Path(path))

    def logits(path: str, out: str) -> None:
        """Those that plain transformers computes of a directory."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        with torch.no_grad():
            torch.save(model.eval()(torch.arange(16)[None]).logits, out)

    def load(path: str, scratch: str) -> dict[str, float]:
        mesh, model = fz.make_mesh(), fz.hf.from_pretrained(AutoModelForCausalLM, path)
        transforms = [fz.offload("nvme", ("params", "opt_state"), path=scratch), fz.mixed_precision("bf16")]
        transforms += [fz.shard_params()] if mesh.size > 1 else []
        train = fz.compile(fz.compose(*transforms)(model.train_step(fz.optim.adamw(1e-4))), mesh, backend="eager")
        reads, preadv = list[int](), os.preadv

        def counting(fd: int, *rest: Any) -> int:  # of several threads
            got = preadv(fd, *rest)
            reads.append(got if os.readlink(f"/proc/self/fd/{fd}").startswith(path) else 0)
            return got

        before = rss_mib()
        reset_peak()
        begin, os.preadv = time.perf_counter(), counting
        state = train.load(path)
        os.preadv = preadv
        live["model"], live["state"] = model, state
        return {"growth_mib": peak_mib() - before, "wall_s": time.perf_counter() - begin, "read_bytes": sum(reads)}

    def save(out: str) -> dict[str, float]:
        before, begin = rss_mib(), time.perf_counter()
        reset_peak()
        fz.hf.save_pretrained(out, live["model"], live["state"], dtype=torch.bfloat16)
        return {"save_growth_mib": peak_mib() - before, "save_wall_s": time.perf_counter() - begin}

    return {"write": write, "logits": logits, "load": load, "save": save}


def load(args: argparse.Namespace) -> Table:
    """A directory of transformers loaded with everything on disk, and written back: memory, bytes read, same logits.

    `--path` is on a disk with room for 25 GB. Masters and AdamW's moments take 12 bytes a parameter in scratch files,
    the directory 2. Measured is the largest growth of each rank's resident memory in `train.load`, and in
    `fz.hf.save_pretrained`.
    """
    import torch

    os.environ["HF_HUB_OFFLINE"] = "1"

    def alone(do: str, **given: Any) -> None:
        with processes(args, 1, timeout=900) as group:
            group.ask(do, **{k: str(v) for k, v in given.items()})

    points, rows = [], []
    folder = Path(tempfile.mkdtemp(prefix="fzero-load-", dir=args.path[0]))
    try:
        source, first, again = folder / "model", folder / "logits.pt", folder / "again.pt"
        source.mkdir()
        alone("write", path=source)
        alone("logits", path=source, out=first)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        for ranks in args.ranks:
            out, scratch = folder / f"out-{ranks}", folder / f"scratch-{ranks}"
            scratch.mkdir()
            with processes(args, ranks, timeout=900) as group:
                found = group.ask("load", path=str(source), scratch=str(scratch))
                saved = group.ask("save", out=str(out))
            shutil.rmtree(scratch)
            alone("logits", path=out, out=again)
            point = {k: max(x[k] for x in part) for part in (found, saved) for k in part[0]}
            point |= {"ranks": ranks, "equal": torch.equal(torch.load(first), torch.load(again))}
            point["read"] = sum(x["read_bytes"] for x in found) / size
            points.append(point)
            print(point, file=sys.stderr, flush=True)
            numbers = [f"{point['growth_mib']:.0f}", f"{point['read']:.3f}", f"{point['wall_s']:.1f}"]
            numbers += [f"{point['save_growth_mib']:.0f}", f"{point['save_wall_s']:.1f}"]
            rows.append((ranks, *numbers, "yes" if point["equal"] else "NO"))
            shutil.rmtree(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    growth, read = (max(p[k] for p in points) for k in ("growth_mib", "read"))
    notes = [
        f"Llama of {args.layers} layers of width {args.width}, {size / 1e9:.2f} GB of safetensors in bf16; parameters "
        "and AdamW's moments on disk, masters in fp32; one thread a rank.",
        f"growth of a rank's resident memory while loading: {growth:.0f} MiB at most, {GROWTH_LIMIT_MIB} wanted: "
        f"{verdict(growth, GROWTH_LIMIT_MIB)}",
        f"bytes of the files read by all ranks / of the files: {read:.3f} at most, {READ_LIMIT:g} wanted: "
        f"{verdict(read, READ_LIMIT)}",
        "logits: of plain transformers from the directory, and from what `fz.hf.save_pretrained` wrote of the state.",
    ]
    columns = ("ranks", "growth MiB", "read", "load s", "save growth MiB", "save s", "logits bit equal")
    return Table("Loading a model with everything on disk", columns, rows, notes, {"bytes": size, "points": points})
