"""One collective for many tensors: gradient averaging."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.pending import Pending
from fastpar.comm.reduction import check_reduction


@checked(computed=False)
def all_reduce_coalesced(
    tensors: Iterable[Tensor], comm: GroupLike, op: str = "sum", *, bucket_bytes: int = 25 << 20
) -> None:
    """All-reduce every tensor in place, packed into buckets: one collective per bucket, the next packed while one is
    in flight.

    A bucket holds tensors of one dtype and device, in the order given, up to `bucket_bytes` (a larger tensor has one
    to itself). Extra memory: four buckets or so. Every rank must pass tensors of the same shapes and dtypes in the
    same order. With one rank nothing is done.
    """
    comm = Communicator.of(comm)
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    tensors = list(tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors must be tensors, got {type(tensor).__name__} at number {index}")
        check_reduction(op, tensor.dtype)
    tensors = [tensor.detach() for tensor in tensors]
    if comm.size == 1:
        return
    in_flight: tuple[list[Tensor], Pending[Tensor]] | None = None
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        launched = bucket, comm.all_reduce_async(flat, op, out=flat)
        if in_flight is not None:
            _write_back(*in_flight)
        in_flight = launched
    if in_flight is not None:
        _write_back(*in_flight)


def _buckets(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        bucket, held = filling.get(kind, (None, 0))
        if bucket is None or held + tensor.nbytes > limit:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        filling[kind] = bucket, held + tensor.nbytes
    return buckets


def _write_back(bucket: list[Tensor], pending: Pending[Tensor]) -> None:
    flat = pending.wait()
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
