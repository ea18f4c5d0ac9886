"""GEMMs with a collective before or after them, in one piece or in chunks of rows.

    all_gather_matmul       all_gather(a) @ B_j.T          for several B_j [N_j, K] from one gather
    matmul_reduce_scatter   reduce_scatter(sum_j a_j @ B_j)
    matmul_all_reduce       all_reduce(sum_j a_j @ B_j)

With `chunks` > 1 the rows are cut, and the collective of one chunk travels while the GEMM of another is computed.
Every rank cuts alike, since the cut depends only on the shapes that all ranks share. What is computed does not depend
on `concurrent`: without it, the same GEMMs are computed and each collective is waited for as soon as it is launched,
so the bits are the same.

Note: where the rows are cut. A tensor is seen as [L, M, T, features], M the dim that is split over the ranks. Where
L > 1 the chunks are slices of L: a slice of every tensor is contiguous, and each collective is the whole one in small.
Otherwise chunk i takes the i-th piece of every rank's rows, so that all ranks send and receive in every chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator, Pending, shard_sizes
from fastpar.comm.ranges import annotate
from fastpar.ops._buffers import LARGE_BYTES, new_buffer
from fastpar.ops.parallel_linear.types import RankRows

_SMALL_BYTES = 16 << 10
_SURELY_SMALL = LARGE_BYTES // torch.complex128.itemsize
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_RANGES = {name: f"fastpar::linear::{name}" for name in _COLLECTIVES}


def launch(comm: Communicator, name: str, x: Tensor, *, concurrent: bool, **arguments: Any) -> Callable[[], Tensor]:
    """Launch a collective and give what waits for its result; without `concurrent` it is done on return.

    In halves, since nothing but GEMMs comes in between: between CPU ranks, a thread that communicates would take the
    processor that computes, and waking it costs more than a small collective.
    """
    with annotate(_RANGES[name]):
        # Between CPU ranks a few kilobytes take less time than the second half of a launch.
        if concurrent and not (x.is_cpu and x.nbytes <= _SMALL_BYTES):
            pending: Pending[Tensor] = getattr(comm.collectives("split_phase"), name)(x, **arguments)
            return pending.wait
        result: Tensor = getattr(comm, name)(x, **arguments)
    return lambda: result


def as_matrix(x: Tensor) -> Tensor:
    """[..., features] as [rows, features]; either may be 0."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 2 else x.reshape(1, -1)


def _is_large(x: Tensor, features: int) -> bool:
    """Whether [..., features] with the rows of x belongs into a buffer of the pool: `is_large` in fewer steps."""
    if x.numel() * features < _SURELY_SMALL:  # more elements than the rows have
        return False
    width = x.shape[-1]
    return width > 0 and x.numel() // width * features * x.itemsize >= LARGE_BYTES and x.is_cpu


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ bias): x [..., K], weight [N, K] -> [..., N]; `out` is contiguous."""
    if out is None:
        if not _is_large(x, weight.shape[0]):
            return torch.nn.functional.linear(x, weight, bias)  # one call: a GEMM of few rows takes as long as a few
        out = new_buffer(x, (*x.shape[:-1], weight.shape[0]))
    if bias is None:
        torch.mm(as_matrix(x), weight.t(), out=as_matrix(out))
    else:
        torch.addmm(bias, as_matrix(x), weight.t(), out=as_matrix(out))
    return out


def matmul(a: Sequence[Tensor], b: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """sum_j a_j @ b_j: a_j [..., K_j], b_j [K_j, N] -> [..., N]; `out` is contiguous."""
    first, features = a[0], b[0].shape[1]
    if out is None and not _is_large(first, features):
        if len(a) == 1:
            return torch.matmul(first, b[0])
        total = torch.mm(as_matrix(first), b[0])
        result = total if first.dim() == 2 else total.view(*first.shape[:-1], features)
    else:
        result = new_buffer(first, (*first.shape[:-1], features)) if out is None else out
        total = as_matrix(result)
        torch.mm(as_matrix(first), b[0], out=total)
    for x, matrix in zip(a[1:], b[1:], strict=True):
        total.addmm_(as_matrix(x), matrix)  # into the same memory
    return result


class _Piece(NamedTuple):
    """One chunk: `lead` is its slice of L; from each rank's rows, `lengths[r]` of them beginning at `starts[r]`."""

    lead: slice
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def _folded(x: Tensor, dim: int) -> Tensor:
    """x as [L, M, T, features]; a view of a contiguous x."""
    shape = x.shape
    return x.reshape(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 : -1]), shape[-1])


def _pieces(leading: int, rows: RankRows) -> list[_Piece]:
    """At most `chunks` pieces; see the note above."""
    whole = (0,) * len(rows.sizes)
    if leading > 1:
        bounds = list(itertools.accumulate(shard_sizes(leading, min(rows.chunks, leading)), initial=0))
        return [_Piece(slice(a, b), whole, rows.sizes) for a, b in itertools.pairwise(bounds) if a < b]
    chunks = max(1, min(rows.chunks, max(rows.sizes)))
    lengths = [shard_sizes(size, chunks) for size in rows.sizes]
    starts = [list(itertools.accumulate(parts, initial=0)) for parts in lengths]
    return [_Piece(slice(0, 1), tuple(s[i] for s in starts), tuple(part[i] for part in lengths)) for i in range(chunks)]


