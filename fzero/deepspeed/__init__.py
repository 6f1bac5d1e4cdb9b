"""Trains by DeepSpeed's configuration: each of its keys is supported, rejected or ignored.

config = fz.deepspeed.load_config("ds_config.json", auto={"optimizer.params.lr": 3e-5})
step = config.train_step(loss_fn)          # fz.train_step(loss_fn, config.optimizer), with config.transforms
print(config.report())
"""

from fzero.deepspeed.arguments import from_arguments
from fzero.deepspeed.config import Config, load_config
from fzero.deepspeed.initialize import initialize
from fzero.deepspeed.reading import Decision

__all__ = ["Config", "Decision", "from_arguments", "initialize", "load_config"]
