"""80 configurations with one mistake each that the configuration alone shows.

An error is refused by `hybridkv check` and in vLLM's front process, before weights are loaded; with a warning the
engine starts. Mistakes that need the host, such as a missing file, are in tests/contract/test_front_process.py.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import pytest

from hybridkv.connectors.checking import check

RAM: Final = {"type": "ram", "capacity": "4GiB"}
DISK: Final = {"type": "disk", "path": "/var/cache/hybridkv", "capacity": "200GiB"}
PEER: Final = {"type": "peer", "listen": "127.0.0.1:7300"}
OBJECT: Final = {"type": "object", "url": "file:///mnt/store", "secret_file": "/etc/hybridkv.secret"}

TOP: Final = "kv_connector_extra_config"

Mistake = tuple[str, dict[str, Any], str, str]
"""Name, configuration, severity, and path of the reported setting."""


def transfer(connector: str, extra: object, **fields: Any) -> dict[str, Any]:
    """--kv-transfer-config without another mistake."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        TOP: extra,
    } | fields


def offload(extra: dict[str, Any] | None = None, *tiers: object, **fields: Any) -> dict[str, Any]:
    listed = list(tiers) or [RAM, DISK]
    names = {tier.get("type") for tier in listed if isinstance(tier, dict)}
    base: dict[str, Any] = {"tiers": listed} | ({"weights_digest": "model-1"} if "object" in names else {})
    return transfer("HybridOffloadConnector", base | (extra or {}), **fields)


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    del changed[key]
    return changed


def multi(*children: object, **extra: Any) -> dict[str, Any]:
    return transfer("HybridMultiConnector", {"connectors": list(children)} | extra)


def nixl(**extra: Any) -> dict[str, Any]:
    return transfer("HybridNixlConnector", extra, kv_role=extra.pop("kv_role", "kv_consumer"))


def lmcache(**extra: Any) -> dict[str, Any]:
    return transfer("HybridLMCacheConnector", {"url": "tcp://127.0.0.1:5555"} | extra)


