"""The page about the configuration shows an error as the connector raises it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.errors import ConfigurationError

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
