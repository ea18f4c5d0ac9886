"""What optimizers, scalers and norms do at their edges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastpar as fp
from fastpar import ops, reference


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
