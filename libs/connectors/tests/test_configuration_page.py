"""Configuration page: its error message equals the raised one, and it lists every key of the connectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.lmcache import config as lmcache
from hybridkv.connectors.vllm.nixl import config as peers

PAGE = "docs/reference/configuration.md"


def page() -> str:
    """Text of the page. Skips if the file is missing, as in a bare copy of the library."""
    for folder in Path(__file__).resolve().parents:
        if (folder / PAGE).is_file():
            return (folder / PAGE).read_text(encoding="utf-8")
    pytest.skip(f"{PAGE} is not among the files of this run")


def test_the_error_on_the_page_equals_the_raised_one() -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_config({"tiers": [{"type": "ram", "capacity": "4GiB"}], "chunk_token": 512})
    example = " ".join(page().partition("```\n")[2].partition("```")[0].split())
    assert example == " ".join(str(caught.value).split())


def section(connector: str) -> str:
    return page().partition(f"## {connector}\n")[2].partition("\n## ")[0]


def names(struct: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(struct)}


KEYS = {
    "HybridNixlConnector": names(peers.NixlConfig) - {"listen"}
    | {f"listen.{key}" for key in names(peers.ListenConfig)},
    "HybridLMCacheConnector": names(lmcache.LMCacheConfig),
}


@pytest.mark.parametrize("connector", KEYS)
def test_the_headings_equal_the_keys_of_the_connector(connector: str) -> None:
    headings = [line for line in section(connector).splitlines() if line.startswith("### ")]
    assert {key.strip("`") for line in headings for key in line.removeprefix("### ").split(", ")} == KEYS[connector]


def example(connector: str) -> Any:
    return json.loads(section(connector).partition("```json\n")[2].partition("```")[0])["kv_connector_extra_config"]


def test_the_examples_are_valid() -> None:
    assert peers.decode_config(example("HybridNixlConnector")).allowed_hosts == ("10.0.0.0/24",)
    assert lmcache.decode_config(example("HybridLMCacheConnector")).pool == 4 << 30


SECONDS = [
    (connector, key, default)
    for connector, config in (
        ("HybridNixlConnector", peers.NixlConfig()),
        ("HybridLMCacheConnector", lmcache.LMCacheConfig(url="")),
    )
    for key, default in msgspec.structs.asdict(config).items()
    if isinstance(default, float) or key in ("max_leases", "http_port")
]


@pytest.mark.parametrize(("connector", "key", "default"), SECONDS)
def test_the_page_has_the_defaults(connector: str, key: str, default: float) -> None:
    described = section(connector).partition(f"### `{key}`\n")[2].partition("\n### ")[0]
    assert f"Default {default:g}" in described
