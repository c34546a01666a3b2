"""The page of `moe-ckpt report`: HTML and inline SVG, readable without scripts, without anything from elsewhere."""

from .page import render

__all__ = ["render"]
