"""Calls of several threads, run one at a time in the order in which they were launched."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from fastpar.comm.errors import CommError
from fastpar.comm.shared_memory.library import interrupted_by
from fastpar.comm.transport import StillInFlightError

_STOP_S = 2.0  # how long a process that ends waits for the call that is under way to notice


class SequencedCall:
    """The work of a launched call; see `fastpar.comm.transport.Work`."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action: Callable[[], Any] | None = action
        self._finished = threading.Event()
        self._result: Any = None
        self._error: CommError | None = None

    def run(self) -> None:
        assert self._action is not None
        try:
            self._result = self._action()
        except CommError as error:
            self._error = error
        except BaseException as error:  # whatever it is, the caller must hear of it, and not wait for ever
            self._error = CommError(f"{type(error).__name__}: {error}")
        self._action = None
        self._finished.set()

    def refuse(self, error: CommError) -> None:
        self._action, self._error = None, error
        self._finished.set()

    def wait(self, seconds: float) -> None:
        if not self._finished.wait(seconds):
            raise StillInFlightError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()

    def result(self) -> Any:
        return self._result


class SequencerState:
    """State shared by the thread and the sequencer: the thread must not keep the sequencer alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[SequencedCall] = deque()
        self.is_busy = False
        self.is_stopped = False
        self.thread: threading.Thread | None = None

    def check(self) -> None:
        """Called now and then by a call that waits on the thread."""
        if self.is_stopped:
            raise CommError("the communicator was closed")

    def work(self) -> None:
        with interrupted_by(self.check):
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.is_stopped or (self.queue and not self.is_busy))
                    if self.is_stopped:
                        return
                    call = self.queue.popleft()
                    self.is_busy = True
                call.run()
                del call
                self.release()

    def release(self) -> None:
        with self.changed:
            self.is_busy = False
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.is_stopped = True
            for call in self.queue:
                call.refuse(CommError("the communicator was closed"))
            self.queue.clear()
            self.changed.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_STOP_S)


class Sequencer:
    """`run` blocks, and works on the caller's thread where nothing is under way or waiting; `submit` leaves the call to
    a thread, which is started by the first one."""

    def __init__(self) -> None:
        self._state = SequencerState()
        self._finalizer = weakref.finalize(self, self._state.stop)

    def run(self, action: Callable[[], Any]) -> Any:
        state = self._state
        with state.changed:
            # Nothing under way or waiting: the caller's thread saves two switches.
            is_free = not state.is_busy and not state.queue
            if is_free:
                state.is_busy = True
        if not is_free:
            call = self.submit(action)
            call.wait(threading.TIMEOUT_MAX)  # the call has a deadline of its own
            return call.result()
        try:
            return action()
        finally:
            state.release()

    def submit(self, action: Callable[[], Any]) -> SequencedCall:
        state, call = self._state, SequencedCall(action)
        with state.changed:
            state.check()
            state.queue.append(call)
            if state.thread is None:
                state.thread = threading.Thread(target=state.work, name="fastpar-comm", daemon=True)
                state.thread.start()
            state.changed.notify_all()
        return call
