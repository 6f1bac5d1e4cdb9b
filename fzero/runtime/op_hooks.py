"""Observes a running program: calls functions before and after each function and transfer that its source names.

The observed program is the one that normally runs, not a variant of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fzero.ir.ops import OPS
from fzero.ir.program import Instruction, Program
from fzero.runtime.execute import Executable
from fzero.runtime.op_timers import OpPlace


@contextmanager
def observe(
    run: Executable,
    program: Program,
    before: Callable[[OpPlace, tuple[Any, ...]], Any],
    after: Callable[[OpPlace, Any, tuple[Any, ...], Any], None],
) -> Iterator[None]:
    """Observes a single run of an executable, in the body of the `with`.

    `before(place, args)` is called before each op except loops, and `after(place, noted, args, result)` after it, where
    `noted` is the value that `before` returned.
    """
    namespace, following = run.namespace, Follower(program, run.skips)

    def begins(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[OpPlace, Any]:
        place = following.called(name)
        return place, before(place, args)

    def ends(name: str, noted: tuple[OpPlace, Any], args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        after(*noted, args, result)
        following.returned(noted[0], result)

    names = {op.fn or op.op for op, _ in program.walk() if op.op != "loop"}
    plain = {name: namespace[name] for name in names}
    # The executable looks up what it calls in this namespace, so replacing the entries is enough.
    namespace.update(observed(plain, begins, ends))
    try:
        yield
    finally:
        namespace.update(plain)


def observed(
    functions: Mapping[str, Callable[..., Any]],
    before: Callable[[str, tuple[Any, ...], Mapping[str, Any]], Any],
    after: Callable[[str, Any, tuple[Any, ...], Mapping[str, Any], Any], None],
) -> dict[str, Callable[..., Any]]:
    """Wraps functions, given by name: `before(name, args, kwargs)` is called before each call, and `after(name, noted,
    args, kwargs, result)` after it."""

    def around(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            noted = before(name, args, kwargs)
            result = fn(*args, **kwargs)
            after(name, noted, args, kwargs, result)
            return result

        return call

    return {name: around(name, fn) for name, fn in functions.items()}


class Follower:
    """Follows the ops of a running program while its functions and transfers are called one after the other.

    Args:
        skips: returns, while the program runs, whether an op is skipped.
    """

    def __init__(self, program: Program, skips: Callable[[Instruction], bool]):
        self._skips, self._result = skips, None
        self._coming = self._visit(program.instructions, 0, 0)

    def called(self, name: str) -> OpPlace:
        """Returns the op that makes this call, its number, and the iteration of the loop around it."""
        place = next(self._coming, None)
        assert place is not None and (place[0].fn or place[0].op) == name, (
            f"{name} is called where the program has {place and place[0]}"
        )
        return place

    def returned(self, place: OpPlace, result: Any) -> None:
        """Records the result of that call."""
        self._result = result

    def _visit(self, ops: Sequence[Instruction], number: int, iteration: int) -> Iterator[OpPlace]:
        for op in ops:
            is_loop = op.op == "loop"
            if not is_loop and not self._skips(op):
                yield op, number, iteration
            for inner in range(OPS[op.op].iterations_run(op, self._result)):
                yield from self._visit(op.body, number + 1, inner if is_loop else iteration)
            number += sum(1 for _ in op.with_body())
