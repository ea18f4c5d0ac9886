"""Train a Llama-style model on real text with tensor, pipeline and data parallelism, then check it against one process.

    torchrun --nproc-per-node 4 examples/train.py                 # TP 2 x DP 2, on CPU
    torchrun --nproc-per-node 4 examples/train.py --tp 4 --sequence-parallel
    torchrun --nproc-per-node 4 examples/train.py --pp 2 --schedule zbv --microbatches 8
    torchrun --nproc-per-node 4 examples/train.py --tp 1 --zero 3 --precision bf16 --accumulate 2
    torchrun --nproc-per-node 4 examples/train.py --experts 8 --top-k 2 --ep 2 --zero 3
    python examples/train.py --data my_texts/ --no-compare        # one process, no launcher

`train_parallel` is the part to copy: an ordinary training loop, plus a mesh, `fp.parallelize`, a loss that takes logits
split over the vocabulary, and `fp.zero.shard`, which makes the optimizer data-parallel: with --zero 0 gradients are
averaged over the ranks, 1, 2 and 3 also split optimizer states, gradients and parameters. `train_single` is the same
loop in float32, without fastpar. Both start from the same weights and read the same batches, so their losses differ by
rounding only; the exit status is 1 if they differ by more than `TOLERANCE`. The figures go to --out: losses.png and
report.json. The bytes of the table are measured in the second step (see memory.py).
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from data import VOCAB_SIZE, Corpus, load_corpus
from memory import KINDS, MemoryMeter
from model import Llama, LlamaConfig
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.comm import Communicator

TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": None}  # bfloat16 rounds too early for a bound worth having
PRECISION = {"fp32": None, "bf16": fp.Precision.bf16(), "fp16": fp.Precision.fp16()}
WARMUP_STEPS = 10
FINAL_LR_FRACTION = 0.1
MEASURED_STEP = 1  # the first one has no optimizer states yet


@dataclass(frozen=True)
class Layout:
    """How many ranks there are and how they share the work."""

    pp: int
    tp: int
    dp: int
    sequence_parallel: bool
    schedule: str = "1f1b"  # of the pipeline, and what follows: for pp > 1
    microbatches: int = 4
    parts: str | None = None
    zero: int = 0
    offload: str = "none"
    accumulate: int = 1  # forward and backward passes per step; of the whole pipeline, where there is one
    ep: int = 1  # ranks that the experts are spread over

    @staticmethod
    def of_world(
        world_size: int, pp: int, tp: int | None, dp: int | None, sequence_parallel: bool, **rest_of_it: Any
    ) -> "Layout":
        """Fill in what was not asked for: data parallelism takes the ranks that the others leave, and tensor
        parallelism is 2 where that divides them."""
        rest = world_size // max(pp, 1)
        if tp is None:
            tp = (2 if rest % 2 == 0 else 1) if dp is None else rest // max(dp, 1)
        if dp is None:
            dp = rest // max(tp, 1)
        if min(pp, tp, dp) < 1 or pp * tp * dp != world_size:
            raise ValueError(
                f"--pp ({pp}) times --tp ({tp}) times --dp ({dp}) must be the number of processes ({world_size}); "
                f"start them with: torchrun --nproc-per-node {max(pp * tp * dp, 1)} examples/train.py"
            )
        return Layout(pp, tp, dp, sequence_parallel, **rest_of_it)

    @property
    def name(self) -> str:
        pipeline = f"PP {self.pp} ({self.schedule}) x " if self.pp > 1 else ""
        zero = f" (ZeRO-{self.zero})" if self.zero else ""
        where, _, what = self.offload.partition(":")[0].partition("+")
        offload = "" if where == "none" else f", states {'and parameters ' if what else ''}on {where}"
        experts = f", EP {self.ep}" if self.ep > 1 else ""
        sequence = " + SP" if self.sequence_parallel else ""
        return f"{pipeline}TP {self.tp} x DP {self.dp}{zero}{sequence}{experts}{offload}"

    def share(self, batch: int, dp_rank: int) -> list[range]:
        """Which samples of a global batch a rank reads, one forward pass after the other."""
        size = batch // self.dp // self.accumulate
        first = dp_rank * self.accumulate
        return [range(size * part, size * (part + 1)) for part in range(first, first + self.accumulate)]


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
            raise ValueError(
                f"--precision {self.precision} keeps float32 master weights, but --dtype is {self.dtype}: leave one out"
            )

    @property
    def tolerance(self) -> float | None:
        """How far the losses may be from those of the single process; None: too far to be judged."""
        return TOLERANCE[self.dtype] if self.precision == "fp32" else None

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    def build_model(self) -> Llama:
        """The model with its initial weights: the same on every rank, as they come from the seed alone."""
        torch.manual_seed(self.seed)
        return Llama(self.model).to(getattr(torch, self.dtype))

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `FINAL_LR_FRACTION`."""
        decay = FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
        return decay * min(1.0, (step + 1) / WARMUP_STEPS)


