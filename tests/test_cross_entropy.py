"""Vocab-parallel cross-entropy: every CPU instruction set against float64, one-process shards, real ranks, and its
promises.

Tolerances. Loss and lse are float32 sums of exponentials that are good to about an ulp, so 2e-6 relative to max(1,
|lse|) holds for any vocabulary here. A gradient entry is a probability times grad_loss, at most 1 in magnitude before
that: float32 to 1e-6 relative to the largest entry; bfloat16 and float16 add one rounding to the entry itself (2^-8 and
2^-11). float64 runs on the C library's exp: 1e-12.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import _ext, ops, reference
from fastpar.comm import Communicator, shard_range
from fastpar.reference.cross_entropy import check_shards
from tests.dist import run_ranks

CAPABILITIES = ["avx512bf16", "avx512", "avx2", "portable"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [1, 2, 257, 1023, 4099, 9001]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-12}
K = torch.ops.fastpar
cross_entropy = ops.vocab_parallel_cross_entropy


@pytest.fixture(params=CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per instruction set that this machine has."""
    if request.param not in _ext.build_info()["cpu_capabilities"].split():
        pytest.skip(f"this machine has no {request.param}")
    before = _ext.cpu_capability()
    _ext.set_cpu_capability(request.param)
    yield request.param
    _ext.set_cpu_capability(before)


def example(rows: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits and targets; every third target is ignored, the first and the last column are targets."""
    generator = torch.Generator().manual_seed(rows * 10007 + vocab)
    logits = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[0], target[-1] = 0, vocab - 1
    target[1:-1:3] = -100
    return logits, target


def expected(
    logits: Tensor, target: Tensor, reduction: str = "mean", weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient by torch in float64; `weights` are the upstream gradients of reduction "none"."""
    x = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(x.view(-1, x.shape[-1]), target.reshape(-1), reduction=reduction)
    loss.backward(None if weights is None else weights.double().reshape(-1))
    assert x.grad is not None
    return loss.detach().view(target.shape if reduction == "none" else ()), x.grad


def assert_loss_close(actual: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    tolerance = 1e-12 if actual.dtype == torch.float64 else 2e-6
    assert actual.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance * max(1.0, scale))


def assert_grad_close(actual: Tensor | None, wanted: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    assert actual is not None
    assert actual.dtype == dtype
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    peak = max(wanted.abs().max().item() if wanted.numel() else 0.0, 1e-30)
    # float16 gradients below 2^-14 are subnormal and round to a multiple of 2^-24.
    atol = floor * peak + (2.0**-25 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(
        actual.double(), wanted.double(), rtol=roundings * ROUNDING[dtype], atol=roundings * atol
    )


# ---- one rank, against float64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", SIZES)
def test_loss_and_gradient_match_float64(capability: str, dtype: torch.dtype, vocab: int) -> None:
    logits, target = example(7, vocab, dtype)
    x = logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, return_lse=True)
    loss.backward()
    wanted_loss, wanted_grad = expected(logits, target)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    assert_loss_close(lse, logits.double().logsumexp(-1), scale=10.0)
    assert_grad_close(x.grad, wanted_grad, dtype)
    assert torch.equal(x.detach(), logits), "the logits were changed without inplace_backward"


@pytest.mark.parametrize("dtype", DTYPES)
def test_inplace_and_fresh_gradients_have_the_same_bits(capability: str, dtype: torch.dtype) -> None:
    logits, target = example(33, 1023, dtype)
    fresh, inplace = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(fresh, target).backward()
    cross_entropy(inplace, target, inplace_backward=True).backward()
    assert fresh.grad is not None
    assert inplace.grad is not None
    assert torch.equal(fresh.grad, inplace.grad)
    assert inplace.grad.data_ptr() == inplace.data_ptr(), "the gradient is not in the logits' memory"


@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_gradient_of_a_large_unaligned_output_matches(capability: str, dtype: torch.dtype) -> None:
    # Above 8 MiB the gradient is stored past the caches, which needs aligned addresses: odd rows start misaligned.
    vocab = 40961 if dtype in (torch.float32, torch.float64) else 81921
    logits, target = example(71, vocab, dtype)
    assert logits.numel() * logits.element_size() > 8 << 20
    x = logits.clone().requires_grad_()
    cross_entropy(x, target, reduction="sum").backward()
    assert_grad_close(x.grad, expected(logits, target, "sum")[1], dtype)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_and_their_gradients_match(reduction: str) -> None:
    logits, target = example(14, 257)
    logits, target = logits.view(2, 7, 257), target.view(2, 7)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction=reduction)
    weights = torch.linspace(-1.0, 2.0, 14).view(2, 7) if reduction == "none" else None
    loss.backward(weights)
    wanted_loss, wanted_grad = expected(logits, target, reduction, weights)
    assert loss.shape == wanted_loss.shape
    assert_loss_close(loss, wanted_loss, scale=100.0 if reduction == "sum" else 10.0)
    assert_grad_close(x.grad, wanted_grad.view_as(x), torch.float32)


def test_ignored_rows_have_zero_loss_and_exactly_zero_gradient(capability: str) -> None:
    logits, target = example(10, 300)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="none")
    loss.sum().backward()
    ignored = target == -100
    assert ignored.any()
    assert x.grad is not None
    assert torch.count_nonzero(loss[ignored]) == 0
    assert torch.count_nonzero(x.grad[ignored]) == 0
    assert x.grad[~ignored].abs().amax(dim=-1).min() > 0


