"""The end of a row-parallel region in sequence shards and the norm behind it: reduce-scatter, residual and RMSNorm.

For partial sums x of W ranks, of whose rows of H elements this rank keeps some:

    y     = own rows of the sum over ranks of x      in rank order, float32, rounded to x's dtype
    h     = y + residual                             rounded; h = y without a residual
    rstd  = 1 / sqrt(mean(h^2) + eps)
    out   = h * rstd * (weight_offset + weight)

    dh    = the gradient of h in `fastpar.ops.rms_norm`, of own rows;  dresidual = dh;  dx = all_gather(dh)

`fastpar.ops.all_reduce_rms_norm` is for ranks that need every row. Here a rank normalises its own rows only: 1 / W of
the work and of the memory, for the same bytes sent in forward and backward together.

The collective and the norm follow each other. y has to be summed before it can be normalised, so that a kernel for both
would save one pass over own rows, which are in cache where they are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.autograd import reduce_scatter_sequence
from fastpar.comm.communicator import GroupLike
from fastpar.contracts import communicator
from fastpar.contracts.linear import check_sequence_dim, scattered_sizes
from fastpar.contracts.transformer import check_rms_norm
from fastpar.ops.rms_norm import add_rms_norm, rms_norm


@checked()
def reduce_scatter_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    group: GroupLike,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dim: int = -2,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, h): own rows of the sum of x over the ranks, plus the residual, are h; out is its RMSNorm.

        x         [.., M, H]     this rank's partial sums of all tokens
        residual  [.., M_r, H]   this rank's tokens along `dim`, in x's dtype; optional
        weight    [H]            as in `rms_norm`
        out, h    [.., M_r, H]   x's dtype

        forward  h = reduce_scatter(x) + residual; out = h * rstd * (weight_offset + weight)
        dgrad    dresidual = dh, that of rms_norm; dx = all_gather(dh)
        wgrad    dweight: this rank's tokens only, to be added over the group as that of any replicated parameter that
                 sees a part of the sequence

    Collectives: one reduce-scatter of x in forward, one all-gather of the same size in backward if x needs a gradient.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for one rank. Under torch.compile it has to be a
            Communicator made outside.
        dim: a dim of x other than its last, along which tokens are split.
        sizes: M_r of every rank, any of them 0; by default `fastpar.comm.shard_sizes`.

    Worked example: x [[1, 1], [0, 0]] on rank 0 and [[1, 2], [3, 4]] on rank 1, residual [[1, 1]] on rank 0 and
    [[0, 0]] on rank 1, weight [1, 2], eps 0: h = [[3, 4]] and [[3, 4]], out = [[0.848528, 2.262742]] on both.

    Raises:
        TypeError, ValueError: as `rms_norm`; sizes that do not add up; a residual that has not this rank's tokens.
        CommError: as `Communicator` raises it.
    """
    check_rms_norm(x, weight, eps, None, weight_offset)
    dim = check_sequence_dim(x, dim)
    comm = communicator(group)
    rows = scattered_sizes(x.shape[dim], sizes, comm)
    if residual is not None:
        rank = 0 if comm is None else comm.rank
        wanted = (*x.shape[:dim], rows[rank], *x.shape[dim + 1 :])
        if residual.shape != wanted:
            raise ValueError(
                f"residual must have the tokens that rank {rank} keeps, {list(wanted)}, got {list(residual.shape)}"
            )
    y = reduce_scatter_sequence(x, comm, dim=dim, sizes=rows)
    if residual is None:
        return rms_norm(y, weight, eps=eps, weight_offset=weight_offset), y
    return add_rms_norm(y, residual, weight, eps=eps, weight_offset=weight_offset)
