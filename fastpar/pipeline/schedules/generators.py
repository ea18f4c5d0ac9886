"""All schedules by name: `make_schedule`."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

from fastpar.arguments import checked
from fastpar.pipeline.schedules.asynchronous import pipedream, pipedream_2bw
from fastpar.pipeline.schedules.bidirectional import dualpipe, dualpipev
from fastpar.pipeline.schedules.flush import eager_1f1b, gpipe, interleaved_1f1b, looped_bfs, naive, one_f_one_b
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.pipeline.schedules.v_shape import v_half, v_min, zbv
from fastpar.pipeline.schedules.zero_bubble import zb_h1, zb_h2

_GENERATORS: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
}

# Spellings of others, without case, punctuation and the word "schedule": torch, Megatron-LM, DeepSpeed, the papers.
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nopipelining": ("naive", {}),
    "forwardbackwardnopipelining": ("naive", {}),
    "modelparallel": ("naive", {}),
    "afab": ("gpipe", {}),
    "fthenb": ("gpipe", {}),
    "filldrain": ("gpipe", {}),
    "onefoneb": ("1f1b", {}),
    "train": ("1f1b", {}),
    "pipedreamflush": ("1f1b", {}),
    "dapple": ("1f1b", {}),
    "forwardbackwardpipeliningwithoutinterleaving": ("1f1b", {}),
    "eager": ("eager_1f1b", {}),
    "interleaved": ("interleaved_1f1b", {}),
    "interleaving": ("interleaved_1f1b", {}),
    "vpp": ("interleaved_1f1b", {}),
    "forwardbackwardpipeliningwithinterleaving": ("interleaved_1f1b", {}),
    "bfs": ("looped_bfs", {}),
    "breadthfirst": ("looped_bfs", {}),
    "zb1p": ("zb_h1", {}),
    "interleavedzerobubble": ("zb_h1", {"stages_per_rank": 2}),
    "zb2p": ("zb_h2", {}),
    "zbvzerobubble": ("zbv", {}),
    "vzb": ("zbv", {}),
    "2bw": ("pipedream_2bw", {}),
    "doublebuffered": ("pipedream_2bw", {}),
}


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which they are usually told."""
    return tuple(_GENERATORS)


@checked(computed=False)
def make_schedule(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """A schedule by name.

        name      one of `schedule_names()`; case, "-", "_" and the word "Schedule" do not matter, and the spellings of
                  torch ("Schedule1F1B", "Interleaved1F1B", "ZBVZeroBubble", ...), Megatron-LM and the papers work too
        options   what the generator takes: stages_per_rank, ... (see its docstring)

    Raises ValueError for an unknown name (with near ones) and for sizes that a schedule cannot have, TypeError for an
    option that it does not have.
    """
    key = _plain(name)
    names: dict[str, tuple[str, dict[str, Any]]] = {_plain(own): (own, {}) for own in _GENERATORS}
    found = names.get(key) or _ALIASES.get(key)
    if found is None:
        near = difflib.get_close_matches(key, [*names, *_ALIASES], n=3)
        meant = sorted({(names.get(own) or _ALIASES[own])[0] for own in near})
        hint = f"; did you mean {' or '.join(meant)}" if meant else ""
        raise ValueError(f"there is no schedule {name!r}{hint}; there are {', '.join(schedule_names())}")
    own, defaults = found
    generator = _GENERATORS[own]
    allowed = [option for option in inspect.signature(generator).parameters if option not in _SIZES]
    for option in options:
        if option not in allowed:
            has = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
            raise TypeError(f"schedule {own} has no option {option!r}; {has}")
    return generator(num_ranks, num_microbatches, **(defaults | options))


_SIZES = ("num_ranks", "num_microbatches")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|schedule", "", name.lower())
