"""The rehearsal notices what it is there to notice."""

from __future__ import annotations

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
