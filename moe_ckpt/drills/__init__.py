"""Drills: ranks and nodes of a running job are killed at random; the job must end as if nothing had happened."""
