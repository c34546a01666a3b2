"""Measurements of the machine at hand; torch is imported only where one is made."""
