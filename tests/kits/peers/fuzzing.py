"""Fuzzer for decoders in Python: inputs of a corpus are changed in many ways and passed to the decoder.

A target may raise the refusals that it declares, but no other exception, and may allocate no more memory than it is
given. The fuzzer uses no coverage. Where inputs are msgpack or JSON, their values are changed and encoded again too, so
that code after the first check is reached. The same seed gives the same inputs.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

MAX_BYTES = 1 << 20
"""Per input."""
_NUMBERS = (0, 1, 2, 7, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 32, (1 << 50) + 1, (1 << 62), (1 << 63) - 1)
_HEADERS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6)),
    *(b"\xc1", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x91" * 64, b"[" * 64, b"9" * 40, b"\xed\xa0\x80", b"-"),
)


@dataclass(frozen=True)
class Target:
    """Target of the fuzzer.

    Args:
        name: name of the target.
        corpus: valid inputs.
        run: takes bytes; raises one of `refusals` or nothing; asserts its own checks.
        refusals: exceptions that it may raise.
    """

    name: str
    corpus: tuple[bytes, ...]
    run: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = ()


class FindingError(AssertionError):
    """Bytes that a target fails on."""


def fuzz(target: Target, seed: int, num_inputs: int = 0, seconds: float = 0.0) -> int:
    """Passes the corpus, then `num_inputs` changed inputs, or as many as `seconds` allow. Returns their number.

    Raises:
        FindingError: with the bytes; the cause is the exception.
    """
    random = Random(f"{seed} {target.name}")
    until_s = time.monotonic() + seconds
    for data in target.corpus:
        _hand(target, data, ())
    count = 0
    while count < num_inputs or time.monotonic() < until_s:
        _hand(target, changed(random, target.corpus), target.refusals)
        count += 1
    return count


def _hand(target: Target, data: bytes, refusals: tuple[type[Exception], ...]) -> None:
    try:
        target.run(data)
    except refusals:
        pass
    except BaseException as error:
        raise FindingError(f"{target.name}: {type(error).__name__}: {error}: {data[:4096].hex()}") from error


@contextlib.contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Limits this process to `num_bytes` more memory than now; beyond that, `MemoryError`."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def changed(random: Random, corpus: tuple[bytes, ...]) -> bytes:
    """An input of the corpus with changes."""
    data = random.choice(corpus)
    if random.random() < 0.5:
        data = _other_value(random, data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        # Repeated changes could grow to gigabytes, so each result is cut.
        data = random.choice(_CHANGES)(random, data, corpus)[:MAX_BYTES]
    return data[:MAX_BYTES]


def _place(random: Random, data: bytes) -> int:
    return random.randrange(len(data) + 1)


def _flip(random: Random, data: bytes, corpus: tuple[bytes, ...]) -> bytes:
    if not data:
        return b"\0"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _write(random: Random, data: bytes, corpus: tuple[bytes, ...]) -> bytes:
    at = _place(random, data)
    piece = random.choice((*_HEADERS, random.randbytes(random.choice((1, 2, 8)))))
    return data[:at] + piece + data[at + random.choice((0, len(piece))) :]


def _cut(random: Random, data: bytes, corpus: tuple[bytes, ...]) -> bytes:
    first, last = sorted((_place(random, data), _place(random, data)))
    return random.choice((data[:first], data[first:], data[:first] + data[last:]))


def _repeat(random: Random, data: bytes, corpus: tuple[bytes, ...]) -> bytes:
    first, last = sorted((_place(random, data), _place(random, data)))
    times = random.choice((2, 3, 64))
    if last > first:
        times = min(times, MAX_BYTES // (last - first) + 1)
    return data[:first] + data[first:last] * times + data[last:]


def _splice(random: Random, data: bytes, corpus: tuple[bytes, ...]) -> bytes:
    other = random.choice(corpus)
    return data[: _place(random, data)] + other[_place(random, other) :]


_CHANGES = (_flip, _write, _cut, _repeat, _splice)


# Values.


def _other_value(random: Random, data: bytes) -> bytes:
    """The same document with one value changed; other bytes as they are."""
    for codec in (msgspec.json, msgspec.msgpack):
        try:
            value = codec.decode(data)
            encoded: bytes = codec.encode(other_value(random, value))
            return encoded
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, TypeError):
            continue
    return data


def other_value(random: Random, value: Any) -> Any:
    """A plain value with one part replaced."""
    if isinstance(value, list | dict) and value and random.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = random.choice(list(keys))
        found = value.copy()
        fate = random.random()
        if fate < 0.1:
            del found[key]
        elif fate < 0.2 and isinstance(value, list):
            found[key:key] = [value[key]] * random.choice((1, 2, 300))
        else:
            found[key] = other_value(random, value[key])
        return found
    return _other_leaf(random, value)


def _other_leaf(random: Random, value: Any) -> Any:
    kind = random.random()
    if isinstance(value, bool | None) or kind < 0.2:
        return random.choice((None, True, -1, 0.5, math.nan, math.inf, "", "x", b"", [], {}, [[]] * 3, "\0\n\x7f"))
    if isinstance(value, int):
        number: int = random.choice((value + 1, value - 1, -value, value * 2, *_NUMBERS))
        return number
    if isinstance(value, float):
        return random.choice((0.0, -value, value * 1e300, 1e-300, math.nan, math.inf))
    if isinstance(value, str):
        return random.choice(("", value + "x", value[::-1], value * 300, value + "\n", "\u202e" + value))
    if isinstance(value, bytes):
        return _numbers_changed(random, value) if kind < 0.7 else _cut(random, value, (value,))
    return value


def _numbers_changed(random: Random, data: bytes) -> bytes:
    """Changes one number of a column of eight-byte numbers."""
    if len(data) < 8:
        return random.randbytes(8)
    at = random.randrange(len(data) // 8) * 8
    number = random.choice((-1, *_NUMBERS)) % (1 << 64)
    return data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
