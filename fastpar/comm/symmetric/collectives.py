"""Collectives of CUDA ranks over symmetric memory, by kernels that push into each other's inboxes. See
`SymmetricCollectives`.

The kernels, and the protocol that they follow, are in csrc/comm (peer_group.h has the protocol). For a group of W ranks
and N bytes on each, what a rank sends over its links:

    all_reduce   mailbox    (W - 1) N           one exchange; the data are their own flags
                 one_shot   (W - 1) N           one exchange, with flags
                 two_shot   2 (W - 1) / W N     reduce-scatter and all-gather in one kernel
                 multimem   (1 + 1 / W) N       two exchanges through NVLink's switch, which adds
    reduce_scatter          (W - 1) / W N
    all_gather              (W - 1) N           N: of this rank's part

Sums are taken in the order of ranks, in float32, and rounded once: the bits are those of `fastpar.comm.Communicator`,
the same on every rank and for every algorithm, but for "multimem": there the switch's order counts, and all ranks have
the same bits still. "auto" never takes it.

Every launch has its number on the device: calls may be captured into a CUDA graph and replayed, on all ranks alike.
Every wait on the device ends after `timeout`; the next call, or `check()`, then raises CommTimeoutError with who waited
for whom. What a call gives after that is NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.errors import CommTimeoutError
from fastpar.comm.shards import shard_sizes
from fastpar.comm.symmetric.buffer import SymmetricBuffer, virtual_ranks

ALGORITHMS = ("one_shot", "two_shot", "mailbox", "multimem")  # as AllReduceAlgorithm in csrc/comm/symmetric_launch.cuh
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# csrc/comm/peer_group.h
MAX_RANKS = 64
_PARITIES, _PHASES, _TURNS, _MAX_BLOCKS = 2, 2, 3, 32
_STATE_WORDS, _REPORT_WORDS = 8, 8
_REPORTED = ("all_reduce (one_shot)", "all_reduce (two_shot)", "reduce_scatter", "all_gather", "all_reduce (mailbox)",
             "all_reduce (multimem)", "all_reduce_rms_norm")  # fmt: skip

# Up to which size of x one exchange is better than two, in bytes that a rank sends. Not measured yet.
ONE_SHOT_BYTES = 1 << 20


class SymmetricCollectives:
    """all_reduce, reduce_scatter, all_gather and all_reduce_rms_norm of CUDA ranks that reach each other's memory.

        collectives = SymmetricCollectives.create(comm)       # a collective call
        y = collectives.all_reduce(x)

    All ranks make the same calls in the same order, with the same shapes and dtypes; nothing checks that before the
    data are sent. Calls of one group follow each other: a call on another stream than the last one waits for that
    stream. What is captured into a graph is captured on one stream.

    Tensors are float32, bfloat16 or float16 (all_gather: any dtype), of any shape and length; those that are not
    contiguous are copied. Results are new and contiguous, without autograd history.

    buffers         one SymmetricBuffer for each rank that this process works for. Several: `virtual`
    region_bytes    of an inbox, per source; a tensor that does not fit goes in pieces
    mailbox_bytes   the same for "mailbox"
    timeout         seconds after which a wait on the device gives up

    `create` and `virtual` make the buffers. Who makes them himself lets all ranks meet after the constructor, and uses
    them for nothing else.
    """

    def __init__(
        self,
        buffers: Sequence[SymmetricBuffer],
        *,
        region_bytes: int = 1 << 20,
        mailbox_bytes: int = 128 << 10,
        timeout: float = 60.0,
        is_virtual: bool = False,
    ) -> None:
        first = buffers[0]
        _check_options(first.size, region_bytes, mailbox_bytes, timeout)
        needed, words = workspace_bytes(first.size, region_bytes, mailbox_bytes), signal_words(first.size)
        if first.nbytes < needed or first.signal_words < words:
            raise ValueError(
                f"the buffer has {first.nbytes} bytes and {first.signal_words} signals; {first.size} ranks with "
                f"region_bytes={region_bytes} and mailbox_bytes={mailbox_bytes} need {needed} and {words}"
            )
        _check_device(first.device)
        _ext.load()
        self.rank, self.size, self.device = first.rank, first.size, first.device
        self.timeout, self.mailbox_bytes, self.region_bytes = float(timeout), mailbox_bytes, region_bytes
        self.has_multimem = first.multicast != 0
        self._buffers, self._local, self.is_virtual = list(buffers), len(buffers), is_virtual
        self._states = torch.zeros((self._local, _STATE_WORDS), dtype=torch.int64, device=self.device)
        self._report = torch.zeros(_REPORT_WORDS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._reported = ctypes.c_int64.from_address(self._report.data_ptr())
        self._group = [first.rank, region_bytes, mailbox_bytes, int(self.timeout * 1e9)]
        self._stream: torch.cuda.Stream | None = None
        inboxes = needed - mailbox_bytes * _TURNS * first.size
        for buffer in buffers:  # poison: nothing has come
            buffer.tensor((needed - inboxes,), torch.uint8, offset=inboxes).fill_(0xFF)
        self._synchronize()

    @classmethod
    @checked(computed=False)
    def create(
        cls,
        comm: GroupLike,
        device: str | torch.device = "cuda",
        *,
        region_bytes: int = 1 << 20,
        mailbox_bytes: int = 128 << 10,
        timeout: float = 60.0,
    ) -> SymmetricCollectives:
        """Make it for the ranks of a group: a collective call. Takes 4 W region_bytes + 3 W mailbox_bytes of each
        device.

        Raises ValueError for options, and what `SymmetricBuffer.create` raises.
        """
        comm = Communicator.of(comm)
        _check_options(comm.size, region_bytes, mailbox_bytes, timeout)
        nbytes = workspace_bytes(comm.size, region_bytes, mailbox_bytes)
        buffer = SymmetricBuffer.create(comm, nbytes, device, signal_words=signal_words(comm.size))
        made = cls([buffer], region_bytes=region_bytes, mailbox_bytes=mailbox_bytes, timeout=timeout)
        comm.barrier()
        return made

    @classmethod
    @checked(computed=False)
    def virtual(
        cls,
        size: int,
        device: str | torch.device = "cuda",
        *,
        region_bytes: int = 1 << 20,
        mailbox_bytes: int = 128 << 10,
        timeout: float = 60.0,
    ) -> SymmetricCollectives:
        """All ranks of a group on one device, in this process: for tests and benches. Every tensor has one more dim,
        the first, of ranks; one launch works for all of them.
        """
        _check_options(size, region_bytes, mailbox_bytes, timeout)
        nbytes = workspace_bytes(size, region_bytes, mailbox_bytes)
        buffers = virtual_ranks(size, nbytes, device, signal_words=signal_words(size))
        return cls(buffers, region_bytes=region_bytes, mailbox_bytes=mailbox_bytes, timeout=timeout, is_virtual=True)

    # ---- collectives

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None, algorithm: str = "auto") -> Tensor:
        """x of every rank, added (op "sum") or averaged ("avg"): same shape and dtype. `out=x` works in place.

        algorithm  "auto", "mailbox", "one_shot", "two_shot" or "multimem" (op "sum", where `has_multimem`)

        Worked example: [1, 2] on rank 0 and [10, 20] on rank 1 give [11, 22] on both.
        """
        self._check(x, op)
        chosen = self._algorithm(algorithm, op, x.nbytes // self._local)
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()):
            raise ValueError(
                f"out must be contiguous and as x, {tuple(x.shape)} {x.dtype}, got {tuple(out.shape)} {out.dtype}"
            )
        result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        if x.numel() == 0:
            return result
        multicast = self._buffers[0].multicast if chosen == "multimem" else 0
        torch.ops.fastpar.symmetric_all_reduce(
            self._rows(x), self._rows(result), *self._memory(), multicast, ALGORITHMS.index(chosen), op == "avg"
        )
        return result

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's rows of x, added or averaged over the ranks. `sizes`: rows of each rank, by default
        `shard_sizes`.

        Virtual ranks get [ranks, largest of sizes, ...]; what a rank has fewer is zeros.

        Worked example: [1, 2, 3] on rank 0, [10, 20, 30] on rank 1 and sizes [1, 2] give [11] and [22, 33].
        """
        shape = self._check(x, op, dims=1)
        sizes = self._sizes(shape[0], sizes)
        if sum(sizes) != shape[0]:
            raise ValueError(f"sizes must add up to the {shape[0]} rows of x, got {list(sizes)}")
        row = math.prod(shape[1:])
        result = self._result(x, max(sizes) if self.is_virtual else sizes[self.rank], shape[1:], is_short=True)
        if x.numel() > 0:
            torch.ops.fastpar.symmetric_reduce_scatter(
                self._rows(x), self._rows(result), *self._memory(), [size * row for size in sizes], op == "avg"
            )
        return result

    def all_gather(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        """The rows of x of all ranks, in the order of ranks. Any dtype. `sizes`: rows of each rank, by default those
        of x on every rank.

        Virtual ranks give [ranks, largest of sizes, ...].

        Worked example: [1] on rank 0, [2, 3] on rank 1 and sizes [1, 2] give [1, 2, 3] on both.
        """
        shape = self._check(x, None, dims=1)
        sizes = [shape[0]] * self.size if sizes is None else self._sizes(shape[0], sizes)
        here = max(sizes) if self.is_virtual else sizes[self.rank]
        if here != shape[0]:
            raise ValueError(f"x must have {here} rows, as sizes {list(sizes)} say, got {shape[0]}")
        result = self._result(x, sum(sizes), shape[1:])
        if result.numel() > 0:
            # elements of 16 bytes go as two of 8
            row = math.prod(shape[1:]) * (2 if x.element_size() == 16 else 1)
            source, target = (
                rows.view(torch.float64) if rows.element_size() == 16 else rows
                for rows in (self._rows(x), self._rows(result))
            )
            torch.ops.fastpar.symmetric_all_gather(source, target, *self._memory(), [size * row for size in sizes])
        return result

    def all_reduce_rms_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        *,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, h, rstd) in one kernel: h = all_reduce(x) + residual, out = h * rstd * (weight_offset + weight).

            x, residual   [..., H]      the residual is the same on every rank
            weight        [H]           x's dtype
            out, h        [..., H]      x's dtype; rounded after the sum, after the residual, and at the end
            rstd          [rows]        float32: 1 / sqrt(mean(h^2) + eps)

        One exchange, as "one_shot". h has the bits of `all_reduce` followed by an addition; out is that of
        `fastpar.ops.rms_norm` up to the order in which squares are added.
        `fastpar.ops.all_reduce_rms_norm` is the differentiable op on top of it.

        Worked example: x [1, 1] on rank 0 and [1, 2] on rank 1, residual [1, 1], weight [1, 2], eps 0: h = [3, 4],
        rstd = 0.282843, out = [0.848528, 2.262742].
        """
        hidden = self._check(x, "sum", dims=1)[-1]
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise ValueError(
                f"residual must be as x, {tuple(x.shape)} {x.dtype}, got {tuple(residual.shape)} {residual.dtype}"
            )
        if weight is not None and (weight.shape != (hidden,) or weight.dtype != x.dtype):
            raise ValueError(f"weight must be [{hidden}] {x.dtype}, got {tuple(weight.shape)} {weight.dtype}")
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        h, rows = torch.empty_like(out), x.numel() // max(hidden, 1)
        rstd = x.new_empty((self._local, rows // self._local), dtype=torch.float32)
        if x.numel() > 0:
            torch.ops.fastpar.symmetric_all_reduce_rms_norm(
                self._rows(x),
                None if residual is None else self._rows(residual),
                None if weight is None else weight.detach().contiguous(),
                self._rows(out),
                self._rows(h),
                rstd,
                *self._memory(),
                hidden,
                eps,
                weight_offset,
            )
        return out, h, rstd if self.is_virtual else rstd.view(-1)

    def check(self) -> None:
        """Raise CommTimeoutError if a wait of an earlier call has timed out. Does not wait for the device."""
        if self._reported.value == 0:
            return
        collective, rank, peer, block, phase, epoch, seen, waited = self._report.tolist()
        name = _REPORTED[collective - 1]
        found = f"packet {seen} had not come" if "mailbox" in name else f"it was at #{seen}"
        raise CommTimeoutError(
            f"{name} #{epoch} on rank {rank} of {self.size}: rank {peer} did not come within {waited / 1e9:g} s "
            f"({found}; block {block}, exchange {phase}). Results since then are NaN, and the group cannot be used any "
            "further: make a new one."
        )

    def close(self) -> None:
        """Give the memory back: a collective call, after all work on the device has ended."""
        self._synchronize()
        for buffer in self._buffers:
            buffer.close()

    def __repr__(self) -> str:
        ranks = "virtual" if self.is_virtual else f"rank={self.rank}"
        return f"SymmetricCollectives({ranks}, size={self.size}, device={self.device})"

    # ---- helpers

    def _check(self, x: Tensor, op: str | None, dims: int = 0) -> torch.Size:
        """The shape of one rank's x."""
        self.check()
        if op not in (None, "sum", "avg"):
            raise ValueError(f"op must be sum or avg, got {op!r}")
        if op is not None and x.dtype not in DTYPES:
            raise TypeError(f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        if x.device != self.device:
            raise ValueError(f"x must be on {self.device}, got {x.device}")
        if self.is_virtual and (x.dim() == 0 or x.shape[0] != self.size):
            raise ValueError(f"x must be [{self.size}, ...], one for each virtual rank, got {tuple(x.shape)}")
        shape = x.shape[1:] if self.is_virtual else x.shape
        if len(shape) < dims:
            raise ValueError(f"x must have at least one dim, got {tuple(shape)}")
        self._follow_stream()
        return shape

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _follow_stream(self) -> None:
        """Calls of a group run one after the other, whatever streams they are made on."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if stream == self._stream or torch.cuda.is_current_stream_capturing():
            return
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _algorithm(self, algorithm: str, op: str, nbytes: int) -> str:
        if algorithm == "auto":
            if nbytes * (self.size - 1) > ONE_SHOT_BYTES:
                return "two_shot"
            return "mailbox" if nbytes <= self.mailbox_bytes else "one_shot"
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be auto, {', '.join(ALGORITHMS)}, got {algorithm!r}")
        if algorithm == "multimem" and not self.has_multimem:
            raise ValueError("algorithm multimem needs multicast memory (NVLink with a switch), which these ranks lack")
        if algorithm == "multimem" and op == "avg":
            raise ValueError("algorithm multimem adds and rounds in the switch: it has op sum only")
        return algorithm

    def _sizes(self, rows: int, sizes: Sequence[int] | None) -> list[int]:
        if sizes is None:
            return list(shard_sizes(rows, self.size))
        if len(sizes) != self.size or min(sizes) < 0:
            raise ValueError(f"sizes must have {self.size} entries, none negative, got {list(sizes)}")
        return list(sizes)

    def _rows(self, x: Tensor) -> Tensor:
        """[local ranks, elements]"""
        return x.detach().contiguous().view(self._local, -1)

    def _result(self, x: Tensor, rows: int, rest: Sequence[int], *, is_short: bool = False) -> Tensor:
        shape = (self._local, rows, *rest) if self.is_virtual else (rows, *rest)
        return x.new_zeros(shape) if is_short and self.is_virtual else x.new_empty(shape)

    def _memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
        first = self._buffers[0]
        return first.pointers, first.signals, self._states, self._report, self._group


def workspace_bytes(size: int, region_bytes: int, mailbox_bytes: int) -> int:
    """Bytes of symmetric memory that each of `size` ranks needs."""
    return size * (_PARITIES * _PHASES * region_bytes + _TURNS * mailbox_bytes)


def signal_words(size: int) -> int:
    """Words of a signal pad that each of `size` ranks needs."""
    return 2 * _PHASES * _MAX_BLOCKS * size


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(
            f"the buffers are on {device}; these kernels are CUDA's (CPU ranks: fastpar.comm.Communicator)"
        )


def _check_options(size: int, region_bytes: int, mailbox_bytes: int, timeout: float) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"a group has 1 to {MAX_RANKS} ranks, got {size}")
    for name, nbytes in (("region_bytes", region_bytes), ("mailbox_bytes", mailbox_bytes)):
        if nbytes < 16 or nbytes % 16:
            raise ValueError(f"{name} must be a positive multiple of 16, got {nbytes}")
    if timeout <= 0:
        raise ValueError(f"timeout must be positive (seconds), got {timeout}")
