"""A group whose ranks are on several hosts: how they run a collective together, whichever it is.

Note: one call. Every rank writes a block: a header that says what it is about to do, and its data where that is little
(up to INLINE_BYTES). Then, with little data | with much:

    the ranks of a host read each other's blocks                     shared memory
                       | they bring their data to the leader         shared memory
    leaders send each other their host's headers | values            network
                       | they exchange the data                      network
    the leader tells its host the outcome | and the result           shared memory
                       | and then hands on the result                shared memory

A rank compares the headers of its host and a leader those of all ranks before any data meets. So a mismatch becomes
the same error on every rank, and the group goes on. Any other failure is final. It reaches the host of the rank where
it happened by shared memory, or with the leader's outcome, and other hosts by the notes that leaders leave each other
(fastpar/comm/multi_host/leaders.py).
"""

from __future__ import annotations

import abc
import os
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from fastpar.comm.errors import NEW_GROUP, CommError, CommMismatchError, CommTimeoutError, PeerLostError
from fastpar.comm.multi_host.leaders import GRACE_S, Leaders
from fastpar.comm.multi_host.sequencer import Sequencer
from fastpar.comm.shared_memory.transport import SharedMemoryTransport
from fastpar.comm.shared_memory.world import LocalWorld

T = TypeVar("T")

INLINE_BYTES = 8 << 10
_HEADER = struct.Struct("<16s16s8siqI")  # operation, dtype, reduction, root, count, checksum of the sizes
_HEADER_BYTES = 64
_OUTCOME = struct.Struct("<II")  # kind of error, length of its text
_OUTCOME_BYTES = 2 << 10
_KINDS: tuple[type[CommError] | None, ...] = (None, CommError, CommMismatchError, CommTimeoutError, PeerLostError)
_TELL_S = 1.0  # for the ranks of a host, which wait for it, to hear of an error


class Collective(abc.ABC):
    """One collective on one rank: what `Hierarchy.run` asks. The host's value is what its ranks bring to the leader,
    the host's result what the leader has for them in the end; both flat. `x` is this rank's data (flat, not empty on
    every rank), None where no rank has any.
    """

    x: Tensor | None
    header: bytes
    is_little: bool
    table: Tensor | None = None  # int64, of as many elements on every host: travels with the header of much data

    def check_tables(self, tables: list[Tensor], sequence: int) -> None:  # noqa: B027
        """Raise CommMismatchError where the tables of all hosts do not fit: the same verdict on every leader."""

    @abc.abstractmethod
    def numel_of(self, rank: int) -> int:
        """Elements of that rank's x."""

    @abc.abstractmethod
    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        """Elements and dtype of that host's value."""

    @abc.abstractmethod
    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        """Elements and dtype of that host's result."""

    # ---- little data

    @abc.abstractmethod
    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        """The host's value from the x of its ranks; on the leader."""

    @abc.abstractmethod
    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        """The result of `host` from the values of all hosts; on leaders."""

    @abc.abstractmethod
    def take(self, result: Tensor) -> Tensor | None:
        """This rank's result from its host's, which is a piece of a larger buffer: copied."""

    # ---- much data

    @abc.abstractmethod
    def bring(self, local: HostLocal) -> Tensor | None:
        """The host's value on the leader; None on others."""

    @abc.abstractmethod
    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        """The host's result; on leaders."""

    @abc.abstractmethod
    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor | None:
        """This rank's result; `result` on the leader only."""


class HostLocal:
    """The ranks of this host, by their index here, for one call. A rank that is alone is handed back what it gives."""

    def __init__(self, world: LocalWorld | None, seconds: float) -> None:
        self.rank, self.size = (0, 1) if world is None else (world.rank, world.size)
        self._shared = None if world is None else SharedMemoryTransport(world, seconds, mode="blocking")

    def barrier(self) -> None:
        if self._shared is not None:
            self._shared.barrier().finish()

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self._shared is None else self._shared.all_gather(x, [x.numel()] * self.size).finish()

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return x if self._shared is None else self._shared.broadcast(x, src).finish()

    def reduce(self, x: Tensor, op: str) -> Tensor | None:
        """To the leader."""
        return x if self._shared is None else self._shared.reduce(x, 0, op).finish()

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """To the leader."""
        if self._shared is None:
            return x
        nothing = [0] * (self.size - 1)
        received = sizes if self.rank == 0 else [0] * self.size
        gathered = self._shared.all_to_all(x, [x.numel(), *nothing], received).finish()
        return gathered if self.rank == 0 else None

    def scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """From the leader; on the others x gives the dtype only."""
        if self._shared is None:
            return x
        received = [sizes[self.rank]] + [0] * (self.size - 1)
        if self.rank == 0:
            return self._shared.all_to_all(x, sizes, received).finish()
        return self._shared.all_to_all(x.new_empty(0), [0] * self.size, received).finish()


