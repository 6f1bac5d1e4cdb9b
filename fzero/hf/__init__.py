"""Connects the library `transformers`: its models, model directories, Trainer and generation.

`from_pretrained` and `from_config` turn a transformers model into functions of its tensors;
`save_pretrained` writes a directory that transformers' own `from_pretrained` reads. `module` returns
the model with the weights of a sharded state, for `generate()` and evaluation; `stream` passes them to an inference
engine. `experts_implementation`
and `tensor_rules` prepare a model for `expert_parallel` and `tensor_parallel`. `Trainer` and
`TrainingArguments` are those of transformers, around one compiled step. This folder imports nothing
from `ir/` or `compiler/`.

| file | what it does |
|---|---|
| `transformers_import.py` | imports transformers, or says how to install the version that is needed |
| `models.py` | makes models from directories and configurations, as functions of their tensors |
| `adapters.py` | adds adapters of the library `peft` to a model, and saves them |
| `moe.py` | `experts_implementation`: limits the number of tokens of an expert |
| `tp_plan.py` | `tensor_rules`: converts transformers' own tensor-parallel plan to rules |
| `weight_conversions.py` | maps stored weights to parameters and back, following transformers' conversions |
| `pretrained_saving.py` | writes a directory that transformers' `from_pretrained` reads, in bounded memory |
| `gathered_module.py` | runs a model with the weights of a sharded state, fully gathered or layer by layer |
| `weight_stream.py` | streams the weights of a sharded state to an inference engine |
| `weight_transport.py` | sends tensors to another process over a socket, and receives them |
| `trainer.py` | `Trainer`: runs the micro-batches of an update as one compiled step |
| `micro_batches.py` | joins the micro-batches of an update into one batch, padded to a few shapes |
| `bitsandbytes_files.py` | reads weights that bitsandbytes quantized, and quantizes weights while they are read |
| `training_step.py` | compiles the Trainer's step, and runs it with the current learning rates |
| `evaluator.py` | evaluates and predicts with the Trainer's current weights |
| `trainer_checkpoint.py` | saves and restores the Trainer's sharded state, its weights and its scheduler |
| `trainer_options.py` | `TrainingArguments`, and which options of the Trainer are ignored or rejected |
| `step_recipe.py` | decides the optimizer, transforms and learning rates of the Trainer's step |
| `deepspeed_recipe.py` | the same from a ds_config.json |
| `torch_optimizers.py` | translates PyTorch optimizers, and writes their learning rates to the state |
| `traced_loss.py` | traces the loss and the evaluation outputs through `compute_loss` |
| `loss_guard.py` | finds what the loss reads in addition to its batch, and rejects changes of it |
| `data_parallel_ranks.py` | counts data shards; all ranks along a tensor-parallel axis read the same data |
| `padding.py` | pads batches to a few shapes, and checks that padding does not change the loss |
| `batch_signatures.py` | groups batches by their entries, so that each group is computed with its own |
| `evaluation_step.py` | evaluates a model from its sharded state, batch by batch |
| `weight_sync.py` | gives declared callbacks the current weights, and rejects other uses of the module's |
| `stale_weights.py` | takes the weights out of a module during training, so that nobody reads old ones |
| `resume.py` | finds the checkpoint to resume from, skipping saves that did not finish |
"""

import importlib
from typing import TYPE_CHECKING, Any

from fzero._utils.deprecation import warn
from fzero.errors import no_attribute
from fzero.hf.gathered_module import module
from fzero.hf.models import Pretrained, from_config, from_pretrained
from fzero.hf.moe import experts_implementation
from fzero.hf.pretrained_saving import save_pretrained
from fzero.hf.tp_plan import tensor_rules
from fzero.hf.transformers_import import library, needed
from fzero.hf.weight_stream import WeightStream, stream
from fzero.hf.weight_transport import receive

if TYPE_CHECKING:
    from fzero.hf.trainer import Trainer
    from fzero.hf.trainer_options import TrainingArguments

__all__ = [
    "Pretrained",
    "Trainer",
    "TrainingArguments",
    "WeightStream",
    "experts_implementation",
    "from_config",
    "from_pretrained",
    "module",
    "receive",
    "save_pretrained",
    "stream",
    "tensor_rules",
]

_HOME = {"Trainer": "trainer", "TrainingArguments": "trainer_options"}
"""The names whose modules import transformers. They are imported when the names are first used."""


def __getattr__(name: str) -> Any:
    if name == "expert_rows":
        warn("fz.hf.expert_rows", "fz.hf.experts_implementation")
        return experts_implementation
    if name not in _HOME:
        raise no_attribute(__name__, name, __all__)
    library(f"hf.{name}")
    with needed(f"hf.{name}"):  # also checks for accelerate, which transformers' Trainer needs
        return getattr(importlib.import_module(f"fzero.hf.{_HOME[name]}"), name)
