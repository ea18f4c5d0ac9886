"""What the ranks of the tests of moe_combine and of what runs beside it do."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fastpar import comm
from fastpar.comm import CommMismatchError, Communicator, record
from fastpar.expert import MoELayer
from fastpar.mesh import init_mesh
from fastpar.ops import ExpertRule, moe_combine
from fastpar.recompute import Selective, checkpoint
from tests.moe.moe_calls import dispatch_of, moe_dispatch, moe_mlp
from tests.moe.moe_mlp_ranks import NAMES, gradients, part, problem
from tests.moe.moe_ranks import TRANSPORTS, check_step, multiply, routed

SIZES = (17, 6)
RULE = ExpertRule()

# ---- what is wrong on one rank


def wrong_rows(rows: Tensor, row_weights: Tensor) -> dict[str, tuple[dict[str, Any], str]]:
    """Name: arguments of moe_combine, and what they raise."""
    return {
        "a row too many": (
            {"rows": torch.cat([rows, rows[:1]])},
            r"rows must be \[\d+, H\], as the dispatch gave them",
        ),
        "no matrix": ({"rows": rows.flatten()}, r"rows must be \[\d+, H\], as the dispatch gave them, got \(\d+,\)"),
        "whole numbers": ({"rows": rows.long()}, "rows must be one of .*got torch.int64"),
        "no tensor": ({"rows": rows.tolist()}, "rows must be a tensor, got list"),
        "weights of other rows": ({"row_weights": row_weights[:-1]}, r"row_weights must be \[\d+\], got"),
        "the sum of other tokens": ({"add": torch.zeros(1, 5)}, r"add must be \[3, 5\], got \(1, 5\)"),
        "no sum": ({"add": 1.0}, "add must be a tensor, got float"),
    }


def combine_wrong(transport: str) -> int:
    """Rank 1 is wrong, and all say so; what follows works. `transport`: of the communicator."""
    rank, count = dist.get_rank(), 0
    group = Communicator(dist.group.WORLD, transport=transport)
    for options in TRANSPORTS.values() if transport == "auto" else [TRANSPORTS["all-to-all"]]:
        x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2], [2, 2]]))
        rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=4, group=group, **options)
        for name, (change, text) in wrong_rows(rows, row_weights).items():
            given = {"rows": rows, "row_weights": row_weights, **(change if rank == 1 else {})}
            pattern = text if rank == 1 else "moe_combine: wrong arguments on rank 1 of the group: see its error"
            with pytest.raises(ValueError, match=pattern):
                moe_combine(handle=plan, **given)
            check_step(routed(torch.tensor([[0, 3], [1, 2]])), 4, name, **options)
            count += 1
    return count


def combine_different() -> None:
    """Rows that are right on each rank, and not alike."""
    rank = dist.get_rank()
    x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2], [2, 2]]), 8)
    for name, options in TRANSPORTS.items():
        rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=4, group=dist.group.WORLD, **options)
        for columns, error in ((7, ValueError), (6, ValueError if name == "shared memory" else CommMismatchError)):
            width = rf"the width of rows must be equal on all ranks of the group, got \[8, {columns}\]"
            sizes = "what ranks send is not what ranks expect"
            with pytest.raises(error, match=width if error is ValueError else sizes):
                moe_combine(rows[:, : columns if rank else 8], plan)  # packed, 7 take as many bytes as 8
        half = rows[:, :4] if rank else rows.bfloat16()  # as many bytes
        with pytest.raises(ValueError, match=r"the (width|dtype) of rows must be equal on all ranks"):
            moe_combine(half, plan)
        with pytest.raises(ValueError, match=r"what requires gradients .*equal on all ranks .*got \[0, 1\]"):
            moe_combine(rows.clone().requires_grad_(rank == 1), plan, row_weights)
        check_step(routed(torch.tensor([[0, 3], [1, 2]])), 4, name, **options)
    with pytest.raises(ValueError, match=r"exact must be equal on all ranks of the group, got \[0, 1\]"):
        moe_dispatch(x, indices, num_experts=4, group=dist.group.WORLD, transport="all_to_all", exact=rank == 1)


def combine_wider() -> list[float]:
    """Results that need more memory than there is, right ones and wrong ones."""
    rank, took = dist.get_rank(), []
    x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2], [2, 2]]))
    options = TRANSPORTS["shared memory"]
    for width in (30_000, 90_000):
        _, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=4, group=dist.group.WORLD, **options)
        wide = torch.arange(plan.num_rows)[:, None] + torch.zeros(width)
        began = time.monotonic()
        with pytest.raises(ValueError, match="rows must be" if rank else "wrong arguments on rank 1"):
            moe_combine(wide[:-1] if rank else wide, plan, row_weights)
        took.append(time.monotonic() - began)
        found = moe_combine(wide, plan, row_weights)
        assert torch.equal(found[:, :1].expand(-1, width), found)
        narrow = moe_combine(wide[:, :1], plan, row_weights)
        assert torch.equal(found[:, :1], narrow)
    return took


def only_add() -> list[str]:
    """What backward of a combine exchanges for a gradient of what is added alone."""
    x, indices, weights, dout = routed(torch.tensor([[0, 3], [1, 2], [2, 2]]))
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=4, group=dist.group.WORLD)
    add = torch.zeros_like(x).requires_grad_(dist.get_rank() == 0)  # nobody else's business
    out = moe_combine(rows, plan, row_weights, add=add)
    with record() as log:
        if add.requires_grad:
            (found,) = torch.autograd.grad(out, add, dout)
            assert torch.equal(found, dout)
    return [entry.op for entry in log]


# ---- beside


class Scale(torch.autograd.Function):
    """x * 2, noting when."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Any) -> Tensor:
        ctx.note = note
        note("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.note("backward")
        return grads[0] * 2, None


def mlp(given: dict[str, Tensor], function: Any, **options: Any) -> dict[str, Tensor]:
    """The output and all gradients with function(add) added."""

    def run(x: Tensor, *rest: Tensor, add: Tensor, **more: Any) -> Tensor:
        return moe_mlp(x, *rest, add=function(x, add), **more)

    return gradients(run, given, rule=RULE, group=dist.group.WORLD, **options)


def beside_and_before(options: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the same comes of a function and of its result, several times."""
    given = part(problem(dtype, RULE), SIZES, dist.get_rank())
    before = mlp(given, lambda x, add: x.sin() * add, **options)
    for _ in range(3):
        beside = mlp(given, lambda x, add: lambda: x.sin() * add, **options)
        assert beside.keys() == before.keys() == set(NAMES)
        for name, value in before.items():
            assert torch.equal(beside[name], value), name
    return True


def order_of_events(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What happens in forward and in backward: launches of collectives, waits for them, and the function."""
    given = part(problem(torch.float32, RULE), SIZES, dist.get_rank())
    leaves = {name: value.clone() for name, value in given.items() if name not in ("dout", "add")}
    for name, value in leaves.items():
        value.requires_grad_(name != "indices")
    found = []

    def run() -> Tensor:
        def function() -> Tensor:
            return Scale.apply(leaves["x"], lambda what: marks.append((trace.now(), what)))

        return moe_mlp(rule=RULE, group=dist.group.WORLD, add=function, **leaves, **options)

    out = None
    for step in range(4):  # in the first ones regions are made
        marks: list[tuple[float, str]] = []
        with comm.trace() as trace:
            if step % 2 == 0:
                out = run()
            else:
                out.backward(given["dout"])
        for span in trace.spans:
            marks.append((span.launched, f"launch {span.op}"))
            marks += [(begin, f"wait {span.op}") for begin, _ in span.waits]
        found.append([what for _, what in sorted(marks)])
    return found[2], found[3]


def nested(options: dict[str, Any]) -> bool:
    """A function that exchanges itself, over the same group, forward and backward."""
    given = part(problem(torch.float32, RULE), SIZES, dist.get_rank())
    inner = routed(torch.tensor([[0, 3], [1, 2], [5, 7]]), 40)

    def exchange(add: Tensor) -> Tensor:
        x, weights = inner[0] + add.mean(), inner[2] * add.mean()
        where = {"num_experts": 8, "group": dist.group.WORLD, "transport": "all_to_all"}
        rows, row_weights, plan = moe_dispatch(x, inner[1], weights, **where)
        return add + moe_combine(multiply(rows, plan), plan, row_weights).sin().mean()

    before = mlp(given, lambda _, add: exchange(add), **options)
    beside = mlp(given, lambda _, add: lambda: exchange(add), **options)
    return all(torch.equal(beside[name], before[name]) for name in before)


def partial_gradients(options: dict[str, Any]) -> list[list[str]]:
    """Collectives of backwards that ask for something only; a graph that is used twice."""
    given = part(problem(torch.float32, RULE, biased=False), SIZES, dist.get_rank())
    dout = given["dout"]
    names = ("x", "weights", "first", "second")
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    add = given["add"].clone().requires_grad_()
    where = {"rule": RULE, "group": dist.group.WORLD, **options}
    logs = []

    def grads(out: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
        with record() as log:
            found = torch.autograd.grad(out, of, dout, retain_graph=True)
        logs.append([entry.op for entry in log])
        return found

    out = moe_mlp(indices=given["indices"], add=lambda: add * 3, **leaves, **where)
    (alone,) = grads(out, [add])
    everything = grads(out, [add, *leaves.values()])
    again = grads(out, [add, *leaves.values()])
    assert torch.equal(alone, 3 * dout)
    assert all(torch.equal(a, b) for a, b in zip(everything, again, strict=True))
    (of_x,) = grads(out, [leaves["x"]])
    assert torch.equal(of_x, everything[1])

    frozen = {name: leaf.detach() for name, leaf in leaves.items()}
    out = moe_mlp(indices=given["indices"], add=lambda: add * 3, **frozen, **where)
    (alone,) = grads(out, [add])
    assert torch.equal(alone, 3 * dout)
    out = moe_mlp(indices=given["indices"], add=lambda: add.detach() * 3, **leaves, **where)
    found = grads(out, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, everything[1:], strict=True))
    with torch.no_grad():
        plain = moe_mlp(indices=given["indices"], add=lambda: add * 3, **leaves, **where)
        nothing = moe_mlp(indices=given["indices"], add=lambda: None, **leaves, **where)
        zeros = moe_mlp(indices=given["indices"], add=torch.zeros_like(add), **leaves, **where)
    assert torch.equal(plain, out)
    assert torch.equal(nothing, zeros)
    return logs


def second_derivative() -> None:
    given = part(problem(torch.float32, RULE, biased=False), SIZES, dist.get_rank())
    dout = given.pop("dout").requires_grad_()
    add = given.pop("add")
    x = given.pop("x").requires_grad_()
    given |= {"rule": RULE, "group": dist.group.WORLD, "transport": "all_to_all"}
    out = moe_mlp(x, **given, add=lambda: x * add)
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="moe_mlp has a first derivative only; moe_dispatch"):
        dx.sum().backward()
    with pytest.raises(ValueError, match=r"what is added must be \(\d+, 12\), as x is, got \(1, 12\)"):
        moe_mlp(x, **given, add=lambda: x[:1])


# ---- chunks on the way back


def chunk_events(counts: tuple[int, ...]) -> list[list[str]]:
    """By number of chunks: launches of all-to-alls and products, in forward and backward."""
    from fastpar.comm.launcher import Launcher
    from fastpar.ops.moe import experts as _moe_mlp

    given = part(problem(torch.float32, RULE, biased=False), SIZES, dist.get_rank())
    events: list[str] = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for holder, name in ((Launcher, "all_to_all"), (_moe_mlp, "matmul")):
            original = getattr(holder, name)
            patch.setattr(holder, name, lambda *a, o=original, n=name, **k: events.append(n) or o(*a, **k))
        for chunks in counts:
            events.clear()
            gradients(moe_mlp, given, rule=RULE, group=dist.group.WORLD, transport="all_to_all", chunks=chunks)
            found.append(list(events))
    return found


# ---- the layer


class Sinus(nn.Module):
    """A shared expert with a parameter, and something random."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x * self.scale).sin(), 0.5)


def layer_steps(sizes: dict[str, int], options: dict[str, Any]) -> tuple[list[list[str]], list[int]]:
    """Collectives of a step of a layer whose shared expert runs beside the combine, and before it; and recomputed. And
    how many there were when the shared expert ran, beside and before.
    """
    mesh = init_mesh(**sizes, device="cpu")
    torch.manual_seed(0)
    layer = MoELayer.from_preset("mixtral", 8, 12, 4, mesh=mesh, top_k=2, dispatch=dispatch_of(**options))
    layer.shared = Sinus(8)
    twin = copy.deepcopy(layer)
    experts = twin.experts.forward
    twin.experts.forward = lambda x, indices, weights, add: experts(x, indices, weights, add())
    x, logs, results, called = torch.randn(3, 4, 8), [], [], []
    for one in (layer, twin):
        one.shared.register_forward_pre_hook(lambda *_: called.append(len(log)))
    if mesh.size("tp") == 1:
        x = x + dist.get_rank()
    runs = [layer, layer, twin, lambda x: checkpoint(layer, x), lambda x: checkpoint(layer, x, policy=Selective())]
    for run in runs:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with record() as log:
            out = run(leaf)
            (out * out.detach().cos()).sum().backward()
        module = twin if run is twin else layer
        found = [out.detach(), leaf.grad]
        for p in module.parameters():
            found.append(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad)
            p.grad = None
        results.append(found)
        logs.append([entry.op for entry in log])
    mesh.close()
    _clear_sharding_prop_cache()
    for found in results[1:]:
        assert len(found) == len(results[0]) == 2 + len(list(layer.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    return logs[1:], called[1:3]


def others_go_on(options: dict[str, Any]) -> list[bool]:
    """A step of each of two groups, with a collective of the other one beside the combine."""
    size, rank = dist.get_world_size(), dist.get_rank()
    pairs = [dist.new_group([low, low + size // 2]) for low in range(size // 2)]
    halves = [dist.new_group(list(range(0, size // 2))), dist.new_group(list(range(size // 2, size)))]
    across, within = Communicator(pairs[rank % (size // 2)]), Communicator(halves[rank // (size // 2)])
    found = []
    for step in range(4):
        x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2], [2, step]]))
        first, second = torch.eye(5).repeat(2, 1, 1), torch.eye(5).repeat(2, 1, 1)
        if rank == step:
            time.sleep(0.1)  # comes late
        out = moe_mlp(
            x, indices, weights, first, second, rule=ExpertRule("relu"), group=across,
            add=lambda x=x: within.all_reduce(x), **options,
        )  # fmt: skip
        want = x.relu() * weights.sum(1, keepdim=True) + within.all_reduce(x)
        found.append(torch.allclose(out, want, rtol=1e-5, atol=1e-5))
    return found
