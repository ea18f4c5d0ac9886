"""What a training step keeps in memory, by kind, measured from the storages that exist.

    meter = MemoryMeter(model, optimizer, zero)
    with meter.watching():
        ...                              # forward, backward, optimizer.step() of one step
    meter.peaks                          # {"parameters": bytes, "gradients": ..., "states": ..., "activations": ...}

Nothing is estimated from shapes. Parameters, gradients and optimizer states are the storages behind those tensors;
what else `zero` holds on to (buckets on their way to other ranks, sums over microbatches) counts as gradients. Memory
that several tensors share counts once, and to the first of these kinds. Activations are what autograd has saved for
backward and not freed yet (`torch.autograd.graph.saved_tensors_hooks`), but for parameters.

Samples are taken whenever autograd saves or reads a tensor, and before the optimizer's step. Scratch memory inside one
operator is in none of them, nor is what an optimizer's step reads from a disk and writes back.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

KINDS = ("parameters", "gradients", "states", "activations")
OF_PEERS = ("_peers", "_sources")  # attributes of fastpar's objects: memory of other ranks, which this one maps
Span = tuple[int, int]  # first address of a storage, and one past its last


def span(x: Tensor) -> Span:
    """Where the storage of x lies. Empty for freed storages, and for tensors without memory (meta)."""
    inner: Any = x
    storage = (inner._local_tensor if isinstance(x, DTensor) else x).untyped_storage()
    start = storage.data_ptr()
    return start, start + (storage.nbytes() if start else 0)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same addresses as disjoint spans, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def num_bytes(spans: Iterable[Span]) -> int:
    """Bytes that lie in at least one of the spans."""
    return sum(end - start for start, end in union(spans))


def grad_of(x: Tensor) -> Tensor | None:
    """The gradient that a leaf holds: `.grad` of ZeRO's parameters refuses those that are not reduced yet."""
    own: Tensor | None = vars(torch._C.TensorBase)["grad"].__get__(x)
    return own


def reachable_tensors(root: object) -> list[Tensor]:
    """The tensors that fastpar's objects hold, from `root` on: attributes, containers, closures, and gradients."""
    found, seen, left = [], set(), [root]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
            left += [grad_of(item)] if item.is_leaf else []
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, (list, tuple, set)):
            left += item
        elif isinstance(item, types.MethodType):
            left.append(item.__self__)
        elif isinstance(item, functools.partial):
            left += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, types.FunctionType):
            left += [cell.cell_contents for cell in item.__closure__ or () if _is_full(cell)]
        elif type(item).__module__.startswith("fastpar."):
            left += [value for name, value in getattr(item, "__dict__", {}).items() if name not in OF_PEERS]
            left += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
    return found


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class MemoryMeter:
    """Peak bytes by kind, and of all kinds together (`together`), of what runs while it is `watching`.

    model       anything with .parameters()
    optimizer   its states, and the parameters that it has in the place of the model's (master weights), are "states"
    zero        what `fastpar.zero.shard` returned, if anything

    Make it before `zero` hooks the optimizer's step, and set `zero` then: what the step frees must be seen before.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, zero: object = None) -> None:
        self.model, self.optimizer, self.zero = model, optimizer, zero
        self.peaks = dict.fromkeys(KINDS, 0)
        self.together = 0
        self._saved: dict[Span, int] = {}  # how many times each storage has been saved and not freed
        self._at_rest: list[Tensor] = []  # parameters; while stage 3 has gathered some, the model has those instead
        self._is_watching = False
        optimizer.register_step_pre_hook(lambda *_: self.sample())

    def watch(self, model: Any, zero: object) -> MemoryMeter:
        """Say whose memory it is, where that was not known yet."""
        self.model, self.zero = model, zero
        return self

    def most_of_all_ranks(self) -> dict[str, int]:
        """Peak bytes by kind, of the rank that has most of it."""
        peaks = torch.tensor([*(self.peaks[kind] for kind in KINDS), self.together])
        if dist.is_initialized():
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return dict(zip([*KINDS, "all together"], peaks.tolist(), strict=True))

    @contextmanager
    def watching(self, is_wanted: bool = True) -> Iterator[None]:
        if not is_wanted:
            yield
            return
        self._is_watching = True
        self._at_rest = list(self.model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.sample()
        self._is_watching = False

    def sample(self) -> None:
        """Look at what there is now."""
        if not self._is_watching:
            return
        seen: list[Span] = []
        total = 0
        for kind, spans in self._spans().items():
            seen = union([*seen, *spans])
            held = num_bytes(seen) - total
            self.peaks[kind] = max(self.peaks[kind], held)
            total += held
        self.together = max(self.together, total)

    def _spans(self) -> dict[str, list[Span]]:
        """By kind, in the order in which shared memory is counted."""
        parameters = [*self._at_rest, *self.model.parameters()]
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        grads = [grad for p in (*parameters, *owned) if (grad := grad_of(p)) is not None]
        buffers = [x for storage in getattr(self.zero, "storages", ()) for x in getattr(storage, "buffers", ())]
        tensors = {
            "parameters": [*parameters, *buffers],  # which parameters in a file are read into
            "states": [*states, *owned],
            "gradients": [*grads, *reachable_tensors(self.zero)],
        }
        return {kind: [span(x) for x in xs] for kind, xs in tensors.items()} | {"activations": [*self._saved]}

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        where = span(x)
        held = functools.partial(_identity, x)
        if not any(start <= where[0] < end for start, end in self._known()):
            self._saved[where] = self._saved.get(where, 0) + 1
            weakref.finalize(held, self._free, where)
        self.sample()
        return held

    def _unpack(self, held: Callable[[], Tensor]) -> Tensor:
        self.sample()
        return held()

    def _known(self) -> list[Span]:
        """Storages that are parameters, or copies of them: autograd saves them too, but they are there anyway."""
        return [span(x) for x in (*self.model.parameters(), *reachable_tensors(self.zero))]

    def _free(self, where: Span) -> None:
        self._saved[where] -= 1
        if self._saved[where] == 0:
            del self._saved[where]


def _identity(x: Tensor) -> Tensor:
    return x
