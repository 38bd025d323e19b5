"""Configuration of HybridOffloadConnector: `kv_connector_extra_config`, decoded strictly. Unknown keys are errors."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import msgspec

from hybridkv.connectors.decoding import as_configuration_error, refuse_unknown_keys
from hybridkv.connectors.errors import ConfigurationError, did_you_mean
from hybridkv.connectors.hosts import AllowedHosts

ROOT = "kv_connector_extra_config"
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CHOICES = {
    "chunk_tokens": 'a number of tokens (int), or "auto"',
    "load": '"async" or "sync"',
    "copies": '"engine" or "native"',
    "verify_ram": '"always", "sampled" or "off"',
    "checkpoints": '"auto" or "off"',
    "checkpoint_stops": "a number of steps (int)",
    "checkpoint_answers": "true or false",
    "fsync": '"none", "interval" or "always"',
    "direct": 'true, false or "auto"',
    "resets": '"engine" or "fleet"',
    "on_reset": '"clear" or "keep"',
    "cascade": '"all", "reused" or "nothing"; for a peer tier "nothing"',
    "allowed_hosts": 'a list such as ["10.0.0.0/24", "engine-7"]',
    "weights_digest": '"sampled", "full", or your own name for these weights',
    "identity_ignores": "a list of names of facts",
}
MAX_PEERS = 64
MIN_TIME_TO_LIVE_S = 60.0
"""Minimum of `time_to_live_seconds`: in less time, objects in use cannot be written again before they expire."""
OBJECT_SCHEMES = ("s3", "gs", "az", "file")
"""URL schemes of object stores."""
KEEP_SHARE = 0.25
"""Default of `keep_share`."""
LOOKUP_TIMEOUT_S = 1.0
"""Default of `lookup_timeout_seconds` of a peer tier. A disk tier has a local index, so it has no such timeout."""
_LMCACHE_HINT = (
    "an LMCache server is not a tier: list HybridLMCacheConnector beside HybridOffloadConnector in the connectors of "
    "HybridMultiConnector (docs/guides/lmcache.md)"
)
_SIZE_HINT = 'write bytes as a number, or a size such as "512MiB" or "4GiB"'


class RamTierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="ram"):
    """Host memory: the primary tier.

    Args:
        capacity: bytes, over all ranks of the engine.
    """

    capacity: int


class SecondaryTierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that all secondary tiers share.

    Args:
        cascade: chunks that are copied from host memory to this tier. "all": all stored chunks; "reused": chunks that a
            later request hits; "nothing": none, so the tier is read-only.
        load_timeout_seconds: maximum seconds that a request waits for this tier. None: `load_timeout_seconds` of
            `OffloadConfig`.
        lookup_timeout_seconds: maximum seconds of a lookup in a tier without a local index. None: see
            `OffloadConfig.lookup_timeout_of`. Refused for a disk tier, which has a local index.
    """

    cascade: Literal["all", "reused", "nothing"] = "all"
    load_timeout_seconds: float | None = None
    lookup_timeout_seconds: float | None = None
    default_lookup_timeout_s: ClassVar[float] = LOOKUP_TIMEOUT_S


class DiskTierConfig(SecondaryTierConfig, frozen=True, tag_field="type", tag="disk"):
    """A directory on a local disk.

    Args:
        path: absolute path; created if it does not exist. Files of other programs in it are not touched.
        capacity: bytes, over all ranks of the engine and all models that share the directory.
        fsync: when data is forced to the disk: "none", "interval" or "always".
        direct: whether to bypass the page cache; "auto" does so where the file system supports it.
    """

    path: str
    capacity: int
    fsync: Literal["none", "interval", "always"] = "interval"
    direct: bool | Literal["auto"] = "auto"


class PeerTierConfig(SecondaryTierConfig, frozen=True, kw_only=True, tag_field="type", tag="peer"):
    """Host memory of other engines. Engines look up each other's chunks and read them.

    Args:
        listen: "HOST:PORT" of this engine's scheduler. Rank n listens on PORT + 1 + n.
        peers: `listen` addresses of other engines. An entry with this engine's own address is skipped.
        secret_file: file with a secret that all engines share. None: the engine listens and connects only on the
            loopback interface.
        allowed_hosts: names, addresses and networks of further engines that the hints of a request may name.
    """

    listen: str
    peers: tuple[str, ...] = ()
    secret_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cascade: Literal["nothing"] = "nothing"


