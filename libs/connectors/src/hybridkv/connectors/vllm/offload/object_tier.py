"""Object tier, opened from its configuration: address of the store, credentials, secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from hybridkv.connectors.config import ObjectTierConfig
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.hashing import Fingerprint
from hybridkv.peers.errors import PeersConfigurationError
from hybridkv.peers.wire import read_secret
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.object import Depot, ObjectIndex, ObjectMedium, ObjectOptions, open_index, open_medium

_PURPOSE = b"object store"
_PRIVATE = 0o077


def object_index(
    config: ObjectTierConfig,
    layout: CacheLayout,
    fingerprint: Fingerprint,
    load_timeout_s: float,
    clock: Callable[[], float],
) -> ObjectIndex:
    """Index of the object tier.

    Raises:
        TierConfigurationError: the store cannot be used, or a file cannot be read.
    """
    return open_index(
        _depot(config),
        fingerprint.digest(),
        layout.world_size,
        _options(config, load_timeout_s),
        clock,
        clears_all=config.resets == "fleet",
    )


def object_medium(config: ObjectTierConfig, rank: int, load_timeout_s: float) -> ObjectMedium:
    """Medium of the object tier for one rank.

    Raises:
        TierConfigurationError: a file cannot be read.
    """
    return open_medium(_depot(config), rank, _options(config, load_timeout_s))


def _options(config: ObjectTierConfig, load_timeout_s: float) -> ObjectOptions:
    options = ObjectOptions(pack_bytes=config.pack)
    # A retry after the load's timeout would occupy a thread for nothing.
    return msgspec.structs.replace(options, request_timeout_s=min(options.request_timeout_s, load_timeout_s))


def _depot(config: ObjectTierConfig) -> Depot:
    settings = {} if config.credentials_file is None else _read_settings(config.credentials_file)
    settings |= {} if config.endpoint is None else {"endpoint": config.endpoint}
    settings |= {} if config.region is None else {"region": config.region}
    try:
        secret = b"" if config.secret_file is None else read_secret(config.secret_file).derive(_PURPOSE)
    except PeersConfigurationError as error:
        raise TierConfigurationError("secret_file", error.expected, error.got, error.hint) from None
    return Depot(config.url, settings, secret)


def _read_settings(path: str) -> dict[str, str]:
    """Settings from the credentials file. Errors never quote its content."""
    field, hint = "credentials_file", '{"access_key_id": "...", "secret_access_key": "..."}, and chmod 600'
    try:
        if Path(path).stat().st_mode & _PRIVATE:
            raise TierConfigurationError(field, "a file that only its owner may read", path, "chmod 600 FILE")
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str])
    except OSError as error:
        raise TierConfigurationError(field, "a file that can be read", f"{path}: {error.strerror}", hint) from None
    except msgspec.DecodeError:
        raise TierConfigurationError(field, "a JSON object of strings", path, hint) from None
