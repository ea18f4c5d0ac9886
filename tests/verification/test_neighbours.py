"""Other libraries around a parallelised Hugging Face model: PEFT, accelerate, transformers' Trainer, torch's
fully_shard, checkpointing, copies and casts. Each computes what one process does, or is refused by an error that says
what to do.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.tensor import ColumnParallelLinear, full_parameter
from tests.dist import run_ranks
from tests.models import VOCAB, build_model

pytest.importorskip("transformers")


def _ids(rows: int = 2) -> Tensor:
    return torch.randint(1, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(1))


def _whole(param: Tensor, value: Tensor | None = None) -> Tensor:
    return full_parameter(param, value).detach().clone()


def _step(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The loss, every whole gradient, and every whole parameter after a step of SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {n}": _whole(p, p.grad) for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return found | {n: _whole(p) for n, p in model.named_parameters()}


def _assert_same_step(parallel: nn.Module, plain: nn.Module, ids: Tensor | None = None) -> None:
    """`ids` of this rank; a mean over ranks of data parallelism is that of all."""
    found, wanted = _step(parallel, _ids() if ids is None else ids), _step(plain, _ids())
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if name != "loss" or ids is None:
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-6, msg=name, check_dtype=False)


# ---- PEFT


def _with_adapters(model: nn.Module, targets: list[str]) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about names that PEFT uses
        adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return adapted


class Adapted(nn.Module):
    """A linear and a low-rank one beside it, as adapter libraries put them in a linear's place."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.up(self.down(x))


def _adapted(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(3)
    for path, module in list(model.named_modules()):
        if path.endswith(names) and isinstance(module, nn.Linear):
            module.requires_grad_(False)
            model.set_submodule(path, Adapted(module))
    return model


def _adapters_before(names: tuple[str, ...], sequence_parallel: bool) -> list[str]:
    plain = _adapted(build_model("llama", torch.float32), names)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=sequence_parallel)
    _assert_same_step(parallel, plain)
    return [row["note"] for row in fp.explain(parallel).rows if row["style"] in ("whole", "gathered")]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("names", [("q_proj", "up_proj"), ("o_proj", "down_proj")], ids=["column", "row"])
def test_adapters_from_before_parallelize_train_as_in_one_process(
    names: tuple[str, ...], sequence_parallel: bool
) -> None:
    for notes in run_ranks(2, _adapters_before, names, sequence_parallel):
        assert any("Adapted, which is no linear that could be split" in note for note in notes), notes


def _lora(sequence_parallel: bool) -> None:
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    plain = _with_adapters(build_model("llama", torch.float32), targets)
    parallel = copy.deepcopy(plain)
    fp.parallelize(parallel.base_model.model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    _assert_same_step(parallel, plain)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_lora_of_peft_trains_as_in_one_process(sequence_parallel: bool) -> None:
    pytest.importorskip("peft")
    run_ranks(2, _lora, sequence_parallel)


def _lora_in_other_orders(kind: str) -> None:
    targets = ["q_proj", "v_proj", "down_proj"]
    plain = _with_adapters(build_model("llama", torch.float32), targets)
    model, ids, zero = copy.deepcopy(plain), None, None
    if kind == "whole":
        fp.parallelize(model, dist.group.WORLD)
    else:
        mesh = fp.init_mesh(dp_shard=2, device="cpu")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=3)
        ids = _ids()[mesh.rank("dp") :][:1]
    if zero is None:
        _assert_same_step(model, plain)
        return
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    model(input_ids=ids, labels=ids).loss.backward()
    plain(input_ids=_ids(), labels=_ids()).loss.backward()
    optimizer.step()
    reference.step()
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(_whole(param), wanted[name], rtol=1e-3, atol=2e-6, msg=name)
    zero.detach()


@pytest.mark.parametrize("kind", ["whole", "zero3"])
def test_lora_of_peft_is_taken_with_its_wrapper_and_sharded(kind: str) -> None:
    pytest.importorskip("peft")
    run_ranks(2, _lora_in_other_orders, kind)


def _lora_afterwards() -> None:
    model = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD)
    with pytest.raises(ValueError, match="ColumnParallelLinear"):
        _with_adapters(model, ["q_proj"])


def test_lora_of_peft_on_split_linears_is_refused() -> None:
    pytest.importorskip("peft")
    run_ranks(2, _lora_afterwards)


def _added(what: str) -> None:
    model: Any = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD, sequence_parallel=True)
    model(input_ids=_ids(), labels=_ids()).loss.backward()
    if what == "child":
        model.model.norm.scale = nn.Linear(48, 48)
        name = "model.norm.scale.weight"
    else:
        model.lm_head = nn.Linear(48, VOCAB)
        name = "lm_head.weight"
    with pytest.raises(ValueError, match=rf"{name} has been added after fastpar.parallelize.*get_peft_model"):
        model(input_ids=_ids())
    frozen: Any = fp.parallelize(build_model("llama", torch.float32), dist.group.WORLD)
    frozen.reward = nn.Linear(2, 2).requires_grad_(False)
    frozen(input_ids=_ids())


@pytest.mark.parametrize("what", ["child", "replacement"])
def test_parameters_that_come_after_parallelize_are_refused(what: str) -> None:
    run_ranks(2, _added, what)


# ---- accelerate, Trainer, fully_shard


