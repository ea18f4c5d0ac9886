"""How a part is called: what comes in by position, which keywords of the batch it takes, what it returns.

A part receives what the part before it returned: a tensor, the elements of a tuple by position, or a dict by name; part
0 receives the batch's positional inputs. Keyword inputs of the batch go to every part whose forward takes that name, so
that masks and position ids reach all layers; rotary tables and masks are made from them anew on every part.

A model that takes `inputs_embeds` (all of Hugging Face's) gets the hidden states by that name, without the ids, and
its output object is reduced to the hidden states, the logits, or the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fastpar.pipeline.stages.stream import Stream, alias

_CACHES = ("past_key_values", "use_cache", "output_hidden_states", "output_attentions")
_IDS = ("input_ids", "inputs_embeds", "token_type_ids")
_ENDS = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


@dataclass(frozen=True)
class Keywords:
    """The keyword inputs that a part takes: `name in keywords`."""

    names: frozenset[str]
    takes_any: bool = False
    withheld: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        return name not in self.withheld and (self.takes_any or name in self.names)

    def select(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword inputs of a batch that this part takes."""
        return {name: value for name, value in keywords.items() if name in self}

    @staticmethod
    def of(module: nn.Module) -> Keywords:
        """The keywords in the signature of the module's forward."""
        parameters = inspect.signature(module.forward).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        return Keywords(frozenset(p.name for p in parameters if p.kind in by_name), takes_any)

    def without(self, names: Iterable[str]) -> Keywords:
        return Keywords(self.names, self.takes_any, self.withheld | frozenset(names))


@dataclass
class StageOutput:
    """What a module of a pipeline returns when it also sends tensors to modules further on.

    output  what the next module receives: a tensor, a tuple or a dict
    skips   name to tensor; who receives it is said when the partition is made (`edges`)
    """

    output: Any
    skips: dict[str, Tensor] = field(default_factory=dict)


def call(module: nn.Module, received: Any, keywords: Mapping[str, Any]) -> Any:
    """module(*received, **keywords): a tuple by position, a dict by name, anything else as the only input."""
    if isinstance(received, tuple):
        return module(*received, **keywords)
    if isinstance(received, dict):
        return module(**received, **keywords)
    return module(received, **keywords)


class Convention:
    """How parts of one layered model are called, by its signature.

    `has_embedding`, `has_head` say what is on the part; with `loss`, the part with the head returns the model's own
    loss from `labels`.
    """

    def __init__(self, model: nn.Module, *, loss: bool = False):
        self.keywords = Keywords.of(model)
        parameters = inspect.signature(model.forward).parameters
        self.first = next(iter(parameters), "")
        self.required = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        self.by_embeddings = "inputs_embeds" in self.keywords.names
        self.loss = loss
        if loss and "labels" not in self.keywords.names:
            raise ValueError(
                f"loss=True needs a model whose forward takes `labels`; {type(model).__name__} takes "
                f"{sorted(self.keywords.names)}"
            )

    @property
    def runs_on_hidden_states(self) -> bool:
        """Whether nothing but the hidden states must be given."""
        return self.by_embeddings or len(self.required) <= 1

    def keywords_of(self, *, has_embedding: bool, has_head: bool) -> Keywords:
        """A later part takes no ids, and only the part with the head what is about the output."""
        keywords = self.keywords
        if not has_embedding:
            keywords = keywords.without((self.first, *_IDS))
        if not has_head:
            keywords = keywords.without(_ENDS)
        return keywords if self.loss or not self.by_embeddings else keywords.without(("labels",))

    @property
    def has_cache(self) -> bool:
        """Whether the model's forward takes `use_cache`."""
        return "use_cache" in self.keywords.names or (self.by_embeddings and self.keywords.takes_any)

    def install(self, module: nn.Module, stream: Stream, *, is_first: bool, is_last: bool) -> None:
        """Hooks that translate between this convention and the model's own.

        is_last   the part returns what the model does: logits, hidden states or the loss
        """
        entry = _CallEntry(stream, is_first, self.by_embeddings and not is_first, self.has_cache)
        module.register_forward_pre_hook(entry, with_kwargs=True)
        module.register_forward_hook(_Exit(stream, is_last, self.loss and is_last, self.by_embeddings or self.loss))


@dataclass(frozen=True)
class _CallEntry:
    """Hidden states that come by position become `inputs_embeds`; caches, which a pipeline has no use for, are off."""

    stream: Stream
    is_first: bool
    embeds: bool
    no_cache: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1:
            raise TypeError(
                f"a part of {type(module).__name__} got {len(args)} positional inputs; pass all but the first by name, "
                "so that every part gets them"
            )
        for name in _CACHES:
            if self.no_cache and kwargs.get(name):
                raise ValueError(
                    f"{name} is not available in a pipeline: parts return hidden states, logits or the loss. For the "
                    "states of inner layers run the whole model, or register forward hooks on the layers of this rank"
                )
        self.stream.begin(None if self.is_first or not args else args[0])
        if args and not self.is_first:
            args = (args[0].detach().clone() if self.stream.is_guarded else alias(args[0]),)
        if self.embeds and args:
            kwargs = {**kwargs, "inputs_embeds": self.stream.as_embedding(args[0])}
            args = ()
        return args, {**kwargs, "use_cache": False} if self.no_cache else kwargs


@dataclass(frozen=True)
class _Exit:
    """The hidden states for the next part, or the tensor in the model's output object."""

    stream: Stream
    is_last: bool
    loss: bool
    is_reduced: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        received, left = self.stream.end()
        if self.is_last:
            return reduce_output(output, self.loss) if self.is_reduced else output
        if left is not None:
            return left
        if received is not None and not self.stream.has_units:
            return received
        raise RuntimeError(
            f"the forward of {type(module).__name__} ended without calling the module after this part, so no hidden "
            "states leave it: in a pipeline every layer is called (switch off what skips layers, such as layerdrop)"
        )


def reduce_output(output: Any, loss: bool) -> Any:
    """The tensor in a model's output: the loss where `loss`, else the logits or the hidden states."""
    if isinstance(output, tuple):
        return output[0]  # hidden states or logits; the loss where there is one
    get = output.get if isinstance(output, Mapping) else partial(getattr, output)
    if loss:
        value = get("loss", None)
        if value is None:
            raise ValueError("the last part returns the model's loss (loss=True), but the batch has no `labels`")
        return value
    for name in ("logits", "last_hidden_state"):
        value = get(name, None)
        if value is not None:
            return value
    return output
