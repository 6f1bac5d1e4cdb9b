"""Computes matrix products with selected parameters in 8-bit floating point.

Acts on the recorded graph, before it is converted to a program: fzero/transforms/fp8_products.py. The stored
parameters, the communicated gradients and the dtype of everything except these products are the same as without this
transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fzero._utils.arguments import accepts, keywords, predicate
from fzero.errors import FzeroTypeError, FzeroValueError, TransformError
from fzero.ops.scaled_matmul import MULTIPLE
from fzero.sharding.layout import Leaf
from fzero.transforms.transform import Transform, applied
from fzero.transforms.zero import Where

SCALES = ("tensor", "row")
CAPABILITY = (8, 9)
"""The lowest CUDA compute capability with tensor cores for 8-bit floating point."""


@dataclass(frozen=True)
class Fp8(Transform):
    """The configuration of `fp8`."""

    scales: str = "tensor"
    where: Where | None = None
    order: ClassVar[int] = 25
    name: ClassVar[str] = "fp8"

    def selects(self, leaf: Leaf) -> bool:
        """Whether products with this parameter are computed in 8 bits: if they can be, and `where` accepts the
        parameter."""
        # `where` may accept any parameter by default, so those that do not fit are left out here. `check` names them
        # only if the user's own `where` selects them.
        return not _unfit(leaf) and accepts(self.name, "where", self.where, leaf.path, leaf.meta)

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raises if `where` accepts parameters that no 8-bit product can read, and names them."""
        wrong = [
            f"{leaf}: {why}"
            for leaf in leaves
            if self.where is not None
            and accepts(self.name, "where", self.where, leaf.path, leaf.meta)
            and (why := _unfit(leaf))
        ]
        if wrong:
            fix = (
                f"select floating-point matrices with dims that are multiples of {MULTIPLE}: where=lambda path, leaf: "
                f"leaf.ndim == 2 and ..."
            )
            raise TransformError(
                self.name, "`where` selects parameters that cannot be multiplied in 8 bits", wrong, fix
            )

    def check_device(self, device: torch.device) -> None:
        """Raises if a device has no 8-bit products, unless it is a CPU, which emulates them."""
        if device.type == "cpu":
            return
        if (
            device.type == "cuda"
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= CAPABILITY
        ):
            return
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        fix = (
            f"a CUDA device of capability {'.'.join(map(str, CAPABILITY))} (Ada, Hopper) or later has them, and a CPU "
            f"emulates them; leave fp8 out here"
        )
        raise FzeroValueError(self.name, f"{kind} has no products in float8_e4m3fn and float8_e5m2", fix=fix)


@keywords
def fp8(
    step: Any = None,
    *,
    scales: str = "tensor",
    where: Where | None = None,
) -> Any:
    """Computes matrix products with selected parameters in 8-bit floating point: those of the forward, of the input's
    gradient, and of the parameter's gradient.

    Each operand is divided by a scale, which follows from its largest magnitude, and rounded to nearest: activations
    and parameters to float8_e4m3fn, values that depend on a gradient to float8_e5m2. Sums are computed in float32; the
    result has the dtype of the product that it replaces. Everything else is unchanged: stored parameters and optimizer
    state, the reduction of gradients, attention, norms, the loss. See docs/transforms/fp8.md.

    Args:
        step: a step; without one a transform is returned.
        scales: "tensor": one scale for each operand; or "row": one for each row of the first operand and each column of
            the second.
        where: predicate `(path, leaf)` that selects parameters; by default all that can be selected: floating-point
            matrices with dims that are multiples of 16. `leaf` is a meta tensor. A tied parameter is selected only if
            all of its paths are. A product is replaced if it reads all of a parameter, through views and casts, and if
            its three dims are multiples of 16; any other product is left unchanged.

    Communication: the same as without it; parameters are gathered in the dtype of `mixed_precision` and rounded
        afterwards. The scale of an activation or a gradient is that of the values that one rank multiplies in one
        micro-batch.
    Memory: values that blocks save for their backward may be saved in 8 bits.

    Raises:
        FzeroValueError: unknown `scales`; from `compile`, a device without such products, unless it is a CPU, which
            emulates them.
        FzeroTypeError: `where` is not a function.
        TransformError: a different `fp8` of the same step; when the program is built, `where` accepts a parameter that
            cannot be multiplied in 8 bits, or the step has no product that can be replaced.

    Papers: Micikevicius et al., FP8 formats for deep learning, 2022. Noune et al., 8-bit numerical formats for deep
        neural networks, 2022.

    Example:
        >>> import torch, fzero as fz
        >>> step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]).square().mean(), fz.optim.adamw(1e-3))
        >>> print(*fp8(step, scales="row").transforms)
        fp8(scales='row')
    """
    if scales not in list(SCALES):
        raise FzeroValueError("fp8", f"unknown scales={scales!r}", fix=f"one of {', '.join(map(repr, SCALES))}")
    if problems := predicate("where", where):
        raise FzeroTypeError("fp8", "invalid arguments", problems, "e.g. where=lambda path, leaf: 'head' not in path")
    return applied(Fp8(scales, where), step)


def _unfit(leaf: Leaf) -> str:
    """Returns the reason why no 8-bit product can read a parameter, or ""."""
    if not leaf.dtype.is_floating_point:
        return "not floating point"
    if leaf.role == "mutable":
        return "the loss function returns its new value"
    if len(leaf.shape) != 2:
        return f"{len(leaf.shape)}-d, not a matrix"
    odd = [str(n) for n in leaf.shape if n % MULTIPLE]
    what = "not multiples" if len(odd) > 1 else "not a multiple"
    return f"{' and '.join(odd)}: {what} of {MULTIPLE}" if odd else ""
