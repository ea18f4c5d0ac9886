"""A model with a split sequence, which must compute what it computes without.

Layers are tried and watched one by one. What the model's own code does between them, while the stream is split, belongs
to no layer: a mean over tokens, a shift, positions counted from `x.size(1)`, a loss on hidden states. So before the
first watched forward in each mode the model runs once more, without gradients and with the stream whole, and what it
returns and keeps is compared with what the forward itself returns and keeps.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.comm import CommError, Communicator
from fastpar.contracts.rehearsal import collections_as_they_were, own_attributes, same_generators
from fastpar.parallel.guards.positions import as_it_was
from fastpar.tensor.grid import GridRegion
from fastpar.tensor.sequence import SequenceRegion, whole_stream

_log = logging.getLogger("fastpar")
_FAR = 1e-3  # of the norm; in 16 bits four units in the last place
_DEPTH = 4  # of what a model returns
_INSIDE = "->"  # an object of a class of its own, such as a cache
_PLAIN = (Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)

Found = dict[str, Tensor]


class StreamGuard:
    """Runs a model with the stream whole before its first forward in each mode, and compares. Collective: the model's
    own forward, and one byte a rank."""

    def __init__(self, comm: Communicator, layers: Mapping[str, SequenceRegion]):
        self.comm, self.layers, self.regions = comm, list(layers), list(dict.fromkeys(layers.values()))
        self.is_running = False  # the forward that is compared with
        self._modes: set[bool] = set()
        self._wanted: Found | None = None
        self._before: dict[str, Any] = {}

    def restart(self) -> None:
        """The model has changed: compare again."""
        self._modes.clear()

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the model on what it is called with, and leave it as it was."""
        self._wanted = None
        if not self.regions or model.training in self._modes or not _is_plain((args, kwargs)):
            return  # objects such as caches would be written to twice
        if not self._modes:
            _warn_of_hooks(model, self.layers)
        self._modes.add(model.training)
        self._before = _kept(model)
        self.is_running = True
        try:
            with torch.no_grad(), same_generators(), as_it_was(model), collections_as_they_were(model):
                with whole_stream(self.regions):
                    output = model(*args, **kwargs)
                self._wanted = _numbers(output) | self._changed(model)
        except CommError:
            raise
        except Exception as error:  # of the model's own code: any
            _log.info("%s could not be run with its stream whole: %s", type(model).__name__, error)
        finally:
            self.is_running = False

    @torch.no_grad()
    def after(self, model: nn.Module, output: Any) -> None:
        """ValueError on every rank names what differs."""
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        found = _numbers(output) | self._changed(model)
        far = _tolerance(model)
        names = [name for name, x in wanted.items() if name in found and _differ(found[name], self._here(name, x), far)]
        if not self.comm.all_gather(torch.tensor([bool(names)], device="cpu")).any():
            return
        said = f"{', '.join(names[:4])}: other numbers" if names else "on another rank other numbers"
        raise ValueError(
            f"with {self.regions[0].option} {type(model).__name__} computes something else than without ({said}). "
            "Between its layers the model's code sees this rank's positions only: a mean over tokens, a shift, "
            "positions counted from x.size(1), a loss on hidden states. Do that with what the model returns, or in a "
            f"module with the style 'gathered', or do without {self.regions[0].option}"
        )

    def _here(self, name: str, x: Tensor) -> Tensor:
        """What this rank has of a tensor in a cache, which its own layers alone read again: its sequences on a grid."""
        grids = [region for region in self.regions if isinstance(region, GridRegion)]
        is_of_batch = bool(grids) and _INSIDE in name and x.dim() > 1 and x.size(0) == grids[0].shape[0]
        return grids[0].cut_batch(x) if is_of_batch else x

    def _changed(self, model: nn.Module) -> Found:
        return {name: x for name, x in _kept(model).items() if self._before.get(name) is not x}


def modules_at(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """Those that are there: layers may have been taken out of the model since it was parallelised."""
    there = dict(model.named_modules(remove_duplicate=False))
    return {path: there[path] for path in paths if path in there}


def _warn_of_hooks(model: nn.Module, layers: Sequence[str]) -> None:
    """Hooks of others see a part of what a layer, or a module inside, takes and gives."""
    for path, layer in modules_at(model, layers).items():
        for name, module in layer.named_modules(prefix=path):
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if any(not (getattr(hook, "__module__", None) or "").startswith(("fastpar.", "torch.")) for hook in hooks):
                _log.warning(
                    "%s has a forward hook, which with sequence_parallel=True sees this rank's positions only: a "
                    "loss on what it captures would be that of a part",
                    name,
                )
                return


def _is_plain(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(_is_plain(value) for value in tree.values())
    if isinstance(tree, tuple | list):
        return all(_is_plain(value) for value in tree)
    return isinstance(tree, _PLAIN)


def _numbers(output: Any, name: str = "output", depth: int = _DEPTH) -> Found:
    """The floating-point tensors of what a model returns, by where they are."""
    if isinstance(output, Tensor):
        x = output._local_tensor if isinstance(output, DTensor) else output
        return {name: x.detach()} if x.is_floating_point() else {}
    if depth == 0 or isinstance(output, str | bytes | nn.Module):
        return {}
    if isinstance(output, Mapping):
        items = [(f"{name}.{key}", value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        items = [(f"{name}[{index}]", value) for index, value in enumerate(output)]
    elif dataclasses.is_dataclass(output):
        items = [(f"{name}.{key}", value) for key, value in vars(output).items()]
    elif hasattr(output, "__dict__"):
        items = [(f"{name}{_INSIDE}{key}", value) for key, value in vars(output).items()]
    else:
        return {}
    return {key: x for path, value in items for key, x in _numbers(value, path, depth - 1).items()}


def _kept(model: nn.Module) -> dict[str, Any]:
    """Tensors that modules hold as attributes, also in lists, tuples and dicts."""
    kept: Found = {}
    for path, module in model.named_modules():
        for key, value in own_attributes(module).items():
            if isinstance(value, Tensor | list | tuple | dict):
                kept |= _numbers_as_they_are(value, f"{path}.{key}" if path else key)
    return kept


def _numbers_as_they_are(value: Any, name: str) -> dict[str, Any]:
    values = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else []
    flat = [(name, value), *((f"{name}[{key}]", item) for key, item in values)]
    return {key: x for key, x in flat if isinstance(x, Tensor) and x.is_floating_point()}


def _tolerance(model: nn.Module) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        eps = max(eps, torch.finfo(torch.bfloat16).eps)
    return max(_FAR, 4 * eps)


def _differ(found: Tensor, wanted: Tensor, far: float) -> bool:
    found, wanted = getattr(found, "_local_tensor", found), getattr(wanted, "_local_tensor", wanted)
    if found.shape != wanted.shape:
        return True
    size = float(wanted.double().norm())
    error = float((found.double() - wanted.double()).norm())
    return bool(error > far * size + 1e-6) and size == size  # NaN in both is another's matter
