"""The transport of a collective, chosen by what is equal on all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch.distributed import ProcessGroup

from fastpar.comm.errors import NEW_GROUP, CommError
from fastpar.comm.group_connection import GroupConnection
from fastpar.comm.groups import carrying_device, has_gloo, ranks_of
from fastpar.comm.multi_host.protocol import Hierarchy
from fastpar.comm.multi_host.transport import HierarchicalTransport
from fastpar.comm.pending import LaunchLog
from fastpar.comm.shared_memory.compiled import CompiledTransport
from fastpar.comm.shared_memory.fast_path import FastPath, OneRankFastPath
from fastpar.comm.shared_memory.transport import SharedMemoryTransport, can_reduce
from fastpar.comm.shared_memory.world import LocalWorld
from fastpar.comm.symmetric.switch import SymmetricTransport, switch_of
from fastpar.comm.torch.transport import TorchTransport
from fastpar.comm.torch.wrappers import CheckedTransport, StagedTransport
from fastpar.comm.transport import InFlight, Transport

TRANSPORTS = ("auto", "torch", "shared_memory")
Mode = Literal["blocking", "background", "split_phase"]
MODES: tuple[Mode, ...] = get_args(Mode)
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


class TransportSelector:
    """Chooses for one communicator, by what is equal on all ranks: device, dtype and where the ranks are.

    auto           CPU tensors: shared memory where all ranks of the group can share it; within hosts and gloo between
                   them where some can; else gloo. All other tensors, and dtypes that csrc/comm cannot reduce:
                   torch.distributed, on the group itself; CUDA tensors over symmetric memory where
                   `fastpar.comm.calibrate` has found that faster.
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
        self.log = LaunchLog(group)
        self.rank, self.size = self.log.rank, self.log.size
        self._is_required = transport == "shared_memory"
        self._is_apart = transport == "torch"
        self._check = check
        self._torch: Transport | None = None
        self._staged: Transport | None = None  # for CPU tensors, where the group has a backend for devices only
        self._connection: GroupConnection | None = None
        self._direct: Transport | None = None  # what is not between CPU tensors, where ranks compare it
        self._by_mode: dict[str, Transport] = {}  # once the ranks have met
        # Of blocking collectives over shared memory, once the ranks have met.
        self.fast_path: FastPath | OneRankFastPath | None = OneRankFastPath() if self.size == 1 else None
        if group is not None and self.size > 1:
            self._torch = TorchTransport(group, timeout)
            if carrying_device(group).type != "cpu":
                self._staged = StagedTransport(self._torch, group)
                _warn_of_staging(group)
            if has_gloo(group) and not (self._is_apart and check is False):
                self._connection = GroupConnection.of(group, is_apart=self._is_apart)
                self._compiled = CompiledTransport(self, self.rank)
                if self._connection.is_settled and self._connection.error is None:
                    self._enter_fast_path()  # ranks that have met: of a communicator that is made for one call, too
            if check:
                comparing = GroupConnection.of(group, is_apart=True)
                self._direct = CheckedTransport(self._torch, lambda: _apart(comparing, timeout), self.rank, timeout)

    def compares(self, is_cpu: bool) -> bool:
        """True where ranks compare their calls, those on a tensor without elements too: it may have some elsewhere."""
        return bool(self._check) or (is_cpu and self._connection is not None and self._check is None)

    def launch(
        self,
        op: str,
        is_cpu: bool,
        dtype: torch.dtype,
        start: Callable[[Transport], InFlight],
        *,
        mode: Mode,
    ) -> InFlight:
        """Hand `start` its transport. `mode` is that of `Communicator.collectives`."""
        assert self._torch is not None
        # Devices, and dtypes that csrc/comm cannot reduce: torch's own collectives.
        if self._connection is None or not is_cpu or (op in _REDUCTIONS and not can_reduce(dtype)):
            chosen = self._direct or self._torch
            switch = None if is_cpu or self._is_apart or self._direct is not None else switch_of(self.group)
            if switch is not None and not torch.compiler.is_compiling():
                chosen = SymmetricTransport(switch, self._torch, is_beside=mode != "blocking")
            return start(self._staged if is_cpu and self._staged is not None else chosen)
        # A graph holds one op, which is done when it returns.
        if torch.compiler.is_compiling():
            return start(self._compiled)
        if not self._by_mode:
            if not self._connection.is_settled:
                # A launch must not wait for other ranks, so it is queued until they have met.
                return self._connection.defer(lambda: start(self._through("background")), self.timeout)
            if self._connection.error is not None:
                raise CommError(f"an earlier collective of this group failed ({self._connection.error}): {NEW_GROUP}")
            self._enter_fast_path()
            # Chosen once: what is launched from here on goes straight to its transport.
            self._by_mode = {name: self._through(name) for name in MODES}
        return start(self._by_mode[mode])

    def _enter_fast_path(self) -> None:
        world = None if self._connection is None else self._connection.world
        if world is not None and self.fast_path is None:
            self.fast_path = FastPath(world, self.log, self.timeout)

    def world(self) -> LocalWorld | None:
        """The ranks of the group, sharing memory; waits until all have met. None: not all can."""
        if self._connection is None or self._is_apart:
            return None
        if not self._connection.is_settled:
            self._connection.settle(self.timeout)
        return self._connection.world

    def hierarchy(self) -> Hierarchy | None:
        """The shared state of a group on several hosts; waits until all have met. None: on one host, or each on its
        own, or they cannot."""
        self.world()
        return None if self._connection is None else self._connection.hierarchy

    def _through(self, mode: Mode) -> Transport:
        """The transport of CPU tensors, now that the ranks have met."""
        assert self._torch is not None
        assert self._connection is not None
        found = self._connection
        if found.world is not None:
            return SharedMemoryTransport(found.world, self.timeout, mode)
        if self._is_required:
            raise CommError(f"the ranks of the group cannot share memory: {found.problem}")
        background = mode != "blocking"
        # Of little data and of all_to_all, which have nothing to gain from leaders.
        flat: Transport | None = self._direct or self._torch
        if found.apart is not None and self._check is not False:
            flat = HierarchicalTransport(found.apart, self.rank, None, self.timeout, background=background)
        if found.hierarchy is not None:
            return HierarchicalTransport(found.hierarchy, self.rank, flat, self.timeout, background=background)
        assert flat is not None
        return flat


_LOGGER = logging.getLogger("fastpar.comm")
_WARNED: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _warn_of_staging(group: ProcessGroup) -> None:
    """Once for each group, on its rank 0."""
    if group.rank() == 0 and group not in _WARNED:
        _WARNED.add(group)
        _LOGGER.warning(
            "CPU tensors of ranks %s go by way of the device, which waits for it: the group has no CPU backend, as "
            'init_process_group("cpu:gloo,cuda:nccl") gives it',
            ranks_of(group),
        )


def _apart(connection: GroupConnection, timeout: float) -> Hierarchy:
    connection.settle(timeout)
    if connection.apart is None:
        raise CommError(f"the ranks cannot compare what they call: {connection.problem}")
    return connection.apart
