"""Predicted steps of twelve layouts beside measured ones: two CPU ranks, a machine that they have calibrated before.

    fastpar bench planner [--quick] [--rounds 3] [--machine FILE.json] [--layouts tp2,"pp2 zbv mb4"] [--out FILE.json]

A Llama of 12 layers, hidden 512, float32, AdamW, 8 sequences of 256 tokens a step; tensor parallelism with and without
sequence parallelism, data parallelism in ZeRO stages 0 to 3, pipelines by four schedules, selective and full
recomputation. Every round runs every layout, in turn, from building to two steps, of which the second counts; a
layout's step is the median of its rounds. Memory has a run of its own, in processes of its own for each layout
(`--rounds 0`: only that, on a machine that need not be quiet).

Shown: predicted and measured seconds and memory of each; of the pairs predicted 10 % apart and more how many are in the
right order (target: 95 %); how far memory is off (target: 5 %). The exit status is 0 if both targets are met.

    memory    what a rank's anonymous and shared memory grow by, from before the model is built to the peak of the
              third step; of all ranks the most. Counted from VmHWM, which is set back before that step

Traps: calibrate in the same run, since another day's machine is another one; let nothing else run, two ranks have all
cores; the first step allocates, and does not count; imports and first calls grow a process once, so tiny steps come
before. VmHWM has what malloc keeps of freed tensors, half as much again: memory is measured with every tensor a
mapping of its own (M_MMAP_THRESHOLD), which costs time, and the steps that are timed keep the defaults. It has pages of
files, which come and go with what else the machine does, and pages of shared segments for each rank that maps them:
the former are left out, of the latter a rank has its share (Pss). VmHWM does not tell them apart, and they are counted
after the step: before the third one, buckets are made anew in the order of gradients, and their pages are touched late
in the second.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar import _ext
from fastpar.layouts import Layout
from fastpar.planner import Machine, Workload, find_machine, find_model
from fastpar.planner.calibration import calibrate
from fastpar.planner.refine import RefinedLayout, refine
from fastpar.planner.workload import BytesPerParameter

LAYOUTS = (
    "tp2",
    "tp2 sp",
    "dp2",
    "dp2 zero1",
    "dp2 zero2",
    "dp2 zero3",
    "pp2 gpipe mb4",
    "pp2 1f1b mb2",
    "pp2 1f1b mb8",
    "pp2 zbv mb4",
    "dp2 selective",
    "tp2 full",
)
MODEL = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
BATCH, SEQ = 8, 256
_M_MMAP_THRESHOLD = -3  # of malloc.h
APART, RIGHT_ORDER, MEMORY_ERROR = 0.10, 0.95, 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench and return its exit status."""
    flags = _parser().parse_args(arguments)
    config = {**MODEL, **(QUICK if flags.quick else {})}
    rounds = min(1, flags.rounds) if flags.quick else flags.rounds
    results = _spawn(_time_layouts, config, rounds, flags.machine, 5.0 if flags.quick else 60.0, flags.layouts)
    for text in flags.layouts:
        results["layouts"][text]["bytes"] = _spawn(_peak_of_layout, config, text)
    machine = Machine.from_json(results["machine"])
    shape, kept = find_model({**config, "rms_norm_eps": 1e-6}), BytesPerParameter.of("fp32")
    work = Workload(shape, BATCH, SEQ, "fp32", kept, fused_kernels=False, copies_gradients=True)
    rows = [_row(machine, work, text, results["layouts"][text]) for text in flags.layouts]
    order, wrong = right_order([(row["predicted_s"], row["measured_s"]) for row in rows] if rounds else [])
    memory = max(abs(row["predicted_bytes"] / row["measured_bytes"] - 1.0) for row in rows)
    print(machine, *(_line(row) for row in rows), sep="\n")
    if rounds:
        told = f"{order:.1%} in the right order (target {RIGHT_ORDER:.0%}), {wrong} wrong"
        print(f"pairs predicted {APART:.0%} apart: {told}")
    print(f"memory: off by {memory:.1%} at most (target {MEMORY_ERROR:.0%})")
    if flags.out:
        Path(flags.out).write_text(json.dumps({"machine": machine.to_json(), "rows": rows}, indent=1) + "\n")
    return 0 if order >= RIGHT_ORDER and memory <= MEMORY_ERROR else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="fastpar bench planner", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="a tiny model, one round: does it run at all")
    made.add_argument("--rounds", type=int, default=3, help="of all layouts; 0: memory only (%(default)s)")
    made.add_argument(
        "--layouts", type=lambda text: tuple(text.split(",")), default=LAYOUTS, help="some, between commas (all twelve)"
    )
    made.add_argument("--machine", metavar="FILE.json", help="calibrated before; by default calibrated now")
    made.add_argument("--out", metavar="FILE.json", help="write the rows")
    return made


