"""Bytes that a rank holds at the peak of a step.

    memory = predict_memory(machine, work, table)
    memory.total[0], memory.parts["activations"][0]

Activations of a layer, in bytes per token and with 16-bit elements, t = tp (Korthikanti and others 2022,
arXiv:2205.05198, with other MLPs and heads):

    norms' and linears' inputs, dropout's masks   8 h + 2 h        / t with sequence parallelism
    queries, keys, values; what the output takes  2 d (2 a + 2 kv) / t
    MLP: gate, up and their product, or the activation's input and output    2 (3 or 2) f / t
    gated, without fused kernels: the activation of gate besides             2 f / t
        RMSNorms compute in float32, and keep rows before their weight       2 * 4 h / t with sequence parallelism
    scores, softmax, dropout, where attention is not fused                   5 a s / t

With full recomputation 2 h of each layer, and one layer's whole.

Backward begins with all of them, and while it is in a layer's MLP holds more than it has freed: the gradients of the
product, of gate and of up (of the activation's input) beside what they are made of, the stream's, and the weight's that
comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastpar.layouts.layout import RECOMPUTE
from fastpar.planner.cost import parameter_groups
from fastpar.planner.layer_time import tokens_of
from fastpar.planner.machine import Machine
from fastpar.planner.table import SCHEDULES, Column, LayoutTable
from fastpar.planner.workload import Workload

MEMORY_PARTS = ("parameters", "gradients", "states", "activations", "logits", "buffers")
_BUCKET_BYTES = 50 << 20
_STAGED_BYTES, _FIRST_BYTES = 25 << 20, 1 << 20  # of a bucket of `fp.zero.shard`, and of the first one
_POOLED_BYTES, _HUGE_PAGE = 8 << 20, 2 << 20  # outputs that the pool of csrc/common/large_buffer.h holds, in such pages
_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclass(frozen=True)
class Memory:
    """Columns of bytes: `total` of the fullest pipeline rank, and what it is made of (MEMORY_PARTS)."""

    total: Column
    parts: Mapping[str, Column]


def layer_activations(work: Workload, x: LayoutTable) -> Column:
    """Bytes that a layer keeps of a microbatch without recomputation of products; scores where they are kept."""
    return _layer(work, x, with_scores=~work_is_selective(work, x))


def work_is_selective(work: Workload, x: LayoutTable) -> Column:
    """Whether attention's scores are computed again (or are never kept)."""
    return (x.recompute == _SELECTIVE) | work.fused_attention


def _eager_norm_bytes(work: Workload) -> float:
    """What an RMSNorm of several ops keeps of an element beyond its input: float32 rows instead of it, normalised rows.

    A shape does not say which norm a model has; gated MLPs and RMSNorms go together.
    """
    return 4.0 if work.model.gated and not work.fused_kernels else 0.0


def _layer(work: Workload, x: LayoutTable, with_scores: Column) -> Column:
    model, tokens, half = work.model, tokens_of(work, x), work.element / 2.0
    stream = np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    kv = np.maximum(model.kv_heads / x.tp, 1.0)
    residual = (8.0 * half + (2.0 if model.dropout else 0.0) + 2.0 * _eager_norm_bytes(work)) * model.hidden * stream
    heads = 2.0 * half * model.head_dim * (2.0 * model.heads / x.tp + 2.0 * kv)
    width = (3.0 if work.fused_kernels else 4.0) if model.gated else 2.0
    experts = model.experts
    mlp = 2.0 * half * width * model.ffn / x.tp
    if experts is not None:
        dense = experts.dense_layers / model.layers
        rows = experts.top_k * work.expert_load * stream
        routed = 2.0 * half * rows * (width * experts.ffn + 2.0 * model.hidden)
        mlp = dense * mlp + (1.0 - dense) * (routed + 2.0 * half * width * experts.shared_ffn / x.tp)
    if work.fused_attention:  # of the softmax its normalisers, float32
        scores = 4.0 * model.heads / x.tp
        return tokens * (residual + heads + mlp + scores)
    kept = (2.0 * half + (1.0 + 2.0 * half if model.dropout else 0.0)) * model.heads * work.seq / x.tp
    return tokens * (residual + heads + mlp + np.where(with_scores, kept, 0.0))


