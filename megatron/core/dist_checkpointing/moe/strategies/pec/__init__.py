"""`pec`: all but experts, and K experts per MoE layer (MoC)."""

from .strategy import Pec

__all__ = ["Pec"]
