"""Linears on a grid whose blocks of K are broadcast one after the other (SUMMA), against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fastpar as fp
from fastpar.comm import Communicator, shard_sizes
from fastpar.comm.recompute_cache import Tape, recording, replaying
from fastpar.layouts import GridOptions
from fastpar.ops.grid_linear import GridCall, GridSpread, grid_linear
from fastpar.ops.summa import _MEMORY, SummaCall, _SentBlocks, summa_linear
from fastpar.tensor import Grid, GridLinear, full_parameter
from tests.dist import run_ranks
from tests.tensor.grid_ranks import OWN_PLAN, Own

FEATURES: Any = "features"


class Diagonal:
    """q ranks that are both a row and a column of a grid: rank t has block t of X and of W, and computes all of Y.

    A grid of q * q ranks in what one of them sends, keeps and computes. Gradients of Y differ between the ranks, and
    dX and dW are those of their sum.
    """

    def __init__(self, transport: str = "auto") -> None:
        self.y, self.z = (Communicator(dist.new_group(), transport=transport) for _ in range(2))
        self.rank = self.y.rank

    def close(self) -> None:
        for comm in (self.y, self.z):
            dist.destroy_process_group(comm.group)

    def call(self, inner: int, overlap: bool = True) -> SummaCall:
        return SummaCall(self.y, self.z, Communicator(None), tuple(shard_sizes(inner, 4)), overlap)


class Problem:
    """Two weights [N, K] and a bias of one of them, X [tokens, K], and the gradient of each output on every rank."""

    def __init__(
        self, rank: int, inner: int, dtype: torch.dtype, tokens: int = 6, outs: Sequence[int] = (5, 3)
    ) -> None:
        generator = torch.Generator().manual_seed(inner)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x, self.weights = make(2, tokens // 2, inner), [make(n, inner) for n in outs]
        self.biases = [make(outs[0]), *[None for _ in outs[1:]]]
        self.grads = [make(4, *self.x.shape[:-1], n) for n in outs]
        self.rank, self.sizes = rank, shard_sizes(inner, 4)

    def own(self, full: Tensor) -> Tensor:
        return full.split(self.sizes, -1)[self.rank].clone().requires_grad_()

    def run(self, call: SummaCall, *, x_needs: bool = True, weights_need: bool = True) -> dict[str, Tensor]:
        x, weights = self.own(self.x).requires_grad_(x_needs), [self.own(w) for w in self.weights]
        biases = [None if bias is None else bias.clone().requires_grad_() for bias in self.biases]
        for weight in weights:
            weight.requires_grad_(weights_need)
        outs = summa_linear(call, x, weights, biases)
        torch.autograd.backward(outs, [grad[self.rank] for grad in self.grads])
        found = {f"out {i}": out.detach() for i, out in enumerate(outs)}
        leaves = {"x": x, **{f"w {i}": w for i, w in enumerate(weights)}}
        found |= {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return found | {"dbias": biases[0].grad}  # type: ignore[union-attr,dict-item]

    def expected(self) -> dict[str, Tensor]:
        """In float64, of one process; this rank's parts."""
        x, *weights = (full.to(torch.float64, copy=True).requires_grad_() for full in (self.x, *self.weights))
        outs = [x @ w.t() for w in weights]
        assert self.biases[0] is not None
        outs[0] = outs[0] + self.biases[0].double()
        torch.autograd.backward(outs, [grad.double().sum(0) for grad in self.grads])
        found = {f"out {i}": out.detach() for i, out in enumerate(outs)}
        for name, full in (("dx", x), *((f"dw {i}", w) for i, w in enumerate(weights))):
            assert full.grad is not None
            found[name] = full.grad.split(self.sizes, -1)[self.rank]
        return found | {"dbias": self.grads[0][self.rank].double().flatten(0, -2).sum(0)}


