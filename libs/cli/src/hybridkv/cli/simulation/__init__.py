"""Simulation of a store on a trace of requests: the RAM tier's index and the planner, without an engine."""
