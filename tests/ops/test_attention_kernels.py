"""attention_forward and attention_backward in C++: every CPU instruction set against a dense float64 oracle.

Tolerances, of the norm of a whole result. float32: sums of up to 2200 products in order and an exponential that is good
to 2 ulp: 2e-6, 1.1e-6 measured. 16-bit inputs on a path that widens them: the same. bfloat16 on a path that
multiplies pairs: weights and dS are rounded to bfloat16, 2^-9 each at most and 1.7e-3 measured. float64: 1e-13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastpar import _ext
from fastpar.contracts.attention import AttentionDropout
from fastpar.reference.attention import attention_keep_mask
from tests import instruction_sets

_ext.load()
K = torch.ops.fastpar
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAMES = ("out", "lse", "dq", "dk", "dv")


capability = instruction_sets.each()


@dataclass(frozen=True)
class Call:
    """One problem: shapes, tiles (a table for all batch rows, or one for each) and options."""

    queries: int = 70
    keys: int = 70
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (32, 32)
    tiles: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # None: causal, ends aligned at the start
    batch: int = 1
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    positions: bool = False

    def tables(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        if self.tiles is not None:
            return self.tiles
        return (((0, self.queries, 0, self.keys, 1 - self.queries, 0),),)

    def table(self) -> tuple[Tensor, Tensor | None]:
        tables = self.tables()
        rows = torch.tensor([t for table in tables for t in table], dtype=torch.int32).reshape(-1, 6)
        offsets = torch.tensor([0, *(len(t) for t in tables)]).cumsum(0)
        return rows, None if len(tables) == 1 else offsets

    def visible(self) -> Tensor:
        """Bool [batch or 1, 1, queries, keys]."""
        mask = torch.zeros(len(self.tables()), 1, self.queries, self.keys, dtype=torch.bool)
        for row, table in enumerate(self.tables()):
            for q0, q1, k0, k1, lo, hi in table:
                distance = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None]
                mask[row, 0, q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
        return mask

    def where(self) -> tuple[Tensor, Tensor]:
        """Global positions of queries and keys."""
        step = 3 if self.positions else 1
        return torch.arange(self.queries) * step, torch.arange(self.keys) * step

    def options(self) -> tuple[Any, ...]:
        scale = self.dims[0] ** -0.5 if self.scale is None else self.scale
        where = self.where() if self.positions else (None, None)
        return *self.table(), scale, self.softcap, self.dropout, 7, 3, 5, *where

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and grad_out."""
        generator = torch.Generator().manual_seed(self.queries * 1000 + self.keys)

        def random(heads: int, rows: int, dim: int) -> Tensor:
            return torch.randn(self.batch, heads, rows, dim, generator=generator, dtype=torch.float64).to(dtype)

        (h_q, h_k), (dim, value_dim) = self.heads, self.dims
        return (
            random(h_q, self.queries, dim),
            random(h_k, self.keys, dim),
            random(h_k, self.keys, value_dim),
            random(h_q, self.queries, value_dim),
        )


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def computed(call: Call, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Results:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = K.attention_forward(q, k, v, *call.options(), wide)
    delta = (out.double() * grad_out.double()).sum(-1).to(wide)
    return Results(out, lse, *K.attention_backward(grad_out, q, k, v, lse, delta, *call.options()))


def exact(call: Call, *inputs: Tensor) -> Results:
    """Dense softmax in float64; rows that see nothing are 0 and -inf."""
    q, k, v = (t.double().requires_grad_() for t in inputs[:3])
    group = call.heads[0] // call.heads[1]
    scores = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)) * call.options()[2]
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~call.visible(), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    if call.dropout:
        dropout = AttentionDropout(call.dropout, 7, first_batch=3, first_head=5)
        kept = attention_keep_mask(dropout, call.batch, call.heads[0], *call.where())
        weights = weights * kept / (1 - call.dropout)
    out = weights @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3].double())
    return Results(out.detach(), lse.detach(), *grads)


def tolerance(dtype: torch.dtype, capability: str) -> float:
    if dtype == torch.float64:
        return 1e-13
    return 4e-3 if dtype == torch.bfloat16 and capability in ("amx", "avx512bf16") else 2e-6


