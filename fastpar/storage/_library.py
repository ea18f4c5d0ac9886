"""The C functions of asynchronous files (csrc/runtime/c_api.h), through ctypes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from fastpar import _ext

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "file_create": (c_void_p, [c_int, c_int, c_int, c_int, c_int64, POINTER(c_int64)]),
    "file_destroy": (None, [c_void_p]),
    "file_submit": (c_uint64, [c_void_p, c_int, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_uint64]),
    "file_wait": (c_int, [c_void_p, c_uint64, c_double, POINTER(c_int64)]),
    "file_reserve": (c_int, [c_int, c_int64, c_int64]),
    "checksum": (c_uint32, [c_void_p, c_int64]),
}


class Library:
    """The functions as attributes, without their prefix."""

    def __init__(self, path: str) -> None:
        handle = ctypes.CDLL(path)
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(handle, f"fastpar_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the attributes are set above
        raise AttributeError(name)


@functools.cache
def library() -> Library:
    """Raises ImportError where fastpar's compiled library is missing."""
    return Library(str(_ext.load()))
