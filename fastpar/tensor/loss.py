"""The losses of a language model whose logits are split over the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fastpar.arguments import checked
from fastpar.ops.cross_entropy import vocab_parallel_cross_entropy
from fastpar.tensor.vocab import VocabParallelHead


@checked()
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

        logits  [B, S, V_r]   as `head` returns them, as a DTensor or not
        labels  [B, S]        int64; position t is scored against label t + 1, the last position against nothing

    The conventions are Hugging Face's: `shift_labels` are labels shifted already, and with `num_items_in_batch` the sum
    over tokens is divided by that number instead of the number of tokens that count here (gradient accumulation).
    One collective in forward, none in backward; logits are never gathered.
    """
    target = labels if shift_labels is None else shift_labels
    return _loss(logits, target, head, num_items_in_batch, ignore_index, shift=1 if shift_labels is None else 0)


@checked()
def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    head: VocabParallelHead,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy of each position against its own label: `causal_lm_loss` without the shift."""
    return _loss(logits, labels, head, num_items_in_batch, ignore_index, shift=0)


def _loss(
    logits: Tensor,
    target: Tensor,
    head: VocabParallelHead,
    num_items_in_batch: int | Tensor | None,
    ignore_index: int,
    *,
    shift: int,
) -> Tensor:
    options: dict[str, Any] = {"ignore_index": ignore_index, "shift": shift, "denominator": num_items_in_batch}
    if isinstance(logits, DTensor):
        logits = logits.to_local()
    if not head.gather_output:
        options |= {"group": head.comm, "vocab_range": head.vocab_range}
    return vocab_parallel_cross_entropy(logits, target.to(logits.device), **options)
