"""Each field of vLLM's configuration and each known environment variable, changed one at a time.

Either the facts change, or the field is on the list of exclusions with a reason. Optional parts of the configuration,
such as the drafter's, are added first.
"""

from __future__ import annotations

import copy
import enum
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.envs
from identity_configs import make_config, write_model
from pydantic.fields import FieldInfo
from transformers import PretrainedConfig
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform

from hybridkv.connectors.vllm.common.identity.configuration import configuration_facts, field_exclusion_reason
from hybridkv.connectors.vllm.common.identity.environment import (
    CANDIDATE_VARIABLES,
    EXCLUDED_VARIABLES,
    environment_facts,
    is_candidate_variable,
    variable_exclusion_reason,
)
from hybridkv.connectors.vllm.common.identity.excluded import (
    EXCLUDED_FIELDS,
    EXCLUDED_FIELDS_OF_OTHER_VERSIONS,
    EXCLUDED_MODEL_KEYS,
    SECRET,
)

TOLD_OTHERWISE = {"VllmConfig.quant_config"}
"""Excluded itself, but another fact contains it."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Configuration with every optional part present."""
    root = write_model(tmp_path_factory.mktemp("model"))
    found = make_config(root)
    _fill(found)
    speculative = found.speculative_config
    speculative.target_model_config = found.model_config
    speculative.target_parallel_config = found.parallel_config
    speculative.draft_model_config = draft = copy.copy(found.model_config)
    draft.hf_config = draft.hf_text_config = copy.deepcopy(found.model_config.hf_config)
    speculative.draft_parallel_config = copy.deepcopy(found.parallel_config)
    return found


def _fill(node: Any) -> None:
    """Set every optional dataclass field that is empty to an object with its defaults."""
    for name, kind in _inner(type(node)).items():
        if getattr(node, name, None) is None:
            setattr(node, name, _default(kind))
        if is_dataclass(getattr(node, name)) and not isinstance(node, SpeculativeConfig | ModelConfig):
            _fill(getattr(node, name))
    if isinstance(node, ModelConfig):
        for name in ("multimodal_config", "pooler_config"):
            _fill(getattr(node, name))


