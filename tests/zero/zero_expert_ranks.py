"""What the ranks of the tests of experts under stage 3 run."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpar as fp
from fastpar.comm import Communicator, record
from fastpar.comm.agree import set_on_any
from fastpar.expert.layer import Experts, MoELayer, SharedExpert
from fastpar.ops import Dispatch
from fastpar.zero.groups import Groups, is_expert, local
from fastpar.zero.stage3 import Stage3
from tests.moe.moe_layer_ranks import whole

HIDDEN, INNER, NUM_EXPERTS, TOP_K, LAYERS = 8, 12, 4, 2, 2
SEQUENCES, TOKENS = 4, 5
Found = dict[str, Tensor]


class TopK(nn.Module):
    """A router without losses: those of a batch are not the mean of its parts'."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, hidden))

    def forward(self, x: Tensor) -> Any:
        weights, indices = torch.softmax(x.float() @ self.weight.float().T, -1).topk(TOP_K)
        return SimpleNamespace(indices=indices, weights=weights / weights.sum(-1, keepdim=True))


class Layer(nn.Module):
    def __init__(self, mesh: fp.Mesh | None, hidden: int, inner: int, num_experts: int, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(hidden) + 0.5)
        experts = Experts(hidden, inner, num_experts, bias=True, mesh=mesh, **options)
        self.moe = MoELayer(TopK(hidden, num_experts), experts, SharedExpert(hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x * self.scale)


class Model(nn.Module):
    """Linear, layers with experts, linear: the same values under every mesh."""

    def __init__(
        self,
        mesh: fp.Mesh | None,
        hidden: int = HIDDEN,
        inner: int = INNER,
        num_experts: int = NUM_EXPERTS,
        *,
        recomputes: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(Layer(mesh, hidden, inner, num_experts, **options) for _ in range(LAYERS))
        self.last = nn.Linear(hidden, hidden)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """A training run: `frozen` experts' first weights, layers that are computed again in backward, gathers that are
    begun early (`prefetches`) beside an exchange of tokens by all-to-all."""

    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    persistent_share: float = 0.0
    frozen: bool = False
    recomputes: bool = False
    prefetches: bool = False
    num_experts: int = NUM_EXPERTS
    offload: str | None = None


def batch(step: int, microbatch: int, mesh: fp.Mesh | None, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's sequences, and of these the part of this rank of cp."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    x, target = torch.randn(2, SEQUENCES, TOKENS, hidden, generator=generator)
    if mesh is None:
        return x, target
    each = SEQUENCES // mesh.size("dp")
    rows = slice(mesh.rank("dp") * each, (mesh.rank("dp") + 1) * each)
    cp, part = mesh.size("cp"), mesh.rank("cp")
    columns = slice(part * TOKENS // cp, (part + 1) * TOKENS // cp)
    return x[rows, columns], target[rows, columns]


def backward(model: nn.Module, zero: fp.zero.Zero, case: Case, step: int, mesh: fp.Mesh | None) -> None:
    """Of all microbatches, which travel together."""
    for microbatch in range(case.accumulate):
        x, target = batch(step, microbatch, mesh)
        with zero.no_sync() if microbatch + 1 < case.accumulate else nullcontext():
            whole = len(x) * TOKENS * x.shape[-1]  # of whole sequences, which ranks of cp have parts of
            ((model(x).float() - target).square().sum() / whole / case.accumulate).backward()


class Through(Communicator):
    """Of torch's collectives, even where ranks share memory: gathers take time and are begun early."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__(group, **{**options, "transport": "torch"})


def train(mesh: fp.Mesh | None, stage: int, case: Case = Case()) -> Found:
    """Parameters after three steps of AdamW with clipping, moments, and the norms."""
    with ExitStack() as stack:
        if case.prefetches:
            stack.enter_context(mock.patch("fastpar.zero.groups.Communicator", Through))
        options = {"dispatch": Dispatch(transport="all_to_all")} if case.prefetches else {}
        model = Model(mesh, num_experts=case.num_experts, recomputes=case.recomputes, **options)
        if case.frozen:
            for layer in model.layers:
                layer.moe.experts.gate_up_proj.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        offload = case.offload
        if offload is not None and "parameters" in offload:  # which stage 1 does not take
            folder = stack.enter_context(TemporaryDirectory())
            offload = offload.replace("FOLDER", folder) if stage == 3 else None
        optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-3)  # a small eps makes signs of tiny gradients
        zero = fp.zero.shard(
            model,
            optimizer,
            group=mesh,
            stage=stage,
            precision=fp.Precision.bf16() if case.dtype == torch.bfloat16 else None,
            max_norm=0.1,
            persistent_share=case.persistent_share,
            offload=offload,
        )
        norms = []
        for step in range(3):
            backward(model, zero, case, step, mesh)
            optimizer.step()
            optimizer.zero_grad()
            assert zero.norm is not None
            norms.append(zero.norm)
        if case.prefetches and stage == 3:
            assert zero.storages[0].can_prefetch
        if stage == 3:
            model.unshard()
        found = {name: whole(p, mesh).float() for name, p in model.named_parameters()}
        zero.detach()
        return {**found, "norms": torch.stack(norms)}


def stages(layouts: list[dict[str, int]], cases: list[Case]) -> list[tuple[str, Found, Found]]:
    """(what, under stage 1, under stage 3) of every layout and case."""
    found = []
    for sizes in layouts:
        mesh = fp.init_mesh(**sizes, device="cpu")
        for case in cases:
            found.append((f"{sizes}, {case}", train(mesh, 1, case), train(mesh, 3, case)))
        mesh.close()
    return found


def agreements(sizes: dict[str, int]) -> tuple[list[bool], set[int]]:
    """Of each rank: whether this one learns that it has set a flag; the ranks that this one shares parameters with."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    groups = Groups(mesh, is_sharded=True, experts=Groups(mesh, is_sharded=True, of_experts=True))
    flags = [dist.get_rank() == rank for rank in range(dist.get_world_size())]
    comms = [comm for each in groups.with_experts() for comm in each.everyone()]
    partners = {rank for comm in comms for rank in dist.get_process_group_ranks(comm.group)}
    found = set_on_any(flags, groups.joined())
    mesh.close()
    return found, partners | {dist.get_rank()}


def words(sizes: dict[str, int]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What a forward and backward pass sends for parameters: (op, elements) found, and expected."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    model = Model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=3, persistent_share=0.0)
    with record() as sent:
        backward(model, zero, Case(), 0, mesh)
    expected = []
    for unit in zero.storages[0].units:
        for kind in (False, True):
            numel = sum(local(param.parameter).numel() for param in unit.params if is_expert(param.parameter) == kind)
            if numel and mesh.size("efsdp" if kind else "dp_shard") > 1:
                expected += [("all_gather", numel)] * 2 + [("reduce_scatter", numel)]
    numels = {numel for _, numel in expected}
    found = [(entry.op, entry.numel) for entry in sent if entry.op == "reduce_scatter" or entry.numel in numels]
    mesh.close()
    return sorted(found), sorted(expected)


def memory(sizes: dict[str, int], dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int], dict[str, int], int]:
    """Bytes by kind: measured, and by `expected_memory`; elements of the whole model; bytes of two units."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    from memory import MemoryMeter

    hidden, inner, num_experts = 32, 64, 8
    mesh = fp.init_mesh(**sizes, device="cpu")
    model = Model(mesh, hidden, inner, num_experts)
    numels = {"dense": 0, "experts": 0, "layer": 0, "layer's experts": 0}
    for name, p in model.named_parameters():
        kind = "experts" if is_expert(p) else "dense"
        numels[kind] += p.numel()
        if name.startswith("layers.0."):
            numels["layer's experts" if is_expert(p) else "layer"] += p.numel()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = MemoryMeter(model, optimizer)
    precision = fp.Precision.bf16() if dtype == torch.bfloat16 else None
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=3, precision=precision, persistent_share=0.0)
    meter.zero = zero
    for step in range(3):
        x, target = batch(step, 0, mesh, hidden)
        (model(x).float() - target).square().mean().backward()
        with meter.watching(step == 2):
            optimizer.step()
        optimizer.zero_grad()
    expected = zero.expected_memory()
    found = {kind: meter.peaks[kind] for kind in expected}
    stage3 = zero.storages[0]
    assert isinstance(stage3, Stage3)
    assert stage3.peak_bytes <= stage3.budget
    mesh.close()
    return found, expected, numels, stage3.budget


def spoiled(sizes: dict[str, int], bad_rank: int) -> tuple[int, str, list[str], list[str]]:
    """Two steps, in one of which a rank's experts get a gradient of NaN: how many were skipped, the report, which
    tensors that step has changed, and which the next has not."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=3, max_norm=0.1, persistent_share=0.0)
    param = next(param for param in zero.params if param.name == "layers.1.moe.experts.down_proj")

    def values() -> Found:
        return {each.name: local(each.optim_param).clone() for each in zero.params}

    before = values()
    is_bad = dist.get_rank() == bad_rank
    handle = param.parameter.register_hook(lambda grad: grad * float("nan")) if is_bad else None
    backward(model, zero, Case(), 0, mesh)
    if handle is not None:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    report, skipped = zero.report, zero.skipped
    changed = [name for name, x in values().items() if not torch.equal(x, before[name])]
    backward(model, zero, Case(), 1, mesh)
    optimizer.step()
    stuck = [name for name, x in values().items() if x.numel() and torch.equal(x, before[name])]
    mesh.close()
    return skipped, report, changed, stuck
