"""Parts of models: chained in one process they are the model, bit for bit, and their names are the model's."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.architecture import Architecture
from fastpar.pipeline.stages.calling import StageOutput
from fastpar.pipeline.stages.chain import Edge
from fastpar.pipeline.stages.infer import infer_architecture
from fastpar.pipeline.stages.partition import Partition, partition
from fastpar.pipeline.stages.stage import Stage
from tests.models import ARCHITECTURES, VOCAB, build_model

LAYERS = 5
TIED = {
    "example": ("embed_tokens.weight", "lm_head.weight"),
    "qwen3": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
}


def model_of(architecture: str, **overrides: Any) -> nn.Module:
    if architecture == "gpt2":
        return build_model(architecture, torch.float32, n_layer=LAYERS, **overrides)
    if architecture == "example":
        overrides = {"tie_word_embeddings": True} | overrides
    return build_model(architecture, torch.float32, num_hidden_layers=LAYERS, **overrides)


def batch_of(architecture: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids, and for Hugging Face's models a mask with padding on the left and the positions that go with it."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (3, 9))
    if architecture == "example":
        return ids, {}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def whole_logits(model: nn.Module, ids: Tensor, keywords: dict[str, Tensor]) -> Tensor:
    if hasattr(model, "generate"):  # one of Hugging Face's
        return model(ids, use_cache=False, **keywords).logits
    return model(ids, **keywords)


def forward_backward(
    stages: Sequence[Stage], inputs: tuple[Any, ...], keywords: dict[str, Any] | None = None, grad: Tensor | None = None
) -> Any:
    """Run the stages as a pipeline does: every tensor that crosses is cut from its graph, gradients are handed back."""
    received: Any = inputs
    waiting: dict[str, tuple[Tensor, Tensor]] = {}  # skip tensor: as sent, as received
    crossed: list[tuple[Any, Any]] = []
    for stage in stages:
        skips = {name: waiting[name][1] for name in stage.receives}
        output, sent = stage.run(received, keywords, skips)
        cut = pytree.tree_map_only(Tensor, _leaf, output)
        crossed.append((output, cut))
        waiting |= {name: (tensor, _leaf(tensor)) for name, tensor in sent.items()}
        received = cut
    result = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), crossed[-1][0])
    grads = None if grad is None else grad
    for index, stage in reversed(list(enumerate(stages))):
        output, cut = crossed[index]
        tensors, incoming = [], []
        for tensor, received_tensor in zip(pytree.tree_leaves(output), pytree.tree_leaves(cut), strict=True):
            gradient = grads if index == len(stages) - 1 else received_tensor.grad
            if isinstance(tensor, Tensor) and tensor.requires_grad and (gradient is not None or tensor.numel() == 1):
                tensors.append(tensor)
                incoming.append(gradient)
        for name in stage.sends:
            tensor, received_tensor = waiting[name]
            if tensor.requires_grad and received_tensor.grad is not None:
                tensors.append(tensor)
                incoming.append(received_tensor.grad)
        if tensors:
            torch.autograd.backward(tensors, incoming)
    return result


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def gradients(stages: Sequence[Stage], tied: Sequence[Any] = ()) -> dict[str, Tensor]:
    """Full name to gradient; those of tied parameters are added up, later parts first, as one backward does."""
    grads: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                grads[name] = parameter.grad
    for group in tied:
        total = torch.zeros(())
        for stage in reversed(stages):
            if stage.part in group.parts:
                total = total + group.parameter(stage).grad
        grads |= {name: total for names in group.names.values() for name in names}
    return grads


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_layered(architecture: str, model: nn.Module, **options: Any) -> Partition:
    """Outputs and gradients of the chained parts are the model's, and the state dicts together are its state dict."""
    full = copy.deepcopy(model)
    state = copy.deepcopy(full.state_dict())
    ids, keywords = batch_of(architecture)
    cut = partition(model, **options)
    stages = cut.stages(range(cut.num_parts))
    united: dict[str, Tensor] = {}
    for stage in stages:
        part = stage.module.state_dict()
        tied = {name for group in stage.tied for names in group.names.values() for name in names}
        assert set(part) & set(united) <= tied, "a part has entries of another"
        united |= part
    assert_same(united, state)

    grad = torch.randn(*ids.shape, VOCAB)
    output = forward_backward(stages, (ids,), keywords, grad)
    expected = whole_logits(full, ids, keywords)
    expected.backward(grad)
    assert torch.equal(output, expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))
    return cut


# ------------------------------------------------------------------------------------------------------- layered models


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "layout", ["E,t*5,H", "E,t*2|t*3,H", "E|t|t*3|t|N|H", "E,t||t,t*2|t,N|H"], ids=["whole", "uneven", "ends", "empty"]
)
def test_chained_parts_equal_the_model_in_outputs_and_gradients(architecture: str, layout: str) -> None:
    cut = check_layered(architecture, model_of(architecture), layout=layout)
    names = [tuple(name for names in group.names.values() for name in names) for group in cut.tied]
    expected = [TIED[architecture]] if architecture in TIED and cut.num_parts > 1 else []
    assert names == expected