def layer_whole(work: Workload, x: LayoutTable) -> Column:
    """Bytes that a layer keeps of a microbatch where nothing is computed again."""
    return _layer(work, x, with_scores=np.ones(len(x), dtype=bool))


def kept_activations(work: Workload, x: LayoutTable) -> Column:
    """Bytes that a layer keeps of a microbatch until its backward."""
    stream = np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    boundary = work.element * tokens_of(work, x) * work.model.hidden * stream
    kept = layer_activations(work, x)
    if work.fused_attention:  # what element-wise ops make is made again from the results of products
        lean = _selective_fused(work, x)
        kept = np.where(x.recompute == _SELECTIVE, lean, kept)
    return np.where(x.recompute == _FULL, boundary, kept)


def _selective_fused(work: Workload, x: LayoutTable) -> Column:
    """Bytes of the layer's input and of the results of its products and attention."""
    model, tokens, two = work.model, tokens_of(work, x), float(work.element)
    stream = np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    kv = np.maximum(model.kv_heads / x.tp, 1.0)
    heads = two * model.head_dim * (2.0 * model.heads / x.tp + 2.0 * kv) + 4.0 * model.heads / x.tp
    up = 2.0 if model.gated else 1.0
    mlp = two * up * model.ffn / x.tp
    if model.experts is not None:
        rows = model.experts.top_k * work.expert_load * stream
        mlp = two * rows * (up * model.experts.ffn + model.hidden) + two * up * model.experts.shared_ffn / x.tp
    return tokens * (3.0 * two * model.hidden * stream + heads + mlp)