class ObjectTierConfig(SecondaryTierConfig, frozen=True, kw_only=True, tag_field="type", tag="object"):
    """An object store that a fleet of engines shares.

    Args:
        url: "s3://bucket/prefix", "gs://bucket/prefix", "az://account/container/prefix" or "file:///directory".
        endpoint: URL of the operator's own server, such as "http://10.0.0.5:8333". None: the environment names the
            server, else the cloud's server is used.
        region: region of the bucket.
        credentials_file: JSON file with the secret settings of the client, if the environment does not have them.
        secret_file: file with a secret that all engines of the fleet share and other writers of the store lack.
        pack: maximum bytes of an object with several chunks; each rank writes its own objects.
        resets: "engine": a reset of the prefix cache applies only to this engine; "fleet": to all engines.
        time_to_live_seconds: seconds from the last write of an object until the store's own expiry rule deletes the
            object. The engine writes objects in use again before they expire. None: the store deletes nothing.
        capacity: maximum bytes of all objects, for a "file://" URL only. The least recently used objects are deleted.
            None: no bound.
        store_bytes_per_second: maximum bytes that this engine stores in a second, over all ranks. None: no limit.
        store_requests_per_second: maximum store requests of this engine in a second, over all ranks. None: no limit.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    credentials_file: str | None = None
    secret_file: str | None = None
    pack: int = 16 << 20
    resets: Literal["engine", "fleet"] = "engine"
    time_to_live_seconds: float | None = None
    capacity: int | None = None
    store_bytes_per_second: int | None = None
    store_requests_per_second: float | None = None
    cascade: Literal["all", "reused", "nothing"] = "reused"
    default_lookup_timeout_s: ClassVar[float] = 0.25


TierConfig = RamTierConfig | DiskTierConfig | PeerTierConfig | ObjectTierConfig
_TIER_TYPES: dict[str, type[msgspec.Struct]] = {str(kind.__struct_config__.tag): kind for kind in get_args(TierConfig)}


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of HybridOffloadConnector.

    Args:
        tiers: tiers, the fastest first: host memory, then secondary tiers in lookup order.
        chunk_tokens: tokens in one chunk, or "auto".
        load: "async": a thread copies while other requests run; "sync": the worker's own thread copies.
        local_copies: whether a load may copy from blocks that the engine still holds, in place of a tier.
        load_timeout_seconds: maximum seconds that a request waits for secondary tiers, and that its load waits in the
            copy queue. Then the request is computed.
        pending_timeout_seconds: maximum seconds that a request waits for chunks that another request stores or
            promotes.
        compute_tokens_per_second: prefill speed of the engine. None: measured. A request waits for a lookup only while
            the wait is expected to be shorter than the computation.
        checkpoints: "auto": stops prefills where a recurrent state is worth storing, while the tiers have room; "off":
            stores only the states that the engine hands over without stops.
        checkpoint_stops: maximum of additional steps of one request for such stops.
        checkpoint_answers: with "auto" and without a drafter, also store states of answers, for the next turn of a
            conversation.
        keep_share: largest share of each tier with a local index for prefixes that requests keep by a hint, and of host
            memory for prefixes that requests prefetch. 0: no prefix is kept.
        without_prefix_caching: the operator states that prefix caching is off on purpose, and that this model can
            resume prefixes.
        copies: on a GPU, "engine" copies with vLLM's own functions, "native" with kernels of hybridkv-cuda.
        verify_ram: chunks in host memory that are compared with their checksum before a load. "always": all;
            "sampled": 1 in 16; "off": none. None: "always", but "sampled" on a GPU if "always" slows loads by 5 % or
            more.
        on_reset: "clear": a reset of the connector's cache by vLLM drops all stored chunks; vLLM also resets before it
            sleeps. "keep": drops nothing; the operator states that the weights of this engine never change.
        weights_digest: identification of the weights. "sampled": all headers and a sample of the data are read;
            "full": every byte is read; any other text is the operator's own name of the weights.
        identity_ignores: names of facts; the operator states that they do not change the stored bytes.
    """

    tiers: tuple[TierConfig, ...]
    chunk_tokens: int | Literal["auto"] = "auto"
    load: Literal["async", "sync"] = "async"
    local_copies: bool = True
    load_timeout_seconds: float = 30.0
    pending_timeout_seconds: float = 10.0
    compute_tokens_per_second: float | None = None
    checkpoints: Literal["auto", "off"] = "auto"
    checkpoint_stops: int = 8
    checkpoint_answers: bool = True
    keep_share: float = KEEP_SHARE
    without_prefix_caching: bool = False
    copies: Literal["engine", "native"] = "engine"
    verify_ram: Literal["always", "sampled", "off"] | None = None
    on_reset: Literal["clear", "keep"] = "clear"
    weights_digest: str = "sampled"
    identity_ignores: tuple[str, ...] = ()

    @property
    def ram(self) -> RamTierConfig:
        """The primary tier."""
        tier = self.tiers[0]
        assert isinstance(tier, RamTierConfig)
        return tier

    @property
    def secondary(self) -> dict[str, SecondaryTierConfig]:
        """The secondary tiers by name, in lookup order."""
        return {name_of(tier): tier for tier in self.tiers if isinstance(tier, SecondaryTierConfig)}

    @property
    def disk(self) -> DiskTierConfig | None:
        """The disk tier, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, DiskTierConfig)), None)

    @property
    def peer(self) -> PeerTierConfig | None:
        """The peer tier, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, PeerTierConfig)), None)

    @property
    def object(self) -> ObjectTierConfig | None:
        """The object tier, if there is one."""
        return next((tier for tier in self.tiers if isinstance(tier, ObjectTierConfig)), None)

    def path_of(self, name: str) -> str:
        """Path of a secondary tier in the configuration."""
        return f"{ROOT}.tiers[{[name_of(tier) for tier in self.tiers].index(name)}]"

    def load_timeout_of(self, tier: SecondaryTierConfig) -> float:
        """Maximum seconds that a request waits for a load from a secondary tier."""
        return self.load_timeout_seconds if tier.load_timeout_seconds is None else tier.load_timeout_seconds

    def lookup_timeout_of(self, tier: SecondaryTierConfig) -> float:
        """Maximum seconds of a lookup in a secondary tier without a local index."""
        given = tier.lookup_timeout_seconds
        return min(tier.default_lookup_timeout_s, self.load_timeout_of(tier)) if given is None else given


