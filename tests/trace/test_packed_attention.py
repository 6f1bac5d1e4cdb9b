"""Attention within packed documents, by a dense mask and by flex_attention, under transforms."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

import fzero as fz

SEQ, HEADS = 128, 4
DOCUMENTS = [[(5 * n + 3 * i) % 31 + 1 for i in range(length)] for n, length in enumerate((100, 28, 60, 40, 20, 90))]
BATCH = fz.data.ArrayDataset(fz.data.pack(DOCUMENTS, seq=SEQ), batch=2, shuffle=False).batch_at(0)
SHAPES = {"q": (32, 32), "k": (32, 16), "v": (32, 16), "o": (32, 32)}  # two heads of keys
PARAMS: dict[str, torch.Tensor] = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + i)) / 4
    for i, (name, shape) in enumerate({**SHAPES, "table": (32, 32), "bias": (HEADS, 2 * SEQ)}.items())
}
Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
COMPILED = torch.compile(flex_attention)


def loss_of(attend: Attend, mask_of: Callable[[torch.Tensor], Any] = lambda documents: documents) -> Any:
    @fz.block
    def layer(p: Any, x: torch.Tensor, mask: Any) -> torch.Tensor:
        q, k, v = ((x @ p[name]).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
        return x + attend(p, q, k, v, mask).transpose(1, 2).flatten(2) @ p["o"]

    def loss(params: Any, batch: Any) -> Any:
        x, p = F.embedding(batch["input_ids"], params["table"]), {name: params[name] for name in (*SHAPES, "bias")}
        mask = mask_of((batch["position_ids"] == 0).cumsum(1))
        for _ in range(2):
            x = layer(p, x, mask)
        labels = batch["labels"][:, 1:].flatten()
        total = F.cross_entropy((x[:, :-1] @ params["table"].T).flatten(0, 1), labels, reduction="sum")
        return fz.weighted(total, (labels != -100).sum())

    return loss


def within(documents: torch.Tensor) -> Any:
    """The mask function of causal attention within documents."""
    return lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j])


def uneven(documents: torch.Tensor) -> Any:
    """A mask function that differs between heads and leaves a query without keys."""
    return lambda b, h, i, j: within(documents)(b, h, i, j) & ((h < 3) | (i - j < 9)) & (i != 5)


def blocks_of(mask_mod: Callable[[torch.Tensor], Any], heads: int | None = None) -> Callable[[torch.Tensor], BlockMask]:
    return lambda documents: create_block_mask(
        mask_mod(documents), len(documents), heads, SEQ, SEQ, device=str(documents.device)
    )


def score_of(p: Any) -> Any:
    """A score function with everything that users write: a soft cap, a learned bias by distance, ALiBi."""
    return lambda s, b, h, i, j: 5 * torch.tanh(s / 5) + p["bias"][h, i - j + SEQ] - (i - j).abs() * 2.0 ** -(h + 1)


def flex(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # pyright: ignore[reportReturnType]


def flex_inside(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    return COMPILED(q, k, v, block_mask=blocks_of(within)(documents), enable_gqa=True)  # pyright: ignore


def scored(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    out, aux = flex_attention(
        q, k, v, block_mask=mask, score_mod=score_of(p), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert aux.lse is not None
    return out * torch.where(aux.lse.isinf(), 0, aux.lse.sin())[..., None]


def masked(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    mask = create_mask(within(documents), len(documents), 1, SEQ, SEQ, str(q.device))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def apart(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """A loop over the documents, without a mask."""
    out = torch.zeros_like(q)
    for row, ids in enumerate(documents):
        for document in ids.unique():
            at = ids == document
            one = [x[row, :, at][None] for x in (q, k, v)]
            out[row, :, at] = F.scaled_dot_product_attention(one[0], one[1], one[2], is_causal=True, enable_gqa=True)[0]
    return out


def by_hand(p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """What `scored` computes with the mask function `uneven`, on the indices of all pairs."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (len(documents), HEADS, SEQ, SEQ)), indexing="ij")
    allowed = uneven(documents)(b, h, i, j)
    scores = torch.where(allowed, score_of(p)(q @ k.mT / math.sqrt(8), b, h, i, j), -1e30)
    shares = torch.where(allowed.any(-1, keepdim=True), scores.softmax(-1), 0)
    return shares @ v * torch.where(allowed.any(-1), scores.logsumexp(-1).sin(), 0)[..., None]


WAYS: dict[str, tuple[Any, Any]] = {
    "a dense mask": (loss_of(masked), apart),
    "flex_attention, its mask passed to blocks": (loss_of(flex, blocks_of(within)), apart),
    "flex_attention, compiled, its mask made in blocks": (loss_of(flex_inside), apart),
    "flex_attention with scores": (loss_of(scored, blocks_of(uneven, HEADS)), by_hand),
}
TRANSFORMS: dict[str, tuple[tuple[Any, ...], fz.AbstractMesh]] = {
    "plain": ((), fz.AbstractMesh(data=1)),
    "ZeRO-3, remat": ((fz.shard_params(), fz.remat("full")), fz.AbstractMesh(data=2)),
    "accumulate": ((fz.accumulate(2),), fz.AbstractMesh(data=1)),
    "heads": ((fz.tensor_parallel(rules={"q": 1, "k": 1, "v": 1, "o": 0}),), fz.AbstractMesh(model=2)),
    "positions for heads": ((fz.sequence_parallel(),), fz.AbstractMesh(seq=2)),
    "keys of all positions": ((fz.sequence_parallel(attention="keys"),), fz.AbstractMesh(seq=8)),
}


