"""Names and forms of tensors in a folder, where transformers has others in memory (experts stacked, renamed modules).

transformers keeps tables of such conversions, and code that applies one to a whole model at once. Here they are applied
to groups of tensors, the smallest that give what the whole would: so a rank has one group in memory.

Note: groups are found by trying. On the meta device the whole is converted, and then the parts of ever coarser cuts:
each tensor by itself, those of one module, of one layer, all. The first cut with the same names, shapes and dtypes is
taken.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
Convert = Callable[[Any, Tensors], Tensors]


def saved_form(model: nn.Module, shapes: Tensors) -> tuple[Convert | None, list[list[str]], Tensors]:
    """What a model's tensors are in a folder: how a group is converted (None: not at all), the groups, and the result.

    shapes  the model's tensors on the meta device
    """
    convert = _reverting(model)
    alone = [[name] for name in shapes]
    if convert is None:
        return None, alone, dict(shapes)
    whole = convert(model, dict(shapes))
    for groups in _cuts(list(shapes)):
        found: Tensors = {}
        try:
            for group in groups:
                found |= convert(model, {name: shapes[name] for name in group})
        except Exception:  # the group lacks what a conversion needs
            continue
        if _forms(found) == _forms(whole):
            return convert, groups, whole
    raise AssertionError("the last cut is the whole")


def _reverting(model: Any) -> Convert | None:
    """transformers' way from memory to files; None where files have what is in memory."""
    if not hasattr(type(model), "save_pretrained") or not hasattr(model, "config"):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    found: Convert = revert_weight_conversion
    return found


def _cuts(names: Sequence[str]) -> Iterator[list[list[str]]]:
    yield [[name] for name in names]
    yield _grouped(names, lambda name: name.rpartition(".")[0])
    yield _grouped(names, _layer_of)
    yield [list(names)]


def _grouped(names: Sequence[str], key: Callable[[str], str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())


def _layer_of(name: str) -> str:
    """The path up to its first number; the module where there is none."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name.rpartition(".")[0]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


# ---- from files to the model


@dataclass
class Sources:
    """Tensors of a folder that give tensors of the model together; `convert` is one of transformers, or None."""

    names: list[tuple[str, str]] = field(default_factory=list)  # the pattern that has matched, and the name
    convert: Any = None

    @property
    def are_stacked(self) -> bool:
        """True where each is one row of dim 0 of what they give (experts), for each pattern all rows."""
        operations: Any = getattr(self.convert, "operations", ())
        return bool(operations) and type(operations[0]).__name__ == "MergeModulelist" and operations[0].dim == 0

    def rows(self, start: int, stop: int) -> Sources:
        """The sources, of stacked ones, that give these rows."""
        by_pattern: dict[str, list[str]] = {}
        for pattern, name in self.names:
            by_pattern.setdefault(pattern, []).append(name)
        return Sources([(p, n) for p, names in by_pattern.items() for n in names[start:stop]], self.convert)

    def num_rows(self) -> int:
        """How many stacked ones there are of each pattern; -1 where patterns differ."""
        counts = {sum(p == pattern for p, _ in self.names) for pattern, _ in self.names}
        return counts.pop() if len(counts) == 1 else -1

    def converted(self, model: Any, target: str, tensors: Mapping[str, Tensor]) -> Tensors:
        """What the tensors give, by name in the model."""
        convert = copy.deepcopy(self.convert)
        for pattern, name in self.names:
            convert.add_tensor(target, name, pattern, tensors[name])
        found = convert.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def sources_of(model: Any, expected: Tensors, names: Iterable[str]) -> tuple[dict[str, Sources], list[str]]:
    """{tensor of the model: its sources in a folder}, by the first tensor of those that are converted together; and the
    names for which the model has no place.

    expected  the model's tensors on the meta device
    """
    if _reverting(model) is None:
        found = {name: Sources([("", name)]) for name in names if name in expected}
        return found, [name for name in names if name not in expected]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found, unknown = {}, []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            unknown.append(name)
        elif pattern is None:
            found[target] = Sources([("", name)])
        else:
            found.setdefault(target, Sources(convert=by_pattern[pattern])).names.append((pattern, name))
    model._weight_conversions = [each for each in mapping if each.was_used()]  # which `save_pretrained` goes back by
    return found, unknown
