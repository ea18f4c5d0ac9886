"""Names in a profile: `annotate` says what a block of code is for, while a profiler runs.

    with annotate(f"fastpar::zero::all_gather {fqn}"):
        gathered = comm.all_gather(shard)

A profile of a fastpar program then reads like its schedule. A name is "fastpar::<package>::<phase>", and says which one
where there are several:

    fastpar::comm::all_reduce       the launch of a collective: all of it, where it blocks
    fastpar::comm::wait all_reduce  a caller waits for its result
    fastpar::zero::all_gather layers.0.mlp
    fastpar::pipeline::0F3
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler


class _Nothing:
    """A block without a range. It has no state, so that one object serves all threads and nested blocks."""

    __slots__ = ()
    # Callables in C that take what `with` passes and return something false: methods in Python take twice as long.
    __enter__ = __exit__ = "".format


_NOTHING: Any = _Nothing()
_COMPILED = nullcontext()  # which Dynamo knows


def annotate(name: str) -> AbstractContextManager[Any]:
    """A range of that name in the profile (`torch.profiler`, `emit_nvtx`) that is being taken, on this thread.

    Without a profiler, and under torch.compile, which names its own kernels, it does nothing and takes 0.15 us.
    """
    # First, as Dynamo folds it: else a graph would be guarded by whether somebody profiles, and be compiled twice.
    if torch.compiler.is_dynamo_compiling():
        return _COMPILED
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
