"""A vision-language model whose ranks do not all have images, as docs/guides/data.md has it, compared with a plain loop
on the complete batch, in which only the samples with an image have one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import fzero as fz

transformers = pytest.importorskip("transformers")

IMAGE, TOKENS, LENGTH = 63, 4, 16
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def setting() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The model and eight samples, of which the second and the fourth have an image."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=64),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        image_seq_length=TOKENS,
    )
    net = transformers.LlavaForConditionalGeneration(config)
    samples = [{"input_ids": ids} for ids in torch.randint(60, (8, 12))]
    for i in (1, 3):
        samples[i]["input_ids"][i : i + TOKENS] = IMAGE
        samples[i]["pixel_values"] = torch.randn(3, 16, 16)
    return net, samples


def with_image(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    text = sample["input_ids"]
    ids = text if "pixel_values" in sample else torch.cat([text, torch.full((TOKENS,), IMAGE)])

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        return F.pad(x, (0, LENGTH - len(x)), value=value)

    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad(torch.ones_like(text), 0),
        "labels": pad(text.where(text != IMAGE, -100), -100),
        "pixel_values": sample.get("pixel_values", torch.zeros(3, 16, 16)),
    }


def trained(micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Rank 0 of 2 has both images, rank 1 has none."""
    net, samples = setting()
    model = fz.functionalize(net)
    step = fz.accumulate(model.train_step(fz.optim.sgd(0.1)), micro_batches)
    train = fz.compile(fz.shard_params(step), fz.make_mesh(data=-1), backend="eager")
    size, rank = len(samples) // train.mesh.size, train.mesh.rank
    batch = default_collate([with_image(sample) for sample in samples[rank * size : (rank + 1) * size]])
    state, losses = train.init(model.params), []
    for _ in range(3):
        state, metrics = train(state, batch)
        losses.append(float(metrics["loss"]))
    model.write_back(train.gather(state).params)
    return losses, net.state_dict()


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (2, 4)])
def test_loss_and_weights_are_those_of_the_batch_without_images_of_zeros(
    run_ranks: Any, ranks: int, micro_batches: int
) -> None:
    net, samples = setting()
    first = copy.deepcopy(net.state_dict())
    ids = torch.stack([sample["input_ids"] for sample in samples])
    images = torch.stack([sample["pixel_values"] for sample in samples if "pixel_values" in sample])
    sgd, want = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(3):
        loss = net(input_ids=ids, pixel_values=images, labels=ids.where(ids != IMAGE, -100)).loss
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        want.append(float(loss.detach()))
    patches = "model.vision_tower.embeddings.patch_embedding.weight"
    assert not torch.equal(net.state_dict()[patches], first[patches])
    for losses, weights in [trained(micro_batches)] if ranks == 1 else run_ranks(ranks, trained, micro_batches):
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)
        for name, x in net.state_dict().items():
            torch.testing.assert_close(weights[name], x, rtol=1e-5, atol=1e-5, msg=name)


def of_different_shapes(entry: bool) -> None:
    """Rank 1 has an entry of zero rows, or does not have the entry."""
    train = fz.compile(
        fz.data_parallel(fz.train_step(lambda p, b: (b["ids"] * p["w"]).mean(), fz.optim.sgd(0.1))),
        fz.make_mesh(data=-1),
        backend="eager",
    )
    batch = {"ids": torch.ones(4), "images": torch.ones(2 - 2 * train.mesh.rank, 3)}
    if train.mesh.rank == 1 and not entry:
        del batch["images"]
    train(train.init({"w": torch.ones(4)}), batch)


@pytest.mark.parametrize("entry", [True, False])
def test_a_rank_without_rows_of_an_entry_is_an_error_on_all_ranks(run_ranks: Any, entry: bool) -> None:
    theirs = "float32[0, 3]" if entry else "missing"
    for rank in run_ranks(2, of_different_shapes, entry, expect_error=True):
        assert rank.type == "DivergenceError", rank.traceback
        assert f"batch['images']: float32[2, 3] on rank 0, {theirs} on rank 1" in rank.message
        assert "give samples that lack an entry, such as an image, one of zeros" in rank.message


def test_a_missing_image_token_is_reported_with_the_models_own_text() -> None:
    net, samples = setting()
    batch = default_collate([with_image(s) for s in samples])
    batch["input_ids"][1, 1] = 5  # was an image token
    model = fz.functionalize(net)
    train = fz.compile(model.train_step(fz.optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    text = r"(?s)raises, on some rank.*modeling_llava\.py.*Image features and image tokens do not match"
    with pytest.raises(fz.errors.FzeroValueError, match=text):
        train(train.init(model.params), batch)


@pytest.mark.parametrize("selected", [-2, [-2, -1]])
def test_a_model_that_has_been_called_before(selected: Any) -> None:
    """The hooks for hidden states that transformers then has put into a part of the model are not put there twice."""
    net, samples = setting()
    net.config.vision_feature_layer = net.model.config.vision_feature_layer = selected
    net.model.multi_modal_projector = type(net.model.multi_modal_projector)(net.config)
    batch = default_collate([with_image(s) for s in samples])
    expected = net(**batch).loss
    num_hooks = sum(len(m._forward_hooks) for m in net.modules())
    model = fz.functionalize(net)
    assert sum(len(m._forward_hooks) for m in net.modules()) == num_hooks > 0
    train = fz.compile(model.train_step(fz.optim.sgd(0.1)), fz.make_mesh(data=1), backend="eager")
    _, metrics = train(train.init(model.params), batch)
    torch.testing.assert_close(metrics["loss"], expected.detach())
