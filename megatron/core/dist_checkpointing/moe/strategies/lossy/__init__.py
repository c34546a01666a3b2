"""What strategies have in common that leave experts out of snapshots, and count each token that this loses."""

from .strategy import Lossy

__all__ = ["Lossy"]
