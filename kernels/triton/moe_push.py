"""Tokens to the experts of other GPUs and back, in Triton: written straight into the rows of the experts.

    exchange = PushExchange(buffer, num_experts=64, width=7168, dtype=torch.bfloat16, capacity=32768)
    pushed = exchange.dispatch(x, indices, weights)           # rows by expert, then by source rank, token, choice
    results = exchange.empty_rows()                           # where all ranks can read them
    grouped_linear(act, second, RowGroups(pushed.splits, exchange.capacity, x.device), out=results)
    out, _ = exchange.give_back(pushed, results, weights=weights)     # [T, H]: the sum over each token's choices
    exchange.end()

What `fastpar.ops.moe.dispatcher` describes, for ranks whose GPUs reach each other's memory (NVLink, PCIe): dispatch and
permutation are one copy, and the combine reads each row once, out of the memory of its expert's rank. Backward of
`give_back` is `send` with the same plan, and that of `dispatch` is `give_back`; `moe_push_mlp.py` has the experts
between them. Nothing synchronises with the host, so that a step can be captured in a CUDA graph, after one outside; how
many rows came is a number on the device. What is captured ends with `end`.

`capacity` is the rows that a rank has room for. Dropless is size * tokens * min(top_k, experts of a rank), where tokens
are those of the rank with the most. Rows that do not fit are an error, of which the host hears late: results are NaN on
every rank, and the next call raises RuntimeError.

Note: protocol
    That of `overlap_gemm.py`: two channels in turns, flags that are epochs, `begin` waits until all ranks have finished
    the channel's previous call. A call is finished when the next one has begun its work, or by `end`, and not before:
    what it has given may be used until then, by kernels on the same stream. In a CUDA graph `end` is what finishes the
    last call before the first one is replayed.

        dispatch     counts of experts to all ranks, flag; from the counts of all, each pair's row; rows, flag; wait
        send         rows, flag; wait
        give_back    flag; wait; sum out of the ranks' results

    A rank whose wait fails leaves a report, as there: its next call raises TimeoutError. Where counts are missing it
    pushes nothing and has no rows; its result is NaN, whatever is missing. A rank whose arguments are wrong says so in
    the place of its counts (`refuse`): nobody waits for it, and the others' next calls raise ValueError.

Bytes sent by this rank: T * K * H elements at most, in dispatch, and as many read in give_back. Tested
on an H200 with virtual ranks. Eight of them, 4096 tokens of 7168 each to 8 of 256 experts, launches of all by one host
included: dispatch 7.0 ms where sorting and gathering in torch take 5.6, `give_back` 3.2 where torch takes 11.9.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fastpar.kernels import moe_push_kernels as kernels
from fastpar.kernels import moe_rows, moe_sort
from fastpar.kernels.launch import cdiv, next_power_of_2
from fastpar.kernels.launch import launch_named as launch
from fastpar.kernels.moe_rows import Places
from fastpar.kernels.overlap_gemm_buffer import CHANNELS, Channel, OverlapBuffer, aligned
from fastpar.kernels.overlap_gemm_kernels import PUSHED, SHOWN

PUSH_PROGRAMS = 32  # multiprocessors that copy: a link takes what a few of them write
FLAGS = 4  # of a rank on another: the flag_capacity of an OverlapBuffer

T = TypeVar("T")
Phases = Generator[None, None, T]


class Pushed(NamedTuple):
    """A dispatch, for give_back and for send.

    rows         [capacity, width]  of this rank's experts; valid until the exchange is next called
    row_weights  float32 [capacity] the weight of each row's choice; as valid
    splits       int32 [E / size + 1]: rows of each of this rank's experts
    slots        int64 [T, K]: rank * capacity + row of each pair, -1: it has none
    poison       float32 [1]: NaN if rows are missing, or anything has failed before; else 0
    """

    rows: Tensor
    row_weights: Tensor
    splits: Tensor
    slots: Tensor
    poison: Tensor


class Slotted(Protocol):
    """What give_back and send use of a dispatch, which may be kept for longer than its rows."""

    @property
    def slots(self) -> Tensor: ...


def run_together(calls: Sequence[Phases[T]]) -> list[T]:
    """The results of one call per rank of several ranks in one process, phase by phase: no phase waits for a later one
    of another rank."""
    results: dict[int, T] = {}
    while len(results) < len(calls):
        for rank, call in enumerate(calls):
            if rank not in results:
                try:
                    next(call)
                except StopIteration as end:
                    results[rank] = end.value
    return [results[rank] for rank in range(len(calls))]


def _offsets(size: int, num_experts: int, capacity: int) -> tuple[int, int]:
    """Bytes from the begin of a channel's data, which are the counts of all ranks, to the values and to the rows."""
    values = aligned(4 * size * num_experts)
    return values, values + aligned(4 * capacity)


