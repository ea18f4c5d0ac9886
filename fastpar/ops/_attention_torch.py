"""torch's own attention kernels for CUDA tensors, where a table of tiles is a mask that they have. Not measured yet.

    kernel   head dims                          masks                                        backward, run to run
    cuDNN    multiples of 8 up to 128           all pairs; causal, as many queries as keys   other bits
    flash    equal, multiples of 8 up to 256    `Note: windows`, also of packed documents    the same bits under
                                                                         torch.use_deterministic_algorithms(True)

for bfloat16 and float16, in this order, without a softcap, dropout, or a scale that is not positive; on NVIDIA's
devices, where torch says that the kernel can be used. Forward has the same bits from run to run in both. torch's
switches count: `torch.backends.cuda.enable_flash_sdp` and `enable_cudnn_sdp`, and `torch.nn.attention.sdpa_kernel`,
which sets them. Two things torch's kernels do not keep of what `attention` says:

    rounding   outputs and gradients leave them in 16 bits: parts of a ring are rounded before they are merged, and so
               are, by flash, the gradients of a key head from each of its query heads before they are summed
    order      dq is summed with atomics, unless the table says otherwise

So with all of torch's switches on, the default, they serve forwards whose result is in the dtype of q, and nothing
else. Where torch's plain attention is switched off, as `sdpa_kernel` of the others does, they are asked for as they
are: they serve every forward that they can, and its backward. Both backward kernels take the out and lse that they
are given, of all keys of a row, so that each source of a ring is a call.

Note: windows
    With R queries and C keys, flash lets query i see key j iff -left <= j - i - (C - R) <= right; -1 is no bound. A
    tile that is trimmed (every row sees a key, every key is seen) has lo <= C - R <= hi, so that it is one of these,
    with left = C - R - lo and right = hi - (C - R). Documents side by side are one call with cumulative lengths where
    one window does for all; where a document has no bound of its own, a bound that it does not reach does.

Efficient attention is left out: it takes no grouped heads, pads lse, and multiplies float32 as TF32.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_CUDNN_OF_ANY_LENGTH = 91500  # newer ones are right for lengths that 128 does not divide (pytorch issue 169849)
Span = tuple[int, int]


class Bands(NamedTuple):
    """A table as flash has it: `Note: windows`. The spans and the window are those of every batch row."""

    queries: Span
    keys: Span
    left: int
    right: int
    # Where documents start among the tokens of the spans, of all batch rows one after the other; None: one in each.
    query_starts: tuple[int, ...] | None = None
    key_starts: tuple[int, ...] | None = None

    @property
    def is_causal(self) -> bool:
        """Causal of as many queries as keys."""
        return (self.left, self.right) == (-1, 0) and _length(self.queries) == _length(self.keys)

    @property
    def is_full(self) -> bool:
        return (self.left, self.right) == (-1, -1)


# ---- tables ----------------------------------------------------------------------------------------------------------


def bands_of(tiles: Tensor, offsets: Tensor | None, batch: int) -> Bands | None:
    """The bands that a table is; None where it is none, or nothing is visible."""
    return _bands(tiles.numpy().tobytes(), _table_bytes(offsets), batch)


def _table_bytes(x: Tensor | None) -> bytes | None:
    """What a choice is kept by: a table that was edited is another one."""
    return None if x is None else x.numpy().tobytes()


@functools.lru_cache(maxsize=256)
def _bands(tiles: bytes, offsets: bytes | None, batch: int) -> Bands | None:
    numbers = memoryview(tiles).cast("i").tolist()
    table = [tuple(numbers[i : i + 6]) for i in range(0, len(numbers), 6)]
    ends = [0, len(table)] if offsets is None else memoryview(offsets).cast("q").tolist()
    rows = [[t for t in map(_trimmed, table[a:b]) if t is not None] for a, b in itertools.pairwise(ends)]
    if not rows or not all(rows):
        return None
    for row in rows:
        row.sort()
        if any(a[1] != b[0] or a[3] != b[2] for a, b in itertools.pairwise(row)):
            return None  # tiles that share tokens, or leave some between them
    if len({(row[0][0], row[-1][1], row[0][2], row[-1][3]) for row in rows}) > 1:
        return None
    window = _window([tile for row in rows for tile in row])
    if window is None:
        return None
    queries, keys = (rows[0][0][0], rows[0][-1][1]), (rows[0][0][2], rows[0][-1][3])
    if all(len(row) == 1 for row in rows):
        return Bands(queries, keys, *window)
    rows = rows * batch if offsets is None else rows
    starts = (tuple(itertools.accumulate((t[i + 1] - t[i] for row in rows for t in row), initial=0)) for i in (0, 2))
    return Bands(queries, keys, *window, *starts)


def _trimmed(tile: tuple[int, ...]) -> tuple[int, ...] | None:
    """The tile without queries that see nothing and keys that nothing sees; None if none are left."""
    q0, q1, k0, k1, lo, hi = tile
    rows, columns = q1 - q0, k1 - k0
    first, last, left, right = max(0, -hi), min(rows, columns - lo), max(0, lo), min(columns, rows + hi)
    if first >= last or left >= right or lo > hi:
        return None
    shift = first - left
    return q0 + first, q0 + last, k0 + left, k0 + right, lo + shift, hi + shift


def _window(tiles: list[tuple[int, ...]]) -> Span | None:
    """The (left, right) that does for all of these tiles."""
    sides: tuple[set[int], set[int]] = set(), set()
    reach = [0, 0]  # what a bound has to be at least, not to be one for the tiles without
    for q0, q1, k0, k1, lo, hi in tiles:
        rows, columns = q1 - q0, k1 - k0
        bounds = ((lo > 1 - rows, columns - rows - lo, columns - 1), (hi < columns - 1, hi - columns + rows, rows - 1))
        for side, (is_bound, bound, needed) in enumerate(bounds):
            if is_bound:
                sides[side].add(bound)
            else:
                reach[side] = max(reach[side], needed)
    if any(len(found) > 1 or (found and min(found) < least) for found, least in zip(sides, reach, strict=True)):
        return None
    left, right = (next(iter(found), -1) for found in sides)
    return left, right


# ---- the kernels -----------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """q, k and v of the spans, [b, h, n, D], as the kernels read them."""

    q: Tensor
    k: Tensor
    v: Tensor

    def params(self) -> torch.backends.cuda.SDPAParams:
        return torch.backends.cuda.SDPAParams(*self, None, 0.0, False, self.q.shape[1] != self.k.shape[1])


class TorchKernel(NamedTuple):
    """One of torch's: whether it has these masks and head dims; forward, (out, lse); backward, of (dout, out, lse)."""

    name: str
    takes: Callable[[Bands, Operands], bool]
    forward: Callable[[Bands, Operands, float], tuple[Tensor, Tensor]]
    takes_backward: Callable[[Operands], bool]
    backward: Callable[[Bands, Operands, tuple[Tensor, Tensor, Tensor], float], tuple[Tensor, Tensor, Tensor]]


