"""Stage 3 with its parameters in the host's memory or in a file: the bits of training in memory, in less of it."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.storage import ChecksumError, StorageError
from fastpar.zero.flat import Upload
from fastpar.zero.groups import local
from fastpar.zero.offload import shard_store
from fastpar.zero.offload.shard_store import DiskShards
from tests.dist import run_ranks
from tests.forks import run_programs
from tests.zero.zero_ranks import Parameters, assert_same, make_optimizer, optimizer_values, whole_values

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

WIDTH = 96
BIAS_ROWS = 3  # on 2 ranks one has 2 of them and one has 1; nothing of the one bias of a single element


class Tower(nn.Module):
    """Layers that may run in any order; one is frozen, one has no shard on some ranks. Norms are persistent."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, BIAS_ROWS)
        self.single = nn.Linear(BIAS_ROWS, 1)
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor, order: Any = None) -> Tensor:
        for index in order or range(len(self.layers)):
            x = torch.tanh(self.layers[index](x))
        return self.single(self.head(x))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def shard(
    model: nn.Module, offload: Any, dtype: torch.dtype = torch.float32, kind: str = "ours", **options: Any
) -> Any:
    optimizer = make_optimizer(kind, model.parameters())
    comm = Communicator(dist.group.WORLD, transport=options.pop("transport", "auto"))
    options = {"persistent_share": 0.015, "max_norm": 0.05} | options
    precision = fp.Precision.bf16() if dtype == torch.bfloat16 else None
    return fp.zero.shard(model, optimizer, group=comm, stage=3, precision=precision, offload=offload, **options)


def steps(model: nn.Module, zero: Any, numbers: range, accumulate: int = 2) -> list[float]:
    losses = []
    for step in numbers:
        for microbatch in range(accumulate):
            order = None if step % 3 else [2, 0, 3, 1]  # not what the last forward has told
            loss = model(batch(2 * step + microbatch, dist.get_rank()), order).float().square().mean() / accumulate
            loss.backward()
            losses.append(loss.item())
        zero.optimizers[0].step()
        zero.optimizers[0].zero_grad()
    return losses


def everything(model: nn.Module, zero: Any) -> Parameters:
    """Masters, states, and the parameters that the model computes with."""
    zero.state_dict()  # brings values into memory
    found = optimizer_values(zero) | {f"model.{name}": x for name, x in whole_values(model).items()}
    for param in zero.params:
        for key, value in zero.optimizers[0].state[param.model_param].items():
            if isinstance(value, Tensor) and key != "master_param":  # which only copies of parameters have
                found[f"{param.name}.{key}"] = local(value).clone()
    return found


def homes(folder: str) -> list[Any]:
    """Where parameters may be: in the host's memory, and in a file that is updated as a whole or in small groups."""
    small = fp.zero.Offload(folder, group_bytes=1 << 14, options={"backend": "threads"}, parameters=True)
    return ["cpu+parameters", f"nvme+parameters:{folder}", small]


def compare(folder: str, dtype: torch.dtype, kind: str, options: dict[str, Any]) -> None:
    def train(offload: Any) -> tuple[Parameters, list[float]]:
        model = Tower()
        zero = shard(model, offload, dtype, kind, **options)
        losses = steps(model, zero, range(4))
        return everything(model, zero), losses

    expected, losses = train(None)
    for offload in homes(folder):
        found, others = train(offload)
        assert others == losses
        assert_same(found, expected, offload)


CASES: list[tuple[int, torch.dtype, str, dict[str, Any]]] = [
    (1, torch.float32, "adamw", {}),
    (2, torch.float32, "ours", {}),
    (2, torch.bfloat16, "ours", {}),
    (2, torch.bfloat16, "adamw", {"transport": "torch"}),
    (2, torch.float32, "sgd", {"reshard_after_forward": False, "persistent_share": 0.0}),
]


