"""Batches whose sequences are split over the ranks of a region.

Note: the scale of losses
    A loss is the sum over a batch's tokens divided by how many count, T. Each rank's loss is its own sum divided by T:
    the sum over the ranks is the loss, and gradients are summed over cp, while they are averaged over data parallelism,
    in every ZeRO stage. So `num_items_in_batch`, by which Hugging Face's losses divide, is T. It is counted before
    anything is cut, and a rank whose labels all are -100 has a loss of 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.agree import Agreement
from fastpar.comm.ranges import annotate
from fastpar.context.region import ContextRegion, HasModules, region_of
from fastpar.contracts.attention import positions

IGNORE_INDEX = -100
_KEYS = ("input_ids", "labels", "position_ids", "attention_mask")
_WEIGHTS = (
    "the model's weights (checksums; gradients have to be summed over cp before the optimizer's step, as "
    "fastpar.zero.shard(model, optimizer, group=mesh) does)"
)
Documents = Sequence[int] | Sequence[Sequence[int]]


@checked(computed=False, but=("model",))
def shard(model: HasModules, batch: Mapping[str, Any], *, documents: Documents | None = None) -> dict[str, Any]:
    """This rank's tokens of a batch, and the placement of all of them in the model's region.

        input_ids           [B, S] -> [B, s]     this rank's tokens, in the order of its layout
        position_ids        [B, s]               positions within their documents, or this rank's part of those given
        labels              [B, S] -> [B, s]     shifted by one before the cut: the label behind, also where that lies
                                                 on another rank; -100 for the last token of a document
        shift_labels        [B, s]               the same: what Hugging Face's losses take as labels shifted already
        num_items_in_batch  an int64 scalar      labels that count, of all ranks (Note: the scale of losses)

    model is a module, or a `Pipeline` of stages: then every rank of it calls this with the batch of one step, whose
    rows the pipeline cuts into microbatches.

    Every rank of the group calls it with the same whole batch; tensors without labels give no labels and no number.
    `model(**batch).loss` is then this rank's part; `fp.context.total(model, loss)` is the whole loss, for logs.

    documents  lengths of the documents that are packed into a row, for all rows or for each: a token sees its own
               document alone. They are never guessed from position_ids

    One all-gather of a few numbers, by which ranks compare their batches. Raises, on every rank:
        ValueError: documents that do not add up to the sequence; position_ids that begin anew, without documents; fewer
            tokens than ranks; weights that differ between ranks, in the first calls and from time to time, since nobody
            has summed the gradients; labels for a model whose loss is not transformers' next-token loss; an
            attention_mask with zeros; other keys than these; batches or documents that differ between ranks.
    """
    region = region_of(model)
    problem: Exception | None = None
    lengths, checksum = None, [0, 0, 0, 0]
    try:
        lengths = check_batch(batch, documents)
        _check_tokens(batch, lengths, region)
        checksum = [*_checksum(batch, lengths), region.checks.next(model)]
    except (TypeError, ValueError) as error:
        problem = error
    names = ("the shape of input_ids", "the batch", "documents", _WEIGHTS)
    with annotate("fastpar::context::shard"):
        Agreement("context.shard", names, checksum, problem).gather(region.comm)
    ids: Tensor = batch["input_ids"]
    placement = region.place(ids.shape[1], lengths, len(ids), device=ids.device)
    where = positions(placement.layout[region.comm.rank]).to(ids.device)
    given = batch.get("position_ids")
    whole = _document_positions(ids, lengths) if given is None else given.expand(ids.shape[0], -1)
    region.note_positions(whole)
    cut: dict[str, Any] = {"input_ids": ids[:, where], "position_ids": whole[:, where]}
    if batch.get("labels") is not None:
        shifted = shift_labels(batch["labels"], lengths)
        cut["labels"] = cut["shift_labels"] = shifted[:, where]
        cut["num_items_in_batch"] = (shifted != IGNORE_INDEX).sum()
        here = int((cut["labels"] != IGNORE_INDEX).sum())
        region.count_labels(here, int(cut["num_items_in_batch"]))
    return cut


@checked(computed=False, but=("model",))
def total(model: HasModules, loss: Tensor) -> Tensor:
    """The loss over all ranks of the model's region, without history: the sum of theirs. One all-reduce.

    Note: the scale of losses, above. For logs: backward starts at each rank's own loss.
    """
    comm = region_of(model).comm
    with annotate("fastpar::context::total"):
        whole: Tensor = comm.all_reduce(loss.detach().clone())
    return whole


def check_batch(batch: Mapping[str, Any], documents: Documents | None) -> tuple[tuple[int, ...], ...] | None:
    """The documents of each row. Raises for a batch that cannot be cut."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        found = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"batch needs input_ids [B, S], got {found}")
    unknown = [key for key in batch if key not in _KEYS and batch[key] is not None]
    if unknown:
        raise ValueError(f"batch has {unknown}, and it is not known how to cut them; known are {list(_KEYS)}")
    for name in _KEYS[1:]:
        value = batch.get(name)
        shapes = [ids.shape, (1, ids.shape[1])] if name == "position_ids" else [ids.shape]
        if value is not None and (not isinstance(value, Tensor) or value.shape not in shapes):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be of the shape of input_ids, {list(ids.shape)}, got {found}")
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError(
            "attention_mask has zeros, and context parallelism has no padding: leave the mask away and say documents=, "
            "with the padding as one of them, and -100 as its labels"
        )
    return document_rows(documents, *ids.shape)


