"""A backward in two parts, input gradients (I) and weight gradients (W): the same bits, the same work, less memory.

Everything is compared with torch.equal: both ways run the same kernels on the same operands and add in the same order.
FLOPs are those of torch.utils.flop_counter, which counts matrix products, convolutions and attention.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastpar as fp
from fastpar import comm, ops
from fastpar.comm import Communicator
from fastpar.ops import WeightGradStore
from fastpar.tensor import local_tensor
from tests.dist import run_ranks
from tests.models import VOCAB, build_model


class Work(NamedTuple):
    """FLOPs."""

    whole: int
    inputs: int
    weights: int


class Calls(nn.Module):
    """`function(x, *weights)` with weights of the given shapes."""

    def __init__(self, function: Callable[..., Tensor], *shapes: Sequence[int], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_used = function, nn.ModuleDict(modules)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def _run(function: Callable[[], Any], count: bool) -> tuple[Any, int]:
    if not count:
        return function(), 0
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def assert_same(
    module: nn.Module, x: Tensor, *, microbatches: int = 2, count: bool = True
) -> tuple[Work, WeightGradStore]:
    """The module's backward in one part and in two: equal bits of all gradients, also of those added to earlier ones.

    Returns the FLOPs of the last microbatch, and its store.
    """
    expected: dict[str, Tensor | None] = {}
    work, store = Work(0, 0, 0), WeightGradStore()
    results: list[dict[str, Tensor | None]] = []
    for is_split in (False, True):
        module.zero_grad()
        for seed in range(microbatches):
            torch.manual_seed(seed)
            given = _leaf(x)
            with store.deferring():
                out = _first(module(given)) if is_split else None
            if out is None:
                out = _first(module(given))
            dout = torch.randn_like(out)
            if not is_split:
                _, flops = _run(lambda out=out, dout=dout: torch.autograd.backward(out, dout), count)
                work, dx = work._replace(whole=flops), given.grad
                expected[f"dx {seed}"] = dx
                continue
            before = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
            (dx,), flops = _run(lambda out=out, dout=dout, given=given: store.backward([out], [dout], [given]), count)
            for name, p in module.named_parameters():
                same = p.grad is None if before[name] is None else torch.equal(p.grad, before[name])
                assert same, f"{name}.grad has changed before W"
            _, more = _run(store.run, count)
            work = work._replace(inputs=flops, weights=more)
            expected_dx = expected[f"dx {seed}"]
            assert dx is None if expected_dx is None else torch.equal(dx, expected_dx)
        results.append({name: p.grad for name, p in module.named_parameters()})
    whole, parts = results
    for name, grad in whole.items():
        found = parts[name]
        assert (grad is None) == (found is None), name
        if grad is not None:
            assert grad.stride() == found.stride(), name
            assert torch.equal(grad, found), name
    assert len(store) == 0
    assert work.whole == work.inputs + work.weights
    return work, store


def test_the_docstrings_example() -> None:
    x, weight = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[3.0, 4.0]], requires_grad=True)
    store = WeightGradStore()
    with store.deferring():
        y = F.linear(x, weight)
    (dx,) = store.backward([y], [torch.tensor([[10.0]])], [x])
    assert y.tolist() == [[11.0]]
    assert dx.tolist() == [[30.0, 40.0]]
    assert weight.grad is None
    assert store.run() == 1
    assert weight.grad.tolist() == [[10.0, 20.0]]


# ---- all kinds of products -------------------------------------------------------------------------------------------

# name: (module, shape of x, share of the backward's FLOPs that W does)
STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)), (6, 16), 0.5),
    "without_bias": (lambda: nn.Sequential(nn.Linear(16, 24, False), nn.GELU(), nn.Linear(24, 8, False)), (6, 16), 0.5),
    "bias_last_on_3d": (lambda: nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)), (2, 3, 16), 0.5),
    "on_1d": (lambda: nn.Linear(16, 8), (16,), 0.5),
    "not_contiguous": (lambda: Calls(lambda x, w, b: F.linear(x.mT, w, b), (8, 6), (8,)), (2, 6, 16), 0.5),
    "matmul": (lambda: Calls(lambda x, w: x @ w, (16, 8)), (2, 3, 16), 0.5),
    "weight_on_the_left": (lambda: Calls(lambda x, w: w @ x.mT, (8, 16)), (2, 3, 16), 0.5),
    "transposed": (lambda: Calls(lambda x, w: F.linear(x, w.t()) + x @ w, (16, 8)), (2, 3, 16), 0.5),
    "chunks": (lambda: Calls(lambda x, w: F.linear(x, w.chunk(3)[0]) * (x @ w[8:].t()), (12, 16)), (5, 16), 0.5),
    "packed": (lambda: Calls(lambda x, w: sum(F.linear(x, p).sin() for p in w.split(4)), (12, 16)), (5, 16), 0.5),
    "slices": (lambda: Calls(lambda x, w: F.linear(x, w[:4]) + F.linear(x, w[4:8]), (9, 16)), (5, 16), 0.5),
    "einsum": (lambda: Calls(lambda x, w: torch.einsum("bsk,khd->bhsd", x, w), (16, 2, 4)), (2, 3, 16), 0.5),
    "bmm": (lambda: Calls(torch.bmm, (2, 16, 4)), (2, 3, 16), 0.5),
    "broadcast_weight": (lambda: Calls(lambda x, w: x @ w, (2, 1, 16, 4)), (2, 5, 3, 16), 0.5),
    "transposed_left": (lambda: Calls(lambda x, w: torch.mm(w.t(), x.t()), (16, 8)), (6, 16), 0.5),
    "addmm": (lambda: Calls(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=3), (16, 8), (8,)), (6, 16), 0.5),
    "addmm_left": (lambda: Calls(lambda x, w, b: torch.addmm(b, w, x.t()), (8, 16), (8, 1)), (6, 16), 0.5),
    "addmm_of_a_matrix": (lambda: Calls(lambda x, w, b: torch.addmm(b, x, w), (16, 8), (6, 8)), (6, 16), 0.5),
    "baddbmm": (lambda: Calls(lambda x, w, b: torch.baddbmm(b, x, w, alpha=3), (2, 16, 8), (8,)), (2, 6, 16), 0.5),
    "cast": (lambda: Calls(lambda x, w: F.linear(x.bfloat16(), w.bfloat16()), (8, 16)), (6, 16), 0.5),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.ConvTranspose2d(8, 4, 2)
        ),
        (2, 3, 9, 9),
        0.573,
    ),
    "transformer_layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16), 0.464),
    "gru": (lambda: nn.GRU(8, 16, batch_first=True, num_layers=2), (2, 5, 8), 0.53),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STAGES)
def test_two_parts_have_the_bits_and_the_flops_of_one(name: str, dtype: torch.dtype) -> None:
    make, shape, share = STAGES[name]
    torch.manual_seed(7)
    work, _ = assert_same(make().to(dtype), torch.randn(shape).to(dtype))
    assert work.weights / work.whole == pytest.approx(share, abs=0.01)


def test_weights_used_several_times_are_summed_in_autograds_order() -> None:
    linear = nn.Linear(16, 16)
    work, _ = assert_same(nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), linear), torch.randn(6, 16))
    assert work.weights == work.inputs

    def mixed(x: Tensor, w: Tensor) -> Tensor:  # 5 products, of the weight, of transposes and of parts of it
        parts = torch.cat([F.linear(x.exp(), part) for part in w.split(8)], -1)
        return F.linear(x, w) + (2 * x) @ w + F.linear(x + 1, w) + parts + x.cos() @ w

    assert_same(Calls(mixed, (16, 16)), torch.randn(6, 16))

    def lookup(x: Tensor, w: Tensor) -> Tensor:  # its node does not run in I; it would have run between the products
        first = x @ w
        rows = F.embedding(torch.tensor([1, 5, 2, 1, 9, 5]), w)
        return first.sin() @ w + rows

    assert_same(Calls(lookup, (16, 16)), torch.randn(6, 16))


def test_a_norm_used_twice_is_held_back() -> None:
    norm = nn.RMSNorm(16)
    work, store = assert_same(nn.Sequential(norm, nn.Linear(16, 16), norm), torch.randn(6, 16))
    assert work.weights == work.inputs
    assert {id(use.parameter) for use in store.whole} == {id(norm.weight)}


def test_a_weight_with_a_direct_use_runs_undivided() -> None:
    work, store = assert_same(Calls(lambda x, w: F.linear(x, w) + w.sum(), (8, 16)), torch.randn(6, 16))
    assert work.weights == 0
    assert [use.function for use in store.whole] == ["SumBackward0", "MmBackward0"]
    # a product that has another weight as well still waits for that one
    work, _ = assert_same(Calls(lambda x, w, b: torch.addmm(b, x, w) * b, (16, 8), (8,)), torch.randn(6, 16))
    assert work.weights == work.inputs


def test_autocast_is_that_of_the_forward() -> None:
    linear = nn.Linear(16, 16)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(linear(x).relu()).float()

    assert_same(Calls(forward, linear=linear), torch.randn(6, 16))
    x = torch.randn(6, 16, requires_grad=True)
    grads = []
    for is_autocast in (False, True):  # around W
        linear.zero_grad()
        store, out = WeightGradStore(), linear(x)
        store.backward([out], [torch.ones_like(out)], [x])
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            store.run()
        grads.append(linear.weight.grad)
    assert torch.equal(*grads)


# ---- models ----------------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """Embedding and head in one stage, positions looked up and sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16, padding_idx=3), nn.Embedding(8, 16)
        self.inner, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.inner(self.words(ids) + places)) + self.words(ids))


