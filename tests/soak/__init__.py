"""A state machine of the tiers with faults, restarts and limits, which may run for hours. tests/README.md says more."""
