"""What ops and their references share: types, checks of arguments, formats, and what ranks have to agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def communicator(group: GroupLike) -> Communicator | None:
    """The group's communicator, or None where there is nobody to talk to."""
    if group is None:
        return None
    from fastpar.comm import Communicator

    comm = Communicator.of(group)
    return comm if comm.size > 1 else None


def refuse_capture(what: str, instead: str) -> None:
    """RuntimeError if the current stream is captured; `what` is said to be impossible, `instead` what to do.

    For what cannot be part of a CUDA graph: a number that the host makes anew at every call.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} in a CUDA graph: every replay would have that of the capture. {instead}")
