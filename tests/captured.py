"""A double of CUDA graphs on a CPU: PyTorch's own `torch.cuda.graph` over streams and a `CUDAGraph` that record.

While it captures nothing is carried out: what is written in place stays as it was, what is made anew is zeros, NaN in
floating point. What waits for the device ends the capture with an error, so does an operation that no ordinary run on
that stream has done before, whose library would begin now. A replay does what was recorded, into the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero import tree
from fzero.runtime.cuda_graphs import Graphs

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}


def captured(mesh: fz.Mesh, patch: Callable[..., None]) -> Device:
    """Has a CPU mesh capture what is compiled on it from here on. `patch`: as `pytest.MonkeyPatch.setattr`."""
    device = Device()
    names = {
        "Stream": device.stream_of,
        "stream": device.using,
        "current_stream": lambda *_: device.current,
        "set_stream": device.use,
        "CUDAGraph": lambda: Graph(device),
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "synchronize": device.synchronize,
        "empty_cache": lambda: None,
    }
    for name, value in names.items():
        patch(torch.cuda, name, value)
    patch(torch._C, "_host_emptyCache", lambda: None, raising=False)
    found = Graphs(mesh.device)
    aside = found.aside
    patch(found, "aside", lambda run: aside(lambda: device.seeing(run)))
    mesh.context.graphs = found
    return device


class Stream:
    def __init__(self, device: Device, name: str):
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.said.append(f"{self.name} waits for {other.name}")


class Device:
    """`said`: what streams were told; `graphs`: that were captured."""

    def __init__(self) -> None:
        self.said, self.graphs = list[str](), list[Graph]()
        self.main = self.current = Stream(self, "main")
        self.capturing: Graph | None = None
        self.begun: set[Any] = set()  # operations that have run on the side
        self.work: Any = None  # of a collective that is done

    def stream_of(self, *_: Any) -> Stream:
        return Stream(self, "side")

    def use(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.said.append(f"on {stream.name}")
        try:
            yield
        finally:
            self.current = before
            self.said.append(f"on {before.name}")

    def seeing(self, run: Callable[[], Any]) -> Any:
        with _Seeing(self):
            return run()

    def synchronize(self, *_: Any) -> None:
        if self.capturing is not None:
            self.capturing.refuse("torch.cuda.synchronize")


class _Seeing(TorchDispatchMode):
    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._device.begun.add(func)
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._device.work = found[-1] if isinstance(found, (tuple, list)) else found
        return found


class Graph(TorchDispatchMode):
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self, device: Device):
        super().__init__()
        self._device, self._valid, self._done = device, True, list[tuple[Any, Any, Any, list[Any]]]()
        self.num_replays = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        assert self._device.current is not self._device.main, "on a stream of its own"
        assert capture_error_mode == "thread_local" and pool is not None
        assert self._device.capturing is None
        self._device.capturing = self
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self._device.capturing = None
        if not self._valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._device.graphs.append(self)

    def refuse(self, name: str) -> None:
        self._valid = False
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name}\nlaunched")

    def replay(self) -> None:
        assert self._valid and self._device.capturing is None
        self.num_replays += 1
        for func, args, kwargs, made in self._done:
            found = func(*args, **kwargs)
            if func.namespace == "c10d":
                (found[-1] if isinstance(found, (tuple, list)) else found).wait()
                continue
            for old, new in zip(made, tree.leaves(found), strict=True):
                if isinstance(new, torch.Tensor) and old is not None:
                    old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if name in WAITS:
            self.refuse(name)
        if func.is_view:
            return func(*args, **kwargs)
        if func not in self._device.begun:
            self.refuse(f"{func} begins")
        if func.namespace == "c10d":  # nothing is sent: what waits for it is handed one that is done
            self._done.append((func, args, kwargs, []))
            return (args[0], self._device.work) if len(func._schema.returns) > 1 else self._device.work
        if written := _written(func, args, kwargs):
            self._done.append((_in_place(func), args, kwargs, []))
            return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
        found = func(*args, **kwargs)
        made = [x if isinstance(x, torch.Tensor) else None for x in tree.leaves(found)]
        for x in made:
            if x is not None:
                x.fill_(torch.nan if x.is_floating_point() else 0)
        self._done.append((func, args, kwargs, made))
        return found


class _in_place:
    def __init__(self, func: Any):
        self._func, self.namespace = func, func.namespace

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._func(*args, **kwargs)
        return ()


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    arguments = func._schema.arguments
    given = {**dict(zip([a.name for a in arguments], args, strict=False)), **kwargs}
    return [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.name in given]
