"""What a checkpoint strategy costs a training run, whoever asks: the closed form or the simulation of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, whole

Nodes = frozenset[int]
"""Nodes, by number, as failure domains."""


@dataclass(frozen=True)
class RecoveryCost:
    """What one fault costs, from the moment it strikes until training is again where it was.

    The parts are those of a timeline that a job writes of a recovery. detect_s: until all that have to know do.
    restart_s: of processes, with their model. rendezvous_s: until all ranks are connected. load_s: of the state,
    with the inventory, which takes milliseconds for any number of ranks (decision 087).
    replay_s: of `iterations_again`, the whole iterations since the state that was loaded. lost_tokens: input tokens
    whose updates an average MoE layer has lost for good, so that over the tokens of the planned training they are
    MoC eq. 7's proportion. from_storage: memory held no complete copy any more. refill_s: until the memory of what
    replaces the nodes holds copies again. The fraction of an iteration that a fault cuts off is not in here.
    Raises UsageError for values that are negative or not finite.
    """

    detect_s: float
    restart_s: float
    load_s: float
    replay_s: float
    iterations_again: int
    lost_tokens: float = 0.0
    from_storage: bool = False
    refill_s: float = 0.0
    rendezvous_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "float":
                not_negative(field.name, getattr(self, field.name))
        whole("iterations_again", self.iterations_again, 0)

    @property
    def total_s(self) -> float:
        """Seconds until training is where it was."""
        return self.down_s + self.replay_s

    @property
    def down_s(self) -> float:
        """Seconds until the replay begins."""
        return self.detect_s + self.restart_s + self.rendezvous_s + self.load_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, named as in the timeline of a real recovery; restart has its build."""
        return {
            "detect": self.detect_s,
            "restart": self.restart_s,
            "rendezvous": self.rendezvous_s,
            "fetch": self.load_s,
            "replay": self.replay_s,
        }


@dataclass(eq=False)
class Behaviour:
    """A strategy under way in one job. Only `strike` changes it, and only in subclasses that react to faults.

    Args:
        name: Of the system.
        iteration_s: Seconds of an iteration without checkpoints.
        interval: Iterations between states that one can return to; these are multiples of it. A window for sparse ones.
        window: Iterations over which one checkpoint spreads; 1 where each is whole.
        overhead_s: Mean seconds that checkpoints add to an iteration now.
        expected_recovery_s: E[R], mean seconds from a fault of one node, at any moment, until training is where it was.
        recover: What a fault costs, from (iteration, nodes to recover, nodes whose memory is empty).
        joint: Whether a recovery under way has to begin again, from (nodes of it, nodes of the new fault); None:
        always,
            because it takes the whole job.
        k_share: Share of each layer's experts in a snapshot now; 1 where all are.
        lost_tokens: That all faults so far have cost, as `RecoveryCost.lost_tokens` counts them.
    """

    name: str
    iteration_s: float
    interval: int
    window: int
    overhead_s: float
    expected_recovery_s: float
    recover: Callable[[int, Nodes, Nodes], RecoveryCost]
    joint: Callable[[Nodes, Nodes], bool] | None = None
    k_share: float = 1.0
    lost_tokens: float = 0.0

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        """The cost of one fault.

        Args:
            iteration: Number of the iteration that the fault cuts off, counted from 0.
            nodes: Nodes that failed. Where the fault restarts a recovery that is under way, the nodes of both.
            down: Nodes whose memory is empty now, wherever they recover, without nodes whose memory has been filled
                again; None: `nodes`.
        """
        return self.recover(iteration, nodes, nodes if down is None else down)

    def restarts(self, ongoing: Nodes, nodes: Nodes) -> bool:
        """Whether a fault makes a recovery that is under way start again; if not, both run at the same time.

        Args:
            ongoing: Nodes that the recovery under way restores.
            nodes: Nodes of the new fault.
        """
        return self.joint is None or self.joint(ongoing, nodes)

    def fresh(self) -> Behaviour:
        """The same strategy at the beginning of a run."""
        return self
