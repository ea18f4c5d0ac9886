"""Norms on a part of the features: their code runs on what a rank has, and its means are over all of a token.

Note: how a norm's own code gets statistics of features that are elsewhere
    Within `_FeatureMeans`, a mode of torch's function dispatch, a mean along the features is that over the ranks of an
    axis, and `layer_norm` and `rms_norm` take theirs from all ranks: numbers of each token are sent, and not its
    features. The code stays that of the class that the user chose, with its dtypes, and its parameters are this rank's
    features. What else it may do is not known: so it is tried on numbers, with its gradients, beside the module on all
    features (`own_features`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fastpar.comm import Communicator, copy_to, gather_sequence, reduce_from, shard_range, shard_sizes
from fastpar.comm.agree import set_on_any
from fastpar.tensor.binding import Adoption
from fastpar.tensor.grid import GridRegion
from fastpar.tensor.grid_blocks import outside_of_graphs
from fastpar.tensor.own_forward import has_hooks
from fastpar.tensor.parameter import ParallelModule
from fastpar.tensor.sequence import map_output, map_stream

_MEANS = (torch.mean, Tensor.mean)
_LAYER_NORMS, _RMS_NORMS = (F.layer_norm, torch.layer_norm), (F.rms_norm, torch.rms_norm)
_SAME = 1e-5  # relative: norms compute in float32 whatever they are given


class _FeatureMeans(TorchFunctionMode):
    """Means along the last dim, where it has `mine` of `total` features, over the ranks of `comm`.

        mean        x.sum(-1), all-reduced, / total             a number a token; backward: one more
        rms_norm    x * rsqrt(mean(x^2) + eps) * weight
        layer_norm  from each rank's mean and sum of squared distances to it, all-gathered; backward: reduce-scattered

    Statistics are in float32, or in float64 for float64. Without a comm they are of this rank's features, for a run
    that only asks whether the code works; `count` is how often they were asked for.
    """

    def __init__(self, comm: Communicator | None, mine: int, total: int) -> None:
        super().__init__()
        self._comm, self._mine, self._total, self.count = comm, mine, total, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for known, replaced in ((_MEANS, self._mean), (_LAYER_NORMS, self._layer_norm), (_RMS_NORMS, self._rms_norm)):
            if func in known:
                return replaced(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _mean(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        x, dim = _first(args, kwargs), args[1] if len(args) > 1 else kwargs.get("dim")
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        if dims not in ([-1], [x.dim() - 1]) or x.size(-1) != self._mine:
            return func(*args, **kwargs)
        wanted = func(x.new_zeros(1), 0, **{"dtype": kwargs.get("dtype")}).dtype
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        found = self._over_all(x.to(_statistics_dtype(wanted)).sum(-1, keepdim=True)) / self._total
        return (found if keepdim else found.squeeze(-1)).to(wanted)

    def _rms_norm(
        self, func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not self._are_features(input, normalized_shape):
            return func(input, normalized_shape, weight, eps)
        wanted = func(input.new_zeros(1, self._mine), (self._mine,), weight, eps).dtype
        x = input.to(_statistics_dtype(input.dtype))
        eps = torch.finfo(input.dtype).eps if eps is None else eps
        mean = self._over_all(x.square().sum(-1, keepdim=True)) / self._total
        out = x * torch.rsqrt(mean + eps)
        return (out if weight is None else out * weight).to(wanted)

    def _layer_norm(
        self,
        func: Any,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *more: Any,
    ) -> Tensor:
        if not self._are_features(input, normalized_shape):
            return func(input, normalized_shape, weight, bias, eps, *more)
        wanted = func(input.new_zeros(1, self._mine), (self._mine,), weight, bias, eps).dtype
        x = input.to(_statistics_dtype(input.dtype))
        own = x.mean(-1, keepdim=True)
        mean, squares = self._over_means(own, (x - own).square().sum(-1, keepdim=True))
        out = (x - mean) * torch.rsqrt(squares / self._total + eps)
        out = out if weight is None else out * weight
        return (out if bias is None else out + bias).to(wanted)

    def _are_features(self, x: Tensor, normalized_shape: Any) -> bool:
        return tuple(normalized_shape) == (self._total,) and x.size(-1) == self._mine

    def _over_all(self, own: Tensor) -> Tensor:
        """The sum over ranks, of which each then uses it for its own features: summed again in backward."""
        self.count += 1
        return own if self._comm is None else copy_to(reduce_from(own, self._comm), self._comm)

    def _over_means(self, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and sum of squared distances to it, of all features from those of each rank (Chan et al. 1979): nothing
        cancels where the mean is large."""
        self.count += 1
        if self._comm is None:
            return mean, squares
        ranks = self._comm.size
        found = gather_sequence(torch.cat([mean, squares], -1)[None], self._comm, dim=0, sizes=[1] * ranks)
        means, sums = found[..., :1], found[..., 1:]
        sizes = shard_sizes(self._total, ranks)
        counts = means.new_tensor(sizes).view(-1, *[1] * (means.dim() - 1))
        total = (means * counts).sum(0) / self._total
        return total, sums.sum(0) + ((means - total).square() * counts).sum(0)


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input"]


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _OwnFeatures:
    """Where a module has a part of the features.

    region  of the stream
    is_cut  while its forward runs on them: its parameters are of this rank's features
    """

    def __init__(self, region: Any) -> None:
        self.region, self.is_cut = region, False

    def range_of(self, total: int) -> tuple[int, int]:
        comm = self.region.grid.features
        return shard_range(total, comm.size, comm.rank)


