"""Connects the library `peft`: puts adapters on models that have no weights yet, and saves them from a sharded state.

Which tensors an adapter consists of, and which of them are saved, is left to peft. This file only knows where
adapters are placed in a model.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError, FzeroTypeError, FzeroValueError
from fzero.modules.meta_module import named, skeleton_of
from fzero.modules.quantized_linear import dequantized, quantized_layers

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def is_adapted(module: Any) -> bool:
    """Whether a module is a model with adapters."""
    library = sys.modules.get("peft")
    return library is not None and isinstance(module, library.PeftModel)


def put_on(module: Any, config: Any) -> Any:
    """Returns a copy of a model on the meta device with the adapters of a configuration. All other parameters are
    frozen.

    Raises:
        FzeroTypeError: the argument is not a configuration of peft, or does not fit the model.
        FzeroValueError: the adapters are initialized from the model's weights.
    """
    owner = "hf.from_pretrained"
    if not type(config).__module__.startswith("peft."):
        fix = "adapter=peft.LoraConfig(r=8, task_type='CAUSAL_LM')"
        raise FzeroTypeError(owner, f"adapter is a configuration of peft, not {type(config).__name__}", fix=fix)
    begins = getattr(config, "init_lora_weights", None)
    if begins not in (True, "gaussian") or getattr(config, "use_dora", False):
        what = f"{type(config).__name__}'s adapters may be initialized from the weights, which are loaded later"
        problems = [f"init_lora_weights={begins!r}, use_dora={getattr(config, 'use_dora', None)!r}"]
        fix = "put them on a model with weights: fz.functionalize(peft.get_peft_model(model, config))"
        raise FzeroValueError(owner, what, problems, fix)
    from peft import get_peft_model  # pyright: ignore[reportMissingImports] - of no extra but `test`

    try:
        return get_peft_model(copy.deepcopy(module), copy.deepcopy(config))
    except ValueError as error:  # the model has no modules with the target names
        raise FzeroTypeError(owner, "the adapter does not fit the model", [str(error)]) from error


def stored_names(module: Any, base: Collection[str]) -> dict[str, str]:
    """Maps the names of tensors in a model with adapters to their names in the model without, for those that are in
    `base`."""
    names = {name: _WRAPPERS.sub("", name.removeprefix(_PREFIX)) for name in module.state_dict()}
    return {name: plain for name, plain in names.items() if plain in base}


def initial(module: Any, name: str, fill: int) -> torch.Tensor | None:
    """Returns a tensor of an adapter as peft initializes it, in memory that was filled with the number `fill` before.

    Returns None if the tensor does not belong to an adapter.
    """
    parents = name.split(".")
    for depth in range(len(parents) - 1, 0, -1):
        part = module.get_submodule(".".join(parents[:depth]))
        if hasattr(part, "reset_lora_parameters"):
            one = copy.deepcopy(part)
            with torch.no_grad():
                for kind in one.adapter_layer_names:
                    for x in getattr(one, kind).to_empty(device="cpu").parameters():
                        x.fill_(fill)
                for adapter in one.r:
                    one.reset_lora_parameters(adapter, module.peft_config[adapter].init_lora_weights)
            found = one.get_parameter(".".join(parents[depth:])).detach()
            return None if found.is_meta else found
    return None


def saved_leaves(module: Any, leaf_of: Mapping[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the state dict of a model with adapters, without values, and which of its tensors are saved.

    The saved tensors are given by their names in the state dict, with the names of the parameters of the state.

    Args:
        leaf_of: maps names in the state dict to names of parameters.

    Raises:
        CheckpointError: an adapter is not saved simply as the tensors that it has.
    """
    state, names = file_names(module)
    return state, {name: leaf_of[name] for name in names.values()}


