"""Pipeline stages on tensor-parallel grids: what they send, and what is found wrong with them.

That they train as one process does, cells of tests/assembly/test_assembly.py show.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.tensor.grid_ranks import OWN_PLAN, Own

pytest.importorskip("transformers")

ROWS, TOKENS, MICROBATCHES = 4, 6, 2
SPECS = [
    fp.GridSpec(1, 1, 2),
    fp.GridSpec(2, 1, 1),
    fp.GridSpec(1, 2, 1, "features"),
    fp.GridSpec.axonn(1, 1, 2),
    fp.GridSpec.tesseract(1, 2, stream=True),
]


def ids_of(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def noisy(architecture: str = "gpt2") -> nn.Module:
    """Noise on every parameter, so that a bias or a norm that is left out shows."""
    model = build_model(architecture, torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    return model


def words_between_stages(specs: list[fp.GridSpec]) -> list[tuple[list[int], int, float]]:
    """Of each grid: words of each message of this rank, those of all hidden states of a microbatch, and how far the
    loss is from that of one process."""
    found = []
    ids = ids_of()
    for spec in specs:
        mesh = fp.init_mesh(pp=2, tp=spec.ranks, tp_grid=spec, device="cpu")
        whole: Any = noisy().eval()
        wanted = F.cross_entropy(whole(input_ids=ids).logits.flatten(0, 1), ids.flatten())
        hidden = ROWS // MICROBATCHES * TOKENS * whole.config.hidden_size

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), target.flatten())

        pipe = fp.parallelize_pipeline(noisy(), mesh, num_microbatches=MICROBATCHES, loss=loss).eval()
        sent: list[int] = []
        send = pipe._p2p.send

        def counted(
            peer: int, tag: int, tensors: Any, note: bytes = b"", *, send: Any = send, sent: Any = sent
        ) -> None:
            sent.extend(x.numel() for x in tensors if x.dim() == 3)
            send(peer, tag, tensors, note)

        pipe._p2p.send = counted  # type: ignore[method-assign]
        torch.manual_seed(torch.distributed.get_rank())  # nothing draws
        mine = pipe.step(input_ids=ids, target=ids)
        found.append((sent, hidden, abs(float(mine - wanted.detach()))))
        pipe.close()
        mesh.close()
    return found


def test_each_rank_sends_its_part_of_the_hidden_states_to_its_twin() -> None:
    """Of p ranks each sends M H / p words a microbatch and direction, and not M H."""
    for found in run_ranks(4, words_between_stages, SPECS):
        for spec, (sent, hidden, off) in zip(SPECS, found, strict=True):
            assert sent == [hidden // spec.ranks] * MICROBATCHES, spec
            assert off < 1e-12, spec


def verified(spec: fp.GridSpec) -> str:
    mesh = fp.init_mesh(pp=2, tp=spec.ranks, tp_grid=spec, device="cpu")
    ids = ids_of()
    build = partial(build_model, "llama", torch.float32)
    report = fp.verify(build, fp.VerifyLayout(mesh), {"input_ids": ids, "labels": ids}, steps=1)
    mesh.close()
    return "" if report.ok else str(report)


@pytest.mark.expensive
def test_verify_takes_pipelines_on_grids() -> None:
    for said in run_ranks(4, verified, fp.GridSpec(1, 1, 2)):
        assert said == ""


class Centred(Own):
    """Between its layers the model's own code reads all sequences of the batch, of which a rank of z has some."""

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale)
            x = x - x.mean(0, keepdim=True)
        return self.head(self.norm(x))


def said_of_stages() -> dict[str, str]:
    mesh = fp.init_mesh(pp=2, tp=2, tp_grid=(1, 1, 2), device="cpu")
    cases: dict[str, Any] = {"mixing": (Centred, ROWS), "few rows": (Own, 3)}
    said = {}
    for name, (cls, rows) in cases.items():
        torch.manual_seed(0)
        ids = ids_of(rows)
        options: dict[str, Any] = {"num_microbatches": MICROBATCHES, "reduction": "microbatch_mean"}
        options["loss"] = lambda x, y: x.full_tensor().mean()
        pipe = fp.parallelize_pipeline(cls().double(), mesh, plan=OWN_PLAN, timeout=30.0, **options)
        try:
            pipe.step(ids, target=ids)
        except Exception as error:
            said[name] = str(error)
        pipe.close()
    mesh.close()
    return said


def test_what_a_stage_cannot_do_on_a_grid_is_raised_on_all_ranks() -> None:
    for said in run_ranks(4, said_of_stages):
        assert "Centred computes something else than without" in said["mixing"]
        assert "batch 1 cannot be cut over tp_z=2" in said["few rows"]
