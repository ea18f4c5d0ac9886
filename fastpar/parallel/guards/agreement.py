"""Agreement of ranks: on their weights before a swap, on the batch and on the random numbers of a forward.

A tensor-parallel group computes one model on one batch. Ranks that read different batches, or whose generators differ
where dropout is drawn, compute the loss of none.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from fastpar.comm import Communicator

_SAMPLES = 16  # numbers of a floating-point input that are compared


def sync_weights(model: nn.Module, comm: Communicator, *, broadcast: bool) -> None:
    """Compare (or broadcast) every parameter and buffer over the group before it is cut into shards."""
    if comm.size == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return  # a part of a pipeline without parameters
    if broadcast:
        for _, tensor in tensors:
            with torch.no_grad():
                tensor.copy_(comm.broadcast(tensor.detach(), src=0))
        return
    sums = torch.stack([checksum(tensor.detach()) for _, tensor in tensors])
    everyone = comm.all_gather(sums.unsqueeze(0), dim=0)
    differs = (everyone != everyone[0]).any(0)
    if differs.any():
        name = tensors[int(differs.nonzero()[0])][0]
        raise ValueError(
            f"{name} differs between the ranks that share the model ({int(differs.sum())} of {len(tensors)} "
            'tensors do). Seed every rank alike before building the model, or pass sync_weights="broadcast"'
        )


def checksum(tensor: Tensor) -> Tensor:
    """Wrap-around sum of the tensor's words as integers; exact, so that equal tensors give equal sums."""
    data = tensor.contiguous().view(-1)
    if data.is_complex():
        data = torch.view_as_real(data).reshape(-1)
    words = data.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
    return words.to(torch.int64).sum().cpu()


TORCH = "torch's"
GENERATORS = (TORCH, "Python's random", "numpy's")


def state_of(generator: str, device: torch.device) -> bytes:
    """The state of one of `GENERATORS`, to be compared with another state of it."""
    if generator == TORCH:
        return generator_state(device).numpy().tobytes()
    return pickle.dumps(random.getstate() if generator == GENERATORS[1] else np.random.get_state())  # noqa: NPY002


def generator_words(device: torch.device) -> list[int]:
    """A checksum of the state of each of `GENERATORS`."""
    return [zlib.crc32(state_of(name, device)) for name in GENERATORS]


def generators_apart(everyone: Tensor) -> tuple[str, ...]:
    """Which generators stand differently on the ranks of a group, of their `generator_words`, [ranks, generators]."""
    return tuple(name for name, words in zip(GENERATORS, everyone.unbind(1), strict=True) if (words != words[0]).any())


def generator_state(device: torch.device) -> Tensor:
    """The state of the default generators that a forward on `device` may draw from, as bytes."""
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    return state


class InputGuard:
    """Compares the tensors that the model is called with over the group, on every rank before it computes.

    Integers (token ids, labels, masks) must be equal, and floating-point inputs at a few places nearly so, as they may
    have been computed on every rank. In training the generators are compared as well; that they differ is an error once
    the forward draws from them (`DrawGuard`). Three collectives of up to 160 bytes a rank.
    """

    def __init__(self, comm: Communicator, device: torch.device):
        self.comm, self.device = comm, device

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """Before a forward that is watched; ValueError names the inputs that differ. Returns the generators that do."""
        leaves, _ = tree_flatten_with_path((args, kwargs))
        tensors = [(_name(path), x) for path, x in leaves if isinstance(x, Tensor) and type(x) is Tensor]
        # Of generators also where nothing is to be drawn: a rank in evaluation mode sends as many words.
        digests = [_structure(tensors), int(module.training), *generator_words(self.device)]
        everyone = self.comm.all_gather(torch.tensor([digests], dtype=torch.int64, device="cpu"))
        if (everyone[:, 1] != everyone[0, 1]).any():
            raise ValueError(
                f"the ranks of this tensor-parallel group compute one model, and this one calls it in "
                f"{'training' if module.training else 'evaluation'} mode, others do not"
            )
        if (everyone[:, 0] != everyone[0, 0]).any():
            described = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in tensors) or "no tensor"
            raise ValueError(
                f"the ranks of this tensor-parallel group call the model with different inputs; this one with "
                f"{described}. They share one batch: read it by mesh.rank('dp'), not by the global rank"
            )
        self._compare(tensors)
        return generators_apart(everyone[:, 2:])

    def _compare(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        if not tensors:
            return
        words = [_crc(x) if not (x.is_floating_point() or x.is_complex()) else 0 for _, x in tensors]
        samples = torch.stack([_sample(x) for _, x in tensors])
        exact = self.comm.all_gather(torch.tensor([words], dtype=torch.int64, device="cpu"))
        near = self.comm.all_gather(samples.unsqueeze(0))
        room = 0.02 * near.abs().nan_to_num(posinf=0.0).amax(dim=(0, 2))
        apart = ((near - near[0]).abs().nan_to_num() > room[:, None]).any(-1).any(0)
        differs = (exact != exact[0]).any(0) | apart
        if differs.any():
            names = [name for (name, _), differ in zip(tensors, differs.tolist(), strict=True) if differ]
            raise ValueError(
                f"{', '.join(names)} differ{'s' if len(names) == 1 else ''} between the ranks of this tensor-parallel "
                "group, which compute one model on one batch. Read the batch by mesh.rank('dp'), not by the global "
                "rank (DistributedSampler(dataset, mesh.size('dp'), mesh.rank('dp')))"
            )


def _name(path: Sequence[Any]) -> str:
    """input_ids for a keyword, input 0 for a position."""
    keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path]
    text = ".".join(str(key) for key in keys[1:])
    return text if keys[0] == 1 else f"input {text}"


def _structure(tensors: Sequence[tuple[str, Tensor]]) -> int:
    return zlib.crc32(repr([(name, tuple(x.shape), str(x.dtype)) for name, x in tensors]).encode())


def _crc(x: Tensor) -> int:
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _sample(x: Tensor) -> Tensor:
    """A few numbers of a floating-point tensor, zeros of another."""
    if not x.is_floating_point() or not x.numel():
        return torch.zeros(_SAMPLES, dtype=torch.float64, device="cpu")
    places = torch.linspace(0, x.numel() - 1, _SAMPLES, dtype=torch.float64, device="cpu").long()
    return x.detach().reshape(-1)[places.to(x.device)].double().cpu()
