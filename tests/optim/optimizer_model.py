"""The optimizer steps in numpy, operation by operation, for the tests of the Triton kernel.

The model below makes the same operations in the same order as the kernels, and each of them rounds once; so bits are
compared, not distances. A fused multiply-add is made in 80-bit floats: its product is exact there, and its sum is
rounded to 64 bits before the 24 of the result, which differs from one rounding for one sum in 2^40.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.device_array import bfloat16_to_float, float_to_bfloat16

F32 = np.float32
BLOCK = 256
MASK64 = (1 << 64) - 1
STORAGE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "uint8": np.uint8, "split": np.uint16}
Numbers = dict[str, Any]

ADAMW: Numbers = {
    "step": 3, "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01
}  # fmt: skip
SGD: Numbers = {
    "lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01, "nesterov": False, "first": False
}  # fmt: skip
LION: Numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}
RULES: dict[str, Numbers] = {"adamw": ADAMW, "sgd": SGD, "plain_sgd": SGD, "lion": LION}
NUM_STATES = {"adamw": 2, "sgd": 1, "plain_sgd": 0, "lion": 1}


# ---- the rules -------------------------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    return np.asarray(np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F32)


def update(rule: str, n: Numbers, p: np.ndarray, g: np.ndarray, s: list[np.ndarray]) -> tuple[np.ndarray, list[Any]]:
    """(parameter, states) after a step; everything is float32."""
    if rule == "adamw":
        inverse_root = F32(1.0 / np.sqrt(1.0 - n["beta2"] ** n["step"]))
        step_size = F32(n["lr"] / (1.0 - n["beta1"] ** n["step"]))
        m = fma(F32(1.0 - n["beta1"]), g - s[0], s[0])
        v = fma(F32(n["beta2"]), s[1], g * F32(1.0 - n["beta2"]) * g)
        divisor = fma(np.sqrt(v), inverse_root, F32(n["eps"]))
        return fma(-step_size, m / divisor, p * F32(1.0 - n["lr"] * n["weight_decay"])), [m, v]
    if rule == "lion":
        direction = fma(F32(n["beta1"]), s[0], g * F32(1.0 - n["beta1"]))
        sign = np.where(np.isnan(direction), direction, np.sign(direction) * F32(n["lr"]))
        p = p * F32(1.0 - n["lr"] * n["weight_decay"]) - sign
        return p, [fma(F32(1.0 - n["beta2"]), g - s[0], s[0])]
    lr, momentum = F32(n["lr"]), F32(n["momentum"])
    g = fma(F32(n["weight_decay"]), p, g)
    if rule == "plain_sgd":
        return fma(-lr, g, p), []
    buffer = g if n["first"] else fma(momentum, s[0], g * F32(1.0 - n["dampening"]))
    return fma(-lr, fma(momentum, buffer, g) if n["nesterov"] else buffer, p), [buffer]


# ---- the formats -----------------------------------------------------------------------------------------------------


def splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def rounding_key(seed: int, key: int) -> int:
    return splitmix((splitmix(seed & MASK64) + key) & MASK64)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def random_bits(rounding_key: int, first: int, count: int) -> list[np.ndarray]:
    """16 bits each for the parameter and two states."""
    drawn = np.zeros((3, count), np.uint32)
    for i in range(count):
        index = first + i
        k = splitmix((rounding_key + (index >> 32)) & MASK64)
        k0, k1, k2 = k & 0xFFFFFFFF, k >> 32, splitmix(k) & 0xFFFFFFFF
        a = mix(mix(np.array([(index & 0xFFFFFFFF) ^ k0], np.uint32)) + np.uint32(k1))
        drawn[:, i] = [a[0] & 0xFFFF, a[0] >> 16, mix(a ^ np.uint32(k2))[0] & 0xFFFF]
    return list(drawn)


def round_stochastically(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """The bits of bfloat16."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), ((x.view(np.uint32) + random) >> np.uint32(16)).astype(np.uint16))


