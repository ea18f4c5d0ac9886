"""Cross-entropy on CUDA tensors: against float64 on the CPU, in shards, in CUDA graphs, without waiting for the device.

Tolerances are those of cross_entropy_cases.py, twice as wide for float32 sums: a GPU's exp2 is good to two ulp
where the CPU's polynomials are good to one. `make gpu` runs the tests with "small" in their names once more under
compute-sanitizer, which costs seconds a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops
from tests.ops.cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_grad_close,
    assert_loss_close,
    example,
    expected_with,
    sharded,
    upstream,
    with_weights,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
cross_entropy = ops.vocab_parallel_cross_entropy


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}


def loss_and_grad(logits: Tensor, target: Tensor, grads: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The op on DEVICE, from CPU tensors and back to them."""
    x = logits.to(DEVICE).requires_grad_()
    loss = cross_entropy(x, target.to(DEVICE), **on_device(options))
    (grad,) = torch.autograd.grad(loss, x, None if grads is None else grads.to(DEVICE))
    return loss.detach().cpu(), grad.cpu()


def assert_matches_float64(logits: Tensor, target: Tensor, reduction: str = "mean", **options: Any) -> None:
    grads = upstream(target.numel(), logits.dtype).view(target.shape) if reduction == "none" else None
    loss, grad = loss_and_grad(logits, target, grads, reduction=reduction, **options)
    one = torch.ones(()) if grads is None else grads
    (wanted_loss,), wanted_grad = expected_with(logits, target, [one], reduction=reduction, **options)
    assert loss.shape == wanted_loss.shape
    assert_loss_close(loss, wanted_loss, scale=200.0 if reduction == "sum" else 20.0)
    assert_grad_close(grad, wanted_grad, logits.dtype, roundings=2)


# ---- against float64 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 257, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_loss_and_gradient_match_float64(dtype: torch.dtype, vocab: int) -> None:
    assert_matches_float64(*example(7, vocab, dtype))


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_options_match_float64(dtype: torch.dtype, name: str) -> None:
    assert_matches_float64(*example(5, 1023, dtype), **with_weights(OPTIONS[name], 1023, dtype))


