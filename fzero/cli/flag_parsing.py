"""Parses the flags of a command with tyro: the fields of a command are its flags, and their docstrings are its
help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Union

import tyro

from fzero._utils.deprecation import renamed_flags
from fzero.cli.commands import Calibrate, Check, Show
from fzero.cli.doctor_command import Doctor
from fzero.cli.plan_command import PlanCommand

_ABOUT = """fzero: what a training step will run, and what it will cost, before it runs. `fzero COMMAND --help` says
more; `fzero --version` prints the version.

MODULE:FUNCTION is a function that needs no argument and returns (step, params, batch): a step with its transforms; its
parameters, a pytree of (meta) tensors or an init function; one rank's batch. MODULE is a dotted module or the path of a
.py file."""

_EXAMPLES = {
    "plan": """
examples:
  fzero plan examples/plan_gpt.py:trillion --mesh data=1024 --device h200 --budget 141GB
  fzero plan package.module:function --mesh replica=2 data=8 --trace step.json --picture step.png

exit code: 0; 1 if it does not fit the budget or, without one, the device's memory, or if the target's code or the
tracing of it failed; 2 for an invalid flag or target""",
    "show": """
examples:
  fzero show examples/train_gpt.py:plan_target --mesh data=8
  fzero show examples/train_gpt.py:plan_target --mesh data=8 --flat | less
  fzero show examples/train_gpt.py:plan_target --mesh data=8 --diff overlap
  fzero show examples/train_gpt.py:plan_target --mesh data=8 --skip hoist_updates

exit code: 0; 1 if the target's code, its tracing or its lowering failed; 2 for an invalid flag or
target""",
    "check": """
examples:
  fzero check examples/train_gpt.py:plan_target
  torchrun --nproc-per-node 2 -m fzero check package.module:function --steps 5     (on two processes)

exit code: 0; 1 if they differ; 2 for an invalid flag or target""",
    "calibrate": """
examples:
  fzero calibrate
  torchrun --nproc-per-node 8 -m fzero.runtime.calibrate     (over the links between these ranks)""",
    "doctor": """
exit code: 0; 1 if fzero cannot work here""",
}

COMMANDS: dict[str, type] = {
    "plan": PlanCommand,
    "show": Show,
    "check": Check,
    "calibrate": Calibrate,
    "doctor": Doctor,
}
"""The commands: each field is a flag, and its docstring is the flag's help (on one line: tyro keeps line breaks)."""

_ELSEWHERE = {
    "--gpus": "--devices",
    "--num-gpus": "--devices",
    "--world-size": "--devices",
    "--stage": "--zero",
    "--dtype": "--precision",
    "--bf16": "--precision",
    "--gradient-accumulation-steps": "--accumulate",
    "--model": "--hf",
    "--memory": "--budget",
}
"""Flags of other tools, and the flags that correspond to them here."""

_RENAMED = {"--vertical": "--layerwise", "--whole": "--include-process"}
"""Deprecated flags, and the new ones."""

_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)


def parse(args: Sequence[str]) -> PlanCommand | Show | Check | Calibrate | Doctor:
    """Returns the command of a command line. Exits, as argparse does, with 2 and an error message, or with 0 after a
    help text.
    """
    args = renamed_flags(args, _RENAMED, "fzero")

    def told(name: str, kind: type) -> object:
        # one line each in the list of commands, and the full text in a command's own help
        first = (kind.__doc__ or "").splitlines()[0]
        return tyro.conf.subcommand(
            name, description=f"{first}\n{_EXAMPLES[name]}" if list(args[:1]) == [name] else first
        )

    each = tuple(Annotated[kind, told(name, kind)] for name, kind in COMMANDS.items())
    commands = Union[each]  # noqa: UP007  # made of a list
    try:
        return tyro.cli(commands, prog="fzero", description=_ABOUT, args=list(args), config=_STYLE)  # type: ignore[arg-type]
    except SystemExit as stop:
        # A help text exits with 0. For an error, tyro has printed its message already, and these lines follow it.
        if stop.code and args and args[0] in COMMANDS:
            print(f"fzero {args[0]} --help lists its flags", file=sys.stderr)
            for line in _meant(args[1:], _flags(COMMANDS[args[0]])):
                print(line, file=sys.stderr)
        raise


def _meant(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns a line for each unknown flag that is similar to a known one; tyro suggests only those that are very
    similar.
    """
    given = [arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")]
    unknown = [flag for flag in given if flag not in (*flags, "--help")]
    known = {flag: [name] for flag, name in _ELSEWHERE.items() if name in flags}
    near = {flag: known.get(flag) or get_close_matches(flag, flags, n=1) for flag in unknown}
    return [f"{flag}: did you mean {found[0]}?" for flag, found in near.items() if found]


def _flags(kind: type) -> list[str]:
    """Returns the flags of a command: its fields except the positional one, including those of nested groups."""
    found = list[str]()
    for field in (f for f in fields(kind) if f.name != "target"):
        group = field.default_factory
        nested = group is not MISSING and is_dataclass(group)
        found += _flags(group) if nested else [f"--{field.name.replace('_', '-')}"]  # type: ignore[arg-type]
    return found