def name_of(tier: RamTierConfig | SecondaryTierConfig) -> str:
    """Name of a tier: its type, because a stack has at most one tier of each type."""
    return str(tier.__struct_config__.tag)


def decode_config(raw: Mapping[str, Any]) -> OffloadConfig:
    """Decodes `kv_connector_extra_config`.

    Raises:
        ConfigurationError: a key is unknown, or a value cannot work.
    """
    refuse_unknown_keys(ROOT, raw, OffloadConfig)
    if not raw.get("tiers"):
        raise ConfigurationError(
            f"{ROOT}.tiers",
            "a list of at least one tier",
            repr(raw.get("tiers", "nothing")),
            'for example "tiers": [{"type": "ram", "capacity": "4GiB"}]',
        )
    plain = dict(raw)
    if isinstance(raw["tiers"], Sequence) and not isinstance(raw["tiers"], str):
        plain["tiers"] = [_plain_tier(f"{ROOT}.tiers[{i}]", tier) for i, tier in enumerate(raw["tiers"])]
    try:
        config = msgspec.convert(plain, OffloadConfig, strict=True)
    except msgspec.ValidationError as error:
        raise as_configuration_error(error, raw, ROOT, _CHOICES, "docs/reference/configuration.md") from None
    for name, hint in (("load_timeout_seconds", "30 is the default"), ("pending_timeout_seconds", "10 is the default")):
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigurationError(f"{ROOT}.{name}", "seconds above 0", getattr(config, name), hint)
    speed = config.compute_tokens_per_second
    if speed is not None and not 0 < speed < math.inf:
        raise ConfigurationError(
            f"{ROOT}.compute_tokens_per_second",
            "tokens above 0",
            speed,
            "leave it out to measure it; vLLM logs its prompt throughput",
        )
    if not 0 <= config.keep_share <= 1:
        raise ConfigurationError(
            f"{ROOT}.keep_share", "a share from 0 to 1", config.keep_share, "0.25 is the default; 0 keeps nothing"
        )
    _require_stack(config)
    if config.checkpoint_stops < 0:
        raise ConfigurationError(
            f"{ROOT}.checkpoint_stops", "a number of steps, 0 or more", config.checkpoint_stops, "8 is the default"
        )
    if isinstance(config.chunk_tokens, int) and config.chunk_tokens <= 0:
        raise ConfigurationError(
            f"{ROOT}.chunk_tokens", 'a positive number of tokens, or "auto"', config.chunk_tokens, 'use "auto"'
        )
    if not config.weights_digest.strip():
        raise ConfigurationError(
            f"{ROOT}.weights_digest",
            '"sampled", "full", or your own name for these weights',
            repr(config.weights_digest),
            "two sets of weights with an empty name would share a cache",
        )
    for i, entry in enumerate(config.identity_ignores):
        if not entry.strip(" *."):
            raise ConfigurationError(
                f"{ROOT}.identity_ignores[{i}]",
                "the name of a fact",
                repr(entry),
                'for example "engine.version"; namespace.json in a disk tier\'s directory lists them',
            )
    return config


