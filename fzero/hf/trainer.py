"""Replaces the inner step of transformers' Trainer: forward, backward and update of all micro-batches are one compiled
step.

The loop, callbacks, logging, data, schedules and arguments are transformers' own code. The following is replaced:
the step is made where transformers prepares a model, and runs at the last micro-batch of an update; evaluation happens
where transformers predicts; states are saved and restored as checkpoints of fzero.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`
from transformers.trainer import TRAINING_ARGS_NAME  # pyright: ignore[reportMissingImports]
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # pyright: ignore[reportMissingImports]

from fzero import checkpoint, random, tree
from fzero._utils.arguments import python_numbers, shown
from fzero.comm.all_ranks import together, world
from fzero.errors import CheckpointError, FzeroValueError, TraceError
from fzero.hf import (
    data_parallel_ranks,
    padding,
    pretrained_saving,
    step_recipe,
    torch_optimizers,
    traced_loss,
    trainer_options,
)
from fzero.hf.batch_signatures import Kind, Kinds, check_constants, differences, kind_of, split, tensors_of
from fzero.hf.data_parallel_ranks import Exchange
from fzero.hf.evaluation_step import Evaluation
from fzero.hf.gathered_module import whole
from fzero.hf.loss_guard import LossInputs
from fzero.hf.models import Pretrained
from fzero.hf.resume import newest_finished, unmark
from fzero.hf.weight_sync import Sync
from fzero.mesh import Mesh, make_mesh
from fzero.modules.functionalize import Functional, functionalize
from fzero.runtime.compile import compile
from fzero.runtime.compiled_step import CompiledStep
from fzero.state.overwrite import overwrite
from fzero.step import State, train_step
from fzero.trace.guards.value_keys import exact
from fzero.transforms.precision import mixed_precision
from fzero.transforms.transform import Transform
from fzero.transforms.zero import data_parallel

logger = logging.getLogger("fzero")
Base: Any = transformers.Trainer
_EVALUATION = 1 << 40
"""Folded into the key of an evaluation. No training step folds in a number this large, so their random numbers
differ."""
STATE = "fzero"
"""The directory of the sharded state in a checkpoint directory of transformers."""


class Trainer(Base):
    """A drop-in replacement for transformers' Trainer, with the same arguments, callbacks, logging, evaluation and
    schedules, around one compiled step of all micro-batches.

    Its results equal those of transformers with exact averages: a loss is the mean over all targets of a step,
    however they are padded, split into micro-batches and distributed over ranks. Ragged batches with an attention mask
    are padded to at most four shapes, each of which is compiled (`num_programs`). The first padded batch is evaluated
    with and without padding, and it is an error if padding changes the loss or its gradients. Batches without an
    attention mask keep their shapes, of which there may be at most four. The model's loss is traced, and so is an
    overridden `compute_loss` or a `compute_loss_func`.

    Args:
        model: a module, or what `fz.hf.from_pretrained` returned, whose weights are read directly into shards.
        args: TrainingArguments of transformers; with `deepspeed=` those of `fzero.hf`.
        more, settings: all other arguments of transformers' Trainer.
        transforms: by default `[fz.shard_params()]`. Precision, gradient accumulation and activation checkpointing
            are set by the arguments.
        sync: code that reads or writes weights during training: callbacks or their classes, your own subclass of
            Trainer (for its `evaluate`, `log` and other methods), metrics functions.
        mesh: by default, all processes along the axis `data`.
        tensor_parallel: the number of ranks that compute with the same shard of the data, along the axis `model`. It
            makes the mesh and `fz.tensor_parallel(rules=fz.hf.tensor_rules(model))`, if they are not given. Samples,
            tokens and steps are counted once per shard of the data.
        loss: "chunked" computes the cross entropies of a loss by `fz.chunked_cross_entropy`, in training and
            evaluation, so that a step never holds all logits (docs/migrate/huggingface.md). By default they are
            computed from all logits. An evaluation that returns logits still holds them.
        lengths: the lengths to which ragged batches of any model are padded, as a collator would, even if that
            changes the results. By default, powers of two, if padding changes nothing.
        save_weights: whether each checkpoint also has the configuration and the weights (`model.safetensors`, or for
            adapters `adapter_model.safetensors`), so that `from_pretrained("run/checkpoint-500")` reads it. With False
            it has the sharded state only: it is smaller, and saved faster.
        backend, memory_budget, host_budget, disk_budget: of `fz.compile`.

    Attributes:
        compiled: the step, a `CompiledStep`, once training has begun.
        train_state: the state of the step. The module has the trained weights after `train()`, and while code in
            `sync` runs.

    Raises:
        FzeroValueError: lists everything that is not supported: an overridden `training_step`, an optimizer of
            another class, options such as `fsdp`. During training: code that is not in `sync` reads or writes weights;
            entries of batches change their shape and cannot be padded; padding changes the loss or its gradients.
        CheckpointError: `train(resume_from_checkpoint=)` of a directory that has no state of fzero.

    Example:
        >>> import tempfile, transformers
        >>> from fzero.hf import Trainer
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> args = transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none",
        ...     disable_tqdm=True, save_strategy="no", logging_strategy="no")
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> trainer = Trainer(model, args, train_dataset=rows, backend="eager")
        >>> trainer.train().global_step, trainer.num_programs
        {'train_runtime': ...}
        (2, 1)
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        transforms: Sequence[Transform] | None = None,
        sync: Sequence[Any] = (),
        mesh: Mesh | None = None,
        tensor_parallel: int | None = None,
        loss: Literal["chunked"] | None = None,
        lengths: Sequence[int] | None = None,
        save_weights: bool = True,
        backend: str = "inductor",
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        **settings: Any,
    ):
        args = trainer_options.TrainingArguments("tmp_trainer") if args is None else args
        optimizer = settings.get("optimizers", (None, None))[0]
        pair = settings.get("optimizer_cls_and_kwargs")
        tensor_parallel, lengths = python_numbers((tensor_parallel, lengths))
        wrong = data_parallel_ranks.problems(tensor_parallel, mesh, transforms, args)
        if loss not in (None, "chunked"):
            wrong.append(f"loss={shown(loss)}: must be 'chunked' or None; a loss function is compute_loss_func=")
        self._tensor = data_parallel_ranks.tensor_axis(None if wrong else tensor_parallel, mesh, transforms)
        trainer_options.check(self, model, args, optimizer, pair, transforms, Trainer, sync, wrong)
        self._transforms, self._given_mesh, self.lengths = transforms, mesh, lengths
        self._save_weights, self._chunked = save_weights, loss is not None
        budgets = {"memory_budget": memory_budget, "host_budget": host_budget, "disk_budget": disk_budget}
        self._compiling = {"backend": backend, **budgets}
        self._pretrained = model if isinstance(model, Pretrained) else None
        self.functional: Functional | None = None
        self.compiled: CompiledStep | None = None
        self.train_state: State | None = None
        self._tracing = False
        self._optimizer_was: Any = None
        self._evaluated: tuple[bool, Any] | None = None  # during an evaluation, the weights that it uses
        self._evaluations: dict[Any, Evaluation] = {}
        self._num_predictions = 0
        self._programs: set[Any] = set()
        super().__init__(model.module if self._pretrained is not None else model, args, *more, **settings)
        self._sync = Sync(self, Trainer, sync)
        self._more = data_parallel_ranks.missing(self._tensor, self.model)
        for text in trainer_options.notes(args, save_weights) if self.is_world_process_zero() else ():
            logger.warning("fzero.hf.Trainer: %s", text)

    @property
    def num_programs(self) -> int:
        """The number of compiled training programs: one for each shape that batches are padded to."""
        return len(self._programs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = newest_finished(resume_from_checkpoint, str(self.args.output_dir))
        try:
            return super().train(resume_from_checkpoint, *args, **settings)
        except BaseException:
            self._sync.broken_off()
            raise

    # --- what transformers would do to the module ---

    def _build_accelerator_args(self, **settings: Any) -> dict[str, Any]:
        found = super()._build_accelerator_args(**settings)
        return {k: x for k, x in found.items() if k != "dynamo_plugin"} | {"mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._tensor.size > 1:
            data_parallel_ranks.count(self.accelerator, self._data_parts)
            gather = self.accelerator.gather_for_metrics
            self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leaves the module where it is, because the step computes with its own shards of the parameters."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not self.accelerator._models:  # otherwise transformers would prepare the module for an evaluation
            self.accelerator._models.append(model)
        return model

    # --- the step ---

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Makes the step, its state, and everything else for a training, where transformers would prepare the model."""
        if self.train_state is not None and resume_from_checkpoint is None:
            self._sync.refresh()  # after a training that was interrupted
        module = self.model.train()
        carried = self.train_state if self.optimizer is not None and self.optimizer is self._optimizer_was else None
        model = self.functional = self._functional()
        found = step_recipe.of(self, model, max_steps, self._transforms, self._more)
        if found.report and self.is_world_process_zero():
            print(found.report, file=sys.stderr, flush=True)
        self._held = LossInputs(self, Trainer)
        self._constants: dict[str, Any] = {}
        loss = partial(traced_loss.loss, self._held, self._held.visible, self._constants)
        step = train_step(
            model.calling(loss, train=True), found.optimizer, trainable=model.trainable, mutable=model.mutable
        )
        self.compiled = compile(found.apply(step), self._mesh(), **self._compiling)
        self._evaluations.clear()
        self.train_state = self._first_state(resume_from_checkpoint, carried)
        self._rates, self._optimizer_was = (
            (torch_optimizers.rates(self.train_state.opt_state), found.groups),
            self.optimizer,
        )
        self._values = found.values
        self._parts = []
        self._last_left: int | None = None  # the step at which an epoch had micro-batches left over
        self._kinds = Kinds(Exchange(self))
        self._paddings: dict[Kind, tuple[traced_loss.Losses, padding.Padding]] = {}
        self._programs = set()
        self._skips = SimpleNamespace(step_was_skipped=False)
        self.accelerator._optimizers.append(self._skips)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.model_wrapped = module
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._sync.begin(fresh=resume_from_checkpoint is None)
        return module, train_dataloader

    def _functional(self) -> Functional:
        return self._pretrained or functionalize(self.model)

    def _mesh(self) -> Mesh:
        """Returns the mesh, which is made when it is first needed, and must have all processes."""
        if self._given_mesh is None:
            axis, size, _ = self._tensor
            axes = {"data": self.args.world_size // size, axis: size} if size > 1 else {}
            self._given_mesh = make_mesh(device=self.args.device.type, **axes)
        if self._given_mesh.size != self.args.world_size:
            what = f"TrainingArguments sees {self.args.world_size} processes, the mesh has {self._given_mesh.size}"
            fix = "without GPUs pass TrainingArguments(use_cpu=True); start all with torchrun"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        return self._given_mesh

    # --- the data shards ---

    def _data_parts(self) -> data_parallel_ranks.DataParts:
        return data_parallel_ranks.of(self._mesh(), self._tensor.name)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def store_flos(self) -> None:
        if self._tensor.size > 1 and self.args.process_index not in self._data_parts().firsts:
            self.current_flos *= 0  # keeps the type that the other ranks send
        super().store_flos()

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Loads the random state of the first rank of a data shard on all its ranks, which must draw the same random
        numbers."""
        args, parts = self.args, self._data_parts() if self._tensor.size > 1 else None
        if parts is not None:
            self.args = data_parallel_ranks.OtherArguments(args, process_index=parts.firsts[parts.index])
        try:
            super()._load_rng_state(checkpoint)
        finally:
            self.args = args

    def _first_state(self, resumed: Any, carried: State | None) -> State:
        """Returns the state that a training starts with.

        It is restored from the checkpoint to resume from; or it is `carried`, the state of the training before, if
        the optimizer is the same; or it is a new state, with the weights of the module or directory, or with those
        trained before.
        """
        assert self.compiled is not None and self.functional is not None
        key = random.key(self.args.seed)
        if resumed is not None:
            return self.compiled.restore(os.path.join(resumed, STATE), self.functional.params)
        if carried is not None:  # the optimizer was kept, so its state is kept as well
            self._sync.check_trained()
            if not self._sync.same():
                overwrite(carried, self.functional.named_params, self._mesh())
            return carried
        if self._pretrained is None or self._pretrained.directory is None:
            state = self.compiled.init(self.functional.params, key)
        else:
            state = self.compiled.load(self._pretrained.directory, key=key)
        if self._pretrained is not None and self.train_state is not None:  # no module holds the trained weights
            names, values = tree.names(self.train_state.params), tree.leaves(self.train_state.params)
            for name, x in zip(names, values, strict=True):
                overwrite(state, {name: whole(x, self._mesh())}, self._mesh())
        return state

    def get_batch_samples(self, *args: Any) -> Any:
        """Returns the micro-batches of an update, and drops those that an epoch of unknown length has left over."""
        if self._parts:
            num, parts = len(self._parts), self.args.gradient_accumulation_steps
            if self.state.global_step == self._last_left:
                what = f"an epoch of {num} micro-batches makes no step of {parts}"
                fix = "more rows, smaller batches, or fewer gradient_accumulation_steps"
                raise FzeroValueError("hf.Trainer", what, fix=fix)
            if self._last_left is None:
                text = "%d micro-batches at an epoch's end make no step of %d; transformers adds theirs to the next"
                logger.warning("fzero.hf.Trainer: " + text, num, parts)
            self._parts, self._last_left = [], self.state.global_step
        return super().get_batch_samples(*args)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collects a micro-batch, and runs the step with the last one of an update."""
        self._parts.append(self._prepare_inputs(inputs))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._parts = self._parts, []
        assert self.compiled is not None and self.train_state is not None
        batch = self._batch(parts, num_items_in_batch)
        self._sync.stepping()
        self._held.check()
        self._held.look()
        if self.optimizer is not self._optimizer_was:
            what, fix = "self.optimizer is not the optimizer that the step was made with", "give another before train()"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        torch_optimizers.check(self._values, self.optimizer)
        torch_optimizers.write(*self._rates, self.optimizer)
        self.train_state, self._metrics = self.compiled(self.train_state, batch)
        self._skips.step_was_skipped = bool(self._metrics.get("skipped", False))
        return self._metrics["loss"].detach().to(self.args.device, torch.float32)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._metrics["grad_norm"]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._metrics["grad_norm"]

    def _batch(self, parts: list[Any], items: Any) -> dict[str, Any]:
        """Returns the batch of a step: for each kind of its micro-batches (`batch_signatures.py`) one micro-batch per
        slot, all of one shape.

        Slots whose micro-batch is of another kind, or is missing, hold copies with weight 0.
        """
        entries, constants = zip(*map(split, parts), strict=True)
        if not self._paddings:
            self._constants.update(constants[0])
        check_constants(self._constants, constants)
        kinds, device = self._kinds.of_step(entries), self.args.device
        missing = self.args.gradient_accumulation_steps - len(parts)
        made, shapes, reads = [], [], set()
        for kind in kinds:
            stand_in = self._kinds.stand_in(kind, entries, device)
            if kind not in self._paddings:
                self._paddings[kind] = self._padding_of(kind, stand_in, items)
            losses, pad = self._paddings[kind]
            on = [kind_of(x) == kind for x in entries]
            slots = [x if is_own else stand_in for x, is_own in zip(entries, on, strict=True)]
            padded, shape = pad([tensors_of(x) for x in slots], self._comparing(kind, losses))
            padded += [padded[i % len(padded)] for i in range(missing)]
            inputs = {n: None if x is None else torch.cat([part[n] for part in padded]) for n, x in stand_in.items()}
            counts = torch.tensor([*map(float, on), *[0.0] * missing], device=device)
            made.append({"inputs": inputs, "on": counts.repeat_interleave(shape[""])})
            if losses.reads:
                made[-1]["num_items"] = torch.as_tensor(items, device=device).expand(shape[""] * len(padded)).clone()
            shapes.append(shape)
            reads.add(losses.reads)
        if len(kinds) > 1:
            self._check_kinds(kinds, entries, shapes, reads)
        self._programs.add(tuple((kind, *shape.items()) for kind, shape in zip(kinds, shapes, strict=True)))
        return {"kinds": made}

    def _padding_of(self, kind: Kind, entries: Any, items: Any) -> tuple[traced_loss.Losses, padding.Padding]:
        """Returns what is known about the loss of batches with these entries, and the padding for them."""
        assert self.functional is not None
        losses = traced_loss.probe(self._held, self.functional, entries, self._constants, items is not None)
        found = padding.of(self, self.functional, "training", losses, self._train_batch_size)
        if not self._paddings:
            found.check_rows(self, tensors_of(entries), self._comparing(kind, losses))
            if self.is_world_process_zero() and (text := traced_loss.other_scale(self, losses, items is not None)):
                logger.warning("fzero.hf.Trainer: %s", text)
        return losses, found

    def _comparing(self, kind: Kind, losses: traced_loss.Losses) -> padding.Compare:
        """Returns a function that compares the losses of a batch and the same batch padded, with the current
        weights."""

        def compare(one: padding.Tensors, two: padding.Tensors) -> tuple[bool, str]:
            assert self.train_state is not None
            evaluation = self._evaluation(
                traced_loss.Kind(losing=True, loss_only=True, ignored=()), self._constants, True
            )
            key = random.key(self.args.seed, self._mesh().device)
            return evaluation.compared(self.train_state.params, kind, losses.reads, key, one, two)

        return compare

    def _check_kinds(self, kinds: list[Kind], entries: Any, shapes: list[Any], reads: set[bool]) -> None:
        """Raises an error if micro-batches with different entries cannot be computed in one step; otherwise warns of
        the cost."""
        assert self.functional is not None
        what, problems = "micro-batches of one step have different entries", differences(kinds, entries)
        fix = "have the collator give every batch the same entries, such as a mask of ones"
        if self.functional.mutable is not None:
            why = "the model's forward overwrites buffers, and would do so for each kind of entries"
            raise FzeroValueError("hf.Trainer", f"{what}: {why}", problems, fix)
        if len(reads) > 1:
            why = "only some of their losses are divided by num_items_in_batch"
            raise FzeroValueError("hf.Trainer", f"{what}, and {why}", problems, fix)
        if len({shape[""] for shape in shapes}) > 1:
            sizes = ", ".join(str(shape[""]) for shape in shapes)
            raise FzeroValueError("hf.Trainer", f"{what}, and different numbers of rows ({sizes})", problems, fix)
        if not any(len(known) > 1 for known in self._programs) and self.is_world_process_zero():
            text = "fzero.hf.Trainer: %s (%s): such a step computes each micro-batch once per kind of entries, %d times"
            logger.warning(text, what, "; ".join(problems), len(kinds))

    def log(self, *args: Any, **settings: Any) -> None:
        if self._tracing:
            what = "compute_loss logs: it is traced once, and would not log in each step"
            fix = "log in a callback; what is logged of a loss goes through compute_metrics"
            raise TraceError("hf.Trainer", what, fix=fix)
        super().log(*args, **settings)

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        self._evaluated, self._num_predictions = self._weights(), 0  # each evaluation draws the same random numbers
        try:
            return super().evaluation_loop(*args, **settings)
        finally:
            self._evaluated = None

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Returns the loss, outputs and labels of a batch, computed from the sharded state."""
        inputs = self._prepare_inputs(inputs)
        config = getattr(self.model, "config", None)
        if ignore_keys is None:
            none = [] if config is None else ["past_key_values"]
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", none))
        given = inputs.get("return_loss")
        labelled = bool(self.label_names) and all(inputs.get(n) is not None for n in self.label_names)
        losing = labelled or (not self.label_names and bool(self.can_return_loss if given is None else given))
        labels = tuple(inputs.get(n) for n in self.label_names) if losing else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        items = self._get_num_items_in_batch([inputs], self.args.device) if losing else None
        kind = traced_loss.Kind(losing, prediction_loss_only, tuple(ignore_keys))
        ours, params = self._evaluated or self._weights()
        entries, constants = split(inputs)
        with self._sync.paused():
            loss, outputs = self._evaluation(kind, constants, ours)(params, entries, items, self._next_key())
        if prediction_loss_only:
            return loss, None, None
        return loss, outputs[0] if len(outputs) == 1 else outputs, labels

    def _next_key(self) -> torch.Tensor:
        """Returns the key of the next batch of an evaluation, for this rank's shard of the global batch."""
        key = random.fold_in(random.key(self.args.seed, self._mesh().device), _EVALUATION)
        self._num_predictions += 1
        return random.with_part(random.fold_in(key, self._num_predictions), self.accelerator.process_index)

    def _evaluation(self, kind: traced_loss.Kind, constants: dict[str, Any], ours: bool) -> Evaluation:
        """Returns the evaluation of a kind, for batches with these constants. `ours`: whether it uses the trained
        state."""
        known = kind, ours, frozenset((n, exact(x)) for n, x in constants.items())
        if known not in self._evaluations or self._evaluations[known].held.changed():
            assert self.functional is not None
            if ours:
                assert self.compiled is not None
                transforms = self.compiled.resolved.transforms
            else:
                transforms = [data_parallel(axis=axis) for axis in self._mesh().axes]  # each rank has all weights
                transforms += [mixed_precision(compute=x) for x in ("bf16", "fp16") if getattr(self.args, x)]
            held = LossInputs(self, Trainer)
            self._evaluations[known] = Evaluation(
                held, self.functional, kind, constants, transforms, self._mesh(), self._compiling
            )
        return self._evaluations[known]

    def _weights(self) -> tuple[bool, Any]:
        """Returns the parameters to evaluate, and whether they are those of the state."""
        self._sync.take()
        with self._sync.paused():
            current = self._current()
        if current:
            assert self.train_state is not None
            return True, self.train_state.params
        if self.functional is None:
            self.functional = self._functional()
        if any(x.is_meta for x in tree.leaves(self.functional.params)):
            what = "a model of fz.hf.from_pretrained has no weights before train() has read them"
            fix = "eval_on_start=True evaluates before the first step; or give the module itself"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        return False, tree.map(lambda x: x.to(self._mesh().device), self.functional.params)

    # --- the module, and checkpoints ---

    def _current(self) -> bool:
        """Whether the state has the module's weights: the module is being trained, or has not been changed since it
        was."""
        return self.train_state is not None and (self.is_in_train or self._sync.same())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes files that `from_pretrained` reads and, in a checkpoint directory of transformers, also the sharded
        state."""
        output_dir = str(self.args.output_dir if output_dir is None else output_dir)
        self._sync.take()
        inside = os.path.basename(output_dir).startswith(f"{PREFIX_CHECKPOINT_DIR}-")
        if _internal_call and inside and not self.args.save_only_model:
            if self.args.should_save:
                unmark(output_dir)
            checkpoint.save(os.path.join(output_dir, STATE), self.train_state, keep=1)
            if not self._saves_weights():
                if self.args.should_save and self.processing_class is not None:
                    self.processing_class.save_pretrained(output_dir)
                return
        if self._pretrained is not None and self.train_state is not None:
            tokenizer = self.processing_class
            tokenizer = getattr(self.data_collator, "tokenizer", None) if tokenizer is None else tokenizer
            with self._sync.paused():
                pretrained_saving.replace_pretrained(output_dir, self._pretrained, self.train_state, tokenizer)
            if self.args.should_save:
                torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        with self._sync.paused():
            if self.is_in_train:
                self._sync.refresh()
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # the optimizer's state is saved with the parameters
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, "scheduler.pt")
        if os.path.isfile(path):
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _saves_weights(self) -> bool:
        """Whether checkpoints also have files of weights. Warns once if the model's weights cannot be written."""
        with self._sync.paused():
            why = pretrained_saving.problem(self._pretrained or self.model) if self._save_weights else ""
        if why:
            self._save_weights = False
            if self.is_world_process_zero():
                text = "fzero.hf.Trainer: checkpoints have the state only, no files for from_pretrained: %s"
                logger.warning(text, why)
        return self._save_weights

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # transformers writes trainer_state.json next, which marks the checkpoint as finished (resume.py), so all ranks
        # must have written their files by now.
        together(world(), "hf.Trainer", f"cannot save to {output_dir}", lambda: None)

    def _save_scaler(self, output_dir: str) -> None:
        """Does nothing, because the loss scale is part of the state."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = os.path.join(resume_from_checkpoint, STATE)
        if checkpoint.find(path) is None:
            why = "is not complete" if os.path.isdir(path) else "is not there"
            what = f"{resume_from_checkpoint} has no state of fzero: {STATE}/ {why}"
            fix = "begin with its weights instead: from_pretrained(dir)"
            raise CheckpointError("hf.Trainer", what, fix=fix)

    def _load_best_model(self) -> None:
        """Restores the best checkpoint, and copies its weights to the module."""
        best = self.state.best_model_checkpoint
        if self.args.save_only_model:
            super()._load_best_model()
            return
        assert self.compiled is not None and self.functional is not None
        self.train_state = self.compiled.restore(os.path.join(best, STATE), self.functional.params)
        self._sync.behind()
        self._sync.refresh()

    def _finalize_training(self, *args: Any) -> Any:
        self._sync.end()
        logger.info("fzero.hf.Trainer: %d programs of training", self.num_programs)
        return super()._finalize_training(*args)
