"""The region of a model whose tokens are split over ranks: where they lie, and the attention over all of them.

One object a model (or a part of one), shared by its attention layers. A batch is placed in it by
`fastpar.context.shard`; a layer that is recomputed takes the placement of its forward with it (`capture`), when the
region may hold another batch already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.arguments import check_counts, checked, checked_fields
from fastpar.comm import Communicator, GroupLike
from fastpar.context import layout as layouts
from fastpar.contracts.attention import AttentionDropout, AttentionMask, Ranges, num_tokens, positions
from fastpar.ops.context_attention.api import context_attention
from fastpar.ops.context_attention.choose import resolve_method
from fastpar.ops.context_attention.methods import Method

LAYOUTS = ("auto", "contiguous", "zigzag", "striped", "dealt")
REGION = "_fastpar_context"  # the attribute by which modules hold their region


@checked_fields
@dataclass(frozen=True)
class Context:
    """Options of context parallelism: `fp.parallelize(model, mesh, context=fp.Context(...))`.

    method   of `fp.ops.context_attention`: "auto", "ring", "gather", "ulysses", Usp(u) or GatherKeys(head_groups)
    layout   "contiguous", "zigzag", "striped" or "dealt", see `fastpar.context.layout`; "auto": dealt for packed
             documents, contiguous for Ulysses and where every layer has a window, zigzag for the rest
    block    tokens of a block of "dealt", about
    overlap  let collectives travel while attention is computed; it changes no bit
    """

    method: Method = "auto"
    layout: str = "auto"
    block: int = 512
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        check_counts(block=self.block)


class Placement(NamedTuple):
    """Where the tokens of a batch are."""

    layout: tuple[Ranges, ...]  # of every rank
    documents: tuple[tuple[int, ...], ...] | None
    num_tokens: int  # of the whole sequence


class ContextRegion:
    """The tokens that are split over a group now, and attention over them; layers share this object.

    comm       over which the sequence is split
    options    see `Context`
    windowed   every layer has a sliding window or chunks: what layout="auto" looks at
    batch      (rank, size) of this rank's share of the batch's rows, in data parallelism: for masks of dropout

    Raises ValueError for a method that does not fit the group's size.
    """

    @checked(computed=False)
    def __init__(
        self,
        group: GroupLike,
        options: Context | None = None,
        *,
        windowed: bool = False,
        batch: tuple[int, int] = (0, 1),
    ) -> None:
        self.comm = Communicator.of(group)
        self.options = options or Context()
        self.windowed, self.batch = windowed, batch
        self.labels_problem = ""  # why the model's loss does not take the labels of `fastpar.context.shard`
        self._placement: Placement | None = None
        self._attended: Placement | None = None  # of the last forward that was no recomputation
        self._is_restored = False
        resolve_method(self.options.method, self.comm.size)

    def __deepcopy__(self, memo: Any) -> ContextRegion:
        return self  # a copied model attends over the same ranks

    @property
    def placement(self) -> Placement:
        """Of the batch now in the region. RuntimeError before the first."""
        if self._placement is None:
            raise RuntimeError("no batch is split yet: batch = fastpar.context.shard(model, batch) before the model")
        return self._placement

    @property
    def is_placed(self) -> bool:
        """Whether there has been a batch."""
        return self._placement is not None

    @property
    def tokens_here(self) -> int:
        """How many of the sequence's tokens this rank has."""
        return num_tokens(self.placement.layout[self.comm.rank])

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens: int64 [s] on the host."""
        return positions(self.placement.layout[self.comm.rank])

    def place(self, num_tokens: int, documents: tuple[tuple[int, ...], ...] | None = None) -> Placement:
        """Lay out a sequence of so many tokens; the same on every rank."""
        size, mask = self.comm.size, AttentionMask(causal=True, documents=documents)
        name = self._layout_for(documents)
        if name == "dealt":
            layout = layouts.dealt(num_tokens, size, mask, block=self.options.block)
        else:
            layout = getattr(layouts, name)(num_tokens, size)
        self._placement = Placement(layout, documents, num_tokens)
        return self._placement

    def _layout_for(self, documents: tuple[tuple[int, ...], ...] | None) -> str:
        if self.options.layout != "auto":
            return self.options.layout
        if self.options.method == "ulysses" or self.windowed:
            return "contiguous"
        return "zigzag" if documents is None else "dealt"

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """What brings the placement of now back while a layer in the region is recomputed (`fastpar.recompute`)."""
        placement = self._placement

        @contextmanager
        def restored() -> Iterator[None]:
            before = self._placement, self._is_restored
            self._placement, self._is_restored = placement, True
            try:
                yield
            finally:
                self._placement, self._is_restored = before

        return restored

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        dropout: float = 0.0,
        first_head: int = 0,
    ) -> Tensor:
        """Attention over the whole sequence: q [b, h_q, s, D] of this rank's tokens, see `fp.ops.context_attention`.

        mask        causal, window and chunk; the documents are those of the batch
        dropout     of probabilities; its seed is drawn from torch's CPU generator, alike on all ranks
        first_head  the global index of the first query head here
        Raises ValueError for other tokens than those that were placed, such as a cache's.
        """
        placement, mask = self.placement, mask or AttentionMask()
        here = self.tokens_here
        if q.dim() != 4 or q.shape[2] != here or k.shape[2] != here:
            raise ValueError(
                f"q and k must have the {here} tokens that fastpar.context.shard gave rank {self.comm.rank} of "
                f"{placement.num_tokens}, got {list(q.shape)} and {list(k.shape)}: every batch goes through it, and a "
                "cache of keys has to be empty"
            )
        self._note_forward()
        drop = None
        if dropout > 0.0:
            first_batch = self.batch[0] * q.shape[0]
            drop = AttentionDropout(dropout, draw_seed(), first_batch=first_batch, first_head=first_head)
        mask = AttentionMask(mask.causal, mask.window, mask.chunk, placement.documents)
        return context_attention(
            q,
            k,
            v,
            group=self.comm,
            layout=placement.layout,
            mask=mask,
            method=self.options.method,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout=drop,
            overlap=self.options.overlap,
        )

    def _note_forward(self) -> None:
        """RuntimeError where somebody who knows of no placement runs a layer again after another batch was placed."""
        if self._is_restored:
            return
        if torch._C._current_graph_task_id() == -1:
            self._attended = self._placement
        elif self._attended is not self._placement:
            raise RuntimeError(
                "a layer is run again in backward (torch.utils.checkpoint), and fastpar.context.shard has placed "
                "another batch since its forward: run backward before the next shard, or use fastpar.apply_recompute"
            )


def region_of(model: nn.Module) -> ContextRegion:
    """The region that the model's attention layers share. ValueError for none, and for several."""
    found = {id(region): region for m in model.modules() if (region := vars(m).get(REGION)) is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(f"model: its layers have {len(found)} context regions; give all of them the same one")
    raise ValueError(
        f"model: no layer of this {type(model).__name__} attends over a split sequence; use "
        "fastpar.parallelize(model, mesh, context=fastpar.Context()), or ContextAttention in your own"
    )


def draw_seed() -> int:
    """One 62-bit number from torch's default CPU generator: the same on all ranks that were seeded alike."""
    return int(torch.empty((), dtype=torch.int64).random_(0, 1 << 62).item())
