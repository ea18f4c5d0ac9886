"""Seconds of one layer, and of the head, for one microbatch on one rank.

An op takes max(flops / (peak e shape), bytes / hbm), where e is the efficiency of the machine's software stack and
shape = min(1, 1.06 w / (w + 250)) with w the smaller side of the rank's part of the weight; calibrated machines have a
table instead. Attention runs at `Machine.attention` e, 0.6 where that is not measured. A device computes `Machine.wave`
elements of a result at once, so that of its last wave half is lost in the mean. Heads whose size is no multiple of 8
miss the tensor cores' layouts: their products take 4 times as long. A layer's pass takes `Machine.launch` at least.
Backward has twice the products, and 2.5 times fused attention; adding its weight gradients to those of earlier
microbatches reads and writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastpar.layouts.layout import RECOMPUTE
from fastpar.planner.machine import Machine, bandwidth, gather_seconds, latency
from fastpar.planner.table import Column, LayoutTable
from fastpar.planner.workload import Workload

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
_UNALIGNED_HEADS = 0.25  # of the rate


@dataclass(frozen=True)
class LayerTime:
    """Columns of seconds: one layer and one microbatch, forward, backward and recomputation together.

    products, attention, elementwise   computation; `floor` is what the launch floor adds to it
    tp, cp, ep                         communication that nothing hides
    forward, backward                  all of it by pass, recomputation being part of backward
    is_floor                           whether the floor holds in a pass
    """

    products: Column
    attention: Column
    elementwise: Column
    floor: Column
    tp: Column
    cp: Column
    ep: Column
    forward: Column
    backward: Column
    is_floor: Column

    @property
    def total(self) -> Column:
        return self.forward + self.backward


def gemm_seconds(
    machine: Machine, work: Workload, tokens: Column, inner: Column | float, outer: Column | float
) -> tuple[Column, Column]:
    """A product [tokens, inner] x [inner, outer]: forward, and backward's two."""
    width: Column = np.minimum(inner, outer)
    if machine.gemm is not None:
        shape = machine.gemm.share(tokens, width)
    else:
        shape = np.minimum(1.0, 1.06 * width / (width + 250.0))
    rate = machine.flops(work.precision) * machine.efficiency * shape
    moved = work.element * (tokens * inner + inner * outer + tokens * outer) / machine.hbm
    flops = 2.0 * tokens * inner * outer / rate

    def one(made: Column | float) -> Column:
        found: Column = np.maximum(flops * (1.0 + 0.5 * machine.wave / made), moved)
        return found

    return one(tokens * outer), one(tokens * inner) + one(inner * outer + 0.0 * tokens)


def tokens_of(work: Workload, x: LayoutTable) -> Column:
    """Tokens of a microbatch on a rank, before sequence parallelism."""
    return x.micro_batch * work.seq / x.cp


