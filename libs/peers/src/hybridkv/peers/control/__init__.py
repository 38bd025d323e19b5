"""Control connections between engines: one thread a process, which never waits for a peer.

What a message means is its handler's. CONTRACT.md of this library names the test behind each promise.
"""

from hybridkv.peers.control.counts import ControlCounts
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.loop import ControlLoop

__all__ = ["ControlCounts", "ControlLoop", "Handlers", "LinkId"]
