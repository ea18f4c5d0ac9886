"""What the ranks of a pipeline must have in common, how losses of unequal microbatches add up, and what a pipeline
gives back when it is dropped.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.comm import plain_data
from fastpar.pipeline import CrossEntropy, Pipeline, make_schedule, partition
from fastpar.pipeline.runtime.values import decode
from fastpar.pipeline.stages.weighting import LossMean, Weighing
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.pipeline.pipeline_models import CLASSES, build_batch, build_parts, loss_fn

MICROBATCHES = 2


def llama(**options: Any) -> nn.Module:
    return build_model("llama", torch.float32, num_hidden_layers=2, **options)


def ids_and_labels(ignored: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (4, 9), generator=generator)
    labels = ids.clone()
    labels[0, :ignored] = -100
    return ids, labels


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------ what ranks agree upon


def run_disagreements() -> dict[str, str]:
    rank, mesh = dist.get_rank(), fp.init_mesh(pp=2, device="cpu")
    found: dict[str, str] = {}

    def build(seed: int = 0, **options: Any) -> Pipeline:
        options = {"num_microbatches": MICROBATCHES, "timeout": 20, **options}
        return fp.parallelize_pipeline(llama(seed=seed), mesh, "1f1b", **options)

    found["weights"] = error_of(lambda: build(seed=rank))
    found["schedule"] = error_of(lambda: build(num_microbatches=2 + rank))
    found["options"] = error_of(lambda: build(reduction=("mean", "sum")[rank]))
    build(seed=rank, sync_weights="none").close()
    pipe = build()
    ids, labels = ids_and_labels()
    found["ids"] = error_of(lambda: pipe.step(ids + rank if rank else ids, labels=labels))
    found["labels"] = error_of(lambda: pipe.step(ids, labels=labels.roll(rank)))
    found["shape"] = error_of(lambda: pipe.step(ids[: 4 - rank], labels=labels[: 4 - rank]))
    found["one rank"] = error_of(lambda: pipe.step(ids[: 4 - 3 * rank], labels=labels))
    found["left out"] = error_of(lambda: pipe.step(*([ids] if rank == 0 else []), labels=labels))
    loss = pipe.step(ids, labels=labels)
    torch.testing.assert_close(loss, llama()(ids, labels=labels).loss.detach(), rtol=1e-5, atol=0)
    pipe.close()
    mesh.close()
    return found


def test_ranks_with_other_models_schedules_or_batches_are_told_so_on_every_rank() -> None:
    for rank, found in enumerate(run_ranks(2, run_disagreements)):
        assert "model.embed_tokens.weight differs between ranks 0 and 1" in found["weights"]
        assert "different schedules: '1f1b' with 2 microbatches" in found["schedule"]
        assert "different options: reduction='mean'" in found["options"]
        assert "got different batches: input 0 differs between rank 0 and rank 1 (other numbers" in found["ids"]
        assert "got different batches: labels differs between rank 0 and rank 1" in found["labels"]
        assert "input 0 differs between rank 0 and rank 1 (shape [4, 9] and [3, 9])" in found["shape"]
        where = "" if rank == 1 else "rank 1 of the pipeline cannot run this batch: ValueError: "
        assert found["one rank"].startswith(f"ValueError: {where}input 0: a batch of 1")
        assert found["left out"] == ""


def run_clipped_gradients() -> list[str]:
    mesh, found = fp.init_mesh(pp=2, device="cpu"), []
    ids, labels = ids_and_labels()
    for stage in (None, 1):
        for clip in (
            lambda parameters: fp.clip_grad_norm_(parameters, 0.1, mesh=mesh),
            lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3 * (1 + dist.get_rank())),
            lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
        ):
            pipe = fp.parallelize_pipeline(llama(), mesh, "1f1b", num_microbatches=MICROBATCHES)
            optimizer = torch.optim.AdamW(pipe.parameters())
            zero = None if stage is None else fp.zero.shard(pipe, optimizer, group=mesh, stage=stage, overlap=False)
            pipe.step(ids, labels=labels)
            if zero is not None:
                zero.reduce_gradients()
            clip(pipe.parameters())
            optimizer.step()
            found.append(error_of(lambda pipe=pipe: pipe.evaluate(ids, labels=labels)))
    return found


def test_gradients_that_each_rank_clips_by_the_norm_of_its_own_stages_are_refused() -> None:
    for whole, by_value, own, *of_zero in run_ranks(2, run_clipped_gradients):
        assert [whole, by_value, *of_zero[:2]] == [""] * 4
        for said in (own, of_zero[2]):
            assert "scaled differently on the ranks" in said
            assert "fp.clip_grad_norm_(pipe.parameters(), max_norm, mesh=mesh)" in said


def run_dropout_seeds() -> None:
    """Ranks may be seeded apart: their dropout masks belong to their own layers."""
    mesh = fp.init_mesh(pp=2, device="cpu")
    model = build_model("gpt2", torch.float32, resid_pdrop=0.3, embd_pdrop=0.2)
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    pipe = fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2)
    assert torch.equal(torch.get_rng_state(), state), "trying the model drew random numbers"
    ids, labels = ids_and_labels()
    assert pipe.step(ids, labels=labels).isfinite()
    pipe.close()
    mesh.close()


def test_ranks_may_have_other_seeds_when_the_model_is_built() -> None:
    run_ranks(2, run_dropout_seeds)


# --------------------------------------------------------------------------------------- losses of unequal microbatches


def run_unequal(architecture: str, schedule: str, own_loss: bool, ignored: int) -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    ids, labels = ids_and_labels(ignored)
    whole, model = _built(architecture), _built(architecture)
    if own_loss:
        expected = whole(ids, labels=labels).loss
        pipe = fp.parallelize_pipeline(model, mesh, schedule, num_microbatches=4)
        loss = pipe.step(ids, labels=labels)
    else:
        expected = F.cross_entropy(whole(ids).logits.flatten(0, 1), labels.flatten())
        pipe = fp.parallelize_pipeline(model, mesh, schedule, num_microbatches=4, loss=CrossEntropy())
        loss = pipe.step(ids, target=labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    grads = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False)}
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, grads[name.partition("@")[0]], rtol=1e-3, atol=1e-6, msg=name)
    evaluated = pipe.evaluate(ids, **({"labels": labels} if own_loss else {"target": labels}))
    torch.testing.assert_close(evaluated, loss)
    pipe.close()
    mesh.close()


def _built(architecture: str) -> nn.Module:
    import transformers

    if architecture == "llama":
        return llama()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2}
    config = transformers.BertConfig(
        **sizes, num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize(
    ("architecture", "schedule", "own_loss", "ignored"),
    [
        ("llama", "1f1b", True, 6),
        ("llama", "zbv", False, 6),
        ("bert", "1f1b", True, 6),  # a loss that is not shifted, and does not take num_items_in_batch
        ("bert", "dualpipev", True, 8),
    ],
)
def test_the_loss_is_the_mean_over_all_tokens_of_the_batch(
    architecture: str, schedule: str, own_loss: bool, ignored: int
) -> None:
    run_ranks(2, run_unequal, architecture, schedule, own_loss, ignored)


def test_microbatches_count_by_their_tokens_within_each_update() -> None:
    assert Weighing.of_counts([3, 3], 2, items=True, can_be_empty=False) == Weighing.equal(2, 2)
    found = Weighing.of_counts([1, 3, 2, 2], 2, items=False, can_be_empty=False)
    assert found.divisors == [4, 4 / 3, 2, 2]
    assert Weighing.of_counts([1, 3], 2, items=True, can_be_empty=False) == Weighing([1, 1], [4, 4])
    assert Weighing.of_counts([0, 3], 2, items=False, can_be_empty=True).divisors == [float("inf"), 1]
    with pytest.raises(ValueError, match="microbatch 0 has no label that counts"):
        Weighing.of_counts([0, 3], 2, items=False, can_be_empty=False)


@pytest.mark.parametrize("kind", ["shifted", "tokens", "rows", "unknown"])
def test_what_a_loss_is_the_mean_of_is_found_by_trying(kind: str) -> None:
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0))

    def loss_of(ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        logits, labels = (table[ids[:, :-1]], labels[:, 1:]) if kind == "shifted" else (table[ids], labels)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if kind == "rows":
            return (each.sum(1) / (labels != -100).sum(1)).mean()
        if kind == "unknown":
            return each.max()
        if num_items_in_batch is not None and kind == "shifted":
            return each.sum() / num_items_in_batch
        return each.sum() / (labels != -100).sum()

    ids = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    assert LossMean.find(loss_of, ids, takes_items=True) == LossMean(kind, takes_items=kind == "shifted")


class Mean(nn.Module):
    """A model that returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_losses_of_unknown_means_over_unequal_microbatches_are_refused() -> None:
    parts = build_parts(1)
    x, target = build_batch(4)
    target[0] = -100

    def pipe(reduction: str, loss: Any = loss_fn) -> Pipeline:
        return Pipeline(parts, make_schedule("1f1b", 1, 2), loss=loss, reduction=reduction)

    with pytest.raises(ValueError, match=r"have \[3, 6\] elements that are not -100.*CrossEntropy.*microbatch_mean"):
        pipe("mean").step(x, target=target)
    means = [loss_fn(parts[0](a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
    torch.testing.assert_close(pipe("microbatch_mean").step(x, target=target), sum(means).detach() / 2)
    for uneven in (torch.randint(CLASSES, (3, 3)), torch.randn(3, 3, CLASSES)):  # a last batch that is smaller
        with pytest.raises(ValueError, match=r"the microbatches of target have .* elements"):
            pipe("mean", lambda output, target: output.square().mean()).step(x[:3], target={"of": uneven})
    own = Pipeline([Mean()], make_schedule("1f1b", 1, 2))
    with pytest.raises(ValueError, match="the microbatches of the inputs have"):
        own.step(x[:3])
    target[1] = -100  # a microbatch without a target
    whole = loss_fn(parts[0](x), target)
    torch.testing.assert_close(pipe("mean", CrossEntropy()).step(x, target=target), whole.detach())


# ----------------------------------------------------------------------------------------------- names, doors, the end


def run_names(schedule: str) -> list[tuple[str, Tensor]]:
    mesh = fp.init_mesh(pp=2, device="cpu")
    model = build_model("gpt2", torch.float32, n_layer=4, tie_word_embeddings=True)
    pipe = fp.parallelize_pipeline(model, mesh, schedule, num_microbatches=2)
    found = [(name, p.detach().clone()) for name, p in pipe.named_parameters()]
    pipe.close()
    mesh.close()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_all_ranks_together_name_every_parameter_and_a_name_is_one_value(schedule: str) -> None:
    whole = dict(build_model("gpt2", torch.float32, n_layer=4).named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    for found in run_ranks(2, run_names, schedule):
        names = [name for name, _ in found]
        assert len(names) == len(set(names))
        for name, value in found:
            assert torch.equal(value, whole[name.partition("@")[0]]), name
        seen |= set(names)
    assert seen == set(whole)


def test_copies_on_one_rank_have_names_of_their_own() -> None:
    shared = nn.Linear(3, 3)
    stages = partition([nn.Linear(3, 3), nn.Linear(3, 3)], layout=[1, 1]).stages([0, 1])
    for stage in stages:
        stage.module.register_module("table", shared if stage.part == 0 else nn.Linear(3, 3))
    pipe = Pipeline(stages, make_schedule("interleaved_1f1b", 1, 2, stages_per_rank=2), loss=loss_fn)
    names = [name for name, _ in pipe.named_parameters()]
    assert len(set(names)) == len(names) == 8
    assert "table.weight" in names
    assert "table.weight@part1" in names


def test_calling_a_pipeline_says_what_to_call() -> None:
    pipe = Pipeline(build_parts(1), make_schedule("1f1b", 1, 1), loss=loss_fn)
    with pytest.raises(TypeError, match=r"pipe.step\(inputs, target=...\).*pipe.evaluate.*pipe.forward"):
        pipe(torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"does not generate.*pipe.state_dict"):
        pipe.generate(torch.zeros(2, 3))


def test_structures_that_nobody_has_packed_are_refused() -> None:
    for value in ({}, (1, 2), ("tensor", 3), ("tuple", [("value", 1)]), ("dict", (1,)), ("nothing", ())):
        with pytest.raises(plain_data.PlainDataError):
            decode(plain_data.encode(value))
    with pytest.raises(plain_data.PlainDataError):
        decode(b"cos\nsystem\n(S'true'\ntR.")


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def run_cycles(closed: bool) -> list[tuple[int, int]]:
    mesh = fp.init_mesh(pp=2, device="cpu")
    rank, held = dist.get_rank(), []
    x, target = build_batch(2)
    gc.disable()  # a pipeline in a cycle would wait for it
    try:
        for cycle in range(50):
            pipe = Pipeline([build_parts(2)[rank]], make_schedule("1f1b", 2, 2), mesh["pp"], loss=loss_fn)
            if cycle % 10 == 0:
                pipe.step(x, target=target)
            if closed:
                pipe.close()
                pipe.close()
            is_alive = weakref.ref(pipe)
            del pipe
            assert is_alive() is None
            if cycle in (4, 49):
                dist.barrier()
                held.append(_held())
    finally:
        gc.enable()
    mesh.close()
    return held


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_fifty_pipelines_leave_no_threads_and_descriptors(closed: bool) -> None:
    for first, last in run_ranks(2, run_cycles, closed):
        assert last[0] <= first[0]
        assert last[1] <= first[1]


def test_a_closed_pipeline_says_so() -> None:
    pipe = Pipeline(build_parts(1), make_schedule("1f1b", 1, 1), loss=loss_fn)
    pipe.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        pipe.step(*build_batch(2)[:1], target=build_batch(2)[1])
