"""Master weights, and the parameters that are these, rounded: each follows where the other was written to.

Note: copies to a device that nobody waits for. The host may write to a master again when its copy has been read. That
write needs the master's next gradient, which the host waits for (`ShardedParam.add_gradient`), on a stream that comes
after these copies, as its gradient is that of a forward with what they bring. Masters of a file are another matter:
they lie in buffers that the next read goes to.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from fastpar.optim._masters import Looks
from fastpar.zero.groups import local
from fastpar.zero.sharded_param import ShardedParam, follow_writes


class Masters:
    """What optimizers have in another dtype, or elsewhere, than the parameters; with none of these nothing is done.

    in_files  whether masters are in memory for an update only
    """

    def __init__(self, *, in_files: bool) -> None:
        self._in_files = in_files
        self._looks = Looks()
        self._params: dict[int, ShardedParam] = {}  # by the id of the master

    def hold(self, params: Sequence[ShardedParam]) -> None:
        """These are trained from now on."""
        self._params = {id(param.optim_param): param for param in params if param.model_rows is not None}

    def note_versions(self) -> None:
        """All parameters are what their masters are rounded to."""
        for param in self._params.values():
            param.note_version()

    @torch.no_grad()
    def follow_overwritten(self) -> list[ShardedParam]:
        """Follow parameters that torch knows were written to since, by the model's load_state_dict, say."""
        overwritten = [param for param in self._params.values() if param.is_overwritten]
        for param in overwritten:
            param.take_values()
        return overwritten

    @torch.no_grad()
    def follow(self) -> None:
        """Follow what was written to parameters of masters that are in memory, counted by torch or not."""
        follow_writes(self._params.values())

    def follow_before(self, optim_params: Sequence[nn.Parameter], step: int) -> None:
        """Masters that an update has read follow what was written while they were in a file, and, in some steps, what
        torch has not counted, as writes through `.data`."""
        if not self._params:
            return
        params = [self._params[id(x)] for x in optim_params if id(x) in self._params]
        follow_writes([param for param in params if param.is_behind])
        if self._looks.is_due(step) and follow_writes(params):
            self._looks.found(step)

    def write_back(self, optim_params: Sequence[nn.Parameter], rounded: Container[int] = ()) -> None:
        """Round updated masters to the parameters; `rounded`: ids of those that the update has rounded itself."""
        if not self._params:
            return
        for optim_param in optim_params:
            param = self._params.get(id(optim_param))
            if param is None or param.model_rows is None or param.is_in_place or id(optim_param) in rounded:
                continue
            param.model_rows.copy_(local(optim_param), non_blocking=not self._in_files)
