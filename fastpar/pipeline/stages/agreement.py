"""What the ranks of a pipeline must have in common: the model before it was cut, the schedule, and every batch.

A rank that works on another batch, or holds layers of another model, fails nowhere: the loss belongs to no model at
all. So ranks compare what they were made of when the pipeline is made, and what they were called with: whether every
rank can go on, before each run, and checksums of the batch in the first runs and from time to time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm import PointToPoint
from fastpar.comm.plain_data import decode, encode
from fastpar.pipeline.runtime.grad_scale import compare_factors
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.pipeline.stages.batch import Microbatches
from fastpar.pipeline.stages.calling import Keywords
from fastpar.pipeline.stages.stage import Stage

_TAG = 2**61  # above those of any schedule, so that ranks with different schedules can tell each other
_EVERY = 64  # runs between two comparisons of the batches, after the first ones
_FIRST = 3


class StageAgreement:
    """Exchanges notes between all ranks of a pipeline."""

    def __init__(self, p2p: PointToPoint) -> None:
        self._p2p = p2p
        self._runs = 0

    @property
    def is_first_or_one_in_many(self) -> bool:
        """Whether the run that has begun last is one whose batches are compared."""
        return self._runs <= _FIRST or (self._runs - 1) % _EVERY == 0

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all ranks, in their order."""
        others = [rank for rank in range(self._p2p.size) if rank != self._p2p.rank]
        note = encode(value)
        for peer in others:
            self._p2p.send(peer, _TAG, [], note)
        received = {peer: decode(self._p2p.recv(peer, _TAG)[1]) for peer in others}
        return [received.get(rank, value) for rank in range(self._p2p.size)]

    def meet(self, schedule: Schedule, stages: Iterable[Stage], options: str) -> list[Keywords]:
        """Compare what the pipeline is made of; returns the keywords that stages take, over all ranks.

        Raises ValueError on every rank for schedules, options or whole models that differ.
        """
        own = list(stages)
        note = {
            "schedule": [schedule.name, schedule.num_microbatches, _digest(schedule)],
            "options": options,
            "weights": dict(own[0].fingerprint) if own else {},
            "keywords": [(sorted(s.keywords.names), s.keywords.takes_any, sorted(s.keywords.withheld)) for s in own],
        }
        notes = self.gather(note)
        first = notes[0]
        for rank, other in enumerate(notes):
            if other["schedule"] != first["schedule"]:
                raise ValueError(
                    f"the ranks of the pipeline have different schedules: {_described(first)} on rank 0, "
                    f"{_described(other)} on rank {rank}. Make it with the same arguments (num_microbatches, "
                    "schedule_options) on every rank"
                )
            if other["options"] != first["options"]:
                raise ValueError(
                    f"the ranks of the pipeline have different options: {first['options']} on rank 0, "
                    f"{other['options']} on rank {rank}"
                )
            _compare_weights(first["weights"], other["weights"], rank)
        return [
            Keywords(frozenset(names), takes_any, frozenset(withheld))
            for each in notes
            for names, takes_any, withheld in each["keywords"]
        ]

    def begin_run(
        self, error: Exception | None, batch: Callable[[], Mapping[str, Any]], factor: float | None = None
    ) -> None:
        """Before a run: raises on every rank what is wrong on one, and ValueError where the batches differ.

        error   what is wrong with this rank's arguments
        batch   `summary` of what it was called with; asked in the first runs and from time to time
        factor  what the gradients of the last run were scaled by (`GradScale.take`)
        """
        self._runs += 1
        compares = self.is_first_or_one_in_many
        text = "" if error is None else f"{type(error).__name__}: {error}"
        notes = self.gather([text, dict(batch()) if compares and error is None else {}, factor])
        if error is not None:
            raise error
        for rank, (theirs, *_) in enumerate(notes):
            if theirs:
                raise ValueError(f"rank {rank} of the pipeline cannot run this batch: {theirs}")
        _compare_batches([found for _, found, _ in notes])
        compare_factors([each for *_, each in notes])


def summary(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """The shapes of all tensors by name, and a checksum of those of integers."""
    found: dict[str, Any] = {}
    for index, value in enumerate(args):
        _summarise(found, f"input {index}", value)
    for name, value in kwargs.items():
        _summarise(found, name, value)
    _summarise(found, "target", target)
    return found


def fingerprint(model: nn.Module) -> dict[str, int]:
    """A checksum of every parameter by name; none on the meta device."""
    return {name: checksum(p.detach()) for name, p in model.named_parameters() if not p.is_meta and _is_plain(p)}


def checksum(tensor: Tensor) -> int:
    """The wrap-around sum of the tensor's words as integers: exact, so equal tensors have equal sums."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return int(words.sum(dtype=torch.int64))


def _ordered_checksum(tensor: Tensor) -> int:
    """One that also differs where rows are in another order."""
    flat = tensor.to(torch.int64).flatten()
    return int((flat * torch.arange(1, flat.numel() + 1, device=flat.device)).sum())


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _summarise(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        is_compared = not (value.is_floating_point() or value.is_complex() or value.is_meta) and _is_plain(value)
        found[name] = [list(value.shape), _ordered_checksum(value) if is_compared else 0]
    elif isinstance(value, Microbatches | tuple | list):
        for index, item in enumerate(value):
            _summarise(found, f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _summarise(found, f"{name}[{key!r}]", item)


def _compare_batches(batches: Sequence[Mapping[str, Any]]) -> None:
    seen: dict[str, tuple[int, Any]] = {}
    for rank, batch in enumerate(batches):
        for name, value in batch.items():
            first, known = seen.setdefault(name, (rank, value))
            if known == value:
                continue
            what = f"shape {known[0]} and {value[0]}" if known[0] != value[0] else "other numbers of the same shape"
            raise ValueError(
                f"the ranks of the pipeline got different batches: {name} differs between rank {first} and rank "
                f"{rank} ({what}). Ranks that differ in their pipeline coordinate only work on one batch: give them "
                "the same (seed the sampler by the data-parallel rank, not by the global one)"
            )


def _compare_weights(first: Mapping[str, int], other: Mapping[str, int], rank: int) -> None:
    names = [*first, *(name for name in other if name not in first)]
    wrong = [name for name in names if first.get(name) != other.get(name)]
    if wrong and first and other:
        raise ValueError(
            f"{wrong[0]} differs between ranks 0 and {rank} of the pipeline ({len(wrong)} of {len(names)} parameters "
            "do), before the model was cut: every rank builds the same model. Seed every rank alike before building "
            'it, or pass sync_weights="none" if parts are to be loaded later'
        )


def _digest(schedule: Schedule) -> str:
    text = f"{schedule.stage_ranks} {schedule.chains} {schedule.to_csv()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(note: Mapping[str, Any]) -> str:
    name, count, digest = note["schedule"]
    return f"{name!r} with {count} microbatches ({digest})"