def layer_time(machine: Machine, work: Workload, x: LayoutTable) -> LayerTime:
    """The mean layer; where some layers have experts and others a dense MLP, weighted by their numbers."""
    model, tokens = work.model, tokens_of(work, x)
    share = np.where(x.sp == 1, 1.0 / x.tp, 1.0)  # of the residual stream that a rank has
    products, products_back = _products(machine, work, x, tokens, share)
    core, scores = _attention(machine, work, x, tokens)
    width = 2.0 * (9.0 if not model.dropout else 11.0)  # bytes per element: two norms, two additions (with dropout)
    inner = _mlp_width(work) * (3.0 if model.gated else 2.0) / x.tp
    elementwise = tokens * work.element / 2 * (width * model.hidden * share + 2.0 * inner) / machine.hbm
    computed = products + core + scores + elementwise
    again = np.select(
        [x.recompute == _FULL, x.recompute == _SELECTIVE],
        [computed, elementwise if work.fused_attention else core + scores],
        0.0,
    )
    summed = _summed_gradients(machine, work, x)
    back = products_back + (2.5 if work.fused_attention else 2.0) * core + 2.0 * scores + 2.0 * elementwise + summed
    forward = np.maximum(computed, machine.launch)
    backward = np.maximum(back, machine.launch) + np.where(
        x.recompute == _FULL, np.maximum(again, machine.launch), again
    )
    is_again = x.recompute == _FULL
    tp, tp_back = _tp(machine, work, x, tokens)
    cp, cp_back = _cp(machine, work, x, tokens, core)
    ep = _ep(machine, work, x, tokens * share)
    repeats = is_again * (tp + cp + ep)
    plain = computed + back + again
    core_back = (2.5 if work.fused_attention else 2.0) * core
    scores_again = np.where(is_again | (x.recompute == _SELECTIVE) & (not work.fused_attention), core + scores, 0.0)
    return LayerTime(
        products=products * (1.0 + is_again) + products_back,
        attention=core + scores + core_back + 2.0 * scores + scores_again,
        elementwise=elementwise * (3.0 + (is_again | ((x.recompute == _SELECTIVE) & work.fused_attention))) + summed,
        floor=forward + backward - plain,
        tp=tp + tp_back + is_again * tp,
        cp=cp + cp_back + is_again * cp,
        ep=2.0 * ep + is_again * ep,
        forward=forward + tp + cp + ep,
        backward=backward + tp_back + cp_back + ep + repeats,
        is_floor=(computed < machine.launch) | (back < machine.launch),
    )


def _summed_gradients(machine: Machine, work: Workload, x: LayoutTable) -> Column:
    """Adding a layer's weight gradients to those of the microbatches before."""
    model = work.model
    count = model.dense_layer_parameters / x.tp + model.expert_parameters / x.ep
    return np.where(x.microbatches > 1, (2.0 * work.bytes.grad + work.bytes.wire) * count / machine.hbm, 0.0)


def _mlp_width(work: Workload) -> float:
    """Inner features that a token sees in the mean layer: of experts, top_k of them."""
    model, experts = work.model, work.model.experts
    if experts is None:
        return float(model.ffn)
    seen = experts.top_k * experts.ffn * work.expert_load + experts.shared_ffn
    dense = experts.dense_layers / model.layers
    return dense * model.ffn + (1.0 - dense) * seen


def _products(machine: Machine, work: Workload, x: LayoutTable, tokens: Column, share: Column) -> tuple[Column, Column]:
    """Forward and backward."""
    model, experts = work.model, work.model.experts
    kv = np.maximum(model.kv_heads / x.tp, 1.0)  # heads that do not divide are computed on several ranks
    up, dense = 2 if model.gated else 1, experts.dense_layers / model.layers if experts else 1.0
    shapes: list[tuple[Column, Any, Any, float]] = [  # (tokens, inner, outer, share of the layers)
        (tokens, model.hidden, (model.heads / x.tp + 2.0 * kv) * model.head_dim, 1.0),
        (tokens, model.heads * model.head_dim / x.tp, model.hidden, 1.0),
    ]

    def mlp(rows: Column, inner: Column, part: float) -> list[tuple[Column, Any, Any, float]]:
        return [(rows, model.hidden, up * inner, part), (rows, inner, model.hidden, part)] if part else []

    shapes += mlp(tokens, model.ffn / x.tp, dense)
    if experts and experts.shared_ffn:
        shapes += mlp(tokens, experts.shared_ffn / x.tp, 1.0 - dense)
    forward, backward = np.zeros_like(tokens), np.zeros_like(tokens)
    for rows, inner, outer, part in shapes:
        there, back = gemm_seconds(machine, work, rows, inner, outer)
        forward, backward = forward + part * there, backward + part * back
    if experts is None:
        return forward, backward
    # Experts are spread, not split: a rank sees its tokens' share of rows with whole experts.
    rows = tokens * share * experts.top_k * work.expert_load
    router = gemm_seconds(machine, work, tokens * share, model.hidden, np.full_like(rows, experts.experts))
    moved = work.element * model.mlp_parameters(experts.ffn) * experts.experts / x.ep / machine.hbm
    routed = [gemm_seconds(machine, work, *shape[:3]) for shape in mlp(rows, np.full_like(rows, experts.ffn), 1.0)]
    forward = forward + (1.0 - dense) * (np.maximum(sum(there for there, _ in routed), moved) + router[0])
    return forward, backward + (1.0 - dense) * (np.maximum(sum(back for _, back in routed), 2.0 * moved) + router[1])


