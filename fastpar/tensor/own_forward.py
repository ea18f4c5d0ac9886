"""Layers whose forward is their own: a subclass of `nn.Linear` or `nn.Embedding` that scales, quantises or adapts.

A parallel layer replaces the forward of the layer that it takes the place of. That is right only where the forward that
runs is the one it knows: `nn.Linear`'s, `nn.Embedding`'s, that of transformers' Conv1D. It is known by identity, since
neither a class name nor `isinstance` says what a subclass computes.

Note: a forward of one's own is kept
    The module gets a generated class between its own and the parallel one, so that `super().forward(x)` in its code is
    the parallel layer's. `self.weight` and `self.bias` are placeholders meanwhile: `F.linear`, `F.embedding` and
    `x @ weight.T + bias` with them are the parallel layer's as well, their dtype, device and full shape can be read,
    and anything else is refused, as it would compute with a part of the weight and take it for the whole.

    What the code does around that may still need all features (a norm over the output, a maximum over the input). So
    `prove_own_forward` runs the module whole and split on a few random rows, and compares output, dgrad and wgrad.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.comm import Communicator, gather_from, shard_sizes
from fastpar.contracts.rehearsal import attributes_as_they_were, buffers_as_they_were, same_generators

_ROWS = 3  # of the random input
_METADATA = ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "is_meta", "layout", "is_leaf")
_TRANSPOSES = (cast(Any, Tensor).T.__get__, cast(Any, Tensor).mT.__get__, Tensor.t, torch.t)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_QUESTIONS = ("size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "ndimension", "get_device")


def conv1d_class() -> type[nn.Module] | None:
    """transformers' Conv1D, if transformers has been imported; GPT-2's linears, with weights [in, out]."""
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def runs_forward_of(module: nn.Module, *classes: type[nn.Module] | None) -> bool:
    """Whether calling `module` runs the forward of one of these classes: not one of a subclass, nor of the instance."""
    cls = type(module)
    known = [c.forward for c in classes if c is not None]
    return cls.forward in known and cls.__call__ is nn.Module.__call__ and "forward" not in vars(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether an `nn.Linear`, `nn.Embedding` or Conv1D runs another forward than that of these classes."""
    return not runs_forward_of(module, nn.Linear, nn.Embedding, conv1d_class())


def check_parameters(module: nn.Module) -> None:
    """TypeError for what a parallel linear or embedding cannot take over: other parameters, and weights that are no
    plain tensors."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    if "weight" not in module._parameters:
        raise TypeError(
            f"{name} computes its weight from other parameters ({', '.join(n for n, _ in module.named_parameters())}), "
            "as torch.nn.utils.parametrize and weight_norm do. Make it an ordinary parameter first "
            "(torch.nn.utils.parametrize.remove_parametrizations), or leave the module out of the plan"
        )
    others = [n for n, p in module.named_parameters() if n not in ("weight", "bias")]
    if others:
        raise TypeError(
            f"{name} has the parameters {others} beside weight and bias, and nothing says how they are to be split. "
            "Merge them into the weight, or leave the module out of the plan"
        )
    for key in ("weight", "bias"):
        param = module._parameters.get(key)
        if param is not None and type(param) is not nn.Parameter:
            raise TypeError(
                f"{name}.{key} is a {type(param).__name__}, not a plain nn.Parameter; "
                + ("it is distributed already" if hasattr(param, "placements") else "such weights cannot be split")
            )
    if "forward" in vars(module):
        raise TypeError(
            f"{name} has had its forward replaced on this instance (accelerate's hooks do so, and other libraries' "
            "patches), and a parallel layer would lose that. Remove it first, or leave the module out of the plan"
        )


def refuse_own_forward(module: nn.Module) -> None:
    """TypeError for a module with a forward of its own, of which a new layer would take the weights only."""
    if isinstance(module, nn.Linear | nn.Embedding) and has_own_forward(module):
        raise TypeError(
            f"{type(module).__module__}.{type(module).__qualname__} has a forward of its own, which a new layer with "
            "its weights would not have; fastpar.parallelize and fastpar.tensor.adopt keep it"
        )


class _Placeholder(Tensor):
    """What `self.weight` is within a forward of one's own: no numbers, the metadata of the whole parameter."""

    _layer: Any
    _name: str
    _is_transposed: bool

    @staticmethod
    def __new__(cls, param: Tensor, layer: Any, name: str, is_transposed: bool = False) -> _Placeholder:
        shape = layer._layouts[name].shape
        made = Tensor._make_wrapper_subclass(
            cls,
            tuple(reversed(shape)) if is_transposed else tuple(shape),
            dtype=param.dtype,
            device=param.device,
            requires_grad=param.requires_grad,
        )
        made._layer, made._name, made._is_transposed = layer, name, is_transposed
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.embedding):
            return _call_parallel(func, args, kwargs)
        if func in _TRANSPOSES and args[0]._name == "weight":
            weight = args[0]
            return _Placeholder(weight, weight._layer, "weight", not weight._is_transposed)
        if func in _PRODUCTS and _is_product(*args):
            return _without_bias(args[1]._layer, args[0])
        if func in _SUMS and len(args) == 2 and not kwargs:
            bias, other = args if isinstance(args[0], _Placeholder) else args[::-1]
            if bias._name == "bias" and not isinstance(other, _Placeholder):
                return other + _bias_of_output(bias._layer)
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _QUESTIONS or (name == "__get__" and owner in _METADATA):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = next(a for a in (*args, *kwargs.values()) if isinstance(a, _Placeholder))
        what = owner or name or str(func)
        raise TypeError(
            f"its forward computes with its {found._name} by {what}; only F.linear, F.embedding, x @ weight.T + bias "
            "and super().forward are known to work on a part of it"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"its forward computes with its weight by {func}")