def file_names(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the state dict of a model with adapters, without values, and the names of the adapters' tensors: maps
    those in files of peft to those in the state dict.

    Raises:
        CheckpointError: an adapter is not saved simply as the tensors that it has.
    """
    from peft import get_peft_model_state_dict  # pyright: ignore[reportMissingImports] - of no extra but `test`

    state = {name: torch.empty_like(x, device="meta") for name, x in module.state_dict().items()}
    names = {id(x): name for name, x in state.items()}
    stored: dict[str, str] = {}
    problems = []
    for adapter, config in module.peft_config.items():
        found = get_peft_model_state_dict(module, state_dict=dict(state), adapter_name=adapter)
        stored |= {name: names[id(x)] for name, x in found.items() if id(x) in names}
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        problems += [f"{name}: of an adapter of {kind}" for name, x in found.items() if id(x) not in names]
    if problems:
        what = "the library saves tensors that it computes from the adapter's"
        fix = "model.write_back(train.gather(state).params), then peft_model.save_pretrained(path)"
        raise CheckpointError("hf.save_pretrained", what, problems, fix)
    return state, stored


class Merged:
    """The weights of a model with its adapters merged into them, and dequantized, layer by layer. peft itself merges.

    Args:
        module: a model with adapters or quantized layers.
        leaf_of: maps names in its state dict to names of parameters.

    Attributes:
        names: for each tensor of the model without adapters and unquantized, its name in the state dict of the model
            and the name of its parameter. That of a quantized weight is the parameter of its codes.
        layers: for the parameters of adapted and of quantized layers that the model has without adapters, the path of
            the layer.
        forms: for the parameters of codes, the shape and dtype of the weight.
    """

    def __init__(self, module: Any, leaf_of: Mapping[str, str]):
        self._is_layer: Any = ()
        if is_adapted(module):
            from peft.tuners.tuners_utils import BaseTunerLayer  # pyright: ignore[reportMissingImports] - of no extra

            self._is_layer = BaseTunerLayer
        self._module, self._leaf_of = module, leaf_of
        self.names: dict[str, tuple[str, str]] = {}
        self.layers: dict[str, str] = {}
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        quantized = quantized_layers(module)
        computed = [path for path, part in module.named_modules() if isinstance(part, self._is_layer)]
        computed += [*quantized]
        outer = [path for path in computed if not any(path.startswith(f"{other}.") for other in computed)]
        saved = {name.partition(".modules_to_save.")[0] for name in leaf_of if ".modules_to_save." in name}
        for name, leaf in leaf_of.items():
            owner, _, attribute = name.rpartition(".")
            if owner in quantized and attribute == "absmax":
                continue
            layer = next((path for path in outer if name.startswith(f"{path}.")), None)
            # The last part of an adapted layer's path that is no `base_layer` is one of the adapter's own modules.
            own = name if layer is None else name.removeprefix(f"{layer}.").replace("base_layer.", "")
            if layer is not None and "." in own and not self._is_of_base(layer, own):
                continue
            if (at := name.partition(".original_module.")[0]) != name and at in saved:
                continue
            plain = name
            if owner in quantized and attribute == "qweight":
                plain, self.forms[leaf] = f"{owner}.weight", (quantized[owner].quantized.shape, torch.float32)
            self.names[_WRAPPERS.sub("", plain.removeprefix(_PREFIX))] = name, leaf
            if layer is not None:
                self.layers[leaf] = layer

    def _is_of_base(self, layer: str, own: str) -> bool:
        """Whether a tensor of an adapted layer belongs to the layer that was adapted."""
        part = self._module.get_submodule(layer)
        while isinstance(part, self._is_layer):
            part = part.base_layer  # type: ignore[attr-defined]
        return own in part.state_dict()

    def parameters(self, param: str) -> list[str]:
        """The parameters from which the merged weights of a parameter's layer are computed."""
        layer = self.layers[param]
        return [leaf for name, leaf in self._leaf_of.items() if name.startswith(f"{layer}.")]

    def weights(self, param: str, value: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the merged weights of a parameter's layer, by names of parameters. `value` returns a parameter."""
        layer = self.layers[param]
        real = self._module.get_submodule(layer)
        one, inside = skeleton_of(real), len(layer) + 1
        names = {name[inside:]: leaf for name, leaf in self._leaf_of.items() if name.startswith(f"{layer}.")}
        for name, slot in named(one):
            # Tensors that are not in the state dict, such as the permutations of BOFT, are constants of the module.
            owner, _, attribute = name.rpartition(".")
            x = value(names[name]) if name in names else getattr(real.get_submodule(owner), attribute)
            if x.is_meta:
                fix = "put the adapter on a model with weights: fz.functionalize(peft.get_peft_model(model, config))"
                raise FzeroValueError("hf.stream", f"{layer}.{name} has no value to merge the adapter with", fix=fix)
            x = x.clone()
            slot.put(torch.nn.Parameter(x, requires_grad=False) if slot.of == "_parameters" else x)
        one = dequantized(one)
        with torch.no_grad():
            for part in reversed([*one.modules()]):
                if isinstance(part, self._is_layer):
                    part.merge()  # type: ignore[operator]
        state = one.state_dict()
        plain = lambda name, leaf: f"{name.removesuffix('qweight')}weight" if leaf in self.forms else name  # noqa: E731
        return {leaf: state[plain(name, leaf)] for name, leaf in names.items() if leaf in self.layers}


def write(module: Any, values: Mapping[str, torch.Tensor], out: Path) -> list[Path]:
    """Lets peft write a model's adapters: the weights, the configuration, and a model card.

    Each file appears only when it is complete, those of weights first.

    Args:
        values: a state dict, with values for the tensors that are saved.
    """
    temporary = out / ".tmp-adapter"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        module.save_pretrained(temporary, state_dict=dict(values))
        files = sorted((p for p in temporary.rglob("*") if p.is_file()), key=lambda p: (p.suffix != ".safetensors", p))
        moved = [out / p.relative_to(temporary) for p in files]
        for source, target in zip(files, moved, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [p for p in moved if p.suffix == ".safetensors"]
