"""The transforms that tests compose with each other, by name: the matrix of pairs and the changed numbers.

What composes is decided by the transforms; a new transform or option gets one line here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import fzero as fz


@dataclass(frozen=True)
class Piece:
    """Transforms that are put on a step together.

    Attributes:
        make: the transforms.
        axes: the mesh axes that they need, of two ranks each.
        needs: transforms without which they mean nothing. They are added unless another piece has one of their kind.
        common: whether its pairs are tested in the default tier. The others differ from a common one in an option.
        any_size: whether it applies to models of any size, however small or odd.
    """

    make: Callable[[], list[Any]]
    axes: tuple[str, ...] = ()
    needs: Callable[[], list[Any]] = list
    common: bool = True
    any_size: bool = True


def of_experts(path: str, leaf: Any) -> bool:
    return "expert_" in path


DISK = tempfile.gettempdir()  # only named in a program: simulated ranks keep the values of every tier in memory
STATE = ("params", "opt_state")

PIECES: dict[str, Piece] = {
    "data_parallel": Piece(lambda: [fz.data_parallel()], ("data",)),
    "zero_1": Piece(lambda: [fz.shard_opt_state()], ("data",)),
    "zero_2": Piece(lambda: [fz.shard_grads()], ("data",)),
    "zero_3": Piece(lambda: [fz.shard_params()], ("data",)),
    "zero_3_two_axes": Piece(lambda: [fz.shard_params(axis=("data", "node"))], ("data", "node")),
    "zero_3_state_two_axes": Piece(
        lambda: [fz.shard_params(), fz.shard_opt_state(axis=("data", "node"))], ("data", "node"), common=False
    ),
    "zero_3_replicated": Piece(
        lambda: [fz.shard_params(), fz.data_parallel(axis="replica")], ("data", "replica"), common=False
    ),
    "hierarchical": Piece(
        lambda: [fz.shard_params(axis=("data", "node")), fz.hierarchical(axis="node")],
        ("data", "node"),
        needs=lambda: [fz.accumulate(2)],
    ),
    "tensor": Piece(lambda: [fz.tensor_parallel()], ("model",)),
    "tensor_sequence": Piece(lambda: [fz.tensor_parallel(sequence=True)], ("model",)),
    "sequence": Piece(lambda: [fz.sequence_parallel()], ("seq",)),
    "expert": Piece(lambda: [fz.expert_parallel(where=of_experts)], ("expert",)),
    "pipeline": Piece(lambda: [fz.pipeline()], ("pipe",), needs=lambda: [fz.accumulate(2, schedule="layerwise")]),
    "pipeline_zb": Piece(
        lambda: [fz.pipeline(schedule="zb")],
        ("pipe",),
        needs=lambda: [fz.accumulate(2, schedule="layerwise")],
        common=False,
    ),
    "accumulate": Piece(lambda: [fz.accumulate(2)]),
    "accumulate_layerwise": Piece(lambda: [fz.accumulate(2, schedule="layerwise")]),
    "remat_full": Piece(lambda: [fz.remat("full")]),
    "remat_none": Piece(lambda: [fz.remat("none")], common=False),
    "bf16": Piece(lambda: [fz.mixed_precision("bf16")]),
    "bf16_stored": Piece(lambda: [fz.mixed_precision("bf16", params="bf16", rounding="nearest")], common=False),
    "fp16": Piece(lambda: [fz.mixed_precision("fp16")]),
    "fp8": Piece(lambda: [fz.fp8()], needs=lambda: [fz.mixed_precision("bf16")], any_size=False),
    "compress": Piece(lambda: [fz.compress()], ("data",), needs=lambda: [fz.shard_params()], any_size=False),
    "offload_host": Piece(lambda: [fz.offload("cpu", STATE)]),
    "offload_disk": Piece(lambda: [fz.offload("nvme", STATE, path=DISK)]),
    "redundant": Piece(lambda: [fz.redundant()], ("data",), needs=lambda: [fz.shard_params()]),
}
ZERO_STAGES = ("data_parallel", "shard_opt_state", "shard_grads", "shard_params")


def kind(transform: Any) -> str:
    """Two transforms of a kind conflict, or one is enough."""
    return "stage" if transform.name in ZERO_STAGES else transform.name


def composed(names: Iterable[str]) -> tuple[list[Any], dict[str, int]]:
    """The transforms of some pieces with all that they need, and the axes of a mesh for them."""
    pieces = [PIECES[name] for name in names]
    transforms = [t for piece in pieces for t in piece.make()]
    for needed in (t for piece in pieces for t in piece.needs()):
        if kind(needed) not in map(kind, transforms):
            transforms.append(needed)
    return transforms, {axis: 2 for piece in pieces for axis in piece.axes}
