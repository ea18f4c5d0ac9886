"""Where every row of a dispatch comes from and goes to.

Experts are numbered over the group: rank r has those from r * E / size on. A *pair* is a token and one of its choices.
Every pair that goes somewhere has a row on the rank of its expert. Rows lie by expert, within an expert by the rank
that they come from, then by token, then by choice: an order that does not depend on the transport.

What the ranks tell each other before anything is sent is one header each (`Headers`), in one all-gather; all else
follows from them on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import CommMismatchError, Communicator
from fastpar.ops.moe.fp8 import PAYLOADS
from fastpar.ops.moe.permute import pair_slots, sort_pairs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The way of the rows of one dispatch, for `moe_combine` and for both backwards.

    tokens, top_k   of this rank's indices
    num_experts     of the group; this rank has those of `experts`
    counts          int64 [len(experts)]: rows of each of this rank's experts
    splits          where the rows of each expert begin, and where the last end: len(experts) + 1 numbers. More room
                    than `counts` says where rows are padded
    loads           int64 [size, num_experts]: pairs of each rank for each expert
    source          int64 [num_rows]: which of the sent tokens each row is, as `Exchange.send` gives them; -1: padding
    row_weights     float32 [num_rows]: what the pair's weight is; 0: padding
    pair_weights    float32 [T, K]
    payload         what x travelled as; None: as it is
    tokens_per_rank tokens that each rank has brought
    way             what the exchange keeps for itself
    exchange        the exchange that it is a plan of

    `counts` and `loads` are in host memory, where every rank has them anyway, so that to look at loads waits for no
    device; the others are where x is.
    """

    tokens: int
    top_k: int
    num_experts: int
    experts: range
    counts: Tensor
    splits: tuple[int, ...]
    loads: Tensor
    source: Tensor
    row_weights: Tensor
    pair_weights: Tensor
    payload: str | None
    tokens_per_rank: tuple[int, ...]
    way: Any
    exchange: Any

    @property
    def num_rows(self) -> int:
        """Rows of this rank's experts, padding included."""
        return self.splits[-1]

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [num_experts]: rows of every expert of the group, without padding."""
        return self.loads.sum(0)

    @property
    def rows_per_rank(self) -> Tensor:
        """int64 [size]: rows of the experts of every rank, without padding."""
        return self.loads.view(len(self.loads), len(self.loads), -1).sum((0, 2))

    @property
    def dropped(self) -> int:
        """Choices of this rank's tokens that go nowhere: masked ones, and those that `moe_capacity` took away."""
        return self.tokens * self.top_k - int(self.loads[self.exchange.comm.rank].sum())

    @property
    def dropped_per_rank(self) -> tuple[int, ...]:
        """The same of every rank's tokens."""
        return tuple(
            tokens * self.top_k - pairs
            for tokens, pairs in zip(self.tokens_per_rank, self.loads.sum(1).tolist(), strict=True)
        )


@dataclass(frozen=True)
class Padding:
    """Room for rows: `align` rounds every expert's rows up to a multiple; `capacity` gives each room for so many.

    Padding rows are zeros. They come into no output and no gradient. Nothing is dropped for a capacity: an expert that
    gets more rows is a ValueError on every rank. `moe_capacity` is what drops, on each rank by itself, so an expert may
    get its capacity from each: `Padding(capacity=size * expert_capacity(...))`.
    """

    align: int = 1
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.align < 1:
            raise ValueError(f"align must be at least 1, got {self.align}")
        if self.capacity is not None and self.capacity < 0:
            raise ValueError(f"capacity must not be negative, got {self.capacity}")

    def room(self, counts: Tensor) -> Tensor:
        """Rows that experts with so many pairs have room for."""
        wanted = counts if self.capacity is None else torch.full_like(counts, self.capacity)
        room = (wanted + self.align - 1) // self.align * self.align
        if bool((room < counts).any()):
            raise ValueError(f"capacity is {self.capacity} rows for each expert, but one gets {int(counts.max())}")
        return room


@dataclass(frozen=True)
class Placement:
    """Where the rows of all ranks lie.

    first      int64 [size, E]: the row, on its expert's rank, of the first pair of this source rank for this expert
    starts     int64 [E]: where an expert's rows begin on its rank
    rank_rows  rows on each rank
    """

    first: Tensor
    starts: Tensor
    rank_rows: tuple[int, ...]

    @classmethod
    def of(cls, loads: Tensor, padding: Padding) -> Placement:
        size = len(loads)
        room = padding.room(loads.sum(0)).view(size, -1)
        starts = (room.cumsum(1) - room).flatten()
        return cls(starts + loads.cumsum(0) - loads, starts, tuple(room.sum(1).tolist()))


def spread(first: Tensor, counts: Tensor) -> Tensor:
    """first[0], first[0] + 1, ... counts[0] of them, then the same of the next: int64 [sum of counts]."""
    ends = counts.cumsum(0)
    offsets = torch.repeat_interleave(first - ends + counts, counts)
    return offsets + torch.arange(len(offsets), device=first.device)


@dataclass(frozen=True)
class Pairs:
    """This rank's pairs, sorted: `order` and `counts` of `sort_pairs`."""

    indices: Tensor
    num_experts: int
    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, indices: Tensor, num_experts: int) -> Pairs:
        indices = indices.contiguous()
        return cls(indices, num_experts, *sort_pairs(indices, num_experts))

    @classmethod
    def nowhere(cls, num_experts: int) -> Pairs:
        """Those of a rank with wrong arguments, which takes part in the exchange that tells the others so."""
        return cls.of(torch.empty((0, 1), dtype=torch.int64, device="cpu"), max(num_experts, 0))

    @property
    def top_k(self) -> int:
        return self.indices.shape[1]

    def slots(self, first: Tensor) -> Tensor:
        """[T, K]: where the row of each pair lies if those of each expert begin at `first` [E]; -1: it has none."""
        return pair_slots(self.order, self.counts, first.to(self.counts.device), self.indices.shape)


