"""What is wrong on one rank is raised on all of them: each says in a few words how its arguments are.

    agreement = Agreement("moe_dispatch", ("top_k", "the dtype of x"), [indices.shape[1], x.dtype], problem)
    others = agreement.gather(comm)          # one all-gather; or, in front of a message that there is anyway:
    agreement.check(words_of_all_ranks)      # each rank's `agreement.words`

A collective that only some ranks enter never ends. So a rank with wrong arguments takes part all the same: its words
say so, it raises its own error, and the others raise one that names it. Words that differ where they must not are an
error with all values on every rank.

`raise_on_all` is for a failure alone, such as a disk's; `set_on_any` for flags that are no errors.

Worked example: rank 0 has top_k 2 and bfloat16, rank 1 wrong arguments: words [0, 2, 1] and [1, 0, 0]. Rank 1 raises
what is wrong, rank 0 "moe_dispatch: wrong arguments on rank 1 of the group: see its error".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from fastpar.comm.communicator import Communicator
from fastpar.comm.errors import CommMismatchError

_WRONG = 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Agreement:
    """One rank's part of a collective check.

    op       the function that the arguments are of, for the errors
    names    what has to be equal on all ranks; the same names on each
    values   of these names, ints, bools or floating dtypes; not looked at where there is a problem
    problem  what is wrong with this rank's arguments: an error, a ValueError's text, or nothing
    """

    op: str
    names: tuple[str, ...]
    values: Sequence[int | torch.dtype] = ()
    problem: Exception | str | None = None

    @property
    def words(self) -> list[int]:
        """A status, and a number for each name: as many on every rank."""
        if self.problem:
            return [_WRONG, *[0] * len(self.names)]
        return [0, *(_DTYPES.index(v) if isinstance(v, torch.dtype) else int(v) for v in self.values)]

    def check(self, everyone: Sequence[Sequence[int]]) -> None:
        """Raises on each rank what is wrong in the words of any: its own problem, else ValueError."""
        if self.problem:
            self._raise_problem()
        wrong = [rank for rank, (status, *_) in enumerate(everyone) if status]
        if wrong:
            raise ValueError(f"{self.op}: wrong arguments on rank {wrong[0]} of the group: see its error")
        for column, (name, mine) in enumerate(zip(self.names, self.values, strict=True), start=1):
            found = [words[column] for words in everyone]
            if len(set(found)) > 1:
                shown = [str(_DTYPES[value]) for value in found] if isinstance(mine, torch.dtype) else found
                raise ValueError(f"{self.op}: {name} must be equal on all ranks of the group, got {shown}")

    def gather(self, comm: Communicator, *extra: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """int64 [size, n]: the `extra` numbers of every rank, in host memory. One all-gather, on `device`.

        Raises as `check` does; CommMismatchError for numbers of another length, which a problem goes before.
        """
        own = torch.cat([torch.tensor(self.words, device=device), *(part.to(device) for part in extra)])
        try:
            everyone = (own[None] if comm.size == 1 else comm.all_gather(own[None])).cpu()
        except CommMismatchError:
            if self.problem:
                self._raise_problem()
            raise
        num_words = 1 + len(self.names)
        self.check(everyone[:, :num_words].tolist())
        return everyone[:, num_words:]

    def _raise_problem(self) -> NoReturn:
        raise self.problem if isinstance(self.problem, Exception) else ValueError(self.problem) from None


def problem_of(work: Callable[[], object]) -> Exception | None:
    """What the work raises, for `raise_on_all`."""
    try:
        work()
    except Exception as error:
        return error
    return None


def raise_on_all(problem: Exception | None, comm: Communicator, of_others: Callable[[list[int]], Exception]) -> None:
    """Raise this rank's problem, or where it has none what `of_others` makes of the ranks that have one. Collective:
    one all-gather of a byte, in host memory."""
    if comm.size > 1:
        flag = torch.tensor([problem is not None], dtype=torch.int8, device="cpu")
        failed = comm.all_gather(flag).nonzero().view(-1).tolist()
        if failed and problem is None:
            raise of_others(failed)
    if problem is not None:
        raise problem


def set_on_any(flags: Sequence[bool], comms: Sequence[Communicator]) -> list[bool]:
    """Which flags are set on any rank that these groups reach one after the other. Collective: an all-reduce (max) of 4
    bytes a flag in each group."""
    agreed = torch.tensor(flags, dtype=torch.int32, device="cpu")
    for comm in comms:
        comm.all_reduce(agreed, "max", out=agreed)
    return [bool(flag) for flag in agreed.tolist()]
