"""The precisions of MoEvement Table 7, and its optimizers over other weights, as flags."""

from __future__ import annotations

from sparse_runs import FP16

ENGINE = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
PRECISION_AWARE = ("--use-precision-aware-optimizer",)
EIGHT_BITS = (
    "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
    " --fp8-param-gather"
)
ROWS: dict[str, str] = {
    "row 1": f"{' '.join(FP16)} --accumulate-allreduce-grads-in-fp32 --main-params-dtype fp16 fp16 fp16",
    "row 2": EIGHT_BITS,
    "remainders": "--bf16 --main-grads-dtype bf16 bf16 bf16",
    "row 3": f"{EIGHT_BITS} --main-params-dtype fp16 fp32 fp32",
    "row 4": f"{EIGHT_BITS} --main-params-dtype fp16 fp8 fp16",
    "row 5": f"{EIGHT_BITS} --fp8-main-params fp8 fp16",
    "row 4 over bf16": "--bf16 --main-params-dtype fp16 fp8 fp16",
    "row 5 over bf16": "--bf16 --fp8-main-params fp8 fp16",
}
"""But for row 2, which has the ordinary optimizer, last the dtypes of both moments."""


def model(name: str) -> tuple[str, ...]:
    """The flags of a row."""
    if name == "row 2":
        return (*ENGINE, *ROWS[name].split())
    *given, first, second = ROWS[name].split()
    return (*ENGINE, *PRECISION_AWARE, *given, "--exp-avg-dtype", first, "--exp-avg-sq-dtype", second)
