"""`full`: everything at an interval."""

from .strategy import Full

__all__ = ["Full"]
