"""Optimizer steps for CUDA tensors in Triton. The algebra is in fastpar.ops.optimizer.

The functions have the signatures of the compiled ops. Tensors whose dtypes and alignment agree are one launch, in which
a program updates a chunk of 1024 elements of one tensor. Two tables lie in device memory, since Triton's kernels cannot
take one in their parameters: which tensor a program updates, and the tensors' addresses. So a program waits for memory
three times, for either and for its operands, whatever the number of tensors. A table is uploaded from pinned memory,
without waiting for the device: the first where sizes are new, the second where addresses are.

The kernels' multiply-adds are all written out, and Triton is told to fuse no others.

Note: what was measured. AdamW on 2e8 elements in 50 tensors, the kernel alone (a replayed CUDA graph), on an H200 with
torch 2.11 and Triton 3.6; ms:

                              as it is   torch fused   with other constants
    float32                      1.341         1.588   1.360 with 4 chunks to a program, 1.397 with 16
    bfloat16                     0.674         1.015   0.740 with 1 chunk; 8 elements to a thread: 0.688, 0.676 with 4
    bfloat16, stochastic         0.721                 0.918 with 1 chunk; 8 elements to a thread: 1.018, 0.868 with 4

That is 4.18 and 4.15 TB/s. Chunks of 512 elements are as fast, those of 2048 slower by 2 %. Of a kernel for AdamW alone
(float32 1.362; bfloat16 0.766, 0.690 with 8 chunks) no variant is faster than what is here by more than 0.2 %: loading
the next chunk's operands ahead (1.352 to 1.387, 0.765 to 0.789), Triton's pipelining (1.385, 0.695), hints to the
caches (1.356 to 1.378, 0.736 to 0.766), a search of the table by 32 entries at a time in place of `owners` (1.343,
0.719), at most 32 registers for a thread (1.338, 1.128).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from fastpar.kernels import optimizer_kernels as kernels
from fastpar.kernels.kept_tables import KeptTables, TableUpload, let_read
from fastpar.kernels.launch import launch
from fastpar.kernels.optimizer_kernels import optimizer_kernel

BLOCKS = 4  # of 256 elements, in a chunk
ELEMENTS = 4  # of a thread, in a chunk
STEPS = 1  # chunks that a program updates, one after the other, where an operand is float32
NARROW_STEPS = 4  # and where none is, and a chunk is half as many bytes
WARP_SIZE = 64 if torch.version.hip else 32
CHUNK = BLOCKS * kernels.STATE_BLOCK.value
MAX_TABLES = 64
_UINT64 = 2**64 - 1
ALIGNMENT = 16  # bytes
_TL_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


def num_warps() -> int:
    """Warps of a program: a thread has 16 bytes of a float32 operand, 8 of a bfloat16 one.

    With 8 elements of float32 for a thread, tensors of other dtypes get another layout, and are exchanged through
    shared memory; and there are registers for half as many threads on a multiprocessor.
    """
    return CHUNK // (WARP_SIZE * ELEMENTS)


def num_steps(*dtypes: torch.dtype | None) -> int:
    """Chunks of a program, of operands of these dtypes."""
    return STEPS if torch.float32 in dtypes else NARROW_STEPS


# ---- tables ----------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The tensors of a call, by which its table is looked up: the same ones again are a comparison of tuples."""

    device: torch.device
    dtypes: tuple[tuple[torch.dtype, ...], ...]  # of params, grads, outputs
    output_of: tuple[int, ...]  # which parameters the outputs are of
    addresses: tuple[tuple[int, ...], ...]  # by field, of every tensor or of none (of outputs: of those there are)
    counts: tuple[int, ...]
    rounding: tuple[int, ...]  # per tensor its key and its first element's index, or nothing
    state: torch.dtype | None = None


class OptimizerGroup(NamedTuple):
    """Tensors of one launch: rows from `begin` on of the table."""

    begin: int
    owners: TableUpload  # [programs] int32: which of the group's tensors a program updates
    programs: int
    param: torch.dtype
    grad: torch.dtype
    output: torch.dtype | None
    is_aligned: bool
    steps: int


class TensorTable(NamedTuple):
    rows: Tensor  # [num_tensors, FIELDS] int64 on the device
    groups: list[OptimizerGroup]


