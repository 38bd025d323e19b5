"""What an index answers that knows at once what it holds: nothing has to be asked, and nothing is heard later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.tiers.contract import NOTHING_HEARD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hybridkv.tiers.contract import Heard, Key


class AnswersAtOnce:
    """That part of a `TierIndex`."""

    @property
    def answers_late(self) -> bool:
        """Never: everything is known here."""
        return False

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Nothing to find out."""

    @property
    def heard(self) -> Heard:
        """Nothing: nobody is asked."""
        return NOTHING_HEARD
