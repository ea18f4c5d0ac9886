"""Linear layers of several experts in plain PyTorch, and the checks of their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def num_experts_of(weight: Tensor) -> int:
    if weight.dim() != 3:
        raise ValueError(f"weight must be [E, F, K], one matrix for each expert, got shape {tuple(weight.shape)}")
    return len(weight)


def expert_rows(splits: Sequence[int], counts: Tensor | Sequence[int] | None, num_experts: int) -> tuple[slice, ...]:
    """Where each expert's rows are, without its padding. Raises ValueError for what does not fit together."""
    if len(splits) != num_experts + 1 or splits[0] != 0 or any(a > b for a, b in itertools.pairwise(splits)):
        raise ValueError(
            f"splits must be {num_experts + 1} numbers that begin at 0 and do not fall, one more than there are "
            f"experts, got {list(splits)}"
        )
    room = [end - begin for begin, end in itertools.pairwise(splits)]
    if counts is None:
        used = room
    else:
        if isinstance(counts, Tensor) and (counts.dim() != 1 or counts.is_floating_point() or counts.is_complex()):
            raise ValueError(f"counts must be [E] integers, got {tuple(counts.shape)} {counts.dtype}")
        used = [int(count) for count in (counts.tolist() if isinstance(counts, Tensor) else counts)]
        if len(used) != num_experts or any(not 0 <= count <= most for count, most in zip(used, room, strict=True)):
            raise ValueError(f"counts must be {num_experts} numbers within the rows of the experts {room}, got {used}")
    return tuple(slice(begin, begin + count) for begin, count in zip(splits, used, strict=False))


def check_grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_rows: int, transposed: bool, x_name: str = "x"
) -> None:
    """TypeError or ValueError for tensors that do not fit together."""
    for name, tensor in ((x_name, x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if hasattr(tensor, "device_mesh"):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: pass {name}.to_local()")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {tensor.dtype}")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of {x_name}, {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of {x_name}, {x.device}, got {tensor.device}")
    layout = "[E, K, F]" if transposed else "[E, F, K]"
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1 if transposed else 2]:
        raise ValueError(
            f"{x_name} [N, K] and weight {layout} must agree in K, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if len(x) != num_rows:
        raise ValueError(f"{x_name} must have the rows that splits end with, {num_rows}, got {len(x)}")
    wanted = (len(weight), weight.shape[2 if transposed else 1])
    if bias is not None and bias.shape != wanted:
        raise ValueError(f"bias must be [E, F], {wanted}, got {tuple(bias.shape)}")


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    splits: Sequence[int],
    bias: Tensor | None = None,
    *,
    counts: Tensor | Sequence[int] | None = None,
    transposed: bool = False,
) -> Tensor:
    """See `fastpar.ops.grouped_linear`."""
    rows = expert_rows(splits, counts, len(weight))
    check_grouped_linear(x, weight, bias, splits[-1], transposed)
    matrices = weight.transpose(1, 2) if transposed else weight
    parts = []
    for expert, mine in enumerate(rows):
        parts.append(F.linear(x[mine], matrices[expert], None if bias is None else bias[expert]))
        parts.append(x.new_zeros((splits[expert + 1] - mine.stop, matrices.shape[1])))
    return torch.cat(parts) if parts else x.new_zeros((0, matrices.shape[1]))
