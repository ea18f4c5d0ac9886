"""Blocks of 8-bit codes: the kernels of every instruction set against the same in PyTorch, and what rounding loses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastpar.comm.block_codes import BlockCodes
from tests import instruction_sets
from tests.values import same_bits

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = ([0], [1], [64], [1000], [257, 0, 511], [5, 128, 64 * 9 + 3])


capability = instruction_sets.each()


def sample(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gradients of very different sizes; zeros; the smallest and largest of the dtype among them."""
    generator = torch.Generator().manual_seed(seed + numel)
    x = torch.randn(numel, generator=generator) * 2.0 ** torch.randint(-12, 4, (numel,), generator=generator)
    x[::7] = 0.0
    x = x.to(dtype)
    if numel > 500:
        x[-3:] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny], dtype=dtype)
        x[-400:-200] = (torch.randn(200, generator=generator) * 1e-40).to(dtype)
    return x


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", [None, 0, 2**62 + 12345])
def test_every_instruction_set_writes_the_bits_of_the_reference(capability: str, format: str, seed: int | None) -> None:
    for block, dtype, sizes in itertools.product((64, 256), FLOATS, NUMELS):
        codes, x = BlockCodes(format, block), sample(sum(sizes), dtype)
        for residual in (None, sample(sum(sizes), seed=1)):
            mine, theirs = (None, None) if residual is None else (residual.clone(), residual.clone())
            found = codes.quantize(x, sizes, seed=seed, residual=mine)
            same_bits(found, codes.quantize_in_torch(x, sizes, seed=seed, residual=theirs))
            assert found.numel() == sum(codes.words(count) for count in sizes)
            if mine is not None and theirs is not None:
                same_bits(mine, theirs)
            same_bits(codes.dequantize(found, sizes), codes.dequantize_in_torch(found, sizes))


@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_sums_to_the_bits_of_the_reference(capability: str, format: str) -> None:
    codes = BlockCodes(format, 64)
    for count, parts, average in itertools.product((0, 3, 64, 1000), (1, 2, 3, 7), (True, False)):
        message = torch.cat(
            [codes.quantize(sample(count, seed=part), [count], seed=None, residual=None) for part in range(parts)]
        )
        found = codes.sum_parts(message, count, parts, average=average)
        same_bits(found, codes.sum_parts_in_torch(message, count, parts, average=average))


@pytest.mark.parametrize(
    ("format", "wanted", "lost"),
    [("int8", [1, 0, 0, 127], [0.0, -0.5, 0.25, 0.0]), ("float8_e4m3fn", [0x46, 0xBE, 0x36, 0x7E], None)],
)
def test_the_worked_example_of_the_kernel_holds(format: str, wanted: list[int], lost: list[float] | None) -> None:
    codes, residual = BlockCodes(format, 64), torch.zeros(4)
    message = codes.quantize(torch.tensor([1, -0.5, 0.25, 127]), [4], seed=None, residual=residual)
    assert message.view(torch.uint8)[4:].tolist() == wanted
    assert message.view(torch.float32)[0].item() == pytest.approx(1 if format == "int8" else 127 / 448)
    if lost is not None:
        assert residual.tolist() == lost


def test_rounding_to_nearest_is_off_by_half_a_step() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    largest = x.view(-1, 256).abs().amax(1, keepdim=True).expand(-1, 256).reshape(-1)
    for format, bound in (
        ("int8", largest / 254),
        ("float8_e4m3fn", torch.maximum(x.abs() / 16, largest / 448 * 2**-10)),
        ("float8_e5m2", torch.maximum(x.abs() / 8, largest / 57344 * 2**-17)),
    ):
        codes = BlockCodes(format, 256)
        off = (codes.dequantize(codes.quantize(x, [4096], seed=None, residual=None), [4096]) - x).abs()
        assert (off <= bound * (1 + 1e-5)).all()  # the scale and its reciprocal are rounded
        assert (off > bound / 2).any()


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_has_no_bias(format: str) -> None:
    """400 roundings of 1024 elements: the mean is off by less than 6 standard errors, of at most half a step each."""
    codes, x = BlockCodes(format, 256), torch.linspace(-1, 1, 1024)
    runs = torch.stack(
        [codes.dequantize(codes.quantize(x, [1024], seed=seed, residual=None), [1024]) for seed in range(400)]
    )
    largest = x.view(-1, 256).abs().amax(1, keepdim=True).expand(-1, 256).reshape(-1)
    step = {
        "int8": largest / 127,
        "float8_e4m3fn": torch.maximum(x.abs() / 8, largest / 448 * 2**-9),
        "float8_e5m2": torch.maximum(x.abs() / 4, largest / 57344 * 2**-16),
    }[format]
    step = step * (1 + 1e-5) + 1e-7
    assert ((runs - x).abs() <= step).all()
    assert ((runs.mean(0) - x).abs() <= 6 * step / 2 / 20).all()
    assert (runs.std(0) > step / 8).float().mean() > 0.5
    assert len({tuple(run.tolist()) for run in runs}) == 400


