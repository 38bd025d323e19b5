"""What other engines hold in host memory, as a slower tier: asked for by key, read by whoever needs it, never stored to.

    index.py     what peers answered: the scheduler's half of who asks
    leases.py    what peers were promised: the scheduler's half of who is asked
    reader.py    fetches bytes and digests: each rank's half of who asks
    seals.py     says what a rank holds: each rank's half of who is asked
    node.py      connections to the peers, either half's
    words.py     what is said on them

`hybridkv.peers` carries it: proof of the secret, control connections, one-sided reads.
"""

from hybridkv.tiers.peer.courier import Answered, Courier, Lost
from hybridkv.tiers.peer.index import PeerIndex

from hybridkv.tiers.peer.leases import LeaseCounts, PeerLeases, Shelf
from hybridkv.tiers.peer.options import PeerOptions

__all__ = [
    "Answered",
    "Courier",
    "LeaseCounts",
    "Lost",
    "PeerIndex",
    "PeerLeases",
    "PeerOptions",
    "Shelf",
]
