"""Dropout by global position: the C++ kernel is the reference, a block's mask is the whole's, layouts do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastpar as fp
from fastpar.ops.dropout import sharded_dropout
from fastpar.reference.dropout import keep_mask
from fastpar.reference.dropout import sharded_dropout as reference
from fastpar.tensor import LayoutDropout, SequenceRegion
from tests.dist import run_ranks
from tests.models import build_model, logits_of
from tests.triton_aot import HOPPER, MI300, compile_for
from tests.triton_interpreter import run_interpreted

SEED = 0x1234_5678_9ABC_DEF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (257,), (3, 0, 5), (2, 5, 7, 3)])
def test_kernel_equals_reference_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    assert torch.equal(sharded_dropout(x, 0.3, seed=SEED), reference(x, 0.3, seed=SEED))


def test_block_has_the_mask_of_the_whole() -> None:
    x = torch.randn(6, 11, 9)
    whole = sharded_dropout(x, 0.5, seed=SEED)
    block = sharded_dropout(x[2:4, 5:, 3:8], 0.5, seed=SEED, offset=[2, 5, 3], global_shape=[6, 11, 9])
    assert torch.equal(block, whole[2:4, 5:, 3:8])
    assert not torch.equal(block, sharded_dropout(x[2:4, 5:, 3:8], 0.5, seed=SEED))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_share_of_dropped_elements_is_p(p: float) -> None:
    n = 200_000
    dropped = 1 - keep_mask([n], p, SEED, [0], [n]).double().mean().item()
    assert abs(dropped - p) <= 4 * (p * (1 - p) / n) ** 0.5


def test_neighbouring_elements_and_seeds_are_independent() -> None:
    n = 100_000
    mask = keep_mask([n], 0.5, SEED, [0], [n]).double() - 0.5
    other = keep_mask([n], 0.5, SEED + 1, [0], [n]).double() - 0.5
    for a, b in ((mask[1:], mask[:-1]), (mask, other)):
        assert abs((a * b).mean().item() * 4) <= 4 / n**0.5


def test_backward_applies_the_same_mask() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    out = sharded_dropout(x, 0.4, seed=SEED)
    grad = torch.randn(7, 5, dtype=torch.float64).t()
    out.backward(grad)
    assert torch.equal(x.grad, reference(grad, 0.4, seed=SEED))


def test_opcheck_passes() -> None:
    x = torch.randn(4, 6)
    torch.library.opcheck(torch.ops.fastpar.sharded_dropout, (x, 0.3, 5, [0, 0], [4, 6]))


def test_compiles_in_one_graph_with_equal_gradients() -> None:
    def step(x: Tensor) -> Tensor:
        return sharded_dropout(x * 2, 0.3, seed=9, offset=[2, 0], global_shape=[6, 6]).sin()

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        x = torch.randn(4, 6, requires_grad=True)
        out = fn(x)
        out.sum().backward()
        results.append((out.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"p": 1.5}, "between 0 and 1, got 1.5"),
        (ValueError, {"offset": [3, 0]}, r"shape \[4, 6\] at \[3, 0\], does not lie inside global_shape \[4, 6\]"),
        (ValueError, {"global_shape": [4]}, "one entry per dim"),
        (TypeError, {"x": torch.zeros(4, 6, dtype=torch.int64)}, "floating point"),
    ],
)
def test_bad_arguments_are_named(error: type[Exception], arguments: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        sharded_dropout(**({"x": torch.zeros(4, 6), "p": 0.5, "seed": 1} | arguments))


def test_same_seed_gives_the_same_mask_under_every_layout() -> None:
    region_free = LayoutDropout(0.5)
    x = torch.randn(4, 10, 3)
    torch.manual_seed(3)
    whole = region_free(x)
    for size in (2, 3):
        for rank in range(2):  # data-parallel share of the batch
            torch.manual_seed(3)
            share = LayoutDropout(0.5, batch=(rank, 2))(x[2 * rank : 2 * rank + 2])
            assert torch.equal(share, whole[2 * rank : 2 * rank + 2])
        assert all(run_ranks(size, _sequence_part_matches, x, whole))


def _sequence_part_matches(x: Tensor, whole: Tensor) -> bool:
    region = SequenceRegion(fp.comm.Communicator(dist.group.WORLD))
    part = region.enter(x)
    torch.manual_seed(3)
    return torch.equal(region.leave(LayoutDropout(0.5, sequence=region)(part)), whole)


def test_checkpoint_replays_the_mask() -> None:
    dropout = LayoutDropout(0.5)
    x = torch.randn(64, 8, requires_grad=True)
    out = checkpoint(dropout, x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)


def test_evaluation_and_p_zero_pass_the_input_through() -> None:
    x = torch.randn(3, 3)
    assert LayoutDropout(0.5).eval()(x) is x
    assert LayoutDropout(0.0)(x) is x


def _dropout_model_logits(architecture: str, sequence_parallel: bool) -> Tensor:
    group = dist.group.WORLD
    overrides = {"dropout": 0.3} if architecture == "example" else {"resid_pdrop": 0.3, "embd_pdrop": 0.2}
    model = build_model(architecture, torch.float64, **overrides)
    fp.parallelize(model, group, sequence_parallel=sequence_parallel, gather_logits=True)
    ids = torch.arange(26).view(2, 13)
    torch.manual_seed(11)
    return logits_of(model, ids).detach()


@pytest.mark.parametrize("architecture", ["example", "gpt2"])
def test_training_with_dropout_does_not_depend_on_the_layout(architecture: str) -> None:
    (expected,) = run_ranks(1, _dropout_model_logits, architecture, False)
    for size in (2, 3):
        for sequence_parallel in (False, True):
            for logits in run_ranks(size, _dropout_model_logits, architecture, sequence_parallel):
                torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_dropout_module_is_restored_by_unparallelize() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    fp.parallelize(model, None, {"0": "colwise", "2": "rowwise"})
    assert isinstance(model[1], LayoutDropout)
    fp.unparallelize(model)
    assert type(model[1]) is nn.Dropout
    assert model[1].p == 0.5


# ---- Triton ----------------------------------------------------------------------------------------------------------


def test_triton_kernel_equals_reference_in_the_interpreter() -> None:
    run_interpreted("check_dropout.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_triton_kernel_compiles_without_spills_and_with_wide_accesses(target: Any, dtype: str) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import dropout as kernels

    names = [name for name in kernels.dropout_kernel.arg_names if name not in ("COMPUTE", "BLOCK")]
    types = {"x": f"*{dtype}:16", "out": f"*{dtype}:16", "columns": "i32:16", "scale": "fp32"}
    signature = {name: types.get(name, "i32" if name in ("size1", "size2", "threshold") else "i64") for name in names}
    constants = {"COMPUTE": tl.float32, "BLOCK": kernels.BLOCK}
    found = compile_for(kernels.dropout_kernel, signature, constants, target, {"num_warps": kernels.NUM_WARPS})
    assert found["spills"] == 0
    assert found["wide_loads"] >= 1
    assert found["wide_stores"] >= 1
