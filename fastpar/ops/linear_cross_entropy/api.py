"""Linear cross-entropy: the output projection and the cross-entropy over a sharded vocabulary as one op, which holds
the logits of one chunk of tokens at a time.

    x = hidden @ weight.T + bias                 [N, V]: never whole
    loss, lse, dx as in fastpar.ops.cross_entropy

    dgrad  dhidden = dx @ weight                 summed over the ranks
    wgrad  dweight = dx.T @ hidden               dbias = column sums of dx

Memory is that of hidden, weight and their gradients, a float32 sum of dweight, and one chunk of logits, where the plain
computation holds the logits and their gradient for all tokens.

Note: when gradients are computed. For a scalar loss (mean, sum) forward computes the gradients of all inputs chunk by
chunk while it has the logits, three GEMMs (6 N K V floating-point operations); backward multiplies them by the upstream
scalar and hands them out, once. For everything else the gradient of a row is not known in forward: reduction "none", a
returned lse (whose gradient may come), float16 (whose gradients must be rounded after the loss scale, which arrives
from upstream), and every backward after the first. Then forward keeps lse, 8 bytes a token, and backward computes the
logits again: four GEMMs (8 N K V). A weight gradient put off by `wgrad_store` costs that fourth GEMM as well, in its
own pass.

Note: several ranks. Each rank has the logits of its own columns. The statistics travel while the GEMM for dhidden runs
on exponentials that are not normalised yet (`row_factors`); dhidden is summed while the GEMM for dweight
runs. Only softcap together with label smoothing has to wait for the statistics. A collective per chunk and direction:

    forward   per chunk one all-gather of 12 bytes a token (20 with smoothing), and 36 (60) bytes
    dgrad     per chunk one all-reduce of [n, K] in hidden's dtype, in the pass that computes it
    sequence_parallel: per chunk and pass one all-gather of [n, K] in, and a reduce-scatter instead of the all-reduce

Note: rounding. dx is rounded to hidden's dtype once, as input of the GEMMs. With several ranks, the exponentials and
the rows that they are scaled with are rounded instead, and so is each rank's share of dhidden before it is summed.
dweight is summed over the chunks in float32 and rounded once (what bfloat16 on CPU adds to that is said in
fastpar.ops._weight_grad), so its last bits depend on how many chunks there are; they do not depend on the number of
threads beyond what torch's GEMMs do, and nothing is added in an order that varies from run to run.

Sources: the chunked loss with gradients in forward is Liger-Kernel's fused linear cross-entropy; see also Wijmans et
al. 2024 (arXiv:2411.09009) and Yeung et al. 2024 (arXiv:2411.05288).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.agreement import call_of, tensor_checksum
from fastpar.contracts.cross_entropy import (
    check_options,
    check_reduction,
    check_weight,
    mean_denominator,
    reduce_loss,
    shifted,
)
from fastpar.contracts.dtensor_logits import check_same_group, local_tensor
from fastpar.contracts.linear_cross_entropy import check_projection
from fastpar.contracts.vocab_shard import resolve_shard
from fastpar.ops.cross_entropy import LossProblem
from fastpar.ops.linear_cross_entropy.autograd import DeferredLossGrads, LinearCrossEntropy, LinearLossCall
from fastpar.ops.linear_cross_entropy.passes import (
    LinearLossGrads,
    LinearLossInputs,
    LinearLossLayout,
    LinearLossWants,
    gradients,
    losses,
)
from fastpar.ops.linear_cross_entropy.torch_ops import compiled_backward, compiled_forward
from fastpar.ops.weight_grad_store.store import WeightGradStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastpar.comm import GroupLike


class LinearLossOptions(TypedDict, total=False):
    """The options of `linear_cross_entropy` that its two gradients take as well."""

    bias: Tensor | None
    group: GroupLike
    vocab_range: tuple[int, int, int] | None
    sequence_parallel: bool
    sequence_dim: int
    shift: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    class_weight: Tensor | None
    chunk_bytes: int | None


# ---- arguments -------------------------------------------------------------------------------------------------------


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    every_row: bool,
    bias: Tensor | None = None,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    shift: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> tuple[LinearLossInputs, LossProblem, LinearLossLayout]:
    """The arguments checked, the hidden states as a matrix, the targets shifted."""
    if hasattr(hidden, "device_mesh"):
        raise TypeError(
            "hidden must be a plain tensor (pass hidden.to_local(), and sequence_parallel=True where it fits)"
        )
    weight, bias, group, vocab_range = _local_rows(weight, bias, group, vocab_range)
    target = local_tensor(target, "target")
    hidden, weight, bias = _autocast(hidden, weight, bias)
    options = check_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    if chunk_bytes is not None and (
        isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0
    ):
        raise ValueError(f"chunk_bytes must be None or an int > 0, got {chunk_bytes!r}")
    comm = communicator(group)
    dim = check_projection(hidden, weight, bias, target, comm, sequence_parallel, sequence_dim)
    shard = resolve_shard(weight.shape[0], vocab_range, comm)
    class_weight, weight_sum = check_weight(class_weight, shard.total, hidden, options)
    target = shifted(target.long(), shift, ignore_index)
    call = None
    if comm is not None:
        call = call_of(
            comm,
            hidden,
            "linear_cross_entropy",
            **options._asdict(),
            class_weight=tensor_checksum(class_weight),
            sequence_parallel=sequence_parallel,
            bias=bias is not None,
        )
    problem = LossProblem(shard, comm, options, class_weight, weight_sum, call)
    inputs = LinearLossInputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias, target)
    return inputs, problem, LinearLossLayout(dim, chunk_bytes, every_row)


def _local_rows(
    weight: Tensor, bias: Tensor | None, group: GroupLike, vocab_range: tuple[int, int, int] | None
) -> tuple[Tensor, Tensor | None, GroupLike, tuple[int, int, int] | None]:
    """This rank's rows of a weight that is a DTensor, and what they are of the vocabulary."""
    if not hasattr(weight, "placements"):
        return weight, bias, group, vocab_range
    from torch.distributed.tensor import DTensor, Shard

    from fastpar.comm import shard_range

    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    if tuple(weight.placements) != (Shard(0),):
        raise ValueError(
            f"a weight that is a DTensor must be split over the vocabulary on a 1-D mesh, (Shard(dim=0),), got "
            f"{tuple(weight.placements)}"
        )
    if bias is not None and (not isinstance(bias, DTensor) or tuple(bias.placements) != (Shard(0),)):
        raise ValueError("weight is a DTensor, so bias must be one with the same placements, (Shard(dim=0),)")
    if group is not None:
        check_same_group(group, mesh, 0, "weight")
    if vocab_range is None:
        total = weight.shape[0]
        vocab_range = (*shard_range(total, mesh.size(), mesh.get_local_rank()), total)
    local_bias = bias.to_local() if isinstance(bias, DTensor) else None
    return weight.to_local(), local_bias, mesh if group is None else group, vocab_range


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """In the dtype that torch.nn.functional.linear would compute in."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = -2,
    shift: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    chunk_bytes: int | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> Any:
    """Cross-entropy of the logits hidden @ weight.T + bias, which are computed a chunk of tokens at a time.

        hidden  [..., K]      the same on every rank, or with sequence_parallel this rank's tokens; float32, bfloat16,
                              float16 or float64
        weight  [V_local, K]  this rank's rows of the output projection, in hidden's dtype (torch.autocast converts, as
                              for torch.nn.functional.linear), or a DTensor with Shard(0)
        target  [...]         global class ids of all tokens, int64 or int32, the same on every rank
        bias    [V_local]
        out     [...] or []   the loss; float32, or float64 for float64 hidden; the same bits on every rank
        lse     [...]         log of the sum of exponentials over the vocabulary, same dtype; differentiable

        forward  x = hidden @ weight.T + bias; loss as fastpar.ops.vocab_parallel_cross_entropy
        dgrad    dhidden = dx @ weight, summed over the ranks: hidden needs no `copy_to` before it
        wgrad    dweight = dx.T @ hidden, dbias = dx.sum(0); local

    Collectives, floating-point operations, memory and rounding are in the module docstring. A gradient that no input
    asks for is not computed: a frozen weight or frozen hidden states save their GEMM. On CPU tokens whose target is
    ignored are left out before the GEMMs, unless return_lse asks for their lse; on CUDA, where counting them would be a
    synchronisation, they cost as much as the others.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for a weight that holds the whole vocabulary. Under
            torch.compile it has to be a Communicator made outside.
        vocab_range: (start, end, total) if this rank's rows of the weight are [start, end) of `total`. The default is
            equal shards in rank order, or what the DTensor says. Empty shards are allowed.
        sequence_parallel: hidden holds this rank's part of the tokens along `sequence_dim`, by the rule of
            `fastpar.comm.shard_sizes`; target holds all. Its gradient is this rank's part as well.
        sequence_dim: a dim of hidden; -2 is the one before the features: dim 1 of [B, S_r, K], dim 0 of [N_r, K].
        shift: score position t of the last dim of target against target t + shift; the last `shift` positions are
            ignored. hidden is not copied, but for the rows of one chunk.
        ignore_index, label_smoothing, z_loss, softcap, logit_scale: as for vocab_parallel_cross_entropy.
        class_weight: class weights [V] of the whole vocabulary, any floating dtype; has no gradient.
        reduction: "none", "sum", or "mean" over the targets that are not ignored, each counted with its class weight; a
            mean over none of them is 0.
        denominator: what a mean divides by instead: a number, or a scalar tensor (which costs no synchronisation).
        return_lse: return (loss, lse).
        chunk_bytes: budget for one chunk's logits, by default 64 MiB on CPU and 512 MiB on CUDA, for an even share of
            the vocabulary; a chunk has at least 128 rows on CPU and 1024 on CUDA whatever the budget. By default all
            rows are one chunk on CUDA where that needs no more memory: without a group, the float32 sum of a 16-bit
            weight's gradient over several chunks is spared. Another number of chunks changes the order in which dweight
            is summed, and so its last bits.
        wgrad_store: leave the gradients of weight and bias to this store (see `WeightGradStore`); backward computes
            that of hidden only. With sequence_parallel an entry gathers the hidden states again, so all ranks must run
            theirs in the same order. Not under torch.compile. Within `WeightGradStore.deferring()` without this, the
            gradients are computed as ever and held back: putting them off costs a GEMM, as the module docstring says.

    Worked example: hidden [[1.0]], weight [[0.0], [log 3]], target [1]: the logits are (0, log 3), lse is log 4, the
    loss log(4 / 3); dx = (0.25, -0.25), so dhidden = -0.25 log 3 and dweight = [[0.25], [-0.25]].

    Raises:
        IndexError: a target outside the vocabulary that is not ignore_index; names its position among the shifted
            targets. Raised on every rank. On CUDA that row's loss is NaN instead.
        ValueError, TypeError: shapes, dtypes, devices, options, vocab_range; shards that do not tile the vocabulary
            (on CPU, after the first collective, on every rank).
        CommError: as `Communicator` raises it.
    """
    check_reduction(reduction, denominator)
    if wgrad_store is not None and torch.compiler.is_compiling():
        raise ValueError("wgrad_store puts off work in eager code; leave it None under torch.compile")
    inputs, problem, layout = _prepare(
        hidden,
        weight,
        target,
        every_row=return_lse,
        bias=bias,
        group=group,
        vocab_range=vocab_range,
        sequence_parallel=sequence_parallel,
        sequence_dim=sequence_dim,
        shift=shift,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        class_weight=class_weight,
        chunk_bytes=chunk_bytes,
    )
    divisor = None
    if reduction == "mean":
        dtype = compute_dtype(inputs.hidden.dtype)
        divisor = mean_denominator(inputs.target, problem.weight, problem.options, denominator, dtype)
    needs_grad = any(x is not None and x.requires_grad for x in inputs[:3])
    if not (torch.is_grad_enabled() and needs_grad):
        if torch.compiler.is_compiling():
            rows, lse, _ = compiled_forward(inputs, problem, layout, None, LinearLossWants(False, False, False))
        else:
            rows, lse = losses(inputs, problem, layout)
        out = reduce_loss(rows, inputs.target, reduction, divisor)
        return (out, lse.to(out.dtype).reshape(target.shape)) if return_lse else out
    projection, offset, deferred, anchor = inputs.weight, inputs.bias, None, None
    if wgrad_store is not None:
        deferred = DeferredLossGrads(wgrad_store, projection, offset)
        projection, offset = projection.detach(), None if offset is None else offset.detach()
        anchor = hidden.new_empty(0).requires_grad_()  # backward runs even where hidden needs no gradient
    call = LinearLossCall(problem, layout, reduction, return_lse, deferred)
    arguments = (inputs.hidden, projection, offset, anchor, inputs.target, divisor, call)
    loss, lse_out = LinearCrossEntropy.apply(*arguments)
    return (loss, lse_out) if return_lse else loss


@checked()
def linear_cross_entropy_dgrad(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    *,
    grad_lse: Tensor | None = None,
    **options: Unpack[LinearLossOptions],
) -> Tensor:
    """Gradient by hidden alone, of sum(grad_loss * loss) + sum(grad_lse * lse); two GEMMs.

        hidden, weight, target, options   as `linear_cross_entropy`
        lse        [...]  as it returned it; float64 keeps more digits where logits are beyond about 100
        grad_loss  [...]  gradient of every token's loss
        grad_lse   [...]  gradient of lse
        out        like hidden; the sum over the ranks: per chunk one all-reduce (sequence_parallel: an all-gather and
                   a reduce-scatter)

    No autograd history. Raises what `linear_cross_entropy` raises for its arguments.
    """
    grads = _gradients(hidden, weight, target, lse, grad_loss, grad_lse, LinearLossWants(True, False, False), options)
    assert grads.hidden is not None
    return grads.hidden.view(hidden.shape)


@checked()
def linear_cross_entropy_wgrad(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    *,
    grad_lse: Tensor | None = None,
    **options: Unpack[LinearLossOptions],
) -> tuple[Tensor, Tensor | None]:
    """Gradients by weight [V_local, K] and bias [V_local] (None without one); two GEMMs.

    Arguments as `linear_cross_entropy_dgrad`. No collective, but for sequence_parallel, which gathers the hidden states
    chunk by chunk. No autograd history.
    """
    wants = LinearLossWants(False, True, options.get("bias") is not None)
    grads = _gradients(hidden, weight, target, lse, grad_loss, grad_lse, wants, options)
    assert grads.weight is not None
    return grads.weight, grads.bias


@torch.no_grad()
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    wants: LinearLossWants,
    options: LinearLossOptions,
) -> LinearLossGrads:
    for name, value in (("lse", lse), ("grad_loss", grad_loss), ("grad_lse", grad_lse)):
        if value is not None and value.shape != target.shape:
            raise ValueError(f"{name} must have target's shape {tuple(target.shape)}, got {tuple(value.shape)}")
    inputs, problem, layout = _prepare(hidden, weight, target, every_row=grad_lse is not None, **options)
    dtype = compute_dtype(inputs.hidden.dtype)
    rows = (lse.double().reshape(-1), grad_loss.to(dtype).reshape(-1))
    upstream = None if grad_lse is None else grad_lse.to(dtype).reshape(-1)
    run = compiled_backward if torch.compiler.is_compiling() else gradients
    return run(inputs, problem, layout, *rows, upstream, wants)
