"""Pipelines over split sequences: every stage attends by the documents of its microbatch, and the numbers are those of
one process."""

from __future__ import annotations

import pytest

from tests.context.context_pipeline_ranks import PipeCase, compare_pipelines, refusals
from tests.dist import run_ranks

pytest.importorskip("transformers")

import fastpar as fp

CASES = [
    PipeCase(),
    PipeCase("zbv", None),
    PipeCase("interleaved_1f1b", options={"schedule_options": {"stages_per_rank": 2}}),
    PipeCase(loss="cross_entropy", options={"recompute": fp.recompute.Full()}),
    PipeCase(loss="sum", layout="striped"),
    PipeCase(loss="cross_entropy", options={"shard_head": True}),
]


@pytest.mark.expensive
def test_loss_and_gradients_of_pipelines_equal_one_process() -> None:
    counts = run_ranks(4, compare_pipelines, {"pp": 2, "cp": 2}, "llama", CASES)
    assert all(min(found) > 0 for found in counts)


def test_what_is_no_part_of_a_loss_or_batch_is_refused_on_every_rank() -> None:
    words = [
        "updates the weights on its way",
        "loss=sum_of_tokens, reduction='mean'",
        "reduction='microbatch_mean'",
        "no batch is split yet",
        "documents of fastpar.context.shard differs",
        "needs shift_labels and num_items_in_batch",
        "fastpar.context.shard was given a batch of 2",
        "targets count, but of the labels",
        "the loss needs labels",
    ]
    for found in run_ranks(4, refusals):
        for text, word in zip(found, words, strict=True):
            assert word in text, (word, text)
