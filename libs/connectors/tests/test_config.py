import pytest

from hybridkv.connectors.config import OffloadConfig, RamTierConfig, decode_config, format_size, parse_size
from hybridkv.connectors.errors import ConfigurationError

RAM = {"type": "ram", "capacity": "4GiB"}
PEER = {"type": "peer", "listen": "127.0.0.1:14700"}
OBJECT = {"type": "object", "url": "s3://bucket/kv"}
DISK = {"type": "disk", "path": "/cache", "capacity": "1GiB"}


def test_the_smallest_configuration_is_one_tier() -> None:
    assert decode_config({"tiers": [RAM]}) == OffloadConfig(
        tiers=(RamTierConfig(capacity=4 << 30),), chunk_tokens="auto", load="async"
    )


def test_all_settings_can_be_given() -> None:
    config = decode_config({"tiers": [{"type": "ram", "capacity": 123456}], "chunk_tokens": 512, "load": "sync"})
    assert config == OffloadConfig(tiers=(RamTierConfig(capacity=123456),), chunk_tokens=512, load="sync")


def test_weights_digest_and_identity_ignores_are_decoded() -> None:
    assert decode_config({"tiers": [RAM]}).weights_digest == "sampled"
    config = decode_config({"tiers": [RAM], "weights_digest": "mine, of May", "identity_ignores": ["engine.version"]})
    assert (config.weights_digest, config.identity_ignores) == ("mine, of May", ("engine.version",))


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [(1, 1), ("1", 1), ("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), (" 64 KiB ", 1 << 16)],
)
def test_a_size_is_a_number_or_a_number_with_a_unit(value: object, num_bytes: int) -> None:
    assert parse_size("capacity", value) == num_bytes


@pytest.mark.parametrize("value", [0, -1, "-4GiB", "0", True, None, 1.5, "4 gigs", "0.0001KiB", "GiB", "", [], "nan"])
def test_an_invalid_size_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_size("tiers[0].capacity", value)
    assert caught.value.path == "tiers[0].capacity" and caught.value.hint


@pytest.mark.parametrize(
    ("raw", "path", "expected", "got", "hint"),
    [
        ({}, "tiers", "at least one tier", "nothing", '"type": "ram"'),
        ({"tiers": []}, "tiers", "at least one tier", "[]", '"type": "ram"'),
        ({"tiers": [RAM], "chunk_token": 4}, "chunk_token", "a known key", "unknown", 'did you mean "chunk_tokens"?'),
        ({"tiers": [RAM], "xyzzy": 4}, "xyzzy", "a known key", "unknown", "known: tiers, chunk_tokens, load"),
        ({"tiers": [RAM], "experimental_cuda": True}, "experimental_cuda", "a known key", "unknown", "copies"),
        ({"tier": [RAM]}, "tier", "a known key", "unknown", 'did you mean "tiers"?'),
        ({"tiers": [RAM | {"capcity": 1}]}, "tiers[0].capcity", "a known key", "unknown", 'did you mean "capacity"?'),
        ({"tiers": [{"type": "rma", "capacity": 1}]}, "tiers[0].type", '"ram"', "'rma'", 'did you mean "ram"?'),
        ({"tiers": [RAM, {"type": "lmcache"}]}, "tiers[1].type", '"object"', "'lmcache'", "HybridLMCacheConnector"),
        ({"tiers": [{"capacity": 1}]}, "tiers[0].type", '"ram"', "None", "known: ram"),
        ({"tiers": [{"type": ["ram"]}]}, "tiers[0].type", '"ram"', "['ram']", "known: ram"),
        ({"tiers": [{"type": "ram"}]}, "tiers[0].capacity", "a value", "nothing", "capacity"),
        ({"tiers": ["ram"]}, "tiers[0]", "an object", "'ram'", '"type": "ram"'),
        ({"tiers": "ram"}, "tiers", "array", "'ram'", "configuration.md"),
        ({"tiers": [RAM, RAM]}, "tiers[1].type", "no other tier has", '"ram"', "tiers[0] has this type"),
        ({"tiers": [RAM, DISK, RAM]}, "tiers[2].type", "no other tier has", '"ram"', "tiers[0] has this type"),
        ({"tiers": [RAM, DISK, DISK]}, "tiers[2].type", "no other tier has", '"disk"', "tiers[1] has this type"),
        ({"tiers": [RAM, {**PEER, "listen": "here"}]}, "tiers[1].listen", "HOST:PORT", "'here'", "10.0.0.1:14700"),
        ({"tiers": [RAM, {**PEER, "listen": "::1:80"}]}, "tiers[1].listen", "HOST:PORT", "'::1:80'", "brackets"),
        ({"tiers": [RAM, {**PEER, "peers": ["a:1", "b:0"]}]}, "tiers[1].peers[1]", "HOST:PORT", "'b:0'", "14700"),
        ({"tiers": [RAM, {**PEER, "peers": ["a:1"] * 65}]}, "tiers[1].peers", "at most 64 peers", "65", "every prompt"),
        ({"tiers": [RAM, {**PEER, "cascade": "all"}]}, "tiers[1].cascade", '"nothing"', "'all'", "configuration.md"),
        ({"tiers": [RAM, {"type": "peer"}]}, "tiers[1].listen", "a value", "nothing", 'add "listen"'),
        (
            {"tiers": [RAM, {**PEER, "transport": "tcp"}]},
            "tiers[1].transport",
            "a known key",
            "an unknown one",
            "known:",
        ),
        ({"tiers": [RAM, {"type": "object"}]}, "tiers[1].url", "a value", "nothing", 'add "url"'),
        ({"tiers": [RAM, {**OBJECT, "url": "bucket"}]}, "tiers[1].url", "s3://", "'bucket'", "endpoint"),
        ({"tiers": [RAM, {**OBJECT, "url": "http://a"}]}, "tiers[1].url", "s3://", "'http://a'", "endpoint"),
        ({"tiers": [RAM, {**OBJECT, "endpoint": "a:1"}]}, "tiers[1].endpoint", "http://HOST:PORT", "'a:1'", "10.0.0.5"),
        ({"tiers": [RAM, OBJECT]}, "weights_digest", '"full"', "sampled", "name the revision"),
        (
            {"tiers": [RAM, {**OBJECT, "time_to_live_seconds": 1}]},
            "tiers[1].time_to_live_seconds",
            "at least 60",
            "1",
            "86400",
        ),
        (
            {"tiers": [RAM, {**OBJECT, "store_requests_per_second": 0}]},
            "tiers[1].store_requests_per_second",
            "above 0",
            "0",
            "leave it out",
        ),
        ({"tiers": [RAM, {**OBJECT, "capacity": "1TiB"}]}, "tiers[1].capacity", "file://", "s3://", "expiry rule"),
        ({"tiers": [RAM, {**OBJECT, "resets": "all"}]}, "tiers[1].resets", '"fleet"', "'all'", "configuration.md"),
        ({"tiers": [RAM, {**OBJECT, "cascade": "some"}]}, "tiers[1].cascade", '"reused"', "'some'", "configuration.md"),
        ({"tiers": [RAM, {**OBJECT, "pack": 0}]}, "tiers[1].pack", "a positive size", "0", "4GiB"),
        ({"tiers": [DISK]}, "tiers", 'a "ram" tier first', '"disk"', "passes through host memory"),
        ({"tiers": [DISK, RAM]}, "tiers", 'a "ram" tier first', '"disk", "ram"', "passes through host memory"),
        ({"tiers": [RAM, DISK | {"cascade": "some"}]}, "tiers[1].cascade", '"nothing"', "'some'", "configuration.md"),
        ({"tiers": [RAM | {"cascade": "all"}]}, "tiers[0].cascade", "a known key", "unknown", "known: capacity"),
        (
            {"tiers": [RAM, DISK | {"load_timeout_seconds": 31}]},
            "tiers[1].load_timeout_seconds",
            "at most the 30 of kv_connector_extra_config.load_timeout_seconds",
            "31",
            "leave it out",
        ),
        (
            {"tiers": [RAM, PEER | {"lookup_timeout_seconds": 0}]},
            "tiers[1].lookup_timeout_seconds",
            "above 0",
            "0",
            "leave it out",
        ),
        (
            {"tiers": [RAM, PEER | {"load_timeout_seconds": 2, "lookup_timeout_seconds": 3}]},
            "tiers[1].lookup_timeout_seconds",
            "at most the 2 of kv_connector_extra_config.tiers[1].load_timeout_seconds",
            "3",
            "leave it out",
        ),
        (
            {"tiers": [RAM, DISK | {"lookup_timeout_seconds": 0.5}]},
            "tiers[1].lookup_timeout_seconds",
            "async lookups",
            "disk",
            "remove lookup_timeout_seconds",
        ),
        ({"tiers": [RAM, DISK | {"path": "x"}]}, "tiers[1].path", "an absolute path", "'x'", "several processes"),
        ({"tiers": [RAM, DISK | {"fsync": "often"}]}, "tiers[1].fsync", '"interval"', "'often'", "configuration.md"),
        ({"tiers": [RAM, DISK | {"direct": "yes"}]}, "tiers[1].direct", '"auto"', "'yes'", "configuration.md"),
        ({"tiers": [RAM, DISK | {"capacity": 0}]}, "tiers[1].capacity", "positive", "0", "512MiB"),
        ({"tiers": [RAM], "load_timeout_seconds": 0}, "load_timeout_seconds", "above 0", "0", "30"),
        ({"tiers": [RAM], "pending_timeout_seconds": -1}, "pending_timeout_seconds", "above 0", "-1", "10"),
        ({"tiers": [RAM], "keep_share": 1.5}, "keep_share", "from 0 to 1", "1.5", "0.25"),
        ({"tiers": [RAM], "keep_share": "half"}, "keep_share", "float", "'half'", "configuration.md"),
        ({"tiers": [RAM], "compute_tokens_per_second": 0}, "compute_tokens_per_second", "above 0", "0", "measure"),
        ({"tiers": [RAM | {"capacity": "-1GiB"}]}, "tiers[0].capacity", "positive", "'-1GiB'", "512MiB"),
        ({"tiers": [RAM | {"capacity": "4GiBs"}]}, "tiers[0].capacity", "a unit among", "'4GiBs'", "512MiB"),
        ({"tiers": [RAM], "chunk_tokens": "big"}, "chunk_tokens", "auto", "'big'", "configuration.md"),
        ({"tiers": [RAM], "chunk_tokens": 0}, "chunk_tokens", "positive", "0", "auto"),
        ({"tiers": [RAM], "chunk_tokens": -128}, "chunk_tokens", "positive", "-128", "auto"),
        ({"tiers": [RAM], "chunk_tokens": 1.5}, "chunk_tokens", "int", "1.5", "configuration.md"),
        ({"tiers": [RAM], "local_copies": "yes"}, "local_copies", "bool", "'yes'", "configuration.md"),
        ({"tiers": [RAM], "verify_ram": "on"}, "verify_ram", '"sampled"', "'on'", "configuration.md"),
        ({"tiers": [RAM], "load": "later"}, "load", "async", "'later'", "configuration.md"),
        ({"tiers": [RAM], "checkpoints": "always"}, "checkpoints", '"off"', "'always'", "configuration.md"),
        ({"tiers": [RAM], "checkpoint_stops": -1}, "checkpoint_stops", "0 or more", "-1", "8 is the default"),
        ({"tiers": [RAM], "checkpoint_stops": "8"}, "checkpoint_stops", "int", "'8'", "configuration.md"),
        ({"tiers": [RAM], "checkpoint_answers": "no"}, "checkpoint_answers", "true", "'no'", "configuration.md"),
        ({"tiers": [RAM], "weights_digest": True}, "weights_digest", '"full"', "True", "configuration.md"),
        ({"tiers": [RAM], "weights_digest": " "}, "weights_digest", '"full"', "' '", "share a cache"),
        ({"tiers": [RAM], "weights_digst": "full"}, "weights_digst", "a known key", "unknown", '"weights_digest"?'),
        ({"tiers": [RAM], "identity_ignores": "engine.version"}, "identity_ignores", "a list", "'engine", "reference"),
        ({"tiers": [RAM], "identity_ignores": [3]}, "identity_ignores[0]", "str", "3", "configuration.md"),
        ({"tiers": [RAM], "identity_ignores": ["a", "*"]}, "identity_ignores[1]", "a fact", "'*'", "engine.version"),
    ],
)
def test_a_mistake_is_reported_with_path_expected_got_and_hint(
    raw: dict, path: str, expected: str, got: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_config(raw)
    error = caught.value
    assert error.path == f"kv_connector_extra_config.{path}"
    assert expected in error.expected and got in str(error.got) and hint in error.hint
    assert all(part in str(error) for part in (error.path, error.expected, str(error.got), error.hint))


@pytest.mark.parametrize(
    ("keys", "load_s", "lookup_wait_s"),
    [
        ({}, 20.0, 1.0),
        ({"load_timeout_seconds": 0.5}, 0.5, 0.5),
        ({"load_timeout_seconds": 5}, 5.0, 1.0),
        ({"lookup_timeout_seconds": 0.25}, 20.0, 0.25),
        ({"load_timeout_seconds": 5, "lookup_timeout_seconds": 5}, 5.0, 5.0),
    ],
)
def test_a_secondary_tier_has_its_own_deadlines(keys: dict, load_s: float, lookup_wait_s: float) -> None:
    config = decode_config({"tiers": [RAM, PEER | keys], "load_timeout_seconds": 20})
    [tier] = config.secondary.values()
    assert (config.load_timeout_of(tier), config.lookup_timeout_of(tier)) == (load_s, lookup_wait_s)


@pytest.mark.parametrize(("num_bytes", "text"), [(10, "10 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")])
def test_sizes_are_formatted_for_people(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_an_object_store_defaults_to_reused_chunks_and_a_short_lookup_timeout() -> None:
    config = decode_config({"tiers": [RAM, OBJECT], "weights_digest": "v1"})
    tier = config.object
    assert tier is not None
    assert (tier.cascade, config.lookup_timeout_of(tier), tier.pack) == ("reused", 0.25, 16 << 20)
    config = decode_config({"tiers": [RAM, {**OBJECT, "cascade": "all", "pack": "4MiB"}], "weights_digest": "full"})
    assert config.object is not None
    assert (config.object.cascade, config.object.pack) == ("all", 4 << 20)
