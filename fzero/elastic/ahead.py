"""Prepares the programs of other numbers of ranks while a run trains, so that a start on these finds them compiled.

A process of low priority runs the script as a spare does (elastic/spares.py) and calls `main` once for each
number, up to its first step (elastic/rehearsal.py). What it builds is left in the compiler's cache of its host. Imports
no PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence

from fzero.elastic import host


class Ahead:
    """The process of a host that prepares, as the keeper of its first rank has it.

    Args:
        command: what starts it.
        sizes: numbers of ranks.
        say: prints a line.
    """

    def __init__(self, command: Sequence[str], sizes: Sequence[int], say: Callable[[str], None]):
        self._command, self._sizes, self._say = command, sizes, say
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._ended = False

    def look(self, start: bool) -> None:
        """Starts it once with `start`, and says when it has ended."""
        if start and self._process is None:
            self._began = time.monotonic()
            here = {host.SPARE: "1", host.SIZES: ",".join(map(str, self._sizes)), host.KEEPER: str(os.getpid())}
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **here},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=_quietly,
                process_group=host.own_group(),
            )
        if self._process is not None and not self._ended and (code := self._process.poll()) is not None:
            self._ended, seconds = True, time.monotonic() - self._began
            sizes = " and ".join(map(str, self._sizes))
            how = f"are prepared, in {seconds:.0f} s" if code == 0 else f"are not prepared: it ended with code {code}"
            self._say(f"has looked ahead: programs for {sizes} ranks {how}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def sizes_of(text: str | None, world: int, local: int, spares: int) -> list[int]:
    """The numbers of ranks that `--sizes` asks for.

    Args:
        text: numbers with commas between, "none", or None: with spares a host fewer and a host more, of a run on one
            host a rank.
        world, local: the run's ranks, and those of this host.

    Raises:
        ValueError: a text that has no such numbers.
    """
    if text is None:
        step = 1 if world == local else local
        return [n for n in (world - step, world + step) if n > 0] if spares else []
    if text == "none":
        return []
    sizes = [int(one) if one.strip().isdecimal() else 0 for one in text.split(",")]
    if not all(0 < n < 1 << 20 for n in sizes):
        raise ValueError("--sizes must be numbers of ranks with commas between, as in --sizes 6,8, or none")
    return [n for n in dict.fromkeys(sizes) if n != world]


def environment_of(size: int, local: int, world: int) -> dict[str, str]:
    """The environment of the first rank of so many: on one host if the run is, else as many on each as there are."""
    here = size if local == world else min(local, size)
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)}


def _quietly() -> None:
    os.nice(10)
    host.die_with_parent()
