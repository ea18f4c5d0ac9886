"""Plain Python values as bytes, for messages between ranks: what is decoded can only ever be data.

    note = encode({"step": 3, "shape": torch.Size([2, 5]), "dtype": torch.bfloat16})
    decode(note) == {"step": 3, "shape": torch.Size([2, 5]), "dtype": torch.bfloat16}

Note: trust between ranks. Whoever can join a job's rendezvous, or is the same user on a host, can be a rank of it and
send what it likes. A rank believes its peers' numbers, that is what training together means; but no message may run
code in it, crash it, or make it take memory beyond a small multiple of the message's size. So messages are not
pickled. Everything read from another process is checked before it is used, and what is wrong with it is a typed error.

A value is a byte that says what it is, and its content:

    None, False, True                      nothing
    int                                    8 bytes; a larger one its length and its bytes (two's complement)
    float, complex                         8 and 16 bytes: bit for bit, NaN too
    str, bytes, torch.dtype, torch.device  length, bytes
    list, tuple, set, frozenset, Size      number of items, items
    dict                                   number of entries, keys and values in turn, in order
    slice, range                           three items

Lengths and numbers are 4 bytes, all little-endian. Types are exactly these: an instance of a subclass (a named tuple,
an enum, an array's scalar) is refused, because what comes out would be something else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastpar.comm.errors import CommError

MAX_DEPTH = 64
_INT, _LENGTH, _FLOAT, _COMPLEX = struct.Struct("<q"), struct.Struct("<I"), struct.Struct("<d"), struct.Struct("<dd")
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_CONSTANTS: dict[int, Any] = {ord("N"): None, ord("F"): False, ord("T"): True}
_SEQUENCES: dict[type, int] = {
    list: ord("l"),
    tuple: ord("t"),
    torch.Size: ord("S"),
    set: ord("e"),
    frozenset: ord("z"),
}
_MAKERS: dict[int, Callable[[Any], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_TRIPLES: dict[type, int] = {slice: ord("c"), range: ord("r")}
_TRIPLE_MAKERS: dict[int, Callable[..., Any]] = {tag: kind for kind, tag in _TRIPLES.items()}
_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, slice, range, torch.Size, "
    "torch.dtype and torch.device"
)


class PlainDataError(CommError):
    """Bytes that are not what `encode` writes: cut off, altered, or of somebody else."""


def encode(value: Any) -> bytes:
    """The value as bytes, the same for equal values in the same order.

    Raises TypeError that names where an instance of another type is, ValueError for more than 64 levels (or a value
    that holds itself).
    """
    out = bytearray()
    _write(out, value, "value", 0)
    return bytes(out)


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Raises PlainDataError for anything that `encode` does not write."""
    reader = PlainDataReader(data)
    try:
        value = reader.value(0)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # of the types' own constructors
        if isinstance(error, PlainDataError):
            raise
        raise PlainDataError(f"not a value that a rank has encoded: {error}") from error
    if reader.at != len(data):
        raise PlainDataError(f"{len(data) - reader.at} bytes behind the value")
    return value


def _write(out: bytearray, value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is more than {MAX_DEPTH} levels deep, or holds itself")
    kind = type(value)
    if value is None or kind is bool:
        out.append(next(tag for tag, constant in _CONSTANTS.items() if constant is value))
    elif kind is int:
        _write_int(out, value)
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind is complex:
        out += b"x" + _COMPLEX.pack(value.real, value.imag)
    elif kind is str:
        _write_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _write_bytes(out, b"b", value)
    elif kind is torch.dtype:
        _write_bytes(out, b"D", str(value).encode())
    elif kind is torch.device:
        _write_bytes(out, b"V", str(value).encode())
    elif kind is dict:
        _write_items(out, ord("d"), len(value), (x for item in value.items() for x in item), where, depth)
    elif kind in _SEQUENCES:
        _write_items(out, _SEQUENCES[kind], len(value), value, where, depth)
    elif kind in _TRIPLES:
        out.append(_TRIPLES[kind])
        for name in ("start", "stop", "step"):
            _write(out, getattr(value, name), f"{where}.{name}", depth + 1)
    else:
        raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}; messages between ranks hold {_ALLOWED}")


def _write_int(out: bytearray, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += b"i" + _INT.pack(value)
    else:
        _write_bytes(out, b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_bytes(out: bytearray, tag: bytes, content: bytes) -> None:
    out += tag + _LENGTH.pack(len(content)) + content


def _write_items(out: bytearray, tag: int, count: int, items: Iterable[Any], where: str, depth: int) -> None:
    out.append(tag)
    out += _LENGTH.pack(count)
    for index, item in enumerate(items):
        _write(out, item, f"{where}[{index}]", depth + 1)


class PlainDataReader:
    """A place in the bytes. Nothing is made of a length before that many bytes are known to be there."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = bytes(data), 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise PlainDataError(f"more than {MAX_DEPTH} levels deep")
        tag = self._take(1)[0]
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _MAKERS:
            return self._collection(tag, depth)
        if tag in _TRIPLE_MAKERS:
            return _TRIPLE_MAKERS[tag](*[self.value(depth + 1) for _ in range(3)])
        if tag == ord("d"):
            return self._dict(depth)
        if tag == ord("i"):
            return _INT.unpack(self._take(_INT.size))[0]
        if tag == ord("f"):
            return _FLOAT.unpack(self._take(_FLOAT.size))[0]
        if tag == ord("x"):
            return complex(*_COMPLEX.unpack(self._take(_COMPLEX.size)))
        return self._from_bytes(tag)

    def _from_bytes(self, tag: int) -> Any:
        if tag not in b"IsbDV":
            raise PlainDataError(f"unknown kind {tag} at byte {self.at - 1}")
        content = self._take(self._length())
        if tag == ord("I"):
            return int.from_bytes(content, "little", signed=True)
        if tag == ord("s"):
            return content.decode("utf-8", "surrogatepass")
        if tag == ord("b"):
            return content
        name = content.decode("ascii")
        if tag == ord("V"):
            return torch.device(name)
        if name not in _DTYPES:
            raise PlainDataError(f"this torch has no dtype {name!r}")
        return _DTYPES[name]

    def _collection(self, tag: int, depth: int) -> Any:
        count = self._count(1)
        items = [self.value(depth + 1) for _ in range(count)]
        if tag == _SEQUENCES[torch.Size] and not all(type(item) is int for item in items):
            raise PlainDataError("a torch.Size holds ints")
        made = _MAKERS[tag](items)
        if len(made) != count:
            raise PlainDataError("an element twice in a set")
        return made

    def _dict(self, depth: int) -> dict[Any, Any]:
        count = self._count(2)
        made = {}
        for _ in range(count):
            key = self.value(depth + 1)
            made[key] = self.value(depth + 1)
        if len(made) != count:
            raise PlainDataError("a key twice in a dict")
        return made

    def _count(self, bytes_each: int) -> int:
        """A number of items, each of which takes at least so many bytes."""
        count = self._length()
        if count * bytes_each > len(self._data) - self.at:
            raise PlainDataError(f"{count} items do not fit into the {len(self._data) - self.at} bytes that are left")
        return count

    def _length(self) -> int:
        length: int = _LENGTH.unpack(self._take(_LENGTH.size))[0]
        return length

    def _take(self, count: int) -> bytes:
        taken = self._data[self.at : self.at + count]
        if len(taken) != count:
            raise PlainDataError(f"cut off: {count} bytes expected at byte {self.at}, {len(taken)} are there")
        self.at += count
        return taken
