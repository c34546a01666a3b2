"""Where copies wait for bubbles of the pipeline: the waits of this rank's stage, and who tells of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megatron.core import parallel_state

from ...errors import UsageError
from ...local_recovery.communicator import BoundaryCommunicator
from ...local_recovery.survivor import Passes
from ...types import Topology
from .copy_placement import estimated_wait_share
from .pipeline_waits import DevicePipelineWaits, PipelineWaits

log = logging.getLogger(__name__)


@dataclass
class StageWaits:
    """The waits of one rank's stage, and the communicator that tells of them."""

    waits: PipelineWaits
    communicator: BoundaryCommunicator
    said: bool = False

    @classmethod
    def of(
        cls,
        passes: Passes | None,
        topology: Topology,
        rank: int,
        communicator: BoundaryCommunicator | None,
        *,
        on_device: bool,
    ) -> StageWaits:
        """Listen to a pipeline communicator.

        Args:
            passes: How this job runs forward and backward passes; None: unknown.
            topology: The rank layout.
            rank: This rank.
            communicator: The communicator; None: a new one is made.
            on_device: Whether stages wait on a device, not on the host.

        Raises:
            UsageError: The job has no pipeline stages that wait for each other.
        """
        if passes is None or topology.pp < 2:
            raise UsageError(
                f"--moe-ckpt-copy-placement bubbles needs pipeline stages that wait for each other, but the job has"
                f" {topology.pp}: choose spread"
            )
        share = wait_share(passes, topology, rank)
        waits = DevicePipelineWaits(share) if on_device else PipelineWaits(share)
        if communicator is None:
            communicator = BoundaryCommunicator(parallel_state.get_pipeline_model_parallel_group(), passes.config)
        communicator.waits = waits
        return cls(waits, communicator)

    def reduced(self) -> None:
        """The passes of an iteration are over; says once where no wait was seen in them."""
        self.waits.end()
        newest = self.waits.newest
        if newest is not None and not newest.intervals and not self.said:
            self.said = True
            log.warning(
                "--moe-ckpt-copy-placement bubbles has no effect: no wait of this pipeline stage was seen in an"
                " iteration; the schedule has to be given the manager's communicator"
            )


def wait_share(passes: Passes, topology: Topology, rank: int) -> float | None:
    """What `estimated_wait_share` says of this job; None where its schedule is not one that is known.

    Args:
        passes: How this job runs forward and backward passes.
        topology: The rank layout.
        rank: A rank of the stage.
    """
    chunks, group = topology.vpp, passes.config.microbatch_group_size_per_vp_stage
    if chunks > 1 and group not in (None, topology.pp):
        return None
    try:
        return estimated_wait_share(topology.coordinates(rank).pp, topology.pp, passes.microbatches, chunks)
    except UsageError:
        return None
