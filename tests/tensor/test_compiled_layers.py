"""Layers of a parallelised model under torch.compile: no break of our own, the same numbers, and guards that see."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fastpar as fp
from fastpar.parallel.guards.eager import EagerLook
from tests.dist import run_ranks

PLAN = {"layers.*": "stream", "layers.*.mlp": "block", "layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 10), activation, nn.Linear(10, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module] = nn.Tanh, is_recomputed: bool = False, num_layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(activation()) for _ in range(num_layers))
        self.is_recomputed = is_recomputed
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.1 * torch.randn_like(p))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return x


class Drop(nn.Module):
    """Draws in its own code, on this rank's features."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def compiled_calls(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def compiled_modules(model: Any) -> None:
    model.layers = nn.ModuleList(torch.compile(layer, backend="aot_eager") for layer in model.layers)


def trained(model: nn.Module) -> list[Tensor]:
    """Outputs of three training steps, the last of another shape, and of an evaluation."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, length in enumerate((4, 4, 6)):
        out = model(torch.randn(2, length, 6, generator=torch.Generator().manual_seed(step)))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out.detach())
    with torch.no_grad():
        outputs.append(model.eval()(torch.ones(1, 4, 6)))
    return outputs


def without_breaks(sequence_parallel: bool) -> dict[str, int]:
    from torch._dynamo.utils import counters

    warnings.simplefilter("ignore")  # the compiler's own
    torch._dynamo.reset()
    # What a layer passes on to the next is split over tokens in one of the two.
    stack = Stack(num_layers=2 if sequence_parallel else 1)
    model = fp.parallelize(stack, dist.group.WORLD, PLAN, sequence_parallel=sequence_parallel)
    other = copy.deepcopy(model)
    compiled_calls(other)
    counters.clear()
    for mine, theirs in zip(trained(other), trained(model), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert counters["stats"]["unique_graphs"] > 0
    return dict(counters["graph_break"])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_compiled_layers_have_no_graph_breaks_and_the_same_results(sequence_parallel: bool) -> None:
    assert run_ranks(2, without_breaks, sequence_parallel) == [{}, {}]


@pytest.mark.filterwarnings("ignore::Warning")  # the compiler's own
def test_what_a_look_recomputes_is_not_compiled_either() -> None:
    """torch.utils.checkpoint refuses a recomputation that saves other tensors than the forward."""
    torch._dynamo.reset()
    model, look, found = Stack(is_recomputed=True), EagerLook(), []
    compiled_calls(model)
    look.begin(model)
    out = model(torch.ones(1, 2, 6))
    look.leave(out)
    found.append(torch._dynamo.eval_frame._stance.stance)
    out.register_hook(lambda _: found.append(torch._dynamo.eval_frame._stance.stance))
    out.sum().backward()
    assert [*found, torch._dynamo.eval_frame._stance.stance] == ["default", "force_eager", "default"]


def draws() -> None:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    for compile_layers in (compiled_calls, compiled_modules):
        model: Any = fp.parallelize(Stack(Drop), dist.group.WORLD, PLAN)
        compile_layers(model)
        with pytest.raises(ValueError, match=r"layers.0.mlp.1 \(Drop\) draws random numbers inside the block"):
            model(torch.ones(2, 3, 6))
        # What a look that has failed has left ends with the next forward.
        model.eval()(torch.ones(2, 3, 6))
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_draws_in_compiled_layers_are_seen() -> None:
    run_ranks(2, draws)


def whole() -> None:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    x = torch.ones(2, 3, 6)
    model = fp.parallelize(Stack(), dist.group.WORLD, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert any("compiled as a whole before it has run once" in str(w.message) for w in caught)
    torch._dynamo.reset()
    expected = model(x)  # with its checks
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_a_model_that_is_compiled_as_a_whole_says_that_nothing_checks_it() -> None:
    run_ranks(2, whole)


def sharded(stage: int) -> None:
    """A layer whose parameters are DTensors, the parts of which lie behind those of another layer in memory."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    model: Any = fp.parallelize(Stack(), mesh := fp.init_mesh(dp_shard=2, tp=1), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fp.zero.shard(model, optimizer, group=mesh, stage=stage)
    x, found = torch.ones(2, 3, 6, requires_grad=True), []
    for call in (lambda: None, lambda: model.layers[1].compile(backend="aot_eager")):
        call()
        out = model.layers[1](x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad])
        x.grad = None
        optimizer.step()
        optimizer.zero_grad()  # parameters that show gradients have a class of their own until the model's forward
    torch.testing.assert_close(*found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_layers_take_parameters_of_data_parallelism(stage: int) -> None:
    run_ranks(2, sharded, stage)


@torch.no_grad()
def traced() -> None:
    warnings.simplefilter("ignore")  # of torch.jit: it is deprecated, and what Python has decided is a constant
    layer, x = fp.parallelize(Stack(), dist.group.WORLD, PLAN).layers[0], torch.ones(1, 4, 6)
    layer(x)
    for trace in (lambda: torch.jit.trace(layer, (x,)), lambda: make_fx(layer)(x)):
        with pytest.raises(RuntimeError, match="would hold what this collective has brought as a constant"):
            trace()


def test_traces_that_would_hold_sums_over_ranks_are_refused() -> None:
    run_ranks(2, traced)


def whole_language_model() -> tuple[int, int]:
    """The ends of a model, compiled before they have run: breaks by locks, and all others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sizes: Any = {"vocab_size": 12, "hidden_size": 6, "intermediate_size": 8, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=0))
    fp.parallelize(model, dist.group.WORLD, {"model.embed_tokens": "vocab", "lm_head": "vocab"})
    ids, found = torch.arange(8).view(2, 4), []
    for each in (torch.compile(model, backend="aot_eager", dynamic=False), model):
        loss = each(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(*found)
    breaks = torch._dynamo.utils.counters["graph_break"]
    return sum("RLock" in reason for reason in breaks), len(breaks)


def test_a_language_model_that_is_compiled_as_a_whole_trains() -> None:
    for locks, breaks in run_ranks(2, whole_language_model):
        assert locks == 0
        assert breaks > 0  # before the loss


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())


def of_all_logits(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(-1).mean() - (2 * logits).gather(-1, target[..., None]).mean()


def losses() -> None:
    warnings.simplefilter("ignore")
    plain = nn.Sequential(nn.Linear(4, 7)).double()
    split: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, {"0": "vocab"})
    x, target = torch.randn(2, 3, 4, dtype=torch.double), torch.tensor([[0, 6, 2], [5, 3, 1]])
    for loss in (cross_entropy, of_all_logits):
        torch._dynamo.reset()
        expected, found = loss(plain(x), target), torch.compile(loss, backend="eager")(split(x), target)
        torch.testing.assert_close(found, expected)
        for model, value in ((plain, expected), (split, found)):
            model.zero_grad()
            value.backward()
        torch.testing.assert_close(split[0].weight.grad.full_tensor(), plain[0].weight.grad)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"split over the vocabulary enter no graph"):
        torch.compile(of_all_logits, backend="eager", fullgraph=True)(split(x), target)


def test_compiled_losses_take_split_logits() -> None:
    run_ranks(2, losses)


def branches(comm: fp.Communicator, inputs: list[Tensor], weights: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Matrix products alone, for which Inductor compiles no code."""
    return [
        fp.comm.reduce_from(fp.comm.copy_to(x, comm) @ up @ down, comm)
        for x, (up, down) in zip(inputs, weights, strict=True)
    ]


def choices(comm: fp.Communicator, inputs: list[Tensor], weights: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The first branch in a graph of its own."""
    (x, y), ((up, down), other) = inputs, weights

    def taken(x: Tensor) -> Tensor:
        return branches(comm, [x], [(up, down)])[0]

    def left(x: Tensor) -> Tensor:
        return branches(comm, [x], [(up, 2 * down)])[0]

    chosen: Tensor = torch.cond(x.sum() > -1e9, taken, left, (x,))
    return [chosen, *branches(comm, [y], [other])]


def order_of_collectives(function: Callable[..., list[Tensor]]) -> None:
    """One branch is larger on one rank, the other on the other, and Inductor begins with what saves most memory."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    comm, found = fp.Communicator(dist.group.WORLD), []
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    sizes = (64, 2) if comm.rank == 0 else (2, 64)
    weights = [(torch.randn(8, n, requires_grad=True), torch.randn(n, 8)) for n in sizes]
    with torch._inductor.config.patch(fx_graph_cache=False):
        for fn in (branches, torch.compile(function)):
            outputs = fn(comm, inputs, weights)
            out = [each.detach() for each in outputs]
            found.append([*out, *torch.autograd.grad(outputs, [*inputs, *(up for up, _ in weights)], out)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("function", [branches, choices])
def test_inductor_keeps_the_order_of_collectives(function: Callable[..., list[Tensor]]) -> None:
    run_ranks(2, order_of_collectives, function)


def graphs_between_launches() -> int:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    comm, x = fp.Communicator(dist.group.WORLD), torch.ones(3, requires_grad=True)
    call = torch.compile(fp.comm.copy_to, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        comm.all_reduce_async(torch.ones(2)).wait()  # outside of the graph, and counted
        call(x, comm).sum().backward()
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_graph_with_collectives_is_compiled_once_whatever_is_launched_outside() -> None:
    assert run_ranks(2, graphs_between_launches) == [1, 1]


def gradient_of_columns() -> None:
    """A weight [in, out] that is a part of a wider one, whose gradient has strides of its own."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    comm, found = fp.Communicator(dist.group.WORLD), []
    x, weight = torch.randn(5, 4), torch.randn(4, 7)[:, 1:4].requires_grad_()
    with torch._inductor.config.patch(fx_graph_cache=False):
        for fn in (fp.ops.copy_to_linear, torch.compile(fp.ops.copy_to_linear)):
            out = fn(x, weight, None, group=comm, transposed=True)
            found.append(torch.autograd.grad(out, weight, out.detach()))
    torch.testing.assert_close(*found)


def test_inductor_takes_the_gradient_of_a_part_of_a_weight() -> None:
    run_ranks(2, gradient_of_columns)
