"""Newton-Schulz orthogonalization of a matrix, whole or split over a group.

Every step applies an odd polynomial to the singular values of X [k, l], k <= l, with products of matrices only:

    A = X @ X.T       B = b A + c A @ A       X = a X + B @ X            2 k^2 l + 2 k^3 + 2 k^2 l operations

Split along the long side, X_r [k, l_r] on rank r: A is the sum over the ranks of X_r @ X_r.T, one all-reduce of the
Gram matrix of the *smaller* side, and X_r = a X_r + B @ X_r needs nobody else. What is left, A @ A, is the same on
every rank; each computes some rows of B and gathers the others. So the work of a step is divided evenly:

    per step and rank   all_reduce(k^2), all_gather(k^2)                 (2 k^2 l + 2 k^3 + 2 k^2 l) / R operations

Split along the short side, the rows of A need all pairs of ranks; the matrix is turned instead: an all-to-all of what a
rank holds, k l / R numbers, makes the long side the one that is split, and a second one turns the result back. No rank
ever holds the whole matrix.

Note: rejected
    Iterating on the Gram matrix alone (X_n = Q_n X_0, with Q_n a polynomial in A_0) needs one all-reduce in all. It
    squares the condition number: in bfloat16 it diverges without restarts, and in float32 its 8 k^3 operations a step
    cost more than is saved unless l is much larger than R k.

Sources: Schulz 1933; Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (in Muon); the sum of Gram matrices
over tensor-parallel ranks is also how Megatron-LM's "distributed" mode begins, which repeats A @ A on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import shard_sizes
from fastpar.contracts import communicator
from fastpar.contracts.newton_schulz import Triple, check_newton_schulz, polynomials

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

# From which k the rows of B are divided: below, gathering them takes longer than computing all of them. On CPU, 2 k^3
# operations take 0.1 to 0.3 ms at 256; for GPUs the number is an estimate.
_DIVIDED_FROM = {"cpu": 256}
_DIVIDED_FROM_ELSEWHERE = 2048


# ---- one rank --------------------------------------------------------------------------------------------------------


def _orthogonalize(x: Tensor, triples: Sequence[Triple], eps: float, dtype: torch.dtype) -> Tensor:
    """The products of torch.optim.Muon in its order, so that the bits are its bits."""
    tall = x.shape[0] > x.shape[1]
    wide = x.to(dtype, copy=True)
    if tall:
        wide = wide.T
    wide.div_(wide.norm().clamp(min=eps))
    for a, b, c in triples:
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


# ---- split over a group ----------------------------------------------------------------------------------------------


def _turn(x: Tensor, comm: Communicator, short: Sequence[int], long: Sequence[int]) -> Tensor:
    """From [k_r, l], split by rows, to [k, l_r]: the pieces of the ranks are the rows of the result, in order."""
    send = torch.cat([part.reshape(-1) for part in x.split(list(long), dim=1)])
    mine = long[comm.rank]
    found = comm.all_to_all(
        send, input_sizes=[x.shape[0] * size for size in long], output_sizes=[rows * mine for rows in short]
    )
    return found.view(sum(short), mine)


def _turn_back(x: Tensor, comm: Communicator, short: Sequence[int], long: Sequence[int]) -> Tensor:
    """From [k, l_r] to [k_r, l]; the inverse of `_turn`."""
    mine, columns = short[comm.rank], x.shape[1]
    found = comm.all_to_all(
        x.reshape(-1), input_sizes=[rows * columns for rows in short], output_sizes=[mine * size for size in long]
    )
    parts = found.split([mine * size for size in long])
    return torch.cat([part.view(mine, size) for part, size in zip(parts, long, strict=True)], dim=1)


def _polynomial_of_gram(gram: Tensor, comm: Communicator, b: float, c: float) -> Tensor:
    """b A + c A @ A, the same bits on every rank."""
    k = gram.shape[0]
    if k < _DIVIDED_FROM.get(gram.device.type, _DIVIDED_FROM_ELSEWHERE):
        return torch.addmm(gram, gram, gram, beta=b, alpha=c)
    sizes = shard_sizes(k, comm.size)
    rows = gram.narrow(0, sum(sizes[: comm.rank]), sizes[comm.rank])
    return comm.all_gather(torch.addmm(rows, rows, gram, beta=b, alpha=c), sizes=sizes)


def _orthogonalize_shard(
    x: Tensor,
    comm: Communicator,
    dim: int,
    sizes: Sequence[int],
    triples: Sequence[Triple],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    x = x.to(dtype, copy=True)
    if dim == -2:  # from here on the columns are split
        x = x.T
    turned = sum(sizes) < x.shape[0]
    long: Sequence[int] = ()
    if turned:  # along the short side; its long side will be
        x = x.T
        long = shard_sizes(x.shape[1], comm.size)
        x = _turn(x, comm, sizes, long)

    squares = torch.linalg.vector_norm(x, dtype=torch.promote_types(dtype, torch.float32)).square()
    x.div_(comm.all_reduce(squares).sqrt().to(dtype).clamp(min=eps))
    for a, b, c in triples:
        gram = comm.all_reduce(x @ x.T)
        x = torch.addmm(x, _polynomial_of_gram(gram, comm, b, c), x, beta=a)

    if turned:
        x = _turn_back(x, comm, sizes, long).T
    return x.T if dim == -2 else x


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def newton_schulz(
    x: Tensor,
    *,
    group: GroupLike = None,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    steps: int = 5,
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "quintic",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The nearest semi-orthogonal matrix, U V^T for x = U S V^T, to the accuracy of a few Newton-Schulz steps.

        x     [..., M, N]   a matrix or a stack of them; with a group this rank's part along `dim`
        out   the shape of x, in `dtype`

        X = x / max(|x|_F, eps), then `steps` times X = a X + b (X X^T) X + c (X X^T)^2 X

    group         over which `dim`, -2 (rows) or -1 (columns), is split; None: x is whole
    sizes         rows or columns of each rank, any of them 0; by default those of x on every rank
    coefficients  "quintic" (five steps bring singular values from 0.003 on to between 0.68 and 1.21), "polar_express"
                  (another polynomial in each step, closer to 1 after as many), "cubic" (Schulz: slow, exact in the
                  limit); or (a, b, c), or such a triple for each step, of which the last serves all further steps
    dtype         of the products and of what travels: bfloat16, float32 or float64

    On one rank the bits are those of torch.optim.Muon (2.13) with bfloat16. Split over a group the products are others,
    so results agree up to rounding: some 1e-6 in float32, some 0.02 in bfloat16, which the steps amplify. Matrices of a
    stack are treated one after the other. A matrix of zeros stays zero; a NaN spreads over its matrix.

    With k <= l the sides of the whole matrix and R ranks, a rank takes part in an all-reduce of one number, and per
    step in an all-reduce and (from k = 256 on, on CPU) an all-gather of k^2 numbers, and computes 1 / R of the
    4 k^2 l + 2 k^3 operations. If the short side is split, two all-to-all of k l / R numbers come on top.
    The result has no gradient.

    Worked example, one step of "cubic" (a, b, c) = (1.5, -0.5, 0) in float32: x = diag(3, 4), so |x|_F = 5 and
    X = diag(0.6, 0.8); 1.5 s - 0.5 s^3 gives diag(0.792, 0.944).

    Raises:
        TypeError: a dtype that is not floating, a DTensor, or another `dtype` than the three.
        ValueError: fewer than 2 dims, another dim, sizes that do not fit, unknown coefficients, steps outside 1..99; x
            that requires a gradient while gradients are recorded.
    """
    comm = communicator(group)
    triples = polynomials(coefficients, steps)
    if not 0.0 <= eps <= 1.0:
        raise ValueError(f"eps must be between 0 and 1, got {eps}")
    dim, sizes = check_newton_schulz(x, comm, dim, sizes, dtype)
    if x.shape[:-2].numel() * sum(sizes) * x.shape[-3 - dim] == 0:
        return x.to(dtype, copy=True)

    def orthogonalized(matrix: Tensor) -> Tensor:
        if comm is None:
            return _orthogonalize(matrix, triples, eps, dtype)
        return _orthogonalize_shard(matrix, comm, dim, sizes, triples, eps, dtype)

    with torch.no_grad():
        if x.dim() == 2:
            return orthogonalized(x).contiguous()
        return torch.stack([orthogonalized(m) for m in x.flatten(0, -3).unbind()]).view(x.shape)
