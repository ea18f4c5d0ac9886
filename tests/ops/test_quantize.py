"""Blocks of 8-bit codes as tensors: every CPU instruction set against the same in PyTorch, bit for bit, and against
float64; layouts, codes of others, errors, and what torch expects of an op.

The bounds are those of the docstring. They are attained up to a factor of 2, which the tests check as well.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.comm.block_codes import BlockCodes
from tests import instruction_sets
from tests.triton_aot import HOPPER, MI300, compile_for
from tests.triton_interpreter import run_interpreted
from tests.values import of_many_sizes, same_bits

FORMATS = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1,), (3, 64), (5, 257), (2, 3, 511), (2, 640), (7, 1))
K = torch.ops.fastpar


capability = instruction_sets.each()


def largest_of_blocks(x: Tensor, block: int) -> Tensor:
    """[..., K] float64: the largest size in the block of every element."""
    padded = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[-1] % block))
    return padded.unflatten(-1, (-1, block)).amax(-1).repeat_interleave(block, -1)[..., : x.shape[-1]]


def bound_of(x: Tensor, block: int, format: str) -> Tensor:
    """What rounding to nearest may be off by."""
    largest, size = largest_of_blocks(x, block), x.double().abs()
    if format == "int8":
        return largest / 254
    if format == "float8_e4m3fn":
        return torch.maximum(size / 16, largest / 448 * 2.0**-10)
    return torch.maximum(size / 8, largest / 57344 * 2.0**-17)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_instruction_set_has_the_bits_of_the_reference(capability: str, format: str, rounding: str) -> None:
    for shape, dtype, block in itertools.product(SHAPES, FLOATS, (64, 128)):
        x = of_many_sizes(*shape, dtype=dtype)
        options: dict[str, Any] = {"format": format, "block": block, "rounding": rounding, "seed": 2**62 + 5}
        codes, scales = ops.quantize_blocks(x, **options)
        wanted = reference.quantize_blocks(x, **options)
        assert codes.dtype == FORMATS[format]
        assert scales.shape == (*shape[:-1], math.ceil(shape[-1] / block))
        same_bits(codes, wanted[0])
        same_bits(scales, wanted[1])
        for out in FLOATS:
            found = ops.dequantize_blocks(codes, scales, block=block, dtype=out)
            same_bits(found, reference.dequantize_blocks(codes, scales, block=block, dtype=out))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(40, 512), (16, 1000)])
def test_a_round_trip_to_nearest_is_within_the_bound(capability: str, format: str, shape: tuple[int, int]) -> None:
    x, block = of_many_sizes(*shape), 128
    off = (ops.dequantize_blocks(*ops.quantize_blocks(x, format=format)).double() - x.double()).abs()
    bound = bound_of(x, block, format)
    assert (off <= bound * (1 + 2.0**-22)).all()
    assert (off > bound / 2).any()


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_has_no_bias_and_repeats_with_its_seed(format: str) -> None:
    """300 roundings: the mean is off by less than 6 standard errors, of at most one step each."""
    x = torch.linspace(-1, 1, 512).view(2, 256)
    options: dict[str, Any] = {"format": format, "rounding": "stochastic"}
    runs = torch.stack([ops.dequantize_blocks(*ops.quantize_blocks(x, seed=s, **options)) for s in range(300)])
    step = 2 * bound_of(x, 128, format)
    assert ((runs.double() - x.double()).abs() <= step * (1 + 2.0**-22)).all()
    assert ((runs.double().mean(0) - x.double()).abs() <= 6 * step / 2 / math.sqrt(300)).all()
    assert len({tuple(run.flatten().tolist()) for run in runs}) == 300
    same_bits(ops.quantize_blocks(x, seed=7, **options)[0], ops.quantize_blocks(x, seed=7, **options)[0])


def test_codes_and_scales_are_those_of_a_message() -> None:
    """A BlockWire's message of one part holds the same, flat."""
    x = of_many_sizes(1000)
    message = BlockCodes("float8_e4m3fn", 128).quantize(x, [1000], seed=None, residual=None).view(torch.uint8)
    codes, scales = ops.quantize_blocks(x)
    same_bits(message[: 4 * 8].view(torch.float32), scales)
    same_bits(message[4 * 8 : 4 * 8 + 1000], codes.view(torch.uint8))


