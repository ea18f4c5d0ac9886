"""Symmetric buffers, on CPU; and what `SymmetricCollectives` does around its kernels, with stand-ins for these.

The kernels themselves are in tests/gpu/test_comm_cuda.py (emulated) and tests/gpu/test_gpu_symmetric.py (on a device).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
from torch import Tensor

from fastpar.comm import CommTimeoutError, Communicator, shard_sizes
from fastpar.comm.reduction import reduce_in_order
from fastpar.comm.symmetric import buffer as symmetric
from fastpar.comm.symmetric import collectives as module
from fastpar.comm.symmetric.buffer import SymmetricBuffer, footprint, virtual_ranks
from fastpar.comm.symmetric.collectives import SymmetricCollectives, signal_words, workspace_bytes
from tests.dist import run_ranks

# ---- buffers ---------------------------------------------------------------------------------------------------------


def numbers_at(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


def exchange() -> None:
    comm = Communicator(dist.group.WORLD)
    rank, world_size = comm.rank, comm.size
    buffer = SymmetricBuffer.create(comm, 1000, "cpu")
    assert (buffer.rank, buffer.size, buffer.nbytes, buffer.device.type) == (rank, world_size, 1000, "cpu")
    assert buffer.multicast == 0
    assert all(int(buffer.signal_pad(r).sum()) == 0 for r in range(world_size))
    assert all(int(buffer.tensor((1000,), torch.uint8, rank=r).sum()) == 0 for r in range(world_size))
    comm.barrier()
    right = (rank + 1) % world_size
    buffer.tensor((2, 3), torch.float32, offset=16, rank=right).fill_(rank + 1)
    buffer.signal_pad(right)[7] = rank + 1
    comm.barrier()
    left = (rank - 1) % world_size
    assert buffer.tensor((6,), torch.float32, offset=16).tolist() == [left + 1] * 6
    assert int(buffer.signal_pad()[7]) == left + 1
    for r in range(world_size):  # the tables lead to the same memory
        assert numbers_at(int(buffer.pointers[r]) + 16, 6) == [(r - 1) % world_size + 1] * 6
        assert int(buffer.signals[r]) == buffer.signal_pad(r).data_ptr()
    kept = buffer.tensor((6,), torch.float32, offset=16, rank=right)
    comm.barrier()
    buffer.close()
    del buffer
    gc.collect()
    assert kept.tolist() == [rank + 1] * 6, "a tensor lost its memory"
    comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_read_and_write_each_others_memory(world_size: int) -> None:
    run_ranks(world_size, exchange)


def unequal() -> str:
    with pytest.raises(ValueError, match="must be equal on all ranks") as caught:
        SymmetricBuffer.create(Communicator(dist.group.WORLD), 64 * (1 + dist.get_rank()), "cpu")
    return str(caught.value)


def test_sizes_that_differ_are_an_error_on_every_rank() -> None:
    assert all("[[64, 16384], [128, 16384]]" in text for text in run_ranks(2, unequal))


def test_virtual_ranks_share_memory() -> None:
    buffers = virtual_ranks(3, 100)
    assert [b.rank for b in buffers] == [0, 1, 2]
    buffers[0].tensor((5,), torch.int32, rank=2).copy_(torch.arange(5))
    buffers[1].signal_pad(2)[0] = 9
    assert buffers[2].tensor((5,), torch.int32).tolist() == [0, 1, 2, 3, 4]
    assert int(buffers[2].signal_pad()[0]) == 9
    assert torch.equal(buffers[0].pointers, buffers[2].pointers)
    assert len(set(buffers[0].pointers.tolist())) == len(set(buffers[0].signals.tolist())) == 3
    assert int(buffers[0].pointers[1]) == buffers[1].tensor((1,), torch.uint8).data_ptr()
    assert footprint(100) == 65536 + 256


def test_a_tensor_keeps_to_the_buffer() -> None:
    (buffer,) = virtual_ranks(1, 100)
    assert buffer.tensor((25,), torch.float32).nbytes == 100
    for shape, offset in [((26,), 0), ((25,), 4), ((1,), 2), ((1,), -4)]:
        with pytest.raises(ValueError, match="does not fit into 100 bytes"):
            buffer.tensor(shape, torch.float32, offset=offset)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.0, got 1"):
        buffer.tensor((1,), torch.float32, rank=1)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.tensor((1,), torch.float32)


@pytest.mark.parametrize(("nbytes", "words"), [(0, 1), (1, 0), (-5, 1)])
def test_sizes_must_be_positive(nbytes: int, words: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        virtual_ranks(2, nbytes, signal_words=words)
    with pytest.raises(ValueError, match="must be at least 1"):
        SymmetricBuffer.create(None, nbytes, signal_words=words)


# ---- collectives: what surrounds the kernels -------------------------------------------------------------------------


class StandIns:
    """CPU functions in place of the CUDA ops, for virtual ranks; they keep the arguments of the last call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.library = torch.library.Library("fastpar", "IMPL")
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_reduce_rms_norm"):
            self.library.impl(f"symmetric_{name}", getattr(self, name), "CPU")

    def all_reduce(self, x: Tensor, out: Tensor, *rest: Any) -> None:
        self.calls.append(rest)
        out.copy_(reduce_in_order(list(x), "avg" if rest[-1] else "sum").expand_as(out))

    def reduce_scatter(self, x: Tensor, out: Tensor, *rest: Any) -> None:
        counts, average = rest[-2:]
        for row, part in zip(out, reduce_in_order(list(x), "avg" if average else "sum").split(counts), strict=True):
            row[: len(part)] = part

    def all_gather(self, x: Tensor, out: Tensor, *rest: Any) -> None:
        assert x.element_size() <= 8
        out.copy_(torch.cat([row[:count] for row, count in zip(x, rest[-1], strict=True)]).expand_as(out))

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, h: Tensor, rstd: Tensor, *rest: Any
    ) -> None:
        hidden, eps, offset = rest[-3:]
        total = reduce_in_order(list(x), "sum").expand_as(h)
        h.copy_(total if residual is None else total + residual)
        rows = h.view(*rstd.shape, hidden)
        rstd.copy_(rows.float().pow(2).mean(-1).add(eps).rsqrt())
        scaled = rows.float() * rstd[..., None]
        out.copy_((scaled if weight is None else scaled * (offset + weight.float())).view(h.shape))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    monkeypatch.setattr(module, "_check_device", lambda device: None)
    made = StandIns()
    yield made
    made.library._destroy()


