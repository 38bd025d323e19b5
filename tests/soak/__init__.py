"""A state machine over the tiers with faults, restarts and limits, which may run for hours. tests/README.md explains
it.
"""
