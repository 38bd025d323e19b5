"""One engine of two, as in `peers_process`; a test moves its time, holds its reads, and disables its checks.

The time of leases and reads passes by itself, and faster on command. So no test waits for a lease to expire, and no
lease expires because the machine is busy.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
import threading
import time
from typing import Any

import patience
import peers_process
from harness import Engine, Result
from held_reads import HeldReads

from hybridkv.connectors.vllm.nixl import worker
from hybridkv.connectors.vllm.nixl.agent.rank_read import RankRead
from hybridkv.peers.wire import WireLimits

ENDS_S = patience.seconds(6.0)
SILENCE_S = patience.seconds(60.0)


class FaultyCommands(peers_process.Commands):
    """The additional commands.

    Args:
        engine: is stepped between commands.
        line: a socket for commands and answers.
    """

    def __init__(self, engine: Engine, line: socket.socket) -> None:
        super().__init__(engine, line)
        self._later_s = 0.0
        self._agent = engine.worker_connector._worker._agent
        self._set_clock()

    def _carry_out(self, command: dict[str, Any]) -> None:
        name, engine = command["name"], self._engine
        match command["do"]:
            case "port":
                self.say(name, self._agent._loop._listeners[0].address[1])
            case "hold":
                self._agent._transport.hold(command["after"])
                self.say(name, None)
            case "holding":
                self.say(name, self._agent._transport.is_holding)
            case "let go":
                self._agent._transport.let_go(command["is_spoilt"])
                self.say(name, None)
            case "peers":
                self.say(name, len(self._agent._connections._by_address))
            case "settled":
                self.say(name, not engine.connector._scheduler.has_plan() and not self._agent._server._opened)
            case "seconds":
                self.say(name, self._lease_seconds())
            case "abort":
                engine.abort(command["request"])
                self.say(name, None)
            case "later":
                self._later_s += command["seconds"]
                self.say(name, None)
            case "checks":
                _skip(frozenset(command["skipped"]))
                self.say(name, None)
            case "digests":
                self.say(name, self._pages.of_tables(command["block_ids"], command["first_blocks"]))
            case _:
                super()._carry_out(command)

    def _written(self, result: Result) -> dict[str, Any]:
        return super()._written(result) | {"finish_reason": result.finish_reason}

    def _clock(self) -> float:
        return time.monotonic() + self._later_s

    def _lease_seconds(self) -> float | None:
        """Seconds until the next lease ends."""
        until_s = self._agent._server._leases.next_expiry_s
        return None if until_s is None else until_s - self._clock()

    def _set_clock(self) -> None:
        serving, reading = self._agent._server, self._agent._reads
        serving._options = dataclasses.replace(serving._options, clock=self._clock)
        reading._options = dataclasses.replace(reading._options, clock=self._clock)
        self._agent._remote_leases._clock = self._clock


_check = RankRead.check


def _skip(skipped: frozenset[str]) -> None:
    """Disable checks after a read from now on: 'lease', 'digests'."""

    def check(self: RankRead, timeout_s: float) -> None:
        _check(self, timeout_s)
        assert self._check is not None
        self._check.lease_is_valid |= "lease" in skipped
        self._check.digests_agree |= "digests" in skipped

    RankRead.check = check  # type: ignore[method-assign]


def main(*arguments: Any) -> None:
    """As in `peers_process`, with reads that a test can hold. At the end none of our threads is left."""
    worker.open_transport = HeldReads  # type: ignore[assignment]
    # A stopped process is not gone, however long this machine takes.
    worker.WireLimits = functools.partial(WireLimits, silence_timeout_s=SILENCE_S)  # type: ignore[assignment, misc]
    peers_process.main(*arguments, FaultyCommands)
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("hybridkv")]
    for thread in ours:
        thread.join(ENDS_S)
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"threads still running: {left}"
