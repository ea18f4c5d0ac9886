"""The linears with a collective: values, gradients, bits, collectives, what overlaps what, and errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import comm, ops, reference
from fastpar.comm import Communicator, shard_sizes
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.linear_cases import KINDS, Forced, Problem, assert_right, expected, mine, options, run_op, shards

# tokens by number of ranks: uneven, and one rank with none
UNEVEN = {1: (7,), 2: (5, 2), 3: (4, 0, 3), 4: (1, 3, 0, 3)}
CHUNKS = (1, 3, 16)  # 16: more than there are rows


def world() -> Communicator:
    return Communicator(dist.group.WORLD)


def problems(kind: str, ranks: int) -> list[Problem]:
    tokens = UNEVEN[ranks]
    found = [
        Problem(kind, (7, 6), 11),
        Problem(kind, (7, 3), 2, tokens=tokens),  # fewer features than 4 ranks: empty shards of both
        Problem(kind, (1, 7, 5), 6, dim=1, tokens=tokens, transposed=True),
        Problem(kind, (5, 7, 6), 4, dim=1, tokens=tokens, bias=False),
        Problem(kind, (7, 2, 6), 5, dim=0, tokens=tokens),
        Problem(kind, (2, 7, 3, 4), 5, dim=1, bias=False, transposed=True),
    ]
    if "gather" in kind or "scatter" in kind:
        return found
    return [*found, Problem(kind, (6,), 4), Problem(kind, (0, 6), 4)]


# ---- values ----------------------------------------------------------------------------------------------------------


def _check_values(kind: str) -> bool:
    group = world()
    for problem in problems(kind, group.size):
        wanted = expected(problem, group)
        for chunks in CHUNKS:
            assert_right(run_op(problem, group, overlap=Forced(count=chunks)), wanted, torch.float64)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_and_empty_shards_match_the_unsharded_layer(kind: str, ranks: int) -> None:
    assert all(run_ranks(ranks, _check_values, kind))


def _check_dtype(kind: str, dtype: torch.dtype) -> bool:
    group = world()
    problem = Problem(kind, (3, 40, 64), 48, dtype=dtype)
    for chunks in (1, 4):
        assert_right(run_op(problem, group, overlap=Forced(count=chunks)), expected(problem, group), dtype)
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_training_dtypes_match_float64(kind: str, dtype: torch.dtype) -> None:
    assert all(run_ranks(2, _check_dtype, kind, dtype))


def _check_reference(kind: str) -> bool:
    group = world()
    for problem in problems(kind, group.size):
        function = getattr(reference, kind)
        assert_right(run_op(problem, group, function), expected(problem, group), torch.float64)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_matches_the_unsharded_layer(kind: str) -> None:
    assert all(run_ranks(3, _check_reference, kind))


def _check_docstring(kind: str) -> bool:
    group = world()
    r = group.rank
    weight = [[10.0]] if r == 0 else [[20.0]]
    x = {
        "all_gather_linear": [[1.0 + r]],
        "copy_to_linear": [[2.0]],
        "linear_reduce_scatter": [[[1.0], [2.0]], [[3.0], [4.0]]][r],
        "linear_all_reduce": [[1.0 + 2 * r]],
    }[kind]
    out = {
        "all_gather_linear": [[[10.0], [20.0]], [[20.0], [40.0]]][r],
        "copy_to_linear": [[20.0 + 20 * r]],
        "linear_reduce_scatter": [[70.0 + 30 * r]],
        "linear_all_reduce": [[70.0]],
    }[kind]
    dx = {
        "all_gather_linear": [[30.0]],
        "copy_to_linear": [[30.0]],
        "linear_reduce_scatter": [weight[0], weight[0]],
        "linear_all_reduce": weight,
    }[kind]
    dweight = {
        "all_gather_linear": 3.0,
        "copy_to_linear": 2.0,
        "linear_reduce_scatter": 3.0 + 4 * r,
        "linear_all_reduce": 1.0 + 2 * r,
    }[kind]
    a, w = torch.tensor(x, requires_grad=True), torch.tensor(weight, requires_grad=True)
    found = getattr(ops, kind)(a, w, group=group)
    found.sum().backward()
    return found.tolist() == out and a.grad.tolist() == dx and w.grad.tolist() == [[dweight]]


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_docstring_example(kind: str) -> None:
    assert all(run_ranks(2, _check_docstring, kind))


def _check_several(kind: str) -> list[str]:
    """Queries, keys and values from one x: outputs and weight gradients of each layer alone, dx of all three."""
    group, tokens = world(), UNEVEN[3]
    where = {"dim": 1, "sizes": tokens} if kind == "all_gather_linear" else {}
    parts = [Problem(kind, (2, 7, 6), n, dim=1, tokens=tokens, bias=n != 4) for n in (8, 4, 5)]
    x = shards(parts[0], group)[0].requires_grad_()
    layers = [[None if t is None else t.requires_grad_() for t in shards(part, group)[1:3]] for part in parts]
    douts = [shards(part, group)[3] for part in parts]
    full_x = parts[0].tensors()[0].requires_grad_()
    exact = [F.linear(full_x, *part.tensors()[1:3]) for part in parts]
    (exact_dx,) = torch.autograd.grad(exact, full_x, [part.tensors()[3] for part in parts])
    function = getattr(ops, kind)
    for chunks in (3, 1):
        overlap = Forced(count=chunks)
        with comm.record() as log:
            outs = function(x, [w for w, _ in layers], [b for _, b in layers], group=group, overlap=overlap, **where)
            dx, *grads = torch.autograd.grad(outs, [x, *(t for layer in layers for t in layer if t is not None)], douts)
        wanted = mine(exact_dx, tokens, 1, group) if where else exact_dx
        torch.testing.assert_close(dx, wanted, rtol=1e-12, atol=1e-12)
        for layer, out, dout in zip(layers, outs, douts, strict=True):
            alone = function(x, *layer, group=group, overlap=overlap, **where)
            assert torch.equal(out, alone)
            for grad in torch.autograd.grad(alone, [t for t in layer if t is not None], dout):
                assert torch.equal(grad, grads.pop(0))
    return [entry.op for entry in log]


@pytest.mark.parametrize(
    ("kind", "launched"),
    [("all_gather_linear", ["all_gather", "all_gather", "reduce_scatter"]), ("copy_to_linear", ["all_reduce"])],
)
def test_several_weights_share_one_gather_and_one_sum(kind: str, launched: list[str]) -> None:
    assert run_ranks(3, _check_several, kind) == [launched] * 3


def _check_in_place(kind: str) -> bool:
    """What a caller may do with the output of F.linear it may do with these."""
    group = world()
    for chunks in (1, 2):
        problem = Problem(kind, (2, 7, 6), 5, dim=1)
        *leaves, dout = shards(problem, group)
        where = {**options(problem, group), "overlap": Forced(count=chunks)}
        getattr(ops, kind)(*(leaf.requires_grad_() for leaf in leaves), **where).mul_(2.0).backward(dout / 2.0)
        for leaf, exact in zip(leaves, expected(problem, group)[1:], strict=True):
            torch.testing.assert_close(leaf.grad, exact, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_be_written_to(kind: str) -> None:
    assert all(run_ranks(2, _check_in_place, kind))


# ---- bits ------------------------------------------------------------------------------------------------------------


def _check_bits(kind: str) -> list[Any]:
    """Results with overlap on; on every rank they must be those with overlap off."""
    group, kept = world(), []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 37, 33), (6, 10, 33)):
            problem = Problem(kind, shape, 29, dtype=dtype)
            for chunks in (1, 3, 4):
                on = [run_op(problem, group, overlap=Forced(True, count=chunks)) for _ in range(3)]
                off = run_op(problem, group, overlap=Forced(False, count=chunks))
                for again in (*on[1:], off):
                    assert all(torch.equal(a, b) for a, b in zip(on[0], again, strict=True)), (dtype, shape, chunks)
                kept.append(on[0])
    return kept


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_overlap_on_and_off_give_the_same_bits(kind: str, ranks: int) -> None:
    results = run_ranks(ranks, _check_bits, kind)
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            if kind == "linear_all_reduce":
                assert torch.equal(first[0], other[0])
            if kind == "copy_to_linear":
                assert torch.equal(first[1], other[1])
            if not kind.startswith(("all", "copy")):
                assert torch.equal(first[3], other[3])  # the bias is one parameter


def _check_plain_bits(kind: str) -> bool:
    """In one chunk the numbers are those of the autograd pairs and F.linear."""
    group = world()
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(kind, (3, 16, 32), 24, dtype=dtype, bias=False)
        found, plain = run_op(problem, group), run_op(problem, group, getattr(reference, kind))
        assert all(a is None or torch.equal(a, b) for a, b in zip(found, plain, strict=True)), dtype
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk_has_the_bits_of_linear_and_collective(kind: str) -> None:
    assert all(run_ranks(2, _check_plain_bits, kind))


# ---- collectives -----------------------------------------------------------------------------------------------------


def _collectives(kind: str, frozen: str, chunks: int) -> tuple[list[str], list[str]]:
    group = world()
    x, weight, _, dout = shards(Problem(kind, (8, 6), 10), group)
    for name, tensor in (("x", x), ("weight", weight)):
        tensor.requires_grad_(name not in frozen)
    overlap = Forced(count=chunks)
    with comm.record() as forward, count_collectives() as below:
        out = getattr(ops, kind)(x, weight, group=group, overlap=overlap)
    with comm.record() as backward:
        if out.requires_grad:
            out.backward(dout)
    assert below.total == len(forward), "a collective that no communicator recorded"
    return [entry.op for entry in forward], [entry.op for entry in backward]


G, S, R = "all_gather", "reduce_scatter", "all_reduce"


@pytest.mark.parametrize(
    ("kind", "frozen", "chunks", "forward", "backward"),
    [
        ("all_gather_linear", "", 1, [G], [G, S]),
        ("all_gather_linear", "weight", 1, [G], [S]),
        ("all_gather_linear", "x", 1, [G], [G]),
        ("all_gather_linear", "x weight", 1, [G], []),
        ("all_gather_linear", "", 4, [G] * 4, [G, S, S, S, S]),
        ("copy_to_linear", "", 1, [], [R]),
        ("copy_to_linear", "x", 1, [], []),
        ("copy_to_linear", "", 4, [], [R] * 4),
        ("linear_reduce_scatter", "", 1, [S], [G]),
        ("linear_reduce_scatter", "x", 1, [S], [G]),
        ("linear_reduce_scatter", "", 4, [S] * 4, [G] * 4),
        ("linear_all_reduce", "", 1, [R], []),
        ("linear_all_reduce", "", 4, [R] * 4, []),
    ],
)
def test_collectives_are_those_of_the_docstring(
    kind: str, frozen: str, chunks: int, forward: list[str], backward: list[str]
) -> None:
    assert run_ranks(2, _collectives, kind, frozen, chunks) == [(forward, backward)] * 2


class Flights:
    """What is in flight on a communicator while products are computed: for every product, the names."""

    def __init__(self, group: Communicator) -> None:
        self.now: list[str] = []
        self.at_products: list[list[str]] = []
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            self._watch(group, name)

    def _watch(self, group: Communicator, name: str) -> None:
        launch = getattr(group.collectives("split_phase"), name)

        def launched(*args: Any, **kwargs: Any) -> Any:
            pending = launch(*args, **kwargs)
            wait = pending.wait
            self.now.append(name)

            def waited(*args: Any) -> Any:
                if pending.wait is waited:
                    self.now.remove(name)
                    pending.wait = wait
                return wait(*args)

            pending.wait = waited
            return pending

        setattr(group.collectives("split_phase"), name, launched)

    def products(self) -> TorchDispatchMode:
        flights = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func._opname in ("mm", "addmm"):
                    flights.at_products.append(list(flights.now))
                return func(*args, **(kwargs or {}))

        return Watch()


def _in_flight(kind: str, chunks: int, enabled: bool, rows: int = 128) -> tuple[list[list[str]], list[list[str]]]:
    group = world()
    flights = Flights(group)
    x, weight, _, dout = shards(Problem(kind, (rows, 96), 80), group)
    with torch.autograd.set_multithreading_enabled(False), flights.products():
        out = getattr(ops, kind)(
            x.requires_grad_(), weight.requires_grad_(), group=group, overlap=Forced(enabled, count=chunks)
        )
        forward, flights.at_products = flights.at_products, []
        out.backward(dout)
    assert not flights.now, "a collective that nobody waited for"
    return forward, flights.at_products


@pytest.mark.parametrize(
    ("kind", "chunks", "forward", "backward"),
    [
        # dgrad with the gather in flight, then wgrad with the sum of dx in flight
        ("all_gather_linear", 1, [[]], [[G], [S]]),
        ("copy_to_linear", 1, [[]], [[], [R]]),
        ("linear_reduce_scatter", 1, [[]], [[], []]),
        ("linear_all_reduce", 1, [[]], [[], []]),
        # two chunks; the products of a chunk are as many as there are ranks, but for the all-reduce
        ("all_gather_linear", 2, [[G], [G], [], []], [[G], [G], [G, S], [G, S], [S, S]]),
        ("copy_to_linear", 2, [[]], [[], [R], [R, R]]),
        ("linear_reduce_scatter", 2, [[], [], [S], [S]], [[G], [G], [], [], []]),
        ("linear_all_reduce", 2, [[], [R]], [[], []]),
    ],
)
def test_collectives_travel_during_the_products(
    kind: str, chunks: int, forward: list[list[str]], backward: list[list[str]]
) -> None:
    assert run_ranks(2, _in_flight, kind, chunks, True) == [(forward, backward)] * 2
    nothing = ([[] for _ in forward], [[] for _ in backward])
    assert run_ranks(2, _in_flight, kind, chunks, False) == [nothing] * 2


@pytest.mark.parametrize("kind", ["all_gather_linear", "copy_to_linear"])
def test_collectives_of_a_few_kilobytes_are_waited_for_at_once(kind: str) -> None:
    found = run_ranks(2, _in_flight, kind, 1, True, 4)
    assert found == [([[]], [[], []])] * 2


# ---- deferred gradients ----------------------------------------------------------------------------------------------


def _check_deferred(kind: str) -> tuple[list[str], list[str]]:
    group = world()
    for problem in problems(kind, group.size)[1:3]:
        store = ops.WeightGradStore()
        x, weight, bias, dout = shards(problem, group)
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        out = getattr(ops, kind)(x, weight, bias, wgrad_store=store, **options(problem, group))
        with comm.record() as first:
            out.backward(dout)
        assert weight.grad is None
        assert bias.grad is None
        assert len(store) == 1
        with comm.record() as second:
            store.run()
        assert_right([out.detach(), x.grad, weight.grad, bias.grad], expected(problem, group), x.dtype)
        # a frozen x: backward must still reach the store
        x, weight, bias, dout = shards(problem, group)
        getattr(ops, kind)(x, weight.requires_grad_(), bias, wgrad_store=store, **options(problem, group)).backward(
            dout
        )
        store.run()
        torch.testing.assert_close(weight.grad, expected(problem, group)[2], rtol=1e-12, atol=1e-12)
    return [entry.op for entry in first], [entry.op for entry in second]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("all_gather_linear", [S], [G]),
        ("copy_to_linear", [R], []),
        ("linear_reduce_scatter", [G], [G]),
        ("linear_all_reduce", [], []),
    ],
)
def test_deferred_weight_gradients_match_the_unsharded_layer(kind: str, first: list[str], second: list[str]) -> None:
    assert run_ranks(3, _check_deferred, kind) == [(first, second)] * 3
    assert run_ranks(1, _check_deferred, kind) == [([], [])]


def _check_second_derivative(kind: str) -> bool:
    """d/dx and d/dweight of |dx|^2 + |dweight|^2 + |dbias|^2, as the unsharded layer has it."""
    group = world()
    problem = Problem(kind, (2, 7, 6), 5, dim=1)
    x, weight, bias, dout = (t.requires_grad_() for t in shards(problem, group))
    full = [t.requires_grad_() for t in problem.tensors()]
    exact = torch.autograd.grad(F.linear(*full[:3]).pow(2), full[:3], full[3].detach(), create_graph=True)
    sum(g.pow(2).sum() for g in exact).backward()
    out = getattr(ops, kind)(x, weight, bias, **options(problem, group))
    grads = torch.autograd.grad(out.pow(2), (x, weight, bias), dout.detach(), create_graph=True)
    sum(g.pow(2).sum() for g in grads).backward()  # type: ignore[union-attr]
    wanted = [t.grad for t in full[:3]]
    tokens = problem.sizes(group)
    split = shard_sizes(problem.features if problem.is_column else problem.shape[-1], group.size)
    if problem.is_column:
        wanted = [wanted[0], mine(wanted[1], split, 0, group), mine(wanted[2], split, 0, group)]
        if problem.splits_tokens:
            wanted[0] = mine(wanted[0], tokens, 1, group)
    else:
        wanted = [mine(wanted[0], split, -1, group), mine(wanted[1], split, 1, group), wanted[2]]
    for name, ours, theirs in zip(("x", "weight", "bias"), (x.grad, weight.grad, bias.grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_match_the_unsharded_layer(kind: str) -> None:
    assert all(run_ranks(3, _check_second_derivative, kind))


# ---- compiled --------------------------------------------------------------------------------------------------------


def _check_compiled(kind: str) -> int:
    """Eager bits from one graph, with the collectives of the docstring in it."""
    group = world()
    problem = Problem(kind, (2, 8, 6), 10, dim=1, dtype=torch.float32, transposed=True)
    where = options(problem, group) | {"overlap": Forced(count=2)}

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return getattr(ops, kind)(x * 2.0, weight, bias, **where) * 3.0

    results = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo's own
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            *leaves, dout = shards(problem, group)
            with comm.record() as log:
                out = call(*(leaf.requires_grad_() for leaf in leaves))
                out.backward(dout)
            results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return len(log)


@pytest.mark.parametrize(("kind", "launched"), list(zip(KINDS, (5, 2, 4, 2), strict=True)))
def test_compiled_it_gives_the_eager_bits(kind: str, launched: int) -> None:
    assert run_ranks(2, _check_compiled, kind) == [launched] * 2


def _check_registered_ops() -> bool:
    """What torch.compile relies on: schemas, fakes with the shapes and strides of the results, no aliasing."""
    import fastpar.ops.parallel_linear.torch_ops as registered

    group = world()
    for kind in KINDS:
        problem = Problem(kind, (2, 8, 6), 10, dim=1, dtype=torch.float32)
        x, weight, bias, dout = shards(problem, group)
        columns = weight.t().contiguous().t()
        sizes = problem.sizes(group) if problem.splits_tokens else []
        where = [group.group.group_name, 60.0, "auto", group.rank, 1, sizes, 2, True, 2]
        keep = kind == "all_gather_linear"
        weights, biases, douts = [weight], [bias], [dout]
        if problem.is_column:
            weights, biases, douts = [weight, columns, weight], [bias, None, bias], [dout, dout, None]
        flags, nothing = [True] * (1 + 2 * len(weights)), [True] + [False] * (2 * len(weights))
        tests = ("test_schema", "test_faketensor")
        forward, backward = (getattr(torch.ops.fastpar, name).default for name in (kind, f"{kind}_backward"))
        torch.library.opcheck(forward, (x, weights, biases, keep, *where), test_utils=tests)
        torch.library.opcheck(backward, (x, weights, douts, flags, *where), test_utils=tests)
        torch.library.opcheck(backward, (None, weights, douts, nothing, *where), test_utils=tests)
    return registered is not None


def test_registered_ops_pass_opcheck() -> None:
    assert all(run_ranks(2, _check_registered_ops))


# ---- autocast and arguments ------------------------------------------------------------------------------------------


def _check_autocast(kind: str) -> bool:
    group = world()
    problem = Problem(kind, (8, 6), 10, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), comm.record() as log:
        found = run_op_in_autocast(problem, group)
    assert all(entry.dtype == torch.bfloat16 for entry in log)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    for ours, exact in zip(found, expected(problem, group), strict=True):
        assert float((ours.double() - exact).abs().max()) <= 2.0**-6 * float(exact.abs().max())
    return True


def run_op_in_autocast(problem: Problem, group: Communicator) -> list[Tensor]:
    *leaves, dout = shards(problem, group)
    out = getattr(ops, problem.kind)(*(leaf.requires_grad_() for leaf in leaves), **options(problem, group))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_converts_before_anything_is_sent(kind: str) -> None:
    assert all(run_ranks(2, _check_autocast, kind))


X, W = torch.zeros(4, 6), torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.linear_all_reduce(X, W.t(), group=None), ValueError, r"must agree in K, got x \(4, 6\)"),
        (lambda: ops.linear_all_reduce(X, W.bfloat16(), group=None), TypeError, "weight must have the dtype of x"),
        (lambda: ops.linear_all_reduce(X.int(), W, group=None), TypeError, "x must have a floating dtype"),
        (lambda: ops.linear_all_reduce(X, W, W[0], group=None), ValueError, r"one entry per output feature, \(5,\)"),
        (lambda: ops.copy_to_linear(X, [W], W[:, 0], group=None), TypeError, "two tensors or two sequences"),
        (lambda: ops.copy_to_linear(X, [W, W], [None], group=None), ValueError, "got 2 weights and 1 biases"),
        (lambda: ops.copy_to_linear(X, [], group=None), ValueError, "at least one weight"),
        (lambda: ops.linear_reduce_scatter(X, W, group=None, dim=1), ValueError, "other than its last"),
        (lambda: ops.all_gather_linear(X, W, group=None, sizes=[5]), ValueError, r"sizes\[0\] the 4 that x has"),
        (lambda: ops.linear_reduce_scatter(X, W, group=None, sizes=[2, 2]), ValueError, "1 numbers >= 0 that add up"),
    ],
)
def test_arguments_that_do_not_fit_are_clear_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _errors() -> bool:
    group = world()
    with pytest.raises(TypeError, match=r"linear_all_reduce: overlap must be .* got str"):
        ops.linear_all_reduce(X, W, group=group, overlap="yes")
    with pytest.raises(ValueError, match=r"sizes must be 2 numbers >= 0"):
        ops.all_gather_linear(X, W, group=group, sizes=[4])
    weight = torch.distributed.tensor.DTensor.from_local(W, dist.device_mesh.DeviceMesh("cpu", [0, 1]))
    with pytest.raises(TypeError, match=r"weight must be a plain tensor, got a DTensor: pass weight.to_local\(\)"):
        ops.linear_all_reduce(X, weight, group=group)
    return True


def test_errors_come_before_anything_is_sent() -> None:
    assert all(run_ranks(2, _errors))
