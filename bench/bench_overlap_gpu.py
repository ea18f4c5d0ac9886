"""GEMMs that overlap their collective, on one GPU: W virtual ranks share the device, and its memory is their link.

    fastpar bench overlap_gpu --device cuda [--op gather,scatter,reduce] [--virtual-ranks 2,4,8]
                              [--shapes 8192x2048x8192,...] [--link device,pcie] [--no-graphs]

What is timed, forked from one stream to a stream per rank and joined again, for x [rows, terms] and, on every rank, a
weight [cols, terms] (rows x cols x terms):

    gather    all_gather_gemm: every rank has rows/W rows of x and computes [rows, cols]
    scatter   gemm_reduce_scatter: every rank has its own x and keeps rows/W rows of the sum of all products
    reduce    gemm_all_reduce: likewise, and keeps all of the sum

The default shapes are those that QuACK's design record measures (K = 8192). What ranks send each other goes through the
device's memory: rates of that link mean nothing, and what counts is how much of it is hidden. With `--link pcie` every
block of rows goes to pinned memory of the host and back, through the copy engines: a real link, and a slow one (gather
only, with as many columns as it takes for the GEMM to last longer).

    over max   time / max(GEMM alone, communication alone)
    hidden     1 - (time - GEMM alone) / communication alone: the part of the communication that costs nothing

"GEMM alone" is the same persistent kernel with as many programs on the same streams, and nothing to wait for.
"communication alone" is what the ranks send each other, by copies, and for scatter and reduce torch's sum of them.
"one after the other" is torch's GEMM (cuBLAS) with all multiprocessors, rank after rank, and the same communication
after it, or for gather before it.

Flops model: 2 * W * rows * cols * terms.

Traps besides those of `bench.harness` and `bench.device`:

* One process launches the work of all ranks: 8 of them gather with 448 copies and flags, whose launches would be
  timed instead of the GEMMs. Every provider is therefore a CUDA graph, recorded once, and replays are what is checked
  and timed; `--no-graphs` times the launches, too.
* Virtual ranks contend for one device's memory and cache, as ranks on several devices do not.
* A copy within one device may be a kernel, which needs a multiprocessor; 8 are left out of the GEMMs for them, in "GEMM
  alone" too.
* Inputs are random normal numbers: integers and zeros draw less power and run at higher clocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.device import Recorded
from bench.harness import Case, Error, Provider, Rank, gemm_roof
from bench.options import DTYPES, Bench, parser, positive, positive_list, run
from bench.rows import Row

OPS = ("gather", "scatter", "reduce")
LINKS = ("device", "pcie")
COPY_PROCESSORS = 8
REDUCE_PROCESSORS = 16  # of all ranks together
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors; partial sums are rounded before they are added
Link = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class OverlapCase:
    """One op of `size` virtual ranks."""

    op: str
    dtype: str
    shape: tuple[int, int, int]
    size: int
    link: str = "device"
    graphs: bool = True
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        rows, cols, terms = self.shape
        return {
            "op": self.op, "dtype": self.dtype, "rows": rows, "cols": cols, "terms": terms, "virtual_ranks": self.size,
            "link": self.link, "graphs": self.graphs,
        }  # fmt: skip

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        rows, cols, terms = self.shape
        flops = 2.0 * self.size * rows * cols * terms

        def provider(name: str, kind: str, call: Callable[[], list[Tensor]], check: bool = True) -> Provider:
            call = Recorded(call) if self.graphs and problem.on_gpu else call
            return Provider(name, kind, call, (lambda: problem.errors(call)) if check else dict, flops=flops)

        providers = [provider("fastpar", "fastpar", problem.overlapped)]
        if self.op == "gather" and self.link == "device":
            providers.append(provider("fastpar, sent by programs", "fastpar", lambda: problem.overlapped("kernel")))
        return [
            *providers,
            provider("one after the other", "torch", problem.one_after_the_other),
            provider("communication alone", "bound", problem.communication, check=False),
            provider("GEMM alone", "bound", problem.gemms, check=False),
            gemm_roof(DTYPES[self.dtype], 1, device=rank.device, size=256 if rank.device == "cpu" else 0),
        ]


class Problem:
    """The tensors, buffers and streams of a case."""

    def __init__(self, case: OverlapCase, device: str) -> None:
        from fastpar.comm.symmetric.buffer import virtual_ranks
        from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer
        from fastpar.kernels.overlap_gemm_calls import multiprocessors

        self.case, self.on_gpu = case, device == "cuda"
        (rows, cols, terms), size, dtype = case.shape, case.size, DTYPES[case.dtype]
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device, generator=generator) * scale).to(dtype)

        self.xs = [random(rows // size if case.op == "gather" else rows, terms) for _ in range(size)]
        self.weights = [random(cols, terms, scale=terms**-0.5) for _ in range(size)]
        # Tiles in flight are whole, so what is sent may be up to a row and a column of tiles larger than the matrix.
        data = rows * terms if case.op == "gather" else 2 * (rows + 256 * size) * (cols + 256)
        capacity = 16384 if self.on_gpu else 256
        nbytes = 2 * data * dtype.itemsize + 4 * 4 * size * capacity + 4096
        self.buffers = [OverlapBuffer(b, flag_capacity=capacity) for b in virtual_ranks(size, nbytes, device)]
        self.streams = [torch.cuda.Stream() for _ in range(size)] if self.on_gpu else None
        # Where copies arrive: the gathered x of every rank, or the partial sums of every rank's rows and the whole sum.
        shard = (size, rows // size, cols)
        self.gathered = [torch.empty(rows, terms, dtype=dtype, device=device) for _ in range(size)]
        self.partials = [random(rows, cols) for _ in range(size)] if case.op != "gather" else []
        self.inboxes = [torch.empty(shard, dtype=dtype, device=device) for _ in self.partials]
        self.sums = [torch.empty(rows, cols, dtype=dtype, device=device) for _ in self.partials]
        processors = multiprocessors(torch.device(device))
        share = REDUCE_PROCESSORS // size if case.op != "gather" else 0
        self.reduce_programs = max(share, 1)
        self.programs = max((processors - COPY_PROCESSORS) // size - share, 1)
        self.links: list[Link] = [self._link() for _ in range(size)]

    def _link(self) -> Link:
        """How a block of rows of one rank travels."""
        if self.case.link == "device" or not self.on_gpu:
            return _copy
        pinned = torch.empty(self.xs[0].numel(), dtype=self.xs[0].dtype, pin_memory=True)

        def through_host(target: Tensor, source: Tensor) -> None:
            part = pinned[: source.numel()].view_as(source)
            part.copy_(source, non_blocking=True)
            target.copy_(part, non_blocking=True)

        return through_host

    def fan_out(self, work: Callable[[], Any]) -> Any:
        """`work` uses self.streams; they begin after the current stream, which goes on after them."""
        if self.streams is None:
            return work()
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        result = work()
        for stream in self.streams:
            current.wait_stream(stream)
        return result

    def on(self, rank: int) -> Any:
        """A context in which work goes to the stream of a rank."""
        return torch.cuda.stream(self.streams[rank] if self.streams else None)

    def join(self) -> None:
        """Every rank's stream waits for what all of them hold."""
        for stream in self.streams or []:
            for other in self.streams or []:
                stream.wait_stream(other)

    def calls(self, transport: Any) -> list[Any]:
        """One call per rank."""
        from fastpar.kernels.overlap_gemm_calls import AllGatherGemm, GemmReduce

        parts = list(zip(self.xs, self.weights, self.buffers, self.links, strict=True))
        options: dict[str, Any] = {"num_programs": self.programs}
        if self.case.op == "gather":
            options["chunks"] = 4
            return [AllGatherGemm(x, w, buffer=b, transport=transport or link, **options) for x, w, b, link in parts]
        options |= {"reduce_programs": self.reduce_programs, "replicate": self.case.op == "reduce"}
        return [GemmReduce(x, w, buffer=b, **options) for x, w, b, _ in parts]

    # ---- providers

    def overlapped(self, transport: str | None = None) -> list[Tensor]:
        """transport: of a gather; None: its link."""
        from fastpar.kernels.overlap_gemm import run_together

        calls = self.calls(transport)
        found: list[Tensor] = self.fan_out(lambda: run_together(calls, self.streams))
        return found

    def gemms(self) -> list[Tensor]:
        """Every rank's GEMM, side by side."""
        from fastpar.kernels.overlap_gemm import gemm

        def work() -> list[Tensor]:
            outs = []
            for rank, x in enumerate(self.gathered if self.case.op == "gather" else self.xs):
                with self.on(rank):
                    buffer, weight = self.buffers[rank], self.weights[rank]
                    outs.append(gemm(x, weight, buffer=buffer, num_programs=self.programs))
            return outs

        found: list[Tensor] = self.fan_out(work)
        return found

    def communication(self) -> list[Tensor]:
        found: list[Tensor] = self.fan_out(lambda: self._exchange(self.partials or self.xs))
        return found

    def one_after_the_other(self) -> list[Tensor]:
        linear = torch.nn.functional.linear
        if self.case.op == "gather":
            return [linear(x, w) for x, w in zip(self.communication(), self.weights, strict=True)]
        products = [linear(x, w) for x, w in zip(self.xs, self.weights, strict=True)]
        found: list[Tensor] = self.fan_out(lambda: self._exchange(products))
        return found

    def _exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """gather: parts are shards, and each rank gets all of them. scatter, reduce: partial sums, and their sums."""
        size, shard = self.case.size, self.case.shape[0] // self.case.size
        rows = [slice(rank * shard, (rank + 1) * shard) for rank in range(size)]
        gather = self.case.op == "gather"
        for rank, part in enumerate(parts):
            with self.on(rank):
                for step in range(size):
                    peer = (rank - step) % size
                    if gather:
                        send = self.links[rank] if step else _copy
                        send(self.gathered[peer][rows[rank]], part)
                    else:
                        _copy(self.inboxes[peer][rank], part[rows[peer]])
        if gather:
            return self.gathered
        self.join()
        for rank in range(size):
            with self.on(rank):
                total = self.inboxes[rank].sum(0, dtype=torch.float32)
                for peer in range(size) if self.case.op == "reduce" else [rank]:
                    _copy(self.sums[peer][rows[rank]], total)
        self.join()
        return self.sums if self.case.op == "reduce" else [self.sums[rank][rows[rank]] for rank in range(size)]

    # ---- check

    def errors(self, call: Callable[[], list[Tensor]]) -> dict[str, Error]:
        """The worst rank's relative error; sums in float32 (float64 on CPU) are exact enough."""
        wide = torch.float32 if self.on_gpu else torch.float64
        if self.case.op == "gather":
            x = torch.cat(self.xs).to(wide)
            exact = [x @ weight.to(wide).T for weight in self.weights]
        else:
            total = torch.zeros((), dtype=wide, device=self.xs[0].device)
            for x, weight in zip(self.xs, self.weights, strict=True):
                total = total + x.to(wide) @ weight.to(wide).T
            exact = list(total.chunk(self.case.size)) if self.case.op == "scatter" else [total] * self.case.size
        found = call()
        if self.on_gpu:
            torch.cuda.synchronize()
        for buffer in self.buffers:
            buffer.check()
        worst = max(float((f.to(wide) - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True))
        return {"out": Error(worst, TOLERANCES[self.case.dtype])}


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


# ------------------------------------------------------------------------------------------------------------- figures


def figures(rows: Sequence[Row]) -> str:
    """`over max` and `hidden` of the module docstring, for the rows of one case."""
    times = {row["provider"]: row["ms"]["median"] for row in rows if "ms" in row}
    if not {"GEMM alone", "communication alone"} <= times.keys():
        return ""
    gemm, communication = times["GEMM alone"], times["communication alone"]
    lines = [f"GEMM alone {gemm:.3f} ms, communication alone {communication:.3f} ms"]
    for row in rows:
        if row["kind"] in ("fastpar", "torch") and "ms" in row:
            time = row["ms"]["median"]
            over, hidden = time / max(gemm, communication), 1 - (time - gemm) / communication
            lines.append(f"  {row['provider']:26} over max {over:6.3f}   hidden {100 * hidden:6.1f} %")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    made = [
        OverlapCase(op, dtype, shape, size, link, flags.graphs)
        for dtype in flags.dtype
        for link in flags.link
        for op in flags.op
        for shape in flags.shapes
        for size in flags.virtual_ranks
        if link == "device" or op == "gather"
    ]
    for case in made:
        if case.shape[0] % case.size:
            raise SystemExit(f"fastpar bench overlap_gpu: {case.shape[0]} rows do not divide by {case.size} ranks")
    return made


def _shapes(text: str) -> list[tuple[int, int, int]]:
    found = []
    for part in text.split(","):
        numbers = [positive(n) for n in part.split("x")]
        if len(numbers) != 3:
            raise argparse.ArgumentTypeError(f"{part!r} is not rows x cols x terms, such as 8192x2048x8192")
        found.append((numbers[0], numbers[1], numbers[2]))
    return found


def _among(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wrong = [part for part in text.split(",") if part not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"unknown {wrong[0]!r}; choose from {', '.join(allowed)}")
        return text.split(",")

    return parse


BENCH = Bench(
    name="overlap_gpu",
    baselines=("GEMM alone",),
    cases=cases,
    memory=False,
    quick={"shapes": [(1024, 512, 1024)], "virtual_ranks": [2], "blocks": 3, "iters": 2},
    devices=("cuda",),
    figures=figures,
)


def main(argv: Sequence[str]) -> int:
    made = parser(
        BENCH, "GEMMs that overlap their collective, on one GPU", ranks=[1], dtype=["bf16"], device="cuda", iters=4
    )
    made.add_argument("--op", type=_among(OPS), default=list(OPS), metavar="LIST", help=", ".join(OPS))
    made.add_argument("--virtual-ranks", type=positive_list, default=[2, 4, 8], metavar="LIST", help="ranks on the GPU")
    made.add_argument("--link", type=_among(LINKS), default=["device"], metavar="LIST", help=", ".join(LINKS))
    made.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="time CUDA graphs")
    default = [(8192, 2048, 8192), (16384, 4096, 8192), (32768, 2048, 8192)]
    made.add_argument("--shapes", type=_shapes, default=default, metavar="LIST", help="rows x cols x terms")
    flags = made.parse_args(argv)
    if not torch.cuda.is_available() and not argv:
        print("fastpar bench overlap_gpu: left out, it needs a CUDA device", file=sys.stderr)
        return 0
    return run(BENCH, flags, ["fastpar", "bench", "overlap_gpu", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
