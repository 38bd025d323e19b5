"""Adapter versions: the content of an adapter's files. The engine's block hashes have only the adapter's name and path.

The engine does not report when it loads an adapter; the load may be at any time since the engine's start. So the
content on disk counts as the engine's content only in two cases:
- The files have not changed since the engine started.
- The request loads the adapter in place, so the engine loads the adapter again at each step, and the files do not
  change in this time.
The first case needs files that existed when the adapter was first requested: a parent directory that is replaced later
leaves no trace in the times of the files. The engine finds loaded weights only by the adapter's number. So if the name
or the path of a number changes, the engine's weights of this number are unknown until an adapter with this number is
loaded in place.

For other adapters, the content is in doubt: their requests load nothing and store nothing. Stored content is committed
only after a last check that the files have not changed since they were read.

One thread reads files, and another thread checks them. A caller waits for a check at most `LOOK_S`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridkv.connectors.vllm.common.identity.files import Content, NotReadableError, Signature, content, signature
from hybridkv.hashing import ChunkKeys
from hybridkv.tiers.threads import BackgroundThread, Outcome

logger = logging.getLogger("vllm.hybridkv.adapters")

MAX_ADAPTERS = 1024
"""Maximum of adapters in memory. The least recently used adapter is dropped, and read again at its next request."""
MAX_SEEN = 8192
"""Maximum of adapters with a recorded first check, and of recorded numbers. Adapters with later numbers are in doubt;
other later adapters are in doubt unless they are loaded in place."""
LOOK_S = 0.05
"""Maximum seconds that a caller waits for a check of files. A check reads no content."""
TICK_NS = 100_000_000
"""Nanoseconds within which two changes of a file may leave equal times."""

Name = tuple[str, int, str]
"""Name, number and path of an adapter."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Version of a request's adapter at the request's admission. `Adapters.is_still_valid` checks it later."""

    name: Name
    signature: Signature
    digest: bytes
    """Digest of the files' content."""
    keys: ChunkKeys
    is_in_place: bool
    turn: int
    """Turn of the adapter's number, see `_Turn`."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Current adapter of a number, and how often another adapter has got the number."""

    name: Name
    count: int


@dataclass(slots=True)
class _Adapter:
    """State of one adapter. `held`: signature of the files that the engine has certainly loaded.

    `held` is valid only while `held_turn` is the turn of the adapter's number.
    """

    name: Name
    options: object
    content: Content | None = None
    reading: Outcome[Content] | None = None
    read_ns: int = 0
    held: Signature | None = None
    held_turn: int = 0
    keys: ChunkKeys | None = None
    last_warning: str = ""


