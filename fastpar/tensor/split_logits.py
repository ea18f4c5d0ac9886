"""Logits that stay split over the vocabulary until somebody reads them.

DTensor's operators give the right numbers, or an error wherever a plain tensor meets a DTensor, which user code is full
of: `F.cross_entropy(logits, labels)`, `logits.argmax(-1) == labels`, a bias, a mask. And a reduction's result is a
partial sum, whose `.item()` is this rank's part. So the head returns a DTensor that decides by what is done with it:
what works on each logit by itself, or on other dims than the vocabulary, stays split; a cross-entropy is computed
split; everything else gets all logits, as a plain tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_any, tree_map_only

from fastpar.comm import Communicator, gather_from, shard_sizes
from fastpar.ops.cross_entropy import vocab_parallel_cross_entropy

_QUESTIONS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "is_floating_point",
    "__len__",
}
_QUESTIONS |= {"get_device", "__hash__", "__repr__", "data_ptr", "_is_view"}
_QUESTIONS |= {"backward", "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook"}
_READ = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "grad_fn",
    "is_leaf",
    "grad",
    "names",
    "itemsize",
}
_READ |= {"nbytes", "_version", "_base", "output_nr", "retains_grad", "_backward_hooks"}
_ELEMENTWISE = {"float", "half", "bfloat16", "double", "to", "type", "detach", "clone", "contiguous", "neg", "__neg__"}
_ELEMENTWISE |= {"mul", "div", "true_divide", "add", "sub", "tanh", "sigmoid", "square", "exp", "abs", "clamp", "relu"}
_ELEMENTWISE |= {"__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "multiply", "divide"}
_SHAPES = {"view", "reshape", "flatten", "__getitem__", "squeeze", "unsqueeze"}


class SplitLogits(DTensor):
    """A DTensor [..., V], Shard(-1), of a vocabulary-parallel head.

    Reading all of it (`argmax`, `softmax`, `mean`, `numpy`, any operator with a plain tensor) is a collective, one
    all-gather of the logits: every rank of the group has to do it. `to_local()` and `full_tensor()` are DTensor's.
    """

    _comm: Communicator
    # Of a forward that is looked at: what compares between the ranks the gradient and the targets of its logits
    _watch: Any = None

    @staticmethod
    def of(local: Tensor, mesh: DeviceMesh, vocab_size: int, comm: Communicator) -> SplitLogits:
        """Of this rank's columns [..., V_r], shards by `torch.chunk`'s rule."""
        shape = torch.Size([*local.shape[:-1], vocab_size])
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(local, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
        return _marked(made, comm)

    def to_local(self, **options: Any) -> Tensor:
        """DTensor's; the gradient that comes back is a SplitLogits, too."""
        return _marks_gradients(super().to_local(**options), self._comm)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Between the graphs of a compiled function the compiler looks into all code.
        if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
            return torch.compiler.disable(cls._answer)(func, args, kwargs or {})
        return cls._answer(func, args, kwargs or {})

    @staticmethod
    def _answer(func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_is_view" and torch.compiler.is_compiling():  # its first question about what would enter a graph
            raise torch._dynamo.exc.Unsupported(
                "logits that are split over the vocabulary enter no graph of torch.compile: what computes with them "
                "runs uncompiled"
            )
        # An overload: below autograd, called again by a dispatch mode (a counter, selective checkpointing).
        first, is_overload = args[0] if args else None, isinstance(func, torch._ops.OpOverload)
        if is_overload or _is_question(func, name):
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
            return out if is_overload or not isinstance(first, SplitLogits) else _marked(out, first._comm, first._watch)
        if isinstance(first, SplitLogits) and not any(map(_has_tensors, (*args[1:], *kwargs.values()))):
            # Not what an index chooses: DTensor has no rule for it
            if name in _ELEMENTWISE or (_is_in_place(name) and name != "__setitem__"):
                with torch._C.DisableTorchFunctionSubclass():
                    out = func(*args, **kwargs)
                return _marks_gradients(_marked(out, first._comm, first._watch), first._comm)
            if name in _SHAPES:
                kept = _reshaped(func, args, kwargs)
                if kept is not None:
                    return kept
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        # autograd's, of what a custom function returns as it got it: hooks on a module's backward
        if name == "view_as" and args[1:] and args[1] is first:
            with torch._C.DisableTorchFunctionSubclass():
                return _marked(func(*args), first._comm, first._watch)
        if _is_in_place(name) and isinstance(first, SplitLogits):
            what = "an index (logits[..., ids] = value)" if name == "__setitem__" else f"{name} with a tensor"
            raise TypeError(
                f"logits that are split over the vocabulary cannot be changed by {what}: write it out of place "
                "(torch.where, masked_fill, index_fill), or pass gather_logits=True to fastpar.parallelize"
            )
        args, kwargs = tree_map_only(SplitLogits, _whole, (args, kwargs))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain tensor of all logits."""
        return _whole(cast(SplitLogits, self.detach())).__reduce_ex__(protocol)


def _is_question(func: Any, name: str) -> bool:
    """Whether it asks for what is known without the numbers, or belongs to autograd."""
    if name in ("__get__", "__set__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner in (*_READ, "data") or owner.startswith("is_")
    return name in _QUESTIONS or (name.startswith("is_") and name != "is_nonzero")


def _is_in_place(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _has_tensors(value: Any) -> bool:
    return tree_any(lambda leaf: isinstance(leaf, Tensor), value)


def _marked(x: Any, comm: Communicator, watch: Any = None) -> Any:
    if type(x) is DTensor and x.placements == (Shard(x.dim() - 1),):
        cast(Any, x).__class__ = SplitLogits
    if isinstance(x, SplitLogits):
        x._comm, x._watch = comm, watch
    return x


def _marks_gradients(out: Any, comm: Communicator) -> Any:
    """`out`, computed from split logits, in whose backward their gradient is split logits as well: hooks on modules and
    tensors read numbers of all of it."""
    node = getattr(out, "grad_fn", None)
    if node is not None and not torch.compiler.is_compiling():
        node.register_hook(lambda grads, _: tuple(_marked(grad, comm) for grad in grads))
    return out


def _reshaped(func: Any, args: Any, kwargs: Any) -> SplitLogits | None:
    """The result where the vocabulary is still the last dim, and whole; None where it is not or cannot be told."""
    source = args[0]
    if func.__name__ == "__getitem__" and not _keeps_vocabulary(args[1], source.dim()):
        return None
    wanted = torch.empty(source.shape, device="meta")
    try:
        wanted = func(wanted, *args[1:], **kwargs)
        if wanted.dim() == 0 or wanted.size(-1) != source.size(-1) or wanted.dim() < 1:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):  # whatever DTensor's rules do not have
        return None
    out = _marks_gradients(_marked(out, source._comm, source._watch), source._comm)
    return out if isinstance(out, SplitLogits) and out.shape == wanted.shape else None


def _keeps_vocabulary(index: Any, dims: int) -> bool:
    """Whether an index takes whole rows: numbers and slices of other dims than the last."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(item, int | slice) and not isinstance(item, bool) for item in items):
        return False
    return len(items) < dims


def _cross_entropy(input: Any = None, target: Any = None, weight: Any = None, *rest: Any, **options: Any) -> Any:
    """F.cross_entropy of split rows [N, V]; None for what it is not known for."""
    known = {"ignore_index", "reduction", "label_smoothing"}
    is_rows = isinstance(input, SplitLogits) and isinstance(target, Tensor) and input.dim() == 2 and target.dim() == 1
    if rest or not options.keys() <= known or not is_rows or target.dtype != torch.int64 or _is_split(target, weight):
        return None
    loss = vocab_parallel_cross_entropy(input, target, weight=weight, **options)
    if input._watch is not None:
        input._watch.watch_targets(loss, target)
    if options.get("reduction", "mean") == "mean":  # torch's mean over no target is NaN
        counts = (target != options.get("ignore_index", -100)).any()
        loss = torch.where(counts, loss, torch.full_like(loss, torch.nan))
    return loss.to(input.dtype)


def _is_split(*values: Any) -> bool:
    return any(isinstance(value, DTensor) for value in values)


def _whole(x: SplitLogits) -> Tensor:
    """All logits as a plain tensor; differentiable, each rank's gradient is that of its columns."""
    with torch._C.DisableTorchFunctionSubclass():
        local = x.to_local()
    whole = gather_from(local, x._comm, dim=-1, sizes=shard_sizes(x.size(-1), x._comm.size))
    if x._watch is not None:
        x._watch.watch_logits(whole)
    return whole
