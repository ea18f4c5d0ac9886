"""The Triton kernels of experts' products against float64; run by test_moe_triton.py in the interpreter, which
cuts bfloat16 off where devices round to nearest: two roundings there.

Rows are -1, 0 and 1 where results have to be exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastpar.contracts.moe import ACTIVATIONS, ExpertRule, activate
from fastpar.kernels import grouped_gemm as gg
from fastpar.kernels.grouped_gemm import RowGroups
from tests.ops.overlap_gemm_cases import integers

CPU = torch.device("cpu")
SPLITS = (0, 5, 5, 22, 23)  # an expert of several blocks, one of none, one of one row
SMALL = gg.GroupedGemmConfig(16, 16, 32, 4, 1)
PERSISTENT = SMALL._replace(persistent=True)  # of which the interpreter runs three programs
PADDED = 2  # rows past the last expert's: the most there can be is more than there are


def groups_of(splits: Sequence[int] = SPLITS, extra: int = PADDED) -> RowGroups:
    return RowGroups(splits, splits[-1] + extra, CPU)


def gathered(tokens: int, rows: int = SPLITS[-1] + PADDED) -> Tensor:
    """An index of `rows` rows; two of them are padding within the second expert's."""
    index = torch.randint(0, tokens, (rows,), generator=torch.Generator().manual_seed(3))
    index[8], index[21] = -1, -1
    return index


def by_expert(x: Tensor, weight: Tensor, splits: Sequence[int] = SPLITS) -> Tensor:
    """x [N, K] times weight [E, F, K] in float64."""
    parts = [x[b:e].double() @ w.double().T for w, b, e in zip(weight, splits[:-1], splits[1:], strict=True)]
    return torch.cat(parts)


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    return torch.where((index < 0)[:, None], 0.0, x[index].double())


# ---- products over features ------------------------------------------------------------------------------------------


def test_the_worked_examples() -> None:
    groups = RowGroups([0, 3, 3, 8], 8, CPU)
    assert groups.tiles(4).tolist() == [[0, 0, 3, 3], [2, 3, 4, 3], [2, 7, 1, 3], [0, 0, 0, 3], [0, 0, 0, 3]]
    groups = RowGroups([0, 1, 3], 3, CPU)
    x, weight = torch.tensor([[10.0], [20.0]]), torch.tensor([[[2.0]], [[3.0]]])
    assert gg.grouped_linear(x, weight, groups, index=torch.tensor([1, 0, -1])).tolist() == [[40], [30], [0]]
    groups = RowGroups([0, 2, 2], 2, CPU)
    left, right = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    twice = torch.tensor([2.0])
    assert gg.grouped_wgrad(left, right, groups, factor=twice).tolist() == [[[100]], [[0]]]
    dout, scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 10.0])
    assert gg.grouped_bias_grad(dout, groups, scale=scale, factor=twice).tolist() == [[62, 84], [0, 0]]


@pytest.mark.parametrize("block_m", [1, 4, 16])
@pytest.mark.parametrize("splits", [(0, 0), (0, 7), (0, 0, 0, 9, 9), (0, 4, 8, 12), tuple(range(80))])
def test_tiles_cover_every_row_once_and_stay_within_an_expert(splits: tuple[int, ...], block_m: int) -> None:
    tiles = RowGroups(torch.tensor(splits), splits[-1] + 3, CPU).tiles(block_m).tolist()
    covered = [(expert, row + i) for expert, row, rows, _ in tiles for i in range(rows)]
    wanted = [(e, row) for e, (b, end) in enumerate(pairwise(splits)) for row in range(b, end)]
    assert covered == wanted
    assert all(rows <= block_m for _, _, rows, _ in tiles)


@pytest.mark.parametrize(
    ("cols", "terms", "dtype"),
    [(33, 70, torch.bfloat16), (64, 32, torch.float16), (33, 32, torch.float32), (64, 70, torch.float32)],
    ids=str,
)
def test_gathered_rows_times_their_experts_weights_are_exact(cols: int, terms: int, dtype: torch.dtype) -> None:
    groups, tokens = groups_of(), 9
    x, weight = integers(tokens, terms, seed=0, dtype=dtype), integers(4, cols, terms, seed=1, dtype=dtype)
    bias, index = integers(4, cols, seed=2, dtype=dtype), gathered(tokens)
    scale = 2.0 ** torch.randint(-1, 2, (len(index),), generator=torch.Generator().manual_seed(0))
    wanted = by_expert(rows_of(x, index) * scale[:, None], weight) + bias.double().repeat_interleave(
        torch.tensor(SPLITS).diff(), 0
    )
    options = {"index": index, "scale": scale, "bias": bias}
    found = gg.grouped_linear(x, weight, groups, **options)
    assert torch.equal(found[: SPLITS[-1]].double(), wanted)
    turned = weight.transpose(1, 2).contiguous()
    again = gg.grouped_linear(x, turned, groups, transposed=True, **options)
    assert torch.equal(again[: SPLITS[-1]], found[: SPLITS[-1]])


