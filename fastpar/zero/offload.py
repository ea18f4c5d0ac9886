"""Optimizer states and master weights away from the device, and in stage 3 the parameters: in the host's memory, or in
a file.

"cpu"       the optimizer's parameters (master weights) and so its states are in the host's memory; gradients are copied
            there bucket by bucket while backward runs, and updated parameters back
"nvme"      of these, one group at a time is in memory: the file is read one group ahead, and written one behind
parameters  of stage 3, too: their shards are in the host's memory, where the optimizer updates or rounds to them, and
            are copied to the device to be gathered; or they are in a file, see `fastpar.zero.disk_shards`

On a machine without an accelerator the device's memory is the host's, and the same code runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.arguments import checked_fields
from fastpar.storage import TensorStore, stream
from fastpar.zero.groups import local

GROUP_BYTES = 64 << 20
SMALL_BYTES = 64 << 10  # tensors below stay in memory


@checked_fields
@dataclass(frozen=True)
class Offload:
    """Where the optimizer's part of a model lives.

    path         None: the host's memory; a folder: a file in it, on a local disk
    group_bytes  of master weights that are in memory at once, three times: read ahead, updated, written behind
    options      of `fastpar.storage.TensorStore`
    parameters   whether the shards of stage 3 live there, too; what is resident stays on the device
    """

    path: str | os.PathLike[str] | None = None
    group_bytes: int = GROUP_BYTES
    options: Mapping[str, Any] | None = None
    parameters: bool = False

    @staticmethod
    def of(value: Offload | str | None) -> Offload | None:
        """None or "none", "cpu", "nvme:FOLDER", these two with parameters ("cpu+parameters",
        "nvme+parameters:FOLDER"), or an Offload. Raises ValueError for another text."""
        if value is None or isinstance(value, Offload):
            return value
        if not isinstance(value, str):
            raise TypeError(f"offload must be a text, a fastpar.zero.Offload or None, got {type(value).__name__}")
        if value == "none":
            return None
        where, colon, folder = value.partition(":")
        kind, plus, what = where.partition("+")
        is_known = bool(folder) if kind == "nvme" else kind == "cpu" and not colon
        if not is_known or (plus and what != "parameters"):
            raise ValueError(
                'offload must be "none", "cpu", "cpu+parameters", "nvme:FOLDER", "nvme+parameters:FOLDER" or an '
                f"Offload, got {value!r}"
            )
        return Offload(folder or None, parameters=bool(plus))


class DiskStates:
    """Keeps the values and states of parameters in a file between steps.

        states = DiskStates(offload, parameters, optimizer)      # values go to the file; their memory is freed
        states.update(step)                                      # step(some of them), group by group, in memory

    Tensors below 64 KB stay in memory, and so do parameters that are not trained. While a group is updated the next is
    read and the one before written.
    """

    def __init__(self, offload: Offload, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        assert offload.path is not None
        self._store = TensorStore(offload.path, **(offload.options or {}))
        self._optimizer = optimizer
        self._names = {id(parameter): f"{number}" for number, parameter in enumerate(parameters)}
        self._group_bytes = offload.group_bytes
        self._groups = _groups([p for p in parameters if p.requires_grad], offload.group_bytes)
        self._away: dict[str, Tensor] = {}  # tensors whose values are in the file
        for group in self._groups:
            self._put_away(group)
        self._store.flush()

    @property
    def file_bytes(self) -> int:
        return self._store.file_bytes

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep these, too: the optimizer has got them after this was made."""
        first = len(self._names)
        self._names |= {id(parameter): f"{first + number}" for number, parameter in enumerate(parameters)}
        for group in _groups(parameters, self._group_bytes):
            self._groups.append(group)
            self._put_away(group)
        self._store.flush()

    def update(self, step: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Call `step` for the parameters of one group after the other; those without gradient are left out."""
        groups = [[p for p in group if p.grad is not None] for group in self._groups]
        groups = [group for group in groups if group]
        items = [tuple(name for name, _ in self._held(group) if name in self._away) for group in groups]

        def work(number: int, tensors: Mapping[str, Tensor]) -> None:
            for name, memory in tensors.items():
                self._away[name].data = memory
            step(groups[number])
            for name in tensors:
                self._away[name].data = nothing_like(self._away[name])
            self._put_away(groups[number])

        stream(self._store, items, work)
        self._store.flush()

    def load(self) -> None:
        """Bring everything into memory, as for a checkpoint; `put_away` gives it back. What is there already stays: it
        may have been written to."""
        for name, tensor in self._away.items():
            if tensor.untyped_storage().nbytes() == 0:
                tensor.data = self._store.read(name).wait()

    def put_away(self) -> None:
        for name, tensor in self._away.items():
            self._store.write(name, tensor).wait()
            tensor.data = nothing_like(tensor)
        for group in self._groups:
            self._put_away(group)

    def refresh(self) -> None:
        """The optimizer has other tensors as states than before: puts these away."""
        for group in self._groups:
            for name, tensor in self._held(group):
                if name in self._away:
                    self._away[name] = tensor
        self.put_away()

    def close(self) -> None:
        self._store.close()

    def _held(self, group: Sequence[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        """What belongs to these parameters: the tensors with memory, by name."""
        for parameter in group:
            number = self._names[id(parameter)]
            inner: Any = parameter
            yield f"{number}.value", getattr(inner, "_local_tensor", inner)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    inner = value
                    yield f"{number}.{key}", getattr(inner, "_local_tensor", inner)

    def _put_away(self, group: Sequence[nn.Parameter]) -> None:
        """Write what is in memory and large, and free it."""
        for name, tensor in self._held(group):
            if name not in self._away and tensor.nbytes >= SMALL_BYTES:
                self._store.write(name, tensor.detach()).wait()
                self._away[name] = tensor
                tensor.data = nothing_like(tensor)


def _groups(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        nbytes = local(parameter).nbytes
        if not groups or held + nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += nbytes
    return groups


def nothing_like(x: Tensor) -> Tensor:
    """A tensor of the same shape without memory."""
    nothing = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    nothing.untyped_storage().resize_(0)
    return nothing
