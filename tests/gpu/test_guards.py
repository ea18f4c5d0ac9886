"""What a parallelised model is watched for: batches, generators, dropout, gradients, positions, parts that leave."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.parallel.guards.watch import Cadence
from fastpar.tensor import full_parameter
from tests.dist import run_ranks
from tests.models import VOCAB, build_model, logits_of
from tests.moe.moe_models import VOCAB as EXPERT_VOCAB
from tests.moe.moe_models import build as build_experts
from tests.tensor.family_models import tiny_model

LAYER = {"layers.*": "stream", "layers.*.mlp": "block", "layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}


class Layer(nn.Module):
    """A residual MLP, and something else on the stream."""

    def __init__(self, extra: nn.Module | None = None):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
        self.norm = nn.LayerNorm(6)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x if self.extra is None else x + self.extra(x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Convolution(nn.Module):
    """Mixes a position with the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(6, 6, 3, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class ShiftLayer(Layer):
    """A token shift in the layer's own code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.pad(x, (0, 0, 1, 0))[:, :-1]


class PointwiseLayer(Layer):
    """As much code of its own, which treats every position alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x.square().mean(-1, keepdim=True)) + x.flip(-1)


class InPlaceLayer(Layer):
    """Adds to what its block has returned, in place."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(x))
        out += x
        return out


class DroppedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class DroppedMlp(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](F.dropout(self[1](self[0](x)), 0.2, self.training))


def _stack(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for module in layers:
        for p in module.parameters():
            nn.init.normal_(p, std=0.5)
    return Stack(*layers)


# ---- batches and generators


def _other_batches() -> None:
    model = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(VOCAB, (2, 9))
    with pytest.raises(ValueError, match=r"input_ids, labels differ between the ranks .* mesh.rank\('dp'\)"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="with different inputs; this one with input_ids"):
        model(input_ids=ids[:, : 5 + dist.get_rank()])
    model(input_ids=torch.zeros(2, 5, dtype=torch.int64), use_cache=False)  # and goes on


def test_ranks_of_one_group_with_different_batches_are_told_which_input_differs() -> None:
    run_ranks(2, _other_batches)


def _other_embeddings() -> None:
    model = _stack(Layer())
    fp.parallelize(model, dist.group.WORLD, LAYER)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="input 0 differs between the ranks"):
        model(torch.randn(2, 5, 6))


def test_floating_point_inputs_are_compared_too() -> None:
    run_ranks(2, _other_embeddings)


@functools.cache
def _scales(length: int) -> list[Tensor]:
    return [torch.full((length, 1), 2.0)]


class CachingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * _scales(x.size(1))[0])


def _cached_lists() -> None:
    torch.manual_seed(0)
    model = CachingStack(Layer(), Layer())
    x = torch.randn(2, 9, 6)  # as many positions as no trial has
    expected = model(x)
    _scales.cache_clear()
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=True)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)


def test_lists_that_the_first_forward_puts_into_a_cache_stay_there() -> None:
    run_ranks(2, _cached_lists)


SEEN: list[Tensor] = []


class Collector:
    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"outputs": []}

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.seen["outputs"].append(output.square().mean())


class CollectingStack(Stack):
    """Collects in an object of its own, too."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.collector = Collector()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.collector(self, (), out)
        return out


def _collected() -> None:
    torch.manual_seed(0)
    model, seen, other = CollectingStack(Layer(), Layer()), [], Collector()
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=True)
    model.register_forward_hook(lambda _m, _a, out: seen.append(out.mean()))
    model.register_forward_hook(lambda _m, _a, out: SEEN.append(out.mean()))
    model.register_forward_hook(other)
    SEEN.clear()
    for count in (1, 2):
        model(torch.ones(2, 9, 6))
        assert [len(x) for x in (seen, SEEN, other.seen["outputs"], model.collector.seen["outputs"])] == [count] * 4


