"""Dispatch and combine with routing, arguments and orders of calls that nobody would wish for."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import CommMismatchError, CommTimeoutError, Communicator, record
from fastpar.ops import ExpertRule, Padding, moe_combine
from fastpar.recompute import Selective, checkpoint
from tests.dist import run_ranks
from tests.moe.moe_calls import moe_dispatch, moe_mlp
from tests.moe.moe_ranks import (
    TRANSPORTS,
    adversarial_rank,
    check_step,
    chunked_rank,
    multiply,
    random_steps_rank,
    routed,
    through_experts,
)

# ---- routing


@pytest.mark.parametrize("size", [2, 3])
def test_any_routing_gives_the_sum_over_choices(size):
    assert set(run_ranks(size, adversarial_rank)) == {14}


def test_any_routing_gives_the_same_in_chunks():
    assert set(run_ranks(2, chunked_rank)) == {14}


def test_steps_that_have_nothing_in_common_all_end():
    assert run_ranks(4, random_steps_rank, 100) == [100] * 4


@pytest.mark.slow
def test_1000_steps_that_have_nothing_in_common_all_end():
    assert run_ranks(4, random_steps_rank, 1000, timeout=300.0) == [1000] * 4


# ---- arguments


def good(**changes):
    """Arguments of a call with 2 choices of 4 experts."""
    indices = torch.tensor([[0, 3], [1, 2], [2, 2]])
    x, indices, weights, _ = routed(indices)
    return {"x": x, "indices": indices, "weights": weights, "num_experts": 4, "group": dist.group.WORLD, **changes}


WRONG_ON_ONE = {
    "an expert that there is not": ({"indices": torch.tensor([[0, 3], [1, 5], [2, 2]])}, r"0\.\.3, or -1 or 4.*0\.\.5"),
    "a negative expert": ({"indices": torch.tensor([[0, -2], [1, 3], [2, 2]])}, r"they are in -2\.\.3"),
    "floating indices": ({"indices": torch.zeros(3, 2)}, "indices must be int64 or int32, got torch.float32"),
    "indices of other tokens": ({"indices": torch.zeros(4, 2, dtype=torch.int64)}, r"got \(3, 5\) and \(4, 2\)"),
    "weights of other choices": ({"weights": torch.zeros(3, 1)}, r"shape of indices, \(3, 2\).*got \(3, 1\)"),
    "whole weights": ({"weights": torch.ones(3, 2, dtype=torch.int64)}, "a floating dtype, got .* torch.int64"),
    "no matrix": ({"x": torch.zeros(3, 5, 1)}, r"x must be \[T, H\].*got \(3, 5, 1\)"),
    "whole numbers": ({"x": torch.ones(3, 5, dtype=torch.int32)}, "x must be one of .*got torch.int32"),
    "no tensor": ({"x": [[1.0]]}, "must be tensors, got list"),
    "no payload": ({"payload": "int4"}, "payload must be None or float8_e4m3fn .*got 'int4'"),
    "double payload": ({"payload": "float8_e4m3fn", "x": torch.zeros(3, 5, dtype=torch.float64)}, "at most 32 bits"),
}
DIFFERENT = {
    "top_k": ({"indices": torch.zeros(3, 1, dtype=torch.int64), "weights": torch.ones(3, 1)}, r"got \[2, 1\]"),
    "the hidden size": ({"x": torch.zeros(3, 6)}, r"got \[5, 6\]"),
    "the dtype of x": ({"x": torch.zeros(3, 5, dtype=torch.bfloat16)}, "'torch.float32', 'torch.bfloat16'"),
    "padding.align": ({"padding": Padding(align=8)}, r"got \[1, 8\]"),
    "padding.capacity": ({"padding": Padding(capacity=8)}, r"got \[-1, 8\]"),
    "payload": ({"payload": "float8_e4m3fn"}, r"got \[0, 1\]"),
    "what requires gradients": ({"x": torch.zeros(3, 5, requires_grad=True)}, r"got \[0, 1\]"),
}


def wrong_arguments() -> int:
    """The last rank is wrong, and all say so; what follows works."""
    rank, count = dist.get_rank(), 0
    for options in TRANSPORTS.values():
        for name, (changes, text) in WRONG_ON_ONE.items():
            pattern = text if rank == 1 else "wrong arguments on rank 1 of the group: see its error"
            with pytest.raises(ValueError, match=pattern):
                moe_dispatch(**good(**(changes if rank == 1 else {}), **options))
            check_step(routed(torch.tensor([[0, 3], [1, 2]])), 4, name, **options)
            count += 1
        for name, (changes, text) in DIFFERENT.items():
            with pytest.raises(ValueError, match=f"{name}.*must be equal on all ranks|{name}.*{text}") as error:
                moe_dispatch(**good(**(changes if rank == 1 else {}), **options))
            assert re.search(text, str(error.value)), str(error.value)
            count += 1
        for num_experts, wanted in ((6, CommMismatchError), (5, (ValueError if rank else CommMismatchError))):
            with pytest.raises(wanted):  # the headers have other sizes
                moe_dispatch(**{**good(**options), "num_experts": num_experts if rank else 4})
        check_step(routed(torch.tensor([[0, 3], [1, 2]])), 4, "in the end", **options)
    return count


def test_what_is_wrong_on_one_rank_is_an_error_on_all_and_the_group_goes_on():
    assert run_ranks(2, wrong_arguments) == [3 * (len(WRONG_ON_ONE) + len(DIFFERENT))] * 2


def test_arguments_are_checked_on_one_rank_too():
    parts = {"x": torch.zeros(2, 3), "indices": torch.zeros(2, 1, dtype=torch.int64), "num_experts": 2}
    with pytest.raises(ValueError, match=r"num_experts \(0\) must be divisible"):
        moe_dispatch(**{**parts, "num_experts": 0})
    with pytest.raises(ValueError, match=r"transport must be one of auto, .*, got 'nccl'"):
        moe_dispatch(**parts, transport="nccl")
    rows, weights, plan = moe_dispatch(**parts)
    with pytest.raises(ValueError, match=r"rows must be \[2, H\], as the dispatch gave them, got \(3, 3\)"):
        moe_combine(torch.zeros(3, 3), plan)
    with pytest.raises(ValueError, match=r"row_weights must be \[2\], got \(1,\)"):
        moe_combine(rows, plan, weights[:1])
    with pytest.raises(ValueError, match=r"add must be \[2, 3\], got \(3,\)"):
        moe_combine(rows, plan, add=torch.zeros(3))


def frozen() -> None:
    """Backward of rank 1 would send no x again, and the others' would read something else in its place."""
    x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2]]))
    first = torch.randn(2, 8, 5, requires_grad=dist.get_rank() == 0)
    second = torch.randn(2, 5, 8, requires_grad=True)
    for options in TRANSPORTS.values():
        with pytest.raises(
            ValueError, match=r"what requires gradients .*equal on all ranks of the group, got \[9, 1\]"
        ):
            moe_mlp(x, indices, weights, first, second, rule=ExpertRule("relu"), group=dist.group.WORLD, **options)


