"""Which thread runs forwards over a group: one at a time.

Every rank launches the collectives of a group in the same order. Two threads of a rank launch theirs in an order that
other ranks need not have, and a collective of one call would meet that of another.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

# Of each group: the thread that began the last forward over it, and of which model.
_LAST: weakref.WeakKeyDictionary[ProcessGroup, tuple[int, weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def refuse_other_threads(model: nn.Module, group: ProcessGroup | None) -> None:
    """Where a forward of the model begins: RuntimeError while another thread is in one over the group."""
    if group is None:
        return
    own = threading.get_ident()
    last = _LAST.get(group)
    if last is not None and last[0] != own and _is_running(last[0], running := last[1]()):
        raise RuntimeError(
            f"a thread calls {type(model).__name__} while another one of this rank is in the forward of "
            f"{'it' if running is model else type(running).__name__}: ranks would pair the collectives of different "
            "calls. Call models that ranks share from one thread at a time, in the same order on all ranks, such as "
            "from a queue of requests that rank 0 sends to all"
        )
    _LAST[group] = own, weakref.ref(model)


def _is_running(thread: int, model: nn.Module | None) -> bool:
    frame: Any = None if model is None else sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False
