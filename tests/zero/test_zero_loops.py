"""What training loops do to parameters and gradients between the calls: clipping, freezing, moving, replacing."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, Parameters, assert_same, batch, make_optimizer, whole_of, whole_values

STAGES = (0, 1, 2, 3)
SIZE = 2
MAX_NORM = 0.05  # below every norm here


def loss_here(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, 0, dist.get_rank())
    return nn.functional.mse_loss(model(x).float(), y)


def loss_of_all(model: nn.Module, step: int) -> Tensor:
    losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(step, 0, rank) for rank in range(SIZE))]
    return torch.stack(losses).mean()


def shard(model: nn.Module, optimizer: Any, stage: int, **options: Any) -> fp.zero.Zero:
    return fp.zero.shard(model, optimizer, stage=stage, **options)


def assert_close(found: Parameters, expected: Parameters, what: object, tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].view(value.shape).float(), value, rtol=1e-4, atol=tolerance, msg=f"{what}: {name}"
        )


# ---- gradients of model.parameters()


def clip_norm(model: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))


def clip_norm_one_by_one(model: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False))


def clip_value(model: nn.Module) -> float:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.003)
    return 0.0


def halve(model: nn.Module) -> float:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    return 0.0


def replace(model: nn.Module) -> float:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    return 0.0


def drop_some(model: nn.Module) -> float:
    for number, parameter in enumerate(model.parameters()):
        if number % 2:
            parameter.grad = None
    return 0.0


def fastpars_clip(model: nn.Module) -> float:
    return float(fp.clip_grad_norm_(model.parameters(), MAX_NORM))


EDITS: dict[str, Callable[[nn.Module], float]] = {
    f.__name__: f for f in (clip_norm, clip_norm_one_by_one, clip_value, halve, replace, drop_some, fastpars_clip)
}


def edited_run(edit: str, stage: int, precision: str | None, accumulate: int = 1) -> tuple[Parameters, list[float]]:
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    shard(model, optimizer, stage, precision=precision)
    norms = []
    for step in range(3):
        for microbatch in range(accumulate):
            (loss_here(model, step + 10 * microbatch) / accumulate).backward()
        norms.append(EDITS[edit](model))
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model), norms


def edited_plain(edit: str, accumulate: int = 1) -> tuple[Parameters, list[float]]:
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    norms = []
    for step in range(3):
        for microbatch in range(accumulate):
            (loss_of_all(model, step + 10 * microbatch) / accumulate).backward()
        norms.append(EDITS[edit](model))
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model), norms


def edited_runs(edit: str, cases: list[tuple[int, str | None, int]]) -> list[tuple[Parameters, list[float]]]:
    return [edited_run(edit, *case) for case in cases]


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_done_to_gradients_of_the_model_is_done_to_what_the_optimizer_takes(edit: str) -> None:
    """In all stages, with master weights and without, after one backward pass and after two."""
    cases: list[tuple[int, str | None, int]] = [
        (stage, precision, accumulate) for stage in STAGES for precision in (None, "bf16") for accumulate in (1, 2)
    ]
    expected = {accumulate: edited_plain(edit, accumulate) for accumulate in (1, 2)}
    for of_rank in run_ranks(SIZE, edited_runs, edit, cases):
        for case, (found, norms) in zip(cases, of_rank, strict=True):
            values, wanted = expected[case[2]]
            rough = case[1] == "bf16"  # 8 bits of parameters, and lr 0.1
            assert norms == pytest.approx(wanted, rel=5e-2 if rough else 1e-4), (edit, case)
            assert_close(found, values, (edit, case), 2e-2 if rough else 1e-5)


def odd_gradients() -> None:
    for stage in (1, 2):
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage)
        loss_here(model, 0).backward()
        weight = model.first.weight
        with pytest.raises(ValueError, match="must be a tensor like the averaged gradient"):
            weight.grad = torch.zeros_like(weight)
        assert weight.grad is not None
        copied = copy.deepcopy(model)
        assert copied.first.weight.grad is None
        assert type(copied.first.weight) is nn.Parameter
        torch.save(model.state_dict(), io.BytesIO())
        torch.save(model, io.BytesIO())
        optimizer.zero_grad()
        assert weight.grad is None
        assert type(weight) is nn.Parameter
        loss_here(model, 0).backward()
        optimizer.step()
        assert weight.grad is not None
        optimizer.zero_grad()
        assert type(weight) is nn.Parameter


def test_a_gradient_of_another_kind_is_refused_and_copies_have_none() -> None:
    run_ranks(SIZE, odd_gradients)


def scaled_run(stage: int) -> Parameters:
    """The loop of torch's documentation, and what accelerate does."""
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    shard(model, optimizer, stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_here(model, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return whole_values(model)


def scaled_runs() -> list[Parameters]:
    return [scaled_run(stage) for stage in (0, 1, 2)]


def test_unscaled_and_clipped_gradients_are_taken() -> None:
    expected, _ = edited_plain("clip_norm")
    for of_rank in run_ranks(SIZE, scaled_runs):
        for stage, found in enumerate(of_rank):
            assert_close(found, expected, stage)


def held_before_run(stage: int) -> float:
    """A list of the parameters that was made before `shard`, as for a scheduler of clipping."""
    model = Net()
    held = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer("sgd", model.parameters())
    shard(model, optimizer, stage)
    loss_here(model, 0).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(held, MAX_NORM))
    optimizer.step()
    return norm


def held_before_runs() -> list[float]:
    return [held_before_run(stage) for stage in STAGES]


def test_parameters_listed_before_shard_have_the_averaged_gradients_too() -> None:
    for norms in run_ranks(SIZE, held_before_runs):
        assert norms == pytest.approx(edited_plain("clip_norm")[1][:1] * 4, rel=1e-4)


def captured_gradient() -> None:
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage)
        loss = loss_here(model, 0)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if stage == 3:
            with pytest.raises(RuntimeError, match="shards of stage 3"):
                torch.autograd.grad(loss, parameters, allow_unused=True)
        else:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            assert sum(x is None for x in found) == 1  # unused
        x = batch(0, 0, 0)[0].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)  # of inputs: in any stage
        assert gradient.abs().sum() > 0
        loss_here(model, 0).backward()
        optimizer.step()


