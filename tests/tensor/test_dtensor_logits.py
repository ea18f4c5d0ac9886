"""Logits that are DTensors with Shard(-1), as torch's loss_parallel has them: every function of a split vocabulary
takes them, gives what the whole logits give on one rank, and refuses other placements, groups and ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fastpar import ops, reference
from fastpar.comm import Communicator, shard_range
from tests.dist import run_ranks
from tests.ops.vocab_cases import normal

ROWS, VOCAB = 4, 9  # of two ranks one has 5 columns, of three each has 3
TARGET = torch.tensor([0, 8, -100, 4])
CLASS_WEIGHT = torch.linspace(0.5, 1.5, VOCAB)
Function = Callable[..., Any]

FUNCTIONS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "cross-entropy": ("vocab_parallel_cross_entropy", (TARGET,), {"label_smoothing": 0.1, "weight": CLASS_WEIGHT}),
    "log-prob": ("vocab_parallel_log_prob", (TARGET,), {}),
    "entropy": ("vocab_parallel_entropy", (), {}),
    "topk": ("vocab_parallel_topk", (3,), {}),
    "softmax": ("vocab_parallel_softmax", (), {}),
    "log-softmax": ("vocab_parallel_log_softmax", (), {"dtype": torch.float64}),
    "top-k top-p": ("vocab_parallel_top_k_top_p", (), {"top_k": 4, "filter_value": -1e4}),
    "temperature": ("vocab_parallel_top_k_top_p", (), {"temperature": 2.0}),
}
SHARDED = ("softmax", "log-softmax", "top-k top-p", "temperature")


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def upstream_of(out: Tensor) -> Tensor:
    return torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)


def outcome(module: Any, name: str, logits: Tensor, **where: Any) -> tuple[Tensor, Tensor, Any]:
    """(whole output, whole gradient by the logits, the output as it is) of one function."""
    function, arguments, options = FUNCTIONS[name]
    out = first(getattr(module, function)(logits, *arguments, **options, **where))
    upstream = upstream_of(whole(out.detach()))
    if isinstance(out, DTensor):
        upstream = distribute_tensor(upstream, out.device_mesh, out.placements)
    out.backward(upstream)
    assert logits.grad is not None
    return whole(out).detach(), whole(logits.grad), out


def leaf(mesh: DeviceMesh, placements: list[Placement]) -> Any:
    return distribute_tensor(normal(ROWS, VOCAB), mesh, placements).requires_grad_()


def run_every_function(module_name: str) -> list[str]:
    """What is wrong on this rank, of every function and of argmax and sampling."""
    module = {"ops": ops, "reference": reference}[module_name]
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    wrong = []
    for name in FUNCTIONS:
        wanted = outcome(module, name, normal(ROWS, VOCAB).requires_grad_())
        for placement in (Shard(-1), Replicate()):
            out, grad, raw = outcome(module, name, leaf(mesh, [placement]))
            is_right = torch.allclose(out, wanted[0], rtol=2e-6) and torch.allclose(grad, wanted[1], atol=1e-6)
            is_placed = isinstance(raw, DTensor) == (name in SHARDED)
            if is_placed and isinstance(raw, DTensor):
                is_placed = raw.shape == (ROWS, VOCAB) and tuple(raw.placements) == leaf(mesh, [placement]).placements
            if not (is_right and is_placed):
                wrong.append(f"{name} {placement}")
    x = leaf(mesh, [Shard(-1)])
    plain = normal(ROWS, VOCAB)
    if not torch.equal(module.vocab_parallel_argmax(x), module.vocab_parallel_argmax(plain)):
        wrong.append("argmax")
    chosen = module.vocab_parallel_sample(module.vocab_parallel_top_k_top_p(x, top_k=2), seed=3)
    if not torch.equal(chosen, module.vocab_parallel_sample(module.vocab_parallel_top_k_top_p(plain, top_k=2), seed=3)):
        wrong.append("sample")
    return wrong


@pytest.mark.parametrize("module", ["ops", "reference"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_function_takes_logits_that_a_mesh_splits_or_repeats(world_size: int, module: str) -> None:
    assert run_ranks(world_size, run_every_function, module) == [[]] * world_size


def run_with_group_and_range() -> list[bool]:
    """The DTensor's own group in every form, and its own range, change nothing."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wanted = outcome(ops, "cross-entropy", leaf(mesh, [Shard(-1)]))
    comm = Communicator(mesh)
    own = (*shard_range(VOCAB, 2, comm.rank), VOCAB)
    wheres: list[dict[str, Any]] = [{"group": mesh}, {"group": comm}, {"group": mesh.get_group()}]
    wheres += [{"vocab_range": own}, {"group": torch.distributed.group.WORLD, "vocab_range": own}]
    same = []
    for where in wheres:
        out, grad, _ = outcome(ops, "cross-entropy", leaf(mesh, [Shard(-1)]), **where)
        same.append(torch.equal(out, wanted[0]) and torch.equal(grad, wanted[1]))
    out, _, _ = outcome(ops, "cross-entropy", leaf(mesh, [Replicate()]), group=mesh)
    return [*same, torch.allclose(out, wanted[0], rtol=2e-6)]


def test_the_group_and_the_range_of_the_mesh_may_be_given_as_well() -> None:
    assert run_ranks(2, run_with_group_and_range) == [[True] * 6] * 2


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def run_refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    two, alone = torch.distributed.new_group([0, 1]), [torch.distributed.new_group([rank]) for rank in range(3)]
    rank = mesh.get_rank()
    x, repeated, softmax = leaf(mesh, [Shard(-1)]), leaf(mesh, [Replicate()]), ops.vocab_parallel_softmax
    rows = leaf(mesh, [Shard(0)])
    uneven = DTensor.from_local(normal(4, 9)[:, : 2 + rank], mesh, [Shard(-1)], shape=torch.Size((4, 9)), stride=(9, 1))
    weight = distribute_tensor(normal(VOCAB, 5), mesh, [Shard(0)])
    partial_target = DTensor.from_local(TARGET, mesh, [Partial()])
    return [
        message(lambda: softmax(rows)),
        message(lambda: softmax(DTensor.from_local(normal(4, 9), mesh, [Partial()]))),
        message(lambda: softmax(x, group=alone[rank])),
        message(lambda: softmax(repeated, group=two)) if rank < 2 else "group has the ranks [0, 1]",
        message(lambda: softmax(x, vocab_range=(0, 3, 10))),
        message(lambda: softmax(uneven)) if rank != 1 else "[0, 3): pass the local tensor",
        message(lambda: ops.linear_cross_entropy(normal(4, 5), weight, TARGET, group=alone[rank])),
        message(lambda: ops.vocab_parallel_cross_entropy(x, partial_target)),
    ]


def test_other_placements_groups_and_ranges_are_refused() -> None:
    wanted = [
        "Shard(-1), or whole, Replicate()",
        "have to be reduced first",
        "DTensor that ranks [0, 1, 2] share",
        "group has the ranks [0, 1]",
        "vocab_range is (0, 3, 10), but the DTensor logits hold",
        "pass the local tensor",
        "weight is a DTensor that ranks [0, 1, 2] share",
        "target that is a partial sum",
    ]
    for messages in run_ranks(3, run_refusals):
        for part, text in zip(wanted, messages, strict=True):
            assert part in text
