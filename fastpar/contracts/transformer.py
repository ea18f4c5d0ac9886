"""Checks of the arguments of RMSNorm, SwiGLU and rotary embeddings; the tables of the last."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import FLOAT_DTYPES, compute_dtype


def check_rms_norm(x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, weight_offset: float) -> None:
    """Raises TypeError or ValueError with the values if the arguments do not fit `rms_norm`."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, the one that is normalised; got a scalar")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if not -math.inf < weight_offset < math.inf:
        raise ValueError(f"weight_offset must be finite, got {weight_offset}")
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset ({weight_offset}) is added to a weight, but weight is None")
    if weight is not None:
        if weight.dtype not in FLOAT_DTYPES:
            raise TypeError(f"weight must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {weight.dtype}")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight must be [{x.shape[-1]}], the last dim of x, got {tuple(weight.shape)}")
        if weight.device != x.device:
            raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    if residual is not None:
        if residual.dtype != x.dtype:
            raise TypeError(f"x and residual must have one dtype, got {x.dtype} and {residual.dtype}")
        if residual.shape != x.shape:
            raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
        if residual.device != x.device:
            raise ValueError(f"x and residual must be on one device, got {x.device} and {residual.device}")


def check_swiglu(gate_up: Tensor, up: Tensor | None) -> None:
    """Raises TypeError or ValueError with the values if the tensors do not fit `swiglu`."""
    name = "gate_up" if up is None else "gate_up (the gate, beside up)"
    if gate_up.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {gate_up.dtype}")
    if gate_up.dim() == 0:
        raise ValueError(f"{name} must have at least one dim, got a scalar")
    if up is None:
        if gate_up.shape[-1] % 2:
            raise ValueError(
                f"the last dim of gate_up must be even, the gate's features and then up's; got {tuple(gate_up.shape)}"
            )
        return
    if up.dtype != gate_up.dtype:
        raise TypeError(f"gate and up must have one dtype, got {gate_up.dtype} and {up.dtype}")
    if up.shape != gate_up.shape:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate_up.shape)} and {tuple(up.shape)}")
    if up.device != gate_up.device:
        raise ValueError(f"gate and up must be on one device, got {gate_up.device} and {up.device}")


# ---- rotary embeddings -----------------------------------------------------------------------------------------------

LAYOUTS = ("bshd", "bhsd")
_POSITION_DTYPES = (torch.int64, torch.int32)


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
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}, got {dtype}")
    theta = float(theta)  # an int may have more than 64 bits, which no tensor takes
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


def check_rotary(
    x: Tensor,
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
    _check_heads(x, layout)
    if rotary_dim is None:
        rotary_dim = x.shape[-1]
    _check_rotary_dim(rotary_dim)
    if (positions is None) == (cos is None) or (cos is None) != (sin is None):
        raise ValueError("give either cos and sin, or positions: the positions of these tokens in the whole sequence")
    dtype = compute_dtype(x.dtype)
    if positions is not None:
        cos, sin = rotary_tables(positions, rotary_dim, theta=theta, dtype=dtype)
    assert cos is not None
    assert sin is not None
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary_dim ({rotary_dim}) must be at most the {x.shape[-1]} elements of a head")
    _check_tables(x, cos, sin, rotary_dim, layout)
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def _check_heads(x: Tensor, layout: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of {', '.join(map(str, FLOAT_DTYPES))}, got {found}")
    if x.dim() not in (3, 4):
        dims = "[B, S, heads, D] or [S, heads, D]" if layout == "bshd" else "[B, heads, S, D] or [heads, S, D]"
        raise ValueError(f"x must be {dims} for layout {layout!r}, got {list(x.shape)}")


_MAX_DIM = 1 << 20  # of a head; more is a mistake, and would ask for tables that no memory holds


def _check_rotary_dim(rotary_dim: int) -> None:
    if isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int):
        raise TypeError(f"rotary_dim must be an int, got {type(rotary_dim).__name__}")
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and not negative, got {rotary_dim}")
    if rotary_dim > _MAX_DIM:
        raise ValueError(f"rotary_dim must be at most {_MAX_DIM}, got {rotary_dim}")


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, layout: str) -> None:
    tokens, half = x.shape[-3 if layout == "bshd" else -2], rotary_dim // 2
    batches = (1, x.shape[0]) if x.dim() == 4 else (1,)
    for table_name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor) or table.dtype not in FLOAT_DTYPES:
            found = table.dtype if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"{table_name} must be a tensor of {', '.join(map(str, FLOAT_DTYPES))}, got {found}")
        if table.device != x.device:
            raise ValueError(f"{table_name} must be where x is, on {x.device}, got {table.device}")
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
                f"[{batches[-1]}, {tokens}, {half}] for x {list(x.shape)} in layout {layout!r}; got "
                f"{list(table.shape)}"
            )
