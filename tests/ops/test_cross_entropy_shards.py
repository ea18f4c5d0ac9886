"""Vocab-parallel cross-entropy over shards: in one process, and on real ranks with their collectives counted."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fastpar import ops, reference
from fastpar.comm import Communicator, shard_range
from fastpar.contracts import vocab_shard
from fastpar.contracts.vocab_shard import read_headers, with_header
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_grad_close,
    assert_loss_close,
    capability,
    example,
    expected,
    expected_with,
    sharded,
    upstream,
    with_weights,
)

__all__ = ["capability"]  # a fixture: used by name

cross_entropy = ops.vocab_parallel_cross_entropy


# ---- shards in one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [[0, 1], [0, 0.5, 1], [0, 0.3, 0.31, 1], [0, 0, 0.6, 0.6, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_and_empty_shards_give_the_unsharded_result(
    capability: str, dtype: torch.dtype, bounds: list[float]
) -> None:
    logits, target = example(9, 1031, dtype)
    weights = torch.linspace(0.5, 1.5, 9, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    loss, grad = sharded(logits, target, [int(b * 1031) for b in bounds], weights)
    wanted_loss, wanted_grad = expected(logits, target, "none", weights)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    assert_grad_close(grad, wanted_grad, dtype)


def test_a_shard_of_only_minus_infinity_contributes_nothing(capability: str) -> None:
    logits, target = example(6, 512)
    target = target % 256
    logits[:, 256:] = -math.inf
    loss, grad = sharded(logits, target, [0, 256, 512], torch.ones(6))
    assert_loss_close(loss, F.cross_entropy(logits.double(), target, reduction="none"), scale=10.0)
    assert torch.isfinite(grad).all()
    assert torch.count_nonzero(grad[:, 256:]) == 0


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bounds", [[0, 600, 1031], [0, 0, 3, 3, 700, 1031]])
def test_every_option_is_exact_over_shards(capability: str, bounds: list[int], name: str) -> None:
    logits, target = example(9, 1031)
    options = with_weights(OPTIONS[name], 1031)
    weights = upstream(9)
    loss, grad = sharded(logits, target, bounds, weights, **options)
    (wanted_loss,), wanted_grad = expected_with(logits, target, [weights], reduction="none", **options)
    coarser = 4.0 if "softcap" in options else 1.0
    assert_loss_close(loss, wanted_loss, scale=30.0 * coarser)
    assert_grad_close(grad, wanted_grad, torch.float32, roundings=coarser)


def test_targets_on_the_first_and_last_column_of_a_shard_are_found(capability: str) -> None:
    logits, _ = example(6, 64)
    target = torch.tensor([0, 19, 20, 21, 62, 63])
    loss, grad = sharded(logits, target, [0, 20, 21, 63, 64], torch.ones(6))
    wanted_loss, wanted_grad = expected(logits, target, "sum")
    assert_loss_close(loss.sum(), wanted_loss, scale=10.0)
    assert_grad_close(grad, wanted_grad, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [3, 5])
def test_headers_keep_integers_that_no_float32_holds(dtype: torch.dtype, columns: int) -> None:
    packed = with_header(
        torch.zeros(4, columns, dtype=dtype), vocab_shard.Shard(2**40 + 1, 7, 2**41 + 3), 123456789, 4711
    )
    assert packed.shape == (7, columns)
    assert read_headers(torch.stack([packed, packed])) == [[7, 2**40 + 1, 2**41 + 3, 123456790, 4711]] * 2


# ---- real ranks ------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int, implementation: str, names: list[str]) -> list[dict[str, Any]]:
    """One rank of a forward and a backward over its DTensor-rule shard, for each set of options."""
    comm = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(vocab, comm.size, comm.rank)
    logits, target = example(19, vocab)
    function = {"ops": ops, "reference": reference}[implementation].vocab_parallel_cross_entropy
    results = []
    for name in names:
        x = logits[:, start:end].clone().requires_grad_()
        options = with_weights(OPTIONS[name], vocab)
        with count_collectives() as forward:
            loss = function(x, target, group=comm, vocab_range=(start, end, vocab), reduction="none", **options)
        with count_collectives() as backward:
            loss.backward(upstream(19).to(loss.dtype))
        results.append({"loss": loss.detach(), "grad": x.grad, "forward": forward.ops, "backward": backward.ops})
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_match_one_process_with_one_collective_and_equal_bits(world_size: int) -> None:
    vocab = 9 if world_size == 4 else 1031  # 9 over 4 ranks by DTensor's rule: 3, 3, 3 and an empty shard
    names = list(OPTIONS)
    logits, target = example(19, vocab)
    ranks = run_ranks(world_size, run_sharded, vocab, "ops", names)
    for index, name in enumerate(names):
        results = [rank[index] for rank in ranks]
        options = with_weights(OPTIONS[name], vocab)
        (wanted_loss,), wanted_grad = expected_with(logits, target, [upstream(19)], reduction="none", **options)
        for result in results:
            assert len(result["forward"]) == (1 if world_size > 1 else 0)
            assert result["backward"] == []
            assert torch.equal(result["loss"], results[0]["loss"])
        coarser = 4.0 if "softcap" in options else 1.0
        assert_loss_close(results[0]["loss"], wanted_loss, scale=30.0 * coarser)
        grad = torch.cat([r["grad"] for r in results], dim=1)
        assert_grad_close(grad, wanted_grad, torch.float32, roundings=coarser)


def test_the_reference_is_the_same_function_on_ranks() -> None:
    logits, target = example(19, 1031)
    options = with_weights(OPTIONS["everything"], 1031)
    results = [rank[0] for rank in run_ranks(2, run_sharded, 1031, "reference", ["everything"])]
    (wanted_loss,), wanted_grad = expected_with(logits, target, [upstream(19)], reduction="none", **options)
    assert_loss_close(results[0]["loss"], wanted_loss, scale=30.0)
    assert_grad_close(torch.cat([r["grad"] for r in results], dim=1), wanted_grad, torch.float32)


def run_dtensor() -> tuple[Tensor, Tensor]:
    """Loss and local gradient of DTensor logits: rows over one dim of the mesh, an uneven vocabulary over the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    logits, target = example(8, 33)
    x = distribute_tensor(logits, mesh, [Shard(0), Shard(1)]).requires_grad_()
    rows = target.chunk(2)[mesh.get_local_rank(0)]
    loss = cross_entropy(x, rows, reduction="none", label_smoothing=0.1)
    loss.sum().backward()
    with pytest.raises(ValueError, match="leave group out"):
        cross_entropy(x, rows, group=mesh.get_group(0))
    with pytest.raises(ValueError, match="have to be reduced first"):
        cross_entropy(DTensor.from_local(logits, mesh, [Replicate(), Partial()]), target)
    assert isinstance(x.grad, DTensor)
    return loss.detach(), x.grad.full_tensor()


