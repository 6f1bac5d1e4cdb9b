"""Names, methods and keywords that the package lacks: the error names what is there instead."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from rejections import FEATURES, Net, of_labels, own_loss, raises

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError


def test_names_that_do_not_exist() -> None:
    for module, name, words in [
        (fz, "shard_param", "did you mean shard_params"),
        (fz, "fsdp", "shard_params"),
        (fz.optim, "RMSprop", "did you mean rmsprop"),
        (fz.checkpoint, "nothing_such", "it has AsyncSave, CheckpointManager, Index, Url, check, describe, "),
    ]:
        with pytest.raises(
            AttributeError, match=f"module '{module.__name__}' has no attribute '{name}'\nFix: .*{words}"
        ):
            getattr(module, name)
    for name, words in {"LBFGS": "evaluates the loss several times", "SparseAdam": "gradients are dense"}.items():
        with pytest.raises(AttributeError, match=rf"'fzero.optim' has no attribute '{name}': .*{words}.*\nFix: "):
            getattr(fz.optim, name)
    assert not hasattr(fz, "fsdp") and fz.tree is not None


@pytest.mark.parametrize(
    ("module", "name", "here"),
    [
        (fz, "zero3", "shard_params"),
        (fz, "fsdp", "shard_params"),
        (fz, "FullyShardedDataParallel", "shard_params"),
        (fz, "zero1", "shard_opt_state"),
        (fz, "DistributedDataParallel", "data_parallel"),
        (fz, "Compile", "compile"),
        (optim, "AdamW", "adamw"),
        (optim, "clip_grad_norm_", "clip_by_global_norm"),
        (optim, "adamm", "adam, radam, nadam, adamw"),
        (fz, "save", "fz.checkpoint.save(path, state)"),
        (fz.checkpoint, "load", "train.restore(path)"),
        (fz, "jit", "fz.compile(step, mesh)"),
    ],
)
def test_names_of_other_libraries_name_what_is_here(module: Any, name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'\nFix: did you mean {re.escape(here)}$"):
        getattr(module, name)


def test_methods_of_other_libraries_name_the_call_that_is_here() -> None:
    model = fz.functionalize(Net())
    train = fz.compile(model.train_step(optim.sgd(0.1), of_labels), fz.make_mesh(), backend="eager")
    state = train.init(model.params)
    here = {"parameters": "state.params", "save": "fz.checkpoint.save", "eval": "eval_step"}
    for owner in (model, train, state):
        for name, call in here.items():
            with pytest.raises(AttributeError, match=f"'{type(owner).__name__}' object has .*'{name}'\nFix: .*{call}"):
                getattr(owner, name)
        assert not hasattr(owner, "nothing_like_it") and not hasattr(owner, "__array__")
        assert type(copy.copy(owner)) is type(owner)
    with pytest.raises(FzeroError, match=r"a model is not a function.*\nFix: model\.apply"):
        model(FEATURES)
    for given in (train.init, lambda m: fz.train_step(m, optim.sgd(0.1)), fz.eval_step):
        with pytest.raises(FzeroError, match=r"Functional.*\nFix: .*model\.(params|train_step|eval_step)"):
            given(model)
    model.__dict__.pop("_eval", None)
    model._still.__deepcopy__ = lambda memo: memo.lost  # a property that fails says why, and not that it is missing
    with pytest.raises(AttributeError, match="'lost'"):
        model._eval  # noqa: B018


KEYWORDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "another library's keyword": (
        lambda: optim.adamw(learning_rate=1.0),
        ("fzero.adamw: no argument 'learning_rate'\nFix: did you mean lr?",),
    ),
    "a plural": (
        lambda: fz.shard_params(axes="data"),
        ("no argument 'axes'\nFix: did you mean axis? It takes step, axis, where",),
    ),
    "a keyword of a transform": (lambda: fz.accumulate(steps=2), ("did you mean num_micro_batches?",)),
    "a misspelt keyword": (lambda: optim.sgd(0.1, momentun=0.9), ("did you mean momentum?",)),
    "a keyword of nobody's": (lambda: fz.remat(zzz=1), ("no argument 'zzz'\nFix: it takes step, policy",)),
    "a keyword without its name": (
        lambda: fz.tensor_parallel(fz.train_step(own_loss, optim.sgd(0.1)), {"up": 1}),  # type: ignore[call-arg]
        ("takes 1 argument by position, not 2 (Step, dict)\nFix: pass the others by name: axis=, rules=, ",),
    ),
    "no mesh": (
        lambda: fz.compile(fz.train_step(own_loss, optim.sgd(0.1))),  # type: ignore[call-arg]
        ("fzero.compile: lacks mesh\nFix: it takes step, mesh, ",),
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_that_do_not_exist(name: str) -> None:
    act, says = KEYWORDS[name]
    raises(FzeroError, act, *says)


def test_arguments_given_twice_and_swapped() -> None:
    with pytest.raises(FzeroError, match=r"adamw: lr given twice\n  lr: <generator .*> by position, and 0.1\n"):
        optim.adamw(Net().parameters(), lr=0.1)  # type: ignore[misc,arg-type]
    with pytest.raises(FzeroError, match="parameters come with train"):
        optim.adamw(Net().parameters())  # type: ignore[arg-type]
    raises(FzeroError, lambda: fz.show(3), "fzero.show: prints a program, not int\nFix: fz.show(train.program)")