def test_gradients_of_shards_are_refused_and_those_of_inputs_are_not() -> None:
    run_ranks(SIZE, captured_gradient)


def penalty(model: nn.Module, stage: int) -> Any:
    """A term of the loss that is made of parameters."""
    found: Any = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            found = found + (parameter.full_tensor() if stage == 3 else parameter).square().sum()
    return 0.01 * found


def penalised() -> None:
    def train(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int) -> Parameters:
        optimizer = make_optimizer("sgd", model.parameters())
        if stage >= 0:
            shard(model, optimizer, stage)
        for step in range(3):
            (loss(model, step) + penalty(model, stage)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_values(model)

    expected = train(Net(), loss_of_all, -1)
    for stage in STAGES:
        assert_close(train(Net(), loss_here, stage), expected, stage)
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    shard(model, optimizer, 3)
    loss = loss_here(model, 0)
    with pytest.raises(RuntimeError, match=r"sharded, outside of the forward of .*full_tensor\(\)"):
        penalty(model, 2)
    assert float(model.first.weight.detach().norm()) > 0.0
    loss.backward()
    penalty(model, 2)  # a number for a log, after backward
    optimizer.step()


def test_a_loss_may_have_terms_of_parameters() -> None:
    run_ranks(SIZE, penalised)


class ReadsHead(nn.Module):
    """Whose head does not run: its weight is read, in the model's forward as trainers with fused losses do, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 5)

    def loss(self, hidden: Tensor) -> Tensor:
        weight, bias = (x.full_tensor() if isinstance(x, DTensor) else x for x in (self.head.weight, self.head.bias))
        return nn.functional.linear(hidden, weight, bias).exp().mean()

    def forward(self, x: Tensor, *, with_loss: bool) -> Tensor:
        return self.loss(self.body(x)) if with_loss else self.body(x)


def reads_head(stage: int | None, where: str, **options: Any) -> Parameters:
    torch.manual_seed(0)
    model = ReadsHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(3, SIZE, 7, 4)
    if stage is not None:
        shard(model, optimizer, stage, **options)
    for step in range(3):
        rows = x[step].flatten(0, 1) if stage is None else x[step, dist.get_rank()]
        if where == "inside":
            loss = model(rows, with_loss=True)
        else:
            loss = model.loss(model.body(rows) if where == "alone" else model(rows, with_loss=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def heads_read() -> None:
    for where in ("inside", "outside", "alone"):
        expected = reads_head(None, where)
        for options in ({"units": ["body", "head"]}, {"persistent_share": 1.0}, {}):
            assert_close(reads_head(3, where, **options), expected, (where, options))


def test_whole_weights_that_are_read_where_their_module_does_not_run_get_the_mean_of_all_ranks() -> None:
    run_ranks(SIZE, heads_read)


def given_run(stage: int | None, **options: Any) -> Parameters:
    """Gradients that no backward pass has made, a loss of a parameter that no module uses, and both."""
    model: Any = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage, **options)
    for step in range(3):
        for parameter in model.parameters() if step != 1 else ():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.1)
        if step > 0:
            loss = loss_of_all(model, step) if stage is None else loss_here(model, step)
            unused = model.unused.full_tensor() if stage == 3 else model.unused
            (loss + unused.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def given_runs() -> list[Parameters]:
    cases: list[dict[str, Any]] = [{}, {"offload": "cpu"}, {"persistent_share": 1.0, "offload": "cpu"}]
    return [given_run(stage, **each) for each in cases for stage in STAGES]


def test_gradients_that_are_set_by_hand_are_stepped_with() -> None:
    """In stage 3 also those of parameters that every rank keeps."""
    expected = given_run(None)
    for of_rank in run_ranks(SIZE, given_runs):
        for case, found in enumerate(of_rank):
            assert_close(found, expected, case)


# ---- freezing and unfreezing


def toggled(model: Any, step: int) -> None:
    """Before a step: a layer is frozen at first, trained from step 2 on, and another one frozen again in step 3."""
    model.first.weight.requires_grad_(step >= 2)
    model.scale.requires_grad_(step >= 1)
    model.last.weight.requires_grad_(step != 3)


def toggled_plain(kind: str) -> Parameters:
    model = Net()
    toggled(model, 0)
    optimizer = make_optimizer(kind, model.parameters())
    for step in range(6):
        toggled(model, step)
        loss_of_all(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def toggled_run(kind: str, stage: int, options: dict[str, Any]) -> tuple[Parameters, bool]:
    model = Net()
    toggled(model, 0)
    optimizer = make_optimizer(kind, model.parameters())
    zero = shard(model, optimizer, stage, **options)
    for step in range(6):
        toggled(model, step)
        loss_here(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = zero.state_dict()
    zero.load_state_dict(state)
    return whole_values(model), state["has_state"]["first.weight"]


def toggled_runs(kind: str, cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[Parameters, bool]]:
    return [toggled_run(kind, *case) for case in cases]


@pytest.mark.parametrize("kind", ["adamw", "ours"])
def test_parameters_that_are_unfrozen_and_frozen_later_train_as_in_one_process(kind: str) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in STAGES]
    cases += [(1, {"overlap": False}), (2, {"offload": "cpu"}), (1, {"precision": "bf16"}), (3, {"precision": "bf16"})]
    expected = toggled_plain(kind)
    found = run_ranks(SIZE, toggled_runs, kind, cases)
    for case, *of_ranks in zip(cases, *found, strict=True):
        assert_same(of_ranks[0][0], of_ranks[1][0], case)
        rough = "precision" in case[1]
        assert_close(of_ranks[0][0], expected, case, 5e-2 if rough else 1e-5)
        assert of_ranks[0][1]


def late_group() -> None:
    """A layer that comes to the optimizer when it is unfrozen."""

    def trained(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None) -> Parameters:
        model.first.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if stage is not None:
            shard(model, optimizer, stage)
        for step in range(4):
            if step == 2:
                model.first.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 1e-3})
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_values(model)

    expected = trained(Net(), loss_of_all, None)
    for stage in STAGES:
        assert_close(trained(Net(), loss_here, stage), expected, stage)


def test_a_parameter_group_that_is_added_later_is_trained() -> None:
    run_ranks(SIZE, late_group)


def strange_group() -> None:
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        loss_here(model, 0).backward()
        with pytest.raises(ValueError, match="was not there in"):
            optimizer.step()


def late_module() -> None:
    for stage in STAGES:
        model: Any = Net()
        shard(model, make_optimizer("sgd", model.parameters()), stage)
        model.last = nn.Linear(13, 2).requires_grad_(False)
        loss_here(model, 0).backward()
        model.last.requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"last\.(bias|weight) has come into the model after fastpar\.zero\.shard"
        ):
            loss_here(model, 1).backward()
    model = Net()
    optimizers = [make_optimizer("sgd", model.parameters())]
    shard(model, optimizers[0], 1)
    torch.manual_seed(dist.get_rank())
    model.last = nn.Linear(13, 2)
    model.average = copy.deepcopy(model.first)  # has no gradient
    optimizers.append(make_optimizer("sgd", model.last.parameters()))
    with pytest.warns(UserWarning, match="different"):
        shard(model.last, optimizers[1], 1)
    for step in range(2):
        loss_here(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = [torch.empty_like(model.last.weight) for _ in range(SIZE)]
    dist.all_gather(values, model.last.weight.detach())
    assert torch.equal(*values)


def test_gradients_of_a_module_that_has_come_later_are_refused_unless_it_is_sharded_too() -> None:
    run_ranks(SIZE, late_module)


def test_a_parameter_that_was_made_later_is_refused() -> None:
    run_ranks(SIZE, strange_group)


# ---- optimizers that take turns, hooks


def alternating(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None, precision: Any) -> Parameters:
    """As in a GAN: two optimizers of one model take turns, and one forgets its gradients alone."""
    first = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1, momentum=0.9)
    rest = [p for p in model.parameters() if all(p is not other for other in first.param_groups[0]["params"])]
    second = torch.optim.SGD(rest, lr=0.05, momentum=0.9)
    if stage is not None:
        shard(model, [first, second], stage, precision=precision)
    for step in range(4):
        loss(model, step).backward()
        first.step()
        first.zero_grad()
        loss(model, 10 + step).backward()  # the second's gradients are of both passes
        if step % 2:
            second.step()
            second.zero_grad()
    return whole_values(model)


def faked(stage: int | None) -> Parameters:
    """A generator's forward, a step of the discriminator on what it made, and the generator's backward pass."""
    torch.manual_seed(0)
    pair = nn.ModuleList(nn.Sequential(nn.Linear(n, 8), nn.Tanh(), nn.Linear(8, m)) for n, m in ((7, 7), (7, 1)))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in pair]
    if stage is not None:
        shard(pair, optimizers, stage)
    for step in range(2):
        fake = pair[0](batch(step, 0, 0)[0])
        for made, optimizer in ((fake.detach(), optimizers[1]), (fake, optimizers[0])):
            pair[1](made).square().mean().backward()
            optimizer.step()
            pair.zero_grad()
    return whole_values(pair)


def fakes() -> None:
    expected = faked(None)
    for stage in STAGES:
        assert_close(faked(stage), expected, stage)


def test_a_graph_outlives_the_step_of_an_optimizer_of_other_parameters() -> None:
    run_ranks(SIZE, fakes)


def hooked(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None, precision: Any) -> Parameters:
    optimizer = make_optimizer("sgd", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage, precision=precision)

    def halve_all(*_: Any) -> None:
        halve(model)

    model.twice.weight.register_hook(lambda grad: grad * 3)
    model.scale.register_hook(lambda grad: grad * 0.5)
    optimizer.register_step_pre_hook(halve_all)
    for step in range(3):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def edited_states(
    model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None, precision: Any
) -> Parameters:
    """States that are replaced, scaled, copied and dropped between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if stage is not None:
        shard(model, optimizer, stage, precision=precision)
    for step in range(6):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        first, second, third = (optimizer.state[x.weight] for x in (model.first, model.twice, model.last))
        first["momentum_buffer"] = first["momentum_buffer"] * 0.5
        second["momentum_buffer"].mul_(-1.0)
        if step == 1:
            optimizer.state.pop(model.last.weight)
        elif step == 2:
            optimizer.state[model.last.weight] = {key: value * 2 for key, value in third.items()}
    return whole_values(model)


LOOPS = {loop.__name__: loop for loop in (alternating, hooked, edited_states)}


def loops_of_stages(kind: str) -> None:
    expected = LOOPS[kind](Net(), loss_of_all, None, None)
    for stage in STAGES:
        for precision in (None, "bf16"):
            found = LOOPS[kind](Net(), loss_here, stage, precision)
            assert_close(found, expected, (stage, precision), 5e-2 if precision else 1e-5)
            for name, value in found.items():
                theirs = fp.Communicator(dist.group.WORLD).broadcast(value, 0)
                assert torch.equal(value, theirs), f"{stage} {precision}: ranks have another {name}"


@pytest.mark.parametrize("kind", LOOPS)
def test_turns_of_optimizers_and_hooks_do_what_they_do_in_one_process(kind: str) -> None:
    run_ranks(SIZE, loops_of_stages, kind)


def functional(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None) -> Parameters:
    """Two gradient steps, one of them on tensors that the model has for a call alone, and a teacher's parameters."""
    optimizer = make_optimizer("sgd", model.parameters())
    teacher = {name: nn.Parameter(p.detach() + 0.1) for name, p in model.named_parameters()}
    if stage is not None:
        shard(model, optimizer, stage)

    def called(tensors: dict[str, Any]) -> Any:
        return lambda x: torch.func.functional_call(model, tensors, (x,))

    for step in range(2):
        own = {name: p for name, p in model.named_parameters() if p.requires_grad and name != "unused"}
        grads = torch.autograd.grad(loss(called(own), step), list(own.values()), create_graph=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(own.items(), grads, strict=True)}
        (loss(called(fast), step) + loss(model, step) - loss(called(teacher), step).detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def held_parameters() -> None:
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage, precision="bf16")
        for _ in range(2):
            own = {id(parameter) for parameter in model.parameters()}
            assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == own
            loss_here(model, 0).backward()
            optimizer.step()


def test_param_groups_have_the_models_parameters_from_the_start() -> None:
    run_ranks(SIZE, held_parameters)


def functional_calls() -> None:
    # The fast weights are of a rank's own batch, so that ranks have one here
    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step, 0, 0)
        return nn.functional.mse_loss(model(x), y)

    expected = functional(Net(), loss, None)
    for stage in (0, 1, 2):
        assert_close(functional(Net(), loss, stage), expected, stage)
    model = Net()
    shard(model, make_optimizer("sgd", model.parameters()), 3)
    with pytest.raises(RuntimeError, match="functional_call needs stage=2"):
        torch.func.functional_call(model, {"first.weight": torch.zeros(13, 7)}, (batch(0, 0, 0)[0],))
    with pytest.raises(RuntimeError, match=r"traced graph .* would hold parameters that stage 3 gathers"):
        make_fx(model)(batch(0, 0, 0)[0])
    loss(model, 0).backward()


