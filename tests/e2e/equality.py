"""What equality means in these tests. Every negative control shows `require_same` failing."""

from collections.abc import Sequence

import pytest
from audit import Audit
from harness import Result

BATCH_TOLERANCE = 1e-4
"""How far a float32 log-probability may move when a token is computed in a batch of another shape: measured 1e-5."""


def require_same(
    audit: Audit, expected: Sequence[Result], got: Sequence[Result], digits_may_differ: bool = False
) -> None:
    """Equal tokens, equal log-probabilities, and every restored page the one that was stored.

    Args:
        audit: the witness of the restored bytes, which are never allowed to differ.
        expected: results of the run to compare with.
        got: results of the run that restored.
        digits_may_differ: the two runs met different batches, so log-probabilities agree to `BATCH_TOLERANCE` only.
    """
    for before, after in zip(expected, got, strict=True):
        assert after.token_ids == before.token_ids
        if not digits_may_differ:
            assert after.logprobs == before.logprobs
            continue
        for mine, theirs in zip(after.logprobs, before.logprobs, strict=True):
            chosen = max(theirs.values())
            assert max(mine.values()) == pytest.approx(chosen, abs=BATCH_TOLERANCE)
    assert audit.compared_pages > 0
    assert audit.mismatches == []
