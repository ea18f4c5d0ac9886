"""ZeRO together with other parallelism: tensor-parallel layers, replicas of shards, pipelines."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.zero.groups import local
from tests.dist import run_ranks
from tests.models import VOCAB, build_model
from tests.zero.zero_ranks import Case, Parameters, assert_same, one_thread, train_plain, train_sharded

STEPS, SEQ = 10, 5
SMALL = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 34}
MAX_NORM = 0.5  # below every norm here, so that every step clips


def tokens(step: int, microbatch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_rank)
    ids = torch.randint(VOCAB, (2, SEQ + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def llama(mesh: fp.Mesh) -> nn.Module:
    return fp.parallelize(build_model("example", torch.float32, **SMALL), mesh, gather_logits=True)


def loss_of(model: nn.Module, step: int, microbatch: int, data_rank: int) -> Tensor:
    ids, targets = tokens(step, microbatch, data_rank)
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def averaged(mesh: fp.Mesh, dtype: torch.dtype, accumulate: int) -> tuple[Parameters, list[float]]:
    """Training on the mesh with nothing but an average: this rank's parts of parameters, and the norms."""
    model, comm = llama(mesh), Communicator(mesh.group("dp"))
    named = dict(model.named_parameters())
    masters = {name: nn.Parameter(local(p).clone()) for name, p in named.items()}
    model.to(dtype)
    optimizer = adamw(masters.values())
    norms = []
    for step in range(STEPS):
        sums: Parameters = {}
        for microbatch in range(accumulate):
            (loss_of(model, step, microbatch, mesh.rank("dp")) / accumulate).backward()
            for name, p in model.named_parameters():
                gradient = local(p.grad).float()
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
            model.zero_grad()
        means = [comm.all_reduce(sums[name].to(dtype).float(), "avg") for name in masters]
        total = fp.clip.GradSum.of(model.parameters(), mesh=mesh, grads=wrapped(model, means))
        norms.append(total.norm().item())
        torch._foreach_mul_(means, total.clip_factor(MAX_NORM))
        for master, mean in zip(masters.values(), means, strict=True):
            master.grad = mean
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                local(p).copy_(masters[name])
    return {name: local(p).clone() for name, p in model.named_parameters()}, norms


