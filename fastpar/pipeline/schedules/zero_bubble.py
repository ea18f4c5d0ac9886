"""Zero-bubble schedules: the backward in two halves, of which the second (weight gradients) fills what would be idle.

I is the backward for the stage's input, which the previous stage waits for; nobody waits for W. B stands for the time
of I in the formulas, as in the papers. "In flight until I" counts the inputs of stages between F and I, "until W"
between F and W: how much a stage can free after I depends on the model. "Inner idle" is what a rank idles between its
own first and last action, the measure of the papers: ranks that begin later end later, and a next step could begin
meanwhile. The other letters are those of `fastpar.pipeline.schedules.flush`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastpar.arguments import checked
from fastpar.pipeline.schedules.flush import (
    alternate,
    check_sizes,
    interleaved_orders,
    interleaved_warmup,
    looped_ranks,
    rounds_of,
)
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule


@checked(computed=False)
def zb_h1(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1) -> Schedule:
    """1F1B with split backwards, rank r putting off weight gradients by r microbatches (ZB-H1, arXiv 2401.10241).

    Later ranks hold fewer activations in 1F1B; ZB-H1 spends the difference on postponed weight gradients, which let
    the gradients of inputs travel back sooner, and which fill the drain.

        idle        (p-1)(F+B-W) for W <= F and W <= B, from p microbatches on: a third of 1F1B's at F = B = W;
                    (p-1)(F+B) - (m-1) W for fewer
        in flight   min(m, p-r) until I, min(m, p) until W
        use it      instead of 1F1B wherever backwards can be split: same memory on rank 0, less idle time

    With v > 1 stages per rank it is `interleaved_1f1b` treated the same way (ZB1P), idle (p-1)(F+B-W)/v.

    zb_h1(2, 3):
        rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    if stages_per_rank == 1:
        return _one_stage_per_rank("zb_h1", num_ranks, num_microbatches, extra=0)
    rounds = rounds_of(num_ranks, num_microbatches)
    actions = []
    for rank in range(num_ranks):
        forwards, inputs = interleaved_orders(rank, num_ranks, rounds, stages_per_rank, ActionType.BACKWARD_INPUT)
        warmup = interleaved_warmup(rank, num_ranks, rounds, stages_per_rank)
        actions.append(put_off_weights(alternate(forwards, inputs, warmup), rank))
    stage_ranks = looped_ranks(num_ranks, stages_per_rank)
    return Schedule.of_one_chain(f"zb_h1(v={stages_per_rank})", stage_ranks, num_microbatches, actions)


@checked(computed=False)
def zb_h2(num_ranks: int, num_microbatches: int, *, extra: int | None = None) -> Schedule:
    """ZB-H1 with more forwards in the warm-up and later weight gradients: no idle time (ZB-H2, arXiv 2401.10241).

    Rank r runs up to p-1-r forwards more before its first I, so that it need not wait for it, and puts off weight
    gradients by as many microbatches as later ranks run forwards less. All ranks then compute without a pause, each
    beginning and ending a little later than the one before.

        inner idle  max(0, (p-1)(F+B-2W)) for W <= F, from 2p-1 microbatches on: 0 at F = B = W
        idle        (p-1) F at F = B = W: ranks begin one F after each other and end so
        in flight   min(m, 2(p-r)-1) until I, min(m, 2p-1) until W
        use it      when memory for twice the microbatches of 1F1B is there, and steps follow without a global pause

        extra   microbatches of memory beyond those of ZB-H1, 0 to p-1 (None: p-1): at F = B = W each takes one F off
                the inner idle time, from the (p-1)F of ZB-H1 down to 0. More than m-p gain nothing and are not used

    zb_h2(2, 4):
        rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    check_sizes(num_ranks, num_microbatches)
    if extra is not None and not 0 <= extra < num_ranks:
        raise ValueError(f"extra must be from 0 to num_ranks - 1 = {num_ranks - 1}, got {extra}")
    wanted = num_ranks - 1 if extra is None else extra
    return _one_stage_per_rank("zb_h2", num_ranks, num_microbatches, min(wanted, max(0, num_microbatches - num_ranks)))


def put_off_weights(actions: Sequence[Action], delay: int) -> list[Action]:
    """Add to F and I the weight gradients: each `delay` I's after its own, the last ones at the end."""
    pending: list[Action] = []
    out: list[Action] = []
    for action in actions:
        out.append(action)
        if action.type is ActionType.BACKWARD_INPUT:
            pending.append(Action(ActionType.BACKWARD_WEIGHT, action.stage, action.microbatch))
            if len(pending) > delay:
                out.append(pending.pop(0))
    return out + pending


def _one_stage_per_rank(name: str, num_ranks: int, num_microbatches: int, extra: int) -> Schedule:
    """ZB-H1 (extra = 0) to ZB-H2 (extra = p-1): each rank holds p + extra microbatches until W."""
    actions = []
    for rank in range(num_ranks):
        rounds = [range(num_microbatches)]
        forwards, inputs = interleaved_orders(rank, num_ranks, rounds, 1, ActionType.BACKWARD_INPUT)
        below = num_ranks - 1 - rank
        warmup = below + min(extra, below)
        actions.append(put_off_weights(alternate(forwards, inputs, warmup), num_ranks - 1 + extra - warmup))
    return Schedule.of_one_chain(name, range(num_ranks), num_microbatches, actions)
