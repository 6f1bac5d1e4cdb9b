"""A step that was made of a module takes no state, checkpoint or parameters of another model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
from fzero import optim
from fzero.errors import CheckpointError, FzeroError, FzeroTypeError, FzeroValueError


class Net(nn.Module):
    def __init__(self, width: int = 8, scaled: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, width), nn.Linear(width, 3)
        if scaled:
            self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


BATCH = (torch.ones(4, 6), torch.zeros(4, 3))
OTHERS = {"wider": {"width": 5}, "more": {"scaled": True}}
SAYS = {
    "wider": (r"a.*weight.*float32\[5, 6\].*float32\[8, 6\]", r"b.*weight.*float32\[3, 5\].*float32\[3, 8\]"),
    "more": (r"params.*scale",),
}


def made(net: nn.Module, *transforms: Any) -> tuple[Any, Any]:
    model = fz.functionalize(net)
    step = model.train_step(optim.adamw(0.1), lambda out, b: F.mse_loss(out, b[1]))
    step = fz.compose(*transforms)(step) if transforms else step
    return model, fz.compile(step, fz.make_mesh(), backend="eager")


@pytest.mark.parametrize("which", OTHERS)
def test_what_is_of_another_model_is_refused_before_a_step(which: str, tmp_path: Path) -> None:
    other, theirs = made(Net(**OTHERS[which]))  # type: ignore[arg-type]
    state = theirs.init(other.params)
    fz.checkpoint.save(tmp_path, state)
    weights = tmp_path / "model.safetensors"
    fz.checkpoint.export(tmp_path, weights)
    evaluate = fz.compile(made(Net())[0].eval_step(), fz.make_mesh(), backend="eager")
    acts: dict[str, tuple[Any, type[FzeroError]]] = {
        "restore": (lambda train: train.restore(tmp_path), CheckpointError),
        "restore, with params": (lambda train: train.restore(tmp_path, other.params), CheckpointError),
        "init": (lambda train: train.init(other.params), FzeroValueError),
        "init by a function": (lambda train: train.init(other.init), FzeroValueError),
        "load, with params": (lambda train: train.load(weights, other.params), FzeroValueError),
        "a step": (lambda train: train(state, BATCH), FzeroValueError),
        "reshard": (lambda train: fz.reshard(state, train), CheckpointError),
        "an evaluation": (lambda train: evaluate(state.params, BATCH[0]), FzeroValueError),
        "a plain call": (lambda train: made(Net())[0].apply(state.params, BATCH[0]), FzeroTypeError),
    }
    for what, (act, error) in acts.items():
        with pytest.raises(error) as caught:
            act(made(Net())[1])
        for line in SAYS[which] if what != "a plain call" else ():
            assert re.search(line, str(caught.value)) or re.search(_reversed(line), str(caught.value)), what
    assert int(theirs(state, BATCH)[0].step) == 1, "the state is unchanged"


def _reversed(line: str) -> str:
    """The same with both sides the other way round."""
    parts = line.split(".*float32")
    return ".*float32".join([parts[0], *reversed(parts[1:])])


def test_what_is_of_this_model_is_taken(tmp_path: Path) -> None:
    model, train = made(Net())
    state, _ = train(train.init(model.params), BATCH)
    fz.checkpoint.save(tmp_path, state)
    want = fz.tree.names(train.gather(state).params), fz.tree.leaves(train.gather(state).params)
    for path, params in ((tmp_path, None), (tmp_path, model.params), (tmp_path, model.init)):
        found = made(Net(), fz.shard_params())[1].restore(path, params)
        assert (fz.tree.names(found.params)) == want[0]
        assert all(map(torch.equal, fz.tree.leaves(found.params), want[1]))


def test_parameters_may_begin_in_another_dtype(tmp_path: Path) -> None:
    model, train = made(Net())
    params = fz.tree.map(lambda x: x.to(torch.bfloat16), model.params)
    state, _ = train(train.init(params), (BATCH[0].bfloat16(), BATCH[1].bfloat16()))
    fz.checkpoint.save(tmp_path, state)
    with pytest.raises(
        CheckpointError, match=r"params\.a\.weight: different dtype, the checkpoint has bfloat16\[8, 6\]"
    ):
        made(Net())[1].restore(tmp_path)
    again = made(Net())[1].restore(tmp_path, params)
    assert again.params["a"]["weight"].dtype == torch.bfloat16
