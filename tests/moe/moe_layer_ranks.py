"""What the ranks of the tests of MoELayer run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.expert.layer import Experts, MoELayer, SharedExpert
from fastpar.mesh import Mesh, init_mesh
from fastpar.ops import Dispatch
from fastpar.ops.moe.mlp import ExpertRule

HIDDEN, INNER, NUM_EXPERTS, TOP_K, TOKENS, BATCH = 8, 12, 4, 2, 5, 4


class SoftmaxRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> Any:
        probs = torch.softmax(x.float() @ self.weight.float().T, -1)
        weights, indices = probs.topk(TOP_K)
        return SimpleNamespace(indices=indices, weights=weights / weights.sum(-1, keepdim=True))


class Block(nn.Module):
    """A norm, the layer, and the residual: gradients of x are checked through `scale`."""

    def __init__(self, mesh: Mesh | None, rule: ExpertRule, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        router = SoftmaxRouter()
        experts = Experts(
            HIDDEN,
            INNER,
            NUM_EXPERTS,
            rule=rule,
            bias=True,
            mesh=mesh,
            dispatch=Dispatch(options.pop("transport", "auto")),
        )
        shared = SharedExpert(HIDDEN, INNER, rule=ExpertRule(rule.activation), gated=True)
        self.moe = MoELayer(router, experts, shared, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x * self.scale)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x, target = torch.randn(2, BATCH, TOKENS, HIDDEN, generator=generator)
    return x, target


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    for name, p in model.named_parameters():
        is_expert = ".experts." in name and mesh.size("ep") * mesh.size("etp") > 1
        comm = Communicator(mesh.group("edp" if is_expert else "dp"))
        grad = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
        grad.copy_(comm.all_reduce(grad, "avg"))


def whole(x: Tensor, mesh: Mesh | None) -> Tensor:
    """All of a parameter or gradient. Not full_tensor(): torch remembers groups of meshes that are closed."""
    if isinstance(x, DTensor):
        assert mesh is not None
        local = x._local_tensor
        for name, placement in reversed(list(zip(("ep", "etp"), x.placements, strict=True))):
            if placement.is_shard():
                local = Communicator(mesh.group(name)).all_gather(local, dim=placement.dim)
        return local.detach()
    return x.detach().clone()


def train(mesh: Mesh | None, rule: ExpertRule, **options: Any) -> dict[str, Tensor]:
    """Loss, gradients, their norm, and the parameters after a step, of one batch split over data parallelism."""
    model = Block(mesh, rule, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target = batch()
    if mesh is not None:
        rows = slice(mesh.rank("dp") * BATCH // mesh.size("dp"), (mesh.rank("dp") + 1) * BATCH // mesh.size("dp"))
        x, target = x[rows], target[rows]
    found: dict[str, Tensor] = {}
    x.requires_grad_()
    loss = (model(x) - target).square().mean()
    loss.backward()
    if mesh is None:
        found["loss"], found["dx"] = loss.detach(), x.grad
    else:
        dp = Communicator(mesh.group("dp"))
        average_gradients(model, mesh)
        found["loss"] = dp.all_reduce(loss.detach(), "avg")
        found["dx"] = dp.all_gather(x.grad) / dp.size
    found.update({f"grad of {name}": whole(p.grad, mesh) for name, p in model.named_parameters()})
    found["norm"] = fp.grad_norm(list(model.parameters()))
    optimizer.step()
    found.update({name: whole(p, mesh) for name, p in model.named_parameters()})
    return found


def layouts(world: int) -> list[dict[str, int]]:
    sizes = [size for size in (1, 2, 4) if world % size == 0]
    return [
        {"tp": tp, "ep": ep, "etp": etp, "dp_shard": world // tp}
        for tp, ep, etp in itertools.product(sizes, sizes, sizes)
        if world % (ep * etp) == 0
    ]


def all_layouts(rules: list[ExpertRule]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    found = []
    for sizes in layouts(dist.get_world_size()):
        mesh = init_mesh(**sizes, device="cpu")
        for rule in rules:
            found.append(({**sizes, "rule": rule}, train(mesh, rule)))
        mesh.close()
    return found


def few_tokens() -> list[tuple[Tensor, Tensor]]:
    """(of two ranks, of one): outputs and gradients for 3 tokens, cut by the layer and cut before it."""
    mesh = init_mesh(tp=2, ep=2, device="cpu")
    tp = Communicator(mesh.group("tp"))
    found = []
    x = batch()[0].view(-1, HIDDEN)[:3]
    for sequence_parallel in (False, True):
        alone, split = Block(None, ExpertRule()), Block(mesh, ExpertRule(), sequence_parallel=sequence_parallel)
        results = []
        for model, rows in ((alone, slice(None)), (split, slice(2 * tp.rank, 2 * tp.rank + 2))):
            part = x[rows if model is split and sequence_parallel else slice(None)].clone().requires_grad_()
            out = model(part)
            out.square().sum().backward()
            grads = [whole(p.grad, mesh) for p in (model.moe.experts.down_proj, model.moe.router.weight)]
            values = [out.detach(), part.grad]
            if model is split and sequence_parallel:
                values = [tp.all_gather(value, sizes=[2, 1]) for value in values]
            results.append([*values, *grads])
        found += zip(*reversed(results), strict=True)
    mesh.close()
    return found


ZERO_LAYOUTS = {
    2: [{"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"dp_shard": 2, "etp": 2}],
    4: [
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2, "etp": 2},
    ],
}


def zero_train(mesh: Mesh | None, stage: int) -> dict[str, Tensor]:
    """Parameters after three steps of AdamW with clipping, and the norm and the number of the last step."""
    model = Block(mesh, ExpertRule())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)  # a small eps makes signs of tiny gradients
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, max_norm=0.1)
    x, target = batch()
    if mesh is not None:
        rows = slice(mesh.rank("dp") * BATCH // mesh.size("dp"), (mesh.rank("dp") + 1) * BATCH // mesh.size("dp"))
        x, target = x[rows], target[rows]
    for _ in range(3):
        (model(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zero.norm is not None
    found = {name: whole(p, mesh) for name, p in model.named_parameters()}
    expected = zero.expected_memory()
    states = sum(
        value._local_tensor.nbytes if isinstance(value, DTensor) else value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim > 0
    )
    assert states == expected["states"], (states, expected)
    return {**found, "norm": zero.norm}


def zero_layouts() -> list[tuple[dict[str, int], int, dict[str, Tensor]]]:
    found = []
    for sizes in ZERO_LAYOUTS[dist.get_world_size()]:
        for stage in (0, 1, 2):
            mesh = init_mesh(**sizes, device="cpu")
            found.append((sizes, stage, zero_train(mesh, stage)))
            mesh.close()
    return found


def refused_by_zero() -> list[str]:
    """The message for each stage."""
    mesh = init_mesh(dp_shard=2, ep=2, device="cpu")
    model = Block(mesh, ExpertRule())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for stage in (1, 3):
        try:
            fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage)
        except ValueError as error:
            found.append(str(error))
    mesh.close()
    return found


def losses_over_tp() -> list[tuple[Tensor, Tensor]]:
    """(of two ranks, of one): gradients of router and input by the losses of the router."""
    mesh = init_mesh(tp=2, ep=2, device="cpu")
    x = batch()[0][:2]
    found = []
    for preset in ("switch", "deepseek_v3", "mixtral"):
        changes = {"num_groups": 1, "top_groups": 1, "top_k": 2} if preset == "deepseek_v3" else {}
        results = []
        for where in (mesh, None):
            torch.manual_seed(5)
            options = {"mesh": where, "router": {"jitter": 0.0}, **changes}
            layer = fp.expert.MoELayer.from_preset(preset, HIDDEN, INNER, NUM_EXPERTS, **options)
            layer.router.losses = replace(layer.router.losses, coeff=1.0, z_coeff=0.5)
            part = x.clone().requires_grad_()
            (layer(part) * 0.1).square().mean().backward()
            load = layer.router.load
            load = load if where is None else Communicator(mesh.group("tp")).all_reduce(load)
            results.append([part.grad, layer.router.weight.grad, load])
        found += zip(*results, strict=True)
    mesh.close()
    return found