def test_what_hooks_and_objects_collect_is_of_the_forwards_that_were_called() -> None:
    run_ranks(2, _collected)


def _fewer_layers(sequence_parallel: bool) -> None:
    model = _stack(Layer(), Layer(), Layer())
    plain = Stack(*copy.deepcopy(list(model.layers)[:2]))
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
    model(x)
    del model.layers[-1]
    if sequence_parallel:  # the last one has made the sequence whole
        with pytest.raises(ValueError, match="computes something else than without"):
            model(x)
    else:
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_a_model_is_looked_at_again_when_layers_are_taken_out(sequence_parallel: bool) -> None:
    run_ranks(2, _fewer_layers, sequence_parallel)


def _other_seeds() -> None:
    model = _stack(Layer(nn.Dropout(0.3)))
    fp.parallelize(model, dist.group.WORLD, LAYER)
    x = torch.ones(2, 5, 6)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RuntimeError, match="generators of the ranks of this tensor-parallel group differ"):
        model(x)
    model.eval()(x)  # draws nothing
    torch.manual_seed(3)
    model.train()(x)


def test_dropout_with_generators_that_differ_is_an_error() -> None:
    run_ranks(2, _other_seeds)


class SkippingStack(Stack):
    """Layer-drop: leaves out layers by numbers of `draw`."""

    draw: Callable[[], float]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or type(self).draw() < 0.5:
                x = layer(x)
        return x


def _skipped_layers() -> None:
    torch.manual_seed(0)
    model = SkippingStack(*(Layer() for _ in range(6)))
    fp.parallelize(model, dist.group.WORLD, LAYER)
    x = torch.ones(2, 5, 6)
    for _ in range(3):
        model.eval()(x)  # looks of their own: training has its first ones later
    generators: dict[str, tuple[Callable[[int], Any], Callable[[], float]]] = {
        "torch's": (torch.manual_seed, lambda: torch.rand(()).item()),
        "Python's random": (random.seed, random.random),
        "numpy's": (np.random.seed, np.random.rand),
    }
    for name, (seed, draw) in generators.items():
        SkippingStack.draw = staticmethod(draw)
        seed(3 + dist.get_rank())  # of seeds 3 and 4 one skips the first layer
        with pytest.raises(RuntimeError, match=f"skipped layers.* from {name} generator"):
            copy.deepcopy(model).train()(x)
        seed(3)
        out = copy.deepcopy(model).train()(x)
        out.sum().backward()


def test_layers_skipped_by_generators_that_differ_are_an_error_before_a_rank_waits() -> None:
    run_ranks(2, _skipped_layers, timeout=30)


def _other_mode() -> None:
    model = _stack(Layer())
    fp.parallelize(model, dist.group.WORLD, LAYER)
    model.train(dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"(training|evaluation) mode, others do not"):
        model(torch.ones(2, 5, 6))


def test_ranks_of_one_group_in_different_modes_are_told_so() -> None:
    run_ranks(2, _other_mode)


def test_cadence_looks_at_the_first_calls_and_at_one_in_many() -> None:
    cadence = Cadence(first=2, every=5)
    assert [cadence.next() for _ in range(12)] == [n in (0, 1, 5, 10) for n in range(12)]
    assert cadence.next(training=False), "evaluation is counted apart"


# ---- dropout, functional


def _functional_dropout() -> None:
    x = torch.ones(2, 6, 6)
    whole = _stack(DroppedLayer())
    tensor, sequence = (
        fp.parallelize(copy.deepcopy(whole), dist.group.WORLD, LAYER, sequence_parallel=sp) for sp in (False, True)
    )
    torch.manual_seed(1)
    expected = whole(x)
    torch.manual_seed(1)
    torch.testing.assert_close(tensor(x), expected)  # on a whole tensor, generators agree
    with pytest.raises(ValueError, match=r"layers.0 \(.*DroppedLayer\) draws random numbers .* sequence is split"):
        sequence(x)
    inside = _stack(Layer())
    inside.layers[0].mlp = DroppedMlp(*inside.layers[0].mlp)
    fp.parallelize(inside, dist.group.WORLD, LAYER)
    with pytest.raises(ValueError, match=r"layers.0.mlp \(DroppedMlp\) draws random numbers inside the block"):
        inside(x)
    inside.eval()(x)