def assert_matches(call: Call, dtype: torch.dtype, capability: str) -> None:
    inputs = call.inputs(dtype)
    limit = tolerance(dtype, capability)
    for name, found, wanted in zip(NAMES, computed(call, *inputs), exact(call, *inputs), strict=True):
        assert found.shape == wanted.shape
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        empty = wanted == -math.inf
        assert torch.equal(found == -math.inf, empty), name
        error = (found.double() - wanted).masked_fill(empty, 0.0).norm()
        # Gradients of rows that see one key are 0: a sum of terms of size 1 that cancel.
        size = max(wanted.masked_fill(empty, 0.0).norm().item(), 0.1 * wanted.numel() ** 0.5)
        assert error <= limit * size, f"{name}: {error / size:.2g}"


# ---- against float64 -------------------------------------------------------------------------------------------------

FULL = ((0, 70, 0, 70, -69, 69),)
PACKED = tuple((s, e, s, e, s - e + 1, 0) for s, e in ((0, 5), (5, 6), (6, 69), (69, 140), (140, 141), (141, 200)))
WINDOW = ((0, 200, 0, 200, -40, 0),)
TWO_SIDED = ((0, 150, 0, 200, -17, 60),)
# Queries 64.. of a later rank: keys before them entirely, and their own; rows of the last tile's end see nothing.
DEALT = ((0, 64, 0, 130, -63, 129), (64, 100, 130, 166, -35, 0), (100, 120, 0, 7, -19, 6), (130, 140, 66, 166, 80, 99))
# Two tiles that fill blocks of 64 x 64 together.
HALVES = ((0, 128, 0, 40, -127, 39), (0, 128, 40, 128, -127, 87))

KINDS = {
    "causal": Call(200, 200),
    "one pair": Call(1, 1, heads=(1, 1)),
    "more keys than queries": Call(65, 257),
    "more queries than keys": Call(257, 65),
    "full": Call(tiles=(FULL,)),
    "full by two tiles": Call(128, 128, tiles=(HALVES,)),
    "window": Call(200, 200, tiles=(WINDOW,)),
    "two-sided window": Call(150, 200, tiles=(TWO_SIDED,)),
    "packed documents": Call(200, 200, tiles=(PACKED,)),
    "dealt blocks, empty rows": Call(140, 166, tiles=(DEALT,)),
    "no tiles": Call(tiles=((),)),
    "tiles by batch row": Call(200, 200, tiles=(PACKED, (), WINDOW), batch=3),
    "grouped queries": Call(130, 130, heads=(6, 2), batch=2),
    "one key head, splits of dq": Call(1100, 1100, heads=(2, 1), dims=(16, 16)),
    "softcap": Call(100, 100, softcap=2.0),
    "negative scale": Call(100, 100, scale=-0.3),
    "scale 0": Call(100, 100, scale=0.0),
    "dropout": Call(130, 130, dropout=0.3, batch=2),
    "dropout, softcap, window, positions": Call(
        200, 200, tiles=(WINDOW,), dropout=0.5, softcap=3.0, positions=True, heads=(4, 2)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_match_dense_float64(capability: str, dtype: torch.dtype, kind: str) -> None:
    assert_matches(KINDS[kind], dtype, capability)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "dims", [(1, 1), (8, 24), (32, 64), (64, 64), (80, 80), (96, 48), (128, 128), (192, 128), (256, 256)]
)
def test_any_head_dim_matches_dense_float64(capability: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert_matches(Call(66, 66, dims=dims), dtype, capability)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 129])
def test_odd_sizes_match_dense_float64(capability: str, size: int) -> None:
    assert_matches(
        Call(size, 2 * size + 1, tiles=(((0, size, 0, 2 * size + 1, 1 - size, size),),)), torch.float32, capability
    )


