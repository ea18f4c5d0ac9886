"""Reductions in rank order: checks, and the local part."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

OPS = ("sum", "avg", "max", "min")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_LOW_PRECISION = (torch.bfloat16, torch.float16)
# What transports call the reductions whose result stays as it was accumulated: 16-bit floats in, float32 out.
WIDE_OPS = {"sum": "float32 sum", "avg": "float32 avg"}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise ValueError for an unknown op, TypeError for a dtype that it cannot be applied to."""
    if not isinstance(op, str) or op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if dtype.is_floating_point and dtype.itemsize >= 2:
        return
    if dtype.is_floating_point or dtype.is_complex:
        raise TypeError(
            f"cannot reduce x of {dtype}: convert it first (complex: torch.view_as_real; 8-bit floats: bfloat16)"
        )
    if op == "avg":
        raise TypeError(f'op "avg" needs a floating-point tensor, got {dtype}')
    if op == "sum" and dtype == torch.bool:
        raise TypeError('op "sum" of torch.bool: use "max" for any, "min" for all, or convert to an integer type')


def widened(op: str, dtype: torch.dtype, result: torch.dtype | None) -> str:
    """The name of the reduction of `dtype` to `result` (None: `dtype` itself).

    Raises TypeError where there is none: only sums and averages of bfloat16 and float16 have one, to float32.
    """
    if result is None or (isinstance(result, torch.dtype) and result == dtype):
        return op
    is_wide = isinstance(result, torch.dtype) and result == torch.float32
    if not is_wide or dtype not in _LOW_PRECISION or op not in WIDE_OPS:
        raise TypeError(
            f"dtype must be that of x, or torch.float32 for the sum or avg of bfloat16 or float16; got {result} for "
            f'op "{op}" of {dtype}'
        )
    return WIDE_OPS[op]


def widen(x: Tensor, op: str) -> tuple[Tensor, str]:
    """One of `WIDE_OPS` of x as the plain reduction of float32 with the same bits; x and any other op as they are."""
    plain = next((plain for plain, wide in WIDE_OPS.items() if wide == op), None)
    return (x, op) if plain is None else (x.float(), plain)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial results are kept in: float32 for bfloat16 and float16, else the dtype itself."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def reduce_rows(rows: Tensor, op: str) -> Tensor:
    """`reduce_in_order` of rows [size, n]: on CUDA one kernel reads them once, to the same bits."""
    takes = rows.is_cuda and _HAS_TRITON and rows.is_floating_point() and not torch.compiler.is_compiling()
    if not takes or op in ("max", "min"):
        return reduce_in_order(rows.unbind(), op)
    from fastpar.kernels.rank_sum import rank_sum

    is_wide = op in WIDE_OPS.values()
    return rank_sum(rows, average=op in ("avg", WIDE_OPS["avg"]), dtype=torch.float32 if is_wide else None)


def reduce_in_order(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """((parts[0] op parts[1]) op parts[2]) ..., accumulated in `accumulator(dtype)` and rounded once (not at all by one
    of `WIDE_OPS`); NaN wins in max and min.

    The result is new, or `out` (same shape and dtype; may be none of the parts).
    """
    dtype = parts[0].dtype
    if op in ("max", "min"):
        pick = torch.maximum if op == "max" else torch.minimum
        result = torch.empty_like(parts[0]) if out is None else out
        result.copy_(parts[0])
        for part in parts[1:]:
            pick(result, part, out=result)
        return result
    in_place = out is not None and accumulator(dtype) == dtype
    total = out.copy_(parts[0]) if in_place else parts[0].to(accumulator(dtype), copy=True)  # type: ignore[union-attr]
    for part in parts[1:]:
        total.add_(part)
    if op in ("avg", WIDE_OPS["avg"]):
        total.div_(len(parts))
    if op in WIDE_OPS.values():
        return total
    if in_place or (out is None and total.dtype == dtype):
        return total
    return total.to(dtype) if out is None else out.copy_(total)
