"""Activation recomputation: run layers again in backward instead of keeping what they computed.

    fp.apply_recompute(model)                                               # every layer, from its input
    fp.apply_recompute(model, fp.recompute.Selective())                     # but no matrix product, no collective
    fp.apply_recompute(model.layers, fp.recompute.Budget(8 << 30, costs))   # the fastest plan that fits
    y = fp.recompute.checkpoint(block, x, mask=mask)

| policy | kept until backward, n layers | layer forwards beyond the first |
|---|---|---|
| NoRecompute | n activations | 0 |
| Selective | n inputs and expensive results | n without products and collectives |
| Full | n inputs, 1 activations | n |
| Segments(k) | k - 1 inputs, n / k activations | n - n / k |
| Binomial(s) | s inputs, 1 activations | r n - C(s + r, s + 1), where C(s + r, s) >= n |
| ConstantMemory | 1 input, 1 activations | n (n - 1) / 2 |
| Budget(bytes, costs) | at most bytes | the least time of all plans |

Gradients are bit-equal to those without recomputation, dropout included. How plans are written down is in
`fastpar.recompute.plan`, how they are executed in `fastpar.recompute.segment`. docs/recompute.md has measurements.
"""

from fastpar.recompute.ambient import Capture
from fastpar.recompute.budget import least_memory_plan, optimal_plan
from fastpar.recompute.chain import apply_recompute, checkpoint, remove_recompute
from fastpar.recompute.measure import measure_layers
from fastpar.recompute.plan import Drop, Keep, LayerCost, RecomputePlan
from fastpar.recompute.policy import (
    Binomial,
    Budget,
    ConstantMemory,
    Full,
    NoRecompute,
    Policy,
    Segments,
    Selective,
)
from fastpar.recompute.segment import RecomputeError

__all__ = [
    "Binomial",
    "Budget",
    "Capture",
    "ConstantMemory",
    "Drop",
    "Full",
    "Keep",
    "LayerCost",
    "NoRecompute",
    "Policy",
    "RecomputeError",
    "RecomputePlan",
    "Segments",
    "Selective",
    "apply_recompute",
    "checkpoint",
    "least_memory_plan",
    "measure_layers",
    "optimal_plan",
    "remove_recompute",
]
