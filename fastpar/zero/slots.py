"""A trainable parameter and who owns it, the gradients it has, and which rank's were not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fastpar.comm import Communicator
from fastpar.zero.groups import Groups, local

_NAMES = 8  # in a report
_NOTE_BYTES = 1024


@dataclass(eq=False)
class Slot:
    """A trainable parameter of the model, and the parameter that the optimizer has instead of it.

    `owner` may be the parameter itself; else it has this rank's rows, or another dtype (master weights), or both.
    """

    name: str
    parameter: nn.Parameter
    owner: nn.Parameter
    spec: DTensorSpec | None = None  # of the owner, where it is a DTensor
    wire: torch.dtype = torch.float32  # what gradients travel in
    target: Tensor | None = field(default=None, repr=False)  # the parameter's rows, which the owner is rounded to
    summed: Tensor | None = field(default=None, repr=False)  # in float32: see "accumulation" in reducer.py
    kept: Tensor | None = field(default=None, repr=False)  # the owner's gradient, while another pass is reduced
    is_traced: bool = False  # whether `traces` are kept: norms of what this rank has sent, which a NaN shows in
    traces: Sequence[Tensor] = field(default=(), repr=False)  # on CPUs only where they are not finite

    def keep_sum(self) -> None:
        """Move a gradient of 16 bits to `summed`, as another is going to be added to it."""
        grad = self.parameter.grad
        if grad is None or grad.dtype.itemsize >= 4 or hasattr(self.parameter, "pipeline_share"):
            return
        rows = local(grad)
        if self.summed is None:
            self.summed = rows.float()
        else:
            self.summed.add_(rows)
        self.parameter.grad = None

    def take(self) -> Tensor | None:
        """What has been summed and not been sent; forgotten here."""
        if self.summed is not None:
            self.keep_sum()
        taken = self.summed
        if taken is None and self.parameter.grad is not None:
            taken = local(self.parameter.grad)
        self.summed = self.parameter.grad = None
        return taken


def keep_traces(slots: Sequence[Slot], flat: Tensor, pieces: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
    """Keep what `name_nonfinite` needs about gradients that this rank sends: `flat`, and the pieces of each slot."""
    if not slots[0].is_traced or (flat.device.type == "cpu" and math.isfinite(flat.sum().item())):
        return
    for slot, of_slot in zip(slots, pieces(), strict=True):
        some = [x for x in of_slot if x.numel() > 0]
        slot.traces = torch._foreach_norm(some, math.inf) if some else ()


def name_nonfinite(slots: Sequence[Slot], groups: Groups) -> str:
    """Which gradients are not finite, and on which ranks they became so before they were averaged: one text, the same
    on all ranks that average, and on all of the mesh where it is known. Collective."""
    flags = [any(not trace.isfinite() for trace in slot.traces) for slot in slots]
    for slot in slots:
        slot.traces = ()
    flags += [slot.owner.grad is not None and not local(slot.owner.grad).isfinite().all() for slot in slots]
    rows = torch.tensor([[dist.get_rank() if dist.is_initialized() else 0, *flags]], dtype=torch.int32)
    for comm in groups.everyone():
        rows = comm.all_gather(rows)
    ranks, sources, results = rows[:, 0].tolist(), rows[:, 1 : len(slots) + 1], rows[:, len(slots) + 1 :].any(0)
    found = []
    for index, slot in enumerate(slots):
        if results[index]:
            where = [str(rank) for rank, is_source in zip(ranks, sources[:, index].tolist(), strict=True) if is_source]
            found.append(f"{slot.name} (rank {', '.join(where)})" if where else slot.name)
    for comm in groups.others():
        found = _union(found, comm)
    return f"gradients that are not finite: {', '.join(found[:_NAMES])}" + (", ..." if len(found) > _NAMES else "")


def _union(lines: Sequence[str], comm: Communicator) -> list[str]:
    """The first lines of all ranks, each once. Collective: one all-gather of 1 KB a rank."""
    note = "\n".join(lines[: _NAMES + 1]).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
    notes = comm.all_gather(torch.tensor(list(note), dtype=torch.uint8)[None])
    texts = [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in notes.tolist()]
    return list(dict.fromkeys(line for text in texts for line in text.split("\n") if line))
