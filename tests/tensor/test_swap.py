"""parallelize, explain and unparallelize: plans, what they refuse, what they leave behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.parallel.declared import auto_plan
from fastpar.parallel.heads import key_value_heads
from fastpar.parallel.plan import match_plan
from fastpar.tensor import ColumnParallelLinear, VocabParallelEmbedding, VocabParallelHead, full_parameter
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.models import ARCHITECTURES, VOCAB, build_model, logits_of
from tests.tensor.family_models import tiny_model

MLP_PLAN = {"0": "colwise", "2": "rowwise"}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


class ResidualMLP(nn.Module):
    """The residual is added inside the module, so that its input gradient is not all a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualMLP() for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# ---------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ({"0": "colwize"}, ValueError, r"plan\['0'\] is 'colwize'.*did you mean 'colwise'"),
        ({"layer.*": "colwise"}, ValueError, "'layer.\\*' matches no module; near misses"),
        ({"0": 3}, TypeError, "must be a str or fastpar.Style, got int"),
        ({"1": "colwise"}, TypeError, "1 has style 'colwise': expected an nn.Linear or Conv1D, got GELU"),
        ({"1": "vocab"}, TypeError, "expected nn.Embedding or nn.Linear, got GELU"),
        ({"0": "dropout"}, TypeError, "expected nn.Dropout, got Linear"),
        ({"0": fp.parallel.ColwiseStyle(sections=3)}, ValueError, "10 output features do not form 3 equal sections"),
        ({"0": fp.parallel.ColwiseStyle(sections=(4, 4))}, ValueError, r"sections \[4, 4\] must add up to its 10"),
        ("magic", ValueError, "plan must be 'auto' or a dict"),
        ("auto", ValueError, "does not know Sequential"),
    ],
)
def test_wrong_plan_is_a_clear_error_and_leaves_the_model_alone(plan: Any, error: type, message: str) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        fp.parallelize(model, None, plan)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_pattern_star_stands_for_one_component() -> None:
    model = nn.ModuleDict({"a": mlp(), "b": mlp()})
    assert list(match_plan(model, {"*.0": "colwise"})) == ["a.0", "b.0"]
    assert match_plan(model, {"*.0": "colwise", "b.0": "rowwise"})["b.0"].name == "rowwise"  # later patterns win


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_auto_plan_splits_every_large_weight(architecture: str) -> None:
    model = build_model(architecture, torch.float32)
    styles = match_plan(model, auto_plan(model))
    split = {path for path, style in styles.items() if style.name in ("colwise", "rowwise", "vocab")}
    large = {
        name.rpartition(".")[0]
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.dim() == 2 and "wpe" not in name
    }
    assert split == large


def test_key_value_heads_is_the_docstring_example() -> None:
    assert key_value_heads(12, 2, 4) == [[0], [0], [1], [1]]
    assert key_value_heads(12, 3, 2) == [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]]


def _heads_error() -> str:
    model = build_model("llama", torch.float32)
    with pytest.raises(ValueError, match="must be divisible by the tensor-parallel size") as info:
        fp.parallelize(model, FakeGroup(5))
    return str(info.value)


