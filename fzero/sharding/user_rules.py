"""Sharding rules of users' own operators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fzero._compat import compat
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.sharding.factors import Factors, Labels, factors_of, labelled
from fzero.sharding.operations import Operation, shape_of
from fzero.trace.guards.user_frames import line
from fzero.trace.recorder import source_place

_REDUCTIONS = ("sum", "max", "min")


def sharding_rule(op: Any, labels: str, *, blocked: Collection[str] = (), reduce: str = "sum") -> None:
    """Says how `tensor_parallel`, `sequence_parallel` and `expert_parallel` may shard a custom operator.

    Without a rule, every rank computes the operator on unsharded inputs. With one, each dim that has a label may be
    sharded: in every operand that has the label, and in every result that has it. For each operation, the way that
    sends the fewest bytes is chosen; declaring a rule costs no communication by itself. If the operator has a gradient
    that is an operator too, that one needs a rule of its own.

    Args:
        op: the operator, as `"namespace::name"`, `"namespace::name.overload"` or `torch.ops.namespace.name.default`.
        labels: the dims of the tensor arguments and of the results, as in einops: names separated by spaces, tensors
            separated by commas. `"_"` is a dim that is never sharded. A label that no result has is reduced.
        blocked: labels that cannot be sharded, because the operator reads all of that dim.
        reduce: how the results of the shards of a reduced label are combined: `"sum"`, `"max"` or `"min"`.

    Raises:
        FzeroTypeError: `op` is not an operator; `labels` is not a string.
        FzeroValueError: there is no such operator, or the labels do not fit its schema. Labels that do not fit the
            shapes of a call are an error while the step is lowered, which names the user's line and the sizes.

    Example:
        >>> import torch, fzero as fz
        >>> @torch.library.custom_op("docs::project", mutates_args=())
        ... def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ...     return x @ w
        >>> fz.sharding_rule("docs::project", "b s d, d e -> b s e")
    """
    _check_types(op, labels, blocked)
    overload = _overload(op)
    left, arrow, right = labels.partition("->")
    ins, outs = ([tuple(tensor.split()) for tensor in side.split(",")] for side in (left, right))
    problems = _problems(overload, ins, outs, {*blocked}, reduce) if arrow else ["the labels have no '->'"]
    if problems:
        fix = "labels like 'b s d, d e -> b s e': one group for each tensor argument, and one for each result"
        raise FzeroValueError("sharding_rule", f"the labels {labels!r} do not fit {overload}", problems, fix)

    def without_unnamed(tensor: tuple[str, ...]) -> Labels:
        return tuple("" if label == "_" else label for label in tensor)

    def factors(operation: Operation) -> Factors:
        given = [(x, of) for (_, x), of in zip(operation.tensors(), ins, strict=True) if x is not None]
        _check_sizes(operation, given, outs, labels)
        operands = [(x, without_unnamed(of)) for x, of in given]
        return factors_of(operation, operands, [without_unnamed(of) for of in outs], blocked={*blocked}, reduce=reduce)

    labelled(overload)(factors)


def _check_types(op: Any, labels: Any, blocked: Any) -> None:
    problems = [] if isinstance(labels, str) else [f"labels={labels!r}: a string such as 'b s d, d e -> b s e'"]
    if not (isinstance(blocked, Collection) and all(isinstance(label, str) for label in blocked)):
        problems.append(f"blocked={blocked!r}: a collection of labels")
    if not (isinstance(op, str) or compat.is_operator(op) or compat.is_operator(getattr(op, "default", None))):
        problems.append(f"op={op!r}: not an operator")
    if problems:
        fix = 'e.g. fz.sharding_rule("mylib::project", "b s d, d e -> b s e")'
        raise FzeroTypeError("sharding_rule", "invalid arguments", problems, fix)


def _overload(op: Any) -> Any:
    """The operator with this name."""
    if not isinstance(op, str):
        return op if compat.is_operator(op) else op.default
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        fix = "define it before its rule, for example with torch.library.custom_op"
        raise FzeroValueError("sharding_rule", "there is no such operator", [op], fix) from None


def _problems(op: Any, ins: list[Labels], outs: list[Labels], blocked: set[str], reduce: str) -> list[str]:
    tensors = [a.name for a in op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    lists = [a.name for a in op._schema.arguments if "Tensor[]" in str(a.type) or "List[Tensor]" in str(a.type)]
    known = {label for of in ins for label in of} - {"_"}
    found = [f"argument {name} is a list of tensors, which labels cannot describe" for name in lists]
    if len(tensors) != len(ins):
        found.append(f"{len(ins)} groups of labels for {len(tensors)} tensor arguments ({', '.join(tensors)})")
    if len(op._schema.returns) != len(outs):
        found.append(f"{len(outs)} groups of labels for {len(op._schema.returns)} results")
    for of in (*ins, *outs):
        found += [f"{label!r} occurs twice in '{' '.join(of)}'" for label in {*of} - {"_"} if of.count(label) > 1]
    unknown = {label for of in outs for label in of} - known - {"_"}
    found += [f"no argument has the label {label!r} of a result" for label in sorted(unknown)]
    found += [f"blocked: no argument has the label {label!r}" for label in sorted(blocked - known)]
    if op._schema.is_mutable:
        found.append("it writes its arguments, and is recorded as an operator that does not: that one needs the rule")
    if reduce not in _REDUCTIONS:
        found.append(f"reduce={reduce!r} is none of {', '.join(map(repr, _REDUCTIONS))}")
    return found


def _check_sizes(op: Operation, operands: list[tuple[Any, Labels]], outs: list[Labels], labels: str) -> None:
    """Raises if the labels do not fit the shapes of a call."""
    tensors = [(f"{x.name}{shape_of(x)}", shape_of(x), of) for x, of in operands]
    tensors += [
        (f"result {i} {list(v.shape)}", list(v.shape), of)
        for i, (v, of) in enumerate(zip(op.results, outs, strict=True))
    ]
    problems, sizes = list[str](), dict[str, tuple[int, str]]()
    for text, shape, of in tensors:
        if len(shape) != len(of):
            problems.append(f"{text} has {len(shape)} dims, and the labels '{' '.join(of)}' have {len(of)}")
            continue
        for label, size in zip(of, shape, strict=True):
            other, where = sizes.setdefault(label, (size, text))
            if label != "_" and size != other:
                problems.append(f"{label!r} is {other} in {where} and {size} in {text}")
    if problems:
        place = source_place(op.node)
        at = f" at {line(place)}" if place else ""
        fix = "labels of the same dims must have the same size; '_' is a dim without a label"
        raise FzeroValueError("sharding_rule", f"{labels!r} does not fit {op.target}{at}", problems, fix)
