"""The surroundings of a layer's forward, taken down when it runs and brought back when it is recomputed.

Random states (torch's CPU generator, from which fastpar's dropout seeds come too, and those of the devices of the
layer's tensors), autocast, the default device, and all of Python's context variables: a `WeightGradStore` that was
deferring in forward is deferring again, in whatever thread backward runs (on CUDA, one of the engine's).

Whatever else a layer reads beside arguments and parameters comes back through *captures*: functions that are called in
forward and return what makes a context manager in recomputation.

    capture() -> restore;   with restore(): recompute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

Restore = Callable[[], AbstractContextManager[Any]]
Capture = Callable[[], Restore]


class RandomState(NamedTuple):
    """States of torch's CPU generator and of one generator per device."""

    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]

    @staticmethod
    def now(devices: Sequence[torch.device]) -> RandomState:
        states = tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in devices)
        return RandomState(torch.get_rng_state(), states)

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)


class AutocastState(NamedTuple):
    """torch.autocast's settings for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @staticmethod
    def now(device_type: str) -> AutocastState:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return AutocastState(device_type, enabled, dtype, torch.is_autocast_cache_enabled())


class Ambient(NamedTuple):
    """The surroundings of one call. `random` is None where the policy does not preserve it."""

    random: RandomState | None
    autocast: tuple[AutocastState, ...]
    default_device: torch.device
    restores: tuple[Restore, ...]
    variables: Context

    @staticmethod
    def now(devices: Sequence[torch.device], captures: Sequence[Capture], *, preserve_rng: bool) -> Ambient:
        types = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return Ambient(
            RandomState.now(devices) if preserve_rng else None,
            tuple(AutocastState.now(kind) for kind in types if torch.amp.is_autocast_available(kind)),
            torch.get_default_device(),
            tuple(capture() for capture in captures),
            copy_context(),
        )

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)` in these surroundings. Leaves random states changed; see `random_preserved`."""
        return self.variables.copy().run(self._call, function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._restored():
            return function(*args, **kwargs)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for saved in self.autocast:
                if saved.enabled or torch.is_autocast_enabled(saved.device_type):
                    kind, enabled, dtype, cache = saved
                    stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            for restore in self.restores:
                stack.enter_context(restore())
            if self.random is not None:
                self.random.set()
            yield


@contextmanager
def random_preserved(like: Ambient) -> Iterator[None]:
    """Put the random states that `like` has back to what they were when the block began."""
    if like.random is None:
        yield
        return
    before = RandomState.now([device for device, _ in like.random.devices])
    try:
        yield
    finally:
        before.set()
