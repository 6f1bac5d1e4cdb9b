"""Exchanges small values between the ranks of the default process group, as JSON: what comes over a connection, or lies
in a store that anybody may write to, is data and never code.

[Note: the open store] torchrun's store, and that of rank 0, take every connection that can reach their port: a note may
be a stranger's. So all notes are JSON of a form that is checked. Notes that end a run, and notes of a save in the
background, are signed. Rank 0 draws the secret and shares it over the process group.
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

STRANGERS = "let nobody but this run's hosts reach the port of its store (docs/restarts.md, Who may join)"
_FIX = "look at the other ranks: they run the same version of fzero, and nobody else connects to this run"


def exchanged(mine: Any, form: Any, owner: str) -> list[Any]:
    """Every rank's value, by rank, as its form has it (bounded_json.py). All ranks call it.

    Communication: two collectives: a number, and the longest of the compressed texts.

    Raises:
        DivergenceError: on every rank alike, naming whose value is of another form.
    """
    found, problems = [], []
    for rank, data in enumerate(gathered(zlib.compress(dumped(mine).encode(), 1))):
        try:
            found.append(parsed(_unpacked(data), form))
        except Malformed as error:
            problems.append(f"rank {rank}: {error}")
    if problems:
        raise DivergenceError(owner, "what a rank sent is not what is expected", problems, _FIX)
    return found


def gathered(data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank. All ranks call it.

    Communication: a number, and as many bytes of each rank as the longest has.
    """
    size = dist.get_world_size()
    on_cpu = any(kind in str(dist.get_backend_config()) for kind in ("gloo", "mpi", "ucc", "fake"))
    device = torch.device("cpu" if on_cpu else "cuda")
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    here = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), here)
    longest = max(1, int(lengths.max()))
    mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(size * longest, dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone.split(longest)), mine.to(device))
    rows = everyone.cpu().view(size, longest).numpy()
    return [rows[rank, :n].tobytes() for rank, n in enumerate(lengths.tolist())]


def gathered_tensors(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Every rank's tensors by name, on the host, by rank: as safetensors. All ranks call it.

    Communication: a number, and as many bytes of each rank as the longest has.
    """
    from safetensors.torch import load, save

    on_host = {name: x.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, x in tensors.items()}
    seen = set[int]()
    for name, x in on_host.items():  # what shares memory it does not take
        if x.untyped_storage().data_ptr() in seen:
            on_host[name] = x.clone()
        seen.add(x.untyped_storage().data_ptr())
    return [load(data) for data in gathered(save(on_host))]


class Notes:
    """Notes of ranks in a store: each rank writes its own, about one thing after another, and reads those of others.

    Args:
        store: of the ranks.
        name: of this exchange, which no other in the store has.
        rank: this one.
        secret: signs each note, if it is given.
        refused: makes the error of notes that are not this run's, of a line for each.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        secret: bytes = b"",
        refused: Callable[[list[str]], Exception] = lambda lines: DivergenceError(
            "mesh", "notes in the store are not this run's", lines, STRANGERS
        ),
    ):
        self.store, self._name, self._rank = store, name, rank
        self._secret, self._refused = secret, refused

    def key(self, about: int | str, rank: int | str) -> str:
        """The place of a rank's note."""
        return f"{self._name}/{about}/{rank}"

    def keys(self, about: int | str, ranks: Sequence[int]) -> list[str]:
        return [self.key(about, r) for r in ranks]

    def write(self, about: int | str, value: Any) -> None:
        """Says a value of JSON."""
        key, text = self.key(about, self._rank), dumped(value)
        self.store.set(key, signed(self._secret, key, text) if self._secret else text)

    def come(self, about: int | str, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have written."""
        return self.store.check(self.keys(about, ranks))

    def read(self, about: int | str, ranks: Sequence[int], form: Any = Any) -> dict[int, Any]:
        """The values that these ranks have written, by rank, as their form has them.

        Raises:
            DivergenceError: notes of another form, or without a right signature; or what `refused` makes of them.
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
        """Deletes this rank's note: all that read it have."""
        self.store.delete_key(self.key(about, self._rank))


def timed_out(seconds: float) -> str:
    """The words for a rank that did not come in so many seconds."""
    return f"timed out after {seconds:g} s"


def signed(secret: bytes, key: str, text: str) -> str:
    """A text for this place of a store, with a proof that it comes from one who knows the secret."""
    return f"{_proof(secret, key, text)} {text}"


def proven(secret: bytes, key: str, data: bytes) -> str | None:
    """The text that was signed for this place of a store; None: what stands there is a stranger's."""
    proof, _, text = data.decode(errors="replace").partition(" ")
    return text if hmac.compare_digest(proof.encode(), _proof(secret, key, text).encode()) else None


def _proof(secret: bytes, key: str, text: str) -> str:
    return hmac.new(secret, f"{key} {text}".encode(errors="replace"), hashlib.sha256).hexdigest()


def _unpacked(data: bytes) -> bytes:
    """At most `MOST` bytes, whatever the data unpacks to."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, MOST)
    except zlib.error as error:
        raise Malformed(f"damaged: {error}") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise Malformed(f"more than {MOST} bytes, or cut short")
    return found