@dataclass(frozen=True)
class Terms:
    """What all ranks of a dispatch have to agree on, besides the shape of a token.

    padding, payload  see `moe_dispatch`
    differentiable  what the backward will exchange, in which every rank has to take part; 0: there is none
    chunks          number and width of the chunks of tokens that follow an x without columns
    exact           whether results will come back row by row
    """

    padding: Padding
    payload: str | None = None
    differentiable: int = 0
    chunks: tuple[int, int] | None = None
    exact: bool = False


def check_arguments(
    x: Tensor, indices: Tensor, weights: Tensor | None, num_experts: int, terms: Terms, comm: Communicator
) -> str:
    """What is wrong with this rank's arguments, or nothing. Not raised here: the other ranks have to raise it too."""
    if not (isinstance(x, Tensor) and isinstance(indices, Tensor) and isinstance(weights, (Tensor, type(None)))):
        return (
            f"x, indices and weights must be tensors, got {', '.join(type(t).__name__ for t in (x, indices, weights))}"
        )
    if num_experts < 1 or num_experts % comm.size:
        near = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        return f"num_experts ({num_experts}) must be divisible by the ranks of the group ({comm.size}); it is by {near}"
    if x.ndim != 2 or indices.ndim != 2 or len(indices) != len(x):
        return f"x must be [T, H] and indices [T, K], got {tuple(x.shape)} and {tuple(indices.shape)}"
    if indices.dtype not in (torch.int64, torch.int32):
        return f"indices must be int64 or int32, got {indices.dtype}"
    if weights is not None and (weights.shape != indices.shape or not weights.is_floating_point()):
        return (
            f"weights must have the shape of indices, {tuple(indices.shape)}, and a floating dtype, "
            f"got {tuple(weights.shape)} {weights.dtype}"
        )
    devices = [t.device for t in (x, indices, weights) if t is not None]
    if len(set(devices)) > 1:
        return f"x, indices and weights must be on one device, got {', '.join(map(str, devices))}"
    if x.dtype not in _DTYPES:
        return f"x must be one of {', '.join(map(str, _DTYPES))}, got {x.dtype}"
    if terms.payload is not None and (terms.payload not in PAYLOADS or x.dtype == torch.float64):
        return f"payload must be None or {', '.join(PAYLOADS)} (for x of at most 32 bits), got {terms.payload!r}"
    if indices.numel():
        low, high = torch.stack(torch.aminmax(indices)).tolist()
        if low < -1 or high > num_experts:
            return (
                f"indices must be in 0..{num_experts - 1}, or -1 or {num_experts} for a choice that goes nowhere; "
                f"they are in {low}..{high}"
            )
    return ""


@dataclass(frozen=True)
class Headers:
    """What every rank knows of all: tokens [size], loads [size, E], extra [size, n], in host memory: they say how large
    memory and messages are."""

    tokens: Tensor
    loads: Tensor
    terms: Terms
    extra: Tensor | None = None


_BAD_ARGUMENTS = 1
_EQUAL_ON_ALL = (
    "top_k",
    "the hidden size",
    "the dtype of x",
    "padding.align",
    "padding.capacity",
    "payload",
    "chunks",
    "exact",
)
_GRADIENT = "what requires gradients (else a backward would wait for ranks that have none)"


def exchange_headers(
    comm: Communicator,
    problem: str,
    x: Tensor,
    pairs: Pairs,
    terms: Terms,
    extra: Tensor | None = None,
) -> Headers:
    """Raises on all ranks what is wrong on one.

    One all-gather of int64, on the device of x: a status, T, what has to be equal, the counts of experts, and `extra`.
    """
    names = (*_EQUAL_ON_ALL, _GRADIENT)
    status = [_BAD_ARGUMENTS, *[0] * (1 + len(names))] if problem else [0, len(x), *_terms(x, pairs, terms)]
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    parts = [torch.tensor(status, device=device), pairs.counts, *([] if extra is None else [extra])]
    own = torch.cat([part.to(device) for part in parts])
    try:
        everyone = (own[None] if comm.size == 1 else comm.all_gather(own[None])).cpu()
    except CommMismatchError:  # num_experts differs
        if problem:
            raise ValueError(problem) from None
        raise
    bad = everyone[:, 0].nonzero().flatten().tolist()
    if problem:
        raise ValueError(problem)
    if bad:
        raise ValueError(f"moe_dispatch: wrong arguments on rank {bad[0]} of the group: see its error")
    for column, name in enumerate(names, start=2):
        values = everyone[:, column].tolist()
        if len(set(values)) > 1:
            shown = [str(_DTYPES[value]) for value in values] if "dtype" in name else values
            raise ValueError(f"moe_dispatch: {name} must be equal on all ranks of the group, got {shown}")
    begin = 2 + len(names)
    end = begin + len(pairs.counts)
    return Headers(everyone[:, 1], everyone[:, begin:end], terms, everyone[:, end:])


def _terms(x: Tensor, pairs: Pairs, terms: Terms) -> list[int]:
    padding = terms.padding
    chunks, hidden = terms.chunks or (1, x.shape[1])
    return [
        pairs.top_k,
        hidden,
        _DTYPES.index(x.dtype),
        padding.align,
        -1 if padding.capacity is None else padding.capacity,
        0 if terms.payload is None else 1 + PAYLOADS.index(terms.payload),
        chunks,
        int(terms.exact),
        int(terms.differentiable),
    ]
