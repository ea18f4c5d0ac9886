"""What the ranks of the context-attention tests run, and one rank's attention to compare with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import CommError, Communicator, record
from fastpar.context import layout as layouts
from fastpar.contracts.attention import AttentionDropout, AttentionMask, TokenRange, positions
from fastpar.ops.context_attention import gather, ring
from fastpar.ops.context_attention.api import context_attention
from fastpar.ops.context_attention.choose import choose_spread
from fastpar.ops.context_attention.methods import GatherKeys, Usp
from fastpar.recompute import Selective, checkpoint
from fastpar.reference.attention import attention as reference_attention

MASKS = {
    "causal": AttentionMask(causal=True),
    "full": AttentionMask(),
    "packed": AttentionMask(causal=True, documents=((5, 11, 1, 20),)),
    "packed rows": AttentionMask(causal=True, documents=((5, 11, 1, 20), (30, 7))),
    "window": AttentionMask(causal=True, window=(6, 0)),
    "both sides": AttentionMask(window=(2, 3)),
    "chunk": AttentionMask(causal=True, chunk=7),
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
TOKENS = 37  # that no number of ranks divides


def make_layout(name: str, mask: AttentionMask, size: int, tokens: int = TOKENS) -> tuple[Any, ...]:
    if name == "dealt":
        return layouts.dealt(tokens, size, mask, block=3)
    if name == "scrambled":  # nothing is in order, and one rank has next to nothing
        cuts = [0, 3, 4, 9, 17, 18, 25, 31, tokens]
        chunks = [TokenRange(a, b) for a, b in itertools.pairwise(cuts)][::-1]
        return tuple(tuple(chunks[rank::size]) if rank else tuple(chunks[::size][::-1]) for rank in range(size))
    return getattr(layouts, name)(tokens, size)


@dataclass(frozen=True)
class Case:
    """One call of `context_attention`, and the seed of its inputs."""

    method: Any = "ring"
    layout: str = "zigzag"
    mask: str = "causal"
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (8, 8)  # D, D_v
    dtype: torch.dtype = torch.float64
    sink: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    overlap: bool = True
    tokens: int = TOKENS


def inputs_of(case: Case) -> tuple[Tensor, ...]:
    """q, k, v, dout and sink of the whole sequence, in float64, rounded to the dtype."""
    made = torch.Generator().manual_seed(3)
    (queries, keys), (width, width_v) = case.heads, case.widths
    shapes = [(2, queries, case.tokens, width), (2, keys, case.tokens, width), (2, keys, case.tokens, width_v)]
    shapes += [(2, queries, case.tokens, width_v), (queries,)]
    return tuple(torch.randn(shape, generator=made, dtype=torch.float64).to(case.dtype).double() for shape in shapes)


def options_of(case: Case) -> dict[str, Any]:
    dropout = AttentionDropout(case.dropout, 11, first_batch=2, first_head=1) if case.dropout else None
    return {"softcap": case.softcap, "dropout": dropout, "scale": 0.4}


def dense(case: Case) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, dsink of the whole sequence on one rank, in float64."""
    q, k, v, dout, sink = inputs_of(case)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    whole = (TokenRange(0, case.tokens),)
    tiles = MASKS[case.mask].tiles(whole, whole)
    out = reference_attention(*leaves[:3], tiles, sink=leaves[3] if case.sink else None, **options_of(case))
    out.backward(dout)
    return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)


def start_case(case: Case, comm: Communicator) -> tuple[Tensor, list[Tensor], Tensor]:
    """This rank's out, its q, k, v and sink, and dout."""
    mask = MASKS[case.mask]
    layout = make_layout(case.layout, mask, comm.size, case.tokens)
    mine = positions(layout[comm.rank])
    q, k, v, dout, sink = (x.to(case.dtype) for x in inputs_of(case))
    leaves = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
    leaves.append(sink.clone().requires_grad_())
    out = context_attention(
        *leaves[:3], group=comm, layout=layout, mask=mask, method=case.method, overlap=case.overlap,
        sink=leaves[3] if case.sink else None, **options_of(case),
    )  # fmt: skip
    return out, leaves, dout[:, :, mine]


