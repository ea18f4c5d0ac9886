"""States of the fused optimizers in other formats than the one that they are kept in.

Note: 8-bit states in a checkpoint are float32 values, code times scale, in tensors of the parameter's shape. Blocks of
256 elements begin where a rank's part of a parameter begins, so codes and scales belong to one layout; values do not:
torch.distributed.checkpoint cuts them for any number of ranks and any stage, and an optimizer whose states are float32
or bfloat16 (torch's too) loads them as its own. Whoever keeps 8 bits cuts its own blocks again when it loads.

What is lost. Nothing, where blocks are cut as before (the same layout, or rows of a multiple of 256 elements): the
largest magnitude of a block is its scale, bit for bit, since the largest code stands for 1; every other value is within
3 * 2^-24 of (4 bits) * scale, and a code is decided to 1/32. So codes and scales come back as they were. (Only where a
value is below 2^-144, which float32 rounds to few bits, a code may be another, of the same value.) Else every value is
rounded to a code once more, as a step does. A block that is not finite is NaN again.

What it costs. A checkpoint has 4 bytes per element and state instead of 1 + 4 / 256 (AdamW: 8 for 2.03 in memory), and
the values are in memory while it is written or read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fastpar.contracts import optimizer_formats as formats

_CHUNK = formats.BLOCK << 12  # elements that are converted at once: this takes some 50 bytes for each


def values_of(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 values of an 8-bit state, which may be a DTensor."""
    mine = codes._local_tensor if isinstance(codes, DTensor) else codes
    values = torch.empty(mine.shape, dtype=torch.float32, device=mine.device)
    flat, flat_codes = values.view(-1), mine.reshape(-1)
    for at in range(0, len(flat), _CHUNK):
        blocks = scales[at // formats.BLOCK : (at + _CHUNK) // formats.BLOCK]
        flat[at : at + _CHUNK] = formats.dequantise(flat_codes[at : at + _CHUNK], blocks, signed=signed)
    return like(codes, values)


def blocks_of(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of values, which may be a DTensor: then so are the codes, and the scales are this rank's."""
    mine = values._local_tensor if isinstance(values, DTensor) else values
    codes = torch.empty(mine.shape, dtype=torch.uint8, device=mine.device)
    scales = torch.empty(formats.num_blocks(mine.numel()), device=mine.device)
    flat, flat_values = codes.view(-1), mine.reshape(-1)
    for at in range(0, len(flat), _CHUNK):
        blocks = slice(at // formats.BLOCK, (at + _CHUNK) // formats.BLOCK)
        flat[at : at + _CHUNK], scales[blocks] = formats.quantise(flat_values[at : at + _CHUNK].float(), signed=signed)
    return like(values, codes), scales


def like(param: Tensor, value: Tensor) -> Tensor:
    """`value`, of the shape of the local part of `param`, as a DTensor if that is one."""
    if not isinstance(param, DTensor):
        return value
    spec, meta = param._spec, param._spec.tensor_meta
    assert meta is not None
    spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, value.dtype))
    made: Tensor = DTensor.__new__(DTensor, value, spec, requires_grad=False)  # `from_local` takes ten times as long
    return made
