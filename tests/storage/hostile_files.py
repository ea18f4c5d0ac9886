"""Kept files that somebody has written to do harm, and a program that opens them: a line per case.

    python -m tests.storage.hostile_files FOLDER BACKEND SEED COUNT

Every case is a valid file in which one thing is another, with its checksum made again. A case may end in two ways: a
StorageError, or bytes that are those of the file. The program prints a case's name before it begins and what came of it
after, so that a signal or a hang has a name.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastpar.storage import StorageError, TensorStore
from fastpar.storage._library import library

BLOCK = 8192
TRAILER = struct.Struct("<8sQQII")

Case = tuple[str, bytes]

NUMBERS = [-1, -4096, 0, 1, 4095, 4096, 4097, 8191, 16384, 1 << 30, (1 << 30) + 4096, 1 << 31, 1 << 32, 1 << 40]
NUMBERS += [1 << 52, 1 << 62, (1 << 63) - 4096, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 4096, 1 << 64, 10**30]
OTHERS: list[Any] = [None, True, False, 1.5, 8192.0, 1e300, "8192", "", [], [1], {}, {"a": 1}, [[[]]]]
SHAPES = [[-3, -700], [2100, -1], [1 << 62, 4], [1 << 62, 0], [0] * 65, [1] * 65, [3], [3, 701], [3, 699], [700, 3]]
SHAPES += [[1 << 31, 1 << 31, 1 << 31], [True, 2100], [3.0, 700], ["3", 700], [[3], 700], [None, 700], [1 << 70, 0]]
DTYPES = ["load", "Tensor", "float128", "qint8", "quint4x2", "bits8", "int4", "__class__", "dtype", "torch.float32"]
DTYPES += ["Float32", "float64", "float16", "uint8", "complex64", "int32", "strided", "cuda", "float32 ", "\ud800"]


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {
        "a": torch.randn(3, 700, generator=draw),
        "blocks": torch.randint(0, 256, (3 * BLOCK + 77,), dtype=torch.uint8, generator=draw),
        "empty": torch.zeros(0, 5),
        "b": torch.randn(1000, generator=draw).bfloat16(),
    }


def kept_file(folder: Path) -> bytes:
    with TensorStore(folder, block_bytes=BLOCK) as store:
        for name, tensor in tensors().items():
            store.write(name, tensor)
        store.keep(folder / "kept")
    return (folder / "kept").read_bytes()


class Mutator:
    """Files beside a valid one."""

    def __init__(self, whole: bytes) -> None:
        _, self.offset, num_bytes, _, _ = TRAILER.unpack(whole[-TRAILER.size :])
        self.whole = whole
        self.text = whole[self.offset : self.offset + num_bytes].decode()

    def index(self) -> Any:
        return json.loads(self.text)

    def file(self, text: str | bytes, *, offset: int | None = None, num_bytes: int | None = None) -> bytes:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        at, count = self.offset if offset is None else offset, len(raw) if num_bytes is None else num_bytes
        trailer = TRAILER.pack(b"FASTPAR1", at % (1 << 64), count % (1 << 64), library().checksum(raw, len(raw)), 0)
        return self.whole[: self.offset] + raw + trailer

    def with_change(self, change: Callable[[Any], object]) -> bytes:
        index = self.index()
        change(index)
        return self.file(json.dumps(index))

    def all(self) -> Iterator[Case]:
        yield "valid", self.whole
        for value in NUMBERS + OTHERS:
            yield f"block_bytes {value!r}", self.with_change(lambda index, v=value: index.update(block_bytes=v))
        yield from self._of_entries()
        yield from self._of_checksums()
        yield from self._of_the_whole()
        yield from self._of_the_trailer()

    def _of_entries(self) -> Iterator[Case]:
        for place, values in enumerate([DTYPES + NUMBERS[:4] + OTHERS, SHAPES + NUMBERS + OTHERS, NUMBERS + OTHERS]):
            for name in ("a", "blocks", "empty"):
                for value in values:

                    def change(index: Any, name: str = name, place: int = place, value: Any = value) -> None:
                        index["tensors"][name][place] = value

                    label = ("dtype", "shape", "offset")[place]
                    yield f"{label} of {name}: {value!r}", self.with_change(change)
        for value in [*OTHERS, ["float32"], ["float32", [1], 0], ["float32", [1], 0, None, 0]]:
            yield f"entry {value!r}", self.with_change(lambda index, v=value: index["tensors"].update(a=v))

    def _of_checksums(self) -> Iterator[Case]:
        sums = self.index()["tensors"]["blocks"][3]
        changed = [sums[:-1], sums[:1], [*sums, 0], sums * 1000, [None] * 4, [0.5] * 4, ["1"] * 4, [-1] * 4]
        changed += [[1 << 32] * 4, [(1 << 32) + sums[0], *sums[1:]], [True] * 4, [sums] * 4, [0] * 4, *OTHERS]
        for value in changed:
            change = lambda index, v=value: index["tensors"]["blocks"].__setitem__(3, v)  # noqa: E731
            yield f"checksums {str(value)[:40]}", self.with_change(change)
        for value in (None, [0], [0, 0]):
            change = lambda index, v=value: index["tensors"]["empty"].__setitem__(3, v)  # noqa: E731
            yield f"checksums of nothing {value}", self.with_change(change)

    def _of_the_whole(self) -> Iterator[Case]:
        for value in OTHERS:
            yield f"index {value!r}", self.file(json.dumps(value))
            yield f"tensors {value!r}", self.with_change(lambda index, v=value: index.update(tensors=v))
        yield "another entry", self.with_change(lambda index: index.update(more=1))
        yield "no tensors", self.with_change(lambda index: index.pop("tensors"))
        yield "no block_bytes", self.with_change(lambda index: index.pop("block_bytes"))
        overlap = self.index()["tensors"]["blocks"][2]
        yield "overlap", self.with_change(lambda index: index["tensors"]["b"].__setitem__(2, overlap))
        yield "twice the same name", self.file(self.text.replace('"b":', '"a":'))
        for name, text in {
            "no JSON": "{",
            "nothing": "",
            "not UTF-8": b"\xff\xfe\xff",
            "deep lists": "[" * 200_000,
            "deep objects": '{"a":' * 200_000,
            "deep and closed": "[" * 100_000 + "]" * 100_000,
            "a long number": '{"block_bytes": ' + "9" * 100_000 + ', "tensors": {}}',
            "NaN": '{"block_bytes": NaN, "tensors": {}}',
            "Infinity": '{"block_bytes": Infinity, "tensors": {}}',
            "UTF-16": self.text.encode("utf-16"),
            "a NUL": self.text + "\0",
        }.items():
            yield name, self.file(text)
        yield "a long name", self.file(self.text.replace('"b":', f'"{"n" * 1_000_000}":'))

    def _of_the_trailer(self) -> Iterator[Case]:
        size = len(self.whole)
        for value in [*NUMBERS, size, size - 32, self.offset + 4096, self.offset - 4096]:
            yield f"offset of the index {value}", self.file(self.text, offset=value)
            yield f"bytes of the index {value}", self.file(self.text, num_bytes=value)
        for end in (0, 1, 31, 32, 33, self.offset, size - 1, size - 4096):
            yield f"cut at {end}", self.whole[:end]
        for more in (1, 32, 4096):
            yield f"{more} bytes more", self.whole + bytes(more)
            yield f"{more} bytes in between", self.whole[:-32] + bytes(more) + self.whole[-32:]
        for place in range(32):
            byte = bytes([self.whole[place - 32] ^ 0x81])
            yield (
                f"byte {place} of the trailer",
                self.whole[: size - 32 + place] + byte + self.whole[size - 31 + place :],
            )

    def random(self, seed: int, count: int) -> Iterator[Case]:
        """Up to three places of the index with something else in each."""
        draw = random.Random(seed)
        pool = NUMBERS + OTHERS + SHAPES + DTYPES
        for number in range(count):
            index = self.index()
            for _ in range(draw.randint(1, 3)):
                parent, key = draw.choice(list(_places(index)))
                other, place = draw.choice(list(_places(index)))
                parent[key] = copy.deepcopy(draw.choice([*pool, draw.randrange(1 << 64), other[place], other[place]]))
            yield f"random {seed}, {number}", self.file(json.dumps(index))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def outcome(path: Path, whole: bytes, backend: str) -> str:
    try:
        with TensorStore(path, backend=backend, timeout=20) as store:
            for name in store.names():
                offset = store._entries[name].offset
                found = store.read(name).wait()
                raw = bytes(found.contiguous().view(-1).view(torch.uint8).tolist()) if found.numel() else b""
                if raw != whole[offset : offset + len(raw)]:
                    return f"WRONG bytes of {name!r}"
    except StorageError as error:
        return f"refused: {error}"[:500]
    except BaseException as error:
        return f"WRONG error {type(error).__name__}: {error}"[:300]
    return "read"


def refused_by_c() -> Iterator[tuple[str, bool]]:
    """Numbers that only another caller of the C interface could give."""
    number = ctypes.c_int64()
    with open("/dev/zero", "rb") as file:
        for depth, block in ((4, 0), (4, -4096), (4, 1 << 62), (4, 4097), (0, 4096), (-1, 4096)):
            made = library().file_create(file.fileno(), 0, 0, depth, block, number)
            yield f"create, depth {depth}, blocks of {block}", not made and number.value == 22
        handle = library().file_create(file.fileno(), 0, 0, 2, 4096, number)
        memory, sums = (ctypes.c_char * 8192)(), (ctypes.c_uint32 * 1)()
        big = (1 << 63) - 4096
        for offset, count, where, checks in (
            (0, -1, memory, None),
            (1, 100, memory, None),
            (-4096, 100, memory, None),
            (big, 8192, memory, None),
            (0, 8192, None, None),
            (0, 8192, memory, sums),  # two blocks, one checksum
            (0, 0, memory, sums),
            (0, big, memory, sums),
        ):
            length = 0 if checks is None else len(checks)
            ticket = library().file_submit(handle, 0, offset, where, count, checks, length, 0)
            failure = (ctypes.c_int64 * 4)()
            status = library().file_wait(handle, ticket, 20.0, failure)
            yield f"submit {count} bytes at {offset}", status == 1 and failure[0] == 22
            yield "wait again", library().file_wait(handle, ticket, 0.0, failure) == 1 and failure[0] == 22
        library().file_destroy(handle)


def main(folder: Path, backend: str, seed: int, count: int) -> None:
    whole = kept_file(folder)
    mutator = Mutator(whole)
    path = folder / "case"
    for name, content in itertools.chain(mutator.all(), mutator.random(seed, count)):
        print(json.dumps(name), end="\t", flush=True)
        path.write_bytes(content)
        print(json.dumps(outcome(path, content, backend)), flush=True)
    for name, is_refused in refused_by_c():
        print(json.dumps(name), json.dumps("refused" if is_refused else "WRONG"), sep="\t", flush=True)
    # More than any memory, of which no byte is on the disk.
    with open(path, "wb") as file:
        text = json.dumps({"block_bytes": 1 << 30, "tensors": {"x": ["uint8", [1 << 42], 0, None]}}).encode()
        try:
            file.truncate(1 << 42)
        except OSError:  # larger than the file system allows
            return
        file.seek(1 << 42)
        file.write(text + TRAILER.pack(b"FASTPAR1", 1 << 42, len(text), library().checksum(text, len(text)), 0))
    print('"more than any memory"', json.dumps(outcome(path, whole, backend)), sep="\t", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
