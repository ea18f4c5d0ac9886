"""A program with an open store that forks: what each child may do, and whether its parent minds; a line for each.

    python -m tests.storage.storage_forks FOLDER BACKEND

A child that a signal ends, or that is not at its end within 30 seconds, is printed as that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from fastpar.storage import TensorStore, Transfer, stream

SECONDS = 30


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Parent:
    """The store, a transfer of it that has ended, and one that may be in flight."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.store: TensorStore | None = TensorStore(folder, backend=backend, timeout=20)
        self.store.write("x", torch.arange(1000.0)).wait()
        self.ended = self.store.read("x")
        self.ended.wait()
        self.flying: Transfer = self.store.write("large", torch.ones(8 << 20))

    def refused(self) -> list[str]:
        """What every call says."""
        store = self.store
        assert store is not None
        calls: list[Callable[[], object]] = [
            lambda: store.read("x"),
            lambda: store.write("y", torch.zeros(3)),
            lambda: store.delete("x"),
            lambda: store.spec("x"),
            lambda: store.flush(),
            lambda: store.buffers(1, 1),
            lambda: store.keep(self.folder / "kept"),
            lambda: stream(store, ["x"], lambda i, tensors: None),
            lambda: self.flying.wait(),
            lambda: self.flying.done(),
        ]
        return [said(call) for call in calls]

    def children(self) -> dict[str, Callable[[], object]]:
        def has_its_own() -> None:
            with TensorStore(self.folder, backend=self.backend) as other:
                other.write("z", torch.ones(5)).wait()
                assert other.read("z").wait().sum() == 5

        def check(text: list[str]) -> None:
            wrong = [one for one in text if f"({os.getpid()}) was forked from the one that opened the store" not in one]
            if wrong:
                raise AssertionError(wrong)

        def drop() -> None:
            self.store = None
            gc.collect()

        def close_twice() -> None:
            assert self.store is not None
            self.store.close()
            self.store.close()

        return {
            "nothing": lambda: None,
            "sys.exit": lambda: sys.exit(0),
            "close": close_twice,
            "dropped": drop,
            "every call": lambda: check(self.refused()),
            "what has ended": lambda: self.ended.wait(),
            "repr and names": lambda: (repr(self.store), self.store and self.store.names()),
            "a store of its own": has_its_own,
            "os._exit": lambda: os._exit(0),
        }


def fork(call: Callable[[], object]) -> str:
    """How the child ended."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # ends as a program does, through sys.exit and what is registered for the end
        text = "no error"
        try:
            call()
        except SystemExit:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:4000])
        sys.exit(0)
    os.close(writer)
    deadline = time.monotonic() + SECONDS
    text = ""
    if select.select([reader], [], [], SECONDS)[0]:
        text = os.read(reader, 4000).decode()
    os.close(reader)
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return (text or "no error") if code == 0 else f"exit status {code}, {text}"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"a hang, {text}"


def fork_with_the_lock_held(parent: Parent) -> str:
    """Another thread of the parent is within a call."""
    store, held, leave = parent.store, threading.Event(), threading.Event()
    assert store is not None

    def hold() -> None:
        with store._lock:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        return fork(parent.children()["every call"])
    finally:
        leave.set()
        thread.join()


class Rows(torch.utils.data.Dataset[int]):
    """One that does not touch the store; one that does says what it got."""

    def __init__(self, store: TensorStore, uses: bool) -> None:
        self._store, self._uses = store, uses

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> int:
        if self._uses:
            self._store.read("x")
        return at


def loaded(store: TensorStore, uses: bool) -> str:
    loader = torch.utils.data.DataLoader(
        Rows(store, uses), num_workers=2, multiprocessing_context="fork", timeout=SECONDS
    )
    try:
        return str([int(row) for row in loader])
    except Exception as error:  # torch makes a RuntimeError of a worker's, with its text
        return str(error)


def main(folder: Path, backend: str) -> None:
    parent = Parent(folder, backend)
    store = parent.store
    assert store is not None
    for name, call in parent.children().items():
        print(name, fork(call), sep="\t", flush=True)
    print("lock held", fork_with_the_lock_held(parent), sep="\t", flush=True)
    process = multiprocessing.get_context("fork").Process(target=store.close)
    process.start()
    process.join(SECONDS)
    print("multiprocessing", process.exitcode, sep="\t", flush=True)
    print("loader", loaded(store, uses=False), sep="\t", flush=True)
    print("loader that reads", "was forked from" in loaded(store, uses=True), sep="\t", flush=True)
    parent.flying.wait()
    store.write("after", torch.full((100_000,), 3.0))
    whole = store.read("large").wait().sum() == 8 << 20 and store.read("after").wait().sum() == 300_000
    print("parent", bool(whole) and parent.store is store, sep="\t", flush=True)
    store.close()


if __name__ == "__main__":
    # Python 3.12's, of what this program is about.
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
    main(Path(sys.argv[1]), sys.argv[2])
