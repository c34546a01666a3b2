"""Tables and figures of the papers, recomputed: `python reproduce/table3.py`, one script for each of them."""
