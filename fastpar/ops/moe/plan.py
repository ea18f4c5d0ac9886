"""Where every row of a dispatch comes from and goes to.

Experts are numbered over the group: rank r has those from r * E / size on. A *pair* is a token and one of its choices.
Every pair that goes somewhere has a row on the rank of its expert. Rows lie by expert, within an expert by the rank
that they come from, then by token, then by choice: an order that does not depend on the transport.

Before anything is sent the ranks gather how many pairs each has for each expert (`GroupLoads`), in one all-gather; all
else follows from that on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastpar.arguments import checked_fields
from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.ops.moe.fp8 import PAYLOADS
from fastpar.ops.moe.permute import order_pairs, pair_slots, sort_pairs

TRANSPORTS = ("auto", "shared_memory", "all_to_all", "hierarchical", "symmetric")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A backward is collective: a rank that has none would leave the others waiting.
GRADIENT = "what requires gradients (else a backward would wait for ranks that have none)"
_EQUAL_ON_ALL = (
    "top_k", "the hidden size", "the dtype of x", "padding.align", "padding.capacity", "payload", "chunks", "exact",
    GRADIENT,
)  # fmt: skip


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


@checked_fields
@dataclass(frozen=True)
class Dispatch:
    """How tokens travel to their experts and back: the same on all ranks.

    transport  "shared_memory", "all_to_all", "hierarchical" (over several hosts: a token goes once to each, see
               `fastpar.ops.moe.transports.hierarchical`), "symmetric" (see `moe_mlp`), or "auto": the first for CPU
               tensors where the ranks are on one host, the third where they are on several and it sends fewer rows
               between those, else the second
    exact      give results the bits that one rank has, also over all_to_all, which then sends more
    payload    "float8_e4m3fn": tokens travel in 8 bits, and experts see what arrives (`fastpar.ops.moe.fp8`); gradients
               and results travel as they are
    padding    room for rows beyond those there are; see `Padding`
    chunks     let tokens and results of `moe_mlp` travel in so many parts, the first experts' first: those compute
               while the others' tokens come, and the last ones while the others' results leave. Changes no bit; nothing
               at all where ranks share memory or rows go over hosts, or on other devices than the CPU
    max_rows   rows that every rank has room for under transport="symmetric"; None: as many as the first call of the
               group can need at most, were all tokens sent to one rank
    """

    transport: str = "auto"
    exact: bool = False
    payload: str | None = None
    padding: Padding = Padding()
    chunks: int = 1
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {self.chunks}")
        if self.max_rows is not None and self.transport != "symmetric":
            raise ValueError(
                f"max_rows is for transport='symmetric', got {self.transport!r}: memory is as large as is needed"
            )


DEFAULT_DISPATCH = Dispatch()  # made once: its fields are checked whenever one is made


@dataclass(frozen=True)
class DispatchSpec:
    """What a dispatch is asked for, besides its tensors. But for `problem` it is the same on all ranks.

    num_experts     of the group
    padding, payload  see `Dispatch`
    grads           a number for the gradients that backward will exchange; 0: there is no backward
    chunks          number and width of the chunks of tokens that follow an x without columns
    exact           whether results will come back row by row
    problem         what is already known to be wrong with this rank's arguments
    """

    num_experts: int
    padding: Padding = Padding()
    payload: str | None = None
    grads: int = 0
    chunks: tuple[int, int] | None = None
    exact: bool = False
    problem: Exception | None = None


# ---- pairs and rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortedPairs:
    """This rank's pairs by expert: `order` and `counts` of `sort_pairs`; on devices of `order_pairs`, until the host
    knows how many go somewhere (`going`)."""

    indices: Tensor
    num_experts: int
    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, indices: Tensor, num_experts: int) -> SortedPairs:
        indices = indices.contiguous()  # pairs are numbered t * K + k in memory
        sort = sort_pairs if indices.device.type == "cpu" else order_pairs
        return cls(indices, num_experts, *sort(indices, num_experts))

    def going(self, num_pairs: int) -> SortedPairs:
        """Without the pairs that go nowhere, of which the first `num_pairs` are none."""
        return self if len(self.order) == num_pairs else replace(self, order=self.order[:num_pairs])

    @classmethod
    def nowhere(cls, num_experts: int) -> SortedPairs:
        """The pairs of a rank with wrong arguments, which takes part in the all-gather that tells the others so."""
        return cls.of(torch.empty((0, 1), dtype=torch.int64, device="cpu"), max(num_experts, 0))

    @property
    def top_k(self) -> int:
        return self.indices.shape[1]

    def slots(self, first: Tensor) -> Tensor:
        """[T, K]: where the row of each pair lies if those of each expert begin at `first` [E]; -1: it has none."""
        return pair_slots(self.order, self.counts, first.to(self.counts.device), self.indices.shape)


@dataclass(frozen=True)
class RowPlacement:
    """Where the rows of all ranks lie.

    first      int64 [size, E]: the row, on its expert's rank, of the first pair of this source rank for this expert
    starts     int64 [E]: where an expert's rows begin on its rank
    rank_rows  rows on each rank
    """

    first: Tensor
    starts: Tensor
    rank_rows: tuple[int, ...]

    @classmethod
    def of(cls, loads: Tensor, padding: Padding) -> RowPlacement:
        size = len(loads)
        room = padding.room(loads.sum(0)).view(size, -1)
        starts = (room.cumsum(1) - room).flatten()
        # An expert's rows lie by source rank: those of the ranks before come first.
        return cls(starts + loads.cumsum(0) - loads, starts, tuple(room.sum(1).tolist()))


def spread(first: Tensor, counts: Tensor) -> Tensor:
    """first[0], first[0] + 1, ... counts[0] of them, then the same of the next: int64 [sum of counts]."""
    ends = counts.cumsum(0)
    offsets = torch.repeat_interleave(first - ends + counts, counts)
    return offsets + torch.arange(len(offsets), device=first.device)


# ---- agreement of the ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLoads:
    """What every rank knows of all, in host memory, as it says how large memory and messages are.

    tokens  [size]      that each rank has brought
    loads   [size, E]   pairs of each rank for each expert
    extra   [size, n]   what the transport has asked for
    spec    the dispatch's
    """

    tokens: Tensor
    loads: Tensor
    extra: Tensor
    spec: DispatchSpec


def gather_loads(
    comm: Communicator, problem: Exception | str, x: Tensor, pairs: SortedPairs, spec: DispatchSpec, *extra: Tensor
) -> GroupLoads:
    """The loads of all ranks; raises on each what is wrong on one.

    One all-gather of int64, on the device of x: a status, what has to be equal, T, the counts of experts, and `extra`.
    """
    chunks, hidden = spec.chunks or (1, 0 if problem else x.shape[1])
    padding, payload = spec.padding, spec.payload
    values = () if problem else (
        pairs.top_k, hidden, x.dtype, padding.align, -1 if padding.capacity is None else padding.capacity,
        0 if payload is None else 1 + PAYLOADS.index(payload), chunks, spec.exact, spec.grads,
    )  # fmt: skip
    agreement = Agreement("moe_dispatch", _EQUAL_ON_ALL, values, problem)
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    num_tokens = torch.zeros(1, dtype=torch.int64, device=device) if problem else tokens_or_wrong(pairs)
    everyone = agreement.gather(comm, num_tokens, pairs.counts, *extra, device=device)
    tokens = everyone[:, 0]
    if wrong := (tokens < 0).nonzero().view(-1).tolist():
        if comm.rank in wrong:
            raise ValueError(index_problem(pairs.indices, spec.num_experts))
        raise ValueError(f"{agreement.op}: wrong arguments on rank {wrong[0]} of the group: see its error")
    end = 1 + len(pairs.counts)
    return GroupLoads(tokens, everyone[:, 1:end], everyone[:, end:], spec)


def tokens_or_wrong(pairs: SortedPairs) -> Tensor:
    """int64 [1]: T, or on devices, where `problem_of` looks at no value, -1 for an index that is no expert."""
    indices = pairs.indices
    num_tokens = torch.full((1,), len(indices), device=indices.device)  # no copy from the host
    if indices.device.type == "cpu" or indices.numel() == 0:
        return num_tokens
    low, high = torch.aminmax(indices)
    return torch.where((low < -1) | (high > pairs.num_experts), -1, num_tokens)


def index_problem(indices: Tensor, num_experts: int) -> str:
    """What is wrong with the values of indices, or ""; waits for a device."""
    if indices.numel() == 0:
        return ""
    low, high = torch.stack(torch.aminmax(indices)).tolist()
    if low < -1 or high > num_experts:
        return (
            f"indices must be in 0..{num_experts - 1}, or -1 or {num_experts} for a choice that goes nowhere; "
            f"they are in {low}..{high}"
        )
    return ""


def problem_of(
    x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec, comm: Communicator
) -> Exception | str:
    """What is wrong with this rank's arguments, or "". Not raised here: the other ranks have to raise it too. Values of
    indices on devices come with the loads, since the host waits for those anyway (`tokens_or_wrong`)."""
    if spec.problem is not None:
        return spec.problem
    num_experts, payload = spec.num_experts, spec.payload
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
    if x.dtype not in DTYPES:
        return f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}"
    if payload is not None and (payload not in PAYLOADS or x.dtype == torch.float64):
        return f"payload must be None or {', '.join(PAYLOADS)} (for x of at most 32 bits), got {payload!r}"
    return index_problem(indices, num_experts) if indices.device.type == "cpu" else ""
