"""Callbacks, optimizers and losses of a user's own in fzero.hf.Trainer: the numbers of transformers' own Trainer, or a
refusal by name."""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fzero as fz

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fzero.hf import Trainer  # noqa: E402

Callback = transformers.TrainerCallback
Refused = (fz.errors.FzeroValueError, fz.errors.TraceError)


class Net(torch.nn.Module):
    """Its loss is a mean of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 4)
        self.drop = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor(0.1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.drop(torch.tanh(self.inner(x) + self.shift)))
        return {"loss": F.cross_entropy(y, labels), "y": y}


def rows(num: int = 16) -> list[dict[str, Any]]:
    return [{"x": [i / 8, 1.0 - i / 5, (i * i % 7) / 3], "labels": i % 3} for i in range(num)]


def made(
    cls: Any, path: Path, *callbacks: Any, model: Any = None, optimizers: Any = None, sync: Any = None, **settings: Any
) -> Any:
    """A trainer; of fzero's the classes of its callbacks are declared, if `sync` says nothing else."""
    usual = {
        "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
    }  # fmt: skip
    model = Net() if model is None else model
    given: dict[str, Any] = {}
    if issubclass(cls, Trainer):
        given = {"backend": "eager", "sync": [c for c in callbacks if isinstance(c, type)] if sync is None else sync}
    args = transformers.TrainingArguments(str(path), **(usual | settings))
    data = {"train_dataset": rows(), "eval_dataset": rows(6), "callbacks": [make() for make in callbacks]}
    optimizers = (None, None) if optimizers is None else optimizers(model)
    return cls(model, args, **data, optimizers=optimizers, **given)


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def both(path: Path, *callbacks: Any, overrides: type = object, **settings: Any) -> tuple[Any, Any]:
    """Both libraries' trainers, trained to the same losses and weights."""
    found = []
    for base in (transformers.Trainer, Trainer):
        cls = type("Own", (overrides, base), {}) if overrides is not object else base
        sync = [*callbacks, cls] if overrides is not object else None
        trainer = made(cls, path, *callbacks, sync=sync, **settings)
        trainer.train()
        found.append(trainer)
    same(*found)
    return found[0], found[1]


def same(theirs: Any, ours: Any) -> None:
    assert losses(ours) == pytest.approx(losses(theirs), abs=1e-6)
    for one, two in zip(theirs.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def refused(path: Path, text: str, *callbacks: Any, overrides: type = object, **settings: Any) -> str:
    cls = type("Own", (overrides, Trainer), {}) if overrides is not object else Trainer
    with pytest.raises(Refused, match=text) as error:
        made(cls, path, *callbacks, **settings).train()
    assert "Fix: " in str(error.value)
    return str(error.value)


def sums(model: Any) -> list[float]:
    return [p.detach().double().sum().item() for p in model.parameters()]


# --- callbacks ---


class Sums(Callback):
    """Looks at the module, each time in another way."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", sums(kwargs["model"])))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.write("begin", model)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handed("log", **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.seen.append(("epoch", [p.sum().item() for p in optimizer.param_groups[0]["params"]]))

    def write(self, what: str, model: Any) -> None:
        self.seen.append((what, sums(model)))

    def handed(self, what: str, model: Any, **kwargs: Any) -> None:
        self.write(what, model)


class Held(Callback):
    """Has the module of its own."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.net, self.seen = model, []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(sums(self.net))

    on_evaluate = on_optimizer_step


def test_callbacks_that_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Declared ones see what the library shows them, and it is said what that costs."""
    with caplog.at_level(logging.INFO, logger="fzero"):
        theirs, ours = both(
            tmp_path, Sums, Held, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, max_steps=3
        )
    assert caplog.text.count("all weights are gathered") == 1
    for one, two in zip(theirs.callback_handler.callbacks, ours.callback_handler.callbacks, strict=True):
        if isinstance(one, Sums):
            assert [what for what, _ in one.seen] == [what for what, _ in two.seen] and len(one.seen) > 9
            for (_, x), (_, y) in zip(one.seen, two.seen, strict=True):
                assert y == pytest.approx(x, abs=1e-5)
        elif isinstance(one, Held):
            assert len(one.seen) == len(two.seen) == 5
            for x, y in zip(one.seen, two.seen, strict=True):
                assert y == pytest.approx(x, abs=1e-5)


class Clamp(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.head.weight.clamp_(-0.2, 0.2)


class ClampData(Callback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for p in kwargs["model"].inner.parameters():
            p.data.mul_(0.5)


class Averaged(Callback):
    """Evaluates an average of the weights, and puts them back."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.mean = {n: 0.5 * x + 0.5 * getattr(self, "mean", {n: x})[n] for n, x in copies(model).items()}
        self.kept = copies(model)
        model.load_state_dict(self.mean)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.load_state_dict(self.kept)


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in model.state_dict().items()}


