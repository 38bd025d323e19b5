"""Stores of the offload connector.

store_planner.py    plans what each step stores, and tracks it
prefix_chain.py     chunks of a prefix that are stored already, and what each chunk extends
keeping.py          prefixes with the hint `keep_seconds`
"""