def run_case(case: Case, comm: Communicator) -> tuple[Tensor, ...]:
    """This rank's out, dq, dk, dv, dsink."""
    out, leaves, dout = start_case(case, comm)
    out.backward(dout)
    return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)


def whole_of(case: Case, parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The ranks' results as one rank's: tokens to their places, parts of dsink added."""
    layout = make_layout(case.layout, MASKS[case.mask], len(parts), case.tokens)
    held = torch.cat([positions(ranges) for ranges in layout])
    whole = []
    for pieces in list(zip(*parts, strict=True))[:4]:
        joined = torch.cat(pieces, 2)
        out = torch.empty_like(joined)
        out[:, :, held] = joined
        whole.append(out)
    return [*whole, sum(part[4] for part in parts)]


def run_cases(cases: list[Case], transport: str = "auto") -> list[tuple[Tensor, ...]]:
    comm = Communicator(dist.group.WORLD, transport=transport)
    return [run_case(case, comm) for case in cases]


# ---- bits ------------------------------------------------------------------------------------------------------------


@contextmanager
def slow_steps(seconds: float) -> Iterator[None]:
    """Attention that takes longer, in some steps."""
    calls = itertools.count()

    def late(attend: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(seconds * (next(calls) % 3))
            return attend(*args)

        return call

    with (
        mock.patch.object(ring, "attend", late(ring.attend)),
        mock.patch.object(ring, "attend_backward", late(ring.attend_backward)),
        mock.patch.object(gather, "attend", late(gather.attend)),
    ):
        yield


def differing_bits(cases: list[Case]) -> list[str]:
    """The variants of the cases whose results are not those of the first run, bit for bit, on this rank."""
    shared, sent = (Communicator(dist.group.WORLD, transport=transport) for transport in ("auto", "torch"))
    found = []
    for case in cases:
        want = run_case(case, shared)
        variants = [("again", case, shared, 0.0), ("sent", case, sent, 0.0)]
        variants += [("no overlap", replace(case, overlap=False), comm, 0.0) for comm in (shared, sent)]
        if shared.rank == shared.size - 1 or shared.size == 4:
            variants += [("late", case, shared, 0.01 * shared.rank), ("late, sent", case, sent, 0.01 * shared.rank)]
        else:
            variants += [("prompt", case, shared, 0.0), ("prompt, sent", case, sent, 0.0)]
        for name, variant, comm, seconds in variants:
            with slow_steps(seconds):
                got = run_case(variant, comm)
            if not all(torch.equal(one, other) for one, other in zip(got, want, strict=True)):
                found.append(f"{name}: {case}")
    return found


def differing_layers(cases: list[Case]) -> list[bool]:
    """Whether cases that follow each other forward, and the other way backward, give what each gives alone, where the
    last rank is late."""
    comm = Communicator(dist.group.WORLD)
    want = [run_case(case, comm) for case in cases]
    with slow_steps(0.03 if comm.rank == comm.size - 1 else 0.0):
        started = [start_case(case, comm) for case in cases]
        for out, _, dout in reversed(started):
            out.backward(dout)
    got = [(out.detach(), *(leaf.grad for leaf in leaves[:3])) for out, leaves, _ in started]
    return [
        not all(torch.equal(one, other) for one, other in zip(mine, alone, strict=False))
        for mine, alone in zip(got, want, strict=True)
    ]


# ---- words -----------------------------------------------------------------------------------------------------------


def sent_elements(cases: list[Case], transport: str = "torch") -> list[list[list[tuple[str, float]]]]:
    """(op, elements that this rank sends) of each collective of forward, and of backward; comparisons left out."""
    comm = Communicator(dist.group.WORLD, transport=transport)
    found = []
    for case in cases:
        run_case(case, comm)  # regions are made
        with record() as forward:
            out, _, dout = start_case(case, comm)
        with record() as backward:
            out.backward(dout)
        logs = [
            [(e.op, e.nbytes / e.dtype.itemsize) for e in log if e.dtype != torch.int64] for log in (forward, backward)
        ]
        found.append(logs)
    return found


# ---- recomputation, errors -------------------------------------------------------------------------------------------


def recomputed(case: Case) -> tuple[list[bool], int, list[str]]:
    """Whether gradients are those without recomputation, how often a block was attended to again, and the collectives
    of backward that forward has, too."""
    comm = Communicator(dist.group.WORLD)
    want = run_case(case, comm)
    again: list[int] = []
    attend = ring.attend

    def counted(*args: Any) -> Any:
        again.append(1)
        return attend(*args)

    mask, layout = MASKS[case.mask], make_layout(case.layout, MASKS[case.mask], comm.size, case.tokens)
    mine = positions(layout[comm.rank])
    q, k, v, dout, _ = (x.to(case.dtype) for x in inputs_of(case))
    leaves = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_attention(q, k, v, group=comm, layout=layout, mask=mask, method=case.method, scale=0.4) * 1.0

    out = checkpoint(layer, *leaves, policy=Selective())
    with mock.patch.object(ring, "attend", counted), record() as log:
        out.backward(dout[:, :, mine])
    got = [out.detach(), *(leaf.grad for leaf in leaves)]
    return [torch.equal(a, b) for a, b in zip(got, want, strict=False)], len(again), [entry.op for entry in log]


def bad_calls() -> list[str]:
    """What each of some calls raised here, where the last rank's arguments are wrong; then whether a good one works."""
    comm = Communicator(dist.group.WORLD)
    last, mask = comm.rank == comm.size - 1, AttentionMask(causal=True)
    layout = layouts.zigzag(8, comm.size)
    x = torch.ones(1, 4, 8 // comm.size, 4)
    good = {"q": x, "k": x, "v": x, "group": comm, "layout": layout, "mask": mask, "method": "ring"}
    wrong: list[dict[str, Any]] = [
        {"q": None},
        {"q": x[:, :, 1:]},
        {"k": x.double()},
        {"k": x[:, :3], "v": x[:, :3]},
        {"layout": layouts.contiguous(8, comm.size)},
        {"layout": layout[:1]},
        {"layout": (layout[0],) * comm.size},
        {"layout": "zigzag"},
        {"mask": AttentionMask()},
        {"mask": AttentionMask(documents=((3, 4),))},
        {"mask": AttentionMask(documents=((8,), (8,)))},
        {"mask": None},
        {"method": "gather"},
        {"method": "rings"},
        {"method": Usp(3)},
        {"method": GatherKeys(5)},
        {"scale": 2.0},
        {"softcap": -1.0},
        {"sink": torch.zeros(4)},
        {"sink": torch.zeros(3)},
        {"dropout": AttentionDropout(0.5, comm.rank)},
        {"q": x.clone().requires_grad_()},
        {"overlap": 1},
    ]
    found = []
    for change in wrong:
        try:
            context_attention(**{**good, **(change if last else {})})
            found.append("nothing")
        except (TypeError, ValueError, CommError) as error:
            found.append(f"{type(error).__name__}: {error}")
    out = context_attention(**good)  # type: ignore[arg-type]
    return [*found, str(bool(torch.allclose(out, x)))]


def second_derivatives(methods: list[Any]) -> list[str]:
    comm, found = Communicator(dist.group.WORLD), []
    for method in methods:
        for constant in (False, True):
            x = torch.randn(1, 4, 6, 4, requires_grad=True)
            layout, mask = layouts.contiguous(6 * comm.size, comm.size), AttentionMask(causal=True)
            out = context_attention(x, x, x, group=comm, layout=layout, mask=mask, method=method)
            seed = torch.ones_like(out) if constant else torch.ones_like(out, requires_grad=True)
            (grad,) = torch.autograd.grad(out, x, seed, create_graph=True)
            try:
                grad.sum().backward()
                found.append("nothing")
            except RuntimeError as error:
                found.append(str(error))
    return found


def chosen_methods(cases: list[Case]) -> list[tuple[int, int, bool]]:
    comm = Communicator(dist.group.WORLD)
    return [
        tuple(choose_spread(comm, make_layout(c.layout, MASKS[c.mask], comm.size, c.tokens), MASKS[c.mask],
                            torch.empty(1, c.heads[0], 1, 1), c.heads[1]))
        for c in cases
    ]  # fmt: skip
