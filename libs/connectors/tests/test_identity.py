"""Identity of an engine: which parts of its configuration, environment and code count, on real configurations."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_configs import ARCHITECTURE, LLAMA, LONGROPE, make_config, write_model
from transformers import LlamaConfig
from vllm.config import CacheConfig, MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from hybridkv.connectors.config import OffloadConfig, decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts, spec_facts
from hybridkv.connectors.vllm.common.identity.engine import NONCE, engine_facts
from hybridkv.connectors.vllm.common.identity.excluded import without_ignored
from hybridkv.connectors.vllm.common.identity.fact_text import MAX_TEXT, child, text
from hybridkv.hashing import Fingerprint, diff

OPTIONS = decode_config({"tiers": [{"type": "ram", "capacity": "1GiB"}], "weights_digest": "the tests'"})


def facts(root: Path, settings: dict[str, Any] | None = None, **model: Any) -> dict[str, str]:
    return configuration_facts(make_config(write_model(root, settings), **model))


def differing(a: dict[str, str], b: dict[str, str]) -> tuple[str, ...]:
    """Names of the facts in which two fingerprints differ, as in a log."""

    def made(of: dict[str, str]) -> Fingerprint:
        return Fingerprint(facts=of, chunk_tokens=16, hash_algorithm="sha256", tensor_parallel_size=1, groups=())

    assert (made(a).digest() == made(b).digest()) == (a == b)
    return tuple(line.partition(":")[0] for line in diff(made(a), made(b)))


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            ("model_config.hf_config.rope_parameters.factor", "model_config.hf_config.rope_parameters.rope_type"),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("rope_parameters.rope_theta",)),
        ({"query_pre_attn_scalar": 128}, ("query_pre_attn_scalar",)),
        ({"sliding_window": 512}, ("sliding_window",)),
        ({"rms_norm_eps": 1e-5}, ("rms_norm_eps",)),
    ],
)
def test_an_override_changes_the_identity_and_is_named(
    tmp_path: Path, overrides: dict[str, Any], names: tuple[str, ...]
) -> None:
    found = differing(facts(tmp_path), facts(tmp_path, hf_overrides=overrides))
    assert [name for name in names if not any(name in line for line in found)] == []
    assert all("hf_config" in line for line in found)


def test_an_override_equals_the_same_setting_in_the_file(tmp_path: Path) -> None:
    written = facts(tmp_path / "a", LLAMA | {"rms_norm_eps": 1e-5})
    said = facts(tmp_path / "b", hf_overrides={"rms_norm_eps": 1e-5})
    called = facts(tmp_path / "c", hf_overrides=lambda config: config.update({"rms_norm_eps": 1e-5}) or config)
    assert written == said == called != facts(tmp_path / "d")


@pytest.mark.parametrize(
    "settings",
    [
        {"_name_or_path": "somewhere/else"},
        {"transformers_version": "1.2.3"},
        {"_name_or_path": "elsewhere", "transformers_version": "4"},
    ],
)
def test_the_origin_of_a_configuration_does_not_count(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert facts(tmp_path / "a", LLAMA | settings) == facts(tmp_path / "b")


def test_names_and_lengths_do_not_count(tmp_path: Path) -> None:
    assert facts(tmp_path / "a", served_model_name="x", max_model_len=2048, seed=7) == facts(tmp_path / "b")


def test_a_nested_configuration_counts_wherever_it_is(tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path))
    inner, listed = (LlamaConfig(hidden_size=32, made_up=1) for _ in range(2))
    config.model_config.hf_config.text_config = config.model_config.hf_text_config = inner
    config.model_config.hf_config.parts = [listed]
    before = configuration_facts(config)
    assert before["model_config.hf_text_config"] == "the same as model_config.hf_config.text_config"
    inner.made_up = 2
    assert differing(before, configuration_facts(config)) == ("model_config.hf_config.text_config.made_up",)
    inner.made_up, listed.made_up = 1, 2
    assert differing(before, configuration_facts(config)) == ("model_config.hf_config.parts",)
    listed.made_up, listed._name_or_path = 1, "elsewhere"
    assert before == configuration_facts(config)


class Silent(LlamaConfig):
    """Its `to_dict` omits nested configurations."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "silent"}


