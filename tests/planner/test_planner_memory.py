"""What layers keep for backward, beside what the planner's memory counts of them."""

import dataclasses

import pytest
import torch
import transformers
from torch import Tensor

import fastpar as fp
from fastpar.layouts import Layout, ModelShape
from fastpar.planner import Workload, find_machine, find_model
from fastpar.planner.memory import backward_bytes, layer_whole, predict_memory
from fastpar.planner.table import LayoutTable
from fastpar.planner.workload import BytesPerParameter
from tests.dist import run_ranks
from tests.live_tensors import PeakBytes
from tests.planner.planner_memory_ranks import measure_pipelines, predicted_bytes

BATCH, SEQ = 2, 32
SIZES = {"vocab_size": 64, "attn_implementation": "sdpa", "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def llama(layers: int, kv_heads: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, **SIZES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int, _: int) -> torch.nn.Module:
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=layers, n_positions=SEQ, activation_function="gelu", **SIZES
    )
    return transformers.GPT2LMHeadModel(config)


def saved_bytes(model: torch.nn.Module) -> int:
    """Bytes of all storages but parameters that a forward saves."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(each: Tensor) -> Tensor:
        if each.untyped_storage().data_ptr() not in own:
            found[each.untyped_storage().data_ptr()] = each
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        kept = model(torch.randint(0, 64, (BATCH, SEQ)), use_cache=False)
    assert kept is not None
    return sum(each.untyped_storage().nbytes() for each in found.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "kv_heads", "fused"), [(llama, 4, False), (llama, 2, False), (llama, 4, True), (gpt2, 4, False)]
)
def test_a_layer_keeps_what_is_counted(make, kv_heads: int, fused: bool, precision: str) -> None:
    models = [
        make(layers, kv_heads).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision]) for layers in (1, 3)
    ]
    if fused:
        models = [fp.apply_kernels(model, loss=False) for model in models]
    one, three = map(saved_bytes, models)
    work = Workload(find_model(models[0].config), BATCH, SEQ, precision, fused_kernels=fused)
    counted = float(layer_whole(work, LayoutTable.of([Layout()], BATCH))[0])
    assert counted == pytest.approx((three - one) / 2, rel=0.005)


def test_pipelines_in_stage_0_hold_gradients_and_the_buckets_that_they_are_copied_to() -> None:
    shape = ModelShape("small", layers=4, hidden=64, ffn=256, vocab=128, heads=4)
    for words, copies in (("pp2 mb4", True), ("dp2 pp2 mb4", True), ("dp2 pp2 mb4 zero1", False), ("dp2", False)):
        table = LayoutTable.of([Layout.parse(words)], 8)
        whole, apart = (
            predict_memory(find_machine("cpu"), Workload(shape, 8, SEQ, copies_gradients=copied), table).parts
            for copied in (False, True)
        )
        assert apart["gradients"] == pytest.approx((1.5 if copies else 1.0) * whole["gradients"]), words  # 2 beside 4


def test_gradients_that_leave_buckets_as_rows_are_not_there_when_backward_begins() -> None:
    """One microbatch a step: then `fp.zero.shard` keeps the buckets of stage 0, or two staging buffers."""
    shape, mib = ModelShape("wide", layers=4, hidden=1024, ffn=4096, vocab=8192, heads=8), 1 << 20
    grads = 4.0 * shape.parameters
    assert grads > 2 * 32 * mib

    def parts(words: str, batch: int) -> tuple[float, float]:
        work = Workload(shape, batch, 1024, "fp32", BytesPerParameter.of("fp32"), copies_gradients=True)
        found = predict_memory(find_machine("h100"), work, LayoutTable.of([Layout.parse(words)], batch)).parts
        return float(found["gradients"][0]), float(found["buffers"][0])

    staged = 2 * 32.0 * mib  # the embedding, larger than a bucket
    assert parts("dp2", 32) == pytest.approx((grads, 0.0), rel=0.01)
    assert parts("dp2 acc2", 32) == pytest.approx((2 * grads, 0.0), rel=0.01)
    assert parts("dp2 zero1", 32) == parts("dp2 zero2", 32) == pytest.approx((0.0, staged))
    assert parts("dp2 zero1 acc2", 32) == pytest.approx((grads, staged), rel=0.01)
    assert parts("dp2 zero2 acc2", 32) == pytest.approx((grads / 2, staged), rel=0.01)
    alone, _ = parts("dp2 zero2 full", 2)  # few activations: the end of backward is the peak
    assert 0 < alone < grads / 2


def test_cpu_ranks_keep_the_memory_of_rows_between_steps() -> None:
    """Reduce-scatters return 25 MiB / 2 in pages of 2 MiB, and the pool has 8 of those at most; below 8 MiB none."""
    shape, mib = ModelShape("wide", layers=4, hidden=1024, ffn=4096, vocab=1024, heads=8), 1 << 20
    work = Workload(shape, 32, 1024, "fp32", BytesPerParameter.of("fp32"), copies_gradients=True)

    def gradients(words: str, **changes: int) -> float:
        machine = dataclasses.replace(find_machine("cpu"), **changes)
        return float(predict_memory(machine, work, LayoutTable.of([Layout.parse(words)], 32)).parts["gradients"][0])

    rows = 4.0 * shape.parameters / 2
    assert gradients("dp2 zero2") == pytest.approx(14 / 12.5 * rows, rel=0.01)
    assert gradients("dp2 zero2", pooled_outputs=3) == 3 * 14 * mib
    assert gradients("dp4 zero2") == gradients("dp2 zero2", pooled_outputs=0) == 0.0
    assert gradients("dp2 zero2 acc2") == pytest.approx(14 / 12.5 * rows, rel=0.01)  # in the place of the rows


def test_a_pipeline_rank_with_all_microbatches_in_flight_has_no_sums_yet() -> None:
    shape = ModelShape("small", layers=4, hidden=64, ffn=256, vocab=128, heads=4)
    count = 2 * shape.dense_layer_parameters + shape.embedding_parameters  # two layers, and an end
    sums, buckets = 4.0 * count, 2.0 * count

    def gradients(words: str, seq: int) -> float:
        work = Workload(shape, 8, seq, copies_gradients=True)
        found = predict_memory(find_machine("cpu"), work, LayoutTable.of([Layout.parse(words)], 8))
        return float(found.parts["gradients"][0])

    assert gradients("pp2 gpipe mb4", 256) == pytest.approx(buckets)
    assert gradients("pp2 mb4", 256) == pytest.approx(sums + buckets)
    few = gradients("pp2 gpipe mb4", 4)  # they outgrow what the first microbatch frees
    assert buckets < few < sums + buckets


def test_backward_begins_with_what_is_counted() -> None:
    model, ids = llama(2, 4), torch.randint(0, 64, (BATCH, SEQ))
    model.model.norm = torch.nn.Identity()
    work = Workload(find_model(model.config), BATCH, SEQ, "fp32", BytesPerParameter.of("fp32"), fused_kernels=False)
    with PeakBytes() as meter:
        meter.add(model.parameters())
        hidden = model.model(ids, use_cache=False).last_hidden_state
        edge, shape = torch.autograd.graph.get_gradient_edge(hidden), hidden.shape
        del hidden
        before = meter.now()
        meter.start()
        torch.autograd.backward([edge], [torch.ones(shape)])
    counted = float(backward_bytes(work, LayoutTable.of([Layout()], BATCH))[0])
    assert meter.peak - before == pytest.approx(counted, rel=0.05)


def test_pipelines_with_zero_hold_what_is_predicted() -> None:
    """At the peak of a step the planner's formula, per pipeline rank; before the update that of `expected_memory`."""
    words = ["pp2 dp2 zero2 mb4", "pp2 dp2 zero2 gpipe mb2", "pp2 dp2 zero3 mb4", "pp2 dp2 zero3 gpipe mb2"]
    predicted = [predicted_bytes(each) for each in words]
    for rank, layouts in enumerate(run_ranks(4, measure_pipelines, words)):
        for each, of_ranks, (peak, between, expected) in zip(words, predicted, layouts, strict=True):
            assert of_ranks[rank // 2] == pytest.approx(peak, rel=0.05), (each, rank)
            assert expected == pytest.approx(between, rel=0.01), (each, rank)
