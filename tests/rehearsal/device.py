"""A CUDA device of host memory, as torch.cuda shows it: importing this puts it in place, in a process that
`tests.rehearsal.build.environment` has started.

Values are real: what has no kernel here runs on the CPU (device.cpp), Triton's kernels in its interpreter, and the
compiled kernels for CUDA are stood in for by those for the CPU. There are two devices: one can be the wrong one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.rehearsal import torch_attention

NUM_DEVICES = 2
CAPABILITY = [9, 0]  # a test may write another one
MULTIPROCESSORS = 132
waits: list[Any] = []  # functions that are told of every wait of the host for the device
looks: list[Any] = []  # and of every look whether the device is done, which it is

_host = torch.ops.rehearsal


def on_host(x: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    return x if x.device.type == "cpu" else _host.on_host(x.detach())


def _look() -> bool:
    for tell in looks:
        tell()
    return True


def _note_wait(what: str) -> None:
    for tell in waits:
        tell(what)


# ---- streams and events: nothing runs beside anything ----------------------------------------------------------------


class Event:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return _look()

    def synchronize(self) -> None:
        _note_wait("Event.synchronize")


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = torch.device("cuda", torch.cuda._utils._get_device_index(device, optional=True))
        self.priority, self.cuda_stream = priority, id(self)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return _look()

    def synchronize(self) -> None:
        _note_wait("Stream.synchronize")


_default_streams: dict[int, Stream] = {}
_current_streams: list[Stream] = []


def _current_stream(device: Any = None) -> Stream:
    if _current_streams:
        return _current_streams[-1]
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return _default_streams.setdefault(index, Stream(index))


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    _current_streams.append(stream)
    try:
        yield
    finally:
        _current_streams.pop()


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _run_interpreted(original: Any) -> Any:
    """Launches of Triton kernels: checked as a device would, and interpreted on the host's memory."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        devices = {x.device for x in tensors}
        current = torch.device("cuda", torch.cuda.current_device())
        if devices != {current}:
            raise AssertionError(f"{self.__name__}: tensors on {devices}, while the current device is {current}")
        with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of lanes that are masked off
            args, kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    return run


def _stand_in(library: torch.library.Library, name: str) -> None:
    """The CPU's kernel in place of the compiled one for CUDA."""
    op = torch._C._jit_get_operation(name)[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        device = _one_device(name, _tensors((args, kwargs)))
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, on_host, (args, kwargs))
            return tree_map_only(Tensor, lambda x: x.to(device), op(*args, **kwargs))

    library.impl(name.removeprefix("fastpar::"), run, "CUDA")


def _is_compiled(name: str) -> bool:
    """Whether an op's kernel for CUDA is of the library: those of Triton are registered by what has been imported."""
    lines = torch._C._dispatch_dump(name).splitlines()
    return not any(line.startswith("CUDA:") and "library.py" in line for line in lines)


def _one_device(name: str, tensors: list[Tensor]) -> torch.device:
    devices = {x.device for x in tensors}
    if len(devices) != 1:
        raise AssertionError(f"{name}: tensors on {devices}")
    return devices.pop()


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


# ---- putting it in place ---------------------------------------------------------------------------------------------


def _install() -> None:
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: NUM_DEVICES
    cuda.current_device = lambda: _host.exchange_device(-1)
    cuda.set_device = lambda device: _host.exchange_device(cuda._utils._get_device_index(device))
    cuda._exchange_device = cuda._maybe_exchange_device = _host.exchange_device
    cuda.get_device_capability = lambda device=None: tuple(CAPABILITY)
    cuda.get_device_name = lambda device=None: "host memory"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS, name="host memory", total_memory=1 << 30, warp_size=32
    )
    cuda.memory_allocated = lambda device=None: _host.allocated()
    cuda.is_current_stream_capturing = lambda: False
    cuda.manual_seed_all = cuda.manual_seed = lambda seed: None
    cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, device="cuda": None
    cuda.synchronize = lambda device=None: _note_wait("synchronize")
    cuda.Stream, cuda.Event, cuda.stream, cuda.current_stream = Stream, Event, _on_stream, _current_stream
    cuda.default_stream = _current_stream
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment,method-assign]
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        with _disable_current_modes():
            _host.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.run = _run_interpreted(InterpretedFunction.run)
    from fastpar import _ext

    _ext.load()
    library = torch.library.Library("fastpar", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that a kernel is replaced
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            if name.startswith("fastpar::") and _is_compiled(name):
                _stand_in(library, name)
    _kept.extend((library, torch_attention.install(on_host, _one_device)))


_kept: list[Any] = []
_install()