def chunked() -> None:
    x, indices, weights, _ = routed(torch.tensor([[0, 3], [1, 2]]))
    matrices = torch.randn(2, 2, 5, 5)
    where = {"rule": ExpertRule("relu"), "group": dist.group.WORLD, "transport": "all_to_all"}
    for counts in ((1, 2), (2, 3)):
        chunks = counts[dist.get_rank()]
        with pytest.raises(ValueError, match=rf"chunks must be equal on all ranks .*got \[{counts[0]}, {counts[1]}\]"):
            moe_mlp(x, indices, weights, *matrices, chunks=chunks, **where)
    other = torch.randn(2, 2, 6, 6) if dist.get_rank() else matrices
    x = torch.randn(2, 5 + dist.get_rank())
    with pytest.raises(ValueError, match=r"the hidden size must be equal on all ranks of the group, got \[5, 6\]"):
        moe_mlp(x, indices, weights, *other, chunks=2, **where)


def test_chunks_that_differ_are_an_error():
    run_ranks(2, chunked)


def test_parameters_that_are_frozen_on_one_rank_only_are_an_error():
    run_ranks(2, frozen)


def indivisible() -> None:
    with pytest.raises(ValueError, match=r"num_experts \(9\) must be divisible by the ranks of the group \(2\)"):
        moe_dispatch(**{**good(), "num_experts": 9})


def test_experts_that_cannot_be_divided_are_an_error():
    run_ranks(2, indivisible)


# ---- a rank that does not come


