"""Gradients of a linear layer's weight and bias, accumulated over chunks of rows in float32 and rounded once.

    dW = sum over chunks of dz.T @ x        db = sum over chunks of the column sums of dz

How a chunk's bfloat16 product reaches the float32 sum depends on the device. On CUDA the GEMM accumulates into float32
itself (`torch.addmm(out_dtype=)`). torch's CPU GEMMs have no float32 output for bfloat16 inputs, so there the product
is rounded to bfloat16, block by block while it is in the cache, and added: one rounding per chunk, 2^-9 of the chunk's
own share, on top of the last one. Converting the inputs and computing in float32 would avoid it at more than twice the
time of the GEMM (measured, 512 x 1024 x 32768, two cores: 87 ms for the GEMM, 91 with the blocked sum, 190 in
float32). Where there is one chunk, its product is the result, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.contracts import compute_dtype
from fastpar.ops._buffers import new_buffer

_BLOCK_ROWS = 2048  # of dW: 4 MiB of bfloat16 at 1024 features, which stays in the second and third level caches
_BLOCK_BYTES = 8 << 20


def sum_bytes(weight: Tensor) -> int:
    """What the sum over chunks takes on CUDA, besides the result; a single product is the result at once.

    More than memory: every chunk but the first reads and writes it. 8192 tokens, 4096 features and 128256 classes in
    bfloat16 are 4 chunks of 512 MiB, whose sum of 2.1 GB is moved 7 times and then narrowed: an estimated 4.5 ms of 41.
    One chunk has logits of 2.1 GB.
    """
    dtype = compute_dtype(weight.dtype)
    return weight.numel() * dtype.itemsize if weight.device.type == "cuda" and weight.dtype != dtype else 0


class WeightGrad:
    """dW [V, K] of a weight, chunk by chunk."""

    def __init__(self, weight: Tensor, num_chunks: int, *, exact: bool) -> None:
        """`exact`: something will be added to the sum besides products, so it must be float32 from the start."""
        self._weight = weight
        self._keep_product = num_chunks == 1 and not exact
        self.total: Tensor | None = None  # float32 (float64 for float64), or the weight's dtype for a single product

    def add(self, dz: Tensor, x: Tensor) -> None:
        """total += dz.T @ x, with dz [n, V] and x [n, K] in the weight's dtype."""
        dtype = self._weight.dtype
        if self._keep_product or dtype == compute_dtype(dtype):
            if self.total is None:
                self.total = new_buffer(self._weight, self._weight.shape)
                torch.mm(dz.t(), x, out=self.total)
            else:
                self.total.addmm_(dz.t(), x)
        elif dz.device.type == "cpu":
            self._add_blocks(dz, x)
        elif self.total is None:
            self.total = torch.mm(dz.t(), x, out_dtype=torch.float32)
        else:
            torch.addmm(self.total, dz.t(), x, out_dtype=torch.float32, out=self.total)

    def _add_blocks(self, dz: Tensor, x: Tensor) -> None:
        is_first = self.total is None
        if self.total is None:
            self.total = new_buffer(self._weight, self._weight.shape, torch.float32)
        for total, columns in zip(self.total.split(_BLOCK_ROWS), dz.split(_BLOCK_ROWS, dim=1), strict=True):
            product = torch.mm(columns.t(), x)
            total.copy_(product) if is_first else total.add_(product)

    def result(self) -> Tensor:
        """dW in the weight's dtype; zeros if nothing was added."""
        if self.total is None:
            return torch.zeros_like(self._weight, memory_format=torch.contiguous_format)
        if self.total.dtype == self._weight.dtype:
            return self.total
        return new_buffer(self._weight, self._weight.shape).copy_(self.total)


def weighted_sum(matrix: Tensor, weights: Tensor | None) -> Tensor:
    """sum_n weights[n] matrix[n], or of the rows alone: [n, m] -> [m] in float32 (float64 for float64 matrices).

    In blocks of rows, so that no float32 copy of the matrix exists.
    """
    dtype = compute_dtype(matrix.dtype)
    if weights is None:
        return matrix.sum(dim=0, dtype=dtype)
    if matrix.dtype == dtype:
        return torch.mv(matrix.t(), weights.to(dtype))
    total = matrix.new_zeros(matrix.shape[1], dtype=dtype)
    rows = max(1, _BLOCK_BYTES // max(1, matrix.shape[1] * dtype.itemsize))
    for part, factors in zip(matrix.split(rows), weights.to(dtype).split(rows), strict=True):
        total.addmv_(part.to(dtype).t(), factors)
    return total
