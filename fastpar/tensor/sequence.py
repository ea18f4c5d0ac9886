"""Sequence parallelism: the stretch of a model in which activations are split along the sequence.

Between two tensor-parallel blocks (attention, MLP) the residual stream, norms and dropout do the same work on every
rank. Sequence parallelism gives each rank a part of the sequence there: the all-reduce after a block becomes a
reduce-scatter and the identity before the next one an all-gather, the same bytes in total, and activation memory of the
stretch falls by the group size (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.2).

Note: uneven sequences
    A sequence of S tokens is split by `torch.chunk`'s rule. A rank cannot tell S from its own part (129 of 257 or of
    258 on two ranks), so the region notes S on entry and checks every later tensor against it. A tensor that does not
    fit is an error that names both sizes, never a wrong result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm import (
    Communicator,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
    shard_sizes,
)
from fastpar.comm.shards import check_is_tensor


class SequenceRegion:
    """One sequence-sharded stretch over a group; modules inside it share this object.

    x        [B, S, H]     full, outside the region (`dim` is the sequence dim)
    x_shard  [B, S_r, H]   this rank's part, S_r by `torch.chunk`'s rule
    """

    @checked(computed=False)
    def __init__(self, comm: Communicator, dim: int = 1):
        self.comm = comm
        self.dim = dim
        self._total: int | None = None
        self.batch = 0  # sequences in what entered last, where `dim` is 1
        self.is_whole = False  # for the time of `whole_stream`

    def __deepcopy__(self, memo: Any) -> SequenceRegion:
        """Itself: hooks of a copied model keep pointing here, so its layers must as well."""
        return self

    option = "sequence_parallel=True"  # of `fastpar.parallelize`, which splits what is in the region

    @property
    def total(self) -> int:
        """Full length of the sequence now in the region."""
        if self._total is None:
            raise RuntimeError("the sequence-parallel region is empty: no tensor has entered it (SequenceRegion.enter)")
        return self._total

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of every rank."""
        return _sizes(self.total, self.comm.size)

    @property
    def offset(self) -> int:
        """Position of this rank's first token in the whole sequence."""
        return sum(self.sizes[: self.comm.rank])

    def place(self) -> dict[int, tuple[int, int]]:
        """Of every dim that is cut (position of the first index of this rank, size of the whole)."""
        return {self.dim: (self.offset, self.total)}

    def whole_of(self, x: Tensor) -> Tensor | None:
        """The whole of which x [B, S_r, ...] is this rank's part, or x [B S_r, ...]; None where it cannot be told."""
        sizes, mine = self.sizes, self.sizes[self.comm.rank]
        if x.dim() >= 3 and x.size(self.dim) == mine:
            return gather_from(x, self.comm, dim=self.dim, sizes=sizes)
        if self.dim == 1 and x.dim() >= 2 and x.size(0) == self.batch * mine:  # rows of all sequences in turn
            rows = x.unflatten(0, (self.batch, mine))
            return gather_from(rows, self.comm, dim=1, sizes=sizes).flatten(0, 1)
        return None

    def set_total(self, total: int) -> None:
        """Say how long the sequence is when its parts come from elsewhere, such as an earlier pipeline stage."""
        self._total = total

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """What brings the length of now back while a layer in the region is recomputed, when the region may hold
        another sequence already (`fastpar.recompute`)."""
        total = self._total

        @contextmanager
        def restored() -> Iterator[None]:
            before, self._total = self._total, total
            try:
                yield
            finally:
                self._total = before

        return restored

    def enter(self, x: Tensor) -> Tensor:
        """Keep this rank's part.  forward: slice   backward: all-gather"""
        check_is_tensor(x)
        if not -x.dim() <= self.dim < x.dim():
            raise ValueError(f"x must have dim {self.dim}, which is the sequence, got {tuple(x.shape)}")
        self.set_total(x.size(self.dim))
        self.batch = x.size(0)
        if self.is_whole:
            return x
        return scatter_to(x, self.comm, dim=self.dim, sizes=self.sizes)

    def leave(self, x_shard: Tensor) -> Tensor:
        """The full sequence for replicated work.  forward: all-gather   backward: slice"""
        self.check_shard(x_shard)
        if self.is_whole:
            return x_shard
        return gather_from(x_shard, self.comm, dim=self.dim, sizes=self.sizes)

    def gather(self, x_shard: Tensor) -> Tensor:
        """The full sequence as input of a tensor-parallel block.  forward: all-gather   backward: reduce-scatter"""
        self.check_shard(x_shard)
        if self.is_whole:
            return copy_to(x_shard, self.comm)
        return gather_sequence(x_shard, self.comm, dim=self.dim, sizes=self.sizes)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A block's partial sums to this rank's part.  forward: reduce-scatter   backward: all-gather"""
        self.check_whole(x)
        if self.is_whole:
            return reduce_from(x, self.comm)
        return reduce_scatter_sequence(x, self.comm, dim=self.dim, sizes=self.sizes)

    def check_whole(self, x: Tensor) -> None:
        """ValueError unless x has all tokens."""
        if x.size(self.dim) != self.total:
            raise ValueError(
                f"a tensor-parallel block returned {x.size(self.dim)} tokens along dim {self.dim}, but {self.total} "
                "entered the sequence-parallel region"
            )

    def check_shard(self, x_shard: Tensor) -> None:
        """ValueError unless x has this rank's tokens."""
        expected = self.total if self.is_whole else self.sizes[self.comm.rank]
        if x_shard.size(self.dim) != expected:
            raise ValueError(
                f"rank {self.comm.rank} got {x_shard.size(self.dim)} tokens along dim {self.dim}; its part of the "
                f"{self.total} in the sequence-parallel region is {expected}. Was the input already gathered, or the "
                "sequence cut inside the region?"
            )


