"""Real text as byte tokens, cut into batches that are the same under every layout.

A token is a byte, so the vocabulary has 256 entries and no tokenizer has to be downloaded. The default corpus is the
source code of Python's own standard library: it is on every machine that can run this file.

A sample is a window that starts at a random place, and the place depends on (seed, step, index in the global batch)
only. Every data-parallel rank takes its own range of indices and need not know what the others read, and a run with
another number of ranks sees the same global batches. The demo reads a byte of the corpus 0.02 times on average, so its
training loss is as good as a validation loss; there is no separate split.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCAB_SIZE = 256
MAX_CORPUS_BYTES = 8 << 20
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@dataclass(frozen=True)
class Corpus:
    """Bytes of text and the rule by which samples are taken from them."""

    tokens: np.ndarray  # uint8 [num_bytes]
    source: str
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {self.seq_len}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if len(self.tokens) <= self.seq_len:
            raise ValueError(
                f"{self.source} has {len(self.tokens)} bytes: too short for one sequence of seq_len={self.seq_len} "
                f"and the byte after it; give at least {self.seq_len + 1} bytes or a smaller seq_len"
            )

    def batch(self, step: int, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples `indices` of the global batch of `step`: (input_ids, targets), both int64 [len(indices), seq_len].

        targets[i, t] is the byte that follows input_ids[i, t].
        """
        num_starts = len(self.tokens) - self.seq_len
        starts = [int(np.random.default_rng((self.seed, step, index)).integers(num_starts)) for index in indices]
        windows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts])
        samples = torch.from_numpy(windows.astype(np.int64))
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def load_corpus(path: Path | None, seq_len: int, seed: int, max_bytes: int = MAX_CORPUS_BYTES) -> Corpus:
    """The first `max_bytes` of a file, of the text files below a folder, or (None) of Python's standard library.

    Files are read in sorted order. Raises FileNotFoundError if `path` does not exist, and ValueError if there is no
    text, or less than a sequence needs.
    """
    if path is None:
        root, pattern, source = Path(sysconfig.get_path("stdlib")), "*.py", "Python's standard library"
    else:
        root, pattern, source = path.expanduser(), "*", str(path)
    if not root.exists():
        raise FileNotFoundError(f"no such file or folder to read text from: {root}")

    text = bytearray()
    for file in [root] if root.is_file() else _text_files(root, pattern):
        with file.open("rb") as stream:
            text += stream.read(max_bytes - len(text))
        if len(text) == max_bytes:
            break
    if not text:
        raise ValueError(f"there is no text in {source}: give a text file that is not empty, or a folder that has one")
    return Corpus(np.frombuffer(bytes(text), dtype=np.uint8), source, seq_len, seed)


def _text_files(folder: Path, pattern: str) -> Iterator[Path]:
    """Files below `folder` that match, in sorted order, without hidden ones, tests, installed packages and binaries."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.is_symlink():  # links can lead back up
                yield from _text_files(path, pattern)
        elif path.match(pattern) and path.is_file() and not _is_binary(path):
            yield path


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(1024)
