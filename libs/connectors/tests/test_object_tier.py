"""Object tier from an operator's configuration: a directory, and files with secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_worker_facts import layout

from hybridkv.connectors.config import ObjectTierConfig, OffloadConfig, RamTierConfig
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.tiers.object import StoreCounts

LAYOUT = layout()
SIZES = tiers.ArenaSizes(1 << 20, 4096)


def build(tier: ObjectTierConfig) -> Any:
    config = OffloadConfig(tiers=(RamTierConfig(capacity=1 << 20), tier), weights_digest="v1")
    return tiers.build_stack(config, LAYOUT, LAYOUT.fingerprint({"model": "m"}), SIZES)


def secret(path: Path, text: str = "s" * 32, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_directory_url_makes_an_object_tier(tmp_path: Path) -> None:
    stack = build(ObjectTierConfig(url=f"file://{tmp_path}/fleet", secret_file=secret(tmp_path / "secret")))
    assert list(stack.secondary) == ["object"] and stack.has_async_lookups
    stack.close()


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ({"url": "file:///proc/nothing/fleet"}, "tiers[1].url", "a directory that can be used"),
        ({"secret_file": "absent"}, "tiers[1].secret_file", "a file that can be read"),
        ({"secret_file": "short"}, "tiers[1].secret_file", "16 to 4096 bytes"),
        ({"credentials_file": "absent"}, "tiers[1].credentials_file", "a file that can be read"),
        ({"credentials_file": "open"}, "tiers[1].credentials_file", "only its owner"),
        ({"credentials_file": "short"}, "tiers[1].credentials_file", "a JSON object of strings"),
    ],
)
def test_an_invalid_setting_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, str], path: str, expected: str
) -> None:
    secret(tmp_path / "short", "secret!")
    secret(tmp_path / "open", '{"access_key_id": "secret!"}', 0o644)
    named = {name: str(tmp_path / value) if name.endswith("_file") else value for name, value in keys.items()}
    with pytest.raises(ConfigurationError) as refused:
        build(ObjectTierConfig(**{"url": f"file://{tmp_path}/fleet", **named}))
    assert refused.value.path.endswith(path), refused.value
    assert expected in refused.value.expected
    assert "secret!" not in str(refused.value)


def test_names_in_the_store_are_hashes(tmp_path: Path) -> None:
    """A list of directories reveals no prompt."""
    stack = build(ObjectTierConfig(url=f"file://{tmp_path}/fleet"))
    stack.close()
    assert all(len(name) == 40 for name in os.listdir(tmp_path / "fleet"))


def test_counts_of_the_store_become_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = build(ObjectTierConfig(url=f"file://{tmp_path}/fleet", time_to_live_seconds=3600.0, capacity=1 << 30))
    try:
        counted = StoreCounts(duplicates=3, renewed=2, sweeps_failed=1)
        monkeypatch.setattr(stack.secondary["object"], "take_store_counts", lambda: counted)
        metrics = ConnectorMetrics()
        metrics.tiers(stack, 1)
        totals = metrics.take().reduce()
    finally:
        stack.close()
    assert totals["vllm:hybridkv_duplicate_chunks_total"] == 3
    assert totals["vllm:hybridkv_store_upkeep_total"] == 3


@pytest.mark.parametrize(("number", "share"), [(None, None), (64 << 20, 64 << 20)])
def test_budgets_are_divided_among_the_ranks(tmp_path: Path, number: int | None, share: float | None) -> None:
    stack = build(ObjectTierConfig(url=f"file://{tmp_path}/fleet", store_bytes_per_second=number))
    try:
        assert stack.secondary["object"]._bytes_budget._per_s == (None if share is None else share / LAYOUT.world_size)
    finally:
        stack.close()
