"""`fastpar.parallelize` on the parts of a model: plans written for the whole model fit every part of it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.parallel.declared import auto_plan
from fastpar.parallel.plan import match_plan
from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.partition import partition
from fastpar.tensor import VocabParallelEmbedding, VocabParallelHead, full_parameter
from tests.dist import run_ranks
from tests.models import ARCHITECTURES
from tests.pipeline.test_pipeline_partition import batch_of, forward_backward, model_of, whole_logits
from tests.tensor.test_swap import FakeGroup

LAYOUT = "E|t*2||t,t|t,N|H"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plans_match_the_same_paths_on_every_part(architecture: str) -> None:
    whole = model_of(architecture)
    plan = auto_plan(whole)
    styles = match_plan(whole, plan)
    held: list[str] = []
    for stage in partition(model_of(architecture), layout=LAYOUT).stages(range(6)):
        assert auto_plan(stage.module) == plan
        assert match_plan(stage.module, plan) == styles
        modules = dict(stage.module.named_modules())
        held += [path for path in styles if path in modules and not isinstance(modules[path], Absent)]
    assert sorted(held) == sorted(styles), "every path is on one part"


def test_patterns_that_match_nothing_anywhere_are_still_errors() -> None:
    (stage,) = partition(model_of("llama"), layout=LAYOUT).stages([0])
    with pytest.raises(ValueError, match=r"'model.layers.\*.mlp.upproj' matches no module; near .*mlp.up_proj"):
        fp.parallelize(stage.module, None, {"model.layers.*.mlp.upproj": "colwise"})
    assert type(stage.module.model.embed_tokens) is nn.Embedding


def test_sequence_parallelism_still_needs_a_stream_somewhere() -> None:
    (stage,) = partition(model_of("llama"), layout=LAYOUT).stages([0])
    with pytest.raises(ValueError, match='the style "stream"'):
        fp.parallelize(stage.module, FakeGroup(2), {"model.embed_tokens": "vocab"}, sequence_parallel=True)


def _parts_match(architecture: str, sequence_parallel: bool, overrides: dict[str, Any]) -> None:
    """Tensor-parallel parts chained in each rank's process, against the tensor-parallel model: the same bits."""
    ids, keywords = batch_of(architecture)
    whole = fp.parallelize(
        model_of(architecture, **overrides), dist.group.WORLD, sequence_parallel=sequence_parallel, gather_logits=True
    )
    cut = partition(model_of(architecture, **overrides), layout=LAYOUT)
    stages = cut.stages(range(6))
    for stage in stages:
        fp.parallelize(stage.module, dist.group.WORLD, sequence_parallel=sequence_parallel, gather_logits=True)
    torch.manual_seed(3)
    expected = whole_logits(whole, ids, keywords)
    grad = torch.randn_like(expected)
    torch.manual_seed(3)
    output = forward_backward(stages, (ids,), keywords, grad)
    assert torch.equal(output, expected)
    expected.backward(grad)
    total: dict[str, Tensor] = {}  # by the name on the first part that has the parameter
    for stage in reversed(stages):
        for name, parameter in stage.module.named_parameters():
            assert isinstance(parameter, DTensor), name
            name = next((t.names[t.parts[0]][0] for t in stage.tied if name in t.names[stage.part]), name)
            grad = full_parameter(parameter, parameter.grad)
            total[name] = total[name] + grad if name in total else grad
    assert set(total) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(total[name], full_parameter(parameter, parameter.grad)), name


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_parallel_parts_equal_the_tensor_parallel_model(architecture: str, sequence_parallel: bool) -> None:
    run_ranks(2, _parts_match, architecture, sequence_parallel, {})


def test_dropout_on_parts_draws_the_masks_of_the_model() -> None:
    run_ranks(2, _parts_match, "example", True, {"dropout": 0.3})


def _loss_on_split_logits() -> tuple[bool, bool]:
    ids, keywords = batch_of("qwen3")
    keywords |= {"labels": ids}
    whole = fp.parallelize(model_of("qwen3"), dist.group.WORLD)
    stages = partition(model_of("qwen3"), num_parts=3, loss=True).stages(range(3))
    for stage in stages:
        fp.parallelize(stage.module, dist.group.WORLD)
    assert isinstance(stages[0].module.model.embed_tokens, VocabParallelEmbedding)
    assert isinstance(stages[2].module.lm_head, VocabParallelHead)
    rows = [row["module"] for stage in stages for row in fp.explain(stage.module).rows]
    loss = forward_backward(stages, (ids,), keywords)
    return torch.equal(loss, whole(ids, use_cache=False, **keywords).loss), rows.count("(loss)") == 1


def test_last_part_computes_the_models_loss_on_split_logits() -> None:
    assert run_ranks(2, _loss_on_split_logits) == [(True, True)] * 2


def _taken_out_again() -> bool:
    ids, keywords = batch_of("gpt2")
    whole = model_of("gpt2")
    stages = partition(model_of("gpt2"), layout=LAYOUT).stages(range(6))
    for stage in stages:
        fp.unparallelize(fp.parallelize(stage.module, dist.group.WORLD))
    return torch.equal(forward_backward(stages, (ids,), keywords), whole_logits(whole, ids, keywords))


def test_unparallelized_parts_are_the_model_again() -> None:
    assert all(run_ranks(2, _taken_out_again))


