"""fastpar.storage: what is written comes back, at any size and alignment, through every backend; and what is said when
the disk is full, fails, or lies.

Failing disks are files that fail: /dev/full (ENOSPC in the middle of a write), /proc/self/mem (EIO), a file that was
cut off or changed behind the store's back, the process's limit of file sizes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastpar import _ext
from fastpar.storage import ChecksumError, StorageError, TensorStore, Transfer, backing, stream
from fastpar.storage._library import library
from fastpar.storage.async_file import AsyncFile, Flight
from fastpar.storage.backing import Extents
from tests import instruction_sets

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 8192
KINDS = [("io_uring", True), ("io_uring", False), ("threads", True), ("threads", False)]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.int16,
    torch.bool,
]


def ring_refusal() -> str:
    store = TensorStore("/tmp")
    store.close()
    return store._file.refusal


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'direct' if kind[1] else 'buffered'}")
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorStore]:
    backend, direct = request.param
    if backend == "io_uring" and ring_refusal():
        pytest.skip(f"io_uring: {ring_refusal()}")
    with TensorStore(tmp_path, backend=backend, direct="auto" if direct else False, block_bytes=BLOCK) as made:
        yield made


def values(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def misaligned(source: torch.Tensor) -> torch.Tensor:
    """The same bytes, at an address that O_DIRECT cannot take."""
    memory = torch.empty(source.numel() + 4096 + 8, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096 + 8
    memory[start : start + source.numel()] = source
    return memory[start : start + source.numel()]


# ---- checksums


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def four_streams(data: bytes) -> int:
    streams = [b"".join(data[i : i + 8] for i in range(8 * s, len(data), 32)) for s in range(4)]
    return crc32c(b"".join(crc32c(s).to_bytes(4, "little") for s in streams))


def test_checksum_of_the_worked_example() -> None:
    assert crc32c(b"12345678") == 0x6087809A
    assert crc32c(b"9") == 0x1A2CC12C
    assert library().checksum(b"123456789", 9) == 0xBFCD1107


def test_crc_of_the_reference_here_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value


@pytest.mark.parametrize("name", instruction_sets.available("avx2", "portable"))
def test_checksum_matches_its_definition_with_every_instruction_set(name: str) -> None:
    with instruction_sets.using(name):
        for size in [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 100, 257, 1023]:
            data = bytes(values(size, seed=size).tolist())
            assert library().checksum(data, size) == four_streams(data), size


# ---- round trips


@pytest.mark.parametrize("aligned", [True, False])
def test_bytes_come_back_at_sizes_around_blocks_and_pages(store: TensorStore, aligned: bool) -> None:
    sizes = [0, 1, 257, 511, 1023, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 13, 8 * BLOCK, 300_001]
    written = {}
    for size in sizes:
        source = values(size, seed=size)
        written[size] = TensorStore.empty((size,), torch.uint8).copy_(source) if aligned else misaligned(source)
        store.write(str(size), written[size])
    for size in sizes:
        out = misaligned(torch.zeros(size, dtype=torch.uint8)) if not aligned else None
        assert torch.equal(store.read(str(size), out).wait(), written[size]), size


def test_bytes_next_to_a_tensor_are_not_touched(store: TensorStore) -> None:
    source = values(5000)
    store.write("x", source).wait()
    frame = torch.full((5000 + 200,), 7, dtype=torch.uint8)
    store.read("x", frame[100:5100]).wait()
    assert torch.equal(frame[100:5100], source)
    assert frame[:100].eq(7).all()
    assert frame[5100:].eq(7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_with_its_bits(store: TensorStore, dtype: torch.dtype) -> None:
    size = 333 * dtype.itemsize
    bits = values(size) % 2 if dtype == torch.bool else values(size)
    x = bits.view(dtype).view(9, 37)
    out = store.write("x", x) and store.read("x").wait()
    assert (out.dtype, out.shape) == (dtype, x.shape)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def test_a_strided_tensor_is_written_as_its_elements(store: TensorStore) -> None:
    x = torch.arange(600.0).view(20, 30).t()
    store.write("x", x)
    assert torch.equal(store.read("x").wait(), x)


def test_a_parameter_can_be_written_and_read_into(store: TensorStore) -> None:
    parameter = torch.nn.Parameter(torch.randn(100))
    expected = parameter.detach().clone()
    store.write("p", parameter).wait()
    with torch.no_grad():
        parameter.zero_()
    assert store.read("p", parameter).wait() is parameter
    assert torch.equal(parameter, expected)


def test_transfers_of_a_name_run_in_the_order_of_their_launch(store: TensorStore) -> None:
    for size in (100, 3 * BLOCK + 5):
        for round_ in range(6):
            pending = []
            for k in range(5):
                store.write("x", torch.full((size,), 5 * round_ + k, dtype=torch.uint8))
                pending.append((5 * round_ + k, store.read("x")))
            for value, transfer in pending:
                assert transfer.wait().eq(value).all()


def test_random_calls_agree_with_a_dictionary(store: TensorStore) -> None:
    draw = random.Random(3)
    expected: dict[str, torch.Tensor] = {}
    reads = []
    for step in range(400):
        name = f"t{draw.randrange(12)}"
        action = draw.choice(["write", "write", "read", "delete"])
        if action == "write":
            expected[name] = values(draw.choice([0, 1, 100, 4096, BLOCK, 3 * BLOCK + 1, 10 * BLOCK]), seed=step)
            store.write(name, expected[name])
        elif name in expected and action == "read":
            reads.append((store.read(name), expected[name]))
        elif name in expected:
            store.delete(name)
            del expected[name]
    for transfer, value in reads:
        assert torch.equal(transfer.wait(), value)
    assert set(store.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(store.read(name).wait(), value)


def test_many_threads_may_use_a_store_at_once(store: TensorStore) -> None:
    failures = []

    def use(thread: int) -> None:
        try:
            for step in range(30):
                x = values(1 + 997 * (step % 13), seed=100 * thread + step)
                store.write(f"{thread}", x)
                assert torch.equal(store.read(f"{thread}").wait(), x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_memory_of_a_transfer_that_nobody_holds_stays_until_it_is_written(store: TensorStore) -> None:
    for n in range(50):
        store.write(f"{n}", torch.full((50_000,), n, dtype=torch.uint8))  # freed here, were it not kept
        torch.full((50_000,), 255, dtype=torch.uint8)
    for n in range(50):
        assert store.read(f"{n}").wait().eq(n).all()


def test_the_store_does_not_keep_memory_that_is_written_or_read(store: TensorStore) -> None:
    x = torch.zeros(50_000)
    kept = StorageWeakRef(x.untyped_storage())
    transfer = store.write("x", x)
    del x
    assert not kept.expired()
    store.flush()
    assert not kept.expired()  # for whoever has the transfer
    del transfer
    assert kept.expired()
    out = store.read("x").wait()
    kept = StorageWeakRef(out.untyped_storage())
    del out
    assert kept.expired()


# ---- room


def test_free_ranges_are_joined_and_taken_first() -> None:
    extents = Extents()
    a, b, c = (extents.take(size) for size in (8192, 4096, 4096))
    assert (a, b, c, extents.end) == (0, 8192, 12288, 16384)
    for offset, size in ((a, 8192), (c, 4096), (b, 4096)):
        extents.give_back(offset, size)
    assert extents.take(16384) == 0
    assert extents.end == 16384


def test_rewriting_and_deleting_reuse_the_file(store: TensorStore) -> None:
    for round_ in range(4):
        store.write("a", values(3 * BLOCK, seed=round_))
        store.write("b", values(2 * BLOCK, seed=round_))
        store.flush()
        store.delete("b")
        taken = store.file_bytes
        assert taken == 5 * BLOCK
    store.write("a", values(100))  # smaller: the old range is free once this is written
    store.flush()
    store.write("c", values(3 * BLOCK)).wait()
    assert store.file_bytes == taken  # "a" went where "b" had been, and "c" where "a" had been


def test_a_range_with_a_transfer_in_flight_is_not_given_out(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", values(BLOCK))
    monkeypatch.setattr(Flight, "done", lambda self: False)  # as if the disk were slow
    store.delete("a")
    store.write("b", values(BLOCK))
    assert store.file_bytes == 2 * BLOCK
    monkeypatch.undo()
    store.flush()
    store.write("c", values(BLOCK))
    assert store.file_bytes == 2 * BLOCK


def test_nothing_has_a_name_in_the_folder(store: TensorStore, tmp_path: Path) -> None:
    store.write("x", values(BLOCK)).wait()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_nameless_files_gets_one_that_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with TensorStore(tmp_path) as store:
        store.write("x", values(BLOCK)).wait()
        assert os.listdir(tmp_path) == []
        assert torch.equal(store.read("x").wait(), values(BLOCK))


KILLED = """
import os, signal, sys, torch
from fastpar.storage import TensorStore
store = TensorStore(sys.argv[1])
for n in range(20):
    store.write(f"{n}", torch.zeros(1 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.expensive
def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.expensive
def test_a_process_that_forgets_to_close_ends_cleanly(tmp_path: Path) -> None:
    code = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "print(store)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], env=environment, timeout=120, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"20 tensors, 83886080 bytes" in done.stdout


# ---- failures


@pytest.fixture
def file_limit() -> Iterator[None]:
    """No file of this process may grow beyond 1 MiB (the signal that comes with it is ignored by Python)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("file_limit")
def test_a_full_disk_is_said_before_anything_is_written(store: TensorStore) -> None:
    kept = values(700_000)
    store.write("kept", kept).wait()
    with pytest.raises(StorageError, match=r"reserve 405504 bytes at offset 700416 .*EFBIG.*ulimit -f") as caught:
        store.write("large", values(402_000))
    assert (caught.value.errno, caught.value.offset, caught.value.num_bytes) == (errno.EFBIG, 700416, 405504)
    assert "large" not in store
    assert torch.equal(store.read("kept").wait(), kept)
    store.delete("kept")
    store.write("large", values(402_000)).wait()  # there is room again
    assert torch.equal(store.read("large").wait(), values(402_000))


@pytest.mark.usefixtures("file_limit")
def test_a_name_keeps_its_value_when_there_is_no_room_for_a_larger_one(store: TensorStore) -> None:
    store.write("x", values(600_000)).wait()
    with pytest.raises(StorageError):
        store.write("x", values(900_000))
    assert torch.equal(store.read("x").wait(), values(600_000))


@pytest.mark.usefixtures("file_limit")
def test_room_that_could_not_be_had_is_not_given_out_later(store: TensorStore) -> None:
    store.write("kept", values(700_000))
    for size in (402_000, 350_000):
        with pytest.raises(StorageError, match="reserve"):
            store.write("x", values(size))


def store_on(
    path: str, monkeypatch: pytest.MonkeyPatch, backend: str, *, flags: int = os.O_RDWR, **options: int
) -> TensorStore:
    """A store whose file is that special one."""
    monkeypatch.setattr(backing, "_open_nameless", lambda folder: os.open(path, flags | os.O_CLOEXEC))
    monkeypatch.setattr(os.path, "isfile", lambda path: False)
    monkeypatch.setattr(backing.BackingFile, "reserve", lambda *arguments: None)
    return TensorStore(path, backend=backend, direct=False, block_bytes=BLOCK, **options)


backends = pytest.mark.parametrize("backend", ["io_uring", "threads"])


@backends
def test_a_disk_that_fills_up_during_a_write_fails_that_write(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_on("/dev/full", monkeypatch, backend) as store:
        transfer = store.write("x", values(10 * BLOCK))
        with pytest.raises(StorageError, match=r"/dev/full: write 8192 bytes at offset \d+ for tensor 'x' failed"):
            transfer.wait()
        with pytest.raises(StorageError) as again:
            transfer.wait()
        assert again.value.errno == errno.ENOSPC
        assert "larger disk" in str(again.value)
        assert again.value.offset is not None
        assert again.value.offset % BLOCK == 0


@backends
def test_what_was_not_written_cannot_be_read(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_on("/dev/full", monkeypatch, backend) as store:
        store.write("x", values(10 * BLOCK))
        with pytest.raises(StorageError, match=r"write .*ENOSPC"):  # launched before the write had failed, or after
            store.read("x").wait()
        with pytest.raises(StorageError, match=r"write .*ENOSPC"):
            store.read("x")
        with pytest.raises(StorageError, match="tensor 'x'"):
            store.flush()


def rushed(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A write that has been launched ends at the worst moment of the `read` that comes after it."""
    done, submit, looked = Flight.done, AsyncFile.submit, set()

    def ends_after_the_look(flight: Flight) -> bool:
        if flight in looked:
            return done(flight)
        looked.add(flight)
        flight.settle()
        return False

    def ends_before_the_launch(file: AsyncFile, is_write: bool, *arguments: Any, **named: Any) -> Flight:
        if named["written"] is not None:
            named["written"].settle()  # its ticket is unknown from now on
        return submit(file, is_write, *arguments, **named)

    if moment == "after the first look":
        monkeypatch.setattr(Flight, "done", ends_after_the_look)
    else:
        monkeypatch.setattr(Flight, "done", lambda flight: False)  # another thread waits for it
        monkeypatch.setattr(AsyncFile, "submit", ends_before_the_launch)


@backends
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("moment", ["after the first look", "before the launch"])
def test_a_read_behind_a_failed_write_has_the_errors_of_the_write_whenever_that_ended(
    backend: str, checksums: bool, moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * BLOCK))  # there are bytes to read, which nobody has written
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store_on(str(path), monkeypatch, backend, checksums=checksums) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limit[1]))
        try:
            store.write("x", values(4 * BLOCK))
            rushed(monkeypatch, moment)
            with pytest.raises(StorageError, match=r"write .*EFBIG"):
                store.read("x").wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@backends
