"""Layers whose forward is their own keep it around the parallel weight, or are refused on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar as fp
from fastpar.tensor import ColumnParallelLinear, VocabParallelEmbedding, full_parameter
from tests.dist import run_ranks
from tests.models import build_model
from tests.moe.moe_models import build as build_experts

PLAN = {"mlp": "block", "mlp.up": "colwise", "mlp.down": "rowwise", "embed": "vocab", "head": "vocab"}


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(self.embedding_dim**0.5).to(self.weight.dtype)


class ShiftedEmbedding(nn.Embedding):
    """With another call of the function than nn.Embedding's, and a buffer."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.register_buffer("offset", torch.randn(sizes[1]))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx) + self.offset


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class FunctionalLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * F.linear(2 * x, self.weight, self.bias)


class ProductLinear(nn.Linear):
    """As Falcon's: a product and a sum, rounded between them."""

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class LateBiasLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.bias, 2 * F.linear(x, self.weight))


class QuantisedLinear(nn.Linear):
    """Rounds to steps of the largest weight, which one rank does not have."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.abs().max() / 7
        return F.linear(x, (self.weight / step).round() * step, self.bias)


class NormalisedLinear(nn.Linear):
    """Needs all output features."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(super().forward(x), dim=-1)


class RangedLinear(nn.Linear):
    """Needs all input features."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True)
        return super().forward((x / scale).clamp(-0.5, 0.5)) * scale


class GatedLinear(nn.Linear):
    """Output as split as nn.Linear's, but with a gradient of the input from all features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True)


