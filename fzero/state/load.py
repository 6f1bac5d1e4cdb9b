"""Plans and loads parameters from safetensors files: the parameters that are in the files, those that must be
initialized, and entries of the files that are not used.

The model defines which stored tensors make up a parameter; by default it is the tensor of the same name. Everything is
checked before any parameter is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.checkpoint.storage_paths import Place
from fzero.checkpoint.weight_loading import Conversions, Sources, Weights, read_leaves, unfit
from fzero.errors import CheckpointError
from fzero.ir.from_graph import Inputs
from fzero.mesh import Mesh
from fzero.sharding.layout import Leaf, ties
from fzero.trace.recorder import Recorded

logger = logging.getLogger("fzero")


@dataclass(frozen=True)
class LoadPlan:
    """The origin of each parameter of a model.

    Attributes:
        weights: the weight files.
        names: the dotted names of the parameters, by position.
        stored: for the name of each parameter that is in the files, the stored tensors that make it up.
        missing: positions of the parameters that are not in the files.
        conversions: of parameters that are computed from what is stored.
    """

    weights: Weights
    names: list[str]
    stored: Sources
    missing: list[int]
    conversions: Conversions


def plan(
    weights: Weights,
    params: Any,
    inputs: Inputs,
    names: Mapping[str, str] | None,
    model: Any,
    graph: Recorded | None,
) -> LoadPlan:
    """Decides the origin of each parameter. Logs the parameters that are not in the files, and the entries of the files
    that are not used.

    Args:
        params: the tree as it was given.
        names: the stored names of parameters whose stored name differs.
        model: the model of the loss function, or None. It may have `sources(weights)`, which returns the runs of stored
            tensors that make up each parameter, and conversions of some of them; `initial(names, key)`, which returns
            values of parameters that no file has; `unstored`, names of parameters that are not logged when they are
            missing; and `aliases`, the other names of tied parameters.
        graph: of an init function, if `params` was one.

    Raises:
        CheckpointError: parameters that differ, or that have no possible origin; files of another model.
    """
    found, flat = tree.names(params), tree.leaves(params)
    _check_names(names, found, weights)
    aliases: Mapping[str, Sequence[str]] = getattr(model, "aliases", {})
    conversions: Conversions = {}
    if names is None and hasattr(model, "sources"):
        sources, conversions = model.sources(weights)
        own = {n: n for n in found if n in sources}
    else:
        stored = {n: names.get(n, n) if names else _stored(n, aliases, weights) for n in found}
        known = {n: weights.entries[key] for n, key in stored.items() if key in weights.entries}
        # With explicit names, ties that the files declare are ignored: they relate stored names, not names of this
        # tree.
        own = _sources_of(found, flat, known, {} if names else weights.tied)
        sources = {n: weights.whole(stored.get(key, key)) for n, key in own.items() if key in known}
        sources |= {n: weights.whole(key) for n, key in own.items() if key in weights.entries and n not in sources}
    runs, missing = {}, []
    for i in inputs.distinct:
        # A tied parameter may be stored under any of its names.
        name = next((found[j] for j, t in enumerate(inputs.ties) if t == i and found[j] in sources), None)
        if name is None:
            missing.append(i)
        else:
            runs[found[i]] = sources[name]
    wanted = {found[i]: inputs.leaves[i] for i in inputs.distinct}
    used = {run.key for source in sources.values() for run in source}
    extra = [n for n, (_, e) in weights.entries.items() if n not in used and e.numel]
    # Such as non-persistent buffers and new adapters: they are never in the files, so a warning would be noise.
    silent = set(getattr(model, "unstored", ()))
    absent = [i for i in missing if found[i] not in silent]
    # More than a few missing tensors are no reason for an error, but if most of both sides do not match, these are the
    # files of another model.
    if len(runs) < len(absent) and len(runs) < len(extra):
        lines = [f"{found[i]}: missing in the files" for i in absent[:5]] + [
            f"{n}: not in this model" for n in extra[:5]
        ]
        what = (
            f"{weights.path} is another model's: {len(runs)} of {len(wanted)} "
            f"tensors are in it, and {len(extra)} others"
        )
        fix = "give this model's directory, or names={leaf: stored name} where only names differ"
        raise CheckpointError("load", what, lines, fix)
    problems = unfit(weights, runs, wanted, conversions)
    if graph is None and not hasattr(model, "initial"):
        problems += [
            f"{found[i]}: missing in the files, and given without an initial value"
            for i in missing
            if isinstance(flat[i], torch.Tensor) and flat[i].is_meta
        ]
    if problems:
        fix = "give the model that the files belong to; an init function as params, to initialize some tensors"
        raise CheckpointError(
            "load", f"{weights.path} does not fit: {len(problems)} of {len(wanted)} tensors differ", problems, fix
        )
    if absent:
        logger.warning(
            "fzero.load: %d of %d tensors are not in %s and are initialized: %s",
            len(absent),
            len(wanted),
            weights.path,
            ", ".join(found[i] for i in absent),
        )
    if extra:
        tied = {alias: f"{alias} (tied to {name})" for name, others in aliases.items() for alias in others}
        told = ", ".join(tied.get(n, n) for n in extra)
        logger.warning("fzero.load: %d tensors of %s are not used: %s", len(extra), weights.path, told)
    return LoadPlan(weights, found, runs, missing, conversions)


def leaves(
    made_of: LoadPlan,
    inputs: Inputs,
    mesh: Mesh,
    put: Callable[[Any, Leaf], torch.Tensor],
) -> dict[int, torch.Tensor]:
    """Reads the stored parameters and puts them into storage. Returns them by position.

    Every rank calls it. Errors are raised after all parameters have been read.
    """
    at = {made_of.names[i]: i for i in inputs.distinct}
    wanted = {name: inputs.leaves[at[name]] for name in made_of.stored}
    made: dict[int, torch.Tensor] = {}
    failed: Exception | None = None
    for name, parts in read_leaves(made_of.weights, made_of.stored, wanted, mesh, made_of.conversions):
        if failed is None:
            try:
                made[at[name]] = put(parts, wanted[name])
            except Exception as error:  # keep reading: the other ranks still gather values that this rank reads
                failed = error
    if failed is not None:
        raise failed
    return made


def structure(weights: Weights) -> Any:
    """Builds the tree that the names in the files imply, of meta tensors. Tied names are one tensor."""
    metas = {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, (_, e) in weights.entries.items()}
    return _nested(metas | {later: metas[first] for later, first in weights.tied.items()}, weights.path)


def _stored(name: str, aliases: Mapping[str, Sequence[str]], weights: Weights) -> str:
    """Returns the stored name of a parameter: its own name or, if the files have it under a name that is tied to it,
    that name."""
    return next((n for n in (name, *aliases.get(name, ())) if n in weights.entries), name)


def _check_names(names: Mapping[str, str] | None, found: list[str], weights: Weights) -> None:
    problems = [f"{n!r} is not a tensor of params" for n in names or () if n not in found]
    problems += [f"{n}: {key!r} is not in the files" for n, key in (names or {}).items() if key not in weights.entries]
    if problems:
        fix = "names={leaf: stored name}, both with dots: {'layers.0.w': 'model.layers.0.weight'}"
        raise CheckpointError("load", f"`names` does not fit {weights.path}", problems, fix)


def _sources_of(
    names: list[str], flat: list[Any], entries: Mapping[str, Any], tied: Mapping[str, str]
) -> dict[str, str]:
    """Returns for each name the stored name of its data: the name itself, or a name that is tied to it in the files or
    in the tree."""
    same: dict[int, list[str]] = {}
    for name, first in zip(names, ties(flat), strict=True):
        same.setdefault(first, []).append(name)
    out = {n: n for n in names if n in entries} | {n: tied[n] for n in names if n not in entries and n in tied}
    for group in same.values():
        known = next((out[n] for n in group if n in out), None)
        out |= {n: known for n in group if n not in out and known is not None}
    return out


def _nested(tensors: Mapping[str, torch.Tensor], path: Place) -> Any:
    """Builds the tree whose leaves have these dotted names."""
    root: dict[str, Any] = {}
    problems = []
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        node: Any = root
        for key in outer:
            # A tensor may already be where a container is needed. That is reported below, for all such names at once.
            node = node.setdefault(key, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            problems.append(f"{name}: another tensor's name is the beginning of this one, or the reverse")
            continue
        node[last] = tensor
    if problems:
        fix = "pass as params a dict from each dotted name to a tensor of its shape and dtype"
        raise CheckpointError("load", f"the names in {path} do not make a tree", problems, fix)
    return tree.listed(root)
