"""Messages between engines about chunks, in the requests and replies of `hybridkv.peers`.

The sender has the secret but may be faulty, so every size is limited. An invalid message raises `WireError`, which ends
the connection. Lists are packed columns of numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from hybridkv.hashing import Fingerprint
from hybridkv.peers.wire import CloseReason, WireError, pack_columns, unpack_columns
from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.peer.options import MAX_EXTENTS, MAX_KEYS
from hybridkv.tiers.peer.places import MAX_OFFSET

PROTOCOL = 1
MAX_KEY_BYTES = 256
MAX_DESCRIPTION_BYTES = 1 << 20
DIGEST_BYTES = 16


class PeerDescription(msgspec.Struct, frozen=True, array_like=True):
    """One process of an engine: its scheduler, or one of its ranks.

    Args:
        protocol: version of these messages.
        rank: -1 for the scheduler.
        namespace: digest of the fingerprint.
        fingerprint: encoded fingerprint, to name a difference; empty if this process does not have it.
    """

    protocol: int
    rank: int
    namespace: bytes
    fingerprint: bytes = b""


class _PeerMessageBase(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class Find(_PeerMessageBase, frozen=True, tag="find"):
    """Lookup of keys. Sent to a scheduler."""

    keys: bytes
    ends: bytes


class FindReply(_PeerMessageBase, frozen=True, tag="found"):
    """Reply to `Find`: key i has `counts[i]` extents, 0 if it is missing. Found chunks are leased for `lease_s`."""

    counts: bytes
    offsets: bytes
    sizes: bytes
    lease_s: float


class EndLeases(_PeerMessageBase, frozen=True, tag="give_up"):
    """End the leases of these keys. Sent to a scheduler."""

    keys: bytes
    ends: bytes


class SealsRequest(_PeerMessageBase, frozen=True, tag="request_seals"):
    """Request for seals. Key i has the slot at `offsets[i]`. Sent to a rank."""

    keys: bytes
    ends: bytes
    offsets: bytes


class SealsReply(_PeerMessageBase, frozen=True, tag="seals"):
    """Reply to `SealsRequest`: the digest in the seal of each slot. `states[i]` is the state of key i."""

    states: bytes
    digests: bytes


SEALED, NOT_SEALED, OTHER_KEY = 0, 1, 2
"""States: sealed for this key, nothing sealed, or sealed for another key."""

PeerMessage: TypeAlias = Find | FindReply | EndLeases | SealsRequest | SealsReply

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerMessage)
_description_decoder = msgspec.msgpack.Decoder(PeerDescription)
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)


def encode(message: PeerMessage) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes) -> PeerMessage:
    """Decode a message. Raises `WireError` if it is invalid."""
    try:
        message: PeerMessage = _decoder.decode(body)
    except _BROKEN as error:
        raise WireError(CloseReason.MALFORMED, f"not a message of the peer tier: {type(error).__name__}") from None
    return message


def encode_description(description: PeerDescription) -> bytes:
    return _encoder.encode(description)


def decode_description(data: bytes) -> PeerDescription:
    """Decode a description. Raises `WireError` if it is invalid."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise WireError(CloseReason.OVERSIZED, f"a description of {len(data)} bytes")
    try:
        return _description_decoder.decode(data)
    except _BROKEN as error:
        raise WireError(CloseReason.MALFORMED, f"not a description: {type(error).__name__}") from None


