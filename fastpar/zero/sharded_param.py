"""A trainable parameter, what the optimizer has instead of it, its gradients, and which rank's were not finite.

Note: replaced parameters. A rank's rows of a parameter are the optimizer's, in the parameter's own memory. What gives a
parameter other memory (`model.to("cpu:0")`, `p.data = ...`) or a module another parameter
(`load_state_dict(assign=True)`) would separate the two: the model would be trained no more, and nobody would be told.
So `Connection` compares memory before every training forward and step, one pointer a parameter; new values of the same
dtype and device are copied to where the old ones were. An evaluation computes with what is there, which may go again.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import stateless

from fastpar.comm import Communicator
from fastpar.zero.groups import Groups, as_dtensor, local, set_local
from fastpar.zero.parameter_classes import drop_unsent, unsent_gradient

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
        self.version = _version(self.model_param)

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
        return self.model_rows is not None and _version(self.model_param) != self.version

    def take_values(self) -> None:
        """Let a copy follow what was written to its parameter: elements that are not the copy's own, rounded."""
        assert self.model_rows is not None
        mine, target = local(self.optim_param), self.model_rows if self.quantized_rows is None else self.quantized_rows
        if mine.untyped_storage().nbytes() == 0 and mine.numel() > 0:
            raise RuntimeError(
                f"{self.name} got new values after fastpar.zero.shard(...), and the optimizer's copy of it is in a "
                "file: change parameters before shard, or load them with load_state_dict of what shard returned"
            )
        if target.untyped_storage().nbytes() > 0:
            written = target.to(mine.device)
            before = (
                mine.to(written.dtype) if self.dequantized_rows is None else self.dequantized_rows().to(mine.device)
            )
            mine.copy_(torch.where(before == written, mine, written.to(mine.dtype)))
            if self.quantized_rows is not None and not self.is_in_place:
                self.model_rows.copy_(mine)  # what is quantised next
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


def _version(face: Any) -> int:
    """Both count: what DTensor runs on its part does not reach that one's own counter."""
    found: int = face._version + (face._local_tensor._version if isinstance(face, DTensor) else 0)
    return found


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


class Connection:
    """Watches the parameters of some params.

    model    whose modules are looked at; None: there is none, and parameters alone are watched
    release  called before rows that other ranks may be reading are written to; collective
    """

    def __init__(self, model: nn.Module | None, params: Sequence[ShardedParam], release: Callable[[], None]) -> None:
        self._release = release
        self._homes = [(param, _memory(param.parameter), _memory(param.parameter).data_ptr()) for param in params]
        names = [param.name for param in params]
        places = {} if model is None else places_of(model, names)
        self._places = [
            (param, module._parameters, attribute)
            for param in params
            for module, attribute in places.get(param.name, [])
        ]

    def check(self) -> None:
        """Bring back what has gone astray. Raises RuntimeError, naming the parameter, for another dtype, shape or
        device, and where the optimizer's copy is in a file.
        """
        astray: dict[str, tuple[ShardedParam, Tensor, nn.Parameter]] = {}
        for param, home, pointer in self._homes:  # whose memory is held here, and is nobody else's
            inner: Any = param.parameter
            if (inner._local_tensor if isinstance(inner, DTensor) else inner).data_ptr() != pointer:
                astray[param.name] = param, home, param.parameter
        homes = {param.name: home for param, home, _ in self._homes}
        for param, held, attribute in self._places:
            found = held.get(attribute)
            if found is not None and found is not param.parameter:
                astray[param.name] = param, homes[param.name], found
        if astray and not _is_in_functional_call():
            self._bring_back(list(astray.values()))

    def _bring_back(self, astray: Sequence[tuple[ShardedParam, Tensor, nn.Parameter]]) -> None:
        for param, home, found in astray:
            check_alike(param.name, home, _memory(found))
        changed = [each for each in astray if not torch.equal(each[1], _memory(each[2]))]
        if changed:
            self._release()
        for param, home, found in changed:
            take_values(param, home, _memory(found))
        for param, home, _ in astray:
            set_local(param.parameter, home)
        for param, held, attribute in self._places:
            if held.get(attribute) is not param.parameter:
                held[attribute] = param.parameter


def _is_in_functional_call() -> bool:
    """Whether torch.func.functional_call runs a module, which has other tensors for that long and gets its own back."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stateless._functional_call.__code__:
        frame = frame.f_back
    return frame is not None


def take_values(param: ShardedParam, home: Tensor, value: Tensor) -> None:
    """Give a parameter new values, and its master weights where it has some."""
    with torch.no_grad():
        home.copy_(value)
        if param.model_rows is not None:
            param.take_values()


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


def synchronise_values(
    model: nn.Module | None, parts: Sequence[tuple[dict[str, nn.Parameter], Groups]], sync_weights: str
) -> None:
    """Give all ranks of each group its rank 0's values, for the model's buffers too. Collective: one broadcast a
    tensor. `sync_weights`: "check" raises ValueError where ranks differ, "broadcast" warns; "none": nothing."""
    if sync_weights == "none":
        return
    tensors = [{name: local(parameter) for name, parameter in named.items()} for named, _ in parts]
    if model is not None:
        tensors[0] |= {name: local(x) for name, x in model.named_buffers() if x.numel() > 0}
    differing: list[str] = []
    for values, (_, groups) in zip(tensors, parts, strict=True):
        for comm in groups.everyone():
            for name, x in values.items():
                found = comm.broadcast(x, 0)
                if not _are_equal(found, x):
                    differing.append(name)
                if sync_weights == "broadcast":
                    x.copy_(found)
    for comm in [comm for _, groups in parts for comm in groups.everyone()]:
        differing = union(differing, comm)
    if differing:
        shown = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
        text = f"ranks that average gradients have different values of {shown}"
        if sync_weights == "check":
            raise ValueError(f"{text}: seed every rank alike before building the model, or load the same weights")
        warnings.warn(f"{text}: rank 0's are taken", stacklevel=5)


def cast_buffers(model: nn.Module | None, dtype: torch.dtype | None) -> None:
    """Give the floating-point buffers of a model a dtype; None: they keep theirs."""
    if model is None or dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, whatever the dtype: NaN is like NaN."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
