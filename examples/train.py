"""Train a Llama-style model on real text in any layout, then check it against one process.

    torchrun --nproc-per-node 4 examples/train.py                                             # tp2 dp2, on CPU
    torchrun --nproc-per-node 4 examples/train.py --layout "pp2 tp2 sp zbv mb4 zero1 full"
    torchrun --nproc-per-node 4 examples/train.py --layout "pp2 dp2 ep2 mb2 zero1" --experts 8
    python examples/train.py --data my_texts/ --no-compare        # one process, no launcher

`train_parallel` is the part to copy: `fp.assemble`, and a loop over `step`. `train_single` is the same training in one
process, in plain PyTorch. Their losses differ by rounding only; the exit status is 1 if they differ by more than
`TOLERANCE`. Figures go to --out. The bytes of the table are measured in the second step (see memory.py).
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from data import VOCAB_SIZE, Corpus, load_corpus
from memory import MemoryMeter
from model import PLAN, Llama, LlamaConfig
from torch import nn
from torch.nn import functional as F

import fastpar as fp

TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": None}  # bfloat16 rounds too early for a bound worth having
WARMUP_STEPS = 10
FINAL_LR_FRACTION = 0.1
MEASURED_STEP = 1  # the first one has no optimizer states yet


@dataclass(frozen=True)
class Job:
    """What to train: everything that decides the losses, and nothing that depends on the layout."""

    model: LlamaConfig
    steps: int
    batch: int  # samples per step, over all ranks
    seq_len: int
    lr: float
    seed: int
    dtype: str
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if min(self.steps, self.batch) < 1 or self.lr <= 0:
            raise ValueError(f"steps, batch and lr must be positive, got {self.steps}, {self.batch} and {self.lr}")
        if self.precision != "fp32" and self.dtype != "float32":
            raise ValueError(f"--precision {self.precision} has float32 masters, but --dtype is {self.dtype}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    def build_model(self) -> Llama:
        """The model with its initial weights: the same on every rank, as they come from the seed alone."""
        torch.manual_seed(self.seed)
        return Llama(self.model).to(getattr(torch, self.dtype))

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `FINAL_LR_FRACTION`."""
        decay = FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
        return decay * min(1.0, (step + 1) / WARMUP_STEPS)


def train_parallel(job: Job, layout: fp.Layout, corpus: Corpus, out: Path | None = None) -> report.Run:
    """Train under `layout`, on all ranks; each returns the same losses."""
    meters = []

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = job.make_optimizer(parameters)
        meters.append(MemoryMeter(nn.ModuleList(), optimizer))  # now: it must see what a step is about to free
        return optimizer

    options: dict[str, Any] = {"precision": None if job.precision == "fp32" else job.precision}
    options |= {"scheduler": job.make_scheduler, "plan": PLAN if layout.cp > 1 else "auto"}
    trained = fp.assemble(job.build_model(), layout, make_optimizer, **options)
    memory = meters[0].watch(nn.ModuleList(trained.parts), trained.zero)

    with report.Meter(layout.words, job.steps, job.tokens_per_step, visible=rank() == 0) as meter:
        for step in range(job.steps):
            samples = [number - step * job.batch for number in trained.samples(step, job.batch)]
            with memory.watching(step == min(MEASURED_STEP, job.steps - 1)):
                result = trained.step(corpus.batch(step, samples))
            meter.step_done(result.loss, report.loads_of(trained.parts, trained.mesh, layout))
    meter.run.memory = memory.most_of_all_ranks()
    explanation = trained.explain()
    if out is not None and rank() == 0:
        explanation.svg(out / "layout.svg")
        print(explanation)
    trained.close()
    return meter.run


def train_single(job: Job, corpus: Corpus, layout: fp.Layout | None = None) -> report.Run:
    """Train in this process with plain PyTorch. `layout` says which samples are in a microbatch together, of whose
    balance losses the step's is the mean."""
    model = job.build_model()
    optimizer = job.make_optimizer(list(model.parameters()))
    schedule = job.make_scheduler(optimizer)
    memory = MemoryMeter(model, optimizer)
    parts = microbatches(job, layout or fp.Layout()) if job.model.num_experts else [list(range(job.batch))]
    fp.expert.set_loss_scale(model, 1 / len(parts))

    with report.Meter("single process", job.steps, job.tokens_per_step) as meter:
        for step in range(job.steps):
            total = 0.0
            with memory.watching(step == min(MEASURED_STEP, job.steps - 1)):
                for part in parts:
                    input_ids, targets = corpus.batch(step, part)
                    logits = model(input_ids)  # [batch, seq, vocab]
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(parts)
                    loss.backward()
                    total += loss.item()
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.step_done(total, report.loads_of([model]))
    meter.run.memory = memory.most_of_all_ranks()
    return meter.run


