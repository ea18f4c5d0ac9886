"""Logits, options, a float64 reference and the calls of the CUDA cross-entropy kernels, for their tests.

Tolerances. A float32 gradient is within 2e-6 of the terms it is the difference of: two units in the last place of 2^x,
1e-8 |z - lse| of log2(e), and a few roundings; 1e-5 with a softcap of 20, whose z has an error of 2e-6 and passes it on
to exp(z). A 16-bit gradient may differ from that by one rounding to its dtype, half a unit in the last place, no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.device_array import DeviceArray, bfloat16_to_float, float_to_bfloat16

IGNORED = -100
DTYPES = ("float32", "bfloat16", "float16", "float64")
STORAGE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "float64": np.float64}
PACKET = {"float32": 4, "bfloat16": 8, "float16": 8, "float64": 2}
# half a unit in the last place, relative; the smallest number that is not 0
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}
TINY = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24, "float64": 2.0**-1022}


def kernels() -> Any:
    import fastpar_emulation as emulation

    return emulation.cross_entropy


def compute(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def to_storage(x: np.ndarray, dtype: str) -> np.ndarray:
    return float_to_bfloat16(x) if dtype == "bfloat16" else x.astype(STORAGE[dtype])


def to_float64(stored: np.ndarray, dtype: str) -> np.ndarray:
    return (bfloat16_to_float(stored) if dtype == "bfloat16" else stored).astype(np.float64)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as the dtype holds it, in float64."""
    return to_float64(to_storage(np.asarray(x), dtype), dtype)


class Rows:
    """Logits or a gradient on the device: [N, V] rows, any distance apart, from any address on."""

    def __init__(self, shape: tuple[int, int], dtype: str, row_stride: int | None = None, offset: int = 0) -> None:
        self.dtype = dtype
        self.memory = DeviceArray(shape, STORAGE[dtype], row_stride, offset)

    @classmethod
    def of(cls, x: np.ndarray, dtype: str, row_stride: int | None = None, offset: int = 0) -> Rows:
        rows = cls(x.shape, dtype, row_stride, offset)
        rows.memory.array[...] = to_storage(x, dtype)
        return rows

    def read(self) -> np.ndarray:
        self.memory.check_gaps()
        return to_float64(np.array(self.memory.array), self.dtype)

    def argument(self) -> dict[str, Any]:
        count, vocab = self.memory.array.shape
        strides = [self.memory.row_stride]
        return {
            "dtype": self.dtype,
            "data": self.memory.buffer,
            "sizes": [count],
            "strides": strides,
            "num_rows": count,
            "vocab": vocab,
        }


