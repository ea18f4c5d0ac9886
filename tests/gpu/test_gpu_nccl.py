"""Every call of the torch transport over NCCL, and messages between devices: one rank, and two on two devices.

One rank takes shortcuts above the transport, so the transport is driven itself: no other GPU test makes an NCCL call.
The same function runs over gloo on the CPU, which shows that what it expects is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import PointToPoint
from fastpar.comm.torch.transport import TorchTransport
from tests.dist import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    x = torch.arange(numel) % 5 + rank
    return (x % 2 == 0) if dtype == torch.bool else x.to(dtype)


def every_call(kind: str, size: int, rank: int, group: Any) -> list[str]:
    """What differs from what is expected, by name of the call."""
    transport = TorchTransport(group, timeout=60.0)
    wrong: list[str] = []

    def check(name: str, flight: Any, expected: Tensor | None) -> None:
        if flight.work is not None:
            flight.work.wait(60.0)
        found = flight.finish()
        if found is None or expected is None:
            same = found is None and expected is None
        else:
            same = found.device.type == kind and found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
        if not same:
            wrong.append(f"{name}: {found} is not {expected}")

    for dtype in DTYPES:
        for numel in (6 * size, 1_000_000 // size * size):
            parts = [values(r, numel, dtype) for r in range(size)]
            x = parts[rank].to(kind)
            label = f"{dtype} {numel}"
            uneven = [numel - (size - 1) * 2, *[2] * (size - 1)]
            even = [numel // size] * size
            if dtype != torch.bool:
                wide = torch.stack([p.double() for p in parts])
                for op, total in (("sum", wide.sum(0)), ("max", wide.amax(0)), ("min", wide.amin(0))):
                    check(f"all_reduce {op} {label}", transport.all_reduce(x, op, None), total.to(dtype))
                    check(f"reduce {op} {label}", transport.reduce(x, 0, op), total.to(dtype) if rank == 0 else None)
                    for sizes in (even, uneven):
                        mine = total.to(dtype).split(sizes)[rank]
                        check(f"reduce_scatter {op} {label}", transport.reduce_scatter(x, sizes, op), mine)
                out = torch.empty_like(x)
                check(f"all_reduce out {label}", transport.all_reduce(x, "sum", out), wide.sum(0).to(dtype))
            for sizes in (even, uneven):
                shard = parts[rank].split(sizes)[rank].to(kind)
                whole = torch.cat([p.split(sizes)[r] for r, p in enumerate(parts)])
                check(f"all_gather {label}", transport.all_gather(shard, sizes), whole)
                received = torch.cat([p.split(sizes)[rank] for p in parts])
                mine = [sizes[rank]] * size
                check(f"all_to_all {label}", transport.all_to_all(x, sizes, mine), received)
            check(f"broadcast {label}", transport.broadcast(x, size - 1), parts[size - 1])
    barrier = transport.barrier()
    assert barrier.work is not None
    barrier.work.wait(60.0)
    return wrong


def messages(kind: str, size: int, rank: int, group: Any) -> list[str]:
    """Round a ring, several on their way, empty ones among them, and taken in another order than they were sent in."""
    link = PointToPoint(group, timeout=60.0)
    sizes = (5, 0, 1000)
    for tag, n in enumerate(sizes):
        tensors = [torch.full((n, 3), 10.0 * rank + n, device=kind), torch.ones(n, device=kind).bool()]
        link.send((rank + 1) % size, tag, tensors, str(n).encode())
    wrong = []
    before = (rank - 1) % size
    for tag in (2, 0, 1):
        (first, second), note = link.recv(before, tag)
        expected = torch.full((sizes[tag], 3), 10.0 * before + sizes[tag])
        if first.device.type != kind or not torch.equal(first.cpu(), expected) or second.dtype != torch.bool:
            wrong.append(f"message {tag}: {first} is not {expected}")
        if note != str(sizes[tag]).encode():
            wrong.append(f"note {tag}: {note!r}")
    link.close()
    return wrong


def over(backend: str, kind: str, work: Callable[..., list[str]]) -> list[str]:
    """`work` in a group of all ranks with that backend, as init_process_group("nccl") makes one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(rank)
    return work(kind, size, rank, dist.new_group(backend=backend))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_call_gives_over_gloo_what_is_expected(size: int) -> None:
    assert run_ranks(size, over, "gloo", "cpu", every_call) == [[]] * size


def test_messages_arrive_as_expected_without_a_device() -> None:
    assert run_ranks(2, over, "gloo", "cpu", messages) == [[], []]


@pytest.mark.gpu
def test_every_call_over_nccl_with_one_rank() -> None:
    assert run_ranks(1, over, "nccl", "cuda", every_call) == [[]]


@pytest.mark.gpu
@pytest.mark.gpu2
def test_every_call_over_nccl_with_two_ranks() -> None:
    assert run_ranks(2, over, "nccl", "cuda", every_call) == [[], []]


@pytest.mark.gpu
@pytest.mark.gpu2
def test_messages_over_nccl_between_two_devices() -> None:
    assert run_ranks(2, over, "cpu:gloo,cuda:nccl", "cuda", messages) == [[], []]
