"""Reads and writes quantized weights in directories of transformers in the form of the library bitsandbytes, and
quantizes weights while they are read.

Stored tensors of a layer whose weight is `w`, with 4 bits:

    w                                      uint8[bytes, 1], codes
    w.absmax                               float32[blocks], scales; uint8 if they are quantized themselves
    w.quant_map                            float32[16], the number of each code
    w.nested_absmax, w.nested_quant_map    scales of the scales, and the number of each of their codes
    w.quant_state.bitsandbytes__nf4        uint8, JSON: shape, block size, offset of the scales

and with 8 bits: `w` int8[rows, columns], and float32 scales of rows under `SCB` in place of `weight`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero.checkpoint.safetensors_format import ElementRun
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.weight_loading import Conversions, Sources, Weights, entries_of
from fzero.checkpoint.weight_quantizing import Conversion, nested, quantizing
from fzero.errors import CheckpointError
from fzero.hf.weight_conversions import Stored
from fzero.modules.quantized_linear import quantized_layers, replace_layers
from fzero.ops.weight_quantization import NF4, NF4_BLOCK, scales_shape
from fzero.tree import dtype_name, form

_STATE = ".quant_state.bitsandbytes__nf4"
_OF_4_BITS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)
_FIX = "write the directory again with bitsandbytes' NF4 (blocks of 64) or LLM.int8, or give one that is not quantized"


def format_of(config: Mapping[str, Any], path: Any) -> str | None:
    """Returns the format in which a directory's weights are quantized, by its configuration; None if they are not.

    Raises:
        CheckpointError: it is another format than those of `fz.quantize`.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    how = found.get("quant_method", "?") if isinstance(found, dict) else found
    if how == "bitsandbytes":
        if found.get("load_in_8bit"):
            return "int8"
        if found.get("load_in_4bit") and found.get("bnb_4bit_quant_type") == "nf4":
            return "nf4"
        how = "bitsandbytes, fp4" if found.get("load_in_4bit") else how
    fix = "dequantize the model with the library that wrote it, and save it"
    raise CheckpointError("load", f"{path} is quantized ({how}), which cannot be read", fix=fix)


