"""Which transport a collective takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastpar.comm.errors import NEW_GROUP, CommError, CommMismatchError
from fastpar.comm.group_connection import Connection
from fastpar.comm.groups import carrying_device, has_gloo
from fastpar.comm.multi_host.protocol import Hierarchy
from fastpar.comm.multi_host.transport import HierarchicalTransport
from fastpar.comm.shared_memory.compiled import TracedTransport
from fastpar.comm.shared_memory.fast_path import Express
from fastpar.comm.shared_memory.transport import SharedMemoryTransport, can_reduce
from fastpar.comm.shared_memory.world import LocalWorld
from fastpar.comm.torch.transport import TorchTransport
from fastpar.comm.torch.wrappers import CheckedTransport, StagedTransport
from fastpar.comm.transport import InFlight, Transport
from fastpar.mesh.lifetime import mark_failed

TRANSPORTS = ("auto", "torch", "shared_memory")
MODES = ("blocking", "background", "halves")
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


class Route:
    """Chooses for one communicator, by what is equal on all ranks: device, dtype and where the ranks are.

    auto           CPU tensors: shared memory where all ranks of the group can share it; within hosts and gloo between
                   them where some can; else gloo. All other tensors, and dtypes that csrc/comm cannot reduce:
                   torch.distributed, on the group itself.
    torch          as if no two ranks could share memory
    shared_memory  as auto, but an error where the ranks cannot share memory

    check          whether ranks compare what they call, before data moves, where shared memory does not do so anyway:
                   None: for CPU tensors (gloo does it as fastpar/comm/multi_host/transport.py says); True: for all;
                   False: for none, and gloo is then the group's own
    """

    def __init__(self, group: ProcessGroup | None, timeout: float, transport: str, check: bool | None = None) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        self.group, self.timeout = group, timeout
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._is_required = transport == "shared_memory"
        self._is_apart = transport == "torch"
        self._check = check
        self._launched = 0
        self._torch: Transport | None = None
        self._staged: Transport | None = None  # for CPU tensors, where the group has a backend for devices only
        self._connection: Connection | None = None
        self._direct: Transport | None = None  # what is not between CPU tensors, where ranks compare it
        self._by_mode: dict[str, Transport] = {}  # once the ranks have met
        self.express: Express | None = None
        if group is not None and self.size > 1:
            self._torch = TorchTransport(group, timeout)
            self._staged = StagedTransport(self._torch, group) if carrying_device(group).type != "cpu" else None
            if has_gloo(group) and not (self._is_apart and check is False):
                self._connection = Connection.of(group, is_apart=self._is_apart)
                self._traced = TracedTransport(self, self.rank)
            if check:
                comparing = Connection.of(group, is_apart=True)
                self._direct = CheckedTransport(self._torch, lambda: _apart(comparing, timeout), self.rank, timeout)

    def count(self) -> int:
        """The sequence number of the next collective."""
        if not torch.compiler.is_compiling():  # Dynamo wants no side effects in a backward, and traces once
            self._launched += 1
        return self._launched - 1

    def describe(self, op: str, sequence: int, shape: torch.Size | None, dtype: torch.dtype) -> str:
        ranks = dist.get_process_group_ranks(self.group) if dist.is_initialized() else "?"
        what = "" if shape is None else f" of shape {tuple(shape)} {dtype}"
        return f"{op} #{sequence}{what} on rank {self.rank} of {self.size} (global ranks {ranks})"

    def failure(
        self, error: RuntimeError, op: str, sequence: int, shape: torch.Size | None, dtype: torch.dtype
    ) -> CommError:
        """The error to raise for one that a launch has met."""
        what = self.describe(op, sequence, shape, dtype)
        if isinstance(error, CommError):
            self.note_failure(error)
            return type(error)(f"{what}: {error}")
        return CommError(f"{what}: could not be launched. Cause: {error}")

    def note_failure(self, error: CommError) -> None:
        """For the next mesh, which must not use the group."""
        if self.group is not None and not isinstance(error, CommMismatchError):
            mark_failed(self.group)

    def compares(self, is_cpu: bool) -> bool:
        """Whether ranks compare what they call: also of a tensor without elements, which may have some elsewhere."""
        return bool(self._check) or (is_cpu and self._connection is not None and self._check is None)

    def launch(
        self,
        op: str,
        is_cpu: bool,
        dtype: torch.dtype,
        start: Callable[[Transport], InFlight],
        *,
        mode: str,
    ) -> InFlight:
        """Hand `start` its transport.

        mode  "blocking": may do all the work before it returns; "background": makes progress whatever the caller does;
              "halves": may leave work to the one who waits, if the caller waits for nothing else in between
        """
        assert self._torch is not None
        if self._connection is None or not is_cpu or (op in _REDUCTIONS and not can_reduce(dtype)):
            chosen = self._direct or self._torch
            return start(self._staged if is_cpu and self._staged is not None else chosen)
        if torch.compiler.is_compiling():
            return start(self._traced)
        if not self._by_mode:
            if not self._connection.is_settled:
                return self._connection.defer(lambda: start(self._through("background")), self.timeout)
            if self._connection.error is not None:
                raise CommError(f"an earlier collective of this group failed ({self._connection.error}): {NEW_GROUP}")
            world = self._connection.world
            if world is not None:
                self.express = Express(world, self)
            self._by_mode = {name: self._through(name) for name in MODES}
        return start(self._by_mode[mode])

    def world(self) -> LocalWorld | None:
        """The ranks of the group, sharing memory; waits until all have met. None: not all can."""
        if self._connection is None or self._is_apart:
            return None
        if not self._connection.is_settled:
            self._connection.settle(self.timeout)
        return self._connection.world

    def hierarchy(self) -> Hierarchy | None:
        """What the ranks of a group on several hosts share; waits until all have met. None: on one host, or each on its
        own, or they cannot."""
        self.world()
        return None if self._connection is None else self._connection.hierarchy

    def _through(self, mode: str) -> Transport:
        """What moves CPU tensors, now that the ranks have met."""
        assert self._torch is not None
        assert self._connection is not None
        found = self._connection
        if found.world is not None:
            return SharedMemoryTransport(found.world, self.timeout, mode)
        if self._is_required:
            raise CommError(f"the ranks of the group cannot share memory: {found.problem}")
        background = mode != "blocking"
        flat: Transport | None = self._direct or self._torch
        if found.apart is not None and self._check is not False:
            flat = HierarchicalTransport(found.apart, self.rank, None, self.timeout, background=background)
        if found.hierarchy is not None:
            return HierarchicalTransport(found.hierarchy, self.rank, flat, self.timeout, background=background)
        assert flat is not None
        return flat


def _apart(connection: Connection, timeout: float) -> Hierarchy:
    connection.settle(timeout)
    if connection.apart is None:
        raise CommError(f"the ranks cannot compare what they call: {connection.problem}")
    return connection.apart
