"""Bytes that the stages keep, measured from the storages that exist, and words that they send: against formulas."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.comm import Communicator, record
from tests.dist import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

PRECISIONS = {"fp32": fp.Precision(), "bf16": fp.Precision.bf16()}
WIDTH, LAYERS = 128, 6


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 37)  # rows that nothing divides

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def backward(model, rank):
    torch.manual_seed(rank)
    model(torch.randn(4, WIDTH)).float().square().mean().backward()


def check_memory(precision):
    from memory import MemoryMeter

    found = []
    for stage in (0, 1, 2, 3):
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters())
        meter = MemoryMeter(model, optimizer)
        zero = fp.zero.shard(
            model,
            optimizer,
            group=dist.group.WORLD if dist.get_world_size() > 1 else None,
            stage=stage,
            precision=PRECISIONS[precision],
            bucket_bytes=2 * WIDTH * WIDTH * 4,
        )
        meter.zero = zero
        for step in range(3):
            backward(model, dist.get_rank())
            with meter.watching(step == 2):
                optimizer.step()
            optimizer.zero_grad()
        found.append(({kind: meter.peaks[kind] for kind in zero.expected_memory()}, zero.expected_memory()))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_keeps_what_the_formula_says(size, precision):
    for rank, stages in enumerate(run_ranks(size, check_memory, precision)):
        for stage, (measured, expected) in enumerate(stages):
            for kind, nbytes in expected.items():
                assert measured[kind] == pytest.approx(nbytes, rel=0.02, abs=2048), (rank, stage, kind)


def test_the_formula_at_one_point():
    """Four ranks that divide everything evenly but for the last layer: the terms of docs/zero.md by hand."""
    per_rank = run_ranks(4, check_memory, "fp32")
    layer, last = WIDTH * WIDTH + WIDTH, 37 * (WIDTH + 1)
    total = LAYERS * layer + last
    mine = LAYERS * layer // 4 + 10 * (WIDTH + 1)  # rows 0-9 of 37
    expected = [expected for _, expected in per_rank[0]]
    assert expected[0] == {"parameters": 4 * total, "gradients": 4 * total, "states": 8 * total}
    assert expected[1]["parameters"] == 4 * total
    assert expected[1]["states"] == expected[2]["states"] == 8 * mine
    assert expected[1]["gradients"] < 4 * mine + 2 * 2 * 4 * layer + 1  # and two buckets of at most two layers
    assert expected[3]["parameters"] < 4 * mine + 4 * total // 100  # and what is persistent


def check_words(stage, passes, use_no_sync):
    """Bytes per step that this rank sends under ring algorithms, of what is larger than the small agreements."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = Communicator(dist.group.WORLD)
    options = {"persistent_share": 0.0} if stage == 3 else {}
    zero = fp.zero.shard(model, optimizer, group=comm, stage=stage, accumulate=passes, **options)
    for _ in range(2):
        with record() as sent:
            for index in range(passes):
                if use_no_sync and index < passes - 1:
                    with zero.no_sync():
                        backward(model, comm.rank)
                else:
                    backward(model, comm.rank)
            optimizer.step()
    small = [entry for entry in sent if entry.numel < 64]
    assert len(small) <= 6 + 2 * passes, [entry.op for entry in small]  # barriers, flags and the norm
    return sum(entry.nbytes for entry in sent if entry.numel >= 64)


PSI = sum(p.numel() for p in Stack().parameters())


@pytest.mark.parametrize(
    ("stage", "passes", "use_no_sync", "multiple"),
    [
        (0, 1, False, 2),
        (0, 4, False, 2),  # summed locally
        (1, 1, False, 2),
        (1, 4, False, 2),
        (2, 1, False, 2),
        (2, 4, False, 5),  # a reduce-scatter per microbatch, and one all-gather
        (2, 4, True, 2),
        (3, 1, False, 3),
        (3, 4, False, 12),
        (3, 4, True, 9),  # gathered twice per microbatch, reduced once
    ],
)
def test_a_step_sends_what_the_notes_say(stage, passes, use_no_sync, multiple):
    for size in (2, 4):
        for nbytes in run_ranks(size, check_words, stage, passes, use_no_sync):
            assert nbytes == pytest.approx(multiple * 4 * PSI * (size - 1) / size, rel=1e-3)


def check_hybrid():
    mesh = fp.init_mesh(dp_replicate=2, dp_shard=2)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp.zero.shard(model, optimizer, group=mesh, stage=3, persistent_share=0.0)
    for _ in range(2):
        with record() as sent:
            backward(model, dist.get_rank())
            optimizer.step()
    inside = sum(entry.nbytes for entry in sent if entry.numel >= 64 and entry.op != "all_reduce")
    across = sum(entry.nbytes for entry in sent if entry.numel >= 64 and entry.op == "all_reduce")
    mesh.close()
    return inside, across


def test_a_hybrid_step_sends_shards_across_replicas():
    for inside, across in run_ranks(4, check_hybrid):
        assert inside == pytest.approx(3 * 4 * PSI / 2, rel=1e-3)
        assert across == pytest.approx(2 * 4 * (PSI / 2) / 2, rel=0.02)  # rows of 37 do not divide evenly


def check_wire(stage):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    comm = Communicator(dist.group.WORLD)
    wire = fp.comm.BlockWire("int8", error_feedback=True)
    fp.zero.shard(model, optimizer, group=comm, stage=stage, wire=wire)
    losses = []
    for _ in range(4):
        torch.manual_seed(comm.rank)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        with record() as sent:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(entry.nbytes for entry in sent if entry.numel >= 64)


@pytest.mark.parametrize(("stage", "share"), [(0, 2), (2, 1), (3, 1)])
def test_gradients_of_8_bits_train_and_send_a_quarter(stage, share):
    for losses, nbytes in run_ranks(2, check_wire, stage):
        assert losses[-1] < losses[0]
        gathered = 4 * PSI / 2 if stage == 3 else 0  # parameters, before backward
        assert nbytes - gathered < 1.1 * share * PSI / 2