def test_dtensor_logits_bring_their_group_and_range() -> None:
    results = run_ranks(4, run_dtensor)
    logits, target = example(8, 33)
    (wanted,), wanted_grad = expected_with(logits, target, [torch.ones(8)], reduction="none", label_smoothing=0.1)
    for rank, (loss, grad) in enumerate(results):
        assert_loss_close(loss, wanted.chunk(2)[rank // 2], scale=30.0)
        assert_grad_close(grad, wanted_grad, torch.float32)


def run_errors() -> list[str]:
    """What a rank is told about a bad target, and about unequal shards without a range."""
    comm = Communicator(torch.distributed.group.WORLD)
    messages = []
    target = torch.tensor([0, 9, 1])
    with pytest.raises(IndexError) as bad_target:
        cross_entropy(torch.randn(3, 4), target, group=comm)
    messages.append(str(bad_target.value))
    # Bad by one rank's idea of the vocabulary only: 9 is inside [0, 10).
    columns = 5 if comm.rank == 0 else 4
    with pytest.raises(ValueError, match="do not tile") as bad_total:
        cross_entropy(torch.randn(3, columns), target, group=comm)
    messages.append(str(bad_total.value))
    columns = 4 - comm.rank
    with pytest.raises(ValueError, match="do not tile") as bad_shards:
        cross_entropy(torch.randn(3, columns), target.clamp(max=1), group=comm)
    messages.append(str(bad_shards.value))
    return messages


def test_every_rank_raises_the_same_errors() -> None:
    first, second = run_ranks(2, run_errors)
    assert first == second
    assert "target[1] is 9, outside the vocabulary [0, 8)" in first[0]
    assert "need vocab_range" in first[1]
    assert "need vocab_range" in first[2]


def run_compiled() -> tuple[Tensor, Tensor]:
    """Loss of one rank, eager and compiled with the collective in the graph."""
    comm = Communicator(torch.distributed.group.WORLD)
    logits, target = example(7, 64)
    shard = logits.chunk(comm.size, dim=1)[comm.rank]

    def step(x: Tensor) -> Tensor:
        return cross_entropy(x * 2.0, target, group=comm)

    x, y = shard.clone().requires_grad_(), shard.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo's own
        compiled, eager = torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(y)
    compiled.backward()
    eager.backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
    return compiled.detach(), eager.detach()


@pytest.mark.slow
def test_compiled_fullgraph_with_a_communicator_equals_eager() -> None:
    for compiled, eager in run_ranks(2, run_compiled):
        assert torch.equal(compiled, eager)
