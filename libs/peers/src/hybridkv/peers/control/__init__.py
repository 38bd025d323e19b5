"""Control connections between engines, over ZeroMQ with CURVE. One thread per process, which never waits for a peer.

    curve.py      CURVE keys derived from the secret, and the ZAP handler
    sockets.py    ZeroMQ sockets with their limits, and one connection
    listener.py   a listener, and its limit on unauthenticated connections
    dialing.py    outgoing connections
    loop.py       the thread

Handlers interpret the messages. CONTRACT.md of this library names the test of each claim.
"""

from hybridkv.peers.control.handlers import ControlCounts, Handlers, LinkId
from hybridkv.peers.control.loop import ControlLoop

__all__ = ["ControlCounts", "ControlLoop", "Handlers", "LinkId"]
