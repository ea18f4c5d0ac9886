"""torch's attention kernels behind the ops, by stand-ins: what is chosen for which table, and the values it gives."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import ops
from fastpar.contracts.attention import AttentionMask, TokenRange
from fastpar.ops import _attention_torch
from fastpar.ops._attention_torch import bands_of
from tests.ops.attention_triton_cases import TABLES, AttentionCase, case, expected, table, visible
from tests.rehearsal import device, torch_attention

attention_module = importlib.import_module("fastpar.ops.attention")
ASKED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of the largest entry
# What flash's windows are not: tiles that share tokens, or leave some between them, or see nothing.
BY_TRITON = {"zigzag", "empty rows", "nothing"}
CUDNNS = {"full", "causal", "striped, a later rank"}  # the last when its first query, which sees nothing, is cut off


@pytest.fixture(autouse=True)
def calls() -> list[str]:
    for index in range(device.NUM_DEVICES):  # which calls it once, for whichever test is the first
        with torch.cuda.device(index):
            _attention_torch._cudnn_lse_dim(torch.device("cuda", index))
    torch_attention.calls.clear()
    _attention_torch._torch_choices.clear()
    return torch_attention.calls


def attend(c: AttentionCase, scale: float = 0.2, **options: Any) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of the op."""
    offsets = None if c.offsets is None else tuple(c.offsets.tolist())
    tiles = ops.AttentionTiles(c.tiles, offsets, c.q.shape[2], c.k.shape[2])
    q, k, v = (x.detach().to("cuda:1").requires_grad_() for x in c[:3])
    out, lse = ops.attention(q, k, v, tiles, scale=scale, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), c.dout.to("cuda:1"))


def assert_matches(c: AttentionCase, **options: Any) -> None:
    out, lse, _, *grads = expected(c, 0.2)
    found = attend(c, **options)
    assert all(x.is_contiguous() for x in found[:2])
    assert torch.equal(found[1].cpu() == -torch.inf, lse == -torch.inf)
    for mine, wanted in zip(found, (out, lse, *grads), strict=True):
        a, b = (x.double().cpu().masked_fill(x.cpu() == -torch.inf, 0.0) for x in (mine, wanted))
        assert float((a - b).abs().max()) <= TOLERANCE[c.q.dtype] * (1.0 + float(b.abs().max()))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in TABLES), ("documents", torch.float16)]
)
def test_every_table_matches_float64_where_torchs_kernels_are_asked_for(
    name: str, dtype: torch.dtype, calls: list[str]
) -> None:
    with sdpa_kernel(ASKED):
        assert_matches(case(name, dtype=dtype, heads=(4, 2), batch=2))
    assert [any(word in call for call in calls) for word in ("forward", "cudnn", "backward")] == [
        name not in (*BY_TRITON, *CUDNNS), name in CUDNNS, name not in BY_TRITON
    ]  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_forward_is_torchs_by_default_and_a_backward_is_not(name: str, calls: list[str]) -> None:
    c = case(name, dtype=torch.bfloat16, heads=(4, 2))
    q, k, v = (x.to("cuda").requires_grad_(name == "one pair") for x in c[:3])
    tiles = ops.AttentionTiles(c.tiles, None, c.q.shape[2], c.k.shape[2])
    out = ops.attention(q, k, v, tiles, scale=0.2)
    torch.testing.assert_close(out.double().cpu(), expected(c, 0.2)[0], atol=2e-2, rtol=2e-2)
    if out.requires_grad:
        out.sum().backward()
    assert len(calls) == (name not in BY_TRITON)


@pytest.mark.parametrize("lse_dim", [3, 4])
def test_dense_masks_are_cudnns_in_both_layouts_of_its_lse(
    lse_dim: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "CUDNN_LSE_DIM", lse_dim)
    monkeypatch.setattr(
        _attention_torch, "_cudnn_lse_dim", functools.cache(_attention_torch._cudnn_lse_dim.__wrapped__)
    )
    for name in ("full", "causal"):
        with sdpa_kernel(ASKED):
            assert_matches(case(name, dtype=torch.bfloat16, heads=(4, 2), dims=(64, 32), batch=2))
    assert all("cudnn" in call for call in calls)
    assert len(calls) == 5  # one asks how many dims lse has


def test_switches_of_torch_choose_the_kernel(calls: list[str]) -> None:
    c = case("causal", dtype=torch.bfloat16, heads=(4, 2))
    for backends, wanted in (
        ([SDPBackend.MATH], []),
        ([SDPBackend.EFFICIENT_ATTENTION], []),
        ([SDPBackend.FLASH_ATTENTION], ["_flash_attention_forward", "_flash_attention_backward"]),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ["_flash_attention_forward"]),
    ):
        calls.clear()
        with sdpa_kernel(backends):
            assert_matches(c)
        assert calls == wanted, backends


