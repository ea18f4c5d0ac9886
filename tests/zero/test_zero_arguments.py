"""What `shard` is called with, and what it says where that does not fit."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fastpar as fp
from fastpar.comm import CommError
from tests.dist import run_ranks, say_done, stay_away_until_done
from tests.zero.zero_ranks import Net, batch, make_optimizer, whole_values

STAGES = (0, 1, 2, 3)


def refused() -> None:
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    compiled, wrapped = torch.compile(Net(), backend="eager"), nn.DataParallel(Net())
    spiral = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    looked_up = nn.Sequential(nn.EmbeddingBag(8, 4, mode="sum", sparse=True), nn.Linear(4, 2))
    wide = nn.Linear(2, 2, dtype=torch.bfloat16)
    wide.bias.grad_dtype = torch.float32
    bounded, counting = nn.Embedding(8, 4, max_norm=1.0), nn.EmbeddingBag(8, 4, scale_grad_by_freq=True)
    cases: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
        (TypeError, "shard\\(model, optimizer\\), in this order", optimizer, model, {}),
        (TypeError, "got str \\('meta-llama", "meta-llama/Llama-3", optimizer, {}),
        (TypeError, "got Tensor", torch.ones(3), optimizer, {}),
        (TypeError, "got int", 7, optimizer, {}),
        (TypeError, "optimizer must be a torch.optim.Optimizer", model, model, {}),
        (TypeError, "optimizer must be a torch.optim.Optimizer", model, None, {}),
        (TypeError, "optimizer must be .* got Linear", model, [nn.Linear(1, 1)], {}),
        (ValueError, "at least one", model, [], {}),
        (ValueError, "model is wrapped in DataParallel.*model.module", wrapped, optimizer, {}),
        (ValueError, "compile what comes of it", compiled, make_optimizer("sgd", compiled.parameters()), {}),
        (TypeError, "complex64.*view_as_real", spiral, make_optimizer("sgd", spiral.parameters()), {}),
        (ValueError, "bias is .*grad_dtype=torch.float32.*reduce=", wide, make_optimizer("sgd", wide.parameters()), {}),
        (ValueError, "sparse gradients.*sparse=False", looked_up, make_optimizer("sgd", looked_up.parameters()), {}),
        (ValueError, "others on each rank.*max_norm=None", bounded, make_optimizer("sgd", bounded.parameters()), {}),
        (ValueError, "how often an id.*a part", counting, make_optimizer("sgd", counting.parameters()), {}),
        (ValueError, "'fp32', 'bf16', 'fp16'", model, optimizer, {"precision": "int8"}),
        (TypeError, "'fp32', 'bf16', 'fp16'.* got dtype", model, optimizer, {"precision": torch.bfloat16}),
        (ValueError, "timeout must be positive", model, optimizer, {"timeout": 0}),
        (ValueError, "sync_weights must be 'broadcast', 'check' or 'none'", model, optimizer, {"sync_weights": "no"}),
        (TypeError, "of a pipeline pass it itself, or use stage=2", model.named_parameters(), optimizer, {"stage": 3}),
        (ValueError, "two parameters of the name 'a'", [("a", p) for p in model.parameters()], optimizer, {}),
    ]
    for error, text, given, given_optimizer, options in cases:
        with pytest.raises(error, match=text):
            fp.zero.shard(given, given_optimizer, **options)
    zero = fp.zero.shard(model, optimizer)
    with pytest.raises(ValueError, match="model is sharded already"):
        fp.zero.shard(model, optimizer)
    with pytest.raises(ValueError, match="SGD is sharded already"):
        fp.zero.shard(list(model.parameters()), optimizer)
    zero.close()
    zero.detach()
    model(batch(0, 0, 0)[0]).sum().backward()
    again = make_optimizer("sgd", model.parameters())
    fp.zero.shard(model, again, stage=2)


def test_what_does_not_fit_is_refused_with_what_to_write() -> None:
    run_ranks(2, refused)


def named_precision() -> None:
    model = Net()
    fp.zero.shard(model, make_optimizer("adamw", model.parameters()), precision="bf16")
    assert model.first.weight.dtype == torch.bfloat16


def test_precisions_have_names() -> None:
    run_ranks(2, named_precision)


# ---- ranks


def default_group() -> list[Tensor]:
    found = []
    for group in (None, fp.Communicator(None)):
        model = Net()
        optimizer = make_optimizer("sgd", model.parameters())
        zero = fp.zero.shard(model, optimizer, group=group)
        assert zero.groups.size == (2 if group is None else 1)
        model(batch(0, 0, dist.get_rank())[0]).sum().backward()
        optimizer.step()
        found.append(whole_values(model)["last.bias"])
        found.append(whole_values(model)["first.weight"])
    return found


def test_no_group_is_all_ranks_and_a_communicator_of_none_is_one() -> None:
    (bias, all_first, _, own_first), (_, all_second, _, own_second) = run_ranks(2, default_group)
    assert bias is not None
    assert torch.equal(all_first, all_second)
    assert not torch.equal(own_first, own_second)


def differing() -> None:
    for stage in STAGES:
        model = Net()
        with torch.no_grad():
            model.last.bias.add_(dist.get_rank())
        optimizer = make_optimizer("sgd", model.parameters())
        with pytest.raises(ValueError, match=r"different values of last\.bias: seed"):
            fp.zero.shard(model, optimizer, stage=stage, sync_weights="check")
        assert model.last.bias[0] == Net().last.bias[0] + dist.get_rank()
        with pytest.warns(UserWarning, match=r"different values of last\.bias: rank 0's"):
            fp.zero.shard(model, optimizer, stage=stage)
        assert torch.equal(whole_values(model)["last.bias"], Net().last.bias)
        for sync_weights in ("check", "broadcast"):
            model = Net()
            with torch.no_grad():
                model.last.bias[0] = float("nan")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer = make_optimizer("sgd", model.parameters())
                fp.zero.shard(model, optimizer, stage=stage, sync_weights=sync_weights)


def test_other_weights_than_rank_0s_are_told_or_refused_on_all_ranks() -> None:
    run_ranks(2, differing)


def late_rank(stage: int) -> float:
    model = Net()
    optimizer = make_optimizer("sgd", model.parameters())
    fp.zero.shard(model, optimizer, group=fp.init_mesh(dp_shard=2, device="cpu"), stage=stage, timeout=0.7)
    loss = model(batch(0, 0, 0)[0]).sum()
    if dist.get_rank() == 1:
        stay_away_until_done([0])
        return 0.0
    start = time.monotonic()
    with pytest.raises(CommError):
        loss.backward()
    passed = time.monotonic() - start
    say_done()
    return passed


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_is_late_is_waited_for_as_long_as_asked(stage: int) -> None:
    assert run_ranks(2, late_rank, stage)[0] < 30.0  # and not 60


# ---- precision of buffers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4, 4))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.table


def buffers() -> None:
    torch.manual_seed(0)
    for stage in STAGES:
        model = Scaled()
        precision = fp.Precision.bf16(buffers=torch.bfloat16)
        fp.zero.shard(model, make_optimizer("sgd", model.parameters()), stage=stage, precision=precision)
        assert model.table.dtype == torch.bfloat16
        assert model.count.dtype == torch.int64
        model(torch.randn(2, 4)).sum().backward()


def test_buffers_get_the_dtype_that_is_asked_for() -> None:
    run_ranks(2, buffers)


# ---- files of two saves


def save_twice(first: str, second: str, stage: int, mesh: dict[str, int] | None) -> None:
    model = Net()
    optimizer = make_optimizer("adamw", model.parameters())
    group = None if mesh is None else fp.init_mesh(**mesh, device="cpu")
    zero = fp.zero.shard(model, optimizer, group=group, stage=stage)
    for folder in (first, second):
        model(batch(0, 0, dist.get_rank())[0]).sum().backward()
        optimizer.step()
        dcp.save({"training": zero}, checkpoint_id=folder)


def load_once(folder: str, stage: int) -> str:
    model = Net()
    zero = fp.zero.shard(model, make_optimizer("adamw", model.parameters()), stage=stage)
    try:
        dcp.load({"training": zero}, checkpoint_id=folder)
    except Exception as error:  # whatever torch makes of it
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "mesh"), [(0, None), (1, {"dp_shard": 2}), (3, None), (2, {"dp_replicate": 2})])
def test_a_file_of_another_save_is_refused_on_all_ranks(
    tmp_path: Path, stage: int, mesh: dict[str, int] | None
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(2, save_twice, str(first), str(second), stage, mesh)
    for ranks in (1, 2, 3):
        assert run_ranks(ranks, load_once, str(second), stage) == [""] * ranks
    shard = sorted(second.glob("__1_*.distcp"))[-1]
    shard.write_bytes((first / shard.name).read_bytes())
    for ranks in (1, 2, 3):
        for text in run_ranks(ranks, load_once, str(second), stage):
            assert "files of several saves (of steps 1 and 2)" in text


# ---- optimizers that cannot be sharded


class LocalNorm(torch.optim.Optimizer):
    """Divides by the norm of what it takes for the gradient: of this rank's rows, under sharding."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows, grad = (x.to_local() if hasattr(x, "to_local") else x for x in (p, p.grad))
                    rows.sub_(grad / (grad.norm() + 1e-6), alpha=group["lr"])