def wait_for_nobody(options: dict) -> tuple[str, float]:
    """Rank 1 dispatches and goes away; the others say for whom they waited."""
    Communicator(dist.group.WORLD).barrier()
    comm = Communicator(dist.group.WORLD, timeout=0.5)
    rows, row_weights, plan = moe_dispatch(**{**good(), "group": comm, **options})
    if comm.rank == 1:
        time.sleep(1.5)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(CommTimeoutError) as error:
        moe_combine(multiply(rows, plan), plan, row_weights)
    return str(error.value), time.monotonic() - started


@pytest.mark.parametrize("transport", ["shared memory", "all-to-all"])
def test_a_rank_that_does_not_combine_is_named_at_the_deadline(transport):
    (text, took), _ = run_ranks(2, wait_for_nobody, TRANSPORTS[transport])
    assert "rank(s) 1" in text
    assert 0.3 < took < 3.0


# ---- orders of calls


def interleaved(options: dict) -> int:
    """Two layers between each other, as two microbatches of a pipeline are, and backward after other forwards."""
    first, second = (
        routed(torch.tensor([[0, 3], [1, 2]]).roll(shift, 0), hidden) for shift, hidden in ((0, 5), (1, 300))
    )
    group = dist.group.WORLD
    alone = [through_experts(*parts, num_experts=4, group=group, **options) for parts in (first, second)]
    leaves = [[t.clone().requires_grad_() for t in (x, weights)] for x, _, weights, _ in (first, second)]
    sent = [
        moe_dispatch(x, parts[1], weights, num_experts=4, group=group, **options)
        for (x, weights), parts in zip(leaves, (first, second), strict=True)
    ]
    outs = [None, None]
    for layer in (1, 0):
        rows, row_weights, plan = sent[layer]
        outs[layer] = moe_combine(multiply(rows, plan), plan, row_weights, add=leaves[layer][0])
    for parts in (second, first):  # somebody else's steps
        with torch.no_grad():
            moe_dispatch(parts[0], parts[1], num_experts=4, group=group, **options)
    for layer, parts in enumerate((first, second)):
        outs[layer].backward(parts[3])
        found = (outs[layer], *(leaf.grad for leaf in leaves[layer]))
        assert all(torch.equal(a, b) for a, b in zip(found, alone[layer], strict=True))
    return 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_layers_may_be_between_each_other(transport):
    assert run_ranks(2, interleaved, TRANSPORTS[transport]) == [2, 2]


def poisoned() -> int:
    """Memory that nobody has written holds NaN; nothing of it comes out."""
    from fastpar.ops.moe import dispatcher as _moe_exchange
    from fastpar.ops.moe import packing
    from fastpar.ops.moe.transports import all_to_all as _moe_all_to_all
    from fastpar.ops.moe.transports import shared_memory as _moe_shared

    made = []

    class Poisoned(_moe_shared.SharedRegion):
        def __init__(self, comm, nbytes):
            super().__init__(comm, nbytes)
            self.tensor((nbytes,), torch.uint8).fill_(0xFF)  # NaN in every floating format
            comm.barrier()
            made.append(nbytes)

    def buffer(like, shape, dtype=None):
        found = torch.empty(shape, dtype=like.dtype if dtype is None else dtype)
        found.view(torch.uint8).fill_(0xFF)
        return found

    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(_moe_shared, "SharedRegion", Poisoned)
        for module in (packing, _moe_all_to_all, _moe_exchange):
            patched.setattr(module, "new_buffer", buffer)
        for tokens in (2, 64, 2000):  # regions grow
            indices = torch.arange(2 * tokens).view(-1, 2) % 3
            for options in TRANSPORTS.values():
                for padding in (Padding(), Padding(align=16)):
                    check_step(routed(indices, 33), 4, tokens, padding=padding, **options)
    return len(made)


def test_nothing_uninitialised_comes_out():
    assert run_ranks(2, poisoned) == [4, 4]  # two halves, which have to grow for 2000 tokens only


# ---- what lives how long


def leave_nothing() -> tuple[int, int]:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("fastpar")

    counts = []
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        alive = weakref.ref(group)
        for options in TRANSPORTS.values():
            through_experts(*routed(torch.tensor([[0, 3], [1, 2]])), num_experts=4, group=group, **options)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert alive() is None, "something holds the group"
        counts.append(mappings())
    return counts[0], counts[-1]


def test_a_group_that_is_destroyed_leaves_no_memory():
    for first, last in run_ranks(2, leave_nothing):
        assert last == first


