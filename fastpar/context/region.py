"""The region of a model whose tokens are split over ranks: where they lie, and the attention over all of them.

One object a model (or a part of one), shared by its attention layers. A batch is placed in it by
`fastpar.context.shard`; a layer that is recomputed takes the placement of its forward with it (`capture`), when the
region may hold another batch already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastpar.arguments import check_counts, checked, checked_fields
from fastpar.comm import Communicator, GroupLike
from fastpar.context import layout as layouts
from fastpar.context.packed import cheapest
from fastpar.context.pending import PendingForwards
from fastpar.context.weights import WeightChecks
from fastpar.contracts import refuse_capture
from fastpar.contracts.attention import AttentionDropout, AttentionMask, Ranges, num_tokens, positions
from fastpar.ops._autograd import in_backward
from fastpar.ops.context_attention.api import context_attention
from fastpar.ops.context_attention.choose import flops_an_element, resolve_method
from fastpar.ops.context_attention.methods import Method

LAYOUTS = ("auto", "contiguous", "zigzag", "striped", "dealt")
REGION = "_fastpar_context"  # the attribute by which modules hold their region


@checked_fields
@dataclass(frozen=True)
class Context:
    """Options of context parallelism: `fp.parallelize(model, mesh, context=fp.Context(...))`.

    method   of `fp.ops.context_attention`: "auto", "ring", "gather", "ulysses", Usp(u) or GatherKeys(head_groups)
    layout   "contiguous", "zigzag", "striped" or "dealt", see `fastpar.context.layout`; "auto": contiguous for Ulysses
             and where every layer has a window, zigzag for one document; for packed ones contiguous, zigzag or dealt,
             whose slowest rank is done first by the pairs of tokens that see each other and the keys that are sent
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


class LabelCount(NamedTuple):
    """How many labels count."""

    here: int
    total: int  # on all ranks


class SequencePlacement(NamedTuple):
    """Where the tokens of a batch are."""

    layout: tuple[Ranges, ...]  # of every rank
    documents: tuple[tuple[int, ...], ...] | None  # of all rows, or of each
    num_tokens: int  # of the whole sequence
    rows: int | None = None
    labels: LabelCount | None = None
    last: Tensor | None = None  # [rows], the largest of each row's position_ids, on the batch's device

    @property
    def key(self) -> Any:
        """What decides which tokens see each other."""
        return self.layout, self.documents

    def of_rows(self, start: int, stop: int) -> SequencePlacement:
        """The placement of some rows of the batch, whose labels are not counted."""
        shared = self.documents is None or len(self.documents) == 1
        documents = self.documents if shared else (self.documents or ())[start:stop]
        last = None if self.last is None else self.last[start:stop]
        return SequencePlacement(self.layout, documents, self.num_tokens, stop - start, last=last)


