"""What a program reads of split models' parameters: numbers in an optimizer's step, attributes of whole modules;
and which optimizers step them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.dist import run_ranks

PLAN = {"mlp.up": "colwise", "mlp.down": "rowwise"}


class Normalized(torch.optim.Optimizer):
    """A step as long as all gradients' norm says, which it reads as a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(list(params), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float((p.grad**2).sum()) for p in params) ** 0.5
        for p in params:
            p.add_(p.grad, alpha=-0.1 / norm)


class Decayed(torch.optim.SGD):
    """Reads numbers after another step, which torch's hooks stand around as well."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.mul_(0.99 if float(p.abs().sum()) > 1 else 1.01)


class Nested(torch.optim.Optimizer):
    """Steps another optimizer, and reads numbers after it."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = Normalized(params)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.div_(1 + 0.1 * p.abs().max().item() + 0.01 * p.norm().item())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "normalized": Normalized,
    "decayed": lambda params: Decayed(params, lr=0.1, momentum=0.9),
    "nested": Nested,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["down"](self.mlp["up"](self.norm(x)).tanh())


def build() -> nn.Module:
    torch.manual_seed(0)
    net = Net().double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return net


def train(net: nn.Module, name: str) -> dict[str, Tensor]:
    optimizer = OPTIMIZERS[name](net.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    return {name: full_parameter(p).detach().clone() for name, p in net.named_parameters()}


def train_both(name: str) -> list[float]:
    """The largest difference from one process, and the split norm's copies on this rank."""
    whole = train(build(), name)
    split = fp.parallelize(build(), dist.group.WORLD, PLAN)
    found = train(split, name)
    errors = [float((found[n] - whole[n]).abs().max()) for n in whole]
    return [max(errors), *found["norm.weight"].tolist()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_reads_numbers_is_that_of_one_process(name: str) -> None:
    first, second = run_ranks(2, train_both, name)
    assert first[0] < 1e-12
    assert first[1:] == second[1:]


def train_scaled(net: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """With torch's GradScaler; in the second step the last row of a gradient that is split has overflowed."""
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.AdamW(net.parameters(), lr=0.1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.full((3, 6), 1.0 + step)).square().mean()).backward()
        grad: Any = net.mlp["up"].weight.grad
        if step == 1 and (dist.get_rank() == 1 or not isinstance(grad, DTensor)):
            (grad._local_tensor if isinstance(grad, DTensor) else grad)[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: full_parameter(p).detach().clone() for name, p in net.named_parameters()}


def train_both_scaled() -> None:
    scales, whole = train_scaled(build().float())
    assert scales == [4.0, 2.0, 2.0]
    found_scales, found = train_scaled(fp.parallelize(build().float(), dist.group.WORLD, PLAN))
    assert found_scales == scales
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_all_ranks_skip_a_step_that_one_has_to_skip() -> None:
    run_ranks(2, train_both_scaled)


def read_around_steps() -> list[bool]:
    """Whether what a rank reads is the whole's: before steps, in one that raises, after it, in the next, after."""
    net = fp.parallelize(build(), dist.group.WORLD, PLAN)
    weight = net.mlp["up"].weight.detach()
    found = []

    def read() -> None:
        found.append(abs(weight.abs().sum().item() - float(weight.full_tensor().abs().sum())) < 1e-12)

    class Reader(torch.optim.SGD):
        is_elementwise = True  # and is not tried
        raises = True

        def step(self, closure: Any = None) -> None:
            read()
            if self.raises:
                raise RuntimeError("no step")

    read()
    optimizer = Reader(net.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    read()
    Reader.raises = False
    Reader(net.parameters(), lr=0.1).step()
    read()
    return found


def test_numbers_are_those_of_the_rank_again_after_a_step() -> None:
    assert run_ranks(2, read_around_steps) == [[False, True, False, True, False]] * 2


class LocalNorm(torch.optim.Optimizer):
    """Divides by a norm of this rank's part, behind DTensor's back; draws a number and counts in every step."""

    steps = 0

    def __init__(self, params: Any, whole: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.rand(1)
        LocalNorm.steps += 1
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            grad = p.grad if self.whole else p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            p.add_(p.grad / (grad.norm() + 1e-6), alpha=-self.param_groups[0]["lr"])


def step_for_trial(warms_up: bool) -> None:
    net = fp.parallelize(build(), dist.group.WORLD, PLAN)
    before = [full_parameter(p).detach().clone() for p in net.parameters()]

    def made(whole: bool) -> torch.optim.Optimizer:
        optimizer = LocalNorm(net.parameters(), whole)
        if warms_up:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        net(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        return optimizer

    optimizer = made(whole=False)
    with pytest.raises(ValueError, match="LocalNorm cannot step parameters that are split over ranks: two steps on"):
        optimizer.step()
    assert all(torch.equal(full_parameter(p), x) for p, x in zip(net.parameters(), before, strict=True))
    optimizer = made(whole=True)
    generator, steps = torch.Generator(), []
    generator.set_state(torch.get_rng_state())
    for _ in range(3):
        LocalNorm.steps = 0
        optimizer.step()
        steps.append(LocalNorm.steps)
    assert steps[0] > steps[1] == steps[2] == 1
    torch.rand(3, generator=generator)
    assert torch.equal(generator.get_state(), torch.get_rng_state())


@pytest.mark.parametrize("warms_up", [False, True])
def test_an_optimizer_is_tried_in_its_first_step(warms_up: bool) -> None:
    """Also where that has a learning rate of 0."""
    run_ranks(2, step_for_trial, warms_up)


def step_stages() -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    torch.manual_seed(0)
    pipe = fp.parallelize_pipeline(
        [nn.Linear(4, 5), nn.Linear(5, 4)], mesh, "1f1b", num_microbatches=2, loss=nn.MSELoss()
    )
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"Normalized cannot update parameters in parts.* pipeline stages"):
        Normalized(pipe.parameters()).step()
    LocalNorm(pipe.parameters(), whole=True).step()


def test_an_optimizer_of_stages_that_needs_all_parameters_is_refused() -> None:
    run_ranks(2, step_stages)


def grow(parameter: Tensor) -> None:
    parameter.grad.mul_(5)


def train_by_attribute(net: nn.Module) -> dict[str, Tensor]:
    """Freezes, thaws, hooks and changes gradients of a module that stays whole, each time read from the module."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def step(change: Callable[[], object] = lambda: None) -> None:
        optimizer.zero_grad()
        (net(x) - x.flip(1)).square().mean().backward()
        change()
        optimizer.step()

    def change() -> None:
        net.norm.bias.grad = None
        net.norm.weight.grad = net.norm.weight.grad * 0.5
        net.norm.weight.grad.clamp_(-0.01, 0.01)

    with pytest.raises(RuntimeError):
        net.norm.weight.grad = torch.ones(5, dtype=torch.float64)
    net.norm.weight.requires_grad_(False)
    assert not net.norm.weight.requires_grad
    step()
    net.norm.weight.requires_grad = True
    step(change)
    net.norm.weight.register_hook(lambda grad: grad * 3)
    net.norm.bias.register_post_accumulate_grad_hook(grow)
    step()
    with torch.no_grad():
        net.norm.weight.mul_(0.5)
    copied = copy.deepcopy(net.norm.weight.detach())
    assert type(copied) is type(net.norm.weight * 1) is Tensor
    assert torch.equal(copied, net.norm.weight)
    return {name: full_parameter(p).detach().clone() for name, p in net.named_parameters()}


def train_both_by_attribute() -> float:
    whole = train_by_attribute(build())
    found = train_by_attribute(fp.parallelize(build(), dist.group.WORLD, PLAN))
    return max(float((found[n] - whole[n]).abs().max()) for n in whole)


def test_parameters_of_a_whole_module_are_what_its_attributes_say() -> None:
    assert max(run_ranks(2, train_both_by_attribute)) < 1e-12
