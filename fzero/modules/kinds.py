"""Refuses kinds of modules that have no skeleton: lazy ones that have not run, and scripted ones."""

from __future__ import annotations

import torch
from torch import nn

from fzero.errors import FzeroTypeError


def check_kinds(module: nn.Module) -> None:
    """Raises if tensors of a module have no shape yet, or TorchScript runs a part of it."""
    lazy, scripted = [], []
    for name, m in module.named_modules():
        unmade = [
            k
            for k, x in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
            if nn.parameter.is_lazy(x)
        ]
        if unmade:
            lazy.append(f"{name or 'the module'} ({type(m).__name__}): {', '.join(unmade)}")
        if isinstance(m, torch.jit.ScriptModule):
            kind = getattr(m, "original_name", type(m).__name__)
            scripted.append(f"{name or 'the module'} ({kind})")
    if lazy:
        fix = "run one forward before: module(inputs) gives them their shapes"
        raise FzeroTypeError("functionalize", "lazy modules have no shapes yet", lazy, fix)
    if scripted:
        fix = "give the module as it was before torch.jit.script or torch.jit.trace; a step is compiled by fz.compile"
        what = "TorchScript runs these modules, and keeps its own tensors"
        raise FzeroTypeError("functionalize", what, scripted, fix)
