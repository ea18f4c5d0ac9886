"""Forwards of several threads of a rank over one group."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


def _split(mesh: fp.Mesh) -> nn.Module:
    return fp.parallelize(_net(), mesh, {"0": "colwise", "2": "rowwise"})


def _sharded(mesh: fp.Mesh) -> nn.Module:
    model = _net()
    fp.zero.shard(model, torch.optim.SGD(model.parameters()), group=mesh, stage=3)
    return model


@torch.no_grad()
def _call_from_two_threads() -> None:
    """A second call while one is in the middle of the model; afterwards all goes on."""
    x, wanted = torch.ones(2, 6), _net()(torch.ones(2, 6))
    meshes = fp.init_mesh(tp=2, device="cpu"), fp.init_mesh(dp_shard=2, device="cpu")
    for mesh, make in zip(meshes, (_split, _sharded), strict=True):
        model, other, found = make(mesh), make(mesh), list[Tensor]()
        is_inside, may_go_on = threading.Event(), threading.Event()

        def wait(*_: object, inside: threading.Event = is_inside, go_on: threading.Event = may_go_on) -> None:
            inside.set()
            assert go_on.wait(60)

        hook = model[1].register_forward_pre_hook(wait)
        thread = threading.Thread(target=lambda model=model, found=found: found.append(model(x).detach()))
        with torch.no_grad():
            thread.start()
            assert is_inside.wait(60)
            for called in (model, other):
                with pytest.raises(RuntimeError, match="one thread at a time, in the same order on all ranks"):
                    called(x)
            may_go_on.set()
            thread.join()
            hook.remove()
            torch.testing.assert_close([*found, model(x), other(x)], [wanted] * 3)
    dist.barrier()


def test_calls_from_two_threads_at_once_are_refused_and_one_after_the_other_are_not() -> None:
    run_ranks(2, _call_from_two_threads)
