"""Replaces the rewrite of a pass, or what decides whether it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fzero.compiler import passes


def pass_named(name: str) -> passes.Pass:
    return next(x for x in passes.PASSES if x.name == name)


def replace_pass(patch: pytest.MonkeyPatch, name: str, **fields: Callable[..., Any]) -> None:
    changed = dataclasses.replace(pass_named(name), **fields)
    patch.setattr(passes, "PASSES", tuple(changed if x.name == name else x for x in passes.PASSES))