def _inner(kind: type) -> dict[str, type]:
    """Fields of a dataclass that may hold another dataclass, with its type."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        for choice in (hint, *typing.get_args(hint)):
            if isinstance(choice, type) and is_dataclass(choice) and choice.__module__.startswith("vllm.config"):
                found[name] = choice
    names = {field.name for field in fields(kind)}
    return {name: inner for name, inner in found.items() if name in names}


def _default(kind: type) -> Any:
    """Object with the defaults of its fields. Its constructor may need arguments and is not called."""
    made = object.__new__(kind)
    for field in fields(kind):
        default, factory = field.default, field.default_factory
        if isinstance(default, FieldInfo):
            default, factory = default.default, default.default_factory or MISSING
        value = factory() if factory is not MISSING else default
        object.__setattr__(made, field.name, None if value is MISSING or value is ... else value)
    return made


@dataclass(frozen=True)
class Leaf:
    """Field without nested fields, and its owner."""

    path: str
    scope: str
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name, None)


def leaves(config: VllmConfig) -> list[Leaf]:
    found: list[Leaf] = []
    met: set[int] = set()

    def walk(path: str, node: Any) -> None:
        if id(node) in met:
            return
        met.add(id(node))
        for field in fields(node):
            at = f"{path}.{field.name}" if path else field.name
            value = getattr(node, field.name, None)
            if isinstance(value, PretrainedConfig):
                if id(value) not in met:
                    met.add(id(value))
                    keys = set(value.to_dict()) - {"transformers_version", "model_type"}
                    found.extend(Leaf(f"{at}.{key}", f"PreTrainedConfig.{key}", value, key) for key in sorted(keys))
            elif is_dataclass(value) and not isinstance(value, type):
                walk(at, value)
            else:
                found.append(Leaf(at, f"{type(node).__name__}.{field.name}", node, field.name))

    walk("", config)
    return found


def another(value: Any) -> Any:
    """Different value of the same type."""
    if isinstance(value, enum.Enum):
        return next((member for member in type(value) if member is not value), "another")
    if isinstance(value, torch.dtype):
        return torch.float64
    changes: list[tuple[type, Callable[[Any], Any]]] = [
        (bool, lambda old: not old),
        (int, lambda old: old + 1),
        (float, lambda old: old + 1),
        (str, lambda old: old + "x"),
        (list, lambda old: [*old, "another"]),
        (dict, lambda old: {**old, "another": 1}),
        (set, lambda old: {*old, "another"}),
    ]
    return next((change(value) for kind, change in changes if isinstance(value, kind)), "another")


Facts = Callable[[VllmConfig], Mapping[str, str]]


def changes_of(config: VllmConfig, facts_of: Facts) -> Iterator[tuple[Leaf, bool]]:
    """Every leaf, and whether a change of it changes the facts."""
    base = facts_of(config)
    for leaf in leaves(config):
        value, has = leaf.value, hasattr(leaf.owner, leaf.name)
        object.__setattr__(leaf.owner, leaf.name, another(value))
        try:
            yield leaf, facts_of(config) != base
        finally:
            if has:
                object.__setattr__(leaf.owner, leaf.name, value)
            else:
                object.__delattr__(leaf.owner, leaf.name)
    assert facts_of(config) == base


def undetected(config: VllmConfig, facts_of: Facts) -> list[str]:
    """Fields that change no fact and are on no list of exclusions."""
    return [
        leaf.path for leaf, differs in changes_of(config, facts_of) if not differs and not _is_excluded(leaf, config)
    ]


def _is_excluded(leaf: Leaf, config: VllmConfig) -> bool:
    """True if the field or a parent of it is excluded."""
    if field_exclusion_reason(leaf.scope) is not None or leaf.name in EXCLUDED_MODEL_KEYS:
        return True
    steps, node = leaf.path.split("."), config
    for step in steps[:-1]:
        if not is_dataclass(node):
            break
        if field_exclusion_reason(f"{type(node).__name__}.{step}") is not None:
            return True
        node = getattr(node, step)
    return False


def test_each_field_changes_the_facts_or_is_excluded_with_a_reason(config: VllmConfig) -> None:
    results = list(changes_of(config, configuration_facts))
    assert not [leaf.path for leaf, differs in results if not differs and not _is_excluded(leaf, config)]
    unasked = {leaf.scope for leaf, differs in results if differs and _is_excluded(leaf, config)}
    assert unasked == TOLD_OTHERWISE
    # Not vacuous: the walk reaches all parts, and fields that are empty by default.
    paths = {leaf.path for leaf, _ in results}
    assert len(paths) > 400 and sum(differs for _, differs in results) > 150
    assert paths >= {
        "cache_config.cache_dtype",
        "model_config.hf_config.rope_parameters",
        "model_config.quantization",
        "model_config.multimodal_config.mm_processor_kwargs",
        "speculative_config.draft_model_config.hf_config.hidden_size",
        "speculative_config.num_speculative_tokens",
        "lora_config.lora_dtype",
        "attention_config.hisparse_config.device_buffer_size",
        "parallel_config.eplb_config.window_size",
        "ec_transfer_config.engine_id",
    }


@pytest.mark.full
def test_a_forgotten_field_is_detected(config: VllmConfig) -> None:
    def forgetful(config: VllmConfig) -> Mapping[str, str]:
        found = configuration_facts(config)
        return {name: text for name, text in found.items() if name != "cache_config.cache_dtype"}

    assert undetected(config, forgetful) == ["cache_config.cache_dtype"]


def _scopes() -> set[str]:
    """Every field of every part of the configuration of this vLLM."""
    found: set[str] = set()
    classes, met = [VllmConfig], set()
    while classes:
        kind = classes.pop()
        if kind not in met:
            met.add(kind)
            found |= {f"{kind.__name__}.{field.name}" for field in fields(kind)}
            classes += _inner(kind).values()
    return found


def test_every_exclusion_names_an_existing_field() -> None:
    scopes = _scopes() | {f"CompilationConfig.inductor_compile_config.{current_platform.pass_key}"}
    assert [entry for entry in EXCLUDED_FIELDS if not any(fnmatchcase(scope, entry) for scope in scopes)] == []
    assert [
        entry for entry in EXCLUDED_FIELDS_OF_OTHER_VERSIONS if any(fnmatchcase(scope, entry) for scope in scopes)
    ] == []
    assert scopes >= SECRET and EXCLUDED_FIELDS.keys() >= TOLD_OTHERWISE
    settings = PretrainedConfig()
    assert [key for key in EXCLUDED_MODEL_KEYS if key not in settings.to_dict() and not hasattr(settings, key)] == []
    assert all(
        reason.strip()
        for reason in (EXCLUDED_FIELDS | EXCLUDED_FIELDS_OF_OTHER_VERSIONS | EXCLUDED_MODEL_KEYS).values()
    )


SET_BY_ENGINES = {"VLLM_DIST_IDENT", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"}
"""Set by vLLM for its own processes, and missing from vLLM's list."""
LIBRARIES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize("name", [*vllm.envs.environment_variables, *LIBRARIES])
def test_each_variable_changes_the_facts_or_is_excluded_with_a_reason(name: str) -> None:
    before, after = environment_facts({}), environment_facts({name: "1"})
    assert (before == after) == (variable_exclusion_reason(name) is not None)
    if before != after:
        assert environment_facts({name: "2"}) != after


