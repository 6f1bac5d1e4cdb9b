"""Records the terminal at the top of README.md: runs three commands and writes what they print to docs/recording.svg.

    python docs/recording.py            # runs the commands and writes the file
    python docs/recording.py --check    # runs them and fails if they no longer print what the file shows

The picture is one SVG file whose lines appear one after the other (30 seconds, then it starts again). `rich` draws
each screen; the animation is CSS, so a page can show the file as an image. A test of the full tier runs `--check`, so
the recording shows what the commands of this commit print. In the third screen, numbers and the order of lines differ
from run to run and are not compared.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_name("recording.svg")
COLUMNS, ROWS = 120, 26
SECONDS = 30

PROGRAM = """\
import torch
import fzero as fz

@fz.block
def layer(p, x): return x + torch.relu(x @ p["up"]) @ p["down"]
def loss_fn(params, batch):
    for p in params["layers"]:
        batch = layer(p, batch)
    return batch.square().mean()
params = {"layers": [{"up": torch.zeros(64, 256), "down": torch.zeros(256, 64)} for _ in range(6)]}
step = fz.shard_params(fz.train_step(loss_fn, fz.optim.adamw(1e-3)))
print(fz.lower(step, fz.AbstractMesh(data=8), params, torch.ones(8, 64)).program)
"""

KILLED = """\
import logging
import os
import signal
import torch
import fzero as fz

step = fz.shard_params(fz.train_step(lambda params, x: (x @ params["w"]).square().mean(), fz.optim.adamw(1e-2)))

def main(run):
    train = fz.compile(step, run.mesh, backend="eager")
    state = run.state(train, {"w": torch.eye(128)})
    batch = torch.linspace(-1, 1, 512).view(4, 128)
    if run.mesh.rank == 0:
        print(f"training from step {int(state.step)} (state from: {run.source})", flush=True)
    for index in run.steps(state, 20):
        if index == 10 and run.mesh.rank == 1 and run.source == "init":
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = train(state, batch)
        run.commit(state)
        if run.mesh.rank == 0 and index % 4 == 3:
            print(f"step {index + 1}: loss {float(metrics['loss']):.4f}", flush=True)

fz.run(main)
"""


@dataclass(frozen=True)
class Scene:
    """One screen of the recording.

    Attributes:
        command: what is typed.
        lines: what is printed, at most `ROWS - 1` lines.
        varies: whether numbers and the order of lines differ from run to run.
    """

    command: str
    lines: tuple[str, ...]
    varies: bool = False


def output(*command: str, folder: Path | None = None) -> list[str]:
    """Returns the lines that a command prints to stdout and stderr, without the progress of a plan."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(COLUMNS),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder or ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    progress = re.compile(r"fzero\.plan: \d+ s\b")
    return [line for line in done.stdout.splitlines() if not progress.match(line)]


def scenes() -> list[Scene]:
    """Runs the three commands."""
    fzero = (sys.executable, "-m", "fzero")
    planned = output(*fzero, "plan", "--hf", "examples/llama_3_8b.json", "--devices", "8xh100")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "zero3.py").write_text(PROGRAM)
        (folder / "train.py").write_text(KILLED)
        program = output(sys.executable, "zero3.py", folder=folder)
        ranks = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
        killed = output(*ranks, "-m", "fzero.run", "train.py", folder=folder)
    return [
        Scene("fzero plan --hf examples/llama_3_8b.json --devices 8xh100", shortened(planned, last=1)),
        Scene("python zero3.py    # print(program): ZeRO-3 for 8 devices, on a laptop", shortened(program)),
        Scene(
            "torchrun --nproc-per-node 2 -m fzero.run train.py    # rank 1 gets kill -9 in step 10",
            shortened(killed),
            varies=True,
        ),
    ]


def shortened(lines: list[str], last: int = 0) -> tuple[str, ...]:
    """Returns the lines that fit on a screen: the first ones and the `last` ones, each within the columns."""
    room = ROWS - 2
    if len(lines) > room:
        lines = [*lines[: room - 1 - last], "...", *lines[len(lines) - last :]]
    return tuple(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in lines)


def screen(scene: Scene, name: str) -> str:
    """Returns one screen as SVG, drawn by rich."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (scene.command, "bold")))
    for line in scene.lines:
        code, mark, comment = line.partition("  # ")
        console.print(Text.assemble(code, (mark + comment, "dim cyan")), soft_wrap=True, overflow="crop")
    for _ in range(ROWS - 1 - len(scene.lines)):
        console.print()
    svg = console.export_svg(title="fzero", unique_id=name)
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def recording(found: list[Scene]) -> str:
    """Returns the animation: the screens one after the other, whose lines appear from top to bottom."""
    share = 100 / len(found)
    style, screens, size = [], [], ""
    for number, scene in enumerate(found):
        name, start = f"screen-{number}", number * share
        before = f"0%, {start - 0.01:.2f}% {{ opacity: 0 }} " if number else ""
        after = f" {start + share:.2f}%, 100% {{ opacity: 0 }}" if number < len(found) - 1 else ""
        during = f"{start:.2f}%, {start + share - 0.01:.2f}% {{ opacity: 1 }}"
        style.append(f"@keyframes {name} {{ {before}{during}{after} }}")
        style.append(f"#{name} {{ animation: {name} {SECONDS}s infinite }}")
        for line in range(1, len(scene.lines) + 1):
            at = start + share * (0.08 + 0.4 * line / ROWS)
            appear = f"0%, {at:.2f}% {{ opacity: 0 }} {at + 0.01:.2f}%, 100% {{ opacity: 1 }}"
            style.append(f"@keyframes {name}-{line} {{ {appear} }}")
            style.append(f'[clip-path$="{name}-line-{line})"] {{ animation: {name}-{line} {SECONDS}s infinite }}')
        svg = screen(scene, name)
        size = re.search(r'viewBox="([^"]+)"', svg)[1]
        screens.append(f'<g id="{name}" opacity="{int(number == 0)}">\n{svg}\n</g>')
    style.append("@media (prefers-reduced-motion: reduce) { * { animation: none !important } }")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">\n<style>\n'
        + "\n".join(style)
        + "\n</style>\n"
        + "\n".join(screens)
        + "\n</svg>\n"
    )


def shown(svg: str) -> list[list[str]]:
    """Returns the lines of each screen of a recording."""
    found: dict[tuple[int, int], str] = {}
    for screen_number, line, text in re.findall(r'clip-path="url\(#screen-(\d)-line-(\d+)\)">(.*?)</text>', svg):
        at = int(screen_number), int(line)
        found[at] = found.get(at, "") + unescape(text).replace("\xa0", " ")
    last = max(number for number, _ in found)
    return [[found[at].rstrip() for at in sorted(found) if at[0] == number] for number in range(last + 1)]


def main() -> int:
    found = scenes()
    if "--check" not in sys.argv[1:]:
        FILE.write_text(recording(found))
        print(f"wrote {FILE.relative_to(ROOT)}, {FILE.stat().st_size // 1024} KiB")
        return 0
    before, now = shown(FILE.read_text()), shown(recording(found))
    for scene, old, new in zip(found, before, now, strict=True):
        if scene.varies:
            old, new = (sorted(re.sub(r"[\d.]+", "N", line) for line in lines) for lines in (old, new))
        if old != new:
            print(f"`{scene.command}` no longer prints what the recording shows: python docs/recording.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