def in_flight(x: LayoutTable) -> Column:
    """Microbatches whose activations the first rank keeps at once, in units of all layers of a rank.

    What `fastpar.pipeline.activation_peaks` counts, as a formula; a test compares them.
    """
    names = np.array(SCHEDULES)[x.schedule]
    p, m, v = x.pp, x.microbatches, np.maximum(x.parts, 1)
    rounds = np.maximum(1, m // p)
    first = -(-m // rounds)
    looped = np.minimum(m * v, (v - 1) * first + 2 * (p - 1) + 1) / v
    found = np.select(
        [names == "gpipe", names == "1f1b", names == "interleaved_1f1b", names == "zb_h1", names == "zbv"],
        [m, np.minimum(m, p), looped, np.minimum(m, p), np.minimum(m, p)],
        np.where(names == "v_half", np.minimum(m, (p + 2) / 2.0), np.minimum(m, (2 * p + 1) / 2.0)),
    )
    return np.where(p > 1, found, 1.0)


def predict_memory(machine: Machine, work: Workload, x: LayoutTable) -> Memory:
    """Bytes of every row: the fuller of the first pipeline rank (activations) and the last one (logits)."""
    kept, whole = kept_activations(work, x), layer_whole(work, x)
    per_rank = np.ceil(work.model.layers / x.pp)
    working = np.where(x.recompute == _FULL, whole, np.where(x.recompute == _SELECTIVE, whole - kept, 0.0))
    first = in_flight(x) * per_rank * kept + working
    names = np.array(SCHEDULES)[x.schedule]
    v_shaped = np.isin(names, ("zbv", "v_half", "dualpipev"))
    last_count = np.where(names == "1f1b", 1.0, in_flight(x) - np.where((x.pp > 1) & (names != "gpipe"), 0.5, 0.0))
    last_count = np.where(x.pp > 1, np.maximum(last_count, 1.0), 1.0)
    last = last_count * per_rank * kept + working
    logits = logits_bytes(work, x)
    first = first + np.where((x.pp == 1) | v_shaped, 0.0, backward_bytes(work, x))
    held = held_bytes(machine, work, x)
    grads_first = gradient_bytes(work, x, held, in_flight(x), per_rank * kept)
    grads_last = gradient_bytes(work, x, held, last_count, per_rank * kept)
    has_both = (x.pp == 1) | v_shaped
    is_last = has_both | (last + logits + grads_last > first + grads_first)
    parts = {
        "parameters": held["parameters"],
        "gradients": np.where(is_last & ~has_both, grads_last, grads_first),
        "states": held["states"],
        "activations": np.where(is_last & ~has_both, last, first),
        "logits": np.where(is_last, logits, 0.0),
        "buffers": held["buffers"],
    }
    if work.copies_gradients:
        # Where a pass is a step, and gradients leave buckets as rows, backward begins without any (`zero_grad`), and
        # ends with all of them and a layer of activations: whichever is more.
        freed = parts["activations"] - whole + parts["logits"]
        is_alone = (x.pp == 1) & (x.stage > 0) & (x.microbatches == 1)
        alone = np.maximum(np.maximum(held["rows"] - freed, 0.0), held["pooled"])
        parts["gradients"] = np.where(is_alone, alone, parts["gradients"])
    return Memory(np.asarray(sum(parts.values())), parts)


def gradient_bytes(
    work: Workload, x: LayoutTable, held: Mapping[str, Column], count: Column | float, microbatch: Column | float
) -> Column:
    """Gradients where a rank keeps most activations, those of `count` microbatches (bytes of each: `microbatch`).

    A rank that has run all forwards by then has no sums yet: they come while a microbatch's activations go.
    """
    freed = np.where((x.pp > 1) & (count >= x.microbatches) & work.copies_gradients, microbatch, 0.0)
    rows = np.maximum(held["rows"], held["pooled"])
    return np.asarray(np.maximum(held["sums"] - freed, 0.0) + held["buckets"] + rows)


def backward_bytes(work: Workload, x: LayoutTable) -> Column:
    """What the backward of the MLP that comes first holds beyond what it has freed: see the module docstring."""
    model, tokens = work.model, tokens_of(work, x)
    ffn = model.ffn if model.experts is None or model.experts.dense_layers else 0
    stream = np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    made = tokens * ((2.0 if model.gated else 1.0) * ffn / x.tp + model.hidden * stream)
    return np.asarray(work.element * made + work.bytes.param * model.hidden * ffn / x.tp)


def logits_bytes(work: Workload, x: LayoutTable) -> Column:
    """Logits, their softmax in float32 and their gradient: what is alive at once; with the fused loss one chunk. And
    the inputs of the last norm and of the head. Or what the layers' backward begins with, if that is more."""
    per_logit = 3.0 * work.element
    tokens = np.minimum(tokens_of(work, x), 1024) if work.fused_loss else tokens_of(work, x)
    stream = tokens_of(work, x) * work.model.hidden * np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    kept = (2.0 * work.element + _eager_norm_bytes(work)) * stream
    return np.asarray(np.maximum(kept + per_logit * tokens * work.model.vocab / x.tp, backward_bytes(work, x)))


def held_bytes(machine: Machine, work: Workload, x: LayoutTable) -> dict[str, Column]:
    """What does not depend on which activations are there: "parameters", "states" and "buffers", as docs/zero.md counts
    them; gradients as "sums" over microbatches, "buckets" that stay from step to step, and "rows" of this rank;
    "pooled": memory of rows that a CPU rank keeps when they are gone."""
    kind = work.bytes
    zero = np.zeros(len(x))
    found = dict.fromkeys(("parameters", "sums", "buckets", "rows", "states", "pooled"), zero)
    is_summed = (x.stage < 2) | (x.pp > 1)
    if work.copies_gradients:  # a single microbatch is not summed
        is_summed = is_summed & ~((x.stage == 1) & (x.pp == 1) & (x.microbatches == 1))
    for count, ranks, _ in parameter_groups(work, x):
        sharded = count / ranks
        # Pipelines gather stage 3's parameters for all of a run, beside the rows. They, and stages 0 and 1, sum whole
        # gradients over microbatches before they travel.
        params = np.where(x.stage == 3, sharded + np.where(x.pp > 1, count, 0.0), count)
        found["parameters"] = found["parameters"] + kind.param * params
        found["sums"] = found["sums"] + kind.grad * np.where(is_summed, count, 0.0)
        found["rows"] = found["rows"] + kind.grad * np.where(is_summed, 0.0, sharded)
        if work.copies_gradients:  # the buckets stay from step to step
            is_copied = (x.stage == 0) & ((x.pp > 1) | (x.microbatches > 1))
            found["buckets"] = found["buckets"] + kind.wire * np.where(is_copied, count, 0.0)
            found["pooled"] = found["pooled"] + _pooled(machine, work, x, kind.grad * count, ranks)
        found["states"] = found["states"] + kind.state * np.where(x.stage > 0, sharded, count)
    found["states"] = np.where(x.offload == 1, 0.0, found["states"])
    return {**found, "buffers": _buffers(work, x)}


def _pooled(machine: Machine, work: Workload, x: LayoutTable, nbytes: Column, ranks: Column) -> Column:
    """Memory that reduce-scatters have returned their rows in, and that the pool of outputs keeps until the next ones:
    of buckets, or of units of stage 3."""
    unit = work.bytes.grad * _largest_unit(work, x)
    output = np.where(x.stage == 3, unit, np.minimum(_STAGED_BYTES, nbytes)) / ranks
    held = np.ceil(output / _HUGE_PAGE) * _HUGE_PAGE
    count = np.minimum(float(machine.pooled_outputs), nbytes / ranks / np.maximum(output, 1.0))
    return np.where((x.stage > 0) & (ranks > 1) & (output >= _POOLED_BYTES), count * held, 0.0)


def _largest_unit(work: Workload, x: LayoutTable) -> Column:
    """Parameters of what stage 3 gathers at once: a layer without its norms, which stay whole, or an embedding."""
    model = work.model
    unit = (model.dense_layer_parameters - 2 * model.hidden) / x.tp + model.expert_parameters / x.ep
    return np.asarray(np.maximum(unit, model.embedding_parameters / x.tp))


def _buffers(work: Workload, x: LayoutTable) -> Column:
    """Two buckets, or two whole units of stage 3; what pipelines receive; rows of experts under way."""
    model, kind = work.model, work.bytes
    # A pipeline's run has gathered all units: they are parameters
    units = 2.0 * (kind.wire + np.where(x.pp > 1, 0.0, kind.param)) * _largest_unit(work, x)
    gradients = kind.wire * sum(count for count, *_ in parameter_groups(work, x))
    buckets = np.minimum(2.0 * _BUCKET_BYTES, gradients) * (x.dp > 1)  # small models fill none
    if work.copies_gradients:  # stage 0's buckets are its gradients; a tensor larger than a bucket has one of its own
        largest = kind.wire * model.hidden * max(model.vocab, model.ffn) / x.tp
        rest = np.maximum(gradients - _FIRST_BYTES, np.minimum(gradients, _FIRST_BYTES))
        buckets = 2.0 * np.maximum(np.minimum(_STAGED_BYTES, rest), largest) * ((x.dp > 1) & (x.stage > 0))
    hop = work.element * tokens_of(work, x) * model.hidden * np.where(x.sp == 1, 1.0 / x.tp, 1.0)
    found = np.where(x.stage == 3, units, buckets) + np.where(x.pp > 1, 4.0 * hop, 0.0)
    if model.experts is not None:
        rows = tokens_of(work, x) * np.where(x.sp == 1, 1.0 / x.tp, 1.0) * model.experts.top_k * work.expert_load
        found = found + 2.0 * work.element * rows * model.hidden * (x.ep > 1)
    return found