def _losses(model: Any, optimizer: Any, backward: Any, clip: Any) -> list[tuple[float, float]]:
    found = []
    for _ in range(3):
        loss = model(input_ids=_ids(), labels=_ids()).loss
        backward(loss)
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def _accelerated(stage: int | None) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else accelerate sets it, and warns
    from accelerate import Accelerator

    plain = build_model("llama", torch.float32)
    model = copy.deepcopy(plain)
    mesh = fp.init_mesh(dp_shard=1 if stage is None else 2, tp=2 if stage is None else 1, device="cpu")
    if stage is None:
        fp.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zero = None if stage is None else fp.zero.shard(model, optimizer, group=mesh, stage=stage)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"already, which reduces its gradients|is parallelised by fastpar"):
        accelerator.prepare(model, optimizer)
    accelerator = Accelerator(cpu=True)
    found = _losses(model, accelerator.prepare(optimizer), accelerator.backward, accelerator.clip_grad_norm_)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    wanted = _losses(plain, reference, Tensor.backward, nn.utils.clip_grad_norm_)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    if zero is not None:
        zero.detach()
        nn.parallel.DistributedDataParallel(model) if stage == 0 else None
    mesh.close()


@pytest.mark.parametrize("stage", [None, 0, 1, 3], ids=["tp", "zero0", "zero1", "zero3"])
def test_accelerate_prepares_the_optimizer_and_is_refused_the_model(stage: int | None) -> None:
    pytest.importorskip("accelerate")
    run_ranks(2, _accelerated, stage)


def _trained(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    warnings.simplefilter("ignore")
    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    model = build_model("llama", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    fp.zero.shard(model, optimizer, group=mesh, stage=1)
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(output_dir=folder, max_steps=1, **options)
    rows = [{"input_ids": row, "labels": row} for row in _ids(4)]
    trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
    with pytest.raises(TypeError, match=r"fastpar.integrations.trainer.MeshTrainer"):
        trainer.train()
    mesh.close()


def test_trainer_around_a_model_of_zero_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_ranks(2, _trained, str(tmp_path))


def _fully_sharded(tp: int, sequence_parallel: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # of fully_shard, about in-place additions to views, which there are none of
    size = dist.get_world_size()
    mesh = fp.init_mesh(dp_shard=size // tp, tp=tp, device="cpu")
    plain: Any = build_model("llama", torch.float32, vocab_size=256)
    model: Any = fp.parallelize(copy.deepcopy(plain), mesh, sequence_parallel=sequence_parallel)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    ids = _ids() % 256
    dp = mesh.rank("dp")
    found, wanted = _step(model, ids[dp : dp + 1] if size > tp else ids), _step(plain, ids)
    for name in wanted.keys() - {"loss"}:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=2e-6, msg=name)
    mesh.close()


@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 2)])
def test_fully_shard_over_a_parallel_model_equals_one_process(size: int, tp: int) -> None:
    run_ranks(size, _fully_sharded, tp, tp > 1)


def _both_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh["dp_shard"])
    for stage in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"0.weight is sharded already over ranks .* fully_shard"):
            fp.zero.shard(model, optimizer, group=mesh, stage=stage)
    mesh.close()


def test_zero_over_fully_shard_is_refused() -> None:
    run_ranks(2, _both_sharded)


# ---- transformers' own methods


def _checkpointed(use_reentrant: bool, sequence_parallel: bool) -> None:
    plain: Any = build_model("qwen3", torch.float32)
    model: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD, sequence_parallel=sequence_parallel)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    _assert_same_step(model, plain)


@pytest.mark.parametrize(("use_reentrant", "sequence_parallel"), [(True, False), (False, True)])
def test_gradient_checkpointing_of_transformers_changes_nothing(use_reentrant: bool, sequence_parallel: bool) -> None:
    run_ranks(2, _checkpointed, use_reentrant, sequence_parallel)


def _resized() -> None:
    plain: Any = build_model("qwen3", torch.float32)
    model: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(VOCAB) is model.get_input_embeddings()
    for options in ({"new_num_tokens": VOCAB + 7, "mean_resizing": False}, {"pad_to_multiple_of": 8}):
        with pytest.raises(ValueError, match=r"resize_token_embeddings\(264\).*Resize before parallelize"):
            model.resize_token_embeddings(**options)
    twin = copy.deepcopy(model)
    fp.unparallelize(model)
    model.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    assert model.get_input_embeddings().num_embeddings == VOCAB + 7
    with pytest.raises(ValueError, match="Resize before parallelize"):
        twin.resize_token_embeddings(VOCAB + 7)


def test_resize_token_embeddings_of_a_split_vocabulary_is_refused() -> None:
    run_ranks(2, _resized)


def _tied(architecture: str) -> None:
    plain: Any = build_model(architecture, torch.float32)
    model: Any = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    for each in (plain, model):
        each.config.tie_word_embeddings = True
        each.tie_weights()
        assert each.lm_head.weight is each.get_input_embeddings().weight
    _assert_same_step(model, plain)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_weights_tied_after_parallelize_train_as_in_one_process(architecture: str) -> None:
    run_ranks(2, _tied, architecture)


def _converted() -> None:
    plain = build_model("gpt2", torch.float32)
    model = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    twin = copy.deepcopy(model).double()
    assert any(isinstance(module, ColumnParallelLinear) for module in twin.modules())
    _assert_same_step(twin, copy.deepcopy(plain).double())
    half, wanted = copy.deepcopy(model).half(), copy.deepcopy(plain).half()
    torch.testing.assert_close(*(m(input_ids=_ids(), labels=_ids()).loss for m in (half, wanted)), rtol=2e-3, atol=0)
    _assert_same_step(model, plain)


def test_copies_and_casts_of_a_parallel_model_compute_the_same() -> None:
    run_ranks(2, _converted)
