"""Swap parallel layers into a model that exists, say what was done, and take them out again.

`parallelize` works on instances: it changes the modules of this model in place and nothing else in the process. It
checks the whole plan first, so that an error leaves the model untouched; `unparallelize` brings the ordinary model back
with the trained weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.doors import DDP_MARK, OVER_PARALLEL, RefusedByDDP, ResizeEmbeddings, SavePretrained, check_model
from fastpar.mesh import Mesh
from fastpar.pipeline.stages.absent import Absent
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.expert_style import (
    check_experts,
    prove_experts,
    route_tokens,
    spread_experts,
    takes_scaled_tokens,
)
from fastpar.parallel.guards import PartGuard, Watch, WatchedPlan, sync_weights as sync_weights_of
from fastpar.parallel.heads import HeadSplit
from fastpar.parallel.lm_head import GatheringCall, calls_loss_function, loss_on_split_logits, takes_labels
from fastpar.parallel.plan import Style, match_plan
from fastpar.parallel.proving import block_splits, proven_plan, refuse_wrong_blocks
from fastpar.tensor import (
    Adoption,
    ColumnParallelLinear,
    LayoutDropout,
    ParameterLayout,
    RowMap,
    RowParallelLinear,
    SequenceRegion,
    SharedInput,
    VocabParallelEmbedding,
    VocabParallelHead,
    adopt,
    full_parameter,
    layout_of,
    prove_adoption,
    replicate,
)
from fastpar.tensor.binding import BoundGroup, GroupLike, bind
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.own_forward import check_parameters, has_own_forward, runs_forward_of
from fastpar.tensor.replaced import mark_in_place, mark_replaced
from fastpar.tensor.sequence import hook_input, hook_output, hook_stream, map_hidden

M = TypeVar("M", bound=nn.Module)
_STATE = "_fastpar_parallel"
_SHARED = "_fastpar_shared_input"
_ABSENT = object()
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout")
_LINEAR_STYLES = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")


@dataclass
class Explanation:
    """What `explain` returns: one row per module that fastpar changed; `print` shows them as a table."""

    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, module: str, style: str, stored: str, note: str = "") -> None:
        self.rows.append({"module": module, "style": style, "stored": stored, "note": note})

    def __str__(self) -> str:
        if not self.rows:
            return "no module was changed"
        columns = list(self.rows[0])
        widths = {c: max(len(c), *(len(row[c]) for row in self.rows)) for c in columns}
        lines = ["  ".join(c.ljust(widths[c]) for c in columns), "  ".join("-" * widths[c] for c in columns)]
        lines += ["  ".join(row[c].ljust(widths[c]) for c in columns).rstrip() for row in self.rows]
        return "\n".join(lines)


class _Swap:
    """One model's swap: everything needed to explain it and to undo it."""

    def __init__(self, model: nn.Module, mesh: Mesh | GroupLike, sequence_parallel: bool, gather_logits: bool | None):
        self.model = model
        device_type = next((p.device.type for p in model.parameters()), "cpu")
        self.group = bind(mesh["tp"] if isinstance(mesh, Mesh) else mesh, device_type)
        self.comm = self.group.comm
        self.experts = self.group  # over which experts are spread
        if isinstance(mesh, Mesh):
            alone = BoundGroup(Communicator(None), None)  # every rank has all experts
            self.experts = bind(mesh["ep"], device_type) if mesh.size("ep") > 1 else alone
        self.batch = (mesh.rank("dp"), mesh.size("dp")) if isinstance(mesh, Mesh) else (0, 1)
        self.sequence_parallel = sequence_parallel
        self.gather_logits = gather_logits
        self.overlap = Overlap()
        self.explanation = Explanation()
        self.adoptions: list[Adoption] = []
        self.handles: list[Any] = []
        self.attributes: list[tuple[nn.Module, str, Any]] = []
        self.parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # id(original) -> (original, parallel)

    # Lookups over the plan, all before anything is changed.

    def resolve(self, styles: dict[str, Style]) -> None:
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        absent = {path for path, module in self.modules.items() if isinstance(module, Absent)}  # on another part
        self.is_part = bool(absent)
        self.styles = {path: style for path, style in styles.items() if path in self.modules and path not in absent}
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        self.own_styles = {path: style for path, style in styles.items() if path in names}  # of single parameters
        self.whole_on_all_tokens = [path for path, style in self.styles.items() if style.kind == "gathered"]
        self.blocks = [path for path, style in self.styles.items() if style.kind == "block"]
        streams: dict[str, list[str]] = {}
        for path, style in self.styles.items():
            if style.kind == "stream":
                streams.setdefault(path.rpartition(".")[0], []).append(path)
        self.streams = streams
        self.regions = {parent: SequenceRegion(self.comm) for parent in streams} if self.sequence_parallel else {}
        if self.sequence_parallel and not any(style.kind == "stream" for style in styles.values()):
            raise ValueError(
                "sequence_parallel=True needs to know where the residual stream is split: give the layers that pass it "
                'on the style "stream", such as {"layers.*": "stream"}'
            )

    def parent_of(self, path: str) -> nn.Module:
        return self.modules[path.rpartition(".")[0]]

    def block_of(self, path: str) -> str | None:
        return next((b for b in self.blocks if path.startswith(b + ".")), None)

    def region_of(self, path: str) -> SequenceRegion | None:
        """Where the sequence is split for this module; None also inside of one that gets all tokens."""
        if any(path == whole or path.startswith(whole + ".") for whole in self.whole_on_all_tokens):
            return None
        return self._region_around(path)

    def _region_around(self, path: str) -> SequenceRegion | None:
        for parent, paths in self.streams.items():
            if any(path == p or path.startswith(p + ".") for p in paths):
                return self.regions.get(parent)
        return None

    def rows_of(self, path: str) -> RowMap | None:
        split: HeadSplit = self.head_splits[path.rpartition(".")[0]]
        return split.rows.get(path)

    def check(self) -> None:
        """Everything that can be wrong with a plan for this model, before it is touched."""
        for path, style in self.styles.items():
            self._check_style(path, self.modules[path], style)
        self._check_own_styles()
        self.head_splits = block_splits(self.model, self.styles | self.own_styles, self.comm.size, "")
        self.head_rows = {path: rows for split in self.head_splits.values() for path, rows in split.parameters.items()}
        self._check_shared()
        for path, module in self.modules.items():
            self._check_meta(path, module)
            self._check_undeclared(path, module)
            self._check_sees_sequence(path)
            self._check_attention_dropout(path, module)
        for path, style in self.styles.items():
            cls, options = self._layer(path, style)
            if cls is not None:
                prove_adoption(path, self.modules[path], cls, self.group, options)
            elif style.kind == "expert":
                prove_experts(path, self.modules[path], self.parent_of(path))

    def _check_style(self, path: str, module: nn.Module, style: Style) -> None:
        wanted = ""
        if style.kind in _LINEAR_STYLES or (style.kind == "vocab" and isinstance(module, nn.Linear | nn.Embedding)):
            try:
                check_parameters(module) if isinstance(module, nn.Embedding) else linear_weights(module)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{path} has style {style.kind!r}: {error}") from None
        elif style.kind == "vocab":
            wanted = "nn.Embedding or nn.Linear"
        elif style.kind == "dropout" and not runs_forward_of(module, nn.Dropout):
            wanted = "nn.Dropout"
        elif style.kind == "expert":
            self._check_experts(path, module)
        if wanted:
            raise TypeError(f"{path} has style {style.kind!r}: expected {wanted}, got {_name(module)}")

    def _check_own_styles(self) -> None:
        for path, style in self.styles.items():
            if style.kind == "heads":
                raise TypeError(
                    f"{path} has style 'heads', which is for a parameter; it is a {_name(self.modules[path])}"
                )
        columns = {path.rpartition(".")[0] for path, style in self.styles.items() if style.kind == "colwise"}
        for path, style in self.own_styles.items():
            if style.kind not in ("heads", "partial", "replicate"):
                raise TypeError(
                    f"{path} is a parameter, which has no style {style.kind!r}: heads, partial or replicate"
                )
            if style.kind == "heads" and not any(path.startswith(f"{parent}.") for parent in columns):
                raise ValueError(f"{path} has style 'heads', but no module around it has 'colwise' linears with heads")

    def _check_experts(self, path: str, module: nn.Module) -> None:
        check_experts(path, module, self.parent_of(path), self.experts.comm.size)
        block = self.block_of(path)
        if block is not None:
            raise ValueError(f"{path} has style 'expert' inside the block {block!r}, whose inputs' gradients are parts")

    def _check_meta(self, path: str, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is not None and param.device.type == "meta":
                raise ValueError(
                    f"{path or 'the model'}.{name} is on the meta device; materialise and initialise the model "
                    "before it is parallelised"
                )

    def _check_shared(self) -> None:
        """A module that is used in several places becomes one parallel module: the places must be alike."""
        for module, paths in self._places().items():
            styled = [path for path in paths if path in self.styles] or paths
            if not any(True for _ in module.parameters()):
                continue
            first = styled[0]
            for other in styled[1:]:
                if self._place_of(other) != self._place_of(first):
                    raise ValueError(
                        f"{first} and {other} are one module ({_name(module)}), and the plan treats them differently. "
                        "Give both the same style and surroundings, or make them two modules"
                    )
        for parent, paths in self.streams.items():
            layers, is_split = [self.modules[path] for path in paths], False
            for layer in layers if parent in self.regions and self.comm.size > 1 else ():
                # The first layer splits the stream, and the last gathers it, whenever they are called.
                if is_split == (layer is layers[0]):
                    raise ValueError(
                        f"the layers of {parent or 'the model'} use one module several times, so that with "
                        "sequence_parallel=True it cannot be told by the module where the stream is split. Make them "
                        "several modules, or use sequence_parallel=False"
                    )
                is_split = layer is not layers[-1]

    def _places(self) -> dict[nn.Module, list[str]]:
        places: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            places.setdefault(module, []).append(path)
        return places

    def _place_of(self, path: str) -> tuple[Any, ...]:
        return self.styles.get(path), self.block_of(path) is None, self.region_of(path)

    def _once(self, paths: Iterable[str]) -> list[str]:
        """One path of each module, so that what is used in several places is not hooked twice."""
        first: dict[nn.Module, str] = {}
        for path in paths:
            first.setdefault(self.modules[path], path)
        return list(first.values())

    def _check_undeclared(self, path: str, module: nn.Module) -> None:
        block = path if path in self.blocks else self.block_of(path)
        if block is None or (path in self.styles and path != block) or self.comm.size == 1:
            return
        leaf = path.rpartition(".")[2]
        own = [name for name, param in module._parameters.items() if param is not None]
        undeclared = [name for name in own if f"{path}.{name}" not in self.own_styles]
        if undeclared and path == block:
            raise ValueError(
                f"{path} ({_name(module)}) is a block with the parameters {undeclared} of its own, which have no "
                f"style. Say for each, such as {f'{path}.{undeclared[0]}'!r}: 'partial' if it is used with split heads "
                "or features (its gradient is a part, to be summed), 'heads' if it has a row for each head, "
                "'replicate' if it is used after the sum"
            )
        if undeclared:
            raise ValueError(
                f"{path} ({_name(module)}) has parameters inside the block {block!r} but no style. Say 'partial' if it "
                "runs between the block's column- and row-parallel layers (its gradient is a part to be summed), "
                "'replicate' if it runs after the sum"
            )
        if isinstance(module, nn.Dropout) and module.p > 0 and leaf not in _ATTENTION_DROPOUT:
            raise ValueError(
                f"{path} is dropout (p={module.p}) inside the block {block!r} with no style. Say 'dropout' if it runs "
                "on the block's summed output; set p=0 if it runs on split features"
            )

    def _check_sees_sequence(self, path: str) -> None:
        """Attention needs all positions; a plan that leaves it whole has nothing that would gather them."""
        is_attention = path.rpartition(".")[2] in ("self_attn", "attn", "attention")
        kinds = (
            [s.kind for p, s in self.styles.items() if p == path or p.startswith(path + ".")] if is_attention else []
        )
        is_gathered = self.block_of(path) is not None or any(kind in ("whole", "gathered", "block") for kind in kinds)
        if is_attention and self.comm.size > 1 and self.region_of(path) is not None and not is_gathered:
            raise ValueError(
                f"{path} is not split by the plan, and with sequence_parallel=True would see a part of the sequence "
                "only. Leave it out, or give this the style 'block' and its linears 'colwise' and 'rowwise'"
            )

    def _check_attention_dropout(self, path: str, module: nn.Module) -> None:
        if self.comm.size == 1 or path not in self.blocks:
            return
        for name in _ATTENTION_DROPOUT:
            value = getattr(module, name, 0.0)
            p = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(p, int | float) and p > 0 and not _uses_layout_attention(module):
                raise ValueError(
                    f"{path}.{name} is {p}: attention would draw its masks per rank, so heads on different ranks share "
                    "them and they depend on the layout. Set it to 0, or choose attn_implementation='fastpar_eager' "
                    "(fastpar.integrations.huggingface.register())"
                )

    # Changes, each recorded for undo.

    def make(self, full: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        """The parallel parameter for an original one; a tied parameter is made once and shared again."""
        if id(full) not in self.parameters:
            self.parameters[id(full)] = (full, layout.parameter(full, requires_grad=full.requires_grad))
        parallel = self.parameters[id(full)][1]
        made = layout_of(parallel)
        assert made is not None
        if (made.kind, made.dim, made.rows) != (layout.kind, layout.dim, layout.rows):
            raise ValueError(
                f"a parameter of shape {tuple(full.shape)} is shared by modules that the plan splits differently "
                f"({made.kind} along dim {made.dim} and {layout.kind} along dim {layout.dim})"
            )
        return parallel

    def apply(self) -> None:
        for path in self._once(self.styles):
            self._apply_style(path, self.modules[path], self.styles[path])
        for path, module in self.modules.items():
            if path not in self.styles or self.styles[path].kind in ("block", "stream", "whole", "gathered"):
                self._apply_default(path, module)
        for path in self._once(self.blocks):
            self._share_input(path)
        self._split_stream()
        for path, split in self.head_splits.items():
            for name, value in split.attributes.items():
                self._set(self.modules[path], name, value)
            if split.num_heads:  # which of how many heads, and share of the batch: read by layout-independent dropout
                local = split.num_heads // self.comm.size
                self._set(self.modules[path], "_fastpar_heads", (local * self.comm.rank, split.num_heads, self.batch))
        self._leave_fast_paths()
        self._connect_head()
        self._open_doors()
        self._guard()

    def _layer(self, path: str, style: Style) -> tuple[type[Any] | None, dict[str, Any]]:
        """The parallel layer that a module becomes, with the options of its constructor; None for other styles."""
        region, in_block = self.region_of(path), self.block_of(path) is not None
        options: dict[str, Any] = {"parameters": self.make}
        if style.kind in ("colwise", "colwise_gather_output"):
            options |= {"input_prepared": in_block, "sequence": None if in_block else region, "overlap": self.overlap}
            options["gather_output"] = style.kind == "colwise_gather_output"
            if style.kind == "colwise":
                options["rows"] = self.rows_of(path)
            return ColumnParallelLinear, options
        if style.kind in ("rowwise", "rowwise_split_input"):
            options |= {"sequence": region, "input_is_parallel": style.kind == "rowwise", "overlap": self.overlap}
            return RowParallelLinear, options
        if style.kind == "vocab" and isinstance(self.modules[path], nn.Embedding):
            return VocabParallelEmbedding, options
        if style.kind == "vocab":
            return VocabParallelHead, options | {"gather_output": self._gathers_logits(), "overlap": self.overlap}
        return None, {}

    def _gathers_logits(self) -> bool:
        """Logits stay split unless the model computes its loss from them by code of its own."""
        if self.gather_logits is not None:
            return self.gather_logits
        return takes_labels(self.model) and not calls_loss_function(self.model)

    def _apply_style(self, path: str, module: nn.Module, style: Style) -> None:
        region = self.region_of(path)
        cls, options = self._layer(path, style)
        if cls is not None:
            self._adopt(path, module, cls, style, options)
        elif style.kind == "dropout":
            self._dropout(path, module, region)
        elif style.kind == "expert":
            self._spread_experts(path, module)
        elif style.kind in ("replicate", "partial"):
            # Inside a block, "replicate" runs after the sum: on this rank's part of the sequence, if it is split.
            self._replicate(path, module, style.kind == "partial" or region is not None)
        elif style.kind in ("whole", "gathered"):
            outside = self._region_around(path)
            if style.kind == "gathered" and outside is not None:
                self.handles.append(hook_stream(module, outside.leave))
                self.handles.append(hook_output(module, outside.enter))
            self.explanation.add(path, style.kind, "", style.note)
        elif style.kind == "block":
            self.explanation.add(path, "block", "", "input gathered once" if region else "input gradient summed once")

    def _share_input(self, path: str) -> None:
        """Gather or copy a block's input once for the column-parallel layers that are called with it."""
        module = self.modules[path]
        inside = [child for name, child in self.modules.items() if self.block_of(name) == path]
        layers = [child for child in dict.fromkeys(inside) if isinstance(child, ColumnParallelLinear)]
        for layer in layers:
            self._set(layer, "shared_input", None)
        shared = SharedInput(self.comm, layers, sequence=self.region_of(path), overlap=self.overlap)
        self._set(module, _SHARED, shared)
        # Through the module and not bound to `shared`: a copied model has a SharedInput of its own layers.
        self.handles.append(module.register_forward_pre_hook(_enter, with_kwargs=True))
        self.handles.append(module.register_forward_hook(_leave, always_call=True))

    def _apply_default(self, path: str, module: nn.Module) -> None:
        """Modules that the plan leaves out stay whole; dropout outside blocks gets layout-independent masks."""
        region, in_block = self.region_of(path), self.block_of(path) is not None
        if runs_forward_of(module, nn.Dropout) and not in_block:
            self._dropout(path, module, region)
        elif any(p is not None for p in module._parameters.values()):
            self._replicate(path, module, region is not None and not in_block and path not in self.blocks)

    def _styles_within(self, path: str, module: nn.Module) -> tuple[dict[str, str], dict[str, RowMap]]:
        """Of a module's own parameters that have styles: kinds, and the rows of those that are split by head."""
        kinds = {n: self.own_styles[f"{path}.{n}"].kind for n in module._parameters if f"{path}.{n}" in self.own_styles}
        return kinds, {n: self.head_rows[f"{path}.{n}"] for n, kind in kinds.items() if kind == "heads"}

    def _adopt(self, path: str, module: nn.Module, cls: type[Any], style: Style, options: dict[str, Any]) -> None:
        if isinstance(module, cls):
            return  # reached a second time under another name
        kept = f"around it the forward of {_name(module)}" if has_own_forward(module) else ""
        self.adoptions.append(adopt(module, cls, self.group, is_proven=True, **options))
        layout = layout_of(next(p for p in module.parameters(recurse=False)))
        assert layout is not None
        note = ""
        if layout.rows is not None and layout.kind == "whole":
            note = f"kept whole, rank {self.comm.rank} uses {layout.rows.size(self.comm.rank)} of {layout.rows.total}"
        self.explanation.add(path, style.kind, _stored(layout), "; ".join(filter(None, (note, kept))))

    def _replicate(self, path: str, module: nn.Module, sum_grad: bool) -> None:
        if all(p is None or layout_of(p) is not None for p in module._parameters.values()):
            return
        kinds, rows = self._styles_within(path, module)
        split = self.region_of(path) is not None
        summed = {n for n in module._parameters if (kinds[n] == "partial" or split if n in kinds else sum_grad)}
        self.adoptions.append(replicate(module, self.group, sum_grad=summed, rows=rows, make=self.make))
        stored = "split by head: " + ", ".join(rows) if rows else "whole"
        note = "gradient summed over the group" if summed - set(rows) else ""
        self.explanation.add(path, "replicate", stored, note)

    def _spread_experts(self, path: str, module: nn.Module) -> None:
        ep, tp = self.experts.comm.size, self.comm.size
        scale = tp / ep if ep > 1 else 1.0
        if takes_scaled_tokens(module):
            self.adoptions.append(route_tokens(self.parent_of(path)))
        together = self.region_of(path) is None
        options: dict[str, Any] = {"same_tokens": together, "grad_scale": scale, "make": self.make}
        self.adoptions.append(spread_experts(module, self.experts, tp=self.group, **options))
        layout = layout_of(next(module.parameters(recurse=False)))
        assert layout is not None
        note = f"experts of rank {self.experts.comm.rank} of {ep}" if ep > 1 else "gradient summed over the group"
        self.explanation.add(path, "expert", _stored(layout), note)

    def _dropout(self, path: str, module: nn.Module, region: SequenceRegion | None) -> None:
        assert isinstance(module, nn.Dropout)
        self.adoptions.append(Adoption(module, LayoutDropout))
        cast(Any, module)._configure(module.p, sequence=region, batch=self.batch)
        self.explanation.add(path, "dropout", "", "mask by global position")

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        is_property = isinstance(getattr(type(module), name, None), property)
        before = getattr(module, name) if is_property else vars(module).get(name, _ABSENT)
        self.attributes.append((module, name, before))
        setattr(module, name, value)

    def _leave_fast_paths(self) -> None:
        """torch's encoder hands the weights of its children to one kernel in eval mode, which has no split form."""
        for module in dict.fromkeys(self.modules.values()) if self.comm.size > 1 else ():
            if isinstance(module, nn.TransformerEncoderLayer):
                self._set(module, "activation_relu_or_gelu", 0)
            elif isinstance(module, nn.TransformerEncoder):
                self._set(module, "use_nested_tensor", False)

    def _connect_head(self) -> None:
        """Let what reads the logits have them in the form that it needs: the loss, `generate`, the caller."""
        heads = [m for m in dict.fromkeys(self.modules.values()) if isinstance(m, VocabParallelHead)]
        if not heads or self.comm.size == 1:
            return
        for head in heads:
            self._set(head, "use_local_output", False)
        if hasattr(type(self.model), "loss_function"):
            loss, note = loss_on_split_logits(self.model, heads[0])
            self._set(self.model, "loss_function", loss)
            self.explanation.add("(loss)", "vocab", "", note)
        if callable(getattr(type(self.model), "generate", None)):
            self._set(self.model, "generate", GatheringCall(self.model, "generate", heads, self.comm))

    def _open_doors(self) -> None:
        """Methods and marks by which other libraries reach the model."""
        if self.comm.size == 1:
            return
        self._set(self.model, DDP_MARK, RefusedByDDP(OVER_PARALLEL))
        if callable(getattr(type(self.model), "save_pretrained", None)):
            is_writer = self.comm.rank == 0 and self.batch[0] == 0
            self._set(self.model, "save_pretrained", SavePretrained(self.model, self.comm, is_writer))
        if callable(getattr(type(self.model), "resize_token_embeddings", None)):
            self._set(self.model, "resize_token_embeddings", ResizeEmbeddings(self.model))

    def _split_stream(self) -> None:
        """Split the residual stream where its first layer begins, and let no part of a tensor leave the model."""
        parts = PartGuard(self.comm)
        layers = {path: parent for parent, paths in self.streams.items() for path in paths}
        for path in self._once(self.modules):
            module = self.modules[path]
            region = self.regions.get(layers[path]) if path in layers else self.region_of(path)
            if self.comm.size == 1:
                continue
            if path in self.blocks:
                heads = self.head_splits[path].num_heads // self.comm.size if path in self.head_splits else 0
                self.handles.append(parts.mark_heads(module, path, region, heads))
            elif region is not None and self.block_of(path) is None:
                self.handles.append(parts.mark_positions(module, path, region))
        for parent, paths in self.streams.items():
            if parent in self.regions:
                self.handles.append(hook_input(self.modules[paths[0]], parts.enter(self.regions[parent], paths[0])))
                self.handles.append(hook_output(self.modules[paths[-1]], self.regions[parent].leave))
        if self.comm.size > 1:
            self.handles += [self.modules[owner].register_forward_hook(parts.gather) for owner in self._owners()]

    def _guard(self) -> None:
        """Watch forwards for what no plan can show (`fastpar.parallel.guards`)."""
        self.watch: Watch | None = None
        if self.comm.size == 1:
            return
        plan = WatchedPlan(
            blocks=tuple(self.blocks),
            gathered=tuple(self.whole_on_all_tokens),
            layers={path: self.regions.get(parent) for parent, paths in self.streams.items() for path in paths},
            draws_by_layout=frozenset(p for p, m in self.modules.items() if _uses_layout_attention(m)),
            is_part=self.is_part,
        )
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.watch = Watch(self.comm, device, plan)
        self.handles += self.watch.attach(self.model)

    def _owners(self) -> list[str]:
        """The modules that hold the layers, innermost first, up to the model."""
        found: list[str] = []
        for parent in self.streams:
            while parent:
                parent = parent.rpartition(".")[0]
                found.append(parent)
        return list(dict.fromkeys([*found, ""]))

    def free_originals(self) -> None:
        for original, _ in self.parameters.values():
            mark_replaced(original)

    def undo(self, *, gather: bool) -> None:
        for handle in self.handles:
            handle.remove()
        for module, name, value in reversed(self.attributes):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)
        full = {}
        if gather:  # in one order on all ranks, each parameter once
            for key, (original, parallel) in self.parameters.items():
                full[key] = (original, full_parameter(parallel))
                mark_in_place(original)
            with torch.no_grad():
                for original, value in full.values():
                    original.data = value
        for adoption in reversed(self.adoptions):
            adoption.undo()


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return map_hidden(args, kwargs, getattr(module, _SHARED).enter)


def _leave(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    getattr(module, _SHARED).leave()


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _stored(layout: ParameterLayout) -> str:
    shape = list(layout.shape)
    if layout.kind in ("contiguous", "packed"):
        assert layout.rows is not None
        shape[layout.dim] = layout.rows.size(layout.comm.rank)
        return f"{list(layout.shape)} -> {shape}" + (" packed" if layout.kind == "packed" else "")
    return f"{shape} whole"


def _uses_layout_attention(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "fastpar_eager"


@checked(computed=False, but=("plan",))
def parallelize(
    model: M,
    mesh: Mesh | GroupLike,
    plan: str | Mapping[str, str | Style] = "auto",
    *,
    sequence_parallel: bool = False,
    gather_logits: bool | None = None,
    sync_weights: str = "check",
    overlap: bool | Overlap = True,
) -> M:
    """Split a model's layers over the tensor-parallel group, in place; returns the model.

    mesh               an `fp.Mesh` (its "tp" dim is used, and "ep" for experts; its data-parallel coordinates place
                       dropout masks), a 1-D DeviceMesh or a ProcessGroup (experts are spread over the same ranks)
    plan               "auto": what the model declares (Hugging Face's `tp_plan`), or how it calls its linears, as far
                       as trials on this process confirm it; blocks of which they do not are left whole, and `explain`
                       says why (`fastpar.parallel.proving`). Or a dict from pattern to style, such as
                       {"layers.*.mlp.up_proj": "colwise"}; see `fastpar.parallel.plan`
    sequence_parallel  split the residual stream along the sequence between blocks
    gather_logits      True: the head returns all V logits as a plain tensor. False: a DTensor, Shard(-1) over the
                       group, which `vocab_parallel_cross_entropy(logits, target)` takes as it is, and of which
                       `logits.full_tensor()` and `logits.to_local()` give the whole and this rank's part; whatever
                       else reads it gets all logits, by an all-gather that every rank has to do. None: False,
                       unless the model computes a loss in its forward by code that fastpar cannot replace. The model's
                       own `loss_function` and `generate` work in both cases
    sync_weights       "check" (default): ranks must hold the same weights before the split, else ValueError names the
                       first parameter that differs; "broadcast": take rank 0's; "none"
    overlap            let the layers' collectives travel during their products (see `fastpar.ops.parallel_linear`), as
                       measured earlier on rank 0's machine (`fastpar.ops.measure_overlap`); False: not, with the same
                       numbers

    Parameters become DTensors on the group's mesh, sharded or replicated, under their old names; so build the optimizer
    afterwards. Every rank must call it with the same model and plan. Collectives per forward: 2 per transformer layer
    (all-reduces; with `sequence_parallel` an all-gather and a reduce-scatter in the place of each), one for the
    embedding, and one small one for the loss.

    The model, its hooks included, runs once on a few ids, and copies of one block of each kind run whole and on virtual
    ranks, before anything is changed; models that take no ids are split untried.

    Raises ValueError for a pattern that matches nothing, heads that cannot be split, parameters inside a block with no
    style, a block that computes something else when it is split, weights that differ; TypeError for a style on the
    wrong kind of module. The model is unchanged then.
    """
    check_model(model, "parallelize")
    if getattr(model, _STATE, None) is not None:
        raise ValueError("the model is parallelised already; call fastpar.unparallelize(model) first")
    Overlap.of(overlap)
    if sync_weights not in ("check", "broadcast", "none"):
        raise ValueError(f"sync_weights must be 'check', 'broadcast' or 'none', got {sync_weights!r}")
    if isinstance(mesh, Mesh):
        is_part = any(isinstance(module, Absent) for module in model.modules())
        extra = {
            dim: mesh.size(dim) for dim in ("pp", "cp", "etp") if mesh.size(dim) > 1 and not (dim == "pp" and is_part)
        }
        if extra:
            hint = "; fastpar.parallelize_pipeline cuts a model over pp" if "pp" in extra else ""
            raise ValueError(
                f"parallelize splits over tp, ep and data-parallel dims only, but the mesh has {extra}{hint}"
            )
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan must be 'auto' or a dict from pattern to style, got {plan!r}")
    swap = _Swap(model, mesh, sequence_parallel, gather_logits)
    is_written = not isinstance(plan, str)
    if isinstance(plan, str):
        plan = proven_plan(model, swap.comm.size, sequence_parallel=sequence_parallel)
    styles = match_plan(model, plan)
    if isinstance(mesh, Mesh) and mesh.size("ep") > 1 and not any(style.kind == "expert" for style in styles.values()):
        raise ValueError(f"the mesh has ep={mesh.size('ep')}, but the plan gives no module the style 'expert'")
    swap.resolve(styles)
    swap.check()
    if is_written:
        refuse_wrong_blocks(model, swap.styles | swap.own_styles, swap.comm.size)
    if sync_weights != "none":
        sync_weights_of(model, swap.comm, broadcast=sync_weights == "broadcast")
        if swap.experts.comm.size > swap.comm.size:  # else among the same ranks
            sync_weights_of(model, swap.experts.comm, broadcast=sync_weights == "broadcast")
    if isinstance(overlap, Overlap):
        swap.overlap = overlap
    else:
        loaded = Overlap.load(swap.comm)
        swap.overlap = loaded if overlap else loaded.disabled()
    try:
        swap.apply()
    except BaseException:
        swap.undo(gather=False)
        raise
    swap.free_originals()
    model.__dict__[_STATE] = swap
    return model


def unwatch(model: nn.Module) -> None:
    """Let forwards of a parallelised model run unwatched: for `fastpar.verify`, which judges them by itself."""
    swap = getattr(model, _STATE, None)
    if swap is not None and swap.watch is not None:
        swap.watch.cadence.stop()


@checked(computed=False)
def explain(model: nn.Module) -> Explanation:
    """What `parallelize` did to a model: per module the style, how its parameters are stored, and remarks."""
    swap = getattr(model, _STATE, None)
    if swap is None:
        raise ValueError(f"model: this {_name(model)} has not been parallelised (fastpar.parallelize)")
    return swap.explanation


@checked(computed=False)
def unparallelize(model: M) -> M:
    """Undo `parallelize` in place: ordinary modules with full weights on every rank (one all-gather per shard).

    Parameters are the original objects again, with the trained values; gradients are dropped. Optimizers built on the
    parallel parameters must be built anew.
    """
    swap = getattr(model, _STATE, None)
    if swap is None:
        raise ValueError(f"model: this {_name(model)} has not been parallelised (fastpar.parallelize)")
    swap.undo(gather=True)
    del model.__dict__[_STATE]
    return model
