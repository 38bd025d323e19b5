"""The definition of equality in these tests. Each negative control shows that one of these functions fails."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from audit import Audit
from harness import Result, Step
from noise import FLOOR, Noise, deviation


def require_same(audit: Audit, expected: Sequence[Result], got: Sequence[Result]) -> None:
    """`require_same_output`, and each restored page equals the stored one."""
    require_same_output(expected, got)
    _require_same_bytes(audit)


def require_same_output(expected: Sequence[Result], got: Sequence[Result]) -> None:
    """Exactly equal tokens and log-probabilities, of runs with the same arithmetic."""
    for before, after in zip(expected, got, strict=True):
        assert same_arithmetic(before, after), (
            f"the steps differ, so exact equality cannot be expected:\n{before.steps}\n{after.steps}"
        )
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs


def require_close(audit: Audit, expected: Sequence[Result], got: Sequence[Result], noise: Noise) -> None:
    """The same for runs with possibly different batches, for example if loads end in other steps or requests are
    preempted.

    Exactly equal if the arithmetic was the same. Otherwise they deviate no more than the engine's own runs do, which is
    measured only if needed. Bytes must be equal.
    """
    _require_close_output(expected, got, lambda: noise.tolerance)
    _require_same_bytes(audit)


def _require_close_output(expected: Sequence[Result], got: Sequence[Result], tolerance: Callable[[], float]) -> None:
    for before, after in zip(expected, got, strict=True):
        if same_arithmetic(before, after):
            require_same_output([before], [after])
        else:
            moved = deviation(before, after)
            # The tolerance is never below the floor, and measuring it takes longer than most tests.
            assert moved <= FLOOR or moved <= tolerance()


def same_arithmetic(before: Result, after: Result) -> bool:
    """Whether both computed everything that their answers depend on in the same steps."""
    answer = len(before.token_ids)
    if answer != len(after.token_ids) or not before.steps or not after.steps:
        return False
    ours, theirs = _last_run(before.steps), _last_run(after.steps)
    count = min(len(ours), len(theirs))
    ends = ours[-count:], theirs[-count:]
    # A request that was preempted during its answer has computed the earlier tokens of the answer in an earlier run.
    prompt_tokens = ours[-1].first_token + ours[-1].num_tokens - answer + 1
    return ends[0] == ends[1] and ends[0][0].first_token < prompt_tokens


def _last_run(steps: Sequence[Step]) -> list[Step]:
    """Steps since the request last went back, for example after a failed load."""
    later = list(steps[::-1])
    joined = takewhile(lambda pair: pair[1].first_token + pair[1].num_tokens == pair[0].first_token, pairwise(later))
    return [later[0], *(earlier for _, earlier in joined)][::-1]


def require_same_written(expected: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]]) -> None:
    """`require_same_output` for results written by other processes (`Result.as_json`)."""
    require_same_output(_read(expected), _read(got))


def require_close_written(
    expected: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]], tolerance: Callable[[], float]
) -> None:
    """`require_close` for answers written by other processes, without the comparison of bytes."""
    _require_close_output(_read(expected), _read(got), tolerance)


def _read(written: Sequence[Mapping[str, Any]]) -> list[Result]:
    return [Result.from_json(each) for each in written]


def _require_same_bytes(audit: Audit) -> None:
    assert audit.compared_pages > 0
    assert audit.mismatches == []