@pytest.mark.parametrize("architecture", ["example", "gpt2"])
def test_counts_and_split_points_say_the_same_as_a_layout(architecture: str) -> None:
    layers = "layers" if architecture == "example" else "transformer.h"
    by_counts = check_layered(architecture, model_of(architecture), layout=[1, 3, 1])
    by_points = check_layered(architecture, model_of(architecture), split_points=[f"{layers}.1", f"{layers}.4"])
    assert str(by_counts.layout) == str(by_points.layout) == "E,t|t*3|t,H"


def test_trying_the_parts_seeds_no_generator_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would bring them back: CUDA's are seeded when it begins by what was said last."""
    model, seeded = model_of("gpt2"), list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    partition(model, layout=[2, 3])
    assert seeded == []
    assert torch.get_rng_state().equal(before)


def test_balanced_cut_counts_the_head_and_not_the_lookup() -> None:
    model = model_of("example", vocab_size=2000, tie_word_embeddings=False)
    assert str(partition(model, num_parts=2).layout) == "E,t*5|H"
    assert str(partition(model, num_parts=2, costs="parameters").layout) == "E,t*3|t*2,H"
    assert str(partition(model, num_parts=2, costs=[0, 1, 1, 1, 1, 4, 0]).layout) == "E,t*4|t,H"
    looped = partition(model, num_parts=4, costs=[0, 1, 1, 1, 1, 1, 3], stage_ranks=[0, 1, 1, 0])
    assert str(looped.layout) == "E|t*3|t*2|H" or str(looped.layout) == "E,t|t*2|t*2|H"


def test_measured_costs_must_be_one_per_unit() -> None:
    with pytest.raises(ValueError, match=r"got 5 costs for 7 units: embed_tokens, layers.0, .*, norm"):
        partition(model_of("example"), num_parts=2, costs=[1] * 5)


def test_layers_that_no_part_holds_are_named() -> None:
    with pytest.raises(ValueError, match=r"2 of 5 layers are in no part: model.layers.3, model.layers.4"):
        partition(model_of("llama"), layout="E,t*2|t,H")
    with pytest.raises(ValueError, match=r"\[2, 2\] places 4 layers, but the model has 5"):
        partition(model_of("llama"), layout=[2, 2])


def test_names_and_order_of_split_points_are_checked() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"'layers.2' is no unit.*near misses: \['model.layers.2'"):
        partition(model, split_points=["layers.2"])
    with pytest.raises(ValueError, match=r"model's order, but 'model.layers.1' comes too late"):
        partition(model, split_points=["model.layers.3", "model.layers.1"])
    with pytest.raises(TypeError, match="exactly one of num_parts, layout and split_points"):
        partition(model, num_parts=2, layout="E,t*5,H")
    with pytest.raises(TypeError, match="costs and stage_ranks choose the cut for num_parts, but layout fixes it"):
        partition(model, layout="E,t*5,H", costs="parameters")


def test_the_parts_of_one_rank_share_no_tensor_and_keep_ties_within_a_part() -> None:
    model = model_of("gpt2")
    stages = partition(model, layout="E,t*2|t*3|H").stages([0, 2, 1])
    assert stages[0].module is model, "the first kept part is the model object itself"
    seen: dict[int, int] = {}
    for stage in stages:
        for tensor in (*stage.module.parameters(), *stage.module.buffers()):
            assert seen.setdefault(tensor.data_ptr(), stage.part) == stage.part
    whole = partition(model_of("gpt2"), layout="E,t*5,H").stages([0])[0].module
    assert whole.lm_head.weight is whole.transformer.wte.weight


def test_shared_rotary_tables_are_copied_to_each_part() -> None:
    first, second = partition(model_of("llama"), layout=[3, 2]).stages([0, 1])
    a, b = (stage.module.model.rotary_emb for stage in (first, second))
    assert a is not b
    a.inv_freq.zero_()
    assert b.inv_freq.any()


def test_modules_of_other_parts_are_freed_though_the_caller_holds_the_model() -> None:
    model = model_of("llama")
    refs = {name: weakref.ref(p) for name, p in model.named_parameters()}
    stages = partition(model, layout=[2, 2, 1]).stages([1])
    gc.collect()
    alive = {name for name, ref in refs.items() if ref() is not None}
    assert alive == {name for name in refs if name.startswith(("model.layers.2.", "model.layers.3."))}
    assert stages[0].module is model
    assert [type(m).__name__ for m in model.model.layers][:3] == ["AbsentLayer", "AbsentLayer", "LlamaDecoderLayer"]
    assert model.lm_head.weight.dtype is torch.float32, "models ask what a weight is like"
    with pytest.raises(AttributeError, match=r"lm_head.weight: lm_head is on part 2 of the pipeline"):
        _ = model.lm_head.weight.data
    with pytest.raises(AttributeError, match=r"lm_head.other: lm_head is on part 2 of the pipeline"):
        _ = model.lm_head.other


