"""Two ranks on CUDA tensors without a GPU, over a group that has a backend for devices only: layers, ZeRO, experts.

Every test compares with the same on CPU tensors over gloo; the watch is on while a step runs, after one warm-up step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastpar as fp
from fastpar import ops
from fastpar.expert import Experts, MoELayer, Router, SharedExpert
from fastpar.pipeline import Pipeline, make_schedule
from fastpar.tensor import Grid, GridLinear, GridRegion
from tests.dist import run_ranks
from tests.rehearsal import torch_attention
from tests.rehearsal.group import device_group, lanes
from tests.rehearsal.watch import Finding, Watch
from tests.rehearsed.exceptions import unlisted

HIDDEN, VOCAB, ROWS = 16, 12, 4
Result = tuple[list[Tensor], list[Finding]]


def both(run: Callable[..., list[Tensor]], *arguments: Any) -> list[str]:
    """Runs it on the CPU and on the device; what is unlisted. Raises where results differ."""
    return unlisted(compared(run, *arguments))


def compared(run: Callable[..., list[Tensor]], *arguments: Any) -> list[Finding]:
    expected = run("cpu", dist.group.WORLD, None, *arguments)
    watch = Watch()
    found = run("cuda", device_group(), watch, *arguments)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums in another order; 16 bits are rounded.
        rtol, atol = (2e-3, 1e-4) if theirs.dtype.itemsize > 2 else (2e-2, 2e-2)
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=rtol, atol=atol)
    return watch.found


class nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: Any) -> None: ...


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


PLAN = {"embed": "vocab", "up": "colwise", "down": "rowwise", "head": "vocab"}


def tensor_parallel(device: str, group: Any, watch: Any) -> list[Tensor]:
    model = Mlp().to(device)
    fp.parallelize(model, group, PLAN)
    ids = (torch.arange(2 * ROWS).view(2, ROWS) % VOCAB).to(device)
    for step in range(2):
        model.zero_grad()
        with watch if step and watch is not None else nothing():
            logits = model(ids)
            loss = fp.ops.vocab_parallel_cross_entropy(logits.flatten(0, 1), ids.flatten(), group=group)
            loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *(fp.tensor.local_tensor(grad) for grad in grads)]


def sequence_parallel(device: str, group: Any, watch: Any) -> list[Tensor]:
    """Linears that gather rows and scatter sums, with ranks that have different numbers of them."""
    generator = torch.Generator().manual_seed(3 + dist.get_rank())

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    sizes = [2, 3]
    x, up, down = leaf(sizes[dist.get_rank()], HIDDEN), leaf(8, HIDDEN), leaf(HIDDEN, 8)
    with watch or nothing():
        hidden = fp.ops.all_gather_linear(x, up, group=group, sizes=sizes)
        out = fp.ops.linear_reduce_scatter(hidden, down, group=group, sizes=sizes)
        out.square().sum().backward()
    return [out.detach(), x.grad, up.grad, down.grad]  # type: ignore[list-item]


def split_sequences(device: str, group: Any, watch: Any, method: Any) -> list[Tensor]:
    """Packed sequences over two ranks, by every method; with a sink, soft-capping and dropout."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mask = ops.AttentionMask(causal=True, documents=((5, 9, 4),))
    layout = ((ops.TokenRange(0, 5), ops.TokenRange(13, 18)), (ops.TokenRange(5, 13),))[:size]
    generator = torch.Generator().manual_seed(3 + rank)
    tokens = sum(part.stop - part.start for part in layout[rank])

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    q, k, v = leaf(1, 2, tokens, 8), leaf(1, 2, tokens, 8), leaf(1, 2, tokens, 8)
    sink = torch.ones(2, device=device, requires_grad=True)
    with lanes(), watch or nothing():
        out = ops.context_attention(
            q, k, v, group=group, layout=layout, mask=mask, method=method, softcap=4.0, sink=sink,
            dropout=ops.AttentionDropout(0.2, seed=5),
        )  # fmt: skip
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
    return [out.detach(), *grads]


