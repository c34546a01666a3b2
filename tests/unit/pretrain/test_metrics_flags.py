"""What a job's flags say of its metrics: where they go, and how many operations an iteration has."""

from __future__ import annotations

from megatron_flags import judged, parser

from megatron.core.dist_checkpointing.moe.types import ModelShape
from megatron.pretrain.metrics import MetricsSettings
from megatron.pretrain.metrics.settings import from_flags
from megatron.training.training import num_floating_point_operations
from moe_ckpt.simulator.cost import operator_flops

MODEL = """--device cpu --transformer-impl local --no-rope-fusion --distributed-backend gloo --num-layers 3
--hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --kv-channels 16 --group-query-attention
--num-query-groups 2 --swiglu --disable-bias-linear --normalization RMSNorm --num-experts 8 --moe-router-topk 2
--moe-ffn-hidden-size 96 --moe-layer-freq [0,1,1] --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data"""


def test_every_sink_of_the_driver_has_a_flag() -> None:
    args = parser().parse_args("--metrics-jsonl a --metrics-textfile b --metrics-port 9".split())
    assert from_flags(args, tensorboard="c", wandb="d") == MetricsSettings("a", "b", 9, "c", "d")


def test_the_operations_of_an_iteration_are_those_that_the_planner_counts() -> None:
    args = judged(MODEL.split(), 1)
    args.padded_vocab_size = 512
    shape = ModelShape(
        "m", 3, 64, 4, 512, 256, 8, 2, 96, (0, 1, 1), num_query_groups=2, gated_linear_unit=True, kv_channels=16
    )
    planned = sum(operator_flops(shape, 32).values())
    # Megatron-LM leaves out routers and norms; of the scores of causal attention both count one half.
    left_out = 6 * (2 * 64 * 8 + 3 * 2 * 64)
    assert num_floating_point_operations(args, 4) == 4 * 32 * (planned - left_out)
