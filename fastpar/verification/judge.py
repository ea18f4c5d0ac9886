"""Comparison of what ranks computed with the whole model, against the rounding that this has by itself.

    differs  where  rms(rank - truth) > allowed * rms(truth),   allowed = FACTOR * rounding + floor

The rounding of a tensor is the distance of the whole model in its own dtype from the truth: what is badly
conditioned gets a wide bound and everything else a narrow one. The floor, 2^-16 in float32, keeps tensors whose
rounding is small by chance.

Note: gradients that are parts. Between the copy that begins a tensor-parallel block and the sum that ends it, ranks
have parts of gradients, and heads that several ranks share have parts of theirs. There a sum over ranks that agrees is
right as well; everywhere else every rank must have the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastpar.verification.alignment import Alignment, Places
from fastpar.verification.grid_alignment import GridAlignment
from fastpar.verification.layout import ModuleHints
from fastpar.verification.pieces import Piece, take
from fastpar.verification.reference import WholeRun
from fastpar.verification.trace import BACKWARD, GRAD_OUTPUT, INPUT, OUTPUT, Key, StepTrace

FACTOR = 16.0
FORWARD_PHASE, LOSS_PHASE, BACKWARD_PHASE, NORM_PHASE, UPDATE_PHASE = range(5)


@dataclass
class RankStep:
    """Results of one rank in one step."""

    loss: float
    trace: StepTrace
    grads: list[Piece]
    updates: list[Piece]
    norm: float


@dataclass
class RankRecord:
    """Everything that one rank sends to the one that compares."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    microbatches: tuple[int, ...]  # of each call of a module, in their order
    hints: ModuleHints
    steps: list[RankStep] = field(default_factory=list)
    reseeded: StepTrace | None = None  # of a forward in which nothing random was switched off, seeded by rank
    positions: Tensor | None = None  # of this rank's tokens in the sequence; None: it has all of them


@dataclass(frozen=True)
class Check:
    """One comparison. error and rounding are relative to the truth; ranks are those that differ.

    phase, position  when it came about, in the reference
    """

    step: int
    phase: int
    position: float
    kind: str
    module: str
    parameter: str = ""
    status: str = "equal"  # "differs", "not compared"
    error: float = 0.0
    rounding: float = 0.0
    ranks: tuple[int, ...] = ()
    detail: str = ""

    @property
    def when(self) -> tuple[int, int, float]:
        return self.step, self.phase, self.position

    @property
    def differs(self) -> bool:
        return self.status == "differs"


@dataclass(frozen=True)
class _Bound:
    """Bounds of a difference: relative to the truth, and absolutely; and whether ranks may have parts of a sum."""

    allowed: float
    floor: float
    is_backward: bool = False
    in_block: bool = False


@dataclass
class _Outcome:
    """The worst of several comparisons: how far beyond what is allowed, on which ranks, and a word on it."""

    excess: float = 0.0
    error: float = 0.0
    ranks: set[int] = field(default_factory=set)
    detail: str = ""

    def add(self, error: float, scale: float, bound: _Bound, rank: int) -> None:
        limit = bound.allowed * scale + bound.floor
        excess = 0.0 if error == 0 else error / limit if limit > 0 else math.inf
        self.error = max(self.error, error / scale if scale > 0 else (math.inf if error > 0 else 0.0))
        self.excess = max(self.excess, excess)
        if excess > 1:
            self.ranks.add(rank)

    def merge(self, other: _Outcome) -> None:
        self.excess, self.error = max(self.excess, other.excess), max(self.error, other.error)
        self.ranks |= other.ranks
        self.detail = self.detail or other.detail

    def check(
        self,
        step: int,
        phase: int,
        position: float,
        kind: str,
        module: str,
        rounding: float,
        parameter: str = "",
        detail: str = "",
    ) -> Check:
        status, ranks = ("differs" if self.ranks else "equal"), tuple(sorted(self.ranks))
        return Check(step, phase, position, kind, module, parameter, status, self.error, rounding, ranks, detail)


