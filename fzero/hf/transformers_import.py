"""Imports the library `transformers`, of which version 5 is needed, or says how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fzero.errors import FzeroError

INSTALL = "pip install 'transformers>=5,<6' accelerate"


def library(owner: str) -> Any:
    """The module `transformers`.

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
    """Turns a failing import of the library, or of a package that its Trainer needs, into an error that says what to
    install."""
    try:
        yield
    except ImportError as error:
        raise FzeroError(owner, "needs the library transformers", [str(error)], INSTALL) from error
