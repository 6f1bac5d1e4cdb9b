"""Weights in 4 and 8 bits as leaves of a step: sharded, gathered, offloaded and saved as bytes. Losses equal those
of a plain loop with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero import optim
from fzero.errors import FzeroError, FzeroTypeError, FzeroValueError
from fzero.ops.weight_quantization import NF4

WIDTH, LAYERS, ROWS, RANK = 96, 3, 8, 4
MESH = fz.AbstractMesh(data=2)


def frozen(path: str, leaf: torch.Tensor) -> bool:
    return path.endswith((".codes", ".absmax", "['embed']"))


def trained(path: str, leaf: torch.Tensor) -> bool:
    return not frozen(path, leaf)


@fz.block
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    weight = fz.dequantize(p["w"], x.dtype) if isinstance(p["w"], tuple) else p["w"]
    return x + torch.tanh(F.linear(x, weight) + x @ p["a"] @ p["b"])


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    x = x @ params["embed"]
    for p in params["layers"]:
        x = layer(p, x)
    return (x - y).square().mean()


def params_of(format: str) -> Any:
    """Weights whose codes are all bytes, also those whose pairs are NaNs as 16-bit floating-point numbers."""
    draw = torch.Generator().manual_seed(0)
    layers = []
    for i in range(LAYERS):
        w = fz.quantize(torch.randn(WIDTH, WIDTH, generator=draw) / 10, format)
        every = torch.arange(i, w.codes.numel() + i).to(torch.uint8).view(w.codes.shape)
        w = w._replace(codes=every.view(w.codes.dtype)) if i else w
        a, b = torch.randn(WIDTH, RANK, generator=draw) / 10, torch.randn(RANK, WIDTH, generator=draw) / 10
        layers.append({"w": w, "a": a, "b": b})
    return {"embed": torch.randn(WIDTH, WIDTH, generator=draw) / 10, "layers": layers}


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def plain_losses(format: str, steps: int = 4) -> list[float]:
    params = params_of(format)
    for p in params["layers"]:
        p["w"] = fz.dequantize(p["w"])
    adapters = [p[name].requires_grad_() for p in params["layers"] for name in "ab"]
    adam, losses = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0.1), []
    for _ in range(steps):
        loss = loss_fn(params, batch_of())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def compiled(*transforms: Any) -> Any:
    step = fz.train_step(loss_fn, optim.adamw(1e-2, weight_decay=0.1), trainable=trained)
    return fz.compile(fz.compose(*transforms)(step), fz.make_mesh(data=-1), backend="eager")


TRANSFORMS: dict[str, Any] = {
    "shard_params": lambda: (fz.shard_params(),),
    "remat none": lambda: (fz.shard_params(), fz.remat("none")),
    "remat full, accumulate": lambda: (fz.shard_params(), fz.remat("full"), fz.accumulate(2)),
    "offload": lambda: (fz.shard_params(), fz.offload("cpu", ("params", "opt_state"))),
    "shard_grads": lambda: (fz.shard_grads(),),
}


def run_of_a_rank(format: str, name: str, path: str) -> tuple[list[float], bool, list[str]]:
    """Four steps, with a checkpoint after two of them that another step reads. Returns the losses, whether all codes
    and scales have kept their bits, and the paths that have moments."""
    train = compiled(*TRANSFORMS[name]())
    mesh = train.mesh
    mine = tuple(x.chunk(mesh.size)[mesh.rank] for x in batch_of())
    state, losses = train.init(params_of(format)), []
    for _ in range(2):
        state, metrics = train(state, mine)
        losses.append(float(metrics["loss"]))
    fz.checkpoint.save(path, state)
    again = compiled(*TRANSFORMS[name]())
    state = again.restore(path)
    for _ in range(2):
        state, metrics = again(state, mine)
        losses.append(float(metrics["loss"]))
    found, first = again.gather(state).params, params_of(format)
    kept = all(
        torch.equal(x, y) and x.dtype == y.dtype
        for p, q in zip(found["layers"], first["layers"], strict=True)
        for x, y in zip(p["w"], q["w"], strict=True)
    )
    return losses, kept, fz.tree.names(state.opt_state.mu)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_losses_are_those_of_dequantized_weights(
    run_or_call: Any, tmp_path: Path, format: str, name: str, ranks: int
) -> None:
    want = plain_losses(format)
    assert want[-1] < want[0]
    for losses, kept, moments in run_or_call(ranks, run_of_a_rank, format, name, str(tmp_path / "saved")):
        torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-6)
        assert kept
        assert moments == [f"layers.{i}.{name}" for i in range(LAYERS) for name in "ab"]


@pytest.mark.parametrize(("format", "nbytes"), [("nf4", WIDTH * WIDTH // 2), ("int8", WIDTH * WIDTH)])
def test_bytes_are_gathered_and_nothing_dequantized_is_saved(format: str, nbytes: int) -> None:
    step = fz.train_step(loss_fn, optim.adamw(1e-2), trainable=trained)
    step = fz.compose(fz.shard_params(), fz.remat("none"))(step)
    lowered = fz.lower(step, MESH, params_of(format), batch_of())
    program = lowered.program
    values = {v.name: v for op, _ in program.walk() for v in op.out}
    gathered = [
        v for op, _ in program.walk() if op.op == "wait" for v in op.out if v.dtype in (torch.uint8, torch.int8)
    ]
    assert gathered and all(v.dtype.itemsize * torch.Size(v.shape).numel() == nbytes for v in gathered)
    matrices = [v.name for v in values.values() if v.dtype == torch.float32 and tuple(v.shape) == (WIDTH, WIDTH)]
    assert matrices == ["embed"], "the program never holds a dequantized weight between two ops"
    scales = (WIDTH * WIDTH // 64 if format == "nf4" else WIDTH) * 4
    adapters = 3 * 2 * WIDTH * RANK * 4  # parameters and two moments
    numbers = 8 + 24 + 8  # the step, the key, and the optimizer's count, which are not sharded
    both = WIDTH * WIDTH * 4 + LAYERS * (nbytes + scales + adapters)
    assert lowered.plan.persistent_bytes == both // 2 + numbers


@pytest.mark.parametrize("shape", [(64,), (3, 50), (2, 3, 34), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_numbers_of_the_format(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    nf4 = fz.quantize(x)
    assert nf4.shape == shape and nf4.codes.dtype == torch.uint8
    flat, found = x.float().flatten(), fz.dequantize(nf4).flatten()
    assert torch.equal(fz.dequantize(nf4, torch.bfloat16), fz.dequantize(nf4).bfloat16())
    for i in range(0, flat.numel(), 64):
        block = flat[i : i + 64]
        scale = block.abs().max()
        assert nf4.absmax[i // 64] == scale
        nearest = torch.tensor(NF4)[(block[:, None] / scale - torch.tensor(NF4)).abs().argmin(1)] * scale
        torch.testing.assert_close(found[i : i + 64], nearest, rtol=0, atol=0)
    int8 = fz.quantize(x, "int8")
    scales = x.float().abs().amax(-1, keepdim=True)
    assert int8.shape == shape
    assert ((fz.dequantize(int8) - x.float()).abs() <= scales / 254 * (1 + 1e-5)).all()


def test_zeros_stay_zeros_and_the_first_element_is_in_the_high_bits() -> None:
    x = torch.zeros(2, 64)
    x[1, 0], x[1, 1] = 3.0, -3.0
    nf4 = fz.quantize(x)
    assert nf4.codes[1, 0] == 0xF0 and torch.equal(fz.dequantize(nf4), x)
    assert torch.equal(fz.dequantize(fz.quantize(x, "int8")), x)


def test_what_cannot_be_quantized_is_rejected() -> None:
    with pytest.raises(FzeroValueError, match=r"unknown format 'fp4'\nFix: one of 'nf4', 'int8'"):
        fz.quantize(torch.ones(2, 2), "fp4")
    with pytest.raises(FzeroValueError, match=r"float32\[2, 3\].*odd\nFix: .*int8"):
        fz.quantize(torch.ones(2, 3))
    with pytest.raises(FzeroTypeError, match=r"not int64\[2\]"):
        fz.quantize(torch.arange(2))
    with pytest.raises(FzeroValueError, match="not finite"):
        fz.quantize(torch.tensor([1.0, float("nan")]))
    with pytest.raises(FzeroTypeError, match=r"not float32\[2, 2\]"):
        fz.dequantize((torch.ones(2, 2), torch.ones(1)))  # type: ignore[arg-type]


def test_a_quantized_leaf_is_never_trained() -> None:
    params = params_of("nf4")
    lowered = fz.lower(fz.shard_params(fz.train_step(loss_fn, optim.sgd(0.1))), MESH, params, batch_of())
    assert lowered.program.grads and not any("['w']" in path for path in lowered.program.grads)
    every = fz.train_step(loss_fn, optim.adamw(1e-2), trainable=lambda path, leaf: True)
    says = r"(?s)not trained.*\n  params\['layers'\]\[0\]\['w'\]\.absmax\n.*Fix: trainable="
    with pytest.raises(FzeroTypeError, match=says):
        fz.lower(fz.shard_params(every), MESH, params, batch_of())
    with pytest.raises(FzeroTypeError, match=says):
        every.init(params)
    scales = params["layers"][0]["w"].absmax.requires_grad_()
    with pytest.raises(FzeroValueError, match="scales require a gradient"):
        fz.dequantize(params["layers"][0]["w"]._replace(absmax=scales))


def test_scales_in_another_dtype_are_rejected() -> None:
    step = fz.train_step(loss_fn, optim.adamw(1e-2), trainable=trained)
    rounded = fz.shard_params(fz.mixed_precision(step, "bf16"))
    with pytest.raises(FzeroError, match=r"(?s)scales were converted from float32.*absmax"):
        fz.lower(rounded, MESH, params_of("nf4"), batch_of())
    kept = fz.mixed_precision(step, "bf16", where=lambda path, leaf: not path.endswith(".absmax"))
    fz.lower(fz.shard_params(kept), MESH, params_of("nf4"), batch_of())
