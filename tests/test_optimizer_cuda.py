"""The CUDA kernels of the optimizer steps on the emulated device, bit for bit against a model in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulated import emulated
from tests.optimizer_cuda_cases import (
    ADAMW,
    BLOCK,
    F32,
    NUM_STATES,
    RULES,
    SGD,
    Kinds,
    Tensor,
    assert_same,
    dequantise,
    expected,
    kernels,
    run,
    widen,
)

ALL_RULES = list(RULES)
# both layouts of a tile, its end, several tiles of a warp, and more than one chunk
SIZES = (0, 1, 31, 256, 257, 700, 8192 + 5)


def check(
    rule: str, kinds: Kinds, count: int = 700, offset: int = 0, seed: int | None = None, **numbers: object
) -> None:
    tensor = Tensor.example(count, kinds, NUM_STATES[rule])
    (found,) = run(rule, RULES[rule] | numbers, [tensor], seed=seed, offset=offset)
    assert_same(found, expected(rule, RULES[rule] | numbers, tensor, seed=seed), kinds)


# ---- rules -----------------------------------------------------------------------------------------------------------


@emulated
def test_the_worked_example() -> None:
    tensor = Tensor(Kinds(), *(np.array([x], F32) for x in (1.0, 2.0)), [np.zeros(1, F32), np.zeros(1, F32)])
    (found,) = run("adamw", ADAMW | {"step": 1, "lr": 0.1, "weight_decay": 0.0, "eps": 0.0}, [tensor], factor=0.5)
    np.testing.assert_allclose([found[k][0] for k in ("param", "state0", "state1")], [0.9, 0.1, 0.001], rtol=1e-6)


@emulated
@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize("count", SIZES)
def test_every_rule_at_any_size(rule: str, count: int) -> None:
    check(rule, Kinds(), count)


@emulated
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_sgd_with_nesterov_and_the_first_step(nesterov: bool, first: bool) -> None:
    check("sgd", Kinds(), nesterov=nesterov, first=first)


@emulated
def test_lion_where_the_direction_is_zero_or_nan() -> None:
    tensor = Tensor(Kinds(), np.ones(3, F32), np.array([0, np.nan, 1], F32), [np.zeros(3, F32)])
    (found,) = run("lion", RULES["lion"], [tensor])
    assert_same(found, expected("lion", RULES["lion"], tensor), Kinds())
    assert found["param"][0] == F32(1.0 - 1e-4)
    assert np.isnan(found["param"][1])


@emulated
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("step", [1, 1000])
def test_corrections_of_a_step_that_the_device_counts(kind: str, step: int) -> None:
    import fastpar_emulation as emulation

    from tests.device_array import DeviceArray

    counter = DeviceArray.of(np.array([step], F32 if kind == "float" else np.int64))
    out = DeviceArray((2,), F32)
    launch = getattr(kernels(), f"corrections_of_{kind}")
    config = emulation.LaunchConfig(blocks=1, threads=1)
    launch(config, counter.buffer, ADAMW["lr"], ADAMW["beta1"], ADAMW["beta2"], out.buffer)
    wanted = [1.0 / np.sqrt(1.0 - ADAMW["beta2"] ** step), ADAMW["lr"] / (1.0 - ADAMW["beta1"] ** step)]
    np.testing.assert_array_equal(out.array, np.array(wanted, F32))
    tensor = Tensor.example(9, Kinds(), 2)
    (found,) = run("adamw", ADAMW | {"step": 77, "corrections": out.buffer}, [tensor])
    assert_same(found, expected("adamw", ADAMW | {"step": step}, tensor), Kinds())


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("param", ["float32", "bfloat16", "float16", "split"])
@pytest.mark.parametrize("grad", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "uint8"])
def test_dtypes_in_any_mix(param: str, grad: str, state: str) -> None:
    output = {"bfloat16": "float16", "float16": "bfloat16"}.get(grad, "none") if param == "float32" else "none"
    kinds = Kinds(param, grad, state, output)
    for offset in (0, 3):
        check("adamw", kinds, offset=offset)
    check("adamw", kinds, seed=5)


@emulated
@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize("kinds", [Kinds("split", "bfloat16", "uint8"), Kinds("bfloat16", "bfloat16", "bfloat16")])
def test_every_rule_in_fewer_bits(rule: str, kinds: Kinds) -> None:
    check(rule, kinds, seed=3)
    check(rule, kinds, offset=1)


@emulated
@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("param", ["float32", "split"])
def test_results_do_not_depend_on_the_address(param: str, offset: int) -> None:
    check("adamw", Kinds(param, "bfloat16", "float32"), 300, offset)


# ---- what a number of fewer bits is ----------------------------------------------------------------------------------


@emulated
def test_stochastic_rounding_is_unbiased_and_differs_by_seed_and_tensor() -> None:
    count, kinds = 4096, Kinds("bfloat16", "float32", "float32")
    ones = Tensor(kinds, np.full(count, 0x3F80, np.uint16), np.full(count, 2.0**-10, F32), [])
    still = SGD | {"lr": 1.0, "weight_decay": 0.0}
    (nearest,) = run("plain_sgd", still, [ones])
    assert (nearest["param"] == 0x3F80).all()
    (found,) = run("plain_sgd", still, [ones], seed=1)
    moved = widen(found["param"], "bfloat16").astype(np.float64)
    # a step is 2^-8 below 1: each moves with probability 1/4; four standard deviations of the mean
    assert abs((1.0 - moved).mean() - 2.0**-10) < 4 * 2.0**-8 * np.sqrt(0.25 * 0.75 / count)
    (other,) = run("plain_sgd", still, [ones], seed=2)
    assert (other["param"] != found["param"]).any()
    ones.key = 1
    (other,) = run("plain_sgd", still, [ones], seed=1)
    assert (other["param"] != found["param"]).any()


@emulated
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", [1, 100, 256, 511])
def test_a_shard_gets_the_bits_of_the_whole(state: str, cut: int) -> None:
    kinds = Kinds("bfloat16", "float32", state)
    whole = Tensor.example(700, kinds, 2)
    whole.first = 2**32 - 300  # its upper half changes within a tile
    (wanted,) = run("adamw", ADAMW, [whole], seed=9)
    assert_same(wanted, expected("adamw", ADAMW, whole, seed=9), kinds)
    parts = run("adamw", ADAMW, [whole.rows(0, cut), whole.rows(cut, 700)], seed=9, offset=1)
    assert_same({k: np.concatenate([p[k] for p in parts]) for k in wanted}, wanted, kinds)


@emulated
def test_a_split_master_loses_nothing() -> None:
    kinds, steps = Kinds("split", "float32", "float32"), 3
    split = Tensor.example(300, kinds, 2)
    plain = Tensor(Kinds(), (split.param.astype(np.int64) * 65536 + split.remainder).astype(np.uint32).view(F32),
                   split.grad, split.states)  # fmt: skip
    for step in range(1, steps + 1):
        (a,), (b,) = (run("adamw", ADAMW | {"step": step}, [t]) for t in (split, plain))
        split.param, split.remainder, split.states = a["param"], a["remainder"], [a["state0"], a["state1"]]
        plain.param, plain.states = b["param"], [b["state0"], b["state1"]]
    master = (split.param.astype(np.int64) * 65536 + split.remainder).astype(np.uint32).view(F32)
    np.testing.assert_array_equal(master.view(np.uint32), plain.param.view(np.uint32))


@emulated
def test_a_second_moment_that_is_not_zero_stays_so() -> None:
    kinds = Kinds("float32", "float32", "uint8")
    tensor = Tensor.example(300, kinds, 2)
    tensor.grad[:4] = [2.0**20, 2.0**-20, 0.0, 2.0**-60]  # the last one's square is nothing beside the first one's
    tensor.states[1][:4] = 0
    (found,) = run("adamw", ADAMW, [tensor])
    assert_same(found, expected("adamw", ADAMW, tensor), kinds)
    assert (found["state1"][:4] > 0).tolist() == [True, True, False, False]


@emulated
@pytest.mark.parametrize("bad", [np.inf, np.nan, np.uint32(0x7FFFFFFF).view(F32)])
def test_a_value_that_is_not_finite_stays_in_its_block(bad: float) -> None:
    kinds = Kinds("split", "float32", "uint8")
    tensor = Tensor.example(3 * BLOCK, kinds, 2)
    tensor.grad[300] = bad
    (found,) = run("adamw", ADAMW, [tensor])
    for k in range(2):
        state = dequantise(found[f"state{k}"], found[f"scale{k}"], k == 0)
        np.testing.assert_array_equal(np.isnan(state).reshape(3, BLOCK).all(axis=1), [False, True, False])
        assert np.isfinite(np.delete(state.reshape(3, BLOCK), 1, axis=0)).all()
    assert np.isnan(widen(found["param"][300:301], "split"))
    assert np.isfinite(widen(np.delete(found["param"], 300), "split")).all()


@emulated
def test_numbers_at_the_ends_of_float32() -> None:
    tiny = np.array([2.0**-149, -(2.0**-149), 2.0**-126, 3e38, -0.0, 0.0], F32)
    for kinds in (Kinds(), Kinds("float32", "float32", "float32", "bfloat16"), Kinds("float32", "float32", "uint8")):
        tensor = Tensor.example(len(tiny), kinds, 1)
        tensor.param, tensor.grad = tiny.copy(), tiny[::-1].copy()
        for factor in (1.0, 2.0**-100):
            (found,) = run("sgd", SGD, [tensor], factor=factor)
            assert_same(found, expected("sgd", SGD, tensor, factor=factor), kinds)


# ---- options ---------------------------------------------------------------------------------------------------------


@emulated
def test_the_factor_is_read_on_the_device() -> None:
    tensor = Tensor.example(300, Kinds(), 2)
    (found,) = run("adamw", ADAMW, [tensor], factor=9.0, grad_factor=0.125)
    assert_same(found, expected("adamw", ADAMW, tensor, factor=0.125), Kinds())


@emulated
@pytest.mark.parametrize("found_inf", [1.0, np.nan])
@pytest.mark.parametrize("kinds", [Kinds(output="bfloat16"), Kinds("split", "bfloat16", "uint8")])
def test_nothing_changes_where_found_inf_is_set(found_inf: float, kinds: Kinds) -> None:
    tensors = [Tensor.example(count, kinds, 2) for count in (1, 300)]
    for t in tensors:
        t.grad[0] = np.nan if kinds.grad == "float32" else 0x7FFF
    for tensor, found in zip(tensors, run("adamw", ADAMW, tensors, found_inf=found_inf), strict=True):
        assert_same(found, tensor.stored(), kinds)
    (found,) = run("adamw", ADAMW, tensors[:1], found_inf=0.0)
    assert (found["state0"] != tensors[0].states[0]).any()


# ---- many tensors ----------------------------------------------------------------------------------------------------


@emulated
@pytest.mark.parametrize("count", [0, 1, 32, 33, 256, 257, 600])
def test_any_number_of_tensors(count: int) -> None:
    kinds = [Kinds(), Kinds("bfloat16", "float16"), Kinds("split", "bfloat16"), Kinds("float32", output="float16")]
    tensors = [Tensor.example(i * 7 % 23, kinds[i % 4], 1, seed=i) for i in range(count)]
    for t, found in zip(tensors, run("lion", RULES["lion"], tensors, seed=1), strict=True):
        assert_same(found, expected("lion", RULES["lion"], t, seed=1), t.kinds)


@emulated
def test_a_grid_that_is_full_is_followed_by_another() -> None:
    chunk = kernels().CHUNK_ELEMENTS
    tensors = [Tensor.example(count, Kinds(), 1, seed=count) for count in (chunk + 1, 3, chunk, 2 * chunk, 5)]
    for t, found in zip(tensors, run("lion", RULES["lion"], tensors, max_blocks=3), strict=True):
        assert_same(found, expected("lion", RULES["lion"], t), t.kinds)


@emulated
def test_tables_hold_tensors_beyond_32_bit_sizes() -> None:
    chunk, limit = kernels().CHUNK_ELEMENTS, kernels().MAX_BLOCKS
    big = 5 * 2**31 + 1
    assert kernels().tables_of([big, 0, 3], limit) == [(2, big // chunk + 2)]
    assert kernels().tables_of([limit * chunk, chunk + 1], limit) == [(1, limit), (1, 2)]
    with pytest.raises(RuntimeError, match="needs more blocks than a grid has"):
        kernels().tables_of([limit * chunk + 1], limit)
