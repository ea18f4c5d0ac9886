"""`generate` of split, sharded and spread models gives what one process does, and ranks wait for each other."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastpar as fp
from tests.assembly.test_pretrained import _mixtral
from tests.dist import run_ranks
from tests.models import VOCAB, build_model

pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "without cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


def _prompts(rows: int, limit: int = VOCAB) -> Tensor:
    return torch.randint(1, limit, (rows, 5), generator=torch.Generator().manual_seed(2))


def _ways_of_a_split_model() -> None:
    warnings.simplefilter("ignore")
    plain: Any = build_model("llama", torch.float32).eval()
    mesh = fp.init_mesh(tp=2, device="cpu")
    model: Any = fp.parallelize(copy.deepcopy(plain), mesh)
    for name, options in WAYS.items():
        options = {**options, "max_new_tokens": 6, "pad_token_id": 0}
        torch.manual_seed(5)
        wanted = plain.generate(_prompts(2), **options)
        torch.manual_seed(5)
        assert torch.equal(model.generate(_prompts(2), **options), wanted), name
    torch.manual_seed(dist.get_rank())  # ranks that draw otherwise agree all the same
    tokens = model.generate(_prompts(2), **WAYS["sampled"], max_new_tokens=6, pad_token_id=0)
    everyone = fp.Communicator(dist.group.WORLD).all_gather(tokens[None])
    assert torch.equal(everyone[0], everyone[1])
    model.gradient_checkpointing_enable()
    model.train()(input_ids=_prompts(2), labels=_prompts(2)).loss.backward()


def test_a_split_model_generates_in_every_way_what_one_process_does() -> None:
    run_ranks(2, _ways_of_a_split_model)


def _steps_of_fewer_tokens_than_ranks() -> None:
    plain: Any = build_model("llama", torch.float32).eval()
    model: Any = fp.parallelize(copy.deepcopy(plain), fp.init_mesh(tp=2, device="cpu"), sequence_parallel=True)
    seen: list[int] = []
    model.model.layers[1].register_forward_pre_hook(lambda _m, args: seen.append(args[0].size(1)))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(model.generate(_prompts(2), **options), plain.generate(_prompts(2), **options))
    assert min(seen) == 1  # of a rank without a position it would be none, on which code between the blocks may fail


def test_a_sequence_parallel_model_generates_with_its_stream_whole() -> None:
    run_ranks(2, _steps_of_fewer_tokens_than_ranks)


def _ends_at_different_steps(kind: str) -> tuple[int, int]:
    """Tokens of this rank's sequence, and the steps that the model was called for."""
    warnings.simplefilter("ignore")
    plain: Any = _mixtral().eval()
    prompts = _prompts(8, 61)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0, "eos_token_id": None}
    free = plain.generate(prompts, **options)[:, 5:].tolist()
    # A token with which the sequence of one prompt ends, and that of another does not.
    pairs = [(i, j, t) for i in range(8) for j in range(8) for t in free[i][:3] if t not in free[j]]
    first, second, options["eos_token_id"] = pairs[0]
    prompts = prompts[[first, second]]
    mesh = fp.init_mesh(dp_shard=2, ep=2 if kind == "experts" else 1, device="cpu")
    rank = mesh.rank("dp")
    wanted = plain.generate(prompts[rank : rank + 1], **options)
    model: Any = copy.deepcopy(plain)
    zero = None
    if kind == "zero3":
        zero = fp.zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), group=mesh, stage=3)
    else:
        fp.parallelize(model, mesh)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for each in (model, copy.deepcopy(model)):
        found = each.generate(prompts[rank : rank + 1], **options)
        assert torch.equal(found, wanted)
    if zero is not None:
        zero.detach()
        assert "generate" not in vars(model)
    else:
        fp.unparallelize(model)
        assert "generate" not in vars(model)
    return found.size(1) - 5, len(calls)


@pytest.mark.parametrize("kind", ["zero3", "experts"])
def test_ranks_with_other_prompts_go_on_until_all_have_ended(kind: str) -> None:
    (first, first_calls), (second, second_calls) = run_ranks(2, _ends_at_different_steps, kind)
    assert first < second, "else this says nothing"
    assert first_calls == second_calls
