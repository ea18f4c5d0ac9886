"""The Triton kernel of the optimizer steps, bit for bit against the model in numpy.

Run by tests/ops/test_optimizer_triton.py in Triton's interpreter.

The interpreter rounds a multiply-add twice and cuts bfloat16 off, where devices do neither: the model does the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastpar.kernels import optimizer as kernels
from tests.optim import optimizer_model as model
from tests.optim.optimizer_model import F32, NUM_STATES, RULES, Kinds, assert_same, expected

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "split": torch.bfloat16}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = model.narrow

    def cut(x: np.ndarray, dtype: str) -> np.ndarray:
        return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "bfloat16" else narrow(x, dtype)

    monkeypatch.setattr(model, "fma", lambda a, b, c: np.asarray(a * b + c, F32))
    monkeypatch.setattr(model, "narrow", cut)


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """A copy; bits of bfloat16 become bfloat16."""
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def as_array(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def run(
    rule: str,
    tensors: list[model.Tensor],
    *,
    factor: float = 1.0,
    grad_factor: float | None = None,
    found_inf: float | None = None,
    step_tensor: torch.Tensor | None = None,
    seed: int | None = None,
    **changed: Any,
) -> list[dict[str, np.ndarray]]:
    """One call; what `Tensor.stored` gives after it."""
    n = RULES[rule] | changed
    stored = [{name: as_tensor(x) for name, x in t.stored().items()} for t in tensors]
    lists = {name: [s[name] for s in stored if name in s] for name in ("param", "remainder")}
    states = [
        [s[f"{what}{k}"] for s in stored if f"{what}{k}" in s]
        for what in ("state", "scale")
        for k in range(NUM_STATES[rule])
    ]
    outputs = {i: s["output"] for i, s in enumerate(stored) if "output" in s}
    scalars = [None if x is None else torch.tensor([x]) for x in (grad_factor, found_inf)]
    rounding = [] if seed is None else [seed, *(x for t in tensors for x in (t.key, t.first))]
    head = (
        lists["param"],
        [as_tensor(t.grad) for t in tensors],
        *states,
        list(outputs.values()),
        lists["remainder"],
    )
    tail = (list(outputs), rounding, factor)
    if rule == "adamw":
        numbers = tuple(n[k] for k in ("step", "lr", "beta1", "beta2", "eps", "weight_decay"))
        kernels.adamw_step(*head, *scalars, step_tensor, *tail, *numbers)
    elif rule == "lion":
        kernels.lion_step(*head, *scalars, *tail, *(n[k] for k in ("lr", "beta1", "beta2", "weight_decay")))
    else:
        if rule == "plain_sgd":
            n = n | {"momentum": 0.0}
            head = (*head[:2], [], [], *head[2:])
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "first")
        kernels.sgd_step(*head, *scalars, *tail, *(n[k] for k in names))
    return [{name: as_array(x) for name, x in s.items()} for s in stored]


def check(rule: str, tensors: list[model.Tensor], seed: int | None = None, factor: float = 1.0, **changed: Any) -> None:
    for t, found in zip(tensors, run(rule, tensors, seed=seed, factor=factor, **changed), strict=True):
        assert_same(found, expected(rule, RULES[rule] | changed, t, factor, seed), t.kinds)


def examples(rule: str, kinds: Kinds, *counts: int) -> list[model.Tensor]:
    return [model.Tensor.example(count, kinds, NUM_STATES[rule], seed=i) for i, count in enumerate(counts)]


@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule(rule: str) -> None:
    check(rule, examples(rule, Kinds(), 0, 1, 300, kernels.CHUNK, kernels.CHUNK + 257), factor=0.5)


@pytest.mark.parametrize(("nesterov", "first"), [(False, True), (True, False), (True, True)])
def test_sgd_with_nesterov_and_the_first_step(nesterov: bool, first: bool) -> None:
    check("sgd", examples("sgd", Kinds(), 300), nesterov=nesterov, first=first)


@pytest.mark.parametrize(
    "kinds",
    [
        Kinds("bfloat16", "bfloat16", "bfloat16"),
        Kinds("float16", "float32", "bfloat16"),
        Kinds("split", "bfloat16", "float32"),
        Kinds("split", "float16", "uint8"),
        Kinds("float32", "bfloat16", "float32", "bfloat16"),
        Kinds("float32", "float32", "uint8", "float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [None, -5])
def test_every_format(kinds: Kinds, seed: int | None) -> None:
    check("adamw", examples("adamw", kinds, 300, kernels.CHUNK + 5), seed=seed)


def test_tensors_of_several_kinds_are_grouped() -> None:
    kinds = [Kinds(), Kinds("bfloat16", "float16"), Kinds(), Kinds("float16", output="none"), Kinds(output="bfloat16")]
    tensors = [model.Tensor.example(30 + i, k, 1, seed=i) for i, k in enumerate(kinds)]
    check("lion", tensors, seed=2)


def test_many_tensors_are_one_launch() -> None:
    tensors = [model.Tensor.example(i * 7 % 23, Kinds(), 1, seed=i) for i in range(70)]
    check("lion", tensors)


def test_numbers_at_the_ends_of_float32() -> None:
    tiny = np.array([2.0**-149, -(2.0**-149), 2.0**-126, 3e38, -0.0, 0.0], F32)
    for kinds in (Kinds(), Kinds(output="bfloat16"), Kinds(state="uint8")):
        (tensor,) = examples("sgd", kinds, len(tiny))
        tensor.param, tensor.grad = tiny.copy(), tiny[::-1].copy()
        for factor in (1.0, 2.0**-100):
            check("sgd", [tensor], factor=factor)


def test_a_shard_gets_the_bits_of_the_whole() -> None:
    (whole,) = examples("adamw", Kinds("bfloat16", "float32", "bfloat16"), 700)
    whole.first = 2**32 - 300  # its upper half changes within a chunk
    check("adamw", [whole], seed=9)
    (wanted,) = run("adamw", [whole], seed=9)
    parts = run("adamw", [whole.rows(0, 100), whole.rows(100, 700)], seed=9)
    assert_same({k: np.concatenate([p[k] for p in parts]) for k in wanted}, wanted, whole.kinds)


def test_lion_where_the_direction_is_zero_or_nan() -> None:
    tensor = model.Tensor(Kinds(), np.ones(3, F32), np.array([0, np.nan, 1], F32), [np.zeros(3, F32)])
    (found,) = run("lion", [tensor])
    assert_same(found, expected("lion", RULES["lion"], tensor), Kinds())


def test_a_second_moment_that_is_not_zero_stays_so() -> None:
    (tensor,) = examples("adamw", Kinds("float32", "float32", "uint8"), 300)
    tensor.grad[:4] = [2.0**20, 2.0**-20, 0.0, 2.0**-60]  # the last one's square is nothing beside the first one's
    tensor.states[1][:4] = 0
    check("adamw", [tensor])
    (found,) = run("adamw", [tensor])
    assert (found["state1"][:4] > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("bad", [np.inf, np.nan, np.uint32(0x7FFFFFFF).view(F32)])
def test_a_value_that_is_not_finite_stays_in_its_block(bad: float) -> None:
    (tensor,) = examples("adamw", Kinds("split", "float32", "uint8"), 768)
    tensor.grad[300] = bad
    with np.errstate(invalid="ignore"):  # the interpreter computes in numpy
        (found,) = run("adamw", [tensor])
    assert np.isnan(found["scale0"]).tolist() == [False, True, False]
    assert np.isnan(found["scale1"]).tolist() == [False, True, False]
    assert np.isnan(model.widen(found["param"], "split")).sum() == 1


def test_scalars_are_read_on_the_device() -> None:
    (tensor,) = examples("adamw", Kinds(), 300)
    (found,) = run("adamw", [tensor], factor=9.0, grad_factor=0.125)
    assert_same(found, expected("adamw", RULES["adamw"], tensor, 0.125), Kinds())
    (found,) = run("adamw", [tensor], found_inf=0.0)
    assert_same(found, expected("adamw", RULES["adamw"], tensor), Kinds())
    for nonzero in (1.0, float("nan")):
        (found,) = run("adamw", [tensor], found_inf=nonzero)
        assert_same(found, tensor.stored(), Kinds())
    for step in (torch.tensor(1000), torch.tensor([1000.0])):
        (found,) = run("adamw", [tensor], step_tensor=step, step=1)
        assert_same(found, expected("adamw", RULES["adamw"] | {"step": 1000}, tensor), Kinds())


def columns(*addresses: tuple[int, int], counts: tuple[int, ...] = (5,)) -> kernels.Columns:
    """Of float32 parameters and gradients at these addresses, and nothing else."""
    params, grads = zip(*addresses, strict=True)
    dtypes = ((torch.float32,) * len(params),) * 2
    return kernels.Columns(
        torch.device("cpu"), (*dtypes, ()), (), (params, grads, (), (), (), (), (), ()), counts, rounding=()
    )


def test_a_table_is_made_once_for_the_same_addresses() -> None:
    tables = kernels.Tables()
    table = tables.find(columns((16, 32)))
    assert tables.find(columns((16, 32))) is table
    moved = tables.find(columns((48, 32)))
    assert moved is not table
    assert moved.rows[0, 0] == 48
    assert moved.groups[0].owners is table.groups[0].owners, "as long as the sizes stay"
    for address in range(kernels.MAX_TABLES):
        tables.find(columns((64 + 16 * address, 32)))
    assert tables.find(columns((16, 32))) is not table


def test_tables_count_programs_and_pass_over_empty_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, counts = kernels.Tables(), (3, 0, 5 * kernels.CHUNK + 1, 7)
    table = tables.find(columns(*[(16, 32)] * 4, counts=counts))
    assert table.rows[:, -1].tolist() == [0, 1, 7]
    (group,) = table.groups
    assert (group.begin, group.is_aligned) == (0, True)
    assert group.owners.there.tolist() == [0, 1, 1, 1, 1, 1, 1, 2]
    odd = tables.find(columns((16, 36), *[(16, 32)] * 4, counts=(9, *counts)))
    assert [(g.begin, g.is_aligned) for g in odd.groups] == [(0, False), (1, True)]
    assert odd.rows[:, -1].tolist() == [0, 0, 1, 7]
    monkeypatch.setattr(kernels, "STEPS", 4)
    (group,) = kernels.Tables().find(columns(*[(16, 32)] * 4, counts=counts)).groups
    assert group.owners.there.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("steps", [2, 4])
def test_a_program_may_update_several_chunks(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    for name in ("STEPS", "NARROW_STEPS"):
        monkeypatch.setattr(kernels, name, steps)
    for kinds in (Kinds(), Kinds("split", "bfloat16", "uint8"), Kinds("bfloat16", "bfloat16", "bfloat16")):
        counts = (kernels.CHUNK * 2, kernels.CHUNK * 5 + 300, 7)
        check("adamw", examples("adamw", kinds, *counts), seed=3)
