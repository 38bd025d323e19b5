"""Asynchronous scheduling on vLLM's CPU build, which switches it off, for the time of a test.

The scheduler then runs one step ahead of the tokens: it plans a step before the last one's token is known. All of that
is vLLM's own. Here the platform keeps what it was asked for, and what the model runner waits for by streams and events
of a GPU is over as soon as it was begun, as everything is on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _Over:
    """A stream or an event of a device that has ended whatever it was given."""

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
    """Within it, engines schedule asynchronously where their `async_scheduling` says so."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keeping(cls: type, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = wanted

    with (
        mock.patch.object(platform, "check_and_update_config", classmethod(keeping)),
        mock.patch.object(torch.cuda, "Event", _Over),
        mock.patch.object(torch.cuda, "Stream", _Over),
        mock.patch.object(torch, "Event", _Over),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Over()),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        yield
