"""Defines what a user transforms: a step, which is a loss, an optimizer and specs; the plain step, its meaning.

`train.py` has training steps, `evaluate.py` evaluations, `compose.py` several transforms as one, `state.py` what a step
carries over, `checks.py` what is said of arguments that are none.
"""

from fzero.step.compose import compose
from fzero.step.evaluate import EvalStep, eval_step
from fzero.step.state import INIT_STREAM, State, lasting
from fzero.step.train import Step, train_step

__all__ = ["INIT_STREAM", "EvalStep", "State", "Step", "compose", "eval_step", "lasting", "train_step"]
