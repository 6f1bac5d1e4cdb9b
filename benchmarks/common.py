"""What every benchmark needs: groups of real processes that act on command, and results that say where they were
measured."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SOURCE = Path(__file__).resolve().parent.parent

if "FAKE_GPUS" in os.environ:  # tests/cuda_stub runs this script on its stub device, which computes no values
    sys.path.append(str(SOURCE / "tests" / "cuda_stub"))
    from stub_device import no_values

    no_values.install()

PUBLIC, RESULTS = SOURCE / "docs" / "results", SOURCE / "results"
"""The tables that the documentation shows, and everything else that was measured."""
SMALL_OUT = Path(tempfile.gettempdir()) / "fzero-small"
"""Where results of small runs go, which mean nothing."""
OUT_HELP = "folder to write to; by default docs/results for the tables that stand there, and results"


# --- processes on command ---


class Group:
    """`size` processes of one script with torchrun's environment. Idle, blocked on a pipe, until asked.

    Only one group should be asked at a time; the others cost nothing but their memory.
    """

    def __init__(
        self,
        script: str,
        size: int,
        args: Sequence[str] = (),
        *,
        threads: int = 1,
        timeout: float = 600.0,
        cache: str | None = None,
        tree: Path | None = None,
    ):
        self._timeout = timeout
        # every group compiles from nothing
        self._cache = tempfile.TemporaryDirectory(prefix="fzero-bench-", ignore_cleanup_errors=True)
        cache = cache or self._cache.name  # unless it is told where others have
        if (calibration := _calibration()).exists():  # this machine's rates are no result of compiling
            shutil.copy(calibration, cache)
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(size)]  # noqa: SIM115 - closed by close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes = []
        for rank in range(size):
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache, "FZERO_CACHE": cache}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            if sys.platform == "linux":
                env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree or SOURCE), env.get("PYTHONPATH")]))
            command = [sys.executable, script, "--worker", *args]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[rank]}
            self._processes.append(subprocess.Popen(command, env=env, cwd=tree, text=True, **pipes))

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """What every process answers to a command, in rank order. Raises with the processes' own words if one fails."""
        watchdog = threading.Timer(self._timeout, self.kill)
        watchdog.start()
        try:
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                    process.stdin.flush()
            answers = []
            for process in self._processes:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    self._fail(do)
                answers.append(json.loads(line))
            return answers
        finally:
            watchdog.cancel()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()
        self._cache.cleanup()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fail(self, do: str) -> NoReturn:
        self.kill()
        texts = []
        for rank, log in enumerate(self._logs):
            log.seek(0)
            texts.append(f"--- rank {rank} ---\n{log.read()[-4000:]}")
        raise RuntimeError(f"a process failed at {do!r}, or did not answer in {self._timeout:g} s\n" + "\n".join(texts))


def torchrun_command(
    script: Sequence[str], flags: Sequence[str], interface: str = "lo"
) -> tuple[list[str], dict[str, str]]:
    """A command that runs a script as ranks of torchrun, and its environment."""
    usual = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": interface}
    return [sys.executable, "-m", "torch.distributed.run", *flags, *script], {**os.environ, **usual}


def _calibration() -> Path:
    from fzero.plan.calibration import calibration_path

    return calibration_path()


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """The other end of a `Group`: answers commands until the pipe closes. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        result = commands[request.pop("do")](**request)
        answers.write(json.dumps(result) + "\n")
        answers.flush()


# --- flags ---

MODEL = ("layers", "width", "heads", "seq", "batch")
HELP = {
    "batch": "global",
    "steps": "measured steps, of each round if there are rounds",
    "warmup": "steps that are not measured",
    "held_out": "batches of text that is not trained on",
    "timed": "steps whose seconds are measured",
}


def number_flags(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """Flags whose values are integers. Without a default a flag is None until a preset fills it."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=HELP.get(name))


def model_flags(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """The sizes of the model, as `Config` in model.py has them."""
    number_flags(parser, **dict.fromkeys(MODEL), **{k: v for k, v in defaults.items() if k not in MODEL})
    parser.set_defaults(**defaults)


def backend_flag(parser: argparse.ArgumentParser, default: str | None = "inductor", whose: str = "of fzero") -> None:
    parser.add_argument("--backend", choices=["inductor", "eager"], default=default, help=whose)


def passed_on(args: argparse.Namespace, *names: str) -> list[str]:
    """Flags as a worker is given them."""
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]


