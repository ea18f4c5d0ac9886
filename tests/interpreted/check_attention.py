"""Attention's Triton kernels against float64; run by tests/ops/test_attention_triton.py in the interpreter.

Tolerances: float32 sums of up to 70 terms, weights of exp2 good to two ulp. Of 16-bit types float16 is tried, since the
interpreter cuts bfloat16 off where a GPU rounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels import attention
from fastpar.kernels.attention import AttentionConfig, DropoutHash
from tests.ops.attention_triton_cases import TABLES, AttentionCase, case, expected, table

NONE = DropoutHash()
SMALL = AttentionConfig(16, 16, 4, 1)


class TorchOps(TorchDispatchMode):
    """The names of torch's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def run(
    c: AttentionCase, scale: float, softcap: float = 0.0, dropout: DropoutHash = NONE, config: AttentionConfig = SMALL,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(out, lse, dq, dk, dv); backward has the forward's lse and delta."""
    out, lse = attention.attention_forward(
        c.q, c.k, c.v, c.tiles, c.offsets, scale, softcap, dropout, out_dtype, config=config
    )
    delta = (out.float() * c.dout.float()).sum(-1)
    grads = attention.attention_backward(
        c.dout, c.q, c.k, c.v, lse, delta, c.tiles, c.offsets, scale, softcap, dropout, config=config
    )
    return out, lse, *grads


def assert_matches(c: AttentionCase, scale: float = 0.3, tolerance: float = 3e-6, **options: Any) -> None:
    found = run(c, scale, **options)
    options.pop("config", None)
    out, lse, _, *grads = expected(c, scale, **options)
    assert torch.equal(found[1] == float("-inf"), lse == float("-inf"))
    assert not found[0][lse == float("-inf")].any()
    for name, mine, wanted in zip(("out", "lse", "dq", "dk", "dv"), found, (out, lse, *grads), strict=True):
        assert mine.dtype == torch.float32
        mine, wanted = (x.double().masked_fill(x == float("-inf"), 0.0) for x in (mine, wanted))
        bound = tolerance * (1.0 + float(wanted.abs().max()))
        assert float((mine - wanted).abs().max()) <= bound, name


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_tile_matches_float64(name: str) -> None:
    assert_matches(case(name))


@pytest.mark.parametrize("config", [(32, 16, 4, 1), (16, 32, 4, 1), (16, 64, 4, 1, 16)])
@pytest.mark.parametrize("name", ["documents", "window on both sides", "many keys before"])
def test_blocks_need_not_be_square_nor_masked_steps_as_long_as_others(name: str, config: tuple[int, ...]) -> None:
    assert_matches(case(name), config=AttentionConfig(*config))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_query_heads_of_a_group_read_one_key_head(heads: tuple[int, int]) -> None:
    assert_matches(case("causal, keys before", heads=heads))


@pytest.mark.parametrize("dims", [(8, 8), (40, 24), (16, 48), (1, 3)])
def test_any_head_dims_match_float64(dims: tuple[int, int]) -> None:
    assert_matches(case("causal, keys before", dims=dims))


def test_batch_rows_may_have_tables_of_their_own() -> None:
    c = case("causal", batch=3, heads=(1, 1))
    rows = [(0, 34, 0, 34, -33, 0), (0, 20, 0, 20, -19, 0), (20, 34, 20, 34, -13, 0)]
    assert_matches(c._replace(tiles=table(rows), offsets=torch.tensor([0, 1, 1, 3])))  # the second sees nothing


@pytest.mark.parametrize("softcap", [0.7, 20.0])
def test_softcap_matches_float64(softcap: float) -> None:
    assert_matches(case("documents"), softcap=softcap)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_any_scale_matches_float64(scale: float, softcap: float) -> None:
    assert_matches(case("causal"), scale, softcap=softcap, tolerance=1e-5)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_dropout_takes_the_weights_of_the_hash(name: str) -> None:
    assert_matches(case(name, batch=2), dropout=DropoutHash(0.3, -(1 << 62) + 7, first_batch=3, first_head=5))


def test_dropout_is_by_global_positions() -> None:
    c = case("full")
    q_positions, k_positions = (torch.randperm(90)[:n] for n in (20, 37))
    assert_matches(c, dropout=DropoutHash(0.5, 11, q_positions=q_positions, k_positions=k_positions))


def test_everything_dropped_is_zero() -> None:
    out, lse, *grads = run(case("causal"), 0.3, dropout=DropoutHash(1.0, 1))
    assert torch.isfinite(lse).all()
    assert not any(x.any() for x in (out, *grads))


def test_float16_is_rounded_once_where_it_is_stored() -> None:
    c = case("window", dtype=torch.float16)
    assert_matches(c, tolerance=2e-3)  # weights and dS are rounded to float16 before they are multiplied
    narrow, wide = run(c, 0.3, out_dtype=torch.float16)[0], run(c, 0.3)[0]
    assert narrow.dtype == torch.float16
    assert torch.equal(narrow, wide.half())


