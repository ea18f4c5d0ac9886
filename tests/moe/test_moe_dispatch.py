"""Dispatch and combine over every transport against one rank, and against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import Communicator, record
from fastpar.expert import MoELayer
from fastpar.ops import Dispatch
from fastpar.ops.moe.fp8 import decode, encode, quantize_dequantize
from fastpar.ops.moe.packing import PackedField, SentTokens, layout, token_parts
from fastpar.ops.moe.permute import gather_rows
from fastpar.ops.moe.plan import DispatchSpec, Padding
from fastpar.ops.moe.transports.all_to_all import AllToAllDispatcher
from tests.comm.test_hierarchical import MIXED, run_on
from tests.dist import run_ranks
from tests.moe.moe_calls import find_dispatcher, moe_dispatch
from tests.moe.moe_ranks import TRANSPORTS, exchange_rank, through_experts, tokens_of

FP8 = "float8_e4m3fn"
SIZES = {1: (23,), 2: (17, 6), 3: (0, 5, 18), 4: (9, 0, 13, 1)}


def loop(x, indices, weights, dout, *, num_experts):
    """The same token by token in float64."""
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    out = x + torch.stack(
        [
            sum(
                (w * (e + 1) * row for e, w in zip(choices.tolist(), ws, strict=True) if 0 <= e < num_experts),
                torch.zeros_like(row),
            )
            for row, choices, ws in zip(x, indices, weights, strict=True)
        ]
    )
    out.backward(dout.double())
    return out.detach(), x.grad, weights.grad


def test_one_rank_matches_the_loop():
    parts = tokens_of(0, (23,), 9, 3, 12, torch.float32)
    found = through_experts(*parts, num_experts=12)
    for got, want in zip(found, loop(*parts, num_experts=12), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_match_one(size, transport, dtype):
    sizes = SIZES[size]
    found = run_ranks(size, exchange_rank, sizes, 9, 3, 12, dtype, TRANSPORTS[transport])
    whole = through_experts(*tokens_of(0, (sum(sizes),), 9, 3, 12, dtype), num_experts=12)
    for got, want in zip(zip(*found, strict=True), whole, strict=True):
        if transport == "all-to-all":  # a sum of sums, rounded in between
            torch.testing.assert_close(torch.cat(got), want, rtol=0.02 if dtype == torch.bfloat16 else 1e-6, atol=0.05)
        else:
            assert torch.equal(torch.cat(got), want)


def test_ranks_that_share_no_memory_match_one():
    found = run_ranks(2, exchange_rank, SIZES[2], 9, 3, 12, torch.bfloat16, {"exact": True}, "torch")
    whole = through_experts(*tokens_of(0, (sum(SIZES[2]),), 9, 3, 12, torch.bfloat16), num_experts=12)
    assert all(torch.equal(torch.cat(got), want) for got, want in zip(zip(*found, strict=True), whole, strict=True))


def test_ranks_on_several_hosts_match_one():
    found = run_on(MIXED, exchange_rank, SIZES[4], 9, 3, 12, torch.float32, {"exact": True})
    whole = through_experts(*tokens_of(0, (sum(SIZES[4]),), 9, 3, 12, torch.float32), num_experts=12)
    assert all(torch.equal(torch.cat(got), want) for got, want in zip(zip(*found, strict=True), whole, strict=True))


def memory_across_hosts() -> str:
    with pytest.raises(ValueError, match="transport='shared_memory'") as error:
        find_dispatcher(dist.group.WORLD, transport="shared_memory")
    return str(error.value)


def test_memory_that_is_not_shared_is_an_error():
    for text in run_on(MIXED, memory_across_hosts):
        assert "cannot share memory" in text


def test_a_plan_tells_what_every_rank_and_expert_gets():
    indices = torch.tensor([[0, 2], [0, -1], [2, 3]])
    _, _, plan = moe_dispatch(torch.zeros(3, 5), indices, num_experts=3)
    assert plan.rows_per_expert.tolist() == [2, 0, 2]
    assert plan.rows_per_rank.tolist() == [4]
    assert plan.tokens_per_rank == (3,)
    assert plan.dropped == 2


# ---- what is sent


def step_records(options: dict, hidden: int, dtype: torch.dtype, top_k: int) -> tuple[list[str], int, list[int]]:
    """Ops of a step with backward; bytes of the dispatch that a rank sends, and how many it has to."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, indices, weights, dout = tokens_of(rank, (40,) * size, hidden, top_k, 4 * size, dtype)
    whole = {"num_experts": 4 * size, "group": dist.group.WORLD, **options}
    through_experts(x, indices, weights, dout, **whole)  # regions are made
    with record() as log:
        through_experts(x, indices, weights, dout, **whole)
    to_others = sum(
        len({e // 4 for e in choices if e >= 0} - {rank}) for choices in indices.tolist()
    )  # pairs of a token and another rank that it goes to
    return [entry.op for entry in log], log[1].nbytes, to_others


def test_a_step_over_shared_memory_is_two_headers_and_three_barriers():
    for ops, _, _ in run_ranks(2, step_records, TRANSPORTS["shared memory"], 16, torch.float32, 2):
        assert ops == ["all_gather", "barrier", "all_gather", "barrier", "barrier"]


@pytest.mark.parametrize(("payload", "row_bytes"), [(None, 2 * 256), (FP8, 256 + 4 * 2)], ids=str)
def test_an_all_to_all_sends_each_token_once_to_each_rank(payload, row_bytes):
    options = {**TRANSPORTS["all-to-all"], "payload": payload}
    for ops, nbytes, to_others in run_ranks(4, step_records, options, 256, torch.bfloat16, 4):
        assert ops == ["all_gather", *["all_to_all"] * 4]
        assert nbytes == to_others * (row_bytes + 4 * 2 + 4 * 4)  # 4 expert numbers and weights


@pytest.mark.parametrize(("payload", "times"), [(None, 1.5), (FP8, 2.9)], ids=str)
def test_8_ranks_with_top_8_of_256_get_fewer_bytes_than_a_row_for_each_choice(payload, times):
    """Virtual: what one of 8 ranks would send of 4096 tokens of 7168 in bfloat16, to itself included."""
    indices = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :8]
    sent = SentTokens.of(indices, 8, 32)
    tokens, _ = token_parts([], torch.zeros(1, 7168, dtype=torch.bfloat16), payload)
    _, width = layout([PackedField(part) for part in (*tokens, sent.experts.short(), torch.zeros(1, 8))])
    for_each_choice = 4096 * 8 * 7168 * 2
    assert for_each_choice / (len(sent.tokens) * width) > times


# ---- tokens in 8 bits


def test_payload_worked_example():
    """The largest of a block becomes 448; 3 bits follow the leading one."""
    x = torch.zeros(1, 130)
    x[0, :4] = torch.tensor([448.0, -17.0, 1.0, 2.0**-9])
    x[0, 128] = 3.0
    codes, scales = encode(x, FP8)
    assert scales.tolist() == [[1.0, pytest.approx(3.0 / 448.0)]]
    assert codes.shape == (1, 130)
    found = decode(codes, scales, torch.float32, FP8)
    assert found[0, :4].tolist() == [448.0, -16.0, 1.0, 2.0**-9]
    assert found[0, 128:].tolist() == [pytest.approx(3.0), 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 256), (3, 130), (4, 1), (0, 128), (2, 0)], ids=str)
