"""Every mistake in the settings of the connector to peers is named, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl.config import ListenConfig, NixlConfig, decode_config


def test_nothing_needs_to_be_said() -> None:
    assert decode_config({}) == NixlConfig()
    assert NixlConfig().listen.host == "127.0.0.1", "the loopback, unless somebody says otherwise"
    assert NixlConfig().verify


def test_what_is_said_is_taken() -> None:
    config = decode_config(
        {"listen": {"host": "10.0.0.1", "port": 14579, "advertise": "kv-1"}, "transport": "tcp", "verify": False}
    )
    assert config.listen == ListenConfig(host="10.0.0.1", port=14579, advertise="kv-1")
    assert (config.listen.told, config.transport, config.verify) == ("kv-1", "tcp", False)


@pytest.mark.parametrize(
    ("raw", "path", "words"),
    [
        ({"lease_second": 3}, "lease_second", "lease_seconds"),
        ({"listen": {"prot": 3}}, "listen.prot", "port"),
        ({"listen": "here"}, "listen", "an object"),
        ({"listen": {"port": 65536}}, "listen.port", "a port"),
        ({"listen": {"host": " "}}, "listen.host", "an address"),
        ({"transport": "rdma"}, "transport", '"nixl"'),
        ({"verify": "yes"}, "verify", "bool"),
        ({"lease_seconds": 0}, "lease_seconds", "above 0"),
        ({"load_timeout_seconds": float("inf")}, "load_timeout_seconds", "above 0"),
        ({"connect_timeout_seconds": -1}, "connect_timeout_seconds", "above 0"),
        ({"max_leases": 0}, "max_leases", "1 to"),
        ({"secret_file": 7}, "secret_file", "path"),
        ({"weights_digest": " "}, "weights_digest", "sampled"),
    ],
)
def test_a_mistake_is_named(raw: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_config(raw)
    assert caught.value.path == f"{ROOT}.{path}"
    assert words in str(caught.value)
