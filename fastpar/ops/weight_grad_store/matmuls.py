"""The products of which a weight gradient can be put off, by the autograd node that their forward leaves in the graph.

    node                   operands (edges)              gradient of the right one       of the left one
    MmBackward0            self 0, mat2 1                self.T @ dout                   dout @ mat2.T
    AddmmBackward0         bias 0, mat1 1, mat2 2        alpha mat1.T @ dout             alpha dout @ mat2.T
    BmmBackward0           self 0, mat2 1                self.mT @ dout                  dout @ mat2.mT
    BaddbmmBackward0       bias 0, batch1 1, batch2 2    alpha batch1.mT @ dout          alpha dout @ batch2.mT
    ConvolutionBackward0   input 0, weight 1, bias 2     aten.convolution_backward with a mask

The gradient of an added bias is beta dout, summed over what was broadcast. F.linear, matmul, einsum and Hugging Face's
Conv1D all end in these nodes. The formulas are those of torch's tools/autograd/derivatives.yaml and FunctionsManual.cpp
down to which operand is transposed, so the bits are those of an undivided backward.

What a node has saved is read just before it runs, when dout is complete. An entry holds dout and the operands that its
weight gradients take, and nothing else.

Note: saved tensors with hooks. A tensor that was saved under torch.autograd.graph.saved_tensors_hooks is unpacked
twice, here and by the node itself, which the hooks of torch allow. Those of torch.utils.checkpoint do not: they forget
a recomputed tensor when it has been unpacked once, as does a holder's `handles[group] = None`. `_Handles` lets the
first one pass unseen, so the recomputation happens once, and what it brought serves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# How a gradient gets from a use of a parameter to the parameter.
STRAIGHT, TRANSPOSED, THROUGH_NODES = range(3)


class Target(NamedTuple):
    """Where a gradient goes.

    node, input_nr  an edge of the autograd graph
    parameter       the node that accumulates the gradient of the parameter; None: there are several
    way             from the edge to the parameter
    """

    node: Any
    input_nr: int
    parameter: Any
    way: int


class Entry:
    """Gradients that are still to be computed.

    targets      where they go
    sequence_nr  of the node that would have computed them; -1: they come last
    is_fresh     whether their memory belongs to nobody else
    """

    __slots__ = ("is_fresh", "sequence_nr", "targets")

    def __init__(self, targets: Sequence[Target], sequence_nr: int, is_fresh: bool) -> None:
        self.targets, self.sequence_nr, self.is_fresh = targets, sequence_nr, is_fresh

    def compute(self) -> Sequence[Tensor | None]:
        """One for each target."""
        raise NotImplementedError


# ---- saved tensors ---------------------------------------------------------------------------------------------------


class _Handles(dict[Any, Any]):
    """The handles of one saved tensor of a checkpoint, by group of executions; the first None is not written."""

    is_used = False

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is None and not self.is_used:
            self.is_used = True
            return
        super().__setitem__(key, value)


def _packed(raw: Any) -> Any:
    """What the hooks of a saved tensor have packed; None without hooks, or where torch does not say."""
    return raw.data if getattr(raw, "unpack_hook", None) is not None else None


def _is_checkpointed(packed: Any) -> bool:
    return type(packed).__name__ == "_Holder" and type(packed).__module__ == "torch.utils.checkpoint"


def can_read(node: Any, name: str) -> bool:
    """Whether a saved tensor may be read in addition to the node's own reading of it."""
    packed = _packed(getattr(node, f"_raw_saved_{name}"))
    return packed is None or not _is_checkpointed(packed) or isinstance(getattr(packed, "handles", None), dict)


