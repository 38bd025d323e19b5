"""Test kit for tiers, eviction orders and media.

`conformance` has the suites that each must pass, `reference` the executable specification that the suites were written
from, `faults` wrappers that make any tier fail as planned, `copying` a medium over memory. None of it needs a test
framework.
"""