@pytest.mark.parametrize(
    ("options", "dtype", "dims"),
    [
        ({"softcap": 5.0}, torch.bfloat16, 16),
        ({"dropout": ops.AttentionDropout(0.1, seed=3)}, torch.bfloat16, 16),
        ({"scale": -0.5}, torch.bfloat16, 16),
        ({"scale": 0.0}, torch.bfloat16, 16),
        ({}, torch.float32, 16),
        ({}, torch.bfloat16, 20),
    ],
)
def test_what_torchs_kernels_do_not_have_is_not_theirs(
    options: dict[str, Any], dtype: torch.dtype, dims: int, calls: list[str]
) -> None:
    with sdpa_kernel(ASKED):
        attend(case("one diagonal", dtype=dtype, dims=(dims, dims)), **options)
    assert not calls


def test_sinks_keep_their_digits_unless_torchs_kernels_are_asked_for(calls: list[str]) -> None:
    c = case("causal", dtype=torch.bfloat16, heads=(4, 2))
    sink = torch.linspace(-1.0, 2.0, 4)
    found = [attend(c, sink=sink.to("cuda:1"))]
    assert not calls
    with sdpa_kernel(ASKED):
        found.append(attend(c, sink=sink.to("cuda:1")))
    assert len(calls) == 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float().cpu(), b.float().cpu(), atol=5e-2, rtol=5e-2)