def _require_stack(config: OffloadConfig) -> None:
    names = [name_of(tier) for tier in config.tiers]
    if names[0] != "ram":
        raise ConfigurationError(
            f"{ROOT}.tiers",
            'a "ram" tier first, and then slower ones',
            ", ".join(f'"{name}"' for name in names),
            "a chunk from a slower tier passes through host memory, so a tier in host memory comes first: "
            '[{"type": "ram", "capacity": "4GiB"}, {"type": "disk", "path": "/var/cache/kv", "capacity": "1TiB"}]',
        )
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigurationError(
                f"{ROOT}.tiers[{i}].type",
                "a type that no other tier has",
                f'"{name}"',
                f"tiers[{names.index(name)}] has this type: give it the capacity of both, as tiers are named by type",
            )
    if config.disk is not None and not os.path.isabs(config.disk.path):
        raise ConfigurationError(
            f"{config.path_of('disk')}.path",
            "an absolute path",
            repr(config.disk.path),
            "the engine has several processes",
        )
    if config.peer is not None:
        _require_addresses(config.path_of("peer"), config.peer)
    if config.object is not None:
        _require_object_tier(config, config.object)
    for name, tier in config.secondary.items():
        _require_timeouts(config, config.path_of(name), tier)


def _require_object_tier(config: OffloadConfig, tier: ObjectTierConfig) -> None:
    path = config.path_of("object")
    scheme, mark, rest = tier.url.partition("://")
    if not mark or not rest or scheme not in OBJECT_SCHEMES:
        raise ConfigurationError(
            f"{path}.url",
            "a URL that begins with " + ", ".join(f"{scheme}://" for scheme in OBJECT_SCHEMES),
            repr(tier.url),
            'for example "s3://bucket/hybridkv"; the address of a server of your own is endpoint',
        )
    if "@" in rest.partition("/")[0]:  # not quoted: it may be a secret
        raise ConfigurationError(
            f"{path}.url",
            "a URL without credentials",
            "one with @",
            "put them into credentials_file, or the environment",
        )
    for field in ("endpoint", "region", "credentials_file") if scheme == "file" else ():
        if (given := getattr(tier, field)) is not None:
            raise ConfigurationError(f"{path}.{field}", "nothing with a file:// URL", repr(given), "leave it out")
    if tier.endpoint is not None and not tier.endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{path}.endpoint",
            "http://HOST:PORT or https://HOST:PORT",
            repr(tier.endpoint),
            'for example "http://10.0.0.5:8333"',
        )
    if tier.time_to_live_seconds is not None and not MIN_TIME_TO_LIVE_S <= tier.time_to_live_seconds < math.inf:
        raise ConfigurationError(
            f"{path}.time_to_live_seconds",
            f"seconds, at least {MIN_TIME_TO_LIVE_S:.0f}",
            repr(tier.time_to_live_seconds),
            "the time after which the store's own rule deletes an object: 86400 for one day",
        )
    if tier.store_requests_per_second is not None and not 0 < tier.store_requests_per_second < math.inf:
        raise ConfigurationError(
            f"{path}.store_requests_per_second",
            "a number above 0",
            repr(tier.store_requests_per_second),
            "leave it out for no limit",
        )
    if tier.capacity is not None and scheme != "file":
        raise ConfigurationError(
            f"{path}.capacity",
            "a file:// URL, or no capacity",
            repr(tier.url),
            "a server bounds a bucket by rules of its own: set an expiry rule there, and time_to_live_seconds here",
        )
    if config.weights_digest == "sampled":
        raise ConfigurationError(
            f"{ROOT}.weights_digest",
            'with an object tier "full", or your own name for these weights',
            '"sampled"',
            "a sample cannot tell two fine-tunes apart with certainty, and a fleet has many: name the revision, "
            'for example "granite-4@3f2a91c"',
        )


