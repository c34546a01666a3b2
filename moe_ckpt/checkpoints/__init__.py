"""Checkpoints seen from outside, by people and tools: what is there, is it whole, what differs, what may go."""
