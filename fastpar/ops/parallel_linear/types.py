"""The parts of a call of a parallel linear that its layer may keep: group, rows of the ranks, chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fastpar.comm import Communicator

if TYPE_CHECKING:
    from fastpar.ops.weight_grad_store.store import WeightGradStore


class RankRows(NamedTuple):
    """Which rows of a tensor [..., features] belong to whom, and in how many chunks they are computed.

    dim         the dim that is split over the ranks, counted from the front; unused by the all-reduce
    sizes       rows of every rank along dim
    chunks      pieces in which GEMM and collective alternate; 1: one GEMM, one collective
    concurrent  whether a collective may be in flight during other work
    """

    dim: int
    sizes: tuple[int, ...]
    chunks: int
    concurrent: bool


class LinearSpec(NamedTuple):
    """One of the four linears. Not attributes of its autograd function, since Dynamo does not read those.

    op                its name among torch's ops; its backward is `{op}_backward`
    function          the autograd function
    gathers_input     whether x is gathered; False: it stays, or the output is scattered
    forward_product   the GEMM with a collective in forward, as `measure_overlap` calls it; "": there is none
    backward_product  the same of backward
    """

    op: str
    function: Any
    gathers_input: bool
    forward_product: str
    backward_product: str


class LinearCall(NamedTuple):
    """A checked call, apart from its tensors; a layer may keep it for all tensors of one shape.

    spec      which linear
    comm      of at least two ranks, or of one for `COPY_TO_LINEAR`
    rows      of forward
    backward  the same rows, in the chunks of backward
    """

    spec: LinearSpec
    comm: Communicator
    rows: RankRows
    backward: RankRows


class DeferredGrads(NamedTuple):
    """Where the gradients of weights and biases go when they are computed later."""

    store: WeightGradStore
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