def difference(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    return float((mine.double() - other).norm() / other.norm().clamp_min(1e-30)) if other.numel() else 0.0


# ----------------------------------------------------------------------------------------- numbers, bits, words, memory


def numbers_and_bits() -> tuple[dict[str, float], dict[str, bool]]:
    """(differences to float64, whether bits are those of the first run), over transports, overlap and runs."""
    errors: dict[str, float] = {}
    equal: dict[str, bool] = {}
    first: dict[Any, dict[str, Tensor]] = {}
    for transport in ("auto", "torch"):
        ranks = Diagonal(transport)
        # 13 is cut into 4, 4, 4, 1; of 9 the last rank has nothing; 400 is enough to travel in halves.
        for inner, dtype in itertools.product((13, 9, 400), (torch.float64, torch.float32, torch.bfloat16)):
            outs = (40, 24) if inner == 400 else (5, 3)
            problem = Problem(ranks.rank, inner, dtype, tokens=80 if inner == 400 else 6, outs=outs)
            exact = problem.expected()
            for overlap, turn in itertools.product((True, False), range(1 + (inner == 400))):
                found = problem.run(ranks.call(inner, overlap))
                case = f"{transport} {inner} {dtype} {overlap} {turn}"
                for name, value in found.items():
                    errors[f"{case} {name}"] = difference(value, exact[name])
                    before = first.setdefault((inner, dtype), found)[name]
                    equal[f"{case} {name}"] = value.dtype == dtype and torch.equal(value, before)
        ranks.close()
    return errors, equal


# bfloat16: each of 4 products is rounded (2**-9 of it at most), and their sum; a reduce rounds what it is given again.
LIMITS = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 3 * 2**-9}


def test_streamed_products_and_gradients_are_exact_and_have_one_set_of_bits() -> None:
    for errors, equal in run_ranks(4, numbers_and_bits):
        limits = {case: next(v for k, v in LIMITS.items() if k in case) for case in errors}
        assert not {case: error for case, error in errors.items() if not error < limits[case]}
        assert not [case for case, same in equal.items() if not same]


def words_by_what_is_needed() -> list[tuple[float, float]]:
    """(words that were counted, the formula's), of calls that need everything, no dX, and no dW."""
    found = []
    tokens, inner, outs = 6, 16, 5 + 3
    a, b = 3 / 4 * tokens * inner, 3 / 4 * inner * outs
    for transport in ("auto", "torch"):
        ranks = Diagonal(transport)
        problem = Problem(ranks.rank, inner, torch.float32)
        for needs, backward in (
            ((True, True), 2 * a + 2 * b),
            ((False, True), a + b),
            ((True, False), a + b),
        ):
            with fp.comm.record() as log:
                problem.run(ranks.call(inner), x_needs=needs[0], weights_need=needs[1])
            counted = sum(entry.nbytes for entry in log if entry.dtype.is_floating_point) / 4
            found.append((counted, a + b + backward))
        ranks.close()
    return found


def test_words_sent_are_the_formulas_whether_blocks_are_read_in_place_or_broadcast() -> None:
    for found in run_ranks(4, words_by_what_is_needed):
        assert [counted for counted, _ in found] == [formula for _, formula in found]


class LiveBytes(TorchDispatchMode):
    """The most bytes in tensors that ops have made and that still live, but for memory that ranks share."""

    def __init__(self, shared: Callable[[], list[tuple[int, int]]]) -> None:
        super().__init__()
        self.most, self._shared = 0, shared
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(tensor, Tensor) or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            is_known = address in inputs or any(start <= address < start + size for start, size in self._shared())
            if not is_known:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def peaks() -> dict[str, tuple[float, float]]:
    """By how operands come: the most bytes alive in a forward and in a backward, in blocks of X or W."""
    tokens = outs = 64
    inner = 1024
    block = tokens * inner // 4 * 4
    ranks = Diagonal()
    summa = ranks.call(inner)
    over_y, over_z = (GridSpread(comm, 1, summa.sizes) for comm in (ranks.y, ranks.z))
    problem = Problem(ranks.rank, inner, torch.float32, tokens=tokens, outs=(outs,))
    x, weight = problem.own(problem.x.flatten(0, 1)), problem.own(problem.weights[0])
    grad = problem.grads[0][ranks.rank].flatten(0, 1)

    def shared() -> list[tuple[int, int]]:
        memories = [memory for comm in (ranks.y, ranks.z) if comm.group and (memory := _MEMORY.get(comm.group))]
        halves = [half for memory in memories for half in memory.halves if half is not None]
        return [(half.address(rank), half.nbytes) for half in halves for rank in range(4)]

    found: dict[str, tuple[float, float]] = {}
    for way in ("gathered", "broadcast", "in place"):
        alone = GridSpread(Communicator(None))
        call = GridCall(over_y, (alone,), over_z, Communicator(None), stream=way != "gathered")
        with pytest.MonkeyPatch.context() as patch, torch.autograd.set_multithreading_enabled(False):
            if way == "broadcast":  # as where ranks cannot share memory
                patch.setattr("fastpar.ops.summa._open", _SentBlocks)
            for _ in range(2):  # the first run makes what is shared
                with LiveBytes(shared) as forward:
                    out = grid_linear(call, x, [weight], [None])[0][0]
                with LiveBytes(shared) as backward:
                    torch.autograd.grad(out, (x, weight), grad)
        found[way] = forward.most / block, backward.most / block
    found["shared"] = sum(size for _, size in shared()) / 4 / block, 0.0
    ranks.close()
    return found


