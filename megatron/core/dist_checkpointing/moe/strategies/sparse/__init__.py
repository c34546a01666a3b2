"""`sparse`: each operator once in a window of iterations (MoEvement)."""

from .strategy import Sparse

__all__ = ["Sparse"]
