"""Attention over band tiles: equal to dense softmax in float64, rows that see nothing, options, dtypes, compile."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastpar.comm import Communicator
from fastpar.contracts.attention import AttentionDropout, AttentionMask, AttentionTiles, Ranges, TokenRange
from fastpar.ops import _attention_blocks, _attention_torch
from fastpar.ops.attention import attention as attention_op
from fastpar.ops.context_attention.api import context_attention
from fastpar.reference.attention import attention as reference_op
from fastpar.reference.attention import attention_keep_mask
from fastpar.reference.dropout import keep_mask

attention: Any = attention_op  # which takes q, k and v as a list here
reference: Any = reference_op
WHOLE = (TokenRange(0, 37),)
PACKED = ((10, 0, 27), (36, 1))


def heads(dtype: torch.dtype, *counts: int, tokens: tuple[int, int] = (37, 37), dim: int = 8) -> list[Tensor]:
    """q [2, h_q, s_q, D], k [2, h_k, s_k, D], v [2, h_k, s_k, D + 3], leaves."""
    generator = torch.Generator().manual_seed(counts[0])
    shapes = [(2, counts[0], tokens[0], dim), (2, counts[1], tokens[1], dim), (2, counts[1], tokens[1], dim + 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def results(function: Any, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """out, lse, and the gradients of all inputs (and the sink) for fixed gradients of both."""
    out, lse = function(*inputs, **options, return_lse=True)
    leaves = [*inputs, *([options["sink"]] if "sink" in options else [])]
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    finite = torch.isfinite(lse)
    return [out, lse, *torch.autograd.grad((out, lse[finite]), leaves, (upstream[0], upstream[1][finite]))]


def tiles(mask: AttentionMask, queries: Ranges = WHOLE, keys: Ranges = WHOLE) -> dict[str, AttentionTiles]:
    return {"tiles": mask.tiles(queries, keys)}


CASES: dict[str, Any] = {
    "full": dict,
    "causal": lambda: {"causal": True},
    "causal tiles": lambda: tiles(AttentionMask(causal=True)),
    "window": lambda: tiles(AttentionMask(causal=True, window=(4, 0))),
    "two-sided window": lambda: tiles(AttentionMask(window=(3, 6))),
    "documents": lambda: tiles(AttentionMask(causal=True, documents=PACKED)),
    "chunks": lambda: tiles(AttentionMask(causal=True, chunk=5, documents=PACKED)),
    "softcap": lambda: {"causal": True, "softcap": 0.7},
    "scale": lambda: {"causal": True, "scale": 1.7},
    "sink": lambda: {"causal": True, "sink": torch.linspace(-2, 3, 4, dtype=torch.float64).requires_grad_()},
    "dropout": lambda: {"causal": True, "dropout": AttentionDropout(0.3, 5, first_head=2, first_batch=1)},
    "all dropped": lambda: {"dropout": AttentionDropout(1.0, 5)},
    "everything": lambda: {
        **tiles(AttentionMask(causal=True, window=(9, 0), documents=PACKED)),
        "softcap": 2.0,
        "sink": torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_(),
        "dropout": AttentionDropout(0.2, 9),
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_out_lse_and_gradients_equal_dense_softmax(case: str, kv_heads: int) -> None:
    inputs, options = heads(torch.float64, 4, kv_heads), CASES[case]()
    for found, expected in zip(results(attention, inputs, options), results(reference, inputs, options), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_devices_without_kernels_equal_dense_softmax(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fastpar.ops.attention"]
    monkeypatch.setattr(module, "_forward", _attention_blocks.forward)
    monkeypatch.setattr(module, "_backward", _attention_blocks.backward)
    monkeypatch.setattr(_attention_blocks, "_ROWS", 5)
    monkeypatch.setattr(_attention_blocks, "_COLUMNS", 7)
    inputs, options = heads(torch.float64, 4, 2), CASES[case]()
    for found, expected in zip(results(attention, inputs, options), results(reference, inputs, options), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", ["causal", "window", "softcap", "sink"])
def test_float32_is_within_rounding_of_float64(case: str) -> None:
    inputs, options = heads(torch.float32, 4, 2), CASES[case]()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for found, expected in zip(results(attention, inputs, options), results(reference, exact, options), strict=True):
        finite = torch.isfinite(expected)
        error = (found.double() - expected)[finite].abs().max() / expected[finite].abs().max()
        assert error < 1e-5  # of the largest entry; torch's own op has 6e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_rounded_once_at_any_length(dtype: torch.dtype) -> None:
    for tokens in (64, 512):
        inputs = heads(dtype, 2, 1, tokens=(tokens, tokens), dim=16)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        found, expected = (results(f, x, {"causal": True}) for f, x in ((attention, inputs), (reference, exact)))
        unit = torch.finfo(dtype).eps
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.dtype == (torch.float32 if index == 1 else dtype)
            # out's one rounding, relative norm at most eps / 2; gradients have that of out in delta as well
            assert (a.double() - b).norm() < (0.5 if index < 2 else 1.0) * unit * b.norm()


def test_rows_that_see_nothing_are_zero_and_minus_infinity() -> None:
    queries, keys = (TokenRange(0, 4), TokenRange(8, 10)), (TokenRange(4, 8),)
    given = AttentionMask(causal=True).tiles(queries, keys)
    inputs = heads(torch.float64, 4, 2, tokens=(6, 4))
    out, lse = attention(*inputs, given, return_lse=True)
    assert bool((out[:, :, :4] == 0).all())
    assert bool((lse[:, :, :4] == -torch.inf).all())
    assert bool(torch.isfinite(lse[:, :, 4:]).all())
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all(bool(torch.isfinite(g).all()) for g in grads)
    assert bool((grads[0][:, :, :4] == 0).all())
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    out, lse = attention(*inputs, given, sink=sink, return_lse=True)
    assert bool((out[:, :, :4] == 0).all())
    torch.testing.assert_close(lse[:, :, :4], sink[:, None].expand(2, 4, 4))


def test_no_tile_and_no_token_give_empty_results() -> None:
    inputs = heads(torch.float32, 2, 1, tokens=(5, 3))
    none = AttentionMask(causal=True).tiles((TokenRange(0, 5),), (TokenRange(5, 8),))
    out, lse = attention(*inputs, none, return_lse=True)
    assert float(out.detach().abs().max()) == 0
    assert bool((lse == -torch.inf).all())
    assert all(float(g.abs().max()) == 0 for g in torch.autograd.grad(out.sum(), inputs))
    for tokens in ((0, 3), (3, 0), (0, 0)):
        inputs = heads(torch.float32, 2, 1, tokens=tokens)
        out = attention(*inputs)
        assert out.shape == (2, 2, tokens[0], 11)
        assert float(out.detach().sum()) == 0
        assert [g.shape for g in torch.autograd.grad(out.sum(), inputs)] == [x.shape for x in inputs]


def test_parts_of_the_keys_merge_to_the_whole_and_their_gradients_from_the_final_lse() -> None:
    q, k, v = heads(torch.float64, 4, 2)
    mask, parts = AttentionMask(causal=True, window=(20, 0)), [(TokenRange(20, 37),), (TokenRange(0, 20),)]
    out, lse = attention(q, k, v, mask.tiles(WHOLE, WHOLE), return_lse=True)
    grad = torch.randn_like(out)
    whole = torch.autograd.grad(out, (q, k, v), grad)
    options = (8**-0.5, 0.0, 0.0, 0, 0, 0, None, None)
    merged, final = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    delta, dq = (grad * out).sum(-1).detach(), torch.zeros_like(q)
    for (source,) in parts:
        k_part, v_part = (x.detach()[:, :, source.start : source.stop] for x in (k, v))
        table = mask.tiles(WHOLE, (source,)).table
        o, part_lse = torch.ops.fastpar.attention_forward(q.detach(), k_part, v_part, table, None, *options, q.dtype)
        total = torch.logaddexp(final, part_lse)
        old, new = (
            torch.exp(x - total).nan_to_num(0.0)[..., None] for x in (final, part_lse)
        )  # -inf - -inf: no key yet
        merged = merged * old + o * new
        final = total
        part = torch.ops.fastpar.attention_backward(
            grad, q.detach(), k_part, v_part, lse.detach(), delta, table, None, *options
        )
        dq += part[0]
        torch.testing.assert_close(part[1], whole[1][:, :, source.start : source.stop], rtol=0, atol=1e-12)
        torch.testing.assert_close(part[2], whole[2][:, :, source.start : source.stop], rtol=0, atol=1e-12)
    torch.testing.assert_close(merged, out.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(final, lse.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(dq, whole[0], rtol=0, atol=1e-12)


def test_dropout_is_of_global_positions_heads_and_batch_rows() -> None:
    q, k, v = (x.detach() for x in heads(torch.float64, 4, 4))
    whole = attention(q, k, v, dropout=AttentionDropout(0.4, 11))
    turned = torch.arange(36, -1, -1)
    drop = AttentionDropout(0.4, 11, turned, turned, first_batch=1, first_head=2)
    part = attention(*(x[1:, 2:].flip(2) for x in (q, k, v)), dropout=drop)
    torch.testing.assert_close(part, whole[1:, 2:].flip(2), rtol=0, atol=1e-12)
    other = attention(q, k, v, dropout=AttentionDropout(0.4, 12))
    assert not torch.allclose(other, whole)


def test_dropout_mask_has_the_share_p_and_the_hash_of_sharded_dropout() -> None:
    positions = torch.arange(200)
    mask = attention_keep_mask(AttentionDropout(0.3, 3), 2, 3, positions, positions)
    assert abs(1 - mask.double().mean().item() - 0.3) < 4 * (0.3 * 0.7 / mask.numel()) ** 0.5
    rows = mask.flatten(0, 2).double() - 0.7
    correlation = rows @ rows.T / (rows.shape[1] * 0.21)  # of rows: independent
    assert float((correlation - torch.diag(correlation.diag())).abs().max()) < 6 / rows.shape[1] ** 0.5
    from fastpar.reference.dropout import hash_of

    seed = 3
    for index in (1, 2, 17):  # batch row, head, query
        seed = int(hash_of(seed, torch.tensor(index)))
    assert torch.equal(mask[1, 2, 17], keep_mask([200], 0.3, seed, [0], [200]))


def test_strides_do_not_matter_and_the_bits_of_a_second_call_are_the_same() -> None:
    inputs = [x.detach() for x in heads(torch.float32, 4, 2)]
    out = attention(*inputs, causal=True)
    strided = attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs), causal=True)
    torch.testing.assert_close(strided, out)
    assert torch.equal(attention(*inputs, causal=True), out)


def test_worked_example_of_the_docstring() -> None:
    x, v = torch.tensor([[[[1.0], [0.0]]]]), torch.tensor([[[[1.0], [3.0]]]])
    out, lse = attention(x, x, v, causal=True, scale=1.0, return_lse=True)
    torch.testing.assert_close(out, torch.tensor([[[[1.0], [2.0]]]]))
    torch.testing.assert_close(lse, torch.tensor([[[1.0, 2.0]]]).log().add(torch.tensor([1.0, 0.0])))


def test_only_wanted_gradients_are_given_and_the_second_derivative_is_an_error() -> None:
    q, k, v = heads(torch.float64, 2, 1)
    out = attention(q.detach(), k, v.detach(), causal=True)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert grad.shape == k.shape
    assert not attention(*(x.detach() for x in (q, k, v))).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    (grad,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has a first derivative only"):
        grad.sum().backward()


@pytest.mark.parametrize("options", [{"causal": True}, {}])
def test_a_mask_that_inference_mode_has_met_first_trains(options: dict[str, Any]) -> None:
    tokens = 31 + len(options)  # tables are kept: lengths that no other test has
    where = (TokenRange(0, tokens),)
    q, k, v = heads(torch.float32, 4, 2, tokens=(tokens, tokens))
    with torch.inference_mode():
        given = options or tiles(AttentionMask(window=(3, 1)), where, where)
        attention(q, k, v, **given)
    given = options or tiles(AttentionMask(window=(3, 1)), where, where)
    attention(q, k, v, **given).sum().backward()
    assert q.grad is not None


def test_opcheck() -> None:
    q, k, v = (x.detach() for x in heads(torch.float32, 4, 2))
    table = AttentionMask(causal=True, documents=PACKED).tiles(WHOLE, WHOLE)
    out, lse = attention(q, k, v, table, return_lse=True)
    options = (0.3, 2.0, 0.1, 3, 0, 0, torch.arange(37), torch.arange(37))
    arguments = (q, k, v, table.table, table.offsets, *options)
    torch.library.opcheck(torch.ops.fastpar.attention_forward.default, (*arguments, torch.float32))
    torch.library.opcheck(torch.ops.fastpar.attention_backward.default, (out, q, k, v, lse, lse, *arguments[3:]))
    from_out = (out, q, k, v, out, lse, table.table, table.offsets, 0.3, torch.float32)
    torch.library.opcheck(torch.ops.fastpar.attention_backward_from_out.default, from_out)
    turned = out.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.fastpar.attention_row_delta.default, (turned, out, lse))
    torch.library.opcheck(torch.ops.fastpar.attention_row_delta.default, (turned, turned, None))


@pytest.mark.expensive
@pytest.mark.parametrize("with_tiles", [False, True])
def test_compiles_without_a_graph_break(with_tiles: bool) -> None:
    options: dict[str, Any] = tiles(AttentionMask(causal=True, documents=PACKED)) if with_tiles else {"causal": True}
    inputs = heads(torch.float32, 4, 2)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), fullgraph=True, backend="aot_eager")
    grad = torch.randn(2, 4, 37, 11)
    for found, expected in zip(
        torch.autograd.grad(compiled(*inputs), inputs, grad),
        torch.autograd.grad(attention(*inputs, **options), inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.expensive)])
def test_backward_from_out_has_the_gradients_where_torchs_kernels_are_asked_for(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, which has none of them: the op that asks for them falls back."""
    calls, inputs, grad = [], heads(torch.float32, 4, 2), torch.randn(2, 4, 37, 11)
    wanted = torch.autograd.grad(attention(*inputs, causal=True), inputs, grad)
    monkeypatch.setattr(_attention_torch, "are_asked_for", lambda q: _attention_torch._plain_is_off())
    monkeypatch.setattr(_attention_torch, "backward", lambda *arguments: calls.append(1))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, causal=True)
        return out

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = run(*inputs)
    for found, expected in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(found, expected)
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_as_torch_does(dtype: torch.dtype) -> None:
    """Queries and keys that were rotated in float32, and values of a linear."""
    q, k, v = (torch.randn(1, 2, 37, 8, requires_grad=True) for _ in range(3))

    def across(*given: Tensor) -> Tensor:
        mask = AttentionMask(causal=True)
        return context_attention(*given, group=Communicator(None), layout=(WHOLE,), mask=mask)

    def torchs(*given: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*given, is_causal=True)

    outs = []
    for attend in (torchs, lambda *given: attention(*given, causal=True), across):
        with torch.autocast("cpu", dtype=dtype):
            outs.append(attend(q, k, v.to(dtype)))
        grads = torch.autograd.grad(outs[-1].sum(), (q, k, v))
        assert (outs[-1].dtype, {grad.dtype for grad in grads}) == (dtype, {torch.float32})
        torch.testing.assert_close(outs[-1], outs[0], rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=dtype), pytest.raises(ValueError, match="one dtype"):
        attention(q.double(), k, v)