@pytest.mark.parametrize(("size", "dtype", "kind", "options"), CASES, ids=str)
def test_parameters_elsewhere_change_no_bit(
    size: int, dtype: torch.dtype, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(size, compare, str(tmp_path), dtype, kind, options)


def check_late(folder: str) -> None:
    def train(offload: Any) -> Parameters:
        model = Tower()
        zero = shard(model, offload)
        steps(model, zero, range(2))
        return everything(model, zero)

    def late(function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            time.sleep(0.005)
            return function(*arguments)

        return called

    expected = train(None)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:  # the other comes to the next unit meanwhile
            patch.setattr(shard_store, "copy_rows", late(shard_store.copy_rows))
        assert_same(train(f"nvme+parameters:{folder}"), expected, "copies late")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(DiskShards, "read_into", late(DiskShards.read_into))
        assert_same(train(f"nvme+parameters:{folder}"), expected, "reads late")


def test_ranks_that_read_or_copy_late_get_the_same_rows(tmp_path: Path) -> None:
    run_ranks(2, check_late, str(tmp_path))


def check_ahead(folder: str) -> list[str]:
    model = Tower()
    log: list[str] = []
    for index in range(4):
        model.layers[index].register_forward_hook(lambda *_, index=index: log.append(f"ran {index}"))
        hook = model.layers[index].register_full_backward_hook(lambda *_, index=index: log.append(f"back {index}"))
        assert hook is not None
    shard(model, f"nvme+parameters:{folder}", persistent_share=0.1)  # only the layers' weights are in the file
    plain = DiskShards.read_into

    def logged(shards: DiskShards, *arguments: Any) -> None:
        log.append("read " + shards._names[0].split(".")[1])
        plain(shards, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskShards, "read_into", logged)
        model(batch(0, 0).requires_grad_()).sum().backward()
    return log


def test_the_next_unit_is_read_while_one_runs(tmp_path: Path) -> None:
    forward = "read 0, read 1, ran 0, read 2, ran 1, read 3, ran 2, ran 3"
    backward = "read 3, read 2, back 3, read 1, back 2, read 0, back 1, back 0"
    for log in run_ranks(2, check_ahead, str(tmp_path)):
        assert ", ".join(log) == f"{forward}, {backward}"


def check_failed_forward(folder: str) -> None:
    def train(offload: Any) -> Tensor:
        model = Tower()
        zero = shard(model, offload)
        model(batch(0, 0)).sum().backward()
        with pytest.raises(IndexError):
            model(batch(0, 0), [0, 1, 2, 99])  # layer 3 is being read by then
        zero.optimizers[0].step()
        return model(batch(0, 0), [3, 0, 1, 2]).detach()

    assert torch.equal(train(f"nvme+parameters:{folder}"), train(None))


def test_what_was_read_before_an_update_is_read_again(tmp_path: Path) -> None:
    run_ranks(2, check_failed_forward, str(tmp_path))


class FakeUpload:
    """Copies to a device that is the CPU, and what was done in which order."""

    log: list[str]

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.device = torch.device("cpu")

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def copy(self, x: Tensor) -> Tensor:
        self.log.append("copy")
        return x.clone()

    def event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    def arrived(self, event: Any, x: Tensor) -> None:
        assert hasattr(event, "synchronize")
        self.log.append("arrived")

    def settle(self) -> None:
        self.log.append("settle")


def check_uploads(folder: str) -> None:
    def train(offload: Any) -> tuple[Parameters, int]:
        model = Tower()
        zero = shard(model, offload, torch.bfloat16, transport="torch")  # ranks do not see each other's memory
        steps(model, zero, range(3))
        return everything(model, zero), sum(bool(unit.parts) for unit in zero.storages[0].units)

    expected, _ = train(None)
    plain = Upload.of
    log: list[str] = []
    try:
        Upload.of = staticmethod(lambda device: FakeUpload(log))  # type: ignore[assignment, method-assign]
        found, units = train("cpu+parameters")
        assert_same(found, expected, "host")
        text = " ".join(log)
        assert text.count("enter copy leave") == log.count("copy") == log.count("arrived") >= 3 * 2 * 2 * units
        assert log.count("settle") >= 3  # before every step writes to what copies read
        log.clear()
        found, units = train(f"nvme+parameters:{folder}")
        assert_same(found, expected, "file")
        assert log.count("copy") == log.count("arrived") >= 3 * 2 * 2 * units
        assert log.count("synchronize") >= log.count("copy") - 2
    finally:
        Upload.of = plain  # type: ignore[method-assign]


def test_shards_travel_through_copies_to_a_device(tmp_path: Path) -> None:
    run_ranks(2, check_uploads, str(tmp_path))


# ---- checkpoints, and what a model shows


def save(folder: str, offload: Any) -> tuple[Parameters, list[float]]:
    model = Tower()
    zero = shard(model, offload)
    steps(model, zero, range(2))
    dcp.save({"training": zero}, checkpoint_id=folder)
    return whole_values_of(zero.state_dict()["model"]), steps(model, zero, range(2, 4))


def load(folder: str, offload: Any) -> tuple[Parameters, list[float]]:
    model = Tower()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    zero = shard(model, offload)
    dcp.load({"training": zero}, checkpoint_id=folder)
    return whole_values_of(zero.state_dict()["model"]), steps(model, zero, range(2, 4))


def whole_values_of(state: dict[str, Any]) -> Parameters:
    return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for name, x in state.items()}


def test_checkpoints_go_from_memory_to_a_file_and_back(tmp_path: Path) -> None:
    in_file, in_memory = f"nvme+parameters:{tmp_path}", None
    for number, (first, second) in enumerate([(in_file, in_memory), (in_memory, in_file), (in_file, in_file)]):
        folder = str(tmp_path / f"checkpoint{number}")
        saved = run_ranks(2, save, folder, first)
        for (before, losses), (after, next_losses) in zip(saved, run_ranks(2, load, folder, second), strict=True):
            assert_same(after, before, (first, second))
            assert next_losses == losses


def check_state_dict(folder: str) -> None:
    model, plain, x = Tower(), Tower(), batch(0, 0)
    zero = shard(model, f"nvme+parameters:{folder}")
    shown = model.state_dict()
    assert_same(whole_values_of(shown), dict(plain.state_dict()))
    torch.testing.assert_close(model(x), plain(x))
    steps(model, zero, range(1))
    for name, value in shown.items():  # what it was when it was taken, but for what is persistent
        if name not in zero.persistent:
            assert torch.equal(local(value), local(slice_like(plain.state_dict()[name], value))), name
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(3)
    model.load_state_dict({name: slice_like(x, shown[name]) for name, x in plain.state_dict().items()})
    torch.testing.assert_close(model(x), plain(x))


def slice_like(x: Tensor, like: Any) -> Tensor:
    """A whole tensor as the same kind of DTensor."""
    if not hasattr(like, "placements"):
        return x
    return torch.distributed.tensor.distribute_tensor(x, like.device_mesh, like.placements)


def test_state_dicts_of_a_model_whose_parameters_are_in_a_file_are_as_ever(tmp_path: Path) -> None:
    run_ranks(2, check_state_dict, str(tmp_path))


def large_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(2)])  # even a half is more than 64 KB


