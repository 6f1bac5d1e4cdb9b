"""Tests sharding rules as rules: every strategy that a rule offers, for every placement of an input, computes the op.

The other tests of this folder test the strategies that the propagation chooses. Here each op of their cases is taken
out of its graph. For each placement of each of its inputs (a shard, or a partial sum), every strategy is written and
run on two simulated ranks. A wrong label may make an op read or write beyond a tensor, so this runs in a child process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.fx as fx
from lockstep import cuts_of, parts, run, whole, with_gradients
from test_sharded_functions import CASES

from fzero.sharding.factors import RULES, Factors, rule_of
from fzero.sharding.placements import REPLICATE, SUM, Partial, Placement
from fzero.sharding.propagation import Propagation
from fzero.sharding.sharded_graph import OutputPlacement
from fzero.trace.recorder import Recorded
from fzero.trace.subgraph import extract

aten = torch.ops.aten
N = 2
MOST = 2  # cases of one op


class Case(NamedTuple):
    """An op in a graph of its own, with values of its inputs and results."""

    name: str
    target: Any
    graph: Recorded
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor]


class Forced(Propagation):
    """Computes an op by the strategy with a given number, instead of the cheapest one."""

    number, offered = 0, 0

    def _replaced_by_body(self, node: fx.Node) -> bool:
        return False

    def choose(self, node: fx.Node) -> None:
        op = self.operation(node, self._asked(node))
        found = [s for s in self.strategies(op) if self.fits(node, s)]
        Forced.offered = len(found)
        self.settle(node, found[Forced.number] if Forced.number < len(found) else self._as_recorded(node))


def cases() -> Iterator[Case]:
    seen: Counter[Any] = Counter()
    for name, (fn, make) in CASES.items():
        torch.manual_seed(0)
        inputs = make()
        graph, tangents = with_gradients(fn, inputs)
        for node in list(graph.graph.nodes):
            tensors = all(isinstance(a.meta["val"], torch.Tensor) for a in node.all_input_nodes)
            if node.op != "call_function" or node.target is operator.getitem or not node.all_input_nodes or not tensors:
                continue
            if seen[node.target] >= MOST or rule_of(node.target) is None:
                continue
            several = not isinstance(node.meta["val"], torch.Tensor)
            outputs = [u for u in node.users if u.target is operator.getitem] if several else [node]
            if not outputs or any(x.meta["val"].numel() == 0 for x in outputs):
                continue
            seen[node.target] += 1
            names = [a.name for a in node.all_input_nodes]
            one = extract(graph, node.all_input_nodes, outputs, names)
            before = extract(graph, graph.inputs, node.all_input_nodes)
            values = [v.clone() for v in run(before, [[*inputs, *tangents]])[0]]
            yield Case(name, node.target, one, values, run(one, [values])[0])


def placements(case: Case) -> Iterator[list[Placement]]:
    """Each input at each of its placements, the others replicated; and all of them partial."""
    # 8-bit values are never summands.
    summable = [x.is_floating_point() and x.dtype.itemsize > 1 and bool(x.isfinite().all()) for x in case.inputs]
    for i, x in enumerate(case.inputs):
        for place in [*cuts_of(x.shape, N, (1, 2)), *([SUM] if summable[i] else [])]:
            yield [place if k == i else REPLICATE for k in range(len(case.inputs))]
    if len(case.inputs) > 1:
        yield [SUM if s else REPLICATE for s in summable]


def given(x: torch.Tensor, place: Placement) -> list[torch.Tensor]:
    return [2 * x, -x] if isinstance(place, Partial) else parts(x, place, N)  # exact summands


def check(case: Case) -> tuple[int, list[str]]:
    """The number of strategies that were run, and those that are wrong."""
    tried, wrong = 0, list[str]()
    for places in placements(case):
        Forced.number, Forced.offered = 0, 1
        while Forced.number < max(1, Forced.offered):
            tried += 1
            try:
                made = Forced(case.graph, N, places, [OutputPlacement.FREE] * len(case.expected)).result()
                shards = [given(x, p) for x, p in zip(case.inputs, places, strict=True)]
                index = [[torch.tensor(r)] if made.has_index else [] for r in range(N)]
                out = run(made.graph, [[*(x[r] for x in shards), *index[r]] for r in range(N)])
                got = [whole(xs, p) for xs, p in zip(zip(*out, strict=True), made.places, strict=True)]
                for found, expected in zip(got, case.expected, strict=True):
                    scale = max(1.0, float(expected.double().abs().nan_to_num(0, 0, 0).max()))
                    close = {"rtol": 1e-4, "atol": 1e-4 * scale, "equal_nan": True}
                    torch.testing.assert_close(found.double(), expected.double(), **close)
            except Exception as error:
                wrong.append(f"{case.name}: {case.target} at {places}, strategy {Forced.number}: {error!r}"[:300])
            Forced.number += 1
    return tried, wrong


# --- rules that are made wrong ---


def without_blocked(f: Factors) -> Factors | None:
    return dataclasses.replace(f, blocked=frozenset()) if f.blocked and f.partition else None


def with_replicated_results(f: Factors) -> Factors | None:
    labels = {k for _, of in f.operands for k in of if k and k not in f.blocked}
    lost = {(i, k) for i, of in enumerate(f.results) if of is not None for k in labels if k not in of}
    return dataclasses.replace(f, free=[*f.free, *lost]) if lost and f.reduce and f.partition else None


def with_rotated_results(f: Factors) -> Factors | None:
    first = f.results[0]
    if not f.partition or not first or len({*first}) < 2:
        return None
    return dataclasses.replace(f, results=((*first[1:], first[0]), *f.results[1:]))


WRONG = {
    "without_blocked": (without_blocked, (aten._softmax.default, aten.cumsum.default, aten._log_softmax.default)),
    "with_replicated_results": (with_replicated_results, (aten.mm.default, aten.sum.dim_IntList, aten.amax.default)),
    "with_rotated_results": (with_rotated_results, (aten.mm.default, aten.permute.default, aten.embedding.default)),
}


def found_wrong(name: str) -> list[str]:
    """The targets for which a wrong rule was not noticed."""
    change, targets = WRONG[name]
    missed = []
    for target in targets:
        old = RULES[target]
        assert old.factors is not None

        def factors(op: Any, of: Any = old.factors) -> Factors | None:
            f = of(op)
            return (f and change(f)) or f

        with mock.patch.dict(RULES, {target: dataclasses.replace(old, factors=factors)}):
            if not any(check(case)[1] for case in cases() if case.target is target):
                missed.append(str(target))
    return missed


def _child(*args: str, file: str = __file__) -> str:
    """What this file, or another one, prints as a program."""
    here = Path(file).resolve()
    paths = [str(here.parents[2]), str(here.parents[1]), str(here.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(here), *args], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_strategy_computes_the_op() -> None:
    tried, ops = map(int, _child("check").split()[-2:])
    assert tried > 1000 and ops > 80, (tried, ops)


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(name: str) -> None:
    _child(name)


def main(what: str) -> int:
    torch.set_num_threads(1)
    if what in WRONG:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            missed = found_wrong(what)
        print(*missed, sep="\n")
        return len(missed)
    everything = list(cases())
    results = [check(case) for case in everything]
    print(*(text for _, wrong in results for text in wrong), sep="\n")
    print(sum(tried for tried, _ in results), len({case.target for case in everything}))
    return int(any(wrong for _, wrong in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