class Hierarchy:
    """The calls of a group on this rank, in order. `leaders` on the lowest rank of each host only; `world` where a host
    has several."""

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], world: LocalWorld | None, leaders: Leaders | None
    ) -> None:
        self.hosts = hosts
        self.host = next(host for host, ranks in enumerate(hosts) if rank in ranks)
        self.ranks = hosts[self.host]  # here
        self.index = list(self.ranks).index(rank)  # among them
        self.sequencer = Sequencer()
        self.world, self._leaders = world, leaders
        self._pid = os.getpid()
        self._sequence = 0
        self._broken = ""
        self._block = torch.zeros(_HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
        self._outcome = torch.zeros(_OUTCOME_BYTES + INLINE_BYTES, dtype=torch.uint8)
        self._header_bytes = _HEADER_BYTES * max(map(len, hosts))  # of a leader's message
        self._messages = torch.zeros(len(hosts), self._header_bytes + INLINE_BYTES, dtype=torch.uint8)

    def run(self, call: Collective, deadline: float) -> Tensor | None:
        """This rank's result. One call at a time: use `sequencer`."""
        try:
            return self._guarded(lambda: self._perform(call, deadline))
        finally:
            self._sequence += 1

    def run_here(self, action: Callable[[HostLocal], T], seconds: float) -> T:
        """An action of this host's ranks among themselves, in turn with the calls of all."""
        deadline = time.monotonic() + seconds
        result: T = self.sequencer.run(lambda: self._guarded(lambda: action(HostLocal(self.world, _left(deadline)))))
        return result

    def _guarded(self, action: Callable[[], T]) -> T:
        """A failure ends the group, apart from a mismatch."""
        if os.getpid() != self._pid:
            raise CommError("this process was forked from a rank: it cannot take part in the collectives of its group")
        if self._broken:
            raise CommError(f"an earlier collective of this group failed ({self._broken}): {NEW_GROUP}")
        try:
            return action()
        except CommMismatchError:
            raise
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            if self._leaders is not None:
                self._leaders.give_up(error)
            raise

    def _perform(self, call: Collective, deadline: float) -> Tensor | None:
        local = HostLocal(self.world, _left(deadline))
        self._write_block(call)
        blocks = local.all_gather(self._block).view(local.size, -1)
        headers = [bytes(block) for block in blocks[:, :_HEADER_BYTES].numpy()]
        # A host that disagrees still takes part in the exchange of headers: all hosts hear of it there.
        agreed = headers.count(call.header) == local.size
        if self._leaders is not None:
            try:
                result = self._lead(self._leaders, call, local, blocks, agreed, deadline)
            except BaseException as error:
                with suppress(CommError):  # what the others wait for, if they still can
                    self._tell(HostLocal(self.world, _TELL_S), error, None)
                raise
            self._tell(local, None, result if call.is_little else None)
            return call.take(result) if call.is_little else call.hand_on(local, result)
        if agreed and not call.is_little:
            call.bring(local)
        inline = self._hear(deadline)
        if not call.is_little:
            return call.hand_on(local, None)
        return call.take(_typed(inline, *call.result_of(self.host)))

    def _write_block(self, call: Collective) -> None:
        self._block[:_HEADER_BYTES] = torch.frombuffer(bytearray(call.header), dtype=torch.uint8)
        if call.x is not None and call.is_little:
            _typed(self._block[_HEADER_BYTES:], call.x.numel(), call.x.dtype).copy_(call.x)

    # ---- the leader's part

    def _lead(
        self, leaders: Leaders, call: Collective, local: HostLocal, blocks: Tensor, agreed: bool, deadline: float
    ) -> Tensor:
        leaders.sequence = self._sequence
        leaders.activity = _describe(call.header)
        headers = blocks[:, :_HEADER_BYTES].flatten()
        self._messages[:, : headers.numel()] = headers
        if agreed and call.is_little and call.x is not None:
            xs = [
                _typed(block[_HEADER_BYTES:], call.numel_of(rank), call.x.dtype)
                for rank, block in zip(self.ranks, blocks, strict=True)
            ]
            value = call.combine_ranks(xs)
            _typed(self._messages[:, self._header_bytes :], *call.value_of(self.host)).copy_(value)
        elif agreed and call.table is not None:
            _typed(self._messages[:, self._header_bytes :], call.table.numel(), torch.int64).copy_(call.table)
        sizes = [self._messages.size(1)] * len(self.hosts)
        # Headers go first, and little data with them: one message.
        exchange = leaders.start(self._messages.view(-1), sizes, sizes, deadline)
        brought = call.bring(local) if agreed and not call.is_little else None  # while the headers travel
        received = leaders.finish(exchange, deadline).view(self._messages.shape)
        self._compare(call.header, received)
        if call.table is not None:
            inline = received[:, self._header_bytes :]
            call.check_tables(list(_typed(inline, call.table.numel(), torch.int64)), self._sequence)
        if not call.is_little:
            assert brought is not None
            return call.exchange(leaders, brought, deadline)
        return call.combine_hosts(
            [_typed(message[self._header_bytes :], *call.value_of(host)) for host, message in enumerate(received)],
            self.host,
        )

    def _compare(self, own: bytes, received: Tensor) -> None:
        headers: dict[int, bytes] = {}
        for ranks, message in zip(self.hosts, received[:, : self._header_bytes].numpy(), strict=True):
            raw = bytes(message)
            for index, rank in enumerate(ranks):
                headers[rank] = raw[index * _HEADER_BYTES : (index + 1) * _HEADER_BYTES]
        if any(header != own for header in headers.values()):
            called = "; ".join(f"rank {rank}: {_describe(headers[rank])}" for rank in sorted(headers))
            raise CommMismatchError(
                f"call #{self._sequence}: the ranks of the group called different collectives; {called}"
            )

    # ---- the outcome

    def _tell(self, local: HostLocal, error: BaseException | None, result: Tensor | None) -> None:
        kind, text = 0, b""
        if error is not None:
            kind = next((k for k, known in enumerate(_KINDS) if type(error) is known), 1)
            text = (str(error) if isinstance(error, CommError) else f"rank {self.ranks[0]}: {error!r}").encode()
        head = bytearray(_OUTCOME.pack(kind, len(text)) + text)[:_OUTCOME_BYTES]
        self._outcome[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        if result is not None:
            _typed(self._outcome[_OUTCOME_BYTES:], result.numel(), result.dtype).copy_(result)
        local.broadcast(self._outcome, 0)

    def _hear(self, deadline: float) -> Tensor:
        """The host's result where it is little."""
        local = HostLocal(self.world, _left(deadline) + 1.8 * GRACE_S)  # after the leader, which waits beyond it too
        outcome = local.broadcast(self._outcome, 0)
        raw = bytes(outcome[:_OUTCOME_BYTES].numpy())
        kind, length = _OUTCOME.unpack_from(raw)
        error = _KINDS[kind]
        if error is not None:
            raise error(raw[_OUTCOME.size : _OUTCOME.size + length].decode(errors="replace"))
        return outcome[_OUTCOME_BYTES:]


def header_of(
    op: str, x: Tensor | None, *, reduction: str = "", root: int = -1, count: int = 0, sizes: Sequence[int] = ()
) -> bytes:
    """The header that ranks compare. `count`: elements of the whole."""
    dtype = "" if x is None else str(x.dtype).removeprefix("torch.")
    checksum = _checksum(tuple(sizes)) if sizes else 0
    packed = _HEADER.pack(op.encode(), dtype.encode(), reduction.encode(), root, count, checksum)
    return packed.ljust(_HEADER_BYTES, b"\0")


@lru_cache(maxsize=256)
def _checksum(sizes: tuple[int, ...]) -> int:
    return zlib.crc32(array("q", sizes).tobytes())


def _describe(header: bytes) -> str:
    op, dtype, reduction, root, count, checksum = _HEADER.unpack_from(header)
    op, dtype, reduction = (text.rstrip(b"\0").decode(errors="replace") for text in (op, dtype, reduction))
    if op == "barrier":
        return op
    words = f"{op} ({reduction})" if reduction else op
    words += f" of {count} elements, {dtype}"
    if root >= 0:
        words += f", root {root}"
    return words + (f", sizes #{checksum % 10000}" if checksum else "")


def _typed(memory: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """So many elements at the beginning of (each row of) some bytes."""
    return memory[..., : numel * dtype.itemsize].view(dtype)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
