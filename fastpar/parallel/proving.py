"""The plan "auto": what a model declares or its modules suggest, as far as trials confirm it.

Where a plan comes from is of no consequence for whether it is right: Hugging Face's `tp_plan`, the table of known
architectures, or a guess from the order in which a block calls its linears. Every kind of layer is tried
(`parallel/trial`), block by block, then as a whole. A block whose trial fails is left whole, which is always right, and
`fastpar.explain` says why; trials also say which gradients of its other parameters are parts.

With sequence parallelism every other module of a layer is either found to compute each token by itself, or is left
whole on all tokens ("gathered").
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

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
)
from fastpar.parallel.styles.linear import splits_features
from fastpar.parallel.trial import DifferenceError, RecordedCall, Trial, TrialError, is_linear, record_calls
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor.own_forward import has_hooks, has_own_forward

# A block that holds other styles is not tried: virtual ranks do not know what a subclass does.
_TRIED = (ColwiseStyle, RowwiseStyle, HeadsStyle, PartialStyle, ReplicateStyle, DropoutStyle)


def proven_plan(model: nn.Module, size: int, *, sequence_parallel: bool = False) -> dict[str, str | Style]:
    """The plan "auto" for a tensor-parallel group of so many ranks, by path.

    Runs the model once on a few tokens, in this process, and trials of one layer of each kind. A model that cannot be
    run so, a part of a pipeline among them, gets what it declares, untried. ValueError for a model of which nothing is
    known and nothing can be found, for a number of heads that does not divide, and with sequence parallelism for a
    layer that cannot work on a part of the sequence.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    is_part = any(isinstance(module, Absent) for module in modules.values())
    styles, unknown = first_plan(model, modules)
    if unknown is not None and (is_part or not styles):
        raise unknown
    if is_part or size == 1:
        return dict(styles.items())
    layers = [path for path, style in styles.items() if isinstance(style, StreamStyle)]
    try:
        kinds, calls = _kinds_and_calls(model, modules, layers, styles, size)
    except Exception as error:  # of the model's own code: any
        if unknown is not None:
            raise UnknownModelError(f"{unknown}. Nor can it be found out: a run on a few ids failed: {error}") from None
        return dict(styles.items())
    for group in kinds:
        if group[0] not in calls:
            continue
        found = LayerPlan(modules, group[0], styles, calls, size, sequence_parallel).settle()
        for path in group:
            styles = {name: style for name, style in styles.items() if not name.startswith(f"{path}.")}
            styles |= {f"{path}.{name}": style for name, style in found.items()}
    return dict(styles.items())


def refuse_wrong_blocks(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Try one block of each kind of a plan that somebody has written; ValueError for one that, split so, computes
    something else than whole.

    As in `proven_plan` the model runs once on a few tokens. What cannot be run so is not judged: models that take other
    inputs than ids, blocks whose code needs a device or what virtual layers do not have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if size == 1 or any(isinstance(module, Absent) for module in modules.values()):
        return
    blocks = [path for path, style in styles.items() if isinstance(style, BlockStyle)]
    try:
        kinds, calls = _kinds_and_calls(model, modules, blocks, styles, size) if blocks else ([], {})
    except Exception:  # of the model's own code: any
        return
    for path, *_ in kinds:
        inside = {name[len(path) + 1 :]: style for name, style in styles.items() if name.startswith(f"{path}.")}
        linears = [modules[f"{path}.{name}"] for name, style in inside.items() if splits_features(style)]
        if any(has_own_forward(linear) or has_hooks(linear) for linear in linears):
            continue  # virtual layers have neither; these linears have been tried by themselves
        if path in calls and all(_can_be_tried(style) for style in inside.values()):
            _refuse_wrong_block(path, modules[path], calls[path], {"": styles[path], **inside}, size)


def _refuse_wrong_block(path: str, module: nn.Module, call: RecordedCall, styles: dict[str, Style], size: int) -> None:
    where = f"{path} ({type(module).__name__}), split as the plan says,"
    advice = 'Leave the block out of the plan, or try plan="auto", which finds out what can be split'
    try:
        kinds = Trial(module, call, styles, block_splits(module, styles, size, path), size).run(False)
    except DifferenceError as error:
        raise ValueError(
            f"{where} would compute something else than whole: {error}. Between its column- and row-parallel linears a "
            "block may only do what works on each feature or head by itself, and its input may reach its output only "
            f"through them. {advice}"
        ) from None
    except TrialError:
        return
    if call.keeps_results:
        raise ValueError(
            f"{where} keeps tensors that it computes (attributes with a gradient, such as a balance loss), of which "
            f"each rank would have those of its own heads or features. {advice}"
        )
    for name, kind in kinds.items():
        said = styles.get(name) or styles.get(name.rpartition(".")[0])
        if isinstance(said, PartialStyle) and kind == "replicate":
            raise ValueError(
                f"{path}.{name} has the style 'partial', but every rank has its whole gradient, and the sum over ranks "
                f"would be {size} times that. Give it the style 'replicate'"
            )


def _can_be_tried(style: Style) -> bool:
    is_full = isinstance(style, ColwiseStyle | RowwiseStyle) and not splits_features(style)
    return type(style) in _TRIED and not is_full


def _kinds_and_calls(
    model: nn.Module, modules: Mapping[str, nn.Module], paths: list[str], styles: Mapping[str, Style], size: int
) -> tuple[list[list[str]], dict[str, RecordedCall]]:
    """The modules at `paths` by kind, and how they and what the first of each kind holds are called."""
    groups = alike(modules, paths, styles)
    firsts = {name for group in groups for name in _inside(modules[group[0]], group[0])}
    calls = record_calls(model, [*firsts, *(path for path in paths if path not in firsts)], 2 * size + 1)
    kinds = [kind for group in groups for kind in called_alike(modules, group, calls)]
    more = [name for kind in kinds if kind[0] not in firsts for name in _inside(modules[kind[0]], kind[0])]
    return kinds, calls | (record_calls(model, more, 2 * size + 1) if more else {})


def _inside(module: nn.Module, path: str) -> list[str]:
    found = [path]
    for name, child in module.named_children():
        if not is_linear(child) and not is_stacked(child):
            found += _inside(child, f"{path}.{name}")
        elif is_linear(child):
            found.append(f"{path}.{name}")
    return found
