"""Whole models over pipeline and tensor-parallel ranks, against one process: example and Hugging Face architectures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fastpar as fp
from tests.dist import run_ranks
from tests.models import VOCAB, build_model

STEPS, BATCH, SEQ = 4, 4, 9
LR = 3e-4


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = partial(torch.randint, VOCAB, generator=generator)
    return [(draw((BATCH, SEQ)), draw((BATCH, SEQ))) for _ in range(STEPS)]


def full(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def train_single(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses: list[float] = []
    for input_ids, target in batches():
        losses.append(0.0)
        for x, y in zip(input_ids.split(1), target.split(1), strict=True):
            loss = F.cross_entropy(logits_of(model(x)).flatten(0, 1), y.flatten()) / BATCH
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def train_pipeline(
    architecture: str, dims: dict[str, int], schedule: str, tied: bool, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    mesh = fp.init_mesh(**dims, device="cpu")
    overrides = {"tie_word_embeddings": True} if tied else {}
    model = build_model(architecture, torch.float32, num_hidden_layers=4, **overrides)

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return fp.ops.vocab_parallel_cross_entropy(logits, target, group=mesh["tp"], vocab_range=head_range())

    def head_range() -> tuple[int, int] | None:
        if mesh.size("tp") == 1:
            return None
        heads = [m for stage in pipe.stages.values() for m in stage.module.modules() if hasattr(m, "vocab_range")]
        return heads[-1].vocab_range

    def plain(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipe = fp.parallelize_pipeline(
        model,
        mesh,
        schedule,
        num_microbatches=BATCH,
        loss=loss_fn if mesh.size("tp") > 1 else plain,
        **options,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LR)
    losses = []
    for input_ids, target in batches():
        losses.append(pipe.step(input_ids, target=target).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: full(p).detach().clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return losses, weights


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks have: the bits of products depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QUICK = [
    ("example", {"pp": 2, "tp": 2}, "1f1b", False, {}),
    ("llama", {"pp": 4}, "zb_h1", False, {}),
    ("qwen3", {"pp": 2, "tp": 2}, "interleaved_1f1b", False, {"schedule_options": {"stages_per_rank": 2}}),
    ("gpt2", {"pp": 4}, "1f1b", True, {"layout": "E,t*2|t|t|H"}),
    ("llama", {"pp": 2, "tp": 2}, "zbv", False, {"recompute": fp.recompute.Full(), "sequence_parallel": True}),
]
SLOW = [
    ("example", {"pp": 2, "tp": 2}, "zbv", False, {"sequence_parallel": True}),
    ("llama", {"pp": 2, "tp": 2}, "zb_h1", True, {}),
    ("mistral", {"pp": 2, "tp": 2}, "gpipe", False, {"layout": [3, 1]}),
    ("example", {"pp": 4}, "1f1b", False, {"recompute": fp.recompute.Selective()}),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("architecture", "dims", "schedule", "tied", "options"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in (*QUICK, *SLOW)],
)
def test_four_steps_equal_one_process(architecture, dims, schedule, tied, options) -> None:
    """One process accumulates the same microbatches. Without tp even the bits are the same, but for the sum of tied
    weights' gradients, which is taken per stage first; with tp sums over ranks round differently, and AdamW divides.
    """
    overrides = {"tie_word_embeddings": True} if tied else {}
    losses, weights = train_single(build_model(architecture, torch.float32, num_hidden_layers=4, **overrides))
    seen: set[str] = set()
    for own_losses, own in run_ranks(4, train_pipeline, architecture, dims, schedule, tied, options):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        for name, value in own.items():
            exact = "tp" not in dims and not tied
            torch.testing.assert_close(
                value, weights[name], rtol=0, atol=0 if exact else 1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        seen |= set(own)
    assert seen == set(weights)


def refuse() -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    model = build_model("example", torch.float32)
    with pytest.raises(ValueError, match="parallelize_pipeline"):
        fp.parallelize(model, mesh)
    with pytest.raises(TypeError, match="needs num_microbatches"):
        fp.parallelize_pipeline(model, mesh, "1f1b")
    with pytest.raises(ValueError, match="has 3 parts, but the schedule needs 2"):
        fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2, layout="E|t*2|H")
    schedule = fp.pipeline.make_schedule("1f1b", 3, 4)
    with pytest.raises(ValueError, match="for 3 ranks, but the mesh has pp=2"):
        fp.parallelize_pipeline(model, mesh, schedule)
    dist.barrier()


def test_wrong_requests_are_refused_before_anything_runs() -> None:
    run_ranks(2, refuse)
