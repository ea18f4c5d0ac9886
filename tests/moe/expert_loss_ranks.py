"""What the ranks of the tests of balance losses and biases run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastpar as fp
from examples.model import Llama, LlamaConfig
from fastpar.comm import record
from fastpar.expert import (
    BiasRule,
    LossRule,
    Router,
    aux_loss,
    balance_routes,
    global_batch_aux_loss,
    sequence_aux_loss,
    update_biases,
    z_loss,
)
from fastpar.ops.moe.route import RouteRule, moe_route

RULE = RouteRule(2, "sigmoid", normalize=True)
NUM_SEQUENCES = 4


def batch(total: int, num_experts: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """logits, mask (with NaN where it is False) and sequences of a batch that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(total, num_experts, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < 0.8
    logits[~mask] = torch.nan
    return logits, mask, torch.arange(total) * NUM_SEQUENCES // total


def shares(
    logits: Tensor, mask: Tensor, sequences: Tensor, group: Any = None, batch_groups: Any = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """The share and its gradient by the logits, of every loss."""
    found = {}
    for kind in ("switch", "huggingface", "sequence", "global_batch", "z"):
        leaf = logits.clone().requires_grad_()
        routing = moe_route(leaf, RULE, mask=mask)
        if kind == "z":
            loss = z_loss(leaf, mask=mask, group=group)
        elif kind == "sequence":
            loss = sequence_aux_loss(routing.scores, routing.indices, sequences, NUM_SEQUENCES, mask=mask, group=group)
        elif kind == "global_batch":
            loss = global_batch_aux_loss(
                routing.scores, routing.indices, mask=mask, group=group, batch_groups=batch_groups
            )
        else:
            loss = aux_loss(routing.scores, routing.indices, convention=kind, mask=mask, group=group)
        found[kind] = (loss.detach(), torch.autograd.grad(loss, leaf)[0])
    return found


def split_losses(sizes: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    start = sum(sizes[: dist.get_rank()])
    return shares(*(part[start : start + sizes[dist.get_rank()]] for part in batch(sum(sizes))), group=dist.group.WORLD)


def split_global_batch(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tokens over tp, microbatches over dp: rank r has the part r."""
    mesh = fp.init_mesh(dp_shard=2, tp=2)
    start = sum(sizes[: dist.get_rank()])
    parts = (part[start : start + sizes[dist.get_rank()]] for part in batch(sum(sizes)))
    found = shares(*parts, group=mesh.group("tp"), batch_groups=(mesh.group("dp_shard"),))["global_batch"]
    mesh.close()
    return found


def router(group: Any = None, **options: Any) -> Router:
    made = Router(8, 6, RouteRule(2), group=group, **options)
    with torch.no_grad():
        made.weight.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(5)))
    return made


def tokens(total: int) -> Tensor:
    return torch.randn(total, 8, generator=torch.Generator().manual_seed(4))


def router_gradient(sizes: tuple[int, ...]) -> tuple[Tensor, int]:
    """The router's gradient by its attached losses alone, summed over the ranks; and collectives in forward."""
    start = sum(sizes[: dist.get_rank()])
    x = tokens(sum(sizes))[start : start + sizes[dist.get_rank()]]
    layer = router(dist.group.WORLD, losses=LossRule("switch", coeff=0.1, z_coeff=0.01))
    with record() as log:
        routing = layer(x)
    (routing.weights.sum() * 0.0).backward()
    assert layer.weight.grad is not None
    dist.all_reduce(layer.weight.grad)
    return layer.weight.grad, len(log)


def moved_biases(sizes: tuple[int, ...], steps: int) -> tuple[Tensor, Tensor, int, int]:
    """The biases of two routers after some steps with the tokens split over tp and dp; collectives of a step; the
    first expert of this rank's first token when all are chosen in turn.
    """
    mesh = fp.init_mesh(dp_shard=2, tp=2)
    start = sum(sizes[: dist.get_rank()])
    model = torch.nn.ModuleList(router(bias_rule=BiasRule(0.1)) for _ in range(2))
    x = tokens(sum(sizes))[start : start + sizes[dist.get_rank()]]
    for _ in range(steps):
        sum(layer(x).weights.sum() for layer in model).backward()
        with record() as log:
            update_biases(model, groups=(mesh.group("tp"), mesh.group("dp_shard")))
    mesh.close()
    with balance_routes(model, dist.group.WORLD):
        first = int(model[0](tokens(1)).indices[0, 0])
    biases = [layer.e_score_correction_bias for layer in model]
    return biases[0], biases[1], len(log), first


def told_of_tensor_parallel_ranks() -> str:
    """What is said to routers with a group over ranks that hold the same tokens; under a split sequence it is right."""
    mesh = fp.init_mesh(tp=2, device="cpu")
    model = Llama(LlamaConfig(51, 32, 24, 2, 4, 2, num_experts=4, router_aux_loss_coef=0.1))
    for each in fp.expert.routers_of(model).values():
        each.comm = fp.comm.Communicator(mesh.group("tp"))
    fp.unparallelize(fp.parallelize(model, mesh, sequence_parallel=True))
    try:
        fp.parallelize(model, mesh)
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return ""
