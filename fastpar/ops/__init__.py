"""Ops with kernels: the launcher, the fake, the autograd and the public function of each family in a file of its own.

Names are looked up on first use, so that a part of fastpar that needs no kernel works without the compiled library.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpar.contracts.attention import AttentionDropout, AttentionMask, AttentionTiles, TokenRange
    from fastpar.contracts.moe import ExpertRule
    from fastpar.ops.all_reduce_rms_norm import all_reduce_rms_norm
    from fastpar.ops.attention import attention
    from fastpar.ops.context_attention.api import context_attention
    from fastpar.ops.context_attention.methods import GatherKeys, Usp
    from fastpar.ops.cross_entropy import vocab_parallel_cross_entropy
    from fastpar.ops.dropout import sharded_dropout
    from fastpar.ops.embedding import vocab_parallel_embedding
    from fastpar.ops.linear_cross_entropy import (
        linear_cross_entropy,
        linear_cross_entropy_dgrad,
        linear_cross_entropy_wgrad,
    )
    from fastpar.ops.moe.capacity import expert_capacity, moe_capacity
    from fastpar.ops.moe.dispatch_combine import moe_combine, moe_dispatch
    from fastpar.ops.moe.dispatcher import DispatchHandle
    from fastpar.ops.moe.grouped_linear import grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad
    from fastpar.ops.moe.mlp import moe_mlp
    from fastpar.ops.moe.plan import Dispatch, Padding
    from fastpar.ops.moe.plan_send import moe_plan, moe_send
    from fastpar.ops.moe.route import RouteRule, Routing, expert_choice_route, moe_route, router_logits
    from fastpar.ops.moe.weights import ExpertWeights
    from fastpar.ops.newton_schulz import newton_schulz
    from fastpar.ops.optimizer import StochasticRounding, adamw_step, lion_step, sgd_step
    from fastpar.ops.parallel_linear.api import (
        all_gather_linear,
        copy_to_linear,
        linear_all_reduce,
        linear_reduce_scatter,
    )
    from fastpar.ops.parallel_linear.overlap import Overlap, OverlapShape, measure_overlap
    from fastpar.ops.quantize import dequantize_blocks, quantize_blocks
    from fastpar.ops.reduce_scatter_rms_norm import reduce_scatter_rms_norm
    from fastpar.ops.rms_norm import add_rms_norm, rms_norm
    from fastpar.ops.rotary_embedding import rotary_embedding, rotary_tables
    from fastpar.ops.square_sum import exact_square_sum, square_sum_norm
    from fastpar.ops.swiglu import swiglu
    from fastpar.ops.vocab_entropy import (
        vocab_parallel_entropy,
        vocab_parallel_log_prob,
        vocab_parallel_log_prob_and_entropy,
    )
    from fastpar.ops.vocab_filter import vocab_parallel_top_k_top_p
    from fastpar.ops.vocab_sample import vocab_parallel_sample
    from fastpar.ops.vocab_softmax import vocab_parallel_log_softmax, vocab_parallel_softmax
    from fastpar.ops.vocab_topk import vocab_parallel_argmax, vocab_parallel_topk
    from fastpar.ops.weight_grad_store.store import WeightGradStore

_HOME = {
    "AttentionDropout": "fastpar.contracts.attention",
    "AttentionMask": "fastpar.contracts.attention",
    "AttentionTiles": "fastpar.contracts.attention",
    "Dispatch": "fastpar.ops.moe.plan",
    "DispatchHandle": "fastpar.ops.moe.dispatcher",
    "ExpertRule": "fastpar.contracts.moe",
    "ExpertWeights": "fastpar.ops.moe.weights",
    "GatherKeys": "fastpar.ops.context_attention.methods",
    "Overlap": "fastpar.ops.parallel_linear.overlap",
    "OverlapShape": "fastpar.ops.parallel_linear.overlap",
    "Padding": "fastpar.ops.moe.plan",
    "RouteRule": "fastpar.contracts.moe",
    "Routing": "fastpar.contracts.moe",
    "StochasticRounding": "fastpar.ops.optimizer",
    "TokenRange": "fastpar.contracts.attention",
    "Usp": "fastpar.ops.context_attention.methods",
    "WeightGradStore": "fastpar.ops.weight_grad_store.store",
    "adamw_step": "fastpar.ops.optimizer",
    "all_gather_linear": "fastpar.ops.parallel_linear.api",
    "add_rms_norm": "fastpar.ops.rms_norm",
    "all_reduce_rms_norm": "fastpar.ops.all_reduce_rms_norm",
    "attention": "fastpar.ops.attention",
    "context_attention": "fastpar.ops.context_attention.api",
    "copy_to_linear": "fastpar.ops.parallel_linear.api",
    "dequantize_blocks": "fastpar.ops.quantize",
    "exact_square_sum": "fastpar.ops.square_sum",
    "expert_capacity": "fastpar.ops.moe.capacity",
    "expert_choice_route": "fastpar.ops.moe.route",
    "grouped_linear": "fastpar.ops.moe.grouped_linear",
    "grouped_linear_dgrad": "fastpar.ops.moe.grouped_linear",
    "grouped_linear_wgrad": "fastpar.ops.moe.grouped_linear",
    "linear_all_reduce": "fastpar.ops.parallel_linear.api",
    "linear_cross_entropy": "fastpar.ops.linear_cross_entropy",
    "linear_cross_entropy_dgrad": "fastpar.ops.linear_cross_entropy",
    "linear_cross_entropy_wgrad": "fastpar.ops.linear_cross_entropy",
    "linear_reduce_scatter": "fastpar.ops.parallel_linear.api",
    "lion_step": "fastpar.ops.optimizer",
    "measure_overlap": "fastpar.ops.parallel_linear.overlap",
    "moe_capacity": "fastpar.ops.moe.capacity",
    "moe_combine": "fastpar.ops.moe.dispatch_combine",
    "moe_dispatch": "fastpar.ops.moe.dispatch_combine",
    "moe_mlp": "fastpar.ops.moe.mlp",
    "moe_plan": "fastpar.ops.moe.plan_send",
    "moe_route": "fastpar.ops.moe.route",
    "moe_send": "fastpar.ops.moe.plan_send",
    "newton_schulz": "fastpar.ops.newton_schulz",
    "quantize_blocks": "fastpar.ops.quantize",
    "reduce_scatter_rms_norm": "fastpar.ops.reduce_scatter_rms_norm",
    "rms_norm": "fastpar.ops.rms_norm",
    "rotary_embedding": "fastpar.ops.rotary_embedding",
    "rotary_tables": "fastpar.ops.rotary_embedding",
    "router_logits": "fastpar.ops.moe.route",
    "sgd_step": "fastpar.ops.optimizer",
    "sharded_dropout": "fastpar.ops.dropout",
    "square_sum_norm": "fastpar.ops.square_sum",
    "swiglu": "fastpar.ops.swiglu",
    "vocab_parallel_argmax": "fastpar.ops.vocab_topk",
    "vocab_parallel_cross_entropy": "fastpar.ops.cross_entropy",
    "vocab_parallel_embedding": "fastpar.ops.embedding",
    "vocab_parallel_entropy": "fastpar.ops.vocab_entropy",
    "vocab_parallel_log_prob": "fastpar.ops.vocab_entropy",
    "vocab_parallel_log_prob_and_entropy": "fastpar.ops.vocab_entropy",
    "vocab_parallel_log_softmax": "fastpar.ops.vocab_softmax",
    "vocab_parallel_sample": "fastpar.ops.vocab_sample",
    "vocab_parallel_softmax": "fastpar.ops.vocab_softmax",
    "vocab_parallel_top_k_top_p": "fastpar.ops.vocab_filter",
    "vocab_parallel_topk": "fastpar.ops.vocab_topk",
}
__all__ = [
    "AttentionDropout",
    "AttentionMask",
    "AttentionTiles",
    "Dispatch",
    "DispatchHandle",
    "ExpertRule",
    "ExpertWeights",
    "GatherKeys",
    "Overlap",
    "OverlapShape",
    "Padding",
    "RouteRule",
    "Routing",
    "StochasticRounding",
    "TokenRange",
    "Usp",
    "WeightGradStore",
    "adamw_step",
    "add_rms_norm",
    "all_gather_linear",
    "all_reduce_rms_norm",
    "attention",
    "context_attention",
    "copy_to_linear",
    "dequantize_blocks",
    "exact_square_sum",
    "expert_capacity",
    "expert_choice_route",
    "grouped_linear",
    "grouped_linear_dgrad",
    "grouped_linear_wgrad",
    "linear_all_reduce",
    "linear_cross_entropy",
    "linear_cross_entropy_dgrad",
    "linear_cross_entropy_wgrad",
    "linear_reduce_scatter",
    "lion_step",
    "measure_overlap",
    "moe_capacity",
    "moe_combine",
    "moe_dispatch",
    "moe_mlp",
    "moe_plan",
    "moe_route",
    "moe_send",
    "newton_schulz",
    "quantize_blocks",
    "reduce_scatter_rms_norm",
    "rms_norm",
    "rotary_embedding",
    "rotary_tables",
    "router_logits",
    "sgd_step",
    "sharded_dropout",
    "square_sum_norm",
    "swiglu",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_entropy",
    "vocab_parallel_log_prob",
    "vocab_parallel_log_prob_and_entropy",
    "vocab_parallel_log_softmax",
    "vocab_parallel_sample",
    "vocab_parallel_softmax",
    "vocab_parallel_top_k_top_p",
    "vocab_parallel_topk",
]


class _Package(types.ModuleType):
    """Importing fastpar.ops.swiglu binds `swiglu` here to the module; that must not hide the function of this name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastpar.ops' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
