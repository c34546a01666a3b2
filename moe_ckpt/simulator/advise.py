"""Which checkpoint system, with which settings, for a job on a cluster; and why, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .choices import Choice, Question, best_of, noise
from .flags import flags_of, persist_interval
from .sensitivity import STOCK
from .systems import SYSTEMS

EXACT = tuple(name for name in SYSTEMS if name not in ("moc", "moetion"))
"""Systems that lose no update."""

SIMPLEST = "gemini"
"""`full`: nothing is replayed but whole iterations, by all ranks."""


@dataclass(frozen=True)
class Advice:
    """All systems, the best first; the recommended one, None where none can be used; why, in sentences.

    explanation: of the recommendation, in three of them. impossible: systems that cannot run this job at all, with the
    reason. stock: whether asynchronous torch_dist would do as well, in words; empty where it was not tried.
    """

    choices: tuple[Choice, ...]
    recommended: Choice | None
    reasons: tuple[str, ...]
    explanation: tuple[str, ...]
    impossible: dict[str, str]
    stock: str = ""


def advise(question: Question, systems: Iterable[str] = SYSTEMS, done: Callable[[], None] = lambda: None) -> Advice:
    """Try every setting of these systems, refuse those that do not fit, and recommend one.

    Exact systems are preferred to lossy ones whenever their ETTR is not lower by more than noise; among equals of a
    kind the higher ETTR counts. Raises UsageError for a system that is not known.

    Args:
        question: The job, its cluster, the mean time between faults and the memory limit.
        systems: Names of the systems to try, keys of `SYSTEMS`.
        done: Called after each system, for a progress bar.
    """
    choices, impossible = [], {}
    for name in systems:
        if name not in SYSTEMS:
            raise UsageError(f"system {name!r} is not known; known systems: {', '.join(SYSTEMS)}")
        try:
            choices.append(best_of(question, name))
        except UsageError as error:
            impossible[name] = str(error)
        done()
    choices.sort(key=lambda choice: (bool(choice.refused), -choice.ettr.mean))
    chosen = recommended([choice for choice in choices if not choice.refused])
    said = tuple(reasons(question, choices, chosen))
    why = tuple(explanation(question, choices, chosen))
    return Advice(tuple(choices), chosen, said, why, impossible, would_stock_do(question, choices, chosen))


def would_stock_do(question: Question, choices: Sequence[Choice], chosen: Choice | None) -> str:
    """Whether Megatron-Core's own asynchronous checkpoints give as much, which need nothing of this project.

    Args:
        question: The question that was asked.
        choices: The best setting of each system.
        chosen: The recommended one of `choices`; None: none can be used.
    """
    stock = next((one for one in choices if one.system == STOCK and not one.refused), None)
    if stock is None or chosen is None:
        return ""
    gap = chosen.ettr.mean - stock.ettr.mean
    hours = gap * question.run_s / 3600
    if gap <= noise(chosen, stock):
        return (
            f"Yes: {_ettr(stock)} {_every(stock.interval)}, which is the same within noise; {flags_of(question, stock)}"
        )
    return f"No: {_ettr(stock)}, {100 * gap:.1f} points less, or {hours:.3g} h of a run of {_time(question.run_s)}"


def recommended(usable: Sequence[Choice]) -> Choice | None:
    """Of the systems that nothing rules out: the best exact one; a lossy one only where there is none.

    What lost updates do to a model is not in an ETTR, so a higher one does not make up for them. Of exact ones that are
    the same within noise it is `SIMPLEST`, if that is among them.
    """
    best = max(usable, key=lambda choice: (choice.exact, choice.ettr.mean), default=None)
    if best is None or not best.exact:
        return best
    simple = (one for one in usable if one.system == SIMPLEST and best.ettr.mean - one.ettr.mean <= noise(best, one))
    return next(simple, best)


def reasons(question: Question, choices: Sequence[Choice], chosen: Choice | None) -> Iterator[str]:
    """Why this one, what it costs, what the others lack, and what is refused.

    Args:
        question: The question that was asked.
        choices: The best setting of each system, refused ones included, in the order in which they are reported.
        chosen: The recommended one of `choices`; None: none can be used.
    """
    if chosen is None:
        yield _none_usable(choices)
    else:
        yield _what(question, chosen)
        yield _cost(question, chosen)
        yield _worst(question, chosen)
        usable = [choice for choice in choices if not choice.refused and choice is not chosen]
        yield from (_beside(chosen, other) for other in _nearest(usable, chosen))
    for choice in choices:
        if choice.refused:
            yield f"{choice.system} is refused: it {choice.refused}."


def explanation(question: Question, choices: Sequence[Choice], chosen: Choice | None) -> Iterator[str]:
    """What is gained, where a fault's time goes, and what the next best exact system lacks.

    Args:
        question: The question that was asked.
        choices: The best setting of each system, refused ones included, in the order in which they are reported.
        chosen: The recommended one of `choices`; None: none can be used.
    """
    if chosen is None:
        yield _none_usable(choices)
        return
    yield _what(question, chosen)
    parts = chosen.parts_s
    most = max(parts, key=lambda name: parts[name])
    yield (
        f"A fault costs {_time(chosen.recovery_s)}, most of it in {most} ({_time(parts[most])}), and checkpoints add"
        f" {100 * chosen.overhead_share:.1f} % to an iteration of {_time(question.cost.iteration_s)}."
    )
    usable = [choice for choice in choices if not choice.refused and choice is not chosen]
    yield next((_beside(chosen, other) for other in _nearest(usable, chosen)), "Nothing else can be used here.")


def _none_usable(choices: Sequence[Choice]) -> str:
    """Systems that cannot run the job at all are no choices: what those lack is said elsewhere."""
    if choices:
        return "No system can be used: give checkpoints more host memory, or train on more nodes."
    return "No system can be used: none of those that were asked for can run this job; leave out --system."


def described(choice: Choice) -> str:
    """The settings of a system, on one line."""
    if choice.never:
        return "no checkpoints"
    known = []
    if choice.window > 1:
        known.append(f"window W = {choice.window}")
    else:
        known.append(_every(choice.interval))
    if choice.settings.get("replicas") is not None:
        known.append(f"r = {choice.settings['replicas']}")
    if "local" in choice.settings:
        known.append("local recovery from logs" if choice.settings["local"] else "global recovery, no logs")
    if choice.k_share < 1:
        known.append(f"{100 * choice.k_share:.3g} % of the experts at first")
    if choice.budget is not None:
        known.append(f"at most {100 * choice.budget:.2g} % of the tokens lost")
    return ", ".join(known)


def _every(interval: int) -> str:
    return "every iteration" if interval == 1 else f"every {interval} iterations"


def _what(question: Question, chosen: Choice) -> str:
    return (
        f"Use {chosen.system} ({described(chosen)}): with a fault every {_time(question.mtbf_s)},"
        f" {_ettr(chosen)} of the time is training that counts."
    )


def _ettr(choice: Choice) -> str:
    return f"{100 * choice.ettr.mean:.1f} % (+- {100 * choice.ettr.half_width:.1f})"


def _cost(question: Question, chosen: Choice) -> str:
    taken = (
        f"It takes {_gigabytes(chosen.memory_bytes)} of the {_gigabytes(question.limit_bytes)} of host memory that"
        " checkpoints may have on a node."
        if chosen.memory_bytes
        else "It takes no host memory."
    )
    return (
        f"Checkpoints add {100 * chosen.overhead_share:.1f} % to an iteration of {_time(question.cost.iteration_s)}; a"
        f" fault costs {_time(chosen.recovery_s)} on average, which is"
        f" {100 * chosen.recovery_s / question.mtbf_s:.1f} % of the time between two. {taken}"
    )


def _worst(question: Question, chosen: Choice) -> str:
    loss = (
        "no update is ever lost"
        if chosen.exact
        else f"up to {100 * chosen.lost_share:.2g} % of a run's tokens lose their updates"
    )
    text = (
        f"At worst a fault of one node makes {_iterations(chosen.worst_iterations)} be trained again"
        f" ({_time(chosen.worst_s)} in all); {loss}."
    )
    replicas = chosen.settings.get("replicas")
    if replicas is None or question.nodes == 1:
        return text
    setting = question.setting
    stored = persist_interval(question, chosen) + setting.persist_iterations
    peers = "its one peer" if replicas == 1 else f"all {replicas} peers with its replicas"
    return (
        f"{text} If a node and {peers} are lost together, training goes back to a state in storage that is up to"
        f" {_time(stored * setting.iteration_s)} old: with --moe-ckpt-unit they are of different racks."
    )


def _nearest(usable: Sequence[Choice], chosen: Choice) -> Iterator[Choice]:
    """The best other exact system that checkpoints, and the best lossy one."""
    for exact in (True, False):
        kind = [choice for choice in usable if choice.exact == exact and not choice.never]
        if kind:
            yield max(kind, key=lambda choice: choice.ettr.mean)


def _beside(chosen: Choice, other: Choice) -> str:
    gap = chosen.ettr.mean - other.ettr.mean
    if abs(gap) <= noise(chosen, other):
        why = f"its {_ettr(other)} is the same within noise"
        if chosen.exact and not other.exact:
            return (
                f"{other.system} is not better: {why}, and it loses updates ({100 * other.lost_share:.2g} % of tokens)."
            )
        return f"{other.system} would do as well: {why}; it takes {_gigabytes(other.memory_bytes)} per node."
    if gap < 0 and chosen.exact and not other.exact:
        lost = f"{100 * other.lost_share:.2g} % of tokens"
        return f"{other.system} would reach {_ettr(other)}, but it loses updates ({lost}): take it if your model may."
    if gap < 0:
        return f"{other.system} would reach {_ettr(other)}."
    return f"{other.system} ({described(other)}) reaches {_ettr(other)}: {_lack(chosen, other)}."


def _lack(chosen: Choice, other: Choice) -> str:
    """Where the lower ETTR comes from: overhead, recoveries, or overhead that grows as faults raise K."""
    slower, costlier = other.overhead_share - chosen.overhead_share, other.recovery_s - chosen.recovery_s
    parts = []
    if costlier > 0:
        parts.append(f"a fault costs it {_time(other.recovery_s)} instead of {_time(chosen.recovery_s)}")
    if slower > 0.001:
        parts.append(f"its checkpoints add {100 * other.overhead_share:.1f} % to an iteration")
    if not other.exact and other.last_overhead_share > other.overhead_share + 0.001:
        parts.append(
            f"before faults use up its budget of lost tokens, it saves more experts, which adds"
            f" {100 * other.last_overhead_share:.0f} %"
        )
    return " and ".join(parts) or "chance in its runs"


def _iterations(count: int) -> str:
    return "1 iteration" if count == 1 else f"{count:,} iterations"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def _time(seconds: float) -> str:
    """A duration as people say it."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
