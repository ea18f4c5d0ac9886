"""What stands in a model for the modules that another part of the pipeline holds.

The model's own forward runs on every part. A layer that is elsewhere passes the hidden states on, and so do the final
norm and the head; the embedding passes on what has arrived from the part before, and what is added to the embedding
(position embeddings) adds nothing. So the names of the modules that are here never depend on the layout, and neither
does the index at which a model finds what belongs to a layer (kinds of attention, rotary tables). What is computed
from stand-ins never counts: see `stream`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastpar.pipeline.stages.stream import HIDDEN, Stream, alias, fill, main_of

_PLAIN = (bool, int, float, str, tuple, type(None))


class Absent(nn.Module):
    """Passes its first argument on.

    Of a pipeline it is sealed: hooks that users put on it, those on all modules of the process
    (`register_module_forward_hook`), and another forward that they give it, do not run, as where they do it to all
    layers in a loop. They are for the module, and run where that is.

    path            the module's name in the model
    part            the part that holds it
    absent_modules  names of the modules inside it, relative to `path`, so that plans know that they exist
    stream          of the part where this stands; `is_entry`: the part's first module comes next, and gets what has
                    arrived; `is_exit`: the part's last module has run, and what this is called with leaves
    """

    def __init__(self, original: nn.Module, path: str, part: int):
        super().__init__()
        plain = {k: v for k, v in vars(original).items() if not k.startswith("_") and isinstance(v, _PLAIN)}
        self.__dict__.update(plain)  # what a model reads off its layers, such as `attention_type` or `layer_idx`
        self.path, self.part, self.original_name = path, part, type(original).__name__
        self.is_sealed = False
        self.absent_modules = tuple(name for name, _ in original.named_modules(remove_duplicate=False) if name)
        self._tensors: dict[str, AbsentStageTensor] = {}
        named = (original.named_parameters(remove_duplicate=False), original.named_buffers(remove_duplicate=False))
        for name, tensor in itertools.chain(*named):
            if name in original._buffers and _is_table(original, name, tensor):
                self.register_buffer(name, tensor.clone(), persistent=False)
            else:
                self._tensors[name] = AbsentStageTensor(self, name, tensor)
        self._first = next(iter(inspect.signature(original.forward).parameters), "")
        self._template: Any = HIDDEN
        self._stream: Stream | None = None
        self._is_entry, self._is_exit = False, False
        self._stand_in: Callable[[Tensor], Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "forward" or not self.is_sealed:
            super().__setattr__(name, value)

    def connect(self, stream: Stream, *, is_entry: bool, is_exit: bool) -> None:
        """Say where in its part this stands."""
        self._stream, self._is_entry, self._is_exit = stream, is_entry, is_exit

    def goes_on(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        """Say what the model's own code gets in the place of the hidden states that have left, whose result is not
        used: where these are a rank's part, something of the whole's shape."""
        self._stand_in = stand_in

    def returns(self, template: Any) -> None:
        """Say what the module returns (`template_of`)."""
        self._template = template

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.forward if self.is_sealed else super().__call__)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args and self._first not in kwargs:
            raise TypeError(
                f"{self.path} is on part {self.part}; here it passes {self._first!r} on, but was called without it"
            )
        hidden = args[0] if args else kwargs[self._first]
        stream = self._stream
        if stream is not None and stream.is_running:
            if self._is_exit:
                if stream.left is not None:
                    raise RuntimeError(
                        f"{self.path} was called twice in one forward; a pipeline runs every module once"
                    )
                stream.left = hidden
                hidden = alias(hidden) if self._stand_in is None else self._stand_in(hidden)
            if self._is_entry and stream.received is not None:
                hidden = stream.passed()
        return fill(self._template, hidden)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return _inside(self, name)

    def extra_repr(self) -> str:
        return f"{self.original_name} on part {self.part}"


def _inside(absent: Absent, name: str) -> Any:
    """What a model may read off a module that is elsewhere, by its path inside: what its tensors are like."""
    own = absent.__dict__
    if name in own.get("_tensors", {}):
        return own["_tensors"][name]
    if name in own.get("absent_modules", ()):
        return AbsentChild(absent, name)
    path, part = own.get("path"), own.get("part")
    raise AttributeError(f"{path}.{name}: {path} is on part {part} of the pipeline, and only its stand-in is here")


class AbsentChild:
    """A module inside of one that is elsewhere: for `model.embeddings.projection.weight.dtype`, and nothing else."""

    def __init__(self, absent: Absent, name: str):
        self._absent, self._name = absent, name

    def __getattr__(self, name: str) -> Any:
        return _inside(self._absent, f"{self._name}.{name}")


class SealedStandIns:
    """The stand-ins of a pipeline, each where it is. What somebody puts around one, a wrapper in its place, would
    compute as well as the one around the module itself."""

    def __init__(self, stages: Iterable[nn.Module]) -> None:
        parents = dict.fromkeys(parent for stage in stages for parent in stage.modules())
        self._places = [
            (parent, name, child)
            for parent in parents
            for name, child in parent._modules.items()
            if isinstance(child, Absent)
        ]
        for _, _, absent in self._places:
            absent.is_sealed = True

    def check(self) -> None:
        """Raises ValueError for one that is not as the pipeline was made with it."""
        for parent, name, absent in self._places:
            found = parent._modules.get(name)
            if getattr(found, "_orig_mod", found) is absent and "forward" not in vars(absent):  # or compiled
                continue
            what = type(found).__name__ if found is not absent else "another forward"
            raise ValueError(
                f"{absent.path} has {what} in the place of its stand-in: the module itself is on part {absent.part}, "
                "and what is around a stand-in would compute as well. Wrap modules before the model is cut, or use "
                "hooks, which run where the module is"
            )


class AbsentStageTensor:
    """A parameter or buffer of a module that is elsewhere: what it is like, and AttributeError for all else."""

    def __init__(self, absent: Absent, name: str, original: Tensor):
        self.dtype, self.device, self.shape, self.ndim = original.dtype, original.device, original.shape, original.ndim
        self._where = f"{absent.path}.{name}: {absent.path} is on part {absent.part} of the pipeline"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(repr(name))

    def __getitem__(self, index: Any) -> Any:
        self._refuse("elements")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refuse("values")

    def _refuse(self, what: str) -> NoReturn:
        raise AttributeError(f"{self.__dict__.get('_where')}, and only its stand-in is here: it has no {what}")


def _is_table(module: nn.Module, name: str, buffer: Tensor) -> bool:
    """Whether a buffer is a constant that a model may read off any module, such as a table of positions."""
    return not buffer.is_floating_point() or name in module._non_persistent_buffers_set


class AbsentLayer(Absent):
    """A layer: passes the hidden states on, in what the layer returned when the model was tried (`record`).

    Where the model could not be tried, the annotation of the layer's forward has to say whether it is a tuple.
    """

    def __init__(self, original: nn.Module, path: str, part: int):
        super().__init__(original, path, part)
        self._template = (HIDDEN,) if declares_tuple(original) else HIDDEN


class AbsentEmbedding(Absent):
    """The embedding of ids on a later part: passes on the hidden states that came in the place of ids."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = self._stream
        hidden = main_of(args, kwargs) if stream is None or stream.received is None else alias(stream.received)
        if isinstance(hidden, Tensor) and not hidden.is_floating_point() and not hidden.is_complex():
            raise TypeError(
                f"{self.path} is on part {self.part}; this part expects hidden states from the part before it, and got "
                f"{hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        return hidden if stream is None else stream.as_embedding(hidden)


class AbsentAddend(Absent):
    """Something that is added to the embedding: nothing, on a later part."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        # -0.0 leaves every number as it is, the sign of zero included; 0-dim: the other's dtype and shape win.
        return torch.full((), -0.0, device=None if given is None else given.device)


def declares_tuple(layer: nn.Module) -> bool:
    annotation = inspect.signature(layer.forward).return_annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.lower().startswith("tuple")


class ReturnCheck:
    """A forward hook on a layer that is here: TypeError if it returns otherwise than its stand-ins elsewhere do.

    A model that takes element 0 of what a layer returns would take the first sample of a stand-in's bare tensor.
    `tried`: what it returned when the model was tried; None: it was not, and the annotation of its forward decides.
    """

    def __init__(self, layer: nn.Module, path: str, tried: Any = None):
        self.path, self.was_tried = path, tried is not None
        self.is_tuple = isinstance(tried, tuple) if self.was_tried else declares_tuple(layer)

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, tuple) == self.is_tuple:
            return
        returned, wanted = ("a tuple", "-> tuple[...]") if not self.is_tuple else ("no tuple", "-> Tensor")
        if self.was_tried:
            raise TypeError(
                f"{self.path} returned {returned}, unlike when it was tried on made-up inputs, and its stand-ins "
                "on other parts: let it return the same whatever its inputs"
            )
        raise TypeError(
            f"{self.path} returned {returned}, unlike its stand-ins on other parts, which go by the annotation of "
            f"forward, as the model could not be tried on made-up inputs: write `{wanted}` at that of "
            f"{type(layer).__name__}"
        )
