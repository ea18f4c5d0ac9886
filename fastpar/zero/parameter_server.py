"""Data parallelism with a parameter server: how the field began, to learn from and to measure against.

One rank has the parameters and the optimizer; the others, the workers, compute gradients (Li et al. 2014, "Scaling
Distributed Machine Learning with the Parameter Server"; Dean et al. 2012, "Large Scale Distributed Deep Networks").

    if rank == 0:
        server = ParameterServer(model.parameters(), optimizer, group=group)
        server.serve()                              # until all workers have closed
    else:
        worker = Worker(model.parameters(), group=group)        # has the server's parameters now
        for batch in batches:
            loss(model, batch).backward()
            worker.step()                           # push gradients, pull parameters
        worker.close()

Words that a rank sends and receives in a step, of Psi parameters, with N workers:

                            a worker                the server
    parameter server        2 Psi                   2 N Psi         the busiest rank's grow with the workers
    ring all-reduce         4 Psi (N - 1) / N       there is none   nobody's do

That, and a rank that does not compute, is why rings and reduce-scatters won; `fastpar bench parameter_server` shows it.
What a server can do and an all-reduce cannot is to let workers run at their own pace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.comm import PointToPoint

_HELLO, _PUSH, _PULL = range(3)  # tags
_LEFT = b"left"


class ParameterServer:
    """The rank that has the parameters.

    parameters  of the model; those that need a gradient are served, in this order
    optimizer   of those parameters, any
    group       the server and its workers: all ranks of a ProcessGroup or a 1-D mesh but this one are workers
    staleness   None: synchronous. A step takes the gradient of every worker, and their mean (rank order, float32,
                one rounding: the bits of an all-reduce with "avg") makes one update; all workers get the same
                parameters.
                An int from 0 on: asynchronous. Every gradient is an update of its own when it comes; a worker waits
                for new parameters while it is more than so many steps ahead of the slowest that is still there
    timeout     seconds that the server waits for a worker's next gradient, and workers for parameters; by default
                those of the group's mesh
    on_update   called with the number of updates after each: for LR schedulers

    A parameter for which no worker has a gradient gets none, so that the optimizer leaves it alone; one for which only
    some do gets the mean with zeros for the others.

    `updates`, `words_received` and `words_sent` (elements) count; `most_stale` is the largest number of updates that
    came between a worker's parameters and the update by its gradient (synchronous: 0).

    Made by the server while all ranks make their end. Raises TypeError and ValueError for arguments.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        group: ProcessGroup | DeviceMesh,
        staleness: int | None = None,
        timeout: float | None = None,
        on_update: Callable[[int], None] | None = None,
    ) -> None:
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness must be None (synchronous) or at least 0, got {staleness}")
        self.parameters, self.optimizer = _trainable(parameters), optimizer
        self.staleness = staleness
        self._on_update = on_update
        self._p2p = PointToPoint(group, timeout=timeout)
        if self._p2p.size < 2:
            raise ValueError("a parameter server needs at least one worker: the group has one rank")
        self.workers = [rank for rank in range(self._p2p.size) if rank != self._p2p.rank]
        self.updates = self.words_received = self.words_sent = self.most_stale = 0

    def serve(self) -> None:
        """Serve until every worker has closed.

        Raises CommTimeoutError, PeerLostError or PeerFailedError (with the worker's reason) where a worker is late, has
        ended or has failed; ValueError where a worker's parameters are others than the server's, or, synchronous, where
        some workers go on and others have left. All workers are told, and raise PeerFailedError.
        """
        try:
            self.greet()
            if self.staleness is not None:
                _Asynchronous(self, self.staleness).run()
            else:
                while self.step():
                    pass
        except BaseException as error:
            self._p2p.abort(f"the parameter server failed: {type(error).__name__}: {error}")
            raise
        self._p2p.close()

    def greet(self) -> None:
        """Wait for all workers, and give them the parameters; the first thing that `serve` does."""
        own = _describe(self.parameters)
        for worker in self.workers:
            _, theirs = self._p2p.recv(worker, _HELLO)
            if theirs != own:
                raise ValueError(f"the parameters of rank {worker} are not the server's: {_difference(own, theirs)}")
        for worker in self.workers:
            self.send_parameters(worker)

    def step(self) -> bool:
        """One synchronous step; False where all workers have left instead."""
        mean, left = _Mean(self.parameters, len(self.workers)), []
        for worker in self.workers:
            gradients = self.receive_gradients(worker)
            if gradients is None:
                left.append(worker)
            else:
                mean.add(gradients)
        if len(left) == len(self.workers):
            return False
        if left:
            raise ValueError(
                f"ranks {left} have left after {self.updates} steps and others go on: synchronous workers take equally "
                "many steps"
            )
        self.update(mean.result())
        for worker in self.workers:
            self.send_parameters(worker)
        return True

    def receive_gradients(self, worker: int) -> list[Tensor | None] | None:
        """The next gradients of a worker; None where it has left."""
        tensors, note = self._p2p.recv(worker, _PUSH)
        if note == _LEFT:
            return None
        self.words_received += sum(tensor.numel() for tensor in tensors)
        came = iter(tensors)
        return [next(came) if has_gradient else None for has_gradient in note]

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of the server's optimizer with a worker's gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        if self._on_update is not None:
            self._on_update(self.updates)

    def send_parameters(self, worker: int) -> None:
        """The parameters as they are, to a worker that has asked for them."""
        self._p2p.send(worker, _PULL, [parameter.detach() for parameter in self.parameters])
        self.words_sent += sum(parameter.numel() for parameter in self.parameters)


