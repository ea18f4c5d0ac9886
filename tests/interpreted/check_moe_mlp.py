"""Feed-forward experts in Triton against the reference in float64; run by tests/test_moe_triton.py in the interpreter.

Sums are float32, of 10 to 100 terms of size 1. Memory that is not initialised holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastpar.kernels import moe_mlp as kernels
from fastpar.kernels.moe_mlp import Experts
from fastpar.reference import moe_mlp as reference
from fastpar.reference.moe_mlp import ExpertRule

TOKENS, TOP_K, EXPERTS, HIDDEN, FEATURES = 19, 3, 5, 24, 20


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(rule: ExpertRule, biases: bool, seed: int = 0) -> tuple[list[Tensor], Experts]:
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
    return [normal(TOKENS, HIDDEN), indices, weights, normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN)], Experts(
        first, second, *extra
    )


@pytest.mark.parametrize(
    ("rule", "biases"),
    [
        (ExpertRule(), False),
        (ExpertRule(), True),
        (ExpertRule("gelu", weigh="before"), True),
        (ExpertRule(weigh="input", transposed=True), True),
        (ExpertRule("clamped_swiglu", transposed=True, interleaved=True, limit=1.0), True),
    ],
    ids=["plain", "biases", "weights before", "weights on the input", "as gpt-oss"],
)
def test_outputs_and_all_gradients_match_float64(rule: ExpertRule, biases: bool) -> None:
    (x, indices, weights, add, dout), experts = problem(rule, biases)
    out, saved = kernels.forward(x, indices, weights, experts, rule, add)
    found = kernels.backward(dout, x, indices, weights, experts, rule, saved)
    leaves = [t.double().requires_grad_() for t in (x, weights, *experts) if t is not None]
    exact = reference.moe_mlp(
        leaves[0], indices, leaves[1], leaves[2], leaves[3], rule=rule, add=add.double(),
        **dict(zip(("first_bias", "second_bias"), leaves[4:], strict=False)),
    )  # fmt: skip
    wanted = torch.autograd.grad(exact, leaves, dout.double())
    torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    names = ("x", "weights", *(name for name, t in experts._asdict().items() if t is not None))
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
    wanted = reference.moe_mlp(x, indices, weights, experts.first, experts.second)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for e in range(EXPERTS):
        used = kind == "one expert" and e == 2
        assert bool(grads.experts.first[e].count_nonzero()) == used
        assert bool(grads.experts.second[e].count_nonzero()) == used
    assert torch.isfinite(grads.x).all()
    assert torch.isfinite(grads.weights).all()