@pytest.mark.parametrize("format", FORMATS)
def test_what_has_a_code_is_kept_by_stochastic_rounding(format: str) -> None:
    if format == "int8":
        x = torch.arange(-127.0, 128.0)
    else:
        x = torch.arange(256).to(torch.uint8).view(getattr(torch, format)).float().nan_to_num(nan=0.0, posinf=0.0)
        x = x.clamp(min=-x.max())  # without -infinity
    codes = BlockCodes(format, 256)  # one block, of scale 1
    for seed in range(100):
        assert torch.equal(codes.dequantize(codes.quantize(x, [len(x)], seed=seed, residual=None), [len(x)]), x)


def test_the_largest_of_a_block_never_goes_up_beyond_the_last_code(capability: str) -> None:
    """Rounded twice, v / (v / 127) may be more than 127; one random number in 2^16 would then make it 128, which a byte
    takes for -128."""
    candidates = torch.linspace(1, 2, 1000)
    v = candidates[candidates * (candidates / 127).reciprocal() > 127][0]
    codes, count = BlockCodes("int8", 64), 1 << 20
    found = codes.dequantize(codes.quantize(v.repeat(count), [count], seed=5, residual=None), [count])
    torch.testing.assert_close(found, v.repeat(count), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(capability: str, format: str, bad: float) -> None:
    codes = BlockCodes(format, 64)
    for dtype, at in itertools.product(FLOATS, (0, 63, 64, 130, 199)):
        x, residual = sample(200, dtype), torch.ones(200)
        x[at] = bad
        message = codes.quantize(x, [200], seed=None, residual=residual)
        same_bits(message, codes.quantize_in_torch(x, [200], seed=None, residual=torch.ones(200)))
        block = torch.zeros(200, dtype=torch.bool)
        block[at // 64 * 64 : at // 64 * 64 + 64] = True
        assert torch.equal(codes.dequantize(message, [200]).isnan(), block)
        assert (residual[block] == 0).all()
        assert residual.isfinite().all()


def test_numbers_too_small_for_a_scale_become_zero_and_the_residual_keeps_them() -> None:
    codes, residual = BlockCodes("int8", 64), torch.zeros(64)
    x = torch.full((64,), 1e-40)
    assert codes.dequantize(codes.quantize(x, [64], seed=None, residual=residual), [64]).tolist() == [0.0] * 64
    assert torch.equal(residual, x)


def test_only_whole_formats_and_blocks_are_taken() -> None:
    with pytest.raises(ValueError, match="format must be one of int8, float8_e4m3fn, float8_e5m2, got 'int4'"):
        BlockCodes("int4", 256)
    for block in (0, 100, 8192, -64):
        with pytest.raises(ValueError, match=f"block must be a multiple of 64 up to 4096, got {block}"):
            BlockCodes("int8", block)
    x = torch.ones(8)
    for arguments, complaint in (
        ((x, None, [7], 64, 0, -1), "sizes must add up to the 8 elements"),
        ((x, None, [8], 63, 0, -1), "block must be a multiple of 64"),
        ((x, None, [8], 64, 3, -1), "format must be 0"),
        ((x, torch.ones(7), [8], 64, 0, -1), "residual must be contiguous float32"),
        ((x.double(), None, [8], 64, 0, -1), "x must be float32, bfloat16 or float16"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            torch.ops.fastpar.quantize_blocks(*arguments)
    with pytest.raises(RuntimeError, match="message must be 4 contiguous int64 words, got 2"):
        torch.ops.fastpar.sum_quantized(torch.zeros(2, dtype=torch.int64), 8, 2, 64, 0, False)
