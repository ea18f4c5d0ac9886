"""`save_pretrained`: a folder of ordinary files from a model whose tensors are shards.

Tensor after tensor is gathered (one all-gather each, for every dim of the mesh that it is sharded along) and written by
one rank. So a rank needs memory for one tensor beside its shards, or for one group where transformers converts several
together (`fastpar.pretrained.conversions`): never for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.comm.agree import raise_on_all
from fastpar.comm.communicator import GroupLike
from fastpar.comm.ranges import annotate
from fastpar.pipeline.stages.absent import Absent
from fastpar.pretrained.adapters import ClosedMerge, has_adapters, is_adapted_model, models_to_save, save_adapters
from fastpar.pretrained.conversions import Convert, saved_form
from fastpar.pretrained.folder import FILE, INDEX
from fastpar.pretrained.tensor_files import TensorEntry, TensorFileWriter

_FILE_BYTES = 5_000_000_000
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@checked(computed=False, but=("model",))
def save_pretrained(
    model: nn.Module, folder: str | Path, *, max_file_bytes: int = _FILE_BYTES, group: GroupLike = None
) -> None:
    """Write a model's whole tensors to a folder as Hugging Face does: safetensors files, an index, the config.

    model           plain, tensor-parallel, with experts spread over ranks, ZeRO of any stage; no stage of a pipeline
    folder          made where it is not there. Files get their names when all tensors are written
    max_file_bytes  of one file; a larger tensor has one of its own
    group           the ranks that have the model, and call this; None: all ranks of the job

    Of a `peft.PeftModel` the adapters are written, as its own `save_pretrained` does.

    Names and forms are those that `from_pretrained` expects. What is tied is written once. Values have the parameters'
    dtype: under mixed precision with master weights the rounded ones.

    Collective: every rank of the group calls it, and its first writes; all return when the files are there. One
    all-gather for every tensor and dim that it is sharded along.

    Raises on all ranks: ValueError for a stage of a pipeline and for a model inside of a PeftModel, RuntimeError where
    writing fails or a dtype is none of files; the folder has what it had then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_pretrained takes an nn.Module as its model, got {type(model).__name__}")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
    if any(isinstance(module, Absent) for module in model.modules()):
        raise ValueError(
            "save_pretrained got a stage of a pipeline, which has a part of the model: save with "
            "torch.distributed.checkpoint, or gather pipe.state_dict() of all stages"
        )
    if not is_adapted_model(model) and has_adapters(model):
        raise ValueError(
            f"save_pretrained got a {type(model).__name__} with adapters in it, whose files no from_pretrained would "
            "read: save the peft.PeftModel around it (adapters), or merge them first (merge_and_unload)"
        )
    with annotate("fastpar::save_pretrained"), torch.no_grad():
        everyone = Communicator.of(group)
        if group is None:
            everyone = Communicator(dist.group.WORLD if dist.is_initialized() else None)
        if is_adapted_model(model):
            error = save_adapters(model, Path(folder), _values(model, tied=True), everyone)
            _raise_together(error, Path(folder), everyone)
            return
        _Saving(model, Path(folder), max_file_bytes, everyone).run()