def _cudnn_takes(bands: Bands, x: Operands) -> bool:
    return (
        bands.query_starts is None
        and (bands.is_full or bands.is_causal)
        and max(x.q.shape[-1], x.v.shape[-1]) <= 128
        and (torch.backends.cudnn.version() or 0) > _CUDNN_OF_ANY_LENGTH
        and torch.cuda.get_device_capability()[0] in (9, 10)  # where torch prefers it as well
        and torch.backends.cuda.can_use_cudnn_attention(x.params())
    )


def _cudnn_forward(bands: Bands, x: Operands, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.0, bands.is_causal, False, scale=scale)
    return out, lse.view(out.shape[:3])


def _cudnn_takes_backward(x: Operands) -> bool:
    return not _is_deterministic()


def _cudnn_backward(
    bands: Bands, x: Operands, given: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, out, lse = given
    lse = lse.contiguous() if _cudnn_lse_dim(x.q.device) == 3 else lse.contiguous()[..., None]
    lengths, random = (x.q.shape[2], x.k.shape[2]), (x.q.new_empty((), dtype=torch.int64) for _ in range(2))
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, *x, out, lse, *random, None, None, None, *lengths, 0.0, bands.is_causal, scale=scale
    )
    return dq, dk, dv


@functools.cache
def _cudnn_lse_dim(device: torch.device) -> int:
    """3 or 4: what its backward wants of lse is what its forward returns, and versions of torch differ in that."""
    q = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16, device=device)
    lse: Tensor = _aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)[1]
    return lse.dim()


def _flash_takes(bands: Bands, x: Operands) -> bool:
    return x.q.shape[-1] == x.v.shape[-1] and torch.backends.cuda.can_use_flash_attention(x.params())


