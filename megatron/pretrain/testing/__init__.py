"""Lets jobs train without a GPU: the CPU plays the device, and Transformer Engine's Python runs on it.

For tests, demos and drills; a job on GPUs imports none of it.
"""
