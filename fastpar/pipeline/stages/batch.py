"""A batch cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


class Microbatches(list[Any]):
    """Values that are cut already: item i belongs to microbatch i. For microbatches of different shapes.

    pipe.step(Microbatches([ids_0, ids_1]), target=Microbatches([labels_0, labels_1]))
    """


def split(value: Any, count: int, name: str) -> list[Any]:
    """`value` for each of `count` microbatches.

    A tensor [B, ...] is cut along dim 0, as evenly as it goes (the first B % count microbatches get one row more), in
    views; tuples, lists and dicts item by item; `Microbatches` are taken as they are; anything else, and a tensor
    without dims, goes to every microbatch.
    Raises ValueError where there are fewer rows than microbatches, TypeError for tensors in other containers.
    """
    if isinstance(value, Microbatches):
        if len(value) != count:
            raise ValueError(f"{name}: {len(value)} microbatches were given, but the schedule has {count}")
        return list(value)
    if isinstance(value, Tensor) and value.ndim:
        if value.shape[0] < count:
            raise ValueError(
                f"{name}: a batch of {value.shape[0]} (shape {tuple(value.shape)}) cannot be cut into {count} "
                "microbatches; wrap what must not be cut along dim 0 in Microbatches([...])"
            )
        return list(value.tensor_split(count)) if count > 1 else [value]
    if type(value) in (tuple, list):
        items = [split(item, count, f"{name}[{index}]") for index, item in enumerate(value)]
        return [type(value)(item[i] for item in items) for i in range(count)]
    if type(value) is dict:
        named = {key: split(item, count, f"{name}[{key!r}]") for key, item in value.items()}
        return [{key: item[i] for key, item in named.items()} for i in range(count)]
    inner: Iterable[Any] = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    )
    if any(isinstance(item, Tensor) for item in inner):
        raise TypeError(
            f"{name}: the tensors of a {type(value).__name__} are not cut; give a tuple, list or dict, or Microbatches"
        )
    return [value] * count


def split_call(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> tuple[list[tuple[Any, ...]], list[dict]]:
    """Positional and keyword inputs of each microbatch."""
    positions = [split(value, count, f"input {index}") for index, value in enumerate(args)]
    names = {key: split(value, count, key) for key, value in kwargs.items()}
    return (
        [tuple(values[i] for values in positions) for i in range(count)],
        [{key: values[i] for key, values in names.items()} for i in range(count)],
    )
