"""What other libraries do with a parallelised model works, or is refused in words that can be followed."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from tests.dist import run_ranks
from tests.models import build_model, logits_of


def _saved(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    plain: Any = build_model("gpt2", torch.float32)
    parallel = fp.parallelize(copy.deepcopy(plain), dist.group.WORLD)
    copy.deepcopy(parallel).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for (name, p), q in zip(loaded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name
    with pytest.raises(RuntimeError, match=r"save_pretrained to .* failed"):
        parallel.save_pretrained("/proc/nothing/can/be/written/here")
    ids = torch.arange(6).view(1, 6)
    torch.testing.assert_close(logits_of(parallel, ids).full_tensor(), logits_of(plain, ids))
    fp.unparallelize(parallel)
    assert "save_pretrained" not in vars(parallel)


def test_save_pretrained_writes_whole_tensors_and_fails_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path))


def _wrapped() -> None:
    model = build_model("llama", torch.float32)
    fp.parallelize(model, dist.group.WORLD)
    with pytest.raises(TypeError, match=r"parallelised by fastpar.* fastpar.zero.shard\(model"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"a DistributedDataParallel around the model: pass the model itself"):
        fp.parallelize(nn.parallel.DistributedDataParallel(build_model("llama", torch.float32)), dist.group.WORLD)


def test_wrapping_in_ddp_is_refused_in_both_orders() -> None:
    run_ranks(2, _wrapped)


def test_what_is_no_model_is_refused_with_what_to_pass() -> None:
    with pytest.raises(TypeError, match=r"takes an nn.Module as its model, got str; build it first"):
        fp.parallelize("meta-llama/Llama-3.2-1B", None)  # type: ignore[type-var]
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    around = r"a OptimizedModule around the model: pass the model itself \(its ._orig_mod\)"
    with pytest.raises(ValueError, match=around):
        fp.parallelize(compiled, None, {"0": "colwise"})
    mesh = fp.init_mesh()
    with pytest.raises(ValueError, match=around):
        fp.parallelize_pipeline(compiled, mesh, num_microbatches=1)
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"cannot change 0, which torch.jit has scripted or traced"):
        fp.parallelize(scripted, None, {"0": "colwise"})
    mesh.close()


def test_what_cannot_be_pickled_says_what_to_save_instead() -> None:
    alone = fp.Communicator(None)
    split = fp.parallelize(nn.Sequential(nn.Linear(2, 3)), alone, {"0": "colwise"})
    sharded = nn.Linear(2, 3)
    zero = fp.zero.shard(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), group=alone, stage=3)
    pipe = fp.pipeline.Pipeline([nn.Linear(2, 3)], fp.pipeline.make_schedule("gpipe", 1, 1))
    for what, message in (
        (split, r"model\.state_dict\(\)"),
        (sharded, r"zero\.state_dict\(\)"),
        (pipe, r"pipe\.state_d"),
    ):
        with pytest.raises(TypeError, match=rf"pickled.*save .*{message}"):
            pickle.dumps(what)
    with pytest.raises(TypeError, match=r"neither copied"):
        copy.deepcopy(pipe)
    zero.detach()
    assert pickle.loads(pickle.dumps(sharded)).weight.equal(sharded.weight)


def test_batch_statistics_of_a_part_of_the_batch_are_warned_of() -> None:
    def assembled(layout: str, *norms: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(4, 6), *norms, nn.Linear(6, 3))
        fp.assemble(model, layout, lambda params: torch.optim.SGD(params, lr=0.1)).close()

    frozen = nn.BatchNorm1d(6).eval()
    with pytest.warns(UserWarning, match=r"^1, 2: batch normalisation .* \(dp 1, 2 forwards a step\)") as found:
        assembled("acc2", nn.BatchNorm1d(6), nn.SyncBatchNorm(6), frozen)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembled("acc2", frozen, nn.LayerNorm(6))
        assembled("one rank", nn.BatchNorm1d(6))