@functools.lru_cache(maxsize=64)
def _sizes(total: int, parts: int) -> tuple[int, ...]:
    # Asked for several times a layer, and always of the few lengths that a model runs on.
    return tuple(shard_sizes(total, parts))


def splitting(region: SequenceRegion | None) -> SequenceRegion | None:
    """The region where the sequence is split now, or None."""
    return None if region is None or region.is_whole else region


@contextmanager
def whole_stream(regions: Iterable[SequenceRegion]) -> Iterator[None]:
    """Let the layers of these regions work on all positions, as without sequence parallelism: for comparing."""
    entered = [region for region in dict.fromkeys(regions) if not region.is_whole]
    for region in entered:
        region.is_whole = True
    try:
        yield
    finally:
        for region in entered:
            region.is_whole = False


_HIDDEN_NAMES = ("hidden_states", "x", "input", "hidden", "inputs")


def map_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `fn` to the hidden states among a module's arguments: the first positional one, or a usual keyword."""
    if args and isinstance(args[0], Tensor):
        return (fn(args[0]), *args[1:]), kwargs
    for name in _HIDDEN_NAMES:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: fn(kwargs[name])}
    raise ValueError(
        f"cannot find the hidden states in a call with {len(args)} positional arguments and keywords {sorted(kwargs)}; "
        f"pass them first or as one of {list(_HIDDEN_NAMES)}"
    )


def map_stream(args: tuple[Any, ...], kwargs: dict[str, Any], fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `fn` to the hidden states among a module's arguments, and to others of their shape, such as residuals."""
    found: list[Tensor] = []
    map_hidden(args, kwargs, found.append)

    def one(value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.shape == found[0].shape and value.is_floating_point()
        return fn(value) if is_part else value

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


def map_output(output: Any, fn: Any) -> Any:
    """Apply `fn` to the hidden states a module returns: the tensor itself or the first of a tuple."""
    if isinstance(output, tuple):
        return (fn(output[0]), *output[1:])
    return fn(output)


def hook_input(module: nn.Module, fn: Any) -> Any:
    """Run `fn` on the hidden states that go into `module`; returns the hook's handle."""

    def pre_hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_hidden(args, kwargs, fn)

    return module.register_forward_pre_hook(pre_hook, with_kwargs=True)


def hook_stream(module: nn.Module, fn: Any) -> Any:
    """Run `fn` on all tensors of the hidden states' shape that go into `module`; returns the hook's handle."""

    def pre_hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_stream(args, kwargs, fn)

    return module.register_forward_pre_hook(pre_hook, with_kwargs=True)


def hook_output(module: nn.Module, fn: Any) -> Any:
    """Run `fn` on the hidden states that come out of `module`; returns the hook's handle."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return map_output(output, fn)

    return module.register_forward_hook(hook)


__all__ = [
    "SequenceRegion",
    "hook_input",
    "hook_output",
    "hook_stream",
    "map_hidden",
    "map_output",
    "map_stream",
    "splitting",
    "whole_stream",
]
