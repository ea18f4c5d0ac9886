"""The parallel layers used directly, without `parallelize`."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastpar as fp
from fastpar.tensor import (
    ColumnParallelLinear,
    RowMap,
    RowParallelLinear,
    SequenceRegion,
    VocabParallelEmbedding,
    VocabParallelHead,
    full_parameter,
    gather_vocab,
    replicate,
)
from tests.dist import run_ranks

SIZES = (1, 2, 3, 4)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ row maps


def test_packed_row_map_is_the_docstring_example() -> None:
    assert RowMap.packed((4, 4), 2).ranges == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert RowMap.packed((4, 4), 2).kind == "packed"
    assert RowMap.chunk(7, 3).ranges == (((0, 3),), ((3, 6),), ((6, 7),))
    assert RowMap.chunk(7, 3).kind == "contiguous"
    assert RowMap.packed((3, 3), 2).kind == "whole"  # uneven parts would not be a DTensor shard


@pytest.mark.parametrize("sections", [(4, 4), (6, 2, 4), (5, 3), (1, 1)])
@pytest.mark.parametrize("parts", SIZES)
def test_row_map_assembles_what_it_took(sections: tuple[int, ...], parts: int) -> None:
    rows = RowMap.packed(sections, parts)
    full = torch.arange(sum(sections) * 2).view(-1, 2)
    pieces = [rows.take(full, 0, rank) for rank in range(parts)]
    assert torch.equal(rows.assemble(pieces, 0), full)


# -------------------------------------------------------------------------------------------------------------- linears


def _mlp_matches(hidden: int, ffn: int, bias: bool, sequence_parallel: bool) -> None:
    """Column then row, six steps in one process group, with new inputs every time."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    up, down = nn.Linear(hidden, ffn, bias).double(), nn.Linear(ffn, hidden, bias).double()
    region = SequenceRegion(fp.comm.Communicator(group)) if sequence_parallel else None
    column = ColumnParallelLinear.from_linear(up, group=group, sequence=region)
    row = RowParallelLinear.from_linear(down, group=group, sequence=region)
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(2, 5 + step, hidden, dtype=torch.float64)
        reference_x, parallel_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = down(F.gelu(up(reference_x)))
        hidden_x = parallel_x if region is None else region.enter(parallel_x)
        out = row(F.gelu(column(hidden_x)))
        out = out if region is None else region.leave(out)
        close(out, expected)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        out.backward(grad)
        close(parallel_x.grad, reference_x.grad)
    for layer, plain in ((column, up), (row, down)):
        for name, param in plain.named_parameters():
            parallel = layer.get_parameter(name)
            close(full_parameter(parallel), param.detach())
            close(full_parameter(parallel, parallel.grad), param.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("size", SIZES)
def test_column_then_row_matches_unsharded(size: int, sequence_parallel: bool) -> None:
    for hidden, ffn, bias in ((6, 11, True), (3, 2, True), (8, 12, False)):
        run_ranks(size, _mlp_matches, hidden, ffn, bias, sequence_parallel)


def _gathered_and_split_io_match() -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    plain = nn.Linear(7, 5).double()
    x = torch.randn(3, 7, dtype=torch.float64)
    for layer in (
        ColumnParallelLinear.from_linear(plain, group=group, gather_output=True),
        RowParallelLinear.from_linear(plain, group=group, input_is_parallel=False),
    ):
        reference_x, parallel_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, out = plain(reference_x), layer(parallel_x)
        close(out, expected)
        grad = torch.randn(5, 3, dtype=torch.float64).t()  # a gradient with odd strides
        plain.zero_grad()
        expected.backward(grad)
        out.backward(grad)
        close(parallel_x.grad, reference_x.grad)
        for name, param in plain.named_parameters():
            close(full_parameter(layer.get_parameter(name), layer.get_parameter(name).grad), param.grad)


@pytest.mark.parametrize("size", [2, 3])
def test_gathered_output_and_split_input_match_unsharded(size: int) -> None:
    run_ranks(size, _gathered_and_split_io_match)


def _packed_matches(sections: tuple[int, ...]) -> list[str]:
    """A fused projection: the local output is this rank's part of every section, whatever the storage."""
    group = dist.group.WORLD
    comm = fp.comm.Communicator(group)
    torch.manual_seed(0)
    plain = nn.Linear(4, sum(sections)).double()
    layer = ColumnParallelLinear.from_linear(plain, group=group, sections=sections)
    x = torch.randn(3, 4, dtype=torch.float64)
    expected, out = plain(x), layer(x)
    mine = []
    for part in expected.split(sections, -1):
        lo, hi = fp.comm.shard_range(part.size(-1), comm.size, comm.rank)
        mine.append(part[..., lo:hi])
    close(out, torch.cat(mine, -1))
    plain(x).square().sum().backward()
    out.square().sum().backward()
    for name, param in plain.named_parameters():
        close(full_parameter(layer.get_parameter(name), layer.get_parameter(name).grad), param.grad)
    # a checkpoint does not show the layout: canonical rows out, canonical rows or a plain tensor in
    state = layer.state_dict()
    for name, param in plain.named_parameters():
        value = state[name]
        close(value.full_tensor() if isinstance(value, DTensor) else value, param.detach())
    for name, value in copy.deepcopy(layer.state_dict()).items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        assert local.untyped_storage().nbytes() == local.nbytes, name  # not that of the whole, gathered weight
    for source in ({k: v.clone() for k, v in state.items()}, dict(plain.state_dict())):
        with torch.no_grad():
            layer.weight.zero_()
        layer.load_state_dict(source)
        close(layer(x), out)
    return [layer.rows.kind]


@pytest.mark.parametrize(
    ("size", "sections", "kind"),
    [
        (2, (4, 4), "packed"),
        (2, (8, 4, 4), "packed"),
        (3, (6, 6, 6), "packed"),
        (2, (5, 5), "whole"),
        (1, (5, 5), "contiguous"),
    ],
)
def test_packed_projection_matches_unsharded(size: int, sections: tuple[int, ...], kind: str) -> None:
    for kinds in run_ranks(size, _packed_matches, sections):
        assert kinds == [kind]


def _initial_weights() -> list[Tensor]:
    group = dist.group.WORLD
    torch.manual_seed(5)
    layers = [
        ColumnParallelLinear(5, 7, group=group),
        RowParallelLinear(7, 5, group=group),
        VocabParallelEmbedding(11, 5, group=group),
        VocabParallelHead(5, 11, bias=False, group=group),
    ]
    return [full_parameter(p) for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_same_seed_gives_the_weights_of_the_plain_layers(size: int) -> None:
    torch.manual_seed(5)
    plain = [nn.Linear(5, 7), nn.Linear(7, 5), nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)]
    expected = [p.detach() for layer in plain for p in layer.parameters()]
    for weights in run_ranks(size, _initial_weights):
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_layers_without_a_group_are_the_plain_layers() -> None:
    plain = nn.Linear(5, 7)
    x = torch.randn(3, 5)
    column, row = ColumnParallelLinear.from_linear(plain), RowParallelLinear.from_linear(plain)
    assert not isinstance(column.weight, DTensor)
    torch.testing.assert_close(column(x), plain(x))
    torch.testing.assert_close(row(x), plain(x))


def _parameters_at_rest() -> None:
    group = dist.group.WORLD
    column = ColumnParallelLinear(6, 5, group=group)
    row = RowParallelLinear(5, 6, group=group)
    norm = nn.LayerNorm(4)
    replicate(norm, group)
    assert column.weight.placements == (Shard(0),)
    assert row.weight.placements == (Shard(1),)
    assert row.bias.placements == (Replicate(),)
    assert norm._parameters["weight"].placements == (Replicate(),)
    assert column.weight.shape == (5, 6)
    assert torch.equal(column.weight.full_tensor(), full_parameter(column.weight))
    out = column(torch.randn(2, 6))
    assert type(out) is Tensor
    out.sum().backward()
    row(out.detach()).sum().backward()
    for param in (column.weight, column.bias, row.weight, row.bias):
        grad = param.grad
        assert type(grad) is DTensor
        assert not grad.requires_grad
        assert grad._spec == param._spec  # mesh, placements, and shape and strides of the whole, uneven as it is
        assert grad.to_local().shape == param.to_local().shape
        with torch.no_grad():
            param.sub_(grad)  # as optimizers do


def _second_derivatives() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    plain = nn.Linear(6, 5).double()
    column, x = ColumnParallelLinear.from_linear(plain, group=dist.group.WORLD), torch.randn(3, 6, dtype=torch.float64)
    penalties = []
    for layer in (plain, column):
        (grad,) = torch.autograd.grad(layer(x).pow(2).sum(), layer.weight, create_graph=True)
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.pow(2).sum().backward()
        penalties.append(full_parameter(layer.weight, layer.weight.grad))
    return penalties[0], penalties[1]


def test_gradients_of_parameters_can_be_differentiated_again() -> None:
    for expected, found in run_ranks(2, _second_derivatives):
        close(found, expected)


def test_parameters_are_dtensors_at_rest_and_activations_plain() -> None:
    run_ranks(2, _parameters_at_rest)


def _gradients_before_they_are_stored() -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(6, 5, group=dist.group.WORLD)
    norm = nn.LayerNorm(6)
    replicate(norm, dist.group.WORLD)
    params = [layer.weight, layer.bias, norm._parameters["weight"]]

    def grads(**options: Any) -> Any:
        return torch.autograd.grad(layer(norm(torch.arange(12.0).view(2, 6))).square().sum(), params, **options)

    wanted = grads()
    with patch.object(DTensor, "__init__", side_effect=AssertionError("made by torch's rules for DTensors")):
        layer(norm(torch.arange(12.0).view(2, 6))).square().sum().backward()
    for param, grad in zip(params, wanted, strict=True):
        assert torch.equal(param.grad.to_local(), grad.to_local())
    uses = (
        lambda grad: (grad + grad).to_local() / 2,
        lambda grad: torch._foreach_add([grad], [grad])[0].to_local() / 2,
        lambda grad: copy.deepcopy(grad).to_local(),
        lambda grad: grad.mul_(2).to_local() / 2,
    )
    for use in uses:
        for grad, expected in zip(grads(), wanted, strict=True):
            assert isinstance(grad, DTensor)
            assert torch.equal(use(grad), expected.to_local())
    for grad in grads():
        kept = grad.detach()
        assert type(kept) is DTensor
        assert kept is not grad
        grad.zero_()
        assert not kept.to_local().any()  # the same memory
        assert type(grad) is DTensor
    before = [param.grad.to_local().clone() for param in params]
    layer(norm(torch.arange(12.0).view(2, 6))).square().sum().backward()  # accumulated
    for param, first in zip(params, before, strict=True):
        assert torch.equal(param.grad.to_local(), 2 * first)
    for grad in grads():
        grad.__reduce_ex__(2)
        assert type(grad) is DTensor  # a file has no class of fastpar's


def test_a_gradient_is_an_ordinary_dtensor_for_hooks_and_who_asks_for_it() -> None:
    run_ranks(2, _gradients_before_they_are_stored)


def _autocast_dtype(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    group = dist.group.WORLD
    torch.manual_seed(0)
    column, row = ColumnParallelLinear(6, 8, group=group), RowParallelLinear(8, 6, group=group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = row(column(x))
    out.float().sum().backward()
    return out.dtype, column.weight.grad.dtype


def test_layers_follow_autocast() -> None:
    assert run_ranks(2, _autocast_dtype, torch.randn(3, 6)) == [(torch.bfloat16, torch.float32)] * 2


def _frozen_and_no_grad() -> None:
    group = dist.group.WORLD
    plain = nn.Linear(4, 4)
    plain.weight.requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(plain, group=group)
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    layer(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is None
    with torch.no_grad():
        assert not layer(torch.randn(2, 4)).requires_grad


def test_frozen_parameters_stay_frozen() -> None:
    run_ranks(2, _frozen_and_no_grad)


def test_deferred_copies_keep_their_layout() -> None:
    layer = ColumnParallelLinear(4, 6)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), layer(x))


# ----------------------------------------------------------------------------------------------------------- vocabulary


def _embedding_and_head_match(vocab: int, padding_idx: int | None) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    plain, plain_head = nn.Embedding(vocab, 4, padding_idx).double(), nn.Linear(4, vocab, bias=False).double()
    plain_head.weight = plain.weight
    table = VocabParallelEmbedding.from_embedding(plain, group=group)
    head = VocabParallelHead.from_linear(plain_head, group=group)
    head.weight = table.weight
    ids = torch.randint(0, vocab, (3, 5))
    expected = plain_head(plain(ids))
    logits = head(table(ids))
    start, stop, total = head.vocab_range
    assert total == vocab
    close(logits, expected[..., start:stop])
    close(gather_vocab(logits, vocab, group), expected)
    labels = torch.randint(0, vocab, (3, 5))
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    loss = fp.ops.vocab_parallel_cross_entropy(logits, labels, group=group, vocab_range=head.vocab_range)
    loss.backward()
    close(full_parameter(table.weight, table.weight.grad), plain.weight.grad)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("vocab", "padding_idx"), [(257, None), (8, 5), (3, 0)])
def test_tied_embedding_and_head_match_unsharded(size: int, vocab: int, padding_idx: int | None) -> None:
    run_ranks(size, _embedding_and_head_match, vocab, padding_idx)  # 3 words on 4 ranks: an empty shard


def _head_loss_matches(vocab: int, sequence_parallel: bool, transposed: bool) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    plain: nn.Module = nn.Linear(6, vocab).double()
    if transposed:
        plain = pytest.importorskip("transformers.pytorch_utils").Conv1D(vocab, 6).double()
        with torch.no_grad():
            plain.bias.normal_()
    region = SequenceRegion(fp.Communicator(group)) if sequence_parallel else None
    head = VocabParallelHead.from_linear(plain, group=group, sequence=region)
    x, labels = torch.randn(2, 7, 6).double(), torch.randint(0, vocab, (2, 7))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.cross_entropy(plain(a)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    loss = head.loss(b if region is None else region.enter(b), labels, shift=1)
    loss.backward()
    close(loss, expected)
    close(b.grad, a.grad)
    close(full_parameter(head.weight, head.weight.grad), plain.weight.grad)
    close(full_parameter(head.bias, head.bias.grad), plain.bias.grad)
    if region is not None:
        with pytest.raises(ValueError, match="labels have 5 tokens along dim 1, but 7 entered"):
            head.loss(b, labels[:, :5])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("vocab", "sequence_parallel", "transposed"), [(57, False, False), (3, True, False), (57, True, True)]
)
def test_head_loss_matches_the_logits_and_their_loss(
    size: int, vocab: int, sequence_parallel: bool, transposed: bool
) -> None:
    run_ranks(size, _head_loss_matches, vocab, sequence_parallel, transposed)


@pytest.mark.parametrize("bad", [-1, 11, 10**6])
def test_token_id_outside_the_vocabulary_is_an_index_error_with_its_position(bad: int) -> None:
    table = VocabParallelEmbedding(11, 4)
    ids = torch.tensor([[1, 2], [bad, 3]])
    with pytest.raises(IndexError, match=rf"ids\[1, 0\] is {bad}, outside the vocabulary \[0, 11\)"):
        table(ids)


# --------------------------------------------------------------------------------------------------------------- errors


def _bad_row_input() -> str:
    layer = RowParallelLinear(6, 4, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="pass input_is_parallel=False for a full x") as info:
        layer(torch.randn(2, 6))
    return str(info.value)


def test_row_parallel_explains_a_full_input() -> None:
    assert "holds 3 of the 6 input features" in run_ranks(2, _bad_row_input)[0]


def _region_errors() -> None:
    region = SequenceRegion(fp.comm.Communicator(dist.group.WORLD))
    with pytest.raises(RuntimeError, match="no tensor has entered"):
        region.gather(torch.randn(1, 2, 3))
    part = region.enter(torch.randn(1, 5, 3))
    with pytest.raises(ValueError, match="its part of the 5 in the sequence-parallel region"):
        region.gather(torch.cat([part, part], 1))
    with pytest.raises(ValueError, match="returned 4 tokens along dim 1, but 5 entered"):
        region.reduce_scatter(torch.randn(1, 4, 3))


def test_sequence_region_refuses_tensors_that_do_not_fit() -> None:
    run_ranks(2, _region_errors)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ColumnParallelLinear(4, 6, sections=(3, 2)), ValueError, r"sections \(3, 2\) add up to 5"),
        (lambda: ColumnParallelLinear.from_linear(nn.Conv1d(1, 1, 1)), TypeError, "expected an nn.Linear or Conv1D"),
        (lambda: RowParallelLinear.from_linear(nn.Linear(2, 2, device="meta")), ValueError, "meta device"),
        (lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0)), ValueError, "max_norm=1.0"),
        (lambda: VocabParallelEmbedding(4, 2)(torch.zeros(2)), TypeError, "must be integers, got torch.float32"),
        (lambda: fp.tensor.LayoutDropout(1.5), ValueError, "between 0 and 1, got 1.5"),
        (lambda: replicate(nn.ReLU()), ValueError, "ReLU has no parameters"),
        (lambda: replicate(nn.Linear(2, 2), layout=nn.Linear), TypeError, "layout cannot be called"),
        (lambda: replicate(nn.Linear(2, 2), layout=lambda *_: 3), TypeError, "layout must return .* got int"),
    ],
)
def test_wrong_construction_is_a_clear_error(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