def _flash_takes_backward(x: Operands) -> bool:
    # What flash has no backward for: 192 to 256 on devices with little shared memory.
    return x.q.shape[-1] <= 192 or torch.cuda.get_device_capability() in ((8, 0), (9, 0), (10, 0))


@functools.cache
def _tables() -> Any:
    """Copies of host tables on devices."""
    return importlib.import_module("fastpar.kernels.attention_steps").HostTables()


def _flash_lengths(bands: Bands, x: Operands) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Cumulative lengths on the device and the longest ones, of queries and of keys."""
    if bands.query_starts is None or bands.key_starts is None:
        return None, None, x.q.shape[2], x.k.shape[2]
    sides = bands.query_starts, bands.key_starts
    starts = (_tables().on(x.q.device, torch.tensor(s, dtype=torch.int32, device="cpu")) for s in sides)
    longest = (max(b - a for a, b in itertools.pairwise(s)) for s in sides)
    return *starts, *longest


def _flash_forward(bands: Bands, x: Operands, scale: float) -> tuple[Tensor, Tensor]:
    packed, (batch, heads, length, _) = bands.query_starts is not None, x.q.shape
    out, lse, *_ = _aten._flash_attention_forward(
        *(_by_token(t, packed) for t in x), *_flash_lengths(bands, x), 0.0, False, False, scale=scale,
        window_size_left=bands.left, window_size_right=bands.right,
    )  # fmt: skip
    if packed:  # out is [b n, h, D] and lse is [h, b n]
        out, lse = out.unflatten(0, (batch, length)), lse.view(heads, batch, length).transpose(0, 1)
    return out.transpose(1, 2), lse


def _flash_backward(
    bands: Bands, x: Operands, given: tuple[Tensor, Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    packed, batch = bands.query_starts is not None, x.q.shape[0]
    grad_out, out, lse = given
    if packed:
        lse = lse.transpose(0, 1).flatten(1)
    grads = _aten._flash_attention_backward(
        *(_by_token(t, packed) for t in (grad_out, *x, out)), lse.contiguous(), *_flash_lengths(bands, x), 0.0, False,
        x.q.new_empty(2, dtype=torch.uint64), x.q.new_empty((), dtype=torch.uint64), scale=scale,
        window_size_left=bands.left, window_size_right=bands.right,
    )  # fmt: skip
    dq, dk, dv = ((g.unflatten(0, (batch, -1)) if packed else g).transpose(1, 2) for g in grads)
    return dq, dk, dv


def _by_token(x: Tensor, packed: bool) -> Tensor:
    """[b, h, n, D] as [b, n, h, D], or as [b n, h, D]."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if packed else x


KERNELS = (
    TorchKernel("cudnn", _cudnn_takes, _cudnn_forward, _cudnn_takes_backward, _cudnn_backward),
    TorchKernel("flash", _flash_takes, _flash_forward, _flash_takes_backward, _flash_backward),
)


# ---- what the ops call -----------------------------------------------------------------------------------------------


def are_asked_for(q: Tensor) -> bool:
    """Whether torch's kernels are to serve all they can, backward as well. A constant of a graph of torch.compile."""
    return q.device.type == "cuda" and _plain_is_off()


def _plain_is_off() -> bool:
    return not torch.backends.cuda.math_sdp_enabled()


# torch.compiler.assume_constant_result, which would load torch's compiler, and Triton with it, for everybody
_plain_is_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


class _TorchChoice(NamedTuple):
    """What serves calls alike."""

    kernel: TorchKernel
    bands: Bands
    as_they_are: bool  # q, k and v are read whole, where they lie


_MAX_CHOICES = 1024
_torch_choices: dict[Any, _TorchChoice | None] = {}  # by all that a choice depends on


def _choose(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, offsets: Tensor | None, scale: float, backward: bool = False
) -> tuple[TorchKernel, Bands, Operands] | None:
    """On the current device, which is that of the tensors."""
    if torch.version.hip is not None or q.dtype not in (torch.bfloat16, torch.float16) or scale <= 0.0:
        return None
    flash, cudnn = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    if not (flash or cudnn):
        return None
    key = (
        _table_bytes(tiles), _table_bytes(offsets), q.dtype, q.device, backward,
        *((x.shape, x.stride(), x.storage_offset() % 8, x.requires_grad) for x in (q, k, v)),
        flash, cudnn, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )  # fmt: skip
    found = _torch_choices.get(key)
    if found is None and key not in _torch_choices:
        found = _make_choice(q, k, v, tiles, offsets, backward)
        if len(_torch_choices) >= _MAX_CHOICES:
            _torch_choices.clear()
        _torch_choices[key] = found
    if found is None:
        return None
    return found.kernel, found.bands, Operands(q, k, v) if found.as_they_are else _operands(q, k, v, found.bands)


