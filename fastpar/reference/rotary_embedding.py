"""Rotary position embeddings in plain PyTorch, the tables of their angles, and the checks of their arguments."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from fastpar.arguments import checked

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("bshd", "bhsd")
_POSITION_DTYPES = (torch.int64, torch.int32)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- tables ----------------------------------------------------------------------------------------------------------


@checked(meta=True)
def rotary_tables(
    positions: Tensor,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    frequencies: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the angles of positions, for `rotary_embedding`.

        positions    [...]                 int64 or int32, of this rank's tokens: any, in any order
        frequencies  [rotary_dim / 2]      optional
        cos, sin     [..., rotary_dim / 2] `dtype`

        cos[.., i] = scale * cos(positions * frequencies[i]),  frequencies[i] = theta^(-2 i / rotary_dim)

    Angles are computed in float64 and the tables rounded once. Who multiplies in float32 is off by 6e-8 of the angle:
    6e-3 radians at position 100,000.

    Args:
        rotary_dim: elements of a head that are turned, even.
        theta: the base of the frequencies; not used where these are given.
        frequencies: those of another rule (Llama 3's or YaRN's scaling: `rotary_emb.inv_freq` of transformers).
        scale: a factor on cos and sin (YaRN's `attention_scaling`).

    Raises TypeError and ValueError for dtypes, shapes and values.
    """
    if not isinstance(positions, Tensor) or positions.dtype not in _POSITION_DTYPES:
        found = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of torch.int64 or torch.int32, got {found}")
    _check_rotary_dim(rotary_dim)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if not 0.0 < theta < math.inf:
        raise ValueError(f"theta must be positive and finite, got {theta}")
    scale = float(scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, got {scale}")
    if frequencies is None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
        frequencies = torch.full((), theta, dtype=torch.float64, device=positions.device) ** -exponents
    elif frequencies.shape != (rotary_dim // 2,) or not frequencies.is_floating_point():
        raise ValueError(
            f"frequencies must be [{rotary_dim // 2}] floating numbers, rotary_dim / 2, got "
            f"{list(frequencies.shape)} of {frequencies.dtype}"
        )
    angles = positions.unsqueeze(-1).double() * frequencies.double()
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    theta: float,
    rotary_dim: int | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """The tables, contiguous, in the dtype of the computation. Raises TypeError or ValueError with the values."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    _check_heads(q, "q", layout)
    if rotary_dim is None:
        rotary_dim = q.shape[-1]
    _check_rotary_dim(rotary_dim)
    if (positions is None) == (cos is None) or (cos is None) != (sin is None):
        raise ValueError("give either cos and sin, or positions: the positions of these tokens in the whole sequence")
    if positions is not None:
        cos, sin = rotary_tables(positions, rotary_dim, theta=theta, dtype=compute_dtype(q.dtype))
    assert cos is not None
    assert sin is not None
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        _check_heads(x, name, layout)
        if x.dtype != q.dtype or x.device != q.device or x.dim() != q.dim():
            raise ValueError(
                f"q and k must have one dtype, device and number of dims, got {q.dtype} on {q.device} "
                f"{list(q.shape)} and {x.dtype} on {x.device} {list(x.shape)}"
            )
        if rotary_dim > x.shape[-1]:
            raise ValueError(
                f"rotary_dim ({rotary_dim}) must be at most the {x.shape[-1]} elements of a head of {name}"
            )
        _check_tables(x, name, cos, sin, rotary_dim, layout)
    dtype = compute_dtype(q.dtype)
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def _check_heads(x: Tensor, name: str, layout: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of {', '.join(map(str, DTYPES))}, got {found}")
    if x.dim() not in (3, 4):
        dims = "[B, S, heads, D] or [S, heads, D]" if layout == "bshd" else "[B, heads, S, D] or [heads, S, D]"
        raise ValueError(f"{name} must be {dims} for layout {layout!r}, got {list(x.shape)}")


_MAX_DIM = 1 << 20  # of a head; more is a mistake, and would ask for tables that no memory holds


def _check_rotary_dim(rotary_dim: int) -> None:
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int):
        raise TypeError(f"rotary_dim must be an int, got {type(rotary_dim).__name__}")
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and not negative, got {rotary_dim}")
    if rotary_dim > _MAX_DIM:
        raise ValueError(f"rotary_dim must be at most {_MAX_DIM}, got {rotary_dim}")


def _check_tables(x: Tensor, name: str, cos: Tensor, sin: Tensor, rotary_dim: int, layout: str) -> None:
    tokens, half = x.shape[-3 if layout == "bshd" else -2], rotary_dim // 2
    batches = (1, x.shape[0]) if x.dim() == 4 else (1,)
    for table_name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor) or table.dtype not in DTYPES:
            found = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{table_name} must be a tensor of {', '.join(map(str, DTYPES))}, got {found}")
        if table.device != x.device:
            raise ValueError(f"{table_name} must be where {name} is, on {x.device}, got {table.device}")
        if torch.is_grad_enabled() and table.requires_grad:
            raise ValueError(f"there is no gradient for {table_name}, which requires one: pass {table_name}.detach()")
        if table.shape[-1:] == (rotary_dim,) and half > 0:
            raise ValueError(
                f"{table_name} must have rotary_dim / 2 = {half} columns, one for every pair, got {rotary_dim}: where "
                f"its halves are equal pass {table_name}[..., :{half}], where its pairs are {table_name}[..., ::2]"
            )
        is_known = table.dim() == 2 or (table.dim() == 3 and table.shape[0] in batches)
        if not is_known or table.shape[-2:] != (tokens, half):
            raise ValueError(
                f"{table_name} must be [S, R / 2] or [B, S, R / 2], here [{tokens}, {half}] or "
                f"[{batches[-1]}, {tokens}, {half}] for {name} {list(x.shape)} in layout {layout!r}; got "
                f"{list(table.shape)}"
            )


# ---- the rotation ----------------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, heads_first: bool, interleaved: bool) -> Tensor:
    """x with its pairs turned; tables as `check_arguments` gives them."""
    half = cos.shape[-1]
    heads = -3 if heads_first else -2
    c, s = cos.unsqueeze(heads), sin.unsqueeze(heads)
    turned, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    a, b = first * c - second * s, second * c + first * s
    together = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((together.to(x.dtype), rest), -1)


@overload
def rotary_embedding(
    q: Tensor,
    k: None = ...,
    *,
    cos: Tensor | None = ...,
    sin: Tensor | None = ...,
    positions: Tensor | None = ...,
    theta: float = ...,
    rotary_dim: int | None = ...,
    interleaved: bool = ...,
    layout: str = ...,
    inplace: bool = ...,
) -> Tensor: ...
@overload
def rotary_embedding(
    q: Tensor,
    k: Tensor,
    *,
    cos: Tensor | None = ...,
    sin: Tensor | None = ...,
    positions: Tensor | None = ...,
    theta: float = ...,
    rotary_dim: int | None = ...,
    interleaved: bool = ...,
    layout: str = ...,
    inplace: bool = ...,
) -> tuple[Tensor, Tensor]: ...
def rotary_embedding(
    q: Tensor,
    k: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `fastpar.ops.rotary_embedding`."""
    cos, sin = check_arguments(q, k, cos, sin, positions, theta, rotary_dim, layout)

    def turn(x: Tensor) -> Tensor:
        out = rotated(x, cos, sin, heads_first=layout == "bhsd", interleaved=interleaved)
        return x.copy_(out) if inplace else out

    return turn(q) if k is None else (turn(q), turn(k))