def test_results_do_not_depend_on_how_tiles_are_cut(capability: str) -> None:
    whole = Call(200, 200)
    pieces = tuple(
        (i, min(i + 33, 200), j, min(j + 21, 200), i - j - 1000, i - j)
        for i in range(0, 200, 33)
        for j in range(0, 200, 21)
    )
    for dtype in (torch.float32, torch.bfloat16):
        inputs = whole.inputs(dtype)
        for name, a, b in zip(
            NAMES, computed(whole, *inputs), computed(replace(whole, tiles=(pieces,)), *inputs), strict=True
        ):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(capability: str, dtype: torch.dtype) -> None:
    call = Call(270, 270, heads=(4, 2), dropout=0.1)
    inputs = call.inputs(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 5):
            torch.set_num_threads(threads)
            found.append(computed(call, *inputs))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_tensors_of_any_strides_give_the_same_bits(capability: str) -> None:
    call = Call(100, 100, heads=(4, 2), batch=2)
    inputs = call.inputs(torch.float32)
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    columns_apart = [torch.stack((t, t), -1)[..., 0] for t in inputs]
    narrowed = [torch.cat((t, t), -2)[:, :, : t.shape[2]] for t in inputs]
    wanted = computed(call, *inputs)
    for others in (tokens_first, columns_apart, narrowed):
        assert all(torch.equal(a, b) for a, b in zip(wanted, computed(call, *others), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_outputs_are_the_wide_ones_rounded_once(capability: str, dtype: torch.dtype) -> None:
    call = Call(130, 130)
    q, k, v, _ = call.inputs(dtype)
    wide, lse = K.attention_forward(q, k, v, *call.options(), torch.float32)
    out, same = K.attention_forward(q, k, v, *call.options(), dtype)
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(lse, same)


# Where weights are rounded to bfloat16.
@pytest.mark.parametrize("capability", instruction_sets.available("amx", "avx512bf16"), indirect=True)
def test_bfloat16_errors_are_flat_in_the_length(capability: str) -> None:
    """torch accumulates dk and dv of bfloat16 in bfloat16: 0.0045 at 512 tokens, 0.0088 at 8192."""
    errors = {}
    for size in (128, 1024):
        call = Call(size, size, heads=(1, 1), dims=(64, 64))
        inputs = call.inputs(torch.bfloat16)
        pairs = zip(computed(call, *inputs), exact(call, *inputs), strict=True)
        errors[size] = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    for short, long in zip(errors[128], errors[1024], strict=True):
        assert long <= 1.3 * short + 1e-6
        assert long <= 2.5e-3


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_float32_errors_are_at_most_twice_those_of_torch(capability: str, dims: tuple[int, int]) -> None:
    """Also where products are of bfloat16 parts, and where gradients are small beside the inputs."""
    call = Call(384, 384, heads=(1, 1), dims=dims)
    q, k, v, grad_out = call.inputs(torch.float32)
    v, grad_out = v * 1e6, grad_out * 1e-9
    wanted = exact(call, q, k, v, grad_out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    theirs = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
    ours = computed(call, q, k, v, grad_out)
    found = (ours.out, ours.dq, ours.dk, ours.dv)
    for name, a, b, w in zip(("out", "dq", "dk", "dv"), found, theirs, (wanted.out, *wanted[2:]), strict=True):
        assert (a.double() - w).norm() <= 2 * (b.double() - w).norm(), name


# ---- numbers that are not ordinary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("size", [1e9, torch.finfo(torch.float32).max / 256])
def test_extreme_logits_pick_their_maximum(capability: str, size: float, scale: float) -> None:
    call = Call(80, 80, heads=(1, 1), dims=(16, 16), scale=scale)
    q, k, v, grad_out = call.inputs(torch.float32)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    k[..., 0] = size * torch.linspace(-1, 1, 80)  # every query's own key is its largest
    out, lse, dq, dk, dv = computed(call, q, k, v, grad_out)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, k[..., 0] * scale)
    torch.testing.assert_close(dv, grad_out)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("what", ["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_document(capability: str, dtype: torch.dtype, what: str, bad: float) -> None:
    call = Call(200, 200, tiles=(PACKED,))
    inputs = dict(zip(("q", "k", "v", "grad_out"), call.inputs(dtype), strict=True))
    clean = computed(call, *inputs.values())
    inputs[what][:, :, 80] = bad  # within the document of 69..139
    found = computed(call, *inputs.values())
    others = torch.ones(200, dtype=torch.bool)
    others[69:140] = False
    for name, a, b in zip(NAMES, found, clean, strict=True):
        torch.testing.assert_close(a[:, :, others], b[:, :, others], msg=lambda m, name=name: f"{name}: {m}")
    if what == "v":  # within it, rows that do not see token 80
        assert found.out[:, :, 69:80].isfinite().all()
        assert not found.out[:, :, 80:140].isfinite().any()
    if what in ("q", "k"):  # all scores of row 80, or one of each row from there on
        touched = slice(80, 81 if what == "q" else 140)
        assert found.out[:, :, touched].isnan().all()
        assert found.lse[:, :, touched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_visible_infinities_are_those_of_products_in_order(capability: str, dtype: torch.dtype) -> None:
    call = Call(200, 200, heads=(1, 1), tiles=(((0, 200, 0, 200, -199, 199),),))
    q, k, v, grad_out = call.inputs(dtype)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, :, 5, 0] = -math.inf  # scores of minus infinity: the key weighs nothing
    seen = torch.arange(200) != 5
    others = computed(
        replace(call, keys=199, tiles=(((0, 200, 0, 199, -199, 198),),)), q, k[:, :, seen], v[:, :, seen], grad_out
    )
    found = computed(call, q, k, v, grad_out)
    torch.testing.assert_close(found.out, others.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.dv[:, :, seen], others.dv, rtol=1e-4, atol=1e-5)
    k[:, :, 5, 0] = 0.0
    v[:, :, 7, 3] = math.inf
    found = computed(call, q, k, v, grad_out)
    assert found.out[..., 3].eq(math.inf).all()
    assert found.out[..., seen.new_tensor([i != 3 for i in range(32)])].isfinite().all()


def test_a_row_of_lse_minus_infinity_has_no_gradient(capability: str) -> None:
    call = Call(100, 100)
    q, k, v, grad_out = call.inputs(torch.float32)
    out, lse, *_ = computed(call, q, k, v, grad_out)
    lse[:, :, 10:90] = -math.inf
    delta = (out * grad_out).sum(-1)
    dq, dk, dv = K.attention_backward(grad_out, q, k, v, lse, delta, *call.options())
    assert dq[:, :, 10:90].eq(0).all()
    assert dq[:, :, 1:10].ne(0).all()
    assert dk.isfinite().all()
    assert dv[:, :, 10:90].ne(0).all()  # of queries 90..99


# ---- dtypes and errors -----------------------------------------------------------------------------------------------


def test_a_wide_grad_out_is_taken_as_it_is(capability: str) -> None:
    call = Call(100, 100)
    q, k, v, grad_out = call.inputs(torch.float16)
    out, lse, *narrow = computed(call, q, k, v, grad_out)
    delta = (out.double() * grad_out.double()).sum(-1).float()
    wide = K.attention_backward(grad_out.float(), q, k, v, lse, delta, *call.options())
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize(
    ("shape", "what"),
    [((0, 2, 5, 8), "batch"), ((2, 2, 0, 8), "queries"), ((2, 2, 5, 8), "keys")],
)
def test_empty_tensors_give_empty_results(capability: str, shape: tuple[int, ...], what: str) -> None:
    q = torch.randn(shape)
    k = torch.randn(shape[0], 2, 0 if what == "keys" else 5, 8)
    call = Call(shape[2], k.shape[2], tiles=((),), batch=shape[0])
    out, lse, dq, dk, dv = computed(call, q, k, k, torch.randn(shape))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)
    assert all(t.eq(0).all() for t in (dq, dk, dv))


def test_bad_arguments_are_refused() -> None:
    call = Call(10, 10)
    q, k, v, _ = call.inputs(torch.float32)
    table, _, *rest = call.options()

    def forward(*tensors: Tensor, tiles: Tensor = table, offsets: Tensor | None = None, **changes: float) -> None:
        options = {"scale": 1.0, "softcap": 0.0, "dropout": 0.0} | changes
        K.attention_forward(*tensors, tiles, offsets, *options.values(), *rest[3:], torch.float32)

    outside = torch.tensor([[0, 11, 0, 10, -9, 0]], dtype=torch.int32)
    for message, arguments, changes in (
        ("k and v must have the dtype of q", (q, k.double(), v), {}),
        (
            r"query heads \(2\) must be a multiple of key heads \(3\)",
            (q, k.expand(-1, 3, -1, -1), v.expand(-1, 3, -1, -1)),
            {},
        ),
        ("k must have q's head dim 32, got 16", (q, k[..., :16], v), {}),
        ("tile 0 .* does not lie inside 10 queries and 10 keys", (q, k, v), {"tiles": outside}),
        ("tiles must be a contiguous int32", (q, k, v), {"tiles": table.long()}),
        ("tile_offsets must ascend", (q, k, v), {"offsets": torch.tensor([0, 5])}),
        ("softcap must be 0", (q, k, v), {"softcap": -1.0}),
        ("scale must be finite", (q, k, v), {"scale": math.nan}),
        ("dropout_p must be between 0 and 1", (q, k, v), {"dropout": 1.5}),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward(*arguments, **changes)