def copied() -> None:
    for options in TRANSPORTS.values():
        rows, row_weights, plan = moe_dispatch(**good(**options))
        out = moe_combine(rows, plan, row_weights)
        assert torch.equal(moe_combine(rows, copy.deepcopy(plan), row_weights), out)
        with pytest.raises(TypeError, match=r"Dispatcher cannot be pickled.*belongs to the process group"):
            pickle.dumps(plan)


def test_a_plan_can_be_copied_and_not_pickled():
    run_ranks(2, copied)


# ---- autograd and compilation


def recomputed(options: dict, fused: bool) -> list[list[str]]:
    """The collectives of a step: plain, computed twice, and computed twice without collectives and products."""
    first, second = (torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(e)) for e in (0, 1))
    x, indices, weights, dout = routed(torch.tensor([[0, 3], [1, 2]] if dist.get_rank() else [[0, 0]]))

    def block(x, weights):
        if fused:
            where = {"rule": ExpertRule("relu"), "group": dist.group.WORLD, **options}
            return moe_mlp(x.sin(), indices, weights, first, second, add=x, **where).cos()
        rows, row_weights, plan = moe_dispatch(
            x.sin(), indices, weights, num_experts=4, group=dist.group.WORLD, **options
        )
        return moe_combine(multiply(rows.tanh(), plan), plan, row_weights, add=x).cos()

    def twice(*args):
        return checkpoint(block, *args)

    def selective(*args):
        return checkpoint(block, *args, policy=Selective())

    logs, found = [], []
    for run in (block, block, twice, selective):  # in the first one regions are made
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        with record() as log:
            out = run(*leaves)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        logs.append([entry.op for entry in log])
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
    return logs[1:]


@pytest.mark.parametrize("fused", [False, True], ids=["parts", "moe_mlp"])
@pytest.mark.parametrize("transport", ["shared memory", "all-to-all"])
def test_recomputation_gives_the_same_bits_and_repeats_what_it_was_told_to(transport, fused):
    for plain, full, selective in run_ranks(2, recomputed, TRANSPORTS[transport], fused):
        assert selective == plain
        assert len(full) == len(plain) + 3  # headers and rows again, and results, of which the cosine needs the input


def test_a_second_derivative_is_an_error_that_names_what_has_one():
    x, indices = torch.randn(3, 4, requires_grad=True), torch.tensor([[0, 1], [1, 0], [0, 0]])
    weights = torch.rand(3, 2, requires_grad=True)
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=2)
    out = moe_combine(rows.square(), plan, row_weights)
    dx, dweights = torch.autograd.grad(out.square().sum(), (x, weights), create_graph=True)
    for grad in (dx, dweights):
        with pytest.raises(RuntimeError, match=r"first derivative only; fastpar.reference.moe_mlp"):
            torch.autograd.grad(grad.sum(), (x, weights), retain_graph=True)


def test_without_gradients_nothing_is_kept():
    x, indices = torch.randn(3, 4, requires_grad=True), torch.tensor([[0, 1], [1, 0], [0, 0]])
    with torch.no_grad():
        rows, row_weights, plan = moe_dispatch(x, indices, num_experts=2)
        out = moe_combine(rows, plan, row_weights)
    assert torch.equal(out, 2 * x)
    assert not rows.requires_grad
    assert not out.requires_grad


def test_results_are_kept_for_backward_only_where_weights_need_them():
    x, indices = torch.randn(3, 4, requires_grad=True), torch.tensor([[0, 1], [1, 0], [0, 0]])
    saved = []
    for weights in (None, torch.rand(3, 2, requires_grad=True)):
        rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=2)
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=shapes: to.append(tuple(t.shape)), lambda t: t):
            moe_combine(rows, plan, row_weights if weights is not None else None)
        saved.append(shapes)
    assert saved == [[], [(6, 4), (6,)]]


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch._dynamo
def test_torch_compile_goes_round_it():
    def layer(x, indices, weights):
        rows, row_weights, plan = moe_dispatch(2.0 * x, indices, weights, num_experts=2)
        return 3.0 * moe_combine(rows * 2.0, plan, row_weights)

    x, indices = torch.randn(3, 4), torch.tensor([[0, 1], [1, 0], [0, 0]])
    weights = torch.rand(3, 2, requires_grad=True)
    out = torch.compile(layer, backend="eager")(x, indices, weights)
    torch.testing.assert_close(out, layer(x, indices, weights))
    (grad,) = torch.autograd.grad(out.sum(), weights)
    torch.testing.assert_close(grad, 12.0 * x.sum(1, keepdim=True).expand(-1, 2))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="moe_dispatch"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, indices, weights)
