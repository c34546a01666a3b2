"""A process that outlives this one and finishes what it was writing to storage (`--moe-ckpt-persist-agent-s`)."""

from __future__ import annotations

import logging

from ...errors import format_error
from ...storage.small_files import read_secret
from .. import Additions, Extension
from .agent import PersistAgent

log = logging.getLogger(__name__)


class PersistExtension(Extension):
    """Of one rank."""

    _agent: PersistAgent | None = None

    def protects(self, additions: Additions) -> None:
        session, config = self.session, self.session.config
        if config.persist_dir is None:
            return
        facts = config.persist_dir, session.control.rank, config.persist_agent_s, read_secret(config.secret_file)
        try:
            self._agent = PersistAgent(session.memory.store.directory, *facts)
        except OSError as error:
            log.error("rank %d: persist agent not started: %s", session.control.rank, format_error(error))
            return
        session.held.callback(self._agent.close)
        additions.announce = self._agent.announce

    def stop(self) -> None:
        if self._agent is not None:
            self._agent.close()


EXTENSION = PersistExtension