def test_callbacks_that_change_weights(tmp_path: Path) -> None:
    """They do, as there: also through `.data`, and with masters in host memory."""
    _, ours = both(tmp_path, Clamp, ClampData)
    assert ours.model.head.weight.abs().max() <= 0.2
    theirs, ours = both(tmp_path, Averaged, eval_strategy="steps", eval_steps=1)
    for one, two in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert two.get("eval_loss") == pytest.approx(one.get("eval_loss"), abs=1e-6)
    transforms = [fz.shard_params(), fz.offload("cpu"), fz.mixed_precision(compute="bf16")]
    cls = functools.partial(Trainer, transforms=transforms)
    found = []
    for callbacks in ([], [Clamp()]):
        args = made(Trainer, tmp_path).args
        trainer = cls(Net(), args, train_dataset=rows(), backend="eager", callbacks=callbacks, sync=[Clamp])
        trainer.train()
        found.append(losses(trainer))
    assert found[0][0] == found[1][0] and found[0][-1] != pytest.approx(found[1][-1], abs=1e-4)


class Freeze(Callback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.inner.requires_grad_(state.global_step == 0)


class Decay(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.0


class Anneal(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.drop.p = 0.5


class Hook(Callback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.inner.register_forward_hook(lambda module, args, out: out)


class Norms(Callback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]


class Before(Callback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = sums(model)


class Put(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach() * 0.5)


class Moments(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.state.clear()


class Clip(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = 0.1


class Within(Callback):
    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.head.bias.data.zero_()


def test_callbacks_that_are_refused(tmp_path: Path) -> None:
    """What no step can take over, of declared callbacks too."""
    refused(tmp_path, r"inner\.weight\.requires_grad: True then, False now", Freeze, max_steps=6)
    refused(tmp_path, r"group 0: weight_decay=0\.0, the step was made with 0\.1", Decay)
    refused(tmp_path, r"Anneal, in on_step_end, changes attributes.*\n  drop\.p: 0\.0 then, 0\.5 now", Anneal)
    refused(tmp_path, r"Hook, in on_train_begin, .*\n  inner\._forward_hooks: none then, <lambda> now", Hook)
    refused(tmp_path, r"Put, in on_step_end, replaces parameters.*\n  head\.weight", Put)
    refused(tmp_path, r"moments are not in torch's optimizer", Moments)
    refused(tmp_path, r"changed during training\n  args\.max_grad_norm", Clip)
    refused(tmp_path, r"uses gradients\n  .*p\.grad\.norm\(\)", Norms)
    refused(tmp_path, r"uses gradients\n  .*p\.grad\.norm\(\)", Norms, sync=[])
    refused(tmp_path, r"uses weights.*\n  inner\.weight: .*\nFix: .*not in .*on_pre_optimizer_step", Before)
    refused(tmp_path, r"uses weights.*\n  head\.bias: .*zero_.*\nFix: .*not in on_substep_end", Within,
            gradient_accumulation_steps=2)  # fmt: skip


class Aliased(Callback):
    """Reads memory that it took of the module before."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.live = model.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(self.live["head.bias"].norm().item())

    on_train_end = on_log


class Replaced(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.head.bias = torch.nn.Parameter(torch.zeros(3))


def read(*names: str, of: Any = None) -> Any:
    """A callback class that reads the weights in these events: of `model`, or of what `of()` returns."""

    def on(self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        sums(of() if of else model)

    return type("Reads", (Callback,), dict.fromkeys(names, on))


READS = {
    "arithmetic": lambda model: model.head.bias + 1,
    "data": lambda model: model.head.bias.data,
    "item": lambda model: model.head.bias[0].item(),
    "numpy": lambda model: model.head.bias.numpy(force=True),
    "list": lambda model: model.head.bias.tolist(),
    "cast": lambda model: model.head.bias.type(torch.float64),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": lambda model: copy.deepcopy(model),
    "call": lambda model: model(torch.ones(1, 3), torch.tensor([0])),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "write": lambda model: model.head.bias.data.zero_(),
    "print": lambda model: str(model.head.bias),
    "pickle": lambda model: pickle.dumps(model),
}


@pytest.mark.full
def test_what_is_not_declared_is_refused_by_name(tmp_path: Path) -> None:
    """At its line, with a way out that works: every way to values, every event, old aliases, `trainer.model`."""
    for name, touch in READS.items():
        text = refused(tmp_path, r"this code uses weights", lambda t=touch: Does(t), sync=[])
        assert __file__ in text and "sync=[...]" in text, (name, text)
    freeze = lambda model: model.inner.requires_grad_(False)  # noqa: E731
    assert "before train()" in refused(tmp_path, r"freezes or unfreezes", lambda: Does(freeze), sync=[])
    with pytest.raises(RuntimeError, match="uses weights"):  # PyTorch's error, with ours in it
        made(Trainer, tmp_path, lambda: Does(loaded), sync=[]).train()
    quiet = made(Trainer, tmp_path, lambda: Does(asks), sync=[])
    quiet.train()
    assert quiet.state.global_step == 4
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    for event in ("train_begin", "epoch_begin", "step_begin", "log", "evaluate", "save", "epoch_end"):
        event = f"on_{event}"
        refused(tmp_path, r"uses weights", read(event), sync=[Sums], **saves)
    trainer = made(Trainer, tmp_path, sync=[])
    trainer.add_callback(read("on_step_end", of=lambda: trainer.model))
    with pytest.raises(Refused, match=r"uses weights.*\n.*\nFix: Trainer\(\.\.\., sync=\[\.\.\.\]\)"):
        trainer.train()
    model = Net()
    refused(tmp_path, r"replaced in training\n  head\.bias", Replaced, sync=[], model=model)
    refused(tmp_path, r"write a list, sync=\[MyCallback\]", sync=Sums)
    refused(tmp_path, r"sync: 'Sums' is not a callback.*\n.*sync: .*Linear", sync=["Sums", torch.nn.Linear])


def test_memory_of_the_weights_that_others_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state_dict of before training is NaN while steps run, and has the trained weights afterwards, as there."""
    theirs, ours = (made(cls, tmp_path, Aliased, sync=[]) for cls in (transformers.Trainer, Trainer))
    for trainer in (theirs, ours):
        trainer.train()
    assert "other code holds memory of inner.weight, inner.bias, head.weight and 2 more" in caplog.text
    one, two = (next(c for c in t.callback_handler.callbacks if isinstance(c, Aliased)) for t in (theirs, ours))
    assert all(map(math.isnan, two.seen[:4])) and two.seen[-1] == pytest.approx(one.seen[-1], abs=1e-5)


def test_weights_that_cannot_be_taken_out(tmp_path: Path) -> None:
    """An output with its graph, or a view, still needs them. The module stays whole, and trains once they are gone."""
    for hold in (lambda net: net(torch.ones(1, 3), torch.tensor([0])), lambda net: net.head.weight[0]):
        trainer = made(Trainer, tmp_path)
        before, held = copies(trainer.model), hold(trainer.model)
        with pytest.raises(Refused, match=r"weight of the model cannot be replaced .*\n.*\nFix: delete what holds it"):
            trainer.train()
        assert all(torch.equal(x, before[n]) for n, x in trainer.model.state_dict().items())
        assert all(type(p) is torch.nn.Parameter for p in trainer.model.parameters())
        del held
        trainer.train()


class Holds(Callback):
    """Holds parameters, and what belongs to them, as trackers do; computes with them where it is declared."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.head.weight.tag = "head"
        self.held = dict(model.named_parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        same = all(p is self.held[n] for n, p in model.named_parameters())
        self.found.append((same, self.held["head.weight"].tag, sum(p.sum().item() for p in self.held.values())))


def test_trackers_that_hold_parameters(tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, Holds)
    one, two = (next(c for c in t.callback_handler.callbacks if isinstance(c, Holds)) for t in (theirs, ours))
    assert len(one.found) == 4
    for x, y in zip(one.found, two.found, strict=True):
        assert y[:2] == x[:2] == (True, "head") and y[2] == pytest.approx(x[2], abs=1e-5)


def test_the_module_needs_no_memory_during_training(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(model: Any) -> None:
        seen.append([p.is_meta for p in model.parameters()])

    trainer = made(Trainer, tmp_path, lambda: Does(look), sync=[])
    trainer.train()
    assert seen == [[True] * 4] * 4 and not any(p.is_meta for p in trainer.model.parameters())
    assert all(type(p) is torch.nn.Parameter for p in trainer.model.parameters())


class Generates(Callback):
    """Generates within an event, and saves the model there."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.eval()
        self.found.append(model.generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False).tolist())
        model.train()


@pytest.mark.parametrize("adapted", [False, True])
def test_generation_within_callbacks(tmp_path: Path, adapted: bool) -> None:
    """Of a whole model, and of one with adapters whose frozen weights the state has in bf16."""
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    found = []
    for base in (transformers.Trainer, Trainer):
        torch.manual_seed(0)
        model: Any = transformers.GPT2LMHeadModel(config)
        if adapted:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        args = made(Trainer, tmp_path, max_steps=3, bf16=adapted and base is Trainer).args
        given = {"backend": "eager", "sync": [Generates]} if base is Trainer else {}
        data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 16
        trainer = base(model, args, train_dataset=data, callbacks=[generates := Generates()], **given)
        trainer.train()
        found.append((generates.found, losses(trainer)))
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
        assert bool(frozen) == adapted
    assert len(found[0][0]) == 3 and (adapted or found[0][0] == found[1][0])
    assert found[1][1] == pytest.approx(found[0][1], abs=2e-2 if adapted else 1e-5)


def loaded(model: Any) -> None:
    with warnings.catch_warnings():  # PyTorch warns of the meta device before it copies
        warnings.simplefilter("ignore")
        model.load_state_dict(Net().state_dict())


def asks(model: Any) -> None:
    """What is known of a model without its weights."""
    assert model.head.weight.shape == (3, 4) and model.head.weight.dtype == model.head.bias.dtype
    assert model.head.weight.type() == "torch.meta.FloatTensor" and model.head.weight.is_meta
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 31 and str(model)


def test_after_training_all_may_read(tmp_path: Path) -> None:
    """In on_train_end too, which saves and uploads of the library's own callbacks are in."""
    seen: list[Any] = []
    theirs, ours = (made(cls, tmp_path, lambda: Last(seen), sync=[]) for cls in (transformers.Trainer, Trainer))
    for trainer in (theirs, ours):
        trainer.train()
        seen.append(sums(trainer.model))
    assert seen[2] == seen[3] == pytest.approx(seen[0], abs=1e-5)


class Last(Callback):
    def __init__(self, seen: list[Any]):
        self.seen = seen

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append(sums(model))


class Swaps(Callback):
    """Evaluates and saves an average within an event, by the trainer's own methods."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        kept = copies(model)
        model.load_state_dict({n: 0.5 * x for n, x in kept.items()})
        self.found.append(self.trainer.evaluate()["eval_loss"])
        self.trainer.save_model(args.output_dir)
        model.load_state_dict(kept)


def test_weights_that_are_swapped_for_an_evaluation(tmp_path: Path) -> None:
    found = []
    for base in (transformers.Trainer, Trainer):
        trainer = made(base, tmp_path / base.__module__, Swaps)
        (swaps,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Swaps))
        swaps.trainer = trainer
        trainer.train()
        file = next((tmp_path / base.__module__).glob("*.safetensors"))
        found.append((swaps.found, sums(trainer.model), safetensors_of(file)))
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, abs=1e-5)


def safetensors_of(file: Path) -> list[float]:
    from safetensors.torch import load_file

    return [x.double().sum().item() for _, x in sorted(load_file(file).items())]


def test_the_librarys_callbacks_read_no_weights() -> None:
    """But in on_train_end, where all may: those of the installed transformers, each of which was read."""
    from transformers import trainer_callback
    from transformers.integrations import integration_utils

    known = "TensorBoard Wandb Trackio Comet AzureML MLflow DagsHub Neptune CodeCarbon ClearML Flyte DVCLive SwanLab"
    known += " Kubeflow DefaultFlow Progress Printer EarlyStopping Trainer"
    found = {
        name
        for home in (integration_utils, trainer_callback)
        for name, x in vars(home).items()
        if isinstance(x, type) and issubclass(x, Callback) and name != "CallbackHandler"
    }
    assert found == {f"{name}Callback" for name in known.split()}


def test_a_model_in_shards_has_no_weights(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    args = made(Trainer, tmp_path, max_steps=1).args
    data = {"train_dataset": [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4, "backend": "eager"}
    for change, text in ((scale, "uses the weights"), (lambda model: print(model.num_parameters()), "")):
        model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
        trainer = Trainer(model, args, **data, callbacks=[Does(change)], sync=[Does])
        if not text:
            trainer.train()
            continue
        with pytest.raises(Refused, match=rf"{text} of a model of .*\n  lm_head\.weight"):
            trainer.train()


class Does(Callback):
    def __init__(self, change: Any):
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.change(model)


def scale(model: Any) -> None:
    model.lm_head.weight.data.mul_(0.5)


class Scored:
    """What a user's Trainer overrides: an evaluation that looks at the module, and is of other weights."""

    model: Any

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.scores = [*getattr(self, "scores", []), *sums(self.model)]
        self.model.head.weight.data.mul_(0.5)
        found = super().evaluate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.model.head.weight.data.mul_(2.0)
        self.scores.append(found["eval_loss"])
        return found


class Mines:
    """A data set's side: weights that are read where batches are loaded."""

    model: Any

    def _prepare_inputs(self, inputs: Any) -> Any:
        sums(self.model)
        return super()._prepare_inputs(inputs)  # pyright: ignore[reportAttributeAccessIssue]


def test_own_evaluation_sees_the_weights(tmp_path: Path) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 2}
    theirs, ours = both(tmp_path, overrides=Scored, **often)
    assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)
    refused(tmp_path, r"uses weights.*\n.*\nFix: .*your Trainer class", overrides=Scored, sync=[], **often)
    refused(tmp_path, r"uses weights.*\n.*sums\(self\.model\)|p\.detach", overrides=Mines)
    held: list[Any] = []

    def metrics(predicted: Any) -> dict[str, float]:
        return {"sum": sum(sums(held[-1].model))}

    for base, sync in ((transformers.Trainer, []), (Trainer, [metrics]), (Trainer, [])):
        held.append(made(base, tmp_path, sync=sync, **often))
        held[-1].compute_metrics = metrics
        if not sync and base is Trainer:
            with pytest.raises(Refused, match=r"uses weights.*\n.*\nFix: .*metrics function"):
                held[-1].train()
        else:
            held[-1].train()
    one, two = ([row["eval_sum"] for row in t.state.log_history if "eval_sum" in row] for t in held[:2])
    assert len(one) == 2 and two == pytest.approx(one, abs=1e-5)


CHANGES = (Clamp, ClampData)


def on_ranks(path: Path) -> dict[str, Any]:
    """On each of two ranks: callbacks that change weights, and look at them on one alone; then one that changes them
    there alone."""
    first = os.environ["RANK"] == "0"
    looking = [Sums] if first else []
    trainer = made(Trainer, path, *CHANGES, *looking, per_device_train_batch_size=2)
    trainer.train()
    found: dict[str, Any] = {"losses": losses(trainer)}
    try:
        made(Trainer, path, *([Clamp] if first else [])).train()
    except fz.errors.DivergenceError as error:
        found["refused"] = str(error)
    return found


# --- optimizers ---


def grouped(model: Any) -> Any:
    groups = [{"params": list(model.inner.parameters())}, {"params": list(model.head.parameters())}]
    made = torch.optim.AdamW(groups, lr=0.05)
    return made, torch.optim.lr_scheduler.LambdaLR(made, [lambda n: 1.0, lambda n: 0.5**n])


def cycled(model: Any, **settings: Any) -> Any:
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=8, **settings)


def foreign(model: Any) -> Any:
    other = torch.nn.Parameter(torch.zeros(2))
    return torch.optim.AdamW([{"params": [*model.parameters(), other]}], lr=0.05), None


def test_groups(tmp_path: Path) -> None:
    """Each has a rate of its own, also where all begin alike; their other values stay."""
    both(tmp_path, optimizers=grouped)
    both(tmp_path, optimizers=functools.partial(cycled, cycle_momentum=False))
    assert "cycle_momentum=False" in refused(tmp_path, r"group 0: betas=", optimizers=cycled)
    refused(tmp_path, r"group 0: 1 of its parameters do not belong to the model", optimizers=foreign)


def test_trained_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer's state lives on, weights that were changed in between or not, and are seen through `.data`."""
    theirs, ours = made(transformers.Trainer, tmp_path), made(Trainer, tmp_path)
    for change in (False, True):
        for trainer in (theirs, ours):
            if change:
                trainer.model.head.weight.data.mul_(0.5)
                trainer.found = trainer.evaluate()["eval_loss"]
            trainer.train()
        same(theirs, ours)
    assert ours.found == pytest.approx(theirs.found, abs=1e-6)
    assert "other code holds" not in caplog.text
    for trainer in (theirs, ours):  # broken off, and with new moments
        trainer.add_callback(breaks := At(lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.found = sums(trainer.model), trainer.evaluate()["eval_loss"]
        trainer.remove_callback(breaks)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
    same(theirs, ours)
    for one, two in zip(theirs.found, ours.found, strict=True):  # weights of the step at which it was broken off
        assert two == pytest.approx(one, abs=1e-5)
    ours.model.inner.requires_grad_(False)
    with pytest.raises(Refused, match=r"inner\.weight: requires_grad=False.*\n.*\nFix: .*trainer\.optimizer = None"):
        ours.train()
    ours.optimizer = None
    ours.train()
    used = torch.optim.SGD(ours.model.parameters(), 0.1, momentum=0.9)
    ours.model(torch.ones(2, 3), torch.tensor([0, 1]))["loss"].backward()
    used.step()
    with pytest.raises(Refused, match="it already has a state"):
        made(Trainer, tmp_path, model=ours.model, optimizers=lambda model: (used, None)).train()


# --- losses ---


class Own:
    """A loss of the user's own, by all that it may reach."""

    args: Any
    model: Any
    log: Any
    chosen: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor([1.0, 2.0, 3.0])
        self.criterion = torch.nn.CrossEntropyLoss(weight=self.class_weights / self.class_weights.sum())
        self.array = np.array([1.0, 2.0, 3.0], np.float32)
        self.scale = {"loss": 1.0, "other": [0.5]}
        self.args.my_scale = 1.0
        self.hist, self.count = [], 0
        torch.manual_seed(1)
        self.teacher = Net().requires_grad_(False).eval()
        torch.nn.init.normal_(self.teacher.head.weight)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        out, labels = model(**inputs), inputs["labels"]
        loss = self.chosen(model, inputs, out["y"], labels)
        return (loss, out) if return_outputs else loss

    def loss_weights(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return F.cross_entropy(y, labels, weight=self.class_weights) + self.class_weights[1] * y.square().mean()

    def loss_criterion(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return self.criterion(y, labels)

    def loss_teacher(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        with torch.inference_mode():
            wanted = self.teacher(**inputs)["y"] * self.class_weights.sqrt()
        wanted = wanted.clone()
        return F.kl_div(y.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")

    def loss_again(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return self.model(**inputs)["loss"] + model.forward(**inputs)["loss"]

    def loss_values(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        scale = self.scale["loss"] * self.args.my_scale * self.scale["other"][0]
        return F.cross_entropy(y, labels) * scale

    def loss_drawn(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return F.cross_entropy(y, labels, weight=torch.rand_like(self.class_weights))

    def loss_array(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return F.cross_entropy(y, labels, weight=torch.tensor(self.array))

    def loss_part(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return model.head(torch.tanh(model.inner(inputs["x"]))).square().mean()

    def loss_decay(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        return F.cross_entropy(y, labels) + sum(p.square().sum() for p in model.parameters())

    def loss_kept(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        loss = F.cross_entropy(y, labels)
        self.hist.append(loss.detach())
        return loss

    def loss_counted(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        self.count += 1
        return F.cross_entropy(y, labels)

    def loss_written(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        self.class_weights.mul_(0.5)
        return F.cross_entropy(y, labels, weight=self.class_weights)

    def loss_mixed(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        self.class_weights.lerp_(y.detach().mean(0), 0.5)
        return F.cross_entropy(y, labels, weight=self.class_weights)

    def loss_logged(self, model: Any, inputs: Any, y: Any, labels: Any) -> Any:
        self.log({"y": y.mean()})
        return F.cross_entropy(y, labels)


class At(Callback):
    """Does something behind the second step."""

    def __init__(self, do: Any):
        self.do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 2:
            self.do()


def own(kind: str) -> type:
    return type("Of", (Own,), {"chosen": getattr(Own, f"loss_{kind}")})


def test_losses_that_reach_out(tmp_path: Path) -> None:
    """Class weights, criteria, a teacher, `self.model`."""
    for kind in ("weights", "criterion", "teacher", "again", "values"):
        theirs, ours = both(tmp_path, overrides=own(kind), max_steps=2)
        assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-6)
    cls = {base: type("Of", (own("weights"), base), {}) for base in (transformers.Trainer, Trainer)}
    theirs, ours = (made(c, tmp_path, max_steps=2, bf16=True) for c in cls.values())
    for trainer in (theirs, ours):
        trainer.train()  # what the loss gets of the model is in fp32, as there
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-3)


class Scales:
    """A loss times what may change between evaluations."""

    alpha, weights = 1.0, torch.ones(3)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        out = model(**inputs)
        loss = F.cross_entropy(out["y"], inputs["labels"], weight=self.weights) * self.alpha
        return (loss, out) if return_outputs else loss


def test_evaluations_are_of_the_trainer_as_it_is(tmp_path: Path) -> None:
    found = []
    for base in (transformers.Trainer, Trainer):
        trainer = made(type("Of", (Scales, base), {}), tmp_path, max_steps=1)
        trainer.train()
        trainer.args.gradient_accumulation_steps = 2  # of the next training
        for change in ({}, {"alpha": 2.0}, {"weights": torch.tensor([1.0, 2.0, 3.0])}, {"alpha": 1.0}):
            vars(trainer).update(change)
            found.append(trainer.evaluate()["eval_loss"])
    assert found[4:] == pytest.approx(found[:4], abs=1e-6) and len(set(found[:4])) == 4


def test_losses_that_are_refused(tmp_path: Path) -> None:
    for kind, text in {
        "part": r"reads inner\.weight of the module itself\n.*return model\.head",
        "decay": r"reads inner\.weight of the module itself\n.*p\.square\(\)",
        "kept": r"changes values.*\n  hist: a list of 0 before, a list of 1 now",
        "counted": r"changes values.*\n  count: 0 before, 1 now",
        "written": r"writes to a tensor .*float32\[3\]\n.*mul_",
        "mixed": r"writes to a tensor .*float32\[3\]\n.*lerp_",
        "drawn": r"draws random numbers .*rand_like",
        "logged": r"compute_loss logs",
    }.items():
        refused(tmp_path, text, overrides=own(kind))


def test_values_that_change_are_refused(tmp_path: Path) -> None:
    changes: dict[str, tuple[str, Any]] = {
        "weights": (r"self\.class_weights: float32\[3\]", lambda t: t.class_weights.data.mul_(2.0)),
        "criterion": (r"criterion", lambda t: setattr(t, "criterion", torch.nn.CrossEntropyLoss())),
        "teacher": (r"self\.teacher\.head\.bias", lambda t: t.teacher.head.bias.data.add_(1.0)),
        "array": (r"array", lambda t: t.array.fill(1.0)),
        "values": (r"my_scale: 1\.0 before, 2\.0 now", lambda t: setattr(t.args, "my_scale", 2.0)),
        "values ": (r"scale\['loss'\]: 1\.0 before, 0\.0 now", lambda t: t.scale.update(loss=0.0)),
        "values  ": (r"scale\['other'\]\[0\]: 0\.5 before, 1\.5 now", lambda t: t.scale["other"].__setitem__(0, 1.5)),
    }
    for kind, (text, change) in changes.items():
        cls = type("Changed", (own(kind.strip()), Trainer), {})
        trainer = made(cls, tmp_path)
        trainer.add_callback(At(functools.partial(change, trainer)))
        with pytest.raises(Refused, match=text):
            trainer.train()
