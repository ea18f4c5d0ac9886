"""Gradients of parameters that live on several ranks: tied embeddings, and the replicas of DualPipe.

Every rank that holds such a parameter sends what its own stages have added during the step to the other holders, and
all add the contributions in the order of ranks: the sums have the same bits everywhere, so equal weights stay equal
under equal optimizers. Contributions are taken apart from what `.grad` held before the step, so gradients may be
accumulated over several steps.

In one process a tied weight is one object: frozen or written to by one name, it is so by all. Here users have to do it
on every rank that holds it, and what goes with the gradients tells the others: whether it is trained, and whether it
was written to otherwise than before. Copies that are frozen on some ranks only are an error on all of them. After
unusual writes, in the first runs and from time to time the copies are compared: optimizers may have them in groups with
other options, where names differ, and ZeRO writes what torch does not count.

So that a norm over all stages counts such a parameter once, its tensors carry the attribute `pipeline_share`: (index,
count) where the holders are `count` ranks and this is the index'th, None for a further tensor on the same rank. So that
a checkpoint has a tied one under one name, as the whole model has, they carry that as `pipeline_tied_name`, and further
tensors on a rank the first one as `pipeline_copy_of`. What the
pipeline adds to gradients beside autograd, which whoever reduces them during backward would miss, is marked by
`pipeline_adds_grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.comm import PointToPoint
from fastpar.ops._autograd import own_grad, set_own_grad
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.pipeline.stages.stage import Stage, registered

_EVERY = 64  # runs between two comparisons of weights, after the first ones
_FIRST = 3
_CHUNK = 1 << 20  # elements of a fingerprint that are float64 at a time
_MUST_BE_ALIKE = (
    "what is written to one has to be written to all of them, and all must have the same options in the optimizers' "
    "param_groups: names of tied weights differ from rank to rank, and a second copy on one ends in @part"
)


@dataclass(frozen=True)
class SharedParameter:
    """A parameter with holders on several ranks, or twice on one.

    name   for messages
    parts  the parts of the model on this rank that hold it
    ranks  all ranks that hold it, ascending
    own    this rank's tensors; usually one
    """

    name: str
    parts: tuple[int, ...]
    ranks: tuple[int, ...]
    own: tuple[nn.Parameter, ...]


def find_shared(schedule: Schedule, rank: int, stages: Mapping[int, Stage]) -> list[SharedParameter]:
    """The parameters that this rank's stages share with others: tied ones, and all of a stage with replicas."""
    found: dict[str, SharedParameter] = {}
    seen: set[nn.Parameter] = set()
    by_part = {stage.part: stage for stage in stages.values()}  # a rank holds no part twice

    def add(name: str, names: Mapping[int, str]) -> None:
        """names: part -> what the part calls it"""
        holders = {schedule.stage_ranks[s] for part in names for s in schedule.replicas_of(part)}
        parts = tuple(part for part in sorted(names) if part in by_part)
        own = tuple(dict.fromkeys(registered(by_part[part].module, names[part]) for part in parts))
        seen.update(own)
        if len(holders) > 1 or len(own) > 1:  # frozen ones, too: they may be trained later
            found[name] = SharedParameter(name, parts, tuple(sorted(holders)), own)

    for stage in by_part.values():
        for tied in stage.tied:
            add(str(tied), {part: names[0] for part, names in tied.names.items()})
            if stage.part in tied.names:
                vars(tied.parameter(stage))["pipeline_tied_name"] = tied.names[tied.parts[0]][0]
    for part, stage in by_part.items():
        if len(schedule.replicas_of(part)) > 1:
            for name, parameter in stage.module.named_parameters():
                if parameter not in seen:
                    add(f"{name} of part {part}", {part: name})
    return sorted(found.values(), key=lambda shared: (shared.ranks, shared.name))


