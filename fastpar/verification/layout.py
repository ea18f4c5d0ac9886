"""The layout that the whole model is compared with: `VerifyLayout`, and a model in that layout that can be trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.arguments import checked_fields
from fastpar.clip import grad_norm
from fastpar.context.batch import shard as shard_batch
from fastpar.context.batch import total
from fastpar.context.region import region_of
from fastpar.layouts.words import grid_word
from fastpar.mesh import Mesh
from fastpar.mesh.grid import TENSOR_GRID_DIMS
from fastpar.parallel.api import parallelize, swap_of, unwatch
from fastpar.parallel.pipeline_api import parallelize_pipeline
from fastpar.parallel.styles import ExpertStyle, Style
from fastpar.pipeline import Pipeline
from fastpar.pipeline.stages.absent import Absent
from fastpar.recompute import Policy, apply_recompute
from fastpar.tensor import ColumnParallelLinear, GridLinear, LayoutDropout
from fastpar.verification.inputs import Inputs, LossFunction, loss_of
from fastpar.verification.pieces import Piece, plain_pieces, zero_pieces
from fastpar.verification.trace import ModuleTrace, takes_views
from fastpar.zero import Zero, shard

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@checked_fields
@dataclass(frozen=True)
class VerifyLayout:
    """A mesh, and what is asked of the calls that lay a model out on it.

    mesh               of all ranks
    plan, sequence_parallel    of `fp.parallelize`, called where the mesh has tp, cp or ep, or the plan is not "auto"
    schedule, num_microbatches of `fp.parallelize_pipeline`, called where the mesh has pp; by default pp microbatches
    zero_stage         of `fp.zero.shard`; None: 0 where the mesh has data-parallel dims or cp, else no
                       ZeRO
    recompute          a policy of `fp.recompute`
    options            further ones of `fp.parallelize` or `fp.parallelize_pipeline`
    zero_options       further ones of `fp.zero.shard`
    apply              called in the place of `fp.parallelize`: what lays the model out with one's own code
    """

    mesh: Mesh
    plan: str | Mapping[str, str | Style] = "auto"
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    zero_stage: int | None = None
    recompute: Policy | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    zero_options: Mapping[str, Any] = field(default_factory=dict)
    apply: Callable[[nn.Module], nn.Module] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh must be a fastpar.Mesh (fp.init_mesh), got {type(self.mesh).__name__}")
        pp = self.mesh.size("pp")
        if self.apply is not None and pp > 1:
            raise ValueError(f"apply= lays out whole models, but the mesh has pp={pp}")
        if self.num_microbatches is not None and (pp == 1 or self.num_microbatches < 1):
            raise ValueError(f"num_microbatches={self.num_microbatches} is for pipelines; the mesh has pp={pp}")

    @property
    def microbatches(self) -> int:
        """How many parts of a batch go through the pipeline; 1 without one."""
        return (self.num_microbatches or self.mesh.size("pp")) if self.mesh.size("pp") > 1 else 1

    @property
    def is_split(self) -> bool:
        """True if layers are split within a stage."""
        return self.plan != "auto" or any(self.mesh.size(dim) > 1 for dim in ("cp", "tp", "ep", "etp"))

    def __str__(self) -> str:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
        parts = [f"{name}={self.mesh.size(name)}" for name in names if self.mesh.size(name) > 1]
        parts += [grid_word(self.mesh.tp_grid)] if self.mesh.tp_grid is not None else []
        parts += ["sequence_parallel"] if self.sequence_parallel else []
        if self.mesh.size("pp") > 1:
            parts.append(f"{self.schedule} with {self.microbatches} microbatches")
        parts += [f"ZeRO {self.zero_stage}"] if self.zero_stage is not None else []
        parts += [str(self.recompute)] if self.recompute is not None else []
        return ", ".join([*parts, *(["own code"] if self.apply else [])]) or "one rank"


@dataclass
class ModuleHints:
    """Hints of a rank's modules at how their tensors lie, for comparing them.

    rows     of column-parallel layers: total features, and which of them each rank computes
    styles   what `fp.explain` calls the modules
    experts  modules whose experts are spread over ranks
    blocks   modules between a copy (or gather) and a sum: gradients inside are parts
    sums_anywhere    nobody says where gradients are parts: they may be everywhere
    grid     on a tensor-parallel grid, this rank's (place, size) along its axes and among all of tp
    features of column- and row-parallel layers there: total features of the output, and which this rank computes
    """

    rows: dict[str, tuple[int, tuple[tuple[tuple[int, int], ...], ...]]] = field(default_factory=dict)
    styles: dict[str, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    sums_anywhere: bool = False
    grid: dict[str, tuple[int, int]] = field(default_factory=dict)
    features: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    def may_be_parts(self, path: str) -> bool:
        return self.sums_anywhere or any(path.startswith(f"{block}.") for block in self.blocks)


class LaidOut:
    """A model in a layout, with an optimizer. Collective."""

    def __init__(
        self, model: nn.Module, layout: VerifyLayout, make_optimizer: MakeOptimizer, loss: LossFunction | None
    ) -> None:
        self.layout, self.mesh, self._loss = layout, layout.mesh, loss
        self.pipe: Pipeline | None = None
        # A loss of the caller's own reads whole logits, unless the caller says otherwise.
        options = {**({"gather_logits": True} if loss is not None else {}), **layout.options}
        if self.mesh.size("pp") > 1:
            self.pipe = pipe = self._make_pipeline(model, options)
            self._roots = [(stage.prefix, stage.module) for stage in pipe.stages.values()]
            self._named = dict(pipe.named_parameters())
        else:
            if layout.apply is not None:
                model = layout.apply(model)
            elif layout.is_split:
                like = {"plan": layout.plan, "sequence_parallel": layout.sequence_parallel}
                model = parallelize(model, self.mesh, **{**like, **options})
            unwatch(model)
            if layout.recompute is not None:
                apply_recompute(model, layout.recompute)
            self._roots = [("", model)]
            self._named = dict(model.named_parameters())
        self.model = model
        trained = [parameter for parameter in self._named.values() if parameter.requires_grad]
        self.optimizer = make_optimizer(trained)
        self.zero: Zero | None = None
        stage = layout.zero_stage
        if stage is not None or self.mesh.size("dp") > 1 or self.mesh.size("cp") > 1:
            what: Any = self._named.items() if self.pipe is not None else model
            like = {"overlap": False} if self.pipe is not None else {}
            options = {**like, **layout.zero_options}
            self.zero = shard(what, self.optimizer, group=self.mesh, stage=stage or 0, **options)
        self.hints = self._hints()
        self.trace = ModuleTrace(self._traced(), takes_views)

    def _make_pipeline(self, model: nn.Module, options: dict[str, Any]) -> Pipeline:
        layout = self.layout
        like: dict[str, Any] = {
            "plan": layout.plan,
            "sequence_parallel": layout.sequence_parallel,
            "recompute": layout.recompute,
            "num_microbatches": layout.microbatches,
            "loss": self._loss,
        }
        pipe = parallelize_pipeline(model, self.mesh, layout.schedule, **{**like, **options})
        if len(pipe.schedule.chains) > 1:
            raise ValueError(f"verify compares pipelines of one direction; {layout.schedule!r} has two")
        for stage in pipe.stages.values():
            unwatch(stage.module)
        return pipe

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, root in self._roots:
            yield from root.named_modules(prefix=prefix)

    def _traced(self) -> list[tuple[str, nn.Module]]:
        """Modules that compute here what they compute in the whole model."""
        modules = list(self._modules())
        absent = [path for path, module in modules if isinstance(module, Absent)]
        inside = [f"{path}." for path in self.hints.experts]
        return [
            (path, module)
            for path, module in modules
            if not any(gone == path or gone.startswith(f"{path}." if path else "") for gone in absent)
            and not any(path.startswith(experts) for experts in inside)
            and (path or self.pipe is None)
        ]

    def _hints(self) -> ModuleHints:
        hints = ModuleHints(sums_anywhere=True)
        for prefix, root in self._roots:
            try:
                swap = swap_of(root)
            except ValueError:  # not parallelised
                continue
            hints.sums_anywhere = False
            dotted = f"{prefix}." if prefix else ""
            for row in swap.explanation.rows:
                hints.styles.setdefault(dotted + row["module"], row["style"])
            # By class and not by name: a style of the user's own may be derived from these.
            hints.blocks += [dotted + path for path in swap.context.blocks]
            styles = swap.context.styles.items()
            hints.experts += [dotted + path for path, style in styles if isinstance(style, ExpertStyle)]
        for path, module in self._modules():
            if isinstance(module, ColumnParallelLinear) and not module.gather_output:
                hints.rows[path] = (module.rows.total, module.rows.ranges)
            elif isinstance(module, GridLinear):
                hints.features[path] = (module.out_features, module.output_rows())
        if hints.features:
            axes = (*TENSOR_GRID_DIMS, "tp")
            hints.grid = {axis: (self.mesh.rank(axis), self.mesh.size(axis)) for axis in axes}
        return hints

    def dropouts(self) -> list[str]:
        """Dropout whose masks do not depend on the layout. Those of a pipeline do: every stage draws its own seeds."""
        return [path for path, module in self._modules() if isinstance(module, LayoutDropout) and module.p > 0]

    def switch_dropouts_off(self) -> list[str]:
        found = [(path, module) for path, module in self._modules() if isinstance(module, LayoutDropout)]
        active = [path for path, module in found if module.p > 0]
        for _, module in found:
            module.p = 0.0
        return active

    # ---- a step

    def forward_backward(self, inputs: Inputs) -> float:
        """Forward and backward of this rank's part of the batch; returns its loss, of all tokens."""
        if self.mesh.size("cp") > 1:
            return self._forward_backward_split(inputs)
        if self.pipe is not None:
            target = {} if inputs.target is None else {"target": inputs.target}
            return float(self.pipe.step(*inputs.args, **inputs.kwargs, **target))
        loss = loss_of(self.model(*inputs.args, **inputs.kwargs), inputs.target, self._loss)
        loss.backward()
        return loss.item()

    def _forward_backward_split(self, inputs: Inputs) -> float:
        """Forward and backward of this rank's tokens, whose losses add up."""
        model: Any = self.model if self.pipe is None else self.pipe
        batch = self._shard(inputs)
        loss: Tensor
        if self.pipe is not None:
            loss = self.pipe.step(**batch)
        else:
            loss = loss_of(self.model(**batch), None, None)
            loss.backward()
        return float(total(model, loss))

    def _shard(self, inputs: Inputs) -> dict[str, Any]:
        """This rank's tokens of the batch."""
        if self._loss is not None or inputs.target is not None or len(inputs.args) > 1:
            raise ValueError(
                f"verify over cp={self.mesh.size('cp')} takes a batch of input_ids and labels, and the model's own "
                "loss of them: of a loss= of yours it is not known how the parts of ranks add up"
            )
        named = dict(zip(("input_ids",), inputs.args, strict=False)) | inputs.kwargs
        return shard_batch(self.model if self.pipe is None else self.pipe, named)

    def positions(self) -> Tensor | None:
        """Where this rank's tokens are in the sequence; None: it has all of them."""
        if self.mesh.size("cp") == 1:
            return None
        return region_of(self.model if self.pipe is None else self.pipe).positions

    def forward(self, inputs: Inputs) -> None:
        """Forward alone; not of a pipeline."""
        with torch.no_grad():
            if self.mesh.size("cp") > 1:
                self.model(**self._shard(inputs))
            else:
                self.model(*inputs.args, **inputs.kwargs)

    def grads(self) -> list[Piece]:
        """Averaged over data-parallel ranks."""
        if self.zero is None:
            return plain_pieces(self._named, "grad")
        self.zero.reduce_gradients()
        return zero_pieces(self.zero, "grad")

    def values(self) -> list[Piece]:
        return plain_pieces(self._named, "value") if self.zero is None else zero_pieces(self.zero, "value")

    def update(self) -> float:
        """The optimizer's step; returns the norm of the gradients that it took."""
        norm: Tensor | None = None
        if self.zero is None:
            norm = grad_norm(list(self._named.values()), mesh=self.mesh)
        self.optimizer.step()
        if self.zero is not None:
            norm = self.zero.norm
        self.optimizer.zero_grad()
        return math.nan if norm is None else float(norm)

    def close(self) -> None:
        self.trace.close()
        if self.pipe is not None:
            self.pipe.close()
