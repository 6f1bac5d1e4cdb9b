"""Joins the library `transformers`: its models, their directories, its Trainer, and generation from a sharded state.

from_pretrained, from_config   a model of the library as functions of its tensors
save_pretrained                a directory that the library's own `from_pretrained` reads
module                         a model of the library with the weights of a state, for `generate()` and evaluation
experts_implementation         how the experts of a mixture are computed, for expert_parallel
tensor_rules                   how tensor_parallel cuts a model, by the library's own plan
Trainer, TrainingArguments     the library's Trainer around one compiled step
"""

import importlib
from typing import TYPE_CHECKING, Any

from fzero.deprecation import warn
from fzero.errors import no_attribute
from fzero.hf.library import library, needed
from fzero.hf.mixtures import experts_implementation
from fzero.hf.models import Pretrained, from_config, from_pretrained
from fzero.hf.running import module
from fzero.hf.saving import save_pretrained
from fzero.hf.tensor_rules import tensor_rules

if TYPE_CHECKING:
    from fzero.hf.options import TrainingArguments
    from fzero.hf.trainer import Trainer

__all__ = [
    "Pretrained",
    "Trainer",
    "TrainingArguments",
    "experts_implementation",
    "from_config",
    "from_pretrained",
    "module",
    "save_pretrained",
    "tensor_rules",
]

_HOME = {"Trainer": "trainer", "TrainingArguments": "options"}
"""The modules that import the library, when they are asked for."""


def __getattr__(name: str) -> Any:
    if name == "expert_rows":
        warn("fz.hf.expert_rows", "fz.hf.experts_implementation")
        return experts_implementation
    if name not in _HOME:
        raise no_attribute(__name__, name, __all__)
    library(f"hf.{name}")
    with needed(f"hf.{name}"):  # also accelerate, which the library's Trainer needs
        return getattr(importlib.import_module(f"fzero.hf.{_HOME[name]}"), name)
