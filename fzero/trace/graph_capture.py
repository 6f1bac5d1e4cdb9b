"""Records a function of fake tensors as one functional graph of ATen ops."""

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
    """Disables the cyclic garbage collector, for work that only allocates objects. A collection would traverse all of
    torch's objects, which takes 0.3 s each time, and free nothing."""
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
    """Returns the graph of a function that takes and returns flat lists of (fake) tensors.

    The graph is functional. In-place ops on values that the function creates are rewritten; in-place ops on its
    arguments are an error that names these arguments. The error uses `labels`, if they differ from the names in the
    graph. `trained` is for blocks: the indices of the inputs that require gradients.
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
