"""Attention on a real device as fastpar chooses: torch's kernels where bits are the same each time, else Triton."""

from __future__ import annotations

import pytest
import torch

from fastpar import ops
from tests.gpu.attention_on_gpu import DEVICE, TOLERANCE, assert_matches, attend
from tests.ops.attention_triton_cases import TABLES, AttentionCase, case, table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_small_tiles_of_every_kind_match_float64(name: str, dtype: torch.dtype) -> None:
    assert_matches(case(name, dtype=dtype, heads=(4, 2), batch=2))


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (80, 80), (96, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_head_dims_match_float64(dims: tuple[int, int], dtype: torch.dtype) -> None:
    assert_matches(case("documents", dims=dims, dtype=dtype, heads=(2, 1)))


def test_bits_of_long_rows_are_equal_from_run_to_run_by_default() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, h, 2048, 128, generator=generator).bfloat16() for h in (16, 4, 4, 16))
    rows: list[tuple[int, ...]] = [(0, 2048, 0, 2048, -2047, 0)]
    c = AttentionCase(q, k, v, dout, table(rows), None)
    first = attend(c)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, attend(c), strict=True))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_small_softcap_matches_float64(dtype: torch.dtype) -> None:
    assert_matches(case("documents", dims=(64, 64), dtype=dtype), softcap=5.0)


def test_long_documents_and_windows_match_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[int, ...]] = [(0, 700, 0, 700, -255, 0), (700, 1531, 700, 1531, -255, 0)]
    q, k, v, dout = (torch.randn(1, h, 1531, 64, generator=generator) for h in (4, 2, 2, 4))
    assert_matches(AttentionCase(q, k, v, dout, table(rows), None))


@pytest.mark.parametrize("dropped", [False, True])
def test_bits_are_equal_from_run_to_run(dropped: bool) -> None:
    c = case("causal", dims=(128, 128), dtype=torch.bfloat16, heads=(8, 2), batch=2)
    options = {"dropout": ops.AttentionDropout(0.2, seed=5)} if dropped else {}
    first, second = attend(c, **options), attend(c, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_small_dropout_has_the_mask_of_the_cpu() -> None:
    """v is the identity: out shows which weights are left."""
    q, k = torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64)
    v = torch.eye(40).expand(1, 2, 40, 40)
    dropout = ops.AttentionDropout(0.4, seed=77, first_head=3, q_positions=torch.arange(40) * 3 + 1)
    outs = [ops.attention(q.to(d), k.to(d), v.to(d), dropout=dropout).cpu() for d in ("cpu", DEVICE)]
    assert torch.equal(outs[0] == 0, outs[1] == 0)
