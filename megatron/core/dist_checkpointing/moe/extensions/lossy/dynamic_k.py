"""Dynamic-K: how many experts per layer to save so that faults never cost more tokens than allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ...errors import UsageError
from ...types import Level, OperatorId
from .ledger import TokenLedger
from .recovery import plt_moc

MOC_PLT_THRESHOLD = Fraction(375, 10_000)
"""3.75 %, up to which MoC found no effect on accuracy (MoC 3.1.2)."""


@dataclass(frozen=True)
class PltLimit:
    """The share of tokens that may be lost in the whole of the planned training.

    tokens: T_i, input tokens of the planned training, and topk, experts per token; one value or one per MoE layer.
    Raises UsageError for a threshold outside of 0..1.
    """

    tokens: int | Sequence[int]
    topk: int | Sequence[int]
    threshold: Fraction = MOC_PLT_THRESHOLD

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold is {self.threshold}, but must be from 0 to 1")

    def plt(self, lost_tokens: Sequence[int]) -> Fraction:
        """MoC eq. 7 for these lost tokens per MoE layer."""
        return plt_moc(lost_tokens, self.tokens, self.topk)


@dataclass(frozen=True)
class KChoice:
    """Experts per MoE layer to save, and why.

    `at_risk` are the tokens per layer that a fault after this checkpoint loses at most, `plt_at_risk` the cumulative
    PLT after such a fault. `holds` is False when that is above the threshold even though all experts are saved.
    """

    k: int
    at_risk: tuple[int, ...] = field(repr=False)
    plt_at_risk: Fraction
    holds: bool


def k_ladder(floor: int, num_experts: int) -> tuple[int, ...]:
    """The values K takes: doubled as in the papers, up to all experts.

    Args:
        floor: The smallest K, from 1 to `num_experts`.
        num_experts: N, experts per MoE layer.
    """
    check_floor(floor, num_experts)
    ladder = [floor]
    while ladder[-1] < num_experts:
        ladder.append(min(2 * ladder[-1], num_experts))
    return tuple(ladder)


def choose_k(
    ledger: TokenLedger,
    select: Callable[[int], Iterable[OperatorId]],
    limit: PltLimit,
    floor: int,
    *,
    level: Level = Level.PERSIST,
    iterations_ahead: int = 0,
    tokens_per_iteration: int = 0,
) -> KChoice:
    """K for the checkpoint that is about to be taken, raised ahead of the fault that would break the threshold.

    A fault takes all experts back with the rest of the model to the newest checkpoint; what was trained after it is
    trained again and not lost. Lost is what experts had learnt before that checkpoint and after their own newest copy.
    So, from this checkpoint until the next, any fault loses exactly the tokens that the experts which `select(k)`
    leaves out have not saved by now, and it is enough to decide again before each checkpoint: the smallest K from
    `floor`, doubled up to N, with which PLT so far + PLT of that loss stays within the threshold. Repeated faults at
    one checkpoint lose nothing more, because all experts then are as their copies. With K = N nothing can be lost,
    so a threshold that holds once holds for ever. K falls back when less is at risk; as losses add up, it rises for
    good.

    When asked ahead of the checkpoint, the tokens of the iterations until then count as at risk as far as they can
    reach experts that are left out: min(TopK, N - K) times. The guarantee is for recoveries that go back to an
    iteration sealed at `level` and find the newest copies before it there intact: PERSIST covers faults that take the
    memory of nodes.

    Args:
        ledger: The tokens that each expert has had, and the copies of it.
        select: The experts that a checkpoint with this K saves.
        limit: The threshold, with the tokens of the planned training and TopK.
        floor: The smallest K to choose.
        level: The level whose copies recoveries go back to.
        iterations_ahead: Iterations from now to the checkpoint.
        tokens_per_iteration: Input tokens of each of those iterations, an upper bound.

    Raises:
        UsageError: A floor outside of 1..N or negative numbers.
    """
    for name, value in (("iterations_ahead", iterations_ahead), ("tokens_per_iteration", tokens_per_iteration)):
        if value < 0:
            raise UsageError(f"{name} is {value}, but must be at least 0")
    layers, num_experts = ledger.layers, ledger.num_experts
    rows = {layer: row for row, layer in enumerate(layers)}
    topk = [limit.topk] * len(layers) if isinstance(limit.topk, int) else limit.topk
    unsaved = ledger.unsaved(level)
    totals = [sum(row) for row in unsaved]
    lost = ledger.lost_tokens
    for k in k_ladder(floor, num_experts):
        ahead = iterations_ahead * tokens_per_iteration
        at_risk = [total + ahead * min(top, num_experts - k) for total, top in zip(totals, topk, strict=True)]
        for operator in select(k):
            row = rows[operator.layer]
            at_risk[row] -= unsaved[row][operator.expert]
        plt = limit.plt([before + more for before, more in zip(lost, at_risk, strict=True)])
        if plt <= limit.threshold or k == num_experts:
            break
    return KChoice(k, tuple(at_risk), plt, plt <= limit.threshold)


def check_floor(k: int, num_experts: int) -> None:
    """Raises UsageError for a k outside of 1..num_experts.

    Args:
        k: Experts per MoE layer to save.
        num_experts: N, experts per MoE layer.
    """
    if not 1 <= k <= num_experts:
        raise UsageError(f"k is {k}, but must be from 1 to num_experts = {num_experts}")