def test_stages_are_taken_once_and_exist() -> None:
    cut = partition(model_of("example"), num_parts=2)
    for parts in ([], [2], [0, 0]):
        with pytest.raises(ValueError, match="one or more different numbers below 2"):
            cut.stages(parts)
    cut.stages([0])
    with pytest.raises(RuntimeError, match="taken already"):
        cut.stages([1])


def test_hooks_and_module_objects_move_with_their_part() -> None:
    model = model_of("example")
    layer, calls = model.layers[4], []
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    model.register_forward_hook(lambda *_: calls.append("model"))
    stages = partition(model, layout=[2, 3]).stages([0, 1])
    assert stages[1].module.layers[4] is layer
    forward_backward(stages, (batch_of("example")[0],))
    assert calls == ["model", "layer", "model"]


def test_layers_that_are_compiled_in_place_are_tried_as_others_and_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    model: Any = model_of("example")
    calls: list[str] = []
    for layer in model.layers:
        layer.compile()
        layer.register_forward_hook(lambda *_: calls.append("layer"))
        layer.mlp.compile()
        layer.mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    ids = batch_of("example")[0]
    expected = model(ids).detach()
    calls.clear()
    stages = partition(model, layout=[2, 3]).stages([0, 1])
    assert calls == []
    assert torch.equal(forward_backward(stages, (ids,)), expected)
    assert calls == ["mlp", "layer"] * LAYERS
    assert all(layer._compiled_call_impl is not None for layer in model.layers[:2])


def test_a_stage_can_be_copied_and_converted() -> None:
    ids, keywords = batch_of("qwen3")
    stages = partition(model_of("qwen3"), num_parts=3).stages(range(3))
    twins = copy.deepcopy(stages)
    output = forward_backward(stages, (ids,), keywords)
    assert torch.equal(forward_backward(twins, (ids,), keywords), output)
    for stage in twins:
        stage.module.double()
    torch.testing.assert_close(forward_backward(twins, (ids,), keywords).float(), output, rtol=1e-4, atol=1e-4)


def test_frozen_parameters_stay_frozen_and_parts_know_whether_they_train() -> None:
    model = model_of("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("model.layers.3."))
    cut = partition(model, layout=[1, 1, 2, 1])
    rows = {line.split()[0]: line.split() for line in cut.describe().splitlines()[1:5]}
    assert rows["1"][-1] == "0"
    assert rows["2"][-1] == f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,}"
    stages = cut.stages(range(4))
    assert [stage.trainable for stage in stages] == [False, False, True, False]
    forward_backward(stages, batch_of("qwen3")[:1], None, torch.ones(3, 9, VOCAB))
    assert {name.split(".")[2] for name in gradients(stages)} == {"3"}


def test_meta_models_are_cut_without_data() -> None:
    with torch.device("meta"):
        model = model_of("llama", tie_word_embeddings=True)
    full = model_of("llama", tie_word_embeddings=True)
    state = full.state_dict()
    stages = partition(model, layout=[2, 3]).stages([1])
    module = stages[0].module
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    module.load_state_dict({name: state[name] for name in module.state_dict()})
    module.model.rotary_emb = copy.deepcopy(full.model.rotary_emb)  # its buffer is in no state dict
    hidden = torch.randn(3, 9, 48)
    (expected,) = partition(full, layout=[2, 3]).stages([1])
    assert torch.equal(stages[0].run(hidden)[0], expected.run(hidden)[0])


# ----------------------------------------------------------------------------------------- how layered parts are called


def test_keywords_go_where_they_are_taken() -> None:
    cut = partition(model_of("llama"), num_parts=3)
    first, middle, last = (cut.keywords(part) for part in range(3))
    for name in ("attention_mask", "position_ids", "anything_for_the_kernels"):
        assert name in first
        assert name in middle
        assert name in last
    for name in ("input_ids", "inputs_embeds"):
        assert name in first
        assert name not in middle
    assert "logits_to_keep" in last
    assert "logits_to_keep" not in middle, "it would cut the hidden states"
    assert "labels" not in last


def test_a_batch_may_be_all_keywords() -> None:
    ids, keywords = batch_of("gpt2")
    model = model_of("gpt2")
    kinds = torch.randint(0, VOCAB, ids.shape)
    keywords = {"input_ids": ids, "token_type_ids": kinds, **keywords}  # GPT-2 adds the embedding of token types
    expected = model(**keywords, use_cache=False).logits
    assert torch.equal(forward_backward(partition(model, num_parts=3).stages(range(3)), (), keywords), expected)


def test_last_part_returns_the_models_own_loss() -> None:
    ids, keywords = batch_of("gpt2")
    model = model_of("gpt2")
    full = copy.deepcopy(model)
    keywords["labels"] = ids
    cut = partition(model, num_parts=3, loss=True)
    stages = cut.stages(range(3))
    loss = forward_backward(stages, (ids,), keywords)
    expected = full(ids, use_cache=False, **keywords).loss
    expected.backward()
    assert torch.equal(loss, expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))
    del keywords["labels"]
    with pytest.raises(ValueError, match="the batch has no `labels`"):
        forward_backward(stages, (ids,), keywords)
    with pytest.raises(ValueError, match="loss=True needs a model whose forward takes `labels`"):
        partition(model_of("example"), num_parts=2, loss=True)


