"""Tensor parallelism: layers split over a group, and sequence parallelism between them."""

from fastpar.tensor.binding import Adoption, adopt, prove_adoption
from fastpar.tensor.dropout import LayoutDropout
from fastpar.tensor.grid import Grid, GridRegion
from fastpar.tensor.grid_layout import GridLayout
from fastpar.tensor.grid_linear import GridLinear
from fastpar.tensor.linear import ColumnParallelLinear, RowParallelLinear
from fastpar.tensor.loss import causal_lm_loss, masked_lm_loss
from fastpar.tensor.parameter import ParameterLayout, RowMap, full_parameter, layout_of, local_tensor, unwrap
from fastpar.tensor.replicated import replicate
from fastpar.tensor.sequence import SequenceRegion
from fastpar.tensor.shared_input import SharedInput
from fastpar.tensor.vocab import VocabParallelEmbedding, VocabParallelHead, gather_vocab

__all__ = [
    "Adoption",
    "ColumnParallelLinear",
    "Grid",
    "GridLayout",
    "GridLinear",
    "GridRegion",
    "LayoutDropout",
    "ParameterLayout",
    "RowMap",
    "RowParallelLinear",
    "SequenceRegion",
    "SharedInput",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "adopt",
    "causal_lm_loss",
    "full_parameter",
    "gather_vocab",
    "layout_of",
    "local_tensor",
    "masked_lm_loss",
    "prove_adoption",
    "replicate",
    "unwrap",
]
