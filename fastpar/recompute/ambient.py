"""The surroundings of a layer's forward, taken down when it runs and brought back when it is recomputed.

Random states (torch's CPU generator, from which fastpar's dropout seeds come too, and those of the devices of the
layer's tensors), autocast, the default device; and whatever else the layer reads that is neither argument nor parameter,
through *captures*: functions that are called in forward and return what makes a context manager in recompute.

    capture() -> restore;   with restore(): recompute

Backward may run in another thread (on CUDA it does), so a restore has to set what is local to a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


class Autocast(NamedTuple):
    """torch.autocast's settings for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @staticmethod
    def now(device_type: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return Autocast(device_type, enabled, dtype, torch.is_autocast_cache_enabled())


class Ambient(NamedTuple):
    """The surroundings of one call. `random` is None where the policy does not preserve it."""

    random: RandomState | None
    autocast: tuple[Autocast, ...]
    default_device: torch.device
    restores: tuple[Restore, ...]

    @staticmethod
    def now(devices: Sequence[torch.device], captures: Sequence[Capture], *, preserve_rng: bool) -> Ambient:
        types = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return Ambient(
            RandomState.now(devices) if preserve_rng else None,
            tuple(Autocast.now(kind) for kind in types if torch.amp.is_autocast_available(kind)),
            torch.get_default_device(),
            tuple(capture() for capture in captures),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The surroundings of the call; random states stay as they are left, see `random_preserved`."""
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
