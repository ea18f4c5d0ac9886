"""Rows of any finite logits: probabilities, losses and gradients of rows whose maximum is beyond what a float64
normaliser could hold beside the logarithm of the sum; rows of finfo.min, masks, soft caps larger than the logits.

What is wanted is torch's in float64, of logits as they are rounded when they are scaled. Tolerances: float32's, times
what a soft cap makes of them (its z is a float32 number, so a log-probability has an error of |z| 6e-8).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops
from fastpar.contracts.cross_entropy import below_lse, join_lse
from fastpar.reference import cross_entropy as reference
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import ROUNDING, capability
from tests.ops.vocab_cases import WORLD_SIZES, own_range, world

__all__ = ["capability"]  # a fixture: used by name

V = 33
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "negative": {"logit_scale": -1.0},
    "scaled": {"logit_scale": 0.7},
    "soft cap": {"softcap": 1e4},
    "large soft cap": {"softcap": 1e8},
}


def rows(dtype: torch.dtype, largest: float = math.inf) -> Tensor:
    """Equal logits, equal ones among smaller ones, and random ones, of every size; the ends; masks."""
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(5)
    noise = torch.randn(V, generator=generator, dtype=torch.float64)
    sizes = [s for s in (1.0, 1e4, 3e9, 1e10, 1e12, 1e17, 1e30, 3e38) if s < min(info.max, largest)]
    found = [torch.full((V,), sign * size, dtype=torch.float64) for size in sizes for sign in (1.0, -1.0)]
    for size in sizes:
        found += [
            torch.where(torch.arange(V) % 3 == 0, -size, size / 2).double(),
            (noise * size / 4).clamp(-size, size),
        ]
    if largest > info.max:
        found += [torch.full((V,), info.min, dtype=torch.float64), torch.full((V,), info.max, dtype=torch.float64)]
        found += [torch.where(torch.arange(V) == 3, info.max, info.min)]
    masked = torch.arange(V) % 2 == 0
    found += [noise.masked_fill(masked, info.min), noise.masked_fill(masked, -math.inf)]
    return torch.stack([x.double() for x in found]).to(dtype)


def targets(count: int) -> Tensor:
    return torch.where(torch.arange(count) % 2 == 0, 1, 5)


def z_of(x: Tensor, options: dict[str, Any]) -> Tensor:
    """z in float64 of logits in float64, scaled ones rounded as they are in float32; differentiable."""
    scale, cap = options.get("logit_scale", 1.0), options.get("softcap", 0.0)
    z = x * scale
    z = z + ((x.detach().float() * scale).double() - z.detach()).nan_to_num(nan=0.0)
    return cap * torch.tanh(z / cap) if cap else z


def assert_same(actual: Tensor, wanted: Tensor, tolerance: float) -> None:
    wanted = wanted.to(torch.float32).double()
    torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def tolerance(dtype: torch.dtype, options: dict[str, Any]) -> float:
    return max(2e-5 if "softcap" in options else 5e-6, ROUNDING[dtype] * 1.1)


def case(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits, z in float64 with a graph back to `x64`, and the options."""
    options = OPTIONS[name]
    largest = {"soft cap": 1e5, "large soft cap": 10.0, "scaled": 2e4}.get(name, math.inf)
    if name == "scaled" and dtype != torch.float16:
        largest = math.inf
    x = rows(dtype, largest)
    if name == "scaled":
        # Below 2^30 a scaled z is rounded when it travels, which costs |z| 6e-8 of a loss: those rows are not meant.
        size = x.float().amax(dim=1).abs() * 0.7
        x = x[((size < 1e3) | (size >= 2.0**30)) & (x.abs().amax(dim=1) < 1e30)]
    if "smoothing" in name:
        x = x[x.isfinite().all(dim=1)]  # a mask of -inf has an infinite loss
    if name == "negative":
        x = x[x.isfinite().all(dim=1)]
    return x, x.double().requires_grad_(), options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_of_large_logits_matches_float64(capability: str, name: str, dtype: torch.dtype) -> None:
    x, wide, options = case(name, dtype)
    z, target = z_of(wide, options), targets(len(x))
    smoothing = options.get("label_smoothing", 0.0)
    wanted = F.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), wide)
    leaf = x.clone().requires_grad_()
    loss, lse = ops.vocab_parallel_cross_entropy(leaf, target, reduction="none", return_lse=True, **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert_same(loss, wanted, tolerance(torch.float32, options))
    assert_same(lse, z.logsumexp(dim=-1), tolerance(torch.float32, options))
    assert_same(grad, wanted_grad, tolerance(dtype, options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "smoothing"])
def test_the_softmax_family_of_large_logits_matches_float64(capability: str, name: str, dtype: torch.dtype) -> None:
    x, wide, options = case(name, dtype)
    target, out = targets(len(x)), {"dtype": torch.float32}
    log_p = z_of(wide, options).log_softmax(dim=-1)
    p = log_p.exp()
    upstream = torch.linspace(-1.0, 2.0, V).expand(len(x), V)
    calls: dict[str, tuple[Any, Tensor]] = {
        "softmax": (lambda leaf: ops.vocab_parallel_softmax(leaf, **options, **out), p),
        "log-softmax": (lambda leaf: ops.vocab_parallel_log_softmax(leaf, **options, **out), log_p),
        "log-prob": (
            lambda leaf: ops.vocab_parallel_log_prob(leaf, target, **options),
            log_p.gather(1, target[:, None]).squeeze(1),
        ),
        "entropy": (lambda leaf: ops.vocab_parallel_entropy(leaf, **options), -torch.where(p > 0, p * log_p, 0).sum(1)),
    }
    for call, (function, wanted) in calls.items():
        leaf = x.clone().requires_grad_()
        found = function(leaf)
        assert_same(found, wanted, 2e-5)
        if call == "entropy":
            continue  # autograd's of p log p is NaN where p is 0
        grad_out = upstream if found.dim() == 2 else upstream[:, -1]
        (grad,) = torch.autograd.grad(found, leaf, grad_out)
        (wanted_grad,) = torch.autograd.grad(wanted, wide, grad_out.double(), retain_graph=True)
        assert_same(grad, wanted_grad, max(2e-5, tolerance(dtype, options)))


def run_shards(name: str) -> list[Tensor]:
    """Loss, log-probability, and the gradients by this rank's columns, of a loss and of a softmax."""
    comm, options = world(), OPTIONS[name]
    x, _, _ = case(name, torch.float32)
    own, target = own_range(V, comm), targets(len(x))
    part = x[:, own[0] : own[1]].clone().requires_grad_()
    where: dict[str, Any] = {"group": comm, "vocab_range": own}
    loss = ops.vocab_parallel_cross_entropy(part, target, reduction="none", **where, **options)
    (grad,) = torch.autograd.grad(loss.sum(), part)
    if "smoothing" in name:
        return [loss.detach(), grad]
    softmax = ops.vocab_parallel_softmax(part, **where, **options)
    return [
        loss.detach(),
        grad,
        softmax.detach(),
        ops.vocab_parallel_log_prob(part.detach(), target, **where, **options),
    ]


@pytest.mark.parametrize("name", ["plain", "smoothing", pytest.param("scaled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in WORLD_SIZES if n > 2)])
def test_large_logits_on_several_ranks_match_float64(world_size: int, name: str) -> None:
    x, wide, options = case(name, torch.float32)
    z, target = z_of(wide, options), targets(len(x))
    wanted = F.cross_entropy(z, target, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), wide, retain_graph=True)
    results = run_ranks(world_size, run_shards, name)
    for result in results:
        assert_same(result[0], wanted, 1e-5)
        assert torch.equal(result[0], results[0][0])
    assert_same(torch.cat([result[1] for result in results], dim=1), wanted_grad, 1e-5)
    if "smoothing" not in name:
        log_p = z.log_softmax(dim=-1)
        assert_same(torch.cat([result[2] for result in results], dim=1), log_p.exp(), 1e-5)
        assert_same(results[0][3], log_p.gather(1, target[:, None]).squeeze(1), 1e-5)


def run_linear(_: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient by the hidden state of rows with equal logits of 1e12 and of 1e17."""
    comm = world()
    hidden = torch.tensor([[1e12], [1e17], [1.0]], requires_grad=True)
    weight = torch.ones(4 // comm.size, 1)
    loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 3, 1]), group=comm, reduction="none")
    loss.sum().backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


@pytest.mark.parametrize("world_size", [1, 2])
def test_linear_cross_entropy_of_large_logits_matches_float64(world_size: int) -> None:
    for loss, grad in run_ranks(world_size, run_linear, 0):
        torch.testing.assert_close(loss, torch.full((3,), math.log(4.0)))
        torch.testing.assert_close(grad, torch.zeros(3, 1), atol=1e-6, rtol=0.0)  # p - 1 and three p of one weight


@pytest.mark.parametrize("name", ["plain", "smoothing", "scaled"])
def test_the_plain_functions_of_other_devices_match_float64(name: str) -> None:
    x, wide, options = case(name, torch.float32)
    z, target, smoothing = z_of(wide, options), targets(len(x)), options.get("label_smoothing", 0.0)
    wanted = F.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), wide)
    terms = (-100, smoothing, 0.0, 0.0, options.get("logit_scale", 1.0))
    loss, _, grad = reference.forward_backward(x, target, None, None, torch.ones(len(x)), *terms)
    assert_same(loss, wanted, 5e-6)
    assert_same(grad, wanted_grad, 5e-6)


def test_a_normaliser_in_one_double_keeps_both_of_its_parts() -> None:
    maximum = torch.tensor([0.0, 5.0, -(2.0**30), 1e10, -1e17, 3.4e38, 2.0**31]).double()
    lse = join_lse(maximum, torch.full_like(maximum, 3.5), torch.float32)
    torch.testing.assert_close(below_lse(maximum.float(), lse), torch.full_like(maximum, -3.5), rtol=0.0, atol=2.0**-22)
    assert torch.equal(lse.float(), (maximum + 3.5).float())


@pytest.mark.parametrize("softcap", [2.0**30, 1e17])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, **o: ops.vocab_parallel_cross_entropy(x, torch.zeros(2, dtype=torch.int64), **o),
        lambda x, **o: ops.linear_cross_entropy(x, torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), **o),
        ops.vocab_parallel_softmax,
        ops.vocab_parallel_log_softmax,
        ops.vocab_parallel_entropy,
        lambda x, **o: ops.vocab_parallel_log_prob(x, torch.zeros(2, dtype=torch.int64), **o),
        lambda x, **o: reference.vocab_parallel_cross_entropy(x, torch.zeros(2, dtype=torch.int64), **o),
    ],
)
def test_soft_caps_too_large_for_float32_are_refused_whatever_the_backend(call: Any, softcap: float) -> None:
    with pytest.raises(ValueError, match=r"softcap must be below 2\*\*30, got"):
        call(torch.randn(2, 3), softcap=softcap)
