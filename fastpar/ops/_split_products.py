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

What a node has saved is read just before it runs, when its own gradient is complete. Each reader below takes (node,
edges) and gives a function of dout that computes the gradients along these edges, in this order, and holds what that
takes and nothing else.

Note: saved tensors with hooks. A tensor that was saved under torch.autograd.graph.saved_tensors_hooks is unpacked
twice, here and by the node itself, which the hooks of torch allow. Those of torch.utils.checkpoint do not: they forget
a recomputed tensor when it has been unpacked once, as does a holder's `handles[group] = None`. `_Handles` lets the
first one pass unseen, so the recomputation happens once, and what it brought serves twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[Tensor], "list[Tensor]"]
Reader = Callable[[Any, Sequence[int]], Compute]


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
    return not _is_checkpointed(packed) or type(getattr(packed, "handles", None)) in (dict, _Handles)


def has_hooks(node: Any) -> bool:
    """Whether anything that the node has saved was packed by hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raws = getattr(node, name)
            for raw in raws if isinstance(raws, tuple | list) else (raws,):
                if getattr(raw, "unpack_hook", None) is not None:
                    return True
    return False


class _Saved:
    """A saved tensor, kept until its weight gradient is computed."""

    __slots__ = ("tensor", "version")

    def __init__(self, node: Any, name: str) -> None:
        packed = _packed(getattr(node, f"_raw_saved_{name}"))
        if _is_checkpointed(packed):
            packed.handles = _Handles(packed.handles)
        self.tensor: Tensor = getattr(node, f"_saved_{name}").detach()  # without the graph that it hangs on
        self.version = self.tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(self.tensor.shape)} that a weight gradient is still to be computed from has been "
                "modified by an inplace operation since the backward of its microbatch"
            )
        return self.tensor


# ---- formulas --------------------------------------------------------------------------------------------------------


def _scaled(grad: Tensor, factor: Any) -> Tensor:
    return grad if factor == 1 else grad * factor


def _is_column_major(node: Any, name: str) -> bool:
    sizes, strides = getattr(node, f"_saved_{name}_sym_sizes"), getattr(node, f"_saved_{name}_sym_strides")
    return bool(strides[0] == 1 and strides[1] == sizes[0])


def _conj(x: Tensor) -> Tensor:
    return x.conj() if x.is_complex() else x


def _left(dout: Tensor, right: Tensor, column_major: bool) -> Tensor:
    """The gradient of A in A @ B, stored as A is: mm_mat1_backward."""
    if column_major:
        return _conj(right).mm(dout.t()).t()
    return dout.mm(_conj(right.t()))


def _right(dout: Tensor, left: Tensor, column_major: bool) -> Tensor:
    """The gradient of B in A @ B, stored as B is: mm_mat2_backward."""
    if column_major:
        return dout.t().mm(_conj(left)).t()
    return _conj(left.t()).mm(dout)


def _added(node: Any, edge: int, beta: Any) -> Compute:
    """The gradient of something added, which may have been broadcast."""
    function, index = node.next_functions[edge]
    shape = function._input_metadata[index].shape

    def compute(dout: Tensor) -> list[Tensor]:
        grad = _scaled(dout, beta).sum_to_size(shape)
        return [grad.clone() if grad is dout else grad]

    return compute


def _joined(parts: list[Compute]) -> Compute:
    if len(parts) == 1:
        return parts[0]
    return lambda dout: [grad for part in parts for grad in part(dout)]


def _matrix_product(node: Any, edges: Sequence[int], left: str, right: str, first: int, alpha: Any) -> list[Compute]:
    """Of the operands called `left` and `right`, which are the edges `first` and first + 1."""
    parts: list[Compute] = []
    if first in edges:
        by_left, is_column = _Saved(node, right), _is_column_major(node, left)
        parts.append(lambda dout: [_scaled(_left(dout, by_left.get(), is_column), alpha)])
    if first + 1 in edges:
        by_right, columns = _Saved(node, left), _is_column_major(node, right)
        parts.append(lambda dout: [_scaled(_right(dout, by_right.get(), columns), alpha)])
    return parts


def _batched_product(node: Any, edges: Sequence[int], left: str, right: str, first: int, alpha: Any) -> list[Compute]:
    parts: list[Compute] = []
    if first in edges:
        by_left = _Saved(node, right)
        parts.append(lambda dout: [_scaled(dout.bmm(_conj(by_left.get().transpose(1, 2))), alpha)])
    if first + 1 in edges:
        by_right = _Saved(node, left)
        parts.append(lambda dout: [_scaled(_conj(by_right.get().transpose(1, 2)).bmm(dout), alpha)])
    return parts


# ---- readers ---------------------------------------------------------------------------------------------------------


def _mm(node: Any, edges: Sequence[int]) -> Compute:
    return _joined(_matrix_product(node, edges, "self", "mat2", 0, 1))


def _bmm(node: Any, edges: Sequence[int]) -> Compute:
    return _joined(_batched_product(node, edges, "self", "mat2", 0, 1))


def _addmm(node: Any, edges: Sequence[int]) -> Compute:
    bias = [_added(node, 0, node._saved_beta)] if 0 in edges else []
    return _joined(bias + _matrix_product(node, edges, "mat1", "mat2", 1, node._saved_alpha))


def _baddbmm(node: Any, edges: Sequence[int]) -> Compute:
    bias = [_added(node, 0, node._saved_beta)] if 0 in edges else []
    return _joined(bias + _batched_product(node, edges, "batch1", "batch2", 1, node._saved_alpha))


def _convolution(node: Any, edges: Sequence[int]) -> Compute:
    x, weight = _Saved(node, "input"), node._saved_weight.detach()  # of which only shape and layout matter
    geometry = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
    )
    mask = [False, 1 in edges, 2 in edges]

    def compute(dout: Tensor) -> list[Tensor]:
        grads = torch.ops.aten.convolution_backward(dout, x.get(), weight, *geometry, mask)
        return [grad for grad, wanted in zip(grads, mask, strict=True) if wanted]

    return compute


class Product:
    """How a kind of node is split: the edges that may lead to a weight, what is read for each, and the reader."""

    def __init__(self, operands: dict[int, str | None], read: Reader) -> None:
        self.operands, self.read = operands, read


# By edge: the saved tensor that its gradient needs, None for a bias.
PRODUCTS = {
    "MmBackward0": Product({0: "mat2", 1: "self"}, _mm),
    "BmmBackward0": Product({0: "mat2", 1: "self"}, _bmm),
    "AddmmBackward0": Product({0: None, 1: "mat2", 2: "mat1"}, _addmm),
    "BaddbmmBackward0": Product({0: None, 1: "batch2", 2: "batch1"}, _baddbmm),
    "ConvolutionBackward0": Product({1: "input", 2: None}, _convolution),
}