class _Saving:
    """One call of `save_pretrained`."""

    def __init__(self, model: nn.Module, folder: Path, max_file_bytes: int, everyone: Communicator):
        self.model, self.folder, self.max_file_bytes = model, folder, max_file_bytes
        self.everyone, self.is_writer = everyone, everyone.rank == 0
        self.values = _values(model)
        self.writers: dict[str, TensorFileWriter] = {}  # by the name of the tensor
        self.error: Exception | None = None

    def run(self) -> None:
        shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in self.values.items()}
        convert, groups, saved = saved_form(self.model, shapes)
        files = _files_of(saved, self.max_file_bytes)
        self._try(lambda: self._open(files, saved))
        for group in groups:
            whole = {name: self.values.pop(name)() for name in group}
            if self.is_writer and self.error is None:
                self._try(partial(self._write, whole, convert))
        self._try(lambda: self._finish(files, saved))
        _raise_together(self.error, self.folder, self.everyone)

    def _try(self, work: Callable[[], None]) -> None:
        """Do something on the rank that writes, until it fails: the others would wait for a rank that raises."""
        if not self.is_writer or self.error is not None:
            return
        try:
            work()
        except Exception as error:
            self.error = error
            for writer in set(self.writers.values()):
                writer.abandon()

    def _open(self, files: Mapping[str, list[str]], saved: Mapping[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, names in files.items():
            entries = {name: TensorEntry(saved[name].dtype, tuple(saved[name].shape)) for name in names}
            writer = TensorFileWriter(self.folder / file, entries, {"format": "pt"})
            self.writers |= dict.fromkeys(names, writer)

    def _write(self, whole: dict[str, Tensor], convert: Convert | None) -> None:
        for name, value in (whole if convert is None else convert(self.model, whole)).items():
            self.writers[name].write(name, value)

    def _finish(self, files: Mapping[str, list[str]], saved: Mapping[str, Tensor]) -> None:
        _save_config(self.model, self.folder)
        for writer in dict.fromkeys(self.writers.values()):
            writer.close()
        for path in self.folder.iterdir():  # of an earlier save, which readers of this one would find beside it
            stale = path.name in (FILE, INDEX) or _PART.fullmatch(path.name) is not None
            if stale and path.name not in files:
                path.unlink()
        if FILE in files:
            return
        total = sum(value.numel() * value.dtype.itemsize for value in saved.values())
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files_of(saved: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, list[str]]:
    """{file: names}, in the order of the tensors."""
    files: list[list[str]] = [[]]
    size = 0
    for name, value in saved.items():
        nbytes = value.numel() * value.dtype.itemsize
        if files[-1] and size + nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    if len(files) == 1:
        return {FILE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": names for n, names in enumerate(files, 1)}


class _Value:
    """A tensor of the model, gathered when it is called."""

    def __init__(self, stored: Tensor):
        self.stored = stored.detach()
        self.shape, self.dtype = stored.shape, stored.dtype

    def __call__(self) -> Tensor:
        return self.stored.full_tensor() if isinstance(self.stored, DTensor) else self.stored


def _values(model: Any, *, tied: bool = False) -> dict[str, _Value]:
    """The tensors of the model's state dict; of tied ones one, or all."""
    state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    named = [] if tied else model.named_parameters(remove_duplicate=False)
    spares: Any = getattr(model, "all_tied_weights_keys", None)
    names: dict[int, str] = {}  # of each parameter, by id
    for name, parameter in named:
        other = names.setdefault(id(parameter), name)
        if other != name and other in state and name in state:
            spare = other if isinstance(spares, Mapping) and other in spares else name
            names[id(parameter)] = name if spare == other else other
            del state[spare]
    return {name: _Value(x) for name, x in state.items()}


def _save_config(model: Any, folder: Path) -> None:
    """What transformers writes beside the weights: by its own code, which gets no weights to write."""
    save = getattr(type(model), "save_pretrained", None)
    if save is None:
        return
    before = set(folder.iterdir())
    save(model, folder, is_main_process=True, state_dict={}, save_original_format=False)
    for path in set(folder.iterdir()) - before:
        if path.name.endswith(".safetensors"):
            path.unlink()  # an empty one


def _raise_together(error: Exception | None, folder: Path, everyone: Communicator) -> None:
    """RuntimeError on all ranks where one could not write. Collective."""
    own = None
    if error is not None:
        own = RuntimeError(f"save_pretrained to {folder} failed: {type(error).__name__}: {error}")

    def of_others(ranks: list[int]) -> Exception:
        return RuntimeError(f"save_pretrained to {folder} failed on rank {ranks[0]}: see its error")

    raise_on_all(own, everyone, of_others)


class SavePretrained:
    """`model.save_pretrained` of a model whose tensors are shards: `fastpar.save_pretrained`, with the arguments of
    transformers. Collective: every rank of the job calls it."""

    def __init__(self, model: Any):
        self.model = model
        self.__doc__ = type(model).save_pretrained.__doc__

    def __deepcopy__(self, memo: Any) -> SavePretrained:
        return SavePretrained(memo.get(id(self.model), self.model))

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        max_shard_size: int | str = _FILE_BYTES,
        **others: Any,
    ) -> None:
        """`is_main_process` is not looked at: rank 0 writes. What has no meaning for shards is refused."""
        if state_dict is not None:
            raise ValueError(
                "save_pretrained of a model that fastpar has sharded gathers its own tensors: leave state_dict out, or "
                "call type(model).save_pretrained(model, folder, state_dict=...) on one rank"
            )
        given = sorted(name for name, value in others.items() if value not in (None, False) and name not in _HARMLESS)
        if given:
            raise ValueError(
                f"save_pretrained of a model that fastpar has sharded does not know {given}: save to a folder, and "
                "upload or convert that afterwards"
            )
        save_pretrained(self.model, save_directory, max_file_bytes=_bytes_said(max_shard_size))


class SaveDoor:
    """`model.save_pretrained` gathers shards until `remove` is called, where the model has this method, and that of the
    model in a `peft.PeftModel`; adapters are not merged meanwhile."""

    def __init__(self, model: nn.Module | None):
        self._merge = None if model is None else ClosedMerge(model)
        # A model that `parallelize` has split has it already, and keeps it.
        self._models = [
            each
            for each in ([] if model is None else models_to_save(model))
            if callable(getattr(type(each), "save_pretrained", None)) and "save_pretrained" not in vars(each)
        ]
        for each in self._models:
            vars(each)["save_pretrained"] = SavePretrained(each)

    def remove(self) -> None:
        """Give the methods of the classes back; a second call does nothing."""
        models, self._models = self._models, []
        for each in models:
            vars(each).pop("save_pretrained", None)
        if self._merge is not None:
            self._merge.remove()


_HARMLESS = ("safe_serialization", "save_peft_format", "save_original_format")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _bytes_said(size: int | str) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT]I?B)\s*", size.upper())
    if found is None or found.group(2) not in _UNITS:
        raise ValueError(f"max_shard_size must be a number of bytes or like '5GB', got {size!r}")
    return int(found.group(1)) * _UNITS[found.group(2)]
