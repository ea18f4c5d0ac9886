"""Processor time of `Assembled.step` over that of a loop by hand: `python -m tests.assembly.assembly_cost`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import fastpar as fp
from tests.assembly.assembly_cells import Cell, build
from tests.dist import run_ranks

ROUNDS, STEPS = 15, 10


def seconds_of_a_step(words: str) -> tuple[float, float]:
    """(by `step`, by hand) in a tiny model, interleaved: medians of rounds."""
    cell = Cell(words)
    made = [
        fp.assemble(build(cell), cell.layout, lambda params: torch.optim.SGD(params, lr=1e-3), max_norm=1.0)
        for _ in range(2)
    ]
    mine, other = made
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(51, (4, 9), generator=generator)
    inputs, target = ids[:, :-1], ids[:, 1:]
    model, optimizer, pipe = other.parts[0], other.optimizer, other._made.pipe

    def by_hand() -> float:
        if pipe is not None:
            loss = pipe.step(inputs, target=target)
        else:
            loss = fp.ops.vocab_parallel_cross_entropy(model(inputs), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def by_step() -> float:
        return mine.step((inputs, target)).loss

    times: dict[Any, list[float]] = {by_step: [], by_hand: []}
    for round_ in range(ROUNDS + 2):
        for function, found in times.items():
            began = time.process_time()
            for _ in range(STEPS):
                function()
            if round_ >= 2:  # the first ones warm up
                found.append((time.process_time() - began) / STEPS)
    for each in made:
        each.close()
    return statistics.median(times[by_step]), statistics.median(times[by_hand])


if __name__ == "__main__":
    from tests.assembly.assembly_cost import seconds_of_a_step as measured  # by a name that ranks can import

    for size, words in ((1, "one rank"), (2, "dp2 zero1"), (2, "tp2"), (2, "tp2 sp"), (2, "pp2 mb2")):
        for rank, (step, hand) in enumerate(run_ranks(size, measured, words)):
            print(f"{words}, rank {rank}: step {step * 1e3:.2f} ms, by hand {hand * 1e3:.2f} ms of processor time")
