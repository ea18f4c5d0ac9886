"""The swap of one model: parallel layers go in by a plan that has been checked, and come out again."""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastpar.ddp import DDP_MARK, OVER_CONTEXT, OVER_PARALLEL, RefusedByDDP
from fastpar.parallel.changes import Explanation
from fastpar.parallel.checks import uses_layout_attention
from fastpar.parallel.context_parallel import connect
from fastpar.parallel.guards import PartGuard, TokenDrawGuard, Watch, WatchedPlan
from fastpar.parallel.heads import HeadSplit
from fastpar.parallel.model_methods import (
    GatheringCall,
    NoGeneration,
    PartLoss,
    ResizeEmbeddings,
    labels_problem,
    loss_on_split_logits,
)
from fastpar.parallel.on_grid import cut_batches, cut_features, share_ends
from fastpar.parallel.router_groups import connect_routers
from fastpar.parallel.styles import SwapContext, WholeStyle
from fastpar.parallel.styles.linear import is_colwise, splits_features
from fastpar.parallel.styles.whole import apply_default
from fastpar.pipeline.stages.absent import Absent
from fastpar.pretrained.adapters import models_to_save
from fastpar.pretrained.generation import SyncedGenerate
from fastpar.pretrained.saving import SavePretrained
from fastpar.tensor import VocabParallelHead
from fastpar.tensor.sequence import hook_input, hook_output

_log = logging.getLogger("fastpar.parallelize")