def train_parallel(job: Job, layout: Layout, corpus: Corpus) -> report.Run:
    """Train under `layout`, on all ranks; each returns the same losses."""
    mesh = fp.init_mesh(pp=layout.pp, dp_shard=layout.dp, tp=layout.tp, ep=layout.ep, device="cpu")
    dp = Communicator(mesh.group("dp"))
    scaler = fp.LossScaler(mesh=mesh, enabled=job.precision == "fp16")

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        """Of one forward pass, as its part of the step's loss; scaled up where float16 would lose its gradients."""
        loss = fp.ops.vocab_parallel_cross_entropy(logits, targets, group=mesh["tp"], inplace_backward=True)
        return scaler.scale(loss / layout.accumulate)

    model: nn.Module | fp.pipeline.Pipeline
    if layout.pp > 1:
        model = build_pipeline(job, layout, mesh, loss_of)
    else:
        model = fp.parallelize(job.build_model(), mesh, sequence_parallel=layout.sequence_parallel)
    if isinstance(model, nn.Module):
        tell_routers(model, mesh, layout)
    optimizer, schedule = build_optimizer(model, job)
    memory = MemoryMeter(model, optimizer)
    memory.zero = shard(model, optimizer, mesh, job, layout)

    with report.Meter(layout.name, job.steps, job.tokens_per_step, visible=rank() == 0) as meter:
        for step in range(job.steps):
            with memory.watching(step == min(MEASURED_STEP, job.steps - 1)):
                total = torch.zeros(())
                if isinstance(model, nn.Module):  # the balance losses of routers are scaled as the others
                    fp.expert.set_loss_scale(model, scaler.get_scale() / layout.accumulate)
                for samples in layout.share(job.batch, mesh.rank("dp")):
                    input_ids, targets = corpus.batch(step, samples)
                    if isinstance(model, fp.pipeline.Pipeline):
                        loss = model.step(input_ids, target=targets)  # forward and backward of all microbatches
                    else:
                        logits = model(input_ids)  # [batch, seq, vocab / tp]
                        loss = loss_of(logits, targets)
                        loss.backward()
                    total += loss.detach() / scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
            schedule.step()
            optimizer.zero_grad()
            meter.step_done(dp.all_reduce(total, "avg").item(), loads_of(model, mesh, layout))
    meter.run.memory = most_of_all_ranks(memory)
    return meter.run


def tell_routers(model: nn.Module, mesh: fp.Mesh, layout: Layout) -> None:
    """Which ranks have other tokens of the batch: what "balance" means is then the same in every layout."""
    for module in model.modules():
        if isinstance(module, fp.expert.Router):
            module.batch_comms = [Communicator(mesh.group("dp"))]
            if layout.sequence_parallel:
                module.comm = Communicator(mesh.group("tp"))


def loads_of(model: nn.Module | fp.pipeline.Pipeline, mesh: fp.Mesh | None, layout: Layout | None) -> list[list[int]]:
    """How many tokens each expert got since the last call, by layer."""
    if not isinstance(model, nn.Module):
        return []
    loads = [*fp.expert.expert_loads(model, reset=True).values()]
    if not loads:
        return []
    total = torch.stack(loads)
    if mesh is not None and layout is not None:
        for dim in ("dp", "tp") if layout.sequence_parallel else ("dp",):
            total = Communicator(mesh.group(dim)).all_reduce(total)
    return total.tolist()


def shard(
    model: nn.Module | fp.pipeline.Pipeline, optimizer: torch.optim.Optimizer, mesh: fp.Mesh, job: Job, layout: Layout
) -> fp.zero.Zero:
    """Make the optimizer data-parallel. A pipeline runs backward once for each of its microbatches, and its gradients
    are reduced after the last."""
    return fp.zero.shard(
        model if isinstance(model, nn.Module) else model.parameters(),
        optimizer,
        group=mesh,
        stage=layout.zero,
        precision=PRECISION[job.precision],
        accumulate=layout.accumulate,
        overlap=isinstance(model, nn.Module),
        offload=layout.offload,
    )