def test_a_payload_loses_what_8_bits_lose(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = quantize_dequantize(x, FP8)
    assert found.dtype == dtype
    assert found.shape == x.shape
    codes, scales = encode(x, FP8)
    wide = torch.zeros(shape[0], 2 * shape[1] + 2, dtype=torch.uint8)  # a column of a wider packed row
    wide[:, 1 : 1 + shape[1]] = codes
    assert torch.equal(decode(wide[:, 1 : 1 + shape[1]], scales, dtype, FP8), found)
    # Half a unit in the last of 4 significant bits, or of the smallest code (2^-9) of a block whose largest is below 5,
    # and the rounding to dtype.
    bound = x.double().abs() * (2.0**-4 + 2.0**-8) + 2.0**-10 * 5.0 / 448.0
    assert ((found.double() - x.double()).abs() <= bound).all()


def test_a_payload_with_a_number_that_is_not_finite_is_nan_in_its_block_only():
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    assert quantize_dequantize(x, FP8).isnan().tolist() == [[True] * 128 + [False] * 128, [False] * 128 + [True] * 128]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_payload_has_the_same_numbers_over_every_transport(transport):
    sizes, dtype = SIZES[2], torch.bfloat16
    found = run_ranks(2, exchange_rank, sizes, 130, 3, 12, dtype, {**TRANSPORTS[transport], "payload": FP8})
    parts = tokens_of(0, (sum(sizes),), 130, 3, 12, dtype)
    whole = through_experts(*parts, num_experts=12, payload=FP8)
    rounded = through_experts(quantize_dequantize(parts[0], FP8), *parts[1:], num_experts=12)
    assert torch.equal(whole[1], rounded[1])  # a gradient that does not know of it
    assert torch.equal(whole[2], rounded[2])  # the weights' knows what experts saw
    for got, want in zip(zip(*found, strict=True), whole, strict=True):
        if transport == "all-to-all":  # a sum of sums, rounded in between
            torch.testing.assert_close(torch.cat(got), want, rtol=0.02, atol=0.3)
        else:
            assert torch.equal(torch.cat(got), want)


def test_a_layer_hands_its_payload_on_and_routes_by_what_was_not_rounded():
    layer = MoELayer.from_preset("mixtral", 16, 8, 4, top_k=2, dispatch=Dispatch(payload=FP8))
    x, experts = torch.randn(5, 16), layer.experts
    out, routing = layer(x), layer.router(x)
    experts.dispatch = Dispatch()
    assert torch.equal(out, experts(quantize_dequantize(x, FP8), routing.indices, routing.weights))
    assert not torch.equal(out, experts(x, routing.indices, routing.weights))


def send_again(options: dict) -> bool:
    """What a backward that has not kept its rows gets."""
    x, indices, weights, dout = tokens_of(dist.get_rank(), (5, 9), 130, 2, 6, torch.bfloat16)
    dispatcher = find_dispatcher(dist.group.WORLD, **options)
    for payload in (None, FP8):
        plan, tables = dispatcher.dispatch(x, indices, weights, DispatchSpec(6, payload=payload))
        rows = gather_rows(tables, plan.source)
        other = gather_rows(dispatcher.redispatch(plan, dout)()[0], plan.source)
        again, both = dispatcher.redispatch(plan, dout, x=x)()
        assert torch.equal(gather_rows(again, plan.source), rows)
        assert torch.equal(gather_rows(both, plan.source), other)
        (once,) = dispatcher.redispatch(plan, x=x)()
        assert torch.equal(gather_rows(once, plan.source), rows)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_sent_again_arrive_as_they_did_before(transport):
    assert run_ranks(2, send_again, TRANSPORTS[transport]) == [True, True]


# ---- devices


def test_index_tensors_are_made_on_the_device_of_x(monkeypatch):
    """Anything made without a device would be on the default one, which is none that can compute."""
    parts = tokens_of(0, (23,), 130, 3, 12, torch.float32)
    exchanges = [AllToAllDispatcher(Communicator(None), exact=exact) for exact in (False, True)]
    wanted = through_experts(*parts, num_experts=12, padding=Padding(align=8))
    for exchange in (None, *exchanges):
        if exchange is not None:
            monkeypatch.setattr(
                "fastpar.ops.moe.dispatch_combine.find_dispatcher", lambda *_, found=exchange, **__: found
            )
        with torch.device("meta"):
            found = through_experts(*parts, num_experts=12, padding=Padding(align=8))
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_a_cuda_device_gives_what_the_cpu_gives(monkeypatch):
    parts = tokens_of(0, (23,), 130, 3, 12, torch.float32)
    monkeypatch.setattr(
        "fastpar.ops.moe.dispatch_combine.find_dispatcher", lambda *_, **__: AllToAllDispatcher(Communicator(None))
    )
    for payload in (None, FP8):
        wanted = through_experts(*parts, num_experts=12, payload=payload)
        found = through_experts(*(part.cuda() for part in parts), num_experts=12, payload=payload)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.cpu(), want)