class Judge:
    """Compares the records of all ranks with the whole model."""

    def __init__(
        self,
        truth: WholeRun,
        native: WholeRun,
        records: Sequence[RankRecord],
        *,
        dp: int,
        microbatches: int,
        tokens: tuple[int, int] | None,
    ) -> None:
        self.truth, self.native, self.records = truth, native, records
        self._dp, self._microbatches, self._tokens = dp, microbatches, tokens
        dtype = native.dtype
        self._eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        self._floor = max(2.0**-16, 4 * self._eps)
        self.notes: list[str] = []

    def checks(self) -> list[Check]:
        """All comparisons, in the order in which the reference computed what is compared."""
        found: list[Check] = []
        for step in range(len(self.truth.steps)):
            order = self.truth.order(step)
            scale = self._gradient_scale(step)
            events = [
                self._event(step, (path, kind), call, position, scale) for (path, kind, call), position in order.items()
            ]
            found += _without_unread([check for check in events if check is not None])
            found += self._loss(step)
            found += self._gradients(step, order, scale)
            found += self._norm(step)
            found += self._updates(step)
        return sorted([*found, *self._reseeded()], key=lambda check: check.when)

    # ---- inputs and outputs of modules

    def _event(self, step: int, key: Key, call: int, position: int, gradient_scale: float) -> Check | None:
        path, kind = key
        is_backward = kind in BACKWARD
        if not path and kind != OUTPUT and not is_backward:
            return None  # the batch itself
        rounding = self._event_rounding(step, key, call)
        total, reason, is_compared = _Outcome(), "", False
        floor = 8 * self._eps * gradient_scale if is_backward else 0.0
        for records in self._groups(step, key):
            in_block = records[0].hints.may_be_parts(path)
            bound = _Bound(FACTOR * rounding + self._floor, floor, is_backward, in_block)
            outcome = self._group_event(step, key, call, records, bound)
            if isinstance(outcome, str):
                reason = outcome
            else:
                is_compared = True
                total.merge(outcome)
        if not is_compared and not reason:
            return None
        phase = BACKWARD_PHASE if is_backward else FORWARD_PHASE
        status = "differs" if total.ranks else "equal" if is_compared else "not compared"
        ranks = tuple(sorted(total.ranks))
        detail = reason or total.detail
        return Check(step, phase, position, kind, path, "", status, total.error, rounding, ranks, detail)

    def _groups(self, step: int, key: Key) -> Iterator[list[RankRecord]]:
        """Ranks that have the key, by stage, part of the batch and of the sequence, in the order of their
        tensor-parallel ranks."""
        found: dict[tuple[int, int, int], list[RankRecord]] = {}
        for record in self.records:
            if record.steps[step].trace.events.get(key):
                found.setdefault((record.pp, record.dp, record.cp), []).append(record)
        for records in found.values():
            yield sorted(records, key=lambda record: record.tp)

    def _group_event(self, step: int, key: Key, call: int, records: list[RankRecord], bound: _Bound) -> _Outcome | str:
        """The outcome for one tensor-parallel group and all microbatches; a reason where it cannot be compared."""
        path, kind = key
        first = records[0].dp * self._microbatches
        per_part = self.truth.steps[step].traces[first].counts.get(path, 0)
        counts = [record.steps[step].trace.counts.get(path, 0) for record in records]
        if any(count != per_part * self._microbatches for count in counts):
            return f"called {counts[0]} times, in the whole model {per_part * self._microbatches} times"
        factor = float(self._microbatches) if bound.is_backward else 1.0  # a pipeline averages over them
        positions = records[0].positions
        alignment: Alignment | GridAlignment = Alignment(records[0].hints, _tokens_here(self._tokens, positions))
        if records[0].hints.grid:
            alignment = GridAlignment([record.hints for record in records], self._tokens)
        is_output = kind in (OUTPUT, GRAD_OUTPUT)
        total = _Outcome()
        for number, microbatch in enumerate(records[0].microbatches):
            found = [record.steps[step].trace.tensors(key, number * per_part + call) for record in records]
            wholes = self.truth.steps[step].traces[first + microbatch].tensors(key, call)
            if any(tensors.keys() != wholes.keys() for tensors in found):
                return "other tensors than in the whole model"
            for index, whole in wholes.items():
                if not path and whole.dim() == 0:
                    continue  # the loss, which is compared as such
                locals_ = [tensors[index].to(whole.dtype) * factor for tensors in found]
                best: _Outcome | None = None
                ranks = [record.rank for record in records]
                for cut in _cuts(whole, positions, self._tokens):
                    for places in alignment.places(path, is_output, cut, locals_):
                        is_sum = bound.is_backward and (bound.in_block or alignment.may_be_parts(places))
                        for outcome in _placed(cut, locals_, places, ranks, bound, is_sum):
                            if best is None or outcome.excess < best.excess:
                                best = outcome
                if best is None and key == ("", OUTPUT):  # what the model's caller gets
                    best = _Outcome(math.inf, math.inf, {record.rank for record in records})
                    best.detail = f"the caller gets {tuple(locals_[0].shape)}, a part of {tuple(whole.shape)}"
                if best is None:
                    return f"{tuple(locals_[0].shape)} is no part of {tuple(whole.shape)} that is known"
                total.merge(best)
        return total

    def _event_rounding(self, step: int, key: Key, call: int) -> float:
        """Relative, the largest of all parts of the batch."""
        worst = 0.0
        pairs = zip(self.truth.steps[step].traces, self.native.steps[step].traces, strict=True)
        for truth, native in pairs:
            rounded = native.tensors(key, call)
            for index, x in truth.tensors(key, call).items():
                if index in rounded and rounded[index].shape == x.shape:  # rounding may send tokens to other experts
                    worst = max(worst, _relative(_rms(rounded[index].to(x.dtype) - x), _rms(x)))
        return worst

    def _reseeded(self) -> list[Check]:
        """Ranks of a tensor-parallel group must hold alike what they hold whole, also where their seeds differ."""
        found = []
        for (path, kind, call), position in self.truth.order(0).items():
            if kind in BACKWARD:
                continue
            outcome, is_compared = _Outcome(), False
            for records in self._groups(0, (path, kind)):
                whole = self.truth.steps[0].traces[records[0].dp].tensors((path, kind), call)
                held = [r.reseeded.tensors((path, kind), call) for r in records if r.reseeded is not None]
                if len(held) < 2 or records[0].hints.may_be_parts(path):
                    continue
                for index, x in whole.items():
                    if all(index in tensors and tensors[index].shape == x.shape for tensors in held):
                        is_compared = True
                        first = held[0][index].double()
                        for record, tensors in zip(records, held, strict=True):
                            error = _rms(tensors[index].double() - first)
                            outcome.add(error, _rms(first), _Bound(self._floor, 0.0), record.rank)
            if is_compared:
                detail = "ranks that hold the same otherwise differ here once their seeds do" if outcome.ranks else ""
                step = len(self.truth.steps)
                found.append(outcome.check(step, FORWARD_PHASE, position, kind, path, 0.0, detail=detail))
        return _without_unread(found)

    # ---- losses, gradients, norms, updates

    def _loss(self, step: int) -> list[Check]:
        whole, native = self.truth.steps[step].losses, self.native.steps[step].losses
        outcome, rounding = _Outcome(), 0.0
        details = []
        for record in self.records:
            own = slice(record.dp * self._microbatches, (record.dp + 1) * self._microbatches)
            wanted, rounded = _mean(whole[own]), _mean(native[own])
            here = _relative(abs(rounded - wanted), abs(wanted))
            rounding = max(rounding, here)
            loss = record.steps[step].loss
            error = abs(loss - wanted) if math.isfinite(loss) else math.inf
            outcome.add(error, abs(wanted), _Bound(FACTOR * here + self._floor, 0.0), record.rank)
            if record.rank in outcome.ranks:
                details.append(f"{loss:.6g} on rank {record.rank}, whole {wanted:.6g}")
        detail = "; ".join(details[:2])
        return [outcome.check(step, LOSS_PHASE, 0, "loss", "", rounding, detail=detail)]

    def _gradient_scale(self, step: int) -> float:
        grads = [grad for grad in self.truth.steps[step].grads.values() if grad is not None and grad.numel()]
        count = sum(grad.numel() for grad in grads)
        return (sum(float(grad.double().square().sum()) for grad in grads) / count) ** 0.5 if count else 0.0

    def _gradients(self, step: int, order: dict[tuple[str, str, int], int], scale: float) -> list[Check]:
        """At the place of the module that has the parameter: after the gradients of its outputs."""
        last = {path: position for (path, kind, _), position in order.items() if kind == GRAD_OUTPUT}
        truth, native = self.truth.steps[step], self.native.steps[step]
        pieces = self._pieces([(record, record.steps[step].grads) for record in self.records])
        found = []
        for name, whole in truth.grads.items():
            if whole is None:
                continue
            rounded = native.grads.get(name)
            rounding = 0.0 if rounded is None else _relative(_rms(rounded.to(whole.dtype) - whole), _rms(whole))
            outcome, detail = self._parameter(whole, pieces.get(name, []), rounding, 8 * self._eps * scale)
            module = name.rpartition(".")[0]
            position = last.get(module, len(order)) + 0.5
            found.append(outcome.check(step, BACKWARD_PHASE, position, "gradient", module, rounding, name, detail))
        return found

    def _updates(self, step: int) -> list[Check]:
        truth, native = self.truth.steps[step], self.native.steps[step]
        pieces = self._pieces([(record, record.steps[step].updates) for record in self.records])
        found = []
        for position, (name, whole) in enumerate(truth.updates.items()):
            rounding = _relative(_rms(native.updates[name].to(whole.dtype) - whole), _rms(whole))
            floor = 4 * self._eps * truth.scales[name]  # an update is a difference of two rounded values
            outcome, detail = self._parameter(whole, pieces.get(name, []), rounding, floor)
            module = name.rpartition(".")[0]
            found.append(outcome.check(step, UPDATE_PHASE, position, "update", module, rounding, name, detail))
        return found

    def _pieces(self, by_record: list[tuple[RankRecord, list[Piece]]]) -> dict[str, list[tuple[int, Piece]]]:
        found: dict[str, list[tuple[int, Piece]]] = {}
        for record, pieces in by_record:
            for piece in pieces:
                found.setdefault(self.truth.names.get(piece.name, piece.name), []).append((record.rank, piece))
        return found

    def _parameter(
        self, whole: Tensor, pieces: list[tuple[int, Piece]], rounding: float, floor: float
    ) -> tuple[_Outcome, str]:
        """Every rank's piece, and that together they are the whole. A piece that is not there counts as zero."""
        outcome, bound = _Outcome(), _Bound(FACTOR * rounding + self._floor, floor)
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for rank, piece in pieces:
            wanted = take(whole, piece.index)
            if piece.value is None or not wanted.numel():
                continue
            if piece.value.shape != wanted.shape:
                outcome.add(math.inf, 1.0, bound, rank)
                return outcome, f"rank {rank} has {tuple(piece.value.shape)}, not {tuple(wanted.shape)}"
            _mark(covered, piece.index)
            error = _rms(piece.value.to(whole.dtype) - wanted)
            outcome.add(error, max(_rms(wanted), _rms(whole)), bound, rank)
        missing = whole[~covered]
        if missing.numel():
            before = len(outcome.ranks)
            outcome.add(_rms(missing), _rms(whole), bound, pieces[0][0] if pieces else 0)
            if len(outcome.ranks) > before:
                outcome.ranks |= {rank for rank, _ in pieces}
                return outcome, f"no rank has {missing.numel()} of its {whole.numel()} elements"
        return outcome, ""

    def _norm(self, step: int) -> list[Check]:
        wanted, rounded = self.truth.steps[step].norm, self.native.steps[step].norm
        rounding = _relative(abs(rounded - wanted), wanted)
        outcome = _Outcome()
        for record in self.records:
            norm = record.steps[step].norm
            error = abs(norm - wanted) if math.isfinite(norm) else math.inf
            outcome.add(error, wanted, _Bound(FACTOR * rounding + self._floor, 0.0), record.rank)
        norms = ", ".join(f"{record.steps[step].norm:.6g}" for record in self.records)
        detail = f"{norms} by rank, whole {wanted:.6g}" if outcome.ranks else ""
        return [outcome.check(step, NORM_PHASE, 0, "gradient norm", "", rounding, detail=detail)]


