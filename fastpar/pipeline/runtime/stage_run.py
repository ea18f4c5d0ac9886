"""One stage on its rank: forward and backward of its microbatches, with what they keep in between.

Each stage of each microbatch has an autograd graph of its own, from detached inputs to outputs. Gradients enter it at
edges of the graph rather than at the output tensors, so an output's memory is free once it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fastpar.ops.weight_grad_store.store import WeightGradStore
from fastpar.pipeline.runtime.values import Structure, grad_flags, pack, unpack
from fastpar.pipeline.runtime.versions import WeightVersions
from fastpar.pipeline.stages.stage import Stage

Grads = list[Tensor | None]
_NOTHING = nullcontext()


@dataclass(slots=True)
class Packet:
    """A value between two stages: its tensors, without history, and its structure."""

    tensors: list[Tensor]
    structure: Structure


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and the end of its backward.

    leaves  by source stage: the received tensors that require a gradient; None for those that do not
    roots   by destination stage: where the gradient of each sent tensor enters the graph; None where it has none
    loss    on the last stage
    store   weight gradients that were put off, where I and W are apart
    """

    version: int | None
    leaves: dict[int, list[Tensor | None]] = field(default_factory=dict)
    roots: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    loss: Tensor | None = None
    store: WeightGradStore | None = None


class StageRun:
    """Runs the actions of one stage.

    stage                 the part of the model
    previous, following   the neighbours in the chain, by their numbers in the schedule; None at its ends
    skips_to              name of a skip connection -> the stages that receive it
    skips_from            stage -> names of the skip connections that come from there
    is_split              whether the backward of a microbatch comes in two halves
    versions              the weights' versions, where the schedule updates them on its way
    """

    def __init__(
        self,
        stage: Stage,
        *,
        previous: int | None,
        following: int | None,
        skips_to: Mapping[str, tuple[int, ...]],
        skips_from: Mapping[int, tuple[str, ...]],
        is_split: Callable[[int], bool],
        versions: WeightVersions | None,
    ) -> None:
        self.stage, self.versions = stage, versions
        self.previous, self.following = previous, following
        self.sources = (*skips_from,) if previous is None else (previous, *skips_from)
        receivers = dict.fromkeys(receiver for stages in skips_to.values() for receiver in stages)
        self.destinations = (*receivers,) if following is None else (following, *receivers)
        self._skips_to, self._is_split = skips_to, is_split
        self._flights: dict[int, _Flight] = {}

    @property
    def in_flight(self) -> list[int]:
        """Microbatches whose backward has not ended."""
        return list(self._flights)

    def clear(self) -> None:
        """Forget what is in flight."""
        self._flights.clear()

    def forward(
        self,
        microbatch: int,
        received: Mapping[int, Packet],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        version: int | None,
        loss_of: Callable[[Any], Tensor] | None,
    ) -> tuple[dict[int, Packet], Any]:
        """F. Returns what goes to which stage and, on the last stage, the loss (without `loss_of`: the output).

        received  by source stage: what the previous stage returned, and what came over skip connections
        inputs    the batch's positional inputs; used where there is no previous stage
        kwargs    keyword inputs of the batch
        """
        is_training = torch.is_grad_enabled()
        flight = _Flight(version)
        content: Any = inputs
        skips: dict[str, Tensor] = {}
        for source, packet in received.items():
            value = self._open(flight, source, packet, is_training)
            if source == self.previous:
                content = value
            else:
                skips |= value
        if is_training and self._is_split(microbatch):
            flight.store = WeightGradStore()
        weights = self._weights(version) if is_training else _NOTHING  # without updates there is one version
        with weights, _NOTHING if flight.store is None else flight.store.deferring():
            output, sent = self.stage.run(content, kwargs, skips)
            if loss_of is not None and self.following is None:
                output = loss_of(output)
        packets, result = self._close(flight, output, sent)
        if is_training:
            flight.loss = result if loss_of is not None else None
            self._flights[microbatch] = flight
        return packets, result.detach() if flight.loss is not None else result

    def backward(self, microbatch: int, grads: Mapping[int, Grads]) -> dict[int, Grads]:
        """B: all gradients. `grads` are those of the sent tensors, by destination; returns those of the received
        tensors, by source.
        """
        flight = self._flights.pop(microbatch)
        result = self._backward(flight, grads)
        self._collect(flight)
        return result

    def backward_input(self, microbatch: int, grads: Mapping[int, Grads]) -> dict[int, Grads]:
        """I: the gradients of the received tensors. What the weights' gradients need stays in the store."""
        return self._backward(self._flights[microbatch], grads)

    def backward_weight(self, microbatch: int) -> None:
        """W: the weights' gradients that I put off."""
        flight = self._flights.pop(microbatch)
        assert flight.store is not None
        with self._weights(flight.version):
            flight.store.run()
        self._collect(flight)

    def _open(self, flight: _Flight, source: int, packet: Packet, is_training: bool) -> Any:
        """The received value, with tensors that are leaves of this stage's graph."""
        flags = grad_flags(packet.structure)
        if is_training:
            packet.tensors = [t.requires_grad_(flag) for t, flag in zip(packet.tensors, flags, strict=True)]
        flight.leaves[source] = [t if flag else None for t, flag in zip(packet.tensors, flags, strict=True)]
        return unpack(packet.tensors, packet.structure)

    def _close(self, flight: _Flight, output: Any, skips: Mapping[str, Tensor]) -> tuple[dict[int, Packet], Any]:
        """What goes to whom, and what stays here."""
        outgoing: dict[int, Any] = {} if self.following is None else {self.following: output}
        for name, tensor in skips.items():
            for receiver in self._skips_to[name]:
                outgoing.setdefault(receiver, {})[name] = tensor
        packets = {}
        for destination, content in outgoing.items():
            tensors, structure = pack(content)
            flight.roots[destination] = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
            packets[destination] = Packet([t.detach() for t in tensors], structure)
        return packets, output if self.following is None else None

    def _backward(self, flight: _Flight, grads: Mapping[int, Grads]) -> dict[int, Grads]:
        roots: list[Any] = []
        values: Grads = []
        if flight.loss is not None and flight.loss.requires_grad:
            roots, values = [flight.loss], [None]
        for destination, edges in flight.roots.items():
            for edge, grad in zip(edges, grads[destination], strict=True):
                if edge is not None and grad is not None:
                    roots.append(edge)
                    values.append(grad)
        leaves, flight.leaves, flight.roots, flight.loss = flight.leaves, {}, {}, None
        wanted = [leaf for own in leaves.values() for leaf in own if leaf is not None]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with self._weights(flight.version):
            if flight.store is not None:
                found = flight.store.backward(roots, values, wanted)
            elif roots:
                torch.autograd.backward(roots, values)
                found = [leaf.grad for leaf in wanted]
        rest = iter(found)
        return {source: [None if leaf is None else next(rest) for leaf in own] for source, own in leaves.items()}

    def _weights(self, version: int | None) -> AbstractContextManager[None]:
        return _NOTHING if self.versions is None else self.versions.use(version)

    def _collect(self, flight: _Flight) -> None:
        if self.versions is not None:
            self.versions.collect(flight.version)
