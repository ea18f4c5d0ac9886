"""A folder of safetensors files, read by slices, and what its tensors are in a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from fastpar.pretrained.tensor_files import Range, TensorEntry, TensorFile
from fastpar.tensor.held import Index

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFolder:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    FileNotFoundError where neither is there, or a file of the index is not; ValueError for an index that names files
    elsewhere, or tensors that its files do not have.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self._files: list[TensorFile] = []
        self._file_of: dict[str, TensorFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        index = self.path / INDEX
        if index.is_file():
            names = _weight_map(index)
            for name in sorted(set(names.values())):
                if Path(name).name != name:
                    raise ValueError(f"{index} names the file {name!r}, which is not in the folder")
                self._add(self.path / name)
            files = {file.path.name: file for file in self._files}
            # Of a tensor that several files have, the one of the index is meant.
            self._file_of |= {name: files[file] for name, file in names.items() if name in files[file].entries}
            lost = sorted(name for name in names if name not in self._file_of)
            if lost:
                raise ValueError(f"{index} names {lost[:4]}, which {names[lost[0]]} does not have")
        elif (self.path / FILE).is_file():
            self._add(self.path / FILE)
        else:
            raise FileNotFoundError(
                f"{self.path} has neither {FILE} nor {INDEX}: give a folder of this machine with safetensors files "
                "(huggingface_hub.snapshot_download(name) gives one)"
            )

    def _add(self, path: Path) -> None:
        file = TensorFile(path)
        self._files.append(file)
        self._file_of |= dict.fromkeys(file.entries, file)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """All tensors by name."""
        return {name: file.entries[name] for name, file in self._file_of.items()}

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    def read(self, name: str, dim: int = 0, ranges: Sequence[Range] | None = None) -> Tensor:
        """A tensor, or of it the ranges along `dim`: see `TensorFile.read`."""
        return self._file_of[name].read(name, dim, ranges)

    def read_at(self, name: str, index: Index) -> Tensor:
        """The elements of a tensor at an index, of which nothing else is read."""
        box = {dim: _runs(rows) for dim, rows in enumerate(index) if rows is not None}
        return self._file_of[name].read_box(name, box)

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        for file in self._files:
            file.close()

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _runs(rows: Tensor) -> list[Range]:
    """The runs of successive numbers of an index."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(breaks) if len(run)]


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file} of an index."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        if all(isinstance(file, str) for file in found.values()):
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{index} is damaged: it has no weight_map of tensors' names to files' names")
