"""The passes of linear_cross_entropy over its chunks of rows: loss alone, loss with gradients, gradients from lse.

All three hold the logits of one chunk, in one buffer. Collectives are launched as soon as what they send exists and
waited for when what they bring is needed:

    losses                the statistics of a chunk travel while the next chunk's logits are computed
    losses_and_gradients  they travel while E @ W is computed (`row_factors`), the gradient of the chunk's
                          hidden states while that of the weight is
    gradients             no statistics; the hidden states' gradients as above
    sequence-parallel     the next chunk's hidden states arrive during this one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Pending
from fastpar.comm.ranges import annotate
from fastpar.contracts import compute_dtype
from fastpar.contracts.vocab_shard import check_headers, check_target_range
from fastpar.ops import cross_entropy as family
from fastpar.ops._buffers import new_buffer
from fastpar.ops._weight_grad import WeightGrad, sum_bytes, weighted_sum
from fastpar.ops.cross_entropy import LossProblem
from fastpar.ops.linear_cross_entropy.row_chunks import RowChunk, put_rows, split_rows, split_sequence, take_rows
from fastpar.ops.linear_cross_entropy.row_factors import RowFactors, add_target_rows, row_factors, target_rows


class LinearLossInputs(NamedTuple):
    """hidden [n, K] (this rank's tokens), weight [V_local, K], bias [V_local], target [...] (all tokens, shifted)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor


class LinearLossLayout(NamedTuple):
    """sequence_dim  dim of `target` along which the ranks hold parts of the hidden states; None: each holds all
    every_row     ignored rows count as well, for their lse"""

    sequence_dim: int | None
    chunk_bytes: int | None
    every_row: bool


class LinearLossWants(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class LinearLossGrads(NamedTuple):
    """Gradients by hidden [n, K], weight [V_local, K] and bias [V_local] in their dtypes; None: not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def losses(inputs: LinearLossInputs, problem: LossProblem, layout: LinearLossLayout) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N] float64); rows that were left out have 0 in both."""
    with annotate("fastpar::linear_cross_entropy::losses"), _own_dtypes(inputs):
        run = _LossPass(inputs, problem, layout)
        loss, lse = run.new_rows()
        previous: tuple[RowChunk, Tensor, Callable[[], Tensor]] | None = None
        for chunk, x in run.hidden_chunks():
            ids = run.ids(chunk)
            gathered = run.exchange(run.stats(run.project(x), ids))
            if previous is not None:
                run.merge(*previous, loss, lse)
            previous = chunk, ids, gathered
        if previous is not None:
            run.merge(*previous, loss, lse)
        return loss, lse


def losses_and_gradients(
    inputs: LinearLossInputs, problem: LossProblem, layout: LinearLossLayout, grad_loss: Tensor, wants: LinearLossWants
) -> tuple[Tensor, Tensor, LinearLossGrads]:
    """(loss, lse, gradients of sum_n grad_loss[n] loss[n])."""
    with annotate("fastpar::linear_cross_entropy::losses_and_gradients"), _own_dtypes(inputs):
        run = _LossPass(inputs, problem, layout, wants)
        loss, lse = run.new_rows()
        if problem.comm is None:
            if inputs.target.device.type == "cpu":
                check_target_range(inputs.target, problem.shard.total, problem.options.ignore_index)
            sums: _GradSums = _GradSums(run, wants, corrected=False)
            step = _one_rank_step
        elif problem.options.softcap != 0.0 and problem.options.smoothing:
            sums, step = _GradSums(run, wants, corrected=False), _normalised_step
        else:
            sums, step = _UnnormalisedGradSums(run, wants), _unnormalised_step
        for chunk, x in run.hidden_chunks():
            ids = run.ids(chunk)
            chunk_loss, chunk_lse = step(run, sums, chunk, x, ids, take_rows(grad_loss, chunk.rows))
            put_rows(loss, chunk.rows, chunk_loss)
            put_rows(lse, chunk.rows, chunk_lse)
        return loss, lse, sums.result()


def gradients(
    inputs: LinearLossInputs,
    problem: LossProblem,
    layout: LinearLossLayout,
    lse: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    wants: LinearLossWants,
) -> LinearLossGrads:
    """Gradients of sum_n grad_loss[n] loss[n] + grad_lse[n] lse[n]; the logits are computed again."""
    with annotate("fastpar::linear_cross_entropy::gradients"), _own_dtypes(inputs):
        run = _LossPass(inputs, problem, layout, wants)
        sums = _GradSums(run, wants, corrected=False)
        for chunk, x in run.hidden_chunks():
            rows = chunk.rows
            logits = run.project(x)
            chunk_grad_lse = None if grad_lse is None else take_rows(grad_lse, rows)
            run.backward_(logits, run.ids(chunk), take_rows(lse, rows), take_rows(grad_loss, rows), chunk_grad_lse)
            sums.add(logits, x, chunk)
        return sums.result()


# ---- one chunk of losses_and_gradients -------------------------------------------------------------------------------


def _one_rank_step(
    run: _LossPass, sums: Any, chunk: RowChunk, x: Tensor, ids: Tensor, grad_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole vocabulary is here: the logits turn into their gradient in one visit."""
    problem, logits = run.problem, run.project(x)
    terms = (problem.weight, problem.weight_sum, grad_loss, *problem.options)
    loss, lse = run.ops.forward_backward_(logits, ids, *terms)
    sums.add(logits, x, chunk)
    return loss, lse


def _normalised_step(
    run: _LossPass, sums: Any, chunk: RowChunk, x: Tensor, ids: Tensor, grad_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Waits for the statistics first: softcap with label smoothing."""
    logits = run.project(x)
    gathered = run.exchange(run.stats(logits, ids))()
    run.check(gathered)
    loss, lse = run.merged(gathered, ids)
    run.backward_(logits, ids, lse, grad_loss, None)
    sums.add(logits, x, chunk)
    return loss, lse


def _unnormalised_step(
    run: _LossPass, sums: Any, chunk: RowChunk, x: Tensor, ids: Tensor, grad_loss: Tensor
) -> tuple[Tensor, Tensor]:
    """The statistics travel while E @ W is computed."""
    exponentials = run.project(x)
    local = run.stats(exponentials, ids, run.ops.stats_exp_)
    gathered = run.exchange(local)
    product = sums.product(exponentials)
    everyone = gathered()
    run.check(everyone)
    loss, lse = run.merged(everyone, ids)
    sums.add_unnormalised(exponentials, product, x, chunk, row_factors(local, lse, ids, grad_loss, run.problem))
    return loss, lse


# ---- what every pass needs -------------------------------------------------------------------------------------------


def _own_dtypes(inputs: LinearLossInputs) -> AbstractContextManager[object]:
    """Nothing here is for torch.autocast to convert: the inputs have its dtype, the sums must not."""
    kind = inputs.hidden.device.type
    # Making and entering torch.autocast costs as much as a small GEMM.
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _LossPass:
    """One pass: the chunks, the buffer for their logits, and the ops with the arguments that stay."""

    def __init__(
        self,
        inputs: LinearLossInputs,
        problem: LossProblem,
        layout: LinearLossLayout,
        wants: LinearLossWants | None = None,
    ) -> None:
        self.inputs, self.problem = inputs, problem
        self.flat_target = inputs.target.reshape(-1)
        self.dtype = compute_dtype(inputs.hidden.dtype)
        self.ops = family.implementation(inputs.hidden)
        comm, target = problem.comm, inputs.target
        # Every rank must make the same chunks, so they are sized for an even share of the vocabulary.
        share = -(-problem.shard.total // (1 if comm is None else comm.size))
        budget = (share * inputs.hidden.element_size(), layout.chunk_bytes)
        is_cpu = target.device.type == "cpu"
        keep = target != problem.options.ignore_index if is_cpu and not layout.every_row else None
        self.is_sharded = layout.sequence_dim is not None and comm is not None
        if keep is not None and bool(keep.all()):
            keep = None
        if layout.sequence_dim is None or comm is None:
            spared = sum_bytes(inputs.weight) if comm is None and wants is not None and wants.weight else 0
            self.chunks = split_rows(target, keep, *budget, spared)
        else:
            self.chunks = split_sequence(
                target, keep, *budget, dim=layout.sequence_dim, ranks=comm.size, rank=comm.rank
            )
        self.covers_all = keep is None
        vocab = inputs.weight.shape[0]
        self._buffer = new_buffer(inputs.hidden, (max((c.size for c in self.chunks), default=0) * vocab,))

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Zeros for loss and lse of every row."""
        loss = self.inputs.hidden.new_zeros(self.flat_target.numel(), dtype=self.dtype)
        return loss, loss.new_zeros(loss.shape, dtype=torch.float64)

    def ids(self, chunk: RowChunk) -> Tensor:
        return take_rows(self.flat_target, chunk.rows)

    def hidden_chunks(self) -> Iterator[tuple[RowChunk, Tensor]]:
        """Every chunk with the hidden states [size, K] of its rows."""
        hidden, comm = self.inputs.hidden, self.problem.comm
        if not self.is_sharded or comm is None:
            for chunk in self.chunks:
                yield chunk, take_rows(hidden, chunk.local)
            return
        pending: Pending[Tensor] | None = None
        for index, chunk in enumerate(self.chunks):
            if pending is None:
                pending = comm.collectives("split_phase").all_gather(
                    take_rows(hidden, chunk.local), dim=0, sizes=chunk.parts
                )
            x = pending.wait()
            if index + 1 < len(self.chunks):
                following = self.chunks[index + 1]
                pending = comm.collectives("split_phase").all_gather(
                    take_rows(hidden, following.local), dim=0, sizes=following.parts
                )
            yield chunk, x

    def project(self, x: Tensor) -> Tensor:
        """The logits of x, in the buffer: what the last call returned is overwritten."""
        weight, bias = self.inputs.weight, self.inputs.bias
        logits = self._buffer[: x.shape[0] * weight.shape[0]].view(x.shape[0], weight.shape[0])
        if bias is None:
            return torch.mm(x, weight.t(), out=logits)
        return torch.addmm(bias, x, weight.t(), out=logits)

    def stats(self, logits: Tensor, ids: Tensor, op: Callable[..., Tensor] | None = None) -> Tensor:
        shard, options = self.problem.shard, self.problem.options
        return (self.ops.stats if op is None else op)(
            logits,
            ids,
            self.problem.weight,
            shard.start,
            shard.total,
            options.ignore_index,
            options.smoothing,
            options.softcap,
            options.logit_scale,
            self.problem.checksum,
        )

    def exchange(self, local: Tensor) -> Callable[[], Tensor]:
        """Launch the gather of every rank's statistics; call the result to wait for them."""
        comm = self.problem.comm
        if comm is None:
            return lambda: local.unsqueeze(0)
        pending = comm.collectives("split_phase").all_gather(local, dim=0)
        size = comm.size
        return lambda: pending.wait().view(size, *local.shape)

    def check(self, gathered: Tensor) -> None:
        """Raise, on every rank, what the ranks' headers say is wrong; the position is one in all of the target."""
        check_headers(gathered, self.inputs.target, self.problem.options.ignore_index, "target", self.problem.call)

    def merged(self, gathered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        problem, options = self.problem, self.problem.options
        terms = (problem.shard.total, options.ignore_index, options.label_smoothing, options.z_loss)
        loss, lse = self.ops.merge(gathered, ids, problem.weight, problem.weight_sum, *terms)
        return loss, lse

    def merge(self, chunk: RowChunk, ids: Tensor, gathered: Callable[[], Tensor], loss: Tensor, lse: Tensor) -> None:
        everyone = gathered()
        self.check(everyone)
        chunk_loss, chunk_lse = self.merged(everyone, ids)
        put_rows(loss, chunk.rows, chunk_loss)
        put_rows(lse, chunk.rows, chunk_lse)

    def backward_(self, logits: Tensor, ids: Tensor, lse: Tensor, grad_loss: Tensor, grad_lse: Tensor | None) -> None:
        problem = self.problem
        terms = (problem.weight, problem.weight_sum, grad_loss, grad_lse)
        where = (problem.shard.start, problem.shard.total)
        self.ops.backward_(logits, lse, ids, *terms, *where, *problem.options)


class _GradSums:
    """The gradients, growing chunk by chunk."""

    def __init__(self, run: _LossPass, wants: LinearLossWants, *, corrected: bool) -> None:
        self.run, self.wants, inputs = run, wants, run.inputs
        self.hidden = new_buffer(inputs.hidden, inputs.hidden.shape) if wants.hidden else None
        if self.hidden is not None and not run.covers_all:
            self.hidden.zero_()
        self.weight = WeightGrad(inputs.weight, len(run.chunks), exact=corrected) if wants.weight else None
        self.bias = inputs.weight.new_zeros(inputs.weight.shape[0], dtype=run.dtype) if wants.bias else None

    def add(self, dz: Tensor, x: Tensor, chunk: RowChunk) -> None:
        """A chunk's gradient of the logits [n, V_local], normalised."""
        receive = self.send(self.product(dz), chunk)
        if self.weight is not None:
            self.weight.add(dz, x)
        if self.bias is not None:
            self.bias += weighted_sum(dz, None)
        receive()

    def product(self, dz: Tensor) -> Tensor | None:
        """dz @ W [n, K], this rank's share of the gradient by the hidden states."""
        return None if self.hidden is None else torch.mm(dz, self.run.inputs.weight)

    def send(self, product: Tensor | None, chunk: RowChunk) -> Callable[[], None]:
        """Launch the sum of all ranks' shares; call the result to wait for it and put it in its rows."""
        hidden, comm = self.hidden, self.run.problem.comm
        if hidden is None or product is None:
            return lambda: None
        if comm is None:
            put_rows(hidden, chunk.local, product)
            return lambda: None
        if chunk.parts is None:
            pending = comm.collectives("split_phase").all_reduce(product)
        else:
            pending = comm.collectives("split_phase").reduce_scatter(product, dim=0, sizes=chunk.parts)
        return lambda: put_rows(hidden, chunk.local, pending.wait())

    def result(self) -> LinearLossGrads:
        weight, bias = self.weight, self.bias
        return LinearLossGrads(
            self.hidden,
            None if weight is None else weight.result(),
            None if bias is None else bias.to(self.run.inputs.weight.dtype),
        )


class _UnnormalisedGradSums(_GradSums):
    """The same from exponentials whose normaliser arrives after their product with the weight was computed."""

    def __init__(self, run: _LossPass, wants: LinearLossWants) -> None:
        super().__init__(run, wants, corrected=True)
        self._class_weight: Tensor | None = None  # this rank's
        self._weight_sum: Tensor | None = None  # w @ W [K], of label smoothing's term
        self._hidden_sum: Tensor | None = None  # spread @ X [K]
        self._spread_sum: Tensor | None = None
        if run.problem.options.smoothing:
            shard, weights = run.problem.shard, run.problem.weight
            self._class_weight = None if weights is None else weights[shard.start : shard.start + shard.size]
            if wants.hidden:
                self._weight_sum = weighted_sum(run.inputs.weight, self._class_weight)
            self._hidden_sum = run.inputs.weight.new_zeros(run.inputs.weight.shape[1], dtype=run.dtype)
            self._spread_sum = self._hidden_sum.new_zeros(())

    def add_unnormalised(
        self, exponentials: Tensor, product: Tensor | None, x: Tensor, chunk: RowChunk, factors: RowFactors
    ) -> None:
        receive = self.send(self._normalised(product, factors), chunk)
        dtype = self.run.dtype
        scale = factors.scale.to(dtype)
        rows, column, peak = target_rows(factors)
        peak = peak.to(dtype)
        has_columns = self.run.inputs.weight.shape[0] > 0
        if self.weight is not None:
            self.weight.add(exponentials, (x * scale.unsqueeze(1)).to(x.dtype))
            if has_columns:
                assert self.weight.total is not None
                add_target_rows(self.weight.total, column, take_rows(x, rows) * peak.unsqueeze(1))
        if self.bias is not None:
            self.bias += weighted_sum(exponentials, scale)
            if has_columns:
                add_target_rows(self.bias, column, peak)
        if factors.spread is not None:
            assert self._hidden_sum is not None
            assert self._spread_sum is not None
            self._hidden_sum += weighted_sum(x, factors.spread)
            self._spread_sum += factors.spread.sum()
        receive()

    def _normalised(self, product: Tensor | None, factors: RowFactors) -> Tensor | None:
        """E @ W turned into this rank's share of the gradient, rounded to the weight's dtype."""
        if product is None:
            return None
        weight, dtype = self.run.inputs.weight, self.run.dtype
        share = product * factors.scale.to(dtype).unsqueeze(1)
        if factors.spread is not None:
            assert self._weight_sum is not None
            share.addr_(factors.spread.to(dtype), self._weight_sum, alpha=-1.0)
        if weight.shape[0] > 0:
            rows, column, peak = target_rows(factors)
            share[rows] += weight[column] * peak.to(dtype).unsqueeze(1)
        return share.to(weight.dtype)

    def result(self) -> LinearLossGrads:
        if self._hidden_sum is not None and self._spread_sum is not None:
            weights = self._class_weight
            if weights is None:
                weights = self._hidden_sum.new_ones(self.run.inputs.weight.shape[0])
            if self.weight is not None and self.weight.total is not None:
                self.weight.total.addr_(weights, self._hidden_sum, alpha=-1.0)
            if self.bias is not None:
                self.bias -= weights * self._spread_sum
        return super().result()
