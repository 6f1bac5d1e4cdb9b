"""Exchanges small values between the ranks of the default process group, as JSON.

What arrives over a connection, or is read from a store that anybody may write to, is treated as data and never as code.

[Note: the open store] torchrun's store, and the one of rank 0, accept every connection that can reach their port, so a
note may have been written by a stranger. Therefore all notes are JSON whose type is checked. Notes that end a run, and
notes of an asynchronous save, are signed. Rank 0 draws the secret and shares it over the process group.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fzero._utils.bounded_json import MOST, Malformed, dumped, parsed
from fzero.errors import DivergenceError

STRANGERS = "let only this run's hosts reach the port of its store (docs/guides/security.md)"
_FIX = "look at the other ranks: they run the same version of fzero, and no other process connects to this run"


def exchanged(mine: Any, form: Any, owner: str) -> list[Any]:
    """Returns every rank's value, ordered by rank, checked against the type `form` (bounded_json.py). All ranks call
    it.

    Communication: two collectives: the length, and as many bytes as the longest compressed text has.

    Raises:
        DivergenceError: on every rank alike; names each rank whose value has another type.
    """
    found, problems = [], []
    for rank, data in enumerate(gathered(zlib.compress(dumped(mine).encode(), 1))):
        try:
            found.append(parsed(_unpacked(data), form))
        except Malformed as error:
            problems.append(f"rank {rank}: {error}")
    if problems:
        raise DivergenceError(owner, "a rank sent a message that is not of the expected form", problems, _FIX)
    return found


def gathered(data: bytes) -> list[bytes]:
    """Returns every rank's bytes, ordered by rank. All ranks call it.

    Communication: a number from each rank, and as many bytes from each rank as the longest has.
    """
    size = dist.get_world_size()
    # Without one of these backends, the group takes tensors on a GPU only (NCCL).
    on_cpu = any(kind in str(dist.get_backend_config()) for kind in ("gloo", "mpi", "ucc", "fake"))
    device = torch.device("cpu" if on_cpu else "cuda")
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    here = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), here)
    longest = max(1, int(lengths.max()))
    # Padded to the longest, because all_gather requires equal sizes. A bytearray, because `frombuffer` warns about
    # memory that is not writable.
    mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(size * longest, dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone.split(longest)), mine.to(device))
    rows = everyone.cpu().view(size, longest).numpy()
    return [rows[rank, :n].tobytes() for rank, n in enumerate(lengths.tolist())]


def gathered_tensors(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns every rank's named tensors on the host, ordered by rank. They are sent as safetensors. All ranks call it.

    Communication: a number from each rank, and as many bytes from each rank as the longest has.
    """
    from safetensors.torch import load, save

    on_host = {name: x.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, x in tensors.items()}
    seen = set[int]()
    for name, x in on_host.items():  # safetensors does not accept tensors that share memory
        if x.untyped_storage().data_ptr() in seen:
            on_host[name] = x.clone()
        seen.add(x.untyped_storage().data_ptr())
    return [load(data) for data in gathered(save(on_host))]


class Notes:
    """Messages of ranks in a store. Each rank writes its own messages, by topic, and reads those of the others.

    Args:
        store: the store of the ranks.
        name: the name of this exchange; unique in the store.
        rank: this rank.
        secret: signs each message, if given.
        refused: makes the error for messages that this run did not write, from one line per message.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        secret: bytes = b"",
        refused: Callable[[list[str]], Exception] = lambda lines: DivergenceError(
            "mesh", "messages in the store are not from this run", lines, STRANGERS
        ),
    ):
        self.store, self._name, self._rank = store, name, rank
        self._secret, self._refused = secret, refused

    def key(self, about: int | str, rank: int | str) -> str:
        """Returns the key in the store of a rank's message."""
        return f"{self._name}/{about}/{rank}"

    def keys(self, about: int | str, ranks: Sequence[int]) -> list[str]:
        return [self.key(about, r) for r in ranks]

    def write(self, about: int | str, value: Any) -> None:
        """Publishes a JSON value."""
        key, text = self.key(about, self._rank), dumped(value)
        self.store.set(key, signed(self._secret, key, text) if self._secret else text)

    def come(self, about: int | str, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have written."""
        return self.store.check(self.keys(about, ranks))

    def read(self, about: int | str, ranks: Sequence[int], form: Any = Any) -> dict[int, Any]:
        """Returns the values that these ranks have written, by rank, checked against the type `form`.

        Raises:
            DivergenceError: messages of another type, or without a valid signature. With `refused`, the error that it
                makes.
        """
        found, problems, keys = {}, [], self.keys(about, ranks)
        for rank, key, data in zip(ranks, keys, self.store.multi_get(keys) if keys else [], strict=True):
            text = proven(self._secret, key, data) if self._secret else data
            try:
                if text is None:
                    raise Malformed("it was not written by this run")
                found[rank] = parsed(text, form)
            except Malformed as error:
                problems.append(f"rank {rank}: {error}: {key}")
        if problems:
            raise self._refused(problems)
        return found

    def clear(self, about: int | str) -> None:
        """Deletes this rank's message, after all ranks have read it."""
        self.store.delete_key(self.key(about, self._rank))


def timed_out(seconds: float) -> str:
    """Returns the phrase for a rank that did not come within the given number of seconds."""
    return f"timed out after {seconds:g} s"


def signed(secret: bytes, key: str, text: str) -> str:
    """Signs a text for a key of a store: prepends a proof that its author knows the secret."""
    return f"{_proof(secret, key, text)} {text}"


def proven(secret: bytes, key: str, data: bytes) -> str | None:
    """Verifies the signature of the text under a key of a store. Returns the text, or None if a stranger wrote it."""
    proof, _, text = data.decode(errors="replace").partition(" ")
    return text if hmac.compare_digest(proof.encode(), _proof(secret, key, text).encode()) else None


def _proof(secret: bytes, key: str, text: str) -> str:
    return hmac.new(secret, f"{key} {text}".encode(errors="replace"), hashlib.sha256).hexdigest()


def _unpacked(data: bytes) -> bytes:
    """Decompresses at most `MOST` bytes, whatever size the data claims to have."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, MOST)
    except zlib.error as error:
        raise Malformed(f"damaged: {error}") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise Malformed(f"more than {MOST} bytes, or cut short")
    return found
