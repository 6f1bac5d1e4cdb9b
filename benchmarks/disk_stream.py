"""How fast scratch files stream, beside a raw probe that reads and writes the very same blocks of the same files.

    python benchmarks/disk_stream.py --path DIR          # 1 GiB, about a minute on a disk of 2 GB/s
    python benchmarks/disk_stream.py --path DIR1 DIR2    # striped

The raw probe is a C program of as many threads, each in a loop of `pread` and `pwrite`; without a compiler it is as
many processes of Python that do the same. Both are run in every round, in random order, and every round is a ratio.
`mixed` reads the first half of the range and writes the second, as an update does that reads one block while it writes
another.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Group, passed_on, publish, script_flags, serve, settings, verdict

if TYPE_CHECKING:
    import torch

    from fzero.comm.disk import Files

LIMIT = 0.90
MODES = ("read", "write", "mixed")
DEPTH = 3  # transfers under way: a block read, one updated, one written

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


def streams(files: Files, size: int, memory: torch.Tensor) -> Callable[[str], None]:
    """Moves the whole range through a ring of buffers, as a step does."""
    ring = memory.chunk(DEPTH)
    chunk = ring[0].numel()

    def run(mode: str) -> None:
        under_way: list[Any] = []
        for k in range(size // chunk):
            writes = mode == "write" or (mode == "mixed" and k % 2 == 1)
            at = k * chunk if mode != "mixed" else k // 2 * chunk + (k % 2) * (size // 2)
            if len(under_way) == DEPTH:
                under_way.pop(0).wait()
            under_way.append((files.write if writes else files.read)([(at, ring[k % DEPTH])]))
        for transfer in under_way:
            transfer.wait()

    return run


def compiled(
    paths: Sequence[str], size: int, block: int, ring: torch.Tensor, threads: int, direct: bool
) -> Callable[[str], None] | None:
    """The raw probe in C; None without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "raw.c", Path(folder) / "raw.so"
        source.write_text(RAW)
        subprocess.run(
            [*compiler.split(), "-O2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True
        )
        raw = ctypes.CDLL(str(library))
    raw.run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    fds = (ctypes.c_int * len(paths))(*opened(paths, direct))

    def run(mode: str) -> None:
        if raw.run(fds, len(paths), size, block, ring.data_ptr(), ring.numel(), threads, MODES.index(mode)):
            raise OSError(f"the raw probe could not {mode}")

    return run


def opened(paths: Sequence[str], direct: bool) -> list[int]:
    return [os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0)) for path in paths]


def worker(args: argparse.Namespace) -> None:
    """One process of the raw probe where there is no compiler: every so many blocks."""
    from fzero.comm import disk

    memory = [disk.aligned(disk.PIECE).fill_(7).numpy().data]

    def move(paths: list[str], size: int, mode: str, direct: bool) -> float:
        fds, begin = opened(paths, direct), time.perf_counter()
        for k in range(int(os.environ["RANK"]), size // disk.PIECE, int(os.environ["WORLD_SIZE"])):
            writes = mode == "write" or (mode == "mixed" and k % 2 == 1)
            stripe = k if mode != "mixed" else k // 2 + (k % 2) * (size // disk.PIECE // 2)
            call = os.pwritev if writes else os.preadv
            call(fds[stripe % len(fds)], memory, stripe // len(fds) * disk.PIECE)
        seconds = time.perf_counter() - begin
        for fd in fds:
            os.close(fd)
        return seconds

    serve({"move": move})


def main() -> None:
    args = _arguments()
    if args.worker:
        worker(args)
        return
    from fzero.comm import disk

    size, chunk = args.mib << 20, args.chunk << 20
    if size % (2 * chunk) or chunk % disk.PIECE:
        raise SystemExit("--mib must be a multiple of twice --chunk, and --chunk of 4")
    files = disk.Files(args.path, size, num_threads=args.threads)
    paths = [str(part.directory / "data") for part in files._parts]
    ring = disk.aligned(DEPTH * chunk).fill_(7)  # the memory of both
    stream = streams(files, size, ring)
    raw = compiled(paths, size, disk.PIECE, ring, args.threads, files.direct)
    group = None
    if raw is None:
        group = Group(__file__, args.threads, passed_on(args, "threads"))
        raw = lambda mode: group.ask("move", paths=paths, size=size, mode=mode, direct=files.direct)  # noqa: E731
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
    if group is not None:
        group.close()
    report(args, points, size, "C" if group is None else "Python processes", files.direct)
    files.close()


def report(
    args: argparse.Namespace, points: dict[str, list[dict[str, float]]], size: int, probe: str, direct: bool
) -> None:
    rows, verdicts = [], []
    for mode, found in points.items():
        raw, ours = (statistics.median(size / p[f"{who}_s"] / 1e9 for p in found) for who in ("raw", "fzero"))
        ratios = [p["raw_s"] / p["fzero_s"] for p in found]
        share, cpu = statistics.median(ratios), statistics.median(p["fzero_cpu_s"] for p in found) / size * 2**30
        rows.append(
            (
                mode,
                f"{raw:.2f}",
                f"{ours:.2f}",
                f"{share:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{1e3 * cpu:.0f}",
            )
        )
        verdicts.append(f"{mode}: {share:.2f} of the raw probe, at least {LIMIT:.2f} wanted: {verdict(LIMIT, share)}")
    notes = [
        f"{args.mib} MiB, directories: {len(args.path)}, {'O_DIRECT' if direct else 'through the page cache'}, blocks "
        f"of 4 MiB, {args.threads} threads; "
        f"{DEPTH} transfers of {args.chunk} MiB under way; the raw probe: {probe}, on the same blocks of the same "
        f"files.",
        f"Medians of {args.rounds} rounds; the share is the median of the rounds' own ratios.",
        *verdicts,
    ]
    where = {"directories": len(args.path), "probe": probe, "direct": direct}
    columns = ("", "raw GB/s", "fzero GB/s", "share", "over the rounds", "CPU ms a GiB")
    publish(
        args.name,
        "Streaming scratch files",
        columns,
        rows,
        notes,
        {"settings": settings(args, "path") | where, "points": points},
        args.out,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--path", nargs="+", default=[tempfile.gettempdir()], help="directories on the disk to be measured"
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=32, help="MiB of a transfer")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    script_flags(parser, "disk_stream")
    return parser.parse_args()


if __name__ == "__main__":
    main()
