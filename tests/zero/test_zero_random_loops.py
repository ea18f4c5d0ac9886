"""Training loops of random lines: in every stage they do what they do in one process, or raise.

Orders of calls that nobody has thought of are where a library differs in silence: a norm after the step, a forward that
no backward pass follows, gradients that are kept over steps.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, Parameters, whole_values

SIZE, ROWS = 2, 6
LINES = 14  # of a loop, between its first pass and its last step
CASES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in (0, 1, 2, 3)),
    (2, {"offload": "cpu"}),
    (3, {"offload": "cpu"}),
    (3, {"persistent_share": 0.0}),
    (0, {"bucket_bytes": 64}),
    (1, {"bucket_bytes": 64}),
]
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=1e-2, eps=1e-4),
]


class Loop:
    """A model in training; each line of a loop is a method, which takes a number and may return one that is the same on
    all ranks."""

    def __init__(self, seed: int, stage: int | None, options: dict[str, Any]) -> None:
        self.model = Net(torch.float64)
        self.optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](self.model.parameters())
        self.zero = None if stage is None else fp.zero.shard(self.model, self.optimizer, stage=stage, **options)
        self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.has_masters = "offload" in options
        self.kept: Any = None
        self.kept_states: Any = None

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number % 50)
        x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (7, 2))
        if self.zero is None:
            return x, y
        return x.chunk(SIZE)[dist.get_rank()], y.chunk(SIZE)[dist.get_rank()]

    def mean(self, loss: Tensor) -> float:
        """Over the ranks, of those that have a part of the batch."""
        found = loss.detach().clone()
        if self.zero is not None:
            dist.all_reduce(found)
            found /= SIZE
        return float(found)

    def loss(self, number: int, model: Any = None) -> Tensor:
        x, y = self.batch(number)
        return nn.functional.mse_loss((model or self.model)(x), y)

    def some(self, number: int) -> list[nn.Parameter]:
        return random.Random(number).sample(list(self.model.parameters()), 3)

    # ---- passes

    def backward(self, number: int) -> float:
        loss = self.loss(number)
        loss.backward()
        return self.mean(loss)

    def backward_again(self, number: int) -> float:
        loss = self.loss(number)
        loss.backward(retain_graph=True)
        loss.backward()
        return self.mean(loss)

    def two_losses(self, number: int) -> float:
        one, other = self.loss(number), self.loss(number + 1)
        other.backward()
        one.backward()
        return self.mean(one + other)

    def sum_of_losses(self, number: int) -> float:
        loss = self.loss(number) + 0.5 * self.loss(number + 1)
        loss.backward()
        return self.mean(loss)

    def accumulated(self, number: int) -> float:
        with nullcontext() if self.zero is None else self.zero.no_sync():
            self.loss(number).backward()
        return self.backward(number + 1)

    def checkpointed(self, number: int) -> float:
        x, y = self.batch(number)
        loss = nn.functional.mse_loss(checkpoint(self.model, x, use_reentrant=False), y)
        loss.backward()
        return self.mean(loss)

    def of_a_part(self, number: int) -> float:
        loss = self.model.norm(self.model.first(self.batch(number)[0])).square().mean()
        loss.backward()
        return self.mean(loss)

    def forward(self, number: int) -> float:
        return self.mean(self.loss(number))

    def evaluate(self, number: int) -> float:
        with torch.no_grad():
            return self.mean(self.loss(number))

    def infer(self, number: int) -> float:
        with torch.inference_mode():
            return self.mean(self.loss(number))

    def fail(self, number: int) -> None:
        with suppress(RuntimeError):
            self.model(torch.ones(2, 3, dtype=torch.float64))

    # ---- gradients

    def zero_grad(self, number: int) -> None:
        self.optimizer.zero_grad()

    def zero_grad_of_model(self, number: int) -> None:
        self.model.zero_grad()

    def zeros(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def clip(self, number: int) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))

    def clip_values(self, number: int) -> None:
        if any(parameter.grad is not None for parameter in self.model.parameters()):  # else torch raises
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)

    def halve(self, number: int) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def drop(self, number: int) -> None:
        for parameter in self.some(number):
            parameter.grad = None

    def replace(self, number: int) -> None:
        for parameter in self.some(number):
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5

    # ---- parameters and the optimizer

    def step(self, number: int) -> None:
        self.optimizer.step()

    def step_of_closure(self, number: int) -> float:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward()
            return loss

        return self.mean(torch.as_tensor(self.optimizer.step(closure)))  # type: ignore[arg-type]

    def edit(self, number: int) -> None:
        with torch.no_grad():
            one, other, third = self.some(number)
            one.mul_(0.9)
            other.clamp_(-0.2, 0.2)
            third.copy_(third * 0.9 + 0.01)

    def freeze(self, number: int) -> None:
        for parameter in self.some(number):
            parameter.requires_grad_(False)

    def thaw(self, number: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name != "frozen")

    def slower(self, number: int) -> None:
        self.rates.step()

    def keep(self, number: int) -> None:
        self.kept = {name: x.clone() for name, x in self.model.state_dict().items()}

    def put_back(self, number: int) -> None:
        if self.kept is not None:
            self.model.load_state_dict(self.kept)

    def keep_states(self, number: int) -> None:
        self.kept_states = copy.deepcopy(self.optimizer.state_dict())

    def put_back_states(self, number: int) -> None:
        if self.kept_states is not None and not self.has_masters:  # which are states, and would be put back, too
            self.optimizer.load_state_dict(self.kept_states)

    def average_weights(self, number: int) -> float:
        self.average.update_parameters(self.model)
        with torch.no_grad():
            return self.mean(self.loss(number, self.average))

    def evaluate_copy(self, number: int) -> float:
        with torch.no_grad():
            return self.mean(self.loss(number, copy.deepcopy(self.model)))


REFUSED = (  # in stage 3, from a forward that fails, or that no backward pass follows
    "which stage 3 has sharded",
    "while stage 3 had it gathered",
    "got mixed torch.Tensor and DTensor",
)
OFTEN = {"backward": 8, "step": 8, "zero_grad": 6, "clip": 3, "forward": 2, "evaluate": 2}
NAMES = [name for name in vars(Loop) if not name.startswith("_") and name not in ("batch", "mean", "loss", "some")]


def lines_of(seed: int) -> list[tuple[str, int]]:
    dice = random.Random(seed)
    names = dice.choices(NAMES, [OFTEN.get(name, 1) for name in NAMES], k=LINES)
    names = ["backward", *names, "backward", "step", "zero_grad", "backward", "clip", "step", "evaluate"]
    return [(name, dice.randrange(10**6)) for name in names]


def played(seed: int, stage: int | None, options: dict[str, Any]) -> list[tuple[str, float | None, Parameters]]:
    """After each line: what it returned, and, where it may have changed them, the parameters."""
    loop, found = Loop(seed, stage, options), []
    for name, number in lines_of(seed):
        try:
            value = getattr(loop, name)(number)
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSED):
                raise
            break
        changed = name in ("step", "step_of_closure", "edit", "put_back")
        found.append((name, value, whole_values(loop.model) if changed else {}))
    if loop.zero is not None:
        loop.zero.close()
    return found


def differences(seeds: list[int]) -> list[str]:
    warnings.simplefilter("ignore", UserWarning)  # of steps without gradients, and of schedulers before steps
    found = []
    for seed in seeds:
        stage, options = CASES[seed % len(CASES)]
        expected = played(seed, None, options)
        lines = [name for name, _, _ in expected]
        for line, ((_, value, params), (_, wanted, whole)) in enumerate(
            zip(played(seed, stage, options), expected, strict=False)
        ):
            wrong = [name for name, x in whole.items() if not torch.allclose(params[name], x, rtol=1e-7, atol=1e-9)]
            if wrong or (wanted is not None and value != pytest.approx(wanted, rel=1e-7, abs=1e-9)):
                found.append(f"{seed}: stage {stage}, {options}: {lines[: line + 1]}: {value}, {wanted}, {wrong}")
                break
    return found


def check(seeds: list[int]) -> None:
    for found in run_ranks(SIZE, differences, seeds, timeout=600):
        assert not found, "\n".join(found)


def test_loops_of_random_lines_do_what_they_do_in_one_process() -> None:
    check([*range(3 * len(CASES))])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_loops_of_random_lines_do_what_they_do_in_one_process() -> None:
    check([*range(3 * len(CASES), 500)])
