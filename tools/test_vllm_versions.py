"""The table of versions matches the pins, and one command adds a version everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import vllm_versions as versions

FILES = (versions.VERSIONS, versions.LOCK, versions.MODULE, versions.PAGE)
INDEX = {"files": [{"filename": "vllm-0.34.0.tar.gz", "url": "https://x.example/v.tar.gz", "hashes": {"sha256": "ab"}}]}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, tmp_path / name)
    return tmp_path


def texts(root: Path) -> list[str]:
    return [(root / name).read_text(encoding="utf-8") for name in FILES]


def test_the_page_has_the_table_of_the_pins(checkout: Path) -> None:
    before = texts(checkout)
    versions.write_table(checkout)
    assert texts(checkout) == before, "run: tools/bazel run //tools:vllm_versions -- table"


def test_each_pinned_version_has_a_repository_and_a_list_of_skips() -> None:
    named = versions.constants(Path(versions.VERSIONS).read_text(encoding="utf-8"))
    module = Path(versions.MODULE).read_text(encoding="utf-8")
    assert named["VLLM_VERSIONS"].keys() <= named["VLLM_SKIPS"].keys()
    assert all(f'"{versions.repository(version)}"' in module for version in named["VLLM_VERSIONS"])


def test_a_version_is_added_everywhere_at_once(checkout: Path) -> None:
    before = versions.constants(texts(checkout)[0])
    versions.add(checkout, "0.34.0", INDEX)
    pins, _, module, page = texts(checkout)
    after = versions.constants(pins)
    pin = {"url": "https://x.example/v.tar.gz", "sha256": "ab"}
    assert after["VLLM_VERSIONS"] == before["VLLM_VERSIONS"] | {"0.34.0": pin}
    assert after["VLLM_SKIPS"] == before["VLLM_SKIPS"] | {"0.34.0": {}}
    assert '    "vllm_0_33_0",\n    "vllm_0_34_0",\n)' in module
    assert "| 0.34.0 | on its Python files | not tested | - |\n| 0.33.0 |" in page
    with pytest.raises(ValueError, match=r"0\.34\.0 is in"):
        versions.add(checkout, "0.34.0", INDEX)


def test_a_version_missing_in_the_index_changes_nothing(checkout: Path) -> None:
    before = texts(checkout)
    with pytest.raises(ValueError, match=r"has no vllm-0\.35\.0"):
        versions.add(checkout, "0.35.0", INDEX)
    assert texts(checkout) == before
