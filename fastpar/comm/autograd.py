"""The differentiable pairs of tensor and sequence parallelism: the backward of each is the forward of its partner.

    copy_to          forward x                      backward all_reduce(dy)        partner of reduce_from
    reduce_from      forward all_reduce(x)          backward dy
    gather_from      forward all_gather(x)          backward own slice of dy       partner of scatter_to
    scatter_to       forward own slice of x         backward all_gather(dy)
    gather_sequence  forward all_gather(x)          backward reduce_scatter(dy)    partner of reduce_scatter_sequence
    reduce_scatter_sequence  forward reduce_scatter(x)   backward all_gather(dy)
    all_to_all       forward all_to_all(x)          backward all_to_all(dy), the other way: its own partner

Which to use after an all_gather depends on what follows. Where every rank computes the same from the gathered tensor,
each already holds the whole gradient of it: `gather_from`. Where each rank computes its own share, the gradients of
the shares must be added: `gather_sequence`.

All take (x, comm): a Communicator, ProcessGroup, 1-D DeviceMesh or None. With one rank x itself is returned. Otherwise
results are new tensors, but for `copy_to`, which returns a view of x. Every call is one collective in the direction
that communicates, none in the other; the backward passes call the partner, so they can be differentiated again. An
undefined gradient counts as zeros, so that ranks stay in step. Errors are those of `Communicator`.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.groups import resolve_group
from fastpar.comm.recompute_cache import kept
from fastpar.comm.shards import check_dim, check_tensor, is_int, shard_sizes


def not_a_view(x: Tensor) -> Tensor:
    """x, which a Function has made and nobody else reads, as a tensor that callers may write to in place: autograd
    refuses that for a view that a Function returns.

    Before it is `kept`: an operation in place must raise the version of what the tape has, and of what a dispatch mode
    has kept (torch's selective checkpointing), which `detach` shares.
    """
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    if forward_ad._current_level < 0:
        return x.detach()
    own: Tensor = torch.ops.aten._unsafe_view(x, x.shape)  # with its tangent, which the next collective refuses
    return own


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        # A view: autograd wants another tensor, not other memory.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from(grad, ctx.comm), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return kept(lambda: not_a_view(comm.all_reduce(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to(grad, ctx.comm), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, sizes: list[int]) -> Tensor:
        ctx.args = comm, dim, sizes
        return kept(lambda: not_a_view(comm.all_gather(x, dim=dim, sizes=sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, dim, sizes = ctx.args
        return scatter_to(grad, comm, dim=dim, sizes=sizes), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, sizes: list[int]) -> Tensor:
        ctx.args = comm, dim, sizes
        own = x.narrow(dim, sum(sizes[: comm.rank]), sizes[comm.rank])
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, dim, sizes = ctx.args
        return gather_from(grad, comm, dim=dim, sizes=sizes), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, sizes: list[int]) -> Tensor:
        ctx.args = comm, dim, sizes
        return kept(lambda: not_a_view(comm.all_gather(x, dim=dim, sizes=sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, dim, sizes = ctx.args
        return reduce_scatter_sequence(grad, comm, dim=dim, sizes=sizes), None, None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, sizes: list[int]) -> Tensor:
        ctx.args = comm, dim, sizes
        return kept(lambda: not_a_view(comm.reduce_scatter(x, dim=dim, sizes=sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, dim, sizes = ctx.args
        return gather_sequence(grad, comm, dim=dim, sizes=sizes), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, dims: tuple[int, int], inputs: list[int], outputs: list[int]
    ) -> Tensor:
        ctx.args = comm, dims, inputs, outputs
        sizes = {"input_sizes": inputs, "output_sizes": outputs}
        return kept(lambda: not_a_view(comm.all_to_all(x, split_dim=dims[0], concat_dim=dims[1], **sizes)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        comm, (split_dim, concat_dim), inputs, outputs = ctx.args
        back = all_to_all(
            grad, comm, split_dim=concat_dim, concat_dim=split_dim, input_sizes=outputs, output_sizes=inputs
        )
        return back, None, None, None, None


def _split(x: Tensor, comm: Communicator, dim: int, sizes: Sequence[int] | None) -> tuple[int, list[int]]:
    """dim counted from the front, and the rows of each rank of a whole x."""
    dim = check_dim(dim, x)
    if sizes is None:
        return dim, shard_sizes(x.size(dim), comm.size)
    if not isinstance(sizes, Sequence) or not all(map(is_int, sizes)):
        raise TypeError(f"sizes must be a sequence of ints, got {type(sizes).__name__} {sizes!r:.60}")
    if len(sizes) != comm.size or sum(sizes) != x.size(dim) or min(sizes) < 0:
        raise ValueError(f"sizes must be {comm.size} numbers >= 0 that add up to {x.size(dim)}, got {list(sizes)}")
    return dim, list(sizes)


def _communicator(x: Tensor, comm: GroupLike) -> Communicator:
    """The communicator; arguments are checked where one rank has nothing to do, too."""
    check_tensor(x)
    if isinstance(comm, Communicator):
        return comm
    return Communicator(resolve_group(comm, "comm"))


def copy_to(x: Tensor, comm: GroupLike) -> Tensor:
    """y = x; dx = all_reduce(dy). Where replicated activations enter a column-parallel region.

    x [...] replicated -> y [...], a view of x. Backward: one all_reduce of x's size.
    """
    comm = _communicator(x, comm)
    return x if comm.size == 1 else _CopyTo.apply(x, comm)


def reduce_from(x: Tensor, comm: GroupLike) -> Tensor:
    """y = all_reduce(x); dx = dy. Where the partial sums of a row-parallel region end.

    x [...] partial -> y [...] replicated. Forward: one all_reduce of x's size.
    """
    comm = _communicator(x, comm)
    return x if comm.size == 1 else _ReduceFrom.apply(x, comm)


def gather_from(x: Tensor, comm: GroupLike, *, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """y = all_gather(x, dim); dx = own rows of dy. Where a sharded dim becomes replicated.

    x [..., n_r, ...] this rank's shard -> y [..., sum of n_r, ...]. `sizes`: the n_r, by default all equal. Forward:
    one all_gather.
    """
    comm = _communicator(x, comm)
    if comm.size == 1:
        return x
    dim, sizes = _shard(x, comm, dim, sizes)
    return _GatherFrom.apply(x, comm, dim, sizes)


def scatter_to(x: Tensor, comm: GroupLike, *, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own rows of x along dim; dx = all_gather(dy, dim). Where a replicated dim becomes sharded.

    x [..., n, ...] replicated -> y [..., n_r, ...]. `sizes`: the n_r, by default `shard_sizes(n, size)`. Backward:
    one all_gather.
    """
    comm = _communicator(x, comm)
    if comm.size == 1:
        return x
    dim, sizes = _split(x, comm, dim, sizes)
    return _ScatterTo.apply(x, comm, dim, sizes)


def gather_sequence(x: Tensor, comm: GroupLike, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = all_gather(x, dim); dx = reduce_scatter(dy, dim). Where sequence-sharded activations enter a
    column-parallel region.

    x [..., n_r, ...] this rank's tokens -> y [..., sum of n_r, ...]. `sizes`: the n_r, by default all equal.
    Forward: one all_gather. Backward: one reduce_scatter. Together the bytes of one all_reduce.
    """
    comm = _communicator(x, comm)
    if comm.size == 1:
        return x
    dim, sizes = _shard(x, comm, dim, sizes)
    return _GatherSequence.apply(x, comm, dim, sizes)


def reduce_scatter_sequence(x: Tensor, comm: GroupLike, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own rows of sum over ranks of x, along dim; dx = all_gather(dy, dim). Where a row-parallel region ends in
    sequence shards.

    x [..., n, ...] partial -> y [..., n_r, ...]. `sizes`: the n_r, by default `shard_sizes(n, size)`.
    Forward: one reduce_scatter. Backward: one all_gather.
    """
    comm = _communicator(x, comm)
    if comm.size == 1:
        return x
    dim, sizes = _split(x, comm, dim, sizes)
    return _ReduceScatterSequence.apply(x, comm, dim, sizes)


def all_to_all(
    x: Tensor,
    comm: GroupLike,
    *,
    split_dim: int = 0,
    concat_dim: int | None = None,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
) -> Tensor:
    """y = all_to_all(x); dx = all_to_all(dy) with the dims and the sizes changed over. Where what is sharded by one dim
    becomes sharded by another, as tokens and heads around attention (Jacobs et al. 2023, arXiv:2309.14509), or where
    rows go to other ranks.

    x [..., n_r, ..., h, ...] -> y [..., sum of n_r, ..., h_r, ...] for concat_dim and split_dim; sizes as in
    `Communicator.all_to_all`. One all_to_all forward, one backward.
    """
    comm = _communicator(x, comm)
    if comm.size == 1:
        return x
    split_dim = check_dim(split_dim, x, "split_dim")
    concat_dim = split_dim if concat_dim is None else check_dim(concat_dim, x, "concat_dim")
    inputs, outputs = comm.all_to_all_sizes(x, split_dim, concat_dim, input_sizes, output_sizes)
    return _AllToAll.apply(x, comm, (split_dim, concat_dim), inputs, outputs)


def _shard(x: Tensor, comm: Communicator, dim: int, sizes: Sequence[int] | None) -> tuple[int, list[int]]:
    """dim counted from the front, and the rows of each rank where x is this rank's shard (`sizes` itself is checked
    by all_gather)."""
    dim = check_dim(dim, x)
    return dim, [x.size(dim)] * comm.size if sizes is None else list(sizes)
