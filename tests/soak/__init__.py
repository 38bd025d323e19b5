"""A state machine of the tiers with faults, restarts and limits, that may run for hours. `tests/README.md` describes it."""