def _attention(machine: Machine, work: Workload, x: LayoutTable, tokens: Column) -> tuple[Column, Column]:
    """Seconds of its products, and of what reads and writes scores."""
    model = work.model
    rate = machine.flops("bf16" if work.precision == "fp8" else work.precision)
    rate *= machine.efficiency * machine.attention * (_UNALIGNED_HEADS if model.head_dim % 8 else 1.0)
    flops = 4.0 * tokens * work.seq * model.heads * model.head_dim / x.tp
    if work.fused_attention:
        return flops / 2.0 / rate, np.zeros_like(flops)
    per_score = 2.0 + 4.0 + (5.0 if model.dropout else 0.0) + 2.0  # written; softmax; dropout and its mask; read
    return flops / rate, per_score * tokens * work.seq * model.heads / x.tp / machine.hbm


def _tp(machine: Machine, work: Workload, x: LayoutTable, tokens: Column) -> tuple[Column, Column]:
    """Forward and backward: two all-reduces each, or with sequence parallelism two gathers and two scatters, and in
    backward two gathers more, of what weight gradients need."""
    nbytes = work.element * tokens * work.model.hidden
    one = gather_seconds(machine, nbytes, x.tp, np.ones_like(x.tp))
    return 4.0 * one, np.where(x.sp == 1, 6.0, 4.0) * one


def _cp(machine: Machine, work: Workload, x: LayoutTable, tokens: Column, core: Column) -> tuple[Column, Column]:
    """A ring of keys and values behind 0.8 of attention; twice the bytes in backward."""
    model = work.model
    block = 2.0 * work.element * tokens * np.maximum(model.kv_heads / x.tp, 1.0) * model.head_dim
    steps = x.cp - 1
    each = block / bandwidth(machine, x.cp, x.tp) + latency(machine, np.minimum(x.cp, 2), x.tp)
    forward = np.maximum(0.0, steps * each - 0.8 * core)
    return forward, np.maximum(0.0, 2.0 * steps * each - 0.8 * 2.5 * core)


def _ep(machine: Machine, work: Workload, x: LayoutTable, tokens: Column) -> Column:
    """Dispatch and combine, once each way; the cheaper of flat and hierarchical exchanges.

    A token goes to n (1 - (1 - 1/n)^k) distinct ranks of n, those of its own included.
    """
    experts, model = work.model.experts, work.model
    if experts is None:
        return np.zeros_like(tokens)
    shared = np.minimum(x.ep, machine.per_node)
    nodes = x.ep / shared
    row = work.element * model.hidden * tokens * work.expert_load

    def distinct(count: Column) -> Column:
        return count * (1.0 - (1.0 - 1.0 / count) ** experts.top_k)

    ranks, hosts = distinct(x.ep), distinct(nodes)
    inside = row * ranks * (shared - 1.0) / x.ep / machine.nvlink
    flat = row * ranks * (x.ep - shared) / x.ep / machine.nic
    leaders = row * hosts * (nodes - 1.0) / nodes * (1.0 / machine.nic + 1.0 / machine.nvlink)
    once = inside + np.minimum(flat, leaders) + latency(machine, x.ep, np.ones_like(x.ep))
    moe_layers = 1.0 - experts.dense_layers / model.layers
    return np.where(x.ep > 1, 2.0 * moe_layers * once, 0.0)


def head_seconds(machine: Machine, work: Workload, x: LayoutTable) -> Column:
    """The head and the loss, forward and backward, on the rank that has them."""
    tokens, vocab = tokens_of(work, x), work.model.vocab / x.tp
    loss = (4.0 if work.fused_loss else 16.0) * tokens * vocab / machine.hbm
    forward, backward = gemm_seconds(machine, work, tokens, work.model.hidden, vocab)
    return forward + backward + loss
