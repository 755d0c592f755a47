"""Benchmarks of an optimizer step: time, peak memory and memory traffic.

A two-pass step cannot be faster than two forward-backward passes. Every case is reported as a ratio to
these two passes, the floor, and all cases are timed in one interleaved run.
"""
