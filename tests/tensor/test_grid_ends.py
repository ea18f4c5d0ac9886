"""Embedding and head at the ends of a grid's region: what they send, and that code between them sees the whole."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar as fp
from fastpar.comm import CommMismatchError
from fastpar.tensor import full_parameter
from fastpar.tensor.grid_blocks import DeferredSum
from tests.dist import run_ranks
from tests.models import VOCAB
from tests.tensor.grid_ranks import OWN_PLAN, Own

BATCH, TOKENS, HIDDEN, RANKS = 4, 8, 16, 4
GRIDS = [fp.GridSpec(1, 2, 2), fp.GridSpec(2, 2, 1), fp.GridSpec.summa(2), fp.GridSpec(2, 1, 2)]
COPIES = fp.GridSpec.axonn(1, 2, 2)


class Ends(Own):
    """The model with code of its own before and behind the layers: `how` says which. Returns a number."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.place = nn.Parameter(torch.randn(1, TOKENS, HIDDEN))

    def forward(self, ids: Tensor, how: str = "") -> Tensor:  # type: ignore[override]
        x, more = self.embed(ids), torch.zeros((), dtype=torch.float64)
        if how == "scaled and placed":
            x = x * 3 / 2 + self.place
        elif how == "read":
            x = x + x.square().mean()
        elif how == "written":
            x[:, 0] = 1.5
        elif how == "detached":
            x = x.detach() + 0 * self.place
        before = x
        for layer in self.layers:
            x = layer(x, None)
        if how == "read twice":
            more = before.square().mean() + x.cos().sum()
        x = self.norm(x)
        if how == "normed":
            more = x.tanh().sum()
        elif how == "normed, changed":
            x.mul_(2)
        elif how == "sliced":
            x = x[:, slice(0, None), :]
        elif how == "last":
            x = x[:, -3:]
        return self.head(x).logsumexp(-1).square().mean() + more


HOW = ["", "scaled and placed", "read", "written", "detached", "read twice", "normed", "normed, changed"]
HOW += ["sliced", "last"]


def made(spec: fp.GridSpec) -> tuple[Ends, Ends, Any]:
    torch.manual_seed(0)
    whole = Ends().double()
    with torch.no_grad():
        for p in whole.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
    return whole, fp.parallelize(copy.deepcopy(whole), mesh, OWN_PLAN), mesh


