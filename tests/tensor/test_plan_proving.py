"""The plan "auto": what it finds in models that it has never seen, and what it leaves whole."""

from __future__ import annotations

import functools
import math
import threading
import time
import types
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar.parallel.declared import auto_plan
from fastpar.parallel.heads import split_heads
from fastpar.parallel.kinds import alike, called_alike
from fastpar.parallel.plan import match_plan, parse_style
from fastpar.parallel.proving import proven_plan, refuse_wrong_blocks
from fastpar.parallel.styles import ColwiseStyle
from fastpar.parallel.trial import record_calls, trial
from fastpar.tensor import full_parameter
from tests.dist import run_ranks

HEADS, WIDTH, HIDDEN = 4, 6, 24


class Attention(nn.Module):
    """Softmax attention; `layout` is how queries, keys and values lie in one weight."""

    def __init__(self, layout: str = "sections"):
        super().__init__()
        self.layout, self.num_heads, self.head_dim = layout, HEADS, WIDTH
        self.wqkv, self.wo = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        shape = (3, self.num_heads) if self.layout == "sections" else (self.num_heads, 3)
        parts = self.wqkv(x).view(batch, tokens, *shape, self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2 if self.layout == "sections" else 3))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class AttentionWithSinks(Attention):
    """Parameters of its own: one number per head, and one for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks, self.temperature = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (p.transpose(1, 2) for p in self.wqkv(x).view(batch, tokens, 3, self.num_heads, WIDTH).unbind(2))
        scores = q @ k.transpose(-1, -2) * self.temperature
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.wo((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 2 * 10), nn.Linear(10, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.a(x).chunk(2, -1)
        return self.b(torch.tanh(gate) * up)


class MLPWithResidual(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class MLPWithScale(MLP):
    """Multiplies its result by what it computes from the input beside the split path: backward sums that R times."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True)


class MLPWithNorm(MLP):
    """A mean over features of which a rank has a part."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.a(x).chunk(2, -1)
        hidden = torch.tanh(gate) * up
        return self.b(hidden - hidden.mean(-1, keepdim=True))


class MLPOfOneThread(MLP):
    """Calls what fails in two threads at once, as torch's tracers do."""

    turn = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.a(x).chunk(2, -1)
        assert self.turn.acquire(blocking=False)
        time.sleep(0.01)
        self.turn.release()
        return self.b(torch.tanh(gate) * up)


class MLPWithSecondResult(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = self.a(x).chunk(2, -1)
        return self.b(torch.tanh(gate) * up), gate.square().mean()


class MLPThatKeeps(MLP):
    """Leaves a result where another module could read it."""

    def forward(self, x: Tensor) -> Tensor:
        self.gates = self.a(x)
        gate, up = self.gates.chunk(2, -1)
        return self.b(torch.tanh(gate) * up)


class MLPThatKeepsInDict(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, list[Tensor]] = {"gates": []}

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.a(x).chunk(2, -1)
        self.losses["gates"].append(gate.square().mean())
        return self.b(torch.tanh(gate) * up)


class MLPWithStatistics(MLP):
    """Keeps the largest value that it has seen in training, as observers of ranges do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.a(x)
        if self.training:
            self.largest = torch.maximum(self.largest, gates.detach().abs().max())
        gate, up = gates.chunk(2, -1)
        return self.b(torch.tanh(gate) * up)


class NormWithStatistics(nn.LayerNorm):
    """A mean over tokens, which its result does not depend on."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.mean += float(x.mean())
        return super().forward(x)


class Convolution(nn.Module):
    """Mixes tokens, and is called neither attention nor anything like it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleDict({f"part{i}": part for i, part in enumerate(parts)})
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            out = part(self.norm(x))
            x = x + (out if isinstance(out, Tensor) else out[0] * (1 + out[1]))
        return x


class WithEmbedding(Layer):
    """Adds an input of all positions, which only the model has: no rank with a part of the sequence could."""

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + embedded


class Streams(Layer):
    """Passes two streams on in one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Streams, self).forward(stream) for stream in x])


