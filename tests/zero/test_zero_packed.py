"""Checkpoints of fused weights that tensor parallelism keeps as packed shards: rows are in their own order there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.tensor import full_parameter
from tests.dist import run_ranks
from tests.models import build_model
from tests.moe import moe_models

pytest.importorskip("transformers")

Sizes = dict[str, int]
ROWS = 4
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "8bit": lambda params: fp.optim.AdamW(params, lr=1e-2, eps=1e-4, state_dtype="8bit"),
}


def _training(name: str, sizes: Sizes, stage: int, kind: str = "adamw", scale: float = 1.0) -> tuple[fp.Mesh, Any, Any]:
    """gpt2 has frozen queries, keys and values in one packed weight; qwen3_moe gate and up of every expert."""
    mesh = fp.init_mesh(**sizes, device="cpu")
    model: Any = build_model("gpt2", torch.float32) if name == "gpt2" else moe_models.build(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.mul_(scale)
            parameter.requires_grad_("h.0.attn.c_attn" not in key)
    if set(sizes) != {"dp_shard"}:
        fp.parallelize(model, mesh, gather_logits=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return mesh, model, fp.zero.shard(model, optimizer, group=mesh, stage=stage)


def _train(mesh: fp.Mesh, model: Any, zero: Any, steps: range) -> list[float]:
    losses, dp = [], Communicator(mesh.group("dp"))
    for step in steps:
        ids = torch.randint(moe_models.VOCAB, (ROWS, 7), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(dp.size)[dp.rank]
        loss = moe_models.loss_of(model(mine).logits[..., : moe_models.VOCAB], mine)
        loss.backward()
        zero.optimizers[0].step()
        zero.optimizers[0].zero_grad()
        losses.append(float(dp.all_reduce(loss.detach(), "avg")))
    return losses


def _whole(zero: Any) -> dict[str, Tensor]:
    state = zero.state_dict()
    found = {f"{name}.value": x for name, x in state["model"].items()}
    for name, states in state["optimizer"].items():
        found |= {f"{name}.{key}": x for key, x in states.items() if isinstance(x, Tensor)}
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for name, x in found.items()}


def _gone_on_with(folder: str, name: str, saved: tuple[Sizes, int], loaded: tuple[Sizes, int], kind: str) -> None:
    mesh, model, zero = _training(name, *saved, kind)
    _train(mesh, model, zero, range(2))
    dcp.save({"training": zero}, checkpoint_id=folder)
    before, losses = _whole(zero), _train(mesh, model, zero, range(2, 4))
    mesh.close()
    mesh, model, zero = _training(name, *loaded, kind, scale=0.5)
    dcp.load({"training": zero}, checkpoint_id=folder)
    after = _whole(zero)
    assert after.keys() == before.keys()
    for key, x in before.items():
        if kind == "adamw" or key.endswith(".value"):
            assert torch.equal(after[key], x), key
    # In 8 bits states are rounded once more, by blocks of other shards.
    assert _train(mesh, model, zero, range(2, 4)) == pytest.approx(losses, rel=1e-4 if kind == "adamw" else 2e-3)
    mesh.close()


CASES: list[tuple[str, tuple[Sizes, int], tuple[Sizes, int], str]] = [
    ("gpt2", ({"tp": 2}, 1), ({"dp_shard": 2}, 3), "adamw"),
    ("gpt2", ({"dp_shard": 2}, 3), ({"tp": 2}, 1), "8bit"),
    ("qwen3_moe", ({"dp_shard": 2, "etp": 2}, 1), ({"dp_shard": 2, "ep": 2}, 3), "adamw"),
    ("qwen3_moe", ({"dp_shard": 2}, 2), ({"tp": 2, "etp": 2}, 3), "8bit"),
]
ON_FOUR: list[tuple[str, tuple[Sizes, int], tuple[Sizes, int], str]] = [
    ("gpt2", ({"tp": 2, "dp_shard": 2}, 3), ({"tp": 4}, 0), "adamw"),
    ("gpt2", ({"dp_shard": 4}, 1), ({"tp": 2, "dp_shard": 2}, 2), "adamw"),
    ("qwen3_moe", ({"dp_shard": 4, "ep": 2, "etp": 2}, 3), ({"dp_shard": 2, "tp": 2, "etp": 2}, 1), "adamw"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_layouts_go_on_with_packed_weights_and_their_states(tmp_path: Path, case: Any) -> None:
    run_ranks(2, _gone_on_with, str(tmp_path), *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_other_layouts_of_four_ranks_go_on_with_them(tmp_path: Path, case: Any) -> None:
    run_ranks(4, _gone_on_with, str(tmp_path), *case)


def _whole_states() -> None:
    plain = build_model("gpt2", torch.float32)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    plain(torch.arange(7)[None], labels=torch.arange(7)[None]).loss.backward()
    optimizer.step()
    mesh = fp.init_mesh(tp=2, device="cpu")
    model = fp.parallelize(build_model("gpt2", torch.float32), mesh)
    zero = fp.zero.shard(model, OPTIMIZERS["adamw"](model.parameters()), group=mesh, stage=1)
    with pytest.raises(ValueError, match=r"c_attn.weight is a fused weight in packed shards.*load_full_"):
        zero.optimizers[0].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = {name: dict(optimizer.state[p]) for name, p in plain.named_parameters()}
    for each in states.values():
        each["step"] = each["step"].view(1)
    fp.zero.load_full_optimizer_state(zero, states)
    for name, found in fp.zero.full_optimizer_state(zero).items():
        assert torch.equal(found["exp_avg"], states[name]["exp_avg"]), name
    mesh.close()


def test_whole_states_of_packed_weights_are_taken_by_name_and_refused_by_number() -> None:
    run_ranks(2, _whole_states)


def _whole_parameters(stage: int) -> None:
    ids = torch.randint(moe_models.VOCAB, (ROWS, 7), generator=torch.Generator().manual_seed(0))

    def run(model: Any) -> None:
        moe_models.loss_of(model(ids).logits[..., : moe_models.VOCAB], ids).backward()

    expected: Any = build_model("gpt2", torch.float64)
    run(expected)
    mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
    model: Any = fp.parallelize(build_model("gpt2", torch.float64), mesh, gather_logits=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fp.zero.shard(model, optimizer, group=mesh, stage=stage)
    run(model)
    found = dict(model.named_parameters())
    grads = {name: full_parameter(p, p.grad) for name, p in found.items()}
    for name, p in expected.named_parameters():
        torch.testing.assert_close(full_parameter(found[name]).view_as(p), p, msg=name)
        torch.testing.assert_close(grads[name].view_as(p), p.grad, msg=name)
    optimizer.step()
    for name, p in found.items():
        torch.testing.assert_close(full_parameter(p, optimizer.state[p]["momentum_buffer"]), grads[name], msg=name)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole_parameters_have_their_own_order(stage: int) -> None:
    """So have gradients and moments, of which a rank has rows."""
    run_ranks(4, _whole_parameters, stage)


def _model_states() -> None:
    """Of a model in stage 3: torch's getter and setter, and what one process has by the model's own method."""
    mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
    plain: Any = build_model("gpt2", torch.float32)
    model: Any = fp.parallelize(build_model("gpt2", torch.float32), mesh)
    zero = fp.zero.shard(model, OPTIMIZERS["adamw"](model.parameters()), group=mesh, stage=3)
    options = StateDictOptions(full_state_dict=True)

    def check() -> None:
        found = get_model_state_dict(model, options=options)
        for name, x in plain.state_dict().items():
            assert torch.equal(found[name], x), name
        for name, parameter in plain.named_parameters():
            assert torch.equal(full_parameter(dict(model.named_parameters())[name]), parameter), name

    check()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(plain.state_dict())
    check()
    kept = copy.deepcopy(get_model_state_dict(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    set_model_state_dict(model, kept)
    check()
    zero.close()
    mesh.close()


def test_state_dicts_of_models_in_stage_3_have_the_order_of_one_process() -> None:
    run_ranks(4, _model_states)


def _fully_sharded() -> None:
    mesh = fp.init_mesh(dp_shard=2, tp=2, device="cpu")
    plain: Any = build_model("gpt2", torch.float32)
    model: Any = fully_shard(fp.parallelize(build_model("gpt2", torch.float32), mesh), mesh=mesh["dp_shard"])
    kept, options = copy.deepcopy(get_model_state_dict(model)), StateDictOptions(full_state_dict=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    for factor in (0.5, 1.0):
        for name, x in get_model_state_dict(model, options=options).items():
            assert torch.equal(x, factor * plain.state_dict()[name]), name
        set_model_state_dict(model, kept)
    mesh.close()


def test_state_dicts_of_models_in_fully_shard_have_the_order_of_one_process() -> None:
    run_ranks(4, _fully_sharded)


def _states_by_name(sizes: Sizes, stage: int | None) -> None:
    """Moments of one process, of ranks, and of ranks that have loaded those of one process."""
    mesh, whole = fp.init_mesh(**sizes, device="cpu"), StateDictOptions(full_state_dict=True)
    plain: Any = build_model("gpt2", torch.float32)
    models, optimizers = [plain, copy.deepcopy(plain), copy.deepcopy(plain)], []
    for model in models:
        if model is not plain:
            fp.parallelize(model, mesh)
        optimizers.append(OPTIMIZERS["adamw"](model.parameters()))
        if model is not plain and stage is not None:
            fp.zero.shard(model, optimizers[-1], group=mesh, stage=stage)
    ids = torch.arange(12).view(2, 6)

    def state_after_step(index: int) -> dict[str, Any]:
        models[index](ids, labels=ids).loss.backward()
        optimizers[index].step()
        return get_optimizer_state_dict(models[index], optimizers[index], options=whole)["state"]

    wanted, found = state_after_step(0), state_after_step(1)
    if stage is None:  # torch does not cut whole states for uneven shards of two dims
        given = copy.deepcopy(get_optimizer_state_dict(plain, optimizers[0], options=whole))
        set_optimizer_state_dict(models[2], optimizers[2], given, options=whole)
        packed = models[2].get_parameter("transformer.h.0.attn.c_attn.weight")
        moment = full_parameter(packed, optimizers[2].state[packed]["exp_avg"])
        torch.testing.assert_close(moment, wanted["transformer.h.0.attn.c_attn.weight"]["exp_avg"])
    for name in wanted:
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[name][key], wanted[name][key], rtol=1e-3, atol=1e-6)
    mesh.close()


@pytest.mark.parametrize(
    ("sizes", "stage"), [({"tp": 2}, None), ({"tp": 2, "dp_shard": 2}, 1), ({"tp": 2, "dp_shard": 2}, 3)], ids=str
)
def test_states_that_torch_gives_names_are_those_of_one_process(sizes: Sizes, stage: int | None) -> None:
    run_ranks(sizes["tp"] * sizes.get("dp_shard", 1), _states_by_name, sizes, stage)
