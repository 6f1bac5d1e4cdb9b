"""Attention within packed documents: by a mask it is exact, and flex_attention is rejected with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import fzero as fz
from fzero.errors import TraceError

SEQ = 128
DOCUMENTS = [[(5 * n + 3 * i) % 31 + 1 for i in range(length)] for n, length in enumerate((100, 28, 60, 40, 20, 90))]
BATCH = fz.data.ArrayDataset(fz.data.pack(DOCUMENTS, seq=SEQ), batch=2, shuffle=False).batch_at(0)
PARAMS = {"table": torch.randn(32, 16, generator=torch.Generator().manual_seed(0))} | {
    name: torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i, name in enumerate("qkv")
}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(attend: Attend) -> Callable[[Any, Any], Any]:
    def loss(params: Any, batch: Any) -> Any:
        x = F.embedding(batch["input_ids"], params["table"])
        q, k, v = ((x @ params[name]).unflatten(-1, (2, 8)).transpose(1, 2) for name in "qkv")
        x = x + attend(q, k, v, (batch["position_ids"] == 0).cumsum(1)).transpose(1, 2).flatten(2)
        labels = batch["labels"][:, 1:].flatten()
        total = F.cross_entropy((x[:, :-1] @ params["table"].T).flatten(0, 1), labels, reduction="sum")
        return fz.weighted(total, (labels != -100).sum())

    return loss


def within(documents: torch.Tensor) -> Any:
    """The mask function of causal attention within documents."""
    return lambda b, h, i, j: (i >= j) & (documents[b, i] == documents[b, j])


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    size = len(documents), None, q.shape[2], q.shape[2]
    mask = create_block_mask(within(documents), *size, device=str(q.device))
    return flex_attention(q, k, v, block_mask=mask)  # pyright: ignore[reportReturnType]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The way out that the error names."""
    mask = create_mask(within(documents), len(documents), 1, q.shape[2], q.shape[2], str(q.device))
    return F.scaled_dot_product_attention(q, k, v, mask)


def apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """A loop over the documents, without a mask."""
    out = torch.zeros_like(q)
    for row, ids in enumerate(documents):
        for document in ids.unique():
            at = ids == document
            one = [x[row, :, at][None] for x in (q, k, v)]
            out[row, :, at] = F.scaled_dot_product_attention(one[0], one[1], one[2], is_causal=True)[0]
    return out


def test_a_mask_function_made_dense_is_the_loop_over_documents() -> None:
    plain = fz.train_step(loss_of(apart), fz.optim.sgd(1.0))
    expected, metrics = plain(plain.init(PARAMS), BATCH)
    step = fz.compose(fz.shard_params(), fz.remat("full"))(fz.train_step(loss_of(dense), fz.optim.sgd(1.0)))
    state, found = fz.testing.simulate(step, fz.AbstractMesh(data=2), PARAMS, BATCH)
    torch.testing.assert_close(state.params, expected.params, rtol=0, atol=1e-6)
    assert found["loss"].item() == pytest.approx(metrics["loss"].item(), rel=1e-6)
    assert fz.testing.check_isolation(step, PARAMS, BATCH, fz.AbstractMesh(data=2)) == 0.0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("trains", [True, False])
def test_flex_attention_is_rejected_with_the_line_and_a_way_out(trains: bool) -> None:
    """Where it trains, PyTorch itself rejects it on a CPU; in an evaluation its operator is traced."""
    step = fz.train_step(loss_of(flex), fz.optim.sgd(1.0)) if trains else fz.eval_step(loss_of(flex))
    message = r"(?s)uses flex_attention.*test_packed_attention.py:\d+: return flex_attention.*Fix: .*create_mask\("
    with pytest.raises(TraceError, match=message):
        fz.lower(step, fz.AbstractMesh(data=1), PARAMS, BATCH if trains else (BATCH,))
