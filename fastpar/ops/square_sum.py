"""The exact sum of squares of many tensors, and its square root.

    sums  = sum of x^2 over all elements of all tensors, as an integer in units of 2^-298
    norm  = sqrt(sums * 2^-298), rounded once

2^-298 is the square of the smallest float32, so every square of a float32, bfloat16 or float16 is a multiple of it, and
the sum needs no rounding. Integers may be added in any order: the result has the same bits for any way of cutting the
elements into tensors, calls, threads and ranks, and sums of several ranks add with a plain all-reduce of int64.

The integer is cut into 19 digits of 32 bits, each in an int64 of its own, so that digits of up to 2^31 ranks add
without a carry. The kernel (csrc/square_sum/square_sum_kernel.h) adds squares in float64 registers in such a way that
nothing is rounded off; it reads every element once. Reproducible summation with a few accumulators (Demmel and Nguyen
2013, Fast reproducible floating-point summation; 2015, Parallel reproducible summation) keeps a rounding error that is
the same in every order, at about the same cost: here there is none, so that the norm is the correctly rounded one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts.gradients import LENGTH, check_sums, check_tensors
from fastpar.ops._backends import fallback, has_kernels

_ext.load()
_square_sum = torch.ops.fastpar.exact_square_sum
_norm = torch.ops.fastpar.square_sum_norm


@torch.library.impl("fastpar::exact_square_sum", "cuda")
def _square_sum_cuda(tensors: list[Tensor]) -> Tensor:
    from fastpar.kernels import square_sum as kernels

    return kernels.exact_square_sum(tensors)


@torch.library.impl("fastpar::square_sum_norm", "cuda")
def _norm_cuda(sums: Tensor, dtype: torch.dtype) -> Tensor:
    from fastpar.kernels import square_sum as kernels

    return kernels.square_sum_norm(sums, dtype)


@torch.library.register_fake("fastpar::exact_square_sum")
def _square_sum_fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((LENGTH,), dtype=torch.int64)


@torch.library.register_fake("fastpar::square_sum_norm")
def _norm_fake(sums: Tensor, dtype: torch.dtype) -> Tensor:
    return sums.new_empty((), dtype=dtype)


@checked()
def exact_square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all elements of `tensors` as an integer, and the number of those that are not finite.

        tensors  any shapes and strides, float32, bfloat16, float16 or float64 in any mix, on one device
        sums     [21] int64: the number of NaN, the number of infinities, and 19 digits d of the sum of the squares of
                 all others, which is sum_i d[i] * 2^(32 i - 298); digits but the last are in [0, 2^32)

    Exact: no rounding, whatever the magnitudes. float64 elements are an exception, since their squares do not fit:
    their magnitude is cut to a multiple of 2^-149, as float32 has, and from 2^128 on they count as infinite. Sums add
    with `+` and with an all-reduce; `square_sum_norm` takes what comes out.

    No collective, no gradient (tensors are read as they are). Memory is read once; elements that lie in memory without
    gaps are not copied, whatever their strides. On CPU a C++ kernel, which does not depend on the number of threads nor
    on torch.set_flush_denormal; on CUDA a Triton kernel with the same bits; elsewhere
    `fastpar.reference.exact_square_sum`. Nothing waits for the device.

    Worked example: [3, 4] gives 25 = 25600 * 2^(9 * 32 - 298): all 0 but sums[2 + 9] = 25600.

    Raises TypeError for other dtypes, ValueError for tensors on several devices.
    """
    listed = check_tensors(tensors)
    if not listed or not has_kernels(listed[0]):
        return cast(Tensor, fallback("exact_square_sum")(listed))
    return cast(Tensor, _square_sum([x.detach() if x.requires_grad else x for x in listed]))


@checked()
def square_sum_norm(sums: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm that belongs to a sum of squares: a scalar tensor, correctly rounded (to nearest even).

        sums   [21] int64, of `exact_square_sum`, or several of them added
        dtype  torch.float32 or torch.float64

    NaN where an element was NaN, else infinite where one was; also infinite where the norm exceeds the dtype. On CPU in
    C++ and on CUDA in Triton, with the same bits and without waiting for the device; elsewhere
    `fastpar.reference.square_sum_norm`, which does wait.

    Worked example: sums[2 + 9] = 25600 alone gives sqrt(25600 * 2^-10) = 5.

    Raises ValueError for other shapes and dtypes.
    """
    check_sums(sums, dtype)
    if not has_kernels(sums):
        return cast(Tensor, fallback("square_sum_norm")(sums, dtype))
    return cast(Tensor, _norm(sums.contiguous(), dtype))
