"""A batch cut into microbatches, and what a pipeline has to know of one whose sequences are split over ranks beside it.

Where a split batch's tokens lie, and which of them see each other, is data that belongs to rows of the batch
(`fastpar.context`). So it goes with the microbatches: the pipeline says which rows each has, and which one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves


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


class SplitSequence(Protocol):
    """The sequences of one model's batches, of which every rank of another group has some tokens."""

    def begin(self, rows: Sequence[int | None]) -> None:
        """A run of a batch that has been split: the rows of each microbatch, None where nothing here has any.

        Raises ValueError for other rows than those that were split, RuntimeError where no batch was.
        """

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """While a microbatch's forward runs."""

    def count_labels(self, here: int) -> int:
        """How many labels count on all ranks, where `here` of them do on this one. ValueError for another number than
        this rank was given."""

    def summary(self) -> Mapping[str, Any]:
        """What the ranks of the pipeline must have in common, in the form of `agreement.summary`."""


def rows_of(args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """The rows of the first tensor with dims of each microbatch."""
    return [
        next((len(x) for x in tree_leaves((a, dict(k))) if isinstance(x, Tensor) and x.dim()), None)
        for a, k in zip(args, kwargs, strict=True)
    ]
