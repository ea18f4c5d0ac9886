"""A trainable parameter, what the optimizer has instead of it, its gradients, and which rank's were not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fastpar.comm import Communicator
from fastpar.optim._masters import follow, version_of, written
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.param_classes import drop_unsent, unsent_gradient

_NAMES = 8  # in a report
_NOTE_BYTES = 1024


@dataclass(eq=False)
class ShardedParam:
    """A trainable parameter of the model, and the parameter that the optimizer has instead of it.

    `optim_param` may be the parameter itself; else it has this rank's rows, or another dtype (master weights), or both.
    `sharded` is what modules have outside of forward, where that is another one (stage 3).
    """

    name: str
    parameter: nn.Parameter
    optim_param: nn.Parameter
    spec: DTensorSpec | None = None  # of optim_param, where it is a DTensor
    reduce_dtype: torch.dtype = torch.float32  # what gradients travel in
    model_rows: Tensor | None = field(default=None, repr=False)  # the parameter's, which optim_param is rounded to
    unreduced_sum: Tensor | None = field(default=None, repr=False)  # in float32: see "accumulation" in reducer.py
    set_aside: Tensor | None = field(default=None, repr=False)  # optim_param's gradient, while a pass is reduced
    is_traced: bool = False  # whether `traces` are kept: norms of what this rank has sent, which a NaN shows in
    traces: Sequence[Tensor] = field(default=(), repr=False)  # on CPUs only where they are not finite
    sharded: nn.Parameter | None = field(default=None, repr=False)
    version: int = field(default=0, repr=False)  # of model_param's memory, when it last was optim_param rounded
    is_behind: bool = field(default=False, repr=False)  # optim_param, of writes that were seen while it was in a file
    # The parameter's rows where these are not model_rows, and what they have had: see quantized_gather.py
    quantized_rows: Tensor | None = field(default=None, repr=False)
    dequantized_rows: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def model_params(self) -> list[nn.Parameter]:
        """Parameters that users may have of it, beside optim_param."""
        return [x for x in (self.parameter, self.sharded) if x is not None and x is not self.optim_param]

    @property
    def model_param(self) -> nn.Parameter:
        """The parameter that the model has outside of forward."""
        return self.parameter if self.sharded is None else self.sharded

    @property
    def unsent(self) -> Tensor | None:
        """The gradient that autograd has put into the parameter."""
        return unsent_gradient(self.parameter)

    def note_version(self) -> None:
        """The parameter is its owner, rounded."""
        self.version = version_of(self.model_param)

    @property
    def is_in_place(self) -> bool:
        """Whether the target is the owner's own memory: exact rows of what is gathered as codes."""
        if self.quantized_rows is None or self.model_rows is None:
            return False
        return self.model_rows.data_ptr() == local(self.optim_param).data_ptr()

    @property
    def is_output(self) -> bool:
        """Whether an update can round to the parameter in its own pass, which runs where the masters are. A master of
        the parameter's dtype is copied instead, and so is one on another device."""
        rows = self.model_rows
        return (
            rows is not None and rows.dtype != self.optim_param.dtype and rows.device == local(self.optim_param).device
        )

    @property
    def is_overwritten(self) -> bool:
        """Whether somebody has written to a parameter whose owner is a copy."""
        return self.model_rows is not None and version_of(self.model_param) != self.version

    def take_values(self) -> None:
        """Let a copy follow what was written to its parameter; one in a file does when an update has read it."""
        self.is_behind = True
        follow_writes([self])
        self.note_version()

    def drop(self) -> None:
        """Forget what was not sent."""
        self.unreduced_sum = None
        drop_unsent(self.parameter)

    @property
    def has_own_term(self) -> bool:
        """Whether the parameter at rest has a gradient that the owner lacks: see `take_own_term`."""
        sharded = self.sharded
        return sharded is not None and sharded is not self.optim_param and unsent_gradient(sharded) is not None

    def take_own_term(self) -> None:
        """Add to the owner what a term of the loss that was made of the parameter at rest has as gradient."""
        if self.has_own_term:
            term: Any = self.sharded
            grad: Any = unsent_gradient(term)
            drop_unsent(term)
            self.add_gradient(local(grad).to(self.optim_param.dtype))

    def add_gradient(self, mine: Tensor) -> None:
        """Give optim_param this rank's part of a mean, a tensor of its own: it is its gradient, or is added to the one
        that is there."""
        optim_param: Any = self.optim_param
        # Of another dtype or device, where it is a master weight
        like = optim_param._local_tensor if isinstance(optim_param, DTensor) else optim_param
        if mine.shape != like.shape:  # a scalar as one row
            mine = mine.view(like.shape)
        if optim_param.grad is not None:
            local(optim_param.grad).add_(mine.to(like.device))
            return
        is_alike = mine.dtype == like.dtype and mine.device == like.device
        optim_param.grad = as_dtensor(mine if is_alike else mine.to(like.device, like.dtype), self.spec)

    def keep_sum(self) -> None:
        """Move a gradient of 16 bits to `unreduced_sum`, as another is going to be added to it."""
        grad = self.unsent
        if grad is None or grad.dtype.itemsize >= 4 or hasattr(self.parameter, "pipeline_share"):
            return
        rows = local(grad)
        if self.unreduced_sum is None:
            self.unreduced_sum = rows.float()
        else:
            self.unreduced_sum.add_(rows)
        drop_unsent(self.parameter)

    def take(self) -> Tensor | None:
        """The gradient that has been summed and not been sent; forgotten here."""
        if self.unreduced_sum is not None:
            self.keep_sum()
        taken = self.unreduced_sum
        unsent = self.unsent
        if taken is None and unsent is not None:
            taken = local(unsent)
        self.drop()
        return taken