class FakeGroup(fp.comm.Communicator):
    """A communicator that claims a size; enough for checks that come before any collective."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size


def test_heads_that_cannot_be_split_name_the_sizes_that_work() -> None:
    message = _heads_error()
    assert "model.layers.0.self_attn: the number of attention heads (12)" in message
    assert "size (5); sizes that work: [1, 2, 3, 4, 6, 12]" in message


def test_attention_dropout_that_would_depend_on_the_layout_is_refused() -> None:
    model = build_model("gpt2", torch.float32, attn_pdrop=0.1)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn.attn_dropout is 0.1.*fastpar_eager"):
        fp.parallelize(model, FakeGroup(2))


def test_parameters_inside_a_block_need_a_style() -> None:
    model = build_model("qwen3", torch.float32)
    plan = auto_plan(model)
    del plan["model.layers.*.self_attn.q_norm"]
    with pytest.raises(ValueError, match=r"self_attn.q_norm .* inside the block .* no style. Say 'partial'"):
        fp.parallelize(model, FakeGroup(2), plan)


def test_sequence_parallelism_needs_to_know_the_stream() -> None:
    with pytest.raises(ValueError, match='the style "stream"'):
        fp.parallelize(mlp(), FakeGroup(2), MLP_PLAN, sequence_parallel=True)


def test_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ValueError, match="meta device; materialise"):
        fp.parallelize(model, None, MLP_PLAN)
    model = mlp()
    model.register_buffer("angles", torch.ones(2, device="meta"), persistent=False)
    for group in (None, FakeGroup(2)):
        with pytest.raises(ValueError, match="angles is on the meta device; materialise"):
            fp.parallelize(model, group, MLP_PLAN)
    with pytest.raises(ValueError, match="angles is on the meta device: give it its values"):
        fp.zero.shard(model, torch.optim.SGD(model.parameters()), group=fp.Communicator(None))


def test_mesh_dims_it_does_not_handle_are_refused() -> None:
    class Piped(fp.Mesh):
        def __init__(self) -> None:
            self.tp_grid = None

        def size(self, dim: str) -> int:
            return 2 if dim == "pp" else 1

    with pytest.raises(ValueError, match="tp, cp, ep, etp and data-parallel dims only, but the mesh has pp=2"):
        fp.parallelize(mlp(), Piped(), MLP_PLAN)


# ------------------------------------------------------------------------------------------------------------- the swap


def _dict_plan_matches(sequence_parallel: bool) -> None:
    """A plan without blocks: every linear takes care of its own input, also with a residual inside the module."""
    torch.manual_seed(0)
    plain = Stack().double()
    parallel = copy.deepcopy(plain)
    plan = {"layers.*": "stream", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
    fp.parallelize(parallel, dist.group.WORLD, plan, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, out = plain(a), parallel(b)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    out.square().sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-11)
    for (name, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_parameter(p, p.grad), q.grad, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_dict_plan_matches_unsharded_with_a_residual_inside(sequence_parallel: bool) -> None:
    run_ranks(3, _dict_plan_matches, sequence_parallel)


def _forward_counts(architecture: str, layers: int, sequence_parallel: bool) -> tuple[dict[str, int], int]:
    overrides = {"n_layer": layers} if architecture == "gpt2" else {"num_hidden_layers": layers}
    model = build_model(architecture, torch.float32, **overrides)
    fp.parallelize(model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    ids = torch.zeros(2, 12, dtype=torch.int64)
    logits_of(model, ids)  # with a split sequence the first forward is compared with another
    with count_collectives() as counts, fp.comm.record() as log:
        logits_of(model, ids)
    assert counts.total == len(log)
    return dict(counts.by_op), sum(entry.nbytes for entry in log)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_collectives_per_layer_forward_and_the_same_bytes_with_sequence_parallelism(architecture: str) -> None:
    per_layer: dict[bool, tuple[int, int]] = {}
    for sequence_parallel in (False, True):
        (few, few_bytes), (many, many_bytes) = (
            run_ranks(2, _forward_counts, architecture, layers, sequence_parallel)[0] for layers in (1, 3)
        )
        per_layer[sequence_parallel] = ((sum(many.values()) - sum(few.values())) // 2, (many_bytes - few_bytes) // 2)
    activation = 2 * 12 * 48 * 4  # bytes of [batch, seq, hidden] in float32
    assert per_layer[False] == (2, 2 * activation)  # two all-reduces, each 2 (R - 1) / R = 1 activation on 2 ranks
    assert per_layer[True] == (4, 2 * activation)  # an all-gather and a reduce-scatter, half an activation each


def _loss_collectives(tied: bool) -> tuple[int, int]:
    model = build_model("llama", torch.float32, num_hidden_layers=1, tie_word_embeddings=tied)
    fp.parallelize(model, dist.group.WORLD)
    ids = torch.randint(0, VOCAB, (2, 9))
    logits = logits_of(model, ids)
    head = model.lm_head
    with count_collectives() as forward:
        loss = fp.ops.vocab_parallel_cross_entropy(logits, ids, group=head.comm, vocab_range=head.vocab_range)
    leaf = logits.detach().requires_grad_()
    again = fp.ops.vocab_parallel_cross_entropy(leaf, ids, group=head.comm, vocab_range=head.vocab_range)
    with count_collectives() as backward:
        again.backward()
    loss.backward()
    return forward.total, backward.total


@pytest.mark.parametrize("tied", [False, True])
def test_loss_costs_one_collective_forward_and_none_backward(tied: bool) -> None:
    assert run_ranks(2, _loss_collectives, tied) == [(1, 0), (1, 0)]


def _differing_weights() -> tuple[str, bool]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="differs between the ranks") as info:
        fp.parallelize(model, dist.group.WORLD, MLP_PLAN)
    assert type(model[0]) is nn.Linear
    fp.parallelize(model, dist.group.WORLD, MLP_PLAN, sync_weights="broadcast")
    torch.manual_seed(0)
    expected = nn.Linear(4, 4).weight.detach()
    return str(info.value), torch.equal(full_parameter(model[0].weight), expected)


def test_weights_that_differ_between_ranks_are_found_or_broadcast() -> None:
    for message, equal in run_ranks(2, _differing_weights):
        assert message.startswith("0.weight differs")
        assert equal


def _differing_falcon() -> None:
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    mesh = fp.init_mesh(tp=2)
    torch.manual_seed(dist.get_rank())
    model = transformers.FalconForCausalLM(config)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight differs between the ranks"):
        fp.parallelize(model, mesh)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight differs between the ranks"):
        fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=1)
    fp.parallelize(model, mesh, sync_weights="broadcast")
    mesh.close()


def test_weights_are_compared_before_layers_with_their_own_forward_are_tried() -> None:
    run_ranks(2, _differing_falcon)


def _tied_weights() -> None:
    model = build_model("qwen3", torch.float32)
    embedding = model.model.embed_tokens
    original = embedding.weight
    fp.parallelize(model, dist.group.WORLD)
    assert isinstance(embedding, VocabParallelEmbedding)
    assert isinstance(model.lm_head, VocabParallelHead)
    assert model.lm_head.weight is embedding.weight
    assert original.numel() == 0, "the full weight must be freed"
    fp.unparallelize(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight is original
    assert type(model.lm_head) is nn.Linear


def test_tied_weights_stay_tied_and_full_weights_are_freed() -> None:
    run_ranks(2, _tied_weights)


def _second_name_of_a_bias() -> None:
    """BERT's head holds the bias of its decoder, which it does not read."""
    plain = tiny_model("bert", "BertForMaskedLM")
    model: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, gather_logits=True)
    head = model.cls.predictions
    assert head._parameters["bias"] is head.decoder.bias
    ids = torch.arange(1, 15).view(2, 7)
    outputs = [m(input_ids=ids, labels=ids) for m in (plain, model)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(whole(head.decoder.bias.grad), plain.cls.predictions.bias.grad, rtol=1e-4, atol=1e-6)
    names = {name: whole(value) for name, value in model.state_dict().items()}
    assert all(torch.equal(names[name], value) for name, value in plain.state_dict().items())
    fp.unparallelize(model)
    assert head.bias is head.decoder.bias
    assert torch.equal(head.bias, plain.cls.predictions.bias)


def test_a_second_name_for_a_split_parameter_stays_one() -> None:
    run_ranks(2, _second_name_of_a_bias)


def _assigned_weights(dtype: torch.dtype) -> None:
    model = build_model("gpt2", torch.float32)  # packed queries, keys and values
    torch.manual_seed(5)
    values = {name: torch.randn_like(value).to(dtype) for name, value in model.state_dict().items()}
    values["lm_head.weight"] = values["transformer.wte.weight"]  # tied
    fp.parallelize(model, dist.group.WORLD)
    model.load_state_dict(values, assign=True)
    assert all(torch.equal(whole(value), values[name]) for name, value in model.state_dict().items())
    fp.unparallelize(model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_loaded_with_assign_are_the_split_ones(dtype: torch.dtype) -> None:
    run_ranks(2, _assigned_weights, dtype)


class Gained(nn.Module):
    """A block with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gain)


def _block_with_a_parameter() -> None:
    model = nn.Sequential(Gained(), nn.Linear(6, 6))
    names = set(vars(model[0]))
    plan = {"0": "block", "0.up": "colwise", "0.gain": "partial", "0.down": "rowwise"}
    fp.parallelize(model, dist.group.WORLD, plan)
    fp.unparallelize(model)
    assert set(vars(model[0])) == names


def _batch_norm_on_features() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)), nn.Linear(6, 6))
    plan = {"0": "block", "0.0": "colwise", "0.1": "partial", "0.2": "rowwise"}
    with pytest.raises(ValueError, match=r"0.1 \(BatchNorm1d\) has style 'partial' .* normalises all 8"):
        fp.parallelize(model, dist.group.WORLD, plan)


def test_batch_normalisation_of_split_features_is_refused() -> None:
    run_ranks(2, _batch_norm_on_features)


def test_a_block_with_a_parameter_of_its_own_keeps_nothing_after_the_swap_is_undone() -> None:
    run_ranks(2, _block_with_a_parameter)


def _gradient_hooks() -> None:
    model, plan = nn.Sequential(nn.LayerNorm(6), mlp()), {f"1.{name}": style for name, style in MLP_PLAN.items()}
    for register in (model[1][0].weight.register_hook, model[0].weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(ValueError, match=r"weight has hooks on its gradient.*after parallelize"):
            fp.parallelize(model, dist.group.WORLD, plan)
        handle.remove()
    fp.parallelize(model, dist.group.WORLD, plan)
    parts = model[0], model[1][0]  # whole on every rank, and split
    x = torch.randn(2, 6)
    model(x).square().sum().backward()
    wanted = [3 * part._parameters["weight"].grad for part in parts]
    model.zero_grad()
    for part in parts:
        part.weight.register_hook(lambda grad: 3 * grad)
    model(x).square().sum().backward()
    for part, grad in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part._parameters["weight"].grad.to_local(), grad.to_local(), rtol=0, atol=0)


def test_hooks_on_gradients_run_if_they_come_after_the_split_and_are_refused_before() -> None:
    run_ranks(2, _gradient_hooks)


def _hooks_and_identity() -> None:
    model = mlp()
    first, calls = model[0], []
    first.register_forward_hook(lambda *_: calls.append(1))
    fp.parallelize(model, dist.group.WORLD, MLP_PLAN)
    assert model[0] is first
    assert isinstance(first, ColumnParallelLinear)
    calls.clear()  # it has been called on trial
    model(torch.randn(2, 6))
    fp.unparallelize(model)
    model(torch.randn(2, 6))
    assert calls == [1, 1]
    assert set(vars(first)) == set(vars(mlp()[0]))


def test_swap_keeps_modules_and_their_hooks() -> None:
    run_ranks(2, _hooks_and_identity)


def _state_dict_is_canonical() -> None:
    model = build_model("gpt2", torch.float32)
    expected = copy.deepcopy(model).state_dict()
    fp.parallelize(model, dist.group.WORLD)
    state = get_model_state_dict(model)
    assert set(state) == set(expected)
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, expected[name]), name
    model.load_state_dict(expected)  # an ordinary checkpoint goes straight in
    for name, param in model.named_parameters():
        assert torch.equal(full_parameter(param), expected[name]), name


def test_state_dict_has_the_names_and_values_of_the_unsharded_model() -> None:
    run_ranks(2, _state_dict_is_canonical)


def test_swapping_twice_and_explaining_nothing_are_errors() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="has not been parallelised"):
        fp.explain(model)
    with pytest.raises(ValueError, match="has not been parallelised"):
        fp.unparallelize(model)
    fp.parallelize(model, None, MLP_PLAN)
    with pytest.raises(ValueError, match="parallelised already"):
        fp.parallelize(model, None, MLP_PLAN)


def _explained() -> str:
    model = build_model("llama", torch.float32, num_hidden_layers=1, num_key_value_heads=3)
    fp.parallelize(model, dist.group.WORLD)
    return str(fp.explain(model))


def test_explain_says_how_every_parameter_is_stored_and_why() -> None:
    text = run_ranks(2, _explained)[0]
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "[48, 48] -> [24, 48]" in lines["model.layers.0.self_attn.q_proj"]
    assert "kept whole, rank 0 uses 24 of 12" in lines["model.layers.0.self_attn.k_proj"]
    assert "[257, 48] -> [129, 48]" in lines["lm_head"]
    assert "vocab_parallel_cross_entropy" in lines["(loss)"]


def _failing_apply() -> None:
    """A tied parameter that the plan splits in two ways is found while swapping; all is put back."""
    model = mlp()
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.add_module("3", nn.Linear(10, 6))
    model[3].weight = model[2].weight
    with pytest.raises(ValueError, match="shared by modules that the plan splits differently"):
        fp.parallelize(model, dist.group.WORLD, {"0": "colwise", "2": "rowwise", "3": "colwise"})
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Linear]
    assert model[3].weight is model[2].weight
    assert model[0].weight.numel() == 60


def test_failed_swap_puts_everything_back() -> None:
    run_ranks(2, _failing_apply)


def _clipped() -> tuple[float, float]:
    plain = build_model("gpt2", torch.float64)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, gather_logits=True)
    ids = torch.arange(18).view(2, 9)
    for model in (plain, parallel):
        logits_of(model, ids).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(), expected.item()


def test_gradient_norm_by_torch_is_that_of_the_unsharded_model() -> None:
    for norm, expected in run_ranks(2, _clipped):
        assert norm == pytest.approx(expected, rel=1e-10)


def _mesh_step(dp: int, tp: int) -> dict[str, Tensor]:
    """One step with dropout on a data- and tensor-parallel mesh: the averaged gradients, whole."""
    mesh = fp.init_mesh(dp_replicate=dp, tp=tp, device="cpu")
    model = fp.parallelize(build_model("example", torch.float64, dropout=0.3), mesh, sequence_parallel=True)
    torch.manual_seed(4)
    ids, labels = torch.randint(0, VOCAB, (2, 4, 9)).unbind(0)
    share = slice(mesh.rank("dp") * 4 // dp, (mesh.rank("dp") + 1) * 4 // dp)
    head = model.lm_head
    torch.manual_seed(5)
    loss = fp.ops.vocab_parallel_cross_entropy(
        model(ids[share]), labels[share], group=head.comm, vocab_range=head.vocab_range
    )
    loss.backward()
    average = fp.comm.Communicator(mesh.group("dp"))
    grads = {n: average.all_reduce(full_parameter(p, p.grad), "avg") for n, p in model.named_parameters()}
    mesh.close()
    return grads


def test_data_and_tensor_parallel_mesh_trains_like_one_rank_with_dropout() -> None:
    (expected,) = run_ranks(1, _mesh_step, 1, 1)
    for grads in run_ranks(4, _mesh_step, 2, 2):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def _copies_and_conversions() -> None:
    plain = build_model("gpt2", torch.float32)
    model = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=True, gather_logits=True)
    ids = torch.arange(18).view(2, 9)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, ids), logits_of(model, ids))
    model.double()
    torch.testing.assert_close(logits_of(model, ids), logits_of(plain.double(), ids), rtol=1e-9, atol=1e-9)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full_parameter(a), b), name  # packed weights in canonical order: the layout is still known
    fp.unparallelize(twin)
    for (name, a), b in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.double(), b), name


def test_parallel_model_can_be_copied_and_converted() -> None:
    run_ranks(2, _copies_and_conversions)


class PostNormStack(nn.Module):
    """The norm runs inside the block, after the row-parallel sum."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.LayerNorm(6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _post_norm_gradients(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    plain = PostNormStack().double()
    plan = {"layers.*": "stream", "layers.*.mlp": "block", "layers.*.mlp.0": "colwise"}
    plan |= {"layers.*.mlp.2": "rowwise", "layers.*.mlp.3": "replicate"}
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, plan, sequence_parallel=sequence_parallel)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    plain(x).square().sum().backward()
    parallel(x).square().sum().backward()
    for (name, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_parameter(p, p.grad), q.grad, rtol=1e-10, atol=1e-10, msg=name)


def _wide_gradients() -> None:
    torch.manual_seed(0)
    model = PostNormStack().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    plan = {"layers.*.mlp": "block", "layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
    fp.parallelize(model, dist.group.WORLD, plan | {"layers.*.mlp.3": "replicate"})
    model(torch.randn(2, 5, 6, dtype=torch.bfloat16)).square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_gradients_keep_the_dtype_that_they_were_given() -> None:
    run_ranks(2, _wide_gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_norm_after_the_sum_inside_a_block_has_the_gradient_of_the_whole_sequence(sequence_parallel: bool) -> None:
    run_ranks(2, _post_norm_gradients, sequence_parallel)


def _distinct_communicators() -> int:
    model = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD, sequence_parallel=True)
    return len({id(module.comm) for module in model.modules() if hasattr(module, "comm")})


def test_layers_of_one_model_share_one_communicator() -> None:
    assert run_ranks(2, _distinct_communicators) == [1, 1]
