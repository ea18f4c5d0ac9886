"""SUMMA: linears of a square grid of ranks, of which the blocks of K are broadcast one after the other.

Y [M, N] = X [M, K] W [K, N] on q x q ranks, M over z, N over y; of K a rank has block y of X and block z of W:

    AB    Y    = sum_t X_t W_t.T            X_t broadcast over y, W_t over z
    ABT   dX_t = sum over y of dY W_t       W_t broadcast over z, the sum reduced to rank t
    ATB   dW_t = sum over z of dY.T X_t     X_t broadcast over y, the sum reduced to rank t

A rank sends the words that `grid_linear` with gathers sends: A + B in forward, 2A + 2B in backward. In memory are two
blocks of X and two of W, the one that is multiplied and the one that comes: 2 / q of what gathers make. So it pays from
q = 3 on.

    over shared memory   own parts are written where all ranks of their axis can read them, once a call; a product reads
                         the block of rank t in place. Nothing else travels
    else                 broadcast t + 1 is launched before product t, reduce t waited for after product t + 1

Sums go in the order of t and of ranks, 16-bit floats in float32 with one rounding of each product and one of the sum:
the same bits in every run, with `overlap` or without, over either transport.

Before anything else a call compares what the ranks were given, by an all-gather of a few numbers over each axis, in
turn, so that what is wrong on one rank is raised on all of the grid.

Note: two halves. A call writes half h of an axis' memory. Whoever read what half h held before has done so before it
came to the call in between, which used half 1 - h, and whose numbers are gathered before this call's.

Source: van de Geijn and Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; as linears, with these
three forms: Xu et al. 2021 (Optimus, arXiv:2104.05343).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm import Communicator, SharedRegion
from fastpar.comm.autograd import not_a_view
from fastpar.comm.message_format import DTYPE_NUMBERS
from fastpar.comm.observers import note
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import first_derivatives_only
from fastpar.ops.parallel_linear.gemms import as_matrix, launch

_ALIGNMENT = 64  # bytes
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SummaCall:
    """Where the operands of linears that read one X lie.

    y, z      ranks that have the blocks of X's K, and those of the weights' K: q each
    replicas  ranks that have copies of the weights' parts
    sizes     of the q blocks of K
    overlap   whether broadcasts and reduces travel behind products
    """

    y: Communicator
    z: Communicator
    replicas: Communicator
    sizes: tuple[int, ...]
    overlap: bool = True

    @property
    def steps(self) -> list[int]:
        """The blocks that are not empty."""
        return [t for t, size in enumerate(self.sizes) if size > 0]


def summa_linear(
    call: SummaCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    problem: Exception | None = None,
) -> list[Tensor]:
    """Linears of one input, block by block.

        x        [.., K_y]     this rank's block
        weights  [N_y, K_z]    each: this rank's block
        biases   [N_y] or None
        out      [.., N_y]     one for each weight
        problem  what the caller found wrong with x on this rank: raised here, and told to the other ranks

    Forward, dgrad, wgrad and collectives: as the module's note says, and an all-reduce of each dW over `replicas`.
    Saved for backward are x and the weights. Raises ValueError on all ranks for what differs between them. Second
    derivatives are refused.
    """
    return list(_Summa.apply(call, problem, x, *weights, *biases))


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SummaCall, problem: Exception | None, x: Tensor, *parameters: Any) -> tuple[Any, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(x, *weights)
        return tuple(kept(lambda: _forward(call, x, weights, biases, problem)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        with torch.no_grad():
            found = _backward(ctx.call, x, weights, grads, ctx.needs_input_grad[2:])
        return (None, None, *first_derivatives_only(found, "summa_linear", "a linear of one dim", x, *weights, *grads))


def _forward(
    call: SummaCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    problem: Exception | None,
) -> list[Tensor]:
    if problem is None:
        problem = _problem(call, x, weights)
    is_fine = problem is None
    x_blocks = _open(call.y, [as_matrix(x)] if is_fine else [], call)
    weight_blocks = _open(call.z, weights if is_fine else [], call)
    _agree(call, _words(x, weights, 0) if is_fine else None, problem, (x_blocks, weight_blocks))
    x_blocks.start()
    weight_blocks.start()
    sums = [_Sum() for _ in weights]
    for _ in call.steps:
        x_block = x_blocks.take()
        for total in sums:
            total.add(x_block, weight_blocks.take().t())
        del x_block  # before the next but one is made room for
    return [
        not_a_view(total.result(bias, like=x, shape=(*x.shape[:-1], weight.shape[0])))
        for total, weight, bias in zip(sums, weights, biases, strict=True)
    ]


def _backward(
    call: SummaCall, x: Tensor, weights: Sequence[Tensor], douts: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    count = len(weights)
    grads = {index: as_matrix(dout) for index, dout in enumerate(douts) if dout is not None}
    wanted = [index for index in grads if needs[1 + index]]
    asked = sum(1 << bit for bit, needed in enumerate(needs) if needed) << count | sum(1 << index for index in grads)
    x_blocks = _open(call.y, [as_matrix(x)] if wanted else [], call)
    weight_blocks = _open(call.z, [weights[index] for index in grads] if needs[0] else [], call)
    _agree(call, _words(x, weights, 1 + asked), None, (x_blocks, weight_blocks))
    found: list[Tensor | None] = [None] * (1 + 2 * count)
    dx, dweights = _Reduces(call.y, call.overlap), _Reduces(call.z, call.overlap)
    weight_blocks.start()
    for t in call.steps if needs[0] and grads else ():
        total = _Sum()
        for grad in grads.values():
            total.add(grad, weight_blocks.take())
        dx.add(total.result(None, like=x, shape=(as_matrix(x).shape[0], call.sizes[t])), t)
        del total
    x_blocks.start()  # not before: it shares its axis with the sums of dX
    for t in call.steps if wanted else ():
        x_block = x_blocks.take()
        for index in wanted:
            dweights.add(grads[index].t() @ x_block, t)
        del x_block
    if needs[0] and grads:
        own = dx.own()
        found[0] = own[0].view(x.shape) if own else torch.zeros_like(x)
    for index, dweight in zip(wanted, dweights.own() or [torch.zeros_like(weights[i]) for i in wanted], strict=True):
        found[1 + index] = dweight if call.replicas.size == 1 else call.replicas.all_reduce(dweight)
    for index, grad in grads.items():
        if needs[1 + count + index]:
            found[1 + count + index] = grad.sum(0)
    return found


class _Sum:
    """sum_t a_t @ b_t in the order in which they are added."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        if self._total is None:
            self._total, self._dtype = a @ b, a.dtype
        elif a.dtype not in _HALVES:
            self._total.addmm_(a, b)
        else:
            if self._total.dtype in _HALVES:
                self._total = self._total.float()
            self._total += a @ b

    def result(self, bias: Tensor | None, *, like: Tensor, shape: Sequence[int]) -> Tensor:
        """The sum plus the bias, in the dtype of the products; zeros where there were none."""
        total = like.new_zeros(shape) if self._total is None else self._total
        if bias is not None:
            total += bias
        return total.to(like.dtype if self._dtype is None else self._dtype).view(shape)


