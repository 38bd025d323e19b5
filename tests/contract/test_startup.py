"""A configuration mistake stops the engine before it serves, with path, expected, got and a hint.

The configurations and KV cache groups are real vLLM ones, built as its engine core builds them. Both roles of the
connector are built through vLLM's factory, so a half-configured start fails here.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starting import refusal_of, start
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, SinkFullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.connectors.vllm.common.layout import resolve_layout
from hybridkv.connectors.vllm.common.messages import StepOutcome, WorkerFacts
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, QWEN3_NEXT, Mix
from oracle.settings import HAS_TAILS, Configs, Connector, EngineSettings, make_configs

needs_tails = pytest.mark.skipif(not HAS_TAILS, reason="vLLM before 0.32 does not say where it hands over states")

RAM = {"type": "ram", "capacity": "64MiB"}


def configure(mix: Mix, extra: Mapping[str, Any], **settings: Any) -> Configs:
    return make_configs(mix, EngineSettings(num_blocks=64, connector=Connector(CONNECTOR, extra), **settings))


def opened(configs: Configs) -> Any:
    """The scheduler side after the engine has passed it the workers' handshakes."""
    scheduler = start(configs)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerFacts({"worker.platform": "cpu"})})
    return scheduler


@pytest.mark.parametrize("mix", [QWEN3_NEXT, GEMMA3, GPT_OSS, DEEPSEEK_V4], ids=lambda mix: mix.name)
def test_a_valid_configuration_starts_and_logs_its_settings(
    mix: Mix, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    started += [start(configure(mix, {"tiers": [RAM]}), role) for role in KVConnectorRole]
    logger.removeHandler(caplog.handler)
    (line,) = {record.getMessage() for record in caplog.records if "groups" in record.getMessage()}
    for index, group in enumerate(mix.groups):
        assert f"{index} {group.kind.name} blocks of {group.block_tokens}" in line
    chunk = mix.alignment_tokens if mix.has_recurrent else 128
    for words in (f"chunk {chunk} tokens", "bytes per token", "64 MiB holds about", "smallest prompt", "loads async"):
        assert words in line


@pytest.mark.parametrize(
    ("role", "words", "is_of_use_alone"),
    [
        ("kv_both", "kv_role kv_both, so it stores and loads;", True),
        ("kv_producer", "kv_role kv_producer, so it stores only;", False),
        ("kv_consumer", "kv_role kv_consumer, so it loads only;", False),
    ],
)
def test_the_start_line_names_the_role_and_a_useless_role_is_warned_about(
    role: str, words: str, is_of_use_alone: bool, started: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    for config in (with_disk(tmp_path), {"tiers": [RAM]}):
        caplog.clear()
        connector = Connector(CONNECTOR, config, role=role)
        started.append(opened(make_configs(GPT_OSS, EngineSettings(num_blocks=64, connector=connector))))
        assert started[-1].stores_only is (role == "kv_producer")
        assert any(words in record.getMessage() for record in caplog.records)
        is_warned = any("or a tier that outlives" in record.getMessage() for record in caplog.records)
        assert is_warned is (len(config["tiers"]) == 1 and not is_of_use_alone)
        started.pop().shutdown()
    logger.removeHandler(caplog.handler)


@needs_tails
@pytest.mark.parametrize(
    ("mix", "unit", "tail"),
    [(QWEN3_NEXT, None, None), (QWEN3_NEXT, 16, None), (QWEN3_NEXT, 4, 4), (GEMMA3, 4, None), (GPT_OSS, 2, None)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_tails_use_the_prefix_match_unit_of_the_engine_for_states(
    mix: Mix, unit: int | None, tail: int | None, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    configs = configure(mix, {"tiers": [RAM]}, hash_tokens=unit)
    started += [start(configs, role) for role in KVConnectorRole]
    logger.removeHandler(caplog.handler)
    assert [half._layout.spec.tail_tokens for half in started] == [tail, tail]
    said = sorted({record.getMessage() for record in caplog.records if "inside blocks" in record.getMessage()})
    assert len(said) == (2 if tail else 0), said
    if tail:
        assert "at multiples of 4 tokens" in said[0] and "vllm-project/vllm#55112" in said[1]


@needs_tails
def test_chunks_have_the_same_keys_with_and_without_tails(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    """So chunks stored before tails existed are found."""
    layouts = []
    for _ in range(2):
        started.append(start(configure(QWEN3_NEXT, {"tiers": [RAM]}, hash_tokens=4)))
        layouts.append(started[-1]._layout)
        monkeypatch.setattr("hybridkv.connectors.vllm.common.layout.choose_tail", lambda *_: None)
    assert [layout.spec.tail_tokens for layout in layouts] == [4, None]
    assert layouts[0].fingerprint({}).digest() == layouts[1].fingerprint({}).digest()


@needs_tails
def test_tails_are_off_unless_they_are_configured() -> None:
    """A server of LMCache keeps whole chunks."""
    configs = configure(QWEN3_NEXT, {"tiers": [RAM]}, hash_tokens=4)
    assert resolve_layout(configs.vllm, configs.scheduler, "auto").spec.tail_tokens is None
    assert resolve_layout(configs.vllm, configs.scheduler, "auto", with_tails=True).spec.tail_tokens == 4


def test_an_unknown_key_is_refused() -> None:
    error = refusal_of(configure(GPT_OSS, {"tiers": [RAM], "chunk_token": 64}))
    assert error.path == "kv_connector_extra_config.chunk_token"
    assert 'did you mean "chunk_tokens"?' in error.hint


@pytest.mark.parametrize("capacity", [-1, "-4GiB", 0])
def test_a_capacity_that_is_not_positive_is_refused(capacity: int | str) -> None:
    error = refusal_of(configure(GPT_OSS, {"tiers": [RAM | {"capacity": capacity}]}))
    assert error.path == "kv_connector_extra_config.tiers[0].capacity" and "positive" in error.expected


def test_a_capacity_smaller_than_one_chunk_is_refused() -> None:
    error = refusal_of(configure(QWEN3_NEXT, {"tiers": [RAM | {"capacity": 1000}]}))
    assert error.path == "kv_connector_extra_config.tiers[0].capacity"
    assert "one chunk of 16 tokens" in error.expected and "1000 bytes" in str(error.got)


def test_a_capacity_larger_than_the_host_is_refused() -> None:
    error = refusal_of(configure(GPT_OSS, {"tiers": [RAM | {"capacity": "900TiB"}]}))
    assert error.path == "kv_connector_extra_config.tiers[0].capacity" and "of this host" in error.expected


@pytest.mark.parametrize(("mix", "chunk", "unit"), [(QWEN3_NEXT, 24, 16), (DEEPSEEK_V4, 64, 128)])
def test_a_chunk_that_is_not_aligned_to_the_groups_is_refused(mix: Mix, chunk: int, unit: int) -> None:
    error = refusal_of(configure(mix, {"tiers": [RAM], "chunk_tokens": chunk}))
    assert error.path == "kv_connector_extra_config.chunk_tokens"
    assert f"a multiple of {unit} tokens" in error.expected and error.got == chunk and "use " in error.hint


def test_a_chunk_that_no_prompt_can_fill_is_refused() -> None:
    error = refusal_of(configure(GPT_OSS, {"tiers": [RAM], "chunk_tokens": 1 << 20}))
    assert error.path == "kv_connector_extra_config.chunk_tokens" and "max_model_len" in error.expected


def test_prefix_caching_off_with_recurrent_groups_is_refused() -> None:
    configs = configure(QWEN3_NEXT, {"tiers": [RAM]})
    configs.vllm.cache_config.enable_prefix_caching = False
    for kv_cache in (configs.scheduler, configs.worker):
        for group in kv_cache.kv_cache_groups[:3]:
            group.kv_cache_spec = replace(group.kv_cache_spec, mamba_cache_mode="none")
    error = refusal_of(configs)
    assert error.path == "kv_cache_groups[0].kv_cache_spec" and "--enable-prefix-caching" in error.hint


@pytest.mark.parametrize("unknown", [SinkFullAttentionSpec, RSWASpec])
def test_a_group_of_an_unknown_spec_is_refused(unknown: type[FullAttentionSpec]) -> None:
    configs = configure(GPT_OSS, {"tiers": [RAM]})
    extra = {"rswa_window": 64} if unknown is RSWASpec else {"sink_len": 4}
    for kv_cache in (configs.scheduler, configs.worker):
        known = kv_cache.kv_cache_groups[1].kv_cache_spec
        kv_cache.kv_cache_groups[1].kv_cache_spec = unknown(
            block_size=known.block_size,
            num_kv_heads=known.num_kv_heads,
            head_size=known.head_size,
            dtype=known.dtype,
            **extra,
        )
    error = refusal_of(configs)
    assert error.path == "kv_cache_groups[1].kv_cache_spec"
    assert unknown.__name__ in str(error.got) and "FullAttentionSpec" in error.expected


@pytest.mark.parametrize("field", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_an_unsupported_parallel_layout_is_refused(field: str) -> None:
    configs = configure(GPT_OSS, {"tiers": [RAM]})
    configs.vllm.parallel_config = copy.copy(configs.vllm.parallel_config)
    setattr(configs.vllm.parallel_config, field, 2)
    assert refusal_of(configs).path == field


def test_two_connectors_in_one_engine_are_refused(started: list[Any]) -> None:
    configs = configure(GPT_OSS, {"tiers": [RAM]})
    started += [start(configs, role) for role in KVConnectorRole]
    error = refusal_of(configs)
    assert error.path == "kv_connector" and "one HybridOffloadConnector" in error.expected


def test_an_engine_that_was_shut_down_can_start_again(started: list[Any]) -> None:
    configs = configure(GPT_OSS, {"tiers": [RAM]})
    start(configs).shutdown()
    started.append(start(configs))


def with_disk(path: Path) -> dict[str, Any]:
    disk = {"type": "disk", "path": str(path), "capacity": "256MiB"}
    return {"tiers": [RAM, disk], "weights_digest": "no weights"}


@pytest.mark.parametrize("field", ["nnodes", "data_parallel_size"])
def test_a_disk_shared_by_several_engines_or_hosts_is_refused(field: str, tmp_path: Path) -> None:
    configs = configure(GPT_OSS, with_disk(tmp_path / "cache"))
    configs.vllm.parallel_config = copy.copy(configs.vllm.parallel_config)
    setattr(configs.vllm.parallel_config, field, 2)
    error = refusal_of(configs)
    assert error.path == field and "disk" in error.expected and "object tier" in error.hint


def of_dense_group(rank: int, path: Path, **fields: Any) -> Configs:
    """The configuration that vLLM passes to one of two engines that serve a dense model."""
    configs = configure(GPT_OSS, with_disk(path))
    parallel = configs.vllm.parallel_config = copy.copy(configs.vllm.parallel_config)
    parallel.data_parallel_size = 2
    parallel.data_parallel_rank_local, parallel.data_parallel_index = rank, rank
    for field, value in fields.items():
        setattr(parallel, field, value)
    parallel.reconfigure_for_independent_dp_rank()
    assert parallel.data_parallel_size == 1
    return configs


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_disk_shared_by_engines_of_a_dense_model_is_refused_unopened(role: KVConnectorRole, tmp_path: Path) -> None:
    configs = of_dense_group(1, tmp_path / "cache")
    with pytest.raises(ConfigurationError) as caught:
        start(configs, role)
    assert caught.value.path == "data_parallel_size" and "1 with a disk tier" in caught.value.expected
    assert "rank 1" in str(caught.value) and "object tier" in caught.value.hint
    assert not (tmp_path / "cache").exists()


def test_an_engine_with_a_configuration_of_its_own_may_have_a_disk(started: list[Any], tmp_path: Path) -> None:
    started.append(start(of_dense_group(1, tmp_path / "cache", data_parallel_external_lb=True)))


def test_a_disk_path_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError) as caught:
        opened(configure(GPT_OSS, with_disk(tmp_path / "cache")))
    assert caught.value.path == "kv_connector_extra_config.tiers[1].path" and "link" in str(caught.value)


def test_a_disk_too_small_for_its_segments_is_refused(tmp_path: Path) -> None:
    config = with_disk(tmp_path / "cache")
    config["tiers"][1]["capacity"] = "1MiB"
    with pytest.raises(ConfigurationError) as caught:
        opened(configure(GPT_OSS, config))
    assert caught.value.path == "kv_connector_extra_config.tiers[1].capacity" and "at least" in caught.value.expected


def test_a_disk_that_another_engine_has_open_is_refused(started: list[Any], tmp_path: Path) -> None:
    started.append(opened(configure(GPT_OSS, with_disk(tmp_path / "cache"))))
    other = configure(GPT_OSS, with_disk(tmp_path / "cache"))
    other.vllm.kv_transfer_config.engine_id = "another"
    with pytest.raises(ConfigurationError) as caught:
        opened(other)
    assert caught.value.path == "kv_connector_extra_config.tiers[1].path" and str(os.getpid()) in str(caught.value)


def test_a_store_that_outlives_the_engine_waits_for_every_rank(
    started: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = configure(GPT_OSS, with_disk(tmp_path / "cache"))
    configs.vllm.parallel_config = copy.copy(configs.vllm.parallel_config)
    configs.vllm.parallel_config.world_size = configs.vllm.parallel_config.tensor_parallel_size = 2
    scheduler = start(configs)
    started.append(scheduler)
    foreign, mine = KVConnectorHandshakeMetadata(), WorkerFacts({"worker.platform": "cpu"})
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): mine, (0, 1): foreign})
    assert not (tmp_path / "cache").exists() and not any("groups 0" in line for line in caplog.messages)
    request = SimpleNamespace(request_id="a", num_tokens=100, num_prompt_tokens=100, block_hashes=[b"hash"] * 100)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    # The other rank's message arrives with a step, as below a connector that passes no handshake on.
    for facts in ({}, {}, {1: mine.facts}):
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=StepOutcome(facts=facts)))
    said = [line for line in caplog.messages if "1 of 2 workers" in line]
    assert len(set(said)) == 1
    assert (tmp_path / "cache").exists()


def test_a_disk_that_fails_to_open_late_disables_the_store_not_the_engine(
    started: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    scheduler = start(configure(GPT_OSS, with_disk(tmp_path / "cache")))
    started.append(scheduler)
    for _ in range(2):
        outcome = StepOutcome(facts={0: {"worker.platform": "cpu"}})
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=outcome))
    assert len({line for line in caplog.messages if "nothing is stored or loaded" in line}) == 1


def test_an_ignored_name_must_be_a_known_fact(tmp_path: Path) -> None:
    config = with_disk(tmp_path / "cache") | {"identity_ignores": ["worker.platfrom"]}
    with pytest.raises(ConfigurationError) as caught:
        opened(configure(GPT_OSS, config))
    assert "worker.platform" in caught.value.hint
