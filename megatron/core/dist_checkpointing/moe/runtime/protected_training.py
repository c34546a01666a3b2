"""Protects training from the iteration at which all ranks stand: snapshots, replicas, persistence, logs and status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import format_error
from ..megatron_state.adam_steps import AdamSteps
from ..policy.lineage import continued
from ..ports import Layout
from ..recovery.recovery import RecoveryOutcome
from ..replication.replicator import Replicator
from ..snapshot.background import ThreadExecutor
from ..snapshot.coordinator import Coordinator, Ports, ProtectionReport
from ..snapshot.identity import Identity
from ..snapshot.persisting import CopyOrder
from ..snapshot.pipeline_waits import BubbleSends
from ..snapshot.stopwatch import CudaStopwatch
from ..snapshot.workers import Persister, ReplicationWorker
from ..storage.job_secret import read_secret
from ..strategies import Piece
from ..types import StepJournal
from .persist_agent import PersistAgent
from .process_info import PATIENCE_ADVICE, memory_folder
from .session_parts import SessionParts
from .status import StatusBoard

log = logging.getLogger(__name__)


class ProtectedTraining:
    """Made on all ranks together, and then begun.

    Args:
        parts: Of the session; they stay open when this one ends.
        iteration: After which training stands.
        outcome: The recovery that brought it there; None where there was none.

    Attributes:
        coordinator: Of this rank's snapshots.
    """

    def __init__(self, parts: SessionParts, iteration: int, outcome: RecoveryOutcome | None) -> None:
        self._parts, self._iteration, self._outcome = parts, iteration, outcome
        self._agent: PersistAgent | None = None
        timeline = continued(outcome.timeline if outcome is not None else (), parts.attempt, iteration)
        self._identity = replace(parts.identity, timeline=timeline)
        self.coordinator, parts.began = self._coordinator(self._identity), True
        self._status = StatusBoard(parts.memory.store.directory, parts.store, _facts(parts))
        parts.held.callback(self._status.close)

    def begin(self) -> None:
        """Go on from what was restored."""
        parts = self._parts
        if self._outcome is not None:
            self.coordinator.resume(self._outcome.restored)
        if parts.boost is not None:
            parts.boost.owe(parts.strategy.owed)
        if parts.survivor is not None:
            parts.survivor.attend(self._identity, self._iteration)
            parts.memory.fit_logs()
            self._report_parking_budget()

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """See `Coordinator.step_end`."""
        parts, coordinator = self._parts, self.coordinator
        parts.older.protected(coordinator.newest_protected)
        if parts.survivor is not None:
            parts.memory.fit_logs()  # before the next snapshot begins, so that no copy is under way
        counts = parts.counter.take() if parts.counter else None
        if parts.boost is None:
            coordinator.step_end(iteration, counts, journal)
        else:
            coordinator.step_end(iteration, counts, journal, parts.boost.take())
            parts.boost.owe(parts.strategy.owed)
        if parts.survivor is not None:
            parts.survivor.committed(iteration, journal, coordinator.oldest_base)

    def report(self) -> ProtectionReport:
        """See `Coordinator.report`."""
        report = self.coordinator.report()
        self._status.show(report)
        return report

    def failure(self) -> None:
        """Nothing new is begun, and what is sealed stays."""
        self._status.close()
        self.coordinator.failure()

    def shutdown(self, *, keep_memory: bool) -> None:
        """See `Coordinator.shutdown`; gives the memory back to the node unless it is to be kept for another start."""
        parts, store = self._parts, self._parts.memory.store
        self._status.close()
        self.coordinator.shutdown()
        if self._agent is not None:
            self._agent.close()
        if parts.boost is not None:
            parts.boost.close()
        if parts.survivor is not None:
            parts.survivor.end(keep_memory=keep_memory)
        if keep_memory:
            store.close()
        else:
            store.remove()
            with suppress(OSError):  # other processes of the node may still be there
                (memory_folder(parts.config) / parts.place.node).rmdir()
        for transport in (parts.control, parts.data):
            transport.close()

    def _coordinator(self, identity: Identity) -> Coordinator:
        """What copies, replicates, keeps and persists snapshots under this name."""
        parts = self._parts
        memory, state, waits = parts.memory, parts.state, parts.waits
        ports = Ports(
            memory.store,
            state.capturer,
            parts.training.trainer,
            parts.control,
            ThreadExecutor,
            parts.clock,
            parts.owners,
            memory.specs,
            state.release_segments,
            memory.log_bytes,
            memory.room,
            memory.standby_bytes,
            parts.config.strict,
            CudaStopwatch() if state.on_device else None,
            self._step_recorder(),
            waits.waits if waits is not None else None,
        )
        sends = BubbleSends(waits.waits) if waits is not None else None
        replicates = parts.peers or parts.owners
        replicator = Replicator(parts.data, parts.peers, parts.owners, sends) if replicates else None
        facts = parts.clock, identity
        worker = ReplicationWorker(
            memory.store, replicator, parts.data, *facts, owners=parts.owners, sends_steps=parts.follows
        )
        return Coordinator(parts.job, parts.strategy, ports, worker, self._persister(identity))

    def _persister(self, identity: Identity) -> Persister | None:
        parts, capturer = self._parts, self._parts.state.capturer
        if parts.persistent is None:
            return None

        def layout(piece: Piece, index: int) -> Layout:
            return capturer.layout(piece.plan, trainer=index == 0)

        places, varying = (parts.memory.store, parts.persistent, parts.rank), parts.state.varying
        announce = self._announce_to_agent()
        return Persister(*places, identity, layout, clock=parts.clock, varying=varying, announce=announce)

    def _announce_to_agent(self) -> Callable[[Sequence[CopyOrder]], None]:
        """What tells the process that outlives this one what is being persisted; nothing where none is asked for."""
        parts, config = self._parts, self._parts.config
        if config.persist_agent_s is None or config.persist_dir is None:
            return lambda orders: None
        facts = config.persist_dir, parts.rank, config.persist_agent_s, read_secret(config.secret_file)
        try:
            self._agent = PersistAgent(parts.memory.store.directory, *facts)
        except OSError as error:
            log.error("rank %d: no process will finish what it persists: %s", parts.rank, format_error(error))
            return lambda orders: None
        parts.held.callback(self._agent.close)
        return self._agent.announce

    def _step_recorder(self) -> AdamSteps | None:
        """What records steps for peers that follow them."""
        parts = self._parts
        if not parts.follows:
            if parts.config.replicate != "state" and parts.rank == 0:
                log.warning("--moe-ckpt-replicate %s has no effect: no replicas are kept", parts.config.replicate)
            return None
        steps = AdamSteps(parts.training.optimizer, parts.state.live.stepped)
        parts.held.callback(steps.close)
        if parts.rank == 0:
            log.info("gradients for peers take at most %.3f GB of this process", steps.most_bytes / 1e9)
        return steps

    def _report_parking_budget(self) -> None:
        assert self._parts.survivor is not None
        if self._parts.rank == 0:
            budget = self._parts.survivor.parking_budget()
            log.info("%s", budget)
            if not budget.fits:
                log.warning("that may not suffice for all ranks of a node at once: %s", PATIENCE_ADVICE)


def _facts(parts: SessionParts) -> Mapping[str, Any]:
    """Who this is, for whoever asks for the status of the job."""
    return {
        "rank": parts.rank,
        "world_size": parts.topology.world_size,
        "node": parts.place.node,
        "job": parts.place.job_id,
        "strategy": parts.config.strategy,
    }
