"""The first half hour on a GPU: what has to hold there and was never seen, each with its target, in four calls.

    OUT=DIR benchmarks/gpu_hour.sh 1              # a call; those of `gpu_checks.py`, at most nine minutes each
    benchmarks/gpu_hour.sh --page DIR ...         # gpu_hour.md and .json of all that was found
    benchmarks/gpu_hour.sh --list

Each check runs in a process of its own, with a limit: what fails or hangs takes none of the others with it. Every
number goes to DIR/results.jsonl as soon as it is known. A call that was cut short goes on where it was. What it wrote
besides is packed at its end: DIR/gpu_hour_CALL.tgz holds logs, traces and scripts' results, and DIR/cache.tgz the
compiled functions, if they are few enough. `--kept FILE` begins with such functions on another machine.

Send home DIR: results.jsonl is enough for the page, which takes several folders. A machine without an index wants
`--wheels W` in every call, made by `pip download -d W optree einops safetensors rich tyro numpy pytest pytest-xdist`.

With `--device cpu --small` the same code runs in minutes; what only a GPU can show is skipped there by name. `no_gpu.py
--hour` runs it on the stub device, which computes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import benchmark_modules  # noqa: F401 - before the modules of benchmarks/
import torch
from common import publish
from gpu_checks import CALLS, CHECKS, Check, Found, Skipped, shown

from fzero.comm.launcher import die_with_parent

MINUTES = 9.0  # of a call: the machine may give ten
ARCHIVE_LIMIT = 15 << 20  # bytes: what a machine sends back is limited
RESULTS = "results.jsonl"


def run_call(call: int, args: argparse.Namespace) -> int:
    """Runs the checks of a call that have no result yet. Returns how many failed, or had no time."""
    print(f"call {call}: {CALLS[call]}", flush=True)
    begin, left = time.monotonic(), 0
    for check in (c for c in CHECKS.values() if c.call == call and (not args.only or c.name in args.only)):
        done = attempts([args.out]).get(check.name)
        if done and not args.again and ended(done)["how"] in ("done", "skipped"):
            print(f"  {check.name}: done before", flush=True)
            continue
        room = 60 * args.minutes - (time.monotonic() - begin)
        if room < min(30.0, check.seconds):
            print(f"  {check.name}: no time left, make the call again", flush=True)
            left += 1
            continue
        left += apart(check, min(args.patience * check.seconds, room), args)["how"] == "failed"
        for line in told(attempts([args.out])[check.name]):
            print(f"  {line}", flush=True)
    pack(args.out / f"gpu_hour_{call}.tgz", args.work)
    pack(args.out / "cache.tgz", args.home / "cache", whole=True)
    return left


def apart(check: Check, limit: float, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a check in a process of its own, for at most so many seconds. Returns the line that ends it."""
    begin, before = time.monotonic(), len(functions(args))
    head = {"call": check.call, "check": check.name, "attempt": time.time_ns(), "device": args.device}
    found = Found(args.out / RESULTS, {**head, "small": args.small})
    command = [sys.executable, str(Path(__file__).resolve()), "--check", check.name, "--head", json.dumps(head)]
    command += ["--device", args.device, "--out", str(args.out), "--home", str(args.home)]
    command += ["--small"] if args.small else []
    log = args.work / f"log_{check.call}_{check.name}.txt"
    # in a session of its own, which ends as a whole: it may have started others
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
            why = f"it ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it was not done after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = attempts([args.out]).get(check.name, [])
    mine = [x for x in lines if x["attempt"] == head["attempt"]]
    said = log.read_text(errors="replace").strip().splitlines()[-15:]
    outcome = next((x for x in mine if x["kind"] == "outcome"), {"how": "failed", "why": why, "said": said})
    last = {k: outcome[k] for k in ("how", "why", "said") if k in outcome}
    last |= {"seconds": round(time.monotonic() - begin, 1), "compiled": len(functions(args)) - before}
    found.line("end", **last)
    return last


def functions(args: argparse.Namespace) -> list[Path]:
    """The compiled functions that are kept."""
    return [*(args.home / "cache" / "functions").glob("*.so")]


