"""What cannot be part of a CUDA graph: a number that the host makes anew at every call, and every replay would have the
one of the capture."""

from __future__ import annotations

import torch


def refuse_capture(what: str, instead: str) -> None:
    """RuntimeError if the current stream is captured; `what` is said to be impossible, `instead` what to do."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} in a CUDA graph: every replay would have that of the capture. {instead}")
