"""Tensors on devices, as parts of messages whose descriptions travel between CPUs: see `fastpar.comm.point_to_point`.

The description says everything that a receiver has to know to allocate, so that nothing is read back from a device. The
bytes go by the group's own backend (NCCL): sends and receives of one pair of ranks match in the order in which they are
posted, whatever the tags of the messages. So every message that has bytes to go is also announced on a tag of its own,
and the receiver posts what it needs in the order of these announcements, up to the message that was asked for.

Note: why two groups and a thread. NCCL runs what two ranks exchange within one group in one order on each side; a send
that waits for its receiver would keep a receive behind it waiting, and two such ranks each other. So what goes to a
higher rank has one group, and what goes to a lower one another. And a group's first send between two ranks waits for
the receiver to come, on the host: it is done by a thread of that peer's.

Where the group has no backend for the device but gloo, the bytes go through the CPU instead, which synchronises.

Not measured yet; the CUDA path was tested with gloo and CPU tensors in its place.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm.errors import CommError
from fastpar.comm.groups import name_meeting, store_of
from fastpar.comm.message_format import describe, flat_bytes, parse

ANNOUNCEMENTS = 1 << 62  # the tag of announcements, which users cannot use
PLAIN, WITH_LANES = 0, 1  # kinds of messages
_ON_CPU, _BY_LANE, _THROUGH_CPU = range(3)


class _Channel(Protocol):
    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes, kind: int) -> None: ...
    def receive(self, peer: int, tag: int, timeout: float) -> tuple[list[Tensor], bytes, int]: ...


def _new_backend(name: str, store: dist.Store, group: ProcessGroup, timeout: float) -> Any:
    """Another backend of the group's kind over its ranks, which torch's list of groups does not know.

    dist.new_group would need every rank of the job, or names the new group by how many groups this rank has made, which
    ranks of a pipeline whose stages differ do not agree on: each would wait for the others under another name. And
    where the job's group is bound to a device, it splits that, which needs every rank too.
    """
    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
    if name == "gloo":
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout))
    raise CommError(f"tensors on devices are sent by NCCL or gloo; the group has the backend {name!r}")


@dataclass(frozen=True)
class _Posted:
    """Receives of one message: posted, and not waited for yet."""

    tensors: list[Tensor]
    works: list[Any]


class DeviceLanes:
    """One rank's part. Made by all ranks of `group` together."""

    def __init__(self, group: ProcessGroup, device_type: str, timeout: float) -> None:
        self._rank, self._device_type = group.rank(), device_type
        backend = group._get_backend(torch.device(device_type)).name()
        self._goes_through_cpu = backend == "gloo" and device_type != "cpu"
        self._groups: dict[str, Any] = {}
        if not self._goes_through_cpu:
            store = store_of(group)
            if store is None:
                raise CommError("this version of torch does not give out the group's store, where the ranks would meet")
            for name in ("up", "down"):
                at = dist.PrefixStore(f"{name_meeting(group)}/{name}", store)
                self._groups[name] = _new_backend(backend, at, group, timeout)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._sent: dict[int, int] = {}  # by peer: messages that were announced to it
        self._announced: dict[int, int] = {}  # and by it
        self._posted: dict[tuple[int, int], _Posted] = {}  # by peer and number of the message
        self._outboxes: dict[int, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []

    def is_on_device(self, x: Tensor) -> bool:
        return x.device.type == self._device_type

    def send(self, channel: _Channel, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes) -> None:
        ways = [self._way(x) for x in tensors]
        lane = [x for x, way in zip(tensors, ways, strict=True) if way == _BY_LANE]
        others = [x.cpu() for x, way in zip(tensors, ways, strict=True) if way != _BY_LANE]
        with self._sending:
            number = self._sent.get(peer, 0)
            self._sent[peer] = number + 1
            channel.send(peer, ANNOUNCEMENTS, [], describe(lane), WITH_LANES)
            with_bytes = [x for x in lane if x.numel() > 0]
            if with_bytes:
                self._post(peer, with_bytes)
        head = struct.pack(f"<qq{len(ways)}B", number, len(ways), *ways)
        channel.send(peer, tag, others, head + note, WITH_LANES)

    def receive(
        self, channel: _Channel, peer: int, others: Sequence[Tensor], note: bytes, timeout: float
    ) -> tuple[list[Tensor], bytes]:
        """The whole message, from what of it came through the channel."""
        number, count = struct.unpack_from("<qq", note) if len(note) >= 16 else (-1, -1)
        ways, rest = note[16 : 16 + max(count, 0)], note[16 + max(count, 0) :]
        if number < 0 or len(ways) != count or len([way for way in ways if way != _BY_LANE]) != len(others):
            raise CommError(f"a message of rank {peer} is not what a rank writes")
        with self._receiving:
            while self._announced.get(peer, 0) <= number:
                # Sent before the message, so it is there or about to be.
                _, description, _ = channel.receive(peer, ANNOUNCEMENTS, timeout)
                announced = self._announced.get(peer, 0)
                self._posted[peer, announced] = self._post_receives(peer, description)
                self._announced[peer] = announced + 1
            if (peer, number) not in self._posted:
                raise CommError(f"message {number} of rank {peer} came twice")
            posted = self._posted.pop((peer, number))
        try:
            for work in posted.works:
                work.wait()
        except RuntimeError as error:
            raise CommError(f"the tensors of a message of rank {peer} did not come: {error}") from error
        if len(posted.tensors) != ways.count(_BY_LANE):
            raise CommError(f"a message of rank {peer} is not what it announced")
        from_lane, from_channel = iter(posted.tensors), iter(others)
        tensors = []
        for way in ways:
            x = next(from_lane if way == _BY_LANE else from_channel)
            tensors.append(x.to(self._device()) if way == _THROUGH_CPU else x)
        return tensors, rest

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.put(None)
        for thread in self._threads:
            thread.join(1.0)
        for group in self._groups.values():
            with contextlib.suppress(RuntimeError, AttributeError):  # torch.distributed has ended before
                group.shutdown()
        self._groups.clear()

    def _way(self, x: Tensor) -> int:
        if not self.is_on_device(x):
            return _ON_CPU
        return _THROUGH_CPU if self._goes_through_cpu else _BY_LANE

    def _device(self) -> torch.device:
        if self._device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self._device_type, torch.get_device_module(self._device_type).current_device())

    def _group_to(self, peer: int, *, receives: bool) -> Any:
        goes_up = (peer < self._rank) if receives else (peer > self._rank)
        return self._groups["up" if goes_up else "down"]

    # ---- sending

    def _post(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Copies, made on the current stream, for the peer's thread to send."""
        copies = [flat_bytes(x.clone(memory_format=torch.contiguous_format)) for x in tensors]
        ready = None
        if self._device_type != "cpu":
            # Of the tensors' device, which need not be the current one.
            where = next((copy.device for copy in copies), None)
            ready = torch.get_device_module(self._device_type).current_stream(where).record_event()
        if peer not in self._outboxes:
            self._outboxes[peer] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._send_to, args=(peer, self._device()), name=f"fastpar-lane-{peer}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._outboxes[peer].put((copies, ready))

    def _send_to(self, peer: int, device: torch.device) -> None:
        outbox, group = self._outboxes[peer], self._group_to(peer, receives=False)
        if device.type == "cpu":
            while (item := outbox.get()) is not None:
                for copy in item[0]:
                    group.send([copy], peer, 0).wait()
            return
        module = torch.get_device_module(device.type)
        module.set_device(device)
        # Of this thread alone: waits for the copies, and for the sends, which run on streams of NCCL's.
        side = module.Stream()
        with module.stream(side):
            while (item := outbox.get()) is not None:
                copies, ready = item
                side.wait_event(ready)
                works: list[Any] = [group.send([copy], peer, 0) for copy in copies]
                for work, copy in zip(works, copies, strict=True):
                    work.wait()  # orders `side`, and blocks nobody
                    copy.record_stream(side)  # its memory is not used again before `side` has come here
                del item, copies, copy

    # ---- receiving

    def _post_receives(self, peer: int, description: bytes) -> _Posted:
        group, device = self._group_to(peer, receives=True), self._device()
        tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in parse(description)[0]]
        works = [group.recv([flat_bytes(x)], peer, 0) for x in tensors if x.numel() > 0]
        return _Posted(tensors, works)
