"""Defines what a user transforms: a step, which is a loss, an optimizer and specs; the plain step, its meaning.

`train.py` has training steps, `evaluate.py` evaluations, `compose.py` several transforms as one, `checks.py` what is
said of arguments that are none.
"""

from fzero.step.compose import compose
from fzero.step.evaluate import EvalStep, eval_step
from fzero.step.train import Step, train_step
from fzero.train_state import INIT_STREAM, State, lasting

__all__ = ["INIT_STREAM", "EvalStep", "State", "Step", "compose", "eval_step", "lasting", "train_step"]
