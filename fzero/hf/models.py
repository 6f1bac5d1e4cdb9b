"""Makes transformers models from directories and configurations, as functions of their tensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero import quantize_frozen, random, tree
from fzero._utils.arguments import plain_numbers
from fzero._utils.bounded_json import parsed
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.storage_paths import Place, local
from fzero.checkpoint.weight_loading import Conversions, Sources, Weights
from fzero.errors import CheckpointError
from fzero.hf import adapters, bitsandbytes_files, weight_conversions
from fzero.hf.transformers_import import library
from fzero.modules.functionalize import Functional
from fzero.modules.quantized_linear import dequantized, quantized_layers


class Pretrained(Functional):
    """A transformers model as functions of its tensors, made by `from_pretrained` and `from_config`.

    Attributes:
        module: the transformers model, on the meta device if it was made from a directory; with adapters, `peft`'s
            model of it. Its configuration is `module.config`.
        directory: the directory that it came from, or None.

    Example:
        >>> import transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> fz.hf.from_config(transformers.AutoModelForCausalLM, config)
        functionalize(GPT2LMHeadModel, 28 tensors, 2 blocks)
    """

    def __init__(self, module: Any, directory: Path | None, adapter: Any = None, **settings: Any):
        self._base, self._base_names = module, None
        if adapter is not None:
            module = adapters.put_on(module, adapter)
            self._base_names = adapters.stored_names(module, self._base.state_dict())
        super().__init__(module, settings.pop("blocks", None), settings.pop("mutable", ()))
        self.module, self.directory = module, directory

    @property
    def unstored(self) -> set[str]:
        """The names of tensors that are not in the model's directory: non-persistent buffers and adapters."""
        mine = {*self._names} - self._base_names.keys() if self._base_names is not None else set()
        return super().unstored | mine

    def sources(self, weights: Weights) -> tuple[Sources, Conversions]:
        """Returns the runs of stored tensors that make up each parameter, as transformers would convert them, and how
        codes and scales of quantized weights are computed from them."""
        config = _config_of(weights.path)
        theirs, ours = config.get("model_type"), self._base.config.model_type
        if theirs not in (None, ours):
            what = f"{weights.path} is a directory of {theirs!r}, this model is of {ours!r}"
            raise CheckpointError("load", what, fix="give the directory that the model was made from")
        if (stored := bitsandbytes_files.format_of(config, weights.path)) and not quantized_layers(self._base):
            what = f"{weights.path} is quantized ({stored}), and the model is not"
            raise CheckpointError("load", what, fix="make the model from this directory: fz.hf.from_pretrained")
        plain = bitsandbytes_files.without_descriptions(weights)
        found = weight_conversions.sources(dequantized(self._base), plain)
        found, conversions = bitsandbytes_files.sources(self._base, weights, found)
        if self._base_names is None:
            return found, conversions
        names, others = self._base_names, {*self._base_names.values()}
        adapted = {name: found[plain] for name, plain in names.items() if plain in found}
        found = {n: runs for n, runs in found.items() if n not in others} | adapted
        return found, {name: conversions[plain] for name, plain in names.items() if plain in conversions}

    def initial(self, names: Sequence[str], key: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the initial values that transformers gives to tensors that are in no file: new weights, and computed
        buffers.

        Raises:
            CheckpointError: tensors that transformers does not initialize.
        """
        out, problems = {}, []
        for number, name in enumerate(names):
            seed = int(random.fold_in(key.cpu(), number)[0]) % 2**31
            # Once in memory full of zeros and once full of ones: if the results differ, transformers does not
            # initialize the tensor.
            first, again = (self._begun(name, seed, fill) for fill in (0, 1))
            if torch.equal(first, again):
                out[name] = first
            else:
                problems.append(f"{name} ({tree.describe(first)})")
        if problems:
            what = f"{type(self.module).__name__} does not initialize tensors that no file contains"
            raise CheckpointError("load", what, problems, "give values: train.load(path, params)")
        return out

    def _begun(self, name: str, seed: int, fill: int) -> torch.Tensor:
        """Returns a tensor as transformers initializes it, in memory that was filled with the number `fill` before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self._base_names is not None and (found := adapters.initial(self.module, name, fill)) is not None:
                return found
        owner, _, attribute = name.rpartition(".")
        part = self.module.get_submodule(owner)
        one = copy.copy(part)
        one._parameters, one._buffers = dict(part._parameters), dict(part._buffers)
        for held in (one._parameters, one._buffers):
            for name, x in held.items():
                if x is not None:
                    value = torch.full(x.shape, fill, dtype=x.dtype, device="cpu")
                    held[name] = torch.nn.Parameter(value, False) if held is one._parameters else value
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self.module._init_weights(one)
        return getattr(one, attribute).detach()


def from_pretrained(
    cls: Any,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    adapter: Any = None,
    quantize: str | None = None,
    **settings: Any,
) -> Pretrained:
    """Makes a model from a directory that transformers wrote, without its weights, which `train.load(path)` reads
    later.

    Args:
        cls: a class of transformers: `AutoModelForCausalLM`, `ViTForImageClassification`.
        path: a local directory. For a name on the hub, `huggingface_hub.snapshot_download("org/name")` makes one.
        dtype: of the parameters; by default fp32, whatever dtype the files have.
        adapter: a configuration of the library peft, such as `LoraConfig(r=8)`: the model gets its adapters, newly
            initialized, and nothing else is trained. `save_pretrained` then writes a directory of adapters.
        quantize: "nf4" or "int8": `train.load` stores the frozen weights of linear layers in 4 or 8 bits, as by
            `fz.quantize_frozen`, and quantizes them while it reads the files. The model's heads stay unquantized. All
            parameters are frozen, so that only adapters are trained. The weights of a directory that was written with
            bitsandbytes (NF4 or LLM.int8) stay in its format.
        settings: `blocks` and `mutable` of `fz.functionalize`; all others belong to the model's configuration
            (`attn_implementation="eager"`, `num_labels=3`).

    Raises:
        CheckpointError: a directory that is missing, has no configuration, is of another architecture, or is
            quantized in a format that cannot be read.
        FzeroTypeError, FzeroValueError: an adapter that does not fit, or that is initialized from the weights.

    Example:
        >>> import tempfile, torch, transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> path = tempfile.mkdtemp()
        >>> transformers.GPT2LMHeadModel(config).save_pretrained(path)
        >>> model = fz.hf.from_pretrained(transformers.AutoModelForCausalLM, path)
        >>> step = model.train_step(fz.optim.adamw(1e-3))
        >>> train = fz.compile(fz.shard_params(step), fz.make_mesh(data=1), backend="eager")
        >>> state = train.load(path)
        >>> fz.hf.save_pretrained(path + "/out", model, state)[0].name
        'model.safetensors'
    """
    library("hf.from_pretrained")
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports] - of the extra `hf`

    path = local(path, "hf.from_pretrained", "models are made from a local directory")
    found = _config_of(path)
    if not found:
        what = f"{path} has no config.json" if path.is_dir() else f"{path} is not a directory"
        fix = "give a local directory that save_pretrained wrote"
        if not path.exists() and not path.is_absolute():
            fix += f"; for a name on the hub: huggingface_hub.snapshot_download({path.as_posix()!r}) returns one"
        raise CheckpointError("hf.from_pretrained", what, fix=fix)
    stored = bitsandbytes_files.format_of(found, path)
    if quantize is not None and stored not in (None, quantize):
        what, fix = f"{path} is quantized ({stored}), not {quantize!r}", "leave out `quantize`"
        raise CheckpointError("hf.from_pretrained", what, fix=fix)
    own = {name: settings.pop(name) for name in ("blocks", "mutable") if name in settings}
    wanted = getattr(getattr(cls, "config_class", None), "model_type", None)
    if wanted and wanted != found.get("model_type"):
        what = f"{path} is a directory of {found.get('model_type')!r}, {cls.__name__} is of {wanted!r}"
        raise CheckpointError("hf.from_pretrained", what, fix="give the class, or AutoModelFor..., of the directory")
    implementation = {k: settings.pop(k) for k in ("attn_implementation", "experts_implementation") if k in settings}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, **settings)
        with torch.device("meta"):
            module = _made(cls, config, dtype, **implementation)
    except (ValueError, OSError, KeyError) as error:
        text = str(error).splitlines()[0]
        fix = f"give a class that takes {found.get('model_type')!r}: {', '.join(found.get('architectures') or ['?'])}"
        what = f"{getattr(cls, '__name__', cls)} cannot be made from {path}"
        raise CheckpointError("hf.from_pretrained", what, [text], fix) from error
    if module.can_generate() and (path / "generation_config.json").exists():
        from transformers import GenerationConfig  # pyright: ignore[reportMissingImports] - of the extra `hf`

        module.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if stored is not None:
        bitsandbytes_files.replace_stored(module, path, stored)
    elif quantize is not None:
        # heads, such as the score of a classifier, which adapters train as a whole
        heads = [name for name, m in module.named_children() if type(m) is torch.nn.Linear]
        quantize_frozen(module.requires_grad_(False), quantize, skip=heads)
    return Pretrained(module, path, adapter, **own)