def buffer_bytes(size: int, num_experts: int, row_bytes: int, capacity: int) -> int:
    """Bytes of a symmetric buffer for an exchange between `size` ranks: about 2 * capacity * row_bytes."""
    data = _offsets(size, num_experts, capacity)[1] + capacity * row_bytes
    return CHANNELS * (2 * aligned(4 * size * FLAGS) + aligned(data))


class PushExchange:
    """One rank's part; all ranks make theirs with the same arguments, over buffers of the same size.

    buffer       fastpar.kernels.overlap_gemm_buffer.OverlapBuffer of `buffer_bytes`, with FLAGS; for nothing else from
                 then on
    num_experts  of all ranks; rank r has those from r * num_experts / size on
    width, dtype the largest rows that are sent
    capacity     rows that each rank has room for
    """

    def __init__(
        self, buffer: OverlapBuffer, *, num_experts: int, width: int, dtype: torch.dtype, capacity: int
    ) -> None:
        if num_experts < 1 or num_experts % buffer.size:
            raise ValueError(f"num_experts ({num_experts}) must be divisible by the number of ranks ({buffer.size})")
        if not 1 <= capacity * buffer.size < 2**31:
            raise ValueError(f"capacity ({capacity}) must be at least 1, and below 2^31 for all {buffer.size} ranks")
        self.buffer, self.num_experts, self.capacity = buffer, num_experts, capacity
        self.width, self.dtype = width, dtype
        self._values_offset, self._rows_offset = _offsets(buffer.size, num_experts, capacity)
        buffer.require(self._rows_offset + capacity * width * dtype.itemsize, f"{capacity} rows of {width} {dtype}")
        self._done = torch.zeros(1, dtype=torch.int32, device=buffer.device)
        self._known: dict[tuple[Any, ...], Places] = {}
        self._used: Channel | None = None  # of the last call: to be finished
        self._begun: Channel | None = None  # of the next call, if it has begun

    # ---- calls

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor | None = None) -> Pushed:
        """Send x [T, width] to the experts that indices [T, K] name; a value that is no expert goes nowhere.

        weights  [T, K]   sent along as float32; None: what `row_weights` holds is of no meaning
        """
        return run_together([self.dispatch_phases(x, indices, weights)])[0]

    def send(self, pushed: Slotted, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [capacity, n] of other x [T, n] over the same tokens, and `poison` as in Pushed."""
        return run_together([self.send_phases(pushed, x)])[0]

    def empty_rows(self, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """[capacity, width] to write what is given back next. The rows of the last call stay valid until then."""
        return self._rows(self._begin(), width or self.width, dtype or self.dtype)

    def give_back(
        self,
        pushed: Slotted,
        rows: Tensor,
        *,
        weights: Tensor | None = None,
        add: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """out [T, n] = add + the sum over each token's choices of its rows, times weights [T, K]; and of `values`
        float32 [capacity] those of this rank's pairs [T, K], 0 where a pair has no row.

        rows  [capacity, n]   those of `empty_rows` are not copied
        """
        return run_together([self.give_back_phases(pushed, rows, weights=weights, add=add, values=values)])[0]

    def end(self) -> None:
        """What the last call has given is used up: the others need not wait for this rank's next call."""
        if self._used is not None:
            self.buffer.finish(self._used)
            self._used = None

    def refuse(self) -> None:
        """Refuse a dispatch, as a rank with wrong arguments: the others' results are NaN, and all ranks' next
        calls raise ValueError. The exchange is of no use after that."""
        channel = self._begin()
        self._announce(channel, torch.full((self.num_experts,), -1, dtype=torch.int32, device=self.buffer.device))
        self._release(channel)
        self.buffer.note_refusal()

    # ---- the same in phases

    def dispatch_phases(self, x: Tensor, indices: Tensor, weights: Tensor | None = None) -> Phases[Pushed]:
        self._check(x, indices, weights)
        buffer, device = self.buffer, x.device
        channel = self._begin()
        ranked = moe_sort.rank_pairs(indices, self.num_experts)
        self._announce(channel, ranked.counts)
        self._release(channel)
        yield
        per_rank = self.num_experts // buffer.size
        first, splits, room = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (self.num_experts, per_rank + 1, 1)
        )
        launch(kernels.plan_kernel, 1, device, {
            "loads": buffer.view(channel, (buffer.size, self.num_experts), torch.int32), **self._waiting(channel),
            "first": first, "splits": splits, "room": room, "rank": buffer.rank, "capacity": self.capacity,
            "num_experts": self.num_experts, "W": buffer.size, "EXPERTS": next_power_of_2(self.num_experts),
        })  # fmt: skip
        slots = torch.empty(indices.shape, dtype=torch.int64, device=device)
        if slots.numel():
            launch(kernels.slot_kernel, cdiv(slots.numel(), moe_sort.BLOCK), device, {
                "indices": indices.contiguous(), "ranks": ranked.ranks, "before": ranked.before, "first": first,
                "room": room, "slots": slots, "num_pairs": slots.numel(), "num_experts": self.num_experts,
                "per_rank": per_rank, "capacity": self.capacity, "BLOCK": moe_sort.BLOCK,
            })  # fmt: skip
        self._push(channel, x, slots, None if weights is None else weights.detach().float())
        yield
        poison = self._await(channel, kernels.ROWS_FLAG, PUSHED)
        row_weights = buffer.view(channel, (self.capacity,), torch.float32, offset=self._values_offset)
        return Pushed(self._rows(channel, x.shape[1], x.dtype), row_weights, splits, slots, poison)

    def send_phases(self, pushed: Slotted, x: Tensor) -> Phases[tuple[Tensor, Tensor]]:
        self._check(x, pushed.slots, None)
        channel = self._begin()
        self._push(channel, x, pushed.slots, None)
        self._release(channel)
        yield
        poison = self._await(channel, kernels.ROWS_FLAG, PUSHED)
        return self._rows(channel, x.shape[1], x.dtype), poison

    def give_back_phases(
        self,
        pushed: Slotted,
        rows: Tensor,
        *,
        weights: Tensor | None = None,
        add: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Phases[tuple[Tensor, Tensor | None]]:
        buffer = self.buffer
        self._check_rows(rows)
        channel = self._begin()
        width, dtype = rows.shape[1], rows.dtype
        target = self._rows(channel, width, dtype)
        if target.data_ptr() != rows.data_ptr():
            target.copy_(rows)
        if values is not None:
            buffer.view(channel, (self.capacity,), torch.float32, offset=self._values_offset).copy_(values)
        launch(kernels.show_kernel, 1, rows.device, {
            "peers": buffer.symmetric.pointers, "flags_offset": self._flags(channel), "state": channel.state,
            "W": buffer.size,
        })  # fmt: skip
        self._release(channel)
        yield
        poison = self._await(channel, kernels.RESULTS_FLAG, SHOWN)
        places = self._places(channel, width, dtype, self._rows_offset)
        out = moe_rows.sum_rows(places, pushed.slots, weights=weights, add=add, poison=poison)
        if values is None:
            return out, None
        places = self._places(channel, 1, torch.float32, self._values_offset)
        found = moe_rows.gather_rows(places, pushed.slots.view(-1)).view(pushed.slots.shape)
        return out, found.add_(poison)

    # ---- parts of calls

    def _begin(self) -> Channel:
        """The channel of the next call, which its peers let go."""
        if self._begun is None:
            self.buffer.check()
            self._begun = self.buffer.next_channel()
            self.buffer.begin(self._begun)
        return self._begun

    def _release(self, channel: Channel) -> None:
        """This rank has used what the last call gave."""
        if self._used is not None:
            self.buffer.finish(self._used)
        self._used, self._begun = channel, None

    def _announce(self, channel: Channel, counts: Tensor) -> None:
        buffer = self.buffer
        launch(kernels.announce_kernel, buffer.size, counts.device, {
            "counts": counts, "peers": buffer.symmetric.pointers,
            "counts_offset": channel.data + 4 * buffer.rank * self.num_experts, "flags_offset": self._flags(channel),
            "state": channel.state, "num_experts": self.num_experts,
            "EXPERTS": next_power_of_2(self.num_experts),
        })  # fmt: skip

    def _push(self, channel: Channel, x: Tensor, slots: Tensor, values: Tensor | None) -> None:
        x = x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
        rows = self._rows(channel, x.shape[1], x.dtype)
        places = Places.of([x], rows)
        options = places.options(rows=max(slots.numel(), 1))
        launch(kernels.push_kernel, PUSH_PROGRAMS if self.buffer.on_gpu else 2, x.device, {
            "x": x, "stride": places.stride, "values": None if values is None else values.contiguous(), "slots": slots,
            "peers": self.buffer.symmetric.pointers, "rows_offset": channel.data + self._rows_offset,
            "values_offset": channel.data + self._values_offset, "flags_offset": self._flags(channel),
            "state": channel.state, "done": self._done, "num_pairs": slots.numel(), "top_k": max(slots.shape[1], 1),
            "capacity": self.capacity, "width": x.shape[1] // places.align, "W": self.buffer.size,
            "ALIGN": places.align, "ROWS": options["ROWS"], "COLS": options["COLS"], "num_warps": options["num_warps"],
        })  # fmt: skip

    def _await(self, channel: Channel, flag: Any, what: Any) -> Tensor:
        poison = torch.zeros(1, dtype=torch.float32, device=self.buffer.device)
        launch(kernels.await_kernel, 1, poison.device, {
            **self._waiting(channel), "poison": poison, "W": self.buffer.size, "FLAG": flag.value, "WHAT": what.value,
            "num_warps": 1,
        })  # fmt: skip
        self.buffer.note_failures()
        return poison

    def _waiting(self, channel: Channel) -> dict[str, Any]:
        buffer = self.buffer
        return {
            "flags": buffer.flag_views(channel)[0], "flag_capacity": buffer.flag_capacity, "state": channel.state,
            "record": buffer.record, "max_polls": buffer.max_polls,
        }  # fmt: skip

    def _flags(self, channel: Channel) -> int:
        """Bytes to the flags of this rank on another."""
        return channel.flags + 4 * self.buffer.rank * self.buffer.flag_capacity

    def _rows(self, channel: Channel, width: int, dtype: torch.dtype) -> Tensor:
        return self.buffer.view(channel, (self.capacity, width), dtype, offset=self._rows_offset)

    def _places(self, channel: Channel, width: int, dtype: torch.dtype, offset: int) -> Places:
        """The places of what all ranks have there; made once, for both channels, since that waits for the device."""
        key = (channel.data + offset, width, dtype)
        if key not in self._known:
            shape, ranks = (self.capacity, width), range(self.buffer.size)
            for c in self.buffer.channels:
                self._known[(c.data + offset, width, dtype)] = Places.of(
                    [self.buffer.view(c, shape, dtype, offset=offset, rank=r) for r in ranks]
                )
        return self._known[key]

    # ---- arguments

    def _check(self, x: Tensor, indices: Tensor, weights: Tensor | None) -> None:
        if x.ndim != 2 or indices.ndim != 2 or len(x) != len(indices):
            raise ValueError(f"x must be [T, H] and indices [T, K], got {tuple(x.shape)} and {tuple(indices.shape)}")
        if weights is not None and weights.shape != indices.shape:
            raise ValueError(
                f"weights must have the shape of indices, {tuple(indices.shape)}, got {tuple(weights.shape)}"
            )
        self._check_rows(x)

    def _check_rows(self, x: Tensor) -> None:
        if x.shape[1] * x.element_size() > self.width * self.dtype.itemsize:
            raise ValueError(
                f"rows of {x.shape[1]} {x.dtype} do not fit the exchange, which has room for {self.width} {self.dtype}"
            )