def virtual(size: int, **options: Any) -> SymmetricCollectives:
    return SymmetricCollectives.virtual(size, "cpu", **options)


def test_the_numbers_of_the_examples(stand_ins: StandIns) -> None:
    group = virtual(2)
    x = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    assert group.all_reduce(x).tolist() == [[11, 22], [11, 22]]
    assert group.all_reduce(x, "avg").tolist() == [[5.5, 11], [5.5, 11]]
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    assert group.reduce_scatter(x, sizes=[1, 2]).tolist() == [[11, 0], [22, 33]]
    x = torch.tensor([[1, 0], [2, 3]])
    assert group.all_gather(x, sizes=[1, 2]).tolist() == [[1, 2, 3]] * 2
    x, residual = torch.tensor([[[1.0, 1.0]], [[1.0, 2.0]]]), torch.ones(2, 1, 2)
    out, h, rstd = group.all_reduce_rms_norm(x, torch.tensor([1.0, 2.0]), residual=residual, eps=0.0)
    assert h.tolist() == [[[3, 4]]] * 2
    torch.testing.assert_close(rstd, torch.full((2, 1), 0.282843), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(out[1], torch.tensor([[0.848528, 2.262742]]), rtol=1e-5, atol=0.0)


def test_shapes_strides_and_dtypes_of_results(stand_ins: StandIns) -> None:
    group = virtual(3)
    x = torch.arange(3 * 4 * 5, dtype=torch.bfloat16).view(3, 5, 4).transpose(1, 2)
    assert torch.equal(group.all_reduce(x)[2], x.float().sum(0).bfloat16())
    assert group.all_reduce(x).is_contiguous()
    scalars = torch.tensor([1.0, 2.0, 3.0])
    assert group.all_reduce(scalars).tolist() == [6, 6, 6]
    out = torch.empty_like(scalars)
    assert group.all_reduce(scalars, out=out) is out
    assert group.all_reduce(x[:, :0]).shape == (3, 0, 5)
    assert shard_sizes(4, 3) == [2, 2, 0]
    parts = group.reduce_scatter(x)
    assert parts.shape == (3, 2, 5)
    whole = x.float().sum(0).bfloat16()
    assert torch.equal(parts[0], whole[:2])
    assert torch.equal(parts[1], whole[2:])
    assert torch.count_nonzero(parts[2]) == 0
    for dtype in (torch.bool, torch.int32, torch.float64, torch.complex128):
        y = torch.arange(12).view(3, 2, 2).to(dtype)
        gathered = group.all_gather(y)
        assert gathered.dtype == dtype
        assert torch.equal(gathered[1], y.view(6, 2))
    assert group.all_gather(x[:, :0]).shape == (3, 0, 5)


@pytest.mark.parametrize(
    ("numel", "algorithm"), [(1, "mailbox"), (32 << 10, "mailbox"), (33 << 10, "one_shot"), (300 << 10, "two_shot")]
)
def test_auto_takes_one_exchange_for_few_bytes(stand_ins: StandIns, numel: int, algorithm: str) -> None:
    group = virtual(2)
    group.all_reduce(torch.zeros(2, numel))
    buffers, signals, states, report, sizes, multicast, number, average = stand_ins.calls[-1]
    assert module.ALGORITHMS[number] == algorithm
    assert (multicast, average) == (0, False)
    assert sizes == [0, 1 << 20, 128 << 10, 60 * 10**9]
    assert states.shape == (2, 8)
    assert buffers.numel() == signals.numel() == 2
    assert report.numel() == 8


def test_mailboxes_hold_poison_and_inboxes_zeros_at_first(stand_ins: StandIns) -> None:
    group = virtual(2, region_bytes=64, mailbox_bytes=32)
    for buffer in group._buffers:
        memory = buffer.tensor((workspace_bytes(2, 64, 32),), torch.uint8)
        assert int(memory[: 2 * 2 * 2 * 64].sum()) == 0
        assert (memory[2 * 2 * 2 * 64 :] == 255).all()
        assert memory.numel() == 2 * 2 * 2 * 64 + 3 * 2 * 32


def test_wrong_arguments_say_what_is_allowed(stand_ins: StandIns) -> None:
    group = virtual(2)
    x = torch.zeros(2, 4)
    for error, text, call in [
        (ValueError, "op must be sum or avg, got 'max'", lambda: group.all_reduce(x, "max")),
        (TypeError, "x must be one of torch.float32, .* got torch.int64", lambda: group.all_reduce(x.long())),
        (ValueError, r"one for each virtual rank, got \(3, 4\)", lambda: group.all_reduce(torch.zeros(3, 4))),
        (ValueError, "at least one dim", lambda: group.all_gather(torch.zeros(2))),
        (ValueError, "algorithm must be auto, .* got 'ring'", lambda: group.all_reduce(x, algorithm="ring")),
        (ValueError, "multicast memory", lambda: group.all_reduce(x, algorithm="multimem")),
        (ValueError, "out must be contiguous", lambda: group.all_reduce(x, out=torch.zeros(2, 5))),
        (ValueError, "add up to the 4 rows", lambda: group.reduce_scatter(x, sizes=[1, 2])),
        (ValueError, "2 entries, none negative", lambda: group.reduce_scatter(x, sizes=[4])),
        (ValueError, "x must have 3 rows", lambda: group.all_gather(x, sizes=[1, 3])),
        (ValueError, "residual must be as x", lambda: group.all_reduce_rms_norm(x, None, residual=x.bfloat16())),
        (ValueError, r"weight must be \[4\]", lambda: group.all_reduce_rms_norm(x, torch.zeros(5))),
        (ValueError, "1 to 64 ranks, got 65", lambda: virtual(65)),
        (ValueError, "region_bytes must be a positive multiple of 16", lambda: virtual(2, region_bytes=24)),
        (ValueError, "timeout must be positive", lambda: virtual(2, timeout=0.0)),
        (ValueError, "need .* and", lambda: SymmetricCollectives(virtual_ranks(2, 100))),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call()


def test_a_reported_time_out_is_raised_at_the_next_call(stand_ins: StandIns) -> None:
    group = virtual(3)
    group.check()
    # as csrc/comm/peer_group.h lays it out: a two-shot all-reduce
    group._report.copy_(torch.tensor([2, 1, 0, 5, 1, 42, 41, 30 * 10**9]))
    text = r"all_reduce \(two_shot\) #42 on rank 1 of 3: rank 0 did not come within 30 s \(it was at #41; block 5, "
    with pytest.raises(CommTimeoutError, match=text):
        group.check()
    with pytest.raises(CommTimeoutError):
        group.all_reduce(torch.zeros(3, 1))


def test_the_header_and_python_agree_on_the_layout() -> None:
    text = (Path(__file__).resolve().parents[2] / "csrc/comm/peer_group.h").read_text()
    assert f"kMaxRanks = {module.MAX_RANKS};" in text
    assert f"kMaxBlocks = {module._MAX_BLOCKS};" in text
    assert f"kNumPhases = {module._PHASES};" in text
    assert f"kNumTurns = {module._TURNS};" in text
    names = text.split("enum class Collective {")[1].split("}")[0].replace("\n", " ").split(",")
    assert len([name for name in names if name.strip()]) == len(module._REPORTED)
    assert signal_words(8) * 4 == 2 * 32 * 8 * 8  # 64-bit flags of 2 exchanges, 32 blocks, 8 sources


def test_the_kernels_are_cudas() -> None:
    with pytest.raises(ValueError, match="these kernels are CUDA's"):
        SymmetricCollectives.virtual(2, "cpu")


def test_a_torch_without_the_functions_that_are_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert symmetric._torch_symmetric_memory() is torchs
    monkeypatch.delattr(torchs, "rendezvous")
    with pytest.raises(RuntimeError, match=r"lacks rendezvous; fastpar knows it as it is in torch 2\.11 to 2\.13"):
        symmetric._torch_symmetric_memory()
