"""The result of a collective that has been launched and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastpar.arguments import checked
from fastpar.comm.errors import CommError, CommMismatchError, CommTimeoutError
from fastpar.comm.observers import OpenSpans
from fastpar.comm.ranges import annotate
from fastpar.comm.transport import StillInFlightError, Work
from fastpar.mesh.lifetime import mark_failed

T = TypeVar("T")
U = TypeVar("U")


class LaunchLog:
    """Numbers what this rank launches on a group (None: one rank), and words what fails."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.launched = 0

    def count(self) -> int:
        """The sequence number of the next collective; 0 in a graph, which is traced once and launches many times."""
        if torch.compiler.is_compiling():  # a graph that has read the number is compiled again whenever it changes
            return 0
        self.launched += 1
        return self.launched - 1

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
        """Mark the group as failed for the next mesh, which must not use it."""
        if self.group is not None and not isinstance(error, CommMismatchError):
            mark_failed(self.group)


class Pending(Generic[T]):
    """A launched collective. `wait()` returns its result.

    Until `wait()` has returned, do not write to the tensors that were passed in, and do not read `out=`. Waiting is
    local: ranks may wait in any order, but must launch in the same order.
    """

    def __init__(
        self,
        work: Work | None,
        finish: Callable[[], T],
        *,
        name: str = "results",
        describe: Callable[[], str],
        timeout: float,
        spans: OpenSpans | None = None,
        failed: Callable[[CommError], None] | None = None,
    ) -> None:
        self._work = work
        self._finish: Callable[[], T] | None = finish  # unpacks; dropped with the buffers it holds when it has run
        self._name, self._describe = name, describe
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._error: CommError | None = None
        self._spans = spans
        self._failed = failed  # told of what is final
        self._result: T

    @classmethod
    def ready(cls, result: T) -> Pending[T]:
        """One that is done."""
        # Without the attributes of one in flight: most blocking calls make one of these.
        pending = cls.__new__(cls)
        pending._finish, pending._result = None, result
        return pending

    def done(self) -> bool:
        """True when `wait()` would return at once."""
        return self._finish is None or self._work is None or self._work.done()

    def wait(self, timeout: float | None = None) -> T:
        """The result, the same object at every call.

        The deadline is the communicator's timeout, counted from the launch, or `timeout` seconds from now.
        Raises CommError when it passes or the collective fails. After an explicit `timeout` has passed the collective
        is still in flight, and `wait` may be called again; any other error is final and raised again by every later
        call.
        """
        if self._finish is None:
            return self._result
        if self._error is not None:
            raise self._error
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be positive (seconds), got {timeout}")
        began = 0.0 if self._spans is None else time.perf_counter()
        with annotate(f"fastpar::comm::wait {self._name}"):
            if self._work is not None:
                self._wait_for(self._work, timeout)
            self._result = self._finish()
        if self._spans is not None:
            self._spans.waited(began)
        # Lets go of the buffers that it holds.
        self._finish = None
        self._work = None
        return self._result

    @checked(computed=False)
    def then(self, step: Callable[[T], U]) -> Pending[U]:
        """One whose first `wait()` calls `step` with this one's result, and gives what that returns."""
        return _Continued(self, step)

    def _wait_for(self, work: Work, timeout: float | None) -> None:
        # The transport gives the operation up at the same deadline; a little grace lets its own, more telling, error
        # come first.
        seconds = max(self._deadline - time.monotonic(), 0.0) + 0.2 if timeout is None else timeout
        started = time.monotonic()
        try:
            work.wait(seconds)
        except RuntimeError as error:
            if isinstance(error, CommError) and not isinstance(error, CommTimeoutError):
                self._error = self._final(type(error)(f"{self._describe()}: {error}"))
                raise self._error from error
            waited = time.monotonic() - started
            limit = (
                f"{self._timeout:g} s after its launch"
                if timeout is None
                else f"{timeout:g} s after the call of wait()"
            )
            is_timeout = isinstance(error, (StillInFlightError, CommTimeoutError))
            failure = (CommTimeoutError if is_timeout else CommError)(
                f"{self._describe()}: failed or not finished by its deadline ({limit}); waited {waited:.2f} s. "
                f"Has every rank of the group called it, in the same order? Cause: {str(error) or 'still in flight'}"
            )
            if timeout is None or (not isinstance(error, StillInFlightError) and waited < timeout):
                self._error = self._final(failure)
            raise failure from error

    def _final(self, error: CommError) -> CommError:
        if self._failed is not None:
            self._failed(error)
        return error


class _Continued(Pending[U], Generic[T, U]):
    """See `Pending.then`. `done()` tells of the collective, not of the step."""

    def __init__(self, first: Pending[T], step: Callable[[T], U]) -> None:
        self._first: Pending[T] | None = first
        self._step: Callable[[T], U] | None = step

    def done(self) -> bool:
        return self._first is None or self._first.done()

    def wait(self, timeout: float | None = None) -> U:
        if self._first is not None and self._step is not None:
            self._result = self._step(self._first.wait(timeout))
            self._first = self._step = None
        return self._result
