"""What ranks do in the tests of split sequences composed with everything else: training steps beside one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from tests.context.context_pipeline_ranks import in_float64
from tests.context.context_ranks import FAMILIES, PACKED, alone, whole_batch
from tests.tensor.family_models import tiny_model

MODELS = {**FAMILIES, "mixtral": "MixtralForCausalLM"}
EXPERTS = ("mixtral", "gpt_oss")  # whose grouped products have no float64
# Of the largest update: what transformers' code does in float32 (its loss, norms, routers), and for experts all.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Cell:
    """A layout of a model, and how its batches are split."""

    sizes: tuple[tuple[str, int], ...]
    stage: int | None = 0
    family: str = "llama"
    sequence_parallel: bool = False
    recompute: bool = False
    documents: Any = PACKED
    method: str = "auto"

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def world(self) -> int:
        return self.size("pp") * self.size("dp_shard") * self.size("dp_replicate") * self.size("cp") * self.size("tp")

    @property
    def replicas(self) -> int:
        return self.size("dp_shard") * self.size("dp_replicate")

    def size(self, dim: str) -> int:
        return self.mesh.get(dim, 1)


def factorisations(world: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every mesh of so many ranks with cp > 1, over pp, dp_replicate, dp_shard, cp and tp."""
    dims = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    for sizes in itertools.product((1, 2, 4), repeat=len(dims)):
        found = tuple((dim, size) for dim, size in zip(dims, sizes, strict=True) if size > 1)
        if torch.tensor(sizes).prod() == world and dict(found).get("cp", 1) > 1:
            yield found


def build(family: str) -> nn.Module:
    sizes = {"num_local_experts": 4} if family == "mixtral" else {}  # which four ranks share
    model = tiny_model(family, MODELS[family], **sizes)
    return model if family in EXPERTS else model.double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def trained_alone(family: str, replicas: int, documents: Any) -> dict[str, Tensor]:
    """Updates of two steps, of the mean over `replicas` batches."""
    model = build(family)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model.parameters())
    for step in range(2):
        for replica in range(replicas):
            (alone(model, whole_batch(1 + step * replicas + replica), documents) / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() - start[name] for name, p in model.named_parameters()}


def train(cell: Cell) -> dict[str, Tensor]:
    """The same on the ranks of a mesh: the updates of this rank's parameters, whole."""
    mesh = fp.init_mesh(**cell.mesh, device="cpu")
    model: Any = build(cell.family)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    context = fp.Context(block=4, method=cell.method)
    options: dict[str, Any] = {"context": context, "sequence_parallel": cell.sequence_parallel}
    pipelined = cell.size("pp") > 1
    if pipelined:
        more = {"num_microbatches": 2, "recompute": fp.recompute.Full() if cell.recompute else None}
        model = fp.parallelize_pipeline(model, mesh, "1f1b", **options, **more)
    else:
        model = fp.parallelize(model, mesh, **options)
        if cell.recompute:
            fp.apply_recompute(model)
    optimizer = adamw(model.parameters())
    zero: Any = None
    if cell.stage is not None:
        like: dict[str, Any] = {"persistent_share": 0.0} if cell.stage == 3 else {}
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=cell.stage, overlap=not pipelined, **like)
    for step in range(2):
        seed = 1 + step * mesh.size("dp") + mesh.rank("dp")
        batch = fp.context.shard(model, whole_batch(seed), documents=cell.documents)
        if pipelined:
            model.step(**batch)
        else:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    updates = {name: value.detach() - start[name] for name, value in found.items()}
    if zero is not None:
        zero.close()
    if pipelined:
        model.close()
    mesh.close()
    return updates


def compare_cells(cells: list[Cell]) -> int:
    """Every cell's updates against one process; returns how many were compared."""
    known: dict[Any, dict[str, Tensor]] = {}
    for cell in cells:
        with nullcontext() if cell.family in EXPERTS else in_float64():
            key = cell.family, cell.replicas, cell.documents
            if key not in known:
                known[key] = trained_alone(*key)
            for name, update in train(cell).items():
                wanted = known[key][name]
                error = float((update - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
                assert error < TOLERANCE, f"{cell}: the update of {name} is off by {error:.1e} of its largest entry"
    return len(cells)
