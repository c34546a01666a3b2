"""Decisions as pure functions of values: no torch, no clock, no I/O, no environment, no randomness."""
