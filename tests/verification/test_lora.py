"""Adapters of PEFT in a model that is split or sharded are saved whole, and merged right or not at all."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fastpar as fp
from tests.dist import run_ranks
from tests.models import build_model
from tests.moe.moe_models import build
from tests.verification.test_neighbours import _ids, _with_adapters

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def _adapted(architecture: str = "llama") -> Any:
    targets = ["c_attn", "c_proj", "c_fc"] if architecture == "gpt2" else TARGETS
    return _with_adapters(build_model(architecture, torch.float32), targets)


def _saved(folder: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    plain = _adapted()
    wanted = plain(input_ids=_ids()).logits
    model, zero = copy.deepcopy(plain), None
    if kind == "tp":
        fp.parallelize(model, dist.group.WORLD)
        assert "left whole: self_attn.q_proj is an adapter (peft.tuners.lora.layer.Linear)" in str(fp.explain(model))
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        mesh = fp.init_mesh(dp_shard=2, device="cpu")
        zero = fp.zero.shard(model, torch.optim.SGD(trained, lr=0.5), group=mesh, stage=3)
    model.save_pretrained(folder)
    if dist.get_rank() == 0:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(folder))
        assert "model.safetensors" not in os.listdir(folder)
    loaded = peft.PeftModel.from_pretrained(build_model("llama", torch.float32), folder)
    assert torch.equal(loaded(input_ids=_ids()).logits, wanted)
    with pytest.raises(ValueError, match=r"a LlamaForCausalLM with adapters in it.*save the peft.PeftModel"):
        fp.save_pretrained(model.get_base_model(), folder)
    if zero is not None:
        zero.detach()
        mesh.close()


@pytest.mark.parametrize("kind", ["tp", "zero3"])
def test_saving_writes_the_adapters_whole_and_nothing_else(kind: str, tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), kind)


def _saved_tied(folder: str, kind: str) -> None:
    """The embedding and the head are one, trained and saved with the adapters."""
    warnings.simplefilter("ignore")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
    )
    plain = peft.get_peft_model(build_model("qwen3", torch.float32), config)
    with torch.no_grad():
        plain.get_input_embeddings().modules_to_save["default"].weight.mul_(2.0)
    wanted = plain(input_ids=_ids()).logits
    model, mesh = copy.deepcopy(plain), fp.init_mesh(**{"tp" if kind == "tp" else "dp_shard": 2}, device="cpu")
    if kind == "tp":
        fp.parallelize(model, mesh)
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        fp.zero.shard(model, torch.optim.SGD(trained, lr=0.5), group=mesh, stage=3)
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(build_model("qwen3", torch.float32), folder)
    assert torch.equal(loaded(input_ids=_ids()).logits, wanted)
    mesh.close()


@pytest.mark.parametrize("kind", ["tp", "zero3"])
def test_saving_writes_tied_embeddings_that_adapters_have(kind: str, tmp_path: Path) -> None:
    run_ranks(2, _saved_tied, str(tmp_path), kind)


def _merged(architecture: str, folder: str) -> None:
    plain = _adapted(architecture)
    model = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    wanted = plain(input_ids=_ids()).logits

    def check() -> None:
        logits = model(input_ids=_ids()).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)

    for safe in (True, False):
        model.merge_adapter(safe_merge=safe)
        check()
        model.unmerge_adapter()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    check()
    with model.disable_adapter():
        plain_base = plain.get_base_model()
        with plain.disable_adapter():
            torch.testing.assert_close(
                model(input_ids=_ids()).logits, plain_base(input_ids=_ids()).logits, rtol=1e-3, atol=1e-4
            )
    with pytest.raises(ValueError, match=r"with adapters in it.*save the peft.PeftModel"):
        model.get_base_model().save_pretrained(folder)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=_ids()).logits, wanted, rtol=1e-3, atol=1e-4)
    merged.save_pretrained(folder)
    loaded = type(merged).from_pretrained(folder)
    torch.testing.assert_close(loaded(input_ids=_ids()).logits, wanted, rtol=1e-3, atol=1e-4)
    fp.unparallelize(model)
    assert not any(isinstance(p, DTensor) for p in merged.parameters())
    torch.testing.assert_close(merged(input_ids=_ids()).logits, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_merging_adapters_of_a_split_model_is_right_or_refused(architecture: str, tmp_path: Path) -> None:
    run_ranks(2, _merged, architecture, str(tmp_path))


def _merged_by_assignment(kind: str) -> None:
    """These merge by `weight.data = ...`, and IA3 gives the merged weight to the module that has it."""
    warnings.simplefilter("ignore")
    config: Any = {
        "dora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True, init_lora_weights=False),
        "ia3": lambda: peft.IA3Config(
            target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False, task_type="CAUSAL_LM"
        ),
        "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 200]),
    }[kind]()
    torch.manual_seed(1)
    plain = peft.get_peft_model(build_model("llama", torch.float32), config)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    wanted = plain(input_ids=_ids()).logits

    def check(model: Any) -> None:
        logits = model(input_ids=_ids()).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)

    model = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    check(model)
    model.merge_adapter()
    check(model)
    model.unmerge_adapter()
    check(model)
    merged = model.merge_and_unload()
    check(merged)
    fp.unparallelize(model)
    check(merged)


@pytest.mark.parametrize("kind", ["dora", "ia3", "tokens"])
def test_adapters_that_assign_merged_weights_are_merged(kind: str) -> None:
    run_ranks(2, _merged_by_assignment, kind)


def _merged_from_shards() -> None:
    """Stage 3 has some weights whole and some not, as its last forward has left them."""
    plain = _adapted()
    model, mesh = copy.deepcopy(plain), fp.init_mesh(dp_shard=2, device="cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    zero = fp.zero.shard(model, torch.optim.SGD(trained, lr=0.5), group=mesh, stage=3)
    wanted = plain(input_ids=_ids()).logits
    for call in (model.merge_adapter, model.unmerge_adapter, model.merge_and_unload):
        with pytest.raises(RuntimeError, match=r"of which ZeRO's stage 3 leaves this rank a part: call zero.detach"):
            call()
        torch.testing.assert_close(model(input_ids=_ids()).logits, wanted, rtol=1e-3, atol=1e-4)
    zero.detach()
    torch.testing.assert_close(model.merge_and_unload()(input_ids=_ids()).logits, wanted, rtol=1e-3, atol=1e-4)
    mesh.close()


def test_adapters_of_shards_are_not_merged() -> None:
    run_ranks(2, _merged_from_shards)


def _around_experts() -> None:
    warnings.simplefilter("ignore")
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters, task_type="CAUSAL_LM")
    for sizes in ({"dp_shard": 2, "etp": 2}, {"tp": 2}):
        mesh, model = fp.init_mesh(**sizes, device="cpu"), peft.get_peft_model(build("mixtral"), config)
        with pytest.raises(TypeError, match=r"inside an adapter of PEFT.*target_modules without target_parameters"):
            fp.parallelize(model, mesh)
        mesh.close()


def test_adapters_around_experts_are_refused() -> None:
    run_ranks(2, _around_experts)