def test_gradients_are_rounded_by_the_kernels_that_sum_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward is three launches with delta, and torch does nothing but allocate."""
    c = case("causal", heads=(1, 1), dims=(72, 20), dtype=torch.float16)  # by halves of 128 columns, and quarters of 32
    out, lse = run(c, 0.3)[:2]

    def backward(dtype: torch.dtype) -> tuple[Tensor, ...]:
        delta = attention.row_delta(c.dout, out, None)
        operands = (c.dout, c.q, c.k, c.v, lse, delta, c.tiles, None)
        return attention.attention_backward(*operands, 0.3, 0.0, NONE, dtype, config=SMALL)

    narrow, wide = backward(torch.float16), backward(torch.float32)
    assert all(torch.equal(a, b.half()) for a, b in zip(narrow, wide, strict=True))
    launched: list[str] = []
    monkeypatch.setattr(attention, "launch", lambda kernel, *rest, **options: launched.append(kernel.__name__))
    with TorchOps() as ops:
        backward(torch.float16)
    assert launched == ["row_delta_kernel", "attention_dq_kernel", "attention_dkv_kernel"]
    assert {name.split(".")[1] for name in ops.names} <= {"new_empty", "empty", "detach"}


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 1), (torch.float16, 24), (torch.bfloat16, 200)], ids=str)
def test_delta_is_that_of_float64_whatever_the_strides(dtype: torch.dtype, dim: int) -> None:
    shape = (2, 2, 19, dim)
    out, dlse = torch.randn(shape).to(dtype), torch.randn(2, 19, 2).transpose(1, 2)
    for dout, given in (
        (torch.randn(shape).to(dtype), None),
        (torch.randn(2, 19, 2, 2 * dim).to(dtype).transpose(1, 2)[..., ::2], dlse),
        (torch.full((), 0.7).to(dtype).expand(shape), torch.tensor(2.0, dtype=torch.float64).expand(2, 2, 19)),
        (torch.randn(shape), dlse.half()),
    ):
        found = attention.row_delta(dout, out, given)
        assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
        wanted = (dout.double() * out.double()).sum(-1) - (0.0 if given is None else given.double())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=2e-5)
    assert attention.row_delta(out[:, :, :0], out[:, :, :0], None).shape == (2, 2, 0)


def test_the_worked_example_of_delta() -> None:
    dout, out = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0]]]])
    assert attention.row_delta(dout, out, torch.tensor([[[5.0]]])).tolist() == [[[6.0]]]


def test_gradients_in_float32_of_16_bit_inputs_are_taken() -> None:
    c = case("causal", dtype=torch.float16)
    wanted, found = run(c, 0.3), run(c._replace(dout=c.dout.float()), 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_backward_takes_the_lse_of_all_sources() -> None:
    """Keys in two parts, as a ring has them: one lse and delta, dq added."""
    c = case("full")
    _, lse, delta, dq, dk, dv = expected(c, 0.3)
    parts = []
    for begin, end in ((0, 17), (17, 37)):
        tiles = table([(0, 20, 0, end - begin, -19, end - begin)])
        k, v = c.k[:, :, begin:end], c.v[:, :, begin:end]
        parts.append(attention.attention_backward(
            c.dout, c.q, k, v, lse.float(), delta.float(), tiles, None, 0.3, 0.0, NONE, config=SMALL
        ))  # fmt: skip
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq.float(), rtol=1e-5, atol=1e-5)
    for index, wanted in ((1, dk), (2, dv)):
        found = torch.cat([part[index] for part in parts], 2)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


def test_rows_whose_lse_is_minus_infinity_give_nothing() -> None:
    c = case("full")
    _, lse, delta, *_ = expected(c, 0.3)
    lse[..., 3] = float("-inf")
    dq, dk, dv = attention.attention_backward(
        c.dout, c.q, c.k, c.v, lse.float(), delta.float(), c.tiles, None, 0.3, 0.0, NONE, config=SMALL
    )
    assert not dq[:, :, 3].any()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


def test_strides_are_those_of_the_values() -> None:
    c = case("documents", heads=(2, 2))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in c[:4]]
    spread = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in c[:4]]
    wanted = run(c, 0.3)
    for inputs in (turned, spread):
        found = run(AttentionCase(*inputs, c.tiles, None), 0.3)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_far_scores_do_not_overflow() -> None:
    c = case("causal")
    c = c._replace(q=c.q * 1e3)
    found, (out, lse, *_) = run(c, 1.0), expected(c, 1.0)
    assert all(torch.isfinite(x).all() for x in found)
    torch.testing.assert_close(found[0].double(), out, rtol=0, atol=1e-3)  # scores of 1e4 have units of 1e-3
    torch.testing.assert_close(found[1].double(), lse, rtol=1e-6, atol=0)


def test_no_rows_or_no_keys_give_zeros() -> None:
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 0, 16)
    out, lse, *grads = run(AttentionCase(q, k, k, q, table([]), None), 0.3)
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert [list(g.shape) for g in grads] == [[2, 3, 5, 16], [2, 1, 0, 16], [2, 1, 0, 16]]
    out, lse, *grads = run(AttentionCase(q[:, :, :0], q[:, :1], q[:, :1], q[:, :, :0], table([]), None), 0.3)
    assert out.numel() == 0
    assert not any(g.any() for g in grads)
