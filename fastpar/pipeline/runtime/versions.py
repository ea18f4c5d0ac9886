"""Versions of a stage's weights, for schedules that update them while microbatches are in flight.

PipeDream (Narayanan et al. 2019) runs the backward of a microbatch with the weights of its forward although they have
been updated in between; PipeDream-2BW (2021) does so with two versions. A version is a set of leaf tensors that share
memory with the parameters, but not autograd's count of in-place changes. Before an update, a version that is still
needed keeps the memory and the parameters move to a copy; so there are as many copies of the weights as live versions,
and none is made that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightVersions:
    """The versions of one stage's weights.

    with versions.use(v): ...     the module has version v's weights (None: the current one)
    versions.collect(v)           add the gradients that v's weights got to the parameters' gradients
    versions.stash(v)             keep the current weights, which are version v, beyond the next step
    versions.drop(v)              forget them
    versions.step()               update the parameters with their gradients, which become None
    """

    def __init__(self, module: nn.Module, update: Callable[[], None]) -> None:
        """update: what changes the parameters in place, such as an optimizer's `step`."""
        self._update = update
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.setdefault(parameter, []).append((owner, name))
        self.restart()

    def restart(self) -> None:
        """Count versions from 0 again, from the current weights."""
        self.current = 0
        self._stashed: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._live = self._leaves()

    def _leaves(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.data.requires_grad_() for parameter in self._places}

    def _of(self, version: int | None) -> dict[nn.Parameter, Tensor]:
        if version is None or version == self.current:
            return self._live
        if version not in self._stashed:
            kept = sorted(self._stashed)
            raise ValueError(f"weight version {version} is gone: the current one is {self.current}, kept are {kept}")
        return self._stashed[version]

    @contextmanager
    def use(self, version: int | None) -> Iterator[None]:
        """The module's parameters are those of `version` inside."""
        leaves = self._of(version)
        for parameter, places in self._places.items():
            for owner, name in places:
                # A plain tensor under a parameter's name: what forward reads, and where backward puts the gradient.
                owner._parameters[name] = leaves[parameter]  # type: ignore[assignment]
        try:
            yield
        finally:
            for parameter, places in self._places.items():
                for owner, name in places:
                    owner._parameters[name] = parameter

    def collect(self, version: int | None) -> None:
        for parameter, leaf in self._of(version).items():
            if leaf.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = leaf.grad
            else:
                parameter.grad.add_(leaf.grad)
            leaf.grad = None

    def stash(self, version: int) -> None:
        if version != self.current:
            raise ValueError(f"only the current weights (version {self.current}) can be kept, got version {version}")
        self._stashed[version] = self._live

    def drop(self, version: int) -> None:
        if self._stashed.pop(version, None) is None:
            raise ValueError(f"weight version {version} is not kept; kept are {sorted(self._stashed)}")

    def step(self) -> None:
        if self.current in self._stashed:  # somebody reads it later: the update must not happen in its memory
            with torch.no_grad():
                for parameter in self._places:
                    parameter.data = parameter.data.clone()
        self._update()
        for parameter in self._places:
            parameter.grad = None
        self.current += 1
        self._live = self._leaves()
