"""Optimizer steps on CUDA tensors: the bits of the CPU kernels; graphs; the host does not wait.

`make gpu` runs the tests with "small" in their names once more under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops
from fastpar.ops import StochasticRounding

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SIZES = (0, 1, 255, 256, 8192, 8192 * 3 + 77)


@dataclass
class State:
    """The arguments of a step that it changes, by name, and the gradients."""

    params: list[Tensor]
    grads: list[Tensor]
    lists: dict[str, list[Tensor]] = field(default_factory=dict)

    def to(self, device: str) -> State:
        return State(
            [x.to(device, copy=True) for x in self.params],
            [x.to(device, copy=True) for x in self.grads],
            {name: [x.to(device, copy=True) for x in found] for name, found in self.lists.items()},
        )

    def changed(self) -> list[Tensor]:
        return [*self.params, *(x for found in self.lists.values() for x in found)]


def example(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype, extra: str | None = None, sizes: tuple[int, ...] = SIZES
) -> State:
    """On the CPU; `extra` is outputs or remainders."""
    torch.manual_seed(len(sizes))
    made = State([torch.randn(n).to(param) for n in sizes], [torch.randn(n).to(grad) for n in sizes])
    for name in ("exp_avg", "exp_avg_sq"):
        made.lists[f"{name}s"] = [torch.rand(n).to(state) if state != U8 else torch.zeros(n, dtype=U8) for n in sizes]
        if state == U8:
            made.lists[f"{name}_scales"] = [torch.zeros(-(-n // 256)) for n in sizes]
    if extra == "outputs":
        made.lists["outputs"] = [torch.zeros(n, dtype=BF16) for n in sizes]
    if extra == "remainders":
        made.lists["remainders"] = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16) for n in sizes]
    return made


def adamw(made: State, **options: Any) -> None:
    lists = dict(made.lists)
    states = (lists.pop("exp_avgs"), lists.pop("exp_avg_sqs"))
    ops.adamw_step(made.params, made.grads, *states, **({"step": 3, "lr": 1e-2} | lists | options))


def sgd(made: State, **options: Any) -> None:
    ops.sgd_step(made.params, made.grads, made.lists["exp_avgs"], lr=1e-2, momentum=0.9, weight_decay=0.1, **options)


def plain_sgd(made: State, **options: Any) -> None:
    ops.sgd_step(made.params, made.grads, lr=1e-2, weight_decay=0.1, **options)


def lion(made: State, **options: Any) -> None:
    ops.lion_step(made.params, made.grads, made.lists["exp_avgs"], lr=1e-2, weight_decay=0.1, **options)


def assert_same(found: State, wanted: State) -> None:
    for a, b in zip(found.changed(), wanted.changed(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


KINDS = [
    (F32, F32, F32, None),
    (F32, BF16, F32, "outputs"),
    (BF16, BF16, F32, "remainders"),
    (BF16, BF16, BF16, None),
    (F16, F32, BF16, None),
    (BF16, F16, U8, "remainders"),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", [None, 11])
def test_small_adamw_has_the_bits_of_the_cpu(kind: Any, seed: int | None) -> None:
    wanted = example(*kind)
    found = wanted.to(DEVICE)
    keys = range(len(SIZES))
    stochastic = None if seed is None else StochasticRounding(seed, list(keys), [2**32 - 100] * len(keys))
    for step in range(1, 4):
        for made in (wanted, found):
            adamw(made, step=step, grad_factor=0.25, stochastic=stochastic)
    assert_same(found, wanted)


@pytest.mark.parametrize("rule", [sgd, plain_sgd, lion])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_small_rules_have_the_bits_of_the_cpu(rule: Callable[..., None], dtype: torch.dtype) -> None:
    wanted = example(dtype, dtype, dtype)
    found = wanted.to(DEVICE)
    for made in (wanted, found):
        rule(made)
    assert_same(found, wanted)


def test_small_tensors_at_odd_addresses() -> None:
    wanted = example(F32, BF16, F32)
    found = wanted.to(DEVICE)
    found.params = [torch.cat([p.new_zeros(1), p])[1:] for p in found.params]
    for made in (wanted, found):
        adamw(made)
    assert_same(found, wanted)


def test_thousands_of_tensors() -> None:
    wanted = example(BF16, BF16, F32, "remainders", tuple(i * 37 % 1000 for i in range(3000)))
    found = wanted.to(DEVICE)
    for made in (wanted, found):
        adamw(made)
    assert_same(found, wanted)


def test_more_elements_than_an_int32_can_count() -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free memory")
    count = 2**31 + 5
    param, grad = torch.ones(count, dtype=BF16, device=DEVICE), torch.ones(count, dtype=BF16, device=DEVICE)
    ops.sgd_step([param], [grad], lr=0.5)
    for part in param.split(1 << 28):
        assert (part == 0.5).all()


def test_small_scalars_are_read_on_the_device() -> None:
    made = example(F32, F32, F32)
    by_host, by_device, skipped = (made.to(DEVICE) for _ in range(3))
    adamw(by_host, grad_factor=0.5, step=7)
    scalars = {"grad_factor": torch.tensor(0.5, device=DEVICE), "found_inf": torch.zeros((), device=DEVICE)}
    adamw(by_device, step=7, **scalars)
    assert_same(by_device, by_host)
    adamw(skipped, found_inf=torch.ones((), device=DEVICE))
    assert_same(skipped, made)
    for dtype in (torch.float32, torch.int64):
        counted = made.to(DEVICE)
        adamw(counted, step=torch.tensor(7, dtype=dtype, device=DEVICE), grad_factor=0.5)
        # a device's pow is not the host's: the two corrections may differ by one unit in the last place
        for a, b in zip(counted.changed(), by_host.changed(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Makes torch raise where it would wait for the device. Kernels have to be compiled and loaded by then."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait(request: pytest.FixtureRequest) -> None:
    made = example(BF16, BF16, F32, "remainders").to(DEVICE)
    moved = made.to(DEVICE)  # other addresses: the table is made anew
    options = {"grad_factor": torch.ones((), device=DEVICE), "found_inf": torch.zeros((), device=DEVICE)}
    step = torch.tensor(1.0, device=DEVICE)
    adamw(made, step=step, **options)
    request.getfixturevalue("no_synchronisation")
    for each in (made, moved):
        adamw(each, step=step, **options)


def test_a_captured_graph_replays_with_new_gradients() -> None:
    wanted = example(F32, F32, F32)
    made = wanted.to(DEVICE)
    step, factor = torch.zeros((), device=DEVICE), torch.ones((), device=DEVICE)
    adamw(made.to(DEVICE), step=step + 1, grad_factor=factor)  # compiled and loaded by now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.add_(1)
        adamw(made, step=step, grad_factor=factor)
    for number in range(1, 4):
        for found, ours in zip(made.grads, wanted.grads, strict=True):
            ours.normal_()
            found.copy_(ours)
        graph.replay()
        adamw(wanted, step=number)
    for a, b in zip(made.changed(), wanted.changed(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-7)
