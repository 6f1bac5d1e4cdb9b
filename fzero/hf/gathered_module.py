"""Runs transformers models with the weights of a sharded state: fully gathered, or layer by layer if they do not
fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import Mesh, tree
from fzero._compat.allocator import return_freed_memory
from fzero.comm import control_group
from fzero.errors import FzeroTypeError
from fzero.hf.models import Pretrained
from fzero.modules.meta_module import TensorSlot
from fzero.sharding.layout import leaf_of
from fzero.state import gather
from fzero.train_state import check_computed

Gathered = Callable[[Sequence[str]], dict[str, torch.Tensor]]


def module(model: Pretrained, state: Any, *, stream: bool = False) -> Any:
    """Returns a transformers model with the weights of a state, in evaluation mode, for `generate()` and other uses of
    a module.

    If some parameters of the state have 16 bits (frozen ones under `mixed_precision`), all parameters of the model
    get that dtype. Every rank calls it.

    Args:
        model: what `fz.hf.from_pretrained` or `from_config` returned.
        state: a state of its training step, or its parameters, on any memory tier. It is read, not changed.
        stream: gather the weights of each layer (`model.blocks`) when the layer runs, and release them afterwards.
            All ranks must then run the model together, with the same inputs, and the state must not change meanwhile.
            This is slow: every token gathers the entire model, or reads it from disk.

    Memory: the entire model on the mesh's device; with `stream`, one layer and everything that is in no layer.
    Communication: one all-gather per sharded parameter; with `stream`, those of a layer each time that it runs.

    Raises:
        FzeroTypeError: another kind of model, or a state whose parameters are not the model's.

    Example:
        >>> import torch, transformers, fzero as fz
        >>> config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        >>> model = fz.hf.from_config(transformers.AutoModelForCausalLM, config)
        >>> step = fz.shard_params(model.train_step(fz.optim.adamw(1e-3)))
        >>> train = fz.compile(step, fz.make_mesh(data=1), backend="eager")
        >>> state = train.init(model.params)
        >>> tokens = fz.hf.module(model, state).generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False)
        >>> again = fz.hf.module(model, state, stream=True)
        >>> torch.equal(tokens, again.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False))
        True
    """
    params = getattr(state, "params", state)
    if not isinstance(model, Pretrained) or tree.names(params) != tree.names(model.params):
        fix = "give the model that fz.hf.from_pretrained returned, and a state of its training step"
        raise FzeroTypeError("hf.module", "this is not a state of the model", fix=fix)
    check_computed(params, "hf.module")
    flat = dict(tree.with_names(params))
    mesh = next((at[1] for x in flat.values() if (at := leaf_of(x)) is not None), None)

    rounded = _rounded(model, flat)

    def gathered(names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = {name: whole(flat[name], mesh) for name in names}
        return {name: x.to(rounded.get(name, x.dtype)) for name, x in found.items()}

    made = copy.deepcopy(model.module).to("meta").eval()
    slots = model.slots(made)
    layers = {name: made.get_submodule(name) for name in model.blocks} if stream else {}
    inside = {path: name for path in slots for name in layers if path.startswith(f"{name}.")}
    _fill(slots, gathered, [path for path in slots if path not in inside])
    for name, layer in layers.items():
        mine = [path for path in slots if inside.get(path) == name]
        # Default arguments, because a closure would see the names of the last layer only.
        layer.register_forward_pre_hook(lambda *_, mine=mine: _fill(slots, gathered, mine))
        layer.register_forward_hook(lambda *_, mine=mine: _empty(slots, mine))
    return made


def _rounded(model: Pretrained, flat: dict[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Returns the parameters to convert to another dtype for the module, by name, with that dtype.

    Under `mixed_precision`, frozen parameters are kept in 16 bits and trained ones in fp32. A forward pass with such
    a mixture fails in the first product of both, so trained parameters are rounded, as a step does before its forward
    pass.
    """
    slots = model.slots(model.module).values()
    floats = {s.name: x.dtype for s in slots if s.of == "_parameters" and (x := flat[s.name]).is_floating_point()}
    low = set(floats.values()) - {torch.float32}
    if len(low) != 1 or torch.float32 not in floats.values():
        return {}
    return dict.fromkeys((n for n, dtype in floats.items() if dtype == torch.float32), low.pop())


def whole(tensor: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
    """Returns the full tensor of a state on the mesh's device. Every rank calls it."""
    if mesh is None:
        return tensor.detach()
    with mesh.alone("gather"), control_group.unbroken(mesh):
        return gather.whole(tensor, mesh, mesh.device)


def _fill(slots: dict[str, TensorSlot], gathered: Gathered, paths: Sequence[str]) -> None:
    values: dict[str, torch.Tensor] = {}
    for path in paths:
        slot = slots[path]
        if slot.name not in values:
            values |= gathered([slot.name])
        _put(slot, values[slot.name])


def _empty(slots: dict[str, TensorSlot], paths: Sequence[str]) -> None:
    for path in paths:
        _put(slots[path], torch.empty_like(slots[path].get(), device="meta"))
    return_freed_memory()  # otherwise allocations between freed layers would keep their memory reserved


def _put(slot: TensorSlot, value: torch.Tensor) -> None:
    slot.put(torch.nn.Parameter(value, requires_grad=False) if slot.of == "_parameters" else value)
