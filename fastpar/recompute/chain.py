"""Chains of layers under a policy: applied to a model's own layers, or to functions called in a row."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastpar.arguments import checked
from fastpar.recompute.ambient import Capture
from fastpar.recompute.plan import Drop, RecomputePlan
from fastpar.recompute.policy import Full, Policy, Selective
from fastpar.recompute.segment import Segment, Setting, leaves, link_of
from fastpar.recompute.selective import check_ops, default_ops

M = TypeVar("M", nn.Module, Sequence[nn.Module])
_STATE = "_fastpar_recompute"


class RecomputeChain:
    """The plan of some layers and how their calls are run. Knows nothing of any call."""

    def __init__(self, plan: RecomputePlan, setting: Setting):
        self.plan, self.setting = plan, setting
        self.steps = [plan.step_of(layer) for layer in range(plan.num_layers)]
        self.recomputes = any(isinstance(step, Drop) for step in plan.steps)

    def call(
        self,
        layer: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run a layer's function as the plan says. `module`: the one that it is the forward of."""
        step = self.steps[layer]
        if not isinstance(step, Drop):
            return function(*args, **kwargs)
        segment = None
        for leaf in leaves((args, kwargs)) if layer > step.start else ():
            link = link_of(leaf) if isinstance(leaf, Tensor) else None
            found = None if link is None else link.segment()
            if found is not None and found.step is step and found.stop == layer:
                segment = found
                break
        return (segment or Segment(step, self.setting, layer)).run(function, args, kwargs, module)


def _setting(policy: Policy, captures: Sequence[Capture], preserve_rng: bool, early_stop: bool) -> Setting:
    keep = None
    if isinstance(policy, Selective):
        keep = default_ops() if policy.keep is None else check_ops(policy.keep)
    return Setting(keep, tuple(captures), preserve_rng, early_stop)


# ---- functions -------------------------------------------------------------------------------------------------------