def test_tensors_of_a_functional_call_are_not_taken_for_the_models() -> None:
    run_ranks(SIZE, functional_calls)


def swapped(model: Any, loss: Callable[[nn.Module, int], Tensor], stage: int | None, offload: str | None) -> Parameters:
    """Parameters have the memory of others for an evaluation, and their own again."""
    optimizer = make_optimizer("sgd", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage, offload=offload)
    for step in range(3):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        own = [p.data for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            halved = loss(model, 0)
        for parameter, data in zip(model.parameters(), own, strict=True):
            parameter.data = data
    return {**whole_values(model), "halved": halved}


def swaps() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return nn.functional.mse_loss(*(model(batch(step, 0, 0)[0]), batch(step, 0, 0)[1]))

    expected = swapped(Net(), loss, None, None)
    for stage in (0, 1, 2):
        for offload in (None, "cpu"):
            assert_close(swapped(Net(), loss, stage, offload), expected, (stage, offload))


def test_parameters_may_have_other_memory_for_an_evaluation() -> None:
    run_ranks(SIZE, swaps)


def teachers() -> None:
    """A copy whose data are set to an average, and one that would be trained."""
    found = []
    for stage in (None, 3):
        model = Net()
        if stage is not None:
            shard(model, make_optimizer("sgd", model.parameters()), stage)
        teacher = copy.deepcopy(model)
        for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data = mine.data * 0.9 + its.detach() * 0.2
        with torch.no_grad():
            found.append(teacher(batch(0, 0, 0)[0]))
    assert torch.allclose(found[1], found[0], rtol=1e-5)
    with pytest.raises(RuntimeError, match="was computed in a copy of a model in stage 3"):
        teacher(batch(0, 0, 0)[0].requires_grad_()).sum().backward()
    teacher.requires_grad_(False)
    teacher(batch(0, 0, 0)[0].requires_grad_()).sum().backward()


def test_copies_in_stage_3_take_data_and_refuse_to_be_trained() -> None:
    run_ranks(SIZE, teachers)


# ---- moving and replacing


def moved_to(model: nn.Module) -> None:
    model.to("cpu:0")


def converted_and_back(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.double().to(dtype)


def given_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


MOVES = {f.__name__: f for f in (moved_to, converted_and_back, given_other_memory, assigned)}


def moved_run(move: str, stage: int, precision: str | None) -> Parameters:
    model = Net()
    optimizer = make_optimizer("adamw", model.parameters())
    shard(model, optimizer, stage, precision=precision)
    for step in range(4):
        if step == 1:
            MOVES[move](model)
        loss_here(model, step).backward()
        if step == 2 and precision is None:  # else gradients are converted with it, and rounded
            MOVES[move](model)
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def moved_runs() -> None:
    for stage in STAGES:
        for precision in (None, "bf16"):
            expected = moved_run("none", stage, precision)
            for move in MOVES:
                if move == "none" or (stage == 3 and move in ("assigned", "given_other_memory")):  # are refused
                    continue
                assert_same(moved_run(move, stage, precision), expected, (move, stage, precision))


MOVES["none"] = lambda model: None


def test_parameters_that_get_other_memory_of_the_same_kind_go_on_training() -> None:
    run_ranks(SIZE, moved_runs)


def new_values() -> None:
    """Set by hand between steps, as an average of weights is."""
    for stage in (0, 1, 2):
        for precision in (None, "bf16"):
            model = Net()
            optimizer = make_optimizer("sgd", model.parameters())
            shard(model, optimizer, stage, precision=precision)
            loss_here(model, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.last.bias.data = torch.tensor([3.0, 4.0], dtype=model.last.bias.dtype)
            loss_here(model, 1).backward()
            optimizer.param_groups[0]["lr"] = 1e-4
            optimizer.step()
            assert (model.last.bias.float() - torch.tensor([3.0, 4.0])).abs().max() < 0.1, (stage, precision)


def test_values_that_are_set_by_hand_are_what_the_next_step_starts_from() -> None:
    run_ranks(SIZE, new_values)


def replaced_with_an_optimizer() -> None:
    """Another optimizer is made of parameters that a module was given, before and after the forward that sees them."""
    for stage in (0, 1, 2):
        model = Net()
        shard(model, make_optimizer("sgd", model.parameters()), stage)
        replacement = nn.Parameter(torch.full_like(model.last.bias, 3.0))
        model.last.bias = replacement
        early = torch.optim.SGD([replacement], lr=1.0)
        loss_here(model, 0).backward()
        assert model.last.bias is not replacement
        with pytest.raises(RuntimeError, match=r"SGD would step a parameter .* in the place of last\.bias"):
            early.step()
        with torch.no_grad():
            model.last.bias.fill_(2.0)
        assert torch.equal(replacement, model.last.bias), stage
        torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # of others: as ever


def test_an_optimizer_of_replaced_parameters_is_told_that_they_have_no_gradients() -> None:
    run_ranks(SIZE, replaced_with_an_optimizer)


def climb(model: nn.Module, how: str, sign: float) -> None:
    """Move all weights by what depends on nothing, as the two moves of sharpness-aware minimisation."""
    values = list(model.parameters())
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_add_(values, 0.1 * sign)
        for value in values if how != "foreach" else ():
            (value.data if how == "data" else value).add_(0.1 * sign)


def climbing_run(how: str, stage: int | None) -> tuple[Parameters, list[float]]:
    model, losses = Net(), []
    optimizer = make_optimizer("sgd", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage)
    loss_of = loss_of_all if stage is None else loss_here
    for step in range(2):
        loss_of(model, step).backward()
        if stage is not None and dist.get_rank() == 1:
            time.sleep(0.1)  # the other one goes ahead
        climb(model, how, 1.0)
        loss_of(model, step + 5).backward()
        climb(model, how, -1.0)
        optimizer.step()
        optimizer.zero_grad()
        if how == "data":  # of which nobody learns before an evaluation
            continue
        if stage is not None and dist.get_rank() == 1:
            time.sleep(0.1)
        climb(model, "add", 1.0)
        with torch.no_grad():
            losses.append(float(loss_of_all(model, 9)))
        if stage is not None:
            dist.barrier()  # the other one has evaluated
        climb(model, "add", -1.0)
    return whole_values(model), losses


def climbing_runs(how: str) -> list[tuple[Parameters, list[float]]]:
    return [climbing_run(how, stage) for stage in STAGES]


@pytest.mark.parametrize("how", ["add", "foreach", "data"])
def test_what_ranks_write_between_passes_is_what_all_of_them_compute_with(how: str) -> None:
    expected, losses = climbing_run(how, None)
    for of_rank in run_ranks(SIZE, climbing_runs, how):
        for stage, (found, its_losses) in enumerate(of_rank):
            assert_close(found, expected, stage)
            assert its_losses == pytest.approx(losses, rel=1e-5), stage


def written_too_late() -> None:
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage)
        for _ in range(2):
            loss = loss_here(model, 0)
            with torch.no_grad():
                model.twice.weight.detach().mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.zero_grad()
        with torch.no_grad():  # a part on its own, whose unit is kept until room is needed
            before = model.first(batch(0, 0, 0)[0])
            model.first.weight.mul_(2.0)
            model.first.bias.mul_(2.0)
            dist.barrier()
            torch.testing.assert_close(model.first(batch(0, 0, 0)[0]), 2.0 * before)


def test_weights_that_change_between_forward_and_backward_are_an_error() -> None:
    run_ranks(SIZE, written_too_late)


def converted() -> None:
    conversions: list[Callable[[nn.Module], Any]] = [nn.Module.bfloat16, nn.Module.half, nn.Module.double]
    for stage in STAGES:
        for convert in conversions:
            model = Net()
            optimizer = make_optimizer("sgd", model.parameters())
            shard(model, optimizer, stage)
            convert(model)
            with pytest.raises(RuntimeError, match=r"had dtype torch\.float32 in fastpar\.zero\.shard"):
                model(batch(0, 0, 0)[0])


def test_another_dtype_is_an_error_that_names_the_parameter() -> None:
    run_ranks(SIZE, converted)


# ---- gradients that are set to zero, and hooks that look at them


class Sometimes(nn.Module):
    """A layer that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.extra, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, uses_extra: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.extra(x)) + x if uses_extra else x)


def zeroed_run(loss_of: Callable[[nn.Module, int, bool], Tensor], stage: int | None, **options: Any) -> Parameters:
    """AdamW decays, and goes on by its momentum, where a gradient is zero, and does nothing where it is None."""
    model = Sometimes()
    optimizer = make_optimizer("adamw", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage, **options)
    for step, by in enumerate((optimizer, model, optimizer, optimizer)):
        loss_of(model, step, step == 0).backward()
        optimizer.step()
        by.zero_grad(set_to_none=step == 2)
        if step == 1:
            optimizer.step()  # of zeros
            assert whole_of(model.extra.bias.grad) is not None
            by.zero_grad(set_to_none=False)
            assert whole_of(model.extra.bias.grad).abs().max() == 0
    return whole_values(model)


def extra_loss(model: nn.Module, step: int, uses_extra: bool) -> Tensor:
    x, y = batch(step, 0, dist.get_rank())
    return nn.functional.mse_loss(model(x, uses_extra).float(), y)


def extra_loss_of_all(model: nn.Module, step: int, uses_extra: bool) -> Tensor:
    pairs = [batch(step, 0, rank) for rank in range(SIZE)]
    return torch.stack([nn.functional.mse_loss(model(x, uses_extra), y) for x, y in pairs]).mean()


def zeroed() -> None:
    expected = zeroed_run(extra_loss_of_all, None)
    for stage in STAGES:
        assert_close(zeroed_run(extra_loss, stage), expected, stage)
    for options in ({"overlap": False}, {"offload": "cpu"}, {"max_norm": 1e9}):
        assert_close(zeroed_run(extra_loss, 1, **options), expected, options)


def test_gradients_set_to_zero_are_stepped_with_as_in_one_process() -> None:
    run_ranks(SIZE, zeroed)


def kept_run(loss_of: Callable[[nn.Module, int, bool], Tensor], stage: int | None, **options: Any) -> Parameters:
    """Steps without `zero_grad`: torch adds the next gradients to those of the step before."""
    model = Sometimes()
    optimizer = make_optimizer("adamw", model.parameters())
    zero = None if stage is None else shard(model, optimizer, stage, **options)
    shown: Parameters = {}
    for step in range(3):
        loss_of(model, step, step != 1).backward()
        loss_of(model, step, True)  # a forward pass alone leaves them as they are
        if zero is not None and "overlap" in options:
            zero.reduce_gradients()
        shown[f"norm {step}"] = torch.tensor(clip_norm(model))
        optimizer.step()
        shown |= {f"{name} after step {step}": whole_of(p.grad).clone() for name, p in model.named_parameters()}
        if step == 1:
            optimizer.step()
    loss_of(model, 3, True)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model, 4, True).backward()
    optimizer.step()
    return shown | whole_values(model)


def kept() -> None:
    expected = kept_run(extra_loss_of_all, None)
    for stage in STAGES:
        assert_close(kept_run(extra_loss, stage), expected, stage)
    for options in ({"overlap": False}, {"offload": "cpu"}, {"max_norm": 1e9}, {"bucket_bytes": 64}):
        assert_close(kept_run(extra_loss, 1, **options), expected, options)
    assert_close(kept_run(extra_loss, 0, bucket_bytes=64), expected, "buckets that are filled anew")


def test_gradients_stay_until_zero_grad_as_in_one_process() -> None:
    run_ranks(SIZE, kept)


def hooked(dtype: torch.dtype) -> None:
    for stage in (0, 1, 2):
        seen: dict[str, list[bool]] = {}
        model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        zero = shard(model, make_optimizer("sgd", model.parameters()), stage, bucket_bytes=64)
        for name, parameter in model.named_parameters():
            found = seen.setdefault(name, [])
            parameter.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad is not None))
        for step in range(2):
            with zero.no_sync():
                model(batch(step, 0, 0)[0].to(dtype)).sum().backward()
            model(batch(step, 1, 0)[0].to(dtype)).sum().backward()
        assert seen == {name: [True] * 4 for name in seen}, (stage, seen)


def test_hooks_that_come_after_shard_see_every_gradient() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(SIZE, hooked, dtype)


def halved() -> None:
    for options in ({}, {"precision": "bf16"}, {"offload": "cpu"}):
        model = Layers()
        shard(model, make_optimizer("sgd", model.parameters()), 3, **options)
        (model(batch(0, 0, dist.get_rank())[0]) ** 2).mean().backward()
        expected = {name: whole_of(parameter.grad).clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        (model(batch(0, 0, dist.get_rank())[0]) ** 2).mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole_of(parameter.grad), expected[name] / 2, msg=f"{options}: {name}")


def test_hooks_of_stage_3_change_the_averaged_gradient_of_masters_too() -> None:
    run_ranks(SIZE, halved)


# ---- gradients of gradients


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sloped(model: nn.Module, step: int, rank: int) -> Tensor:
    x = batch(step, 0, rank)[0].requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm() - 1).square()


def penalty_run(stage: int | None, **options: Any) -> Parameters:
    model = Layers()
    optimizer = make_optimizer("adamw", model.parameters())
    zero = None if stage is None else shard(model, optimizer, stage, **options)
    for step in range(3):
        if zero is None:
            torch.stack([sloped(model, step, rank) for rank in range(SIZE)]).mean().backward()
        else:
            sloped(model, step, dist.get_rank()).backward()
            assert stage != 3 or zero.storages[0].whole_bytes == 0  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        if zero is not None:
            sloped(model, step, 0)  # whose backward pass never comes
            with pytest.warns(UserWarning, match="updates nothing") if stage == 3 else nullcontext():
                optimizer.step()
    return whole_values(model)


def penalties() -> None:
    expected = penalty_run(None)
    for stage in STAGES:
        assert_close(penalty_run(stage), expected, stage)
    assert_close(penalty_run(3, persistent_share=0.0, reshard_after_forward=False), expected, "whole until backward")


def test_gradient_penalties_equal_one_process() -> None:
    run_ranks(SIZE, penalties)


# ---- several passes at a time


class _TwoOf(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[:, :2]


def two_passes_run(stage: int | None, *, overlap: bool = False) -> Parameters:
    model = Layers()
    optimizer = make_optimizer("adamw", model.parameters())
    zero = None if stage is None else shard(model, optimizer, stage, overlap=overlap)
    loss_of = loss_of_all if stage is None else loss_here
    for step in range(2):
        first, second = (loss_of(_TwoOf(model), step + more) for more in (0, 10))
        with zero.no_sync() if zero is not None and overlap else nullcontext():
            second.backward(retain_graph=True)
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_values(model)


def two_passes() -> None:
    expected = two_passes_run(None)
    for stage in STAGES:
        for overlap in (False, True):
            assert_close(two_passes_run(stage, overlap=overlap), expected, (stage, overlap))


def test_passes_without_a_forward_in_between_are_summed_before_they_travel() -> None:
    run_ranks(SIZE, two_passes)


def written_while_gathered() -> None:
    model = Net()
    shard(model, make_optimizer("sgd", model.parameters()), 3, reshard_after_forward=False, persistent_share=0.0)
    x = batch(0, 0, 0)[0]
    before = model(x)  # a loss that is only logged
    with torch.no_grad():
        model.twice.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"twice.weight was written to while stage 3 had it gathered.*reshard\(\)"):
        model(x)
    torch.testing.assert_close(model(x), before)


def test_values_written_to_what_is_gathered_are_an_error() -> None:
    run_ranks(SIZE, written_while_gathered)


# ---- copies


def averaged_run() -> None:
    plain = Net()
    average = torch.optim.swa_utils.AveragedModel(plain)
    optimizer = make_optimizer("sgd", plain.parameters())
    for step in range(3):
        loss_of_all(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(plain)
    expected = whole_values(average.module)
    x = batch(0, 0, 0)[0]
    with torch.no_grad():
        outputs = average(x)
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        shard(model, optimizer, stage)
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(3):
            loss_here(model, step).backward()
            average.module.zero_grad()  # of the copy, and not of the model
            copied = copy.deepcopy(model)  # with gradients, where what it has at rest is what the optimizer updates
            assert torch.equal(whole_of(copied.twice.weight), whole_of(model.twice.weight))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        assert_close(whole_values(average.module), expected, stage)
        with torch.no_grad():
            torch.testing.assert_close(average(x), outputs)


def test_averages_of_weights_are_those_of_one_process() -> None:
    run_ranks(SIZE, averaged_run)


def whole_file() -> None:
    model = Net()
    shard(model, make_optimizer("sgd", model.parameters()), 3)
    with pytest.raises(TypeError, match="this rank's shards"):
        torch.save(model, io.BytesIO())
    state = {name: whole_of(x) for name, x in model.state_dict().items()}
    assert state["scale"].shape == ()
    for stage in (1, 2):
        model = Net()
        shard(model, make_optimizer("sgd", model.parameters()), stage)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.zero_grad()
        loaded(batch(0, 0, 0)[0]).sum().backward()
        assert loaded.first.weight.grad is not None


def test_a_model_is_saved_whole_where_it_is_whole() -> None:
    run_ranks(SIZE, whole_file)


# ---- parameters that are taken out of their modules


def take_out(stage: int | None) -> tuple[list[Tensor], list[str]]:
    """A mask is made permanent, and a bias is taken away: what was in its place is gone, whatever else was replaced."""
    model, outs = Net(), []
    nn.utils.prune.l1_unstructured(model.twice, "weight", 0.3)
    optimizer = make_optimizer("sgd", model.parameters())
    if stage is not None:
        shard(model, optimizer, stage)
    for step in range(3):
        loss = loss_of_all(model, step) if stage is None else loss_here(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            nn.utils.prune.remove(model.twice, "weight")
            model.last.bias = None
        outs.append(model(torch.ones(2, 7)).detach())
    return outs, sorted(model.state_dict())


def taken_out() -> list[tuple[list[Tensor], list[str]]]:
    return [take_out(stage) for stage in (0, 1, 2)]


def test_a_parameter_that_is_taken_out_of_its_module_stays_out() -> None:
    expected, names = take_out(None)
    for of_rank in run_ranks(SIZE, taken_out):
        for stage, (outs, found) in enumerate(of_rank):
            assert found == names, stage
            torch.testing.assert_close(outs, expected, rtol=1e-4, atol=1e-5, msg=f"stage {stage}")
