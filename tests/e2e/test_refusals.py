"""An engine with hybridkv does not start for models whose prefixes vLLM itself cannot resume.

The control: without the refusal, a restored prefix gives other tokens, while computed answers are reproducible. One
process, one engine at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import harness
import pytest
import torch
from harness import Engine, make_prompt
from refused_models import ENGINE_ARGUMENTS, make_model

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.offload import builder
from hybridkv.connectors.vllm.offload import connector as offload

SHARED_TOKENS: Final = 1024
PROMPT_TOKENS: Final = 1061
PROMPT: Final = make_prompt(PROMPT_TOKENS, seed=3, prefix=make_prompt(SHARED_TOKENS, seed=1))
BEFORE: Final = make_prompt(PROMPT_TOKENS, seed=2, prefix=make_prompt(SHARED_TOKENS, seed=1))
OTHER_PREFIX: Final = [*make_prompt(SHARED_TOKENS, seed=4), *PROMPT[SHARED_TOKENS:]]


def connector(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "256MiB"}], **extra},
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("refusals"))
    harness.prepare_environment(directory / "environment")
    register()
    return directory


@contextmanager
def running(kind: str, directory: Path, **arguments: Any) -> Iterator[Engine]:
    model = make_model(kind, directory / kind)
    with harness.running_model(model, ENGINE_ARGUMENTS | arguments) as engine:
        yield engine


def refused(kind: str, directory: Path, extra: dict[str, Any], **arguments: Any) -> ConfigurationError:
    """The error of an engine that does not start. Clears the process groups that vLLM leaves behind."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        with (
            pytest.raises(ConfigurationError) as caught,
            running(kind, directory, kv_transfer_config=connector(**extra), **arguments),
        ):
            pass
    finally:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "arguments"), [("mla", {"attention_backend": "CPU_MLA"}), ("prefix-lm", {"max_num_batched_tokens": 2048})]
)
def test_refused_models_would_give_other_answers_from_a_restored_prefix(
    kind: str, arguments: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (offload, builder):
        monkeypatch.setattr(module, "require_resumable", lambda *facts, **exception: None)
    with running(kind, directory, kv_transfer_config=connector(), **arguments) as engine:
        switches = engine.core.vllm_config
        assert not switches.cache_config.enable_prefix_caching
        assert not switches.scheduler_config.enable_chunked_prefill
        cold = engine.generate([PROMPT])[0]
        engine.connector.reset_cache()
        again = engine.generate([PROMPT])[0]
        engine.connector.reset_cache()
        engine.generate([BEFORE])
        restored = engine.generate([PROMPT])[0]
    assert cold.num_cached_tokens == again.num_cached_tokens == 0 and again.same_output(cold)
    assert restored.num_cached_tokens == SHARED_TOKENS
    assert restored.token_ids != cold.token_ids


@pytest.mark.parametrize("extra", [{}, {"without_prefix_caching": True}], ids=["plain", "excepted"])
def test_latent_attention_on_its_reference_path_is_refused(directory: Path, extra: dict[str, Any]) -> None:
    error = refused("mla", directory, extra, attention_backend="CPU_MLA")
    assert error.path == "enable_prefix_caching" and "MLA" in error.expected and "CPU_MLA" in str(error.got)


def test_latent_attention_is_refused_without_amx_and_exact_with_it(directory: Path) -> None:
    if not torch.cpu._is_amx_tile_supported():
        error = refused("mla", directory, {})
        assert error.path == "enable_prefix_caching" and "MLA" in error.expected and "without AMX" in str(error.got)
        return
    options = {"kv_transfer_config": connector(), "dtype": "bfloat16", "enable_prefix_caching": True}
    with running("mla", directory, **options) as engine:
        require_resumed_exactly(engine)


@pytest.mark.parametrize("extra", [{}, {"without_prefix_caching": True}], ids=["plain", "excepted"])
def test_a_model_with_bidirectional_prompt_attention_is_refused(directory: Path, extra: dict[str, Any]) -> None:
    error = refused("prefix-lm", directory, extra, enable_prefix_caching=True)
    assert error.path == "kv_cache_groups[0].kv_cache_spec" and "non_causal True" in str(error.got)
    assert "both directions" in str(error.got)


def test_disabled_prefix_caching_on_an_ordinary_model_is_refused(directory: Path) -> None:
    error = refused("ordinary", directory, {}, enable_prefix_caching=False)
    assert error.path == "enable_prefix_caching" and "without_prefix_caching" in error.hint


def test_disabled_prefix_caching_is_exact_with_an_explicit_exception(directory: Path) -> None:
    transfer = connector(without_prefix_caching=True)
    with running("ordinary", directory, kv_transfer_config=transfer, enable_prefix_caching=False) as engine:
        assert not engine.core.vllm_config.cache_config.enable_prefix_caching
        require_resumed_exactly(engine)


def require_resumed_exactly(engine: Engine) -> None:
    """Compute a prompt in pieces, the last of which begins where the stored prefix ends, and resume it there: both are
    exactly equal. The control is the same end after another prefix.
    """
    forget_own = engine.core.vllm_config.cache_config.enable_prefix_caching
    results = []
    for prompt in (BEFORE, PROMPT, None, PROMPT, OTHER_PREFIX):
        if forget_own:
            engine.reset_prefix_cache()
        if prompt is None:
            engine.connector.reset_cache()
        else:
            results += engine.generate([prompt])
    _, warm, cold, other = results
    assert [each.num_cached_tokens for each in results] == [0, SHARED_TOKENS, 0, 0]
    assert warm.same_output(cold)
    assert not other.same_output(cold)
