"""The part that decides. Pure: it knows no clock, chance, network or disk.

Everything here is a value or a state machine of the form ``step(input, now_ns) -> effects``. Time is an
argument in integer nanoseconds of a monotonic clock. Nothing iterates over a set, so that the same inputs
give the same outputs in every process.
"""
