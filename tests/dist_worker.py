"""What a process of the pool in `tests/dist.py` runs: take a task from the pipe, run it in a fresh process group,
reply, clean up."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def serve(
    commands: Connection,
    replies: Connection,
    rank: int,
    folder: Path,
    environment: dict[str, str],
    output: Path,
    stacks_path: Path,
    port: int,
) -> None:
    """Run tasks until the parent closes the pipe."""
    _die_with_parent()
    server = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)  # while a fork has it, the process that forks does not end
    os.environ.clear()  # this process is a fork of one that may have been started with others
    os.environ.update(environment)
    os.chdir(folder)
    for path, flags, fds in ((Path(os.devnull), os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_APPEND, (1, 2))):
        file = os.open(path, flags)
        for fd in fds:
            os.dup2(file, fd)
        os.close(file)
    stacks = open(stacks_path, "a")  # noqa: SIM115  (faulthandler needs it for as long as the process lives)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr)

    import torch.distributed as dist  # the slow part of starting, where it is not there yet

    # One connection for all runs: for every one that is made, torch looks up the names of both addresses, and a lookup
    # that the machine's name server does not answer takes 5 s (one in fifty, seen on a machine without a network).
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    replies.send_bytes(b"ready")
    loaded = 0
    while True:
        try:
            task = pickle.loads(commands.recv_bytes())
        except EOFError:
            return
        replies.send_bytes(_reply(rank, store, *task))
        # Not before all are done: a rank that is still connecting to this one would see the connection closed.
        if not _is_released(commands):
            return
        sys.stdout.flush()
        sys.stderr.flush()
        _clean_up()
        if loaded != len(sys.modules):
            # What modules hold is left out of the collections to come: going through it takes a quarter of a second.
            loaded = len(sys.modules)
            gc.collect()  # groups that hung on to each other until they were destroyed: their threads would stay
            gc.freeze()
        replies.send_bytes(pickle.dumps(("idle", None)))


def _is_released(commands: Connection) -> bool:
    """Wait for the word to leave the run's process groups; False at the end of the pipe."""
    try:
        return bool(commands.recv_bytes() == b"release")
    except EOFError:
        return False


def _die_with_parent() -> None:
    """Get SIGKILL when the process that this one is a fork of ends (Linux): a rank blocked inside a collective reads no
    pipe. Where it has ended before, so has the pipe of commands.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reply(
    rank: int,
    store: Any,
    run: int,
    world_size: int,
    backend: str,
    timeout: float,
    module: str,
    qualname: str,
    args: bytes,
) -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _join(rank, store, run, world_size, backend, timeout)
            result = getattr(importlib.import_module(module), qualname)(*pickle.loads(args))
            return pickle.dumps(("returned", pickle.dumps(result)))
    except BaseException:  # SystemExit and pytest's outcome exceptions included: the parent reports them all
        return pickle.dumps(("raised", traceback.format_exc()))


def _join(rank: int, store: Any, run: int, world_size: int, backend: str, timeout: float) -> None:
    """A fresh default process group, and the state that every run starts from."""
    import numpy
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # env:// connects to the parent's store, also on rank 0
    )
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    numpy.random.seed(0)  # noqa: NPY002
    random.seed(0)
    limit = timedelta(seconds=timeout)
    store.set_timeout(limit)
    keys = dist.PrefixStore(f"run{run}", store)
    dist.init_process_group(backend, store=keys, rank=rank, world_size=world_size, timeout=limit)


def _clean_up() -> None:
    import torch.distributed as dist

    if "fastpar.mesh" in sys.modules:
        sys.modules[
            "fastpar.mesh.lifetime"
        ].forget_meshes()  # DTensor's caches, of meshes that a test has made by itself
    gc.collect()  # modules and graphs of the run, which may hold groups
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(value: Any) -> str:
    """`repr` of a value, run on a rank: the smallest task there is, to start the pool ahead of time."""
    return repr(value)
