"""Containers that modules hold from one call to the next: losses of layers, counters, short histories."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

CONTAINERS = (list, dict, set, deque)  # and what is derived from them, such as Counter


def containers_in(values: Iterable[Any]) -> Iterator[Any]:
    """The containers among the values and within each other, each once."""
    seen: set[int] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            yield value
            todo += value.values() if isinstance(value, dict) else value


def items_of(container: Any) -> Any:
    """What is in a container, as a plain one that stays as it is."""
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def put_back(container: Any, items: Any) -> None:
    """Have in the container what `items_of` has found there."""
    # By the methods of the base: classes may refuse their own, as the outputs of transformers' models do.
    base: Any = next(base for base in (OrderedDict, *CONTAINERS) if isinstance(container, base))
    base.clear(container)
    (base.update if issubclass(base, dict | set) else base.extend)(container, items)


def with_own_containers(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copies of a container and of those within it around the same other values; what is no container itself."""
    memo = {} if memo is None else memo
    if not isinstance(value, CONTAINERS) or isinstance(value, set):  # whose items are no containers
        return value.copy() if isinstance(value, set) else value
    if id(value) not in memo:
        twin = memo[id(value)] = copy.copy(value)
        items = items_of(value)
        if isinstance(items, dict):
            put_back(twin, {key: with_own_containers(item, memo) for key, item in items.items()})
        else:
            put_back(twin, [with_own_containers(item, memo) for item in items])
    return memo[id(value)]
