"""What indexes have in common whose tiers answer late, whoever is asked: questions, and answers out of a ledger."""

from hybridkv.tiers.asking.asked_index import AskedIndex
from hybridkv.tiers.asking.questions import Question, Questions

__all__ = ["AskedIndex", "Question", "Questions"]
