"""A plan on a model: where things lie, and all that can be wrong with it, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fastpar.parallel.heads import HeadsError, HeadSplit, block_splits
from fastpar.parallel.styles import BlockStyle, GatheredStyle, StreamStyle, Style, SwapContext
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor import Grid, GridRegion, SequenceRegion
from fastpar.tensor.grid_linear import check_heads

_ATTENTION = ("self_attn", "attn", "attention")
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout")


def resolve(context: SwapContext, styles: Mapping[str, Style], *, sequence_parallel: bool) -> None:
    """Find blocks, streams and regions of the plan, and put them into the context."""
    modules = context.modules = dict(context.model.named_modules(remove_duplicate=False))
    names = {name for name, _ in context.model.named_parameters(remove_duplicate=False)}
    context.parameter_styles = {path: style for path, style in styles.items() if path in names}
    here = [path for path in styles if path in modules and not isinstance(modules[path], Absent)]
    context.styles = {path: styles[path] for path in here}
    context.blocks = [path for path in here if isinstance(styles[path], BlockStyle)]
    context.gathered = [path for path in here if isinstance(styles[path], GatheredStyle)]
    for found, paths in ((context.streams, here), (context.passing, [path for path in styles if path in modules])):
        for path in paths:
            if isinstance(styles[path], StreamStyle):
                found.setdefault(path.rpartition(".")[0], []).append(path)
    if sequence_parallel:
        grid = context.grid
        context.regions = {
            parent: SequenceRegion(context.comm) if grid is None else GridRegion(grid) for parent in context.streams
        }
        # Another part of a pipeline may hold all of the stream's layers.
        if not any(isinstance(style, StreamStyle) for style in styles.values()):
            raise ValueError(
                f"{'sequence_parallel=True' if grid is None else 'tp_grid'} needs to know where the residual stream "
                'is split: give the layers that pass it on the style "stream", such as {"layers.*": "stream"}'
            )


def check_plan(context: SwapContext) -> dict[str, HeadSplit]:
    """Raise everything that can be wrong with the plan for this model. Collective, where layers are tried.

    Returns how heads fall on ranks, by the path of the module that holds the linears.
    """
    for path, style in context.styles.items():
        style.check(path, context.modules[path], context)
    for path, style in context.parameter_styles.items():
        style.check_parameter(path, context)
    splits = _splits(context)
    for split in splits.values():
        context.rows |= split.rows | split.parameters
    _check_shared(context)
    for path, module in context.modules.items():
        _check_gradient_hooks(path, module)
        if context.comm.size > 1:
            _check_undeclared(path, module, context)
            _check_sees_sequence(path, context)
            _check_attention_dropout(path, module, context)
    for path, style in context.styles.items():
        style.prove(path, context.modules[path], context)
    return splits


def _splits(context: SwapContext) -> dict[str, HeadSplit]:
    styles, (_, size) = context.styles | context.parameter_styles, context.features
    if context.grid is None:
        return block_splits(context.model, styles, size, "")
    try:
        return block_splits(context.model, styles, size, "", context.grid.x.size)
    except HeadsError as error:
        raise heads_on_grid(error, context.grid) from None


def heads_on_grid(error: HeadsError, grid: Grid) -> ValueError:
    """What to say of heads that do not fit on a grid: with the grids of as many ranks on which they do."""
    try:
        check_heads(error.heads, grid)
    except ValueError as said:
        return ValueError(f"{error.path}: {said}")
    return error


def uses_layout_attention(module: nn.Module) -> bool:
    """True where a module's attention draws its dropout by the global position."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) in (
        "fastpar_eager",
        "fastpar_context",
    )


