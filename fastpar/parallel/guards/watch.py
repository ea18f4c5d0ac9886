"""The guards of one parallelised model, started by a hook on it and ended by one that is there while they look."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastpar.comm import Communicator
from fastpar.comm.callers import refuse_other_threads
from fastpar.parallel.guards.agreement import InputGuard
from fastpar.parallel.guards.draws import DrawGuard
from fastpar.parallel.guards.eager import EagerLook, warn_of_skipped_checks
from fastpar.parallel.guards.gradients import GradientGuard
from fastpar.parallel.guards.members import MemberGuard
from fastpar.parallel.guards.positions import PositionGuard
from fastpar.parallel.guards.stream import StreamGuard, modules_at
from fastpar.tensor.dropout import LayoutDropout
from fastpar.tensor.grid import GridRegion
from fastpar.tensor.held import DataOfDTensors
from fastpar.tensor.sequence import SequenceRegion
from fastpar.tensor.split_logits import SplitLogits
from fastpar.tensor.vocab import VocabParallelHead

FIRST, EVERY = 2, 256
_log = logging.getLogger("fastpar")


class Cadence:
    """When the guards look: the first calls of a model, and one in many from then on.

    Counts the calls, the same on all ranks of a group since each call has collectives in it. Those in evaluation mode
    apart: they draw nothing, and may come first.
    """

    def __init__(self, first: int = FIRST, every: int = EVERY):
        self.first, self.every, self.calls = first, every, [0, 0]

    def __deepcopy__(self, memo: Any) -> Cadence:
        return Cadence(self.first, self.every)

    def restart(self) -> None:
        """Look at the first calls from now on, unless stopped."""
        self.calls = [0, 0]

    def stop(self) -> None:
        """No further call is one to look at."""
        self.first = self.every = 0

    def next(self, training: bool = True) -> bool:
        """True if the call that begins is one to look at. None is while torch.compile traces it."""
        if torch.compiler.is_compiling():
            return False
        number = self.calls[training]
        self.calls[training] += 1
        return number < self.first or (self.every > 0 and number % self.every == 0)


@dataclass(frozen=True)
class WatchedPlan:
    """The part of a plan that the guards need, by module path."""

    blocks: Sequence[str] = ()
    gathered: Sequence[str] = ()  # modules that are left whole, on all tokens
    layers: Mapping[str, SequenceRegion | None] = field(default_factory=dict)  # that pass the stream on; split or not
    draws_by_layout: frozenset[str] = frozenset()  # modules whose draws do not depend on the layout
    features: Mapping[str, bool] = field(default_factory=dict)  # of linears outside of blocks: `DrawGuard`
    is_part: bool = False  # of a pipeline, whose backward runs in pieces

    def block_of(self, path: str) -> str | None:
        return next((b for b in self.blocks if path == b or path.startswith(b + ".")), None)

    def region_of(self, path: str) -> SequenceRegion | None:
        """What splits the sequence (on a grid the batch and the features) where this module runs; None: nothing."""
        if any(path == whole or path.startswith(whole + ".") for whole in self.gathered):
            return None
        inside = (x for layer, x in self.layers.items() if path == layer or path.startswith(layer + "."))
        return next((region for region in inside if region is not None), None)


class Watch:
    """Looks at the forwards (and their backwards) that `Cadence` chooses. A copied model has a watch of its own."""

    def __init__(self, comm: Communicator, device: torch.device, plan: WatchedPlan):
        self.comm, self.device, self.plan = comm, device, plan
        self.cadence = Cadence()
        self._end: Any = None  # the handle of `after`, while a forward is watched
        self._handled: BaseException | None = None  # in whose except clause the watched forward was called
        self._is_warned = False  # of hooks that see a part of a gradient
        self.eager = EagerLook()
        self.data: DataOfDTensors | None = None  # a copied model is not looked at
        self.inputs = InputGuard(comm, device)
        self.draws = DrawGuard(device, _verdict(plan), features=plan.features)
        self.gradients, self.positions, self.members = GradientGuard(comm), PositionGuard(comm), MemberGuard()
        split = {path: region for path, region in plan.layers.items() if region is not None}
        # On a grid of parts too: what has a row for each sequence is told by its size, which may be that of something.
        is_watched = not plan.is_part or any(isinstance(region, GridRegion) for region in split.values())
        self.stream = StreamGuard(comm, split if is_watched else {})

    def __deepcopy__(self, memo: Any) -> Watch:
        return Watch(self.comm, self.device, self.plan)

    def attach(self, model: nn.Module) -> list[Any]:
        """Hook the model; returns the handles."""
        self.data = DataOfDTensors(model.named_parameters())
        self.members.start(model, self.plan.blocks)
        return [model.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True), self, self.members]

    def remove(self) -> None:
        """End a look that is going on, with nothing said."""
        self._handled = None
        if self._end is not None:
            self._end.remove()
            self._end = None
            self.draws.stop()
            self.positions.stop()
        self.eager.end()

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs, and start what looks at the forward."""
        if self.stream.is_running:
            return
        if torch.compiler.is_compiling():  # before anything that has handles of hooks, which no graph can hold
            if not any(self.cadence.calls) and self.comm.size > 1:
                warn_of_skipped_checks()
            return
        refuse_other_threads(model, self.comm.group)
        if torch._C._are_functorch_transforms_active():
            _refuse_transforms(model, args, kwargs)
        if self.gradients.is_watching:
            self.gradients.stop()  # the forward before: its backward is over, or nobody waits for what it would say
        self.remove()  # what a forward or backward that has failed has left
        if self.members.check(model):  # such as a last layer, whose output was made whole, taken out
            self.cadence.restart()
            self.stream.restart()
        if not self.cadence.next(model.training):
            return
        if self.data is not None:
            self.data.check()
        self._end = model.register_forward_hook(self.after, always_call=True)
        self._handled = sys.exc_info()[1]
        self.eager.begin(model)
        # What a look runs is not for selective checkpointing, nor counters of operations.
        with _disable_current_modes():
            apart = self.inputs.before(model, args, kwargs)
            self.stream.before(model, args, kwargs)
        if model.training:
            self.draws.start(model, apart)
        if torch.is_grad_enabled() and not self._is_warned:
            self._is_warned = _warn_of_backward_hooks(model, self.plan.blocks)
        if torch.is_grad_enabled() and not self.plan.is_part:
            self.gradients.start(model.named_parameters())
        split = {path: region for path, region in self.plan.layers.items() if region is not None}
        self.positions.start(
            {path: (layer, split[path]) for path, layer in modules_at(model, split).items()},
            [*self.plan.blocks, *self.plan.gathered],
        )

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Raise what has been seen."""
        if self.stream.is_running or self._end is None:  # a copy of a model whose forward has failed: it has this hook
            return
        if (error := sys.exc_info()[1]) is not None and error is not self._handled:
            # The forward or a hook has failed. torch walks through the hooks now: the next call takes this one away.
            is_of_shapes = type(error) is RuntimeError and re.search("sizes?|shapes?", str(error)) is not None
            if is_of_shapes and any(region is not None for region in self.plan.layers.values()):
                _add_note(error, _SPLIT_STREAM)
            return
        self._end.remove()
        self._end = self._handled = None
        if torch.is_grad_enabled() and not self.plan.is_part:
            self._watch_logits(model, output)
        self.eager.leave(output)
        with _disable_current_modes():
            self.draws.check()
            self.positions.check()
            self.stream.after(model, output)

    def _watch_logits(self, model: nn.Module, output: Any) -> None:
        """Whatever is made of a head's logits, split or gathered, has to be the same loss on all ranks."""
        heads = [m for m in model.modules() if isinstance(m, VocabParallelHead) and m.gather_output]
        sizes = {head.out_features for head in heads}
        for x in tree_leaves(output):
            if isinstance(x, SplitLogits):
                x._watch = self.gradients
            elif isinstance(x, torch.Tensor) and x.dim() and x.size(-1) in sizes:
                self.gradients.watch_logits(x)


