"""Kernels of Transformer Engine, computed by torch: in single precision, rounded once at the end."""
