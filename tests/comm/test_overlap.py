"""The choice of chunks: the rule, the table, its agreement between ranks and its cache; and the layers that use it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar as fp
from fastpar import ops
from fastpar.comm import Communicator, machine_cache, record
from fastpar.ops.parallel_linear import overlap as module
from fastpar.ops.parallel_linear.overlap import Overlap, OverlapShape, key, measure_overlap
from fastpar.tensor import ColumnParallelLinear, RowParallelLinear, SequenceRegion, SharedInput, full_parameter
from tests.dist import run_ranks
from tests.models import VOCAB, build_model, logits_of
from tests.ops.linear_cases import Forced

ROWS, WIDTH, FEATURES = 16, 8, 12


def world() -> Communicator:
    return Communicator(dist.group.WORLD)


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1448, 1024), (1449, 2048), (2047, 2048)]
)
def test_sizes_fall_into_the_nearest_power_of_two(size: int, bucket: int) -> None:
    assert module.size_bucket(size) == bucket


def _launched(overlap: bool | Overlap, features: int | None) -> int:
    x, weight = torch.zeros(ROWS, FEATURES // 2), torch.zeros(WIDTH, FEATURES // 2)
    with record() as log:
        ops.linear_all_reduce(x, weight, group=world(), overlap=overlap, features=features)
    return len(log)


def _table_lookups() -> list[int]:
    name = key("linear_all_reduce", world(), "cpu", torch.float32, ROWS, WIDTH, FEATURES)
    table = Overlap(table={name: 4})
    others = {name.replace(a, b): 4 for a, b in (("float32", "bfloat16"), ("ranks=2", "ranks=3"), ("16x8x", "32x8x"))}
    assert "shared_memory" in name
    assert len(others) == 3
    return [
        _launched(True, FEATURES),  # the rule
        _launched(table, FEATURES),
        _launched(table.disabled(), FEATURES),  # the same chunks
        _launched(table, None),  # sizes that ranks may not share decide nothing
        _launched(Overlap(table=others), FEATURES),
    ]


def test_a_measured_shape_gets_its_chunks_and_any_other_one() -> None:
    assert run_ranks(2, _table_lookups) == [[1, 4, 4, 1, 1]] * 2


def _measured(folder: str, times: list[float]) -> list[Any]:
    """What is chosen where `times` are what 1, 2 and 4 chunks take, and the files that this rank wrote."""
    group = world()
    mine = Path(folder) / str(group.rank)  # a cache of its own for every rank: only rank 0's counts
    kept, module._times = module._times, lambda *_: dict(zip((1, 2, 4), times, strict=True))
    try:
        shape = OverlapShape("linear_all_reduce", ROWS, WIDTH, FEATURES)
        found = measure_overlap(group, [shape], candidates=(1, 2, 4), folder=mine)
    finally:
        module._times = kept
    assert Overlap.load(group, folder=mine) == found
    return [list(found.table.values()), sorted(mine.iterdir()) if mine.exists() else None]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [([1.0, 0.5, 1.0], 2), ([1.0, 0.99, 1.0], 1), ([1.0, 2.0, 1.0], 1)],
    ids=["faster", "within the noise", "slower"],
)
def test_more_chunks_are_chosen_only_where_clearly_faster(tmp_path: Path, times: list[float], chosen: int) -> None:
    first, second = run_ranks(2, _measured, str(tmp_path), times)
    assert first[0] == second[0] == [chosen]
    assert len(first[1]) == 1
    assert second[1] is None, "only rank 0 writes"


def _really_measured(folder: str) -> list[Any]:
    shapes = [OverlapShape(product, 64, 32, 48, torch.bfloat16) for product in module.PRODUCTS]
    shapes.append(OverlapShape("linear_all_reduce", 3, 5, 1))  # fewer features than ranks
    found = measure_overlap(dist.group.WORLD, shapes, samples=2, folder=folder)
    return [found, *(Overlap.load(dist.group.WORLD, folder=folder) for _ in range(2))]


def test_measuring_gives_every_rank_the_same_table_and_keeps_it(tmp_path: Path) -> None:
    results = run_ranks(2, _really_measured, str(tmp_path))
    found = results[0][0]
    assert len(found.table) == 4
    assert all(chunks in module.CANDIDATES for chunks in found.table.values())
    assert all(overlap == found for result in results for overlap in result)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["chunks"] == found.table


def _loaded(folder: str, contents: list[str | None]) -> dict[str, int]:
    group = world()
    mine = Path(folder) / str(group.rank)
    mine.mkdir(exist_ok=True)
    text = contents[group.rank]
    if text is not None:
        module._path(mine).write_text(text)
    return dict(Overlap.load(group, folder=mine).table)


def test_ranks_with_different_caches_use_rank_0s(tmp_path: Path) -> None:
    zero = json.dumps({"schema": module.SCHEMA, "chunks": {"a": 4}})
    one = json.dumps({"schema": module.SCHEMA, "chunks": {"a": 2, "b": 8}})
    for name, contents, table in [
        ("differ", [zero, one], {"a": 4}),
        ("only rank 1", [None, one], {}),
        ("damaged", ['{"schema": 1, "chu', one], {}),
        ("old", [zero.replace(f'"schema": {module.SCHEMA}', '"schema": 0'), one], {}),
        ("nonsense", ['{"schema": 1, "chunks": {"a": "x"}}', one], {}),
        ("list", ["[]", one], {}),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        assert run_ranks(2, _loaded, str(folder), contents) == [table] * 2, name


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_cache.cache_folder() == tmp_path / "fastpar"
    for value in ("", "relative/folder"):  # the specification: to be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert machine_cache.cache_folder() == Path.home() / ".cache" / "fastpar"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure_overlap(None, [OverlapShape("linear", 1, 1, 1)]), r"product must be one of .* got 'linear'"),
        (lambda: measure_overlap(None, [], candidates=(2, 4)), r"include 1, samples >= 1, got \[2, 4\] and 7"),
    ],
)
def test_wrong_arguments_of_a_measurement_are_clear_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_one_rank_has_nothing_to_measure() -> None:
    assert measure_overlap(None, [OverlapShape("linear_all_reduce", 1, 1, 1)]) == Overlap.load(None) == Overlap()


# ---- the layers ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Projections of one input. With `odd`: one is called twice, one with another tensor, one never, an output is
    written to, and the input is used beside them."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.odd = odd
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)
        self.other, self.unused = nn.Linear(6, 8), nn.Linear(6, 4)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.q(x).mul_(self.k(x))
        if self.odd:
            h = (h + self.q(x) * self.other(2.0 * x)) * (1.0 + x.mean(-1, keepdim=True))
        return self.out(torch.tanh(h))


class Layer(nn.Module):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.block = Block(odd)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def stack(odd: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(odd), Layer(odd)).double()


PLAN = {
    "*": "stream",
    "*.block": "block",
    **{f"*.block.{name}": "colwise" for name in ("q", "k", "other", "unused")},
    "*.block.out": "rowwise",
}


def _trained(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Output, gradient of x, gradients by name; of a parallel model gathered."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    grads = {n: None if p.grad is None else full_parameter(p, p.grad) for n, p in model.named_parameters()}
    return out.detach(), x.grad, grads


def _blocks_match(odd: bool, sequence_parallel: bool) -> list[list[str]]:
    plain = stack(odd)
    parallel, x = copy.deepcopy(plain), torch.randn(2, 7, 6, dtype=torch.float64)
    fp.parallelize(parallel, dist.group.WORLD, PLAN, sequence_parallel=sequence_parallel)
    expected = _trained(plain, x)
    for _ in range(2):  # which are watched: fastpar.parallel.guards
        parallel(x).sum().backward()
    with record() as forward:
        y = parallel(x.clone().requires_grad_())
    with record() as backward:
        y.sum().backward()
    parallel.zero_grad()
    # a copy has weights, and shared inputs, of its own
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(0.5)
    for found, wanted in zip(_trained(twin, x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(2.0)
    fp.unparallelize(parallel)
    torch.testing.assert_close(parallel(x), expected[0], rtol=1e-11, atol=1e-11)
    return [[entry.op for entry in log] for log in (forward, backward)]


G, S, R = "all_gather", "reduce_scatter", "all_reduce"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("odd", "sequence_parallel", "forward", "backward"),
    [
        # each of the two layers: dx of all projections is summed once
        (False, False, [R, R], [R, R]),
        # the output's gradient, the block's input again, and dx; around them, the residual stream enters and leaves
        (False, True, [G, S, G, S, G], [G, G, S, G, G, S, G]),
        # what is computed beside the prepared outputs has a sum of its own
        (True, False, [R, R], [R, R] * 2),
        (True, True, [G, S, G, S, G], [*[G, S, G, S] * 2, G]),
    ],
    ids=["tp", "sp", "tp odd", "sp odd"],
)
def test_a_block_gathers_once_and_matches_unsharded_whatever_it_does(
    ranks: int, odd: bool, sequence_parallel: bool, forward: list[str], backward: list[str]
) -> None:
    for found_forward, found_backward in run_ranks(ranks, _blocks_match, odd, sequence_parallel):
        assert found_forward == forward
        assert sorted(found_backward) == sorted(backward)


def _model_bits(architecture: str, sequence_parallel: bool, chunks: int) -> bool:
    """Loss and gradients of a float32 model with overlap on and off."""
    results = []
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    for enabled in (True, False):
        model = build_model(architecture, torch.float32)
        overlap = Forced(enabled, count=chunks)
        fp.parallelize(model, dist.group.WORLD, sequence_parallel=sequence_parallel, overlap=overlap)
        out = logits_of(model, ids)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.to_local() for p in model.parameters() if p.grad is not None)])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("architecture", "chunks"), [("llama", 1), ("gpt2", 3)])
def test_a_model_has_the_same_bits_with_overlap_on_and_off(
    architecture: str, chunks: int, sequence_parallel: bool
) -> None:
    assert all(run_ranks(2, _model_bits, architecture, sequence_parallel, chunks))


def _row_bias_grads() -> list[Tensor]:
    group = world()
    region = SequenceRegion(group)
    torch.manual_seed(0)
    row = RowParallelLinear(8, 6, group=group, sequence=region)
    region.set_total(5)
    with record() as log:
        row(torch.randn(2, 5, row.local_in_features)).square().sum().backward()
    assert [entry.op for entry in log] == [S, G]  # none for the bias alone
    return [row.bias.grad.to_local()]


def test_the_bias_of_a_row_parallel_layer_has_one_gradient() -> None:
    first, second = run_ranks(2, _row_bias_grads)
    assert torch.equal(first[0], second[0])


def test_layers_refuse_an_overlap_that_is_none() -> None:
    for make in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(TypeError, match="overlap must be True or False or an Overlap, got str"):
            make(4, 4, overlap="yes")
    with pytest.raises(TypeError, match="overlap must be True or False or an Overlap, got int"):
        fp.parallelize(nn.Sequential(nn.Linear(4, 4)), None, {"0": "colwise"}, overlap=1)


def change_overlap() -> list[bool]:
    """Whether the calls of a layer overlap, as its attribute changes."""
    layer = ColumnParallelLinear(8, 8, group=dist.group.WORLD)
    x, found = torch.randn(2, 8, requires_grad=True), []
    for overlap in (True, False, Overlap()):
        layer.overlap = overlap
        layer(x).sum().backward()
        found.append(layer._whole_calls._kept[2].rows.concurrent)
    return found


def test_an_overlap_that_is_changed_later_is_that_of_the_next_call() -> None:
    for found in run_ranks(2, change_overlap):
        assert found == [True, False, True]


def test_an_input_is_taken_once_and_forgotten_when_the_block_ends() -> None:
    layer = ColumnParallelLinear(6, 4)
    shared, x = SharedInput(Communicator(None), [layer]), torch.randn(3, 6)
    whole = shared.enter(x)
    assert torch.equal(layer(whole), F.linear(x, layer.weight, layer.bias))
    assert shared.take(layer, whole) is None
    shared.enter(x)
    shared.leave()
    assert shared.take(layer, whole) is None