def build_pipeline(job: Job, layout: Layout, mesh: fp.Mesh, loss: Callable[..., Tensor]) -> fp.pipeline.Pipeline:
    """This rank's stages, their layers split over the tensor-parallel ranks, and the schedule that runs them."""
    return fp.parallelize_pipeline(
        job.build_model(),
        mesh,
        layout.schedule,
        num_microbatches=layout.microbatches,
        layout=layout.parts,
        loss=loss,
        plan="auto",
        sequence_parallel=layout.sequence_parallel,
    )


def most_of_all_ranks(memory: MemoryMeter) -> dict[str, int]:
    """Peak bytes by kind, of the rank that has most of it."""
    peaks = torch.tensor([*(memory.peaks[kind] for kind in KINDS), memory.together])
    if dist.is_initialized():
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return dict(zip([*KINDS, "all together"], peaks.tolist(), strict=True))


def train_single(job: Job, corpus: Corpus) -> report.Run:
    """Train in this process with plain PyTorch."""
    model = job.build_model()
    optimizer, schedule = build_optimizer(model, job)
    memory = MemoryMeter(model, optimizer)

    with report.Meter("single process", job.steps, job.tokens_per_step) as meter:
        for step in range(job.steps):
            with memory.watching(step == min(MEASURED_STEP, job.steps - 1)):
                input_ids, targets = corpus.batch(step, range(job.batch))
                logits = model(input_ids)  # [batch, seq, vocab]
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.step_done(loss.item(), loads_of(model, None, None))
    meter.run.memory = most_of_all_ranks(memory)
    return meter.run


def build_optimizer(
    model: nn.Module | fp.pipeline.Pipeline, job: Job
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, job.lr_factor)


