"""One table for all ops: which implementation serves a call.

    tensors on               kernels
    cpu                      C++ of the compiled library
    cuda, capability 9.0     CUDA C++, for cross-entropy, where the library was built with it
    cuda                     Triton, where it is installed
    everything else          none: plain PyTorch, fastpar.reference

Ops whose CUDA kernels are registered with torch's dispatcher ask `has_kernels` and call the op, or `fallback`. Families
of several functions take them from a namespace, `kernels_of`: the same names and signatures everywhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastpar import _ext

_ext.load()
HAS_TRITON = importlib.util.find_spec("triton") is not None
CUDA_ARCHS = tuple(filter(None, _ext.build_info()["cuda_archs"].split(",")))

# Functions of a family, as its reference names them, and the compiled ops that they are.
_COMPILED = {
    "cross_entropy": {
        "forward": "cross_entropy_forward",  # these two for CPU alone
        "reduced_backward": "cross_entropy_backward",
        "stats": "vocab_parallel_cross_entropy_stats",
        "merge": "vocab_parallel_cross_entropy_merge",
        "backward": "vocab_parallel_cross_entropy_backward",
        "backward_": "vocab_parallel_cross_entropy_backward_",
        "stats_exp_": "vocab_parallel_cross_entropy_stats_exp_",
        "forward_backward": "cross_entropy_forward_backward",
        "forward_backward_": "cross_entropy_forward_backward_",
        "reduced_forward_backward": "cross_entropy_reduced_forward_backward",
    },
    "embedding": {"embedding": "vocab_embedding", "embedding_backward": "vocab_embedding_backward"},
    "optimizer": {name: name for name in ("adamw_step", "sgd_step", "lion_step")},
    "vocab_filter": {"histogram": "vocab_filter_histogram", "apply": "vocab_filter_apply"},
    "vocab_sample": {"gumbel_argmax": "vocab_gumbel_argmax"},
    "vocab_softmax": {
        "stats": "vocab_softmax_stats",
        "merge": "vocab_softmax_merge",
        "normalize": "vocab_softmax_normalize",
        "dot": "vocab_softmax_dot",
        "backward": "vocab_softmax_backward",
        "log_prob_backward": "vocab_log_prob_backward",
    },
    "vocab_topk": {"topk": "vocab_topk"},
}
_HOPPER = ("cross_entropy",)
_TRITON = ("cross_entropy", "embedding", "optimizer", "vocab_softmax")
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_REGISTERED = ("optimizer",)  # whose ops are Triton's for CUDA tensors: a graph of torch.compile has the op


def has_kernels(x: Tensor) -> bool:
    """Whether an op with a C++ kernel for CPU and a Triton kernel for CUDA can run where `x` is."""
    return x.device.type == "cpu" or (x.device.type == "cuda" and HAS_TRITON)


def is_direct(*arguments: Any) -> bool:
    """Whether an op on these arguments may be the function that is its kernel, called by the name it has in Python.

    torch's way from an op to a kernel in Python and back takes tens of microseconds, of which nothing is seen unless
    something looks at ops: a subclass or a mode of torch, a transform of torch.func, a compiler or a tracer.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and all(type(x) in _PLAIN_TENSORS or not isinstance(x, Tensor) for x in arguments)
    )


def op_on_cuda(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function as a functional op's kernel for CUDA tensors. Returns what calls the op, which is the
    function itself for CUDA tensors wherever nothing would see the difference; it may do more, as options say."""
    torch.library.impl(f"fastpar::{name}", "cuda", kernel)
    op = getattr(torch.ops.fastpar, name).default

    def call(first: Tensor, *others: Any, **options: Any) -> Any:
        if first.is_cuda and is_direct(first, *others):
            return kernel(first, *others, **options)
        return op(first, *others)

    return call


def fallback(name: str) -> Any:
    """What `fastpar.reference` has under a name: a public function, or else the module of a family."""
    from fastpar import reference

    return getattr(reference, name, None) or importlib.import_module(f"fastpar.reference.{name}")


def kernels_of(family: str) -> Callable[[Tensor], Any]:
    """A function from a tensor to the namespace of the family's kernels for its device."""
    # Overloads instead of packets: torch need not choose one at every call.
    compiled = SimpleNamespace(
        **{name: getattr(torch.ops.fastpar, op).default for name, op in _COMPILED[family].items()}
    )

    def implementation(x: Tensor) -> Any:
        return compiled if x.device.type == "cpu" else _elsewhere(family, compiled, x.device)

    return implementation


@functools.cache  # a call takes microseconds
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def _elsewhere(family: str, compiled: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        if family in _HOPPER and "90a" in CUDA_ARCHS and capability(device) == (9, 0):
            return compiled
        if family in _TRITON and HAS_TRITON:
            return compiled if family in _REGISTERED and torch.compiler.is_compiling() else triton(family)
    return importlib.import_module(f"fastpar.reference.{family}")


@functools.cache
def triton(family: str) -> Any:
    """Triton kernels of a family, a module; ImportError where Triton is not installed."""
    return importlib.import_module(f"fastpar.kernels.{family}")
