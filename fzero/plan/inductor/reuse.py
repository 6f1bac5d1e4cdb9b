"""Predicts how a compiler uses memory inside a subgraph: the order of kernels, and which results overwrite an operand.

Both follow choices of PyTorch's Inductor (torch/_inductor/memory.py, codegen/wrapper.py). Of several orders it takes
the one with the lowest peak; two of them are tried here. A pointwise result overwrites an operand after its last use.
Inductor also gives the memory of freed buffers to later ones, but only if that does not raise the peak, so it is not
predicted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch.fx as fx

from fzero.plan.inductor.fusion import Kernels

MOST_KERNELS = 256  # the most kernels of a subgraph that is reordered: the time grows with the square

Lives = dict[fx.Node, tuple[int, int]]
"""Live ranges of the buffers that a subgraph makes: the steps of the first and the last kernel that use each."""


def lives(found: Kernels, order: Sequence[int]) -> Lives:
    """Returns the live ranges of the buffers that a subgraph makes, for kernels in this order. Outputs live to the
    end.
    """
    out: Lives = {}
    for step, i in enumerate(order):
        for buffer in (*found.kernels[i].writes, *found.kernels[i].reads):
            if buffer not in found.inputs:
                end = len(order) - 1 if buffer in found.outputs else step
                out[buffer] = (out.get(buffer, (step, step))[0], end)
    return out


def alive(found: Kernels, lived: Lives) -> list[int]:
    """Returns the bytes alive at each step, including outputs and excluding inputs."""
    change = [0] * (len(found.kernels) + 1)
    for buffer, (first, last) in lived.items():
        change[first] += found.sizes[buffer]
        change[last + 1] -= found.sizes[buffer]
    for i in range(1, len(change)):
        change[i] += change[i - 1]
    return change[:-1]


def best_order(found: Kernels) -> list[int]:
    """Returns the order with the lower peak: that of the graph, or the one that takes the least memory next."""
    orders = [list(range(len(found.kernels)))]
    if len(orders[0]) <= MOST_KERNELS:
        orders.append(_least_first(found))
    return min(orders, key=lambda order: max(alive(found, lives(found, order)), default=0))


def shared(found: Kernels, order: Sequence[int]) -> tuple[dict[fx.Node, fx.Node], Lives]:
    """Returns, for each buffer, the first buffer that lay in its memory; and the live ranges of these, from their
    first kernel to the last kernel of any buffer that overwrites them.
    """
    lived, spans = lives(found, order), _spans(found, order)
    dying: dict[int, list[fx.Node]] = defaultdict(list)
    for buffer, (_, last) in lived.items():
        if buffer not in found.outputs:
            dying[last].append(buffer)
    first: dict[fx.Node, fx.Node] = {}
    out: Lives = {}
    for step, i in enumerate(order):
        kernel, overwritten = found.kernels[i], None
        for buffer in kernel.writes:
            if buffer in first or buffer in found.inputs:
                continue
            operands = kernel.in_place.get(buffer, ()) if buffer not in kernel.allocated and not overwritten else ()
            taken = next((b for b in dying[step] if b in operands and _dtype(b) == _dtype(buffer)), None)
            overwritten = overwritten or taken  # a second operand of a kernel is hardly ever free
            first[buffer] = root = buffer if taken is None else first[taken]
            begins, _ = out.get(root, (spans[step][0], 0))
            out[root] = begins, spans[lived[buffer][1]][1]
    return first, out


def _dtype(buffer: fx.Node) -> object:
    return buffer.meta["val"].dtype


def _spans(found: Kernels, order: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each step, the first and last step of the same call: on a CPU, all kernels between two products
    form one call, which frees nothing before it ends.
    """
    out: list[tuple[int, int]] = []
    for step, i in enumerate(order):
        follows = (
            found.on_cpu
            and step > 0
            and found.kernels[i].product is None
            and found.kernels[order[step - 1]].product is None
        )
        out.append((out[-1][0] if follows else step, step))
    for step in reversed(range(len(out) - 1)):
        if out[step + 1][0] == out[step][0]:
            out[step] = out[step + 1]
    return out


def _least_first(found: Kernels) -> list[int]:
    """Orders the kernels by memory: among the kernels that do not raise the peak so far, the one that leaves the
    least memory allocated comes next; if there is none, the one that allocates the least.
    """
    takes = [sum(found.sizes[b] for b in k.writes if b not in found.inputs) for k in found.kernels]
    touched = [{b for b in (*k.reads, *k.writes) if b not in found.inputs} for k in found.kernels]
    readers = Counter(b for buffers in touched for b in buffers)
    readers.update(b for b in found.outputs if b in readers)  # never freed
    waiting, followers = [len(before) for before in found.after], defaultdict[int, list[int]](list)
    for i, before in enumerate(found.after):
        for j in before:
            followers[j].append(i)
    ready, order, now = {i for i, n in enumerate(waiting) if not n}, list[int](), 0
    peak = sum(found.sizes[b] for b in found.outputs - found.inputs)

    def freed(i: int) -> int:
        return sum(found.sizes[b] for b in touched[i] if readers[b] == 1)

    while ready:
        i = min(ready, key=lambda i: (takes[i] if takes[i] > peak - now else 0, takes[i] - freed(i), i))
        ready.remove(i)
        order.append(i)
        now += takes[i]
        peak = max(peak, now)
        now -= freed(i)
        readers.subtract(touched[i])
        for j in followers[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.add(j)
    return order
