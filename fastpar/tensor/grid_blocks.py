"""Embedding and head at the ends of a grid's region: one reduce-scatter and one all-gather each, over all its ranks.

    embedding   forward   rows of the ids that a rank holds, summed into the ranks' blocks       (1 - 1/p) M H words
                backward  the blocks' gradients gathered, each rank needs those of its rows      (1 - 1/p) M H
    head        forward   the blocks gathered; logits stay where they are                        (1 - 1/p) M H
                backward  each rank's part of dhidden summed into the blocks                     (1 - 1/p) M H

Note: who may read a sum that is not made
    A model's code stands between embedding and region, and between region and head. So neither knows of the other:
    the embedding returns a `DeferredSum`, which is summed whole when anything but the region reads it; and the tensor
    that leaves the region carries a twin (`twin_of`) of the same numbers, whose gradient the ranks may have in parts.
    The head reads the twin, if what it is called with is that tensor itself, or a view of all of it. All others read
    the tensor, whose gradient every rank has whole: a head behind a norm too, whose dhidden is an all-reduce then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastpar.comm import Communicator, copy_to
from fastpar.comm.autograd import not_a_view
from fastpar.comm.recompute_cache import kept

P = ParamSpec("P")
T = TypeVar("T")

_TWIN = "_fastpar_twin"
_ATEN = torch.ops.aten
# What a sum of one rank's numbers and zeros may be multiplied with before it is made.
_SCALED = {_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.div.Tensor, _ATEN.div.Scalar}


def outside_of_graphs(fn: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile break its graph here, and run `fn` as it is: it holds state, or collectives that are no ops."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return cast(T, torch.compiler.disable(fn)(*args, **kwargs))
        return fn(*args, **kwargs)

    return run


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of a tensor of `shape`, one on each rank of `comm`: blocks[rank] has (dim, first index, size) of its cuts.
    No two overlap, and together they are all of it."""

    comm: Communicator
    shape: torch.Size
    blocks: tuple[tuple[tuple[int, int, int], ...], ...]

    def block(self, x: Tensor, rank: int) -> Tensor:
        """The block of a rank, of a whole x."""
        for dim, first, size in self.blocks[rank]:
            x = x.narrow(dim, first, size)
        return x

    def summed(self, x: Tensor) -> Tensor:
        """This rank's block of the ranks' sum of x: one reduce-scatter."""
        blocks = [self.block(x, rank) for rank in range(self.comm.size)]
        sizes = [block.numel() for block in blocks]
        message = torch.cat([block.reshape(-1) for block in blocks])
        own_shape = blocks[self.comm.rank].shape
        return kept(lambda: not_a_view(self.comm.reduce_scatter(message, dim=0, sizes=sizes).view(own_shape)))

    def gathered(self, part: Tensor) -> Tensor:
        """The whole of the ranks' blocks: one all-gather."""
        whole = part.new_empty(self.shape)
        blocks = [self.block(whole, rank) for rank in range(self.comm.size)]
        sizes = [block.numel() for block in blocks]
        found = kept(lambda: self.comm.all_gather(part.reshape(-1), dim=0, sizes=sizes))
        for block, values in zip(blocks, found.split(sizes), strict=True):
            block.copy_(values.view(block.shape))
        return whole


