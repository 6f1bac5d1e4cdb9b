"""Lays out a live state for another step on the same processes, without writing a file (`fz.reshard`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fzero import tree
from fzero.checkpoint import tensor_digests
from fzero.checkpoint.index import Index, StoredPart
from fzero.checkpoint.peer_reads import PeerReads
from fzero.checkpoint.safetensors_format import as_bytes
from fzero.checkpoint.saving import SavePlan, make_plan
from fzero.comm import control_group
from fzero.errors import FzeroTypeError, FzeroValueError
from fzero.mesh import Mesh
from fzero.runtime.compiled_step import CompiledStep
from fzero.sharding.layout import extent_of, leaf_of, leave
from fzero.sharding.shard_regions import Boxes
from fzero.step import State
from fzero.step.checks import check_state
from fzero.train_state import check_computed
from fzero.tree import describe

_FIX = "reshard a state that train.init, train.restore or a step returned"


def reshard(state: State, train: CompiledStep) -> State:
    """Lays out a state for another step of the same model and optimizer: another ZeRO stage, other axes, another memory
    tier.

    The result equals, bit for bit, that of saving the state and calling `train.restore`, but no file is written.

    Args:
        state: the state of a compiled step on a mesh of the same processes. It is donated: its tensors are released
            as they are moved, and it cannot be used afterwards.
        train: the step that continues with it.

    Communication: each rank uses the bytes that it already holds, and requests each byte that it lacks once from
        another rank, through host memory; plus an exchange of a small object for each GiB of the new state.
    Memory: the new state, the part of the old state that has not been moved yet (it is released 1 GiB or one tensor
        at a time), and 32 MiB.

    Raises:
        FzeroTypeError: an argument is not a state, or not a compiled step.
        FzeroValueError: tensors that were not made by a compiled step, that are stored on disk, or that belong to other
            processes; states that differ between the ranks; a step whose code computes something else than when it was
            traced. Raised before anything is moved, so the state is unchanged.
        CheckpointError: the state is of another model or optimizer; every difference is listed. The state is
            unchanged.
        DivergenceError: a rank was lost while the state was moved. The state is lost.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.optim.adamw(0.1))
        >>> first, then = (fz.compile(s, fz.make_mesh(), backend="eager") for s in (step, fz.shard_params(step)))
        >>> state = fz.reshard(first.init({"w": torch.ones(2)}), then)
        >>> int(then(state, torch.ones(4, 2))[0].step)
        1
    """
    if not isinstance(train, CompiledStep):
        fix = "fz.reshard(state, fz.compile(step, mesh))"
        raise FzeroTypeError("reshard", f"the second argument is a compiled step, not {describe(train)}", fix=fix)
    mesh = train.mesh
    plan = _plan(state, mesh)
    check_computed(state, "reshard")
    left = {id(x): x for x in tree.leaves(state)}

    def let_go(names: Iterable[str]) -> None:
        for name in names:
            if name.partition(".")[0] in ("params", "opt_state"):  # others may be read twice
                leave(left.pop(id(plan.tensors[name])))

    def take(file: str, offset: int, out: torch.Tensor) -> None:
        value = plan.tensors[file.partition(":")[2]].detach().resolve_conj().resolve_neg().contiguous()
        out.copy_(as_bytes(value)[offset : offset + out.numel()])

    index = Index(
        Path(),
        plan.step,
        plan.leaves,
        plan.aliases,
        plan.treespec,
        {},
        {},
        {
            name: tuple(StoredPart(f"{r}:{name}", name, b, 0) for r, b in _parts(plan, name, mesh))
            for name in plan.parts
        },
        peer_reads=PeerReads(
            mesh, "reshard", f"the state of step {plan.step}", lambda file: int(file.split(":")[0]), take, let_go
        ),
    )
    others = {id(at[1]): at[1] for x in left.values() if (at := leaf_of(x)) is not None and at[1] is not mesh}
    with contextlib.ExitStack() as stack:
        for other in others.values():
            # `restore` reserves only the mesh of the new step. No step may write to the old state meanwhile.
            stack.enter_context(other.alone("reshard"))
        new = train.restore(index, None if train.knows_model else _model(state))
    for x in left.values():
        leave(x)
    return new


def _parts(plan: SavePlan, name: str, mesh: Mesh) -> Iterator[tuple[int, Boxes]]:
    """Yields the ranks that hold elements of a tensor, and which elements; this rank comes first."""
    leaf = leaf_of(plan.tensors[name])
    assert leaf is not None
    # First, so that bytes which this rank holds itself are never requested from another rank.
    yield mesh.rank, leaf[0].boxes(leaf[1])
    yield from plan.parts[name]


def _model(state: State) -> Any:
    """Returns the full parameters on the meta device. Tied parameters stay one tensor."""
    whole: dict[int, torch.Tensor] = {}
    return tree.map(lambda x: whole.setdefault(id(x), leaf_of(x)[0].meta), state.params)  # type: ignore[index]


def _plan(state: Any, mesh: Mesh) -> SavePlan:
    """Returns which rank holds which part of a state. The plan is the same on all ranks, or all of them raise an
    error."""

    def act() -> SavePlan:
        _check(state, mesh)
        return make_plan(state, mesh.rank, mesh.size)

    plan = control_group.run_on_all_ranks(mesh.control, "reshard", act)
    held = {"the state's step, tree, shapes, dtypes or layouts": (plan.digest(), ())}
    tensor_digests.same(mesh, "reshard", lambda: held, "give the same state on every rank")
    return plan


def _check(state: Any, mesh: Mesh) -> None:
    """Raises an error if a state cannot be moved on these processes."""
    check_state(state, _FIX, "reshard")
    here, problems = (mesh.rank, mesh.size), []
    for path, x in tree.with_paths(state, "state"):
        if not isinstance(x, torch.Tensor) or (known := leaf_of(x)) is None:
            problems.append(f"{path}: {describe(x)} that was not made by a compiled step")
        elif (there := (known[1].rank, known[1].size)) != here:
            problems.append(
                f"{path}: belongs to rank {there[0]} of {there[1]}, and this is rank {here[0]} of {here[1]}"
            )
        elif extent_of(x) is not None:
            problems.append(f"{path}: is stored on disk")
    if problems:
        fix = f"{_FIX} on these processes, in memory (fz.move(state, 'cpu')); or save and restore it"
        raise FzeroValueError("reshard", "cannot reshard this state", problems, fix)