MISTAKES: Final[list[Mistake]] = [
    # Keys of vLLM
    ("connector misspelled", offload(kv_connector="HybridOfflodConnector"), "warning", "kv_connector"),
    ("role misspelled", offload(kv_role="both"), "error", "kv_role"),
    ("no role", without(offload(), "kv_role"), "error", "kv_role"),
    ("key misspelled", offload(kv_rolle="kv_both"), "error", "kv_rolle"),
    ("extra configuration is a list", transfer("HybridOffloadConnector", []), "error", TOP),
    ("no extra configuration", without(offload(), TOP), "error", f"{TOP}.tiers"),
    ("tiers outside", offload(tiers=[RAM]), "error", "tiers"),
    ("policy misspelled", offload(kv_load_failure_policy="recalculate"), "error", "kv_load_failure_policy"),
    ("no policy", without(offload(), "kv_load_failure_policy"), "warning", "kv_load_failure_policy"),
    ("producer with host memory alone", offload(None, RAM, kv_role="kv_producer"), "warning", "kv_role"),
    ("consumer with host memory alone", offload(None, RAM, kv_role="kv_consumer"), "warning", "kv_role"),
    # List of tiers
    ("tiers empty", offload({"tiers": []}), "error", f"{TOP}.tiers"),
    ("tiers is one object", offload({"tiers": RAM}), "error", f"{TOP}.tiers"),
    ("a tier is a word", offload(None, "ram"), "error", f"{TOP}.tiers[0]"),
    ("no host memory", offload(None, DISK), "error", f"{TOP}.tiers"),
    ("disk before host memory", offload(None, DISK, RAM), "error", f"{TOP}.tiers"),
    ("two times host memory", offload(None, RAM, RAM), "error", f"{TOP}.tiers[1].type"),
    ("two disks", offload(None, RAM, DISK, {**DISK, "path": "/x"}), "error", f"{TOP}.tiers[2].type"),
    ("tier without a type", offload(None, {"capacity": "4GiB"}), "error", f"{TOP}.tiers[0].type"),
    ("type misspelled", offload(None, {**RAM, "type": "rma"}), "error", f"{TOP}.tiers[0].type"),
    ("type in capitals", offload(None, {**RAM, "type": "RAM"}), "error", f"{TOP}.tiers[0].type"),
    ("lmcache as a tier", offload(None, RAM, {"type": "lmcache"}), "error", f"{TOP}.tiers[1].type"),
    ("mooncake as a tier", offload(None, RAM, {"type": "mooncake"}), "error", f"{TOP}.tiers[1].type"),
    ("object store before the disk", offload(None, RAM, OBJECT, DISK), "warning", f"{TOP}.tiers[1]"),
    # Host memory
    ("no capacity", offload(None, {"type": "ram"}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity in words", offload(None, {**RAM, "capacity": "4 gigs"}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity in a wrong case", offload(None, {**RAM, "capacity": "4gib"}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity 0", offload(None, {**RAM, "capacity": 0}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity negative", offload(None, {**RAM, "capacity": -1}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity is true", offload(None, {**RAM, "capacity": True}), "error", f"{TOP}.tiers[0].capacity"),
    ("capacity a fraction", offload(None, {**RAM, "capacity": 1.5}), "error", f"{TOP}.tiers[0].capacity"),
    ("path for host memory", offload(None, {**RAM, "path": "/x"}), "error", f"{TOP}.tiers[0].path"),
    # Disk
    ("disk without a path", offload(None, RAM, {"type": "disk", "capacity": "9GiB"}), "error", f"{TOP}.tiers[1].path"),
    ("relative path", offload(None, RAM, {**DISK, "path": "cache"}), "error", f"{TOP}.tiers[1].path"),
    ("path from the home", offload(None, RAM, {**DISK, "path": "~/cache"}), "error", f"{TOP}.tiers[1].path"),
    (
        "disk without a capacity",
        offload(None, RAM, {"type": "disk", "path": "/x"}),
        "error",
        f"{TOP}.tiers[1].capacity",
    ),
    ("key of a disk misspelled", offload(None, RAM, {**DISK, "pth": "/x"}), "error", f"{TOP}.tiers[1].pth"),
    ("fsync unknown", offload(None, RAM, {**DISK, "fsync": "sometimes"}), "error", f"{TOP}.tiers[1].fsync"),
    ("fsync a flag", offload(None, RAM, {**DISK, "fsync": True}), "error", f"{TOP}.tiers[1].fsync"),
    ("direct in words", offload(None, RAM, {**DISK, "direct": "yes"}), "error", f"{TOP}.tiers[1].direct"),
    (
        "disk smaller than host memory",
        offload(None, RAM, {**DISK, "capacity": "1GiB"}),
        "warning",
        f"{TOP}.tiers[1].capacity",
    ),
    ("cascade unknown", offload(None, RAM, {**DISK, "cascade": "some"}), "error", f"{TOP}.tiers[1].cascade"),
    ("cascade of host memory", offload(None, {**RAM, "cascade": "all"}), "error", f"{TOP}.tiers[0].cascade"),
    (
        "deadline of a disk above that of the request",
        offload({"load_timeout_seconds": 5}, RAM, {**DISK, "load_timeout_seconds": 9}),
        "error",
        f"{TOP}.tiers[1].load_timeout_seconds",
    ),
    # Peers
    ("peer without an address", offload(None, RAM, {"type": "peer"}), "error", f"{TOP}.tiers[1].listen"),
    ("address without a port", offload(None, RAM, {**PEER, "listen": "127.0.0.1"}), "error", f"{TOP}.tiers[1].listen"),
    ("port too large", offload(None, RAM, {**PEER, "listen": "127.0.0.1:99999"}), "error", f"{TOP}.tiers[1].listen"),
    ("peers is a word", offload(None, RAM, {**PEER, "peers": "10.0.0.2:7300"}), "error", f"{TOP}.tiers[1].peers"),
    ("a peer without a port", offload(None, RAM, {**PEER, "peers": ["a"]}), "error", f"{TOP}.tiers[1].peers[0]"),
    (
        "peers without a secret",
        offload(None, RAM, {**PEER, "listen": "10.0.0.7:7300"}),
        "error",
        f"{TOP}.tiers[1].secret_file",
    ),
    (
        "a malformed network",
        offload(None, RAM, {**PEER, "allowed_hosts": ["10.0.0.1/24"]}),
        "error",
        f"{TOP}.tiers[1].allowed_hosts",
    ),
    (
        "any host",
        offload(None, RAM, {**PEER, "allowed_hosts": "allow"}),
        "error",
        f"{TOP}.tiers[1].allowed_hosts",
    ),
    (
        "other hosts without a secret",
        offload(None, RAM, {**PEER, "allowed_hosts": ["127.0.0.0/8", "10.0.0.0/24"]}),
        "error",
        f"{TOP}.tiers[1].secret_file",
    ),
    (
        "the loopback without a secret",
        offload(None, RAM, {**PEER, "allowed_hosts": ["127.0.0.0/8"]}),
        "error",
        f"{TOP}.tiers[1].secret_file",
    ),
    ("cascade to a peer", offload(None, RAM, {**PEER, "cascade": "all"}), "error", f"{TOP}.tiers[1].cascade"),
    ("transport of a peer", offload(None, RAM, {**PEER, "transport": "tcp"}), "error", f"{TOP}.tiers[1].transport"),
    # Object stores
    ("object store without a URL", offload(None, RAM, {"type": "object"}), "error", f"{TOP}.tiers[1].url"),
    ("scheme unknown", offload(None, RAM, {**OBJECT, "url": "http://store/b"}), "error", f"{TOP}.tiers[1].url"),
    ("bucket without a scheme", offload(None, RAM, {**OBJECT, "url": "bucket/x"}), "error", f"{TOP}.tiers[1].url"),
    ("no bucket", offload(None, RAM, {**OBJECT, "url": "s3://"}), "error", f"{TOP}.tiers[1].url"),
    ("credentials in the URL", offload(None, RAM, {**OBJECT, "url": "s3://k:s@b/x"}), "error", f"{TOP}.tiers[1].url"),
    (
        "endpoint without a scheme",
        offload(None, RAM, {**OBJECT, "url": "s3://b/x", "endpoint": "10.0.0.5:8333"}),
        "error",
        f"{TOP}.tiers[1].endpoint",
    ),
    (
        "endpoint of a directory",
        offload(None, RAM, {**OBJECT, "endpoint": "http://a:1"}),
        "error",
        f"{TOP}.tiers[1].endpoint",
    ),
    ("pack 0", offload(None, RAM, {**OBJECT, "pack": 0}), "error", f"{TOP}.tiers[1].pack"),
    ("resets unknown", offload(None, RAM, {**OBJECT, "resets": "all"}), "error", f"{TOP}.tiers[1].resets"),
    (
        "lookup longer than the load",
        offload(None, RAM, {**OBJECT, "lookup_timeout_seconds": 99}),
        "error",
        f"{TOP}.tiers[1].lookup_timeout_seconds",
    ),
    (
        "object store with sampled digests",
        offload({"weights_digest": "sampled"}, RAM, OBJECT),
        "error",
        f"{TOP}.weights_digest",
    ),
    # Other settings
    ("setting misspelled", offload({"chunk_token": 256}), "error", f"{TOP}.chunk_token"),
    ("chunk 0", offload({"chunk_tokens": 0}), "error", f"{TOP}.chunk_tokens"),
    ("chunk in words", offload({"chunk_tokens": "big"}), "error", f"{TOP}.chunk_tokens"),
    ("load unknown", offload({"load": "later"}), "error", f"{TOP}.load"),
    ("time-out 0", offload({"load_timeout_seconds": 0}), "error", f"{TOP}.load_timeout_seconds"),
    ("time-out as text", offload({"load_timeout_seconds": "30s"}), "error", f"{TOP}.load_timeout_seconds"),
    ("share above 1", offload({"keep_share": 25}), "error", f"{TOP}.keep_share"),
    ("copies unknown", offload({"copies": "cuda"}), "error", f"{TOP}.copies"),
    ("verification a flag", offload({"verify_ram": True}), "error", f"{TOP}.verify_ram"),
    # Other connectors
    ("no children", multi(), "error", f"{TOP}.connectors"),
    ("mistake in a child", multi(offload({"chunk_token": 1})), "error", f"{TOP}.connectors[0].{TOP}.chunk_token"),
    ("a connector in itself", multi(multi(offload())), "error", f"{TOP}.connectors[0].kv_connector"),
    (
        "wildcard without an address to advertise",
        nixl(listen={"host": "0.0.0.0"}, secret_file="/s"),
        "error",
        f"{TOP}.listen.advertise",
    ),
    ("server without a scheme", lmcache(url="127.0.0.1:5555"), "error", f"{TOP}.url"),
]


@pytest.mark.parametrize(("config", "severity", "path"), [pytest.param(*rest, id=name) for name, *rest in MISTAKES])
def test_the_mistake_is_reported_by_its_path(config: dict[str, Any], severity: str, path: str) -> None:
    problems = check(config).problems
    assert [(problem.severity, problem.path) for problem in problems] == [(severity, path)]
    assert problems[0].hint


def test_the_same_settings_without_the_mistake_are_accepted() -> None:
    child = offload()
    for config in (child, offload(None, RAM, DISK, PEER, OBJECT), multi(child), nixl(), lmcache()):
        assert not check(config).problems, config
