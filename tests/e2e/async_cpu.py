"""Enables asynchronous scheduling on vLLM's CPU build, which disables it, for the duration of a test.

The scheduler then runs one step ahead of the tokens: it plans a step before the last token is known. All of this is
vLLM's own code. Here the platform keeps the requested setting, and streams and events of a GPU, for which the model
runner waits, complete immediately, as all work on a CPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _Completed:
    """A stream or event whose work is always complete."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def wait_stream(self, *arguments: Any) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Within the block, engines schedule asynchronously if their `async_scheduling` is set."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keeping(cls: type, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = wanted

    with (
        mock.patch.object(platform, "check_and_update_config", classmethod(keeping)),
        mock.patch.object(torch.cuda, "Event", _Completed),
        mock.patch.object(torch.cuda, "Stream", _Completed),
        mock.patch.object(torch, "Event", _Completed),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Completed()),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        yield
