"""Runs the command line: `fzero plan`, `fzero show`, `fzero check`, `fzero calibrate` and `fzero doctor`.

Each command is a frozen dataclass in `commands.py` whose fields are its flags. It returns its exit
code: 0 if it succeeded; 1 if the step does not fit its budget, differs from the step without
transforms, or something failed; 2 if a flag or the target is invalid. Errors are printed to stderr,
and a traceback is shown only for the user's own code.

| file | what it does |
|---|---|
| `flag_parsing.py` | parses the flags of a command with tyro |
| `flags.py` | the flags that several commands share |
| `target.py` | imports the target `MODULE:FUNCTION`, which returns a step, its parameters and a batch |
| `hf_script.py` | writes the training script for a transformers model (`--hf`), and the step to plan from it |
| `step_command.py` | makes the step and the mesh that `plan` and `show` lower |
| `plan_command.py` | `fzero plan`: plans the step on one or several meshes, and prints or draws the plan |
| `plan_page.py` | `fzero plan --html`: adds alternatives, suggestions and code to the page of a plan |
| `commands.py` | lists the commands, and runs `show`, `check` and `calibrate` |
| `doctor_command.py` | `fzero doctor`: prints what this machine has, what is missing, and how to get it |
| `plan_summary.py` | summarizes a plan in words: does the model fit, how fast does it train, what would help |
| `printing.py` | prints plans, programs, devices and reports in colour, as plain text or as JSON |
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from fzero._utils.progress import shown
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
        # otherwise Python reports the error again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def _run(args: list[str]) -> int:
    """Parses and runs a command line, and prints errors. Returns the exit code."""
    # Elsewhere than on a terminal, a line on each command would be noise.
    with shown("fzero", lambda: "importing PyTorch") if sys.stderr.isatty() else contextlib.nullcontext():
        from fzero.cli.flag_parsing import parse
        from fzero.cli.target import UsageError, UserError

    if args == ["--version"]:
        import torch

        from fzero import __version__

        print(f"fzero {__version__} (torch {torch.__version__})")
        return 0
    try:
        return parse(args).run()
    except SystemExit as stop:  # tyro has printed the error or the help
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        raise
    except (FzeroError, UserError, OSError) as error:  # OSError: for example a file that cannot be written
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