@dataclass(frozen=True)
class Loss:
    """The options that change the loss of a row."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    weight: np.ndarray | None = field(default=None, compare=False)

    def argument(self, vocab_total: int, dtype: str, keep: list[Any]) -> dict[str, Any]:
        weight = weight_sum = None
        if self.weight is not None:
            weight = DeviceArray.of(self.weight.astype(compute(dtype)))
            keep.append(weight)
            if self.label_smoothing > 0:
                weight_sum = DeviceArray.of(np.array([self.weight.sum()], np.float64))
                keep.append(weight_sum)
        return {
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "weight": weight.buffer if weight else None,
            "weight_sum": weight_sum.buffer if weight_sum else None,
            "vocab_total": vocab_total,
        }


EVERY_OPTION = {
    "plain": Loss(),
    "smoothing": Loss(label_smoothing=0.1),
    "z_loss": Loss(z_loss=1e-3),
    "softcap": Loss(softcap=20.0),
    "logit_scale": Loss(logit_scale=-0.7),
    "weight": Loss(weight=np.ones(1)),
    "all": Loss(label_smoothing=0.2, z_loss=1e-3, softcap=20.0, logit_scale=1.3, weight=np.ones(1)),
    "all smoothing": Loss(label_smoothing=1.0, weight=np.ones(1)),
}


def with_weights(loss: Loss, vocab: int) -> Loss:
    """Weights of the right length, exact in float32, for options that ask for weights."""
    if loss.weight is None:
        return loss
    weight = np.random.default_rng(vocab).uniform(0.25, 2.0, vocab).astype(np.float32).astype(np.float64)
    weight[vocab // 2] = 0.0
    return replace(loss, weight=weight)


# ---- the reference: float64 numpy ------------------------------------------------------------------------------------


def transform(x: np.ndarray, loss: Loss) -> tuple[np.ndarray, np.ndarray]:
    """z, and dz / dx without logit_scale."""
    z = x * loss.logit_scale
    if loss.softcap == 0.0:
        return z, np.ones_like(z)
    return loss.softcap * np.tanh(z / loss.softcap), 1.0 / np.cosh(np.clip(z / loss.softcap, -300, 300)) ** 2


def reference_loss(x: np.ndarray, target: np.ndarray, loss: Loss) -> tuple[np.ndarray, np.ndarray]:
    """(loss, lse) of whole rows."""
    z, _ = transform(x, loss)
    maximum = z.max(axis=1, keepdims=True)
    # log1p around the target where it is the maximum: the loss keeps its digits as it goes to 0
    safe = np.where(target == IGNORED, 0, target)
    lse = (maximum + np.log(np.exp(z - maximum).sum(axis=1, keepdims=True)))[:, 0]
    z_y = z[np.arange(len(z)), safe]
    others = np.exp(z - z_y[:, None])
    others[np.arange(len(z)), safe] = 0.0
    distance = np.log1p(others.sum(axis=1))
    weight = np.ones(x.shape[1]) if loss.weight is None else loss.weight
    a = loss.label_smoothing
    total = (1 - a) * weight[safe] * distance + loss.z_loss * lse**2
    if a > 0:
        total = total + a / x.shape[1] * (weight * (lse[:, None] - z)).sum(axis=1)
    return np.where(target == IGNORED, 0.0, total), lse


def reference_gradient(
    x: np.ndarray, target: np.ndarray, loss: Loss, grad_loss: np.ndarray, grad_lse: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient, and the sum of the magnitudes of the terms that it is made of."""
    z, slope = transform(x, loss)
    _, lse = reference_loss(x, target, loss)
    vocab = x.shape[1]
    weight = np.ones(vocab) if loss.weight is None else loss.weight
    g = np.where(target == IGNORED, 0.0, grad_loss)[:, None]
    row = np.arange(len(x))
    safe = np.where(target == IGNORED, 0, target)
    p = np.exp(z - lse[:, None])
    gamma = g * (1 - loss.label_smoothing) * weight[safe][:, None]
    beta = g * loss.label_smoothing / vocab
    delta = beta * weight.sum() + g * 2 * loss.z_loss * lse[:, None]
    if grad_lse is not None:
        delta = delta + grad_lse[:, None]
    spread = p.copy()
    spread[row, safe] = np.where(target == IGNORED, spread[row, safe], np.expm1(z - lse[:, None])[row, safe])
    factor = slope * loss.logit_scale
    gradient = (gamma * spread + delta * p - beta * weight) * factor
    magnitude = (np.abs(gamma * spread) + np.abs(delta) * p + np.abs(beta) * weight) * np.abs(factor)
    if grad_lse is None:
        gradient[target == IGNORED] = 0.0
    return gradient, magnitude


def assert_gradient(got: np.ndarray, expected: tuple[np.ndarray, np.ndarray], dtype: str, loss: Loss) -> None:
    gradient, magnitude = expected
    relative = {"float64": 1e-13}.get(dtype, 1e-5 if loss.softcap else 2e-6)
    allowed = relative * magnitude + ROUNDING[dtype] * np.abs(gradient) * (1 + relative) + TINY[dtype]
    excess = np.abs(got - gradient) - allowed
    assert not np.isnan(got).any()
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess.max() <= 0, f"at {worst}: got {got[worst]}, expected {gradient[worst]} +- {allowed[worst]}"


# ---- the kernels -----------------------------------------------------------------------------------------------------


def run_stats(
    logits: Rows, target: np.ndarray, loss: Loss, vocab_start: int, vocab_total: int, exp_out: Rows | None = None
) -> np.ndarray:
    keep: list[Any] = []
    smoothing = loss.label_smoothing > 0
    out = DeviceArray((len(target) + 3, 5 if smoothing else 3), compute(logits.dtype))
    kernels().stats(
        logits.argument(),
        DeviceArray.of(target).buffer if len(target) else None,
        vocab_start,
        IGNORED,
        loss.argument(vocab_total, logits.dtype, keep),
        smoothing,
        out.buffer,
        exp_out.argument() if exp_out else None,
    )
    return np.array(out.array)


