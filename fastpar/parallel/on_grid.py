"""What a tensor-parallel grid asks of a model beside its layers: what is refused, and how batch and features are cut.

Note: where what is cut
    Inside of a block features and heads are cut over x and y, as one dim of ranks would cut them: so the plan is the
    same, and so are the trials of its blocks. Between blocks the stream lies as `fastpar.tensor.grid` says: its batch
    over z, its tokens over y, its features over x (or y). So a layer gets the part of masks and positions that goes
    with its sequences, and a module between blocks whose output depends on all features of a token (a norm) gets them
    all, for this rank's tokens. Embedding, head and loss are cut over all ranks of the grid, by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fastpar.comm import shard_sizes
from fastpar.mesh import GridSpec, Mesh
from fastpar.parallel.heads import QUERY_COUNTS
from fastpar.parallel.styles import BlockStyle, ExpertStyle, GatheredStyle, Style, SwapContext
from fastpar.parallel.styles.linear import is_colwise, is_rowwise, splits_features
from fastpar.pipeline.stages.absent import Absent
from fastpar.pipeline.stages.stage import Stage
from fastpar.tensor import Grid, GridLinear, GridRegion, LayoutDropout, VocabParallelEmbedding
from fastpar.tensor.grid_blocks import outside_of_graphs
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.own_features import own_features
from fastpar.tensor.sequence import hook_output, hook_stream, map_hidden


def is_one_dim(spec: GridSpec) -> bool:
    """Whether the layers of one dim have this layout: (1, p, 1), with tokens cut or copied."""
    return spec.x == spec.z == 1 and spec.spread != "features"


def grid_for(mesh: Any, *, sequence_parallel: bool) -> tuple[Grid | None, bool]:
    """The grid to split over, None for one dim of ranks; and whether the stream is cut along the sequence.

    ValueError for dims of the mesh that a grid cannot have beside it.
    """
    if not isinstance(mesh, Mesh) or mesh.tp_grid is None or mesh.size("tp") == 1:
        return None, sequence_parallel
    spec = mesh.tp_grid
    if sequence_parallel and spec.spread != "rows":
        raise ValueError(
            f'sequence_parallel=True cuts tokens, and the grid has spread={spec.spread!r}: use spread="rows", or '
            "leave sequence_parallel out"
        )
    if is_one_dim(spec):
        return None, spec.spread == "rows"
    others = {dim: mesh.size(dim) for dim in ("cp", "ep", "etp") if mesh.size(dim) > 1}
    if others:
        raise ValueError(
            f"a model on the tensor-parallel grid ({spec.x}, {spec.y}, {spec.z}) cannot be split over {others} as "
            "well: use tp without tp_grid, or a grid (1, p, 1)"
        )
    return Grid(mesh), True


def check_on_grid(context: SwapContext, styles: Mapping[str, Style]) -> None:
    """ValueError for what a plan cannot have on a grid; before anything is changed."""
    spec = None if context.grid is None else context.grid.spec
    if spec is None:
        return
    sizes = f"tp_grid=({spec.x}, {spec.y}, {spec.z})" + (", stream=True" if spec.stream else "")
    experts = [path for path, style in styles.items() if isinstance(style, ExpertStyle)]
    if experts:
        raise ValueError(f"{experts[0]} has style 'expert', and experts cannot be split with {sizes}: leave it out")
    for path in context.blocks if spec.x > 1 or spec.stream else ():
        _check_block(path, context, sizes)
    for path, module in context.modules.items():
        is_gathered = context.region_around(path) is not None and context.region_of(path) is None
        if is_gathered and isinstance(module, nn.Dropout) and module.p > 0 and spec.z > 1:
            raise ValueError(
                f"{path} is dropout in a module that is left whole, which with {sizes} has parts of the "
                "batch: set its p to 0, or use z=1"
            )


def _check_block(path: str, context: SwapContext, sizes: str) -> None:
    """Check the readers of a block's input, of which a rank has a part of the features: only column-parallel linears
    can read it."""
    inside = {p: m for p, m in context.modules.items() if context.block_of(p) == path}
    features = {p: _features(m) for p, m in inside.items() if splits_features(context.styles.get(p))}
    hidden = {out for p, (_, out) in features.items() if is_rowwise(context.styles.get(p))}
    others = [p for p, (into, _) in features.items() if is_colwise(context.styles.get(p)) and {into} != hidden]
    for p, module in inside.items():
        if p not in features and any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
            others.append(p)
    if others:
        raise ValueError(
            f"{others[0]} in the block {path!r} does not read the block's input as its column-parallel linears do, or "
            f"is left whole, and with {sizes} a rank has a part of the features: use a grid with x=1, without stream"
        )


def _features(linear: nn.Module) -> tuple[int, int]:
    """(in, out)"""
    weight, _, transposed = linear_weights(linear)
    return (weight.shape[0], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[0])


def cut_features(context: SwapContext) -> None:
    """Let modules between blocks have this rank's features and statistics of all, or else all features of their
    tokens, where the grid cuts features."""
    if context.grid is None or context.grid.features.size == 1:
        return
    rows = [m.out_features for m in context.modules.values() if isinstance(m, GridLinear) and m.role == "row"]
    hidden = max(set(rows), key=rows.count, default=0)
    for paths in context.streams.values():
        for path in paths:
            if context.modules[path] not in {context.modules[p] for p in context.blocks}:
                _cut_inside(path, context, hidden)


def _cut_inside(path: str, context: SwapContext, hidden: int) -> None:
    for name, child in context.modules[path].named_children():
        at = f"{path}.{name}" if path else name
        style = context.styles.get(at)
        if isinstance(style, BlockStyle | GatheredStyle) or splits_features(style) or isinstance(child, LayoutDropout):
            continue
        if any(
            p.startswith(f"{at}.") and (p in context.blocks or splits_features(s)) for p, s in context.styles.items()
        ):
            _cut_inside(at, context, hidden)
            continue
        if "_own_features" in vars(child):
            continue  # reached a second time, under another name
        region = context.region_of(at)
        assert isinstance(region, GridRegion)
        adoption = own_features(child, region, hidden) if hidden else None
        if adoption is not None:
            context.changes.adopted(adoption)
        elif any(True for _ in child.parameters()):
            context.changes.hooked(hook_stream(child, _widened(region, at)), hook_output(child, _narrowed(region, at)))


def share_ends(context: SwapContext) -> None:
    """Let embeddings leave their sum to the region that their rows enter (`fastpar.tensor.grid_blocks`)."""
    grid = context.grid
    modules = {path: context.modules[path] for path in context.once(context.modules)}
    if grid is None or not context.regions:
        return
    for module in modules.values():
        if isinstance(module, VocabParallelEmbedding) and module.comm.size == grid.spec.ranks:
            context.changes.set(module, "is_deferred", True)


def _widened(region: GridRegion, path: str) -> Callable[[Tensor], Tensor]:
    def widen(x: Tensor) -> Tensor:
        over = region.grid.features
        mine = shard_sizes(region.shape[2], over.size)[over.rank]
        if not region.is_whole and x.size(-1) != mine:
            raise ValueError(
                f"{path} reads {list(x.shape)}, and on a grid that cuts features a rank has {mine} of the "
                f"{region.shape[2]}, as the last dim: use a grid with x=1 (and another spread than features)"
            )
        return region.leave_features(x)

    return widen


def _narrowed(region: GridRegion, path: str) -> Callable[[Tensor], Tensor]:
    def narrow(out: Tensor) -> Tensor:
        if out.size(-1) != region.shape[2]:
            raise ValueError(
                f"{path} returns {out.size(-1)} features where hidden states have {region.shape[2]}; on a grid that "
                "cuts features it cannot stay between blocks: use a grid with x=1 (and another spread than features)"
            )
        return region.enter_features(out)

    return narrow


def with_parts_sent(stage: Stage, context: SwapContext, units: Sequence[Sequence[str]]) -> Stage:
    """A stage of a pipeline, split on a grid, that sends and takes this rank's part of the hidden states where the
    neighbouring part of the model goes on with the same stream; elsewhere they are whole.

    units   of each part of the model, in the order in which they run; the same on all ranks
    """

    def region(part: int) -> GridRegion | None:
        """The region of the stream between the last unit of `part` and the first of the next."""
        if not 0 <= part < len(units) - 1 or not (units[part] and units[part + 1]):
            return None
        before, after = units[part][-1], units[part + 1][0]
        parent = before.rpartition(".")[0]
        is_one = all(path in context.passing.get(parent, ()) for path in (before, after))
        found = context.regions.get(parent) if is_one else None
        assert found is None or isinstance(found, GridRegion)
        return found

    taken, sent = region(stage.part - 1), region(stage.part)
    if taken is not None:
        taken.takes_parts = True
    if sent is not None:
        sent.sends_parts = True
        for module in context.modules.values():
            if isinstance(module, Absent):
                module.goes_on(sent.blank)
    return replace(stage, taken=taken, sent=sent)


def cut_batches(context: SwapContext) -> None:
    """Let layers have the rows of masks and positions that go with their sequences, where the grid cuts the batch."""
    for parent, region in context.regions.items():
        if not isinstance(region, GridRegion) or region.grid.spec.z == 1:
            continue
        for path in context.streams[parent]:
            layer = context.modules[path]
            counts = (getattr(module, name, None) for module in layer.modules() for name in QUERY_COUNTS)
            hook = _BatchCut(path, region, frozenset(count for count in counts if isinstance(count, int)))
            context.changes.hooked(layer.register_forward_pre_hook(hook, with_kwargs=True))


class _BatchCut:
    """Cuts what a layer is called with beside its hidden states.

    What has a row for each sequence, or one for each of its heads (as BLOOM's ALiBi), is known by its size in the first
    call, and by its place from then on, since sizes may coincide; that the first call is right, `StreamGuard` sees.

    heads   numbers of attention heads in the layer
    """

    def __init__(self, path: str, region: GridRegion, heads: frozenset[int]):
        self.path, self.region, self.heads = path, region, heads
        self._rows_of: dict[str, int] = {}

    def __deepcopy__(self, memo: Any) -> _BatchCut:
        return _BatchCut(self.path, self.region, self.heads)

    @outside_of_graphs
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.region.is_whole:
            return None
        hidden: list[Tensor] = []
        map_hidden(args, kwargs, hidden.append)
        return self._cut(args, "", hidden[0]), self._cut(kwargs, "", hidden[0])

    def _cut(self, value: Any, name: str, hidden: Tensor) -> Any:
        if isinstance(value, Tensor):
            return value if value is hidden or value.dim() == 0 else self._rows(value, name, hidden)
        if type(value) in (tuple, list):
            return type(value)(self._cut(item, f"{name}[{i}]", hidden) for i, item in enumerate(value))
        if type(value) is dict:
            return {key: self._cut(item, f"{name}.{key}", hidden) for key, item in value.items()}
        return value

    def _rows(self, x: Tensor, name: str, hidden: Tensor) -> Tensor:
        batch = self.region.shape[0]
        if x.size(0) == 1 or x.shape == hidden.shape:  # of all sequences alike; a part, such as a residual
            return x
        rows = self._rows_of.setdefault(name, self._rows_each(x))
        if rows == 0:
            return x
        if x.size(0) != batch * rows:
            raise ValueError(
                f"{self.path} got {name.lstrip('.')} of shape {list(x.shape)}, which had {rows} rows for each sequence "
                f"before, and the batch has {batch}"
            )
        lo, hi = self.region.batch_range
        return x.narrow(0, lo * rows, (hi - lo) * rows)

    def _rows_each(self, x: Tensor) -> int:
        """Rows for each sequence: one, or one for each head where batch and heads are one dim; 0 where there are none
        of their own."""
        batch, tokens, _ = self.region.shape
        if x.size(0) == batch:
            return 1
        rows, rest = divmod(x.size(0), batch)
        return rows if rest == 0 and x.dim() > 2 and rows in self.heads and x.size(0) != tokens else 0


__all__ = ["check_on_grid", "cut_batches", "cut_features", "grid_for", "is_one_dim", "share_ends", "with_parts_sent"]
