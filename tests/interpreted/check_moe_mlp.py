"""Feed-forward experts in Triton against the reference in float64; run by testmlp_triton.py in the interpreter.

Sums are float32, of 10 to 100 terms of size 1. Memory that is not initialised holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar.contracts.moe import ExpertRule
from fastpar.kernels import moe_mlp as kernels
from fastpar.kernels.moe_mlp import ExpertParams
from fastpar.ops.moe import mlp_triton
from fastpar.ops.moe.plan import Padding
from tests.moe.moe_calls import reference_mlp

TOKENS, TOP_K, EXPERTS, HIDDEN, FEATURES = 19, 3, 5, 24, 20


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(rule: ExpertRule, biases: bool, seed: int = 0) -> tuple[list[Tensor], ExpertParams]:
    """x, indices, weights, add, dout, and experts; the last expert has no token, and some choices go nowhere."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    indices = torch.randint(-1, EXPERTS - 1, (TOKENS, TOP_K), generator=generator)
    indices[3], indices[5, 1] = -1, EXPERTS
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    width = FEATURES * (1 + rule.is_gated)
    first, second = normal(EXPERTS, width, HIDDEN) / 4, normal(EXPERTS, HIDDEN, FEATURES) / 4
    if rule.transposed:
        first, second = (w.transpose(1, 2).contiguous() for w in (first, second))
    extra = (normal(EXPERTS, width), normal(EXPERTS, HIDDEN)) if biases else ()
    return [normal(TOKENS, HIDDEN), indices, weights, normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN)], ExpertParams(
        first, second, *extra
    )


@pytest.mark.parametrize(
    ("rule", "biases"),
    [
        (ExpertRule(), True),
        (ExpertRule("gelu", weigh="before"), False),
        (ExpertRule(weigh="input", transposed=True), True),
        (ExpertRule("clamped_swiglu", transposed=True, interleaved=True, limit=1.0), True),
    ],
    ids=["biases", "weights before", "weights on the input", "as gpt-oss"],
)
def test_outputs_and_all_gradients_match_float64(rule: ExpertRule, biases: bool) -> None:
    (x, indices, weights, add, dout), experts = problem(rule, biases)
    out, saved = kernels.forward(x, indices, weights, experts, rule, add)
    found = kernels.backward(dout, x, indices, weights, experts, rule, saved)
    leaves = [t.double().requires_grad_() for t in (x, weights, *experts) if t is not None]
    exact = reference_mlp(
        leaves[0], indices, leaves[1], leaves[2], leaves[3], rule=rule, add=add.double(),
        **dict(zip(("first_bias", "second_bias"), leaves[4:], strict=False)),
    )  # fmt: skip
    wanted = torch.autograd.grad(exact, leaves, dout.double())
    torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    names = ("x", "weights", *(name for name, t in experts._asdict().items() if t is not None))
    assert found.x is not None
    assert found.experts is not None
    grads = [found.x, found.weights, *(t for t in found.experts if t is not None)]
    for name, grad, value in zip(names, grads, wanted, strict=True):
        assert grad.shape == value.shape
        torch.testing.assert_close(grad.double(), value, rtol=1e-5, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert found.experts.first[-1].count_nonzero() == found.experts.second[-1].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["no tokens", "nowhere", "one expert"])
def test_odd_routing_is_right_too(kind: str) -> None:
    rule = ExpertRule()
    (x, indices, weights, _, dout), experts = problem(rule, False)
    if kind == "no tokens":
        x, indices, weights, dout = x[:0], indices[:0], weights[:0], dout[:0]
    else:
        indices = torch.full_like(indices, -1 if kind == "nowhere" else 2)
    out, saved = kernels.forward(x, indices, weights, experts, rule)
    grads = kernels.backward(dout, x, indices, weights, experts, rule, saved)
    assert grads.x is not None
    assert grads.experts is not None
    wanted = reference_mlp(x, indices, weights, experts.first, experts.second)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for e in range(EXPERTS):
        used = kind == "one expert" and e == 2
        assert bool(grads.experts.first[e].count_nonzero()) == used
        assert bool(grads.experts.second[e].count_nonzero()) == used
    assert torch.isfinite(grads.x).all()
    assert torch.isfinite(grads.weights).all()


def test_autograd_runs_the_kernels_and_skips_what_is_frozen() -> None:
    rule = ExpertRule(weigh="before")
    (x, indices, weights, add, dout), experts = problem(rule, False)
    leaves = [t.clone().requires_grad_() for t in (x, weights, add, experts.first, experts.second)]
    out = mlp_triton.moe_mlp(leaves[0], indices, leaves[1], ExpertParams(*leaves[3:]), rule, leaves[2])
    found = torch.autograd.grad(out, leaves, dout)
    exact = [t.clone().requires_grad_() for t in (x, weights, add, experts.first, experts.second)]
    wanted = reference_mlp(exact[0], indices, exact[1], *exact[3:], rule=rule, add=exact[2])
    for grad, value in zip(found, torch.autograd.grad(wanted, exact, dout), strict=True):
        torch.testing.assert_close(grad, value, rtol=1e-4, atol=1e-4)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("grouped_wgrad", "sum_rows"):
            original = getattr(kernels, name)
            patch.setattr(kernels, name, lambda *a, name=name, f=original, **k: (calls.append(name), f(*a, **k))[1])
        frozen = mlp_triton.moe_mlp(x, indices, leaves[1], experts, rule, None)
        frozen.backward(dout)
    assert calls == ["sum_rows"], "frozen experts and a frozen input take no products"
    torch.testing.assert_close(leaves[1].grad, found[1])


def test_a_second_derivative_is_refused() -> None:
    rule = ExpertRule()
    (x, indices, weights, _, dout), experts = problem(rule, False)
    x.requires_grad_()
    out = mlp_triton.moe_mlp(x, indices, weights, experts, rule, None)
    (grad,) = torch.autograd.grad(out, x, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_mlp has a first derivative only"):
        grad.sum().backward()


def test_only_what_the_kernels_take_goes_to_them() -> None:
    class On:
        def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
            self.device, self.dtype = torch.device(device), dtype

    cuda: Any = On("cuda")
    assert mlp_triton.applies(cuda, cuda, size=1, padding=Padding())
    assert not mlp_triton.applies(cuda, cuda, size=2, padding=None)
    assert not mlp_triton.applies(cuda, cuda, size=1, padding=Padding(align=8))
    others: list[Any] = [On("cpu"), On("cuda", torch.float64)]
    for other in others:
        assert not mlp_triton.applies(other, other, size=1, padding=None)
    assert not mlp_triton.applies(cuda, others[1], size=1, padding=None)
