"""Digests of this rank's pages: few bytes at once, more on a thread of its own, which says when it is done.

Handing a few hundred kilobytes to another thread and back takes longer than to digest them.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridkv.connectors.vllm.common.identity.background import Background, Outcome
from hybridkv.connectors.vllm.nixl.memory.memory import RankMemory
from hybridkv.peers.digests import DigestRuns

AT_ONCE_BYTES = 4 << 20
"""Digested in a fraction of a millisecond, which is how long the agent's thread may be held up."""


class Digesting(Background):
    """Calls come from one thread.

    Args:
        memory: that is digested.
        wake: has the calling thread look again.
    """

    def __init__(self, memory: RankMemory, wake: Callable[[], None]) -> None:
        super().__init__("hybridkv-peer-digests")
        self._memory = memory
        self._wake = wake

    def take(self, runs: DigestRuns) -> Outcome[list[bytes]] | None:
        """None where too much is waiting already."""
        if int(runs.num_bytes.sum()) <= AT_ONCE_BYTES:
            outcome: Outcome[list[bytes]] = Outcome()
            outcome.run(lambda: self._memory.digests(runs))
            return outcome
        found = self.submit(lambda: self._memory.digests(runs))
        # Behind it, so that it is done by then. Where there is no room the caller looks again by itself.
        self.submit(self._wake)
        return found
