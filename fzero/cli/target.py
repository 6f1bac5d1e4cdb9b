"""Imports the target of a command, MODULE:FUNCTION: a function that returns a step, its parameters and a batch.

[Note: whose error] A target that does not exist, or returns something else, is a `UsageError`. An exception of the
user's own code, when it is imported, called or traced, becomes a `UserError`: its traceback without fzero's frames,
as if the user had run the code. This file must not know what the commands do with the target.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fzero import random as fzrandom
from fzero import tree
from fzero._compat import compat
from fzero.errors import FzeroError, FzeroValueError
from fzero.step import EvalStep, Step

_RETURNS = (
    "return (step, params, batch): a step with its transforms; its parameters, a pytree of (meta) tensors or an init "
    "function; one rank's batch"
)
_OURS = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen importlib")
_TORCH = str(Path(torch.__file__).parent)


class UsageError(FzeroValueError):
    """An invalid flag or target."""


class UserError(Exception):
    """The text of an exception in the user's code, with its own traceback."""


def load(target: str) -> tuple[Step | EvalStep, Any, Any]:
    """Returns the step, parameters and batch that a target returns.

    Args:
        target: "package.module:function" or "folder/file.py:function".

    Raises:
        UsageError: if there is no such module or function, if it cannot be called without arguments, or if it returns
            something else.
        UserError: if importing the module or calling the function raised an exception; see [Note: whose error].
    """
    name, colon, function = target.rpartition(":")
    if not (name and colon and function):
        raise UsageError(
            "target",
            f"{target!r} is not MODULE:FUNCTION",
            fix="e.g. examples/plan_gpt.py:trillion, or package.module:function",
        )
    with users_code(target):
        fn = _function(_module(name), name, function)
        return _checked(fn(), target)


