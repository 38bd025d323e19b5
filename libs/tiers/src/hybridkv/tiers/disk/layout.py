"""Where things lie: pages, addresses, and what a record takes up. Pure arithmetic; FORMAT.md describes the bytes."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Every header, record and write begins and ends on a multiple of it, which is what O_DIRECT needs everywhere."""

SEGMENT_HEAD_BYTES = 2 * PAGE_BYTES
"""Header page and seal page of a segment; the first record begins behind them."""

ADDRESS_BITS = 32
LARGEST_SEGMENT_BYTES = 1 << ADDRESS_BITS
"""An address is the segment's number times this, plus an offset in its file. It does not depend on the configured size
of segments, so a store that is opened with another capacity keeps what it holds."""

LARGEST_NUMBER = (1 << 31) - 1
"""Addresses fit into 63 bits. At a segment a second it takes 68 years to get there."""

LARGEST_KEY_BYTES = 256


def round_up(num_bytes: int, step: int = PAGE_BYTES) -> int:
    return -(-num_bytes // step) * step


def record_bytes(payload_bytes: int) -> int:
    """What a record takes up in its segment: a header page and the payload in whole pages."""
    return PAGE_BYTES + round_up(payload_bytes)


def address_of(number: int, offset: int) -> int:
    return (number << ADDRESS_BITS) + offset


def number_of(address: int) -> int:
    return address >> ADDRESS_BITS


def offset_of(address: int) -> int:
    return address & (LARGEST_SEGMENT_BYTES - 1)
