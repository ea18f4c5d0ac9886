"""What stands in a model for the modules that another part of the pipeline holds.

The model's own forward runs on every part. A layer that is elsewhere passes the hidden states on, and so do the final
norm and the head; the embedding passes on what arrives in the place of ids, and what is added to the embedding
(position embeddings) adds nothing. So the names of the modules that are here never depend on the layout, and neither
does the index at which a model finds what belongs to a layer (kinds of attention, rotary tables).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, tuple, type(None))


class Absent(nn.Module):
    """Passes its first argument on.

    path            the module's name in the model
    part            the part that holds it
    absent_modules  names of the modules inside it, relative to `path`, so that plans know that they exist
    """

    def __init__(self, original: nn.Module, path: str, part: int):
        super().__init__()
        plain = {k: v for k, v in vars(original).items() if not k.startswith("_") and isinstance(v, _PLAIN)}
        self.__dict__.update(plain)  # what a model reads off its layers, such as `attention_type` or `layer_idx`
        self.path, self.part, self.original_name = path, part, type(original).__name__
        self.absent_modules = tuple(name for name, _ in original.named_modules(remove_duplicate=False) if name)
        self._first = next(iter(inspect.signature(original.forward).parameters), "")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args and self._first not in kwargs:
            raise TypeError(
                f"{self.path} is on part {self.part}; here it passes {self._first!r} on, but was called without it"
            )
        return args[0] if args else kwargs[self._first]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            path, part = self.__dict__.get("path"), self.__dict__.get("part")
            raise AttributeError(
                f"{path}.{name}: {path} is on part {part} of the pipeline, and only its stand-in is here"
            ) from None

    def extra_repr(self) -> str:
        return f"{self.original_name} on part {self.part}"


class AbsentLayer(Absent):
    """A layer: passes the hidden states on, in a tuple where its forward is declared to return one."""

    def __init__(self, original: nn.Module, path: str, part: int):
        super().__init__(original, path, part)
        self._returns_tuple = _declares_tuple(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        return (hidden,) if self._returns_tuple else hidden


class AbsentEmbedding(Absent):
    """The embedding of ids on a later part: called with hidden states in the place of ids, passes them on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        if isinstance(hidden, Tensor) and not hidden.is_floating_point() and not hidden.is_complex():
            raise TypeError(
                f"{self.path} is on part {self.part}; this part expects hidden states from the part before it, and got "
                f"{hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        return hidden


class AbsentAddend(Absent):
    """Something that is added to the embedding: nothing, on a later part."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        # -0.0 leaves every number as it is, the sign of zero included; 0-dim: the other's dtype and shape win.
        return torch.full((), -0.0, device=None if given is None else given.device)


def _declares_tuple(layer: nn.Module) -> bool:
    annotation = inspect.signature(layer.forward).return_annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.lower().startswith("tuple")


class ReturnCheck:
    """A forward hook on a layer that is here: TypeError if it returns otherwise than its stand-ins elsewhere do.

    A model that takes element 0 of what a layer returns would take the first sample of a stand-in's bare tensor.
    """

    def __init__(self, layer: nn.Module, path: str):
        self.path, self.declared = path, _declares_tuple(layer)

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple) != self.declared:
            returned, wanted = ("a tuple", "-> tuple[...]") if not self.declared else ("no tuple", "-> Tensor")
            raise TypeError(
                f"{self.path} returned {returned}, unlike its stand-ins on other parts, which go by the annotation of "
                f"forward: write `{wanted}` at that of {type(layer).__name__}"
            )
