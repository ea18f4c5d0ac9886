"""What the cross-entropy tests share: examples, float64 answers, tolerances, and a rank's shards in one process.

Tolerances. Loss and lse are float32 sums of exponentials that are good to about an ulp, so 2e-6 relative to max(1,
|lse|) holds for any vocabulary here; z-loss squares lse, and softcap costs a tanh: what `scale` is for. A gradient
entry is a probability times grad_loss, at most 1 in magnitude before that: float32 to 1e-6 relative to the largest
entry; bfloat16 and float16 add one rounding to the entry itself (2^-8 and 2^-11). float64 runs on the C library's exp:
1e-12.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import reference
from fastpar.contracts.cross_entropy import check_options, check_weight
from fastpar.ops.cross_entropy import implementation
from tests import instruction_sets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-12}

# Every option alone, and all that go together. `weight` stands for "class weights"; `with_weights` makes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "only smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.7},
    "negative scale": {"logit_scale": -1.5},
    "weights": {"weight": True},
    "smoothing and weights": {"label_smoothing": 0.2, "weight": True},
    "everything": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 8.0, "logit_scale": 1.3, "weight": True},
}


capability = instruction_sets.each()


def example(rows: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits and targets; every third target is ignored, the first and the last column are targets."""
    generator = torch.Generator().manual_seed(rows * 10007 + vocab)
    logits = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[0], target[-1] = 0, vocab - 1
    target[1:-1:3] = -100
    return logits, target


def with_weights(options: dict[str, Any], vocab: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The options with class weights of [0.5, 1.5) where they ask for some."""
    if not options.get("weight"):
        return options
    generator = torch.Generator().manual_seed(vocab)
    weight = 0.5 + torch.rand(vocab, generator=generator, dtype=torch.float64)
    return {**options, "weight": weight.to(torch.float64 if dtype == torch.float64 else torch.float32)}


def upstream(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient that is different for every row, and negative for some."""
    return torch.linspace(-1.0, 2.0, rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def expected(
    logits: Tensor, target: Tensor, reduction: str = "mean", weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient by torch in float64; `weights` are the upstream gradients of reduction "none"."""
    x = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(x.view(-1, x.shape[-1]), target.reshape(-1), reduction=reduction)
    loss.backward(None if weights is None else weights.double().reshape(-1))
    assert x.grad is not None
    return loss.detach().view(target.shape if reduction == "none" else ()), x.grad


def expected_with(
    logits: Tensor, target: Tensor, grads: Sequence[Tensor], **options: Any
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(loss[, lse]) and the gradient by the float64 reference; one upstream gradient per output."""
    x = logits.detach().double().requires_grad_()
    if options.get("weight") is not None:
        options = {**options, "weight": options["weight"].double()}
    outputs = reference.vocab_parallel_cross_entropy(x, target, **options)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    torch.autograd.backward(list(outputs), [g.double() for g in grads])
    assert x.grad is not None
    return tuple(o.detach() for o in outputs), x.grad


def assert_loss_close(actual: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    tolerance = 1e-12 if actual.dtype == torch.float64 else 2e-6
    assert actual.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance * max(1.0, scale))


def assert_grad_close(actual: Tensor | None, wanted: Tensor, dtype: torch.dtype, roundings: float = 1) -> None:
    assert actual is not None
    assert actual.dtype == dtype
    floor = 1e-12 if dtype == torch.float64 else 1e-6
    peak = max(wanted.abs().max().item() if wanted.numel() else 0.0, 1e-30)
    # float16 gradients below 2^-14 are subnormal and round to a multiple of 2^-24.
    atol = floor * peak + (2.0**-25 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(
        actual.double(), wanted.double(), rtol=roundings * ROUNDING[dtype], atol=roundings * atol
    )


def sharded(
    logits: Tensor, target: Tensor, bounds: list[int], grad_loss: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Per-row loss and the gradient of shards [bounds[r], bounds[r + 1]), as ranks would compute them."""
    ops, total = implementation(logits), logits.shape[1]
    weight = options.pop("weight", None)
    terms = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
    checked = check_options(**{**terms, **options})
    weight, weight_sum = check_weight(weight, total, logits, checked)
    transform = (checked.softcap, checked.logit_scale)
    shards = [(s, logits[:, s:e]) for s, e in itertools.pairwise(bounds)]
    gathered = torch.stack(
        [ops.stats(x, target, weight, s, total, -100, checked.smoothing, *transform) for s, x in shards]
    )
    loss, lse = ops.merge(gathered, target, weight, weight_sum, total, *checked[:3])
    grads = [ops.backward(x, lse, target, weight, weight_sum, grad_loss, None, s, total, *checked) for s, x in shards]
    return loss, torch.cat(grads, dim=1)