def run_check(name: str, args: argparse.Namespace) -> None:
    """The other side of `apart`: carries out one check."""
    found = Found(args.out / RESULTS, {**json.loads(args.head), "small": args.small})
    try:
        CHECKS[name].run(args, found)
        found.line("outcome", how="done")
    except Skipped as why:
        found.line("outcome", how="skipped", why=str(why))
    except Exception as error:
        traceback.print_exc()
        said = traceback.format_exc().splitlines()[-15:]
        found.line("outcome", how="failed", why=f"{type(error).__name__}: {error}", said=said)


Lines = list[dict[str, Any]]
_FIELDS = {"call", "check", "attempt", "device", "small", "kind"}
"""The fields that each line has."""


def attempts(folders: Iterable[Path]) -> dict[str, Lines]:
    """The lines of each check's last attempt, in whichever folder that is."""
    last = dict[str, Lines]()
    for folder in folders:
        try:
            texts = (folder / RESULTS).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for text in texts:
            try:
                line = json.loads(text)
            except ValueError:  # it was cut short
                continue
            if not isinstance(line, dict) or not _FIELDS <= {*line}:
                continue
            lines = last.setdefault(line["check"], [])
            if lines and line["attempt"] > lines[0]["attempt"]:
                lines.clear()
            if not lines or line["attempt"] == lines[0]["attempt"]:
                lines.append(line)
    return last


def ended(lines: Lines) -> dict[str, Any]:
    """How an attempt ended."""
    cut = {"how": "failed", "why": "it was cut short", "said": [], "seconds": float("nan"), "compiled": 0}
    return next((x for x in lines if x["kind"] == "end"), cut)


def told(lines: Lines) -> list[str]:
    """The numbers and targets of a check's attempt, and why it failed, as lines to print."""
    end = ended(lines)
    name = f"{lines[0]['check']} ({end['seconds']:.0f} s, {end['compiled']} functions compiled)"
    if end["how"] == "skipped":
        return [f"{name}: skipped: {end['why']}"]
    values = [f"{x['what']} {shown(x['value'])}" for x in lines if x["kind"] == "value"]
    out = [f"{name}: " + ", ".join(values)]
    out += [
        f"  {x['what']}: {shown(x['value'])}, wanted {x['wanted']}: {x['verdict']}"
        for x in lines
        if x["kind"] == "target"
    ]
    if end["how"] == "failed":
        out += [f"  FAILED: {end['why']}", *(f"    {line}" for line in end.get("said", ()))]
    return out


