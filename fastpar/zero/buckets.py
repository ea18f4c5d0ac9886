"""Buckets of gradients that travel together: averaged whole on every rank, or by rows.

| bucket | of | collective |
|---|---|---|
| `AllReduceBucket` | stage 0 | all-reduce: every rank gets all means |
| `ReduceScatterBucket` | what is sharded: stages 1 to 3 | reduce-scatter to rows, all-reduce of these over replicas |
| `PersistentBucket` | what stage 3 keeps on every rank | all-reduce in float32 |
| `LocalBucket` | experts that no other rank has | none |

Note: copies. A gradient is copied once, from where autograd made it to its bucket: where ranks share memory, the
others read it there. Letting autograd add into zeroed buckets instead costs a pass over the bucket more.

Note: flags. Which gradients no rank has must be agreed on, and seldom is there one. So a bucket that travels as it is,
between CPU ranks, carries a number more to every rank: 0 where the sender has put all of its gradients. A mean of 0
says that nothing is left to agree on. (Elsewhere to look at the number would wait for the device, or codes round it.)
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.transport_selector import Mode
from fastpar.comm.wire_formats import CastWire, Wire
from fastpar.zero.flat import FlatLayout, PeerMemory
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.param_classes import unsent_gradient
from fastpar.zero.sharded_param import ShardedParam, keep_traces

STAGING_BUFFERS = 2  # one that travels, one that is filled


class FlatGradients:
    """Gradients of whole tensors, to be averaged over the ranks and split like their `layout`.

        gradients.put([0], [grad])             # any order; what is not put counts as zero
        pending = gradients.reduce()           # all ranks
            rows = pending.wait()              # this rank's rows of every tensor's mean, views of a new flat tensor

    `buffer`: memory to lay them out in (`Staging.take`), which may be used again after `wait`.
    """

    def __init__(self, comm: Communicator, layout: FlatLayout, buffer: Tensor, *, mode: Mode = "background") -> None:
        self.comm, self.layout, self._mode = comm, layout, mode
        self.flat = buffer[: layout.total]
        pieces = self.flat.split_with_sizes(layout.numels)  # of all tensors, rank by rank
        self._pieces = [pieces[index :: len(layout.shapes)] for index in range(len(layout.shapes))]
        self._missing = set(range(len(layout.shapes)))  # what has not been put
        self._is_even = len(set(layout.counts)) == 1
        self._rest: list[Tensor] = []  # zeros for what `put_all` is not given

    def put(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, grad in zip(indices, grads, strict=True):
            targets += self._pieces[index]
            sources += grad.reshape(-1).split_with_sizes(self.layout.numels_of(index))
        self._missing.difference_update(indices)
        if targets:
            torch._foreach_copy_(targets, sources)

    def put_all(self, grads: Sequence[Tensor]) -> None:
        """`put` for as many tensors as there are, but for those of the end, which are zero."""
        layout, num = self.layout, len(grads)
        if not self._is_even or any(grad.dtype != self.flat.dtype for grad in grads):
            self.put(range(num), grads)
            return
        # Equal parts: side by side, a row for each rank, in one call where `put` makes several for each tensor
        if len(self._rest) != len(layout.shapes) - num:
            self._rest = [self.flat.new_zeros(shape).view(layout.size, -1) for shape in layout.shapes[num:]]
        parts = [*(grad.reshape(layout.size, -1) for grad in grads), *self._rest]
        torch.cat(parts, 1, out=self.flat.view(layout.size, -1))
        self._missing.clear()

    def fill(self) -> None:
        """Zero what has not been put."""
        targets = [piece for index in self._missing for piece in self._pieces[index]]
        if targets:
            torch._foreach_zero_(targets)
        self._missing.clear()

    def reopen(self) -> None:
        """Take other gradients: nothing has been put."""
        self._missing.update(range(len(self._pieces)))

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """Each tensor's elements, in one piece for each rank that gets some."""
        return self._pieces

    def reduce(self, wire: Wire | None = None, *, key: Hashable = None, is_last: bool = False) -> Pending[list[Tensor]]:
        """Begin to average, in the format of `wire` (None: as they are, summed in float32). `is_last`: the caller waits
        at once."""
        self.fill()
        counts = self.layout.counts
        if wire is not None:
            pending = wire.reduce_scatter_async(self.comm, self.flat, counts, key=key)
        elif self.flat.dtype.itemsize < 4:  # as they were added up
            launcher = self.comm.collectives(self._mode)
            pending = launcher.reduce_scatter(self.flat, "avg", sizes=counts, dtype=torch.float32)
        elif is_last and self._mode == "split_phase" and self._is_even:
            # Nothing to compute in between: in one step, by the fast path of equal parts
            return Pending.ready(self.layout.views(self.comm.reduce_scatter(self.flat, "avg"), self.comm.rank))
        else:
            pending = self.comm.collectives(self._mode).reduce_scatter(self.flat, "avg", sizes=counts)
        return Pending(
            None,
            lambda: self.layout.views(pending.wait(), self.comm.rank),
            describe=lambda: "reducing gradients",
            timeout=self.comm.timeout,
        )


