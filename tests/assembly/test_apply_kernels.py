"""`apply_kernels`: models compute the same with fused modules, as far as these are known by what they compute."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar.integrations.kernels import DeferredLogits
from tests.models import VOCAB, build_model
from tests.tensor.family_models import tiny_model

pytest.importorskip("transformers")


def _ids() -> Tensor:
    return torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def _labels() -> Tensor:
    labels = _ids()
    labels[0, :4] = -100
    return labels


def _step(model: Any, **more: Any) -> dict[str, Tensor]:
    out = model(input_ids=_ids(), labels=_labels(), **more)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found | {"(loss)": out.loss.detach()}


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).abs().max())


def _assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        scale = float(value.abs().max()) + 1e-6
        assert float((found[name] - value).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_with_kernels_trains_as_without(
    architecture: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build_model(architecture, dtype)
    model = copy.deepcopy(plain)
    with caplog.at_level(logging.INFO, logger="fastpar.apply_kernels"):
        assert fp.apply_kernels(model) is model
    name = type(plain).__name__.removesuffix("ForCausalLM")
    norms = {"llama": 5, "qwen3": 9}[architecture]  # two a layer and one, and those of queries and keys
    assert f"{norms} {name}RMSNorm" in caplog.text
    assert f"2 {name}MLP" in caplog.text
    assert "the loss" in caplog.text
    exact = copy.deepcopy(plain).double()
    for more in ({}, {"num_items_in_batch": torch.tensor(31)}):
        found, wanted, truth = _step(model, **more), _step(plain, **more), _step(exact, **more)
        for key, value in truth.items():
            room = (2e-5 if dtype == torch.float32 else 2e-2) * float(value.abs().max())
            assert _error(found[key], value) <= 2 * _error(wanted[key], value) + room, key
    assert type(model.config).__name__ == type(plain.config).__name__
    assert type(model).__name__ == type(plain).__name__
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_logits_are_computed_when_somebody_reads_them_and_only_then() -> None:
    plain: Any = build_model("llama", torch.float32)
    model: Any = fp.apply_kernels(copy.deepcopy(plain))
    out = model(input_ids=_ids(), labels=_labels())
    assert isinstance(out.logits, DeferredLogits)
    assert out.logits.shape == (2, 9, VOCAB)
    assert vars(out.logits)["whole"] is None
    wanted = plain(input_ids=_ids(), labels=_labels()).logits
    assert torch.equal(out.logits.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(out.logits + 0, wanted)
    (out.logits.square().mean() + out.loss).backward()
    other = plain(input_ids=_ids(), labels=_labels())
    (other.logits.square().mean() + other.loss).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    for mode in (model.eval(), model.train()):
        labels = None if mode.training else _labels()
        assert type(mode(input_ids=_ids(), labels=labels).logits) is Tensor
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(_ids(), **options), plain.eval().generate(_ids(), **options))


def test_copies_checkpointing_and_removal_work() -> None:
    plain: Any = build_model("qwen3", torch.float32)
    model: Any = fp.apply_kernels(copy.deepcopy(plain))
    wanted = _step(plain)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()  # a copy that called the original's children would see it
    _assert_close(_step(twin), wanted, 2e-5)
    twin.activation_checkpointing_enable({"use_reentrant": False})
    _assert_close(_step(twin), wanted, 2e-5)
    assert fp.remove_kernels(twin) is twin
    for found, original in zip(twin.modules(), plain.modules(), strict=True):
        assert type(found) is type(original)
    twin.activation_checkpointing_disable()
    _assert_close(_step(twin), wanted, 0.0)


class Gated(nn.Module):
    """An MLP under names of its own, with the second linear as the gate."""

    def __init__(self, act: Any = nn.functional.silu, scale: float = 1.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.act, self.scale = act, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x))) * self.scale


class Packed(nn.Module):
    def __init__(self, is_gate_first: bool):
        super().__init__()
        self.both, self.out, self.is_gate_first = nn.Linear(8, 24), nn.Linear(12, 8), is_gate_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1) if self.is_gate_first else self.both(x).chunk(2, -1)[::-1]
        return self.out(nn.functional.silu(gate) * up)


class Norm(nn.Module):
    def __init__(self, offset: float = 0.0, mean: bool = False, power: int = 2):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.eps, self.offset, self.mean, self.power = 1e-5, offset, mean, power

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.mean else x
        x = x * torch.rsqrt(x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps) * (self.offset + self.scale)
        return x if gate is None else x * gate


@pytest.mark.parametrize(
    ("make", "is_fused"),
    [
        (Gated, True),
        (lambda: Gated(nn.functional.gelu), False),
        (lambda: Gated(scale=1.01), False),
        (lambda: Packed(True), True),
        (lambda: Packed(False), False),
        (Norm, True),
        (lambda: Norm(offset=1.0), True),
        (lambda: Norm(offset=0.5), False),
        (lambda: Norm(mean=True), False),
        (lambda: Norm(power=1), False),
    ],
    ids=[
        "gate second",
        "gelu",
        "scaled",
        "packed",
        "packed up first",
        "norm",
        "one added",
        "half added",
        "mean",
        "power",
    ],
)
def test_modules_are_known_by_what_they_compute(make: Any, is_fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(8, 8), Norm())
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, logger="fastpar.apply_kernels"):
        fp.apply_kernels(model)
    kept = [line for line in caplog.messages if line.startswith("kept: 0 ")]
    assert bool(kept) != is_fused
    x = torch.randn(3, 8, requires_grad=True)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    if isinstance(plain[0], Norm):
        torch.testing.assert_close(model[0](x, x), plain[0](x, x), rtol=1e-5, atol=1e-5)


class Dropping(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * nn.functional.dropout(self.act(self.b(x)), 0.5, self.training))


class TwoNumbers(Norm):
    """The number that comes first among the attributes is not what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.0