def replace_stored(module: nn.Module, path: Any, format: str) -> None:
    """Replaces the linear layers of a model whose weights are stored as codes in a directory.

    Raises:
        CheckpointError: codes that belong to no linear layer, by name.
    """
    entries, _ = entries_of(path)
    suffix = _STATE if format == "nf4" else ".SCB"
    stems = [name.removesuffix(suffix).removesuffix(".weight") for name in entries if name.endswith(suffix)]
    linear = {name: m for name, m in module.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    # Files may have been written without the prefix of the model, or with one that this class does not have.
    layers = {name: m for name, m in linear.items() if any(_same_layer(name, stem) for stem in stems)}
    if len(layers) < len(stems):
        unknown = [f"{stem}.weight" for stem in stems if not any(_same_layer(name, stem) for name in layers)]
        what = f"{type(module).__name__} has no linear layers for weights that {path} stores as codes"
        raise CheckpointError("hf.from_pretrained", what, unknown, "give the class that the directory was made from")
    replace_layers(module, layers, format)


def _same_layer(name: str, stem: str) -> bool:
    return name == stem or name.endswith(f".{stem}") or stem.endswith(f".{name}")


def descriptions(weights: Weights) -> set[str]:
    """Returns the names of the stored tensors that describe codes: scales, and how they are stored."""
    coded = {name.removesuffix(_STATE) for name in weights.entries if name.endswith(_STATE)}
    more = {f"{name}{suffix}" for name in coded for suffix in _OF_4_BITS}
    in_8_bits = {name for name in weights.entries if name.endswith(".SCB")}
    more |= in_8_bits | {f"{name.removesuffix('SCB')}weight_format" for name in in_8_bits}
    return more & weights.entries.keys()


def without_descriptions(weights: Weights) -> Weights:
    """Returns the stored tensors of which each layer has one weight and one bias."""
    more = descriptions(weights)
    return replace(weights, entries={name: x for name, x in weights.entries.items() if name not in more})


def sources(module: nn.Module, weights: Weights, found: Sources) -> tuple[Sources, Conversions]:
    """Returns the runs of stored tensors that make up each tensor, and how codes and scales are computed from them.

    Args:
        module: a model with quantized layers.
        weights: the stored tensors.
        found: the runs of the weights of layers by name, as if they were not quantized.

    Raises:
        CheckpointError: stored codes of another form, by name.
    """
    # Descriptions appear under their stored names, as what transformers leaves out does: they are read here.
    out: dict[str, Sequence[ElementRun]] = {**found, **{key: weights.whole(key) for key in descriptions(weights)}}
    conversions: dict[str, Conversion] = {}
    problems: list[str] = []
    for name, layer in quantized_layers(module).items():
        codes, absmax = f"{name}.qweight", f"{name}.absmax"
        runs = out.pop(f"{name}.weight", None)
        if not runs:
            continue
        out[codes] = runs
        keys = [*dict.fromkeys(run.key for run in runs)]
        entries = [weights.entries[key][1] for key in keys]
        if all(e.dtype.is_floating_point and e.dtype.itemsize > 1 for e in entries):
            shapes = {e.shape for e in entries if e.numel == layer.out_features * layer.in_features}
            taken = sum(run.stop - run.start for run in runs)
            if taken != layer.out_features * layer.in_features or shapes - {tuple(layer.quantized.shape)}:
                forms = ", ".join(form(e.shape, e.dtype) for e in entries[:2])
                problems.append(f"{name}.weight: the files have {forms}, expected {list(layer.quantized.shape)}")
                continue
            out[absmax] = runs
            conversions[codes], conversions[absmax] = quantizing(layer.quantized.shape, layer.quantized.format)
        elif len(entries) == 1:
            read = _nf4 if layer.quantized.format == "nf4" else _int8
            try:
                found_scales = read(weights, keys[0], layer.quantized.shape)
            except (KeyError, ValueError, TypeError) as error:
                found_scales = f"its description cannot be read: {type(error).__name__}: {error}"
            if isinstance(found_scales, str):
                problems.append(f"{keys[0]}: {found_scales}")
                continue
            # Codes have another shape in files, so they are not compared by shape.
            conversions[codes] = Conversion(1, 1, layer.qweight.numel(), lambda x, _: x)
            out[absmax] = weights.whole(found_scales.key)
            if found_scales.conversion is not None:
                conversions[absmax] = found_scales.conversion
        else:
            problems.append(f"{name}.weight: is made of several stored tensors of codes: {', '.join(keys[:3])}")
    if problems:
        raise CheckpointError("load", f"{weights.path} has weights that do not fit quantized layers", problems, _FIX)
    return out, conversions


def stored(module: nn.Module, tensors: Stored, dtype: torch.dtype) -> tuple[Stored, dict[str, torch.Tensor]]:
    """Returns the tensors that bitsandbytes stores for a model with quantized layers: their shapes and runs by name,
    and those that no parameter has, with their values.

    Args:
        tensors: what is stored for the model without quantization.
        dtype: that of the values, which the description of each weight names.

    Raises:
        CheckpointError: a weight that is not stored as one tensor, by name.
    """
    layers = {f"{name}.weight": (name, layer.quantized) for name, layer in quantized_layers(module).items()}
    out: Stored = {}
    constants: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, (shape, runs) in tensors.items():
        keys = {run.key for run in runs} & layers.keys()
        if not keys:
            out[name] = shape, runs
            continue
        path, quantized = layers[keys.pop()]
        if [run.stop - run.start for run in runs] != [math.prod(quantized.shape)] or shape != quantized.shape:
            problems.append(f"{name}: is made of a part of {path}.weight, or of several weights")
            continue
        codes = [ElementRun(0, quantized.codes.numel(), f"{path}.qweight", 0)]
        scales = [ElementRun(0, quantized.absmax.numel(), f"{path}.absmax", 0)]
        if quantized.format == "nf4":
            out[name] = (quantized.codes.numel(), 1), codes
            out[f"{name}.absmax"] = tuple(quantized.absmax.shape), scales
            constants[f"{name}.quant_map"] = torch.tensor(NF4, dtype=torch.float32, device="cpu")
            state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": dtype_name(dtype), "shape": [*shape]}
            constants[f"{name}{_STATE}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8, device="cpu")
        else:
            out[name] = shape, codes
            out[f"{name.removesuffix('weight')}SCB"] = tuple(quantized.absmax.shape), scales
            constants[f"{name.removesuffix('weight')}weight_format"] = torch.zeros((), dtype=torch.uint8, device="cpu")
    if problems:
        fix = "save the codes by fz.checkpoint.save, or the numbers: dict(fz.hf.stream(model, state))"
        what = f"{type(module).__name__} is stored in a form that codes cannot have"
        raise CheckpointError("hf.save_pretrained", what, problems, fix)
    return out, constants


def quantization_config(module: nn.Module, dtype: torch.dtype) -> dict[str, Any] | None:
    """Returns how the weights of a model are quantized, for its configuration; None if they are not."""
    found = {layer.quantized.format for layer in quantized_layers(module).values()}
    if not found:
        return None
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": found == {"nf4"},
        "load_in_8bit": found == {"int8"},
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype_name(dtype),
        "llm_int8_skip_modules": [name for name, m in module.named_modules() if type(m) is nn.Linear],
    }


class _Scales(NamedTuple):
    """The stored tensor of a weight's scales, and how they are computed from it if they are quantized themselves."""

    key: str
    conversion: Conversion | None


def _nf4(weights: Weights, key: str, shape: tuple[int, ...]) -> _Scales | str:
    """Returns the scales of codes of 4 bits, or what does not fit."""
    entry, numel = weights.entries[key][1], math.prod(shape)
    missing = [suffix for suffix in (_STATE, ".absmax", ".quant_map") if f"{key}{suffix}" not in weights.entries]
    if missing:
        return f"{form(entry.shape, entry.dtype)} without {key}{missing[0]}"
    state = json.loads(bytes(_read(weights, f"{key}{_STATE}").tolist()))
    if state.get("quant_type") != "nf4" or state.get("blocksize") != NF4_BLOCK:
        return f"is stored as {state.get('quant_type')} in blocks of {state.get('blocksize')}, not nf4 in blocks of 64"
    if list(state.get("shape", ())) != list(shape) or entry.dtype != torch.uint8 or entry.numel * 2 != numel:
        found = form(entry.shape, entry.dtype)
        return f"its shape is {state.get('shape')}, stored as {found}, expected {list(shape)}"
    if not torch.equal(_read(weights, f"{key}.quant_map"), torch.tensor(NF4, dtype=torch.float32, device="cpu")):
        return "its codes stand for other numbers than those of NF4"
    scales = weights.entries[f"{key}.absmax"][1]
    if scales.numel != scales_shape(shape, "nf4")[0]:
        return f"has {scales.numel} scales, expected {scales_shape(shape, 'nf4')[0]}"
    if scales.dtype != torch.uint8:
        return _Scales(f"{key}.absmax", None)
    values, own = (_read(weights, f"{key}.{name}") for name in ("nested_quant_map", "nested_absmax"))
    offset, block = float(state["nested_offset"]), int(state["nested_blocksize"])
    if values.numel() != 256 or own.numel() != -(-scales.numel // block):
        return f"its scales are quantized with {values.numel()} values and {own.numel()} scales of their own"
    return _Scales(f"{key}.absmax", nested(values, own, offset, block, scales.numel))


def _int8(weights: Weights, key: str, shape: tuple[int, ...]) -> _Scales | str:
    """Returns the scales of codes of 8 bits, or what does not fit."""
    entry, scales = weights.entries[key][1], f"{key.removesuffix('weight')}SCB"
    found = form(entry.shape, entry.dtype)
    if scales not in weights.entries:
        return f"{found} without {scales}"
    if entry.dtype != torch.int8 or entry.shape != shape:
        return f"is stored as {found}, expected {form(shape, torch.int8)}"
    order = f"{key.removesuffix('weight')}weight_format"
    if order in weights.entries and int(_read(weights, order)):
        return "is stored in tiles for one kind of GPU (weight_format), not in rows"
    return _Scales(scales, None)


def _read(weights: Weights, key: str) -> torch.Tensor:
    """Returns a small stored tensor."""
    file, entry = weights.entries[key]
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    with storage_of(file).reader(file) as read:
        got = read(memoryview(data.numpy()), entry.offset)  # type: ignore[arg-type]
    if got != entry.nbytes:
        raise CheckpointError("load", f"{file} ends inside {key}", fix="copy or download the file again")
    return data.view(entry.dtype).view(entry.shape)