def test_numbers_of_the_worked_example(capability: str) -> None:
    x = torch.tensor([1, -0.5, 0.25, 127])
    codes, scales = ops.quantize_blocks(x, format="int8")
    assert (codes.tolist(), scales.tolist()) == ([1, 0, 0, 127], [1.0])
    codes, scales = ops.quantize_blocks(x)
    assert scales.item() == pytest.approx(127 / 448)
    assert ops.dequantize_blocks(codes, scales).tolist() == pytest.approx([0.992, -0.496, 0.248, 127], abs=5e-4)
    halves = ops.dequantize_blocks(torch.tensor([1, 0, 0, 127], dtype=torch.int8), torch.tensor([0.5]))
    assert halves.tolist() == [0.5, 0.0, 0.0, 63.5]


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_block_nan(capability: str, format: str) -> None:
    x = of_many_sizes(3, 200)
    x[0], x[1, 70], x[2, 199] = 0.0, math.inf, math.nan
    codes, scales = ops.quantize_blocks(x, format=format, block=64)
    values = ops.dequantize_blocks(codes, scales, block=64)
    assert torch.equal(values[0], torch.zeros(200))
    assert torch.equal(scales[0], torch.full((4,), 2.0**-126))
    bad = torch.zeros(3, 200, dtype=torch.bool)
    bad[1, 64:128] = bad[2, 192:] = True
    assert torch.equal(values.isnan(), bad)
    assert (codes.view(torch.uint8)[bad] == 0).all()
    assert torch.equal(scales.isnan().nonzero(), torch.tensor([[1, 1], [2, 3]]))


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_that_a_format_has_is_read_as_torch_reads_it(capability: str, format: str) -> None:
    """Those of others may hold NaN and infinities, as a cast to float8 gives them for what is too large."""
    codes = torch.arange(256).to(torch.uint8).view(FORMATS[format])
    for scales in (torch.ones(2), torch.tensor([3.0, 0.37])):
        wanted = codes.float() * scales.repeat_interleave(128)
        for width in (256, 203):  # whole registers, and a rest
            found = ops.dequantize_blocks(codes[:width], scales)
            torch.testing.assert_close(found, wanted[:width], rtol=0.0, atol=0.0, equal_nan=True)
    if format != "int8":
        assert codes.float().isnan().any()


@pytest.mark.parametrize("columns", [256, 200])
def test_any_strides_give_the_contiguous_result(columns: int) -> None:
    base = of_many_sizes(6, 5, 300)
    for x in (base[:, :, 7 : 7 + columns], base.transpose(0, 1)[:, :, :columns], base.transpose(1, 2)[:, :columns]):
        assert not x.is_contiguous()
        found, wanted = ops.quantize_blocks(x), ops.quantize_blocks(x.contiguous())
        same_bits(found[0], wanted[0])
        same_bits(found[1], wanted[1])
        strided = found[0].transpose(0, 1).contiguous().transpose(0, 1)
        values = ops.dequantize_blocks(strided, found[1].repeat_interleave(2, -1)[..., ::2])
        same_bits(values, ops.dequantize_blocks(*wanted))


