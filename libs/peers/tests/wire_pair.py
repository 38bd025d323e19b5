"""Two sides that know one secret."""

from __future__ import annotations

from hybridkv.peers.wire import Identity, Opener, Sealer, Secret, WireLimits

LIMITS = WireLimits(max_frame_bytes=4096, max_buffered_bytes=16384, max_items=64, max_text_bytes=100)


def identity(name: str, secret: bytes = b"a secret that both sides know") -> Identity:
    return Identity(name, Secret(secret).derive(b"control"))


IDENTITY = identity("one")
OTHER = identity("other")


def established() -> tuple[Sealer, Opener]:
    """One direction of a session."""
    return Sealer(b"s" * 32), Opener(b"s" * 32)
