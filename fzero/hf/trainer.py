"""Replaces the inner step of transformers' Trainer: forward, backward and update of all micro-batches are one compiled
step.

The loop, callbacks, logging, data, schedules and arguments are transformers' own code. The following is replaced:
the step is made where transformers prepares a model (`training_step.py`), and runs at the last micro-batch of an
update (`micro_batches.py`); evaluation happens where transformers predicts (`evaluator.py`); states are saved and
restored as checkpoints of fzero (`trainer_checkpoint.py`). The class below overrides methods of transformers,
which call these modules.

`weight_sync.py` also replaces four methods on instances: `call_event` of the trainer's callback handler, and
`_maybe_log_save_evaluate`, `_evaluate` and `evaluation_loop` of the trainer. They run user code, which gets the current
weights only if it is declared. Overriding them in the class below would not suffice: the callback handler is an object
of transformers, and a user's subclass can override the other three, whose code is wrapped only on the instance.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import transformers  # pyright: ignore[reportMissingImports] - of the extra `hf`

from fzero import CompiledStep, Mesh, State, functionalize, make_mesh
from fzero._utils.arguments import python_numbers, shown
from fzero.comm.control_group import run_on_all_ranks, world
from fzero.errors import CheckpointError, FzeroValueError
from fzero.hf import data_parallel_ranks, step_recipe, trainer_checkpoint, trainer_options, training_step
from fzero.hf.evaluator import Evaluator
from fzero.hf.loss_guard import LossInputs
from fzero.hf.micro_batches import MicroBatches
from fzero.hf.models import Pretrained
from fzero.hf.resume import newest_finished
from fzero.hf.weight_sync import Sync
from fzero.modules.functionalize import Functional
from fzero.train_state import check_computed
from fzero.transforms.transform import Transform

logger = logging.getLogger("fzero")
Base: Any = transformers.Trainer


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
        backend, warmup, memory_budget, host_budget, disk_budget: of `fz.compile`.

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
        warmup: str = "wait",
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
        self._tensor_axis = data_parallel_ranks.tensor_axis(None if wrong else tensor_parallel, mesh, transforms)
        trainer_options.check(self, model, args, optimizer, pair, transforms, Trainer, sync, wrong)
        self._transforms, self._mesh_or_none, self.lengths = transforms, mesh, lengths
        self._save_weights, self._chunked = save_weights, loss is not None
        budgets = {"memory_budget": memory_budget, "host_budget": host_budget, "disk_budget": disk_budget}
        self._compiling = {"backend": backend, "warmup": warmup, **budgets}
        self._pretrained = model if isinstance(model, Pretrained) else None
        self.functional: Functional | None = None
        self.compiled: CompiledStep | None = None
        self.train_state: State | None = None
        self._training_step: training_step.TrainingStep | None = None
        self._micro_batches: MicroBatches | None = None
        self._evaluator = Evaluator(self, Trainer)
        super().__init__(model.module if self._pretrained is not None else model, args, *more, **settings)
        self._sync = Sync(self, Trainer, sync)
        self._tensor_transforms = data_parallel_ranks.missing(self._tensor_axis, self.model)
        for text in trainer_options.notes(args, save_weights) if self.is_world_process_zero() else ():
            logger.warning("fzero.hf.Trainer: %s", text)

    @property
    def num_programs(self) -> int:
        """The number of compiled training programs: one for each shape that batches are padded to."""
        return 0 if self._micro_batches is None else len(self._micro_batches.programs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = newest_finished(resume_from_checkpoint, str(self.args.output_dir))
        try:
            return super().train(resume_from_checkpoint, *args, **settings)
        except BaseException:
            self._sync.broken_off()
            raise
        finally:
            self._sync.leave()

    # --- what transformers would do to the module ---

    def _build_accelerator_args(self, **settings: Any) -> dict[str, Any]:
        found = super()._build_accelerator_args(**settings)
        self._accelerator_args = {k: x for k, x in found.items() if k != "dynamo_plugin"} | {"mixed_precision": "no"}
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._tensor_axis.size > 1:
            self.accelerator = data_parallel_ranks.ShardAccelerator(self._data_parts, **self._accelerator_args)
            gather = self.accelerator.gather_for_metrics
            self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leaves the module where it is, because the step computes with its own shards of the parameters."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not self.accelerator._models:  # otherwise transformers would prepare the module for an evaluation
            self.accelerator._models.append(model)
        return model

    # --- preparation ---

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Makes the step, its state, and everything else for a training, where transformers would prepare the model."""
        self._sync.fill_module()  # after a training that was interrupted
        module = self.model.train()
        before = self._training_step
        same_optimizer = before is not None and self.optimizer is not None and self.optimizer is before.optimizer
        carried = self.train_state if same_optimizer else None
        model = self.functional = self._functional()
        recipe = step_recipe.of(self, model, max_steps, self._transforms, self._tensor_transforms)
        if recipe.report and self.is_world_process_zero():
            print(recipe.report, file=sys.stderr, flush=True)
        held, constants = LossInputs(self, Trainer), dict[str, Any]()  # the constants come with the first batch
        self.compiled = training_step.compiled(held, model, recipe, constants, self._mesh(), self._compiling)
        self._evaluator.evaluations.clear()
        self.train_state = trainer_checkpoint.first_state(self, resume_from_checkpoint, carried)
        self._training_step = training_step.TrainingStep(held, recipe, self.train_state)
        self._micro_batches = MicroBatches(held, model, constants, partial(self._evaluator.compared, constants))
        self.accelerator._optimizers.append(self._training_step)
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
        if self._mesh_or_none is None:
            axis, size, _ = self._tensor_axis
            axes = {"data": self.args.world_size // size, axis: size} if size > 1 else {}
            self._mesh_or_none = make_mesh(device=self.args.device.type, **axes)
        if self._mesh_or_none.size != self.args.world_size:
            what = f"TrainingArguments sees {self.args.world_size} processes, the mesh has {self._mesh_or_none.size}"
            fix = "without GPUs pass TrainingArguments(use_cpu=True); start all with torchrun"
            raise FzeroValueError("hf.Trainer", what, fix=fix)
        return self._mesh_or_none

    # --- the data shards ---

    def _data_parts(self) -> data_parallel_ranks.DataParts:
        return data_parallel_ranks.of(self._mesh(), self._tensor_axis.name)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def store_flos(self) -> None:
        if self._tensor_axis.size > 1 and self.args.process_index not in self._data_parts().firsts:
            self.current_flos *= 0  # keeps the type that the other ranks send
        super().store_flos()

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Loads the random state of the first rank of a data shard on all its ranks, which must draw the same random
        numbers."""
        args, parts = self.args, self._data_parts() if self._tensor_axis.size > 1 else None
        if parts is not None:
            self.args = data_parallel_ranks.OtherArguments(args, process_index=parts.firsts[parts.index])
        try:
            super()._load_rng_state(checkpoint)
        finally:
            self.args = args

    # --- training ---

    def get_batch_samples(self, *args: Any) -> Any:
        """Returns the micro-batches of an update, and drops those that an epoch of unknown length has left over."""
        assert self._micro_batches is not None
        self._micro_batches.drop_left_over()
        return super().get_batch_samples(*args)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collects a micro-batch, and runs the step with the last one of an update."""
        assert self._micro_batches is not None and self._training_step is not None and self.train_state is not None
        self._micro_batches.add(self._prepare_inputs(inputs))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        with self._sync.internal():
            batch = self._micro_batches.joined(self._micro_batches.take(), num_items_in_batch)
            self.train_state = self._training_step(self.train_state, batch)
        return self._training_step.metrics["loss"].detach().to(self.args.device, torch.float32)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self._training_step is not None
        return self._training_step.metrics["grad_norm"]

    # An alias, not a call: a user's override of one of them does not change the other one.
    _clip_grad_norm = _get_grad_norm

    # --- evaluation ---

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        with self._evaluator.running():
            return super().evaluation_loop(*args, **settings)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Returns the loss, outputs and labels of a batch, computed from the sharded state."""
        inputs = self._prepare_inputs(inputs)
        with self._sync.internal():
            return self._evaluator.predict(inputs, prediction_loss_only, ignore_keys)

    # --- checkpoints ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes files that `from_pretrained` reads and, in a checkpoint directory of transformers, also the sharded
        state."""
        output_dir = str(self.args.output_dir if output_dir is None else output_dir)
        with self._sync.internal():
            self._sync.copy_to_state()
            if trainer_checkpoint.save(self, output_dir, _internal_call):
                return
            with self._sync.filled_module():
                super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer_checkpoint.save_scheduler(self, output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            trainer_checkpoint.load_scheduler(self, checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # transformers writes trainer_state.json next, which marks the checkpoint as finished (resume.py), so all ranks
        # must have written their files by now.
        what = f"cannot save to {output_dir}"
        run_on_all_ranks(world(), "hf.Trainer", lambda: None, what=what, failure=CheckpointError)

    def _save_scaler(self, output_dir: str) -> None:
        """Does nothing, because the loss scale is part of the state."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Checks the checkpoint only, because `_prepare_for_training` restores the state."""
        trainer_checkpoint.check_state(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Restores the best checkpoint, and copies its weights to the module."""
        if self.args.save_only_model:
            super()._load_best_model()
        else:
            trainer_checkpoint.load_best(self)

    def _finalize_training(self, *args: Any) -> Any:
        check_computed(self.train_state, "hf.Trainer")
        self._sync.fill_module()
        logger.info("fzero.hf.Trainer: %d programs of training", self.num_programs)
        return super()._finalize_training(*args)
