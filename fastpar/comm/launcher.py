"""From the arguments of a collective to flat tensors in the hands of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.groups import carrying_device
from fastpar.comm.observers import note, open_spans
from fastpar.comm.pending import Pending
from fastpar.comm.ranges import annotate
from fastpar.comm.reduction import check_reduction, widened
from fastpar.comm.shards import (
    check_dim,
    check_out,
    check_tensor,
    is_int,
    pack,
    plain_bits,
    row_numel,
    shard_sizes,
    unpack,
    with_dim,
)
from fastpar.comm.transport import InFlight, Transport
from fastpar.comm.transport_selector import Mode, TransportSelector


class Launcher:
    """The collectives of `Communicator`, all of which return a `Pending`.

    `mode` says who does the work, and when: see `Communicator.collectives`.

    Note: the shape of every method. Check the arguments; where there is one rank, or nothing to send and nobody who
    compares, give the result at once; else hand flat tensors to the transport. Packing happens before the launch,
    unpacking in Pending.wait(), and neither communicates.
    """

    def __init__(self, selector: TransportSelector, mode: Mode) -> None:
        self.group, self.rank, self.size, self.timeout = selector.group, selector.rank, selector.size, selector.timeout
        self._selector, self._log = selector, selector.log
        self._mode = mode

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Pending[Tensor]:
        """x of every rank, reduced by op ("sum", "avg", "max", "min"): same shape and dtype. `out=x` works in place."""
        check_tensor(x)
        check_reduction(op, x.dtype)
        if out is not None:
            check_out(out, x)
        # detach makes a tensor, so only where there is a history to leave behind.
        source = x.detach() if x.requires_grad else x
        target = None if out is None else out.detach()

        def write(flat: Tensor) -> Tensor:
            if out is None:
                return flat.view(x.shape)
            if target is not None and flat is not flat_out:
                target.copy_(flat.view(x.shape))
            return out

        # The transport writes where `out` lies if that is flat; else `write` copies.
        flat_out = target.view(-1) if target is not None and target.is_contiguous() else None
        if self.size == 1 or (x.numel() == 0 and not self._selector.compares(x.is_cpu)):
            return self._ready(lambda: write(source.clone(memory_format=torch.contiguous_format).view(-1)))
        flat = _flat(source)
        return self._launch("all_reduce", x, x.numel(), lambda t: t.all_reduce(flat, op, flat_out), write)

    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Pending[Tensor]:
        """This rank's rows along `dim` of x reduced over the ranks. `sizes`: rows of each rank, by default
        `shard_sizes`. `dtype`: of the result; torch.float32 gives the sum or average of 16-bit floats as it was
        accumulated, not rounded, for the same bytes sent.
        """
        check_tensor(x)
        check_reduction(op, x.dtype)
        name = widened(op, x.dtype, dtype)
        dim = check_dim(dim, x)
        sizes = self._part_sizes(sizes, x.size(dim))
        shape = with_dim(x.shape, dim, sizes[self.rank])
        if self.size == 1 or (x.numel() == 0 and not self._selector.compares(x.is_cpu)):
            return self._ready(
                lambda: (
                    x.detach()
                    .narrow(dim, 0, shape[dim])
                    .to(x.dtype if dtype is None else dtype, copy=True, memory_format=torch.contiguous_format)
                )
            )
        flat, numels = pack(x.detach(), dim, sizes)
        return self._launch(
            "reduce_scatter",
            x,
            x.numel(),
            lambda t: t.reduce_scatter(flat, numels, name),
            lambda part: part.view(shape),
        )

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        """The x of all ranks, concatenated along `dim` in rank order. `sizes`: rows of each rank, by default
        x.size(dim) on every rank.
        """
        check_tensor(x)
        dim = check_dim(dim, x)
        sizes = self._own_sizes(sizes, x.size(dim))
        if self.size == 1 or (row_numel(x, dim) * sum(sizes) == 0 and not self._selector.compares(x.is_cpu)):
            shape = with_dim(x.shape, dim, sum(sizes))
            return self._ready(lambda: x.detach().clone(memory_format=torch.contiguous_format).view(shape))
        row = row_numel(x, dim)
        numels = [size * row for size in sizes]
        flat = _flat(x)
        return self._launch(
            "all_gather",
            x,
            sum(numels),
            lambda t: t.all_gather(flat, numels),
            lambda gathered: unpack(gathered, x.shape, dim, sizes),
        )

    def all_to_all(
        self,
        x: Tensor,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        concat_dim: int | None = None,
    ) -> Pending[Tensor]:
        """Send rows of x along split_dim: the first input_sizes[0] to rank 0, the next input_sizes[1] to rank 1, ...;
        what comes is put side by side along concat_dim in rank order, output_sizes[r] rows from rank r.

        concat_dim is split_dim by default. `input_sizes` then defaults to equal parts, `output_sizes` to `input_sizes`
        where those are equal; else it must be given: `exchange_sizes` asks the other ranks.

        With another concat_dim one dim is gathered and another split, as when attention goes from tokens to heads:

            x [B, S/R, H, D]  ->  comm.all_to_all(x, split_dim=2, concat_dim=1)  [B, S, H/R, D]

        `input_sizes` are then the rows of each rank along split_dim, the same on all ranks, by default `shard_sizes`;
        `output_sizes` the rows of each rank's x along concat_dim, by default those of this one.
        """
        check_tensor(x)
        split_dim = check_dim(split_dim, x, "split_dim")
        concat_dim = split_dim if concat_dim is None else check_dim(concat_dim, x, "concat_dim")
        inputs, outputs = self.sizes_of_parts(x, split_dim, concat_dim, input_sizes, output_sizes)
        if self.size == 1:
            return self._ready(lambda: x.detach().clone(memory_format=torch.contiguous_format))
        part = x.shape if concat_dim == split_dim else with_dim(x.shape, split_dim, inputs[self.rank])
        row = with_dim(part, concat_dim, 1).numel()
        if row == 0 and not self._selector.compares(x.is_cpu):
            return self._ready(lambda: x.new_empty(with_dim(part, concat_dim, sum(outputs))))
        flat, sent = pack(x.detach(), split_dim, inputs)
        return self._launch(
            "all_to_all",
            x,
            flat.numel() - sent[self.rank],
            lambda t: t.all_to_all(flat, sent, [size * row for size in outputs]),
            lambda received: unpack(received, part, concat_dim, outputs),
        )

    def broadcast(self, x: Tensor, src: int = 0) -> Pending[Tensor]:
        """The x of rank src. On the other ranks x gives shape and dtype only."""
        check_tensor(x)
        self._check_rank(src, "src")
        if self.size == 1 or (x.numel() == 0 and not self._selector.compares(x.is_cpu)):
            return self._ready(lambda: x.detach().clone(memory_format=torch.contiguous_format))
        flat = _flat(x)
        return self._launch("broadcast", x, x.numel(), lambda t: t.broadcast(flat, src), lambda y: y.view(x.shape))

    def reduce(self, x: Tensor, dst: int = 0, op: str = "sum") -> Pending[Tensor | None]:
        """x of every rank reduced by op, on rank dst; None elsewhere."""
        check_tensor(x)
        check_reduction(op, x.dtype)
        self._check_rank(dst, "dst")
        if self.size == 1 or (x.numel() == 0 and not self._selector.compares(x.is_cpu)):
            return self._ready(
                lambda: x.detach().clone(memory_format=torch.contiguous_format) if self.rank == dst else None
            )
        flat = _flat(x)
        return self._launch(
            "reduce", x, x.numel(), lambda t: t.reduce(flat, dst, op), lambda y: None if y is None else y.view(x.shape)
        )

    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        like: Tensor | None = None,
    ) -> Pending[Tensor]:
        """This rank's rows along `dim` of rank src's x. `sizes`: rows of each rank, by default `shard_sizes`.

        Ranks other than src may pass x=None and like=: a tensor with the shape, dtype and device of the whole x; a
        meta tensor will do.
        """
        self._check_rank(src, "src")
        whole = x if x is not None else like
        if whole is None or (x is None and self.rank == src):
            raise ValueError(
                "x must be a tensor on rank src; other ranks pass x, or like= (a tensor of its shape and dtype)"
            )
        check_tensor(whole)
        dim = check_dim(dim, whole)
        sizes = self._part_sizes(sizes, whole.size(dim))
        shape = with_dim(whole.shape, dim, sizes[self.rank])
        if self.size == 1:
            return self._ready(lambda: whole.detach().clone(memory_format=torch.contiguous_format))
        # A meta tensor says nothing of where the result belongs.
        device = whole.device if whole.device.type != "meta" else self._default_device()
        if whole.numel() == 0 and not self._selector.compares(device.type == "cpu"):
            return self._ready(lambda: torch.empty(shape, dtype=whole.dtype, device=device))
        # An all-to-all in which src alone sends: transports need no operation of their own.
        is_src = self.rank == src
        empty = torch.empty(0, dtype=whole.dtype, device=device)
        flat, inputs = pack(whole.detach(), dim, sizes) if is_src else (empty, [0] * self.size)
        mine = sizes[self.rank] * row_numel(whole, dim)
        outputs = [mine if rank == src else 0 for rank in range(self.size)]
        return self._launch(
            "scatter",
            whole,
            whole.numel(),
            lambda t: t.all_to_all(flat, inputs, outputs),
            lambda part: part.view(shape),
            device=device,
        )

    def gather(
        self, x: Tensor, dst: int = 0, *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Pending[Tensor | None]:
        """The x of all ranks concatenated along `dim`, on rank dst; None elsewhere. `sizes` as in `all_gather`."""
        check_tensor(x)
        dim = check_dim(dim, x)
        self._check_rank(dst, "dst")
        sizes = self._own_sizes(sizes, x.size(dim))
        row, is_dst = row_numel(x, dim), self.rank == dst
        if self.size == 1 or (row * sum(sizes) == 0 and not self._selector.compares(x.is_cpu)):
            shape = with_dim(x.shape, dim, sum(sizes))
            return self._ready(
                lambda: x.detach().clone(memory_format=torch.contiguous_format).view(shape) if is_dst else None
            )
        flat = _flat(x)
        # An all-to-all in which dst alone receives.
        inputs = [flat.numel() if rank == dst else 0 for rank in range(self.size)]
        outputs = [size * row if is_dst else 0 for size in sizes]
        return self._launch(
            "gather",
            x,
            row * sum(sizes),
            lambda t: t.all_to_all(flat, inputs, outputs),
            lambda gathered: unpack(gathered, x.shape, dim, sizes) if is_dst else None,
        )

    def barrier(self) -> Pending[None]:
        if self.size == 1:
            return self._ready(lambda: None)
        return self._launch("barrier", None, 0, lambda t: t.barrier(), lambda _: None)

    # ---- launching

    def _ready(self, result: Callable[[], Any]) -> Pending[Any]:
        """A pending that is done: nothing was sent. The result is computed here, so that later writes to the input do
        not show.
        """
        return Pending.ready(result())

    def _launch(
        self,
        op: str,
        x: Tensor | None,
        numel: int,
        start: Callable[[Transport], InFlight],
        unpack: Callable[[Any], Any],
        *,
        device: torch.device | None = None,
    ) -> Pending[Any]:
        sequence, spans = self._log.count(), open_spans()
        shape, dtype = (None, torch.uint8) if x is None else (x.shape, x.dtype)
        is_cpu = x is None or (x.is_cpu if device is None else device.type == "cpu")
        try:
            with annotate(f"fastpar::comm::{op}"):
                flight = self._selector.launch(op, is_cpu, dtype, start, mode=self._mode)
        except RuntimeError as error:
            raise self._log.failure(error, op, sequence, shape, dtype) from error
        note(op, self.size, numel, dtype)
        if spans is not None:
            spans.launched(op, self.size, numel, dtype)
        # Unpacked at once, so that no pending holds the transport's buffers.
        if flight.work is None:
            return Pending.ready(unpack(flight.finish()))
        return Pending(
            flight.work,
            lambda: unpack(flight.finish()),
            name=op,
            describe=lambda: self._log.describe(op, sequence, shape, dtype),
            timeout=self.timeout,
            spans=spans,
            failed=self._log.note_failure,
        )

    # ---- checking

    def _default_device(self) -> torch.device:
        assert self.group is not None
        return carrying_device(self.group)

    def _check_rank(self, rank: int, name: str) -> None:
        if not is_int(rank):
            raise TypeError(f"{name} must be an int, got {type(rank).__name__}")
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank of the group, 0..{self.size - 1}, got {rank}")

    def _check_sizes(self, sizes: Sequence[int], name: str) -> list[int]:
        if not isinstance(sizes, Sequence) or not all(map(is_int, sizes)):
            raise TypeError(f"{name} must be a sequence of ints, got {type(sizes).__name__} {sizes!r:.60}")
        sizes = [int(size) for size in sizes]
        if len(sizes) != self.size:
            raise ValueError(f"{name} must have one entry per rank ({self.size}), got {len(sizes)}: {sizes}")
        if min(sizes) < 0:
            raise ValueError(f"{name} must not be negative, got {sizes}")
        return sizes

    def _part_sizes(self, sizes: Sequence[int] | None, total: int) -> list[int]:
        if sizes is None:
            return shard_sizes(total, self.size)
        sizes = self._check_sizes(sizes, "sizes")
        if sum(sizes) != total:
            raise ValueError(f"sizes must add up to the {total} rows of x along dim, got {sizes} (sum {sum(sizes)})")
        return sizes

    def _own_sizes(self, sizes: Sequence[int] | None, mine: int) -> list[int]:
        if sizes is None:
            return [mine] * self.size
        sizes = self._check_sizes(sizes, "sizes")
        if sizes[self.rank] != mine:
            raise ValueError(
                f"sizes[{self.rank}] must be the {mine} rows that x of rank {self.rank} has along dim, got {sizes}"
            )
        return sizes

    def sizes_of_parts(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        input_sizes: Sequence[int] | None,
        output_sizes: Sequence[int] | None,
    ) -> tuple[list[int], list[int]]:
        """The sizes of an all_to_all: rows along split_dim that go to each rank, rows along concat_dim that come from
        each."""
        if concat_dim == split_dim:
            return self._exchange_sizes(x.size(split_dim), input_sizes, output_sizes)
        inputs = self._check_sizes(input_sizes, "input_sizes") if input_sizes is not None else None
        if inputs is not None and sum(inputs) != x.size(split_dim):
            raise ValueError(f"input_sizes must add up to the {x.size(split_dim)} rows of x, got {inputs}")
        outputs = self._check_sizes(output_sizes, "output_sizes") if output_sizes is not None else None
        mine = x.size(concat_dim)
        if outputs is not None and outputs[self.rank] != mine:
            raise ValueError(f"output_sizes[{self.rank}] must be the {mine} rows of x along concat_dim, got {outputs}")
        # One dim is gathered and another split, as between tokens and heads.
        return inputs or shard_sizes(x.size(split_dim), self.size), outputs or [mine] * self.size

    def _exchange_sizes(
        self, rows: int, input_sizes: Sequence[int] | None, output_sizes: Sequence[int] | None
    ) -> tuple[list[int], list[int]]:
        if input_sizes is None:
            if rows % self.size:
                raise ValueError(
                    f"x has {rows} rows, not divisible by {self.size} ranks: give input_sizes and output_sizes"
                )
            inputs = [rows // self.size] * self.size
        else:
            inputs = self._check_sizes(input_sizes, "input_sizes")
            if sum(inputs) != rows:
                raise ValueError(f"input_sizes must add up to the {rows} rows of x, got {inputs} (sum {sum(inputs)})")
        if output_sizes is None:
            if input_sizes is not None and len(set(inputs)) > 1:
                raise ValueError(f"output_sizes must be given when input_sizes are not all equal, got {inputs}")
            return inputs, list(inputs)
        outputs = self._check_sizes(output_sizes, "output_sizes")
        if inputs[self.rank] != outputs[self.rank]:
            raise ValueError(
                f"input_sizes[{self.rank}] ({inputs[self.rank]}) and output_sizes[{self.rank}] ({outputs[self.rank]}) "
                f"must agree: both are the rows that rank {self.rank} keeps"
            )
        return inputs, outputs


def _flat(x: Tensor) -> Tensor:
    if x.requires_grad:
        x = x.detach()
    x = plain_bits(x)
    return x if x.ndim == 1 and x.is_contiguous() else x.contiguous().view(-1)