class LocalClip(torch.optim.AdamW):
    """Clips what it takes for the gradient in place: Adam takes no notice of a factor that stays."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    grad.mul_((0.05 / (grad.norm() + 1e-6)).clamp(max=1.0))
        super().step()


class GlobalNorm(LocalNorm):
    """The same of whole gradients, which DTensor can do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6) * group["lr"])


class Cautious(LocalNorm):
    """Steps where signs agree, over the share of these; DTensor writes to a mean only where shards are not equal."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mask = (p * p.grad > 0).to(p.dtype)
                    p.sub_(p.grad * mask / mask.mean().clamp_(min=1e-3) * group["lr"])


def probed() -> None:
    torch.optim.AdamW(Net().parameters())  # torch puts hooks around a class's step when it makes the first one
    for stage in (1, 2, 3):
        for kind, text in (
            (torch.optim.Adafactor, "Adafactor cannot be sharded"),
            (LocalNorm, r"LocalNorm cannot be sharded: two steps on parts of a parameter \(5,\) differ"),
            (LocalClip, r"LocalClip cannot be sharded: two steps on parts of a parameter \(5,\) differ"),
            (Cautious, r"Cautious cannot be sharded: .* \(RuntimeError: aten.clamp_"),
        ):
            model = Net()
            before = [p.clone() for p in model.parameters()]
            optimizer: torch.optim.Optimizer = kind(model.parameters())  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=text):
                fp.zero.shard(model, optimizer, stage=stage)
            assert type(model.first.weight) is nn.Parameter
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            fp.zero.shard(model, optimizer, stage=0)
    expected: dict[str, Tensor] = {}
    for stage in STAGES:
        model = Net()
        optimizer = GlobalNorm(model.parameters())
        fp.zero.shard(model, optimizer, stage=stage)
        model(batch(0, 0, dist.get_rank())[0]).sum().backward()
        optimizer.step()
        found = whole_values(model)
        for name, x in found.items():
            torch.testing.assert_close(x, expected.setdefault(name, x).view(x.shape))


def test_optimizers_that_do_other_things_to_rows_are_refused_before_anything_changes() -> None:
    run_ranks(2, probed)


def probed_under_tensor_parallelism() -> None:
    mesh = fp.init_mesh(tp=2, device="cpu")
    for kind in (torch.optim.Adafactor, LocalNorm, GlobalNorm):
        for stage in (0, 1):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            fp.parallelize(model, mesh, {"0": "colwise", "2": "rowwise"})
            optimizer: torch.optim.Optimizer = kind(model.parameters())  # type: ignore[arg-type]
            if kind is GlobalNorm:
                fp.zero.shard(model, optimizer, group=mesh, stage=stage)
                continue
            with pytest.raises(ValueError, match=r"cannot be sharded: .* Use another optimizer"):
                fp.zero.shard(model, optimizer, group=mesh, stage=stage)


def test_optimizers_are_tried_on_what_tensor_parallelism_has_split() -> None:
    run_ranks(2, probed_under_tensor_parallelism)


class OfTwoRows(GlobalNorm):
    """Raises where a rank has less than three rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if len(p.to_local() if hasattr(p, "to_local") else p) < 3:
                    raise ZeroDivisionError("two rows")


