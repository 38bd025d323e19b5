"""The page about the configuration shows an error as the connector raises it, and every key of the one to peers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.nixl import config as peers

PAGE = "docs/reference/configuration.md"


def page() -> str:
    """The checked-in page; skips where it is not there, as in a bare copy of the library."""
    for folder in Path(__file__).resolve().parents:
        if (folder / PAGE).is_file():
            return (folder / PAGE).read_text(encoding="utf-8")
    pytest.skip(f"{PAGE} is not among the files of this run")


def test_the_error_on_the_page_is_the_one_that_is_raised() -> None:
    with pytest.raises(ConfigurationError) as caught:
        decode_config({"tiers": [{"type": "ram", "capacity": "4GiB"}], "chunk_token": 512})
    example = " ".join(page().partition("```\n")[2].partition("```")[0].split())
    assert example == " ".join(str(caught.value).split())


def peers_section() -> str:
    return page().partition("## HybridNixlConnector\n")[2].partition("\n## ")[0]


def test_every_key_of_the_connector_to_peers_has_its_heading_and_no_other_has() -> None:
    headings = [line for line in peers_section().splitlines() if line.startswith("### ")]
    named = {key.strip("`") for line in headings for key in line.removeprefix("### ").split(", ")}
    own = [field.encode_name for field in msgspec.structs.fields(peers.NixlConfig) if field.name != "listen"]
    of_listen = [f"listen.{field.encode_name}" for field in msgspec.structs.fields(peers.ListenConfig)]
    assert named == {*own, *of_listen}


def test_the_example_of_the_connector_to_peers_is_understood() -> None:
    example = json.loads(peers_section().partition("```json\n")[2].partition("```")[0])
    assert peers.decode_config(example["kv_connector_extra_config"]).allowed_hosts == ("10.0.0.0/24",)


@pytest.mark.parametrize("key", ["lease_seconds", "max_leases", "connect_timeout_seconds", "load_timeout_seconds"])
def test_the_page_has_the_defaults_of_the_connector_to_peers(key: str) -> None:
    described = peers_section().partition(f"### `{key}`\n")[2].partition("\n### ")[0]
    assert f"Default {getattr(peers.NixlConfig(), key):g}." in described
