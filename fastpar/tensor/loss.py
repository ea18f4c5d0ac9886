"""The next-token loss of a language model whose logits are split over the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastpar.ops.cross_entropy import vocab_parallel_cross_entropy
from fastpar.tensor.vocab import VocabParallelHead


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    head: VocabParallelHead,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Mean next-token cross-entropy from this rank's logits.

        logits  [B, S, V_r]   as `head` returns them
        labels  [B, S]        int64; position t is scored against label t + 1, the last position against nothing

    The conventions are Hugging Face's: `shift_labels` are labels shifted already, and with `num_items_in_batch` the sum
    over tokens is divided by that number instead of the number of tokens that count here (gradient accumulation).
    One collective in forward, none in backward; logits are never gathered.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index}
    if not head.gather_output:
        options |= {"group": head.comm, "vocab_range": head.vocab_range}
    options["shift"] = 1 if shift_labels is None else 0
    target = (labels if shift_labels is None else shift_labels).to(logits.device)
    return vocab_parallel_cross_entropy(logits, target, denominator=num_items_in_batch, **options)