@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_the_dense_reference(way: str, transforms: str) -> None:
    loss, reference = WAYS[way]
    given, mesh = TRANSFORMS[transforms]
    plain = fz.train_step(loss_of(reference), fz.optim.sgd(1.0))
    expected, metrics = plain(plain.init(PARAMS), BATCH)
    step = fz.compose(*given)(fz.train_step(loss, fz.optim.sgd(1.0)))
    state, found = fz.testing.simulate(step, mesh, PARAMS, BATCH)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=2e-6)
    assert found["loss"].item() == pytest.approx(metrics["loss"].item(), rel=1e-6)


def test_a_score_function_may_work_in_place() -> None:
    def in_place(p: Any) -> Any:
        def score(s: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
            s += p["bias"][h, i - j + SEQ]
            return s.mul_(2).masked_fill_(i < j, -math.inf)

        return score

    def out_of_place(p: Any) -> Any:
        return lambda s, b, h, i, j: torch.where(i < j, -math.inf, (s + p["bias"][h, i - j + SEQ]) * 2)

    found = []
    for made in (in_place, out_of_place):
        attend = lambda p, q, k, v, _, made=made: flex_attention(q, k, v, score_mod=made(p), enable_gqa=True)  # noqa: E731
        step = fz.train_step(loss_of(attend), fz.optim.sgd(1.0))
        found.append(fz.testing.simulate(step, fz.AbstractMesh(data=1), PARAMS, BATCH))
    (state, metrics), (other, others) = found
    assert metrics["loss"].item() == others["loss"].item()
    torch.testing.assert_close(state.params, other.params)
    assert not torch.equal(state.params["bias"], PARAMS["bias"])


@pytest.mark.parametrize("way", WAYS)
def test_documents_are_isolated_to_the_bit(way: str) -> None:
    step = fz.shard_params()(fz.train_step(WAYS[way][0], fz.optim.sgd(1.0)))
    assert fz.testing.check_isolation(step, PARAMS, BATCH, fz.AbstractMesh(data=2)) == 0.0


@pytest.mark.parametrize("way", ["flex_attention, its mask passed to blocks", "flex_attention with scores"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_compiled_step_has_one_program_for_all_documents(way: str, backend: Any) -> None:
    loss, reference = WAYS[way]
    plain = fz.train_step(loss_of(reference), fz.optim.sgd(0.1))
    expected = plain.init(PARAMS)
    train = fz.compile(fz.train_step(loss, fz.optim.sgd(0.1)), fz.make_mesh(), backend=backend)
    state, programs = train.init(PARAMS), []
    other = {**BATCH, "position_ids": BATCH["position_ids"].flip(0)}
    for batch in (BATCH, other):
        expected, _ = plain(expected, batch)
        state, _ = train(state, batch)
        programs.append(train.program)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=1e-6)
    assert programs[0] is programs[1]


def test_a_mask_is_computed_once_for_all_blocks_and_its_attention_is_counted() -> None:
    flops = {}
    for way in ("a dense mask", "flex_attention, its mask passed to blocks"):
        lowered = fz.lower(fz.train_step(WAYS[way][0], fz.optim.sgd(1.0)), fz.AbstractMesh(data=1), PARAMS, BATCH)
        flops[way] = lowered.plan.model_flops
    assert str(lowered).count(f"bool[2, 1, {SEQ}, {SEQ}]") == 1
    assert len({*flops.values()}) == 1


def test_under_autocast_the_operands_are_rounded_and_the_scores_are_not() -> None:
    def attended(way: Attend, enabled: bool) -> Any:
        loss = loss_of(way, blocks_of(within))

        def cast(params: Any, batch: Any) -> Any:
            with torch.autocast("cpu", enabled=enabled):
                return loss(params, batch)

        step = fz.train_step(cast, fz.optim.sgd(1.0))
        return fz.testing.simulate(step, fz.AbstractMesh(data=1), PARAMS, BATCH)[1]["loss"].item()

    for way in (flex, scored):
        low, wide = attended(way, True), attended(way, False)
        assert low == pytest.approx(wide, rel=1e-2)
        assert low != wide


def test_outside_of_a_trace_flex_attention_is_pytorchs() -> None:
    """Also in another thread while a trace runs."""
    q = torch.ones(1, 2, SEQ, 8, requires_grad=True)
    said: list[str] = []

    def other() -> None:
        with pytest.raises(NotImplementedError, match="backward on CPU") as caught:
            flex_attention(q, q, q)
        said.append(str(caught.value))

    def loss(params: Any, batch: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return (params * batch).sum()

    fz.lower(fz.train_step(loss, fz.optim.sgd(1.0)), fz.AbstractMesh(data=1), torch.ones(2), torch.ones(2))
    other()
    assert len(said) == 2
