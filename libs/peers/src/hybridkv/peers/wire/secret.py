"""Shared secret of the engines, read from a file and never printed.

A process without a secret may listen and connect on this host only.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from pathlib import Path
from typing import Final

from hybridkv.peers.errors import PeersConfigurationError

LOCAL_NAME = "localhost"
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_HINT = "head -c 32 /dev/urandom | base64 > FILE && chmod 600 FILE, and the same file on every host"


class Secret:
    """Shared secret. Its representation shows neither bytes nor length; it cannot be pickled."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __bool__(self) -> bool:
        """False for `NO_SECRET`."""
        return bool(self._key)

    def __repr__(self) -> str:
        return "Secret(...)" if self else "NO_SECRET"

    def __reduce__(self) -> str:
        raise TypeError("a Secret cannot be pickled")

    def derive(self, purpose: bytes) -> bytes:
        """Key of 32 bytes for one purpose. Keys of other purposes reveal nothing about this key."""
        return hmac.digest(self._key, b"hybridkv.peers " + purpose, "sha256")


NO_SECRET: Final = Secret(b"")
"""Value if no secret is configured. Proves nothing; allowed only for peers on this host."""


def read_secret(path: str | os.PathLike[str]) -> Secret:
    """Reads the secret from a file, without surrounding white space.

    Raises `PeersConfigurationError` if the file cannot be read, is not a regular file, is accessible by group or
    others, belongs to neither this user nor root, or has fewer than 16 or more than 4096 bytes. No error shows the
    secret.
    """
    field = "secret_file"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PeersConfigurationError(
            field, "a file that can be read", str(path), f"{error.strerror}; {_HINT}"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PeersConfigurationError(field, "a regular file", str(path), _HINT)
        if status.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o} of {Path(path)}"
            raise PeersConfigurationError(field, "a file that only its owner may read", mode, "chmod 600 FILE")
        if status.st_uid not in (0, os.geteuid()):
            raise PeersConfigurationError(field, "a file of this user or of root", f"user {status.st_uid}")
        key = os.read(fd, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        # Do not show the length: it is part of the secret.
        expected = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes without white space around them"
        raise PeersConfigurationError(field, expected, f"fewer or more in {Path(path)}", _HINT)
    return Secret(key)


def is_loopback(host: str) -> bool:
    """True for a loopback address and for `localhost`. False for every other name, whatever it resolves to."""
    if host == LOCAL_NAME:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def require_secret(field: str, host: str, secret: Secret) -> None:
    """Raises `PeersConfigurationError` if there is no secret and `host` is not a loopback address."""
    if not secret and not is_loopback(host):
        hint = "set secret_file: without a secret, any process that reaches this address can read the cache"
        raise PeersConfigurationError(field, "a loopback address, because there is no secret", host, hint)
