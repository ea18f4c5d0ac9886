"""Gradients as blocks of 8-bit codes with a scale each: messages, and sums of what is in them.

`csrc/quantize/quantize_kernel.h` has the algebra, the numerics and a worked example, and does the work for CPU tensors.
The `..._in_torch` functions are the same in PyTorch, bit for bit: what runs on other devices, and what the kernels are
tested against.

A message is int64 words (a dtype that every transport moves, and takes from the pool of large buffers). It holds parts
one after another, each in whole words: the float32 scales of its blocks, the codes of its elements, zeros. Blocks begin
anew with every part.

A seed of None rounds to nearest even; a seed from 0 on stochastically. `residual` (float32, as long as x) is added to x
before, and is what rounding has lost afterwards. The scale of a block with an element that is not finite is NaN, and so
are all its values; its residual is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar import _ext

FORMATS = {"int8": 0, "float8_e4m3fn": 1, "float8_e5m2": 2}
BLOCK_UNIT, MAX_BLOCK = 64, 4096
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_SIGNIFICAND_BITS_AND_BIAS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}
SMALLEST_SCALE = 2.0**-126  # its reciprocal is finite
WORD_BYTES = 8
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True)
class BlockCodes:
    """`format`: "int8", "float8_e4m3fn" or "float8_e5m2"; `block`: elements that share a scale, a multiple of 64 up to
    4096.

    Raises ValueError for others.
    """

    format: str
    block: int

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if not 0 < self.block <= MAX_BLOCK or self.block % BLOCK_UNIT:
            raise ValueError(f"block must be a multiple of {BLOCK_UNIT} up to {MAX_BLOCK}, got {self.block}")

    def words(self, count: int) -> int:
        """Words of a part of `count` elements."""
        return -(-(4 * self._num_blocks(count) + count) // WORD_BYTES)

    def quantize(self, x: Tensor, sizes: Sequence[int], *, seed: int | None, residual: Tensor | None) -> Tensor:
        """The message with flat x (float32, bfloat16 or float16), cut into parts of so many elements."""
        if not x.is_cpu:
            return self.quantize_in_torch(x, sizes, seed=seed, residual=residual)
        _ext.load()
        number = -1 if seed is None else seed
        return torch.ops.fastpar.quantize_blocks(x, residual, sizes, self.block, FORMATS[self.format], number)

    def sum_parts(self, message: Tensor, count: int, parts: int, *, average: bool) -> Tensor:
        """The sum of all parts, each of `count` elements, in their order: float32."""
        if not message.is_cpu:
            return self.sum_parts_in_torch(message, count, parts, average=average)
        _ext.load()
        return torch.ops.fastpar.sum_quantized(message, count, parts, self.block, FORMATS[self.format], average)

    def dequantize(self, message: Tensor, sizes: Sequence[int]) -> Tensor:
        """The elements of all parts, one after another: float32."""
        if not message.is_cpu:
            return self.dequantize_in_torch(message, sizes)
        _ext.load()
        return torch.ops.fastpar.dequantize_parts(message, sizes, self.block, FORMATS[self.format])

    def dequantize_into(self, message: Tensor, outs: Sequence[Tensor]) -> None:
        """Write the elements of all parts to `outs`, which have as many, rounded once to their dtypes."""
        if message.is_cpu and all(out.is_contiguous() for out in outs):
            _ext.load()
            torch.ops.fastpar.dequantize_into(message, outs, self.block, FORMATS[self.format])
            return
        values = self.dequantize(message, [out.numel() for out in outs])
        for out, part in zip(outs, values.split([out.numel() for out in outs]), strict=True):
            out.copy_(part.view(out.shape))

    # ---- the same in PyTorch

    def quantize_in_torch(
        self, x: Tensor, sizes: Sequence[int], *, seed: int | None, residual: Tensor | None
    ) -> Tensor:
        values = x.float() if residual is None else x.float() + residual
        message, blocks_before = [], 0
        for part, lost in zip(
            values.split(list(sizes)),
            [None] * len(sizes) if residual is None else residual.split(list(sizes)),
            strict=True,
        ):
            v = self._in_blocks(part)
            codes, scales = self.encode(v, seed=seed, blocks_before=blocks_before)
            if lost is not None:
                rest = torch.where(scales.isfinite(), v - self._decode(codes) * scales, 0.0)
                lost.copy_(rest.view(-1)[: part.numel()])
            parts = scales.view(-1).view(torch.uint8), codes.view(-1)[: part.numel()]
            padding = 8 * self.words(part.numel()) - sum(p.numel() for p in parts)
            message += [*parts, codes.new_zeros(padding)]
            blocks_before += v.shape[0]
        return torch.cat(message).view(torch.int64)

    def sum_parts_in_torch(self, message: Tensor, count: int, parts: int, *, average: bool) -> Tensor:
        each = self.words(count)
        values = [self.dequantize_in_torch(message[part * each : (part + 1) * each], [count]) for part in range(parts)]
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total / parts if average else total

    def dequantize_in_torch(self, message: Tensor, sizes: Sequence[int]) -> Tensor:
        values = []
        for count, words in zip(sizes, message.split([self.words(size) for size in sizes]), strict=True):
            data, num_blocks = words.contiguous().view(torch.uint8), self._num_blocks(count)
            scales = data[: 4 * num_blocks].view(torch.float32)
            codes = data[4 * num_blocks : 4 * num_blocks + count]
            padded = torch.nn.functional.pad(codes, (0, num_blocks * self.block - count)).view(num_blocks, self.block)
            values.append((self._decode(padded) * scales[:, None]).view(-1)[:count])
        return torch.cat(values)

    def encode(self, v: Tensor, *, seed: int | None, blocks_before: int = 0) -> tuple[Tensor, Tensor]:
        """(codes uint8 [blocks, block], scales float32 [blocks, 1]) of float32 v [blocks, block]."""
        largest_code = LARGEST[self.format]
        is_finite = v.isfinite().all(1, keepdim=True)
        finite = torch.where(is_finite, v, 0.0)
        scale = (finite.abs().amax(1, keepdim=True) / largest_code).clamp(min=SMALLEST_SCALE)
        q = (finite * scale.reciprocal()).clamp(-largest_code, largest_code)
        random = None if seed is None else self._random_bits(v, seed, blocks_before)
        return self._encode(q, random), torch.where(is_finite, scale, torch.nan)

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _in_blocks(self, x: Tensor) -> Tensor:
        num_blocks = self._num_blocks(x.numel())
        return torch.nn.functional.pad(x, (0, num_blocks * self.block - x.numel())).view(num_blocks, self.block)

    def _encode(self, q: Tensor, random: Tensor | None) -> Tensor:
        """Codes of |q| <= the format's largest, as uint8."""
        fraction = None if random is None else (random.float() + 0.5) * 2.0**-16
        if self.format == "int8":
            whole = q.round() if fraction is None else (q + fraction).floor()
            return whole.to(torch.int8).view(torch.uint8)
        if random is None or fraction is None:
            return q.to(self.dtype).view(torch.uint8)
        bits, bias = _SIGNIFICAND_BITS_AND_BIAS[self.format]
        size, dropped = q.abs(), 23 - bits
        above = (random << (dropped - 16)) + (1 << (dropped - 17))
        normal = ((size.view(torch.int32).long() + above) >> dropped) - ((127 - bias) << bits)
        small = (size * 2.0 ** (bias - 1 + bits) + fraction).floor().long()
        return (torch.where(size < 2.0 ** (1 - bias), small, normal) | (q.signbit().long() << 7)).to(torch.uint8)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes, where they are a tensor."""
        dtype: torch.dtype = getattr(torch, self.format)
        return dtype

    def _decode(self, codes: Tensor) -> Tensor:
        return codes.view(self.dtype).float()

    def _random_bits(self, like: Tensor, seed: int, blocks_before: int) -> Tensor:
        """16 random bits for every element of `like` [blocks, block], int64: hashes of (seed, block, element)."""
        keys = [mixed(seed, blocks_before + block) >> 32 for block in range(like.shape[0])]
        elements = torch.arange(like.shape[1], device=like.device)
        h = (torch.tensor(keys, dtype=torch.int64, device=like.device)[:, None] + elements) & _MASK_32
        h = _times(h ^ (h >> 16), 0x7FEB352D)
        return _times(h ^ (h >> 15), 0x846CA68B) >> 16


def _times(h: Tensor, factor: int) -> Tensor:
    """The low 32 bits of the product of numbers of 32 bits, of which int64 would overflow."""
    low, high = factor & 0xFFFF, factor >> 16
    return (h * low + ((h * high & 0xFFFF) << 16)) & _MASK_32


def mixed(seed: int, index: int) -> int:
    """64 bits that look random: splitmix64's next number after `index` others."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    return z ^ (z >> 31)
