"""For whoever writes a tier, a policy of eviction or a memory: what each must pass, and what to try it with.

`conformance` has the suites, `reference` the executable specification that they were written from, `faults` wrappers
that make any tier fail as planned, `copying` a medium over memory that a copy engine would use. Nothing that serves an
engine imports any of it, and none of it needs a test framework.
"""
