"""Plans: which module is split how, as a dict from wildcard pattern to style.

    {"layers.*.self_attn": "block", "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", ...}

A pattern is a module path in which `*` stands for one path component. Styles are the words that torch and Hugging Face
use (`fastpar.parallel.styles.STYLES`), or an instance of a `Style` for what a word cannot say, one's own included.
Plans come from three places: a dict from the caller, the model's own `tp_plan` (Hugging Face), or the table of known
architectures here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from torch import nn

from fastpar.arguments import checked
from fastpar.parallel.styles import STYLES, Style
from fastpar.pipeline.stages.absent import Absent


def module_paths(model: nn.Module) -> list[str]:
    """Paths of all modules of the whole model, those on other parts of a pipeline included."""
    paths = []
    for path, module in model.named_modules(remove_duplicate=False):
        paths.append(path)
        if isinstance(module, Absent):
            paths += [f"{path}.{name}" for name in module.absent_modules]
    return paths


@checked(computed=False, but=("style",))
def parse_style(pattern: str, style: str | Style) -> Style:
    """A `Style` from a word or a Style; ValueError lists the words."""
    if isinstance(style, Style):
        return style
    if not isinstance(style, str):
        kind = f"the class {style.__name__}: make an instance" if isinstance(style, type) else type(style).__name__
        raise TypeError(f"plan[{pattern!r}] must be a str or fastpar.Style, got {kind}")
    if style not in STYLES:
        near = difflib.get_close_matches(style, STYLES, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"plan[{pattern!r}] is {style!r}, not one of {sorted(STYLES)}{hint}")
    return STYLES[style]


@checked(computed=False, but=("plan",))  # whose patterns `parse_style` names
def match_plan(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """Path to style, in the model's order; later patterns win. Paths are those of modules, and of single parameters.

    A pattern that matches nothing is an error that lists near misses, since a typing error would otherwise leave a
    layer silently unsplit. Modules that another part of a pipeline holds are matched as if they were here.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise TypeError(
            f"plan must be 'auto' or a dict from pattern (a str) to style, got {type(plan).__name__} {plan!r:.80}"
        )
    paths = [path for path in module_paths(model) if path]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known = {*paths, *parameters}
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    parameters += [path for path in plan if path not in known and path.startswith(absent)]
    known.update(parameters)
    chosen: dict[str, Style] = {}
    for pattern, word in plan.items():
        style = parse_style(pattern, word)
        matched = [pattern] if pattern in known else matching(pattern, paths) or matching(pattern, parameters)
        if not matched:
            shown = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths})
            near = difflib.get_close_matches(pattern, shown, n=3, cutoff=0.5) or shown[:3]
            raise ValueError(f"plan pattern {pattern!r} matches no module; near misses: {near}")
        chosen.update(dict.fromkeys(matched, style))
    return {path: chosen[path] for path in dict.fromkeys([*paths, *parameters]) if path in chosen}


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern matches."""
    regex = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
    return [path for path in paths if regex.fullmatch(path)]
