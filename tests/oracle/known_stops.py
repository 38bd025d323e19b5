"""An engine whose prompts stop where others are known to diverge, and nowhere else.

For prompts as short as those of the oracle an extra step is a large part of the cost.
"""

from __future__ import annotations

import pytest

from hybridkv.connectors.vllm.offload import checkpoints
from hybridkv.planner.checkpoints import NO_EXPERIENCE, Experience, placement
from hybridkv.planner.checkpoints.experience import LENGTHS, Divergences

STEPS = {"compute_tokens_per_second": 200}
"""An engine so slow that an extra step costs as much as one token, as with blocks of the oracle's size."""


def allow_all_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the bound on the cost of stops, which raises their price."""
    monkeypatch.setattr(checkpoints, "EXTRA_SHARE", 1.0)
    monkeypatch.setattr(placement, "EXTRA_RETURN", 0)


@pytest.fixture
def known_stops_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of so many undiverged prompts of every length that no guess is worth a step."""
    allow_all_stops(monkeypatch)
    many = (1e9,) * len(NO_EXPERIENCE.prompts)
    seen = Experience(prompts=many, by_length=(Divergences(prompts=many),) * LENGTHS)
    monkeypatch.setattr(checkpoints, "NO_EXPERIENCE", seen)
