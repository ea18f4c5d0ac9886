"""Zero-bubble schedules with two stages per rank in a V: the model goes down the ranks and comes back up.

Rank r has the *near* stage r and the *far* stage 2p-1-r. The last stage is on rank 0, where a microbatch turns round
at once, and the lifetimes of the two stages add up to the same on every rank: memory is balanced. All three schedules
are an order of F and I per rank, plus a limit on the stage inputs in flight until W; `place_weights` does the rest.

Counts in flight are in stage inputs, each half of a rank's share: 2p of them are what rank 0 holds in 1F1B. Idle times
are exact at F = B = W, per rank and microbatch; B and "inner idle" are those of
`zero_bubble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastpar.arguments import checked
from fastpar.pipeline.schedules.flush import check_sizes
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule

_PERIOD = 6  # slots of a microbatch on a rank: F, I and W of two stages


@checked(computed=False)
def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble in the memory of 1F1B (ZB-V, arXiv 2401.10241).

    Rank r runs the 2(p-r)-1 near forwards that fit before its first far one, then r pairs of a far and a near forward,
    then far forwards with their backwards until near gradients come back; after that near and far take turns.

        inner idle  0 at F = B = W from 2p-1 microbatches on
        idle        (p-1) F/2 at F = B = W from p microbatches on
        in flight   2p on every rank, until I and until W, from 2p-1 microbatches on
        use it      where F, B and W take about the same time; at other ratios look at `zb_h1` and the search too

    zbv(2, 3):
        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    check_sizes(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        near, far = rank, 2 * num_ranks - 1 - rank
        kinds = [*_kinds(near), *_kinds(far)]
        queues = {kind: [Action(*kind, index) for index in range(num_microbatches)] for kind in kinds}
        forward_near, input_near, forward_far, input_far = (queues[kind] for kind in kinds)
        order = _take_turns(2 * (num_ranks - rank) - 1, forward_near)
        order += _take_turns(rank, forward_far, forward_near)
        order += _take_turns(num_ranks - rank, forward_far, input_far)
        order += _take_turns(num_microbatches, forward_near, input_near, forward_far, input_far)
        orders.append(order)
    return _v_schedule("zbv", orders, num_microbatches, limit=2 * num_ranks)


@checked(computed=False)
def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half the memory of 1F1B, and less idle time (V-Half, arXiv 2405.15362).

    A building block, the passes of one microbatch over all ranks, is repeated every 6 slots; forwards wait little on
    the way down and gradients little on the way up, so that a stage holds its input for half as long as in ZB-V.

        idle        less than half of 1F1B's (p-1)(F+B+W): 2.5 F of 9 F at p = 4 and 8.5 F of 21 F at p = 8 (m >= 2p)
        in flight   p+2 on every rank at most, until W
        use it      when activations limit the size of the model or of the microbatch

    Holes of the repeated block are closed by running forwards early, as far as memory goes (`place_weights`).

    v_half(2, 3):
        rank 0: 0F0 0F1 3F0 3I0 0F2 3W0 3F1 0I0 3I1 0W0 3F2 3I2 0I1 3W1 0I2 3W2 0W1 0W2
        rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    check_sizes(num_ranks, num_microbatches)
    if num_ranks % 2:
        block = _VBlock(hops=(1, 2, 1, 2), turns=(2, 1, 1), spare=0)
    else:
        block = _VBlock(hops=(1, 2, 1, 2), turns=(4, 4, 2), spare=1)
    return _of_block("v_half", block, num_ranks, num_microbatches, limit=num_ranks + 2)


@checked(computed=False)
def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of the memory of 1F1B, the least that two stages per rank allow (V-Min, arXiv 2405.15362).

    The building block has no wait at all: a microbatch goes from rank to rank in consecutive slots.

        idle        2(p-1)F - F/2, two thirds of 1F1B's, at F = B = W; 3/2 F less than two thirds for p a multiple of 3
        in flight   2 (floor((p+1)/3) + 1) on every rank at most, until W
        use it      when even V-Half needs too much memory; unequal F, B and W cost it most of the three

    v_min(2, 3):
        rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    check_sizes(num_ranks, num_microbatches)
    if num_ranks % 3:
        block = _VBlock(hops=(1, 1, 1, 1), turns=(1, 1, 1), spare=None)
    else:
        block = _VBlock(hops=(1, 1, 1, 1), turns=(1, 3, 1), spare=0)
    limit = 2 * ((num_ranks + 1) // 3 + 1)
    return _of_block("v_min", block, num_ranks, num_microbatches, limit)


def _take_turns(times: int, *queues: list[Action]) -> list[Action]:
    """Take the first action of each queue in turn, `times` times; queues that have run out are passed over."""
    taken: list[Action] = []
    for _ in range(times):
        for queue in queues:
            taken += queue[:1]
            del queue[:1]
    return taken


@dataclass(frozen=True)
class _VBlock:
    """The passes of one microbatch, in slots of equal length.

    hops    from rank to rank, for the near forward, far forward, far I, near I
    turns   from one of these passes to the next, on the rank where it turns: near to far forward on rank p-1, far
            forward to far I on rank 0, far to near I on rank p-1
    spare   places in memory kept free when a forward runs before its turn; None: everything runs in its turn

    Repeated every 6 slots, no two passes may meet on a rank: their starts differ modulo 6.
    """

    hops: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    spare: int | None

    def starts(self, num_ranks: int, rank: int) -> tuple[int, int, int, int]:
        """The slots of the near forward, far forward, far I and near I on a rank."""
        below, way = num_ranks - 1 - rank, num_ranks - 1
        down, up, down_again, up_again = self.hops
        far = way * down + self.turns[0]  # on rank p-1
        far_input = far + way * up + self.turns[1]  # on rank 0
        near_input = far_input + way * down_again + self.turns[2]  # on rank p-1
        return (rank * down, far + below * up, far_input + rank * down_again, near_input + below * up_again)


def _of_block(name: str, block: _VBlock, num_ranks: int, num_microbatches: int, limit: int) -> Schedule:
    """Repeat the block for every microbatch, keep the order of its actions, and close the holes."""
    orders = []
    for rank in range(num_ranks):
        (near, near_input), (far, far_input) = _kinds(rank), _kinds(2 * num_ranks - 1 - rank)
        starts = block.starts(num_ranks, rank)
        assert len({start % _PERIOD for start in starts}) == 4, f"{name}: passes meet on rank {rank} of {num_ranks}"
        timed = [
            (start + _PERIOD * index, Action(*kind, index))
            for start, kind in zip(starts, (near, far, far_input, near_input), strict=True)
            for index in range(num_microbatches)
        ]
        orders.append([action for _, action in sorted(timed, key=lambda entry: entry[0])])
    return _v_schedule(name, orders, num_microbatches, limit, block.spare)


def _kinds(stage: int) -> tuple[tuple[ActionType, int], tuple[ActionType, int]]:
    return (ActionType.FORWARD, stage), (ActionType.BACKWARD_INPUT, stage)


def _v_schedule(
    name: str, orders: Sequence[list[Action]], num_microbatches: int, limit: int, spare: int | None = None
) -> Schedule:
    num_ranks = len(orders)
    stage_ranks = [*range(num_ranks), *reversed(range(num_ranks))]
    return Schedule.of_one_chain(name, stage_ranks, num_microbatches, place_weights(orders, limit, spare))


# Placing weight gradients


def place_weights(orders: Sequence[list[Action]], limit: int, spare: int | None = None) -> list[list[Action]]:
    """Run the F and I of each rank slot by slot, all taking one slot, and put the W's where a rank would wait.

        orders   per rank, its F and I in order; consumed
        limit    stage inputs that a rank may hold between F and W
        spare    None: F and I run in the given order. Otherwise the first one that is ready runs; a forward before its
                 turn only if, with it, the rest of the order would still leave `spare` places of the limit free

    In each slot a rank runs its next F or I if what it needs has arrived and memory allows, else its oldest W, else it
    waits. The W's come out in the order of their I's.
    """
    slots = _Slots(orders, limit, spare)
    while slots.step():
        pass
    assert not any(orders), f"no rank can continue within a limit of {limit}: {[own[:1] for own in orders]}"
    return slots.done


class _Slots:
    """The state of `place_weights`."""

    def __init__(self, orders: Sequence[list[Action]], limit: int, spare: int | None) -> None:
        self.orders = orders
        self.limit = limit
        self.spare = spare
        self.last_stage = max(action.stage for own in orders for action in own)
        self.done: list[list[Action]] = [[] for _ in orders]
        self.pending: list[list[Action]] = [[] for _ in orders]  # W's that can run
        self.held = [0 for _ in orders]  # stage inputs between F and W
        self.finished: set[Action] = set()

    def step(self) -> bool:
        """Run one slot on all ranks; False when there was nothing to run on any."""
        now = [(rank, action) for rank in range(len(self.orders)) if (action := self._next(rank))]
        for rank, action in now:
            self.done[rank].append(action)
            self.finished.add(action)
            if action.type is ActionType.FORWARD:
                self.held[rank] += 1
            elif action.type is ActionType.BACKWARD_INPUT:
                self.pending[rank].append(Action(ActionType.BACKWARD_WEIGHT, action.stage, action.microbatch))
            else:
                self.held[rank] -= 1
        return bool(now)

    def _next(self, rank: int) -> Action | None:
        """Take the action that a rank runs in this slot."""
        order = self.orders[rank]
        held = self.held[rank] - len(self.pending[rank])  # along the order, if W's followed their I's at once
        most = held
        passed: set[tuple[ActionType, int]] = set()
        for position, action in enumerate(order if self.spare is not None else order[:1]):
            kind = (action.type, action.stage)
            is_forward = action.type is ActionType.FORWARD
            if kind not in passed and self._is_ready(action):
                fits = position == 0 or most + 1 + (self.spare or 0) <= self.limit
                if not is_forward or (fits and self.held[rank] < self.limit):
                    return order.pop(position)
            passed.add(kind)
            if len(passed) == 4:
                break
            held += 1 if is_forward else -1
            most = max(most, held)
        return self.pending[rank].pop(0) if self.pending[rank] else None

    def _is_ready(self, action: Action) -> bool:
        """Whether everything that an F or I needs was finished in earlier slots."""
        forward, input_grad = ActionType.FORWARD, ActionType.BACKWARD_INPUT
        stage, index = action.stage, action.microbatch
        if action.type is forward:
            return stage == 0 or Action(forward, stage - 1, index) in self.finished
        after = stage == self.last_stage or Action(input_grad, stage + 1, index) in self.finished
        return after and Action(forward, stage, index) in self.finished