def _make_choice(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, offsets: Tensor | None, backward: bool
) -> _TorchChoice | None:
    if min(q.numel(), k.numel(), v.numel()) == 0 or any(d % 8 for d in (q.shape[-1], v.shape[-1])):
        return None
    bands = bands_of(tiles, offsets, q.shape[0])
    if bands is None:
        return None
    x = _operands(q, k, v, bands)
    kernel = next((one for one in KERNELS if one.takes(bands, x) and (not backward or one.takes_backward(x))), None)
    whole = all(span == (0, t.shape[2]) for span, t in zip(_spans(bands), (q, k, v), strict=True))
    return None if kernel is None else _TorchChoice(kernel, bands, whole and all(map(_is_readable, (q, k, v))))


def _operands(q: Tensor, k: Tensor, v: Tensor, bands: Bands) -> Operands:
    return Operands(*(_readable(t[:, :, slice(*s)]) for t, s in zip((q, k, v), _spans(bands), strict=True)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, offsets: Tensor | None, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) as fastpar::attention_forward has them; None where torch's kernels do not serve the call."""
    if q.device.type != "cuda" or (out_dtype != q.dtype and not _plain_is_off()):
        return None
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return forward(q, k, v, tiles, offsets, scale, out_dtype)
    chosen = _choose(q, k, v, tiles, offsets, scale)
    if chosen is None:
        return None
    kernel, bands, x = chosen
    out, lse = kernel.forward(bands, x, scale)
    return (
        _put(out, bands.queries, q.shape[2], out_dtype, 0.0),
        _put(lse, bands.queries, q.shape[2], torch.float32, -torch.inf),
    )


def backward(
    whole: Operands,
    given: tuple[Tensor, Tensor, Tensor],
    tiles: Tensor,
    offsets: Tensor | None,
    scale: float,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(dq, dk, dv), dense, given (dout, out, lse) of all keys; None where torch's kernels do not serve the call."""
    q, k, v = whole
    if q.device.type != "cuda":
        return None
    if q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return backward(whole, given, tiles, offsets, scale, grad_dtype)
    chosen = _choose(q, k, v, tiles, offsets, scale, backward=True)
    if chosen is None:
        return None
    kernel, bands, x = chosen
    grad_out, out, lse = (_seen_rows(t, bands) for t in given)
    # Every row of the span sees a key, so that no lse is -inf here, which flash would read as 0.
    grads = kernel.backward(bands, x, (_readable(grad_out.to(q.dtype)), _readable(out.to(q.dtype)), lse), scale)
    dq, dk, dv = (
        _put(grad, span, t.shape[2], grad_dtype, 0.0) for grad, span, t in zip(grads, _spans(bands), whole, strict=True)
    )
    return dq, dk, dv


def _seen_rows(x: Tensor, bands: Bands) -> Tensor:
    """The rows of x [b, h, s, ...] that see something."""
    return x if bands.queries == (0, x.shape[2]) else x[:, :, slice(*bands.queries)]


def _length(span: Span) -> int:
    return span[1] - span[0]


def _spans(bands: Bands) -> tuple[Span, Span, Span]:
    """The spans of q, k and v."""
    return bands.queries, bands.keys, bands.keys


def _is_readable(x: Tensor) -> bool:
    """Whether the kernels can load x 16 bytes at a time."""
    if x.storage_offset() % 8:
        return False
    if x.is_contiguous() and x.shape[-1] % 8 == 0:
        return True
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return x.stride(-1) == 1 and all(s % 8 == 0 and s for s in strides[:-1])


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where its strides or its place do not allow loads of 16 bytes."""
    return x if _is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _put(part: Tensor, span: Span, length: int, dtype: torch.dtype, fill: float) -> Tensor:
    """The tokens of a span among all of them, dense; the others are `fill`."""
    if span == (0, length):
        return part.to(dtype).contiguous()
    whole = part.new_full((*part.shape[:2], length, *part.shape[3:]), fill, dtype=dtype)
    whole[:, :, slice(*span)] = part
    return whole
