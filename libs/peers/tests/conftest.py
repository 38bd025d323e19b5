"""A busy machine is no reason to fail: properties have no time limit, and neither has making their examples."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
