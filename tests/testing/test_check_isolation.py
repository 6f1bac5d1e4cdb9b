"""`check_isolation` proves that packed documents are isolated, and names the documents that are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero as fz
from fzero.cli import main
from fzero.errors import EquivalenceError, FzeroTypeError, FzeroValueError

PACKED = fz.data.pack([[1, 2, 3, 4], [5, 6, 7], [2, 4, 6, 1, 3], [7, 1]], seq=8)
BATCH = fz.data.ArrayDataset(PACKED, batch=2, shuffle=False).batch_at(0)
PARAMS = {
    name: fz.random.normal(fz.random.key(i), shape) / 2
    for i, (name, shape) in enumerate({"table": (8, 16), "qkv": (16, 48), "out": (16, 16)}.items())
}


def attention(masked: bool) -> Any:
    """A loss of one layer of attention that is causal, and within documents if `masked`."""

    @fz.block
    def layer(p: Any, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ p["qkv"]).chunk(3, -1)
        mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()
        if masked:
            mask = mask & (documents[:, :, None] == documents[:, None])
        return x + F.scaled_dot_product_attention(q, k, v, mask.expand(len(x), 8, 8)) @ p["out"]

    def loss_fn(params: Any, batch: Any) -> Any:
        x = F.embedding(batch["input_ids"], params["table"])
        x = layer({n: params[n] for n in ("qkv", "out")}, x, (batch["position_ids"] == 0).cumsum(1))
        labels = batch["labels"][:, 1:].flatten()
        total = F.cross_entropy((x @ params["table"].T)[:, :-1].flatten(0, 1), labels, reduction="sum")
        return fz.weighted(total, (labels != -100).sum())

    return loss_fn


@pytest.mark.parametrize(
    ("transforms", "mesh"),
    [
        ((), None),
        ((fz.shard_params(), fz.accumulate(1), fz.remat("full")), fz.AbstractMesh(data=2)),
        ((fz.shard_opt_state(), fz.accumulate(2), fz.mixed_precision("bf16")), None),
    ],
)
def test_documents_are_isolated(transforms: Any, mesh: Any) -> None:
    step = fz.compose(*transforms)(fz.train_step(attention(True), fz.optim.adamw(1e-3)))
    assert fz.testing.check_isolation(step, PARAMS, BATCH, mesh) == 0.0


def test_every_pair_of_documents_that_is_not_isolated_is_named() -> None:
    with pytest.raises(EquivalenceError) as error:
        fz.testing.check_isolation(attention(False), PARAMS, BATCH)
    lines = str(error.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == [
        f"row {row} tokens {later} depends on row {row} tokens {earlier}"
        for row, later, earlier in ((0, "3 to 7", "0 to 2"), (1, "4 to 5", "0 to 3"))
    ]
    assert all("the gradient of params" in line or "the loss" in line for line in lines)


def test_a_target_across_the_border_of_documents_is_found() -> None:
    """The last token of a document predicts the first one of the next document."""
    first = BATCH["position_ids"] == 0
    batch = {**BATCH, "labels": BATCH["input_ids"].where(first & (BATCH["input_ids"] > 0), BATCH["labels"])}
    with pytest.raises(EquivalenceError, match="row 0 tokens 3 to 7 depends on row 0 tokens 0 to 2"):
        fz.testing.check_isolation(attention(True), PARAMS, batch)


def test_documents_can_be_given() -> None:
    """Two rows of one document each: attention is isolated between rows."""
    documents = torch.zeros(2, 8, dtype=torch.int64)
    assert fz.testing.check_isolation(attention(False), PARAMS, BATCH, documents=documents) == 0.0


def test_a_batch_that_proves_nothing_is_rejected() -> None:
    with pytest.raises(FzeroTypeError, match="no 'position_ids' in the batch"):
        fz.testing.check_isolation(attention(True), PARAMS, {n: BATCH[n] for n in ("input_ids", "labels")})
    with pytest.raises(FzeroValueError, match="1 documents"):
        one = {name: x[:1] for name, x in BATCH.items()}
        fz.testing.check_isolation(attention(True), PARAMS, one, documents=torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(FzeroValueError, match="does not depend on its own batch\\['unused'\\]"):
        batch = {**BATCH, "unused": BATCH["input_ids"]}
        fz.testing.check_isolation(attention(True), PARAMS, batch, tokens="unused")


def test_gradients_that_are_all_zero_are_named_and_not_the_tokens() -> None:
    zeros = fz.tree.map(torch.zeros_like, PARAMS)
    with pytest.raises(
        FzeroValueError, match=r"all gradients of every document are zero.*\nFix: give random parameters"
    ):
        fz.testing.check_isolation(attention(True), zeros, BATCH)


def test_a_first_document_of_one_token_has_no_target_and_proves_nothing() -> None:
    positions = torch.tensor([[0, 0, 1, 2, 0, 1, 2, 3]])
    batch = {"input_ids": BATCH["input_ids"][:1], "position_ids": positions}
    batch["labels"] = batch["input_ids"].where(positions != 0, -100)
    batch["labels"][0, 0] = 1
    assert fz.testing.check_isolation(attention(True), PARAMS, batch) == 0.0


def test_a_batch_without_values_is_rejected() -> None:
    with pytest.raises(FzeroTypeError, match="the batch is on the meta device"):
        fz.testing.check_isolation(attention(False), PARAMS, {name: x.to("meta") for name, x in BATCH.items()})


def isolated() -> Any:
    """A target of the command line."""
    return fz.shard_params(fz.train_step(attention(True), fz.optim.adamw(1e-3))), PARAMS, BATCH


def leaking() -> Any:
    return fz.train_step(attention(False), fz.optim.adamw(1e-3)), PARAMS, BATCH


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__file__}:isolated", "--isolation", "--mesh", "data=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"isolated": True, "largest_change": 0.0}
    assert main(["check", f"{__file__}:leaking", "--isolation"]) == 1
    assert "row 1 tokens 4 to 5 depends on row 1 tokens 0 to 3" in capsys.readouterr().err