def wrapped(model: nn.Module, means: list[Tensor]) -> list[Tensor]:
    """Gradients as DTensors like their parameters, so that `GradSum.of` knows what they are parts of."""
    return [
        torch.distributed.tensor.DTensor.from_local(
            mean, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        for p, mean in zip(model.parameters(), means, strict=True)
    ]


def sharded(mesh: fp.Mesh, stage: int, dtype: torch.dtype, accumulate: int) -> tuple[Parameters, list[float]]:
    model = llama(mesh)
    optimizer = adamw(model.parameters())
    precision = fp.Precision.bf16() if dtype == torch.bfloat16 else None
    # Persistent parameters travel in float32, so their sums are not rounded to 16 bits: there are none here.
    zero = fp.zero.shard(
        model, optimizer, group=mesh, stage=stage, precision=precision, max_norm=MAX_NORM, persistent_share=0.0
    )
    norms = []
    for step in range(STEPS):
        for microbatch in range(accumulate):
            with zero.no_sync() if microbatch + 1 < accumulate else nullcontext():
                (loss_of(model, step, microbatch, mesh.rank("dp")) / accumulate).backward()
        optimizer.step()
        norms.append(zero.norm.item())
        model.cpu()  # where it is: trainers do so at their end, with gradients
        optimizer.zero_grad()
    if stage == 3:
        model.unshard()
    return {name: local(p).clone() for name, p in model.named_parameters()}, norms


def tensor_parallel_run(tp: int, dtype: torch.dtype, accumulate: int) -> None:
    mesh = fp.init_mesh(dp_shard=4 // tp, tp=tp, device="cpu")
    expected, expected_norms = averaged(mesh, dtype, accumulate)
    for stage in range(4):
        found, norms = sharded(mesh, stage, dtype, accumulate)
        assert_same(found, expected, f"stage {stage}")
        assert norms == expected_norms


@pytest.mark.parametrize(
    ("tp", "dtype", "accumulate"),
    [
        (1, torch.float32, 1),
        (2, torch.float32, 1),
        (2, torch.bfloat16, 2),
        *(
            pytest.param(2, *case, marks=pytest.mark.slow)
            for case in ((torch.float32, 4), (torch.bfloat16, 1), (torch.bfloat16, 4))
        ),
    ],
    ids=str,
)
def test_stages_on_a_mesh_equal_plain_averaging_on_it(tp: int, dtype: torch.dtype, accumulate: int) -> None:
    """Tensor-parallel parameters that are sharded once more, clipped, with the same bits and the same norms."""
    run_ranks(4, tensor_parallel_run, tp, dtype, accumulate)


def replicated_runs(cases: list[Case]) -> list[Parameters]:
    return [train_sharded(case) for case in cases]


def test_replicas_of_shards_average_within_and_then_across() -> None:
    """Stage 0 shards nothing, so that all ranks are averaged at once."""
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    dtypes = (torch.float32, torch.bfloat16)
    cases = [Case(stage, dtype, 2, options={"mesh": mesh}) for stage in range(4) for dtype in dtypes]
    with one_thread():
        expected = [train_plain(case, 4, replicas=1 if case.stage == 0 else 2) for case in cases]
    for found in run_ranks(4, replicated_runs, cases):
        for case, parameters, wanted in zip(cases, found, expected, strict=True):
            assert_same(parameters, wanted, case)


def pipeline(mesh: fp.Mesh, *, shard_head: bool = False) -> fp.pipeline.Pipeline:
    """Two stages that share the embedding, which is the head's weight as well; or the head."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    model = build_model("example", torch.float32, **SMALL, tie_word_embeddings=not shard_head)
    options: dict[str, Any] = {"shard_head": True} if shard_head else {"loss": loss}
    return fp.parallelize_pipeline(model, mesh, "1f1b", num_microbatches=2, **options)


def averaged_pipeline(mesh: fp.Mesh, *, shard_head: bool = False) -> tuple[Parameters, list[float]]:
    pipe, comm = pipeline(mesh, shard_head=shard_head), Communicator(mesh.group("dp"))
    optimizer = adamw(pipe.parameters())
    norms = []
    for step in range(STEPS):
        pipe.step(*tokens(step, 0, mesh.rank("dp"))[:1], target=tokens(step, 0, mesh.rank("dp"))[1])
        for grad in (local(p.grad) for p in pipe.parameters()):
            grad.copy_(comm.all_reduce(grad, "avg"))
        norms.append(fp.clip_grad_norm_(pipe.parameters(), MAX_NORM, mesh=mesh).item())
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return found, norms


def sharded_pipeline(
    mesh: fp.Mesh, stage: int, precision: fp.Precision | None = None, *, shard_head: bool = False
) -> tuple[Parameters, list[float]]:
    pipe = pipeline(mesh, shard_head=shard_head)
    optimizer = adamw(pipe.parameters())
    zero = fp.zero.shard(
        pipe.named_parameters(),
        optimizer,
        group=mesh,
        stage=stage,
        precision=precision,
        max_norm=MAX_NORM,
    )
    norms = []
    for step in range(STEPS):
        ids, targets = tokens(step, 0, mesh.rank("dp"))
        pipe.step(ids, target=targets)
        optimizer.step()
        norms.append(zero.norm.item())
        optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    pipe.close()
    return found, norms


def pipeline_run() -> list[tuple[Parameters, list[float]]]:
    mesh = fp.init_mesh(pp=2, dp_shard=2, device="cpu")
    for shard_head in (False, True):
        expected, expected_norms = averaged_pipeline(mesh, shard_head=shard_head)
        for stage in (0, 1, 2):
            found, norms = sharded_pipeline(mesh, stage, shard_head=shard_head)
            assert_same(found, expected, f"stage {stage}, {shard_head=}")
            assert norms == expected_norms
    late = nn.Linear(2, 2)
    fp.zero.shard(late, torch.optim.SGD(late.parameters(), lr=0.1), group=mesh, stage=1)
    late.weight.pipeline_adds_grad = True
    with pytest.raises(RuntimeError, match=r"weight is shared by stages of a pipeline that was made after shard\("):
        late(torch.ones(1, 2)).sum().backward()
    return [sharded_pipeline(mesh, stage, fp.Precision.bf16()) for stage in (0, 2)]


def test_pipelines_train_as_with_plain_averaging_tied_weights_included() -> None:
    """In float32 with its bits; in bfloat16 the copies of a tied weight stay equal, which they do if both have got the
    gradients of both stages."""
    found = run_ranks(4, pipeline_run)
    for number in range(2):
        (first, first_norms), (last, last_norms) = found[0][number], found[2][number]
        assert first_norms == last_norms
        assert torch.equal(first["embed_tokens.weight"], last["lm_head.weight"])
        assert_same(found[0][number][0], found[1][number][0])
    assert_same(found[0][0][0], found[0][1][0], "stages 0 and 2 in bfloat16")


# ---- recurrent layers


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.rnn(x)[0])
        return out


def recurrent_run() -> None:
    values = []
    for stage in (0, 3):
        mesh = fp.init_mesh(dp_shard=2)
        model = Recurrent()
        if stage == 3:  # as `parallelize` keeps it whole on tensor-parallel ranks
            fp.tensor.replicate(model.rnn, mesh.group("tp"))
        optimizer = adamw(model.parameters())
        fp.zero.shard(model, optimizer, group=mesh, stage=stage)
        for step in range(2):
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.rank("dp")))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append({name: fp.tensor.full_parameter(p) for name, p in model.named_parameters()})
        mesh.close()
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, msg=name)


def test_recurrent_layers_that_tensor_parallel_ranks_have_whole_are_sharded() -> None:
    run_ranks(2, recurrent_run)
