"""When the chunks of a copy may begin: in bubbles of the pipeline first, the rest beside computation (MOETION Alg. 4).

A copy has to end within the passes of an iteration, in which this rank's stage waits now and then for another one. What
these waits have time for is kept for them; the rest is spread evenly over the passes, as a copy is without pipeline
stages. However long the waits turn out to be, a chunk is due at the latest when what is left takes all the time left.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedules import Bubbles, bytes_in_bubbles, schedule_1f1b

BACKWARD_SHARE = 2 / 3
"""Of the time that a microbatch computes: gradients of inputs and of weights each take about as long as a forward."""


@dataclass(frozen=True, slots=True)
class CopyPlacement:
    """Where `total_bytes` of one copy go.

    bubble_bytes: W_bubble of Alg. 4, which wait for bubbles. span_s: the copy is to end so long after it began.
    bytes_per_s: how fast chunks are copied, pauses between them left out.
    """

    total_bytes: int
    bubble_bytes: int
    span_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, total_bytes: int, bubbles: Bubbles | None, span_s: float, bytes_per_s: float) -> CopyPlacement:
        """As `bytes_in_bubbles` splits them, with the bubbles of the newest passes; None: nothing is known of any."""
        if bubbles is None or span_s <= 0 or bytes_per_s <= 0:
            return cls(total_bytes, 0, span_s, bytes_per_s)
        return cls(total_bytes, bytes_in_bubbles(bubbles, total_bytes, bytes_per_s), span_s, bytes_per_s)

    def due_s(self, in_bubbles: int, beside: int) -> float:
        """Seconds after the begin at which the next chunk may begin although there is no bubble.

        Args:
            in_bubbles: Bytes that have begun in bubbles.
            beside: Bytes that have begun while the stage computed.
        """
        left_bytes = max(0, self.total_bytes - in_bubbles - beside)
        latest_s = max(0.0, self.span_s - left_bytes / self.bytes_per_s) if self.bytes_per_s > 0 else 0.0
        rest_bytes = self.total_bytes - self.bubble_bytes
        return latest_s if beside >= rest_bytes else min(latest_s, self.span_s * beside / rest_bytes)


def estimated_wait_share(stage: int, stages: int, microbatches: int, chunks: int) -> float:
    """How long a stage waits for others in the passes of an iteration, over the time for which it computes in them.

    The estimate of MOETION Alg. 4, line 3, for stages that are alike: t_bubble is this times the seconds that the stage
    computes. The bubble behind a stage's last backward pass is left out: no receive waits in it.

    Args:
        stage: The pipeline rank.
        stages: Pipeline stages.
        microbatches: Microbatches of an iteration.
        chunks: Virtual stages of each.

    Raises:
        UsageError: Pipelines that `schedule_1f1b` does not know.
    """
    schedule = schedule_1f1b(stages, microbatches, 1 - BACKWARD_SHARE, BACKWARD_SHARE, chunks)
    return schedule.waits(stage).idle_s / microbatches