class _Reduces:
    """Sums over the ranks of an axis, each to one of them: launched, and waited for when the next one is there."""

    def __init__(self, comm: Communicator, overlap: bool) -> None:
        self._comm, self._overlap = comm, overlap
        self._pending: Callable[[], Tensor | None] | None = None
        self._own: list[Tensor] = []

    def add(self, partial: Tensor, root: int) -> None:
        self._finish()  # a group has one collective in flight
        if self._comm.size == 1:
            self._own.append(partial)
        else:
            self._pending = launch(self._comm, "reduce", partial, concurrent=self._overlap, dst=root)

    def own(self) -> list[Tensor]:
        """The blocks that came to this rank."""
        self._finish()
        return self._own

    def _finish(self) -> None:
        if self._pending is not None:
            result = self._pending()
            self._own += [] if result is None else [result]
            self._pending = None


# ---- what ranks agree on ---------------------------------------------------------------------------------------------

# By word: what it is, and the axes along which it is equal. Those of the gathered numbers are (replicas, z, y).
_REPLICAS, _Z, _Y = range(3)
_EQUAL = (
    ("tokens", (_Y,)),
    ("the dtype of x", (_REPLICAS, _Z, _Y)),
    ("the output features", (_REPLICAS, _Z)),
    ("the order of the weights", (_REPLICAS, _Z)),
    ("what is computed (forward, or backward of which)", (_REPLICAS, _Z, _Y)),
)


