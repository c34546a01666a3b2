"""Errors of the training driver that a person can act on."""

from __future__ import annotations


class PretrainError(Exception):
    """What went wrong, with the value that is wrong and what to do, on one line.

    The driver prints it from rank 0 without a traceback and ends with `exit_code`.
    """

    exit_code = 1


class InvalidInput(PretrainError):
    """Flags or inputs that cannot work; nothing was changed."""

    exit_code = 2


class TrainingFailure(PretrainError):
    """Training cannot continue; raised where it is noticed, which may be one rank only."""