def split(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bits of bfloat16, signed remainder)"""
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32)).astype(np.int64)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    return ((bits - low) >> 16).astype(np.uint16), low.astype(np.int16)


def join(param: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    return ((param.astype(np.int64) << 16) + remainder).astype(np.uint32).view(F32)


def largest_code(signed: bool) -> int:
    return 127 if signed else 255


def quantise(x: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales)"""
    blocks = -(-len(x) // BLOCK)
    padded = np.zeros(blocks * BLOCK, F32)
    padded[: len(x)] = x
    padded = padded.reshape(blocks, BLOCK)
    largest = np.abs(padded).max(axis=1)
    scale = np.where(np.isfinite(largest), np.maximum(largest, F32(2.0**-126)), F32(np.nan)).astype(F32)
    ratio = (np.abs(padded) * (F32(1.0) / scale)[:, None]).view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    code = ((ratio + 0x7FFFF + ((ratio >> 20) & 1)) >> 20) - (1016 - largest_code(signed))
    code = np.clip(code, 0, largest_code(signed))
    if signed:
        code |= (padded.view(np.uint32) >> np.uint32(31) << np.uint32(7)).astype(np.int64)
    else:
        code = np.where((ratio > 0) & (code == 0), 1, code)
    return code.reshape(-1)[: len(x)].astype(np.uint8), scale


def dequantise(codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    size = codes.astype(np.uint32) & np.uint32(largest_code(signed))
    magnitude = np.where(size == 0, np.uint32(0), (size + np.uint32(1016 - largest_code(signed))) << np.uint32(20))
    sign = np.where(signed & (codes >= 128), F32(-1), F32(1))
    return magnitude.astype(np.uint32).view(F32) * sign * np.repeat(scales, BLOCK)[: len(codes)]


def widen(stored: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_to_float(stored) if dtype in ("bfloat16", "split") else stored.astype(F32)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    return float_to_bfloat16(x) if dtype in ("bfloat16", "split") else x.astype(STORAGE[dtype])


# ---- one tensor ------------------------------------------------------------------------------------------------------


@dataclass
class Kinds:
    """How the tensors of a call are stored."""

    param: str = "float32"
    grad: str = "float32"
    state: str = "float32"
    output: str = "none"


@dataclass
class Tensor:
    """What a step reads and writes of one tensor, as it is stored; `states[k]` has `scales[k]` where it is uint8."""

    kinds: Kinds
    param: np.ndarray
    grad: np.ndarray
    states: list[np.ndarray]
    scales: list[np.ndarray] = field(default_factory=list)
    output: np.ndarray | None = None
    remainder: np.ndarray | None = None
    key: int = 0
    first: int = 0

    @classmethod
    def example(cls, count: int, kinds: Kinds, num_states: int, seed: int = 0) -> Tensor:
        rng = np.random.default_rng([seed, count])
        master, grad, moment, square = (rng.standard_normal(count).astype(F32) for _ in range(4))
        values = [moment, np.square(square)][:num_states]
        param, remainder = split(master) if kinds.param == "split" else (narrow(master, kinds.param), None)
        tensor = cls(kinds, param, narrow(grad, kinds.grad), [], remainder=remainder, key=seed + 7)
        for k, x in enumerate(values):
            if kinds.state == "uint8":
                codes, scale = quantise(x, signed=k == 0)
                tensor.states.append(codes)
                tensor.scales.append(scale)
            else:
                tensor.states.append(narrow(x, kinds.state))
        if kinds.output != "none":
            tensor.output = np.zeros(count, STORAGE[kinds.output])
        return tensor

    def rows(self, begin: int, end: int) -> Tensor:
        """Elements begin, ..., end - 1; 8-bit blocks cannot be cut."""
        cut = slice(begin, end)
        block = slice(begin // BLOCK, -(-end // BLOCK))
        return Tensor(
            self.kinds,
            self.param[cut],
            self.grad[cut],
            [s[cut] for s in self.states],
            [s[block] for s in self.scales],
            None if self.output is None else self.output[cut],
            None if self.remainder is None else self.remainder[cut],
            self.key,
            self.first + begin,
        )

    def stored(self) -> dict[str, np.ndarray]:
        """Everything that a step may write."""
        found = {"param": self.param, "output": self.output, "remainder": self.remainder}
        found |= {f"state{k}": s for k, s in enumerate(self.states)}
        found |= {f"scale{k}": s for k, s in enumerate(self.scales)}
        return {name: x for name, x in found.items() if x is not None}

    def values(self) -> list[np.ndarray]:
        """The states as float32."""
        if self.kinds.state == "uint8":
            return [dequantise(s, c, k == 0) for k, (s, c) in enumerate(zip(self.states, self.scales, strict=True))]
        return [widen(s, self.kinds.state) for s in self.states]


def expected(rule: str, n: Numbers, tensor: Tensor, factor: float = 1.0, seed: int | None = None) -> dict[str, Any]:
    """`tensor.stored()` after a step; rounded to bfloat16 stochastically if there is a seed."""
    kinds = tensor.kinds
    is_split = kinds.param == "split"
    master = join(tensor.param, tensor.remainder) if is_split else widen(tensor.param, kinds.param)
    grad = widen(tensor.grad, kinds.grad) * F32(factor)
    p, states = update(rule, n, master, grad, tensor.values())
    random = None if seed is None else random_bits(rounding_key(seed, tensor.key), tensor.first, len(p))

    def store(x: np.ndarray, dtype: str, which: int) -> np.ndarray:
        return round_stochastically(x, random[which]) if random and dtype == "bfloat16" else narrow(x, dtype)

    found: dict[str, Any] = {}
    if is_split:
        found["param"], found["remainder"] = split(p)
    else:
        found["param"] = store(p, kinds.param, 0)
    if tensor.output is not None:
        found["output"] = narrow(p, kinds.output)
    for k, x in enumerate(states):
        if kinds.state == "uint8":
            found[f"state{k}"], found[f"scale{k}"] = quantise(x, signed=k == 0)
        else:
            found[f"state{k}"] = store(x, kinds.state, 1 + k)
    return found


# ---- comparing ------------------------------------------------------------------------------------------------------


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], kinds: Kinds) -> None:
    """Bit for bit, where NaN is NaN."""
    assert found.keys() == wanted.keys()
    dtypes = {"param": kinds.param, "output": kinds.output, "state0": kinds.state, "state1": kinds.state}
    for name, x in found.items():
        dtype = dtypes.get(name, "float32")
        is_float = name.startswith("scale") or dtype not in ("uint8", "split", "float32") or name in dtypes
        if name == "remainder" or dtype in ("uint8", "split") or not is_float:
            np.testing.assert_array_equal(x, wanted[name], err_msg=name)
            continue
        a, b = (widen(v, dtype) for v in (x, wanted[name]))
        nan = np.isnan(a)
        np.testing.assert_array_equal(nan, np.isnan(b), err_msg=name)
        np.testing.assert_array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan], err_msg=name)
