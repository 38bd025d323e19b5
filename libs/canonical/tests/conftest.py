"""A busy machine is no reason to fail: properties have no time limit."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
