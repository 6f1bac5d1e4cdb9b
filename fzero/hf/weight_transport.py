"""Sends tensors to another process over a Unix or TCP socket: each tensor as a file of safetensors, without pickle.

A message is the header of a safetensors file with one tensor, followed by the bytes of the tensor. A header without
tensors ends the stream; the receiver answers it with one byte.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fzero._utils.bounded_json import Malformed, parsed
from fzero.checkpoint.safetensors_format import CODES, DTYPES, as_bytes
from fzero.errors import FzeroValueError

_MOST_HEADER = 1 << 20  # bytes; a header names one tensor
_DONE = b"\1"
_RETRY = 0.05  # seconds between attempts to connect


class Sender:
    """The side that sends.

    Args:
        address: "unix:/path/to/socket", or "host:port".
        timeout: seconds to wait until the receiver listens, and for each of its answers.
    """

    def __init__(self, address: str, timeout: float):
        self._family, self._at = _parsed(address, "hf.stream")
        self._address, self._timeout = address, timeout
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Connects to the receiver, as soon as it listens."""
        deadline = time.monotonic() + self._timeout
        while True:
            self._socket = socket.socket(self._family, socket.SOCK_STREAM)
            self._socket.settimeout(self._timeout)
            try:
                self._socket.connect(self._at)
                return
            except OSError as error:
                self._socket.close()
                if time.monotonic() > deadline:
                    raise self._failed(f"nobody listens within {self._timeout:g} s: {error}") from error
                time.sleep(_RETRY)

    def send(self, name: str, tensor: torch.Tensor) -> None:
        """Sends one tensor."""
        data = as_bytes(tensor.detach().to("cpu").contiguous())
        fields = {"dtype": CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [0, data.numel()]}
        self._write(_header({name: fields}))
        self._write(memoryview(data.numpy()))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Ends the stream, and waits until the receiver has read it to its end."""
        self._write(_header({}))
        assert self._socket is not None
        try:
            answer = self._socket.recv(1)
        except OSError as error:
            raise self._failed(f"no answer: {error}") from error
        if answer != _DONE:
            raise self._failed("it has stopped before the end")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _write(self, data: bytes | memoryview) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._failed(f"it has stopped reading: {error}") from error

    def _failed(self, why: str) -> FzeroValueError:
        fix = "look at the receiver's own error; start it again with fz.hf.receive, then send again"
        return FzeroValueError("hf.stream", f"the receiver at {self._address} did not take the weights", [why], fix)


def receive(address: str, *, timeout: float = 60.0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that `fz.hf.stream(...).send(address)` sends, in another process, as pairs of a name and a
    tensor: for `worker.reload_weights(weights_iterator=fz.hf.receive(address))` in a worker of vLLM.

    It listens until the sender connects, and takes one stream. The socket is of this machine's user and network: give
    an address that only the sender can reach, because whoever connects first decides the weights.

    Args:
        address: "unix:/path/to/socket", or "host:port".
        timeout: seconds to wait for the sender, and for each part of its data.

    Memory: one tensor, on the host.

    Raises:
        FzeroValueError: the address is in use, nobody sends within the timeout, or the data ends early or is malformed.

    Example:
        >>> import tempfile, threading, torch, fzero as fz
        >>> net = torch.nn.Linear(2, 3)
        >>> model = fz.functionalize(net)
        >>> address = f"unix:{tempfile.mkdtemp()}/weights"
        >>> sending = threading.Thread(target=fz.hf.stream(model, model.params).send, args=(address,))
        >>> sending.start()
        >>> [(name, list(tensor.shape)) for name, tensor in fz.hf.receive(address)]
        [('weight', [3, 2]), ('bias', [3])]
        >>> sending.join()
    """
    family, at = _parsed(address, "hf.receive")
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.settimeout(timeout)
        if family == socket.AF_INET:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(at)
            if family == socket.AF_UNIX:
                os.chmod(at, 0o600)
            listening.listen(1)
            try:
                connection, _ = listening.accept()
            finally:
                if family == socket.AF_UNIX:
                    Path(at).unlink(missing_ok=True)
        except OSError as error:
            raise _broken(address, f"{type(error).__name__}: {error}") from error
        with connection:
            connection.settimeout(timeout)
            while (one := _next(connection, address)) is not None:
                yield one
            connection.sendall(_DONE)


def _next(connection: socket.socket, address: str) -> tuple[str, torch.Tensor] | None:
    """Reads one message. Returns None for the end."""
    length = int.from_bytes(_exactly(connection, 8, address), "little")
    if length > _MOST_HEADER:
        raise _broken(address, f"a header of {length} bytes")
    try:
        fields = parsed(_exactly(connection, length, address).decode(), dict[str, dict[str, Any]])
        if not fields:
            return None
        ((name, said),) = fields.items()
        dtype, shape = DTYPES[said["dtype"]], tuple(said["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"a shape of {shape}")
        num = math.prod(shape) * dtype.itemsize
        if said["data_offsets"] != [0, num]:
            raise ValueError(f"offsets {said['data_offsets']} for {num} bytes")
    except (Malformed, KeyError, ValueError, TypeError) as error:
        raise _broken(address, f"a malformed header: {error}") from error
    return name, _exactly(connection, num, address, dtype).view(dtype).view(shape)


def _exactly(connection: socket.socket, num: int, address: str, dtype: torch.dtype | None = None) -> Any:
    """Reads so many bytes, as a tensor of bytes if they are those of a dtype."""
    out = torch.empty(num, dtype=torch.uint8, device="cpu")
    view, at = memoryview(out.numpy()), 0  # type: ignore[arg-type]
    while at < num:
        try:
            got = connection.recv_into(view[at:])
        except OSError as error:
            raise _broken(address, f"{type(error).__name__}: {error}") from error
        if not got:
            raise _broken(address, f"the sender has ended after {at} of {num} bytes")
        at += got
    return out if dtype is not None else bytes(view)


def _header(fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


def _parsed(address: Any, owner: str) -> tuple[socket.AddressFamily, Any]:
    """Returns the family and the address of a socket."""
    text = address if isinstance(address, str) else ""
    if text.startswith("unix:") and len(text) > 5:
        return socket.AF_UNIX, text[5:]
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and 0 < int(port) < 65536:
        return socket.AF_INET, (host, int(port))
    what = f"{address!r} is not an address"
    raise FzeroValueError(owner, what, fix="give 'unix:/path/to/socket' or 'host:port', e.g. 'localhost:29600'")


def _broken(address: str, why: str) -> FzeroValueError:
    fix = "look at the sender's own error; then receive and send again"
    return FzeroValueError("hf.receive", f"the weights did not arrive at {address}", [why], fix)
