"""Hints of a request, decoded strictly.

A client sends them under the key `hybridkv_hints` in `kv_transfer_params`, or as an action with the type
`hybridkv_hints` in the engine's `kv_hints`. Other keys and actions there are ignored. Invalid hints are counted, logged
at most once a minute, and ignored as a whole. They do not fail a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec

from hybridkv.connectors.config import parse_address
from hybridkv.connectors.decoding import as_configuration_error
from hybridkv.connectors.errors import ConfigurationError, did_you_mean, printable
from hybridkv.connectors.hosts import normal_host
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.planner.hints import NO_HINTS, Hints

logger = logging.getLogger("vllm.hybridkv.scheduler")

MAX_KEEP_SECONDS: Final = 7 * 24 * 3600
MAX_HINTED_PEERS: Final = 8
"""Maximum number of peers in the hints of one request."""
WARNING_EVERY_S: Final = 60.0
"""Shortest time between two warnings about invalid hints."""
_CHOICES = {
    "store": "true or false",
    "load": "true or false",
    "keep_seconds": f"seconds from 0 to {MAX_KEEP_SECONDS}",
    "prefetch": "true or false",
    "peers": f"a list of at most {MAX_HINTED_PEERS} addresses",
}
_PAGE = "docs/guides/hints.md"
_PEERS_PAGE = "docs/guides/routers.md"


class _RawHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hints as a client writes them."""

    store: bool = True
    load: bool = True
    keep_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_KEEP_SECONDS)] = 0.0
    prefetch: bool = False
    peers: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_HINTED_PEERS)] = ()


_NAMES = [field.encode_name for field in msgspec.structs.fields(_RawHints)]


class HintReader:
    """Reads the hints of requests.

    Args:
        metrics: counts hints.
        clock: time in seconds.
    """

    def __init__(self, metrics: ConnectorMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet_until_s = float("-inf")
        self.allows_peer: Callable[[tuple[str, int]], bool] = lambda address: False
        """Returns True for the host and port of a peer that hints may name."""
        self._has_warned_of_peer = False

    def read(self, request: Any) -> Hints:
        """Hints of a new request."""
        try:
            found = compat.hint_objects(request)
            if not found:
                return NO_HINTS
            hints = self._without_refused_peers(request, _merge([parse(path, said) for path, said in found]))
        except ConfigurationError as error:
            self._refuse(request, error)
            return NO_HINTS
        except Exception as error:  # for example a number that is too long to print, or a lone surrogate
            what = type(error).__name__
            self._refuse(request, ConfigurationError(compat.HINTS_KEY, "hints", what, f"see {_PAGE}"))
            return NO_HINTS
        for name, is_set in (
            ("no_store", not hints.store),
            ("no_load", not hints.load),
            ("keep", hints.keep_seconds),
            ("prefetch", hints.prefetch),
            ("peers", hints.peers),
        ):
            if is_set:
                self._metrics.hint(name)
        return hints

    def _without_refused_peers(self, request: Any, hints: Hints) -> Hints:
        """The hints without the peers that the operator does not allow. Counts such hints, and warns of the first."""
        allowed = tuple(filter(self.allows_peer, hints.peers))
        if len(allowed) == len(hints.peers):
            return hints
        self._metrics.hint("peers_refused")
        if not self._has_warned_of_peer:
            self._has_warned_of_peer = True
            host, port = next(peer for peer in hints.peers if peer not in allowed)
            logger.warning(
                "request %s: its hint names the peer %s, which is ignored: expected one of peers of the peer tier, or "
                "a host in its allowed_hosts; hint: add the network of your engines to allowed_hosts (%s). Further "
                "such requests are only counted, in vllm:hybridkv_hints_total",
                printable(request.request_id),
                printable(f"{host}:{port}"),
                _PEERS_PAGE,
            )
        return msgspec.structs.replace(hints, peers=allowed)

    def _refuse(self, request: Any, error: ConfigurationError) -> None:
        self._metrics.hint("invalid")
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + WARNING_EVERY_S
        logger.warning(
            "request %s: its hints are passed over: %s: expected %s, got %s; hint: %s",
            printable(request.request_id),
            *(printable(part) for part in (error.path, error.expected, error.got, error.hint)),
        )


def parse(path: str, said: Any) -> Hints:
    """Decodes one object of hints.

    Raises:
        ConfigurationError: the object is invalid; with path, expected, got and hint.
    """
    if not isinstance(said, Mapping):
        raise ConfigurationError(path, "an object", printable(type(said).__name__), f"see {_PAGE}")
    for key in said:
        if key not in _NAMES:
            word = printable(key)
            raise ConfigurationError(f"{path}.{word}", "a known key", "an unknown one", did_you_mean(word, _NAMES))
    try:
        read = msgspec.convert(dict(said), _RawHints, strict=True)
    except msgspec.ValidationError as error:
        raise as_configuration_error(error, said, path, _CHOICES, _PAGE) from None
    peers = tuple(_address(f"{path}.peers[{i}]", peer) for i, peer in enumerate(read.peers))
    return Hints(store=read.store, load=read.load, keep_seconds=read.keep_seconds, prefetch=read.prefetch, peers=peers)


def _address(path: str, text: str) -> tuple[str, int]:
    """Host and port of a peer. The host is an address in its shortest form, or a name in lower case."""
    host, port = parse_address(text) or ("", 0)
    normal = normal_host(host)
    if normal is None:
        raise ConfigurationError(path, "HOST:PORT, with a port from 1 to 65535", repr(text), f"see {_PEERS_PAGE}")
    return normal, port


def _merge(all_hints: list[Hints]) -> Hints:
    """Merges several objects of hints. `store` and `load` are True only if they are True in all objects; `prefetch` is
    True if it is True in one."""
    return Hints(
        store=all(hints.store for hints in all_hints),
        load=all(hints.load for hints in all_hints),
        keep_seconds=max(hints.keep_seconds for hints in all_hints),
        prefetch=any(hints.prefetch for hints in all_hints),
        peers=tuple(dict.fromkeys(peer for hints in all_hints for peer in hints.peers))[:MAX_HINTED_PEERS],
    )
