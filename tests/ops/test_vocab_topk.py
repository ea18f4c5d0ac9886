"""Vocab-parallel top-k and argmax: exact, so everything is compared bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.contracts.vocab import check_total, merge_candidates, pack_candidates, unpack_candidates
from fastpar.contracts.vocab_shard import Shard
from fastpar.reference import vocab_topk as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_part, own_range, results_of, world

K = torch.ops.fastpar
topk, argmax = ops.vocab_parallel_topk, ops.vocab_parallel_argmax


def with_ties(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of about 25 different values; a row with NaN, one of mostly -inf, one of equal values with both zeros."""
    logits = (normal(rows, vocab, scale=3.0) * 2).round() / 2
    logits[1, ::7] = math.nan
    logits[2, 3:] = -math.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    return logits.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN included; 0 and -0 are the same."""
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 700, 4099])
def test_values_and_ids_are_those_of_a_stable_sort(vocab: int, dtype: torch.dtype) -> None:
    logits = with_ties(6, vocab, dtype)
    for k in {0, 1, min(2, vocab), vocab // 2, vocab}:
        values, ids = topk(logits, k)
        wanted, wanted_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        assert torch.equal(ids, wanted_ids[:, :k])
        assert same(values, wanted[:, :k])
        if k:
            torch_values = torch.topk(logits, k).values
            assert same(values, torch_values)
            _, _, equal = K.vocab_topk(logits, k, 0)
            _, _, wanted_equal = reference_module.topk(logits, k, 0)
            assert torch.equal(equal, wanted_equal)
    assert torch.equal(argmax(logits), wanted_ids[:, 0])


def test_argmax_is_torchs_where_there_are_no_ties() -> None:
    logits = normal(5, 3000)
    logits[2, 100], logits[2, 50] = math.nan, math.nan
    assert torch.equal(argmax(logits), logits.argmax(-1))


def test_the_gradient_goes_to_where_each_value_came_from() -> None:
    logits, upstream = normal(2, 3, 40), normal(2, 3, 5, seed=1)
    x = logits.clone().requires_grad_()
    values, ids = topk(x, 5)
    assert not ids.requires_grad
    values.backward(upstream)
    assert torch.equal(x.grad, torch.zeros_like(logits).scatter(-1, ids, upstream))
    y = logits.double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: topk(t, 3)[0], (y,))


def test_any_strides_and_empty_batches_work() -> None:
    logits = with_ties(6, 70)
    for view in (logits[:, ::2], logits.T[:5], logits.view(2, 3, 70).transpose(0, 1), logits[:1].expand(4, -1)):
        values, ids = topk(view, 3)
        wanted, wanted_ids = topk(view.contiguous(), 3)
        assert same(values, wanted)
        assert torch.equal(ids, wanted_ids)
    assert topk(torch.zeros(0, 4, 7), 2)[1].shape == (0, 4, 2)
    assert topk(torch.zeros(3, 0), 0)[0].shape == (3, 0)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int, ks: list[int]) -> list[dict[str, Any]]:
    comm, results = world(), []
    where = own_range(vocab, comm)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for k in ks:
            x = own_part(with_ties(5, vocab, dtype), where)
            with count_collectives() as forward:
                values, ids = topk(x, k, group=comm, vocab_range=where)
            with count_collectives() as backward:
                values.backward(normal(5, k, dtype=dtype))
            best = argmax(x, group=comm, vocab_range=where)
            counts = (forward.total, backward.total)
            results.append({"case": (dtype, k), "collectives": counts, "grad": x.grad})
            results[-1].update(values=values.detach(), ids=ids, argmax=best)
    found = reference.vocab_parallel_topk(with_ties(5, vocab)[:, where[0] : where[1]], 4, group=comm, vocab_range=where)
    results.append({"case": "reference", "values": found[0], "ids": found[1]})
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_agree_with_one_process_bit_for_bit_with_one_collective(world_size: int) -> None:
    vocab, ks = 41, [1, 4, 30, 41]  # 30 and 41 are more than any shard has
    ranks = run_ranks(world_size, run_sharded, vocab, ks)
    for parts in zip(*ranks, strict=True):
        dtype, k = (torch.float32, 4) if parts[0]["case"] == "reference" else parts[0]["case"]
        (values,), grad = results_of(
            lambda t, n=k: topk(t, n)[0], with_ties(5, vocab, dtype), [normal(5, k, dtype=dtype)]
        )
        _, ids = topk(with_ties(5, vocab, dtype), k)
        for part in parts:
            assert torch.equal(part["ids"], ids)
            assert same(part["values"], values)
            if part["case"] == "reference":
                continue
            assert torch.equal(part["argmax"], ids[:, 0])
            assert part["collectives"] == ((1, 0) if world_size > 1 else (0, 0))
        if parts[0]["case"] != "reference":
            assert torch.equal(torch.cat([part["grad"] for part in parts], dim=1), grad)


def run_errors() -> list[str]:
    comm, messages = world(), []
    with pytest.raises(ValueError, match="do not tile") as error:
        topk(torch.zeros(2, 3 + comm.rank), 2, group=comm)
    messages.append(str(error.value))
    with pytest.raises(ValueError, match="between 0 and the size of the vocabulary, 6, got 7"):
        topk(torch.zeros(2, 3), 7, group=comm)
    return messages


def test_shards_that_do_not_tile_are_an_error_on_every_rank() -> None:
    first, second = run_ranks(2, run_errors)
    assert first == second


def test_worked_example() -> None:
    shards = [torch.tensor([[3.0, 5.0, 5.0]]), torch.tensor([[1.0, 5.0]])]
    sent = [
        pack_candidates(*K.vocab_topk(x, 2, start), 2, Shard(start, x.shape[1], 5))
        for x, start in zip(shards, [0, 3], strict=True)
    ]
    candidates = unpack_candidates(torch.stack(sent), 2)
    assert candidates.ids[:, 0].tolist() == [[1, 2], [4, 3]]
    values, ids = merge_candidates(candidates, 2)
    assert values.tolist() == [[5.0, 5.0]]
    assert ids.tolist() == [[1, 2]]
    found = K.vocab_topk(torch.tensor([3.0, 5.0, 5.0, 1.0, 5.0]), 2, 0)  # the example of csrc/vocab_filter/topk.cpp
    assert [t.tolist() for t in found] == [[5.0, 5.0], [1, 2], 1]


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes() -> None:
    for k in (0, 3, 9):
        torch.library.opcheck(K.vocab_topk.default, (normal(2, 3, 9), k, 5))


def test_compiled_fullgraph_equals_eager() -> None:
    logits = with_ties(5, 50)
    step = lambda x: topk(x * 2.0, 4)[0]  # noqa: E731
    (values,), grad = results_of(torch.compile(step, fullgraph=True, backend="aot_eager"), logits, [normal(5, 4)])
    (wanted,), wanted_grad = results_of(step, logits, [normal(5, 4)])
    assert same(values, wanted)
    assert torch.equal(grad, wanted_grad)


def test_the_fallback_for_devices_without_kernels_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = with_ties(6, 90)
    found = topk(logits, 11)
    monkeypatch.setattr("fastpar.ops.vocab_topk.implementation", lambda x: reference_module)
    again = topk(logits, 11)
    assert same(found[0], again[0])
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 9}, ValueError, "k must be between 0 and the size of the vocabulary, 8, got 9"),
        ({"k": -1}, ValueError, "got -1"),
        ({"k": 2.0}, TypeError, "k must be an int"),
        ({"logits": torch.zeros(2, 8).int()}, TypeError, "logits must be one of"),
        ({"vocab_range": (0, 7, 7)}, ValueError, "names 7 columns, but there are 8"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"logits": torch.zeros(2, 8), "k": 2, **arguments}
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_topk(**call)
    with pytest.raises(ValueError, match="up to 2147483647 ids"):
        check_total(2**31)