def split_sequences_by_torch(device: str, group: Any, watch: Any, method: Any) -> list[Tensor]:
    """Packed sequences of 16 bits with grouped heads and a sink, where torch's attention kernels are asked for."""
    rank, mask = dist.get_rank(), ops.AttentionMask(causal=True, window=(7, 0), documents=((11, 7),))
    layout = ((ops.TokenRange(0, 9),), (ops.TokenRange(9, 18),))
    generator = torch.Generator().manual_seed(3 + rank)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half().to(device).requires_grad_()

    q, k, v, sink = leaf(2, 4, 9, 16), leaf(2, 2, 9, 16), leaf(2, 2, 9, 16), leaf(4)
    torch_attention.calls.clear()
    with lanes(), watch or nothing():
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            out = ops.context_attention(q, k, v, group=group, layout=layout, mask=mask, method=method, sink=sink)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
    for word in ("forward", "backward"):
        assert any(word in call for call in torch_attention.calls) == (device == "cuda")
    return [out.detach(), *grads]


def each_of(device: str, group: Any, watch: Any, run: Any, variants: tuple[Any, ...]) -> list[Tensor]:
    return [x for variant in variants for x in run(device, group, watch, variant)]


def grid_of(device: str, group: Any, spec: fp.GridSpec) -> Grid:
    """A grid with one axis of ranks, over a group that no mesh has made."""
    grid: Any = Grid.__new__(Grid)
    sizes = (spec.x, spec.y, spec.replicas, spec.z)
    grid.spec = spec
    grid.mesh = DeviceMesh(device, torch.arange(2), mesh_dim_names=("tp",), _init_backend=False)
    grid.x, grid.y, grid.replicas, grid.z = (fp.comm.Communicator.of(group if size > 1 else None) for size in sizes)
    grid.ranks = fp.comm.Communicator.of(group)
    return grid


def on_a_grid(device: str, group: Any, watch: Any, sizes: tuple[int, int, int]) -> list[Tensor]:
    """A pair of linears, column- and row-parallel, in a region of the grid."""
    torch.manual_seed(0)
    mlp = Mlp().to(device)
    grid = grid_of(device, group, fp.GridSpec(*sizes))
    region = GridRegion(grid)
    up = GridLinear.from_linear(mlp.up, grid, "column", sequence=region)
    down = GridLinear.from_linear(mlp.down, grid, "row", sequence=region)
    x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    for step in range(2):
        with watch if step and watch is not None else nothing():
            out = region.leave(down(torch.relu(up(region.enter(x)))))
            grads = torch.autograd.grad(out.square().sum(), [x, *up.parameters(), *down.parameters()])
    return [out.detach(), *(fp.tensor.local_tensor(grad) for grad in grads)]


def zero_step(device: str, group: Any, watch: Any, stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2)]).to(device)
    optimizer = fp.optim.AdamW(model.parameters(), lr=1e-2)
    zero = fp.zero.shard(model, optimizer, group=group, stage=stage, max_norm=1.0)
    losses = []
    for step in range(3):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(step + dist.get_rank())).to(device)
        with watch if step == 2 and watch is not None else nothing():
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    values = [x.detach().clone() for x in zero.state_dict()["model"].values()]
    zero.detach()
    return [*losses, *(x._local_tensor if hasattr(x, "_local_tensor") else x for x in values)]


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def pipeline_step(device: str, group: Any, watch: Any) -> list[Tensor]:
    schedule = make_schedule("1f1b", 2, 2)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).to(device) for _ in range(2)]
    part = parts[dist.get_rank()]
    with lanes():
        pipe = Pipeline([part], schedule, group, loss=squared_error)
        for step in range(2):
            x, target = torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(step)).to(device)
            with watch if step and watch is not None else nothing():
                loss = pipe.step(x, target=target)
        pipe.close()
    return [loss.detach(), *(p.grad for p in part.parameters())]  # type: ignore[list-item]