def pack(archive: Path, folder: Path, whole: bool = False) -> None:
    """Packs the files of a folder into an archive of at most ARCHIVE_LIMIT bytes: the largest are left out, or with
    `whole` the archive is."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    while True:
        with tarfile.open(archive, "w:gz") as packed:
            for path in files:
                packed.add(path, path.relative_to(folder))
        if archive.stat().st_size <= ARCHIVE_LIMIT:
            return
        if whole:
            print(f"  {archive.name} is left out: {archive.stat().st_size / 2**20:.0f} MiB", flush=True)
            archive.unlink()
            return
        print(f"  {files[-1].name} is left out of {archive.name}", flush=True)
        files.pop()


def page(folders: list[Path]) -> int:
    """Write gpu_hour.md and .json of all results in `folders` into the first one. Return how many targets were not
    reached."""
    last = attempts(folders)
    rows, notes, missed = [], [], 0
    left = sum(name not in last for name in CHECKS)
    for check in CHECKS.values():
        name = f"{check.call} {check.name}"
        if check.name not in last:
            rows.append((name, check.about, "", "", "not run yet"))
            continue
        lines = last[check.name]
        end = ended(lines)
        for x in (x for x in lines if x["kind"] == "target"):
            rows.append((name, x["what"], shown(x["value"]), x["wanted"], x["verdict"]))
            missed += x["verdict"] == "not reached"
        if end["how"] != "done":
            missed += end["how"] == "failed"
            what = f"skipped: {end['why']}" if end["how"] == "skipped" else f"FAILED: {end['why'].splitlines()[0]}"
            rows.append((name, check.about, "", "", what))
        elif not any(x["kind"] == "target" for x in lines):
            rows.append((name, check.about, "", "", "noted"))
        values = [f"{x['what']} {shown(x['value'])}" for x in lines if x["kind"] == "value" and x["value"] is not None]
        cost = f"{end['seconds']:.0f} s, {end['compiled']} functions compiled"
        notes.append(f"{check.name}: {cost}{': ' * bool(values)}{', '.join(values)}")
    every = [line for lines in last.values() for line in lines]
    devices = sorted({x["device"] for x in every})
    small = ", in the small form, which says nothing of speed" if any(x["small"] for x in every) else ""
    publish(
        "gpu_hour",
        "The first half hour on a GPU",
        ("check", "what", "found", "wanted", "target"),
        rows,
        [f"device: {', '.join(devices) or 'none'}{small}", *notes],
        {"results": every},
        folders[0],
    )
    print(
        f"  {missed} of the targets are not reached, or could not be seen because a check failed; {left} checks have "
        "not run yet"
    )
    return missed


def main() -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu_hour.sh", description=__doc__, formatter_class=about)
    parser.add_argument("calls", nargs="*", type=int, help="to make, by number, 1 to 4", metavar="CALL")
    parser.add_argument("--page", type=Path, nargs="+", metavar="DIR", help="write the page of what folders hold")
    parser.add_argument("--list", action="store_true", help="say what there is to check")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS], help="of the calls' checks", metavar="CHECK")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each call (%(default)g)")
    patience = "of a check, at how many times its usual seconds it is ended (%(default)g)"
    parser.add_argument("--patience", type=float, default=2.0, help=patience)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: all calls in about four minutes")
    out = Path(os.environ.get("OUT") or "gpu_hour")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="$OUT, by default gpu_hour")
    home = Path.home() / ".cache" / "fzero-gpu-hour"
    keeps = "of compiled functions, logs and traces (%(default)s)"
    parser.add_argument("--home", type=Path, default=home, metavar="DIR", help=keeps)
    parser.add_argument("--kept", type=Path, metavar="FILE", help="the cache.tgz of an earlier call, to begin with")
    parser.add_argument("--wheels", metavar="DIR", help="of wheels to unpack first; gpu_hour.sh reads it")
    parser.add_argument("--check", choices=[*CHECKS], help=argparse.SUPPRESS)
    parser.add_argument("--head", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for check in CHECKS.values():
            print(f"{check.call} {check.name} (about {check.seconds:.0f} s): {check.about}")
        return 0
    if args.page:
        if missing := [str(folder) for folder in args.page if not (folder / RESULTS).is_file()]:
            parser.error(f"there is no {RESULTS} in {', '.join(missing)}")
        page(args.page)
        return 0
    args.home = args.home.resolve()
    args.work = args.home / "work"
    if args.check:
        die_with_parent()
        run_check(args.check, args)
        return 0
    if not args.calls or not {*args.calls} <= {*CALLS}:
        parser.error("name a call, 1 to 4, or --page DIR, or --list")
    if args.wheels:
        parser.error("--wheels is for gpu_hour.sh, which unpacks them before this begins")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --small runs the same code on a CPU, in minutes")
    if args.kept and not (args.kept.is_file() and tarfile.is_tarfile(args.kept)):
        parser.error(f"there is no {args.kept}" if not args.kept.exists() else f"{args.kept} is no archive")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs apart ends too
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        args.work.mkdir(parents=True, exist_ok=True)
        turn = (args.out / RESULTS).open("a")
    except OSError as error:
        parser.error(str(error))
    with turn, contextlib.suppress(KeyboardInterrupt):
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            parser.error(f"another call writes to {args.out}: make one at a time, or give each an OUT of its own")
        if args.kept:
            with tarfile.open(args.kept) as packed:
                packed.extractall(args.home / "cache", filter="data")
        os.environ["FZERO_CACHE"] = str(args.home / "cache")
        return 1 if sum(run_call(call, args) for call in args.calls) else 0
    print("cut short: make the same call again with the same OUT, and it goes on", flush=True)
    return 130


if __name__ == "__main__":
    sys.exit(main())