def difference(ours: PeerDescription, theirs: PeerDescription) -> tuple[str, str, str] | None:
    """First difference of two descriptions: (field, ours, theirs). None if they are compatible."""
    for field in ("protocol", "rank", "namespace"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            if field == "namespace":
                return _named_difference(ours, theirs)
            return field, str(mine), str(other)
    return None


def _named_difference(ours: PeerDescription, theirs: PeerDescription) -> tuple[str, str, str]:
    """Difference of the fingerprints, by field if both are known."""
    namespaces = ("fingerprint", ours.namespace.hex()[:16], theirs.namespace.hex()[:16])
    if not ours.fingerprint or not theirs.fingerprint:
        return namespaces
    try:
        differences = Fingerprint.decode(ours.fingerprint).diff(Fingerprint.decode(theirs.fingerprint))
    except Exception:  # bytes from a peer may be invalid
        return namespaces
    if not differences:
        return namespaces
    field, _, values = differences[0].partition(": ")
    mine, _, other = values.partition(" is not ")
    return field[:200], (mine or values)[:200], other[:200]


def pack_keys(keys: Sequence[Key]) -> tuple[bytes, bytes]:
    """Pack keys: (joined bytes, packed end offsets)."""
    return b"".join(keys), pack_columns([np.cumsum([len(key) for key in keys], dtype=np.int64)])


def unpack_keys(keys: bytes, ends: bytes) -> list[Key]:
    """Unpack keys. `WireError` if they are invalid or exceed a limit."""
    (column,) = unpack_columns(ends, 1, MAX_KEYS)
    offsets = [0, *column.tolist()]
    if offsets[-1] != len(keys) or any(not 0 < b - a <= MAX_KEY_BYTES for a, b in itertools.pairwise(offsets)):
        raise WireError(CloseReason.MALFORMED, "the ends of keys are invalid")
    return [keys[a:b] for a, b in itertools.pairwise(offsets)]


def find_reply(slots: Sequence[Slot | None], lease_s: float) -> FindReply:
    """Build a `FindReply`. The slots have at most `MAX_EXTENTS` extents in all."""
    counts: list[int] = []
    extents: list[tuple[int, int]] = []
    for slot in slots:
        more = slot.extents if slot is not None else ()
        counts.append(len(more))
        extents += more
    return FindReply(
        pack_columns([counts]),
        pack_columns([[offset for offset, _ in extents]]),
        pack_columns([[num_bytes for _, num_bytes in extents]]),
        lease_s,
    )


def slots_of(answer: FindReply) -> tuple[Slot | None, ...]:
    """Slots of a `FindReply`, in the order of the keys. `WireError` if it is invalid."""
    (counts,) = unpack_columns(answer.counts, 1, MAX_KEYS)
    (offsets,) = unpack_columns(answer.offsets, 1, MAX_EXTENTS)
    (sizes,) = unpack_columns(answer.sizes, 1, MAX_EXTENTS)
    fits = len(offsets) == len(sizes) and 0 <= answer.lease_s < 1e9
    # One by one: a sum of numbers from a peer may overflow and seem valid.
    fits = fits and all(0 <= count <= MAX_EXTENTS for count in counts.tolist()) and int(counts.sum()) == len(offsets)
    fits = fits and all(0 <= offset <= MAX_OFFSET for offset in offsets.tolist())
    if not fits or not all(0 < size <= MAX_OFFSET for size in sizes.tolist()):
        raise WireError(CloseReason.MALFORMED, "the reply does not fit the request")
    extents = iter(zip(offsets.tolist(), sizes.tolist(), strict=True))
    return tuple(Slot(tuple(next(extents) for _ in range(count))) if count else None for count in counts.tolist())


def seals_reply(found_seals: Iterable[tuple[int, bytes]]) -> SealsReply:
    """Build a `SealsReply` from (state, digest) pairs."""
    rows = list(found_seals)
    return SealsReply(bytes(state for state, _ in rows), b"".join(digest for _, digest in rows))


def seals_of(answer: SealsReply, num_keys: int) -> list[tuple[int, bytes]]:
    """(state, digest) of each key. `WireError` if the reply does not fit the request."""
    if len(answer.states) != num_keys or len(answer.digests) != DIGEST_BYTES * num_keys:
        raise WireError(CloseReason.MALFORMED, "the number of seals is not that of the request")
    offsets = range(0, len(answer.digests), DIGEST_BYTES)
    return [(state, answer.digests[at : at + DIGEST_BYTES]) for state, at in zip(answer.states, offsets, strict=True)]
