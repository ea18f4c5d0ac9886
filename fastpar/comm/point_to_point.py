"""Messages between two ranks of a group: tensors of any shapes and dtypes, with a tag and a note.

    p2p = PointToPoint(mesh.group("pp"))            # all ranks of the group
    p2p.send(1, tag, [hidden], note=b"...")         # on rank 0; never waits for rank 1
    (hidden,), note = p2p.recv(0, tag)              # on rank 1; shapes and dtypes come with the message

Which way they go:

    CPU tensors, one host         shared memory           fastpar/comm/shared_memory/mailbox.py, csrc/comm/mailbox.h
    CPU tensors, several hosts    gloo                    fastpar/comm/multi_host/gloo_mailbox.py
    tensors on devices            the group's backend,    fastpar/comm/torch/device_lanes.py
                                  described on the CPU

Note: views. Over shared memory, received tensors are views of the sender's memory: ordinary tensors, to read and write
as one likes, whose block goes back to the sender when the last view of it dies, on whatever thread; they may outlive
both ends. The other way is to copy into memory of one's own. Round trips of `fastpar bench p2p --settings tuned`,
medians, two ranks on two cores (bench/results has the rows):

                            1 MB       16 MB
    views                   0.10 ms    2.6 ms
    a copy, new tensor      0.18 ms    9.3 ms      new pages cost more than the copy
    a copy, kept buffer     0.16 ms    5.7 ms      one more pass through the caches

A copy into a pool would cost a pass and a pool on each side, and win nothing but that a receiver which keeps tensors
for long keeps its own memory instead of the sender's. That memory is on the sender's NUMA node. A process forked from
a rank shares the memory of received tensors with it, where ordinary tensors would be copied on write.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.arguments import check_seconds, checked
from fastpar.comm.errors import CommError, PeerFailedError
from fastpar.comm.groups import name_meeting, ranks_of, resolve_group, store_of
from fastpar.comm.message_format import DTYPE_NUMBERS
from fastpar.comm.multi_host import gloo_mailbox
from fastpar.comm.shared_memory import mailbox as shared_mailbox
from fastpar.comm.shared_memory.mailbox import SharedMailbox
from fastpar.comm.shared_memory.rendezvous import SEVERAL_HOSTS, Rendezvous, find_hosts, ranks_on_host
from fastpar.comm.torch.device_lanes import ANNOUNCEMENTS, PLAIN, DeviceLanes
from fastpar.comm.transport_selector import TRANSPORTS
from fastpar.mesh.lifetime import timeout_of

_LOGGER = logging.getLogger("fastpar.comm")
_MAX_TAG = ANNOUNCEMENTS - 1


class MessageChannel(Protocol):
    """A transport of messages of CPU tensors. Peers and tensors have been checked; `kind` is the caller's."""

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes, kind: int) -> None: ...
    def receive(self, peer: int, tag: int, timeout: float) -> tuple[list[Tensor], bytes, int]: ...
    def ready(self, peer: int, tag: int) -> bool: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...


