"""Training runs on several ranks that the tests of data parallelism compare with one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.comm import Communicator
from tests.values import all_gathered

ROWS = 4  # samples of a microbatch
Parameters = dict[str, Tensor]


class Net(nn.Module):
    """Awkward: rows that do not divide, fewer than ranks, a scalar, one that is frozen, one used twice, one never."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.twice = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((13,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x))) * self.frozen
        x = torch.tanh(self.twice(x))
        x = torch.tanh(self.twice(x))
        return self.last(x) * self.scale


def batch(step: int, microbatch: int, rank: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randn(rows, 7, generator=generator), torch.randn(rows, 2, generator=generator)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "ours": lambda: fp.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        "8bit": lambda: fp.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, state_dtype="8bit"),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        "foreach": lambda: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True),
        "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True),
    }
    return kinds[name]()


@dataclass(frozen=True)
class Case:
    """A training run.

    dtype     of parameters and gradients; below float32 with float32 masters, and float16 with a LossScaler
    reduces   how often gradients travel: once a step ("once"), after every microbatch ("each"), or as the stage does
              by itself when it is told `accumulate` ("stage")
    options   of fp.zero.shard, and `transport` of the Communicator or `mesh`: the sizes of a Mesh
    """

    stage: int = 0
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    reduces: str = "stage"
    kind: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def precision(self) -> fp.Precision | None:
        policies = {torch.bfloat16: fp.Precision.bf16, torch.float16: fp.Precision.fp16}
        return policies[self.dtype]() if self.dtype in policies else None

    @property
    def steps(self) -> int:
        return 10 if self.dtype == torch.float16 else 5  # the scaler skips the first ones, and grows after three more

    @property
    def travels(self) -> str:
        """ "once" or "each", which are the same of one microbatch."""
        if self.accumulate == 1:
            return "each"
        if not self.options.get("overlap", True):
            return "once"
        return self.reduces if self.reduces != "stage" else "once" if self.stage < 2 else "each"

    @property
    def unrounded(self) -> tuple[str, ...]:
        """Parameters whose sums travel in float32: those of one element, which stage 3 keeps persistent."""
        return ("scale",) if self.stage == 3 else ()


def make_scaler(case: Case, group: Any) -> fp.LossScaler:
    """One that overflows at first, so that steps are skipped, and grows again."""
    return fp.LossScaler(init=2.0**19, growth_interval=3, enabled=case.dtype == torch.float16, group=group)


def train_sharded(case: Case) -> Parameters:
    """This rank's parameters after some steps, whole: those that the optimizer has (masters)."""
    options = dict(case.options)
    model = Net()
    optimizer = make_optimizer(case.kind, model.parameters())
    comm = Communicator(dist.group.WORLD, transport=options.pop("transport", "auto"))
    group = fp.init_mesh(**options.pop("mesh"), device="cpu") if "mesh" in options else comm
    told = case.accumulate if case.reduces == "stage" else 1
    zero = fp.zero.shard(
        model, optimizer, group=group, stage=case.stage, precision=case.precision, accumulate=told, **options
    )
    scaler = make_scaler(case, dist.group.WORLD)
    for step in range(case.steps):
        for microbatch in range(case.accumulate):
            waits = case.reduces == "once" and microbatch + 1 < case.accumulate
            x, y = batch(step, microbatch, comm.rank)
            with zero.no_sync() if waits else nullcontext():
                loss = nn.functional.mse_loss(model(x).float(), y) / case.accumulate
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        if scaler.is_enabled():
            scaler.update()
        optimizer.zero_grad()
    found = optimizer_values(zero)
    rounded = whole_values(model)
    for name, value in found.items():
        assert torch.equal(value.to(case.dtype), rounded[name].view(value.shape)), f"{name} is not its master rounded"
    return found | {"skipped": torch.tensor(scaler.skipped)}


def train_plain(case: Case, size: int, replicas: int = 1) -> Parameters:
    """The same arithmetic in one process: gradients of all ranks in turn, their mean in float32 in the order of ranks
    (within each of the replicas, and then of those), and an optimizer on whole float32 parameters."""
    model = Net()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad}
    model.to(case.dtype)
    optimizer = make_optimizer(case.kind, masters.values())
    scaler = make_scaler(case, None)
    for step in range(case.steps):
        passes = [[microbatch] for microbatch in range(case.accumulate)]
        for microbatches in passes if case.travels == "each" else [[*range(case.accumulate)]]:
            gradients = [_gradients(model, case, scaler, step, microbatches, rank) for rank in range(size)]
            within = size // replicas
            total = _mean([_mean(gradients[at : at + within]) for at in range(0, size, within)])
            for name, gradient in total.items():
                held = masters[name].grad
                masters[name].grad = gradient if held is None else held + gradient
        scaler.step(optimizer)
        if scaler.is_enabled():
            scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                model.get_parameter(name).copy_(master)
    return {name: master.detach().clone() for name, master in masters.items()} | {
        "skipped": torch.tensor(scaler.skipped)
    }


def _gradients(
    model: nn.Module, case: Case, scaler: fp.LossScaler, step: int, microbatches: Sequence[int], rank: int
) -> Parameters:
    """What a rank sends: its sum over microbatches in float32, rounded to the gradient's dtype."""
    sums: Parameters = {}
    for microbatch in microbatches:
        model.zero_grad()
        x, y = batch(step, microbatch, rank)
        loss = nn.functional.mse_loss(model(x.to(case.dtype)).float(), y) / case.accumulate
        scaler.scale(loss).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
    return {name: x if name in case.unrounded else x.to(case.dtype).float() for name, x in sums.items()}


def _mean(ranks: Sequence[Parameters]) -> Parameters:
    total = dict(ranks[0])
    for gradients in ranks[1:]:
        for name, gradient in gradients.items():
            total[name] = total[name] + gradient
    return {name: gradient / len(ranks) for name, gradient in total.items()}


def optimizer_values(zero: fp.zero.Zero) -> Parameters:
    """What the optimizer has, whole, by name."""
    found = all_gathered({param.name: param.optim_param for param in zero.params})
    return {param.name: found[param.name].view(param.parameter.shape) for param in zero.params}


def whole_values(model: nn.Module) -> Parameters:
    """Parameters by name, whole: of stage 3 gathered from the rows at rest."""
    return all_gathered(dict(model.named_parameters()))


def whole_of(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def assert_same(found: Parameters, expected: Parameters, what: object = "") -> None:
    """All of the same names have the same bits."""
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        torch.testing.assert_close(found[name].view(value.shape), value, rtol=0, atol=0, msg=f"{what}: {name}")


@contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks have: sums in matrix products and norms depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
