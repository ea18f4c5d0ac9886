"""Parallel styles: what `parallelize` can do with a module. `STYLES` are the words for them in a plan.

| file | what it holds |
|---|---|
| `base.py` | `Style`: the shape of one, for your own; `SwapContext`: what it works with |
| `linear.py` | linears by columns and by rows, embeddings and heads over the vocabulary |
| `block.py` | blocks between two sums, layers of the residual stream |
| `whole.py` | what stays whole: replicated, with partial gradients, on all tokens; dropout |
| `attention.py` | attention of one's own modules over split sequences |
| `experts.py` | stacked experts, spread over the expert group |
"""

from collections.abc import Mapping
from types import MappingProxyType

from fastpar.parallel.styles.attention import AttentionStyle
from fastpar.parallel.styles.base import Style, SwapContext
from fastpar.parallel.styles.block import BlockStyle, StreamStyle
from fastpar.parallel.styles.experts import ExpertStyle
from fastpar.parallel.styles.linear import ColwiseStyle, LayerStyle, RowwiseStyle, VocabStyle
from fastpar.parallel.styles.whole import (
    DropoutStyle,
    GatheredStyle,
    HeadsStyle,
    PartialStyle,
    ReplicateStyle,
    WholeStyle,
)

# fastpar's own words, then those of torch and of Hugging Face's plans.
STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": ColwiseStyle(),
        "colwise_gather_output": ColwiseStyle(gather_output=True),
        "rowwise": RowwiseStyle(),
        "rowwise_split_input": RowwiseStyle(split_input=True),
        "vocab": VocabStyle(),
        "replicate": ReplicateStyle(),
        "partial": PartialStyle(),
        "block": BlockStyle(),
        "heads": HeadsStyle(),
        "whole": WholeStyle(),
        "gathered": GatheredStyle(),
        "stream": StreamStyle(),
        "dropout": DropoutStyle(),
        "expert": ExpertStyle(),
        "attention": AttentionStyle(),
        "packed_colwise": ColwiseStyle(sections=2),
        "packed_qkv": ColwiseStyle(sections=3),
        "sequence": ReplicateStyle(),
        "sequence_parallel": ReplicateStyle(),
        "embedding_rowwise": VocabStyle(),
        "replicated_with_grad_allreduce": PartialStyle(),
        "moe_tp_experts": ExpertStyle(),
        "ep_dispatch_experts": ExpertStyle(),
    }
)

__all__ = [
    "STYLES",
    "AttentionStyle",
    "BlockStyle",
    "ColwiseStyle",
    "DropoutStyle",
    "ExpertStyle",
    "GatheredStyle",
    "HeadsStyle",
    "LayerStyle",
    "PartialStyle",
    "ReplicateStyle",
    "RowwiseStyle",
    "StreamStyle",
    "Style",
    "SwapContext",
    "VocabStyle",
    "WholeStyle",
]
