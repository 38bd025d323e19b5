"""What other engines hold in host memory, as a slower tier: asked for by key, read when needed, never stored to.

    index.py     what peers answered: the scheduler's half of who asks
    leases.py    what peers were promised: the scheduler's half of who is asked
    medium.py    fetches chunks and checks them: each rank's half of who asks; reading.py does it
    seals.py     says what a rank holds: each rank's half of who is asked
    node.py      connections to peers, either half's; messenger.py is the scheduler's use of it
    words.py     what is said on them
    opening.py   either half from addresses and a secret

`hybridkv.peers` carries it: proof of the secret, control connections, one-sided reads.
"""

from hybridkv.tiers.peer.courier import Answered, Courier, Lost
from hybridkv.tiers.peer.index import PeerIndex
from hybridkv.tiers.peer.leases import LeaseCounts, PeerLeases, Shelf
from hybridkv.tiers.peer.medium import PeerMedium
from hybridkv.tiers.peer.messenger import PeerMessenger
from hybridkv.tiers.peer.opening import Neighbourhood, open_index, open_medium
from hybridkv.tiers.peer.options import PeerOptions

__all__ = [
    "Answered",
    "Courier",
    "LeaseCounts",
    "Lost",
    "Neighbourhood",
    "PeerIndex",
    "PeerLeases",
    "PeerMedium",
    "PeerMessenger",
    "PeerOptions",
    "Shelf",
    "open_index",
    "open_medium",
]
