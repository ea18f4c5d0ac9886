"""What the ranks of a group have to agree on in one call, and the error that all of them raise when they do not.

Every rank boils its arguments down to a number, which travels with the op's one collective. Where numbers differ, or a
rank has found an id outside the vocabulary, every rank knows that from the same headers; only then do they exchange
notes, one all-gather of NOTE_BYTES, to say what is wrong, and where.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastpar.comm import Communicator

NOTE_BYTES = 1024


class AgreedCall(NamedTuple):
    """One rank's call of an op: what the others must have called as well."""

    op: str
    comm: Communicator
    options: dict[str, Any]
    checksum: int


def call_of(comm: Communicator | None, like: Tensor, op: str, **options: Any) -> AgreedCall | None:
    """The call, where there are others to compare it with: on CPU, in eager code."""
    if comm is None or like.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    options["dtype"] = str(like.dtype)
    text = f"{op} {options}"  # its checksum has 23 bits: as those of a float32 they are no NaN
    return AgreedCall(op, comm, options, 1 + (zlib.crc32(text.encode()) >> 9))


def tensor_checksum(x: Tensor | float | None) -> int | float | None:
    """A checksum of the bits of a tensor on CPU, the same for equal tensors; anything else itself."""
    if not isinstance(x, Tensor):
        return x
    if x.device.type != "cpu":
        return None
    x = x.detach().reshape(-1)
    words = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return int((words * torch.arange(1, 2 * words.numel(), 2, device="cpu")).sum())


def exchange_notes(comm: Communicator, note: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's note, by one all-gather: strings and numbers as JSON, cut to what fits."""
    text = json.dumps(note)
    for length in (200, 80, 20):
        if len(text.encode()) <= NOTE_BYTES:
            break
        text = json.dumps({k: v[:length] if isinstance(v, str) else v for k, v in note.items()})
    packed = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
    data = text.encode()[:NOTE_BYTES]
    packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    notes = comm.all_gather(packed, dim=0).view(comm.size, NOTE_BYTES)
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in notes]


def first_outside(ids: Tensor, total: int, ignore_index: int | None) -> tuple[str, int] | None:
    """("[position]", value) of the first id outside [0, total) other than `ignore_index`."""
    outside = (ids < 0) | (ids >= total)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if not outside.any():
        return None
    position = tuple(outside.nonzero()[0].tolist())
    return "[" + ", ".join(map(str, position)) + "]", int(ids[position])


def outside_error(bad: tuple[str, int], where: str, total: int, ignore_index: int | None, name: str) -> IndexError:
    ignored = "" if ignore_index is None else f" and not ignore_index ({ignore_index})"
    return IndexError(f"{name}{bad[0]} is {bad[1]}{where}, outside the vocabulary [0, {total}){ignored}")


def raise_disagreement(call: AgreedCall, ids: Tensor | None, total: int, ignore_index: int | None, name: str) -> None:
    """IndexError for an id outside the vocabulary on any rank, else CommMismatchError for what differs; every rank of
    the group calls this, and raises the same."""
    from fastpar.comm import CommMismatchError

    bad = None if ids is None else first_outside(ids, total, ignore_index)
    options = {key: repr(value) for key, value in call.options.items()}
    notes = exchange_notes(call.comm, {" op": call.op, " bad": bad, **options})
    found = [(rank, (note[" bad"][0], note[" bad"][1])) for rank, note in enumerate(notes) if note[" bad"]]
    if found:
        same = len(found) == len(notes) and len({text for _, text in found}) == 1
        ranks = ", ".join(str(rank) for rank, _ in found)
        where = "" if same else f" on rank{'s' if len(found) > 1 else ''} {ranks}"
        raise outside_error(found[0][1], where, total, ignore_index, name)
    if any(note[" op"] != call.op for note in notes):
        calls = ", ".join(f"rank {rank}: {note[' op']}" for rank, note in enumerate(notes))
        raise CommMismatchError(f"the ranks of the group called different functions: {calls}")
    differing = [key for key in options if any(note.get(key) != notes[0].get(key) for note in notes)]
    if differing:
        values = "; ".join(
            f"{key} is " + ", ".join(f"{note.get(key)} on rank {rank}" for rank, note in enumerate(notes))
            for key in differing
        )
        raise CommMismatchError(f"{call.op} was called with different options on the ranks of the group: {values}")
    raise CommMismatchError(
        f"{call.op} was called with different {name} on the ranks of the group: all ranks that share a vocabulary pass "
        f"the same {name}"
    )
