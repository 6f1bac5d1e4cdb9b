"""Runs the CUDA path on a device that computes nothing: launches, waits, allocations, captures, peaks beside plans.

    cd tests/cuda_stub
    python no_gpu.py                          # eager: 26 compositions on 1, 2 and 4 ranks
    python no_gpu.py --backend inductor       # those that are compiled too, by Triton and ptxas
    python no_gpu.py --shapes                 # models of other sizes
    python no_gpu.py --peers                  # memory compared with FSDP2, a vocabulary of 65 thousand, 2 ranks
    python no_gpu.py --plant                  # injected faults, which the checks must find
    python no_gpu.py --lost                   # a rank fails while another one waits for its transfer
    python no_gpu.py --hour                   # every check of benchmarks/gpu_hour.sh

PyTorch's CUDA build runs over stubs of NVIDIA's libraries (stub_device/). Memory and copies are real, kernels are
counted, and captures keep CUDA's rules: streams that are not joined, waits on what is not captured, calls that may not
be. Seconds of the host are real too, without the driver's own. It takes g++, and the CUDA wheel of PyTorch (527 MB).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark_modules import BENCHMARKS  # isort: skip - before the modules of benchmarks/
from common import publish, script_flags, settings
from gpu_hour import attempts, ended
from stub_device.build import HERE, TRITON, built, environment_of_rank

PEAK_LIMIT, FREED_LIMIT, PEER_LIMIT = 0.05, 10.0, 0.85
PLANTS = ("synchronisation", "pageable", "allocation", "no wait", "index", "module")


def ranks_of(
    env: dict[str, str], size: int, arguments: list[str], script: str = "checks.py", one_visible: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """The findings of each case, those of all ranks `together`, and the text that the ranks wrote to stderr.

    Args:
        one_visible: whether each rank sees its own GPU alone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / script), *arguments]
    envs = [environment_of_rank(env, rank, size, port, one_visible) for rank in range(size)]
    with tempfile.TemporaryFile("w+") as said:
        ranks = [subprocess.Popen(command, env=e, stdout=subprocess.PIPE, stderr=said, text=True) for e in envs]
        outputs = [rank.communicate()[0] for rank in ranks]
        said.seek(0)
        found = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in outputs]
        return [together([x[i] for x in found if len(x) > i]) for i in range(len(found[0]))], said.read()


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The findings of one case: those of rank 0, with the functions that all ranks compiled, their CPU-seconds of
    building, and what each did on another rank's device. The first failure, if a rank failed."""
    if failed := [x for x in ranks if "failed" in x]:
        return failed[0]
    if "keys" not in ranks[0]:
        return ranks[0]
    return {
        **{name: value for name, value in ranks[0].items() if name != "keys"},
        "compiled": sum(x["compiled"] for x in ranks),
        "functions": len({key for x in ranks for key in x["keys"]}),
        "building_cpu_s": round(sum(x["building_cpu_s"] for x in ranks), 1),
        "elsewhere": {f"rank {r}: {name}": n for r, x in enumerate(ranks) for name, n in x["elsewhere"].items()},
    }