def test_base_models_return_hidden_states() -> None:
    model = model_of("llama").model
    expected = model(batch_of("llama")[0], use_cache=False).last_hidden_state
    cut = partition(model, layout="E,t*3|t*2")
    assert str(cut.layout) == "E,t*3|t*2,N"
    assert torch.equal(forward_backward(cut.stages([0, 1]), batch_of("llama")[:1]), expected)


@pytest.mark.parametrize(
    ("architecture", "part", "received", "keywords", "error", "message"),
    [
        ("llama", 0, (torch.zeros(1, 4).long(), torch.ones(1, 4)), {}, TypeError, "pass all but the first by name"),
        ("llama", 0, (torch.zeros(1, 4).long(),), {"use_cache": True}, ValueError, "use_cache is not available"),
        ("llama", 1, torch.zeros(1, 4, 48), {"output_attentions": True}, ValueError, "output_attentions is not avail"),
        ("example", 1, torch.zeros(1, 4).long(), {}, TypeError, "expects hidden states from the part before it"),
    ],
)
def test_wrong_calls_are_explained(
    architecture: str, part: int, received: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    stages = partition(model_of(architecture), num_parts=2).stages([0, 1])
    with pytest.raises(error, match=message):
        stages[part].run(received, keywords)


# ------------------------------------------------------------------------------------------- architectures of one's own


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[: ids.size(1)]


class Block(nn.Module):
    """Returns a tuple, reads a module that all blocks share, and may itself be used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.power = 1  # read by the model, also of blocks that are elsewhere

    def forward(self, hidden: Tensor, bias: Tensor) -> tuple[Tensor, None]:
        return hidden + torch.tanh(self.fc(hidden) + bias), None


class Own(nn.Module):
    """Everything that `Architecture` describes, with layers in a dict, one of which appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos, self.drop, self.ln0 = nn.Embedding(11, 8), Positions(), nn.Dropout(0.0), nn.LayerNorm(8)
        block = Block()
        self.blocks = nn.ModuleDict({"a": block, "b": Block(), "c": block})
        self.bias, self.ln, self.out = Positions(), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids)))
        bias = self.bias(ids)
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=bias if scale is None else bias * scale**block.power)[0]
        return self.out(self.ln(hidden))


OWN = Architecture(
    embedding="tok",
    added=("pos",),
    before=("ln0", "drop"),
    layers="blocks",
    norm="ln",
    head="out",
    shared=("bias",),
)


def test_own_architecture_with_shared_and_repeated_modules() -> None:
    torch.manual_seed(0)
    model = Own()
    full = copy.deepcopy(model)
    ids, scale, grad = torch.randint(0, 11, (3, 5)), torch.rand(()), torch.randn(3, 5, 11)
    cut = partition(model, layout="E,t|t|t,H", architecture=OWN)
    shared = {name for group in cut.tied for names in group.names.values() for name in names}
    assert shared == {"blocks.a.fc.weight", "blocks.a.fc.bias", "blocks.c.fc.weight", "blocks.c.fc.bias", "bias.table"}
    assert [group.parts for group in cut.tied if group.names[0] == ("bias.table",)] == [(0, 1, 2)]
    stages = cut.stages(range(3))
    expected = full(ids, scale)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (ids,), {"scale": scale}, grad), expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))


def test_parametrized_modules_go_with_their_part() -> None:
    torch.manual_seed(0)
    model = Own()
    for block in model.blocks.values():
        if not nn.utils.parametrize.is_parametrized(block.fc):
            nn.utils.parametrizations.weight_norm(block.fc)
    nn.init.normal_(model.blocks["b"].fc.parametrizations.weight.original0)
    full = copy.deepcopy(model)
    ids, grad = torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 11)
    cut = partition(model, layout="E,t|t|t,H", architecture=OWN)
    stages = cut.stages(range(3))
    expected = full(ids)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (ids,), None, grad), expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))


class NeedsScale(Own):
    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return super().forward(ids, scale)


def test_layers_that_return_tuples_undeclared_are_found() -> None:
    model = NeedsScale()  # cannot be tried on hidden states alone
    for block in model.blocks.values():
        block.forward = lambda hidden, bias: (hidden + bias, None)
    stages = partition(model, layout="E,t|t|t,H", architecture=OWN).stages([1])
    with pytest.raises(
        TypeError, match=r"blocks.b returned a tuple, unlike .* write `-> tuple\[...\]` at that of Block"
    ):
        stages[0].run(torch.randn(3, 5, 8), {"scale": torch.ones(())})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": "embed"}, "the architecture names 'embed', which Own does not have"),
        ({"layers": "tok"}, "ModuleDict or nn.Sequential that is not empty, got Embedding"),
        ({"added": ()}, "pos.table: say in the architecture where 'pos' runs"),
        ({"before": ("drop",)}, "ln0.weight: say in the architecture where 'ln0' runs"),
    ],
)
def test_modules_that_an_architecture_does_not_place_are_errors(changes: dict[str, Any], message: str) -> None:
    model = Own()
    model.drop.p = 0.1
    with pytest.raises(ValueError, match=message):
        partition(model, num_parts=2, architecture=Architecture(**{**vars(OWN), **changes}))


