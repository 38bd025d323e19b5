"""Loads of the offload connector.

load_planner.py     answers the engine's lookups
loads_in_flight.py  plans and tracks the loads that start
local_blocks.py     blocks of the engine that a load copies in place of chunks from a tier
lookup_sender.py    sends async lookups, and keeps the answers of queued requests fresh
lookup_costs.py     costs of a wait for async lookups
prefill_speed.py    measured prefill time
"""
