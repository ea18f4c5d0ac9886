"""What optimizers, scalers and norms do at their edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastpar as fp
from fastpar import ops, reference
from fastpar.optim import AdamW


def test_a_gradient_that_is_nan_shows_in_what_lion_makes_of_it_in_kernel_and_reference() -> None:
    for step in (ops.lion_step, reference.lion_step):
        p, m = torch.ones(5), torch.zeros(5)
        step([p], [torch.tensor([1.0, float("nan"), -1.0, 0.0, 2.0])], [m], lr=0.5)
        assert p.isnan().tolist() == m.isnan().tolist() == [False, True, False, False, False]
        assert p[[0, 2, 3]].tolist() == [0.5, 1.5, 1.0]


@pytest.mark.parametrize("what", ["params", "states"])
def test_tensors_whose_elements_share_memory_are_refused(what: str) -> None:
    def overlapping() -> torch.Tensor:
        return torch.zeros(10).as_strided((4, 4), (2, 1))

    def dense() -> torch.Tensor:
        return torch.zeros(4, 4).t()[:, ::2].repeat(1, 2).t()  # strides of its own are fine

    p = overlapping() if what == "params" else dense()
    m = overlapping() if what == "states" else dense()
    for step in (ops.lion_step, reference.lion_step):
        with pytest.raises(ValueError, match=r"elements that share memory.*clone\(\)"):
            step([p], [torch.ones(4, 4)], [m], lr=0.5)
        step([dense()], [torch.ones(4, 4)], [dense()], lr=0.5)


def test_sums_of_squares_add_up() -> None:
    a, b = torch.randn(7), torch.randn(3, 5)
    both = fp.GradSum().add([a, b])
    parts = fp.GradSum().add([a]), fp.GradSum().add([b])
    for total in (parts[0] + parts[1], sum(parts)):  # the same number: its digits may differ by what is not carried yet
        assert torch.equal(total.norm(torch.float64), both.norm(torch.float64))
    assert torch.equal(parts[0].sums, fp.GradSum().add([a]).sums)  # neither has changed
    with pytest.raises(TypeError):
        parts[0] + 1.0


def test_a_scaler_takes_torchs_names() -> None:
    ours = fp.LossScaler(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25)
    assert theirs.state_dict().items() <= ours.state_dict().items()


@pytest.mark.parametrize(("saves", "loads"), [(fp.optim.AdamW, torch.optim.AdamW), (torch.optim.AdamW, fp.optim.AdamW)])
def test_states_of_adamw_go_to_torch_and_back(saves: type, loads: type) -> None:
    def trained(kind: type, model: nn.Linear, steps: int) -> torch.optim.Optimizer:
        optimizer = kind(model.parameters(), lr=1e-2)
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    state = trained(saves, model, 2).state_dict()
    optimizer = loads(model.parameters(), lr=1.0)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert float(optimizer.state[model.weight]["step"]) == 3.0


@pytest.mark.parametrize("kind", [fp.optim.AdamW, fp.optim.SGD, fp.optim.Lion])
def test_autograd_knows_that_a_step_has_written_to_the_parameters(kind: type) -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    optimizer = kind([weight], lr=0.1)
    loss = (x * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # whose dgrad would be that of the new weight


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(p.abs() < 1.0),  # zeros of both signs
    "data": lambda p: p.data.clamp_(-0.5, 0.5),
    "foreach": lambda p: torch._foreach_copy_([p[: len(p) // 2]], [torch.ones(len(p) // 2)]),
    "memory": lambda p: p.detach().view(torch.int16).numpy().fill(0x3F00),  # 0.5
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("numel", [9, (1 << 17) + 3])
def test_masters_follow_what_is_written_to_their_parameters(numel: int, how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(numel, generator=generator).bfloat16())
    split = nn.Parameter(param.detach().clone())
    exact = nn.Parameter(param.detach().float())
    optimizers = [AdamW([param], lr=0.1, master="float32"), AdamW([split], lr=0.1, master="split"), AdamW([exact], 0.1)]
    for _ in range(3):
        exact.grad = torch.randn(numel, generator=generator).bfloat16().float()
        param.grad = split.grad = exact.grad.bfloat16()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(param, exact.bfloat16())
            assert ((split.float() - exact).abs() <= 2.0**-7 * exact.abs() + 2.0**-9).all()  # a remainder may stay
            before = param.detach().clone()
            for x in (param, split):
                WRITES[how](x)
            exact.copy_(torch.where(before == param, exact, param.float()))


def test_writes_that_torch_does_not_count_are_looked_for_in_some_steps(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))  # gradients are zero, and steps leave it
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0, master="float32")
    uncounted = {2: 1.0, 20: 2.0, 100: 4.0, 128: 5.0, 129: 6.0, 256: 8.0}  # by step: index and value
    for step in range(1, 257):
        param.grad = torch.zeros_like(param)
        if step in uncounted:
            param.data[int(uncounted[step])] = uncounted[step]
        if step == 90:
            with torch.no_grad():
                param[0] = 9.0
        optimizer.step()
    assert param.tolist() == [9.0, 1.0, 2.0, 0.0, 0.0, 5.0, 6.0, 0.0, 8.0]  # what was written before step 100 is undone
    assert [message.split(" has found")[0] for message in caplog.messages] == ["step 128", "step 256"]
