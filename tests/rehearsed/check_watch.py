"""The rehearsal notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rehearsal import device
from tests.rehearsal.watch import Watch


def kinds(source: str, x: Tensor) -> set[str]:
    """What code in a file of fastpar's would be blamed for."""
    code = compile(
        f"def fn(x):\n    return {source}\n", str(device.__file__).replace("tests/rehearsal", "fastpar"), "exec"
    )
    names = {"torch": torch}
    exec(code, names)
    with Watch() as watch:
        names["fn"](x)  # type: ignore[operator]
    return {finding.kind for finding in watch.found}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x + 1", set()),
        ("x.item()", {"sync"}),
        ("x.view(1).tolist()", {"sync", "copy"}),
        ("bool(x)", {"sync"}),
        ("x.view(1).nonzero()", {"sync"}),
        ("x.view(1)[x.view(1) > 0]", {"sync"}),
        ("torch.repeat_interleave(x.view(1).long())", {"sync"}),
        ("torch.cuda.synchronize()", {"sync"}),
        ("x.cpu()", {"copy"}),
        ("x.to('cuda:1')", {"copy"}),
        ("torch.tensor([1.0], device='cuda')", {"copy"}),
        ("x.new_tensor([1.0])", {"copy"}),
        ("torch.zeros(64)", set()),
        ("torch.zeros(65)", {"on_cpu"}),
        ("torch.empty_like(x, device='cpu').copy_(x)", {"copy"}),
    ],
)
def test_a_watch_notices(source: str, expected: set[str]) -> None:
    assert kinds(source, torch.ones((), device="cuda")) == expected


def test_a_watch_notices_what_backward_does() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad.sum().item()
            return grad

    x = torch.ones(3, device="cuda", requires_grad=True)
    with Watch() as watch:
        watch.everywhere = True
        Waits.apply(x).sum().backward()
    assert "sync" in {finding.kind for finding in watch.found}


def test_a_launch_on_another_device_than_the_current_one_fails() -> None:
    from fastpar.kernels import embedding

    with pytest.raises(AssertionError, match="while the current device is cuda:1"), torch.cuda.device(1):
        embedding.embedding_kernel[(1,)](torch.ones(1, device="cuda:0"))


def test_an_operation_on_tensors_of_two_devices_fails() -> None:
    from fastpar.kernels import embedding

    here, there = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device, but aten::dot got cpu and cuda:0"):
        here.dot(there)
    with pytest.raises(RuntimeError, match="same device, but aten::cat got cuda:1 and cuda:0"):
        torch.cat([there.to("cuda:1"), there])
    with pytest.raises(AssertionError, match=r"embedding_kernel: tensors on \{device.*cpu"):
        embedding.embedding_kernel[(1,)](here)
    assert (there + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number for the host
    assert there[torch.tensor([2])].tolist() == [1.0]


def test_an_op_without_a_kernel_for_a_device_fails() -> None:
    with pytest.raises(RuntimeError, match="no kernel for CUDA"):
        torch.ops.fastpar.square_sum_norm(torch.ones(3, device="cuda"), torch.float32)


def races(write: bool, wait: Callable[[], object]) -> set[str]:
    """What a watch notices of a copy to the device whose source is written to."""
    names: dict[str, Any] = {}
    file = str(device.__file__).replace("tests/rehearsal", "fastpar")
    exec(compile("def copy(there, here):\n    there.copy_(here, non_blocking=True)\n", file, "exec"), names)
    there, here = torch.zeros(3, device="cuda"), torch.ones(3)
    with Watch() as watch:
        names["copy"](there, here)
        wait()
        if write:
            here.zero_()
        there.cpu()
    return {finding.kind for finding in watch.found}


def test_a_watch_notices_that_a_copy_reads_what_is_written_to_before_the_host_has_waited() -> None:
    assert races(False, lambda: None) == {"copy"}
    assert races(True, lambda: None) == {"copy", "race"}
    assert "race" not in races(True, torch.cuda.synchronize)
    assert "race" not in races(True, lambda: torch.cuda.Event().synchronize())
    assert "race" not in races(True, lambda: torch.cuda.Event().query())
    assert "race" not in races(True, lambda: torch.ones((), device="cuda").item())


def test_a_watch_lets_nobody_read_a_copy_to_the_host_that_was_not_waited_for() -> None:
    there = torch.arange(3.0, device="cuda")
    with Watch():
        early = there.to("cpu", non_blocking=True)
        number = there.long().to("cpu", non_blocking=True)
        assert early.isnan().all()
        assert number[0] == torch.iinfo(torch.int64).max
        torch.cuda.synchronize()
        assert early.tolist() == number.tolist() == [0, 1, 2]
        late = there.to("cpu", non_blocking=True)
    assert late.tolist() == [0, 1, 2]


def test_storages_views_and_gradients_are_those_of_a_device() -> None:
    x = torch.arange(12.0, device="cuda").view(3, 4).t()
    assert x.is_cuda
    x[1].zero_()
    assert x.cpu().tolist() == [[0, 4, 8], [0, 0, 0], [2, 6, 10], [3, 7, 11]]
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(48)
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad.cpu().tolist() == [2.0, 2.0, 2.0]
