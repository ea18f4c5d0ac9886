"""What the ranks of the tests of copies of experts run."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.comm import Communicator, record
from fastpar.expert import MoELayer, Placement, expert_loads, plan_placement, rebalance
from fastpar.expert.layer import Experts
from fastpar.mesh import Mesh, init_mesh
from fastpar.ops.moe.mlp import ExpertRule, moe_mlp
from fastpar.recompute import Selective, checkpoint
from tests.moe import moe_layer_ranks
from tests.moe.moe_layer_ranks import HIDDEN, INNER, Block, batch

# Of four experts: with a slot that is not used, an expert with three copies, and shares that are not even.
PLACEMENTS = {
    2: Placement(2, (((0, 0.5), (1, 0.5)), ((0, 1.0),), ((0, 0.25), (1, 0.75)), ((0, 0.9), (1, 0.1)))),
    4: Placement.even(4, [[3], [0], [0, 1], [0]]),
}
LAYOUTS = {
    2: [{"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}],
    4: [
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 2, "tp": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2, "etp": 2},
        {"tp": 4, "ep": 4},
    ],
}


def place(experts: Experts) -> None:
    placement = PLACEMENTS[experts.groups.ep.size]
    experts.replicas = placement.slots
    experts.place(placement)
    assert experts.placement == placement


def placed_block(mesh: Mesh | None, rule: ExpertRule, **options: Any) -> Block:
    block = Block(mesh, rule, **options)
    if mesh is not None:
        place(block.moe.experts)
    return block


def trained(rules: list[ExpertRule]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """`moe_layer_ranks.train` with copies, by layout and rule."""
    found = []
    with mock.patch.object(moe_layer_ranks, "Block", placed_block):
        for sizes in LAYOUTS[dist.get_world_size()]:
            mesh = init_mesh(**sizes, device="cpu")
            for rule in rules:
                found.append(({**sizes, "rule": rule}, moe_layer_ranks.train(mesh, rule)))
            mesh.close()
    return found


def trained_by_zero() -> dict[str, Tensor]:
    mesh = init_mesh(dp_shard=dist.get_world_size(), ep=2, device="cpu")
    with mock.patch.object(moe_layer_ranks, "Block", placed_block):
        found = moe_layer_ranks.zero_train(mesh, 1)
    mesh.close()
    return found


# ---- with copies against without, on the same ranks


def local(x: Tensor | None) -> Tensor | None:
    return x._local_tensor if isinstance(x, DTensor) else x


def outcome(mesh: Mesh, variant: str, is_placed: bool) -> dict[str, Tensor | None]:
    """The output and all gradients of one forward and backward."""
    options: dict[str, Any] = {"transport": "all_to_all"} if variant in ("chunks", "exact") else {}
    block = Block(mesh, ExpertRule(), **options)
    experts = block.moe.experts
    experts.dispatch = replace(experts.dispatch, chunks=2 if variant == "chunks" else 1, exact=variant == "exact")
    if is_placed:
        place(experts)
    if variant == "copied":
        block = copy.deepcopy(block)
    if variant == "one matrix frozen":
        experts.down_proj.requires_grad_(False)
    if variant == "experts frozen":
        experts.requires_grad_(False)
    if variant == "taken back":
        experts.place(None)
    x = batch()[0][mesh.rank("dp") : mesh.rank("dp") + 1].clone()
    x = x[:, :0] if variant == "a rank without tokens" and mesh.rank("dp") == 0 else x
    x.requires_grad_()
    if variant == "no gradients":
        with torch.no_grad():
            return {"out": block(x)}
    run: Any = {
        "torch's checkpoint": lambda: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
        "recomputed": lambda: checkpoint(block, x),
        "recomputed selectively": lambda: checkpoint(block, x, policy=Selective()),
    }.get(variant, lambda: block(x))
    with torch.autocast("cpu", torch.bfloat16) if variant == "autocast" else nullcontext():
        out = run()
    out.float().square().sum().backward()
    grads = {name: local(p.grad) for name, p in block.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, **grads}


def compared(variants: list[str]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(variant, with copies, without)."""
    mesh = init_mesh(dp_shard=4, ep=4, device="cpu")
    found = [(name, outcome(mesh, name, True), outcome(mesh, name, False)) for name in variants]
    again = [(f"{name}, again", outcome(mesh, name, True), with_copies) for name, with_copies, _ in found[:1]]
    mesh.close()
    return found + again


# ---- rows, bytes, agreement


