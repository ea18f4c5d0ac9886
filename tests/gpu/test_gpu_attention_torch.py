"""Attention on a real device where torch's kernels are asked for, and beside them: against float64, bits, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastpar import ops
from fastpar.contracts.attention import ScoreOptions
from fastpar.ops import _attention_torch
from tests.gpu.attention_on_gpu import DEVICE, assert_close, assert_matches, attend
from tests.ops.attention_triton_cases import TABLES, AttentionCase, case, expected, table

pytestmark = pytest.mark.gpu
ASKED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", TABLES)
def test_small_tiles_match_float64_where_one_of_torchs_kernels_is_asked_for(name: str, backend: SDPBackend) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with sdpa_kernel([backend]):
            assert_matches(case(name, dtype=dtype, heads=(4, 2), batch=2, dims=(64, 64)))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (256, 256), (128, 64)])
@pytest.mark.parametrize(
    "mask", [{"causal": True}, {"window": (200, 0)}, {"causal": True, "documents": ((700, 1, 323),)}]
)
def test_long_masks_match_float64_by_torchs_kernels(mask: dict[str, Any], dims: tuple[int, int]) -> None:
    tokens = (ops.TokenRange(0, 1024),)
    tiles, generator = ops.AttentionMask(**mask).tiles(tokens, tokens), torch.Generator().manual_seed(0)
    shapes = [(4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1])]
    tensors = (torch.randn(2, h, 1024, d, generator=generator).bfloat16() for h, d in shapes)
    c = AttentionCase._make((*tensors, tiles.table, None))
    with sdpa_kernel(ASKED):
        assert_matches(c)
    assert_matches(c)


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_small_parts_with_the_merged_lse_give_the_gradients_of_all(backend: SDPBackend) -> None:
    """What a ring does: keys before and keys beside, merged, then backward of each by the final out and lse."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, h, n, 64, generator=generator).bfloat16() for h, n in ((4, 256), (2, 512), (2, 512), (4, 256))
    )
    whole = table([(0, 256, 0, 512, -255, 256)])
    out, lse, _, *grads = expected(AttentionCase(q, k, v, dout, whole, None), 0.125)
    there = [x.to(DEVICE) for x in (dout, q, k, v, out.bfloat16(), lse.float())]
    backward: Any = _attention_torch.backward
    found = []
    with sdpa_kernel([backend]):
        for part, hi in ((slice(0, 256), 255), (slice(256, 512), 0)):
            tiles = table([(0, 256, 0, 256, -255, hi)])
            tensors: Any = (*there[:2], there[2][:, :, part], there[3][:, :, part], *there[4:], tiles, None)
            dout_there, *inputs, out_there, lse_there, _, _ = tensors
            given = (dout_there, out_there, lse_there)
            served = backward(_attention_torch.Operands(*inputs), given, tiles, None, 0.125, torch.float32)
            assert served is not None
            found.append(served)
            own, own_lse = torch.ops.fastpar.attention_forward(
                *tensors[1:4], *tensors[-2:], *ScoreOptions(0.125), torch.float32
            )
            partial = expected(AttentionCase(q, k[:, :, part], v[:, :, part], dout, tiles, None), 0.125)
            assert_close(own, partial[0], torch.bfloat16)
            assert_close(own_lse, partial[1], torch.float16)
    parts = (found[0][0] + found[1][0], *(torch.cat(pair, 2) for pair in zip(found[0][1:], found[1][1:], strict=True)))
    for mine, wanted in zip(parts, grads, strict=True):
        assert_close(mine, wanted, torch.bfloat16)


def test_bits_are_equal_from_run_to_run_by_flash_where_algorithms_are_deterministic() -> None:
    c = case("documents", dims=(64, 64), dtype=torch.bfloat16, heads=(8, 2), batch=2)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(ASKED):
            first, second = attend(c), attend(c)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_torchs_attention_agrees(backend: str, head_dim: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(2, 8, 1024, head_dim, generator=generator, device=DEVICE).bfloat16() for _ in range(4)]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = ops.attention(q, k, v, causal=True)
    mine = [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        theirs = [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b, torch.bfloat16)


@pytest.mark.parametrize("asked", [False, True])
def test_a_step_can_be_captured_and_replayed_with_other_values(asked: bool) -> None:
    """Asked for, by flash's deterministic backward: bits are compared."""
    torch.use_deterministic_algorithms(asked)
    try:
        with sdpa_kernel(ASKED if asked else [*ASKED, SDPBackend.MATH]):
            capture_a_step()
    finally:
        torch.use_deterministic_algorithms(False)


def capture_a_step() -> None:
    shape = (1, 4, 300, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = ops.attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
