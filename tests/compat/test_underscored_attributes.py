"""Lists every file that reads an underscored attribute of PyTorch's objects, outside `_compat`."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

import torch

import fzero

PACKAGE = Path(fzero.__file__).parent

READERS = {
    # of tensors: the number of writes, and hooks
    "_version": {
        "modules/captured_tensors.py",
        "modules/module_init.py",
        "trace/block_calls.py",
        "trace/guards/settings_walk.py",
    },
    "_post_accumulate_grad_hooks": {"modules/module_guard.py"},
    # of operators
    "_schema": {
        "modules/batch_dims.py",
        "ops/recurrent.py",
        "sharding/operations.py",
        "sharding/user_rules.py",
        "trace/guards/known_values.py",
        "trace/guards/overwrites.py",
        "trace/guards/unsupported_operations.py",
        "trace/meta_cache.py",
        "trace/recorder.py",
        "trace/storages.py",
    },
    # of autograd nodes: identifies the forward operation of a backward node
    "_sequence_nr": {"trace/guards/rejections.py"},
    # of modules, and of tensors (`_backward_hooks`)
    "_parameters": {"hf/models.py", "modules/meta_module.py", "modules/module_guard.py", "modules/quantized_linear.py"},
    "_buffers": {"hf/models.py", "modules/meta_module.py", "modules/module_guard.py"},
    "_modules": {"modules/module_guard.py"},
    "_backward_hooks": {"modules/meta_module.py", "modules/module_guard.py"},
    "_forward_hooks": {"modules/hook_capture.py", "modules/meta_module.py", "modules/quantized_linear.py"},
    "_forward_pre_hooks": {"modules/meta_module.py", "modules/quantized_linear.py"},
    "_flat_weights": {"modules/meta_module.py"},
}
"""Each attribute, with the files of the package that read it. A new entry needs a reason: an underscored attribute may
change with any version of PyTorch.
"""


def test_where_underscored_attributes_of_pytorchs_objects_are_read() -> None:
    weight = torch.ones(1, requires_grad=True)
    objects = [weight, weight.untyped_storage(), torch.ops.aten.add.Tensor, (weight + 1).grad_fn, torch.nn.LSTM(1, 1)]
    private = {name for x in objects for name in dir(x) if re.match("_[^_]", name)}
    read = collections.defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        if path.name != "compat.py":
            for n in ast.walk(ast.parse(path.read_text())):
                if isinstance(n, ast.Attribute) and n.attr in private and ast.unparse(n.value) not in ("self", "cls"):
                    read[n.attr].add(path.relative_to(PACKAGE).as_posix())
    assert read == READERS