def _parameter_part(name: str, inherited: Any) -> property:
    get = inherited.fget if isinstance(inherited, property) else None

    def read(self: Any) -> Any:
        found = self._parameters[name] if get is None else get(self)
        own: _OwnFeatures = self._own_features
        if not own.is_cut or found is None or found.dim() != 1 or isinstance(found, DTensor):
            return found
        lo, hi = own.range_of(own.region.shape[2])
        return found[lo:hi] if found.size(0) == own.region.shape[2] else found

    return property(read)


def _class_on_features(cls: type[nn.Module], names: Sequence[str]) -> type[nn.Module]:
    @outside_of_graphs
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own: _OwnFeatures = self._own_features
        region = own.region
        if region.is_whole:
            return cls.forward(self, *args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != 1:  # such as a residual beside it: not tried
            args, kwargs = map_stream(args, kwargs, region.leave_features)
            return map_output(cls.forward(self, *args, **kwargs), region.enter_features)
        lo, hi = own.range_of(region.shape[2])
        own.is_cut = True
        try:
            with _FeatureMeans(region.grid.features, hi - lo, region.shape[2]):
                return cls.forward(self, *args, **kwargs)
        finally:
            own.is_cut = False

    parts = {name: _parameter_part(name, getattr(cls, name, None)) for name in names}
    space = {"forward": forward, **parts, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), space)


def own_features(module: nn.Module, region: GridRegion, features: int) -> Adoption | None:
    """Let a module without children run on this rank's features of [.., features], with statistics of all: in place.

    None, and the module as it was, unless it computes so what it does with all features: output, gradients of its input
    and of its parameters, tried in float64 on all ranks of the axis. Collective over the grid. A module that works on
    each feature by itself needs nothing, and is left as it is where it has no parameters.
    """
    if has_hooks(module) or "forward" in vars(module) or any(True for _ in module.children()):
        return None
    names = [name for name, param in module._parameters.items() if param is not None]
    count = _tried_on_parts(module, names, region, features)
    if count is None or (count == 0 and not names):
        return None
    adoption = Adoption(module, _class_on_features(type(module), names))
    module.__dict__["_own_features"] = _OwnFeatures(region)
    return adoption


class _TrialRegion:
    """What `_OwnFeatures` asks of a region."""

    is_whole = False

    def __init__(self, region: GridRegion, features: int) -> None:
        self.grid, self.shape = region.grid, (0, 0, features)


def _tried_on_parts(module: nn.Module, names: Sequence[str], region: GridRegion, features: int) -> int | None:
    """How many statistics the module asks for; None where parts do not compute what the whole does."""
    comm = region.grid.features
    lo, hi = shard_range(features, comm.size, comm.rank)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Tokens far from zero, and so small that what is added to their squares counts.
    x = numbers(5, features) * torch.tensor([1.0, 30.0, 1e-3, 1.0, 1e-5])[:, None]
    x[3] += 5
    params = {name: numbers(*module._parameters[name].shape) for name in names}  # type: ignore[union-attr]
    gradient = numbers(5, features)
    own = _OwnFeatures(_TrialRegion(region, features))

    def run(at: Any, statistics: Any) -> list[Tensor]:
        twin, given = _plain_twin(module, params, own), x[:, at].clone().requires_grad_()
        own.is_cut = statistics is not None
        with torch.enable_grad(), statistics or nullcontext():
            out = twin.forward(given)
        wanted = [given, *(p for p in twin._parameters.values() if p is not None)]
        grads = torch.autograd.grad(out, wanted, gradient[:, at].to(out.dtype), allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, grads, strict=True)]
        return [out.detach(), *found]

    mine = slice(lo, hi)
    dry = _FeatureMeans(None, hi - lo, features)
    wholes = _unless_raised(lambda: run(slice(None), None))
    works = wholes is not None and wholes[0].shape == x.shape and _unless_raised(lambda: run(mine, dry)) is not None
    axes = region.grid.along
    if any(set_on_any([not works], axes)):
        return None
    assert wholes is not None
    parts = run(mine, _FeatureMeans(comm, hi - lo, features))
    differs = False
    for whole, part in zip(wholes, parts, strict=True):
        is_rows = whole.dim() == 2
        wanted = whole[:, mine] if is_rows else whole[mine] if whole.shape == (features,) else whole
        found = part if is_rows or part.shape != (features,) else part[mine]
        if not wanted.dim():
            continue  # a gradient that ranks add up
        scale = wanted.abs().amax(-1, keepdim=True) + whole.abs().amax(-1, keepdim=True)
        differs |= not bool(((found - wanted).abs() <= _SAME * scale).all())
    return None if any(set_on_any([differs], axes)) else dry.count


def _unless_raised(function: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    try:
        return function()
    except Exception:
        return None


def _plain_twin(module: nn.Module, params: dict[str, Tensor], own: _OwnFeatures) -> Any:
    """The module as it was before it was split, with other parameters."""
    plain: Any = next(cls for cls in type(module).__mro__ if not issubclass(cls, ParallelModule))
    twin: Any = object.__new__(_class_of_twin(plain, list(params)))
    twin.__dict__.update(vars(module))
    twin.__dict__.update(_own_features=own, _parameters=OrderedDict(module._parameters))
    twin._parameters.update({name: nn.Parameter(value.clone()) for name, value in params.items()})
    return twin


def _class_of_twin(plain: type[nn.Module], names: Sequence[str]) -> type[nn.Module]:
    return type(plain.__name__, (plain,), {name: _parameter_part(name, None) for name in names})


__all__ = ["own_features"]
