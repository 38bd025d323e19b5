"""Hints of a request, decoded strictly.

A client sends them under the key `hybridkv_hints` in `kv_transfer_params`, or as an action of that type in the engine's
`kv_hints`. Other keys there are ignored. Invalid hints are counted, logged at most once a minute, and ignored as a
whole; they never fail a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec

from hybridkv.connectors.decoding import as_configuration_error
from hybridkv.connectors.errors import ConfigurationError, did_you_mean
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.planner.hints import NO_HINTS, Hints

logger = logging.getLogger("vllm.hybridkv.scheduler")

MAX_KEEP_SECONDS: Final = 7 * 24 * 3600
WARNING_EVERY_S: Final = 60.0
"""Shortest time between two warnings about invalid hints."""
MAX_SHOWN: Final = 120
"""Limit for characters of a client's text in the log."""
_CHOICES = {
    "store": "true or false",
    "load": "true or false",
    "keep_seconds": f"seconds from 0 to {MAX_KEEP_SECONDS}",
    "prefetch": "true or false",
}
_PAGE = "docs/guides/hints.md"


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hints as a client writes them."""

    store: bool = True
    load: bool = True
    keep_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_KEEP_SECONDS)] = 0.0
    prefetch: bool = False


_NAMES = [field.encode_name for field in msgspec.structs.fields(_Said)]


class HintReader:
    """Reads the hints of requests.

    Args:
        metrics: counts hints.
        clock: seconds.
    """

    def __init__(self, metrics: ConnectorMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._quiet_until_s = float("-inf")

    def read(self, request: Any) -> Hints:
        """Hints of a new request."""
        try:
            found = compat.hint_objects(request)
            if not found:
                return NO_HINTS
            hints = _merge([parse(path, said) for path, said in found])
        except ConfigurationError as error:
            self._refuse(request, error)
            return NO_HINTS
        except Exception as error:  # for example a number that is too long to print, or a lone surrogate
            what = type(error).__name__
            self._refuse(request, ConfigurationError(compat.HINTS_KEY, "hints", what, f"see {_PAGE}"))
            return NO_HINTS
        for name, is_said in (
            ("no_store", not hints.store),
            ("no_load", not hints.load),
            ("keep", hints.keep_seconds),
            ("prefetch", hints.prefetch),
        ):
            if is_said:
                self._metrics.hint(name)
        return hints

    def _refuse(self, request: Any, error: ConfigurationError) -> None:
        self._metrics.hint("invalid")
        now_s = self._clock()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + WARNING_EVERY_S
        logger.warning(
            "request %s: its hints are passed over: %s: expected %s, got %s; hint: %s",
            request.request_id,
            *(_shown(part) for part in (error.path, error.expected, error.got, error.hint)),
        )


def parse(path: str, said: Any) -> Hints:
    """Decodes one object of hints.

    Raises:
        ConfigurationError: the object is invalid; with path, expected, got and hint.
    """
    if not isinstance(said, Mapping):
        raise ConfigurationError(path, "an object", _shown(type(said).__name__), f"see {_PAGE}")
    for key in said:
        if key not in _NAMES:
            word = _shown(key)
            raise ConfigurationError(f"{path}.{word}", "a known key", "an unknown one", did_you_mean(word, _NAMES))
    try:
        read = msgspec.convert(dict(said), _Said, strict=True)
    except msgspec.ValidationError as error:
        raise as_configuration_error(error, said, path, _CHOICES, _PAGE) from None
    return Hints(store=read.store, load=read.load, keep_seconds=read.keep_seconds, prefetch=read.prefetch)


def _merge(all_said: list[Hints]) -> Hints:
    """Union of several objects of hints."""
    return Hints(
        store=all(hints.store for hints in all_said),
        load=all(hints.load for hints in all_said),
        keep_seconds=max(hints.keep_seconds for hints in all_said),
        prefetch=any(hints.prefetch for hints in all_said),
    )


def _shown(said: object) -> str:
    """A client's text for the log: shortened, and without characters that cannot be printed."""
    text = (said if isinstance(said, str) else repr(said))[:MAX_SHOWN]
    return "".join(char if char.isprintable() else "?" for char in text)
