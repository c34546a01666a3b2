"""Tables and figures of the papers, recomputed: `python -m reproduce table3`. Those that there are: `figures.py`."""
