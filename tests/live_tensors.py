"""Bytes of the tensors that a step keeps at its peak, whoever holds them: `PeakBytes`.

    with PeakBytes() as meter:
        ...                             # build a model, take some steps
        meter.add(model.parameters())   # what was there before
        meter.start()
        ...                             # a step
    meter.peak

Every storage that an operator has returned is known by a weak reference, and all that are left are added up after every
operator: what autograd keeps, messages and buffers are among them. Memory that several storages lie in counts once, and
memory of other ranks not at all. Scratch memory inside an operator is not seen, nor what malloc keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastpar.comm.shared_memory.region import SharedRegion


class PeakBytes(TorchDispatchMode):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._is_counting = False
        self._known: dict[int, int] = {}  # storages by address of their object, as weak references
        self._of_peers: set[int] = set()  # first addresses

    def __enter__(self) -> PeakBytes:
        own = SharedRegion.tensor

        def tensor(region: SharedRegion, *args: Any, rank: int | None = None, **kwargs: Any) -> Tensor:
            found = own(region, *args, rank=rank, **kwargs)
            if rank not in (None, region.rank):
                self._of_peers.add(found.data_ptr())
            return found

        self._patch = mock.patch.object(SharedRegion, "tensor", tensor)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
        for weak in self._known.values():
            torch.UntypedStorage._free_weak_ref(weak)
        self._known.clear()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on."""
        for x in tensors:
            inner = x._local_tensor if isinstance(x, DTensor) else x
            if type(inner) in (Tensor, torch.nn.Parameter) and inner.device.type == "cpu":
                storage = inner.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage._weak_ref()

    def start(self) -> None:
        """Begin to look for the peak."""
        self._is_counting = True
        self.peak = self.now()

    def now(self) -> int:
        """Bytes of all storages that are left."""
        spans = []
        for key, weak in list(self._known.items()):
            if torch.UntypedStorage._expired(weak):
                torch.UntypedStorage._free_weak_ref(self._known.pop(key))
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            start = storage.data_ptr()
            if start and start not in self._of_peers:
                spans.append((start, start + storage.nbytes()))
        total = end = 0
        for low, high in sorted(spans):
            total += max(high - max(low, end), 0)
            end = max(end, high)
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.add(x for x in tree_leaves(found) if isinstance(x, Tensor))
        if self._is_counting:
            self.peak = max(self.peak, self.now())
        return found
