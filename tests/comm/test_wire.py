"""Wire formats against what one process computes from the same gradients."""

from __future__ import annotations

import itertools
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import (
    BlockWire,
    CastWire,
    CommError,
    Communicator,
    Pending,
    PlainWire,
    record,
    shard_sizes,
)
from fastpar.comm.block_codes import BlockCodes
from fastpar.comm.reduction import reduce_in_order
from fastpar.comm.shared_memory import rendezvous
from tests.dist import run_ranks
from tests.values import same_bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (0, 1, 257, 70_001)
WORLD_SIZES = (1, 2, 3, 4)
TRANSPORTS = ("shared_memory", "torch")


def gradients(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The x of every rank, of magnitudes such that another order of additions would show."""
    generator = torch.Generator().manual_seed(numel + size)
    xs = [torch.randn(numel, generator=generator) for _ in range(size)]
    for rank, x in enumerate(xs):
        x *= 4.0**rank
    return [x.to(dtype) for x in xs]


def cuts(numel: int, size: int) -> list[list[int]]:
    """Parts by the rule, ragged ones with an empty part, and all for the last rank."""
    ragged = [0] * size
    ragged[-1] = numel - numel // 3
    ragged[0] += numel - ragged[-1]
    return [shard_sizes(numel, size), ragged, [0] * (size - 1) + [numel]]


def communicator(transport: str = "auto") -> Communicator:
    return Communicator(dist.group.WORLD, timeout=30.0, transport=transport)


# ---- casts


def cast_sum(xs: list[Tensor], dtype: torch.dtype, op: str) -> Tensor:
    """Rank order, float32, no rounding of the result."""
    total = reduce_in_order([x.to(dtype).float() for x in xs], "sum")
    return total / len(xs) if op == "avg" else total


def check_cast(transport: str) -> None:
    comm = communicator(transport)
    for dtype, wire_dtype, op in itertools.product(FLOATS, (torch.bfloat16, torch.float16), ("avg", "sum")):
        wire = CastWire(wire_dtype)
        for numel in NUMELS:
            xs = gradients(comm.size, numel, dtype)
            wanted, x = cast_sum(xs, wire_dtype, op), xs[comm.rank]
            for sizes in cuts(numel, comm.size):
                mine = wanted.split(sizes)[comm.rank]
                same_bits(wire.reduce_scatter(comm, x, sizes, op), mine)
                same_bits(wire.reduce_scatter_async(comm, x, sizes, op).wait(), mine)
            same_bits(wire.all_reduce(comm, x, op), wanted)
            same_bits(wire.all_reduce_async(comm, x, op).wait(), wanted)
            same_bits(x, xs[comm.rank])  # not written to


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_a_cast_wire_adds_rounded_values_in_rank_order_and_does_not_round_the_sum(size: int, transport: str) -> None:
    run_ranks(size, check_cast, "auto" if size == 1 else transport)


def worked_example() -> Tensor:
    comm = communicator()
    x = torch.tensor([1 + 2.0**-9] if comm.rank == 0 else [2.0**-8])
    return CastWire(torch.bfloat16).all_reduce(comm, x, "sum")


def test_the_worked_example_of_cast_wire_holds() -> None:
    for result in run_ranks(2, worked_example):
        assert result.tolist() == [1 + 2.0**-8]
        assert result.bfloat16().float().tolist() != result.tolist()


def overlapping() -> bool:
    comm, wire = communicator(), CastWire(torch.bfloat16)
    xs = [gradients(comm.size, numel) for numel in (300, 70_001, 5)]
    pending = [wire.reduce_scatter_async(comm, x[comm.rank], key=i) for i, x in enumerate(xs)]
    for x, part in reversed(list(zip(xs, pending, strict=True))):
        sizes = shard_sizes(x[0].numel(), comm.size)
        same_bits(part.wait(), cast_sum(x, torch.bfloat16, "avg").split(sizes)[comm.rank])
        assert part.wait() is part.wait()
        assert part.done()
    return True


def test_reductions_in_flight_together_may_be_waited_for_in_any_order() -> None:
    assert all(run_ranks(3, overlapping))


class Late:
    """Work that is done when it has been waited for once."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self, seconds: float) -> None:
        self.is_done = True


def test_what_follows_a_collective_is_done_once_by_the_first_who_waits() -> None:
    calls: list[int] = []
    first = Pending(Late(), lambda: 20, describe=lambda: "a call", timeout=5.0)
    second = first.then(lambda value: calls.append(value) or [value + 1])  # type: ignore[func-returns-value]
    assert not second.done()
    assert calls == []
    result = second.wait()
    assert result == [21]
    assert second.wait(timeout=1.0) is result
    assert second.done()
    assert calls == [20]


def test_what_follows_a_collective_that_failed_is_never_done() -> None:
    class Broken(Late):
        def wait(self, seconds: float) -> None:
            raise RuntimeError("the cable is out")

    second = Pending(Broken(), lambda: 1, describe=lambda: "a call", timeout=5.0).then(pytest.fail)
    for _ in range(2):
        with pytest.raises(CommError, match="the cable is out"):
            second.wait()


def non_finite(kind: str) -> Tensor:
    comm = communicator()
    wire = CastWire(torch.float16) if kind == "float16" else CastWire(torch.bfloat16)
    x = torch.ones(6)
    if comm.rank == 1:
        x[1], x[3], x[5] = torch.inf, torch.nan, 1e5
    return wire.all_reduce(comm, x, "sum")


@pytest.mark.parametrize(("kind", "too_large"), [("bfloat16", 1 + 99840.0), ("float16", torch.inf)])
def test_a_cast_wire_keeps_what_is_not_finite_visible(kind: str, too_large: float) -> None:
    wanted = torch.tensor([2.0, torch.inf, 2.0, torch.nan, 2.0, too_large])
    for result in run_ranks(2, non_finite, kind):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.expensive
def test_a_large_cast_loads_the_library_that_it_needs() -> None:
    code = (
        "import torch; from fastpar.comm import CastWire, Communicator;"
        "print(CastWire(torch.bfloat16).all_reduce(Communicator(None), torch.ones(5 << 20)).sum().item())"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == f"{float(5 << 20)}\n", result.stderr


# ---- plain


def check_plain(transport: str) -> None:
    comm, wire = communicator(transport), PlainWire()
    for dtype, op, numel in itertools.product(FLOATS, ("avg", "sum"), NUMELS):
        xs = gradients(comm.size, numel, dtype)
        wanted = reduce_in_order(xs, op)
        for sizes in cuts(numel, comm.size):
            mine = wanted.split(sizes)[comm.rank]
            same_bits(wire.reduce_scatter(comm, xs[comm.rank], sizes, op), mine)
            same_bits(wire.reduce_scatter_async(comm, xs[comm.rank], sizes, op).wait(), mine)
        same_bits(wire.all_reduce(comm, xs[comm.rank], op), wanted)
        same_bits(wire.all_reduce_async(comm, xs[comm.rank], op).wait(), wanted)


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_a_plain_wire_is_the_communicator(size: int) -> None:
    run_ranks(size, check_plain, "auto")


# ---- bytes


def bytes_sent(name: str, dtype: torch.dtype) -> tuple[int, int]:
    """Of a reduce_scatter and an all_reduce."""
    comm = communicator()
    wire = {"plain": PlainWire(), "cast": CastWire(torch.bfloat16)}[name]
    x = torch.ones(3 * 4096, dtype=dtype)
    with record() as scattered:
        wire.reduce_scatter(comm, x)
    with record() as reduced:
        wire.all_reduce(comm, x)
    return sum(entry.nbytes for entry in scattered), sum(entry.nbytes for entry in reduced)


@pytest.mark.parametrize(
    ("name", "dtype", "scattered", "reduced"),
    [
        ("plain", torch.float32, 4, 8),
        ("plain", torch.bfloat16, 2, 4),
        ("cast", torch.float32, 2, 6),
        ("cast", torch.bfloat16, 2, 6),
    ],
)
def test_a_wire_sends_the_bytes_of_its_table(name: str, dtype: torch.dtype, scattered: int, reduced: int) -> None:
    for size in (2, 3):
        unit = 3 * 4096 * (size - 1) // size
        assert run_ranks(size, bytes_sent, name, dtype) == [(scattered * unit, reduced * unit)] * size


# ---- a wide result of the communicator


def wide_across_hosts() -> tuple[Tensor, Tensor]:
    host = mock.patch.object(rendezvous, "_host", return_value=f"host {min(dist.get_rank(), 1)}")
    with host, mock.patch("fastpar.comm.multi_host.transport._FLAT_BYTES", 0):
        comm = communicator()
        x = gradients(comm.size, 5000, torch.bfloat16)[comm.rank]
        return comm.reduce_scatter(x, "avg", dtype=torch.float32), comm.reduce_scatter(x.float(), "avg")


def test_a_wide_result_across_hosts_is_the_sum_of_widened_values() -> None:
    for wide, widened in run_ranks(3, wide_across_hosts):
        same_bits(wide, widened)


def refused() -> list[str]:
    comm = communicator()
    messages = []
    for x, op, dtype in (
        (torch.ones(4), "sum", torch.float64),
        (torch.ones(4), "sum", torch.bfloat16),
        (torch.ones(4, dtype=torch.bfloat16), "max", torch.float32),
        (torch.ones(4, dtype=torch.bfloat16), "float32 sum", None),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            comm.reduce_scatter(x, op, dtype=dtype)
        messages.append(str(caught.value))
    assert comm.reduce_scatter(torch.ones(4), dtype=torch.float32).dtype == torch.float32
    return messages


def test_only_sums_of_sixteen_bit_floats_have_a_wide_result() -> None:
    for messages in run_ranks(2, refused):
        assert all("torch.float32 for the sum or avg" in message for message in messages[:3])
        assert "op must be one of" in messages[3]


def wide_mismatch() -> str:
    comm = communicator("shared_memory")
    x = torch.ones(64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as caught:
        comm.reduce_scatter(x, dtype=torch.float32 if comm.rank else None)
    assert comm.reduce_scatter(x, dtype=torch.float32).tolist() == [2.0] * 32
    return str(caught.value)


def test_ranks_that_disagree_about_the_width_of_a_result_are_told() -> None:
    for message in run_ranks(2, wide_mismatch):
        assert "rank 0: reduce_scatter (sum)" in message
        assert "rank 1: reduce_scatter (float32 sum)" in message


def compiled_wide() -> tuple[Tensor, Tensor]:
    comm = communicator()

    def step(x: Tensor) -> Tensor:
        return comm.reduce_scatter(x * 2, "avg", dtype=torch.float32) + 1

    x = gradients(comm.size, 1024, torch.bfloat16)[comm.rank]
    eager = step(x)
    return torch.compile(step, fullgraph=True, backend="aot_eager")(x), eager


def test_a_compiled_graph_gives_the_wide_bits() -> None:
    for result, eager in run_ranks(2, compiled_wide):
        same_bits(result, eager)


# ---- arguments


@pytest.mark.parametrize("wire", [PlainWire(), CastWire(torch.bfloat16)])
def test_a_wire_refuses_what_is_no_flat_gradient(wire: PlainWire | CastWire) -> None:
    comm = Communicator(None)
    with pytest.raises(TypeError, match=r"x must be a float32, bfloat16 or float16 tensor, got torch\.int64"):
        wire.reduce_scatter(comm, torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x must be flat and contiguous, got shape \(3, 2\)"):
        wire.all_reduce(comm, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"x must be flat and contiguous, got shape \(3,\) with strides \(2,\)"):
        wire.all_reduce_async(comm, torch.ones(6)[::2])
    with pytest.raises(ValueError, match="op must be one of sum, avg, got 'max'"):
        wire.reduce_scatter_async(comm, torch.ones(3), op="max")
    with pytest.raises(ValueError, match="sizes must add up to the 3 rows"):
        wire.reduce_scatter(comm, torch.ones(3), [2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_cast_wire_is_of_sixteen_bit_floats(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16 or torch\.float16"):
        CastWire(dtype)


# ---- blocks of 8-bit codes


def block_sum(xs: list[Tensor], sizes: list[int], codes: BlockCodes, op: str) -> Tensor:
    """What each rank's parts become, added in rank order."""
    sent = [codes.quantize_in_torch(x, sizes, seed=None, residual=None) for x in xs]
    total = reduce_in_order([codes.dequantize_in_torch(message, sizes) for message in sent], "sum")
    return total / len(xs) if op == "avg" else total


def check_blocks(transport: str) -> None:
    comm = communicator(transport)
    for format, dtype, op in itertools.product(("int8", "float8_e4m3fn"), FLOATS, ("avg", "sum")):
        wire, codes = BlockWire(format, 64), BlockCodes(format, 64)
        for numel in NUMELS[:3] if dtype != torch.float32 else NUMELS:
            xs = gradients(comm.size, numel, dtype)
            x = xs[comm.rank]
            for sizes in cuts(numel, comm.size):
                mine = block_sum(xs, sizes, codes, op).split(sizes)[comm.rank]
                same_bits(wire.reduce_scatter(comm, x, sizes, op), mine)
                same_bits(wire.reduce_scatter_async(comm, x, sizes, op).wait(), mine)
            whole = [numel]  # parts are cut at blocks, so the blocks are those of the whole
            total = block_sum(xs, whole, codes, op)
            wanted = codes.dequantize_in_torch(codes.quantize_in_torch(total, whole, seed=None, residual=None), whole)
            same_bits(wire.all_reduce(comm, x, op), wanted)
            same_bits(wire.all_reduce_async(comm, x, op).wait(), wanted)
            same_bits(x, xs[comm.rank])


@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (2, "torch"), (3, "torch"), (4, "shared_memory")])
def test_a_block_wire_adds_quantised_values_in_rank_order(size: int, transport: str) -> None:
    run_ranks(size, check_blocks, transport)


def stochastic_steps(seed: int) -> list[Tensor]:
    comm = communicator()
    wire, x = BlockWire(rounding="stochastic", seed=seed), torch.linspace(-1, 1, 3000)
    return [wire.all_reduce(comm, x), wire.all_reduce_async(comm, x).wait(), wire.reduce_scatter(comm, x, [0, 3000])]


def test_stochastic_rounding_is_repeated_by_its_seed_and_differs_between_steps() -> None:
    (first, second, _), (other_first, other_second, part) = run_ranks(2, stochastic_steps, 1)
    same_bits(first, other_first)  # on every rank
    same_bits(second, other_second)
    assert not torch.equal(first, second)
    again = run_ranks(2, stochastic_steps, 1)
    same_bits(again[0][0], first)
    same_bits(again[1][2], part)
    assert not torch.equal(run_ranks(2, stochastic_steps, 2)[0][0], first)


def equal_gradients() -> Tensor:
    comm = communicator()
    return BlockWire(rounding="stochastic").reduce_scatter(comm, torch.linspace(1, 0, 256), [256, 0], "sum")


def test_ranks_draw_different_random_numbers() -> None:
    """Were they the same, both ranks' codes would be, and their sum even."""
    steps = (run_ranks(2, equal_gradients)[0] * 127).round()  # the scale is 1 / 127
    assert (steps % 2 == 1).any()


def accumulated(feedback: bool, reduction: str) -> tuple[float, int]:
    """How far the sum of 50 steps' results is off, in steps of the code; and how many residuals are kept."""
    comm = communicator()
    wire = BlockWire("int8", 64, error_feedback=feedback)
    x = torch.linspace(-1, 1, 640) * (1 + comm.rank)
    mean, total = torch.linspace(-1, 1, 640) * (1 + comm.size) / 2, torch.zeros(640)
    for _ in range(50):
        if reduction == "all_reduce":
            total += wire.all_reduce(comm, x, key="bucket 0")
        else:
            part = wire.reduce_scatter_async(comm, x, key="bucket 0").wait()
            total += comm.all_gather(part, sizes=shard_sizes(640, comm.size))
    return ((total - 50 * mean).abs().max() / (mean.abs().max() / 127)).item(), len(wire._residuals)


@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
def test_error_feedback_keeps_the_error_of_many_steps_at_that_of_one(reduction: str) -> None:
    for off, kept in run_ranks(2, accumulated, True, reduction):
        assert off <= 2.5  # half a step of every rank's message, and of the result's
        assert kept == (2 if reduction == "all_reduce" else 1)
    for off, kept in run_ranks(2, accumulated, False, reduction):
        assert off >= 10
        assert kept == 0


def overflow_and_recovery(bad: float) -> tuple[Tensor, Tensor, Tensor]:
    comm = communicator()
    wire = BlockWire("int8", 64, error_feedback=True)
    x = torch.ones(300)
    first = wire.all_reduce(comm, x, key=0)
    x[70] = bad if comm.rank == comm.size - 1 else 1.0
    second = wire.all_reduce(comm, x, key=0)
    x[70] = 1.0
    return first, second, wire.all_reduce(comm, x, key=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_block_with_what_is_not_finite_is_nan_on_every_rank_and_the_next_step_is_whole(bad: float) -> None:
    block = torch.zeros(300, dtype=torch.bool)
    block[64:128] = True
    for first, second, third in run_ranks(3, overflow_and_recovery, bad):
        torch.testing.assert_close(first, torch.ones(300), rtol=1e-6, atol=0)
        assert torch.equal(second.isnan(), block)
        torch.testing.assert_close(third, torch.ones(300), rtol=1e-6, atol=0)


def block_bytes(numel: int) -> tuple[int, int]:
    comm, wire = communicator(), BlockWire()
    x = torch.ones(numel)
    with record() as scattered:
        wire.reduce_scatter(comm, x)
    with record() as reduced:
        wire.all_reduce(comm, x)
    return sum(entry.nbytes for entry in scattered), sum(entry.nbytes for entry in reduced)


def test_a_block_wire_sends_a_byte_an_element_and_four_a_block() -> None:
    for size in (2, 3):
        unit = 3 * 4096 * 260 // 256 * (size - 1) // size
        assert run_ranks(size, block_bytes, 3 * 4096) == [(unit, 2 * unit)] * size


def refused_by_blocks() -> None:
    comm = communicator()
    wire = BlockWire(error_feedback=True)
    with pytest.raises(ValueError, match="error feedback needs a key"):
        wire.reduce_scatter(comm, torch.ones(4))
    wire.reduce_scatter(comm, torch.ones(4), key=1)
    with pytest.raises(ValueError, match="key 1 was for 4 elements before, got 5"):
        wire.reduce_scatter(comm, torch.ones(5), key=1)
    with pytest.raises(ValueError, match=r"sizes must be 2 numbers, one per rank, that add up to the 4 elements"):
        BlockWire().reduce_scatter(comm, torch.ones(4), [4])
    with pytest.raises(TypeError, match="x must be a float32"):
        BlockWire().all_reduce(comm, torch.ones(4, dtype=torch.float64))


def test_a_block_wire_refuses_calls_that_it_cannot_serve() -> None:
    run_ranks(2, refused_by_blocks)
    with pytest.raises(ValueError, match="rounding must be one of nearest, stochastic, got 'up'"):
        BlockWire(rounding="up")
    with pytest.raises(ValueError, match="seed must be in"):
        BlockWire(seed=-1)
    with pytest.raises(ValueError, match="format must be one of int8, float8_e4m3fn"):
        BlockWire("fp8")
