"""Models on sequences that are split over ranks: the numbers of one process, in every layout, stage and family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastpar as fp
from fastpar.context import ContextRegion
from tests.context_ranks import (
    FAMILIES,
    PACKED,
    TOKENS,
    Own,
    compare_families,
    compare_steps,
    errors,
    own_model,
    perturb_a_document,
    recompute_two_batches,
    whole_batch,
)
from tests.dist import run_ranks

pytest.importorskip("transformers")


def test_shift_and_positions_of_packed_documents() -> None:
    region = ContextRegion(None)
    model = Own(region)
    ids = torch.arange(10).view(1, 10)
    batch = fp.context.shard(model, {"input_ids": ids, "labels": ids}, documents=[4, 0, 6])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert batch["shift_labels"].tolist() == [[1, 2, 3, -100, 5, 6, 7, 8, 9, -100]]
    assert batch["labels"] is batch["shift_labels"]
    assert float(batch["num_items_in_batch"]) == 8
    assert region.placement.documents == ((4, 0, 6),)
    given = fp.context.shard(model, {"input_ids": ids, "position_ids": ids + 7})
    assert given["position_ids"].tolist() == (ids + 7).tolist()
    assert set(given) == {"input_ids", "position_ids"}


def test_a_recomputed_layer_gets_the_placement_of_its_forward_back() -> None:
    region = ContextRegion(None)
    first = region.place(8)
    restored = region.capture()
    second = region.place(10)
    with restored():
        assert region.placement is first
    assert region.placement is second


@pytest.mark.expensive
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_family_equal_one_process(family: str) -> None:
    run_ranks(2, compare_families, {family: FAMILIES[family]}, {"cp": 2}, {})


@pytest.mark.expensive
@pytest.mark.parametrize("sizes", [{"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_loss_and_gradients_on_other_meshes_equal_one_process(sizes: dict[str, int]) -> None:
    size = sizes["cp"] * sizes.get("tp", 1)
    run_ranks(size, compare_families, {"llama": FAMILIES["llama"]}, sizes, {})


@pytest.mark.expensive
@pytest.mark.parametrize(
    "options",
    [{"layout": "striped"}, {"layout": "dealt", "block": 4}, {"method": "ulysses"}, {"method": "gather"}],
    ids=str,
)
def test_every_layout_and_method_gives_the_same_model(options: dict[str, Any]) -> None:
    run_ranks(2, compare_families, {"gemma2": FAMILIES["gemma2"]}, {"cp": 2}, options)


@pytest.mark.expensive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_steps_with_zero_equal_one_process(stage: int) -> None:
    run_ranks(2, compare_steps, {"cp": 2}, stage, PACKED)


@pytest.mark.expensive
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("sizes", [{"cp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_training_steps_on_four_ranks_equal_one_process(sizes: dict[str, int], stage: int) -> None:
    run_ranks(4, compare_steps, sizes, stage, None)


def test_a_document_does_not_see_another() -> None:
    for first, second in run_ranks(2, perturb_a_document):
        assert first > 0.01
        assert second == 0.0


@pytest.mark.expensive
def test_recomputed_layers_attend_over_the_batch_of_their_forward() -> None:
    run_ranks(2, recompute_two_batches)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_model_of_ones_own_has_the_outputs_and_dropout_masks_of_one_rank(dropout: float) -> None:
    (expected, _), *_ = run_ranks(1, own_model, "contiguous", 1, dropout)
    for layout in ("zigzag", "dealt"):
        for whole, _ in run_ranks(3, own_model, layout, 3, dropout):
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_split_is_refused_with_what_would_work() -> None:
    for found in run_ranks(4, errors):
        words = [
            "no batch is split yet",
            "q and k must have the ",
            "attention_mask has zeros",
            "output_attentions",
            "documents add up to 36 tokens, but input_ids have 37",
            "must be equal on all ranks",
            "pixel_values",
            "attention_mask has zeros",
            "",
            "is 'linear_attention': context parallelism splits softmax attention only",
            "does not know the attention of Sequential",
            "6 query heads / tp 1 = 6 cannot be spread over 4 ranks evenly; 1, 2, 3, 6 can",
            "no layer of this LlamaForCausalLM attends over a split sequence",
            "a pipeline cannot split sequences: the mesh has cp=4",
        ]
        for text, word in zip(found, words, strict=True):
            assert word in text, (word, text)
            assert text != "accepted"


def test_tokens_and_batch_of_the_helpers_fit() -> None:
    assert all(sum(row) == TOKENS for row in PACKED)
    assert whole_batch()["input_ids"].shape == (2, TOKENS)