class Unusual(nn.Module):
    """Reads the sizes of its ids, keeps its modules in a dict, and ties its head: parts run no such forward on hidden
    states."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(4)
        ]
        self.inner = nn.ModuleDict({"tok": nn.Embedding(13, 8), "pos": nn.Embedding(9, 8), "h": nn.ModuleList()})
        self.inner.h.extend(_Residual(block) for block in blocks)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.inner.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows, length = ids.size()
        hidden = self.inner.tok(ids) + self.inner.pos(torch.arange(0, length))
        for block in self.inner.h:
            hidden = block(hidden)
        logits = self.head(hidden).view(rows * length, -1)
        return nn.functional.cross_entropy(logits, targets.view(-1))


class _Residual(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.layers.up(self.layers.norm(hidden))
        return hidden + self.layers.down(nn.functional.gelu(inner))


def _split_points(schedule: str, points: list[str], plan: str | dict[str, str]) -> list[str]:
    torch.manual_seed(0)
    model = Unusual()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    whole = copy.deepcopy(model)
    mesh = fp.init_mesh(pp=2, tp=2)
    example = None if plan != "auto" else [torch.arange(6).view(2, 3)] * 2
    pipe = fp.parallelize_pipeline(
        model, mesh, schedule, num_microbatches=2, split_points=points, plan=plan, example_inputs=example, timeout=50
    )
    for length in (7, 5):
        ids, targets = torch.randint(0, 13, (4, length)), torch.randint(0, 13, (4, length))
        expected = whole(ids, targets)
        expected.backward()
        torch.testing.assert_close(pipe.step(ids, targets=targets), expected.detach())
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    names = []
    for stage in pipe.stages.values():
        for name, parameter in stage.module.named_parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.testing.assert_close(grad, grads[name], msg=name)
            names.append(name)
    mesh.close()
    return names


_PLAN = {"inner.h.*.layers.up": "colwise", "inner.h.*.layers.down": "rowwise"}


@pytest.mark.parametrize(
    ("schedule", "points", "plan"),
    [("1f1b", ["inner.h.1"], "auto"), ("zbv", ["inner.h.0", "inner.h.2", "inner.h.3"], _PLAN)],
    ids=["1f1b", "zbv"],
)
def test_models_cut_at_split_points_are_pipelines_with_split_layers(
    schedule: str, points: list[str], plan: str | dict[str, str]
) -> None:
    found = run_ranks(4, _split_points, schedule, points, plan)
    assert {name for names in found for name in names} | {"head.weight"} == {
        name for name, _ in Unusual().named_parameters(remove_duplicate=False)
    }
    assert found[0] == found[1] != found[2]


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.conv(pictures).flatten(2).transpose(1, 2)


class Pictures(nn.Module):
    """A diffusion transformer: pictures first, with a condition that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.time = _Patches(), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(_Conditioned() for _ in range(3))
        self.out = nn.Linear(8, 5)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, pictures: Tensor, time: Tensor) -> Tensor:
        hidden = self.patches(pictures.to(self.patches.conv.weight.dtype))
        condition = self.time(time)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.out(hidden)


class _Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden) + condition[:, None])))


def _pictures(seed: int, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pictures": torch.randn(rows, 3, 8, 8, generator=generator),
        "time": torch.randn(rows, 4, generator=generator),
    }


def test_models_of_pictures_are_cut_by_an_example() -> None:
    whole, batch, example = Pictures(), _pictures(1, 3), _pictures(2, 2)
    with pytest.raises(ValueError, match=r"Pictures needs more than its first input, or no ids .*example_inputs"):
        partition(Pictures(), num_parts=2)
    with pytest.raises(ValueError, match=r"first input of Pictures, a tensor, .* by the name 'pictures'"):
        partition(Pictures(), num_parts=2, example_inputs=(None, example["time"]))
    with pytest.raises(ValueError, match="got Tensor and 2 further positional inputs of 1"):
        partition(Pictures(), num_parts=2, example_inputs=(*example.values(), example["time"]))
    stages = partition(Pictures(), layout="E,t|t*2,H", example_inputs=tuple(example.values())).stages([0, 1])
    pictures = batch.pop("pictures")
    expected, grad = whole(pictures, **batch), torch.randn(3, 4, 5)
    assert torch.equal(forward_backward(stages, (pictures,), batch, grad), expected)
    expected.backward(grad)
    for name, parameter in whole.named_parameters():
        grads = [p.grad for stage in stages for n, p in stage.module.named_parameters() if n == name]
        torch.testing.assert_close(sum(grads), parameter.grad, msg=name)


def _assembled_pictures(layout: str) -> tuple[float, int]:
    """A step of SGD beside one process: how far off parameters are then, and how many are split."""
    whole, batch = Pictures(), _pictures(1, 4)
    target = torch.randint(0, 5, (4, 4), generator=torch.Generator().manual_seed(3))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    optimizer = sgd(list(whole.parameters()))
    mean = loss(whole(**batch), target) / target.numel()
    mean.backward()
    optimizer.step()
    assembled = fp.assemble(Pictures(), layout, sgd, loss=loss, example_inputs=_pictures(2, 2))
    with contextlib.closing(assembled) as trained:
        assert trained.step({**batch, "target": target}).loss == pytest.approx(float(mean.detach()), rel=1e-5)
        expected = dict(whole.named_parameters())
        own = [(name, p) for part in trained.parts for name, p in part.named_parameters()]
        off = max(float((full_parameter(p.detach()) - expected[name].detach()).abs().max()) for name, p in own)
        return off, sum(isinstance(p, DTensor) and p.placements[0].is_shard() for _, p in own)


@pytest.mark.parametrize("layout", ["pp2 tp2 mb2", "tp2 dp2"])
def test_assembled_models_of_pictures_are_split_by_an_example(layout: str) -> None:
    for off, splits in run_ranks(4, _assembled_pictures, layout):
        assert off < 1e-6
        assert splits >= 3
