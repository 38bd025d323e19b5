"""A model's own configuration, as the transformers library holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.identity.left_out import MODEL_KEYS_LEFT_OUT


def is_model_settings(value: Any) -> bool:
    """Whether it is a model's configuration as the transformers library holds it."""
    return any(base.__name__ in ("PretrainedConfig", "PreTrainedConfig") for base in type(value).__mro__)


def model_settings(path: str, value: Any) -> dict[str, Any]:
    """A model's configuration, overrides included, without what only says where it came from."""
    try:
        found: Mapping[str, Any] = value.to_dict()
    except Exception as error:
        raise ConfigurationError(
            path, "a configuration that can be written down", f"{type(error).__name__}: {error}", "report the model"
        ) from error
    return _without_origin(found)


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_origin(v) for k, v in value.items() if k not in MODEL_KEYS_LEFT_OUT}
    return [_without_origin(item) for item in value] if isinstance(value, list | tuple) else value
