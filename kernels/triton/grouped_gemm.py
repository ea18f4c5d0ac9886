"""Products with several experts' weights on GPUs, in Triton: rows gathered where they lie, nothing permuted.

    grouped_linear          out[i] = x[index[i]] @ weight[e].T + bias[e]
    grouped_linear_act      hidden the same, and act = activation(hidden)      the first product of an expert
    grouped_linear_dact     dhidden, act again, dots for row weights           dgrad of the second and the activation
    grouped_wgrad           dweight[e] = dout[rows of e].T @ x[rows of e]
    grouped_bias_grad       dbias[e] = sum of dout[rows of e]

e is the expert of row i: rows splits[e] to splits[e + 1]. The splits lie on the device, and no call reads them on the
host, so a step can be captured in a CUDA graph and replayed with another routing. A dgrad is `grouped_linear` with
the weight transposed, which is a matter of strides. The features of a token's experts are summed by
`fastpar.kernels.moe_rows.sum_rows` from the plain rows of the second product: adding them in its epilogue would take
atomics, whose order changes from run to run.

`grouped_gemm_kernels.py` and `grouped_act_kernels.py` have the kernels. Blocks are chosen by a table, from shapes
alone. Gathering rows in the first operand is ScatterMoE's idea (arXiv:2403.08245), the backward that keeps x and hidden
only SonicMoE's (arXiv:2512.14080).

Timed on an H200 as the experts of moe_mlp.py: docs/benchmarks.md. The persistent grid against one program a tile, whole
forward by CUDA graph, bfloat16 (TFLOP/s), equal bits:

    128 experts of 2048 x 768, 32768 tokens to 8      4.56 ms (542)    5.26 (471)    with backward 17.8    18.7
    the same, 4096 tokens                             0.889   (348)    0.867 (357)                 3.48    3.43
    8 experts of 4096 x 14336, 8192 tokens to 2       8.50    (679)    9.56  (604)                38.3    39.0

Of the two products alone, 3.24 and 1.77 ms before: gate and up as one wide product 3.0; persistent 2.88 and 1.56; with
TMA descriptors as well 2.85 and 1.53, which strides and an allocator for descriptors are not worth.

Compiled for sm_90 by Triton 3.7.1, bfloat16, 8 warps, blocks of 128 x 256 x 64 (two of
128 columns for gate and up, 128 columns with the gradient of the activation); registers a thread at most:

    grouped_gemm_kernel         231     0 spills
    grouped_gemm_act_kernel     255     0 spills
    grouped_gemm_dact_kernel    171     0 spills
    grouped_wgrad_kernel        214     0 spills

Triton 3.6.0 for the same, without a walk: gate and up that alternate 241 (0 spills), as one product of features as they
lie; picked apart by strides they spilled 464 to 1928 bytes. An erf of a whole tile spilled: geglu 32 bytes, 96 with a
bias, gelu 248; of a half and of a quarter at a time 0, in 242 and 229 registers at most. As persistent ones, not
measured: clamped_swiglu 0 spills either way, alternating swiglu 0, geglu 24 to 248, gelu 8 with a bias.

Where gate and up alternate, the gradient of the activation goes by quarters of its columns: halves spilled 96 to 492
bytes.

Tried, and slower: the other products of backward on a persistent grid. Forward and backward of the first row above, one
H200 (rows in bench/results): 17.70 ms; with the gradient of the activation on it 17.96, by quarters of the columns, in
191 to 255 registers; with the weight gradients on it 20.66, in a written-out loop over tiles and rows at once, in 176
to 234. Nothing spilled. In a loop that Triton flattens weight gradients took 254 registers and had no pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import grouped_act_kernels as act_kernels
from fastpar.kernels import grouped_gemm_kernels as kernels
from fastpar.kernels.launch import cdiv, next_power_of_2
from fastpar.kernels.launch import launch_named as launch

GROUP = 8  # tiles of rows that share the columns of a weight
TILES = 64  # entries of the table of tiles that one program writes
GATED = ("swiglu", "geglu", "clamped_swiglu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GroupedGemmConfig(NamedTuple):
    """Rows, columns and terms of a block, warps of a program, stages of the loads' pipeline; whether as many programs
    as are resident do all of a product of forward or of `grouped_linear` (`Note: tiles`)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    persistent: bool = False


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _resident(device: torch.device) -> int:
    """Persistent programs: each takes more than half of a multiprocessor's registers. Three in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def configuration(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device, *, sums: int = 1
) -> GroupedGemmConfig:
    """The configuration for about `rows` rows an expert and `cols` columns; `sums` tiles of it in one program."""
    if device.type == "cpu":
        return GroupedGemmConfig(16, 16 if cols <= 16 else 32, 32, 4, 1)
    if dtype == torch.float32:
        return GroupedGemmConfig(64, 64 // sums, 32, 4, 2 if torch.version.hip else 3)
    if torch.version.hip:
        return GroupedGemmConfig(64 if rows <= 64 else 128, 64 if cols <= 64 else 128 // sums, 64, 8, 2)
    if rows <= 64:
        return GroupedGemmConfig(64, 64 if cols <= 64 else 128 // sums, 64, 4, 4)
    block_n = 64 if cols <= 64 else 128 if cols <= 128 else 256
    # One H200, E128 H2048 I768, CUDA graphs: 13 % faster with 2048 rows an expert, 3 % slower with 256.
    if block_n == 256 and rows >= 512 and _is_hopper(device):
        return GroupedGemmConfig(128, 256 // sums, 64, 8, 3, persistent=True)
    return GroupedGemmConfig(128, block_n // sums if block_n > 64 else 64, 64, 8 if block_n == 256 else 4, 4)


def _one_tile_each(config: GroupedGemmConfig) -> GroupedGemmConfig:
    """The configuration for kernels that would spill, or be slower, as persistent ones."""
    return config._replace(num_stages=4, persistent=False) if config.persistent else config


def dact_configuration(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> GroupedGemmConfig:
    """The same for the gradient of the activation."""
    return _one_tile_each(configuration(rows, cols, dtype, device, sums=2))


def wgrad_configuration(
    features: int, terms: int, dtype: torch.dtype, device: torch.device, *, gathers: bool
) -> GroupedGemmConfig:
    """The same for gradients [features, terms] of weights. Loads through an index wait for that of the index, which
    takes two of the pipeline's stages: six leave blocks of three under way."""
    config = _one_tile_each(configuration(features, terms, dtype, device))
    return config._replace(num_stages=6) if gathers and config.num_stages == 4 else config


