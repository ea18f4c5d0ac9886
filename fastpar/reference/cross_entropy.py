"""Vocab-parallel cross-entropy in plain PyTorch, and the argument checks that the fused version shares with it.

The algebra is in fastpar.ops.cross_entropy. `stats`, `merge` and `backward` here have the signatures of the ops of the
same names, and are what the public function falls back to on devices without kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("none", "mean", "sum")


class Shard(NamedTuple):
    """One rank's columns [start, start + size) of a vocabulary of `total` ids."""

    start: int
    size: int
    total: int


def compute_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32


# ---- arguments -------------------------------------------------------------------------------------------------------


def communicator(group: GroupLike) -> Communicator | None:
    """The group's communicator, or None where there is nobody to talk to."""
    if group is None:
        return None
    from fastpar.comm import Communicator

    comm = Communicator.of(group)
    return comm if comm.size > 1 else None


def check_arguments(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> None:
    """Raise TypeError or ValueError for what cannot be computed on."""
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"logits must be one of {[str(d) for d in LOGITS_DTYPES]}, got {logits.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must hold class ids as int64 (or int32), got {target.dtype}")
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have the shape of logits without its last dim (the vocabulary): logits is "
            f"{tuple(logits.shape)}, target is {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"logits and target must be on one device, got {logits.device} and {target.device}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")


def resolve_shard(logits: Tensor, vocab_range: tuple[int, int, int] | None, comm: Communicator | None) -> Shard:
    """The columns that this rank holds: `vocab_range`, or equal shards in rank order."""
    size = logits.shape[-1]
    if vocab_range is None:
        rank, ranks = (comm.rank, comm.size) if comm is not None else (0, 1)
        return Shard(rank * size, size, ranks * size)
    start, end, total = vocab_range
    if not 0 <= start <= end <= total:
        raise ValueError(f"vocab_range is (start, end, total) with 0 <= start <= end <= total, got {vocab_range}")
    if end - start != size:
        raise ValueError(f"vocab_range {vocab_range} names {end - start} columns, but logits has {size}")
    if comm is None and size != total:
        raise ValueError(f"vocab_range {vocab_range} is a part of the vocabulary, which needs a group of several ranks")
    return Shard(start, size, total)


def check_target_range(target: Tensor, total: int, ignore_index: int) -> None:
    """Raise IndexError that names the first target outside [0, total) other than `ignore_index`."""
    outside = ((target < 0) | (target >= total)) & (target != ignore_index)
    if not outside.any():
        return
    position = tuple(outside.nonzero()[0].tolist())
    value = int(target[position])
    where = ", ".join(map(str, position))
    raise IndexError(
        f"target[{where}] is {value}, outside the vocabulary [0, {total}) and not ignore_index ({ignore_index})"
    )


def check_shards(shards: list[list[float]]) -> None:
    """Raise ValueError unless the ranks' (size, start, total) tile one vocabulary."""
    end, total = 0.0, shards[0][2]
    for rank, (size, start, rank_total) in enumerate(shards):
        if rank_total != total or start != end:
            sizes = [int(shard[0]) for shard in shards]
            raise ValueError(
                f"the ranks' vocabulary shards do not tile one vocabulary: rank {rank} holds {int(size)} columns from "
                f"{int(start)} of {int(rank_total)}, expected to start at {int(end)} of {int(total)}. Shards of "
                f"unequal sizes ({sizes}) need vocab_range=(start, end, total) on every rank."
            )
        end = start + size
    if end != total:
        raise ValueError(f"the ranks' vocabulary shards end at {int(end)}, but the vocabulary has {int(total)} ids")


# ---- the op in three parts -------------------------------------------------------------------------------------------


def stats(logits: Tensor, target: Tensor, vocab_start: int, vocab_total: int, ignore_index: int) -> Tensor:
    """[N, 3] of every row: maximum, sum of exp(x - maximum), and the target's logit, 0 where another rank holds it.

    A shard without a finite logit gives (-inf, 0, ...). On CPU a target out of range is an IndexError; on other
    devices, where raising would need a synchronisation, it turns the target's logit into NaN.
    """
    size = logits.shape[-1]
    x, ids = logits.reshape(target.numel(), size).to(compute_dtype(logits.dtype)), target.reshape(-1)
    ignored = ids == ignore_index
    column = ids - vocab_start
    owned = (column >= 0) & (column < size) & ~ignored
    if size == 0:
        maximum = x.new_full((x.shape[0],), float("-inf"))
        picked = torch.zeros_like(maximum)
    else:
        maximum = x.amax(dim=-1)
        picked = x.gather(1, column.clamp(0, size - 1).unsqueeze(1)).squeeze(1).masked_fill(~owned, 0.0)
    if logits.device.type == "cpu":
        check_target_range(target, vocab_total, ignore_index)
    else:
        picked = picked.masked_fill(((ids < 0) | (ids >= vocab_total)) & ~ignored, float("nan"))
    reference = maximum.masked_fill(maximum == float("-inf"), 0.0)
    return torch.stack([maximum, (x - reference.unsqueeze(1)).exp().sum(dim=-1), picked], dim=-1)


