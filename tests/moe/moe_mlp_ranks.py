"""What the ranks of the expert tests run, and the problems they run it on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar import ops
from fastpar.comm import record
from fastpar.contracts.moe import ExpertRule
from tests.moe.moe_calls import moe_mlp

HIDDEN, INNER, TOP_K, EXPERTS = 12, 10, 3, 8
NAMES = ("out", "x", "weights", "add", "first", "second", "first_bias", "second_bias")


def problem(dtype: torch.dtype, rule: ExpertRule, tokens: int = 23, biased: bool = True) -> dict[str, Tensor]:
    """A batch and experts that are the same for any number of ranks; the last expert is chosen by nobody."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    outer = 2 * INNER if rule.is_gated else INNER
    first, second = random(EXPERTS, outer, HIDDEN, scale=0.5), random(EXPERTS, HIDDEN, INNER, scale=0.5)
    if rule.transposed:
        first, second = (t.transpose(1, 2).contiguous() for t in (first, second))
    indices = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(1)[:, :TOP_K]
    indices[torch.rand(tokens, TOP_K, generator=generator) < 0.1] = -1
    given = {
        "x": random(tokens, HIDDEN),
        "indices": indices,
        "weights": torch.rand(tokens, TOP_K, generator=generator),
        "add": random(tokens, HIDDEN),
        "first": first,
        "second": second,
        "dout": random(tokens, HIDDEN),
    }
    if dtype == torch.float64:
        given["weights"] = given["weights"].double() / 3  # numbers that float32 has not
    if biased:
        given |= {"first_bias": random(EXPERTS, outer), "second_bias": random(EXPERTS, HIDDEN)}
    return given


def part(given: dict[str, Tensor], sizes: tuple[int, ...], rank: int) -> dict[str, Tensor]:
    """This rank's tokens and experts."""
    tokens = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    mine = EXPERTS // len(sizes)
    experts = slice(rank * mine, (rank + 1) * mine)
    by_token = ("x", "indices", "weights", "add", "dout")
    return {name: value[tokens if name in by_token else experts] for name, value in given.items()}


def gradients(function: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The output and the gradients of all floating inputs of `function`."""
    dout, indices = given["dout"], given["indices"]
    leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items() if n not in ("dout", "indices")}
    rest = {name: leaf for name, leaf in leaves.items() if name not in ("x", "weights", "first", "second")}
    out = function(leaves["x"], indices, leaves["weights"], leaves["first"], leaves["second"], **rest, **options)
    found = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


def run_experts(sizes, dtype, rule, options) -> dict[str, Tensor]:
    """The same three times, since buffers are used again."""
    given = part(problem(dtype, rule), sizes, dist.get_rank())
    found: dict[str, Tensor] = {}
    for _ in range(3):
        again = gradients(moe_mlp, given, rule=rule, group=dist.group.WORLD, **options)
        assert not found or all(torch.equal(found[name], again[name]) for name in found)
        found = again
    return found


def run_chunks(sizes, rule, options, counts) -> list[dict[str, Tensor]]:
    given = part(problem(torch.float32, rule), sizes, dist.get_rank())
    options = {"rule": rule, "group": dist.group.WORLD, **options}
    return [gradients(moe_mlp, given, chunks=chunks, **options) for chunks in counts]


def record_chunks(sizes, options, counts) -> list[tuple[list[str], int]]:
    """By number of chunks: the collectives of a forward and a backward, and the bytes that they send."""
    rule = ExpertRule()
    given = part(problem(torch.float32, rule), sizes, dist.get_rank())
    found = []
    for chunks in counts:
        with record() as log:
            gradients(moe_mlp, given, rule=rule, group=dist.group.WORLD, chunks=chunks, **options)
        found.append(([entry.op for entry in log], sum(entry.nbytes for entry in log)))
    return found


def wrong_experts_on_one_rank(kind: str) -> list[str]:
    """What each call raised: one with experts of a wrong kind, or wrong beside copies, on rank 1, then a right one."""
    rule, rank = ExpertRule(), dist.get_rank()
    given = part(problem(torch.float32, rule, biased=False), (17, 6), rank)
    x, indices, weights = given["x"], given["indices"], given["weights"]
    right = ops.ExpertWeights(given["first"], given["second"])
    wrong: Any = (given["first"], given["second"]) if kind == "tuple" else right._replace(first=right.first.double())
    copies = ops.ExpertWeights(right.first[:1].clone(), right.second[:1].clone()) if kind == "copies" else None
    raised = []
    for experts in (wrong if rank == 1 else right, right):
        try:
            ops.moe_mlp(x, indices, weights, experts, replicas=copies, rule=rule, group=dist.group.WORLD)
            raised.append("")
        except (ValueError, TypeError) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def wrong_on_one_rank(change: dict[str, Any]) -> list[str]:
    """What each call raised: one with `change` on rank 1, then a right one."""
    rule = ExpertRule()
    given = part(problem(torch.float32, rule, biased=False), (17, 6), dist.get_rank())
    raised = []
    for wrong in (change if dist.get_rank() == 1 else {}, {}):
        try:
            gradients(moe_mlp, given | wrong, rule=rule, group=dist.group.WORLD)
            raised.append("")
        except (ValueError, TypeError) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised
