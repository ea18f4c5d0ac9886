"""The batch and its parts, the loss, noise on parameters, and random numbers."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fastpar.pipeline.stages.batch import split, split_call

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Inputs:
    """One call of the model: positional and keyword inputs, and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None

    @staticmethod
    def of(batch: Any, target: Any, model: nn.Module) -> Inputs:
        """A mapping is keyword inputs, a tuple or list positional ones, anything else the only one.

        The first parameter of the model's forward goes by position, as pipelines want it.
        """
        if not isinstance(batch, Mapping):
            return Inputs(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, target)
        named = dict(batch)
        first = next(iter(inspect.signature(model.forward).parameters), None)
        args = (named.pop(first),) if first in named else ()
        return Inputs(args, named, target)

    def parts(self, count: int) -> list[Inputs]:
        """Cut along dim 0, as pipelines cut microbatches."""
        args, kwargs = split_call(self.args, self.kwargs, count)
        targets = split(self.target, count, "target")
        return [Inputs(a, k, t) for a, k, t in zip(args, kwargs, targets, strict=True)]

    @property
    def rows(self) -> int:
        """The size of dim 0 of the first tensor that has one."""
        leaves = tree_leaves((self.args, self.kwargs, self.target))
        return next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 0)

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Batch and sequence length of the first tensor that has both."""
        leaves = tree_leaves((self.args, self.kwargs))
        shape = next((x.shape for x in leaves if isinstance(x, Tensor) and x.dim() > 1), None)
        return None if shape is None else (shape[0], shape[1])

    def to(self, dtype: torch.dtype) -> Inputs:
        """The inputs with floating-point tensors in another dtype."""

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        return Inputs(tree_map(cast, self.args), tree_map(cast, self.kwargs), tree_map(cast, self.target))

    def checksums(self) -> dict[str, int]:
        """A checksum of every tensor, by its name among the inputs."""
        named = {**{f"input {i}": x for i, x in enumerate(self.args)}, **self.kwargs, "target": self.target}
        found = {}
        for name, value in named.items():
            for number, x in enumerate(tree_leaves(value)):
                if isinstance(x, Tensor):
                    found[f"{name}[{number}]" if number else name] = checksum(x)
        return found


def loss_of(output: Any, target: Any, loss: LossFunction | None) -> Tensor:
    """The scalar that backward starts from."""
    found = output if loss is None else loss(output, target)
    if loss is None and not isinstance(output, Tensor):
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        hint = "" if loss is not None else ": pass loss=, or what makes the model compute its own, such as labels"
        raise TypeError(f"the {'model' if loss is None else 'loss'} returned {what} where a loss was expected{hint}")
    return found.reshape(())


def checksum(x: Tensor) -> int:
    data = x.detach().contiguous().cpu()
    if data.is_complex():
        data = torch.view_as_real(data)
    return zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes(), zlib.crc32(str(tuple(x.shape)).encode()))


def model_checksums(model: nn.Module) -> dict[str, int]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: checksum(x) for name, x in named if x.device.type != "meta"}


def built(build: Callable[[], nn.Module], seed: int, noise: float) -> nn.Module:
    """The model, the same on every rank and in every call, in training mode, with noise on its parameters."""
    with seeded(seed):
        model = build()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build() must return an nn.Module, got {type(model).__name__}")
    if noise:
        add_noise(model, noise)
    return model.train()


@torch.no_grad()
def add_noise(model: nn.Module, scale: float) -> None:
    """Make every parameter count: 0.2 on vectors (biases and norms are then not 0 and 1), 1 / sqrt(features) on
    matrices. It depends on names alone, so it is the same wherever the model is built.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = 0.2 if parameter.dim() < 2 else max(parameter.shape[-1], 16) ** -0.5
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * (scale * size)
        parameter.add_(drawn.to(parameter.device, parameter.dtype))


# ---- random numbers

_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
)  # fmt: skip


class FunctionalDropoutOff(TorchFunctionMode):
    """Dropout that a model's code draws by itself keeps everything, and is counted: its masks belong to a layout.

    `places` tells which module is running, for the report.
    """

    def __init__(self, places: Callable[[], str]) -> None:
        super().__init__()
        self.found: dict[str, float] = {}
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            is_training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if p and is_training:
                self.found[self._places()] = float(p)
                return args[0] if args else kwargs["input"]
        elif func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            self.found[self._places()] = float(kwargs.get("dropout_p") or args[4])
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Generators of torch and random, seeded in the block and as before after it."""
    before, other = torch.random.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        # Not torch.manual_seed, which seeds CUDA where it has not begun, for good.
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        yield
    finally:
        if devices:
            torch.cuda.set_rng_state_all(devices)
        torch.random.set_rng_state(before)
        random.setstate(other)