def _problem(call: SummaCall, x: Tensor, weights: Sequence[Tensor]) -> ValueError | None:
    """What is wrong with this rank's operands."""
    expected = call.sizes[call.y.rank], call.sizes[call.z.rank]
    if x.dim() < 2 or x.shape[-1] != expected[0]:
        return ValueError(f"x must be [.., tokens, {expected[0]}], this rank's block of K, got {tuple(x.shape)}")
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != expected[1]:
            return ValueError(f"weights must be [N, {expected[1]}], this rank's block of K, got {tuple(weight.shape)}")
        if weight.dtype != x.dtype:
            return ValueError(f"x has dtype {x.dtype}, and a weight {weight.dtype}: cast one of them, or use autocast")
    return None


def _words(x: Tensor, weights: Sequence[Tensor], what: int) -> list[int]:
    rows = tuple(weight.shape[0] for weight in weights)
    return [math.prod(x.shape[:-1]), DTYPE_NUMBERS.get(x.dtype, -1), sum(rows), hash(rows), what]


def _agree(
    call: SummaCall, words: Sequence[int] | None, problem: Exception | None, blocks: Sequence[_SentBlocks]
) -> None:
    """Show the blocks, and have all ranks of the grid see what all were given: raises on all what is wrong on one."""
    for each in blocks:
        each.show()
    numbers = torch.tensor([0, *words] if words is not None else [1, *[0] * len(_EQUAL)], device="cpu")
    # The numbers of an axis' ranks, then those of the next axis' ranks of these: everybody has everybody's.
    for comm in (call.y, call.z, call.replicas):
        numbers = numbers[None] if comm.size == 1 else comm.all_gather(numbers[None])
    if problem is not None:
        raise problem
    for place in (numbers[..., 0] != 0).nonzero().tolist():
        raise ValueError(f"grid_linear: wrong arguments on the rank with {_place(place)} of the grid: see its error")
    for column, (name, axes) in enumerate(_EQUAL, start=1):
        found = numbers[..., column]
        for axis in axes:
            wrong = (found != found.narrow(axis, 0, 1)).nonzero().tolist()
            if wrong:
                first = [0 if dim == axis else at for dim, at in enumerate(wrong[0])]
                raise ValueError(
                    f"grid_linear: {name} must be equal on the ranks of {('tp_d', 'tp_z', 'tp_y')[axis]}, got "
                    f"{found[tuple(first)]} with {_place(first)} and {found[tuple(wrong[0])]} with {_place(wrong[0])}"
                )
    for each in blocks:
        each.agreed()


def _place(index: Sequence[int]) -> str:
    return ", ".join(f"{name}={at}" for name, at in zip(("tp_d", "tp_z", "tp_y"), index, strict=True))


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _open(comm: Communicator, parts: Sequence[Tensor], call: SummaCall) -> _SentBlocks:
    """The blocks of an axis, for this rank's parts."""
    if parts and comm.size > 1 and parts[0].is_cpu and not torch.compiler.is_compiling():
        world = comm.local_world()
        if world is not None and world.size == comm.size:
            return _SharedBlocks(comm, parts, call)
    return _SentBlocks(comm, parts, call)