class Adapters:
    """Keys of chunks with an adapter.

    Args:
        keys: keys of the model without an adapter.
        began_ns: time of the engine's start, or an earlier time, in nanoseconds since 1970.
        now_ns: returns the current time, in nanoseconds since 1970.
    """

    def __init__(self, keys: ChunkKeys, began_ns: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._keys = keys
        self._nonce = b""
        self._began_ns = began_ns
        self._now_ns = now_ns
        self._adapters: OrderedDict[Name, _Adapter] = OrderedDict()
        self._first_checks: dict[Name, Outcome[Signature]] = {}
        self._turns: dict[int, _Turn] = {}
        self._reader = BackgroundThread("hybridkv-adapter-reader")
        self._checker = BackgroundThread("hybridkv-adapter-looker")
        self._checking: Outcome[Signature] | None = None

    def on_request(self, lora: Any) -> None:
        """Records a request with this adapter. Checks and reads the adapter's files in the background."""
        adapter = self._adapter(lora)
        if adapter.content is None:
            self._read(adapter)

    def current_version(self, lora: Any, is_conflict_free: bool) -> AdapterVersion | None:
        """Version of the adapter for a request just before its admission; None if the content is in doubt.

        Args:
            lora: the request's adapter.
            is_conflict_free: whether no other request conflicts with a load in place; see `Requests`.
        """
        adapter = self._adapter(lora)
        if not self._is_read(adapter):
            return None
        found = adapter.content
        assert found is not None
        now = self._check(adapter)
        if now is None or self._turn(adapter) < 0:
            return None
        if now != found.signature:
            self._forget(adapter)
            return None
        if not self._is_held(adapter, found.signature, lora.load_inplace, is_conflict_free):
            return None
        if adapter.keys is None:
            adapter.keys = self._keys.for_adapter(self._nonce + found.digest)
        return AdapterVersion(
            adapter.name, found.signature, found.digest, adapter.keys, lora.load_inplace, self._turn(adapter)
        )

    def begin_anew(self, nonce: bytes) -> None:
        """Gives every adapter new keys that no other process has, after the model has changed.

        Args:
            nonce: part of all keys from now on.
        """
        self._nonce = nonce
        for adapter in self._adapters.values():
            adapter.keys = None

    def is_still_valid(self, adapter_version: AdapterVersion | None) -> bool:
        """Whether the files, and the adapter of the number, are unchanged since the admission. Then the engine has
        computed with these files since the admission. True for a request without an adapter (None).

        The request must have run: after a load in place, also records that the engine has loaded these files.
        """
        if adapter_version is None:
            return True
        if not self.is_unchanged(adapter_version):
            return False
        if adapter_version.is_in_place:
            # The request has run, so the engine has loaded these files.
            adapter = self._adapters[adapter_version.name]
            adapter.held, adapter.held_turn = adapter_version.signature, adapter_version.turn
        return True

    def is_unchanged(self, adapter_version: AdapterVersion) -> bool:
        """Whether the files, and the adapter of the number, are the same as in this version. False also if the adapter
        is no longer in memory, or if the files cannot be checked within `LOOK_S`."""
        adapter = self._adapters.get(adapter_version.name)
        if adapter is None or self._turn(adapter) != adapter_version.turn:
            return False
        return self._check(adapter) == adapter_version.signature

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until all requested reads and checks have ended, at most `timeout_s` for each thread; for tests and
        tools. False after a timeout."""
        return self._reader.wait_until_idle(timeout_s) and self._checker.wait_until_idle(timeout_s)

    def close(self) -> None:
        """Ends each thread after its queued calls. Does not wait."""
        self._reader.close()
        self._checker.close()

    def _is_held(self, adapter: _Adapter, now: Signature, in_place: bool, is_conflict_free: bool) -> bool:
        """Whether the engine has certainly loaded, or will load, the current content of the files."""
        if in_place:
            # A change in the same tick as the read of the files would leave equal times.
            is_settled = now.changed_ns + TICK_NS < adapter.read_ns
            if not is_settled:
                self._forget(adapter)
            return is_settled and is_conflict_free
        turn = self._turn(adapter)
        if adapter.held is None and self._first_signature(adapter) == now and now.changed_ns + TICK_NS < self._began_ns:
            adapter.held = now
        if adapter.held == now and adapter.held_turn != turn:
            self._warn(
                adapter,
                f"its number {adapter.name[1]} was used by another adapter, and the engine may hold that adapter's "
                "weights; load this adapter in place, or give each adapter a number of its own",
            )
            return False
        if adapter.held != now:
            self._warn(
                adapter,
                "its files changed after this engine began, so the engine may hold other weights than the files; load "
                "the adapter in place, or restart the engine",
            )
            return False
        return True

    def _turn(self, adapter: _Adapter) -> int:
        """Turn of the adapter's number; -1 if another adapter has the number, or if the number is not recorded."""
        turn = self._turns.get(adapter.name[1])
        return turn.count if turn is not None and turn.name == adapter.name else -1

    def _first_signature(self, adapter: _Adapter) -> Signature | None:
        """Signature of the files when the adapter was first requested; None if there were no files, or if this check
        was not made."""
        look = self._first_checks.get(adapter.name)
        return look.value if look is not None else None

    def _record(self, name: Name) -> None:
        """Records a request for this adapter."""
        turn = self._turns.get(name[1])
        if turn is None and len(self._turns) < MAX_SEEN:
            self._turns[name[1]] = _Turn(name, 0)
        elif turn is not None and turn.name != name:
            self._turns[name[1]] = _Turn(name, turn.count + 1)
        if name not in self._first_checks and len(self._first_checks) < MAX_SEEN:
            # No wait: the thread makes this check before later checks.
            look = self._checker.submit(lambda: signature(name[2]))
            self._first_checks[name] = look if look is not None else Outcome()

    def _adapter(self, lora: Any) -> _Adapter:
        name = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        self._record(name)
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = self._adapters[name] = _Adapter(name, _options(lora))
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(name)
        return adapter

    def _is_read(self, adapter: _Adapter) -> bool:
        """Whether the content is known. If not, takes the content if a read has ended, or starts a read."""
        if adapter.content is not None:
            return True
        reading = adapter.reading
        if reading is None or not reading.is_done:
            self._read(adapter)
            return False
        adapter.reading = None
        if reading.error is not None:
            self._warn(adapter, str(reading.error))
            self._read(adapter)
            return False
        adapter.content = reading.value
        return True

    def _read(self, adapter: _Adapter) -> None:
        if adapter.reading is None:
            path, options = adapter.name[2], adapter.options
            adapter.read_ns = self._now_ns()
            adapter.reading = self._reader.submit(lambda: content(path, options))

    def _forget(self, adapter: _Adapter) -> None:
        adapter.content = adapter.keys = None
        self._read(adapter)

    def _check(self, adapter: _Adapter) -> Signature | None:
        """Current signature of the files; None if they cannot be read, or the check does not end within `LOOK_S`."""
        path, checking = adapter.name[2], None
        # While the file system blocks an earlier check, a new check would not end in time.
        if self._checking is None or self._checking.is_done:
            checking = self._checking = self._checker.submit(lambda: signature(path))
        if checking is None or not checking.wait(LOOK_S):
            self._warn(adapter, f"its files could not be checked within {LOOK_S:g} s")
            return None
        if isinstance(checking.error, NotReadableError):
            self._warn(adapter, str(checking.error))
        return checking.value

    def _warn(self, adapter: _Adapter, why: str) -> None:
        if adapter.last_warning != why:
            adapter.last_warning = why
            logger.warning("adapter %s (%s) is neither stored nor loaded: %s", adapter.name[0], adapter.name[2], why)


def _options(lora: Any) -> dict[str, Any]:
    """Every field of a LoRARequest, except fields that name the adapter or control the time of its load."""
    known = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace")
    return {name: getattr(lora, name) for name in lora.__struct_fields__ if name not in known}
