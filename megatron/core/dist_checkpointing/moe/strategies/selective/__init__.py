"""`selective`: all but experts, and those experts that the links have time for, by tokens at risk (MOETION)."""

from .strategy import Selective

__all__ = ["Selective"]
