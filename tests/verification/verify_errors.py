"""Errors to plant for test_verify.py: into a model that has been laid out, or into a part of the library.

The whole model that `fp.verify` compares with is built anew, and uses neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor import layout_of
from fastpar.tensor.parameter import local_tensor
from fastpar.verification import layout

Plant = Callable[[nn.Module], None]


@contextlib.contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    if plant is None:
        yield
        return
    real, real_pipeline = layout.parallelize, layout.parallelize_pipeline

    def parallelize(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        model = real(model, *args, **options)
        plant(model)
        return model

    def parallelize_pipeline(*args: Any, **options: Any) -> Any:
        pipe = real_pipeline(*args, **options)
        for stage in pipe.stages.values():
            plant(stage.module)
        return pipe

    with (
        mock.patch.object(layout, "parallelize", parallelize),
        mock.patch.object(layout, "parallelize_pipeline", parallelize_pipeline),
    ):
        yield


def at(path: str, change: Callable[[Any], None]) -> Plant:
    """Change one module, on the rank that has it."""

    def plant(model: nn.Module) -> None:
        module = dict(model.named_modules()).get(path)
        if module is not None and not isinstance(module, Absent):
            change(module)

    return plant


def _around(module: Any, wrap: Callable[[Any, Tensor], Tensor]) -> None:
    """Let `wrap` change what a module's forward returns."""
    module.register_forward_hook(lambda _, args, output: wrap(module, output))


def no_sum(module: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        weight, bias = module._local("weight"), module._local("bias")
        return F.linear(x, weight, bias)

    module.forward = forward


def no_copy(block: Any) -> None:
    block._fastpar_shared_input.enter = lambda x: x


def bias_again(module: Any) -> None:
    _around(module, lambda m, out: out + m._local("bias"))


def scaled_gradient(module: Any) -> None:
    _around(module, lambda _, out: 2 * out - out.detach())


def scaled(module: Any) -> None:
    _around(module, lambda _, out: out * 0.5)


def one_nan(module: Any) -> None:
    def wrap(_: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[0, 0, 0] = float("nan")
        return out

    _around(module, wrap)


def lost_forward(module: Any) -> None:
    """What the table has, without what the class does to it."""
    _around(module, lambda m, out: out / m.embed_scale)


def _attention_inputs(module: Any, change: Callable[[dict[str, Any]], None]) -> None:
    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        change(kwargs)
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def no_mask(module: Any) -> None:
    _attention_inputs(module, lambda kwargs: kwargs.update(attention_mask=None))


def own_positions(module: Any) -> None:
    """Rotary tables of this rank's part of the sequence, as if it began at 0."""

    def change(kwargs: dict[str, Any]) -> None:
        tables = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = tuple(table.roll(4 * dist.get_rank(), 1) for table in tables)

    _attention_inputs(module, change)


def partial_gradient(module: Any) -> None:
    module._sum_grad = frozenset()


def prepared_input(module: Any) -> None:
    module.input_prepared = True


def gradient_twice(module: Any) -> None:
    module.weight.register_hook(lambda grad: 2 * grad)


def detached_weight(module: Any) -> None:
    real = module._local

    def local(name: str, **options: Any) -> Tensor | None:
        found = real(name, **options)
        return None if found is None else found.detach()

    module._local = local
    module.sharded_operands = lambda: None  # linears take their DTensors as they are otherwise


def rolled_rows(module: Any) -> None:
    """Rows cut elsewhere than the layer says."""
    with torch.no_grad():
        local = local_tensor(module.weight)
        dim = layout_of(module.weight).dim  # type: ignore[union-attr]
        local.copy_(local.roll(local.shape[dim] // 2, dim))


def rows_of_the_other(module: Any) -> None:
    with torch.no_grad():
        comm = layout_of(module.weight).comm  # type: ignore[union-attr]
        local = local_tensor(module.weight)
        everyone = comm.all_gather(local.unsqueeze(0).contiguous(), dim=0)
        local.copy_(everyone[1 - comm.rank])


def doubled_expert_gradient(module: Any) -> None:
    module._grad_scale *= 2


def loss_times(factor: float) -> Plant:
    def plant(model: Any) -> None:
        real = model.loss_function
        model.loss_function = lambda *args, **options: real(*args, **options) * factor

    return plant


def labels_shifted(model: Any) -> None:
    real = model.loss_function
    model.loss_function = lambda logits, labels, *args, **options: real(logits, labels.roll(1, 1), *args, **options)


def factor_of_one(module: Any) -> None:
    module.factor = 1.0


def stale_after_a_step(module: Any) -> None:
    """The values of the first step for ever, with gradients as if they were those of now."""
    real, first = module._local, {}

    def local(name: str, **options: Any) -> Tensor | None:
        now = real(name, **options)
        if now is None:
            return None
        then = first.setdefault(name, now.detach().clone())
        return then + (now - now.detach())

    module._local = local
    module.sharded_operands = lambda: None  # linears take their DTensors as they are otherwise


def other_batch(ids: Tensor) -> Tensor:
    return ids.roll(dist.get_rank(), 1)


@contextlib.contextmanager
def rank_dropout() -> Iterator[None]:
    """Masks drawn per rank, in the tensor-parallel layers."""
    from fastpar.tensor import dropout

    real = dropout.draw_seed
    with mock.patch.object(dropout, "draw_seed", side_effect=lambda: real() + dist.get_rank()):
        yield


@contextlib.contextmanager
def zero_changed(change: Callable[[Any], None]) -> Iterator[None]:
    real = layout.shard

    def shard(*args: Any, **options: Any) -> Any:
        zero = real(*args, **options)
        change(zero)
        return zero

    with mock.patch.object(layout, "shard", shard):
        yield


def not_averaged(name: str) -> Callable[[Any], None]:
    """A sum over data-parallel ranks where a mean belongs, of one parameter."""

    def change(zero: Any) -> None:
        real = zero.reduce_gradients
        done: set[int] = set()

        def reduce_gradients() -> None:
            real()
            param = next(param for param in zero.params if param.name == name)
            if param.optim_param.grad is not None and id(param.optim_param.grad) not in done:
                done.clear()
                done.add(id(param.optim_param.grad))
                local_tensor(param.optim_param.grad).mul_(2)

        zero.reduce_gradients = reduce_gradients

    return change


@contextlib.contextmanager
def nothing_gathered() -> Iterator[None]:
    from fastpar.zero import flat

    with mock.patch.object(flat.WholeParameters, "gather", lambda self: self.comm.barrier()):
        yield


@contextlib.contextmanager
def local_norm_of_experts() -> Iterator[None]:
    from fastpar import clip

    real = clip.NormLayout._placed_dtensor

    def placed(self: Any, x: Any) -> Any:
        return ((), (0, 1)) if x.dim() == 3 else real(self, x)

    with mock.patch.object(clip.NormLayout, "_placed_dtensor", placed):
        yield


@contextlib.contextmanager
def shared_gradients_not_exchanged() -> Iterator[None]:
    from fastpar.pipeline.runtime.shared_grads import SharedGrads

    with mock.patch.object(SharedGrads, "finish"):
        yield


def untold(model: nn.Module) -> None:
    """Routers that take their part of the tokens for all, as they would if `parallelize` said nothing to them."""
    for module in model.modules():
        if isinstance(module, fp.expert.Router):
            module.comm = Communicator(None)
