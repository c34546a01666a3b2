"""What one session is made of: transports, live state, strategy, memory and recovery, opened in one order on all ranks.

Nearly every step is a collective over the session's own transports, never over training's groups; a problem of one rank
is raised on all of them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..config import MoECheckpointConfig
from ..errors import format_error
from ..local_recovery.communicator import BoundaryCommunicator
from ..local_recovery.survivor import Survivor
from ..megatron_state.adam_steps import check_repeatable
from ..megatron_state.capacity import RouterCapacity, drops_tokens
from ..megatron_state.model_operators import model_operators
from ..megatron_state.popularity import TokenCounter
from ..policy.lineage import attempt_name, number_of
from ..ports import Execution
from ..recovery.diverged import DivergenceNotes
from ..recovery.kept_state import take
from ..recovery.recovery import Recovery
from ..recovery.restoring import RecoveryPorts
from ..recovery.timeline import Milestone, Timestamps, left_in
from ..replication.agreement import raise_on_all_ranks
from ..snapshot.buffers import gathered_sizes, gathered_unchanging
from ..snapshot.identity import Identity
from ..strategies import GATE_UNIT, STRATEGIES, Job, Strategy
from ..versions import check_versions, found_versions
from .clock import SystemClock
from .leases import Leases
from .live_state import LiveState, Training
from .older_layout import OlderLayout
from .opening import Transports, introduced, own_connection, parallel_layout, placed_topology
from .persist_agent import wait_for_agent
from .process_info import ProcessInfo, open_persistent, replicas_placed, slot_of, take_over_renamed
from .rank_memory import RankMemory
from .restart_sequence import RestartSequence
from .stage_waits import StageWaits

log = logging.getLogger(__name__)


class SessionParts:
    """Opened by the constructor, which raises UsageError on all ranks alike for what cannot work; `close` lets go.

    Attributes:
        store: In which all ranks found each other, over a connection on which nobody waits.
        place: Of this process, with the job id on which all ranks have agreed.
        control, data, patient: Transports: of agreements, of replicas, and of a recovery, which may wait for long.
        links: Connections to peers, which close when one is lost.
        leases: Of the places that this job writes to.
        job, strategy: What is planned from; `renew_strategy` begins anew.
        peers, owners: The ranks that keep replicas of this one, and those whose replicas it keeps.
        follows: Whether peers repeat optimizer steps from gradients in place of receiving state.
        persistent: Storage that outlives the job; None without.
        survivor: What logs and parks for local recovery; None where a recovery cannot be local.
        waits: Bubbles of the pipeline into which copies are placed; None unless asked for.
        counter: Of tokens per expert; None where the strategy does not ask.
        boost: Capacity for experts that make up for lost tokens; None unless asked for.
        older: Snapshots of an older layout.
        attempt: Name of this attempt, the same on all ranks; see `policy.lineage`.
        times_left: What the attempts before this one left for the timeline.
        began: Whether training was protected with this memory.
    """

    def __init__(
        self, config: MoECheckpointConfig, training: Training, place: ProcessInfo, timestamps: Timestamps
    ) -> None:
        self.config, self.training, self.place, self.timestamps = config, training, place, timestamps
        self.clock, self.rank, self.began = SystemClock(), torch.distributed.get_rank(), False
        self.held = ExitStack()
        self.survivor: Survivor | None = None
        self.waits: StageWaits | None = None
        with ExitStack() as opening:
            opening.callback(self.close)
            self._connect()
            execution = self._choose_strategy()
            self._open_memory()
            self._prepare_recovery(execution)
            self._count_tokens()
            opening.pop_all()
        timestamps.mark(Milestone.BUILT)

    def _connect(self) -> None:
        config, store = self.config, _get_default_store()
        endpoints, job_id, run, nodes = introduced(store, config, self.place)
        self.place = place = replace(self.place, job_id=job_id)
        self.store = own_connection(store, config.timeout_s)
        self.control, self.data, self.patient, self.links = Transports.connected(self.store, config, endpoints)
        self._address = endpoints[self.rank].address
        for one in (self.control, self.data, self.patient):
            self.held.callback(one.close)
        self.held.callback(self.links.forget)
        # Over the transport with the longest patience: rank 0 may have to watch a lease for a while.
        self.leases = Leases(config, self.training.save, place, run)
        self.held.callback(lambda: self.leases.leave() if self.began else self.leases.release())
        raise_on_all_ranks(self.patient, self.leases.acquire)
        self._together(self._check_versions)
        self._together(lambda: take_over_renamed(config, place, nodes))
        # Nodes of all ranks: where replicas go and which copies are near depends on them, and so does all below.
        self.topology = self._together(lambda: placed_topology(self.control, place))
        # Before anything is promised or allocated: a model of which some bytes belong to no operator is refused.
        self.state = self._together(lambda: LiveState(self.training, self.topology, config, self.rank))
        self.held.callback(self.state.close)

    def _check_versions(self) -> None:
        strategy = self.config.strategy
        for line in check_versions(found_versions(), strategy if STRATEGIES[strategy].replays else None):
            if self.rank == 0:
                log.warning("%s", line)

    def _choose_strategy(self) -> Execution | None:
        """The strategy, which plans from sizes of all ranks, and who keeps whose replicas; what replays, if it does.

        What cannot be repeated or replayed is refused before it is needed, and before any memory is taken.
        """
        config, training = self.config, self.training
        self.job = Job(
            config,
            model_operators(training.chunks),
            self.topology,
            training.tokens_per_iteration,
            training.iterations,
            training.topk,
            tied_embeddings=self.state.ties_embeddings,
            sizes=gathered_sizes(self.state.capturer, self.control),
            drops_tokens=bool(self.control.total([int(drops_tokens(training.chunks))])[0]),
            unchanging=gathered_unchanging(self.state.unchanging, self.state.capturer.operators, self.control),
        )
        self.strategy: Strategy = self._together(lambda: STRATEGIES[config.strategy](self.job))
        placement = self._together(lambda: replicas_placed(config, self.topology))
        self.peers, self.owners = placement.peers[self.rank], placement.kept_by[self.rank]
        self.follows = config.replicate == "gradients" and self.job.replicas > 0
        if self.follows:
            self._together(lambda: check_repeatable(training.optimizer, self.state.live.stepped))
        return self._together(self.state.execution) if self.strategy.replays else None

    def _open_memory(self) -> None:
        config, state, layout = self.config, self.state, parallel_layout(self.topology, self.config.shard)
        self.persistent = self._together(lambda: open_persistent(config, self.rank, layout, state.layout))
        self._together(lambda: wait_for_agent(slot_of(config, self.place), config.persist_agent_s))
        places = config, self.place, self.job, self.strategy, state, self.training
        self.memory = RankMemory(*places, self.control, self.owners, self.clock)
        self.held.callback(lambda: self.memory.close(began=self.began))
        self.memory.open()
        self.survivor = self.memory.survivor
        if self.survivor is not None:
            self.held.callback(self.survivor.end, keep_memory=True)
        self.waits = self._together(self._stage_waits) if config.copy_placement == "bubbles" else None
        self.identity = Identity(self.place.job_id, layout, state.capturer.operators, config.strategy)
        self.times_left = left_in(self.memory.store.directory)
        self._name_attempt()

    def _name_attempt(self) -> None:
        """All ranks give the attempt one name. It comes behind the attempts whose faults are not over; when it is known
        what earlier ones left, `number_attempt` puts it behind these, too."""
        number = 1 + max((number_of(left["attempt"]) for left in self.times_left), default=0)
        told = cast("list[tuple[int, str]]", self.control.gather([number, secrets.token_hex(4)]))
        self._token = told[0][1]
        self.attempt = attempt_name(max(number for number, _ in told), self._token)

    def number_attempt(self) -> None:
        """Behind all attempts that left something; the same on all ranks."""
        self.attempt = attempt_name(max(number_of(self.attempt), self.recovery.next_attempt), self._token)

    def _stage_waits(self) -> StageWaits:
        passes, on_device = self.training.passes, self.state.on_device
        return StageWaits.of(passes, self.topology, self.rank, self.communicator, on_device=on_device)

    def _prepare_recovery(self, execution: Execution | None) -> None:
        facts, places = self.identity.topology, (self.place, self.memory.store, self.persistent)
        live = partial(self.state.layout, facts)
        self.older = OlderLayout(self.config, *places, facts, live, self.patient, self._address)
        self.held.callback(self.older.close)
        ports = RecoveryPorts(
            self.memory.store,
            self.older.storage,
            self.patient,
            self.state.restorer,
            self.training.trainer,
            self.clock,
            execution=execution,
            make_room=self.memory.make_room,
            standby=self.survivor.store if self.survivor is not None else None,
            boundary=self.memory.stage_source,
            timestamps=self.timestamps,
            notes=DivergenceNotes(self.memory.store.directory),
            kept=take(self.training.optimizer),
            restored=self.older.restored,
            is_spared=self.older.is_spared,
            older=self.older.timelines,
        )
        self.recovery = Recovery(self.job, self.strategy, ports, self.identity, self.owners)
        self.held.callback(self.recovery.close)
        if execution is not None:
            self.held.callback(execution.thaw)
        self.restart = RestartSequence(self.recovery, self.identity, self.strategy, self.survivor, self.rank)

    def _count_tokens(self) -> None:
        chunks, self.counter, self.boost = self.training.chunks, None, None
        if self.strategy.counts_tokens:
            self.counter = TokenCounter(chunks, gate_unit=GATE_UNIT if self.strategy.counts_gates else None)
            self.held.callback(self.counter.close)
        if self.strategy.makes_up:
            self.boost = RouterCapacity(chunks, self.config.capacity_boost)
            self.held.callback(self.boost.close)

    @property
    def communicator(self) -> BoundaryCommunicator | None:
        """Through which the stages of the pipeline have to send; None: core's own."""
        if self.survivor is not None:
            return self.survivor.communicator
        return self.waits.communicator if self.waits is not None else None

    def renew_strategy(self) -> None:
        """Begin anew with one that has learned nothing from a recovery that came to nothing."""
        self.strategy = STRATEGIES[self.config.strategy](self.job)
        self.memory.fit_strategy(self.strategy)

    def close(self) -> None:
        """Let go of everything; what is sealed in memory stays."""
        try:
            self.held.close()
        except Exception as error:  # connections may be lost: whoever speaks through them fails
            log.debug("while a session was given up: %s", format_error(error))

    def _together[T](self, work: Callable[[], T]) -> T:
        return raise_on_all_ranks(self.control, work)
