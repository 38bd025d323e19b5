"""Settings of HybridNixlConnector: each mistake is reported with a valid value."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.config import ListenConfig, NixlConfig, decode_config, require_ports
from hybridkv.connectors.vllm.nixl.params import MAX_RANKS


def test_all_settings_have_defaults() -> None:
    assert decode_config({}) == NixlConfig()
    assert NixlConfig().listen.host == "127.0.0.1", "loopback by default"
    assert NixlConfig().verify


def test_given_settings_are_used() -> None:
    config = decode_config({"listen": {"host": "10.0.0.1", "port": 14579, "advertise": "kv-1"}, "verify": False})
    assert config.listen == ListenConfig(host="10.0.0.1", port=14579, advertise="kv-1")
    assert (config.listen.advertised, config.verify) == ("kv-1", False)


@pytest.mark.parametrize(
    ("raw", "path", "words"),
    [
        ({"lease_second": 3}, "lease_second", "lease_seconds"),
        ({"listen": {"prot": 3}}, "listen.prot", "port"),
        ({"listen": "here"}, "listen", "an object"),
        ({"listen": {"port": 65536}}, "listen.port", "a port"),
        ({"listen": {"host": " "}}, "listen.host", "an address"),
        ({"listen": {"advertise": ""}}, "listen.advertise", "a name"),
        ({"transport": "tcp"}, "transport", "a known key"),
        ({"verify": "yes"}, "verify", "bool"),
        ({"lease_seconds": 0}, "lease_seconds", "above 0"),
        ({"load_timeout_seconds": float("inf")}, "load_timeout_seconds", "above 0"),
        ({"connect_timeout_seconds": -1}, "connect_timeout_seconds", "above 0"),
        ({"max_leases": 0}, "max_leases", "1 to"),
        ({"allowed_hosts": "10.0.0.1"}, "allowed_hosts", "a list such as"),
        ({"allowed_hosts": ["10.0.0.1/8"]}, "allowed_hosts", "host bits"),
        ({"allowed_hosts": ["10.1"]}, "allowed_hosts", "10.1"),
        ({"allowed_hosts": [""]}, "allowed_hosts", "networks"),
        ({"allowed_hosts": ["a b"]}, "allowed_hosts", "a b"),
        ({"secret_file": 7}, "secret_file", "path"),
        ({"weights_digest": " "}, "weights_digest", "sampled"),
    ],
)
def test_a_mistake_is_reported_by_its_path(raw: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_config(raw)
    assert caught.value.path == f"{ROOT}.{path}"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.2", True),
        ("kv-2", True),
        ("10.0.0.3", False),
        ("::ffff:10.0.0.3", False),
        ("169.254.169.254", False),
        ("kv-3", False),
        ("kv-2.example", False),
        ("0.0.0.0", False),
        ("::", False),
        ("127.1", False),
        ("2130706433", False),
        ("127.0.0.1 ", False),
        ("", False),
        ("::1%lo", True),
        ("::1%lo\n", False),
        ("::1%\0", False),
        ("::1%" + "x" * 33, False),
    ],
)
def test_by_default_only_hosts_of_this_machine_are_allowed(host: str, is_allowed: bool) -> None:
    config = decode_config({"listen": {"host": "10.0.0.2", "advertise": "kv-2"}})
    assert (host in config.hosts) is is_allowed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0", "0"])
def test_a_wildcard_address_is_not_advertised(host: str) -> None:
    for listen in ({"host": host}, {"host": "10.0.0.2", "advertise": host}):
        with pytest.raises(ConfigurationError) as caught:
            decode_config({"listen": listen})
        assert caught.value.path == f"{ROOT}.listen.advertise" and host in str(caught.value.got)
    config = decode_config({"listen": {"host": host, "advertise": "kv-1"}})
    assert config.listen.advertised == "kv-1"


def test_a_wildcard_address_is_no_allowed_host() -> None:
    hosts = decode_config({"listen": {"host": "0.0.0.0", "advertise": "10.0.0.2"}}).hosts
    assert "0.0.0.0" not in hosts and "10.0.0.1" not in hosts
    assert "10.0.0.2" in hosts and "127.0.0.1" in hosts


@pytest.mark.parametrize(("port", "num_ranks"), [(65535, 1), (65532, 4), (0, 8)])
def test_one_port_per_rank_is_enough(port: int, num_ranks: int) -> None:
    require_ports(ListenConfig(port=port), num_ranks)


def test_more_ranks_than_a_consumer_accepts_are_refused() -> None:
    require_ports(ListenConfig(), MAX_RANKS)
    with pytest.raises(ConfigurationError) as caught:
        require_ports(ListenConfig(), MAX_RANKS + 1)
    assert (caught.value.path, caught.value.got) == ("tensor_parallel_size", MAX_RANKS + 1)


def test_too_few_ports_for_all_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_ports(ListenConfig(port=65533), 4)
    assert caught.value.path == f"{ROOT}.listen.port"
    assert "at most 65532" in caught.value.expected and caught.value.got == "65533, and 65536 for the last rank"


def test_allowed_hosts_replaces_the_defaults() -> None:
    hosts = decode_config({"allowed_hosts": ["10.0.0.0/30", "prefill-1", "fd00::/8"]}).hosts
    assert all(each in hosts for each in ("10.0.0.3", "Prefill-1", "fd00::7", "::ffff:10.0.0.1"))
    assert not any(each in hosts for each in ("10.0.0.4", "127.0.0.1", "localhost", "fe80::1", "prefill-10"))
    assert "127.0.0.1" not in decode_config({"allowed_hosts": []}).hosts
