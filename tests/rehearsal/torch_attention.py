"""Stand-ins for torch's attention kernels on the rehearsal's device: their signatures and layouts, values of float64.

As the kernels do (aten/src/ATen/native/transformers/cuda/flash_attn, aten/src/ATen/native/cudnn/MHA.cpp): results are
rounded to 16 bits, by flash each query head's part of a key head's gradient too; a row of flash that sees nothing has
out 0 and lse +inf; documents have lse [h, tokens]; backward takes delta from out and weights from lse; loads are of 16
bytes. What they would refuse or misread is an assertion.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

CUDNN_LSE_DIM = 4  # 3 in other versions of torch
calls: list[str] = []  # the kernels that were called


def _visible(rows: int, columns: int, left: int, right: int) -> Tensor:
    ahead = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - (columns - rows)
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask &= (ahead >= -left) if left >= 0 else mask
    return mask & (ahead <= right) if right >= 0 else mask


def _check_loads(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.storage_offset() % 8 == 0
        assert all(s and s % 8 == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor) -> Tensor:
    """[h, rows, columns] of q [h, rows, D] and k [h, columns, D]."""
    return ((q.double() @ k.double().transpose(-1, -2)) * scale).masked_fill(~mask, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of [h, n, D], with grouped heads."""
    group = len(q) // len(k)
    scores = _scores(q, k.repeat_interleave(group, 0), scale, mask)
    lse = scores.logsumexp(-1)
    weight = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    return weight @ v.repeat_interleave(group, 0).double(), lse.masked_fill(lse == -torch.inf, torch.inf)


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    group, dtype = len(q) // len(k), q.dtype
    heads, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0).double()
    lse = lse.double().masked_fill(lse == -torch.inf, 0.0)  # as flash reads it
    weight = torch.exp(_scores(q, heads, scale, mask) - lse[..., None])
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = weight * (dout.double() @ values.transpose(-1, -2) - delta) * scale
    dk, dv = ds.transpose(-1, -2) @ q.double(), weight.transpose(-1, -2) @ dout.double()
    dk, dv = (x.to(dtype).unflatten(0, (-1, group)).double().sum(1) for x in (dk, dv))
    return ds @ heads.double(), dk, dv