@contextlib.contextmanager
def users_code(target: str) -> Iterator[None]:
    """Runs the user's code as a script without arguments: its output goes to stderr, and its exceptions become a
    `UserError`.
    """
    # The user's module may parse command-line arguments when it is imported, and must not see those of fzero.
    before, sys.argv = sys.argv, [target.rpartition(":")[0]]
    try:
        with contextlib.redirect_stdout(sys.stderr), compat.quiet_fake_tensors():
            yield
    except (FzeroError, KeyboardInterrupt, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        text = _own_traceback(error)
        if text is None:  # none of the frames belong to the user: a bug of fzero, shown with its full traceback
            raise
        raise UserError(text) from None
    finally:
        sys.argv = before


def with_values(params: Any, batch: Any, part: int) -> tuple[Any, Any, int]:
    """Returns the result of a target with values drawn for its meta tensors, and the number of these.

    Args:
        params: a tree, or an init function, which stays as it is. Floating-point tensors are drawn from a normal
            distribution with standard deviation 0.02, the same on every rank.
        batch: floating-point tensors are drawn from a normal distribution, integers from 0 and 1, which are valid
            indices of any table. Each part of the batch has different values.
        part: the index of this rank's part of the batch.
    """
    num_drawn = 0

    def drawn(values: Any, key: torch.Tensor, width: float) -> Any:
        nonlocal num_drawn
        flat, structure = tree.flatten(values)
        for i, x in enumerate(flat):
            if isinstance(x, torch.Tensor) and x.is_meta:
                own, shape = fzrandom.fold_in(key, i), tuple(x.shape)
                flat[i] = (
                    fzrandom.normal(own, shape) * width if x.is_floating_point() else fzrandom.bernoulli(own, shape)
                ).to(x.dtype)
                num_drawn += 1
        return tree.unflatten(structure, flat)

    params = params if callable(params) else drawn(params, fzrandom.key(1), 0.02)
    return params, drawn(batch, fzrandom.fold_in(fzrandom.key(2), part), 1.0), num_drawn


# --- finding ---


def _module(name: str) -> ModuleType:
    return _from_file(Path(name)) if name.endswith(".py") or "/" in name else _by_name(name)


def _from_file(path: Path) -> ModuleType:
    """Imports a file as a module that can import its neighbors, as a script can."""
    if not path.is_file():
        folder = path.parent
        near = _near(path.name, (p.name for p in folder.glob("*.py"))) if folder.is_dir() else []
        problems = [f"near: {folder / n}" for n in near] if folder.is_dir() else [f"the folder {folder} does not exist"]
        raise UsageError(
            "target",
            f"the file {path} does not exist",
            problems,
            "give the path of a .py file, from the current folder",
        )
    _first_on_path(path.resolve().parent)
    # must not replace a module that others use
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError("target", f"{path} is not a Python file", fix="give the path of a .py file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # As Python's own import does: a module whose execution failed must not be found by a later import.
        del sys.modules[name]
        raise
    return module


def _by_name(name: str) -> ModuleType:
    """Imports a module by its dotted name. If there is none, the error lists modules with similar names."""
    _first_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, and one of its own imports is missing
        parent, _, last = error.name.rpartition(".")
        where = getattr(sys.modules.get(parent), "__path__", []) if parent else [str(Path.cwd())]
        near = _near(last, (found.name for found in pkgutil.iter_modules(where)))
        problems = [f"near: {f'{parent}.{n}' if parent else n}" for n in near]
        raise UsageError(
            "target",
            f"the module {error.name!r} does not exist",
            problems,
            "give a module's dotted name, or the path of a .py file",
        ) from None


def _function(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    """Returns a function of a module that can be called without arguments, or raises an error with similar names."""
    own = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
    if not hasattr(module, name):
        near = _near(name, own) or [n for n in own if not _needed(getattr(module, n))]
        raise UsageError(
            "target",
            f"{where} has no function {name!r}",
            [f"near: {where}:{n}" for n in near[:5]],
            "name a function of the module",
        )
    fn = getattr(module, name)
    if not callable(fn):
        raise UsageError(
            "target",
            f"{where}:{name} is not a function but {_kind(fn)}",
            fix=f"name a function that needs no argument; {_RETURNS}",
        )
    if needed := _needed(fn):
        raise UsageError(
            "target",
            f"{where}:{name} needs arguments: {', '.join(needed)}",
            fix="give them defaults, or name a function that calls it",
        )
    return fn


def _checked(returned: Any, target: str) -> tuple[Step | EvalStep, Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], (Step, EvalStep)):
        return returned
    kinds = (
        f"a tuple of {len(returned)}: ({', '.join(map(_kind, returned))})"
        if isinstance(returned, tuple)
        else _kind(returned)
    )
    problems = ["expected: (step, params, batch), the step made by train_step or eval_step", f"returned: {kinds}"]
    raise UsageError("target", f"{target} does not return a step, parameters and a batch", problems, _RETURNS)


def _needed(fn: Callable[..., Any]) -> list[str]:
    """Returns the arguments without a default."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin: calling it will tell
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _near(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=3)


def _kind(value: Any) -> str:
    return type(value).__name__


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# --- the user's traceback ---


def _own_traceback(error: BaseException) -> str | None:
    """Returns a traceback of the user's frames and of what they call; None if there is no such frame. A syntax error
    itself says where it is.
    """
    found = traceback.TracebackException.from_exception(error)
    rest = [found]
    while rest:
        exception = rest.pop()
        exception.stack = traceback.StackSummary.from_list(_theirs(exception.stack))
        rest += [x for x in (exception.__cause__, exception.__context__) if x is not None]
    if not found.stack and not isinstance(error, SyntaxError):
        return None
    return "".join(found.format()).rstrip("\n")


def _theirs(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Removes the frames of fzero and of the import system, and the frames of torch next to them: those that they
    call, and those that call them.
    """
    frames = list(stack)
    ours = [f.filename.startswith(_OURS) for f in frames]
    torch_ = [f.filename.startswith(_TORCH) for f in frames]
    for order in (range(1, len(frames)), range(len(frames) - 2, -1, -1)):
        for i in order:
            beside = i - order.step
            ours[i] = ours[i] or (torch_[i] and ours[beside])
    return [f for f, hidden in zip(frames, ours, strict=True) if not hidden]