def test_an_embedding_tied_to_the_head_of_its_stage_waits() -> None:
    work, store = assert_same(_Tied(), torch.randint(0, 20, (3, 8)))
    assert work.weights == work.inputs
    assert {use.function for use in store.whole} == {"NativeLayerNormBackward0"}


@pytest.mark.parametrize("architecture", ["example", "gpt2", "llama"])
def test_language_models_have_the_bits_and_the_flops_of_one_backward(architecture: str) -> None:
    if architecture != "example":
        pytest.importorskip("transformers")
    model = build_model(architecture, torch.float32)
    ids = torch.randint(0, VOCAB, (2, 7))

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            out = model(ids)
            return getattr(out, "logits", out)

    work, store = assert_same(Logits(), ids)
    assert work.weights > 0.4 * work.whole
    assert all(use.parameter.dim() == 1 for use in store.whole)  # norms


# ---- what waits, and what does not -----------------------------------------------------------------------------------


class _Counted(torch.autograd.Function):
    """A third party's fused product."""

    calls: list[tuple[bool, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        _Counted.calls.append(ctx.needs_input_grad)
        return grads[0] @ weight.t(), x.t() @ grads[0]


def test_a_custom_function_runs_its_backward_once() -> None:
    module = Calls(lambda x, v, w: _Counted.apply(F.linear(x, v).relu(), w), (8, 16), (8, 4))
    _Counted.calls.clear()
    work, store = assert_same(module, torch.randn(6, 16), microbatches=1)
    assert _Counted.calls == [(True, True)] * 2  # one for each of the two ways
    assert [use.function for use in store.whole] == ["_CountedBackward"]
    assert work.weights > 0


def test_a_custom_function_that_nothing_else_hangs_on_waits() -> None:
    module = Calls(lambda x, w: _Counted.apply(x.detach(), w), (16, 4))
    x = torch.randn(6, 16, requires_grad=True)
    store, out = WeightGradStore(), module(x)
    _Counted.calls.clear()
    assert store.backward([out], [torch.ones_like(out)], [x]) == (None,)
    assert _Counted.calls == []
    store.run()
    assert _Counted.calls == [(False, True)]
    assert torch.equal(module.weights[0].grad, x.detach().t() @ torch.ones_like(out))


class _Broadcast(torch.autograd.Function):
    """w + 0 * x, whose backward leaves it to autograd to sum over what was broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return weight + 0 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def test_what_a_custom_function_returns_is_fitted_as_autograd_does() -> None:
    assert_same(Calls(lambda x, w: _Broadcast.apply(x.detach(), w[None]), (16,)), torch.randn(6, 16))


def test_weights_made_of_several_parameters_run_undivided() -> None:
    work, _ = assert_same(
        Calls(lambda x, v, w: F.linear(x, v + w) + F.linear(x, w), *[(8, 16)] * 2), torch.randn(6, 16)
    )
    assert work.weights == 0


def test_a_first_stage_computes_no_weight_gradient_in_i() -> None:
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    work, _ = assert_same(Calls(lambda x: layers(x.detach()), layers=layers), torch.randn(6, 16))
    assert work.weights == 2 * work.inputs


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    module[1].weight.requires_grad_(False)
    module.unused = nn.Linear(3, 3)
    module[2].bias.requires_grad_(False)
    work, _ = assert_same(Calls(lambda x: module[2](module[1](module[0](x))), all=module), torch.randn(6, 16))
    assert module.unused.weight.grad is None
    assert 3 * work.weights == 2 * work.inputs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch._dynamo
def test_a_compiled_module_runs_undivided() -> None:
    module = nn.Sequential(nn.Linear(16, 16), torch.compile(nn.Linear(16, 16), backend="aot_eager"))
    work, store = assert_same(module, torch.randn(6, 16))
    assert "CompiledFunctionBackward" in {use.function for use in store.whole}
    assert 3 * work.weights == work.inputs
    compiled = module[1]
    work, store = assert_same(Calls(lambda x: compiled(x.detach()), compiled=compiled), torch.randn(6, 16))
    assert work.weights == 0
    assert {use.function for use in store.whole} == {"CompiledFunctionBackward"}
    torch._dynamo.reset()


def test_a_fused_loss_computes_its_weight_gradient_with_its_value() -> None:
    """Putting it off would cost a product more, so that is done for those who ask for it by `wgrad_store`."""
    weight, target = torch.randn(30, 16), torch.randint(0, 30, (12,))
    found = []
    for is_split in (False, True):
        hidden, projection, store = torch.randn(12, 16).mul_(0).add_(weight[:12]), _leaf(weight), WeightGradStore()
        hidden = _leaf(hidden)
        with store.deferring():
            loss, forward = _run(lambda a=hidden, w=projection: ops.linear_cross_entropy(a, w, target), True)
        if is_split:
            (dx,), first = _run(lambda loss=loss, a=hidden, s=store: s.backward([loss], [None], [a]), True)
            assert projection.grad is None
            _, second = _run(store.run, True)
            assert (forward, first, second) == (3 * 2 * 12 * 16 * 30, 0, 0)
            assert [use.function for use in store.whole] == ["LinearCrossEntropyBackward"]
            found.append((dx, projection.grad))
        else:
            loss.backward()
            found.append((hidden.grad, projection.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


def test_inputs_and_outputs_may_be_of_any_kind() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    x, y, unused, frozen = (torch.randn(3, 4, requires_grad=i < 3) for i in range(4))
    inner = (2 * x).requires_grad_()  # not a leaf

    def stage() -> list[Tensor]:
        return [(inner @ w).sum(), y, y @ w, frozen + 1]

    outs = stage()
    grads = [None, torch.ones(3, 4), torch.full((3, 4), 2.0), None]
    store = WeightGradStore()
    d_inner, d_y, d_unused, d_frozen = store.backward(outs, grads, [inner, y, unused, frozen])
    assert d_unused is None
    assert d_frozen is None
    assert x.grad is None
    store.run()
    expected = torch.autograd.grad(stage()[:3], [inner, y, w], [torch.ones(()), *grads[1:3]])
    for found, exact in zip((d_inner, d_y, w.grad), expected, strict=True):
        assert torch.equal(found, exact)
    with pytest.raises(ValueError, match="2 outputs need as many gradients, got 1"):
        store.backward(outs[:2], [None], [x])


def test_a_stage_without_parameters_has_nothing_to_run() -> None:
    x = torch.randn(3, requires_grad=True)
    store = WeightGradStore()
    (dx,) = store.backward([x * 2], [torch.ones(3)], [x])
    assert dx.tolist() == [2.0, 2.0, 2.0]
    assert store.run() == 0
    assert store.backward([torch.ones(3)], [torch.ones(3)], [x]) == (None,)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_hooks_of_parameters_run_once_and_in_w() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    seen: list[str] = []
    for name, p in module.named_parameters():
        p.register_hook(lambda grad, name=name: (seen.append(f"hook {name}"), 2 * grad)[1])
        p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"post {name}"))
        node = p.view_as(p).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: seen.append(f"node {name}"))
        p.kept = node
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(4, 8, requires_grad=True)
    store, out = WeightGradStore(), module(x)
    store.backward([out], [torch.ones_like(out)], [x])
    assert seen == []
    store.run()
    assert sorted(seen) == sorted(f"{kind} {name}" for kind in ("hook", "post", "node") for name in names)
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    assert all(torch.equal(grad, p.grad) for grad, p in zip(found, module.parameters(), strict=True))


def test_hooks_of_activations_act_on_weight_gradients() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    table, ids = torch.randn(5, 8, requires_grad=True), torch.tensor([1, 2, 1, 4])
    grads = []
    for is_split in (False, True):
        weight.grad = table.grad = None
        rows = F.embedding(ids, table)
        out = F.linear(x + rows, weight)
        for tensor in (rows, out):
            tensor.register_hook(lambda grad: 10 * grad)
        if is_split:
            store = WeightGradStore()
            store.backward([out], [torch.ones_like(out)], [x])
            store.run()
        else:
            out.sum().backward()
        grads.append((weight.grad, table.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_after_i_only_the_operands_of_products_are_kept() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
    saved: list[tuple[str, StorageWeakRef]] = []

    def pack(x: Tensor) -> Tensor:
        saved.append((f"{tuple(x.shape)}", StorageWeakRef(x.untyped_storage())))
        return x.detach()

    owned = {p.untyped_storage()._cdata for p in module.parameters()}
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = module(x * 1)
    store = WeightGradStore()
    store.backward([out], [torch.ones_like(out)], [x])
    alive = {ref.cdata for _, ref in saved if not ref.expired()} - owned
    assert len({ref.cdata for _, ref in saved} - owned) == 6  # x, tanh, mean, rstd, norm, what GELU takes
    assert len(alive) == 2  # the inputs of the two linears
    del out
    store.run()
    gc.collect()
    assert not {ref.cdata for _, ref in saved if not ref.expired()} - owned


def test_a_graph_is_freed_without_the_collector() -> None:
    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.note = Note()
            notes.append(weakref.ref(ctx.note))
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    class Note:
        pass

    notes: list[Any] = []
    module = nn.Linear(8, 8)
    gc.collect()
    gc.disable()
    try:
        for fails in (False, True):
            x = torch.randn(4, 8, requires_grad=True)
            store, out = WeightGradStore(), module(Noted.apply(module(x)))
            if fails:
                with pytest.raises(RuntimeError, match=r"[Mm]ismatch"):
                    store.backward([out], [torch.ones(2, 2)], [x])
            else:
                store.backward([out], [torch.ones_like(out)], [x])
            del out
            assert notes.pop()() is None
    finally:
        gc.enable()


def test_a_first_gradient_is_not_copied() -> None:
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    store, out = WeightGradStore(), module(x)
    store.backward([out], [torch.ones_like(out)], [x])
    (entry,) = store._entries
    made: list[int] = []
    compute = type(entry).compute

    class Watched(type(entry)):  # type: ignore[misc]
        __slots__ = ()

        def compute(self) -> Any:
            grads = compute(self)
            made.extend(grad.data_ptr() for grad in grads)
            return grads

    entry.__class__ = Watched
    store.run()
    assert {module.weight.grad.data_ptr(), module.bias.grad.data_ptr()} == set(made)


def test_a_gradient_that_others_have_is_copied() -> None:
    scale = torch.ones(4, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    store, out = WeightGradStore(), x.view(-1) + scale.view(-1)
    (dx,) = store.backward([out], [torch.ones_like(out)], [x])  # both gradients are views of that one
    store.run()
    assert scale.grad.data_ptr() != dx.data_ptr()


def test_operands_written_to_between_i_and_w_are_noticed() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    store, out = WeightGradStore(), F.linear(x, weight)
    store.backward([out], [torch.ones_like(out)], [])
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(4, 8\).*modified in place"):
        store.run()


# ---- recomputation ---------------------------------------------------------------------------------------------------


class _Noisy(nn.Module):
    """Counts its forwards, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(F.dropout(self.up(x).tanh(), 0.3))


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_is_recomputed_once_and_in_i(early_stop: bool) -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    block, outer = _Noisy(), nn.Linear(16, 16)

    def forward(x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(early_stop):
            for _ in range(2):
                x = checkpoint(block, outer(x), use_reentrant=False)
        return x

    module = Calls(forward, block=block, outer=outer)
    work, _ = assert_same(module, torch.randn(6, 16), microbatches=1)
    assert block.calls == 2 * (2 + 2)  # two ways, each with two forwards and two recomputations
    recomputed = 2 * (2 * 6 * 16 * 24 * (1 if early_stop else 2))
    assert work.inputs - recomputed == work.weights
    x = torch.randn(6, 16, requires_grad=True)
    store, out = WeightGradStore(), module(x)
    block.calls = 0
    store.backward([out], [torch.ones_like(out)], [x])
    assert block.calls == 2
    store.run()
    assert block.calls == 2


def test_nested_checkpoints_have_the_bits_of_a_whole_backward() -> None:
    block = _Noisy()

    def inner(x: Tensor) -> Tensor:
        return checkpoint(block, block(x), use_reentrant=False)

    module = Calls(lambda x: checkpoint(inner, x, use_reentrant=False), block=block)
    assert_same(module, torch.randn(6, 16), count=False)


def test_a_checkpointed_first_layer_is_recomputed_once() -> None:
    block = _Noisy()
    module = Calls(lambda x: checkpoint(block, x.detach(), use_reentrant=False), block=block)
    assert_same(module, torch.randn(6, 16), microbatches=1)
    assert block.calls == 2 * 2


def test_reentrant_checkpoints_are_refused() -> None:
    block, x = _Noisy(), torch.randn(6, 16, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        WeightGradStore().backward([out], [torch.ones_like(out)], [x])


def test_hooks_on_saved_tensors_are_unpacked_in_i() -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    unpacked: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: (unpacked.append(1), x)[1]):
        out = F.linear(x.tanh(), weight)
    store = WeightGradStore()
    store.backward([out], [torch.ones_like(out)], [x])
    seen = len(unpacked)
    assert seen > 0
    store.run()
    assert len(unpacked) == seen
    assert torch.equal(weight.grad, torch.ones(8, 4) @ x.detach().tanh())


def test_a_function_that_runs_its_forward_anew_may_split_it() -> None:
    """As a recomputation of one's own does: a backward within the backward."""
    linear, norm = nn.Linear(8, 8), nn.LayerNorm(8)
    store = WeightGradStore()

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return linear(norm(x))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = linear(norm(x))
            return store.backward([out], [grads[0]], [x])[0]

    x = torch.randn(4, 8, requires_grad=True)
    dout = torch.randn(4, 8)
    out = linear(Again.apply(x * 1))
    (dx,) = store.backward([out], [dout], [x])
    assert linear.weight.grad is None
    assert norm.weight.grad is None
    store.run()
    found = [p.grad for p in (*linear.parameters(), *norm.parameters())]
    exact = torch.autograd.grad(linear(linear(norm(x))), [x, *linear.parameters(), *norm.parameters()], dout)
    assert all(torch.equal(a, b) for a, b in zip((dx, *found), exact, strict=True))


# ---- the store -------------------------------------------------------------------------------------------------------


def test_entries_of_ones_own_join_the_others() -> None:
    weight = torch.zeros(3, requires_grad=True)
    store = WeightGradStore()
    store.put(lambda: [torch.ones(3)], [weight])
    store.put(lambda: (None, torch.full((3,), 2.0)), [torch.zeros(1, requires_grad=True), weight])
    store.put(lambda: [torch.ones(2)], [weight[:2]])
    seen: list[int] = []
    store.put(lambda: seen.append(1))
    assert len(store) == 4
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(2))
    assert store.run(1) == 1
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
    assert store.run() == 3
    assert weight.grad.tolist() == [4.0, 4.0, 3.0]
    assert sorted(seen) == [1, 2, 2]
    with pytest.raises(ValueError, match="count"):
        store.run(-1)


def test_large_gradients_are_accumulated_as_they_come() -> None:
    module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))  # 16 MiB each
    x = torch.randn(1, 2048, requires_grad=True)
    store, out = WeightGradStore(), module(x)
    store.backward([out], [torch.ones_like(out)], [x])
    before: list[int] = []
    for entry in store._entries:
        assert entry.targets[0].parameter.variable.dim() == 2
    kinds = type(store._entries[0])
    compute = kinds.compute

    def watched(self: Any) -> Any:
        before.append(sum(p.grad is not None for p in module.parameters()))
        return compute(self)

    kinds.compute = watched  # type: ignore[method-assign]
    try:
        store.run()
    finally:
        kinds.compute = compute  # type: ignore[method-assign]
    assert before == [0, 0, 2, 2]


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def _logits(out: Any) -> Tensor:
    logits = getattr(out, "logits", out)
    return logits.to_local() if isinstance(logits, DTensor) else logits


