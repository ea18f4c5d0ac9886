"""DualPipe and DualPipeV (DeepSeek-V3, arXiv 2412.19437): forwards and backwards of different microbatches in pairs.

In the steady state a rank always has a forward of one of its two stages and a backward of the other to run, and runs
them together, so that the transfers and collectives of one hide behind the computation of the other. Such a pair is one
OVERLAP_F_B action; `overlap=False` writes its two parts one after the other.

DualPipe feeds microbatches from both ends of the pipeline, which takes two copies of the parameters. Its ranks r and
p-1-r are mirror images, so one of each two is enough if the two halves of the model are folded onto it: that is
DualPipeV (the "cut in half" of the DualPipe authors), and `_phases` writes the actions of both.

In the formulas F, B, W are the times of *one stage*, B that of I, and F&B that of a pair: F+B+W when it runs one after
the other, max(F, B+W) when it overlaps fully.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastpar.arguments import checked
from fastpar.pipeline.schedules.flush import check_sizes
from fastpar.pipeline.schedules.schedule import Action, ActionType, Chain, Schedule


@checked(computed=False)
def dualpipev(num_ranks: int, num_microbatches: int, *, overlap: bool = True) -> Schedule:
    """Two stages per rank in a V, forwards of one beside backwards of the other (DualPipeV).

    Stages r and 2p-1-r are on rank r, as in ZB-V; from the middle of the warm-up on a far forward always has a near
    backward beside it, and a near forward a far one. One copy of the parameters.

        idle        (p-1)(F&B + B+W - 3W) at F = B = W: 2(p-1)F where pairs take F+B+W, and (p-1)F on the rank that
                    idles most where they overlap fully; (p-1)F with `overlap=False`, as outputs leave earlier then
        in flight   2p+1 stage inputs on every rank, until I and until W
        use it      with expert parallelism, where a microbatch waits for its all-to-alls: each hides behind the other

    Needs at least 2p microbatches: ValueError for fewer.

    dualpipev(2, 4, overlap=False):
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    check_sizes(num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipev needs at least 2 microbatches per rank, {2 * num_ranks} on {num_ranks} ranks, got "
            f"{num_microbatches}; zbv takes any number"
        )
    actions = []
    for rank in range(num_ranks):
        near = _Stream(rank, range(num_microbatches))
        far = _Stream(2 * num_ranks - 1 - rank, range(num_microbatches))
        actions.append(_phases(rank, num_ranks, near, far, overlap))
    stage_ranks = [*range(num_ranks), *reversed(range(num_ranks))]
    return Schedule.of_one_chain("dualpipev", stage_ranks, num_microbatches, actions)


@checked(computed=False)
def dualpipe(num_ranks: int, num_microbatches: int, *, overlap: bool = True) -> Schedule:
    """Microbatches from both ends of the pipeline, forwards of one stream beside backwards of the other (DualPipe).

    Stages 0..p-1 on ranks 0..p-1 serve the first half of the microbatches; stages p..2p-1 on ranks p-1..0, replicas of
    the same parts of the model, serve the second half. The two gradients of each part have to be summed
    (`fastpar.pipeline.add_reduce_grad`).

        idle        (p/2-1)(F&B + B+W - 3W) at F = B = W, as DualPipeV on half as many ranks
        in flight   p+1 stage inputs on every rank, until I and until W
        parameters  twice
        use it      as DualPipeV, when memory for parameters is there: half as many transfers per microbatch and rank

    Needs an even number of ranks, and an even number of microbatches of at least 2p: ValueError otherwise.

    dualpipe(2, 4, overlap=False):
        rank 0: 0F0 3F2 0F1 3B2 3F3 0B0 3B3 0I1 0W1
        rank 1: 2F2 1F0 2F3 1B0 1F1 2B2 1B1 2I3 2W3
    """
    check_sizes(num_ranks, num_microbatches)
    if num_ranks % 2:
        raise ValueError(f"dualpipe needs an even number of ranks, got {num_ranks}; dualpipev takes any number")
    if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"dualpipe needs an even number of microbatches, at least 2 per rank ({2 * num_ranks} on {num_ranks} "
            f"ranks), got {num_microbatches}"
        )
    half = num_microbatches // 2
    chains = (
        Chain(tuple(range(num_ranks)), tuple(range(half))),
        Chain(tuple(range(num_ranks, 2 * num_ranks)), tuple(range(half, num_microbatches))),
    )
    actions = []
    for rank in range(num_ranks):
        down = _Stream(rank, range(half))
        up = _Stream(2 * num_ranks - 1 - rank, range(half, num_microbatches))
        mirrored = min(rank, num_ranks - 1 - rank)
        near, far = (down, up) if rank == mirrored else (up, down)
        actions.append(_phases(mirrored, num_ranks // 2, near, far, overlap))
    stage_ranks = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule("dualpipe", stage_ranks, chains, tuple(actions))


@dataclass
class _Stream:
    """The microbatches that pass one stage of a rank, and how far they are."""

    stage: int
    microbatches: Sequence[int]
    num_forwards: int = 0
    num_backwards: int = 0

    def forward(self) -> Action:
        """The next forward."""
        self.num_forwards += 1
        return Action(ActionType.FORWARD, self.stage, self.microbatches[self.num_forwards - 1])

    def backward(self) -> Action:
        """The next backward, whole."""
        self.num_backwards += 1
        return Action(ActionType.BACKWARD, self.stage, self.microbatches[self.num_backwards - 1])

    def split_backward(self) -> tuple[Action, Action]:
        """The next backward as I and W."""
        whole = self.backward()
        return replace(whole, type=ActionType.BACKWARD_INPUT), replace(whole, type=ActionType.BACKWARD_WEIGHT)


def _phases(rank: int, num_ranks: int, near: _Stream, far: _Stream, overlap: bool) -> tuple[Action, ...]:
    """The actions of a rank of DualPipeV, in the eight phases in which its authors describe the schedule.

    `below` ranks lie between this one and the turn of the V, and `above` counts this one and those on the other side.
    """
    below, above = num_ranks - 1 - rank, rank + 1

    def pair(forward: Action, backward: Action, together: bool = overlap) -> list[Action]:
        return [Action.overlap(forward, backward)] if together else [forward, backward]

    actions = [near.forward() for _ in range(2 * below)]
    for _ in range(above):
        actions += [near.forward(), far.forward()]
    for _ in range(below):
        actions += [*far.split_backward(), far.forward()]
    for turn in range(len(near.microbatches) - 2 * num_ranks + above):
        # The first pair at the turn of the V stays apart: the rank's neighbour waits for the forward alone.
        actions += pair(near.forward(), far.backward(), overlap and (turn > 0 or below > 0))
        actions += pair(far.forward(), near.backward())
    for _ in range(below):
        actions += [far.backward(), *pair(far.forward(), near.backward())]
    weights: list[Action] = []
    for turn in range(2 * above):
        stream = near if turn % 2 else far
        if turn < above:
            actions.append(stream.backward())
        else:
            input_grad, weight = stream.split_backward()
            actions.append(input_grad)
            weights.append(weight)
    for _ in range(below):
        input_grad, weight = near.split_backward()
        actions += [weights.pop(0), input_grad]
        weights.append(weight)
    return (*actions, *weights)
