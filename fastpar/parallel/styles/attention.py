"""Attention of a module of one's own over a split sequence: the style "attention"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fastpar.arguments import checked_fields
from fastpar.context.region import REGION, ContextRegion
from fastpar.contracts.attention import AttentionMask
from fastpar.ops._autograd import in_backward
from fastpar.parallel.changes import Changes
from fastpar.parallel.styles.base import Style, SwapContext

_REDIRECT = "_fastpar_attention"  # the attribute by which modules hold what redirects them
_CALL = nn.Module._call_impl.__code__


@checked_fields
@dataclass(frozen=True)
class AttentionStyle(Style):
    """A module that calls `torch.nn.functional.scaled_dot_product_attention`, which gets the tokens of all ranks.

        fp.parallelize(model, mesh, {"layers.*.attention": "attention"}, context=fp.Context())

    Within the module's forward that function is `ContextRegion.attend`: is_causal, dropout_p, scale and enable_gqa mean
    what they do in torch. A module that makes a mask (`attn_mask`) is refused, unless the style says what is meant:

    causal, window, chunk   see `AttentionMask`; where any is given they stand in the place of attn_mask and is_causal.
                            Documents come with the batch

    A module that calls it within torch.utils.checkpoint of its own is refused: give the style to what is checkpointed.
    On a mesh without cp the module is left as it is.
    """

    causal: bool | None = None
    window: tuple[int, int] | None = None
    chunk: int | None = None

    keeps_module = True
    handles_sequence = True

    @property
    def mask(self) -> AttentionMask | None:
        """What stands in the place of the module's own mask; None: nothing."""
        if self.causal is None and self.window is None and self.chunk is None:
            return None
        return AttentionMask(self.causal is not False, self.window, self.chunk)

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        if isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                f"{path} has style {self.name!r}: nn.MultiheadAttention calls no function of torch that could be "
                "redirected; write its projections as linears around F.scaled_dot_product_attention"
            )

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        if context.context is not None:
            self.redirect(path, module, context.context, context.changes)
            context.explain(path, self, note="over the tokens of all ranks of cp")

    def redirect(self, path: str, module: nn.Module, region: ContextRegion, changes: Changes) -> None:
        """Let the module attend over the region, as changes that can be undone."""
        changes.set(module, REGION, region)
        redirect = _Redirect(path, region, self.mask)
        changes.set(module, _REDIRECT, redirect)  # where `fastpar.apply_recompute` finds its `capture`
        changes.hooked(
            module.register_forward_pre_hook(redirect.enter),
            module.register_forward_hook(redirect.leave, always_call=True),
        )


@dataclass
class _Redirect:
    """Hooks around a module's forward."""

    path: str
    region: ContextRegion
    mask: AttentionMask | None
    modes: list[_AttentionMode] = field(default_factory=list)  # of the forwards that are running

    def __deepcopy__(self, memo: Any) -> _Redirect:
        return _Redirect(self.path, memo.get(id(self.region), self.region), self.mask)

    def capture(self) -> Callable[[], AbstractContextManager[Any]]:
        """What redirects while the module's forward is recomputed: without its hooks, where it is a layer itself."""
        mode = self.modes[-1] if self.modes else None
        return lambda: nullcontext() if mode is None else mode.again()

    def enter(self, module: nn.Module, _args: Any) -> None:
        # By the attribute: a copied layer may have been given another region.
        region, first_head = getattr(module, REGION), getattr(module, "_fastpar_heads", (0,))[0]
        mode = _AttentionMode(self.path, module, region, self.mask, first_head)
        mode.__enter__()
        self.modes.append(mode)

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self.modes:
            return  # a hook before this one has failed
        mode = self.modes.pop()
        mode.__exit__(None, None, None)
        if output is not None and not mode.calls:
            raise ValueError(
                f"{self.path} has the style 'attention' and has not called F.scaled_dot_product_attention: its tokens "
                "have seen those of this rank at most. Give the style to the module that does, or use "
                "fastpar.context.ContextAttention in it"
            )


class _AttentionMode(TorchFunctionMode):
    """`F.scaled_dot_product_attention` over a region."""

    def __init__(
        self, path: str, module: nn.Module, region: ContextRegion, mask: AttentionMask | None, first_head: int
    ) -> None:
        super().__init__()
        self.path, self.module, self.region, self.mask, self.first_head = path, module, region, mask, first_head
        self.calls = 0

    def again(self) -> _AttentionMode:
        """The same for another run of the module's forward."""
        return _AttentionMode(self.path, self.module, self.region, self.mask, self.first_head)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            _refuse_checkpoint(self.path, self.module)
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise TypeError(f"{self.path} has style 'attention', but calls nn.MultiheadAttention, which has its own")
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and self.mask is None:
            raise ValueError(
                f"{self.path} gives its attention a mask of its own, {list(attn_mask.shape)}: say what it means, as "
                "fp.parallel.AttentionStyle(causal=, window=, chunk=); documents are those of fastpar.context.shard"
            )
        if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"{self.path} has {query.shape[1]} query heads and {key.shape[1]} of keys: enable_gqa=True, as in torch"
            )
        return self.region.attend(
            query,
            key,
            value,
            mask=self.mask or AttentionMask(is_causal),
            scale=scale,
            dropout=dropout_p,
            first_head=self.first_head,
        )


def _refuse_checkpoint(path: str, module: nn.Module) -> None:
    """ValueError for a call within a checkpoint that is within the module's forward: backward repeats what is in the
    checkpoint, without the module's hooks, and would attend over this rank's tokens."""
    frame: Any = None if in_backward() else sys._getframe(2)
    while frame is not None and frame.f_globals is not vars(torch.utils.checkpoint):
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return
        frame = frame.f_back
    if frame is not None:
        raise ValueError(
            f"{path} has the style 'attention' and calls F.scaled_dot_product_attention within torch.utils.checkpoint, "
            "whose second run in backward the style does not see: give the style to the module that is checkpointed, "
            "checkpoint all of this one, or use fastpar.apply_recompute"
        )