def check_detach(folder: str) -> None:
    model = large_layers()
    zero = shard(model, f"nvme+parameters:{folder}")
    zero.detach()
    assert_same(dict(model.named_parameters()), dict(large_layers().named_parameters()))
    assert all(torch.isfinite(local(param.optim_param)).all() for param in zero.params)


def test_detach_brings_everything_out_of_the_file(tmp_path: Path) -> None:
    run_ranks(2, check_detach, str(tmp_path))


# ---- memory


def check_no_copies() -> None:
    for offload, has_copies in (("cpu", True), ("cpu+parameters", False)):
        zero = shard(Tower(), offload)
        copied = {param.name for param in zero.params if param.model_rows is not None}
        assert copied == ({param.name for param in zero.params} if has_copies else zero.persistent & {*copied})
        assert all(local(param.optim_param).device.type == "cpu" for param in zero.params)


def test_shards_in_the_host_s_memory_are_updated_there() -> None:
    run_ranks(2, check_no_copies)


def check_memory(offload: Any) -> tuple[int, int, int, int]:
    from memory import MemoryMeter

    model = Tower(layers=12)
    optimizer = make_optimizer("ours", model.parameters())
    meter = MemoryMeter(model, optimizer)
    options: dict[str, Any] = {"precision": fp.Precision.bf16(), "offload": offload, "persistent_share": 0.04}
    zero = meter.zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=3, **options)
    meter.sample()
    with meter.watching():
        pass  # at rest
    steps(model, zero, range(2))
    stage3: Any = zero.storages[0]
    persistent = sum(local(x).nbytes for name, x in model.named_parameters() if name in zero.persistent)
    return meter.peaks["parameters"], zero.expected_memory()["parameters"], persistent, stage3.pool.peak


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_in_a_file_leave_what_is_persistent_and_two_units(size: int, tmp_path: Path) -> None:
    in_memory = run_ranks(size, check_memory, "nvme:" + str(tmp_path))
    in_file = run_ranks(size, check_memory, f"nvme+parameters:{tmp_path}")
    unit = WIDTH * WIDTH * 2  # the weight of a layer in bfloat16; all else is persistent
    for (whole, _, persistent, peak), (measured, expected, still_persistent, same_peak) in zip(
        in_memory, in_file, strict=True
    ):
        assert measured == pytest.approx(expected, rel=0.02)
        assert persistent == still_persistent
        assert measured - persistent == pytest.approx(2 * unit / size, rel=0.02)
        assert whole - persistent > 11 * unit / size
        assert max(peak, same_peak) <= 2.02 * unit  # of whole units, besides


