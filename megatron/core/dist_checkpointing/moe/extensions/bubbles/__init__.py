"""Copies and sends that begin while this rank's pipeline stage waits for another one (`--moe-ckpt-copy-placement
bubbles`; MOETION Alg. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ports import Pace
from ...replication.agreement import raise_on_all_ranks
from ...snapshot.coordinator import ProtectionReport
from ...strategies.memory_report import HEADROOM
from ...types import WaitReport
from .. import Additions, Extension
from .copy_placement import CopyPlacement
from .pipeline_waits import BubblePace, BubbleSends
from .stage_waits import StageWaits


class BubbleExtension(Extension):
    """Of one rank."""

    _waits: StageWaits
    _stages: tuple[WaitReport, ...] = ()

    def opened(self) -> None:
        session = self.session
        passes, on_device = session.training.passes, session.state.on_device
        of_rank = passes, session.topology, session.control.rank, session.communicator
        self._waits = raise_on_all_ranks(session.control, lambda: StageWaits.of(*of_rank, on_device=on_device))
        session.communicator = self._waits.communicator

    def protects(self, additions: Additions) -> None:
        additions.pace, additions.numbers = self._pace, self
        additions.sends = BubbleSends(self._waits.waits)

    def passes(self) -> None:
        self._waits.waits.begin()

    def reduced(self) -> None:
        self._waits.reduced()

    def take(self) -> tuple[int, ...]:
        """As `Numbers.take`."""
        report, topology = self._waits.waits.take_report(), self.session.topology
        return report.to_numbers(topology, self.session.control.rank)

    def summed(self, sums: Sequence[int]) -> None:
        """As `Numbers.summed`."""
        self._stages = WaitReport.of_stages(sums, self.session.topology)

    def reported(self, report: ProtectionReport) -> ProtectionReport:
        return replace(report, waits=self._stages)

    def _pace(self, nbytes: int, passes_s: float | None) -> Pace | None:
        waits = self._waits.waits
        if waits.newest is None or not passes_s:
            return None
        bandwidth = self.session.state.capturer.bandwidth_bytes_per_s
        return BubblePace(CopyPlacement.of(nbytes, waits.newest, HEADROOM * passes_s, bandwidth), waits)


EXTENSION = BubbleExtension
