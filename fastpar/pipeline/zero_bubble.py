"""Zero-bubble schedules: the backward in two halves, of which the second (weight gradients) fills what would be idle.

I is the backward for the stage's input, which the previous stage waits for; nobody waits for W. B stands for the time
of I in the formulas, as in the papers. "In flight until I" counts the inputs of stages between F and I, "until W"
between F and W: how much a stage can free after I depends on the model. "Inner idle" is what a rank idles between its
own first and last action, the measure of the papers: ranks that begin later end later, and a next step could begin
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastpar.pipeline.flush import (
    alternate,
    check_sizes,
    interleaved_orders,
    interleaved_warmup,
    looped_ranks,
    rounds_of,
)  # fmt: skip
from fastpar.pipeline.schedule import Action, ActionType, Schedule


def zb_h1(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1) -> Schedule:
    """1F1B with split backwards, rank r putting off weight gradients by r microbatches (ZB-H1, arXiv 2401.10241).

    Later ranks hold fewer activations in 1F1B; ZB-H1 spends the difference on postponed weight gradients, which let
    the gradients of inputs travel back sooner, and which fill the drain.

        idle        (p-1)(F+B-W) for W <= F and W <= B: a third of 1F1B at F = B = W
        in flight   min(m, p-r) until I, min(m, p) until W
        use it      instead of 1F1B wherever backwards can be split: same memory on rank 0, less idle time

    With v stages per rank (ZB1P over `interleaved_1f1b`): idle (p-1)(F+B-W)/v.

    zb_h1(2, 3):
        rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    rounds = rounds_of(num_ranks, num_microbatches) if stages_per_rank > 1 else [range(num_microbatches)]
    actions = []
    for rank in range(num_ranks):
        forwards, inputs = interleaved_orders(rank, num_ranks, rounds, stages_per_rank, ActionType.BACKWARD_INPUT)
        warmup = num_ranks - 1 - rank
        if stages_per_rank > 1:
            warmup = interleaved_warmup(rank, num_ranks, rounds, stages_per_rank)
        actions.append(put_off_weights(alternate(forwards, inputs, warmup), rank))
    name = "zb_h1" if stages_per_rank == 1 else f"zb_h1(v={stages_per_rank})"
    return Schedule.of_one_chain(name, looped_ranks(num_ranks, stages_per_rank), num_microbatches, actions)


def put_off_weights(actions: Sequence[Action], delay: int) -> list[Action]:
    """The actions with each weight gradient put in `delay` input gradients later than it could run, the rest at the
    end."""
    pending: list[Action] = []
    out: list[Action] = []
    for action in actions:
        out.append(action)
        if action.type is ActionType.BACKWARD_INPUT:
            pending.append(Action(ActionType.BACKWARD_WEIGHT, action.stage, action.microbatch))
            if len(pending) > delay:
                out.append(pending.pop(0))
    return out + pending