def test_an_ignore_index_inside_the_vocabulary_is_ignored() -> None:
    logits = torch.randn(4, 9)
    target = torch.tensor([3, 0, 3, 8])
    wanted = F.cross_entropy(logits, target, ignore_index=3)
    assert_loss_close(cross_entropy(logits, target, ignore_index=3), wanted)


def test_mean_over_only_ignored_rows_is_zero_with_zero_gradient() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(x, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert torch.count_nonzero(x.grad) == 0


def test_large_logits_keep_float32_accuracy(capability: str) -> None:
    # With lse in float32 the gradient would be off by 5e-4 here.
    logits, target = example(8, 513)
    logits = logits + 1e4
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target)
    loss.backward()
    wanted_loss, wanted_grad = expected(logits, target)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    assert_grad_close(x.grad, wanted_grad, torch.float32)


@pytest.mark.parametrize("probability", [0.9, 0.999, 1 - 1e-6])
def test_the_target_entry_keeps_its_digits_as_the_probability_nears_one(capability: str, probability: float) -> None:
    vocab = 100
    logits = torch.zeros(1, vocab)
    logits[0, 17] = math.log(probability / (1 - probability) * (vocab - 1))
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype, copy=True).requires_grad_()
        cross_entropy(x, torch.tensor([17])).backward()
        _, wanted = expected(x, torch.tensor([17]))
        assert x.grad is not None
        # p - 1 from p rounded to bfloat16 would be 0; the float32 sum of exponentials leaves 6e-8 / (1 - p).
        torch.testing.assert_close(x.grad[0, 17].double(), wanted[0, 17], rtol=0.1, atol=0.0)


def test_infinite_logits_and_nan_behave_as_in_torch(capability: str) -> None:
    logits = torch.randn(4, 70)
    logits[0, 5:] = -math.inf  # masked columns
    logits[1, 3] = math.nan
    logits[2, 69] = math.inf
    logits[3, 7] = -math.inf
    target = torch.tensor([2, 10, 4, 7])
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, wanted = cross_entropy(x, target, reduction="none"), F.cross_entropy(y, target, reduction="none")
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    assert loss[3] == math.inf
    loss[[0, 3]].sum().backward()
    wanted[[0, 3]].sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad[0], y.grad[0])
    assert torch.count_nonzero(x.grad[0, 5:]) == 0


def test_a_nan_with_any_payload_reaches_the_loss(capability: str) -> None:
    logits = torch.zeros(1, 40)
    logits.view(torch.int32)[0, 11] = 0x7FFFFFFF  # what a GPU makes
    assert math.isnan(cross_entropy(logits, torch.tensor([0])).item())


