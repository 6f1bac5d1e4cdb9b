"""The first half hour on a GPU: what has to hold there and was never seen, each with its target, in six steps.

    OUT=DIR benchmarks/gpu_hour.sh 1              # a step; those of `gpu_checks.py`, at most ten minutes each
    python benchmarks/gpu_hour.py --page DIR      # gpu_hour.md and .json of all that was found
    python benchmarks/gpu_hour.py --list

Each check runs in a process of its own, with a limit, and leaves one JSON file: what fails or hangs takes none of the
others with it, and a step that was cut short goes on where it was. With `--device cpu --small` the same code runs in
seconds; what only a GPU can show is skipped there by name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import publish
from gpu_checks import CHECKS, STEPS, Check, Skipped

from fzero.launcher import die_with_parent

MINUTES = 9.5  # of a step: the machine may give ten


def run_step(step: int, args: argparse.Namespace) -> int:
    """Runs the checks of a step that have no result yet. Returns how many failed, or are left for another call."""
    print(f"step {step}: {STEPS[step]}", flush=True)
    begin, left = time.monotonic(), 0
    for check in (c for c in CHECKS.values() if c.step == step and (not args.only or c.name in args.only)):
        path = args.out / f"{check.step}_{check.name}.json"
        if path.exists() and not args.again and "error" not in json.loads(path.read_text()):
            print(f"  {check.name}: done before", flush=True)
            continue
        room = 60 * args.minutes - (time.monotonic() - begin)
        if room < min(30.0, check.seconds):
            print(f"  {check.name}: no time left, call the step again", flush=True)
            left += 1
            continue
        found = apart(check, min(2 * check.seconds, room), args)
        path.write_text(json.dumps(found, indent=1) + "\n")
        left += "error" in found
        for line in summary(found):
            print(f"  {line}", flush=True)
    return left


def apart(check: Check, limit: float, args: argparse.Namespace) -> dict[str, Any]:
    """The result of a check, which runs in a process of its own for at most so many seconds."""
    result, begin = args.out / f".{check.name}.{os.getpid()}.json", time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--check", check.name, "--result", str(result)]
    command += ["--device", args.device, "--out", str(args.out), *(["--small"] if args.small else [])]
    log = args.out / f"log_{check.step}_{check.name}.txt"
    # in a session of its own, which ends as a whole: it may have started others
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
            why = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"was not done after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    head = {"check": check.name, "step": check.step, "device": args.device, "small": args.small}
    if result.exists():
        found = json.loads(result.read_text())
        result.unlink()
    else:
        last = log.read_text(errors="replace").strip().splitlines()[-15:]
        found = {"error": f"it {why}", "said": last}
    return {**head, **found, "seconds": round(time.monotonic() - begin, 1)}


def run_check(name: str, args: argparse.Namespace) -> None:
    """The other side of `apart`: carries out one check and writes what it found."""
    try:
        values, targets = CHECKS[name].run(args)
        found: dict[str, Any] = {"values": values, "targets": [t.told() for t in targets]}
    except Skipped as why:
        found = {"skipped": str(why)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}", "said": traceback.format_exc().splitlines()[-15:]}
    written = args.result.with_suffix(".part")
    written.write_text(json.dumps(found))
    written.rename(args.result)


def summary(found: dict[str, Any]) -> list[str]:
    """What a check came to, in lines."""
    name = f"{found['check']} ({found['seconds']:.0f} s)"
    if "skipped" in found:
        return [f"{name}: skipped: {found['skipped']}"]
    if "error" in found:
        return [f"{name}: FAILED: {found['error']}", *(f"    {line}" for line in found.get("said", ()))]
    values = ", ".join(f"{k} {_short(v)}" for k, v in found["values"].items() if not isinstance(v, (dict, list)))
    return [f"{name}: {values}", *(f"  {_target(t)}" for t in found["targets"])]


def _target(target: dict[str, Any]) -> str:
    return f"{target['what']}: {_short(target['value'])}, wanted {target['wanted']}: {target['verdict']}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(folder: Path) -> int:
    """Writes gpu_hour.md and .json of all results in a folder. Returns the number of targets that are not met."""
    results = {
        (f["step"], f["check"]): f for f in (json.loads(p.read_text()) for p in sorted(folder.glob("[1-6]_*.json")))
    }
    rows, missed = [], 0
    for check in CHECKS.values():
        found = results.get((check.step, check.name), {"skipped": "not run yet"})
        if "error" in found or "skipped" in found:
            missed += "error" in found
            what = f"skipped: {found['skipped']}" if "skipped" in found else f"FAILED: {found['error'].splitlines()[0]}"
            rows.append((f"{check.step} {check.name}", check.about, "", "", what))
            continue
        targets = found["targets"] or [{"what": check.about, "value": "", "wanted": "", "verdict": "noted"}]
        missed += sum(t["verdict"] == "MISSED" for t in targets)
        rows += [
            (f"{check.step} {check.name}", t["what"], _short(t["value"]), t["wanted"], t["verdict"]) for t in targets
        ]
    small = any(f.get("small") for f in results.values())
    devices = sorted({f.get("device", "") for f in results.values()})
    notes = [
        f"device: {', '.join(devices) or 'none'}"
        + (", in the small form, which says nothing of speed" if small else "")
    ]
    notes += [
        f"{f['check']}: "
        + ", ".join(f"{k} {_short(v)}" for k, v in f["values"].items() if not isinstance(v, (dict, list)))
        for f in results.values()
        if f.get("values")
    ]
    publish(
        "gpu_hour",
        "The first half hour on a GPU",
        ("check", "what", "found", "wanted", "target"),
        rows,
        notes,
        {"results": list(results.values())},
        folder,
    )
    print(f"  {missed} of the targets are missed, or could not be seen because a check failed")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("steps", nargs="*", type=int, help="to run, by number, 1 to 6")
    parser.add_argument("--page", type=Path, metavar="DIR", help="write the page of what was found in a folder")
    parser.add_argument("--list", action="store_true", help="say what there is to check")
    parser.add_argument("--only", nargs="+", choices=[*CHECKS], help="of the steps' checks", metavar="CHECK")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of seconds, to see the code run")
    parser.add_argument("--out", type=Path, default=Path("gpu_hour"))
    parser.add_argument("--check", choices=[*CHECKS], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ready", action="store_true", help=argparse.SUPPRESS)  # refuse what cannot be done, alone
    args = parser.parse_args()
    if not (args.list or args.check or args.page):
        if not args.steps or not {*args.steps} <= {*STEPS}:
            parser.error("name a step, 1 to 6, or --page DIR, or --list")
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("there is no CUDA device here; --device cpu --small runs the same code on a CPU, in seconds")
        if args.ready:
            return 0
    if args.list:
        for check in CHECKS.values():
            print(f"{check.step} {check.name} (about {check.seconds:.0f} s): {check.about}")
        return 0
    if args.check:
        die_with_parent()
        run_check(args.check, args)
        return 0
    if args.page:
        page(args.page)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs apart ends too
    args.out.mkdir(parents=True, exist_ok=True)
    return 1 if sum(run_step(step, args) for step in args.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
