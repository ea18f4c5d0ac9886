"""The hidden states on their way through one part of a layered model: where they enter, and where they leave.

The model's own forward runs on every part, so what it computes between its modules (a scaled embedding, soft-capped
logits, dropout) runs there as well. Only one part may make use of it:

    enter   what the first module of the part is called with is replaced by what arrived from the part before
    leave   what the stand-in of the module after the part is called with goes to the next part

So everything before the first module of a part, and everything after its last one up to the next part's, is computed
and thrown away, unless it is the first or the last part. Code between two modules runs where the earlier one is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = "hidden"  # in a template: the hidden states


class Stream:
    """One forward of one part: `received` from the part before, and `left` for the next.

    has_units   False: the part is empty, and hands on what it receives
    is_guarded  the model changes its input in place before the part begins: it gets a copy of what has arrived
    is_replaced the part's first module has `EnterStream`

    embedding_dims  dims of what the model's embedding returns (0: not known). Hidden states have more where the model
                    makes several vectors a token of it (hyper-connections).
    """

    def __init__(self, *, has_units: bool = True, is_guarded: bool = False) -> None:
        self.has_units, self.is_guarded, self.is_replaced = has_units, is_guarded, False
        self.embedding_dims = 0
        self.received: Tensor | None = None
        self.left: Tensor | None = None
        self.is_running = False
        self.entered = False

    def begin(self, received: Any) -> None:
        self.received, self.left, self.is_running, self.entered = received, None, True, False

    def passed(self) -> Tensor | None:
        """What has arrived, for the code of the model that lies before the part's first module."""
        return alias(self.received) if self.is_replaced else self.received

    def as_embedding(self, hidden: Any) -> Any:
        """Something like what the embedding returns, for the code between it and the layers, whose result is not used:
        the hidden states, or one vector a token of them."""
        while isinstance(hidden, Tensor) and 2 < self.embedding_dims < hidden.dim():
            hidden = hidden.select(-2, 0)
        return hidden

    def end(self) -> tuple[Tensor | None, Tensor | None]:
        """(received, left) of the forward that ends here; nothing is kept."""
        found = self.received, self.left
        self.received, self.left, self.is_running, self.entered = None, None, False, False
        return found


class EnterStream:
    """A pre-hook of a part's first module: the hidden states that it is called with are those that have arrived.

    Needed where code of the model lies between the stand-in before and this module; see `try_part`.
    """

    def __init__(self, stream: Stream, path: str, first: str) -> None:
        self.stream, self.path, self.first = stream, path, first

    def register(self, module: nn.Module) -> None:
        self.stream.is_replaced = True
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.stream.is_running:
            raise RuntimeError(
                f"{self.path} was called outside of its part's forward, as checkpointing around the call of a module "
                "does in backward: checkpoint inside of it, or use recompute= (fastpar.recompute)"
            )
        if self.stream.entered:  # the same module in a further place
            return args, kwargs
        self.stream.entered = True
        if args:
            return (self.stream.received, *args[1:]), kwargs
        return args, {**kwargs, self.first: self.stream.received}


class ArrivalNote:
    """A pre-hook in the place of `EnterStream`, for a trial with gradients up to here: whether there is anything to
    replace, in the hidden states or, by a function or a hook, in their gradient alone."""

    def __init__(self, enter: EnterStream) -> None:
        self.enter, self.is_needed = enter, False
        enter.stream.is_replaced = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        received, given = self.enter.stream.received, main_of(args, kwargs)
        if received is not None:
            self.is_needed = not _is_view(given, received) or _changes_gradient(received, given)
        torch.set_grad_enabled(False)
        return self.enter(module, args, kwargs)


def alias(hidden: Any) -> Any:
    """The hidden states for code whose result is not used here. Hooks that it has on their gradient must not run here
    either, but where the code belongs."""
    return hidden.view_as(hidden) if isinstance(hidden, Tensor) else hidden


def main_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument: the hidden states, for modules after the embedding."""
    return args[0] if args else next(iter(kwargs.values()), None)


def template_of(output: Any, shape: tuple[int, ...]) -> Any:
    """The structure of what a layer returns, with HIDDEN for tensors of the hidden states' shape, None for others."""
    if isinstance(output, Tensor):
        return HIDDEN if tuple(output.shape) == shape else None
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(template_of(item, shape) for item in output))
    if type(output) in (tuple, list):
        return type(output)(template_of(item, shape) for item in output)
    if isinstance(output, dict):
        return {key: template_of(item, shape) for key, item in output.items()}
    return None


def fill(template: Any, hidden: Any) -> Any:
    """A template with the hidden states in it."""
    if isinstance(template, str):
        return hidden
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(fill(item, hidden) for item in template))
    if type(template) in (tuple, list):
        return type(template)(fill(item, hidden) for item in template)
    if isinstance(template, dict):
        return {key: fill(item, hidden) for key, item in template.items()}
    return None


def _is_view(tensor: Any, base: Tensor) -> bool:
    """Whether nothing has been computed: the same elements in the same memory."""
    if tensor is base:
        return True
    if not isinstance(tensor, Tensor) or tensor.shape != base.shape or tensor.device.type == "meta":
        return False
    return tensor.data_ptr() == base.data_ptr() and tensor.stride() == base.stride()


def _changes_gradient(received: Tensor, given: Tensor) -> bool:
    """Whether the gradient of `given`, a view of `received`, reaches that in another form. (Where it does not at all,
    what is detached here is so in either part.)"""
    if not given.requires_grad:
        return False
    grad = torch.randn_like(given)
    (back,) = torch.autograd.grad(given, received, grad, allow_unused=True)
    return back is not None and not torch.equal(back, grad)
