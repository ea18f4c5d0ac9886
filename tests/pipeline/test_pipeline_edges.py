"""Corners of the runtime that one process shows: odd values, memory, failures, what belongs to an nn.Module."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fastpar.comm import PointToPoint
from fastpar.pipeline import (
    Action,
    Chain,
    Microbatches,
    Pipeline,
    PipelineError,
    Schedule,
    make_schedule,
    split_backward,
)
from fastpar.pipeline.runtime.shared_grads import SharedGrads, SharedParameter
from fastpar.pipeline.runtime.values import decode, encode, pack, unpack
from fastpar.pipeline.runtime.versions import WeightVersions
from fastpar.pipeline.stages.batch import split
from tests.pipeline.pipeline_models import (
    CLASSES,
    WIDTH,
    Block,
    build_batch,
    build_parts,
    loss_fn,
    run_parts,
    sequential_step,
)

COUNT = 4  # microbatches
SGD = partial(torch.optim.SGD, lr=0.1, foreach=False)


def one_rank(num_parts: int) -> Schedule:
    return make_schedule("interleaved_1f1b", 1, COUNT, stages_per_rank=num_parts)


def assert_same_grads(actual: Sequence[nn.Module], expected: Sequence[nn.Module]) -> None:
    pairs = zip(nn.ModuleList(actual).named_parameters(), nn.ModuleList(expected).parameters(), strict=True)
    for (name, a), e in pairs:
        assert (a.grad is None) == (e.grad is None), name
        assert a.grad is None or torch.equal(a.grad, e.grad), name


# Values between stages


class Returns(nn.Module):
    """The same tensor twice, a view, its own input, integers, booleans, None."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        hidden = self.block(x)
        return hidden, hidden, hidden[:, 0], x, [None, torch.arange(3)], torch.tensor([True, False, True]), 2.0


class Expects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, a: Tensor, b: Tensor, view: Tensor, x: Tensor, pair: Any, mask: Tensor, scale: float) -> Tensor:
        nothing, ids = pair
        assert nothing is None
        assert type(scale) is float
        return self.head((a.cos() + b.sin() + view[:, None]) * mask[:, None] + x * scale + ids[:, None])


@pytest.mark.parametrize("change", [lambda s: s, split_backward], ids=["whole", "split"])
def test_views_duplicates_and_the_input_itself_may_be_returned(change: Callable[[Schedule], Schedule]) -> None:
    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block(), Returns(), Expects()]

    def run(parts: list[nn.Module], x: Tensor) -> Tensor:
        return parts[2](*parts[1](parts[0](x)))

    parts, expected = build(), build()
    pipe = Pipeline(parts, change(one_rank(3)), loss=loss_fn)
    x, target = build_batch(COUNT)
    pipe.step(x, target=target)
    for xi, ti in zip(x.split(1), target.split(1), strict=True):
        (loss_fn(run(expected, xi), ti) / COUNT).backward()
    pairs = zip(nn.ModuleList(parts).parameters(), nn.ModuleList(expected).parameters(), strict=True)
    for a, e in pairs:  # the gradient of a tensor with several readers is added up in another order
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-5, atol=1e-7)


def test_a_received_tensor_that_is_changed_in_place_is_an_error() -> None:
    parts = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES))]
    x, target = build_batch(COUNT)
    with pytest.raises(PipelineError, match=r"stage 1 .* in-place operation"):
        Pipeline(parts, one_rank(2), loss=loss_fn).step(x, target=target)


class Pair(NamedTuple):
    a: Tensor
    b: int


def test_containers_that_are_not_understood_are_refused() -> None:
    with pytest.raises(TypeError, match="the tensors of a Pair are not cut"):
        split(Pair(torch.zeros(4), 1), 2, "x")
    with pytest.raises(TypeError, match="the tensors of a OrderedDict are not cut"):
        split([OrderedDict(a=torch.zeros(4))], 2, "x")
    whole = Pair(torch.zeros(4), 1)
    assert split(Microbatches([whole, whole]), 2, "x")[1] is whole
    with pytest.raises(TypeError, match="a stage returned a OrderedDict that holds tensors"):
        pack((torch.zeros(2), OrderedDict(a=[torch.ones(3)])))