class Pooled(Own):
    """Uses a parameter of its own before the layers and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids))) * self.gain
        bias = self.bias(ids)
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=bias)[0]
        return torch.tanh(self.out(self.ln(hidden * self.gain)) / 3)


@pytest.mark.parametrize("layout", ["E|t|t|t|H", "E,t|t*2|N|H", "E,t*3|H"])
@pytest.mark.parametrize("architecture", [OWN, None])
def test_what_a_model_computes_between_its_modules_happens_once(layout: str, architecture: Architecture | None) -> None:
    """Scaled embeddings and capped logits, with a parameter of the model itself; described or found by running."""
    torch.manual_seed(0)
    model = Pooled()
    full, ids, grad = copy.deepcopy(model), torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 11)
    cut = partition(model, layout=layout, architecture=architecture)
    stages = cut.stages(range(cut.num_parts))
    expected = full(ids)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (ids,), None, grad), expected)
    found, wanted = gradients(stages), full_gradients(full)
    assert set(found) == set(wanted)
    gains = [stage.module.gain.grad for stage in stages if stage.module.gain.grad is not None]
    torch.testing.assert_close(sum(gains), wanted["gain"])
    assert_same(
        {"head": found["out.weight"], "tok": found["tok.weight"]},
        {"head": wanted["out.weight"], "tok": wanted["tok.weight"]},
    )


class ReversedGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -0.5


class GradChanged(Own):
    """Code between the layers that leaves the hidden states as they are, and not their gradient."""

    how, where = "function", ("a", "b", "c", "")

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.tok(ids)
        for name, block in self.blocks.items():
            hidden = self.changed(hidden) if name in self.where else hidden
            hidden = block(hidden=hidden, bias=hidden.new_zeros(()))[0]
        return self.out(self.ln(self.changed(hidden) if "" in self.where else hidden))

    def changed(self, hidden: Tensor) -> Tensor:
        if self.how == "function":
            return ReversedGrad.apply(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 0.5)
        return hidden if self.how == "hook" else hidden[:]


@pytest.mark.parametrize("how", ["function", "hook", "hook behind a view"])
@pytest.mark.parametrize("where", [GradChanged.where, ("b",)])
@pytest.mark.parametrize("layout", ["E|t|t|t|H", "E,t|t*2|N|H", "E,t*3|H"])
def test_what_a_model_does_to_gradients_between_its_modules_happens_once(
    layout: str, where: tuple[str, ...], how: str
) -> None:
    torch.manual_seed(0)
    model = GradChanged()
    model.how, model.where = how, where
    check_without_addends(model, layout)


def check_without_addends(model: Own, layout: str) -> None:
    """A model that uses nothing beside its embedding, blocks, norm and head: outputs, and the gradient through all."""
    for unused in ("pos", "ln0", "bias"):
        delattr(model, unused)
    full, ids, grad = copy.deepcopy(model), torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 11)
    cut = partition(model, layout=layout)
    stages = cut.stages(range(cut.num_parts))
    expected = full(ids)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (ids,), None, grad), expected)
    found, wanted = gradients(stages), full_gradients(full)
    assert set(found) == set(wanted)
    assert_same({"tok": found["tok.weight"]}, {"tok": wanted["tok.weight"]})


class Streams(Own):
    """Several vectors a token, made of one that the embedding returns (hyper-connections)."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.tok(ids).unsqueeze(2).expand(-1, -1, 3, -1).contiguous()
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=hidden.new_zeros(()))[0]
        return self.out(self.ln(hidden.mean(2)))


@pytest.mark.parametrize("layout", ["E,t|t*2|H", "E|t*3,H"])
def test_streams_made_of_one_embedding_are_found_and_cut(layout: str) -> None:
    torch.manual_seed(0)
    model = Streams()
    check_without_addends(model, layout)
    assert infer_architecture(model).embedding == "tok"


def test_meta_models_with_code_between_modules_are_cut_alike() -> None:
    with torch.device("meta"):
        model = Pooled()
    (stage,) = partition(model, layout="E|t|t|t|H", architecture=OWN).stages([1])
    assert any("EnterStream" in type(h).__name__ for h in stage.module.blocks["a"]._forward_pre_hooks.values())


class Residual(Own):
    """Every layer reads the embedding's output, beside the hidden states."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        first = hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids)))
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=first * 0.5)[0]
        return self.out(self.ln(hidden)) + self.bias(ids).sum()


class Collected(Own):
    """Adds something of every layer to its output."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids)))
        bias, total = self.bias(ids), 0.0
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=bias)[0]
            total = total + hidden.mean()
        return self.out(self.ln(hidden)) + total


