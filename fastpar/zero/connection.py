"""Parameters that were replaced or moved after `shard`: brought back to where the optimizer changes them, or refused.

A rank's rows of a parameter are the optimizer's, in the parameter's own memory. What gives a parameter other memory
(`model.to("cpu:0")`, `p.data = ...`) or a module another parameter (`load_state_dict(assign=True)`) would separate the
two: the model would be trained no more, and nobody would be told. So memory is compared before every forward and step,
one pointer a parameter; new values of the same dtype and device are copied to where the old ones were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.zero.groups import set_local
from fastpar.zero.slots import Slot
from fastpar.zero.units import owners_of


class Connection:
    """Watches the parameters of some slots.

    model    whose modules are looked at; None: there is none, and parameters alone are watched
    release  called before rows that other ranks may be reading are written to; collective
    """

    def __init__(self, model: nn.Module | None, slots: Sequence[Slot], release: Callable[[], None]) -> None:
        self._release = release
        self._homes = [(slot, _memory(slot.parameter), _memory(slot.parameter).data_ptr()) for slot in slots]
        names = [slot.name for slot in slots]
        places = {} if model is None else owners_of(model, names)
        self._places = [
            (slot, module._parameters, attribute) for slot in slots for module, attribute in places.get(slot.name, [])
        ]

    def check(self) -> None:
        """Bring back what has gone astray. Raises RuntimeError, naming the parameter, for another dtype, shape or
        device, and where the optimizer's copy is in a file.
        """
        astray: dict[str, tuple[Slot, Tensor, nn.Parameter]] = {}
        for slot, home, pointer in self._homes:  # whose memory is held here, and is nobody else's
            inner: Any = slot.parameter
            if (inner._local_tensor if isinstance(inner, DTensor) else inner).data_ptr() != pointer:
                astray[slot.name] = slot, home, slot.parameter
        homes = {slot.name: home for slot, home, _ in self._homes}
        for slot, held, attribute in self._places:
            found = held.get(attribute)
            if found is not None and found is not slot.parameter:
                astray[slot.name] = slot, homes[slot.name], found
        if astray:
            self._bring_back(list(astray.values()))

    def _bring_back(self, astray: Sequence[tuple[Slot, Tensor, nn.Parameter]]) -> None:
        for slot, home, found in astray:
            check_alike(slot.name, home, _memory(found))
        changed = [each for each in astray if not torch.equal(each[1], _memory(each[2]))]
        if changed:
            self._release()
        for slot, home, found in changed:
            take_values(slot, home, _memory(found))
        for slot, home, _ in astray:
            set_local(slot.parameter, home)
        for slot, held, attribute in self._places:
            if held.get(attribute) is not slot.parameter:
                held[attribute] = slot.parameter


def take_values(slot: Slot, home: Tensor, value: Tensor) -> None:
    """Give a parameter new values, and its master weights where it has some."""
    with torch.no_grad():
        home.copy_(value)
        if slot.target is not None:
            slot.take_values()


def _memory(parameter: Any) -> Tensor:
    found: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
    return found


def check_alike(name: str, home: Tensor, found: Tensor) -> None:
    for what, was, now in (
        ("dtype", home.dtype, found.dtype),
        ("shape", tuple(home.shape), tuple(found.shape)),
        ("device", home.device, found.device),
    ):
        if was != now:
            raise RuntimeError(
                f"{name} had {what} {was} in fastpar.zero.shard(...) and has {now} now: the optimizer would go on with "
                "the old parameter. Convert and move the model before shard (precision= gives dtypes to shard itself)"
            )
