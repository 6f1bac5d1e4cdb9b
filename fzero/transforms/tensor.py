"""Computes with parameters that a mesh axis shards along a dim: tensor_parallel.

Acts on the program, in transforms/dim_sharding.py. Ranks exchange activations instead of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeAlias

import torch

from fzero._utils.arguments import flag, keywords, python_numbers
from fzero._utils.deprecation import keyword_aliases
from fzero._utils.units import parse_bytes
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.sharding.layout import Leaf
from fzero.sharding.placements import Shard
from fzero.step import EvalStep
from fzero.transforms.dim_sharding import DimSharding, problems_of
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Parallel
from fzero.tree import dotted

Rule: TypeAlias = "int | tuple[int, int] | None"
Rules: TypeAlias = "Mapping[str, Rule] | Callable[[str, torch.Tensor], Rule]"


@dataclass(frozen=True)
class TensorParallel(DimSharding):
    """The configuration of `tensor_parallel`. `rules`: None if they are to be chosen."""

    axis: str = "model"
    rules: tuple[tuple[str, Shard | None], ...] | Callable[[str, torch.Tensor], Rule] | None = ()
    sequence: bool = False
    name: ClassVar[str] = "tensor_parallel"
    way_out: ClassVar[str] = "give the parameters that they read other rules (None keeps one unsharded)"

    @property
    def stream(self) -> Shard | None:
        return Shard(1) if self.sequence else None

    def conflict(self, other: Transform) -> str | None:
        if isinstance(other, Parallel) and self.axis in other.axes:
            return f"along {self.axis!r} every rank has the same batch: let {other.name} name another axis"
        return super().conflict(other)

    def __call__(self, step: Any) -> Any:
        if self.rules is None and isinstance(step, EvalStep):
            what, fix = "chooses rules for a training step", "fz.compose(*train.resolved.transforms)(fz.eval_step(fn))"
            raise TransformError(self.name, what, fix=f"give an evaluation those of the compiled step: {fix}")
        return super().__call__(step)

    def sharded_dim(self, leaf: Leaf) -> Shard | None:
        """The dim along which a parameter is sharded, by the first rule that matches its name; None while rules have
        not been chosen."""
        if self.rules is None:
            return None
        if callable(self.rules):
            return _dim(self.rules(leaf.path, leaf.meta))
        name = dotted(leaf.path)
        return next((dim for glob, dim in self.rules if matches(name, glob)), None)

    def check(self, leaves: Sequence[Leaf], tied: Sequence[int]) -> None:
        """Raises if a rule matches no parameter, or if two rules shard a tied parameter in different ways, and names
        them."""
        if self.rules is None:
            return
        names = [dotted(leaf.path) for leaf in leaves if leaf.role != "mutable"]
        if not callable(self.rules):
            unused = [glob for glob, _ in self.rules if not any(matches(name, glob) for name in names)]
            if unused:
                near = {glob: ", ".join(_near(glob, names)) for glob in unused}
                shown = [f"{glob!r}" + (f": did you mean {near[glob]}?" if near[glob] else "") for glob in unused]
                fix = "name the end of a parameter's dotted name, e.g. 'qkv' or 'layers.*.out'"
                raise FzeroValueError(self.name, "no parameter matches a rule", shown, fix)
        dims = [None if leaf.role == "mutable" else self.sharded_dim(leaf) for leaf in leaves]
        if not any(dims):
            what = "does nothing: no parameter is sharded"
            fix = f"let a rule match one of {', '.join(names[:5])}"
            raise FzeroValueError(self.name, what, fix=fix)
        pairs = ((leaves[i].path, leaves[t].path, dims[i], dims[t]) for i, t in enumerate(tied))
        torn = [f"{dotted(a)}: {one}, {dotted(b)}: {two}" for a, b, one, two in pairs if one != two]
        if torn:
            fix = "give both names one rule: they are one tensor"
            raise TransformError(self.name, "tied parameters have two rules", torn, fix)

    def __str__(self) -> str:
        return self.shown(f"rules={self.shown_rules}", *["sequence=True"] * self.sequence)

    @property
    def shown_rules(self) -> str:
        """The rules as a user would pass them."""
        if self.rules is None or callable(self.rules):
            return getattr(self.rules, "__name__", repr(self.rules))
        return "{" + ", ".join(f"{glob!r}: {_shown(dim)}" for glob, dim in self.rules) + "}"


@keyword_aliases("fz.tensor_parallel", whole_bytes="max_replicated_bytes")
@keywords
def tensor_parallel(
    step: Any = None,
    *,
    axis: str = "model",
    rules: Rules | None = None,
    sequence: bool = False,
    max_replicated_bytes: int | str = "1MiB",
) -> Any:
    """Shards parameters along a dim over `axis`, and computes with the shards: ranks exchange activations, not
    parameters.

    Equal to the untransformed step, up to the order of summation. Every rank along `axis` has the same batch; any ZeRO
    stage may shard the remaining parts over the other axes. A parameter without a rule stays replicated. The subgraph
    of a block is rewritten with sharding rules for each operation. An operation without such a rule is computed on
    unsharded values, and the program's header lists it.

    Args:
        step: a training or evaluation step; without one a transform is returned.
        axis: the mesh axis.
        rules: a mapping from the end of a parameter's dotted name, in which `*` matches anything, to the dim to shard.
            `(dim, groups)` shards each of several equal pieces: `(1, 3)` for queries, keys and values in one matrix.
            None leaves a parameter replicated. The first rule that matches is used. Or a function `(path, leaf)` that
            returns one of these; `leaf` is a meta tensor. Without rules, they are chosen for an example batch, which
            must then be given to `fz.compile`: the shardings of matrices with the fewest bytes that ranks send, or
            compute redundantly. The program's header prints the rules.
        sequence: whether values that pass between blocks are sharded by position (dim 1) as well, so that norms,
            residuals and dropouts are not computed redundantly. Each all_reduce becomes a reduce_scatter and an
            all_gather.
        max_replicated_bytes: the largest operation that every rank may compute on unsharded inputs, in bytes of these
            inputs. A larger one is an error.

    Communication: for a transformer block in which the first matrix of each pair is sharded by columns and the second
        by rows, two all_reduces of its activations in the forward and two in the backward: 2 (M-1)/M of their bytes
        each.
    Memory: 1/M of the sharded parameters, their gradients and optimizer state, and of the activations between the
        matrices of a pair.

    Raises:
        FzeroTypeError: `rules` are neither a mapping nor a function; `axis` is not a name.
        FzeroValueError: from `fz.compile` without `batch`, if there are no rules; when the program is built, a rule
            that no parameter matches; a dim that is not divisible by the axis; an operation above
            `max_replicated_bytes`.
        TransformError: an evaluation, if there are no rules; another transform that shards the batch, or a parameter,
            over `axis`; tied parameters with different rules.

    Paper: Shoeybi et al., Megatron-LM: training multi-billion parameter language models using model parallelism, 2019.

    Example:
        >>> import torch, fzero as fz
        >>> def loss(p, x):
        ...     return (torch.tanh(x @ p["up"]) @ p["down"]).square().mean()
        >>> step = fz.tensor_parallel(fz.train_step(loss, fz.optim.adamw(1e-3)), rules={"up": 1, "down": 0})
        >>> params = {"up": torch.empty(64, 256, device="meta"), "down": torch.empty(256, 64, device="meta")}
        >>> lowered = fz.lower(step, fz.AbstractMesh(model=4), params, torch.empty(8, 64, device="meta"))
        >>> [op.op for op in lowered.program.instructions if op.by == "tensor_parallel" and op.op.endswith("start")]
        ['all_reduce_start']

        Without rules:

        >>> step = fz.tensor_parallel(fz.train_step(loss, fz.optim.adamw(1e-3)))
        >>> lowered = fz.lower(step, fz.AbstractMesh(model=4), params, torch.empty(8, 64, device="meta"))
        >>> print(*lowered.program.transforms)
        tensor_parallel(axis='model', rules={'down': 0, 'up': 1})
    """
    problems = problems_of(axis, max_replicated_bytes) + flag("sequence", sequence)
    problems += ["step: a mapping is not a step: pass it by name, rules="] * isinstance(step, Mapping)
    given: Any = rules
    if rules is not None and not rules:
        problems.append(f"rules={rules!r}: no parameter is sharded; None chooses rules")
    elif isinstance(rules, Mapping):
        wrong = [f"rules[{glob!r}]={rule!r}: {why}" for glob, rule in rules.items() if (why := _wrong(glob, rule))]
        problems += wrong
        given = () if wrong else tuple((glob, _dim(rule)) for glob, rule in rules.items())
    elif not callable(rules) and rules is not None:
        problems.append(f"rules={rules!r}: a mapping from names to dims, or a function (path, leaf)")
    if problems:
        fix = "of nn.Linear, e.g. fz.tensor_parallel(rules={'up.weight': 0, 'up.bias': 0, 'down.weight': 1})"
        raise FzeroTypeError("tensor_parallel", "invalid arguments", problems, fix)
    return applied(TensorParallel(axis, parse_bytes(max_replicated_bytes), given, sequence), step)


def _wrong(glob: Any, rule: Any) -> str:
    if not isinstance(glob, str):
        return "a name is a string"
    numbers = rule if isinstance(rule, tuple) else () if rule is None else (rule,)
    if len(numbers) > 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in numbers):
        return "a dim, a pair (dim, groups), or None"
    if any(x < 0 for x in numbers) or any(x < 1 for x in numbers[1:]):
        return "a dim counts from 0, groups from 1"
    return ""


def _dim(rule: Rule) -> Shard | None:
    rule = python_numbers(rule)
    if why := _wrong("", rule):
        what = f"rules returned {rule!r}"
        raise FzeroTypeError("tensor_parallel", what, fix=f"return {why}")
    return None if rule is None else Shard(*rule) if isinstance(rule, tuple) else Shard(rule)


def _shown(dim: Shard | None) -> str:
    return "None" if dim is None else str(dim.dim) if dim.groups == 1 else f"({dim.dim}, {dim.groups})"


def rules_for(dims: Mapping[str, Shard | None]) -> tuple[tuple[str, Shard | None], ...]:
    """Returns rules that shard parameters in this way, by their dotted names: as few and as short as possible."""
    rules: list[tuple[str, Shard | None]] = []
    for name, dim in dims.items():
        if dim is None or any(matches(name, glob) for glob, _ in rules):
            continue
        rules.append((_shortest(name, dims), dim))
    wrong = [x for x, dim in dims.items() if next((of for glob, of in rules if matches(x, glob)), None) != dim]
    # The first matching rule counts, so full names come before patterns, and longer names before shorter ones that
    # match their ends.
    exact = sorted((x for x in dims if any(matches(x, name) for name in wrong)), key=len, reverse=True)
    return *((x, dims[x]) for x in exact), *rules


def _shortest(name: str, dims: Mapping[str, Shard | None]) -> str:
    """Returns the shortest pattern for a parameter that selects only parameters with the same dim."""
    parts = name.split(".")
    alike = ["*" if part.isdigit() else part for part in parts]  # the same parameter of all layers
    for i in reversed(range(len(parts))):
        for glob in (".".join(alike[i:]), ".".join(parts[i:])):
            # A pattern of wildcards alone would select everything.
            if glob.strip("*.") and all(dim == dims[name] for x, dim in dims.items() if matches(x, glob)):
                return glob
    return name


def matches(name: str, glob: str) -> bool:
    """Whether a rule applies to this name: its pattern matches the name or the end of it."""
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _near(glob: str, names: Sequence[str]) -> list[str]:
    """Returns names that a rule may have meant: those with a component that is similar to one of the rule's."""
    parts = {part: name for name in reversed(names) for part in name.split(".")}
    unknown = [x for part in glob.split(".")[::-1] if (x := part.strip("*")) and x not in parts]
    within = [x for part in unknown for x in parts if len(x) > 1 and (x in part or part in x)]
    near = [*within, *(x for part in unknown for x in get_close_matches(part, parts))]
    return list(dict.fromkeys(parts[x] for x in near))[:3]