def raising_alone() -> str:
    model = nn.Linear(4, 5)
    GlobalNorm(model.parameters())  # torch puts hooks around a class's step when it makes the first one
    with pytest.raises(ValueError, match="OfTwoRows cannot be sharded") as raised:
        fp.zero.shard(model, OfTwoRows(model.parameters()), stage=1)
    return str(raised.value)


def test_what_an_optimizer_raises_on_some_rows_is_raised_on_all_ranks() -> None:
    """Of five rows, the second of two ranks has two."""
    first, second = run_ranks(2, raising_alone, timeout=60.0)
    assert "on another rank" in first
    assert "ZeroDivisionError: two rows" in second


class Together(GlobalNorm):
    """Divides all gradients by one number, that of the step before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm, group["norm"] = group.get("norm", 1.0), 0.0
            for p in group["params"]:
                if p.grad is not None:
                    group["norm"] += float(p.grad.norm())
                    p.sub_(p.grad / norm * group["lr"])


def apart(folder: str) -> None:
    mesh = fp.init_mesh(pp=2, device="cpu")
    for options in ({"stage": 1, "offload": f"nvme:{folder}"}, {"stage": 0, "group": mesh}):
        model = Net()
        with pytest.raises(ValueError, match="Together cannot update parameters in parts"):
            fp.zero.shard(model, Together(model.parameters()), **options)  # type: ignore[arg-type]
        fp.zero.shard(model, GlobalNorm(model.parameters()), **options).detach()  # type: ignore[arg-type]
    model = Net()
    fp.zero.shard(model, Together(model.parameters()), stage=1)


def test_optimizers_that_need_all_parameters_at_once_are_refused_where_there_are_some(tmp_path: Path) -> None:
    run_ranks(2, apart, str(tmp_path))