_SPLIT_STREAM = (
    "fastpar: between the layers' begin and end each rank has a part of the hidden states (sequence parallelism, a "
    "grid). A tensor that the model makes outside, such as a skip across layers, a bias of positions or the output of "
    "an encoder, is whole, and does not fit there: pass it as an input of a block, or leave the stream whole "
    "(sequence_parallel=False, a mesh without tp_grid)"
)


def _warn_of_backward_hooks(model: nn.Module, blocks: Sequence[str]) -> bool:
    """Whether there are some: hooks of others on a block or within, where the sum over the ranks is still to come."""
    for path, block in modules_at(model, blocks).items():
        for name, module in block.named_modules(prefix=path):
            if module._backward_hooks:
                _log.warning(
                    "%s has a backward hook, whose grad_input is this rank's term of the gradient: the sum over the "
                    "tensor-parallel ranks is that of one process. The module around %s has the whole gradient",
                    name,
                    path,
                )
                return True
    return False


def _refuse_transforms(model: nn.Module, args: Any, kwargs: Any) -> None:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(
        isinstance(x, torch.Tensor) and is_wrapped(x) for x in chain(model.parameters(), tree_leaves((args, kwargs)))
    ):
        raise TypeError(
            "transforms of torch.func (grad, vjp, jvp, vmap) cannot pass through a model that fastpar.parallelize has "
            "split: its parameters are DTensors, and its layers communicate. Take torch.autograd.grad(loss, "
            "parameters), with create_graph=True for derivatives of it"
        )


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}",)


def _verdict(plan: WatchedPlan) -> Callable[[str, nn.Module], str]:
    def verdict(path: str, module: nn.Module) -> str:
        if isinstance(module, LayoutDropout) or path in plan.draws_by_layout:
            return ""
        block, kind = plan.block_of(path), type(module).__name__
        if block is not None:
            return (
                f"{path} ({kind}) draws random numbers inside the block {block!r}, on this rank's heads or features: "
                "every rank would use the same mask on others, and the result would depend on the layout. Set its "
                "dropout to 0, or use an nn.Dropout module with the style 'dropout' where the tensor is whole"
            )
        region = plan.region_of(path)
        if region is not None:
            is_grid = isinstance(region, GridRegion)
            split = "a grid splits the hidden states" if is_grid else "the sequence is split"
            return (
                f"{path} ({kind}) draws random numbers (F.dropout or the like) while {split}: every rank would use the "
                f"same mask on other {'samples and features' if is_grid else 'positions'}. Use an nn.Dropout module "
                "there, which fastpar replaces, set the dropout to 0, or use "
                + ("a mesh without tp_grid" if is_grid else "sequence_parallel=False")
            )
        return ""

    return verdict