def test_a_nested_configuration_that_its_parent_omits_counts_itself(tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path))
    inner = LlamaConfig(hidden_size=32)
    config.model_config.hf_config = Silent(text_config=inner)
    config.model_config.hf_text_config = inner
    assert configuration_facts(config)["model_config.hf_text_config.hidden_size"] == "32"


@pytest.mark.parametrize("max_model_len", [2048, 4096, 4097, 8192])
def test_longrope_counts_as_vllm_decides_it(tmp_path: Path, max_model_len: int) -> None:
    config = make_config(write_model(tmp_path, LONGROPE), max_model_len=max_model_len)
    rope = config.model_config.hf_config.rope_parameters
    with set_current_vllm_config(config):
        layer = Phi3LongRoPEScaledRotaryEmbedding(
            16,
            16,
            8192,
            rope["original_max_position_embeddings"],
            10000.0,
            True,
            torch.float32,
            rope["short_factor"],
            rope["long_factor"],
        )
    said = configuration_facts(config)["model_config.is_longrope_long"]
    assert said == f"[[{'true' if layer.use_long_rope else 'false'}]]" == f"[[{str(max_model_len > 4096).lower()}]]"


def test_longrope_shares_a_cache_on_one_side_of_its_original_length(tmp_path: Path) -> None:
    short, border, long, longer = (facts(tmp_path, LONGROPE, max_model_len=n) for n in (2048, 4096, 4097, 8192))
    assert short == border and long == longer
    assert differing(border, long) == ("model_config.is_longrope_long",)


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "made of cheese", "factor": 2.0}, True),
    ],
)
def test_max_model_len_counts_if_the_rotary_embedding_may_depend_on_it(
    tmp_path: Path, rope: dict[str, Any], counts: bool
) -> None:
    config = make_config(write_model(tmp_path))
    config.model_config.hf_config.rope_parameters = rope | {"rope_theta": 1e4}
    before = configuration_facts(config)
    config.model_config.max_model_len = 2048
    assert ("model_config.max_model_len" in differing(before, configuration_facts(config))) == counts


def test_each_layer_type_may_have_its_own_rotary_embedding(tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path))
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config.model_config.hf_config.rope_parameters = {"full_attention": plain, "sliding_attention": plain}
    assert "model_config.max_model_len" not in configuration_facts(config)
    config.model_config.hf_config.rope_parameters["full_attention"] = plain | {"rope_type": "dynamic"}
    assert "model_config.max_model_len" in configuration_facts(config)


def test_llama_4_attention_tuning_depends_on_the_length(tmp_path: Path) -> None:
    config = make_config(write_model(tmp_path))
    config.model_config.hf_config.architectures = ["Llama4ForCausalLM"]
    found = []
    for max_model_len in (32768, 32769, 65536):
        config.model_config.max_model_len = max_model_len
        found.append(configuration_facts(config))
    assert differing(found[0], found[1]) == ("model_config.is_llama4_tuned",) and found[1] == found[2]
    config.model_config.override_generation_config = {"temperature": 0.5}
    assert configuration_facts(config) == found[2]
    config.model_config.override_generation_config = {"attn_temperature_tuning": False}
    assert differing(configuration_facts(config), found[2]) == ("model_config.attn_temperature_tuning",)


@dataclasses.dataclass
class NewerCacheConfig(CacheConfig):
    """Cache configuration of a hypothetical newer vLLM."""

    brand_new: Any = 1


def newer(root: Path, value: Any) -> VllmConfig:
    config = make_config(write_model(root))
    cache = NewerCacheConfig(block_size=16)
    for field in dataclasses.fields(CacheConfig):
        object.__setattr__(cache, field.name, getattr(config.cache_config, field.name))
    cache.brand_new = value
    config.cache_config = cache
    return config


def test_an_unknown_field_of_a_newer_vllm_counts(tmp_path: Path) -> None:
    one, two = (configuration_facts(newer(tmp_path, value)) for value in (1, 2))
    assert differing(one, two) == ("cache_config.brand_new",)