@pytest.mark.parametrize("vocab", [9001, 12288, 24576, 32768, 49152, 98304, 131072, 151669, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabularies_of_real_models_match_float64(dtype: torch.dtype, vocab: int) -> None:
    assert_matches_float64(*example(9, vocab, dtype))
    assert_matches_float64(*example(9, vocab, dtype), **with_weights(OPTIONS["everything"], vocab, dtype))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_small_reductions_match_float64(reduction: str) -> None:
    logits, target = example(14, 257)
    assert_matches_float64(logits.view(2, 7, 257), target.view(2, 7), reduction)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_gradients_are_in_the_logits_memory_only_if_asked_for(dtype: torch.dtype) -> None:
    """Other kernels, which add up a row in another order: close to the same gradient, and not its bits."""
    logits, target = example(33, 1023, dtype)
    _, wanted = expected_with(logits, target, [torch.ones(())])
    for inplace in (False, True):
        x = logits.to(DEVICE).requires_grad_()
        loss = cross_entropy(x, target.to(DEVICE), inplace_backward=inplace)
        (grad,) = torch.autograd.grad(loss, x)
        assert_grad_close(grad.cpu(), wanted, dtype, roundings=2)
        assert (grad.data_ptr() == x.data_ptr()) is inplace
        assert torch.equal(x.detach().cpu(), logits) is not inplace


@pytest.mark.parametrize("layout", ["sliced", "transposed", "strided columns", "odd address"])
def test_small_strided_logits_give_the_contiguous_result(layout: str) -> None:
    logits, target = example(6, 515)
    x = logits.to(DEVICE)
    views = {
        "sliced": lambda: torch.nn.functional.pad(x, (3, 5))[:, 3:-5],
        "transposed": lambda: x.view(2, 3, 515).transpose(0, 1),
        "strided columns": lambda: x.repeat_interleave(2, dim=1)[:, ::2],
        "odd address": lambda: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(6, 515),
    }
    view = views[layout]().detach().requires_grad_()
    ids = target.view(2, 3).T if layout == "transposed" else target
    loss = cross_entropy(view, ids.to(DEVICE), reduction="sum")
    (grad,) = torch.autograd.grad(loss, view)
    (wanted_loss,), wanted_grad = expected_with(logits, target, [torch.ones(())], reduction="sum")
    wanted_grad = wanted_grad.view(2, 3, 515).transpose(0, 1) if layout == "transposed" else wanted_grad
    assert_loss_close(loss.cpu(), wanted_loss, scale=200.0)
    assert_grad_close(grad.cpu(), wanted_grad, torch.float32, roundings=2)


def test_small_ignored_rows_are_zero_even_where_logits_are_nan() -> None:
    logits, target = example(7, 300)
    ignored = target == -100
    logits[ignored] = float("nan")
    loss, grad = loss_and_grad(logits, target)
    assert torch.isfinite(loss)
    assert torch.count_nonzero(grad[ignored]) == 0
    loss, grad = loss_and_grad(logits, torch.full_like(target, -100))
    assert loss == 0
    assert torch.count_nonzero(grad) == 0


def test_small_target_outside_the_vocabulary_is_nan_in_its_row_only() -> None:
    logits, target = example(6, 64)
    target[2], target[3] = 64, -5
    x = logits.to(DEVICE).requires_grad_()
    loss = cross_entropy(x, target.to(DEVICE), reduction="none")
    assert torch.isnan(loss).nonzero()[:, 0].tolist() == [2, 3]


def test_more_logits_than_an_int32_can_count() -> None:
    rows, vocab = 16400, 131072
    assert rows * vocab > 2**31
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    for piece in x.split(1024):
        piece.normal_(generator=generator)
    target = torch.randint(vocab, (rows,), generator=generator, device=DEVICE)
    last = x[-3:].cpu()
    x.requires_grad_()
    loss = cross_entropy(x, target, reduction="none", inplace_backward=True)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    (wanted_loss,), wanted_grad = expected_with(last, target[-3:].cpu(), [torch.ones(3)], reduction="none")
    assert_loss_close(loss[-3:].detach().cpu(), wanted_loss, scale=20.0)
    assert_grad_close(grad[-3:].cpu(), wanted_grad, torch.bfloat16, roundings=2)


# ---- shards on one device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [[0, 1], [0, 0.5, 1], [0, 0.3, 0.31, 1], [0, 0, 0.6, 0.6, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_uneven_and_empty_shards_give_the_unsharded_result(dtype: torch.dtype, bounds: list[float]) -> None:
    logits, target = example(9, 1031, dtype)
    weights = upstream(9, dtype)
    cuts = [int(b * 1031) for b in bounds]
    loss, grad = sharded(logits.to(DEVICE), target.to(DEVICE), cuts, weights.to(DEVICE))
    (wanted_loss,), wanted_grad = expected_with(logits, target, [weights], reduction="none")
    assert_loss_close(loss.cpu(), wanted_loss, scale=20.0)
    assert_grad_close(grad.cpu(), wanted_grad, dtype, roundings=2)


def test_small_shards_with_every_option_give_the_unsharded_result() -> None:
    logits, target = example(9, 1031)
    options, weights = with_weights(OPTIONS["everything"], 1031), upstream(9)
    loss, grad = sharded(logits.to(DEVICE), target.to(DEVICE), [0, 300, 1031], weights.to(DEVICE), **on_device(options))
    (wanted_loss,), wanted_grad = expected_with(logits, target, [weights], reduction="none", **options)
    assert_loss_close(loss.cpu(), wanted_loss, scale=20.0)
    assert_grad_close(grad.cpu(), wanted_grad, torch.float32, roundings=2)


def test_small_shard_of_only_minus_infinity_contributes_nothing() -> None:
    logits, target = example(6, 512)
    target = target.where(target < 0, target % 256)
    logits[:, 256:] = -float("inf")
    loss, grad = sharded(logits.to(DEVICE), target.to(DEVICE), [0, 256, 512], torch.ones(6, device=DEVICE))
    (wanted_loss,), _ = expected_with(logits[:, :256], target, [torch.ones(6)], reduction="none")
    assert_loss_close(loss.cpu(), wanted_loss, scale=20.0)
    assert torch.isfinite(grad).all()
    assert torch.count_nonzero(grad[:, 256:]) == 0


# ---- streams, graphs, the host ---------------------------------------------------------------------------------------


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Makes torch raise where it would wait for the device. Kernels have to be compiled and loaded by then."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("inplace", [False, True])
def test_forward_and_backward_do_not_wait_for_the_device(
    request: pytest.FixtureRequest, inplace: bool, reduction: str, name: str
) -> None:
    logits, target = (t.to(DEVICE) for t in example(32, 2049, torch.bfloat16))
    options = on_device(with_weights(OPTIONS[name], 2049))
    grads = upstream(32).to(DEVICE) if reduction == "none" else torch.ones((), device=DEVICE)

    def step() -> None:
        x = logits.clone().requires_grad_()
        loss = cross_entropy(x, target, reduction=reduction, inplace_backward=inplace, **options)
        torch.autograd.grad(loss, x, grads)

    step()
    request.getfixturevalue("no_synchronisation")
    step()


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("inplace", [False, True])
def test_captured_graph_replays_with_new_logits_and_targets(inplace: bool, name: str) -> None:
    first, second = example(16, 4099, torch.bfloat16), example(17, 4099, torch.bfloat16)
    options = on_device(with_weights(OPTIONS[name], 4099))
    x, target = first[0].to(DEVICE).requires_grad_(), first[1].to(DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        loss = cross_entropy(x, target, inplace_backward=inplace, **options)
        return loss, torch.autograd.grad(loss, x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step()
    for logits, ids in ((first[0], first[1]), (second[0][:16], second[1][:16])):
        with torch.no_grad():
            x.copy_(logits)
        target.copy_(ids)
        graph.replay()
        wanted_loss, wanted_grad = loss_and_grad(logits, ids, inplace_backward=inplace, **options)
        assert torch.equal(loss.cpu(), wanted_loss)
        assert torch.equal(grad.cpu(), wanted_grad)


def test_work_is_ordered_on_the_current_stream() -> None:
    logits, target = example(64, 32768)
    wanted = loss_and_grad(logits, target)
    x, ids = logits.to(DEVICE), target.to(DEVICE)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):  # the right logits arrive on this stream only after a while
            late.add_(1.0)
        late.copy_(x).requires_grad_()
        loss = cross_entropy(late, ids)
        (grad,) = torch.autograd.grad(loss, late)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(loss.detach().cpu(), wanted[0])
    assert torch.equal(grad.cpu(), wanted[1])


def test_repeated_calls_have_the_same_bits() -> None:
    logits, target = example(257, 33001, torch.bfloat16)
    loss, grad = loss_and_grad(logits, target)
    for _ in range(5):
        again = loss_and_grad(logits, target)
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], grad)


def test_inplace_backward_needs_a_few_bytes_a_token() -> None:
    rows, vocab = 4096, 16384
    x = torch.randn(rows, vocab, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(vocab, (rows,), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(cross_entropy(x, target, inplace_backward=True), x)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 128 * rows + (1 << 20), f"{extra / rows:.0f} bytes a token beside the logits"


@pytest.mark.filterwarnings("ignore")  # inductor's own, while it is imported
def test_compiled_fullgraph_equals_eager() -> None:
    logits, target = example(33, 2049, torch.bfloat16)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        return cross_entropy(x, ids, reduction="sum") * 2.0

    x, y = (logits.to(DEVICE).requires_grad_() for _ in range(2))
    eager, compiled = step(x, target.to(DEVICE)), torch.compile(step, fullgraph=True)(y, target.to(DEVICE))
    _, wanted = expected_with(logits, target, [torch.tensor(2.0)], reduction="sum")
    for loss, leaf in ((eager, x), (compiled, y)):  # by two kernels, or by one: not the same bits
        (grad,) = torch.autograd.grad(loss, leaf)
        assert_grad_close(grad.cpu(), wanted, torch.bfloat16, roundings=2)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0.0)  # the sum over rows is inductor's