def right_order(pairs: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Of (predicted, measured): the share of the pairs predicted `APART` whose measured order is the predicted one, and
    how many are not."""
    found = [(low[1] < high[1]) for low, high in itertools.permutations(pairs, 2) if high[0] >= (1.0 + APART) * low[0]]
    return (sum(found) / len(found) if found else 1.0), len(found) - sum(found)


def _row(machine: Machine, work: Workload, text: str, measured: dict[str, Any]) -> dict[str, Any]:
    told: RefinedLayout | None = refine(machine, work, _layout(text), float("inf"), as_given=True)
    assert told is not None
    return {
        "layout": text, "predicted_s": told.seconds, "measured_s": measured["seconds"], "predicted_bytes": told.peak,
        "measured_bytes": measured["bytes"], "parts": dict(told.parts),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    measured = f"{1e3 * row['measured_s']:8.1f} measured" if row["measured_s"] else f"{'not':>8} measured"
    times = f"{1e3 * row['predicted_s']:8.1f} ms predicted {measured}"
    sizes = f"{row['predicted_bytes'] / 1e6:7.0f} MB predicted {row['measured_bytes'] / 1e6:7.0f} measured"
    return f"{row['layout']:<16}{times}   {sizes}"


def _layout(text: str) -> Layout:
    return Layout.parse(text)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _spawn(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns on rank 0 of two new processes."""
    from torch.multiprocessing.spawn import spawn

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    spawn(_rank, (store.port, work, arguments), nprocs=2)
    return json.loads(store.get("found"))


def _rank(rank: int, port: int, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    _ext.load()
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=2)
    found = work(*arguments)
    if rank == 0:
        store.set("found", json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _time_layouts(
    config: dict[str, Any], rounds: int, machine: str | None, seconds: float, texts: Sequence[str]
) -> dict[str, Any]:
    """The machine, and of each layout the median of its steps' seconds."""
    made = find_machine(machine) if machine else calibrate("here", device="cpu", seconds=seconds)
    times: dict[str, list[float]] = {text: [] for text in texts}
    for _ in range(rounds):
        for text in texts:
            times[text].append(run_layout(config, _layout(text), steps=2)[0])
    medians = {text: {"seconds": statistics.median(times[text]) if rounds else None} for text in texts}
    return {"machine": made.to_json(), "layouts": medians}


def _peak_of_layout(config: dict[str, Any], text: str) -> float:
    """Bytes at the peak of a step."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    run_layout({**config, **QUICK}, _layout(text), steps=3)
    return run_layout(config, _layout(text), steps=3)[1]


def run_layout(config: dict[str, Any], layout: Layout, steps: int) -> tuple[float, float]:
    """Seconds of the last step and bytes at its peak, of all ranks the most."""
    import transformers

    _give_back()
    before = _resident()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "attn_implementation": "sdpa"}))
    mesh = fp.init_mesh(
        **{dim: getattr(layout, dim) for dim in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}, device="cpu"
    )
    try:
        step = _trainer(model, mesh, layout)
        del model  # the ranks of a pipeline keep a part of it
        _give_back()
        for index in range(steps):
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
            dist.barrier()
            started = time.perf_counter()
            step(index)
            seconds = time.perf_counter() - started
        now = _resident()
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"] + now["Pss_Shmem"]
        bytes_before = before["RssAnon"] + before["Pss_Shmem"]
        mine = torch.tensor([seconds, peak - bytes_before], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return float(mine[0]), float(mine[1])
    finally:
        mesh.close()


def _trainer(model: nn.Module, mesh: fp.Mesh, layout: Layout) -> Any:
    """A function from the number of a step to nothing."""
    policy = {"none": None, "selective": fp.recompute.Selective(), "full": fp.recompute.Full()}[str(layout.recompute)]
    share = BATCH // layout.dp
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def tokens(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * index + mesh.rank("dp"))
        return torch.randint(0, vocab, (share, SEQ), generator=generator)

    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        return fp.ops.vocab_parallel_cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), group=mesh["tp"], inplace_backward=True
        )

    if layout.pp > 1:
        how = layout.pipeline
        pipe = fp.parallelize_pipeline(
            model, mesh, how.schedule, num_microbatches=how.microbatches, loss=loss_of, recompute=policy
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        zero = fp.zero.shard(pipe, optimizer, group=mesh, stage=layout.zero.stage, overlap=False)
    else:
        fp.parallelize(model, mesh, sequence_parallel=layout.sequence_parallel)
        if policy is not None:
            fp.apply_recompute(model, policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=layout.zero.stage)

    def step(index: int) -> None:
        ids = tokens(index)
        if layout.pp > 1:
            pipe.step(ids, target=ids)
        else:
            loss_of(model(ids, use_cache=False).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    step.zero = zero  # type: ignore[attr-defined]  # kept alive with the function
    return step


def _give_back() -> None:
    """Freed memory, to the system."""
    gc.collect()
    torch.ops.fastpar.large_buffer_release()
    ctypes.CDLL(None).malloc_trim(0)


def _resident() -> dict[str, float]:
    """Bytes by the kernel's names."""
    lines = [line for name in ("status", "smaps_rollup") for line in Path("/proc/self", name).read_text().splitlines()]
    return {line.split(":")[0]: 1024.0 * int(line.split()[1]) for line in lines if line.endswith(" kB")}


if __name__ == "__main__":
    sys.exit(main())