@pytest.mark.parametrize("splits", [SPLITS, (0, 0, 0, 0, 0)], ids=["some", "none"])
def test_a_persistent_grid_gives_the_bits_of_a_program_for_each_tile(splits: tuple[int, ...]) -> None:
    """With every operand that there can be; nothing is written past the last expert."""
    cols, terms = 20, 40
    groups, rows = RowGroups(torch.tensor(splits), splits[-1] + PADDED, CPU), splits[-1] + PADDED
    x, weight, bias = torch.randn(9, terms), torch.randn(4, 2 * cols, terms), torch.randn(4, 2 * cols)
    index, scale, weights = torch.randint(-1, 9, (rows,)), torch.rand(rows), torch.rand(rows)
    options = {"index": index, "scale": scale}
    found = [
        gg.grouped_linear(x, weight, groups, bias, out=torch.full((rows, 2 * cols), 7.0), config=config, **options)
        for config in (SMALL, PERSISTENT)
    ]
    assert torch.equal(*found)
    assert (found[1][splits[-1] :] == 7.0).all()
    for activation, interleaved in (("swiglu", False), ("swiglu", True), ("gelu", False)):
        rule = {"activation": activation, "interleaved": interleaved, "row_weights": weights, "index": index}
        once, walked = (
            gg.grouped_linear_act(x, weight, groups, bias, scale=scale, config=config, **rule)
            for config in (SMALL, PERSISTENT)
        )
        second = torch.randn(4, terms, once[1].shape[1])  # the gradient has no walk, and does all tiles nevertheless
        dact = [gg.grouped_linear_dact(x, second, groups, once[0], config=config, **rule)
                for config in (SMALL, PERSISTENT)]  # fmt: skip
        for one, other in zip((*once, *dact[0]), (*walked, *dact[1]), strict=True):
            assert torch.equal(one[: splits[-1]], other[: splits[-1]]), (activation, interleaved)


def test_rows_past_the_last_expert_are_not_written() -> None:
    groups = groups_of()
    out = torch.full((groups.num_rows, 8), 7.0)
    gg.grouped_linear(integers(groups.num_rows, 8, seed=0), integers(4, 8, 8, seed=1), groups, out=out)
    assert (out[SPLITS[-1] :] == 7.0).all()
    assert not (out[: SPLITS[-1]] == 7.0).any(dim=1).all()


def test_a_row_has_the_same_bits_whatever_others_there_are() -> None:
    x, weight = torch.randn(23, 70), torch.randn(4, 33, 70)
    whole = gg.grouped_linear(x, weight, groups_of(extra=0))
    alone = gg.grouped_linear(x[10:11].clone(), weight, RowGroups([0, 0, 0, 1, 1], 1, CPU))
    assert torch.equal(alone[0], whole[10])


# ---- the activation --------------------------------------------------------------------------------------------------


def exact(rule: ExpertRule, x: Tensor, first: Tensor, second: Tensor, weights: Tensor, dout: Tensor) -> list[Tensor]:
    """hidden, act, dhidden, dots in float64 for rows that are not padding."""
    hidden = by_expert(x, first).requires_grad_()
    weights = weights.double().requires_grad_()
    act = activate(hidden, rule) * weights[:, None]
    (by_expert(act, second) * dout.double()).sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return [hidden.detach(), act.detach(), hidden.grad, weights.grad]


@pytest.mark.parametrize(("activation", "interleaved"), [*((name, False) for name in ACTIVATIONS), ("geglu", True)])
def test_activations_and_their_gradients_match_float64(activation: str, interleaved: bool) -> None:
    """With weights of rows, through both products; float32 sums of 20 to 40 terms of size 1 to 10."""
    rule = ExpertRule(activation, limit=1.0, interleaved=interleaved, transposed=activation == "gelu")
    features, terms, tokens, rows = 20, 24, 9, SPLITS[-1]
    generator = torch.Generator().manual_seed(5)
    x, dout = (torch.randn(tokens, terms, generator=generator) for _ in range(2))
    first = torch.randn(4, features * (1 + rule.is_gated), terms, generator=generator) / 2
    second = torch.randn(4, terms, features, generator=generator)
    index, weights = gathered(tokens), torch.rand(rows + PADDED, generator=generator)
    index, weights = index[:rows], weights[:rows]
    groups = groups_of(extra=0)
    shown = [w.transpose(1, 2).contiguous() if rule.transposed else w for w in (first, second)]
    options = {
        "activation": activation, "interleaved": rule.interleaved, "limit": 1.0, "index": index, "row_weights": weights,
        "transposed": rule.transposed,
    }  # fmt: skip
    hidden, act = gg.grouped_linear_act(x, shown[0], groups, **options)
    dhidden, again, dots = gg.grouped_linear_dact(dout, shown[1], groups, hidden, **options)
    assert torch.equal(again, act)
    wanted = exact(rule, rows_of(x, index), first, second, weights, rows_of(dout, index))
    for name, found, value in zip(
        ("hidden", "act", "dhidden", "dots"), (hidden, act, dhidden, dots), wanted, strict=True
    ):
        torch.testing.assert_close(found.double(), value, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    assert dhidden[index < 0].count_nonzero() == 0


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
def test_biases_come_before_the_activation_and_backward_computes_the_same_bits(activation: str) -> None:
    """The activation is that of features rounded to bfloat16."""
    generator = torch.Generator().manual_seed(2)
    x, first, bias, second = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((23, 16), (4, 24, 16), (4, 24), (4, 16, 12 if activation in gg.GATED else 24))
    )
    groups = groups_of(extra=0)
    hidden, act = gg.grouped_linear_act(x, first, groups, bias, activation=activation)
    exactly = by_expert(x, first) + bias.double().repeat_interleave(torch.tensor(SPLITS).diff(), 0)
    torch.testing.assert_close(hidden.double(), exactly, rtol=2.0**-7, atol=1e-5)
    wanted = activate(hidden.double(), ExpertRule(activation))
    torch.testing.assert_close(
        act.double(), wanted, rtol=2.0**-7, atol=1e-30 if activation == "swiglu" else 2e-6
    )  # erf of float32
    assert torch.equal(gg.grouped_linear_dact(x, second, groups, hidden, activation=activation)[1], act)