class ContextRegion:
    """The tokens that are split over a group now, and attention over them; layers share this object.

    comm       over which the sequence is split
    options    see `Context`
    windowed   every layer has a sliding window or chunks: what layout="auto" looks at
    batch      (rank, size) of this rank's share of the batch's rows, in data parallelism: for masks of dropout
    queries_a_key  query heads that read one key/value head: with more of them a key that is sent costs less

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
        queries_a_key: int = 1,
    ) -> None:
        check_counts(queries_a_key=queries_a_key)
        self.comm = Communicator.of(group)
        self.options = options or Context()
        self.windowed, self.batch, self.queries_a_key = windowed, batch, queries_a_key
        self.labels_problem = ""  # why the model's loss does not take the labels of `fastpar.context.shard`
        self.seed_source: Callable[[], int] = draw_seed  # of dropout
        self.checks = WeightChecks()
        self._placement: SequencePlacement | None = None
        self._trial = ""  # "whole" or "values", see `trial`
        self._seen: list[Tensor] | None = None
        self._pending = PendingForwards()
        self._is_restored = False
        self._origin = object()  # the same in copies
        resolve_method(self.options.method, self.comm.size)

    def __deepcopy__(self, memo: Any) -> ContextRegion:
        """A copied model has batches of its own, over the same ranks."""
        twin = copy.copy(self)
        twin._pending, twin.checks = PendingForwards(), WeightChecks()
        memo[id(self)] = twin
        return twin

    @property
    def placement(self) -> SequencePlacement:
        """The placement of the batch now in the region. RuntimeError before the first."""
        if self._placement is None:
            raise RuntimeError("no batch is split yet: batch = fastpar.context.shard(model, batch) before the model")
        return self._placement

    @property
    def is_placed(self) -> bool:
        """Whether there has been a batch."""
        return self._placement is not None

    @property
    def is_tried(self) -> bool:
        """Whether what runs now is a trial, on whole sequences."""
        return bool(self._trial)

    @property
    def tokens_here(self) -> int:
        """How many of the sequence's tokens this rank has."""
        return num_tokens(self.placement.layout[self.comm.rank])

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens: int64 [s] on the host."""
        return positions(self.placement.layout[self.comm.rank])

    @contextmanager
    def trial(self, what: str, seen: list[Tensor] | None = None) -> Iterator[None]:
        """While a model is tried in one process: "whole": attend over what is here, as if that were all of it;
        "values": no token sees another, and attention returns its values; `seen` gets all queries and keys then."""
        before = self._trial, self._seen
        self._trial, self._seen = what, seen
        try:
            yield
        finally:
            self._trial, self._seen = before

    @contextmanager
    def placed(self, placement: SequencePlacement) -> Iterator[None]:
        """Hold another placement for a while, such as that of a microbatch."""
        before, self._placement = self._placement, placement
        try:
            yield
        finally:
            self._placement = before

    def place(
        self,
        num_tokens: int,
        documents: tuple[tuple[int, ...], ...] | None = None,
        rows: int | None = None,
        *,
        device: torch.device | None = None,
    ) -> SequencePlacement:
        """Lay out sequences of so many tokens, on the CPU or another device; the same on every rank."""
        size, mask = self.comm.size, AttentionMask(causal=True, documents=documents)
        name, block = self._layout_for(documents), self.options.block
        if name == "dealt":
            layout = layouts.dealt(num_tokens, size, mask, block=block)
        elif name == "cheapest":
            layout = cheapest(num_tokens, size, mask, block=block, **self._exchange(device))
        else:
            layout = getattr(layouts, name)(num_tokens, size)
        self._placement = SequencePlacement(layout, documents, num_tokens, rows)
        return self._placement

    def _exchange(self, device: torch.device | None) -> dict[str, Any]:
        """What a key costs that is sent, forward and backward, of head dim D and g query heads a key/value head: 8 D
        elements of 2 bytes (K and V twice, dK and dV once in float32), where a pair takes 14 D g operations. CPU ranks
        copy with the cores that compute."""
        device = device or torch.device("cpu")
        pairs_a_key = 8 * flops_an_element(self.comm, device) / (14 * self.queries_a_key)
        return {"pairs_a_key": pairs_a_key, "is_hidden": self.options.overlap and device.type != "cpu"}

    def note_positions(self, whole: Tensor) -> None:
        """Note the position_ids [rows, S] of the whole sequences."""
        self._placement = self.placement._replace(last=whole.amax(1))

    def count_labels(self, here: int, total: int) -> None:
        """Note how many labels of the batch count."""
        self._placement = self.placement._replace(labels=LabelCount(here, total))

    def _layout_for(self, documents: tuple[tuple[int, ...], ...] | None) -> str:
        if self.options.layout != "auto":
            return self.options.layout
        if self.options.method == "ulysses" or self.windowed:
            return "contiguous"
        return "zigzag" if documents is None or self.comm.size == 1 else "cheapest"

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
        mask = mask or AttentionMask()
        if self._trial == "values":
            if self._seen is not None:
                self._seen += [q, k]
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        if self._trial:
            alone = layouts.contiguous(q.shape[2], 1)
            return context_attention(
                q, k, v, group=None, layout=alone, mask=mask, scale=scale, softcap=softcap, sink=sink
            )
        placement, here = self.placement, self.tokens_here
        if q.dim() != 4 or q.shape[2] != here or k.shape[2] != here:
            raise ValueError(
                f"q and k must have the {here} tokens that fastpar.context.shard gave rank {self.comm.rank} of "
                f"{placement.num_tokens}, got {list(q.shape)} and {list(k.shape)}: every batch goes through it, and a "
                "cache of keys has to be empty"
            )
        reruns = in_backward()
        if reruns and not self._is_restored:
            self._pending.check(placement.key)
        drop = None
        if dropout > 0.0:
            first_batch = self.batch[0] * q.shape[0]
            drop = AttentionDropout(dropout, self.seed_source(), first_batch=first_batch, first_head=first_head)
        mask = AttentionMask(mask.causal, mask.window, mask.chunk, placement.documents)
        out = context_attention(
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
        if not reruns:
            self._pending.note(placement.key, out)
        return out


class TokenPlaces:
    """Where this rank's tokens are in the sequence, for masks of dropout (`fastpar.tensor.LayoutDropout`)."""

    def __init__(self, region: ContextRegion) -> None:
        self.region = region

    def __call__(self) -> tuple[list[tuple[int, int, int]], int]:
        placement = self.region.placement
        ranges = placement.layout[self.region.comm.rank]
        return [(r.start, r.stop, r.step) for r in ranges], placement.num_tokens


class HasModules(Protocol):
    """A model, or a pipeline with this rank's parts of one."""

    def modules(self) -> Iterator[nn.Module]: ...


def region_of(model: HasModules) -> ContextRegion:
    """The region that the model's attention layers share. ValueError for none, and for several.

    Layers that were copied one by one, such as those of `nn.TransformerEncoder`, get that of the first again.
    """
    if not callable(getattr(model, "modules", None)):
        raise TypeError(f"model must be an nn.Module or a Pipeline, got {type(model).__name__}")
    found = {id(region): region for m in model.modules() if (region := vars(m).get(REGION)) is not None}
    first = next(iter(found.values()), None)
    if first is not None and len({id(region._origin) for region in found.values()}) == 1:
        if len(found) > 1:
            _share(model, first)
        return first
    if found:
        raise ValueError(f"model: its layers have {len(found)} context regions; give all of them the same one")
    raise ValueError(
        f"model: no layer of this {type(model).__name__} attends over a split sequence; use "
        "fastpar.parallelize(model, mesh, context=fastpar.Context()), or ContextAttention in your own"
    )


def _share(model: HasModules, region: ContextRegion) -> None:
    for module in model.modules():
        own = vars(module)
        if own.get(REGION) is not None:
            setattr(module, REGION, region)
        if isinstance(own.get("tokens"), TokenPlaces):
            own["tokens"] = TokenPlaces(region)


def draw_seed() -> int:
    """One 62-bit number from torch's default CPU generator: the same on all ranks that were seeded alike."""
    refuse_capture("the seed of dropout is drawn on the host, which cannot be", "Capture with p=0, or torch's dropout")
    return int(torch.empty((), dtype=torch.int64).random_(0, 1 << 62).item())
