"""Imports the library `transformers`, version 5, or raises an error that says how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fzero.errors import FzeroError

INSTALL = "pip install 'transformers>=5,<6' accelerate"


def library(owner: str) -> Any:
    """Returns the module `transformers`.

    Args:
        owner: the public name that an error begins with.

    Raises:
        FzeroError: the library is not installed, cannot be imported, or is older than version 5.
    """
    with needed(owner):
        import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise FzeroError(owner, f"needs transformers 5, and {transformers.__version__} is installed", fix=INSTALL)
    return transformers


@contextmanager
def needed(owner: str) -> Iterator[None]:
    """A context that turns a failing import of transformers, or of a package that its Trainer needs, into an error that
    says what to install."""
    try:
        yield
    except ImportError as error:
        raise FzeroError(owner, "needs the library transformers", [str(error)], INSTALL) from error