class Hidden(Own):
    """Hands something on from the first layer to the last in an attribute."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids)))
        bias = self.bias(ids)
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=bias)[0]
            self.seen = hidden if not hasattr(self, "seen") else self.seen
        seen, self.seen = self.seen, None
        del self.seen
        return self.out(self.ln(hidden)) + seen.mean()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Residual, r"part 1 \(t\) of Residual does not .*: blocks.b takes 'bias', which depends on .* of other parts"),
        (Collected, r"part 2 \(t,H\) of Collected does not compute what the whole model does there: what it returns"),
        (Hidden, r"part 2 \(t,H\) of Hidden does not compute what the whole model does there"),
    ],
)
def test_parts_that_need_more_than_the_hidden_states_are_refused(kind: type[nn.Module], message: str) -> None:
    torch.manual_seed(0)
    model = kind()
    with pytest.raises(ValueError, match=message):
        partition(model, layout="E,t|t|t,H", architecture=OWN)
    assert not any(isinstance(m, Absent) for m in model.modules()), "the model was not touched"
    assert partition(model, layout="E,t*3,H", architecture=OWN).num_parts == 1


class Counting(nn.Module):
    """Goes by numbers in containers, and adds to a list that all layers have."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(8, 8), losses
        self.counts, self.nested = Counter({"calls": 0}), {"of": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        self.nested["of"].append(1)
        self.losses.append(x.mean())
        return x + self.linear(x) * (self.counts["calls"] + len(self.nested["of"]))


class CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.embed, self.layers = nn.Embedding(7, 8), nn.ModuleList([Counting(self.losses), Counting(self.losses)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_trying_the_parts_leaves_what_layers_keep_in_containers() -> None:
    model = CountingModel()
    assert partition(model, num_parts=2).num_parts == 2
    assert model.losses == []
    assert all(layer.counts == {"calls": 0} and layer.nested == {"of": [0]} for layer in model.layers)


class Conditional(nn.Module):
    """Does something to the hidden states after a layer if its ids say so."""

    def __init__(self, after: int, kind: str) -> None:
        super().__init__()
        self.after, self.kind = after, kind
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.layers, self.extra = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), nn.Linear(8, 8)

    def says(self, ids: Tensor) -> bool:
        if self.kind == "bool":
            return bool((ids == 3).all())
        if self.kind == "item":
            return int(ids.max().item()) % 2 == 1
        assert int(ids.min()) < 7, "a check that changes nothing"
        return False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.after and self.says(ids):
                x = x + self.extra(x).sin()
        return self.out(x)


@pytest.mark.parametrize("kind", ["bool", "item", "check"])
@pytest.mark.parametrize("after", [1, 2])
def test_what_a_model_decides_by_its_ids_is_done_once_or_refused(after: int, kind: str) -> None:
    """Parts after the first have no ids. What lies before their first module is not used."""
    torch.manual_seed(0)
    model = Conditional(after, kind)
    whole = copy.deepcopy(model)
    if after == 2 and kind != "check":
        with pytest.raises(ValueError, match=r"part 1 \(t\*2,H\) of Conditional .*: the model decides by its ids"):
            partition(model, layout="E,t*2|t*2,H")
        return
    first, second = partition(model, layout="E,t*2|t*2,H").stages(range(2))
    for ids in (torch.full((2, 5), 3), torch.full((2, 5), 2), torch.arange(5).expand(2, 5)):
        torch.testing.assert_close(second.module(first.module(ids)), whole(ids), rtol=0, atol=0)


class Twofold(Own):
    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden, bias = self.tok(ids) + self.pos(ids), self.bias(ids)
        for _ in range(2):
            for block in self.blocks.values():
                hidden = block(hidden=hidden, bias=bias)[0]
        return self.out(self.ln(self.drop(self.ln0(hidden))))


def test_layers_that_run_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks.a cannot be placed .*: Twofold calls it 2 times in a forward"):
        partition(Twofold(), num_parts=2, architecture=OWN)
    with pytest.raises(ValueError, match=r"cannot be found by running it \('blocks': blocks.a is called 2 times"):
        partition(Twofold(), num_parts=2)


class OnIds(Own):
    """Looks at ids outside of its modules."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(ids | 0, scale)


def test_models_that_cannot_run_on_hidden_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"part 1 \(t\) of OnIds cannot run without the other parts"):
        partition(OnIds(), layout="E,t|t|t,H", architecture=OWN)


class Untried(Own):
    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        if ids.shape != (3, 5):
            raise RuntimeError("only 3 x 5")
        return super().forward(ids, scale)


def test_models_that_cannot_be_tried_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="could not try Untried on made-up inputs, and so not check .*only 3 x 5"):
        partition(Untried(), layout="E,t|t|t,H", architecture=OWN)


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


class InPlace(Own):
    """Changes what it is given, as CTRL does."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.ln0(self.tok(ids) + self.pos(ids))) if not ids.is_floating_point() else ids
        hidden *= 2
        bias = self.bias(ids)
        for block in self.blocks.values():
            hidden = block(hidden=hidden, bias=bias)[0]
        return self.out(self.ln(hidden))


@pytest.mark.parametrize("layout", ["E|t*3,H", "E,t|t*2,H"])
def test_input_that_the_model_changes_in_place_is_guarded(layout: str) -> None:
    torch.manual_seed(0)
    model, grad = InPlace(), torch.randn(3, 5, 11)
    full, ids = copy.deepcopy(model), torch.randint(0, 11, (3, 5))
    stages = partition(model, layout=layout, architecture=OWN).stages([0, 1])
    expected = full(ids)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (ids,), None, grad), expected)
    assert torch.equal(gradients(stages)["tok.weight"], full.tok.weight.grad)


