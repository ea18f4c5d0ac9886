"""Vocab-parallel cross-entropy: softmax cross-entropy over logits whose vocabulary dim is split across ranks.

For row n with target y, over the whole vocabulary of V ids, with class weights w (1 by default; W is their sum),
label smoothing a and z-loss coefficient k, from logits x:

    z      = softcap * tanh(logit_scale * x / softcap)      logit_scale * x without softcap
    lse    = log(sum_v exp(z_v))
    p_v    = exp(z_v - lse)
    loss   = (1 - a) w_y (lse - z_y)  +  a / V sum_v w_v (lse - z_v)  +  k lse^2         0 where y is ignore_index

    dz_v   = (gamma + delta) p_v - beta w_v - gamma [v = y]
             gamma = (1 - a) w_y dloss      beta = a / V dloss      delta = (a W / V + 2 k lse) dloss + dlse
    dx_v   = dz_v logit_scale (1 - (z_v / softcap)^2)

Three ops. `stats` reads this rank's logits once and leaves three numbers a row: maximum m of z, sum s of exp(z - m),
and the target's z; with smoothing also the sum of w z, as two float32 numbers. All ranks' numbers travel in the one
collective. `merge` combines them in rank order, so that every rank has the same bits. On one rank CPU's `forward` is
both. `backward` needs no other rank: it reads the logits again, recomputes the exponentials, and writes the gradient in
the logits' dtype. The target's entry is delta p_y + gamma expm1(z_y - lse) - beta w_y: p_y - 1 would cancel where the
model is confident.

What is saved for backward: the logits themselves (no copy), the targets, and lse, 8 bytes a row. Megatron-LM instead
saves a float32 softmax, after three all-reduces; Liger does the same with one fewer read.

lse is float64: it is as large as the largest logit, and rounding it to float32 would put that rounding on every
probability (5e-4 at 1e4).

Note: the gradient in forward. Where one rank holds the whole vocabulary and the loss is reduced to a scalar, an op that
visits every row once can leave the gradient for an upstream of 1 on its way, and spares the second read. Backward hands
that buffer out, once, multiplied by the upstream gradient where that is not 1; from the second time on it runs
`backward`. GPUs only, where the reads are what costs: 1.26 ms in the place of 1.62 on an H200 (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.autograd import not_a_view
from fastpar.comm.ranges import annotate
from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.agreement import AgreedCall, call_of, tensor_checksum
from fastpar.contracts.cross_entropy import (
    LossOptions,
    check_logits_and_target,
    check_options,
    check_reduction,
    check_weight,
    expand_grad,
    mean_denominator,
    reduce_loss,
    shifted,
)
from fastpar.contracts.dtensor_logits import local_tensor, unwrap
from fastpar.contracts.vocab_shard import HEADER_ROWS, Shard, check_headers, check_target_range, exchange, resolve_shard
from fastpar.ops._autograd import apply_plain, first_derivative_only, scale_by_upstream_
from fastpar.ops._backends import kernels_of

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

# ---- launchers -------------------------------------------------------------------------------------------------------

implementation = kernels_of("cross_entropy")
ONE_BLOCK_ROWS = 1 << 16  # which one block of threads counts, and sums the losses of, in microseconds
REDUCTION_CODES = {"none": 0, "sum": 1, "mean": 2}  # enum Reduction of csrc/cross_entropy/arguments.h


class LossProblem(NamedTuple):
    """The arguments of one call, checked, apart from the logits and the targets."""

    shard: Shard
    comm: Communicator | None
    options: LossOptions
    weight: Tensor | None
    weight_sum: Tensor | None
    call: AgreedCall | None = None  # what the other ranks compare with theirs

    @property
    def checksum(self) -> int:
        return 0 if self.call is None else self.call.checksum


class Reduction(NamedTuple):
    """How the rows' losses become the result; a mean divides by `denominator`, or by the number of rows that count."""

    name: str
    denominator: float | Tensor | None
    return_lse: bool

    def divisor(self, target: Tensor, problem: LossProblem, dtype: torch.dtype) -> Tensor | None:
        if self.name != "mean":
            return None
        return mean_denominator(target, problem.weight, problem.options, self.denominator, dtype)