def test_bad_arguments_are_refused() -> None:
    q, k, v = (x.detach() for x in heads(torch.float32, 4, 2))
    given = AttentionMask(causal=True).tiles(WHOLE, WHOLE)
    per_row = AttentionMask(documents=((37,), (30, 7), (7, 30))).tiles(WHOLE, WHOLE)
    with pytest.raises(ValueError, match=r"query heads \(4\) must be a multiple of key/value heads \(3\)"):
        attention(q, k.new_zeros(2, 3, 37, 8), v.new_zeros(2, 3, 37, 8))
    with pytest.raises(ValueError, match="causal needs as many queries as keys, got 37 and 30"):
        attention(q, k[:, :, :30], v[:, :, :30], causal=True)
    with pytest.raises(ValueError, match="either tiles or causal"):
        attention(q, k, v, given, causal=True)
    with pytest.raises(ValueError, match="37 queries and 37 keys, but q has 37 and k 30"):
        attention(q, k[:, :, :30], v[:, :, :30], given)
    with pytest.raises(ValueError, match="3 batch rows, but q has 2"):
        attention(q, k, v, per_row)
    with pytest.raises(ValueError, match="one dtype and device"):
        attention(q, k.double(), v)
    with pytest.raises(ValueError, match=r"must be \[batch, heads, tokens, head dim\]"):
        attention(q[0], k, v)
    with pytest.raises(ValueError, match="agree in batch and head dim"):
        attention(q[..., :7], k, v)
    with pytest.raises(ValueError, match="agree in batch, heads and tokens"):
        attention(q, k, v[:, :, :30])
    with pytest.raises(TypeError, match="q must be one of"):
        attention(q.long(), k, v)
    with pytest.raises(ValueError, match="softcap must be positive"):
        attention(q, k, v, softcap=0.0)
    with pytest.raises(ValueError, match="scale must be finite"):
        attention(q, k, v, scale=float("inf"))
    with pytest.raises(ValueError, match=r"sink must be \[4\]"):
        attention(q, k, v, sink=torch.zeros(2))
    with pytest.raises(ValueError, match=r"k_positions of dropout must be \[37\]"):
        attention(q, k, v, dropout=AttentionDropout(0.1, 1, torch.arange(37), torch.arange(30)))
    with pytest.raises(ValueError, match="p must be between 0 and 1"):
        AttentionDropout(1.5, 1)
