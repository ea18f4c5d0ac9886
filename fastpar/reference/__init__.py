"""Plain-PyTorch versions of the ops, same signatures: for debugging, for tests, and for devices without kernels.

What an option changes the kind of (a tensor or several) is typed at the ops, and Any here.
"""

from fastpar.contracts.moe import ExpertRule
from fastpar.contracts.transformer import rotary_tables
from fastpar.reference.attention import attention
from fastpar.reference.cross_entropy import vocab_parallel_cross_entropy
from fastpar.reference.dropout import sharded_dropout
from fastpar.reference.embedding import vocab_parallel_embedding
from fastpar.reference.gradients import dequantize_blocks, exact_square_sum, quantize_blocks, square_sum_norm
from fastpar.reference.grouped_linear import grouped_linear
from fastpar.reference.linear import all_gather_linear, copy_to_linear, linear_all_reduce, linear_reduce_scatter
from fastpar.reference.linear_cross_entropy import linear_cross_entropy
from fastpar.reference.moe_mlp import moe_mlp
from fastpar.reference.moe_route import expert_choice_route, moe_route
from fastpar.reference.newton_schulz import newton_schulz
from fastpar.reference.optimizer import adamw_step, lion_step, sgd_step
from fastpar.reference.transformer import (
    add_rms_norm,
    all_reduce_rms_norm,
    reduce_scatter_rms_norm,
    rms_norm,
    rotary_embedding,
    swiglu,
)
from fastpar.reference.vocab_entropy import (
    vocab_parallel_entropy,
    vocab_parallel_log_prob,
    vocab_parallel_log_prob_and_entropy,
)
from fastpar.reference.vocab_filter import vocab_parallel_top_k_top_p
from fastpar.reference.vocab_sample import vocab_parallel_sample
from fastpar.reference.vocab_softmax import vocab_parallel_log_softmax, vocab_parallel_softmax
from fastpar.reference.vocab_topk import vocab_parallel_argmax, vocab_parallel_topk

__all__ = [
    "ExpertRule",
    "adamw_step",
    "add_rms_norm",
    "all_gather_linear",
    "all_reduce_rms_norm",
    "attention",
    "copy_to_linear",
    "dequantize_blocks",
    "exact_square_sum",
    "expert_choice_route",
    "grouped_linear",
    "linear_all_reduce",
    "linear_cross_entropy",
    "linear_reduce_scatter",
    "lion_step",
    "moe_mlp",
    "moe_route",
    "newton_schulz",
    "quantize_blocks",
    "reduce_scatter_rms_norm",
    "rms_norm",
    "rotary_embedding",
    "rotary_tables",
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