class Tables:
    """The tables of the last calls, by what they hold."""

    def __init__(self) -> None:
        self._tables = KeptTables(MAX_TABLES)
        self._owners = KeptTables(MAX_TABLES)  # by numbers of programs, which stay when gradients move

    def find(self, columns: Columns) -> TensorTable:
        table: TensorTable = self._tables.find(columns, columns.device, lambda: self._make(columns))
        for group in table.groups:
            let_read(group.owners)  # which this table has kept, and the stream may be another one than then
        return table

    def _make(self, columns: Columns) -> tuple[Tensor, Callable[[TableUpload], TensorTable]]:
        rows: list[tuple[int, ...]] = []
        groups = []
        for (param, grad, output, is_aligned), members in _rows_by_kind(columns).items():
            steps = num_steps(param, grad, output, columns.state)
            programs = [-(-fields[kernels.COUNT.value] // (CHUNK * steps)) for fields in members]
            owners = self._owners_of(columns.device, tuple(programs))
            groups.append(OptimizerGroup(len(rows), owners, sum(programs), param, grad, output, is_aligned, steps))
            first = 0
            for fields, count in zip(members, programs, strict=True):
                rows.append((*fields, first))
                first += count
        numbers = torch.tensor(rows, dtype=torch.int64).view(len(rows), kernels.FIELDS.value)
        return numbers, lambda table: TensorTable(table.there, groups)

    def _owners_of(self, device: torch.device, programs: tuple[int, ...]) -> TableUpload:
        def make() -> tuple[Tensor, Callable[[TableUpload], TableUpload]]:
            of_tensors = torch.arange(len(programs), dtype=torch.int32)
            return of_tensors.repeat_interleave(torch.tensor(programs)), lambda table: table

        return cast(TableUpload, self._owners.find(programs, device, make))


_tables = Tables()


def _rows_by_kind(columns: Columns) -> dict[Any, list[tuple[int, ...]]]:
    """The fields but FIRST_PROGRAM, by (dtypes of parameter, gradient and output, whether all is aligned)."""
    count = len(columns.counts)
    fields = [list(column) or [0] * count for column in columns.addresses]
    outputs: list[torch.dtype | None] = [None] * count
    fields[kernels.OUTPUT.value] = [0] * count
    of_outputs = zip(columns.output_of, columns.addresses[kernels.OUTPUT.value], columns.dtypes[2], strict=True)
    for i, address, dtype in of_outputs:
        fields[kernels.OUTPUT.value][i], outputs[i] = address, dtype
    keys, firsts = columns.rounding[::2] or (0,) * count, columns.rounding[1::2] or (0,) * count
    rows: dict[Any, list[tuple[int, ...]]] = {}
    params, grads, _ = columns.dtypes
    for *addresses, numel, key, first, param, grad, output in zip(
        *fields, columns.counts, keys, firsts, params, grads, outputs, strict=True
    ):
        if numel > 0:
            is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
            rows.setdefault((param, grad, output, is_aligned), []).append((*addresses, numel, key, first))
    return rows


def _addresses(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(map(Tensor.data_ptr, tensors))


# Of the tensors of a call, in the order of the fields: dtypes and addresses, where somebody has asked for them before.
Seen = tuple[tuple[torch.dtype, ...], tuple[int, ...]]


def _dtypes(tensors: list[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([x.dtype for x in tensors])


class OptimizerTensors(NamedTuple):
    """The lists of a call, by parameter; states and their scales by kind."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    scales: list[list[Tensor]]
    outputs: list[Tensor]
    remainders: list[Tensor]


class StepNumbers(NamedTuple):
    """What the kernel reads beside them; `numbers` are those of its rule."""

    grad_factor: Tensor | None
    found_inf: Tensor | None
    output_of: list[int]
    rounding: list[int]
    factor: float
    numbers: tuple[float, ...]


def _columns(tensors: OptimizerTensors, output_of: list[int], rounding: list[int], seen: Seen | None) -> Columns:
    params, grads, states, scales, outputs, remainders = tensors
    state0, state1 = (*states, [], [])[:2]
    scale0, scale1 = (*scales, [], [])[:2]
    lists = (params, grads, state0, state1, scale0, scale1, outputs, remainders)  # in the order of the fields
    if seen is None:
        dtypes = [_dtypes(params), _dtypes(grads), _dtypes(outputs)]
        addresses = tuple(map(_addresses, lists))
    else:
        of_fields, end = [], 0
        for column in lists:
            of_fields.append(slice(end, end := end + len(column)))
        dtypes = [seen[0][of_fields[field]] for field in (0, 1, kernels.OUTPUT.value)]
        addresses = tuple([seen[1][of_field] for of_field in of_fields])
    return Columns(
        params[0].device,
        (dtypes[0], dtypes[1], dtypes[2]),
        tuple(output_of),
        addresses,
        tuple(map(Tensor.numel, params)),
        tuple(rounding[1:]),
        states[0][0].dtype if states else None,
    )


def _step(
    rule: int,
    tensors: OptimizerTensors,
    scalars: StepNumbers,
    *,
    corrections: Tensor | None = None,
    nesterov: bool = False,
    first: bool = False,
    seen: Seen | None = None,
) -> None:
    if not tensors.params:
        return
    grad_factor, found_inf, output_of, rounding, factor, numbers = scalars
    table = _tables.find(_columns(tensors, output_of, rounding, seen))
    state = tensors.states[0][0].dtype if tensors.states else None
    for group in table.groups:
        launch(
            optimizer_kernel,
            group.programs,
            tensors.params[0].device,
            table.rows[group.begin :] if group.begin else table.rows,
            group.owners.there,
            float(factor),
            grad_factor,
            found_inf,
            corrections,
            _splitmix(rounding[0]) if rounding else 0,
            tuple(map(float, numbers)),  # a weight_decay of 1 would be another kernel, with that 1 folded in
            RULE=rule,
            NESTEROV=nesterov,
            FIRST=first,
            STOCHASTIC=bool(rounding),
            PARAM_DTYPE=_TL_DTYPE[group.param],
            SPLIT=bool(tensors.remainders),
            GRAD_DTYPE=_TL_DTYPE[group.grad],
            STATE=_TL_DTYPE[state or torch.float32],
            OUTPUT_DTYPE=tl.float32 if group.output is None else _TL_DTYPE[group.output],
            HAS_OUTPUT=group.output is not None,
            ALIGNED=group.is_aligned,
            BLOCKS=BLOCKS,
            STEPS=group.steps,
            num_warps=num_warps(),
            enable_fp_fusion=False,
        )


def _splitmix(seed: int) -> int:
    """The kernel's function of that name, as a signed number."""
    z = (seed + 0x9E3779B97F4A7C15) & _UINT64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _UINT64
    z ^= z >> 31
    return z - (z >> 63 << 64)


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
    *,
    seen: Seen | None = None,
) -> None:
    """The op fastpar::adamw_step."""
    corrections, inverse_root, step_size = None, 0.0, 0.0
    if step_tensor is None:
        inverse_root, step_size = 1.0 / math.sqrt(1.0 - beta2**step), lr / (1.0 - beta1**step)
    else:
        count = step_tensor.double().view(())
        corrections = torch.stack([(1.0 - beta2**count).sqrt().reciprocal(), lr / (1.0 - beta1**count)]).float()
    numbers = (1.0 - lr * weight_decay, 1.0 - beta1, beta2, 1.0 - beta2, inverse_root, eps, step_size)
    states, scales = [exp_avgs, exp_avg_sqs], [exp_avg_scales, exp_avg_sq_scales]
    tensors = OptimizerTensors(params, grads, states, scales, outputs, remainders)
    scalars = StepNumbers(grad_factor, found_inf, output_of, rounding, factor, numbers)
    _step(kernels.ADAMW.value, tensors, scalars, corrections=corrections, seen=seen)


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
    *,
    seen: Seen | None = None,
) -> None:
    """The op fastpar::sgd_step."""
    numbers = (lr, momentum, 1.0 - dampening, weight_decay)
    is_plain = momentum == 0.0
    states, scales = ([], []) if is_plain else ([momentum_buffers], [momentum_scales])
    rule = kernels.PLAIN_SGD.value if is_plain else kernels.SGD.value
    tensors = OptimizerTensors(params, grads, states, scales, outputs, remainders)
    scalars = StepNumbers(grad_factor, found_inf, output_of, rounding, factor, numbers)
    _step(rule, tensors, scalars, nesterov=nesterov, first=first, seen=seen)


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
    *,
    seen: Seen | None = None,
) -> None:
    """The op fastpar::lion_step."""
    numbers = (1.0 - lr * weight_decay, beta1, 1.0 - beta1, 1.0 - beta2, lr)
    tensors = OptimizerTensors(params, grads, [exp_avgs], [exp_avg_scales], outputs, remainders)
    scalars = StepNumbers(grad_factor, found_inf, output_of, rounding, factor, numbers)
    _step(kernels.LION.value, tensors, scalars, seen=seen)
