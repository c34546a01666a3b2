"""`pec`: all but experts, and K experts per MoE layer (MoC)."""

from .strategy import Pec, PecReport

__all__ = ["Pec", "PecReport"]