class Shifted(Layer):
    """Mixes tokens in the code of the layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Model(nn.Module):
    """A language model with names of no known architecture."""

    def __init__(self, *parts: Any, layer: type[Layer] = Layer):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(17, HIDDEN)
        self.stack = nn.ModuleList(layer(*(part() for part in parts)) for _ in range(2))
        self.out = nn.Linear(HIDDEN, 17)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.stack:
            x = layer(x)
        return self.out(x)


class Embedding(Model):
    """Gives every layer the embedding as well."""

    def forward(self, ids: Tensor) -> Tensor:
        embedded = x = self.table(ids)
        for layer in self.stack:
            x = layer(x, embedded)
        return self.out(x)


class TwoStreams(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).expand(2, -1, -1, -1)
        for layer in self.stack:
            x = layer(x)
        return self.out(x.sum(0))


def interleaved() -> Attention:
    return Attention("interleaved")


def kinds(model: nn.Module, size: int = 2, **options: Any) -> dict[str, str]:
    """Style of everything in the second layer."""
    plan = proven_plan(model, size, **options)
    styles = {path: parse_style(path, style).name for path, style in plan.items()}
    return {path.removeprefix("stack.1."): kind for path, kind in styles.items() if path.startswith("stack.1.")}


SPLIT_MLP = {"parts.part0": "block", "parts.part0.a": "colwise", "parts.part0.b": "rowwise"}


# ------------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("part", [Attention, interleaved])
def test_fused_queries_keys_and_values_are_split_as_the_block_reads_them(part: Any, size: int) -> None:
    plan = proven_plan(Model(part), size)
    style = parse_style("", plan["stack.0.parts.part0.wqkv"])
    assert (
        (style.sections, style.unit) in [((HIDDEN,) * 3, WIDTH), (3, WIDTH)] if part is Attention else [(1, 3 * WIDTH)]
    )
    assert kinds(Model(part), size)["parts.part0"] == "block"


def test_two_halves_in_one_weight_are_split_apiece() -> None:
    plan = proven_plan(Model(MLP), 3)
    assert kinds(Model(MLP), 3) == SPLIT_MLP
    assert parse_style("", plan["stack.0.parts.part0.a"]).sections == 2


def test_virtual_ranks_take_turns() -> None:
    assert kinds(Model(MLPOfOneThread), 3) == SPLIT_MLP


@pytest.mark.parametrize("part", [MLPWithResidual, MLPWithScale])
def test_beside_a_residual_linears_are_split_by_themselves_since_its_gradient_would_count_twice(part: Any) -> None:
    assert kinds(Model(part), 2) == {name: style for name, style in SPLIT_MLP.items() if style != "block"}
    style = parse_style("", proven_plan(Model(part), 2, sequence_parallel=True)["stack.1.parts.part0"])
    assert style.name == "whole"
    assert "the gradient of its input would be off" in style.note


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (MLPWithNorm, "its output would be off"),
        (MLPWithStatistics, "what it writes to largest would be off"),
        (MLPThatKeeps, "what it computes beside the hidden states may be used"),
        (MLPThatKeepsInDict, "what it computes beside the hidden states may be used"),
        (MLPWithSecondResult, "what it computes beside the hidden states may be used"),
    ],
)
def test_a_block_that_is_not_the_same_on_parts_is_left_whole_and_says_why(part: Any, reason: str) -> None:
    style = parse_style("", proven_plan(Model(part), 2)["stack.1.parts.part0"])
    assert style.name == "whole"
    assert style.is_fallback
    assert reason in style.note


def test_what_hooks_collect_in_a_block_leaves_it_whole_and_is_not_there_before_the_first_forward() -> None:
    model = Model(MLP)
    seen: list[Tensor] = []
    for layer in model.stack:
        layer.parts.part0.a.register_forward_hook(lambda _m, _a, out: seen.append(out.square().mean()))
        layer.parts.part0.register_forward_hook(lambda _m, _a, out: seen.append(out.square().mean()))
    assert kinds(model)["parts.part0"] == "whole"
    assert seen == []
    for layer in model.stack:
        layer.parts.part0.a._forward_hooks.clear()  # the other hook sees what every rank has whole
    assert kinds(model) == SPLIT_MLP


@pytest.mark.parametrize(
    ("found", "wanted"), [((math.inf, 1), (1, math.inf)), ((1, 1), (1, math.inf)), ((math.nan,),) * 2]
)
def test_what_is_not_finite_is_equal_to_nothing(found: Any, wanted: Any) -> None:
    assert not trial._equal(torch.tensor(found), torch.tensor(wanted))


def test_parameters_of_a_block_go_by_head_or_have_their_gradients_summed() -> None:
    found = kinds(Model(AttentionWithSinks))
    assert found["parts.part0.sinks"] == "heads"
    assert found["parts.part0.temperature"] == "partial"


def test_an_embedding_that_shares_the_weight_of_another_is_split_like_it() -> None:
    class TwoTables(Model):
        def __init__(self) -> None:
            super().__init__(MLP)
            self.shared = nn.Embedding(17, HIDDEN)
            self.table.weight = self.shared.weight

        def get_input_embeddings(self) -> nn.Module:
            return self.shared

    styles = {path: parse_style(path, style).name for path, style in proven_plan(TwoTables(), 2).items()}
    assert {path: name for path, name in styles.items() if "." not in path} == {"shared": "vocab", "table": "vocab"}


def test_heads_that_do_not_divide_leave_a_block_that_nobody_declared_whole() -> None:
    style = parse_style("", proven_plan(Model(Attention), 3)["stack.1.parts.part0"])
    assert style.name == "whole"
    assert "heads" in style.note


# ------------------------------------------------------------------------------------------- layers that are not alike


class MLPThatAsks(MLP):
    """Softmax over features, of which a rank has a part, where `says_so`; the sigmoid elsewhere."""

    says_so: Any = None

    def forward(self, x: Tensor, idx: int = 0, soft: bool = False) -> Tensor:
        gate, up = self.a(x).chunk(2, -1)
        is_soft = soft or (self.says_so is not None and self.says_so(idx))
        return self.b((gate.softmax(-1) if is_soft else gate.sigmoid()) * up)


class CallsWith(Model):
    """Says in the call which layer it is."""

    def __init__(self, **first_and_second: tuple[Any, Any]):
        super().__init__(MLP)
        self.options = first_and_second
        self.stack = nn.ModuleList(LayerWithOptions() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for i, layer in enumerate(self.stack):
            x = layer(x, **{name: values[i] for name, values in self.options.items()})
        return self.out(x)


class LayerWithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = MLPThatAsks(), nn.LayerNorm(HIDDEN)
        self.mlp.says_so = bool

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return x + self.mlp(self.norm(x), **options)


def _asking(second: Any) -> Model:
    """A model whose second layer says something else than its first."""
    model = Model(MLPThatAsks)
    parts: Any = [layer.parts["part0"] for layer in model.stack]
    second(*parts)
    return model


def _by_index(*parts: Any) -> None:
    for i, part in enumerate(parts):
        part.layer_idx = i
        part.__class__ = type("Numbered", (MLPThatAsks,), {"says_so": lambda self, _: self.layer_idx == 1})
    parts[1].__class__ = parts[0].__class__


def _by_list(*parts: Any) -> None:
    for i, part in enumerate(parts):
        part.flags = [{"soft": i == 1}]
        part.says_so = functools.partial(_first_flag, part.flags)


def _first_flag(flags: Any, _: int) -> bool:
    return bool(flags[0]["soft"])


def _by_closure(*parts: Any) -> None:
    def made(soft: bool) -> Any:
        return lambda _: soft

    parts[0].says_so, parts[1].says_so = made(False), made(True)


def _by_forward(_: Any, second: Any) -> None:
    second.forward = types.MethodType(lambda self, x: self.b(self.a(x).chunk(2, -1)[0].softmax(-1)), second)


def _by_hook(_: Any, second: Any) -> None:
    second.a.register_forward_hook(lambda _m, _a, out: out.softmax(-1))


@pytest.mark.parametrize("second", [_by_index, _by_list, _by_closure, _by_forward, _by_hook])
def test_a_trial_of_a_layer_does_not_speak_for_one_that_differs_by_what_its_code_reads(second: Any) -> None:
    plan = proven_plan(_asking(second), 2)
    styles = [parse_style("", plan[f"stack.{i}.parts.part0"]).name for i in range(2)]
    assert styles == ["block", "whole"]
    written = {"stack.*.parts.part0": "block", "stack.*.parts.part0.a": ColwiseStyle(sections=2)}
    parsed = match_plan(_asking(second), written | {"stack.*.parts.part0.b": "rowwise"})
    if second is not _by_hook:  # hooks on linears are tried with the real layers
        with pytest.raises(ValueError, match=r"stack.1.parts.part0 \(\w+\), split as the plan says, would compute"):
            refuse_wrong_blocks(_asking(second), parsed, 2)


@pytest.mark.parametrize("options", [{"idx": (0, 1)}, {"soft": (False, True)}])
def test_a_trial_of_a_layer_does_not_speak_for_one_that_is_called_otherwise(options: Any) -> None:
    plan = proven_plan(CallsWith(**options), 2)
    assert [parse_style("", plan[f"stack.{i}.mlp"]).name for i in range(2)] == ["block", "whole"]


def test_layers_that_hold_copies_and_count_themselves_are_one_kind() -> None:
    model = CallsWith(idx=(0, 1))
    for i, layer in enumerate(model.stack):
        layer.mlp.says_so = None
        layer.options, layer.layer_idx = {"act": [torch.tanh, types.SimpleNamespace(p=0.0)]}, i
    modules = dict(model.named_modules())
    group = ["stack.0", "stack.1"]
    assert alike(modules, group, {}) == [group]
    assert called_alike(modules, group, record_calls(model, group, 5)) == [group]


class GatedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads = WIDTH, HEADS
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, 2 * WIDTH)
        self.g_proj = nn.Linear(HIDDEN, HEADS)


def test_gates_go_with_their_query_heads() -> None:
    parent = GatedAttention()
    style = parse_style("", "colwise")
    linears = {name: (module, style) for name, module in parent.named_children()}
    split = split_heads("attention", parent, linears, 2)
    assert split.num_heads == HEADS
    assert split.rows["q_proj"].ranges == (((0, 24),), ((24, 48),))
    assert split.rows["k_proj"].ranges == (((0, 6),), ((6, 12),))
    assert split.rows["g_proj"].ranges == (((0, 2),), ((2, 4),))
    assert split.attributes == {"num_heads": 2}


# ------------------------------------------------------------------------------------------------ sequence parallelism


def test_what_mixes_tokens_gets_all_of_them_under_sequence_parallelism() -> None:
    assert kinds(Model(MLP, Convolution)) == SPLIT_MLP
    assert kinds(Model(MLP, Convolution), sequence_parallel=True) == SPLIT_MLP | {"parts.part1": "gathered"}
    assert kinds(Model(MLP, NormWithStatistics), sequence_parallel=True)["parts.part1"] == "gathered"


def test_a_layer_whose_own_code_mixes_tokens_is_refused_under_sequence_parallelism() -> None:
    assert kinds(Model(MLP, layer=Shifted)) == SPLIT_MLP
    with pytest.raises(ValueError, match=r"stack\.0 \(Shifted\) does not compute the same on parts of the sequence"):
        proven_plan(Model(MLP, layer=Shifted), 2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Embedding(MLP, layer=WithEmbedding),
            r"combines .* with input 1 of shape \[2, 5, 24\], of which every",
        ),
        (TwoStreams(MLP, layer=Streams), r"several streams on in one tensor of shape \[2, 2, 5, 24\]"),
    ],
)
def test_a_layer_that_cannot_have_a_part_of_the_sequence_says_why(model: nn.Module, reason: str) -> None:
    with pytest.raises(
        ValueError, match=rf"stack\.0 .* does not compute the same on parts of the sequence: .*{reason}"
    ):
        proven_plan(model, 2, sequence_parallel=True)


def _steps_are_equal(size: int) -> None:
    ids = torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(0))
    for parts in ([AttentionWithSinks, MLPWithResidual, Convolution], [interleaved, MLPWithNorm, MLP]):
        plain = Model(*parts)
        plain(ids).square().mean().backward()
        for sequence in (False, True):
            mesh = fp.init_mesh(tp=size, device="cpu")
            model = fp.parallelize(Model(*parts), mesh, sequence_parallel=sequence)
            out = model(ids)
            out.square().mean().backward()
            torch.testing.assert_close(out, plain(ids), rtol=1e-4, atol=1e-5)
            for (name, param), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert param.grad is not None, name
                grad = full_parameter(param, param.grad)
                torch.testing.assert_close(grad, wanted.grad, rtol=1e-3, atol=1e-5)
            mesh.close()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_models_of_no_known_architecture_step_as_on_one_process(size: int) -> None:
    run_ranks(size, _steps_are_equal, size)


# ------------------------------------------------------------------------------------------------- plans and the run


class Config:
    base_model_tp_plan: ClassVar = {"stack.*.parts.part0.a": "no_such_word", "stack.*.absent": "colwise"}


def test_words_and_patterns_of_a_declared_plan_that_say_nothing_are_passed_over() -> None:
    model = Model(MLP)
    model.config = Config()  # type: ignore[assignment]
    assert kinds(model) == SPLIT_MLP
    with pytest.raises(ValueError, match=r"plan\['stack.\*.parts.part0.a'\] is 'no_such_word'"):
        fp.parallelize(model, None, {"stack.*.parts.part0.a": "no_such_word"})


class Halves:
    base_model_tp_plan: ClassVar = {"stack.*.parts.part0.a": "packed_colwise", "stack.*.parts.part0.b": "rowwise"}


class OddMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, 21)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, last = self.a(x).split((10, 10, 1), -1)
        return self.b(torch.tanh(gate) * up + last)


def test_on_one_rank_a_block_that_is_not_as_its_plan_says_is_left_whole() -> None:
    model = Model(OddMLP)
    model.config = Halves()  # type: ignore[assignment]
    fp.parallelize(model, None)
    assert {row["style"] for row in fp.explain(model).rows if row["module"].endswith("part0")} == {"whole"}
    assert "a: 21 output features do not form 2 equal sections" in str(fp.explain(model))


def test_a_model_that_cannot_be_run_and_is_not_known_is_refused() -> None:
    class Broken(Model):
        def forward(self, ids: Tensor) -> Tensor:
            raise RuntimeError("out of order")

    with pytest.raises(
        ValueError, match=r"does not know Broken.*a run on a few ids \(see example_inputs\) failed: out of order"
    ):
        proven_plan(Broken(MLP), 2)
    with pytest.raises(ValueError, match="does not know Sequential"):
        auto_plan(nn.Sequential(nn.Linear(2, 2)))


class MLPThatObserves(MLP):
    """Learns from its input how many features there are, and how large they get."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        found = x.detach().abs().amax((0, 1))
        found = torch.maximum(self.largest, found) if len(self.largest) else found
        self.largest.resize_(found.shape).copy_(found)
        return super().forward(x)


def test_trials_leave_buffers_of_any_size_alone() -> None:
    model = Model(MLPThatObserves)
    assert kinds(model)["parts.part0"] == "block"
    assert [tuple(buffer.shape) for buffer in model.buffers()] == [(0,), (0,)]
    for buffer in model.buffers():
        buffer.resize_(HIDDEN).fill_(0.1)
    assert kinds(model)["parts.part0"] == "block"
    assert all((buffer == 0.1).all() for buffer in model.buffers())


def test_the_run_leaves_modes_buffers_generators_and_gradients_alone() -> None:
    model = Model(MLP).train()
    model.stack[0].eval()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda module, _args, _out: module.calls.add_(1) and None)
    state = torch.get_rng_state()
    calls = record_calls(model, ["stack.0"], 5)
    assert list(calls) == ["stack.0"]
    assert calls["stack.0"].hidden().shape == (2, 5, HIDDEN)
    assert (model.training, model.stack[0].training, float(model.get_buffer("calls"))) == (True, False, 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
