"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure: tests have a timeout as a whole, not a limit for each example.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
