"""Parameters that every rank has whole, which must get the same gradient on every rank.

A module that the plan leaves whole does the same work on all ranks, and its gradients need no sum. If it does a part of
the work after all - it stands between a column- and a row-parallel layer, and sees this rank's features - each rank has
a part of its gradient: the copies would drift apart, a little every step, and none would be right.

Nor may the losses differ that ranks make of the logits of a split head. Each rank takes the gradient of its own
columns: of other labels, or of tokens that every rank has drawn for itself, comes a gradient that is the same on all
ranks, and of no loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm import Communicator
from fastpar.parallel.guards.agreement import checksum
from fastpar.tensor.parameter import layout_of, local_tensor

_LOSS = ""  # in the place of a parameter's name
_FAR = 1e-2  # of the gradient's norm: sums in another order are far nearer, parts of a sum are not


class GradientGuard:
    """Compares, in the backward of one forward, the gradients of parameters that are whole on every rank.

    One collective at the end of backward, of three numbers a parameter, and three of the logits' gradient and targets.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._handles: list[Any] = []
        self._found: dict[str, Tensor] = {}
        self._names = [_LOSS]
        self._is_queued = False

    def start(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch the backward passes until the next call."""
        self.stop()
        for name, parameter in parameters:
            layout = layout_of(parameter)
            if parameter.requires_grad and layout is not None and layout.kind == "replicated":
                self._names.append(name)
                self._handles.append(parameter.register_hook(self._noting(name)))

    @property
    def is_watching(self) -> bool:
        """True if a parameter's gradient would be looked at."""
        return bool(self._handles)

    def stop(self) -> None:
        """No longer watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._found, self._names, self._is_queued = [], {}, [_LOSS], False

    def watch_logits(self, whole: Tensor) -> None:
        """Compare the gradient of all logits, which are a plain tensor."""
        if whole.requires_grad:
            self._handles.append(whole.register_hook(lambda grad: self._note(_LOSS, _features_of_rows(grad))))

    def watch_targets(self, loss: Tensor, targets: Tensor) -> None:
        """Compare the targets (integers) of a loss that has been made of split logits."""
        if loss.requires_grad:
            words = checksum(targets * torch.arange(1, targets.numel() + 1, device=targets.device))
            features = torch.stack([words, torch.zeros_like(words), torch.ones_like(words)]).double()
            self._handles.append(loss.register_hook(lambda _: self._note(_LOSS, features)))

    def _noting(self, name: str) -> Any:
        return lambda grad: self._note(name, _features(local_tensor(grad.detach())))

    def _note(self, name: str, features: Tensor) -> None:
        if name == _LOSS:  # of all that is made of the logits
            features = features.cpu() + self._found.get(name, 0)
        self._found[name] = features
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)

    @torch.no_grad()
    def _compare(self) -> None:
        """At the end of backward, on all ranks: each has the same names, and perhaps not all of the gradients."""
        found, names = self._found, self._names
        self._found, self._is_queued = {}, False
        nothing = torch.zeros(3, dtype=torch.float64, device="cpu")
        rows = torch.stack([found[name].cpu() if name in found else nothing for name in names])
        everyone = self.comm.all_gather(rows.unsqueeze(0))  # [ranks, parameters, 3]
        size = everyone[..., 2].amax(0)
        apart = ((everyone - everyone[0]).abs() > _FAR * size[:, None]).any(-1) & everyone.isfinite().all(-1)
        if not apart.any():
            return
        self.stop()
        if apart[:, 0].any():
            raise RuntimeError(
                "the ranks of this tensor-parallel group compute different losses of the model's logits, of which each "
                "has the gradient of its own columns: their labels differ, or what they have drawn for the loss "
                "(sampled tokens, noise, masks). Read labels by mesh.rank('dp'), and seed ranks alike: "
                "torch.manual_seed(seed + mesh.rank('dp')), not by the global rank"
            )
        wrong = [name for name, differs in zip(names, apart.any(0).tolist(), strict=True) if differs]
        raise RuntimeError(
            f"the gradient of {', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} differs between the ranks of "
            "the tensor-parallel group, though every rank has the parameter whole: each has a part of the gradient, "
            "and nothing sums them. Give it the style 'partial' (it works on split features or heads), or have it run "
            "on whole tensors; the ranks' batches or generators may differ, too"
        )


def _features(grad: Tensor) -> Tensor:
    """Numbers that two different gradients do not share: two fixed sums, about as large as the norm, and the norm."""
    flat = grad.reshape(-1).double()
    signs = torch.arange(flat.numel(), device=flat.device).bitwise_and(1).double().mul_(2).sub_(1)
    return torch.stack([flat.sum(), (flat * signs).sum(), flat.norm()])


def _features_of_rows(grad: Tensor) -> Tensor:
    """As `_features`, of a gradient that may be too large for copies."""
    weights = torch.arange(grad.size(-1), device=grad.device).cos().to(grad.dtype)
    features = _features(grad.detach() @ weights)
    features[2] = torch.linalg.vector_norm(grad.detach())
    return features