def test_a_value_without_a_text_is_refused_until_it_is_ignored(tmp_path: Path) -> None:
    config = newer(tmp_path, object())
    with pytest.raises(ConfigurationError) as caught:
        configuration_facts(config)
    assert caught.value.path == "cache_config.brand_new" and "builtins.object" in str(caught.value.got)
    assert '"identity_ignores": ["cache_config.brand_new"]' in caught.value.hint
    found = configuration_facts(config, ("cache_config.brand_new",))
    assert "cache_config.brand_new" not in without_ignored(found, ("cache_config.brand_new",))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    1.0,
    float("inf"),
    "1",
    "null",
    "true",
    "",
    "Color.RED",
    "torch.float16",
    'path "a"',
    "[1]",
    Color.RED,
    Color.BLUE,
    torch.float16,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda", 1),
    Path("a"),
    "a",
    b"a",
    [],
    [1],
    [[1]],
    [1, 2],
    [2, 1],
    ["1"],
    {},
    {1: 2},
    {"1": 2},
    {"a": {"b": 1}},
    {"a": 1, "b": 1},
    {"a.b": 1},
    set(),
    {1},
    {1, 2},
    {"set {1}"},
    range(2),
    re.compile("a"),
    re.compile("a", re.IGNORECASE),
    Fraction(1, 2),
    Point(1, 2),
    Point(2, 1),
    [Point(1, 2)],
    int,
    Path,
    json.dumps,
    functools.partial(json.dumps, indent=1),
    functools.partial(json.dumps, indent=2),
]


def test_different_values_have_different_texts() -> None:
    texts = [text("at", value) for value in VALUES]
    assert len(set(texts)) == len(VALUES)
    assert texts == [text("at", value) for value in VALUES]


def test_a_text_does_not_depend_on_the_order_of_dicts_and_sets() -> None:
    assert text("at", {"a": 1, "b": 2}) == text("at", {"b": 2, "a": 1})
    assert text("at", {"a", "b", "c"}) == text("at", {"c", "b", "a"})
    assert text("at", (1, 2)) == text("at", [1, 2])


def test_texts_are_equal_in_every_process() -> None:
    code = "from hybridkv.connectors.vllm.common.identity.fact_text import text; print(text('', {'a','b','c','d'}))"
    environ = {"PYTHONPATH": ":".join(sys.path)}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert outputs == {b'set {"a", "b", "c", "d"}\n'}


def test_a_long_text_is_digested() -> None:
    long, other = "x" * MAX_TEXT, "x" * MAX_TEXT + "y"
    assert text("at", long) != text("at", other) and len(text("at", long)) < 50
    assert text("at", "x" * (MAX_TEXT - 2)) == '"' + "x" * (MAX_TEXT - 2) + '"'


@pytest.mark.parametrize("value", [object(), lambda: 1, Point(1, 2).__repr__, iter([]), [object()], {1: object()}])
def test_a_value_without_a_text_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        text("some.path", value)
    assert caught.value.path.startswith("some.path") and "some.path" in caught.value.hint


def test_paths_of_different_keys_differ() -> None:
    keys = ["a", "a.b", "", "1", 1, "a b", "[1]", '"1"', None, 'x"]["y']
    assert len({child("at", key) for key in keys}) == len(keys)
    assert child(child("at", "a"), "b") == "at.a.b" != child("at", "a.b")


def test_identity_ignores_matches_names_and_their_beginnings() -> None:
    known = {"engine.version": "1", "a": "A", "a.b": "2", "a.b.c": "3", "a[0]": "4", "ab": "5"}
    assert without_ignored(known, ()) == known
    assert without_ignored(known, ("engine.version",)).keys() == known.keys() - {"engine.version"}
    assert without_ignored(known, ("a",)).keys() == {"engine.version", "ab"}
    assert without_ignored(known, ("a.b",)).keys() == {"engine.version", "a", "a[0]", "ab"}
    assert without_ignored(known, ("*.c", "a[0]")).keys() == known.keys() - {"a.b.c", "a[0]"}


def test_an_unknown_name_in_identity_ignores_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        without_ignored({"engine.version": "0.32", "a": "1"}, ("a", "engine.versoin"))
    assert caught.value.path == "kv_connector_extra_config.identity_ignores[1]"
    assert 'did you mean "engine.version"?' in caught.value.hint


def test_facts_of_equal_engines_are_equal(tmp_path: Path) -> None:
    one, two = (engine_facts(make_config(write_model(tmp_path / n)), {"VLLM_X": "1"}, OPTIONS) for n in ("a", "b"))
    assert one == two and one.unrepeatable == {} and NONCE not in one.facts
    assert re.fullmatch(r"0\.\d+", one.facts["engine.version"])
    assert one.facts["weights.named"] == "the tests'" and "environment.VLLM_X" in one.facts


