"""A pipeline run in numbers: the judge of the validator's tests, which shares nothing with the validator.

`execute` runs a schedule with explicit state, as a runtime would: which activations exist, which messages are in
flight, which weights are kept. Part k of the model computes

    forward   y  = w * x + k          x: the sum of what arrives (microbatch + 1 at the first part)
    input     gx = w * gy             gy: the sum of what comes back (1 at the last part)
    weight    gw = x * gy             STEP: w -= sum of gw

modulo a prime, and in the end every result must be that of a sequential run with the same weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fastpar.pipeline import Action, ActionType, Schedule

T = ActionType
PRIME = 1_000_003


class Wrong(Exception):
    """The run fails, or its results are wrong."""


@dataclass
class Saved:
    """What a forward keeps for its backward."""

    x: int
    version: int
    gy: int | None = None


@dataclass
class Weights:
    """One stage's weights and gradients."""

    history: list[int]
    kept: dict[int, int] = field(default_factory=dict)
    gradients: list[tuple[int, int]] = field(default_factory=list)  # (microbatch, gw) since the last STEP
    updates: list[list[tuple[int, int]]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)  # own sum at each REDUCE_GRAD that is done
    waiting: bool = False  # at the next one
    reduced: bool = False
    gathered: bool = False


class Run:
    def __init__(self, schedule: Schedule, edges: Collection[tuple[int, int]], limit: int | None, until: str) -> None:
        self.schedule, self.limit, self.until = schedule, limit, until
        chain_edges = [
            (a, b) for chain in schedule.chains for a, b in zip(chain.stages, chain.stages[1:], strict=False)
        ]
        self.edges = chain_edges + [(c.stages[i], c.stages[j]) for c in schedule.chains for i, j in edges]
        self.transfers = schedule.has_transfers
        self.saved: dict[tuple[int, int], Saved] = {}
        self.outputs: dict[tuple[int, int], int] = {}
        self.input_gradients: dict[tuple[int, int], int] = {}
        self.flying: dict[tuple[str, int, int, int], int] = {}  # "F" or "B", from, to, microbatch
        self.landed: dict[tuple[str, int, int, int], int] = {}
        self.weight_gradients: dict[tuple[int, int], int] = {}
        self.weights = [Weights([schedule.part_of(s) + 2]) for s in range(schedule.num_stages)]
        flat = [a for rank in range(schedule.num_ranks) for a in schedule.flat(rank)]
        self.shards = {a.stage for a in flat if a.type in (T.UNSHARD, T.RESHARD)}
        self.reduces = any(a.type is T.REDUCE_GRAD for a in flat)
        self.in_order = True

    # One action: returns False if it has to wait

    def try_action(self, rank: int, action: Action) -> bool:
        parts = action.flat()
        inputs = [self.gather(rank, part) for part in parts]
        if any(values is None for values in inputs):
            return False
        forwards = [part for part in parts if part.type is T.FORWARD]
        held = sum(self.schedule.stage_ranks[stage] == rank for stage, _ in self.held()) + len(forwards)
        if self.limit is not None and forwards and held > self.limit:
            raise Wrong("out of memory")
        for part, values in zip(parts, inputs, strict=True):
            assert values is not None
            self.commit(part, values)
        return True

    def held(self) -> list[tuple[int, int]]:
        return [key for key, saved in self.saved.items() if self.until == "weight" or saved.gy is None]

    def gather(self, rank: int, action: Action) -> list[int] | None:
        """The values that an action reads; None if they are still to come from another rank."""
        schedule, stage, mb = self.schedule, action.stage, action.microbatch
        if stage >= schedule.num_stages or schedule.stage_ranks[stage] != rank:
            raise Wrong("not a stage of this rank")
        if mb is not None and (mb >= schedule.num_microbatches or stage not in schedule.chain_of(mb).stages):
            raise Wrong("not a microbatch of this stage")
        kind = action.type
        if kind.is_compute and stage in self.shards and not self.weights[stage].gathered:
            raise Wrong("computes with sharded parameters")
        saved = self.saved.get((stage, mb)) if kind.is_compute else None
        if kind.is_compute and kind is not T.FORWARD and saved is None:
            raise Wrong("no activations")  # here and not in `compute`: another part of an overlap cannot make them
        if kind is T.BACKWARD_WEIGHT and saved.gy is None:
            raise Wrong("no gradient")
        if kind is T.FORWARD:
            return self.arrivals("F", stage, mb, [a for a, b in self.edges if b == stage], self.outputs)
        if kind in (T.BACKWARD, T.BACKWARD_INPUT):
            return self.arrivals("B", stage, mb, [b for a, b in self.edges if a == stage], self.input_gradients)
        if kind.is_transfer:
            return self.message(action)
        return [] if kind is not T.REDUCE_GRAD or self.replicas_arrived(action) else None

    def arrivals(self, way: str, stage: int, mb: int, ends: list[int], local: dict) -> list[int] | None:
        values = []
        ranks = self.schedule.stage_ranks
        for end in ends:
            if ranks[end] == ranks[stage] or not self.transfers:
                if (end, mb) not in local:
                    if ranks[end] == ranks[stage]:
                        raise Wrong("its input is made later on the same rank")
                    return None
                values.append(local[end, mb])
            elif (way, end, stage, mb) not in self.landed:
                raise Wrong("its input was not received")
            else:
                values.append(self.landed[way, end, stage, mb])
        return values

    def message(self, action: Action) -> list[int] | None:
        schedule, stage, mb = self.schedule, action.stage, action.microbatch
        chain = schedule.chain_of_stage(stage).stages
        forward = action.type in (T.SEND_F, T.RECV_F)
        sends = action.type in (T.SEND_F, T.SEND_B)
        step = 1 if forward == sends else -1
        place = chain.index(stage) + step
        peer = action.peer if action.peer is not None else chain[place] if 0 <= place < len(chain) else None
        edge = (stage, peer) if step == 1 else (peer, stage)
        if peer is None or edge not in self.edges or schedule.stage_ranks[peer] == schedule.stage_ranks[stage]:
            raise Wrong("no such connection")
        if sends:
            values = self.outputs if forward else self.input_gradients
            if (stage, mb) not in values:
                raise Wrong("sends what is not there")
            return [values[stage, mb], peer]
        key = ("F" if forward else "B", peer, stage, mb)
        return [self.flying[key], peer] if key in self.flying else None

    def replicas_arrived(self, action: Action) -> bool:
        schedule, stage = self.schedule, action.stage
        own = self.weights[stage]
        own.waiting = True
        for other in schedule.replicas_of(schedule.part_of(stage)):
            theirs = self.weights[other]
            come = len(theirs.arrivals) + theirs.waiting
            if schedule.stage_ranks[other] != schedule.stage_ranks[stage] and come <= len(own.arrivals):
                return False
        return True

    def commit(self, action: Action, values: list[int]) -> None:
        kind, stage, mb = action.type, action.stage, action.microbatch
        weights = self.weights[stage]
        if kind.is_compute:
            self.compute(action, values, weights)
        elif kind.is_transfer:
            way = "F" if kind in (T.SEND_F, T.RECV_F) else "B"
            if kind in (T.SEND_F, T.SEND_B):
                key, target = (way, stage, values[1], mb), self.flying
            else:
                key, target = (way, values[1], stage, mb), self.landed
                del self.flying[key]
            if key in target:
                raise Wrong("the same message again")
            target[key] = values[0]
        elif kind is T.STEP:
            self.step(stage, weights)
        elif kind is T.STASH:
            if action.version != len(weights.history) - 1 or action.version in weights.kept:
                raise Wrong("keeps weights under a wrong number")
            weights.kept[action.version] = weights.history[-1]
        elif kind is T.DROP:
            if weights.kept.pop(action.version, None) is None:
                raise Wrong("drops what is not kept")
        elif kind is T.REDUCE_GRAD:
            if weights.reduced or not weights.gradients:
                raise Wrong("sums twice or nothing")
            weights.reduced, weights.waiting = True, False
            weights.arrivals.append(sum(gw for _, gw in weights.gradients))
        elif weights.gathered == (kind is T.UNSHARD):
            raise Wrong("gathers or frees twice")
        else:
            weights.gathered = kind is T.UNSHARD

    def compute(self, action: Action, values: list[int], weights: Weights) -> None:
        kind, stage, mb = action.type, action.stage, action.microbatch
        key, part = (stage, mb), self.schedule.part_of(stage)
        version = len(weights.history) - 1 if action.version is None else action.version
        if version == len(weights.history) - 1:
            w = weights.history[-1]
        elif version in weights.kept:
            w = weights.kept[version]
        else:
            raise Wrong("uses weights that do not exist")
        if kind is T.FORWARD:
            if key in self.outputs:
                raise Wrong("forward again")
            x = sum(values) if part else mb + 1
            self.saved[key], self.outputs[key] = Saved(x, version), (w * x + part) % PRIME
            return
        saved = self.saved.get(key)
        if saved is None or saved.version != version:
            raise Wrong("activations of other weights, or none any more")
        if kind in (T.BACKWARD, T.BACKWARD_INPUT):
            if saved.gy is not None:
                raise Wrong("backward again")
            saved.gy = sum(values) if part + 1 < self.schedule.num_parts else 1
            self.input_gradients[key] = w * saved.gy % PRIME
        if kind in (T.BACKWARD, T.BACKWARD_WEIGHT):
            if saved.gy is None or weights.reduced:
                raise Wrong("weight gradient too early or too late")
            gw = saved.x * saved.gy % PRIME
            self.in_order = self.in_order and all(mb > earlier for s, earlier in self.weight_gradients if s == stage)
            self.weight_gradients[key] = gw
            weights.gradients.append((mb, gw))
            del self.saved[key]

    def step(self, stage: int, weights: Weights) -> None:
        replicas = self.schedule.replicas_of(self.schedule.part_of(stage))
        if not weights.gradients or weights.gathered or (not weights.reduced and (self.reduces or len(replicas) > 1)):
            raise Wrong("steps without gradients, on half of them, or under gathered parameters")
        total = sum(gw for _, gw in weights.gradients)
        if weights.reduced and len(replicas) > 1:
            index = len(weights.updates)
            sums = [self.weights[s].arrivals for s in replicas]
            waiting = [s for s, own in zip(replicas, sums, strict=True) if len(own) <= index]
            if any(self.schedule.stage_ranks[s] == self.schedule.stage_ranks[stage] for s in waiting):
                raise Wrong("steps before the replica on the same rank has added its part")
            # A replica on another rank has arrived, and adds nothing any more, even if its own list stands still.
            others = [sum(g for _, g in self.weights[s].gradients) for s in waiting]
            total = sum(own[index] for own in sums if len(own) > index) + sum(others)
        weights.updates.append(weights.gradients)
        weights.history.append((weights.history[-1] - total) % PRIME)
        weights.gradients, weights.reduced = [], False

    # The whole run

    def run(self) -> None:
        places = [0] * self.schedule.num_ranks
        moved = True
        while moved:
            moved = False
            for rank, own in enumerate(self.schedule.actions):
                while places[rank] < len(own) and self.try_action(rank, own[places[rank]]):
                    places[rank] += 1
                    moved = True
        if any(place < len(own) for place, own in zip(places, self.schedule.actions, strict=True)):
            raise Wrong("hangs")
        self.judge()

    def judge(self) -> None:
        schedule = self.schedule
        if self.saved or self.flying:
            raise Wrong("something is left over")
        num_updates = {len(weights.updates) for weights in self.weights}
        for chain in schedule.chains:
            if len(num_updates) > 1 or len({str(self.batches(stage)) for stage in chain.stages}) > 1:
                raise Wrong("stages update after different microbatches")
            for mb in chain.microbatches:
                self.judge_microbatch(chain.stages, mb)
        for weights in self.weights:
            if weights.kept or weights.gathered:
                raise Wrong("versions or gathered parameters are left over")
            if weights.gradients and (weights.updates or (self.reduces and not weights.reduced)):
                raise Wrong("gradients are left over")

    def batches(self, stage: int) -> list[list[int]]:
        return [sorted(mb for mb, _ in update) for update in self.weights[stage].updates]

    def judge_microbatch(self, stages: tuple[int, ...], mb: int) -> None:
        """Compare with the sequential run under the weights that the schedule names (or that are there)."""
        if any((stage, mb) not in self.weight_gradients for stage in stages):
            raise Wrong("a stage leaves a microbatch out")
        outputs, gradients = {}, {}
        inputs = {}
        for stage in stages:
            x = sum(outputs[a] for a, b in self.edges if b == stage) if stage != stages[0] else mb + 1
            w = self.weight_of(stage, mb)
            inputs[stage], outputs[stage] = x, (w * x + self.schedule.part_of(stage)) % PRIME
        for stage in reversed(stages):
            gy = sum(gradients[b] for a, b in self.edges if a == stage) if stage != stages[-1] else 1
            gradients[stage] = self.weight_of(stage, mb) * gy % PRIME
            if self.weight_gradients[stage, mb] != inputs[stage] * gy % PRIME:
                raise Wrong("a gradient is wrong")

    def weight_of(self, stage: int, mb: int) -> int:
        rank = self.schedule.stage_ranks[stage]
        steps = 0
        for action in self.schedule.flat(rank):
            steps += action.stage == stage and action.type is T.STEP
            if action.type is T.FORWARD and (action.stage, action.microbatch) == (stage, mb):
                return self.weights[stage].history[steps if action.version is None else action.version]
        raise AssertionError("a microbatch that ran has a forward")


@dataclass(frozen=True)
class Verdict:
    """Whether a schedule runs to the right results, and adds gradients in the order of a sequential run."""

    is_right: bool
    in_order: bool
    reason: str


def execute(
    schedule: Schedule,
    *,
    edges: Collection[tuple[int, int]] = (),
    limit: int | None = None,
    until: str = "weight",
) -> Verdict:
    run = Run(schedule, edges, limit, until)
    try:
        run.run()
    except Wrong as wrong:
        return Verdict(False, False, str(wrong))
    return Verdict(True, run.in_order, "")