class _SumIntoBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: BlockLayout) -> Tensor:
        ctx.layout = layout
        return layout.summed(x.parts if isinstance(x, DeferredSum) else x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _WholeOfBlocks.apply(grads[0], ctx.layout, None), None


class _WholeOfBlocks(torch.autograd.Function):
    """`whole`: what has been gathered already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: BlockLayout, whole: Tensor | None) -> Tensor:
        ctx.layout = layout
        return layout.gathered(part) if whole is None else whole.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _SumIntoBlocks.apply(grads[0], ctx.layout), None, None


def sum_into_blocks(x: Tensor, layout: BlockLayout) -> Tensor:
    """forward: a reduce-scatter of the ranks' parts x   backward: an all-gather"""
    return _SumIntoBlocks.apply(x, layout)


class DeferredSum(Tensor):
    """The sum over a group of the ranks' `parts`, made when somebody reads it: one all-reduce, on every rank.

    A tensor without memory of its own: shape, dtype and autograd are those of the sum, and everything that computes
    with it gets a plain tensor of all of it. What one rank alone has written by now may be scaled, and have added to it
    what all ranks have alike, without being summed.
    """

    parts: Tensor
    comm: Communicator
    is_one: bool  # of each element all ranks' parts but one are zero
    whole: Tensor | None
    has_entered: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Tensor, comm: Communicator, is_one: bool = True) -> DeferredSum:
        made: DeferredSum = Tensor._make_wrapper_subclass(
            cls, parts.shape, strides=parts.stride(), dtype=parts.dtype, device=parts.device, requires_grad=False
        )
        made.parts, made.comm, made.is_one = parts, comm, is_one
        made.whole, made.has_entered = None, False
        return made

    @staticmethod
    def of(parts: Tensor, comm: Communicator) -> Tensor:
        """forward: nothing yet   backward: the gradient of the sum, which is that of each part"""
        made: Tensor = _Defer.apply(parts, comm)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kept_so = _still_deferred(func, args, kwargs or {})
        if kept_so is not None:
            return kept_so
        args, kwargs = tree_map_only(DeferredSum, DeferredSum.summed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def enters(self, comm: Communicator) -> bool:
        """Whether a region over `comm` sums it: once it has, always, as layers that are recomputed repeat it."""
        self.has_entered = self.has_entered or (self.whole is None and comm.group == self.comm.group)
        return self.has_entered

    def summed(self) -> Tensor:
        """All of it, outside of autograd; what is written to it is written to this."""

        def once() -> Tensor:
            if self.whole is None:
                self.whole = self.comm.all_reduce(self.parts)
            return self.whole

        return kept(once)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredSum(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """As `Tensor.numpy`."""
        return self.view_as(self).numpy(force=force)

    def tolist(self) -> Any:
        """As `Tensor.tolist`."""
        return self.detach().tolist()


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return DeferredSum(parts.detach(), comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # What comes back to the gradient itself (create_graph=True) is a part on each rank.
        return copy_to(grads[0], ctx.comm) if grads[0].requires_grad else grads[0], None


def _still_deferred(func: Any, args: Any, kwargs: Any) -> DeferredSum | None:
    """x times or divided by a number, or x + y with a y of all ranks alike; None for everything else."""
    if len(args) != 2 or kwargs or func not in (_SCALED | {_ATEN.add.Tensor}):
        return None
    x, other = args
    if not isinstance(x, DeferredSum) or isinstance(other, DeferredSum) or not x.is_one or x.whole is not None:
        return None
    if func is _ATEN.add.Tensor:
        if type(other) is not Tensor or other.dtype != x.dtype or other.dim() == 0 or other.device != x.device:
            return None
        if torch.broadcast_shapes(x.shape, other.shape) != x.shape:
            return None
        # Two numbers are added as one rank would, in whatever order.
        return DeferredSum(x.parts + other if x.comm.rank == 0 else x.parts, x.comm, is_one=False)
    if isinstance(other, Tensor) and (type(other) is not Tensor or other.dim() > 0):
        return None
    made = func(x.parts, other)
    return DeferredSum(made, x.comm) if made.dtype == x.dtype else None


# ---- twins -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Twin:
    make: Callable[[], Tensor]
    version: int  # of the tensor that carries it: one that was written to since has none


def offer_twin(x: Tensor, make: Callable[[], Tensor]) -> None:
    """Let x carry a twin, which `make` gives when it is asked for."""
    setattr(x, _TWIN, _Twin(make, x._version))


def whole_twin(part: Tensor, layout: BlockLayout, whole: Tensor) -> Tensor:
    """The twin of `whole`, gathered from blocks.   backward: a reduce-scatter of the ranks' parts of its gradient"""
    return _WholeOfBlocks.apply(part, layout, whole)


def twin_of(x: Tensor) -> Tensor | None:
    """What has the numbers of x and takes a rank's part of the gradient; None where there is none."""
    if torch.compiler.is_compiling() or not x.requires_grad or not torch.is_grad_enabled():
        return None
    twin: _Twin | None = getattr(x, _TWIN, None)
    base = x._base
    if twin is None and base is not None and hasattr(base, _TWIN):
        is_all = (x.shape, x.stride(), x.storage_offset()) == (base.shape, base.stride(), base.storage_offset())
        twin = getattr(base, _TWIN) if is_all and x.dtype == base.dtype and _is_plain_view(x, base) else None
    return None if twin is None or twin.version != x._version else twin.make()


def _is_plain_view(x: Tensor, base: Tensor) -> bool:
    """Whether torch's own views alone lie between: a node of somebody else, such as ZeRO's, is not gone round."""
    node = x.grad_fn
    while node is not None and node is not base.grad_fn:
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None
