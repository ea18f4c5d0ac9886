# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Device functions of experts' activations and their gradients, of columns of gates and of what they multiply."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def normal_density(x):
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """`fastpar.contracts.moe.activate`; `up` is of no interest without a gate."""
    if ACTIVATION == "swiglu":
        act = gate * sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        act = gate * normal_cdf(gate) * up
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        act = (up + 1.0) * gate * sigmoid(alpha * gate)
    elif ACTIVATION == "gelu":
        act = gate * normal_cdf(gate)
    elif ACTIVATION == "silu":
        act = gate * sigmoid(gate)
    else:
        act = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            act *= act
    return act


@triton.jit
def activate_backward(dact, gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """(dgate, dup) of `activate`; without a gate dup is dgate."""
    if ACTIVATION == "swiglu":
        s = sigmoid(gate)
        dgate, dup = dact * up * s * (1.0 + gate * (1.0 - s)), dact * gate * s
    elif ACTIVATION == "geglu":
        cdf = normal_cdf(gate)
        dgate, dup = dact * up * (cdf + gate * normal_density(gate)), dact * gate * cdf
    elif ACTIVATION == "clamped_swiglu":
        low = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        within = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        s = sigmoid(alpha * low)
        dgate = tl.where(gate > limit, 0.0, dact * (within + 1.0) * s * (1.0 + alpha * low * (1.0 - s)))
        dup = tl.where(tl.abs(up) > limit, 0.0, dact * low * s)
    else:
        if ACTIVATION == "gelu":
            dgate = dact * (normal_cdf(gate) + gate * normal_density(gate))
        elif ACTIVATION == "silu":
            s = sigmoid(gate)
            dgate = dact * s * (1.0 + gate * (1.0 - s))
        elif ACTIVATION == "relu2":
            dgate = dact * 2.0 * tl.maximum(gate, 0.0)
        else:
            dgate = tl.where(gate > 0.0, dact, 0.0)
        dup = dgate
    return dgate, dup
