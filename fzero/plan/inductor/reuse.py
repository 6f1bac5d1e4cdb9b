"""Predicts a compiler's memory layout inside a subgraph: the order of its kernels, and which buffers reuse memory.

Both repeat choices of PyTorch's Inductor (torch/_inductor/memory.py, codegen/wrapper.py). Of a few orders it takes
the one with the lowest peak. A pointwise result overwrites an operand after its last use. A new buffer reuses a freed
one of the same size and dtype, if keeping that one until then does not raise the peak.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

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


def _estimate(found: Kernels, order: Sequence[int], lived: Lives) -> list[int]:
    """Returns the bytes alive at each step as the compiler estimates them when it chooses an order."""
    return [n + found.kernels[i].vanishing for n, i in zip(alive(found, lived), order, strict=True)]


def best_order(found: Kernels) -> list[int]:
    """Returns the order with the lowest peak among those that Inductor tries."""
    orders = [list(range(len(found.kernels)))]
    if len(orders[0]) <= MOST_KERNELS:
        orders += [_least_first(found), _earliest_first(found), _depth_first(found)]
    return min(orders, key=lambda order: max(_estimate(found, order, lives(found, order)), default=0))


def shared(found: Kernels, order: Sequence[int]) -> tuple[dict[fx.Node, fx.Node], Lives]:
    """Returns, for each buffer, the first buffer that lay in its memory; and the live ranges of these, from their
    first kernel to the last kernel of any buffer that reuses their memory.
    """
    lived, spans = lives(found, order), _spans(found, order)
    before = _predecessors(found, order, lived, spans)
    out: Lives = {}
    first: dict[fx.Node, fx.Node] = {}
    for buffer in sorted(lived, key=lambda b: lived[b][0]):
        root = buffer
        while root in before:
            root = before[root]
        begins, ends = spans[lived[buffer][0]][0], spans[lived[buffer][1]][1]
        known = out.get(root, (begins, ends))
        first[buffer], out[root] = root, (min(known[0], begins), max(known[1], ends))
    return first, out


def _spans(found: Kernels, order: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each step, the first and last step of the same call: on a CPU, all kernels between two products
    form one call.
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


def _predecessors(
    found: Kernels, order: Sequence[int], lived: Lives, spans: Sequence[tuple[int, int]]
) -> Mapping[fx.Node, fx.Node]:
    """Returns, for each buffer that reuses the memory of another, that other buffer."""
    held = _estimate(found, order, lived)
    highest = max(held, default=0)
    # the compiler does not reuse memory that operations themselves allocate
    aligned = {b for k in found.kernels for b in k.writes if b not in k.allocated}
    before: dict[fx.Node, fx.Node] = {}
    # by size and dtype: freed buffers, and the step after which each is free
    free: dict[object, list[tuple[fx.Node, int]]] = defaultdict(list)
    waiting: list[fx.Node] = []  # freed when this call is over
    dying: dict[int, list[fx.Node]] = defaultdict(list)
    for buffer, (_, last) in lived.items():
        if buffer not in found.outputs:
            dying[last].append(buffer)
    for step, i in enumerate(order):
        kernel = found.kernels[i]
        left, overwritten = [b for b in dying[step] if b not in kernel.writes], False
        for buffer in kernel.writes:
            if buffer in found.inputs or buffer in kernel.allocated:
                continue
            taken = next(
                (b for b in left if b in kernel.in_place.get(buffer, ()) and _key(found, b) == _key(found, buffer)),
                None,
            )
            if taken is not None and not overwritten:  # a second operand of a kernel is hardly ever free
                overwritten = True
                left.remove(taken)
                before[buffer] = taken
            elif candidates := free[_key(found, buffer)]:
                other, since = candidates[-1]
                between = range(since + 1, step)
                if found.sizes[buffer] + max((held[k] for k in between), default=0) <= highest or not between:
                    candidates.pop()
                    before[buffer] = other
                    for k in between:
                        held[k] += found.sizes[buffer]
        waiting += [*left, *(b for b in dying[step] if b in kernel.writes)]
        if spans[step][1] == step:
            for buffer in (b for b in dict.fromkeys(waiting) if b in aligned):
                free[_key(found, buffer)].append((buffer, step))
            waiting = []
    return before


def _key(found: Kernels, buffer: fx.Node) -> object:
    return found.sizes[buffer], buffer.meta["val"].dtype


# --- orders ---


def _successors(found: Kernels) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in found.kernels]
    for i, before in enumerate(found.after):
        for j in sorted(before):
            out[j].append(i)
    return out


def _made(found: Kernels, i: int) -> int:
    return sum(found.sizes[b] for b in found.kernels[i].writes if b not in found.inputs)


def _least_first(found: Kernels) -> list[int]:
    """Orders the kernels by memory: among the kernels that do not raise the peak so far, the one that leaves the
    least memory allocated comes next; if there is none, the one that allocates the least.
    """
    takes, followers = [_made(found, i) + k.vanishing for i, k in enumerate(found.kernels)], _successors(found)
    touched = [{b for b in (*k.reads, *k.writes) if b not in found.inputs} for k in found.kernels]
    readers = Counter(b for buffers in touched for b in buffers)
    readers.update(b for b in found.outputs if b in readers)  # never freed
    waiting = [len(before) for before in found.after]
    ready, order, now = {i for i, n in enumerate(waiting) if not n}, list[int](), 0
    peak = sum(found.sizes[b] for b in found.outputs - found.inputs)

    def freed(i: int) -> int:
        return sum(found.sizes[b] for b in touched[i] if readers[b] == 1) + found.kernels[i].vanishing

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


def _earliest_first(found: Kernels) -> list[int]:
    """Orders the kernels so that the one whose predecessors ran earliest comes next."""
    followers, waiting = _successors(found), [len(before) for before in found.after]
    place: dict[int, int] = {}
    ready = [(list[int](), i) for i, n in enumerate(waiting) if not n]
    heapq.heapify(ready)
    while ready:
        _, i = heapq.heappop(ready)
        place[i] = len(place)
        for j in followers[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (sorted(place[k] for k in found.after[j]), j))
    return list(place)


def _depth_first(found: Kernels) -> list[int]:
    """Orders the kernels by the bytes that they touch, the least first, each directly after the kernels that it
    needs.
    """
    touched = [
        _made(found, i) + sum(found.sizes[b] for b in k.reads if b not in found.inputs)
        for i, k in enumerate(found.kernels)
    ]
    done: dict[int, None] = {}
    for start in sorted(range(len(touched)), key=lambda i: (touched[i], i)):
        todo = [start]
        while todo:
            missing = [j for j in found.after[todo[-1]] if j not in done]
            if missing:
                todo += sorted(missing, key=lambda j: (touched[j], j), reverse=True)
            else:
                done.setdefault(todo.pop())
    return list(done)