# ---- products over rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gather", "dtype"), [("left", torch.bfloat16), ("right", torch.float32)], ids=str)
def test_weight_gradients_are_exact_and_those_without_rows_zero(gather: str, dtype: torch.dtype) -> None:
    groups, rows = groups_of(), SPLITS[-1] + PADDED
    index = gathered(9)
    table, plain = integers(9, 33, seed=0, dtype=dtype), integers(rows, 40, seed=1, dtype=dtype)
    plain[index < 0] = float("nan")  # padding is not read
    plain[SPLITS[-1] :] = float("nan")
    full, safe = rows_of(table, index), plain.double().nan_to_num()
    pairs = (table, plain) if gather == "left" else (plain, table)
    found = gg.grouped_wgrad(*pairs, groups, **{f"{gather}_index": index})
    left, right = (full, safe) if gather == "left" else (safe, full)
    for e, (begin, end) in enumerate(pairwise(SPLITS)):
        assert torch.equal(found[e].double(), left[begin:end].T @ right[begin:end])
    assert found[1].count_nonzero() == 0


def test_bias_gradients_are_exact_and_those_without_rows_zero() -> None:
    index, scale = gathered(9), torch.arange(SPLITS[-1] + PADDED).float()
    table = integers(9, 33, seed=0)
    found = gg.grouped_bias_grad(table, groups_of(), index=index, scale=scale)
    rows = rows_of(table, index) * scale.double()[:, None]
    for e, (begin, end) in enumerate(pairwise(SPLITS)):
        assert torch.equal(found[e].double(), rows[begin:end].sum(0))


def test_no_rows_at_all() -> None:
    groups = RowGroups([0, 0, 0], 0, CPU)
    x, weight = torch.empty(0, 8), torch.ones(2, 6, 8)
    assert gg.grouped_linear(x, weight, groups).shape == (0, 6)
    hidden, act = gg.grouped_linear_act(x, weight, groups, activation="swiglu")
    assert (hidden.shape, act.shape) == ((0, 6), (0, 3))
    dhidden, act, dots = gg.grouped_linear_dact(x, torch.ones(2, 8, 3), groups, hidden, activation="swiglu")
    assert (dhidden.shape, act.shape, dots.shape) == ((0, 6), (0, 3), (0,))
    assert torch.equal(gg.grouped_wgrad(hidden, x, groups), torch.zeros(2, 6, 8))
    assert torch.equal(gg.grouped_bias_grad(hidden, groups), torch.zeros(2, 6))


def test_impossible_arguments_are_explained() -> None:
    groups, weight = RowGroups([0, 2, 3], 3, CPU), torch.ones(2, 5, 4)
    with pytest.raises(ValueError, match=r"rows \(3, 3\) do not fit weights \(2, 5, 4\): they have to have 4 features"):
        gg.grouped_linear(torch.ones(3, 3), weight, groups)
    with pytest.raises(TypeError, match=r"not torch\.float64 and torch\.float32"):
        gg.grouped_linear(torch.ones(3, 4).double(), weight, groups)
    with pytest.raises(ValueError, match="weights of 1 experts, but splits of 2"):
        gg.grouped_linear(torch.ones(3, 4), weight[:1], groups)
    with pytest.raises(ValueError, match="there are 4 rows, but the splits are those of 3"):
        gg.grouped_linear(torch.ones(4, 4), weight, groups)
    with pytest.raises(ValueError, match="there are 4 rows"):
        gg.grouped_wgrad(torch.ones(4, 4), torch.ones(3, 4), groups)
