"""Control connections between engines, over ZeroMQ with CURVE: one thread a process, which never waits for a peer.

    curve.py      keys that the secret gives, and whom a listener admits
    sockets.py    ZeroMQ's sockets with their bounds, and one connection
    door.py       a listener, and a bound on strangers
    dialing.py    connections that this process opens
    loop.py       the thread

What a message means is its handler's. CONTRACT.md of this library names the test behind each promise.
"""

from hybridkv.peers.control.handlers import ControlCounts, Handlers, LinkId
from hybridkv.peers.control.loop import ControlLoop

__all__ = ["ControlCounts", "ControlLoop", "Handlers", "LinkId"]
