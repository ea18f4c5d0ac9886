"""Fused kernels and communication-hiding parallel layers for training large PyTorch models.

    import fastpar as fp

    mesh = fp.init_mesh(dp_shard=2, tp=2)                       # under torchrun
    model = fp.parallelize(model, mesh)                         # swaps tensor-parallel layers in, in place
    loss = fp.ops.vocab_parallel_cross_entropy(logits, target, group=mesh.group("tp"))

Note: lazy names. Importing fastpar runs none of its modules: a public name is looked up in the tables below on first
use and kept. That keeps the import cheap, leaves torch as it was (nothing is registered, no process group is touched),
and lets all that needs no kernel work where the compiled extension is missing; the first use of an op then says how to
build it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fastpar._version import __version__ as __version__

if TYPE_CHECKING:
    from fastpar import (
        assembly,
        comm,
        context,
        expert,
        layouts,
        ops,
        optim,
        parallel,
        pipeline,
        planner,
        recompute,
        reference,
        storage,
        tensor,
        zero,
    )
    from fastpar.assembly.api import assemble
    from fastpar.clip import GradSum, clip_grad_norm_, grad_norm
    from fastpar.comm import CommError, Communicator, Pending
    from fastpar.context import Context
    from fastpar.contracts.attention import AttentionMask
    from fastpar.integrations.kernels import apply_kernels, remove_kernels
    from fastpar.layouts import Layout
    from fastpar.mesh import GridSpec, Mesh, init_mesh
    from fastpar.parallel import Style
    from fastpar.parallel.api import explain, parallelize, unparallelize
    from fastpar.parallel.load import load_pretrained
    from fastpar.parallel.pipeline_api import parallelize_pipeline
    from fastpar.planner import plan
    from fastpar.precision import LossScaler, Precision
    from fastpar.pretrained import save_pretrained
    from fastpar.recompute import apply_recompute, remove_recompute
    from fastpar.verification import VerifyLayout, verify

# A public function must not be named like a module of the package: importing that module would bind its name here.
_MODULES = (
    "assembly",
    "comm",
    "context",
    "expert",
    "layouts",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "planner",
    "recompute",
    "reference",
    "storage",
    "tensor",
    "zero",
)
_HOME = {
    "AttentionMask": "fastpar.contracts.attention",
    "CommError": "fastpar.comm",
    "Communicator": "fastpar.comm",
    "Context": "fastpar.context",
    "GradSum": "fastpar.clip",
    "GridSpec": "fastpar.mesh",
    "Layout": "fastpar.layouts",
    "LossScaler": "fastpar.precision",
    "Mesh": "fastpar.mesh",
    "Pending": "fastpar.comm",
    "Precision": "fastpar.precision",
    "Style": "fastpar.parallel",
    "apply_kernels": "fastpar.integrations.kernels",
    "apply_recompute": "fastpar.recompute",
    "assemble": "fastpar.assembly.api",
    "clip_grad_norm_": "fastpar.clip",
    "explain": "fastpar.parallel.api",
    "grad_norm": "fastpar.clip",
    "init_mesh": "fastpar.mesh",
    "load_pretrained": "fastpar.parallel.load",
    "parallelize": "fastpar.parallel.api",
    "parallelize_pipeline": "fastpar.parallel.pipeline_api",
    "plan": "fastpar.planner",
    "remove_kernels": "fastpar.integrations.kernels",
    "remove_recompute": "fastpar.recompute",
    "save_pretrained": "fastpar.pretrained",
    "unparallelize": "fastpar.parallel.api",
    "VerifyLayout": "fastpar.verification",
    "verify": "fastpar.verification",
}
__all__ = [
    "AttentionMask",
    "CommError",
    "Communicator",
    "Context",
    "GradSum",
    "GridSpec",
    "Layout",
    "LossScaler",
    "Mesh",
    "Pending",
    "Precision",
    "Style",
    "VerifyLayout",
    "__version__",
    "apply_kernels",
    "apply_recompute",
    "assemble",
    "assembly",
    "clip_grad_norm_",
    "comm",
    "context",
    "expert",
    "explain",
    "grad_norm",
    "init_mesh",
    "layouts",
    "load_pretrained",
    "ops",
    "optim",
    "parallel",
    "parallelize",
    "parallelize_pipeline",
    "pipeline",
    "plan",
    "planner",
    "recompute",
    "reference",
    "remove_kernels",
    "remove_recompute",
    "save_pretrained",
    "storage",
    "tensor",
    "unparallelize",
    "verify",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fastpar.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastpar' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
