"""Replaces frozen linear layers of a module by layers that store their weights in 4 or 8 bits.

A `QuantizedLinear` has codes in place of a weight, and dequantizes them in its forward. So a step gathers the codes of
a block and dequantizes them inside of it. The scales are a buffer, because mixed precision casts parameters, but no
buffers. The attribute `weight` has a shape, but no values: code that uses them, such as peft's `merge_and_unload`, gets
an error instead of codes in place of numbers.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from fzero._utils.arguments import keywords
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.modules.module_preparation import kept_in_fp32
from fzero.ops.weight_quantization import Quantized, check_format, dequantize, quantize
from fzero.tree import describe

M = TypeVar("M", bound=nn.Module)


class _NoValuesError(FzeroError, AttributeError):
    """Raised if code uses the values of a quantized layer's `weight`."""


class _WeightForm:
    """What a quantized layer has as its `weight`: the weight's shape, and the dtype and device of its codes. Other uses
    are errors, such as peft's merge of an adapter, which adds to `weight.data`."""

    def __init__(self, quantized: Quantized):
        self.shape = torch.Size(quantized.shape)
        self.dtype, self.device = quantized.codes.dtype, quantized.codes.device

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def __torch_function__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    def _error(self) -> _NoValuesError:
        what = "the `weight` of a quantized layer has no values that can be read or changed"
        fix = (
            "dict(fz.hf.stream(model, state, merge=True)) are the weights with merged adapters; "
            "skip=['*.name_of_the_layer*'] leaves the layer unquantized"
        )
        return _NoValuesError("quantize_frozen", what, fix=fix)


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen, quantized weight. Made by `fz.quantize_frozen`.

    `qweight` and `absmax` are the codes and scales of `fz.quantize`. Adapters of peft can be put on it, but not merged
    into it.
    """

    qweight: nn.Parameter  # the name under which peft looks for the device of quantized layers
    absmax: torch.Tensor

    def __init__(self, linear: nn.Linear, quantized: Quantized):
        nn.Module.__init__(self)  # that of nn.Linear would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.qweight = nn.Parameter(quantized.codes, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("absmax", quantized.absmax)
        self.train(linear.training)

    @property
    def quantized(self) -> Quantized:
        """The weight, a pytree of its codes and scales."""
        return Quantized(self.qweight, self.absmax)

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _WeightForm(self.quantized)

    @property
    def W_q(self) -> nn.Parameter:
        """The codes. peft calls `dequantize()` of layers that have this attribute, for example for DoRA."""
        return self.qweight

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, float32[out_features, in_features]."""
        return dequantize(self.quantized)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.is_floating_point():
            # A model that casts activations to the dtype of a weight would cast them to that of the codes.
            what = f"the input of a quantized layer is {describe(input)}"
            fix = "leave the layer unquantized: fz.quantize_frozen(model, skip=['*.name_of_the_layer*'])"
            raise FzeroTypeError("quantize_frozen", what, fix=fix)
        return F.linear(input, dequantize(self.quantized, input.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantized.format}"


@keywords
def quantize_frozen(module: M, format: str = "nf4", *, skip: Sequence[str] = ()) -> M:
    """Stores the frozen weights of linear layers in 4 or 8 bits, in the module itself.

    Each `nn.Linear` with a weight that requires no gradient becomes a layer that stores codes and dequantizes them in
    its forward. The module can then be functionalized. In a step, codes are sharded, gathered, offloaded and saved as
    bytes; only other parameters, such as adapters, have gradients and optimizer state.

    These layers stay as they are: those with a trainable weight, tied weights, the output layer of a transformers
    model, and modules that transformers keeps in float32.

    Args:
        module: a module, real or on the meta device. Freeze it first (`module.requires_grad_(False)`), or put adapters
            of peft on it, which freezes it.
        format: "nf4" or "int8", as for `fz.quantize`.
        skip: names of further layers that stay as they are ("*.down_proj*": `*` matches any text; with adapters of
            peft, the name of a layer ends in ".base_layer").

    Returns:
        The module.

    Raises:
        FzeroTypeError: the module is itself a linear layer, or has no frozen linear layers.
        FzeroValueError: an unknown format; `skip` matches no layer; weights that cannot be quantized, by name.

    Example:
        >>> import torch, fzero as fz
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> _ = net[0].requires_grad_(False)
        >>> fz.quantize_frozen(net)[0]
        QuantizedLinear(in_features=8, out_features=4, bias=True, nf4)
        >>> model = fz.functionalize(net)
        >>> [(name, x.dtype) for name, x in model.named_params.items() if "weight" in name and name[0] == "0"]
        [('0.qweight', torch.uint8)]
    """
    check_format("quantize_frozen", format)
    if not isinstance(module, nn.Module) or isinstance(module, nn.Linear):
        what = f"takes a module that contains linear layers, not {type(module).__name__}"
        raise FzeroTypeError("quantize_frozen", what, fix="torch.nn.Sequential(linear) contains one")
    layers = {name: m for name, m in module.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    if missed := [pattern for pattern in skip if not fnmatch.filter(layers, pattern)]:
        fix = f"there are {', '.join(list(layers)[:8]) or 'none'}"
        raise FzeroValueError("quantize_frozen", "no linear layer matches `skip`", map(repr, missed), fix)
    kept = _kept(module)
    chosen = {
        name: m
        for name, m in layers.items()
        if not (m.weight.requires_grad or m in kept or any(fnmatch.fnmatchcase(name, s) for s in skip))
    }
    if not chosen:
        found = [f"{name}.weight requires a gradient" for name, m in layers.items() if m.weight.requires_grad][:8]
        what = f"{type(module).__name__} has no frozen linear layers to quantize; a quantized weight is not trained"
        fix = "freeze it first: module.requires_grad_(False), and add adapters; or peft.get_peft_model(module, config)"
        raise FzeroTypeError("quantize_frozen", what, found, fix)
    replace_layers(module, chosen, format)
    return module


def replace_layers(module: nn.Module, layers: dict[str, nn.Linear], format: str) -> None:
    """Replaces these layers, by name, by quantized ones.

    Raises:
        FzeroValueError: naming all weights that cannot be quantized. Then nothing has been replaced.
    """
    problems = [f"{name}: has forward hooks" for name, m in layers.items() if m._forward_hooks or m._forward_pre_hooks]
    if format == "nf4":
        odd = {name: m for name, m in layers.items() if m.in_features % 2}
        problems += [f"{name}.weight: {describe(m.weight)} has an odd number of columns" for name, m in odd.items()]
    if problems:
        fix = 'skip=[...] with these names leaves them as they are; format="int8" takes odd numbers of columns'
        raise FzeroValueError("quantize_frozen", "these layers cannot be quantized", problems, fix)
    made: dict[nn.Linear, QuantizedLinear] = {}
    for name, m in layers.items():
        if m not in made:
            try:
                made[m] = QuantizedLinear(m, quantize(m.weight, format))
            except FzeroValueError as error:
                fix = "quantize finite weights"
                raise FzeroValueError("quantize_frozen", f"{name}.weight: {error}", fix=fix) from None
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, made[m])


def dequantized(module: nn.Module) -> nn.Module:
    """Returns a module with plain linear layers in place of quantized ones, with weights in float32: a copy, or the
    module itself if it has none.
    """
    if not quantized_layers(module):
        return module
    module = copy.deepcopy(module)
    for name, m in quantized_layers(module).items():
        plain = nn.Linear(m.in_features, m.out_features, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(m.dequantize(), requires_grad=False), m.bias
        if not name:
            return plain
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, plain)
    return module


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Returns the quantized layers of a module by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, QuantizedLinear)}


def _kept(module: nn.Module) -> set[nn.Module]:
    """Returns the linear layers that stay as they are: with tied weights or adapters of the weight itself
    (`target_parameters`), output layers, and those in float32."""
    uses: dict[int, set[tuple[int, str]]] = {}
    for m in module.modules():
        for attribute, p in m._parameters.items():
            uses.setdefault(id(p), set()).add((id(m), attribute))
    kept: set[nn.Module] = set()
    fp32 = kept_in_fp32(module).get("fp16")
    for name, m in module.named_modules():
        if type(m) is nn.Linear and (len(uses[id(m.weight)]) > 1 or (fp32 and fp32.search(f"{name}.weight"))):
            kept.add(m)
        if hasattr(m, "parameter_name") and hasattr(m, "get_base_layer"):
            kept.add(m.get_base_layer())  # type: ignore[operator] - an adapter of peft of the weight itself
        output: Any = getattr(m, "get_output_embeddings", None)
        if callable(output) and isinstance(found := output(), nn.Module):
            kept |= {*found.modules()}  # also below a wrapper of peft
    return kept