def test_functional_dropout_is_right_on_whole_tensors_and_refused_on_parts() -> None:
    run_ranks(2, _functional_dropout)


# ---- positions


def _positions(kind: str) -> None:
    layers: dict[str, tuple[nn.Module, str]] = {
        "module": (Layer(Convolution()), r"layers.0.extra.inner \(Conv1d\) mixes positions|layers.0.extra \(Convol"),
        "code": (ShiftLayer(), r"layers.0 \(ShiftLayer\), in its own forward, mixes positions"),
    }
    layer, message = layers[kind]
    model = _stack(layer)
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0))
    whole = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, LAYER)
    torch.testing.assert_close(whole(x), model(x))
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=True)
    with pytest.raises(ValueError, match=message):
        model(x)


@pytest.mark.parametrize("kind", ["module", "code"])
def test_what_mixes_positions_is_refused_with_sequence_parallelism(kind: str) -> None:
    run_ranks(2, _positions, kind)


def _pointwise() -> None:
    model = _stack(PointwiseLayer(nn.Dropout(0.2)), Layer(nn.Linear(6, 6)), InPlaceLayer())
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0))
    parallel = fp.parallelize(copy.deepcopy(model), dist.group.WORLD, LAYER, sequence_parallel=True)
    model.eval()
    torch.testing.assert_close(parallel.eval()(x), model(x))
    torch.manual_seed(2)
    first = parallel.train()(x)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(copy.deepcopy(parallel)(x), first), "trying the layers again moves no generator"
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_treat_every_position_alike_are_not_refused() -> None:
    run_ranks(2, _pointwise)


class Skip(Stack):
    """Adds what stands before the layers to what stands between them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x) + x)


def _skip() -> None:
    model = Skip(Layer(), Layer())
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=True)
    x = torch.ones(2, 6, 6)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size of tensor") as error:
            model(x)
        words = [str(error.value), *getattr(error.value, "__notes__", ())]  # Python 3.10 has no notes
        assert sum("a skip across layers" in each for each in words) == 1
    fp.parallelize(fp.unparallelize(model), dist.group.WORLD, LAYER)(x)


def test_a_skip_from_before_the_split_stream_is_explained() -> None:
    run_ranks(2, _skip)


# ---- gradients


class Scaled(nn.Module):
    """A learnt scale on the features between the two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)


def _block_parameter() -> None:
    linears = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"mlp \(Scaled\) is a block with the parameters \['scale'\] of its own"):
        fp.parallelize(Net(), dist.group.WORLD, {"mlp": "block", **linears})
    expected, right, wrong = Net().double(), Net().double(), Net().double()
    fp.parallelize(right, dist.group.WORLD, {"mlp": "block", "mlp.scale": "partial", **linears})
    fp.parallelize(wrong, dist.group.WORLD, linears)  # no block: nothing says that the scale sees a part
    for model in (expected, right):
        model(x).square().sum().backward()
    scale = dict(right.named_parameters())["mlp.scale"]
    torch.testing.assert_close(full_parameter(scale, scale.grad), expected.mlp.scale.grad)
    with pytest.raises(RuntimeError, match=r"the gradient of mlp.scale differs between the ranks .* style 'partial'"):
        wrong(x).square().sum().backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def test_parameter_of_a_block_itself_needs_a_style_and_a_partial_gradient_is_noticed() -> None:
    run_ranks(2, _block_parameter)


# ---- parts that leave the model