def has_hooks(node: Any) -> bool:
    """Whether anything that the node has saved was packed by hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raws = getattr(node, name)
            for raw in raws if isinstance(raws, tuple | list) else (raws,):
                if getattr(raw, "unpack_hook", None) is not None:
                    return True
    return False


def _read(node: Any, name: str) -> tuple[Tensor, int]:
    """A saved tensor without the graph that it hangs on, and its version."""
    packed = _packed(getattr(node, f"_raw_saved_{name}"))
    if packed is not None and _is_checkpointed(packed):
        packed.handles = _Handles(packed.handles)
    tensor: Tensor = getattr(node, f"_saved_{name}").detach()
    return tensor, tensor._version


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that a weight gradient is still to be computed from has been "
            "modified in place since its microbatch went backward"
        )
    return tensor


# ---- formulas --------------------------------------------------------------------------------------------------------


def _conj(x: Tensor) -> Tensor:
    return x.conj() if x.is_complex() else x


def _of_left(dout: Tensor, right: Tensor, column_major: bool) -> Tensor:
    """The gradient of A in A @ B, stored as A is: mm_mat1_backward."""
    if column_major:
        return _conj(right).mm(dout.t()).t()
    return dout.mm(_conj(right.t()))


def _of_right(dout: Tensor, left: Tensor, column_major: bool) -> Tensor:
    """The gradient of B in A @ B, stored as B is: mm_mat2_backward."""
    if column_major:
        return dout.t().mm(_conj(left)).t()
    return _conj(left.t()).mm(dout)


def _of_left_batch(dout: Tensor, right: Tensor, _: bool) -> Tensor:
    return dout.bmm(_conj(right.transpose(1, 2)))


def _of_right_batch(dout: Tensor, left: Tensor, _: bool) -> Tensor:
    return _conj(left.transpose(1, 2)).bmm(dout)


def _of_added(dout: Tensor, target: Target, beta: Any) -> Tensor:
    """The gradient of something added, which may have been broadcast."""
    grad = dout if beta == 1 else dout * beta
    summed = grad.sum_to_size(target.node._input_metadata[target.input_nr].shape)
    return summed.clone() if summed is dout else summed


class _Operand(NamedTuple):
    """What the gradient of one operand takes."""

    formula: Callable[[Tensor, Tensor, bool], Tensor]
    other: Tensor
    version: int
    is_column_major: bool


class _MatrixProduct(Entry):
    """beta bias + alpha left @ right; None in place of an operand: the bias."""

    __slots__ = ("alpha", "beta", "dout", "operands")

    def __init__(self, kind: MatrixKind, node: Any, edges: Sequence[int], targets: Sequence[Target], dout: Tensor):
        super().__init__(targets, node._sequence_nr(), True)
        self.dout, self.alpha, self.beta = dout, 1, 1
        if kind.first == 1:
            self.alpha, self.beta = node._saved_alpha, node._saved_beta
        self.operands = [kind.operand(node, edge) for edge in edges]

    def compute(self) -> list[Tensor]:
        grads = []
        for target, operand in zip(self.targets, self.operands, strict=True):
            if operand is None:
                grads.append(_of_added(self.dout, target, self.beta))
                continue
            formula, other, version, is_column_major = operand
            grad = formula(self.dout, _unchanged(other, version), is_column_major)
            grads.append(grad if self.alpha == 1 else grad * self.alpha)
        return grads


class _Convolution(Entry):
    __slots__ = ("arguments", "dout", "mask", "version", "weight", "x")

    def __init__(self, node: Any, edges: Sequence[int], targets: Sequence[Target], dout: Tensor):
        super().__init__(targets, node._sequence_nr(), True)
        self.dout = dout
        self.x, self.version = _read(node, "input")
        self.weight = node._saved_weight.detach()  # for its shape and layout
        self.arguments = (
            node._saved_bias_sym_sizes_opt,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        self.mask = [False, 1 in edges, 2 in edges]

    def compute(self) -> list[Tensor]:
        x = _unchanged(self.x, self.version)
        grads = torch.ops.aten.convolution_backward(self.dout, x, self.weight, *self.arguments, self.mask)
        return [grad for grad, wanted in zip(grads, self.mask, strict=True) if wanted]


# ---- kinds -----------------------------------------------------------------------------------------------------------


class MatrixKind:
    """A product of two matrices or batches of them, which are the edges `first` and first + 1; edge 0 may be a bias.

    `reads` has for every edge that may lead to a weight the saved tensor that its gradient takes; None for a bias.
    """

    def __init__(self, first: int, left: str, right: str, *, batched: bool) -> None:
        self.first, self.left, self.right, self.batched = first, left, right, batched
        self.reads: dict[int, str | None] = {first: right, first + 1: left}
        if first == 1:
            self.reads[0] = None
        self.formulas = (_of_left_batch, _of_right_batch) if batched else (_of_left, _of_right)

    def operand(self, node: Any, edge: int) -> _Operand | None:
        other = self.reads[edge]
        if other is None:
            return None
        is_column_major = False
        if not self.batched:
            name = self.left if edge == self.first else self.right
            sizes, strides = getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")
            is_column_major = bool(strides[0] == 1 and strides[1] == sizes[0])
        return _Operand(self.formulas[edge - self.first], *_read(node, other), is_column_major)

    def entry(self, node: Any, edges: Sequence[int], targets: Sequence[Target], dout: Tensor) -> Entry:
        return _MatrixProduct(self, node, edges, targets, dout)


class ConvolutionKind:
    """The convolution's counterpart of `MatrixKind`."""

    def __init__(self) -> None:
        self.reads: dict[int, str | None] = {1: "input", 2: None}

    def entry(self, node: Any, edges: Sequence[int], targets: Sequence[Target], dout: Tensor) -> Entry:
        return _Convolution(node, edges, targets, dout)


PRODUCTS: dict[str, MatrixKind | ConvolutionKind] = {
    "MmBackward0": MatrixKind(0, "self", "mat2", batched=False),
    "AddmmBackward0": MatrixKind(1, "mat1", "mat2", batched=False),
    "BmmBackward0": MatrixKind(0, "self", "mat2", batched=True),
    "BaddbmmBackward0": MatrixKind(1, "batch1", "batch2", batched=True),
    "ConvolutionBackward0": ConvolutionKind(),
}