def lost_rank(env: dict[str, str], freed: bool, seconds: float) -> dict[str, Any] | None:
    """Seconds after which a rank whose peer is lost goes on, and after which both are in the run again; None: it still
    waits after so many. `freed`: whether its transfers are aborted."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {"FAKE_GPUS": "2", "FAKE_GONE": f"{folder}/gone", "KEEPS_WAITING": "" if freed else "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "fzero.run", "--memory", folder, str(HERE / "lost_rank.py")]
        with tempfile.TemporaryFile("w+") as said:
            run = subprocess.Popen(
                command, env={**env, **ranks}, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
            )
            try:
                out = run.communicate(timeout=seconds)[0]
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
                return None
            if run.returncode:
                said.seek(0)
                print(said.read()[-4000:], file=sys.stderr)
                raise SystemExit(f"the run ended with {run.returncode}")
        return json.loads(out.splitlines()[-1])


def judged(x: dict[str, Any]) -> list[str]:
    """What is wrong with a case."""
    if "failed" in x:
        return [x["failed"]]
    wrong = []
    for when in ("told", "replayed"):
        step = x[when]
        wrong += [f"{when}: {name}" for name in step["errors"]]
        if step["allocations"]:
            wrong.append(f"{when}: {step['allocations']} allocations by the driver")
        if step["pageable"]:
            wrong.append(f"{when}: {step['pageable']} copies from or to memory that is not locked")
        if step["waits"] and not x["host_works"]:
            wrong.append(f"{when}: the host waits {step['waits']} times")
    if abs(x["peak_mib"] / x["planned_mib"] - 1) > PEAK_LIMIT:
        wrong.append(f"the peak is {x['peak_mib'] / x['planned_mib'] - 1:+.1%} beside the plan")
    if x["programs"] != 1:
        wrong.append(f"{x['programs']} programs were made of one kind of batch")
    if x["registered"] != x["to_register"]:
        wrong.append(f"{x['registered']} registrations of memory, not {x['to_register']}")
    if x["refused"]:
        wrong.append(f"not captured: {x['refused']}")
    if x["compiled"] > x["functions"]:
        wrong.append(f"the ranks compiled {x['compiled']} times, {x['functions']} functions")
    wrong += [f"{name}, {n} times" for name, n in x["elsewhere"].items()]
    return wrong


def beside_peers(args: argparse.Namespace, env: dict[str, str]) -> bool:
    """Publishes peaks of memory of fzero's ZeRO-3 and of FSDP2. Returns whether all bounds hold."""
    found = dict[str, dict[str, Any]]()
    for who in ("FSDP2", "FSDP2, bf16", *(f"fzero ZeRO-3{x}" for x in ("", ", bf16"))):
        print(who, file=sys.stderr, flush=True)
        cases, said = ranks_of(env, 2, [who, f"--backend={args.backend}"], "peers.py")
        if not cases:
            raise SystemExit(said[-4000:])
        found[who] = cases[0]
    rows, notes, met = [], list[str](), True
    for who, x in found.items():
        beside = f" ({x['peak'] / x['planned'] - 1:+.1%})" if x["planned"] else ""
        rows.append((who, f"{x['peak'] / 2**20:.1f}{beside}", f"{x['reserved'] / 2**20:.1f}"))
        if not x["planned"]:
            continue
        planned = abs(x["peak"] / x["planned"] - 1) <= PEAK_LIMIT
        theirs = found["FSDP2, bf16" if "bf16" in who else "FSDP2"]
        ratios = [x[what] / theirs[what] for what in ("peak", "reserved")]
        fits = ratios[0] <= PEER_LIMIT
        met = met and planned and fits
        notes.append(
            f"{who}: {ratios[0]:.2f} of FSDP2's peak, {ratios[1]:.2f} of the bytes that it has the allocator reserve."
        )
    columns = ("2 ranks", "peak MiB (beside the plan)", "reserved MiB")
    about = (
        f"torch {args.torch}, CUDA build; {args.backend}, FSDP2 with each block compiled if that is inductor; 4 layers "
        "of 512, a vocabulary of 65,536, 4 sequences of 128 a rank; AdamW, clipping. Of the third step, by PyTorch's "
        "allocator, without workspaces of cuBLAS. Reserved: by the allocator in all, workspaces too."
    )
    name, title = f"{args.name}_peers_{args.backend}", "Memory beside FSDP2 on a device that computes nothing"
    publish(
        name, title, columns, rows, [about, *notes], {"settings": settings(args, "folder"), "found": found}, args.out
    )
    return met