def _placed(
    whole: Tensor, locals_: list[Tensor], places: Places, ranks: list[int], bound: _Bound, may_be_summed: bool
) -> Iterator[_Outcome]:
    """Each rank for itself; where gradients may be parts, also their sum."""
    alone = _Outcome()
    for local, index, rank in zip(locals_, places, ranks, strict=True):
        wanted = take(whole, index)
        alone.add(_rms(local - wanted), max(_rms(wanted), _rms(whole)), bound, rank)
    yield alone
    if len(locals_) > 1 and alone.excess > 1 and may_be_summed:
        total = torch.zeros_like(whole)
        for local, index in zip(locals_, places, strict=True):
            _add(total, index, local)
        summed = _Outcome()
        for rank in ranks:
            summed.add(_rms(total - whole), _rms(whole), bound, rank)
        yield summed


def _tokens_here(tokens: tuple[int, int] | None, positions: Tensor | None) -> tuple[int, int] | None:
    return tokens if tokens is None or positions is None else (tokens[0], len(positions))


def _cuts(whole: Tensor, positions: Tensor | None, tokens: tuple[int, int] | None) -> Iterator[Tensor]:
    """What a rank with some tokens of each sequence may have of a tensor: along any dim that is as long, or along one
    of flattened tokens; and all of what has no tokens."""
    if positions is not None and tokens is not None:
        rows, length = tokens
        for dim in (d for d in range(whole.dim()) if whole.size(d) == length):
            cut = whole.index_select(dim, positions)
            yield cut
            if dim and whole.size(0) == 1 != rows:  # of positions that count from 0, and shard gives each row its own
                yield cut.expand(rows, *cut.shape[1:])
        if whole.dim() and whole.size(0) == rows * length:
            yield whole.index_select(0, (torch.arange(rows)[:, None] * length + positions).flatten())
    yield whole


