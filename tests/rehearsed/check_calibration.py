"""`fastpar.comm.calibrate` on two ranks without a GPU: symmetric memory in a stand-in that counts its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastpar as fp
from fastpar.comm.symmetric import calibration
from fastpar.comm.symmetric.collectives import SymmetricCollectives
from tests.dist import run_ranks
from tests.rehearsal.group import device_group

SIZES = (1 << 12, 1 << 15)


class StandIn(SymmetricCollectives):
    """By the group itself, in float32."""

    def __init__(self, comm: fp.comm.Communicator) -> None:
        self.comm = fp.comm.Communicator(comm.group, transport="torch")
        self.device, self.is_virtual, self.is_closed = torch.device("cuda:0"), False, False
        self.calls: list[tuple[str, int]] = []

    @classmethod
    def create(cls, comm: Any, device: Any = "cuda", **options: Any) -> StandIn:
        made.append(cls(comm))
        return made[-1]

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Tensor:
        self.calls.append(("all_reduce", x.nbytes))
        return self.comm.all_reduce(x, op, out=out)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, sizes: Any = None) -> Tensor:
        self.calls.append(("reduce_scatter", x.nbytes))
        return self.comm.reduce_scatter(x, op, sizes=sizes)

    def all_gather(self, x: Tensor, *, sizes: Any = None) -> Tensor:
        self.calls.append(("all_gather", x.nbytes))
        return self.comm.all_gather(x, sizes=sizes)

    def all_reduce_rms_norm(self, x: Tensor, weight: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(("all_reduce_rms_norm", x.nbytes))
        h = self.comm.all_reduce(x)
        rstd = h.float().square().mean(-1).add(options["eps"]).rsqrt()
        return (h.float() * rstd[:, None] * weight.float()).to(x.dtype), h, rstd

    def close(self) -> None:
        self.is_closed = True


made: list[StandIn] = []


def seconds(call: Any, x: Tensor, comm: Any, repeats: int) -> float:
    """Symmetric memory is faster for few bytes, by little on the slower rank, and slower for many."""
    timed.append(x.nbytes)
    if not isinstance(call.__self__, StandIn):
        return 1.0
    return 0.5 + 0.4 * dist.get_rank() if x.nbytes <= SIZES[0] else 1.5


timed: list[int] = []


def calls(of: StandIn, run: Any) -> list[tuple[str, int]]:
    of.calls.clear()
    run()
    return list(of.calls)


def calibrated(folder: str) -> dict[str, Any]:
    """What goes where, before and after; only rank 0 has a file."""
    own = Path(folder) / str(dist.get_rank())
    group, found = device_group(), {}
    comm, rank = fp.comm.Communicator(group), dist.get_rank()
    few, many = (torch.full((n // 2,), 1.0 + rank, dtype=torch.bfloat16, device="cuda") for n in SIZES)
    with mock.patch.multiple(calibration, SymmetricCollectives=StandIn, _seconds=seconds):
        comm.all_reduce(few)
        found["ratios"] = fp.comm.calibrate(group, sizes=SIZES, samples=1, folder=own).ratios
        (one,) = made
        total = torch.empty_like(few)
        found["few"] = calls(one, lambda: total.copy_(comm.all_reduce(few)))
        found["sum"] = total.unique().tolist()
        found["many"] = calls(one, lambda: comm.all_reduce(many))
        found["not measured"] = calls(one, lambda: (comm.all_reduce(few.float()), comm.all_reduce(few[:9])))
        found["max"] = calls(one, lambda: comm.all_reduce(few, "max"))
        found["wide"] = calls(one, lambda: comm.reduce_scatter(few, dtype=torch.float32))
        found["torch"] = calls(one, lambda: fp.comm.Communicator(group, transport="torch").all_reduce(few))
        parts = few[: 600 + 848 * rank], [600, 1448]  # sizes differ by rank, the whole does not
        found["scatter"] = calls(one, lambda: comm.reduce_scatter(few, "avg", sizes=parts[1]))
        found["gather"] = calls(one, lambda: comm.all_gather(parts[0], sizes=parts[1]))
        pending = []
        found["async"] = calls(one, lambda: pending.append(comm.all_reduce_async(few, out=few.clone())))
        assert torch.equal(pending[0].wait(), total)
        x, weight = torch.ones(64, 8, dtype=torch.bfloat16).cuda(), torch.ones(32, 8, dtype=torch.bfloat16).cuda()
        x.requires_grad_()
        found["layer"] = calls(one, lambda: fp.ops.linear_all_reduce(x, weight, group=comm).float().sum().backward())
        row = torch.ones(64, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        scale = torch.ones(32, dtype=torch.bfloat16, device="cuda")
        found["norm"] = calls(
            one, lambda: fp.ops.all_reduce_rms_norm(row, scale, group=comm)[0].float().sum().backward()
        )
        timed.clear()
        again = fp.comm.calibrate(group, sizes=SIZES, samples=1, folder=own).ratios
        found["again"] = (len(timed), again == found["ratios"], one.is_closed, len(made))
        found["replaced"] = calls(one, lambda: comm.all_reduce(few))
        assert calls(made[1], lambda: comm.all_reduce(few))
        none = fp.comm.calibrate(group, sizes=SIZES[1:], dtypes=[torch.float16], samples=1, folder=own / "none").ratios
        assert none == {key: {SIZES[1]: 1.5} for key in ("all_reduce float16", "reduce_scatter float16", "all_gather")}
        found["slower"] = (made[2].is_closed, calls(made[2], lambda: comm.all_reduce(few)))
    found["files"] = sorted(p.name.partition("-")[0] for p in own.glob("*.json"))
    made.clear()
    timed.clear()
    return found


def test_a_group_takes_symmetric_memory_where_it_was_measured_to_be_faster(tmp_path: Path) -> None:
    first, second = run_ranks(2, calibrated, str(tmp_path), timeout=100)
    few, row = SIZES[0], {SIZES[0]: 0.9, SIZES[1]: 1.5}  # the slowest rank's
    for found in (first, second):
        assert found["ratios"] == {"all_reduce bfloat16": row, "reduce_scatter bfloat16": row, "all_gather": row}
        assert found["few"] == [("all_reduce", few)]
        assert found["sum"] == [3.0]
        for name in ("many", "not measured", "max", "wide", "torch", "replaced"):
            assert found[name] == [], name
        assert found["scatter"] == [("reduce_scatter", few)]
        assert found["async"] == found["layer"] == [("all_reduce", few)]
        assert found["norm"] == [("all_reduce_rms_norm", few)]
        assert found["again"] == (0, True, True, 2)
        assert found["slower"] == (True, [])
    assert first["gather"] == [("all_gather", 1200)]
    assert second["gather"] == [("all_gather", 2896)]
    assert (first["files"], second["files"]) == (["symmetric"], [])
    (file,) = (tmp_path / "0").glob("*.json")
    assert json.loads(file.read_text())["ranks"]["2"]["all_gather"] == {str(size): row[size] for size in SIZES}


def test_one_rank_has_nothing_to_choose_from_and_what_cannot_be_measured_is_refused() -> None:
    assert fp.comm.calibrate(None).ratios == {}
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        fp.comm.calibrate(None, device="cpu")
    with pytest.raises(ValueError, match=r"sizes must be powers of two, in bytes, got \[3000\]"):
        fp.comm.calibrate(None, sizes=[3000])
    with pytest.raises(TypeError, match=r"dtypes must be among .* got \[torch\.float64\]"):
        fp.comm.calibrate(None, dtypes=[torch.float64])
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        fp.comm.calibrate(None, samples=0)
