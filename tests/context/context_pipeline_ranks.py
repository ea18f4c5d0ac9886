"""What ranks do in the tests of pipelines over split sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from tests.context.context_ranks import FAMILIES, PACKED, alone, gradients, whole_batch
from tests.tensor.family_models import tiny_model

# Of float64, sums in another order; transformers' own loss takes logits in float32, and so do its norms their
# gradients, which round otherwise where they are not divided yet.
TOLERANCE = {"own": 1e-5, "cross_entropy": 1e-9, "sum": 1e-6}


@dataclass(frozen=True)
class PipeCase:
    """A pipeline, and how its batch is split; two microbatches of a row each."""

    schedule: str = "1f1b"
    documents: Any = PACKED
    loss: str = "own"  # "own", "cross_entropy" or "sum"
    layout: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def family_model(family: str) -> nn.Module:
    return tiny_model(family, FAMILIES[family]).double()


def sum_of_tokens(output: Any, target: Tensor) -> Tensor:
    """A loss of one's own: the sum over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def run_step(pipe: Any, case: PipeCase, seed: int = 1) -> Tensor:
    """The loss of the whole sequences."""
    batch = fp.context.shard(pipe, whole_batch(seed), documents=case.documents)
    if case.loss == "own":
        return fp.context.total(pipe, pipe.step(**batch))
    given = {"position_ids": batch["position_ids"], "target": batch["shift_labels"]}
    loss = pipe.step(batch["input_ids"], **given)
    return fp.context.total(pipe, loss / batch["num_items_in_batch"] if case.loss == "sum" else loss)


def options_of(case: PipeCase) -> dict[str, Any]:
    losses: dict[str, Any] = {
        "own": {},
        "cross_entropy": {"loss": fp.pipeline.CrossEntropy()},
        "sum": {"loss": sum_of_tokens, "reduction": "sum"},
    }
    return {"num_microbatches": 2, **losses[case.loss], **case.options}


def compare_pipelines(sizes: dict[str, int], family: str, cases: list[PipeCase]) -> list[int]:
    """Loss and gradients of each case against one process; how many parameters this rank had in each."""
    with in_float64():
        mesh = fp.init_mesh(**sizes, device="cpu")
        compared = []
        for case in cases:
            plain = family_model(family)
            context = fp.Context(layout=case.layout, block=4)
            pipe = fp.parallelize_pipeline(
                family_model(family), mesh, case.schedule, context=context, **options_of(case)
            )
            loss = run_step(pipe, case)
            expected = alone(plain, whole_batch(), case.documents)
            expected.backward()
            off, tolerance = abs(float(loss / expected.detach()) - 1), TOLERANCE[case.loss]
            assert off < min(tolerance, 1e-6), f"{case}: the loss is off by {off:.1e}"
            wanted, comm = gradients(plain), fp.Communicator(mesh.group("dp_cp"))
            scale = 1 / int(batch_count(whole_batch(), case)) if case.loss == "sum" else 1.0
            names = {name: p for name, p in pipe.named_parameters() if p.grad is not None}
            for name, p in names.items():
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                total = comm.all_reduce(grad.clone()) * scale
                error = float((total - wanted[name]).abs().max() / wanted[name].abs().max())
                assert error < tolerance, f"{case}: {name} is off by {error:.1e} of its largest entry"
            compared.append(len(names))
            pipe.close()
        return compared


def batch_count(batch: dict[str, Tensor], case: PipeCase) -> int:
    """Labels that count, behind the first of each document."""
    rows = case.documents or ((batch["labels"].shape[1],),) * 2
    rows = rows if len(rows) == 2 else rows * 2
    parts = [part for row, sizes in zip(batch["labels"], rows, strict=True) for part in row.split(list(sizes))]
    return sum(int((part[1:] != -100).sum()) for part in parts)


def refusals() -> list[str]:
    """What a pipeline over split sequences does not take, in words: when it is made, and when it is called."""
    mesh = fp.init_mesh(pp=2, cp=2, device="cpu")
    found = []

    def said(action: Any) -> None:
        try:
            action()
        except ValueError as error:
            found.append(str(error))
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append("accepted")

    def made(**options: Any) -> Any:
        model = tiny_model("llama", FAMILIES["llama"])
        context = fp.Context(layout="contiguous")
        return fp.parallelize_pipeline(model, mesh, num_microbatches=2, context=context, **options)

    said(lambda: made(schedule="pipedream", optimizer=torch.optim.SGD))
    said(lambda: made(loss=sum_of_tokens))
    said(lambda: made(reduction="microbatch_mean"))
    pipe = made()
    ids = whole_batch()["input_ids"]
    said(lambda: pipe.step(ids, labels=ids))
    places = torch.arange(37).expand(2, -1)
    given = {"input_ids": ids, "position_ids": places}
    batch = fp.context.shard(pipe, given, documents=[37] if mesh.rank("pp") else [20, 17])
    said(lambda: pipe.forward(**batch))
    batch = fp.context.shard(pipe, whole_batch())
    said(lambda: pipe.step(batch["input_ids"], position_ids=batch["position_ids"], labels=batch["labels"]))
    twice = {name: x if x.dim() == 0 else torch.cat([x, x]) for name, x in batch.items()}
    said(lambda: pipe.step(**twice))
    pipe.close()
    pipe = made(loss=fp.pipeline.CrossEntropy())
    batch = fp.context.shard(pipe, whole_batch())
    given = {"position_ids": batch["position_ids"]}
    said(lambda: pipe.step(batch["input_ids"], target=batch["input_ids"], **given))
    batch = fp.context.shard(pipe, {"input_ids": ids})
    said(lambda: pipe.step(batch["input_ids"], target=batch["input_ids"], **given))
    pipe.close()
    return found