def test_a_read_that_waits_for_a_write_fails_with_it(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.touch()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store_on(str(path), monkeypatch, backend) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limit[1]))
        try:
            x, after, flights = values(400 * BLOCK), 0, []
            # 100 MB, one after the other; then what is beyond the limit; then a read of what is there.
            for is_write, offset in [*[(True, 0)] * 30, (True, 8 << 20), (False, 0)]:
                flights.append(store._file.submit(is_write, offset, x, checksums=None, after=after, subject="x"))
                after = flights[-1].ticket
            for flight in flights:
                flight.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [flight.error for flight in flights[:-2]] == [None] * 30
    for flight in flights[-2:]:
        assert flight.error is not None
        assert (flight.error.operation, flight.error.errno) == ("write", errno.EFBIG)


@backends
def test_a_failing_disk_is_said_with_the_place(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_on("/proc/self/mem", monkeypatch, backend) as store:  # nothing is mapped at its beginning
        with pytest.raises(StorageError, match=r"write 100 bytes at offset 0 for tensor 'x' .*\(EIO\)"):
            store.write("x", values(100)).wait()
        entry = store._entries["x"]
        entry.last_write = None  # as if it had been written
        with pytest.raises(StorageError, match=r"read 100 bytes at offset 0 for tensor 'x' .*\(EIO\).*kernel's log"):
            store.read("x").wait()


@backends
def test_a_later_write_heals_a_name(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with store_on(str(path), monkeypatch, backend) as store:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limit[1]))
        try:
            other = store.write("other", values(BLOCK))
            with pytest.raises(StorageError, match="EFBIG"):
                store.write("x", values(4 * BLOCK)).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        other.wait()
        with pytest.raises(StorageError):
            store.read("x")
        store.write("x", values(4 * BLOCK, seed=1))
        assert torch.equal(store.read("x").wait(), values(4 * BLOCK, seed=1))
        assert torch.equal(store.read("other").wait(), values(BLOCK))
        store.flush()