def test_values_come_back_as_they_were() -> None:
    value = {"x": torch.ones(2, requires_grad=True), "rest": (None, [torch.arange(2), "name"], {"k": 3})}
    tensors, structure = pack(value)
    assert len(tensors) == 2
    back = unpack(tensors, decode(encode(structure)))
    assert back["x"] is value["x"]
    assert back["rest"][1][0] is value["rest"][1][0]
    assert (back["rest"][0], back["rest"][1][1], back["rest"][2]) == (None, "name", {"k": 3})
    assert type(back["rest"]) is tuple
    assert type(back["rest"][1]) is list


def test_batches_are_cut_in_order_the_first_ones_larger() -> None:
    pieces = split({"a": torch.arange(5), "b": (torch.tensor(7), "text")}, 3, "x")
    assert [piece["a"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert all(piece["b"] == (torch.tensor(7), "text") for piece in pieces)
    assert [piece["a"].tolist() for piece in split({"a": torch.arange(6)}, 4, "x")] == [[0, 1], [2, 3], [4], [5]]


def test_two_replicas_of_a_part_on_one_rank_are_refused() -> None:
    """Their gradients would belong together, and nobody would sum them."""
    actions = tuple(Action.parse(text) for text in ("0F0", "0B0", "1F1", "1B1"))
    schedule = Schedule("twins", (0, 0), (Chain((0,), (0,)), Chain((1,), (1,))), (actions,))
    with pytest.raises(ValueError, match=r"hold a part of the model twice: its stages are \(0, 1\)"):
        Pipeline([*build_parts(1), *build_parts(1)], schedule, loss=loss_fn)


# Around step()


def test_reduction_sum_adds_the_losses_as_they_are() -> None:
    parts, expected = build_parts(2), build_parts(2)
    x, target = build_batch(COUNT)
    loss = Pipeline(parts, one_rank(2), loss=loss_fn, reduction="sum").step(x, target=target)
    total = torch.zeros(())
    for xi, ti in zip(x.split(1), target.split(1), strict=True):
        own = loss_fn(run_parts(expected, xi), ti)
        own.backward()
        total = total + own.detach()
    assert torch.equal(loss, total)
    assert not loss.requires_grad
    assert_same_grads(parts, expected)


@pytest.mark.parametrize("change", [lambda s: s, split_backward], ids=["whole", "split"])
def test_autocast_around_a_step_counts(change: Callable[[Schedule], Schedule]) -> None:
    parts, expected = build_parts(2), build_parts(2)
    x, target = build_batch(COUNT)
    with torch.autocast("cpu", torch.bfloat16):
        loss = Pipeline(parts, change(one_rank(2)), loss=loss_fn).step(x, target=target)
        assert torch.equal(loss, sequential_step(expected, x, target, COUNT))
    assert_same_grads(parts, expected)


def test_a_step_without_gradients_is_refused() -> None:
    pipe = Pipeline(build_parts(2), one_rank(2), loss=loss_fn)
    x, target = build_batch(COUNT)
    with torch.no_grad(), pytest.raises(RuntimeError, match="evaluate\\(\\) needs none"):
        pipe.step(x, target=target)
    pipe.step(x, target=target)  # nothing has happened


def test_a_loss_without_a_gradient_is_an_error() -> None:
    pipe = Pipeline(build_parts(2), one_rank(2), loss=lambda output, target: loss_fn(output.detach(), target))
    x, target = build_batch(COUNT)
    with pytest.raises(PipelineError, match="the loss does not depend on the output"):
        pipe.step(x, target=target)


def test_errors_in_backward_are_named_and_interrupts_pass() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise OSError("boom")

    def interrupt(output: Tensor, target: Tensor) -> Tensor:
        raise KeyboardInterrupt

    x, target = build_batch(COUNT)
    broken = Pipeline(build_parts(2), one_rank(2), loss=lambda output, t: loss_fn(Breaks.apply(output), t))
    with pytest.raises(
        PipelineError, match=r"stage 1 \(part 1 of the model\), microbatch 0, action 1B0 .*OSError: boom"
    ):
        broken.step(x, target=target)
    interrupted = Pipeline(build_parts(2), one_rank(2), loss=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.step(x, target=target)
    with pytest.raises(RuntimeError, match=r"has failed .* action 1F0"):
        interrupted.step(x, target=target)


@pytest.mark.parametrize("change", [lambda s: s, split_backward], ids=["whole", "split"])
def test_nothing_of_a_batch_is_kept(change: Callable[[Schedule], Schedule]) -> None:
    """Without the cycle collector: activations, the batch, and what forward() returned."""
    refs: list[weakref.ref[Tensor]] = []
    parts = build_parts(2)
    for part in parts:
        part.register_forward_hook(lambda module, args, output: refs.extend(map(weakref.ref, (*args, output))))
    pipe = Pipeline(parts, change(one_rank(2)), loss=loss_fn)
    gc.disable()
    try:
        x, target = build_batch(COUNT)
        pipe.step(x, target=target)
        outputs = pipe.forward(x)
        refs += [weakref.ref(x), weakref.ref(target)]
        del x, target, outputs
        assert len(refs) == 2 * 2 * 2 * COUNT + 2
        assert [ref for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


def test_activations_die_with_their_backward() -> None:
    """1F1B on one rank keeps one microbatch at a time; what a stage returned is gone when the next one has run."""
    parts = build_parts(2)
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        counts.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(output))

    parts[0].register_forward_hook(count)
    x, target = build_batch(COUNT)
    Pipeline(parts, one_rank(2), loss=loss_fn).step(x, target=target)
    assert counts == [0] * COUNT


# Weights that are updated on their way


def asynchronous(parts: list[nn.Module], **options: Any) -> Pipeline:
    return Pipeline(parts, make_schedule("pipedream", 1, COUNT), loss=loss_fn, **{"optimizer": SGD, **options})


def test_asynchronous_pipelines_can_be_evaluated() -> None:
    """With the weights as they are: there are no versions without updates."""
    (part,), (expected,) = build_parts(1), build_parts(1)
    pipe = asynchronous([part])
    x, target = build_batch(COUNT)

    def reference() -> Tensor:
        with torch.no_grad():
            losses = [loss_fn(expected(xi), ti) for xi, ti in zip(x.split(1), target.split(1), strict=True)]
        return torch.stack(losses).mean()

    torch.testing.assert_close(pipe.evaluate(x, target=target), reference())
    pipe.step(x, target=target)
    expected.load_state_dict(part.state_dict())
    torch.testing.assert_close(pipe.evaluate(x, target=target), reference())
    outputs = pipe.forward(x)
    assert outputs is not None
    assert torch.equal(outputs[2], expected(x[2:3]))


def test_optimizers_of_a_pipeline_may_have_schedulers_and_state() -> None:
    pipe = asynchronous(build_parts(1))
    scheduler = torch.optim.lr_scheduler.StepLR(pipe.optimizers[0], 1, gamma=0.5)
    x, target = build_batch(COUNT)
    pipe.step(x, target=target)
    scheduler.step()  # warns, if it has not seen the optimizer's steps
    assert pipe.optimizers[0].state_dict()["param_groups"][0]["lr"] == 0.05


class TiedTwice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin())


def test_versions_of_tied_weights_stay_tied() -> None:
    """Version 0 is used after a step: its output, its gradient, and where that goes."""
    torch.manual_seed(0)
    module = TiedTwice()
    old = TiedTwice()
    old.load_state_dict(module.state_dict())
    x = torch.randn(2, 3)
    versions = WeightVersions(module, torch.optim.SGD(module.parameters(), lr=0.1).step)
    versions.stash(0)
    with versions.use(0):
        module(x).sum().backward()
    assert module.a.weight.grad is None
    versions.collect(0)
    versions.step()
    assert module.a.weight.grad is None
    assert not torch.equal(module.a.weight, old.a.weight)
    with versions.use(0):
        assert module.a.weight is module.b.weight
        out = module(x)
        assert torch.equal(out, old(x))
        out.sum().backward()
    versions.collect(0)
    old(x).sum().backward()
    assert torch.equal(module.a.weight.grad, old.a.weight.grad)
    assert module.a.weight is module.b.weight
    versions.drop(0)
    with pytest.raises(ValueError, match="weight version 0 is gone: the current one is 1, kept are \\[\\]"):
        versions.collect(0)
    with pytest.raises(ValueError, match="weight version 0 is not kept"):
        versions.drop(0)
    with pytest.raises(ValueError, match="only the current weights \\(version 1\\) can be kept, got version 0"):
        versions.stash(0)


def test_the_current_version_is_what_the_parameters_hold() -> None:
    """After a step that moved them, and after somebody else has; frozen ones stay frozen; gradients add up."""
    module = nn.Linear(2, 2)
    weight = module.weight
    module.bias.requires_grad_(False)
    versions = WeightVersions(module, lambda: None)
    versions.stash(0)
    versions.step()
    for _ in range(2):
        with versions.use(None):
            assert module.weight.data_ptr() == weight.data_ptr()
            assert not module.bias.requires_grad
            module(torch.ones(1, 2)).sum().backward()
        versions.collect(None)
    assert module.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    module.weight.data = torch.zeros(2, 2)
    versions.restart()
    with versions.use(0):
        assert module.weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_step_moves_no_memory_unless_an_old_version_is_read() -> None:
    module = nn.Linear(2, 2)
    versions = WeightVersions(module, lambda: None)
    before = module.weight.data_ptr()
    versions.step()
    assert module.weight.data_ptr() == before
    versions.stash(1)
    versions.step()
    assert module.weight.data_ptr() != before


# Gradients of shared parameters


def test_copies_on_one_rank_get_the_sum_on_top_of_what_they_had() -> None:
    """Two tied copies and an unused pair, over two steps; only the step's own part is summed."""
    a, b, unused = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    tied = SharedParameter("tied", (0, 1), (0,), (a, b))
    grads = SharedGrads([tied, SharedParameter("unused", (0,), (0,), (unused,))], 0, PointToPoint(None), tag=0)
    unused.grad = torch.full((2,), 5.0)
    for total in (3.0, 6.0):
        grads.begin()
        a.grad, b.grad = torch.full((2,), 1.0), torch.full((2,), 2.0)
        grads.finish()
        assert a.grad.tolist() == b.grad.tolist() == [total, total]
        assert unused.grad.tolist() == [5.0, 5.0]
    assert a.grad.data_ptr() != b.grad.data_ptr()


# What one expects of something with parameters


def test_state_dict_names_are_those_of_the_whole_model() -> None:
    whole, other = nn.ModuleList(build_parts(2)), nn.ModuleList(build_parts(2, seed=5))
    whole.register_buffer("elsewhere", torch.zeros(1))  # of no stage here
    parts = list(other)
    parts[0].register_buffer("count", torch.tensor(3))
    pipe = Pipeline(parts, one_rank(2), loss=loss_fn)
    assert dict(pipe.named_buffers()) == {"0.count": torch.tensor(3)}
    with pytest.raises(RuntimeError, match="count"):
        pipe.load_state_dict(whole.state_dict())
    pipe.load_state_dict({**whole.state_dict(), "0.count": torch.tensor(4)})
    assert int(pipe.state_dict()["0.count"]) == 4
    names = [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in pipe.named_parameters()] == names
    assert all(torch.equal(pipe.state_dict()[name], p) for name, p in whole.named_parameters())


def test_modes_parameters_and_repr() -> None:
    parts = build_parts(2)
    parts[1][0].scale = parts[0].scale  # shared by two stages of a rank: listed once
    pipe = Pipeline(parts, one_rank(2), loss=loss_fn)
    assert len(list(pipe.parameters())) == len(set(pipe.parameters()))
    assert pipe.eval() is pipe
    assert not any(module.training for part in parts for module in part.modules())
    assert all(module.training for part in pipe.train().stages.values() for module in part.module.modules())
    assert "rank 0 of 1, stages 0 (part 0), 1 (part 1) of 2, 4 microbatches" in repr(pipe)
