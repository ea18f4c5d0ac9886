"""Random numbers that a model's code draws by itself while it has a part of the sequence's tokens.

Ranks of cp have equal generators, so that F.dropout or a router's noise would fall on other tokens with the same
numbers: the masks of no layout. `nn.Dropout` modules and attention get theirs by global positions; whatever else draws
is found by its generator (`DrawGuard`) and refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastpar.context.region import ContextRegion, draw_seed
from fastpar.parallel.guards.agreement import generator_words, generators_apart
from fastpar.parallel.guards.draws import DrawGuard
from fastpar.parallel.guards.eager import EagerLook, warn_of_skipped_checks
from fastpar.parallel.guards.watch import Cadence
from fastpar.tensor import LayoutDropout


class TokenDrawGuard:
    """Looks at the first training forwards of a model over a region, and at one in many later. A copied model has a
    guard of its own."""

    def __init__(self, region: ContextRegion, device: torch.device) -> None:
        self.region, self.device = region, device
        self.cadence = Cadence()
        self._draws = DrawGuard(device, _verdict, "cp")
        self._end: Any = None
        self._eager = EagerLook()

    def __deepcopy__(self, memo: Any) -> TokenDrawGuard:
        return TokenDrawGuard(memo.get(id(self.region), self.region), self.device)

    def attach(self, model: nn.Module) -> list[Any]:
        """Hook the model; returns the handles."""
        return [model.register_forward_pre_hook(self.before, prepend=True), self]

    def remove(self) -> None:
        """End a look that is going on, with nothing said."""
        if self._end is not None:
            self._end.remove()
            self._end = None
            self._draws.stop()
            self.region.seed_source = draw_seed
        self._eager.end()

    def before(self, model: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            if not any(self.cadence.calls) and model.training:
                warn_of_skipped_checks()
            return
        self.remove()  # what a forward or backward that has failed has left
        if not model.training or not self.cadence.next():
            return
        self._eager.begin(model)
        self.region.seed_source = self._draws.allowing(draw_seed)
        words = torch.tensor([generator_words(self.device)], dtype=torch.int64, device="cpu")
        self._draws.start(model, generators_apart(self.region.comm.all_gather(words)))
        self._end = model.register_forward_hook(self.after)  # behind the guard's own, which look once more

    def after(self, _model: nn.Module, _args: Any, output: Any) -> None:
        self._end.remove()
        self._eager.leave(output)
        self._end, self.region.seed_source = None, draw_seed
        self._draws.check()


def _verdict(path: str, module: nn.Module) -> str:
    if isinstance(module, LayoutDropout):
        return ""
    return (
        f"{path or 'the model'} ({type(module).__name__}) draws random numbers by itself (F.dropout, noise) for this "
        "rank's tokens: every rank of cp would use the same ones for other tokens. Use an nn.Dropout module, which "
        "fastpar replaces, or set the probability to 0"
    )
