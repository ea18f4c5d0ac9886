"""What layers keep for backward, beside what the planner's memory counts of them."""

import pytest
import torch
import transformers
from torch import Tensor

import fastpar as fp
from fastpar.layouts import Layout, ModelShape
from fastpar.planner import Workload, find_machine, find_model
from fastpar.planner.memory import layer_whole, predict_memory
from fastpar.planner.table import LayoutTable
from fastpar.planner.workload import BytesPerParameter

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
        found = predict_memory(find_machine("cpu"), work, LayoutTable.of([Layout.parse(words)], batch)).parts
        return float(found["gradients"][0]), float(found["buffers"][0])

    staged = 2 * 32.0 * mib  # the embedding, larger than a bucket
    assert parts("dp2", 32) == pytest.approx((grads, 0.0), rel=0.01)
    assert parts("dp2 acc2", 32) == pytest.approx((2 * grads, 0.0), rel=0.01)
    assert parts("dp2 zero1", 32) == parts("dp2 zero2", 32) == pytest.approx((0.0, staged))
    assert parts("dp2 zero1 acc2", 32) == pytest.approx((grads, staged), rel=0.01)
    assert parts("dp2 zero2 acc2", 32) == pytest.approx((grads / 2, staged), rel=0.01)
    alone, _ = parts("dp2 zero2 full", 2)  # few activations: the end of backward is the peak
    assert 0 < alone < grads / 2
