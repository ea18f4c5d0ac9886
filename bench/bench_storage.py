"""Tensors in files: fastpar.storage against plain sequential I/O of the same disk, in the same run.

    fastpar bench storage [--quick] [--folder /nvme/scratch] [--bytes 64M,512M] [--items 16]

Three jobs on one tensor of `bytes` (write, read) or `items` tensors that are `bytes` together (update: every tensor is
read, changed and written, as optimizer states are in a step). The providers:

    fastpar                      TensorStore as it comes: O_DIRECT, checksums, io_uring where the kernel allows it
    fastpar, threads             the other backend
    fastpar, no checksums        what checksums cost
    fastpar, any address         tensors where O_DIRECT cannot take them: copied through a block's buffer
    fastpar, page cache          direct=False
    fastpar, one after another   update only: the same store, each item read, changed and written before the next
    torch.save, torch.load       write and read: a file each, through the page cache, flushed to the disk (fsync)
    memory only                  update only: the work without any file ("bound")

File traffic model: `bytes` written, or read, or both. "Of roof" compares that rate with the fastest of the yardsticks,
which move as many bytes of the same disk in the same direction without doing anything else:

    roof: 8 threads of 4 MiB     os.pwritev and os.preadv on aligned memory, O_DIRECT, into room that exists (what fio's
                                 psync engine does); for update half of them read and half of them write
    roof: dd                     dd bs=4M with oflag=direct or iflag=direct; the start of the process included

Traps besides those of `bench.harness`:

* The page cache takes writes at the speed of memory and writes them later; so "page cache" is no measure of a disk, and
  what it has not written yet slows down those who come next. Before every sample the disk is settled (sync).
* Room that was reserved and never written is written more slowly the first time (the file system notes it); every file
  here is written before it is timed, the yardsticks' too.
* Caches of the disk's host: two yardsticks on the same file sizes meet the same ones.
* A virtual disk's speed moves more than memory's: read ratios, and the spread.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.bench_comm import sizes
from bench.harness import Case, Error, Provider, Rank
from bench.options import Bench, parser, positive, run
from fastpar.storage import TensorStore, stream

ROOF_BLOCK = 4 << 20
ROOF_THREADS = 8


@dataclass(frozen=True)
class StorageCase:
    """One job on `num_bytes` in `folder`."""

    job: str  # "write", "read" or "update"
    num_bytes: int
    items: int
    folder: str

    calls = 1

    def describe(self) -> dict[str, Any]:
        items = {"items": self.items} if self.job == "update" else {}
        return {"op": self.job, "bytes": self.num_bytes, **items, "folder": self.folder}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self)
        return [*problem.stores(), *problem.peers(), *Yardstick(self).providers()]


class Problem:
    """The tensors of a case, and its providers."""

    def __init__(self, case: StorageCase) -> None:
        self.case = case
        count = case.items if case.job == "update" else 1
        numel = case.num_bytes // 4 // count
        self.names = [f"t{i}" for i in range(count)]
        self.traffic = 4.0 * numel * count * (2 if case.job == "update" else 1)
        self.x = TensorStore.empty((numel,), torch.float32).copy_(torch.arange(numel) % 8191)
        self.out = TensorStore.empty((numel,), torch.float32).zero_()

    def stores(self) -> list[Provider]:
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("fastpar", {}),
            ("fastpar, threads", {"backend": "threads"}),
            ("fastpar, no checksums", {"checksums": False}),
            ("fastpar, page cache", {"direct": False}),
        ]
        made = [self.provider_of(name, TensorStore(self.case.folder, **options)) for name, options in kinds]
        another = TensorStore(self.case.folder)
        if self.case.job == "update":
            return [*made, self.provider_of("fastpar, one after another", another, self.one_after_another)]
        return [*made, self.provider_of("fastpar, any address", another, aligned=False)]

    def provider_of(
        self, name: str, store: TensorStore, job: Callable[[TensorStore], object] | None = None, aligned: bool = True
    ) -> Provider:
        x, out = (self.x, self.out) if aligned else (shifted(self.x), shifted(self.out))
        jobs: dict[str, Callable[[TensorStore], object]] = {
            "write": lambda store: store.write("t0", x).wait(),
            "read": lambda store: store.read("t0", out).wait(),
            "update": lambda store: stream(store, self.names, work),
        }
        call = partial(job or jobs[self.case.job], store)
        for item in self.names:
            store.write(item, self.x).wait()
        return self.provider(name, "fastpar", call, partial(self.errors, store, call))

    def provider(
        self, name: str, kind: str, call: Callable[[], object], check: Callable[[], dict[str, Error]]
    ) -> Provider:
        return Provider(name, kind, call=call, check=check, prepare=os.sync, num_bytes=self.traffic)

    def one_after_another(self, store: TensorStore) -> None:
        for i, name in enumerate(self.names):
            store.read(name, self.out).wait()
            work(i, {name: self.out})
            store.write(name, self.out).wait()

    def errors(self, store: TensorStore, call: Callable[[], object]) -> dict[str, Error]:
        """From other values in the file (or, for reads, in memory): whether the job leaves the right ones."""
        before = torch.zeros_like(self.x) if self.case.job == "write" else self.x
        for name in self.names:
            store.write(name, before).wait()
        self.out.zero_()
        found = call()
        expected = self.x * 0.5 + 1.0 if self.case.job == "update" else self.x
        results = [found] if self.case.job == "read" else [store.read(name).wait() for name in self.names]
        wrong = sum(not torch.equal(result, expected) for result in results)  # type: ignore[arg-type]
        return {"tensors": Error(float(wrong), 0.0)}

    def peers(self) -> list[Provider]:
        if self.case.job == "update":
            tensors = [torch.zeros_like(self.x) for _ in self.names]
            return [Provider("memory only", "bound", call=partial(in_memory, tensors), num_bytes=self.traffic)]
        path = nameless(self.case.folder)[1]
        save_and_flush(self.x, path)

        def check() -> dict[str, Error]:
            call()
            return {"tensors": Error(float(not torch.equal(load_from_disk(path), self.x)), 0.0)}

        jobs: dict[str, tuple[str, Callable[[], object]]] = {
            "write": ("torch.save, fsync", partial(save_and_flush, self.x, path)),
            "read": ("torch.load", partial(load_from_disk, path)),
        }
        name, call = jobs[self.case.job]
        return [self.provider(name, "torch", call, check)]


def shifted(x: Tensor) -> Tensor:
    """A copy where O_DIRECT cannot read or write."""
    memory = torch.empty(x.numel() + 1024)
    start = -memory.data_ptr() // 4 % 1024 + 1  # the second float of a page
    return memory[start:][: x.numel()].copy_(x)


def nameless(folder: str) -> tuple[int, str]:
    """(descriptor, path) of a file that ends with the process; other processes can open it under that path."""
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def work(i: int, tensors: Mapping[str, Tensor]) -> None:
    """As an optimizer's step, one pass over memory."""
    for tensor in tensors.values():
        tensor.mul_(0.5).add_(1.0)