def merge(gathered: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N] float64) from every rank's statistics [ranks, N, 3]; ignored rows have loss 0."""
    maximum, total, picked = gathered.double().unbind(dim=-1)
    highest = maximum.amax(dim=0)
    reference = highest.masked_fill(highest == float("-inf"), 0.0)
    log_sum = (total * (maximum - reference).exp()).sum(dim=0).log()
    loss = ((reference - picked.sum(dim=0)) + log_sum).masked_fill(target.reshape(-1) == ignore_index, 0.0)
    return loss.to(gathered.dtype), reference + log_sum


def backward(
    logits: Tensor, lse: Tensor, target: Tensor, grad_loss: Tensor, vocab_start: int, ignore_index: int
) -> Tensor:
    """(exp(logits - lse) - [column is the target]) * grad_loss in the logits' shape and dtype; ignored rows are 0."""
    size = logits.shape[-1]
    x, ids = logits.reshape(target.numel(), size).to(compute_dtype(logits.dtype)), target.reshape(-1)
    log_probability = (x.double() - lse.unsqueeze(1)).to(x.dtype)
    is_target = torch.arange(size, device=x.device) == (ids - vocab_start).unsqueeze(1)
    grad = torch.where(is_target, log_probability.expm1(), log_probability.exp()) * grad_loss.unsqueeze(1)
    return grad.masked_fill((ids == ignore_index).unsqueeze(1), 0.0).to(logits.dtype).reshape(logits.shape)


def backward_(
    logits: Tensor, lse: Tensor, target: Tensor, grad_loss: Tensor, vocab_start: int, ignore_index: int
) -> None:
    """`backward`, written over the logits."""
    logits.copy_(backward(logits, lse, target, grad_loss, vocab_start, ignore_index))


def exchange(local: Tensor, shard: Shard, comm: Communicator | None) -> Tensor:
    """Every rank's statistics, [ranks, N, 3], by one all-gather of 12 (N + 1) bytes; none without a group.

    One more row says which columns a rank holds, so that shards that do not fit together are an error and not a wrong
    loss. It is looked at on CPU only: elsewhere that would be a synchronisation.
    """
    if comm is None:
        return local.unsqueeze(0)
    header = local.new_tensor([[shard.size, shard.start, shard.total]])
    packed = torch.cat([local, header])
    if torch.compiler.is_compiling():
        # A transport cannot be traced; this is the same collective as an op that can, without a deadline or the check.
        from torch.distributed._functional_collectives import all_gather_tensor

        assert comm.group is not None  # a communicator of several ranks has one
        gathered = all_gather_tensor(packed, 0, comm.group).view(comm.size, -1, 3)
        return gathered[:, :-1]
    gathered = comm.all_gather(packed, dim=0).view(comm.size, -1, 3)
    if gathered.device.type == "cpu":
        check_shards(gathered[:, -1].tolist())
    return gathered[:, :-1]


def reduce_loss(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor | None]:
    """(reduced loss, number of rows that count or None). A mean over no row is 0."""
    if reduction == "none":
        return loss.reshape(target.shape), None
    if reduction == "sum":
        return loss.sum(), None
    count = (target != ignore_index).sum().clamp(min=1).to(loss.dtype)
    return loss.sum() / count, count


def expand_grad(grad: Tensor, count: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    """Gradient of every row's loss, [rows], from the gradient of the reduced loss."""
    scaled = grad.to(dtype) if count is None else grad.to(dtype) / count
    return scaled.expand(rows) if scaled.dim() == 0 and rows != 1 else scaled.reshape(-1).expand(rows)


# ---- the public function ---------------------------------------------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, shard: Shard, comm: Communicator | None, ignore: int, reduction: str
    ) -> tuple[Tensor, Tensor]:
        local = stats(logits, target, shard.start, shard.total, ignore)
        loss, lse = merge(exchange(local, shard, comm), target, ignore)
        out, count = reduce_loss(loss, target, ignore, reduction)
        ctx.save_for_backward(logits, target, lse, count)
        ctx.shard, ctx.ignore = shard, ignore
        lse_out = lse.to(loss.dtype).reshape(target.shape)
        ctx.mark_non_differentiable(lse_out)
        return out, lse_out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, count = ctx.saved_tensors
        grad_loss = expand_grad(grads[0], count, target.numel(), compute_dtype(logits.dtype))
        grad = backward(logits, lse, target, grad_loss, ctx.shard.start, ctx.ignore)
        return grad, None, None, None, None, None


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    reduction: str = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace_backward: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """fastpar.ops.vocab_parallel_cross_entropy in plain PyTorch; `inplace_backward` has no effect here."""
    check_arguments(logits, target, ignore_index, reduction)
    comm = communicator(group)
    shard = resolve_shard(logits, vocab_range, comm)
    loss, lse = _CrossEntropy.apply(logits, target.long(), shard, comm, ignore_index, reduction)
    return (loss, lse) if return_lse else loss