class RowGroups:
    """Which rows belong to which expert, and the tables of tiles that follow from it.

    splits    int32 or int64 [E + 1] on the device, or numbers: rows splits[e] to splits[e + 1] are those of expert e
    num_rows  at least splits[E]: rows of what is computed
    """

    def __init__(self, splits: Tensor | Sequence[int], num_rows: int, device: torch.device) -> None:
        self.splits = torch.as_tensor(splits, device=device)
        self.num_rows, self.num_experts = num_rows, self.splits.shape[0] - 1
        self._tiles: dict[int, Tensor] = {}

    @property
    def rows_per_expert(self) -> int:
        """What an expert has on average, if all of `num_rows` are in use."""
        return -(-self.num_rows // max(self.num_experts, 1))

    def tiles(self, block_m: int) -> Tensor:
        """int32 [num_tiles, 4]: `Note: tiles` of grouped_gemm_kernels.py."""
        if block_m not in self._tiles:
            count = min(-(-self.num_rows // block_m) + self.num_experts, self.num_rows)
            tiles = torch.empty((count, 4), dtype=torch.int32, device=self.splits.device)
            launch(kernels.tile_table_kernel, cdiv(count, TILES), tiles.device, {
                "splits": self.splits, "tiles": tiles, "num_experts": self.num_experts, "num_tiles": count,
                "BLOCK_M": block_m, "EXPERTS": next_power_of_2(self.num_experts), "TILES": TILES,
            })  # fmt: skip
            self._tiles[block_m] = tiles
        return self._tiles[block_m]


# ---- launchers -------------------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """x [n, K] with contiguous rows."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _check(x: Tensor, weight: Tensor, groups: RowGroups, index: Tensor | None, terms: int) -> None:
    """ValueError or TypeError for what the kernels do not take."""
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise TypeError(f"rows and weights must both be bfloat16, float16 or float32, not {x.dtype} and {weight.dtype}")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != terms:
        raise ValueError(
            f"rows {tuple(x.shape)} do not fit weights {tuple(weight.shape)}: they have to have {terms} features"
        )
    if weight.shape[0] != groups.num_experts:
        raise ValueError(f"there are weights of {weight.shape[0]} experts, but splits of {groups.num_experts}")
    rows = (x if index is None else index).shape[0]
    if rows != groups.num_rows:
        raise ValueError(f"there are {rows} rows, but the splits are those of {groups.num_rows}")


def _product(x: Tensor, weight: Tensor, cols: int, groups: RowGroups, config: GroupedGemmConfig) -> dict[str, Any]:
    """What all products over features are told: of rows x [.., K], weight [E, >= cols, K] and the tiles."""
    terms, tiles = x.shape[1], groups.tiles(config.block_m)
    stride_e, stride_n, stride_k = weight.stride()
    return {
        "weight": weight, "stride_e": stride_e, "stride_n": stride_n, "stride_k": stride_k,
        "tiles": tiles, "N": cols, "K": terms, "GROUP": GROUP,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "EVEN_N": cols % config.block_n == 0, "EVEN_K": terms % config.block_k == 0, "PRECISION": "ieee",
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def _walks(cols: int, terms: int, config: GroupedGemmConfig, spills: bool = False) -> GroupedGemmConfig:
    """The chosen blocks, with a program for each tile where masks or an epilogue would make a persistent one spill, or
    where nobody has measured one."""
    even = terms > 0 and cols % config.block_n == 0 and terms % config.block_k == 0
    return config if even and not spills else _one_tile_each(config)


def _programs(groups: RowGroups, cols: int, config: GroupedGemmConfig) -> int:
    most = groups.tiles(config.block_m).shape[0] * cdiv(cols, config.block_n)
    return min(most, _resident(groups.splits.device)) if config.persistent else most


class _Halves(NamedTuple):
    """Where gate and up lie along the features of the first product, of `features` each."""

    gated: bool
    features: int
    step: int  # columns from one feature of the gate to the next
    second: int  # columns from a feature of the gate to that of up

    @classmethod
    def of(cls, total: int, activation: str, interleaved: bool) -> _Halves:
        if activation not in GATED:
            return cls(False, total, 1, 0)
        return cls(True, total // 2, 2, 1) if interleaved else cls(True, total // 2, 1, total // 2)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    groups: RowGroups,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    scale: Tensor | None = None,
    transposed: bool = False,
    out: Tensor | None = None,
    config: GroupedGemmConfig | None = None,
) -> Tensor:
    """out[i] = scale[i] * x[index[i]] @ weight[e].T + bias[e].

    x       [N, K], or with an index [T, K]      weight  [E, F, K], transposed: [E, K, F]; any strides
    index   [N] int64 or int32; -1: zeros        bias    [E, F]
    scale   [N] float32                          out     [N, F] in the dtype of x; rows past splits[E] are not written

    dgrad   dx[i] = dout[i] @ weight[e]: the same with `transposed` turned over
    """
    weight = weight.transpose(1, 2) if transposed else weight
    _check(x, weight, groups, index, weight.shape[2])
    x, cols = _rows(x), weight.shape[1]
    out = x.new_empty((groups.num_rows, cols)) if out is None else out
    if out.numel() == 0:
        return out
    config = config or _walks(cols, x.shape[1], configuration(groups.rows_per_expert, cols, x.dtype, x.device))
    launch(kernels.grouped_gemm_kernel, _programs(groups, cols, config), x.device, {
        "x": x, "stride_x": x.stride(0), "index": index, "bias": None if bias is None else bias.contiguous(),
        "scale": scale, "out": out, "PERSISTENT": config.persistent and x.shape[1] > 0,
        **_product(x, weight, cols, groups, config),
    })  # fmt: skip
    return out


def grouped_linear_act(
    x: Tensor,
    weight: Tensor,
    groups: RowGroups,
    bias: Tensor | None = None,
    *,
    activation: str,
    interleaved: bool = False,
    limit: float = 7.0,
    alpha: float = 1.702,
    index: Tensor | None = None,
    scale: Tensor | None = None,
    row_weights: Tensor | None = None,
    transposed: bool = False,
    config: GroupedGemmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden, act): `grouped_linear` of the first weight, and the activation of it times `row_weights`.

    x       [N, H] or [T, H]             weight  [E, 2I, H] ([E, I, H] without a gate), transposed: [E, H, 2I]
    hidden  [N, 2I] or [N, I]            act     [N, I]

    Gate and up come out of one pass over x; the activation is that of the hidden features as they are rounded.
    """
    weight = weight.transpose(1, 2) if transposed else weight
    _check(x, weight, groups, index, weight.shape[2])
    x, total = _rows(x), weight.shape[1]
    halves = _Halves.of(total, activation, interleaved)
    hidden, act = x.new_empty((groups.num_rows, total)), x.new_empty((groups.num_rows, halves.features))
    if act.numel() == 0:
        return hidden, act
    cols = halves.features
    if config is None:
        config = configuration(groups.rows_per_expert, cols, x.dtype, x.device, sums=2 if halves.gated else 1)
        config = _walks(cols, x.shape[1], config, spills=activation != "swiglu" or interleaved)
    launch(act_kernels.grouped_gemm_act_kernel, _programs(groups, cols, config), x.device, {
        "x": x, "stride_x": x.stride(0), "index": index, "second": halves.second * weight.stride(1),
        "bias": None if bias is None else bias.contiguous(), "scale": scale, "row_weights": row_weights,
        "hidden": hidden, "act": act, "stride_hidden": total, "limit": limit, "alpha": alpha,
        "ACTIVATION": activation, "GATED": halves.gated, "INTERLEAVED": halves.step == 2,
        "PERSISTENT": config.persistent and x.shape[1] > 0, **_product(x, weight, cols, groups, config),
    })  # fmt: skip
    return hidden, act


def grouped_linear_dact(
    dout: Tensor,
    weight: Tensor,
    groups: RowGroups,
    hidden: Tensor,
    *,
    activation: str,
    interleaved: bool = False,
    limit: float = 7.0,
    alpha: float = 1.702,
    index: Tensor | None = None,
    row_weights: Tensor | None = None,
    transposed: bool = False,
    config: GroupedGemmConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dhidden, act, dots): the gradient of the hidden features, and what other gradients need of the activation.

    dout    [N, H], or with an index [T, H]      weight  [E, H, I], the second one; transposed: [E, I, H]
    hidden  [N, 2I] or [N, I]

    with p[i] = dout[index[i]] @ weight[e]:
    dhidden [N, 2I] or [N, I]   row_weights[i] * activation'(hidden[i]) applied to p[i]
    act     [N, I]              row_weights[i] * activation(hidden[i])
    dots    [N] float32         <p[i], activation(hidden[i])>: the gradient of row_weights[i], less <dout, bias>

    So weights that come in on the activation and ones that come in on the result have the same backward, and neither
    needs the results of the forward.
    """
    weight = weight if transposed else weight.transpose(1, 2)
    _check(dout, weight, groups, index, weight.shape[2])
    dout, hidden = _rows(dout), hidden.contiguous()
    halves = _Halves.of(hidden.shape[1], activation, interleaved)
    cols = halves.features
    if weight.shape[1] != cols:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not fit weights of {weight.shape[1]} features with {activation}"
        )
    dhidden, act = torch.empty_like(hidden), hidden.new_empty((groups.num_rows, cols))
    if act.numel() == 0:
        return dhidden, act, hidden.new_zeros(groups.num_rows, dtype=torch.float32)
    config = config or dact_configuration(groups.rows_per_expert, cols, dout.dtype, dout.device)
    config = config._replace(persistent=False)  # a program for each tile, whatever was given
    dots = hidden.new_empty((cdiv(cols, config.block_n), groups.num_rows), dtype=torch.float32)
    launch(act_kernels.grouped_gemm_dact_kernel, _programs(groups, cols, config), dout.device, {
        "dout": dout, "stride_dout": dout.stride(0), "index": index, "row_weights": row_weights, "hidden": hidden,
        "dhidden": dhidden, "act": act, "dots": dots, "stride_hidden": hidden.shape[1], "step": halves.step,
        "second_hidden": halves.second, "limit": limit, "alpha": alpha, "num_rows": groups.num_rows,
        "ACTIVATION": activation, "GATED": halves.gated, "QUARTERS": interleaved,
        **_product(dout, weight, cols, groups, config),
    })  # fmt: skip
    return dhidden, act, dots.sum(0)


def grouped_wgrad(
    left: Tensor,
    right: Tensor,
    groups: RowGroups,
    *,
    left_index: Tensor | None = None,
    right_index: Tensor | None = None,
    factor: Tensor | None = None,
    config: GroupedGemmConfig | None = None,
) -> Tensor:
    """[E, F, K]: factor * left[rows of e].T @ right[rows of e]; exact zeros for an expert without rows.

    left   [N, F], or with an index [T, F]     right  [N, K], or with an index [T, K]
    factor float32 [1] on the device, before the one rounding; None: 1

    Rows whose index is -1 add nothing. dweight of `grouped_linear` is (dout, x), or (x, dout) where it is transposed.
    """
    for x, index in ((left, left_index), (right, right_index)):
        rows = (x if index is None else index).shape[0]
        if x.ndim != 2 or rows != groups.num_rows:
            raise ValueError(f"there are {rows} rows {tuple(x.shape)}, but the splits are those of {groups.num_rows}")
    if left.dtype not in DTYPES or right.dtype != left.dtype:
        raise TypeError(f"rows must be bfloat16, float16 or float32, not {left.dtype} and {right.dtype}")
    left, right = _rows(left), _rows(right)
    features, terms = left.shape[1], right.shape[1]
    out = left.new_empty((groups.num_experts, features, terms))
    if out.numel() == 0:
        return out
    gathers = left_index is not None or right_index is not None
    config = config or wgrad_configuration(features, terms, left.dtype, left.device, gathers=gathers)
    programs = groups.num_experts * cdiv(features, config.block_m) * cdiv(terms, config.block_n)
    launch(kernels.grouped_wgrad_kernel, programs, left.device, {
        "left": left, "stride_left": left.stride(0), "left_index": left_index,
        "right": right, "stride_right": right.stride(0), "right_index": right_index,
        "splits": groups.splits, "factor": factor, "out": out, "F": features, "K": terms, "GROUP": GROUP,
        "BLOCK_F": config.block_m, "BLOCK_K": config.block_n, "BLOCK_R": config.block_k, "PRECISION": "ieee",
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    })  # fmt: skip
    return out


def grouped_bias_grad(
    dout: Tensor,
    groups: RowGroups,
    *,
    index: Tensor | None = None,
    scale: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """[E, F]: the sum of factor * scale[i] * dout[index[i]] over the rows i of each expert; zeros for one without rows.

    factor  float32 [1] on the device; None: 1
    """
    dout = _rows(dout)
    features = dout.shape[1]
    out = dout.new_empty((groups.num_experts, features))
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(features), 16 if dout.device.type == "cpu" else 256)
    launch(kernels.grouped_bias_grad_kernel, groups.num_experts * cdiv(features, block), dout.device, {
        "dout": dout, "stride": dout.stride(0), "index": index, "scale": scale, "splits": groups.splits,
        "factor": factor, "out": out, "F": features, "BLOCK_F": block, "BLOCK_R": 32, "num_warps": 8,
    })  # fmt: skip
    return out
