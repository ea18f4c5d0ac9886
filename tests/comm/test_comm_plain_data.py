"""Plain values as bytes: what comes back, what is refused, and that no bytes whatever do harm."""

from __future__ import annotations

import collections
import enum
import math
import random

import pytest
import torch

from fastpar.comm.plain_data import PlainDataError, decode, encode

VALUES = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 3**400),
    *(0.0, -0.0, math.inf, 1j, "", "é\ud800", b"", b"\0\xff", [], (), {}, set(), frozenset()),
    *(torch.Size([]), torch.Size([2, 0, 5]), slice(1, None, 2), range(3)),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda", 3)),
    [1, (2.5, "three"), {"four": [None, {5: b"6"}], (7, "8"): {9, frozenset({10})}}, [True, 1, 1.0]],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value):
    found = decode(encode(value))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_nan_comes_back_bit_for_bit():
    assert math.isnan(decode(encode([math.nan]))[0])
    assert encode(decode(encode(-math.nan))) == encode(-math.nan)


Point = collections.namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Name(str):
    pass


@pytest.mark.parametrize(
    "value", [Point(1, 2), Color.RED, Name("x"), collections.OrderedDict(), torch.zeros(1), object(), print, int]
)
def test_an_instance_of_another_type_is_refused_where_it_is(value):
    with pytest.raises(TypeError, match=r"value\[1\]\[0\] is a .*; messages between ranks hold None, bool"):
        encode([0, (value,)])


def test_a_value_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="more than 64 levels deep, or holds itself"):
        encode(value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cut off"),
        (b"i\0", "cut off"),
        (b"NN", "1 bytes behind the value"),
        (b"?", "unknown kind"),
        (b"l\xff\xff\xff\xff", "do not fit"),
        (b"s\xff\xff\xff\xff", "cut off"),
        (b"s\x01\0\0\0\xff", "not a value"),
        (b"d\x01\0\0\0l\0\0\0\0N", "not a value"),  # a list as a key
        (b"d\x02\0\0\0NNNN", "a key twice"),
        (b"e\x02\0\0\0NN", "an element twice"),
        (b"S\x01\0\0\0N", "holds ints"),
        (b"D\x03\0\0\0abc", "no dtype 'abc'"),
        (b"V\x03\0\0\0abc", "not a value"),
        (b"rNNN", "not a value"),
        (b"l\x01\0\0\0" * 100 + b"N", "more than 64 levels"),
        (b"\x80\x04\x95", "unknown kind"),  # as a pickle begins
    ],
)
def test_bytes_of_somebody_else_are_a_typed_error(data, words):
    with pytest.raises(PlainDataError, match=words):
        decode(data)


def test_any_bytes_are_a_value_or_a_typed_error():
    draw = random.Random(3)
    alphabet = b"NFTiIfxsbDVltSezdcr\0\0\0\0\1\2\xff"
    whole = encode(VALUES[-1])
    for _ in range(20_000):
        if draw.random() < 0.5:
            data = bytes(draw.choice(alphabet) for _ in range(draw.randrange(40)))
        else:
            altered = bytearray(whole)
            altered[draw.randrange(len(altered))] = draw.randrange(256)
            data = bytes(altered[: draw.randrange(len(altered) + 1)])
        try:
            encode(decode(data))
        except PlainDataError:
            continue
