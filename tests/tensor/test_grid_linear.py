"""Linear layers on tensor-parallel grids, against the layers that they replace, in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fastpar as fp
from fastpar.tensor import (
    ColumnParallelLinear,
    Grid,
    GridLinear,
    GridRegion,
    RowMap,
    RowParallelLinear,
    SequenceRegion,
)
from fastpar.tensor.parameter import full_parameter
from fastpar.zero.options import _check_grid
from tests.dist import run_ranks

FEATURES: Any = "features"
GRIDS_OF_FOUR = [
    fp.GridSpec(1, 4, 1),
    fp.GridSpec(2, 2, 1),
    fp.GridSpec(1, 2, 2),
    fp.GridSpec.axonn(2, 2, 1),
    fp.GridSpec.summa(2),
    fp.GridSpec.summa(2, stream=True),
    fp.GridSpec(1, 2, 2, FEATURES, replicas=2),
]
MORE_OF_FOUR = [
    *(fp.GridSpec(*sizes) for sizes in ((4, 1, 1), (1, 1, 4), (2, 1, 2))),
    *(fp.GridSpec.axonn(*sizes) for sizes in ((1, 4, 1), (4, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2))),
    fp.GridSpec(1, 4, 1, FEATURES),
]
GRIDS_OF_EIGHT = [fp.GridSpec.cube(2)]
MORE_OF_EIGHT = [
    fp.GridSpec.axonn(2, 2, 2),
    fp.GridSpec.tesseract(2, 2),
    fp.GridSpec.tesseract(2, 2, stream=True),
    *(fp.GridSpec(*sizes) for sizes in ((1, 8, 1), (8, 1, 1), (1, 1, 8), (4, 2, 1), (2, 4, 1), (1, 4, 2))),
    *(fp.GridSpec(*sizes) for sizes in ((1, 2, 4), (4, 1, 2), (2, 1, 4))),
    fp.GridSpec(1, 2, 4, replicas=2),
]
# Nothing divides; of batches there are 16 and 15, as fewer would leave a rank of eight without a sequence.
BATCH, TOKENS, HIDDEN, INNER = 16, 7, 13, 11


class MLP(nn.Module):
    def __init__(self, hidden: int = HIDDEN, inner: int = INNER, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias)
        self.down = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        inner += 0.25  # models write to what linears return
        out = self.down(F.gelu(inner))
        out *= 2.0
        return out


def noisy(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def on_grid(mlp: Any, grid: Grid, region: GridRegion | None) -> nn.Module:
    made = copy.deepcopy(mlp)
    made.up = GridLinear.from_linear(mlp.up, grid, "column", sequence=region)
    made.down = GridLinear.from_linear(mlp.down, grid, "row", sequence=region)
    return made


def difference(mine: Tensor, other: Tensor) -> float:
    return float((mine - other).detach().abs().max() / other.detach().abs().max())


def mlp_differences(spec: fp.GridSpec, transposed: bool = False) -> dict[str, float]:
    """By what is compared: the largest relative difference to one process, of two steps of AdamW."""
    torch.set_default_dtype(torch.float64)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    whole: Any = noisy(MLP())
    grid = Grid(mesh)
    region = GridRegion(grid)
    split: Any = on_grid(whole, grid, region)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, split)]
    found: dict[str, float] = {}
    for step in range(2):
        x = torch.randn(BATCH - step, TOKENS + step, HIDDEN, generator=torch.Generator().manual_seed(step))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        expected, entered = whole(inputs[0]), region.enter(inputs[1])
        out = region.leave(split(entered))
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        for loss, optimizer in zip((expected, out), optimizers, strict=True):
            optimizer.zero_grad()
            (loss * weight).sum().backward()
        found[f"out {step}"] = difference(out, expected)
        found[f"dx {step}"] = difference(inputs[1].grad, inputs[0].grad)
        for (name, mine), other in zip(split.named_parameters(), whole.parameters(), strict=True):
            found[f"d{name} {step}"] = difference(full_parameter(mine, mine.grad), other.grad)
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), other in zip(split.named_parameters(), whole.parameters(), strict=True):
            found[f"{name} {step}"] = difference(full_parameter(mine).detach(), other.detach())
    state = split.state_dict()
    fresh: Any = on_grid(noisy(MLP(), seed=5), grid, region)
    fresh.load_state_dict(whole.state_dict())  # as of an unsharded checkpoint
    found["load full"] = max(
        difference(full_parameter(mine).detach(), other.detach())
        for mine, other in zip(fresh.parameters(), whole.parameters(), strict=True)
    )
    fresh.load_state_dict(state)
    found["load split"] = max(
        float(not torch.equal(mine.to_local(), other.to_local()))
        for mine, other in zip(fresh.parameters(), split.parameters(), strict=True)
    )
    before = list(fresh.parameters())
    fresh.load_state_dict(whole.state_dict(), assign=True)
    found["assign"] = max(
        float(mine is not old) or difference(full_parameter(mine).detach(), other.detach())
        for mine, old, other in zip(fresh.parameters(), before, whole.parameters(), strict=True)
    )
    mine, other = (fp.clip_grad_norm_(model.parameters(), 1e-3) for model in (split, whole))
    found["norm"] = float((mine - other).abs() / other)
    found["full_tensor"] = difference(split.up.weight.full_tensor(), full_parameter(split.up.weight))
    mesh.close()
    return found


def all_mlps(specs: list[fp.GridSpec]) -> dict[str, dict[str, float]]:
    return {repr(spec): mlp_differences(spec) for spec in specs}


def of_ranks(few: list[fp.GridSpec], more: list[fp.GridSpec]) -> list[Any]:
    """Parameters; most grids are slow, as a mesh takes longer to make than a layer to run."""
    ranks = few[0].ranks
    return [
        pytest.param(ranks, few, id=f"{ranks} ranks"),
        pytest.param(ranks, more, id=f"{ranks} ranks, more", marks=pytest.mark.slow),
    ]


@pytest.mark.parametrize(
    ("ranks", "specs"), of_ranks(GRIDS_OF_FOUR, MORE_OF_FOUR) + of_ranks(GRIDS_OF_EIGHT, MORE_OF_EIGHT)
)
def test_an_mlp_on_a_grid_equals_one_process(ranks: int, specs: list[fp.GridSpec]) -> None:
    for found in run_ranks(ranks, all_mlps, specs):
        wrong = {spec: {k: v for k, v in by.items() if not v < 1e-10} for spec, by in found.items()}
        assert not {spec: by for spec, by in wrong.items() if by}


# ------------------------------------------------------------------------------------------------------ attention's way


def attention_differences(spec: fp.GridSpec, heads: int, size: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    grid, hidden = Grid(mesh), 10
    region = GridRegion(grid)
    inner = heads * size
    whole: Any = noisy(nn.ModuleList([*(nn.Linear(hidden, inner) for _ in "qkv"), nn.Linear(inner, hidden)]))
    options: Any = {"sequence": region, "whole_sequences": True, "unit": size}
    split = nn.ModuleList([GridLinear.from_linear(whole[i], grid, "column", **options) for i in range(3)])
    split.append(GridLinear.from_linear(whole[3], grid, "row", **options))

    def attend(layers: Any, x: Tensor) -> Tensor:
        q, k, v = (layers[i](x).unflatten(-1, (-1, size)).transpose(1, 2) for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layers[3](out.transpose(1, 2).flatten(-2))

    x = torch.randn(7, 5, hidden, generator=torch.Generator().manual_seed(1))  # over z=4: 2, 2, 2 and 1 sequences
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, out = attend(whole, inputs[0]), region.leave(attend(split, region.enter(inputs[1])))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (expected * weight).sum().backward()
    (out * weight).sum().backward()
    found = {"out": difference(out, expected), "dx": difference(inputs[1].grad, inputs[0].grad)}
    for (name, mine), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        # All queries see a key's bias alike, so its gradient is rounding alone.
        scale = max(float(other.grad.abs().max()), 1.0)
        found[name] = float((full_parameter(mine, mine.grad) - other.grad).abs().max()) / scale
    mesh.close()
    return found


def all_attentions(specs: list[fp.GridSpec]) -> dict[str, dict[str, float]]:
    return {repr(spec): attention_differences(spec, heads=8, size=3) for spec in specs}


@pytest.mark.parametrize(("ranks", "specs"), of_ranks(GRIDS_OF_FOUR, MORE_OF_FOUR))
def test_attention_between_layers_of_whole_sequences_equals_one_process(ranks: int, specs: list[fp.GridSpec]) -> None:
    for found in run_ranks(ranks, all_attentions, specs):
        wrong = {spec: {k: v for k, v in by.items() if not v < 1e-10} for spec, by in found.items()}
        assert not {spec: by for spec, by in wrong.items() if by}


# ------------------------------------------------------------------------------------------------------ bits and words


def bits_of_one_dim() -> list[bool]:
    """A grid (1, p, 1) against the layers of one dim, in float32: equal outputs, gradients of x, weight and bias."""
    mesh = fp.init_mesh(tp=4, tp_grid=(1, 4, 1), device="cpu")
    whole: Any = noisy(MLP(24, 40)).float()
    grid = Grid(mesh)
    region, sequence = GridRegion(grid), SequenceRegion(grid.y)
    made: Any = on_grid(whole, grid, region)
    today: Any = copy.deepcopy(whole)
    today.up = ColumnParallelLinear.from_linear(whole.up, group=grid.y, sequence=sequence)
    today.down = RowParallelLinear.from_linear(whole.down, group=grid.y, sequence=sequence)
    x = torch.randn(2, 17, 24, generator=torch.Generator().manual_seed(3))
    outs, inputs = [], []
    for model, place in ((made, region), (today, sequence)):
        inputs.append(x.clone().requires_grad_())
        outs.append(model(place.enter(inputs[-1])))  # type: ignore[attr-defined]
        outs[-1].square().sum().backward()
    pairs = [(outs[0], outs[1]), (inputs[0].grad, inputs[1].grad)]
    pairs += [
        (a.grad.to_local(), b.grad.to_local() if hasattr(b.grad, "to_local") else b.grad)
        for a, b in zip(made.parameters(), today.parameters(), strict=True)
    ]
    mesh.close()
    return [torch.equal(a, b) for a, b in pairs]


def test_a_grid_of_one_dim_has_the_bits_of_the_layers_of_one_dim() -> None:
    for equal in run_ranks(4, bits_of_one_dim):
        assert all(equal), equal


def words_sent(specs: list[fp.GridSpec]) -> list[tuple[float, float]]:
    """(elements that this rank sends forward and backward, the formula's) of one column-parallel linear each."""
    batch, tokens, inputs, outputs = 8, 8, 16, 24
    found = []
    for spec in specs:
        mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
        grid = Grid(mesh)
        region = GridRegion(grid)
        layer = GridLinear.from_linear(nn.Linear(inputs, outputs, bias=False), grid, "column", sequence=region)
        x = region.enter(torch.randn(batch, tokens, inputs)).detach().requires_grad_()
        with fp.comm.record() as log:
            layer(x).sum().backward()
        k = 1 if spec.spread == "features" else spec.x
        n, z, d = spec.y, spec.z, spec.replicas
        rows, inner = batch * tokens, z // d
        a = (1 - 1 / n) * rows * inputs / (z * k)
        b = (1 - 1 / inner) * inputs * outputs / (k * n)
        c = (1 - 1 / k) * rows * outputs / (z * n)
        copies = 2 * (1 - 1 / d) * inputs * outputs / (k * n * inner)
        sent = sum(entry.nbytes for entry in log if entry.dtype.is_floating_point)  # without what ranks agree on
        found.append((sent / 4, 3 * a + 3 * b + 2 * c + copies))
        mesh.close()
    return found


def test_words_sent_equal_the_formula() -> None:
    specs = [spec for spec in GRIDS_OF_FOUR if spec.spread != "copy"]
    for found in run_ranks(4, words_sent, specs):
        assert [sent for sent, _ in found] == [formula for _, formula in found]


def saved_weight_share(spec: fp.GridSpec) -> list[float]:
    mesh = fp.init_mesh(tp=4, tp_grid=spec, device="cpu")
    grid = Grid(mesh)
    layer = GridLinear.from_linear(nn.Linear(32, 64), grid, "row")
    share = [layer.weight.to_local().numel() / (32 * 64), layer.bias.to_local().numel() / 64]
    mesh.close()
    return share


def test_a_rank_stores_its_part_of_the_weight_alone() -> None:
    for share in run_ranks(4, saved_weight_share, fp.GridSpec(2, 1, 2)):
        assert share == [1 / 4, 1 / 2]


def saved_for_backward(specs: list[fp.GridSpec]) -> list[tuple[int, int]]:
    """(elements that a layer saves for backward, its parts of x and weight) of a column- and a row-parallel linear."""
    batch, tokens, inputs, outputs = 4, 8, 16, 24
    found = []
    for spec in specs:
        mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
        grid = Grid(mesh)
        region = GridRegion(grid)
        for role in ("column", "row"):
            layer = GridLinear.from_linear(nn.Linear(inputs, outputs, bias=False), grid, role, sequence=region)
            region.set_shape(batch, tokens, inputs)
            cut = grid.y if spec.spread == "features" or role == "row" else grid.x
            here = tokens // (grid.x.size if role == "row" else region.comm.size)
            x = torch.randn(batch // spec.z, here, inputs // cut.size, requires_grad=True)
            kept: dict[int, int] = {}

            def keep(value: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[value.data_ptr()] = value.numel()
                return value

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
                layer(x)
            weight = inputs * outputs // spec.ranks * spec.replicas
            found.append((sum(kept.values()), batch * tokens * inputs // spec.ranks + weight))
        mesh.close()
    return found


def test_a_rank_saves_its_parts_of_input_and_weight_alone() -> None:
    specs = [spec for spec in GRIDS_OF_FOUR if spec.spread != "copy"]
    for found in run_ranks(4, saved_for_backward, specs):
        assert [saved for saved, _ in found] == [parts for _, parts in found]


def test_rows_cut_in_turn_are_chunks_of_chunks() -> None:
    rows = RowMap.nested((5,), (2, 2))
    assert rows.ranges == (((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),))
    assert rows.joined(2) == RowMap.chunk(5, 2)
    fused = RowMap.nested((4, 8), (2, 2))
    assert fused.ranges[1] == ((1, 2), (6, 8))
    assert fused.joined(2).ranges[0] == ((0, 1), (4, 6), (1, 2), (6, 8))
    assert RowMap.nested((0, 5, 3), (3,)) == RowMap.packed((0, 5, 3), 3)
    with pytest.raises(ValueError, match="count must divide the 4 ranks, got 3"):
        rows.joined(3)


# ---------------------------------------------------------------------------------------------------------- other doors


def dtypes_under_autocast() -> list[torch.dtype]:
    found = []
    for spec in (fp.GridSpec(2, 2, 1), fp.GridSpec.axonn(2, 2, 1)):
        mesh = fp.init_mesh(tp=4, tp_grid=spec, device="cpu")
        grid = Grid(mesh)
        region = GridRegion(grid)
        split: Any = on_grid(MLP(), grid, region)
        heads = GridLinear.from_linear(
            nn.Linear(HIDDEN, 8), grid, "column", sequence=region, whole_sequences=True, unit=2
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = region.enter(torch.randn(4, 7, HIDDEN))
            up = split.up(x)
            found += [up.dtype, split.down(up).dtype, heads(x).dtype]
        mesh.close()
    return found


def test_under_autocast_outputs_have_its_dtype() -> None:
    for found in run_ranks(4, dtypes_under_autocast):
        assert set(found) == {torch.bfloat16}, found


class WithGrid(nn.Module):
    """An MLP between layers that every rank computes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), MLP()
        self.region: GridRegion | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.mlp(x) if self.region is None else self.region.leave(self.mlp(self.region.enter(x)))


def laid_out(model: Any, grid: Grid) -> nn.Module:
    model.region = GridRegion(grid)
    model.mlp = on_grid(model.mlp, grid, model.region)
    return model


def trained_by_zero(spec: fp.GridSpec, stage: int) -> dict[str, float]:
    """The largest relative differences to one process, and what other doors say."""
    torch.set_default_dtype(torch.float64)
    mesh = fp.init_mesh(dp_shard=2, tp=2, tp_grid=spec, device="cpu")
    whole = noisy(WithGrid())
    split: Any = laid_out(copy.deepcopy(whole), Grid(mesh))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, split)]
    zero = fp.zero.shard(split, optimizers[1], group=mesh, stage=stage, max_norm=0.5, persistent_share=0.0)
    found = {}
    batches = torch.randn(2, 2, 3, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(whole(x).square().mean() for x in batch) / 2).backward()
        split(batch[mesh.rank("dp_shard")]).square().mean().backward()
        for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[f"d{name}"] = difference(full, q.grad)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        found["norm"] = float((zero.norm - norm).abs() / norm) if zero.norm is not None else 1.0
    if stage == 3:
        with pytest.raises(RuntimeError, match="split by tensor parallelism as well: a copy of the model"):
            copy.deepcopy(split)(batches[0, 0])
    zero.detach()
    found |= {
        name: difference(full_parameter(p).detach(), q.detach())
        for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True)
    }
    mesh.close()
    return found


def every_stage() -> dict[str, dict[str, float]]:
    cases = [(fp.GridSpec(2, 1, 1), 3), (fp.GridSpec(1, 2, 1), 1), (fp.GridSpec(1, 1, 2), 3)]
    return {repr(case): trained_by_zero(*case) for case in cases}


def test_zero_trains_layers_on_a_grid_as_one_process_does() -> None:
    for by in run_ranks(4, every_stage):
        assert not {(case, k): v for case, found in by.items() for k, v in found.items() if not v < 1e-6}


def mean_square(out: Tensor, _: Any) -> Tensor:
    return out.square().mean()


def verified() -> list[str]:
    mesh = fp.init_mesh(tp=4, tp_grid=(2, 1, 2), device="cpu")
    grid = Grid(mesh)
    layout = fp.VerifyLayout(mesh, apply=lambda model: laid_out(model, grid))
    fp.verify(WithGrid, layout, torch.randn(4, TOKENS, HIDDEN), loss=mean_square).raise_if_wrong()

    def wrong(model: Any) -> nn.Module:
        laid_out(model, grid)
        with torch.no_grad():
            model.mlp.up.bias.to_local().mul_(2)
        return model

    layout = fp.VerifyLayout(mesh, apply=wrong)
    report = fp.verify(WithGrid, layout, torch.randn(4, TOKENS, HIDDEN), loss=mean_square)
    mesh.close()
    return [str(report)]


def test_verify_compares_what_a_rank_of_a_grid_has() -> None:
    for (report,) in run_ranks(4, verified):
        assert "first in mlp.up (Linear): output" in report


def test_zero_says_that_dp_shard_and_cp_cannot_both_shard_what_is_on_a_grid() -> None:
    groups: Any = SimpleNamespace(mesh=SimpleNamespace(size=lambda _: 2), shard=SimpleNamespace(size=4))
    mesh: Any = SimpleNamespace(mesh_dim_names=("tp_x", "tp_z"))
    with pytest.raises(ValueError, match=r"mlp.up.weight lies on a tensor-parallel grid.*'dp_shard': 2, 'cp': 2"):
        _check_grid("mlp.up.weight", mesh, groups)


def dims_and_rows() -> dict[str, Any]:
    """What the parameters of grids lie on, and whether rows that one rank of y has keep their order in checkpoints."""
    found: dict[str, Any] = {}
    for spec in (fp.GridSpec(2, 1, 2), fp.GridSpec(1, 2, 2, FEATURES, replicas=2), fp.GridSpec(4, 1, 1)):
        mesh = fp.init_mesh(tp=4, tp_grid=spec, device="cpu")
        whole = noisy(nn.Linear(6, 24))
        options: Any = {"sections": (8, 8, 8), "whole_sequences": True}
        layers = [GridLinear.from_linear(whole, Grid(mesh), "column", **options) for _ in range(2)]
        with torch.no_grad():
            layers[1].weight.zero_()
        state = layers[0].state_dict()
        layers[1].load_state_dict(state)
        weight = layers[0].weight
        assert isinstance(weight, DTensor)
        found[repr(spec)] = (
            weight.device_mesh.mesh_dim_names,
            torch.equal(full_parameter(weight), whole.weight),
            torch.equal(state["weight"].full_tensor(), whole.weight),
            torch.equal(weight.to_local(), layers[1].weight.to_local()),  # type: ignore[operator]
        )
        mesh.close()
    return found


def test_parameters_lie_on_the_dims_of_several_ranks_and_checkpoints_have_their_rows_in_order() -> None:
    """DTensor tries each placement on each dim, one of one rank as well: n placements on four dims are n**4."""
    for found in run_ranks(4, dims_and_rows):
        assert [dims for dims, *_ in found.values()] == [("tp_x", "tp_z"), ("tp_y", "tp_d"), ("tp",)]
        assert [same for _, *same in found.values()] == [[True] * 3] * 3


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fp.GridSpec(2, 2, 0), "z of a grid must be at least 1, got 0"),
        (lambda: fp.GridSpec(2, 2, 2, spread="features"), "x must be 1, got 2"),
        (lambda: fp.GridSpec(1, 2, 4, replicas=3), "replicas must divide z, got 3 and 4"),
        (lambda: fp.GridSpec(2, 2, 3).check_ranks(8), r"tp_grid \(2, 2, 3\) has 12 ranks, but tp is 8: .*\(2, 2, 2\)"),
        (lambda: fp.init_mesh(tp=1, tp_grid=(1, 1, 2)), r"tp_grid \(1, 1, 2\) has 2 ranks, but tp is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fp.GridSpec(1, 2.0, 1), "y"),
        (lambda: fp.GridSpec(1, 2, 1, spread="diagonal"), "spread"),
        (lambda: fp.init_mesh(tp_grid="2x2"), "tp_grid"),
        (lambda: fp.init_mesh(tp_x=2), "tp_grid"),
    ],
)
def test_wrong_kinds_are_named(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def refusals() -> list[str]:
    mesh = fp.init_mesh(tp=4, tp_grid=(2, 2, 1), device="cpu")
    other = fp.init_mesh(tp=4, tp_grid=(1, 1, 4), device="cpu")
    plain = fp.init_mesh(tp=4, device="cpu")
    wide = fp.init_mesh(tp=4, tp_grid=(1, 4, 1), device="cpu")
    grid, tall = Grid(mesh), Grid(other)
    linear = nn.Linear(12, 18)
    calls: list[Any] = [
        lambda: Grid(plain),
        lambda: plain["tp_x"],
        lambda: GridRegion(tall).enter(torch.zeros(2, 3, 4)),
        lambda: GridRegion(grid).shape,
        lambda: GridLinear.from_linear(linear, grid, "column", whole_sequences=True, unit=3),
        lambda: GridLinear.from_linear(linear, grid, "column", sections=(6, 6)),
        lambda: GridLinear.from_linear(linear, grid, "row", sections=(9, 9)),
        lambda: GridLinear.from_linear(nn.ReLU(), grid, "row"),
        lambda: GridLinear.from_linear(linear, grid, "column")(torch.zeros(3, 12)),
        lambda: GridLinear.from_linear(linear, Grid(wide), "row")(torch.zeros(6, 3)),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))
    for used in (mesh, other, plain, wide):
        used.close()
    return said


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    words = [
        "has no tensor-parallel grid",
        "there is no tensor-parallel grid",
        "batch 2 cannot be cut over tp_z=4: use cp=4, or z <= 2",
        "region is empty",
        "6 heads must be divisible by tp_x * tp_y (2 * 2); grids of 4 ranks that work: (1, 1, 4), (1, 2, 2), (2, 1, 2)",
        "add up to 12, but the layer has 18 outputs",
        "role is 'row'",
        "expected an nn.Linear or Conv1D, got ReLU",
        "takes [.., tokens, 6]",
        "6 tokens cannot be cut evenly over the 4 ranks",
    ]
    for said in run_ranks(4, refusals):
        assert [part for part, text in zip(words, said, strict=True) if part not in text] == []
