"""What a schedule does to the weights of each stage: versions, updates, sums over replicas, gathered parameters.

A stage lives on one rank, so its story can be read off that rank's list alone; only whether all stages agree about the
updates needs a look across.
"""

from __future__ import annotations

from collections import Counter

from fastpar.pipeline.schedules.ledger import Ledger, Placed, Problem
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule

_T = ActionType


class _Versions:
    """Which weights of one stage exist at a point of its list."""

    def __init__(self, *, same_version: bool) -> None:
        self.current = 0
        self.kept: dict[int, Placed] = {}
        self.used: dict[int, tuple[int, Placed]] = {}  # microbatch -> what its first action used
        self.same_version = same_version

    def compute(self, placed: Placed) -> str | None:
        action = placed.action
        assert action.microbatch is not None
        version = self.current if action.version is None else action.version
        if version > self.current:
            return f"uses version {version} of the weights, but only {self.current} STEPs were made"
        if version < self.current and version not in self.kept:
            return (
                f"uses version {version} of the weights, but the current one is {self.current} and {self._shelf()}; "
                f"keep it with {action.stage}STASH@{version} before the STEP, and drop it after this action"
            )
        earlier, first = self.used.setdefault(action.microbatch, (version, placed))
        if earlier != version and self.same_version:
            return f"uses version {version} of the weights, but {first} used version {earlier}"
        return None

    def stash(self, placed: Placed) -> str | None:
        version = placed.action.version
        assert version is not None
        if version in self.kept:
            return f"version {version} is kept already, by {self.kept[version]}"
        if version != self.current:
            return f"keeps the current weights, which are version {self.current}; stash version {version} while it is"
        self.kept[version] = placed
        return None

    def drop(self, placed: Placed) -> str | None:
        version = placed.action.version
        assert version is not None
        if self.kept.pop(version, None) is None:
            return f"version {version} is not kept: {self._shelf()}"
        return None

    def _shelf(self) -> str:
        return f"versions {', '.join(map(str, sorted(self.kept)))} are kept" if self.kept else "none is kept"


class _Gradients:
    """What one stage has accumulated, and into which update it went."""

    def __init__(self, *, reduces: bool, replicated: bool) -> None:
        self.reduces = reduces
        self.replicated = replicated
        self.pending: list[Placed] = []
        self.reduced: Placed | None = None
        self.reductions: list[Placed] = []
        self.steps: list[tuple[frozenset[int], Placed]] = []

    def add(self, placed: Placed) -> str | None:
        self.pending.append(placed)
        if self.reduced is not None:
            return f"adds a gradient after {self.reduced} has summed them; reduce behind it"
        return None

    def reduce(self, placed: Placed) -> str | None:
        if self.reduced is not None:
            return f"{self.reduced} has summed these gradients already"
        self.reduced = placed
        self.reductions.append(placed)
        return None if self.pending else "there are no gradients to sum yet; move it behind the backwards"

    def step(self, placed: Placed) -> tuple[str, str] | None:
        pending, reduced = self.pending, self.reduced
        self.pending, self.reduced = [], None
        self.steps.append((frozenset(p.action.microbatch for p in pending if p.action.microbatch is not None), placed))
        if not pending:
            return "step", "there are no gradients since the last STEP (or none at all): nothing to apply"
        if reduced is None and self.reduces:
            return "reduce", f"applies gradients that were not summed; put {placed.action.stage}REDUCE_GRAD in front"
        if reduced is None and self.replicated:
            return "reduce", "the stage has a replica, which would diverge; put REDUCE_GRAD in front of both STEPs"
        return None


class _Shards:
    """Whether the parameters of one stage are gathered; no rule for a stage that is never sharded."""

    def __init__(self, *, sharded: bool) -> None:
        self.sharded = sharded
        self.gathered: Placed | None = None

    def compute(self, placed: Placed) -> str | None:
        if self.sharded and self.gathered is None:
            return f"the parameters are sharded here; put {placed.action.stage}UNSHARD in front"
        return None

    def unshard(self, placed: Placed) -> str | None:
        if self.gathered is not None:
            return f"{self.gathered} has gathered the parameters already; RESHARD in between or remove it"
        self.gathered = placed
        return None

    def reshard(self, placed: Placed) -> str | None:
        if self.gathered is None:
            return f"the parameters are not gathered here; remove it or put {placed.action.stage}UNSHARD in front"
        self.gathered = None
        return None

    def step(self, placed: Placed) -> str | None:
        if self.gathered is not None:
            return f"the parameters that {self.gathered} has gathered would be stale; RESHARD in front"
        return None


