"""Random numbers, which must not be drawn where a rank sees a part of a tensor only.

`nn.Dropout` modules get masks that go by the position in the whole tensor (`fastpar.tensor.LayoutDropout`). A forward
that calls `F.dropout`, adds noise or drops layers by itself draws from the default generator: on a tensor that is
whole, ranks with equal generators draw alike. Inside a block the same mask would fall on other heads or features on
every rank, and while the sequence is split on other positions: the result would depend on the layout.

Ranks whose generators differ draw other numbers, and may go other ways by them: where layers are skipped at random, one
rank would wait in the collective of a layer that another has left out. So such a draw is an error at once, on every
rank, in front of the next module: ranks draw alike often, and have to, until they act by what they drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.parallel.guards.agreement import TORCH, generator_state, state_of
from fastpar.tensor import LayoutDropout

# Where a draw is wrong: of a module's path, why it is, or nothing.
Verdict = Callable[[str, nn.Module], str]


class DrawGuard:
    """Looks, at the begin and the end of every module of one forward, whether the generators have moved since.

    What has moved between two looks was drawn by the module in which the forward was then: `verdict` says whether that
    is wrong there.
    """

    def __init__(
        self,
        device: torch.device,
        verdict: Verdict,
        ranks: str = "this tensor-parallel group",
        features: Mapping[str, bool] | None = None,
    ):
        """features  of linears in no block: whether a rank has features of its own after it, or no longer"""
        self.device, self.verdict, self.ranks, self.features = device, verdict, ranks, features or {}
        self._has_own_features = False
        self._apart: dict[str, bytes] = {}  # states of generators that differ between the ranks
        self._handles: list[Any] = []
        self._inside: list[tuple[str, nn.Module]] = []
        self._seen: Tensor | None = None
        self.reason = ""

    def start(self, model: nn.Module, apart: Iterable[str] = ()) -> None:
        """Watch the forward that begins. RuntimeError in it for a draw from a generator that stands `apart`."""
        self.stop()
        self._seen, self.reason, self._has_own_features = generator_state(self.device), "", False
        self._apart = {name: state_of(name, self.device) for name in apart}
        self._inside = [("", model)]  # whose hooks before its forward are running: ours would come too late
        for path, module in model.named_modules():
            path = path.replace("._orig_mod", "")  # where torch.compile(layer) stands in for the layer
            # In front of what gathers a block's input: ranks that have gone other ways meet in no collective.
            self._handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """No longer watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._inside, self._seen, self._apart = [], [], None, {}

    def check(self) -> None:
        """Stop, and raise the first draw in a wrong place as ValueError."""
        try:
            self._look_apart()
        finally:
            self.stop()
        reason, self.reason = self.reason, ""
        if reason:
            raise ValueError(reason)

    def allowing(self, draw: Callable[[], int]) -> Callable[[], int]:
        """A function that draws, whose draws are right wherever they are."""

        def allowed() -> int:
            self._look()
            value = draw()
            self._look_apart()
            self._seen = None if self._seen is None else generator_state(self.device)
            return value

        return allowed

    def _look_apart(self) -> None:
        """RuntimeError if a generator that differs between the ranks has moved."""
        for name, before in self._apart.items():
            now = state_of(name, self.device)
            if now != before:
                self._apart = {}  # said once, not again by the hooks of the modules around
                raise RuntimeError(
                    "the model draws random numbers in its forward (dropout, skipped layers) from "
                    f"{name} generator{'' if name == TORCH else ' (unless another thread does: give that its own)'}, "
                    f"and the generators of the ranks of {self.ranks} differ, so each would drop other elements of the "
                    "same tensor or skip other layers. Seed them alike: torch.manual_seed(seed + mesh.rank('dp')), "
                    "random.seed and numpy.random.seed too, not by the global rank"
                )

    def _look(self) -> None:
        if self._seen is None:
            return
        state = generator_state(self.device)
        if torch.equal(state, self._seen):
            return
        self._seen = state
        if self._inside:
            self._judge(*self._inside[-1])

    def _judge(self, path: str, module: nn.Module) -> None:
        if self._has_own_features and not self.reason:
            self.reason = (
                f"{path} ({type(module).__name__}) draws random numbers between a column- and a row-parallel linear, "
                "on this rank's heads or features: every rank would use the same mask on others, and the result would "
                "depend on the layout. Set its dropout to 0, or leave these linears whole"
            )
        self.reason = self.reason or self.verdict(path, module)

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any) -> None:
            self._look_apart()
            self._look()
            if self._has_own_features and isinstance(module, nn.Dropout | LayoutDropout) and module.p > 0:
                self._judge(path, module)  # whatever it draws from
            if not self.features.get(path, True):
                self._has_own_features = False
            self._inside.append((path, module))

        return hook

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if output is not None:  # as where the forward has failed, and says why
            self._look_apart()
        self._look()
        if self._inside:
            path, _ = self._inside.pop()
            self._has_own_features = self._has_own_features or self.features.get(path, False)
