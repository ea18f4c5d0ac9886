"""One op for the linears of a tensor-parallel grid: gathers and sums behind the products.

Y [M, N] = X [M, K] W [K, N] with K over the ranks of an axis k, N over those of n, the weights spread over z:

    forward  Y  = reduce_scatter_k(gather_n(X) gather_z(W).T)
    dgrad    dX = reduce_scatter_n(gather_k(dY) gather_z(W))
    wgrad    dW = reduce_scatter_z(gather_k(dY).T gather_n(X))

X and W are gathered again in backward: a rank saves its own parts alone. Words that a rank sends, with
A = (1 - 1/n) MK / (zk), B = (1 - 1/z) KN / (kn), C = (1 - 1/k) MN / (zn): A + B + C in forward, 2A + 2B + C in
backward. Launched ahead of the product that they travel behind: the next weight's gather, the sum of the output before,
in backward the gather of X during dgrad, the sum of dX during wgrad, that of a weight's gradient during the next one's.
The products are the same with `overlap=False`, and so are the bits.

A call with `stream` gathers nothing: `fastpar.ops.summa`.

Source: Agarwal et al. 1995, "A three-dimensional approach to parallel matrix multiplication"; the overlaps are those of
Singh et al. 2023 (AxoNN, arXiv:2305.13525).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.autograd import not_a_view
from fastpar.comm.recompute_cache import kept
from fastpar.contracts.linear import autocast_dtype
from fastpar.ops._autograd import first_derivatives_only
from fastpar.ops.parallel_linear.gemms import as_matrix, launch
from fastpar.ops.summa import SummaCall, summa_linear


@dataclass(frozen=True)
class GridSpread:
    """How an activation lies over an axis that does not cut its face of the grid.

    dim    along which the ranks have parts (gather, reduce-scatter); None: each has all of it (all-reduce)
    sizes  of the parts
    """

    comm: Communicator
    dim: int | None = None
    sizes: tuple[int, ...] = ()

    def whole(self, part: Tensor, overlap: bool) -> Callable[[], Tensor]:
        """All of it, from the parts."""
        if self.comm.size == 1 or self.dim is None:
            return lambda: part
        return launch(self.comm, "all_gather", part, concurrent=overlap, dim=self.dim, sizes=list(self.sizes))

    def summed(self, partial: Tensor, overlap: bool) -> Callable[[], Tensor]:
        """This rank's part of the sum of what the ranks have."""
        if self.comm.size == 1:
            return lambda: partial
        if self.dim is None:
            return launch(self.comm, "all_reduce", partial, concurrent=overlap)
        sizes = list(self.sizes)
        return launch(self.comm, "reduce_scatter", partial, concurrent=overlap, dim=self.dim, sizes=sizes)


@dataclass(frozen=True)
class GridCall:
    """Where the operands of linears that read one X lie.

    x         over n; outputs    over k, one for each weight
    z         [N, K / z] each: the weights' parts along K; replicas    ranks that have copies of these parts
    overlap   whether collectives travel behind products
    stream    blocks of K are broadcast one after the other, where x and z cut K alike and k is one rank
    """

    x: GridSpread
    outputs: tuple[GridSpread, ...]
    z: GridSpread
    replicas: Communicator
    overlap: bool = True
    stream: bool = False


