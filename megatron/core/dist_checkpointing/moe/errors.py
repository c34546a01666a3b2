"""Errors of the checkpoint subsystem that a person can act on."""

from __future__ import annotations


class MoECheckpointError(Exception):
    """What went wrong, with the facts, and what to do, on one line."""


class UsageError(MoECheckpointError):
    """A flag or an argument that cannot work; nothing was changed."""


class UnreadableCheckpoint(MoECheckpointError):
    """A checkpoint that is missing, torn, foreign or damaged."""
