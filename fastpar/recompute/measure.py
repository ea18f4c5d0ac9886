"""What the layers of a chain cost, measured on this machine, for `Budget`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpar.arguments import checked
from fastpar.recompute.plan import LayerCost
from fastpar.recompute.segment import leaves, outputs_of, rebuilt


@checked(computed=False)
def measure_layers(
    layers: Sequence[Callable[..., Any]] | nn.ModuleList | nn.Sequential, *args: Any, repeats: int = 3, **kwargs: Any
) -> tuple[LayerCost, ...]:
    """Seconds and bytes of each layer's forward and backward.

        costs = measure_layers(model.layers, hidden, cos, sin)
        fp.apply_recompute(model.layers, fp.recompute.Budget(2 << 30, costs))

    The layers are called in a row, each with the output of the one before in the place of the first argument, under the
    caller's autocast; the least time of `repeats` counts, after one more to warm up. Gradients of parameters are put
    back as they were; random states move on. Layers must not be under recomputation. Of the bytes, shared memory counts
    once; what a layer's autograd functions hide from saved-tensor hooks is not seen.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    costs = []
    with torch.enable_grad():
        for layer in layers:
            cost, out = _measure(layer, args, kwargs, repeats)
            costs.append(cost)
            args = (out, *args[1:])
    return tuple(costs)


def _measure(
    layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int
) -> tuple[LayerCost, Any]:
    own = list(_own_tensors(layer))
    gradients = [(p, p.grad) for p in own if p.requires_grad]
    times: list[tuple[float, float]] = []
    saved = output = 0
    for _ in range(repeats + 1):
        args, kwargs = rebuilt((args, kwargs), _fresh)
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = next((x.device for x in (*given, *own)), torch.device("cpu"))
        seen: dict[int, int] = {}

        def pack(x: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[_address(x)] = x.untyped_storage().nbytes()
            return x

        started = _now(device)
        with saved_tensors_hooks(pack, lambda x: x):
            out = layer(*args, **kwargs)
        forward = _now(device) - started
        results = outputs_of(out)
        output = sum({_address(x): x.untyped_storage().nbytes() for x in results}.values())
        elsewhere = {_address(x) for x in (*own, *given, *results)}
        saved = sum(size for address, size in seen.items() if address not in elsewhere)
        roots = [x for x in results if x.requires_grad]
        upstream = [torch.ones_like(x) for x in roots]
        started = _now(device)
        if roots:
            torch.autograd.backward(roots, upstream)
        times.append((forward, _now(device) - started))
        for parameter, gradient in gradients:
            parameter.grad = gradient
    forward, backward = (min(column) for column in zip(*times[1:], strict=True))
    return LayerCost(forward, backward, output, saved), rebuilt(out, _fresh)


def _own_tensors(layer: Callable[..., Any]) -> Iterator[Tensor]:
    if isinstance(layer, nn.Module):
        yield from layer.parameters()
        yield from layer.buffers()


def _fresh(leaf: Any) -> Any:
    """A tensor as a leaf of the graph, which asks for a gradient wherever it can have one."""
    return leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