class Staging:
    """Buffers to lay gradients out in: at most `count` at a time, of `numel` elements, that peers can read."""

    def __init__(
        self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device, *, count: int = STAGING_BUFFERS
    ) -> None:
        self._free = [PeerMemory(comm, [numel] * comm.size, dtype, device) for _ in range(count)]
        self.numel = numel

    def take(self) -> PeerMemory:
        if not self._free:
            raise RuntimeError("all staging buffers are in use: wait for a reduction first")
        return self._free.pop(0)

    def give_back(self, memory: PeerMemory) -> None:
        self._free.append(memory)


class BucketKind(NamedTuple):
    """Properties that a bucket's gradients have in common: the dtype that they travel in, device, ranks."""

    dtype: torch.dtype
    device: torch.device
    groups: Groups

    @staticmethod
    def of(param: ShardedParam, groups: Groups) -> BucketKind:
        return BucketKind(param.reduce_dtype, param.parameter.device, groups.of(param.parameter))


class StagingPool:
    """The staging buffers of a reducer: of each kind two of the largest bucket's size, made on first use."""

    def __init__(self) -> None:
        self._numels: dict[BucketKind, int] = {}
        self._made: dict[BucketKind, Staging] = {}

    def fit(self, kind: BucketKind, numel: int) -> None:
        self._numels[kind] = max(self._numels.get(kind, 0), numel)

    def of(self, kind: BucketKind) -> Staging:
        """Collective where they are made."""
        found = self._made.get(kind)
        if found is None or found.numel < self._numels[kind]:
            found = self._made[kind] = Staging(kind.groups.shard, self._numels[kind], kind.dtype, kind.device)
        return found