def run_merge(gathered: np.ndarray, target: np.ndarray, loss: Loss, vocab_total: int) -> tuple[np.ndarray, np.ndarray]:
    keep: list[Any] = []
    dtype = str(gathered.dtype)
    ranks, rows, columns = gathered.shape
    flat = DeviceArray.of(gathered.reshape(ranks, -1), row_stride=rows * columns + 7)  # ranks are any distance apart
    out, lse = DeviceArray((len(target),), gathered.dtype), DeviceArray((len(target),), np.float64)
    terms = loss.argument(vocab_total, dtype, keep)
    ids = DeviceArray.of(target)
    arguments = (flat.buffer, ranks, flat.row_stride, columns, len(target), ids.buffer, IGNORED, terms)
    kernels().merge(dtype == "float64", *arguments, out.buffer, lse.buffer)
    return np.array(out.array), np.array(lse.array)


def run_backward(
    logits: Rows,
    lse: np.ndarray,
    target: np.ndarray,
    loss: Loss,
    grad_loss: np.ndarray,
    out: Rows,
    *,
    grad_lse: np.ndarray | None = None,
    vocab_start: int = 0,
    vocab_total: int | None = None,
) -> np.ndarray:
    keep: list[Any] = []
    grads = [None if g is None else DeviceArray.of(g.astype(compute(logits.dtype))) for g in (grad_loss, grad_lse)]
    strides = [0 if g is None or g.array.size == 1 else 1 for g in grads]
    total = logits.memory.array.shape[1] if vocab_total is None else vocab_total
    kernels().backward(
        logits.argument(),
        DeviceArray.of(lse).buffer,
        DeviceArray.of(target).buffer,
        grads[0].buffer if grads[0] else None,
        strides[0],
        grads[1].buffer if grads[1] else None,
        strides[1],
        vocab_start,
        IGNORED,
        loss.argument(total, logits.dtype, keep),
        out.argument(),
    )
    return out.read()


def run_forward_backward(
    logits: Rows, target: np.ndarray, loss: Loss, grad_loss: np.ndarray, out: Rows
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keep: list[Any] = []
    grads = DeviceArray.of(grad_loss.astype(compute(logits.dtype)))
    values, lse = DeviceArray((len(target),), compute(logits.dtype)), DeviceArray((len(target),), np.float64)
    kernels().forward_backward(
        logits.argument(),
        DeviceArray.of(target).buffer,
        grads.buffer,
        0 if grad_loss.size == 1 else 1,
        IGNORED,
        loss.argument(logits.memory.array.shape[1], logits.dtype, keep),
        values.buffer,
        lse.buffer,
        out.argument(),
    )
    return np.array(values.array), np.array(lse.array), out.read()


def run_divisor(target: np.ndarray, dtype: Any, *, is_mean: bool, denominator: float | None = None) -> tuple[Any, Any]:
    """What a mean divides by, and the gradient of every row's loss."""
    given = None if denominator is None else DeviceArray.of(np.array([denominator], dtype)).buffer
    divisor, grad_loss = DeviceArray((1,), dtype), DeviceArray((1,), dtype)
    ids = DeviceArray.of(target)
    kernels().divisor(
        dtype == np.float64, ids.buffer, len(target), IGNORED, is_mean, given, divisor.buffer, grad_loss.buffer
    )
    return divisor.array[0], grad_loss.array[0]


def run_loss_sum(loss: np.ndarray, divisor: float) -> Any:
    out = DeviceArray((1,), loss.dtype)
    losses, by = DeviceArray.of(loss), DeviceArray.of(np.array([divisor], loss.dtype))
    kernels().loss_sum(loss.dtype == np.float64, losses.buffer, len(loss), by.buffer, out.buffer)
    return out.array[0]


def example(rows: int, vocab: int, dtype: str, seed: int = 0, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that the dtype holds exactly, and targets; the last of several rows is ignored."""
    rng = np.random.default_rng(seed)
    x = rounded(rng.normal(0, spread, (rows, vocab)), dtype)
    target = rng.integers(0, vocab, rows)
    if rows > 2:
        target[-1] = IGNORED
        target[0] = vocab - 1
    return x, target
