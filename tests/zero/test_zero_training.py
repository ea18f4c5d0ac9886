"""ZeRO in training loops as people write them: schedulers, scalers, several optimizers, closures, failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.zero.replicas import _refuse_to_step_what_is_set_aside
from tests.dist import run_ranks
from tests.zero.zero_ranks import (
    Case,
    Net,
    Parameters,
    assert_same,
    batch,
    make_optimizer,
    one_thread,
    optimizer_values,
    train_plain,
    whole_values,
)

STAGES = (0, 1, 2, 3)
SIZE = 3
Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[[int], Tensor]], None]


def shard(model: nn.Module, optimizer: Any, stage: int, **options: Any) -> fp.zero.Zero:
    return fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, **options)


def loss_here(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, 0, dist.get_rank())
    return nn.functional.mse_loss(model(x).float(), y)


def loss_of_all(model: nn.Module, step: int, size: int = SIZE) -> Tensor:
    """The mean over what the ranks compute, for one process."""
    losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(step, 0, rank) for rank in range(size))]
    return torch.stack(losses).mean()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> Parameters:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of_all(model, step).backward()
        optimizer.step()
    return whole_values(model)


def assert_close(found: Parameters, expected: Parameters, what: object = "") -> None:
    """Sums over ranks associate otherwise in one backward pass of all: a few roundings after five steps."""
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].view(value.shape), rtol=1e-4, atol=1e-5, msg=f"{what}: {name}")


# ---- learning rates


def schedule_run() -> None:
    expected = {}
    for is_before in (True, False):
        for stage in STAGES:
            model = Net()
            optimizer = make_optimizer("adamw", model.parameters())
            make = torch.optim.lr_scheduler.OneCycleLR
            early = make(optimizer, 0.05, total_steps=6) if is_before else None
            zero = shard(model, optimizer, stage)
            scheduler = early or make(optimizer, 0.05, total_steps=6)
            for step in range(5):
                loss_here(model, step).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found = optimizer_values(zero)
            expected.setdefault("rate", optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[0]["lr"] == expected["rate"]
            assert_same(found, expected.setdefault("found", found), (is_before, stage))
    plain = Net()
    optimizer = make_optimizer("adamw", plain.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
    for step in range(5):
        optimizer.zero_grad()
        loss_of_all(plain, step).backward()
        optimizer.step()
        scheduler.step()
    assert_close(expected["found"], whole_values(plain))


def test_schedulers_made_before_or_after_do_what_they_do_without() -> None:
    run_ranks(SIZE, schedule_run)


# ---- torch's scaler


def grad_scaler_run(stage: int, kind: str) -> tuple[Parameters, list[float]]:
    model = Net()
    optimizer = make_optimizer(kind, model.parameters())
    zero = shard(model, optimizer, stage, precision=fp.Precision.fp16())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    scales = []
    for step in range(10):
        scaler.scale(loss_here(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return optimizer_values(zero), scales


def grad_scaler_runs(kind: str) -> list[tuple[Parameters, list[float]]]:
    return [grad_scaler_run(stage, kind) for stage in STAGES]


@pytest.mark.parametrize("kind", ["adamw", "ours"])
def test_torchs_grad_scaler_does_what_it_does_in_one_process(kind: str) -> None:
    with one_thread():
        expected = train_plain(Case(dtype=torch.float16, kind=kind), SIZE)
    skipped = int(expected.pop("skipped"))
    assert skipped > 0
    for of_rank in run_ranks(SIZE, grad_scaler_runs, kind):
        for stage, (found, scales) in enumerate(of_rank):
            assert_same(found, expected, f"stage {stage}")
            assert sum(now < before for before, now in zip([2.0**19, *scales], scales, strict=False)) == skipped


# ---- optimizers


def several_run() -> None:
    def split(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and name != "unused"]
        rest = [p for name, p in named.items() if p.ndim != 2 or name == "unused"]
        return [fp.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    plain = Net()
    optimizers = split(plain)
    for step in range(5):
        plain.zero_grad()
        loss_of_all(plain, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    expected = whole_values(plain)
    for stage in STAGES:
        model = Net()
        optimizers = split(model)
        zero = shard(model, optimizers, stage, max_norm=100.0)
        for step in range(5):
            loss_here(model, step).backward()
            for optimizer in reversed(optimizers) if step % 2 else optimizers:
                optimizer.step()
            model.zero_grad()
        # Newton-Schulz in bfloat16, which is what Muon computes in, rounds at 2^-8 and hides nothing coarser
        for name, value in optimizer_values(zero).items():
            torch.testing.assert_close(value, expected[name], rtol=2e-2, atol=5e-3, msg=f"stage {stage}: {name}")


def test_muon_and_adamw_divide_a_model_between_them() -> None:
    run_ranks(SIZE, several_run)


def late_run() -> None:
    """Two steps on one's own with the same data everywhere, then sharded."""
    expected: Parameters = {}
    for kind in ("adamw", "ours", "sgd"):
        for stage in STAGES:
            model = Net()
            optimizer = make_optimizer(kind, model.parameters())
            for step in range(2):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(batch(step, 0, 0)[0]), torch.ones(4, 2)).backward()
                optimizer.step()
            optimizer.zero_grad()
            zero = shard(model, optimizer, stage)
            for step in range(2, 4):  # equal gradients, of which the mean over two ranks is exact
                nn.functional.mse_loss(model(batch(step, 0, 0)[0]), torch.ones(4, 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
            expected[f"{kind} {stage}"] = torch.cat([x.flatten() for x in optimizer_values(zero).values()])
        model = Net()
        optimizer = make_optimizer(kind, model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch(step, 0, 0)[0]), torch.ones(4, 2)).backward()
            optimizer.step()
        plain = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        for stage in STAGES:
            assert torch.equal(expected[f"{kind} {stage}"], plain), (kind, stage)


def test_an_optimizer_that_has_made_steps_keeps_its_states() -> None:
    run_ranks(2, late_run)


def closure_run() -> None:
    results = {}
    for stage in STAGES:
        for uses_closure in (False, True):
            model = Net()
            optimizer = make_optimizer("sgd", model.parameters())
            zero = shard(model, optimizer, stage)
            for step in range(3):

                def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_here(model, step)
                    loss.backward()
                    return loss

                if uses_closure:
                    returned = optimizer.step(closure)
                    assert returned is not None
                    assert returned.ndim == 0
                else:
                    closure()
                    optimizer.step()
            found = optimizer_values(zero)
            assert_same(found, results.setdefault(0, found), (stage, uses_closure))


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    run_ranks(SIZE, closure_run)


# ---- parameters


class Branches(nn.Module):
    """A tied weight, and branches that ranks take or leave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(5, 6)
        self.left, self.right, self.neither = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, branch: int) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.tanh((self.left, self.right)[branch](x)))


def branches_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    ids = torch.randint(5, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(ids, min(rank, 1) if step != 1 else 0), (ids + 1) % 5)


def branches_run() -> list[tuple[Parameters, set[str]]]:
    found = []
    for stage in STAGES:
        model = Branches()
        optimizer = make_optimizer("adamw", model.parameters())
        zero = shard(model, optimizer, stage)
        for step in range(4):
            branches_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        stateful = {param.name for param in zero.params if optimizer.state.get(param.model_param)}
        found.append((optimizer_values(zero), stateful))
    return found


def test_what_is_unused_here_counts_as_zero_and_what_is_unused_everywhere_is_left_alone() -> None:
    """In step 1 all ranks take one branch: the other one's weights do not decay, as without data parallelism."""
    model = Branches()
    optimizer = make_optimizer("adamw", model.parameters())
    with one_thread():
        for step in range(4):
            optimizer.zero_grad()
            sums: Parameters = {}
            for rank in range(SIZE):
                model.zero_grad()
                branches_loss(model, step, rank).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
            for name, p in model.named_parameters():
                p.grad = sums[name] / SIZE if name in sums else None
            optimizer.step()
    for of_rank in run_ranks(SIZE, branches_run):
        for stage, (found, stateful) in zip(STAGES, of_rank, strict=True):
            assert_same(found, whole_values(model), f"stage {stage}")
            assert stateful == {name for name in found if not name.startswith("neither")}


# ---- failures


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


def failure_run() -> None:
    def train(stage: int, failing: str) -> Parameters:
        model = Net()
        optimizer = make_optimizer("adamw", model.parameters())
        zero = shard(model, optimizer, stage, bucket_bytes=256)
        handle: Any = None
        for step in range(4):
            if step == 2 and failing:
                if failing == "backward":
                    handle = model.twice.register_forward_hook(lambda _, args, out: Fails.apply(out))
                else:
                    handle = model.last.register_forward_pre_hook(lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    loss_here(model, 9).backward()
                handle.remove()
                optimizer.zero_grad()
            loss_here(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer_values(zero)

    for stage in STAGES:
        expected = train(stage, "")
        for failing in ("forward", "backward"):
            assert_same(train(stage, failing), expected, f"stage {stage}, {failing}")


def test_training_goes_on_after_a_pass_that_has_failed() -> None:
    run_ranks(2, failure_run)


# ---- the end


def detach_run() -> None:
    for stage in STAGES:
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        zero = shard(model, optimizer, stage)
        loss_here(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        values = optimizer_values(zero)
        zero.detach()
        assert not model._forward_pre_hooks
        assert "zero_grad" not in vars(model) | vars(optimizer)
        for name, p in model.named_parameters():
            if name in values:
                assert torch.equal(p.detach().view(values[name].shape), values[name]), (stage, name)
        x, y = batch(1, 0, 0)
        nn.functional.mse_loss(model(x), y).backward()
        plain = Net()
        plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
        nn.functional.mse_loss(plain(x), y).backward()
        for name, p in plain.named_parameters():
            found = model.get_parameter(name).grad
            assert (found is None) == (p.grad is None), (stage, name)
            assert p.grad is None or torch.equal(found, p.grad), (stage, name)


def test_detach_leaves_a_model_that_trains_for_itself() -> None:
    run_ranks(2, detach_run)


# ---- errors


class Wrapper(torch.optim.Optimizer):
    """As Lookahead of timm."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    model = Net()
    optimizer = make_optimizer("adamw", model.parameters())
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    cases: list[tuple[type[Exception], str, tuple[Any, Any], dict[str, Any]]] = [
        (ValueError, "stage must be 0, 1, 2 or 3, got 4", (model, optimizer), {"stage": 4}),
        (ValueError, "accumulate must be at least 1", (model, optimizer), {"accumulate": 0}),
        (ValueError, "max_norm must be positive", (model, optimizer), {"max_norm": 0.0}),
        (ValueError, "bucket_bytes must be at least 1", (model, optimizer), {"bucket_bytes": 0}),
        (ValueError, "offload must be", (model, optimizer), {"offload": "disk"}),
        (ValueError, "matches no parameter", (model, optimizer), {"precision": fp.Precision.bf16(full=("no.*",))}),
        (TypeError, "a module or a pipeline as model, got list", (list(model.parameters()), optimizer), {"stage": 3}),
        (TypeError, "got Tensor at number 0", ([torch.ones(2)], optimizer), {}),
        (ValueError, "has no parameters", (nn.Tanh(), optimizer), {}),
        (TypeError, "this Wrapper has not called .* give that one to shard", (model, Wrapper(optimizer)), {}),
        (ValueError, "LBFGS", (model, torch.optim.LBFGS(model.parameters())), {}),
        (
            ValueError,
            "7 trainable parameters are not in the optimizer: scale",
            (model, make_optimizer("sgd", model.first.parameters())),
            {},
        ),
        (ValueError, "more than once", (model, [optimizer, make_optimizer("sgd", model.parameters())]), {}),
        (ValueError, "that the model does not have", (model.first, optimizer), {}),
    ]
    for error, text, arguments, options in cases:
        with pytest.raises(error, match=text):
            fp.zero.shard(*arguments, **options)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == before
        assert not model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks


# ---- writing to parameters between steps


def decaying() -> None:
    for stage in (1, 2):
        model = Net()
        optimizer = make_optimizer("adamw", model.parameters())
        shard(model, optimizer, stage)
        for step in range(20):
            loss_here(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
        for name, x in whole_values(model).items():
            for other in fp.Communicator(dist.group.WORLD).all_gather(x.reshape(1, -1)):
                assert torch.equal(other, x.reshape(-1)), (stage, name)


def test_parameters_may_be_written_to_right_after_a_step() -> None:
    """Other ranks have copied a rank's rows when its step returns."""
    run_ranks(2, decaying)


# ---- optimizers that count for themselves


class Counting(torch.optim.Optimizer):
    """Its learning rate falls with a count of steps in the group, in a tensor of the group, and in itself."""

    is_elementwise = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.calls = 0
        for group in self.param_groups:
            group["called"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["calls"] += 1
            group["called"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                    divisor = group["calls"] * self.calls * float(group["called"])
                    p.sub_(self.state[p]["mean"], alpha=group["lr"] / divisor)


class CountingMore(Counting):
    """Calls the step of an optimizer, which torch has put hooks around."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        super().step(closure)


class RowsCounting(Counting):
    is_elementwise = True


COUNTING = (Counting, CountingMore, RowsCounting)


def counting_plain(kind: type) -> Parameters:
    model = Net()
    Counting([nn.Parameter(torch.ones(2))])  # torch puts hooks around a class's step when it makes the first one
    return plain_steps(model, kind(model.parameters()), 4)


def counting_run(kind: type, folder: str) -> list[Parameters]:
    options: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in STAGES]
    # one group of master weights after the other
    options.append((1, {"offload": fp.zero.Offload(folder, group_bytes=64, options={"backend": "threads"})}))
    found = []
    for stage, option in options:
        model = Net()
        optimizer = kind(model.parameters())
        Counting([nn.Parameter(torch.ones(2))])
        zero = shard(model, optimizer, stage, max_norm=1e6, **option)
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_here(model, min(step, 4) - (step > 2))
            (loss * torch.nan if step == 2 else loss).backward()  # which is not counted
            optimizer.step()
            assert zero.steps == step + 1
            zero.state_dict()  # which has states of what has none, by a step of no length
            assert float(zero.norm) > 0 or step == 2  # of the gradients, not of what is left of them
        assert zero.skipped == 1
        assert optimizer.calls == optimizer.param_groups[0]["calls"] == float(optimizer.param_groups[0]["called"]) == 4
        found.append(whole_values(model))
        zero.detach()
    return found


@pytest.mark.parametrize("kind", COUNTING)
def test_what_an_optimizer_counts_in_its_groups_and_itself_is_counted_once_a_step(kind: type, tmp_path: Path) -> None:
    """Bias corrections, warm-ups and averages of many optimizers hang on it (AdaBelief, schedule-free)."""
    expected = counting_plain(kind)
    for of_rank in run_ranks(SIZE, counting_run, kind, str(tmp_path)):
        for case, found in enumerate(of_rank):
            assert_close(found, expected, case)


class Averaging(torch.optim.Optimizer):
    """Gradients are taken at `train()` weights, between a running average (`eval()`) and what is stepped (z)."""

    BETA = 0.8

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "is_training": True, "count": 0})

    @torch.no_grad()
    def _move(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["is_training"] is not is_training:
                group["is_training"] = is_training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        self._move(True, 1.0 - self.BETA)

    def eval(self) -> None:
        self._move(False, 1.0 - 1.0 / self.BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group["is_training"]
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1.0 / group["count"]).sub_(p.grad, alpha=0.2 * group["lr"])
                    z.sub_(p.grad, alpha=group["lr"])


def averaging_run(stage: int | None, **options: Any) -> tuple[Parameters, list[float]]:
    model, losses = Net(), []
    optimizer = Averaging(model.parameters())
    zero = None if stage is None else shard(model, optimizer, stage, **options)
    for step in range(4):
        optimizer.train()
        loss = loss_of_all(model, step) if stage is None else loss_here(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            losses.append(float(loss_of_all(model, 9)))
    found = whole_values(model)
    if zero is not None:
        zero.detach()
        assert "eval" not in vars(optimizer)
    return found, losses


def averaging_runs(folder: str) -> list[tuple[Parameters, list[float]]]:
    in_file = fp.zero.Offload(folder, group_bytes=64, options={"backend": "threads"})
    found = [averaging_run(stage) for stage in STAGES]
    return [*found, averaging_run(1, offload="cpu"), averaging_run(1, offload=in_file)]


def test_an_optimizer_with_other_weights_to_evaluate_with_has_those_of_one_process(tmp_path: Path) -> None:
    expected, losses = averaging_run(None)
    for of_rank in run_ranks(SIZE, averaging_runs, str(tmp_path)):
        for case, (found, its_losses) in enumerate(of_rank):
            assert its_losses == pytest.approx(losses, rel=1e-4), case
            assert_close(found, expected, case)


class Adapting(torch.optim.Optimizer):
    """Its step grows with the way gone along gradients, over all parameters: numbers that count from the third on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "way": 0.0, "length": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * (1.0 + group["way"] / group["length"] if group["length"] else 1.0)
            for p in group["params"]:
                if p.grad is not None:
                    start = self.state[p].setdefault("start", p.clone())
                    group["way"] += (p.grad * (start - p)).sum().item() * 100.0
                    group["length"] += float(p.grad.norm())
                    p.sub_(p.grad, alpha=rate if p.grad.sum() > 0 else 1.5 * rate)


def adapting_runs() -> list[Parameters]:
    found = []
    for stage in (None, 1, 3):
        model = Net()
        optimizer = Adapting([model.first.weight, model.last.bias, model.scale])
        model.requires_grad_(False)
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad_(True)
        if stage is not None:
            shard(model, optimizer, stage)
        for step in range(4):
            (loss_of_all(model, step, 2) if stage is None else loss_here(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_values(model))
    return found


def test_numbers_that_an_optimizer_reads_are_those_of_one_process() -> None:
    """`.item()`, `float` and conditions of tensors over all rows, which also count later than a trial sees."""
    for expected, *runs in run_ranks(2, adapting_runs):
        for stage, found in zip((1, 3), runs, strict=True):
            assert_close(found, expected, stage)


@torch.compile(fullgraph=True, backend="eager")
def descend(value: Tensor, grad: Tensor) -> None:
    value.sub_(0.1 * grad.float() / (1.0 + grad.square().sum()))


class Compiled(torch.optim.Optimizer):
    """Its update of a parameter is a graph."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    descend(p.detach(), p.grad)


def compiled_runs() -> list[Parameters]:
    found = []
    for stage in (None, 1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 2, bias=False))
        optimizer = Compiled(model.parameters())
        if stage is not None:
            shard(model, optimizer, stage, persistent_share=0.0)
        (loss_of_all(model, 0, 2) if stage is None else loss_here(model, 0)).backward()
        optimizer.step()
        found.append(whole_values(model))
        torch._dynamo.reset()  # of which 8 graphs are the limit
    return found


def scripted_runs() -> list[Parameters]:
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
    found = []
    for stage in (None, 0, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(torch.jit.script(nn.Linear(7, 5)), nn.Linear(5, 2, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stage == 3:
            with pytest.raises(TypeError, match=r"cannot take the parameters of Linear apart.* or use stage=2"):
                shard(model, optimizer, stage)
            return found
        if stage is not None:
            shard(model, optimizer, stage)
        for step in range(2):
            (loss_of_all(model, step, 2) if stage is None else loss_here(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole_values(model))
    return found


def test_modules_of_torch_jit_train_up_to_stage_2() -> None:
    for expected, *runs in run_ranks(2, scripted_runs):
        for stage, found in zip((0, 2), runs, strict=True):
            assert_close(found, expected, stage)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    torch.stack([nn.functional.mse_loss(model(x), y) for x, y in batches]).mean().backward()
    fp.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def compiled_step_runs(is_all_of_it: bool) -> list[Parameters]:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
    _refuse_to_step_what_is_set_aside()  # from then on there is one more hook, of all optimizers
    found = []
    for stage in (None, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 2, bias=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if stage is not None:
            shard(model, optimizer, stage, persistent_share=0.0)
        train: Any = step_of
        if stage is not None and is_all_of_it:
            train = torch.compile(step_of, backend="eager")
        elif stage is not None:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        for step in range(2):
            train(model, optimizer, [batch(step, 0, r) for r in range(2) if stage is None or r == dist.get_rank()])
        found.append(whole_values(model))
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("is_all_of_it", [False, True], ids=["optimizer", "all"])
def test_a_step_that_is_compiled_as_a_whole_is_taken(is_all_of_it: bool) -> None:
    """torch's own advice for its optimizers, and backward with what its hooks call in between."""
    for expected, *runs in run_ranks(2, compiled_step_runs, is_all_of_it):
        for stage, found in zip((2, 3), runs, strict=True):
            assert_close(found, expected, stage)


def backward_by_compiled_autograd() -> None:
    warnings.simplefilter("ignore")  # the compiler's own
    torch._dynamo.reset()
    from torch._dynamo import compiled_autograd

    model = nn.Linear(7, 2)
    shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    loss = model(torch.ones(3, 7)).sum()
    refused = pytest.raises(RuntimeError, match="which would miss them: call backward")
    with refused, compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def test_compiled_autograd_is_refused() -> None:
    """It would leave the averaged gradients where nobody sees them before the step, and clipping would find none."""
    run_ranks(2, backward_by_compiled_autograd)


def test_optimizers_compile_their_updates() -> None:
    """Rows have offsets in the memory that they share, which the compiler takes for none of a DTensor's."""
    for expected, *runs in run_ranks(2, compiled_runs):
        for stage, found in zip((1, 3), runs, strict=True):
            assert_close(found, expected, stage)