def rank() -> int:
    """This process's rank under torchrun; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--tp", help="tensor-parallel ranks (2 where the number of processes is even, else 1)")
    add("--dp", help="data-parallel ranks (the rest)")
    add("--pp", default=1, help="pipeline ranks (%(default)s)")
    add("--schedule", default="1f1b", type=str, metavar="NAME", help="of the pipeline: `fastpar simulate` lists them")
    add("--microbatches", default=4, help="of a pipeline's step, on every data-parallel rank (%(default)s)")
    add("--parts", type=str, metavar="LAYOUT", help="which layers go where, such as E,t|t*3,H (balanced by cost)")
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=False)
    add("--zero", default=0, choices=(0, 1, 2, 3), metavar="STAGE", help="what data-parallel ranks split (%(default)s)")
    add(
        "--offload",
        default="none",
        type=str,
        metavar="WHERE",
        help="optimizer states: none, cpu or nvme:FOLDER; with the parameters of --zero 3: cpu+parameters or "
        "nvme+parameters:FOLDER",
    )
    add("--accumulate", default=1, help="forward and backward passes per step (%(default)s)")
    add("--experts", default=0, help="in every layer, in the place of its MLP (%(default)s: none)")
    add("--top-k", default=2, help="experts of a token (%(default)s)")
    add("--ep", default=1, help="ranks that the experts are spread over (%(default)s)")
    add("--balance", default=0.01, type=float, metavar="C", help="coefficient of the balance loss (%(default)s)")
    add("--steps", default=80)
    add("--batch", default=8, help="sequences per step, over all ranks (%(default)s)")
    add("--seq-len", default=256, help="bytes per sequence (%(default)s)")
    add("--lr", default=2e-3, type=float, metavar="LR", help="peak learning rate (%(default)s)")
    add("--seed", default=0)
    add("--hidden", default=256, help="hidden size (%(default)s)")
    add("--layers", default=4)
    add("--heads", default=8, help="query heads (%(default)s)")
    add("--kv-heads", default=4, help="key/value heads (%(default)s)")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--precision", choices=sorted(PRECISION), default="fp32", help="with float32 master weights")
    add("--data", default=None, type=Path, metavar="PATH", help="text file or folder (Python's standard library)")
    add("--out", default=Path("runs/demo"), type=Path, metavar="DIR", help="for losses.png, report.json (%(default)s)")
    parser.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=True, help="train a second time in one process"
    )
    add("--torch-threads", default=1, help="CPU threads of each process (%(default)s)")
    return parser.parse_args(argv)


def check_offload(where: str, stage: int) -> None:
    try:
        offload = fp.zero.Offload.of(where)
    except ValueError:
        raise ValueError(
            "--offload must be none, cpu, cpu+parameters, nvme:FOLDER or nvme+parameters:FOLDER, got " + repr(where)
        ) from None
    if offload is not None and offload.parameters and stage != 3:
        raise ValueError(f"--offload {where} is for the parameters of --zero 3, got --zero {stage}")


def make_job(arguments: argparse.Namespace) -> tuple[Job, Layout, Corpus]:
    """Everything the flags ask for, checked; ValueError or OSError says what is wrong with them."""
    a = arguments
    names = ("schedule", "microbatches", "parts", "zero", "offload", "accumulate", "ep")
    rest = {name: getattr(a, name) for name in names}
    layout = Layout.of_world(int(os.environ.get("WORLD_SIZE", "1")), a.pp, a.tp, a.dp, a.sequence_parallel, **rest)
    model = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=a.hidden,
        intermediate_size=-(-a.hidden * 8 // 3 // 64) * 64,  # SwiGLU's usual 8/3, rounded up to a multiple of 64
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        num_experts=a.experts,
        num_experts_per_tok=a.top_k,
        router_aux_loss_coef=a.balance,
    )
    check_experts(a, layout)
    job = Job(model, a.steps, a.batch, a.seq_len, a.lr, a.seed, a.dtype, a.precision)
    if a.accumulate < 1 or a.batch % (layout.dp * a.accumulate):
        raise ValueError(
            f"--batch ({a.batch}) must be a multiple of the data-parallel ranks ({layout.dp}) times --accumulate "
            f"({a.accumulate})"
        )
    check_offload(a.offload, layout.zero)
    if layout.pp > 1 and layout.zero == 3:
        raise ValueError("--zero 3 gathers the parameters of whole models, not of --pp stages: take --zero 2")
    if layout.pp > 1:
        fp.pipeline.make_schedule(layout.schedule, layout.pp, layout.microbatches)
        each = a.batch // layout.dp // a.accumulate
        if each < layout.microbatches:
            raise ValueError(
                f"--batch ({a.batch}) gives each data-parallel rank {each} sequences at a time, which cannot be cut "
                f"into {layout.microbatches} --microbatches"
            )
    if a.torch_threads < 1:
        raise ValueError(f"--torch-threads must be at least 1, got {a.torch_threads}")
    a.out.mkdir(parents=True, exist_ok=True)  # now, as it would be a pity to find out after training
    return job, layout, load_corpus(a.data, a.seq_len, a.seed)


def check_experts(a: argparse.Namespace, layout: Layout) -> None:
    """Raise ValueError for what does not go together with --experts."""
    if not a.experts:
        if a.ep > 1:
            raise ValueError(f"--ep ({a.ep}) spreads experts: say how many with --experts")
        return
    if layout.pp > 1:
        raise ValueError("--experts is for --pp 1: pipelines of this trainer have dense layers")
    if a.ep < 1 or (layout.tp * layout.dp) % a.ep or a.experts % a.ep:
        raise ValueError(
            f"--ep ({a.ep}) must divide --tp ({layout.tp}) times --dp ({layout.dp}), and --experts ({a.experts})"
        )
    if a.balance and a.accumulate > 1:
        raise ValueError(
            "--balance is over all tokens of a forward pass, which --accumulate makes fewer: add --balance 0"
        )


def main(argv: list[str] | None = None) -> int:
    """Run, and return the exit status: 0, 1 if the two runs differ, 2 if the flags are wrong."""
    arguments = parse_arguments(argv)
    try:
        job, layout, corpus = make_job(arguments)
    except (ValueError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2

    torch.set_num_threads(arguments.torch_threads)
    parallel = train_parallel(job, layout, corpus)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank() != 0:
        return 0

    comparison = None
    if arguments.compare:
        comparison = report.Comparison(parallel, train_single(job, corpus), job.tolerance)

    report.print_table(parallel, comparison)
    settings = dataclasses.asdict(job) | {"layout": dataclasses.asdict(layout), "corpus": corpus.source}
    settings["threads_per_process"] = arguments.torch_threads
    report.save_json(arguments.out / "report.json", settings, parallel, comparison)
    report.save_plot(arguments.out / "losses.png", parallel, comparison)
    pictures = "losses.png"
    if parallel.loads:
        report.save_loads(arguments.out / "loads.png", parallel)
        pictures += ", loads.png"
    print(f"wrote {arguments.out}/report.json and {pictures}")
    return 0 if comparison is None or comparison.passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # torchrun tells every rank: one line instead of a traceback from each
        sys.exit("train.py: interrupted" if rank() == 0 else 130)
