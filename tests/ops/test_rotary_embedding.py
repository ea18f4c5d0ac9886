"""Rotary embeddings: every CPU instruction set against complex products in float64, conventions, layouts, places.

Tolerances: two products and a sum in float32, so 2e-7 of the size of a pair; 16 bits add one rounding (2^-9, 2^-12).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from tests import instruction_sets
from tests.triton_aot import HOPPER, MI300, compile_for
from tests.triton_interpreter import run_interpreted
from tests.values import random

ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-14}
rotary_embedding = ops.rotary_embedding
K = torch.ops.fastpar


capability = instruction_sets.each()


def exact(x: Tensor, positions: Tensor, rotary_dim: int, interleaved: bool, sign: float = 1.0) -> Tensor:
    """x [.., S, heads, D], pairs as complex numbers times e^(i angle), in float64."""
    x = x.double()
    angles = positions.double().unsqueeze(-1) * 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), sign * angles).unsqueeze(-2)
    z = torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((z, rest), -1)


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=min(tolerance, 2.0**-22) * 5)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(128, 128), (70, 34), (2, 2), (1040, 1030), (6, 0)])
def test_forward_and_gradients_match_float64(
    capability: str, dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int
) -> None:
    positions = torch.tensor([[0, 3, 1000], [7, 8, 9]])
    q, k = random(2, 3, 5, dim, dtype=dtype), random(2, 3, 1, dim, dtype=dtype)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved}
    outs = [rotary_embedding(x, positions=positions, **options) for x in leaves]
    upstream = [random(*t.shape, dtype=dtype, seed=1) for t in outs]
    grads = torch.autograd.grad(outs, leaves, upstream)
    for out, x in zip(outs, leaves, strict=True):
        assert (out.dtype, out.shape) == (dtype, x.shape)
        close(out, exact(x.detach(), positions, rotary_dim, interleaved))
    for grad, dout in zip(grads, upstream, strict=True):
        close(grad, exact(dout, positions, rotary_dim, interleaved, -1.0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_layouts_tables_and_places_give_one_result(capability: str, interleaved: bool, shared: bool) -> None:
    positions = torch.arange(5, 12) if shared else torch.randint(0, 99, (3, 7))
    q, k = random(3, 7, 4, 40), random(3, 7, 2, 40)
    cos, sin = ops.rotary_tables(positions, 40)
    options: dict[str, Any] = {"interleaved": interleaved}
    wanted = [rotary_embedding(x, positions=positions, **options) for x in (q, k)]
    for x, given in zip((q, k), wanted, strict=True):
        assert torch.equal(rotary_embedding(x, cos=cos, sin=sin, **options), given)
    for x, given in zip((q.transpose(1, 2).contiguous(), k.transpose(1, 2)), wanted, strict=True):
        heads_first = rotary_embedding(x, cos=cos, sin=sin, layout="bhsd", **options)
        assert heads_first.is_contiguous()
        assert torch.equal(heads_first.transpose(1, 2), given)
    for place, given in zip((q.clone(), k.transpose(1, 2).clone().transpose(1, 2)), wanted, strict=True):
        assert rotary_embedding(place, cos=cos, sin=sin, inplace=True, **options) is place
        assert torch.equal(place, given)
    one = rotary_embedding(q[1], cos=cos if shared else cos[1], sin=sin if shared else sin[1], **options)
    assert torch.equal(one, wanted[0][1])
    assert torch.equal(rotary_embedding(q, cos=cos.expand(3, 7, 20), sin=sin.expand(3, 7, 20), **options), wanted[0])


def test_numbers_of_the_worked_example(capability: str) -> None:
    x, cos, sin = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    leaf = x.clone().requires_grad_()
    out = rotary_embedding(leaf, cos=cos, sin=sin)
    assert out.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
    assert rotary_embedding(x, cos=cos, sin=sin, interleaved=True).tolist() == [[[-2.0, 1.0, 3.0, 4.0]]]
    (grad,) = torch.autograd.grad(out, leaf, torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]))
    assert grad.tolist() == [[[0.0, 0.0, -1.0, 0.0]]]


def test_parts_of_a_sequence_with_their_positions_give_the_whole(capability: str) -> None:
    """As ranks of context parallelism have them: contiguous, and in zigzag order."""
    q, positions = random(2, 16, 3, 32), torch.arange(16)
    whole = rotary_embedding(q, positions=positions)
    for mine in (positions[:5], torch.cat([positions[:4], positions[12:]]), positions[::3]):
        assert torch.equal(rotary_embedding(q[:, mine], positions=mine), whole[:, mine])


@pytest.mark.parametrize("model", ["llama", "gptj"])
def test_it_turns_as_transformers_does(model: str) -> None:
    pytest.importorskip("transformers")
    q, k, positions = random(2, 4, 7, 32), random(2, 2, 7, 32), torch.arange(3, 10)[None]
    cos, sin = ops.rotary_tables(positions, 32)
    if model == "llama":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        wanted = apply_rotary_pos_emb(q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
        found = tuple(rotary_embedding(x, cos=cos, sin=sin, layout="bhsd") for x in (q, k))
    else:
        from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_to_pairs

        q, k = q.transpose(1, 2), k.transpose(1, 2)
        wanted = tuple(apply_to_pairs(x, sin, cos) for x in (q, k))
        found = tuple(rotary_embedding(x, cos=cos, sin=sin, interleaved=True) for x in (q, k))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_tables_are_exact_at_far_positions_and_take_frequencies() -> None:
    positions, frequencies = torch.tensor([131071, 1 << 20]), torch.tensor([1.0, 0.25])
    cos, sin = ops.rotary_tables(positions, 4, frequencies=frequencies, scale=0.5)
    for table, function in ((cos, math.cos), (sin, math.sin)):
        for row, p in zip(table.tolist(), positions.tolist(), strict=True):
            assert row == pytest.approx([0.5 * function(p), 0.5 * function(p / 4)], abs=1e-7)
    cos, _ = ops.rotary_tables(positions, 4, theta=100.0, dtype=torch.float64)
    assert cos[0].tolist() == pytest.approx([math.cos(131071), math.cos(13107.1)], abs=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_give_the_contiguous_result(capability: str, interleaved: bool) -> None:
    positions = torch.arange(7)
    packed = random(2, 7, 6, 3 * 32)
    for x in (packed[..., 32:64], packed.transpose(0, 1)[:, :2, :, 5:37].transpose(0, 1),
              random(32, 2, 7, 6).permute(1, 2, 3, 0), packed[:1, ..., :32].expand(2, 7, 6, 32)):  # fmt: skip
        assert not x.is_contiguous()
        wanted = rotary_embedding(x.contiguous(), positions=positions, interleaved=interleaved)
        assert torch.equal(rotary_embedding(x, positions=positions, interleaved=interleaved), wanted)
        if 0 not in x.stride():
            mine = x.clone(memory_format=torch.preserve_format)
            assert mine.stride() != x.stride() or rotary_embedding(
                mine, positions=positions, interleaved=interleaved, inplace=True
            ).equal(wanted)
    before = packed.clone()
    rotary_embedding(packed[..., 32:64], positions=positions, interleaved=interleaved, inplace=True)
    assert torch.equal(packed[..., :32], before[..., :32])
    assert torch.equal(packed[..., 64:], before[..., 64:])
    assert not torch.equal(packed[..., 32:64], before[..., 32:64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [128, 130])
def test_streamed_results_of_large_tensors_match(capability: str, dtype: torch.dtype, dim: int) -> None:
    """Above 8 MiB results are stored past the caches, which needs aligned addresses; some heads begin misaligned."""
    x = random(65, 4, dim, dtype=dtype).repeat(260, 1, 1)
    assert x.nbytes > 8 << 20
    cos, sin = ops.rotary_tables(torch.arange(len(x)), dim)
    for interleaved in (False, True):
        out = K.rotary_embedding(x, cos, sin, False, interleaved, False)
        for row in (0, 1, 2, 3, len(x) - 1):  # a row alone is not streamed
            one = slice(row, row + 1)
            assert torch.equal(out[one], K.rotary_embedding(x[one], cos[one], sin[one], False, interleaved, False))


def test_a_change_in_place_has_the_gradient_of_a_copy() -> None:
    positions, upstream = torch.arange(5), random(5, 3, 16, seed=2)
    grads = []
    for inplace in (False, True):
        leaf = random(5, 3, 16).requires_grad_()
        hidden = leaf * 2.0
        out = rotary_embedding(hidden, positions=positions, inplace=inplace)
        assert (out is hidden) == inplace
        grads.append(torch.autograd.grad((out * 3.0), leaf, upstream)[0])
    assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="leaf"):
        rotary_embedding(random(5, 3, 16).requires_grad_(), positions=positions, inplace=True)


def test_gradients_of_the_gradient_are_those_of_the_rotation() -> None:
    x = random(3, 2, 8).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: rotary_embedding(t, positions=torch.arange(3)).square(), x)


def test_nothing_is_saved_but_the_tables_and_no_graph_is_made_without_gradients() -> None:
    x = random(6, 2, 64).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rotary_embedding(x, positions=torch.arange(6))
    assert sum(t.nbytes for t in saved) == 2 * 6 * 32 * 4
    assert rotary_embedding(x.detach(), positions=torch.arange(6)).grad_fn is None


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8)])
def test_empty_tensors_have_empty_results(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    out = rotary_embedding(x, positions=torch.arange(shape[-3]))
    assert out.shape == shape
    out.sum().backward()


@pytest.mark.parametrize("function", [ops.rotary_embedding, reference.rotary_embedding])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(3, 2, 8, dtype=torch.int32)}, TypeError, "x must be.*got torch.int32"),
        ({"x": torch.zeros(3, 8)}, ValueError, r"x must be \[B, S, heads, D\].*got \[3, 8\]"),
        ({"x": torch.zeros(4, 2, 8)}, ValueError, r"cos must be.*for x \[4, 2, 8\]"),
        ({"positions": None}, ValueError, "either cos and sin, or positions"),
        ({"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4)}, ValueError, "either cos and sin, or positions"),
        ({"positions": torch.arange(3.0)}, TypeError, "positions must be.*got torch.float32"),
        ({"positions": torch.arange(4)}, ValueError, r"here \[3, 4\].*got \[4, 4\]"),
        ({"rotary_dim": 7}, ValueError, "even and not negative, got 7"),
        ({"rotary_dim": 16}, ValueError, r"rotary_dim \(16\) must be at most the 8"),
        ({"theta": 0.0}, ValueError, "theta must be positive"),
        ({"layout": "sbhd"}, ValueError, "one of bshd, bhsd, got 'sbhd'"),
        ({"positions": None, "cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}, ValueError, r"cos\[\.\.\., :4\]"),
        (
            {"positions": None, "cos": torch.zeros(3, 4, requires_grad=True), "sin": torch.zeros(3, 4)},
            ValueError,
            r"no gradient for cos.*cos\.detach\(\)",
        ),
        ({"positions": None, "cos": torch.zeros(3, 4), "sin": torch.zeros(3, 3)}, ValueError, "sin must be"),
    ],
)
def test_bad_arguments_are_named(function: Any, arguments: Any, error: type[Exception], message: str) -> None:
    call = {"x": torch.zeros(3, 2, 8), "positions": torch.arange(3), **arguments}
    with pytest.raises(error, match=message):
        function(**call)


def test_tables_and_places_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"frequencies must be \[4\]"):
        ops.rotary_tables(torch.arange(3), 8, frequencies=torch.ones(3))
    with pytest.raises(ValueError, match="x is expanded"):
        rotary_embedding(torch.zeros(3, 1, 8).expand(3, 2, 8), positions=torch.arange(3), inplace=True)


def test_the_ops_check_what_they_are_given() -> None:
    x, table = torch.zeros(3, 2, 8), torch.zeros(3, 4)
    for arguments, complaint in (
        ((x[0], table, table), "x must have 3 or 4 dims"),
        ((x, table.double(), table), "float32 for others"),
        ((x, torch.zeros(3, 5), torch.zeros(3, 5)), "R at most 8"),
        ((x, torch.zeros(2, 4), torch.zeros(2, 4)), r"cos must be \[3"),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            K.rotary_embedding(*arguments, False, False, False)
    with pytest.raises(RuntimeError, match="contiguous along its last dim"):
        K.rotary_embedding_(torch.zeros(3, 8, 2).transpose(1, 2), table, table, False, False, False)


def test_opcheck_passes_for_both_ops() -> None:
    x, (cos, sin) = random(2, 3, 4, 10), ops.rotary_tables(torch.arange(3), 6)
    for heads_first, interleaved in itertools.product((False, True), (False, True)):
        y = x.transpose(1, 2) if heads_first else x
        torch.library.opcheck(K.rotary_embedding.default, (y, cos, sin, heads_first, interleaved, True))
    torch.library.opcheck(K.rotary_embedding_.default, (x, cos, sin, False, True, False))


@pytest.mark.expensive
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool, inplace: bool) -> None:
    def step(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        scaled = (q * 2.0, k * 3.0)
        a, b = (rotary_embedding(x, positions=positions, interleaved=True, inplace=inplace) for x in scaled)
        return a + b

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 8):
        a, b = ([random(2, tokens, 3, 12, seed=i).requires_grad_() for i in range(2)] for _ in range(2))
        found, wanted = compiled(*a, torch.arange(tokens)), step(*b, torch.arange(tokens))
        assert torch.equal(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for one, two in zip(a, b, strict=True):
            assert one.grad is not None
            assert two.grad is not None
            assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_reference_agrees_with_the_kernels(dtype: torch.dtype) -> None:
    q = random(2, 5, 3, 24, dtype=dtype)
    for interleaved in (False, True):
        options: dict[str, Any] = {"positions": torch.arange(5), "interleaved": interleaved, "rotary_dim": 20}
        found, wanted = rotary_embedding(q, **options), reference.rotary_embedding(q, **options)
        close(found, wanted.double())
        mine = q.clone()
        assert reference.rotary_embedding(mine, inplace=True, **options) is mine
        assert torch.equal(mine, wanted)
    on_meta = rotary_embedding(q.to("meta"), positions=torch.arange(5, device="meta"))  # a device without kernels
    assert on_meta.shape == q.shape


def test_triton_kernel_matches_float64_in_the_interpreter() -> None:
    run_interpreted("check_rotary_embedding.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
def test_triton_kernel_compiles_without_spills(target: Any) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import rotary_embedding as kernels

    constants = {"COMPUTE": tl.float32, "COPIES": True, "HEADS": 32, "PAIRS": 64, "REST": 128}
    types = {"x": "*bf16:16", "out": "*bf16:16", "cos": "*fp32:16", "sin": "*fp32:16", "sign": "fp32"}
    kernel = kernels.rotary_kernel
    signature = {name: types.get(name, "i32:16") for name in kernel.arg_names if name not in constants}
    assert compile_for(kernel, signature, constants, target, {"num_warps": kernels.NUM_WARPS})["spills"] == 0


@pytest.mark.parametrize("learns", [False, True])
def test_a_graph_that_has_saved_what_is_turned_in_place_says_so(learns: bool) -> None:
    x, weight = torch.randn(1, 3, 2, 8), torch.ones(8, requires_grad=True)
    x = x.requires_grad_().clone() if learns else x
    loss = (x * weight).sum()
    rotary_embedding(x, positions=torch.arange(3), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        rotary_embedding(torch.randn(1, 3, 2, 8), positions=torch.arange(3), inplace=True)