def _call_parallel(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """F.linear or F.embedding with a placeholder: the forward of its parallel layer, if it is that layer's product."""
    names = ("input", "weight", "bias") if func is F.linear else ("input", "weight")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not isinstance(weight, _Placeholder) or weight._name != "weight" or isinstance(x, _Placeholder):
        raise TypeError(f"its forward calls {func.__name__} with its weight or bias in another place than usual")
    layer, own_bias = weight._layer, weight._layer._parameters.get("bias")
    if weight._is_transposed or (bias is not None and not (isinstance(bias, _Placeholder) and bias._name == "bias")):
        raise TypeError(f"its forward calls {func.__name__} with a transposed weight, or with another bias")
    if own_bias is not None and bias is None:
        return _without_bias(layer, x)
    return cast(Tensor, layer._parallel_class.forward(layer, x))


def _bias_of_output(layer: Any) -> Tensor:
    """The bias of the features that the layer's output has."""
    bias = cast(Tensor, layer._local("bias"))
    if not getattr(layer, "gather_output", False):
        return bias
    return gather_from(bias, layer.comm, dim=0, sizes=shard_sizes(layer.out_features, layer.comm.size))


def _is_product(x: Any, weight: Any) -> bool:
    """Whether x @ weight is the layer's product: with the transpose of a weight [out, in]."""
    is_weight = isinstance(weight, _Placeholder) and weight._name == "weight" and not isinstance(x, _Placeholder)
    return is_weight and weight._is_transposed != getattr(weight._layer, "transposed", False)


def _without_bias(layer: Any, x: Tensor) -> Tensor:
    """The parallel layer's forward without its bias, which the code around adds by itself."""
    parameters, shared = layer._parameters, vars(layer).get("shared_input")
    bias = parameters["bias"]
    parameters["bias"] = None
    if shared is not None:
        layer.shared_input = None  # what a block has prepared has the bias in it
    try:
        return cast(Tensor, layer._parallel_class.forward(layer, x))
    finally:
        parameters["bias"] = bias
        if shared is not None:
            layer.shared_input = shared


def _placeholder_property(name: str) -> property:
    def read(self: Any) -> Any:
        param = self._parameters[name]
        if param is None or not self.__dict__.get("_in_own_forward"):
            return param
        return _Placeholder(param, self, name)

    return property(read)


def keeping_forward(cls: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """A class that is `cls` for whoever calls `super().forward` in the forward of `original`, which runs around it."""
    base = nn.Embedding if issubclass(original, nn.Embedding) else nn.Linear

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._in_own_forward = True
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            self._in_own_forward = False

    inner = type(cls.__name__, (cls, base), {"__module__": cls.__module__})
    namespace: dict[str, Any] = {name: _placeholder_property(name) for name in ("weight", "bias")}
    namespace |= {"forward": forward, "_parallel_class": cls, "__module__": original.__module__}
    return type(f"{cls.__name__}Of{original.__name__}", (original, inner), namespace)


def prove_own_forward(path: str, module: nn.Module, comm: Communicator, split: Callable[[nn.Module], Any]) -> None:
    """Run a module with a forward or hooks of its own, in eval and in training mode, whole and split as `split` makes
    it; TypeError where output or gradients differ. Collective: every rank gets the error.
    """
    reason = ""
    try:
        for training in (False, True):
            # Of modules inside, as observers of quantization, which the twins share.
            kept = attributes_as_they_were(module), buffers_as_they_were(module)
            with kept[0], kept[1], same_generators() as has_drawn:
                found = _compare(_twin(module, training), comm, split)
                reason = reason or ("" if training and has_drawn() else found)  # draws: the guards look at them
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, NotImplementedError) as error:
        reason = str(error) or type(error).__name__
    bad = torch.tensor([float(bool(reason))], device="cpu")
    if (comm.all_reduce(bad, "max") if comm.size > 1 else bad).any():
        raise TypeError(
            f"{path} is a {type(module).__module__}.{type(module).__qualname__}, whose {_what_is_own(module)} and "
            f"cannot be kept around a split weight: {reason or 'it fails on another rank'}. Leave it out of the plan, "
            "so that it stays whole, or make it an ordinary layer (merge adapters, fold scales into the weight, remove "
            "hooks)"
        )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody's hooks run around the module's forward or backward."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in names)


def _what_is_own(module: nn.Module) -> str:
    return "forward is its own" if has_own_forward(module) else "forward runs hooks"


def _twin(module: nn.Module, training: bool) -> nn.Module:
    """A copy in the same memory, but for buffers: nothing that is done to it may reach the module."""
    twin = copy.copy(module)
    for name, value in vars(twin).items():  # not those of the module: `module.compile()` has set what runs the module
        twin.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    twin._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    twin.training = training
    for key, param in twin._parameters.items():
        if param is not None:
            twin._parameters[key] = nn.Parameter(param.detach(), requires_grad=True)
    return twin


@torch.enable_grad()
def _compare(twin: nn.Module, comm: Communicator, split: Callable[[nn.Module], Any]) -> str:
    """What is different between the module and its parallel layer, or nothing."""
    full_weight = cast(Tensor, twin._parameters["weight"])
    eps, x = torch.finfo(full_weight.dtype).eps, _sample(twin, full_weight)
    has_dgrad = x.is_floating_point()
    whole_x = x.clone().requires_grad_(has_dgrad)
    expected = twin(whole_x)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(expected)
    wgrad, *dgrad = torch.autograd.grad(expected, [full_weight, whole_x][: 1 + has_dgrad], dout)

    layer = split(_twin(twin, twin.training))
    split_x = layer.local_input(x).clone().requires_grad_(has_dgrad)
    out = layer(split_x)
    weight, layout = layer._parameters["weight"], layer._layouts["weight"]
    split_wgrad, *split_dgrad = torch.autograd.grad(
        out, [weight, split_x][: 1 + has_dgrad], layer.local_output(dout * _shares(layer, dout)).contiguous()
    )
    checks = [("output", out, layer.local_output(expected))]
    if not layout.picks_rows:  # else the rows that several ranks use are summed over them
        checks.append(("wgrad", getattr(split_wgrad, "_local_tensor", split_wgrad), layout.local(wgrad)))
    if has_dgrad:
        is_part = comm.size > 1 and layer.sums_input_gradient
        mine = comm.all_reduce(split_dgrad[0]) if is_part else split_dgrad[0]
        checks.append(("dgrad", mine, layer.local_input(dgrad[0])))
    for what, found, wanted in checks:
        if found.shape != wanted.shape:
            return f"its {what} has the shape {list(found.shape)} where {list(wanted.shape)} is expected"
        if not found.numel():
            continue
        error, scale = float((found - wanted).detach().abs().max()), float(wanted.detach().abs().max())
        # Far above the rounding of one product in this dtype, far below what a lost factor changes.
        if not error <= 64 * eps * max(1, x.shape[-1]) ** 0.5 * (scale + eps):
            return f"its {what} differs from the whole layer's by {error:.2g} of {scale:.2g}"
    return ""


def _shares(layer: Any, dout: Tensor) -> Tensor:
    """What each rank has of the gradient of an output feature: a part of those that several ranks compute."""
    rows = getattr(layer, "rows", None)
    if rows is None or not layer._layouts["weight"].picks_rows:
        return dout.new_ones(())
    users = dout.new_zeros(rows.total)
    for lo, hi in (span for spans in rows.ranges for span in spans):
        users[lo:hi] += 1
    return users.reciprocal()


def _sample(module: nn.Module, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Embedding):
        ids = torch.randint(module.num_embeddings, (2 * _ROWS,), generator=generator, device="cpu")
        ids[0], ids[-1] = 0, module.num_embeddings - 1
        return ids.to(weight.device)
    features = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
    return torch.randn(_ROWS, features, generator=generator, device="cpu").to(weight)
