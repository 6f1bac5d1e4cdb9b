"""Describes how an op may be sharded, by labels of the dims of its operands and results.

A rule is written as in einops:

    rule(aten.bmm.default, "bmk,bkn->bmn", linear="0|1")

Each letter is a factor. To shard a factor is to shard it in every operand that has it, and to replicate the operands
that do not. A result that has the factor is sharded along it. A result that lacks it is partial, with the reduction
that `reduce` names. An upper-case letter stands for any number of dims, and "." for a dim that is not a factor. A dim
of size 1 that is broadcast is not a factor either, which is found from the shapes. Sharding rules of this form are also
used by Shardy (`op_sharding_rule`) and by `jax.experimental.custom_partitioning`.

The same labels serve three kinds of sharding:

- tensor and sequence parallelism shard one factor (`strategies`);
- expert parallelism shards two factors at once, the experts and the rows of tokens (`pairs`), or changes the number of
  rows (`with_rows`);
- ZeRO's flat shards stay flat if every operand has the labels of the result in the same order
  (fzero/sharding/flat_propagation.py).

A factor that is `blocked` cannot be sharded, because the op reads all of it. If it arrives sharded nevertheless, the
body of the op is used instead, if there is one (fzero/sharding/bodies.py). Strategies that labels cannot express are
added with `custom`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from fzero.sharding.operations import Operation, Strategy, Writes, Written, shape_of
from fzero.sharding.placements import (
    REPLICATE,
    SUM,
    VARYING,
    ExpertShard,
    Partial,
    Placement,
    Routed,
    Shard,
    local_shape,
)

aten = torch.ops.aten
Labels = tuple[str, ...]


@dataclass(frozen=True)
class Factors:
    """The labels of an op's operands and results; "" is a dim that is not a factor.

    Attributes:
        operands: each operand with its labels.
        results: the labels of each result; None for a result that is not sharded.
        blocked: the factors that cannot be sharded.
        reduce: the reduction of a result that lacks the sharded factor: "sum", "max", "min" or "mean". "": the factor
            of such a result cannot be sharded.
        linear: sets of indices of operands; if these are partial sums and the others are replicated, so is the result.
        moves: whether the op only moves elements, so that the `linear` operands may be partial with any reduction.
        free: pairs (result, factor) of a result that does not depend on the factor; it is replicated.
        sizes: the arguments that are the shape of a result, with the index of the result. Ranks pass the local shape.
        local: returns the arguments that a rank passes, from the op, the sharded factor and the arguments.
        partition: False if a single factor is not sharded, so that the labels serve experts and flat shards only.
        seeds: the indices of the operands whose shards propose a factor; None for all of them.
        asks: whether a requested placement of the result proposes a factor.
    """

    operands: tuple[tuple[fx.Node, Labels], ...]
    results: tuple[Labels | None, ...]
    blocked: Collection[str] = frozenset()
    reduce: str = "sum"
    linear: Sequence[Collection[int]] = ()
    moves: bool = False
    free: Collection[tuple[int, str]] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    local: Callable[[Operation, str, dict[str, Any]], dict[str, Any]] | None = None
    partition: bool = True
    seeds: Collection[int] | None = None
    asks: bool = True


FactorsOf = Callable[[Operation], Factors | None]
Custom = Callable[[Operation], Iterator[Strategy]]


@dataclass(frozen=True)
class Rule:
    """The rule of an op: its factors, the strategies that labels cannot express, and its body in other ops, which is
    used where a blocked factor is sharded."""

    factors: FactorsOf | None = None
    custom: Custom | None = None
    body: Callable[..., Any] | None = None


RULES: dict[Any, Rule] = {}


def _add(targets: Iterable[Any], **fields: Any) -> None:
    for target in targets:
        RULES[target] = replace(RULES.get(target, Rule()), **fields)


def rule(targets: Any, labels: str, **attributes: Any) -> None:
    """Registers the labels of ops.

    Args:
        targets: an op, or several.
        labels: the labels of the tensor arguments in the order of the op's schema, "->", and those of the results.
        attributes: attributes of `Factors`, or functions of the `Operation` that return them. `linear` may be a string:
            "0|1" are two sets of one operand each, "01" is one set of two. `runs` is the number of dims of upper-case
            letters. `when`: whether the rule applies.
    """

    def factors(op: Operation) -> Factors | None:
        given: dict[str, Any] = {k: v(op) if callable(v) and k != "local" else v for k, v in attributes.items()}
        runs: dict[str, int] = given.pop("runs", {})
        if not given.pop("when", True):
            return None
        operands = [x for _, x in op.tensors()]
        counts = tuple(-1 if x is None else len(shape_of(x)) for x in operands)
        ins, outs = _expanded(labels, counts, tuple(runs.items()))
        linear = given.get("linear", ())
        linear = [[int(i) for i in s] for s in linear.split("|")] if isinstance(linear, str) else linear
        present = [i for i, x in enumerate(operands) if isinstance(x, fx.Node)]
        given["linear"] = tuple([present.index(i) for i in s] for s in linear if {*s} <= {*present})
        tensors = (isinstance(v, torch.Tensor) for v in op.results)
        results = tuple(outs[i] if i < len(outs) and tensor else None for i, tensor in enumerate(tensors))
        return factors_of(op, [(operands[i], ins[i]) for i in present], results, **given)

    _add(targets if isinstance(targets, (list, tuple)) else (targets,), factors=factors)


def labelled(*targets: Any) -> Callable[[FactorsOf], FactorsOf]:
    """Registers a function that returns the factors of ops, for labels that depend on the arguments."""

    def add(fn: FactorsOf) -> FactorsOf:
        _add(targets, factors=fn)
        return fn

    return add


def custom(*targets: Any) -> Callable[[Custom], Custom]:
    """Registers a function that yields strategies which labels cannot express."""

    def add(fn: Custom) -> Custom:
        _add(targets, custom=fn)
        return fn

    return add


def body(*targets: Any) -> Callable[[Any], Any]:
    """Registers the body of ops: a PyTorch function of the `Operation` and the op's arguments, which computes the op by
    other ops. It may return None if it does not support the arguments."""

    def add(fn: Any) -> Any:
        _add(targets, body=fn)
        return fn

    return add


def rule_of(target: Any) -> Rule | None:
    """The rule of an op: the registered one, or that of pointwise ops if it is tagged as pointwise and does not draw
    random numbers."""
    if target not in RULES:
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
            return None
        RULES[target] = Rule(factors=pointwise)
    return RULES[target]


@functools.cache
def _expanded(
    labels: str, counts: tuple[int, ...], runs: tuple[tuple[str, int], ...]
) -> tuple[list[Labels], list[Labels]]:
    """The labels of operands with these numbers of dims (-1 if not given), and of the results. An upper-case letter
    becomes as many labels as it has dims: as given in `runs`, or as the first operand with it leaves over."""
    ins, outs = (side.split(",") for side in labels.split("->"))
    count = dict(runs)
    for s, num_dims in zip(ins, counts, strict=False):
        unknown = [c for c in s if c.isupper() and c not in count]
        if num_dims >= 0 and len(unknown) == 1:
            count[unknown[0]] = num_dims - sum(count.get(c, 1) for c in s if c != unknown[0])

    def expanded(s: str) -> Labels:
        dims = ((f"{c}{i}" for i in range(count.get(c, 0))) if c.isupper() else ("" if c == "." else c,) for c in s)
        return tuple(label for dim in dims for label in dim)

    return [expanded(s) for s in ins], [expanded(s) for s in outs]


def factors_of(
    op: Operation, operands: Sequence[tuple[fx.Node, Labels]], results: Sequence[Labels | None], **attributes: Any
) -> Factors:
    """The factors with these labels, except those of dims that are broadcast."""
    sizes: dict[str, int] = {}
    tensors = [(labels, v.shape) for labels, v in zip(results, op.results, strict=True) if labels is not None]
    for labels, shape in [*((labels, x.meta["val"].shape) for x, labels in operands), *tensors]:
        for label, size in zip(labels, shape, strict=False):
            sizes[label] = max(sizes.get(label, 0), size)

    def kept(labels: Labels, shape: Sequence[int]) -> Labels:
        return tuple("" if k and s == 1 != sizes[k] else k for k, s in zip(labels, shape, strict=False))

    return Factors(
        tuple((x, kept(labels, x.meta["val"].shape)) for x, labels in operands),
        tuple(None if labels is None else kept(labels, v.shape) for labels, v in zip(results, op.results, strict=True)),
        **attributes,
    )


def dims(count: int) -> Labels:
    """Labels of `count` dims, numbered from the last."""
    return tuple(f"d{count - i}" for i in range(count))


def strategies(op: Operation, rule: Rule, factors: Factors | None) -> Iterator[Strategy]:
    """The strategies of an op along an axis on which every rank has the same samples of the batch."""
    yield from _linear_strategies(op, factors) if factors is not None else ()
    if rule.custom is not None:
        yield from rule.custom(op)
    if factors is None or not factors.partition:
        return
    tried = factors.operands if factors.seeds is None else [factors.operands[i] for i in factors.seeds]
    first = next((labels for labels in factors.results if labels is not None), ())
    seeds = [(first[c.dim], c.groups) for c in op.asked if factors.asks and c.dim < len(first)]
    seeds += [(labels[p.dim], p.groups) for x, labels in tried if isinstance(p := op.place[x], Shard)]
    for label, groups in dict.fromkeys(seeds):
        if label and label not in factors.blocked and (s := along(op, factors, label, groups)) is not None:
            yield s


def _linear_strategies(op: Operation, f: Factors) -> Iterator[Strategy]:
    """The strategies on partial values of an op that is linear in some operands."""
    for group in f.linear:
        nodes = {f.operands[i][0] for i in group}
        places = {op.place[x] for x in nodes}
        (place,) = places if len(places) == 1 else (REPLICATE,)
        others = [x for i, (x, _) in enumerate(f.operands) if i not in group]
        if not isinstance(place, Partial) or not (place == SUM or f.moves) or not nodes.isdisjoint(others):
            continue
        if all(op.place[x] == REPLICATE for x in others) or f.moves:
            yield Strategy(op.at(dict.fromkeys(nodes, place)), (place,) * len(op.results))


def along(op: Operation, f: Factors, label: str, groups: int = 1) -> Strategy | None:
    """The strategy that shards one factor; None if a value has two roles that need different placements."""
    want: dict[fx.Node, Placement] = op.at({})
    seen: dict[fx.Node, Placement] = {}
    for x, labels in f.operands:
        place = Shard(labels.index(label), groups) if label in labels else REPLICATE
        if seen.setdefault(x, place) != place:
            return None
        want[x] = place
    out = list[Placement]()
    for i, labels in enumerate(f.results):
        if labels is None or (i, label) in f.free:
            out.append(REPLICATE)
        elif label in labels:
            out.append(Shard(labels.index(label), groups))
        elif f.reduce:
            out.append(SUM if f.reduce == "mean" else Partial(f.reduce))
        else:
            return None
    mean = f.reduce == "mean" and SUM in out
    return Strategy(want, tuple(out), _writes(op, f, label, tuple(out), mean))


def _writes(op: Operation, f: Factors, label: str, out: tuple[Placement, ...], mean: bool = False) -> Writes | None:
    """How the op is written on shards; None if its arguments do not change."""
    if not (f.sizes or f.local or mean):
        return None

    def write(w: Any, a: dict[str, Any]) -> Written:
        a = {**a, **{name: local_shape(op.results[i].shape, out[i], op.n) for name, i in f.sizes.items()}}
        made = w.named(op.target, f.local(op, label, a) if f.local else a)
        return w(aten.div.Scalar, made, op.n) if mean else made

    return write


def pairs(
    op: Operation, f: Factors, found: Mapping[fx.Node, Collection[Placement]], varies: Collection[fx.Node], leads: bool
) -> Iterator[Strategy]:
    """The strategies of an op along an axis that shards the batch and the experts, on the rows of all ranks.

    They shard two factors at once: the experts (e), of which a rank has its shard, and the rows (r), of which it has
    those of all ranks. A varying operand must have both factors, any other operand must not have rows. A result with
    both is an `ExpertShard`. A result that lacks the rows is a finished sum over the rows of all ranks, which is the
    gradient of a parameter of the experts; it is allowed only if it `leads` to outputs that are such gradients.
    """
    for e, r in dict.fromkeys(_pair_seeds(f, found, varies, leads)):
        want, out, fits = op.at({}), list[Placement](), not {e, r} & {*f.blocked}
        for x, labels in f.operands:
            if e in labels and r in labels:
                place: Placement = ExpertShard(labels.index(e), labels.index(r))
            elif x in varies or r in labels:
                fits = False
                continue
            else:
                place = Shard(labels.index(e)) if e in labels else REPLICATE
            fits &= want.get(x) in (REPLICATE, place)
            want[x] = place
        for labels in f.results:
            if labels is None or e not in labels or (r not in labels and not (leads and f.reduce == "sum")):
                fits = False
            elif r in labels:
                out.append(ExpertShard(labels.index(e), labels.index(r)))
            else:
                out.append(Shard(labels.index(e)))
        if fits:
            yield Strategy(want, tuple(out), _writes(op, f, e, tuple(out)))


def with_rows(
    op: Operation,
    f: Factors,
    place: Routed,
    found: Mapping[fx.Node, Collection[Placement]],
    varies: Collection[fx.Node],
    summed: Callable[[int], bool],
) -> Iterator[Strategy]:
    """The strategies of an op on the rows that this rank's experts were sent.

    Every varying operand must have these rows; any other operand must not have rows, unless it is a constant. A result
    without rows is a sum over the rows of this rank, which is allowed only if the sum of all ranks is wanted: `summed`
    says this of the result with a number.
    """
    rows = dict.fromkeys(labels[place.dim] for x, labels in f.operands if place in found[x])
    for r in rows:
        want, out = op.at({}), list[Placement]()
        fits = bool(r) and r not in f.blocked
        for x, labels in f.operands:
            if r in labels:
                want[x] = Routed(labels.index(r), place.size)
            else:
                fits &= x not in varies
        for i, labels in enumerate(f.results):
            if labels is not None and r in labels:
                out.append(Routed(labels.index(r), place.size))
            else:
                fits &= f.reduce == "sum" and summed(i)
                out.append(VARYING)
        if fits:
            yield Strategy(want, tuple(out), _writes(op, f, r, tuple(out)))


def _pair_seeds(
    f: Factors, found: Mapping[fx.Node, Collection[Placement]], varies: Collection[fx.Node], leads: bool
) -> Iterator[tuple[str, str]]:
    """The pairs of factors (experts, rows) that the placements of the operands propose."""
    for x, labels in f.operands:
        for p in found[x]:
            if isinstance(p, ExpertShard) and labels[p.dim] and labels[p.rows]:
                yield labels[p.dim], labels[p.rows]
        if x not in varies:
            yield from _pairs_of_shards(f, labels, found[x], varies)
    if leads and len(f.operands) > 1:
        yield from _summed_pairs(f)


def _pairs_of_shards(
    f: Factors, labels: Labels, places: Collection[Placement], varies: Collection[fx.Node]
) -> Iterator[tuple[str, str]]:
    """The pairs of an operand that is sharded along its experts, with the rows of the varying operands."""
    first = f.results[0] or ()
    for p in places:
        if isinstance(p, Shard) and p.groups == 1 and (e := labels[p.dim]):
            rows = [k for y, of in f.operands if y in varies and e in of for k in of]
            yield from ((e, r) for r in rows if r and r not in labels and r in first)


def _summed_pairs(f: Factors) -> Iterator[tuple[str, str]]:
    """The pairs of a product of two operands that sums over the rows."""
    first = f.results[0]
    if first and first[0]:
        summed = [k for k in f.operands[-1][1] if k and k not in first and all(k in of for _, of in f.operands)]
        yield from ((first[0], r) for r in summed)


def moved(op: Operation, x: fx.Node, of: Labels, out: Sequence[Labels | None], **how: Any) -> Factors:
    """The factors of an op that only moves the elements of one operand."""
    return factors_of(op, [(x, of)], out, linear=[(0,)], moves=True, **({"reduce": ""} | how))


_LINEAR = {aten.neg.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.mul.Scalar,
           aten.div.Scalar, aten._to_copy.default}  # fmt: skip


def pointwise(op: Operation) -> Factors:
    """The factors of an op that works element by element, with broadcasting."""
    out = dims(len(op.shape))
    operands = [(x, out[len(out) - len(shape_of(x)) :]) for x in op.inputs]
    return factors_of(op, operands, [out] * len(op.results), linear=_linear(op), reduce="")


def _linear(op: Operation) -> list[Collection[int]]:
    """The sets of operands in which a pointwise op is linear: sums, and products of a value with a number."""
    inputs, target = op.inputs, op.target
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return [range(len(inputs))] if isinstance(op["other"], fx.Node) and isinstance(op["self"], fx.Node) else []
    if target in _LINEAR:
        out = op.results[0]
        rounds = target is aten._to_copy.default and not (out.is_floating_point() and out.dtype.itemsize > 1)
        return [] if rounds else [(0,)]  # integers and values of 8 bits are not summed
    if target is aten.div.Tensor or target is aten.mul.Tensor:
        if len(inputs) == 1:
            return [(0,)] if op["other"] is not op["self"] and op["self"] is inputs[0] else []
        number = [i for i, x in enumerate(inputs) if math.prod(shape_of(x)) == 1]
        return [(1 - i,) for i in number if i == 1 or target is aten.mul.Tensor]
    return []
