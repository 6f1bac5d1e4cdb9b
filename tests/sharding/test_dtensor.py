"""Compares sharding rules with those of DTensor, as a second oracle.

For placements of the inputs with which DTensor computes an op without communication, a strategy of ours that needs none
either has the same result placements. Runs in a child process, whose process group sends nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import test_rules
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.fx as fx
from test_rules import Case, N, _child, cases
from torch.distributed.tensor.debug import CommDebugMode

from fzero.sharding.placements import REPLICATE, SUM, Partial, Placement, Shard, divides, local_shape
from fzero.sharding.propagation import Propagation
from fzero.sharding.sharded_graph import OutputPlacement

MOST = 20  # combinations of placements of one op


def theirs(place: Placement) -> Any:
    if isinstance(place, Shard):
        return dtensor.Shard(place.dim)
    return dtensor.Partial(place.op) if isinstance(place, Partial) else dtensor.Replicate()


def ours(place: Any) -> Any:
    """The same placement; one that we do not have, such as the mask of an embedding, is returned unchanged."""
    if type(place) is dtensor.Shard:
        return Shard(place.dim)
    return Partial(place.reduce_op) if type(place) is dtensor.Partial else place


def computed(case: Case, places: Sequence[Placement], mesh: Any) -> list[Any] | None:
    """The placements of DTensor's results; None if it communicates, has no rule, or replicates them."""
    node = next(n for n in case.graph.graph.nodes if n.op == "call_function")
    given: dict[fx.Node, Any] = {}
    for x, value, place in zip(case.graph.inputs, case.inputs, places, strict=True):
        local = torch.zeros(local_shape(value.shape, place, N), dtype=value.dtype)
        like = {"shape": value.shape, "stride": value.contiguous().stride()}
        given[x] = dtensor.DTensor.from_local(local, mesh, [theirs(place)], run_check=False, **like)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[n])
    try:
        with CommDebugMode() as sent:
            out = node.target(*args, **kwargs)
    except Exception:  # there are many kinds of errors for ops that DTensor cannot shard
        return None
    outs = out if isinstance(out, (tuple, list)) else [out]
    found = [ours(x.placements[0]) if isinstance(x, dtensor.DTensor) else dtensor.Replicate() for x in outs]
    replicated = all(isinstance(p, dtensor.Replicate) for p in found)
    return (
        None if sent.get_total_counts() or replicated else [REPLICATE if p == dtensor.Replicate() else p for p in found]
    )


class Offered(Propagation):
    """Collects the result placements of strategies that compute an op unchanged and send nothing."""

    found: ClassVar[list[list[Placement]]] = []

    def _replaced_by_body(self, node: fx.Node) -> bool:
        return False

    def choose(self, node: fx.Node) -> None:
        def is_free(have: Placement, want: Placement) -> bool:
            return have == want or (have == REPLICATE and isinstance(want, Shard))

        offered = [s for s in self.strategies(self.operation(node)) if self.fits(node, s) and s.write is None]
        free = [s for s in offered if all(is_free(self.place[a], want) for a, want in s.want.items())]
        Offered.found = [list(s.out) for s in free]
        self.settle(node, self._as_recorded(node))


def combinations(case: Case) -> Iterator[tuple[Placement, ...]]:
    options: list[list[Placement]] = []
    for x in case.inputs:
        shards = [Shard(d) for d in range(x.dim()) if divides(x.shape, Shard(d), N)]
        options.append([REPLICATE, *shards, *([SUM] if x.is_floating_point() and x.dtype.itemsize > 1 else [])])
    return itertools.islice(itertools.product(*options), 1, MOST)  # the first one replicates everything


def main() -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N)
    mesh, counts, test_rules.MOST = dist.device_mesh.init_device_mesh("cpu", (N,)), Counter[str](), 1
    for case in cases():
        for places in combinations(case):
            if (expected := computed(case, places, mesh)) is None:
                continue
            Offered.found = []
            Offered(case.graph, N, places, [OutputPlacement.FREE] * len(case.expected)).result()
            what = "same" if expected in Offered.found else "other" if Offered.found else "not offered"
            counts[what] += 1
            if what == "other":
                print(f"{case.target} at {places}: {expected}, and ours {Offered.found}")
    print(counts["same"], counts["not offered"])
    return int(counts["other"] > 0)


@pytest.mark.full
def test_dtensor_has_the_same_placements() -> None:
    same, _ = map(int, _child(file=__file__).split()[-2:])
    assert same > 200


if __name__ == "__main__":
    sys.exit(main())