class _SentBlocks:
    """The blocks [rows of part i, sizes[t]] of all ranks of an axis, in order of t and then i, by broadcasts.

    show, agreed   before and after the ranks have compared what they were given
    start          when the axis is free: has the first block travel
    take           the next block, and has the one after it travel; the one before is no longer needed
    """

    def __init__(self, comm: Communicator, parts: Sequence[Tensor], call: SummaCall) -> None:
        self.comm, self.parts, self.sizes = comm, [part.contiguous() for part in parts], call.sizes
        self._overlap = call.overlap
        self._order = [(t, i) for t in call.steps for i in range(len(parts))][::-1]  # what is left, the next one last
        self._coming: Callable[[], Tensor] | None = None

    def show(self) -> None:
        """There is nothing to show."""

    def agreed(self) -> None:
        """There is nothing to make room for."""

    def start(self) -> None:
        self._coming = self._launch(*self._order.pop()) if self._order else None

    def take(self) -> Tensor:
        assert self._coming is not None
        block = self._coming()
        self.start()
        return block

    def _launch(self, t: int, i: int) -> Callable[[], Tensor]:
        own, shape = self.parts[i], (self.parts[i].shape[0], self.sizes[t])
        if self.comm.size == 1:
            return lambda: own
        numel = math.prod(shape)
        # Elsewhere the argument says how much comes; the own part can say so without new memory.
        like = own.view(-1)[:numel] if own.numel() >= numel else own.new_empty(numel)
        wait = launch(self.comm, "broadcast", like, concurrent=self._overlap, src=t)

        def finish() -> Tensor:
            block = wait()
            return own if t == self.comm.rank else block.view(shape)

        return finish


class _BlockMemory:
    """The two halves of an axis. Holds no reference to the group, which may end before it."""

    def __init__(self) -> None:
        self.halves: list[SharedRegion | None] = [None, None]
        self.turn = 0  # that is written next


# What is kept for a group is its memory, not its communicator, which refers to the group: nothing would ever end.
_MEMORY: weakref.WeakKeyDictionary[ProcessGroup, _BlockMemory] = weakref.WeakKeyDictionary()


class _SharedBlocks(_SentBlocks):
    """The same blocks, read where their owners have written them."""

    def __init__(self, comm: Communicator, parts: Sequence[Tensor], call: SummaCall) -> None:
        super().__init__(comm, parts, call)
        assert comm.group is not None
        self._memory = _MEMORY.setdefault(comm.group, _BlockMemory())
        sizes = [part.shape[0] * max(call.sizes) * part.itemsize for part in self.parts]
        sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._offsets, self._nbytes = [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)
        self._region = self._memory.halves[self._memory.turn]

    def show(self) -> None:
        if self._has_room():
            self._write()

    def agreed(self) -> None:
        memory = self._memory
        if not self._has_room():  # on all ranks of the axis: they have agreed, and their halves are as large
            if self._region is not None:
                self._region.close()
            self._region = memory.halves[memory.turn] = SharedRegion(self.comm, max(self._nbytes, _ALIGNMENT))
            self._write()
            self.comm.barrier()
        memory.turn = 1 - memory.turn

    def start(self) -> None:
        """All blocks have come."""

    def take(self) -> Tensor:
        t, i = self._order.pop()
        own = self.parts[i]
        note("broadcast", self.comm.size, own.shape[0] * self.sizes[t], own.dtype)
        return own if t == self.comm.rank else self._block(t, i)

    def _has_room(self) -> bool:
        return self._region is not None and self._region.nbytes >= self._nbytes

    def _write(self) -> None:
        for i, part in enumerate(self.parts):
            self._block(self.comm.rank, i).copy_(part)

    def _block(self, t: int, i: int) -> Tensor:
        assert self._region is not None
        part = self.parts[i]
        return self._region.tensor((part.shape[0], self.sizes[t]), part.dtype, offset=self._offsets[i], rank=t)


__all__ = ["SummaCall", "summa_linear"]
