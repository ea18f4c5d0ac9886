"""Vocab-parallel log-probabilities and entropy against float64: instruction sets, dtypes, options, shards, edge cases.

Tolerances: as in cross_entropy_cases.py. A log-probability is a loss; the entropy's error is that of log S and
E / S, float32 sums of terms of the size of the entropy.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.ops.vocab_softmax import implementation
from fastpar.reference import vocab_softmax as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES, assert_grad_close, assert_loss_close, capability
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_part, own_range, results_of, world

__all__ = ["capability"]  # a fixture: used by name

log_prob, entropy = ops.vocab_parallel_log_prob, ops.vocab_parallel_entropy
log_prob_and_entropy = ops.vocab_parallel_log_prob_and_entropy
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": -1.5},
    "softcap": {"softcap": 5.0, "logit_scale": 0.7},
}


def some_ids(rows: int, vocab: int, per_row: int | None = None) -> Tensor:
    """The first and the last id, some ignored, and in rows of several one id twice."""
    generator = torch.Generator().manual_seed(rows + vocab)
    ids = torch.randint(0, vocab, (rows, per_row or 1), generator=generator)
    ids[0, 0], ids[-1, -1] = 0, vocab - 1
    ids[1::3, 0] = -100
    if per_row:
        ids[2, 1] = ids[2, 0]
    return ids if per_row else ids.squeeze(1)


def both(logits: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return log_prob_and_entropy(logits, ids, **options)


def both_exactly(logits: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return reference.vocab_parallel_log_prob_and_entropy(logits.double(), ids, **options)


# ---- one rank, against float64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_results_and_their_joint_gradient_match_float64(
    capability: str, dtype: torch.dtype, per_row: int | None
) -> None:
    for vocab, option in [(2, "plain"), (37, "scale"), (1031, "plain"), (1031, "softcap"), (5003, "scale")]:
        logits, ids = normal(7, vocab, dtype=dtype), some_ids(7, vocab, per_row)
        upstream = [normal(*ids.shape, 1, scale=1.0, dtype=dtype).squeeze(-1), normal(7, scale=1.0, dtype=dtype)]
        (found, h), grad = results_of(both, logits, upstream, ids, **OPTIONS[option])
        (wanted, wanted_h), wanted_grad = results_of(both_exactly, logits.double(), upstream, ids, **OPTIONS[option])
        coarser = 4.0 if option == "softcap" else 1.0
        assert found.shape == ids.shape
        assert_loss_close(found, wanted, scale=10.0 * coarser)
        assert_loss_close(h, wanted_h, scale=3.0 * coarser)
        # Ids that meet in a column, and the two gradients, add up to entries smaller than their terms.
        assert_grad_close(grad, wanted_grad, dtype, roundings=1.05 * (3.0 if dtype == torch.float32 else 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_alone_matches_float64_and_has_the_same_bits(capability: str, dtype: torch.dtype) -> None:
    logits, upstream = normal(2, 3, 1031, dtype=dtype), normal(2, 3, scale=1.0)
    (h,), grad = results_of(entropy, logits, [upstream])
    (wanted,), wanted_grad = results_of(reference.vocab_parallel_entropy, logits.double(), [upstream])
    assert_loss_close(h, wanted, scale=3.0)
    assert_grad_close(grad, wanted_grad, dtype, roundings=2.0 if dtype == torch.float32 else 1.05)
    assert torch.equal(h, both(logits, torch.zeros(2, 3, dtype=torch.int64))[1])


def test_log_prob_is_minus_the_cross_entropy(capability: str) -> None:
    logits, ids = normal(9, 301), some_ids(9, 301)
    (found,), grad = results_of(log_prob, logits, [torch.ones(9)], ids)
    (loss,), loss_grad = results_of(ops.vocab_parallel_cross_entropy, logits, [torch.ones(9)], ids, reduction="none")
    torch.testing.assert_close(found, -loss, rtol=0.0, atol=2e-6)
    torch.testing.assert_close(grad, -loss_grad, rtol=2e-6, atol=1e-7)


def test_ignored_ids_give_zero_and_no_gradient(capability: str) -> None:
    logits, ids = normal(4, 50), torch.tensor([[3, -100], [-100, -100], [1, 2], [-100, 7]])
    logits[1] = math.nan  # a row of padding may hold anything
    (found,), grad = results_of(log_prob, logits, [torch.ones(4, 2)], ids)
    assert torch.count_nonzero(found[ids == -100]) == 0
    assert torch.count_nonzero(grad[1]) == 0
    (alone,), alone_grad = results_of(log_prob, logits[:1], [torch.ones(1)], ids[:1, 0])
    assert torch.equal(found[0, :1], alone)
    torch.testing.assert_close(grad[:1], alone_grad)
    assert log_prob(torch.zeros(1, 9), torch.tensor([3]), ignore_index=3).item() == 0.0


def test_rows_whose_upstream_gradients_are_zero_get_exact_zeros(capability: str) -> None:
    logits, ids = normal(3, 50), torch.tensor([1, 2, 3])
    logits[1] = math.nan
    upstream = torch.tensor([1.0, 0.0, 1.0])
    _, grad = results_of(both, logits, [upstream, upstream], ids)
    assert torch.count_nonzero(grad[1]) == 0
    assert grad[[0, 2]].isfinite().all()
    assert grad[[0, 2]].abs().amax(dim=1).min() > 0


def test_masked_columns_contribute_nothing(capability: str) -> None:
    logits = normal(3, 80)
    logits[0, 5:], logits[1, ::2], logits[2, 1:] = -math.inf, -math.inf, -math.inf
    ids = torch.tensor([2, 7, 0])
    (found, h), grad = results_of(both, logits, [torch.ones(3), torch.ones(3)], ids)
    (wanted, wanted_h), wanted_grad = results_of(both_exactly, logits.double(), [torch.ones(3), torch.ones(3)], ids)
    assert_loss_close(found, wanted, scale=10.0)
    assert_loss_close(h, wanted_h, scale=3.0)
    assert h[2] == 0.0  # one token is certain
    assert torch.count_nonzero(grad[logits == -math.inf]) == 0
    assert_grad_close(grad, wanted_grad, torch.float32, roundings=3)
    assert log_prob(logits, torch.tensor([9, 0, 5])).tolist() == [-math.inf] * 3


def test_rows_without_a_distribution_are_nan(capability: str) -> None:
    logits = torch.zeros(3, 20)
    logits[0], logits[1, 3], logits[2, 3] = -math.inf, math.nan, math.inf
    found, h = both(logits, torch.zeros(3, dtype=torch.int64))
    assert found.isnan().all()
    assert h.isnan().all()


def test_large_logits_cancel_nothing(capability: str) -> None:
    logits = normal(4, 513, scale=1.0).round()  # exact in float32 after the shift
    ids = torch.tensor([0, 1, 2, 512])
    (found, h), grad = results_of(both, logits + 2.0**22, [torch.ones(4), torch.ones(4)], ids)
    (wanted, wanted_h), wanted_grad = results_of(both_exactly, logits.double(), [torch.ones(4), torch.ones(4)], ids)
    assert_loss_close(found, wanted, scale=3.0)
    assert_loss_close(h, wanted_h, scale=3.0)
    assert_grad_close(grad, wanted_grad, torch.float32, roundings=3)


@pytest.mark.parametrize("probability", [0.9, 1 - 1e-6])
def test_the_entry_of_a_likely_id_keeps_its_digits(capability: str, probability: float) -> None:
    logits = torch.zeros(1, 100)
    logits[0, 17] = math.log(probability / (1 - probability) * 99)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype)
        _, grad = results_of(log_prob, x, [torch.ones(1)], torch.tensor([17]))
        # p - 1 from p rounded to bfloat16 would be 0; the float32 sum of exponentials leaves 6e-8 / (1 - p).
        wanted = 1.0 - x.double().softmax(-1)[0, 17]
        torch.testing.assert_close(grad[0, 17].double(), wanted, rtol=0.1, atol=0.0)


def test_gradcheck_passes() -> None:
    x = normal(3, 6, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[1, 1], [5, -100], [0, 2]])
    assert torch.autograd.gradcheck(lambda t: both(t, ids, softcap=4.0, logit_scale=0.5), (x,))
    assert torch.autograd.gradcheck(entropy, (x,))


def test_empty_batches_and_any_strides_work() -> None:
    (found, h), grad = results_of(both, torch.zeros(0, 4, 7), [torch.zeros(0, 4)] * 2, torch.zeros(0, 4).long())
    assert found.shape == h.shape == (0, 4)
    assert grad.shape == (0, 4, 7)
    logits = normal(3, 4, 40)
    ids = some_ids(12, 20).view(3, 4)
    assert torch.equal(log_prob(logits[..., ::2], ids), log_prob(logits[..., ::2].contiguous(), ids))
    assert torch.equal(log_prob(logits.transpose(0, 1), ids.T), log_prob(logits, ids).T)
    assert torch.equal(log_prob(logits, ids.int()), log_prob(logits, ids))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int) -> list[dict[str, Any]]:
    comm, results = world(), []
    where = own_range(vocab, comm)
    for option, options in OPTIONS.items():
        x, ids = own_part(normal(7, vocab), where), some_ids(7, vocab, 3)
        with count_collectives() as forward:
            found, h = log_prob_and_entropy(x, ids, group=comm, vocab_range=where, **options)
        with count_collectives() as backward:
            torch.autograd.backward([found, h], [normal(7, 3, scale=1.0), normal(7, scale=1.0)])
        counts = (forward.total, backward.total)
        results.append(
            {"option": option, "outputs": (found.detach(), h.detach()), "grad": x.grad, "collectives": counts}
        )
    # A shard of only -inf beside others, and rows of nothing else.
    masked = normal(7, vocab)
    masked[:, : vocab // 2], masked[3] = -math.inf, -math.inf
    x = own_part(masked, where)
    h = entropy(x, group=comm, vocab_range=where)
    h[[0, 1]].sum().backward()
    results.append({"option": "masked", "outputs": (h.detach(),), "grad": x.grad, "collectives": None})
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_match_float64_with_one_collective_and_equal_bits(world_size: int) -> None:
    ranks = run_ranks(world_size, run_sharded, 103)
    for parts in zip(*ranks, strict=True):
        for part in parts:
            assert all(
                map(torch.equal, map(torch.nan_to_num, part["outputs"]), map(torch.nan_to_num, parts[0]["outputs"]))
            )
        grad = torch.cat([part["grad"] for part in parts], dim=1)
        if parts[0]["option"] == "masked":
            (h,) = parts[0]["outputs"]
            masked = normal(7, 103)[:, 51:]
            assert h[3].isnan()
            assert_loss_close(h[[0, 1]], reference.vocab_parallel_entropy(masked.double())[[0, 1]], scale=3.0)
            assert grad.isfinite().all()
            assert torch.count_nonzero(grad[:, :51]) == 0
            continue
        assert all(part["collectives"] == ((1, 0) if world_size > 1 else (0, 0)) for part in parts)
        upstream = [normal(7, 3, scale=1.0), normal(7, scale=1.0)]
        options = OPTIONS[parts[0]["option"]]
        wanted, wanted_grad = results_of(
            both_exactly, normal(7, 103).double(), upstream, some_ids(7, 103, 3), **options
        )
        for actual, exact in zip(parts[0]["outputs"], wanted, strict=True):
            assert_loss_close(actual, exact, scale=40.0)
        assert_grad_close(grad, wanted_grad, torch.float32, roundings=4)


def run_reference_and_errors() -> tuple[list[Tensor], list[str]]:
    comm, messages = world(), []
    where = own_range(20, comm)
    ids, x = some_ids(4, 20), own_part(normal(4, 20), where)
    outputs = reference.vocab_parallel_log_prob_and_entropy(x, ids, group=comm, vocab_range=where)
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert x.grad is not None
    for module in (ops, reference):
        with pytest.raises(IndexError, match="outside the vocabulary") as error:
            module.vocab_parallel_log_prob(x, torch.tensor([[0, 1], [2, 20], [3, -1], [0, 0]]), group=comm,
                                           vocab_range=where)  # fmt: skip
        messages.append(str(error.value))
        with pytest.raises(ValueError, match="do not tile") as tiles:
            module.vocab_parallel_entropy(torch.zeros(2, 3 + comm.rank), group=comm)
        messages.append(str(tiles.value))
    return [*(o.detach() for o in outputs), x.grad], messages


def test_the_reference_is_the_same_function_on_ranks_and_errors_reach_all() -> None:
    ranks = run_ranks(2, run_reference_and_errors)
    (wanted, wanted_h), grad = results_of(both_exactly, normal(4, 20).double(), [torch.ones(4)] * 2, some_ids(4, 20))
    assert_loss_close(ranks[1][0][0], wanted)
    assert_loss_close(ranks[1][0][1], wanted_h)
    assert_grad_close(torch.cat([rank[0][2] for rank in ranks], dim=1), grad, torch.float32)
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1][0].startswith("ids[1, 1] is 20, outside the vocabulary [0, 20)")


def test_worked_example() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    ops_ = implementation(logits)
    shards, ids = [logits[:, :1], logits[:, 1:]], torch.tensor([[1]])
    gathered = torch.stack([ops_.stats(x, ids, r, 2, -100, True, 0.0, 1.0) for r, x in enumerate(shards)])
    log3 = math.log(3.0)
    assert gathered[:, 0].tolist() == [[0.0, 1.0, 0.0, 0.0], [pytest.approx(log3), 1.0, 0.0, pytest.approx(log3)]]
    _, h, found = ops_.merge(gathered, ids, -100)
    assert found.item() == pytest.approx(math.log(0.75))
    assert h.item() == pytest.approx(math.log(4) - 0.75 * log3)
    (_, _), grad = results_of(both, logits, [torch.ones(1), torch.zeros(1)], torch.tensor([1]))
    torch.testing.assert_close(grad, torch.tensor([[-0.25, 0.25]]))
    (_,), grad = results_of(entropy, logits, [torch.ones(1)])
    torch.testing.assert_close(grad, 0.1875 * log3 * torch.tensor([[1.0, -1.0]]))


# ---- what torch expects of an op (opcheck: test_vocab_softmax.py) ----------------------------------------------------


def test_compiled_fullgraph_equals_eager() -> None:
    logits, ids = normal(4, 50), some_ids(4, 50)
    step = lambda x: both(x * 2.0, ids)  # noqa: E731
    grads = [torch.ones(4), torch.ones(4)]
    found, grad = results_of(torch.compile(step, fullgraph=True, backend="aot_eager"), logits, grads)
    wanted, wanted_grad = results_of(step, logits, grads)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_fallback_for_devices_without_kernels_is_the_same_function(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, ids, upstream = normal(5, 90), some_ids(5, 90, 3), [normal(5, 3), normal(5)]
    logits[0, 40:60] = math.inf if option == "scale" else -math.inf  # a negative scale
    found, grad = results_of(both, logits, upstream, ids, **OPTIONS[option])
    monkeypatch.setattr("fastpar.ops.vocab_entropy.implementation", lambda x: reference_module)
    monkeypatch.setattr("fastpar.ops.vocab_softmax.implementation", lambda x: reference_module)
    again, again_grad = results_of(both, logits, upstream, ids, **OPTIONS[option])
    torch.testing.assert_close(found, again, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(grad, again_grad, rtol=2e-5, atol=1e-4)


def test_only_one_of_the_two_gradients_may_be_missing() -> None:
    logits, ids = normal(3, 20), torch.tensor([0, 5, 19])
    for index in (0, 1):
        x = logits.clone().requires_grad_()
        both(x, ids)[index].sum().backward()
        y = logits.double().requires_grad_()
        both_exactly(y, ids)[index].sum().backward()
        assert y.grad is not None
        assert_grad_close(x.grad, y.grad, torch.float32, roundings=2)


def test_gradients_of_the_gradient_are_refused_and_none_is_needed_without_grad() -> None:
    x = normal(2, 5).requires_grad_()
    (grad,) = torch.autograd.grad(entropy(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="vocab_parallel_entropy has a first derivative only"):
        grad.sum().backward()
    with torch.no_grad():
        assert log_prob(x, torch.tensor([0, 1])).grad_fn is None


def test_masked_log_prob_and_entropy_follow_a_policy_gradient_in_torch() -> None:
    logits, ids = normal(6, 40), some_ids(6, 40).clamp(min=0)
    mask, advantage = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), normal(6, scale=1.0)
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, h = both(x, ids)
    (-(found * advantage + 0.01 * h) * mask).sum().backward()
    log_p = F.log_softmax(y, dim=-1)
    picked, exact_h = log_p.gather(1, ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (-(picked * advantage.double() + 0.01 * exact_h) * mask.double()).sum().backward()
    assert y.grad is not None
    assert_grad_close(x.grad, y.grad, torch.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ids": torch.zeros(2)}, TypeError, "ids must be int64"),
        ({"ids": torch.zeros(3).long()}, ValueError, r"logits is \(2, 8\), ids is \(3,\)"),
        ({"ids": torch.zeros(2, 1, 1).long()}, ValueError, "or one dim more"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"logits": torch.zeros(2, 8).int()}, TypeError, "logits must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"logits": torch.zeros(2, 8), "ids": torch.zeros(2).long(), **arguments}
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_log_prob(**call)
    with pytest.raises(IndexError, match=r"ids\[1\] is 8, outside the vocabulary \[0, 8\)"):
        log_prob(torch.zeros(2, 8), torch.tensor([0, 8]))
