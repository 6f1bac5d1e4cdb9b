"""Records a function of fake tensors as one functional graph of ATen operations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fzero.trace.cse import merge_equal
from fzero.trace.functionalization import finish
from fzero.trace.recorder import Recorded, Recorder


@contextmanager
def without_gc() -> Iterator[None]:
    """Without the cyclic garbage collector, for work that only makes things: it would go through all of torch's
    objects, 0.3 s each time, to free nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    owner: str,
    names: Sequence[str],
    source: Any = None,
    labels: Sequence[str | None] = (),
    trained: Collection[int] | None = None,
) -> Recorded:
    """The graph of a function of a flat list of fake tensors that returns a flat list of tensors.

    The graph is functional: in-place operations on values made inside are rewritten, in-place operations on the
    arguments are an error that names them, by `labels` where those differ from the names in the graph. `trained`: of a
    block, which inputs require gradients.
    """
    recorder = Recorder(owner, source)
    for i, (tensor, name) in enumerate(zip(inputs, names, strict=True)):
        recorder.input(tensor, name, labels[i] if i < len(labels) else None)
    with recorder.recording():
        outputs = fn(*(inputs if trained is None else recorder.arguments(trained)))
    recorded = finish(recorder, outputs)
    merge_equal(recorded.graph)
    recorded.graph.eliminate_dead_code()
    return recorded
