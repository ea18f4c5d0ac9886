"""GEMMs that overlap their collective, in Triton: all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce.

    all_gather_gemm(x_shard, weight, bias, buffer=b)     out = gather(x) @ weight.T + bias
    gemm_reduce_scatter(x, weight, bias, buffer=b)       out = scatter(sum over ranks of x @ weight.T) + bias
    gemm_all_reduce(x, weight, bias, buffer=b)           out = sum over ranks of x @ weight.T + bias
    gemm(x, weight, bias)                                the same GEMM without a collective

Nothing synchronises with the host, and calls can be captured in CUDA graphs (after one call outside, which compiles).
Tensors are CUDA (or HIP) tensors; in Triton's interpreter, CPU tensors in memory that processes share.

**Bits.** A tile's sum over K runs in one program in one order, partial sums of ranks are rounded to the dtype of x and
added in rank order in float32, and the result is rounded once. So a result does not depend on the schedule or on time,
and is what `gemm` and a reduction in rank order give. float32 is multiplied in float32, not in TF32.

Note: protocol
    A buffer has two channels, taken in turns; a call uses one, and a rank may be one call ahead of its peers. A channel
    has its own data, flags and epoch. The epoch lives on the device and grows by one with every call:

        begin     epoch += 1; wait until every rank is done with the epoch before (the call before the last one)
        send      data into the peers' memory, then the flag of (this rank, chunk or tile) there = epoch
        use       wait until the flag here >= epoch, read
        finish    done[this rank] = epoch in the signals of every rank

    Flags grow and are never reset. Only one rank writes a flag, and begins to write for a call when all of its writes
    for the call before are in place, so a flag that is ahead says no less. A CUDA graph holds a channel's addresses and
    reads its epoch when it is replayed: with an odd number of calls in it, one channel is used twice in a row, which
    waits a little more and is as correct.

    On opening, a rank clears its flags, which lie at the start of its memory, and only then announces epoch 1 as done;
    the first call has epoch 2, and writes to nobody before that. Epochs are int32: 2^31 calls.

Note: streams
    copy    the caller's shard to the peers (all-gather), or the sums of the tiles that this rank owns (reduce): what
            runs beside the GEMM. It starts when `begin` has ended on the current stream; the current stream waits for
            it before `finish`.
    The GEMM of an all-gather spins on its multiprocessors until rows come. A copy engine brings them; with
    transport="kernel" and on hardware whose copies are kernels, leave multiprocessors free (`num_programs`).

Note: several ranks in one process
    Calls have phases: start, compute, reduce, finish. `run_together` takes one call per rank through them side by side,
    each on its own stream: no phase waits for a later phase of another rank, so that not even streams that share a
    hardware queue can block each other. All their programs together must fit the device: num_programs.

Measured on an H200 with virtual ranks (docs/benchmarks.md): the GEMM alone takes longer than cuBLAS and
the collective one after the other. Compiled for sm_90 by Triton 3.6.0 and 3.7.1, bfloat16, tiles of 128 x 256 x 64, 8
warps, 4 stages; registers a thread at most:

    gather_gemm_kernel      230     0 spills
    scatter_gemm_kernel     226     0 spills
    reduce_kernel            40     0 spills
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import overlap_gemm_kernels as kernels
from fastpar.kernels import overlap_gemm_schedule as schedule
from fastpar.kernels.launch import launch_named as launch
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer, PeerTable
from fastpar.kernels.overlap_gemm_calls import (
    AllGatherGemm,
    GemmConfiguration,
    GemmReduce,
    check_operands,
    configuration,
    gemm_options,
    loadable,
    multiprocessors,
)


def run_together(calls: list[Any], streams: list[Any] | None = None) -> list[Any]:
    """The results of one call per rank of several ranks in one process: `Note: several ranks in one process`."""
    results: list[Any] = []
    for phase in ("start", "compute", "reduce", "finish"):
        results = []
        for call, stream in zip(calls, streams or [None] * len(calls), strict=True):
            with torch.cuda.stream(stream):  # of None does nothing
                results.append(getattr(call, phase)())
    return results


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    buffer: OverlapBuffer | None = None,
    num_programs: int | None = None,
    config: GemmConfiguration | None = None,
) -> Tensor:
    """x @ weight.T + bias: the persistent GEMM of the functions below, with their bits and without a collective.

    x       [M, K]    weight  [N, K], any strides    bias  [N] or None
    out     [M, N]    in the dtype of x: bfloat16, float16 or float32; sums are float32

    The schedule is written on the host, a few microseconds a tile; a buffer, which is not used otherwise, keeps it.
    """
    check_operands(x, weight, bias, x.device)
    x, weight = loadable(x).contiguous(), loadable(weight, transposed=True)
    config = config or configuration(x.shape[0], weight.shape[0], x.dtype, x.device)
    columns = schedule.num_blocks(weight.shape[0], config.block_n)
    shape = (x.shape[0], columns, config.block_m)
    table = _whole_table(x, *shape) if buffer is None else buffer.keep(_whole_table, *shape)
    zeros = torch.zeros(8, dtype=torch.int32, device=x.device)
    out = x.new_empty(x.shape[0], weight.shape[0])
    launch(kernels.gather_gemm_kernel, num_programs or multiprocessors(x.device), x.device, {
        "x": x, "gathered": x, "bias": bias, "out": out, **table._asdict(), "own_row": 0,
        "flags": zeros, "flag_capacity": 1, "state": zeros, "record": zeros, "max_polls": 0,
        **gemm_options(weight, config),
    })  # fmt: skip
    return out


def _whole_table(x: Tensor | OverlapBuffer, rows: int, num_cols: int, block_m: int) -> PeerTable:
    return PeerTable.of(schedule.gather_tiles([rows], 0, num_cols, block_m, block_m, 1), x.device)


def all_gather_gemm(x_shard: Tensor, weight: Any, bias: Any = None, *, buffer: OverlapBuffer, **options: Any) -> Any:
    """Gather rows from the group, and multiply each shard as soon as it is there.

    x_shard  [M_r, K]  this rank's rows      weight  [N_r, K]     bias  [N_r] or None
    out      [M, N_r]  M = sum of M_r; rows in rank order

    weight and bias may be lists, for several GEMMs of one gather (QKV, gate and up): a tuple of outputs. The GEMMs may
    have another N_r on every rank.

    Options: sizes         rows of every rank, where they differ
             transport     "copy": copies and 4-byte flag copies on a stream; "kernel": programs of push_kernel; or a
                           function (target, source) that enqueues the copy of a chunk on the current stream
             chunks        parts of a shard that are announced one by one; the same on all ranks
             num_programs  multiprocessors that the GEMM takes; None: all but those that send (`gather_programs`)
             config        a GemmConfiguration, with the same block_m on all ranks
    Bytes sent by this rank: (W - 1) * M_r * K elements. The buffer holds 2 * M * K elements besides its flags.

    Raises ValueError and TypeError for arguments that cannot be, TimeoutError if a wait of an earlier call has failed.
    """
    call = AllGatherGemm(x_shard, weight, bias, buffer=buffer, **options)
    return run_together([call])[0]


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, buffer: OverlapBuffer, **options: Any
) -> Tensor:
    """Multiply, and send each tile of partial sums to the rank that owns its rows, which adds them up.

    x    [M, K_r]   this rank's features     weight  [N, K_r]     bias  [N] or None, the same on every rank
    out  [M_r, N]   rows of this rank: sum over ranks of x @ weight.T, plus the bias

    Options: sizes            rows of every rank, where they differ; needed if W does not divide M
             slices           see overlap_gemm_schedule.scatter_tiles
             num_programs     multiprocessors that the GEMM takes; None: all but reduce_programs
             reduce_programs  multiprocessors that add up
             config           a GemmConfiguration, the same on all ranks
    Bytes sent by this rank: (W - 1) / W * M * N elements, in whole tiles. The buffer holds 2 * M * N elements.
    """
    call = GemmReduce(x, weight, bias, buffer=buffer, replicate=False, **options)
    out: Tensor = run_together([call])[0]
    return out


def gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, buffer: OverlapBuffer, **options: Any
) -> Tensor:
    """Multiply, send each tile of partial sums to the rank that owns it, which adds them up and sends the sum to all.

    x    [M, K_r]   this rank's features     weight  [N, K_r]     bias  [N] or None, the same on every rank
    out  [M, N]     the same bits on every rank: sum over ranks of x @ weight.T, plus the bias

    Options as for `gemm_reduce_scatter`, without sizes: tiles, not rows, are dealt out, so one row is everybody's work.
    Bytes sent by this rank: 2 * (W - 1) / W * M * N elements. The buffer holds 4 * M * N elements.
    """
    if "sizes" in options:
        raise TypeError("gemm_all_reduce has no sizes: every rank has the whole result")
    call = GemmReduce(x, weight, bias, buffer=buffer, replicate=True, **options)
    out: Tensor = run_together([call])[0]
    return out
