"""States and parameters in the host's memory or in a file, of a model on a CUDA device, without a GPU.

Training is compared with the same on CPU tensors over gloo; the watch is on in the last step. What travels, and when,
depends on precision and optimizer: one rank takes all of both. It waits for no agreements with others, which would hide
what else it does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.gpu import test_gpu_zero
from tests.rehearsal.watch import Watch
from tests.rehearsed.check_ranks import ROWS, compared, nothing
from tests.rehearsed.exceptions import unlisted

WIDE = 192  # two ranks' rows of a weight are too large to stay in memory where states are in a file
LAYERS = 4  # more than the buffers that these pass through
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: fp.optim.AdamW(params, lr=1e-3),
    "muon": lambda params: fp.optim.Muon([p for p in params if p.ndim == 2], lr=1e-3),
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "torch, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
PRECISIONS = {"float32": None, "bfloat16": fp.Precision.bf16(), "float16": fp.Precision.fp16()}
SOME = [("adamw", "float32"), ("adamw", "bfloat16"), ("torch", "bfloat16"), ("torch, fused", "float16")]
VARIANTS = [(kind, dtype) for kind in OPTIMIZERS for dtype in PRECISIONS]


def offloaded_steps(
    device: str, group: Any, watch: Any, stage: int, offload: Any, variant: tuple[str, str]
) -> list[Tensor]:
    """float16 with a scaler, whose numbers are on the device."""
    kind, dtype = variant
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(LAYERS)]).to(device)
    if kind == "muon":
        for module in model:
            module[0].bias.requires_grad_(False)  # type: ignore[index]
    optimizer = OPTIMIZERS[kind](model.parameters())
    zero = fp.zero.shard(
        model, optimizer, group=group, stage=stage, max_norm=1.0, offload=offload, precision=PRECISIONS[dtype]
    )
    scaler = fp.LossScaler(init_scale=2.0**10, enabled=dtype == "float16")
    losses = []
    for step in range(3):
        x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(step + dist.get_rank())).to(device)
        with watch if step == 2 and watch is not None else nothing():
            loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.detach())
    values = [fp.tensor.local_tensor(x.detach()).clone() for x in zero.state_dict()["model"].values()]
    zero.detach()
    return [*losses, *values, *(p.detach().float() for p in model.parameters())]


def every_variant(device: str, group: Any, watch: Any, stage: int, place: str, folder: str) -> list[Tensor]:
    offload: Any = place
    if place.startswith("nvme"):  # every weight is a group of its own
        offload = fp.zero.Offload(folder, group_bytes=1 << 16, parameters=place.endswith("+parameters"))
    variants = VARIANTS if dist.get_world_size() == 1 else SOME
    return [x for variant in variants for x in offloaded_steps(device, group, watch, stage, offload, variant)]


def both_offloaded(run: Callable[..., list[Tensor]], *arguments: Any) -> list[str]:
    return unlisted(compared(run, *arguments), is_offloaded=True)


PLACES = [(1, "cpu"), (2, "cpu"), (3, "cpu"), (3, "cpu+parameters"), (2, "nvme"), (3, "nvme+parameters")]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("stage", "place"), PLACES)
def test_offloaded_states_and_parameters_serve_device_tensors(
    stage: int, place: str, size: int, tmp_path: Path
) -> None:
    for found in run_ranks(size, both_offloaded, every_variant, stage, place, str(tmp_path), timeout=100):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("precision", [None, fp.Precision.bf16()], ids=["float32", "bfloat16"])
def test_parameters_off_the_device_leave_its_memory(
    precision: fp.Precision | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test for GPUs, which measures on a device that several tests have used."""
    monkeypatch.setattr(test_gpu_zero, "WIDTH", 256)
    test_gpu_zero.test_parameters_off_the_device_change_no_bit_and_leave_its_memory(precision, tmp_path)


def test_numbers_of_a_scaler_on_a_device_reach_parameters_of_the_host_in_time() -> None:
    found = []
    for device in ("cpu", "cuda"):
        parameter = nn.Parameter(torch.ones(5))
        optimizer = fp.optim.SGD([parameter], lr=0.5)
        parameter.grad = torch.full((5,), 4.0)
        optimizer.grad_scale = torch.tensor(2.0, device=device)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(0.0, device=device)
        with Watch():
            optimizer.step()
        found.append(parameter.tolist())
    assert found == [[0.0] * 5] * 2
