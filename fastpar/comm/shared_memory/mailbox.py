"""Messages between CPU ranks of one host, through shared memory (csrc/comm/mailbox.h has the protocol).

Received tensors lie where the sender has put them, in memory that both have mapped: nothing is copied on this side, and
no new memory is touched, which costs more than the copy (2.4 GB/s against 10 and more). The block goes back to
its sender when the last view of the tensor dies.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import weakref
from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.errors import CommError
from fastpar.comm.message_format import DTYPE_NUMBERS
from fastpar.comm.shared_memory.library import library
from fastpar.comm.shared_memory.rendezvous import HostMemory, Hosts, Rendezvous, Share, addresses_of, share_memory

_SMALL_BYTES = 64 << 10  # copied in a few microseconds, for which the interpreter's lock need not be given up
_MAX_ADDRESS_BYTES = 1 << 44  # of the arenas of all ranks, in the address space of each (of 1 << 47)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_from_dlpack = torch.utils.dlpack.from_dlpack
_OutArray = c_int64 * 5


class SharedMailbox:
    """See `fastpar.comm.point_to_point.MessageChannel` and the module docstring."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._library = library()
        self._send, self._receive = self._library.mail_send, self._library.mail_receive
        self._send_small = self._library.keeping_lock("mail_send")
        self._receive_now = self._library.keeping_lock("mail_receive_now")
        self._finalizer = weakref.finalize(self, _destroy, handle, os.getpid())

    def send(self, peer: int, tag: int, tensors: Sequence[Tensor], note: bytes, kind: int) -> None:
        words: list[int] = []
        num_bytes = 0
        for x in tensors:
            shape = x.shape
            words += (x.data_ptr(), DTYPE_NUMBERS[x.dtype] | len(shape) << 8, *shape)
            num_bytes += x.nbytes
        spec = _words(len(words)).pack(*words)
        send = self._send_small if num_bytes <= _SMALL_BYTES else self._send
        status = send(self._handle, peer, tag, kind, note, len(note), spec, len(tensors))
        if status:
            self._library.check_status(status)

    def receive(self, peer: int, tag: int, timeout: float) -> tuple[list[Tensor], bytes, int]:
        out = _OutArray()
        status = self._receive_now(self._handle, peer, tag, out)
        if status < 0:
            status = self._receive(self._handle, peer, tag, timeout, out)
        if status:
            self._library.check_status(status)
        kind, num_tensors, note_bytes, note, tensors = out
        pointers = (c_int64 * num_tensors).from_address(tensors) if num_tensors else ()
        return (
            [_from_dlpack(_new_capsule(pointer, b"dltensor", None)) for pointer in pointers],
            ctypes.string_at(note, note_bytes) if note_bytes else b"",
            kind,
        )

    def ready(self, peer: int, tag: int) -> bool:
        found: int = self._library.mail_ready(self._handle, peer, tag)
        if found < 0:
            self._library.check_status(-found)
        return bool(found)

    def abort(self, reason: str) -> None:
        self._library.check_status(self._library.mail_abort(self._handle, reason.encode()))

    def close(self) -> None:
        self._library.mail_close(self._handle)

    def used_bytes(self) -> int:
        """Bytes of this rank's memory that messages not yet received, and tensors that receivers hold, take."""
        return self._stats()[0]

    def touched_bytes(self) -> int:
        """The most that ever was in use, with the gaps in between."""
        return self._stats()[1]

    def _stats(self) -> Any:
        out = (c_int64 * 2)()
        self._library.mail_stats(self._handle, out)
        return out


def join(meeting: Rendezvous, hosts: Hosts, ranks_on_host: int) -> SharedMailbox | str:
    """The mailbox of this rank of a group whose ranks share a host; or why that cannot be, the same on every rank."""
    rank, size = meeting.rank, meeting.size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    arena_bytes = min(memory, _MAX_ADDRESS_BYTES // size)

    def create(_: Sequence[int]) -> tuple[int, HostMemory]:
        handle = library().mail_create(rank, size, max(ranks_on_host, size), arena_bytes) or 0
        if not handle:
            return 0, HostMemory.none(library().error_text() or "unknown")
        return handle, HostMemory(os.getpid(), library().mail_descriptor(handle), library().mail_nonce(handle), "")

    share = Share(create, _connect, library().mail_seal, library().mail_destroy)
    handle = share_memory(meeting, hosts[0], share)
    return handle if isinstance(handle, str) else SharedMailbox(handle)


def _connect(handle: int, memories: Sequence[HostMemory]) -> str:
    try:
        library().check_status(library().mail_connect(handle, *addresses_of(memories)))
    except CommError as error:
        return str(error)
    return ""


def _destroy(handle: int, owner: int) -> None:
    if os.getpid() == owner:
        library().mail_destroy(handle)


@functools.lru_cache(maxsize=256)
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")