def test_worked_example_of_the_docstring() -> None:
    first, second = torch.tensor([[0.0]]), torch.tensor([[math.log(3.0)]])
    target = torch.tensor([1])
    gathered = torch.stack(
        [K.vocab_parallel_cross_entropy_stats(x, target, s, 2, -100) for s, x in enumerate((first, second))]
    )
    torch.testing.assert_close(gathered, torch.tensor([[[0.0, 1.0, 0.0]], [[math.log(3.0), 1.0, math.log(3.0)]]]))
    loss, lse = K.vocab_parallel_cross_entropy_merge(gathered, target, -100)
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3)]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)], dtype=torch.float64))
    grads = [
        K.vocab_parallel_cross_entropy_backward(x, lse, target, torch.ones(1), s, -100)
        for s, x in enumerate((first, second))
    ]
    torch.testing.assert_close(torch.cat(grads), torch.tensor([[0.25], [-0.25]]))


# ---- layouts and sizes -----------------------------------------------------------------------------------------------


def layouts(logits: Tensor) -> dict[str, Tensor]:
    """The [4, 6, V] logits in other strides."""
    batch, sequence, vocab = logits.shape
    padded = torch.zeros(batch, sequence + 1, vocab + 3)
    padded[:, :-1, :-3] = logits
    return {
        "sliced rows and columns": padded[:, :-1, :-3],
        "transposed batch": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "strided columns": logits.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["sliced rows and columns", "transposed batch", "strided columns"])
def test_any_strides_give_the_contiguous_result(capability: str, layout: str, inplace: bool) -> None:
    logits, target = example(24, 1023)
    logits, target = logits.view(4, 6, 1023), target.view(4, 6)
    x = layouts(logits)[layout].requires_grad_()
    assert not x.is_contiguous()
    loss = cross_entropy(x, target, inplace_backward=inplace)
    loss.backward()
    plain = logits.clone().requires_grad_()
    wanted = cross_entropy(plain, target)
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_expanded_rows_are_rejected_by_the_inplace_op() -> None:
    x = torch.randn(1, 5).expand(3, 5)
    lse, target, grad = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    with pytest.raises(RuntimeError, match="rows do not share memory"):
        K.vocab_parallel_cross_entropy_backward_(x, lse, target, grad, 0, -100)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 0)])
