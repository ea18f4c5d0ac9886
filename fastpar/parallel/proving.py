"""The plan "auto": what a model declares or its modules suggest, as far as trials confirm it.

Where a plan comes from is of no consequence for whether it is right: Hugging Face's `tp_plan`, the table of known
architectures, or a guess from the order in which a block calls its linears. Every kind of layer is tried
(`parallel/trial`), block by block, then as a whole. A block whose trial fails is left whole, which is always right, and
`fastpar.explain` says why; trials also say which gradients of its other parameters are parts.

With sequence parallelism every other module of a layer is either found to compute each token by itself, or is left
whole on all tokens ("gathered").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fastpar.comm.recompute_cache import Tape, recording
from fastpar.contracts.rehearsal import Example, same_generators
from fastpar.parallel.declared import UnknownModelError, first_plan
from fastpar.parallel.heads import block_splits
from fastpar.parallel.kinds import alike, called_alike
from fastpar.parallel.layer_plan import LayerPlan
from fastpar.parallel.stacked_experts import is_stacked
from fastpar.parallel.styles import (
    BlockStyle,
    ColwiseStyle,
    DropoutStyle,
    HeadsStyle,
    PartialStyle,
    ReplicateStyle,
    RowwiseStyle,
    StreamStyle,
    Style,
    WholeStyle,
)
from fastpar.parallel.styles.linear import splits_features
from fastpar.parallel.trial import (
    DifferenceError,
    RecordedCall,
    Trial,
    TrialError,
    is_linear,
    keeps_results,
    noisy_copy,
    record_calls,
    recorded,
    structure_copy,
)
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor.own_forward import has_hooks, has_own_forward

# A block that holds other styles is not tried: virtual ranks do not know what a subclass does.
_TRIED = (ColwiseStyle, RowwiseStyle, HeadsStyle, PartialStyle, ReplicateStyle, DropoutStyle)


def proven_plan(
    model: nn.Module, size: int, *, sequence_parallel: bool = False, example: Example | None = None
) -> dict[str, str | Style]:
    """The plan "auto" for a tensor-parallel group of so many ranks, by path.

    Runs the model once on a few tokens, in this process, and trials of one layer of each kind. A model that cannot be
    run so, a part of a pipeline among them, gets what it declares, untried. ValueError for a model of which nothing is
    known and nothing can be found, for a number of heads that does not divide, and with sequence parallelism for a
    layer that cannot work on a part of the sequence.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    is_part = any(isinstance(module, Absent) for module in modules.values())
    styles, unknown = first_plan(model, modules, sequence_parallel=sequence_parallel)
    if unknown is not None and (is_part or not styles):
        raise unknown
    if size == 1:
        return _those_that_fit(modules, styles)
    if is_part:
        return dict(styles.items())
    layers = [path for path, style in styles.items() if isinstance(style, StreamStyle)]
    try:
        kinds, calls = _kinds_and_calls(model, modules, layers, styles, size, example)
    except Exception as error:  # of the model's own code: any
        if unknown is not None:
            raise UnknownModelError(f"{unknown}. Nor can it be found out: {_run_of(example)} failed: {error}") from None
        return dict(styles.items())
    for group in kinds:
        if group[0] not in calls:
            continue
        found = LayerPlan(
            modules, group[0], styles, calls, size, sequence_parallel, looks_deeper=unknown is not None
        ).settle()
        for path in group:
            styles = {name: style for name, style in styles.items() if not name.startswith(f"{path}.")}
            styles |= {f"{path}.{name}": style for name, style in found.items()}
    return dict(styles.items())


def _those_that_fit(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, str | Style]:
    """Untried styles, for one rank, which splits nothing: a block whose weights are not as they say is left whole."""
    found: dict[str, str | Style] = dict(styles.items())
    for path, style in styles.items():
        module = modules.get(path)  # none of a layer on another part of a pipeline
        if not isinstance(style, BlockStyle) or module is None or isinstance(module, Absent):
            continue
        inside = {name[len(path) + 1 :]: s for name, s in styles.items() if name.startswith(f"{path}.")}
        try:
            block_splits(module, {"": style, **inside}, 1, path)
        except ValueError as error:
            found = {name: s for name, s in found.items() if not name.startswith(f"{path}.")}
            found[path] = WholeStyle(note=f"left whole: {error}", is_fallback=True)
    return found


def _run_of(example: Example | None) -> str:
    return "a run on example_inputs" if example is not None else "a run on a few ids (see example_inputs)"


