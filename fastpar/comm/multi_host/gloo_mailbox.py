"""Messages of CPU tensors between ranks that do not share memory, through a gloo backend that nobody else uses.

Note: threads. A gloo receive cannot be waited for in slices: a wait that times out closes all connections of the
backend. So for every peer a thread receives whatever that peer sends, and keeps it until it is asked for; that is also
what makes sends wait for nobody. A thread per peer that is sent to waits until a message has left. Callers wait on a
condition, with their deadline. The receiving threads see at once when the process of a peer ends, whoever is awaited;
but for one case: gloo (of torch 2.13) does not tell a receive whose message has come in part. So a second thread for
every peer waits for a message that never comes, which gloo does end. The thread with the partial message stays.

Note: wire. A message is a header of `_HEADER_BYTES`, the rest of the description where that is longer, and the bytes of
every tensor that has any; all in order, so that nothing needs a tag of gloo's. The receiver learns from the header what
comes next. Two more kinds of headers say that a rank closes, or that it has given up and why.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.errors import CommError, CommTimeoutError, PeerFailedError, PeerLostError
from fastpar.comm.message_format import describe, flat_bytes, parse
from fastpar.comm.shared_memory.library import LateWait, check_interrupt
from fastpar.comm.shared_memory.rendezvous import Rendezvous
from fastpar.comm.torch.transport import let_gloo_finish_at_exit

_HEADER_BYTES = 256
_PREFIX = struct.Struct("<qqqq")  # what, tag, kind, bytes of the description
_MAX_DESCRIPTION_BYTES = 1 << 31
_ROOM = _HEADER_BYTES - _PREFIX.size
_MESSAGE, _CLOSE, _ABORT = range(3)
_FOREVER = timedelta(days=365)
_SLICE_S = 0.1  # between two looks at signals
_FLUSH_S = 10.0  # for what was sent to leave, when this end closes
_FLUSH_ABORT_S = 0.5
_END_S = 1.0
_LAST_WORDS_S = 0.5  # for the receiving thread to go through what came before a connection ended
_ANY_TAG, _CLOSING_TAG, _WATCH_TAG = range(3)


@dataclass(frozen=True)
class _Letter:
    tensors: list[Tensor]
    note: bytes
    kind: int


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parcel(what: int, tag: int = 0, kind: int = 0, description: bytes = b"") -> list[Tensor]:
    """The header and, where it is too small, the rest of the description."""
    head = _PREFIX.pack(what, tag, kind, len(description)) + description[:_ROOM]
    rest = description[_ROOM:]
    return [_as_tensor(head.ljust(_HEADER_BYTES, b"\0"))] + ([_as_tensor(rest)] if rest else [])


class _Wire:
    """State shared by the threads: they hold this, and not the mailbox, which must be able to go."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self.changed = threading.Condition()
        self.letters: dict[tuple[int, int], deque[_Letter]] = {}  # by peer and tag
        self.closed: set[int] = set()  # peers that have said so
        self.lost: dict[int, str] = {}
        self.failure: PeerFailedError | None = None  # the first that this rank has heard of
        self.is_closing = False
        self._outboxes: dict[int, queue.SimpleQueue[list[Tensor] | None]] = {}
        self._senders: list[threading.Thread] = []
        self._receivers = {peer: self._start(self._receive_from, peer) for peer in self.peers}
        self._watchers = [self._start(self._watch, peer) for peer in self.peers]

    def post(self, peer: int, parcel: list[Tensor] | None) -> None:
        """Send this, behind what was posted before; None: that was all."""
        with self.changed:
            if peer not in self._outboxes:
                self._outboxes[peer] = queue.SimpleQueue()
                self._senders.append(self._start(self._send_to, peer))
        self._outboxes[peer].put(parcel)

    def stop(self, last_words: Sequence[Tensor], seconds: float) -> None:
        """Let what was posted leave, for so many seconds, and end all threads."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        for peer in self.peers:
            if last_words:
                self.post(peer, list(last_words))
            self.post(peer, None)
        _join(self._senders, seconds)
        with contextlib.suppress(RuntimeError):  # a wait that times out closes all connections
            buffer = torch.empty(1, dtype=torch.uint8)
            self.backend.recv([buffer], self.peers[0], _CLOSING_TAG).wait(timedelta(milliseconds=1))
        _join([*self._receivers.values(), *self._watchers, *self._senders], _END_S)

    def _start(self, work: Any, peer: int) -> threading.Thread:
        thread = threading.Thread(target=work, args=(peer,), name=f"fastpar-mail-{peer}", daemon=True)
        thread.start()
        return thread

    def _send_to(self, peer: int) -> None:
        while (parcel := self._outboxes[peer].get()) is not None:
            try:
                for x in parcel:
                    self.backend.send([x], peer, _ANY_TAG).wait(_FOREVER)
            except RuntimeError as error:
                self._lose(peer, error)
                return

    def _receive_from(self, peer: int) -> None:
        try:
            while self._receive_one(peer):
                pass
        except RuntimeError as error:
            self._lose(peer, error)

    def _watch(self, peer: int) -> None:
        """See the end of a peer that left in the middle of a message: see the module docstring."""
        try:
            self.backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _WATCH_TAG).wait(_FOREVER)
        except RuntimeError as error:
            if not self.is_closing:
                self._receivers[peer].join(_LAST_WORDS_S)
            self._lose(peer, error)

    def _receive_one(self, peer: int) -> bool:
        header = self._bytes_from(peer, _HEADER_BYTES)
        what, tag, kind, size = _PREFIX.unpack_from(header)
        if what not in (_MESSAGE, _CLOSE, _ABORT) or not 0 <= size <= _MAX_DESCRIPTION_BYTES:
            raise CommError("it sent what no rank sends")
        description = header[_PREFIX.size :][:size]
        if size > _ROOM:
            description += self._bytes_from(peer, size - _ROOM)
        if what == _MESSAGE:
            specs, note = parse(description)
            letter = _Letter([self._tensor_from(peer, *spec) for spec in specs], note, kind)
        with self.changed:
            if what == _MESSAGE:
                self.letters.setdefault((peer, tag), deque()).append(letter)
            elif what == _CLOSE:
                self.closed.add(peer)
            elif self.failure is None:
                self.failure = PeerFailedError(peer, description.decode(errors="replace"))
            self.changed.notify_all()
        return bool(what != _CLOSE)

    def _bytes_from(self, peer: int, size: int) -> bytes:
        return self._tensor_from(peer, torch.uint8, (size,)).numpy().tobytes()

    def _tensor_from(self, peer: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if x.numel() > 0:
            self.backend.recv([x], peer, _ANY_TAG).wait(_FOREVER)
        return x.view(dtype).view(shape)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        with self.changed:
            if not self.is_closing and peer not in self.closed:
                self.lost.setdefault(peer, str(error).split(". This is typically")[0])
                self.changed.notify_all()


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


class GlooMailbox:
    """See `fastpar.comm.point_to_point.MessageChannel` and the module docstring."""

    def __init__(self, wire: _Wire) -> None:
        self._wire, self._rank, self._pid = wire, wire.rank, os.getpid()
        self._given_up: str | None = None
        self._finalizer = weakref.finalize(self, _close, wire, self._pid)

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes, kind: int) -> None:
        wire = self._wire
        self._check_usable()
        if wire.failure is not None and wire.failure.rank == peer:
            raise PeerFailedError(peer, wire.failure.reason)
        if peer in wire.closed or peer in wire.lost:
            raise PeerLostError(self._how_lost(peer))
        # Copies: the caller may overwrite x as soon as `send` returns.
        payload = [flat_bytes(x.clone()) for x in tensors if x.numel() > 0]
        wire.post(peer, [*_parcel(_MESSAGE, tag, kind, describe(tensors, note)), *payload])

    def receive(self, peer: int, tag: int, timeout: float) -> tuple[list[Tensor], bytes, int]:
        wire = self._wire
        deadline = time.monotonic() + timeout
        wait = LateWait()
        with wire.changed:
            while not self._has(peer, tag):
                self._look_for_trouble(peer, tag, deadline, timeout)
                wait.look(
                    lambda waited: (
                        f"rank {self._rank} has waited {waited:.0f} s for a message with tag {tag} of rank {peer}"
                    )
                )
                wire.changed.wait(min(max(deadline - time.monotonic(), 0.0), _SLICE_S))
                check_interrupt()
            letters = wire.letters[peer, tag]
            letter = letters.popleft()
            if not letters:
                del wire.letters[peer, tag]
        return letter.tensors, letter.note, letter.kind

    def ready(self, peer: int, tag: int) -> bool:
        with self._wire.changed:
            return self._has(peer, tag)

    def abort(self, reason: str) -> None:
        if self._given_up is not None:
            return
        self._check_usable()
        self._given_up = reason
        self._wire.stop(_parcel(_ABORT, description=reason.encode()), _FLUSH_ABORT_S)

    def close(self) -> None:
        self._finalizer()

    def _has(self, peer: int, tag: int) -> bool:
        self._check_usable()
        return (peer, tag) in self._wire.letters

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise CommError("this process was forked from a rank: it has no part in its messages")
        if self._given_up is not None:
            raise CommError(f"this rank has given up: {self._given_up}")
        if self._wire.is_closing:
            raise CommError("this end was closed")

    def _look_for_trouble(self, peer: int, tag: int, deadline: float, timeout: float) -> None:
        wire = self._wire
        if wire.failure is not None:
            raise PeerFailedError(wire.failure.rank, wire.failure.reason)
        if wire.lost or peer in wire.closed:  # first who is lost: a peer may have closed its end for that reason
            raise PeerLostError(self._how_lost(peer if peer in wire.lost or not wire.lost else min(wire.lost)))
        if time.monotonic() > deadline:
            others = sorted({other for sender, other in wire.letters if sender == peer})
            said = f"it has sent others, with tag(s) {', '.join(map(str, others[:8]))}" if others else "no other came"
            raise CommTimeoutError(
                f"rank {self._rank} waited {timeout:g} s for a message with tag {tag} of rank {peer}; {said}"
            )

    def _how_lost(self, peer: int) -> str:
        if peer not in self._wire.lost:
            return f"the process of rank {peer} has closed its end"
        return f"the process of rank {peer} has ended, or cannot be reached any more ({self._wire.lost[peer]})"


def _close(wire: _Wire, owner: int) -> None:
    if os.getpid() == owner and not wire.is_closing:
        wire.stop(_parcel(_CLOSE), _FLUSH_S)


def join(meeting: Rendezvous, timeout: float) -> GlooMailbox:
    """The mailbox of this rank of a group. Raises CommError on all ranks where gloo cannot connect them."""
    let_gloo_finish_at_exit()
    meeting.exchange("come", "yes")  # gloo does not say who is missing
    problem, backend = "", None
    store = dist.PrefixStore(meeting.key("gloo"), meeting.store)
    try:
        backend = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timedelta(seconds=timeout))
    except RuntimeError as error:
        problem = str(error)
    for rank, answer in enumerate(meeting.exchange("reached", problem or "yes")):
        if answer != "yes":
            raise CommError(f"rank {rank} cannot reach the others: {answer}")
    return GlooMailbox(_Wire(backend, meeting.rank, meeting.size))
