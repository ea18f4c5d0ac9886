"""The C functions of the shared-memory transport (csrc/comm/c_api.h), through ctypes.

A call costs about a microsecond; the dispatcher's path to a stable-ABI op costs several, more than a small collective
takes. ctypes releases the interpreter's lock during a call, and may need 5 ms to get it back where other threads run:
short calls that wait for nothing keep it (`CommLibrary.keeping_lock`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from typing import Any

from fastpar import _ext
from fastpar.comm.errors import CommError, CommMismatchError, CommTimeoutError, PeerFailedError, PeerLostError

_INTERRUPTED, _PEER_FAILED = 4, 7
_ERRORS: dict[int, type[CommError]] = {1: CommTimeoutError, 2: PeerLostError, 3: CommMismatchError}

_CALL = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, POINTER(c_int64), POINTER(c_int64), c_double]
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "comm_error": (c_char_p, []),
    "comm_create": (c_void_p, [c_int, c_int, c_int, c_int64]),
    "comm_descriptor": (c_int64, [c_void_p]),
    "comm_nonce": (c_uint64, [c_void_p]),
    "comm_connect": (c_int, [c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_uint64)]),
    "comm_name_ranks": (None, [c_void_p, POINTER(c_int64)]),
    "comm_seal": (None, [c_void_p]),
    "comm_destroy": (None, [c_void_p]),
    "comm_set_interrupt_checks": (None, [c_void_p, c_void_p]),
    "comm_set_late_report": (None, [c_void_p, c_double]),
    "comm_note_exit": (None, [c_void_p, c_char_p]),
    "comm_run": (c_int, _CALL),
    "comm_submit": (c_uint64, _CALL),
    "comm_begin": (c_uint64, _CALL),
    "comm_finish": (c_int, [c_void_p, c_uint64]),
    "comm_wait": (c_int, [c_void_p, c_uint64, c_double]),
    "comm_done": (c_int, [c_void_p, c_uint64]),
    "region_create": (c_void_p, [c_int64]),
    "region_descriptor": (c_int64, [c_void_p]),
    "region_connect": (c_int, [c_void_p, c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    "region_seal": (None, [c_void_p]),
    "region_address": (c_void_p, [c_void_p, c_int]),
    "region_forget": (None, [c_void_p, c_void_p]),
    "region_destroy": (None, [c_void_p]),
    "mail_create": (c_void_p, [c_int, c_int, c_int, c_int64]),
    "mail_descriptor": (c_int64, [c_void_p]),
    "mail_nonce": (c_uint64, [c_void_p]),
    "mail_connect": (c_int, [c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_uint64)]),
    "mail_seal": (None, [c_void_p]),
    "mail_destroy": (None, [c_void_p]),
    "mail_send": (c_int, [c_void_p, c_int, c_int64, c_int64, c_char_p, c_int64, c_char_p, c_int64]),
    "mail_receive": (c_int, [c_void_p, c_int, c_int64, c_double, POINTER(c_int64)]),
    "mail_receive_now": (c_int, [c_void_p, c_int, c_int64, POINTER(c_int64)]),
    "mail_ready": (c_int, [c_void_p, c_int, c_int64]),
    "mail_abort": (c_int, [c_void_p, c_char_p]),
    "mail_close": (None, [c_void_p]),
    "mail_failed_rank": (c_int, []),
    "mail_stats": (None, [c_void_p, POINTER(c_int64)]),
    "comm_tune": (None, [c_int64, c_int64]),
}

# What a signal handler or a check raised while a collective waited: set by the watches below, on the thread that waits.
# And what else to ask there, see `interrupted_by`.
_raised = threading.local()


@contextlib.contextmanager
def interrupted_by(check: Callable[[], None]) -> Iterator[None]:
    """While this thread waits in a blocking collective it calls `check` now and then, and gives up if that raises."""
    _raised.check = check
    try:
        yield
    finally:
        del _raised.check


def check_interrupt() -> None:
    """The check of `interrupted_by` on this thread, for waits outside of the library."""
    check = getattr(_raised, "check", None)
    if check is not None:
        check()


def _signal_watch() -> Generator[bool, None, None]:
    """Resumed a few times a second while a blocking collective waits on the main thread. Being Python code, it gives
    signal handlers their turn; an exception of theirs (KeyboardInterrupt) must not be lost in C, so it is kept for
    `check_status`, and True says that there is one.

    A generator, and not a function: the interpreter runs handlers where a function begins, which is outside of every
    try block in it. Resuming is inside of this one.
    """
    interrupted = False
    while True:
        try:
            yield interrupted
            interrupted = False
            check_interrupt()
        except GeneratorExit:
            return
        except BaseException as error:
            _raised.error = error
            interrupted = True


_SIGNAL_WATCH = _signal_watch()
next(_SIGNAL_WATCH)  # into the try block
_check_on_main_thread = ctypes.CFUNCTYPE(c_bool)(_SIGNAL_WATCH.__next__)


@ctypes.CFUNCTYPE(c_bool)
def _check_on_other_thread() -> bool:
    """The same for a wait on any other thread, where no signals are handled."""
    try:
        check_interrupt()
    except BaseException as error:
        _raised.error = error
        return True
    return False


LATE_S = 60.0  # from when on a wait is reported
_LOGGER = logging.getLogger("fastpar.comm")


def warn_of_late_ranks(text: str) -> None:
    _LOGGER.warning("%s", text)


@ctypes.CFUNCTYPE(None, c_char_p)
def _report_late_ranks(text: bytes) -> None:
    warn_of_late_ranks(text.decode(errors="replace"))


def _prototyped(handle: ctypes.CDLL, name: str) -> Any:
    function = getattr(handle, f"fastpar_{name}")
    function.restype, function.argtypes = _PROTOTYPES[name]
    return function


class CommLibrary:
    """The functions as attributes, without their prefix."""

    def __init__(self, path: str) -> None:
        handle, self._keeping_lock = ctypes.CDLL(path), ctypes.PyDLL(path)
        for name in _PROTOTYPES:
            setattr(self, name, _prototyped(handle, name))
        self.comm_set_interrupt_checks(_check_on_main_thread, _check_on_other_thread)
        self.report_late_ranks_after(LATE_S)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the attributes are set above
        raise AttributeError(name)

    def report_late_ranks_after(self, seconds: float) -> None:
        """Warn of a wait that takes so long, and again when it has doubled; 0: never."""
        self.late_s = seconds
        self.comm_set_late_report(_report_late_ranks, seconds)

    def keeping_lock(self, name: str) -> Any:
        """The function of that name, called with the interpreter's lock held."""
        return _prototyped(self._keeping_lock, name)

    def check_status(self, status: int) -> None:
        """Raise the error that a status stands for."""
        if status == 0:
            return
        error, _raised.error = getattr(_raised, "error", None), None
        if status == _INTERRUPTED and error is not None:
            raise error
        if status == _PEER_FAILED:
            raise PeerFailedError(self.mail_failed_rank(), self.error_text())
        raise _ERRORS.get(status, CommError)(self.error_text())

    def error_text(self) -> str:
        return str(self.comm_error().decode(errors="replace"))


class LateWait:
    """One wait outside of the library: warns as waits in it do."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._due = library().late_s

    def look(self, describe: Callable[[float], str]) -> None:
        """Called now and then; `describe` gives the text, from the seconds that were waited."""
        waited = time.monotonic() - self._started
        if self._due and waited > self._due:
            self._due = 2 * waited
            warn_of_late_ranks(describe(waited))


@functools.cache
def library() -> CommLibrary:
    """Raises ImportError where fastpar's compiled library is missing."""
    return CommLibrary(str(_ext.load()))


@functools.lru_cache(maxsize=256)
def size_array(values: tuple[int, ...]) -> Any:
    """`int64_array` of sizes, kept: collectives ask for the same sizes again and again."""
    return int64_array(values)


def int64_array(values: Any) -> Any:
    return (c_int64 * len(values))(*values)
