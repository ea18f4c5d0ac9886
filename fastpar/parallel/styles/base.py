"""The shape of a parallel style, and the context in which it checks and changes a model.

    class PReLUStyle(fp.Style):                           # a slope per feature, between two split linears
        def check(self, path, module, context):
            if not isinstance(module, nn.PReLU):
                raise TypeError(f"{path} is a {type(module).__name__}, not an nn.PReLU")

        def apply(self, path, module, context):
            rows = RowMap.chunk(module.num_parameters, context.comm.size)
            context.replicate(path, module, style=self, rows={"weight": rows})

    fp.parallelize(model, mesh, {"up": "colwise", "act": PReLUStyle(), "down": "rowwise"})

As with torch's `ParallelStyle`, a user's own style is a subclass, and an instance of it is a value of a plan. Unlike
there, a plan is checked as a whole before anything is changed, and what a style changes through its context is
explained and undone.

Note: the order of things
    `parallelize` calls `check` for every module of the plan, then looks at the plan as a whole, then calls `prove`, and
    then only `apply`, for the modules inside of a module before the module itself. Until `apply` the model must not be
    changed. What `apply` raises undoes everything that went through the context.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastpar.comm import Communicator
from fastpar.context.region import ContextRegion
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.changes import Changes
from fastpar.tensor import Grid, GridLinear, ParameterLayout, RowMap, SequenceRegion, adopt, layout_of, replicate
from fastpar.tensor.binding import BoundGroup
from fastpar.tensor.grid_layout import GridLayout
from fastpar.tensor.own_forward import has_own_forward


class Style:
    """A way to parallelise one module, or one parameter; subclasses override `check` and `apply`.

    keeps_module      the module's own parameters and its dropout are treated as those of a module without a style
    handles_sequence  under sequence parallelism the module gets the positions that it needs
    """

    keeps_module = False
    handles_sequence = False

    @property
    def name(self) -> str:
        """The word for it in a plan, an explanation, an error."""
        return type(self).__name__.removesuffix("Style").lower()

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        """Raise TypeError or ValueError for a module that cannot have this style. Changes nothing, and is not
        collective: it must raise on all ranks what it raises on one."""

    def check_parameter(self, path: str, context: SwapContext) -> None:
        """The same for a single parameter, by its path; by default no parameter can have the style."""
        raise TypeError(f"{path} is a parameter, which has no style {self.name!r}: heads, partial or replicate")

    def prove(self, path: str, module: nn.Module, context: SwapContext) -> None:
        """Try what cannot be told by looking at the module; may be collective. Changes nothing."""

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        """Change the module through the context."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(path, module, context)")

    def sums_gradient(self, path: str, context: SwapContext) -> bool:
        """Whether a rank's gradient of a parameter with this style is a part, to be summed over the group."""
        return False