def hot_choices(seed: int, tokens: int, num_experts: int) -> Tensor:
    """[tokens, 2]: every token chooses expert 1, and one of the others."""
    other = torch.randint(0, num_experts - 1, (tokens,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([torch.ones_like(other), other + (other >= 1)], 1)


def rows_by_rank(tokens: int, are_alike: bool) -> tuple[list[int], list[int], list[float]]:
    """Rows of each rank before a placement and with it, and what that has promised."""
    mesh = init_mesh(dp_shard=4, ep=4, device="cpu")
    comm = Communicator(mesh.group("ep"))
    experts = Experts(HIDDEN, INNER, 8, mesh=mesh, replicas=1)
    indices = hot_choices(0 if are_alike else comm.rank, tokens, 8)
    loads = comm.all_reduce(torch.bincount(indices.flatten(), minlength=8))
    x = torch.randn(tokens, HIDDEN)

    def rows() -> list[int]:
        with mock.patch("fastpar.expert.layer.moe_mlp", wraps=moe_mlp) as called:
            experts(x, indices, torch.ones(tokens, 2))
        chosen, copies = called.call_args.args[1], called.call_args.kwargs["replicas"]
        assert bool((chosen >= 0).all())
        stride = 2 + (0 if copies is None else len(copies[0]))
        return comm.all_reduce(torch.bincount(chosen.flatten() // stride, minlength=4)).tolist()

    before = rows()
    placement = plan_placement(loads, 4, 1)
    experts.place(placement)
    found = before, rows(), placement.rank_loads(loads).tolist()
    mesh.close()
    return found


def sent(kind: str) -> tuple[list[int], list[int]]:
    """The bytes of every all-to-all of a forward and a backward, which are those of copies, and the numbers of an
    expert's matrices.
    """
    mesh = init_mesh(dp_shard=4, ep=4, device="cpu")
    logs = []
    for is_placed in (False, True):
        experts = Experts(HIDDEN, 32, 4, mesh=mesh)  # rows of whole alignments
        experts.down_proj.requires_grad_(kind != "a matrix frozen")
        if is_placed:
            place(experts)
        x, indices = torch.randn(12, HIDDEN), hot_choices(mesh.rank("ep"), 12, 4)
        arguments = x.requires_grad_(), indices, torch.ones(12, 2)
        with record() as log, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            if kind.startswith("recomputed"):
                out = checkpoint(experts, *arguments, **({"policy": Selective()} if "selectively" in kind else {}))
            else:
                out = experts(*arguments)
            out.float().square().sum().backward()
        logs.append([entry.nbytes for entry in log if entry.op == "all_to_all"])
    sizes = [p._local_tensor[0].numel() for p in (experts.gate_up_proj, experts.down_proj)]
    mesh.close()
    assert not logs[0]
    return logs[1], sizes


def disagreements() -> list[str]:
    """What every attempt raised."""
    mesh = init_mesh(dp_shard=4, ep=2, etp=2, device="cpu")
    rank = dist.get_rank()
    experts = Experts(HIDDEN, INNER, 4, mesh=mesh, replicas=1)
    good, other = Placement.even(4, [[2], [0]]), Placement.even(4, [[2], [1]])
    attempts: list[Placement | None] = [
        other if rank == 1 else good,
        other if mesh.rank("etp") else good,
        None if rank == 3 else good,
        Placement.even(4, [[2, 3], []]) if rank == 2 else good,
        Placement.even(4, [[], [], [], [0]]),
        good,
    ]
    raised = []
    for attempt in attempts:
        try:
            experts.place(attempt)
            raised.append("")
        except ValueError as error:
            raised.append(str(error))
    assert experts.placement == good
    x = torch.randn(3, HIDDEN)
    try:  # numbers that are no experts are still found on all ranks
        experts(x, torch.full((3, 1), 6 if rank == 0 else 1), torch.ones(3, 1))
        raised.append("")
    except ValueError as error:
        raised.append(str(error))
    mesh.close()
    return raised


# ---- a model


def rebalanced() -> dict[str, Any]:
    """Two layers, trained on before and after `rebalance`."""
    mesh = init_mesh(dp_shard=2, ep=2, device="cpu")
    comm = Communicator(mesh.group("dp"))

    def make() -> nn.Sequential:
        torch.manual_seed(4)
        layers = [MoELayer.from_preset("qwen3_moe", 8, 12, 4, mesh=mesh, top_k=1, replicas=1) for _ in range(3)]
        with torch.no_grad():
            for layer, hot in zip(layers, (0, 3, 0), strict=True):
                layer.router.bias = nn.Parameter(torch.zeros(4))
                layer.router.bias[hot] = 3.0
        layers[2].experts.replicas = 0
        return nn.Sequential(*layers)

    def step(model: nn.Module, seed: int) -> list[Tensor]:
        model.zero_grad()
        x = torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(10 * seed + comm.rank)).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(local(p.grad) for p in model.parameters() if p.grad is not None)]

    model, plain = make(), make()
    assert rebalance(model) == {}
    for one in (model, plain):
        step(one, 0)
    mine = list(expert_loads(model).values())
    found = rebalance(model, reset=True)
    result = {
        "placements": found,
        "wanted": {str(i): plan_placement(comm.all_reduce(mine[i]), 2, 1) for i in range(2)},
        "loads after": [load.tolist() for load in expert_loads(model).values()],
        "of the third": (mine[2].tolist(), model[2].experts.placement),
        "steps": (step(model, 1), step(plain, 1)),
        "state": (model.state_dict().keys(), plain.state_dict().keys()),
    }
    model[0].router = nn.Identity()
    try:
        fp.expert.rebalance(model)
    except TypeError as error:
        result["error"] = str(error)
    mesh.close()
    result["state"] = [list(keys) for keys in result["state"]]
    return result
