"""Dispatch into other ranks' memory in Triton's interpreter; run by tests/moe/test_moe_triton.py.

What is computed is tested with virtual ranks in one process, which take turns; what is waited for, with real processes
that share memory. Memory that is not written holds what is no small integer; rows are -1, 0 and 1.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.kernels import moe_push_kernels as kernels
from fastpar.kernels.grouped_gemm import RowGroups, grouped_linear, grouped_linear_act
from fastpar.kernels.moe_push import PushExchange, run_together
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer
from fastpar.reference import moe_rows
from tests.dist import run_ranks
from tests.moe.moe_calls import reference_mlp
from tests.ops.overlap_gemm_cases import MappedBuffer, create_files, integers

NBYTES = 1 << 18
EXPERTS, TOP_K, WIDTH = 6, 3, 20


def open_exchange(
    paths: list[Path], rank: int, *, capacity: int = 100, dtype: torch.dtype = torch.float32, timeout: float = 20.0
) -> PushExchange:
    buffer = OverlapBuffer(MappedBuffer(paths, rank, NBYTES), flag_capacity=4, timeout=timeout)
    return PushExchange(buffer, num_experts=EXPERTS, width=WIDTH, dtype=dtype, capacity=capacity)


def open_exchanges(folder: Path, size: int, **options: object) -> list[PushExchange]:
    """All ranks of a group, in this process."""
    paths = create_files(folder, size, NBYTES)
    return [open_exchange(paths, rank, **options) for rank in range(size)]  # type: ignore[arg-type]


def batch(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, indices, weights, add. Weights are powers of two: sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)
    weights = 2.0 ** torch.randint(-2, 2, (tokens, TOP_K), generator=generator)
    return (
        integers(tokens, WIDTH, seed=seed, dtype=dtype),
        indices,
        weights,
        integers(tokens, WIDTH, seed=seed + 1, dtype=dtype),
    )


def wanted_rows(x: Tensor, indices: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """(pairs in the order of rows, splits) of every rank; x and indices are those of all ranks, one below the other."""
    order, counts = moe_rows.sort_pairs(indices, EXPERTS)
    found = []
    for part, chosen in zip(order.split(counts.view(size, -1).sum(1).tolist()), counts.view(size, -1), strict=True):
        found.append((part, torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])))
    return found


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((9,), torch.float32), ((5, 8), torch.bfloat16), ((4, 0, 7), torch.float32)], ids=str
)
def test_rows_lie_by_expert_then_by_rank_and_come_back_summed(
    tmp_path: Path, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Nine calls each: both channels are used again."""
    size = len(sizes)
    exchanges = open_exchanges(tmp_path, size, dtype=dtype)
    known = []
    for step in range(3):
        x, indices, weights, add = batch(sum(sizes), step, dtype)
        parts = list(zip(*(t.split(sizes) for t in (x, indices, weights, add)), strict=True))
        pushed = run_together([e.dispatch_phases(*p[:3]) for e, p in zip(exchanges, parts, strict=True)])
        wanted = wanted_rows(x, indices, size)
        results, dots = [], []
        for exchange, found, (pairs, splits) in zip(exchanges, pushed, wanted, strict=True):
            assert torch.equal(found.splits.long(), splits)
            rows = found.rows[: len(pairs)]
            assert torch.equal(rows, x[pairs // TOP_K])
            assert torch.equal(found.row_weights[: len(pairs)], weights.view(-1)[pairs])
            result = exchange.empty_rows()  # the dispatch's rows are still there
            result[: len(pairs)] = rows * 2
            results.append(result)
            dots.append(torch.arange(100.0) + 1000 * exchange.buffer.rank)
        calls = [
            e.give_back_phases(p, r, weights=part[2], add=part[3], values=d)
            for e, p, r, part, d in zip(exchanges, pushed, results, parts, dots, strict=True)
        ]
        outs, values = zip(*run_together(calls), strict=True)
        goes = (indices >= 0) & (indices < EXPERTS)
        total = (weights * goes).sum(1, keepdim=True)
        assert torch.equal(torch.cat(outs).double(), add.double() + 2 * total.double() * x.double())
        places = torch.zeros(indices.numel())
        for rank, (pairs, _) in enumerate(wanted):
            places[pairs] = 1000.0 * rank + torch.arange(len(pairs))
        assert torch.equal(torch.cat(values).view(-1), places)
        again = run_together([e.send_phases(p, part[3]) for e, p, part in zip(exchanges, pushed, parts, strict=True)])
        for (rows, poison), (pairs, _) in zip(again, wanted, strict=True):
            assert torch.equal(rows[: len(pairs)], add[pairs // TOP_K])
            assert poison.item() == 0
        known.append([len(e._known) for e in exchanges])
    assert known[0] == known[2], "addresses were sent to the device after the first step"


def test_experts_of_several_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    sizes, size, features = (6, 9), 2, 16
    exchanges = open_exchanges(tmp_path, size)
    _, indices, weights, _ = batch(sum(sizes), 0)
    x = torch.randn(sum(sizes), WIDTH)
    first, second = torch.randn(EXPERTS, 2 * features, WIDTH) / 4, torch.randn(EXPERTS, WIDTH, features) / 4
    parts = list(zip(*(t.split(sizes) for t in (x, indices, weights)), strict=True))
    pushed = run_together([e.dispatch_phases(*p) for e, p in zip(exchanges, parts, strict=True)])
    calls = []
    for rank, (exchange, found, part) in enumerate(zip(exchanges, pushed, parts, strict=True)):
        mine = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        groups = RowGroups(found.splits, exchange.capacity, x.device)
        _, act = grouped_linear_act(found.rows, first[mine], groups, activation="swiglu")
        rows = grouped_linear(act, second[mine], groups, out=exchange.empty_rows())
        calls.append(exchange.give_back_phases(found, rows, weights=part[2]))
    out = torch.cat([out for out, _ in run_together(calls)])
    wanted = reference_mlp(x, indices, weights, first, second)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


# ---- what is waited for: processes -----------------------------------------------------------------------------------


def repeat_calls(paths: list[Path], delay: str) -> list[str]:
    """Dispatches and combines with other data every time; returns what was wrong. Nothing but they keep the ranks in
    step."""
    rank, size = dist.get_rank(), len(paths)
    exchange = open_exchange(paths, rank, timeout=40.0)
    wrong = []
    for step in range(4):
        if delay == "turns" and step % size == rank:
            time.sleep(0.3)
        x, indices, weights, add = batch(5 + rank, 10 * step + rank)
        pushed = exchange.dispatch(x, indices, weights)
        rows = exchange.empty_rows()
        rows.copy_(pushed.rows)
        if delay == "before combine" and rank == 0:
            time.sleep(0.3)
        out, _ = exchange.give_back(pushed, rows, weights=weights, add=add)
        total = (weights * ((indices >= 0) & (indices < EXPERTS))).sum(1, keepdim=True)
        if not torch.equal(out, add + total * x):
            wrong.append(f"step {step} on rank {rank}")
    exchange.buffer.check()
    return wrong


@pytest.mark.slow  # ranks cost seconds to start
@pytest.mark.parametrize(("size", "delay"), [(2, "turns"), (3, "before combine")])
def test_processes_agree_call_after_call(tmp_path: Path, size: int, delay: str) -> None:
    paths = create_files(tmp_path, size, NBYTES)
    assert run_ranks(size, repeat_calls, paths, delay, timeout=120.0) == [[]] * size


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_and_nobody_is_written_to(tmp_path: Path) -> None:
    exchanges = open_exchanges(tmp_path, 2, timeout=0.05)
    x, indices, weights, _ = batch(5, 0)
    memory = exchanges[0].buffer.symmetric.maps[1].clone()  # type: ignore[attr-defined]
    before = exchanges[0]._rows_offset
    pushed = exchanges[0].dispatch(x, indices, weights)
    assert pushed.splits.tolist() == [0, 0, 0, 0]
    assert torch.isnan(pushed.poison).all()
    after = exchanges[0].buffer.symmetric.maps[1]  # type: ignore[attr-defined]
    changed = (memory != after).nonzero()
    assert int(changed.max()) < len(memory) - exchanges[0].buffer.channel_bytes + before, "rows of a peer were written"
    with pytest.raises(TimeoutError, match=r"rank 0 waited .* for rank 1 to say how many rows it has for each expert"):
        exchanges[0].dispatch(x, indices, weights)


def test_results_that_never_come_make_the_sum_nan(tmp_path: Path) -> None:
    exchanges = open_exchanges(tmp_path, 2, timeout=0.05)
    parts = [batch(5, rank)[:3] for rank in range(2)]
    pushed = run_together([e.dispatch_phases(*p) for e, p in zip(exchanges, parts, strict=True)])
    out, values = exchanges[0].give_back(pushed[0], exchanges[0].empty_rows(), values=torch.ones(100))
    assert torch.isnan(out).all()
    assert values is not None
    assert torch.isnan(values).all()
    with pytest.raises(TimeoutError, match="for rank 1 to show its experts' results"):
        exchanges[0].empty_rows()


def test_rows_without_room_are_an_error_on_every_rank(tmp_path: Path) -> None:
    exchanges = open_exchanges(tmp_path, 2, capacity=8)
    x, _, _, _ = batch(3, 0)
    indices = torch.zeros(3, TOP_K, dtype=torch.int64)
    pushed = run_together([e.dispatch_phases(x, indices) for e in exchanges])
    for exchange, found in zip(exchanges, pushed, strict=True):
        assert torch.isnan(found.poison).all()
        assert int(found.slots.max()) < 8
        with pytest.raises(
            RuntimeError, match=r"rank 0 would have got 18 rows for its experts, .* there is room for 8"
        ):
            exchange.empty_rows()


def test_a_rank_that_refuses_keeps_nobody_waiting(tmp_path: Path) -> None:
    exchanges = open_exchanges(tmp_path, 2, timeout=1000.0)
    x, indices, weights, _ = batch(5, 0)
    exchanges[1].refuse()
    pushed = exchanges[0].dispatch(x, indices, weights)
    assert pushed.splits.tolist() == [0, 0, 0, 0]
    assert pushed.slots.max() == -1
    assert torch.isnan(pushed.poison).all()
    with pytest.raises(ValueError, match="rank 1 has refused its arguments: see its error"):
        exchanges[0].empty_rows()


def test_a_rank_that_refuses_knows_it_before_its_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exchange,) = open_exchanges(tmp_path, 1, timeout=1000.0)
    monkeypatch.setattr(exchange.buffer, "note_failures", lambda: None)  # a copy to the host that has not landed
    exchange.refuse()
    with pytest.raises(ValueError, match="rank 0 has refused its arguments: see its error"):
        exchange.dispatch(*batch(5, 0)[:3])


@pytest.mark.parametrize("ends", [True, False])
def test_a_channel_is_free_again_after_end_alone(tmp_path: Path, ends: bool) -> None:
    """As in a CUDA graph with an odd number of calls: the last one's channel is that of the first."""
    exchanges = open_exchanges(tmp_path, 2, timeout=0.05)
    found = []
    for _ in range(2):
        for exchange in exchanges:
            exchange.buffer._calls = 0
        parts = [batch(5, rank)[:3] for rank in range(2)]
        pushed = run_together([e.dispatch_phases(*p) for e, p in zip(exchanges, parts, strict=True)])
        found = [bool(torch.isnan(p.poison)) for p in pushed]
        for exchange in exchanges if ends else ():
            exchange.end()
        exchanges[0]._used = exchanges[1]._used = None
    assert found == [not ends] * 2


def test_impossible_arguments_are_explained(tmp_path: Path) -> None:
    paths = create_files(tmp_path, 2, NBYTES)
    buffer = OverlapBuffer(MappedBuffer(paths, 0, NBYTES), flag_capacity=4)
    with pytest.raises(ValueError, match=r"num_experts \(5\) must be divisible by the number of ranks \(2\)"):
        PushExchange(buffer, num_experts=5, width=8, dtype=torch.float32, capacity=8)
    with pytest.raises(ValueError, match=r"capacity \(0\)"):
        PushExchange(buffer, num_experts=4, width=8, dtype=torch.float32, capacity=0)
    with pytest.raises(ValueError, match=r"1000 rows of 64 torch\.float32 needs"):
        PushExchange(buffer, num_experts=4, width=64, dtype=torch.float32, capacity=1000)
    exchange = PushExchange(buffer, num_experts=4, width=8, dtype=torch.bfloat16, capacity=8)
    with pytest.raises(
        ValueError, match=r"rows of 8 torch\.float32 do not fit the exchange, which has room for 8 torch\.bf"
    ):
        exchange.dispatch(torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weights must have the shape of indices, \(2, 1\), got \(2, 2\)"):
        exchange.dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2))


def test_the_worked_examples() -> None:
    first, splits, room = (torch.zeros(n, dtype=torch.int32) for n in (2, 2, 1))
    state, record = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    kernels.plan_kernel[(1,)](
        loads=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), flags=torch.zeros(8, dtype=torch.int32),
        flag_capacity=4, state=state, record=record, first=first, splits=splits, room=room, rank=1, capacity=100,
        num_experts=2, max_polls=1, W=2, EXPERTS=2,
    )  # fmt: skip
    assert first.tolist() == [1, 2]
    assert splits.tolist() == [0, 6]
    memories = [torch.zeros(64) for _ in range(2)]
    done = torch.zeros(1, dtype=torch.int32)
    kernels.push_kernel[(2,)](
        x=torch.tensor([[5.0]]), stride=1, values=None, slots=torch.tensor([[3, 0]]),
        peers=torch.tensor([m.data_ptr() for m in memories]), rows_offset=0, values_offset=0, flags_offset=128,
        state=state + 7, done=done, num_pairs=2, top_k=2, capacity=2, width=1, W=2, ALIGN=1, ROWS=1, COLS=1,
    )  # fmt: skip
    assert [m[:2].tolist() for m in memories] == [[5, 0], [0, 5]]
    assert [m.view(torch.int32)[32 + kernels.ROWS_FLAG.value].item() for m in memories] == [7, 7]
    assert done.item() == 0
