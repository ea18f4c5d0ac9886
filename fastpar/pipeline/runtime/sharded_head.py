"""The output layer with the loss, sharded by vocabulary over the ranks of a pipeline: the arithmetic of S and T.

Rank r holds rows W_r [V_r, H] of the weight (and of the bias). For the hidden states X [N, H] of one microbatch:

    S on rank r       Y = X W_r^T + b_r    m_r = max Y    E = exp(Y - m_r)    s_r = sum E     z_r = Y[target]
                      A_r = E' W_r         E' is E with 0 at the target       B_r = W_r[target]
    combine           L = log sum_r exp(m_r) s_r           loss_i = L - z     for the last stage
                      dX = scale (sum_r exp(m_r - L) A_r + expm1(z - L) B)    in the order of ranks
    T on rank r       D = scale (exp(m_r - L) E' + expm1(z_r - L) at the target)
                      dW_r = D^T X         db_r = sum D

so dX is there after one exchange, before any gradient of weights (vocabulary parallelism, arXiv 2411.05288, Algorithm
2). The target is kept out of the sums and gets its own coefficient p - 1 = expm1(z - L): in bfloat16 the difference of
two rounded sums would leave nothing of the gradient of a token that is predicted well.

    products   three, as an unsharded head has; E' is kept from S to T, [N, V_r] in the weight's dtype, with X [N, H]
    messages   X [N, H] and the targets to every rank; A_r [N, H], the rows of B_r whose targets are in the shard, and
               m_r, s_r, z_r [N] back; L [N] to every rank again
    numbers    statistics are float32 (float64 for float64), products have the weight's dtype

`scale` is 1 / (number of targets that are not `ignore_index`), times what the pipeline divides by. Example: V = 4,
two ranks, X = [[1]], W = [[0], [log 2], [0], [log 4]], target 1. Rank 0 has Y = [0, log 2], m = log 2, s = 1.5, z =
log 2, A = 0 (only the target has a weight); rank 1 has Y = [0, log 4], m = log 4, s = 1.25, A = log 4. L = log 8,
loss = log 4, dX = 4/8 log 4 - 6/8 log 2 = log 2 / 4, and dW = [1/8, -6/8, 1/8, 4/8].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from fastpar.arguments import checked, checked_fields
from fastpar.comm import shard_range
from fastpar.contracts import compute_dtype
from fastpar.ops._autograd import own_grad, set_own_grad


@checked_fields
@dataclass(frozen=True)
class CrossEntropy:
    """The loss that a sharded head computes; called, the same of whole logits, as `loss=` of a `Pipeline`.

    ignore_index   targets that count neither in the sum nor in the mean over the tokens of a microbatch
    """

    ignore_index: int = -100

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """logits [..., V], target [...] -> scalar"""
        return F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=self.ignore_index)


class Results(NamedTuple):
    """What S of one rank finds out.

    maxima, sums   [N] m_r and s_r
    targets        [N] z_r; 0 where the target is elsewhere
    product        [N, H] A_r
    rows           [n, H] rows of B_r, for the targets in this shard, in their order
    """

    maxima: Tensor
    sums: Tensor
    targets: Tensor
    product: Tensor
    rows: Tensor


class Kept(NamedTuple):
    """What a rank keeps from S to T: X, target, E' [N, V_r], m_r, z_r."""

    hidden: Tensor
    target: Tensor
    exponentials: Tensor
    maxima: Tensor
    targets: Tensor


