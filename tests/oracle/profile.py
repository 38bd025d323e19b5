"""Number of scenarios of a test.

ORACLE_SCENARIOS_FACTOR, by default a tenth, multiplies the number given by a test. Up to 1 the scenarios are the same
in every run; above 1 they are drawn anew.

A failing scenario is printed as it was drawn; ORACLE_SHRINK=1 minimizes it first, which can take minutes.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Callable


FEWEST: Final = 8


def factor() -> float:
    """Multiplier of the number of scenarios."""
    return float(os.environ.get("ORACLE_SCENARIOS_FACTOR", "0.1"))


def profile(max_examples: int, *, whole: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a `given` test with `max_examples` scenarios times the factor.

    A factor below 1 keeps at least `FEWEST`, and all of a `whole` test.
    """
    share = max(factor(), 1.0) if whole else factor()
    return settings(
        max_examples=max(math.ceil(max_examples * share), min(max_examples, FEWEST)),
        derandomize=share <= 1,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if os.environ.get("ORACLE_SHRINK") else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