class EpsOutside(Norm):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return hidden / (hidden.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.scale


class Observing(Norm):
    """Keeps the largest number that it has seen in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return super().forward(x, gate)


class Penalised(Gated):
    """Keeps a loss for others."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.b(x).square().mean()
        return super().forward(x)


class StoppingGradients(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)).detach())


def test_what_a_module_does_beside_its_result_and_in_backward_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Observing(), Penalised(), StoppingGradients(), Gated())
    fp.apply_kernels(model)
    assert [type(each).__name__ for each in model if type(each) in (Observing, Penalised, StoppingGradients)] == [
        "Observing",
        "Penalised",
        "StoppingGradients",
    ]
    assert type(model[3]) is not Gated


def test_what_is_changed_later_is_computed_with() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Norm(), Gated(nn.SiLU()), Gated(nn.SiLU()))
    plain = copy.deepcopy(model)
    fp.apply_kernels(model)
    seen: list[Tensor] = []
    for each in (model, plain):
        each[0].offset, each[0].eps = 0.5, 0.1
        each[1].act = nn.GELU()
        each[2].act.register_forward_hook(lambda _m, _a, out: seen.append(out))
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), plain(x))
    assert len(seen) == 2


def test_trials_tell_apart_what_differs_in_training_in_small_rows_or_in_a_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(nn.functional.gelu), Dropping(), TwoNumbers(), EpsOutside()).eval()
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    fp.apply_kernels(model)
    assert torch.equal(torch.get_rng_state(), state)
    fused = [type(a) is not type(b) for a, b in zip(model, plain, strict=True)]
    assert fused == [True, False, False, True, False]
    x = torch.randn(3, 8)
    torch.testing.assert_close(model[1](x), plain[1](x))
    torch.testing.assert_close(model[3](1e-4 * x), plain[3](1e-4 * x))
    assert torch.equal(model[4](hidden=x), plain[4](hidden=x))


def _both() -> tuple[Any, Any]:
    plain: Any = build_model("llama", torch.float32)
    return plain, fp.apply_kernels(copy.deepcopy(plain))


def _read_without_grad(out: Any) -> Tensor:
    with torch.no_grad():
        out.logits.argmax(-1)
    return out.logits.square().mean()


def _in_place(out: Any) -> Tensor:
    out.logits[..., 3] = 0.0
    return out.logits.mul_(2.0).square().mean()


def _by_a_function_of_autograd(out: Any) -> Tensor:
    return fp.ops.vocab_parallel_cross_entropy(out.logits, _ids()).mean()


@pytest.mark.parametrize("use", [_read_without_grad, _in_place, _by_a_function_of_autograd])
def test_autograd_sees_the_logits_whatever_is_done_with_them(use: Any) -> None:
    found, wanted = {}, {}
    for model, grads in zip(_both(), (wanted, found), strict=True):
        out = model(input_ids=_ids(), labels=_labels())
        (out.loss + use(out)).backward()
        grads.update({name: p.grad for name, p in model.named_parameters()})
    _assert_close(found, wanted, 1e-4)


def test_logits_have_the_dtype_of_autocast_when_they_are_read_after_it() -> None:
    plain, model = _both()
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = (each(input_ids=_ids(), labels=_labels()) for each in (plain, model))
    assert found.logits.dtype == (found.logits + 0).dtype == wanted.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.logits + 0, wanted.logits, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-2, atol=1e-2)


def test_logits_of_a_weight_that_has_changed_or_is_freed_are_refused() -> None:
    _, model = _both()
    out = model(input_ids=_ids(), labels=_labels())
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"read them before optimizer.step\(\)"):
        out.logits.argmax(-1)

    def free(head: Any, *_: Any) -> None:  # as fully_shard of the head does
        head.weight.untyped_storage().resize_(0)

    model.lm_head.register_forward_hook(free)
    with pytest.raises(RuntimeError, match=r"call fastpar.apply_kernels with loss=False"):
        model(input_ids=_ids(), labels=_labels())


def test_a_compiled_model_computes_the_same() -> None:
    plain, model = _both()
    wanted = _step(plain)
    model.compile(backend="eager")
    _assert_close(_step(model), wanted, 2e-5)


@pytest.mark.parametrize(
    ("family", "name"), [("gemma2", "Gemma2"), ("phi3", "Phi3"), ("mixtral", "Mixtral"), ("gpt2", "GPT2")]
)
def test_other_families_compute_the_same(family: str, name: str) -> None:
    plain: Any = tiny_model(family, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))
    model: Any = fp.apply_kernels(copy.deepcopy(plain))
    wanted, found = (each.train()(input_ids=_small(), labels=_small()) for each in (plain, model))
    assert isinstance(found.logits, DeferredLogits) == (family != "gemma2"), "whose logits are capped"
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logits + 0, wanted.logits, rtol=1e-4, atol=1e-5)


def _small() -> Tensor:
    return _ids() % 61


def test_what_cannot_be_fused_is_refused() -> None:
    model = build_model("llama", torch.float32)
    with pytest.raises(ValueError, match=r"has no kernels of fastpar.apply_kernels"):
        fp.remove_kernels(model)
    fp.apply_kernels(model, loss=False)
    with pytest.raises(ValueError, match="has kernels already"):
        fp.apply_kernels(model)
    with pytest.raises(ValueError, match=r"call fastpar.remove_kernels\(model\) first"):
        fp.parallelize(model, None)
    with pytest.raises(ValueError, match=r"found nothing to replace in this Linear; loss: the model computes no loss"):
        fp.apply_kernels(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"takes an nn.Module"):
        fp.apply_kernels("llama")  # type: ignore[type-var]
