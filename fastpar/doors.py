"""What other libraries do with a model, made right for one that is parallelised, or refused where it would go wrong.

`save_pretrained` of transformers wants whole tensors, and so does `resize_token_embeddings`. DistributedDataParallel
wants plain ones, of which nobody else reduces the gradients: its constructor fails inside of torch, several calls
below the line that the user wrote, or does not fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fastpar.comm import Communicator


class SavePretrained:
    """`model.save_pretrained` of a parallelised model: ordinary files, of whole tensors.

    Collective: every rank of the tensor-parallel group calls it, and the first one of the first data-parallel group
    writes. All wait until the files are there.
    """

    def __init__(self, model: Any, comm: Communicator, is_writer: bool):
        self.model, self.comm, self.is_writer = model, comm, is_writer
        self.__doc__ = type(model).save_pretrained.__doc__

    def __deepcopy__(self, memo: Any) -> SavePretrained:
        return SavePretrained(memo.get(id(self.model), self.model), self.comm, self.is_writer)

    def __call__(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
        if "state_dict" not in kwargs:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            kwargs["state_dict"] = get_model_state_dict(self.model, options=options)
        error, result = "", None
        if self.is_writer:
            try:
                result = type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        # The others learn of a full disk as well, instead of going on with files that are not there.
        failed = self.comm.all_reduce(torch.tensor([float(bool(error))], device="cpu"), "max")
        if failed.item():
            raise RuntimeError(f"save_pretrained to {save_directory} failed: {error or 'see the writing rank'}")
        return result


class RefusedByDDP:
    """What a model has where DistributedDataParallel first looks, for the parameters to leave out: the reason why it
    must not be wrapped."""

    def __init__(self, reason: str, *, holds_for_copies: bool = True):
        self.reason, self.holds_for_copies = reason, holds_for_copies

    def __deepcopy__(self, memo: Any) -> Any:
        return self if self.holds_for_copies else []

    def __iter__(self) -> Iterator[str]:
        raise TypeError(self.reason)

    def __len__(self) -> int:
        return 0


DDP_MARK = "_ddp_params_and_buffers_to_ignore"
OVER_PARALLEL = (
    "this model is parallelised by fastpar: its parameters are DTensors, which DistributedDataParallel cannot "
    "wrap. For data parallelism use fastpar.zero.shard(model, optimizer, group=mesh, stage=0), which is DDP "
    "(transformers' Trainer and accelerate.prepare wrap models in DistributedDataParallel by themselves)"
)
OVER_ZERO = (
    "this model is data-parallel by fastpar.zero.shard already, which reduces its gradients: DistributedDataParallel "
    "around it would reduce them a second time, before they are clipped and stepped on. Leave it out. transformers' "
    "Trainer and accelerate.prepare wrap models in it by themselves: give accelerate.prepare the data loader and the "
    "optimizer only, and write the training loop instead of Trainer"
)


class ClosedToDDP:
    """`model` refuses to be wrapped in DistributedDataParallel until `remove` is called; its copies do not."""

    def __init__(self, model: nn.Module | None, reason: str):
        self._model, self._before = model, vars(model).get(DDP_MARK) if model is not None else None
        if model is not None:
            setattr(model, DDP_MARK, RefusedByDDP(reason, holds_for_copies=False))

    def remove(self) -> None:
        """Open the door again; a second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            vars(model).pop(DDP_MARK, None)
            if self._before is not None:
                setattr(model, DDP_MARK, self._before)


class ResizeEmbeddings:
    """`model.resize_token_embeddings` of a parallelised model: refused, unless the size stays."""

    def __init__(self, model: Any):
        self.model = model
        self.__doc__ = type(model).resize_token_embeddings.__doc__

    def __deepcopy__(self, memo: Any) -> ResizeEmbeddings:
        return ResizeEmbeddings(memo.get(id(self.model), self.model))

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
    ) -> Any:
        embedding = self.model.get_input_embeddings()
        now = embedding.num_embeddings
        wanted = now if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != now:
            raise ValueError(
                f"resize_token_embeddings({wanted}) of a model that fastpar.parallelize has split: its ranks hold "
                f"rows of a vocabulary of {now}. Resize before parallelize, or fastpar.unparallelize(model), resize, "
                "and parallelize again"
            )
        return embedding


def check_model(model: Any, function: str) -> None:
    """TypeError and ValueError, with what to pass instead, for what is no module or one wrapped around the model."""
    if not isinstance(model, nn.Module):
        hint = (
            "; build it first, for instance by AutoModelForCausalLM.from_pretrained" if isinstance(model, str) else ""
        )
        raise TypeError(f"{function} takes an nn.Module as its model, got {type(model).__name__}{hint}")
    inner = [name for name in ("_orig_mod", "module") if isinstance(vars(model)["_modules"].get(name), nn.Module)]
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if inner and (isinstance(model, kinds) or inner[0] == "_orig_mod"):
        raise ValueError(
            f"{function} got a {type(model).__name__} around the model: pass the model itself (its .{inner[0]}), and "
            "wrap or compile it afterwards"
        )