def chosen(parser: argparse.ArgumentParser, given: Sequence[str], options: Iterable[str]) -> list[str]:
    """The arguments of `nargs="*"`, by default all options."""
    known = list(options)
    if unknown := [name for name in given if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return list(given) or known


def script_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """What a script takes whose results are `name`, and which starts itself as its workers."""
    parser.add_argument("--name", default=name, help="of the files in --out")
    parser.add_argument("--out", type=Path, help=OUT_HELP)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def script_parser(about: str | None, name: str, small: str) -> argparse.ArgumentParser:
    """The parser of a script, with `--small`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"{small}: to see that it works")
    script_flags(parser, name)
    return parser


def parsed(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """The flags of a script, whose defaults are others with `--small`."""
    if "--small" in sys.argv:
        parser.set_defaults(out=SMALL_OUT, **small)
    return parser.parse_args()


def settings(args: argparse.Namespace, *hidden: str) -> dict[str, Any]:
    """Flags as results keep them: without those about the run alone, or the machine's own."""
    return {k: v for k, v in vars(args).items() if k not in ("worker", "out", *hidden)}


# --- memory of this process ---


def rss_mib() -> float:
    """Resident memory now."""
    return _status("VmRSS")


def peak_mib() -> float:
    """The most resident memory since the process began, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Forgets the peak so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status: memory is measured on Linux only")


# --- comparisons ---


def within_rounds(name: str, each: Sequence[float]) -> tuple[dict[str, Any], str]:
    """Ratios of the rounds, as data and as a note: their median and their range."""
    middle, least, most = statistics.median(each), min(each), max(each)
    data = {"median": middle, "min": least, "max": most}
    spread = f" (rounds {least:.3f} to {most:.3f})" if len(each) > 1 else ""
    return data, f"{name}: {middle:.3f}{spread}"


def largest_difference(losses: Iterable[Sequence[float]]) -> tuple[float, int]:
    """The largest relative difference between the losses of one step of several runs, and the number of that step."""
    spread = [(max(at) - min(at)) / max(abs(min(at)), 1e-9) for at in zip(*losses, strict=True)]
    return max(spread), spread.index(max(spread))


# --- bytes sent ---


def sent_bytes(interface: str = "lo") -> int:
    """Bytes that have left the network namespace of this process through an interface. /sys shows another one's."""
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(int(rest.split()[8]) for name, _, rest in lines if name.strip() == interface)


# --- results ---


class Table(NamedTuple):
    """Findings as `publish` takes them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]
    data: dict[str, Any]
    draw: Callable[[Any], None] | None = None


def environment() -> dict[str, Any]:
    """Versions and hardware, as they belong beside any number."""
    import torch

    import fzero

    cpu = platform.processor()
    flags = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        cpu = next((x.split(":", 1)[1].strip() for x in info.splitlines() if x.startswith("model name")), cpu)
        flags = next((x for x in info.splitlines() if x.startswith("flags")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    known = {"AVX2": "avx2", "AVX-512": "avx512f", "bf16 AVX-512": "avx512_bf16", "AMX": "amx_tile"}
    simd = [name for name, flag in known.items() if flag in flags.split()]
    return {
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "fzero": fzero.__version__,
        "commit": commit_of(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "simd": simd,
        "memory_gib": round(memory, 1),
        "calibrated": _calibration().exists(),
    }


def commit_of(tree: Path = SOURCE) -> str:
    try:
        command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def publish(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    notes: Sequence[str],
    data: Mapping[str, Any],
    out: Path | None = None,
    draw: Callable[[Any], None] | None = None,
    how: str = "Measured",
) -> None:
    """Print a table; write `name.json` (all values) and `name.md` (the table, the notes, where it was measured).

    Args:
        out: The folder of all files. By default the table goes to docs/results if a table of this name stands there,
            and to results otherwise; all values go to results.
        draw: Draws on a matplotlib figure, which becomes `name.svg` and is shown by `name.md`. Without matplotlib
            there is no picture.
        how: How the numbers came about: "Measured" or "Planned".
    """
    from rich.console import Console
    from rich.table import Table

    where = environment()
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(width=max(Console().width, 130))  # a log file is as wide as a table
    console.print(table)
    for note in notes:
        console.print(f"  {note}", highlight=False)
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    simd = ", ".join(where["simd"]) or "no AVX2"
    lines += ["", *(f"- {note}" for note in notes)]
    lines += [f"- {how} {where['when']}: fzero {where['fzero']} ({where['commit']}), torch {where['torch']}, Python "
              f"{where['python']}, {where['system']}, "
              f"{where['cores']} cores of {where['cpu']} ({simd}), {where['memory_gib']} GiB."]  # fmt: skip
    tables = out or (PUBLIC if (PUBLIC / f"{name}.md").exists() else RESULTS)
    values = out or RESULTS
    for folder in (tables, values):
        folder.mkdir(parents=True, exist_ok=True)
    drawn = draw is not None and _picture(tables / f"{name}.svg", draw)
    if drawn:
        lines += ["", f"![{title}]({name}.svg)"]
    (values / f"{name}.json").write_text(
        json.dumps({"name": name, "environment": where, **data}, indent=1, default=str) + "\n"
    )
    (tables / f"{name}.md").write_text("\n".join(lines) + "\n")
    written = [values / f"{name}.json", tables / f"{name}.md", *([tables / f"{name}.svg"] if drawn else [])]
    console.print(f"  written: {', '.join(map(str, written))}", highlight=False)


def _picture(path: Path, draw: Callable[[Any], None]) -> bool:
    """Whether matplotlib is installed, and has drawn."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: it takes matplotlib, which the extra `bench` brings", file=sys.stderr)
        return False
    with matplotlib.rc_context(
        {"svg.hashsalt": path.stem, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure)
        figure.savefig(path, metadata={"Date": None})
    return True