class Worker:
    """A rank that computes gradients for the server's parameters.

    parameters  of this rank's copy of the model, in the server's order; overwritten with the server's
    group       as the server's
    server      its rank in the group
    timeout     seconds to wait for parameters

    `words_sent` and `words_received` count elements.

    Raises PeerFailedError, with what the server says, where the parameters are not those of the server.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        group: ProcessGroup | DeviceMesh,
        server: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.parameters, self.server = _trainable(parameters), server
        self._p2p = PointToPoint(group, timeout=timeout)
        if server == self._p2p.rank or not 0 <= server < self._p2p.size:
            raise ValueError(f"server must be another rank of the {self._p2p.size} of the group, got {server}")
        self.steps = self.words_sent = self.words_received = 0
        self._p2p.send(server, _HELLO, [], note=_describe(self.parameters))
        self._pull()

    def step(self) -> None:
        """Send the gradients, drop them, and wait for the server's parameters.

        Raises CommTimeoutError, PeerLostError or PeerFailedError (with the reason) where there is no answer.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        self._p2p.send(self.server, _PUSH, present, note=bytes(gradient is not None for gradient in gradients))
        self.words_sent += sum(gradient.numel() for gradient in present)
        for parameter in self.parameters:
            parameter.grad = None
        self.steps += 1
        self._pull()

    def close(self) -> None:
        """Leave: the server no longer waits for this worker."""
        self._p2p.send(self.server, _PUSH, [], note=_LEFT)
        self._p2p.close()

    def abort(self, reason: str) -> None:
        """Give up: the server and the other workers raise PeerFailedError with this reason."""
        self._p2p.abort(reason)

    def _pull(self) -> None:
        values, _ = self._p2p.recv(self.server, _PULL)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)
        self.words_received += sum(value.numel() for value in values)


class _Asynchronous:
    """Updates as gradients come: a thread for each worker, one of which updates at a time.

    A thread waits in `recv`, which notices a worker that has gone; a poll over all workers would not.
    """

    def __init__(self, server: ParameterServer, staleness: int) -> None:
        self._server, self._staleness = server, staleness
        self._changed = threading.Condition()
        self._steps = dict.fromkeys(server.workers, 0)  # of those that are there
        self._given = dict.fromkeys(server.workers, 0)  # the number of updates in the parameters that a worker has
        self._error: BaseException | None = None

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._serve, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in self._server.workers
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._steps)
            if self._error is not None:
                raise self._error
        for thread in threads:
            thread.join()

    def _serve(self, worker: int) -> None:
        try:
            while self._serve_step(worker):
                pass
        except BaseException as error:  # whatever it is: the server has to hear of it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _serve_step(self, worker: int) -> bool:
        gradients = self._server.receive_gradients(worker)
        with self._changed:
            if gradients is None:
                del self._steps[worker]
                self._changed.notify_all()
                return False
            server = self._server
            server.most_stale = max(server.most_stale, server.updates - self._given[worker])
            server.update(gradients)
            self._steps[worker] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._may_go_on(worker))
            if self._error is not None:
                return False
            self._given[worker] = server.updates
            server.send_parameters(worker)
            return True

    def _may_go_on(self, worker: int) -> bool:
        return self._steps[worker] - min(self._steps.values()) <= self._staleness


class _Mean:
    """The mean over workers, added in the order in which they come."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_workers: int) -> None:
        self._parameters, self._num_workers = parameters, num_workers
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._totals[i]
            if total is None:
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                self._totals[i] = gradient.to(dtype, copy=True)
            else:
                total.add_(gradient)

    def result(self) -> list[Tensor | None]:
        return [
            None if total is None else total.div_(self._num_workers).to(parameter.dtype)
            for total, parameter in zip(self._totals, self._parameters, strict=True)
        ]


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        raise ValueError("there is no parameter that needs a gradient")
    return found


def _describe(parameters: Sequence[nn.Parameter]) -> bytes:
    return "\n".join(f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in parameters).encode()


def _difference(own: bytes, theirs: bytes) -> str:
    mine, others = own.decode().split("\n"), theirs.decode().split("\n")
    if len(mine) != len(others):
        return f"{len(others)} instead of {len(mine)}"
    at = next(i for i, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b)
    return f"number {at} is {others[at]} instead of {mine[at]}"