class Swap:
    """A model whose plan has been checked; `apply` splits it, or leaves it as it was."""

    def __init__(self, context: SwapContext, splits: Mapping[str, HeadSplit]):
        self.context, self.splits = context, splits
        self.watch: Watch | None = None

    @property
    def explanation(self) -> Explanation:
        return self.context.changes.explanation

    def undo(self, *, gather: bool) -> None:
        """The ordinary model again; see `Changes.undo`."""
        self.context.changes.undo(gather=gather)

    def apply(self) -> None:
        """Split the model, and give the memory of its parameters back; undone if anything fails on the way."""
        try:
            self._apply_styles()
            self._set_counts()
            self._split_stream()
            connect_routers(self.context)
            if self.context.context is not None:
                connect(self.context.model, self.context.context, self.context.changes)
                self.context.context.labels_problem = labels_problem(self.context.model)
            if self.context.comm.size > 1:
                self._leave_fast_paths()
                self._connect_head()
                self._guard()
            if max(self.context.comm.size, self.context.expert_ranks) > 1:
                self._replace_methods()
            if self.context.context is not None:
                self._connect_parts()
        except BaseException:
            self.undo(gather=False)
            raise
        self.context.changes.complete()

    def _apply_styles(self) -> None:
        context = self.context
        # What is inside first: a block finds its linears parallel already.
        for path in reversed(context.once(context.styles)):
            context.styles[path].apply(path, context.modules[path], context)
        for path, module in context.modules.items():
            if path not in context.styles or context.styles[path].keeps_module:
                apply_default(path, module, context)
        self.explanation.sort(context.modules)

    def _set_counts(self) -> None:
        """Attributes that count heads or features become those of this rank."""
        context, changes = self.context, self.context.changes
        for path, split in self.splits.items():
            module = context.modules[path]
            for name, value in split.attributes.items():
                changes.set(module, name, value)
            if split.num_heads:  # which of how many heads, and share of the batch: read by layout-independent dropout
                rank, size = context.features
                local = split.num_heads // size
                changes.set(module, "_fastpar_heads", (local * rank, split.num_heads, context.batch))

    def _leave_fast_paths(self) -> None:
        """torch's encoder hands the weights of its children to one kernel in eval mode, which has no split form."""
        for module in dict.fromkeys(self.context.modules.values()):
            if isinstance(module, nn.TransformerEncoderLayer):
                self.context.changes.set(module, "activation_relu_or_gelu", 0)
            elif isinstance(module, nn.TransformerEncoder):
                self.context.changes.set(module, "use_nested_tensor", False)

    def _connect_head(self) -> None:
        """Let what reads the logits have them in the form that it needs: the loss, `generate`, the caller."""
        context, model, changes = self.context, self.context.model, self.context.changes
        heads = [m for m in dict.fromkeys(context.modules.values()) if isinstance(m, VocabParallelHead)]
        if not heads:
            return
        for head in heads:
            changes.set(head, "use_local_output", False)
        if hasattr(type(model), "loss_function"):
            loss, note = loss_on_split_logits(model, heads[0])
            changes.set(model, "loss_function", loss)
            self.explanation.add("(loss)", "vocab", "", note)
        if callable(getattr(type(model), "generate", None)):
            # Whole: a step of one token is fewer than ranks, and code between the blocks fails on an empty part.
            regions = list(context.regions.values())
            changes.set(model, "generate", GatheringCall(model, "generate", heads, context.comm, regions))

    def _connect_parts(self) -> None:
        """Methods and wrappers that would take this rank's tokens for the whole sequence."""
        model: Any = self.context.model
        changes, region = self.context.changes, self.context.context
        if region is not None and region.comm.size > 1 and self.context.comm.size == 1:
            changes.set(model, DDP_MARK, RefusedByDDP(OVER_CONTEXT))
        if region is not None and region.comm.size > 1:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            changes.hooked(*TokenDrawGuard(region, device).attach(model))
        if hasattr(type(model), "loss_function"):
            changes.set(model, "loss_function", PartLoss(model.loss_function))
            changes.hooked(model.register_forward_hook(PartLoss.check, prepend=True, with_kwargs=True))
        if callable(getattr(type(model), "generate", None)):
            changes.set(model, "generate", NoGeneration(type(model).generate))

    def _replace_methods(self) -> None:
        """Methods and marks by which other libraries reach the model."""
        context, model, changes = self.context, self.context.model, self.context.changes
        changes.set(model, DDP_MARK, RefusedByDDP(OVER_PARALLEL))
        for each in models_to_save(model):
            if callable(getattr(type(each), "save_pretrained", None)):
                changes.set(each, "save_pretrained", SavePretrained(each))
        if context.expert_ranks > context.comm.size and callable(getattr(type(model), "generate", None)):
            changes.set(model, "generate", SyncedGenerate(model, vars(model).get("generate")))
        if context.comm.size > 1 and callable(getattr(type(model), "resize_token_embeddings", None)):
            changes.set(model, "resize_token_embeddings", ResizeEmbeddings(model))

    def _split_stream(self) -> None:
        """Split the residual stream where its first layer begins, and let no part of a tensor leave the model."""
        context, changes, parts = self.context, self.context.changes, PartGuard(self.context.comm)
        layers = {path: parent for parent, paths in context.streams.items() for path in paths}
        cut_features(context)
        for path in context.once(context.modules) if context.comm.size > 1 else ():
            module = context.modules[path]
            region = context.regions.get(layers[path]) if path in layers else context.region_of(path)
            if path in context.blocks:
                heads = self.splits[path].num_heads // context.features[1] if path in self.splits else 0
                changes.hooked(parts.mark_heads(module, path, region, heads))
            elif region is not None and context.block_of(path) is None:
                changes.hooked(parts.mark_positions(module, path, region))
        for parent, region in context.regions.items():
            first, last = context.streams[parent][0], context.streams[parent][-1]
            changes.hooked(hook_input(context.modules[first], parts.enter(region, first)))
            changes.hooked(hook_output(context.modules[last], region.leave))
        cut_batches(context)
        share_ends(context)
        for owner in self._owners() if context.comm.size > 1 else ():
            changes.hooked(context.modules[owner].register_forward_hook(parts.gather))

    def _owners(self) -> list[str]:
        """The modules that hold the layers, innermost first, up to the model."""
        found: list[str] = []
        for parent in self.context.streams:
            while parent:
                parent = parent.rpartition(".")[0]
                found.append(parent)
        return list(dict.fromkeys([*found, ""]))

    def _guard(self) -> None:
        """Watch forwards for what no plan can show (`fastpar.parallel.guards`)."""
        context = self.context
        plan = WatchedPlan(
            blocks=tuple(context.blocks),
            gathered=tuple(context.gathered),
            layers={path: context.regions.get(parent) for parent, paths in context.streams.items() for path in paths},
            draws_by_layout=frozenset(p for p, m in context.modules.items() if uses_layout_attention(m)),
            features={
                path: is_colwise(style)
                for path, style in context.styles.items()
                if splits_features(style) and context.block_of(path) is None
            },
            is_part=any(isinstance(module, Absent) for module in context.modules.values()),
        )
        device = next((p.device for p in context.model.parameters()), torch.device("cpu"))
        self.watch = Watch(context.comm, device, plan)
        context.changes.hooked(*self.watch.attach(context.model))

    def log(self) -> None:
        """One line of what was split, and one of each kind of module that "auto" has left whole; on the first rank."""
        context, rows = self.context, self.explanation.rows
        if context.comm.rank or context.batch[0] or context.comm.size == 1:
            return
        counts = collections.Counter(row["style"] for row in rows)
        words = ", ".join(f"{number} {style}" for style, number in counts.most_common()) or "no module"
        size, name = context.comm.size, type(context.model).__name__
        _log.info("%s over %d tensor-parallel ranks: %s (fastpar.explain has the table)", name, size, words)
        left: collections.Counter[tuple[str, str]] = collections.Counter()
        for path, style in context.styles.items():
            if isinstance(style, WholeStyle) and style.is_fallback:
                left[re.sub(r"\.\d+(?=\.|$)", ".*", path), style.note] += 1
        for (pattern, note), number in left.items():
            _log.warning("%s (%d of them): %s", pattern, number, note)
