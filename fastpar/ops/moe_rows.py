"""Rows of tokens on their way to experts and back. See `fastpar.reference.moe_rows`, whose functions these are."""

from __future__ import annotations

from fastpar.reference.moe_rows import dot_rows, gather_rows, sort_pairs, sum_rows

__all__ = ["dot_rows", "gather_rows", "sort_pairs", "sum_rows"]