class ShardedHead(nn.Module):
    """This rank's shard of an output layer.

    weight  [V_r, H] of [V, H]: rows `start` to `stop`, by the rule of `torch.chunk`; a rank may have none. On a
            DeviceMesh a DTensor of the whole shape, `Shard(0)`, which checkpoints understand; else a plain tensor
    bias    [V_r], or None
    name    of the output layer in the whole model: what its parameters are called

    Made of the whole layer, of whose rows it has a copy. Optimizers that update parameters in groups (`fused`,
    `foreach`) do not mix DTensors and plain tensors: give them two groups.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @checked(computed=False)
    def __init__(
        self,
        whole: nn.Module,
        rank: int,
        num_ranks: int,
        *,
        mesh: DeviceMesh | None = None,
        name: str = "head",
        loss: CrossEntropy | None = None,
    ) -> None:
        super().__init__()
        weight, bias = getattr(whole, "weight", None), getattr(whole, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(whole, "forward"):
            raise TypeError(f"whole must be a head like nn.Linear, with a weight [V, H], to be sharded; got {whole}")
        if isinstance(weight, DTensor):
            raise ValueError(f"the weight of {name} is split already; a sharded head is split over the pipeline alone")
        self.name, self.loss = name, loss or CrossEntropy()
        self.rank, self.num_ranks, self.vocab_size = rank, num_ranks, weight.shape[0]
        self.start, self.stop = shard_range(self.vocab_size, num_ranks, rank)
        self._mesh = mesh
        self.weight = self._shard(weight)
        self.register_parameter("bias", None if bias is None else self._shard(bias))

    def _shard(self, whole: Tensor) -> nn.Parameter:
        local = whole.detach()[self.start : self.stop].clone(memory_format=torch.contiguous_format)
        parameter = nn.Parameter(self._as_dtensor(local, whole.shape), requires_grad=whole.requires_grad)
        vars(parameter)["pipeline_adds_grad"] = True  # see SharedGrads
        return parameter

    def _as_dtensor(self, local: Tensor, shape: torch.Size) -> Tensor:
        if self._mesh is None:
            return local
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def extra_repr(self) -> str:
        return f"{self.name}, rows {self.start} to {self.stop} of {self.vocab_size}"

    # The passes

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V_r]"""
        bias = None if self.bias is None else _local(self.bias)
        return F.linear(hidden, _local(self.weight), bias)

    @torch.no_grad()
    def forward(self, hidden: Tensor, target: Tensor) -> tuple[Results, Kept]:
        """S: hidden [N, H], target [N]."""
        weight = _local(self.weight)
        logits = self.logits(hidden).to(compute_dtype(hidden.dtype))
        here = self._here(target)
        index = target[here] - self.start
        if self.start == self.stop:
            maxima = logits.new_zeros(len(hidden))
        else:
            maxima = logits.amax(-1)
            maxima = maxima.masked_fill(maxima == -torch.inf, 0)  # a whole shard of masked tokens
        found = logits.new_zeros(len(hidden))
        found[here] = logits[here, index]
        exponentials = logits.sub_(maxima[:, None]).exp_()
        sums = exponentials.sum(-1)
        exponentials[here, index] = 0
        exponentials = exponentials.to(weight.dtype)
        results = Results(maxima, sums, found, exponentials @ weight, weight[index])
        return results, Kept(hidden, target, exponentials, maxima, found)

    @torch.no_grad()
    def backward_weight(self, kept: Kept, normalisers: Tensor, divisor: float) -> None:
        """T: adds to the gradients; normalisers L [N]."""
        scale = self.scale(kept.target, divisor, normalisers.dtype)
        here = self._here(kept.target)
        gradient = kept.exponentials.mul_(
            ((kept.maxima - normalisers).exp() * scale).to(kept.exponentials.dtype)[:, None]
        )
        own = torch.expm1(kept.targets - normalisers) * scale
        gradient[here, kept.target[here] - self.start] = own[here].to(gradient.dtype)
        if self.weight.requires_grad:
            self._add_grad(self.weight, gradient.T, kept.hidden)
        if self.bias is not None and self.bias.requires_grad:
            ones = gradient.new_ones(len(gradient), 1)
            self._add_grad(self.bias, gradient.T, ones)

    def _add_grad(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """parameter.grad += left @ right, [V_r, N] @ [N, H or 1]"""
        grad = own_grad(parameter)
        if grad is None:
            product = (left @ right).view(_local(parameter).shape)
            set_own_grad(parameter, self._as_dtensor(product, parameter.shape))
            return
        _local(grad).view(left.shape[0], right.shape[1]).addmm_(left, right)

    def scale(self, target: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
        """[N]: what the gradient of each token's loss is multiplied with; 0 for ignored ones."""
        counted = target != self.loss.ignore_index
        num_counted = counted.sum().clamp(min=1).to(dtype)  # of an integer and a float, float32 would be the product
        return counted.to(dtype) / (num_counted * divisor)

    def _here(self, target: Tensor) -> Tensor:
        """[N] bool: whether the target is in this shard. ValueError for one that is in none."""
        ignored = target == self.loss.ignore_index
        bad = ~ignored & ((target < 0) | (target >= self.vocab_size))
        if bad.any():
            raise ValueError(
                f"target {int(target[bad][0])} is neither below the vocabulary size {self.vocab_size} nor the "
                f"ignore_index {self.loss.ignore_index}"
            )
        return ~ignored & (target >= self.start) & (target < self.stop)


@torch.no_grad()
def combine_losses(head: ShardedHead, target: Tensor, results: list[Results]) -> tuple[Tensor, Tensor, Tensor]:
    """(the microbatch's loss, L [N], z [N])"""
    normalisers = torch.stack([one.maxima + one.sums.log() for one in results]).logsumexp(0)
    found = torch.stack([one.targets for one in results]).sum(0)
    counted = target != head.loss.ignore_index
    return torch.where(counted, normalisers - found, 0).sum() / counted.sum(), normalisers, found


class Combined(NamedTuple):
    """What the shards' results give together: the microbatch's loss (not divided), dX [N, H] and L [N]."""

    loss: Tensor
    hidden_grad: Tensor
    normalisers: Tensor


@torch.no_grad()
def combine(head: ShardedHead, target: Tensor, results: list[Results], divisor: float) -> Combined:
    """The loss and the gradient of the hidden states out of the results of all ranks, in their order."""
    loss, normalisers, found = combine_losses(head, target, results)
    counted = target != head.loss.ignore_index
    scale = head.scale(target, divisor, normalisers.dtype)
    total: Any = None
    for one in results:
        part = one.product * ((one.maxima - normalisers).exp() * scale)[:, None]
        total = part if total is None else total.add_(part)
    own = (torch.expm1(found - normalisers) * scale)[:, None]
    for rank, one in enumerate(results):
        start, stop = shard_range(head.vocab_size, head.num_ranks, rank)
        here = counted & (target >= start) & (target < stop)
        total[here] += own[here] * one.rows
    return Combined(loss, total.to(results[0].product.dtype), normalisers)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