def _local_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _check_parallel_model(architecture: str, sequence_parallel: bool) -> tuple[list[str], list[str], list[str]]:
    """Names of the collectives of a whole backward, of I and of W."""
    import torch.distributed as dist

    model = build_model(architecture, torch.float32)
    fp.parallelize(model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    ids = torch.randint(0, VOCAB, (2, 8))
    for _ in range(2):  # which are watched: fastpar.parallel.guards
        model(ids)
    out = _logits(model(ids))
    dout = torch.randn_like(out)
    with comm.record() as whole:
        out.backward(dout)
    expected = _local_grads(model)
    model.zero_grad()
    store = WeightGradStore()
    with store.deferring():
        out = _logits(model(ids))
    with comm.record() as inputs:
        store.backward([out], [dout], [])
    assert not _local_grads(model)
    with comm.record() as weights:
        store.run()
    found = _local_grads(model)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    assert all(use.parameter.dim() == 1 for use in store.whole), store.whole
    return tuple(sorted(entry.op for entry in entries) for entries in (whole, inputs, weights))  # type: ignore[return-value]


@pytest.mark.parametrize("architecture", ["example", "gpt2"])
def test_parallel_models_have_the_bits_of_one_backward(architecture: str) -> None:
    if architecture != "example":
        pytest.importorskip("transformers")
    for whole, inputs, weights in run_ranks(2, _check_parallel_model, architecture, False):
        assert inputs == whole
        assert weights == []


def test_sequence_parallel_linears_gather_again_in_w() -> None:
    for whole, inputs, weights in run_ranks(2, _check_parallel_model, "example", True):
        # A row-parallel linear gathers dout for dx and once more for dW; a column-parallel one x for dW alone.
        assert set(weights) == {"all_gather"}
        rows = len(inputs) + len(weights) - len(whole)
        assert rows == 4  # two layers
        assert inputs.count("reduce_scatter") == whole.count("reduce_scatter") > 0


def _check_linears_in_a_checkpoint() -> tuple[list[str], list[str]]:
    import torch.distributed as dist

    group = Communicator(dist.group.WORLD)
    torch.manual_seed(group.rank)
    weights = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 4), torch.randn(4, 8, requires_grad=True)]
    biases = [torch.randn(4, requires_grad=True), torch.randn(8, requires_grad=True), None]

    def block(x: Tensor) -> Tensor:
        h = ops.copy_to_linear(x, weights[0], biases[0], group=group).tanh()
        h = ops.linear_all_reduce(h, weights[1], biases[1], group=group)  # a frozen weight
        return ops.copy_to_linear(h, weights[2], group=group)

    leaves = [t for t in (*weights, *biases) if t is not None and t.requires_grad]
    torch.manual_seed(5)
    given, dout = torch.randn(3, 8), torch.randn(3, 4)
    x = _leaf(given)
    exact = torch.autograd.grad(block(x), [x, *leaves], dout)
    x, store = _leaf(given), WeightGradStore()
    with store.deferring():
        out = checkpoint(block, x, use_reentrant=False)
    with comm.record() as first:
        (dx,) = store.backward([out], [dout], [x])
    with comm.record() as second:
        store.run()
    assert all(torch.equal(a, b) for a, b in zip((dx, *(t.grad for t in leaves)), exact, strict=True))
    for t in leaves:
        t.grad = None
    with store.deferring():  # a first stage: nothing but the store makes its backward run
        out = ops.copy_to_linear(given, weights[0].detach().requires_grad_(False), biases[0], group=group)
    assert store.backward([out], [dout], []) == ()
    assert biases[0].grad is None
    store.run()
    assert torch.equal(biases[0].grad, dout.sum(0))
    return [entry.op for entry in first], [entry.op for entry in second]


