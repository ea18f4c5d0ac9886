"""A step of training on two ranks of this host, part by part, each against float64 in plain PyTorch.

Two processes are started, meet over gloo as any CPU job does, and run the probes one after the other; what they send
travels as in training. So what is broken between ranks shows as well as what computes wrong numbers. Each probe is a
few lines that a user could write, and its finding names the part of fastpar that failed.

    python -m fastpar.doctor.probes RANK FILE      one of the two; FILE is where they meet
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.doctor.installation import BUILD_REMEDY, Finding, one_line

RANKS = 2
DEADLINE_S = 240.0  # of both processes, imports of torch included
TIMEOUT_S = 60.0  # of one wait for the other rank


@dataclass(frozen=True)
class Probe:
    """A part of a training step.

    run      on every rank of the job; the largest error, relative to the largest value
    allowed  the error that float32 explains
    parts    where to look when it fails
    remedy   what to do then
    """

    topic: str
    run: Callable[[], float]
    allowed: float
    parts: str
    remedy: str = BUILD_REMEDY


# ---- the probes ------------------------------------------------------------------------------------------------------


def exchange() -> float:
    """A sum over both ranks, through the library that CPU ranks of one host take."""
    from fastpar.comm import Communicator

    with _mesh(tp=RANKS) as mesh:
        total = Communicator(mesh.group("tp")).all_reduce(torch.full((1000,), 1.5))
        return _largest([(total, torch.full((1000,), 1.5 * RANKS))])


def parallel_block() -> float:
    """Output and gradients of a gated MLP whose linears `parallelize` splits over the ranks, and of its norm."""
    from fastpar.parallel.api import parallelize

    torch.manual_seed(0)
    block = _ProbeBlock()
    whole = copy.deepcopy(block).double()
    styles = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    x = torch.randn(5, 24)
    exact = x.double().requires_grad_()
    (wanted := whole(exact)).square().sum().backward()
    with _mesh(tp=RANKS) as mesh:
        parallelize(block, mesh, plan=styles)
        (found := block(x.requires_grad_())).square().sum().backward()
        grads = [p.grad.full_tensor() for p in block.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        pairs = [(found, wanted), (x.grad, exact.grad), *zip(grads, (p.grad for p in whole.parameters()), strict=True)]
        return _largest(pairs)


def split_loss() -> float:
    """Loss and gradient of an LM head whose rows lie on the ranks, with some tokens ignored."""
    from fastpar.ops import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight, target = torch.randn(37, 24), torch.randn(211, 24), torch.randint(211, (37,))
    target[::5] = -100
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    (wanted := F.cross_entropy(F.linear(*exact), target)).backward()
    with _mesh(tp=RANKS) as mesh:
        begin, end = ((0, 106), (106, 211))[mesh.rank("tp")]
        part, own = weight[begin:end].clone().requires_grad_(), (begin, end, 211)
        found = linear_cross_entropy(hidden.requires_grad_(), part, target, group=mesh.group("tp"), vocab_range=own)
        found.backward()
        pairs = [(found, wanted), (hidden.grad, exact[0].grad), (part.grad, exact[1].grad[begin:end])]  # type: ignore[index]
        return _largest(pairs)


def whole_attention() -> float:
    """Output and gradients of causal attention with grouped heads, on each rank alone."""
    from fastpar.ops import attention

    leaves, wanted, grads = _exact_attention()
    q, k, v = leaves
    found = attention(q, k, v, causal=True)
    found.square().sum().backward()
    return _largest([(found, wanted), *((x.grad, grad) for x, grad in zip(leaves, grads, strict=True))])


def split_attention() -> float:
    """The same over a sequence whose chunks lie on both ranks, in a ring."""
    from fastpar.context.layout import zigzag
    from fastpar.contracts.attention import AttentionMask, positions
    from fastpar.ops import context_attention

    leaves, wanted, grads = _exact_attention()
    with _mesh(cp=RANKS) as mesh:
        group, layout = mesh.group("cp"), zigzag(leaves[0].shape[2], RANKS)
        own = positions(layout[mesh.rank("cp")])
        parts = [x.detach()[:, :, own].requires_grad_() for x in leaves]
        found = context_attention(*parts, group=group, layout=layout, mask=AttentionMask(causal=True), method="ring")
        found.square().sum().backward()
        pairs = ((x.grad, grad[:, :, own]) for x, grad in zip(parts, grads, strict=True))
        return _largest([(found, wanted[:, :, own]), *pairs])


def expert_layer() -> float:
    """Output and gradients of four experts on two ranks, whose tokens travel there and back."""
    from fastpar.ops import ExpertWeights, moe_mlp
    from fastpar.reference import moe_mlp as whole_moe_mlp

    torch.manual_seed(0)
    experts = ExpertWeights(torch.randn(4, 32, 24) / 5, torch.randn(4, 24, 16) / 4)
    x, indices = torch.randn(2, 37, 24), torch.stack([torch.arange(37) % 4, (torch.arange(37) + 1) % 4], 1)
    weights = torch.rand(37, 2)
    with _mesh(dp_shard=RANKS, ep=RANKS) as mesh:
        rank = mesh.rank("ep")
        exact = [x.double().requires_grad_(), experts.first.double().requires_grad_()]
        by_rank = [
            whole_moe_mlp(own, indices, weights.double(), ExpertWeights(exact[1], experts.second.double()))
            for own in exact[0]
        ]
        torch.stack(by_rank).square().sum().backward()
        held = slice(2 * rank, 2 * rank + 2)
        own, first = x[rank].clone().requires_grad_(), experts.first[held].clone().requires_grad_()
        here = ExpertWeights(first, experts.second[held].clone())
        found = moe_mlp(own, indices, weights, here, group=mesh.group("ep"))
        found.square().sum().backward()
        grads = [exact[0].grad[rank], exact[1].grad[held]]
        return _largest([(found, by_rank[rank]), *zip((own.grad, first.grad), grads, strict=True)])


def zero_step() -> float:
    """A model after two steps of AdamW in ZeRO stage 3, each rank with a batch of its own."""
    from fastpar.optim import AdamW
    from fastpar.zero import shard

    torch.manual_seed(0)
    model = _ProbeBlock()
    whole = copy.deepcopy(model).double()
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    optimizer = AdamW(model.parameters(), lr=0.1)
    batches = torch.randn(2, RANKS, 5, 24)
    with _mesh(dp_shard=RANKS) as mesh:
        zero = shard(model, optimizer, group=mesh, stage=3, max_norm=1.0)
        for batch in batches:
            model(batch[mesh.rank("dp_shard")]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            whole(batch.double()).square().mean().backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
        found = model(batches[0, 0])
        wanted = whole(batches[0, 0].double())
        del zero
        return _largest([(found, wanted)])


def pipeline_step() -> float:
    """Loss and gradients of four microbatches through two stages by 1F1B."""
    from fastpar.pipeline import Pipeline, one_f_one_b

    torch.manual_seed(0)
    stages = [_ProbeBlock(), _ProbeBlock()]
    whole = copy.deepcopy(nn.Sequential(*stages)).double()
    x, y = torch.randn(8, 24), torch.randn(8, 24)
    (wanted := F.mse_loss(whole(x.double()), y.double())).backward()
    with _mesh(pp=RANKS) as mesh:
        rank = mesh.rank("pp")
        schedule = one_f_one_b(RANKS, 4)
        pipe = Pipeline([stages[rank]], schedule, mesh.group("pp"), loss=F.mse_loss)
        found = pipe.step(x, target=y)
        grads = zip(stages[rank].parameters(), whole[rank].parameters(), strict=True)
        return _largest([(found, wanted), *((a.grad, b.grad) for a, b in grads)])


def storage() -> float:
    """A tensor written to a file in the folder for temporary files, and read back with its checksums."""
    from fastpar.storage import TensorStore

    x = torch.randn(300_001)
    out = torch.empty_like(x)
    with tempfile.TemporaryDirectory() as folder:
        store = TensorStore(folder)
        store.write("x", x).wait()
        store.read("x", out).wait()
        store.close()
    return _largest([(out, x)])


_GLOO_REMEDY = (
    "gloo has to find this host: `GLOO_SOCKET_IFNAME=lo`, or its name in /etc/hosts; then see `shared memory`"
)
PROBES = (
    Probe("exchange of ranks", exchange, 0.0, "gloo, or fp.Communicator", _GLOO_REMEDY),
    Probe("tensor-parallel block", parallel_block, 1e-5, "fp.parallelize, fp.tensor, the linears of fp.ops"),
    Probe("split loss", split_loss, 1e-5, "fp.ops.linear_cross_entropy"),
    Probe("attention", whole_attention, 1e-5, "fp.ops.attention"),
    Probe("split sequence", split_attention, 1e-5, "fp.ops.context_attention, fp.context"),
    Probe("experts", expert_layer, 1e-5, "fp.ops.moe_mlp"),
    Probe("ZeRO step", zero_step, 1e-4, "fp.zero.shard, fp.optim.AdamW, fp.clip_grad_norm_"),
    Probe("pipeline step", pipeline_step, 1e-5, "fp.pipeline.Pipeline, PointToPoint of fp.comm"),
    Probe("storage", storage, 0.0, "fp.storage.TensorStore"),
)


class _ProbeBlock(nn.Module):
    """A norm and a gated MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24, eps=1e-6)
        self.gate, self.up = nn.Linear(24, 34), nn.Linear(24, 34)
        self.down = nn.Linear(34, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _exact_attention() -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
    """q, k and v of 133 tokens, four heads on two; output and gradients of its squares' sum, in float64 of torch."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, heads, 133, 24).requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = exact
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return leaves, wanted, torch.autograd.grad(wanted.square().sum(), exact)


def _largest(pairs: Any) -> float:
    """The largest deviation of (found, exact) pairs, each relative to its largest value; NaN if there is one."""
    errors = [(a.detach().double() - b.detach().double()).abs().max() / b.detach().abs().max() for a, b in pairs]
    return float(torch.stack(errors).max())


@contextmanager
def _mesh(**sizes: Any) -> Iterator[Any]:
    from fastpar.mesh import init_mesh

    mesh = init_mesh(**sizes, device="cpu", timeout=TIMEOUT_S)
    try:
        yield mesh
    finally:
        mesh.close()


# ---- one of the two processes ----------------------------------------------------------------------------------------


def run_probe(probe: Probe) -> Finding:
    """What became of it on this rank."""
    try:
        error = probe.run()
    except Exception as failure:  # a probe must report, not crash
        return Finding(probe.topic, "problem", f"fails: {one_line(failure)}", f"{probe.parts}: {probe.remedy}")
    if not error <= probe.allowed:  # also for NaN
        text = f"WRONG: relative error {error:.2e} against float64, allowed {probe.allowed:.0e}"
        remedy = f"do not train with this build: {probe.parts} compute wrong numbers; {BUILD_REMEDY}, and report it"
        return Finding(probe.topic, "problem", text, remedy)
    return Finding(probe.topic, "ok", f"relative error {error:.2e} against float64 (allowed {probe.allowed:.0e})")


def agreed(probe: Probe) -> Finding:
    """What became of it on all ranks: the first one's problem, else rank 0's finding."""
    by_rank: list[Any] = [None] * RANKS
    dist.all_gather_object(by_rank, run_probe(probe))
    bad = (replace(found, text=f"rank {rank}: {found.text}") for rank, found in enumerate(by_rank) if found.remedy)
    return next(bad, by_rank[0])


def run_rank(rank: int, meeting: str) -> None:
    """All probes; rank 0 prints a line of JSON for each."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    for probe in PROBES:
        found = agreed(probe)
        if rank == 0:
            print(json.dumps(asdict(found)), flush=True)
    dist.destroy_process_group()


# ---- the doctor ------------------------------------------------------------------------------------------------------


def findings() -> list[Finding]:
    """One for each probe."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fastpar.doctor.probes"]
        ranks = [
            subprocess.Popen([*command, str(rank), str(Path(folder) / "meeting")], stdout=PIPE, stderr=PIPE, text=True)
            for rank in range(RANKS)
        ]
        deadline = time.monotonic() + DEADLINE_S
        ended = [_end_of(process, deadline) for process in ranks]
    found = [Finding(**json.loads(line)) for line in ended[0][0].splitlines() if line.startswith("{")]
    if len(found) < len(PROBES):
        missing = PROBES[len(found)]
        how = "; ".join(f"rank {rank} {end}" for rank, (_, end) in enumerate(ended) if end)
        found.append(Finding(missing.topic, "problem", f"fails: {how}", f"{missing.parts}: {missing.remedy}"))
    return found + [Finding(probe.topic, "info", "not run") for probe in PROBES[len(found) :]]


def _end_of(process: subprocess.Popen[str], deadline: float) -> tuple[str, str]:
    """What a process printed, and how it ended, empty where it ended well."""
    try:
        output, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
        end = "" if process.returncode == 0 else f"ended with exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        end = f"had not ended after {DEADLINE_S:g} s"
    last = [line.strip() for line in errors.splitlines() if line.strip()][-1:]
    return output, ": ".join([end, *last]) if end else ""


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
