"""What equality means in these tests. Every negative control shows one of these functions failing."""

from collections.abc import Sequence

from audit import Audit
from harness import Result

BATCH_TOLERANCE = {"qwen3-next": 0.25, "gemma3": 1e-4, "gpt-oss": 1e-4}
"""How far a log-probability may move when a token is computed in a batch of another shape.

Measured: 1e-5 in float32; in bfloat16, which Qwen3-Next must be, 0.1.
"""


def require_same(audit: Audit, expected: Sequence[Result], got: Sequence[Result]) -> None:
    """Equal tokens, log-probabilities equal to the last digit, and every restored page the one that was stored."""
    for before, after in zip(expected, got, strict=True):
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs
    _require_same_bytes(audit)


def require_close(audit: Audit, expected: Sequence[Result], got: Sequence[Result], tolerance: float) -> None:
    """The same for runs that met other batches, whose arithmetic differs in the last digits: bytes stay exact.

    Log-probabilities agree within `tolerance` as long as the tokens do, and tokens part only where the two candidates
    were within `tolerance` of each other: beyond that point the runs answer different prompts.
    """
    for before, after in zip(expected, got, strict=True):
        steps = zip(before.token_ids, after.token_ids, before.logprobs, after.logprobs, strict=True)
        for token, other, mine, theirs in steps:
            assert abs(mine[token] - theirs.get(token, float("-inf"))) <= tolerance
            if token != other:
                assert abs(theirs[other] - theirs[token]) <= tolerance
                break
    _require_same_bytes(audit)


def _require_same_bytes(audit: Audit) -> None:
    assert audit.compared_pages > 0
    assert audit.mismatches == []
