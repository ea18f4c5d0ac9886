"""The CUDA kernels of cross-entropy on the emulated device, against float64 numpy.

Tolerances are explained in cross_entropy_cuda_cases.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.emulated import emulated
from tests.ops.cross_entropy_cuda_cases import (
    DTYPES,
    EVERY_OPTION,
    IGNORED,
    PACKET,
    Loss,
    Rows,
    assert_gradient,
    example,
    kernels,
    reference_gradient,
    reference_loss,
    rounded,
    run_backward,
    run_divisor,
    run_forward_backward,
    run_loss_sum,
    run_merge,
    run_stats,
    transform,
    with_weights,
)

# ---- stats and merge -------------------------------------------------------------------------------------------------


@emulated
def test_the_worked_example_of_two_ranks() -> None:
    target = np.array([1])
    shards = [Rows.of(np.array([[v]]), "float32") for v in (0.0, np.log(3.0))]
    gathered = np.stack([run_stats(shard, target, Loss(), rank, 2) for rank, shard in enumerate(shards)])
    np.testing.assert_allclose(gathered[:, 0], [[0, 1, 0], [np.log(3), 1, np.log(3)]], rtol=1e-7)
    loss, lse = run_merge(gathered, target, Loss(), 2)
    np.testing.assert_allclose([loss[0], lse[0]], np.log([4 / 3, 4]), rtol=1e-7)
    grads = [
        run_backward(shard, lse, target, Loss(), np.ones(1), Rows((1, 1), "float32"), vocab_start=rank, vocab_total=2)
        for rank, shard in enumerate(shards)
    ]
    np.testing.assert_allclose(np.concatenate(grads, axis=1), [[0.25, -0.25]], rtol=1e-6)


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 31, 257, 1023, 5003])
def test_stats_at_any_size_and_alignment(dtype: str, vocab: int) -> None:
    for offset in range(PACKET[dtype]):
        x, target = example(3, vocab, dtype, seed=offset)
        got = run_stats(Rows.of(x, dtype, row_stride=vocab + offset, offset=offset), target, Loss(), 0, vocab)
        tolerance = 1e-13 if dtype == "float64" else 1e-6
        np.testing.assert_array_equal(got[:3, 0], x.max(axis=1))
        expected = np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1)
        np.testing.assert_allclose(got[:3, 1], expected, rtol=tolerance)
        np.testing.assert_array_equal(got[:3, 2], [x[0, target[0]], x[1, target[1]], 0.0])


@emulated
def test_stats_read_rows_of_several_leading_dims() -> None:
    x, target = example(6, 37, "float32")
    logits = Rows.of(x, "float32", row_stride=40)
    argument = logits.argument() | {"sizes": [2, 3], "strides": [3 * 40, 40]}
    logits.argument = lambda: argument  # type: ignore[method-assign]
    swapped = Rows.of(x.reshape(3, 2, 37).transpose(1, 0, 2).reshape(6, 37), "float32")  # stored [3, 2], seen as [2, 3]
    transposed = swapped.argument() | {"sizes": [3, 2], "strides": [37, 3 * 37]}
    swapped.argument = lambda: transposed  # type: ignore[method-assign]
    expected = run_stats(Rows.of(x, "float32"), target, Loss(), 0, 37)
    # the address of a row decides which thread sums what
    np.testing.assert_allclose(run_stats(logits, target, Loss(), 0, 37)[:6], expected[:6], rtol=3e-7)
    np.testing.assert_allclose(run_stats(swapped, target, Loss(), 0, 37)[:6], expected[:6], rtol=3e-7)


@emulated
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_last_rows_of_stats_are_the_header(dtype: str, rows: int, smoothing: float) -> None:
    x, target = np.zeros((rows, 5)), np.zeros(rows, np.int64)
    start, total = 2**33 + 1, 2**33 + 9
    got = run_stats(Rows.of(x, dtype), target, Loss(label_smoothing=smoothing), start, total)
    tail = np.ascontiguousarray(got[rows:]).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(tail[:32].copy().view(np.int64), [5, start, total, 0])
    assert not tail[32:].any()


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", EVERY_OPTION)
def test_uneven_shards_merge_into_the_loss_of_the_whole_row(dtype: str, option: str) -> None:
    vocab = 301
    x, target = example(5, vocab, dtype)
    loss = with_weights(EVERY_OPTION[option], vocab)
    bounds = [0, 37, 37, 38, 290, vocab]  # one of the shards is empty
    shards = []
    for start, end in itertools.pairwise(bounds):
        logits = Rows.of(x[:, start:end], dtype, row_stride=end - start + 3, offset=1)
        shards.append(run_stats(logits, target, loss, start, vocab))
    assert (shards[1][:5, :2] == [-np.inf, 0]).all()
    got, lse = run_merge(np.stack(shards), target, loss, vocab)
    expected, expected_lse = reference_loss(x, target, loss)
    # float32 numbers of a rank: z of up to 12 rounded at 5e-7, through the sum and the differences
    tolerance = 1e-12 if dtype == "float64" else 4e-6
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=tolerance)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    assert got[-1] == 0


@emulated
def test_logits_of_1e4_keep_their_digits() -> None:
    x = 1e4 + np.linspace(-8, 8, 1001).astype(np.float32).astype(np.float64)[None]
    x = rounded(np.concatenate([x, -x[:, ::-1]]), "float32")
    target = np.array([900, 3])
    for loss in (Loss(), Loss(label_smoothing=0.1), Loss(label_smoothing=0.1, weight=np.ones(1001))):
        got, lse = run_merge(run_stats(Rows.of(x, "float32"), target, loss, 0, 1001)[None], target, loss, 1001)
        expected, expected_lse = reference_loss(x, target, loss)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-6)  # float32 has steps of 1e-3 here
        np.testing.assert_allclose(got, expected, rtol=2e-6)
        out = run_backward(Rows.of(x, "float32"), lse, target, loss, np.ones(2), Rows(x.shape, "float32"))
        assert_gradient(out, reference_gradient(x, target, loss, np.ones(2)), "float32", loss)
        _, fused_lse, fused = run_forward_backward(
            Rows.of(x, "float32"), target, loss, np.ones(2), Rows(x.shape, "float32")
        )
        np.testing.assert_allclose(fused_lse, expected_lse, rtol=0, atol=1e-6)
        assert_gradient(fused, reference_gradient(x, target, loss, np.ones(2)), "float32", loss)


@emulated
def test_infinite_and_nan_logits() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([[-inf] * 9, [-inf] * 4 + [1.0] + [-inf] * 4, [1.0, nan] + [0.0] * 7])
    target = np.array([0, 4, 0])
    for loss in (Loss(), Loss(label_smoothing=0.1)):
        got = run_stats(Rows.of(x, "float32"), target, loss, 0, 9)
        np.testing.assert_array_equal(got[:2, :3], [[-inf, 0, -inf], [1, 1, 1]])
        assert np.isnan(got[2, 1])
        if loss.label_smoothing:
            np.testing.assert_array_equal(got[:2, 3:], [[-inf, 0], [-inf, 0]])
    lse = np.array([0.0, 1.0, nan])
    grad = run_backward(Rows.of(x, "float32"), lse, target, Loss(), np.ones(3), Rows(x.shape, "float32"))
    np.testing.assert_array_equal(grad[1], np.zeros(9))
    # a softcap makes numbers of infinities, and their gradient is 0
    capped = Loss(softcap=5.0, label_smoothing=0.1)
    x = np.array([[-inf, 0.0, inf, 2.0]])
    target = np.array([2])
    _, lse, fused = run_forward_backward(Rows.of(x, "float32"), target, capped, np.ones(1), Rows(x.shape, "float32"))
    z = 5 * np.tanh(x / 5)
    np.testing.assert_allclose(lse, np.log(np.exp(z).sum(axis=1)), rtol=1e-6)
    assert (fused[0, [0, 2]] == 0).all()
    back = run_backward(Rows.of(x, "float32"), lse, target, capped, np.ones(1), Rows(x.shape, "float32"))
    np.testing.assert_allclose(back, fused, rtol=1e-5, atol=1e-7)


@emulated
@pytest.mark.parametrize("weighted", [False, True])
def test_a_target_outside_of_the_vocabulary_makes_its_row_nan_and_no_other(weighted: bool) -> None:
    x, _ = example(4, 33, "float32")
    target = np.array([33, -1, 5, 2**40])
    loss = Loss(weight=np.ones(33) if weighted else None)
    stats = run_stats(Rows.of(x, "float32"), target, loss, 0, 33)
    np.testing.assert_array_equal(np.isnan(stats[:4, 2]), [True, True, False, True])
    got, lse = run_merge(stats[None], target, loss, 33)
    np.testing.assert_array_equal(np.isnan(got), [True, True, False, True])
    assert np.isfinite(lse).all()
    fused, _, gradient = run_forward_backward(Rows.of(x, "float32"), target, loss, np.ones(4), Rows(x.shape, "float32"))
    np.testing.assert_array_equal(np.isnan(fused), [True, True, False, True])
    np.testing.assert_array_equal(np.isnan(gradient).all(axis=1), [True, True, False, True])
    assert np.isfinite(gradient[2]).all()


# ---- backward --------------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", EVERY_OPTION)
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_backward_matches_the_formula(dtype: str, option: str, with_grad_lse: bool) -> None:
    vocab = 533
    x, target = example(4, vocab, dtype)
    loss = with_weights(EVERY_OPTION[option], vocab)
    grad_loss = np.array([1.0, -0.5, 2.0, 3.0])
    grad_lse = np.array([0.25, 0.0, -1.0, 0.5]) if with_grad_lse else None
    expected = reference_gradient(x, target, loss, grad_loss, grad_lse)
    _, lse = reference_loss(x, target, loss)
    start, middle, end = 0, 209, vocab  # two shards
    for begin, stop in ((start, middle), (middle, end)):
        part = x[:, begin:stop]
        shard = {"grad_lse": grad_lse, "vocab_start": begin, "vocab_total": vocab}
        parts = (expected[0][:, begin:stop], expected[1][:, begin:stop])
        for in_place in (False, True):
            logits = Rows.of(part, dtype, row_stride=stop - begin + 5, offset=1)
            out = logits if in_place else Rows(part.shape, dtype)  # other alignments than the logits' rows
            assert_gradient(run_backward(logits, lse, target, loss, grad_loss, out, **shard), parts, dtype, loss)


@emulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_at_any_size_and_alignment(dtype: str) -> None:
    for vocab in (1, 2, 7, 8, 9, 17, 1030):
        for offset in range(0, PACKET[dtype], 3):
            x, target = example(3, vocab, dtype)
            _, lse = reference_loss(x, target, Loss())
            expected = reference_gradient(x, target, Loss(), np.ones(1))
            for out_offset in {offset, 0, 1}:
                logits = Rows.of(x, dtype, row_stride=vocab + 1, offset=offset)
                out = Rows(x.shape, dtype, row_stride=vocab + 1, offset=out_offset)
                got = run_backward(logits, lse, target, Loss(), np.ones(1), out)  # one number, expanded
                assert_gradient(got, expected, dtype, Loss())


@emulated
def test_ignored_rows_have_a_gradient_of_exact_zeros_whatever_the_logits() -> None:
    x, target = np.full((2, 21), np.nan), np.full(2, IGNORED)
    lse = np.full(2, np.nan)
    for loss in (Loss(), with_weights(EVERY_OPTION["all"], 21)):
        got = run_backward(Rows.of(x, "float32"), lse, target, loss, np.full(2, np.nan), Rows(x.shape, "float32"))
        np.testing.assert_array_equal(got, 0)
        values, _, fused = run_forward_backward(
            Rows.of(x, "float32"), target, loss, np.full(2, np.nan), Rows(x.shape, "float32")
        )
        np.testing.assert_array_equal(fused, 0)
        np.testing.assert_array_equal(values, 0)


@emulated
@pytest.mark.parametrize("gap", [5.0, 13.8, 20.0])
def test_the_targets_gradient_keeps_its_digits_as_its_probability_goes_to_1(gap: float) -> None:
    # p_y = 1 - 1e-6 at a gap of 13.8 in a row of 2; 1 - p_y itself is held to the same relative tolerance as the rest
    x = rounded(np.array([[0.0, gap, -1.0], [gap, -2.0, -3.0]]), "float32")
    target = np.array([1, 0])
    expected_loss, lse = reference_loss(x, target, Loss())
    expected = reference_gradient(x, target, Loss(), np.ones(2))
    got = run_backward(Rows.of(x, "float32"), lse, target, Loss(), np.ones(2), Rows(x.shape, "float32"))
    np.testing.assert_allclose(got, expected[0], rtol=3e-6)
    loss, _, fused = run_forward_backward(Rows.of(x, "float32"), target, Loss(), np.ones(2), Rows(x.shape, "float32"))
    np.testing.assert_allclose(fused, expected[0], rtol=3e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)


@emulated
def test_a_softcap_keeps_the_digits_of_small_logits_and_of_small_slopes() -> None:
    x = rounded(np.array([[1e-3, -2e-3, 5.0]]), "float32")
    for column in (0, 1):  # (1 - e) / (1 + e) would be off by 2e-3 of z here
        stats = run_stats(Rows.of(x, "float32"), np.array([column]), Loss(softcap=30.0), 0, 3)
        np.testing.assert_allclose(stats[0, 2], 30 * np.tanh(x[0, column] / 30), rtol=1e-6)
    x, target, loss = np.array([[12.0, 0.0, 11.875]]), np.array([1]), Loss(softcap=2.0)
    _, lse = reference_loss(x, target, loss)  # 1 - tanh^2 of 6 is 2.5e-5, and would be off by 2e-3 of that
    got = run_backward(Rows.of(x, "float32"), lse, target, loss, np.ones(1), Rows(x.shape, "float32"))
    assert_gradient(got, reference_gradient(x, target, loss, np.ones(1)), "float32", loss)


# ---- what is before and after it -------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [0, 1, 31, 1024, 5003])
def test_a_mean_divides_by_the_rows_that_count(rows: int, dtype: Any) -> None:
    target = np.where(np.arange(rows) % 3 == 1, IGNORED, np.arange(rows))
    counted = max(int((target != IGNORED).sum()), 1)
    assert run_divisor(target, dtype, is_mean=True) == (counted, dtype(1) / dtype(counted))
    assert run_divisor(target, dtype, is_mean=False) == (1, 1)
    assert run_divisor(target, dtype, is_mean=True, denominator=3.0) == (3, dtype(1) / dtype(3))
    assert run_divisor(np.full(rows, IGNORED), dtype, is_mean=True) == (1, 1)


@emulated
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [0, 1, 33, 1024, 5003])
def test_losses_are_added_in_float64_and_divided_once(rows: int, dtype: Any) -> None:
    loss = np.random.default_rng(rows).normal(3, 2, rows).astype(dtype)
    wanted = dtype(loss.astype(np.float64).sum()) / dtype(7)
    assert run_loss_sum(loss, 7.0) == pytest.approx(wanted, rel=1e-12 if dtype == np.float64 else 1.2e-7)
    if rows:
        loss[rows // 2] = np.nan
        assert np.isnan(run_loss_sum(loss, 7.0))


# ---- forward_backward ------------------------------------------------------------------------------------------------


@emulated
def test_the_worked_example_of_forward_backward() -> None:
    x = np.array([[0.0, np.log(3.0)]])
    loss, lse, grad = run_forward_backward(
        Rows.of(x, "float32"), np.array([1]), Loss(), np.ones(1), Rows((1, 2), "float32")
    )
    np.testing.assert_allclose([loss[0], lse[0]], np.log([4 / 3, 4]), rtol=1e-7)
    np.testing.assert_allclose(grad, [[0.25, -0.25]], rtol=1e-6)


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", EVERY_OPTION)
def test_forward_backward_matches_the_formula(dtype: str, option: str) -> None:
    vocab = 1033
    x, target = example(4, vocab, dtype)
    loss = with_weights(EVERY_OPTION[option], vocab)
    grad_loss = np.array([1.0, -0.5, 2.0, 3.0])
    expected_loss, expected_lse = reference_loss(x, target, loss)
    tolerance = 1e-12 if dtype == "float64" else 4e-6
    for in_place in (False, True):
        logits = Rows.of(x, dtype, row_stride=vocab + 4, offset=3)
        out = logits if in_place else Rows(x.shape, dtype)
        values, lse, grad = run_forward_backward(logits, target, loss, grad_loss, out)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=tolerance)
        np.testing.assert_allclose(values, expected_loss, rtol=tolerance, atol=tolerance)
        assert values[-1] == 0
        assert_gradient(grad, reference_gradient(x, target, loss, grad_loss), dtype, loss)


@emulated
@pytest.mark.parametrize(
    ("dtype", "vocab", "plan"),
    [
        ("bfloat16", 4099, (1, 512 * 16)),
        ("bfloat16", 65537 + 8, (2, 4097 * 16)),
        ("float16", 98304 + 9, (3, 4097 * 16)),
        ("float32", 65537 + 8, (4, 4097 * 16)),
        ("bfloat16", 458752 + 9, (13, 4412 * 16)),
        ("bfloat16", 600001, (16, 4688 * 16)),  # one block a multiprocessor
        ("float32", 860160 + 4, None),  # 16 x 210 KiB and one packet: read twice
        ("float64", 1000, None),
    ],
)
@pytest.mark.parametrize("option", ["plain", "all"])
def test_a_row_is_shared_by_the_smallest_cluster_that_holds_it(
    dtype: str, vocab: int, plan: tuple[int, int] | None, option: str
) -> None:
    assert kernels().resident_plan(dtype, vocab) == plan
    x, target = example(1, vocab, dtype)
    loss = with_weights(EVERY_OPTION[option], vocab)
    logits = Rows.of(x, dtype, offset=1)
    values, lse, grad = run_forward_backward(logits, target, loss, np.ones(1), logits)
    expected_loss, expected_lse = reference_loss(x, target, loss)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-6)
    np.testing.assert_allclose(values, expected_loss, rtol=4e-6)
    assert_gradient(grad, reference_gradient(x, target, loss, np.ones(1)), dtype, loss)


@emulated
@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [  # around the limit of shared memory without asking, 48 KiB
        *(("bfloat16", vocab) for vocab in (21504, 24064, 24576, 24583, 49152, 98304)),
        *(("float32", vocab) for vocab in (10752, 12288, 49152)),
    ],
)
def test_rows_whose_share_is_at_the_limit_of_plain_shared_memory_can_be_launched(dtype: str, vocab: int) -> None:
    x, target = example(1, vocab, dtype)
    logits = Rows.of(x, dtype)
    values, lse, _ = run_forward_backward(logits, target, Loss(), np.ones(1), logits)
    expected_loss, expected_lse = reference_loss(x, target, Loss())
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-6)
    np.testing.assert_allclose(values, expected_loss, rtol=4e-6)


@emulated
@pytest.mark.parametrize("schedule", ["ascending", "descending", "random"])
@pytest.mark.parametrize(
    ("dtype", "rows", "vocab", "stride"),
    [
        ("bfloat16", 70, 300, 301),  # rows at all alignments; losses of 32 rows are made together
        ("float32", 33, 37, 40),
        ("bfloat16", 4, 70001, 70008),  # two blocks a row
    ],
)
def test_one_cluster_takes_all_rows_one_after_the_other(
    dtype: str, rows: int, vocab: int, stride: int, schedule: str
) -> None:
    import fastpar_emulation as emulation

    x, target = example(rows, vocab, dtype)
    expected_loss, expected_lse = reference_loss(x, target, Loss())
    emulation.set_device(multiprocessors=2 if vocab > 40000 else 1)  # one block each
    emulation.set_schedule(schedule, 3)
    try:
        for in_place in (False, True):
            logits = Rows.of(x, dtype, row_stride=stride, offset=3)
            out = logits if in_place else Rows(x.shape, dtype)
            values, lse, grad = run_forward_backward(logits, target, Loss(), np.ones(rows), out)
            np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-6)
            np.testing.assert_allclose(values, expected_loss, rtol=4e-6, atol=4e-6)
            assert_gradient(grad, reference_gradient(x, target, Loss(), np.ones(rows)), dtype, Loss())
    finally:
        emulation.set_device()
        emulation.set_schedule("ascending")


@emulated
def test_forward_backward_of_an_empty_vocabulary() -> None:
    logits = Rows((2, 0), "float32")
    loss, lse, _ = run_forward_backward(logits, np.array([IGNORED, 0]), Loss(), np.ones(2), logits)
    np.testing.assert_array_equal(lse, [-np.inf, -np.inf])
    np.testing.assert_array_equal(loss, [0, np.nan])  # there is no class 0


@emulated
def test_no_result_depends_on_the_order_in_which_threads_and_blocks_run() -> None:
    import fastpar_emulation as emulation

    vocab = 70001
    x, target = example(3, vocab, "bfloat16")
    loss = with_weights(EVERY_OPTION["all"], vocab)
    results = []
    for schedule in ("ascending", "descending"):
        emulation.set_schedule(schedule)
        logits = Rows.of(x, "bfloat16")
        stats = run_stats(logits, target, loss, 0, vocab)
        fused = run_forward_backward(logits, target, loss, np.ones(1), logits)
        logits = Rows.of(x, "bfloat16")
        results.append([stats, *fused, run_stats(logits, target, loss, 0, vocab, exp_out=logits), logits.read()])
    emulation.set_schedule("ascending")
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


# ---- stats_exp_ ------------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["plain", "smoothing", "softcap", "logit_scale", "all"])
@pytest.mark.parametrize("vocab", [9, 1033, 33000])
def test_stats_exp_leaves_the_exponentials_where_the_logits_were(dtype: str, option: str, vocab: int) -> None:
    total, start = vocab + 100, 50
    x, target = example(3, vocab, dtype)
    target[:2] += [start, start - 50 * (vocab > 50)]  # an owned one, and one that may be another shard's
    loss = with_weights(EVERY_OPTION[option], total)
    plain = run_stats(Rows.of(x, dtype, offset=1), target, loss, start, total)
    logits = Rows.of(x, dtype, row_stride=vocab + 1, offset=1)
    got = run_stats(logits, target, loss, start, total, exp_out=logits)
    tolerance = 1e-13 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(got[:3, :3], plain[:3, :3], rtol=tolerance)
    # other threads add other packets, whose differences from their maximum are rounded
    np.testing.assert_allclose(got[:3, 3:].sum(axis=1), plain[:3, 3:].sum(axis=1), atol=tolerance * vocab)
    np.testing.assert_array_equal(got[3:].view(np.uint8), plain[3:].view(np.uint8))
    z, slope = transform(x, loss)
    expected = np.exp(z - z.max(axis=1, keepdims=True)) * slope
    for row, column in enumerate(target - start):
        if 0 <= column < vocab:
            expected[row, column] = 0
    expected[-1] = 0  # ignored
    # of exp(z - m) itself; z as in a gradient
    assert_gradient(logits.read(), (expected, expected), dtype, loss)


@emulated
@pytest.mark.parametrize("schedule", ["ascending", "descending", "random"])
def test_stats_exp_of_rows_that_one_cluster_takes_one_after_the_other(schedule: str) -> None:
    import fastpar_emulation as emulation

    rows, vocab = 4, 70001  # two blocks a row; copies of 20 KiB, the last one shorter
    x, target = example(rows, vocab, "bfloat16")
    plain = run_stats(Rows.of(x, "bfloat16"), target, Loss(), 0, vocab)
    emulation.set_device(multiprocessors=2)
    emulation.set_schedule(schedule, 5)
    try:
        logits = Rows.of(x, "bfloat16", row_stride=vocab + 2, offset=3)
        got = run_stats(logits, target, Loss(), 0, vocab, exp_out=logits)
    finally:
        emulation.set_device()
        emulation.set_schedule("ascending")
    np.testing.assert_allclose(got[:rows], plain[:rows], rtol=1e-6)
    z, _ = transform(x, Loss())
    expected = np.exp(z - z.max(axis=1, keepdims=True))
    expected[np.arange(rows)[target >= 0], target[target >= 0]] = 0
    expected[target < 0] = 0
    assert_gradient(logits.read(), (expected, expected), "bfloat16", Loss())


@emulated
def test_stats_exp_of_a_row_without_a_finite_logit_is_zero() -> None:
    x = np.full((1, 12), -np.inf)
    logits = Rows.of(x, "float32")
    got = run_stats(logits, np.array([50]), Loss(), 0, 100, exp_out=logits)
    np.testing.assert_array_equal(got[0], [-np.inf, 0, 0])
    np.testing.assert_array_equal(logits.read(), 0)


# ---- far rows --------------------------------------------------------------------------------------------------------


def far_rows(dtype: str) -> np.ndarray:
    """Equal logits and random ones of sizes whose float64 sum with a logarithm loses it, of both signs; masks."""
    noise = np.random.default_rng(3).normal(0, 1, 33)
    largest = {"bfloat16": 3.3e38, "float32": 3.4e38}[dtype]
    rows = [np.full(33, sign * size) for size in (1e10, 1e17, largest) for sign in (1.0, -1.0)]
    rows += [noise * size / 4 for size in (1e10, 1e17)]
    rows += [np.where(np.arange(33) % 3 == 0, -size, size / 2) for size in (1.6777e7, 1e10, 1e17)]
    rows += [np.where(np.arange(33) % 2 == 0, -largest, noise), np.where(np.arange(33) % 2 == 0, -np.inf, noise)]
    return rounded(np.stack(rows), dtype)


@emulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_of_far_rows_match_float64(dtype: str, smoothing: float) -> None:
    x, loss = far_rows(dtype), Loss(label_smoothing=smoothing)
    if smoothing:
        x = x[np.isfinite(x).all(axis=1)]
    target, ones = np.where(np.arange(len(x)) % 2 == 0, 1, 5), np.ones(len(x))
    below = x - x.max(axis=1, keepdims=True)
    log_p = below - np.log(np.exp(below).sum(axis=1, keepdims=True))
    row = np.arange(len(x))
    wanted = -(1 - smoothing) * log_p[row, target]
    if smoothing:
        wanted = wanted - smoothing * log_p.mean(axis=1)
    wanted_grad = np.exp(log_p) - smoothing / 33
    wanted_grad[row, target] -= 1 - smoothing
    values, _, fused = run_forward_backward(Rows.of(x, dtype), target, loss, ones, Rows(x.shape, dtype))
    parts = [run_stats(Rows.of(x[:, a:b], dtype), target, loss, a, 33) for a, b in ((0, 16), (16, 33))]
    merged, lse = run_merge(np.stack(parts), target, loss, 33)
    split = run_backward(Rows.of(x, dtype), lse, target, loss, ones, Rows(x.shape, dtype))
    for value, grad in ((values, fused), (merged, split)):
        np.testing.assert_allclose(value, wanted.astype(np.float32), rtol=5e-6, atol=5e-6)
        np.testing.assert_allclose(grad, wanted_grad, rtol=5e-3 if dtype == "bfloat16" else 5e-6, atol=5e-6)
