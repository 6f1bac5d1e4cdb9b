"""docs/design.md lists every file that reads an underscored attribute of PyTorch's objects."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

import torch

import fzero

PACKAGE = Path(fzero.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design.md").read_text()


def test_where_underscored_attributes_of_pytorchs_objects_are_read() -> None:
    weight = torch.ones(1, requires_grad=True)
    objects = [weight, weight.untyped_storage(), torch.ops.aten.add.Tensor, (weight + 1).grad_fn, torch.nn.LSTM(1, 1)]
    private = {name for x in objects for name in dir(x) if re.match("_[^_]", name)}
    said, read = collections.defaultdict(set), collections.defaultdict(set)
    for part in re.split(r";|\.\n", PAGE.partition("**Private PyTorch names**")[2].partition("\n## ")[0]):
        names = re.findall(r"`([^`]+)`", part)
        for name in names:
            if name in private:
                said[name] |= {x for x in names if x.endswith(".py")}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            for n in ast.walk(ast.parse(path.read_text())):
                if isinstance(n, ast.Attribute) and n.attr in private and ast.unparse(n.value) not in ("self", "cls"):
                    read[n.attr].add(path.relative_to(PACKAGE).as_posix())
    assert said == read
