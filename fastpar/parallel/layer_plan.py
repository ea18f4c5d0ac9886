"""The part of the plan "auto" for one layer of a kind: blocks that pass their trials, and what is left whole."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastpar.parallel.guesses import guessed_linears, linear_features, local_attributes, sliced_parameters
from fastpar.parallel.heads import HeadsError, block_splits
from fastpar.parallel.stacked_experts import is_stacked
from fastpar.parallel.styles import (
    STYLES,
    BlockStyle,
    ColwiseStyle,
    DropoutStyle,
    ExpertStyle,
    GatheredStyle,
    HeadsStyle,
    ReplicateStyle,
    RowwiseStyle,
    Style,
    VocabStyle,
    WholeStyle,
)
from fastpar.parallel.styles.linear import is_rowwise, splits_features
from fastpar.parallel.trial import (
    CodeError,
    RecordedCall,
    Trial,
    TrialError,
    holds_linears,
    is_linear,
    is_per_token,
    keeps_results,
)
from fastpar.pretrained.adapters import is_adapter

_KEPT = (ExpertStyle, DropoutStyle, ReplicateStyle, VocabStyle)  # declared inside a layer, and right without a trial
_MAX_GUESSES = 32


class LayerPlan:
    """The plan of one layer of a kind: its blocks are tried, and what is not a block is looked at."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        path: str,
        styles: Mapping[str, Style],
        calls: Mapping[str, RecordedCall],
        size: int,
        sequence: bool,
        looks_deeper: bool = False,
    ):
        """looks_deeper  blocks may be within others: of a model of which nothing was known"""
        self.looks_deeper = looks_deeper and not sequence
        self.path, self.calls, self.size, self.sequence = path, calls, size, sequence
        self.modules = {name[len(path) + 1 :]: m for name, m in modules.items() if name.startswith(f"{path}.")}
        self.modules[""] = modules[path]
        self.declared = {name[len(path) + 1 :]: s for name, s in styles.items() if name.startswith(f"{path}.")}
        self.settled: dict[str, Style] = {}
        self.loose: list[list[str]] = []  # what belongs together and is in no block, the most doubtful last

    def call(self, path: str) -> RecordedCall | None:
        return self.calls.get(f"{self.path}.{path}" if path else self.path)

    def settle(self) -> dict[str, Style]:
        """Relative path to style of everything in the layer."""
        self.settled = {p: s for p, s in self.declared.items() if isinstance(s, _KEPT)}
        for name, _ in self.modules[""].named_children():
            self._visit(name)
        self._pairs()
        self._check_layer()
        return self.settled

    def _visit(self, path: str) -> None:
        module = self.modules[path]
        if path in self.declared and isinstance(self.declared[path], ExpertStyle):
            return
        if not any(True for _ in module.parameters()) and not self.sequence:
            return
        reason = ""
        call = self.call(path)
        if not is_linear(module) and call is not None and not _holds_experts(module):
            found, reason = self._split(path, module, call)
            if found is not None:
                self.settled |= found
                return
        if _holds_experts(module) or call is None:
            self._visit_children(path, module, call)
            return
        kept = {p: s for p, s in self.declared.items() if _is_full(s) and p.startswith(f"{path}.")}
        if kept and not self.sequence:
            self.settled |= kept
            return
        if self.looks_deeper and self._finds_deeper(path, module):
            return
        self._leave_whole(path, module, call, reason)

    def _visit_children(self, path: str, module: nn.Module, call: RecordedCall | None) -> None:
        """The children of a module, one by one; all of it on all tokens where one of them cannot work on a part."""
        before = dict(self.settled)
        try:
            for name, _ in module.named_children():
                self._visit(f"{path}.{name}")
        except HeadsError:
            raise
        except ValueError:
            if call is None:
                raise
            self.settled = before
            self._leave_whole(path, module, call, "")

    def _finds_deeper(self, path: str, module: nn.Module) -> bool:
        """Whether there are blocks within a module that is none, which are settled then."""
        if is_linear(module) or not any(holds_linears(child) for child in module.children()):
            return False
        before = dict(self.settled)
        for name, _ in module.named_children():
            self._visit(f"{path}.{name}")
        if any(splits_features(self.settled[name]) for name in self.settled.keys() - before.keys()):
            return True
        self.settled = before
        return False

    def _leave_whole(self, path: str, module: nn.Module, call: RecordedCall, reason: str) -> None:
        note = reason and f"left whole: {reason}"
        # Where the tokens decide which parameters are used, ranks with parts of them would disagree on whose gradients
        # to sum.
        works_on_parts = not _chooses_parameters(module) and not (self.sequence and keeps_results(module, call))
        if not self.sequence or (works_on_parts and is_per_token(module, call, self.size)):
            if note:
                self.settled[path] = WholeStyle(note=note, is_fallback=True)
            return
        style = GatheredStyle(note=note or "left whole: it needs all tokens", is_fallback=bool(note))
        try:
            Trial(module, call, {"": style}, {}, self.size).run(True)
        except TrialError as error:
            raise ValueError(
                f"sequence_parallel=True: {self.path}.{path} ({type(module).__name__}) can work neither on a part of "
                f"the sequence nor on one that is gathered for it: {error}. Leave sequence_parallel out"
            ) from None
        self.settled[path] = style

    # ---- blocks

    def _split(self, path: str, module: nn.Module, call: RecordedCall) -> tuple[dict[str, Style] | None, str]:
        """The styles of a block that pass, by path in the layer; else None, and why the first guess did not."""
        reason = self._wrapped_linear(path)
        for guess, is_declared in self._guesses(path, module, call):
            try:
                found = self._try(path, module, call, guess)
            except HeadsError:
                if is_declared:
                    raise
                reason = reason or "its heads do not divide by the group"
            except (TrialError, ValueError, TypeError) as error:
                reason = reason or str(error)
            else:
                found = {f"{path}.{name}" if name else path: style for name, style in found.items()}
                if not any(isinstance(style, BlockStyle) for style in found.values()):
                    self.loose.append(list(found))
                return found, ""
        return None, reason

    def _wrapped_linear(self, path: str) -> str:
        """The words for a block whose declared linears have something else in their places, such as adapters."""
        names = [p for p, s in self.declared.items() if p.startswith(f"{path}.") and splits_features(s)]
        other = next((name for name in names if not is_linear(self.modules[name])), None)
        if other is not None:
            return f"{other} is a {_qualified_kind(self.modules[other])}, which is no linear that could be split"
        adapter = next((p for p, m in self.modules.items() if p.startswith(f"{path}.") and is_adapter(m)), None)
        if adapter is None:
            return ""
        kind = _qualified_kind(self.modules[adapter])
        return f"{adapter} is an adapter ({kind}), and no split around it that was tried computes the same"

    def _guesses(self, path: str, module: nn.Module, call: RecordedCall) -> Iterator[tuple[dict[str, Style], bool]]:
        """Styles as declared (True), and as the calls suggest; each with more and more attributes made local."""
        prefix = f"{path}."
        words = {p[len(prefix) :]: s for p, s in self.declared.items() if p.startswith(prefix) and splits_features(s)}
        usable = all(is_linear(module.get_submodule(name)) for name in words)
        bases = [(words, True)] if usable and any(is_rowwise(s) for s in words.values()) else []
        shapes = ((guess, False) for guess in itertools.islice(guessed_linears(module, call), _MAX_GUESSES))
        for styles, is_declared in itertools.chain(bases, shapes):
            for local in local_attributes(module, styles):
                for sliced in sliced_parameters(module, styles, self.size):
                    yield (
                        {"": BlockStyle(local=local), **styles, **dict.fromkeys(sliced, HeadsStyle())},
                        is_declared,
                    )
        # Where the input reaches the output as well, or keys and values are of another one: every linear for itself.
        for styles in itertools.islice(guessed_linears(module, call), _MAX_GUESSES) if self.looks_deeper else ():
            for sliced in sliced_parameters(module, styles, self.size):
                yield {**styles, **dict.fromkeys(sliced, HeadsStyle())}, False

    def _try(self, path: str, module: nn.Module, call: RecordedCall, styles: dict[str, Style]) -> dict[str, Style]:
        if call.uses_others or keeps_results(module, call):
            raise TrialError("what it computes beside the hidden states may be used by other modules")
        splits = block_splits(module, styles, self.size, self.path + "." + path)
        trial = Trial(module, call, styles, splits, self.size)
        kinds = trial.run(False)
        if self.sequence:
            Trial(module, call, styles, splits, self.size).run(True)
        dropouts = dict.fromkeys(trial.whole_dropouts, DropoutStyle())
        if "" not in styles:
            _refuse_dropouts(module, trial)
        else:
            styles = styles | {"": dataclasses.replace(cast(BlockStyle, styles[""]), is_tried=True)}
        return styles | dropouts | {name: STYLES[kind] for name, kind in kinds.items() if name not in styles}

    def _pairs(self) -> None:
        """Two linears of the layer, one after the other: an MLP without a module of its own."""
        layer, call = self.modules[""], self.call("")
        own = {name: child for name, child in layer.named_children() if is_linear(child)}
        if self.looks_deeper:  # in modules of their own, as of BERT
            own = {name: module for name, module in self.modules.items() if is_linear(module)}
        order = [name for name in (call.order if call is not None else []) if name in own]
        for first, second in itertools.pairwise(order):
            outer = linear_features(own[first])
            if outer[::-1] != linear_features(own[second]) or self._is_settled(first) or self._is_settled(second):
                continue
            flat = self.call(first)
            if self.sequence and (flat is None or flat.hidden().dim() < 3):
                continue  # its tokens are flattened: no sequence that could be gathered
            for name in (first, second):
                self.settled.pop(name, None)
            self.settled |= {first: ColwiseStyle(), second: RowwiseStyle()}
            self.loose.append([first, second])

    def _is_settled(self, name: str) -> bool:
        """Whether a linear is split, or in a module that is left whole for a reason."""
        parts = name.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        style = self.settled.get(name)
        return (style is not None and not isinstance(style, WholeStyle)) or any(path in self.settled for path in above)

    def _check_layer(self) -> None:
        """The layer as it will run, its own code included; what is doubtful is given up step by step."""
        call = self.call("")
        if call is None:
            return
        while True:
            try:
                self._try_layer(call)
                return
            except TrialError as error:
                if self.loose:
                    for name in self.loose.pop():
                        self.settled.pop(name, None)
                elif self.sequence:
                    raise ValueError(
                        f"sequence_parallel=True: {self.path} ({type(self.modules['']).__name__}) does not compute the "
                        f"same on parts of the sequence: {self._cause(call, error)}. Leave sequence_parallel out"
                    ) from None
                else:  # without blocks every rank computes the same, whatever a trial would say
                    blocks = [path for path, style in self.settled.items() if isinstance(style, BlockStyle)]
                    kept = {p: s for p, s in self.settled.items() if isinstance(s, (*_KEPT, WholeStyle)) or _is_full(s)}
                    whole = WholeStyle(note=f"left whole: in its layer, {error}", is_fallback=True)
                    self.settled = kept | dict.fromkeys(blocks, whole)
                    return

    def _cause(self, call: RecordedCall, error: TrialError) -> str:
        """The reason why the layer cannot work on a part of the sequence, where an error of its code says less."""
        hidden = call.hidden()
        shape = hidden.shape
        if len(shape) > 3:
            return (
                f"it passes several streams on in one tensor of shape {list(shape)}, and where the sequence is split "
                "hidden states are [batch, sequence, hidden]"
            )
        inputs = {f"input {index}": x for index, x in enumerate(call.args)} | call.kwargs
        for name, x in inputs.items() if isinstance(error, CodeError) else ():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x is hidden:
                continue
            if x.dim() > 1 and x.size(1) == shape[1] and self._works_with_part(call, x.shape):
                return (
                    f"its own code combines the hidden states, of which a rank has a part of the positions, with "
                    f"{name} of shape {list(x.shape)}, of which every rank has all"
                )
        return str(error)

    def _works_with_part(self, call: RecordedCall, shape: torch.Size) -> bool:
        """True if the layer's code would run if inputs of this shape were parts of the sequence as well."""
        splits = block_splits(self.modules[""], self.settled, self.size, self.path)
        options: dict[str, Any] = {"cuts_all": False, "also_parts": (shape,)}
        try:
            Trial(self.modules[""], call, self.settled, splits, self.size, **options).run(True)
        except CodeError:
            return False
        except TrialError:  # other numbers, from other inputs
            pass
        return True

    def _try_layer(self, call: RecordedCall) -> None:
        if self.sequence and call.uses_others:
            raise TrialError("it passes more on than the hidden states")
        splits = block_splits(self.modules[""], self.settled, self.size, self.path)
        for sequence in (False, True) if self.sequence else (False,):
            trial = Trial(self.modules[""], call, self.settled, splits, self.size, cuts_all=False)
            trial.run(sequence)
            if self.loose:
                _refuse_dropouts(self.modules[""], trial)


def _refuse_dropouts(module: nn.Module, trial: Trial) -> None:
    """Of linears in no block: dropout between them would drop other elements of the whole on every rank."""
    blocks = tuple(f"{path}." for path, style in trial.styles.items() if isinstance(style, BlockStyle))
    for name in trial.split_dropouts:
        p = getattr(module.get_submodule(name), "p", 0.0)
        if p > 0 and not name.startswith(blocks):
            raise TrialError(f"{name} (p={p}) would draw the same mask for other heads or features on every rank")


def _is_full(style: Style) -> bool:
    """True for a linear that is split and whose input and output every rank has whole."""
    return isinstance(style, ColwiseStyle | RowwiseStyle) and not splits_features(style)


def _qualified_kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _holds_experts(module: nn.Module) -> bool:
    return any(is_stacked(child) for child in module.modules())


def _chooses_parameters(module: nn.Module) -> bool:
    """True for a module that may leave parameters unused: experts, as modules in a list or stacked."""
    convolutions = {id(p) for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd) for p in m.parameters()}
    stacked = any(p.dim() > 2 and id(p) not in convolutions for p in module.parameters())
    return stacked or any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in module.modules())