class Bucket:
    """Gradients that travel together: `open`, then `put` some of them, `launch`, and `finish`, which hands the means
    to the optimizer's parameters (zero for what was not put); `close` instead of `launch` where a pass has failed."""

    travels = True  # False: `finish` waits for nobody
    is_complete = False  # whether every rank is known to have put all gradients of the last launch: see "flags"
    is_staged = False  # whether gradients are laid out in a staging buffer

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind) -> None:
        self.params, self.kind = params, kind
        self.numels = [local(param.parameter).numel() for param in params]

    def open(self) -> None:
        pass

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def launch(self, *, is_last: bool = False) -> None:
        """`is_last`: it is waited for at once."""
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass  # the next pass writes all of it

    def set_aside(self, but: Container[ShardedParam] = ()) -> None:
        """A forward pass begins whose gradients are to be reduced for themselves and then added to what there is."""

    def is_result(self, position: int) -> bool:
        """Whether what the parameter has as gradient came out of a reduction."""
        return False

    def results(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        """Gradients that lie in this bucket's memory, and go with it."""
        return iter(())

    def keep(self, position: int, gradient: Tensor) -> None:
        """Have what another bucket's reduction has given the parameter."""
        self.params[position].add_gradient(gradient)


class AllReduceBucket(Bucket):
    """Every rank gets the mean of all gradients (stage 0). They lie in this bucket's memory from then on."""

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind, wire: Wire | None = None) -> None:
        super().__init__(params, kind)
        comm = self._comm = kind.groups.replicate
        self._shapes = [local(param.parameter).shape for param in params]
        self._wire = wire
        if wire is None and comm.size > 1 and kind.dtype.itemsize < 4 and params[0].optim_param.dtype == torch.float32:
            # Master weights get the sum as it was taken, in float32, as rows of it do in other stages.
            self._wire = CastWire(kind.dtype)
        self._is_flagged = _can_carry_flag(kind, self._wire)
        self._cuts = [*self.numels, *[1] * self._is_flagged]
        self._flat = PeerMemory(comm, [sum(self._cuts)] * comm.size, kind.dtype, kind.device).mine
        self._views = self._cut(self._flat)
        self._is_put = [False] * len(params)
        self._pending: Pending[Tensor] | None = None

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes(self._cuts)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=False)]  # the flag comes last

    def set_aside(self, but: Container[ShardedParam] = ()) -> None:
        for param, grad in self.results():
            if param.optim_param is param.parameter and param not in but:  # which autograd would add to
                param.set_aside, param.optim_param.grad = local(grad), None

    def results(self) -> Iterator[tuple[ShardedParam, Tensor]]:
        for param, view in zip(self.params, self._views, strict=True):
            grad = unsent_gradient(param.optim_param)  # which may be withheld from users
            if grad is not None and _is_same(local(grad), view):
                yield param, grad

    def keep(self, position: int, gradient: Tensor) -> None:
        view = self._views[position]
        super().keep(position, view.copy_(gradient.view(view.shape)).detach())

    def is_result(self, position: int) -> bool:
        grad = self.params[position].unsent
        return grad is not None and _is_same(local(grad), self._views[position])

    def open(self) -> None:
        self._is_put = [False] * len(self.params)
        for param, grad in self.results():
            if param.optim_param is not param.parameter:  # the bucket is about to be written to
                param.optim_param.grad = as_dtensor(local(grad).clone(), param.spec)
        for param in self.params:
            if param.set_aside is not None:
                param.set_aside = param.set_aside.clone()

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        targets, sources = [], []
        for position, gradient in zip(positions, gradients, strict=True):
            self._is_put[position] = True
            if not _is_same(gradient, self._views[position]):
                targets.append(self._views[position])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def launch(self, *, is_last: bool = False) -> None:
        for view, is_put in zip(self._views, self._is_put, strict=True):
            if not is_put:
                view.zero_()
        if self._is_flagged:
            self._flat[-1] = not all(self._is_put)
        keep_traces(self.params, self._flat, lambda: [[view] for view in self._views])
        if self._wire is not None and self._comm.size > 1:
            self._pending = self._wire.all_reduce_async(self._comm, self._flat, key=self.params[0].name)
        else:
            collectives = self._comm.collectives(self.kind.groups.mode)
            self._pending = collectives.all_reduce(self._flat, "avg", out=self._flat)

    def finish(self) -> None:
        assert self._pending is not None
        mean, self._pending = self.kind.groups.as_sum_of_parts(self._pending.wait()), None
        self.is_complete = self._is_flagged and mean[-1].item() == 0
        for param, view in zip(self.params, self._views if mean is self._flat else self._cut(mean), strict=True):
            # A tensor of its own: `p.grad.data = ...` (model.to does it) would take the bucket's view away
            param.add_gradient(view.detach())
            if param.set_aside is not None:
                param.add_gradient(param.set_aside)
                param.set_aside = None


