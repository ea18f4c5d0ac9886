"""offload_activations: gradients bit-equal to those without it, and memory that is really free in between."""

from __future__ import annotations

import copy
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fastpar as fp
from fastpar.storage import ChecksumError, StorageError, TensorStore
from fastpar.zero import ActivationOffload, offload_activations
from fastpar.zero.offload.activations import _Saved


class Block(nn.Module):
    """Attention and an MLP: saves views of one storage, transposed and expanded ones, outputs, and dropout masks."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + heads.transpose(1, 2).flatten(-2)
        hidden = nn.functional.dropout(torch.sigmoid(self.up(x)) * self.up(x).relu_(), 0.1)
        return x + self.down(hidden) * torch.ones(1, 1, 1, device=x.device).expand_as(x)


def model_and_input(layers: int = 4) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(layers))), torch.randn(2, 24, 32)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore(tmp_path) as made:
        yield made


@pytest.mark.parametrize("window_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("min_bytes", [1, 8192])
def test_gradients_are_bit_equal(store: TensorStore, window_bytes: int, min_bytes: int) -> None:
    model, x = model_and_input()
    expected = gradients(model, lambda: model(x).square().mean())
    offload = offload_activations(store, min_bytes=min_bytes, window_bytes=window_bytes)

    def loss() -> Tensor:
        with offload:
            return model(x).square().mean()

    for _ in range(3):
        assert same(gradients(model, loss), expected)
    assert offload.moved_bytes > 0


def test_saved_memory_is_free_between_forward_and_backward(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_input()
    seen: list[StorageWeakRef] = []
    sizes = []
    send = ActivationOffload._send

    def watched(self: ActivationOffload, tensor: Tensor) -> object:
        seen.append(StorageWeakRef(tensor.untyped_storage()))
        sizes.append(tensor.untyped_storage().nbytes())
        return send(self, tensor)

    monkeypatch.setattr(ActivationOffload, "_send", watched)
    offload = offload_activations(store, min_bytes=4096)
    with offload:
        loss = model(x).square().mean()
    offload._window_bytes = 0
    offload._let_go(0)
    assert len(seen) > 20
    assert [ref.cdata for ref in seen if not ref.expired()] == [x.untyped_storage()._cdata]  # which is the caller's
    assert offload.moved_bytes == sum(sizes)
    assert offload.waiting_bytes == 0
    loss.backward()


def test_parameters_leaves_and_kept_tensors_stay(store: TensorStore) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    table = torch.randn(64, 64)  # a weight that is no parameter
    offload = offload_activations(store, min_bytes=1, keep=[table])
    with offload:
        (x.t() @ weight.t()).sum() + (x @ frozen[:, :32]).sum() + (x @ table.t()).sum()
    assert offload.moved_bytes == 0
    with offload:
        ((x @ weight) @ frozen).sum()
    assert offload.moved_bytes == 0  # the product's operand x @ weight is not needed: frozen has no gradient
    with offload:
        ((x @ frozen) @ weight).sum()
    assert offload.moved_bytes == 64 * 64 * 4


def test_a_storage_travels_once_however_often_it_is_saved(store: TensorStore) -> None:
    x = torch.randn(3, 1000, requires_grad=True)
    offload = offload_activations(store, min_bytes=1)
    with offload:
        a, b, c = (x * 1).unbind(0)
        y = a * b + b * c + c * a
    assert offload.moved_bytes == 12000
    reads = []
    store_read = offload._away.read
    offload._away.read = lambda name: (reads.append(name), store_read(name))[1]  # type: ignore[method-assign]
    store.flush()
    y.sum().backward()
    assert len(reads) <= 1  # and none where the memory was still there
    expected = torch.stack([x[1] + x[2], x[0] + x[2], x[0] + x[1]])
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)  # sums of two products in another order


def test_a_storage_that_changes_after_it_is_away_travels_again(store: TensorStore) -> None:
    x = torch.randn(1000, requires_grad=True)
    offload = offload_activations(store, min_bytes=1)
    with offload:
        y = x * 1
        first = y.sin()
        store.flush()
        offload._let_go(0)
        y.mul_(2)  # autograd alone would refuse the backward of the first sine
        second = y.sin()
    assert offload.moved_bytes == 8000
    (first + second).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.cos() + 2 * (2 * x).cos()).detach())


def test_a_tensor_that_is_changed_before_it_is_away_is_an_error(store: TensorStore) -> None:
    x = torch.randn(1000, requires_grad=True)
    offload = offload_activations(store, min_bytes=1)
    with offload:
        y = x.sigmoid()
        z = y.square()
        y.detach().add_(1)  # shares y's version counter
    with pytest.raises(RuntimeError, match="changed in place while offload_activations copied it away"):
        z.sum().backward()


def test_a_graph_can_be_used_twice(store: TensorStore) -> None:
    model, x = model_and_input(2)
    offload = offload_activations(store, min_bytes=1, window_bytes=1)
    with offload:
        loss = model(x).square().mean()
    model.zero_grad()
    loss.backward(retain_graph=True)
    assert offload.fetched_bytes == 0
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    assert same(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None], [2 * g for g in once]
    )


def test_second_derivatives_go_through(store: TensorStore) -> None:
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    with offload_activations(store, min_bytes=1, window_bytes=1):
        y = ((x * 1) ** 3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x.detach())


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_several_graphs_may_wait_at_once(store: TensorStore, order: list[int]) -> None:
    model, x = model_and_input(2)
    expected = gradients(model, lambda: sum(model(x * k).square().mean() for k in (1, 2, 3)))  # type: ignore[arg-type]
    offload = offload_activations(store, min_bytes=1, window_bytes=20_000)
    torch.manual_seed(1)
    losses = []
    for k in (1, 2, 3):
        with offload:
            losses.append(model(x * k).square().mean())
    model.zero_grad()
    for k in order:
        losses[k].backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        # three gradients, added in the order of the backwards
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-8)  # type: ignore[arg-type]


@pytest.mark.expensive
def test_the_file_does_not_grow_from_step_to_step(store: TensorStore) -> None:
    model, x = model_and_input()
    sizes = []
    for _ in range(4):
        with offload_activations(store, min_bytes=1):
            loss = model(x).square().mean()
        loss.backward()
        del loss
        gc.collect()
        store.flush()
        sizes.append(store.file_bytes)
    assert len(set(sizes[1:])) == 1  # the first step's names are given up at the store's next call
    store.write("x", torch.zeros(1)).wait()
    assert store.names() == ["x"]


def test_backward_fetches_ahead_in_reverse_order_within_the_window(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = offload_activations(store, min_bytes=1, window_bytes=3 * 4000)
    x = torch.randn(1000, requires_grad=True)
    with offload:
        y = x
        for _ in range(6):
            y = y.sigmoid()  # saves its output
    offload._window_bytes = 0
    offload._let_go(0)
    offload._window_bytes = 3 * 4000
    log = []
    ask, take = _Saved.ask, _Saved.take
    monkeypatch.setattr(_Saved, "ask", lambda self, away: (log.append(f"ask {self.index}"), ask(self, away))[1])
    monkeypatch.setattr(_Saved, "take", lambda self: (log.append(f"take {self.index}"), take(self))[1])
    y.sum().backward()
    assert log == [
        *("ask 5", "ask 4", "ask 3", "take 5"),
        *("ask 2", "take 4"),
        *("ask 1", "take 3"),
        *("ask 0", "take 2"),
        *("take 1", "take 0"),
    ]
    assert offload.fetched_bytes == 0


def test_forward_waits_for_the_disk_when_the_window_is_full(store: TensorStore) -> None:
    offload = offload_activations(store, min_bytes=1, window_bytes=3 * 4000)
    y = torch.randn(1000, requires_grad=True)
    most = 0
    with offload:
        for _ in range(50):
            y = y.sigmoid()
            most = max(most, offload.waiting_bytes)
    assert 4000 <= most <= 3 * 4000
    assert offload.moved_bytes == 50 * 4000


def test_recomputed_layers_keep_only_their_inputs_away(store: TensorStore) -> None:
    model, x = model_and_input()
    x.requires_grad_()
    expected = gradients(model, lambda: model(x * 1).square().mean())
    fp.apply_recompute(model)
    offload = offload_activations(store, min_bytes=1, window_bytes=1)

    def loss() -> Tensor:
        with offload:
            return model(x * 1).square().mean()

    assert same(gradients(model, loss), expected)


def test_weights_that_stage_3_gathers_and_frees_stay(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_input()
    model[1].requires_grad_(False)  # type: ignore[operator]
    plain = copy.deepcopy(model)
    expected = gradients(plain, lambda: plain(x).square().mean())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    fp.zero.shard(model, optimizer, stage=3)
    moved = []
    send = ActivationOffload._send
    monkeypatch.setattr(
        ActivationOffload, "_send", lambda self, tensor: (moved.append(tensor.numel()), send(self, tensor))[1]
    )
    offload = offload_activations(store, min_bytes=1, window_bytes=1)
    torch.manual_seed(1)
    with offload:
        loss = model(x).square().mean()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert same([grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads], expected)
    assert moved
    assert not set(moved) & {p.numel() for p in plain.parameters() if p.dim() == 2}


def test_a_full_disk_is_said_by_forward(store: TensorStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    x = torch.randn(100_000, requires_grad=True)
    try:
        with pytest.raises(StorageError, match="reserve 401408 bytes"), offload_activations(store, min_bytes=1):  # noqa: PT012
            y = x
            for _ in range(4):
                y = y.sigmoid()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_damaged_file_is_said_by_backward(store: TensorStore) -> None:
    x = torch.randn(1000, requires_grad=True)
    offload = offload_activations(store, min_bytes=1)
    with offload:
        y = x.sigmoid()
    store.flush()
    offload._let_go(0)
    with open(f"/proc/self/fd/{store._file.backing.descriptor}", "r+b", buffering=0) as file:
        file.seek(100)
        file.write(b"damage")
    with pytest.raises(ChecksumError):
        y.sum().backward()


def test_tensors_of_the_cpu_stay_where_the_host_is_the_device() -> None:
    model, x = model_and_input(1)
    expected = gradients(model, lambda: model(x).square().mean())
    offload = offload_activations("cpu", min_bytes=1)

    def loss() -> Tensor:
        with offload:
            return model(x).square().mean()

    assert same(gradients(model, loss), expected)
    assert offload.moved_bytes == 0


@pytest.mark.gpu
def test_gradients_are_bit_equal_through_pinned_memory() -> None:
    model, x = model_and_input()
    model, x = model.cuda(), x.cuda()
    expected = gradients(model, lambda: model(x).square().mean())
    for window_bytes in (1, 1 << 30):
        offload = offload_activations("cpu", min_bytes=1, window_bytes=window_bytes)

        def loss(offload: ActivationOffload = offload) -> Tensor:
            with offload:
                return model(x).square().mean()

        for _ in range(3):
            assert same(gradients(model, loss), expected)
        assert offload.moved_bytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "disk"}, "to must be a TensorStore or \"cpu\", got 'disk'"),
        ({"min_bytes": 0}, r"min_bytes \(0\) and window_bytes \(\d+\) must be positive"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload_activations(**options)
