"""Where the parameters of stage 3 are at rest: on their device, in the host's memory, or in a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.zero.disk_shards import DiskShards, ShardFile
from fastpar.zero.flat import FlatShards
from fastpar.zero.offload import Offload
from fastpar.zero.upload import Upload


class Home:
    """One model's: see `Offload`. `file` is None where nothing of the parameters is in one, `is_device` says whether
    they rest where they are used."""

    def __init__(self, offload: Offload | None = None) -> None:
        with_parameters = offload is not None and offload.parameters
        self.is_device = not with_parameters
        self._has_copies = offload is not None
        self._is_host = with_parameters and offload is not None and offload.path is None
        self.file = ShardFile(offload) if offload is not None and with_parameters and not self._is_host else None
        self._uploads: dict[torch.device, Upload | None] = {}

    def needs_copy(self, is_resident: bool) -> bool:
        """Whether the optimizer is to have a copy of a parameter even where dtypes agree: not of what is at rest in the
        host's memory, and can be updated there."""
        return self._has_copies and (is_resident or not self._is_host)

    def of_masters(self, device: torch.device) -> torch.device:
        """Where the optimizer's copies of parameters on `device` are."""
        return torch.device("cpu") if self._has_copies else device

    def shards(self, comm: Communicator, names: Sequence[str], tensors: Sequence[Tensor]) -> FlatShards | DiskShards:
        """This rank's rows of whole tensors of one dtype and device. Collective."""
        if self.file is not None:
            return self.file.shards(comm, names, tensors)
        device = tensors[0].device
        if self._is_host and device not in self._uploads:
            self._uploads[device] = Upload.of(device)
        return FlatShards(comm, tensors, upload=self._uploads.get(device))

    def released(self) -> None:
        """Before shards are written to: no copy of them is under way after this."""
        for upload in self._uploads.values():
            if upload is not None:
                upload.settle()
