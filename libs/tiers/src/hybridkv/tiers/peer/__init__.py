"""What other engines hold in host memory, as a slower tier: asked for by key, read when needed, never stored to.

    index.py     chunks that peers hold: the scheduler's half of the reader, over remote/
    client.py    sends its lookups, and answers those of peers
    leases.py    chunks that peers were promised: the scheduler's half of the holder
    medium.py    fetches chunks and checks them: each rank's half of the reader; reader.py does it
    seals.py     digests of a rank's chunks: each rank's half of the holder
    node.py      connections to peers, of either half
    words.py     messages on them
    builder.py   either half from addresses and a secret

`hybridkv.peers` carries it: proof of the secret, control connections, one-sided reads.
"""

from hybridkv.tiers.peer.builder import Neighbourhood, open_index, open_medium
from hybridkv.tiers.peer.client import Answered, Lost, PeerLookupClient
from hybridkv.tiers.peer.index import PeerIndex
from hybridkv.tiers.peer.leases import LeasableIndex, LeaseCounts, PeerLeases
from hybridkv.tiers.peer.medium import PeerMedium
from hybridkv.tiers.peer.options import PeerOptions

__all__ = [
    "Answered",
    "LeasableIndex",
    "LeaseCounts",
    "Lost",
    "Neighbourhood",
    "PeerIndex",
    "PeerLeases",
    "PeerLookupClient",
    "PeerMedium",
    "PeerOptions",
    "open_index",
    "open_medium",
]
