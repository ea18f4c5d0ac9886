"""Vocab-parallel softmax and log-softmax against float64: instruction sets, dtypes, options, shards, edge cases.

Tolerances. A probability is an exponential good to an ulp or two, times the error of float32 sums (1e-6 relative); a
log-probability has an error of 2e-6 where |z - lse| is of the order of 10. 16-bit results add one rounding. Softcap
costs tanh's error times the cap, 2e-6 at 5.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.ops.vocab_softmax import implementation
from fastpar.reference import vocab_softmax as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES, ROUNDING, capability
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_part, own_range, results_of, world

__all__ = ["capability"]  # a fixture: used by name

K = torch.ops.fastpar
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"logit_scale": -1.5},
    "softcap": {"softcap": 5.0, "logit_scale": 0.7},
}
FUNCTIONS = ["vocab_parallel_softmax", "vocab_parallel_log_softmax"]


def assert_close(actual: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    floor = 1e-12 if actual.dtype == torch.float64 else 3e-6
    # float16 numbers below 2^-14 are multiples of 2^-24.
    atol = floor * scale + (2.0**-25 if actual.dtype == torch.float16 else 0.0)
    rtol = max(floor, ROUNDING[actual.dtype]) * 1.01
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=rtol, atol=atol)


# ---- one rank, against float64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradient_match_float64(capability: str, dtype: torch.dtype, name: str) -> None:
    for vocab, option in [(1, "plain"), (37, "scale"), (1031, "plain"), (1031, "softcap"), (5003, "scale")]:
        logits, upstream = normal(2, 3, vocab, dtype=dtype), normal(2, 3, vocab, scale=1.0, seed=1, dtype=dtype)
        options = OPTIONS[option]
        (out,), grad = results_of(getattr(ops, name), logits, [upstream], **options)
        (wanted,), wanted_grad = results_of(getattr(reference, name), logits.double(), [upstream], **options)
        assert out.dtype == dtype
        assert grad.dtype == dtype
        assert_close(out, wanted, scale=1.0 if name == "vocab_parallel_softmax" else 3.0)
        # The row's sum of p dy or dy is subtracted, and rounds: relative to the largest entry.
        assert_close(grad, wanted_grad, scale=max(1e-3, wanted_grad.abs().max().item()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wider_dtype_is_computed_from_the_same_logits(capability: str, name: str) -> None:
    logits, upstream = normal(5, 1031, dtype=torch.bfloat16), normal(5, 1031, scale=1.0, seed=1)
    for dtype in (torch.float32, torch.float16, torch.float64):
        (out,), grad = results_of(getattr(ops, name), logits, [upstream.to(dtype)], dtype=dtype)
        (wanted,), wanted_grad = results_of(getattr(reference, name), logits.double(), [upstream.to(dtype)])
        assert out.dtype == dtype
        # float64 was asked for, but computed in float32.
        assert_close(out.float() if dtype == torch.float64 else out, wanted, scale=3.0)
        assert_close(grad, wanted_grad, scale=wanted_grad.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_beyond_the_caches_are_the_same(capability: str, dtype: torch.dtype) -> None:
    # Above 8 MiB they are stored past the caches, which needs aligned addresses: odd rows start misaligned.
    vocab = 40961 if dtype == torch.float32 else 81921
    logits = normal(61, vocab, dtype=dtype)
    assert logits.numel() * logits.element_size() > 8 << 20
    for name in FUNCTIONS:
        (out,), grad = results_of(getattr(ops, name), logits, [logits])
        (row,), row_grad = results_of(getattr(ops, name), logits[7:8], [logits[7:8]])
        assert torch.equal(out[7:8], row)
        assert torch.equal(grad[7:8], row_grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_with_any_strides_give_the_same_bits(name: str) -> None:
    whole = normal(6, 4, 70)
    function = getattr(ops, name)
    for view in (whole[::2, 1:], whole.transpose(0, 1), whole[..., ::3], whole[:1].expand(5, -1, -1)):
        (out,), grad = results_of(function, view.contiguous(), [view])
        x = whole.clone().requires_grad_()
        again = function(view)
        assert torch.equal(out, again)
        strided = function(x[::2, 1:])
        strided.backward(whole[::2, 1:])
        assert x.grad is not None
        if view.shape == strided.shape:
            assert torch.equal(x.grad[::2, 1:], grad)


def test_large_logits_keep_float32_accuracy(capability: str) -> None:
    # With lse in float32 probabilities would be off by 5e-4 here.
    logits = normal(4, 513) + 1e4
    (out,), _ = results_of(ops.vocab_parallel_log_softmax, logits, [logits])
    assert_close(out, logits.double().log_softmax(-1), scale=3.0)
    assert_close(ops.vocab_parallel_softmax(logits), logits.double().softmax(-1))


def test_infinite_logits_and_nan_behave_as_in_torch(capability: str) -> None:
    logits = normal(5, 70)
    logits[0, 5:] = -math.inf
    logits[1] = -math.inf
    logits[2, 3] = math.nan
    logits[3, 69] = math.inf
    logits[4, 0] = -math.inf
    for name, function in [(FUNCTIONS[0], torch.softmax), (FUNCTIONS[1], torch.log_softmax)]:
        upstream = normal(5, 70, seed=2)
        (out,), grad = results_of(getattr(ops, name), logits, [upstream])
        (wanted,), wanted_grad = results_of(function, logits, [upstream], -1)
        torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)
        for row in (0, 4):
            torch.testing.assert_close(grad[row], wanted_grad[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_batches_and_vocabularies_work(name: str) -> None:
    for shape in [(0, 7), (3, 0), (2, 0, 5)]:
        (out,), grad = results_of(getattr(ops, name), torch.zeros(shape), [torch.zeros(shape)])
        assert out.shape == grad.shape == shape


def test_gradcheck_passes() -> None:
    x = normal(2, 5, dtype=torch.float64).requires_grad_()
    for name in FUNCTIONS:
        function = getattr(ops, name)
        assert torch.autograd.gradcheck(lambda t, f=function: f(t, softcap=4.0, logit_scale=0.5), (x,))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int) -> list[dict[str, Any]]:
    comm, results = world(), []
    where = own_range(vocab, comm)
    for name in FUNCTIONS:
        for option, options in OPTIONS.items():
            x = own_part(normal(7, vocab), where)
            upstream = normal(7, vocab, scale=1.0, seed=1)[:, where[0] : where[1]]
            with count_collectives() as forward:
                out = getattr(ops, name)(x, group=comm, vocab_range=where, **options)
            with count_collectives() as backward:
                out.backward(upstream)
            results.append({"case": (name, option), "out": out.detach(), "grad": x.grad})
            results[-1]["collectives"] = (forward.total, backward.total)
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_match_float64_with_one_collective_each_way(world_size: int) -> None:
    ranks = run_ranks(world_size, run_sharded, 103)
    logits, upstream = normal(7, 103), normal(7, 103, scale=1.0, seed=1)
    for parts in zip(*ranks, strict=True):
        name, option = parts[0]["case"]
        (wanted,), wanted_grad = results_of(getattr(reference, name), logits.double(), [upstream], **OPTIONS[option])
        assert all(part["collectives"] == ((1, 1) if world_size > 1 else (0, 0)) for part in parts)
        assert_close(torch.cat([part["out"] for part in parts], dim=1), wanted, scale=3.0)
        grad = torch.cat([part["grad"] for part in parts], dim=1)
        assert_close(grad, wanted_grad, scale=wanted_grad.abs().max().item())


def run_reference_and_errors() -> tuple[Tensor, Tensor | None, str]:
    comm = world()
    where = own_range(20, comm)
    x = own_part(normal(3, 20), where)
    out = reference.vocab_parallel_softmax(x, group=comm, vocab_range=where)
    out.backward(normal(3, 20, seed=1)[:, where[0] : where[1]])
    with pytest.raises(ValueError, match="do not tile") as error:
        ops.vocab_parallel_softmax(torch.zeros(2, 3 + comm.rank), group=comm)
    return out.detach(), x.grad, str(error.value)


def test_the_reference_is_the_same_function_on_ranks_and_errors_reach_all() -> None:
    ranks = run_ranks(2, run_reference_and_errors)
    (wanted,), wanted_grad = results_of(torch.softmax, normal(3, 20).double(), [normal(3, 20, seed=1)], -1)
    assert_close(torch.cat([rank[0] for rank in ranks], dim=1), wanted)
    assert_close(torch.cat([rank[1] for rank in ranks], dim=1), wanted_grad)
    assert ranks[0][2] == ranks[1][2]
    assert "need vocab_range" in ranks[0][2]


def test_worked_example() -> None:
    logits, ops_ = torch.tensor([[0.0, math.log(3.0)]]), implementation(torch.empty(0))
    shards = [logits[:, :1], logits[:, 1:]]
    gathered = torch.stack([ops_.stats(x, None, r, 2, -100, False, 0.0, 1.0) for r, x in enumerate(shards)])
    assert gathered[:, 0].tolist() == [[0.0, 1.0, 0.0], [pytest.approx(math.log(3)), 1.0, 0.0]]
    lse, _, _ = ops_.merge(gathered, None, -100)
    assert lse.tolist() == [pytest.approx(math.log(4))]
    upstream = torch.tensor([[1.0, 0.0]])
    for log, out, grad in [
        (False, [0.25, 0.75], [0.1875, -0.1875]),
        (True, [-math.log(4), math.log(0.75)], [0.75, -0.75]),
    ]:
        function = getattr(ops, FUNCTIONS[log])
        (found,), found_grad = results_of(function, logits, [upstream])
        torch.testing.assert_close(found, torch.tensor([out]))
        torch.testing.assert_close(found_grad, torch.tensor([grad]))


# ---- what torch expects of an op -------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_opcheck_passes_for_every_op(softcap: float) -> None:
    logits, ids = normal(2, 3, 37), torch.tensor([[1, 2], [-100, 36], [4, 4], [0, 1], [2, 3], [5, 5]])
    options = (softcap, 1.5)
    check = torch.library.opcheck
    check(K.vocab_softmax_stats.default, (logits, ids, 0, 37, -100, True, *options))
    gathered = K.vocab_softmax_stats(logits, ids, 0, 37, -100, True, *options).unsqueeze(0)
    check(K.vocab_softmax_merge.default, (gathered, ids, -100))
    lse, entropy, log_prob = K.vocab_softmax_merge(gathered, ids, -100)
    for log in (False, True):
        check(K.vocab_softmax_normalize.default, (logits.bfloat16(), lse, log, not log, *options))
        check(K.vocab_softmax_dot.default, (logits, lse, logits, log, *options))
        check(K.vocab_softmax_backward.default, (logits, lse, logits, lse if log else None, log, *options))
    backward = (logits, lse, ids, log_prob, entropy, entropy.float(), 0, -100, *options)
    check(K.vocab_log_prob_backward.default, backward)
    check(K.vocab_log_prob_backward.default, (logits, lse, None, None, entropy, entropy.float(), 0, -100, *options))


def test_compiled_fullgraph_equals_eager() -> None:
    logits = normal(4, 50)
    for name in FUNCTIONS:
        function = getattr(ops, name)
        step = lambda x, f=function: f(x * 2.0, dtype=torch.float32)  # noqa: E731
        (out,), grad = results_of(torch.compile(step, fullgraph=True, backend="aot_eager"), logits, [logits])
        (wanted,), wanted_grad = results_of(step, logits, [logits])
        assert torch.equal(out, wanted)
        assert torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fallback_for_devices_without_kernels_is_the_same_function(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, upstream = normal(5, 90), normal(5, 90, seed=1)
    (out,), grad = results_of(getattr(ops, name), logits, [upstream], **OPTIONS[option])
    monkeypatch.setattr("fastpar.ops.vocab_softmax.implementation", lambda x: reference_module)
    (again,), again_grad = results_of(getattr(ops, name), logits, [upstream], **OPTIONS[option])
    torch.testing.assert_close(out, again, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(grad, again_grad, rtol=2e-5, atol=1e-4)


def test_gradients_of_the_gradient_are_refused() -> None:
    x = normal(2, 5).requires_grad_()
    (grad,) = torch.autograd.grad(ops.vocab_parallel_softmax(x)[0, 0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="vocab_parallel_softmax has a first derivative only"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.zeros(3, dtype=torch.int64)}, TypeError, "logits must be one of"),
        ({"logits": torch.tensor(1.0)}, ValueError, "at least one dim"),
        ({"dtype": torch.int32}, TypeError, "dtype must be None or one of"),
        ({"softcap": -1.0}, ValueError, "softcap must be None or a finite number > 0"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must be finite and not 0"),
        ({"vocab_range": (0, 9, 9)}, ValueError, "names 9 columns, but there are 8"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"logits": torch.zeros(2, 8), **arguments}
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_log_softmax(call["logits"], **{k: v for k, v in call.items() if k != "logits"})
