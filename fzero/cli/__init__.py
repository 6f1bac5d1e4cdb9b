"""Runs the command line: `fzero plan`, `fzero show`, `fzero check`, `fzero calibrate`.

A command is a frozen dataclass (commands.py) whose fields are its flags. It returns its exit code: 0; 1: the step does
not fit its budget, is not what it is without transforms, or something failed; 2: flags or a target that cannot be
meant. Errors are text on stderr; a traceback is shown of a user's own code only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fzero.errors import FzeroError

INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports a process that SIGINT or SIGPIPE ended


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    Args:
        args: without the program's name; by default those of this process.

    Example:
        >>> main(["--version"])
        fzero ... (torch ...)
        0
    """
    args = sys.argv[1:] if args is None else args
    try:
        code = _run(list(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # or Python complains again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def _run(args: list[str]) -> int:
    from fzero.cli.arguments import parse
    from fzero.cli.target import UsageError, UserError

    if args == ["--version"]:
        import torch

        from fzero import __version__

        print(f"fzero {__version__} (torch {torch.__version__})")
        return 0
    try:
        return parse(args).run()
    except SystemExit as stop:  # tyro has said what is wrong, or printed the help
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        raise
    except (FzeroError, UserError, OSError) as error:  # of the system: a file that cannot be written
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
