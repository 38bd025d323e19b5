"""How many scenarios a test runs: the same ones in every run, unless ORACLE_SCENARIOS_FACTOR asks for more.

A failing scenario is printed as it was drawn; ORACLE_SHRINK=1 makes it small first, which can take minutes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Callable


def profile(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a `given` test: `max_examples` fixed scenarios; a factor above 1 multiplies them and draws new ones."""
    factor = int(os.environ.get("ORACLE_SCENARIOS_FACTOR", "1"))
    return settings(
        max_examples=max_examples * factor,
        derandomize=factor == 1,
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if os.environ.get("ORACLE_SHRINK") else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