LARGE = """
import ctypes, hashlib, resource, sys
import torch
from torch import nn
import fastpar as fp

def held():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))

def build(width, layers):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2 * width, width, bias=False) if i % 2 == 0 else
                            nn.Linear(width, 2 * width, bias=False) for i in range(layers)])
    for layer in model[:-2]:  # most of it is frozen, so that gradients and states are small
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    offload = None if kind == "none" else fp.zero.Offload(
        folder, group_bytes=1 << 20, options={"depth": 1}, parameters=kind == "parameters")
    zero = fp.zero.shard(model, optimizer, stage=3, offload=offload, persistent_share=0.0)
    return model, optimizer, zero

def train(model, optimizer, zero, width, steps):
    for step in range(steps):
        x = torch.randn(2, 2 * width, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return x

kind, folder, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
train(*build(8, 4), 8, 1)  # what libraries take at their first use
before = held()
model, optimizer, zero = build(512, 48)
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
x = train(model, optimizer, zero, 512, 3)
digest = hashlib.sha256()
with torch.no_grad():
    model.unshard(model[-1])
    digest.update(model[-1].weight.detach().numpy().tobytes())
    digest.update(model(x).numpy().tobytes())
print(digest.hexdigest())
"""
PARAMETER_BYTES = 48 * 1024 * 512 * 4
LIMIT = 80_000_000  # below the parameters (101 MB); four units (8 MB), gradients, states and threads have room


@pytest.mark.expensive
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_a_model_whose_parameters_exceed_the_memory_trains_from_a_file(tmp_path: Path) -> None:
    assert PARAMETER_BYTES > LIMIT
    kinds = {"none": 0, "states": LIMIT, "parameters": LIMIT}
    cases = [(kind, str(tmp_path), str(limit)) for kind, limit in kinds.items()]
    free, limited, from_file = run_programs(LARGE, cases, ["torch._dynamo", "torch.distributed.tensor", "fastpar.zero"])
    assert free.returncode == 0, free.stderr
    assert "can't allocate memory" in limited.stderr
    assert from_file.returncode == 0, from_file.stderr
    assert from_file.stdout == free.stdout != ""
    assert list(tmp_path.iterdir()) == []


