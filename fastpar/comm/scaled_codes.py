"""Tensors as 8-bit codes with one scale each, which may be known before the tensor is read: delayed scaling.

    codes = ScaledCodes("float8_e4m3fn")
    message, largest, saturated = codes.quantize(flat, sizes, scales)
    codes.dequantize_into(message, outs)

    code    = round(clamp(x / scale, -L, L))           L = 448 (float8_e4m3fn), 57344 (float8_e5m2), 127 (int8)
    value   = code * scale

A scale of 0 stands for what the part needs: max(largest |x| / L, 2^-126), at the price of a second read. With a scale
that is given x is read once, and the largest |x| of each part, which a later scale is made of, is a by-product. What
would round beyond the largest code saturates to it and is counted.

A message is int64 words. It holds parts one after another, each in whole words: the float32 scale, the codes, zeros; a
part without elements has none. A part with an infinity or NaN has the scale NaN, so that all its values are NaN for
every receiver; its largest is NaN, and nothing of it counts as saturated.

`csrc/quantize/quantize_scaled.cpp` does this for CPU tensors. The `..._in_torch` functions are the same in PyTorch, bit
for bit: what runs on other devices, and what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.comm.block_codes import FORMATS, LARGEST, SMALLEST_SCALE, WORD_BYTES

_SCALE_BYTES = 4
_HALF_STEP = {"int8": 0.5, "float8_e4m3fn": 16.0, "float8_e5m2": 4096.0}  # of the step above the largest code
DELAYED_FORMATS = ("float8_e4m3fn", "float8_e5m2")
AMAX_COMPUTE_ALGOS = ("max", "most_recent")


@dataclass(frozen=True)
class ScaledCodes:
    """`format`: "float8_e4m3fn", "float8_e5m2" or "int8". Raises ValueError for others."""

    format: str

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")

    def words(self, count: int) -> int:
        """Words of a part of `count` elements."""
        return -(-(_SCALE_BYTES + count) // WORD_BYTES) if count else 0

    def quantize(self, x: Tensor, sizes: Sequence[int], scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(message, largest, saturated) of flat x (float32, bfloat16 or float16), cut into parts of so many elements.

        scales     [parts] float32, 0 where a part's own is wanted
        largest    [parts] float32, the largest |x| of each part
        saturated  [parts] int64, elements that the largest code does not reach
        """
        if not x.is_cpu:
            return self.quantize_in_torch(x, sizes, scales)
        _ext.load()
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.fastpar.quantize_scaled(x, scales, sizes, FORMATS[self.format])
        return found

    def dequantize_into(self, message: Tensor, outs: Sequence[Tensor]) -> None:
        """Write the values of all parts, rounded once to the dtypes of `outs`."""
        if message.is_cpu and all(out.is_contiguous() for out in outs):
            _ext.load()
            torch.ops.fastpar.dequantize_into(message, outs, 0, FORMATS[self.format])
        else:
            self.dequantize_into_in_torch(message, outs)

    # ---- the same in PyTorch

    def quantize_in_torch(self, x: Tensor, sizes: Sequence[int], scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limit, dtype = LARGEST[self.format], getattr(torch, self.format)
        message, largest, saturated = [x.new_empty(0, dtype=torch.uint8)], [], []
        for v, given in zip(x.float().split(list(sizes)), scales.unbind(), strict=True):
            if v.numel() == 0:
                largest.append(given.new_zeros(()))
                saturated.append(given.new_zeros((), dtype=torch.int64))
                continue
            is_finite = v.isfinite().all()
            most = v.abs().amax()
            own = torch.where(is_finite, most / limit, SMALLEST_SCALE)
            scale = torch.where(given > 0, given, own).clamp(min=SMALLEST_SCALE)
            q = v * scale.reciprocal()
            beyond = (q.abs() > limit + _HALF_STEP[self.format]).sum()
            q = torch.where(is_finite, q, 0.0).clamp(-limit, limit)
            codes = (q.round() if self.format == "int8" else q).to(dtype).view(torch.uint8)
            padding = WORD_BYTES * self.words(v.numel()) - _SCALE_BYTES - v.numel()
            written = torch.where(is_finite, scale, torch.nan)
            message += [written.view(1).view(torch.uint8), codes, codes.new_zeros(padding)]
            largest.append(torch.where(is_finite, most, torch.nan))
            saturated.append(torch.where(is_finite, beyond, 0))
        nothing = scales.new_empty(0)
        found = (torch.stack(largest), torch.stack(saturated)) if largest else (nothing, nothing.long())
        return torch.cat(message).view(torch.int64), *found

    def dequantize_into_in_torch(self, message: Tensor, outs: Sequence[Tensor]) -> None:
        dtype = getattr(torch, self.format)
        for words, out in zip(message.split([self.words(out.numel()) for out in outs]), outs, strict=True):
            if out.numel():
                data = words.contiguous().view(torch.uint8)
                scale, codes = data[:_SCALE_BYTES].view(torch.float32), data[_SCALE_BYTES : _SCALE_BYTES + out.numel()]
                out.copy_((codes.view(dtype).float() * scale).view(out.shape))


@dataclass(frozen=True)
class DelayedScalingWire:
    """Parameters travel as float8 codes, each tensor with one scale, which is made of the largest values it had before
    (the delayed scaling of TransformerEngine): about a byte an element, and one read of what is quantised.

    format              "float8_e4m3fn", or "float8_e5m2", which reaches further and is coarser
    amax_history_len    how many of the last largest values (one a step) are kept of every tensor
    amax_compute_algo   which of those counts: "max" of all, or the "most_recent"
    margin              powers of two of room that are left above it

        scale = 2^margin * amax / L                    L = 448 (float8_e4m3fn), 57344 (float8_e5m2)

    The amax of a tensor is the largest |x| on all ranks that have a part of it: one all-reduce (max) of a number a
    tensor, for all tensors of a step at once. A tensor without a history, or with one of zeros, is scaled by what it
    is now, every rank's rows by their own. What has grown beyond the largest code saturates: `Zero.saturated` counts
    it, and the next step's scale knows of it.

    An element that does not saturate is off by at most 1/16 of itself (float8_e5m2: 1/8), or half a step of the
    smallest codes: 2^-10 * scale (2^-17). Blocks (`BlockWire`) are finer where a tensor's elements have very different
    sizes, and cost 1.6 % more bytes.

    It has no reductions: gradients take a `BlockWire`. Raises ValueError for others than these.
    """

    format: str = "float8_e4m3fn"
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if self.format not in DELAYED_FORMATS:
            raise ValueError(f"format must be one of {', '.join(DELAYED_FORMATS)}, got {self.format!r}")
        if isinstance(self.amax_history_len, bool) or not isinstance(self.amax_history_len, int):
            raise TypeError(f"amax_history_len must be an int, got {self.amax_history_len!r}")
        if not 1 <= self.amax_history_len <= 1 << 16:
            raise ValueError(f"amax_history_len must be in 1..65536, got {self.amax_history_len}")
        if self.amax_compute_algo not in AMAX_COMPUTE_ALGOS:
            raise ValueError(
                f"amax_compute_algo must be one of {', '.join(AMAX_COMPUTE_ALGOS)}, got {self.amax_compute_algo!r}"
            )
        if isinstance(self.margin, bool) or not isinstance(self.margin, int):
            raise TypeError(f"margin must be an int (powers of two), got {self.margin!r}")
        if not 0 <= self.margin <= 32:
            raise ValueError(f"margin must be in 0..32, got {self.margin}")

    @property
    def codes(self) -> ScaledCodes:
        """The codes that values travel as."""
        return ScaledCodes(self.format)

    def scales(self, history: Tensor) -> Tensor:
        """[tensors] of amax_history [tensors, amax_history_len], the newest first: 0 where nothing is known."""
        amax = history[:, 0] if self.amax_compute_algo == "most_recent" else history.amax(1)
        return amax * (2.0**self.margin / LARGEST[self.format])