def grid_linear(
    call: GridCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    keep: bool = False,
    problem: Exception | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Linears of one input on a grid; with `keep` the gathered x as well (with `stream` x itself), differentiable.

        x        [.., K_k]     this rank's part over n
        weights  [N_n, K_k/z]  each
        biases   [N_out]       of this rank's output features, or None; their gradient is of all tokens of the z part
        out      [.., N_out]   this rank's part over k, one for each weight
        problem                what the caller found wrong with x on this rank; with `stream` raised on all

    Forward, dgrad, wgrad and what is sent: as the module's note says. With copies of the weights an all-reduce of each
    dW over them. Under autocast all operands have its dtype. Second derivatives are refused.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    biases = [None if bias is None else bias.to(x.dtype) for bias in biases]
    if call.stream:
        summa = SummaCall(call.x.comm, call.z.comm, call.replicas, call.z.sizes, call.overlap)
        return summa_linear(summa, x, weights, biases, problem=problem), x.view_as(x) if keep else None
    if problem is not None:
        raise problem
    *outs, whole = _GridLinear.apply(call, keep, x, *weights, *biases)
    return outs, whole


class _GridLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GridCall, keep: bool, x: Tensor, *parameters: Any) -> tuple[Any, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(x, *weights)
        outs, whole = kept(lambda: _forward(call, x, weights, biases))
        if whole is x:
            whole = x.view_as(x)
        return (*outs, whole if keep else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        with torch.no_grad():
            found = _backward(ctx.call, x, weights, grads, ctx.needs_input_grad[2:])
        return (None, None, *first_derivatives_only(found, "grid_linear", "a linear of one dim", x, *weights, *grads))


def _forward(
    call: GridCall, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor]:
    next_weight = call.z.whole(weights[0], call.overlap)
    whole = call.x.whole(x, call.overlap)()
    outs: list[Callable[[], Tensor]] = []
    for index, (bias, spread) in enumerate(zip(biases, call.outputs, strict=True)):
        weight = next_weight()
        if index + 1 < len(weights):
            next_weight = call.z.whole(weights[index + 1], call.overlap)
        if spread.comm.size == 1:
            outs.append(_done(F.linear(whole, weight, bias)))
            continue
        if outs:
            outs[-1] = _done(outs[-1]())  # a group has one collective in flight
        outs.append(_plus(spread.summed(F.linear(whole, weight), call.overlap), bias))
    return [not_a_view(out()) for out in outs], whole


def _done(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


def _plus(pending: Callable[[], Tensor], bias: Tensor | None) -> Callable[[], Tensor]:
    return pending if bias is None else lambda: pending().add_(bias)


def _backward(
    call: GridCall, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    count, (*douts, whole_grad) = len(weights), grads
    used = [index for index in range(count) if douts[index] is not None]
    wanted = [index for index in used if needs[1 + index]]
    whole_x = call.x.whole(x, call.overlap) if wanted else _done(x)
    wholes: dict[int, Tensor] = {}
    dx = whole_grad
    for index in used:
        dout = douts[index]
        assert dout is not None
        weight = call.z.whole(weights[index], call.overlap) if needs[0] else _done(x)
        wholes[index] = call.outputs[index].whole(dout, False)()
        if needs[0]:
            share = wholes[index] @ weight()
            dx = share if dx is None else dx + share
    rows = as_matrix(whole_x()) if wanted else x  # before the sum of dX is launched: both are over n
    dx_part = call.x.summed(dx, call.overlap and bool(wanted)) if needs[0] and dx is not None else None
    found: list[Tensor | None] = [None] * (1 + 2 * count)
    pending: tuple[int, Callable[[], Tensor]] | None = None
    for index in wanted:
        partial = as_matrix(wholes[index]).t() @ rows
        if pending is not None:
            found[1 + pending[0]] = _over_replicas(call, pending[1]())
        pending = index, call.z.summed(partial, call.overlap)
    if pending is not None:
        found[1 + pending[0]] = _over_replicas(call, pending[1]())
    if dx_part is not None:
        found[0] = dx_part()
    for index in used:
        dout, dim = douts[index], call.outputs[index].dim
        if needs[1 + count + index] and dout is not None:
            cuts_tokens = dim is not None and dim != dout.dim() - 1
            found[1 + count + index] = as_matrix(wholes[index] if cuts_tokens else dout).sum(0)
    return found


def _over_replicas(call: GridCall, dweight: Tensor) -> Tensor:
    return dweight if call.replicas.size == 1 else call.replicas.all_reduce(dweight)


__all__ = ["GridCall", "GridSpread", "grid_linear"]