@pytest.mark.parametrize("shape", [(0,), (0, 100), (3, 0), (2, 0, 64)])
def test_empty_tensors_have_empty_results(shape: tuple[int, ...]) -> None:
    for function in (ops, reference):
        codes, scales = function.quantize_blocks(torch.empty(shape))
        assert codes.shape == shape
        assert scales.shape == (*shape[:-1], math.ceil(shape[-1] / 128))
        assert function.dequantize_blocks(codes, scales, dtype=torch.bfloat16).shape == shape


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(
            [ops.quantize_blocks(of_many_sizes(*s), rounding="stochastic", seed=3) for s in ((900, 128), (300, 300))]
        )
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        same_bits(one[0], two[0])
        same_bits(one[1], two[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(8, dtype=torch.float64)}, TypeError, "got torch.float64"),
        ({"x": [1.0]}, TypeError, "x must be a tensor.*got list"),
        ({"x": torch.tensor(1.0)}, ValueError, "got a scalar"),
        ({"x": torch.zeros(8, requires_grad=True)}, ValueError, r"has no gradient.*x\.detach\(\)"),
        ({"format": "fp8"}, ValueError, "one of int8, float8_e4m3fn, float8_e5m2, got 'fp8'"),
        ({"format": torch.float8_e4m3fn}, TypeError, "format must be a string"),
        ({"block": 100}, ValueError, "multiple of 64 up to 4096, got 100"),
        ({"block": 128.0}, TypeError, "block must be an int, got float"),
        ({"rounding": "up"}, ValueError, "one of nearest, stochastic, got 'up'"),
        ({"seed": -1}, ValueError, "got -1"),
        ({"seed": None}, TypeError, "seed must be an int, got NoneType"),
    ],
)
def test_bad_arguments_of_quantize_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    call = {"x": torch.zeros(8), **arguments}
    for function in (ops.quantize_blocks, reference.quantize_blocks):
        with pytest.raises(error, match=message):
            function(call["x"], **{name: value for name, value in call.items() if name != "x"})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"codes": torch.zeros(200, dtype=torch.uint8)}, TypeError, "codes must be.*got torch.uint8"),
        ({"scales": torch.ones(3)}, ValueError, r"scales must be \[2\], one for every 128.*got \[3\]"),
        ({"scales": torch.ones(2).half()}, TypeError, "got torch.float16"),
        ({"scales": torch.ones(2, requires_grad=True)}, ValueError, "has no gradient, but scales requires one"),
        ({"scales": torch.ones(2, device="meta")}, ValueError, "got cpu and meta"),
        ({"block": 64}, ValueError, r"scales must be \[4\]"),
        ({"dtype": torch.float64}, TypeError, "got torch.float64"),
    ],
)
def test_bad_arguments_of_dequantize_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    call = {"codes": torch.zeros(200, dtype=torch.int8), "scales": torch.ones(2), **arguments}
    for function in (ops.dequantize_blocks, reference.dequantize_blocks):
        with pytest.raises(error, match=message):
            function(call.pop("codes"), call.pop("scales"), **call)
        call = {"codes": torch.zeros(200, dtype=torch.int8), "scales": torch.ones(2), **arguments}


def test_the_ops_check_what_they_are_given() -> None:
    for arguments, complaint in (
        ((torch.zeros(8), 63, 0, -1), "block must be a multiple of 64"),
        ((torch.zeros(8), 64, 3, -1), "format must be 0"),
        ((torch.zeros(8).double(), 64, 0, -1), "x must be float32"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            K.quantize_rows(*arguments)
    codes = torch.zeros(8, dtype=torch.uint8)
    for scales, dtype, complaint in (
        (torch.ones(2), torch.float32, "one number for every 64"),
        (torch.ones(1).double(), torch.float32, "scales must be float32"),
        (torch.ones(1), torch.float64, "dtype must be"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            K.dequantize_rows(codes, scales, 64, 0, dtype)


def test_opcheck_passes_for_both_ops() -> None:
    torch.library.opcheck(K.quantize_rows.default, (of_many_sizes(3, 100), 64, 1, -1))
    codes, scales = K.quantize_rows(of_many_sizes(2, 3, 64), 64, 0, 5)
    torch.library.opcheck(K.dequantize_rows.default, (codes, scales, 64, 0, torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool) -> None:
    def step(x: Tensor) -> Tensor:
        codes, scales = ops.quantize_blocks(x * 2.0, format="float8_e5m2", block=64)
        return ops.dequantize_blocks(codes, scales, block=64, dtype=x.dtype) + 1.0

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 5):
        x = of_many_sizes(rows, 200, dtype=torch.bfloat16)
        same_bits(compiled(x), step(x))


def test_triton_kernels_have_the_bits_of_the_reference_in_the_interpreter() -> None:
    run_interpreted("check_quantize.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
@pytest.mark.parametrize("format", [0, 1])
def test_triton_kernels_compile_without_spills(target: Any, format: int) -> None:
    pytest.importorskip("triton")
    from fastpar.kernels import quantize as kernels

    shared = {"MANTISSA": kernels.MANTISSA[format], "BIAS": kernels.BIAS[format]}
    cases = [
        (
            kernels.quantize_kernel,
            {"x": "*bf16:16", "codes": "*u8:16", "scales": "*fp32:16", "seed": "i64"},
            {**shared, "LARGEST": kernels.LARGEST[format], "STOCHASTIC": True, "BLOCKS": 16, "WIDTH": 128},
        ),
        (
            kernels.dequantize_kernel,
            {"codes": "*u8:16", "scales": "*fp32:16", "out": "*bf16:16"},
            {**shared, "FIRST_SPECIAL": 0x7F, "SPECIAL_BITS": 0x7FC00000, "TILE": kernels.TILE},
        ),
    ]
    for kernel, types, constants in cases:
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
        found = compile_for(kernel, signature, constants, target, {"num_warps": kernels.NUM_WARPS})
        assert found["spills"] == 0
