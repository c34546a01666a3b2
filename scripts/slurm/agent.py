"""torchrun for one node of a job with spare nodes: `agent.py [options of torchrun] SCRIPT [flags]`.

It adds four things: a rendezvous that survives a node that is lost while all meet (`megatron.pretrain.rendezvous`);
spares that wait until they are needed; a word to `rendezvous.py` about how the job has ended; and memory of the node
that is given back at the end. It is the task that Slurm starts and signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from memory import FOLDER, give_back, holds_state, is_kept, keep, take
from orphaned import cancel_if_orphaned, requeue_if_orphaned
from rendezvous import LEFT_EARLY, REFUSED, REFUSED_WITH_STATE, UNTRAINED, note_trained, outcome_at, report
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousInfo
from torch.distributed.run import run

from megatron.pretrain.device import values_of
from megatron.pretrain.processes import NODE_LEAVES, NODE_NAME
from megatron.pretrain.rendezvous import BACKEND, register_backend
from megatron.pretrain.spare_nodes import SpareHandler, SpareNotNeeded
from megatron.pretrain.standby.health_options import HealthOptions
from megatron.pretrain.standby.run import parse_options, refuse_what_cannot_start
from moe_ckpt.megatron_core import refuse_unsupported_versions


class _Handler(SpareHandler):
    """Notes that this node has reached the meeting point: one that never did cannot know that it is gone. And that it
    had a place there, so that it has started ranks; and tells the keeper at `endpoint` once these have trained. And
    that nobody heard that the job has nothing more to do."""

    was_made = had_a_place = has_told = leaves_nothing = False
    endpoint = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        _Handler.was_made = True

    def next_rendezvous(self) -> RendezvousInfo:
        """As torch's."""
        found = super().next_rendezvous()
        _Handler.had_a_place = True
        return found

    def num_nodes_waiting(self) -> int:
        """As torch's, which its agent asks while ranks run."""
        from megatron.core.dist_checkpointing.moe.standby.verdict import has_trained

        if not _Handler.has_told and has_trained():
            _Handler.has_told = True  # once: a keeper that does not answer would hold up the agent each time
            with contextlib.suppress(DistError):
                note_trained(_Handler.endpoint)
        return super().num_nodes_waiting()


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 trained or not needed, 2 flags or inputs that cannot work, 4 left before the last iteration, 128 + N
    told to end, 1 failed."""
    refuse_unsupported_versions()
    code, is_spare, begun_s = None, False, time.monotonic()
    signal.signal(signal.SIGTERM, _told_to_end)
    try:
        take()
        code = _lead(argv)
    except SignalException as stop:
        code = 128 + stop.sigval
    except SpareNotNeeded:
        code, is_spare = 0, True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A spare that was not needed may have kept memory of an earlier run: it asks whether training has ended.
        waits = is_spare and is_kept() and outcome_at(_endpoint(argv)) != 0
        ran_s = time.monotonic() - begun_s
        if code is None and not is_kept():
            _wait_for_persist_agents(argv)
        give_back(os.environ[NODE_NAME], 1 if code is None or waits else code)
        if code is None and _Handler.was_made:
            requeue_if_orphaned(_endpoint(argv), ran_s)
        elif _Handler.leaves_nothing:
            cancel_if_orphaned()
    return 1 if code is None else code


def _wait_for_persist_agents(argv: Sequence[str]) -> None:
    """They write snapshots to storage from memory; Slurm ends them with this process."""
    from megatron.core.dist_checkpointing.moe.extensions.persist_agent.agent import wait_for_agent

    limit_s = values_of(argv, "--moe-ckpt-persist-agent-s").get("moe_ckpt_persist_agent_s")
    if limit_s is not None:
        for job in Path(os.environ[FOLDER], os.environ[NODE_NAME]).glob("*"):
            wait_for_agent(job / "slot", float(limit_s))


def _endpoint(argv: Sequence[str]) -> str:
    name = "--rdzv-endpoint="
    return next(option.removeprefix(name) for option in argv if option.startswith(name))


def _told_to_end(number: int, _frame: FrameType | None) -> None:
    """Let torchrun tell its ranks and wait for them; while it waits a second signal would have it kill them."""
    signal.signal(number, signal.SIG_IGN)
    raise SignalException(f"told to end by signal {number}", signal.Signals(number))


def _lead(argv: Sequence[str]) -> int | None:
    """Train, and report how that has ended; the exit code, None where other nodes may continue. SIGTERM is ignored from
    the report on."""
    # Once Megatron-Core is skipped.
    from megatron.core.dist_checkpointing.moe.standby.verdict import has_left_early, has_trained, verdict_of_ranks
    from megatron.pretrain.standby.health_agent import NodeExcluded, own_agents

    try:
        # Without SIGTERM among them: torchrun would replace our handler once it starts ranks.
        options = parse_options([f"--rdzv-backend={BACKEND}", "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *argv])
        refuse_what_cannot_start(options)
    except SystemExit:
        # Where only few nodes refuse, such as one without a label of its unit, the others train.
        return _reported(_endpoint(argv), 2, of_nodes=_more_than_spares())
    _Handler.endpoint = options.rdzv_endpoint
    register_backend(_Handler)
    with verdict_of_ranks() as verdict:
        try:
            with own_agents(options.moe_ckpt_standbys, HealthOptions.of(options)):
                run(options)
            code = verdict() or (LEFT_EARLY if has_left_early() else 0)
            # Ranks leave what to do with their state in memory to a user, or what to mend before they read it.
            if code == 1:
                keep()
            elif code == REFUSED and holds_state(os.environ[NODE_NAME]):
                return _refused_with_state(options.rdzv_endpoint)
        except NodeExcluded as error:
            sys.stderr.write(f"{error}\n")
            return NODE_LEAVES  # the others continue
        except SignalException as stop:
            code = 128 + stop.sigval
        except (ChildFailedError, RendezvousError) as error:
            sys.stderr.write(f"{os.environ.get(NODE_NAME)} leaves the job: {type(error).__name__} {error}\n")
            closed = isinstance(error, RendezvousClosedError)
            # Loops of others tell nothing of their iterations.
            tells = "--moe-ckpt-memory-dir" in argv and _Handler.had_a_place
            if tells and (closed or isinstance(error, ChildFailedError)) and not has_trained():
                with contextlib.suppress(DistError):
                    report(options.rdzv_endpoint, UNTRAINED, of_nodes=int(options.nnodes.partition(":")[0]))
            failed = closed and holds_state(os.environ[NODE_NAME])
            if failed and outcome_at(options.rdzv_endpoint) in (1, REFUSED, REFUSED_WITH_STATE):
                return _refused_with_state(options.rdzv_endpoint)  # the other node may lack what this one has
            return None
        # Of one node that is told to end, others may train on.
        return _reported(options.rdzv_endpoint, code, of_nodes=_more_than_spares() if code > 128 else 1)


def _more_than_spares() -> int:
    return int(os.environ.get("MOE_CKPT_SPARES", "0")) + 1


def _refused_with_state(endpoint: str) -> int:
    keep()
    _reported(endpoint, REFUSED_WITH_STATE)
    return REFUSED


def _reported(endpoint: str, code: int, of_nodes: int = 1) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        report(endpoint, code, of_nodes)
    except DistError as error:
        said = f"{endpoint} does not answer, so that the job has ended with {code} is not known there"
        sys.stderr.write(f"{said}; run scancel {os.environ['SLURM_JOB_ID']}: {str(error).splitlines()[0]}\n")
        _Handler.leaves_nothing = code in (0, REFUSED) and of_nodes == 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
