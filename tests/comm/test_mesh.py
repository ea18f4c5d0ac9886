"""init_mesh: which ranks share a group, what is refused, with and without a launcher."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from fastpar.comm import Communicator
from fastpar.mesh import DENSE_DIMS, init_mesh
from fastpar.mesh.grid import _fill_in
from tests.dist import run_ranks

NAMES = (*DENSE_DIMS, "dp", "fsdp", "dp_cp", "cp_tp", "ep")


def describe(sizes):
    mesh = init_mesh(**sizes, device="cpu")
    groups = {}
    for name in NAMES:
        group = mesh.group(name)
        groups[name] = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        assert len(groups[name]) == mesh.size(name)
        assert groups[name][mesh.rank(name)] == dist.get_rank()
        x = Communicator(group).all_gather(torch.tensor([dist.get_rank()]))
        assert x.tolist() == groups[name]
    if sizes.get("ep", 1) * sizes.get("etp", 1) > 1:
        for name in ("efsdp", "etp", "edp"):
            group = mesh.group(name)
            groups[name] = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
            assert len(groups[name]) == mesh.size(name) == mesh[name].size()
    dims = [mesh[name].size() for name in (*DENSE_DIMS, "dp")]
    assert dims == [mesh.size(name) for name in (*DENSE_DIMS, "dp")]
    result = groups, mesh.coordinate, repr(mesh), mesh.world_size, mesh.device_type
    mesh.close()
    assert dist.is_initialized()  # not made by the mesh
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return result


def test_groups_of_a_dp_by_tp_mesh_are_rows_and_columns_of_the_ranks():
    results = run_ranks(4, describe, {"dp_shard": -1, "tp": 2})
    for rank, (groups, coordinate, text, world_size, device_type) in enumerate(results):
        dp, tp = divmod(rank, 2)
        assert groups["tp"] == [2 * dp, 2 * dp + 1]
        assert groups["dp_shard"] == groups["fsdp"] == groups["dp"] == [tp, tp + 2]
        assert groups["pp"] == groups["cp"] == groups["ep"] == [rank]
        assert coordinate == {"pp": 0, "dp_replicate": 0, "dp_shard": dp, "cp": 0, "tp": tp}
        assert text == "Mesh(dp_shard=2, tp=2, world_size=4, device_type='cpu')"
        assert (world_size, device_type) == (4, "cpu")


def test_dp_is_dp_replicate_and_dp_shard_flattened():
    for rank, (groups, *_) in enumerate(run_ranks(4, describe, {"dp_replicate": 2, "dp_shard": 2})):
        assert groups["dp"] == [0, 1, 2, 3]
        assert groups["dp_replicate"] == [rank % 2, rank % 2 + 2]
        assert groups["dp_shard"] == [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}], ids=str)
def test_fsdp_is_dp_shard_and_cp_flattened_and_dp_cp_with_replicas(sizes: dict[str, int]) -> None:
    for rank, (groups, *_) in enumerate(run_ranks(4, describe, sizes)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["cp"] == pair
        assert groups["fsdp"] == ([0, 1, 2, 3] if "dp_shard" in sizes else pair)
        assert groups["dp"] == [rank % 2, rank % 2 + 2]
        assert groups["dp_cp"] == [0, 1, 2, 3]


def test_cp_tp_is_cp_and_tp_flattened_within_a_data_parallel_rank() -> None:
    for groups, *_ in run_ranks(4, describe, {"cp": 2, "tp": 2}):
        assert groups["cp_tp"] == [0, 1, 2, 3]
    for rank, (groups, *_) in enumerate(run_ranks(4, describe, {"dp_shard": 2, "cp": 2})):
        assert groups["cp_tp"] == groups["cp"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def slices() -> None:
    mesh = init_mesh(dp_shard=2, cp=2, device="cpu")
    assert mesh["fsdp", "tp"].mesh_dim_names == ("fsdp", "tp")
    assert mesh["fsdp", "tp"].shape == (4, 1)
    assert mesh["fsdp", "tp"] is mesh["fsdp", "tp"]  # torch takes milliseconds to make one
    for names in (("tp", "fsdp"), ("dp_shard", "fsdp")):
        with pytest.raises(ValueError, match="must be different ones, in the order of"):
            mesh[names]
    assert mesh.group("fsdp") is mesh.group("dp_cp") is mesh["fsdp"].get_group()
    mesh.close()
    mesh = init_mesh(dp_replicate=2, cp=2, device="cpu")
    assert mesh["dp_replicate", "fsdp"].mesh_dim_names == ("dp_replicate", "cp")
    assert mesh["dp"] == mesh["dp_replicate"]
    mesh.close()


def test_flattened_dims_are_slices_beside_others() -> None:
    run_ranks(4, slices)


def test_expert_groups_are_neighbours_within_dp_shard_cp_and_tp():
    for rank, (groups, _, text, *_) in enumerate(run_ranks(4, describe, {"dp_shard": 2, "tp": 2, "ep": 2})):
        assert groups["ep"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["efsdp"] == [rank % 2, rank % 2 + 2]
        assert text == "Mesh(dp_shard=2, tp=2, efsdp=2, ep=2, world_size=4, device_type='cpu')"


def test_an_expert_is_split_over_neighbours_and_copied_over_edp():
    for rank, (groups, _, text, *_) in enumerate(run_ranks(4, describe, {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2})):
        assert groups["etp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["ep"] == [rank % 2, rank % 2 + 2]
        assert groups["efsdp"] == groups["edp"] == [rank]
        assert "efsdp=1, ep=2, etp=2" in text
    sizes = {"dp_replicate": 2, "dp_shard": 2, "etp": 2}
    for rank, (groups, *_) in enumerate(run_ranks(4, describe, sizes)):
        assert groups["etp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups["edp"] == [rank % 2, rank % 2 + 2]
    for groups, *_ in run_ranks(4, describe, {"dp_replicate": 2, "tp": 2, "ep": 1, "etp": 2}):
        assert len(groups["edp"]) == 2


def refuse():
    bad = [
        ({"tp": 3}, r"multiply to the number of ranks \(2\), got tp=3 \(product 3\)"),
        ({}, r"multiply to the number of ranks \(2\), got 1"),
        ({"tp": 3, "dp_shard": -1}, "dp_shard=-1: 2 ranks are not divisible"),
        ({"tp": -1, "cp": -1}, "at most one size may be -1, got cp and tp"),
        ({"tp": 2, "pp": 0}, "pp must be at least 1"),
        ({"tp": 2, "ep": -1}, "ep must be at least 1"),
        ({"tp": 2, "ep": 3}, r"ep \* etp \(3 \* 1\) must divide dp_shard \* cp \* tp \(1 \* 1 \* 2 = 2\)"),
        ({"tp": 2, "ep": 2, "etp": 2}, r"ep \* etp \(2 \* 2\) must divide dp_shard \* cp \* tp \(1 \* 1 \* 2 = 2\)"),
        ({"tp": 2, "device": "meta"}, "device must be"),
    ]
    for sizes, words in bad:
        with pytest.raises(ValueError, match=words):
            init_mesh(**sizes)
    with pytest.raises(TypeError, match=r"tp must be an int, got 2.0"):
        init_mesh(tp=2.0)
    mesh = init_mesh(tp=2, device="cpu")
    for call in (mesh.size, mesh.rank, mesh.group, mesh.__getitem__):
        with pytest.raises(ValueError, match=r"unknown mesh dim 'tpp': did you mean 'tp'"):
            call("tpp")
    with pytest.raises(ValueError, match=r"no expert view because ep and etp are 1"):
        mesh["ep"]


def test_sizes_and_names_that_do_not_fit_are_refused():
    run_ranks(2, refuse)


def test_the_size_that_is_open_takes_the_ranks_that_are_left():
    assert _fill_in({"pp": 1, "dp_shard": -1, "tp": 2}, 6) == {"pp": 1, "dp_shard": 3, "tp": 2}


def use_and_close() -> weakref.ref:
    mesh = init_mesh(dp_shard=2, tp=2, device="cpu")
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh["tp"], [Shard(0)])
    assert torch.equal((x @ x.T).full_tensor(), x.full_tensor() @ x.full_tensor().T)
    assert x.redistribute(placements=[Shard(1)]).to_local().shape == (4, 2 - mesh.rank("tp"))
    group = weakref.ref(mesh.group("tp"))
    mesh.close()
    return group


def use_two_meshes_of_one_shape() -> list[bool]:
    refs = [use_and_close(), use_and_close()]  # the second would wait for groups of the first, and fail
    gc.collect()
    return [ref() is None for ref in refs]


def test_a_closed_mesh_is_not_taken_for_a_later_one_and_its_groups_go():
    assert run_ranks(4, use_two_meshes_of_one_shape) == [[True, True]] * 4


def test_one_process_without_a_launcher_gets_a_mesh_that_dtensors_can_use(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mesh = init_mesh(dp_shard=-1, device="cpu")
    try:
        assert [mesh.size(name) for name in NAMES] == [1] * len(NAMES)
        assert mesh.group("tp") is None
        x = torch.randn(4, 4)
        assert torch.equal(distribute_tensor(x, mesh["tp"], [Shard(0)]).full_tensor(), x)
        assert repr(mesh) == "Mesh(world_size=1, device_type='cpu')"
        assert copy.deepcopy(mesh) is mesh
        with pytest.raises(TypeError, match=r'give workers.* such as mesh\.rank\("dp"\)'):
            pickle.dumps(mesh)
    finally:
        mesh.close()
    assert not dist.is_initialized()


def test_more_ranks_than_one_without_a_launcher_says_how_to_start_them(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"torchrun --nproc-per-node 6 script\.py"):
        init_mesh(dp_shard=3, tp=2, device="cpu")
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_a_cuda_mesh_without_cuda_is_refused():
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
        init_mesh(device="cuda")


@pytest.mark.ranks
@pytest.mark.slow  # test_mesh_lifetime.py has a job that does it three times
def test_under_torchrun_the_mesh_starts_and_ends_the_default_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings; warnings.simplefilter('error')\n"
        "import torch, torch.distributed as dist\n"
        "import fastpar as fp\n"
        "assert not dist.is_initialized()\n"
        "mesh = fp.init_mesh(tp=2, device='cpu')\n"
        "x = fp.Communicator(mesh.group('tp')).all_reduce(torch.ones(1))\n"
        "assert x.item() == 2, x\n"
        "mesh.close()\n"
        "assert not dist.is_initialized()\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