def _without_unread(checks: list[Check]) -> list[Check]:
    """An input that differs does not count where the output agrees: what is read of it is not its values (rotary
    tables take its dtype and device, on a pipeline's later stages those of other tensors).
    """
    agree = {check.module for check in checks if check.kind == OUTPUT and check.status == "equal"}
    return [
        replace(check, status="not compared", detail="differs, but the output agrees", ranks=())
        if check.differs and check.kind == INPUT and check.module in agree
        else check
        for check in checks
    ]


def _rms(x: Tensor) -> float:
    """Root of the mean square; infinite where something is not finite."""
    if not x.numel():
        return 0.0
    value = float(torch.view_as_real(x).double().square().mean() if x.is_complex() else x.double().square().mean())
    return value**0.5 if math.isfinite(value) else math.inf


def _relative(error: float, scale: float) -> float:
    return error / scale if scale > 0 and math.isfinite(error) else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _add(total: Tensor, index: tuple[Tensor | None, ...], local: Tensor) -> None:
    """Add to the elements of an index, in which none is twice."""
    total[_elements(total, index)] += local


def _mark(covered: Tensor, index: tuple[Tensor | None, ...]) -> None:
    covered[_elements(covered, index)] = True


def _elements(whole: Tensor, index: tuple[Tensor | None, ...]) -> Any:
    rows = [torch.arange(size) if rows is None else rows for size, rows in zip(whole.shape, index, strict=True)]
    return torch.meshgrid(*rows, indexing="ij") if rows else ()
