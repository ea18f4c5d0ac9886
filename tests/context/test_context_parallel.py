"""Models on sequences that are split over ranks: the numbers of one process, in every layout, stage and family."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fastpar as fp
from fastpar.context import ContextRegion
from fastpar.context.microbatches import ContextMicrobatches
from fastpar.context.region import region_of
from tests.context.context_ranks import (
    FAMILIES,
    PACKED,
    TOKENS,
    Own,
    assert_near,
    batch_of_own_region,
    compare_families,
    compare_steps,
    errors,
    gradients,
    groups_that_do_not_sum,
    not_a_part,
    own_model,
    perturb_a_document,
    recompute_two_batches,
    region_of_other_ranks,
    router_losses,
    router_of_some_ranks,
    said_of_untried_models,
    styled_models,
    styled_refusals,
    sum_over,
    whole_batch,
)
from tests.dist import run_ranks
from tests.tensor.family_models import tiny_model

pytest.importorskip("transformers")


def test_shift_and_positions_of_packed_documents() -> None:
    region = ContextRegion(None)
    model = Own(region)
    ids = torch.arange(10).view(1, 10)
    batch = fp.context.shard(model, {"input_ids": ids, "labels": ids}, documents=[4, 0, 6])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert batch["shift_labels"].tolist() == [[1, 2, 3, -100, 5, 6, 7, 8, 9, -100]]
    assert batch["labels"] is batch["shift_labels"]
    assert float(batch["num_items_in_batch"]) == 8
    assert region.placement.documents == ((4, 0, 6),)
    given = fp.context.shard(model, {"input_ids": ids, "position_ids": ids + 7})
    assert given["position_ids"].tolist() == (ids + 7).tolist()
    assert set(given) == {"input_ids", "position_ids"}


def test_a_recomputed_layer_gets_the_placement_of_its_forward_back() -> None:
    region = ContextRegion(None)
    first = region.place(8)
    restored = region.capture()
    second = region.place(10)
    with restored():
        assert region.placement is first
    assert region.placement is second


def test_ranks_of_a_pipeline_know_whether_they_cut_documents_by_the_same_rows() -> None:
    """One without inputs assumes equal microbatches."""
    region = ContextRegion(None)
    for documents, is_same in ((((8,), (3, 5), (5, 3)), False), (((3, 5),), True), (None, True)):
        region.place(8, documents, 3)
        summaries = []
        for rows in ([1, 2], [None, None], [2, 1]):
            microbatches = ContextMicrobatches(region)
            microbatches.begin(rows)
            summaries.append(microbatches.summary())
        assert (summaries[0] == summaries[1]) == is_same
        assert summaries[1] == summaries[2]


@pytest.mark.expensive
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_family_equal_one_process(family: str) -> None:
    run_ranks(2, compare_families, {family: FAMILIES[family]}, {"cp": 2}, {})


@pytest.mark.expensive
@pytest.mark.parametrize("sizes", [{"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_loss_and_gradients_on_other_meshes_equal_one_process(sizes: dict[str, int]) -> None:
    size = sizes["cp"] * sizes.get("tp", 1)
    run_ranks(size, compare_families, {"llama": FAMILIES["llama"]}, sizes, {})


@pytest.mark.expensive
@pytest.mark.parametrize(
    "options",
    [{"layout": "striped"}, {"layout": "dealt", "block": 4}, {"method": "ulysses"}, {"method": "gather"}],
    ids=str,
)
def test_every_layout_and_method_gives_the_same_model(options: dict[str, Any]) -> None:
    run_ranks(2, compare_families, {"gemma2": FAMILIES["gemma2"]}, {"cp": 2}, options)


@pytest.mark.expensive
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_steps_with_zero_equal_one_process(stage: int) -> None:
    run_ranks(2, compare_steps, {"cp": 2}, stage, PACKED)


@pytest.mark.expensive
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("sizes", [{"cp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_training_steps_on_four_ranks_equal_one_process(sizes: dict[str, int], stage: int) -> None:
    run_ranks(4, compare_steps, sizes, stage, None)


@pytest.mark.expensive
def test_a_document_of_any_family_does_not_see_another() -> None:
    for found in run_ranks(2, perturb_a_document, FAMILIES):
        assert found.keys() == FAMILIES.keys()
        for family, (first, second) in found.items():
            assert first > 0.01, family
            assert second < (1e-5 if family == "gpt_oss" else 1e-30), (family, second)  # experts get other tokens


@pytest.mark.expensive
def test_recomputed_layers_attend_over_the_batch_of_their_forward() -> None:
    run_ranks(2, recompute_two_batches)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_model_of_ones_own_has_the_outputs_and_dropout_masks_of_one_rank(dropout: float) -> None:
    (expected, _), *_ = run_ranks(1, own_model, "contiguous", 1, dropout)
    for layout in ("zigzag", "dealt"):
        for whole, _ in run_ranks(3, own_model, layout, 3, dropout):
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_routers_are_those_of_all_tokens() -> None:
    """Of those that the ranks of tp share under sequence parallelism, too."""
    (expected,) = run_ranks(1, router_losses, 1)
    assert len(expected) > 4
    for cp, tp in ((2, 1), (2, 2)):
        for found in run_ranks(cp * tp, router_losses, cp, tp):
            assert_near(found, expected, f"routers, cp{cp} tp{tp}", 1e-9)


def test_a_router_over_some_of_the_ranks_that_share_its_tokens_is_refused() -> None:
    for found in run_ranks(4, router_of_some_ranks):
        assert found.count("(its group), but sequences are split over [0, 1, 2, 3] as well") == 2


def test_a_model_that_cannot_be_tried_is_named_once_on_the_first_rank() -> None:
    first, second = run_ranks(2, said_of_untried_models)
    assert len(first) == 2
    assert "TakesMore fails on [2, 11] ids (RuntimeError: a scale is needed), so that nobody has tried" in first[0]
    assert "Own has no nn.Embedding of ids" in first[1]
    assert second == []


def test_modules_with_the_style_attention_equal_one_process() -> None:
    run_ranks(2, styled_models)


def test_what_the_style_attention_cannot_redirect_is_refused() -> None:
    for found in run_ranks(2, styled_refusals):
        words = [
            "gives its attention a mask of its own, [",
            "has not called F.scaled_dot_product_attention",
            'the style "attention" in a plan',
            "nn.MultiheadAttention calls no function of torch",
            "within torch.utils.checkpoint",
            "within torch.utils.checkpoint",
            "counts the places of its tokens by itself",
        ]
        for text, word in zip(found, words, strict=True):
            assert word in text, (word, text)


def test_what_cannot_be_split_is_refused_with_what_would_work() -> None:
    for found in run_ranks(4, errors):
        words = [
            "no batch is split yet",
            "q and k must have the ",
            "attention_mask has zeros",
            "output_attentions",
            "documents add up to 36 tokens, but input_ids have 37",
            "must be equal on all ranks",
            "pixel_values",
            "attention_mask has zeros",
            "",
            "is 'linear_attention': context parallelism splits softmax attention only",
            "does not know the attention of Sequential",
            "6 query heads / tp 1 = 6 cannot be spread over 4 ranks evenly; 1, 2, 3, 6 can",
            "no layer of this LlamaForCausalLM attends over a split sequence",
        ]
        for text, word in zip(found, words, strict=True):
            assert word in text, (word, text)
            assert text != "accepted"


def test_tokens_and_batch_of_the_helpers_fit() -> None:
    assert all(sum(row) == TOKENS for row in PACKED)
    assert whole_batch()["input_ids"].shape == (2, TOKENS)


def on_one_rank(model_type: str, name: str) -> Any:
    return fp.parallelize(tiny_model(model_type, name), fp.init_mesh(device="cpu"), context=fp.Context())


@pytest.mark.parametrize(
    ("model_type", "name"), [("distilbert", "DistilBertForMaskedLM"), ("gpt2", "GPT2DoubleHeadsModel")], ids=str
)
def test_labels_are_refused_for_a_loss_that_takes_no_shifted_ones(model_type: str, name: str) -> None:
    model = on_one_rank(model_type, name).eval()  # whose dropout would refuse a summary of tokens
    ids = whole_batch()["input_ids"]
    with pytest.raises(ValueError, match=f"the loss of {name} is not transformers' next-token loss"):
        fp.context.shard(model, whole_batch())
    logits = model(**fp.context.shard(model, {"input_ids": ids})).logits
    torch.testing.assert_close(logits, tiny_model(model_type, name).eval()(input_ids=ids).logits)


def test_a_part_of_a_batch_is_refused_where_it_would_be_taken_for_the_whole() -> None:
    model = on_one_rank("llama", "LlamaForCausalLM")
    batch = fp.context.shard(model, whole_batch())
    for missing in ("shift_labels", "num_items_in_batch"):
        with pytest.raises(ValueError, match=f"labels without {missing}"):
            model(**{name: value for name, value in batch.items() if name != missing})
    with pytest.raises(RuntimeError, match="generate needs whole sequences"):
        model.generate(batch["input_ids"], max_new_tokens=1)
    assert len(model(**batch, output_hidden_states=True).hidden_states) == 3
    fp.unparallelize(model)
    ids = batch["input_ids"]
    torch.testing.assert_close(
        model(ids, labels=ids).loss, tiny_model("llama", "LlamaForCausalLM")(ids, labels=ids).loss
    )
    assert model.generate(ids, max_new_tokens=1, pad_token_id=0).shape == (2, TOKENS + 1)


def test_positions_that_begin_anew_need_documents() -> None:
    model = Own(ContextRegion(None))
    ids = torch.arange(10).view(1, 10)
    batch = {"input_ids": ids, "position_ids": ids % 4}
    with pytest.raises(ValueError, match="position_ids do not count on"):
        fp.context.shard(model, batch)
    for documents in ([4, 4, 2], [10]):
        assert fp.context.shard(model, batch, documents=documents)["position_ids"].tolist() == (ids % 4).tolist()


def test_losses_of_parts_that_do_not_add_up_are_refused() -> None:
    model = on_one_rank("mixtral", "MixtralForCausalLM")
    batch = fp.context.shard(model, whole_batch())
    assert torch.isfinite(model(**batch).loss)
    with pytest.raises(ValueError, match="such losses of parts do not add up"):
        model(**batch, output_router_logits=True)


def test_queries_scaled_by_places_that_a_layer_counts_by_itself_are_refused() -> None:
    model = tiny_model("llama4_text", "Llama4ForCausalLM")
    layer: Any = model.model.layers[1].self_attn
    layer.attn_temperature_tuning, layer.use_rope = True, False
    with pytest.raises(ValueError, match="counts by itself from 0 on every rank"):
        fp.parallelize(model, fp.init_mesh(device="cpu"), context=fp.Context())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_torch_is_refused_where_it_may_be_of_another_batch(use_reentrant: bool) -> None:
    """Two forwards, or another batch in the region, before backward. What has been run again is out of the way."""
    region = ContextRegion(None)
    model = Own(region)
    model.embed.requires_grad_(False)

    def forward(documents: list[int]) -> Any:
        ids = fp.context.shard(model, {"input_ids": torch.arange(10).view(1, 10)}, documents=documents)["input_ids"]
        x = torch.zeros(1, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(
            lambda ids, x: model(ids) + x, ids, x, use_reentrant=use_reentrant
        ).sum()

    with torch.no_grad():  # an evaluation of other documents
        model(fp.context.shard(model, {"input_ids": torch.arange(10).view(1, 10)}, documents=[3, 7])["input_ids"])
    for documents in ([4, 6], [5, 5]):
        forward(documents).backward()
    (forward([4, 6]) + forward([4, 6])).backward()
    for then in (lambda: forward([5, 5]), lambda: region.place(10, ((2, 8),))):
        loss = forward([4, 6])
        kept = then()
        with pytest.raises(RuntimeError, match="batches with other documents or lengths"):
            loss.backward()
        del kept, loss


def test_an_evaluation_through_a_checkpoint_is_not_waited_for() -> None:
    """Without gradients a reentrant checkpoint runs nothing again, also not one within another."""
    model = Own(ContextRegion(None))
    ids = {"input_ids": torch.arange(10).view(1, 10)}
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)

    def forward(documents: list[int]) -> Any:
        part = fp.context.shard(model, ids, documents=documents)["input_ids"]
        x = torch.zeros(1, requires_grad=True)
        return checkpoint(lambda part, x: checkpoint(lambda part, x: model(part) + x, part, x), part, x).sum()

    for evaluating in (torch.no_grad, torch.inference_mode):
        with evaluating():
            forward([3, 7])
        forward([4, 6]).backward()
    pending = forward([4, 6])
    kept = forward([3, 7])
    with pytest.raises(RuntimeError, match="batches with other documents or lengths"):
        pending.backward()
    del kept


def test_a_copied_model_has_batches_of_its_own() -> None:
    """Hooks and dropout included; layers that are copied one by one share a region all the same."""
    model = on_one_rank("llama", "LlamaForCausalLM")
    twin = copy.deepcopy(model)
    fp.context.shard(model, whole_batch(), documents=(20, 17))
    fp.context.shard(twin, whole_batch(), documents=(5, 32))
    assert region_of(model).placement.documents == ((20, 17),)
    assert region_of(twin).placement.documents == ((5, 32),)
    assert region_of(model).comm is region_of(twin).comm
    layers = nn.ModuleList([copy.deepcopy(Own(ContextRegion(None), 0.5)) for _ in range(2)])
    with pytest.raises(ValueError, match="2 context regions"):
        region_of(layers)
    own = Own(ContextRegion(None), 0.5)
    layers = nn.ModuleList([copy.deepcopy(own) for _ in range(2)])
    fp.context.shard(layers, {"input_ids": torch.arange(10).view(1, 10)})
    assert layers[0].attention._fastpar_context is layers[1].attention._fastpar_context


def test_data_parallel_ranks_do_not_share_masks_of_dropout_in_a_region_of_ones_own() -> None:
    assert run_ranks(2, batch_of_own_region) == [(0, 2), (1, 2)]


def test_short_sequences_and_parts_without_positions_are_refused() -> None:
    for found in run_ranks(2, not_a_part):
        assert found == ["LlamaForCausalLM got 4 tokens without position_ids", "fewer than the 2 ranks"]


def test_data_parallelism_that_would_average_over_cp_is_refused() -> None:
    for found in run_ranks(2, groups_that_do_not_sum):
        assert found == ["the model attends over sequences that are split over 2 ranks"] * 2


def test_a_region_of_other_ranks_than_those_of_cp_is_refused_on_all_of_them() -> None:
    found = run_ranks(4, region_of_other_ranks)
    for rank, wanted in enumerate([([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]):
        assert "has the ranks {}, but the mesh's cp has {}".format(*wanted) in found[rank]


def own_loss() -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if labels is not None and kwargs.get("return_dict") is False:
                return (output[0].square().mean(), *output)
            if labels is not None:
                output.loss = output.logits.square().mean()
            return output

    mesh = fp.init_mesh(cp=2, device="cpu")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = fp.parallelize(Own(LlamaConfig(**sizes, num_attention_heads=2)), mesh, context=fp.Context())
    ids = torch.arange(16).view(1, 16)
    batch = fp.context.shard(model, {"input_ids": ids, "labels": ids})
    found = []
    for options in ({}, {"return_dict": False}):
        try:
            model(**batch, **options)
        except ValueError as error:
            found.append(str(error))
    mesh.close()
    return found


def test_a_loss_of_the_models_own_is_refused() -> None:
    for found in run_ranks(2, own_loss):
        assert len(found) == 2, "a tuple as well"
        assert all("Own returns a loss that is not its loss_function's" in said for said in found)


def test_a_loss_that_a_model_makes_of_other_inputs_than_labels_is_refused() -> None:
    """By what is returned, since no name says that it is a loss: in a tuple, in a dict, alone."""
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        def forward(self, *args: Any, targets: Any = None, form: str = "", **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if targets is None:
                return output
            logits = output[0] if isinstance(output, tuple) else output.logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return {"tuple": (loss, logits), "last": (logits, loss), "dict": {"score": loss}, "alone": loss}[form]

    config = tiny_model("llama", "LlamaForCausalLM").config
    model = fp.parallelize(Own(config), fp.init_mesh(device="cpu"), context=fp.Context())
    batch = fp.context.shard(model, whole_batch())
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    for form in ("tuple", "last", "dict", "alone"):
        with pytest.raises(ValueError, match="Own returns a loss that is not its loss_function's"):
            model(**inputs, targets=batch["shift_labels"], form=form, return_dict=False)
    with torch.no_grad(), pytest.raises(ValueError, match="Own returns a loss"):
        model(**inputs, targets=batch["shift_labels"], form="tuple", return_dict=False)
    for options in ({}, {"return_dict": False}):
        model(**batch, **options)[0].backward()
        assert model(**inputs, **options)[0].shape[1] == TOKENS


def strange_models() -> list[str]:
    """What a model is told that mixes tokens, pools them or draws for them by itself; and weights that drift apart."""
    from transformers import AutoModelForSequenceClassification, BertModel, LlamaForCausalLM

    mesh = fp.init_mesh(cp=2, device="cpu")
    config = tiny_model("llama", "LlamaForCausalLM").config

    class Shifted(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 0.1 * output.logits.roll(1, 1)
            return output

    class Drawing(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = nn.functional.dropout(output.logits, 0.1, self.training)
            return output

    found = []
    for cls in (Shifted, AutoModelForSequenceClassification.from_config(config).__class__):
        with pytest.raises(ValueError, match=r"of a split sequence|pooled") as error:
            fp.parallelize(cls(config), mesh)
        found.append(str(error.value))
    with pytest.raises(ValueError, match="pooled") as error:
        fp.parallelize(tiny_model("bert", "BertModel"), mesh)
    found.append(str(error.value))
    fp.parallelize(BertModel(tiny_model("bert", "BertModel").config, add_pooling_layer=False), mesh)
    drawing: Any = fp.parallelize(Drawing(config), mesh)
    batch = fp.context.shard(drawing, {"input_ids": whole_batch()["input_ids"]})
    with pytest.raises(ValueError, match="draws random numbers by itself") as error:
        drawing(**batch)
    found.append(str(error.value))
    drawing.eval()(**batch)
    config.attention_dropout = 0.1
    torch.manual_seed(0)
    model: Any = fp.parallelize(LlamaForCausalLM(config), mesh)  # whose attention draws by places
    torch.manual_seed(mesh.rank("cp"))
    with pytest.raises(RuntimeError, match="generators of the ranks of cp differ"):
        model(**fp.context.shard(model, whole_batch()))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**fp.context.shard(model, whole_batch())).loss.backward()
    fp.context.shard(model, whole_batch())
    optimizer.step()
    with pytest.raises(ValueError, match="gradients have to be summed over cp") as error:
        fp.context.shard(model, whole_batch())
    found.append(str(error.value))
    mesh.close()
    return found


def longest_positions(rope_type: str) -> None:
    """Frequencies that go by the largest position are those of the whole sequence, whatever a rank has of it."""
    import transformers

    mesh = fp.init_mesh(cp=2, device="cpu")
    batch = whole_batch()
    if rope_type == "dynamic":
        config = tiny_model("llama", "LlamaForCausalLM").config
        config.max_position_embeddings = 16
        config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    else:
        config = tiny_model("phi3", "Phi3ForCausalLM").config
        config.original_max_position_embeddings = 25
        width = config.hidden_size // config.num_attention_heads // 2
        factors = {"short_factor": [1.0] * width, "long_factor": [9.0] * width}
        config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "partial_rotary_factor": 1.0, **factors}
    config = type(config)(**config.to_dict())
    torch.manual_seed(0)
    plain: Any = transformers.AutoModelForCausalLM.from_config(config)
    model = fp.parallelize(copy.deepcopy(plain), mesh, context=fp.Context(layout="contiguous"))
    part = fp.context.shard(model, batch)
    loss, expected = model(**part).loss, plain(**batch).loss
    torch.testing.assert_close(fp.context.total(model, loss), expected.detach(), rtol=1e-5, atol=0)
    expected.backward()
    loss.backward()
    assert_near(sum_over(mesh, gradients(model)), gradients(plain), rope_type, 1e-4)
    fp.context.shard(model, batch, documents=((30, 7), (20, 17)))
    placement = region_of(model).placement
    for rows in (placement, placement.of_rows(0, 2), placement.of_rows(1, 2)):  # of a microbatch
        assert rows.last is not None
        assert rows.last.tolist() == [29, 19][-int(rows.rows or 0) :]
    mesh.close()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_go_by_the_longest_position_of_all_ranks(rope_type: str) -> None:
    run_ranks(2, longest_positions, rope_type)


class Mixing(nn.Module):
    """Attention, and something of what it must not be beside, in a model that has to be given positions."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.places, self.block = nn.Embedding(23, 8), nn.Embedding(64, 8), nn.Identity()
        self.out, self.batch_norm = nn.Linear(8, 23), nn.BatchNorm1d(8)
        self.block.forward = self.attend  # type: ignore[method-assign]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q = k = v = x.unflatten(-1, (2, 4)).transpose(1, 2)
        if self.kind == "keys":
            k = k / k.norm(dim=2, keepdim=True)
        if self.kind == "queries by length":
            q = q * math.log(x.size(1) + 1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids) + self.places(position_ids)
        x = x + self.block(x)
        if self.kind == "mean" or (self.kind == "mean in training" and self.training):
            x = x - x.mean(1, keepdim=True)
        if self.kind == "batch norm":
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "places in training" and self.training:
            x = x * (torch.arange(x.size(1)) <= x.size(1) // 2).view(1, -1, 1)  # as of experts that are full
        logits: torch.Tensor = self.out(x)
        return logits * x.size(1) if self.kind == "logits by length" else logits


def mixing_models() -> dict[str, str]:
    """What models are told that go by the tokens that a rank has."""
    mesh = fp.init_mesh(cp=2, device="cpu")
    kinds = ("mean", "mean in training", "batch norm", "keys", "queries by length", "logits by length")
    found = {}
    for kind in (*kinds, "places in training", ""):
        model = Mixing(kind)
        state = copy.deepcopy(model.state_dict())
        try:
            fp.parallelize(model, mesh, {"block": "attention"})
            found[kind] = ""
        except ValueError as error:
            found[kind] = str(error)
        assert model.training
        torch.testing.assert_close(model.state_dict()["batch_norm.running_mean"], state["batch_norm.running_mean"])
    mesh.close()
    return found


def test_models_that_go_by_the_tokens_of_a_rank_are_refused_in_both_modes() -> None:
    for found in run_ranks(2, mixing_models):
        for kind in ("mean", "mean in training", "batch norm"):
            assert "computes at one token from others" in found[kind], kind
        assert "queries or keys of its attention of Mixing computes at one token" in found["keys"]
        for kind in ("queries by length", "logits by length", "places in training"):
            assert "something else for the same tokens in a longer sequence" in found[kind], kind
        assert found[""] == ""


def test_models_that_would_take_a_part_for_the_whole_are_refused() -> None:
    for found in run_ranks(2, strange_models):
        assert "Shifted computes at one token from others" in found[0]
        assert "its output['logits'] of LlamaForSequenceClassification" in found[1]
        assert "its output['pooler_output'] of BertModel" in found[2]
        assert "the model (Drawing) draws" in found[3]
        assert "must be equal on all ranks" in found[4]