@dataclass
class SwapContext:
    """A model that is being split, for the styles of its modules.

    group, comm, experts   the tensor-parallel group; the group over which experts are spread
    etp                    ranks that share each expert, with the mesh of both dims, (ep, etp)
    batch                  (rank, size): this rank's share of the batch among data-parallel ranks
    gather_logits          whether heads return all logits
    modules, styles, parameter_styles    by path; a module that is used in several places has several paths
    blocks, gathered       paths of modules between two sums, and of those that are left whole on all tokens
    streams, regions       the layers that pass the residual stream on, by the module that holds them; where the stream
                           is split along the sequence
    passing                `streams` with the layers that other parts of a pipeline hold
    rows                   output features (or rows) on each rank, by path of a column-parallel linear or of a parameter
                           that goes by head
    context                where the sequence is split by context parallelism; None: nowhere
    cp_tp                  the ranks of cp and tp together; None: there are no others than those of tp
    grid                   the tensor-parallel ranks as a grid; None: they split one dim
    changes                the record of what is changed
    """

    model: nn.Module
    group: BoundGroup
    experts: BoundGroup
    batch: tuple[int, int]
    gather_logits: bool
    etp: BoundGroup = field(default_factory=lambda: BoundGroup(Communicator(None), None))
    overlap: Overlap = field(default_factory=Overlap)
    context: ContextRegion | None = None
    cp_tp: Communicator | None = None
    grid: Grid | None = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    styles: dict[str, Style] = field(default_factory=dict)
    parameter_styles: dict[str, Style] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    streams: dict[str, list[str]] = field(default_factory=dict)
    passing: dict[str, list[str]] = field(default_factory=dict)
    regions: dict[str, SequenceRegion] = field(default_factory=dict)
    rows: dict[str, RowMap] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    @property
    def comm(self) -> Communicator:
        """The communicator of the tensor-parallel group."""
        return self.group.comm

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts together; 1 where every rank has them all."""
        return self.experts.comm.size * self.etp.comm.size

    @property
    def features(self) -> tuple[int, int]:
        """(rank, size) of this rank among those that share features and heads inside of a block."""
        return (self.comm.rank, self.comm.size) if self.grid is None else self.grid.heads

    @property
    def streams_blocks(self) -> bool:
        """Whether linears are streamed: `GridSpec.stream`."""
        return self.grid is not None and self.grid.spec.stream

    # ---- lookups

    def parent_of(self, path: str) -> nn.Module:
        """The module that holds the one at `path`."""
        return self.modules[path.rpartition(".")[0]]

    def block_of(self, path: str) -> str | None:
        """The block around a module, or None."""
        return next((block for block in self.blocks if path.startswith(block + ".")), None)

    def region_of(self, path: str) -> SequenceRegion | None:
        """The region in which the sequence is split for this module; None also inside of one that gets all tokens."""
        if any(path == whole or path.startswith(whole + ".") for whole in self.gathered):
            return None
        return self.region_around(path)

    def region_around(self, path: str) -> SequenceRegion | None:
        """The region in which the module is called, whatever it then gets."""
        for parent, paths in self.streams.items():
            if any(path == p or path.startswith(p + ".") for p in paths):
                return self.regions.get(parent)
        return None

    def once(self, paths: Iterable[str]) -> list[str]:
        """One path of each module, so that what is used in several places is not hooked twice."""
        first: dict[nn.Module, str] = {}
        for path in paths:
            first.setdefault(self.modules[path], path)
        return list(first.values())

    # ---- changes

    def explain(self, path: str, style: Style, stored: str = "", note: str = "") -> None:
        """Add a row to what `fastpar.explain` says."""
        self.changes.explanation.add(path, style.name, stored, note)

    def adopt(self, path: str, module: nn.Module, cls: type[Any], style: Style, **options: Any) -> None:
        """Turn a module into the parallel layer `cls` in place (`fastpar.tensor.adopt`)."""
        if isinstance(module, cls):
            return
        kept = f"around it the forward of {type(module).__name__}" if has_own_forward(module) else ""
        make, group = self.changes.parameter, self.grid if issubclass(cls, GridLinear) else self.group
        self.changes.adopted(adopt(module, cls, group, is_proven=True, parameters=make, **options))
        layout = layout_of(next(p for p in module.parameters(recurse=False)))
        assert layout is not None
        note = ""
        if isinstance(layout, ParameterLayout) and layout.rows is not None and layout.kind == "whole":
            note = f"kept whole, rank {self.comm.rank} uses {layout.rows.size(self.comm.rank)} of {layout.rows.total}"
        streamed = f"{self.grid.y.size} blocks, broadcast one by one" if self.streams_blocks and self.grid else ""
        streamed = streamed if isinstance(module, GridLinear) else ""
        self.explain(path, style, stored(layout), "; ".join(filter(None, (note, kept, streamed))))

    def replicate(
        self,
        path: str,
        module: nn.Module,
        *,
        style: Style,
        sum_grad: Collection[str] = (),
        rows: Mapping[str, RowMap] | None = None,
        axes: Mapping[str, tuple[Communicator, ...]] | None = None,
    ) -> None:
        """Keep a module's code and its own parameters, whole on every rank (`fastpar.tensor.replicate`).

        sum_grad   names of the parameters of which a rank's gradient is a part
        rows       by name, those of which a rank's code gets its own rows
        axes       on a grid: by name, those over which the ranks' gradients are parts
        """
        if all(p is None or layout_of(p) is not None for p in module._parameters.values()):
            return  # reached a second time, under another name
        rows, aliases = rows or {}, self._aliases(module)
        options: dict[str, Any] = {"sum_grad": set(sum_grad), "rows": rows, "aliases": aliases}
        if self.grid is not None and axes is not None:
            grid, part = self.grid, self.features[0]

            def layout(name: str, shape: torch.Size) -> GridLayout:
                return GridLayout(grid.mesh, shape, (None,) * grid.mesh.ndim, axes[name], rows.get(name), part)

            options["layout"] = layout
        self.changes.adopted(replicate(module, self.group, make=self.changes.parameter, **options))
        note = "gradient summed over the group" if set(sum_grad) - set(rows) - set(aliases) else ""
        self.explain(path, style, "split by row: " + ", ".join(rows) if rows else "whole", note)

    def _aliases(self, module: nn.Module) -> dict[str, ParameterLayout]:
        """Parameters that split modules share and that this one's forward does not read, as BERT's head holds its
        decoder's bias."""
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None:
            return {}
        read = code.co_names
        made = {name: self.changes.layout_made(p) for name, p in module._parameters.items() if name not in read}
        return {name: layout for name, layout in made.items() if layout is not None and layout.rows is not None}


def stored(layout: ParameterLayout | GridLayout) -> str:
    """The shape of a parameter and of this rank's part, in words."""
    shape = list(layout.shape)
    if isinstance(layout, GridLayout):
        return f"{shape} -> {layout.local_shape}" + (" packed" if layout.kind == "packed" else "")
    if layout.kind in ("contiguous", "packed"):
        assert layout.rows is not None
        shape[layout.dim] = layout.rows.size(layout.comm.rank)
        return f"{list(layout.shape)} -> {shape}" + (" packed" if layout.kind == "packed" else "")
    return f"{shape} whole"


__all__ = ["Style", "SwapContext", "stored"]
