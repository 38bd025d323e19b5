"""What tests of peers are made of: a suite for every transport, a peer that is a process, faults, and a reference.

In the wheel, and imported by nothing that serves an engine.
"""
