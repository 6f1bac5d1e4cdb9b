"""Writes directories that transformers' `from_pretrained` reads, from a sharded state, in bounded memory."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._compat import compat
from fzero._utils.arguments import plain_numbers
from fzero.checkpoint import saving
from fzero.checkpoint.safetensors_format import ElementRun
from fzero.checkpoint.storage_paths import local
from fzero.checkpoint.weight_export import export_tensors
from fzero.comm.control_group import ControlGroup, all_gather_values, world
from fzero.errors import CheckpointError, FzeroTypeError
from fzero.hf import adapters, bitsandbytes_files, weight_conversions
from fzero.hf.gathered_module import whole
from fzero.hf.models import Pretrained
from fzero.hf.weight_conversions import Stored
from fzero.modules.functionalize import Functional
from fzero.modules.quantized_linear import dequantized, quantized_layers
from fzero.sharding.layout import leaf_of

logger = logging.getLogger("fzero")

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""The files next to the weights that define how a model's inputs are made."""

_LOCAL = "models are written to a local directory"


class _Parameters(NamedTuple):
    step: int
    params: Any
    constants: list[torch.Tensor]


@plain_numbers
def save_pretrained(
    path: str | os.PathLike[str],
    model: Pretrained | Functional,
    state: Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Writes a directory that transformers' `from_pretrained` reads.

    It has the weights, with the names and in the form in which transformers itself writes them, the configuration, the
    generation configuration, and the files of the tokenizer. For a model with adapters (`peft`), only the adapters are
    written, for `PeftModel.from_pretrained`. Quantized weights are written in the form of bitsandbytes. Every rank
    calls it. It returns the files of weights when the directory is complete.

    Args:
        path: a directory on a filesystem that all ranks share; it is made if it does not exist.
        model: what `fz.hf.from_pretrained` or `from_config` returned, or `fz.functionalize(peft_model)`.
        state: a state of its training step, or its parameters, on any memory tier.
        tokenizer: a tokenizer or processor of transformers, or a directory whose files are copied. By default, the
            files of the directory that the model came from, if there are any.
        dtype: floating-point tensors are converted to it, except scales of quantized weights.
        max_shard_bytes: a file holds at most this many bytes of tensors, or one larger tensor.

    Memory: buffers of about 200 MiB, whatever the size of the model. The disk temporarily holds the weights twice:
        every rank writes its shards, and the first rank makes the files from them. Adapters are gathered in full on
        every rank.
    Communication: that of `fz.checkpoint.save`; for adapters, one all-gather per sharded parameter.

    Raises:
        FzeroTypeError: another kind of model, or a state whose parameters are not the model's.
        CheckpointError: the directory already holds a model or cannot be written; the tokenizer does not exist; or
            the stored form of the weights would split rows of tensors.

    Example:
        >>> import tempfile, transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config)
        >>> train = fz.compile(model.train_step(fz.optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
        >>> state = train.init(model.params)
        >>> [file.name for file in save_pretrained(tempfile.mkdtemp(), model, state)]
        ['model.safetensors']
    """
    module: Any = model._module if isinstance(model, Functional) else None
    if not isinstance(model, Pretrained) and not adapters.is_adapted(module):
        fix = "fz.hf.from_pretrained(...); of other modules fz.checkpoint.export writes the weights"
        raise FzeroTypeError("hf.save_pretrained", f"takes a model of fz.hf, not {type(model).__name__}", fix=fix)
    params, out, ranks = getattr(state, "params", state), local(path, "hf.save_pretrained", _LOCAL), world()
    if tree.names(params) != tree.names(model.params):
        fix = "give the state of this model's training step"
        raise FzeroTypeError("hf.save_pretrained", "this is not a state of the model", fix=fix)
    temporary = out / ".tmp-parameters"

    def prepare() -> None:
        if ranks.rank:
            return
        _check_tokenizer(tokenizer)
        out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        if held := sorted(p.name for p in out.glob("*.safetensors*")):
            what, fix = f"{out} holds a model already: {held[0]}", "give another directory, or remove it"
            raise CheckpointError("hf.save_pretrained", what, fix=fix)

    what = f"cannot save to {out}"
    if adapters.is_adapted(module):
        return _save_adapters(model, module, params, out, tokenizer, dtype, ranks, prepare)
    floats = (x.dtype for name, x in tree.with_names(params) if x.is_floating_point() and not name.endswith(".absmax"))
    kept = dtype or next(floats, torch.float32)
    tensors, constants = _stored(module, kept)
    scales = {f"params.{name}.absmax" for name in quantized_layers(module)}
    exact = {n for n, (_, runs) in tensors.items() if runs and (runs[0].key in scales or n in constants)}
    files: list[str] = []

    def write() -> list[str]:
        if ranks.rank == 0:
            files.extend(map(str, export_tensors(temporary, out, tensors, max_shard_bytes, dtype, exact=exact)))
            config = copy.copy(module.config)
            config.architectures, config.dtype = [type(module).__name__], tree.dtype_name(kept)
            if (how := bitsandbytes_files.quantization_config(module, kept)) is not None:
                config.quantization_config = how
            config.save_pretrained(out)
            if module.can_generate():
                module.generation_config.save_pretrained(out)
            _save_tokenizer(tokenizer, getattr(model, "directory", None), out)
        return files

    # If the first rank finds a problem, all ranks raise it, before any of them writes.
    _on_all_ranks(ranks, what, prepare)
    try:
        saving.save(temporary, _Parameters(0, params, [*constants.values()]))
        return [Path(file) for file in _on_all_ranks(ranks, what, write)]
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def problem(model: Any) -> str:
    """Returns the reason why the weights of a Trainer's model cannot be written to files, or "" if they can. Writes
    nothing.

    Args:
        model: a module, which its own library writes, or a model of `fz.hf.from_pretrained`.
    """
    if isinstance(model, Pretrained):
        try:
            if adapters.is_adapted(model.module):
                adapters.saved_leaves(
                    model.module, {name: slot.name for name, slot in model.slots(model.module).items()}
                )
            else:
                _stored(model.module, torch.float32)
        except CheckpointError as error:
            return str(error)
        return ""
    if hasattr(model, "save_pretrained"):
        return ""
    at = [compat.memory_of(x) for x in model.state_dict().values() if x.numel()]
    if len(set(at)) < len(at):  # transformers writes the state dict as it is
        return f"tensors of {type(model).__name__} share memory, which a file of safetensors cannot hold"
    return ""


def _stored(module: Any, dtype: torch.dtype) -> tuple[Stored, dict[str, torch.Tensor]]:
    """Returns the tensors that are written for a model: their shapes and runs by name, of tensors of `_Parameters`; and
    the values of those that are constants."""
    tensors, constants = bitsandbytes_files.stored(module, weight_conversions.stored(dequantized(module)), dtype)
    of_params: Stored = {
        name: (shape, [run._replace(key=f"params.{run.key}") for run in runs])
        for name, (shape, runs) in tensors.items()
    }
    of_constants: Stored = {
        name: (tuple(x.shape), [ElementRun(0, x.numel(), f"constants.{i}", 0)])
        for i, (name, x) in enumerate(constants.items())
    }
    return of_params | of_constants, constants


def replace_pretrained(path: str, model: Pretrained, state: Any, tokenizer: Any) -> None:
    """Does what `save_pretrained` does, but replaces a model that exists: the new one is written next to it, and then
    renamed."""
    out, ranks = local(path, "hf.save_pretrained", _LOCAL), world()
    fresh, what = out / ".tmp-model", f"cannot save to {out}"

    def clear() -> None:
        if ranks.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)

    def move() -> None:
        if ranks.rank:
            return
        # The index last, because it names the other files.
        names = sorted((p.name for p in fresh.iterdir()), key=lambda name: (name.endswith(".index.json"), name))
        for name in names:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            os.replace(fresh / name, out / name)
        if any(name.startswith("model") for name in names):  # not adapters, next to which there may be a model
            for old in out.glob("model*.safetensors*"):
                if old.name not in names:
                    old.unlink()
        fresh.rmdir()

    _on_all_ranks(ranks, what, clear)
    save_pretrained(fresh, model, state, tokenizer=tokenizer)
    _on_all_ranks(ranks, what, move)


def _save_adapters(
    model: Functional,
    module: Any,
    params: Any,
    out: Path,
    tokenizer: Any,
    dtype: torch.dtype | None,
    ranks: ControlGroup,
    prepare: Callable[[], None],
) -> list[Path]:
    """Gathers the tensors of adapters on all ranks, and writes them on the first."""
    values, wanted = adapters.saved_leaves(module, {name: slot.name for name, slot in model.slots(module).items()})
    what = f"cannot save to {out}"
    _on_all_ranks(ranks, what, prepare)
    flat = dict(tree.with_names(params))
    for name, leaf in wanted.items():
        at = leaf_of(flat[leaf])
        found = whole(flat[leaf], at[1] if at else None).cpu()
        values[name] = found.to(dtype) if dtype is not None and found.is_floating_point() else found

    def write() -> list[str]:
        if ranks.rank:
            return []
        files = adapters.write(module, values, out)
        _save_tokenizer(tokenizer, getattr(model, "directory", None), out)
        return [str(file) for file in files]

    return [Path(file) for file in _on_all_ranks(ranks, what, write)]


def _on_all_ranks(ranks: ControlGroup, what: str, act: Callable[[], list[str] | None]) -> list[str]:
    """Runs `act` on every rank, and returns the result of the first. If it fails on any rank, all raise."""
    form = list[str] | None
    return all_gather_values(ranks, "hf.save_pretrained", act, form=form, what=what, failure=CheckpointError)[0] or []


def _check_tokenizer(tokenizer: Any) -> None:
    """Raises an error if a directory that is given as the tokenizer has no files of one."""
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return
    path = Path(tokenizer)
    if not any((path / name).is_file() for name in TOKENIZER):
        what = f"{path} has no files of a tokenizer" if path.is_dir() else f"{path} is not a directory"
        fix = f"give a tokenizer, or a directory with one: {', '.join(TOKENIZER[:3])}, ..."
        raise CheckpointError("hf.save_pretrained", what, fix=fix)


def _save_tokenizer(tokenizer: Any, directory: Path | None, out: Path) -> None:
    """Writes a tokenizer, or copies its files from a directory."""
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(out)
        return
    source = Path(tokenizer) if tokenizer is not None else directory
    names = [name for name in TOKENIZER if source is not None and (source / name).is_file()]
    for name in names:
        assert source is not None
        shutil.copyfile(source / name, out / name)
    if not names:
        logger.info("fzero.hf: %s has no tokenizer: give one, tokenizer=, if the model has one", out)