class AdapterLinear(nn.Linear):
    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.low = nn.Parameter(torch.randn(2, sizes[0]))
        self.high = nn.Parameter(torch.randn(sizes[1], 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.low.t() @ self.high.t()


class Observer(nn.Module):
    """As those of quantization: a number in a buffer, and another in an attribute."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.calls += 1
        return x


class ObservedLinear(nn.Linear):
    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.observer = Observer()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.observer(x))


class Mlp(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(
        self, embedding: type = nn.Embedding, up: type = nn.Linear, down: type = nn.Linear, head: type = nn.Linear
    ):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mlp, self.head = embedding(17, 6), Mlp(up(6, 10), down(10, 6)), head(6, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.mlp(x))


def _assert_equal(plain: nn.Module, parallel: nn.Module, ids: Tensor) -> None:
    expected, out = plain(ids), parallel(ids)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weigh = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
    (expected * weigh).sum().backward()
    (out * weigh).sum().backward()
    wanted = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        torch.testing.assert_close(full_parameter(p, p.grad), wanted[name].grad, rtol=1e-9, atol=1e-9, msg=name)


CLASSES = [
    {"embedding": ScaledEmbedding},
    {"embedding": ShiftedEmbedding},
    {"up": ScaledLinear, "down": ScaledLinear, "head": ScaledLinear},
    {"up": FunctionalLinear, "down": FunctionalLinear, "head": FunctionalLinear},
    {"up": ProductLinear, "down": LateBiasLinear},
    {"up": LateBiasLinear, "down": ProductLinear, "head": ProductLinear},
    {"up": GatedLinear},  # right inside a block, whose input's gradient is summed as a whole
    {"down": NormalisedLinear},  # whose output is whole
]


def _kept(classes: dict[str, type]) -> None:
    plain = Net(**classes).double()
    parallel = copy.deepcopy(plain)
    for module in parallel.modules():  # as module.compile() does, with a compiler that does nothing
        module._compiled_call_impl = module._call_impl
    fp.parallelize(parallel, dist.group.WORLD, PLAN, gather_logits=True)
    assert isinstance(parallel.embed, VocabParallelEmbedding)
    assert isinstance(parallel.mlp.up, ColumnParallelLinear)
    ids = torch.arange(15).view(3, 5)
    _assert_equal(plain, parallel, ids)
    twin = copy.deepcopy(parallel)
    for model in (plain, twin):
        model.zero_grad()
    _assert_equal(plain, twin, ids)
    fp.unparallelize(parallel)
    assert [type(m) for m in parallel.modules()] == [type(m) for m in plain.modules()]
    torch.testing.assert_close(parallel(ids), plain(ids), rtol=0, atol=0)


@pytest.mark.parametrize("classes", CLASSES, ids=lambda classes: "-".join(c.__name__ for c in classes.values()))
def test_forward_of_a_subclass_is_kept_around_the_parallel_weight(classes: dict[str, type]) -> None:
    run_ranks(3, _kept, classes)


def _observed() -> None:
    net = fp.parallelize(Net(up=ObservedLinear), dist.group.WORLD, PLAN)
    assert isinstance(net.mlp.up, ColumnParallelLinear)
    seen = [m for m in net.modules() if isinstance(m, Observer)]
    assert [(float(m.largest), m.calls) for m in seen] == [(0.0, 0)]


def test_what_modules_inside_a_forward_of_its_own_count_is_left_alone() -> None:
    run_ranks(2, _observed)


def _patched() -> nn.Module:
    net = Net()
    net.mlp.up.forward = lambda x: 2 * nn.Linear.forward(net.mlp.up, x)  # type: ignore[method-assign]
    return net


def _parametrized() -> nn.Module:
    net = Net()
    nn.utils.parametrizations.weight_norm(net.mlp.up)
    return net


class Int8Weight(nn.Parameter):
    """As quantisation libraries make them."""


def _quantised_weight() -> nn.Module:
    net = Net()
    net.mlp.up.weight = Int8Weight(net.mlp.up.weight.detach())
    return net


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: Net(up=QuantisedLinear),
        r"mlp.up is a .*QuantisedLinear, whose forward is its own .* computes with its wei",
    ),
    (lambda: Net(down=QuantisedLinear), r"mlp.down is a .*QuantisedLinear"),
    (lambda: Net(up=NormalisedLinear), r"mlp.up is a .*NormalisedLinear.* its output differs"),
    (lambda: Net(down=RangedLinear), r"mlp.down is a .*RangedLinear.* its output differs"),
    (lambda: Net(head=GatedLinear), r"head is a .*GatedLinear.* its dgrad differs"),
    (
        lambda: Net(up=AdapterLinear),
        r"mlp.up has style 'colwise': .*parameters \['low', 'high'\] beside weight and bias",
    ),
    (_patched, r"mlp.up has style 'colwise': .* forward replaced on this instance"),
    (_parametrized, r"mlp.up has style 'colwise': .* computes its weight from other parameters"),
    (_quantised_weight, r"mlp.up has style 'colwise': .*weight is a Int8Weight"),
]


def _refused(number: int) -> None:
    make, message = REFUSED[number]
    net = make()
    before = {name: (type(m), dict(m._parameters)) for name, m in net.named_modules()}
    with pytest.raises(TypeError, match=message):
        fp.parallelize(net, dist.group.WORLD, PLAN)
    assert {name: (type(m), dict(m._parameters)) for name, m in net.named_modules()} == before
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size(), "the group can be used further"


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_forward_that_needs_the_whole_weight_is_refused_on_every_rank(number: int) -> None:
    run_ranks(2, _refused, number)


def test_layers_of_their_own_refuse_a_forward_that_they_would_lose() -> None:
    for make, source in (
        (ColumnParallelLinear.from_linear, ScaledLinear(4, 4)),
        (VocabParallelEmbedding.from_embedding, ScaledEmbedding(5, 4)),
    ):
        with pytest.raises(TypeError, match="has a forward of its own, which a new layer"):
            make(source)


def _gemma(sequence_parallel: bool) -> None:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=67, hidden_size=24, intermediate_size=34, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, sliding_window=4, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=sequence_parallel)
    ids = torch.randint(67, (2, 11))
    expected, out = (model(input_ids=ids, labels=ids).loss for model in (plain, parallel))
    assert abs((expected - out).item()) < 1e-5
    expected.backward()
    out.backward()
    wanted = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        torch.testing.assert_close(full_parameter(p, p.grad), wanted[name].grad, rtol=1e-3, atol=2e-6, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_model_with_a_scaled_embedding_equals_one_process(sequence_parallel: bool) -> None:
    run_ranks(2, _gemma, sequence_parallel)


def _scaled(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return original(experts, x, indices, weights) * 2.0


def _detached(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return original(experts, x, indices, weights.detach())


def _dropping(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return F.dropout(original(experts, x, indices, weights), 0.1, experts.training)


def _in_training(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return original(experts, x, indices, weights) * (2.0 if experts.training else 1.0)


def _adding_bias(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return original(experts, x, indices, weights) + experts.down_proj_bias.sum(0)  # zero until the first step


def _as_they_are(experts: Any, original: Any, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return original(experts, x, indices, weights)


def _experts() -> None:
    does = r"does more in its forward"
    cases: list[tuple[str, Any, Any, str]] = [
        ("mixtral", _scaled, torch.float32, does),
        ("mixtral", _scaled, torch.bfloat16, does),  # whose rounding is coarse
        ("mixtral", _detached, torch.float32, does),
        ("mixtral", _in_training, torch.float32, does),
        ("mixtral", _dropping, torch.float32, r"draws random numbers in its forward"),
        ("gpt_oss", _adding_bias, torch.float32, does),
        ("gpt_oss", _as_they_are, torch.bfloat16, ""),
        ("mixtral", _as_they_are, torch.float32, ""),
    ]
    for name, forward, dtype, said in cases:
        model: Any = build_experts(name).to(dtype)
        experts = model.model.layers[0].mlp.experts
        original = type(experts)
        own = lambda self, *args, f=forward, o=original: f(self, o.forward, *args)  # noqa: E731
        experts.__class__ = type("OwnExperts", (original,), {"forward": own})
        for parameter in experts.parameters():
            parameter.detach().mul_(0 if parameter.dim() < 3 else 1)
        state = torch.get_rng_state()
        if said:
            with pytest.raises(TypeError, match=rf"model.layers.0.mlp.experts \S+OwnExperts\) {said}"):
                fp.parallelize(model, dist.group.WORLD)
            assert experts.training
        else:
            fp.parallelize(model, dist.group.WORLD)
            assert not full_parameter(experts.down_proj_bias).any() if name == "gpt_oss" else True
        assert torch.equal(torch.get_rng_state(), state)


def test_experts_that_do_more_than_their_weights_say_are_refused() -> None:
    run_ranks(2, _experts)


def _dropout_subclass() -> None:
    class Noisy(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model: Any = build_model("gpt2", torch.float32)
    model.transformer.drop = Noisy(0.1)
    with pytest.raises(TypeError, match=r"transformer.drop has style 'dropout': expected nn.Dropout, got Noisy"):
        fp.parallelize(model, dist.group.WORLD)


def test_dropout_with_a_forward_of_its_own_is_not_replaced() -> None:
    run_ranks(2, _dropout_subclass)