def test_a_stream_has_two_blocks_of_each_operand_in_memory_where_gathers_have_all() -> None:
    """Of q = 4 blocks. Y is a quarter of a block, and what ranks agree on less than a hundredth."""
    for found in run_ranks(4, peaks):
        own = 1 / 4 + 1 / 100
        assert found["gathered"][0] >= 8  # both operands whole
        assert found["broadcast"][0] <= 4 + own  # of each the block that is multiplied, and the next one
        assert found["in place"][0] <= own
        assert found["shared"][0] == 4  # the own block of each, in two halves
        # dX and dW are a block each. Beside them is the partial sum that is computed, the one that travels, and where
        # this rank is the root its result; where blocks do not lie in place, two of them.
        assert found["in place"][1] <= 2 + 3 + own
        assert found["broadcast"][1] <= 2 + 3 + 2 + own
        assert found["gathered"][1] >= 16  # both operands whole, and partial sums of both


# --------------------------------------------------------------------------------------------- what is wrong, and where


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fp.GridSpec(1, 2, 4, spread=FEATURES, stream=True),
            r"stream=True needs y == z, .* got 2 and 4; grids of 8 ranks that work: tesseract\(2, 2\); or leave stream",
        ),
        (
            lambda: fp.GridSpec(1, 4, 8, spread=FEATURES, replicas=4, stream=True),
            r"needs y == z / replicas \(8 / 4\).* got 4 and 2; .*32 ranks that work: tesseract\(2, 8\), tesseract\(4",
        ),
        (
            lambda: fp.GridSpec(1, 2, 2, stream=True),
            r"blocks of K, which spread='rows' does not cut over y; grids of 4 ranks that work: summa\(2\);",
        ),
        (lambda: fp.GridSpec(1, 2, 3, spread=FEATURES, stream=True), "6 ranks form no grid of q"),
        (lambda: GridOptions(1, 2, 4, "features", stream=True), r"y == z / replicas, got 'features', 2 and 4 / 1"),
        (lambda: GridOptions(1, 2, 2, stream=True), 'stream needs spread="features"'),
    ],
)
def test_sizes_that_cannot_be_streamed_are_refused_with_grids_that_can(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_on_the_last_rank() -> tuple[dict[str, str], float]:
    """What each rank says where one has other arguments, and the error of a right call afterwards."""
    mesh = fp.init_mesh(tp=4, tp_grid=fp.GridSpec.summa(2, stream=True), device="cpu")
    grid = Grid(mesh)
    is_wrong = grid.y.rank == grid.z.rank == 1
    whole = nn.Linear(6, 4, bias=False)
    layer = GridLinear.from_linear(whole, grid, "column")
    x = torch.randn(4, 3, 6)
    mine = x.chunk(2)[grid.z.rank].chunk(2, -1)[grid.y.rank].clone().requires_grad_()
    said = {
        "tokens": said_by(lambda: layer(mine[:, :2] if is_wrong else mine)),
        "features": said_by(lambda: layer(mine[..., :2] if is_wrong else mine)),
        "dtype": said_by(lambda: layer(mine.double() if is_wrong else mine)),
        "gradients": said_by(lambda: layer(mine.detach() if is_wrong else mine).sum().backward()),
    }
    out = layer(mine)
    expected = whole(x).chunk(2)[grid.z.rank].chunk(2, -1)[grid.y.rank]
    found = difference(out.detach(), expected.detach().double())
    said["backward"] = said_by(lambda: layer(mine) if is_wrong else out.sum().backward())
    mesh.close()
    return said, found


def test_what_is_wrong_on_one_rank_is_raised_on_all_of_the_grid() -> None:
    results = run_ranks(4, wrong_on_the_last_rank, timeout=60.0)
    last = "the rank with tp_d=0, tp_z=1, tp_y=1 of the grid"
    for rank, (said, error) in enumerate(results):
        is_wrong = rank == 3
        assert (
            "ValueError: grid_linear: tokens must be equal on the ranks of tp_y, got 6 with tp_d=0, tp_z=1, tp_y=0"
            in (said["tokens"])
        )
        assert ("takes [.., tokens, 3]" if is_wrong else last) in said["features"]
        assert ("x has dtype torch.float64" if is_wrong else last) in said["dtype"]
        for case in ("gradients", "backward"):
            assert "what is computed (forward, or backward of which) must be equal" in said[case], case
        assert error < 1e-6


# ---------------------------------------------------------------------------------------------------------- other doors


def other_doors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = fp.init_mesh(tp=4, tp_grid=fp.GridSpec.summa(2), device="cpu")
    other = fp.init_mesh(tp=4, tp_grid=(2, 2, 1), device="cpu")
    grid = Grid(mesh)
    whole = nn.Linear(6, 4)
    streamed, gathered = (GridLinear.from_linear(whole, grid, "row", stream=stream) for stream in (True, None))
    found["flags"] = [layer.stream for layer in (streamed, gathered)]
    found["repr"] = repr(streamed)
    found["refused"] = said_by(lambda: GridLinear.from_linear(whole, Grid(other), "row", stream=True))
    x = torch.randn(2, 3, 3, requires_grad=True)
    out = streamed(x)
    found["as gathered"] = difference(out.detach(), gathered(x).detach().double())
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    found["twice"] = said_by(lambda: dx.sum().backward())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = streamed(x)
    low.sum().backward()
    found["autocast"] = [low.dtype, x.grad.dtype, streamed.weight.grad.dtype]  # type: ignore[union-attr]
    tape = Tape()
    with recording(tape):
        first = streamed(x)
    with fp.comm.record() as log, replaying(tape):
        again = streamed(x)
    found["replayed"] = torch.equal(first, again) and not log
    mesh.close()
    other.close()
    return found


def test_a_layer_takes_stream_by_itself_and_keeps_what_gathering_layers_promise() -> None:
    for found in run_ranks(4, other_doors):
        assert found["flags"] == [True, False]
        assert "spread='features', stream=True" in found["repr"]
        assert "does not cut over y; grids of 4 ranks that work: summa(2)" in found["refused"]
        assert found["as gathered"] < 1e-6
        assert "first derivative only" in found["twice"]
        assert found["autocast"] == [torch.bfloat16, torch.float32, torch.float32]
        assert found["replayed"]


def parallelized() -> dict[str, Any]:
    mesh = fp.init_mesh(tp=4, tp_grid=fp.GridSpec.summa(2, stream=True), device="cpu")
    model = Own()
    plan = OWN_PLAN | {"layers.*.mlp.0": "replicate"}
    found: dict[str, Any] = {"refused": said_by(lambda: fp.parallelize(Own(), mesh, plan))}
    fp.parallelize(model, mesh, OWN_PLAN)
    found["explained"] = str(fp.explain(model))
    ids = torch.arange(32).view(4, 8) % 10
    with fp.comm.record() as log:
        model(ids).sum().backward()
    found["ops"] = {entry.op for entry in log if entry.dtype.is_floating_point}
    found["parts"] = model.layers[0].mlp[0].weight.to_local().shape  # type: ignore[index,union-attr]
    found["full"] = full_parameter(model.layers[0].mlp[0].weight).shape  # type: ignore[index,union-attr]
    mesh.close()
    return found


def test_a_model_on_a_streaming_grid_says_so_and_broadcasts() -> None:
    for found in run_ranks(4, parallelized):
        assert "a rank has a part of the features: use a grid with x=1, without stream" in found["refused"]
        assert "2 blocks, broadcast one by one" in found["explained"]
        assert "input broadcast once, in blocks" in found["explained"]
        assert {"broadcast", "reduce"} <= found["ops"]
        assert (found["parts"], found["full"]) == (torch.Size([11, 8]), torch.Size([22, 16]))
