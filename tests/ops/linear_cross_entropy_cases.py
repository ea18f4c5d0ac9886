"""What the tests of linear_cross_entropy share: examples, the plain computation in float64 and in the same dtype, and
what counts as close.

Tolerances are relative to the size (2-norm) of the whole gradient. float32: the GEMMs' sums of up to 1000 terms, 3e-6.
float64: 1e-12. In bfloat16 and float16 the logits themselves are rounded, which moves probabilities by 2^-9 (2^-12) of
the logits' size; what is promised there is to be about as close to float64 as the plain computation in the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar import reference
from tests.ops.cross_entropy_cases import DTYPES, OPTIONS

__all__ = ["DTYPES", "OPTIONS", "assert_close_to_exact", "example", "plain", "run"]

EXACT = {torch.float32: 3e-6, torch.float64: 1e-12}


def example(
    rows: Sequence[int], features: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, target; logits of about +-4, a third of the targets ignored, ends of the vocabulary hit."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, features, generator=generator, dtype=torch.float64) * 4.0 / features**0.5
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(vocab, tuple(rows), generator=generator)
    flat = target.view(-1)
    if flat.numel():
        flat[::3] = -100
        flat[0], flat[-1] = vocab - 1, 0
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), target


def options_for(name: str, vocab: int) -> dict[str, Any]:
    """An entry of OPTIONS with the class weights that it asks for, under the name that they have here."""
    options = dict(OPTIONS[name])
    if options.pop("weight", False):
        generator = torch.Generator().manual_seed(vocab)
        options["class_weight"] = 0.5 + torch.rand(vocab, generator=generator)
    return options


def run(function: Any, tensors: Sequence[Tensor], target: Tensor, grads: Any = None, **options: Any) -> list[Tensor]:
    """Outputs of the function and gradients by hidden, weight and bias, detached; `grads`: one per output."""
    hidden, weight, bias = (x.detach().clone().requires_grad_() for x in tensors)
    outputs = function(hidden, weight, target, bias=bias, **options)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    upstream = [torch.ones_like(o) for o in outputs] if grads is None else [g.to(outputs[0].dtype) for g in grads]
    torch.autograd.backward(list(outputs), upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [*(o.detach() for o in outputs), hidden.grad, weight.grad, bias.grad]


def plain(
    tensors: Sequence[Tensor], target: Tensor, dtype: torch.dtype, grads: Any = None, **options: Any
) -> list[Tensor]:
    """The reference in `dtype`, from the same numbers."""
    if options.get("class_weight") is not None:
        options["class_weight"] = options["class_weight"].double()
    return run(reference.linear_cross_entropy, [x.to(dtype) for x in tensors], target, grads, **options)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of what is exact; of gradients that are 0, the norm itself."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30)) if exact.numel() else 0.0


def assert_close_to_exact(
    found: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype, rough: Sequence[Tensor] | None = None
) -> None:
    """`rough`: the plain computation in `dtype`, for the dtypes without a fixed bound."""
    assert len(found) == len(exact)
    for index, (ours, wanted) in enumerate(zip(found, exact, strict=True)):
        assert ours.shape == wanted.shape
        error = distance(ours, wanted)
        bound = EXACT.get(dtype, 0.0)
        if rough is not None:  # both carry the rounded logits; half again as much for the chunks' roundings
            bound = 1.5 * distance(rough[index], wanted) + 2.0 * torch.finfo(dtype).eps
        assert error <= bound, f"result {index}: off by {error:.2e} of its size, allowed {bound:.2e}"