def refuse_wrong_blocks(
    model: nn.Module, styles: Mapping[str, Style], size: int, example: Example | None = None
) -> list[UntriedBlock]:
    """Try one block of each kind that has not been tried; ValueError for one that, split so, computes something else
    than whole.

    These are the blocks of a plan that somebody has written, and those of a declared one that `proven_plan` could not
    run. As there the model runs once on a few tokens. Blocks that are not called then, as of models that take other
    inputs than ids or of a part of a pipeline, are returned: they are to be tried when they are called first. Not
    judged are blocks whose code needs a device or what virtual layers do not have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = [path for path, style in styles.items() if isinstance(style, BlockStyle) and not style.is_tried]
    blocks = [path for path in blocks if not isinstance(modules[path], Absent)]
    if size == 1 or not blocks:
        return []
    kinds, calls = alike(modules, blocks, styles), dict[str, RecordedCall]()
    if not any(isinstance(module, Absent) for module in modules.values()):
        with contextlib.suppress(Exception):  # of the model's own code: any
            kinds, calls = _kinds_and_calls(model, modules, blocks, styles, size, example)
    untried = []
    for path, *_ in kinds:
        inside = {name[len(path) + 1 :]: style for name, style in styles.items() if name.startswith(f"{path}.")}
        linears = [modules[f"{path}.{name}"] for name, style in inside.items() if splits_features(style)]
        if any(has_own_forward(linear) or has_hooks(linear) for linear in linears):
            continue  # virtual layers have neither; these linears have been tried by themselves
        if not all(_can_be_tried(style) for style in inside.values()):
            continue
        if path in calls:
            _refuse_wrong_block(path, modules[path], calls[path], {"": styles[path], **inside}, size)
        else:
            with contextlib.suppress(Exception):  # of a module that cannot be copied: any
                untried.append(UntriedBlock(path, structure_copy(modules[path]), {"": styles[path], **inside}, size))
    return untried


@dataclass(frozen=True)
class UntriedBlock:
    """A block of which no call is known before the model runs on what a user feeds it."""

    path: str
    whole: nn.Module  # as it was before the split, its parameters without memory
    styles: dict[str, Style]
    size: int

    def watch(self, module: nn.Module, trial: Callable[[], AbstractContextManager[None]]) -> Any:
        """Try the block with what the parallel `module` in its place is called with first; returns the hook's handle.
        ValueError then, on every rank, as all run the same trial. `trial`: around it."""

        is_over = False  # for copies of the module as well, which share this function

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal is_over
            if is_over or torch.compiler.is_compiling():
                return
            device = next((t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "cpu")
            with (
                trial(),
                same_generators(),
                # A second run of the block has no trial: what one saves must not count, nor be kept, as the block's.
                # Detached: an output that its own graph saved as it is would never be freed.
                saved_tensors_hooks(Tensor.detach, lambda x: x),
                recording(Tape()),
                _disable_current_modes(),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast(device, enabled=False),
            ):
                self._refuse_wrong(recorded(args, kwargs))
            is_over = True  # not before: who catches the error of one forward must not be rid of it in the next
            handle.remove()

        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        return handle

    def _refuse_wrong(self, call: RecordedCall) -> None:
        """On a few tokens of two sequences if the block's code takes them, since a batch may be large."""
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves((call.args, call.kwargs))):
            return
        whole, tokens = noisy_copy(self.whole), 2 * self.size + 1
        for rows, length in ((2, tokens), (2, None), (None, None)):
            part = _shorter(call, rows, length)
            if _refuse_wrong_block(self.path, whole, part, self.styles, self.size, "Pass a plan without this block"):
                return


def _shorter(call: RecordedCall, rows: int | None, length: int | None) -> RecordedCall:
    """A call of fewer sequences and positions: of tensors with as many as the hidden states."""
    shape = call.hidden().shape

    def one(x: Tensor) -> Tensor:
        value = x.detach()
        if rows is not None and x.dim() and x.size(0) == shape[0]:
            value = value[:rows]
        dims = [1] if x.shape == shape else [d for d in range(1, x.dim()) if len(shape) > 2 and x.size(d) == shape[1]]
        for dim in dims if length is not None and len(shape) > 2 else ():
            value = value[(slice(None),) * dim + (slice(length),)]
        return value.clone().requires_grad_(x.requires_grad)

    return RecordedCall(*tree_map_only(Tensor, one, (call.args, call.kwargs)))


def _refuse_wrong_block(
    path: str,
    module: nn.Module,
    call: RecordedCall,
    styles: dict[str, Style],
    size: int,
    advice: str = 'Leave the block out of the plan, or try plan="auto", which finds out what can be split',
) -> bool:
    """ValueError for a wrong block; False for one that could not be tried."""
    where = f"{path} ({type(module).__name__}), split as the plan says,"
    try:
        kinds = Trial(module, call, styles, block_splits(module, styles, size, path), size).run(False)
    except DifferenceError as error:
        raise ValueError(
            f"{where} would compute something else than whole: {error}. Between its column- and row-parallel linears a "
            "block may only do what works on each feature or head by itself, and its input may reach its output only "
            f"through them. {advice}"
        ) from None
    except TrialError:
        return False
    if keeps_results(module, call):
        raise ValueError(
            f"{where} keeps tensors that it computes (in attributes or lists, such as a balance loss), of which "
            f"each rank would have those of its own heads or features. {advice}"
        )
    for name, kind in kinds.items():
        said = styles.get(name) or styles.get(name.rpartition(".")[0])
        if isinstance(said, PartialStyle) and kind == "replicate":
            raise ValueError(
                f"{path}.{name} has the style 'partial', but every rank has its whole gradient, and the sum over ranks "
                f"would be {size} times that. Give it the style 'replicate'"
            )
    return True


def _can_be_tried(style: Style) -> bool:
    is_full = isinstance(style, ColwiseStyle | RowwiseStyle) and not splits_features(style)
    return type(style) in _TRIED and not is_full


def _kinds_and_calls(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    paths: list[str],
    styles: Mapping[str, Style],
    size: int,
    example: Example | None,
) -> tuple[list[list[str]], dict[str, RecordedCall]]:
    """The modules at `paths` by kind, and how they and what the first of each kind holds are called."""
    groups = alike(modules, paths, styles)
    firsts = {name for group in groups for name in _inside(modules[group[0]], group[0])}
    calls = record_calls(model, [*firsts, *(path for path in paths if path not in firsts)], 2 * size + 1, example)
    kinds = [kind for group in groups for kind in called_alike(modules, group, calls)]
    more = [name for kind in kinds if kind[0] not in firsts for name in _inside(modules[kind[0]], kind[0])]
    return kinds, calls | (record_calls(model, more, 2 * size + 1, example) if more else {})


def _inside(module: nn.Module, path: str) -> list[str]:
    found = [path]
    for name, child in module.named_children():
        if not is_linear(child) and not is_stacked(child):
            found += _inside(child, f"{path}.{name}")
        elif is_linear(child):
            found.append(f"{path}.{name}")
    return found