def _places(piece: _Piece, rows: RankRows) -> list[tuple[slice, slice]]:
    """Where each rank's rows of this piece are in the whole tensor, and where in the piece."""
    firsts = itertools.accumulate(rows.sizes, initial=0)
    inside = itertools.accumulate(piece.lengths, initial=0)
    return [
        (slice(first + start, first + start + length), slice(at, at + length))
        for first, at, start, length in zip(firsts, inside, piece.starts, piece.lengths, strict=False)
    ]


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    comm: Communicator,
    rows: RankRows,
    *,
    keep: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """([all_gather(x) @ W_j.T + bias_j, ...], all_gather(x) if `keep` else None); x [.., M_r, .., K], W_j [N_j, K]."""
    if rows.chunks == 1:
        gathered = launch(comm, "all_gather", x, concurrent=False, dim=rows.dim, sizes=rows.sizes)()
        outs = [linear(gathered, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return outs, gathered if keep else None
    shape = [*x.shape[: rows.dim], sum(rows.sizes), *x.shape[rows.dim + 1 : -1]]
    outs = [new_buffer(x, [*shape, weight.shape[0]]) for weight in weights]
    whole = new_buffer(x, [*shape, x.shape[-1]]) if keep else None
    mine = _folded(x, rows.dim)
    pieces, me = _pieces(mine.shape[0], rows), comm.rank

    def fetch(piece: _Piece, *, concurrent: bool) -> Callable[[], Tensor]:
        own = mine[piece.lead, piece.starts[me] : piece.starts[me] + piece.lengths[me]]
        return launch(comm, "all_gather", own, concurrent=concurrent, dim=1, sizes=piece.lengths)

    targets = [_folded(out, rows.dim) for out in outs]
    receive = fetch(pieces[0], concurrent=False)
    for i, piece in enumerate(pieces):
        arrived = receive()
        if i + 1 < len(pieces):
            receive = fetch(pieces[i + 1], concurrent=rows.concurrent)
        # A slice of L is contiguous in the output; pieces of the ranks' rows (L = 1) are so one by one.
        places = [(slice(None), slice(None))] if piece.lengths == rows.sizes else _places(piece, rows)
        for place, inside in places:
            part = arrived[:, inside]
            if whole is not None:
                _folded(whole, rows.dim)[piece.lead, place] = part
            for target, weight, bias in zip(targets, weights, biases, strict=True):
                linear(part, weight, bias, out=target[piece.lead, place])
    return outs, whole


def matmul_reduce_scatter(
    a: Sequence[Tensor], matrices: Sequence[Tensor], comm: Communicator, rows: RankRows, *, busy: bool
) -> Callable[[], Tensor]:
    """Launch reduce_scatter(sum_j a_j @ B_j); call the result for this rank's rows.

    a_j [.., M, .., K_j] and B_j [K_j, N] -> [.., M_r, .., N]. `busy`: the caller computes something before it calls.
    """
    if rows.chunks == 1:
        partial, concurrent = matmul(a, matrices), rows.concurrent and busy
        return launch(comm, "reduce_scatter", partial, concurrent=concurrent, dim=rows.dim, sizes=rows.sizes)
    folded, features = [_folded(x, rows.dim) for x in a], matrices[0].shape[1]
    received: list[tuple[_Piece, Callable[[], Tensor]]] = []
    pieces = _pieces(folded[0].shape[0], rows)
    for i, piece in enumerate(pieces):
        if piece.lengths == rows.sizes:
            partial = matmul([x[piece.lead] for x in folded], matrices)
        else:
            partial = new_buffer(a[0], (1, sum(piece.lengths), folded[0].shape[2], features))
            for place, inside in _places(piece, rows):
                matmul([x[:, place] for x in folded], matrices, out=partial[:, inside])
        concurrent = rows.concurrent and (busy or i + 1 < len(pieces))
        part = launch(comm, "reduce_scatter", partial, concurrent=concurrent, dim=1, sizes=piece.lengths)
        received.append((piece, part))
    shape = [*a[0].shape[: rows.dim], rows.sizes[comm.rank], *a[0].shape[rows.dim + 1 : -1], features]

    def finish() -> Tensor:
        result = new_buffer(a[0], shape)
        target = _folded(result, rows.dim)
        for piece, part in received:
            start = piece.starts[comm.rank]
            target[piece.lead, start : start + piece.lengths[comm.rank]] = part()
        return result

    return finish


def matmul_all_reduce(
    a: Sequence[Tensor], matrices: Sequence[Tensor], comm: Communicator, rows: RankRows, *, busy: bool
) -> Callable[[], Tensor]:
    """Launch all_reduce(sum_j a_j @ B_j); call the result for it. a_j [..., K_j] and B_j [K_j, N] -> [..., N].

    `busy` as for `matmul_reduce_scatter`.
    """
    if rows.chunks == 1:
        total = matmul(a, matrices)
        if torch._C._len_torch_dispatch_stack() > 0:
            # A mode may have kept the product (torch's selective checkpointing), to give it again for this rank's part.
            total = total.clone()
        return launch(comm, "all_reduce", total, concurrent=rows.concurrent and busy, out=total)
    shape, features = a[0].shape[:-1], matrices[0].shape[1]
    flat = [as_matrix(x) for x in a]
    whole = new_buffer(a[0], (*shape, features))
    total = as_matrix(whole)
    received = []
    places = _row_slices(total.shape[0], rows.chunks)
    for i, place in enumerate(places):
        part = matmul([x[place] for x in flat], matrices, out=total[place])
        concurrent = rows.concurrent and (busy or i + 1 < len(places))
        received.append(launch(comm, "all_reduce", part, concurrent=concurrent, out=part))

    def finish() -> Tensor:
        for part in received:
            part()
        return whole

    return finish


def _row_slices(count: int, chunks: int) -> list[slice]:
    bounds = list(itertools.accumulate(shard_sizes(count, max(1, min(chunks, count))), initial=0))
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
