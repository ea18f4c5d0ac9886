"""Copies of modules and of their arguments for trials."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastpar.contracts.rehearsal import own_attributes, same_generators
from fastpar.parallel.stacked_experts import is_stacked


def noisy_copy(module: nn.Module) -> nn.Module:
    """The module in float32 on the CPU, with noise on all parameters, so that none is 0 or 1 or alike another."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    stacked = {id(p) for child in module.modules() if is_stacked(child) for p in child.parameters()}
    for param in module.parameters():
        if id(param) in stacked:
            continue
        value = param.detach().float()
        value = torch.zeros(value.shape, device="cpu") if value.is_meta else value.cpu()
        fan_in = value.size(-1) if value.dim() > 1 else 10
        noise = torch.empty(value.shape).uniform_(-1, 1, generator=generator) * (1.7 * fan_in**-0.5)
        memo[id(param)] = nn.Parameter(value + noise)
    for buffer in module.buffers():
        value = buffer.detach().cpu().clone()  # to be written to
        memo[id(buffer)] = value.float() if value.is_floating_point() else value
    for child in module.modules():
        memo |= {id(v): v.detach().cpu().clone() for v in vars(child).values() if isinstance(v, Tensor)}
    for child in module.modules():  # what a deep copy cannot copy, and does not need
        config = child.__dict__.get("config")
        if config is not None:
            memo[id(config)] = _eager(config, memo)
        if is_stacked(child):
            memo[id(child)] = _AnyExperts()
    return _deep_copy(module, memo).eval()


def structure_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters have shapes and no memory, of which `noisy_copy` makes one that runs."""
    return _copy_with(module, lambda p: p.to("meta"))


def training_copy(module: nn.Module) -> nn.Module:
    """A copy in training mode, but for its dropouts: what else a module does in training only can be compared."""
    twin = sharing_copy(module).train()
    for child in twin.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.training = False
    return twin


class _AnyExperts(nn.Module):
    """Some function of each token, in the place of stacked experts, which are large, and another style's."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.tanh(hidden_states)


def _eager(config: Any, memo: dict[int, Any]) -> Any:
    """The configuration, with attention as plain code, which runs on every device and on threads."""
    if id(config) in memo:
        return memo[id(config)]
    twin = copy.copy(config)
    if getattr(twin, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        twin.__dict__["_attn_implementation_internal"] = "sdpa"
    return twin


def sharing_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters are leaves of their own in the same memory."""
    return _copy_with(module, lambda p: p)


def _copy_with(module: nn.Module, data: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy whose parameters have what a function makes of the detached ones."""
    memo: dict[int, Any] = {id(p): nn.Parameter(data(p.detach()), p.requires_grad) for p in module.parameters()}
    for child in module.modules():
        memo |= {id(v): v.detach().clone() for v in vars(child).values() if isinstance(v, Tensor)}
    memo |= {id(child.config): child.config for child in module.modules() if "config" in child.__dict__}
    return _deep_copy(module, memo)


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    with _TensorsWithoutHistory(Tensor.clone):  # losses that objects of the module's code hold
        return copy.deepcopy(module, memo)


@torch.no_grad()
def trains_differently(source: nn.Module, training: nn.Module, inputs: Any) -> bool:
    """True if the `training_copy` of a module computes something else than the module in eval mode, or writes something
    else to what it holds, by a rule that can be compared: not where it draws random numbers, which the guards of a
    running model look at."""
    outputs = []
    for module in (source, training):
        (args, kwargs), _ = fresh_leaves(inputs)
        twin = sharing_copy(module)
        with same_generators() as has_drawn:
            outputs.append([t for t in tree_leaves(_plain(twin(*args, **kwargs))) if _is_float(t)])
            if has_drawn():
                return False
        outputs[-1] += held_numbers(twin).values()
    first, second = outputs
    return len(first) != len(second) or not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def held_numbers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, and the numbers and tensors without history that are attributes: what a forward may write to."""
    found = dict(module.named_buffers())
    for path, child in module.named_modules():
        for name, value in own_attributes(child).items():
            if isinstance(value, float) or (isinstance(value, Tensor) and value.grad_fn is None):
                found[f"{path}.{name}" if path else name] = torch.as_tensor(value)
    return found


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _plain(output: Any) -> Any:
    return list(output.values()) if isinstance(output, Mapping) else output


def fresh_leaves(inputs: Any, cut: Callable[[int, Tensor], Tensor] | None = None) -> Any:
    """The inputs with new leaves for tensors that need gradients, which `cut` may shorten; and these leaves."""
    leaves: list[Tensor] = []
    flat, spec = tree_flatten(inputs)
    for index, value in enumerate(flat):
        if not isinstance(value, Tensor):
            flat[index] = own_copy(value)
            continue
        local = value.detach() if cut is None else cut(len(leaves), value.detach())
        flat[index] = local.clone().requires_grad_(value.requires_grad)
        if value.requires_grad:
            leaves.append(flat[index])
    return tree_unflatten(flat, spec), leaves


def own_copy(value: Any, tensor: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """A copy of an argument that is an object, such as a cache, which the code that gets it may write to; tensors in it
    are `tensor` of what they are. The object itself, where it is a module or cannot be copied."""
    if isinstance(value, nn.Module):
        return value
    try:
        with _TensorsWithoutHistory(tensor):
            return copy.deepcopy(value)
    except Exception:  # of the object's own code: any
        return value


class _TensorsWithoutHistory(TorchFunctionMode):
    """Deep copies of tensors that autograd has made, which torch refuses to copy."""

    def __init__(self, tensor: Callable[[Tensor], Tensor]):
        super().__init__()
        self.tensor = tensor

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        x, memo = args
        if id(x) not in memo:
            memo[id(x)] = self.tensor(x.detach())
        return memo[id(x)]


def replace_parameter(twin: nn.Module, path: str, local: Tensor) -> None:
    holder, _, name = path.rpartition(".")
    module = twin.get_submodule(holder)
    del module._parameters[name]
    module.__dict__[name] = local