# ---- failures


def check_damage(folder: str) -> str:
    model = Tower()
    zero: Any = shard(model, f"nvme+parameters:{folder}")
    steps(model, zero, range(1))
    store = zero.storages[0].store._store
    if dist.get_rank() == 1:
        store.flush()
        with open(f"/proc/self/fd/{store._file.backing.descriptor}", "r+b", buffering=0) as file:
            file.seek(store._entries["layers.2.0.weight"].offset + 5)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
            os.fsync(file.fileno())
    with pytest.raises(StorageError) as caught:
        model(batch(0, 0))
    assert isinstance(caught.value, ChecksumError) == (dist.get_rank() == 1)
    return str(caught.value)


def test_a_wrong_checksum_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    other, damaged = run_ranks(2, check_damage, str(tmp_path))
    assert "'layers.2.0.weight'" in damaged
    assert "checksum" in damaged
    assert "rank 1 of 2" in other


def check_write(folder: str) -> None:
    model = Tower()
    zero: Any = shard(model, f"nvme+parameters:{folder}")
    model(batch(0, 0)).square().mean().backward()
    if dist.get_rank() == 0:
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, zero.storages[0].store._store._file.backing.descriptor)
        os.close(full)
    with pytest.raises(StorageError, match="write .*ENOSPC" if dist.get_rank() == 0 else "rank 0 of 2: write failed"):
        zero.optimizers[0].step()


def test_a_disk_that_fills_up_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, check_write, str(tmp_path))


def check_no_room(folder: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        with pytest.raises(StorageError, match="reserve .*EFBIG" if dist.get_rank() == 1 else "rank 1 of 2: write"):
            shard(Tower(), f"nvme+parameters:{folder}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, check_no_room, str(tmp_path))


def check_at_rest(folder: str) -> None:
    model = Tower()
    zero: Any = shard(model, f"nvme+parameters:{folder}")
    weight: Any = model.layers[0][0].weight
    with pytest.raises(RuntimeError, match="is in a file"):
        weight.clone()
    zero.state_dict()
    assert torch.isfinite(local(weight).clone()).all()


@pytest.mark.parametrize("size", [1, 2])
def test_reading_a_shard_that_is_in_a_file_raises(size: int, tmp_path: Path) -> None:
    run_ranks(size, check_at_rest, str(tmp_path))


# ---- arguments


def test_frozen_parameters_stay_in_memory_under_offload_to_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    fp.zero.shard(model, optimizer, stage=1, offload=f"nvme:{tmp_path}")
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu+parameters", fp.zero.Offload(parameters=True)),
        ("nvme+parameters:/a:b", fp.zero.Offload("/a:b", parameters=True)),
        ("nvme:/a+parameters", fp.zero.Offload("/a+parameters")),
        ("cpu", fp.zero.Offload()),
        ("none", None),
    ],
)
def test_texts_of_offload(text: str, expected: fp.zero.Offload | None) -> None:
    assert fp.zero.Offload.of(text) == expected


@pytest.mark.parametrize(
    "text", ["cpu+", "cpu+states", "cpu:", "nvme", "nvme+parameters", "nvme+parameters:", "+parameters", ""]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'"nvme\+parameters:FOLDER"'):
        fp.zero.Offload.of(text)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_offloaded_in_stage_3_only(stage: int) -> None:
    model = nn.Linear(2, 2)
    before = model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(ValueError, match=f"offload of parameters is for stage 3.* stage is {stage}"):
        fp.zero.shard(model, optimizer, stage=stage, offload="cpu+parameters")
    assert model.weight is before