def rehearsed(args: argparse.Namespace, env: dict[str, str]) -> bool:
    """Runs the calls of gpu_hour.sh: the first in its real sizes, the others in the small form. Returns whether every
    check came to its end, or said why it has nothing to show."""
    rows, failed, every = [], 0, list[Any]()
    with tempfile.TemporaryDirectory(prefix="fzero-hour-") as folder:
        script = [str(BENCHMARKS / "gpu_hour.sh"), "--patience", "20", "--minutes", "60", "--home", f"{folder}/home"]
        for small, calls in ((False, "1"), (True, "234")):
            out = ["--out", f"{folder}/{calls}"]
            only = ["--only", *args.only] if args.only else []
            command = [*script, *calls, *out, *["--small"] * small, *only]
            subprocess.run(command, env={**env, "FAKE_GPUS": "1"}, stdout=sys.stderr)
            for check, lines in attempts([Path(folder, calls)]).items():
                end = ended(lines)
                failed += end["how"] == "failed"
                numbers = sum(x["kind"] in ("value", "target") for x in lines)
                how = end["how"] if end["how"] == "done" else f"{end['how']}: {end['why'].splitlines()[0]}"
                size = "small" if small else "real"
                rows.append(
                    (f"{lines[0]['call']} {check}", size, f"{end['seconds']:.0f}", end["compiled"], numbers, how)
                )
                every += lines
    shared = sum(row[3] for row in rows if row[1] == "real" and row[0] not in ("1 rates", "1 planned"))
    notes = [
        f"torch {args.torch}, CUDA build. Seconds are of this machine's cores, and of a GPU that takes no time.",
        "What the checks find is not looked at: no number is computed. Values, losses and rates are of empty memory.",
        f"{shared} functions are compiled for all checks of the first call, besides those of rates and full remat.",
        f"Checks that failed: {failed} ",
    ]
    columns = ("call, check", "sizes", "s", "functions compiled", "numbers", "ended")
    data = {"settings": settings(args, "folder"), "lines": every}
    publish(f"{args.name}_hour", "The first half hour on a GPU, rehearsed", columns, rows, notes, data, args.out)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "fzero-no-gpu", help="of the device")
    parser.add_argument("--torch", default="2.13.0", choices=list(TRITON))
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="cases, or checks of --hour")
    parser.add_argument("--shapes", action="store_true", help="models of other sizes instead")
    parser.add_argument(
        "--one-visible", action="store_true", help="each rank sees its own GPU alone, as Slurm shows it"
    )
    parser.add_argument("--peers", action="store_true", help="memory beside FSDP2's instead, with a large vocabulary")
    parser.add_argument("--lost", action="store_true", help="a rank is lost instead, with and without aborts")
    parser.add_argument("--hour", action="store_true", help="gpu_hour.sh instead")
    parser.add_argument("--plant", action="store_true", help="plant faults instead, which must be found")
    script_flags(parser, "no_gpu")
    args = parser.parse_args()
    env = built(args.folder / args.torch, args.torch)
    given = [
        f"--backend={args.backend}",
        f"--layers={args.layers}",
        f"--width={args.width}",
        *(["--shapes"] if args.shapes else []),
        *(["--only", *args.only] if args.only else []),
    ]
    rows, found, failed = [], [], 0
    if args.peers:
        sys.exit(not beside_peers(args, env))
    if args.hour:
        sys.exit(not rehearsed(args, env))
    if args.lost:
        for freed in (True, False):
            x = lost_rank(env, freed, 90.0)
            failed += (x is None or x["freed"] > FREED_LIMIT) == freed
            found.append({"aborts": freed, "lost": x})
            shown = ("waits after 90", "") if x is None else (f"{x['freed']:.1f}", f"{x['again']:.1f}")
            rows.append(("transfers are aborted" if freed else "they are not", *shown))
        columns = ("", "s until the other rank goes on", "s until both are in the run again")
        title, name = "A rank of two is lost", f"{args.name}_lost"
        notes = [
            f"torch {args.torch}, CUDA build, `python -m fzero.run`. Rank 1 is killed. What rank 0 begins never ends.",
        ]
        publish(name, title, columns, rows, notes, {"settings": settings(args, "folder"), "found": found}, args.out)
        sys.exit(bool(failed))
    if args.plant:
        for plant in PLANTS:
            compiled = ["--backend=inductor", "--layers=2", "--width=256"] if plant == "module" else []
            with tempfile.TemporaryDirectory() as folder:  # caches that hold nothing
                size = 2 if plant in ("no wait", "module") else 1
                own = {"FZERO_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
                (x,), said = ranks_of({**env, **own}, size, [f"--plant={plant}", *compiled])
            wrong = judged(x)
            failed += not wrong
            rows.append((plant, "found" if wrong else "not found", " ".join("; ".join(wrong).split())[:200]))
            print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
        columns, title, name = ("planted", "", "by"), "Faults that are planted", f"{args.name}_planted"
    else:
        for size in args.ranks:
            cases, said = ranks_of(env, size, given, one_visible=args.one_visible)
            if not cases or any("failed" in x for x in cases):
                print(said[-4000:], file=sys.stderr)
            for x in cases:
                wrong = judged(x)
                failed += bool(wrong)
                found.append({**x, "wrong": wrong})
                print(f"{size} ranks, {x['case']}: {'; '.join(wrong) or 'ok'}", file=sys.stderr, flush=True)
                if "failed" not in x:
                    told, replayed = x["told"], x["replayed"]
                    peak = f"{x['peak_mib']:.1f} ({x['peak_mib'] / x['planned_mib'] - 1:+.1%})"
                    cpu = (f"{told['cpu_ms']:.1f}", f"{replayed['cpu_ms']:.1f}")
                    waits = f"{told['waits']}, {replayed['waits']}"
                    title, outcome = f"{size}: {x['case']}", " ".join("; ".join(wrong).split()) or "none"
                    rows.append((title, told["launches"], replayed["launches"], waits, *cpu, peak, outcome))
        columns = (
            "ranks: step",
            "launches",
            "replayed",
            "waits",
            "host ms",
            "replayed",
            "peak MiB (compared with the plan)",
            "problems",
        )
        title = "The CUDA path on a device that computes nothing"
        name = f"{args.name}_{'shapes_' * args.shapes}{'one_visible_' * args.one_visible}{args.backend}"

    def of(what: str) -> int:
        return sum(x.get(what, 0) for x in found)

    notes = [
        f"torch {args.torch}, CUDA build; {args.backend}; {args.layers} layers of {args.width}, 8 sequences of 128, "
        f"2,048 words{', where a row says nothing else' * args.shapes}.",
        "A told step is the third: from the second on metrics of one before are alive. A replayed one is the seventh.",
        "Waits: of the host for the device; a step whose state the host updates waits for its gradients.",
        *(
            [f"Functions: {of('functions')}, compiled by all ranks together: {of('compiled')}."]
            if of("functions")
            else []
        ),
        f"{failed} of {len(rows)} {'injected faults not found' if args.plant else 'with a problem'}.",
    ]
    publish(name, title, columns, rows, notes, {"settings": settings(args, "folder"), "found": found}, args.out)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