def test_no_tokens_give_an_empty_loss(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    target = torch.empty(shape[:-1], dtype=torch.int64)
    loss = cross_entropy(x, target, reduction="none")
    assert loss.shape == shape[:-1]
    cross_entropy(x, target).backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_a_single_vector_of_logits_is_one_token() -> None:
    logits, target = torch.randn(11), torch.tensor(4)
    assert_loss_close(cross_entropy(logits, target), F.cross_entropy(logits, target))


def test_int32_targets_are_accepted() -> None:
    logits, target = example(5, 40)
    assert torch.equal(cross_entropy(logits, target.int()), cross_entropy(logits, target))


# ---- shards in one process -------------------------------------------------------------------------------------------


def sharded(logits: Tensor, target: Tensor, bounds: list[int], grad_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row loss and the gradient of shards [bounds[r], bounds[r + 1]), as ranks would compute them."""
    shards = [(s, logits[:, s:e]) for s, e in itertools.pairwise(bounds)]
    total = logits.shape[1]
    gathered = torch.stack([K.vocab_parallel_cross_entropy_stats(x, target, s, total, -100) for s, x in shards])
    loss, lse = K.vocab_parallel_cross_entropy_merge(gathered, target, -100)
    grads = [K.vocab_parallel_cross_entropy_backward(x, lse, target, grad_loss, s, -100) for s, x in shards]
    return loss, torch.cat(grads, dim=1)


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


def test_equal_inputs_give_equal_bits_in_every_position_and_thread_count() -> None:
    logits, target = example(1, 5003)
    many = logits.expand(64, -1)
    threads = torch.get_num_threads()
    losses = []
    for count in (1, 2):
        torch.set_num_threads(count)
        losses.append(cross_entropy(many, target.expand(64), reduction="none"))
    torch.set_num_threads(threads)
    assert torch.unique(torch.cat(losses)).numel() == 1


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 8, 2**40])
def test_a_target_outside_the_vocabulary_is_an_index_error_with_its_position(value: int) -> None:
    target = torch.zeros(3, 4, dtype=torch.int64)
    target[1, 2] = value
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {value}, outside the vocabulary \[0, 8\)"):
        cross_entropy(torch.randn(3, 4, 8), target)
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {value}"):
        reference.vocab_parallel_cross_entropy(torch.randn(3, 4, 8), target)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "logits must be one of"),
        ({"target": torch.zeros(3)}, TypeError, "class ids as int64"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"logits is \(3, 8\), target is \(4,\)"),
        ({"reduction": "average"}, ValueError, "got 'average'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"vocab_range": (0, 9, 9)}, ValueError, "names 9 columns, but logits has 8"),
        ({"vocab_range": (4, 2, 9)}, ValueError, "0 <= start <= end <= total"),
        ({"vocab_range": (0, 8, 16)}, ValueError, "needs a group of several ranks"),
        ({"logits": torch.tensor(1.0), "target": torch.tensor(0)}, ValueError, "shape of logits without its last dim"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"logits": torch.randn(3, 8), "target": torch.zeros(3, dtype=torch.int64), **arguments}
    with pytest.raises(error, match=message):
        cross_entropy(call.pop("logits"), call.pop("target"), **call)


def test_shards_that_do_not_tile_the_vocabulary_are_an_error() -> None:
    check_shards([[3.0, 0.0, 7.0], [0.0, 3.0, 7.0], [4.0, 3.0, 7.0]])
    with pytest.raises(ValueError, match="rank 1 holds 4 columns from 4 of 8, expected to start at 3 of 6"):
        check_shards([[3.0, 0.0, 6.0], [4.0, 4.0, 8.0]])
    with pytest.raises(ValueError, match="end at 6, but the vocabulary has 7"):
        check_shards([[3.0, 0.0, 7.0], [3.0, 3.0, 7.0]])


def test_a_second_backward_after_an_inplace_one_is_an_error() -> None:
    x = torch.randn(4, 9).requires_grad_()
    loss = cross_entropy(x * 1.0, torch.zeros(4, dtype=torch.int64), inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inplace_backward=True.*cannot run a second time"):
        loss.backward()


def test_another_use_of_overwritten_logits_in_backward_is_an_error() -> None:
    x = torch.randn(4, 9).requires_grad_()
    logits = x * 1.0
    loss = cross_entropy(logits, torch.zeros(4, dtype=torch.int64), inplace_backward=True)
    square = (logits * logits).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_backward_can_run_twice_without_inplace() -> None:
    logits, target = example(5, 33)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="none")
    first, second = torch.linspace(0, 1, 5), torch.linspace(3, -2, 5)
    for weights in (first, second):
        (grad,) = torch.autograd.grad(loss, x, weights, retain_graph=True)
        assert_grad_close(grad, expected(logits, target, "none", weights)[1], torch.float32)


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes_for_every_op() -> None:
    logits, target = example(6, 37)
    stats = K.vocab_parallel_cross_entropy_stats(logits, target, 0, 37, -100)
    loss, lse = K.vocab_parallel_cross_entropy_merge(stats.unsqueeze(0), target, -100)
    backward = (logits, lse, target, torch.ones_like(loss), 0, -100)
    calls = {
        K.vocab_parallel_cross_entropy_stats: (logits, target, 0, 37, -100),
        K.vocab_parallel_cross_entropy_merge: (stats.unsqueeze(0), target, -100),
        K.vocab_parallel_cross_entropy_backward: backward,
        K.vocab_parallel_cross_entropy_backward_: (logits.clone(), *backward[1:]),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool) -> None:
    def step(x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(x * 2.0, target, inplace_backward=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 8):
        logits, target = example(rows, 129)
        x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        compiled(x, target).backward()
        step(y, target).backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_autocast_leaves_the_loss_in_float32() -> None:
    weight, hidden = torch.randn(50, 16, requires_grad=True), torch.randn(6, 16)
    target = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = hidden @ weight.T
        loss = cross_entropy(logits, target)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert_loss_close(loss, F.cross_entropy(logits.double(), target), scale=10.0)
    assert weight.grad is not None


def test_nothing_but_the_logits_and_bytes_per_token_is_saved() -> None:
    rows, vocab = 128, 4096
    logits, target = example(rows, vocab, torch.bfloat16)
    x = logits.requires_grad_() * 1.0
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = cross_entropy(x, target)
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    others = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() != x.data_ptr())
    assert others <= 32 * rows
    loss.backward()


def test_no_graph_is_made_when_no_gradient_is_needed() -> None:
    logits, target = example(3, 20)
    assert cross_entropy(logits, target).grad_fn is None
    with torch.no_grad():
        assert cross_entropy(logits.requires_grad_(), target).grad_fn is None


def test_gradients_of_the_gradient_are_refused() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(x, torch.zeros(3, dtype=torch.int64))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_agrees_with_the_kernels(dtype: torch.dtype) -> None:
    logits, target = example(12, 600, dtype)
    logits, target = logits.view(3, 4, 600), target.view(3, 4)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, return_lse=True)
    wanted, wanted_lse = reference.vocab_parallel_cross_entropy(y, target, return_lse=True)
    loss.backward()
    wanted.backward()
    assert_loss_close(loss, wanted, scale=10.0)
    assert_loss_close(lse, wanted_lse, scale=10.0)
    assert y.grad is not None
    assert_grad_close(x.grad, y.grad, dtype, roundings=2)  # both sides round


def test_a_freed_large_gradient_is_handed_out_again() -> None:
    K.large_buffer_release()
    logits, target = example(300, 8001)
    assert logits.numel() * 4 > 8 << 20
    mapped_before = K.large_buffer_stats()[3]
    for _ in range(3):
        x = logits.clone().requires_grad_()
        cross_entropy(x, target).backward()
        assert K.large_buffer_stats()[0] >= logits.numel() * 4
        del x
    assert K.large_buffer_stats()[3] == mapped_before + 1
    assert K.large_buffer_stats()[1] >= logits.numel() * 4
    K.large_buffer_release()
    assert K.large_buffer_stats()[1] == 0


# ---- real ranks ------------------------------------------------------------------------------------------------------


class CountCollectives(TorchDispatchMode):
    """Names of the c10d ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def run_sharded(vocab: int, implementation: str, dtype: torch.dtype) -> dict[str, Any]:
    """One rank of a forward and a backward over its DTensor-rule shard."""
    comm = Communicator(torch.distributed.group.WORLD)
    start, end = shard_range(vocab, comm.size, comm.rank)
    logits, target = example(19, vocab, dtype)
    x = logits[:, start:end].clone().requires_grad_()
    function = globals()[implementation].vocab_parallel_cross_entropy
    with CountCollectives() as forward:
        loss = function(x, target, group=comm, vocab_range=(start, end, vocab), reduction="none")
    with CountCollectives() as backward:
        loss.backward(torch.linspace(0.5, 1.5, 19).to(loss.dtype))
    return {"loss": loss.detach(), "grad": x.grad, "forward": forward.names, "backward": backward.names}


@pytest.mark.parametrize("implementation", ["ops", "reference"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_match_one_process_with_one_collective_and_equal_bits(world_size: int, implementation: str) -> None:
    vocab = 9 if world_size == 4 else 1031  # 9 over 4 ranks by DTensor's rule: 3, 3, 3 and an empty shard
    logits, target = example(19, vocab)
    results = run_ranks(world_size, run_sharded, vocab, implementation, torch.float32)
    wanted_loss, wanted_grad = expected(logits, target, "none", torch.linspace(0.5, 1.5, 19))
    for result in results:
        assert len(result["forward"]) == 1
        assert result["backward"] == []
        assert torch.equal(result["loss"], results[0]["loss"])
    assert_loss_close(results[0]["loss"], wanted_loss, scale=10.0)
    assert_grad_close(torch.cat([r["grad"] for r in results], dim=1), wanted_grad, torch.float32)


def run_errors() -> list[str]:
    """What a rank is told about a bad target, and about unequal shards without a range."""
    comm = Communicator(torch.distributed.group.WORLD)
    messages = []
    target = torch.tensor([0, 9, 1])
    with pytest.raises(IndexError) as bad_target, CountCollectives() as count:
        cross_entropy(torch.randn(3, 4), target, group=comm)
    assert count.names == []
    messages.append(str(bad_target.value))
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
