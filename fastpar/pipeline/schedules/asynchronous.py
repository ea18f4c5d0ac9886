"""Asynchronous schedules: no flush; the weights move on while microbatches are under way.

The order is that of 1F1B, and each stage updates its weights (STEP) as soon as it has gradients. A microbatch must go
back through the same weights that it came through, so a stage keeps older versions: version v of a stage are its
weights after v of its STEPs, STASH@v keeps them when the STEP that replaces them comes before their last use, DROP@v
forgets them after it. Forwards and backwards name their version. A schedule is one stream: it starts with version 0
and ends drained, so (p-1)(F+B+W) is idle once per stream, and nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastpar.arguments import checked
from fastpar.pipeline.schedules.flush import check_sizes, one_f_one_b
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule


@checked(computed=False)
def pipedream(num_ranks: int, num_microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """1F1B that updates after every backward, with weight stashing (PipeDream, SOSP 2019).

    Microbatch t uses version max(0, t - (p-1-k)) on stage k: what its weights are when t arrives. The updates are

        w_k(t+1) = w_k(t) - lr * gradient at (w_0(t-p+1), ..., w_{p-1}(t))

    `vertical_sync`: version max(0, t - (p-1)) on all stages, so that every microbatch sees one model; the gradient is
    then that of (w_0(t-p+1), ..., w_{p-1}(t-p+1)).

        idle        (p-1)(F+B+W) per stream
        in flight   min(m, p-k) microbatches
        weights     p-k versions at stage k with the current one, p on every stage with vertical sync (fewer in streams
                    of few microbatches)
        use it      where throughput counts and stale gradients are acceptable

    pipedream(2, 3):
        rank 0: 0F0@0 0F1@0 0B0@0 0STASH@0 0STEP 0F2@1 0B1@0 0DROP@0 0STASH@1 0STEP 0B2@1 0DROP@1 0STEP
        rank 1: 1F0@0 1B0@0 1STEP 1F1@1 1B1@1 1STEP 1F2@2 1B2@2 1STEP
    """
    check_sizes(num_ranks, num_microbatches)

    def version(stage: int, microbatch: int) -> int:
        delay = num_ranks - 1 if vertical_sync else num_ranks - 1 - stage
        return max(0, microbatch - delay)

    name = "pipedream(vertical_sync)" if vertical_sync else "pipedream"
    return _asynchronous(name, num_ranks, num_microbatches, 1, version)


@checked(computed=False)
def pipedream_2bw(num_ranks: int, num_microbatches: int, *, microbatches_per_update: int | None = None) -> Schedule:
    """1F1B that updates after every u microbatches and keeps two versions (PipeDream-2BW, arXiv 2006.09503).

    Batch b, of u microbatches, uses version max(0, b-1) on all stages: the newest that its first microbatch finds
    finished everywhere. Only it and the current version are ever needed, and the delay is one update for all stages:

        w(b+1) = w(b) - lr * gradient at w(b-1)

        microbatches_per_update   u (None: p). At least p-1, or the version would not be there yet (the paper asks for
                                  p); num_microbatches must be a multiple of it. ValueError otherwise

        idle        (p-1)(F+B+W) per stream
        in flight   min(m, p-k) microbatches
        weights     2 versions at most
        use it      instead of `pipedream` where p versions of the weights are too many

    pipedream_2bw(2, 4):
        rank 0: 0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0STASH@0 0STEP 0F3@0 0B2@0 0B3@0 0DROP@0 0STEP
        rank 1: 1F0@0 1B0@0 1F1@0 1B1@0 1STASH@0 1STEP 1F2@0 1B2@0 1F3@0 1B3@0 1DROP@0 1STEP
    """
    check_sizes(num_ranks, num_microbatches)
    size = num_ranks if microbatches_per_update is None else microbatches_per_update
    if size < max(1, num_ranks - 1):
        raise ValueError(f"microbatches_per_update must be at least num_ranks - 1 = {num_ranks - 1}, got {size}")
    if num_microbatches % size:
        raise ValueError(f"num_microbatches must be a multiple of {size} (per update), got {num_microbatches}")

    def version(stage: int, microbatch: int) -> int:
        return max(0, microbatch // size - 1)

    return _asynchronous("pipedream_2bw", num_ranks, num_microbatches, size, version)


def _asynchronous(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    microbatches_per_update: int,
    version: Callable[[int, int], int],
) -> Schedule:
    """1F1B with versions, and a STEP after each backward that completes an update."""
    actions = []
    for own in one_f_one_b(num_ranks, num_microbatches).actions:
        versioned: list[Action] = []
        for action in own:
            assert action.microbatch is not None
            versioned.append(replace(action, version=version(action.stage, action.microbatch)))
            completes = (action.microbatch + 1) % microbatches_per_update == 0
            if action.type is ActionType.BACKWARD and completes:
                versioned.append(Action(ActionType.STEP, action.stage))
        actions.append(_keep_versions(versioned))
    return Schedule.of_one_chain(name, range(num_ranks), num_microbatches, actions)


def _keep_versions(own: Sequence[Action]) -> list[Action]:
    """Add STASH before a STEP that ends a version still to be used, and DROP after the last use of such a version."""
    last_use = {action.version: position for position, action in enumerate(own) if action.version is not None}
    current = 0
    stashed: set[int] = set()
    out: list[Action] = []
    for position, action in enumerate(own):
        if action.type is ActionType.STEP:
            if last_use.get(current, -1) > position:
                out.append(Action(ActionType.STASH, action.stage, version=current))
                stashed.add(current)
            current += 1
        out.append(action)
        if action.version in stashed and last_use[action.version] == position:
            out.append(Action(ActionType.DROP, action.stage, version=action.version))
    return out
