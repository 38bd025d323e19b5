"""How many scenarios a test runs.

ORACLE_SCENARIOS_FACTOR, by default a quarter, multiplies the number that a test names. Up to 1 the scenarios are the
same in every run; above 1 they are drawn anew.

A failing scenario is printed as it was drawn; ORACLE_SHRINK=1 makes it small first, which can take minutes.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Callable


def profile(max_examples: int, *, whole: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a `given` test with `max_examples` scenarios times the factor; `whole` ignores a factor below 1."""
    factor = float(os.environ.get("ORACLE_SCENARIOS_FACTOR", "0.25"))
    if whole:
        factor = max(factor, 1.0)
    return settings(
        max_examples=math.ceil(max_examples * factor),
        derandomize=factor <= 1,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if os.environ.get("ORACLE_SHRINK") else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