def _check_tokens(batch: Mapping[str, Any], lengths: Any, region: ContextRegion) -> None:
    """What has the right shape, and would be cut or read in another way than is meant."""
    tokens, given = batch["input_ids"].shape[1], batch.get("position_ids")
    if tokens < region.comm.size:
        raise ValueError(f"input_ids have {tokens} tokens, fewer than the {region.comm.size} ranks they are split over")
    if batch.get("labels") is not None and region.labels_problem:
        raise ValueError(region.labels_problem)
    if given is not None and lengths is None and bool((given.diff(dim=1) != 1).any()):
        raise ValueError(
            "position_ids do not count on from token to token: where they begin anew transformers takes documents for "
            f"packed, which are never guessed here. Say documents=, or documents=[{tokens}] for one"
        )


def document_rows(documents: Documents | None, rows: int, tokens: int) -> tuple[tuple[int, ...], ...] | None:
    if documents is None:
        return None
    nested: list[Any] = list(documents)
    is_shared = not any(isinstance(row, Sequence) for row in nested)
    lengths = (tuple(nested),) if is_shared else tuple(tuple(row) for row in nested)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for row in lengths for n in row):
        raise ValueError(f"documents must be lengths, integers that are not negative, got {documents}")
    if len(lengths) not in (1, rows):
        raise ValueError(f"documents must be lengths for all rows or for each of the {rows}, got {len(lengths)} rows")
    for row in lengths:
        if sum(row) != tokens:
            raise ValueError(f"documents add up to {sum(row)} tokens, but input_ids have {tokens}")
    return lengths


def _checksum(batch: Mapping[str, Any], lengths: tuple[tuple[int, ...], ...] | None) -> list[int]:
    """Three numbers that differ where batches do: by the shape, the tensors and the documents."""
    shape = batch["input_ids"].shape
    content = 0
    for name in _KEYS[:3]:
        value = batch.get(name)
        if value is not None:  # in int64, which wraps; a place counts by its index
            flat = value.flatten().long()
            content = content * 31 + int((flat * (torch.arange(len(flat), device=flat.device) * 2 + 1)).sum())
    return [shape[0] << 32 | shape[1], content % (1 << 62), hash(lengths) % (1 << 62) if lengths else 0]


def _document_starts(lengths: tuple[tuple[int, ...], ...] | None, tokens: int) -> Tensor:
    """Where the document of each token starts: int64 [rows of `lengths` or 1, S]."""
    if lengths is None:
        return torch.zeros(1, tokens, dtype=torch.int64)
    sizes = [torch.tensor(row, dtype=torch.int64) for row in lengths]
    return torch.stack([(n.cumsum(0) - n).repeat_interleave(n) for n in sizes])


def _document_positions(ids: Tensor, lengths: tuple[tuple[int, ...], ...] | None) -> Tensor:
    rows, tokens = ids.shape
    within = torch.arange(tokens) - _document_starts(lengths, tokens)
    return within.expand(rows, -1).to(ids.device)


def shift_labels(labels: Tensor, lengths: tuple[tuple[int, ...], ...] | None) -> Tensor:
    """The label behind each token; -100 for the last of a document."""
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    for row, sizes in enumerate(lengths or ()):
        ends = [end - 1 for end in itertools.accumulate(n for n in sizes if n)]
        shifted[slice(None) if len(lengths or ()) == 1 else row, ..., ends] = IGNORE_INDEX
    return shifted


__all__ = ["IGNORE_INDEX", "shard", "total"]
