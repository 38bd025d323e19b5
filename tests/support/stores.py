"""Fake connectors of other projects: one records every call, one does not have SupportsHMA, and so on.

Configurations name them by `kv_connector_module_path: "stores"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

MODULE = "stores"


class Nothing(KVConnectorMetadata):
    """Empty metadata."""


class QuietConnector(KVConnectorBase_V1):
    """Stores nothing, loads nothing, and supports only one KV cache group."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()


class GroupsConnector(QuietConnector, SupportsHMA):
    """A QuietConnector that supports several groups."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class StallingConnector(GroupsConnector):
    """Never knows how many tokens match."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return None, False


class RaisingConnector(GroupsConnector):
    """Raises whenever it is asked how many tokens match."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        raise RuntimeError("this store is out of order")


def _recorded(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        self.calls.append((name, args, options))
        if name not in self.answers:
            return getattr(super(RecordingConnector, self), name)(*args, **options)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return method


class RecordingConnector(GroupsConnector):
    """Records every call in `calls`, and returns values from `answers` instead of the default."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {"get_transfer_results": KVConnectorTransferResults()}
        super().__init__(vllm_config, role, kv_cache_config)
        self.vllm_config = vllm_config
        self.calls.clear()

    def arguments_of(self, name: str) -> list[tuple[Any, ...]]:
        """The positional arguments of each call of a method."""
        return [args for called, args, _ in self.calls if called == name]


for _name, _ in inspect.getmembers(GroupsConnector, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(RecordingConnector, _name, _recorded(_name))