def moe_layer(device: str, group: Any, watch: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(Router(HIDDEN, 4, ops.RouteRule(2)), Experts(HIDDEN, HIDDEN, 4), SharedExpert(HIDDEN, HIDDEN))
    layer = layer.to(device)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with watch or nothing():
        out = layer(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]  # type: ignore[list-item]


def experts(device: str, group: Any, watch: Any, transport: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    x, weights, first, second = leaf(6, HIDDEN), leaf(6, 2), leaf(2, 2 * HIDDEN, HIDDEN), leaf(2, HIDDEN, HIDDEN)
    indices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)]).to(device)
    with watch or nothing():
        out = fp.ops.moe_mlp(
            x, indices, weights, fp.ops.ExpertWeights(first, second), group=group, dispatch=fp.ops.Dispatch(transport)
        )
        out.square().sum().backward()
    return [out.detach(), x.grad, weights.grad, first.grad, second.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("run", [tensor_parallel, sequence_parallel])
def test_tensor_parallel_layers_train_on_device_tensors(run: Any) -> None:
    for found in run_ranks(2, both, run, timeout=60):
        assert not found, "\n".join(found)


def test_attention_of_split_sequences_trains_on_device_tensors_by_every_method() -> None:
    for found in run_ranks(2, both, each_of, split_sequences, ("ring", "ulysses", ops.GatherKeys(2)), timeout=100):
        assert not found, "\n".join(found)


def test_attention_of_split_sequences_trains_by_torchs_kernels_where_they_are_asked_for() -> None:
    for found in run_ranks(
        2, both, each_of, split_sequences_by_torch, ("ring", "ulysses", ops.GatherKeys(1)), timeout=60
    ):
        assert not found, "\n".join(found)


def test_linears_on_a_grid_train_on_device_tensors_along_every_axis() -> None:
    for found in run_ranks(2, both, each_of, on_a_grid, ((2, 1, 1), (1, 2, 1), (1, 1, 2)), timeout=60):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_every_zero_stage_runs_over_a_group_without_a_cpu_backend(stage: int) -> None:
    for found in run_ranks(2, both, zero_step, stage, timeout=60):
        assert not found, "\n".join(found)


def test_experts_on_two_ranks_exchange_rows_over_a_group_without_a_cpu_backend() -> None:
    for found in run_ranks(2, both, experts, "auto", timeout=60):
        assert not found, "\n".join(found)


def test_a_pipeline_passes_device_tensors_between_its_stages() -> None:
    for found in run_ranks(2, both, pipeline_step, timeout=60):
        assert not found, "\n".join(found)


def test_a_layer_of_experts_trains_on_one_rank() -> None:
    for found in run_ranks(1, both, moe_layer, timeout=60):
        assert not found, "\n".join(found)


def waits_of_a_dispatch(device: str, exact: bool) -> list[str]:
    """Dispatch, combine and their backward; some choices go nowhere, and ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    size, tokens = dist.get_world_size(), 5 + 2 * dist.get_rank()
    group = device_group() if size > 1 else None
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device).requires_grad_()
    weights = torch.rand(tokens, 2, generator=generator).to(device).requires_grad_()
    indices = torch.randint(-1, 4, (tokens, 2), generator=generator).to(device)
    dispatch = ops.Dispatch("all_to_all" if size > 1 else "auto", exact=exact)
    for _ in range(2):  # the first call of a group makes its transport
        with Watch() as watch:
            rows, row_weights, handle = ops.moe_dispatch(
                x, indices, weights, num_experts=4, group=group, dispatch=dispatch
            )
            ops.moe_combine(rows * 2.0, handle, row_weights).square().sum().backward()
    return sorted({f"{finding.place}:{finding.line}" for finding in watch.found if finding.waits})


@pytest.mark.parametrize("exact", [False, True])
def test_a_dispatch_waits_for_the_device_once(exact: bool) -> None:
    for found in run_ranks(2, waits_of_a_dispatch, "cuda", exact, timeout=60):
        assert len(found) == 1
        assert found[0].startswith("fastpar/comm/agree.py:Agreement.gather")
    for found in run_ranks(1, waits_of_a_dispatch, "cuda", exact, timeout=60):
        assert len(found) == 1
        assert found[0].startswith("fastpar/ops/moe/dispatcher.py:LocalDispatcher.dispatch")


def wrong_indices() -> str:
    """An expert that there is not, on rank 1 only, where no host looks at values; then a dispatch as it should be."""
    group, x = device_group(), torch.ones(3, HIDDEN, device="cuda")
    indices = torch.tensor([[0], [9 if dist.get_rank() else 1], [2]]).cuda()
    try:
        ops.moe_dispatch(x, indices, num_experts=4, group=group)
    except ValueError as error:
        rows, _, _ = ops.moe_dispatch(x, indices.clamp(max=3), num_experts=4, group=group)
        return f"{error}; then {len(rows)}"
    return "nothing"


def test_a_wrong_expert_on_one_rank_raises_on_all_of_them() -> None:
    other, wrong = run_ranks(2, wrong_indices, timeout=60)
    assert other == "moe_dispatch: wrong arguments on rank 1 of the group: see its error; then 3"
    assert wrong.startswith(
        "indices must be in 0..3, or -1 or 4 for a choice that goes nowhere; they are in 0..9; then"
    )


def reductions(device: str, group: Any, watch: Any) -> list[Tensor]:
    comm = fp.comm.Communicator(group)
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    with watch or nothing():
        found = []
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, None)):
            x = torch.randn(7, 3, generator=generator).to(device, dtype)
            for op in ("sum", "avg"):
                found.append(comm.reduce_scatter(x, op, sizes=[3, 4], dtype=wide))
    return found


def adds() -> list[str]:
    """Which operations add what ranks have sent: none of PyTorch's."""
    comm, x = fp.comm.Communicator(device_group()), torch.ones(8, 3, device="cuda", dtype=torch.bfloat16)
    comm.reduce_scatter(x, dtype=torch.float32)
    with torch.profiler.profile() as profile:
        comm.reduce_scatter(x, dtype=torch.float32)
    return sorted({event.key for event in profile.key_averages() if event.key in ("aten::add_", "aten::_to_copy")})


def test_device_reductions_add_in_rank_order_in_one_pass() -> None:
    for found in run_ranks(2, both, reductions, timeout=60):
        assert not found, "\n".join(found)
    assert run_ranks(2, adds, timeout=60) == [[], []]


def control_messages() -> list[Any]:
    """What ranks tell each other in CPU tensors."""
    comm = fp.comm.Communicator(device_group())
    x = torch.tensor([comm.rank, 5])
    out = torch.tensor([float(comm.rank)])
    comm.all_reduce(out, "max", out=out)
    found = [
        comm.all_gather(x), out, comm.broadcast(x, 1), comm.all_to_all(x), comm.reduce_scatter(x),
        comm.all_reduce(torch.tensor([comm.rank == 1]), "max"),
    ]  # fmt: skip
    assert all(t.device.type == "cpu" for t in found)
    comm.barrier()
    return [*(t.tolist() for t in found), comm.share_sizes(comm.rank), comm.exchange_sizes([1, 2])]


def test_control_messages_go_by_way_of_the_device_where_the_group_has_no_cpu_backend() -> None:
    zero, one = run_ranks(2, control_messages, timeout=60)
    assert zero == [[0, 5, 1, 5], [1.0], [1, 5], [0, 1], [1], [True], [0, 1], [1, 1]]
    assert one == [[0, 5, 1, 5], [1.0], [1, 5], [5, 5], [10], [True], [0, 1], [2, 2]]
