"""Bytes at rest: reading, checking and hashing checkpoints."""
