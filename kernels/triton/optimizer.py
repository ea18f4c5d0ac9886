"""Optimizer steps for CUDA tensors in Triton; not measured yet. The algebra is in fastpar.ops.optimizer.

The functions have the signatures of the compiled ops. Tensors whose dtypes and alignment agree are one launch, in which
a program updates a chunk of 2048 elements of one tensor and finds that tensor by bisection in a table. The table lies
in device memory, since Triton's kernels cannot take one in their parameters. It holds addresses, is looked up by them,
and is uploaded where they are new, from pinned memory, without waiting for the device.

The kernels' multiply-adds are all written out, and Triton is told to fuse no others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastpar.kernels import optimizer_kernels as kernels
from fastpar.kernels.launch import launch
from fastpar.kernels.optimizer_kernels import optimizer_kernel

BLOCKS = 8  # of 256 elements, in a chunk
WARP_SIZE = 64 if torch.version.hip else 32
CHUNK = BLOCKS * kernels.STATE_BLOCK.value
MAX_TABLES = 64
ALIGNMENT = 16  # bytes
_TL_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


def num_warps(*dtypes: torch.dtype | None) -> int:
    """Warps of a program whose threads have 16 bytes of the widest dtype each: 4 elements of float32, else 8.

    With 8 elements of float32 for a thread, tensors of other dtypes get another layout, and are exchanged through
    shared memory; registers (144 with all of AdamW's operands) leave room for one program on a multiprocessor.
    """
    return CHUNK // (WARP_SIZE * (4 if torch.float32 in dtypes else 8))


# ---- tables ----------------------------------------------------------------------------------------------------------


class OptimizerGroup(NamedTuple):
    """Tensors of one launch: rows [begin, begin + num_tensors) of the table."""

    begin: int
    num_tensors: int
    num_chunks: int
    param: torch.dtype
    grad: torch.dtype
    output: torch.dtype | None
    is_aligned: bool


class TensorTable(NamedTuple):
    rows: Tensor  # [num_tensors, FIELDS] int64 on the device
    groups: list[OptimizerGroup]
    staging: Tensor  # what `rows` is a copy of; a captured graph reads it again
    uploaded: Any = None  # the event after the copy; None on the CPU, and in a capture


class Tables:
    """The tables of the last calls, by what they hold."""

    def __init__(self) -> None:
        self._tables: dict[Any, TensorTable] = {}  # the last used is the last
        self._captured: list[TensorTable] = []  # read by graphs whenever those are replayed

    def find(self, entries: list[tuple[Any, ...]], device: torch.device) -> TensorTable:
        """`entries`: per tensor (param dtype, grad dtype, output dtype or None, fields but FIRST_CHUNK)."""
        key = (device, tuple(entries))
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        table = self._tables.pop(key, None)
        if table is None:
            table = make_table(entries, device)
        elif table.uploaded is not None and not is_capturing:
            # On the current stream, which need not be the one that copied. A capture begins with a synchronisation.
            table.uploaded.wait()
        if is_capturing:
            self._captured.append(table)
        if is_capturing and table.uploaded is None:
            return table  # its copy runs when the graph is replayed: nobody else may use it
        self._tables[key] = table
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return table


_tables = Tables()


def make_table(entries: list[tuple[Any, ...]], device: torch.device) -> TensorTable:
    of_kind: dict[Any, list[tuple[int, ...]]] = {}
    for *dtypes, fields in entries:
        if fields[kernels.COUNT.value] > 0:
            addresses = fields[: kernels.COUNT.value]
            is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
            of_kind.setdefault((*dtypes, is_aligned), []).append(fields)
    rows: list[tuple[int, ...]] = []
    groups = []
    for kind, members in of_kind.items():
        begin, chunks = len(rows), 0
        for fields in members:
            rows.append((*fields, chunks))
            chunks += -(-fields[kernels.COUNT.value] // CHUNK)
        groups.append(OptimizerGroup(begin, len(members), chunks, *kind))
    staging = torch.tensor(rows, dtype=torch.int64).view(len(rows), kernels.FIELDS.value)
    if device.type != "cuda":
        return TensorTable(staging.to(device), groups, staging)
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
        pinned = staging.pin_memory()
        if not is_capturing:
            # A second block, which goes back to torch's pool at once: a capture that makes such a table later finds it
            # there, and need not allocate, which CUDA forbids it.
            staging.pin_memory()
        staging = pinned
        rows_there = staging.to(device, non_blocking=True)
        uploaded = None if is_capturing else torch.cuda.current_stream(device).record_event()
    return TensorTable(rows_there, groups, staging, uploaded)


def _entries(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    scales: list[list[Tensor]],
    outputs: list[Tensor],
    remainders: list[Tensor],
    output_of: list[int],
    rounding: list[int],
) -> list[tuple[Any, ...]]:
    output_at: dict[int, Tensor] = dict(zip(output_of, outputs, strict=True))
    entries = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        output = output_at.get(i)
        addresses = [param.data_ptr(), grad.data_ptr(), 0, 0, 0, 0, 0, 0]
        for k, (of_state, of_scale) in enumerate(zip(states, scales, strict=True)):
            addresses[kernels.STATE0.value + k] = of_state[i].data_ptr()
            if of_scale:
                addresses[kernels.SCALE0.value + k] = of_scale[i].data_ptr()
        if output is not None:
            addresses[kernels.OUTPUT.value] = output.data_ptr()
        if remainders:
            addresses[kernels.REMAINDER.value] = remainders[i].data_ptr()
        key, first = (rounding[1 + 2 * i], rounding[2 + 2 * i]) if rounding else (0, 0)
        fields = (*addresses, param.numel(), key, first)
        entries.append((param.dtype, grad.dtype, None if output is None else output.dtype, fields))
    return entries


def _step(
    rule: int,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    scales: list[list[Tensor]],
    outputs: list[Tensor],
    remainders: list[Tensor],
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
    output_of: list[int],
    rounding: list[int],
    factor: float,
    numbers: tuple[float, ...],
    *,
    corrections: Tensor | None = None,
    nesterov: bool = False,
    first: bool = False,
) -> None:
    if not params:
        return
    entries = _entries(params, grads, states, scales, outputs, remainders, output_of, rounding)
    table = _tables.find(entries, params[0].device)
    state = states[0][0].dtype if states else None
    for group in table.groups:
        launch(
            optimizer_kernel,
            group.num_chunks,
            params[0].device,
            table.rows[group.begin :],
            group.num_tensors,
            float(factor),
            grad_factor,
            found_inf,
            corrections,
            rounding[0] if rounding else 0,
            tuple(map(float, numbers)),  # a weight_decay of 1 would be another kernel, with that 1 folded in
            RULE=rule,
            NESTEROV=nesterov,
            FIRST=first,
            STOCHASTIC=bool(rounding),
            PARAM_DTYPE=_TL_DTYPE[group.param],
            SPLIT=bool(remainders),
            GRAD_DTYPE=_TL_DTYPE[group.grad],
            STATE=_TL_DTYPE[state or torch.float32],
            OUTPUT_DTYPE=tl.float32 if group.output is None else _TL_DTYPE[group.output],
            HAS_OUTPUT=group.output is not None,
            ALIGNED=group.is_aligned,
            BLOCKS=BLOCKS,
            num_warps=num_warps(group.param, group.grad, state, group.output),
            enable_fp_fusion=False,
        )


# ---- the ops ---------------------------------------------------------------------------------------------------------


def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    outputs: list[Tensor],
    remainders: list[Tensor],
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
    step_tensor: Tensor | None,
    output_of: list[int],
    rounding: list[int],
    factor: float,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The op fastpar::adamw_step."""
    corrections, inverse_root, step_size = None, 0.0, 0.0
    if step_tensor is None:
        inverse_root, step_size = 1.0 / math.sqrt(1.0 - beta2**step), lr / (1.0 - beta1**step)
    else:
        count = step_tensor.double().view(())
        corrections = torch.stack([(1.0 - beta2**count).sqrt().reciprocal(), lr / (1.0 - beta1**count)]).float()
    numbers = (1.0 - lr * weight_decay, 1.0 - beta1, beta2, 1.0 - beta2, inverse_root, eps, step_size)
    lists = (params, grads, [exp_avgs, exp_avg_sqs], [exp_avg_scales, exp_avg_sq_scales], outputs, remainders)
    _step(
        kernels.ADAMW.value,
        *lists,
        grad_factor,
        found_inf,
        output_of,
        rounding,
        factor,
        numbers,
        corrections=corrections,
    )


def sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    momentum_scales: list[Tensor],
    outputs: list[Tensor],
    remainders: list[Tensor],
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
    output_of: list[int],
    rounding: list[int],
    factor: float,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    """The op fastpar::sgd_step."""
    numbers = (lr, momentum, 1.0 - dampening, weight_decay)
    is_plain = momentum == 0.0
    states, scales = ([], []) if is_plain else ([momentum_buffers], [momentum_scales])
    rule = kernels.PLAIN_SGD.value if is_plain else kernels.SGD.value
    lists = (params, grads, states, scales, outputs, remainders)
    scalars = (grad_factor, found_inf, output_of, rounding, factor, numbers)
    _step(rule, *lists, *scalars, nesterov=nesterov, first=first)


def lion_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_scales: list[Tensor],
    outputs: list[Tensor],
    remainders: list[Tensor],
    grad_factor: Tensor | None,
    found_inf: Tensor | None,
    output_of: list[int],
    rounding: list[int],
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """The op fastpar::lion_step."""
    numbers = (1.0 - lr * weight_decay, beta1, 1.0 - beta1, 1.0 - beta2, lr)
    lists = (params, grads, [exp_avgs], [exp_avg_scales], outputs, remainders)
    _step(kernels.LION.value, *lists, grad_factor, found_inf, output_of, rounding, factor, numbers)
