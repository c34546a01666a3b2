"""Snapshots of another parallel layout, read as if they had been made in this job's."""
