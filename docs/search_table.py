"""Write docs/pipeline_search.md: what searched schedules gain over fixed ones at equal memory.

    python docs/search_table.py [--evaluations 1000]

Everything in it is computed, nothing is timed, and the time limit is off: the same on every machine. Takes minutes.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from fastpar.pipeline import Costs, Schedule, find_schedule, simulate
from fastpar.pipeline.search.find import fixed_schedules, placements
from fastpar.pipeline.search.model import Model

NUM_RANKS, NUM_MICROBATCHES = 8, 32
MEMORIES = (8, 12, 16)
# F, I, W of what a rank does for one microbatch, and the latency of a message
CASES = {"F:I:W = 10:20:6, no latency": (10, 20, 6, 0), "F:I:W = 10:10:10, hop 5 (0.5 F)": (10, 10, 10, 5)}
HEAD = """# Searched schedules against fixed ones

`fastpar.pipeline.find_schedule` looks for the shortest schedule under given costs and a memory limit. Here are
8 ranks and 32 microbatches, and for each memory limit the best fixed schedule that keeps it and what the search finds,
with one stage per rank ("straight") or two of half the size ("looped" over the ranks, or "V": to and fro). Memory is
counted in activations of a microbatch through one rank, held until W or until I; 1F1B needs 8. Lengths are in units of
the costs. The bound is a length that no schedule with this placement and memory can beat: where the search reaches it,
it is printed bold, and nothing is shorter.

Fixed schedules that were candidates: all of `schedule_names()` but the asynchronous ones and DualPipe, which holds all
parameters twice; ZB-H2 with every number of extra microbatches. "-" where none keeps the limit (`naive` always does,
and is left out).

Written by `python docs/search_table.py --evaluations {evaluations}`.
"""


@dataclass
class Found:
    """The best fixed schedule of one placement (None: none within the limit), the searched one, and the bound."""

    fixed: Schedule | None
    searched: Schedule
    bound: float
    costs: Costs

    def length(self, schedule: Schedule | None) -> float:
        return math.inf if schedule is None else float(simulate(schedule, self.costs).makespan)


def look(case: tuple[int, int, int, int], memory: int, until: str, placement: str, evaluations: int) -> Found:
    stages_per_rank = 1 if placement == "straight" else 2
    share = Fraction(1, stages_per_rank)
    forward, backward_input, backward_weight, hop = case
    costs = Costs(forward * share, backward_input * share, backward_weight * share, hop=hop, activation=share)
    stage_ranks = placements(NUM_RANKS, stages_per_rank)[placement]
    limits = [memory] * NUM_RANKS
    fixed = [s for s in fixed_schedules(stage_ranks, NUM_MICROBATCHES, limits, costs, until) if s.name != "naive"]
    searched = find_schedule(
        NUM_RANKS, NUM_MICROBATCHES, costs, max_activations=memory, until=until, stages_per_rank=stages_per_rank,
        placement=placement, evaluations=evaluations, time_limit=math.inf,
    )  # fmt: skip
    until_weight = until == "weight"
    model = Model.of(stage_ranks, NUM_MICROBATCHES, costs, limits, until_weight=until_weight, is_split=True)
    best = min(fixed, key=lambda s: simulate(s, costs).makespan, default=None)
    return Found(best, searched, float(model.lower_bound()), costs)


def row(case: tuple[int, int, int, int], memory: int, until: str, evaluations: int) -> str:
    cells = [str(memory), "W" if until == "weight" else "I"]
    found = {name: look(case, memory, until, name, evaluations) for name in ("straight", "looped", "v")}
    best_fixed = min(each.length(each.fixed) for each in found.values())
    best = min(each.length(each.searched) for each in found.values())
    for each in found.values():
        length = each.length(each.searched)
        fixed = "-" if each.fixed is None else f"{each.length(each.fixed):g} ({each.fixed.name})"
        cells += [fixed, f"**{length:g}**" if length <= each.bound else f"{length:g} (bound {each.bound:g})"]
    cells.append(f"{best_fixed:g} to {best:g}: {100 * (1 - best / best_fixed):.1f} %")
    print(" | ".join(cells), flush=True)
    return f"| {' | '.join(cells)} |"


def table(rows: list[str]) -> str:
    columns = ["memory", "until"]
    for name in ("straight", "looped", "V"):
        columns += [f"{name}: fixed", "searched"]
    columns.append("best: fixed to searched")
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000, help="schedules to look at in each search")
    evaluations = parser.parse_args().evaluations
    parts = [HEAD.format(evaluations=evaluations)]
    grid = list(product(CASES.values(), MEMORIES, ("weight", "input")))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = list(pool.map(row, *zip(*grid, strict=True), [evaluations] * len(grid)))
    for name, case in CASES.items():
        busy = NUM_MICROBATCHES * sum(case[:3])
        parts.append(f"## {name}\n\nEvery rank works for {busy}; the rest of a length is idle time.\n")
        own = [text for (other, *_), text in zip(grid, rows, strict=True) if other == case]
        parts.append(table(own) + "\n")
    Path(__file__).with_name("pipeline_search.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