def _require_addresses(path: str, tier: PeerTierConfig) -> None:
    named = [(f"{path}.listen", tier.listen), *((f"{path}.peers[{i}]", peer) for i, peer in enumerate(tier.peers))]
    for field, address in named:
        if parse_address(address) is None:
            raise ConfigurationError(
                field,
                "HOST:PORT, with a port from 1 to 65535",
                repr(address),
                'for example "10.0.0.1:14700"; an IPv6 address goes in brackets before the port',
            )
    if tier.secret_file is None and not _is_loopback(tier.listen):
        raise ConfigurationError(
            f"{path}.secret_file",
            "the path of a file, because other hosts reach listen",
            f"nothing, and {tier.listen!r} for listen",
            "without a secret, any process that reaches this address can read the cache; or listen on 127.0.0.1",
        )
    _require_allowed_hosts(path, tier)
    if len(tier.peers) > MAX_PEERS:
        raise ConfigurationError(
            f"{path}.peers", f"at most {MAX_PEERS} peers", len(tier.peers), "each is asked for every prompt: list fewer"
        )


def _require_allowed_hosts(path: str, tier: PeerTierConfig) -> None:
    try:
        AllowedHosts(tier.allowed_hosts)
    except ValueError as error:
        raise ConfigurationError(
            f"{path}.allowed_hosts", "names, addresses and networks", str(error), '["10.0.0.0/24", "engine-7"]'
        ) from None
    if tier.secret_file is None and tier.allowed_hosts:
        raise ConfigurationError(
            f"{path}.secret_file",
            "the path of a file, because hints may name any port of allowed_hosts",
            "nothing",
            "without a secret, any process at such a port can answer as an engine, also on the loopback",
        )


def _is_loopback(address: str) -> bool:
    from hybridkv.peers.wire import is_loopback  # slow to import

    parsed = parse_address(address)
    return parsed is not None and is_loopback(parsed[0])


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of "HOST:PORT"; None if the text has another form."""
    host, _, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        return None
    return host, int(port)


def _require_timeouts(config: OffloadConfig, path: str, tier: SecondaryTierConfig) -> None:
    if isinstance(tier, DiskTierConfig) and tier.lookup_timeout_seconds is not None:
        raise ConfigurationError(
            f"{path}.lookup_timeout_seconds",
            "a tier with async lookups: peer or object",
            "a disk tier, which has a local index",
            "remove lookup_timeout_seconds",
        )
    default_s = tier.default_lookup_timeout_s
    limits = (
        ("load_timeout_seconds", config.load_timeout_seconds, ROOT, "to wait for this tier as long as for all tiers"),
        (
            "lookup_timeout_seconds",
            config.load_timeout_of(tier),
            path,
            f"for {default_s:g} seconds, or for load_timeout_seconds if that is less",
        ),
    )
    for field, limit_s, owner, hint in limits:
        given_s = getattr(tier, field)
        if given_s is not None and not 0 < given_s <= limit_s:
            raise ConfigurationError(
                f"{path}.{field}",
                f"seconds above 0, at most the {limit_s:g} of {owner}.load_timeout_seconds",
                given_s,
                f"leave it out {hint}",
            )


def _plain_tier(path: str, tier: object) -> object:
    if not isinstance(tier, Mapping):
        raise ConfigurationError(path, "an object with a type", repr(tier), '{"type": "ram", "capacity": "4GiB"}')
    kind = tier.get("type")
    if not isinstance(kind, str) or kind not in _TIER_TYPES:
        hint = _LMCACHE_HINT if kind == "lmcache" else did_you_mean(str(kind), list(_TIER_TYPES))
        raise ConfigurationError(
            f"{path}.type", "one of " + ", ".join(f'"{name}"' for name in _TIER_TYPES), repr(kind), hint
        )
    refuse_unknown_keys(path, tier, _TIER_TYPES[kind], ("type",))
    plain = dict(tier)
    for field in ("capacity", "pack", "store_bytes_per_second"):
        if field in tier:
            plain[field] = parse_size(f"{path}.{field}", tier[field])
    return plain


def parse_size(path: str, value: object) -> int:
    """Number of bytes, given as an int or as a string such as "4GiB".

    Raises:
        ConfigurationError: the value is not a size, or not positive.
    """
    num_bytes: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        unit = _UNITS.get(match[2])
        if unit is None:
            raise ConfigurationError(path, "a unit among " + ", ".join(u for u in _UNITS if u), repr(value), _SIZE_HINT)
        num_bytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if num_bytes is None:
        raise ConfigurationError(path, "a size in bytes", repr(value), _SIZE_HINT)
    if int(num_bytes) <= 0:
        raise ConfigurationError(path, "a positive size", repr(value), _SIZE_HINT)
    return int(num_bytes)


def format_size(num_bytes: float) -> str:
    """Text for a number of bytes: `format_size(3 << 29)` is "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.4g} {unit}"
    return f"{num_bytes:.0f} B"