def _documents(
    q: Tensor, k: Tensor, starts: tuple[Tensor | None, Tensor | None], longest: tuple[int, int]
) -> list[tuple[Any, Any]]:
    """The parts of q and of k that make one call each, as indices."""
    if starts[0] is None or starts[1] is None:
        assert q.dim() == 4
        assert longest == (q.shape[1], k.shape[1])
        return [(i, i) for i in range(len(q))]
    assert q.dim() == 3
    rows, columns = (x.tolist() for x in starts if x is not None)
    assert all(x.dtype == torch.int32 for x in starts if x is not None)
    assert (rows[-1], columns[-1]) == (len(q), len(k))
    lengths = [[b - a for a, b in itertools.pairwise(x)] for x in (rows, columns)]
    assert longest == (max(lengths[0]), max(lengths[1]))
    assert all(all(x) for x in lengths)
    return [(slice(*rows[i : i + 2]), slice(*columns[i : i + 2])) for i in range(len(rows) - 1)]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, p: float,
    is_causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Any, ...]:  # fmt: skip
    _check_loads(q, k, v)
    assert q.shape[-1] == v.shape[-1]
    assert scale > 0.0
    assert (p, is_causal, debug) == (0.0, False, False)
    out = torch.empty_like(q)
    lse = torch.empty((len(q), q.shape[-2], max_q) if cum_q is None else (q.shape[-2], len(q)))
    for rows, columns in _documents(q, k, (cum_q, cum_k), (max_q, max_k)):
        one = [x[i].transpose(0, 1) for x, i in ((q, rows), (k, columns), (v, columns))]
        mask = _visible(one[0].shape[1], one[1].shape[1], window_size_left, window_size_right)
        part, part_lse = _attend(one[0], one[1], one[2], scale, mask)
        out[rows] = part.transpose(0, 1).to(out.dtype)
        lse[rows if cum_q is None else (slice(None), rows)] = part_lse.float()
    return out, lse, q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64), q.new_empty(0)


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, max_q: int, max_k: int, p: float, is_causal: bool, rng: Tensor, unused: Tensor, *,
    scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_loads(dout, q, k, v, out)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert lse.shape == ((len(q), q.shape[-2], max_q) if cum_q is None else (q.shape[-2], len(q)))
    assert (p, is_causal) == (0.0, False)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for rows, columns in _documents(q, k, (cum_q, cum_k), (max_q, max_k)):
        tensors = ((dout, rows), (q, rows), (k, columns), (v, columns), (out, rows))
        one = [x[i].transpose(0, 1) for x, i in tensors]
        mask = _visible(one[1].shape[1], one[2].shape[1], window_size_left, window_size_right)
        found = _attend_backward(*one, lse[rows if cum_q is None else (slice(None), rows)], scale, mask)  # type: ignore[call-arg,arg-type]
        for whole, i, part in zip((dq, dk, dv), (rows, columns, columns), found, strict=True):
            whole[i] = part.transpose(0, 1).to(whole.dtype)
    return dq, dk, dv


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, p: float = 0.0, is_causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check_loads(q, k, v)
    assert wants_lse
    assert (bias, p, debug) == (None, 0.0, False)
    assert not is_causal or q.shape[2] == k.shape[2]
    out = torch.empty_like(q) if q.shape == (*q.shape[:3], v.shape[-1]) else q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = torch.empty(q.shape[:3])
    mask = _visible(q.shape[2], k.shape[2], -1, 0 if is_causal else -1)
    for i in range(len(q)):
        out[i], lse[i] = _attend(q[i], k[i], v[i], q.shape[-1] ** -0.5 if scale is None else scale, mask)
    lse = lse if CUDNN_LSE_DIM == 3 else lse[..., None]
    none, random = torch.empty(0), q.new_empty((), dtype=torch.int64)
    return out, lse, none, none, q.shape[2], k.shape[2], random, random, none


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, p: float,
    is_causal: bool, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_loads(dout, q, k, v, out)
    assert lse.dim() == CUDNN_LSE_DIM
    assert (bias, cum_q, cum_k, max_q, max_k, p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    mask = _visible(max_q, max_k, -1, 0 if is_causal else -1)
    for i in range(len(q)):
        one = (dout[i], q[i], k[i], v[i], out[i])
        dq[i], dk[i], dv[i] = _attend_backward(*one, lse[i].reshape(lse.shape[1:3]), scale, mask)
    return dq, dk, dv


def can_use(name: str) -> Any:
    """What torch.backends.cuda.can_use_*_attention says of a device that has everything."""

    def answer(params: Any, debug: bool = False) -> bool:
        q, k, v = params.query, params.key, params.value
        enabled: bool = getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        assert params.enable_gqa == (q.shape[1] != k.shape[1])
        return enabled and max(q.shape[-1], v.shape[-1]) <= 256 and (name == "flash" or k.shape[2] > 1)

    return answer


def install(on_host: Any, one_device: Any) -> torch.library.Library:
    """In place of torch's kernels for CUDA; `on_host` and `one_device` are those of `device.py`."""
    library = torch.library.Library("aten", "IMPL")

    def put(name: str, stand_in: Any) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            there = one_device(name, tensors)
            assert there.index == torch.cuda.current_device(), name
            calls.append(name)
            with _disable_current_modes(), torch.no_grad():
                args, kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
                return tree_map_only(Tensor, lambda x: _moved(x, there), stand_in(*args, **kwargs))

        library.impl(name, run, "CUDA")

    put("_flash_attention_forward", flash_forward)
    put("_flash_attention_backward", flash_backward)
    put("_scaled_dot_product_cudnn_attention", cudnn_forward)
    put("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)
    torch.backends.cuda.can_use_flash_attention = can_use("flash")
    torch.backends.cuda.can_use_cudnn_attention = can_use("cudnn")
    torch.backends.cudnn.version = lambda: 91900
    return library


def _moved(x: Tensor, there: torch.device) -> Tensor:
    """On the device, with its strides."""
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=there)
    on = found.copy_(x) if x.numel() and x.dtype != torch.uint64 else found
    return on