def test_every_excluded_variable_exists() -> None:
    known = set(vllm.envs.environment_variables) | SET_BY_ENGINES

    def has_use(entry: str) -> bool:
        if any(fnmatchcase(name, entry) for name in known):
            return True
        # Other libraries have no list of variables; a variable that does not count needs no reason.
        return not entry.startswith("VLLM_") and (
            entry.startswith("*") or is_candidate_variable(entry.replace("*", "X"))
        )

    assert [entry for entry in EXCLUDED_VARIABLES if not has_use(entry)] == []
    assert (
        set(LIBRARIES) <= {name for name in LIBRARIES if is_candidate_variable(name)}
        and "VLLM_*" in CANDIDATE_VARIABLES
    )


def test_secret_values_are_never_written(config: VllmConfig) -> None:
    assert "hunter2" not in str(environment_facts({"VLLM_NEW_TOKEN": "hunter2"}))
    for scope in SECRET:
        owner, _, name = scope.partition(".")
        node = config if owner == "VllmConfig" else next(n.owner for n in leaves(config) if n.scope == scope)
        former = getattr(node, name)
        setattr(node, name, {"key": "hunter2"})
        facts = configuration_facts(config)
        setattr(node, name, former)
        assert "hunter2" not in str(facts) and facts != configuration_facts(config)


def test_an_unknown_variable_of_vllm_counts() -> None:
    assert environment_facts({"VLLM_NOBODY_KNOWS": "1"}).keys() == {"environment.VLLM_NOBODY_KNOWS"}
    assert environment_facts({"HOME": "/root", "PATH": "/bin", "LANG": "C"}) == {}


def test_addresses_of_kubernetes_services_do_not_count() -> None:
    """A service named `vllm-server` adds these to every container of its namespace, with different values each time."""
    links = {
        "VLLM_SERVER_SERVICE_HOST": "10.0.0.1",
        "VLLM_SERVER_SERVICE_PORT": "8000",
        "VLLM_SERVER_SERVICE_PORT_HTTP": "8000",
        "VLLM_SERVER_PORT": "tcp://10.0.0.1:8000",
        "TRITON_PORT": "udp://10.0.0.1:8000",
        "VLLM_SERVER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "VLLM_SERVER_PORT_8000_TCP_PROTO": "tcp",
        "VLLM_SERVER_PORT_8000_TCP_PORT": "8000",
        "VLLM_SERVER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "VLLM_SERVER_PORT_53_UDP_ADDR": "10.0.0.1",
    }
    assert environment_facts(links) == {}
    assert len(environment_facts({"VLLM_NEW_PORT": "8000", "VLLM_NEW": "tcp://10.0.0.1:8000"})) == 2


def test_two_engines_of_one_model_have_the_same_facts(tmp_path: Path, config: VllmConfig) -> None:
    there, here = (make_config(write_model(tmp_path / name)) for name in ("there", "here"))
    assert there.model_config.model != here.model_config.model
    assert configuration_facts(there) == configuration_facts(here) != configuration_facts(config)
