"""Control connections between engines, over ZeroMQ with CURVE: one thread a process, which never waits for a peer.

    curve.py      keys that the secret gives, and whom a listener admits
    sockets.py    bounds and events of ZeroMQ's sockets
    door.py       a listener, and strangers at it
    dialing.py    connections that this process opens
    lines.py      every connection, and what may still be said on it
    loop.py       the thread

What a message means is its handler's. CONTRACT.md of this library names the test behind each promise.
"""

from hybridkv.peers.control.counts import ControlCounts
from hybridkv.peers.control.handlers import Handlers, LinkId
from hybridkv.peers.control.loop import ControlLoop

__all__ = ["ControlCounts", "ControlLoop", "Handlers", "LinkId"]