def check_has_values(model: nn.Module) -> None:
    """ValueError for a parameter or a buffer on the meta device."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device; materialise and initialise the model before it is parallelised, its "
                "buffers too (to_empty gives memory, load_state_dict no buffers that are not persistent), or let "
                "fastpar.load_pretrained build and fill it"
            )


def _check_gradient_hooks(path: str, module: nn.Module) -> None:
    for name, param in module._parameters.items():
        if param is not None and (param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)):
            raise ValueError(
                f"{path + '.' if path else ''}{name} has hooks on its gradient, and the parameter that the split model "
                "trains in its place would not run them: remove them, and register them after parallelize, where "
                "gradients are DTensors"
            )


def _check_shared(context: SwapContext) -> None:
    """A module that is used in several places becomes one parallel module: the places must be alike."""
    places: dict[nn.Module, list[str]] = {}
    for path, module in context.modules.items():
        places.setdefault(module, []).append(path)
    for module, paths in places.items():
        styled = [path for path in paths if path in context.styles] or paths
        if not any(True for _ in module.parameters()):
            continue
        first = styled[0]
        for other in styled[1:]:
            if _place_of(other, context) != _place_of(first, context):
                raise ValueError(
                    f"{first} and {other} are one module ({type(module).__name__}), and the plan treats them "
                    "differently. Give both the same style and surroundings, or make them two modules"
                )
    for parent, paths in context.streams.items():
        layers, is_split = [context.modules[path] for path in paths], False
        for layer in layers if parent in context.regions and context.comm.size > 1 else ():
            # The first layer splits the stream, and the last gathers it, whenever they are called.
            if is_split == (layer is layers[0]):
                raise ValueError(
                    f"the layers of {parent or 'the model'} use one module several times, so that with "
                    "sequence_parallel=True it cannot be told by the module where the stream is split. Make them "
                    "several modules, or use sequence_parallel=False"
                )
            is_split = layer is not layers[-1]


def _place_of(path: str, context: SwapContext) -> tuple[Any, ...]:
    return context.styles.get(path), context.block_of(path) is None, context.region_of(path)


def _check_undeclared(path: str, module: nn.Module, context: SwapContext) -> None:
    """Inside a block nothing says whether a gradient is whole or a part, nor whose elements a dropout drops."""
    block = path if path in context.blocks else context.block_of(path)
    if block is None or (path in context.styles and path != block):
        return
    own = [name for name, param in module._parameters.items() if param is not None]
    undeclared = [name for name in own if f"{path}.{name}" not in context.parameter_styles]
    if undeclared and path == block:
        raise ValueError(
            f"{path} ({type(module).__name__}) is a block with the parameters {undeclared} of its own, which have no "
            f"style. Say for each, such as {f'{path}.{undeclared[0]}'!r}: 'partial' if it is used with split heads "
            "or features (its gradient is a part, to be summed), 'heads' if it has a row for each head, "
            "'replicate' if it is used after the sum"
        )
    if undeclared:
        raise ValueError(
            f"{path} ({type(module).__name__}) has parameters inside the block {block!r} but no style. Say 'partial' "
            "if it runs between the block's column- and row-parallel layers (its gradient is a part to be summed), "
            "'replicate' if it runs after the sum"
        )
    if isinstance(module, nn.Dropout) and module.p > 0 and path.rpartition(".")[2] not in _ATTENTION_DROPOUT:
        raise ValueError(
            f"{path} is dropout (p={module.p}) inside the block {block!r} with no style. Say 'dropout' if it runs "
            "on the block's summed output; set p=0 if it runs on split features"
        )


def _check_sees_sequence(path: str, context: SwapContext) -> None:
    """Attention needs all positions; a plan that leaves it whole has nothing that would gather them."""
    if path.rpartition(".")[2] not in _ATTENTION or context.region_of(path) is None:
        return
    styles = (style for p, style in context.styles.items() if p == path or p.startswith(path + "."))
    if context.block_of(path) is None and not any(style.handles_sequence for style in styles):
        raise ValueError(
            f"{path} is not split by the plan, and with sequence_parallel=True would see a part of the sequence "
            "only. Leave it out, or give this the style 'block' and its linears 'colwise' and 'rowwise'"
        )


def _check_attention_dropout(path: str, module: nn.Module, context: SwapContext) -> None:
    if context.context is not None:  # whose attention draws by the global position
        return
    for name in _ATTENTION_DROPOUT if path in context.blocks else ():
        value = getattr(module, name, 0.0)
        p = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(p, int | float) and p > 0 and context.grid is not None and context.grid.spec.z > 1:
            raise ValueError(
                f"{path}.{name} is {p}, and attention's masks do not know which sequences of a batch a rank of z has: "
                "set it to 0, or use a grid with z=1"
            )
        if isinstance(p, int | float) and p > 0 and not uses_layout_attention(module):
            raise ValueError(
                f"{path}.{name} is {p}: attention would draw its masks per rank, so heads on different ranks share "
                "them and they depend on the layout. Set it to 0, or choose attn_implementation='fastpar_eager' "
                "(fastpar.integrations.huggingface.register())"
            )