def forward(
    logits: Tensor, target: Tensor, problem: LossProblem, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, lse [N] float64, what the rows' sum was divided by), with one collective if there is a communicator."""
    ops, options, shard = implementation(logits), problem.options, problem.shard
    if problem.comm is None and _has_short_ops(logits, ops):
        return _forward_at_once(ops, logits, target, problem, reduction)
    with annotate("fastpar::cross_entropy"):
        local = ops.stats(
            logits,
            target,
            problem.weight,
            shard.start,
            shard.total,
            options.ignore_index,
            options.smoothing,
            options.softcap,
            options.logit_scale,
            problem.checksum,
        )
        gathered = exchange(local, problem.comm)
        check_headers(gathered, target, options.ignore_index, "target", problem.call)
        loss, lse = ops.merge(
            gathered,
            target.reshape(-1),
            problem.weight,
            problem.weight_sum,
            shard.total,
            options.ignore_index,
            options.label_smoothing,
            options.z_loss,
        )
        divisor = reduction.divisor(target, problem, loss.dtype)
        return reduce_loss(loss, target, reduction.name, divisor), lse, divisor


def _has_short_ops(logits: Tensor, ops: Any) -> bool:
    """One op a direction instead of five: what tiny batches cost is calls. In eager code on CPU."""
    return logits.is_cpu and not torch.compiler.is_compiling() and hasattr(ops, "forward")


def _forward_at_once(
    ops: Any, logits: Tensor, target: Tensor, problem: LossProblem, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor]:
    # The op counts rows itself; weighted means and given denominators are told to it.
    is_counted = reduction.denominator is None and problem.weight is None
    divisor = None if is_counted else reduction.divisor(target, problem, compute_dtype(logits.dtype))
    terms = (problem.weight, problem.weight_sum, divisor, REDUCTION_CODES[reduction.name], *problem.options)
    try:
        out, lse, divisor = ops.forward(logits, target, *terms)
    except RuntimeError:
        check_target_range(target, problem.shard.total, problem.options.ignore_index)  # IndexError, with the position
        raise
    return out if reduction.name != "none" else out.reshape(target.shape), lse, divisor


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _fake_stats(logits: Tensor, target: Tensor, *terms: Any) -> Tensor:
    smoothing = terms[4]
    shape = (target.numel() + HEADER_ROWS, 5 if smoothing else 3)
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype))


torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_stats", _fake_stats)
torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_stats_exp_", _fake_stats)


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_merge")
def _(gathered: Tensor, target: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    rows = target.numel()
    return gathered.new_empty((rows,)), gathered.new_empty((rows,), dtype=torch.float64)


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_backward")
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("fastpar::vocab_parallel_cross_entropy_backward_")
def _(logits: Tensor, *arguments: Any) -> None:
    return None


@torch.library.register_fake("fastpar::cross_entropy_forward")
def _(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype, reduction = target.numel(), compute_dtype(logits.dtype), arguments[3]
    loss = logits.new_empty((rows,) if reduction == REDUCTION_CODES["none"] else (), dtype=dtype)
    return loss, loss.new_empty((rows,), dtype=torch.float64), loss.new_empty(())


@torch.library.register_fake("fastpar::cross_entropy_backward")
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.register_fake("fastpar::cross_entropy_forward_backward_")
def _(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    rows, dtype = target.numel(), compute_dtype(logits.dtype)
    return logits.new_empty((rows,), dtype=dtype), logits.new_empty((rows,), dtype=torch.float64)


@torch.library.register_fake("fastpar::cross_entropy_forward_backward")
def _(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = target.numel(), compute_dtype(logits.dtype)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty((rows,), dtype=dtype), logits.new_empty((rows,), dtype=torch.float64), grad


@torch.library.register_fake("fastpar::cross_entropy_reduced_forward_backward")
def _(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = logits.new_empty((), dtype=compute_dtype(logits.dtype))
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return out, out.new_empty((target.numel(),), dtype=torch.float64), out.new_empty(()), grad


# ---- autograd --------------------------------------------------------------------------------------------------------


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, problem: LossProblem, reduction: Reduction, inplace: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.in_forward, ctx.is_consumed, ctx.inplace = None, False, inplace
        if _writes_gradient_in_forward(logits, problem, reduction, inplace):
            out, lse, divisor, ctx.in_forward = _forward_with_gradient(logits, target, problem, reduction)
        else:
            out, lse, divisor = forward(logits, target, problem, reduction)
        ctx.save_for_backward(logits, target, lse, divisor, problem.weight, problem.weight_sum)
        ctx.where = (problem.shard.start, problem.shard.total, *problem.options)
        ctx.is_reduced = reduction.name != "none"
        # A copy, since lse is saved: what callers write to theirs in place must not reach backward.
        own_lse = lse.to(out.dtype, copy=True).reshape(target.shape) if reduction.return_lse else None
        return not_a_view(out), None if own_lse is None else not_a_view(own_lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.is_consumed:
            raise RuntimeError(
                "this loss was computed with inplace_backward=True: its first backward wrote the gradient over the "
                "logits, so it cannot run a second time. Use inplace_backward=False where backward runs more than once."
            )
        saved = ctx.saved_tensors  # once: checkpoints hand out what they recompute a single time
        if not torch.is_grad_enabled():  # as ever, but for create_graph=True
            return _gradient(ctx, saved, *grads), None, None, None, None
        with torch.no_grad():
            grad = _gradient(ctx, saved, *grads)
        once = ("vocab_parallel_cross_entropy", "torch.nn.functional.cross_entropy", saved[0], *grads)
        return first_derivative_only(grad, *once), None, None, None, None


def _gradient(ctx: Any, saved: Sequence[Any], grad_out: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    logits, target, lse, divisor, weight, weight_sum = saved
    prepared, ctx.in_forward = ctx.in_forward, None
    if prepared is not None and grad_out is not None and grad_lse is None:
        return scale_by_upstream_(prepared, grad_out)
    ops, where = implementation(logits), ctx.where
    is_reduced = ctx.is_reduced and divisor is not None and grad_out is not None and grad_lse is None
    if is_reduced and not ctx.inplace and _has_short_ops(logits, ops):
        grad: Tensor = ops.reduced_backward(logits, lse, target, weight, weight_sum, grad_out, divisor, *where)
        return grad
    dtype = compute_dtype(logits.dtype)
    grad_loss = expand_grad(grad_out, divisor if ctx.is_reduced else None, target, dtype)
    if grad_lse is not None:
        grad_lse = grad_lse.to(dtype).reshape(-1)
    arguments = (lse, target, weight, weight_sum, grad_loss, grad_lse, *where)
    if not ctx.inplace:
        grad = ops.backward(logits, *arguments)
        return grad
    grad = logits.detach()
    ops.backward_(grad, *arguments)
    ctx.is_consumed = True
    # Whoever else saved these logits must not compute with what is in them now.
    torch.autograd.graph.increment_version(logits)
    return grad


def _writes_gradient_in_forward(logits: Tensor, problem: LossProblem, reduction: Reduction, inplace: bool) -> bool:
    """See the module docstring."""
    return (
        logits.is_cuda
        and problem.comm is None
        and reduction.name != "none"
        and not inplace
        and not torch.compiler.is_compiling()
    )


def _forward_with_gradient(
    logits: Tensor, target: Tensor, problem: LossProblem, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`forward`, and the gradient for an upstream of 1."""
    ops, dtype = implementation(logits), compute_dtype(logits.dtype)
    is_counted = reduction.denominator is None and problem.weight is None
    if target.numel() <= ONE_BLOCK_ROWS and hasattr(ops, "reduced_forward_backward"):
        divisor = None if is_counted else reduction.divisor(target, problem, dtype)  # the op counts rows itself
        terms = (problem.weight, problem.weight_sum, divisor, REDUCTION_CODES[reduction.name], *problem.options)
        found: tuple[Tensor, Tensor, Tensor, Tensor] = ops.reduced_forward_backward(logits, target, *terms)
        return found
    one = torch.ones((), dtype=dtype, device=logits.device)
    divisor = reduction.divisor(target, problem, dtype)
    grad_loss = expand_grad(one, divisor, target, dtype)
    weights = problem.weight, problem.weight_sum
    loss, lse, grad = ops.forward_backward(logits, target, *weights, grad_loss, *problem.options)
    return reduce_loss(loss, target, reduction.name, divisor), lse, divisor, grad


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    weight: Tensor | None = None,
    shift: int = 0,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    inplace_backward: bool = False,
    return_lse: bool = False,
) -> Any:
    """Softmax cross-entropy over a vocabulary that is split across the ranks of `group`.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides; or a DTensor,
                                Shard(-1), whose mesh gives `group` and `vocab_range`
        target  [...]           global class ids, int64 or int32, the same on every rank
        out     [...] or []     the loss; float32, or float64 for float64 logits
        lse     [...]           log of the sum of exponentials over the vocabulary, same dtype; differentiable

        forward   one all-gather of 12 bytes a token (20 with smoothing; twice that for float64), and 36 (60) bytes;
                  none if the group is None or one rank
        backward  no collective; the gradient is rounded once, to the logits' dtype

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for logits that hold the whole vocabulary. Pass a
            Communicator made once where calls are small: of anything else every call makes one. Under torch.compile it
            has to be one made outside, and the collective is then torch's functional one, without a deadline.
        vocab_range: (start, end, total) if this rank's columns are [start, end) of `total`. The default is equal
            shards in rank order; shards of unequal sizes must be given. Empty shards are allowed.
        ignore_index: targets with this value have loss 0 and gradient 0, and do not count in a mean.
        label_smoothing: a in [0, 1], over the whole vocabulary whatever the shards are, as torch.nn.functional has it:
            a column masked with -inf makes the loss infinite.
        z_loss: coefficient k >= 0 of lse^2, which keeps the normaliser near 1 (PaLM, arXiv:2204.02311, section 5).
        softcap: bounds |z| (Gemma 2, arXiv:2408.00118), below 2**30; applied after logit_scale.
        logit_scale: factor of the logits, the inverse of a temperature.
        weight: class weights [V] of the whole vocabulary, any floating dtype; has no gradient.
        shift: score position t of the last dim of target against target t + shift; the last `shift` positions are
            ignored. The logits are not copied.
        reduction: "none", "sum", or "mean" over the targets that are not ignored, each counted with its class weight;
            a mean over none of them is 0 (where torch.nn.functional.cross_entropy gives NaN).
        denominator: what a mean divides by instead: a number, or a scalar tensor (which costs no synchronisation), for
            instance the number of tokens of all data-parallel ranks and accumulation steps.
        inplace_backward: write the gradient over the logits instead of into new memory. The logits are destroyed by
            backward, which can then run only once; anything else that saved them for its own backward raises. For
            logits that are an intermediate result. Under torch.compile, which plans memory itself, it has no effect.
        return_lse: return (loss, lse).

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]], target [1]: the ranks send (0, 1, 0)
    and (log 3, 1, log 3); lse = log 4, loss = log(4 / 3), and the gradients are [[0.25]] and [[-0.25]].

    Raises:
        IndexError: a target outside the vocabulary that is not ignore_index; names its position. Raised on every rank,
            after the collective. On CUDA, where looking would need a synchronisation, and in compiled code that row's
            loss is NaN instead.
        ValueError, TypeError: shapes, dtypes, devices, options, vocab_range; shards that do not tile the vocabulary
            (on CPU, after the collective, on every rank).
        RuntimeError: a second backward after inplace_backward=True.
    """
    inplace = inplace_backward and not torch.compiler.is_compiling()
    settings = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    is_whole = group is None and vocab_range is None and weight is None and denominator is None
    if is_whole and type(logits) is type(target) is Tensor and not torch.compiler.is_compiling():
        check_logits_and_target(logits, target)
        problem, way = _whole_problem(logits.shape[-1], reduction, return_lse, *settings)
        return _loss(logits, shifted(target.long(), shift, ignore_index), problem, way, inplace)
    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    target = local_tensor(target, "target")
    check_logits_and_target(logits, target)
    check_reduction(reduction, denominator)
    options = check_options(*settings)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    weight_sum, call = None, None
    if weight is not None:
        weight, weight_sum = check_weight(local_tensor(weight, "weight"), shard.total, logits, options)
    if comm is not None:
        call = call_of(
            comm,
            logits,
            "vocab_parallel_cross_entropy",
            **options._asdict(),
            weight=tensor_checksum(weight),
            reduction=reduction,
            denominator=tensor_checksum(denominator),
        )
    problem = LossProblem(shard, comm, options, weight, weight_sum, call)
    way = Reduction(reduction, denominator, return_lse)
    return _loss(logits, shifted(target.long(), shift, ignore_index), problem, way, inplace)


@functools.lru_cache(maxsize=64, typed=True)
def _whole_problem(size: int, reduction: str, return_lse: bool, *settings: Any) -> tuple[LossProblem, Reduction]:
    """Of the whole vocabulary on one rank, each class counted alike: checked once for all calls with these options."""
    check_reduction(reduction, None)
    options = check_options(*settings)
    problem = LossProblem(resolve_shard(size, None, None), None, options, None, None)
    return problem, Reduction(reduction, None, return_lse)


def _loss(
    logits: Tensor, target: Tensor, problem: LossProblem, way: Reduction, inplace: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        loss, lse = apply_plain(_VocabParallelCrossEntropy, logits, target, problem, way, inplace)
    else:
        loss, lse, _ = forward(logits, target, problem, way)
        lse = lse.to(loss.dtype).reshape(target.shape) if way.return_lse else lse
    return (loss, lse) if way.return_lse else loss