def _recorded_outputs(model_type: str, sequence_parallel: bool) -> None:
    if model_type == "llama":
        plain = build_model(model_type, torch.float64, attn_implementation="eager")
    else:
        plain = tiny_model(model_type, "HrmTextForCausalLM", attn_implementation="eager").double()
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=sequence_parallel)
    ids = torch.arange(26).view(2, 13)
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    expected, out = plain(ids, **options), parallel(ids, **options)
    for name in ("hidden_states", "attentions"):
        assert len(out[name]) == len(expected[name])
        for mine, wanted in zip(out[name], expected[name], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)
    sum(h.square().sum() for h in expected.hidden_states).backward()
    sum(h.square().sum() for h in out.hidden_states).backward()
    wanted_grads = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(
                full_parameter(p, p.grad), wanted_grads[name].grad, rtol=1e-5, atol=1e-5, msg=name
            )


# HRM's model has a parameter of its own, and transformers goes by the name of its class.
@pytest.mark.parametrize(("model_type", "sequence_parallel"), [("llama", False), ("llama", True), ("hrm_text", False)])
def test_hidden_states_and_attentions_come_back_whole(model_type: str, sequence_parallel: bool) -> None:
    run_ranks(2, _recorded_outputs, model_type, sequence_parallel)


def _router_loss() -> None:
    plain: Any = build_experts("qwen3_moe", torch.float32)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=True)
    ids = torch.randint(EXPERT_VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # the balance loss counts by position
    expected, out = (
        model(input_ids=ids, labels=ids, attention_mask=mask, output_router_logits=True) for model in (plain, parallel)
    )
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.aux_loss, expected.aux_loss, rtol=1e-5, atol=1e-6)
    expected.loss.backward()
    out.loss.backward()
    wanted = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        torch.testing.assert_close(full_parameter(p, p.grad), wanted[name].grad, rtol=2e-3, atol=1e-5, msg=name)


def test_balance_loss_of_a_model_sees_all_tokens_with_sequence_parallelism() -> None:
    run_ranks(2, _router_loss)


class CountingLayer(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.square().mean()


class CountingStack(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        total = torch.zeros(())
        for layer in self.layers:
            x, loss = layer(x)
            total = total + loss
        return x, total


def _number_of_a_part() -> None:
    torch.manual_seed(0)
    model = CountingStack(CountingLayer())
    fp.parallelize(model, dist.group.WORLD, LAYER, sequence_parallel=True)
    with pytest.raises(RuntimeError, match=r"layers.0 returns a number beside its hidden states"):
        model(torch.ones(2, 6, 6))


def test_number_computed_from_a_part_of_the_sequence_is_refused() -> None:
    run_ranks(2, _number_of_a_part)


# ---- logits and loss


def _generated(seed_apart: bool) -> tuple[list[int], list[int]]:
    plain: Any = build_model("qwen3", torch.float32).eval()
    ids = torch.arange(6).view(1, 6)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    sampled = greedy | {"do_sample": True, "temperature": 1.5}
    torch.manual_seed(4)
    expected = [plain.generate(ids, **greedy)[0].tolist(), plain.generate(ids, **sampled)[0].tolist()]
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    twin = copy.deepcopy(parallel)
    assert twin.generate.model is twin
    torch.manual_seed(dist.get_rank() if seed_apart else 4)
    out = [parallel.generate(ids, **greedy)[0].tolist(), twin.generate(ids, **sampled)[0].tolist()]
    again = parallel.generate(ids, **sampled)[0].tolist()
    assert again != out[1], "a second call draws further"
    assert isinstance(parallel(ids).logits, DTensor), "and logits are split again"
    assert out[0] == expected[0]
    return out[1], expected[1]


def test_generate_gives_the_tokens_of_one_process_and_the_same_on_every_rank() -> None:
    for tokens, expected in run_ranks(2, _generated, False):
        assert tokens == expected
    (first, _), (second, _) = run_ranks(2, _generated, True)
    assert first == second


def _split_logits() -> None:
    plain = build_model("llama", torch.float32)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    ids = torch.arange(18).view(2, 9)
    expected, logits = logits_of(plain, ids), logits_of(parallel, ids)
    assert isinstance(logits, DTensor)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits.full_tensor(), expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    wanted = F.cross_entropy(expected.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), ids.flatten()), wanted)
    loss = fp.ops.vocab_parallel_cross_entropy(logits, ids)
    torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), ids.flatten()))


