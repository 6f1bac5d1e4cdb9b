"""Reads the processes of a run from the launcher's environment variables, and computes the sizes of mesh axes from
them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from fzero.errors import FzeroValueError

LOCAL = "local"
"""The axis size "local": the number of processes per host, divided by the product of the axes that follow."""


class Processes(NamedTuple):
    """The position of this process among all processes and among those of its host.

    `local_world` is None if the launcher does not provide it.
    """

    world: int
    rank: int
    local: int
    local_world: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Processes:
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = {n: environment[n] for n in names if n in environment and (environment[n] or n != names[-1])}
        if odd := [f"{n}={text!r}" for n, text in given.items() if not text.strip().lstrip("-").isdecimal()]:
            fix = "start the ranks by torchrun or python -m fzero.run, which set them"
            raise FzeroValueError("make_mesh", "the environment has no integers in", odd, fix)
        world, rank, local = (
            int(environment.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
        )
        said = environment.get("LOCAL_WORLD_SIZE")
        return cls(world, rank, local, int(said) if said else 1 if world == 1 else None)

    @property
    def num_local(self) -> int:
        """The number of processes on this host, or one if it is unknown."""
        return self.local_world or 1

    def axes(self, given: Mapping[str, int | str | Sequence[int]]) -> dict[str, int]:
        """Resolves the sizes of all axes: "local", the axis of size -1, and the first choice that fits if an axis has
        several.

        Raises:
            FzeroValueError: the sizes do not match the number of processes.
        """
        sizes: dict[str, Any] = {name: [n] if isinstance(n, int | str) else n for name, n in given.items()}
        errors = list[FzeroValueError]()
        for some in itertools.product(*sizes.values()):
            try:
                found = self._of(dict(zip(given, some, strict=True)))
                self.check(found)
                return found
            except FzeroValueError as error:
                errors.append(error)
        raise errors[0]

    def _of(self, given: Mapping[str, int | str]) -> dict[str, int]:
        """Resolves the sizes of all axes when each has exactly one given size."""
        sizes: dict[str, Any] = {name: self._local_size(given, name) if n == LOCAL else n for name, n in given.items()}
        rest = math.prod(n for n in sizes.values() if n != -1)
        open_ = [name for name, n in sizes.items() if n == -1]
        if len(open_) > 1:
            self._refuse(
                f"{' and '.join(open_)} are -1, and only one axis can take the remaining processes",
                given,
                f"give all but one a size: make_mesh({open_[0]}=-1, {open_[1]}='local') has a host's processes along "
                f"{open_[1]}",
            )
        if open_ and rest > 0:
            if self.world % rest:
                self._refuse(
                    f"{self.world} processes are not divisible by the product of the given axes, {rest}",
                    sizes,
                    f"give axes whose product divides {self.world}, or start a multiple of {rest} processes; or give "
                    "an axis several sizes, the best first: pipe=(2, 1)",
                )
            sizes[open_[0]] = self.world // rest
        return sizes

    def check(self, axes: Mapping[str, int]) -> None:
        """Raises if these processes do not form a mesh with these axes."""
        size = math.prod(axes.values())
        if size != self.world:
            self._refuse(
                f"a mesh of {size} devices cannot be made from {self.world} processes",
                axes,
                f"start it with `torchrun --nproc-per-node {size}`, or give one axis the size -1",
            )

    def _local_size(self, given: Mapping[str, int | str], name: str) -> int:
        """Returns the number of this host's processes that the following axes leave for this axis.

        The ranks of a host are consecutive.
        """
        names = list(given)
        behind = [given[other] for other in names[names.index(name) + 1 :]]
        if self.local_world is None:
            self._refuse(
                "the number of processes of a host is not known", given, "set LOCAL_WORLD_SIZE, or give a number"
            )
        if LOCAL in behind or -1 in behind:
            self._refuse(
                f"{name}='local' is the number of processes of a host divided by the axes after it, so they need sizes",
                given,
                f"put the axis of size -1 before it: make_mesh(node=-1, {name}='local')",
            )
        size, left = divmod(self.num_local, math.prod(behind))  # type: ignore[arg-type]
        if left or not size:
            self._refuse(
                f"the {self.num_local} processes of this host are not divisible by the axes after {name}='local'",
                given,
                f"give axes after it whose product divides {self.num_local}",
            )
        if self.world % self.num_local or self.rank % self.num_local != self.local:
            self._refuse(
                f"{name}='local' needs the same number of processes on every host, with consecutive ranks",
                given,
                f"start the same number on every host, e.g. torchrun --nnodes N --nproc-per-node {self.num_local}",
            )
        return size

    def _refuse(self, what: str, axes: Mapping[str, int | str], fix: str) -> NoReturn:
        said = [f"axes: {', '.join(f'{k}={v}' for k, v in axes.items())}", f"WORLD_SIZE: {self.world}"]
        if LOCAL in axes.values():
            said.append(f"LOCAL_WORLD_SIZE: {self.local_world}, RANK: {self.rank}, LOCAL_RANK: {self.local}")
        raise FzeroValueError("make_mesh", what, said, fix)


def restarts_left() -> bool:
    """Whether torchrun will restart the ranks if one fails."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most
