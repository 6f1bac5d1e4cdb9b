"""Reads quantized weights from directories that transformers wrote with the library bitsandbytes, and quantizes weights
while they are read.

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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fzero.checkpoint.safetensors_format import ElementRun
from fzero.checkpoint.storage import storage_of
from fzero.checkpoint.weight_loading import Conversions, Sources, Weights, entries_of
from fzero.checkpoint.weight_quantizing import Conversion, nested, quantizing
from fzero.errors import CheckpointError
from fzero.modules.quantized_linear import QuantizedLinear, quantized_layers, replace_layers
from fzero.ops.weight_quantization import NF4, scales_shape
from fzero.tree import form

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
    fix = f"write it dequantized by the library first; {_FIX}"
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


def plain(weights: Weights) -> Weights:
    """Returns the stored tensors without those that describe codes, so that each layer has one weight and one bias."""
    coded = {name.removesuffix(_STATE) for name in weights.entries if name.endswith(_STATE)}
    more = {f"{name}{suffix}" for name in coded for suffix in _OF_4_BITS}
    in_8_bits = {name for name in weights.entries if name.endswith(".SCB")}
    more |= in_8_bits | {f"{name.removesuffix('SCB')}weight_format" for name in in_8_bits}
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
    out: dict[str, Sequence[ElementRun]] = dict(found)
    conversions: dict[str, Conversion] = {}
    problems: list[str] = []
    for name, layer in quantized_layers(module).items():
        weight, absmax = f"{name}.weight", f"{name}.absmax"
        runs = out.get(weight)
        if not runs:
            continue
        keys = [*dict.fromkeys(run.key for run in runs)]
        entries = [weights.entries[key][1] for key in keys]
        format = "nf4" if layer.weight.dtype == torch.uint8 else "int8"
        if all(e.dtype.is_floating_point and e.dtype.itemsize > 1 for e in entries):
            num = sum(run.stop - run.start for run in runs)
            if num != layer.out_features * layer.in_features:
                forms = ", ".join(form(e.shape, e.dtype) for e in entries[:2])
                problems.append(f"{weight}: the files have {forms}, expected {layer.quantized.shape}")
                continue
            out[absmax] = runs
            conversions[weight], conversions[absmax] = quantizing(layer.quantized.shape, format)
        elif len(entries) == 1:
            key = keys[0]
            read = _nf4 if format == "nf4" else _int8
            if problem := read(weights, key, layer, weight, absmax, out, conversions):
                problems.append(f"{key}: {problem}")
        else:
            problems.append(f"{weight}: is made of several stored tensors of codes: {', '.join(keys[:3])}")
    if problems:
        raise CheckpointError("load", f"{weights.path} has weights that do not fit quantized layers", problems, _FIX)
    return out, conversions


def _nf4(
    weights: Weights,
    key: str,
    layer: QuantizedLinear,
    weight: str,
    absmax: str,
    out: dict[str, Sequence[ElementRun]],
    conversions: dict[str, Conversion],
) -> str:
    """Adds the sources of stored codes of 4 bits and their scales. Returns what does not fit, or ""."""
    missing = [suffix for suffix in (_STATE, ".absmax", ".quant_map") if f"{key}{suffix}" not in weights.entries]
    if missing:
        return f"{form(weights.entries[key][1].shape, weights.entries[key][1].dtype)} without {key}{missing[0]}"
    state = json.loads(bytes(_read(weights, f"{key}{_STATE}").tolist()))
    shape, numel = layer.quantized.shape, torch.Size(layer.quantized.shape).numel()
    if state.get("quant_type") != "nf4" or state.get("blocksize") != 64:
        return f"is stored as {state.get('quant_type')} in blocks of {state.get('blocksize')}, not nf4 in blocks of 64"
    if list(state.get("shape", ())) != list(shape) or weights.entries[key][1].numel * 2 != numel:
        return f"its shape is {state.get('shape')}, expected {list(shape)}"
    if not torch.equal(_read(weights, f"{key}.quant_map"), torch.tensor(NF4)):
        return "its codes stand for other numbers than those of NF4"
    scales = weights.entries[f"{key}.absmax"][1]
    if scales.numel != scales_shape(shape, "nf4")[0]:
        return f"has {scales.numel} scales, expected {scales_shape(shape, 'nf4')[0]}"
    # Codes have another shape in files, so they are not compared by shape.
    conversions[weight] = Conversion(1, 1, numel // 2, lambda x, _: x)
    out[absmax] = weights.whole(f"{key}.absmax")
    if scales.dtype == torch.uint8:
        conversions[absmax] = nested(
            _read(weights, f"{key}.nested_quant_map"),
            _read(weights, f"{key}.nested_absmax"),
            float(state["nested_offset"]),
            int(state["nested_blocksize"]),
            scales.numel,
        )
    return ""


def _int8(
    weights: Weights,
    key: str,
    layer: QuantizedLinear,
    weight: str,
    absmax: str,
    out: dict[str, Sequence[ElementRun]],
    conversions: dict[str, Conversion],
) -> str:
    """Adds the sources of stored codes of 8 bits and their scales. Returns what does not fit, or ""."""
    scales = f"{key.removesuffix('weight')}SCB"
    if scales not in weights.entries:
        return f"{form(weights.entries[key][1].shape, weights.entries[key][1].dtype)} without {scales}"
    out[absmax] = weights.whole(scales)
    return ""


def _read(weights: Weights, key: str) -> torch.Tensor:
    """Returns a small stored tensor."""
    file, entry = weights.entries[key]
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    with storage_of(file).reader(file) as reader:
        got = reader.fill(memoryview(data.numpy()), entry.offset)  # type: ignore[arg-type]
    if got != entry.nbytes:
        raise CheckpointError("load", f"{file} ends inside {key}", fix="copy or download the file again")
    return data.view(entry.dtype).view(entry.shape)
