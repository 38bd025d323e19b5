"""Test kit for tiers, eviction policies and media.

`conformance` has the suites that each must pass, `reference` the executable specification of the suites, `faults`
wrappers that make any tier fail as planned, `copying` a medium over memory, `inline_janitor` a janitor
without a thread. None of it needs a test framework.
"""
