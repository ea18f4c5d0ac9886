"""What is wrong on one rank of a group is the same error on all of its ranks, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops
from fastpar.comm import Communicator
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.vocab_cases import normal, world

VOCAB, ROWS, HIDDEN = 8, 4, 5
TARGET = torch.tensor([0, 7, -100, 3])
LABELS = torch.tensor([[0, 7, 2, 3], [1, 5, 6, 4]])


def logits(comm: Communicator, rows: int = ROWS) -> Tensor:
    width = VOCAB // comm.size
    return normal(rows, VOCAB)[:, comm.rank * width :][:, :width].clone().requires_grad_()


def table(comm: Communicator) -> Tensor:
    width = VOCAB // comm.size
    return normal(VOCAB, HIDDEN)[comm.rank * width :][:width].clone().requires_grad_()


def cross_entropy(comm: Communicator, ids: Tensor, **options: Any) -> Tensor:
    return ops.vocab_parallel_cross_entropy(logits(comm), ids, group=comm, reduction="none", **options)


def log_prob(comm: Communicator, ids: Tensor, **options: Any) -> Tensor:
    return ops.vocab_parallel_log_prob(logits(comm), ids, group=comm, **options)


def linear(comm: Communicator, ids: Tensor, **options: Any) -> Tensor:
    return ops.linear_cross_entropy(
        normal(ROWS, HIDDEN).requires_grad_(), table(comm), ids, group=comm, chunk_bytes=1, **options
    )


def linear_of_sequence(comm: Communicator, ids: Tensor, **options: Any) -> Tensor:
    hidden = normal(2, ROWS // comm.size, HIDDEN).requires_grad_()
    options |= {"sequence_parallel": True, "sequence_dim": 1}
    return ops.linear_cross_entropy(hidden, table(comm), ids.view(2, -1), group=comm, **options)


def embedding(comm: Communicator, ids: Tensor, **options: Any) -> Tensor:
    return ops.vocab_parallel_embedding(ids, table(comm), group=comm, **options)


def scattered(comm: Communicator, ids: Tensor) -> Tensor:
    return embedding(comm, ids, reduce="scatter", scatter_dim=1)


Function = Callable[..., Tensor]
FUNCTIONS: dict[str, tuple[Function, Tensor, str]] = {
    "cross-entropy": (cross_entropy, TARGET, "target"),
    "log-prob": (log_prob, TARGET, "ids"),
    "linear": (linear, TARGET, "target"),
    "linear of a sequence": (linear_of_sequence, LABELS, "target"),
    "embedding": (embedding, LABELS, "ids"),
    "scattered embedding": (scattered, LABELS, "ids"),
}


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def run_bad_ids(name: str, bad_rank: int, value: int) -> tuple[str, str, int]:
    """What this rank is told; the group works before and afterwards, with one collective."""
    function, ids, _ = FUNCTIONS[name]
    comm = world()
    before = function(comm, ids)
    wrong = ids.clone()
    if comm.rank == bad_rank:
        wrong.view(-1)[-1] = value
    told = raised(lambda: function(comm, wrong))
    with count_collectives() as counted:
        after = function(comm, ids)
    assert torch.equal(before, after)
    return *told, len(counted.ops)


@pytest.mark.parametrize("value", [VOCAB, -1, 2**40, -(2**63)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bad_id_on_one_rank_is_the_same_index_error_on_all(name: str, value: int) -> None:
    _, ids, argument = FUNCTIONS[name]
    results = run_ranks(2, run_bad_ids, name, 1, value)
    place = tuple(torch.arange(ids.numel()).view(ids.shape).eq(ids.numel() - 1).nonzero()[0].tolist())
    wanted = f"{argument}[{', '.join(map(str, place))}] is {value} on rank 1, outside the vocabulary [0, {VOCAB})"
    for error, text, collectives in results:
        assert error == "IndexError"
        assert text.startswith(wanted)
        assert collectives == (1 if "linear" not in name else collectives)
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cross-entropy", "embedding", "scattered embedding"])
def test_the_first_of_several_ranks_is_named(name: str) -> None:
    for error, text, _ in run_ranks(4, run_bad_ids, name, 2, 99):
        assert (error, "is 99 on rank 2," in text) == ("IndexError", True)


def run_other_ids(name: str) -> tuple[str, str]:
    function, ids, _ = FUNCTIONS[name]
    comm = world()
    ids = ids.clone()
    ids.view(-1)[0] += comm.rank
    told = raised(lambda: function(comm, ids))
    assert bool(function(comm, FUNCTIONS[name][1]).isfinite().all())
    return told


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_ids_on_one_rank_are_an_error_on_all(name: str) -> None:
    first, second = run_ranks(2, run_other_ids, name)
    assert first == second
    assert first[0] == "CommMismatchError"
    assert f"different {FUNCTIONS[name][2]} on the ranks" in first[1]


OPTIONS: dict[str, tuple[Function, dict[str, Any]]] = {
    "ignore_index": (cross_entropy, {"ignore_index": 5}),
    "label_smoothing": (
        lambda c, ids, label_smoothing=0.1: cross_entropy(c, ids, label_smoothing=label_smoothing),
        {"label_smoothing": 0.25},
    ),
    "z_loss": (cross_entropy, {"z_loss": 0.5}),
    "softcap": (cross_entropy, {"softcap": 30.0}),
    "logit_scale": (log_prob, {"logit_scale": 2.0}),
    "weight": (cross_entropy, {"weight": torch.linspace(1.0, 2.0, VOCAB)}),
    "class_weight": (linear, {"class_weight": torch.linspace(1.0, 2.0, VOCAB)}),
    "denominator": (
        lambda c, ids, **o: ops.vocab_parallel_cross_entropy(logits(c), ids, group=c, **o),
        {"denominator": 3},
    ),
    "reduction": (
        lambda c, ids, **o: ops.vocab_parallel_cross_entropy(logits(c), ids, group=c, **o),
        {"reduction": "sum"},
    ),
    "seed": (lambda c, ids, seed=1: ops.vocab_parallel_sample(logits(c), seed=seed, group=c), {"seed": 2}),
    "top_p": (
        lambda c, ids, top_p=0.5: ops.vocab_parallel_top_k_top_p(logits(c), top_p=top_p, group=c),
        {"top_p": 0.7},
    ),
    "different functions": (
        lambda c, ids, log=False: (ops.vocab_parallel_log_softmax if log else ops.vocab_parallel_softmax)(
            logits(c), group=c
        ),
        {"log": True},
    ),
}


def run_other_options(name: str) -> tuple[str, str]:
    function, options = OPTIONS[name]
    comm = world()
    told = raised(lambda: function(comm, TARGET.clamp(min=0), **(options if comm.rank == 1 else {})))
    function(comm, TARGET.clamp(min=0), **options)  # together it is right
    return told


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_on_one_rank_are_an_error_on_all_that_names_them(name: str) -> None:
    first, second = run_ranks(2, run_other_options, name)
    assert first == second
    assert first[0] == "CommMismatchError"
    assert name in first[1]
