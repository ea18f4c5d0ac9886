"""Optimizer steps: every CPU instruction set against float64, the formats bit for bit, and independence of layout.

Tolerances. One step from given states is a dozen float32 operations without cancellation beyond that of g - m and
p - lr * ..., so 4e-7 of the largest operand (2e-6 in the portable version, whose FMA rounds twice, and for AdamW's
quotient); what is stored as bfloat16 or float16 has one rounding more (2^-8, 2^-11). Formats are compared bit for bit
where a step is exact: p = 0 and lr = 1, beta = 0.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.contracts import optimizer_formats as formats
from tests import instruction_sets

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ADAMW = {"step": 3, "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
LION = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
K = torch.ops.fastpar


capability = instruction_sets.each()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(found: Tensor, exact: Tensor, rounding: float = 0.0, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * rounding + 2e-6, atol=atol)


def awkward(n: int) -> Tensor:
    """Values of all sizes and signs, with zeros, and bits in all places of the mantissa."""
    x = random(n) * torch.exp2(torch.linspace(-30, 10, n))
    x[::7] = 0.0
    return x


# ---- the algebra -----------------------------------------------------------------------------------------------------


def test_adamw_worked_example_of_the_docstring(capability: str) -> None:
    p, m, v = torch.ones(1), torch.zeros(1), torch.zeros(1)
    ops.adamw_step([p], [torch.full((1,), 0.5)], [m], [v], step=1, lr=0.1, eps=0.0, weight_decay=0.1)
    torch.testing.assert_close([p, m, v], [torch.tensor([0.89]), torch.tensor([0.05]), torch.tensor([0.00025])])


def test_sgd_worked_example_of_the_docstring(capability: str) -> None:
    for nesterov, wanted in ((False, 0.25), (True, 0.125)):
        p, b = torch.ones(1), torch.ones(1)
        options: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.5, "nesterov": nesterov}
        ops.sgd_step([p], [torch.full((1,), 0.5)], [b], **options)
        assert (p.item(), b.item()) == (wanted, 1.5)


def test_lion_worked_example_of_the_docstring(capability: str) -> None:
    p, m = torch.ones(1), torch.full((1,), 0.1)
    ops.lion_step([p], [torch.full((1,), -2.0)], [m], lr=0.25, betas=(0.5, 0.5), weight_decay=1.0)
    torch.testing.assert_close([p, m], [torch.ones(1), torch.full((1,), -0.95)])


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_adamw_matches_float64(
    capability: str, dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    for n in (1, 17, 1000):
        p, g, m = random(n, dtype=dtype), random(n, dtype=grad_dtype, seed=1), random(n, dtype=state_dtype, seed=2)
        v = random(n, seed=3).square().to(state_dtype)
        exact_m = 0.9 * m.double() + 0.1 * 0.5 * g.double()
        exact_v = 0.99 * v.double() + 0.01 * (0.5 * g.double()).square()
        divisor = exact_v.sqrt() / (1 - 0.99**3) ** 0.5 + 1e-6
        exact_p = p.double() * (1 - 0.01 * 0.1) - 0.01 / (1 - 0.9**3) * exact_m / divisor
        ops.adamw_step([p], [g], [m], [v], grad_factor=0.5, **ADAMW)
        assert_close(m, exact_m, ROUNDING[state_dtype])
        assert_close(v, exact_v, ROUNDING[state_dtype])
        assert_close(p, exact_p, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["plain", "momentum", "nesterov", "first"])
def test_sgd_matches_float64(capability: str, dtype: torch.dtype, form: str) -> None:
    for n in (1, 17, 1000):
        p, g, b = random(n, dtype=dtype), random(n, seed=1), random(n, seed=2)
        grad = 0.5 * g.double() + 0.1 * p.double()
        options: dict[str, Any] = {**SGD, "nesterov": form == "nesterov", "first": form == "first"}
        exact_b = grad if form == "first" else 0.9 * b.double() + 0.75 * grad
        direction = grad + 0.9 * exact_b if form == "nesterov" else exact_b
        if form == "plain":
            options |= {"momentum": 0.0}
            exact_b, direction = b.double(), grad
        exact_p = p.double() - 0.1 * direction
        ops.sgd_step([p], [g], [] if form == "plain" else [b], grad_factor=0.5, **options)
        assert_close(b, exact_b)
        assert_close(p, exact_p, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
def test_lion_matches_float64_and_stands_still_at_zero(capability: str, dtype: torch.dtype) -> None:
    for n in (1, 17, 1000):
        p, g, m = random(n, dtype=dtype), random(n, seed=1), random(n, seed=2)
        g[::3], m[::3] = 0.0, 0.0
        direction = (0.9 * m.double() + 0.1 * 0.5 * g.double()).sign()
        exact_p = p.double() * (1 - 0.001) - 0.01 * direction
        exact_m = 0.99 * m.double() + 0.01 * 0.5 * g.double()
        ops.lion_step([p], [g], [m], grad_factor=0.5, **LION)
        assert_close(m, exact_m)
        assert_close(p, exact_p, ROUNDING[dtype])


def test_ten_steps_of_adamw_stay_with_torch(capability: str) -> None:
    p, m, v = random(1000), torch.zeros(1000), torch.zeros(1000)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for step in range(1, 11):
        grad = random(1000, seed=step)
        theirs.grad = grad.clone()
        optimizer.step()
        ops.adamw_step([p], [grad], [m], [v], step=step, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(p, theirs.detach(), rtol=2e-6, atol=2e-6)


def test_the_reference_takes_the_same_steps(capability: str) -> None:
    for name, options, kinds in (("adamw_step", ADAMW, 2), ("sgd_step", SGD, 1), ("lion_step", LION, 1)):
        made = [random(300, seed=i).abs() for i in range(kinds)]
        p, g = random(300), random(300, seed=9)
        found, wanted = [p.clone(), *map(torch.clone, made)], [p.clone(), *map(torch.clone, made)]
        for module, x in ((ops, found), (reference, wanted)):
            getattr(module, name)([x[0]], [g], *([s] for s in x[1:]), grad_factor=torch.tensor(0.3), **options)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_outputs_are_the_masters_rounded_to_nearest(capability: str) -> None:
    for n in (1, 37, 1000):
        masters, grads = [random(n), random(n, seed=1), random(n, seed=2)], [random(n, seed=3)] * 3
        outputs = [torch.empty(n, dtype=torch.bfloat16), None, torch.empty(n, dtype=torch.float16)]
        ops.sgd_step(masters, grads, lr=0.1, outputs=outputs)
        assert outputs[0] is not None
        assert torch.equal(outputs[0], masters[0].bfloat16())
        assert outputs[2] is not None
        assert torch.equal(outputs[2], masters[2].half())


@pytest.mark.parametrize("shift", [0, 1])
def test_streamed_outputs_of_large_tensors_are_the_same(capability: str, shift: int) -> None:
    n = (5 << 20) + 3  # above 8 MiB of bfloat16 outputs are stored past the caches, where they are aligned
    master = torch.ones(n)
    output = torch.zeros(n + shift, dtype=torch.bfloat16)[shift:]
    ops.sgd_step([master], [torch.full((n,), 0.3)], lr=1.0, outputs=[output])
    assert torch.equal(output, master.bfloat16())


def test_a_split_master_is_updated_like_a_float32_one(capability: str) -> None:
    n = 1003
    master = random(n)
    param, remainder = formats.split_master(master)
    m, v = [torch.zeros(n), torch.zeros(n)], [torch.zeros(n), torch.zeros(n)]
    for step in range(1, 4):
        g = random(n, seed=step)
        ops.adamw_step([master], [g], [m[0]], [v[0]], step=step, lr=0.01)
        ops.adamw_step([param], [g], [m[1]], [v[1]], step=step, lr=0.01, remainders=[remainder])
    assert torch.equal(formats.join_master(param, remainder), master)
    nearest = master.bfloat16()
    assert (param == nearest).float().mean() > 0.99  # they differ halfway between two bfloat16 only


def test_a_master_is_split_as_the_reference_says(capability: str) -> None:
    master = awkward(999)
    special = [float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1 + 2.0**-8, -1 - 2.0**-8, -0.0]
    master[:8] = torch.tensor(special)
    param, remainder = torch.zeros(999, dtype=torch.bfloat16), torch.zeros(999, dtype=torch.int16)
    ops.sgd_step([param], [-master], lr=1.0, remainders=[remainder])
    wanted = formats.split_master(0.0 + master)  # 0 - -0 is 0
    assert torch.equal(param.view(torch.int16), wanted[0].view(torch.int16))
    assert torch.equal(remainder, wanted[1])
    assert torch.equal(formats.join_master(param, remainder).nan_to_num(7.0), (0.0 + master).nan_to_num(7.0))


@pytest.mark.parametrize("start", [0, 5, 2**32 - 500, 2**32, 3 * 2**32 - 1])
def test_stochastic_rounding_uses_the_bits_of_the_reference(capability: str, start: int) -> None:
    n = 1003  # with start 2^32 - 500 the upper half of the index changes within a register
    g = awkward(n)
    g[:3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    bits = formats.random_bits(5, -3, start, n)
    p, m, v = (torch.zeros(n, dtype=torch.bfloat16) for _ in range(3))
    stochastic = ops.StochasticRounding(5, [-3], [start])
    ops.sgd_step([p], [g], lr=1.0, stochastic=stochastic)
    assert torch.equal(p.view(torch.int16), formats.round_stochastically(0.0 - g, bits[0]).view(torch.int16))
    options: dict[str, Any] = {"step": 1, "lr": 0.0, "betas": (0.0, 0.0)}
    p.zero_()
    ops.adamw_step([p], [g], [m], [v], stochastic=stochastic, **options)
    assert torch.equal(m.view(torch.int16), formats.round_stochastically(g, bits[1]).view(torch.int16))
    assert torch.equal(v.view(torch.int16), formats.round_stochastically(g * g, bits[2]).view(torch.int16))


def test_the_mean_of_stochastic_roundings_is_the_value() -> None:
    # 2^16 roundings of 1 + 2^-10, an eighth of the distance to the next bfloat16: the mean of as many draws has a
    # standard deviation of 2^-7 * sqrt(7/64) / 2^8 = 1.0e-5.
    for kind in range(3):
        bits = formats.random_bits(1, 2, 3, 1 << 16)[kind]
        rounded = formats.round_stochastically(torch.full((1 << 16,), 1 + 2.0**-10), bits)
        assert abs(rounded.double().mean().item() - 1 - 2.0**-10) < 5e-5
    a, b, c = (x.double() for x in formats.random_bits(1, 2, 3, 1 << 16))
    for x, y in ((a, b), (a, c), (b, c), (a[1:], a[:-1])):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) < 5 / 2**8


def test_eight_bit_codes_are_those_of_the_reference(capability: str) -> None:
    for n in (1, 255, 256, 1003):
        g = awkward(n)
        p, m, v = torch.zeros(n), torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
        m_scale, v_scale = (torch.ones(formats.num_blocks(n)) for _ in range(2))
        scales: dict[str, Any] = {"exp_avg_scales": [m_scale], "exp_avg_sq_scales": [v_scale]}
        ops.adamw_step([p], [g], [m], [v], step=1, lr=0.0, betas=(0.0, 0.0), **scales)
        for codes, scale, wanted in (
            (m, m_scale, formats.quantise(g, signed=True)),
            (v, v_scale, formats.quantise(g * g, signed=False)),
        ):
            assert torch.equal(codes, wanted[0])
            assert torch.equal(scale, wanted[1])


def test_eight_bit_states_are_read_as_the_reference_reads_them(capability: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    scales = torch.tensor([0.7, 3.0])
    value = formats.dequantise(codes, scales, signed=True)
    p, kept = torch.zeros(512), codes.clone()
    ops.sgd_step([p], [torch.zeros(512)], [kept], lr=1.0, momentum=0.5, momentum_scales=[scales.clone()])
    assert torch.equal(p, 0.0 - 0.5 * value)
    positive = formats.dequantise(codes, scales, signed=False)
    assert positive.min() == 0.0
    assert positive[1] > 0.0
    assert positive[255] == 0.7


def test_eight_bit_worked_example_of_the_docstring() -> None:
    codes, scales = formats.quantise(torch.tensor([1.0, -0.5, 0.3]), signed=True)
    assert (codes.tolist(), scales.tolist()) == ([127, 247, 113], [1.0])
    assert formats.dequantise(codes, scales, signed=True).tolist() == [1.0, -0.5, 0.3125]


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bit_blocks_keep_a_sixteenth_and_never_lose_a_divisor(signed: bool) -> None:
    x = torch.exp2(torch.linspace(-28 if not signed else -14, 0, 256))
    back = formats.dequantise(*formats.quantise(x, signed=signed), signed=signed)
    assert ((back - x).abs() / x).max() <= 1 / 16
    tiny = torch.tensor([1.0, 1e-20, 0.0])
    back = formats.dequantise(*formats.quantise(tiny, signed=False), signed=False)
    assert back[1] > 0.0
    assert back[2] == 0.0


def test_a_value_that_is_not_finite_shows_in_its_whole_block_and_nowhere_else(capability: str) -> None:
    for bad in (float("nan"), float("inf")):
        g = random(700)
        g[300] = bad
        p, b, scale = torch.zeros(700), torch.zeros(700, dtype=torch.uint8), torch.ones(3)
        ops.sgd_step([p], [g], [b], lr=1.0, momentum=0.5, first=True, momentum_scales=[scale])
        back = formats.dequantise(b, scale, signed=True)
        assert back[256:512].isnan().all()
        assert back[:256].isfinite().all()
        assert back[512:].isfinite().all()


# ---- layout ----------------------------------------------------------------------------------------------------------

KINDS = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float32, torch.float32),
    "master": (torch.float32, torch.bfloat16, torch.bfloat16),
    "split": (torch.bfloat16, torch.float32, torch.float32),
    "8bit": (torch.bfloat16, torch.bfloat16, torch.uint8),
}
STEPS = {"adamw": (ops.adamw_step, ADAMW, 2), "sgd": (ops.sgd_step, SGD, 1), "lion": (ops.lion_step, LION, 1)}


def problem(kind: str, num_states: int, n: int) -> dict[str, Tensor]:
    """Flat tensors by role."""
    dtype, grad_dtype, state_dtype = KINDS[kind]
    x = {"param": random(n, dtype=dtype), "grad": random(n, dtype=grad_dtype, seed=1)}
    for k in range(num_states):
        state = random(n, seed=2 + k).abs()
        x[f"state{k}"] = state.to(state_dtype)
        if state_dtype == torch.uint8:
            x[f"state{k}"], x[f"scale{k}"] = formats.quantise(state, signed=k == 0)
    if kind == "master":
        x["output"] = torch.zeros(n, dtype=torch.bfloat16)
    if kind == "split":
        x["remainder"] = torch.arange(n).to(torch.int16)
    return x


def run(step: str, parts: list[dict[str, Tensor]], starts: list[int], keys: list[int] | None = None) -> None:
    function, options, num_states = STEPS[step]
    names = {"adamw": ("exp_avg_scales", "exp_avg_sq_scales"), "sgd": ("momentum_scales",), "lion": ("exp_avg_scales",)}
    more: dict[str, Any] = {}
    if "scale0" in parts[0]:
        more |= {name: [x[f"scale{k}"] for x in parts] for k, name in enumerate(names[step])}
    if "output" in parts[0]:
        more["outputs"] = [x["output"] for x in parts]
    if "remainder" in parts[0]:
        more["remainders"] = [x["remainder"] for x in parts]
    states = ([x[f"state{k}"] for x in parts] for k in range(num_states))
    stochastic = ops.StochasticRounding(3, keys or [7] * len(parts), starts)
    params, grads = [x["param"] for x in parts], [x["grad"] for x in parts]
    function(params, grads, *states, stochastic=stochastic, grad_factor=0.5, **options, **more)  # type: ignore[operator]


def cut(whole: dict[str, Tensor], borders: list[int]) -> list[dict[str, Tensor]]:
    """Views of the tensors between borders; of scales between the borders of blocks."""
    return [
        {name: x[a // 256 : -(-b // 256)] if name.startswith("scale") else x[a:b] for name, x in whole.items()}
        for a, b in itertools.pairwise(borders)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_any_cut_gives_the_bits_of_the_whole(capability: str, step: str, kind: str) -> None:
    n = 1536 + 77
    whole = problem(kind, STEPS[step][2], n)
    shards = {name: x.clone() for name, x in whole.items()}
    before = {name: x.clone() for name, x in whole.items()}
    run(step, [whole], [100])
    borders = [0, 1, 18, 18, 35, 500, 755, 1024, n] if kind != "8bit" else [0, 256, 256, 1024, 1280, n]
    run(step, cut(shards, borders), [100 + b for b in borders[:-1]])
    for name, x in whole.items():
        assert torch.equal(x.view(torch.uint8), shards[name].view(torch.uint8)), name
    assert not torch.equal(whole["param"], before["param"])
    assert torch.equal(whole["grad"], before["grad"])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    n = 200_003
    one, two = problem(kind, 2, n), problem(kind, 2, n)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run("adamw", [one], [0])
        torch.set_num_threads(2)
        # The third of the pieces straddles the threads' border.
        borders = [0, 256, 512, 199_936, n]
        run("adamw", cut(two, borders), borders[:-1])
    finally:
        torch.set_num_threads(threads)
    for name, x in one.items():
        assert torch.equal(x.view(torch.uint8), two[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_beside_a_tensor(capability: str, kind: str) -> None:
    borders = [256, 256 + 37] if kind == "8bit" else [13, 13 + 37]
    whole = problem(kind, 2, 600)
    before = {name: x.clone() for name, x in whole.items()}
    run("adamw", cut(whole, borders), [0])
    for name, x in whole.items():
        a, b = (1, 2) if name.startswith("scale") else borders
        untouched = torch.cat([x[:a], x[b:]])
        assert torch.equal(untouched, torch.cat([before[name][:a], before[name][b:]])), name


def test_thousands_of_tiny_tensors_and_empty_ones_are_updated(capability: str) -> None:
    sizes = [i % 19 for i in range(3000)]
    params, grads = [torch.ones(n) for n in sizes], [torch.full((n,), 0.5) for n in sizes]
    moments = [torch.zeros(n) for n in sizes], [torch.zeros(n) for n in sizes]
    ops.adamw_step(params, grads, *moments, step=1, lr=0.1, eps=0.0, weight_decay=0.0)
    assert all(torch.allclose(p, torch.full_like(p, 0.9)) for p in params)
    ops.adamw_step([], [], [], [], step=1, lr=0.1)
    ops.adamw_step([torch.empty(0, 3)], [torch.empty(0, 3)], [torch.empty(0, 3)], [torch.empty(0, 3)], step=1, lr=0.1)


@pytest.mark.slow
def test_tensors_beyond_2_to_the_31_elements_are_updated_to_the_end() -> None:
    n = 2**31 + 1000
    param, grad = torch.zeros(n, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16).expand(n).contiguous()
    ops.sgd_step([param], [grad], lr=1.0)
    assert param[:100].eq(-1).all()
    assert param[-2000:].eq(-1).all()
    assert param[2**31 - 1000 : 2**31 + 1000].eq(-1).all()


def test_tensors_that_are_not_contiguous_are_updated_in_place() -> None:
    dense = [random(6, 5), random(6, 5, seed=1), torch.zeros(6, 5), torch.zeros(6, 5)]
    strided = [x.t().contiguous().t() for x in dense]
    every_second = torch.zeros(6, 10)
    strided[0] = every_second[:, ::2]
    strided[0].copy_(dense[0])
    for p, g, m, v in (dense, strided):
        ops.adamw_step([p], [g], [m], [v], step=1, lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))
    assert every_second[:, 1::2].eq(0).all()


# ---- scalars that steer a step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_leaves_every_bit(kind: str) -> None:
    for name, (function, options, num_states) in STEPS.items():
        x = problem(kind, num_states, 300)
        before = {key: value.clone() for key, value in x.items()}
        states = [[x[f"state{k}"]] for k in range(num_states)]
        more: dict[str, Any] = {"remainders": [x["remainder"]]} if kind == "split" else {}
        if kind == "8bit":
            scales = {"adamw": ("exp_avg_scales", "exp_avg_sq_scales"), "sgd": ("momentum_scales",)}
            more = {s: [x[f"scale{k}"]] for k, s in enumerate(scales.get(name, ("exp_avg_scales",)))}
        grad = torch.full_like(x["grad"], float("nan"))
        call = lambda found: function([x["param"]], [grad], *states, found_inf=found, **options, **more)  # noqa: E731, B023
        call(torch.ones(()))
        assert all(torch.equal(value, before[key]) for key, value in x.items())
        call(torch.zeros(()))
        assert x["param"].isnan().all()


def test_a_step_tensor_and_a_factor_tensor_give_what_numbers_give() -> None:
    results = []
    for step, factor in ((3, 0.25), (torch.tensor(3), torch.tensor(0.25)), (torch.tensor(3.0), torch.tensor([0.25]))):
        p, m, v = random(50), torch.zeros(50), torch.zeros(50)
        ops.adamw_step([p], [random(50, seed=1)], [m], [v], **{**ADAMW, "step": step}, grad_factor=factor)
        results.append(p)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes() -> None:
    def lists(count: int) -> list[list[Tensor]]:
        return [[random(5, seed=9 * i + k).abs() for k in range(2)] for i in range(count)]

    p, g, m, v = lists(4)
    out = [torch.empty(5, dtype=torch.bfloat16)]
    rounding = [1, 2, 0, 3, 0]
    adamw = (p, g, m, v, [], [], out, [], torch.ones(()), None, None, [1], rounding, 1.0, 1, 0.1, 0.9, 0.99, 1e-8, 0.1)
    torch.library.opcheck(K.adamw_step.default, adamw)
    torch.library.opcheck(
        K.sgd_step.default, (p, g, m, [], out, [], None, None, [0], [], 1.0, 0.1, 0.9, 0.0, 0.1, True, False)
    )
    torch.library.opcheck(K.lion_step.default, (p, g, m, [], [], [], None, None, [], [], 1.0, 0.1, 0.9, 0.99, 0.1))


def test_compiles_without_breaking_the_graph() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        ops.adamw_step([p], [g], [m], [v], step=1, lr=0.1)
        ops.sgd_step([p], [g], lr=0.1)
        ops.lion_step([p], [g], [m], lr=0.1)
        return p * 2

    eager, compiled = ([random(8, seed=i).abs() for i in range(4)] for _ in range(2))
    wanted = step(*eager)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    torch.testing.assert_close([found, *compiled], [wanted, *eager])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"params": [torch.zeros(3, dtype=torch.float64)]}, TypeError, "params.0. must be float32, bfloat16, float16"),
        ({"grads": [torch.zeros(4)]}, ValueError, r"grads.0. must have the shape of params.0., \(3,\), got \(4,\)"),
        ({"grads": []}, ValueError, r"grads must have one entry per parameter \(1\), got 0"),
        (
            {"exp_avgs": [torch.zeros(3, dtype=torch.float16)]},
            TypeError,
            "exp_avgs.0. must be float32, bfloat16, uint8",
        ),
        ({"exp_avgs": [torch.zeros(3, dtype=torch.bfloat16)]}, TypeError, "must have one dtype"),
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\)"),
        ({"step": 0}, ValueError, "step must be 1 for the first step"),
        ({"outputs": [torch.zeros(3)]}, TypeError, "outputs.0. must be bfloat16, float16"),
        ({"remainders": [torch.zeros(3, dtype=torch.int16)]}, TypeError, "params.0. must be bfloat16"),
        ({"grad_factor": torch.zeros(2)}, ValueError, "grad_factor must be one float32"),
        ({"found_inf": torch.zeros(1, dtype=torch.bool)}, ValueError, "found_inf must be one float32"),
        ({"stochastic": ops.StochasticRounding(0, [1, 2], [0])}, ValueError, "one key and one start per parameter"),
        ({"exp_avg_scales": [torch.ones(1)]}, ValueError, "exp_avgs of torch.float32 needs 0 tensors of scales, got 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {name: [torch.zeros(3)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    for module in (ops, reference):
        with pytest.raises(error, match=text):
            module.adamw_step(**{**arguments, "step": 1, "lr": 0.1, **change})


def test_momentum_buffers_need_momentum() -> None:
    with pytest.raises(ValueError, match="need a momentum"):
        ops.sgd_step([torch.zeros(1)], [torch.zeros(1)], [torch.zeros(1)], lr=0.1)
    codes = [torch.zeros(3, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="needs 1 tensors of scales, got 0"):
        ops.sgd_step([torch.zeros(3)], [torch.zeros(3)], codes, lr=0.1, momentum=0.9)
