"""Training loops of random lines: in every layout they do what they do in one process.

As `tests/zero/test_zero_random_loops.py`, for what `fp.assemble` returns: steps, passes of one's own where there is no
pipeline, and what people do in between.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastpar as fp
from examples.model import PLAN
from fastpar.verification.pieces import zero_pieces
from tests.assembly.assembly_cells import VOCAB, Cell, batch, build, make_optimizer
from tests.assembly.assembly_ranks import LIMITS, far, fed
from tests.dist import run_ranks
from tests.models import norms_in_their_own_dtype

LINES = 10  # of a loop, between its first step and its last
FEW = 14  # loops of every run
CELLS = {
    2: [
        Cell("tp2", "huggingface"),
        Cell("pp2 mb2", tied=True),
        Cell("tp2 sp full", optimizer="sgd"),
        Cell("pp2 zbv mb4 zero1"),
        Cell("cp2 zero2"),
        Cell("dp2 ep2 zero1", "experts"),
        Cell("pp2 interleaved_1f1b stages2 mb4 zero3", "huggingface", optimizer="sgd"),
        Cell("tp2 sp acc2", tied=True),
        Cell("pp2 dualpipe mb4 zero2", tied=True, optimizer="sgd"),
        Cell("dp2 zero3", "huggingface"),
    ],
    4: [
        Cell("tp2 dp2 zero3"),
        Cell("pp2 tp2 sp mb2 zero1", "huggingface"),
        Cell("tp4 grid1x2x2"),
        Cell("tp2 dp2 ep2 zero2", "experts"),
        Cell("tp2 cp2 sp", "huggingface"),
        Cell("pp2 dp2 zb_h1 mb2 acc2 zero2", tied=True),
        Cell("pp2 cp2 mb2 zero3"),
    ],
}
Found = list[tuple[str, float | None, dict[str, Tensor] | None]]


class Loop:
    """A model in training; each line of a loop is a method, which takes a number and may return one that is the same on
    all ranks. Passes of one's own are without pipelines, split sequences and accumulation."""

    def __init__(self, cell: Cell, is_whole: bool) -> None:
        self.cell, self.is_whole, layout = cell, is_whole, cell.layout
        self.has_passes = layout.pp == layout.cp == layout.accumulate == 1
        model = build(cell)
        for router in fp.expert.routers_of(model).values():  # balance losses are of microbatches
            router.losses = dataclasses.replace(router.losses, coeff=0.0)
        self.names = [name for name, _ in model.named_parameters()]
        self.kept: Any = None
        self.averages: list[AveragedModel] = []
        self.handles: list[Any] = []
        if is_whole:
            self.parts: list[nn.Module] = [model]
            self.optimizer = make_optimizer(cell, list(model.parameters()))
        else:
            plan: dict[str, Any] = {"plan": PLAN} if layout.cp > 1 and cell.model == "dense" else {}
            self.trained = fp.assemble(model, layout, lambda params: make_optimizer(cell, params), **plan)
            self.parts, self.optimizer = list(self.trained.parts), self.trained.optimizer

    def values(self) -> Any:
        if self.is_whole:
            return {name: x.detach().clone() for name, x in self.named().items()}
        return zero_pieces(self.trained.zero, "value")

    def named(self) -> dict[str, nn.Parameter]:
        return {name: p for part in self.parts for name, p in part.named_parameters(remove_duplicate=False)}

    def some(self, number: int) -> list[nn.Parameter]:
        """Of this rank those that are among three of the model's, tied ones under both names."""
        names = random.Random(number).sample(self.names, 3)
        names += ["lm_head.weight"] if self.cell.tied and any("embed_tokens" in name for name in names) else []
        held = self.named()
        return list({id(held[name]): held[name] for name in names if name in held}.values())

    def layers(self, number: int) -> list[nn.Module]:
        """That with this number, and its stand-ins."""
        named = (pair for part in self.parts for pair in part.named_modules())
        return [module for name, module in named if name.endswith(f"layers.{number % 4}")]

    def loss(self, number: int, model: Any = None) -> Tensor:
        """One's own, of this rank's rows: the mean over the ranks of dp is that of the batch."""
        is_hf = self.cell.model == "huggingface"
        ids, targets = batch(number % 16, is_hf)
        count = (targets[:, 1:] if is_hf else targets).ne(-100).sum()
        if not self.is_whole:
            dp, rank = self.cell.layout.dp, self.trained.mesh.rank("dp")
            ids, targets, count = ids.chunk(dp)[rank], targets.chunk(dp)[rank], count / dp
        output = (model or self.parts[0])(ids)
        logits, targets = (output.logits[:, :-1], targets[:, 1:]) if is_hf else (output, targets)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count

    def mean(self, loss: Tensor) -> float:
        found = loss.detach().clone()
        if not self.is_whole and self.cell.layout.dp > 1:
            dist.all_reduce(found, group=self.trained.mesh.group("dp"))
            found /= self.cell.layout.dp
        return float(found)

    # ---- steps

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        if not self.is_whole:
            return self.trained.step(fed(self.trained, self.cell, number % 16)).loss
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss)

    def evaluate(self, number: int) -> float:
        with torch.no_grad():
            if not self.is_whole:
                return self.trained.evaluate(fed(self.trained, self.cell, number % 16))
            return self.mean(self.loss(number))

    def refused(self, number: int) -> None:
        if not self.is_whole:
            with pytest.raises(ValueError, match="batch"):
                self.trained.step({})

    # ---- passes of one's own

    def backward(self, number: int) -> float | None:
        if not self.has_passes:
            return None
        loss = self.loss(number)
        loss.backward()
        return self.mean(loss)

    def two_losses(self, number: int) -> float | None:
        if not self.has_passes:
            return None
        one, other = self.loss(number), self.loss(number + 1)
        other.backward()
        one.backward()
        return self.mean(one + other)

    def forward(self, number: int) -> float | None:
        return self.mean(self.loss(number)) if self.has_passes and self.cell.layout.zero.stage < 3 else None

    def fail(self, number: int) -> None:
        if self.has_passes:
            with suppress(IndexError):
                self.parts[0](torch.full((2, 4), VOCAB))

    def update(self, number: int) -> float | None:
        if not self.has_passes:
            return None
        mesh = None if self.is_whole else self.trained.mesh
        norm = float(fp.clip_grad_norm_(self.parts[0].parameters(), 0.5, mesh=mesh))
        self.optimizer.step()
        return norm

    def evaluate_copy(self, number: int) -> float | None:
        copied = [copy.deepcopy(part) for part in self.parts]
        if not self.has_passes or self.cell.layout.zero.stage == 3:  # copies of shards beside tp cannot run
            return None
        with torch.no_grad():
            return self.mean(self.loss(number, copied[0]))

    # ---- in between

    def edit(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.some(number):
                parameter.mul_(0.9)

    def edit_data(self, number: int) -> None:
        for parameter in self.some(number):
            parameter.data.clamp_(-0.2, 0.2)

    def freeze(self, number: int) -> None:
        for parameter in self.some(number):
            parameter.requires_grad_(False)

    def thaw(self, number: int) -> None:
        for parameter in self.named().values():
            parameter.requires_grad_(True)

    def slower(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.8

    def hook(self, number: int) -> None:
        for layer in self.layers(number):
            self.handles.append(layer.register_forward_hook(lambda *call: call[-1] * 1.1))

    def hook_backward(self, number: int) -> None:
        for layer in self.layers(number):
            self.handles.append(layer.register_full_backward_hook(_halved))

    def unhook(self, number: int) -> None:
        while self.handles:
            self.handles.pop().remove()

    def keep(self, number: int) -> None:
        if self.is_whole:
            self.kept = copy.deepcopy((self.parts[0].state_dict(), self.optimizer.state_dict()))
        else:
            self.kept = copy.deepcopy(self.trained.state())

    def go_back(self, number: int) -> None:
        if self.kept is None:
            return
        if self.is_whole:
            self.parts[0].load_state_dict(self.kept[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.kept[1]))
        else:
            self.trained.load_state(copy.deepcopy(self.kept))

    def average(self, number: int) -> None:
        if not self.averages:
            self.averages = [AveragedModel(part, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for part in self.parts]
        for average, part in zip(self.averages, self.parts, strict=True):
            average.update_parameters(part)

    def evaluate_average(self, number: int) -> float | None:
        if not self.averages:
            return None
        kept = [[x.detach().clone() for x in part.parameters()] for part in self.parts]
        self._put([[x.detach().clone() for x in average.module.parameters()] for average in self.averages])
        found = self.evaluate(number)
        self._put(kept)
        return found

    @torch.no_grad()
    def _put(self, values: list[list[Tensor]]) -> None:
        for part, own in zip(self.parts, values, strict=True):
            for parameter, value in zip(part.parameters(), own, strict=True):
                parameter.copy_(value)


def _halved(_layer: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(grad if grad is None else grad * 0.5 for grad in grads)


OFTEN = {"step": 6, "backward": 3, "update": 3, "evaluate": 2, "hook": 2, "keep": 2, "go_back": 2}
HELPERS = ("values", "named", "some", "layers", "loss", "mean")
NAMES = [name for name in vars(Loop) if not name.startswith("_") and name not in HELPERS]


def lines_of(seed: int) -> list[tuple[str, int]]:
    dice = random.Random(seed)
    names = ["step", *dice.choices(NAMES, [OFTEN.get(name, 1) for name in NAMES], k=LINES), "step", "evaluate"]
    return [(name, dice.randrange(10**6)) for name in names]


def played(seed: int, cell: Cell, is_whole: bool) -> list[tuple[str, float | None, Any]]:
    """After each line: what it returned, and, where it may have changed them, the parameters."""
    norms = norms_in_their_own_dtype(build(cell)) if cell.model == "huggingface" else nullcontext()
    with norms, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of hooks beside inputs without gradients
        loop, found = Loop(cell, is_whole), []
        for name, number in lines_of(seed):
            value = getattr(loop, name)(number)
            changed = name in ("step", "update", "edit", "go_back", "evaluate_average")
            found.append((name, value, loop.values() if changed else None))
        if not is_whole:
            loop.trained.close()
    return found


def differences(cases: list[tuple[int, Cell, Found]]) -> list[str]:
    said = []
    for seed, cell, expected in cases:
        tight, loose = LIMITS[cell.model]
        lines = [name for name, _, _ in expected]
        found = played(seed, cell, False)
        for line, ((_, value, pieces), (_, wanted, whole)) in enumerate(zip(found, expected, strict=True)):
            wrong = [] if whole is None else far(pieces, whole, 10 * loose)
            if wrong or (wanted is not None and value != pytest.approx(wanted, rel=10 * tight)):
                said.append(f"{seed}, {cell}: {lines[: line + 1]}: {value}, {wanted}, {wrong[:4]}")
                break
    return said


def check(size: int, seeds: range) -> None:
    cells = [(seed, CELLS[size][seed % len(CELLS[size])]) for seed in seeds]
    cases = [(seed, cell, played(seed, cell, True)) for seed, cell in cells]
    for said in run_ranks(size, differences, cases, timeout=900):
        assert not said, "\n".join(said)


def test_loops_of_random_lines_do_what_they_do_in_one_process() -> None:
    check(2, range(FEW))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("size", [2, 4])
def test_many_loops_of_random_lines_do_what_they_do_in_one_process(size: int) -> None:
    check(size, range(FEW, 100))
