"""The flags of training with which a job runs what was recommended, to paste behind its command."""

from __future__ import annotations

from collections.abc import Callable

from .choices import Choice, Question

STRATEGIES = {
    "none": "none",
    "checkfreq": "full",
    "gemini": "full",
    "torch_dist": "none",
    "torch_dist_async": "none",
    "moc": "pec",
    "moetion": "selective",
    "moevement": "sparse",
}
"""The papers' systems by the words of `--moe-ckpt-strategy`; torch_dist is Megatron-Core's own checkpoints."""


def flags_of(question: Question, choice: Choice) -> str:
    """The flags, on one line; empty for no checkpoints.

    Args:
        question: The job and its cluster.
        choice: The system and setting to write as flags.
    """
    made = _FLAGS.get(choice.system)
    return made(question, choice) if made is not None and not choice.never else ""


def systems_of(word: str) -> tuple[str, ...]:
    """The systems that a person means by the name of a system or of a strategy."""
    return (word,) if word in STRATEGIES else tuple(name for name, own in STRATEGIES.items() if own == word != "none")


def _full(question: Question, choice: Choice) -> str:
    interval = f" --moe-ckpt-interval {choice.interval}"
    return f"--moe-ckpt-strategy full{interval}{_replicas(choice)}{_storage(question, choice)}"


def _stored(question: Question, choice: Choice) -> str:
    return (
        "--moe-ckpt-strategy full --moe-ckpt-interval-policy checkfreq --moe-ckpt-replicas 0"
        " --moe-ckpt-persist-dir DIR --moe-ckpt-persist-interval 1"
    )


def _sparse(question: Question, choice: Choice) -> str:
    window = f" --moe-ckpt-window {choice.window}"
    recovery = " --moe-ckpt-recovery global" if choice.settings.get("local") is False else ""
    kept = f"{window}{_replicas(choice)}{recovery}{_storage(question, choice)}"
    # On GPUs it is refused without: iterations that are replayed have to come out to the same bits.
    return f"--moe-ckpt-strategy sparse{kept} --deterministic-mode"


def _partial(question: Question, choice: Choice) -> str:
    experts = max(1, round(choice.k_share * question.job.shape.num_experts))
    budget = "" if choice.budget is None else f" --moe-ckpt-plt-threshold {choice.budget:.3g}"
    kept = f"{budget}{_replicas(choice)}{_storage(question, choice)}"
    return f"--moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot {experts}{kept}"


def _selective(question: Question, choice: Choice) -> str:
    return f"--moe-ckpt-strategy selective{_replicas(choice)}{_storage(question, choice)}"


def _dense(question: Question, choice: Choice) -> str:
    behind = " --async-save --use-persistent-ckpt-worker" if choice.system == "torch_dist_async" else ""
    return f"--save DIR --load DIR --save-interval {choice.interval}{behind}"


def _storage(question: Question, choice: Choice) -> str:
    """What the loss of a node with all its peers goes back to; the simulation counts on it."""
    return f" --moe-ckpt-persist-dir DIR --moe-ckpt-persist-interval {persist_interval(question, choice)}"


def persist_interval(question: Question, choice: Choice) -> int:
    """Iterations between two states in storage with the flags of a choice.

    Args:
        question: What the job is.
        choice: Keeps snapshots in memory.
    """
    return max(question.setting.persist_interval, choice.interval)


def _replicas(choice: Choice) -> str:
    count = choice.settings.get("replicas")
    return "" if count is None else f" --moe-ckpt-replicas {count}"


_FLAGS: dict[str, Callable[[Question, Choice], str]] = {
    "checkfreq": _stored,
    "gemini": _full,
    "torch_dist": _dense,
    "torch_dist_async": _dense,
    "moc": _partial,
    "moetion": _selective,
    "moevement": _sparse,
}
