"""Trains from a DeepSpeed configuration, without importing DeepSpeed.

    config = fz.deepspeed.load_config("ds_config.json", auto={"optimizer.params.lr": 3e-5})
    step = config.train_step(loss_fn)  # fz.train_step(loss_fn, config.optimizer), with config.transforms
    print(config.report())

Each key is supported, rejected or ignored; every other key is unknown, and an error.

| file | what it does |
|---|---|
| `supported_keys.py` | says which keys are supported, rejected or ignored, and which values they take |
| `config_values.py` | reads the values of a configuration, fills in `"auto"` and collects all problems |
| `training_arguments.py` | takes the values for `"auto"` from the TrainingArguments of transformers |
| `config.py` | `load_config`: turns a configuration into transforms, an optimizer and a schedule |
| `optimizer.py` | makes the optimizer and the learning-rate schedule, with DeepSpeed's defaults |
| `initialize.py` | `initialize`: compiles a module with a configuration, in place of `deepspeed.initialize` |
"""

from fzero.deepspeed.config import Config, load_config
from fzero.deepspeed.config_values import Decision
from fzero.deepspeed.initialize import initialize
from fzero.deepspeed.training_arguments import from_arguments

__all__ = ["Config", "Decision", "from_arguments", "initialize", "load_config"]
