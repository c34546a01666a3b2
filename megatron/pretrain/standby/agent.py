"""torch's elastic agent, with workers that sit in slots: rendezvous, membership and restarts stay torch's."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.pretrain.standby.meeting import NodeRank, NodeRankAgreement, StandbyNotice
from megatron.pretrain.standby.node_agent import NodeAgent
from megatron.pretrain.standby.process import COPY_S, SlotProcess, await_word, let_orphans_go

log = logging.getLogger(__name__)

POLL_S = 0.01
KILL_TIMEOUT_S = 30.0
"""How long the end of a killed process may take: a driver may have to give pages of a device back."""
QUICK_DEATHS = 3
"""So many standbys in a row that die before they are ready mean that none will ever be."""
READY_S = 30.0
"""How long slots stay empty for a standby that is about to be ready."""
ANSWER_S = 15.0
"""How long a process that is well may take to hear of a lost peer and to put its state aside."""


class StandbyAgent(NodeAgent):
    """Fills the slots of its node: a process that lost a peer keeps its own, and those of the others go to standbys,
    and to new processes where there are too few.

    Args:
        standbys: How many to keep waiting, or one if that can be copied. They are started once training continues, so
            that nothing is slower for them, and on a spare node while it waits.
        arguments, options: As of torch's own agent.
    """

    _shutdown_timeout = 30
    """Where the agent of torch has no such setting, 2.11 for one."""

    def __init__(self, *arguments: Any, standbys: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wanted, self._quick_deaths = standbys, 0
        self._slots: dict[int, SlotProcess] = {}
        self._standbys: list[SlotProcess] = []
        self._survivors: dict[str, SlotProcess] = {}
        self._restarts = False
        self._look_s = 0.0
        self._place: NodeRank | None = None
        self._word = StandbyNotice(self._worker_group.spec.rdzv_handler)

    # What the base class asks for.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # A spare node waits here until it is needed.
        with self._word.heeded(self._refill_before_training) if not self._survivors else nullcontext():
            super()._rendezvous(worker_group)

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Any]:
        number = NodeRankAgreement(store, group_rank, group_world_size).number(self._place)
        self._place = NodeRank(number, group_world_size)
        ranks: list[Any] = super()._assign_worker_ranks(store, number, group_world_size, spec)
        return ranks

    def _number(self, group: WorkerGroup) -> int:
        assert self._place is not None
        return self._place.number

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        environments = self._environments(worker_group)
        self._setup_local_watchdog(envs=environments)
        self._setup_healthcheck()
        self._hear()
        survivors, self._survivors = self._survivors, {}
        # Those whose ranks are other nodes' now, as where the number of nodes changed: before others build in their
        # memory. They wait for a slot, in which a signal that a loop only notes reaches nobody.
        places = set(map(_identity, environments.values()))
        self._end([survivors.pop(one) for one in [*survivors] if one not in places], signal.SIGKILL, KILL_TIMEOUT_S)
        self._await_standby(len(environments) - sum(one.exit_code is None for one in survivors.values()))
        # One that is not ready yet was started before, so it is ready sooner than a new process.
        self._standbys.sort(key=lambda standby: not standby.is_ready)
        for slot, environment in environments.items():
            if (survivor := survivors.pop(_identity(environment), None)) is not None and survivor.exit_code is None:
                self._slots[slot], how = survivor, "stays"
                survivor.sit(environment)
            elif self._standbys:
                self._slots[slot], how = self._standby()
                self._slots[slot].sit(environment)
            else:
                self._slots[slot], how = self._started(environment), "is new"
            log.info("rank %s: pid %d %s", environment["RANK"], self._slots[slot].pid, how)
        return {slot: process.pid for slot, process in self._slots.items()}

    def _invoke_run(self, *arguments: Any, **options: Any) -> RunResult:
        # Torch's loop would sleep before each look: `_seen` waits, and notices a lost rank at once.
        spec = self._worker_group.spec
        self._look_s, spec.monitor_interval = spec.monitor_interval, 0.0
        return super()._invoke_run(*arguments, **options)

    def _seen(self, worker_group: WorkerGroup) -> RunResult:
        slots = self._slots.values()
        is_ending = any(process.is_silent and process.takes_slots and process.exit_code is None for process in slots)
        await_word(slots, POLL_S if is_ending else self._look_s)
        self._hear()
        let_orphans_go([process.pid for process in (*self._slots.values(), *self._standbys)])
        codes = {slot: process.exit_code for slot, process in self._slots.items()}
        left = {slot: 1 for slot, process in self._slots.items() if process.has_left}
        if failed := left | {slot: code for slot, code in codes.items() if code}:
            return RunResult(state=WorkerState.FAILED, failures=self._failures(worker_group, failed))
        if all(code == 0 for code in codes.values()):
            return RunResult(
                state=WorkerState.SUCCEEDED,
                return_values={worker_group.workers[slot].global_rank: None for slot in codes},
            )
        if all(process.is_training and process.takes_slots for process in self._slots.values()):
            with suppress(DistError):  # it will be told once the store answers again
                self._word.tell()
            self._refill()
        return RunResult(state=WorkerState.HEALTHY)

    def _failures(self, group: WorkerGroup, codes: Mapping[int, int]) -> dict[int, ProcessFailure]:
        """As torch has them, of slots with these exit codes."""
        return {
            group.workers[slot].global_rank: ProcessFailure(slot, self._slots[slot].pid, code, "<NONE>")
            for slot, code in codes.items()
        }

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._restarts = True
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        restarts, self._restarts = self._restarts, False
        if restarts:
            self._survivors = self._those_that_stay(worker_group)
        ending = [process for process in self._slots.values() if process not in self._survivors.values()]
        self._end(ending, signal.SIGTERM, self._shutdown_timeout)
        self._slots = {}

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        given = {} if timeout is None else {"timeout": timeout}  # older releases of torch give none and take none
        super()._shutdown(death_sig, **given)  # its watchdog and health check
        self._wanted = 0
        self._end([*self._standbys, *self._survivors.values()], signal.SIGKILL, KILL_TIMEOUT_S)
        self._end(self._slots.values(), death_sig, self._shutdown_timeout if timeout is None else timeout)
        self._standbys, self._slots, self._survivors = [], {}, {}

    def _those_that_stay(self, group: WorkerGroup) -> dict[str, SlotProcess]:
        """The processes that wait for the next start of training, by their place; waits until they have left."""
        places = {slot: _identity(environment) for slot, environment in self._environments(group).items()}
        self._hear()
        staying = {slot: process for slot, process in self._slots.items() if process.stays}
        for process in staying.values():
            if not process.has_left:
                process.call_off()
        called_s = time.monotonic()
        while late := [one for one in staying.values() if not one.has_left and one.exit_code is None]:
            # One that runs iterations again ends the one that it is in, which would be lost otherwise.
            wait_s = ANSWER_S + max(one.finish_s for one in late)
            if time.monotonic() > called_s + wait_s:
                pids = ", ".join(str(one.pid) for one in late)
                log.warning("process %s did not answer in %g s: its rank is reassigned", pids, wait_s)
                break
            await_word(late, POLL_S)
            self._hear()
        return {places[slot]: one for slot, one in staying.items() if one.has_left and one.exit_code is None}

    # Processes of this node.

    def _environments(self, group: WorkerGroup) -> dict[int, dict[str, str]]:
        """What torchrun says to each local rank, https://docs.pytorch.org/docs/stable/elastic/run.html."""
        spec, workers = group.spec, self._workers
        assert workers is not None
        job = {
            "ROLE_NAME": spec.role,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": group.group_world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": workers.start,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        }
        environments: dict[int, dict[str, str]] = {}
        for worker in group.workers:
            own = {
                "RANK": worker.global_rank,
                "ROLE_RANK": worker.role_rank,
                "WORLD_SIZE": worker.world_size,
                "ROLE_WORLD_SIZE": worker.role_world_size,
            }
            environment: dict[str, Any] = {name: str(value) for name, value in (job | own).items()}
            environment["LOCAL_RANK"] = str(worker.local_rank)
            if hasattr(self, "_set_local_rank_env"):  # with --virtual-local-rank, which torch has had since 2.10
                self._set_local_rank_env(environment, worker.local_rank, spec)
            environments[worker.local_rank] = environment
        return environments

    def _started(self, environment: Mapping[str, str], *, idle: bool = False) -> SlotProcess:
        """A new process, with the slot that this environment tells of, or a standby."""
        spec = self._worker_group.spec
        assert isinstance(spec.entrypoint, str), "the launcher starts a command"
        return SlotProcess.started([spec.entrypoint, *spec.args], {**os.environ, **environment}, idle=idle)

    def _standby(self) -> tuple[SlotProcess, str]:
        """One for a slot, and what it is: a copy where one of those that wait can be copied, which then waits on."""
        for standby in self._standbys:
            if standby.copies:
                if copy := standby.copy():
                    return copy, f"is a copy of standby {standby.pid}"
                log.warning("standby %d did not fork in %g s", standby.pid, COPY_S)
        return self._standbys.pop(0), "was a standby"

    def _await_standby(self, empty_slots: int) -> None:
        """Wait for one that will be copied for several slots: it has done a part of what each new process would do."""
        until = time.monotonic() + READY_S
        while empty_slots > 1 and not any(one.copies for one in self._standbys):
            begun = [one for one in self._standbys if one.will_copy and not one.is_ready]
            if not begun:
                return
            if time.monotonic() > until:
                log.warning("standby %d not ready after %g s; killed", begun[0].pid, READY_S)
                self._end(begun, signal.SIGKILL, KILL_TIMEOUT_S)
                for standby in begun:
                    self._standbys.remove(standby)
                    self._note_death(standby)
                return
            for standby in begun:
                standby.hurry()
            time.sleep(POLL_S)
            self._hear()

    def _refill(self) -> None:
        """Start the standby that is missing; one at a time, and none where they die again and again. One that can be
        copied is enough for all slots."""
        is_settled = self._quick_deaths < QUICK_DEATHS and all(one.is_ready for one in self._standbys)
        if is_settled and len(self._standbys) < self._wanted and not any(one.copies for one in self._standbys):
            run_id = self._worker_group.spec.rdzv_handler.get_run_id()
            self._standbys.append(self._started({"TORCHELASTIC_RUN_ID": run_id}, idle=True))

    def _refill_before_training(self) -> None:
        self._hear()
        self._refill()

    def _hear(self) -> None:
        for process in self._slots.values():
            process.hear()
            if process.problem and self._wanted:
                log.error(
                    "standbys disabled: pid %d %s; install one release on all nodes", process.pid, process.problem
                )
                self._wanted = 0
        for process in list(self._standbys):
            was_ready = process.is_ready
            process.hear()
            if process.is_ready and not was_ready:
                self._quick_deaths = 0
            if process.exit_code is not None:
                self._standbys.remove(process)
                self._note_death(process)

    def _note_death(self, process: SlotProcess) -> None:
        self._quick_deaths += not process.is_ready
        log.warning("standby %d exited with code %s", process.pid, process.exit_code)
        if self._quick_deaths == QUICK_DEATHS:
            log.error("%d standbys exited before they were ready: standbys disabled", QUICK_DEATHS)

    def _end(self, processes: Iterable[SlotProcess], number: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all of them, and SIGKILL to those that take longer to end."""
        ending = [process for process in processes if process.exit_code is None]
        for process in ending:
            process.end(number)
        until = time.monotonic() + timeout_s
        for process in ending:
            if process.wait(until - time.monotonic()):
                continue
            log.warning("process %d did not exit %.0f s after %s; killed", process.pid, timeout_s, number.name)
            process.end(signal.SIGKILL)
            if not process.wait(KILL_TIMEOUT_S):
                log.error("process %d survives SIGKILL; a device driver may hold it", process.pid)


def _identity(environment: Mapping[str, str]) -> str:
    """What a process that stays has to keep: its ranks, and the size of the job."""
    return " ".join(environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
