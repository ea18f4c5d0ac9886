"""linear_cross_entropy over several ranks: values, gradients, bits, collectives and errors.

See tests.ops.linear_cross_entropy_cases for the tolerances.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import comm, ops, reference
from fastpar.comm import Communicator, shard_range, shard_sizes
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.linear_cross_entropy_cases import (
    OPTIONS,
    assert_close_to_exact,
    distance,
    example,
    options_for,
    plain,
    run,
)

VOCAB, FEATURES = 131, 24
ROWS = (2, 190)
# Shards as fractions of the vocabulary; some empty, some tiny.
BOUNDS = {1: [0, 131], 2: [0, 100, 131], 3: [0, 60, 60, 131], 4: [0, 3, 70, 131, 131]}


def sharded_run(
    tensors: list[Tensor], target: Tensor, group: Communicator, bounds: list[int], grads: Any = None, **options: Any
) -> list[Tensor]:
    """Outputs and gradients with this rank's rows of weight and bias; those come back with the other ranks' rows."""
    start, end = bounds[group.rank], bounds[group.rank + 1]
    hidden, weight, bias = tensors
    if options.get("sequence_parallel"):
        dim = options.get("sequence_dim", -2)
        hidden = hidden.split(shard_sizes(hidden.shape[dim], group.size), dim)[group.rank]
    options |= {"group": group, "vocab_range": (start, end, bounds[-1])}
    local = (hidden, weight[start:end], bias[start:end])
    *outputs, by_hidden, by_weight, by_bias = run(ops.linear_cross_entropy, local, target, grads, **options)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    if options.get("sequence_parallel"):
        whole = shard_sizes(tensors[0].shape[dim], group.size)
        by_hidden = group.all_gather(by_hidden, dim=dim, sizes=whole)
    return [*outputs, by_hidden, group.all_gather(by_weight, sizes=sizes), group.all_gather(by_bias, sizes=sizes)]


# ---- values ----------------------------------------------------------------------------------------------------------


def _check_values(dtype: torch.dtype, names: list[str]) -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    *tensors, target = example(ROWS, FEATURES, VOCAB, dtype)
    for name in names:
        for reduction in ("mean", "none"):
            grads = (
                [torch.linspace(-1.0, 2.0, target.numel()).view(ROWS)] if reduction == "none" else [torch.tensor(0.75)]
            )
            options = {"reduction": reduction, **options_for(name, VOCAB)}
            found = sharded_run(tensors, target, group, BOUNDS[group.size], grads, chunk_bytes=1, **options)
            exact = plain(tensors, target, torch.float64, grads, **options)
            rough = None if dtype in (torch.float32, torch.float64) else plain(tensors, target, dtype, grads, **options)
            if rough is not None:
                # Several ranks round the exponentials and the scaled rows, and every rank's share of dhidden.
                for ours, theirs, wanted in zip(found, rough, exact, strict=True):
                    bound = 2.0 * distance(theirs, wanted) + 4.0 * torch.finfo(dtype).eps
                    assert distance(ours, wanted) <= bound, (name, reduction)
            else:
                assert_close_to_exact(found, exact, dtype)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_and_empty_shards_match_float64_at_every_option(ranks: int) -> None:
    assert all(run_ranks(ranks, _check_values, torch.float32, list(OPTIONS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_match_float64_over_shards(dtype: torch.dtype) -> None:
    assert all(run_ranks(3, _check_values, dtype, ["plain", "smoothing and weights", "everything"]))


def _check_lse_and_extremes() -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    hidden, weight, bias, target = example(ROWS, FEATURES, VOCAB)
    bounds = BOUNDS[group.size]
    grads = [torch.tensor(0.75), torch.linspace(1.0, -2.0, target.numel()).view(ROWS)]
    options: dict[str, Any] = {"return_lse": True, "z_loss": 1e-3}
    tensors = [hidden, weight, bias]
    found = sharded_run(tensors, target, group, bounds, grads, **options)
    assert_close_to_exact(found, plain(tensors, target, torch.float64, grads, **options), torch.float32)
    # One shard only minus infinity, logits of 1e4 in another, a target that is certain.
    extreme = bias.clone()
    extreme[:60] = -torch.inf
    extreme[100] = 1e4
    certain = torch.where(target < 60, target, 100)
    certain[0, 1] = 130
    found = sharded_run([hidden, weight, extreme], certain.clamp(min=100), group, bounds)
    exact = plain([hidden, weight, extreme], certain.clamp(min=100), torch.float64)
    assert all(torch.isfinite(x).all() for x in found)
    # Logits of 1e4 are multiples of 1e-3 in float32.
    for ours, wanted in zip(found, exact, strict=True):
        assert distance(ours, wanted) < 1e-3
    return True


def test_lse_minus_infinity_and_large_logits_over_shards() -> None:
    assert all(run_ranks(3, _check_lse_and_extremes))


def _check_rows_left_out() -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    *tensors, target = example(ROWS, FEATURES, VOCAB)
    bounds = BOUNDS[group.size]
    for fill in (None, -100):
        if fill is not None:
            target.fill_(fill)
        for sequence_parallel in (False, True):
            options: dict[str, Any] = {"shift": 1, "denominator": torch.tensor(50.0)}
            found = sharded_run(tensors, target, group, bounds, sequence_parallel=sequence_parallel, **options)
            exact = plain(tensors, target, torch.float64, **options)
            if fill is None:
                assert_close_to_exact(found, exact, torch.float32)
            else:
                assert all(torch.count_nonzero(x) == 0 for x in found)
    empty = [tensors[0][:, :0], *tensors[1:]]
    found = sharded_run(empty, target[:, :0], group, bounds, sequence_parallel=True)
    assert all(torch.count_nonzero(x) == 0 for x in found)
    return True


def test_shift_denominators_masked_and_empty_batches_over_shards() -> None:
    assert all(run_ranks(3, _check_rows_left_out))


def _check_without_counting() -> bool:
    """The code for devices on which counting rows would be a wait, on the CPU."""
    from fastpar.ops.linear_cross_entropy import passes

    replaced = {
        "target_rows": lambda factors: (slice(None), factors.column, factors.peak),
        "add_target_rows": lambda total, column, values: total.index_put_((column,), values, accumulate=True),
    }
    kept = {name: getattr(passes, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(passes, name, function)
        return _check_values(torch.float32, ["plain", "smoothing and weights", "softcap"])
    finally:
        for name, function in kept.items():
            setattr(passes, name, function)


def test_devices_that_cannot_count_rows_get_the_same_values() -> None:
    assert all(run_ranks(3, _check_without_counting))


def _check_equal_chunks() -> int:
    group = Communicator(torch.distributed.group.WORLD)
    *tensors, target = example((600,), FEATURES, VOCAB)
    target[target == -100] = 7
    budget = 300 * 66 * 4  # 296 rows of an even share, so 3 chunks; of their own shares 5 and 1
    with comm.record() as log:
        found = sharded_run(tensors, target, group, [0, 120, 131], chunk_bytes=budget)
    assert_close_to_exact(found, plain(tensors, target, torch.float64), torch.float32)
    return sum(entry.op == "all_reduce" for entry in log)


def test_ranks_with_unequal_shards_make_the_same_chunks() -> None:
    assert run_ranks(2, _check_equal_chunks) == [3, 3]


# ---- sequence parallel -----------------------------------------------------------------------------------------------


def _check_sequence_parallel(dtype: torch.dtype) -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    bounds = BOUNDS[group.size]
    for rows, dim in (((2, 191), -2), ((191, 2), 0), ((383,), -2), ((2, 1), 1)):
        *tensors, target = example(rows, FEATURES, VOCAB, dtype)
        for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "softcap": 8.0}, {"return_lse": True}):
            found = sharded_run(
                tensors, target, group, bounds, sequence_parallel=True, sequence_dim=dim, chunk_bytes=1, **options
            )
            exact = plain(tensors, target, torch.float64, **options)
            if dtype == torch.float32:
                assert_close_to_exact(found, exact, dtype)
                continue
            rough = plain(tensors, target, dtype, **options)
            for ours, theirs, wanted in zip(found, rough, exact, strict=True):
                assert distance(ours, wanted) <= 2.0 * distance(theirs, wanted) + 4.0 * torch.finfo(dtype).eps
    return True


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel_hidden_states_match_float64(ranks: int) -> None:
    assert all(run_ranks(ranks, _check_sequence_parallel, torch.float32))


def test_sequence_parallel_hidden_states_in_bfloat16() -> None:
    assert all(run_ranks(3, _check_sequence_parallel, torch.bfloat16))


# ---- bits and collectives --------------------------------------------------------------------------------------------


def _results_and_collectives(options: dict[str, Any], chunk_rows: int) -> tuple[list[Tensor], list[str], list[str]]:
    group = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, bias, target = example((640,), FEATURES, VOCAB)
    target[target == -100] = 7
    sequence = options.get("sequence_parallel", False)
    if sequence:
        hidden = hidden.split(shard_sizes(640, group.size))[group.rank]
    hidden.requires_grad_()
    weight = weight[start:end].clone().requires_grad_()
    budget = chunk_rows * -(-VOCAB // group.size) * 4
    where = {"group": group, "vocab_range": (start, end, VOCAB), "chunk_bytes": budget}
    with comm.record() as forward, count_collectives() as below:
        result = ops.linear_cross_entropy(hidden, weight, target, bias=bias[start:end], **where, **options)
        loss = result[0] if isinstance(result, tuple) else result
    with comm.record() as backward:
        loss.sum().backward()
    assert hidden.grad is not None
    assert below.total == len(forward), "a collective that no communicator recorded"
    kept = [loss.detach()] if sequence else [loss.detach(), hidden.grad]
    return kept, [entry.op for entry in forward], [entry.op for entry in backward]


COLLECTIVES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["all_gather", "all_reduce"] * 5, []),
    ({"label_smoothing": 0.1, "softcap": 5.0}, ["all_gather", "all_reduce"] * 5, []),
    ({"reduction": "none"}, ["all_gather"] * 5, ["all_reduce"] * 5),
    ({"return_lse": True}, ["all_gather"] * 5, ["all_reduce"] * 5),
    # The hidden states of the next chunk are on their way before the statistics of this one.
    (
        {"sequence_parallel": True},
        ["all_gather", *["all_gather", "all_gather", "reduce_scatter"] * 4, "all_gather", "reduce_scatter"],
        [],
    ),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("options", "forward", "backward"), COLLECTIVES)
def test_one_exchange_a_chunk_and_equal_bits_on_all_ranks(
    ranks: int, options: dict[str, Any], forward: list[str], backward: list[str]
) -> None:
    results = run_ranks(ranks, _results_and_collectives, options, 128)
    for kept, in_forward, in_backward in results:
        assert in_forward == forward
        assert in_backward == backward
        assert all(torch.equal(a, b) for a, b in zip(kept, results[0][0], strict=True))


def _collectives_without_hidden_grad() -> list[list[str]]:
    group = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, _, target = example((300,), FEATURES, VOCAB)
    where = {"group": group, "vocab_range": (start, end, VOCAB)}
    local, logs = weight[start:end].clone(), []
    for frozen in (True, False):
        with comm.record() as log:
            loss = ops.linear_cross_entropy(hidden, local.requires_grad_(not frozen), target, **where)
            if not frozen:
                loss.backward()
        logs.append([entry.op for entry in log])
    store = ops.WeightGradStore()
    with comm.record() as log:
        ops.linear_cross_entropy(hidden.requires_grad_(), local, target, wgrad_store=store, **where).backward()
    logs.append([entry.op for entry in log])
    with comm.record() as log:
        store.run()
    logs.append([entry.op for entry in log])
    return logs


def test_what_needs_no_gradient_sends_none() -> None:
    expected = [["all_gather"], ["all_gather"], ["all_gather", "all_reduce"], []]
    assert run_ranks(2, _collectives_without_hidden_grad) == [expected, expected]


def _gathers_in_flight() -> tuple[int, int]:
    """At how many matrix products a gather of statistics was in flight, of how many products."""
    from torch.utils._python_dispatch import TorchDispatchMode

    group = Communicator(torch.distributed.group.WORLD)
    flights: list[Any] = []
    launch = group.collectives("split_phase").all_gather

    def launched(x: Tensor, **arguments: Any) -> Any:
        pending = launch(x, **arguments)
        wait = pending.wait
        flights.append(pending)

        def waited(*args: Any) -> Any:
            flights.remove(pending)
            return wait(*args)

        pending.wait = waited
        return pending

    group.collectives("split_phase").all_gather = launched  # type: ignore[method-assign]
    products: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._opname == "mm":
                products.append(bool(flights))
            return func(*args, **(kwargs or {}))

    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, _, target = example((300,), FEATURES, VOCAB)
    hidden.requires_grad_()
    where = {"group": group, "vocab_range": (start, end, VOCAB)}
    with Watch():
        ops.linear_cross_entropy(hidden, weight[start:end], target, chunk_bytes=1, **where)
    return sum(products), len(products)


def test_the_statistics_travel_during_the_product_with_the_weight() -> None:
    assert run_ranks(2, _gathers_in_flight) == [(2, 4)] * 2  # two chunks: logits, then E @ W in flight


# ---- backward again, deferred, compiled ------------------------------------------------------------------------------


def _check_backward_twice() -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, bias, target = example((300,), FEATURES, VOCAB)
    local = [hidden.clone(), weight[start:end].clone(), bias[start:end].clone()]
    a, b, c = (x.requires_grad_() for x in local)
    loss = ops.linear_cross_entropy(a, b, target, bias=c, group=group, vocab_range=(start, end, VOCAB))
    for factor in (2.0, -3.0):
        found = torch.autograd.grad(loss, (a, b, c), torch.tensor(factor), retain_graph=True)
        _, *exact = plain([hidden, weight, bias], target, torch.float64, [torch.tensor(factor)])
        assert_close_to_exact(found, [exact[0], exact[1][start:end], exact[2][start:end]], torch.float32)
    store = ops.WeightGradStore()
    a.grad = None
    loss = ops.linear_cross_entropy(
        a, b, target, bias=c, group=group, vocab_range=(start, end, VOCAB), wgrad_store=store
    )
    (loss * 2.0).backward()
    store.run()
    _, *exact = plain([hidden, weight, bias], target, torch.float64, [torch.tensor(2.0)])
    assert_close_to_exact([a.grad, b.grad, c.grad], [exact[0], exact[1][start:end], exact[2][start:end]], torch.float32)
    return True


def test_backward_runs_twice_and_later_over_shards() -> None:
    assert all(run_ranks(2, _check_backward_twice))


def _check_compiled() -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, _, target = example((300,), FEATURES, VOCAB)
    local = weight[start:end].clone()

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden * 2.0, weight, target, group=group, vocab_range=(start, end, VOCAB))

    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo's own
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            a, b = hidden.clone().requires_grad_(), local.clone().requires_grad_()
            loss = call(a, b)
            loss.backward()
            results.append((loss.detach(), a.grad, b.grad))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_compiled_with_a_communicator_it_gives_the_eager_bits() -> None:
    assert all(run_ranks(2, _check_compiled))


# ---- errors ----------------------------------------------------------------------------------------------------------


def _error(arguments: dict[str, Any], value: int | None) -> str:
    group = Communicator(torch.distributed.group.WORLD)
    hidden, weight, _, target = example((2, 150), FEATURES, VOCAB)
    if value is not None:
        target[1, 4] = value
    start, end = shard_range(VOCAB, group.size, group.rank)
    options: dict[str, Any] = {"vocab_range": (start, end, VOCAB), **arguments}
    try:
        ops.linear_cross_entropy(hidden.requires_grad_(), weight[start:end], target, group=group, **options)
    except (IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_errors_are_raised_on_every_rank() -> None:
    for message in run_ranks(3, _error, {}, VOCAB):
        assert message.startswith(f"IndexError: target[1, 4] is {VOCAB}, outside the vocabulary [0, {VOCAB})")
    for message in run_ranks(3, _error, {"vocab_range": None}, None):
        assert "do not tile one vocabulary" in message
    for rank, message in enumerate(run_ranks(3, _error, {"sequence_parallel": True}, None)):
        assert f"hidden must be (2, 50, {FEATURES}) (rank {rank}'s part of dim 1 of target)" in message


def test_the_reference_shards_like_the_op() -> None:
    assert all(run_ranks(2, _check_reference))


def _check_reference() -> bool:
    group = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(VOCAB, group.size, group.rank)
    hidden, weight, bias, target = example((2, 15), FEATURES, VOCAB, torch.float64)
    _, by_hidden, by_weight, by_bias = plain([hidden, weight, bias], target, torch.float64)
    for sequence_parallel in (False, True):
        part = hidden.split(shard_sizes(15, group.size), 1)[group.rank] if sequence_parallel else hidden
        grad = by_hidden.split(shard_sizes(15, group.size), 1)[group.rank] if sequence_parallel else by_hidden
        options = {"group": group, "vocab_range": (start, end, VOCAB), "sequence_parallel": sequence_parallel}
        local = (part, weight[start:end], bias[start:end])
        _, *found = run(reference.linear_cross_entropy, local, target, **options)
        assert_close_to_exact(found, [grad, by_weight[start:end], by_bias[start:end]], torch.float64)
    return True
