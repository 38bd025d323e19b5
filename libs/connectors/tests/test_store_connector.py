"""Subclasses of StoreConnector must implement its hooks, checked at construction."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hybridkv.connectors.vllm.common.base.store_connector import StoreConnector

HOOKS = ("_open_store",)


@pytest.mark.parametrize("missing", HOOKS)
def test_a_connector_without_a_hook_cannot_be_built(missing: str) -> None:
    hooks = {name: lambda *arguments: None for name in HOOKS if name != missing}
    lacking = type("Lacking", (StoreConnector,), hooks)
    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        lacking(cast(Any, None), cast(Any, None), cast(Any, None))


def test_the_hooks_are_the_only_abstract_methods() -> None:
    """The methods of vLLM's interface are implemented."""
    assert StoreConnector.__abstractmethods__ == set(HOOKS)