def test_algorithms_that_have_to_be_deterministic_are_flashs(calls: list[str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(ASKED):
            assert_matches(case("causal", dtype=torch.bfloat16, heads=(4, 2)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == ["_scaled_dot_product_cudnn_attention", "_flash_attention_backward"]


def test_a_gradient_of_lse_is_not_torchs(calls: list[str]) -> None:
    c = case("causal", dtype=torch.bfloat16)
    q, k, v = (x.to("cuda").requires_grad_() for x in c[:3])
    with sdpa_kernel(ASKED):
        _, lse = ops.attention(q, k, v, causal=True, return_lse=True)
        torch.autograd.grad(lse.sum(), (q, k))
    assert calls == ["_scaled_dot_product_cudnn_attention"]


class Seen(TorchDispatchMode):
    """The ops of fastpar that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.name()] if func.namespace == "fastpar" else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backends", [ASKED, [SDPBackend.MATH]])
def test_ops_that_nobody_looks_at_are_called_as_functions_and_give_the_same_bits(
    backends: list[SDPBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    # float16: Triton's interpreter cuts off what a device rounds to bfloat16.
    c, seen = case("causal", dtype=torch.float16, heads=(4, 2)), Seen()
    with sdpa_kernel(backends):
        with seen:
            watched = attend(c)
        for name in ("_forward", "_backward", "_backward_from_out", "_row_delta"):
            monkeypatch.setattr(attention_module, name, None)
        direct = attend(c)
    names = ["forward", "backward_from_out"] if backends == ASKED else ["forward", "row_delta", "backward"]
    assert [name.partition("attention_")[2] for name in seen.names] == names
    for mine, wanted in zip(direct, watched, strict=True):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine.cpu(), wanted.cpu())


def test_a_choice_is_made_once_for_calls_alike(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    made: list[Any] = []
    choose = _attention_torch._make_choice
    monkeypatch.setattr(_attention_torch, "_make_choice", lambda *args: made.append(args[0].shape) or choose(*args))
    c = case("causal", dtype=torch.bfloat16, heads=(4, 2))
    for _ in range(3):
        with sdpa_kernel(ASKED):
            attend(c)
    assert len(made) == 2  # forward and backward
    assert sum("backward" in call for call in calls) == 3
    narrow = case("causal", dtype=torch.bfloat16, heads=(4, 2), dims=(32, 16))
    edited = ops.AttentionTiles(c.tiles.clone(), None, c.q.shape[2], c.k.shape[2])
    q, k, v = (x.to("cuda:1") for x in c[:3])
    with sdpa_kernel(ASKED):
        attend(narrow)  # flash has no such head dims: another choice
        ops.attention(q, k, v, edited, scale=0.2)
        edited.table[0, 5] = c.k.shape[2]  # everything behind is seen as well
        assert_matches(c._replace(tiles=edited.table))
    assert len(made) == 2 + 2 + 1 + 2


def test_operands_that_cannot_be_read_16_bytes_at_a_time_are_copied() -> None:
    c = case("documents", dtype=torch.bfloat16, heads=(4, 2))
    wide = [torch.randn(*x.shape[:3], x.shape[3] + 5).to(x.dtype) for x in c[:4]]
    odd = AttentionCase._make((*(x[..., 3:-2] for x in wide), c.tiles, None))
    out, _, _, *grads = expected(odd, 0.2)
    q, k, v = (x.to("cuda")[..., 3:-2].detach().requires_grad_() for x in wide[:3])
    assert q.storage_offset() % 8
    tiles = ops.AttentionTiles(odd.tiles, None, *(x.shape[2] for x in (q, k)))
    expanded = torch.ones((), dtype=q.dtype, device="cuda").expand(q.shape)
    with sdpa_kernel(ASKED):
        mine = ops.attention(q, k, v, tiles, scale=0.2)
        found = torch.autograd.grad(mine, (q, k, v), wide[3].to("cuda")[..., 3:-2], retain_graph=True)
        torch.autograd.grad(mine, q, expanded)
    for a, b in zip((mine, *found), (out, *grads), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, atol=3e-2, rtol=3e-2)


def test_parts_of_the_keys_with_the_merged_lse_give_the_gradients_of_all(calls: list[str]) -> None:
    """What a step of a ring does: keys before and keys beside, by the final out and lse."""
    c = case("causal, keys before", dtype=torch.bfloat16, heads=(4, 2), batch=2)
    out, lse, _, dq, dk, dv = expected(c, 0.2)
    q, k, v, dout = (x.to("cuda") for x in c[:4])
    cut, found = 15, []
    for keys in (slice(0, cut), slice(cut, None)):
        part = torch.tensor([(0, 17, 0, cut, -16, cut - 1) if keys.stop else (0, 17, 0, 24, -16, 22 - cut)])
        found.append(
            torch.ops.fastpar.attention_backward_from_out(
                dout, q, k[:, :, keys], v[:, :, keys], out.bfloat16().to("cuda"), lse.float().to("cuda"),
                part.to(torch.int32), None, 0.2, torch.float32,
            )
        )  # fmt: skip
    assert [call for call in calls if "backward" in call] == [
        "_scaled_dot_product_cudnn_attention_backward", "_flash_attention_backward"
    ]  # fmt: skip
    parts = (found[0][0] + found[1][0], *(torch.cat([a, b], 2) for a, b in zip(*(f[1:] for f in found), strict=True)))
    for mine, wanted in zip(parts, (dq, dk, dv), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double().cpu(), wanted, atol=3e-2, rtol=3e-2)


MASKS = [
    AttentionMask(causal=True),
    AttentionMask(window=(5, 3)),
    AttentionMask(causal=True, window=(4, 0), documents=((9, 7, 1, 14),)),
    AttentionMask(causal=True, documents=((9, 7, 1, 14), (20, 11))),
    AttentionMask(causal=True, chunk=8, documents=((9, 7, 15),)),
    AttentionMask(window=(40, 2), documents=((3, 12, 16),)),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cut", [(0, 31, 0, 31), (11, 31, 0, 31), (16, 31, 0, 16), (5, 9, 3, 20)])
def test_bands_are_the_pairs_of_the_table(mask: AttentionMask, cut: tuple[int, ...]) -> None:
    """Read back as flash reads its windows; None is right for any table."""
    tiles = mask.tiles((TokenRange(*cut[:2]),), (TokenRange(*cut[2:]),))
    bands = bands_of(tiles.table, tiles.offsets, 2)
    if bands is None:
        assert cut != (0, 31, 0, 31)
        return
    rows, columns = cut[1] - cut[0], cut[3] - cut[2]
    seen = torch.zeros(2, 1, rows, columns, dtype=torch.bool)
    (q0, q1), (k0, k1) = bands.queries, bands.keys
    if bands.query_starts is None or bands.key_starts is None:
        seen[:, :, q0:q1, k0:k1] = torch_attention._visible(q1 - q0, k1 - k0, bands.left, bands.right)
    else:
        flat = torch.zeros(2 * (q1 - q0), 2 * (k1 - k0), dtype=torch.bool)
        starts = zip(bands.query_starts, bands.query_starts[1:], bands.key_starts, bands.key_starts[1:], strict=False)
        for a, b, m, n in starts:
            flat[a:b, m:n] = torch_attention._visible(b - a, n - m, bands.left, bands.right)
        for row in range(2):
            own = slice(row * (q1 - q0), (row + 1) * (q1 - q0)), slice(row * (k1 - k0), (row + 1) * (k1 - k0))
            seen[row, 0, q0:q1, k0:k1] = flat[own]
        assert int(flat.sum()) == int(seen.sum())
    assert torch.equal(seen, visible(tiles.table, tiles.offsets, 2, rows, columns))


def test_documents_of_other_windows_are_not_one_window() -> None:
    """A causal document beside one whose rows see one key more to the right."""
    assert bands_of(table([(0, 5, 0, 5, -4, 0), (5, 10, 5, 10, -4, 1)]), None, 1) is None
    assert bands_of(table([(0, 5, 0, 5, -4, 0), (5, 10, 5, 10, -4, 4)]), None, 1) is None
    assert bands_of(table([(0, 5, 0, 5, -2, 0), (5, 10, 5, 10, -4, 0)]), None, 1) is None
    assert bands_of(table([(0, 3, 0, 3, -2, 0), (3, 10, 3, 10, -3, 0)]), None, 1) == (
        (0, 10), (0, 10), 3, 0, (0, 3, 10), (0, 3, 10)
    )  # fmt: skip
