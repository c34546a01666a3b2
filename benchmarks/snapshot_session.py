"""Our sessions around the live training, for `snapshot.py`, and sums over ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from harness import BenchmarkJob


def sum_and_max(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Element by element the sum and the largest value of all ranks."""
    import torch

    ours = torch.tensor(values, dtype=torch.float64)
    total, most = ours.clone(), ours.clone()
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return total.tolist(), most.tolist()


def live_tensors(job: BenchmarkJob) -> tuple[Any, ...]:
    """All training state of this rank."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    return state_tensors(job.trainer.chunks, job.trainer.optimizer, read_topology(job.world_size))


class Ours:
    """A real session of `--moe-ckpt-strategy` around the loop; several may live in one process here.

    name: the strategy; `sparse/4` is `sparse` with windows of 4 iterations.
    """

    is_replaying = False

    def __init__(self, job: BenchmarkJob, name: str, interval: int) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, ProcessInfo
        from megatron.core.dist_checkpointing.moe.runtime import protected_session

        strategy, _, window = name.partition("/")
        own_name = name.replace("/", "-")
        folder = job.folder / own_name
        folder.mkdir(exist_ok=True)
        config = MoECheckpointConfig(
            strategy=strategy, interval=interval, window=window or "auto", memory_dir=str(folder)
        )
        place = ProcessInfo.from_environment()
        place = dataclasses.replace(place, job_id=f"{place.job_here}-{own_name}")
        # Sessions name their connections alike, as a job has only one: here each gets a part of the store for itself.
        own = PrefixStore(f"benchmark-{own_name}-{interval}", _get_default_store())
        with mock.patch.object(protected_session, "_get_default_store", return_value=own):
            manager = job.trainer.managed(config=config, place=place)
            manager.resume()
        manager.detach()  # iterations have a manager of their own around this session
        self.session = session = manager._session
        self._newest_bytes = 0
        self._windows: dict[range, list[int]] = {}
        self._span = range(0)
        self._note_spans(session.strategy)

    def __getattr__(self, name: str) -> Any:
        """All other calls of the loop."""
        return getattr(self.session, name)

    def before_optimizer(self) -> float:
        """As the session."""
        return self.session.before_optimizer()

    def step_end(self, iteration: int, journal: Any) -> None:
        """As the session."""
        self.session.step_end(iteration, journal)

    def report(self) -> Any:
        """As the session."""
        report = self.session.report()
        self._newest_bytes = report.snapshot_bytes or self._newest_bytes
        if report.snapshot_bytes:
            self._windows.setdefault(self._span, []).append(report.snapshot_bytes)
        return report

    def windows(self) -> list[list[int]]:
        """Bytes that this rank copied in each iteration of each window that became whole."""
        return [copied for span, copied in self._windows.items() if len(copied) == len(span)]

    def begin_turn(self) -> None:
        """What others did since the last turn is no time of an iteration of this training."""
        if self.session.coordinator is not None:  # before the first turn nothing is protected yet
            self.session.coordinator._step_ended_s = time.monotonic()

    def settle(self) -> None:
        """What was copied goes to the lanes beside training; the turn waits until those rest."""
        self.session.before_optimizer()

    def written_bytes(self) -> int:
        """Bytes of this rank's newest snapshot."""
        return self._newest_bytes

    def tidy(self) -> None:
        """Snapshots replace each other."""

    def close(self) -> None:
        """End the session and give its memory back."""
        self.session.shutdown(keep_memory=False)

    def _note_spans(self, strategy: Any) -> None:
        pieces_of = strategy.pieces

        def noting(plan: Any) -> Any:
            pieces = pieces_of(plan)
            self._span = pieces[0].span
            return pieces

        strategy.pieces = noting