class ReduceScatterBucket(Bucket):
    """Every rank gets its rows of the mean (stages 1 to 3)."""

    is_staged = True

    def __init__(
        self,
        params: Sequence[ShardedParam],
        kind: BucketKind,
        staging: StagingPool,
        wire: Wire | None = None,
        *,
        is_flagged: bool = False,
    ) -> None:
        super().__init__(params, kind)
        self._wire, size = wire, kind.groups.shard.size
        self._is_flagged = is_flagged and _can_carry_flag(kind, wire)
        # A cache line for each rank, so that its rows begin where one does if they are as long
        flags = [(size * (64 // kind.dtype.itemsize),)] * self._is_flagged
        self.layout = FlatLayout([*(local(param.parameter).shape for param in params), *flags], size)
        self._staging = staging
        staging.fit(kind, self.layout.total)
        self._laid_out: dict[PeerMemory, FlatGradients] = {}  # in each staging buffer
        self._memory: PeerMemory | None = None
        self._gradients: FlatGradients | None = None
        self._pending: Pending[list[Tensor]] | None = None

    def open(self) -> None:
        self._memory, groups = self._staging.of(self.kind).take(), self.kind.groups
        self._gradients = self._laid_out.get(self._memory)
        if self._gradients is None:
            if len(self._laid_out) == STAGING_BUFFERS:  # which have been made anew
                self._laid_out.clear()
            self._gradients = FlatGradients(groups.shard, self.layout, self._memory.mine, mode=groups.mode)
            self._laid_out[self._memory] = self._gradients
        self._gradients.reopen()
        self._num_put = 0

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._gradients is not None
        self._num_put += len(positions)
        if len(positions) == len(self.params):
            self._gradients.put_all([x for _, x in sorted(zip(positions, gradients, strict=True), key=itemgetter(0))])
        else:
            self._gradients.put(positions, gradients)

    def close(self) -> None:
        assert self._memory is not None
        self._staging.of(self.kind).give_back(self._memory)
        self._memory = self._gradients = None

    def launch(self, *, is_last: bool = False) -> None:
        gradients = self._gradients
        assert gradients is not None
        if self._is_flagged and self._num_put < len(self.params):
            gradients.put([len(self.params)], [torch.ones(self.layout.shapes[-1], dtype=self.kind.dtype)])
        gradients.fill()
        keep_traces(self.params, gradients.flat, gradients.pieces)
        self._pending = gradients.reduce(self._wire, key=self.params[0].name, is_last=is_last)

    def finish(self) -> None:
        assert self._pending is not None
        rows = self._pending.wait()
        self.close()  # before replicas are waited for: the next bucket may be filled meanwhile
        self._pending = None
        groups = self.kind.groups
        if groups.replicate.size > 1 or groups.num_parts > 1:
            flat = _flat_of(rows)
            if groups.replicate.size > 1:
                groups.replicate.all_reduce(flat, "avg", out=flat)
            groups.as_sum_of_parts(flat)
        self.is_complete = self._is_flagged and rows[-1].tolist()[0] == 0
        for param, mine in zip(self.params, rows, strict=False):  # the flag comes last
            param.add_gradient(mine)


class PersistentBucket(Bucket):
    """Every rank gets the mean of all gradients, of parameters that stage 3 keeps on every rank: few and small, so they
    travel in float32."""

    def __init__(self, params: Sequence[ShardedParam], kind: BucketKind) -> None:
        super().__init__(params, kind)
        self._flat: Tensor | None = None

    def open(self) -> None:
        wide = torch.promote_types(self.kind.dtype, torch.float32)
        self._flat = torch.zeros(sum(self.numels), dtype=wide, device=self.kind.device)

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._flat is not None
        pieces = self._flat.split(self.numels)
        if positions:
            torch._foreach_copy_([pieces[position] for position in positions], [x.reshape(-1) for x in gradients])

    def launch(self, *, is_last: bool = False) -> None:
        flat = self._flat
        assert flat is not None
        keep_traces(self.params, flat, lambda: [[piece] for piece in flat.split(self.numels)])
        for comm in self.kind.groups.everyone():
            comm.all_reduce(flat, "avg", out=flat)
        self.kind.groups.as_sum_of_parts(flat)

    def finish(self) -> None:
        assert self._flat is not None
        for param, mine in zip(self.params, self._flat.split(self.numels), strict=True):
            param.add_gradient(mine)
        self._flat = None


class LocalBucket(Bucket):
    """Gradients that no other rank averages, of experts that nobody else has: handed over without a buffer, rounded to
    what the others' travel in."""

    travels = False

    def open(self) -> None:
        self._gradients: dict[int, Tensor] = {}

    def put(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self._gradients.update(zip(positions, gradients, strict=True))

    def launch(self, *, is_last: bool = False) -> None:
        for position, gradient in self._gradients.items():
            _keep_trace(self.params[position], gradient)

    def finish(self) -> None:
        for position, param in enumerate(self.params):
            mine, gradient = local(param.optim_param), self._gradients.pop(position, None)
            if gradient is not None:
                gradient = gradient.to(mine.device, self.kind.dtype).to(mine.dtype).contiguous()
                param.add_gradient(self.kind.groups.as_sum_of_parts(gradient))
            elif param.optim_param.grad is None:
                param.optim_param.grad = as_dtensor(torch.zeros_like(mine), param.spec)


def _can_carry_flag(kind: BucketKind, wire: Wire | None) -> bool:
    return wire is None and kind.device.type == "cpu"


def _keep_trace(param: ShardedParam, gradient: Tensor) -> None:
    keep_traces([param], gradient, lambda: [[gradient]])


def _is_same(x: Tensor, view: Tensor) -> bool:
    # A master weight has a scalar as one row
    return x.data_ptr() == view.data_ptr() and (x.stride() == view.stride() or x.numel() == view.numel() == 1)


def _flat_of(rows: Sequence[Tensor]) -> Tensor:
    """The flat tensor that these are views of, one after the other."""
    numel = sum(x.numel() for x in rows)
    return rows[0].as_strided((numel,), (1,), rows[0].storage_offset()) if numel else rows[0].view(-1)
