"""Faults at random times on a running job, and whether it comes out as if there had been none; see `__main__`."""
