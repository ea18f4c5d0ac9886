"""A picture of what data parallelism waits for: one training step at each ZeRO stage.

    torchrun --nproc-per-node 2 examples/overlap.py [--picture overlap.png] [--trace overlap]

Of every stage two rows, of rank 0: what it does (forward, backward, step), with what it waits for in black; and below
which collectives are in flight, from their launch to the moment that their result is there. `--trace` also writes
overlap.stage0.json, ..., for ui.perfetto.dev. On one host the gathers of stage 3 are copies out of shared memory and no
collectives, so they are not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.comm import CommTrace, trace

COLOURS = {"forward": "#4c9be8", "backward": "#e8894c", "step": "#7dbb6a"}
VOCAB, TOKENS, BATCH, STEPS = 8192, 256, 2, 4


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 8 * hidden), nn.Linear(8 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(hidden: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Layer(hidden) for _ in range(layers)])
    return nn.Sequential(nn.Embedding(VOCAB, hidden), *blocks, nn.Linear(hidden, VOCAB))


def traced_step(stage: int, hidden: int, layers: int) -> CommTrace:
    """The last of a few steps."""
    model = model_of(hidden, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage)
    tokens = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(STEPS):
        dist.barrier()
        with trace() as found:
            with found.phase("forward"):
                logits = model(tokens[:, :-1])
                loss = fp.ops.vocab_parallel_cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            with found.phase("backward"):
                loss.backward()
            with found.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
    return found


def draw(traces: dict[int, CommTrace], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1 + 1.1 * len(traces)), layout="constrained")
    all_axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (stage, found) in zip(all_axes, traces.items(), strict=True):
        for name, begin, end in found.phases:
            axes.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (1, 0.9), color=COLOURS[name])
        for span in found.spans:
            blocked = [(span.launched, span.returned), *span.waits]
            axes.broken_barh([(1e3 * begin, 1e3 * (end - begin)) for begin, end in blocked], (1, 0.9), color="black")
            axes.broken_barh(
                [(1e3 * span.launched, 1e3 * (span.done - span.launched))], (0, 0.9), color="#999", alpha=0.6
            )
        waited = ", ".join(f"{1e3 * found.waited(name):.0f} ms of {name}" for name in COLOURS)
        axes.set_title(f"stage {stage}: waits in {waited}", loc="left", fontsize=9)
        axes.set_yticks([0.45, 1.45], ["in flight", "rank 0"], fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    all_axes[-1].set_xlabel("ms")
    patches = [
        *(Patch(color=colour, label=name) for name, colour in COLOURS.items()),
        Patch(color="black", label="waits"),
    ]
    figure.legend(handles=patches, ncols=4, loc="outside upper right", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("overlap.png"))
    parser.add_argument("--trace", metavar="PREFIX", help="write Chrome traces PREFIX.stageN.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    flags = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    traces = {stage: traced_step(stage, flags.hidden, flags.layers) for stage in range(4)}
    if dist.get_rank() == 0:
        for stage, found in traces.items():
            total = max(end for _, _, end in found.phases)
            print(f"stage {stage}: step {1e3 * total:.0f} ms, waits for collectives {1e3 * found.waited():.0f} ms")
            if flags.trace:
                found.to_chrome_trace(f"{flags.trace}.stage{stage}.json")
        draw(traces, flags.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