CHANGING = [
    "cache_config.calculate_kv_scales",
    "multimodal_config.mm_processor_cache_gb",
    "weight_transfer_config",
    "weights.model",
]


@pytest.mark.parametrize("name", CHANGING)
def test_an_unrepeatable_setting_makes_the_facts_unique_to_the_process(tmp_path: Path, name: str) -> None:
    options = OPTIONS if name != "weights.model" else OffloadConfig(tiers=())
    found = []
    for _ in range(2):
        config = make_config(write_model(tmp_path))
        if name == "weight_transfer_config":
            config.weight_transfer_config = Color.RED
        elif name == "multimodal_config.mm_processor_cache_gb":
            config.cache_config.enable_prefix_caching = False
            config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0)
        elif name != "weights.model":
            object.__setattr__(config.cache_config, "calculate_kv_scales", True)
        found.append(engine_facts(config, {}, options))
    assert found[0].unrepeatable.keys() == {name} and found[0].unrepeatable[name]
    assert differing(found[0].facts, found[1].facts) == (NONCE,) and name in found[0].facts[NONCE]


@pytest.mark.parametrize(("has_prefixes", "cache_gb"), [(True, 0), (False, 4)])
def test_hashed_images_are_repeatable(tmp_path: Path, has_prefixes: bool, cache_gb: int) -> None:
    config = make_config(write_model(tmp_path))
    config.cache_config.enable_prefix_caching = has_prefixes
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    assert engine_facts(config, {}, OPTIONS).unrepeatable == {}


CODED = LLAMA | {"auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"}}


def coded(root: Path, settings: dict[str, Any], trust: bool = True) -> Any:
    config = make_config(write_model(root))
    config.model_config.trust_remote_code = trust
    config.model_config.hf_config.auto_map = settings.get("auto_map")
    return engine_facts(config, {}, OPTIONS)


def test_model_code_counts_if_it_is_trusted(tmp_path: Path) -> None:
    (write_model(tmp_path) / "modeling_x.py").write_text("a = 1")
    before = coded(tmp_path, CODED)
    (tmp_path / "modeling_x.py").write_text("a = 2")
    after = coded(tmp_path, CODED)
    assert differing(before.facts, after.facts) == ("code.model",)
    (tmp_path / "helper.py").write_text("")
    assert differing(after.facts, coded(tmp_path, CODED).facts) == ("code.model",)
    assert "code.model" not in coded(tmp_path, CODED, trust=False).facts
    assert "code.model" not in coded(tmp_path, LLAMA).facts


def test_missing_code_of_another_repository_is_unrepeatable(tmp_path: Path) -> None:
    found = coded(tmp_path, LLAMA | {"auto_map": {"AutoModel": "org/other--modeling_x.X"}})
    assert list(found.unrepeatable) == ["code.model['org/other']"]


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"num_kv_heads": 4}, True),
        ({"head_size": 128}, True),
        ({"dtype": torch.bfloat16}, True),
        ({"sliding_window": 128}, True),
        ({"non_causal": True}, True),
        ({"block_size": 32}, False),
        ({"page_size_padded": 1 << 20}, False),
    ],
)
def test_a_layer_spec_counts_without_its_page_layout(change: dict[str, Any], counts: bool) -> None:
    assert (spec_facts(dataclasses.replace(FULL, **change)) != spec_facts(FULL)) == counts


def test_specs_of_two_kinds_differ() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=64)
    state = MambaSpec(block_size=16, shapes=((4, 8), (2, 2)), dtypes=(torch.float16, torch.float32))
    swapped = dataclasses.replace(state, dtypes=(torch.float32, torch.float16))
    texts = [spec_facts(spec) for spec in (FULL, window, state, swapped)]
    assert all(texts.count(found) == 1 for found in texts)
    assert texts[2]["spec"] == "MambaSpec" and texts[2]["dtypes"] == "[torch.float16, torch.float32]"


def test_the_engine_resolved_the_architecture_of_these_tests(tmp_path: Path) -> None:
    assert ARCHITECTURE in facts(tmp_path)["model_config.hf_config.architectures"]