class _State(IntFlag):
    """What a rank says of a shared parameter, beside its contribution. Of several tensors here: of any."""

    HAS_GRAD = 1
    IS_TRAINED = 2
    IS_FROZEN = 4
    IS_WRITTEN = 8


class SharedGrads:
    """Sums the gradients of shared parameters over their holders, once a step.

    shared.begin()            before the first backward: sets aside what was accumulated earlier
    shared.contribute(part)   the part's backward has ended: send what can be sent, without waiting
    shared.finish()           after the last backward: receive and add
    """

    def __init__(self, parameters: Sequence[SharedParameter], rank: int, p2p: PointToPoint, tag: int) -> None:
        """parameters: all that this rank holds, in one order on all ranks. tag: reserved for these messages."""
        self._rank, self._p2p, self._tag = rank, p2p, tag
        self._groups: dict[tuple[int, ...], list[SharedParameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.ranks, []).append(parameter)
            for i, own in enumerate(parameter.own):
                share = (parameter.ranks.index(rank), len(parameter.ranks)) if i == 0 else None
                own.pipeline_share = share  # type: ignore[attr-defined]
                own.pipeline_adds_grad = True  # type: ignore[attr-defined]
                if i > 0:
                    own.pipeline_copy_of = parameter.own[0]  # type: ignore[attr-defined]
        self._runs = 0
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._ready: set[int] = set()  # parts whose backward has ended
        self._sent: set[tuple[int, ...]] = set()  # groups whose contributions are on their way
        # Writes to each since the last run, the number that is usual (an optimizer's step), and all there were.
        self._writes = {own: (0, 0, _count_writes(own)) for own in self._tensors()}

    def check_equal(self) -> None:
        """Compare the weights with the other holders'; ValueError names the first that differs."""
        for ranks, group in self._groups.items():
            self._check_equal(ranks, group, "start all ranks from the same weights")

    def _check_equal(self, ranks: tuple[int, ...], group: Sequence[SharedParameter], advice: str) -> None:
        sums = torch.stack([_fingerprint(shared.own) for shared in group])
        self._send(ranks, [sums], b"")
        received = {rank: self._p2p.recv(rank, self._tag)[0][0] for rank in ranks if rank != self._rank}
        for rank, theirs in {**received, self._rank: sums}.items():
            for shared, mine, other in zip(group, sums.tolist(), theirs.tolist(), strict=True):
                if mine[:-1] != other[:-1] or other[-1]:
                    where = f"between ranks {self._rank} and {rank}" if mine[:-1] != other[:-1] else f"on rank {rank}"
                    raise ValueError(
                        f"{shared.name} is shared by ranks {ranks}, but its weights differ {where}: {advice}"
                    )

    def _tensors(self) -> Iterator[nn.Parameter]:
        return (tensor for group in self._groups.values() for shared in group for tensor in shared.own)

    def begin(self) -> None:
        for own in self._tensors():
            now = _count_writes(own)
            last, usual, before = self._writes[own]
            self._writes[own] = (now - before, last or usual, now)
            self._before[own] = own_grad(own)
            set_own_grad(own, None)

    def contribute(self, part: int) -> None:
        self._ready.add(part)
        for ranks, group in self._groups.items():
            if ranks not in self._sent and all(self._ready.issuperset(shared.parts) for shared in group):
                self._send_own(ranks, group)

    def finish(self) -> None:
        for ranks, group in self._groups.items():
            if ranks not in self._sent:
                self._send_own(ranks, group)
        is_due = self._runs > 0 and (self._runs < _FIRST or self._runs % _EVERY == 0)
        self._runs += 1
        to_compare = []
        for ranks, group in self._groups.items():
            own = [_contribution(shared) for shared in group], self._states(group)
            parts, states = zip(*(own if rank == self._rank else self._receive(rank) for rank in ranks), strict=True)
            for shared, contributions in zip(group, zip(*parts, strict=True), strict=True):
                self._store(shared, contributions)
            said = [functools.reduce(or_, each) for each in zip(*states, strict=True)]
            to_compare.append((ranks, group, said))
        for ranks, group, said in to_compare:  # when all contributions have arrived, which come by the same way
            for shared, state in zip(group, said, strict=True):
                if _State.IS_TRAINED | _State.IS_FROZEN in state:
                    raise ValueError(
                        f"{shared.name} is shared by ranks {ranks}, and frozen in some of the places that hold it: "
                        "set requires_grad of every one, on all of these ranks"
                    )
            if is_due or any(_State.IS_WRITTEN in state for state in said):
                self._check_equal(ranks, group, _MUST_BE_ALIKE)
        for state in (self._before, self._ready, self._sent):
            state.clear()

    def _send_own(self, ranks: tuple[int, ...], group: Sequence[SharedParameter]) -> None:
        own = [_contribution(shared) for shared in group]
        self._send(ranks, [t for t in own if t is not None], bytes(self._states(group)))
        self._sent.add(ranks)

    def _send(self, ranks: tuple[int, ...], tensors: list[Tensor], note: bytes) -> None:
        for peer in ranks:
            if peer != self._rank:
                self._p2p.send(peer, self._tag, tensors, note)

    def _receive(self, peer: int) -> tuple[list[Tensor | None], list[_State]]:
        tensors, note = self._p2p.recv(peer, self._tag)
        rest, states = iter(tensors), [_State(each) for each in note]
        return [next(rest) if _State.HAS_GRAD in state else None for state in states], states

    def _states(self, group: Sequence[SharedParameter]) -> list[_State]:
        return [functools.reduce(or_, map(self._state, shared.own)) for shared in group]

    def _state(self, own: nn.Parameter) -> _State:
        writes, usual, _ = self._writes[own]
        state = _State.IS_TRAINED if own.requires_grad else _State.IS_FROZEN
        state |= _State.IS_WRITTEN if writes not in (0, usual) else _State(0)
        return state | (_State(0) if own_grad(own) is None else _State.HAS_GRAD)

    def _store(self, shared: SharedParameter, contributions: Sequence[Tensor | None]) -> None:
        present = [tensor for tensor in contributions if tensor is not None]
        for own in shared.own:
            before = self._before[own]
            if not present:
                set_own_grad(own, before)
                continue
            total = present[0].clone()
            for tensor in present[1:]:
                total += tensor
            if isinstance(own, DTensor):
                total = DTensor.from_local(
                    total, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
                )
            set_own_grad(own, total if before is None else before.add_(total))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _contribution(shared: SharedParameter) -> Tensor | None:
    """What this rank's stages have added, as a plain tensor."""
    grads = [_local(grad) for own in shared.own if (grad := own_grad(own)) is not None]
    return sum(grads[1:], grads[0]) if grads else None


def _fingerprint(own: Sequence[nn.Parameter]) -> Tensor:
    """The bits of two sums that differ where the weights do, but for rare coincidences; and whether those of the
    tensors here differ."""
    sums = []
    for parameter in own:
        total = torch.zeros(2, dtype=torch.float64, device=parameter.device)
        for index, chunk in enumerate(_local(parameter).detach().flatten().split(_CHUNK)):
            values, first = chunk.double(), 1 + index * _CHUNK
            places = torch.arange(first, first + len(values), dtype=torch.float64, device=values.device)
            total += torch.stack([values.sum(), (values * places).sum()])
        sums.append(total.cpu().view(torch.int64))  # NaN is like itself
    differ = torch.tensor([any(not torch.equal(each, sums[0]) for each in sums[1:])], dtype=torch.int64, device="cpu")
    return torch.cat([sums[0], differ])


def _count_writes(parameter: Any) -> int:
    """In place, as far as torch counts them: those of a DTensor to itself or to its part."""
    inner = parameter._local_tensor._version if isinstance(parameter, DTensor) else 0
    return int(parameter._version + inner)