@plain_numbers
def from_config(
    cls: Any, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any
) -> Pretrained:
    """Makes a model with new weights, initialized by transformers, the same on every rank.

    Args:
        cls, dtype, settings: as for `from_pretrained`.
        config: a configuration of transformers.
        seed: of the random numbers. The state of PyTorch's own generator is not changed.

    Memory: the entire model on the host of each rank, as for `params` given to `train.init`.

    Example:
        >>> import transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config)
        >>> len(model.blocks)
        2
    """
    library("hf.from_config")
    own = {name: settings.pop(name) for name in ("blocks", "mutable") if name in settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Pretrained(_made(cls, copy.deepcopy(config), dtype, **settings), None, **own)


def _made(cls: Any, config: Any, dtype: torch.dtype, **settings: Any) -> Any:
    """Returns a model of a configuration, in training mode."""
    make = getattr(cls, "from_config", None) or cls._from_config
    module = make(config, dtype=dtype, **settings)
    return module.train()


def _config_of(path: Place) -> dict[str, Any]:
    """Returns the configuration in a directory of transformers, which is empty if there is none."""
    file = path / "config.json"
    try:
        found = parsed(storage_of(path).whole(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError("hf", f"{file} cannot be read", [str(error)], "copy or download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError("hf", f"{file} is not a JSON object", fix="copy or download it again")
    return found
