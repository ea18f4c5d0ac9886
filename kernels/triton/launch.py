"""How every kernel here is launched: on the device of its tensors, which need not be the current one.

Triton takes the stream of the current device. A launch for tensors of another would read memory that this stream does
not order, or that the device does not map. tests/gpu/test_triton_helpers.py knows that nothing is launched otherwise.

Note: kept launches. Of Triton's own way from a call to a compiled kernel most is Python that makes a key out of the
arguments by name. `_Launches` asks Triton's own function what each argument specialises the kernel for (dtype,
alignment, one, width), so that its key tells apart whatever Triton's does, and more where an argument is declared with
a type, and keeps the kernel that Triton launched. Whatever Triton looks at besides is in the key or is looked at again:
the device, knobs, hooks, globals.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import torch
from triton import __version__ as triton_version  # type: ignore[attr-defined]
from triton import knobs  # type: ignore[attr-defined]
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Whose JITFunction.run does what is done here.
IS_KNOWN = triton_version.split(".")[:2] in (["3", "6"], ["3", "7"])
if IS_KNOWN:
    from triton.runtime.jit import native_specialize_impl


# triton.cdiv and triton.next_power_of_2 are functions of Triton's compiler as well, and take a microsecond and a half.


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def is_capturing(device: torch.device) -> bool:
    """Whether what is put on the device's current stream becomes part of a CUDA graph. torch asks that of the current
    device, which need not be this one."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def launch(kernel: Any, programs: int | tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """kernel[programs](*arguments, **options); `programs` is a number of them or a grid."""
    grid = (programs,) if isinstance(programs, int) else programs
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # to enter it again takes 2 us
        _run_kernel(kernel, grid, arguments, options)
        return
    with torch.cuda.device(device):
        _run_kernel(kernel, grid, arguments, options)


def launch_named(kernel: Any, programs: int, device: torch.device, arguments: Mapping[str, Any]) -> None:
    """The same with all arguments by name."""
    names, others = _launches_of(kernel).order(tuple(arguments)) if type(kernel) is JITFunction else ((), arguments)
    options = {name: arguments[name] for name in others}
    launch(kernel, programs, device, *[arguments[name] for name in names], **options)


class _Launches:
    """What launches of one kernel need, apart from their arguments. See `kept launches` above."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        found = [p for p in kernel.params if not p.is_constexpr]
        leads = found == kernel.params[: len(found)]
        self.is_kept = IS_KNOWN and leads and not kernel.launch_metadata
        self.names = tuple(p.name for p in found) if leads else ()
        self.is_const = tuple(p.is_const for p in found)
        self.specialize = tuple(not p.do_not_specialize for p in found)
        self.align = tuple(not p.do_not_specialize_on_alignment for p in found)
        self.compiled: dict[Any, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self.orders: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def order(self, given: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(the arguments that have a place, the others) of arguments by name."""
        found = self.orders.get(given)
        if found is None:
            names = self.names if set(self.names) <= set(given) else ()  # Triton says what is missing
            found = self.orders[given] = names, tuple(name for name in given if name not in names)
        return found

    def run(self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernel, runtime = self.kernel, knobs.runtime
        is_watched = (
            kernel.pre_run_hooks
            or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
            or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
            or getattr(runtime, "add_stages_inspection_hook", None)
        )
        if is_watched or len(arguments) != len(self.names):
            kernel[grid](*arguments, **options)
            return
        index = driver.active.get_current_device()
        kinds = map(
            native_specialize_impl,
            repeat(kernel.device_caches[index][3]),  # the backend
            arguments,
            self.is_const,
            self.specialize,
            self.align,
        )
        modes = index, runtime.debug, knobs.compilation.instrumentation_mode
        values = options.values()
        key = (modes, *kinds, *options, *values, *map(type, values))  # True, 1 and 1.0 are equal, and other constants
        kept = self.compiled.get(key)
        if kept is None or (kept[2] and any(found.get(name) is not value for found, name, value in kept[2])):
            compiled = kernel[grid](*arguments, **options)
            if compiled is not None:  # a hook of Triton's may say that it is not to run
                self.compiled[key] = compiled, self._constants(options), self._globals()
            return
        compiled, constants, _ = kept
        compiled.run(
            *grid,
            *_ONES[len(grid) :],
            driver.active.get_current_stream(index),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *constants,
        )

    def _constants(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """What Triton passes for parameters that are constants of the compiled kernel."""
        parameters = list(self.kernel.signature.parameters.items())[len(self.names) :]
        return tuple(options.get(name, parameter.default) for name, parameter in parameters)

    def _globals(self) -> tuple[Any, ...]:
        """The globals that the compiled kernel read: a kernel whose globals have changed is an error of Triton's."""
        used = self.kernel.used_global_vals.items()
        return tuple((found, name, found.get(name)) for (name, _), (_, found) in used)


_ONES = (1, 1, 1)  # of the dims that a grid leaves out
_LAUNCHES: dict[int, _Launches] = {}  # by id: a kernel's hash is Python; an entry keeps its kernel alive


def _launches_of(kernel: Any) -> _Launches:
    return _LAUNCHES.get(id(kernel)) or _LAUNCHES.setdefault(id(kernel), _Launches(kernel))


def _run_kernel(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    launches = _launches_of(kernel) if type(kernel) is JITFunction else None
    if launches is not None and launches.is_kept:
        launches.run(grid, arguments, options)
    else:
        kernel[grid](*arguments, **options)
