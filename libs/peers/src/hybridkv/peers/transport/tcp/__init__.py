"""The transport that is always there: TCP, straight from registered memory into registered memory.

    protocol.py   capability, requests and the heads of answers
    server.py     the thread that answers reads of this process's memory
    client.py     the thread that reads other processes' memory
    transport.py  both of them behind the contract

Bytes are neither sealed nor encrypted; requests are sealed, and a connection needs the secret and the capability.
"""

from hybridkv.peers.transport.tcp.options import TcpOptions
from hybridkv.peers.transport.tcp.transport import TcpTransport

__all__ = ["TcpOptions", "TcpTransport"]