class PointToPoint:
    """Messages between the ranks of `group` (a ProcessGroup or a 1-D DeviceMesh; None: one rank, and no peers).

    timeout     seconds that `recv` waits; by default those of the group's mesh, 600 for other groups
    transport   "auto": shared memory where all ranks can share it; "shared_memory": or else an error; "torch": never

    Made by all ranks of the group, several objects in the same order on all. Raises CommTimeoutError naming ranks that
    have not come within `timeout`, CommError where the ranks cannot be connected.

    `size` ranks map each other's memory, of which only what is outstanding is real: what was sent and not received,
    and received tensors that live. It is used again, and given back to the system when all ends are gone. Threads may
    share an object. What a message holds, and that ranks send what others expect, is up to the callers.
    """

    @checked(computed=False)
    def __init__(
        self, group: ProcessGroup | DeviceMesh | None, *, timeout: float | None = None, transport: str = "auto"
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        found = resolve_group(group)
        timeout = check_seconds(timeout_of(found) if timeout is None else timeout)
        self.timeout = timeout
        self.rank = 0 if found is None else found.rank()
        self.size = 1 if found is None else found.size()
        self._sent: Counter[int] = Counter()  # messages by peer, for errors
        self._received: Counter[int] = Counter()
        self._channel: MessageChannel | None = None
        self._lanes: DeviceLanes | None = None
        if found is not None and self.size > 1:
            self._channel = _join(found, timeout, transport)
            device_type = _device_type(found)
            if device_type:
                self._lanes = DeviceLanes(found, device_type, timeout)

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes = b"") -> None:
        """Send a message: never waits for the receiver. The tensors may be overwritten or freed afterwards.

        Raises PeerLostError or PeerFailedError where the peer is known to be gone; ValueError for tensors that cannot
        be sent (devices without a backend, layouts that are not dense, subclasses, quantized dtypes); CommError where
        what is outstanding has filled the machine's memory.
        """
        channel = self._open(peer, tag)
        if isinstance(tensors, Tensor):
            raise TypeError("tensors must be a sequence of Tensors, got Tensor")
        if not isinstance(note, bytes):
            raise TypeError(f"note must be bytes, got {type(note).__name__}")
        checked = [_sendable(x, self._lanes) for x in tensors]
        try:
            if self._lanes is not None and any(self._lanes.is_on_device(x) for x in checked):
                self._lanes.send(channel, peer, tag, checked, note)
            else:
                channel.send(peer, tag, checked, note, PLAIN)
        except CommError as error:
            raise self._failure(error, "send", self._sent[peer], tag, f"to rank {peer}") from error
        self._sent[peer] += 1

    def recv(self, peer: int, tag: int) -> tuple[list[Tensor], bytes]:
        """The next message of that peer with that tag; waits for it. Tensors need no gradient, and are contiguous.

        Raises CommTimeoutError after `timeout` seconds (the message may still come, and be received), PeerLostError
        when the peer has closed or the process of any rank has ended without closing, PeerFailedError when a rank has
        called `abort`. A message that is there is received whatever has happened since.
        """
        channel = self._open(peer, tag)
        try:
            tensors, note, kind = channel.receive(peer, tag, self.timeout)
            if kind != PLAIN:
                if self._lanes is None:
                    raise CommError(f"a message of kind {kind}, which there is none of: its sender is damaged")
                tensors, note = self._lanes.receive(channel, peer, tensors, note, self.timeout)
        except CommError as error:
            raise self._failure(error, "recv", self._received[peer], tag, f"from rank {peer}") from error
        self._received[peer] += 1
        return tensors, note

    def _failure(self, error: CommError, what: str, number: int, tag: int, peer: str) -> CommError:
        if isinstance(error, PeerFailedError):  # whose text is the other rank's
            return error
        return type(error)(f"{what} #{number} {peer} with tag {tag} on rank {self.rank} of {self.size}: {error}")

    def ready(self, peer: int, tag: int) -> bool:
        """True when `recv` would return at once. A hint: never waits, and does not tell of failures."""
        return self._open(peer, tag).ready(peer, tag)

    @checked(computed=False)
    def abort(self, reason: str) -> None:
        """Give up: waits of every other rank raise PeerFailedError(this rank, reason), now or later."""
        if self._channel is not None:
            self._channel.abort(reason)

    def close(self) -> None:
        """No more messages either way. What was sent can still be received; received tensors stay."""
        if self._channel is not None:
            self._channel.close()
        if self._lanes is not None:
            self._lanes.close()

    def __repr__(self) -> str:
        return f"PointToPoint(rank={self.rank}, size={self.size}, timeout={self.timeout:g})"

    def _open(self, peer: int, tag: int) -> MessageChannel:
        if peer == self.rank or not 0 <= peer < self.size or self._channel is None:
            others = "there is no other rank" if self.size == 1 else f"another rank of 0..{self.size - 1}"
            raise ValueError(f"peer must be another rank ({others}), got {peer} on rank {self.rank}")
        if not 0 <= tag <= _MAX_TAG:
            raise ValueError(f"tag must be in 0..2**62 - 1, got {tag}")
        return self._channel


def _join(group: ProcessGroup, timeout: float, transport: str) -> MessageChannel:
    store = store_of(group)
    if store is None:
        raise CommError("this version of torch does not give out the group's store, where the ranks would meet")
    meeting = Rendezvous(store, name_meeting(group), group.rank(), group.size(), timeout)
    # Ranks agree about `transport`, so all of them leave here or none.
    if transport == "torch":
        _log_channel(group, "gloo")
        return gloo_mailbox.join(meeting, timeout)
    found: SharedMailbox | str
    hosts = find_hosts(meeting)
    if isinstance(hosts, str):
        found = hosts
    elif len(hosts) > 1:
        found = SEVERAL_HOSTS
    else:
        found = shared_mailbox.join(meeting, hosts, ranks_on_host())
    if not isinstance(found, str):
        _log_channel(group, "shared memory")
        return found
    if transport == "shared_memory":
        raise CommError(f"the ranks of the group cannot share memory: {found}")
    _log_channel(group, "gloo", found)
    return gloo_mailbox.join(meeting, timeout)


def _log_channel(group: ProcessGroup, through: str, problem: str = "") -> None:
    """Log the channel for an operator, by rank 0 of the group: a fallback within one host is a warning."""
    if group.rank() == 0:
        level = logging.WARNING if problem and problem != SEVERAL_HOSTS else logging.INFO
        why = f": {problem}" if problem else ""
        _LOGGER.log(level, "messages between ranks %s go through %s%s", ranks_of(group), through, why)


def _device_type(group: ProcessGroup) -> str:
    """The devices that this group has a backend for, besides the CPU; empty where there are none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or torch.accelerator.device_count() == 0:
        return ""
    try:
        group._get_backend(torch.device(accelerator.type))
    except RuntimeError:
        return ""
    return accelerator.type


def _sendable(x: Tensor, lanes: DeviceLanes | None) -> Tensor:
    """x as something that can be copied byte by byte."""
    # The common case, by the fewest questions.
    if type(x) is Tensor and x.is_cpu and x.dtype in DTYPE_NUMBERS and x.is_contiguous():
        if x.is_conj() or x.is_neg():
            return x.resolve_conj().resolve_neg()
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"tensors must be a sequence of Tensors, got {type(x).__name__} in it")
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"a {type(x).__name__} cannot be sent: send the plain tensors that it is made of")
    if x.layout != torch.strided or x.is_quantized or x.dtype not in DTYPE_NUMBERS:
        raise ValueError(f"only dense tensors of ordinary dtypes can be sent, got {x.layout} {x.dtype}")
    if not x.is_cpu and not (lanes is not None and lanes.is_on_device(x)):
        raise ValueError(f"the group has no backend for tensors on {x.device}")
    return x.detach().contiguous().resolve_conj().resolve_neg()