def microbatches(job: Job, layout: fp.Layout) -> list[list[int]]:
    """The samples of a step that are in a microbatch together, on all data-parallel ranks."""
    count = layout.accumulate * (layout.pipeline.microbatches if layout.pp > 1 else 1)
    shares = [share.tensor_split(count) for share in torch.arange(job.batch).tensor_split(layout.dp)]
    return [torch.cat(rows).tolist() for rows in zip(*shares, strict=True)]


def rank() -> int:
    """This process's rank under torchrun; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--layout", type=str, metavar="WORDS", help="such as 'pp2 tp2 sp mb4 zero1' (tp2 and dp for the rest)")
    add("--experts", default=0, help="in every layer, in the place of its MLP (%(default)s: none)")
    add("--top-k", default=2, help="experts of a token (%(default)s)")
    add("--balance", default=0.01, type=float, metavar="C", help="coefficient of the balance loss (%(default)s)")
    for name, default in (("--steps", 80), ("--seed", 0), ("--layers", 4)):
        add(name, default=default)
    add("--batch", default=8, help="sequences per step, over all ranks (%(default)s)")
    add("--seq-len", default=256, help="bytes per sequence (%(default)s)")
    add("--lr", default=2e-3, type=float, metavar="LR", help="peak learning rate (%(default)s)")
    add("--hidden", default=256, help="hidden size (%(default)s)")
    add("--heads", default=8, help="query heads (%(default)s)")
    add("--kv-heads", default=4, help="key/value heads (%(default)s)")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="fp32", help="with float32 masters")
    add("--data", default=None, type=Path, metavar="PATH", help="text file or folder (Python's standard library)")
    add("--out", default=Path("runs/demo"), type=Path, metavar="DIR", help="for pictures, report.json (%(default)s)")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="with one process")
    add("--torch-threads", default=1, help="CPU threads of each process (%(default)s)")
    return parser.parse_args(argv)


def make_job(a: argparse.Namespace) -> tuple[Job, fp.Layout, Corpus]:
    """Everything the flags ask for, checked; ValueError or OSError says what is wrong with them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = fp.Layout.parse(a.layout) if a.layout else fp.Layout(tp=2 - world % 2, dp_shard=world // (2 - world % 2))
    if layout.cp > 1 and a.experts:
        raise ValueError(f"cp is {layout.cp}, and balance losses are not for split sequences: leave --experts out")
    inner = -(-a.hidden * 8 // 3 // 64) * 64  # SwiGLU's usual 8/3, rounded up to a multiple of 64
    shape = {"hidden_size": a.hidden, "intermediate_size": inner, "num_hidden_layers": a.layers}
    heads = {"num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads}
    experts = {"num_experts": a.experts, "num_experts_per_tok": a.top_k, "router_aux_loss_coef": a.balance}
    model = LlamaConfig(vocab_size=VOCAB_SIZE, **shape, **heads, **experts)
    job = Job(model, a.steps, a.batch, a.seq_len, a.lr, a.seed, a.dtype, a.precision)
    layout.check(fp.planner.find_model(dataclasses.asdict(model)), world_size=world, batch=a.batch)
    if a.torch_threads < 1:
        raise ValueError(f"--torch-threads must be at least 1, got {a.torch_threads}")
    a.out.mkdir(parents=True, exist_ok=True)  # now, as it would be a pity to find out after training
    return job, layout, load_corpus(a.data, a.seq_len, a.seed)


def main(argv: list[str] | None = None) -> int:
    """Run, and return the exit status: 0, 1 if the two runs differ, 2 if the flags are wrong."""
    arguments = parse_arguments(argv)
    try:
        job, layout, corpus = make_job(arguments)
    except (ValueError, OSError) as error:
        print(f"train.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.torch_threads)
    parallel = train_parallel(job, layout, corpus, arguments.out)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank() != 0:
        return 0
    comparison = None
    if arguments.compare:
        tolerance = TOLERANCE[job.dtype] if job.precision == "fp32" else None  # of 16 bits: not judged
        comparison = report.Comparison(parallel, train_single(job, corpus, layout), tolerance)
    settings = dataclasses.asdict(job) | {"layout": layout.words, "corpus": corpus.source}
    settings["threads_per_process"] = arguments.torch_threads
    report.save(arguments.out, settings, parallel, comparison)
    return 0 if comparison is None or comparison.passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # torchrun tells every rank: one line instead of a traceback from each
        sys.exit("train.py: interrupted" if rank() == 0 else 130)