@pytest.mark.parametrize("name", ["GPTNeoX", "Phi3", "Granite", "Cohere", "Gemma2", "Phi", "OPT"])
def test_architectures_of_other_models_are_found(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    more = {"Granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0}, "Gemma2": {"head_dim": 12}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(**SMALL, pad_token_id=0, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids, keywords = batch_of("llama")
    expected = whole_logits(model, ids, keywords)
    cut = partition(model, layout="E,t|t|t,H")
    assert torch.equal(forward_backward(cut.stages(range(3)), (ids,), keywords), expected)


def test_unknown_architecture_says_how_to_describe_it() -> None:
    with pytest.raises(ValueError, match=r"needs more than its first.*Architecture\(.*layers='blocks'.*of_modules"):
        partition(NeedsScale(), num_parts=2)


def test_an_architecture_is_found_by_the_order_of_calls() -> None:
    assert infer_architecture(Own()) == replace(OWN, before=("ln0",))  # dropout has nothing to place


# ------------------------------------------------------------------------------------------------- sequences of modules


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), block, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "options",
    [{"num_parts": 3}, {"layout": "t|t*2|t*2|t"}, {"layout": [6]}, {"split_points": ["2.0", "2.2", "3"]}],
    ids=str,
)
def test_sequential_parts_equal_the_model(options: dict[str, Any]) -> None:
    model = sequential()
    full = copy.deepcopy(model)
    x, grad = torch.randn(5, 4), torch.randn(5, 3)
    cut = partition(model, **options)
    stages = cut.stages(range(cut.num_parts))
    expected = full(x)
    expected.backward(grad)
    assert torch.equal(forward_backward(stages, (x,), None, grad), expected)
    assert_same(gradients(stages), full_gradients(full))
    united = {name: value for stage in stages for name, value in stage.module.state_dict().items()}
    assert_same(united, full.state_dict())  # running statistics of the batch norm included


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Both(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def test_a_tuple_inside_a_sequential_arrives_as_one_argument_on_the_next_part_as_well() -> None:
    x = torch.randn(2, 3)
    stages = partition(nn.Sequential(Twice(), Both()), layout=[1, 1]).stages([0, 1])
    assert torch.equal(forward_backward(stages, (x,)), x * (x * 2))


class Split(nn.Module):
    """Returns a tuple and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> StageOutput:
        y = self.fc(x)
        return StageOutput((y, torch.tanh(y)), skips={"early": y * 2, "gate": torch.sigmoid(y)})


class Add(nn.Module):
    """Takes the elements of a tuple, a keyword of the batch, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, a: Tensor, b: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"hidden": a + b * self.scale, "square": (a * b) * mask}


