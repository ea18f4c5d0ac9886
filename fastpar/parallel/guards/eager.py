"""Forwards that guards look at, beside torch.compile.

A compiled layer runs without the hooks that were set after it was traced, or is traced anew for them: what draws in it
would be seen by nobody. So while a guard looks, compiled layers run their own code: in that forward, and in its
backward, whose recomputation has to save what the forward has saved.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class EagerLook:
    """Has compiled modules run without torch.compile for one forward and its backward."""

    def __init__(self) -> None:
        self._stance: Any = None
        self._hook: Any = None  # of the output, which begins the backward

    def begin(self, model: nn.Module) -> None:
        """Before the forward. Nothing where no module is compiled: kernels compiled by themselves (flex attention)
        stay so."""
        self.end()
        # By what OptimizedModule has, as importing the compiler takes seconds.
        if any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules()):
            self._enter()

    def leave(self, output: Any) -> None:
        """Behind the forward: compile again, but not in the backward of `output`."""
        if self._stance is None:
            return
        self.end()
        made = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if made:
            self._hook = torch.autograd.graph.register_multi_grad_hook(made, self._in_backward, mode="any")

    def end(self) -> None:
        """Compile again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def __del__(self) -> None:  # a backward has failed, and no forward has come since
        self.end()

    def _enter(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    def _in_backward(self, _grad: Tensor) -> None:
        self.end()
        self._enter()
        torch.autograd.Variable._execution_engine.queue_callback(self.end)


def warn_of_skipped_checks() -> None:
    """A constant of a graph of torch.compile, so that it is called when the graph is made."""
    warnings.warn(
        "this model is compiled as a whole before it has run once: fastpar's checks of its first steps (that the ranks "
        "of a group read one batch and draw alike, and others) are no part of a graph and never run. Run a training "
        "step before torch.compile(model), or compile its layers instead, `for layer in layers: layer.compile()`",
        stacklevel=2,
    )


warn_of_skipped_checks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see ops/_attention_torch.py