def test_parallel_linears_in_a_checkpoint_communicate_once_more_and_in_i() -> None:
    # One all-reduce of the recomputed forward, two of the gradients of the column-parallel linears' inputs.
    assert run_ranks(2, _check_linears_in_a_checkpoint) == [(["all_reduce"] * 3, [])] * 2


def test_the_innermost_store_counts_and_none_outside() -> None:
    from fastpar.ops.weight_grad_store.store import current_store

    a, b = WeightGradStore(), WeightGradStore()
    assert current_store() is None
    with a.deferring() as outer:
        assert outer is a
        with contextlib.suppress(KeyError), b.deferring():
            assert current_store() is b
            raise KeyError
        assert current_store() is a
    assert current_store() is None


def test_a_large_weight_is_accumulated_once() -> None:
    linear, other = nn.Linear(2048, 2048, bias=False), torch.zeros(2048, 2048, requires_grad=True)  # 16 MiB
    seen: list[int] = []
    linear.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    x = torch.randn(1, 2048, requires_grad=True)
    store, out = WeightGradStore(), linear(linear(linear(x)))
    store.backward([out], [torch.ones_like(out)], [x])
    store.run()
    assert len(seen) == 1
    grad = torch.ones(2048, 2048)
    store.put(lambda: [grad, grad], [linear.weight, other])
    store.put(lambda: [grad], [linear.weight + other])
    store.run()
    assert len(seen) == 2
    assert torch.equal(other.grad, 2 * grad)
