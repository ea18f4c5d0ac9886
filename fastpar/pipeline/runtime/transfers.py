"""What one rank's stages hand to each other and to the stages of other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from fastpar.comm import PointToPoint
from fastpar.pipeline.runtime.stage_run import Grads, Packet
from fastpar.pipeline.runtime.values import decode, encode
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule

_Key = tuple[int, int, int]  # the stage that sends activations, the one that takes them, microbatch


class StageTransfers:
    """Activations and gradients on their way between stages.

    A stage that has computed something posts it. What goes to a stage on the same rank can be taken at once; the rest
    waits for its SEND action, is copied into the message there, and can be taken on the other rank after its RECV.
    Gradients go from destination to source. Messages are tagged with stages and microbatch, so their order does not
    matter.
    """

    def __init__(self, schedule: Schedule, rank: int, p2p: PointToPoint) -> None:
        self._schedule, self._rank, self._p2p = schedule, rank, p2p
        self._activations: dict[_Key, Packet] = {}
        self._gradients: dict[_Key, Grads] = {}

    def post_activations(self, source: int, destination: int, microbatch: int, packet: Packet) -> None:
        self._activations[source, destination, microbatch] = packet

    def take_activations(self, source: int, destination: int, microbatch: int) -> Packet:
        return self._activations.pop((source, destination, microbatch))

    def post_gradients(self, source: int, destination: int, microbatch: int, grads: Grads) -> None:
        self._gradients[source, destination, microbatch] = grads

    def take_gradients(self, source: int, destination: int, microbatch: int) -> Grads:
        return self._gradients.pop((source, destination, microbatch))

    def run(self, action: Action) -> None:
        """SEND_F, RECV_F, SEND_B or RECV_B."""
        assert action.microbatch is not None
        peer_stage = self._schedule.peer_of(action)
        peer = self._schedule.stage_ranks[peer_stage]
        is_source = action.type in (ActionType.SEND_F, ActionType.RECV_B)
        source, destination = (action.stage, peer_stage) if is_source else (peer_stage, action.stage)
        key = source, destination, action.microbatch
        tag = self._tag(action, *key)
        if action.type is ActionType.SEND_F:
            packet = self._activations.pop(key)
            self._p2p.send(peer, tag, packet.tensors, encode(packet.structure))
        elif action.type is ActionType.RECV_F:
            tensors, note = self._p2p.recv(peer, tag)
            self._activations[key] = Packet(tensors, decode(note))
        elif action.type is ActionType.SEND_B:
            grads = self._gradients.pop(key)
            present = [grad for grad in grads if grad is not None]
            self._p2p.send(peer, tag, present, _encode_gaps(grads))
        else:
            tensors, note = self._p2p.recv(peer, tag)
            self._gradients[key] = _fill_gaps(tensors, note)

    def clear(self) -> None:
        self._activations.clear()
        self._gradients.clear()

    def _tag(self, action: Action, source: int, destination: int, microbatch: int) -> int:
        is_gradient = action.type in (ActionType.SEND_B, ActionType.RECV_B)
        stages = self._schedule.num_stages
        return ((source * stages + destination) * 2 + is_gradient) * self._schedule.num_microbatches + microbatch


def _encode_gaps(grads: Grads) -> bytes:
    """Which gradients are None; empty where none is."""
    present = [grad is not None for grad in grads]
    return b"" if all(present) else bytes(present)


def _fill_gaps(tensors: Sequence, note: bytes) -> Grads:
    if not note:
        return list(tensors)
    rest = iter(tensors)
    return [next(rest) if present else None for present in note]
