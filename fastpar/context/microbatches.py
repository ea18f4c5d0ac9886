"""The batch of a region, microbatch by microbatch: what a pipeline asks of sequences that are split.

Note: one layout for a batch
    All rows of a batch have the same layout, so that they are one tensor on every rank; documents may differ from row
    to row, and each microbatch attends by those of its own rows.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastpar.context.region import ContextRegion, SequencePlacement


class ContextMicrobatches:
    """The rows of a region's batch that each microbatch of a pipeline has (`fastpar.pipeline.Pipeline(sequence=...)`).

    Every stage of a rank shares the region, and all stages of the model the layout: `fastpar.context.shard` is called
    by every rank of the pipeline.
    """

    def __init__(self, region: ContextRegion) -> None:
        self.region = region
        self._parts: list[SequencePlacement] = []

    def begin(self, rows: Sequence[int | None]) -> None:
        """Cut the placement of now by rows: those given, or the rule of `Tensor.tensor_split` where none are here."""
        placement, count = self.region.placement, len(rows)
        total = placement.rows
        sizes = [n for n in rows if n is not None]
        if len(sizes) < count:
            sizes = [] if total is None else [len(range(i, total, count)) for i in range(count)]
        elif total is not None and sum(sizes) != total:
            raise ValueError(
                f"the microbatches have {sizes} rows, {sum(sizes)} in all, but fastpar.context.shard was given a batch "
                f"of {total}: shard the whole batch of a step at once, and give the pipeline all that it returns"
            )
        stops = list(itertools.accumulate(sizes))
        self._parts = [placement.of_rows(stop - n, stop) for stop, n in zip(stops, sizes, strict=True)]
        self._parts = self._parts or [placement] * count

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Let the region hold the rows of one microbatch."""
        with self.region.placed(self._parts[index]):
            yield

    def count_labels(self, here: int) -> int:
        """The labels that count on all ranks, by `fastpar.context.shard`."""
        labels = self.region.placement.labels
        if labels is None:
            raise ValueError("the loss needs labels: give fastpar.context.shard the whole batch's, with its input_ids")
        if here != labels.here:
            raise ValueError(
                f"{here} targets count, but of the labels that fastpar.context.shard gave rank {self.region.comm.rank} "
                f"{labels.here} do: pass target=batch['shift_labels'], all of them, and ignore -100"
            )
        return labels.total

    def summary(self) -> Mapping[str, Any]:
        """The shape and a checksum of layout and documents, and of the rows by which these are cut."""
        if not self.region.is_placed:
            return {}
        placement = self.region.placement
        by_row = placement.documents is not None and len(placement.documents) > 1
        rows = [part.rows for part in self._parts] if by_row else []  # which a rank without inputs only assumes
        text = repr((placement.layout, placement.documents, rows)).encode()
        return {"documents of fastpar.context.shard": [[placement.rows or 0, placement.num_tokens], zlib.crc32(text)]}