def test_logits_that_leave_the_model_are_whole_in_meaning() -> None:
    run_ranks(2, _split_logits)


def _masked_lm() -> None:
    import transformers

    config = transformers.EuroBertConfig(
        vocab_size=67, hidden_size=24, intermediate_size=34, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, mask_token_id=1, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.EuroBertForMaskedLM(config)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    ids = torch.randint(67, (2, 11))
    labels = ids.masked_fill(torch.rand(2, 11) < 0.5, -100)
    expected = plain(input_ids=ids, labels=labels).loss
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    torch.testing.assert_close(parallel(input_ids=ids, labels=labels).loss, expected)

    other = copy.deepcopy(plain)  # a loss that nobody knows
    other.loss_function = lambda logits, labels, vocab_size, **_: (
        logits.log_softmax(-1).square().mean() + 0 * labels.sum()
    )
    expected = other(input_ids=ids, labels=labels).loss
    parallel = fp.parallelize(other, dist.group.WORLD)
    torch.testing.assert_close(parallel(input_ids=ids, labels=labels).loss, expected)


def test_models_train_on_the_loss_that_is_their_own() -> None:
    run_ranks(2, _masked_lm)


class OwnLoss(nn.Module):
    """Computes its loss in its forward, by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(17, 6), nn.Linear(6, 17)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.embed(ids))
        return logits if labels is None else F.cross_entropy(logits.view(-1, 17), labels.view(-1))


def _own_loss() -> None:
    ids = torch.arange(12).view(3, 4)
    parallel = fp.parallelize(OwnLoss(), dist.group.WORLD, {"embed": "vocab", "head": "vocab"})
    torch.testing.assert_close(parallel(ids, ids), OwnLoss()(ids, ids))


def test_model_with_a_loss_in_its_forward_gets_whole_logits() -> None:
    run_ranks(2, _own_loss)


# ---- an optimizer built before


def _early_optimizer() -> None:
    model = build_model("llama", torch.float32)
    held = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp.parallelize(model, dist.group.WORLD)
    model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    for use in (optimizer.step, optimizer.zero_grad, lambda: nn.utils.clip_grad_norm_(held, 1.0)):
        with pytest.raises(RuntimeError, match=r"Build the optimizer .* after parallelize"):
            use()
    twin = copy.deepcopy(model)
    fp.unparallelize(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    optimizer.step()
    fp.unparallelize(twin)
    assert all(type(p) is nn.Parameter and p.numel() for p in twin.parameters())


def test_optimizer_built_before_the_swap_refuses_to_train_nothing() -> None:
    run_ranks(2, _early_optimizer)


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _failed_forward() -> None:
    model, inside = fp.parallelize(_stack(Layer()), dist.group.WORLD, LAYER), list[int]()
    model.layers[0].mlp.register_forward_hook(lambda *_: inside.append(_hooks(model)))
    waiting = _hooks(model)  # one of them tries the block when it is called first
    model(torch.randn(2, 4, 6))
    left = _hooks(model)
    assert left == waiting - 1
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, 4, 5))  # the second forward is watched, too
    model(torch.randn(2, 4, 6))  # the third is not
    assert _hooks(model) == left
    assert inside[0] > left == inside[-1]


def test_guards_leave_no_hooks_behind_a_forward_that_they_have_watched() -> None:
    run_ranks(2, _failed_forward)
