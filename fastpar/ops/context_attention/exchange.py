"""The exchange around Ulysses' attention: this rank's tokens of all heads for all neighbours' tokens of its heads.

    in    q [b, h_q, s, D], k, v [b, h_k, s, D]       one all-to-all for the three
          -> [b, own heads, S, D], own heads: an equal part of h_q, and the key/value heads that these read
    out   [b, own query heads, S, D] -> [b, h_q, s, D]                one all-to-all

    backward of the first: gradients the other way, of a key/value head that several ranks had summed in rank order

S are the tokens of the neighbours (all of the sequence for "ulysses"). Elements sent, of W = b S D of the whole
sequence: 2 (1 - 1/u) (h_q + h') W / P forward, h' key/value heads on all ranks together, and as many backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops._buffers import new_buffer
from fastpar.ops.context_attention.methods import HeadSpread, Span
from fastpar.ops.context_attention.plan import TokenOrder

Spans = tuple[Span, ...]


class Message(NamedTuple):
    """Tensors one after another in one piece of memory."""

    flat: Tensor
    views: list[Tensor]

    @staticmethod
    def of(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> Message:
        """Uninitialised, of the dtype and on the device of `like`."""
        numels = [math.prod(shape) for shape in shapes]
        flat = new_buffer(like, (sum(numels),))
        return Message(flat, [part.view(shape) for part, shape in zip(flat.split(numels), shapes, strict=True)])


@dataclass(frozen=True)
class HeadExchange:
    """Between `ulysses` neighbouring ranks of a group, this one's among them."""

    comm: Communicator
    heads: HeadSpread
    order: TokenOrder

    @property
    def _count(self) -> int:
        return len(self.heads.queries)

    @property
    def first(self) -> int:
        """The first of the neighbours, as a rank of the group."""
        return self.comm.rank - self.head_rank

    @property
    def head_rank(self) -> int:
        return self.comm.rank % self._count

    def to_heads(self, *parts: tuple[Tensor, Spans]) -> list[Tensor]:
        """Of each x [b, H, s, D], split into these heads of each neighbour: all neighbours' tokens of own heads."""
        sent = Message.of(
            parts[0][0], [(x.shape[0], stop - start, *x.shape[2:]) for x, (start, stop) in self._by_peer(parts)]
        )
        for view, (x, (start, stop)) in zip(sent.views, self._by_peer(parts), strict=True):
            view.copy_(x[:, start:stop])
        own = [(x, spans[self.head_rank]) for x, spans in parts]
        shapes = [
            (x.shape[0], stop - start, tokens, x.shape[3]) for tokens in self.order.sizes for x, (start, stop) in own
        ]
        received = self._exchange(sent, shapes)
        total = sum(self.order.sizes)
        found = [new_buffer(x, (x.shape[0], stop - start, total, x.shape[3])) for x, (start, stop) in own]
        for index, part in enumerate(received):
            peer, which = divmod(index, len(parts))
            self.order.put(peer, part, found[which])
        return found

    def to_tokens(self, *parts: tuple[Tensor, Spans]) -> list[Tensor]:
        """The way back: of each x [b, own heads, S, D], this rank's tokens of all heads. Heads that several neighbours
        have are summed in their order."""
        sent = Message.of(
            parts[0][0], [(*x.shape[:2], tokens, x.shape[3]) for tokens in self.order.sizes for x, _ in parts]
        )
        for index, view in enumerate(sent.views):
            peer, which = divmod(index, len(parts))
            self.order.take(peer, parts[which][0], view)
        tokens = self.order.sizes[self.head_rank]
        shapes = [(x.shape[0], stop - start, tokens, x.shape[3]) for x, (start, stop) in self._by_peer(parts)]
        received = self._exchange(sent, shapes)
        found = []
        for which, (x, spans) in enumerate(parts):
            out, filled = new_buffer(x, (x.shape[0], spans[-1][1], tokens, x.shape[3])), 0
            for part, (start, stop) in zip(received[which :: len(parts)], spans, strict=True):
                again = max(0, filled - start)  # heads that an earlier neighbour has sent too
                out[:, start : start + again] += part[:, :again]
                out[:, start + again : stop] = part[:, again:]
                filled = stop
            found.append(out)
        return found

    def _by_peer(self, parts: Sequence[tuple[Tensor, Spans]]) -> list[tuple[Tensor, Span]]:
        return [(x, spans[peer]) for peer in range(self._count) for x, spans in parts]

    def _exchange(self, sent: Message, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """As many tensors for each neighbour, one neighbour after another; those that come are of these shapes."""
        numels = [math.prod(shape) for shape in shapes]
        inputs, outputs = [0] * self.comm.size, [0] * self.comm.size
        each = len(shapes) // self._count
        for peer in range(self._count):
            span = slice(peer * each, (peer + 1) * each)
            inputs[self.first + peer] = sum(view.numel() for view in sent.views[span])
            outputs[self.first + peer] = sum(numels[span])
        got = self.comm.all_to_all(sent.flat, input_sizes=inputs, output_sizes=outputs)
        return [part.view(shape) for part, shape in zip(got.split(numels), shapes, strict=True)]
