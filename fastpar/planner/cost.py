"""Seconds of a training step, and where they go.

    prediction = predict(machine, work, LayoutTable.of([layout], batch))
    prediction.step[0], prediction.parts["tp"][0]

Pipelines by closed forms, t_i being a stage's seconds for a microbatch and m their number:

    gpipe, 1f1b     (m - 1) (max t + 2 hop) + sum t + 2 (p - 1) hop
    interleaved     m max t + (p - 1) / v mean t + 2 (p - 1) hop
    zb, v-shaped    m max t + (p - 1) / 3 (or 6) mean t + 2 (p - 1) hop: what a filled pipeline still waits

`fastpar.planner.pipelines` has the exact times, for the few layouts that are left in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastpar.planner.layer_time import LayerTime, head_seconds, layer_time, tokens_of
from fastpar.planner.machine import Machine, all_reduce_seconds, gather_seconds, hop_seconds
from fastpar.planner.table import SCHEDULES, Column, LayoutTable
from fastpar.planner.workload import Workload

_OPTIMIZER_BYTES = 20.0  # read and written per owned parameter: gradient, master, two moments, parameter
PARTS = (
    "products", "attention", "elementwise", "floor", "head", "tp", "cp", "ep", "dp", "bubble", "hops", "imbalance",
    "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    """Columns of seconds.

    step       of a whole step
    parts      what it is made of, by name (PARTS); they add up to the step
    layer      of one layer and microbatch
    head       of the head and the loss, per microbatch
    hop        of a message between pipeline ranks
    max_stage  of the slowest stage, per microbatch
    is_floor   whether layers take the launch floor
    """

    step: Column
    parts: Mapping[str, Column]
    layer: LayerTime
    head: Column
    hop: Column
    max_stage: Column
    is_floor: Column


def model_flops(work: Workload) -> float:
    """Flops of a step: 6 per parameter and token in matrices, and attention's, scores above the diagonal included."""
    model, tokens = work.model, float(work.batch) * work.seq
    seen = model.mlp_parameters(model.ffn) if model.experts is None else 0
    if model.experts is not None:
        experts = model.experts
        moe = experts.top_k * model.mlp_parameters(experts.ffn) + model.mlp_parameters(experts.shared_ffn)
        dense = experts.dense_layers
        seen = (dense * model.mlp_parameters(model.ffn) + (model.layers - dense) * moe) // model.layers
    matrices = model.layers * (model.attention_parameters + seen) + model.embedding_parameters
    return tokens * (6.0 * matrices + 12.0 * model.layers * work.seq * model.heads * model.head_dim)


def predict(machine: Machine, work: Workload, x: LayoutTable) -> StepTime:
    """The time of every row."""
    layer, head = layer_time(machine, work, x), head_seconds(machine, work, x)
    mean_stage = work.model.layers / x.pp * layer.total
    most, spread = _stages(work, x, layer.total, head)
    stream = np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    nbytes = work.element * tokens_of(work, x) * work.model.hidden * stream
    hop = hop_seconds(machine, nbytes, x.pp, x.dp * x.cp * x.tp)
    bubble, hops = _bubble(x, most, spread, hop)
    dp = exposed_dp(machine, work, x, layer)
    owned = sum(count / np.where(x.stage > 0, ranks, 1) for count, ranks, *_ in parameter_groups(work, x))
    optimizer = (machine.optimizer or _OPTIMIZER_BYTES / machine.hbm) * owned
    optimizer = np.where(x.offload == 1, optimizer + 12.0 * owned / machine.host_link, optimizer)
    count = x.microbatches * work.model.layers / x.pp
    parts = {
        **{kind: count * getattr(layer, kind) for kind in ("products", "attention", "elementwise", "floor")},
        **{kind: count * getattr(layer, kind) for kind in ("tp", "cp", "ep")},
        "head": x.microbatches * head / x.pp,
        "dp": dp,
        "bubble": bubble,
        "hops": hops,
        "imbalance": x.microbatches * (most - mean_stage - head / x.pp),
        "optimizer": optimizer,
    }
    step = sum(parts.values())
    return StepTime(np.asarray(step), parts, layer, head, hop, most, layer.is_floor)


