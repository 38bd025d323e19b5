"""Peer tier: host memory of other engines as a read-only secondary tier.

    index.py     the scheduler's index of chunks at peers, built on remote/
    client.py    lookup client: sends lookups, and answers the lookups of peers
    leases.py    leases: chunks kept for peers, on the scheduler
    medium.py    a rank's half: queues loads, and answers peers' requests for digests
    reader.py    reads chunks from peers, and checks their digests
    node.py      connections to peers
    messages.py  messages of these connections
    builder.py   builds the index or a medium from addresses and a secret

`hybridkv.peers` provides authentication, control connections and one-sided reads.
"""

from hybridkv.tiers.peer.builder import PeerAddresses, open_index, open_medium
from hybridkv.tiers.peer.client import ConnectionLost, PeerAnswer, PeerLookupClient
from hybridkv.tiers.peer.index import PeerIndex
from hybridkv.tiers.peer.leases import PeerLeases
from hybridkv.tiers.peer.medium import PeerMedium
from hybridkv.tiers.peer.options import PeerOptions

__all__ = [
    "ConnectionLost",
    "PeerAddresses",
    "PeerAnswer",
    "PeerIndex",
    "PeerLeases",
    "PeerLookupClient",
    "PeerMedium",
    "PeerOptions",
    "open_index",
    "open_medium",
]