@checked(computed=False)
def checkpoint(
    function: Callable[..., Any] | Sequence[Callable[..., Any]],
    *args: Any,
    policy: Policy | None = None,
    captures: Sequence[Capture] = (),
    preserve_rng: bool = True,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function, or several in a row, and recompute its activations in backward.

        y = checkpoint(block, x, mask=mask)                             # function(*args, **kwargs)
        y = checkpoint([f, g, h], x, mask=mask, policy=Segments(2))     # h(g(f(x, mask=mask), mask=mask), mask=mask)

    Each function of a sequence (an nn.Sequential and an nn.ModuleList are sequences) gets the output of the one before
    in the place of the first argument. `policy` is by default Full(). Arguments may be anything; tensors within tuples,
    lists and dicts are found. Gradients are those of a plain call, bit for bit, if the functions do the same when they
    are called again with the buffers and attributes that modules had then. Without gradients (torch.no_grad) it is a
    plain call. No collectives of its own.

    captures      surroundings of the call to bring back beside random states and autocast (`fastpar.recompute.Capture`)
    preserve_rng  False: leave random states alone, for functions that draw nothing
    early_stop    False: let each recomputation run to its end

    Raises RecomputeError (RuntimeError) in backward, if the functions save other tensors than the first time; values
    are compared in the first call of a function and every thousandth.
    """
    functions = list(function) if isinstance(function, (Sequence, nn.Sequential, nn.ModuleList)) else [function]
    if not functions:
        raise ValueError("there is no function to call")
    policy = Full() if policy is None else policy
    if not torch.is_grad_enabled():
        run: Callable[..., Any] = _plain
    else:
        run = RecomputeChain(policy.plan(len(functions)), _setting(policy, captures, preserve_rng, early_stop)).call
    out = run(0, functions[0], args, kwargs)
    for layer, next_function in enumerate(functions[1:], start=1):
        out = run(layer, next_function, (out, *args[1:]), kwargs)
    return out


def _plain(_: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


# ---- models ----------------------------------------------------------------------------------------------------------


class _ChainState:
    """What a module under recomputation knows: its place in its chain, and how to undo it."""

    def __init__(self, chain: RecomputeChain, layer: int, previous: Callable[..., Any] | None):
        self.chain, self.layer, self.previous = chain, layer, previous


@checked(computed=False)
def apply_recompute(
    model: M,
    policy: Policy | None = None,
    *,
    captures: Sequence[Capture] = (),
    preserve_rng: bool = True,
    early_stop: bool = True,
) -> M:
    """Have a model's layers recompute their activations in backward, in place; returns the model.

        fp.apply_recompute(model)                                       # every layer of the model
        fp.apply_recompute(model.layers, fp.recompute.Segments())       # an nn.ModuleList, nn.Sequential or list

    model   the layers, or a module that has them: its outermost nn.ModuleLists and nn.Sequentials of modules of one
            class are the chains (the decoder layers of Hugging Face models, also of several classes). Lists in a list,
            and other modules that have no forward, stand for the modules in them
    policy  `Full()` by default; see `fastpar.recompute`

    Names, parameters, state_dict and hooks stay as they are; only these instances are changed, and `remove_recompute`
    brings them back. A layer's hooks run once, outside of what is recomputed. Apply it after `fastpar.parallelize`,
    whose sequence-parallel regions it then brings back for each microbatch. Under torch.no_grad a call is a plain one.
    Recomputation reads the weights again: in backward they must have the values that they had in forward.

    Within torch.compile a layer that is not kept runs under torch.utils.checkpoint, whatever the policy keeps of it. A
    layer of transformers that is called with a key/value cache gets none while it trains, as under transformers' own
    gradient checkpointing, and is not recomputed while it does not.

    Other arguments and errors as `checkpoint`. ValueError if no layers are found or a policy does not fit their number.
    """
    policy = Full() if policy is None else policy
    chains = _chains_of(model)
    plans = [policy.plan(len(layers)) for layers in chains]
    for layers in chains:
        if any(_STATE in layer.__dict__ for layer in layers):
            raise ValueError("the layers are under recomputation already; call fastpar.remove_recompute first")
        if len({id(layer) for layer in layers}) < len(layers):
            raise ValueError("a chain holds the same layer more than once; use fastpar.recompute.checkpoint for it")
    for layers, plan in zip(chains, plans, strict=True):
        found: list[Capture] = [capture for layer in layers for capture in _captures_of(layer)]
        every = (*dict.fromkeys(found), *captures)
        chain = RecomputeChain(plan, _setting(policy, every, preserve_rng, early_stop))
        for index, layer in enumerate(layers):
            layer.__dict__[_STATE] = _ChainState(chain, index, layer.__dict__.get("forward"))
            # Bound to the layer, so that a deep copy of the layer has a forward of its own.
            layer.__dict__["forward"] = types.MethodType(_forward, layer)
    return model


@checked(computed=False)
def remove_recompute(model: M) -> M:
    """Undo `apply_recompute` in place, for all layers in the model; returns the model."""
    tops = [model] if isinstance(model, nn.Module) else [layer for layers in _chains_of(model) for layer in layers]
    modules = [module for top in tops for module in top.modules()]
    found = [module for module in modules if _STATE in module.__dict__]
    if not found:
        raise ValueError("model has no layer under recomputation (fastpar.apply_recompute)")
    for module in found:
        state = module.__dict__.pop(_STATE)
        del module.__dict__["forward"]
        if state.previous is not None:
            module.__dict__["forward"] = state.previous
    return model


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state: _ChainState = self.__dict__[_STATE]
    function = state.previous or functools.partial(type(self).forward, self)
    if torch.compiler.is_compiling():  # torch's own is the one that its compiler knows
        if isinstance(state.chain.steps[state.layer], Drop):
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        return function(*args, **kwargs)
    if not (torch.is_grad_enabled() and state.chain.recomputes):
        return function(*args, **kwargs)
    if any(_is_cache(leaf) for leaf in (*args, *kwargs.values())):
        if not self.training:
            return function(*args, **kwargs)
        args, kwargs = tuple(_without_cache(arg) for arg in args), {k: _without_cache(v) for k, v in kwargs.items()}
        kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
    return state.chain.call(state.layer, function, args, kwargs, self)


def _is_cache(value: Any) -> bool:
    return any(cls.__name__ == "Cache" and cls.__module__.startswith("transformers") for cls in type(value).__mro__)


def _without_cache(value: Any) -> Any:
    return None if _is_cache(value) else value


def _chains_of(model: nn.Module | Sequence[nn.Module]) -> list[list[nn.Module]]:
    if not isinstance(model, (nn.Module, Sequence)) or isinstance(model, (str, bytes)):
        raise TypeError(f"model must be an nn.Module, or a sequence of layers, got {type(model).__name__}")
    if isinstance(model, (nn.ModuleList, nn.Sequential)) or not isinstance(model, nn.Module):
        chains = [list(model)]
    else:
        chains = list(_outermost(model))
    chains = [list(_with_forward(layers)) for layers in chains]
    for layer in (layer for layers in chains for layer in layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"model must be an nn.Module, or layers that are, got {type(layer).__name__} among them")
    if not chains or not all(chains):
        raise ValueError(
            f"no layers found in this {type(model).__name__}: pass an nn.ModuleList, nn.Sequential or list of layers, "
            "or a model that has one with layers of one class"
        )
    return chains


def _outermost(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The lists of more than one layer of one class that are in no other such list."""
    for child in module.children():
        layers = list(child.children()) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        is_one_class = len({type(layer) for layer in layers}) == 1
        if len(layers) > 1 and (is_one_class or all(map(_is_checkpointed, layers))):
            yield layers
        else:
            yield from _outermost(child)


def _is_checkpointed(layer: nn.Module) -> bool:
    """Whether it is one of those that transformers recomputes: a GradientCheckpointingLayer, or what looks like one."""
    return isinstance(getattr(layer, "gradient_checkpointing", None), bool)


def _with_forward(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The layers, and the ones inside in the place of those that nobody calls: `for attention, mlp in self.layers`."""
    for layer in layers:
        has_none = isinstance(layer, nn.Module) and type(layer).forward is nn.Module.forward
        if has_none and "forward" not in vars(layer):
            yield from _with_forward(layer.children())
        else:
            yield layer


def _captures_of(layer: nn.Module) -> list[Capture]:
    """Captures of what the modules in the layer read beside their arguments: objects among their attributes that say so
    by a method `capture`, such as sequence-parallel regions."""
    values = (value for module in layer.modules() for value in vars(module).values())
    return [value.capture for value in values if callable(getattr(type(value), "capture", None))]