def ids_of(step: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def words(spec: fp.GridSpec) -> list[list[tuple[str, float]]]:
    """Collectives of embedding and head in forward and backward, with the words that a rank sends, of M h."""
    _, model, mesh = made(spec)
    model(ids_of(0))
    with fp.comm.record() as log:
        out = model(ids_of(1))
        forward = len(log)
        out.backward()
    sent = [(e.op, e.size, e.nbytes / 8 / (BATCH * TOKENS * HIDDEN)) for e in log if e.dtype.is_floating_point]
    begin = len([e for e in log[:forward] if e.dtype.is_floating_point])
    logits = max(at for at in range(begin) if sent[at][:2] == ("all_gather", RANKS))  # this loss reads them all
    leaves = [(op, size) for op, size, _ in sent[logits - 2 : logits]]  # two axes of two ranks
    assert leaves == [("all_gather", 2)] * 2
    left = sum(n for *_, n in sent[logits - 2 : logits])
    mesh.close()
    parts = sent[:logits], sent[begin:]
    of_all = [[(op, n) for op, size, n in part if size == RANKS and n > 0.5] for part in parts]
    return [*of_all, [("leaves", left)]]


def words_of(specs: list[fp.GridSpec]) -> list[Any]:
    return [words(spec) for spec in specs]


def test_embedding_and_head_send_m_h_words_each_way() -> None:
    share = 1 - 1 / RANKS
    wanted = [
        [("reduce_scatter", share)],
        [("all_reduce", 2 * share), ("all_gather", share)],  # a norm stands before the head
        [("leaves", share)],
    ]
    for found in run_ranks(RANKS, words_of, GRIDS):
        assert found == [wanted] * len(GRIDS)


def differences(specs: list[fp.GridSpec]) -> dict[str, float]:
    found: dict[str, float] = {}
    for spec in specs:
        whole, split, mesh = made(spec)
        for how in HOW:
            for model in (whole, split):
                model.zero_grad()
                model(ids_of(2), how).backward()
                model(ids_of(3), how).backward()
            for (name, p), other in zip(split.named_parameters(), whole.parameters(), strict=True):
                assert (p.grad is None) == (other.grad is None), (how, name)
                if other.grad is not None and p.grad is not None:
                    scale = max(float(other.grad.abs().max()), 1e-3)
                    apart = (full_parameter(p, p.grad) - other.grad).abs().max()
                    found[f"{spec} {how} {name}"] = float(apart) / scale
            with torch.no_grad():
                found[f"{spec} {how}"] = float((split(ids_of(4), how) - whole(ids_of(4), how)).abs())
        mesh.close()
    return found


def test_code_of_the_model_between_the_ends_sees_the_whole() -> None:
    for found in run_ranks(RANKS, differences, [fp.GridSpec(1, 2, 2), fp.GridSpec(2, 2, 1), COPIES]):
        assert not {k: v for k, v in found.items() if not v < 1e-9}


def compiled_differences() -> dict[str, float]:
    whole, split, mesh = made(fp.GridSpec(2, 1, 2))
    split.layers[0].compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo asks tensors for what they warn of
        for model in (whole, split):
            model(ids_of(2)).backward()
    pairs = zip(split.named_parameters(), whole.parameters(), strict=True)
    found = {}
    for (name, p), other in pairs:
        if other.grad is not None:
            apart = (full_parameter(p, p.grad) - other.grad).abs().max()
            found[name] = float(apart / other.grad.abs().max().clamp(1e-3))
    mesh.close()
    return found


@pytest.mark.expensive
def test_a_compiled_layer_is_entered_outside_of_its_graph() -> None:
    for found in run_ranks(RANKS, compiled_differences):
        assert not {k: v for k, v in found.items() if not v < 1e-9}


def said_of_ids() -> list[str]:
    _, model, mesh = made(fp.GridSpec(1, 2, 2))
    said = []
    rank = torch.distributed.get_rank()
    for ids in (ids_of(rank), ids_of(0).masked_fill(torch.tensor(rank == 2), VOCAB)):
        try:
            model.embed(ids)
        except (CommMismatchError, IndexError) as error:
            said.append(str(error))
    mesh.close()
    return said


def test_wrong_ids_on_one_rank_are_an_error_on_all() -> None:
    for said in run_ranks(RANKS, said_of_ids):
        assert "different ids" in said[0]
        assert said[1] == "ids[0, 0] is 257 on rank 2, outside the vocabulary [0, 257)"


def reads() -> list[Any]:
    comm = fp.comm.Communicator(torch.distributed.group.WORLD)
    parts = torch.full((2, 3), float(comm.rank + 1), requires_grad=True)
    x: Any = DeferredSum.of(parts, comm)
    with fp.comm.record() as log:
        unread = [repr(x), tuple(x.shape), x.requires_grad, len(log)]
        numbers = [x.detach().numpy().sum(), x.tolist(), (x.view(6) * 2).sum().item(), x[0].clone().tolist(), len(log)]
    with torch.no_grad():
        y = DeferredSum.of(parts * 1, comm)
        y += 1
        y.view(-1)[0] = 9.0
    F.layer_norm(x, (3,)).sum().backward()
    x.sum().backward()
    return [unread, numbers, y.tolist(), parts.grad.tolist()]  # type: ignore[union-attr]


def test_a_deferred_sum_is_made_once_and_by_whatever_reads_it() -> None:
    for unread, numbers, written, grad in run_ranks(2, reads):
        assert unread == ["DeferredSum(shape=(2, 3), dtype=torch.float32)", (2, 3), True, 0]
        assert numbers == [18.0, [[3.0] * 3] * 2, 36.0, [3.0] * 3, 1]
        assert written == [[9.0, 4.0, 4.0], [4.0] * 3]
        assert grad == [[pytest.approx(1.0)] * 3] * 2