def damage(store: TensorStore, offset: int) -> None:
    """Flip a bit of the file behind the store's back."""
    with open(f"/proc/self/fd/{store._file.backing.descriptor}", "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("place", [0, BLOCK - 1, 2 * BLOCK + 5, 3 * BLOCK + 76])
def test_a_flipped_bit_is_found_and_its_block_named(store: TensorStore, place: int) -> None:
    store.write("x", values(3 * BLOCK + 77))
    store.write("other", values(100))
    store.flush()
    damage(store, place)
    with pytest.raises(ChecksumError, match="checksum is not that of what was written") as caught:
        store.read("x").wait()
    assert caught.value.offset == place // BLOCK * BLOCK
    assert "tensor 'x'" in str(caught.value)
    assert torch.equal(store.read("other").wait(), values(100))


def test_without_checksums_a_flipped_bit_is_read(tmp_path: Path) -> None:
    with TensorStore(tmp_path, checksums=False) as store:
        store.write("x", values(100)).wait()
        damage(store, 10)
        assert torch.equal(store.read("x").wait(), values(100) ^ torch.eye(100)[10].mul(4).byte())


def test_a_file_that_became_shorter_is_said(store: TensorStore) -> None:
    store.write("x", values(5 * BLOCK)).wait()
    os.ftruncate(store._file.backing.descriptor, 2 * BLOCK)
    with pytest.raises(StorageError, match="the file has become shorter") as caught:
        store.read("x").wait()
    assert caught.value.offset is not None
    assert caught.value.offset >= 2 * BLOCK


def test_a_wait_that_is_too_short_can_be_repeated(store: TensorStore) -> None:
    x = values(400 * BLOCK)

    def wait_twice() -> str:
        """What the first one said."""
        transfer = [store.write("x", x) for _ in range(30)][-1]  # one after the other: 100 MB
        said = ""
        try:
            transfer.wait(timeout=0)
        except TimeoutError as error:
            said = str(error)
        transfer.wait()
        assert transfer.done()
        return said

    # On a busy machine this thread may stand still until all are written, and then has nothing to wait for.
    said = next(filter(None, (wait_twice() for _ in range(10))), "")
    assert "tensor 'x' has not ended within 0 s" in said


def test_close_waits_for_what_is_in_flight(store: TensorStore) -> None:
    transfers = [store.write(f"{n}", values(20 * BLOCK)) for n in range(10)]
    store.close()
    assert all(transfer.done() for transfer in transfers)
    assert torch.equal(transfers[0].wait(), values(20 * BLOCK))
    with pytest.raises(ValueError, match="store is closed"):
        store.read("0")
    store.close()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing: open failed: No such file or directory \(ENOENT\)"):
        TensorStore(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file: open failed: it is not a file that TensorStore.keep\(\) has left"):
        TensorStore(tmp_path / "file")
    with pytest.raises(StorageError) as caught:
        TensorStore("/proc")
    assert caught.value.filename == "/proc"


def test_direct_is_an_error_where_it_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, is_readonly: bool) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(backing, "_try_direct", refuse)
    with pytest.raises(StorageError, match="direct=True, but O_DIRECT is refused there: Invalid argument"):
        TensorStore(tmp_path, direct=True)
    with TensorStore(tmp_path) as store:
        assert "page cache" in repr(store)
        store.write("x", values(100))
        assert torch.equal(store.read("x").wait(), values(100))


@pytest.fixture
def no_more_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """One more file can be opened, and then none: a kernel that refuses an io_uring."""
    _ext.load()  # the compiled library is a file too
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("no_more_files")
def test_threads_take_over_where_io_uring_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no io_uring: Too many open files"):
        TensorStore(tmp_path, backend="io_uring", direct=False)
    with TensorStore(tmp_path, direct=False) as store:
        assert "threads (io_uring is refused: Too many open files)" in repr(store)
        store.write("x", values(100))
        assert torch.equal(store.read("x").wait(), values(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "aio"}, "backend must be one of auto, io_uring, threads, got 'aio'"),
        ({"direct": "yes"}, "direct must be True, False or \"auto\", got 'yes'"),
        ({"block_bytes": 1000}, "block_bytes must be a multiple of 4096 from 4096 to 1073741824, got 1000"),
        ({"block_bytes": 1 << 31}, "from 4096 to 1073741824, got 2147483648"),
        ({"block_bytes": 8192.0}, "from 4096 to 1073741824, got 8192.0"),
        ({"depth": 0}, "depth must be between 1 and 256, got 0"),
        ({"depth": "8"}, "depth must be between 1 and 256, got '8'"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorStore(tmp_path, **options)  # type: ignore[arg-type]


def test_wrong_tensors_are_refused(store: TensorStore) -> None:
    store.write("x", torch.zeros(4, 5))
    with pytest.raises(KeyError, match="nothing was written under 'y'"):
        store.read("y")
    with pytest.raises(ValueError, match=r"'x' holds torch.float32 \[4, 5\], and is read into torch.float64 \[4, 5\]"):
        store.read("x", torch.zeros(4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"not contiguous \(strides \[1, 4\]\)"):
        store.read("x", torch.zeros(5, 4).t())
    with pytest.raises(ValueError, match="'m' is on meta: a store takes CPU tensors"):
        store.write("m", torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match=r"'s' is torch.float32, torch.sparse_coo: a store takes dense"):
        store.write("s", torch.zeros(4).to_sparse())
    with pytest.raises(TypeError, match=r"TensorStore.write: name must be a string, got int 3"):
        store.write(3, torch.zeros(4))  # type: ignore[arg-type]


def test_an_error_survives_pickling() -> None:
    error = ChecksumError(errno.EBADMSG, "/nvme", "read", offset=4096, num_bytes=100, subject="tensor 'x'", cause="bad")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ChecksumError
    assert str(copy) == str(error)
    assert (copy.errno, copy.offset, copy.num_bytes, copy.filename) == (errno.EBADMSG, 4096, 100, "/nvme")


# ---- kept files


def test_a_kept_file_holds_what_the_store_held(store: TensorStore, tmp_path: Path) -> None:
    written = {
        "a": torch.randn(3, 700).bfloat16(),
        "b": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "ä/1": values(30_000),
    }
    for name, tensor in written.items():
        store.write(name, torch.zeros(9 * BLOCK))
        store.write(name, tensor)
    store.keep(tmp_path / "kept")
    assert os.listdir(tmp_path) == ["kept"]
    with pytest.raises(ValueError, match="store is closed"):
        store.read("a")
    for backend, direct in KINDS:
        if backend == "io_uring" and ring_refusal():
            continue
        with TensorStore(tmp_path / "kept", backend=backend, direct=direct, block_bytes=1 << 20) as kept:
            assert kept.names() == list(written)
            for name, tensor in written.items():
                found = kept.read(name).wait()
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found, tensor)
            for call in (lambda kept=kept: kept.write("a", written["a"]), lambda kept=kept: kept.delete("a")):
                with pytest.raises(ValueError, match="kept: a kept file can only be read"):
                    call()


def test_a_name_that_exists_is_not_overwritten(store: TensorStore, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    store.write("x", values(100))
    with pytest.raises(StorageError, match=r"keep failed: File exists \(EEXIST\)"):
        store.keep(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
    assert torch.equal(store.read("x").wait(), values(100))
    store.write("y", values(BLOCK))  # over the index
    store.keep(tmp_path / "other")
    with TensorStore(tmp_path / "other") as kept:
        assert torch.equal(kept.read("y").wait(), values(BLOCK))


def test_damage_of_a_kept_file_is_found(store: TensorStore, tmp_path: Path) -> None:
    store.write("x", values(3 * BLOCK)).wait()
    store.keep(tmp_path / "kept")
    whole = bytearray((tmp_path / "kept").read_bytes())
    for place, message in (
        (2 * BLOCK + 9, f"offset {2 * BLOCK} for tensor 'x'"),
        (3 * BLOCK + 5, "the index is not what"),
    ):
        damaged = bytes(whole[:place]) + bytes([whole[place] ^ 1]) + bytes(whole[place + 1 :])
        (tmp_path / "kept").write_bytes(damaged)
        with pytest.raises(ChecksumError, match=message), TensorStore(tmp_path / "kept") as kept:
            kept.read("x").wait()
    (tmp_path / "kept").write_bytes(whole[:-1])
    with pytest.raises(StorageError, match=r"not a file that TensorStore\.keep"):
        TensorStore(tmp_path / "kept")


def test_a_store_with_a_failed_write_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with store_on("/dev/full", monkeypatch, "threads") as store:
        store.write("x", values(100))
        with pytest.raises(StorageError, match="ENOSPC"):
            store.keep(tmp_path / "kept")
    assert os.listdir(tmp_path) == []


# ---- the stream


def test_a_stream_changes_every_tensor_as_work_in_memory_does(store: TensorStore) -> None:
    sizes = [5, 0, 3 * BLOCK + 1, 17, BLOCK, 1, 2 * BLOCK, 9]
    items = [("m0", "v0"), "m1", ("m2", "v2", "g2"), "m3", ("m4",), ("m5", "v5"), "m6", "m7"]
    expected = {}
    for item, size in zip(items, sizes, strict=True):
        for name in (item,) if isinstance(item, str) else item:
            expected[name] = torch.randn(size)
            store.write(name, expected[name])

    def step(i: int, tensors: dict[str, torch.Tensor]) -> None:
        assert tuple(tensors) == ((items[i],) if isinstance(items[i], str) else items[i])
        for name, tensor in tensors.items():
            tensor.mul_(0.9).add_(len(name) + i)

    for _ in range(3):
        stream(store, items, step)
        for i, item in enumerate(items):
            step(i, {name: expected[name] for name in ((item,) if isinstance(item, str) else item)})
    for name, value in expected.items():
        assert torch.equal(store.read(name).wait(), value)


def test_a_stream_reads_the_next_item_and_writes_the_last_one_during_work(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        store.write(f"{n}", torch.zeros(10)).wait()
    log: list[str] = []

    class Logged:
        def __init__(self, name: str, transfer: Transfer) -> None:
            log.append(name)
            self.name, self.transfer = name, transfer

        def wait(self) -> torch.Tensor:
            log.append(f"wait-{self.name}")
            return self.transfer.wait()

    def logged(letter: str, method: Any) -> Any:
        return lambda self, name, *tensors: Logged(letter + name, method(self, name, *tensors))

    monkeypatch.setattr(TensorStore, "read", logged("r", TensorStore.read))
    monkeypatch.setattr(TensorStore, "write", logged("w", TensorStore.write))
    stream(store, [str(n) for n in range(5)], lambda i, tensors: log.append(f"work{i}"))
    # r(i+1) and w(i-1) are launched before work(i) and waited for after it; r(i+1) needs the buffer of w(i-2).
    assert " ".join(log).split(" wait-r") == [
        "r0",
        "0 r1 work0 w0",
        "1 r2 work1 w1",
        "2 wait-w0 r3 work2 w2",
        "3 wait-w1 r4 work3 w3",
        "4 work4 w4 wait-w2 wait-w3 wait-w4",
    ]


def test_a_stream_takes_three_buffers_of_the_largest_item_and_keeps_them(store: TensorStore) -> None:
    for n in range(8):
        store.write(f"{n}", torch.zeros(1000 * n))
    seen = set()

    def work(i: int, tensors: dict[str, torch.Tensor]) -> None:
        seen.update(tensor.untyped_storage().data_ptr() for tensor in tensors.values())

    items = [str(n) for n in range(1, 8)]
    stream(store, items, work)
    stream(store, items, work)
    assert len(seen) == 3
    assert [buffer.nbytes for buffer in store.buffers(3, 1)] == [28672] * 3  # 7000 floats in whole pages


def test_a_stream_writes_only_what_it_is_told_to(store: TensorStore) -> None:
    for name in ("g0", "m0", "g1", "m1"):
        store.write(name, torch.zeros(10))
    stream(
        store,
        [("g0", "m0"), ("g1", "m1")],
        lambda i, tensors: [tensor.add_(1) for tensor in tensors.values()],
        written=lambda name: name.startswith("m"),
    )
    assert [store.read(name).wait().sum().item() for name in ("g0", "m0", "g1", "m1")] == [0.0, 10.0, 0.0, 10.0]


def test_an_error_in_work_leaves_earlier_items_written_and_later_ones_as_they_were(store: TensorStore) -> None:
    for n in range(6):
        store.write(f"{n}", torch.zeros(3000))

    def work(i: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors[str(i)].add_(1)
        if i == 3:
            raise RuntimeError("work failed")

    with pytest.raises(RuntimeError, match="work failed"):
        stream(store, [str(n) for n in range(6)], work)
    assert [store.read(f"{n}").wait().mean().item() for n in range(6)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    stream(store, ["3", "4", "5"], lambda i, tensors: None)  # nothing is stuck


def test_a_flipped_bit_ends_a_stream(store: TensorStore) -> None:
    for n in range(4):
        store.write(f"{n}", torch.zeros(1024)).wait()
    damage(store, 2 * 4096)
    done = []
    with pytest.raises(ChecksumError, match="tensor '2'"):
        stream(store, [str(n) for n in range(4)], lambda i, tensors: done.append(i))
    assert done == [0, 1]


def test_a_stream_refuses_a_name_in_two_items(store: TensorStore) -> None:
    store.write("x", torch.zeros(1))
    with pytest.raises(ValueError, match="a name may be in one item only; 'x' is in several"):
        stream(store, ["x", ("x",)], lambda i, tensors: None)
    stream(store, [], lambda i, tensors: None)


def test_the_c_interface_reports_a_refused_ring() -> None:
    number = ctypes.c_int64()
    assert not library().file_create(0, 0, 1, 1 << 30, 4096, number)  # more entries than any kernel allows
    assert number.value == errno.EINVAL