class _StageWeights:
    def __init__(self, versions: _Versions, gradients: _Gradients, shards: _Shards) -> None:
        self.versions, self.gradients, self.shards = versions, gradients, shards

    def visit(self, placed: Placed) -> list[tuple[str, str | None]]:
        """Kind and message (None: all is well) of each rule that an action meets."""
        kind = placed.action.type
        if kind.is_compute:
            found = [("version", self.versions.compute(placed)), ("shard", self.shards.compute(placed))]
            if kind in (_T.BACKWARD, _T.BACKWARD_WEIGHT):
                found.append(("reduce", self.gradients.add(placed)))
            return found
        if kind is _T.STASH:
            return [("version", self.versions.stash(placed))]
        if kind is _T.DROP:
            return [("version", self.versions.drop(placed))]
        if kind is _T.UNSHARD:
            return [("shard", self.shards.unshard(placed))]
        if kind is _T.RESHARD:
            return [("shard", self.shards.reshard(placed))]
        if kind is _T.REDUCE_GRAD:
            return [("reduce", self.gradients.reduce(placed))]
        if kind is _T.STEP:
            self.versions.current += 1
            return [self.gradients.step(placed) or ("step", None), ("shard", self.shards.step(placed))]
        return []

    def finish(self, stage: int) -> list[Problem]:
        """What must not be left over in the end."""
        problems = [
            placed.problem("version", f"version {version} is never dropped; add {stage}DROP@{version} after its use")
            for version, placed in self.versions.kept.items()
        ]
        if self.shards.gathered is not None:
            problems.append(self.shards.gathered.problem("shard", f"never freed; add {stage}RESHARD in the end"))
        gradients = self.gradients
        if gradients.pending and gradients.steps:
            last = gradients.pending[-1]
            problems.append(last.problem("step", f"its gradient is never applied; add {stage}STEP behind it"))
        if gradients.pending and gradients.reduces and gradients.reduced is None:
            text = f"its gradient is never summed over replicas; add {stage}REDUCE_GRAD behind it"
            problems.append(gradients.pending[-1].problem("reduce", text))
        return problems


def _disagreements(schedule: Schedule, stages: list[_StageWeights]) -> list[Problem]:
    """Stages that put other microbatches into an update than most of their chain, or make more or fewer updates."""
    problems = []
    num_steps = Counter(len(stage.gradients.steps) for stage in stages)
    usual = max(num_steps, key=lambda steps: (num_steps[steps], steps))
    if usual == 0 and len(num_steps) == 1:
        return []
    usual = usual or max(num_steps)
    for chain in schedule.chains:
        complete = [stages[s].gradients.steps for s in chain.stages if len(stages[s].gradients.steps) == usual]
        batches = [Counter(steps[i][0] for steps in complete).most_common(1)[0][0] for i in range(usual) if complete]
        for number in chain.stages:
            steps = stages[number].gradients.steps
            if len(steps) != usual:
                rank = schedule.stage_ranks[number]
                position, action = (steps[-1][1].position, steps[-1][1].action) if steps else (None, None)
                text = f"stage {number} makes {len(steps)} STEPs, but most stages make {usual}"
                problems.append(Problem("step", rank, position, action or Action(_T.STEP, number), text))
                continue
            for (batch, placed), expected in zip(steps, batches, strict=True):
                if batch != expected:
                    text = f"applies microbatches {sorted(batch)}, but other stages {sorted(expected)} in this update"
                    problems.append(placed.problem("step", text))
                    break
    return problems


def _early_steps(schedule: Schedule, stages: list[_StageWeights]) -> list[Problem]:
    """Replicas on one rank: nobody waits there, so each STEP must stand behind the REDUCE_GRADs of all of them."""
    problems = []
    for part in range(schedule.num_parts):
        for stage in schedule.replicas_of(part):
            for other in schedule.replicas_of(part):
                if other == stage or schedule.stage_ranks[other] != schedule.stage_ranks[stage]:
                    continue
                steps = [placed for _, placed in stages[stage].gradients.steps]
                for step, reduction in zip(steps, stages[other].gradients.reductions, strict=False):
                    if step.position < reduction.position:
                        text = f"{reduction} adds the gradients of its replica only later; move it in front"
                        problems.append(step.problem("reduce", text))
    return problems


def weight_problems(ledger: Ledger, *, same_version: bool) -> list[Problem]:
    """Problems of the kinds version, step, reduce and shard."""
    schedule = ledger.schedule
    reduces = any(placed.action.type is _T.REDUCE_GRAD for placed in ledger.placed)
    sharded = {p.action.stage for p in ledger.placed if p.action.type in (_T.UNSHARD, _T.RESHARD)}
    stages = [
        _StageWeights(
            _Versions(same_version=same_version),
            _Gradients(reduces=reduces, replicated=len(schedule.chains) > 1),
            _Shards(sharded=stage in sharded),
        )
        for stage in range(schedule.num_stages)
    ]
    problems = []
    for placed in ledger.placed:
        if placed.action.type.is_head:
            continue  # its shards have one version, and are never gathered
        for kind, message in stages[placed.action.stage].visit(placed):
            if message is not None:
                problems.append(placed.problem(kind, message))
    for number, stage in enumerate(stages):
        problems += stage.finish(number)
    return problems + _disagreements(schedule, stages) + _early_steps(schedule, stages)
