"""Defines the step that transforms act on: a loss, an optimizer, and the transforms applied to it.

A step is a frozen value. Called directly, it runs eagerly through autograd, whatever its
transforms: these are the reference semantics, because transforms change how a step is computed, not
what it computes. The state that it updates is defined in `train_state.py`.

| file | what it does |
|---|---|
| `train.py` | `Step` and `train_step`: training steps |
| `evaluate.py` | `EvalStep` and `eval_step`: forward-only steps |
| `compose.py` | `compose`: several transforms as one |
| `checks.py` | checks the parameters, state and batch that a step is given, and explains wrong ones |
"""

from fzero.step.compose import compose
from fzero.step.evaluate import EvalStep, eval_step
from fzero.step.train import Step, train_step
from fzero.train_state import INIT_STREAM, State, lasting

__all__ = ["INIT_STREAM", "EvalStep", "State", "Step", "compose", "eval_step", "lasting", "train_step"]
