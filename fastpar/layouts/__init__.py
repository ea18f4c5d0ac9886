"""How ranks share a training step: `Layout`, the rules about it, and the shape of the model that it is for.

    layout = fp.Layout.parse("pp2 tp2 sp dp2 zero1 mb8")
    layout.check(shape, world_size=8, batch=64)         # LayoutError: all that is wrong, and the nearest legal layout

Plain data: no torch, no ranks. `fp.plan` finds layouts; docs/planner.md has the rules as a table.
"""

from fastpar.layouts.layout import ContextOptions, GridOptions, Layout, PipelineOptions, ZeroOptions
from fastpar.layouts.nearest import nearest_legal
from fastpar.layouts.rules import RULES, LayoutError, LayoutFields, Rule, broken_rules
from fastpar.layouts.shape import ExpertShape, ModelShape

__all__ = [
    "RULES",
    "ContextOptions",
    "ExpertShape",
    "GridOptions",
    "Layout",
    "LayoutError",
    "LayoutFields",
    "ModelShape",
    "PipelineOptions",
    "Rule",
    "ZeroOptions",
    "broken_rules",
    "nearest_legal",
]
