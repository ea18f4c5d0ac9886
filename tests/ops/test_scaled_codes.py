"""Codes with one scale a part: the kernels of every instruction set against PyTorch, and values against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fastpar.comm import DelayedScalingWire
from fastpar.comm.block_codes import BlockCodes
from fastpar.comm.scaled_codes import ScaledCodes
from tests.ops.test_block_codes import FLOATS, FORMATS, capability, sample
from tests.values import same_bits

assert capability  # a fixture
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_writes_the_bits_of_the_reference(capability: str, format: str) -> None:
    codes = ScaledCodes(format)
    for dtype, sizes, given in itertools.product(FLOATS, ([0], [257, 0, 511], [4096 * 8 + 5]), (0.0, 1e-3)):
        x = sample(sum(sizes), dtype)
        scales = torch.full((len(sizes),), given)
        found, wanted = codes.quantize(x, sizes, scales), codes.quantize_in_torch(x, sizes, scales)
        for mine, theirs in zip(found, wanted, strict=True):
            same_bits(mine, theirs)
        assert found[0].numel() == sum(codes.words(count) for count in sizes)
        into, reference = ([torch.empty(n, dtype=dtype) for n in sizes] for _ in range(2))
        codes.dequantize_into(found[0], into)
        codes.dequantize_into_in_torch(found[0], reference)
        for mine, theirs in zip(into, reference, strict=True):
            same_bits(mine, theirs)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_go_into_tensors_of_any_float_dtype_and_stride(capability: str, format: str) -> None:
    codes, sizes = BlockCodes(format, 64), [257, 0, 512]
    message = codes.quantize(sample(769), sizes, seed=None, residual=None)
    wanted = codes.dequantize_in_torch(message, sizes).split(sizes)
    for dtype in FLOATS:
        into = [torch.empty(257, dtype=dtype), torch.empty(0, dtype=dtype), torch.empty(16, 32, dtype=dtype)]
        strided = [*into[:2], torch.empty(32, 16, dtype=dtype).T]
        for outs in (into, strided):
            codes.dequantize_into(message, outs)
            for mine, theirs in zip(outs, wanted, strict=True):
                same_bits(mine.reshape(-1), theirs.to(dtype))


def worst(format: str, x: Tensor, scale: float) -> tuple[Tensor, Tensor, int]:
    """(error of every element in float64, the largest that the docs allow, elements that saturated)."""
    codes, out = ScaledCodes(format), torch.empty_like(x)
    message, largest, saturated = codes.quantize(x, [x.numel()], torch.tensor([scale]))
    codes.dequantize_into(message, [out])
    assert largest.item() == x.abs().max().item()
    step = scale or x.abs().max().item() / LARGEST[format]
    share, smallest = {"float8_e4m3fn": (1 / 16, 2.0**-10), "float8_e5m2": (1 / 8, 2.0**-17)}[format]
    bound = torch.maximum(x.double().abs() * share, torch.tensor(smallest * step).double()) * (1 + 2.0**-20)
    return (out.double() - x.double()).abs(), bound, int(saturated)


@pytest.mark.parametrize("format", ["float8_e4m3fn", "float8_e5m2"])
def test_what_does_not_saturate_is_off_by_no_more_than_the_docs_say(format: str) -> None:
    x = torch.randn(3001) * 2.0 ** torch.randint(-20, 3, (3001,))
    for scale in (0.0, x.abs().max().item() / LARGEST[format], x.abs().max().item() * 8 / LARGEST[format]):
        error, bound, saturated = worst(format, x, scale)
        assert saturated == 0
        assert bool((error <= bound).all())


def test_what_is_beyond_the_largest_code_saturates_to_it_and_is_counted() -> None:
    x = torch.tensor([448.0, -464.0, 464.5, -1e30, 1.0])  # 464 is halfway to the code that there is not
    message, largest, saturated = ScaledCodes("float8_e4m3fn").quantize(x, [5], torch.tensor([1.0]))
    out = torch.empty(5)
    ScaledCodes("float8_e4m3fn").dequantize_into(message, [out])
    assert out.tolist() == [448.0, -448.0, 448.0, -448.0, 1.0]
    assert (largest.item(), saturated.item()) == (torch.tensor(1e30).item(), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_part_with_what_is_not_finite_is_nan_and_others_are_not(bad: float) -> None:
    codes, x = ScaledCodes("float8_e4m3fn"), torch.ones(12)
    x[2] = bad
    message, largest, saturated = codes.quantize(x, [5, 7], torch.tensor([0.5, 0.5]))
    outs = [torch.empty(5), torch.empty(7)]
    codes.dequantize_into(message, outs)
    assert outs[0].isnan().all()
    assert outs[1].tolist() == [1.0] * 7
    assert largest[0].isnan()
    assert (largest[1].item(), saturated.tolist()) == (1.0, [0, 0])


def test_scales_come_of_the_history_as_the_docs_say() -> None:
    history = torch.tensor([[1.0, 7.0, 0.0], [0.0, 0.0, 0.0]])
    assert DelayedScalingWire().scales(history).tolist() == [7.0 / 448, 0.0]
    recent = DelayedScalingWire("float8_e5m2", amax_compute_algo="most_recent", margin=2)
    assert recent.scales(history).tolist() == pytest.approx([4.0 / 57344, 0.0])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"format": "int8"}, ValueError),
        ({"amax_history_len": 0}, ValueError),
        ({"amax_history_len": 1.5}, TypeError),
        ({"amax_compute_algo": "mean"}, ValueError),
        ({"margin": -1}, ValueError),
        ({"margin": True}, TypeError),
    ],
)
def test_delayed_scaling_refuses_by_name_what_it_cannot_do(arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        DelayedScalingWire(**arguments)
