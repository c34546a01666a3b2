"""More capacity for experts that lost tokens in a recovery (`--moe-ckpt-capacity-boost` of `selective`; MOETION 6)."""

from __future__ import annotations

from .. import Additions, Extension
from .capacity import RouterCapacity


class BoostedCapacity(Extension):
    """Of one rank."""

    _boost: RouterCapacity | None = None

    def protects(self, additions: Additions) -> None:
        session = self.session
        if session.strategy.makes_up:
            self._boost = RouterCapacity(session.training.chunks, session.config.capacity_boost)
            session.held.callback(self._boost.close)
            self._boost.owe(session.strategy.deferred_tokens)
            additions.beyond = self._boost.take

    def passes(self) -> None:
        if self._boost is not None:
            self._boost.begin()  # core may validate a result by a rerun

    def copying(self) -> None:
        if self._boost is not None:
            self._boost.owe(self.session.strategy.deferred_tokens)

    def stop(self) -> None:
        if self._boost is not None:
            self._boost.close()

    failed = stop


EXTENSION = BoostedCapacity
