"""Draws the pictures of docs/pipeline.md:  python docs/draw_schedules.py"""

from fractions import Fraction
from pathlib import Path

from fastpar.pipeline import Costs, Timeline, make_schedule, simulate
from fastpar.pipeline.simulation.plot import plot

HERE = Path(__file__).parent
WIDTH = 9.5


def timeline(name: str, costs: Costs, num_ranks: int = 4, num_microbatches: int = 8) -> Timeline:
    return simulate(make_schedule(name, num_ranks, num_microbatches), costs).timeline


def main() -> None:
    whole, half = Costs(2, 2, 2), Costs(1, 1, 1)  # of a quarter of the model; of an eighth
    bubbles = [timeline("1f1b", whole), timeline("zb_h1", whole), timeline("zbv", half)]
    plot(bubbles, HERE / "schedules_bubble.svg", width=WIDTH)
    hop = Costs(hop=Fraction(1, 2))
    latency = [timeline(name, hop) for name in ("1f1b", "eager_1f1b")]
    plot(latency, HERE / "schedules_latency.svg", arrows=True, width=WIDTH)
    others = [timeline("dualpipe", Costs(overlap=Fraction(4, 5))), timeline("pipedream", Costs())]
    plot(others, HERE / "schedules_overlap.svg", width=WIDTH)


if __name__ == "__main__":
    main()
