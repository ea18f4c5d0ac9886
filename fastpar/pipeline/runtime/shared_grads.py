"""Gradients of parameters that live on several ranks: tied embeddings, and the replicas of DualPipe.

Every rank that holds such a parameter sends what its own stages have added during the step to the other holders, and
all add the contributions in the order of ranks: the sums have the same bits everywhere, so equal weights stay equal
under equal optimizers. Contributions are taken apart from what `.grad` held before the step, so gradients may be
accumulated over several steps.

So that a norm over all stages counts such a parameter once, its tensors carry the attribute `pipeline_share`: (index,
count) where the holders are `count` ranks and this is the index'th, None for a further tensor on the same rank. So that
a checkpoint has a tied one under one name, as the whole model has, they carry that as `pipeline_tied_name`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.comm import PointToPoint
from fastpar.ops._autograd import own_grad, set_own_grad
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.pipeline.stages.stage import Stage, registered


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
        if own[0].requires_grad and (len(holders) > 1 or len(own) > 1):
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
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._ready: set[int] = set()  # parts whose backward has ended
        self._sent: set[tuple[int, ...]] = set()  # groups whose contributions are on their way

    def check_equal(self) -> None:
        """Compare the weights with the other holders'; ValueError names the first that differs."""
        for ranks, group in self._groups.items():
            sums = torch.stack([_fingerprint(own) for shared in group for own in shared.own[:1]])
            self._send(ranks, [sums], b"")
            for rank in ranks:
                if rank == self._rank:
                    continue
                (theirs,), _ = self._p2p.recv(rank, self._tag)
                for shared, equal in zip(group, (sums == theirs).all(1).tolist(), strict=True):
                    if not equal:
                        raise ValueError(
                            f"{shared.name} is shared by ranks {ranks}, but its weights differ between ranks "
                            f"{self._rank} and {rank}: start all ranks from the same weights"
                        )

    def begin(self) -> None:
        for own in (tensor for group in self._groups.values() for shared in group for tensor in shared.own):
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
        for ranks, group in self._groups.items():
            own = [_contribution(shared) for shared in group]
            parts = [own if rank == self._rank else self._receive(rank) for rank in ranks]
            for shared, contributions in zip(group, zip(*parts, strict=True), strict=True):
                self._store(shared, contributions)
        for state in (self._before, self._ready, self._sent):
            state.clear()

    def _send_own(self, ranks: tuple[int, ...], group: Sequence[SharedParameter]) -> None:
        own = [_contribution(shared) for shared in group]
        self._send(ranks, [t for t in own if t is not None], bytes(t is not None for t in own))
        self._sent.add(ranks)

    def _send(self, ranks: tuple[int, ...], tensors: list[Tensor], note: bytes) -> None:
        for peer in ranks:
            if peer != self._rank:
                self._p2p.send(peer, self._tag, tensors, note)

    def _receive(self, peer: int) -> list[Tensor | None]:
        tensors, note = self._p2p.recv(peer, self._tag)
        rest = iter(tensors)
        return [next(rest) if present else None for present in note]

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


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """Two sums that differ where the weights do, but for rare coincidences."""
    values = _local(parameter).detach().double().flatten()
    return torch.stack([values.sum(), (values * torch.arange(1, values.numel() + 1, device=values.device)).sum()]).cpu()