def _stages(work: Workload, x: LayoutTable, layer: Column, head: Column) -> tuple[Column, Column]:
    """Seconds of the slowest stage, and the mean over stages, when whole layers are cut as evenly as they can be."""
    layers = work.model.layers
    mean = (layers * layer + head) / x.pp
    if not work.balanced:
        most = np.ceil(layers / x.pp) * layer + head
        return most, mean
    parts = x.pp * x.parts
    last = np.clip(np.floor((mean / np.maximum(x.parts, 1) - head) / layer), 0, layers)  # layers beside the head
    best = np.full_like(mean, np.inf)
    for extra in (0, 1):
        beside = np.minimum(last + extra, layers)
        others = np.ceil((layers - beside) / np.maximum(parts - 1, 1))
        with_head = beside * layer + head + (x.parts - 1) * others * layer
        most = np.where(parts > 1, np.maximum(with_head, x.parts * others * layer), layers * layer + head)
        best = np.minimum(best, most)
    # Parts of a rank may differ by a layer, so that no rank needs to have more than the ceiling of its share.
    whole = np.ceil(layers / x.pp) * layer
    return np.where(x.pp > 1, np.clip(best, mean, np.maximum(whole + head, mean)), mean), mean


def _bubble(x: LayoutTable, most: Column, mean: Column, hop: Column) -> tuple[Column, Column]:
    """Idle seconds of the slowest rank, and seconds in which messages travel and nobody computes."""
    names = np.array(SCHEDULES)[x.schedule]
    p, m = x.pp, x.microbatches
    flush = p * mean - most  # of 1F1B and GPipe: every other stage once
    looped = (p - 1) / np.maximum(x.parts, 1) * mean
    fill = np.select(
        [np.isin(names, ("gpipe", "1f1b")), names == "interleaved_1f1b", names == "zb_h1"],
        [np.maximum(flush, 0.0), looped, (p - 1) * mean / 3.0],
        (p - 1) * mean / 6.0,
    )
    steady = np.where(np.isin(names, ("gpipe", "1f1b")), (m - 1) * 2.0 * hop, 0.0)
    hops = np.where(names == "gpipe", 0.0, steady) + 2.0 * (p - 1) * hop
    return np.where(p > 1, fill, 0.0), np.where(p > 1, hops, 0.0)


def parameter_groups(work: Workload, x: LayoutTable) -> list[tuple[Column, Column, Column]]:
    """(parameters of a rank, ranks that shard them, their stride), of dense ones and of experts, on the fullest rank.

    Ranks of cp hold copies of parameters, and shard them with those of dp_shard.
    """
    model, experts = work.model, work.model.experts
    ends = np.where(x.pp > 1, 1, 1 if model.tied else 2)  # embedding and head on ranks of their own
    ends = np.where((x.pp > 1) & (x.parts == 2) & np.isin(x.schedule, _V_NUMBERS), 2, ends)
    moe_layers = model.layers - (experts.dense_layers if experts else model.layers)
    each = model.dense_layer_parameters
    first = (model.layers - moe_layers) * (model.attention_parameters + model.mlp_parameters(model.ffn))
    total = (moe_layers * each + first) if experts else model.layers * each
    dense = (total / x.pp + ends * model.embedding_parameters) / x.tp
    found = [(dense, x.dp_shard * x.cp, x.tp)]
    if experts:
        mine = moe_layers * model.expert_parameters / (x.pp * x.ep)
        found.append((mine, np.maximum(x.dp_shard * x.cp * x.tp // x.ep, 1), x.ep))
    return found


_V_NUMBERS = tuple(SCHEDULES.index(name) for name in ("zbv", "v_half", "dualpipev"))


def exposed_dp(machine: Machine, work: Workload, x: LayoutTable, layer: LayerTime) -> Column:
    """Seconds of gradients and gathered parameters that backward, and of stage 3 forward, does not hide."""
    passes = x.microbatches
    per_pass = work.model.layers / x.pp
    forward, backward = per_pass * layer.forward, per_pass * layer.backward
    hidden = np.where((x.pp > 1) & (not work.overlaps_pipeline), 0.0, machine.overlap)
    total = np.zeros_like(forward)
    for count, ranks, stride in parameter_groups(work, x):
        nbytes = work.bytes.wire * count
        one = gather_seconds(machine, nbytes, ranks, stride)
        whole = all_reduce_seconds(machine, nbytes, ranks * x.dp_replicate, stride)
        across = all_reduce_seconds(machine, nbytes / ranks, x.dp_replicate, stride * ranks)
        left = np.maximum(0.0, one + across - hidden * backward) + one / work.model.layers
        in_backward = np.where(ranks * x.dp_replicate > 1, left, 0.0)
        stage0 = np.maximum(0.0, whole - hidden * backward) + whole / work.model.layers
        stage2 = np.where(x.pp > 1, in_backward, passes * in_backward) + one
        stage3 = passes * (
            np.maximum(0.0, one - machine.overlap * forward)
            + np.maximum(0.0, 2.0 * one - machine.overlap * backward)
            + 2.0 * one / work.model.layers
        ) + np.where(x.dp_replicate > 1, across, 0.0)
        total = total + np.select(
            [x.stage == 0, x.stage == 1, x.stage == 2], [stage0, in_backward + one, stage2], stage3
        )
    return total