class Take(nn.Module):
    """Takes a dict by name, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, square: Tensor, *, gate: Tensor) -> Tensor:
        return self.fc(hidden) * gate + square


class Join(nn.Module):
    def forward(self, hidden: Tensor, early: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        return (hidden + early) * gate * mask


EDGES = [(0, 3, "early"), (0, 3, "gate"), (0, 2, "gate")]


@pytest.mark.parametrize("groups", [[1, 1, 1, 1], [4], [2, 2], [1, 3], [3, 1], [1, 2, 1]], ids=str)
def test_modules_in_a_list_pass_tuples_dicts_and_skips_whatever_the_parts(groups: list[int]) -> None:
    torch.manual_seed(0)
    modules = [Split(), Add(), Take(), Join()]
    split, add, take, join = copy.deepcopy(modules)
    x, mask, grad = torch.randn(5, 6), torch.rand(5, 1), torch.randn(5, 6)
    first = split(x)
    hidden = take(**add(*first.output, mask=mask), gate=first.skips["gate"])
    expected = join(hidden, first.skips["early"], first.skips["gate"], mask)
    expected.backward(grad)

    starts = [sum(groups[:i]) for i in range(len(groups) + 1)]
    parts = [modules[a] if b - a == 1 else modules[a:b] for a, b in itertools.pairwise(starts)]
    cut = Partition.of_modules(parts, edges=EDGES)
    stages = cut.stages(range(len(groups)))
    assert torch.equal(forward_backward(stages, (x,), {"mask": mask}, grad), expected)
    full = {f"{i}.{name}": g for i, m in enumerate((split, add, take, join)) for name, g in full_gradients(m).items()}
    found = gradients(stages)
    assert set(found) == set(full)
    for name, tensor in full.items():  # three gradients of one tensor may meet in another order: exact to rounding
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def test_edges_past_a_part_are_reported_and_others_are_not() -> None:
    def edges(*parts: Any) -> list[tuple[int, int, str]]:
        return [tuple(edge) for edge in Partition.of_modules(parts, edges=EDGES).edges]

    assert edges(Split(), Add(), Take(), Join()) == [(0, 2, "0.gate"), (0, 3, "0.early"), (0, 3, "0.gate")]
    assert edges([Split(), Add()], [Take()], Join()) == [(0, 2, "0.early"), (0, 2, "0.gate")]
    assert edges([Split(), Add(), Take()], Join()) == [], "neighbours pass them along with the output"
    assert edges([Split(), Add(), Take(), Join()]) == []
    stages = Partition.of_modules([Split(), Add(), Take(), Join()], edges=EDGES).stages(range(4))
    assert stages[0].sends == {"0.early": (3,), "0.gate": (2, 3)}
    assert stages[3].receives == {"0.early": 0, "0.gate": 0}
    with pytest.raises(ValueError, match=r"part 3 receives skips \['0.early', '0.gate'\], but got \[\]"):
        stages[3].run(torch.randn(5, 6), {"mask": torch.ones(5, 1)})


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ((2, 1, "gate"), "must go from a module to a later one among the 3 modules"),
        ((0, 3, "gate"), "must go from a module to a later one"),
        ((0, 2, "door"), "the forward of Take takes no keyword 'door'"),
    ],
)
def test_edges_that_cannot_be_are_refused(edge: tuple[int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition.of_modules([Split(), Add(), Take()], edges=[edge])


def test_skips_that_were_declared_otherwise_are_found_when_they_are_returned() -> None:
    stages = Partition.of_modules([Split(), Add(), Take()], edges=[(0, 2, "gate")]).stages([0])
    with pytest.raises(
        ValueError, match=r"returned skips \['early', 'gate'\], but edges from it are declared for \['gate'\]"
    ):
        stages[0].run((torch.randn(5, 6),))
    with pytest.raises(ValueError, match="module 2 gets 'gate' from two modules"):
        Partition.of_modules([Split(), Split(), Take()], edges=[Edge(0, 2, "gate"), Edge(1, 2, "gate")])


def test_a_module_that_stands_in_the_list_twice_is_tied() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    other = nn.Linear(6, 6)
    full = nn.Sequential(*copy.deepcopy([layer, other, layer]))
    x, grad = torch.randn(2, 6), torch.randn(2, 6)
    expected = full(x)
    expected.backward(grad)
    (alone,) = Partition.of_modules([[layer, other, layer]]).stages([0])
    assert torch.equal(forward_backward([alone], (x,)), expected)
    cut = Partition.of_modules([layer, [other, layer]])
    assert [group.names for group in cut.tied] == [{0: (f"0.{n}",), 1: (f"2.{n}",)} for n in ("weight", "bias")]
    stages = cut.stages([0, 1])
    assert torch.equal(forward_backward(stages, (x,), None, grad), expected)
    assert_same(gradients(stages, cut.tied), full_gradients(full))


def test_a_module_of_two_parts_that_is_tied_to_a_third_gives_each_a_copy() -> None:
    first, twice = nn.Linear(6, 6), nn.Linear(6, 6)
    twice.weight = first.weight
    stages = Partition.of_modules([first, twice, twice]).stages(range(3))
    weights = [group.parameter(stage) for stage in stages for group in stage.tied if "weight" in str(group)]
    assert len({weight.data_ptr() for weight in weights}) == len(weights) == 3
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_copies_of_a_shared_module_are_tied_to_the_others_of_their_part() -> None:
    shared, own = nn.Linear(6, 6), nn.Linear(6, 6)
    own.weight = shared.weight
    first, second = Partition.of_modules([shared, [own, shared]]).stages([0, 1])
    copied = second.module.get_submodule("2")
    assert copied is not shared
    assert copied.weight is own.weight
    assert copied.weight is not first.module.get_submodule("0").weight


def test_lists_of_modules_can_be_balanced() -> None:
    modules = [nn.Linear(6, 6), nn.Linear(6, 60), nn.Linear(60, 6), nn.Linear(6, 6)]
    assert str(partition(modules, num_parts=2).layout) == "t*2|t*2"
    assert str(partition(modules, num_parts=2, costs=[9, 1, 1, 1]).layout) == "t|t*3"


def test_describe_shows_who_holds_what() -> None:
    cut = partition(model_of("qwen3"), layout=[2, 3])
    lines = cut.describe().splitlines()
    assert lines[0].split() == ["part", "layout", "modules", "parameters", "trainable", "tied"]
    assert lines[1].split()[:5] == ["0", "E,t*2", "model.embed_tokens", "to", "model.layers.1"]
    assert lines[2].split()[-1] == "lm_head.weight"
    assert lines[3] == "tied: model.embed_tokens.weight on part 0, lm_head.weight on part 1"
    assert repr(cut) == "Partition(Qwen3ForCausalLM, layout='E,t*2|t*3,H')"
    listed = Partition.of_modules([[Split(), Add()], Take(), Join()], edges=EDGES).describe()
    assert "edge: 0.gate from part 0 to part 2" in listed