def follow_writes(params: Iterable[ShardedParam]) -> bool:
    """Let copies that are in memory follow what was written to their parameters, counted by torch or not: elements that
    are not the copy's own, rounded. Whether there are any; of other copies `is_behind` says that they are to follow."""
    found = [(param, local(param.optim_param), _seen(param)) for param in params if param.model_rows is not None]
    held = []
    for each in found:
        param, mine, seen = each
        if all(x.untyped_storage().nbytes() > 0 for x in (mine, seen)):
            param.is_behind = False
            held.append(each)
    shown = [mine if p.dequantized_rows is None else p.dequantized_rows().to(mine.device) for p, mine, _ in held]
    is_any = False
    for index in written(shown, [seen for _, _, seen in held]):
        param, mine, seen = held[index]
        is_any |= follow(mine, seen, None if param.dequantized_rows is None else shown[index])
        if param.model_rows is not None and param.quantized_rows is not None and not param.is_in_place:
            param.model_rows.copy_(mine)  # what is quantised next
    return is_any


def _seen(param: ShardedParam) -> Any:
    """The rows that users write to."""
    return param.model_rows if param.quantized_rows is None else param.quantized_rows


def keep_traces(params: Sequence[ShardedParam], flat: Tensor, pieces: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
    """Keep what `name_nonfinite` needs about gradients that this rank sends: `flat`, and the pieces of each param."""
    if not params[0].is_traced or (flat.device.type == "cpu" and math.isfinite(flat.sum().item())):
        return
    for param, of_param in zip(params, pieces(), strict=False):  # a bucket's flag comes last
        some = [x for x in of_param if x.numel() > 0]
        param.traces = torch._foreach_norm(some, math.inf) if some else ()


def name_nonfinite(params: Sequence[ShardedParam], groups: Groups) -> str:
    """Which gradients are not finite, and on which ranks they became so before they were averaged: one text, the same
    on all ranks that average, and on all of the mesh where it is known. Collective."""
    flags = [any(not trace.isfinite() for trace in param.traces) for param in params]
    for param in params:
        param.traces = ()
    flags += [
        param.optim_param.grad is not None and not local(param.optim_param.grad).isfinite().all() for param in params
    ]
    rows = torch.tensor([[dist.get_rank() if dist.is_initialized() else 0, *flags]], dtype=torch.int32)
    for comm in groups.everyone():
        rows = comm.all_gather(rows)
    ranks, sources, results = rows[:, 0].tolist(), rows[:, 1 : len(params) + 1], rows[:, len(params) + 1 :].any(0)
    found = []
    for index, param in enumerate(params):
        if results[index]:
            where = [str(rank) for rank, is_source in zip(ranks, sources[:, index].tolist(), strict=True) if is_source]
            found.append(f"{param.name} (rank {', '.join(where)})" if where else param.name)
    for comm in groups.others():
        found = union(found, comm)
    return f"gradients that are not finite: {', '.join(found[:_NAMES])}" + (", ..." if len(found) > _NAMES else "")


def union(lines: Sequence[str], comm: Communicator) -> list[str]:
    """The first lines of all ranks, each once. Collective: one all-gather of 1 KB a rank."""
    note = "\n".join(lines[: _NAMES + 1]).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
    notes = comm.all_gather(torch.tensor(list(note), dtype=torch.uint8)[None])
    texts = [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in notes.tolist()]
    return list(dict.fromkeys(line for text in texts for line in text.split("\n") if line))


def take_values(param: ShardedParam, home: Tensor, value: Tensor) -> None:
    """Give a parameter new values, and its master weights where it has some."""
    with torch.no_grad():
        home.copy_(value)
        if param.model_rows is not None:
            param.take_values()


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


def places_of(model: nn.Module, names: Sequence[str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Places where parameters are registered: name -> modules and what they call it. Tied ones have several."""
    named = dict(model.named_parameters())  # get_parameter trips over properties with a parameter's name
    by_parameter = {id(named[name]): name for name in names}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            name = by_parameter.get(id(parameter))
            if name is not None:
                found[name].append((module, attribute))
    return found
