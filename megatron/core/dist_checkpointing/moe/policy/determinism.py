"""What has to be set for GPUs to give the same bits again, and for what is set whether they will.

The settings, and their values, are those of Megatron-LM's `--deterministic-mode` in core 0.19, which an older release
asks for in part. `Tree` is not among the algorithms of NCCL although 0.17 and 0.18 accept it: the order of its sums
depends on where nodes are, and a fault may replace one. Nor is `^NVLS`, which all accept: it leaves NCCL `Tree`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

NCCL_ALGORITHMS = ("Ring", "CollnetDirect", "CollnetChain")
_WORKSPACES = (":4096:8", ":16:8")


@dataclass(frozen=True)
class DeviceSettings:
    """How one process computes.

    Attributes:
        device: Where: cuda or cpu.
        ranks: Of the job.
        environment: Of the process.
        transformer_engine: Whether layers are those of Transformer Engine.
        deterministic_mode: Of core's TransformerConfig.
        deterministic_algorithms: Whether torch refuses others; that it warns of them is not enough.
        fusions: Names of options that are on and have no deterministic kernels, by the flag that turns them on.
        dsa_kernel_backend: Of fused kernels for DeepSeek's sparse attention: none, tilelang or cudnn.
    """

    device: str
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    transformer_engine: bool = False
    deterministic_mode: bool = False
    deterministic_algorithms: bool = False
    fusions: tuple[str, ...] = ()
    dsa_kernel_backend: str = "none"


NONDETERMINISTIC_OPTIONS = {
    "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion",
    "tp_comm_overlap": "--tp-comm-overlap",
}
"""Fields of TransformerConfig, and the flags of Megatron-LM that set them."""


def obstacles(settings: DeviceSettings) -> Iterator[str]:
    """A sentence for each setting with which an iteration that is run again may give other bits, and what to set.

    None on the CPU, whose kernels repeat themselves.
    """
    if settings.device != "cuda":
        return
    if not settings.deterministic_mode:
        yield "deterministic_mode is off in the model's configuration: give --deterministic-mode"
    if not settings.deterministic_algorithms:
        yield (
            "torch may use algorithms that are not deterministic: give --deterministic-mode, or call"
            " torch.use_deterministic_algorithms(True) before the first kernel runs"
        )
    for name in settings.fusions:
        yield f"{name} is on, whose kernels are not deterministic: leave out {NONDETERMINISTIC_OPTIONS[name]}"
    if settings.dsa_kernel_backend != "none":
        # Those of tilelang add gradients up atomically, in any order.
        known = "" if settings.dsa_kernel_backend == "tilelang" else "known to be "
        yield (
            f"dsa_kernel_backend is {settings.dsa_kernel_backend}, whose kernels are not {known}deterministic: give"
            " --dsa-kernel-backend none"
        )
    needed = {
        "NCCL_ALGO": settings.ranks > 1,
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": settings.transformer_engine,
        "CUBLAS_WORKSPACE_CONFIG": True,
    }
    yield from _wrong(settings.environment, [name for name, is_needed in needed.items() if is_needed])


def _wrong(environment: Mapping[str, str], names: list[str]) -> Iterator[str]:
    for name in names:
        value = environment.get(name)
        if value is None or not _is_deterministic(name, value):
            found = "is not set" if value is None else f"is {value}"
            yield f"{name} {found}: set it to {_choices(name)} before the job starts"


def _is_deterministic(name: str, value: str) -> bool:
    if name == "NCCL_ALGO":
        tokens = [token.strip() for token in value.split(",") if token.strip()]
        return bool(tokens) and all(token in NCCL_ALGORITHMS for token in tokens)
    return value in (_WORKSPACES if name == "CUBLAS_WORKSPACE_CONFIG" else ("0",))


def _choices(name: str) -> str:
    if name == "NCCL_ALGO":
        return f"{', '.join(NCCL_ALGORITHMS[:-1])} or {NCCL_ALGORITHMS[-1]}, or several of them"
    return " or ".join(_WORKSPACES) if name == "CUBLAS_WORKSPACE_CONFIG" else "0"