def in_memory(tensors: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        work(i, {"x": tensor})


def save_and_flush(x: Tensor, path: str) -> None:
    with open(path, "wb") as file:
        torch.save(x, file)
        file.flush()
        os.fsync(file.fileno())


def load_from_disk(path: str) -> Tensor:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it would come from the page cache
        loaded: Tensor = torch.load(file)
        return loaded


class Yardstick:
    """The same bytes of the same disk, moved by something else that does nothing else."""

    def __init__(self, case: StorageCase) -> None:
        self.case = case
        self.path = nameless(case.folder)[1]
        self.blocks = max(1, case.num_bytes // ROOF_BLOCK)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.memory = [mmap.mmap(-1, ROOF_BLOCK) for _ in range(ROOF_THREADS)]
        for buffer in self.memory:
            buffer.write(bytes(range(256)) * (ROOF_BLOCK // 256))
        self.pool = ThreadPoolExecutor(ROOF_THREADS)
        self.move(["write"] * ROOF_THREADS)

    def providers(self) -> list[Provider]:
        moved = self.blocks * ROOF_BLOCK
        directions = {"write": ["write"], "read": ["read"], "update": ["read", "write"]}[self.case.job]
        made = [
            Provider(
                f"roof: {ROOF_THREADS} threads of 4 MiB",
                "roof",
                call=lambda: self.move(directions * (ROOF_THREADS // len(directions))),
                prepare=os.sync,
                num_bytes=float(moved * len(directions)),
            )
        ]
        if self.case.job != "update":
            made.append(Provider("roof: dd", "roof", call=self.dd, prepare=os.sync, num_bytes=float(moved)))
        return made

    def move(self, directions: list[str]) -> None:
        """All blocks in each direction, the threads of a direction taking turns."""

        def lane(thread: int) -> None:
            same = [t for t, direction in enumerate(directions) if direction == directions[thread]]
            call = os.pwritev if directions[thread] == "write" else os.preadv
            for block in range(same.index(thread), self.blocks, len(same)):
                if call(self.descriptor, [self.memory[thread]], block * ROOF_BLOCK) != ROOF_BLOCK:
                    raise OSError("a block was moved in part")

        list(self.pool.map(lane, range(len(directions))))

    def dd(self) -> None:
        arguments = ["dd", "bs=4M", f"count={self.blocks}", "status=none"]
        if self.case.job == "write":
            arguments += ["if=/dev/zero", f"of={self.path}", "oflag=direct", "conv=notrunc"]
        else:
            arguments += [f"if={self.path}", "of=/dev/null", "iflag=direct"]
        subprocess.run(arguments, check=True)


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    if world_size > 1:
        return []
    folder = str(flags.folder)
    return [StorageCase(job, n, flags.items, folder) for n in flags.bytes for job in ("write", "read", "update")]


BENCH = Bench(
    name="storage",
    baselines=("fastpar",),
    cases=cases,
    memory=False,
    quick={"bytes": [4 << 20], "items": 4, "blocks": 2, "iters": 1},
)


def main(argv: Sequence[str]) -> int:
    made = parser(
        BENCH, "tensors in files", ranks=[1], threads=[2], settings=["tuned"], dtype=["fp32"], blocks=5, iters=2
    )
    made.add_argument("--bytes", type=sizes, default="64M,512M", metavar="LIST", help="of the tensors together")
    made.add_argument("--items", type=positive, default=16, metavar="N", help="tensors of an update")
    made.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where the files are made")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "storage", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
